import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headwater.errors import ConfigError, UnknownName
from headwater.rewards.registry import RewardConfig, build_source, known_rewards
from headwater.rewards.sandbox.pool import working_isolation
from headwater.types import Group, Span, Task, Trajectory

NEEDS_SETTINGS = {"reward_model", "judge", "judge_pairwise", "judge_listwise", "implicit", "ensemble"}
OWN = """
from headwater.rewards.source import verifier
from headwater.types import Signal

def brevity(text, task, *, target=10):
    return -abs(len(text) - target)

@verifier
def ready(text, task):
    return 1.0

async def late(text, task):
    return 1.0

async def ranked(group, *, scale=1):
    lengths = [len(t.text) for t in group.trajectories]
    return [scale * sum(other < own for other in lengths) for own in lengths]

class Judge:
    offers = frozenset({"reward"})
    needs = frozenset()

    def __init__(self, value=1.0):
        self.name, self.value = "judge", float(value)

    async def __call__(self, group):
        return [Signal(source=self.name, name="reward", values=(self.value,)) for _ in group.trajectories]

class Nothing:
    pass

limit = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a module of rewards in the current folder."""
    name = f"own_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return name


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "code": ("def four(): return 4", {"tests": [{"fn": "four", "expected": 4}]}),
    "coq": ("reflexivity.", {"statement": "Theorem four : 2 + 2 = 4."}),
}
"""For what does not read the answer "4": a text that is right, and the meta of its task."""


def reward(name: str, text: str | None = None, **settings: object) -> float:
    if name in ("code", "coq") and not isolated():
        pytest.skip("programs cannot be isolated on this machine")
    if name == "coq" and shutil.which("coqc") is None:
        pytest.skip("coqc is not installed: apt install coq")
    source = build_source(RewardConfig(name=name, settings=settings))
    right, meta = CASES.get(name, ("4", {}))
    span = Span(author="policy", tokens=(1,), text=right if text is None else text)
    trajectory = Trajectory(task_id="t", spans=(span,))
    group = Group(task=Task(id="t", prompt="?", answer="4", meta=meta), trajectories=(trajectory,))
    (signal,) = asyncio.run(source(group))
    return signal.values[0]


def isolated() -> bool:
    try:
        working_isolation()
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", sorted(set(known_rewards()) - NEEDS_SETTINGS))
def test_every_known_reward_can_be_built_and_is_described(name: str):
    assert reward(name) == 1.0
    assert build_source(RewardConfig(name=name)).name == name
    assert len(known_rewards()[name]) > 20


def test_settings_reach_the_reward():
    assert reward("number", "4.001") == 0.0
    assert reward("number", "4.001", tolerance=0.01) == 1.0


def test_an_unknown_reward_gets_a_suggestion():
    with pytest.raises(UnknownName, match="Did you mean 'number'"):
        build_source(RewardConfig(name="nunber"))


def test_an_unknown_setting_gets_a_suggestion():
    with pytest.raises(UnknownName, match="Did you mean 'tolerance'"):
        build_source(RewardConfig(name="number", settings={"tolerence": 0.1}))


def test_a_setting_of_the_wrong_type_is_named():
    with pytest.raises(ConfigError, match=r"'number'.*'tolerance'.*'much'"):
        build_source(RewardConfig(name="number", settings={"tolerance": "much"}))


def test_a_setting_out_of_range_is_refused():
    with pytest.raises(ConfigError, match="from 0 to below 1"):
        build_source(RewardConfig(name="number", settings={"tolerance": 2}))


@pytest.mark.parametrize("fields", [{}, {"name": "number", "wieght": 1}, {"name": "number", "weight": float("nan")}])
def test_a_malformed_config_is_refused(fields: dict[str, object]):
    with pytest.raises(ValidationError):
        RewardConfig.model_validate(fields)


def test_own_function(own: str):
    assert reward(f"{own}:brevity", "abc") == -7.0
    assert reward(f"{own}:brevity", "abc", target=3) == 0.0
    assert build_source(RewardConfig(name=f"{own}:brevity")).name == "brevity"


def test_own_function_with_an_unknown_setting(own: str):
    with pytest.raises(UnknownName, match="Did you mean 'target'"):
        reward(f"{own}:brevity", targte=3)


def test_own_async_function(own: str):
    assert reward(f"{own}:ranked") == 0.0
    assert build_source(RewardConfig(name=f"{own}:ranked")).name == "ranked"
    with pytest.raises(UnknownName, match="Did you mean 'scale'"):
        reward(f"{own}:ranked", scle=3)


def test_own_ready_source(own: str):
    assert reward(f"{own}:ready") == 1.0
    with pytest.raises(ConfigError, match="takes no settings"):
        reward(f"{own}:ready", target=3)


def test_own_class(own: str):
    assert reward(f"{own}:Judge", value=0.25) == 0.25
    with pytest.raises(ConfigError, match="cannot be built"):
        reward(f"{own}:Judge", valeu=1)


@pytest.mark.parametrize("name", ["late", "limit", "Nothing"])
def test_own_thing_that_is_no_reward(own: str, name: str):
    with pytest.raises(ConfigError, match=r"wanted"):
        reward(f"{own}:{name}")


def test_own_name_that_is_not_in_the_module(own: str):
    with pytest.raises(UnknownName, match="Did you mean 'brevity'"):
        reward(f"{own}:brevty")


@pytest.mark.parametrize("name", ["no_such_package.module:function", ":function", "..relative:function"])
def test_own_module_that_cannot_be_imported(name: str):
    with pytest.raises(ConfigError, match="cannot be imported"):
        build_source(RewardConfig(name=name))
