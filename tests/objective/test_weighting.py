from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.objective.weighting import fixed_length, sequence_mean, sequence_sum, token_mean

# sequences of 1, 3 and 2 tokens; the last takes no part
SEQUENCE = torch.tensor([0, 1, 1, 1, 2, 2])
INCLUDED = torch.tensor([True, True, False])


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        (token_mean, [1 / 4] * 4),  # 4 tokens take part
        (sequence_mean, [1 / 2, 1 / 6, 1 / 6, 1 / 6]),  # 2 answers, of 1 and 3 tokens
        (sequence_sum, [1 / 2] * 4),
        (fixed_length, [1 / 20] * 4),  # 2 answers of at most 10 tokens
    ],
)
def test_by_hand(weighting, expected):
    assert weighting(SEQUENCE, INCLUDED, 10).tolist() == pytest.approx([*expected, 0.0, 0.0])


LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=6)


@given(LENGTHS)
def test_means_sum_to_one(lengths):
    sequence = torch.tensor([s for s, n in enumerate(lengths) for _ in range(n)])
    included = torch.ones(len(lengths), dtype=torch.bool)
    for weighting in (token_mean, sequence_mean):
        assert weighting(sequence, included, 8).sum().item() == pytest.approx(1.0)


@given(LENGTHS)
def test_what_takes_no_part_changes_nothing(lengths):
    sequence = torch.tensor([s for s, n in enumerate(lengths) for _ in range(n)])
    included = torch.ones(len(lengths), dtype=torch.bool)
    more = torch.cat([sequence, torch.full((5,), len(lengths))])
    without = torch.cat([included, torch.tensor([False])])
    for weighting in (token_mean, sequence_mean, sequence_sum, fixed_length):
        together = weighting(more, without, 8)
        torch.testing.assert_close(together[:-5], weighting(sequence, included, 8))
        assert together[-5:].tolist() == [0.0] * 5


def test_nobody_takes_part_without_a_division_by_zero():
    nobody = torch.zeros(3, dtype=torch.bool)
    for weighting in (token_mean, sequence_mean, sequence_sum, fixed_length):
        assert weighting(SEQUENCE, nobody, 8).tolist() == [0.0] * 6
