from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import ConfigError
from headwater.rewards.ensemble import Ensemble, combined
from headwater.rewards.registry import RewardConfig, build_source
from headwater.rewards.source import verifier
from headwater.types import Group, Span, Task, Trajectory


def group(*texts: str) -> Group:
    spans = [Span(author="policy", tokens=(1,), text=text) for text in texts]
    trajectories = tuple(Trajectory(task_id="t", spans=(span,)) for span in spans)
    return Group(task=Task(id="t", prompt="?", answer="4"), trajectories=trajectories)


def test_by_hand():
    # mean 2, variance (1 + 0 + 1) / 3
    assert combined([1.0, 2.0, 3.0], "mean") == 2.0
    assert combined([3.0, 1.0, 2.0], "worst") == 1.0
    assert combined([1.0, 2.0, 3.0], "uncertainty", 0.3) == pytest.approx(2.0 - 0.3 * 2 / 3)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=6), st.floats(0, 5))
def test_doubt_never_adds_and_vanishes_where_all_agree(rewards: list[float], coefficient: float):
    mean = combined(rewards, "mean")
    assert combined(rewards, "uncertainty", coefficient) <= mean + 1e-9
    assert combined(rewards, "worst") <= mean + 1e-9
    same = [rewards[0]] * len(rewards)
    for combine in ("mean", "worst", "uncertainty"):
        assert combined(same, combine, coefficient) == pytest.approx(rewards[0])


def test_one_without_a_reward_leaves_the_ensemble_without():
    @verifier
    def sure(text: str, task: Task) -> float:
        return 1.0

    @verifier
    def picky(text: str, task: Task) -> float | None:
        if text == "broken":
            raise ValueError("cannot read it")
        return None if text == "odd" else 0.5

    signals = asyncio.run(Ensemble(members=(sure, picky))(group("fine", "odd", "broken")))
    assert [(s.status, s.values, s.note) for s in signals] == [
        ("ok", (0.75,), ""),
        ("abstained", (), "picky"),
        ("failed", (), "picky: ValueError: cannot read it"),
    ]


def test_as_a_recipe_has_it():
    members = [{"name": "number"}, {"name": "exact", "clip": [0.25, 1.0]}]
    source = build_source(RewardConfig(name="ensemble", settings={"sources": members, "combine": "worst"}))
    assert [s.values for s in asyncio.run(source(group("4", "it is 4")))] == [(1.0,), (0.25,)]
    assert (source.name, source.needs) == ("ensemble", {"answer"})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sources": [{"name": "number"}]}, "has 1 sources"),
        ({"sources": [{"name": "number"}, {"name": "exact", "weight": 2}]}, "take no weight"),
        ({"sources": [{"name": "number"}, {"name": "exact"}], "coefficient": 2.0}, "no effect on 'mean'"),
        ({"sources": [{"name": "number"}, {"name": "exact"}], "combine": "median"}, "'combine'"),
        ({"sources": [{"name": "number"}, {"nam": "exact"}]}, "sources.1"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, object], said: str):
    with pytest.raises(ConfigError, match=said):
        build_source(RewardConfig(name="ensemble", settings=settings))
