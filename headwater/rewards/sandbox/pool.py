"""The sandbox: a pool of warm workers, each for one program."""

from __future__ import annotations

import asyncio
import functools
import os
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal, get_args

from headwater.errors import ConfigError, WorldError
from headwater.rewards.sandbox.isolation import ACCEPTED, Isolation, candidates, refusal
from headwater.rewards.sandbox.limits import Limits
from headwater.rewards.sandbox.programs import Stopped, run_script
from headwater.rewards.sandbox.worker import Lost, Worker

Wanted = Literal["bubblewrap", "none, and I accept that programs written by the model run as me"]
"""How programs are isolated: in words where they are not."""

assert ACCEPTED in get_args(Wanted)


class Sandbox:
    """Runs programs that nobody trusts. Each gets a worker of its own, taken from a few that are started
    beforehand and thrown away after it, so nothing passes from one program to the next.

    `workers` is how many programs run at a time, and how many workers are kept warm: one for each core
    unless given. It may be used from any number of tasks and event loops. Workers start when first
    needed, and die with this object or this process. Raises ConfigError where programs cannot be
    isolated and `isolation` does not say, in words, that they need not be.
    """

    def __init__(
        self, *, isolation: Wanted = "bubblewrap", limits: Limits | None = None, workers: int | None = None
    ) -> None:
        if workers is not None and workers < 1:
            raise ConfigError(f"The sandbox has workers = {workers}, wanted at least 1.")
        self.limits = limits or Limits()
        self.isolation = Isolation(None) if isolation == ACCEPTED else working_isolation()
        self.workers = workers or len(os.sched_getaffinity(0))
        self._warm: list[Worker] = []
        self._gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._gates = weakref.WeakKeyDictionary()
        self._close = weakref.finalize(self, _kill_all, self._warm)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Waits for leave to run one program: `workers` have it at a time, in each event loop."""
        loop = asyncio.get_running_loop()
        gate = self._gates.setdefault(loop, asyncio.Semaphore(self.workers))
        async with gate:
            yield

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Worker]:
        """A worker that is ready for one program, and killed afterwards. Raises WorldError where none starts."""
        worker = await self._take()
        try:
            yield worker
        finally:
            worker.kill()

    async def _take(self) -> Worker:
        while self._warm:
            worker = self._warm.pop(0)
            if not worker.alive:  # it dies with the thread that started it, for one
                worker.kill()
                continue
            try:
                await worker.ready()
            except WorldError:
                continue
            except BaseException:
                worker.kill()
                raise
            self._start_others()
            return worker
        worker = Worker(self.isolation, self.limits)
        try:
            await worker.ready()
        except BaseException:
            worker.kill()
            raise
        self._start_others()
        return worker

    def _start_others(self) -> None:
        if self._close.alive:
            while len(self._warm) < self.workers:
                self._warm.append(Worker(self.isolation, self.limits))

    async def works(self) -> bool:
        """Whether an honest program runs as it should, so that a lost one is to blame for itself."""
        try:
            async with self.worker() as worker:
                ended = await run_script(worker, "print(6 * 7)", b"")
        except (Lost, Stopped, WorldError):
            return False
        return ended.out == b"42\n"

    def close(self) -> None:
        """Ends the warm workers. Those that run a program end with it."""
        self._close()


def _kill_all(warm: list[Worker]) -> None:
    while warm:
        warm.pop().kill()


@functools.cache
def working_isolation() -> Isolation:
    """The best isolation that was tried here and works. Raises ConfigError where none does."""
    problems: list[str] = []
    for isolation in candidates():
        problem = _problem(isolation)
        if problem is None:
            return isolation
        problems.append(problem)
    raise ConfigError(refusal("; ".join(problems)))


def _problem(isolation: Isolation) -> str | None:
    """What keeps a program from being run so, or None."""
    worker = None
    try:
        worker = Worker(isolation, Limits())
        ended = worker.try_out("print(6 * 7)")
    except (WorldError, Lost, TimeoutError) as error:
        return str(error).rstrip(".") or type(error).__name__
    finally:
        if worker is not None:
            worker.kill()
    return None if ended == b"42\n" else "a program that prints 42 did not"
