from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from headwater.credit.sequential import (
    aggregate,
    bi_level_gae,
    gae,
    overlong,
    reward_to_go,
    spread_turns,
    sum_turns,
    turn_gae,
    turn_returns,
    vtrace,
)

SHARE = st.floats(0, 1)


def _tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def _close(got, *wanted):
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, _tensor(*wanted), atol=1e-12, rtol=1e-12)


@st.composite
def episodes(draw):
    """Rewards, values (one more) and log-ratios of a few tokens."""
    count = draw(st.integers(1, 7))
    numbers = st.lists(st.floats(-3, 3), min_size=count, max_size=count)
    reward, value, log_rho = (_tensor(*draw(numbers)) for _ in range(3))
    return reward, torch.cat((value, _tensor(draw(st.floats(-3, 3))))), log_rho


@st.composite
def lengths(draw):
    return draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))


def _returns(reward, last, gamma):
    """What is still to come at each token, as a double loop over powers."""
    count = len(reward)
    return [
        sum(gamma ** (t - s) * float(reward[t]) for t in range(s, count)) + gamma ** (count - s) * float(last)
        for s in range(count)
    ]


def test_gae_by_hand():
    # TD errors 0.9·0.6 - 0.5 = 0.04, 0.9·0.7 - 0.6 = 0.03, 1 - 0.7 = 0.3; decay 0.45
    # A_1 = 0.03 + 0.45·0.3 = 0.165, A_0 = 0.04 + 0.45·0.165 = 0.11425
    _close(gae(_tensor(0, 0, 1), _tensor(0.5, 0.6, 0.7, 0), gamma=0.9, lam=0.5), 0.11425, 0.165, 0.3)


def test_what_is_to_come_after_the_last_token_is_added_to_its_reward():
    # 1 + 0.9·2 - 0.7 = 2.1
    _close(gae(_tensor(1), _tensor(0.7, 2), gamma=0.9, lam=0.5), 2.1)


@given(episodes(), SHARE)
def test_gae_with_lam_1_is_return_minus_value(episode, gamma):
    reward, value, _ = episode
    returns = _tensor(*_returns(reward, value[-1], gamma))
    torch.testing.assert_close(gae(reward, value, gamma=gamma, lam=1), returns - value[:-1])


@given(episodes(), SHARE)
def test_gae_with_lam_0_is_the_td_error(episode, gamma):
    reward, value, _ = episode
    torch.testing.assert_close(gae(reward, value, gamma=gamma, lam=0), reward + gamma * value[1:] - value[:-1])


@given(episodes(), SHARE, SHARE)
def test_gae_is_the_sum_of_td_errors_by_powers_of_its_decay(episode, gamma, lam):
    reward, value, _ = episode
    count = len(reward)
    error = [float(reward[t] + gamma * value[t + 1] - value[t]) for t in range(count)]
    wanted = [sum((gamma * lam) ** (t - s) * error[t] for t in range(s, count)) for s in range(count)]
    torch.testing.assert_close(gae(reward, value, gamma=gamma, lam=lam), _tensor(*wanted))


def test_estimates_have_no_gradient_and_are_worked_out_in_float64():
    reward, value = torch.tensor([0.1, 0.2], requires_grad=True), torch.tensor([0.3, 0.4, 0.5], requires_grad=True)
    trace = vtrace(reward, value, torch.zeros(2, requires_grad=True), gamma=1, lam=1)
    for got in (gae(reward, value, gamma=1, lam=1), reward_to_go(reward, gamma=1), *trace):
        assert not got.requires_grad and got.dtype == torch.float64


def test_rewards_to_go_by_hand():
    # 3; 2 + 0.5·3 = 3.5; 1 + 0.5·3.5 = 2.75
    _close(reward_to_go(_tensor(1, 2, 3), gamma=0.5), 2.75, 3.5, 3)
    _close(turn_returns(_tensor(1, 2, 3), gamma=0.5), 2.75, 3.5, 3)


@given(episodes(), SHARE)
def test_rewards_to_go_are_gae_without_values(episode, gamma):
    reward, value, _ = episode
    wanted = gae(reward, torch.zeros_like(value), gamma=gamma, lam=1)
    torch.testing.assert_close(reward_to_go(reward, gamma=gamma), wanted)


def test_vtrace_by_hand():
    # ratios 2 and 0.5, cut at 1: rho = c = 1, 0.5
    # d_1 = 0.5·(1 - 0.25) = 0.375, v_1 = 0.625; d_0 = 0.25 - 0.5, v_0 = 0.5 - 0.25 + (0.625 - 0.25) = 0.625
    # A_1 = 0.5·(1 - 0.25) = 0.375, A_0 = 0.625 - 0.5 = 0.125
    trace = vtrace(_tensor(0, 1), _tensor(0.5, 0.25, 0), _tensor(math.log(2), math.log(0.5)), gamma=1, lam=1)
    _close(trace.target_T, 0.625, 0.625)
    _close(trace.advantage_T, 0.125, 0.375)


@given(episodes(), SHARE, SHARE, st.floats(0.1, 3), SHARE)
def test_vtrace_is_the_sum_of_products_of_the_paper(episode, gamma, lam, rho_bar, share):
    reward, value, log_rho = episode
    count, c_bar = len(reward), rho_bar * share
    ratio = [math.exp(x) for x in log_rho.tolist()]
    rho, c = [min(rho_bar, x) for x in ratio], [lam * min(c_bar, x) for x in ratio]
    v = value.tolist()
    for s in reversed(range(count)):
        total = value[s].item()
        for t in range(s, count):
            error = rho[t] * float(reward[t] + gamma * value[t + 1] - value[t])
            total += gamma ** (t - s) * math.prod(c[s:t]) * error
        v[s] = total
    advantage = [rho[s] * float(reward[s] + gamma * v[s + 1] - value[s]) for s in range(count)]
    trace = vtrace(reward, value, log_rho, gamma=gamma, lam=lam, rho_bar=rho_bar, c_bar=c_bar)
    torch.testing.assert_close(trace.target_T, _tensor(*v[:-1]))
    torch.testing.assert_close(trace.advantage_T, _tensor(*advantage))


@given(episodes(), SHARE)
def test_vtrace_of_equal_policies_is_the_n_step_return(episode, gamma):
    reward, value, log_rho = episode
    trace = vtrace(reward, value, torch.zeros_like(log_rho), gamma=gamma, lam=1)
    returns = _tensor(*_returns(reward, value[-1], gamma))
    torch.testing.assert_close(trace.target_T, returns)
    torch.testing.assert_close(trace.advantage_T, returns - value[:-1])


def test_vtrace_survives_a_ratio_beyond_all_floats():
    trace = vtrace(_tensor(1), _tensor(0.5, 0), _tensor(1e4), gamma=1, lam=1)
    _close(trace.advantage_T, 0.5)


def test_vtrace_refuses_a_c_bar_above_rho_bar():
    with pytest.raises(AssertionError, match="c_bar <= rho_bar"):
        vtrace(_tensor(1), _tensor(0, 0), _tensor(0), gamma=1, lam=1, rho_bar=1, c_bar=2)


def test_turn_gae_by_hand():
    # turns of 2 and 1 tokens: states are read at tokens 0 and 2, values 0.5 and 0.2, and 0.4 at the end
    # d_1 = 1 + 0.5·0.4 - 0.2 = 1, d_0 = 0 + 0.5·0.2 - 0.5 = -0.4; A_0 = -0.4 + 0.25·1 = -0.15
    for inside in (0.9, -7.0):
        got = turn_gae(_tensor(0, 1), _tensor(0.5, inside, 0.2, 0.4), (2, 1), gamma=0.5, lam=0.5)
        _close(got, -0.15, 1.0)


@given(episodes(), SHARE, SHARE)
def test_turns_of_one_token_are_tokens(episode, gamma, lam):
    reward, value, _ = episode
    turns = [1] * len(reward)
    wanted = gae(reward, value, gamma=gamma, lam=lam)
    torch.testing.assert_close(turn_gae(reward, value, turns, gamma=gamma, lam=lam), wanted)
    got = bi_level_gae(reward, value, turns, gamma_turn=gamma, lam_turn=lam, gamma=0.3, lam=0.4)
    torch.testing.assert_close(got, wanted)


def test_bi_level_gae_by_hand():
    # turns of 2 and 1 tokens end at tokens 1 and 2, where values are 0.9 and 0.2 and rewards 0 and 1
    # B_1 = 1 - 0.2 = 0.8; B_0 = 0 + 0.5·0.2 - 0.9 + 0.5·0.8 = -0.4
    # A_0 = 0.1 + 0.9 - 0.5 + 0.5·(-0.4) = 0.3
    got = bi_level_gae(
        _tensor(0.1, 0, 1), _tensor(0.5, 0.9, 0.2, 0), (2, 1), gamma_turn=0.5, lam_turn=1, gamma=1, lam=0.5
    )
    _close(got, 0.3, -0.4, 0.8)


def test_a_turn_without_a_token_is_passed_over():
    turns = (0, 2, 0, 1)
    got = bi_level_gae(
        _tensor(0.1, 0, 1), _tensor(0.5, 0.9, 0.2, 0), turns, gamma_turn=0.5, lam_turn=1, gamma=1, lam=0.5
    )
    _close(got, 0.3, -0.4, 0.8)


@given(lengths(), st.randoms())
def test_bi_level_gae_that_discounts_nothing_is_return_minus_value(turns, random):
    reward_K = _tensor(*(random.uniform(-1, 1) for _ in turns))
    ends = torch.tensor(turns).cumsum(0) - 1
    reward = torch.zeros(sum(turns), dtype=torch.float64).index_add(0, ends, reward_K)
    value = _tensor(*(random.uniform(-1, 1) for _ in range(sum(turns) + 1)))
    wanted = _tensor(*_returns(reward, value[-1], 1.0)) - value[:-1]
    torch.testing.assert_close(bi_level_gae(reward, value, turns, gamma_turn=1, lam_turn=1, gamma=1, lam=1), wanted)


def test_turns_are_spread_over_their_tokens_and_summed_up_again():
    assert spread_turns(_tensor(5, 6, 7), (2, 0, 1)).tolist() == [5, 5, 7]
    assert sum_turns(_tensor(1, 2, 4), (2, 0, 1)).tolist() == [3, 0, 4]


def test_steps_are_aggregated_by_hand():
    steps = _tensor(0.5, 0.25, 0.8)
    wanted = {"min": 0.25, "product": 0.1, "last": 0.8, "mean": 1.55 / 3}
    assert {how: aggregate(steps, how) for how in wanted} == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("how", ["min", "product", "last", "mean"])
def test_no_step_is_not_a_reward_of_nothing(how):
    with pytest.raises(ValueError, match="without steps"):
        aggregate(torch.zeros(0), how)


@pytest.mark.parametrize(
    ("length", "cost"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0), (10**6, -1.0)]
)
def test_the_ramp_of_overlong_answers_by_hand(length, cost):
    assert overlong(length, limit=100, cushion=20) == pytest.approx(cost, abs=1e-12)


def test_a_ramp_without_a_cushion_is_a_step():
    assert [overlong(length, limit=100, cushion=0) for length in (99, 100, 101)] == [0.0, 0.0, -1.0]


def test_shapes_of_arrays_are_what_the_signatures_say():
    reward, value = _tensor(0, 1), _tensor(0.5, 0.25, 0)
    with pytest.raises(TypeCheckError):
        vtrace(reward, value, _tensor(0, 0, 0), gamma=1.0, lam=1.0)
    with pytest.raises(AssertionError, match="one more"):
        gae(reward, reward, gamma=1.0, lam=1.0)
    with pytest.raises(AssertionError, match="turns of 3 tokens"):
        turn_gae(reward, value, (2, 1), gamma=1.0, lam=1.0)
