import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from headwater.data.render import Renderer
from headwater.data.tasks import TasksConfig, fit, known_tasks, load_tasks
from headwater.errors import ConfigError, DataError, UnknownName
from headwater.types import Message, Task

HELLO = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}
Load = Callable[..., list[Task]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads tasks from a file of these rows."""

    def from_rows(*rows: dict[str, object], **settings: Any) -> list[Task]:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_tasks(TasksConfig(source=str(path), **settings))

    return from_rows


def user(text: str) -> Message:
    return Message(role="user", content=text)


def system(text: str) -> Message:
    return Message(role="system", content=text)


# --- the config ------------------------------------------------------------------------------------


def test_every_known_kind_is_described():
    assert set(known_tasks()) >= {"sums", "gym:<name>", "hub:<owner>/<name>"}
    assert all(len(line) > 20 for line in known_tasks().values())


@pytest.mark.parametrize(
    "fields",
    [{}, {"source": "sums", "lmit": 3}, {"source": "sums", "limit": 0}, {"source": "sums", "offset": -1}],
)
def test_a_malformed_config_is_refused(fields: dict[str, object]):
    with pytest.raises(ValidationError):
        TasksConfig.model_validate(fields)


@pytest.mark.parametrize(
    ("source", "setting", "value"),
    [
        ("a.jsonl", "count", 3),
        ("a.jsonl", "seed", 1),
        ("a.jsonl", "settings", {"digits": 2}),
        ("a.jsonl", "split", "test"),
        ("sums", "split", "test"),
        ("hub:a/b", "count", 3),
    ],
)
def test_a_setting_without_effect_is_refused(source: str, setting: str, value: object):
    with pytest.raises(ConfigError, match=rf"tasks\.{setting} has no effect on the source '{source}'"):
        TasksConfig.model_validate({"source": source, setting: value})


def test_a_bad_format_string_is_refused_before_anything_is_read():
    with pytest.raises(ConfigError, match=r"tasks\.prompt"):
        TasksConfig(source="absent.jsonl", prompt="{q.__class__}")


@pytest.mark.parametrize("source", ["a.csv", "summs", "gsm8k", ""])
def test_an_unknown_source_is_refused_with_the_kinds(source: str):
    with pytest.raises(ConfigError, match=rf"'{source}', which is none of: sums, gym:"):
        load_tasks(TasksConfig(source=source))


# --- rows to tasks ---------------------------------------------------------------------------------


def test_prompt_and_answer(load: Load):
    (task,) = load({"prompt": "1 + 1?", "answer": 2, "level": 3, "other": [1]})
    assert task == Task(id="row:0", prompt="1 + 1?", answer="2", meta={"level": 3, "other": [1]})


def test_prompt_and_completion(load: Load):
    (task,) = load({"prompt": "a", "completion": "b"}, needs_answer=False)
    assert (task.prompt, task.completion, task.answer, task.meta) == ("a", "b", None, {})
    (task,) = load({"prompt": [HELLO], "completion": [ANSWER]}, needs_answer=False)
    assert (task.prompt, task.completion) == ((HELLO,), (ANSWER,))


def test_messages(load: Load):
    (task,) = load({"messages": [HELLO, ANSWER, HELLO, ANSWER, ANSWER]}, needs_answer=False)
    assert task.prompt == (HELLO, ANSWER, HELLO)
    assert task.completion == (ANSWER, ANSWER)


def test_a_prompt_of_ones_own_and_an_answer_after_a_mark(load: Load):
    (task,) = load(
        {"question": "1 + 1?", "answer": "One #### and one\n#### 2 "},
        prompt="Q: {question}",
        answer_after="####",
        completion="answer",
    )
    assert (task.prompt, task.answer) == ("Q: 1 + 1?", "2")
    assert task.completion == "One #### and one\n#### 2 "
    assert task.meta == {}


def test_a_system_message_comes_first(load: Load):
    (task,) = load({"prompt": "a", "answer": "b"}, system="Be good.")
    assert task.prompt == (system("Be good."), user("a"))
    (task,) = load({"messages": [HELLO, ANSWER]}, system="Be good.", needs_answer=False)
    assert task.prompt == (system("Be good."), HELLO)
    with pytest.raises(DataError, match="system message of its own"):
        load({"messages": [system("a"), HELLO, ANSWER]}, system="Be good.", needs_answer=False)


@pytest.mark.parametrize(
    ("row", "settings", "complaint"),
    [
        (
            {"prompt": "a"},
            {},
            r"no answer\. Wanted a field 'answer'; the row has: prompt\..*needs_answer = false",
        ),
        ({"prompt": "a", "answer": " "}, {}, "no answer"),
        ({"prompt": "a", "answer": None}, {}, "no answer"),
        ({"prompt": "a", "answer": "4"}, {"answer_after": "####"}, "with text after '####'"),
        ({"prompt": "a", "answer": ["4"]}, {}, "field 'answer' holds a list"),
        ({"prompt": " ", "answer": "b"}, {}, "the prompt is empty"),
        ({"messages": [ANSWER], "answer": "b"}, {}, "the prompt is empty"),
        ({"prompt": "a", "answer": "b"}, {"completion": "solution"}, "field 'solution' is missing"),
        ({"prompt": "a", "completion": [HELLO], "answer": "b"}, {}, "ends with a user message"),
        ({"question": "a", "answer": "b"}, {"prompt": "{q}"}, "no field 'q'"),
        ({"text": "a"}, {}, "has a 'text' but no 'prompt'"),
        ({"prompt": "a", "answer": "b", "id": [1]}, {}, "field 'id' holds a list"),
    ],
)
def test_a_row_that_cannot_be_a_task_is_named(
    load: Load, row: dict[str, object], settings: dict[str, object], complaint: str
):
    good = {"prompt": "g", "question": "g", "q": "g", "answer": "#### 1", "solution": "s"}
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2: .*{complaint}"):
        load(good, row, **settings)


def test_ids_are_those_of_the_rows_or_their_places(load: Load):
    rows = [{"prompt": "a", "answer": "1", "id": "x"}, {"prompt": "a", "answer": "1", "id": 7}]
    assert [task.id for task in load(*rows, {"prompt": "a", "answer": "1"})] == ["x", "7", "row:2"]


def test_an_id_that_comes_twice_is_refused_with_both_places(load: Load):
    rows = [{"prompt": "a", "answer": "1", "id": "7"}, {"prompt": "b", "answer": "1", "id": 7}]
    with pytest.raises(DataError, match=r"line 2: the id '7' was already used at .*line 1"):
        load(*rows)


def test_limit_and_offset_keep_ids(load: Load):
    rows = [{"prompt": str(n), "answer": "1"} for n in range(6)]
    everything = load(*rows)
    assert load(*rows, limit=2) == everything[:2]
    assert load(*rows, offset=3, limit=2) == everything[3:5]
    with pytest.raises(DataError, match=r"no tasks after skipping 6 \(tasks\.offset\)"):
        load(*rows, offset=6)


def test_an_empty_file_is_refused(load: Load):
    with pytest.raises(DataError, match="has no tasks"):
        load()


# --- other sources ---------------------------------------------------------------------------------


def test_sums_are_tasks():
    tasks = load_tasks(TasksConfig(source="sums", count=5, seed=3, settings={"digits": 1}, system="Add."))
    assert len({task.id for task in tasks}) == 5
    for task in tasks:
        assert task.answer == str(int(task.meta["a"]) + int(task.meta["b"]))  # type: ignore[arg-type]
        assert task.prompt == (system("Add."), user(f"What is {task.meta['a']} + {task.meta['b']}?"))
    part = TasksConfig(source="sums", count=5, seed=3, settings={"digits": 1}, system="Add.", limit=2, offset=1)
    assert load_tasks(part) == tasks[1:3]
    assert len(load_tasks(TasksConfig(source="sums"))) == 1000


def test_gym_is_a_source():
    pytest.importorskip("reasoning_gym", reason="the package reasoning-gym is not installed")
    tasks = load_tasks(TasksConfig(source="gym:basic_arithmetic", count=3, prompt="{prompt} Number only."))
    assert [str(task.prompt).endswith(" Number only.") for task in tasks] == [True] * 3
    assert all(task.answer for task in tasks)
    with pytest.raises(UnknownName):
        load_tasks(TasksConfig(source="gym:basic"))


def test_a_hub_name_can_be_a_folder_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 2}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    tasks = load_tasks(TasksConfig(source="hub:owner/name"))
    assert [(task.id, task.prompt, task.answer) for task in tasks] == [
        ("row:0", "a", "1"),
        ("row:1", "b", "2"),
    ]
    with pytest.raises(DataError, match=r"Cannot load 'hub:owner/name' \(split 'absent'\)"):
        load_tasks(TasksConfig(source="hub:owner/name", split="absent"))


def test_real_grade_school_sums():
    folder = Path(os.environ.get("HEADWATER_DATA", "../shared/data")) / "gsm8k"
    if not folder.is_dir():
        pytest.skip(f"the data set is not at {folder}; set HEADWATER_DATA to where it is")
    config = TasksConfig(source=str(folder / "dev.jsonl"), prompt="{question}", answer_after="####", limit=100)
    tasks = load_tasks(config)
    assert len(tasks) == 100
    assert tasks[0].answer == "18"
    assert all("####" not in str(task.answer) and task.prompt for task in tasks)


# --- prompts that are too long ---------------------------------------------------------------------


def config(max_prompt_tokens: int, too_long: str) -> TasksConfig:
    return TasksConfig.model_validate({"source": "sums", "max_prompt_tokens": max_prompt_tokens, "too_long": too_long})


SHORT, LONG = Task(id="short", prompt="hi"), Task(id="long", prompt="hello there " * 20 + "the end")


def test_prompts_that_fit_are_left_alone(tokenizer: PreTrainedTokenizerBase):
    renderer = Renderer(tokenizer, "none")
    length = len(renderer.prompt(LONG).tokens)
    for too_long in ("refuse", "drop", "truncate"):
        assert fit([SHORT, LONG], renderer, config(length, too_long)) == ([SHORT, LONG], 0)


def test_refuse_names_the_task_and_its_length(tokenizer: PreTrainedTokenizerBase):
    renderer = Renderer(tokenizer, "none")
    length = len(renderer.prompt(LONG).tokens)
    with pytest.raises(DataError, match=rf"'long' takes {length} tokens.*max_prompt_tokens = {length - 1}"):
        fit([SHORT, LONG], renderer, config(length - 1, "refuse"))


def test_drop_counts_what_it_drops(tokenizer: PreTrainedTokenizerBase):
    renderer = Renderer(tokenizer, "none")
    assert fit([LONG, SHORT], renderer, config(10, "drop")) == ([SHORT], 1)
    with pytest.raises(DataError, match="All 1 prompts"):
        fit([LONG], renderer, config(10, "drop"))
    assert fit([], renderer, config(10, "drop")) == ([], 0)


def test_truncate_cuts_the_last_user_message_from_the_left(tokenizer: PreTrainedTokenizerBase):
    renderer = Renderer(tokenizer, "chatml")
    text = "hello there " * 20 + "the end"
    prompt = (system("Add."), user("first"), Message(role="assistant", content="ok"), user(text))
    task = Task(id="t", prompt=prompt, answer="4", meta={"a": 1})
    limit = len(renderer.prompt(task).tokens) - 7
    (cut,), count = fit([task], renderer, config(limit, "truncate"))
    assert count == 1
    assert cut.prompt[:3] == prompt[:3]
    kept = cut.prompt[3]["content"]  # type: ignore[index,call-overload]
    assert text.endswith(kept)
    assert kept.endswith("the end")
    assert (cut.id, cut.answer, cut.meta) == ("t", "4", {"a": 1})


@settings(max_examples=30)
@given(text=st.text(alphabet="hello ther9é", min_size=1, max_size=120), spare=st.integers(4, 40))
def test_truncated_prompts_fit_and_lose_no_more_than_needed(tokenizer: PreTrainedTokenizerBase, text: str, spare: int):
    renderer = Renderer(tokenizer, "none")
    text += "hello"  # so that something is left to say
    limit = spare + 1
    (cut,), count = fit([Task(id="t", prompt=text)], renderer, config(limit, "truncate"))
    assert isinstance(cut.prompt, str)
    assert text.endswith(cut.prompt)
    assert len(renderer.prompt(cut).tokens) <= limit
    assert (count == 0) == (cut.prompt == text)
    if count:
        # One character of UTF-8 is at most two bytes here, so at most that many tokens more; byte-pair
        # merges can change at the cut, hence a margin of a few.
        assert len(renderer.prompt(cut).tokens) >= limit - 4


def test_truncate_refuses_when_nothing_would_be_left(tokenizer: PreTrainedTokenizerBase):
    renderer = Renderer(tokenizer, "chatml")
    around = len(renderer.prompt(Task(id="t", prompt=(user(""),))).tokens)
    with pytest.raises(DataError, match="'t' cannot be cut to"):
        fit([Task(id="t", prompt=(user("hello there"),))], renderer, config(around, "truncate"))
    with pytest.raises(DataError, match="no user message that could be cut"):
        fit([Task(id="t", prompt=(system("hello there"),))], renderer, config(2, "truncate"))
