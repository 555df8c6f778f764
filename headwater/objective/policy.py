"""Policy-gradient losses, per scored token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.types import Scored

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this before exponentiation: e^20 is beyond any use and still finite."""


def log_ratio(logp_T: Tensor, behavior_logp_T: Tensor) -> Tensor:
    """log pi/mu per token, clamped so that its exponential is finite."""
    return (logp_T - behavior_logp_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def likelihood(scored: Scored) -> Tensor:
    """loss = -A · log pi, the score-function gradient (Williams 1992). Right for what the current
    policy sampled; it does not correct for a sampler that has fallen behind."""
    return -scored.advantage_T * scored.logp_T


def ppo_clip(scored: Scored, *, low: float = 0.2, high: float = 0.2) -> Tensor:
    """loss = -min(r·A, clip(r, 1 - low, 1 + high)·A) with r = pi/mu per token.

    PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7); unequal bounds are DAPO's clip-higher (Yu et
    al. 2025, arXiv:2503.14476). mu is the policy that sampled. The minimum keeps the gradient
    wherever a token has moved against its advantage.
    """
    assert scored.behavior_logp_T is not None, "a ratio needs the sampler's log-probs"
    ratio_T = log_ratio(scored.logp_T, scored.behavior_logp_T).exp()
    clipped_T = ratio_T.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio_T * scored.advantage_T, clipped_T * scored.advantage_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """How far learner and sampler are apart: `mismatch`, mean |log pi - log mu| in nats per token;
    `ess`, effective sample size of the token weights pi/mu as a share of T, (Σw)² / (T·Σw²)."""

    mismatch: float
    ess: float


def importance(logp_T: Tensor, behavior_logp_T: Tensor) -> Importance:
    """Diagnostics of the token importance weights, before any clipping (Kong 1992 for the ESS)."""
    weight_T = log_ratio(logp_T, behavior_logp_T).double().exp()
    ess = weight_T.sum() ** 2 / (len(weight_T) * (weight_T**2).sum())
    return Importance(mismatch=float((logp_T - behavior_logp_T).abs().mean()), ess=float(ess))
