"""What has nothing to do with worth and every pair has: which answer stands first, and which is longer."""

from __future__ import annotations

import math

import numpy as np

from headwater.evaluation.audit.findings import Finding
from headwater.evaluation.audit.judge_bench import FEWEST_LABELS, TOO_FEW_LABELS, Bench, barred, net
from headwater.evaluation.audit.statistics import Z, logistic, two_sided
from headwater.evaluation.held_out import wilson
from headwater.rewards.judge.panel import turned
from headwater.types import Json


async def position(bench: Bench) -> Finding:
    """Wins of the first place less wins of the second."""
    if bench.mode == "pointwise":
        return barred("position", "wins of the first place less the second", "each answer is judged by itself")
    duels = await bench.plain()
    judged = [duel for duel in duels if duel.judged]
    split = [duel for duel in judged if not duel.consistent]
    # an answer that stood first and won in both orders is "first" forward and "second" backward
    first = sum(duel.forward == "first" and duel.backward == "second" for duel in split)
    second = sum(duel.forward == "second" and duel.backward == "first" for duel in split)
    consistent = len(judged) - len(split)
    details: dict[str, Json] = {
        "consistency": consistent / len(judged) if judged else None,
        "consistency_interval": wilson(consistent / len(judged), len(judged)) if judged else None,
        "ties_in_both_orders": sum(duel.consistent and duel.winner == "tie" for duel in judged),
        "ties_in_one_order": len(split) - first - second,
        "first_place_both_times": first,
        "second_place_both_times": second,
        "first_bias": (first - second) / (first + second) if first + second else 0.0,
    }
    return net(
        "position",
        "wins of the first place less wins of the second, of all items",
        first,
        second,
        len(judged),
        len(duels) - len(judged),
        bench.bounds.position,
        both_ways=True,
        details=details,
    )


async def length(bench: Bench) -> Finding:
    """What length does to the chance to win, at equal preference of people: logit P(win) = theta + phi ·
    tanh(difference / deviation), as the length-controlled win rate of AlpacaEval 2 (Dubois et al., 2024,
    arXiv:2404.04475)."""
    measure = "change in the chance that the preferred answer wins, from one deviation shorter to one longer"
    duels = await bench.plain()
    chosen = [
        (item, duel)
        for item, duel in zip(bench.items, duels, strict=True)
        if item.preferred in ("first", "second") and duel.judged
    ]
    wanted = [item for item in bench.items if item.preferred in ("first", "second")]
    if len(chosen) < FEWEST_LABELS:
        return barred("length", measure, TOO_FEW_LABELS + " to tell length from quality", n=len(chosen))
    gaps, wins = [], []
    for item, duel in chosen:
        other = turned(item.preferred)
        assert item.preferred is not None and other is not None
        gaps.append(len(item.text(item.preferred)) - len(item.text(other)))
        wins.append(0.5 if duel.winner == "tie" else float(duel.winner == item.preferred))
    scale = float(np.std(gaps))
    if scale == 0:
        return barred("length", measure, "all pairs differ by the same length", n=len(chosen))
    bend_N = np.tanh(np.array(gaps) / scale)
    beta, error = logistic(np.stack([np.ones(len(gaps)), bend_N], axis=1), np.array(wins))
    phi, spread = float(beta[1]), float(error[1])
    raw, controlled = float(np.mean(wins)), float(1 / (1 + math.exp(-beta[0])))
    details: dict[str, Json] = {
        "raw_win_rate": raw,
        "length_controlled_win_rate": controlled,
        "raw_and_controlled_differ_by_over_10_points": abs(raw - controlled) > 0.1,
        "phi": phi,
        "phi_interval": (phi - Z * spread, phi + Z * spread),
        "longer_preferred_by_people": float(np.mean(np.array(gaps) > 0)),
    }
    return Finding(
        name="length",
        measure=measure,
        effect=_swing(phi),
        interval=(_swing(phi - Z * spread), _swing(phi + Z * spread)),
        threshold=bench.bounds.length,
        both_ways=True,
        n=len(chosen),
        unjudged=len(wanted) - len(chosen),
        p=two_sided(phi / spread),
        needed=math.ceil(len(chosen) * (2.8 * spread / _unswing(bench.bounds.length)) ** 2),
        note="logit P(win) = theta + phi · tanh(difference of lengths / its deviation), wins of what people prefer",
        details=details,
    )


def _swing(phi: float) -> float:
    """The change in probability, around one half, between tanh(-1) and tanh(1)."""
    return math.tanh(phi * math.tanh(1) / 2)


def _unswing(change: float) -> float:
    return 2 * math.atanh(change) / math.tanh(1)
