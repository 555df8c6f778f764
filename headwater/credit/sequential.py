"""Advantages inside one trajectory, over the tokens, turns or steps of the policy.

Arrays of axis T hold only the tokens that the policy wrote, in order. What the world wrote between two
turns is skipped by construction: the value after a turn's last token is the one before the next turn's
first, and nothing is reset there. `value_T1` has one entry more, the value of what is to come after
the last token: 0 where no reward is to come, the critic's word where an episode was cut short. Whoever
calls sets it. `turns` is how many tokens each turn has. Results are float64 and have no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, assert_never

import torch
from jaxtyping import Float
from torch import Tensor

from headwater.types import FloatK, FloatT

FloatT1 = Float[Tensor, "T1"]

How = Literal["min", "product", "last", "mean"]


def gae(reward_T: FloatT, value_T1: FloatT1, *, gamma: float, lam: float) -> FloatT:
    """Generalised advantage estimation, advantage_T: TD errors, added up with decay gamma·lam.

        d_t = r_t + gamma·V_{t+1} - V_t        A_t = d_t + gamma·lam·A_{t+1}

    lam = 1 is return minus value, lam = 0 the TD error alone (Schulman et al. 2016, arXiv:1506.02438,
    eq. 16). The critic's target is A + V, of the A before any whitening.
    """
    return _sums(_errors(reward_T, value_T1, gamma), gamma * lam)


def reward_to_go(reward_T: FloatT, *, gamma: float) -> FloatT:
    """return_T: G_t = r_t + gamma·G_{t+1}, what is still to come from token t on, it included."""
    return _sums(reward_T, gamma)


class VTrace(NamedTuple):
    """What V-trace says: `target_T` for the critic, `advantage_T` for the policy."""

    target_T: FloatT
    advantage_T: FloatT


def vtrace(
    reward_T: FloatT,
    value_T1: FloatT1,
    log_rho_T: FloatT,
    *,
    gamma: float,
    lam: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> VTrace:
    """Targets corrected for a sampler that has fallen behind; `log_rho_T` is log pi - log mu, in nats.

        rho_t = min(rho_bar, pi/mu)            c_t = lam·min(c_bar, pi/mu)
        d_t   = rho_t·(r_t + gamma·V_{t+1} - V_t)
        v_t   = V_t + d_t + gamma·c_t·(v_{t+1} - V_{t+1})
        A_t   = rho_t·(r_t + gamma·v_{t+1} - V_t)

    IMPALA (Espeholt et al. 2018, arXiv:1802.01561, eq. 1). rho_bar settles what policy the values are
    of, c_bar <= rho_bar only how fast they get there. The advantage carries rho_t already: its loss must
    not multiply by a ratio to mu once more. With pi = mu and lam = 1, v is the n-step return.
    """
    assert c_bar <= rho_bar, f"V-trace wants c_bar <= rho_bar, and they are {c_bar} and {rho_bar}"
    ratio_T = log_rho_T.detach().double().exp()
    rho_T, c_T = ratio_T.clamp(max=rho_bar), lam * ratio_T.clamp(max=c_bar)
    value_T1 = value_T1.detach().double()
    excess_T = _sums(rho_T * _errors(reward_T, value_T1, gamma), gamma * c_T)
    target_T1 = torch.cat((value_T1[:-1] + excess_T, value_T1[-1:]))
    advantage_T = rho_T * (reward_T.detach().double() + gamma * target_T1[1:] - value_T1[:-1])
    return VTrace(target_T1[:-1], advantage_T)


def turn_returns(reward_K: FloatK, *, gamma: float) -> FloatK:
    """return_K: G_k = r_k + gamma·G_{k+1}. Discounted by turns, however long they are."""
    return _sums(reward_K, gamma)


def turn_gae(reward_K: FloatK, value_T1: FloatT1, turns: Sequence[int], *, gamma: float, lam: float) -> FloatK:
    """advantage_K of whole turns: `gae` in which a turn is one action and its state is read where it
    begins, V_k = the value before its first token; after the last turn stands value_T1[-1].

    Turn-level GAE of agents that speak in turns, as in Turn-PPO (arXiv:2512.17008).
    """
    _check(turns, value_T1)
    starts = torch.tensor([0, *turns], dtype=torch.long).cumsum(0)
    return gae(reward_K, value_T1[starts], gamma=gamma, lam=lam)


def bi_level_gae(
    reward_T: FloatT,
    value_T1: FloatT1,
    turns: Sequence[int],
    *,
    gamma_turn: float,
    lam_turn: float,
    gamma: float,
    lam: float,
) -> FloatT:
    """advantage_T by two passes, so that turns and tokens have discounts of their own (VAGEN, Wang et
    al. 2025, arXiv:2510.16907).

    First over turns. Turn k is decided at its last token, e_k: its reward is the reward at e_k (the
    turn's, and the episode's at the last turn), its value the one before e_k, and V_K = value_T1[-1]:

        d_k = r_{e_k} + gamma_turn·V_{k+1} - V_k        B_k = d_k + gamma_turn·lam_turn·B_{k+1}

    Then over tokens, backward inside each turn and never across its end:

        A_{e_k} = B_k        A_t = r_t + gamma·V_{t+1} - V_t + gamma·lam·A_{t+1}    before e_k

    Value and advantage of a turn are read at the same token: read at its first, B_k at e_k would have a
    baseline of another state, and be biased. Rewards before e_k, such as a KL, thus count in their own
    turn only. With turns of one token it is `gae` by the turns' discounts. With all four at 1 and no
    reward before a turn's end it is return minus value. Turns without a token are passed over.
    """
    _check(turns, value_T1)
    counts = torch.tensor([count for count in turns if count], dtype=torch.long)
    end_K = counts.cumsum(0) - 1
    value_K1 = torch.cat((value_T1[end_K], value_T1[-1:]))
    advantage_K = gae(reward_T[end_K], value_K1, gamma=gamma_turn, lam=lam_turn)
    decay_T = torch.full((len(reward_T),), gamma * lam, dtype=torch.float64)
    decay_T[end_K] = 0.0
    error_T = _errors(reward_T, value_T1, gamma)
    error_T[end_K] = advantage_K
    return _sums(error_T, decay_T)


def spread_turns(value_K: FloatK, turns: Sequence[int]) -> FloatT:
    """value_T: each turn's number at every token of it."""
    return value_K.repeat_interleave(torch.tensor(turns, dtype=torch.long))


def sum_turns(value_T: FloatT, turns: Sequence[int]) -> FloatK:
    """value_K: what the tokens of each turn add up to."""
    of_T = torch.arange(len(turns)).repeat_interleave(torch.tensor(turns, dtype=torch.long))
    return value_T.new_zeros(len(turns)).index_add(0, of_T, value_T)


def aggregate(step_K: FloatK, how: How) -> float:
    """One number for a whole solution from one for each of its steps, such as P(step k is right).

    Lightman et al. 2023 (arXiv:2305.20050) take the product, and find the minimum close; the product
    favours short solutions. Snell et al. 2024 (arXiv:2408.03314) take the last. Without steps there is
    nothing to say: ValueError, never 0.
    """
    if len(step_K) == 0:
        raise ValueError("a solution without steps has no process reward")
    match how:
        case "min":
            return float(step_K.min())
        case "product":
            return float(step_K.prod())
        case "last":
            return float(step_K[-1])
        case "mean":
            return float(step_K.mean())
        case _:
            assert_never(how)


def overlong(length: int, *, limit: int, cushion: int) -> float:
    """What being long costs, 0 … -1: nothing up to limit - cushion tokens, then in proportion to how far
    into the cushion it is, and -1 from `limit` on. DAPO's soft overlong punishment (Yu et al. 2025,
    arXiv:2503.14476, eq. 13)."""
    assert 0 <= cushion <= limit, f"a cushion of {cushion} is not within a limit of {limit}"
    over = length - (limit - cushion)
    if over <= 0:
        return 0.0
    return -1.0 if over >= cushion else -over / cushion


def _errors(reward_T: Tensor, value_T1: Tensor, gamma: float) -> Tensor:
    """TD errors, float64."""
    assert len(value_T1) == len(reward_T) + 1, f"{len(reward_T)} rewards and {len(value_T1)} values: one more is wanted"
    reward_T, value_T1 = reward_T.detach().double(), value_T1.detach().double()
    return reward_T + gamma * value_T1[1:] - value_T1[:-1]


def _sums(value_T: Tensor, decay: Tensor | float) -> Tensor:
    """s_t = x_t + decay_t · s_{t+1}. In Python's floats, which are float64: a tensor per token is far slower."""
    sums = _numbers(value_T)
    decays = _numbers(torch.as_tensor(decay, dtype=torch.float64).expand(len(sums)))
    total = 0.0
    for t in reversed(range(len(sums))):
        total = sums[t] + decays[t] * total
        sums[t] = total
    return torch.tensor(sums, dtype=torch.float64)


def _numbers(value_T: Tensor) -> list[float]:
    return value_T.detach().tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _check(turns: Sequence[int], value_T1: Tensor) -> None:
    assert sum(turns) + 1 == len(value_T1), f"turns of {sum(turns)} tokens in all, and {len(value_T1)} values: one more"
