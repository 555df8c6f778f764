"""Answers that are a program, judged by running it on a task's tests.

The program runs in a sandbox, and what it returns comes out as plain data. What it should have been
never goes in: values are compared here, and Python tests of the task's own run in a second sandbox, from which
each call of the program's function goes out and to the first.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from headwater.errors import ConfigError, WorldError
from headwater.rewards.sandbox.limits import Limits
from headwater.rewards.sandbox.plain import same
from headwater.rewards.sandbox.pool import Sandbox, Wanted
from headwater.rewards.sandbox.programs import Stopped, ask_raw, call, describe, load, run_script, short
from headwater.rewards.sandbox.worker import Lost, Worker
from headwater.rewards.verifiers.code_tests import CallTest, CheckTest, ScriptTest, Test, entry_of, tests_of
from headwater.rewards.verifiers.code_text import complete, context_of, helpers, program_text
from headwater.types import Group, Signal, Task, Trajectory

Types = Literal["exact", "equal"]


def code(
    *,
    types: Types = "exact",
    tolerance: float = 0.0,
    output: Literal["lines", "exact"] = "lines",
    seconds: float = 5.0,
    total_seconds: float = 30.0,
    memory: int = 1024,
    processes: int = 32,
    workers: int | None = None,
    isolation: Wanted = "bubblewrap",
) -> Code:
    """1 where the answer's program passes all of the task's tests in a sandbox, else 0.

    `types = "exact"` tells True, 1 and 1.0 apart, "equal" compares as Python's == does; `tolerance` is
    how far a float may be off, relative or absolute. `output = "lines"` ignores spaces at the ends of
    printed lines and empty lines at the end. Limits are those of `Limits`: seconds, and MiB. Abstains on a task without
    tests; fails where those are malformed or the sandbox broke. Raises ConfigError where programs cannot be isolated,
    unless `isolation` accepts that in words.
    """
    if not 0 <= tolerance < 1:
        raise ConfigError(f"The reward 'code' has tolerance = {tolerance}, wanted from 0 to below 1.")
    limits = Limits(seconds=seconds, total_seconds=total_seconds, memory=memory, processes=processes)
    sandbox = Sandbox(isolation=isolation, limits=limits, workers=workers)
    return Code(sandbox=sandbox, policy=Policy(types=types, tolerance=tolerance, output=output))


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What counts as the same. `types` and `tolerance` of a task's own `meta` come before these."""

    types: Types = "exact"
    tolerance: float = 0.0
    output: Literal["lines", "exact"] = "lines"

    def for_task(self, task: Task) -> Policy:
        """With what the task says. Raises ValueError where that is no policy."""
        types, tolerance = task.meta.get("types", self.types), task.meta.get("tolerance", self.tolerance)
        if types not in ("exact", "equal"):
            raise ValueError(f"meta.types is {types!r}, wanted 'exact' or 'equal'")
        if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < 1:
            raise ValueError(f"meta.tolerance is {tolerance!r}, wanted a number from 0 to below 1")
        return Policy(types=cast("Types", types), tolerance=float(tolerance), output=self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The source made by `code`."""

    sandbox: Sandbox
    policy: Policy = field(default_factory=Policy)
    name: str = "code"
    offers: frozenset[str] = frozenset({"reward"})
    needs: frozenset[str] = frozenset({"tests"})

    async def __call__(self, group: Group) -> tuple[Signal, ...]:
        return tuple(await asyncio.gather(*(self._signal(group.task, one) for one in group.trajectories)))

    async def _signal(self, task: Task, trajectory: Trajectory) -> Signal:
        if trajectory.stop == "error":
            return self._without("failed", "the episode ended in an error")
        try:
            tests, policy = tests_of(task), self.policy.for_task(task)
        except ValueError as error:
            return self._without("failed", f"the task's tests cannot be used: {error}")
        if not tests:
            return self._without("abstained", "the task has no tests")
        program = program_text(trajectory.text)
        if program is None:
            return self._verdict("no program in the answer")
        entry = entry_of(task)
        context = context_of(task, entry)
        exam = _Exam(
            sandbox=self.sandbox,
            policy=policy,
            source=complete(program, context, entry),
            context=helpers(context, entry),
            seed=hashlib.sha256(f"{task.id}\0{program}".encode(errors="surrogatepass")).hexdigest(),
        )
        try:
            async with self.sandbox.slot():
                return self._verdict(await exam.all(tests))
        except (WorldError, TestsBroken) as error:
            return self._without("failed", str(error))

    def _verdict(self, wrong: str | None) -> Signal:
        return Signal(source=self.name, name="reward", values=(float(wrong is None),), note=wrong or "")

    def _without(self, status: Literal["abstained", "failed"], note: str) -> Signal:
        return Signal(source=self.name, name="reward", status=status, note=note)


class TestsBroken(Exception):
    """The task's own tests cannot be run, whatever the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exam:
    """One program before all tests of its task. Each part says what is wrong, or None."""

    sandbox: Sandbox
    policy: Policy
    source: str
    context: str
    seed: str

    async def all(self, tests: Sequence[Test]) -> str | None:
        """What is wrong with the program, or None. One that brings its sandbox down is tried again, and
        is wrong if it does so twice while others run well. Raises WorldError where they do not."""
        for _ in range(2):
            try:
                async with asyncio.timeout(self.sandbox.limits.total_seconds):
                    return await self._once(tests)
            except TimeoutError:
                return f"the tests took more than {self.sandbox.limits.total_seconds:g} seconds"
            except Stopped as stopped:
                return str(stopped)
            except Lost as error:
                lost = error
        if await self.sandbox.works():
            return f"it brought the sandbox down: {lost}"
        raise WorldError(f"The sandbox broke, and other programs do not run in it either: {lost}.")

    async def _once(self, tests: Sequence[Test]) -> str | None:
        calls = [test for test in tests if isinstance(test, CallTest)]
        scripts = [test for test in tests if isinstance(test, ScriptTest)]
        checks = [test for test in tests if isinstance(test, CheckTest)]
        wrong = await self._calls(calls) if calls else None
        if wrong is None and scripts:
            wrong = await self._scripts(scripts)
        for check in checks:
            wrong = wrong or await self._check(check)
        return wrong

    async def _calls(self, tests: Sequence[CallTest]) -> str | None:
        exact = self.policy.types == "exact"
        async with self.sandbox.worker() as worker:
            await load(worker, self.source)
            for number, test in enumerate(tests, 1):
                reply = await call(worker, test.function, test.args, test.kwargs, lenient=not exact)
                if test.raises is not None:
                    right = "value" not in reply and reply.get("raised") == test.raises
                else:
                    right = "value" in reply and same(
                        test.expected, reply["value"], exact=exact, tolerance=self.policy.tolerance
                    )
                if not right:
                    return f"test {number}: {_told(reply)}"
        return None

    async def _scripts(self, tests: Sequence[ScriptTest]) -> str | None:
        async with self.sandbox.worker() as worker:
            for number, test in enumerate(tests, 1):
                ended = await run_script(worker, self.source, test.stdin.encode(errors="surrogatepass"))
                if ended.code or ended.reason:
                    return f"test {number}: {describe(ended)}"
                if ended.truncated or not self._prints(test.stdout, ended.out):
                    return f"test {number}: it printed something else"
        return None

    def _prints(self, wanted: str, found: bytes) -> bool:
        if self.policy.output == "exact":
            return found == wanted.encode(errors="surrogatepass")
        try:
            return _lines(found.decode()) == _lines(wanted)
        except UnicodeDecodeError:
            return False

    async def _check(self, test: CheckTest) -> str | None:
        """Lets the task's tests speak with the program, each in its own sandbox."""
        exact = self.policy.types == "exact"
        job = {"role": "examiner", "tests": test.source, "context": self.context, "names": test.names}
        job |= {"entry": test.entry, "exact": exact, "tolerance": self.policy.tolerance, "seed": self.seed}
        async with self.sandbox.worker() as worker, self.sandbox.worker() as examiner:
            await load(worker, self.source)
            answered = False
            message = await self._heard(examiner, b"S", json.dumps(job).encode(), answered)
            while "call" in message:
                reply = await ask_raw(worker, b"C", json.dumps(message["call"]).encode())
                answered = True
                message = await self._heard(examiner, b"C", reply, answered)
        if message.get("outcome") == "passed" and not answered:
            raise TestsBroken("The task's tests never call the program.")
        if message.get("outcome") == "broken":
            raise TestsBroken(f"The task's tests cannot be run: {message.get('words')}.")
        return None if message.get("outcome") == "passed" else short(message.get("words")) or "a test failed"

    async def _heard(self, examiner: Worker, kind: bytes, payload: bytes, answered: bool) -> dict[str, object]:
        """What the examiner says next. Where it ends instead, that is the doing of a value it was given,
        if there was one."""
        try:
            return json.loads(await ask_raw(examiner, kind, payload))
        except Stopped as stopped:
            if answered:
                raise Stopped(f"the tests do not survive its values: {stopped}") from stopped
            raise TestsBroken(f"The task's tests cannot be run: {stopped}.") from stopped


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _told(reply: object) -> str:
    """What a program answered instead, in a few words."""
    found = reply if isinstance(reply, dict) else {}
    if "raised" in found:
        return f"it raised {short(found['raised'])}: {short(found.get('words'))}"
    if "odd" in found:
        return f"it returned what is no plain data: {short(found['odd'])}"
    try:
        return f"it returned {json.dumps(found.get('value'))[:200]}"
    except RecursionError:
        return "it returned what is nested too deeply"
