"""What runs inside of the sandbox: a supervisor, and a fork of it for each program.

It stands alone: the standard library, and `plain` and `roles` beside it. The supervisor speaks with the parent over
one socket. It starts a program, passes messages on between the two, drains what the program prints, keeps
an eye on memory and the number of processes, and ends everything that the program left behind. No expected
value ever gets here, and nothing that leaves is believed: all of it is what the program claims.

A message is one letter, its length in four bytes, and that many bytes. From the parent: S a program to
start (JSON), C something for it. To the parent: R ready, V something from it, E it ended (JSON).
"""

from __future__ import annotations

import binascii
import contextlib
import errno
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HEADER = struct.Struct("!cI")
TICK = 0.05
"""Seconds between two looks at memory and processes."""


def main() -> None:
    """Serves the parent until it hangs up. Arguments: the socket's descriptor, and settings as JSON."""
    link = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    send(link, b"R", b"")
    while (message := receive(link)) is not None:
        kind, payload = message
        if kind == b"S":
            Run(link, json.loads(payload), settings).supervise()


def send(link: socket.socket, kind: bytes, payload: bytes) -> None:
    """Sends one message."""
    link.sendall(HEADER.pack(kind, len(payload)) + payload)


def receive(link: socket.socket) -> tuple[bytes, bytes] | None:
    """The next message, or None where the other side is gone."""
    head = exactly(link, HEADER.size)
    if head is None:
        return None
    kind, length = HEADER.unpack(head)
    payload = exactly(link, length)
    return None if payload is None else (kind, payload)


def exactly(link: socket.socket, count: int) -> bytes | None:
    """That many bytes, or None where the other side is gone."""
    found = bytearray()
    while len(found) < count:
        try:
            piece = link.recv(min(count - len(found), 1 << 20))
        except ConnectionError:
            return None
        if not piece:
            return None
        found += piece
    return bytes(found)


class Run:
    """One program under supervision."""

    def __init__(self, link: socket.socket, job: dict[str, Any], settings: dict[str, Any]) -> None:
        self.link, self.job, self.settings = link, job, settings
        self.to_feed = binascii.a2b_base64(job.pop("stdin", ""))
        self.kept = {"out": bytearray(), "err": bytearray()}
        self.printed = {"out": 0, "err": 0}
        self.from_program = bytearray()
        self.reason = ""

    def supervise(self) -> None:
        """Starts the program, serves it until it ends, and says how it did."""
        self.rpc, far_rpc = socket.socketpair()
        in_read, self.feed = os.pipe()
        self.out, out_write = os.pipe()
        self.err, err_write = os.pipe()
        self.wake, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.pid = os.fork()
        if self.pid == 0:
            become_program(self.job, self.settings, far_rpc, (in_read, out_write, err_write))
        far_rpc.close()
        for descriptor in (in_read, out_write, err_write):
            os.close(descriptor)
        for descriptor in (self.feed, self.out, self.err, self.wake):
            os.set_blocking(descriptor, False)
        self.rpc_open = True
        try:
            status = self.serve()
            self.kill_all()
            self.drain_rest()
        finally:
            signal.set_wakeup_fd(-1)
            for descriptor in (self.feed, self.out, self.err, self.wake, wake_write):
                if descriptor >= 0:
                    os.close(descriptor)
            self.rpc.close()
        self.tell(status)

    def serve(self) -> int:
        """Passes things on until the program's first process has ended. Returns its exit status."""
        looked = 0.0
        while True:
            status = self.reap()
            if status is not None:
                return status
            if time.monotonic() - looked > TICK:
                looked = time.monotonic()
                self.watch()
            readers: list[Any] = [self.link, self.wake]
            readers += [d for d in (self.out, self.err) if d >= 0]
            readers += [self.rpc] if self.rpc_open else []
            writers = [self.feed] if self.feed >= 0 else []
            readable, writable, _ = select.select(readers, writers, [], TICK)
            if self.wake in readable:
                os.read(self.wake, 4096)
            if self.link in readable:
                message = receive(self.link)
                if message is None:  # nobody is waiting any more
                    self.kill_all()
                    os._exit(0)
                if message[0] == b"C":
                    with contextlib.suppress(OSError):
                        self.rpc.sendall(struct.pack("!I", len(message[1])) + message[1])
            if self.rpc in readable:
                self.hear(1 << 16)
            self.drain(readable)
            if writable:
                self.write_input()

    def reap(self) -> int | None:
        """Collects the dead. Returns the exit status of the program once it is among them."""
        found = None
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self.pid:
                    found = status
        return found

    def watch(self) -> None:
        """Ends the program where all its processes together take too much."""
        if not self.settings["isolated"]:
            return
        count = pages = 0
        for name in os.listdir("/proc"):
            if name.isdecimal() and name != "1":
                count += 1
                with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/statm") as file:
                    pages += int(file.read().split()[1])
        if count > self.settings["processes"]:
            self.reason = "processes"
        elif pages * resource.getpagesize() > self.settings["memory"]:
            self.reason = "memory"
        if self.reason:
            self.kill_all()

    def hear(self, size: int) -> None:
        """Takes from the program what it says, and passes on each whole message."""
        try:
            piece = self.rpc.recv(size)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self.rpc_open = False
            return
        self.from_program += piece
        while len(self.from_program) >= 4:
            (length,) = struct.unpack("!I", self.from_program[:4])
            if length > self.settings["value"]:
                self.reason = self.reason or "value"
                self.rpc_open = False
                self.from_program.clear()
                os.kill(self.pid, signal.SIGKILL)
                return
            if len(self.from_program) < 4 + length:
                return
            payload = bytes(self.from_program[4 : 4 + length])
            del self.from_program[: 4 + length]
            send(self.link, b"V", payload)

    def drain(self, readable: list[Any]) -> None:
        """Reads what was printed, keeps the beginning, and counts the rest."""
        for name in ("out", "err"):
            descriptor = getattr(self, name)
            if descriptor < 0 or descriptor not in readable:
                continue
            try:
                piece = os.read(descriptor, 1 << 18)
            except BlockingIOError:
                continue
            if not piece:
                os.close(descriptor)
                setattr(self, name, -1)
                continue
            kept = self.kept[name]
            room = (self.settings["output"] if name == "out" else 10_000) - len(kept)
            kept += piece[: max(0, room)]
            self.printed[name] += len(piece)

    def drain_rest(self) -> None:
        """What the ended program left in the pipes. A daemon that holds one open is not waited for."""
        for _ in range(64):
            readers: list[Any] = [d for d in (self.out, self.err) if d >= 0]
            readers += [self.rpc] if self.rpc_open else []
            readable = select.select(readers, [], [], 0)[0] if readers else []
            if not readable:
                return
            if self.rpc in readable:
                self.hear(1 << 20)
            self.drain(readable)

    def write_input(self) -> None:
        """Gives the program some of its standard input, and closes it after the last of it."""
        try:
            count = os.write(self.feed, self.to_feed[: 1 << 16]) if self.to_feed else 0
            self.to_feed = self.to_feed[count:]
        except BlockingIOError:
            return
        except OSError:
            self.to_feed = b""
        if not self.to_feed:
            os.close(self.feed)
            self.feed = -1

    def kill_all(self) -> None:
        """Ends every process of the program, and waits for them a little."""
        if not self.settings["isolated"] or os.getpid() != 1:  # else -1 would be everybody on the machine
            for end in (os.killpg, os.kill):
                with contextlib.suppress(OSError):
                    end(self.pid, signal.SIGKILL)
            return
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                return
            try:
                # The program itself is left for reap(), which wants its status.
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                return
            if self.only_the_program_is_left():
                return
            time.sleep(0.001)

    def only_the_program_is_left(self) -> bool:
        """Reaps whatever else has ended, and looks for what has not."""
        left = [int(name) for name in os.listdir("/proc") if name.isdecimal() and name != "1"]
        for pid in left:
            if pid != self.pid:
                with contextlib.suppress(OSError):
                    os.waitpid(pid, os.WNOHANG)
        return all(pid == self.pid for pid in left)

    def tell(self, status: int) -> None:
        """Says how the program ended."""
        code = os.waitstatus_to_exitcode(status)
        report = {
            "code": code,
            "reason": self.reason,
            "out": binascii.b2a_base64(self.kept["out"], newline=False).decode(),
            "err": binascii.b2a_base64(self.kept["err"][-10_000:], newline=False).decode(),
            "truncated": self.printed["out"] > len(self.kept["out"]),
        }
        send(self.link, b"E", json.dumps(report).encode())


def become_program(
    job: dict[str, Any], settings: dict[str, Any], rpc: socket.socket, descriptors: tuple[int, int, int]
) -> None:
    """Turns this fork into the program: its own session, descriptors, limits and user. Ends the process."""
    signal.set_wakeup_fd(-1)
    os.setsid()
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    keep = rpc.detach()
    os.closerange(3, keep)
    os.closerange(keep + 1, 1024)
    rpc = socket.socket(fileno=keep)
    for number in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    limit(settings)
    if settings.get("uid"):
        os.setgroups([])
        os.setresgid(settings["uid"], settings["uid"], settings["uid"])
        os.setresuid(settings["uid"], settings["uid"], settings["uid"])
    os.umask(0o077)
    if settings["isolated"]:
        sweep("/tmp")
        sweep("/dev/shm")
        os.chdir("/tmp")
    sys.argv = ["program.py"]
    sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(os.path.abspath(__file__))]
    roles.act(job, rpc, settings)


def limit(settings: dict[str, Any]) -> None:
    """Limits of the kernel's on this process and its children, none of which can be raised again."""
    limits = {
        resource.RLIMIT_AS: settings["memory"],
        resource.RLIMIT_CPU: settings["cpu"],
        resource.RLIMIT_FSIZE: settings["file"],
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if settings["nproc_binds"]:
        limits[resource.RLIMIT_NPROC] = settings["processes"]
    for which, most in limits.items():
        _, hard = resource.getrlimit(which)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def sweep(folder: str) -> None:
    """Removes what an earlier test of the same program left behind."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            import shutil

            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import roles  # pyright: ignore[reportMissingImports]  # beside this file, wherever that is

    try:
        main()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ECONNRESET):
            raise
