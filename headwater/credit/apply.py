"""From functions of rewards to credits of whole groups: one number for each episode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from headwater.credit.functions import best_and_worst, centred
from headwater.credit.state import RunningMean
from headwater.types import Advantages, Credit, FloatG, Group, Level, Signal, Trajectory

GREEDY = "greedy"
"""The agent of a sibling that was decoded greedily: it is compared with (ReMax), never trained on, and
in no baseline of others."""

Function = Callable[[FloatG], FloatG]
"""reward_G -> advantage_G."""


def compare(function: Function) -> Credit:
    """Credit by comparing siblings on their episode reward.

    Siblings that no source could judge take no part: they have no advantage and do not shift the
    others' baseline. Fewer than two judged siblings cannot be compared, and have none either. A flat
    group gets exactly 0 whatever rounding does to its mean.
    """

    def credit(groups: Sequence[Group]) -> list[Advantages]:
        return [_compared(map(reward_of, group.trajectories), unless_flat(function)) for group in groups]

    return credit


def across(function: Function) -> Credit:
    """Credit by comparing all trajectories of the step, whichever task they are of; a group of one
    will do."""

    def credit(groups: Sequence[Group]) -> list[Advantages]:
        rewards = [reward_of(trajectory) for group in groups for trajectory in group.trajectories]
        given = iter(_compared(rewards, unless_flat(function)))
        return [tuple(next(given) for _ in group.trajectories) for group in groups]

    return credit


def each(function: Callable[[Trajectory], Tensor | None]) -> Credit:
    """Credit that looks at one trajectory at a time. A greedy sibling gets none."""

    def credit(groups: Sequence[Group]) -> list[Advantages]:
        return [tuple(None if t.agent == GREEDY else function(t) for t in group.trajectories) for group in groups]

    return credit


def raw(groups: Sequence[Group]) -> Sequence[Advantages]:
    """A = reward: REINFORCE without a baseline (Williams 1992). Unbiased, and as noisy as it can be."""
    return each(_reward)(groups)


def remax(groups: Sequence[Group]) -> list[Advantages]:
    """A = reward - the greedy sibling's reward (ReMax, Li et al. 2023, arXiv:2310.10505). Without a greedy
    sibling that was judged there is no baseline, and none of the group takes part."""

    def one(group: Group) -> Advantages:
        base = next((t.reward for t in group.trajectories if t.agent == GREEDY), None)
        if base is None:
            return (None,) * len(group.trajectories)
        return tuple(_scalar(None if r is None else r - base) for r in map(reward_of, group.trajectories))

    return [one(group) for group in groups]


def running(baseline: RunningMean) -> Credit:
    """A = reward - the mean of all rewards of earlier steps. This step's are taken in after use, so no
    reward is in its own baseline: give a run's only credit of this kind to one term alone."""

    def credit(groups: Sequence[Group]) -> list[Advantages]:
        rewards = [[reward_of(t) for t in group.trajectories] for group in groups]
        given = [tuple(_scalar(None if r is None else r - baseline.mean) for r in row) for row in rewards]
        baseline.update([r for row in rewards for r in row if r is not None])
        return given

    return credit


def preferred(groups: Sequence[Group]) -> list[Advantages]:
    """Targets of a preference: the signal "preference" of each sibling, where the higher one is better.
    A group in which fewer than two have one, or in which all are equal, prefers nothing: none takes part."""

    def one(group: Group) -> Advantages:
        told = [None if t.agent == GREEDY else episode_value(t, "preference") for t in group.trajectories]
        known = {value for value in told if value is not None}
        return tuple(map(_scalar, told)) if len(known) > 1 else (None,) * len(told)

    return [one(group) for group in groups]


def ranked(groups: Sequence[Group]) -> list[Advantages]:
    """Targets of a preference that the reward states: 1 for the best sibling, 0 for the worst, see
    `best_and_worst`. The others take no part, and none of a flat group does."""
    return [_compared(map(reward_of, group.trajectories), best_and_worst) for group in groups]


def labelled(name: str) -> Credit:
    """Targets of a label: the episode-level signal `name` of each trajectory; who has none takes no part."""
    return each(lambda trajectory: _scalar(episode_value(trajectory, name)))


def judged(groups: Sequence[Group]) -> Sequence[Advantages]:
    """1 for every trajectory that has a reward: for terms, such as a KL, that hold for all that is
    trained on and weigh no one more than another."""
    one = torch.ones(())
    return each(lambda trajectory: None if trajectory.reward is None else one)(groups)


def demonstrated(groups: Sequence[Group]) -> list[Advantages]:
    """1 for every trajectory: what is demonstrated is to be imitated."""
    one = torch.ones(())
    return [(one,) * len(group.trajectories) for group in groups]


def above(threshold: float) -> Credit:
    """1 where the episode reward is at least `threshold`, and no part for the rest: what is imitated in
    rejection-sampling fine-tuning (Yuan et al. 2023, arXiv:2308.01825)."""

    def one(trajectory: Trajectory) -> Tensor | None:
        reward = reward_of(trajectory)
        return None if reward is None or reward < threshold else torch.ones(())

    return each(one)


def whitened(credit: Credit, *, centre: bool = True, eps: float = 1e-8) -> Credit:
    """(A - mean) / (std + eps) over all tokens of the step: every token of every trajectory counts once,
    and an advantage of a whole episode once for each of its tokens. Who takes no part is left out. The
    standard deviation is the population's. Where all are equal, all are exactly 0. Without `centre` the
    mean is taken to be 0: an advantage of 0 stays 0."""

    def white(groups: Sequence[Group]) -> list[Advantages]:
        given = credit(groups)
        value_N, count_N = _weighed(groups, given)
        if len(value_N) == 0:
            return list(given)
        mean = (value_N * count_N).sum() / count_N.sum() if centre else value_N.new_zeros(())
        std = ((value_N - mean).square() * count_N).sum().div(count_N.sum()).sqrt()
        flat = bool(value_N.max() == value_N.min())

        def scaled(advantage: Tensor) -> Tensor:
            # a token that takes no part is NaN, and stays so in a flat step too
            return advantage - advantage if flat else (advantage - mean) / (std + eps)

        return [tuple(None if a is None else scaled(a.detach().double()) for a in row) for row in given]

    return white


def baseline_then_whitened(groups: Sequence[Group]) -> Sequence[Advantages]:
    """REINFORCE++ with a baseline: the siblings' mean is taken off, and the step is then scaled to a deviation
    of 1 over tokens (Hu et al. 2025, arXiv:2501.03262). The mean over answers is 0 by then. That over tokens
    need not be, where right answers are longer or shorter than wrong ones; to take it off, as the paper
    does, would push groups whose rewards are all equal, which teach nothing."""
    return whitened(compare(centred), centre=False)(groups)


def not_flat(group: Group) -> bool:
    """Whether the judged rewards of a group differ: what dynamic sampling keeps (DAPO, Yu et al. 2025,
    arXiv:2503.14476, eq. 11). Ask it before any shaping: a length penalty would let an all-correct group pass."""
    return len({r for r in map(reward_of, group.trajectories) if r is not None}) > 1


def reward_of(trajectory: Trajectory) -> float | None:
    """The episode reward of a trajectory that is trained on; None for a greedy one."""
    return None if trajectory.agent == GREEDY else trajectory.reward


def episode_value(trajectory: Trajectory, name: str) -> float | None:
    """The number of the episode-level signal `name`, or None where no source could tell."""
    found = trajectory.signal(name)
    return None if found is None else at_level(found, "episode").values[0]


def at_level(signal: Signal, level: Level) -> Signal:
    """The signal, which must be of that level: numbers of another would be read as something else."""
    assert signal.level == level, f"signal '{signal.name}' of {signal.source} is of level {signal.level}, not {level}"
    return signal


def unless_flat(function: Function) -> Function:
    """The function, but exactly 0 for rewards that are all equal."""
    return lambda reward_G: torch.zeros_like(reward_G) if bool((reward_G == reward_G[0]).all()) else function(reward_G)


def _compared(rewards: Iterable[float | None], function: Function) -> Advantages:
    rewards = list(rewards)
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2:
        return (None,) * len(rewards)
    given = iter(function(torch.tensor(known, dtype=torch.float64)))
    advantages = (None if reward is None else next(given) for reward in rewards)
    return tuple(None if a is None or bool(a.isnan()) else a for a in advantages)


def _weighed(groups: Sequence[Group], given: Sequence[Advantages]) -> tuple[Tensor, Tensor]:
    """All numbers that take part, and how many tokens each stands for."""
    values: list[Tensor] = []
    counts: list[Tensor] = []
    for group, row in zip(groups, given, strict=True):
        for trajectory, advantage in zip(group.trajectories, row, strict=True):
            if advantage is None:
                continue
            tokens = sum(trajectory.turns) if advantage.dim() == 0 else 1
            value = advantage.detach().double().reshape(-1)
            value = value[~value.isnan()] if tokens else value[:0]
            values.append(value)
            counts.append(torch.full_like(value, tokens))
    empty = torch.zeros(0, dtype=torch.float64)
    return torch.cat([empty, *values]), torch.cat([empty, *counts])


def _reward(trajectory: Trajectory) -> Tensor | None:
    return _scalar(trajectory.reward)


def _scalar(value: float | None) -> Tensor | None:
    return None if value is None else torch.tensor(value, dtype=torch.float64)
