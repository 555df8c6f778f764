"""What has nothing to do with worth and every pair has: which answer stands first, and which is longer."""

from __future__ import annotations

import math

import numpy as np

from headwater.evaluation.audit.findings import Finding
from headwater.evaluation.audit.judge_bench import FEWEST_LABELS, TOO_FEW_LABELS, Bench, barred, net
from headwater.evaluation.audit.judge_items import Item
from headwater.evaluation.audit.statistics import DETECTED, Z, logistic, trend, two_sided
from headwater.evaluation.held_out import wilson
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
    """What length does to the chance that what people prefer wins: least squares of wins on tanh(difference of
    lengths / its deviation). The details hold the raw win rate beside the one at equal length, by logit P(win) =
    theta + phi · tanh(...), as in AlpacaEval 2 (Dubois et al., 2024, arXiv:2404.04475)."""
    measure = "change in the chance that the preferred answer wins, from one deviation shorter to one longer"
    asked = [
        (item, duel)
        for item, duel in zip(bench.items, await bench.plain(), strict=True)
        if item.preferred in ("first", "second")
    ]
    chosen = [(item, duel) for item, duel in asked if duel.judged]
    if len(chosen) < FEWEST_LABELS:
        return barred("length", measure, TOO_FEW_LABELS + " to tell length from quality", n=len(chosen))
    gap_N = np.array([_longer(item) for item, _ in chosen], dtype=float)
    win_N = np.array([0.5 if d.winner == "tie" else float(d.winner == i.preferred) for i, d in chosen])
    if gap_N.std() == 0:
        return barred("length", measure, "all pairs differ by the same length", n=len(chosen))
    bend_N = np.tanh(gap_N / gap_N.std())
    change, error = (2 * math.tanh(1) * found for found in trend(bend_N, win_N))
    return Finding(
        name="length",
        measure=measure,
        effect=change,
        interval=(change - Z * error, change + Z * error),
        threshold=bench.bounds.length,
        both_ways=True,
        n=len(chosen),
        unjudged=len(asked) - len(chosen),
        p=two_sided(change / error),
        needed=math.ceil(len(chosen) * (DETECTED * error / bench.bounds.length) ** 2),
        details=_controlled(bend_N, win_N),
    )


def _longer(item: Item) -> int:
    """By how many characters the preferred answer is longer."""
    gap = len(item.first) - len(item.second)
    return gap if item.preferred == "first" else -gap


def _controlled(bend_N: np.ndarray, win_N: np.ndarray) -> dict[str, Json]:
    """Win rates of what people prefer, raw and at equal length."""
    beta, error = logistic(np.stack([np.ones(len(bend_N)), bend_N], axis=1), win_N)
    raw, controlled = float(win_N.mean()), float(1 / (1 + math.exp(-beta[0])))
    phi, spread = float(beta[1]), float(error[1])
    return {
        "raw_win_rate": raw,
        "length_controlled_win_rate": controlled,
        "raw_and_controlled_differ_by_over_10_points": abs(raw - controlled) > 0.1,
        "phi": phi,
        "phi_interval": (phi - Z * spread, phi + Z * spread),
        "longer_preferred_by_people": float((bend_N > 0).mean()),
    }
