"""Pairs of answers to audit a judge with, and what is done to them to see whether it minds."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from headwater.data.formats import find, read_file
from headwater.data.tasks import TasksConfig, load_tasks
from headwater.errors import DataError
from headwater.rewards.judge.prompts import asked
from headwater.rewards.judge.sources import known_answer, last_said
from headwater.rewards.judge.synthetic import quality, synthetic_answer
from headwater.rewards.judge.verdicts import Winner
from headwater.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Two answers to one prompt. `preferred` is what a person said, and `again` what another did, if anyone
    did; the authors are names of models or people, where known."""

    id: str
    prompt: str
    first: str
    second: str
    preferred: Winner | None = None
    again: Winner | None = None
    first_author: str | None = None
    second_author: str | None = None

    @property
    def target(self) -> Winner:
        """The answer that probes speak up for: the worse one by what people said, else either, by chance
        that the id decides."""
        if self.preferred in ("first", "second"):
            return "second" if self.preferred == "first" else "first"
        return "first" if coin(self.id, "target") else "second"

    def text(self, which: Winner) -> str:
        """One of the two answers."""
        return self.first if which == "first" else self.second

    def with_target(self, text: str) -> tuple[str, str, str]:
        """The prompt and the two answers, with another text for the target."""
        return (self.prompt, text, self.second) if self.target == "first" else (self.prompt, self.first, text)


def coin(*key: str) -> bool:
    """Heads or tails, settled by the key."""
    return hashlib.blake2b("\0".join(key).encode(), digest_size=1).digest()[0] % 2 == 0


def items_of(tasks: Sequence[Task]) -> list[Item]:
    """Preference tasks as items; which answer comes first is settled by the task's id, so that the preferred
    one is in neither place more often."""
    found: list[Item] = []
    for task in tasks:
        chosen = known_answer(task)
        rejected = last_said(task.rejected)
        if chosen is None or rejected is None:
            raise DataError(
                f"Task '{task.id}' has no pair of answers to compare. Wanted rows of prompt, first and second, or of "
                "prompt, chosen and rejected."
            )
        ahead = coin(task.id, "order")
        first, second = (chosen, rejected) if ahead else (rejected, chosen)
        better: Winner = "first" if ahead else "second"
        found.append(Item(id=task.id, prompt=asked(task), first=first, second=second, preferred=better))
    return found


def load_items(source: str, limit: int | None = None) -> list[Item]:
    """Items from a file: rows of `prompt`, `first`, `second` and, where known, `preferred` (first, second or
    tie), `again`, `first_author` and `second_author`; or rows of preferences in any form that tasks have.
    Raises DataError for a row that is neither."""
    path = find(source)
    head = next(iter(read_file(path)), None)
    if head is None or not {"prompt", "first", "second"} <= head.fields.keys():
        return items_of(load_tasks(TasksConfig(source=source, limit=limit)))
    found: list[Item] = []
    for row in read_file(path):
        if limit is not None and len(found) >= limit:
            break
        found.append(_item(row.fields, row.index, row.where))
    return found


def _item(fields: Any, index: int, where: str) -> Item:
    for key in ("prompt", "first", "second"):
        if not isinstance(fields.get(key), str):
            raise DataError(f"{where}: '{key}' is {type(fields.get(key)).__name__}, wanted text.")
    for key in ("preferred", "again"):
        if fields.get(key) not in (None, *get_args(Winner)):
            raise DataError(f"{where}: '{key}' is {fields[key]!r}, wanted first, second or tie.")
    optional = ("preferred", "again", "first_author", "second_author")
    known = {key: fields[key] for key in optional if fields.get(key) is not None}
    prompt, first, second = (fields[key] for key in ("prompt", "first", "second"))
    return Item(id=str(fields.get("id", index)), prompt=prompt, first=first, second=second, **known)


def save_items(items: Sequence[Item], path: Path) -> None:
    """Write items as rows that `load_items` reads."""
    rows = [{key: getattr(item, key) for key in Item.__slots__} for item in items]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def synthetic_items(
    n: int, *, seed: int = 0, labels: bool = True, own: str = "Certainly!", doubt: float = 0.1
) -> list[Item]:
    """Pairs whose worth is known (see SyntheticJudge) and has nothing to do with length or author: by author
    "own", whose answers open with its mark, and author "other". People prefer the worthier one, with a
    noise of standard deviation `doubt`."""
    chance = random.Random(seed)
    found: list[Item] = []
    for index in range(n):
        texts: dict[str, str] = {}
        for author in ("own", "other"):
            worth, claims = chance.uniform(0.15, 0.95), chance.randint(3, 14)
            opening = own if author == "own" else ""
            texts[author] = synthetic_answer(chance, worth=worth, claims=claims, opening=opening)
        first, second = chance.sample(["own", "other"], 2)
        lead = quality(texts[first]) - quality(texts[second]) + chance.gauss(0, doubt)
        better: Winner = "tie" if lead == 0 else "first" if lead > 0 else "second"
        found.append(
            Item(
                id=f"synthetic-{seed}-{index}",
                prompt=f"Question {index}: what can be said on matter {chance.randint(1, 999)}?",
                first=texts[first],
                second=texts[second],
                preferred=better if labels else None,
                first_author=first,
                second_author=second,
            )
        )
    return found
