"""What a run leaves behind, written so that nothing is lost and nothing half-written is believed."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from headwater.config import Recipe, check_recipe
from headwater.errors import CheckpointError, ConfigError
from headwater.types import Group

PACKAGES = ("headwater", "torch", "transformers", "peft", "safetensors", "datasets", "numpy")
FIRST = ("recipe.json", "resolved.json", "environment.json")


class RunFolder:
    """The folder of one run.

    recipe.json      the recipe as given         resolved.json      with every default filled in
    metrics.jsonl    one line per step           environment.json   versions, machine, commit, seed
    trajectories/    what was sampled, judged    evaluations/       held-out answers
    checkpoints/     whole ones carry COMPLETE   refused/           batches of refused steps
    model/           the exported model          curves.png
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.plot = path / "curves.png"

    @classmethod
    def create(cls, path: Path, recipe: Recipe) -> RunFolder:
        """A new folder. Raises ConfigError when there is one already: no run is overwritten."""
        if path.exists() and not _empty(path):
            raise ConfigError(
                f"The run folder {path.absolute()} exists and is kept as it is. Continue that run with --resume, or "
                "give this one another name: run.name=NAME."
            )
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            # What was set is what can be read back: a default must not be refused as a setting without effect.
            _replace(path / "recipe.json", recipe.model_dump_json(indent=2, exclude_unset=True))
            _replace(path / "resolved.json", recipe.model_dump_json(indent=2))
            _replace(path / "environment.json", json.dumps(environment(recipe.run.seed), indent=2))
        except OSError as error:
            raise ConfigError(
                f"The run folder {path.absolute()} cannot be written: {error}. Set run.folder."
            ) from error
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of an earlier run. Raises ConfigError when there is none."""
        if not (path / "recipe.json").is_file():
            raise ConfigError(
                f"There is no run at {path.absolute()} (no recipe.json), so there is nothing to go on with or to open. "
                "Name the folder of a run, or start one: headwater train, without --resume."
            )
        return cls(path)

    def abandon(self) -> None:
        """Remove the folder of a run that failed before it began; one that holds anything more stays."""
        if {path.name for path in self.path.iterdir()} <= set(FIRST):
            shutil.rmtree(self.path)

    @property
    def recipe(self) -> Recipe:
        """The recipe that the run was started with."""
        path = self.path / "recipe.json"
        try:
            return check_recipe(json.loads(path.read_text(encoding="utf-8")), str(path))
        except ValueError as error:
            raise ConfigError(f"{path} is damaged: {error}. Restore it, or start the run anew.") from error

    def write(self, name: str, text: str) -> None:
        """Write a file whole or not at all. Raises CheckpointError when it cannot be written."""
        with _writing(self.path / name) as path:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a step to metrics.jsonl. Raises CheckpointError when it cannot be written."""
        with _writing(self.path / "metrics.jsonl") as path, path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    def metrics(self) -> list[dict[str, float]]:
        """All logged steps; a last line that was cut off by a crash is left out."""
        path = self.path / "metrics.jsonl"
        return list(_whole_lines(path)) if path.is_file() else []

    def rewind(self, step: int) -> None:
        """Forget what was written after `step`, which is about to happen again."""
        kept = [row for row in self.metrics() if row["step"] <= step]
        self.write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept))
        for kind in ("trajectories", "evaluations", "refused"):
            for path in (self.path / kind).glob("step_*"):
                if int(path.stem.removeprefix("step_").partition(".")[0]) > step:
                    path.unlink()

    def save_groups(self, step: int, groups: Sequence[Group]) -> Path:
        """What was sampled and judged in a step, one group per line."""
        return self._groups(f"trajectories/step_{step:06d}.jsonl", groups)

    def save_refused(self, step: int, groups: Sequence[Group]) -> Path:
        """The batch of a step that was refused, for inspection."""
        return self._groups(f"refused/step_{step:06d}.jsonl", groups)

    def _groups(self, name: str, groups: Sequence[Group]) -> Path:
        self.write(name, "".join(json.dumps(asdict(group), ensure_ascii=False) + "\n" for group in groups))
        return self.path / name


def _empty(path: Path) -> bool:
    """Whether nothing is there but what a run that was killed at birth had half written."""
    return path.is_dir() and all(inside.suffix == ".partial" for inside in path.iterdir())


def _replace(path: Path, text: str) -> None:
    """Half a surrogate pair, which JSON can carry and UTF-8 cannot, is written as JSON escapes it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(partial, path)


@contextmanager
def _writing(path: Path) -> Iterator[Path]:
    try:
        yield path
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written: {error}. What was written before is intact. Free some disk space, or see to "
            "the folder's permissions, and continue with --resume."
        ) from error


def _whole_lines(path: Path) -> Iterator[dict[str, float]]:
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            yield json.loads(line)
        except ValueError:
            continue  # empty, or cut off in the middle: never acknowledged, so never missed


def environment(seed: int) -> dict[str, Any]:
    """Versions, machine, commit and seed: what is needed to run it again."""
    return {
        "packages": {name: installed(name) for name in PACKAGES},
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "commit": _commit(),
        "seed": seed,
    }


def installed(package: str) -> str | None:
    """The version of a package, None when it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the current folder, marked when there are changes on top of it."""
    git = shutil.which("git")
    if git is None:
        return None
    found = subprocess.run([git, "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else None
