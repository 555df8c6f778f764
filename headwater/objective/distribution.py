"""Measures of the whole next-token distribution, and keeping its entropy up.

A `Measure` takes log-probs over the vocabulary, [T, V], of the policy and where it needs one of the
reference or teacher, and gives one number per token, in nats, with gradient. All is in log space; a
token of probability 0 (-inf, as where a vocabulary is masked) counts as nothing and makes no NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.types import FloatT, FloatTV, Scored


def _relative(p_logp_TV: Tensor, q_logp_TV: Tensor) -> Tensor:
    """KL(p ‖ q) = Σ_v p·(log p - log q), where 0·log 0 = 0. Infinite where q is 0 and p is not, as it is."""
    gap_TV = (p_logp_TV - q_logp_TV).masked_fill(p_logp_TV.isneginf(), 0)
    return (p_logp_TV.exp() * gap_TV).sum(-1)


def entropy(logp_TV: FloatTV, ref_logp_TV: FloatTV | None = None) -> FloatT:
    """H(pi) = -Σ_v pi·log pi, in [0, log V]. Needs no reference. Its gradient in a logit is
    -pi·(log pi + H): what is likelier than average is pushed down."""
    return -(logp_TV.exp() * logp_TV.masked_fill(logp_TV.isneginf(), 0)).sum(-1)


def kl(logp_TV: FloatTV, ref_logp_TV: FloatTV | None) -> FloatT:
    """KL(pi ‖ ref): what staying near a reference means, and as distillation from a teacher "reverse KL",
    which seeks a mode. Its gradient in a logit is pi·(log pi/ref - KL): none where pi is 0."""
    assert ref_logp_TV is not None, "a divergence needs the reference's distribution"
    return _relative(logp_TV, ref_logp_TV)


def forward_kl(logp_TV: FloatTV, ref_logp_TV: FloatTV | None) -> FloatT:
    """KL(ref ‖ pi): distillation as cross-entropy to the teacher, which covers all of its modes. Its
    gradient in a logit is pi - ref."""
    assert ref_logp_TV is not None, "a divergence needs the reference's distribution"
    return _relative(ref_logp_TV, logp_TV)


def jsd(logp_TV: FloatTV, ref_logp_TV: FloatTV | None, *, beta: float = 0.5) -> FloatT:
    """beta·KL(ref ‖ m) + (1 - beta)·KL(pi ‖ m) with m = beta·ref + (1 - beta)·pi: finite for any two.

    Generalised Jensen-Shannon divergence (Agarwal et al. 2023, arXiv:2306.13649, eq. 1). It vanishes at
    both ends: divided by beta it tends to `forward_kl` as beta -> 0, and divided by 1 - beta to `kl` as
    beta -> 1. Those are measures of their own, so beta is strictly between.
    """
    assert ref_logp_TV is not None, "a divergence needs the reference's distribution"
    assert 0 < beta < 1, "beta of 0 or 1 is no mixture: use forward_kl or kl"
    neither_TV = logp_TV.isneginf() & ref_logp_TV.isneginf()  # of which the log of the sum has no gradient
    ref_part_TV = ref_logp_TV.masked_fill(neither_TV, 0) + math.log(beta)
    mixed_TV = torch.logaddexp(logp_TV + math.log1p(-beta), ref_part_TV)
    return beta * _relative(ref_logp_TV, mixed_TV) + (1 - beta) * _relative(logp_TV, mixed_TV)


def entropy_bonus(scored: Scored) -> FloatT:
    """loss = -H(pi), weighed by the advantage (1 for all): a term's coefficient is how much entropy is
    worth (Mnih et al. 2016, arXiv:1602.01783). Too much of it and text falls apart; see `AdaptiveEntropy`."""
    assert "entropy" in scored.measured, 'an entropy bonus needs the measure "entropy"'
    return -scored.measured["entropy"] * scored.advantage_T


@dataclass(slots=True, kw_only=True)
class AdaptiveEntropy:
    """The coefficient of an entropy bonus that holds entropy above a target (Skywork-OR1, He et al. 2025,
    arXiv:2505.22312): after each step it is raised by `step` if entropy was at most `target`, lowered
    if not, within [lowest, highest]; and it applies only while entropy is at most the target.

    Entropy is the mean over the tokens of a whole optimizer step, in nats. Before anything has been
    measured nothing applies.
    """

    target: float
    step: float = 0.005
    lowest: float = 0.0
    highest: float = 1.0
    level: float = 0.0
    entropy: float = math.inf

    @property
    def coefficient(self) -> float:
        """What the next step's bonus is multiplied by."""
        return self.level if self.entropy <= self.target else 0.0

    def update(self, entropy: float) -> float:
        """Take in the entropy of a step; the coefficient for the next one."""
        moved = self.level + (self.step if entropy <= self.target else -self.step)
        self.level = min(self.highest, max(self.lowest, moved))
        self.entropy = entropy
        return self.coefficient

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"level": self.level, "entropy": self.entropy}

    def load(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` gave."""
        self.level, self.entropy = state["level"], state["entropy"]
