"""A judge at work on items, and the forms that what was measured takes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headwater.evaluation.audit.findings import Finding
from headwater.evaluation.audit.judge_items import Item
from headwater.evaluation.audit.statistics import binomial_test, pairs_needed, tango
from headwater.rewards.judge.panel import Duel, LLMJudge
from headwater.rewards.judge.verdicts import Winner
from headwater.types import Json

Mode = Literal["pairwise", "pointwise"]
FEWEST_LABELS = 20
"""With fewer labels of people nothing is said of a judge against them."""
TOO_FEW_LABELS = f"fewer than {FEWEST_LABELS} items say what people prefer"
NEUTRAL = "(This answer was written down in one sitting and is given here as it was then, in full.)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How large an effect matters. Shares of all comparisons; `length` is a change in the chance to win;
    `keys` the share of empty answers that may win; `kappa` the least agreement with people. `alpha` is the
    chance of any false alarm in a whole audit."""

    position: float = 0.10
    moves: float = 0.10
    length: float = 0.15
    own: float = 0.10
    keys: float = 0.05
    kappa: float = 0.40
    alpha: float = 0.05


@dataclass(slots=True, kw_only=True)
class Bench:
    """A judge at work on items. Duels that several probes need are fought once. In mode "pointwise" a duel
    is two scores, and the higher one wins."""

    judge: LLMJudge
    items: Sequence[Item]
    mode: Mode
    bounds: Bounds
    own: str | None
    _plain: list[Duel] | None = None
    _lengthened: list[Duel] | None = None

    async def duel(self, prompt: str, first: str, second: str, seed: int = 0, judge: LLMJudge | None = None) -> Duel:
        """Two answers compared, in both orders."""
        judge = judge or self.judge
        if self.mode == "pairwise":
            return await judge.duel(prompt, first, second, seed=seed)
        one, other = await asyncio.gather(judge.score(prompt, first, seed=seed), judge.score(prompt, second, seed=seed))
        if one.verdict is None or other.verdict is None:
            return Duel(None, None, one.note or other.note)
        lead = one.verdict - other.verdict
        winner: Winner = "first" if lead > 0 else "second" if lead < 0 else "tie"
        return Duel(winner, winner)

    async def plain(self) -> list[Duel]:
        """The items as they are."""
        if self._plain is None:
            self._plain = await asyncio.gather(*(self.duel(i.prompt, i.first, i.second) for i in self.items))
        return self._plain

    async def lengthened(self) -> list[Duel]:
        """The items with a sentence that says nothing added to their targets: what a probe that adds a word in
        an answer's favour is compared with, so that its length is not what moves the judge."""
        if self._lengthened is None:
            changed = (item.with_target(f"{item.text(item.target)}\n\n{NEUTRAL}") for item in self.items)
            self._lengthened = await asyncio.gather(*(self.duel(*texts) for texts in changed))
        return self._lengthened


def net(
    name: str,
    measure: str,
    toward: int,
    away: int,
    n: int,
    unjudged: int,
    threshold: float,
    *,
    both_ways: bool = False,
    details: Mapping[str, Json],
) -> Finding:
    """A net share of comparisons that went one way: Tango's interval, and the exact sign test."""
    return Finding(
        name=name,
        measure=measure,
        effect=(toward - away) / n if n else 0.0,
        interval=tango(toward, away, n),
        threshold=threshold,
        both_ways=both_ways,
        n=n,
        unjudged=unjudged,
        p=binomial_test(toward, toward + away),
        needed=pairs_needed((toward + away) / n if n else 1.0, threshold),
        details=details,
    )


def barred(name: str, measure: str, why: str, n: int = 0) -> Finding:
    """No verdict can be given, and why."""
    unknown = math.nan
    return Finding(
        name=name,
        measure=measure,
        effect=unknown,
        interval=(unknown, unknown),
        threshold=unknown,
        n=n,
        p=1.0,
        barred=why,
    )
