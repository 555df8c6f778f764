"""An endpoint that misbehaves, over real sockets of this machine."""

import asyncio
import logging
from typing import Any

import pytest
from pydantic import ValidationError

from headwater.errors import ConfigError
from headwater.rewards.judge.ask import AskError, BudgetSpent
from headwater.rewards.judge.config import EndpointConfig
from headwater.rewards.judge.endpoint import Endpoint
from headwater.rewards.judge.fake_server import FakeServer, Fault
from headwater.types import Message

ASKED = [Message(role="user", content="How much is 2 + 2?")]


def settings(server: FakeServer, **more: Any) -> EndpointConfig:
    plain = {"model": "m", "timeout_s": 0.3, "retries": 2, "backoff_s": 0.0}
    return EndpointConfig(base_url=server.base_url, **{**plain, **more})


def ask(faults: list[Fault], **more: Any) -> tuple[str, Endpoint, FakeServer]:
    """One request to a server with these faults."""

    async def run() -> tuple[str, Endpoint, FakeServer]:
        async with FakeServer(lambda body: "four", faults=list(faults)) as server:
            endpoint = Endpoint(settings(server, **more))
            return await endpoint.complete(ASKED, temperature=0.5, max_tokens=7, seed=3), endpoint, server

    return asyncio.run(run())


def failing(fault: Fault, **more: Any) -> tuple[Endpoint, FakeServer]:
    """One request to a server with this fault and no other behaviour; it must end in an AskError."""

    async def run() -> tuple[Endpoint, FakeServer]:
        async with FakeServer(lambda body: "four", faults=[fault] * 9) as server:
            endpoint = Endpoint(settings(server, **more))
            with pytest.raises(AskError, match="did not answer after"):
                await endpoint.complete(ASKED, temperature=0, max_tokens=7)
            return endpoint, server

    return asyncio.run(run())


def test_a_request_and_what_it_comes_to(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KEY_OF_A_TEST", "k-123")
    text, endpoint, server = ask(
        [], api_key_env="KEY_OF_A_TEST", input_price=2.0, output_price=8.0, extra={"top_p": 0.9}, omit=["seed"]
    )
    assert text == "four"
    assert server.seen == [{"model": "m", "messages": ASKED, "temperature": 0.5, "max_tokens": 7, "top_p": 0.9}]
    assert server.headers[0]["authorization"] == "Bearer k-123"
    used = endpoint.usage
    assert (used.requests, used.replies, used.input_tokens, used.output_tokens) == (1, 1, 100, 1)
    assert used.cost == pytest.approx((100 * 2 + 1 * 8) / 1e6)
    assert "k-123" not in repr(endpoint)


@pytest.mark.parametrize(
    "fault", ["500", "429", "hang", "drip", "garbage", "not_json", "no_choices", "null", "deep", "close"]
)
def test_what_may_pass_is_tried_again(fault: Fault):
    text, endpoint, _ = ask([fault])
    assert text == "four"
    assert (endpoint.usage.requests, endpoint.usage.retries, endpoint.usage.failures) == (2, 1, 0)


@pytest.mark.parametrize("fault", ["500", "hang", "garbage", "deep"])
def test_what_does_not_pass_is_given_up(fault: Fault):
    endpoint, server = failing(fault, timeout_s=0.15)
    assert (endpoint.usage.requests, endpoint.usage.failures, endpoint.usage.replies) == (3, 1, 0)
    assert len(server.seen) == 3


@pytest.mark.parametrize("fault", ["huge", "redirect"])
def test_what_cannot_pass_is_not_tried_again(fault: Fault):
    endpoint, _ = failing(fault, timeout_s=5, max_body_bytes=100_000)
    assert (endpoint.usage.requests, endpoint.usage.failures) == (1, 1)


@pytest.mark.parametrize("fault", ["401", "404"])
def test_a_refusal_of_the_first_request_is_a_wrong_setting(fault: Fault):
    with pytest.raises(ConfigError, match=rf"answered {fault}.*api_key_env"):
        ask([fault])


def test_no_more_run_at_once_than_may():
    async def run() -> FakeServer:
        async with FakeServer(lambda body: "four", delay_s=0.02) as server:
            endpoint = Endpoint(settings(server, concurrency=3))
            await asyncio.gather(*(endpoint.complete(ASKED, temperature=0, max_tokens=7) for _ in range(10)))
            return server

    server = asyncio.run(run())
    assert (server.most, len(server.seen)) == (3, 10)


def test_a_budget_ends_asking():
    async def run() -> Endpoint:
        async with FakeServer(lambda body: "four") as server:
            endpoint = Endpoint(settings(server, input_price=10_000.0, max_cost=2.5))  # a reply costs 1
            for _ in range(3):
                await endpoint.complete(ASKED, temperature=0, max_tokens=7)
            with pytest.raises(BudgetSpent, match=r"max_cost is 2\.5"):
                await endpoint.complete(ASKED, temperature=0, max_tokens=7)
            return endpoint

    assert asyncio.run(run()).usage.requests == 3


@pytest.mark.parametrize(
    "usage",
    [None, {}, {"prompt_tokens": -1, "completion_tokens": 5}, {"prompt_tokens": 10**300, "completion_tokens": 1}],
)
def test_what_is_not_metered_is_estimated_so_that_a_budget_holds(usage: object):
    endpoint = Endpoint(EndpointConfig(base_url="http://127.0.0.1", model="m", input_price=1e6, output_price=1e6))
    endpoint._count(usage, 8, 401)
    assert (endpoint.usage.unmetered, endpoint.usage.input_tokens, endpoint.usage.output_tokens) == (1, 2, 101)
    assert endpoint.usage.cost == 103


def test_one_endpoint_serves_one_event_loop_after_another():
    async def once(endpoint: Endpoint | None, server: FakeServer) -> Endpoint:
        endpoint = endpoint or Endpoint(settings(server))
        await endpoint.complete(ASKED, temperature=0, max_tokens=7)
        return endpoint

    async def serve(endpoint: Endpoint | None) -> Endpoint:
        async with FakeServer(lambda body: "four") as server:
            if endpoint is not None:
                endpoint = Endpoint(settings(server), usage=endpoint.usage, _session=endpoint._session)
            return await once(endpoint, server)

    first = asyncio.run(serve(None))
    assert asyncio.run(serve(first)).usage.replies == 2


def test_a_reply_with_half_a_character_can_be_sent_on():
    async def run() -> str:
        async with FakeServer(lambda body: "a\ud800b") as server:
            return await Endpoint(settings(server)).complete(ASKED, temperature=0, max_tokens=7)

    assert asyncio.run(run()) == "a?b"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"base_url": "ftp://host"}, "http://"),
        ({"base_url": "host:80"}, "http://"),
        ({"base_url": "http://"}, "http://"),
        ({"base_url": "http://host:99999"}, "no address"),
        ({"base_url": "http://[::1"}, "no address"),
        ({"base_url": "http://me:secret@host"}, "password"),
        ({"base_url": "http://host?key=secret"}, "query"),
        ({"max_cost": 1.0}, "prices are 0"),
        ({"extra": {"messages": []}}, "'messages'"),
        ({"omit": ["model"]}, "'model'"),
        ({"extra": {"top_p": float("nan")}}, "JSON"),
    ],
)
def test_settings_that_cannot_work(fields: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said) as found:
        EndpointConfig.model_validate({"base_url": "http://host/v1", "model": "m", **fields})
    assert "secret" not in str(found.value) or "me:" not in str(found.value)


@pytest.mark.parametrize(
    "fields", [{"model": ""}, {"timeout_s": 0}, {"retries": -1}, {"concurrency": 0}, {"max_cost": -1}, {"modle": "m"}]
)
def test_settings_of_the_wrong_size(fields: dict[str, Any]):
    with pytest.raises(ValidationError):
        EndpointConfig.model_validate({"base_url": "http://host/v1", "model": "m", **fields})


@pytest.mark.parametrize("value", [None, "", "läuft", "two\nlines"])
def test_a_key_that_is_not_there_is_asked_for(value: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KEY_OF_A_TEST", raising=False)
    if value is not None:
        monkeypatch.setenv("KEY_OF_A_TEST", value)
    with pytest.raises(ConfigError, match="export KEY_OF_A_TEST"):
        ask([], api_key_env="KEY_OF_A_TEST")


def test_a_key_is_not_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv("KEY_OF_A_TEST", "k-very-secret")
    with caplog.at_level(logging.DEBUG):
        ask(["500"], api_key_env="KEY_OF_A_TEST")
    assert "k-very-secret" not in caplog.text
