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
from headwater.rewards.source import Source, judge
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


def read_answers(name: str, needs: frozenset[str] = frozenset()) -> list[Answer]:
    """Every row of a .jsonl file, checked before anything is scored.

    A row needs a text `response`, and what `needs` names: "prompt", "answer", or a field that a source
    finds in the task's meta, such as "tests". All other fields go there, too. Raises DataError, with the
    line, for the first row that is not so.
    """
    path = find(name, "FILE.jsonl")
    if path.suffix != ".jsonl":
        raise ConfigError(f"Cannot score '{path}': wanted a .jsonl file, one JSON object a line.")
    config = TasksConfig(source=str(path), needs_answer=False)
    answers = [_answer(row, config, needs) for row in read_file(path)]
    if not answers:
        raise DataError(f"{path} has no rows, so there is nothing to score.")
    return answers


def _answer(row: Row, config: TasksConfig, needs: frozenset[str]) -> Answer:
    response = row.fields.get(RESPONSE)
    if not isinstance(response, str):
        found = f"holds a {type(response).__name__}" if RESPONSE in row.fields else "is missing"
        raise DataError(f"{row.where}: field '{RESPONSE}' {found}, wanted text: what is to be scored.")
    if "score" in row.fields and "status" not in row.fields:
        raise DataError(f"{row.where}: there is a field 'score' already, which would be lost. Rename it.")
    asked = "prompt" in row.fields or "messages" in row.fields
    fields = {key: value for key, value in row.fields.items() if key not in (RESPONSE, *GIVEN)}
    task = as_task(replace(row, fields=fields if asked else {**fields, "prompt": "-"}), config)
    task = task if asked else replace(task, prompt="")
    for need in sorted(needs):
        if not _has(task, need):
            raise DataError(f"{row.where}: no '{need}', which this reward needs. The row has: {', '.join(row.fields)}.")
    return Answer(where=row.where, fields=row.fields, task=task, response=response)


def _has(task: Task, need: str) -> bool:
    if need in Task.__dataclass_fields__:
        return getattr(task, need) not in (None, "", ())
    return task.meta.get(need) is not None


# --- scores out ------------------------------------------------------------------------------------


async def score(
    answers: Sequence[Answer], source: Source, progress: Callable[[int], None] = lambda done: None
) -> list[Scored]:
    """Every answer with what the source says of it, in order. Answers to the same task, whatever their
    ids, are siblings of one group, so that a source that compares can. `progress` is told how many
    answers are done each time that more are."""
    if "reward" not in source.offers:
        raise ConfigError(
            f"'{source.name}' gives {', '.join(sorted(source.offers)) or 'nothing'} and no reward, so it has no score."
        )
    places = _siblings(answers)
    said: list[Signal | None] = [None] * len(answers)
    gate, done = asyncio.Semaphore(IN_FLIGHT), 0

    async def one(members: Sequence[int]) -> None:
        nonlocal done
        async with gate:
            (judged,) = await judge([_group([answers[i] for i in members])], [(source, 1.0)])
        for i, trajectory in zip(members, judged.trajectories, strict=True):
            said[i] = next((s for s in trajectory.signals if s.name == "reward"), None)
        done += len(members)
        progress(done)

    calls = [asyncio.ensure_future(one(members)) for members in places]
    try:
        await asyncio.gather(*calls)
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    return [_scored(answer, signal) for answer, signal in zip(answers, said, strict=True)]


def _siblings(answers: Sequence[Answer]) -> list[list[int]]:
    """Places of the answers to each task, by what the task is and not by what it is called."""
    places: dict[str, list[int]] = {}
    for place, answer in enumerate(answers):
        fields = {key: value for key, value in answer.fields.items() if key not in ("id", RESPONSE, *GIVEN)}
        places.setdefault(json.dumps(fields, sort_keys=True), []).append(place)
    return list(places.values())


def _group(answers: Sequence[Answer]) -> Group:
    """Answers of one task as if a policy had written them. Nobody sampled them, so they have no tokens."""
    task = answers[0].task
    return Group(task=task, trajectories=tuple(as_trajectory(task, answer.response) for answer in answers))


def as_trajectory(task: Task, response: str) -> Trajectory:
    """A text as a finished trajectory without tokens."""
    return Trajectory(task_id=task.id, spans=(Span(author="policy", tokens=(), text=response),))


def _scored(answer: Answer, signal: Signal | None) -> Scored:
    if signal is None:
        return Scored(answer=answer, score=None, status="abstained", note="gave no reward")
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
