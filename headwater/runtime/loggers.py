"""Who is told about a run: the terminal, and trackers that are optional."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from headwater.config import Recipe
from headwater.errors import ConfigError

Level = Literal["info", "warning"]


class Reporter(Protocol):
    """Told about a run while it goes on. Never changes it."""

    def start(self, recipe: Recipe, first: int) -> None:
        """The run begins, at step `first` when it is resumed."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done (0: before training)."""
        ...

    def note(self, text: str, level: Level) -> None:
        """Something a person should read."""
        ...

    def finish(self) -> None:
        """The run is over, or broken off, perhaps before it started. May be called again."""
        ...


def _needs(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"run.loggers names '{extra}', whose package is not installed. Run: pip install 'headwater[{extra}]', or "
            "remove it from run.loggers."
        ) from error


class TensorBoard:
    """Scalars as TensorBoard events in the run folder's `tensorboard/`."""

    def __init__(self, folder: Path) -> None:
        self._module, self._folder = _needs("torch.utils.tensorboard", "tensorboard"), folder / "tensorboard"
        self._writer: Any = None

    def start(self, recipe: Recipe, first: int) -> None:
        """Record the recipe as text. When resumed, events of steps that will be taken again are hidden."""
        self._writer = self._module.SummaryWriter(str(self._folder), purge_step=first + 1 if first else None)
        self._writer.add_text("recipe", f"```json\n{recipe.model_dump_json(indent=2)}\n```", first)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def note(self, text: str, level: Level) -> None:
        """Notes are for the terminal."""

    def finish(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()


class Tracker:
    """Weights & Biases, or trackio, which speaks the same interface."""

    def __init__(self, kind: Literal["wandb", "trackio"]) -> None:
        self._module, self._open = _needs(kind, kind), False

    def start(self, recipe: Recipe, first: int) -> None:
        """Open a run of the same name. Mode, entity and offline use are set by the tracker's own
        environment variables."""
        config, again = recipe.model_dump(mode="json"), "allow" if first else "never"
        self._module.init(project="headwater", name=recipe.run.name, config=config, resume=again)
        self._open = True

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One record per step."""
        self._module.log(dict(metrics), step=step)

    def note(self, text: str, level: Level) -> None:
        """Notes are for the terminal."""

    def finish(self) -> None:
        """Close the run."""
        if self._open:
            self._open = False
            self._module.finish()


def trackers(recipe: Recipe, folder: Path) -> list[Reporter]:
    """The loggers that the recipe names. Raises ConfigError when a package is missing."""
    return [TensorBoard(folder) if name == "tensorboard" else Tracker(name) for name in recipe.run.loggers]
