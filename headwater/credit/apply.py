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
        return [_compared([t.reward for t in group.trajectories], function) for group in groups]

    return credit


def across(function: Callable[[Tensor], Tensor]) -> Credit:
    """Credit by comparing all trajectories of the step, whichever task they are of; a group of one
    will do."""

    def credit(groups: Sequence[Group]) -> list[Advantages]:
        rewards = [trajectory.reward for group in groups for trajectory in group.trajectories]
        given = iter(_compared(rewards, function))
        return [tuple(next(given) for _ in group.trajectories) for group in groups]

    return credit


def _compared(rewards: Sequence[float | None], function: Callable[[Tensor], Tensor]) -> Advantages:
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2:
        return (None,) * len(rewards)
    reward_G = torch.tensor(known, dtype=torch.float64)
    flat = max(known) == min(known)
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
