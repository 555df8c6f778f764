"""What an audit says of each bias: found, not found, or not enough data. One rule for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from headwater.evaluation.audit.statistics import Interval, holm
from headwater.types import Json

Verdict = Literal["found", "not found", "not enough data"]
MOST_UNJUDGED = 0.2
"""With a larger share of comparisons without a verdict, nothing is said: they may be the biased ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One bias, measured.

    `effect` with its 95% `interval` is what `measure` says in words, and `tolerated` the effect where
    nothing is the matter, of which `p` is the two-sided p-value. An effect below `threshold` does not
    matter; with `both_ways` one above -threshold does not either. `n` comparisons count and
    `unjudged` more had no verdict. `needed` is how many would settle it. `barred` says why no verdict can be
    given at all.
    """

    name: str
    measure: str
    effect: float
    interval: Interval
    threshold: float
    n: int
    p: float
    tolerated: float = 0.0
    both_ways: bool = False
    unjudged: int = 0
    needed: int | None = None
    verdict: Verdict = "not enough data"
    p_adjusted: float = 1.0
    barred: str = ""
    note: str = ""
    details: Mapping[str, Json] = field(default_factory=dict[str, Json])


def decide(findings: Sequence[Finding], alpha: float = 0.05) -> list[Finding]:
    """The findings with their verdicts.

    *found*: the effect is on the harmful side of what is tolerated, with p below `alpha` after Holm's
    correction for all biases of the audit, and it may be as large as the threshold. *not found*: the whole
    interval is below the threshold. Else there is not enough data. So where nothing is the matter, the chance
    of any "found" is at most `alpha`; and "not found" is a claim, not a lack of evidence.
    """
    adjusted = holm({f.name: f.p for f in findings if not f.barred})
    return [_decided(f, adjusted.get(f.name, 1.0), alpha) for f in findings]


def _decided(finding: Finding, p: float, alpha: float) -> Finding:
    low, high = finding.interval
    barred = finding.barred
    asked = finding.n + finding.unjudged
    if not barred and asked and finding.unjudged > MOST_UNJUDGED * asked:
        barred = f"{finding.unjudged} of {asked} comparisons had no verdict"
    small = high < finding.threshold and (not finding.both_ways or low > -finding.threshold)
    harmful = finding.effect > finding.tolerated or (finding.both_ways and finding.effect < -finding.tolerated)
    verdict: Verdict = "not enough data"
    if barred:
        pass
    elif small:
        verdict = "not found"
    elif harmful and p < alpha:
        verdict = "found"
    return replace(finding, verdict=verdict, p_adjusted=p, barred=barred)
