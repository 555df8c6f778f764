"""What a loss is averaged over, settled once for a whole optimizer step.

Each takes the `Extent` of a term (whose token each is, of which group each sequence) and returns
`weight_T`; the loss of the step is Σ weight · loss. Because denominators are inside the weights,
micro-batches and shards cannot change the result.
"""

from __future__ import annotations

import torch

from headwater.types import Extent, FloatT


def _count(extent: Extent) -> FloatT:
    """How many tokens the sequence of each token has."""
    return torch.bincount(extent.sequence_T, minlength=len(extent.group_S)).double()[extent.sequence_T]


def token_mean(extent: Extent) -> FloatT:
    """Every token counts the same: 1 / T. Long answers pull more (DAPO; SFT)."""
    return torch.full((len(extent.sequence_T),), 1 / max(1, len(extent.sequence_T)), dtype=torch.float64)


def sequence_mean(extent: Extent) -> FloatT:
    """Every answer counts the same: 1 / (S · |o_s|). A token of a long answer counts less (GRPO). A
    loss that is one number per sequence comes out as its mean over sequences."""
    return 1 / (_count(extent) * max(1, len(extent.group_S)))


def sequence_sum(extent: Extent) -> FloatT:
    """1 / S per token: the mean over answers of the sum over tokens. The gradient of the expected
    reward as it is derived (REINFORCE, RLOO); its size grows with the length of answers."""
    return torch.full((len(extent.sequence_T),), 1 / max(1, len(extent.group_S)), dtype=torch.float64)


def fixed_length(extent: Extent) -> FloatT:
    """1 / (S · length) per token: as `sequence_sum`, on the scale of a mean, by a constant that no
    batch can change (Dr. GRPO)."""
    return sequence_sum(extent) / extent.length


def group_mean(extent: Extent) -> FloatT:
    """1 / (groups · tokens of the group): a loss that is one number per group, such as a pair's, comes
    out as its mean over groups."""
    group_T = extent.group_S[extent.sequence_T]
    tokens_G = torch.bincount(group_T).double()
    groups = int((tokens_G > 0).sum())
    return 1 / (tokens_G[group_T] * max(1, groups))
