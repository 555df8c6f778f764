from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.rewards.sandbox.isolation import candidates
from headwater.rewards.sandbox.pool import working_isolation


@pytest.fixture(scope="session", autouse=True)
def isolated() -> None:
    try:
        working_isolation()
    except ConfigError as error:
        pytest.skip(f"no isolation on this machine: {error}")


@pytest.fixture(scope="session", params=["best", "namespace"])
def isolation(request: pytest.FixtureRequest, isolated: None):
    """Each way to isolate: the one that is used here, and where that is root's, everybody's too."""
    ways = [working_isolation(), *(way for way in candidates() if way != working_isolation())]
    if request.param == "namespace" and len(ways) < 2:
        pytest.skip("there is one way to isolate here, and it was tested")
    return ways[0] if request.param == "best" else ways[1]


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
