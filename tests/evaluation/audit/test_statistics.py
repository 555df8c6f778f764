import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.evaluation.audit import statistics as stats


@pytest.mark.parametrize(
    ("hits", "n", "share", "side", "p"),
    [
        (8, 10, 0.5, "two", 112 / 1024),  # 2 · (45 + 10 + 1) / 1024
        (8, 10, 0.5, "more", 56 / 1024),
        (2, 10, 0.5, "less", 56 / 1024),
        (0, 10, 0.05, "less", 0.95**10),
        (5, 10, 0.5, "two", 1.0),
        (0, 0, 0.5, "two", 1.0),
    ],
)
def test_binomial(hits: int, n: int, share: float, side: str, p: float):
    assert stats.binomial_test(hits, n, share, side) == pytest.approx(p)


def test_newcombe_is_as_published():
    # Newcombe 1998, Statistics in Medicine 17, table II, (a) 56/70 - 48/80 by method 10
    assert stats.newcombe(56, 70, 48, 80) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    assert stats.newcombe(1, 0, 1, 2) == (-1.0, 1.0)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 40))
def test_tango_solves_its_equation_and_is_symmetric(b: int, c: int, rest: int):
    n = b + c + rest
    low, high = stats.tango(b, c, n)
    assert -1 <= low <= (b - c) / n <= high <= 1
    assert stats.tango(c, b, n) == pytest.approx((-high, -low), abs=1e-9)
    for d in (low, high):
        # q maximises the likelihood b log(q + d) + c log q + rest log(1 - 2q - d)
        grid = np.linspace(max(0.0, -d) + 1e-9, (1 - d) / 2 - 1e-9, 200_001)
        likelihood = b * np.log(grid + d) + c * np.log(grid) + rest * np.log(1 - 2 * grid - d)
        q = grid[int(np.argmax(likelihood))]
        z = (b - c - n * d) / math.sqrt(n * (2 * q + d * (1 - d)))
        assert abs(z) == pytest.approx(stats.Z, abs=0.02)


def test_tango_covers_what_it_should():
    chance = np.random.default_rng(0)
    inside = 0
    for b, c, _ in chance.multinomial(50, [0.15, 0.05, 0.8], size=600):
        low, high = stats.tango(int(b), int(c), 50)
        inside += low <= 0.10 <= high
    assert 0.92 < inside / 600 < 0.98


def test_two_shares():
    assert stats.two_shares_test(50, 100, 50, 100) == 1.0
    assert stats.two_shares_test(60, 100, 40, 100) == pytest.approx(stats.two_sided(0.2 / math.sqrt(0.5 * 0.5 * 0.02)))
    assert stats.two_shares_test(0, 10, 0, 10) == 1.0


def test_holm_by_hand():
    found = stats.holm({"a": 0.01, "b": 0.04, "c": 0.03})
    assert found == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert stats.holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}


def test_power():
    assert stats.pairs_needed(0.3, 0.1) == 234  # ((1.96 √0.3 + 0.8416 √0.29) / 0.1)²
    assert stats.trials_needed(0.05) == 73  # z² / (n + z²) < 0.05
    assert stats.trials_needed(0.05, share=0.1) == 0


@pytest.mark.parametrize(("counts", "kappa", "ac1"), [((45, 5, 5, 45), 0.8, 0.8), ((90, 5, 5, 0), -0.0526, 0.8895)])
def test_kappa_collapses_on_skewed_marginals(counts: tuple[int, ...], kappa: float, ac1: float):
    kinds = [("yes", "yes"), ("yes", "no"), ("no", "yes"), ("no", "no")]
    pairs = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
    assert stats.cohen_kappa(pairs) == pytest.approx(kappa, abs=1e-4)
    assert stats.gwet(pairs, 2) == pytest.approx(ac1, abs=1e-4)


def test_kappa_by_hand():
    pairs = [("a", "a")] * 20 + [("a", "b")] * 5 + [("b", "a")] * 10 + [("b", "b")] * 15
    assert stats.cohen_kappa(pairs) == pytest.approx(0.4)  # (0.7 - 0.5) / 0.5
    assert math.isnan(stats.cohen_kappa([("a", "a")]))
    assert math.isnan(stats.cohen_kappa([]))
    assert stats.marginals(["b", "a", "a", "a"]) == {"a": 0.75, "b": 0.25}


def test_logistic_finds_what_was_planted():
    chance = np.random.default_rng(1)
    x_NK = np.stack([np.ones(4000), chance.normal(size=4000)], axis=1)
    y_N = (chance.random(4000) < 1 / (1 + np.exp(-(0.5 + 1.5 * x_NK[:, 1])))).astype(float)
    beta, error = stats.logistic(x_NK, y_N)
    assert np.abs(beta - [0.5, 1.5]).max() < 3 * error.max() < 0.3
    apart, error = stats.logistic(x_NK[:40], (x_NK[:40, 1] > 0).astype(float))
    assert np.isfinite(apart).all()
    assert error[1] > 0.4  # separated outcomes are not certain ones


def test_trend_of_two_values_is_the_difference_of_agresti_and_caffo():
    # 8 of 10 at x = 1 and 3 of 10 at -1, with a win and a loss added to each: 9/12 - 4/12
    x_N = np.array([1.0] * 10 + [-1.0] * 10)
    y_N = np.array([1.0] * 8 + [0.0] * 2 + [1.0] * 3 + [0.0] * 7)
    change, error = stats.trend(x_N, y_N)
    assert 2 * change == pytest.approx(9 / 12 - 4 / 12)
    variance = (9 / 12 * 3 / 12 + 4 / 12 * 8 / 12) / 12
    assert (2 * error) ** 2 == pytest.approx(variance * 24 / 22)


def test_trend_is_not_certain_where_nothing_varies():
    change, error = stats.trend(np.linspace(-1, 1, 30), np.ones(30))
    assert change == pytest.approx(0, abs=1e-12)
    assert error > 0.05
    assert math.isnan(stats.trend(np.ones(5), np.ones(5))[0])


def test_trend_covers_what_it_should():
    chance = np.random.default_rng(2)
    inside = 0
    for _ in range(600):
        x_N = np.tanh(chance.normal(size=60))
        change, error = stats.trend(x_N, (chance.random(60) < 0.7 + 0.2 * x_N).astype(float))
        inside += abs(change - 0.2) <= stats.Z * error
    assert 0.92 < inside / 600 < 0.98


def test_ranks_and_their_correlations():
    assert stats.ranks([3, 1, 1, 2]).tolist() == [4, 1.5, 1.5, 3]
    assert stats.spearman([1, 2, 3, 4], [1, 4, 9, 16]) == pytest.approx(1)
    assert math.isnan(stats.spearman([1, 1], [1, 2]))
    chance = np.random.default_rng(3)
    given = chance.normal(size=500)
    x, y = given + chance.normal(size=500), given + chance.normal(size=500)
    assert stats.spearman(x, y) > 0.4
    assert abs(stats.partial_spearman(x, y, given)) < 0.1


def test_bootstrap():
    values = np.random.default_rng(4).normal(size=400)
    low, high = stats.bootstrap(lambda items: float(values[items].mean()), 400)
    assert (low, high) == pytest.approx((values.mean() - 0.098, values.mean() + 0.098), abs=0.02)
    assert all(map(math.isnan, stats.bootstrap(lambda items: 0.0, 1)))
    assert all(map(math.isnan, stats.bootstrap(lambda items: math.nan, 5, draws=10)))


def test_a_self_rewarding_loop_stops_when_the_outside_falls():
    chance = np.random.default_rng(5)
    inside = [0.5, 0.6, 0.7, 0.8]
    falling = [(0.8 - 0.1 * i + chance.normal(0, 0.1, 60)).tolist() for i in range(4)]
    level = [(0.8 + chance.normal(0, 0.1, 60)).tolist() for _ in range(4)]
    assert stats.diverging(inside, falling)
    assert not stats.diverging(inside, level)
    assert not stats.diverging(inside[::-1], falling)
    assert not stats.diverging([0.5], [falling[0]])
