"""Who can be asked: any model that answers messages with text. And a memory of what it said."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from headwater.errors import ConfigError, HeadwaterError
from headwater.types import Message


class AskError(HeadwaterError):
    """A model that was asked did not answer. Whoever asked marks its signal failed; it is never a score."""


class BudgetSpent(HeadwaterError):
    """What may be spent on a judge has been. It ends the run, which would else go on without a reward."""


@runtime_checkable
class Ask(Protocol):
    """A language model behind one call. `name` says which one, wherever it runs. `seed` tells repeated
    samples of one request apart; temperature 0 is greedy. Raises AskError where no answer came."""

    @property
    def name(self) -> str: ...

    async def complete(
        self, messages: Sequence[Message], *, temperature: float, max_tokens: int, seed: int = 0
    ) -> str: ...


@dataclass(slots=True)
class Memory:
    """How often an answer was found on disk, was not, or could not be read there."""

    found: int = 0
    missed: int = 0
    damaged: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """Asks once: replies are kept in `folder`, a file for each exact request (the model's name, messages,
    temperature, max_tokens and seed). A file that is damaged, or holds another request, is not believed.
    What the model could not answer is asked again."""

    ask: Ask
    folder: Path
    memory: Memory = field(default_factory=Memory)

    @property
    def name(self) -> str:
        return self.ask.name

    async def complete(self, messages: Sequence[Message], *, temperature: float, max_tokens: int, seed: int = 0) -> str:
        request = {
            "model": self.ask.name,
            "messages": [{"role": m["role"], "content": m["content"]} for m in messages],
            "temperature": temperature,
            "max_tokens": max_tokens,
            "seed": seed,
        }
        canonical = json.dumps(request, sort_keys=True)
        key = hashlib.sha256(canonical.encode()).hexdigest()
        path = self.folder / key[:2] / f"{key}.json"
        known = self._read(path, request)
        if known is not None:
            self.memory.found += 1
            return known
        self.memory.missed += 1
        reply = await self.ask.complete(messages, temperature=temperature, max_tokens=max_tokens, seed=seed)
        write_whole(path, json.dumps({"request": request, "reply": reply}))
        return reply

    def _read(self, path: Path, request: object) -> str | None:
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            self.memory.damaged += 1
            return None
        if isinstance(kept, dict) and kept.get("request") == request and isinstance(kept.get("reply"), str):
            return kept["reply"]
        self.memory.damaged += 1
        return None


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises ConfigError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except OSError as error:
        raise ConfigError(f"{path.absolute()} cannot be written: {error}. Name another folder.") from error
