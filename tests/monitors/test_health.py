from __future__ import annotations

import asyncio
import math

import pytest

from headwater.monitors.health import alarms, statistics
from headwater.rewards.source import judge, verifier
from headwater.types import Group, Signal, Span, Task, Trajectory, Update


def _answer(reward, tokens=3, stop="done", note=""):
    status = "ok" if reward is not None else "failed"
    signal = Signal(source="s", name="reward", values=() if reward is None else (reward,), status=status, note=note)
    spans = (
        Span(author="prompt", tokens=(1, 2), text=""),
        Span(author="policy", tokens=(3,) * tokens, text=""),
    )
    return Trajectory(task_id="t", spans=spans, stop=stop, signals=(signal,))


def _group(*answers):
    return Group(task=Task(id="t", prompt="p"), trajectories=answers)


def _update(**values):
    return Update(**({"version": 1, "loss": 0.0, "grad_norm": 1.0, "lr": 1.0, "tokens": 9, "entropy": 1.0} | values))


def _names(groups, compares=True, **values):
    return [a.name for a in alarms(groups, _update(**values), statistics(groups), compares=compares)]


MIXED = [_group(_answer(1.0), _answer(0.0))]


def test_statistics_by_hand():
    groups = [_group(_answer(1.0, 4), _answer(0.0, 2, "max_tokens")), _group(_answer(0.5, 3), _answer(None, 7))]
    assert statistics(groups) == {
        "truncated": 0.25,
        "unjudged": 0.25,
        "answer_tokens": 4.0,
        "reward": 0.5,  # of the three that were judged
        "flat_groups": 0.5,  # one judged sibling has no one to be compared with
        "reward/s": 0.5,
        "unjudged/s": 0.25,
    }


def test_each_source_has_its_own_mean_and_its_own_share_of_unjudged():
    @verifier
    def length(text: str, task: Task) -> float:
        return len(text)

    @verifier
    def picky(text: str, task: Task) -> float | None:
        return None if len(text) < 2 else 0.5

    def wrote(text: str) -> Trajectory:
        return Trajectory(task_id="t", spans=(Span(author="policy", tokens=(1,), text=text),))

    asked = _group(wrote("a"), wrote("abc"))
    seen = statistics(asyncio.run(judge([asked], [(length, 1.0), (picky, 2.0)])))
    # a failed part fails the sum: of the reward only 3 + 2 * 0.5 is known
    assert {key: value for key, value in seen.items() if "reward" in key or "unjudged" in key} == {
        "reward": 4.0,
        "unjudged": 0.5,
        "reward/length": 2.0,
        "unjudged/length": 0.0,
        "reward/picky": 0.5,
        "unjudged/picky": 0.5,
    }
    alone = statistics(asyncio.run(judge([asked], [(length, 1.0)])))
    assert alone["reward/length"] == alone["reward"] == 2.0


def test_a_healthy_step_raises_nothing():
    assert _names(MIXED, mismatch=1e-6) == []


def test_all_truncated():
    assert _names([_group(_answer(1.0, stop="max_tokens"), _answer(0.0, stop="max_tokens"))]) == ["all_truncated"]


@pytest.mark.parametrize(("reward", "cause"), [(0.0, "too hard"), (1.0, "too easy")])
def test_all_flat_names_the_likelier_cause(reward, cause):
    groups = [_group(_answer(reward), _answer(reward))] * 2
    (alarm,) = alarms(groups, _update(), statistics(groups), compares=True)
    assert alarm.name == "all_flat"
    assert cause in alarm.text


def test_flat_groups_are_no_alarm_for_credit_that_does_not_compare_siblings():
    assert _names([_group(_answer(1.0))], compares=False) == []


def test_all_unjudged_says_what_the_sources_said():
    groups = [_group(_answer(None, note="ValueError: no number"), _answer(None, note="ValueError: no number"))]
    (alarm,) = alarms(groups, _update(), statistics(groups), compares=True)
    assert alarm.name == "all_unjudged"
    assert "ValueError: no number" in alarm.text


def test_gap_and_entropy():
    assert _names(MIXED, mismatch=0.2) == ["mismatch"]
    assert _names(MIXED, entropy=0.001) == ["entropy"]
    assert _names(MIXED, entropy=math.nan, tokens=0) == []
