"""Judges as sources of reward: by score, by duels among siblings or with a reference, or by ranking."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headwater.errors import ConfigError
from headwater.rewards.judge import prompts
from headwater.rewards.judge.ask import Ask, Remembered
from headwater.rewards.judge.endpoint import Endpoint, EndpointConfig
from headwater.rewards.judge.panel import Disagreement, Duel, LLMJudge
from headwater.rewards.judge.prompts import Secret, asked
from headwater.rewards.source import Source
from headwater.types import Group, Message, Signal, Status, Task, Trajectory

_WORTH = {"first": 1.0, "tie": 0.5, "second": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointwise:
    """The judge's score of each answer, from 0 (lowest of the scale) to 1: the mean over `samples`, of which
    at least half must have a verdict. With `referenced`, the judge also sees the task's own answer or
    completion; a task with neither is then not for it to judge."""

    name: str
    judge: LLMJudge
    samples: int = 1
    referenced: bool = False
    offers: frozenset[str] = frozenset({"reward"})

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"answer"}) if self.referenced else frozenset()

    async def __call__(self, group: Group) -> tuple[Signal, ...]:
        return tuple(await asyncio.gather(*(self._signal(group.task, one) for one in group.trajectories)))

    async def _signal(self, task: Task, trajectory: Trajectory) -> Signal:
        if trajectory.stop == "error":
            return _without(self.name, "failed", "the episode ended in an error")
        reference = known_answer(task) if self.referenced else None
        if self.referenced and reference is None:
            return _without(self.name, "abstained", "the task has no answer to compare with")
        said = await asyncio.gather(
            *(self.judge.score(asked(task), trajectory.text, reference, seed=sample) for sample in range(self.samples))
        )
        scores = [one.verdict for one in said if one.verdict is not None]
        if 2 * len(scores) < self.samples or not scores:
            note = next(one.note for one in said if one.verdict is None)
            return _without(self.name, "failed", note)
        low, high = self.judge.scale
        mean = math.fsum(scores) / len(scores)
        return Signal(source=self.name, name="reward", values=((mean - low) / (high - low),), note=said[0].note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairwise:
    """Each answer's share of won duels, a tie counting half: with its siblings, or with the task's own
    answer or completion. Every duel is fought in both orders. Where these disagree it is a tie, or with
    `disagreement` "abstain" it does not count; the note says how many did. `opponents` bounds how many of
    the siblings after it each answer meets (all of them unless given)."""

    name: str
    judge: LLMJudge
    against: Literal["siblings", "reference"] = "siblings"
    disagreement: Disagreement = "tie"
    opponents: int | None = None
    offers: frozenset[str] = frozenset({"reward"})

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"answer"}) if self.against == "reference" else frozenset()

    async def __call__(self, group: Group) -> tuple[Signal, ...]:
        if self.against == "reference":
            return tuple(await asyncio.gather(*(self._against(group.task, one) for one in group.trajectories)))
        whole = [i for i, one in enumerate(group.trajectories) if one.stop != "error"]
        pairs = _pairs(whole, self.opponents)
        texts = [one.text for one in group.trajectories]
        question = asked(group.task)
        duels = await asyncio.gather(*(self.judge.duel(question, texts[i], texts[j]) for i, j in pairs))
        fought: list[list[tuple[Duel, bool]]] = [[] for _ in texts]
        for (i, j), duel in zip(pairs, duels, strict=True):
            fought[i].append((duel, True))
            fought[j].append((duel, False))
        return tuple(
            self._signal(one, mine) if one.stop != "error" else _broken(self.name)
            for one, mine in zip(group.trajectories, fought, strict=True)
        )

    async def _against(self, task: Task, trajectory: Trajectory) -> Signal:
        if trajectory.stop == "error":
            return _broken(self.name)
        reference = known_answer(task)
        if reference is None:
            return _without(self.name, "abstained", "the task has no answer to compare with")
        duel = await self.judge.duel(asked(task), trajectory.text, reference)
        return self._signal(trajectory, [(duel, True)])

    def _signal(self, trajectory: Trajectory, fought: Sequence[tuple[Duel, bool]]) -> Signal:
        if not fought:
            return _without(self.name, "abstained", "there is no sibling to compare with")
        judged = [(duel, first) for duel, first in fought if duel.judged]
        if not judged:
            return _without(self.name, "failed", fought[0][0].note)
        split = sum(not duel.consistent for duel, _ in judged)
        counted = [one for one in judged if one[0].consistent or self.disagreement == "tie"]
        note = f"{len(judged)} of {len(fought)} duels judged, {split} decided by order"
        if not counted:
            return _without(self.name, "abstained", note)
        won = [_WORTH[duel.winner or "tie"] if first else 1 - _WORTH[duel.winner or "tie"] for duel, first in counted]
        return Signal(source=self.name, name="reward", values=(math.fsum(won) / len(won),), note=note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listwise:
    """Each answer's place among its siblings, from 0 (last) to 1 (first): the mean over a ranking of them
    as they stand and one of them in reverse order. At most `most` are ranked at once."""

    name: str
    judge: LLMJudge
    most: int = 10
    offers: frozenset[str] = frozenset({"reward"})
    needs: frozenset[str] = frozenset()

    async def __call__(self, group: Group) -> tuple[Signal, ...]:
        whole = [i for i, one in enumerate(group.trajectories) if one.stop != "error"]
        signals = [_broken(self.name) for _ in group.trajectories]
        if not 2 <= len(whole) <= self.most:
            note = f"{len(whole)} answers; from 2 to {self.most} can be ranked"
            for i in whole:
                signals[i] = _without(self.name, "abstained", note)
            return tuple(signals)
        texts = [group.trajectories[i].text for i in whole]
        question = asked(group.task)
        ahead, behind = await asyncio.gather(self.judge.rank(question, texts), self.judge.rank(question, texts[::-1]))
        if ahead.verdict is None or behind.verdict is None:
            for i in whole:
                signals[i] = _without(self.name, "failed", ahead.note or behind.note)
            return tuple(signals)
        last = len(whole) - 1
        for at, i in enumerate(whole):
            places = ahead.verdict.index(at), behind.verdict.index(last - at)
            note = f"place {places[0] + 1} and, in reverse order, {places[1] + 1} of {len(whole)}"
            signals[i] = Signal(source=self.name, name="reward", values=(1 - sum(places) / 2 / last,), note=note)
        return tuple(signals)


def known_answer(task: Task) -> str | None:
    """What a task itself holds as a good answer: its completion, else its answer."""
    return last_said(task.completion) or task.answer


def last_said(completion: str | tuple[Message, ...] | None) -> str | None:
    """A completion as text: its last message, where it has several."""
    if completion is None or isinstance(completion, str):
        return completion
    return completion[-1]["content"] if completion else None


def _pairs(whole: Sequence[int], opponents: int | None) -> list[tuple[int, int]]:
    """Who meets whom: everyone everyone, or each the next few, around a circle."""
    count = len(whole)
    reach = count - 1 if opponents is None else min(opponents, count - 1)
    found = {
        (min(a, b), max(a, b)) for a in range(count) for step in range(1, reach + 1) for b in ((a + step) % count,)
    }
    return [(whole[a], whole[b]) for a, b in sorted(found)]


def _without(source: str, status: Status, note: str) -> Signal:
    return Signal(source=source, name="reward", status=status, note=note)


def _broken(source: str) -> Signal:
    return _without(source, "failed", "the episode ended in an error")


# --- from settings ---------------------------------------------------------------------------------


def connect(settings: Mapping[str, Any], cache: str | None = None) -> tuple[Ask, Secret]:
    """Whom to ask, by the settings of an EndpointConfig, remembered in the folder `cache` if there is one;
    and the secret that fences are drawn from, which is kept there too. Raises ConfigError."""
    asks: Ask = Endpoint(EndpointConfig.model_validate(dict(settings)))
    if cache is None:
        return asks, Secret()
    folder = Path(cache).expanduser()
    return Remembered(ask=asks, folder=folder), Secret.kept(folder)


def llm_judge(
    *,
    endpoint: dict[str, Any],
    mode: Literal["pointwise", "pairwise", "reference", "listwise"] = "pointwise",
    rubric: str = prompts.HELPFUL,
    scale: tuple[int, int] = (1, 10),
    samples: int = 1,
    referenced: bool = False,
    opponents: int | None = None,
    disagreement: Disagreement = "tie",
    temperature: float = 0.0,
    max_tokens: int = 1024,
    max_characters: int = 20_000,
    guard: bool = True,
    cache: str | None = None,
) -> Source:
    """A language model's judgement over HTTP; settings: endpoint = {base_url, model, api_key_env, ...}, mode.

    Audit it before use: headwater audit judge. Raises ConfigError for settings that cannot work together.
    """
    asks, secret = connect(endpoint, cache)
    judge = LLMJudge(
        ask=asks,
        rubric=rubric,
        scale=scale,
        temperature=temperature,
        max_tokens=max_tokens,
        max_characters=max_characters,
        guard=guard,
        secret=secret,
    )
    return as_source(
        judge, mode=mode, samples=samples, referenced=referenced, opponents=opponents, disagreement=disagreement
    )


def as_source(
    judge: LLMJudge,
    *,
    name: str = "judge",
    mode: Literal["pointwise", "pairwise", "reference", "listwise"] = "pointwise",
    samples: int = 1,
    referenced: bool = False,
    opponents: int | None = None,
    disagreement: Disagreement = "tie",
) -> Source:
    """A judge as a source, in one of four modes. A setting that its mode does not read is refused."""
    idle = {
        "samples": samples != 1 and mode != "pointwise",
        "referenced": referenced and mode != "pointwise",
        "opponents": opponents is not None and mode != "pairwise",
        "disagreement": disagreement != "tie" and mode not in ("pairwise", "reference"),
        "samples (at temperature 0 they are all the same)": samples > 1 and judge.temperature == 0,
    }
    for setting, wrong in idle.items():
        if wrong:
            raise ConfigError(f"The judge's setting {setting} has no effect in mode '{mode}'. Remove it.")
    if samples < 1 or (opponents is not None and opponents < 1):
        raise ConfigError("The judge's samples and opponents must be at least 1.")
    if mode == "pointwise":
        return Pointwise(name=name, judge=judge, samples=samples, referenced=referenced)
    if mode == "listwise":
        return Listwise(name=name, judge=judge)
    against = "siblings" if mode == "pairwise" else "reference"
    return Pairwise(name=name, judge=judge, against=against, disagreement=disagreement, opponents=opponents)
