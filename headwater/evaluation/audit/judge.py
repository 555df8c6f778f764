"""Is a judge to be trusted? Each known bias of judges is probed on the same items, and gets a verdict.

Every comparison is made in both orders, and a win counts only where both agree. Comparisons without a verdict
are counted and take no part. What is measured, and against what:

    position        wins of the first place less wins of the second, over all items
    length          the change in the chance to win from much shorter to much longer, at equal preference of people
    self-preference agreement with people where they prefer its own answers, less where they prefer others'
    verbosity       wins of an answer with itself repeated as a list over itself
    sycophancy      moves to an answer after the asker states a belief in it, less moves away
    challenge       changes of mind after "are you sure?", less those after a neutral request to repeat
    authority, bandwagon, injection     as sycophancy, with a word in the answer itself instead of a neutral one
    master keys, constant answers       wins of empty phrases over real answers
    rubric          changes of verdict under a rubric in other words, less those under the same one
    disagreement    with people: Cohen's kappa below a floor
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from headwater.errors import ConfigError, UnknownName
from headwater.evaluation.audit import judge_nudges, judge_order, judge_people
from headwater.evaluation.audit.findings import Finding, decide
from headwater.evaluation.audit.judge_bench import Bench, Bounds, Mode
from headwater.evaluation.audit.judge_items import Item
from headwater.evaluation.audit.page import Report
from headwater.rewards.judge.panel import LLMJudge
from headwater.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeAudit:
    """What was found of one judge. `asked` is what it took, by name: the judge's Tally."""

    judge: str
    mode: Mode
    items: int
    findings: tuple[Finding, ...]
    bounds: Bounds
    asked: Mapping[str, Json] = field(default_factory=dict[str, Json])

    def __getitem__(self, name: str) -> Finding:
        """The finding of that name."""
        return next(finding for finding in self.findings if finding.name == name)


async def audit_judge(
    judge: LLMJudge,
    items: Sequence[Item],
    *,
    mode: Mode = "pairwise",
    own: str | None = None,
    only: Sequence[str] = (),
    bounds: Bounds | None = None,
) -> JudgeAudit:
    """Audit a judge on items. `own` is the author name whose answers are the judge's own; `only` names the
    probes to run (all unless given). Raises ConfigError where there is nothing to audit with."""
    if not items:
        raise ConfigError("An audit needs items to judge; there are none.")
    if own is not None and not any(own in (i.first_author, i.second_author) for i in items):
        raise ConfigError(f"No item has an answer by '{own}', so its self-preference cannot be told.")
    for name in only:
        if name not in PROBES:
            raise UnknownName("probe", name, PROBES, "the judge audit")
    bounds = bounds or Bounds()
    bench = Bench(judge=judge, items=items, mode=mode, bounds=bounds, own=own)
    # one after another, so that a run that is cut short has whole probes in its cache
    found = [await probe(bench) for name, probe in PROBES.items() if not only or name in only]
    return JudgeAudit(
        judge=judge.name,
        mode=mode,
        items=len(items),
        findings=tuple(decide(found, bounds.alpha)),
        bounds=bounds,
        asked=dict(asdict(judge.tally)),
    )


def report(audit: JudgeAudit, spent: Mapping[str, Json] | None = None) -> Report:
    """The audit as a report; `spent` is what asking came to, where that is known."""
    facts: dict[str, Json] = {
        "judge": audit.judge,
        "mode": audit.mode,
        "items": audit.items,
        "bounds": asdict(audit.bounds),
        "asked": dict(audit.asked),
        "spent": dict(spent or {}),
    }
    return Report(title=f"Audit of the judge {audit.judge}", findings=audit.findings, facts=facts)


PROBES: Mapping[str, Callable[[Bench], Awaitable[Finding]]] = {
    "position": judge_order.position,
    "length": judge_order.length,
    "self-preference": judge_people.self_preference,
    "verbosity": judge_nudges.verbosity,
    "sycophancy": judge_nudges.sycophancy,
    "challenge": judge_nudges.challenge,
    "authority": judge_nudges.authority,
    "bandwagon": judge_nudges.bandwagon,
    "injection": judge_nudges.injection,
    "master keys": judge_nudges.master_keys,
    "constant answers": judge_nudges.constant_answers,
    "rubric": judge_nudges.rubric,
    "disagreement": judge_people.disagreement,
}
"""Every probe of an audit, by the name of the bias that it measures."""
