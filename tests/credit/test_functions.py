from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.credit.functions import centred, leave_one_out, zscore

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=9).map(lambda r: torch.tensor(r, dtype=torch.float64))


def _close(got, wanted):
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=got.dtype), atol=1e-5, rtol=1e-5)


def test_one_right_of_eight_by_hand():
    # mean 1/8; sample variance (7·(1/8)² + (7/8)²) / 7 = 0.125, standard deviation 0.353553
    reward = torch.tensor([1.0] + [0.0] * 7)
    _close(centred(reward), [0.875] + [-0.125] * 7)
    _close(zscore(reward, eps=0.0), [2.474874] + [-0.353553] * 7)
    # the others' mean is 0 for the right one, 1/7 for each wrong one
    _close(leave_one_out(reward), [1.0] + [-1 / 7] * 7)


@given(REWARDS)
def test_leave_one_out_is_the_mean_of_the_others_and_a_multiple_of_centred(reward):
    count = len(reward)
    others = [(reward.sum() - reward[i]) / (count - 1) for i in range(count)]
    torch.testing.assert_close(leave_one_out(reward), reward - torch.stack(others))
    torch.testing.assert_close(leave_one_out(reward), centred(reward) * count / (count - 1))


@given(REWARDS)
def test_what_compares_sums_to_nothing(reward):
    for function in (centred, zscore, leave_one_out):
        assert function(reward).sum().abs().item() < 1e-6 * (1 + reward.abs().max().item()) * 1e2


@given(REWARDS, st.randoms())
def test_order_of_siblings_does_not_matter(reward, random):
    order = list(range(len(reward)))
    random.shuffle(order)
    for function in (centred, zscore, leave_one_out):
        torch.testing.assert_close(function(reward[order]), function(reward)[order])


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, 1e-9])
def test_a_flat_group_says_exactly_nothing(value):
    # 0.1 repeated has a float32 mean that is not 0.1: dividing by a spread of 1e-9 would explode
    assert zscore(torch.full((7,), value)).tolist() == [0.0] * 7


def test_one_sibling_cannot_be_compared():
    for function in (zscore, leave_one_out):
        with pytest.raises(AssertionError, match="two siblings"):
            function(torch.ones(1))
