"""Staying near a reference: estimators of KL(pi || ref) from tokens that pi sampled, as losses.

An estimator can be right about the divergence and, as a loss, pull along the gradient of another. Below
x = log pi - log ref at the sampled token; each says whose gradient it has, in expectation over tokens
of pi's own. A loss is weighed by its advantage, which is 1 for all that is to stay near.

    loss      its mean is       its gradient, summed up over samples, is that of
    k1        KL(pi ‖ ref)      nothing: 0 in expectation
    k2        E[x²]/2           KL(pi ‖ ref)
    k3        KL(pi ‖ ref)      KL(ref ‖ pi)
    k3_plus   KL(pi ‖ ref)      KL(pi ‖ ref)
    exact     KL(pi ‖ ref)      KL(pi ‖ ref)
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from headwater.objective.policy import LOG_RATIO_LIMIT, log_ratio
from headwater.types import FloatT, Loss, Scored


def _log_ratio_to_ref(scored: Scored) -> Tensor:
    """x = log pi - log ref, with gradient."""
    assert scored.ref_logp_T is not None, "a KL term needs the reference's log-probs"
    return scored.logp_T - scored.ref_logp_T


def k1(scored: Scored) -> FloatT:
    """loss = x. Unbiased for KL(pi ‖ ref); may be negative.

    As a loss it does nothing: its gradient is ∇log pi, whose mean over pi is 0. It belongs in the reward,
    or within `weighted`, where the ratio carries the gradient that is missing here.
    """
    return _log_ratio_to_ref(scored) * scored.advantage_T


def k2(scored: Scored) -> FloatT:
    """loss = x²/2 (Schulman 2020, "Approximating KL divergence"). Biased as an estimate; as a loss its
    gradient x·∇log pi is KL(pi ‖ ref)'s exactly."""
    return _log_ratio_to_ref(scored) ** 2 / 2 * scored.advantage_T


def k3(scored: Scored) -> FloatT:
    """loss = e^-x - 1 + x.

    Schulman's k3 (2020), GRPO eq. 4 (arXiv:2402.03300): never negative, and its mean over pi is
    KL(pi ‖ ref). As a *loss* its gradient is that of the forward KL(ref ‖ pi): it still pulls towards the
    reference, and vanishes with it. Its weight on a token is 1 - ref/pi, which explodes where the
    reference finds likely what the policy does not: past e^20 there is no gradient.
    """
    x_T = _log_ratio_to_ref(scored).clamp(min=-LOG_RATIO_LIMIT)
    return ((-x_T).exp() - 1 + x_T) * scored.advantage_T


def k3_plus(scored: Scored) -> FloatT:
    """Value of `k3`, gradient of `k2`: what is logged is KL(pi ‖ ref), and so is what is descended
    (straight-through; Tang and Munos 2025, arXiv:2506.09477, on which estimator has whose gradient)."""
    slope_T = k2(scored)
    return k3(scored).detach() + slope_T - slope_T.detach()


def exact(scored: Scored) -> FloatT:
    """loss = KL(pi ‖ ref) over the whole vocabulary (`distribution.kl`, measured as "kl"): no sampling noise
    within a token. What a token does to those after it is in no per-token KL, this one included."""
    assert "kl" in scored.measured, 'an exact KL needs the measure "kl"'
    return scored.measured["kl"] * scored.advantage_T


def weighted(loss: Loss, *, detached: bool = False) -> Loss:
    """`loss` · pi/mu, for tokens that an older policy sampled: a mean over mu becomes one over pi.

    The ratio has a gradient of its own, which makes the whole that of E_pi[loss]: right for `k1` and `k3`,
    whose mean is KL(pi ‖ ref); both then descend it, on-policy too. `detached` leaves the loss its own
    gradient, which is what `k2` and `k3_plus` want. The ratio is to the *sampler*, since it is the
    sampler's tokens over which the mean is taken. It is not clipped.
    """
    return partial(_weighted, loss, detached=detached)


def _weighted(loss: Loss, scored: Scored, *, detached: bool) -> Tensor:
    assert scored.behavior_logp_T is not None, "weighing by pi/mu needs the sampler's log-probs"
    ratio_T = log_ratio(scored.logp_T, scored.behavior_logp_T).exp()
    return loss(scored) * (ratio_T.detach() if detached else ratio_T)
