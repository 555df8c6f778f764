"""Sources of signals, and the reward that comes of several."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from types import TracebackType
from typing import Protocol, overload, runtime_checkable

from headwater.errors import ConfigError
from headwater.types import Group, Signal, Status, Task, Trajectory

Verdict = Callable[[str, Task], float | bool | None]
"""What a policy wrote in its last turn, and the task, to a reward; None for "not for me to judge"."""

BREAKS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a source may run into that is its failure, and not the run's."""


@runtime_checkable
class Source(Protocol):
    """Anything that can say something about a group.

    Called with a group it gives one signal for each trajectory, in their order. `offers` names the
    signals that it gives; `needs` what a task must have for it, such as "answer". One that judges each
    trajectory by itself may say so with an attribute `compares = False`: see `compares`.
    """

    @property
    def name(self) -> str: ...

    @property
    def offers(self) -> frozenset[str]: ...

    @property
    def needs(self) -> frozenset[str]: ...

    async def __call__(self, group: Group) -> Sequence[Signal]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """A source made of a plain function. Where that breaks or gives no finite number, and where the
    episode itself ended in an error, the signal is failed and says why; it is never 0."""

    name: str
    verdict: Verdict
    needs: frozenset[str] = frozenset()
    offers: frozenset[str] = frozenset({"reward"})
    compares: bool = False

    async def __call__(self, group: Group) -> tuple[Signal, ...]:
        return tuple(self._signal(group.task, trajectory) for trajectory in group.trajectories)

    def _signal(self, task: Task, trajectory: Trajectory) -> Signal:
        if trajectory.stop == "error":
            return without(self.name, "failed", "the episode ended in an error")
        try:
            found = self.verdict(trajectory.text, task)
            if found is None:
                return without(self.name, "abstained", "")
            if not isinstance(found, Real):
                return without(self.name, "failed", f"gave a {type(found).__name__}, wanted a number")
            return finite(Signal(source=self.name, name="reward", values=(float(found),)))
        except BREAKS as error:
            return without(self.name, "failed", f"{type(error).__name__}: {error}")


@overload
def verifier(function: Verdict, /) -> Verifier: ...


@overload
def verifier(*, name: str | None = None, needs: Iterable[str] = ()) -> Callable[[Verdict], Verifier]: ...


def verifier(
    function: Verdict | None = None, /, *, name: str | None = None, needs: Iterable[str] = ()
) -> Verifier | Callable[[Verdict], Verifier]:
    """Decorator that makes a source of a function `(text, task) -> number, bool or None`."""

    def wrap(verdict: Verdict) -> Verifier:
        called = name or getattr(verdict, "__name__", type(verdict).__name__)
        if inspect.iscoroutinefunction(verdict):
            raise ConfigError(
                f"The verifier '{called}' is an async function, wanted a plain one. For something that must "
                "wait, write a Source: a class with name, offers, needs and an async __call__(group)."
            )
        return Verifier(name=called, verdict=verdict, needs=frozenset(needs))

    return wrap if function is None else wrap(function)


async def judge(groups: Sequence[Group], sources: Sequence[tuple[Source, float]]) -> list[Group]:
    """The groups with what every source says of them, and one signal "reward" on each trajectory.

    `sources` come with their weights. A single one of weight 1 gives the reward itself. Otherwise
    each one's reward goes by its source's name, and "reward" is Σ weight · part; it is failed where
    a part failed, else abstained where a part abstained. A source of weight 0 is recorded and takes
    no part. Without sources the groups come back as they are. What a source raises goes on to the
    caller, with a note that names the source and the task.
    """
    if not sources:
        return list(groups)
    _check_names(sources)
    if all(weight == 0 for _, weight in sources):
        raise ConfigError("Every reward has weight 0, so nothing would be rewarded. Give one another weight.")
    calls = [asyncio.ensure_future(_call(source, group)) for group in groups for source, _ in sources]
    try:
        said = await asyncio.gather(*calls)
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    weights = [weight for _, weight in sources]
    judged: list[Group] = []
    for index, group in enumerate(groups):
        rows = said[index * len(sources) : (index + 1) * len(sources)]
        columns = zip(group.trajectories, *rows, strict=True)
        marked = (_mark(trajectory, signals, weights) for trajectory, *signals in columns)
        judged.append(replace(group, trajectories=tuple(marked)))
    return judged


def _check_names(sources: Sequence[tuple[Source, float]]) -> None:
    names = [source.name for source, _ in sources]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"Two rewards are called '{name}', so their signals would be mixed up. Keep one.")
        if name == "reward":
            raise ConfigError("A source may not be called 'reward': that is the name of the sum. Rename it.")


async def _call(source: Source, group: Group) -> tuple[Signal, ...]:
    with _Naming(f"The source '{source.name}' raised this on task '{group.task.id}'."):
        signals = tuple(await source(group))
    if len(signals) != len(group.trajectories):
        raise ConfigError(
            f"The source '{source.name}' gave {len(signals)} signals for the {len(group.trajectories)} "
            f"trajectories of task '{group.task.id}'. It must give one for each, in order."
        )
    return tuple(_checked(signal, source) for signal in signals)


class _Naming:
    """Adds a note to whatever is raised inside, and lets it go on."""

    def __init__(self, note: str) -> None:
        self.note = note

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(self.note)


def _checked(signal: Signal, source: Source) -> Signal:
    if signal.name != "reward" or signal.status != "ok":
        return signal
    if signal.level != "episode" or len(signal.values) != 1:
        raise ConfigError(
            f"The source '{source.name}' gave a signal 'reward' of level {signal.level} with "
            f"{len(signal.values)} values; a reward is one value for the episode. Name it otherwise."
        )
    return finite(signal)


def compares(source: Source) -> bool:
    """Whether what a source says of a trajectory may depend on its siblings: so unless it says otherwise."""
    return bool(getattr(source, "compares", True))


def finite(signal: Signal) -> Signal:
    """The signal, or a failed one where a value is NaN or infinite."""
    if all(map(math.isfinite, signal.values)):
        return signal
    return without(signal.source, "failed", f"gave {signal.values[0]}, wanted a finite number")


def without(source: str, status: Status, note: str) -> Signal:
    """A reward that was not given, and why."""
    return Signal(source=source, name="reward", status=status, note=note)


def _mark(trajectory: Trajectory, said: Sequence[Signal], weights: Sequence[float]) -> Trajectory:
    """The trajectory with its new signals, in place of older ones of the same names."""
    new = tuple(said)
    if list(weights) != [1.0] or new[0].name != "reward":
        new = tuple(replace(s, name=s.source) if s.name == "reward" else s for s in said)
        new += (_combine(said, weights),)
    names = {signal.name for signal in new}
    kept = tuple(signal for signal in trajectory.signals if signal.name not in names)
    return replace(trajectory, signals=kept + new)


def _combine(said: Sequence[Signal], weights: Sequence[float]) -> Signal:
    parts = [(s, w) for s, w in zip(said, weights, strict=True) if s.name == "reward" and w != 0]
    for status in ("failed", "abstained"):
        found = [part for part, _ in parts if part.status == status]
        if found:
            note = "; ".join(f"{part.source}: {part.note}" if part.note else part.source for part in found)
            return without("sum", status, note)
    if not parts:
        return without("sum", "abstained", "no source gave a reward")
    total = math.fsum(part.values[0] * weight for part, weight in parts)
    return finite(Signal(source="sum", name="reward", values=(total,)))
