"""Where judged groups come from: data, engine, rollout, rewards. The only place that knows threads.

`groups(step)` is a pure function of the step and the weights it runs on, so the stream at lag 0 is
the same program as at lag n: what differs is how far ahead of the learner it may start.
"""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence

from headwater.types import Group, Task

Produce = Callable[[int], Awaitable[list[Group]]]
"""All judged groups of one step."""


def visits(tasks: Sequence[Task], step: int, count: int, seed: int) -> list[tuple[Task, int]]:
    """The `count` tasks of a step, each with how many epochs went before. Every epoch is its own
    shuffle; the order is a function of seed and step alone, so a resumed run goes on exactly."""
    chosen: list[tuple[Task, int]] = []
    orders: dict[int, list[int]] = {}
    for place in range(step * count, (step + 1) * count):
        epoch, at = divmod(place, len(tasks))
        if epoch not in orders:
            orders[epoch] = list(range(len(tasks)))
            random.Random(f"{seed}/{epoch}").shuffle(orders[epoch])
        chosen.append((tasks[orders[epoch][at]], epoch))
    return chosen


class Stream:
    """Iterates over (step, judged groups) from `first` up to `steps`.

    The groups of step k are begun when the weights are at least at version k - max_lag; `reached`
    tells it how far they are. At max_lag 0 they are made in the caller's thread, in turn with the
    learner; else in a thread of their own, at most `max_lag` steps ahead.
    """

    def __init__(self, produce: Produce, *, first: int, steps: int, max_lag: int) -> None:
        self._produce, self._first, self._steps, self._max_lag = produce, first, steps, max_lag
        self._version = first
        self._moved = threading.Condition()
        self._closed = False
        self._ready: queue.Queue[tuple[int, list[Group]] | BaseException] = queue.Queue()
        self._thread: threading.Thread | None = None

    def reached(self, version: int) -> None:
        """The engine now has the weights of `version`."""
        with self._moved:
            self._version = version
            self._moved.notify_all()

    def __iter__(self) -> Iterator[tuple[int, list[Group]]]:
        if self._max_lag == 0:
            with asyncio.Runner() as runner:
                for step in range(self._first, self._steps):
                    yield step, runner.run(self._one(step))
            return
        self._thread = threading.Thread(target=self._run_ahead, name="rollout", daemon=True)
        self._thread.start()
        for _ in range(self._first, self._steps):
            item = self._ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    async def _one(self, step: int) -> list[Group]:
        return await self._produce(step)

    def _run_ahead(self) -> None:
        try:
            with asyncio.Runner() as runner:
                for step in range(self._first, self._steps):
                    with self._moved:
                        self._moved.wait_for(lambda step=step: self._closed or self._version >= step - self._max_lag)
                        if self._closed:
                            return
                    self._ready.put((step, runner.run(self._one(step))))
        except BaseException as error:  # noqa: BLE001 - handed to the learner's thread, which raises it
            self._ready.put(error)

    def close(self) -> None:
        """Let the producer end after the step it is on."""
        with self._moved:
            self._closed = True
            self._moved.notify_all()
        if self._thread is not None:
            self._thread.join()
