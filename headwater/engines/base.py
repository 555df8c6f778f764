"""What every engine takes and gives."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from headwater.types import Sampling, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One turn to sample. `seed` fixes every random choice of it, whatever runs beside it."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A sampled turn: one span per version of the weights that wrote it, in order. The end-of-turn
    token, when one was sampled, is the last token of the last span."""

    spans: tuple[Span, ...]
    stop: Literal["done", "max_tokens"]

    @property
    def text(self) -> str:
        """What was written, without special tokens."""
        return "".join(span.text for span in self.spans)


class Engine(Protocol):
    """Samples turns, many at once."""

    version: int

    async def generate(self, request: Request) -> Completion:
        """Sample one turn. Requests made while others run join their batch."""
        ...

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample all, in order; for callers without an event loop."""
        ...

    def publish(self, version: int, weights: Mapping[str, Tensor] | None = None) -> None:
        """From the next token on, the weights are those of `version`. None: they are shared with the
        learner and have changed already. Callable from another thread."""
        ...


def seed_of(run_seed: int, task_id: str, visit: int, sibling: int, turn: int) -> int:
    """A 64-bit seed from what a turn *is*, never from when it arrived."""
    key = f"{run_seed}\0{task_id}\0{visit}\0{sibling}\0{turn}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
