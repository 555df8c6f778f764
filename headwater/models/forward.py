"""A batch through a policy: split by a token budget, run flat, scored where it must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from headwater.models.heads import Critic
from headwater.models.layout import Tree
from headwater.models.policy import Policy
from headwater.models.scoring import measure, token_logp
from headwater.types import Batch


@dataclass(frozen=True, slots=True)
class Micro:
    """Consecutive sequences of a batch that run together. `scored` is their slice of T; `source_T` is
    where, in the flat row, the hidden state stands that predicts each target, and `own_T` where that of
    the target itself does (only in a batch whose head reads there)."""

    tokens_N: Tensor
    tree: Tree
    source_T: Tensor
    own_T: Tensor
    target_T: Tensor
    scored: slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """What a forward pass says about each scored token: log-prob, entropy (without gradient) and
    whatever is measured, in nats; and the scalar head's value. None where nobody asked."""

    logp_T: Tensor
    entropy_T: Tensor
    value_T: Tensor | None = None
    measured: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


def split(batch: Batch, micro_tokens: int, device: torch.device) -> list[Micro]:
    """Micro-batches of at most `micro_tokens` fed tokens (what may not be divided and is longer runs
    alone: a sequence, or a group where the loss compares siblings).

    A prefix runs once for all of its continuations in the same micro-batch. The last token of a
    continuation predicts nothing and is not fed, unless a head reads it. Weights are final, so any split
    sums to the same.
    """
    shares: list[list[int]] = []
    used, prefixes = 0, set[int]()
    for unit in _units(batch):
        group = batch.prefix_S[unit[0]]
        own = sum(_fed(batch, sequence) for sequence in unit)
        prefix = len(batch.prefix_tokens[group])
        cost = own + (0 if group in prefixes else prefix)
        if not shares or used + cost > micro_tokens:
            shares.append([])
            used, prefixes = 0, set[int]()
            cost = own + prefix
        shares[-1].extend(unit)
        used += cost
        prefixes.add(group)
    bounds = torch.searchsorted(batch.sequence_T.contiguous(), torch.arange(len(batch.tokens_S) + 1)).tolist()
    return [_micro(batch, share, bounds, device) for share in shares]


def _units(batch: Batch) -> list[list[int]]:
    """What must stay together."""
    count = range(len(batch.tokens_S))
    if not batch.algorithm.whole_groups:
        return [[sequence] for sequence in count]
    return [list(found) for _, found in groupby(count, key=lambda sequence: batch.prefix_S[sequence])]


def _fed(batch: Batch, sequence: int) -> int:
    return len(batch.tokens_S[sequence]) - (batch.algorithm.head != "after")


def _micro(batch: Batch, share: list[int], bounds: list[int], device: torch.device) -> Micro:
    flat: list[int] = []
    families: list[tuple[int, list[int]]] = []
    sources: list[Tensor] = []
    owns: list[Tensor] = []
    prefix_end, current = -1, -1
    for sequence in share:
        prefix = batch.prefix_S[sequence]
        if prefix != current:
            flat.extend(batch.prefix_tokens[prefix])
            families.append((len(batch.prefix_tokens[prefix]), []))
            prefix_end, current = len(flat) - 1, prefix
        start, fed = len(flat), _fed(batch, sequence)
        flat.extend(batch.tokens_S[sequence][:fed])
        families[-1][1].append(fed)
        place_T = batch.place_T[bounds[sequence] : bounds[sequence + 1]]
        sources.append(torch.where(place_T == 0, prefix_end, start + place_T - 1))
        owns.append(start + place_T)
    scored = slice(bounds[share[0]], bounds[share[-1] + 1])
    return Micro(
        tokens_N=torch.tensor(flat, device=device),
        tree=Tree(families, device),
        source_T=torch.cat(sources).to(device),
        own_T=torch.cat(owns).to(device),
        target_T=batch.target_T[scored].to(device),
        scored=scored,
    )


def run(
    policy: Policy, micro: Micro, batch: Batch, *, critic: Critic | None = None, reference: Policy | None = None
) -> Readings:
    """One micro-batch through the policy, and through its critic and its reference where the batch's
    algorithm reads them."""
    algorithm, count = batch.algorithm, len(micro.target_T)
    hidden_ND = policy.hidden(micro.tokens_N, micro.tree.positions_N, micro.tree)
    logp_T = entropy_T = torch.full((count,), float("nan"), device=hidden_ND.device)
    measured: Mapping[str, Tensor] = {}
    if algorithm.language:
        hidden_TD = hidden_ND[micro.source_T]
        logp_T, entropy_T = token_logp(hidden_TD, policy.head_VD, micro.target_T, batch.temperature, policy.softcap)
        if algorithm.measures:
            measured = _measured(policy, hidden_TD, micro, batch, reference)
    value_T = None
    if algorithm.head is not None:
        assert critic is not None, "an algorithm with a scalar head needs one"
        places_T = micro.own_T if algorithm.head == "after" else micro.source_T
        value_T = critic.value(hidden_ND, micro)[places_T]
        value_T = value_T[:, 0] if algorithm.classes == 1 else value_T
    return Readings(logp_T=logp_T, entropy_T=entropy_T, value_T=value_T, measured=measured)


def _measured(
    policy: Policy, hidden_TD: Tensor, micro: Micro, batch: Batch, reference: Policy | None
) -> Mapping[str, Tensor]:
    other: tuple[Tensor, Tensor, float | None] | None = None
    if reference is not None:
        with torch.no_grad():
            ref_ND = reference.hidden(micro.tokens_N, micro.tree.positions_N, micro.tree)
        other = ref_ND[micro.source_T], reference.head_VD, reference.softcap
    return measure(
        batch.algorithm.measures, hidden_TD, policy.head_VD, batch.temperature, policy.softcap, reference=other
    )


@torch.no_grad()
def score(policy: Policy, batch: Batch, micro_tokens: int = 8192) -> Tensor:
    """log-probs of all scored tokens of a batch, `[T]` in nats on the CPU, without gradient."""
    parts = [torch.zeros(0)]
    for micro in split(batch, micro_tokens, policy.device):
        hidden_ND = policy.hidden(micro.tokens_N, micro.tree.positions_N, micro.tree)
        logp_T, _ = token_logp(
            hidden_ND[micro.source_T], policy.head_VD, micro.target_T, batch.temperature, policy.softcap
        )
        parts.append(logp_T.cpu())
    return torch.cat(parts)


@torch.no_grad()
def appraise(policy: Policy, critic: Critic, batch: Batch, micro_tokens: int = 8192) -> tuple[Tensor, Tensor]:
    """A critic's value before each scored token and after it, `[T]` each, without gradient. The batch must
    feed last tokens (a head that reads "after")."""
    assert batch.algorithm.head == "after", "the value after the last token is read at the last token"
    before, after = [torch.zeros(0)], [torch.zeros(0)]
    for micro in split(batch, micro_tokens, policy.device):
        hidden_ND = policy.hidden(micro.tokens_N, micro.tree.positions_N, micro.tree) if critic.shared else None
        value_N = critic.score(critic.value(hidden_ND, micro)).cpu()
        before.append(value_N[micro.source_T.cpu()])
        after.append(value_N[micro.own_T.cpu()])
    return torch.cat(before), torch.cat(after)
