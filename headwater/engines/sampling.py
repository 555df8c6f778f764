"""Choosing tokens: stateless randomness, and the distribution actually sampled from."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headwater.types import Sampling

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One float in [0, 1) per (seed, position): SplitMix64 (Steele, Lea, Flood 2014) as a counter.

    The n-th token of a turn takes the n-th number of its own seed, so what is sampled does not depend
    on batch, order or arrival.
    """
    with np.errstate(over="ignore"):
        z = seeds.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def truncate(logp_NV: Tensor, sampling: Sampling) -> Tensor:
    """Log-probs renormalised over the support that top-k, top-p and min-p leave, -inf elsewhere.

    Applied in that order, each on what the last one left. top-p keeps the smallest set of most likely
    tokens whose mass reaches p (Holtzman et al. 2020, arXiv:1904.09751); min-p keeps tokens at least
    p times as likely as the likeliest (Nguyen et al. 2024, arXiv:2407.01082).
    """
    kept = logp_NV
    if 0 < sampling.top_k < logp_NV.shape[-1]:
        floor_N1 = kept.topk(sampling.top_k, dim=-1).values[:, -1:]
        kept = kept.masked_fill(kept < floor_N1, -torch.inf)
    if sampling.top_p < 1:
        kept = kept - kept.logsumexp(-1, keepdim=True)
        ordered, index = kept.sort(dim=-1, descending=True, stable=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        drop = torch.zeros_like(kept, dtype=torch.bool).scatter(-1, index, before >= sampling.top_p)
        kept = kept.masked_fill(drop, -torch.inf)
    if sampling.min_p > 0:
        floor_N1 = kept.max(dim=-1, keepdim=True).values + float(np.log(sampling.min_p))
        kept = kept.masked_fill(kept < floor_N1, -torch.inf)
    return kept - kept.logsumexp(-1, keepdim=True)


def sample(logits_NV: Tensor, sampling: Sampling, uniform_N: np.ndarray) -> tuple[Tensor, Tensor]:
    """Token and its log-prob (nats) per row, `[N]` each, under the distribution sampled from.

    Inverse transform: the first token at which the cumulative probability passes the row's uniform.
    At temperature 0 the likeliest token is taken, with its log-prob at temperature 1.
    """
    if sampling.temperature == 0:
        token_N = logits_NV.argmax(-1)
        return token_N, logits_NV.gather(-1, token_N[:, None])[:, 0] - logits_NV.logsumexp(-1)
    scaled_NV = logits_NV if sampling.temperature == 1 else logits_NV / sampling.temperature
    logp_NV = torch.log_softmax(scaled_NV, dim=-1)
    if sampling.truncates:
        logp_NV = truncate(logp_NV, sampling)
    mass_NV = logp_NV.exp().cumsum(-1)
    wanted_N1 = torch.from_numpy(uniform_N).to(mass_NV)[:, None] * mass_NV[:, -1:]
    # right=True: strictly beyond, so that a token of zero mass is never reached
    token_N = torch.searchsorted(mass_NV, wanted_N1, right=True)[:, 0]
    if bool((wanted_N1 >= mass_NV[:, -1:]).any()):  # rounded up to the very end: the last possible token
        token_N = torch.minimum(token_N, (mass_NV < mass_NV[:, -1:]).sum(-1))
    return token_N, logp_NV.gather(-1, token_N[:, None])[:, 0]
