"""What a credit remembers from step to step. `state` and `load` carry it over a resume, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class AdaptiveKL:
    """A KL coefficient that follows a target.

        error = clip(KL / target - 1, -0.2, 0.2)        beta *= 1 + error·n / horizon

    KL is in nats per sequence: the mean over samples of the *sum* over tokens. n counts samples, not
    updates, and horizon is in samples (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).
    """

    beta: float
    target: float
    horizon: float = 10_000

    def __post_init__(self) -> None:
        assert self.target > 0 and self.horizon > 0, "a target and a horizon of the KL are above 0"

    def update(self, kl: float, samples: int) -> None:
        """After a step of `samples` sequences whose mean KL was `kl`."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.beta *= 1 + error * samples / self.horizon

    def state(self) -> dict[str, float]:
        return {"beta": self.beta}

    def load(self, state: Mapping[str, float]) -> None:
        self.beta = state["beta"]


@dataclass(slots=True, kw_only=True)
class RunningMean:
    """The mean of all rewards so far, the baseline of REINFORCE with a moving average (Williams 1992;
    Ahmadian et al. 2024, arXiv:2402.14740, call it b_MA). Before the first it is 0. With `memory`, the
    past counts for no more than that many rewards, and older ones fade."""

    memory: float = float("inf")
    mean: float = 0.0
    count: float = 0.0

    def update(self, rewards: Sequence[float]) -> None:
        """Takes in the rewards of a step."""
        if not rewards:
            return
        past = min(self.count, self.memory)
        self.count = past + len(rewards)
        self.mean += sum(reward - self.mean for reward in rewards) / self.count

    def state(self) -> dict[str, float]:
        return {"mean": self.mean, "count": self.count}

    def load(self, state: Mapping[str, float]) -> None:
        self.mean, self.count = state["mean"], state["count"]
