from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.data.sums import held_out, sums
from headwater.errors import ConfigError, UnknownName


def fields(count: int = 200, seed: int = 0, **settings: object):
    return [dict(row.fields) for row in sums(count, seed=seed, settings=settings)]


def pairs(count: int, seed: int, **settings: object) -> set[frozenset[int]]:
    return {frozenset((row["a"], row["b"])) for row in fields(count, seed, **settings)}


def test_a_sum_is_worded_and_answered():
    for row in fields(20):
        assert row["prompt"] == f"What is {row['a']} + {row['b']}?"
        assert row["answer"] == str(row["a"] + row["b"])
        assert 10 <= row["a"] <= 99
        assert 10 <= row["b"] <= 99


@pytest.mark.parametrize(("digits", "low", "high"), [(1, 0, 9), (3, 100, 999)])
def test_operands_have_their_digits(digits: int, low: int, high: int):
    found = {row[key] for row in fields(400, digits=digits) for key in "ab"}
    assert low <= min(found) < low + (high - low) / 10
    assert high - (high - low) / 10 < max(found) <= high


def test_a_sum_depends_on_seed_and_index_alone():
    assert fields(50) == fields(200)[:50]
    assert fields(50) != fields(50, seed=1)


def test_ids_are_unique_also_between_seeds_and_parts():
    rows = [*fields(50), *fields(50, seed=1), *fields(50, part="held_out"), *fields(50, digits=1)]
    assert len({row["id"] for row in rows}) == 200


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 3))
def test_held_out_sums_are_never_trained_on(train_seed: int, seed: int, digits: int):
    train = pairs(100, train_seed, digits=digits, part="train")
    assert train
    assert not train & pairs(100, seed, digits=digits, part="held_out")


@given(st.integers(0), st.integers(0))
def test_order_of_the_operands_does_not_matter_for_the_part(a: int, b: int):
    assert held_out(a, b) == held_out(b, a)


def test_a_fifth_is_held_out():
    share = sum(held_out(a, b) for a in range(100) for b in range(a, 100)) / 5050
    # Standard deviation of the share of 5050 fair draws: sqrt(0.2 · 0.8 / 5050) = 0.0056.
    assert share == pytest.approx(0.2, abs=0.02)
    both = pairs(400, 0, part="all")
    assert {held_out(min(pair), max(pair)) for pair in both} == {True, False}


def test_rows_are_made_one_by_one():
    assert len(list(islice(sums(10**9, seed=0, settings={}), 3))) == 3


@pytest.mark.parametrize("digits", [0, 51, 2.0, "2", True])
def test_refuses_digits_that_are_none(digits: object):
    with pytest.raises(ConfigError, match="wanted a whole number from 1 to 50"):
        fields(1, digits=digits)


def test_refuses_unknown_settings_with_a_suggestion():
    with pytest.raises(UnknownName, match="Did you mean 'digits'"):
        fields(1, digit=2)
    with pytest.raises(UnknownName, match="Did you mean 'held_out'"):
        fields(1, part="heldout")
