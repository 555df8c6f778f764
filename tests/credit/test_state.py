from __future__ import annotations

import json

import pytest

from headwater.credit.state import AdaptiveKL, RunningMean


@pytest.mark.parametrize(
    ("kl", "beta"),
    [
        (6.0, 0.1),  # on target
        (6.6, 0.101),  # 10 % above: 1 + 0.1·100/1000
        (60.0, 0.102),  # far above: the error is cut at 0.2
        (0.0, 0.098),  # far below: at -0.2
    ],
)
def test_the_coefficient_follows_the_target_by_hand(kl, beta):
    controller = AdaptiveKL(beta=0.1, target=6.0, horizon=1000)
    controller.update(kl, 100)
    assert controller.beta == pytest.approx(beta, abs=1e-12)


def test_the_running_mean_is_of_all_rewards_so_far():
    baseline = RunningMean()
    assert baseline.mean == 0.0
    baseline.update([1.0, 0.0])
    assert baseline.mean == 0.5
    baseline.update([])
    baseline.update([2.0])
    assert baseline.mean == 1.0 and baseline.count == 3


def test_a_bounded_memory_lets_the_past_fade():
    baseline = RunningMean(memory=2)
    baseline.update([1.0, 0.0])
    baseline.update([2.0, 2.0])
    assert baseline.mean == 1.25  # the past counts 2: (2·0.5 + 4) / 4
    baseline.update([5.0])
    assert baseline.mean == 2.5  # it counts 2 again, not 4: (2·1.25 + 5) / 3


@pytest.mark.parametrize(
    ("make", "feed"),
    [
        (lambda: AdaptiveKL(beta=0.1, target=6.0), lambda kept, x: kept.update(x, 7)),
        (lambda: RunningMean(memory=10), lambda kept, x: kept.update([x, x / 3])),
    ],
    ids=["AdaptiveKL", "RunningMean"],
)
def test_a_resumed_memory_is_the_same_to_the_bit(make, feed):
    whole, first, second = make(), make(), make()
    numbers = [0.1 * k * k for k in range(20)]
    for x in numbers:
        feed(whole, x)
    for x in numbers[:9]:
        feed(first, x)
    second.load(json.loads(json.dumps(first.state())))
    assert second.state() == first.state() != make().state()
    for x in numbers[9:]:
        feed(second, x)
    assert second.state() == whole.state()
