"""Credits inside an episode: a number for each token, turn or step of the policy.

A trajectory that lacks a signal takes no part; it is never given a 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headwater.credit.apply import GREEDY, Function, at_level, each, unless_flat
from headwater.credit.functions import zscore
from headwater.credit.sequential import (
    FloatT1,
    VTrace,
    bi_level_gae,
    gae,
    reward_to_go,
    spread_turns,
    sum_turns,
    turn_gae,
    turn_returns,
    vtrace,
)
from headwater.credit.state import AdaptiveKL
from headwater.types import Advantages, Credit, FloatK, FloatT, Group, Trajectory

Beta = float | AdaptiveKL
"""A KL coefficient, or what keeps one; see `adapted`."""

REWARDS = ("reward", "turn_reward", "step_reward")
TRUNCATED = ("max_tokens", "max_turns")


def token_rewards(trajectory: Trajectory, *, kl: Beta = 0.0) -> FloatT | None:
    """reward_T: a reward for each token of the policy, float64 and without gradient.

        r_t = -kl·(log mu - log ref)_t, plus each turn's reward at its last token, plus each step's at
              its end, plus the episode's at the last token of all, never beyond it

    The KL in the reward is Ziegler et al. 2019's (arXiv:1909.08593). Turns and steps are the signals
    "turn_reward" and "step_reward". None where none of the rewards is known, where one that was asked
    for could not be told, or where a KL is wanted and a log-prob is missing.
    """
    turns = trajectory.turns
    count = sum(turns)
    found = {name: trajectory.signal(name) for name in REWARDS}
    asked = {signal.name for signal in trajectory.signals}
    if count == 0 or not any(found.values()) or any(found[name] is None for name in asked.intersection(REWARDS)):
        return None
    reward_T = torch.zeros(count, dtype=torch.float64)
    beta = kl.beta if isinstance(kl, AdaptiveKL) else kl
    if beta != 0:
        kl_T = sampled_kl(trajectory)
        if kl_T is None:
            return None
        reward_T -= beta * kl_T
    if turn := found["turn_reward"]:
        # a turn without a token, at the very start, leaves its reward to the first token
        ends = torch.tensor(turns).cumsum(0).sub(1).clamp(min=0)
        reward_T.index_add_(0, ends, _tensor(at_level(turn, "turn").values))
    if step := found["step_reward"]:
        ends = torch.tensor(at_level(step, "step").ends, dtype=torch.long)
        reward_T.index_add_(0, ends, _tensor(step.values))
    if episode := found["reward"]:
        reward_T[-1] += at_level(episode, "episode").values[0]
    return reward_T


def sampled_kl(trajectory: Trajectory) -> FloatT | None:
    """log mu - log ref at each token of the policy, whose expected sum is KL(mu ‖ ref) in nats. None
    where either log-prob is missing."""
    ref = trajectory.signal("ref_logp")
    if trajectory.logps is None or ref is None:
        return None
    logp_T, ref_logp_T = _tensor(trajectory.logps), _tensor(at_level(ref, "token").values)
    assert len(logp_T) == len(ref_logp_T), f"{len(ref_logp_T)} ref_logp for {len(logp_T)} tokens of the policy"
    return logp_T - ref_logp_T


def turn_rewards(trajectory: Trajectory) -> FloatK | None:
    """reward_K: what `token_rewards` adds up to in each turn, so the episode's reward is the last turn's."""
    reward_T = token_rewards(trajectory)
    return None if reward_T is None else sum_turns(reward_T, trajectory.turns)


def values(trajectory: Trajectory) -> FloatT1 | None:
    """value_T1 by the critic. After the last token it is 0, unless an episode rewarded by turns or steps
    was cut short: then what the critic expects still to come counts. A reward of the episode has judged
    the text as it stands, cut or not, and nothing comes after it; to add a value would count it twice, and
    where every answer is cut, values would grow without end."""
    found = trajectory.signal("value")
    if found is None:
        return None
    value_T1 = _tensor(at_level(found, "token").values)
    if trajectory.stop not in TRUNCATED or trajectory.signal("reward") is not None:
        value_T1[-1] = 0.0
    return value_T1


def stepwise(name: str) -> Credit:
    """Targets at the ends of steps alone: the values of the step-level signal `name`. All other tokens,
    and trajectories without a step, take no part (process reward models)."""

    def one(trajectory: Trajectory) -> Tensor | None:
        found = trajectory.signal(name)
        if found is None or not at_level(found, "step").ends:
            return None
        target_T = torch.full((sum(trajectory.turns),), float("nan"), dtype=torch.float64)
        target_T[torch.tensor(found.ends)] = _tensor(found.values)
        return target_T

    return each(one)


def to_go(gamma: float = 1.0, kl: Beta = 0.0) -> Credit:
    """A_t = the rewards still to come at token t. Whitened over the step, with a KL in the reward, it is
    REINFORCE++ (Hu et al. 2025, arXiv:2501.03262)."""

    def one(trajectory: Trajectory) -> Tensor | None:
        reward_T = token_rewards(trajectory, kl=kl)
        return None if reward_T is None else reward_to_go(reward_T, gamma=gamma)

    return each(one)


def generalised(gamma: float = 1.0, lam: float = 0.95, kl: Beta = 0.0) -> Credit:
    """A_t by `gae` over tokens: the credit of PPO. Needs the signal "value"."""
    return _estimated(lambda reward_T, value_T1, _: gae(reward_T, value_T1, gamma=gamma, lam=lam), kl)


def value_target(gamma: float = 1.0, lam: float = 0.95, kl: Beta = 0.0) -> Credit:
    """The critic's target at each token: the advantage of `generalised`, never whitened, plus the value."""

    def one(reward_T: FloatT, value_T1: FloatT1, _: Sequence[int]) -> FloatT:
        return gae(reward_T, value_T1, gamma=gamma, lam=lam) + value_T1[:-1]

    return _estimated(one, kl)


def v_trace(gamma: float = 1.0, lam: float = 1.0, rho_bar: float = 1.0, c_bar: float = 1.0, kl: Beta = 0.0) -> Credit:
    """A_t by `vtrace`, its ratio from the signal "logp" (log pi_old, by the learner's arithmetic) and the
    log-probs of the sampler."""
    return _traced(lambda trace: trace.advantage_T, gamma, lam, rho_bar, c_bar, kl)


def v_trace_target(
    gamma: float = 1.0, lam: float = 1.0, rho_bar: float = 1.0, c_bar: float = 1.0, kl: Beta = 0.0
) -> Credit:
    """The critic's target that goes with `v_trace`."""
    return _traced(lambda trace: trace.target_T, gamma, lam, rho_bar, c_bar, kl)


def turnwise(gamma: float = 1.0) -> Credit:
    """A = a turn's discounted return less the mean over all turns of its group, at each of its tokens.
    Siblings are compared, so two must have rewards; where all returns are equal, all are exactly 0."""

    def one(group: Group) -> Advantages:
        returns = _returns(group, gamma)
        known = [return_K for return_K in returns if return_K is not None]
        if len(known) < 2:
            return (None,) * len(returns)
        return_N = torch.cat(known)
        mean = return_N[0] if bool((return_N == return_N[0]).all()) else return_N.mean()
        return tuple(
            None if return_K is None else spread_turns(return_K - mean, trajectory.turns)
            for trajectory, return_K in zip(group.trajectories, returns, strict=True)
        )

    return lambda groups: [one(group) for group in groups]


def turn_generalised(gamma: float = 1.0, lam: float = 0.95) -> Credit:
    """A of each turn by `turn_gae`, at each of its tokens. Needs the signal "value"."""

    def one(reward_T: FloatT, value_T1: FloatT1, turns: Sequence[int]) -> FloatT:
        return spread_turns(turn_gae(sum_turns(reward_T, turns), value_T1, turns, gamma=gamma, lam=lam), turns)

    return _estimated(one, 0.0)


def bi_level(
    gamma_turn: float = 0.95, lam_turn: float = 1.0, gamma: float = 1.0, lam: float = 1.0, kl: Beta = 0.0
) -> Credit:
    """A_t by `bi_level_gae`, over turns and then inside them. Needs the signal "value"."""

    def one(reward_T: FloatT, value_T1: FloatT1, turns: Sequence[int]) -> FloatT:
        return bi_level_gae(reward_T, value_T1, turns, gamma_turn=gamma_turn, lam_turn=lam_turn, gamma=gamma, lam=lam)

    return _estimated(one, kl)


def turn_value_target(gamma: float = 1.0, lam: float = 0.95) -> Credit:
    """The critic's target that goes with `turn_generalised`: A + V of each turn at its first token, where
    alone that reads a value. All other tokens take no part."""

    def one(reward_T: FloatT, value_T1: FloatT1, turns: Sequence[int]) -> FloatT:
        advantage_K = turn_gae(sum_turns(reward_T, turns), value_T1, turns, gamma=gamma, lam=lam)
        first_T = torch.zeros(len(reward_T), dtype=torch.bool)
        first_T[torch.tensor([0, *turns]).cumsum(0)[:-1][torch.tensor(turns) > 0]] = True
        return torch.where(first_T, spread_turns(advantage_K, turns) + value_T1[:-1], torch.nan)

    return _estimated(one, 0.0)


def bi_level_target(
    gamma_turn: float = 0.95, lam_turn: float = 1.0, gamma: float = 1.0, lam: float = 1.0, kl: Beta = 0.0
) -> Credit:
    """The critic's target at each token that goes with `bi_level`: its advantage plus the value."""

    def one(reward_T: FloatT, value_T1: FloatT1, turns: Sequence[int]) -> FloatT:
        advantage_T = bi_level_gae(
            reward_T, value_T1, turns, gamma_turn=gamma_turn, lam_turn=lam_turn, gamma=gamma, lam=lam
        )
        return advantage_T + value_T1[:-1]

    return _estimated(one, kl)


def step_groups(gamma: float = 0.95, omega: float = 1.0, *, function: Function = zscore) -> Credit:
    """A = A_episode + omega · A_step at each token of a turn (GiGPO, Feng et al. 2025, arXiv:2505.10978).

    A_episode compares siblings on the sum of their rewards. A_step compares turns, on their discounted
    returns, that begin in the same state: wherever siblings, or one of them twice, read exactly the same
    text last, the prompt before the first turn and what the world said since the turn before otherwise.
    A turn that begins where no other does gets A_step = 0. `function` compares: the paper's norm is the
    standard deviation (`zscore`) or 1 (`centred`).
    """

    def one(group: Group) -> Advantages:
        returns = _returns(group, gamma)
        totals = [None if row is None else row.sum() for row in map(_learnable_turn_rewards, group.trajectories)]
        known = [total for total in totals if total is not None]
        if len(known) < 2:
            return (None,) * len(totals)
        episode = iter(unless_flat(function)(torch.stack(known)))
        steps = _anchored(group, returns, function)
        return tuple(
            None if step_K is None else spread_turns(next(episode) + omega * step_K, trajectory.turns)
            for trajectory, step_K in zip(group.trajectories, steps, strict=True)
        )

    return lambda groups: [one(group) for group in groups]


def adapted(controller: AdaptiveKL, credit: Credit) -> Credit:
    """The credit, after which `controller` moves its coefficient by this step's mean KL to the reference.
    Wrap the last term that reads the controller, so that all terms of a step use the same one."""

    def adapting(groups: Sequence[Group]) -> Sequence[Advantages]:
        given = credit(groups)
        adapt(controller, groups)
        return given

    return adapting


def adapt(controller: AdaptiveKL, groups: Sequence[Group]) -> None:
    """Moves the controller by the mean over sampled sequences of their summed KL to the reference."""
    sampled = [sampled_kl(t) for group in groups for t in group.trajectories if t.agent != GREEDY]
    sums = [float(kl_T.sum()) for kl_T in sampled if kl_T is not None]
    if sums:
        controller.update(sum(sums) / len(sums), len(sums))


def _estimated(function: Callable[[FloatT, FloatT1, Sequence[int]], FloatT], kl: Beta) -> Credit:
    def one(trajectory: Trajectory) -> Tensor | None:
        reward_T, value_T1 = token_rewards(trajectory, kl=kl), values(trajectory)
        if reward_T is None or value_T1 is None:
            return None
        return function(reward_T, value_T1, trajectory.turns)

    return each(one)


def _traced(
    take: Callable[[VTrace], FloatT], gamma: float, lam: float, rho_bar: float, c_bar: float, kl: Beta
) -> Credit:
    def one(trajectory: Trajectory) -> Tensor | None:
        reward_T, value_T1 = token_rewards(trajectory, kl=kl), values(trajectory)
        logp = trajectory.signal("logp")
        if reward_T is None or value_T1 is None or logp is None or trajectory.logps is None:
            return None
        log_rho_T = _tensor(at_level(logp, "token").values) - _tensor(trajectory.logps)
        return take(vtrace(reward_T, value_T1, log_rho_T, gamma=gamma, lam=lam, rho_bar=rho_bar, c_bar=c_bar))

    return each(one)


def _learnable_turn_rewards(trajectory: Trajectory) -> Tensor | None:
    return None if trajectory.agent == GREEDY else turn_rewards(trajectory)


def _returns(group: Group, gamma: float) -> list[Tensor | None]:
    rewards = map(_learnable_turn_rewards, group.trajectories)
    return [None if reward_K is None else turn_returns(reward_K, gamma=gamma) for reward_K in rewards]


def _anchored(group: Group, returns: Sequence[Tensor | None], function: Function) -> list[Tensor | None]:
    """Each turn compared with the turns of the group that begin in the same state."""
    met: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for i, (trajectory, return_K) in enumerate(zip(group.trajectories, returns, strict=True)):
        if return_K is not None:
            for k, anchor in enumerate(_anchors(trajectory)):
                met[anchor].append((i, k))
    compared = [None if return_K is None else torch.zeros_like(return_K) for return_K in returns]
    for places in met.values():
        return_G = torch.stack([_at(returns, i, k) for i, k in places])  # of one alone: flat, so 0
        for (i, k), advantage in zip(places, unless_flat(function)(return_G), strict=True):
            _at(compared, i, k).copy_(advantage)
    return compared


def _at(rows: Sequence[Tensor | None], i: int, k: int) -> Tensor:
    row = rows[i]
    assert row is not None, "only who has a return is compared"
    return row[k]


def _anchors(trajectory: Trajectory) -> list[str]:
    """What was read last before each turn: the text since the policy last spoke."""
    anchors: list[str] = []
    read: list[str] = []
    speaking = False
    for span in trajectory.spans:
        if span.author != "policy":
            read.append(span.text)
        elif not speaking:
            anchors.append("".join(read))
            read = []
        speaking = span.author == "policy"
    return anchors


def _tensor(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)
