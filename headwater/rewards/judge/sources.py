"""Judges as sources of reward: by score, by duels among siblings or with a reference, or by ranking.

What a policy thought before its answer is not shown.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headwater.rewards.judge.panel import Duel, LLMJudge, hollow
from headwater.rewards.judge.prompts import asked
from headwater.rewards.verifiers.thinking import after_thinking
from headwater.types import Group, Message, Signal, Status, Task, Trajectory

Disagreement = Literal["tie", "abstain"]
"""What a duel is worth whose winner depends on the order of the answers."""

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
    needs: frozenset[str] = frozenset()
    compares: bool = False

    async def __call__(self, group: Group) -> tuple[Signal, ...]:
        return tuple(await asyncio.gather(*(self._signal(group.task, one) for one in group.trajectories)))

    async def _signal(self, task: Task, trajectory: Trajectory) -> Signal:
        if trajectory.stop == "error":
            return _broken(self.name)
        reference = known_answer(task) if self.referenced else None
        if self.referenced and reference is None:
            return _without(self.name, "abstained", "the task has no answer to compare with")
        answer = after_thinking(trajectory.text)
        said = await asyncio.gather(
            *(self.judge.score(asked(task), answer, reference, seed=sample) for sample in range(self.samples))
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
    needs: frozenset[str] = frozenset()

    async def __call__(self, group: Group) -> tuple[Signal, ...]:
        if self.against == "reference":
            return tuple(await asyncio.gather(*(self._against(group.task, one) for one in group.trajectories)))
        whole = [i for i, one in enumerate(group.trajectories) if one.stop != "error"]
        pairs = _pairs(whole, self.opponents)
        texts = [after_thinking(one.text) for one in group.trajectories]
        question = asked(group.task)
        duels = await asyncio.gather(*(self.judge.duel(question, texts[i], texts[j]) for i, j in pairs))
        fought: list[list[tuple[Duel, bool]]] = [[] for _ in texts]
        for (i, j), duel in zip(pairs, duels, strict=True):
            fought[i].append((duel, True))
            fought[j].append((duel, False))
        return tuple(
            self._signal(mine) if one.stop != "error" else _broken(self.name)
            for one, mine in zip(group.trajectories, fought, strict=True)
        )

    async def _against(self, task: Task, trajectory: Trajectory) -> Signal:
        if trajectory.stop == "error":
            return _broken(self.name)
        reference = known_answer(task)
        if reference is None:
            return _without(self.name, "abstained", "the task has no answer to compare with")
        duel = await self.judge.duel(asked(task), after_thinking(trajectory.text), reference)
        return self._signal([(duel, True)])

    def _signal(self, fought: Sequence[tuple[Duel, bool]]) -> Signal:
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
    as they stand and one of them in reverse order. At most `most` are ranked at once. A guarded judge is not
    shown hollow answers, which share the last places."""

    name: str
    judge: LLMJudge
    most: int = 10
    offers: frozenset[str] = frozenset({"reward"})
    needs: frozenset[str] = frozenset()

    async def __call__(self, group: Group) -> tuple[Signal, ...]:
        texts = [after_thinking(one.text) for one in group.trajectories]
        whole = [i for i, one in enumerate(group.trajectories) if one.stop != "error"]
        empty = [i for i in whole if self.judge.guard and hollow(texts[i])]
        ranked = [i for i in whole if i not in empty]
        signals = [_broken(self.name) for _ in group.trajectories]
        if len(whole) < 2 or len(ranked) > self.most:
            note = f"{len(ranked)} answers; from 2 to {self.most} can be ranked"
            return _spread(signals, whole, _without(self.name, "abstained", note))
        ahead, behind = await self._places(asked(group.task), [texts[i] for i in ranked])
        if isinstance(ahead, str) or isinstance(behind, str):
            note = ahead if isinstance(ahead, str) else str(behind)
            return _spread(signals, whole, _without(self.name, "failed", note))
        last = len(whole) - 1
        for i, first, second in zip(ranked, ahead, behind, strict=True):
            note = f"place {first + 1} and, in reverse order, {second + 1} of {len(whole)}"
            signals[i] = self._reward((first + second) / 2 / last, note)
        for i in empty:
            signals[i] = self._reward((len(ranked) + last) / 2 / last, "an answer without content")
        return tuple(signals)

    async def _places(self, question: str, texts: Sequence[str]) -> tuple[Sequence[int] | str, Sequence[int] | str]:
        """The place of each text from 0, as they stand and in reverse order; or why there is none."""
        if len(texts) < 2:
            return [0] * len(texts), [0] * len(texts)
        ahead, behind = await asyncio.gather(self.judge.rank(question, texts), self.judge.rank(question, texts[::-1]))
        if ahead.verdict is None or behind.verdict is None:
            return ahead.note or behind.note, ahead.note or behind.note
        last = len(texts) - 1
        at = range(len(texts))
        return [ahead.verdict.index(i) for i in at], [behind.verdict.index(last - i) for i in at]

    def _reward(self, place: float, note: str) -> Signal:
        return Signal(source=self.name, name="reward", values=(1 - place,), note=note)


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


def _spread(signals: Sequence[Signal], over: Sequence[int], signal: Signal) -> tuple[Signal, ...]:
    """The signals, with this one at those places."""
    return tuple(signal if i in over else kept for i, kept in enumerate(signals))


def _without(source: str, status: Status, note: str) -> Signal:
    return Signal(source=source, name="reward", status=status, note=note)


def _broken(source: str) -> Signal:
    return _without(source, "failed", "the episode ended in an error")
