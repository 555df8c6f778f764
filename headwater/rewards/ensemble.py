"""Several reward sources as one: their mean, their worst, or their mean less their disagreement."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headwater.errors import ConfigError
from headwater.rewards.source import Source, compares, finite, without
from headwater.types import Group, Signal

Combine = Literal["mean", "worst", "uncertainty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ensemble:
    """Combines the rewards R_1 ... R_k of its members for one answer (Coste et al. 2023, arXiv:2310.02743):

        mean         Σ R_i / k
        worst        min_i R_i                                  worst-case optimisation (WCO)
        uncertainty  mean - coefficient · Σ (R_i - mean)² / k   uncertainty-weighted optimisation (UWO)

    Members should be on one scale. Where one failed or abstained, so did the ensemble: the worst of those that
    happened to answer is not the worst of all. Members that were trained from the same weights share their
    mistakes (Eisenstein et al. 2023, arXiv:2312.09244), so agreement is no proof.
    """

    members: tuple[Source, ...]
    combine: Combine = "mean"
    coefficient: float = 1.0
    name: str = "ensemble"
    offers: frozenset[str] = frozenset({"reward"})

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(member.needs for member in self.members))

    @property
    def compares(self) -> bool:
        return any(map(compares, self.members))

    async def __call__(self, group: Group) -> Sequence[Signal]:
        said = await asyncio.gather(*(member(group) for member in self.members))
        for member, signals in zip(self.members, said, strict=True):
            if len(signals) != len(group.trajectories):
                raise ConfigError(
                    f"The member '{member.name}' gave {len(signals)} signals for {len(group.trajectories)} siblings."
                )
        return [self._combined([finite(s) for s in parts]) for parts in zip(*said, strict=True)]

    def _combined(self, parts: Sequence[Signal]) -> Signal:
        for status in ("failed", "abstained"):
            found = [part for part in parts if part.status == status]
            if found:
                note = "; ".join(f"{part.source}: {part.note}" if part.note else part.source for part in found)
                return without(self.name, status, note)
        value = combined([part.values[0] for part in parts], self.combine, self.coefficient)
        return finite(Signal(source=self.name, name="reward", values=(value,)))


def combined(rewards: Sequence[float], combine: Combine, coefficient: float = 1.0) -> float:
    """The reward of an ensemble whose members gave these; see Ensemble."""
    mean = statistics.fmean(rewards)
    if combine == "worst":
        return min(rewards)
    if combine == "uncertainty":
        return mean - coefficient * statistics.pvariance(rewards, mean)
    return mean
