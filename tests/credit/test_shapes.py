from __future__ import annotations

import pytest

from headwater.credit.apply import GREEDY, compare, not_flat, raw, remax
from headwater.credit.functions import centred
from headwater.credit.shapes import (
    clipped_reward,
    kl_in_reward,
    overlong_penalty,
    process,
    process_reward,
    shaped,
)
from headwater.credit.state import AdaptiveKL
from headwater.credit.tokens import to_go


def test_long_answers_lose_some_of_their_reward(episode, group, plain):
    # tokens in all turns count: 6 is free, 8 is half way through a cushion of 4 up to 10
    siblings = group(*(episode(turns=turns, reward=1.0) for turns in ((6,), (4, 4), (10,), (30,))), None)
    assert plain(shaped(overlong_penalty(10, 4), raw)([siblings])) == [[1.0, 0.5, 0.0, 0.0, None]]


def test_what_is_kept_is_settled_before_shaping(episode, group):
    correct = group(episode(turns=(1,), reward=1.0), episode(turns=(9,), reward=1.0))
    (shaped_too,) = overlong_penalty(10, 4)([correct])
    assert not not_flat(correct) and not_flat(shaped_too)


def test_rewards_are_kept_within_bounds(group, plain):
    assert plain(shaped(clipped_reward(-1.0, 2.0), raw)([group(-5.0, 0.5, 7.0, None)])) == [[-1.0, 0.5, 2.0, None]]


def test_shapes_are_applied_from_the_outside_in(group, plain):
    credit = shaped(clipped_reward(0.0, 1.0), compare(centred))
    assert plain(credit([group(5.0, 0.0)])) == [[0.5, -0.5]]


def test_the_kl_of_an_episode_comes_off_its_reward(episode, group, plain):
    # log mu - log ref adds up to 1 + 0.5 over two turns, and to -1
    one = episode(turns=(1, 1), reward=1.0, logps=[-1.0, -1.0], ref_logp=[-2.0, -1.5])
    other = episode(turns=(1,), reward=0.0, logps=[-1.0], ref_logp=[0.0])
    assert plain(shaped(kl_in_reward(0.2), raw)([group(one, other)])) == [[pytest.approx(0.7), pytest.approx(0.2)]]


def test_without_a_reference_a_shaped_reward_is_missing_and_not_zero(episode, group, plain):
    siblings = group(episode(reward=1.0, logps=[-1.0]), episode(reward=1.0, ref_logp=[-1.0]), episode(reward=None))
    assert plain(shaped(kl_in_reward(0.2), raw)([siblings])) == [[None, None, None]]
    ((first, *_),) = [g.trajectories for g in kl_in_reward(0.2)([siblings])]
    assert [(s.name, s.status) for s in first.signals] == [("reward", "abstained")]


def test_a_greedy_sibling_keeps_its_reward_and_its_kl_does_not_move_the_controller(episode, group, plain):
    controller = AdaptiveKL(beta=0.5, target=2.0, horizon=10)
    greedy = episode(reward=0.25, agent=GREEDY, logps=[0.0], ref_logp=[-50.0])
    one = episode(reward=1.0, logps=[-1.0], ref_logp=[-3.0])
    # the KL of 2 is on target; 1 - 0.5·2 - 0.25
    assert plain(shaped(kl_in_reward(controller), remax)([group(greedy, one)])) == [[None, -0.25]]
    assert controller.beta == 0.5


def test_an_adaptive_coefficient_moves_once_a_step_and_after_use(episode, group, plain):
    controller = AdaptiveKL(beta=0.5, target=1.0, horizon=10)
    credit = shaped(kl_in_reward(controller), raw)
    groups = [group(episode(reward=0.0, logps=[-1.0], ref_logp=[-2.0])), group(episode(reward=0.0))]
    groups.append(group(episode(turns=(2,), reward=0.0, logps=[-1.0, -1.0], ref_logp=[-2.0, -3.0])))
    # sequence sums of 1 and 3, mean 2: cut to an error of 0.2, two samples of a horizon of 10
    assert plain(credit(groups)) == [[-0.5], [None], [-1.5]]
    assert controller.beta == pytest.approx(0.5 * 1.04, abs=1e-12)
    assert plain(credit(groups)) == [[pytest.approx(-0.52)], [None], [pytest.approx(-1.56)]]


def test_a_process_reward_replaces_the_rewards_of_steps(episode, group, plain):
    one = episode(turns=(3,), reward=9.0, step_reward=([0.5, 0.8], [0, 2]))
    siblings = group(one, episode(step_reward=((), ())), episode(reward=9.0))
    wanted = {"min": 0.5, "product": 0.4, "last": 0.8, "mean": 0.65}
    for how, reward in wanted.items():
        assert plain(shaped(process_reward(how), raw)([siblings])) == [[pytest.approx(reward), None, None]]
    # the steps' rewards are not there a second time
    assert plain(shaped(process_reward("last"), to_go())([siblings])) == [[[0.8, 0.8, 0.8], None, None]]


def test_process_credit_compares_siblings_on_their_steps(episode, group, plain):
    siblings = group(*(episode(step_reward=([r], [0])) for r in (1.0, 0.5, 0.0)))
    assert plain(process("min", centred)([siblings])) == [[0.5, 0.0, -0.5]]


def test_shapes_change_rewards_and_nothing_else(episode, group):
    before = group(episode(turns=(2, 1), reward=1.0, value=[0.0] * 4, logps=[-1.0] * 3, ref_logp=[-1.0] * 3))
    (after,) = kl_in_reward(0.1)(overlong_penalty(10, 4)(clipped_reward(-1.0, 1.0)([before])))
    (old,), (new,) = before.trajectories, after.trajectories
    assert (new.spans, new.stop, new.agent, after.task) == (old.spans, old.stop, old.agent, before.task)
    assert {s for s in old.signals if s.name != "reward"} == {s for s in new.signals if s.name != "reward"}
    assert old.reward == new.reward == 1.0 and len(new.signals) == len(old.signals)
