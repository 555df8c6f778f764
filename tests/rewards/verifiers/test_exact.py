import asyncio

import pytest

from headwater.rewards.verifiers.exact import exact
from headwater.types import Group, Span, Task, Trajectory


def judged(answer: str | None, text: str, **settings: bool):
    task = Task(id="t", prompt="?", answer=answer)
    trajectory = Trajectory(task_id="t", spans=(Span(author="policy", tokens=(1,), text=text),))
    (signal,) = asyncio.run(exact(**settings)(Group(task=task, trajectories=(trajectory,))))
    return signal


@pytest.mark.parametrize(
    ("answer", "text", "settings", "reward"),
    [
        ("Paris", " Paris\n", {}, 1.0),
        ("Paris", "paris", {}, 0.0),
        ("Paris", "PARIS", {"casefold": True}, 1.0),
        ("Paris", "It is Paris", {"casefold": True}, 0.0),
        ("a b", "a\n b", {}, 0.0),
        ("a b", "a\n b", {"collapse": True}, 1.0),
        ("a b", "ab", {"collapse": True}, 0.0),
        ("a", "<think>b</think>\na", {}, 1.0),
        ("a", "<think>a", {}, 0.0),
        ("a", "", {}, 0.0),
    ],
)
def test_compares_the_whole_answer(answer: str, text: str, settings: dict[str, bool], reward: float):
    assert judged(answer, text, **settings).values == (reward,)


def test_abstains_without_answer():
    assert judged(None, "a").status == "abstained"
