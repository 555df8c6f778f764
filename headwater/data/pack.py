"""Judged groups -> Batch: credit applied, weights settled, prompts shared. Nothing is padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from headwater.types import Advantages, Algorithm, Author, Batch, Extent, Group, Pull, Term, Trajectory

COLUMNS = {"logp": "proximal_logp_T", "ref_logp": "ref_logp_T", "value": "old_value_T"}
"""Signals of level token that losses see as columns."""


@dataclass(slots=True)
class _Row:
    """A trajectory as seen from its continuation, with the tokens that some term's author wrote."""

    trajectory: Trajectory
    group: int
    tokens: tuple[int, ...]
    places: list[int]
    authors: list[Author]
    versions: list[int]

    def on(self, author: Author) -> Tensor:
        """Which of its tokens `author` wrote, bool."""
        return torch.tensor([a == author for a in self.authors], dtype=torch.bool)


def pack(groups: Sequence[Group], algorithm: Algorithm, *, temperature: float = 1.0, length: int = 1) -> Batch:
    """One optimizer step as a flat Batch.

    `temperature` is what was sampled at; `length` the most tokens a turn may have (for the fixed
    length weighting). Weights are worked out over every token that has an advantage. Sequences whose
    advantages are all zero are counted in the weights but not run: an advantage of zero is no pull.
    `dropped` counts trajectories without an advantage because no source could tell.
    """
    credits = [term.credit(groups) for term in algorithm.terms]
    authors: set[Author] = {term.on for term in algorithm.terms}
    prefixes: list[tuple[int, ...]] = []
    rows: list[_Row] = []
    given: list[list[Tensor | None]] = [[] for _ in algorithm.terms]
    dropped = 0
    for g, group in enumerate(groups):
        shared = _shared_prefix(group.trajectories)
        prefixes.append(shared)
        for i, trajectory in enumerate(group.trajectories):
            advantages: Advantages = tuple(credit[g][i] for credit in credits)
            row = _row(trajectory, g, len(shared), authors)
            if all(a is None for a in advantages) or not row.places:
                dropped += trajectory.agent != "greedy"
                continue
            rows.append(row)
            for kept, advantage in zip(given, advantages, strict=True):
                kept.append(advantage)
    pulls = [_pull(term, rows, advantages, length) for term, advantages in zip(algorithm.terms, given, strict=True)]
    return _assemble(algorithm, prefixes, rows, pulls, temperature, dropped)


def everything(
    groups: Sequence[Group], algorithm: Algorithm, temperature: float = 1.0
) -> tuple[Batch, list[Trajectory]]:
    """A Batch, without pulls, that scores every token that the policy wrote, and whose each sequence is:
    what signals of the models themselves are worked out from."""
    prefixes: list[tuple[int, ...]] = []
    rows: list[_Row] = []
    for g, group in enumerate(groups):
        shared = _shared_prefix(group.trajectories)
        prefixes.append(shared)
        found = (_row(trajectory, g, len(shared), {"policy"}) for trajectory in group.trajectories)
        rows.extend(row for row in found if row.places and row.trajectory.agent != "greedy")
    sequence_T = _sequences(rows)
    batch = _batch(algorithm, prefixes, rows, sequence_T, torch.arange(len(sequence_T)), (), temperature, 0)
    return batch, [row.trajectory for row in rows]


def divide(batch: Batch, parts: int) -> list[Batch]:
    """The batch in at most `parts` parts of about equally many sequences, for an update each; groups stay
    together. Weights are scaled so that the parts are, on average, as strong as the whole."""
    groups = sorted(set(batch.prefix_S))
    parts = min(parts, len(groups))
    if parts <= 1:
        return [batch]
    bounds = [round(len(groups) * i / parts) for i in range(parts + 1)]
    return [_part(batch, set(groups[low:high]), float(parts)) for low, high in pairwise(bounds)]


def _part(batch: Batch, groups: set[int], scale: float) -> Batch:
    mine_S = torch.tensor([group in groups for group in batch.prefix_S])
    mine_T = mine_S[batch.sequence_T]
    sequence_S, place_T = torch.cumsum(mine_S.long(), 0) - 1, torch.cumsum(mine_T.long(), 0) - 1

    def some(values_T: Tensor | None) -> Tensor | None:
        return None if values_T is None else values_T[mine_T]

    pulls = tuple(
        replace(
            pull,
            of_T=place_T[pull.of_T[kept_T]],
            advantage_T=pull.advantage_T[kept_T],
            weight_T=pull.weight_T[kept_T] * scale,
        )
        for pull in batch.pulls
        for kept_T in (mine_T[pull.of_T],)
    )
    chosen = [s for s, mine in enumerate(mine_S.tolist()) if mine]
    return replace(
        batch,
        tokens_S=tuple(batch.tokens_S[s] for s in chosen),
        prefix_S=tuple(batch.prefix_S[s] for s in chosen),
        target_T=batch.target_T[mine_T],
        place_T=batch.place_T[mine_T],
        sequence_T=sequence_S[batch.sequence_T[mine_T]],
        pulls=pulls,
        behavior_logp_T=some(batch.behavior_logp_T),
        proximal_logp_T=some(batch.proximal_logp_T),
        ref_logp_T=some(batch.ref_logp_T),
        old_value_T=some(batch.old_value_T),
        constants={name: values_T[mine_T] for name, values_T in batch.constants.items()},
    )


def _shared_prefix(trajectories: Sequence[Trajectory]) -> tuple[int, ...]:
    """The longest common beginning of the siblings' prompts."""
    prompts = [trajectory.spans[0].tokens for trajectory in trajectories if trajectory.spans[0].author == "prompt"]
    assert len(prompts) == len(trajectories) > 0, "a trajectory starts with its prompt"
    first, last = min(prompts), max(prompts)
    end = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    assert end > 0, "siblings share at least the first token of their prompt"
    return first[:end]


def _row(trajectory: Trajectory, group: int, start: int, authors: set[Author]) -> _Row:
    row = _Row(trajectory, group, trajectory.tokens[start:], [], [], [])
    at = -start
    for span in trajectory.spans:
        if span.author in authors and span.author != "prompt":
            count = len(span.tokens)
            row.places.extend(range(at, at + count))
            row.authors.extend(span.author for _ in range(count))
            if span.version is not None:
                row.versions.append(span.version)
        at += len(span.tokens)
    return row


def _sequences(rows: Sequence[_Row]) -> Tensor:
    return torch.tensor([s for s, row in enumerate(rows) for _ in row.places], dtype=torch.long)


def _pull(term: Term, rows: Sequence[_Row], advantages: Sequence[Tensor | None], length: int) -> Pull:
    """A term on all rows: the tokens that take part, their advantages and their weights. A scalar
    advantage holds for every token of its author."""
    parts = [torch.zeros(0)]
    for row, advantage in zip(rows, advantages, strict=True):
        by_T = torch.full((len(row.places),), float("nan"))
        if advantage is not None:
            by_T[row.on(term.on)] = advantage.float()
        parts.append(by_T)
    advantage_T = torch.cat(parts)
    of_T = torch.nonzero(~advantage_T.isnan())[:, 0]
    names_S, sequence_T = torch.unique(_sequences(rows)[of_T], return_inverse=True)
    group_S = torch.tensor([row.group for row in rows], dtype=torch.long)[names_S]
    weight_T = term.weighting(Extent(sequence_T=sequence_T, group_S=group_S, length=length))
    return Pull(
        loss=term.loss,
        name=term.name,
        coefficient=term.coefficient() if callable(term.coefficient) else term.coefficient,
        of_T=of_T,
        advantage_T=advantage_T[of_T],
        weight_T=weight_T.float(),
    )


def _assemble(
    algorithm: Algorithm,
    prefixes: list[tuple[int, ...]],
    rows: list[_Row],
    pulls: list[Pull],
    temperature: float,
    dropped: int,
) -> Batch:
    """Keep what is pulled: sequences on which some term does something, and of them the tokens that
    some term covers."""
    sequence_T = _sequences(rows)
    keep_S = torch.zeros(len(rows), dtype=torch.bool)
    for term, pull in zip(algorithm.terms, pulls, strict=True):
        moves = pull.weight_T != 0 if term.gives == "target" else (pull.advantage_T != 0) & (pull.weight_T != 0)
        keep_S[sequence_T[pull.of_T[moves]]] = True
    keep_T = torch.zeros(len(sequence_T), dtype=torch.bool)
    for pull in pulls:
        keep_T[pull.of_T] = True
    keep_T &= keep_S[sequence_T]
    renumber = torch.cumsum(keep_T.long(), 0) - 1
    kept_pulls = tuple(
        Pull(
            loss=pull.loss,
            name=pull.name,
            coefficient=pull.coefficient,
            of_T=renumber[pull.of_T[mine]],
            advantage_T=pull.advantage_T[mine],
            weight_T=pull.weight_T[mine],
        )
        for pull in pulls
        for mine in (keep_T[pull.of_T],)
    )
    return _batch(algorithm, prefixes, rows, sequence_T, torch.nonzero(keep_T)[:, 0], kept_pulls, temperature, dropped)


def _batch(
    algorithm: Algorithm,
    prefixes: list[tuple[int, ...]],
    rows: list[_Row],
    sequence_T: Tensor,
    kept_T: Tensor,
    pulls: tuple[Pull, ...],
    temperature: float,
    dropped: int,
) -> Batch:
    """The batch of the scored tokens `kept_T`, which index those of all rows."""
    names_S, of_T = torch.unique(sequence_T[kept_T], return_inverse=True)
    kept = [rows[s] for s in names_S.tolist()]
    place_T = torch.tensor([place for row in rows for place in row.places], dtype=torch.long)
    target_T = torch.tensor([row.tokens[place] for row in rows for place in row.places], dtype=torch.long)
    last = [0] * len(kept)
    for s, place in zip(of_T.tolist(), place_T[kept_T].tolist(), strict=True):
        last[s] = place  # ascending within a sequence
    columns = {field: _column(rows, name, kept_T) for name, field in COLUMNS.items()}
    return Batch(
        prefix_tokens=tuple(prefixes),
        # tokens after the last scored one predict nothing that is asked for
        tokens_S=tuple(row.tokens[: end + 1] for row, end in zip(kept, last, strict=True)),
        prefix_S=tuple(row.group for row in kept),
        target_T=target_T[kept_T],
        place_T=place_T[kept_T],
        sequence_T=of_T,
        pulls=pulls,
        algorithm=algorithm,
        behavior_logp_T=_column(rows, None, kept_T),
        **columns,
        constants={name: _constant(rows, name, kept_T) for name in sorted(algorithm.reads)},
        temperature=temperature,
        oldest_version=min((v for row in rows for v in row.versions), default=None),
        dropped=dropped,
    )


def _column(rows: Sequence[_Row], name: str | None, kept_T: Tensor) -> Tensor | None:
    """A column of all rows: a token signal called `name`, or the sampler's log-probs for None. NaN where
    there is none, as at tokens of the world; None when there is none at all."""
    parts = [torch.zeros(0)]
    found = False
    for row in rows:
        signal = row.trajectory.signal(name) if name else None
        values = (signal.values if signal else None) if name else row.trajectory.logps
        by_T = torch.full((len(row.places),), float("nan"))
        mine = row.on("policy")
        if values is not None:
            by_T[mine] = torch.tensor(values[: int(mine.sum())])
            found = True
        parts.append(by_T)
    return torch.cat(parts)[kept_T] if found else None


def _constant(rows: Sequence[_Row], name: str, kept_T: Tensor) -> Tensor:
    """A signal of level episode at every token; NaN where there is none."""
    parts = [torch.zeros(0)]
    for row in rows:
        signal = row.trajectory.signal(name)
        parts.append(torch.full((len(row.places),), signal.values[0] if signal else float("nan")))
    return torch.cat(parts)[kept_T]
