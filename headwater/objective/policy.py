"""Policy-gradient losses per scored token, and corrections for a sampler that is not the learner.

Three policies meet here. *pi* is the learner now; *old* is the one that its ratio is taken against:
the learner before this step's first update where the run has its log-probs (`proximal_logp_T`), else
the sampler; *mu* is the sampler (`behavior_logp_T`). Below, r = pi/old is what a loss clips, and
w = old/mu is what `corrected` multiplies a loss by. Each keeps to its own pair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from headwater.objective.reduce import Sequences
from headwater.types import FloatT, IntT, Loss, Scored

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this before exponentiation: e^20 is beyond any use and still finite."""

RatioLevel = Literal["token", "sequence"]
"""Whether a ratio is taken of each token, or of a whole sequence (the product over its tokens)."""

Correction = Literal["truncate", "mask"]
"""What becomes of a weight out of bounds: it is set to the bound, or to 0."""


def log_ratio(logp_T: FloatT, behavior_logp_T: FloatT) -> FloatT:
    """log pi/mu per token, clamped so that its exponential is finite."""
    return (logp_T - behavior_logp_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def old_logp(scored: Scored) -> FloatT:
    """log old: what a ratio is taken against. The learner's own before the step's first update if the
    run has it, else the sampler's."""
    old_logp_T = scored.behavior_logp_T if scored.proximal_logp_T is None else scored.proximal_logp_T
    assert old_logp_T is not None, "a ratio needs the sampler's log-probs, or the learner's of before"
    return old_logp_T


def _ratio(scored: Scored) -> Tensor:
    """r = pi/old per token, with gradient."""
    return log_ratio(scored.logp_T, old_logp(scored)).exp()


def _clip(ratio_T: Tensor, advantage_T: Tensor, low: float, high: float) -> Tensor:
    """-min(r·A, clip(r, 1 - low, 1 + high)·A): the minimum keeps the gradient wherever r has moved
    against A."""
    return -torch.minimum(ratio_T * advantage_T, ratio_T.clamp(1 - low, 1 + high) * advantage_T)


def likelihood(scored: Scored) -> FloatT:
    """loss = -A · log pi, the score-function gradient (Williams 1992). Right for what the current
    policy sampled; it does not correct for a sampler that has fallen behind."""
    return -scored.advantage_T * scored.logp_T


def ppo_clip(scored: Scored, *, low: float = 0.2, high: float = 0.2, dual: float | None = None) -> FloatT:
    """loss = -min(r·A, clip(r, 1 - low, 1 + high)·A) per token; with `dual` = c, at most c·|A| where A < 0.

    PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7); unequal bounds are DAPO's clip-higher (Yu et
    al. 2025, arXiv:2503.14476). Without `dual` a token of negative advantage that has become likely
    pulls with all of r, however large: dual clip (Ye et al. 2019, arXiv:1912.09729; c = 3) ends that.
    """
    loss_T = _clip(_ratio(scored), scored.advantage_T, low, high)
    if dual is None:
        return loss_T
    assert dual > 1, "a dual clip of 1 or less would cut the gradient where nothing has moved"
    return torch.where(scored.advantage_T < 0, torch.minimum(loss_T, -dual * scored.advantage_T), loss_T)


def gspo(scored: Scored, *, low: float = 3e-4, high: float = 4e-4) -> FloatT:
    """loss = -min(s·A, clip(s, 1 - low, 1 + high)·A), s = exp(mean over the answer of log pi/old), the
    same at each of its tokens.

    GSPO (Zheng et al. 2025, arXiv:2507.18071, eq. 5-7). The exponent is a mean, so bounds are two to
    three orders of magnitude narrower than a token's. Weigh it with `sequence_mean`: a weighting that
    counts tokens would count long answers more. A weighting that sums makes it LUSPO's.
    """
    return _clip(_sequence_ratio(scored), scored.advantage_T, low, high)


def gspo_token(scored: Scored, *, low: float = 3e-4, high: float = 4e-4) -> FloatT:
    """`gspo` with a pull of its own for each token: s_t = sg[s] · pi/sg[pi], so A may differ by token.

    arXiv:2507.18071, §4.3. Where A is one number per answer, value and gradient are `gspo`'s.
    """
    ratio_T = _sequence_ratio(scored).detach() * (scored.logp_T - scored.logp_T.detach()).exp()
    return _clip(ratio_T, scored.advantage_T, low, high)


def _sequence_ratio(scored: Scored) -> Tensor:
    """(Π_t pi/old)^(1/tokens) of the sequence that each token is of, with gradient."""
    sequences = Sequences.of(scored.sequence_T)
    mean_S = sequences.mean(scored.logp_T - old_logp(scored))
    return mean_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[sequences.of_T]


def cispo(scored: Scored, *, low: float = 1.0, high: float) -> FloatT:
    """loss = -sg[clip(r, 1 - low, 1 + high)] · A · log pi: the weight is clipped and no token's gradient
    is dropped.

    CISPO (MiniMax 2025, arXiv:2506.13585, eq. 4-5). `low` of 1 is no lower bound, as in the paper.
    `high` is counted from 1; `cispo_cap` takes the bound itself.
    """
    weight_T = _ratio(scored).detach().clamp(1 - low, 1 + high)
    return -weight_T * scored.advantage_T * scored.logp_T


def cispo_cap(scored: Scored, *, cap: float = 5.0) -> FloatT:
    """loss = -sg[min(r, cap)] · A · log pi: `cispo` by the largest weight itself (Khatri et al. 2025,
    arXiv:2510.13786, who cap at 4 to 8)."""
    return -_ratio(scored).detach().clamp(max=cap) * scored.advantage_T * scored.logp_T


def sapo(scored: Scored, *, positive: float = 1.0, negative: float = 1.05) -> FloatT:
    """loss = -(4/tau) · σ(tau · (r - 1)) · A, tau = `positive` where A > 0, else `negative`.

    SAPO (Gao et al. 2025, arXiv:2511.20347): a gate in place of a clip. Its slope is A at r = 1 and falls
    off to both sides as sech², sooner for a larger tau. It also fades where a token has moved *against*
    its advantage, which a clip never does. The value at r = 1 is -2A/tau, not -A.
    """
    tau_T = torch.where(scored.advantage_T > 0, positive, negative).to(scored.logp_T.dtype)
    return -(4 / tau_T) * torch.sigmoid(tau_T * (_ratio(scored) - 1)) * scored.advantage_T


def tv_mask(scored: Scored, *, bound: float = 0.2, cap: float = 20.0) -> FloatT:
    """loss = -M · sg[min(pi/mu, cap)] · A · log pi; M = 0 where |pi - mu| > bound and pi has moved the way
    that A pulls, else 1.

    DPPO with binary total variation (Qi et al. 2026, arXiv:2602.04879): |pi - mu| of the sampled token
    is the TV between "this token" and "any other". A ratio says little about a rare token and misses
    what happens to a likely one; a distance does neither. Both ratio and distance are to the
    *sampler*, so what differs between it and the learner counts too: do not wrap it in `corrected`.
    """
    pi_T, mu_T = scored.logp_T.detach().exp(), _behavior(scored).exp()
    return _masked(scored, (pi_T - mu_T).abs() > bound, cap)


def kl_mask(scored: Scored, *, bound: float = 0.05, cap: float = 20.0) -> FloatT:
    """`tv_mask` by another distance: mu·log(mu/pi) + (1 - mu)·log((1 - mu)/(1 - pi)) > bound, the KL(mu ‖ pi)
    between "this token" and "any other" (arXiv:2602.04879, binary KL)."""
    small = torch.finfo(scored.logp_T.dtype).eps  # a probability that rounds to 1 is 1 - eps here
    pi_logp_T, mu_logp_T = scored.logp_T.detach().clamp(max=-small), _behavior(scored).clamp(max=-small)
    other_T = -torch.expm1(mu_logp_T)
    kl_T = mu_logp_T.exp() * (mu_logp_T - pi_logp_T) + other_T * (other_T / -torch.expm1(pi_logp_T)).log()
    return _masked(scored, kl_T > bound, cap)


def _behavior(scored: Scored) -> Tensor:
    assert scored.behavior_logp_T is not None, "a distance to the sampler needs the sampler's log-probs"
    return scored.behavior_logp_T


def _masked(scored: Scored, far_T: Tensor, cap: float) -> Tensor:
    """Without the tokens that are far from the sampler's and that A pulls further away."""
    change_T = (scored.logp_T - _behavior(scored)).detach()
    keep_T = ~(far_T & (change_T * scored.advantage_T > 0))
    weight_T = log_ratio(scored.logp_T, _behavior(scored)).detach().exp().clamp(max=cap)
    return -(weight_T * keep_T) * scored.advantage_T * scored.logp_T


def correction(
    scored: Scored, *, level: RatioLevel = "token", low: float = 0.0, high: float = 2.0, mode: Correction = "truncate"
) -> FloatT:
    """w = old/mu at each token, detached: of the token itself, or of its whole sequence, where it is the
    *product* over tokens. Out of [low, high] it is set to the nearer bound, or to 0 under "mask"."""
    assert scored.proximal_logp_T is not None, "a correction needs the learner's log-probs of before its update"
    gap_T = (scored.proximal_logp_T - _behavior(scored)).detach()
    if level == "sequence":
        sequences = Sequences.of(scored.sequence_T)
        gap_T = sequences.sum(gap_T)[sequences.of_T]
    weight_T = gap_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if mode == "truncate":
        return weight_T.clamp(low, high)
    return weight_T * ((weight_T >= low) & (weight_T <= high))


def corrected(
    loss: Loss, *, level: RatioLevel = "token", low: float = 0.0, high: float = 2.0, mode: Correction = "truncate"
) -> Loss:
    """`loss` · w with w = old/mu, for tokens that a sampler of other arithmetic or older weights wrote.

    "truncate" is TIS (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"; C = `high` = 2); "mask" is IcePop per token (Ling team 2025, arXiv:2510.18855) and MIS per
    sequence (Liu et al. 2025, "When speed kills stability"). By the token it is biased for whole answers;
    by the sequence it is not, and its variance grows with their length. Meant for the policy's term: a KL
    term has `kl.weighted`.
    """
    return partial(_corrected, loss, level=level, low=low, high=high, mode=mode)


def _corrected(loss: Loss, scored: Scored, *, level: RatioLevel, low: float, high: float, mode: Correction) -> Tensor:
    return loss(scored) * correction(scored, level=level, low=low, high=high, mode=mode)


def off_policy_masked(loss: Loss, *, bound: float) -> Loss:
    """`loss`, and 0 where A < 0 and the mean over the answer of log mu/pi is above `bound` nats.

    Off-policy sequence masking (DeepSeek-AI 2025, DeepSeek-V3.2, arXiv:2512.02556, eq. 9): bad answers that
    the policy would no longer give teach little and unsettle much. The distance counts both a sampler
    that has fallen behind and its other arithmetic.
    """
    return partial(_off_policy_masked, loss, bound=bound)


def _off_policy_masked(loss: Loss, scored: Scored, *, bound: float) -> Tensor:
    sequences = Sequences.of(scored.sequence_T)
    distance_S = sequences.mean((_behavior(scored) - scored.logp_T).detach())
    return loss(scored) * ((scored.advantage_T >= 0) | (distance_S <= bound)[sequences.of_T])


def decoupled_ppo(scored: Scored, *, low: float = 0.2, high: float = 0.2, cap: float = math.inf) -> FloatT:
    """loss = min(w, cap) · `ppo_clip` with w = old/mu and r = pi/old: `ppo_clip` in `corrected`, by name.

    Hilton et al. 2021 (arXiv:2110.00641): *old* is only what keeps an update small and need not
    have sampled; AReaL (Fu et al. 2025, arXiv:2505.24298) takes it from just before the step. Where
    nobody has, or where old = mu, it is `ppo_clip`.
    """
    return corrected(partial(ppo_clip, low=low, high=high), high=cap)(scored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """How far learner and sampler are apart: `mismatch`, mean |log pi - log mu| in nats per token;
    `ess`, effective sample size of the token weights pi/mu as a share of T, (Σw)² / (T·Σw²);
    `sequence_ess`, the same of the sequences' weights (products over tokens), as a share of S."""

    mismatch: float
    ess: float
    sequence_ess: float | None = None


def importance(logp_T: FloatT, behavior_logp_T: FloatT, sequence_T: IntT | None = None) -> Importance:
    """Diagnostics of the importance weights, before any clipping (Kong 1992 for the ESS). Of sequences too
    where it is told whose each token is."""
    gap_T = (logp_T - behavior_logp_T).detach().double()
    sequence_ess = None if sequence_T is None else _ess(Sequences.of(sequence_T).sum(gap_T))
    return Importance(mismatch=float(gap_T.abs().mean()), ess=_ess(gap_T), sequence_ess=sequence_ess)


def _ess(log_weight: Tensor) -> float:
    """(Σw)² / (n·Σw²), from logarithms: a common factor drops out, so nothing can overflow."""
    return float((2 * log_weight.logsumexp(0) - (2 * log_weight).logsumexp(0)).exp() / len(log_weight))
