from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from headwater.credit.functions import best_and_worst, centred, leave_one_out, mean_ratio, zscore

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=9).map(lambda r: torch.tensor(r, dtype=torch.float64))
SCORES = REWARDS.map(torch.abs)
COMPARING = (centred, zscore, leave_one_out)


def _close(got, wanted):
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=got.dtype), atol=1e-5, rtol=1e-5, equal_nan=True)


def test_one_right_of_eight_by_hand():
    # mean 1/8; sample variance (7·(1/8)² + (7/8)²) / 7 = 0.125, standard deviation 0.353553
    reward = torch.tensor([1.0] + [0.0] * 7)
    _close(centred(reward), [0.875] + [-0.125] * 7)
    _close(zscore(reward, eps=0.0), [2.474874] + [-0.353553] * 7)
    # population variance (7·(1/8)² + (7/8)²) / 8 = 7/64, standard deviation 0.330719
    _close(zscore(reward, eps=0.0, population=True), [2.645751] + [-0.377964] * 7)
    # the others' mean is 0 for the right one, 1/7 for each wrong one
    _close(leave_one_out(reward), [1.0] + [-1 / 7] * 7)
    # (1 - 1/8) / (1/8) = 7, (0 - 1/8) / (1/8) = -1
    _close(mean_ratio(reward), [7.0] + [-1.0] * 7)


@given(REWARDS)
def test_leave_one_out_is_the_mean_of_the_others_and_a_multiple_of_centred(reward):
    count = len(reward)
    others = [(reward.sum() - reward[i]) / (count - 1) for i in range(count)]
    torch.testing.assert_close(leave_one_out(reward), reward - torch.stack(others))
    torch.testing.assert_close(leave_one_out(reward), centred(reward) * count / (count - 1))


@given(REWARDS)
def test_the_population_s_spread_makes_a_z_score_larger_by_a_constant(reward):
    assume(reward.std() > 1e-6)
    ratio = math.sqrt(len(reward) / (len(reward) - 1))
    torch.testing.assert_close(zscore(reward, eps=0.0, population=True), zscore(reward, eps=0.0) * ratio)


@given(REWARDS)
def test_what_compares_sums_to_nothing(reward):
    for function in COMPARING:
        assert function(reward).sum().abs().item() < 1e-6 * (1 + reward.abs().max().item()) * 1e2


@given(SCORES, st.randoms())
def test_order_of_siblings_does_not_matter(reward, random):
    order = list(range(len(reward)))
    random.shuffle(order)
    for function in (*COMPARING, mean_ratio):
        torch.testing.assert_close(function(reward[order]), function(reward)[order])


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9, unique=True), st.randoms())
def test_order_of_siblings_does_not_matter_to_best_and_worst_where_there_are_no_ties(rewards, random):
    reward = torch.tensor(rewards, dtype=torch.float64)
    order = list(range(len(reward)))
    random.shuffle(order)
    torch.testing.assert_close(best_and_worst(reward[order]), best_and_worst(reward)[order], equal_nan=True)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, 1e-9])
def test_a_flat_group_says_exactly_nothing(value):
    # 0.1 repeated has a float32 mean that is not 0.1: dividing by a spread of 1e-9 would explode
    assert zscore(torch.full((7,), value)).tolist() == [0.0] * 7
    assert zscore(torch.full((7,), value), population=True).tolist() == [0.0] * 7
    assert mean_ratio(torch.full((7,), value)).tolist() == [0.0] * 7
    assert best_and_worst(torch.full((7,), value)).isnan().all()


@given(st.lists(st.booleans(), min_size=2, max_size=9).filter(any), st.randoms())
def test_mean_ratio_averages_over_successes_with_the_mean_of_all_as_control_variate(right, random):
    # MaxRL's estimator: any numbers will do for the score functions
    reward = torch.tensor(right, dtype=torch.float64)
    score = torch.tensor([random.uniform(-1, 1) for _ in right], dtype=torch.float64)
    wanted = score[reward == 1].mean() - score.mean()
    torch.testing.assert_close((mean_ratio(reward) * score).mean(), wanted)


def test_mean_ratio_of_a_mean_of_nothing_is_nothing_and_of_a_negative_one_is_refused():
    assert mean_ratio(torch.tensor([-1.0, 1.0])).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="rewards >= 0"):
        mean_ratio(torch.tensor([-1.0, 0.0]))


def test_the_first_best_is_preferred_to_the_first_worst():
    nan = float("nan")
    _close(best_and_worst(torch.tensor([0.5, 2.0, 2.0, 0.0, 0.0])), [nan, 1.0, nan, 0.0, nan])


def test_one_sibling_cannot_be_compared():
    for function in (zscore, leave_one_out):
        with pytest.raises(AssertionError, match="two siblings"):
            function(torch.ones(1))
