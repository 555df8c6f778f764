"""What can be said of judges from counts: intervals, exact tests, corrections for many tests, and how much
data would have been enough. Shares are from 0 to 1; intervals are of 95% unless `z` says otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist

import numpy as np

from headwater.evaluation.held_out import wilson

Interval = tuple[float, float]
Z = 1.959964
DETECTED = 2.8
"""How many standard errors off an effect must be to be found in four cases of five: z(0.975) + z(0.8)."""
_NORMAL = NormalDist()


# --- counts ----------------------------------------------------------------------------------------


def binomial_test(hits: int, n: int, share: float = 0.5, side: str = "two") -> float:
    """Exact p-value of `hits` out of n under a share; the two-sided one adds up all outcomes that are not
    more likely. 1 where n is 0. `side` is "two", "more" or "less"."""
    if n == 0:
        return 1.0
    logs = np.array([_log_choose(n, k) + _xlogy(k, share) + _xlogy(n - k, 1 - share) for k in range(n + 1)])
    mass = np.exp(logs)
    if side == "more":
        return min(1.0, float(mass[hits:].sum()))
    if side == "less":
        return min(1.0, float(mass[: hits + 1].sum()))
    return min(1.0, float(mass[logs <= logs[hits] + 1e-9].sum()))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _xlogy(x: float, y: float) -> float:
    return 0.0 if x == 0 else x * math.log(y) if y > 0 else -math.inf


def tango(b: int, c: int, n: int, z: float = Z) -> Interval:
    """Score interval of (b - c)/n, the net share of n pairs that moved one way (b) rather than the other (c).

    All d for which |b - c - n·d| <= z · sqrt(n · (2q + d·(1 - d))), with q the share of the second kind that
    is likeliest under d. Honest also where nothing moved (Tango, 1998, Statistics in Medicine 17).
    """
    if n == 0:
        return -1.0, 1.0
    share = (b - c) / n

    def deviates(d: float) -> float:
        slope = -b - c + (2 * n - b + c) * d
        likely = (math.sqrt(max(0.0, slope * slope - 8 * n * -c * d * (1 - d))) - slope) / (4 * n)
        spread = n * (2 * likely + d * (1 - d))
        gap = b - c - n * d
        return abs(gap) - z * math.sqrt(max(0.0, spread))

    return _cross(deviates, share, -1.0), _cross(deviates, share, 1.0)


def _cross(deviates: Callable[[float], float], inside: float, outside: float) -> float:
    """Where `deviates` turns positive on the way from inside to outside."""
    if deviates(outside) <= 0:
        return outside
    for _ in range(60):
        middle = (inside + outside) / 2
        if deviates(middle) > 0:
            outside = middle
        else:
            inside = middle
    return (inside + outside) / 2


def newcombe(a: int, n: int, b: int, m: int, z: float = Z) -> Interval:
    """Interval of a/n - b/m for independent shares, from their Wilson intervals (Newcombe, 1998, method 10)."""
    if n == 0 or m == 0:
        return -1.0, 1.0
    p, q = a / n, b / m
    (low, high), (lower, higher) = wilson(p, n, z), wilson(q, m, z)
    gap = p - q
    return gap - math.hypot(p - low, higher - q), gap + math.hypot(high - p, q - lower)


def two_shares_test(a: int, n: int, b: int, m: int) -> float:
    """Two-sided p-value for a/n = b/m, by the pooled normal test."""
    if n == 0 or m == 0:
        return 1.0
    pooled = (a + b) / (n + m)
    spread = math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
    return 1.0 if spread == 0 else two_sided((a / n - b / m) / spread)


def two_sided(z: float) -> float:
    """Two-sided p-value of a standard normal deviate."""
    return 2 * (1 - _NORMAL.cdf(abs(z)))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values corrected for how many there are: the chance that any is below alpha where nothing is the
    matter stays at alpha (Holm, 1979)."""
    adjusted: dict[str, float] = {}
    highest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda key: p_values[key])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = highest
    return adjusted


# --- power -----------------------------------------------------------------------------------------


def pairs_needed(moved: float, effect: float, alpha: float = 0.05, power: float = 0.8) -> int:
    """How many pairs show a net share of `effect`, where a share `moved` of them moves at all (Connor, 1987,
    Biometrics 43)."""
    moved = max(moved, effect)
    first, second = _NORMAL.inv_cdf(1 - alpha / 2), _NORMAL.inv_cdf(power)
    return math.ceil((first * math.sqrt(moved) + second * math.sqrt(moved - effect**2)) ** 2 / effect**2)


def trials_needed(limit: float, share: float = 0.0, z: float = Z) -> int:
    """How many trials put the upper Wilson bound below `limit`, where the share stays what it is."""
    if share >= limit:
        return 0
    high = 1
    while wilson(share, high, z)[1] >= limit and high < 1_000_000:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if wilson(share, middle, z)[1] >= limit else (low, middle)
    return high


# --- agreement -------------------------------------------------------------------------------------


def cohen_kappa(pairs: Sequence[tuple[str, str]]) -> float:
    """(p_o - p_e) / (1 - p_e), p_e from each rater's own marginals (Cohen, 1960). NaN where both only ever
    say the same one thing. Collapses where marginals are skewed, so read it beside them and `gwet`."""
    if not pairs:
        return math.nan
    n = len(pairs)
    said, meant = marginals([a for a, _ in pairs]), marginals([b for _, b in pairs])
    chance = sum(said.get(label, 0.0) * meant.get(label, 0.0) for label in said)
    return math.nan if chance >= 1 else (sum(a == b for a, b in pairs) / n - chance) / (1 - chance)


def gwet(pairs: Sequence[tuple[str, str]], categories: int) -> float:
    """Gwet's AC1: as kappa, with p_e = Σ_k π_k (1 - π_k) / (K - 1), π_k the mean marginal of the two (2008)."""
    if not pairs or categories < 2:
        return math.nan
    said, meant = marginals([a for a, _ in pairs]), marginals([b for _, b in pairs])
    shares = [(said.get(k, 0.0) + meant.get(k, 0.0)) / 2 for k in said.keys() | meant.keys()]
    chance = sum(p * (1 - p) for p in shares) / (categories - 1)
    return (sum(a == b for a, b in pairs) / len(pairs) - chance) / (1 - chance)


def marginals(labels: Sequence[str]) -> dict[str, float]:
    """The share of each label."""
    return {label: labels.count(label) / len(labels) for label in sorted(set(labels))}


# --- curves, ranks and resampling --------------------------------------------------------------------


def logistic(x_NK: np.ndarray, y_N: np.ndarray, ridge: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients of logit P(y) = x · beta, and their standard errors, robust to outcomes that are shares.

    Newton's method on the log-likelihood less ridge/2 · |beta|², which keeps beta finite where x separates the
    outcomes; errors from the sandwich H⁻¹ (Σ (y - p)² x xᵀ) H⁻¹ (Huber, 1967). y may be 0, 1 or between.
    """
    beta_K = np.zeros(x_NK.shape[1])
    hessian = np.eye(x_NK.shape[1])
    p_N = np.full(len(y_N), 0.5)
    for _ in range(50):
        p_N = 1 / (1 + np.exp(-np.clip(x_NK @ beta_K, -30, 30)))
        hessian = (x_NK * (p_N * (1 - p_N))[:, None]).T @ x_NK + ridge * np.eye(len(beta_K))
        step_K = np.linalg.solve(hessian, x_NK.T @ (y_N - p_N) - ridge * beta_K)
        beta_K = beta_K + step_K
        if np.abs(step_K).max() < 1e-9:
            break
    inverse = np.linalg.inv(hessian)
    meat = (x_NK * ((y_N - p_N) ** 2)[:, None]).T @ x_NK
    # under separation residuals vanish faster than the information does, so neither alone is honest
    return beta_K, np.sqrt(np.maximum(np.diag(inverse @ meat @ inverse), np.diag(inverse) * 0.25))


def trend(x_N: np.ndarray, y_N: np.ndarray) -> tuple[float, float]:
    """Least-squares change of a share y (from 0 to 1) per unit of x, and its standard error, robust to unequal
    variances (White, 1980, Econometrica 48).

    A win and a loss are added one deviation of x to either side, so that outcomes without variance do not make it
    certain: with an x of two values this is the adjustment of Agresti and Caffo (2000, Am. Stat. 54).
    """
    spread = float(x_N.std())
    x_N = np.concatenate([x_N, x_N.mean() + spread * np.array([1.0, 1.0, -1.0, -1.0])])
    y_N = np.concatenate([y_N, [1.0, 0.0, 1.0, 0.0]])
    centred_N = x_N - x_N.mean()
    total = float((centred_N**2).sum())
    if total == 0:
        return math.nan, math.nan
    change = float((centred_N * y_N).sum()) / total
    rest_N = y_N - y_N.mean() - change * centred_N
    return change, math.sqrt(float((centred_N**2 * rest_N**2).sum()) * len(x_N) / (len(x_N) - 2)) / total


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Rank correlation, ties at their mean rank. NaN where either does not vary."""
    if len(x) < 2:
        return math.nan
    return _pearson(ranks(x), ranks(y))


def partial_spearman(x: Sequence[float], y: Sequence[float], given: Sequence[float]) -> float:
    """Rank correlation of x and y that is left once both are told `given`. NaN where that settles them."""
    xy, xg, yg = spearman(x, y), spearman(x, given), spearman(y, given)
    if math.isnan(xg) or math.isnan(yg):
        return xy
    rest = (1 - xg * xg) * (1 - yg * yg)
    return math.nan if rest <= 1e-12 else (xy - xg * yg) / math.sqrt(rest)


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 1, ties at their mean."""
    found = np.asarray(values, dtype=float)
    order = np.argsort(found, kind="stable")
    placed = np.empty(len(found))
    placed[order] = np.arange(1, len(found) + 1)
    for value in np.unique(found):
        placed[found == value] = placed[found == value].mean()
    return placed


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float((x * x).sum() * (y * y).sum()))
    return math.nan if scale == 0 else float((x * y).sum()) / scale


def bootstrap(
    statistic: Callable[[Sequence[int]], float], n: int, *, draws: int = 1000, seed: int = 0, level: float = 0.95
) -> Interval:
    """Percentile interval of a statistic of items, which are drawn again with replacement; it is given their
    indices. Draws that give NaN are left out. (NaN, NaN) where there are fewer than two items."""
    if n < 2:
        return math.nan, math.nan
    chance = np.random.default_rng(seed)
    found = np.array([statistic(chance.integers(0, n, n).tolist()) for _ in range(draws)])
    found = found[~np.isnan(found)]
    if not len(found):
        return math.nan, math.nan
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def slope(values: Sequence[float]) -> float:
    """Least-squares change per step. NaN for fewer than two."""
    if len(values) < 2:
        return math.nan
    steps = np.arange(len(values)) - (len(values) - 1) / 2
    return float((steps * np.asarray(values)).sum() / (steps * steps).sum())


def diverging(inside: Sequence[float], outside: Sequence[Sequence[float]], *, seed: int = 0) -> bool:
    """Whether a self-rewarding loop should stop: the score by its own judge rises over the iterations, and
    the bootstrap upper bound of the slope of an outside judge's is below 0. `outside` holds, per
    iteration, the outside scores of the same items."""
    assert len(inside) == len(outside), "one entry an iteration"
    if len(inside) < 2 or not slope(inside) > 0:
        return False
    table = np.asarray(outside, dtype=float)
    _, high = bootstrap(lambda items: slope(table[:, items].mean(axis=1).tolist()), table.shape[1], seed=seed)
    return high < 0
