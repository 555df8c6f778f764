from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.credit.apply import GREEDY, compare, whitened
from headwater.credit.functions import centred, zscore
from headwater.credit.sequential import gae
from headwater.credit.state import AdaptiveKL
from headwater.credit.tokens import (
    adapted,
    bi_level,
    bi_level_target,
    generalised,
    sampled_kl,
    step_groups,
    stepwise,
    to_go,
    token_rewards,
    turn_generalised,
    turn_rewards,
    turn_value_target,
    turnwise,
    v_trace,
    v_trace_target,
    value_target,
    values,
)

ESTIMATES = (
    generalised,
    value_target,
    turn_generalised,
    turn_value_target,
    bi_level,
    bi_level_target,
    v_trace,
    v_trace_target,
)


def _only(advantages):
    ((one,),) = advantages
    return one


def _near(*numbers):
    return pytest.approx(list(numbers), abs=1e-9)


def test_every_reward_stands_at_the_last_token_it_is_for(episode):
    one = episode(
        turns=(2, 3),
        reward=1.0,
        turn_reward=[10.0, 20.0],
        step_reward=([100.0, 200.0], [0, 3]),
        logps=[-1.0, -1.0, -1.0, -1.0, -1.0],
        ref_logp=[-1.0, -3.0, 0.0, -1.0, -1.5],
    )
    # log mu - log ref = 0, 2, -1, 0, 0.5
    assert sampled_kl(one).tolist() == [0.0, 2.0, -1.0, 0.0, 0.5]
    assert token_rewards(one).tolist() == [100.0, 10.0, 0.0, 200.0, 21.0]
    assert token_rewards(one, kl=0.5).tolist() == [100.0, 9.0, 0.5, 200.0, 20.75]
    assert token_rewards(one, kl=AdaptiveKL(beta=0.5, target=1.0)).tolist() == [100.0, 9.0, 0.5, 200.0, 20.75]
    assert turn_rewards(one).tolist() == [110.0, 221.0]
    assert token_rewards(one).dtype == torch.float64


def test_what_was_not_told_is_not_a_reward_of_zero(episode):
    assert token_rewards(episode()) is None
    assert token_rewards(episode(reward=None)) is None
    assert token_rewards(episode(reward=None, turn_reward=[1.0])) is None
    assert token_rewards(episode(reward=1.0, turn_reward=None)) is None
    assert token_rewards(episode(turn_reward=[2.0])).tolist() == [2.0]
    assert token_rewards(episode(reward=0.0)).tolist() == [0.0]
    assert token_rewards(episode(turns=(), reward=1.0)) is None
    assert turn_rewards(episode()) is None


def test_a_kl_that_cannot_be_told_is_not_a_kl_of_zero(episode):
    assert token_rewards(episode(reward=1.0, logps=[-1.0]), kl=0.1) is None
    assert token_rewards(episode(reward=1.0, ref_logp=[-1.0]), kl=0.1) is None
    assert token_rewards(episode(reward=1.0, logps=[-1.0]), kl=0.0).tolist() == [1.0]


def test_turns_without_a_token_leave_their_reward_to_the_token_before(episode):
    assert token_rewards(episode(turns=(0, 2, 0), turn_reward=[1.0, 2.0, 4.0])).tolist() == [1.0, 6.0]


@pytest.mark.parametrize("stop", ["done", "error", "max_tokens", "max_turns"])
def test_only_an_episode_that_was_cut_short_has_something_to_come(episode, group, stop):
    one = episode(turns=(1,), turn_reward=[1.0], value=[0.5, 4.0], stop=stop)
    last = 4.0 if stop.startswith("max") else 0.0
    assert values(one).tolist() == [0.5, last]
    # 1 + 0.5·V_1 - 0.5
    assert _only(generalised(gamma=0.5)([group(one)])).tolist() == [0.5 + 0.5 * last]
    assert _only(value_target(gamma=0.5)([group(one)])).tolist() == [1 + 0.5 * last]
    assert _only(turn_generalised(gamma=0.5)([group(one)])).tolist() == [0.5 + 0.5 * last]
    assert _only(bi_level(gamma_turn=0.5)([group(one)])).tolist() == [0.5 + 0.5 * last]


@pytest.mark.parametrize("stop", ["done", "max_tokens"])
def test_after_the_reward_of_an_episode_nothing_comes_even_where_it_was_cut(episode, group, stop):
    one = episode(turns=(1,), reward=1.0, value=[0.5, 4.0], stop=stop)
    assert values(one).tolist() == [0.5, 0.0]
    assert _only(value_target()([group(one)])).tolist() == [1.0]


def test_gae_credit_by_hand(episode, group):
    one = episode(turns=(2, 1), reward=1.0, value=[0.5, 0.6, 0.7, 9.0])
    # as gae by hand: 0.9·0.6 - 0.5 = 0.04, 0.9·0.7 - 0.6 = 0.03, 1 - 0.7 = 0.3 (9 is beyond the end)
    assert _only(generalised(gamma=0.9, lam=0.5)([group(one)])).tolist() == _near(0.11425, 0.165, 0.3)
    assert _only(value_target(gamma=0.9, lam=0.5)([group(one)])).tolist() == _near(0.61425, 0.765, 1.0)


def test_gae_credit_takes_the_kl_off_the_rewards(episode, group):
    one = episode(turns=(2,), reward=1.0, value=[0.0] * 3, logps=[-1.0, -1.0], ref_logp=[-2.0, -1.5])
    # rewards -0.1·1 and 1 - 0.1·0.5
    assert _only(generalised(lam=1.0, kl=0.1)([group(one)])).tolist() == _near(0.85, 0.95)
    assert _only(value_target(lam=1.0, kl=0.1)([group(one)])).tolist() == _near(0.85, 0.95)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.randoms())
def test_what_the_world_says_in_between_resets_nothing(episode, group, turns, random):
    value = [random.uniform(-1, 1) for _ in range(sum(turns) + 1)]
    credit = generalised(gamma=0.9, lam=0.8)
    spoken = _only(credit([group(episode(turns=turns, reward=1.0, value=value))]))
    alone = _only(credit([group(episode(turns=(sum(turns),), reward=1.0, value=value))]))
    reward = torch.tensor([0.0] * (sum(turns) - 1) + [1.0])
    wanted = gae(reward, torch.tensor([*value[:-1], 0.0], dtype=torch.float64), gamma=0.9, lam=0.8)
    assert torch.equal(spoken, alone) and torch.equal(spoken, wanted)


def test_turn_credits_by_hand(episode, group):
    one = episode(turns=(2, 1), turn_reward=[0.0, 1.0], value=[0.5, 0.9, 0.2, 7.0])
    # states at tokens 0 and 2: d_1 = 1 - 0.2, d_0 = 0.5·0.2 - 0.5; A_0 = -0.4 + 0.25·0.8 = -0.2
    assert _only(turn_generalised(gamma=0.5, lam=0.5)([group(one)])).tolist() == _near(-0.2, -0.2, 0.8)
    # B_1 = 0.8, B_0 = 0.5·0.2 - 0.9 + 0.5·0.8 = -0.4, A_0 = 0.9 - 0.5 + 0.5·(-0.4) = 0.2
    got = bi_level(gamma_turn=0.5, lam_turn=1.0, gamma=1.0, lam=0.5)([group(one)])
    assert _only(got).tolist() == _near(0.2, -0.4, 0.8)


def test_targets_of_turn_credits_are_what_they_estimate_by_hand(episode, group, plain):
    one = episode(turns=(2, 1, 0), turn_reward=[0.0, 1.0, 0.0], value=[0.5, 0.9, 0.2, 7.0])
    # advantages as above, and values 0.5, 0.9, 0.2
    ((target,),) = plain(turn_value_target(gamma=0.5, lam=0.5)([group(one)]))
    assert target == [pytest.approx(0.3), None, pytest.approx(1.0)]
    got = bi_level_target(gamma_turn=0.5, lam_turn=1.0, gamma=1.0, lam=0.5)([group(one)])
    assert _only(got).tolist() == _near(0.7, 0.5, 1.0)


def test_v_trace_credit_by_hand(episode, group):
    one = episode(
        turns=(1, 1),
        reward=1.0,
        value=[0.5, 0.25, 3.0],
        logps=[-1.0, -1.0],
        logp=[-1.0 + math.log(2), -1.0 + math.log(0.5)],
    )
    # ratios pi/mu of 2 and 0.5: as vtrace by hand
    assert _only(v_trace()([group(one)])).tolist() == _near(0.125, 0.375)
    assert _only(v_trace_target()([group(one)])).tolist() == _near(0.625, 0.625)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.randoms())
def test_v_trace_of_a_sampler_that_is_the_learner_is_gae_with_lam_1(episode, group, turns, random):
    value = [random.uniform(-1, 1) for _ in range(sum(turns) + 1)]
    logps = [random.uniform(-3, 0) for _ in range(sum(turns))]
    rewards = [random.uniform(-1, 1) for _ in turns]
    siblings = group(episode(turns=turns, turn_reward=rewards, value=value, logps=logps, logp=logps, stop="max_turns"))
    torch.testing.assert_close(
        _only(v_trace(gamma=0.9)([siblings])), _only(generalised(gamma=0.9, lam=1.0)([siblings]))
    )
    torch.testing.assert_close(
        _only(v_trace_target(gamma=0.9)([siblings])), _only(value_target(gamma=0.9, lam=1.0)([siblings]))
    )


@pytest.mark.parametrize("make", ESTIMATES)
@pytest.mark.parametrize("missing", ["reward", "value"])
def test_who_lacks_a_signal_takes_no_part_in_an_estimate(episode, group, plain, make, missing):
    signals = {"reward": 1.0, "value": [0.0, 0.0], "logp": [-1.0], "logps": [-1.0]}
    whole = episode(**signals)
    greedy = episode(**signals, agent=GREEDY)
    lacking = episode(**{name: given for name, given in signals.items() if name != missing})
    failed = episode(**{**signals, missing: None})
    assert plain(make()([group(whole, lacking, failed, greedy)])) == [[[1.0], None, None, None]]


@pytest.mark.parametrize("make", [v_trace, v_trace_target])
@pytest.mark.parametrize("missing", ["logp", "logps"])
def test_v_trace_needs_both_policies(episode, group, plain, make, missing):
    signals = {"reward": 1.0, "value": [0.0, 0.0], "logp": [-1.0], "logps": [-1.0]}
    del signals[missing]
    assert plain(make()([group(episode(**signals))])) == [[None]]


def test_targets_of_steps_stand_at_their_ends_alone(episode, group, plain):
    judged = episode(turns=(2, 2), step_label=([0.9, 0.0], [1, 3]))
    siblings = group(judged, episode(), episode(step_label=((), ())), episode(step_label=([1.0], [0]), agent=GREEDY))
    assert plain(stepwise("step_label")([siblings])) == [[[None, 0.9, None, 0.0], None, None, None]]


def test_rewards_to_go_by_hand(episode, group, plain):
    one = episode(turns=(1, 2), turn_reward=[1.0, 0.0], reward=4.0)
    # 4; 0.5·4; 1 + 0.5·2
    assert plain(to_go(gamma=0.5)([group(one, episode(), episode(reward=1.0, agent=GREEDY))])) == [
        [[2.0, 2.0, 4.0], None, None]
    ]


@given(st.lists(st.tuples(st.floats(-2, 2), st.integers(1, 4)), min_size=2, max_size=5), st.randoms())
def test_reinforce_plus_plus_is_a_textbook_loop(episode, group, told, random):
    beta, siblings, returns = 0.1, [], []
    for reward, count in told:
        logps = [random.uniform(-3, 0) for _ in range(count)]
        ref = [random.uniform(-3, 0) for _ in range(count)]
        siblings.append(episode(turns=(count,), reward=reward, logps=logps, ref_logp=ref))
        total, row = 0.0, []
        for t in reversed(range(count)):
            total += -beta * (logps[t] - ref[t]) + (reward if t == count - 1 else 0.0)
            row.insert(0, total)
        returns.append(row)
    tokens = [x for row in returns for x in row]
    mean = sum(tokens) / len(tokens)
    std = math.sqrt(sum((x - mean) ** 2 for x in tokens) / len(tokens))
    (got,) = whitened(to_go(kl=beta))([group(*siblings)])
    for row, advantage in zip(returns, got, strict=True):
        assert advantage.tolist() == pytest.approx([(x - mean) / (std + 1e-8) for x in row], abs=1e-6)


def test_turnwise_by_hand(episode, group, plain):
    one, other = episode(turns=(1, 2), reward=1.0), episode(turns=(1, 1), reward=0.0)
    # returns 0.5, 1 and 0, 0: mean 0.375
    assert plain(turnwise(gamma=0.5)([group(one, other, None)])) == [[[0.125, 0.625, 0.625], [-0.375, -0.375], None]]


def test_turnwise_compares_siblings_that_differ(episode, group, plain):
    alone = group(episode(turns=(1, 1), reward=1.0), episode(reward=1.0, agent=GREEDY))
    flat = group(*[episode(turns=(1, 2), reward=0.1)] * 3)
    assert plain(turnwise()([alone, flat])) == [[None, None], [[0.0, 0.0, 0.0]] * 3]


def test_turns_that_begin_in_the_same_state_are_compared_by_hand(episode, group, plain):
    one = episode(turns=(1, 2), worlds=("x",), reward=1.0)
    other = episode(turns=(1, 1), worlds=("x",), reward=0.0)
    # episodes: ±0.5. Returns 0.5, 1 and 0, 0: first turns ±0.25, second ±0.5; twice that is added
    credit = step_groups(gamma=0.5, omega=2.0, function=centred)
    assert plain(credit([group(one, other)])) == [[[1.0, 1.5, 1.5], [-1.0, -1.5]]]


def test_a_turn_that_begins_where_no_other_does_is_compared_with_none(episode, group, plain):
    one = episode(turns=(1, 1), worlds=("x",), reward=1.0)
    other = episode(turns=(1, 1), worlds=("y",), reward=0.0)
    credit = step_groups(gamma=0.5, omega=2.0, function=centred)
    assert plain(credit([group(one, other, None)])) == [[[1.0, 0.5], [-1.0, -0.5], None]]


def test_one_who_comes_back_to_a_state_is_compared_with_itself(episode, group, plain):
    one = episode(turns=(1, 1, 1), worlds=("x", "x"), turn_reward=[0.0, 0.0, 1.0])
    other = episode(turns=(1,), turn_reward=[1.0])
    # totals are flat. Returns 0.25, 0.5, 1 and 1: at the prompt 0.25 and 1, in x 0.5 and 1
    credit = step_groups(gamma=0.5, omega=1.0, function=centred)
    assert plain(credit([group(one, other)])) == [[[-0.375, -0.25, 0.25], [0.375]]]


def test_new_weights_in_the_middle_of_a_turn_do_not_begin_another(episode, group, plain):
    one, other = episode(turns=(2, 1), worlds=("x",), reward=1.0), episode(turns=(1, 1), worlds=("x",), reward=0.0)
    prompt, said, *rest = one.spans
    halves = (replace(said, tokens=said.tokens[:1]), replace(said, tokens=said.tokens[1:]))
    swapped = replace(one, spans=(prompt, *halves, *rest))
    credit = step_groups(gamma=0.5, function=centred)
    assert plain(credit([group(swapped, other)])) == plain(credit([group(one, other)]))


def test_step_groups_without_steps_are_the_comparison_of_episodes(episode, group, plain):
    siblings = group(*(episode(turns=(1, 1), reward=r) for r in (1.0, 0.0, 0.5)))
    ((*wanted,),) = plain(compare(zscore)([siblings]))
    assert plain(step_groups(omega=0.0)([siblings])) == [[pytest.approx([a, a]) for a in wanted]]


def test_step_groups_give_flat_groups_exactly_zero_and_a_lone_sibling_nothing(episode, group, plain):
    flat = group(*[episode(turns=(1, 1), reward=0.1)] * 3)
    lone = group(episode(reward=1.0), episode(reward=2.0, agent=GREEDY))
    # returns of first and second turns differ, but not among those that begin in the same state
    assert plain(step_groups(gamma=0.5)([flat, lone])) == [[[0.0, 0.0]] * 3, [None, None]]


def test_a_controller_moves_after_the_terms_of_a_step_have_read_it(episode, group):
    controller = AdaptiveKL(beta=0.5, target=1.0, horizon=10)
    one = episode(turns=(2,), reward=0.0, logps=[-1.0, -1.0], ref_logp=[-2.0, -2.0])
    greedy = episode(turns=(2,), reward=0.0, logps=[0.0, 0.0], ref_logp=[-9.0, -9.0], agent=GREEDY)
    credit = adapted(controller, to_go(kl=controller))
    assert credit([group(one, greedy)])[0][0].tolist() == [-1.0, -0.5]
    # the KL of the one sampled sequence is 2, above its target of 1: 0.5·(1 + 0.2·1/10)
    assert controller.beta == pytest.approx(0.51, abs=1e-12)


@given(st.lists(st.floats(-1, 1), min_size=4, max_size=4))
def test_gae_credit_is_the_function_of_its_arrays(episode, group, value):
    siblings = group(episode(turns=(1, 2), turn_reward=[0.0, 1.0], value=value, stop="max_turns"))
    wanted = gae(torch.tensor([0.0, 0.0, 1.0]), torch.tensor(value, dtype=torch.float64), gamma=0.9, lam=0.7)
    torch.testing.assert_close(_only(generalised(gamma=0.9, lam=0.7)([siblings])), wanted)
