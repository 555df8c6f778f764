"""What a loss is averaged over, settled once for a whole optimizer step.

Each takes `sequence_T` (whose token each is), `included_S` (which sequences take part) and `length`
(the most tokens a turn may have), and returns `weight_T`; the loss of the step is Σ weight · loss.
Because denominators are inside the weights, micro-batches and shards cannot change the result.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_mean(sequence_T: Tensor, included_S: Tensor, length: int) -> Tensor:
    """Every token counts the same: 1 / T. Long answers pull more (DAPO; SFT)."""
    in_T = included_S[sequence_T].double()
    return in_T / in_T.sum().clamp(min=1)


def sequence_mean(sequence_T: Tensor, included_S: Tensor, length: int) -> Tensor:
    """Every answer counts the same: 1 / (S · |o_s|). A token of a long answer counts less (GRPO)."""
    count_S = torch.bincount(sequence_T, minlength=len(included_S)).double().clamp(min=1)
    return (included_S.double() / (count_S * included_S.sum().clamp(min=1)))[sequence_T]


def sequence_sum(sequence_T: Tensor, included_S: Tensor, length: int) -> Tensor:
    """1 / S per token: the mean over answers of the sum over tokens. The gradient of the expected
    reward as it is derived (REINFORCE, RLOO); its size grows with the length of answers."""
    return (included_S.double() / included_S.sum().clamp(min=1))[sequence_T]


def fixed_length(sequence_T: Tensor, included_S: Tensor, length: int) -> Tensor:
    """1 / (S · length) per token: as `sequence_sum`, on the scale of a mean, by a constant that no
    batch can change (Dr. GRPO)."""
    return sequence_sum(sequence_T, included_S, length) / length
