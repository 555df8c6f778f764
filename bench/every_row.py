"""Every row of the table, two real steps each on the embedded model, as a recipe would run it.

    python bench/every_row.py                    # all rows, about ten minutes on two cores
    python bench/every_row.py --only ppo tdpo2

Each row runs in a process of its own, so that its peak of resident memory is its own. Rows that learn from rewards
sample answers to sums; `ppo` has a critic on a trunk of its own, a frozen reference in its reward, and as reward the
model that `bradley_terry` trained just before. Rows that learn from data get a few rows of it. A row passes when its
loss and the norm of its gradient are finite and something moved. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from headwater.algorithms import TABLE
from headwater.config import check_recipe
from headwater.runtime.folder import RunFolder
from headwater.runtime.loop import train
from headwater.types import Task


def curious(text: str, task: Task) -> float:
    """A reward that differs between siblings even of a model that knows nothing."""
    return sum(map(ord, text)) % 17 / 16


class Steps:
    """Every other character is a good step: process rewards for any text."""

    name = "steps"
    offers = frozenset({"step_reward"})
    needs: frozenset[str] = frozenset()

    async def __call__(self, group: Any) -> Any:
        from headwater.types import Signal

        found = []
        for trajectory in group.trajectories:
            count = sum(trajectory.turns)
            values = tuple(float(sum(map(ord, trajectory.text)) * (k + 1) % 3) for k in range(count))
            signal = Signal(source="steps", name="step_reward", values=values, level="step", ends=tuple(range(count)))
            found.append(signal)
        return found


def data(needs: frozenset[str], folder: Path) -> Path:
    """A small file with what a row needs to be shown."""
    rows: list[dict[str, Any]] = []
    for i in range(8):
        prompt, right, wrong = f"What is {i}+{i}?", f"The answer is {2 * i}.", f"It is {2 * i + 1}, of course."
        if "preference" in needs:
            rows.append({"prompt": prompt, "chosen": right, "rejected": wrong})
        elif "step_label" in needs:
            rows.append({"prompt": prompt, "steps": ["Double it.", right if i % 2 else wrong], "labels": [1, i % 2]})
        elif "label" in needs:
            rows.append({"prompt": prompt, "completion": right if i % 2 else wrong, "label": bool(i % 2)})
        else:
            rows.append({"prompt": prompt, "completion": right})
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe(name: str, folder: Path, reward_model: Path | None) -> dict[str, Any]:
    """The recipe of one row."""
    needs = TABLE[name].needs
    content: dict[str, Any] = {
        "run": {"name": name, "folder": str(folder), "steps": 2, "checkpoint_every": 0},
        "model": {"name": "embedded:smollm2"},
        "algorithm": {"name": name},
        "batch": {"prompts": 2, "siblings": 4},
        "sampling": {"max_tokens": 12},
        "optimizer": {"lr": 1e-5},
    }
    if needs & {"demonstration", "preference", "label", "step_label"}:
        content["tasks"] = {"source": str(data(needs, folder))}
        if name == "process_classes":
            text = (folder / "data.jsonl").read_text().replace('"labels": [1, 0]', '"labels": [1, -1]')
            (folder / "data.jsonl").write_text(text)
    else:
        content["tasks"] = {"source": "sums", "count": 20, "settings": {"digits": 1}}
    if "reward" in needs:
        content["rewards"] = [{"name": "every_row:curious"}]
    if "step_reward" in needs:
        content["rewards"] = [{"name": "every_row:Steps"}]
        content["algorithm"]["aggregate"] = "mean"
    if name == "rft":
        content["algorithm"]["threshold"] = 0.3
    if name == "reverse_kl_policy" and reward_model is not None:
        content["reference"] = {"name": str(reward_model / "model")}  # a teacher that is the student teaches nothing
    if name == "ppo":
        content["critic"] = {"trunk": "own"}
        content["algorithm"]["kl_reward"] = 0.01
        if reward_model is not None:
            content["rewards"] = [{"name": "reward_model", "settings": {"model": str(reward_model)}}]
    return content


def run(name: str, folder: Path, reward_model: Path | None) -> dict[str, Any]:
    """Run one row in a child process."""
    started = time.perf_counter()
    child = os.fork()  # nothing of torch has run yet here, so there are no threads to lose
    if child == 0:
        done = False
        try:
            content = check_recipe(recipe(name, folder, reward_model), name)
            train(content, RunFolder.create(content.run.path, content))
            done = True
        finally:
            if not done:
                traceback.print_exc()
            os._exit(not done)
    _, status, usage = os.wait4(child, 0)
    found: dict[str, Any] = {"row": name, "ok": status == 0, "peak_bytes": usage.ru_maxrss * 1024}
    found["seconds"] = time.perf_counter() - started
    metrics = folder / name / "metrics.jsonl"
    rows = [row for row in map(json.loads, metrics.read_text().splitlines()) if row["step"]] if metrics.exists() else []
    if rows:
        found |= {"loss": rows[-1]["loss"], "grad_norm": max(row["grad_norm"] for row in rows)}
        found["step_s"] = min(row["step_s"] for row in rows)
    found["ok"] &= len(rows) == 2 and math.isfinite(found["loss"]) and 0 < found["grad_norm"] < math.inf
    return found


def table(found: list[dict[str, Any]]) -> None:
    """Print what was found."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title="two steps of every row on SmolLM2-135M")
    for title in ("row", "needs", "s a step", "peak GiB", "loss", "gradient", ""):
        shown.add_column(title)
    for one in found:
        shown.add_row(
            one["row"],
            ", ".join(sorted(TABLE[one["row"]].needs)),
            f"{one.get('step_s', math.nan):.1f}",
            f"{one['peak_bytes'] / 2**30:.2f}",
            f"{one.get('loss', math.nan):.4f}",
            f"{one.get('grad_norm', math.nan):.3f}",
            "ok" if one["ok"] else "FAILED",
        )
    Console(width=140).print(shown)


def main() -> None:
    """Run the rows and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TABLE), default=list(TABLE), metavar="ROW")
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    names = sorted(given.only, key=lambda name: name != "bradley_terry")  # the reward model comes first
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        reward_model: Path | None = None
        for name in names:
            found.append(run(name, Path(folder), reward_model))
            print({True: "ok", False: "FAILED"}[found[-1]["ok"]], name, f"{found[-1]['seconds']:.0f} s", flush=True)
            if name == "bradley_terry" and found[-1]["ok"]:
                reward_model = Path(folder) / name
            else:
                shutil.rmtree(Path(folder) / name, ignore_errors=True)
    table(found)
    failed = [one["row"] for one in found if not one["ok"]]
    print(json.dumps({"rows": len(found), "failed": failed, "results": found}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
