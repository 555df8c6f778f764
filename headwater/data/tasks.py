"""What a recipe says about its data set, and the tasks that come of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headwater.data.formats import (
    Row,
    as_messages,
    as_text,
    check_format,
    conventional,
    fill,
    find,
    leftovers,
    preference,
    read_file,
    read_hub,
)
from headwater.data.gym import gym
from headwater.data.render import STEP_MARK, Renderer
from headwater.data.sums import sums
from headwater.errors import ConfigError, DataError
from headwater.types import Message, Task

DEFAULT_PROMPT = "{prompt}"
DEFAULT_COUNT = 1000


class TasksConfig(BaseModel):
    """Where tasks come from and how a row becomes one.

    `source` is a generator (`sums`, `gym:<name>`), a .jsonl or .parquet file, or
    `hub:<owner>/<name>[:<config>]`. `prompt` is a format string over the row's fields, and
    `answer_after` keeps of the answer what follows the last occurrence of that mark. A row must have an
    answer unless it has a completion, or as `needs_answer` says. `rejected`, `label`, `steps` and
    `first_error` name the fields of preferences, of judged answers, and of judged steps (the first wrong
    one, counted from 1, or null; or a list `labels` with one entry a step). `count`, `seed`
    and `settings` are for generators (a count of 1000 unless given); `split` is for the hub.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    split: str = "train"
    limit: int | None = Field(default=None, ge=1)
    offset: int = Field(default=0, ge=0)
    seed: int = 0
    prompt: str = DEFAULT_PROMPT
    system: str | None = None
    answer: str = "answer"
    answer_after: str | None = Field(default=None, min_length=1)
    completion: str = "completion"
    rejected: str = "rejected"
    label: str = "label"
    steps: str = "steps"
    first_error: str = "first_error"
    count: int | None = Field(default=None, ge=1)
    settings: dict[str, Any] = Field(default_factory=dict)
    needs_answer: bool | None = None
    max_prompt_tokens: int = Field(default=1024, ge=1)
    too_long: Literal["refuse", "drop", "truncate"] = "refuse"

    @property
    def generated(self) -> bool:
        """Whether a generator makes the tasks, so that there is no file to read."""
        return self.source == "sums" or self.source.startswith("gym:")

    @model_validator(mode="after")
    def _refuse_what_has_no_effect(self) -> TasksConfig:
        check_format(self.prompt, "tasks.prompt")
        idle = set() if self.source.startswith("hub:") else {"split"}
        if not self.generated:
            idle |= {"count", "seed", "settings"}
        wrong = sorted(idle & self.model_fields_set)
        if wrong:
            raise ConfigError(
                f"tasks.{wrong[0]} has no effect on the source '{self.source}'. Remove it "
                "(count, seed and settings are for generators, split for the hub)."
            )
        return self


def known_tasks() -> dict[str, str]:
    """The kinds of source that `tasks.source` can name, and a line about each."""
    return {
        "sums": "additions, made on the spot; settings: digits = 2, part = train | held_out | all",
        "gym:<name>": "a generator of the package reasoning-gym, such as gym:basic_arithmetic",
        "<path>.jsonl": "a file with one JSON object a line; relative to here or to $HEADWATER_DATA",
        "<path>.parquet": "a parquet file; relative to here or to $HEADWATER_DATA",
        "hub:<owner>/<name>": "a data set of the Hugging Face hub; hub:<owner>/<name>:<config> for one part",
    }


def load_tasks(config: TasksConfig) -> list[Task]:
    """The tasks that a recipe asks for, in the order of their source.

    Ids are unique and stay the same whatever `offset` and `limit` are. Raises DataError for a
    source that cannot be read, a row that cannot be a task, an id that comes twice, or no task.
    """
    end = None if config.limit is None else config.offset + config.limit
    tasks: list[Task] = []
    places: dict[str, str] = {}
    for row in islice(_rows(config), config.offset, end):
        task = as_task(row, config)
        if task.id in places:
            raise DataError(f"{row.where}: the id '{task.id}' was already used at {places[task.id]}.")
        places[task.id] = row.where
        tasks.append(task)
    if not tasks:
        skipped = f" after skipping {config.offset} (tasks.offset)" if config.offset else ""
        raise DataError(f"The source '{config.source}' has no tasks{skipped}.")
    return tasks


def _rows(config: TasksConfig) -> Iterator[Row]:
    kind, _, name = config.source.partition(":")
    count = config.count or DEFAULT_COUNT
    if config.source == "sums":
        return sums(count, seed=config.seed, settings=config.settings)
    if kind == "gym":
        return gym(name, count, seed=config.seed, settings=config.settings)
    if kind == "hub":
        return read_hub(name, config.split)
    if not config.source.endswith((".jsonl", ".parquet")):
        known = ", ".join(known_tasks())
        raise ConfigError(f"tasks.source is '{config.source}', which is none of: {known}.")
    return read_file(find(config.source))


def as_task(row: Row, config: TasksConfig) -> Task:
    """The task that a row holds. Fields that have no place in a Task are its `meta`, under their own names.
    Raises DataError, with the row's place, for one that cannot be a task."""
    used = {"id", "messages", "prompt", "chosen", config.answer, config.completion, config.rejected, config.label}
    used |= {config.steps, config.first_error, "labels"}
    pair = preference(row, config.rejected)
    if config.prompt != DEFAULT_PROMPT:
        prompt, completion = fill(config.prompt, row.fields, row.where), ()
        used.update(check_format(config.prompt, "tasks.prompt"))
    elif pair is not None and pair.prompt is not None:
        prompt, completion = pair.prompt, ()
    else:
        prompt, completion = conventional(row)
    steps = _steps(row, config)
    completion = STEP_MARK.join(steps) if steps else completion or (pair and pair.chosen) or _completion(row, config)
    return Task(
        id=_id(row),
        prompt=_with_system(prompt, config.system, row.where),
        answer=_answer(
            row, config, needed=config.needs_answer is True or (not completion and config.needs_answer is None)
        ),
        completion=completion,
        rejected=pair.rejected if pair else None,
        ratings=pair.ratings if pair else None,
        label=_label(row, config),
        steps=steps,
        step_labels=_step_labels(row, config, len(steps)),
        meta=leftovers(row.fields, used),
    )


def _label(row: Row, config: TasksConfig) -> float | None:
    """True, false or a number; a list is not a label."""
    found = row.fields.get(config.label)
    if found is None and "label" in config.model_fields_set:
        raise DataError(f"{row.where}: field '{config.label}' is missing, and tasks.label asks for it.")
    if isinstance(found, bool | int | float) and math.isfinite(found):
        return float(found)
    if found is not None and "label" in config.model_fields_set:
        raise DataError(f"{row.where}: field '{config.label}' is {found!r}, wanted true, false or a number.")
    return None


def _steps(row: Row, config: TasksConfig) -> tuple[str, ...]:
    found = row.fields.get(config.steps)
    if not isinstance(found, list) or not found:
        if "steps" in config.model_fields_set:
            raise DataError(
                f"{row.where}: field '{config.steps}' is not a list of steps, and tasks.steps asks for one."
            )
        return ()
    return tuple(as_text(step, f"{row.where}: field '{config.steps}', step {n}") for n, step in enumerate(found, 1))


def _step_labels(row: Row, config: TasksConfig, count: int) -> tuple[float, ...]:
    """A label for each step up to and with the first wrong one; what comes after it is not labelled."""
    if not count:
        return ()
    if config.first_error in row.fields:
        found = row.fields[config.first_error]
        if found is not None and (isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= count):
            raise DataError(
                f"{row.where}: field '{config.first_error}' is {found!r}, wanted the number of the first wrong step, "
                f"from 1 to {count}, or null."
            )
        return (1.0,) * count if found is None else (1.0,) * (found - 1) + (0.0,)
    labels = row.fields.get("labels")
    if labels is None:
        return ()
    if (
        not isinstance(labels, list)
        or len(labels) != count
        or not all(isinstance(x, bool | int | float) for x in labels)
    ):
        raise DataError(f"{row.where}: field 'labels' is not a list of {count} numbers, one for each step.")
    return tuple(map(float, labels))


def _id(row: Row) -> str:
    found = row.fields.get("id")
    if found is None:
        return f"row:{row.index}"
    return as_text(found, f"{row.where}: field 'id'")


def _with_system(prompt: str | tuple[Message, ...], system: str | None, where: str) -> str | tuple[Message, ...]:
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise DataError(f"{where}: the prompt is empty.")
    if system is None:
        return prompt
    messages = (Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt
    if any(message["role"] == "system" for message in messages):
        raise DataError(f"{where}: the row has a system message of its own. Remove it or tasks.system.")
    return (Message(role="system", content=system), *messages)


def _answer(row: Row, config: TasksConfig, *, needed: bool) -> str | None:
    found = row.fields.get(config.answer)
    answer = "" if found is None else as_text(found, f"{row.where}: field '{config.answer}'")
    mark = config.answer_after
    if mark is not None:
        answer = answer.rpartition(mark)[2] if mark in answer else ""
    answer = answer.strip()
    if answer or not needed:
        return answer or None
    after = f" with text after '{mark}'" if mark else ""
    raise DataError(
        f"{row.where}: no answer. Wanted a field '{config.answer}'{after}; the row has: "
        f"{', '.join(map(str, row.fields))}. Name the field in tasks.answer, or set "
        "tasks.needs_answer = false if nothing compares with an answer."
    )


def _completion(row: Row, config: TasksConfig) -> str | tuple[Message, ...] | None:
    where = f"{row.where}: field '{config.completion}'"
    found = row.fields.get(config.completion)
    if found is None:
        if "completion" in config.model_fields_set:
            raise DataError(f"{where} is missing, and tasks.completion asks for it.")
        return None
    if isinstance(found, str):
        return found
    messages = as_messages(found, where)
    if messages[-1]["role"] != "assistant":
        raise DataError(f"{where} ends with a {messages[-1]['role']} message, wanted an assistant message.")
    return messages


# --- prompts that are too long ---------------------------------------------------------------------


def fit(tasks: Sequence[Task], renderer: Renderer, config: TasksConfig) -> tuple[list[Task], int]:
    """The tasks whose prompts take at most `max_prompt_tokens` tokens, and how many did not.

    What happens to those is `too_long`: "refuse" raises a DataError at the first, "drop" leaves them
    out, "truncate" cuts the last user message from the left, as little as will do.
    """
    kept: list[Task] = []
    count = 0
    for task in tasks:
        length = len(renderer.prompt(task).tokens)
        if length <= config.max_prompt_tokens:
            kept.append(task)
            continue
        count += 1
        if config.too_long == "refuse":
            raise DataError(
                f"The prompt of task '{task.id}' takes {length} tokens, more than tasks.max_prompt_tokens = "
                f'{config.max_prompt_tokens}. Raise that, or set tasks.too_long to "drop" or "truncate".'
            )
        if config.too_long == "truncate":
            kept.append(_truncate(task, renderer, config.max_prompt_tokens))
    if tasks and not kept:
        raise DataError(f"All {count} prompts take more than {config.max_prompt_tokens} tokens; none is left.")
    return kept, count


def _truncate(task: Task, renderer: Renderer, max_tokens: int) -> Task:
    text = _last_user_text(task)
    low, high = 0, len(text)  # cutting `low` characters is too few; cutting `high` will do, or is all
    while high - low > 1:
        middle = (low + high) // 2
        if len(renderer.prompt(_with_last_user_text(task, text[middle:])).tokens) <= max_tokens:
            high = middle
        else:
            low = middle
    cut = _with_last_user_text(task, text[high:])
    if not text[high:].strip():
        raise DataError(
            f"The prompt of task '{task.id}' cannot be cut to tasks.max_prompt_tokens = {max_tokens}: what "
            "stands around its last user message leaves no room for any of it. Raise that setting."
        )
    return cut


def _last_user(prompt: tuple[Message, ...], task_id: str) -> int:
    for index in reversed(range(len(prompt))):
        if prompt[index]["role"] == "user":
            return index
    raise DataError(f"The prompt of task '{task_id}' is too long and has no user message that could be cut.")


def _last_user_text(task: Task) -> str:
    if isinstance(task.prompt, str):
        return task.prompt
    return task.prompt[_last_user(task.prompt, task.id)]["content"]


def _with_last_user_text(task: Task, text: str) -> Task:
    if isinstance(task.prompt, str):
        return replace(task, prompt=text)
    index = _last_user(task.prompt, task.id)
    message = Message(role="user", content=text)
    return replace(task, prompt=(*task.prompt[:index], message, *task.prompt[index + 1 :]))
