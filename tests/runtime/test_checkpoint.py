from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from headwater.errors import CheckpointError
from headwater.runtime import checkpoint
from headwater.runtime.checkpoint import COMPLETE, Checkpoint, complete, newest, save, tidy


def _made(step: int, size: int = 3) -> Checkpoint:
    tensors = {"weight/a": torch.full((size,), float(step)), "exp_avg/a": torch.zeros(size)}
    return Checkpoint(step=step, tensors=tensors, state={"model": "fake"})


def test_what_is_saved_comes_back(tmp_path):
    save(tmp_path, _made(4), keep=2)
    found = newest(tmp_path, _made(0).tensors)
    assert found is not None
    assert (found.step, found.state) == (4, {"model": "fake"})
    torch.testing.assert_close(found.tensors["weight/a"], torch.full((3,), 4.0), rtol=0, atol=0)


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, _made(step), keep=2)
    assert [path.name for path in complete(tmp_path)] == ["step_000002", "step_000003"]


def test_without_its_marker_a_checkpoint_does_not_count(tmp_path):
    save(tmp_path, _made(1), keep=3)
    save(tmp_path, _made(2), keep=3)
    (tmp_path / "step_000002" / COMPLETE).unlink()
    found = newest(tmp_path, _made(0).tensors)
    assert found is not None and found.step == 1
    tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_a_checkpoint_of_another_model_is_refused_and_says_where_they_differ(tmp_path):
    save(tmp_path, _made(1), keep=1)
    with pytest.raises(CheckpointError, match=r"of another model: a is \(3,\) there and \(5,\) in this model"):
        newest(tmp_path, _made(1, size=5).tensors)


def test_a_full_disk_is_a_clear_error_and_older_checkpoints_stay(tmp_path, monkeypatch):
    save(tmp_path, _made(1), keep=1)

    def full(tensors, path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*Earlier checkpoints\s+are intact.*--resume"):
        save(tmp_path, _made(2), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_a_damaged_checkpoint_names_itself(tmp_path):
    path = save(tmp_path, _made(1), keep=1)
    (path / "tensors.safetensors").write_bytes(b"not tensors")
    with pytest.raises(CheckpointError, match=r"step_000001 cannot be read"):
        newest(tmp_path, _made(1).tensors)


def test_killed_while_writing_leaves_the_one_before(tmp_path):
    """A process writes checkpoints as fast as it can and is killed at an instant of no one's choosing."""
    program = textwrap.dedent(
        """
        import sys, torch
        from pathlib import Path
        from headwater.runtime.checkpoint import Checkpoint, save
        for step in range(1, 10_000):
            tensors = {"weight/a": torch.full((500_000,), float(step))}
            save(Path(sys.argv[1]), Checkpoint(step=step, tensors=tensors, state={}), keep=2)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], start_new_session=True)
    deadline = time.monotonic() + 120
    while len(complete(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    # wait until a write is under way, then kill in the middle of it
    while not list(tmp_path.glob("*.partial/*")) and time.monotonic() < deadline:
        time.sleep(0)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    found = newest(tmp_path, {"weight/a": torch.zeros(500_000)})
    assert found is not None
    assert bool((found.tensors["weight/a"] == found.step).all())
    assert json.loads((complete(tmp_path)[-1] / "state.json").read_text())["step"] == found.step
