"""Every error that Headwater raises on purpose.

    HeadwaterError
    ├── ConfigError          the user asked for something impossible; raised before anything is spent
    │   └── UnknownName      a key or name that does not exist, with the nearest that does
    ├── DataError            a data file or row is not what it must be (carries file and line)
    ├── ModelError           a model, tokenizer or chat template cannot serve as asked
    ├── CheckpointError      a checkpoint is incomplete, foreign or could not be written
    ├── WorldError           an environment or tool broke; its episode ends with stop="error"
    └── NonFiniteError       a loss or gradient was NaN or infinite; the step was refused

A message says what was found, what was wanted, where, and what to do next. Errors of our own
invariants are plain `assert`s: no user can cause them.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class HeadwaterError(Exception):
    """Base of every deliberate error: its text is meant for a person, without a traceback."""


class ConfigError(HeadwaterError):
    """A setting, or a combination of settings, that cannot work."""


class DataError(HeadwaterError):
    """A data source that cannot be read, or a row in it that is malformed."""


class ModelError(HeadwaterError):
    """A model, tokenizer or chat template that cannot do what was asked of it."""


class CheckpointError(HeadwaterError):
    """A checkpoint that is incomplete, belongs to another model, or could not be written."""


class WorldError(HeadwaterError):
    """An environment or tool broke. The episode becomes data with stop="error"; the run goes on."""


class NonFiniteError(HeadwaterError):
    """A NaN or infinite loss or gradient. The step was not taken."""


class UnknownName(ConfigError):
    """A name that is not in a registry or schema; the message suggests the nearest that is."""

    def __init__(self, kind: str, found: str, known: Iterable[str], where: str = "") -> None:
        self.found, self.known = found, sorted(known)
        near = get_close_matches(found, self.known, n=1, cutoff=0.5)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        place = f" in {where}" if where else ""
        super().__init__(f"Unknown {kind} '{found}'{place}.{hint} Known: {', '.join(self.known)}.")
