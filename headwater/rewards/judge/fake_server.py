"""An OpenAI-compatible server on loopback that answers as it is told, and misbehaves on demand.

For tests and for trying a recipe without a model. It is a real server: nothing of the client is replaced.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from headwater.rewards.judge.ask import Ask
from headwater.types import Message

Fault = Literal[
    "ok", "500", "429", "401", "404", "redirect", "hang", "drip", "garbage", "not_json", "no_choices", "null", "deep",
    "huge", "close",
]  # fmt: skip
_LONGEST_REQUEST = 16_000_000


@dataclass(slots=True)
class FakeServer:
    """`async with FakeServer(ask) as server:` answers POST /v1/chat/completions by asking `ask`, or a plain
    function of the request. `faults` are what happens to the first requests, one each; then all is well.
    `seen` holds every request body, `most` how many were under way at once."""

    ask: Ask | Callable[[dict[str, Any]], str]
    faults: list[Fault] = field(default_factory=list)
    delay_s: float = 0.0
    metered: bool = True
    seen: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most: int = 0
    _now: int = 0
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> FakeServer:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def base_url(self) -> str:
        """The address to give to a client."""
        assert self._server is not None, "the server has an address once it runs"
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; whether the connection stays open."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except asyncio.IncompleteReadError:
            return False
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:]) if k}
        size = int(headers.get("content-length", "0"))
        body = json.loads(await reader.readexactly(min(size, _LONGEST_REQUEST)) or b"{}")
        self.seen.append(body)
        self.headers.append(headers)
        fault = self.faults.pop(0) if self.faults else "ok"
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            await asyncio.sleep(self.delay_s)
            return await self._answer(fault, body, writer)
        finally:
            self._now -= 1

    async def _answer(self, fault: Fault, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if fault == "close":
            return False
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "garbage":
            writer.write(b"\x00\xffthis is not http\r\n\r\n")
            await writer.drain()
            return False
        if fault == "drip":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            for _ in range(100_000):
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.02)
        if fault == "huge":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
            for _ in range(16_000):
                writer.write(b"[" * 65_536)
                await writer.drain()
            return False
        status, text, more = await self._content(fault, body)
        payload = text.encode()
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(payload)}\r\n{more}\r\n".encode() + payload)
        await writer.drain()
        return True

    async def _content(self, fault: Fault, body: dict[str, Any]) -> tuple[str, str, str]:
        """Status, body and further header lines."""
        if fault == "ok":
            return "200 OK", json.dumps(self._completion(await self._say(body))), ""
        known = {
            "500": ("500 Internal Server Error", '{"error": "boom"}', ""),
            "429": ("429 Too Many Requests", '{"error": "slow down"}', "Retry-After: 0\r\n"),
            "401": ("401 Unauthorized", '{"error": "no such key"}', ""),
            "404": ("404 Not Found", '{"error": "no such model"}', ""),
            "redirect": ("307 Temporary Redirect", "", "Location: http://192.0.2.1/v1/chat/completions\r\n"),
            "not_json": ("200 OK", "<html>It works!</html>", ""),
            "no_choices": ("200 OK", '{"choices": []}', ""),
            "null": ("200 OK", '{"choices": [{"message": {"content": null}}]}', ""),
            "deep": ("200 OK", "[" * 100_000, ""),
        }
        return known[fault]

    async def _say(self, body: dict[str, Any]) -> str:
        if not isinstance(self.ask, Ask):
            return self.ask(body)
        messages: Sequence[Message] = body["messages"]
        return await self.ask.complete(
            messages, temperature=body["temperature"], max_tokens=body["max_tokens"], seed=body.get("seed", 0)
        )

    def _completion(self, text: str) -> dict[str, Any]:
        said: dict[str, Any] = {
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}]
        }
        if self.metered:
            said["usage"] = {"prompt_tokens": 100, "completion_tokens": len(text.split())}
        return said
