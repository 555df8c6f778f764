"""What a run leaves behind, written so that nothing is lost and nothing half-written is believed."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from headwater.config import Recipe, check_recipe
from headwater.errors import ConfigError
from headwater.types import Group

PACKAGES = ("headwater", "torch", "transformers", "peft", "safetensors", "datasets", "numpy")


class RunFolder:
    """The folder of one run.

    recipe.json           the resolved recipe       environment.json   versions, machine, commit, seed
    metrics.jsonl         one line per step         trajectories/      what was sampled and judged
    evaluations/          held-out answers          checkpoints/       whole ones carry COMPLETE
    refused/              batches of refused steps  model/             the exported model
    curves.png
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.plot = path / "curves.png"

    @classmethod
    def create(cls, path: Path, recipe: Recipe) -> RunFolder:
        """A new folder. Raises ConfigError when there is one already: no run is overwritten."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(
                f"The run folder {path.absolute()} exists and is kept as it is. Continue that run with --resume, or "
                "give this one another name: run.name=NAME."
            )
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            # only what was set: a default of today must not be refused as a setting tomorrow
            folder.write("recipe.json", recipe.model_dump_json(indent=2, exclude_unset=True))
            folder.write("environment.json", json.dumps(environment(recipe.run.seed), indent=2))
        except OSError as error:
            raise ConfigError(
                f"The run folder {path.absolute()} cannot be written: {error}. Set run.folder."
            ) from error
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of an earlier run. Raises ConfigError when there is none."""
        if not (path / "recipe.json").is_file():
            raise ConfigError(f"There is no run at {path.absolute()} (no recipe.json). Name the folder of a run.")
        return cls(path)

    @property
    def recipe(self) -> Recipe:
        """The recipe that the run was started with."""
        path = self.path / "recipe.json"
        try:
            return check_recipe(json.loads(path.read_text()), str(path))
        except ValueError as error:
            raise ConfigError(f"{path} is damaged: {error}. Restore it, or start the run anew.") from error

    def write(self, name: str, text: str) -> None:
        """Write a file whole or not at all."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a step to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
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
