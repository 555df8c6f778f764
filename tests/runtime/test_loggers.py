from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from headwater.config import Recipe, check_recipe
from headwater.errors import ConfigError
from headwater.runtime import loggers
from headwater.runtime.loggers import TensorBoard, Tracker, trackers


def _recipe(*names: str) -> Recipe:
    content = {"run": {"name": "try", "loggers": names}, "tasks": {"source": "sums"}, "rewards": [{"name": "number"}]}
    return check_recipe(content, "a recipe")


def _scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard itself would draw."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_no_loggers_no_trackers(tmp_path):
    assert trackers(_recipe(), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_said_before_anything_is_written(tmp_path, monkeypatch, name):
    module = "torch.utils.tensorboard" if name == "tensorboard" else name
    monkeypatch.setitem(sys.modules, module, None)  # how Python itself marks a module that cannot be imported
    with pytest.raises(ConfigError, match=rf"names '{name}'.*pip install 'headwater\[{name}\]'"):
        trackers(_recipe(name), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_draws_every_metric(tmp_path):
    pytest.importorskip("tensorboard")
    (board,) = trackers(_recipe("tensorboard"), tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing is written before the run starts"
    board.start(_recipe(), 0)
    board.step(1, {"reward": 0.25, "kl": 0.5})
    board.step(2, {"reward": 0.75})
    board.note("said to the terminal", "info")
    board.finish()
    board.finish()
    assert _scalars(tmp_path, "reward") == [(1, 0.25), (2, 0.75)]
    assert _scalars(tmp_path, "kl") == [(1, 0.5)]


def test_tensorboard_hides_steps_that_a_resumed_run_takes_again(tmp_path):
    pytest.importorskip("tensorboard")
    first = TensorBoard(tmp_path)
    first.start(_recipe(), 0)
    for step in (1, 2, 3):
        first.step(step, {"reward": 0.0})
    first.finish()
    (old,) = (tmp_path / "tensorboard").iterdir()
    old.rename(old.with_name("events.out.tfevents.1.first"))  # two files of one second have no order of their own
    second = TensorBoard(tmp_path)
    second.start(_recipe(), 1)
    second.step(2, {"reward": 1.0})
    second.finish()
    assert _scalars(tmp_path, "reward") == [(1, 0.0), (2, 1.0)]


def test_a_logger_that_was_never_started_can_be_finished(tmp_path):
    pytest.importorskip("tensorboard")
    board = TensorBoard(tmp_path)
    board.finish()
    assert list(tmp_path.iterdir()) == []


TOLD = """
import json
told = []
def init(**settings): told.append(("init", settings["name"], settings["resume"], settings["config"]["run"]["name"]))
def log(metrics, step): told.append(("log", step, metrics))
def finish(): told.append(("finish",))
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """A package of that name with the three functions that a tracker calls, which remembers the calls."""
    (tmp_path / "wandb.py").write_text(TOLD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield loggers._needs("wandb", "wandb")
    sys.modules.pop("wandb", None)


def test_a_tracker_opens_logs_and_closes_once(wandb):
    tracker = Tracker("wandb")
    tracker.finish()
    assert wandb.told == [], "a run that failed before its start is not tracked"
    tracker.start(_recipe(), 0)
    tracker.step(1, {"reward": 0.5})
    tracker.note("said to the terminal", "warning")
    tracker.finish()
    tracker.finish()
    assert wandb.told == [("init", "try", "never", "try"), ("log", 1, {"reward": 0.5}), ("finish",)]


def test_a_resumed_run_goes_on_in_the_tracker(wandb):
    tracker = Tracker("wandb")
    tracker.start(_recipe(), 7)
    assert wandb.told == [("init", "try", "allow", "try")]


def test_trackio_keeps_what_it_is_told(tmp_path):
    pytest.importorskip("trackio")
    program = textwrap.dedent(
        """
        from headwater.config import check_recipe
        from headwater.runtime.loggers import trackers
        content = {"run": {"name": "try", "loggers": ["trackio"]}, "tasks": {"source": "sums"}}
        recipe = check_recipe({**content, "rewards": [{"name": "number"}]}, "a recipe")
        (tracker,) = trackers(recipe, None)
        tracker.start(recipe, 0)
        tracker.step(1, {"reward": 0.25})
        tracker.step(2, {"reward": 0.5})
        tracker.finish()
        """
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120, capture_output=True)
    database = sqlite3.connect(tmp_path / "headwater.db")
    try:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    finally:
        database.close()
    assert [(name, step, json.loads(metrics)["reward"]) for name, step, metrics in rows] == [
        ("try", 1, 0.25),
        ("try", 2, 0.5),
    ]
