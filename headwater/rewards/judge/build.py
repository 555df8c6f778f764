"""Judges from the settings of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from headwater.errors import ConfigError
from headwater.rewards.judge.ask import Ask, Remembered
from headwater.rewards.judge.config import EndpointConfig
from headwater.rewards.judge.panel import LLMJudge
from headwater.rewards.judge.prompts import HELPFUL, Secret
from headwater.rewards.judge.sources import Disagreement, Listwise, Pairwise, Pointwise
from headwater.types import Json


def judge(
    *,
    endpoint: EndpointConfig,
    name: str = "judge",
    rubric: str = HELPFUL,
    scale: tuple[int, int] = (1, 10),
    samples: int = 1,
    referenced: bool = False,
    temperature: float = 0.0,
    max_tokens: int = 1024,
    max_characters: int = 20_000,
    guard: bool = True,
    cache: str | None = None,
) -> Pointwise:
    """A language model's score of each answer, from 0 to 1; settings: endpoint, rubric, scale, samples, ...

    `endpoint` is an EndpointConfig; for the others see Pointwise and LLMJudge. `name` tells two judges of one
    recipe apart, and `cache` is the folder where replies are kept. Raises ConfigError for settings that
    cannot work together.
    """
    if samples < 1:
        raise ConfigError(f"The judge's samples is {samples}; wanted at least 1.")
    if samples > 1 and temperature == 0:
        raise ConfigError(
            f"The judge is to give {samples} samples at temperature 0, where all are the same. Set a temperature, "
            "such as 0.7, or one sample."
        )
    asks, secret = connect(endpoint, cache)
    made = LLMJudge(
        ask=asks,
        rubric=rubric,
        scale=scale,
        temperature=temperature,
        max_tokens=max_tokens,
        max_characters=max_characters,
        guard=guard,
        secret=secret,
    )
    return Pointwise(name=name, judge=made, samples=samples, referenced=referenced)


def judge_pairwise(
    *,
    endpoint: EndpointConfig,
    name: str = "judge_pairwise",
    rubric: str = HELPFUL,
    against: Literal["siblings", "reference"] = "siblings",
    opponents: int | None = None,
    disagreement: Disagreement = "tie",
    temperature: float = 0.0,
    max_tokens: int = 1024,
    max_characters: int = 20_000,
    guard: bool = True,
    cache: str | None = None,
) -> Pairwise:
    """The share of duels that an answer wins in both orders, with its siblings or a reference; settings: endpoint, ...

    For the settings see Pairwise, LLMJudge and EndpointConfig. Raises ConfigError for settings that cannot
    work together.
    """
    if opponents is not None and (opponents < 1 or against == "reference"):
        raise ConfigError(
            f"The judge's opponents is {opponents}; wanted at least 1, and none against a reference, which is the "
            "only opponent."
        )
    asks, secret = connect(endpoint, cache)
    made = LLMJudge(
        ask=asks,
        rubric=rubric,
        temperature=temperature,
        max_tokens=max_tokens,
        max_characters=max_characters,
        guard=guard,
        secret=secret,
    )
    return Pairwise(name=name, judge=made, against=against, disagreement=disagreement, opponents=opponents)


def judge_listwise(
    *,
    endpoint: EndpointConfig,
    name: str = "judge_listwise",
    rubric: str = HELPFUL,
    most: int = 10,
    temperature: float = 0.0,
    max_tokens: int = 1024,
    max_characters: int = 20_000,
    guard: bool = True,
    cache: str | None = None,
) -> Listwise:
    """An answer's place in a ranking of its siblings, from 0 (last) to 1 (first); settings: endpoint, rubric, most, ...

    For the settings see Listwise, LLMJudge and EndpointConfig. Raises ConfigError for settings that cannot
    work.
    """
    if not 2 <= most <= 100:
        raise ConfigError(f"The judge's most is {most}; wanted from 2 to 100 answers in one ranking.")
    asks, secret = connect(endpoint, cache)
    made = LLMJudge(
        ask=asks,
        rubric=rubric,
        temperature=temperature,
        max_tokens=max_tokens,
        max_characters=max_characters,
        guard=guard,
        secret=secret,
    )
    return Listwise(name=name, judge=made, most=most)


def connect(config: EndpointConfig, cache: str | None = None) -> tuple[Ask, Secret]:
    """Whom to ask, with a memory in the folder `cache` if there is one; and the secret that fences are drawn
    from, which is kept there too. Raises ConfigError where httpx is not installed or the folder cannot be
    written."""
    try:
        from headwater.rewards.judge.endpoint import Endpoint
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"A judge behind an endpoint needs the package '{error.name}', which is not installed. Run: "
            "pip install 'headwater[judge]'"
        ) from error
    return remember(Endpoint(config), cache)


def remember(ask: Ask, cache: str | None) -> tuple[Ask, Secret]:
    """The same, remembering in the folder `cache` what was said, and the secret of that folder."""
    if cache is None:
        return ask, Secret()
    folder = Path(cache).expanduser()
    return Remembered(ask=ask, folder=folder), Secret.kept(folder)


def spent(ask: Ask) -> Mapping[str, Json]:
    """What asking has come to: what an endpoint was asked and what it cost, and what a memory knew."""
    if isinstance(ask, Remembered):
        return {**spent(ask.ask), "memory": asdict(ask.memory)}
    usage = getattr(ask, "usage", None)
    return {} if usage is None else {"usage": asdict(usage)}
