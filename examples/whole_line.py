"""The whole line in library calls: task -> trajectory -> signal -> credit -> objective -> update.

    python examples/whole_line.py                          # a table of characters: a second
    python examples/whole_line.py embedded:smollm2 15      # a real model, 15 steps

What `headwater train` does, without its run folder, checkpoints, alarms and curves.
"""

from __future__ import annotations

import asyncio
import sys

from headwater.algorithms import choose
from headwater.config import OptimizerConfig
from headwater.data.pack import pack
from headwater.data.render import Renderer
from headwater.data.tasks import TasksConfig, load_tasks
from headwater.engines.torch_engine import TorchEngine
from headwater.evaluation.held_out import evaluate
from headwater.models.load import ModelConfig, load
from headwater.rewards.source import judge, verifier
from headwater.rollout.episode import rollout
from headwater.runtime.learner import Learner
from headwater.runtime.stream import visits
from headwater.types import Sampling, Task


@verifier(name="digits")
def digits(text: str, task: Task) -> float:
    """The share of the answer that is digits: something that any model can learn to do."""
    return sum(map(str.isdigit, text)) / max(1, len(text))


def main(model: str = "fake:tabular", steps: int = 40) -> float:
    # Something to be done, and someone to do it.
    tasks = load_tasks(TasksConfig(source="sums", count=200))
    held_out = load_tasks(TasksConfig(source="sums", count=16, settings={"part": "held_out"}))
    policy = load(ModelConfig(name=model))
    renderer = Renderer(policy.tokenizer, "auto", policy.end_of_turn_ids)

    # Who says what is good, and what becomes of it: a row of the table, if the signals allow it.
    sources = [(digits, 1.0)]
    algorithm = choose("grpo", {"clip_high": 0.28}, digits.offers)

    # The engine samples on the learner's own weights.
    sampling = Sampling(max_tokens=12)
    learner = Learner(policy, OptimizerConfig(lr=0.3 if model == "fake:tabular" else 2e-5), steps=steps)
    engine = TorchEngine(policy)

    def measure() -> float:
        return evaluate(engine, renderer, held_out, sources, Sampling(temperature=0, max_tokens=12)).accuracy

    before = measure()
    for step in range(steps):
        chosen = visits(tasks, step, count=4, seed=0)
        groups = asyncio.run(rollout(engine, renderer, chosen, sampling, siblings=8, run_seed=0))
        groups = asyncio.run(judge(groups, sources))
        batch = pack(groups, algorithm, temperature=sampling.temperature, length=sampling.max_tokens)
        update = learner.step(batch)
        engine.publish(learner.version)
        rewards = [t.reward for group in groups for t in group.trajectories if t.reward is not None]
        mean = sum(rewards) / len(rewards)
        print(f"step {step:3d}  reward {mean:.3f}  grad norm {update.grad_norm:.3f}  tokens {update.tokens}")
    after = measure()
    print(f"held-out reward {before:.3f} -> {after:.3f}")
    return after - before


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(arguments[0] if arguments else "fake:tabular", int(arguments[1]) if len(arguments) > 1 else 40)
