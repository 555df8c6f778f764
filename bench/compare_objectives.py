"""PPO, RLOO, GRPO, Dr.GRPO and REINFORCE++ on the same verifiable task with the same budget of tokens.

    python bench/compare_objectives.py --plot docs/images/compare_objectives.png

Every run is `headwater train recipes/quickstart.toml` with another row of the table, in a process of its own:
two-digit sums with SmolLM2-135M, the same tasks, the same seeds of sampling, the same number of prompts, siblings
and steps. So all see as many answers; their tokens differ only as far as they learn to answer longer or shorter.
Reported are held-out accuracy against sampled tokens, the peak of resident memory of the process, seconds, and
the mean length of wrong answers. The last line is one JSON object. A run that is complete in `--out` is not
repeated, so that the whole can be stopped and continued.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS: dict[str, list[str]] = {
    "PPO": ["algorithm.name=ppo", "critic.trunk=own", "optimizer.critic_lr=1e-4"],
    "RLOO": ["algorithm.name=rloo"],
    "GRPO": ["algorithm.name=grpo"],
    "Dr.GRPO": ["algorithm.name=dr_grpo"],
    "REINFORCE++": ["algorithm.name=reinforce_pp"],
}
COLOURS = dict(zip(ROWS, ("#b4552d", "#3b6ea5", "#2f7d5b", "#8a5ba6", "#a08a2c"), strict=True))


def train(folder: Path, settings: list[str]) -> dict[str, float]:
    """Run one training to its end; its peak of resident memory in bytes and its seconds."""
    shutil.rmtree(folder, ignore_errors=True)  # one that was cut short
    command = [
        *(sys.executable, "-c", "from headwater.cli import main; main()"),
        *("train", str(ROOT / "recipes/quickstart.toml"), f"run.name={folder.name}", f"run.folder={folder.parent}"),
        *settings,
    ]
    started = time.perf_counter()
    with open(folder.with_suffix(".log"), "wb") as log:
        child = os.posix_spawn(
            sys.executable,
            command,
            {**os.environ, "PYTHONPATH": str(ROOT)},
            file_actions=[(os.POSIX_SPAWN_DUP2, log.fileno(), 1), (os.POSIX_SPAWN_DUP2, log.fileno(), 2)],
        )
        _, status, usage = os.wait4(child, 0)
    if status != 0:
        raise SystemExit(f"{folder.name} ended with status {status}; see {folder.with_suffix('.log')}.")
    return {"peak_bytes": usage.ru_maxrss * 1024, "seconds": time.perf_counter() - started}


def read(folder: Path, cost: dict[str, float]) -> dict[str, Any]:
    """What a run shows: its evaluations by sampled tokens, and the lengths of wrong and right answers by step."""
    sampled, curve, wrong, right, rewards = 0, [], [], [], []
    for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        step = int(row["step"])
        if step:
            lengths: dict[bool, list[int]] = {True: [], False: []}
            for line in (folder / f"trajectories/step_{step:06d}.jsonl").read_text().splitlines():
                for trajectory in answers(json.loads(line)):
                    length = sum(len(s["tokens"]) for s in trajectory["spans"] if s["author"] == "policy")
                    reward = next(s for s in trajectory["signals"] if s["name"] == "reward")
                    lengths[reward["values"][0] > 0].append(length)
            sampled += sum(lengths[True]) + sum(lengths[False])
            wrong.append(statistics.fmean(lengths[False]) if lengths[False] else None)
            right.append(statistics.fmean(lengths[True]) if lengths[True] else None)
            rewards.append(row["reward"])
        if "held_out" in row:
            curve.append([sampled, row["held_out"]])
    return {"curve": curve, "wrong": wrong, "right": right, "reward": rewards, "tokens": sampled, **cost}


def answers(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The trajectories of one line of a run's trajectories."""
    return row.get("trajectories", [row])


def run_all(out: Path, seeds: list[int], steps: int, max_tokens: int, rows: list[str]) -> dict[str, list[Any]]:
    """All runs, seed by seed, so that a part of them compares all rows."""
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Any]] = {name: [] for name in rows}
    for seed in seeds:
        for name in rows:
            folder = out / f"{name.lower().replace('.', '').replace('+', 'p')}-{seed}"
            cost_file = folder.with_suffix(".json")
            if not cost_file.exists():
                print(f"{name}, seed {seed} ...", flush=True)
                settings = [
                    *ROWS[name],
                    *(f"run.seed={seed}", f"run.steps={steps}", f"sampling.max_tokens={max_tokens}"),
                    *("optimizer.schedule=constant", f"run.evaluate_every={max(1, steps // 4)}"),
                ]
                cost_file.write_text(json.dumps(train(folder, settings)))
            found[name].append(read(folder, json.loads(cost_file.read_text())))
            last = found[name][-1]
            print(f"{name}, seed {seed}: {last['curve'][-1]}, {last['seconds']:.0f} s", flush=True)
    return found


def spread(values: list[float]) -> str:
    """Mean and range."""
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def lengthening(runs: list[Any], key: str) -> tuple[float, float]:
    """Mean length of answers in the first and in the last third of the steps, over runs."""
    first, last = [], []
    for run in runs:
        known = [length for length in run[key] if length is not None]
        third = max(1, len(known) // 3)
        first += known[:third]
        last += known[-third:]
    return statistics.fmean(first), statistics.fmean(last)


def table(found: dict[str, list[Any]]) -> None:
    """Print a row for each algorithm."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title="the same answers to learn from; mean (range) over seeds")
    for title in (
        "row",
        "held out, before",
        "after",
        "tokens",
        "seconds",
        "peak GiB",
        "wrong answers: tokens",
        "right",
    ):
        shown.add_column(title)
    for name, runs in found.items():
        wrong, right = lengthening(runs, "wrong"), lengthening(runs, "right")
        shown.add_row(
            name,
            spread([run["curve"][0][1] for run in runs]),
            spread([run["curve"][-1][1] for run in runs]),
            f"{statistics.fmean(run['tokens'] for run in runs):.0f}",
            f"{statistics.fmean(run['seconds'] for run in runs):.0f}",
            f"{max(run['peak_bytes'] for run in runs) / 2**30:.2f}",
            f"{wrong[0]:.2f} to {wrong[1]:.2f}",
            f"{right[0]:.2f} to {right[1]:.2f}",
        )
    Console(width=160).print(shown)


def plot(found: dict[str, list[Any]], path: Path) -> None:
    """Accuracy against tokens and memory, and the length of wrong answers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    for name, runs in found.items():
        points = list(zip(*(run["curve"] for run in runs), strict=True))
        tokens = [statistics.fmean(p[0] for p in at) / 1000 for at in points]
        left.plot(tokens, [statistics.fmean(p[1] for p in at) for at in points], color=COLOURS[name], label=name)
        low, high = ([edge(p[1] for p in at) for at in points] for edge in (min, max))
        left.fill_between(tokens, low, high, color=COLOURS[name], alpha=0.12)
        for run in runs:
            middle.scatter(run["peak_bytes"] / 2**30, run["curve"][-1][1], color=COLOURS[name])
        if name in ("GRPO", "Dr.GRPO"):
            steps = range(1, len(runs[0]["wrong"]) + 1)
            known = [[run["wrong"][k - 1] for run in runs if run["wrong"][k - 1] is not None] for k in steps]
            right.plot(steps, [statistics.fmean(k) if k else float("nan") for k in known], color=COLOURS[name])
    left.set(xlabel="thousand tokens sampled", ylabel="held-out accuracy", title="mean and range over seeds")
    left.legend(frameon=False)
    middle.set(xlabel="peak resident memory, GiB", title="at the end")
    right.set(xlabel="step", ylabel="tokens", title="mean length of wrong answers")
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Run, print and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=14)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--out", type=Path, default=ROOT / "runs/compare_objectives")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    found = run_all(given.out, given.seeds, given.steps, given.max_tokens, given.rows)
    table(found)
    if given.plot:
        plot(found, given.plot)
    print(
        json.dumps(
            {
                name: {
                    "held_out": [run["curve"][-1][1] for run in runs],
                    "tokens": [run["tokens"] for run in runs],
                    "peak_bytes": [run["peak_bytes"] for run in runs],
                    "wrong_tokens": lengthening(runs, "wrong"),
                }
                for name, runs in found.items()
            }
        )
    )


if __name__ == "__main__":
    main()
