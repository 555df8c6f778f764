"""Who may attend to whom, when everything is one flat row of tokens.

A model here runs on `[1, N]` tokens without padding. The layout that travels with them answers each
layer's attention call. `Tree` is the layout of training: prefixes, and continuations that see their
prefix and themselves but not each other, so that a prompt runs once however many siblings share it.
The engine has its own layouts (over a key-value cache).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

DENSE_WASTE = 4.0
"""A dense mask over whole families runs in one kernel but also computes what the mask hides. It is
used while it computes at most this many times the pairs that are visible (measured on CPU: at 8
siblings of 12 tokens on 40, dense is 4 times faster than one call per sibling)."""


class Layout(Protocol):
    """Answers one attention call. Heads H of queries may be a multiple of the heads of keys."""

    def attend(self, layer: int, query_1HND: Tensor, key_1HND: Tensor, value_1HND: Tensor, scale: float) -> Tensor:
        """Attention output, `[1, N, H, D]`."""
        ...


@dataclass(frozen=True, slots=True)
class Family:
    """A prefix of `prefix` tokens followed, in the flat row, by continuations of these lengths."""

    start: int
    prefix: int
    continuations: tuple[int, ...]

    @property
    def size(self) -> int:
        """Tokens in all."""
        return self.prefix + sum(self.continuations)

    @property
    def visible(self) -> int:
        """Query-key pairs that attention needs."""
        own = sum(n * self.prefix + n * (n + 1) // 2 for n in self.continuations)
        return self.prefix * (self.prefix + 1) // 2 + own


class Tree:
    """Families side by side in one flat row."""

    def __init__(self, families: Sequence[tuple[int, Sequence[int]]], device: torch.device | str = "cpu") -> None:
        self.families: list[Family] = []
        start = 0
        for prefix, continuations in families:
            family = Family(start, prefix, tuple(continuations))
            self.families.append(family)
            start += family.size
        self.size = start
        self.device = torch.device(device)
        widest = max(f.size for f in self.families)
        visible = sum(f.visible for f in self.families)
        self.dense = len(self.families) * widest**2 <= DENSE_WASTE * visible

    @cached_property
    def positions_N(self) -> Tensor:
        """Position of each token in its own sequence: a continuation counts on from its prefix."""
        parts: list[Tensor] = []
        for family in self.families:
            parts.append(torch.arange(family.prefix))
            parts.extend(torch.arange(family.prefix, family.prefix + n) for n in family.continuations)
        return torch.cat(parts).to(self.device)

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """For the dense path: index of the token at [family, place], its inverse, and the mask."""
        widest = max(f.size for f in self.families)
        index = torch.zeros(len(self.families), widest, dtype=torch.long)
        inverse = torch.empty(self.size, dtype=torch.long)
        mask = torch.eye(widest, dtype=torch.bool).repeat(len(self.families), 1, 1)
        for row, family in enumerate(self.families):
            index[row, : family.size] = torch.arange(family.start, family.start + family.size)
            inverse[family.start : family.start + family.size] = row * widest + torch.arange(family.size)
            at = family.prefix
            mask[row, :at, :at] = torch.ones(at, at, dtype=torch.bool).tril()
            for n in family.continuations:
                mask[row, at : at + n, : family.prefix] = True
                mask[row, at : at + n, at : at + n] = torch.ones(n, n, dtype=torch.bool).tril()
                at += n
        return index.to(self.device), inverse.to(self.device), mask[:, None].to(self.device)

    def attend(self, layer: int, query_1HND: Tensor, key_1HND: Tensor, value_1HND: Tensor, scale: float) -> Tensor:
        """Attention output, `[1, N, H, D]`; the same numbers as one separate row per sequence."""
        attend = self._attend_dense if self.dense else self._attend_each
        query, key, value = query_1HND[0], key_1HND[0], value_1HND[0]
        if query.device.type == "cpu":
            # The engine attends in float32 too. Rounding probabilities to bfloat16 here was measured to
            # move log-probs of a 30-layer model by 0.03 nats from the sampler's.
            return attend(query.float(), key.float(), value.float(), scale).to(query.dtype)
        return attend(query, key, value, scale)

    def _attend_dense(self, query_HND: Tensor, key_HND: Tensor, value_HND: Tensor, scale: float) -> Tensor:
        index, inverse, mask = self._rows

        def rows(flat_HND: Tensor) -> Tensor:
            return flat_HND[:, index].transpose(0, 1)

        gqa = query_HND.shape[0] != key_HND.shape[0]
        out = F.scaled_dot_product_attention(
            rows(query_HND), rows(key_HND), rows(value_HND), attn_mask=mask, scale=scale, enable_gqa=gqa
        )
        return out.transpose(1, 2).flatten(0, 1)[inverse][None]

    def _attend_each(self, query_HND: Tensor, key_HND: Tensor, value_HND: Tensor, scale: float) -> Tensor:
        gqa = query_HND.shape[0] != key_HND.shape[0]
        q, k, v = query_HND[None], key_HND[None], value_HND[None]
        parts: list[Tensor] = []
        for family in self.families:
            head = slice(family.start, family.start + family.prefix)
            if family.prefix:
                parts.append(
                    F.scaled_dot_product_attention(
                        q[:, :, head],
                        k[:, :, head],
                        v[:, :, head],
                        is_causal=True,
                        scale=scale,
                        enable_gqa=gqa,
                    )
                )
            at = head.stop
            for n in family.continuations:
                own = slice(at, at + n)
                at += n
                if n == 0:
                    continue
                keys = torch.cat([k[:, :, head], k[:, :, own]], dim=2)
                values = torch.cat([v[:, :, head], v[:, :, own]], dim=2)
                mask = torch.ones(n, family.prefix + n, dtype=torch.bool, device=q.device).tril(family.prefix)
                parts.append(
                    F.scaled_dot_product_attention(
                        q[:, :, own], keys, values, attn_mask=mask, scale=scale, enable_gqa=gqa
                    )
                )
        return torch.cat(parts, dim=2).transpose(1, 2)
