"""Checkpoints that are whole or do not count.

A checkpoint is written into a folder whose name ends in `.partial`, flushed to disk, renamed, and
only then marked with an empty file COMPLETE. Killed at any instant, what is left is either a marked
checkpoint or something that the next run removes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwater.errors import CheckpointError
from headwater.types import Json

COMPLETE = "COMPLETE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a run needs to go on: the step it had finished, tensors, and small state."""

    step: int
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Json]


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write `checkpoint` under `folder` and remove all but the newest `keep`.

    Raises CheckpointError when it cannot be written (disk full, say); older checkpoints stay.
    """
    final = folder / f"step_{checkpoint.step:06d}"
    partial = final.with_name(final.name + ".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        save_file(
            {name: t.detach().cpu().contiguous() for name, t in checkpoint.tensors.items()},
            partial / "tensors.safetensors",
        )
        described = {
            "step": checkpoint.step,
            "shapes": _shapes(checkpoint.tensors),
            "state": dict(checkpoint.state),
        }
        (partial / "state.json").write_text(json.dumps(described))
        for file in partial.iterdir():
            _flush(file)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        (final / COMPLETE).touch()
        _flush(final / COMPLETE)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"The checkpoint of step {checkpoint.step} could not be written to {folder}: {error}. Earlier checkpoints "
            "are intact. Free some disk space (a checkpoint needs about 12 bytes per trained parameter) and "
            "continue with --resume."
        ) from error
    for old in complete(folder)[:-keep]:
        (old / COMPLETE).unlink()
        shutil.rmtree(old)
    return final


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(t.shape) for name, t in tensors.items() if name.startswith("weight/")}


def complete(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step_*") if (path / COMPLETE).is_file())


def tidy(folder: Path) -> None:
    """Remove what a killed run left half-written."""
    for path in folder.glob("step_*"):
        if path.is_dir() and not (path / COMPLETE).is_file():
            shutil.rmtree(path)


def newest(folder: Path, weights: Mapping[str, Tensor]) -> Checkpoint | None:
    """The newest whole checkpoint, checked against the shapes of `weights`; None when there is none.

    Raises CheckpointError when it was made by a model of other shapes or cannot be read.
    """
    found = complete(folder)
    if not found:
        return None
    path = found[-1]
    try:
        described = json.loads((path / "state.json").read_text())
        saved = {name: tuple(shape) for name, shape in described["shapes"].items()}
        tensors = None if saved != _wanted(weights) else load_file(path / "tensors.safetensors")
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"The checkpoint {path} cannot be read ({type(error).__name__}: {error}). Delete that folder to resume "
            "from the one before it."
        ) from error
    if tensors is None:
        raise CheckpointError(
            f"The checkpoint {path} is of another model: {_difference(saved, _wanted(weights))}. "
            "Resume with the model that the run began with, or start a new run."
        )
    return Checkpoint(step=described["step"], tensors=tensors, state=described["state"])


def _wanted(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in weights.items() if name.startswith("weight/")}


def _difference(saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> str:
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            short = name.removeprefix("weight/")
            return f"{short} is {saved.get(name, 'absent')} there and {wanted.get(name, 'absent')} in this model"
    return "shapes differ"
