from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.objective.weighting import fixed_length, group_mean, sequence_mean, sequence_sum, token_mean
from headwater.types import Extent

MEANS = (token_mean, sequence_mean, group_mean)
ALL = (*MEANS, sequence_sum, fixed_length)


def extent(*groups, length=8):
    """Groups as lists of the lengths of their sequences."""
    lengths = [n for group in groups for n in group]
    return Extent(
        sequence_T=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.long)),
        group_S=torch.tensor([g for g, group in enumerate(groups) for _ in group], dtype=torch.long),
        length=length,
    )


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        (token_mean, [1 / 6] * 6),  # 6 tokens
        (sequence_mean, [1 / 3, 1 / 9, 1 / 9, 1 / 9, 1 / 6, 1 / 6]),  # 3 answers, of 1, 3 and 2 tokens
        (sequence_sum, [1 / 3] * 6),
        (fixed_length, [1 / 30] * 6),  # 3 answers of at most 10 tokens
        (group_mean, [1 / 8] * 4 + [1 / 4] * 2),  # 2 groups, of 4 and 2 tokens
    ],
)
def test_by_hand(weighting, expected):
    assert weighting(extent([1, 3], [2], length=10)).tolist() == pytest.approx(expected)


GROUPS = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4)


@given(GROUPS)
def test_means_sum_to_one(groups):
    for weighting in MEANS:
        assert weighting(extent(*groups)).sum().item() == pytest.approx(1.0)


@given(GROUPS, st.randoms())
def test_the_order_of_sequences_changes_nothing(groups, random):
    mixed = [random.sample(group, len(group)) for group in groups]
    for weighting in ALL:
        there, here = weighting(extent(*groups)), weighting(extent(*mixed))
        assert sorted(there.tolist()) == pytest.approx(sorted(here.tolist()))


def test_nobody_takes_part_without_a_division_by_zero():
    for weighting in ALL:
        assert weighting(extent()).tolist() == []
