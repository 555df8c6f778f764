"""The rewards that a recipe can name, and what it may set of them."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, validate_call

from headwater.errors import ConfigError, UnknownName
from headwater.rewards.reward_model import reward_model
from headwater.rewards.source import Source, Verifier
from headwater.rewards.verifiers.code import code
from headwater.rewards.verifiers.exact import exact
from headwater.rewards.verifiers.number import number

_BUILDERS: Mapping[str, Callable[..., Source]] = {
    "code": code,
    "exact": exact,
    "number": number,
    "reward_model": reward_model,
}


class RewardConfig(BaseModel):
    """One reward of a recipe. `name` is a known one or `package.module:function` for one's own;
    `weight` multiplies it in the sum of several, and 0 only records it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    weight: float = Field(default=1.0, allow_inf_nan=False)
    settings: dict[str, Any] = Field(default_factory=dict)


def known_rewards() -> dict[str, str]:
    """The names that a recipe can use, each with the first sentence about it."""
    return {name: _first_line(builder) for name, builder in sorted(_BUILDERS.items())}


def build_source(config: RewardConfig) -> Source:
    """The source that a recipe asks for. Raises ConfigError, mostly UnknownName, if there is none
    such or it cannot be set so."""
    if ":" in config.name:
        return _own(config)
    if config.name not in _BUILDERS:
        known = [*_BUILDERS, "package.module:function"]
        raise UnknownName("reward", config.name, known, "rewards")
    return _build(_BUILDERS[config.name], config)


def _own(config: RewardConfig) -> Source:
    """A reward of the user's: a source, a class of sources built with the settings, or a function
    `(text, task, *, settings...)`."""
    found = _import(config.name)
    if isinstance(found, type):
        return _construct(found, config)
    if isinstance(found, Source):
        if config.settings:
            raise ConfigError(f"The reward '{config.name}' is a ready source and takes no settings.")
        return found
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise ConfigError(
            f"The reward '{config.name}' is a {type(found).__name__}; wanted a plain function "
            "(text, task) -> number, a Verifier, or a Source."
        )
    function: Callable[..., Any] = found
    _check_settings(function, config)
    name = config.name.rpartition(":")[2]
    return Verifier(name=name, verdict=partial(function, **config.settings))


def _import(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    try:
        with _current_folder_importable():
            module = importlib.import_module(module_name)
    except (ImportError, ValueError, TypeError) as error:
        raise ConfigError(
            f"The reward '{name}' cannot be imported: {error}. Looked in the installed packages and the "
            f"current folder, '{os.getcwd()}'. Wanted package.module:function."
        ) from error
    if not hasattr(module, attribute):
        known = [key for key in vars(module) if not key.startswith("_")]
        raise UnknownName("name", attribute, known, f"the module '{module_name}' of the reward '{name}'")
    return getattr(module, attribute)


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
