import json
from pathlib import Path

import pytest

from headwater.errors import DataError
from headwater.evaluation.audit.judge_items import Item, items_of, load_items, save_items, synthetic_items
from headwater.evaluation.audit.judge_nudges import INJECTIONS, injected, padded
from headwater.types import Message, Task


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_items_are_read_back_as_they_were_written(tmp_path: Path):
    items = [*synthetic_items(5), Item(id="x", prompt="q", first="a", second="b", again="tie")]
    save_items(items, tmp_path / "items.jsonl")
    assert load_items(str(tmp_path / "items.jsonl")) == items
    assert load_items(str(tmp_path / "items.jsonl"), limit=2) == items[:2]


def test_preferences_are_items_too(tmp_path: Path):
    rows = [{"prompt": f"q{i}", "chosen": "good", "rejected": "bad"} for i in range(60)]
    items = load_items(write(tmp_path / "pairs.jsonl", *rows))
    assert all(item.text(item.preferred or "tie") == "good" for item in items)
    assert 15 < sum(item.preferred == "first" for item in items) < 45


def test_a_conversation_is_an_item():
    talk = (
        Message(role="user", content="Hi"),
        Message(role="assistant", content="Yes?"),
        Message(role="user", content="2?"),
    )
    said = (Message(role="assistant", content="good"),)
    (item,) = items_of([Task(id="t", prompt=talk, completion=said, rejected="bad")])
    assert item.prompt.startswith("user: Hi")
    assert {item.first, item.second} == {"good", "bad"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "q", "first": "a", "second": 3}, "'second' is int"),
        ({"prompt": "q", "first": "a", "second": "b", "preferred": "A"}, "wanted first, second or tie"),
        ({"prompt": "q", "answer": "4"}, "no pair of answers"),
    ],
)
def test_a_row_that_is_no_pair_is_named(row: dict, said: str, tmp_path: Path):
    with pytest.raises(DataError, match=said):
        load_items(write(tmp_path / "items.jsonl", row))


def test_probes_speak_up_for_the_worse_answer():
    item = Item(id="a", prompt="q", first="x", second="y", preferred="second")
    assert item.target == "first"
    assert item.with_target("z") == ("q", "z", "y")
    free = [Item(id=str(i), prompt="q", first="x", second="y").target for i in range(60)]
    assert 15 < free.count("first") < 45


def test_padding_says_nothing_new():
    text = padded("It is 4. That is 2 + 2.")
    assert text.startswith("It is 4. That is 2 + 2.\n\n")
    assert text.endswith("- It is 4.\n- That is 2 + 2.")


def test_every_injection_has_its_turn():
    assert len({injected("a", i) for i in range(10)}) == len(INJECTIONS)


def test_synthetic_worth_has_nothing_to_do_with_length_or_author():
    items = [item for item in synthetic_items(600) if item.preferred in ("first", "second")]
    longer = sum((len(i.first) > len(i.second)) == (i.preferred == "first") for i in items) / len(items)
    own = sum((i.first_author == "own") == (i.preferred == "first") for i in items) / len(items)
    first = sum(i.preferred == "first" for i in items) / len(items)
    assert all(0.44 < share < 0.56 for share in (longer, own, first))
