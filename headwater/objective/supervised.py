"""Imitating what was demonstrated."""

from __future__ import annotations

from torch import Tensor

from headwater.types import Scored


def negative_log_likelihood(scored: Scored) -> Tensor:
    """loss = -log pi(token), times the advantage, which is 1 for a demonstration: cross-entropy."""
    return -scored.advantage_T * scored.logp_T
