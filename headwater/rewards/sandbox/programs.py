"""What a program in the sandbox can be asked for: to read and print, or to have its functions called.

All that comes back is the program's claim. It is read as JSON of bounded size and never trusted further.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwater.rewards.sandbox.worker import Lost, Worker


class Stopped(Exception):
    """The program came to an end where it should not have: it crashed, took too long or too much."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a script ended. `code` is its exit code, or minus the signal that ended it; `truncated` says
    that it printed more than was kept; `reason` is the limit that it went over, if it was one of ours."""

    code: int
    reason: str
    out: bytes
    err: bytes
    truncated: bool


async def run_script(worker: Worker, source: str, stdin: bytes) -> Ended:
    """Runs a program as `python program.py` would, on that standard input. Several may run in one
    worker, one after the other, if they are the same program. Raises Stopped where it takes too long."""
    await worker.ready()
    job = {"role": "script", "source": source, "stdin": base64.b64encode(stdin).decode()}
    try:
        async with asyncio.timeout(worker.limits.seconds):
            await worker.send(b"S", json.dumps(job).encode())
            kind, payload = await worker.receive()
    except TimeoutError as error:
        raise Stopped(f"it took more than {worker.limits.seconds:g} seconds") from error
    if kind != b"E":
        raise Lost("a message out of turn")
    return _ended(payload)


async def load(worker: Worker, source: str) -> None:
    """Runs a program as an import would, so that its functions can be called. Raises Stopped where it
    raises, ends, or takes too long."""
    reply = await _ask(worker, b"S", {"role": "functions", "source": source})
    if "broken" in reply:
        about = reply["broken"] if isinstance(reply["broken"], dict) else {}
        raise Stopped(f"it does not load: {short(about.get('raised'))}: {short(about.get('words'))}")


async def call(worker: Worker, function: str, args: Any, kwargs: Any, *, lenient: bool = False) -> Mapping[str, Any]:
    """Calls a function of the loaded program with arguments that `plain.encode` made: of a tuple, and
    of a dict. The reply is {"value": tree}, {"raised": name, "words": text} or {"odd": why}, or
    anything else that a program may come up with. Raises Stopped where it ends or takes too long."""
    return await _ask(worker, b"C", {"fn": function, "args": args, "kwargs": kwargs, "lenient": lenient})


async def _ask(worker: Worker, kind: bytes, message: Mapping[str, Any]) -> Mapping[str, Any]:
    return _parse(await ask_raw(worker, kind, json.dumps(message).encode()))


async def ask_raw(worker: Worker, kind: bytes, message: bytes) -> bytes:
    """Sends a program something, and waits for what it sends back. Raises Stopped where it ends or takes
    too long."""
    await worker.ready()
    try:
        async with asyncio.timeout(worker.limits.seconds):
            await worker.send(kind, message)
            answered, payload = await worker.receive()
    except TimeoutError as error:
        raise Stopped(f"it took more than {worker.limits.seconds:g} seconds") from error
    if answered == b"E":
        raise Stopped(describe(_ended(payload)))
    if answered != b"V":
        raise Lost("a message out of turn")
    return payload


def _parse(payload: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError):
        return {"odd": "no JSON"}
    return found if isinstance(found, dict) else {"odd": "no object of JSON"}


def _ended(payload: bytes) -> Ended:
    found = _parse(payload)
    try:
        return Ended(
            code=int(found["code"]),
            reason=short(found["reason"]),
            out=base64.b64decode(found["out"]),
            err=base64.b64decode(found["err"]),
            truncated=bool(found["truncated"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError, binascii.Error) as error:
        raise Lost("a report that is none") from error


def describe(ended: Ended) -> str:
    """Why a program ended, in a few words."""
    if ended.reason:
        return f"it went over its limit of {ended.reason}"
    if ended.code < 0:
        return f"it was ended by signal {-ended.code}"
    last = ended.err.decode(errors="replace").strip().rpartition("\n")[2]
    return f"it ended with exit code {ended.code}" + (f": {short(last)}" if last else "")


def short(found: object) -> str:
    """The beginning of what a program says, fit for a note on one line."""
    return " ".join(found[:200].split()) if isinstance(found, str) else ""
