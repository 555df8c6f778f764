"""A source made of one async function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from numbers import Real

from headwater.errors import ConfigError
from headwater.rewards.source import BREAKS, finite, without
from headwater.types import Group, Signal, Trajectory

Said = Signal | float | bool | None
"""What a function may say of a trajectory: a signal, a number, or None for "not for me to judge"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A source made of `async def f(group)`, which gives one thing said for each trajectory, in order.

    Where it raises an ordinary exception, all of the group is failed and says why; so is a trajectory
    whose episode ended in an error, or of which it says something that is no finite number.
    """

    name: str
    function: Callable[[Group], Awaitable[Sequence[Said]]]
    needs: frozenset[str] = frozenset()
    offers: frozenset[str] = frozenset({"reward"})
    compares: bool = True

    async def __call__(self, group: Group) -> tuple[Signal, ...]:
        try:
            said = tuple(await self.function(group))
        except (*BREAKS, OSError) as error:
            note = f"{type(error).__name__}: {error}"
            return tuple(without(self.name, "failed", note) for _ in group.trajectories)
        if len(said) != len(group.trajectories):
            raise ConfigError(
                f"The function '{self.name}' said {len(said)} things of the {len(group.trajectories)} trajectories of "
                f"task '{group.task.id}'. It must say one of each, in order."
            )
        return tuple(self._signal(t, one) for t, one in zip(group.trajectories, said, strict=True))

    def _signal(self, trajectory: Trajectory, said: Said) -> Signal:
        if trajectory.stop == "error":
            return without(self.name, "failed", "the episode ended in an error")
        if isinstance(said, Signal):
            return said
        if said is None:
            return without(self.name, "abstained", "")
        if not isinstance(said, Real):
            return without(self.name, "failed", f"gave a {type(said).__name__}, wanted a number")
        try:
            return finite(Signal(source=self.name, name="reward", values=(float(said),)))
        except OverflowError as error:
            return without(self.name, "failed", f"OverflowError: {error}")
