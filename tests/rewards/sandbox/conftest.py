from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headwater.errors import ConfigError, WorldError
from headwater.rewards.sandbox.isolation import Isolation
from headwater.rewards.sandbox.limits import Limits
from headwater.rewards.sandbox.pool import working_isolation
from headwater.rewards.sandbox.worker import Lost, Worker


@pytest.fixture(scope="session", autouse=True)
def isolated() -> None:
    try:
        best = working_isolation()
    except ConfigError as error:
        pytest.skip(f"no isolation on this machine: {error}")
    check_walls(best)


@pytest.fixture(scope="session", params=["best", "namespace"])
def isolation(request: pytest.FixtureRequest, isolated: None):
    """Each way to isolate: the one that is used here, and where that is root's, everybody's too. That is tested
    at its weakest, where nobody in the namespace is root outside of it."""
    best = working_isolation()
    if request.param == "best":
        return best
    if not best.as_root:
        pytest.skip("there is one way to isolate here, and it was tested")
    namespace = Isolation(best.bwrap)
    check_walls(namespace)
    return namespace


WALLS = (
    "import os\nprint(os.getppid(), *(os.readlink(f'/proc/self/ns/{n}') for n in ('pid', 'net', 'mnt', 'ipc', 'uts')))"
)


def check_walls(isolation: Isolation) -> None:
    """Ends all tests where a program would be in the machine's own namespaces: hostile ones must not start then."""
    worker = Worker(isolation, Limits())
    try:
        parent, *found = worker.try_out(WALLS).decode().split()
    except (WorldError, Lost) as error:
        pytest.skip(f"this way to isolate does not work here: {error}")
    finally:
        worker.kill()
    ours = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net", "mnt", "ipc", "uts")]
    if parent != "1" or any(a == b for a, b in zip(found, ours, strict=True)):
        pytest.exit(f"{isolation} does not isolate: hostile programs are not run", returncode=1)


@dataclass(frozen=True)
class Outside:
    """What a program could touch if it got out."""

    folder: Path
    port: int
    sockets: tuple[socket.socket, ...]
    parent: int

    def untouched(self) -> bool:
        """Whether the canary lives, nobody called, and nothing of a program is left on the machine."""
        for server in self.sockets:
            try:
                server.accept()
            except BlockingIOError:
                continue
            return False
        return [p.name for p in self.folder.iterdir()] == ["canary"] and (self.folder / "canary").read_text() == "alive"


@pytest.fixture(scope="session")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    folder = tmp_path_factory.mktemp("outside")
    (folder / "canary").write_text("alive")
    folder.chmod(0o777)
    tcp = socket.create_server(("127.0.0.1", 0))
    port = tcp.getsockname()[1]
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0headwater-test-{port}")
    abstract.listen()
    for server in (tcp, abstract):
        server.setblocking(False)
    os.environ["HEADWATER_TEST_SECRET"] = "secret"
    yield Outside(folder, port, (tcp, abstract), os.getpid())
    del os.environ["HEADWATER_TEST_SECRET"]
    tcp.close()
    abstract.close()
