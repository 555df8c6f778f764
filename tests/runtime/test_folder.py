from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from headwater.config import Recipe, check_recipe
from headwater.errors import CheckpointError, ConfigError
from headwater.runtime.folder import RunFolder
from headwater.types import Group, Signal, Span, Task, Trajectory


def _recipe(**run) -> Recipe:
    content = {"run": run, "tasks": {"source": "sums"}, "rewards": [{"name": "number"}], "algorithm": {"kl": 0.1}}
    return check_recipe(content, "a recipe")


def _group(text="4", reward=1.0) -> Group:
    task = Task(id="a", prompt=({"role": "user", "content": "2+2"},), answer="4", meta={"level": 1})
    spans = (
        Span(author="prompt", tokens=(1, 2), text="2+2"),
        Span(author="policy", tokens=(3,), text=text, logps=(-0.5,), version=7),
    )
    signals = (Signal(source="number", name="reward", values=(reward,)),)
    return Group(task=task, trajectories=(Trajectory(task_id="a", spans=spans, signals=signals),))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", _recipe())


def test_a_new_folder_holds_the_recipe_and_where_it_ran(tmp_path):
    recipe = _recipe(seed=5, steps=3)
    folder = RunFolder.create(tmp_path / "deep" / "run", recipe)
    assert RunFolder.open(folder.path).recipe == recipe
    resolved = json.loads((folder.path / "resolved.json").read_text())
    assert (resolved["run"]["steps"], resolved["optimizer"]["clip"], resolved["algorithm"]["kl"]) == (3, 1.0, 0.1)
    environment = json.loads((folder.path / "environment.json").read_text())
    assert environment["seed"] == 5
    assert environment["python"] == sys.version.split()[0]
    assert environment["packages"]["torch"] and environment["packages"]["headwater"]
    assert not list(folder.path.rglob("*.partial"))


def test_a_run_is_never_overwritten(folder):
    folder.log(1, {"reward": 0.5})
    with pytest.raises(ConfigError, match=r"exists and is kept.*--resume.*run\.name=NAME"):
        RunFolder.create(folder.path, _recipe())
    assert folder.metrics() == [{"step": 1, "reward": 0.5}]


def test_a_file_in_the_way_is_not_a_run(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is kept"):
        RunFolder.create(tmp_path / "run", _recipe())
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written.*Set run\.folder"):
        RunFolder.create(tmp_path / "file" / "run", _recipe())


def test_an_empty_folder_and_one_whose_run_was_killed_at_birth_are_free(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json.partial").write_text('{"ru')
    folder = RunFolder.create(tmp_path / "run", _recipe(steps=4))
    assert folder.recipe.run.steps == 4


def test_opening_what_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="There is no run at"):
        RunFolder.open(tmp_path)


def test_a_damaged_recipe_is_named(folder):
    (folder.path / "recipe.json").write_text('{"run": ')
    with pytest.raises(ConfigError, match=r"recipe\.json is damaged"):
        _ = RunFolder.open(folder.path).recipe


def test_abandoning_removes_a_run_that_never_began_and_no_other(folder, tmp_path):
    begun = RunFolder.create(tmp_path / "begun", _recipe())
    begun.log(0, {"held_out": 0.1})
    begun.abandon()
    folder.abandon()
    assert not folder.path.exists()
    assert begun.metrics() == [{"step": 0, "held_out": 0.1}]


def test_metrics_come_back_in_order(folder):
    assert folder.metrics() == []
    for step in range(3):
        folder.log(step, {"reward": step / 2})
    assert [row["reward"] for row in folder.metrics()] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("torn", ['{"step": 3, "rew', '{"step"', "\0\0\0", "\n"])
def test_a_line_torn_by_a_crash_is_left_out_and_gone_after_resuming(folder, torn):
    for step in (1, 2):
        folder.log(step, {"reward": 0.5})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert [row["step"] for row in folder.metrics()] == [1, 2]
    folder.rewind(2)
    folder.log(3, {"reward": 1.0})
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_rewinding_forgets_what_came_after_the_step(folder):
    for step in range(5):
        folder.log(step, {"reward": 0.0})
        folder.save_groups(step, [_group()])
        folder.write(f"evaluations/step_{step:06d}.json", "{}")
    folder.save_refused(4, [_group()])
    (folder.path / "trajectories" / "step_000004.jsonl.partial").write_text("half")
    folder.rewind(2)
    assert [row["step"] for row in folder.metrics()] == [0, 1, 2]
    kept = sorted(str(path.relative_to(folder.path)) for path in folder.path.rglob("step_*"))
    steps = [f"step_00000{step}" for step in range(3)]
    assert kept == [f"evaluations/{step}.json" for step in steps] + [f"trajectories/{step}.jsonl" for step in steps]


def test_rewinding_a_run_that_has_written_nothing(folder):
    folder.rewind(0)
    assert folder.metrics() == []


def test_groups_are_kept_whole_one_a_line(folder):
    path = folder.save_groups(12, [_group(), _group("fünf\n", 0.0)])
    assert path == folder.path / "trajectories" / "step_000012.jsonl"
    first, second = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert first["task"]["answer"] == "4"
    policy = first["trajectories"][0]["spans"][1]
    assert (policy["author"], policy["tokens"], policy["logps"], policy["version"]) == ("policy", [3], [-0.5], 7)
    assert first["trajectories"][0]["signals"][0]["values"] == [1.0]
    assert second["trajectories"][0]["spans"][1]["text"] == "fünf\n"


def test_text_that_utf8_cannot_carry_is_still_kept(folder):
    path = folder.save_groups(1, [_group("half a pair: \ud83d")])
    row = json.loads(path.read_text(encoding="utf-8"))
    assert row["trajectories"][0]["spans"][1]["text"] == "half a pair: \ud83d"


def test_a_write_that_fails_leaves_the_file_as_it_was(folder, monkeypatch):
    folder.write("notes.txt", "old")

    def full(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CheckpointError, match=r"notes\.txt could not be written.*No space left.*--resume"):
        folder.write("notes.txt", "new")
    assert (folder.path / "notes.txt").read_text() == "old"


def test_a_metric_that_cannot_be_written_is_a_clear_error(folder):
    (folder.path / "metrics.jsonl").mkdir()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl could not be written"):
        folder.log(1, {"reward": 1.0})


def test_killed_while_writing_every_file_is_whole(tmp_path):
    """kill -9 at an instant of no one's choosing: rewritten files are whole, logged lines end at the last one."""
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from headwater.runtime.folder import RunFolder
        folder = RunFolder(Path(sys.argv[1]))
        step = 0
        while True:
            folder.log(step, {"reward": 0.25})
            folder.write("state.txt", str(step % 10) * 200_000)
            step += 1
        """
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    deadline = time.monotonic() + 60
    while len(RunFolder(tmp_path).metrics()) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    text = (tmp_path / "state.txt").read_text()
    assert len(text) == 200_000 and len(set(text)) == 1
    steps = [row["step"] for row in RunFolder(tmp_path).metrics()]
    assert len(steps) >= 20 and steps == list(range(len(steps)))
