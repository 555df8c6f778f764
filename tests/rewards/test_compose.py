from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headwater.errors import ConfigError, UnknownName
from headwater.rewards.compose import PenaltyConfig, Shaped, length_ramp, repeated_share
from headwater.rewards.registry import RewardConfig, build_source
from headwater.rewards.source import Source, judge, verifier
from headwater.types import Group, Signal, Span, Task, Trajectory


def group(*texts: str, tokens: int | None = None) -> Group:
    """Answers with a token for each character."""
    spans = [Span(author="policy", tokens=tuple(map(ord, text))[:tokens], text=text) for text in texts]
    return Group(
        task=Task(id="t", prompt="?", answer="4"),
        trajectories=tuple(Trajectory(task_id="t", spans=(span,)) for span in spans),
    )


def built(**keys: object) -> Source:
    return build_source(RewardConfig.model_validate(keys))


def said(source: Source, asked: Group) -> list[float | str]:
    (judged,) = asyncio.run(judge([asked], [(source, 1.0)]))
    signals = [next(s for s in t.signals if s.name == "reward") for t in judged.trajectories]
    return [s.values[0] if s.status == "ok" else s.status for s in signals]


@verifier
def length(text: str, task: Task) -> float:
    return float(len(text))


@verifier
def careful(text: str, task: Task) -> float | None:
    if text == "broken":
        raise ValueError("broken")
    return None if text == "odd" else float(text == "right")


# --- the gate ------------------------------------------------------------------------------------------


def test_a_reward_counts_only_behind_its_gate_and_no_answer_of_the_gate_is_no_zero():
    source = Shaped(source=length, gate=careful, otherwise=-1.0)
    assert said(source, group("right", "wrong", "odd", "broken")) == [5.0, -1.0, "abstained", "failed"]


def test_notes_say_what_the_gate_said():
    signals = asyncio.run(Shaped(source=length, gate=careful)(group("wrong", "odd", "broken")))
    assert [s.note for s in signals] == [
        "gate careful: 0 is below 1",
        "gate careful",
        "gate careful: ValueError: broken",
    ]
    assert {s.source for s in signals} == {"length"}


def test_behind_a_shut_gate_nobody_is_asked_unless_the_source_compares():
    class Rank:
        name, offers, needs = "rank", frozenset({"reward"}), frozenset({"rubric"})

        def __init__(self, compares: bool) -> None:
            self.compares, self.asked = compares, []

        async def __call__(self, group: Group):
            self.asked.append([t.text for t in group.trajectories])
            return [Signal(source="rank", name="reward", values=(float(i),)) for i, _ in enumerate(group.trajectories)]

    alone, together = Rank(False), Rank(True)
    assert said(Shaped(source=alone, gate=careful), group("wrong", "right", "right")) == [0.0, 0.0, 1.0]
    assert said(Shaped(source=together, gate=careful), group("wrong", "right", "right")) == [0.0, 1.0, 2.0]
    assert (alone.asked, together.asked) == ([["right", "right"]], [["wrong", "right", "right"]])
    said(Shaped(source=together, gate=careful), group("wrong", "odd"))
    assert len(together.asked) == 1
    assert Shaped(source=together, gate=built(name="number")).needs == {"rubric", "answer"}


def test_a_gate_as_a_recipe_has_it():
    source = built(
        name="exact", gate={"name": "number", "settings": {"tolerance": 0.5}, "at_least": 1, "otherwise": -2}
    )
    assert said(source, group("4", "5", "9")) == [1.0, 0.0, -2.0]
    with pytest.raises(UnknownName, match="Did you mean 'number'"):
        built(name="exact", gate={"name": "numbr"})
    with pytest.raises(ValidationError):
        built(name="exact", gate={"name": "number", "atleast": 1})


# --- penalties and clipping ----------------------------------------------------------------------------


def test_length_by_hand():
    # 4 free, all of it at 8: 6 tokens are half way
    penalty = {"kind": "length", "free": 4, "most": 8, "weight": 2.0}
    source = built(name="number", penalties=[penalty])
    assert said(source, group("it: 4", "is: 44")) == [1.0 - 2 * 0.25, 0.0 - 2 * 0.5]
    assert [length_ramp(n, 4, 8) for n in (0, 4, 6, 8, 99)] == [0, 0, 0.5, 1, 1]


def test_repetition_by_hand():
    # a b a b a b: five pairs, ab ba ab ba ab, of which two are distinct
    assert repeated_share([1, 2] * 3, n=2) == pytest.approx(3 / 5)
    assert repeated_share([1, 2, 3], n=4) == repeated_share([], n=1) == 0.0
    assert PenaltyConfig(kind="repetition", n=2, weight=0.5).of([1, 2] * 3) == pytest.approx(0.3)


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_repetition_is_a_share_and_only_grows_when_all_is_said_twice(tokens: list[int], n: int):
    share = repeated_share(tokens, n)
    assert 0 <= share < 1
    assert repeated_share(tokens * 2, n) >= share - 1e-12


def test_clip_comes_first_then_penalties_then_the_gate():
    source = Shaped(
        source=length,
        clip=(0.0, 2.0),
        penalties=(PenaltyConfig(kind="length", free=0, most=5, weight=1.0),),
        gate=careful,
        otherwise=7.0,
    )
    assert said(source, group("right", "wrong")) == [2.0 - 1.0, 7.0]


def test_what_was_not_judged_stays_so_and_what_has_no_tokens_is_failed():
    penalty = (PenaltyConfig(kind="repetition"),)
    assert said(Shaped(source=careful, penalties=penalty, clip=(0.5, 1)), group("odd", "broken")) == [
        "abstained",
        "failed",
    ]
    assert said(Shaped(source=length, penalties=penalty), group("no tokens", tokens=0)) == ["failed"]
    assert said(Shaped(source=length, penalties=penalty), group("")) == [0.0]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"clip": [1, 1]}, "wanted .lowest, highest"),
        ({"penalties": [{"kind": "length", "free": 3}]}, "free = 3 and most = None"),
        ({"penalties": [{"kind": "length", "free": 3, "most": 3}]}, "with free below most"),
        ({"penalties": [{"kind": "repetition", "most": 3}]}, "they are for 'length'"),
        ({"penalties": [{"kind": "length", "free": 3, "most": 4, "n": 2}]}, "that is for 'repetition'"),
    ],
)
def test_what_cannot_be_meant_is_refused(keys: dict[str, object], said: str):
    with pytest.raises(ConfigError, match=said):
        built(name="number", **keys)


def test_shaping_what_gives_no_reward_is_refused(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_steps.py").write_text(
        "class Steps:\n    name, offers, needs = 'steps', frozenset({'step_reward'}), frozenset()\n"
        "    async def __call__(self, group):\n        return []\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="gives no reward"):
        built(name="own_steps:Steps", clip=[0, 1])
