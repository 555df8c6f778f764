"""Rewards of siblings -> advantages. Each is a few lines of arithmetic on `reward_G`."""

from __future__ import annotations

import torch
from torch import Tensor


def centred(reward_G: Tensor) -> Tensor:
    """How much better than average: A_i = r_i - mean(r).

    Over siblings it is the credit of Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): no division by
    the spread, which would weigh up tasks that are nearly always or nearly never solved. Over a step
    it is the baseline of REINFORCE (Williams 1992), without which rewards that are all positive make
    whatever was sampled likelier. The mean contains r_i, so the expected gradient is (G-1)/G of the
    true one.
    """
    return reward_G - reward_G.mean()


def zscore(reward_G: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + eps), with the sample standard deviation (n - 1).

    GRPO (Shao et al. 2024, arXiv:2402.03300). A group whose rewards are all equal says nothing and
    gets exactly 0; that is tested on the rewards, since rounding can leave a spread of 1e-8 in a
    group of equal floats. Needs two siblings.
    """
    assert len(reward_G) > 1, "a spread needs two siblings"
    if bool(reward_G.max() == reward_G.min()):
        return torch.zeros_like(reward_G)
    return (reward_G - reward_G.mean()) / (reward_G.std() + eps)


def leave_one_out(reward_G: Tensor) -> Tensor:
    """A_i = r_i - mean of the others' rewards = G/(G-1) · (r_i - mean(r)).

    RLOO (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740): the baseline does not depend on
    r_i, so the gradient is unbiased. Needs two siblings.
    """
    count = len(reward_G)
    assert count > 1, "leave one out needs two siblings"
    return (reward_G - reward_G.mean()) * (count / (count - 1))
