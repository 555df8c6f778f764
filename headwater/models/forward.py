"""A batch through a policy: split by a token budget, run flat, scored where it must be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.models.layout import Tree
from headwater.models.policy import Policy
from headwater.models.scoring import token_logp
from headwater.types import Batch


@dataclass(frozen=True, slots=True)
class Micro:
    """Consecutive sequences of a batch that run together. `scored` is their slice of T;
    `source_T` is where, in the flat row, the hidden state stands that predicts each target."""

    tokens_N: Tensor
    tree: Tree
    source_T: Tensor
    target_T: Tensor
    scored: slice


def split(batch: Batch, micro_tokens: int, device: torch.device) -> list[Micro]:
    """Micro-batches of at most `micro_tokens` fed tokens (a longer single sequence runs alone).

    A prefix runs once for all of its continuations in the same micro-batch. The last token of a
    continuation predicts nothing and is not fed. Weights are final, so any split sums to the same.
    """
    shares: list[list[int]] = []
    used, prefixes = 0, set[int]()
    for sequence, tokens in enumerate(batch.tokens_S):
        prefix = batch.prefix_S[sequence]
        own = len(tokens) - 1
        cost = own + (0 if prefix in prefixes else len(batch.prefix_tokens[prefix]))
        if not shares or used + cost > micro_tokens:
            shares.append([])
            used, prefixes = 0, set[int]()
            cost = own + len(batch.prefix_tokens[prefix])
        shares[-1].append(sequence)
        used += cost
        prefixes.add(prefix)
    bounds = torch.searchsorted(batch.sequence_T.contiguous(), torch.arange(len(batch.tokens_S) + 1)).tolist()
    return [_micro(batch, share, bounds, device) for share in shares]


def _micro(batch: Batch, share: list[int], bounds: list[int], device: torch.device) -> Micro:
    flat: list[int] = []
    families: list[tuple[int, list[int]]] = []
    sources: list[Tensor] = []
    prefix_end, current = -1, -1
    for sequence in share:
        prefix = batch.prefix_S[sequence]
        if prefix != current:
            flat.extend(batch.prefix_tokens[prefix])
            families.append((len(batch.prefix_tokens[prefix]), []))
            prefix_end, current = len(flat) - 1, prefix
        start = len(flat)
        flat.extend(batch.tokens_S[sequence][:-1])
        families[-1][1].append(len(batch.tokens_S[sequence]) - 1)
        place_T = batch.place_T[bounds[sequence] : bounds[sequence + 1]]
        sources.append(torch.where(place_T == 0, prefix_end, start + place_T - 1))
    scored = slice(bounds[share[0]], bounds[share[-1] + 1])
    return Micro(
        tokens_N=torch.tensor(flat, device=device),
        tree=Tree(families, device),
        source_T=torch.cat(sources).to(device),
        target_T=batch.target_T[scored].to(device),
        scored=scored,
    )


def run(policy: Policy, micro: Micro, temperature: float) -> tuple[Tensor, Tensor]:
    """logp and entropy, `[T]` each in nats, of a micro-batch's scored tokens."""
    hidden_ND = policy.hidden(micro.tokens_N, micro.tree.positions_N, micro.tree)
    return token_logp(hidden_ND[micro.source_T], policy.head_VD, micro.target_T, temperature, policy.softcap)


@torch.no_grad()
def score(policy: Policy, batch: Batch, micro_tokens: int = 8192) -> Tensor:
    """log-probs of all scored tokens of a batch, `[T]` in nats on the CPU, without gradient."""
    parts = [run(policy, m, batch.temperature)[0].cpu() for m in split(batch, micro_tokens, policy.device)]
    return torch.cat(parts)
