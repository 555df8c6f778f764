from __future__ import annotations

from headwater.credit.apply import across, compare, demonstrated, judged
from headwater.credit.functions import centred, leave_one_out
from headwater.types import Group, Signal, Span, Task, Trajectory


def _group(*rewards):
    def one(reward):
        status = "failed" if reward is None else "ok"
        values = () if reward is None else (reward,)
        signal = Signal(source="test", name="reward", values=values, status=status)
        return Trajectory(task_id="t", spans=(Span(author="prompt", tokens=(1,), text=""),), signals=(signal,))

    return Group(task=Task(id="t", prompt="p"), trajectories=tuple(map(one, rewards)))


def _plain(advantages):
    return [[None if a is None else a.item() for a in group] for group in advantages]


def test_an_unjudged_sibling_has_no_advantage_and_does_not_move_the_others():
    # mean of 1 and 0 is 0.5: the failed sibling is not a 0
    assert _plain(compare(centred)([_group(1.0, None, 0.0)])) == [[0.5, None, -0.5]]


def test_a_reward_of_zero_is_not_a_missing_one():
    assert _plain(compare(centred)([_group(0.0, None, 1.0)])) == [[-0.5, None, 0.5]]


def test_across_a_step_groups_of_one_are_compared_with_each_other():
    # mean of 1, 0 and 0.5
    assert _plain(across(centred)([_group(1.0), _group(None), _group(0.0, 0.5)])) == [[0.5], [None], [-0.5, 0.0]]


def test_one_judged_sibling_cannot_be_compared():
    assert _plain(compare(leave_one_out)([_group(1.0, None), _group(1.0, 0.0)])) == [
        [None, None],
        [1.0, -1.0],
    ]


def test_flat_groups_get_exactly_zero_from_every_comparison():
    for function in (centred, leave_one_out):
        assert _plain(compare(function)([_group(0.1, 0.1, 0.1)])) == [[0.0, 0.0, 0.0]]


def test_terms_for_all_weigh_all_alike():
    assert _plain(judged([_group(0.0, None, 5.0)])) == [[1.0, None, 1.0]]
    assert _plain(demonstrated([_group(None)])) == [[1.0]]
