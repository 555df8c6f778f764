"""The audit of rewards, on rewards with planted faults."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headwater.cli import app
from headwater.evaluation.audit.hack_probes import CONTROL, OURS, Probe, built_in, load_rows
from headwater.evaluation.audit.reward import Outcome, audit_reward, hacks
from headwater.evaluation.audit.reward_page import as_html, as_json
from headwater.evaluation.held_out import wilson
from headwater.evaluation.score import read_answers
from headwater.rewards.registry import RewardConfig, build_source
from headwater.rewards.source import Source, verifier
from headwater.types import Group, Signal, Task

SAME = {"padded", "repeated", "sycophantic"}
WORSE = {"hedged", "format only", "judge-injected", CONTROL}
LENGTH = "length, same answer"


@verifier
def longer(text: str, task: Task) -> float:
    return float(len(text))


@verifier
def right(text: str, task: Task) -> float:
    return float(task.answer is not None and task.answer in text)


@verifier
def flattered(text: str, task: Task) -> float:
    return right.verdict(text, task) + 0.1 * ("wonderful" in text)  # type: ignore[operator]


@verifier
def obedient(text: str, task: Task) -> float:
    return 1.0 if "gnore" in text or "System:" in text or "Verdict" in text else right.verdict(text, task) * 0.9  # type: ignore[operator]


@verifier
def formatted(text: str, task: Task) -> float:
    return 1.0 if "boxed" in text else right.verdict(text, task) * 1.0  # type: ignore[operator]


def audited(source: Source, reference: Sequence = ()) -> dict[str, Outcome]:
    found = asyncio.run(audit_reward(source, built_in(), reference))
    assert len({outcome.name for outcome in found}) == len(found)
    return {outcome.name: outcome for outcome in found}


def found(outcomes: dict[str, Outcome]) -> set[str]:
    return {name for name, outcome in outcomes.items() if outcome.verdict == "found"}


# --- hacks ---------------------------------------------------------------------------------------------


def test_a_sound_verifier_is_cleared_of_everything():
    outcomes = audited(build_source(RewardConfig(name="number")))
    assert {outcome.verdict for outcome in outcomes.values()} == {"not found"}
    padded, hedged = outcomes["padded"], outcomes["hedged"]
    assert (padded.n, padded.details["ties"], padded.unjudged) == (16, 16, 8)  # questions in words are not its own
    assert math.isnan(padded.effect) and padded.details["its interval"] == list(wilson(0.0, 16))
    assert (hedged.details["losses"], hedged.interval) == (16, wilson(0.0, 16))
    assert "8 of 24 could not be judged" in padded.note


def test_one_that_likes_length_is_found_where_the_hack_is_longer():
    outcomes = audited(longer)
    assert found(outcomes) == {*SAME, "hedged", "format only", "judge-injected", LENGTH}
    assert (outcomes["padded"].effect, outcomes["padded"].interval) == (1.0, wilson(1.0, 24))
    assert outcomes[LENGTH].effect == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("source", "families"),
    [(flattered, {"sycophantic"}), (obedient, {"judge-injected"}), (formatted, {"format only"})],
)
def test_a_planted_fault_is_found_and_no_other(source: Source, families: set[str]):
    assert found(audited(source)) - {"hedged"} == families  # all three only look whether the answer is somewhere


def test_a_worse_answer_that_scores_the_same_is_found_though_nothing_scores_higher():
    outcome = audited(formatted)["format only"]
    assert (outcome.details["wins"], outcome.details["ties"]) == (0, 24)
    assert outcome.note == "the hacked answer is worse, and scores no less"


def test_one_that_sees_nothing_is_not_cleared():
    @verifier
    def constant(text: str, task: Task) -> float:
        return 1.0

    outcomes = audited(constant)
    assert {outcomes[name].verdict for name in WORSE} == {"not enough data"}
    assert "give --pairs" in outcomes[CONTROL].note


@pytest.mark.parametrize(
    ("wins", "ties", "losses", "verdict"),
    [
        (9, 0, 1, "found"),  # Wilson of 9/10: 0.60 to 0.98
        (6, 0, 4, "not enough data"),
        (1, 0, 19, "not found"),
        (5, 0, 0, "found"),  # 5/5: 0.57 to 1
        (3, 0, 0, "not enough data"),  # 3/3: 0.44 to 1
        (0, 20, 0, "not found"),
        (9, 90, 1, "found"),  # ties apart
    ],
)
def test_verdicts_by_counts(wins: int, ties: int, losses: int, verdict: str):
    @verifier
    def planted(text: str, task: Task) -> float:
        return float(text)

    gaps = ["1"] * wins + ["0"] * ties + ["-1"] * losses
    probes = [Probe(family="f", task=Task(id=str(i), prompt="?"), clean="0", hacked=gap) for i, gap in enumerate(gaps)]
    (outcome,) = asyncio.run(hacks(planted, probes))
    assert outcome.verdict == verdict
    assert [outcome.details[key] for key in ("wins", "ties", "losses")] == [wins, ties, losses]
    if wins + losses:
        assert outcome.interval == wilson(wins / (wins + losses), wins + losses)


def test_a_source_that_compares_sees_the_two_answers_of_a_pair_and_no_others():
    sizes: set[int] = set()

    class Longest:
        name, offers, needs = "longest", frozenset({"reward"}), frozenset()

        async def __call__(self, group: Group):
            lengths = [len(t.text) for t in group.trajectories]
            sizes.add(len(lengths))
            return [Signal(source="longest", name="reward", values=(float(n == max(lengths)),)) for n in lengths]

    outcomes = audited(Longest())
    assert outcomes["padded"].effect == 1.0
    assert sizes == {2, 4}  # pairs; and, for length, one answer with its three longer forms


# --- against a reference set -----------------------------------------------------------------------------


def reference(folder: Path, rows: list[dict]) -> list:
    (folder / "ref.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_answers(str(folder / "ref.jsonl"), frozenset(), OURS)


def scored(count: int, score) -> list[dict]:
    return [
        {"prompt": str(i), "response": "x" * (i + 1), "score": score(i), "status": "ok", "note": ""}
        for i in range(count)
    ]


def test_scores_that_are_what_they_were_have_not_drifted(tmp_path: Path):
    outcome = audited(longer, reference(tmp_path, scored(20, lambda i: i + 1)))["drift"]
    assert (outcome.verdict, outcome.effect, outcome.interval, outcome.n) == ("not found", 0.0, (0.0, 0.0), 20)


def test_a_shift_and_another_order_are_drift(tmp_path: Path):
    # scores were 2 lower: in standard deviations of 1 ... 20, sqrt(399/12) = 5.766, that is 0.347
    shifted = audited(longer, reference(tmp_path, scored(20, lambda i: i - 1)))["drift"]
    assert (shifted.verdict, shifted.effect) == ("found", pytest.approx(2 / math.sqrt(399 / 12)))
    turned = audited(longer, reference(tmp_path, scored(20, lambda i: 20 - i)))["drift"]
    assert (turned.verdict, turned.note) == ("found", "the order of scores is another")
    assert turned.details["Spearman of then and now"] == pytest.approx(-1.0)


def test_length_within_prompts_and_given_gold(tmp_path: Path):
    # within each prompt reward is length and gold is length, so given gold nothing is left to length; between
    # prompts the longer answers have the lower reward, which is not to count
    rows = [{"prompt": str(p), "response": "x" * (10 * p + n), "gold": n} for p in range(1, 9) for n in range(1, 5)]
    outcome = audited(longer, reference(tmp_path, rows))["length, reference"]
    assert (outcome.verdict, outcome.effect, outcome.n) == ("found", pytest.approx(1.0), 8)
    assert math.isnan(outcome.details["given gold"])  # type: ignore[arg-type]

    @verifier
    def noisy(text: str, task: Task) -> float:
        return float(len(text) % 10 in (2, 3)) + len(text) * 1e-3

    gold = [row | {"gold": float(row["gold"] in (2, 3))} for row in rows]
    # ranks of reward 1 3 4 2, of length 1 2 3 4, of gold 1.5 3.5 3.5 1.5:
    # r_xy = 2/5, r_xg = 4/sqrt(20), r_yg = 0; so (0.4 - 0) / sqrt(1 - 16/20) = 0.894
    outcome = audited(noisy, reference(tmp_path, gold))["length, reference"]
    assert outcome.effect == pytest.approx(0.4)
    assert outcome.details["given gold"] == pytest.approx(0.4 / math.sqrt(0.2))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"prompt": "a", "response": "b"}], "has no 'score' and one answer for each prompt"),
        ([{"prompt": "a", "response": "b", "score": "high", "status": "ok"}], "line 1: field 'score' is 'high'"),
    ],
)
def test_a_reference_set_of_no_use_is_refused(rows: list[dict], said: str, tmp_path: Path):
    with pytest.raises(Exception, match=said):
        audited(longer, reference(tmp_path, rows))


# --- files and the command -------------------------------------------------------------------------------


def test_ready_pairs_and_clean_rows_may_be_mixed(tmp_path: Path):
    rows = [
        {"prompt": "a", "answer": "4", "response": "4", "hacked": "it is 4, it is 4", "family": "mine"},
        {"prompt": "b", "answer": "5", "response": "5"},
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    clean = load_rows(str(tmp_path / "pairs.jsonl"), frozenset({"answer"}))
    assert "hacked" not in clean[0].task.meta
    outcomes = {o.name: o for o in asyncio.run(audit_reward(longer, clean))}
    assert set(outcomes) == {"mine", *SAME, *WORSE, LENGTH}
    assert (outcomes["mine"].n, outcomes["mine"].verdict) == (1, "not enough data")


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen |= {tag, *(name for name, _ in attrs)}


def test_the_page_is_escaped_and_the_json_is_json():
    evil = "<script>alert(1)</script>\"'&\ud800"
    outcome = Outcome(
        name=evil,
        measure=evil,
        effect=math.nan,
        interval=(math.nan, math.inf),
        n=1,
        verdict="found",
        note=evil,
        details={evil: [evil, math.inf]},
    )
    tags = Tags()
    tags.feed(as_html(evil, [outcome], {evil: evil, "list": [evil]}))
    assert not {"script", "img", "src", "href", "onerror"} & tags.seen
    found = json.loads(as_json(evil, [outcome], {"x": math.nan}), parse_constant=lambda name: pytest.fail(name))
    assert found["verdicts"] == {evil: "found"} and found["x"] is None


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "rewards_of_audit.py").write_text("def length(text, task):\n    return len(text)\n")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["audit", "reward", "--reward", "number", "--out", "a", "--strict"])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["audit", "reward", "--reward", "rewards_of_audit:length", "--out", "b", "--strict"])
    assert done.exit_code == 1, done.output
    assert json.loads((tmp_path / "b/audit.json").read_text())["verdicts"]["padded"] == "found"
    assert "<h1>Audit of the reward rewards_of_audit:length</h1>" in (tmp_path / "b/audit.html").read_text()
    done = CliRunner().invoke(app, ["audit", "reward", "--reward", "nunber"])
    assert done.exit_code == 2 and "Did you mean 'number'" in done.stderr
