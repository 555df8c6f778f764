"""`headwater score`, from the rows of a file to the rows that come out."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headwater.cli import app
from headwater.errors import DataError
from headwater.evaluation.score import IN_FLIGHT, read_answers, score
from headwater.reward_commands import parsed
from headwater.types import Group, Signal

OWN = """
def passes(text, task):
    return sum(eval_ in text for eval_ in task.meta["tests"]) / len(task.meta["tests"])

async def best(group):
    lengths = [len(t.text) for t in group.trajectories]
    return [None if len(lengths) < 2 else float(n == max(lengths)) for n in lengths]

async def meta(group):
    assert not {"response", "score", "status", "note"} & set(group.task.meta)
    return [float(len(group.task.meta))] * len(group.trajectories)

async def never(group):
    raise OSError("the line is dead")

class Fussy:
    name, offers, needs = "fussy", frozenset({"reward"}), frozenset({"schema", "prompt"})

    async def __call__(self, group):
        raise ValueError("seen")
"""
ROWS = [
    {"prompt": "2+2?", "answer": "4", "response": "It is 4.", "tag": {"a": [1]}},
    {"prompt": "2+2?", "answer": "4", "response": "It is 5.", "tag": {"a": [1]}},
    {"answer": "cat", "response": "4"},
    {"answer": None, "response": ""},
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rewards_of_score.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, rows: list[dict], name: str = "in.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def run(*words: str, code: int = 0):
    done = CliRunner().invoke(app, ["score", *words])
    assert done.exit_code == code, f"{done.output}\n{done.exception!r}"
    return done


def rows_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_the_same_rows_come_out_with_score_status_and_note(here: Path):
    rows = [*ROWS[:3], {"answer": "7", "response": "7", "status": "ok", "score": 0.5, "note": "an old one"}]
    done = run(write(here, rows), "--reward", "number")
    found = rows_of(done.stdout)
    given = [{k: row.pop(k) for k in ("score", "status", "note")} for row in found]
    assert found == [*ROWS[:3], {"answer": "7", "response": "7"}]
    assert [each["score"] for each in given] == [1.0, 0.0, None, 1.0]
    assert [each["status"] for each in given] == ["ok", "ok", "failed", "ok"]
    assert "'cat' is not a number" in given[2]["note"]
    assert "4 rows: 3 ok (mean 0.6667), 0 abstained, 1 failed" in done.stderr


def test_fields_reach_the_task_and_what_was_given_does_not(here: Path):
    rows = [{"response": "a and b", "tests": ["a", "b", "c"], "prompt": "?", "score": 1, "status": "ok", "note": ""}]
    assert rows_of(run(write(here, rows), "--reward", "rewards_of_score:passes").stdout)[0]["score"] == pytest.approx(
        2 / 3
    )
    assert rows_of(run("in.jsonl", "--reward", "rewards_of_score:meta").stdout)[0]["score"] == 1.0


def test_rows_of_one_task_are_siblings_wherever_they_stand(here: Path):
    rows = [
        {"id": str(i), "prompt": p, "response": r} for i, (p, r) in enumerate([("p", "a"), ("q", "a"), ("p", "aa")])
    ]
    found = rows_of(run(write(here, rows), "--reward", "rewards_of_score:best").stdout)
    assert [(row["score"], row["status"]) for row in found] == [(0.0, "ok"), (None, "abstained"), (1.0, "ok")]


def test_out_is_written_whole_and_an_existing_one_is_kept(here: Path):
    name = write(here, ROWS[:2])
    run(name, "--reward", "number", "--out", "out.jsonl")
    first = (here / "out.jsonl").read_text()
    assert [row["score"] for row in rows_of(first)] == [1.0, 0.0]
    assert "exists and is kept" in run(name, "--reward", "exact", "--out", "out.jsonl", code=2).stderr
    assert (here / "out.jsonl").read_text() == first
    run(name, "--reward", "exact", "--out", "out.jsonl", "--overwrite", code=0)
    assert [row["score"] for row in rows_of((here / "out.jsonl").read_text())] == [0.0, 0.0]
    assert sorted(path.name for path in here.glob("*.partial")) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"response": 1, "answer": "1"}', "line 2: field 'response' holds a int"),
        ('{"answer": "1"}', "line 2: field 'response' is missing"),
        ('{"response": "1", "answer": "1"', "line 2: not valid JSON"),
        ('{"response": "1", "answer": "1", "x": NaN}', "line 2: not valid JSON"),
        ('["response"]', "line 2: found a JSON list"),
        ('{"response": "1"}', "line 2: no 'answer', which this reward needs"),
        ('{"response": "1", "answer": "1", "prompt": 1.5e3, "score": 1}', "there is a field 'score' already"),
        ('{"response": "1", "answer": "1", "prompt": [{"role": "user"}]}', "line 2: field 'prompt', message 1"),
    ],
)
def test_a_bad_row_is_an_error_with_its_line_before_anything_is_scored(here: Path, line: str, said: str):
    (here / "in.jsonl").write_text('{"response": "1", "answer": "1"}\n' + line + "\n")
    done = run("in.jsonl", "--reward", "number", "--out", "out.jsonl", code=2)
    assert said in " ".join(done.stderr.split())
    assert not (here / "out.jsonl").exists()


def test_what_the_source_needs_of_the_task_is_asked_for_and_of_meta_is_its_own_affair(here: Path):
    write(here, [{"schema": {}, "response": "{}"}])
    assert (
        "no 'prompt', which this reward needs" in run("in.jsonl", "--reward", "rewards_of_score:Fussy", code=2).stderr
    )
    write(here, [{"prompt": "?", "response": "{}"}])  # a schema may be there in another form
    assert "ValueError: seen" in run("in.jsonl", "--reward", "rewards_of_score:Fussy", code=1).stderr


def test_a_source_that_breaks_is_a_state_of_each_row_and_the_exit_says_so(here: Path):
    write(here, [{"schema": {}, "prompt": "?", "response": "a"}, {"schema": {}, "prompt": "!", "response": "b"}])
    done = run("in.jsonl", "--reward", "rewards_of_score:Fussy", code=1)
    assert [(row["score"], row["note"]) for row in rows_of(done.stdout)] == [(None, "ValueError: seen")] * 2
    assert "2 x ValueError: seen" in done.stderr
    done = run("in.jsonl", "--reward", "rewards_of_score:never", code=1)
    assert {row["status"] for row in rows_of(done.stdout)} == {"failed"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--reward", "nunber"], "Did you mean 'number'"),
        (["--reward", "number", "--set", "tolerence=1"], "Did you mean 'tolerance'"),
        (["--reward", "number", "--set", "tolerance"], "not of the form key=value"),
        (["--reward", "number", "--overwrite"], "--overwrite has no effect"),
        (["--reward", "number", "--out", "no/such/folder.jsonl"], "There is no folder"),
        (["--reward", "number", "--timeout-s", "3"], "plain function"),
        (["--reward", "rewards_of_score:never", "--timeout-s", "-3"], "--timeout-s"),
    ],
)
def test_what_cannot_be_meant_is_said(here: Path, words: list[str], said: str):
    write(here, ROWS[:2])
    assert said in " ".join(run("in.jsonl", *words, code=2).stderr.split())


def test_a_missing_file_and_an_empty_one(here: Path):
    assert "There is no data file 'no.jsonl'" in run("no.jsonl", "--reward", "number", code=2).stderr
    (here / "in.jsonl").write_text("\n")
    assert "has no rows" in run("in.jsonl", "--reward", "number", code=2).stderr


def test_hostile_text_stays_as_it_is(here: Path):
    response = "\ud800 [bold]\u2028</td> \x00"
    done = run(write(here, [{"response": response, "answer": response}]), "--reward", "exact", "--out", "o.jsonl")
    lines = (here / "o.jsonl").read_bytes().split(b"\n")
    assert len(lines) == 2
    assert json.loads(lines[0])["response"] == response
    assert "1 ok" in done.stderr


def test_settings_are_read_as_toml_and_may_be_nested():
    assert parsed(["a=1.5", "b=true", "c=plain text", "d.e=[1, 2]", "d.f='x'"]) == {
        "a": 1.5,
        "b": True,
        "c": "plain text",
        "d": {"e": [1, 2], "f": "x"},
    }


def test_progress_counts_rows_and_few_groups_are_asked_about_at_once(here: Path):
    class Slow:
        name, offers, needs = "slow", frozenset({"reward"}), frozenset()
        now = most = 0

        async def __call__(self, group: Group):
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.001)
            self.now -= 1
            return [
                Signal(source="slow", name="reward", values=(float(group.task.prompt),)) for _ in group.trajectories
            ]

    count = 2 * IN_FLIGHT
    write(here, [{"prompt": str(i), "response": "x"} for i in range(count)])
    seen: list[int] = []
    source = Slow()
    found = asyncio.run(score(read_answers("in.jsonl"), source, seen.append))
    assert [each.score for each in found] == list(map(float, range(count)))
    assert seen == list(range(1, count + 1))
    assert source.most == IN_FLIGHT


def test_only_json_lines_are_read(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(Exception, match=r"wanted a \.jsonl file"):
        read_answers(str(tmp_path / "a.txt"))
    with pytest.raises(DataError):
        read_answers(str(tmp_path / "b.jsonl"))
