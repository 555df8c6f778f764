"""What a row of the table is, and how it is built with settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headwater.errors import ConfigError, UnknownName
from headwater.types import Algorithm

Setting = float | bool | str


class Settings(Mapping[str, Setting]):
    """A row's settings with types: a number, a switch, a choice."""

    def __init__(self, values: Mapping[str, Setting]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Setting:
        return self._values[key]

    def __iter__(self):
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def number(self, key: str) -> float:
        """A setting that is a number."""
        value = self._values[key]
        assert isinstance(value, (int, float)) and not isinstance(value, bool), f"{key} is a number"
        return float(value)

    def switch(self, key: str) -> bool:
        """A setting that is true or false."""
        value = self._values[key]
        assert isinstance(value, bool), f"{key} is true or false"
        return value

    def choice(self, key: str) -> str:
        """A setting that is one of several words."""
        value = self._values[key]
        assert isinstance(value, str), f"{key} is a word"
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row as a reader sees it.

    `formula` is the loss with its credit and what it is averaged over; `settings` are the defaults;
    `choices` the words that a setting may be; `idle` says, for a setting, which other one must be
    positive (or not "none") for it to have any effect.
    """

    name: str
    summary: str
    formula: str
    source: str
    build: Callable[[Settings], Algorithm]
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    idle: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def needs(self) -> frozenset[str]:
        """Signals that the row needs at its default settings."""
        return self.build(Settings(self.settings)).needs

    def make(self, given: Mapping[str, Setting]) -> Algorithm:
        """The algorithm with some settings changed.

        Raises UnknownName for a setting that does not exist, ConfigError for a value that cannot be meant
        and for a setting that has no effect beside the others.
        """
        values = dict(self.settings)
        for key, value in given.items():
            if key not in self.settings:
                if not self.settings:
                    raise ConfigError(f"algorithm.{key}: the row '{self.name}' has no settings. Remove it.")
                raise UnknownName("setting", key, self.settings, f"[algorithm] of '{self.name}'")
            values[key] = self._checked(key, value)
        for key in given:
            other = self.idle.get(key)
            if other is not None and values[other] in (0, False, "none"):
                raise ConfigError(
                    f"algorithm.{key} has no effect while algorithm.{other} = {values[other]!r}. Remove it, or set "
                    f"algorithm.{other}."
                )
        return self.build(Settings(values))

    def _checked(self, key: str, value: object) -> Setting:
        default = self.settings[key]
        if isinstance(default, bool):
            if isinstance(value, bool):
                return value
            raise ConfigError(f"algorithm.{key} is {value!r}; wanted true or false.")
        if isinstance(default, str):
            if isinstance(value, str) and value in self.choices[key]:
                return value
            raise ConfigError(f"algorithm.{key} is {value!r}; wanted one of {', '.join(self.choices[key])}.")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0 or not math.isfinite(value):
            raise ConfigError(f"algorithm.{key} is {value!r}; wanted a number of at least 0.")
        return float(value)
