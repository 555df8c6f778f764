"""Who is told about a run: the terminal, and trackers that are optional."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Literal, Protocol

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
        """The run is over."""
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
        module = _needs("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"))

    def start(self, recipe: Recipe, first: int) -> None:
        """Record the recipe as text."""
        self._writer.add_text("recipe", f"```json\n{recipe.model_dump_json(indent=2)}\n```", first)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def note(self, text: str, level: Level) -> None:
        """Notes are for the terminal."""

    def finish(self) -> None:
        """Flush and close."""
        self._writer.close()


class Tracker:
    """Weights & Biases, or trackio, which speaks the same interface."""

    def __init__(self, kind: Literal["wandb", "trackio"]) -> None:
        self._module, self._kind = _needs(kind, kind), kind

    def start(self, recipe: Recipe, first: int) -> None:
        """Open a run of the same name. Mode, entity and offline use are set by the tracker's own
        environment variables."""
        self._module.init(project="headwater", name=recipe.run.name, config=recipe.model_dump(mode="json"))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One record per step."""
        self._module.log(dict(metrics), step=step)

    def note(self, text: str, level: Level) -> None:
        """Notes are for the terminal."""

    def finish(self) -> None:
        """Close the run."""
        self._module.finish()


def trackers(recipe: Recipe, folder: Path) -> list[Reporter]:
    """The loggers that the recipe names. Raises ConfigError when a package is missing."""
    return [TensorBoard(folder) if name == "tensorboard" else Tracker(name) for name in recipe.run.loggers]
