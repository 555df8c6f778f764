"""One isolated interpreter, used for one program and thrown away."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import struct
import subprocess
from contextlib import suppress

from headwater.errors import WorldError
from headwater.rewards.sandbox.isolation import Isolation, filter_of_calls, fresh_uid
from headwater.rewards.sandbox.limits import Limits

BOOT_SECONDS = 20.0
"""How long a worker may take until it is ready."""

_HEADER = struct.Struct("!cI")


class Lost(Exception):
    """The worker is gone, or says what no worker would. Once a program was started in it, it is the
    program that did that, as far as anyone can know."""


class Worker:
    """Starts at once, and gets ready while nobody waits for it. Dies with this process."""

    def __init__(self, isolation: Isolation, limits: Limits) -> None:
        self.isolation, self.limits = isolation, limits
        self.link, far = socket.socketpair()
        self.link.setblocking(False)
        self._is_ready = False
        filters = _readable_filter() if isolation.bwrap else None
        try:
            command = isolation.command(far.fileno(), limits, filters)
            uid = fresh_uid() if isolation.dropped else None
            passed = (far.fileno(),) if filters is None else (far.fileno(), filters)
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=passed,
                env=isolation.environment(),
                start_new_session=True,
                user=uid,
                group=uid,
                extra_groups=None if uid is None else (),
            )
        except (OSError, subprocess.SubprocessError) as error:
            self.link.close()
            raise WorldError(f"The sandbox cannot start a process: {error}.") from error
        finally:
            far.close()
            if filters is not None:
                os.close(filters)

    @property
    def alive(self) -> bool:
        """Whether its process has not ended yet."""
        return self.process.poll() is None

    async def ready(self) -> None:
        """Waits until it can take a program. Raises WorldError where it never can."""
        if self._is_ready:
            return
        try:
            async with asyncio.timeout(BOOT_SECONDS):
                kind, _ = await self.receive()
        except (Lost, TimeoutError) as error:
            words = self._last_words() or f"it was not ready in {BOOT_SECONDS:g} seconds"
            self.kill()
            raise WorldError(f"The sandbox did not start: {words}.") from error
        if kind != b"R":
            self.kill()
            raise WorldError(f"The sandbox did not start: it began with {kind!r}.")
        self._is_ready = True

    def try_out(self, source: str) -> bytes:
        """What a program prints, waited for without an event loop: for trying whether anything works here."""
        self.link.settimeout(BOOT_SECONDS)
        try:
            if self.link.recv(_HEADER.size, socket.MSG_WAITALL)[:1] != b"R":
                raise WorldError(self._last_words() or "it ended at once")
            self._is_ready = True
            job = json.dumps({"role": "script", "source": source}).encode()
            self.link.sendall(_HEADER.pack(b"S", len(job)) + job)
            head = self.link.recv(_HEADER.size, socket.MSG_WAITALL)
            if len(head) < _HEADER.size:
                raise Lost("the sandbox ended")
            report = json.loads(self.link.recv(_HEADER.unpack(head)[1], socket.MSG_WAITALL))
            if report["code"]:
                raise Lost(base64.b64decode(report["err"]).decode(errors="replace")[-500:])
            return base64.b64decode(report["out"])
        except OSError as error:
            raise Lost(str(error)) from error

    async def send(self, kind: bytes, payload: bytes) -> None:
        """Sends one message. Raises Lost where it is gone."""
        try:
            await asyncio.get_running_loop().sock_sendall(self.link, _HEADER.pack(kind, len(payload)) + payload)
        except OSError as error:
            raise Lost("the sandbox ended") from error

    async def receive(self) -> tuple[bytes, bytes]:
        """The next message, of bounded size. Raises Lost where there is none."""
        kind, length = _HEADER.unpack(await self._exactly(_HEADER.size))
        if length > max(self.limits.value, 2 * self.limits.output) + 100_000:
            raise Lost("a message that is too large")
        return kind, await self._exactly(length)

    async def _exactly(self, count: int) -> bytes:
        loop = asyncio.get_running_loop()
        found = bytearray()
        while len(found) < count:
            try:
                piece = await loop.sock_recv(self.link, min(count - len(found), 1 << 20))
            except OSError as error:
                raise Lost("the sandbox ended") from error
            if not piece:
                raise Lost("the sandbox ended")
            found += piece
        return bytes(found)

    def kill(self) -> None:
        """Ends it and all that runs in it, at once."""
        with suppress(OSError):
            self.link.close()
        if self.isolation.bwrap is None:  # nothing but the supervisor knows the program, and it ends both
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=2)
        with suppress(OSError):
            self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        if self.process.stderr is not None:
            self.process.stderr.close()

    def _last_words(self) -> str:
        """What bubblewrap or the interpreter said before it ended."""
        stderr = self.process.stderr
        assert stderr is not None
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1)
        os.set_blocking(stderr.fileno(), False)
        said = stderr.read() or b""
        return " ".join(said.decode(errors="replace").split())[-500:].rstrip(".")


def _readable_filter() -> int | None:
    """A descriptor from which the filter of system calls can be read."""
    program = filter_of_calls()
    if program is None:
        return None
    read, write = os.pipe()
    try:
        os.write(write, program)
    finally:
        os.close(write)
    return read
