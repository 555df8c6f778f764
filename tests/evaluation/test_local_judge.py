import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.evaluation.local_judge import LocalJudge, LocalModel, local_model
from headwater.rewards.judge.ask import Ask, AskError
from headwater.rewards.registry import RewardConfig, build_source
from headwater.types import Group, Message, Span, Task, Trajectory

NAME = "headwater.evaluation.local_judge:LocalJudge"


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return local_model("fake:llama")


def say(model: LocalModel, *texts: str, temperature: float = 1.0, max_tokens: int = 8, seed: int = 0) -> Sequence[str]:
    async def run() -> Sequence[str]:
        return await asyncio.gather(
            *(
                model.complete(
                    [Message(role="user", content=text)], temperature=temperature, max_tokens=max_tokens, seed=seed
                )
                for text in texts
            )
        )

    return asyncio.run(run())


def test_a_model_of_here_can_be_asked(model: LocalModel):
    assert isinstance(model, Ask)
    assert say(model, "2 + 2?", "3 + 3?") == say(model, "2 + 2?", "3 + 3?")
    assert say(model, "2 + 2?", seed=1) != say(model, "2 + 2?", seed=2)
    assert say(model, "2 + 2?", temperature=0, seed=1) == say(model, "2 + 2?", temperature=0, seed=2)


def test_what_is_too_long_is_not_answered(model: LocalModel):
    assert model.longest is not None
    with pytest.raises(AskError, match="attends to"):
        say(model, "a" * model.longest)


@pytest.mark.parametrize("mode", ["pointwise", "pairwise", "listwise"])
def test_a_recipe_can_name_it(mode: str, tmp_path: Path):
    """A random model gives no verdicts, so nothing is a reward."""
    settings = {"model": "fake:llama", "mode": mode, "max_tokens": 4, "scale": [0, 5], "cache": str(tmp_path)}
    source = build_source(RewardConfig(name=NAME, settings=settings))
    assert isinstance(source, LocalJudge)
    spans = [(Span(author="policy", tokens=(1,), text=text),) for text in ("a", "b")]
    group = Group(task=Task(id="t", prompt="q"), trajectories=tuple(Trajectory(task_id="t", spans=s) for s in spans))
    assert [signal.status for signal in asyncio.run(source(group))] == ["failed", "failed"]
    assert source.judge.tally.asked == source.judge.tally.unparsed + source.judge.tally.unanswered == 2


def test_settings_that_cannot_work():
    with pytest.raises(ConfigError, match="mode"):
        LocalJudge(model="fake:llama", mode="lengthwise")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="modle"):
        build_source(RewardConfig(name=NAME, settings={"modle": "fake:llama"}))
