"""What a critic learns from."""

from __future__ import annotations

import torch

from headwater.types import FloatT, Scored


def value_loss(scored: Scored, *, clip: float | None = None) -> FloatT:
    """loss = ½ · (V - R)²; with `clip` = e, ½ · max((V - R)², (clip(V, V_old - e, V_old + e) - R)²).

    R is the return, the target of a term of targets: advantage + value, *before* any whitening. The clip
    (in PPO's code, not in its paper: Engstrom et al. 2020, arXiv:2005.12729) drops the gradient
    of a value that has already moved e towards its return. e is in units of reward: one that suits
    returns of 1 does nothing to returns of 0.01, and stalls returns of 100.
    """
    assert scored.value_T is not None and scored.value_T.ndim == 1, "a value loss needs a critic's one value per token"
    error_T = (scored.value_T - scored.advantage_T) ** 2
    if clip is None:
        return error_T / 2
    assert scored.old_value_T is not None, "clipping needs what the critic said before the update"
    near_T = scored.old_value_T + (scored.value_T - scored.old_value_T).clamp(-clip, clip)
    return torch.maximum(error_T, (near_T - scored.advantage_T) ** 2) / 2
