"""Log-probs at scored positions, chunk by chunk, without ever holding the logits of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwater.types import Measure

CHUNK_ELEMENTS = 64 * 1024 * 1024
"""Logits held at once, in elements (256 MiB of float32)."""

KEPT_ELEMENTS = 32 * 1024 * 1024
"""Up to so many log-probs (128 MiB) are kept for backward instead of being computed again there."""

FEW_ROWS = 96
"""Up to so many rows, logits are computed on CPU as the transposed product: with 8 to 64 rows on the
left MKL was measured to take 1.5 to 3 times as long for the same numbers (copy back included)."""


def project(hidden_ND: Tensor, head_VD: Tensor, softcap: float | None = None) -> Tensor:
    """Logits in float32, `[N, V]`.

    The product is accumulated and kept in float32 even when hidden states are bfloat16: a logit of
    20 rounded to bfloat16 is off by up to 0.06 nats, more than sampler and learner may differ by.
    """
    logits = _matmul_float32(hidden_ND, head_VD.T)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _matmul_float32(left: Tensor, right: Tensor) -> Tensor:
    if right.is_cuda:
        if right.dtype == torch.float32:
            return left.float() @ right
        return torch.mm(left.to(right.dtype), right, out_dtype=torch.float32)
    if len(left) <= FEW_ROWS:
        return torch.mm(right.T.float(), left.T.float()).T.contiguous()
    return left.float() @ right.float()


class _TokenLogp(torch.autograd.Function):
    """logp and entropy of each row. Unless they are few, backward computes each chunk's logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        head_VD: Tensor,
        target_T: Tensor,
        temperature: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        logp_T = torch.empty(len(target_T), dtype=torch.float32, device=hidden_TD.device)
        entropy_T, norm_T = torch.empty_like(logp_T), torch.empty_like(logp_T)
        keep = len(target_T) * head_VD.shape[0] <= min(KEPT_ELEMENTS, CHUNK_ELEMENTS) and softcap is None
        kept_TV: Tensor | None = None
        for rows in _chunks(len(target_T), head_VD.shape[0]):
            logits = project(hidden_TD[rows], head_VD, softcap)
            if temperature != 1:
                logits /= temperature
            logp_TV = torch.log_softmax(logits, -1)
            picked = target_T[rows, None]
            logp_T[rows] = logp_TV.gather(-1, picked)[:, 0]
            norm_T[rows] = logits.gather(-1, picked)[:, 0] - logp_T[rows]
            entropy_T[rows] = -torch.linalg.vecdot(logp_TV.exp(), logp_TV)
            kept_TV = logp_TV if keep else None
        ctx.save_for_backward(hidden_TD, head_VD, target_T, norm_T, kept_TV)
        ctx.temperature, ctx.softcap = temperature, softcap
        ctx.mark_non_differentiable(entropy_T)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, head_VD, target_T, norm_T, kept_TV = ctx.saved_tensors
        wants_hidden, wants_head = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        upstream_T = gradients[0] / ctx.temperature
        grad_hidden = torch.zeros_like(hidden_TD) if wants_hidden else None
        grad_head = torch.zeros_like(head_VD, dtype=torch.float32) if wants_head else None
        for rows in _chunks(len(target_T), head_VD.shape[0]):
            raw: Tensor | None = None
            if kept_TV is not None:
                logp_TV = kept_TV
            else:
                raw = project(hidden_TD[rows], head_VD, ctx.softcap)
                logp_TV = raw / ctx.temperature - norm_T[rows, None]
            # d logp / d logits = onehot - softmax, row by row
            slope = logp_TV.exp().mul_(-upstream_T[rows, None])
            slope.scatter_add_(-1, target_T[rows, None], upstream_T[rows, None])
            if raw is not None and ctx.softcap is not None:
                slope = slope * (1 - (raw / ctx.softcap) ** 2)
            slope = slope.to(head_VD.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = (slope @ head_VD).to(hidden_TD.dtype)
            if grad_head is not None:
                grad_head += slope.T @ hidden_TD[rows].to(head_VD.dtype)
        return grad_hidden, None if grad_head is None else grad_head.to(head_VD.dtype), None, None, None


def _chunks(rows: int, width: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // width)
    return [slice(at, min(at + size, rows)) for at in range(0, rows, size)]


def token_logp(
    hidden_TD: Tensor,
    head_VD: Tensor,
    target_T: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """log pi(target) in nats at each row, `[T]`, and the entropy there (without gradient), `[T]`.

    The distribution is softmax(logits / temperature): the one that was sampled from. Memory is
    bounded by `CHUNK_ELEMENTS` logits whatever T and V are; backward pays for it by computing the
    logits once more.
    """
    assert temperature > 0, "log-probs of greedy sampling are not defined; score at temperature 1"
    logp_T, entropy_T = _TokenLogp.apply(hidden_TD, head_VD, target_T, temperature, softcap)  # type: ignore[misc]
    return logp_T, entropy_T


def measure(
    measures: Mapping[str, Measure],
    hidden_TD: Tensor,
    head_VD: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
    *,
    reference: tuple[Tensor, Tensor, float | None] | None = None,
) -> dict[str, Tensor]:
    """What each measure finds in the distribution at each row, `[T]` each, with gradient.

    `reference` is another model's (hidden_TD, head_VD, softcap) at the same rows. Logits exist for one
    chunk of rows at a time, in forward and again in backward.
    """

    def some(own_TD: Tensor, other_TD: Tensor | None) -> tuple[Tensor, ...]:
        logp_TV = _distribution(own_TD, head_VD, temperature, softcap)
        ref_logp_TV = None
        if reference is not None and other_TD is not None:
            with torch.no_grad():
                ref_logp_TV = _distribution(other_TD, reference[1], temperature, reference[2])
        return tuple(each(logp_TV, ref_logp_TV) for each in measures.values())

    chunks: list[tuple[Tensor, ...]] = []
    for rows in _chunks(len(hidden_TD), head_VD.shape[0]):
        other_TD = None if reference is None else reference[0][rows]
        chunks.append(checkpoint(some, hidden_TD[rows], other_TD, use_reentrant=False))  # pyright: ignore[reportArgumentType]
    return {name: torch.cat(parts) for name, parts in zip(measures, zip(*chunks, strict=True), strict=True)}


def _distribution(hidden_TD: Tensor, head_VD: Tensor, temperature: float, softcap: float | None) -> Tensor:
    """Log-probs over the vocabulary in float32, `[T, V]`, differentiable everywhere."""
    logits = hidden_TD.float() @ head_VD.float().T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.log_softmax(logits / temperature, -1)
