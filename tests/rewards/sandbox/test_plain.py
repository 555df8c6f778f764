from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.rewards.sandbox.plain import MAX_DEPTH, NotPlain, decode, encode, same

KEYS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.tuples(st.integers())
)
VALUES: Any = st.recursive(
    KEYS | st.complex_numbers(allow_nan=False) | st.frozensets(KEYS, max_size=4) | st.sets(KEYS, max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from("iflctezdba"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=12,
)


@given(VALUES)
def test_a_value_comes_back_as_it_was(value: Any):
    tree = json.loads(json.dumps(encode(value)))
    back = decode(tree)
    assert back == value
    assert type(back) is type(value)
    assert same(encode(value), tree)


@given(VALUES, VALUES)
def test_same_is_equality_and_equality_of_types(left: Any, right: Any):
    assert same(encode(left), encode(right), exact=False) or left != right
    if same(encode(left), encode(right)):
        assert left == right
        assert type(left) is type(right)


@given(VALUES, JSON)
def test_no_tree_breaks_the_comparison(wanted: Any, found: Any):
    for exact in (True, False):
        if same(encode(wanted), found, exact=exact):
            assert decode(found) == wanted


@given(JSON)
def test_no_tree_breaks_the_reader(tree: Any):
    try:
        decode(tree)
    except NotPlain:
        return


@pytest.mark.parametrize(
    "value", [math.nan, [math.nan], {math.nan}, {1: math.nan}, {math.nan: 1}, complex(0, math.nan)]
)
def test_nan_is_the_same_as_nothing(value: Any):
    for exact in (True, False):
        assert not same(encode(value), encode(value), exact=exact, tolerance=0.5)


@pytest.mark.parametrize(
    "value", [object(), int, len, 1j.__class__, (n for n in ()), type("I", (int,), {})(1), range(3)]
)
def test_what_is_no_plain_data(value: Any):
    with pytest.raises(NotPlain):
        encode(value)


def test_what_is_too_deep_or_large():
    deep: list[Any] = []
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    for value in (deep, "x" * 101, [0] * 50, 1 << 1000):
        with pytest.raises(NotPlain):
            encode(value, size=100)


@pytest.mark.parametrize("tag", ["l", "t", "e", "z", "i", "d", "c"])
def test_a_tree_that_is_deeper_than_any_value(tag: str):
    tree: Any = 0
    for _ in range(600):
        tree = [tag, [tree, tree] if tag == "d" else [tree]]
    for wanted in ({(1, 2)}, [[1]], {1: 2}, {(): ()}):
        assert not same(encode(wanted), tree)
        assert not same(encode(wanted), ["e", [tree]], exact=False)
