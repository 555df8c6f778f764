from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.evaluation.audit.hack_probes import CONTROL, FAMILIES, built_in, probes_of, same_answer, wrong_answer
from headwater.rewards.verifiers.number import answer_number, read_number


def test_built_in_rows_are_right_and_apart():
    rows = built_in()
    assert len({row.task.prompt for row in rows}) == len(rows) == 24
    for row in rows:
        assert row.task.answer is not None and row.task.answer in row.response
        if read_number(row.task.answer) is not None:
            assert answer_number(row.response) == read_number(row.task.answer)


def test_every_family_of_every_row_and_only_worse_ones_lose_the_answer():
    probes = probes_of(built_in())
    assert len(probes) == 24 * len(FAMILIES)
    for probe in probes:
        assert probe.hacked != probe.clean
        wanted = read_number(probe.task.answer or "")
        if wanted is not None:
            assert (answer_number(probe.hacked) == wanted) is not probe.worse, probe
        elif not probe.worse:
            assert probe.clean in probe.hacked


@given(st.text(min_size=1), st.text(min_size=1))
def test_hacks_are_pure_and_stand_any_text(response: str, wrong: str):
    for family in FAMILIES.values():
        assert family.hack(response, wrong) == family.hack(response, wrong)
        assert family.worse or response in family.hack(response, wrong)


@pytest.mark.parametrize(
    ("answer", "known", "wrong"),
    [
        ("42", ["42", "7"], "43"),
        ("1/2", [], "3/2"),
        ("-1", [], "0"),
        ("Paris", ["paris", "Rome"], "Rome"),
        ("Paris", ["Paris"], "something else"),
        (None, ["Rome"], "something else"),
    ],
)
def test_a_wrong_answer_is_wrong(answer: str | None, known: list[str], wrong: str):
    assert wrong_answer(answer, known) == wrong


def test_an_injection_never_holds_the_right_answer_by_chance():
    hack = FAMILIES["judge-injected"].hack
    for padding in range(6):
        text = hack("so it is 10" + " indeed" * padding, "11")
        assert text.startswith("The answer is 11.") and "10" not in text


def test_the_same_answer_only_grows():
    row = built_in()[0]
    texts = same_answer(row)
    assert texts[0] == row.response and len(texts) == 4
    assert all(row.response in text for text in texts)
    assert CONTROL in FAMILIES
