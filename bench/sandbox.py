"""How many short programs a second the sandbox judges.

    python bench/sandbox.py [--programs 200] [--workers 2]

Each program defines a function that is called on three inputs; every verdict is checked. It is compared with what is
commonly done: a fresh bubblewrap and interpreter for each program and each of its inputs, as many at a time, with the
same walls, no warm pool and no verdict on types. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor

from headwater.rewards.sandbox.worker import Worker
from headwater.rewards.verifiers.code import Code, code
from headwater.types import Group, Span, Task, Trajectory

TESTS = [{"fn": "add", "args": [n, n + 1], "expected": 2 * n + 1} for n in (1, 50, 1000)]
RIGHT, WRONG = "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return a - b\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--workers", type=int, default=None, help="at a time; one for each core unless given")
    arguments = parser.parse_args()
    source = code(workers=arguments.workers)
    asyncio.run(measure(source, 2 * source.sandbox.workers))  # to start the warm workers
    started = time.monotonic()
    wrong = asyncio.run(measure(source, arguments.programs))
    seconds = time.monotonic() - started
    warm = asyncio.run(latency(source))
    fresh = fresh_each(source, max(4, arguments.programs // 10))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    source.sandbox.close()
    found = {
        "bench": "sandbox",
        "programs": arguments.programs,
        "programs_per_second": round(arguments.programs / seconds, 1),
        "fresh_processes_per_second": round(fresh, 1),
        "seconds": round(seconds, 2),
        "seconds_for_one": round(warm, 4),
        "wrong_verdicts": wrong,
        "workers": source.sandbox.workers,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 1),
        "isolation": "bubblewrap, as root" if source.sandbox.isolation.as_root else "bubblewrap",
        "processor_seconds_of_children": round(used.ru_utime + used.ru_stime, 2),
    }
    print(
        f"{found['programs_per_second']} programs a second on {found['cores']} cores, {wrong} wrong verdicts; "
        f"{fresh:.1f} with a fresh bubblewrap and interpreter for each program and input"
    )
    print(json.dumps(found))


def group(count: int) -> Group:
    """One task and that many answers, every other one of them wrong."""
    task = Task(id="add", prompt="Write add(a, b).", meta={"tests": TESTS})
    spans = [(Span(author="policy", tokens=(1,), text=WRONG if n % 2 else RIGHT),) for n in range(count)]
    return Group(task=task, trajectories=tuple(Trajectory(task_id="add", spans=span) for span in spans))


async def measure(source: Code, count: int) -> int:
    """Judges that many programs, and counts wrong verdicts."""
    found = await source(group(count))
    return sum(signal.values != (float(n % 2 == 0),) for n, signal in enumerate(found))


def fresh_each(source: Code, count: int) -> float:
    """Programs a second where each input of each gets a sandbox that is started for it and waited for."""

    def one(number: int) -> None:
        for test in TESTS:
            worker = Worker(source.sandbox.isolation, source.sandbox.limits)
            program = (WRONG if number % 2 else RIGHT) + f"print(add(*{test['args']}))"
            printed = int(worker.try_out(program))
            worker.kill()
            assert (printed == test["expected"]) == (number % 2 == 0)

    started = time.monotonic()
    with ThreadPoolExecutor(source.sandbox.workers) as threads:
        list(threads.map(one, range(count)))
    return count / (time.monotonic() - started)


async def latency(source: Code) -> float:
    """Seconds from an answer to its verdict when nothing else runs: the median of 20."""
    taken: list[float] = []
    for _ in range(20):
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await source(group(1))
        taken.append(time.monotonic() - started)
    return sorted(taken)[10]


if __name__ == "__main__":
    main()
