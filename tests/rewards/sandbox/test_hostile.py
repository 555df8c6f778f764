from __future__ import annotations

import asyncio
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import WorldError
from headwater.rewards.sandbox.isolation import Isolation, candidates, find_bwrap
from headwater.rewards.sandbox.limits import Limits
from headwater.rewards.sandbox.plain import encode
from headwater.rewards.sandbox.pool import Sandbox
from headwater.rewards.sandbox.programs import call, load
from headwater.rewards.sandbox.worker import Worker
from headwater.rewards.verifiers.code import Code
from headwater.types import Group, Signal, Span, Task, Trajectory

PROGRAMS = runpy.run_path(str(Path(__file__).with_name("hostile.py")))
WRONG, ESCAPES, RUDE = PROGRAMS["WRONG"], PROGRAMS["ESCAPES"], PROGRAMS["RUDE"]

TESTS = [
    {"fn": "solve", "args": [12, 30], "expected": 42},
    {"fn": "solve", "args": [-5, 5], "expected": 0},
    {"fn": "solve", "args": [0, 1], "expected": 1},
    {"fn": "solve", "args": [10**12, 1], "expected": 10**12 + 1},
]
CHECK = "def check(candidate):\n" + "".join(
    f"    assert candidate({test['args'][0]}, {test['args'][1]}) == {test['expected']}\n" for test in TESTS
)
LIMITS = Limits(seconds=1.0, total_seconds=4.0, memory=512)


@pytest.fixture(scope="module")
def source():
    sandbox = Sandbox(limits=LIMITS)
    yield Code(sandbox=sandbox)
    sandbox.close()


def judged(source: Code, program: str, meta: dict[str, object]) -> Signal:
    task = Task(id="t", prompt="?", meta=meta)  # type: ignore[arg-type]
    trajectory = Trajectory(task_id="t", spans=(Span(author="policy", tokens=(1,), text=f"```python\n{program}\n```"),))
    (signal,) = asyncio.run(source(Group(task=task, trajectories=(trajectory,))))
    return signal


def test_there_are_a_hundred():
    assert len(WRONG) + len(ESCAPES) >= 100


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_is_never_accepted(source: Code, outside: Any, name: str):
    started = time.monotonic()
    signal = judged(source, WRONG[name], {"tests": TESTS})
    assert (signal.status, signal.values) == ("ok", (0.0,)), signal.note
    assert signal.note
    assert time.monotonic() - started < 6
    assert outside.untouched()


QUICK = [name for name in WRONG if any(word in name for word in ("equal", "writes", "patches", "answers", "exception"))]


@pytest.mark.parametrize("name", QUICK)
def test_nor_by_tests_that_are_python(source: Code, outside: Any, name: str):
    signal = judged(source, WRONG[name], {"test": CHECK, "entry_point": "solve"})
    assert (signal.status, signal.values) == ("ok", (0.0,)), signal.note
    assert outside.untouched()


@pytest.mark.parametrize("name", RUDE)
def test_a_right_program_may_be_rude(source: Code, outside: Any, name: str):
    signal = judged(source, RUDE[name], {"tests": TESTS})
    assert signal.values == (1.0,), signal.note
    assert outside.untouched()


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_outside_can_be_reached(isolation: Isolation, outside: Any, name: str):
    program = ESCAPES[name].replace("PORT", str(outside.port)).replace("FOLDER", str(outside.folder))

    async def attempt() -> object:
        sandbox = Sandbox(limits=LIMITS, workers=1)
        sandbox.isolation = isolation
        async with sandbox.worker() as worker:
            await load(worker, program)
            reply = await call(worker, "attempt", encode(()), encode({}))
        sandbox.close()
        return reply

    reply = asyncio.run(attempt())
    assert isinstance(reply, dict) and "raised" in reply, reply
    assert reply["raised"] not in {"NameError", "SyntaxError", "TypeError", "AttributeError"}, reply
    assert outside.untouched()


STATE = """
import json, os
rows = dict(line.split(':', 1) for line in open('/proc/self/status').read().splitlines())
mounts = [line.split() for line in open('/proc/mounts')]
print(json.dumps({
    'ids': {*os.getresuid(), *os.getresgid(), *os.getgroups()} & {0, *range(1, 60000)} == set(),
    'capabilities': {int(rows[name], 16) for name in ('CapPrm', 'CapEff', 'CapAmb')} == {0},
    'no new ones': rows['NoNewPrivs'].strip() == '1' and rows['Seccomp'].strip() == '2',
    'proc': all(row[3].startswith('ro,') for row in mounts if row[1].startswith('/proc')),
    'sysctl': not any(os.access(os.path.join(f, n), os.W_OK) for f, _, ns in os.walk('/proc/sys') for n in ns),
    'no sys': not os.path.exists('/sys'),
    'no set-uid': all('nosuid' in row[3] for row in mounts if row[2] not in ('tmpfs', 'devpts') or row[1] == '/tmp'),
}))
"""


def test_a_program_is_nobody_and_may_nothing(isolation: Isolation):
    worker = Worker(isolation, LIMITS)
    found = json.loads(worker.try_out(STATE))
    worker.kill()
    assert all(found.values()), found


def test_root_never_starts_a_program_that_is_root_outside():
    for way in candidates():
        assert os.geteuid() != 0 or way.as_root or way.dropped


def test_root_may_start_bubblewrap_as_nobody(monkeypatch: pytest.MonkeyPatch):
    if os.geteuid() != 0:
        pytest.skip("only root can become nobody")
    if sys.version_info[:2] == (3, 11) and os.path.exists("/usr/bin/python3.11"):  # nobody may read the system's own
        monkeypatch.setattr("headwater.rewards.sandbox.isolation.python", lambda: "/usr/bin/python3.11")
        monkeypatch.setattr(sys, "base_prefix", "/usr")
    worker = Worker(Isolation(find_bwrap(), dropped=True), LIMITS)
    try:
        asyncio.run(worker.ready())
        rows = Path(f"/proc/{worker.process.pid}/status").read_text().splitlines()
        assert (
            min(int(word) for row in rows if row.startswith(("Uid:", "Gid:")) for word in row.split()[1:]) >= 2 * 10**9
        )
    except WorldError as error:
        pytest.skip(f"nobody cannot read the interpreter here: {error}")
    finally:
        worker.kill()


@pytest.mark.parametrize("name", ["a fork bomb", "a thread bomb", "memory in many forks", "kills the supervisor"])
def test_bombs_under_each_isolation(isolation: Isolation, name: str):
    sandbox = Sandbox(limits=LIMITS, workers=1)
    sandbox.isolation = isolation
    assert judged(Code(sandbox=sandbox), WRONG[name], {"tests": TESTS}).values == (0.0,)
    assert judged(Code(sandbox=sandbox), "def solve(a, b): return a + b", {"tests": TESTS}).values == (1.0,)
    sandbox.close()


def test_nothing_stays_behind(source: Code):
    """After a fork bomb and a daemon, every process on the machine that is the sandbox's is a warm worker's."""
    for name in ("a fork bomb", "a daemon that stays"):
        judged(source, WRONG[name], {"tests": TESTS})
    until = time.monotonic() + 5
    while time.monotonic() < until and len(children_of(os.getpid())) > 2 * source.sandbox.workers:
        time.sleep(0.05)
    assert len(children_of(os.getpid())) <= 2 * source.sandbox.workers


def children_of(pid: int) -> list[int]:
    """All processes that come from this one, dead ones that wait for it aside."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parents[int(folder.name)] = int(parent)
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]
