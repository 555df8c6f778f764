"""From tokens to sequences and pairs, and back. Sequence numbers may skip, as they do in a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from headwater.types import Scored


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences among T tokens, numbered from 0 in order: `of_T` says which one each token is of."""

    of_T: Tensor
    count: int

    @classmethod
    def of(cls, sequence_T: Tensor) -> Sequences:
        """Of any numbering."""
        names, of_T = cast(tuple[Tensor, Tensor], torch.unique(sequence_T, return_inverse=True))  # pyright: ignore[reportUnknownMemberType]
        return cls(of_T, len(names))

    def sum(self, values_T: Tensor) -> Tensor:
        """Sum over each sequence's tokens, [S]."""
        return values_T.new_zeros(self.count).index_add(0, self.of_T, values_T)

    def mean(self, values_T: Tensor) -> Tensor:
        """Mean over each sequence's tokens, [S]."""
        return self.sum(values_T) / torch.bincount(self.of_T, minlength=self.count)

    def one(self, values_T: Tensor) -> Tensor:
        """What all tokens of a sequence have in common, [S], such as its advantage."""
        first = torch.full((self.count,), len(self.of_T), dtype=torch.long, device=self.of_T.device)
        places = torch.arange(len(self.of_T), device=self.of_T.device)
        first = first.scatter_reduce(0, self.of_T, places, "amin")
        return values_T[first]

    def last(self, values_T: Tensor) -> Tensor:
        """What stands at each sequence's last token, [S, ...]."""
        last = torch.zeros(self.count, dtype=torch.long, device=self.of_T.device)
        places = torch.arange(len(self.of_T), device=self.of_T.device)
        last = last.scatter_reduce(0, self.of_T, places, "amax")
        return values_T[last]


@dataclass(frozen=True, slots=True)
class Pairs:
    """All pairs of siblings of which one is preferred, by the targets of a preference term: the higher
    one is better, and equal ones make no pair. `better_P` and `worse_P` index sequences, `gap_P` is by
    how much, `group_S` numbers the groups from 0. A group of K ranked siblings has K(K-1)/2 pairs."""

    sequences: Sequences
    better_P: Tensor
    worse_P: Tensor
    gap_P: Tensor
    group_S: Tensor

    @classmethod
    def of(cls, scored: Scored) -> Pairs:
        """Needs groups that are whole."""
        assert scored.group_T is not None, "a preference is among the siblings of a group"
        sequences = Sequences.of(scored.sequence_T)
        group_S = Sequences.of(sequences.one(scored.group_T)).of_T
        target_S = sequences.one(scored.advantage_T)
        gap_SS = target_S[:, None] - target_S[None, :]
        better, worse = torch.nonzero((group_S[:, None] == group_S[None, :]) & (gap_SS > 0), as_tuple=True)
        return cls(sequences, better, worse, gap_SS[better, worse], group_S)

    def spread(self, loss_P: Tensor) -> Tensor:
        """Each group's mean over its pairs, at every token of the group, [T]; 0 in a group without a pair."""
        group_P = self.group_S[self.better_P]
        count = int(self.group_S.max()) + 1 if len(self.group_S) else 0
        pairs_G = torch.bincount(group_P, minlength=count).clamp(min=1)
        loss_G = loss_P.new_zeros(count).index_add(0, group_P, loss_P) / pairs_G
        return loss_G[self.group_S][self.sequences.of_T]
