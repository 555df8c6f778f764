import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.rewards.verifiers.thinking import after_thinking


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4", "4"),
        ("<think>5</think>4", "4"),
        ("5</think>4", "4"),  # the template opened it
        ("<think>5</think>6<think>7</think>4", "4"),
        ("<think>4", ""),
        ("<think>5</think>4<think>6", ""),
    ],
)
def test_reads_only_what_follows_the_thinking(text: str, answer: str):
    assert after_thinking(text) == answer


@given(st.text(alphabet=st.characters(exclude_characters="<")), st.text())
def test_thinking_changes_nothing(answer: str, thought: str):
    assert after_thinking(f"<think>{thought}</think>{answer}") == answer
