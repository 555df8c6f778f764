"""How a source is called: for how long, how often again, how many times at once; and what is kept of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from headwater.errors import ConfigError, WorldError
from headwater.rewards.source import BREAKS, Source, compares, without
from headwater.types import Group, Json, Signal, Trajectory

LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """A source whose trouble is a state. A call that takes longer than `timeout_s` seconds, or raises an
    ordinary exception, is failed with a note. A call of which anything failed is made again up to
    `retries` times, after `pause_s`, twice that, and so on; of all of them, the one with the fewest
    failures counts. At most `concurrency` calls run at once in one event loop."""

    source: Source
    timeout_s: float | None = None
    retries: int = 0
    concurrency: int | None = None
    pause_s: float = 0.5
    _slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(default_factory=WeakKeyDictionary)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def offers(self) -> frozenset[str]:
        return self.source.offers

    @property
    def needs(self) -> frozenset[str]:
        return self.source.needs

    @property
    def compares(self) -> bool:
        return compares(self.source)

    async def __call__(self, group: Group) -> Sequence[Signal]:
        best = await self._call(group)
        for attempt in range(self.retries):
            if not _failures(best, group):
                break
            await asyncio.sleep(min(LONGEST_PAUSE_S, self.pause_s * 2**attempt))
            best = min(best, await self._call(group), key=lambda said: _failures(said, group))
        return best

    async def _call(self, group: Group) -> Sequence[Signal]:
        if self.concurrency is None:
            return await self._attempt(group)
        loop = asyncio.get_running_loop()
        if loop not in self._slots:
            self._slots[loop] = asyncio.Semaphore(self.concurrency)
        async with self._slots[loop]:  # waiting for one's turn is not part of the call
            return await self._attempt(group)

    async def _attempt(self, group: Group) -> Sequence[Signal]:
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                return tuple(await self.source(group))
        except (*BREAKS, OSError, WorldError) as error:  # TimeoutError is an OSError
            note = f"{type(error).__name__}: {error}"
            if limit.expired():
                note = f"gave nothing within timeout_s = {self.timeout_s:g}"
            return tuple(without(self.name, "failed", note) for _ in group.trajectories)


def _failures(said: Sequence[Signal], group: Group) -> int:
    """Failures that another call might mend: not those of episodes that ended in an error."""
    whole = [trajectory.stop != "error" for trajectory in group.trajectories]
    return sum(signal.status == "failed" and fine for signal, fine in zip(said, whole, strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached:
    """A source of which every signal that is `ok` is kept in a folder, a whole file each.

    A signal is found again where the source (`identity`: its name, settings and code), the task and all
    that stands in the trajectory are the same; and, for a source that compares, in its siblings too.
    What abstained or failed is asked again. A file that is damaged counts as none.
    """

    source: Source
    folder: Path
    identity: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def offers(self) -> frozenset[str]:
        return self.source.offers

    @property
    def needs(self) -> frozenset[str]:
        return self.source.needs

    @property
    def compares(self) -> bool:
        return compares(self.source)

    async def __call__(self, group: Group) -> Sequence[Signal]:
        files = [self._file(group, trajectory) for trajectory in group.trajectories]
        kept = [_read(file, self.name) for file in files]
        missing = [i for i, signal in enumerate(kept) if signal is None]
        if not missing:
            return [signal for signal in kept if signal is not None]
        if self.compares:
            missing = list(range(len(files)))
        asked = replace(group, trajectories=tuple(group.trajectories[i] for i in missing))
        said = tuple(await self.source(asked))
        if len(said) != len(missing):
            return said  # `judge` says what is wrong with it
        for i, signal in zip(missing, said, strict=True):
            kept[i] = signal
            if signal.status == "ok" and all(map(math.isfinite, signal.values)):
                self._keep(files[i], signal)
        return [signal for signal in kept if signal is not None]

    def _file(self, group: Group, trajectory: Trajectory) -> Path:
        seen = group.trajectories if self.compares else (trajectory,)
        content = [self.identity, asdict(group.task), _written(trajectory), [_written(each) for each in seen]]
        key = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
        return self.folder / key[:2] / f"{key}.json"

    def _keep(self, file: Path, signal: Signal) -> None:
        partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(asdict(signal)), encoding="utf-8")
            os.replace(partial, file)
        except OSError as error:
            raise ConfigError(
                f"The cache {self.folder.absolute()} of the reward '{self.name}' cannot be written: {error.strerror}. "
                "Name another folder in its cache, or remove that setting."
            ) from error


def _written(trajectory: Trajectory) -> Json:
    spans = [[span.author, span.text, list(span.tokens)] for span in trajectory.spans]
    return {"spans": spans, "stop": trajectory.stop, "agent": trajectory.agent}


def _read(file: Path, source: str) -> Signal | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        found |= {"values": tuple(map(float, found["values"])), "ends": tuple(map(int, found["ends"]))}
        signal = Signal(**found)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return signal if signal.source == source and signal.status == "ok" else None
