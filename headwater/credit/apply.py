"""From functions of rewards to credits of whole groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headwater.types import Advantages, Credit, Group


def compare(function: Callable[[Tensor], Tensor]) -> Credit:
    """Credit by comparing siblings on their episode reward.

    Siblings that no source could judge take no part: they have no advantage and do not shift the
    others' baseline. Fewer than two judged siblings cannot be compared, and have none either. A flat
    group gets exactly 0 whatever rounding does to its mean.
    """

    def credit(groups: Sequence[Group]) -> list[Advantages]:
        return [_judged(group, function, at_least=2) for group in groups]

    return credit


def each(function: Callable[[Tensor], Tensor]) -> Credit:
    """Credit to each trajectory by its own reward; a single sibling will do."""

    def credit(groups: Sequence[Group]) -> list[Advantages]:
        return [_judged(group, function, at_least=1) for group in groups]

    return credit


def _judged(group: Group, function: Callable[[Tensor], Tensor], at_least: int) -> Advantages:
    rewards = [trajectory.reward for trajectory in group.trajectories]
    known = [reward for reward in rewards if reward is not None]
    if len(known) < at_least:
        return (None,) * len(rewards)
    reward_G = torch.tensor(known, dtype=torch.float64)
    flat = at_least > 1 and max(known) == min(known)
    advantages = iter(torch.zeros_like(reward_G) if flat else function(reward_G))
    return tuple(None if reward is None else next(advantages) for reward in rewards)


def judged(groups: Sequence[Group]) -> list[Advantages]:
    """1 for every trajectory that has a reward: for terms, such as a KL, that hold for all that is
    trained on and weigh no one more than another."""
    one = torch.ones(())
    return [tuple(None if t.reward is None else one for t in group.trajectories) for group in groups]


def demonstrated(groups: Sequence[Group]) -> list[Advantages]:
    """1 for every trajectory: what is demonstrated is to be imitated."""
    one = torch.ones(())
    return [(one,) * len(group.trajectories) for group in groups]
