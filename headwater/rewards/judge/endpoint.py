"""An OpenAI-compatible endpoint, on the assumption that it will misbehave.

Whatever goes wrong ends in AskError within `timeout_s` for each try: an attempt has one deadline from the
first byte sent to the last received, a body has a largest size, and redirects are not followed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from headwater.errors import ConfigError
from headwater.rewards.judge.ask import AskError, BudgetSpent
from headwater.rewards.judge.config import EndpointConfig
from headwater.rewards.judge.prompts import encodable
from headwater.types import Json, Message

_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
_REFUSED = frozenset({401, 403, 404})
_LONGEST_WAIT_S = 60.0
_MOST_TOKENS = 10**9
_CHARACTERS_PER_TOKEN = 4
"""Where a server does not count tokens: about right for English, so that a budget still holds."""


@dataclass(slots=True)
class Usage:
    """What asking has come to. `unmetered` replies came without a count of tokens; theirs is estimated from
    their length. What a failed try cost is not known and not in it."""

    requests: int = 0
    replies: int = 0
    retries: int = 0
    failures: int = 0
    unmetered: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0


@dataclass(slots=True)
class _Session:
    """A client for as long as anything is under way in its event loop: connections are shared by requests
    that run together, and none is left open after them."""

    loop: asyncio.AbstractEventLoop
    client: httpx.AsyncClient
    slots: asyncio.Semaphore
    users: int = 0


class _Fault(Exception):
    """One try failed. `again` says whether another may do better, `wait_s` what the server asked for."""

    def __init__(self, text: str, *, again: bool, wait_s: float | None = None) -> None:
        super().__init__(text)
        self.again, self.wait_s = again, wait_s


@dataclass(slots=True)
class Endpoint:
    """A model behind an OpenAI-compatible HTTP API, as an Ask. Raises ConfigError where the endpoint refuses
    the very first request (401, 403, 404): that is a setting, not bad luck."""

    config: EndpointConfig
    usage: Usage = field(default_factory=Usage)
    _session: _Session | None = None

    @property
    def name(self) -> str:
        """The model and where it is asked."""
        return f"{self.config.model} at {self.config.base_url}"

    async def complete(self, messages: Sequence[Message], *, temperature: float, max_tokens: int, seed: int = 0) -> str:
        """What the model answers. Raises AskError where it does not, after all retries."""
        body: dict[str, Json] = {
            "model": self.config.model,
            "messages": [{"role": m["role"], "content": m["content"]} for m in messages],
            "temperature": temperature,
            "max_tokens": max_tokens,
            "seed": seed,
            **self.config.extra,
        }
        for name in self.config.omit:
            body.pop(name, None)
        headers = self._headers()
        session = self._open()
        try:
            async with session.slots:
                return await self._patiently(session.client, body, headers)
        finally:
            await self._close(session)

    async def _patiently(self, client: httpx.AsyncClient, body: Mapping[str, Json], headers: dict[str, str]) -> str:
        for tried in range(self.config.retries + 1):
            self._check_budget()
            self.usage.requests += 1
            try:
                async with asyncio.timeout(self.config.timeout_s):
                    reply = await self._once(client, body, headers)
                self.usage.replies += 1
                return reply
            except TimeoutError:
                fault = _Fault(f"no whole answer within {self.config.timeout_s:g} s", again=True)
            except httpx.HTTPError as error:
                fault = _Fault(f"{type(error).__name__}: {error}", again=True)
            except _Fault as found:
                fault = found
            if not fault.again or tried == self.config.retries:
                self.usage.failures += 1
                raise AskError(f"{self.name} did not answer after {tried + 1} tries: {fault}")
            self.usage.retries += 1
            await asyncio.sleep(self._pause(tried, fault))
        raise AssertionError("the last try returns or raises")

    def _pause(self, tried: int, fault: _Fault) -> float:
        wait = self.config.backoff_s * 2**tried * random.uniform(0.5, 1.5)
        return min(_LONGEST_WAIT_S, max(wait, fault.wait_s or 0.0))

    async def _once(self, client: httpx.AsyncClient, body: Mapping[str, Json], headers: dict[str, str]) -> str:
        async with client.stream("POST", self.config.address, json=body, headers=headers) as response:
            raw = bytearray()
            async for piece in response.aiter_bytes():
                raw += piece
                if len(raw) > self.config.max_body_bytes:
                    raise _Fault(f"a body of more than {self.config.max_body_bytes} bytes", again=False)
            status = response.status_code
            wait = _seconds(response.headers.get("retry-after"))
        if status != 200:
            said = bytes(raw[:200]).decode("utf-8", "replace")
            if status in _REFUSED and not self.usage.replies:
                raise ConfigError(
                    f"{self.config.address} answered {status}: {said!r}. "
                    "Check the judge's base_url, model and api_key_env."
                )
            raise _Fault(f"status {status}: {said!r}", again=status in _AGAIN, wait_s=wait)
        return self._read(bytes(raw), len(json.dumps(body.get("messages"), ensure_ascii=False)))

    def _read(self, raw: bytes, asked: int) -> str:
        try:
            found = json.loads(raw)
            text = found["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise _Fault(f"an answer of no known form ({type(error).__name__}): {raw[:80]!r}", again=True) from error
        if not isinstance(text, str):
            raise _Fault(f"content is {type(text).__name__}, wanted text", again=True)
        self._count(found.get("usage"), asked, len(text))
        return encodable(text)

    def _count(self, usage: object, asked: int, said: int) -> None:
        """Add up the tokens that the server counted, or an estimate from the characters asked and said."""
        found = usage if isinstance(usage, dict) else {}
        counts = [found.get(key) for key in ("prompt_tokens", "completion_tokens")]
        known = [count for count in counts if isinstance(count, int) and 0 <= count < _MOST_TOKENS]
        if len(known) < 2:
            self.usage.unmetered += 1
            known = [-(-characters // _CHARACTERS_PER_TOKEN) for characters in (asked, said)]
        into, out = known
        self.usage.input_tokens += into
        self.usage.output_tokens += out
        self.usage.cost += (into * self.config.input_price + out * self.config.output_price) / 1e6

    def _check_budget(self) -> None:
        limit = self.config.max_cost
        if limit is not None and self.usage.cost >= limit:
            raise BudgetSpent(
                f"Asking {self.name} has cost {self.usage.cost:.4f}, and max_cost is {limit:g}. Raise it to go on; "
                "what was answered is in the cache if there is one."
            )

    def _headers(self) -> dict[str, str]:
        variable = self.config.api_key_env
        if variable is None:
            return {}
        key = os.environ.get(variable, "")
        if not key or not key.isascii() or not key.isprintable():
            raise ConfigError(
                f"The environment variable {variable}, which is to hold the judge's API key, is not set to one. "
                f"Set it: export {variable}=..."
            )
        return {"Authorization": f"Bearer {key}"}

    def _open(self) -> _Session:
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.loop is not loop:
            limit = self.config.concurrency
            client = httpx.AsyncClient(
                timeout=None,  # one deadline for the whole attempt, in _patiently
                limits=httpx.Limits(max_connections=limit, max_keepalive_connections=limit),
                follow_redirects=False,
                trust_env=not self.config.local,
            )
            self._session = _Session(loop, client, asyncio.Semaphore(limit))
        self._session.users += 1
        return self._session

    async def _close(self, session: _Session) -> None:
        session.users -= 1
        if session.users == 0:
            if self._session is session:
                self._session = None
            await session.client.aclose()


def _seconds(text: str | None) -> float | None:
    """A Retry-After header in seconds; a date is not read."""
    return float(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 6 else None
