"""Judged groups -> Batch: credit applied, weights settled, prompts shared. Nothing is padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.types import Algorithm, Author, Batch, Group, Pull, Trajectory


@dataclass(slots=True)
class _Scored:
    """A trajectory's tokens that some term scores, as seen from its continuation."""

    trajectory: Trajectory
    prefix: int
    tokens: tuple[int, ...]
    places: list[int]
    authors: list[Author]
    logps: list[float]
    versions: list[int]


def pack(groups: Sequence[Group], algorithm: Algorithm, *, temperature: float = 1.0, length: int = 1) -> Batch:
    """One optimizer step as a flat Batch.

    `temperature` is what was sampled at; `length` the most tokens a turn may have (for the fixed
    length weighting). Weights are worked out over every trajectory that has an advantage. Those whose
    advantages are all zero are counted in the weights but not run: an advantage of zero is no pull.
    `dropped` counts trajectories without an advantage because no source could tell.
    """
    credits = [term.credit(groups) for term in algorithm.terms]
    authors: set[Author] = {term.on for term in algorithm.terms}
    prefixes: list[tuple[int, ...]] = []
    rows: list[_Scored] = []
    advantages: list[list[Tensor | None]] = [[] for _ in algorithm.terms]
    dropped = 0
    for g, group in enumerate(groups):
        shared = _shared_prefix(group.trajectories)
        prefixes.append(shared)
        for i, trajectory in enumerate(group.trajectories):
            given = [credit[g][i] for credit in credits]
            row = _scored(trajectory, len(prefixes) - 1, len(shared), authors)
            if all(a is None for a in given) or not row.places:
                dropped += 1
                continue
            rows.append(row)
            for kept, advantage in zip(advantages, given, strict=True):
                kept.append(advantage)
    return _assemble(algorithm, prefixes, rows, advantages, temperature, length, dropped)


def _shared_prefix(trajectories: Sequence[Trajectory]) -> tuple[int, ...]:
    """The longest common beginning of the siblings' prompts."""
    prompts = [trajectory.spans[0].tokens for trajectory in trajectories if trajectory.spans[0].author == "prompt"]
    assert len(prompts) == len(trajectories) > 0, "a trajectory starts with its prompt"
    first, last = min(prompts), max(prompts)
    end = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    assert end > 0, "siblings share at least the first token of their prompt"
    return first[:end]


def _scored(trajectory: Trajectory, prefix: int, start: int, authors: set[Author]) -> _Scored:
    row = _Scored(trajectory, prefix, trajectory.tokens[start:], [], [], [], [])
    at = -start
    for span in trajectory.spans:
        if span.author in authors and span.author != "prompt":
            count = len(span.tokens)
            row.places.extend(range(at, at + count))
            row.authors.extend(span.author for _ in range(count))
            row.logps.extend(span.logps if span.logps is not None else [float("nan")] * count)
            if span.version is not None:
                row.versions.append(span.version)
        at += len(span.tokens)
    return row


def _spread(row: _Scored, advantage: Tensor | None, on: Author) -> Tensor:
    """Advantage per scored token: a scalar holds for every token of its author."""
    by_T = torch.zeros(len(row.places))
    if advantage is not None:
        mine = torch.tensor([author == on for author in row.authors])
        by_T[mine] = advantage.float()
    return by_T


def _assemble(
    algorithm: Algorithm,
    prefixes: list[tuple[int, ...]],
    rows: list[_Scored],
    advantages: list[list[Tensor | None]],
    temperature: float,
    length: int,
    dropped: int,
) -> Batch:
    sequence_T = torch.tensor([s for s, row in enumerate(rows) for _ in row.places], dtype=torch.long)
    pulls: list[Pull] = []
    for term, given in zip(algorithm.terms, advantages, strict=True):
        spread = [_spread(row, a, term.on) for row, a in zip(rows, given, strict=True)]
        on_T = torch.tensor([author == term.on for row in rows for author in row.authors], dtype=torch.bool)
        included_S = torch.tensor([a is not None for a in given], dtype=torch.bool)
        weight_T = torch.zeros(len(sequence_T))
        weight_T[on_T] = term.weighting(sequence_T[on_T], included_S, length).float()
        advantage_T = torch.cat(spread) if spread else torch.zeros(0)
        pulls.append(
            Pull(
                loss=term.loss,
                name=term.name,
                coefficient=term.coefficient,
                advantage_T=advantage_T,
                weight_T=weight_T,
            )
        )
    place_T = torch.tensor([place for row in rows for place in row.places], dtype=torch.long)
    target_T = torch.tensor([row.tokens[place] for row in rows for place in row.places], dtype=torch.long)
    logp_T = torch.tensor([logp for row in rows for logp in row.logps])
    behavior_logp_T = None if bool(logp_T.isnan().any()) else logp_T
    keep_S = _pulled(sequence_T, pulls, len(rows))
    keep_T = keep_S[sequence_T]
    renumber = torch.cumsum(keep_S.long(), 0) - 1
    kept = [row for row, keep in zip(rows, keep_S.tolist(), strict=True) if keep]
    versions = [v for row in rows for v in row.versions]
    return Batch(
        prefix_tokens=tuple(prefixes),
        # tokens after the last scored one predict nothing that is asked for
        tokens_S=tuple(row.tokens[: row.places[-1] + 1] for row in kept),
        prefix_S=tuple(row.prefix for row in kept),
        target_T=target_T[keep_T],
        place_T=place_T[keep_T],
        sequence_T=renumber[sequence_T[keep_T]],
        pulls=tuple(
            Pull(
                loss=pull.loss,
                name=pull.name,
                coefficient=pull.coefficient,
                advantage_T=pull.advantage_T[keep_T],
                weight_T=pull.weight_T[keep_T],
            )
            for pull in pulls
        ),
        behavior_logp_T=None if behavior_logp_T is None else behavior_logp_T[keep_T],
        temperature=temperature,
        oldest_version=min(versions, default=None),
        dropped=dropped,
    )


def _pulled(sequence_T: Tensor, pulls: Sequence[Pull], sequences: int) -> Tensor:
    """Which sequences have any token with a non-zero advantage, `[S]` bool."""
    keep_S = torch.zeros(sequences, dtype=torch.bool)
    for pull in pulls:
        keep_S[sequence_T[(pull.advantage_T != 0) & (pull.weight_T != 0)]] = True
    return keep_S
