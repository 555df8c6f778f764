"""A judge beside people: whether it agrees with them, and whether it favours its own answers over what they say."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from headwater.evaluation.audit.findings import Finding
from headwater.evaluation.audit.judge_bench import FEWEST_LABELS, TOO_FEW_LABELS, Bench, barred
from headwater.evaluation.audit.judge_items import Item
from headwater.evaluation.audit.statistics import (
    DETECTED,
    Z,
    bootstrap,
    cohen_kappa,
    gwet,
    marginals,
    newcombe,
    two_shares_test,
    two_sided,
)
from headwater.rewards.judge.panel import Duel, turned
from headwater.types import Json

_MEASURE = "P(picks own | people pick own) - P(picks other | people pick other)"


@dataclass(slots=True)
class _Votes:
    """Verdicts on pairs of which people preferred one. Of pairs with one answer of the judge's own: how often
    its own was the better one by people (key True) or the other was (False), and how often it agreed. Of the
    pairs in which the other was better: its votes for its own. Of pairs without its own: wrong votes."""

    asked: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    agreed: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    wrong_own: int = 0
    others: int = 0
    wrong_others: int = 0
    unjudged: int = 0

    def count(self, item: Item, duel: Duel, own: str) -> None:
        """Take in one item, if it can tell anything."""
        if item.preferred not in ("first", "second") or item.first_author is None or item.second_author is None:
            return
        mine = {"first": item.first_author == own, "second": item.second_author == own}
        if all(mine.values()):
            return
        if not duel.judged:
            self.unjudged += 1
            return
        wrong = duel.winner == turned(item.preferred)
        if not any(mine.values()):
            self.others += 1
            self.wrong_others += wrong
            return
        own_is_better = mine[item.preferred]
        self.asked[own_is_better] += 1
        self.agreed[own_is_better] += duel.winner == item.preferred
        self.wrong_own += wrong and not own_is_better


async def self_preference(bench: Bench) -> Finding:
    """Equal opportunity (Wataoka et al., 2024, arXiv:2410.21819), and where there are pairs without the judge's
    own answers, also beside the wrong votes that others get: most gaps are only hard items (arXiv:2601.22548)."""
    if bench.own is None:
        return barred("self-preference", _MEASURE, "nobody said which author the judge is")
    votes = _Votes()
    for item, duel in zip(bench.items, await bench.plain(), strict=True):
        votes.count(item, duel, bench.own)
    own_better, other_better = votes.asked[True], votes.asked[False]
    count = own_better + other_better
    if min(own_better, other_better) < FEWEST_LABELS:
        return barred("self-preference", _MEASURE, TOO_FEW_LABELS + " on its own answers", n=count)
    tested = (votes.agreed[True], own_better, votes.agreed[False], other_better)
    p, details, note = two_shares_test(*tested), _own_details(votes), _ALONE
    if votes.others >= FEWEST_LABELS:
        note = "also compared with wrong votes for others, which hard items get as well"
        beside = (votes.wrong_own, other_better, votes.wrong_others, votes.others)
        more = votes.wrong_own * votes.others > votes.wrong_others * other_better
        p = max(p, two_shares_test(*beside) if more else 1.0)
        details |= {
            "wrong_votes_for_others": votes.wrong_others / votes.others,
            "excess_of_wrong_votes": votes.wrong_own / other_better - votes.wrong_others / votes.others,
            "excess_interval": newcombe(*beside),
        }
    share = sum(votes.agreed.values()) / count
    return Finding(
        name="self-preference",
        measure=_MEASURE,
        effect=votes.agreed[True] / own_better - votes.agreed[False] / other_better,
        interval=newcombe(*tested),
        threshold=bench.bounds.own,
        n=count,
        unjudged=votes.unjudged,
        p=p,
        needed=math.ceil(4 * max(share * (1 - share), 0.01) * (DETECTED / bench.bounds.own) ** 2),
        note=note,
        details=details,
    )


_ALONE = "no pair without its own answers: wrong votes for others are not known, so hard items may explain a gap"


def _own_details(votes: _Votes) -> dict[str, Json]:
    return {
        "people_pick_own": votes.asked[True],
        "judge_picks_own_too": votes.agreed[True],
        "people_pick_other": votes.asked[False],
        "judge_picks_other_too": votes.agreed[False],
        "wrong_votes_for_own": votes.wrong_own / votes.asked[False],
    }


async def disagreement(bench: Bench) -> Finding:
    """How far Cohen's kappa with people is below its floor, beside raw agreement, Gwet's AC1 and the marginals
    of both, without which kappa cannot be read, and the kappa of people among themselves where it is known."""
    measure = "how far Cohen's kappa with people is below its floor (kappa itself is in the details)"
    duels = await bench.plain()
    labelled = [(i, d) for i, d in zip(bench.items, duels, strict=True) if i.preferred is not None]
    pairs = [(str(d.winner), str(i.preferred)) for i, d in labelled if d.judged]
    if len(pairs) < FEWEST_LABELS:
        return barred("disagreement", measure, TOO_FEW_LABELS, n=len(pairs))
    kappa, floor = cohen_kappa(pairs), bench.bounds.kappa
    low, high = bootstrap(lambda chosen: cohen_kappa([pairs[i] for i in chosen]), len(pairs))
    people = [(str(i.preferred), str(i.again)) for i in bench.items if i.preferred and i.again]
    said, meant = [a for a, _ in pairs], [b for _, b in pairs]
    details: dict[str, Json] = {
        "kappa": kappa,
        "kappa_interval": (low, high),
        "raw_agreement": sum(a == b for a, b in pairs) / len(pairs),
        "gwet_ac1": gwet(pairs, len({*said, *meant})),
        "marginals_of_judge": marginals(said),
        "marginals_of_people": marginals(meant),
        "kappa_between_people": cohen_kappa(people) if people else None,
    }
    if math.isnan(kappa) or math.isnan(low):
        return replace(barred("disagreement", measure, "all labels are the same", n=len(pairs)), details=details)
    spread = max((high - low) / (2 * Z), 1e-9)
    # turned round, so that, as for all biases, more is worse
    return Finding(
        name="disagreement",
        measure=measure,
        effect=floor - kappa,
        interval=(floor - high, floor - low),
        threshold=0.0,
        n=len(pairs),
        unjudged=len(labelled) - len(pairs),
        p=two_sided((floor - kappa) / spread),
        needed=math.ceil(len(pairs) * (DETECTED * spread / max(abs(kappa - floor), 0.05)) ** 2),
        details=details,
    )
