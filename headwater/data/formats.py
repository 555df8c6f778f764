"""From files, the hub and rows of any shape to the fields of a task.

A row is what one line of a file holds; `where` says which line, so that every complaint about a
row names its place.
"""

from __future__ import annotations

import json
import math
import os
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from headwater.errors import ConfigError, DataError
from headwater.types import Json, Message

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One record of a data set. `index` counts from 0 over the whole data set, whatever part of it
    is kept, and `where` names the record in complaints."""

    index: int
    where: str
    fields: Fields


# --- reading ---------------------------------------------------------------------------------------


def find(name: str, setting: str = "tasks.source") -> Path:
    """The existing file that `name` stands for: `~` and variables are expanded, and a relative path
    is looked for in the current folder, then in `$HEADWATER_DATA`. `setting` is what an error says to check."""
    expanded = Path(os.path.expandvars(name)).expanduser()
    folders = [Path.cwd()]
    if os.environ.get("HEADWATER_DATA"):
        folders.append(Path(os.environ["HEADWATER_DATA"]).expanduser())
    places = [folder / expanded for folder in folders]  # an absolute path stays itself
    places = list(dict.fromkeys(places))
    for place in places:
        if place.is_file():
            return place
    unset = " The variable $HEADWATER_DATA is not set." if "HEADWATER_DATA" not in os.environ else ""
    looked = ", ".join(f"'{place}'" for place in places)
    raise DataError(f"There is no data file '{name}'; looked for {looked}.{unset} Check {setting}.")


def read_file(path: Path) -> Iterator[Row]:
    """The rows of a .jsonl or .parquet file, lazily."""
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise ConfigError(f"Cannot read '{path}': the ending '{path.suffix}' is not known. Give a .jsonl or .parquet file.")


def _read_jsonl(path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as file:  # bytes: only "\n" ends a line, never U+2028
            index = 0
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield Row(index=index, where=where, fields=_parse_line(line, where))
                    index += 1
    except OSError as error:
        raise DataError(f"Cannot read the data file '{path}': {error.strerror}.") from error


def _parse_line(line: bytes, where: str) -> Fields:
    try:
        found = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start}).") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error}). A .jsonl file has one object a line.") from error
    if not isinstance(found, dict):
        raise DataError(f"{where}: found a JSON {type(found).__name__}, wanted an object with named fields.")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            index = 0
            for batch in file.iter_batches():
                for fields in batch.to_pylist():
                    yield Row(index=index, where=f"{path}, row {index + 1}", fields=fields)
                    index += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"Cannot read '{path}' as parquet: {error}.") from error


def read_hub(name: str, split: str) -> Iterator[Row]:
    """The rows of `owner/name` or `owner/name:config` on the Hugging Face hub."""
    repository, _, config = name.partition(":")
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise ConfigError(f"tasks.source is 'hub:{name}'; wanted hub:owner/name or hub:owner/name:config.")
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        found = load_dataset(repository, config or None, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(f"Cannot load 'hub:{name}' (split '{split}'): {error}") from error
    for index, fields in enumerate(found):
        assert isinstance(fields, dict)
        yield Row(index=index, where=f"hub:{name}, {split} row {index + 1}", fields=fields)


# --- the shapes that rows come in ------------------------------------------------------------------


def check_format(template: str, setting: str) -> tuple[str, ...]:
    """The names of the fields in a format string. Only plain names: `{question}`, but not
    `{question.upper}`, `{question[0]}`, `{question!r}` or `{question:>10}`."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"{setting} is {template!r}, which is not a format string: {error}. "
            "Write {field} for a field, and {{ or }} for a brace."
        ) from error
    names: list[str] = []
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if not name or name.isdigit() or spec or conversion or set(name) & set(".[]"):
            raise ConfigError(
                f"{setting} is {template!r}, where the replacement field '{name}' is more than a plain "
                "name. Write {field} for a field of the row, and {{ or }} for a brace."
            )
        names.append(name)
    return tuple(names)


def fill(template: str, fields: Fields, where: str) -> str:
    """The format string with every `{field}` replaced by that field of the row, as text."""
    parts: list[str] = []
    for literal, name, _, _ in string.Formatter().parse(template):
        parts.append(literal)
        if name is not None:
            if name not in fields:
                raise DataError(f"{where}: no field '{name}', which tasks.prompt asks for. {_has(fields)}")
            parts.append(as_text(fields[name], f"{where}: field '{name}'"))
    return "".join(parts)


def as_text(value: object, where: str) -> str:
    """Text or a number, as text."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise DataError(f"{where} holds {_kind(value)}, wanted text or a number.")


def as_messages(value: object, where: str) -> tuple[Message, ...]:
    """A list of `{"role": ..., "content": ...}`, checked. Other keys are refused, since dropping
    them (tool calls, say) would change what the conversation says."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise DataError(f"{where} holds {_kind(value)}, wanted a list of messages with role and content.")
    return tuple(_as_message(item, f"{where}, message {number}") for number, item in enumerate(value, 1))


def _as_message(item: object, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f"{where} is {_kind(item)}, wanted an object with role and content.")
    for key in ("role", "content"):
        if not isinstance(item.get(key), str):
            raise DataError(f"{where} has {_kind(item.get(key))} as its {key}, wanted text.")
    extra = sorted(str(key) for key, value in item.items() if key not in ("role", "content") and value)
    if extra:
        raise DataError(f"{where} also has {', '.join(extra)}; only role and content are understood.")
    return Message(role=item["role"], content=item["content"])


def split_conversation(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """A conversation as (prompt, completion): the assistant messages at its end are the completion,
    which is empty when it ends with somebody else."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return messages[:end], messages[end:]


def conventional(row: Row) -> tuple[str | tuple[Message, ...], tuple[Message, ...]]:
    """(prompt, completion) of a row in one of the usual shapes: `prompt` as text or messages, or
    `messages` as a whole conversation. The completion is empty unless `messages` ends with one."""
    if "prompt" in row.fields:
        found = row.fields["prompt"]
        if isinstance(found, str):
            return found, ()
        return as_messages(found, f"{row.where}: field 'prompt'"), ()
    if "messages" in row.fields:
        return split_conversation(as_messages(row.fields["messages"], f"{row.where}: field 'messages'"))
    if "text" in row.fields:
        raise DataError(
            f"{row.where}: the row has a 'text' but no 'prompt', so nothing says where the prompt "
            'ends and the answer begins. Split it into prompt and completion, or set tasks.prompt = "{text}".'
        )
    raise DataError(
        f"{row.where}: no field 'prompt' or 'messages'. {_has(row.fields)} "
        'Say how the prompt is made, for example tasks.prompt = "{question}".'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two answers of which `chosen` was liked better. `prompt` is None where the row has one of its own."""

    chosen: str | tuple[Message, ...]
    rejected: str | tuple[Message, ...]
    prompt: tuple[Message, ...] | None = None
    ratings: tuple[float, float] | None = None


def preference(row: Row, rejected: str) -> Preference | None:
    """What a row prefers to what, if it has a field `chosen` and one called `rejected`.

    The two are answers to the row's prompt; or, without one, whole conversations whose common beginning
    is the prompt: lists of messages, or text with "\\n\\nHuman:" and "\\n\\nAssistant:" before each turn.
    """
    if "chosen" not in row.fields or rejected not in row.fields:
        return None
    sides = [_side(row, field) for field in ("chosen", rejected)]
    ratings = _ratings(row)
    if "prompt" in row.fields:
        return Preference(chosen=sides[0], rejected=sides[1], ratings=ratings)
    if isinstance(sides[0], str) or isinstance(sides[1], str):
        raise DataError(
            f"{row.where}: 'chosen' and '{rejected}' are plain text and there is no field 'prompt', so nothing says "
            "what they answer. Give a prompt, or write them as messages."
        )
    first, second = sides[0], sides[1]
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    while common and first[common - 1]["role"] == "assistant":
        common -= 1
    if not common:
        raise DataError(f"{row.where}: 'chosen' and '{rejected}' do not begin alike, so they have no common prompt.")
    if common == len(first) or common == len(second):
        raise DataError(
            f"{row.where}: one of 'chosen' and '{rejected}' says no more than the other, so it has no answer."
        )
    return Preference(chosen=first[common:], rejected=second[common:], prompt=first[:common], ratings=ratings)


def _side(row: Row, field: str) -> str | tuple[Message, ...]:
    found = row.fields[field]
    where = f"{row.where}: field '{field}'"
    if not isinstance(found, str):
        return as_messages(found, where)
    if not found.strip():
        raise DataError(f"{where} is empty.")
    return _dialogue(found) if found.startswith("\n\nHuman:") else found


def _dialogue(text: str) -> tuple[Message, ...]:
    """Messages of text with "\\n\\nHuman:" or "\\n\\nAssistant:" before each turn."""
    pieces = re.split(r"\n\n(Human|Assistant):", text)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = zip(pieces[::2], pieces[1::2], strict=True)
    return tuple(Message(role=roles[who], content=said.strip()) for who, said in turns)


def _ratings(row: Row) -> tuple[float, float] | None:
    found = [row.fields.get(name) for name in ("score_chosen", "score_rejected")]
    if any(value is None for value in found):
        return None
    better, worse = (
        value if isinstance(value, int | float) and math.isfinite(value) else float("nan") for value in found
    )
    if not better >= worse:
        raise DataError(
            f"{row.where}: score_chosen is {found[0]!r} and score_rejected {found[1]!r}; wanted the first higher."
        )
    return float(better), float(worse)


def leftovers(fields: Fields, used: set[str]) -> dict[str, Json]:
    """The fields that are not in `used`, for a task's meta; what JSON cannot hold is left out."""
    return {key: value for key, value in fields.items() if key not in used and _is_json(value)}


def _is_json(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_json(item) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)


def _kind(value: object) -> str:
    """What a value is, in words for a person."""
    if value is None:
        return "nothing"
    if isinstance(value, str | list | tuple | dict) and not value:
        return f"an empty {'text' if isinstance(value, str) else 'list or object'}"
    names = {bool: "true or false", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


def _has(fields: Fields) -> str:
    return f"The row has: {', '.join(map(str, fields)) or 'nothing'}."
