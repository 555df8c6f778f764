"""Do wrong answers grow longer under GRPO, and not under Dr.GRPO?

    python bench/answer_length.py --plot docs/images/answer_length.png

A task in which an answer is wrong by no fault of its own: half of every group's siblings are asked R and are right
whatever they write, the other half are asked W and are wrong. Nothing can be learnt, half of the answers stay wrong
for ever, and if lengths move, the objective alone has moved them. A tiny Llama is first taught to write letters after
either, ended with chance 1/12 after each. Then GRPO (every answer weighs the same, so a token of a long one weighs
less) and Dr.GRPO (every token weighs the same) learn from the same seeds of sampling. Reported are the mean lengths
of wrong and of right answers in the first and in the last tenth of the steps. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import torch

from headwater.algorithms import choose
from headwater.config import OptimizerConfig
from headwater.data.examples import example
from headwater.data.pack import pack
from headwater.data.render import Renderer
from headwater.engines.torch_engine import TorchEngine
from headwater.models.fakes import tiny_llama
from headwater.models.policy import Policy
from headwater.rollout.episode import rollout
from headwater.runtime.learner import Learner
from headwater.types import Group, Sampling, Signal, Task, Trajectory

ROWS: dict[str, tuple[str, str]] = {"GRPO": ("grpo", "#2f7d5b"), "Dr.GRPO": ("dr_grpo", "#8a5ba6")}
SIDES = ("ask R", "ask W")
LONGEST = 64
STARTED = 12
"""Mean letters of an answer before any learning."""


def beginner(seed: int) -> tuple[Policy, Renderer]:
    """A policy that writes random letters and ends at random, after R as after W."""
    policy = tiny_llama(width=64, seed=seed)
    renderer = Renderer(policy.tokenizer, "auto", policy.end_of_turn_ids)
    algorithm = choose("sft", {}, frozenset({"demonstration"}))
    steps, chance = 120, random.Random(seed)
    learner = Learner(policy, OptimizerConfig(lr=1e-2, schedule="cosine"), steps=steps)
    for step in range(steps):
        tasks = []
        for i in range(64):
            word = [chance.choice("abcdefgh")]
            while len(word) < LONGEST - 1 and chance.random() > 1 / STARTED:
                word.append(chance.choice("abcdefgh"))
            tasks.append(Task(id=f"{step}-{i}", prompt=SIDES[i % 2], completion="".join(word)))
        learner.step(pack([example(task, renderer, algorithm.needs) for task in tasks], algorithm))
    return policy, renderer


def play(engine: TorchEngine, renderer: Renderer, step: int, seed: int, groups: int, siblings: int) -> list[Group]:
    """Groups of which half the siblings are right and half wrong, by what they were asked."""
    sides = {side: [Task(id=f"{step}-{g}-{side}", prompt=side) for g in range(groups)] for side in SIDES}
    visits = [(task, 0) for tasks in sides.values() for task in tasks]
    sampling = Sampling(max_tokens=LONGEST)
    played = asyncio.run(rollout(engine, renderer, visits, sampling, siblings // 2, run_seed=seed))
    found = []
    for right, wrong in zip(played[:groups], played[groups:], strict=True):
        judged = [rewarded(t, 1.0) for t in right.trajectories] + [rewarded(t, 0.0) for t in wrong.trajectories]
        found.append(Group(task=right.task, trajectories=tuple(judged)))
    return found


def rewarded(trajectory: Trajectory, reward: float) -> Trajectory:
    """With its reward."""
    return replace(trajectory, signals=(Signal(source="world", name="reward", values=(reward,)),))


def lengths(groups: list[Group], reward: float) -> float:
    """Mean tokens of the answers that earned this."""
    return statistics.fmean(
        sum(len(span.tokens) for span in trajectory.spans if span.author == "policy")
        for group in groups
        for trajectory in group.trajectories
        if trajectory.reward == reward
    )


def learn(row: str, seed: int, lr: float, steps: int, groups: int, siblings: int) -> dict[str, list[float]]:
    """The lengths of wrong and of right answers by step."""
    policy, renderer = beginner(seed)
    algorithm = choose(row, {}, frozenset({"reward"}))
    learner = Learner(policy, OptimizerConfig(lr=lr, schedule="constant"), steps=steps)
    engine = TorchEngine(policy)
    curve: dict[str, list[float]] = {"wrong": [], "right": []}
    for step in range(steps):
        played = play(engine, renderer, step, seed, groups, siblings)
        for side, reward in (("wrong", 0.0), ("right", 1.0)):
            curve[side].append(lengths(played, reward))
        learner.step(pack(played, algorithm, length=LONGEST))
        engine.publish(learner.version)
    return curve


def ends(values: list[float]) -> tuple[float, float]:
    """Means over the first and the last tenth."""
    tenth = max(1, len(values) // 10)
    return statistics.fmean(values[:tenth]), statistics.fmean(values[-tenth:])


def plot(curves: dict[str, list[dict[str, list[float]]]], path: Path) -> None:
    """Mean over seeds, and each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for panel, side in zip(panels, ("wrong", "right"), strict=True):
        for name, seeds in curves.items():
            colour = ROWS[name][1]
            for one in seeds:
                panel.plot(one[side], color=colour, alpha=0.2, lw=0.8)
            panel.plot([statistics.fmean(at) for at in zip(*(s[side] for s in seeds), strict=True)], color=colour)
            panel.plot([], color=colour, label=name)
        panel.set(title=f"mean length of {side} answers, tokens", xlabel="step")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.2)
    panels[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Learn, print and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)  # the model is small: more would wait for each other
    curves: dict[str, list[dict[str, list[float]]]] = {name: [] for name in ROWS}
    for seed in given.seeds:
        for name, (row, _) in ROWS.items():
            curve = learn(row, seed, given.lr, given.steps, given.groups, given.siblings)
            curves[name].append(curve)
            shown = {side: "{:.1f} to {:.1f}".format(*ends(values)) for side, values in curve.items()}
            print(f"seed {seed}  {name:8}  wrong {shown['wrong']}  right {shown['right']}", flush=True)
    if given.plot:
        plot(curves, given.plot)
    print(json.dumps({name: [{s: ends(v) for s, v in one.items()} for one in seeds] for name, seeds in curves.items()}))


if __name__ == "__main__":
    main()
