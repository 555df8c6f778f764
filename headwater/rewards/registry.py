"""The rewards that a recipe can name, and what it may set of them."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator, validate_call

from headwater.errors import ConfigError, UnknownName
from headwater.rewards.calls import Cached, Guarded
from headwater.rewards.compose import GateConfig, PenaltyConfig, Shaped
from headwater.rewards.ensemble import Combine, Ensemble
from headwater.rewards.function import Function
from headwater.rewards.implicit import implicit
from headwater.rewards.judge.build import judge, judge_listwise, judge_pairwise
from headwater.rewards.reward_model import reward_model
from headwater.rewards.source import Source, Verifier
from headwater.rewards.verifiers.code import code
from headwater.rewards.verifiers.exact import exact
from headwater.rewards.verifiers.number import number
from headwater.rewards.verifiers.proof import coq


class RewardConfig(BaseModel):
    """One reward of a recipe. `name` is a known one or `package.module:function` for one's own;
    `weight` multiplies it in the sum of several, and 0 only records it.

    How it is called: `timeout_s`, `retries`, `concurrency` (see Guarded) and `cache`, a folder (see
    Cached). What becomes of what it says: `clip`, `penalties` and `gate`, in this order (see Shaped).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    weight: float = Field(default=1.0, allow_inf_nan=False)
    settings: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    retries: int = Field(default=0, ge=0)
    concurrency: int | None = Field(default=None, ge=1)
    cache: Path | None = None
    gate: GateConfig | None = None
    clip: tuple[float, float] | None = None
    penalties: tuple[PenaltyConfig, ...] = ()

    @model_validator(mode="after")
    def _clip_is_a_range(self) -> RewardConfig:
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ConfigError(f"The reward '{self.name}' has clip = {list(self.clip)}, wanted [lowest, highest].")
        return self


def ensemble(*, sources: list[RewardConfig], combine: Combine = "mean", coefficient: float = 1.0) -> Ensemble:
    """Several rewards as one; settings: sources, combine (mean, worst or uncertainty), coefficient.

    `sources` are sections like [[rewards]], without weights. `coefficient` is how much of the variance is
    subtracted (only with uncertainty). Raises ConfigError for fewer than two.
    """
    if len(sources) < 2:
        raise ConfigError(f"The reward 'ensemble' has {len(sources)} sources, wanted at least 2.")
    if any("weight" in each.model_fields_set for each in sources):
        raise ConfigError("The members of the reward 'ensemble' count alike and take no weight. Remove it.")
    if combine != "uncertainty" and coefficient != 1.0:
        raise ConfigError(f"The reward 'ensemble' has a coefficient, which has no effect on '{combine}'. Remove it.")
    return Ensemble(members=tuple(map(build_source, sources)), combine=combine, coefficient=coefficient)


_BUILDERS: Mapping[str, Callable[..., Source]] = {
    "code": code,
    "coq": coq,
    "ensemble": ensemble,
    "exact": exact,
    "implicit": implicit,
    "judge": judge,
    "judge_listwise": judge_listwise,
    "judge_pairwise": judge_pairwise,
    "number": number,
    "reward_model": reward_model,
}


def known_rewards() -> dict[str, str]:
    """The names that a recipe can use, each with the first sentence about it."""
    return {name: _first_line(builder) for name, builder in sorted(_BUILDERS.items())}


def build_source(config: RewardConfig) -> Source:
    """The source that a recipe asks for. Raises ConfigError, mostly UnknownName, if there is none
    such or it cannot be set so."""
    source = _source(config)
    if isinstance(source, Verifier) and (config.timeout_s or config.concurrency):
        raise ConfigError(
            f"The reward '{config.name}' is a plain function, which nothing can interrupt and which runs one call at "
            "a time, so timeout_s and concurrency have no effect. Remove them, or write an async function."
        )
    if config.timeout_s or config.retries or config.concurrency:
        source = Guarded(
            source=source, timeout_s=config.timeout_s, retries=config.retries, concurrency=config.concurrency
        )
    if config.cache is not None:
        identity = {"name": config.name, "settings": config.settings, "code": _code(config.name)}
        source = Cached(source=source, folder=config.cache.expanduser(), identity=identity)
    if config.gate is None and config.clip is None and not config.penalties:
        return source
    if "reward" not in source.offers:
        raise ConfigError(
            f"'{config.name}' gives no reward, so its gate, clip or penalties have no effect. Remove them."
        )
    gate = config.gate
    return Shaped(
        source=source,
        clip=config.clip,
        penalties=config.penalties,
        gate=None if gate is None else build_source(RewardConfig(name=gate.name, settings=gate.settings)),
        at_least=1.0 if gate is None else gate.at_least,
        otherwise=0.0 if gate is None else gate.otherwise,
    )


def _code(name: str) -> str:
    """What changes when a reward's own module does, so that a cache does not outlive it."""
    if ":" not in name:
        return ""
    file = getattr(_import_module(name), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def _source(config: RewardConfig) -> Source:
    if ":" in config.name:
        return _own(config)
    if config.name not in _BUILDERS:
        known = [*_BUILDERS, "package.module:function"]
        raise UnknownName("reward", config.name, known, "rewards")
    return _build(_BUILDERS[config.name], config)


def _own(config: RewardConfig) -> Source:
    """A reward of the user's: a source, a class of sources built with the settings, a function
    `(text, task, *, settings...)`, or an async function `(group, *, settings...)`."""
    found = _import(config.name)
    if isinstance(found, type):
        return _construct(found, config)
    if isinstance(found, Source):
        if config.settings:
            raise ConfigError(f"The reward '{config.name}' is a ready source and takes no settings.")
        return found
    name = config.name.rpartition(":")[2]
    waits = inspect.iscoroutinefunction(found)
    if not callable(found) or (waits and len(_positional(found)) != 1):
        raise ConfigError(
            f"The reward '{config.name}' is a {type(found).__name__}; wanted a plain function "
            "(text, task) -> number, an async function (group) -> one number for each trajectory, a Verifier, or a "
            "Source."
        )
    function: Callable[..., Any] = found
    _check_settings(function, config)
    if waits:
        alone = getattr(function, "compares", True) is False
        return Function(name=name, function=partial(function, **config.settings), compares=not alone)
    return Verifier(name=name, verdict=partial(function, **config.settings))


def _positional(function: Callable[..., object]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]


def _import(name: str) -> Any:
    attribute = name.partition(":")[2]
    module = _import_module(name)
    if not hasattr(module, attribute):
        known = [key for key in vars(module) if not key.startswith("_")]
        raise UnknownName("name", attribute, known, f"the module '{module.__name__}' of the reward '{name}'")
    return getattr(module, attribute)


def _import_module(name: str) -> ModuleType:
    try:
        with _current_folder_importable():
            return importlib.import_module(name.partition(":")[0])
    except (ImportError, ValueError, TypeError) as error:
        raise ConfigError(
            f"The reward '{name}' cannot be imported: {error}. Looked in the installed packages and the "
            f"current folder, '{os.getcwd()}'. Wanted package.module:function."
        ) from error


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    """Also imports from the current folder, last, so that nothing installed is hidden by it."""
    here = os.getcwd()
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _build(builder: Callable[..., object], config: RewardConfig) -> Source:
    _check_settings(builder, config)
    try:
        source = validate_call(builder)(**config.settings)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"The reward '{config.name}' cannot be built: setting '{place}': {first['msg']} (found {first['input']!r})."
        ) from error
    assert isinstance(source, Source)
    return source


def _construct(kind: type, config: RewardConfig) -> Source:
    try:
        source = kind(**config.settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"The class '{config.name}' cannot be built with the settings {config.settings}: {error}."
        ) from error
    if not isinstance(source, Source):
        raise ConfigError(
            f"The class '{config.name}' is not a Source: wanted name, offers, needs and an async __call__(group)."
        )
    return source


def _check_settings(function: Callable[..., object], config: RewardConfig) -> None:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for key in config.settings:
        if key not in known:
            raise UnknownName("setting", key, known, f"the reward '{config.name}'")


def _first_line(function: Callable[..., object]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]
