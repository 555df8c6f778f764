from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from headwater.credit.apply import (
    GREEDY,
    above,
    across,
    baseline_then_whitened,
    compare,
    demonstrated,
    judged,
    labelled,
    not_flat,
    preferred,
    ranked,
    raw,
    remax,
    running,
    whitened,
)
from headwater.credit.functions import best_and_worst, centred, leave_one_out, mean_ratio, zscore
from headwater.credit.state import RunningMean

COMPARING = (centred, zscore, leave_one_out, mean_ratio)


def test_an_unjudged_sibling_has_no_advantage_and_does_not_move_the_others(group, plain):
    # mean of 1 and 0 is 0.5: the failed sibling is not a 0
    assert plain(compare(centred)([group(1.0, None, 0.0)])) == [[0.5, None, -0.5]]


def test_a_reward_of_zero_is_not_a_missing_one(group, plain):
    assert plain(compare(centred)([group(0.0, None, 1.0)])) == [[-0.5, None, 0.5]]


def test_across_a_step_groups_of_one_are_compared_with_each_other(group, plain):
    # mean of 1, 0 and 0.5
    assert plain(across(centred)([group(1.0), group(None), group(0.0, 0.5)])) == [[0.5], [None], [-0.5, 0.0]]


def test_one_judged_sibling_cannot_be_compared(group, plain):
    assert plain(compare(leave_one_out)([group(1.0, None), group(1.0, 0.0)])) == [[None, None], [1.0, -1.0]]


def test_a_greedy_sibling_is_in_no_baseline_and_takes_no_part(episode, group, plain):
    siblings = group(episode(reward=9.0, agent=GREEDY), 1.0, 0.0)
    assert plain(compare(centred)([siblings])) == [[None, 0.5, -0.5]]
    assert plain(across(centred)([siblings])) == [[None, 0.5, -0.5]]
    assert plain(raw([siblings])) == [[None, 1.0, 0.0]]
    assert plain(judged([siblings])) == [[None, 1.0, 1.0]]
    assert plain(ranked([siblings])) == [[None, 1.0, 0.0]]
    told = group(*(episode(preference=p, agent=a) for p, a in ((1.0, GREEDY), (0.0, "policy"), (0.0, "policy"))))
    assert plain(preferred([told])) == [[None, None, None]]
    assert plain(labelled("reward")([siblings])) == [[None, 1.0, 0.0]]
    assert plain(whitened(raw)([siblings])) == [[None, pytest.approx(1.0), pytest.approx(-1.0)]]
    baseline = RunningMean()
    assert plain(running(baseline)([siblings])) == [[None, 1.0, 0.0]]
    assert baseline.mean == 0.5
    assert not not_flat(group(episode(reward=9.0, agent=GREEDY), 1.0, 1.0))


def test_flat_groups_get_exactly_zero_from_every_comparison(group, plain):
    for function in COMPARING:
        assert plain(compare(function)([group(0.1, 0.1, 0.1)])) == [[0.0, 0.0, 0.0]]
        assert plain(across(function)([group(0.1), group(0.1, 0.1)])) == [[0.0], [0.0, 0.0]]


@given(st.lists(st.integers(0, 20).map(lambda n: n / 10), min_size=2, max_size=6), st.randoms())
def test_order_of_siblings_and_of_groups_does_not_matter(group, plain, rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    one, other = group(*rewards), group(*(rewards[i] for i in order))
    for credit in (compare(zscore), across(centred), whitened(compare(centred))):
        (first, second), (second_again, first_again) = plain(credit([one, other])), plain(credit([other, one]))
        assert first == pytest.approx(first_again, abs=1e-9) and second == pytest.approx(second_again, abs=1e-9)
        assert second == pytest.approx([first[i] for i in order], abs=1e-9)


def test_remax_compares_with_the_greedy_sibling(episode, group, plain):
    greedy = episode(reward=0.75, agent=GREEDY)
    assert plain(remax([group(1.0, greedy, None, 0.0)])) == [[0.25, None, None, -0.75]]


def test_remax_without_a_judged_greedy_sibling_has_no_baseline(episode, group, plain):
    broken = episode(reward=None, agent=GREEDY)
    assert plain(remax([group(1.0, 0.0), group(1.0, broken)])) == [[None, None], [None, None]]


def test_a_running_baseline_is_that_of_earlier_steps(group, plain):
    credit = running(RunningMean())
    assert plain(credit([group(1.0, None), group(0.0)])) == [[1.0, None], [0.0]]
    assert plain(credit([group(1.0)])) == [[0.5]]
    assert plain(credit([group(0.0)])) == [[-2 / 3]]


def test_preferences_are_the_targets_of_those_who_have_one(episode, group, plain):
    better, worse, unsaid = episode(preference=1.0), episode(preference=0.0), episode(preference=None)
    assert plain(preferred([group(better, unsaid, worse)])) == [[1.0, None, 0.0]]


def test_a_group_that_prefers_nothing_takes_no_part(episode, group, plain):
    one, unsaid = episode(preference=1.0), episode()
    assert plain(preferred([group(one, unsaid), group(one, one), group(unsaid, unsaid)])) == [[None, None]] * 3


def test_the_best_is_preferred_to_the_worst_and_the_others_take_no_part(group, plain):
    assert plain(ranked([group(0.5, None, 0.9, 0.1), group(0.1, 0.1)])) == [[None, None, 1.0, 0.0], [None, None]]
    assert plain(compare(best_and_worst)([group(0.5, 0.9, 0.1)])) == [[None, 1.0, 0.0]]


def test_a_label_is_a_target_even_where_it_is_zero(episode, group, plain):
    siblings = group(episode(label=0.0), episode(label=None), episode(), episode(label=1.0))
    assert plain(labelled("label")([siblings])) == [[0.0, None, None, 1.0]]


def test_a_signal_of_another_level_is_refused(episode, group):
    with pytest.raises(AssertionError, match="of level turn, not episode"):
        labelled("turn_reward")([group(episode(turn_reward=[1.0]))])


def test_terms_for_all_weigh_all_alike(group, plain):
    assert plain(judged([group(0.0, None, 5.0)])) == [[1.0, None, 1.0]]
    assert plain(demonstrated([group(None)])) == [[1.0]]


def test_only_what_reaches_the_threshold_is_imitated(episode, group, plain):
    siblings = group(1.0, 0.5, 0.4, None, episode(reward=1.0, agent=GREEDY))
    assert plain(above(0.5)([siblings])) == [[1.0, 1.0, None, None, None]]


def test_whitening_counts_tokens_by_hand(episode, group, plain):
    # one token of 1 and three of 0: mean 1/4, variance 1/4·3/4, so sqrt(3) and -sqrt(1/3)
    siblings = group(episode(reward=1.0), episode(reward=0.0, turns=(2, 1)), None)
    wanted = [pytest.approx(math.sqrt(3), rel=1e-6), pytest.approx(-math.sqrt(1 / 3), rel=1e-6), None]
    assert plain(whitened(raw)([siblings])) == [wanted]


def test_whitening_leaves_out_tokens_that_take_no_part(episode, group, plain):
    def given(_):
        return [(torch.tensor([3.0, float("nan"), 1.0]), None), (torch.tensor([1.0]),)]

    # 3, 1, 1: mean 5/3, variance 8/9
    groups = [group(episode(turns=(3,)), episode()), group(episode())]
    high, low = pytest.approx(math.sqrt(2), rel=1e-6), pytest.approx(-math.sqrt(1 / 2), rel=1e-6)
    assert plain(whitened(given)(groups)) == [[[high, None, low], None], [[low]]]


def test_whitening_of_nothing_and_of_a_flat_step(episode, group, plain):
    def given(_):
        # the mean of three times 0.1 is not 0.1 in float64, and the spread not quite 0
        tokens, whole = ([0.1, float("nan"), 0.1], 0.1)
        return [(torch.tensor(tokens, dtype=torch.float64), torch.tensor(whole, dtype=torch.float64), None)]

    siblings = group(episode(turns=(3,)), episode(), episode())
    assert plain(whitened(given)([siblings])) == [[[0.0, None, 0.0], 0.0, None]]
    assert plain(whitened(raw)([group(None)])) == [[None]]


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 4)), min_size=2, max_size=6),
    st.floats(0.5, 20),
    st.floats(-9, 9),
)
def test_whitening_forgets_scale_and_offset_and_leaves_mean_0_and_variance_1(episode, group, told, scale, offset):
    assume(max(r for r, _ in told) - min(r for r, _ in told) > 1e-2)
    (once,) = whitened(raw)([group(*(episode(reward=r, turns=(n,)) for r, n in told))])
    (again,) = whitened(raw)([group(*(episode(reward=scale * r + offset, turns=(n,)) for r, n in told))])
    torch.testing.assert_close(torch.stack(once), torch.stack(again), atol=1e-4, rtol=1e-4)
    value_T = torch.stack(once).repeat_interleave(torch.tensor([n for _, n in told]))
    assert value_T.mean().item() == pytest.approx(0, abs=1e-6)
    assert value_T.std(correction=0).item() == pytest.approx(1, abs=1e-4)


def test_a_flat_group_is_not_moved_by_the_lengths_of_others(group, episode, plain):
    uneven = group(episode(reward=1.0, turns=(3,)), episode(reward=0.0, turns=(1,)))
    got = plain(baseline_then_whitened([uneven, group(5.0, 5.0)]))
    # ±1/2 on 3 and 1 tokens, 0 on 2 more: a deviation about 0 of sqrt(1/6)
    assert got == [[pytest.approx(1.5**0.5), pytest.approx(-(1.5**0.5))], [0.0, 0.0]]


def test_a_group_s_mean_is_taken_off_before_the_step_is_whitened(group, plain):
    # 1 and 0 about 0.5, 7 and 4 about 5.5: ±0.5 and ±1.5, variance (0.25 + 2.25) / 2 = 1.25
    small, large = 0.5 / math.sqrt(1.25), 1.5 / math.sqrt(1.25)
    got = plain(baseline_then_whitened([group(1.0, 0.0), group(7.0, 4.0)]))
    assert got == [pytest.approx([small, -small], rel=1e-6), pytest.approx([large, -large], rel=1e-6)]


def test_only_groups_that_differ_in_judged_rewards_are_kept(group):
    assert not_flat(group(1.0, 0.0, None))
    assert not any(map(not_flat, (group(1.0, 1.0), group(0.0, None), group(None, None))))
