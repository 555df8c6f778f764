"""Answers that are a proof, checked by Coq in a sandbox."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.errors import ConfigError, WorldError
from headwater.rewards.sandbox.limits import Limits
from headwater.rewards.sandbox.pool import Sandbox, Wanted
from headwater.rewards.sandbox.programs import Stopped, run_script, short
from headwater.rewards.sandbox.worker import Lost
from headwater.rewards.source import without
from headwater.rewards.verifiers.proof_text import name_of, proof_text, renamed, tactics
from headwater.types import Group, Signal, Task, Trajectory

_FINDLIB = Path("/etc/ocamlfind.conf")
"""Where Coq's plugins are, which the sandbox does not show."""
_CLOSED = "Closed under the global context"
_DRIVER = """
import json, os, subprocess, sys, tempfile
job = json.load(sys.stdin)
said = {}
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    with open('findlib.conf', 'w') as file:
        file.write(job['findlib'])
    environment = dict(os.environ, OCAMLFIND_CONF=os.path.abspath('findlib.conf'))
    for name, source in job['files']:
        with open(name + '.v', 'w') as file:
            file.write(source)
        command = [job['coqc'], '-q', '-Q', '.', '', '-w', 'none', name + '.v']
        done = subprocess.run(command, stdin=subprocess.DEVNULL, env=environment,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said[name] = [done.returncode, done.stdout[:20000].decode(errors='replace')]
        if done.returncode:
            break
sys.stdout.write(json.dumps(said))
"""


def coq(
    *,
    axioms: Sequence[str] = (),
    seconds: float = 20.0,
    memory: int = 2048,
    workers: int | None = None,
    isolation: Wanted = "bubblewrap",
) -> Coq:
    """1 where the answer's tactics prove the task's `statement` before Coq, else 0.

    The answer holds tactics and nothing else: no command of Coq's, so it can neither assume nor restate anything. What
    the proof rests on is asked of Coq in a file of its own, and must be nothing but `axioms`, or those of the task's
    meta, named as Print Assumptions prints them. Abstains without a statement; fails where Coq does not take that.
    Raises ConfigError without coqc, or where it cannot be isolated, unless `isolation` accepts that in words.
    """
    coqc = shutil.which("coqc")
    if coqc is None:
        raise ConfigError(
            "The reward 'coq' needs the program coqc, and it was not found. Install Coq (Debian: apt install coq), and "
            "see that coqc is in your PATH."
        )
    if isolation == "bubblewrap" and not coqc.startswith(("/usr/", "/bin/")):
        raise ConfigError(f"The sandbox shows programs the folder /usr, and coqc is {coqc}. Install Coq there.")
    limits = Limits(seconds=seconds, total_seconds=seconds, memory=memory)
    return Coq(
        coqc=coqc, sandbox=Sandbox(isolation=isolation, limits=limits, workers=workers), axioms=frozenset(axioms)
    )


class _TaskBroken(Exception):
    """The task's own statement is no use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coq:
    """The source made by `coq`."""

    coqc: str
    sandbox: Sandbox
    axioms: frozenset[str]
    name: str = "coq"
    offers: frozenset[str] = frozenset({"reward"})
    needs: frozenset[str] = frozenset({"statement"})
    compares: bool = False

    async def __call__(self, group: Group) -> tuple[Signal, ...]:
        return tuple(await asyncio.gather(*(self._signal(group.task, one) for one in group.trajectories)))

    async def _signal(self, task: Task, trajectory: Trajectory) -> Signal:
        if trajectory.stop == "error":
            return without(self.name, "failed", "the episode ended in an error")
        if not task.meta.get("statement"):
            return without(self.name, "abstained", "the task has no statement")
        try:
            async with self.sandbox.slot():
                wrong = await self._wrong(task, trajectory.text)
        except (WorldError, _TaskBroken) as error:
            return without(self.name, "failed", str(error))
        return Signal(source=self.name, name="reward", values=(float(wrong is None),), note=wrong or "")

    async def _wrong(self, task: Task, text: str) -> str | None:
        """What is wrong with the proof, or None."""
        statement, preamble, axioms = _read(task)
        proof = proof_text(text)
        if proof is None:
            return "no proof in the answer"
        steps = tactics(proof, statement)
        if isinstance(steps, str):
            return steps
        name = name_of(statement)
        given = ("Given", re.sub(r"\bRequire\s+Import\b", "Require Export", preamble) + "\n")
        head = "Require Import Given.\n"
        work = ("Work", "\n".join([head + statement, "Proof.", *steps, "Qed.", ""]))
        again = renamed(statement, "checked_again")
        check = f"{head}Require Work.\n{again}\nProof.\nexact Work.{name}.\nQed.\nPrint Assumptions checked_again.\n"
        try:
            said = await self._run([given, work, ("Check", check)])
        except (Stopped, Lost) as stopped:
            await self._try_statement([given, ("Work", f"{head}{statement}\nAdmitted.\n")])
            return str(stopped)
        if "Check" not in said:
            await self._try_statement([given, ("Work", f"{head}{statement}\nAdmitted.\n")])
            return short(said.get("Work", [1, ""])[1]) or "Coq does not take it"
        code, words = said["Check"]
        return (
            f"Coq does not take it for the statement: {short(words)}" if code else _assumed(words, axioms | self.axioms)
        )

    async def _try_statement(self, files: list[tuple[str, str]]) -> None:
        try:
            said = await self._run(files)
        except (Stopped, Lost) as error:
            raise _TaskBroken(f"The task's statement cannot be checked: {error}.") from error
        broken = next((words for code, words in said.values() if code), None)
        if broken is not None or "Work" not in said:
            raise _TaskBroken(f"Coq does not take the task's statement: {short(broken)}")

    async def _run(self, files: list[tuple[str, str]]) -> dict[str, Any]:
        """What Coq says of each file, as far as it gets: its exit code, and its words."""
        findlib = _FINDLIB.read_text() if _FINDLIB.exists() else ""
        job = json.dumps({"coqc": self.coqc, "files": files, "findlib": findlib}).encode()
        async with self.sandbox.worker() as worker:
            ended = await run_script(worker, _DRIVER, job)
        if ended.code or ended.reason:
            raise Stopped(ended.reason or f"the check ended with exit code {ended.code}")
        return json.loads(ended.out)


def _read(task: Task) -> tuple[str, str, frozenset[str]]:
    """The statement, what comes before it, and the axioms that it may rest on."""
    statement, preamble, axioms = (task.meta.get(key, "") for key in ("statement", "preamble", "axioms"))
    if not isinstance(statement, str) or not isinstance(preamble, str) or name_of(statement) is None:
        raise _TaskBroken("The task's meta.statement is no 'Theorem name : ... .', or its meta.preamble is no text.")
    if not axioms:
        return statement, preamble, frozenset()
    names = [name for name in axioms if isinstance(name, str)] if isinstance(axioms, list | tuple) else []
    if not isinstance(axioms, list | tuple) or len(names) < len(axioms):
        raise _TaskBroken(f"The task's meta.axioms is {axioms!r}, wanted a list of names.")
    return statement, preamble, frozenset(names)


def _assumed(words: str, allowed: frozenset[str]) -> str | None:
    """What a proof assumes that it may not, by what Print Assumptions says, or None."""
    if words.strip() == _CLOSED:
        return None
    first, *rest = words.strip().splitlines()
    if first != "Axioms:":
        return f"Coq says of what it assumes: {short(words)}"
    names = [re.split(r"\s|:", line, maxsplit=1)[0] for line in rest if line and not line[0].isspace()]
    unknown = [name for name in names if name not in allowed]
    if unknown or not names:
        return f"it assumes {', '.join(unknown)[:200] or 'something'}"
    if any("assumed" in line for line in rest):
        return f"Coq says of what it assumes: {short(words)}"
    return None
