import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.data.formats import (
    Row,
    as_messages,
    as_text,
    check_format,
    conventional,
    fill,
    find,
    leftovers,
    read_file,
    read_hub,
    split_conversation,
)
from headwater.errors import ConfigError, DataError
from headwater.types import Message

HELLO = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}


def row(**fields: object) -> Row:
    return Row(index=0, where="here", fields=fields)


# --- files -----------------------------------------------------------------------------------------


def test_jsonl_rows_have_places(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"x": 1}\n\n{"x": "\xe2\x80\xa8"}\r\n{"x": null}')
    rows = list(read_file(path))
    assert [r.fields for r in rows] == [{"x": 1}, {"x": "\u2028"}, {"x": None}]
    assert [r.index for r in rows] == [0, 1, 2]
    assert [r.where.rpartition(", ")[2] for r in rows] == ["line 1", "line 3", "line 4"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"x": 1', "not valid JSON"),
        (b"{'x': 1}", "not valid JSON"),
        (b'{"x": NaN}', "NaN is not JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "found a JSON list, wanted an object"),
        (b'{"x": "\xff"}', "not UTF-8 text"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: bytes, complaint: str):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": 1}\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: .*{complaint}"):
        list(read_file(path))


def test_jsonl_is_read_no_further_than_needed(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1}\nbroken\n')
    assert next(read_file(path)).fields == {"x": 1}


def test_parquet(tmp_path: Path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"x": 1, "m": [HELLO]}, {"x": 2, "m": []}]), path)
    rows = list(read_file(path))
    assert [r.fields for r in rows] == [{"x": 1, "m": [HELLO]}, {"x": 2, "m": []}]
    assert rows[1].where == f"{path}, row 2"


def test_parquet_that_is_none(tmp_path: Path):
    path = tmp_path / "a.parquet"
    path.write_text("no")
    with pytest.raises(DataError, match="as parquet"):
        list(read_file(path))


def test_other_endings_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"'\.csv' is not known. Give a \.jsonl or \.parquet"):
        read_file(tmp_path / "a.csv")


def test_a_file_is_found_here_then_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here, data = tmp_path / "here", tmp_path / "data"
    for folder in (here, data):
        folder.mkdir()
        (folder / "both.jsonl").touch()
    (data / "one.jsonl").touch()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HEADWATER_DATA", str(data))
    monkeypatch.setenv("HOME", str(data))
    assert find("both.jsonl") == here / "both.jsonl"
    assert find("one.jsonl") == data / "one.jsonl"
    assert find("$HEADWATER_DATA/both.jsonl") == data / "both.jsonl"
    assert find("~/one.jsonl") == data / "one.jsonl"
    with pytest.raises(DataError) as caught:
        find("none.jsonl")
    assert f"looked for '{here}/none.jsonl', '{data}/none.jsonl'" in str(caught.value)


def test_a_missing_file_says_that_the_data_folder_is_unset(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HEADWATER_DATA", raising=False)
    with pytest.raises(DataError, match="HEADWATER_DATA is not set"):
        find("$HEADWATER_DATA/a.jsonl")


@pytest.mark.parametrize("name", ["", "name", "a/b/c", "/b"])
def test_a_hub_name_has_an_owner(name: str):
    with pytest.raises(ConfigError, match=r"wanted hub:owner/name"):
        next(read_hub(name, "train"))


# --- format strings --------------------------------------------------------------------------------


def test_fill():
    assert check_format("{q} {{x}} {a b}", "tasks.prompt") == ("q", "a b")
    assert fill("{q} {{x}} {a b}", {"q": "1 + 1 = {y}", "a b": 2}, "here") == "1 + 1 = {y} {x} 2"


@pytest.mark.parametrize(
    "template", ["{q.__class__}", "{q[0]}", "{q!r}", "{q:>10}", "{q:{w}}", "{}", "{0}", "{q", "q}", "{q!}"]
)
def test_a_format_string_has_plain_names_only(template: str):
    with pytest.raises(ConfigError, match=r"tasks\.prompt is .*Write \{field\}"):
        check_format(template, "tasks.prompt")


def test_fill_names_what_is_missing_or_no_text():
    with pytest.raises(DataError, match=r"here: no field 'q'.*The row has: question"):
        fill("{q}", {"question": "?"}, "here")
    with pytest.raises(DataError, match="here: field 'q' holds a list, wanted text"):
        fill("{q}", {"q": [1]}, "here")


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), st.text(), min_size=1))
def test_fill_puts_in_every_field_as_it_is(fields: dict[str, str]):
    template = "|".join(f"{{{name}}}" for name in fields)
    assert check_format(template, "tasks.prompt") == tuple(fields)
    assert fill(template, fields, "here") == "|".join(fields.values())


@pytest.mark.parametrize(("value", "text"), [("a", "a"), (4, "4"), (0.5, "0.5")])
def test_text_or_a_number_is_text(value: object, text: str):
    assert as_text(value, "here") == text


@pytest.mark.parametrize("value", [None, True, [], {}, b"a"])
def test_other_things_are_no_text(value: object):
    with pytest.raises(DataError, match=r"here holds .*, wanted text or a number"):
        as_text(value, "here")


# --- messages and shapes ---------------------------------------------------------------------------


def test_messages_are_checked():
    assert as_messages([HELLO | {"tool_calls": None}], "here") == (Message(role="user", content="hello"),)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("hello", "here holds text, wanted a list"),
        ([], "here holds an empty list"),
        (None, "here holds nothing"),
        (["hello"], "here, message 1 is text"),
        ([HELLO, {"role": "user"}], "here, message 2 has nothing as its content"),
        ([{"content": "a"}], "here, message 1 has nothing as its role"),
        ([{"role": "user", "content": [{"type": "text"}]}], "has a list as its content"),
        ([HELLO | {"tool_calls": [{}]}], "also has tool_calls; only role and content"),
    ],
)
def test_malformed_messages_are_named(value: object, complaint: str):
    with pytest.raises(DataError, match=complaint):
        as_messages(value, "here")


@given(st.lists(st.sampled_from(["system", "user", "assistant", "tool"])))
def test_a_conversation_is_split_before_the_assistant_messages_at_its_end(roles: list[str]):
    messages = tuple(Message(role=role, content="") for role in roles)
    prompt, completion = split_conversation(messages)
    assert prompt + completion == messages
    assert all(message["role"] == "assistant" for message in completion)
    assert not prompt or prompt[-1]["role"] != "assistant"


def test_conventional_shapes():
    assert conventional(row(prompt="a")) == ("a", ())
    assert conventional(row(prompt=[HELLO])) == ((HELLO,), ())
    assert conventional(row(messages=[HELLO, ANSWER])) == ((HELLO,), (ANSWER,))
    assert conventional(row(messages=[HELLO, ANSWER, HELLO])) == ((HELLO, ANSWER, HELLO), ())


def test_unconventional_shapes_are_refused_with_a_hint():
    with pytest.raises(DataError, match=r"here: the row has a 'text' but no 'prompt'.*tasks\.prompt = \"\{text\}\""):
        conventional(row(text="a"))
    with pytest.raises(DataError, match=r"The row has: question, answer.*tasks\.prompt = "):
        conventional(row(question="a", answer="b"))
    with pytest.raises(DataError, match="field 'prompt' holds nothing"):
        conventional(row(prompt=None))


def test_leftovers_are_json():
    fields = {
        "a": 1,
        "b": [True, None, {"c": "d"}],
        "used": 2,
        "bytes": b"",
        "nan": float("nan"),
        "t": (1, 2),
    }
    found = leftovers(fields, {"used"})
    assert found == {"a": 1, "b": [True, None, {"c": "d"}], "t": (1, 2)}
    assert json.loads(json.dumps(found, allow_nan=False))["t"] == [1, 2]
