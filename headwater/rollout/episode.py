"""Episodes of one or many turns, and groups of them.

A turn that the policy writes is a policy span; what the world answers is a world span; nothing that
was sampled is ever tokenised again. Tools and environments plug in as a `World`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from headwater.data.render import Renderer
from headwater.engines.base import Completion, Engine, Request, seed_of
from headwater.errors import WorldError
from headwater.types import Group, Message, Sampling, Signal, Span, Stop, Task, Trajectory


class World(Protocol):
    """What answers the policy between its turns: a tool runner, a game, another speaker. One per
    episode, so it may keep state."""

    async def respond(self, trajectory: Trajectory) -> Sequence[Message] | None:
        """The messages that follow the policy's last turn, or None when the episode is over.

        Raises WorldError (or OSError, TimeoutError) when it breaks: the episode ends with
        stop="error" and the run goes on.
        """
        ...


WorldFor = Callable[[Task], World | None]
"""The world in which a task is played; None for a single turn."""


def alone(task: Task) -> World | None:
    """No world: one prompt, one answer."""
    return None


async def episode(
    engine: Engine,
    renderer: Renderer,
    task: Task,
    sampling: Sampling,
    seed_for_turn: Callable[[int], int],
    world: World | None = None,
    max_turns: int = 1,
    agent: str = "policy",
) -> Trajectory:
    """Play one episode to its end. `sampling.max_tokens` bounds each turn."""

    def played(spans: Sequence[Span], stop: Stop, signals: tuple[Signal, ...] = ()) -> Trajectory:
        return Trajectory(task_id=task.id, spans=tuple(spans), stop=stop, agent=agent, signals=signals)

    spans: list[Span] = [renderer.prompt(task)]
    for turn in range(max_turns):
        prompt = tuple(token for span in spans for token in span.tokens)
        completion = await engine.generate(Request(prompt=prompt, sampling=sampling, seed=seed_for_turn(turn)))
        spans.extend(completion.spans)
        if completion.stop == "max_tokens":
            return played(spans, "max_tokens")
        if world is None:
            return played(spans, "done")
        try:
            messages = await world.respond(played(spans, "done"))
        except (WorldError, OSError, TimeoutError) as error:
            broken = Signal(source="world", name="error", status="failed", note=f"{type(error).__name__}: {error}")
            return played(spans, "error", (broken,))
        if messages is None:
            return played(spans, "done")
        tokens = renderer.continuation(messages)
        spans.append(Span(author="world", tokens=tokens, text=renderer.decode(tokens)))
    return played(spans, "max_turns")


async def rollout(
    engine: Engine,
    renderer: Renderer,
    visits: Sequence[tuple[Task, int]],
    sampling: Sampling,
    siblings: int,
    run_seed: int,
    world_for: WorldFor = alone,
    max_turns: int = 1,
    greedy: bool = False,
) -> list[Group]:
    """`siblings` episodes of each task, all at once. A visit is how often the task came before: it
    enters the seed, so that a second epoch samples anew. With `greedy` one more sibling, its last, is
    played greedily by the agent "greedy"."""

    def play(task: Task, visit: int, sibling: int) -> asyncio.Task[Trajectory]:
        def seed(turn: int) -> int:
            return seed_of(run_seed, task.id, visit, sibling, turn)

        agent = "greedy" if sibling == siblings else "policy"
        how = replace(sampling, temperature=0.0) if agent == "greedy" else sampling
        world = world_for(task)
        return asyncio.ensure_future(episode(engine, renderer, task, how, seed, world, max_turns, agent))

    playing = [[play(task, visit, sibling) for sibling in range(siblings + greedy)] for task, visit in visits]
    return [
        Group(task=task, trajectories=tuple([await each for each in episodes]))
        for (task, _), episodes in zip(visits, playing, strict=True)
    ]


def answer(engine: Engine, prompt: Span, sampling: Sampling, seed: int) -> Completion:
    """One turn to a prompt, for callers without an event loop."""
    return engine.complete([Request(prompt=prompt.tokens, sampling=sampling, seed=seed)])[0]
