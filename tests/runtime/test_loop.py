"""The whole line, on policies that learn in a second."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from headwater.config import Recipe, check_recipe
from headwater.runtime import checkpoint
from headwater.runtime.checkpoint import complete
from headwater.runtime.folder import RunFolder
from headwater.runtime.loop import train


def even_digits(text, task):
    """The share of the answer's characters that are even digits: a reward that a table can learn."""
    return sum(c in "02468" for c in text) / max(1, len(text)) if text else 0.0


def _recipe(tmp_path, **sections) -> Recipe:
    content = {
        "run": {"name": "run", "folder": str(tmp_path), "steps": 12, "checkpoint_every": 4, "seed": 3},
        "model": {"name": "fake:tabular"},
        "tasks": {"source": "sums", "count": 40, "settings": {"digits": 1}},
        "rewards": [{"name": f"{__name__}:even_digits"}],
        "algorithm": {"name": "grpo"},
        "sampling": {"max_tokens": 6},
        "batch": {"prompts": 4, "siblings": 8},
        "optimizer": {"lr": 0.3},
    }
    for section, values in sections.items():
        content[section] = content.get(section, {}) | values if isinstance(values, dict) else values
    return check_recipe(content, "test")


def _train(recipe, resume=False, **keywords):
    folder = RunFolder.open(recipe.run.path) if resume else RunFolder.create(recipe.run.path, recipe)
    return folder, train(recipe, folder, resume=resume, **keywords)


def _weights(folder):
    from safetensors.torch import load_file

    return load_file(complete(folder.checkpoints)[-1] / "tensors.safetensors")


def _same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    """Rewards of this file are named `module:function` in recipes, as a user's own would be."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules[even_digits.__module__])


def test_at_lag_0_a_run_repeats_bit_for_bit(tmp_path):
    folders = [
        _train(_recipe(tmp_path / name, model={"name": "fake:llama"}, optimizer={"lr": 1e-3}))[0] for name in "ab"
    ]
    _same(_weights(folders[0]), _weights(folders[1]))
    other, _ = _train(_recipe(tmp_path / "c", model={"name": "fake:llama"}, optimizer={"lr": 1e-3}, run={"seed": 4}))
    assert any(not torch.equal(t, _weights(other)[n]) for n, t in _weights(folders[0]).items())


class _Stop(Exception):
    pass


class _StopsAt:
    """A reporter that breaks the run once a step is done, as a crash would."""

    def __init__(self, step):
        self.at = step

    def start(self, recipe, first):
        pass

    def step(self, step, metrics):
        if step == self.at:
            raise _Stop

    def note(self, text, level):
        pass

    def finish(self):
        pass


MODELS = [
    {"name": "fake:tabular"},
    {"name": "fake:llama"},
    {"name": "fake:llama", "lora": {"rank": 4}},
    {"name": "fake:llama", "dtype": "bfloat16"},
]


@pytest.mark.parametrize("model", MODELS, ids=["table", "llama", "lora", "bfloat16"])
@pytest.mark.parametrize("stop", [1, 7, 12])
def test_stopped_anywhere_and_resumed_it_reaches_the_same_weights(tmp_path, model, stop):
    settings = {"model": model, "optimizer": {"lr": 1e-2, "schedule": "cosine", "warmup": 2}}
    straight, _ = _train(_recipe(tmp_path / "straight", **settings))
    recipe = _recipe(tmp_path / "stopped", **settings)
    with pytest.raises(_Stop):
        _train(recipe, reporters=[_StopsAt(stop)])
    resumed, _ = _train(recipe, resume=True)
    _same(_weights(straight), _weights(resumed))
    steps = [row["step"] for row in resumed.metrics()]
    assert steps == list(range(1, 13)), "every step is logged once"


def _is_writing(checkpoints):
    """Whether a checkpoint has begun. It may be made whole, and so renamed, at any moment while this looks."""
    for folder in os.listdir(checkpoints):
        if folder.endswith(".partial"):
            try:
                return bool(os.listdir(checkpoints / folder))
            except FileNotFoundError:
                return False
    return False


def test_killed_while_a_checkpoint_is_written_it_resumes_to_the_same_weights(tmp_path):
    """kill -9 in the middle of a write, in another process, at an instant of no one's choosing."""
    settings = {"run": {"checkpoint_every": 1, "steps": 40}, "model": {"name": "fake:llama"}, "optimizer": {"lr": 1e-3}}
    settings["rewards"] = [{"name": "number"}]
    straight, _ = _train(_recipe(tmp_path / "straight", **settings))
    recipe = _recipe(tmp_path / "killed", **settings)
    (tmp_path / "recipe.json").write_text(recipe.model_dump_json(exclude_unset=True))
    program = textwrap.dedent(
        """
        import json, sys
        from headwater.config import check_recipe
        from headwater.runtime.folder import RunFolder
        from headwater.runtime.loop import train
        recipe = check_recipe(json.load(open(sys.argv[1])), "test")
        train(recipe, RunFolder.create(recipe.run.path, recipe))
        """
    )
    folder, deadline = recipe.run.path / "checkpoints", time.monotonic() + 120
    command = [sys.executable, "-c", program, str(tmp_path / "recipe.json")]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            while len(complete(folder)) < 2 and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            while not _is_writing(folder) and process.poll() is None and time.monotonic() < deadline:
                pass
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "it was killed before its end"
    resumed, _ = _train(recipe, resume=True)
    _same(_weights(straight), _weights(resumed))


def test_running_ahead_learns_too_and_stays_within_its_lag(tmp_path):
    recipe = _recipe(tmp_path, run={"max_lag": 2, "steps": 50, "checkpoint_every": 0})
    folder, _ = _train(recipe)
    rows = folder.metrics()
    assert max(row["lag"] for row in rows) <= 2
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.4


def test_at_lag_0_every_batch_is_of_the_newest_weights(tmp_path):
    folder, _ = _train(_recipe(tmp_path))
    assert {row["lag"] for row in folder.metrics()} == {0}
    assert max(row["mismatch"] for row in folder.metrics()) < 1e-5


class _Notes(_StopsAt):
    def __init__(self):
        super().__init__(-1)
        self.notes = []

    def note(self, text, level):
        self.notes.append((level, text))


def test_all_flat_is_said_with_its_cause(tmp_path):
    notes = _Notes()
    _train(_recipe(tmp_path, rewards=[{"name": "number"}], run={"steps": 2}), reporters=[notes])
    assert any(level == "warning" and "All groups are flat" in text for level, text in notes.notes)


def test_refused_steps_keep_their_batch_and_end_the_run_when_they_repeat(tmp_path, monkeypatch):
    from headwater.errors import NonFiniteError
    from headwater.models.fakes import TabularPolicy

    head = TabularPolicy.head_VD.fget
    monkeypatch.setattr(
        TabularPolicy, "head_VD", property(lambda self: head(self) * (float("nan") if torch.is_grad_enabled() else 1.0))
    )
    notes = _Notes()
    recipe = _recipe(tmp_path)
    with pytest.raises(NonFiniteError, match=r"3rd refusal in a row"):
        _train(recipe, reporters=[notes])
    kept = sorted(path.name for path in (recipe.run.path / "refused").iterdir())
    assert kept == ["step_000001.jsonl", "step_000002.jsonl", "step_000003.jsonl"]
    assert sum("refused" in text for _, text in notes.notes) >= 2


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    from headwater.errors import CheckpointError

    recipe = _recipe(tmp_path)
    _train(recipe)
    other = _recipe(tmp_path, model={"name": "fake:llama"}, run={"steps": 13})
    with pytest.raises(CheckpointError, match="another model"):
        _train(other, resume=True)


def test_a_full_disk_ends_the_run_and_the_run_can_go_on(tmp_path, monkeypatch):
    from headwater.errors import CheckpointError

    recipe = _recipe(tmp_path / "full")
    real = checkpoint.save_file

    def full(tensors, path):
        if "000008" in str(path):
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        _train(recipe)
    monkeypatch.setattr(checkpoint, "save_file", real)
    resumed, _ = _train(recipe, resume=True)
    straight, _ = _train(_recipe(tmp_path / "straight"))
    _same(_weights(straight), _weights(resumed))


def test_before_and_after(tmp_path):
    held_out = {"tasks": {"source": "sums", "count": 6, "settings": {"digits": 1, "part": "held_out"}}}
    folder, result = _train(_recipe(tmp_path, evaluation=held_out, run={"evaluate_every": 6, "steps": 12}))
    assert result.before is not None and result.after is not None
    assert result.after.accuracy > result.before.accuracy
    assert [row["step"] for row in folder.metrics() if "held_out" in row] == [0, 6, 12]
    assert folder.plot.read_bytes()[:4] == b"\x89PNG"
    assert (folder.model / "table.safetensors").is_file()


def half_said(text, task):
    """Abstains on what is short."""
    return None if len(text) < 2 else 0.5


def test_a_run_with_composed_rewards_logs_each_and_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shaped = {
        "name": f"{__name__}:even_digits",
        "cache": str(tmp_path / "kept"),
        "clip": [0.0, 1.0],
        "penalties": [{"kind": "length", "free": 3, "most": 6, "weight": 0.25}],
        "gate": {"name": f"{__name__}:even_digits", "at_least": 0.1, "otherwise": -0.5},
    }
    rewards = [shaped, {"name": f"{__name__}:half_said", "weight": 0.0}]
    folder, _ = _train(_recipe(tmp_path, rewards=rewards))
    rows = [row for row in folder.metrics() if row["step"]]
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.1
    for row in rows:
        assert row["reward/even_digits"] == pytest.approx(row["reward"])
        assert row["unjudged"] == row["unjudged/even_digits"] == 0.0
        assert row.get("reward/half_said", 0.5) == 0.5
    assert any(row["unjudged/half_said"] > 0 for row in rows)
    assert list((tmp_path / "kept").rglob("*.json"))
