"""What becomes of a reward before it is weighed: clipped, less penalties, and only behind a gate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headwater.errors import ConfigError
from headwater.rewards.source import Source, compares, finite, without
from headwater.types import Group, Signal, Trajectory


class GateConfig(BaseModel):
    """A gate: the reward counts only where the source `name` gives at least `at_least`. Elsewhere it is
    `otherwise`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    settings: dict[str, Any] = Field(default_factory=dict)
    at_least: float = Field(default=1.0, allow_inf_nan=False)
    otherwise: float = Field(default=0.0, allow_inf_nan=False)


class PenaltyConfig(BaseModel):
    """Something that is subtracted, from 0 to `weight`.

    "length" rises linearly from 0 at `free` tokens to all of it at `most` tokens (the overlong punishment of
    Yu et al. 2025, arXiv:2503.14476). "repetition" is the share of `n`-grams of tokens that stood before.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["length", "repetition"]
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    free: int | None = Field(default=None, ge=0)
    most: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _belongs(self) -> PenaltyConfig:
        if self.kind == "repetition" and (self.free is not None or self.most is not None):
            raise ConfigError(
                "A penalty of kind 'repetition' has no free and most; they are for 'length'. Remove them."
            )
        if self.kind == "length" and self.n is not None:
            raise ConfigError("A penalty of kind 'length' has no n; that is for 'repetition'. Remove it.")
        if self.kind == "length" and (self.free is None or self.most is None or self.free >= self.most):
            raise ConfigError(
                f"A penalty of kind 'length' has free = {self.free} and most = {self.most}; wanted both, in tokens, "
                "with free below most."
            )
        return self

    def of(self, tokens: Sequence[int]) -> float:
        """What is subtracted from the reward of an answer of these tokens."""
        if self.kind == "length":
            assert self.free is not None and self.most is not None, "a length penalty has both"
            return self.weight * length_ramp(len(tokens), self.free, self.most)
        return self.weight * repeated_share(tokens, 4 if self.n is None else self.n)


def length_ramp(length: int, free: int, most: int) -> float:
    """0 up to `free`, 1 from `most` on, linear between: clamp((length - free) / (most - free), 0, 1)."""
    return min(1.0, max(0.0, (length - free) / (most - free)))


def repeated_share(tokens: Sequence[int], n: int = 4) -> float:
    """The share of n-grams that stood before: 1 - distinct / all. 0 where there are none."""
    count = len(tokens) - n + 1
    if count < 1:
        return 0.0
    return 1 - len({tuple(tokens[i : i + n]) for i in range(count)}) / count


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaped:
    """A source whose reward is clipped into `clip`, then lowered by `penalties`; and, where `gate` gives less
    than `at_least`, is `otherwise` instead. Where the gate abstains or fails, so does the reward. Behind
    a shut gate a source that judges each trajectory by itself is not asked at all.

    Penalties count tokens that the policy wrote; a text that has none (nobody sampled it) fails.
    """

    source: Source
    clip: tuple[float, float] | None = None
    penalties: tuple[PenaltyConfig, ...] = ()
    gate: Source | None = None
    at_least: float = 1.0
    otherwise: float = 0.0

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def offers(self) -> frozenset[str]:
        return self.source.offers

    @property
    def needs(self) -> frozenset[str]:
        return self.source.needs | (self.gate.needs if self.gate else frozenset())

    @property
    def compares(self) -> bool:
        return compares(self.source) or (self.gate is not None and compares(self.gate))

    async def __call__(self, group: Group) -> Sequence[Signal]:
        settled = await self._gated(group)
        asked = [i for i, signal in enumerate(settled) if signal is None]
        if compares(self.source):
            asked = list(range(len(settled)))  # the siblings behind the gate are still there to compare with
        if not asked or all(settled):
            return [signal for signal in settled if signal is not None]
        said = tuple(await self.source(replace(group, trajectories=tuple(group.trajectories[i] for i in asked))))
        if len(said) != len(asked):
            return said  # `judge` says what is wrong with it
        for i, signal in zip(asked, said, strict=True):
            settled[i] = settled[i] or self._shaped(signal, group.trajectories[i])
        return [signal for signal in settled if signal is not None]

    async def _gated(self, group: Group) -> list[Signal | None]:
        """What the gate settles of each trajectory; None where it is open."""
        if self.gate is None:
            return [None] * len(group.trajectories)
        said = tuple(await self.gate(group))
        if len(said) != len(group.trajectories):
            raise ConfigError(f"The gate '{self.gate.name}' gave {len(said)} signals for {len(group.trajectories)}.")
        return [self._verdict(self.gate.name, finite(signal)) for signal in said]

    def _verdict(self, gate: str, signal: Signal) -> Signal | None:
        if signal.status != "ok":
            return without(self.name, signal.status, f"gate {gate}: {signal.note}" if signal.note else f"gate {gate}")
        if signal.values[0] >= self.at_least:
            return None
        note = f"gate {gate}: {signal.values[0]:g} is below {self.at_least:g}"
        return Signal(source=self.name, name="reward", values=(self.otherwise,), note=note)

    def _shaped(self, signal: Signal, trajectory: Trajectory) -> Signal:
        if signal.name != "reward" or signal.status != "ok" or not math.isfinite(signal.values[0]):
            return signal
        (value,) = signal.values
        if self.clip is not None:
            value = min(self.clip[1], max(self.clip[0], value))
        if self.penalties:
            tokens = [token for span in trajectory.spans if span.author == "policy" for token in span.tokens]
            if not tokens and trajectory.text:
                return without(self.name, "failed", "a penalty counts tokens, and this text has none")
            value -= sum(penalty.of(tokens) for penalty in self.penalties)
        return replace(signal, values=(value,))
