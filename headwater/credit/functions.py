"""Rewards of siblings -> advantages. Each is a few lines of arithmetic on `reward_G`."""

from __future__ import annotations

import torch

from headwater.types import FloatG


def centred(reward_G: FloatG) -> FloatG:
    """How much better than average: A_i = r_i - mean(r).

    Over siblings it is the credit of Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): no division by
    the spread, which would weigh up tasks that are nearly always or nearly never solved. Over a step
    it is the baseline of REINFORCE (Williams 1992), without which rewards that are all positive make
    whatever was sampled likelier. The mean contains r_i, so the expected gradient is (G-1)/G of the
    true one.
    """
    return reward_G - reward_G.mean()


def zscore(reward_G: FloatG, *, eps: float = 1e-6, population: bool = False) -> FloatG:
    """A_i = (r_i - mean(r)) / (std(r) + eps).

    GRPO (Shao et al. 2024, arXiv:2402.03300). The standard deviation is the sample's, which divides by
    G - 1, or with `population` the population's, which divides by G and makes every advantage
    sqrt(G / (G-1)) times larger. A group whose rewards are all equal says nothing and gets exactly 0;
    that is tested on the rewards, since rounding can leave a spread of 1e-8 in a group of equal floats.
    Needs two siblings.
    """
    assert len(reward_G) > 1, "a spread needs two siblings"
    if bool(reward_G.max() == reward_G.min()):
        return torch.zeros_like(reward_G)
    return (reward_G - reward_G.mean()) / (reward_G.std(correction=0 if population else 1) + eps)


def leave_one_out(reward_G: FloatG) -> FloatG:
    """A_i = r_i - mean of the others' rewards = G/(G-1) · (r_i - mean(r)).

    RLOO (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740): the baseline does not depend on
    r_i, so the gradient is unbiased. Needs two siblings.
    """
    count = len(reward_G)
    assert count > 1, "leave one out needs two siblings"
    return (reward_G - reward_G.mean()) * (count / (count - 1))


def mean_ratio(reward_G: FloatG) -> FloatG:
    """A_i = (r_i - mean(r)) / mean(r).

    MaxRL (Tajwar et al. 2026, arXiv:2602.02710): with rewards 0 and 1, of which K of G are 1, the mean
    over siblings of A_i · grad log pi_i is the mean of grad log pi over the K successes, less the mean
    of all G as a control variate: it ascends log P(success), a hard task's as much as an easy one's,
    to the order that G samples can tell. Without a success it is 0, and so are a flat group and a mean
    of 0. A mean below 0 would turn every sign around: rewards must be at least 0.
    """
    mean = reward_G.mean()
    if bool(reward_G.max() == reward_G.min()) or bool(mean == 0):
        return torch.zeros_like(reward_G)
    if bool(mean < 0):
        raise ValueError(
            f"the mean reward of a group is {float(mean)}; mean_ratio divides by it, and wants rewards >= 0"
        )
    return (reward_G - mean) / mean


def best_and_worst(reward_G: FloatG) -> FloatG:
    """Targets of a preference among siblings that a reward ranks: 1 for the best, 0 for the worst (the
    first of each), NaN, which takes no part, for all others. A flat group has no preference: all NaN.

    Online DPO (Guo et al. 2024, arXiv:2402.04792) with two siblings; best against worst of more is what
    iterative DPO trains on (Dong et al. 2024, arXiv:2405.07863).
    """
    target_G = torch.full_like(reward_G, float("nan"))
    if bool(reward_G.max() != reward_G.min()):
        target_G[reward_G.argmax()], target_G[reward_G.argmin()] = 1.0, 0.0
    return target_G
