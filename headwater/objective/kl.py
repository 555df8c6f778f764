"""Staying near a reference: estimators of KL(pi || ref) from tokens that pi sampled."""

from __future__ import annotations

from torch import Tensor

from headwater.objective.policy import LOG_RATIO_LIMIT
from headwater.types import Scored


def k3(scored: Scored) -> Tensor:
    """loss = rho - 1 - log rho with rho = ref/pi, per token, weighed by the advantage (1 for all).

    Schulman's k3 (2020, "Approximating KL divergence"), GRPO eq. 4: non-negative, its expectation
    under pi is KL(pi || ref) exactly. As a *loss* its gradient is that of the forward KL(ref || pi)
    where tokens are the policy's own: it still pulls towards the reference, and vanishes with it.
    """
    assert scored.ref_logp_T is not None, "a KL term needs the reference's log-probs"
    log_rho_T = (scored.ref_logp_T - scored.logp_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (log_rho_T.exp() - 1 - log_rho_T) * scored.advantage_T
