"""Judges as a recipe names them, asked over a real server of this machine."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import ConfigError, UnknownName
from headwater.rewards.judge.build import spent
from headwater.rewards.judge.fake_server import FakeServer
from headwater.rewards.judge.synthetic import SyntheticJudge
from headwater.rewards.registry import RewardConfig, build_source
from headwater.types import Group, Span, Task, Trajectory

TEXTS = ("Claim 1 is sound. Claim 2 is sound.", "Claim 1 is sound. Claim 2 is shaky.", "Claim 1 is shaky.")
GROUP = Group(
    task=Task(id="t", prompt="q"),
    trajectories=tuple(
        Trajectory(task_id="t", spans=(Span(author="policy", tokens=(1,), text=text),)) for text in TEXTS
    ),
)
NAMES = ["judge", "judge_pairwise", "judge_listwise"]


def built(reward: str, url: str = "http://127.0.0.1:9/v1", **settings: Any):
    endpoint = {"base_url": url, "model": "m", "timeout_s": 2, "retries": 0, **settings.pop("endpoint", {})}
    return build_source(RewardConfig(name=reward, settings={"endpoint": endpoint, **settings}))


def judged(name: str, ask: SyntheticJudge, **settings: Any) -> tuple[list, Any]:
    async def run():
        async with FakeServer(ask) as server:
            source = built(name, server.base_url, **settings)
            return list(await source(GROUP)), source

    return asyncio.run(run())


@pytest.mark.parametrize("name", NAMES)
def test_a_judge_over_http(name: str, tmp_path: Path):
    signals, source = judged(name, SyntheticJudge(noise=0.0), cache=str(tmp_path))
    first, second, third = (signal.values[0] for signal in signals)
    assert first == 1.0 > second > third == 0.0
    assert {signal.source for signal in signals} == {name}
    account = spent(source.judge.ask)
    assert account["usage"]["replies"] == account["memory"]["missed"] == source.judge.tally.asked > 0


@pytest.mark.parametrize("name", NAMES)
def test_what_was_asked_once_costs_nothing_again(name: str, tmp_path: Path):
    before, _ = judged(name, SyntheticJudge(), cache=str(tmp_path))
    # another port is another endpoint, so ask where nobody is, under the name that was remembered
    files = list(tmp_path.glob("*/*.json"))
    url = files[0].read_text().split(" at ")[1].split('"')[0]
    source = built(name, url, cache=str(tmp_path))
    assert asyncio.run(source(GROUP)) == tuple(before)
    assert spent(source.judge.ask)["usage"]["requests"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_an_endpoint_that_is_down_gives_no_reward(name: str):
    signals = asyncio.run(built(name)(GROUP))
    assert [signal.status for signal in signals] == ["failed"] * 3
    assert all("did not answer" in signal.note for signal in signals)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("judge", {"samples": 0}, "at least 1"),
        ("judge", {"samples": 3}, "temperature 0"),
        ("judge", {"scale": [3, 3]}, "scale"),
        ("judge", {"rubric": ""}, "rubric is empty"),
        ("judge", {"scale": "high"}, "'scale"),
        ("judge", {"endpoint": {"retries": -1}}, r"'endpoint\.retries'"),
        ("judge", {"endpoint": {"mdoel": "x"}}, r"'endpoint\.mdoel'"),
        ("judge", {"endpoint": {"base_url": "host"}}, "http://"),
        ("judge_pairwise", {"opponents": 0}, "at least 1"),
        ("judge_pairwise", {"against": "reference", "opponents": 2}, "only opponent"),
        ("judge_pairwise", {"against": "everyone"}, "'against'"),
        ("judge_listwise", {"most": 1}, "from 2 to 100"),
    ],
)
def test_settings_that_cannot_work(name: str, settings: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        built(name, **settings)


def test_a_judge_needs_to_know_whom_to_ask():
    with pytest.raises(ConfigError, match="'endpoint'"):
        build_source(RewardConfig(name="judge"))


def test_a_setting_of_another_judge_is_unknown():
    with pytest.raises(UnknownName, match="opponents"):
        built("judge", opponents=2)


def test_two_judges_of_one_recipe_have_names():
    assert built("judge", name="kind").name == "kind"


def test_without_httpx_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "headwater.rewards.judge.endpoint", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'headwater\[judge\]'"):
        built("judge")
