"""A file of answers, scored by any reward: rows in, the same rows with score, status and note out."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headwater.data.formats import Row, find, read_file
from headwater.data.tasks import TasksConfig, as_task
from headwater.errors import ConfigError, DataError
from headwater.rewards.source import Source, judge, without
from headwater.types import Group, Signal, Span, Status, Task, Trajectory

RESPONSE = "response"
GIVEN = ("score", "status", "note")
"""Fields that scoring gives to a row."""

IN_FLIGHT = 64
"""Groups that a source is asked about at once; its own `concurrency` may be less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One row of a file: its fields as they are, and the task and the response that they hold."""

    where: str
    fields: Mapping[str, Any]
    task: Task
    response: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """An answer with what a source said of it. `score` is None unless the status is ok."""

    answer: Answer
    score: float | None
    status: Status
    note: str

    @property
    def row(self) -> dict[str, Any]:
        """The row of the file, with what it was given."""
        kept = {key: value for key, value in self.answer.fields.items() if key not in GIVEN}
        return kept | {"score": self.score, "status": self.status, "note": self.note}


# --- rows in ---------------------------------------------------------------------------------------


def read_answers(name: str, needs: frozenset[str] = frozenset(), ours: Sequence[str] = ()) -> list[Answer]:
    """Every row of a .jsonl file, checked before anything is scored.

    A row needs a text `response`, and what `needs` names of a task, such as "prompt" or "answer". All other fields go
    into the task's meta, but for `ours`, which are not the task's; what a source needs of those, such as tests, may
    have several forms, so that only the source itself can miss them. Raises DataError, with the line, for the first
    row that is not so.
    """
    path = find(name, "FILE.jsonl")
    if path.suffix != ".jsonl":
        raise ConfigError(f"Cannot score '{path}': wanted a .jsonl file, one JSON object a line.")
    config = TasksConfig(source=str(path), needs_answer=False)
    answers = [_answer(row, config, needs, (RESPONSE, *GIVEN, *ours)) for row in read_file(path)]
    if not answers:
        raise DataError(f"{path} has no rows, so there is nothing to score.")
    return answers


def _answer(row: Row, config: TasksConfig, needs: frozenset[str], ours: Sequence[str]) -> Answer:
    response = row.fields.get(RESPONSE)
    if not isinstance(response, str):
        found = f"holds a {type(response).__name__}" if RESPONSE in row.fields else "is missing"
        raise DataError(f"{row.where}: field '{RESPONSE}' {found}, wanted text: what is to be scored.")
    if "score" in row.fields and "status" not in row.fields:
        raise DataError(f"{row.where}: there is a field 'score' already, which would be lost. Rename it.")
    asked = "prompt" in row.fields or "messages" in row.fields
    fields = {key: value for key, value in row.fields.items() if key not in ours}
    task = as_task(replace(row, fields=fields if asked else {**fields, "prompt": "-"}), config)
    task = task if asked else replace(task, prompt="")
    for need in sorted(needs & set(Task.__dataclass_fields__)):
        if getattr(task, need) in (None, "", ()):
            raise DataError(f"{row.where}: no '{need}', which this reward needs. The row has: {', '.join(row.fields)}.")
    return Answer(where=row.where, fields=row.fields, task=task, response=response)


# --- scores out ------------------------------------------------------------------------------------


async def score(
    answers: Sequence[Answer], source: Source, progress: Callable[[int], None] = lambda done: None
) -> list[Scored]:
    """Every answer with what the source says of it, in order. Answers to the same task, whatever their
    ids, are siblings of one group, so that a source that compares can. `progress` is told how many
    answers are done each time that more are."""
    places = siblings(answers)
    groups = [as_group(answers[members[0]].task, [answers[i].response for i in members]) for members in places]
    said: dict[int, Signal] = {}
    for members, signals in zip(places, await ask(groups, source, progress), strict=True):
        said.update(zip(members, signals, strict=True))
    return [_scored(answer, said[place]) for place, answer in enumerate(answers)]


async def ask(
    groups: Sequence[Group], source: Source, progress: Callable[[int], None] = lambda done: None
) -> list[tuple[Signal, ...]]:
    """The reward of every trajectory of every group, or why there is none; a few groups at once."""
    if "reward" not in source.offers:
        raise ConfigError(
            f"'{source.name}' gives {', '.join(sorted(source.offers)) or 'nothing'} and no reward, so it has no score."
        )
    slots, done = asyncio.Semaphore(IN_FLIGHT), 0

    async def one(group: Group) -> tuple[Signal, ...]:
        nonlocal done
        async with slots:
            (judged,) = await judge([group], [(source, 1.0)])
        done += len(group.trajectories)
        progress(done)
        none = without(source.name, "abstained", "gave no reward")
        return tuple(next((s for s in t.signals if s.name == "reward"), none) for t in judged.trajectories)

    calls = [asyncio.ensure_future(one(group)) for group in groups]
    try:
        return list(await asyncio.gather(*calls))
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def siblings(answers: Sequence[Answer], ours: Sequence[str] = ()) -> list[list[int]]:
    """Places of the answers to each task, by what the task is and not by what it is called; fields that are `ours`
    are not the task's."""
    places: dict[str, list[int]] = {}
    for place, answer in enumerate(answers):
        fields = {key: value for key, value in answer.fields.items() if key not in ("id", RESPONSE, *GIVEN, *ours)}
        places.setdefault(json.dumps(fields, sort_keys=True), []).append(place)
    return list(places.values())


def as_group(task: Task, texts: Sequence[str]) -> Group:
    """Texts as answers to a task, as if a policy had written them. Nobody sampled them, so they have no tokens."""
    spans = [Span(author="policy", tokens=(), text=text) for text in texts]
    return Group(task=task, trajectories=tuple(Trajectory(task_id=task.id, spans=(span,)) for span in spans))


def _scored(answer: Answer, signal: Signal) -> Scored:
    score = signal.values[0] if signal.status == "ok" else None
    return Scored(answer=answer, score=score, status=signal.status, note=signal.note)


def lines(scored: Sequence[Scored]) -> Iterator[bytes]:
    """The rows as lines of JSON. Half a surrogate pair, which UTF-8 cannot hold, stays as JSON escapes it."""
    for each in scored:
        yield (json.dumps(each.row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def check_out(path: Path, overwrite: bool) -> None:
    """Raise ConfigError, before anything is scored, where the result could not be written."""
    if path.exists() and not (overwrite and path.is_file()):
        raise ConfigError(f"{path.absolute()} exists and is kept as it is. Name another file, or give --overwrite.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"There is no folder {path.absolute().parent} to write into. Make it first.")


def save(scored: Sequence[Scored], path: Path) -> None:
    """Write the rows whole or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.writelines(lines(scored))
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{path.absolute()} cannot be written: {error.strerror}. Name another file.") from error


def summary(scored: Sequence[Scored]) -> str:
    """Counts, the mean of what is ok, and the commonest notes of what is not."""
    counts = Counter(each.status for each in scored)
    good = [each.score for each in scored if each.score is not None]
    mean = f" (mean {sum(good) / len(good):.4g})" if good else ""
    text = f"{len(scored)} rows: {len(good)} ok{mean}, {counts['abstained']} abstained, {counts['failed']} failed"
    notes = Counter(each.note[:200] for each in scored if each.status != "ok" and each.note)
    return "\n".join([text, *(f"  {count} x {note}" for note, count in notes.most_common(3))])
