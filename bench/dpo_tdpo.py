"""DPO, TDPO-1 and TDPO-2 on preferences whose gold reward is known: what each buys with how much divergence.

    python bench/dpo_tdpo.py --plot docs/images/dpo_tdpo.png

A random Markov chain over 12 letters writes words of 16. A tiny Llama is first taught to write them, and is the
reference. A gold reward (a random worth for every letter and for every pair of neighbours) prefers one of two such
words, through a Bradley-Terry coin whose logit is the gap of the rewards in units of their standard deviation; so
some preferences are wrong. Each row of the table then learns from the same pairs, in the same order, with the same
beta and learning rate. Held out are pairs in the true order of the gold reward. Reported at every evaluation:

- accuracy: the share of held-out pairs that the implicit reward puts in the true order;
- KL chosen, KL rejected: sequential KL(ref || pi) along them, summed over a word, in nats;
- gold: mean reward of words sampled at temperature 1, in standard deviations above the reference's;
- entropy: mean -log pi of sampled tokens, in nats; distinct-3: share of their trigrams that differ.

"At equal accuracy" is at the highest accuracy that all rows reach with this seed, on the line between evaluations.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from headwater.algorithms import Algorithm, choose
from headwater.config import OptimizerConfig
from headwater.data.examples import example
from headwater.data.pack import everything, pack
from headwater.data.render import Renderer
from headwater.engines.torch_engine import TorchEngine
from headwater.models.fakes import tiny_llama
from headwater.models.forward import run, split
from headwater.models.policy import Policy
from headwater.objective.reduce import Sequences
from headwater.rollout.episode import rollout
from headwater.runtime.learner import Learner
from headwater.types import Group, Sampling, Task

LETTERS = "abcdefghijkl"
LENGTH = 16
ROWS: dict[str, tuple[str, dict[str, float]]] = {
    "DPO": ("dpo", {}),
    "TDPO-1": ("tdpo1", {}),
    "TDPO-2, α 0.5": ("tdpo2", {"alpha": 0.5}),
    "TDPO-2, α 1": ("tdpo2", {"alpha": 1.0}),
}
COLOURS = dict(zip(ROWS, ("#b4552d", "#8a5ba6", "#3b6ea5", "#2f7d5b"), strict=True))
FIGURES = ("accuracy", "kl_chosen", "kl_rejected", "gold", "entropy", "distinct_3")


class World:
    """What words are usual, and what they are worth."""

    def __init__(self, seed: int) -> None:
        self.chance = torch.Generator().manual_seed(seed)
        size = len(LETTERS)
        self.chain_LL = torch.randn(size, size, generator=self.chance).softmax(1)
        self.worth_L = torch.randn(size, generator=self.chance)
        self.worth_LL = torch.randn(size, size, generator=self.chance)
        sample = [self.raw(word) for word in self.words(2000)]
        self.mean, self.deviation = statistics.fmean(sample), statistics.stdev(sample)

    def words(self, count: int) -> list[str]:
        """Drawn from the chain."""
        at_N = torch.randint(len(LETTERS), (count,), generator=self.chance)
        drawn = [at_N]
        for _ in range(LENGTH - 1):
            at_N = torch.multinomial(self.chain_LL[at_N], 1, generator=self.chance)[:, 0]
            drawn.append(at_N)
        return ["".join(LETTERS[i] for i in row) for row in torch.stack(drawn, 1).tolist()]

    def raw(self, word: str) -> float:
        """Mean worth of its letters and its neighbours, so that a longer word is not a better one."""
        at = torch.tensor([LETTERS.index(letter) for letter in word if letter in LETTERS])
        if len(at) < 2:
            return 0.0
        return float(self.worth_L[at].mean() + self.worth_LL[at[:-1], at[1:]].mean())

    def gold(self, word: str) -> float:
        """In standard deviations from the mean of usual words."""
        return (self.raw(word) - self.mean) / self.deviation

    def pairs(self, name: str, count: int, *, noisy: bool) -> list[Task]:
        """Two words, of which one is preferred: the better, or by a Bradley-Terry coin."""
        tasks = []
        for i, (one, two) in enumerate(zip(self.words(count), self.words(count), strict=True)):
            gap = self.gold(one) - self.gold(two)
            if noisy:
                coin = float(torch.rand((), generator=self.chance))
                first = coin < float(torch.sigmoid(torch.tensor(gap)))
            else:
                first = gap > 0
            better, worse = (one, two) if first else (two, one)
            tasks.append(Task(id=f"{name}-{i}", prompt="w", completion=better, rejected=worse))
        return tasks


def groups_of(tasks: Sequence[Task], renderer: Renderer, algorithm: Algorithm) -> list[Group]:
    """The tasks as what the algorithm learns from."""
    return [example(task, renderer, algorithm.needs) for task in tasks]


def imitate(policy: Policy, renderer: Renderer, words: Sequence[str], steps: int) -> None:
    """Teach a policy to write such words."""
    algorithm = choose("sft", {}, frozenset({"demonstration"}))
    learner = Learner(policy, OptimizerConfig(lr=1e-2, schedule="cosine"), steps=steps)
    tasks = [Task(id=str(i), prompt="w", completion=word) for i, word in enumerate(words)]
    for step in range(steps):
        some = [tasks[(step * 64 + i) % len(tasks)] for i in range(64)]
        learner.step(pack(groups_of(some, renderer, algorithm), algorithm))


@torch.no_grad()
def along(policy: Policy, reference: Policy, groups: Sequence[Group], algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """log pi and KL(ref || pi) of every answer, summed over its tokens, [pairs, 2] with the chosen first."""
    batch, owners = everything(groups, algorithm)
    readings = [run(policy, micro, batch, reference=reference) for micro in split(batch, 8192, policy.device)]
    sequences = Sequences.of(batch.sequence_T)
    assert len(owners) == 2 * len(groups)
    logp_S = sequences.sum(torch.cat([one.logp_T for one in readings]))
    kl_S = sequences.sum(torch.cat([one.measured["ref_kl"] for one in readings]))
    return logp_S.view(-1, 2), kl_S.view(-1, 2)


def sampled(policy: Policy, renderer: Renderer, world: World, count: int, seed: int) -> dict[str, float]:
    """What the policy writes: its worth and its variety."""
    task = Task(id="write", prompt="w")
    sampling = Sampling(max_tokens=LENGTH + 4)
    (group,) = asyncio.run(rollout(TorchEngine(policy), renderer, [(task, 0)], sampling, count, run_seed=seed))
    spans = [span for t in group.trajectories for span in t.spans if span.author == "policy"]
    logps = [logp for span in spans for logp in span.logps or ()]
    words = ["".join(letter for letter in span.text if letter in LETTERS) for span in spans]
    trigrams = [word[i : i + 3] for word in words for i in range(len(word) - 2)]
    return {
        "gold": statistics.fmean(map(world.gold, words)),
        "entropy": -statistics.fmean(logps),
        "distinct_3": len(set(trigrams)) / max(1, len(trigrams)),
    }


class Study:
    """One world, its reference and its pairs."""

    def __init__(self, seed: int, train: int, held_out: int) -> None:
        self.seed, self.world = seed, World(seed)
        self.reference = self.fresh()
        self.renderer = Renderer(self.reference.tokenizer, "auto", self.reference.end_of_turn_ids)
        imitate(self.reference, self.renderer, self.world.words(6400), 150)
        self.measuring = choose("tdpo2", {}, frozenset({"preference", "ref_logp"}))
        self.pairs = self.world.pairs("train", train, noisy=True)
        self.held_out = groups_of(self.world.pairs("test", held_out, noisy=False), self.renderer, self.measuring)
        self.reference_logp_P2, _ = along(self.reference, self.reference, self.held_out, self.measuring)

    def fresh(self) -> Policy:
        """A policy without training."""
        return tiny_llama(width=64, seed=self.seed)

    def measure(self, policy: Policy, samples: int) -> dict[str, float]:
        """All figures of a policy."""
        logp_P2, kl_P2 = along(policy, self.reference, self.held_out, self.measuring)
        reward_P2 = logp_P2 - self.reference_logp_P2
        gap_P = reward_P2[:, 0] - reward_P2[:, 1]
        return {
            "accuracy": float(((gap_P > 0).double() + 0.5 * (gap_P == 0).double()).mean()),
            "kl_chosen": float(kl_P2[:, 0].mean()),
            "kl_rejected": float(kl_P2[:, 1].mean()),
            **sampled(policy, self.renderer, self.world, samples, self.seed),
        }

    def learn(self, name: str, lr: float, steps: int, every: int, samples: int) -> list[dict[str, float]]:
        """The figures of one row of the table as it learns."""
        row, settings = ROWS[name]
        algorithm = choose(row, settings, frozenset({"preference", "ref_logp"}))
        policy = self.fresh()
        policy.module.load_state_dict(self.reference.module.state_dict())
        config = OptimizerConfig(lr=lr, schedule="constant")
        learner = Learner(policy, config, steps=steps, reference=self.reference)
        groups = learner.annotate(groups_of(self.pairs, self.renderer, algorithm), algorithm, 1.0)
        curve = []
        for step in range(steps + 1):
            if step % every == 0:
                curve.append({"step": float(step), **self.measure(policy, samples)})
            some = [groups[(step * 32 + i) % len(groups)] for i in range(32)]
            learner.step(pack(some, algorithm))
        return curve


def at_accuracy(curve: Sequence[dict[str, float]], wanted: float) -> dict[str, float]:
    """The figures where a curve first reaches an accuracy, on the line between two evaluations."""
    for before, after in itertools.pairwise(curve):
        if before["accuracy"] < wanted <= after["accuracy"]:
            share = (wanted - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return {key: before[key] + share * (after[key] - before[key]) for key in after}
    assert curve[0]["accuracy"] >= wanted
    return curve[0]


def table(title: str, found: dict[str, list[dict[str, float]]]) -> None:
    """One line a row: mean and range over seeds."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title)
    for column in ("row", "step", *FIGURES):
        shown.add_column(column.replace("_", " ").replace("kl", "KL").replace("distinct ", "distinct-"))
    for name, seeds in found.items():
        cells = []
        for key in ("step", *FIGURES):
            values = [one[key] for one in seeds]
            digits = {"step": 0, "kl_chosen": 2, "kl_rejected": 2, "gold": 2}.get(key, 3)
            low, mean, high = (f"{of(values):.{digits}f}" for of in (min, statistics.fmean, max))
            cells.append(f"{mean} ({low} to {high})")
        shown.add_row(name, *cells)
    Console(width=190).print(shown)


def plot(curves: dict[str, list[list[dict[str, float]]]], path: Path) -> None:
    """Divergence by step, and what accuracy costs in divergence and in variety; mean over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(16, 4), layout="constrained")
    for name, seeds in curves.items():
        mean = [{key: statistics.fmean(one[key] for one in at) for key in at[0]} for at in zip(*seeds, strict=True)]
        line = {key: [one[key] for one in mean] for key in mean[0]}
        colour = COLOURS[name]
        axes[0].plot(line["step"], line["accuracy"], color=colour, label=name)
        axes[1].plot(line["step"], line["kl_chosen"], color=colour, label=f"{name}: chosen")
        axes[1].plot(line["step"], line["kl_rejected"], "--", color=colour)
        axes[2].plot(line["accuracy"], line["entropy"], color=colour, marker="o", ms=2.5)
        total = [a + b for a, b in zip(line["kl_chosen"], line["kl_rejected"], strict=True)]
        axes[3].plot(total, line["gold"], color=colour, marker="o", ms=2.5)
    axes[0].set(xlabel="step", title="held-out accuracy")
    axes[0].legend(frameon=False)
    axes[1].set(xlabel="step", title="sequential KL(ref ‖ π), nats; dashed: rejected")
    axes[2].set(xlabel="held-out accuracy", title="entropy of samples, nats a token")
    axes[3].set(xlabel="KL chosen + KL rejected, nats", title="gold reward of samples, deviations")
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Learn, print and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--pairs", type=int, default=1600)
    parser.add_argument("--held-out", type=int, default=400)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)  # the model is small: more would wait for each other
    curves: dict[str, list[list[dict[str, float]]]] = {name: [] for name in ROWS}
    for seed in given.seeds:
        started = time.perf_counter()
        study = Study(seed, given.pairs, given.held_out)
        print(f"seed {seed}: reference in {time.perf_counter() - started:.0f} s", flush=True)
        for name in ROWS:
            curves[name].append(study.learn(name, given.lr, given.steps, given.every, given.samples))
            last = curves[name][-1][-1]
            print(f"  {name}: " + "  ".join(f"{key} {last[key]:.3f}" for key in FIGURES), flush=True)
    table("at the end; mean (range) over seeds", {name: [one[-1] for one in seeds] for name, seeds in curves.items()})
    count = range(len(given.seeds))
    common = [min(max(p["accuracy"] for p in seeds[i]) for seeds in curves.values()) for i in count]
    equal = {name: [at_accuracy(seeds[i], common[i]) for i in count] for name, seeds in curves.items()}
    table("at equal accuracy", equal)
    if given.plot:
        plot(curves, given.plot)
    print(json.dumps({"end": {name: [one[-1] for one in seeds] for name, seeds in curves.items()}, "equal": equal}))


if __name__ == "__main__":
    main()
