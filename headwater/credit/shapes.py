"""Shapes change the rewards of a step's groups before credit is given. What they cannot tell is
abstained, never 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from headwater.credit.apply import GREEDY, Function, at_level, compare
from headwater.credit.functions import zscore
from headwater.credit.sequential import How, aggregate, overlong
from headwater.credit.state import AdaptiveKL
from headwater.credit.tokens import Beta, adapt, sampled_kl
from headwater.types import Advantages, Credit, Group, Signal, Trajectory

Shape = Callable[[Sequence[Group]], Sequence[Group]]
"""Groups of a step -> the same groups with other rewards."""


def shaped(shape: Shape, credit: Credit) -> Credit:
    """The credit of what the shape makes of the groups."""

    def credited(groups: Sequence[Group]) -> Sequence[Advantages]:
        return credit(shape(groups))

    return credited


def overlong_penalty(limit: int, cushion: int) -> Shape:
    """Adds `overlong`, by how many tokens the policy wrote, to the episode reward (DAPO, Yu et al. 2025,
    arXiv:2503.14476)."""
    return _rewarded(lambda t, reward: reward + overlong(sum(t.turns), limit=limit, cushion=cushion))


def clipped_reward(low: float, high: float) -> Shape:
    """Keeps the episode reward within low … high."""
    assert low <= high, f"a reward cannot be kept within {low} and {high}"
    return _rewarded(lambda _, reward: min(max(reward, low), high))


def kl_in_reward(beta: Beta) -> Shape:
    """R - beta · Σ_t (log mu - log ref)_t, the KL of a whole episode in its reward (RLOO, Ahmadian et al.
    2024, arXiv:2402.14740, eq. 3).

    An AdaptiveKL moves once per call, after use. A greedy sibling keeps its reward: a baseline may be
    anything that does not depend on what was sampled, and its log-probs are not those of a sampler.
    """

    def less(trajectory: Trajectory, reward: float) -> float | None:
        if trajectory.agent == GREEDY:
            return reward
        kl_T = sampled_kl(trajectory)
        coefficient = beta.beta if isinstance(beta, AdaptiveKL) else beta
        return None if kl_T is None else reward - coefficient * float(kl_T.sum())

    def shape(groups: Sequence[Group]) -> Sequence[Group]:
        made = _rewarded(less)(groups)
        if isinstance(beta, AdaptiveKL):
            adapt(beta, groups)
        return made

    return shape


def process_reward(how: How) -> Shape:
    """The episode reward is the `aggregate` of the signal "step_reward", which it replaces so that no
    credit counts it twice."""

    def one(trajectory: Trajectory) -> Trajectory:
        found = trajectory.signal("step_reward")
        steps = () if found is None else at_level(found, "step").values
        reward = aggregate(torch.tensor(steps, dtype=torch.float64), how) if steps else None
        rest = tuple(signal for signal in trajectory.signals if signal.name != "step_reward")
        return _with_reward(replace(trajectory, signals=rest), reward, "no step was judged")

    return _each(one)


def process(how: How, function: Function = zscore) -> Credit:
    """Credit by comparing siblings on the `aggregate` of the rewards of their steps."""
    return shaped(process_reward(how), compare(function))


def _rewarded(function: Callable[[Trajectory, float], float | None]) -> Shape:
    """A shape of each episode reward that there is. The function says None where it cannot tell."""

    def one(trajectory: Trajectory) -> Trajectory:
        if trajectory.reward is None:
            return trajectory
        return _with_reward(trajectory, function(trajectory, trajectory.reward), "shaping lacks a log-prob")

    return _each(one)


def _each(function: Callable[[Trajectory], Trajectory]) -> Shape:
    return lambda groups: [replace(group, trajectories=tuple(map(function, group.trajectories))) for group in groups]


def _with_reward(trajectory: Trajectory, reward: float | None, note: str) -> Trajectory:
    rest = tuple(signal for signal in trajectory.signals if signal.name != "reward")
    if reward is None:
        made = Signal(source="shape", name="reward", status="abstained", note=note)
    else:
        made = Signal(source="shape", name="reward", values=(reward,))
    return replace(trajectory, signals=(*rest, made))
