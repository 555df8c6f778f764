"""The recipes that ship run, with a tiny model in place of theirs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headwater.config import load_recipe
from headwater.runtime.folder import RunFolder
from headwater.runtime.loop import train

RECIPES = Path(__file__).parent.parent / "recipes"
BESIDE = Path(__file__).parent.parent.parent / "shared" / "data"
SMALL = ["model={name='fake:llama'}", "run.steps=2", "batch.prompts=2", "batch.siblings=2", "optimizer.warmup=0"]


def _run(name, tmp_path, *overrides):
    recipe = load_recipe(RECIPES / name, [*SMALL, f"run.folder={tmp_path}", *overrides])
    folder = RunFolder.create(recipe.run.path, recipe)
    return folder, train(recipe, folder)


def test_quickstart(tmp_path):
    folder, result = _run("quickstart.toml", tmp_path, "evaluation.limit=4")
    assert result.before is not None and result.after is not None
    assert (result.before.n, result.after.n) == (4, 4)
    assert [row["step"] for row in folder.metrics()] == [0, 1, 2]


def test_gsm8k(tmp_path, monkeypatch):
    data = Path(os.environ.get("HEADWATER_DATA", BESIDE))
    if not (data / "gsm8k" / "train.jsonl").is_file():
        pytest.skip("needs gsm8k/train.jsonl in the folder that HEADWATER_DATA names")
    monkeypatch.setenv("HEADWATER_DATA", str(data))
    # characters, not words: prompts are longer and answers are cut short
    longer = ["tasks.max_prompt_tokens=1500", "evaluation.tasks.max_prompt_tokens=1500", "sampling.max_tokens=40"]
    folder, result = _run("gsm8k.toml", tmp_path, *longer, "evaluation.limit=2", "run.evaluate_every=0")
    assert result.after is not None and result.after.n == 2
    rows = folder.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["unjudged"] == 0 for row in rows[1:]), "every answer of the data set is a number"
