"""Held-out accuracy: the same tasks, sources and sampling each time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.data.render import Renderer
from headwater.engines.base import Engine, Request, seed_of
from headwater.engines.torch_engine import TorchEngine
from headwater.models.policy import Policy
from headwater.rewards.source import Source, judge
from headwater.types import Group, Message, Sampling, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One held-out task and what the policy answered."""

    prompt: str
    answer: str | None
    text: str
    reward: float | None
    stop: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """`accuracy` is the mean reward over judged answers: with a 0/1 verifier, the share that is
    right. `n` were judged; `unjudged` were not and do not count as wrong."""

    accuracy: float
    n: int
    unjudged: int
    samples: tuple[Sample, ...]

    @property
    def interval(self) -> tuple[float, float]:
        """95% Wilson score interval (Wilson 1927) of the accuracy, for 0/1 rewards."""
        return wilson(self.accuracy, self.n)


def wilson(share: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson score interval for a share out of n: (p + z²/2n ± z·sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n).

    Stays within [0, 1] and is honest at shares near 0 and 1, where p ± 2·sd is not (Wilson 1927).
    """
    if n == 0:
        return 0.0, 1.0
    share = min(1.0, max(0.0, share))
    centre = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # min and max with the share itself: rounding must not put it outside
    return max(0.0, min(share, (centre - spread) / scale)), min(1.0, max(share, (centre + spread) / scale))


def evaluate(
    engine: Engine,
    renderer: Renderer,
    tasks: Sequence[Task],
    sources: Sequence[tuple[Source, float]],
    sampling: Sampling,
    seed: int = 0,
) -> Evaluation:
    """One answer to each task, judged."""
    prompts = [renderer.prompt(task) for task in tasks]
    requests = [
        Request(prompt=prompt.tokens, sampling=sampling, seed=seed_of(seed, task.id, 0, 0, 0))
        for task, prompt in zip(tasks, prompts, strict=True)
    ]
    completions = engine.complete(requests)
    groups = [
        Group(
            task=task,
            trajectories=(Trajectory(task_id=task.id, spans=(prompt, *done.spans), stop=done.stop),),
        )
        for task, prompt, done in zip(tasks, prompts, completions, strict=True)
    ]
    judged = [group.trajectories[0] for group in asyncio.run(judge(groups, sources))]
    rewards = [t.reward for t in judged if t.reward is not None]
    samples = tuple(
        Sample(prompt=_asked(task), answer=task.answer, text=t.text, reward=t.reward, stop=t.stop)
        for task, t in zip(tasks, judged, strict=True)
    )
    accuracy = sum(rewards) / len(rewards) if rewards else math.nan
    return Evaluation(accuracy=accuracy, n=len(rewards), unjudged=len(judged) - len(rewards), samples=samples)


def _asked(task: Task) -> str:
    return task.prompt if isinstance(task.prompt, str) else task.prompt[-1]["content"]


def reply(policy: Policy, renderer: Renderer, messages: Sequence[Message], sampling: Sampling, seed: int = 0) -> str:
    """What the policy says next in a conversation."""
    prompt = renderer.prompt(Task(id="chat", prompt=tuple(messages)))
    request = Request(prompt=prompt.tokens, sampling=sampling, seed=seed)
    return TorchEngine(policy).complete([request])[0].text
