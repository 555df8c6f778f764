"""Imitating what was demonstrated, or a teacher."""

from __future__ import annotations

from typing import Literal

from headwater.types import FloatT, Scored


def negative_log_likelihood(scored: Scored) -> FloatT:
    """loss = -log pi(token), times the advantage, which is 1 for a demonstration: cross-entropy."""
    return -scored.advantage_T * scored.logp_T


def distillation(scored: Scored, *, divergence: Literal["forward_kl", "kl", "jsd"] = "forward_kl") -> FloatT:
    """loss = the divergence from a teacher's whole next-token distribution, measured under that name with the
    teacher as reference.

    "forward_kl", KL(teacher ‖ pi), covers all that the teacher does (Hinton et al. 2015, arXiv:1503.02531);
    "kl", KL(pi ‖ teacher), seeks what it does most (Gu et al. 2023, arXiv:2306.08543); "jsd" lies between
    (Agarwal et al. 2023, arXiv:2306.13649). On text of the teacher's, or of the policy's own (on-policy
    distillation): the gradient is that of the divergence at each token given its prefix, and none of it
    is for having led to that prefix.
    """
    assert divergence in scored.measured, f'distillation needs the measure "{divergence}"'
    return scored.measured[divergence] * scored.advantage_T


def reverse_kl_policy(scored: Scored) -> FloatT:
    """loss = -sg[log teacher - log pi] · log pi: on-policy distillation as a policy gradient whose advantage
    at each token is how much likelier the teacher finds it (Thinking Machines 2025, "On-policy distillation").

    One log-prob of the teacher per token is all it needs. On the policy's own tokens its gradient is
    KL(pi ‖ teacher)'s, token by token; it is that of `kl.k2`. It does not correct for a sampler that has
    fallen behind: `kl.weighted` with `detached` does.
    """
    assert scored.ref_logp_T is not None, "distillation needs the teacher's log-probs"
    pull_T = (scored.ref_logp_T - scored.logp_T).detach()
    return -pull_T * scored.logp_T * scored.advantage_T
