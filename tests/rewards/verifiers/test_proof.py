# ruff: noqa: E501  commands, many to a line
from __future__ import annotations

import asyncio
import shutil
import time
from typing import Any

import pytest

from headwater.errors import ConfigError
from headwater.rewards.sandbox.pool import working_isolation
from headwater.rewards.verifiers.proof import Coq, coq
from headwater.rewards.verifiers.proof_text import name_of, renamed, tactics
from headwater.types import Group, Signal, Span, Task, Trajectory

ZERO = "Theorem zero : forall n : nat, n + 0 = n."
MIDDLE = "Theorem middle : forall P : Prop, P \\/ ~ P."
RIGHT = "induction n as [|n IH].\n- reflexivity.\n- simpl. rewrite IH. reflexivity."


@pytest.fixture(scope="module")
def source():
    if shutil.which("coqc") is None:
        pytest.skip("coqc is not installed: apt install coq")
    try:
        working_isolation()
    except ConfigError as error:
        pytest.skip(f"no isolation on this machine: {error}")
    made = coq(seconds=8)
    yield made
    made.sandbox.close()


def judged(source: Coq, text: str, **meta: Any) -> Signal:
    trajectory = Trajectory(task_id="t", spans=(Span(author="policy", tokens=(1,), text=text),))
    (signal,) = asyncio.run(source(Group(task=Task(id="t", prompt="?", meta=meta), trajectories=(trajectory,))))
    return signal


@pytest.mark.parametrize(
    "proof",
    [
        RIGHT,
        f"Proof.\n{RIGHT}\nQed.",
        f"{ZERO}\nProof.\n{RIGHT}\nQed.",
        f"It is by induction:\n```coq\n{RIGHT}\n```\nAs was to be shown.",
        "<think>admit.</think>induction n; simpl; auto.",
        "induction n. (* Axiom a : False. (* deep *) *) { reflexivity. } { simpl. now rewrite IHn. }",
        "induction n.\n2: { simpl. auto. }\nreflexivity.",
        "intros n. all: induction n; simpl; auto.",
        "intros.\ninduction n; [ reflexivity | simpl; congruence ].",
        "fix IH 1. intros [|n]; [reflexivity | exact (f_equal S (IH n))].",
    ],
)
def test_a_right_proof(source: Coq, proof: str):
    signal = judged(source, proof, statement=ZERO)
    assert (signal.status, signal.values) == ("ok", (1.0,)), signal.note


COMMANDS = [
    "Admitted.", "Abort.", "Axiom a : False.", "Parameter a : False.", "Hypothesis a : False.", "Variable a : False.",
    "Conjecture a : False.", 'Redirect "x" Print nat.', 'Load "x".', 'Extraction "x.ml" nat.', "Unset Guard Checking.",
    "Unset Universe Checking.", "Unset Positivity Checking.", 'Declare ML Module "x".', "Drop.", "Quit.", "Cd \"/\".",
    "Require Import Classical.", "Set Printing All.", "Ltac x := idtac.", "Definition x := 0.", "Notation x := 0.",
    "Fail fail.", "Time auto.", "Timeout 5 auto.", "Qed.", "Defined.", "Save x.", "Restart.", "Undo.", "Show Proof.", "Eval compute in 0.",
    "#[bypass_check(guard)] Fixpoint f (n : nat) : False := f n.", "Theorem zero : True.", "Module Given.", "Hint Resolve I.",
    "Print Assumptions zero.", "Check 0.", "Import Nat.", "Add LoadPath \"/\".", "Instance x : True.", "Goal True.", "Back 1.",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "before", ["", "auto.\n", "{ ", "- ", "1: { ", "[x]: { ", "all: { ", "(* *) ", "} ", "auto. - + {"]
)
def test_no_command_gets_to_coq(command: str, before: str):
    assert isinstance(tactics(f"{before}{command} auto."), str)


@pytest.mark.parametrize(
    ("proof", "note"),
    [
        ("", "no proof"),
        ("<think>" + RIGHT, "no proof"),
        ("```coq\n" + RIGHT, "no proof"),
        ("reflexivity.", "Unable to unify"),
        ("auto with nothing_of_the_kind.", "nothing_of_the_kind"),
        ("intros n.", "incomplete proof"),
        ("admit.", "admit"),
        ("intros; give_up.", "give_up"),
        ("intros; now (admit).", "admit"),
        ("native_compute; auto.", "native_compute"),
        ("exact_no_check I.", "exact_no_check"),
        ("auto. Admitted.", "no tactic"),
        (f"{RIGHT} Qed. Theorem b : True. auto.", "no tactic"),
        ("Theorem zero : forall n : nat, n = n. Proof. auto. Qed.", "no tactic"),
        ("Theorem zero : True. exact I. Qed.", "no tactic"),
        ("auto.Axiom a : False. apply a.", "Syntax error"),
        ("(* auto.", "never closed"),
        ("(* *) *) auto.", "no tactic"),
        ('idtac "(*". Axiom a : False. idtac "*)".', "string"),
        ("auto", "no full stop"),
        ("fix IH 1. exact IH.", "ill-formed"),
        ("auto.\N{NO-BREAK SPACE}Axiom a : False.", "ASCII"),
        ("repeat (pose proof I).", "took more than"),
        ("do 100000000 idtac. " * 50, "took more than"),
        ("I do not know how to prove this.", "no tactic"),
    ],
)
def test_a_wrong_proof(source: Coq, proof: str, note: str):
    started = time.monotonic()
    signal = judged(source, proof, statement=ZERO)
    assert (signal.status, signal.values) == ("ok", (0.0,)), signal.note
    assert note in signal.note
    assert time.monotonic() - started < 20


def test_another_theorem_is_not_proved(source: Coq):
    assert judged(source, RIGHT, statement="Theorem zero : forall n : nat, n + 1 = n.").values == (0.0,)
    assert judged(source, "auto.", statement="Theorem none : False.").values == (0.0,)


def test_axioms_must_be_allowed(source: Coq):
    meta: dict[str, Any] = {"statement": MIDDLE, "preamble": "Require Import Classical."}
    signal = judged(source, "apply classic.", **meta)
    assert (signal.values, signal.note) == ((0.0,), "it assumes classic")
    assert judged(source, "apply classic.", axioms=["classic"], **meta).values == (1.0,)
    assert judged(source, "apply classic.", axioms=["choice"], **meta).values == (0.0,)
    assert judged(source, "tauto.", axioms=["classic"], statement=MIDDLE).values == (0.0,)


def test_a_preamble_comes_before(source: Coq):
    preamble = "Definition twice (n : nat) := n + n.\nNotation \"'two' n\" := (twice n) (at level 10)."
    statement = "Lemma even : forall n, two n = n + n."
    assert judged(source, "reflexivity.", statement=statement, preamble=preamble).values == (1.0,)


@pytest.mark.parametrize(
    "meta",
    [
        {"statement": "Theorem t : nonsense."},
        {"statement": "1 = 1"},
        {"statement": "Theorem t : True"},
        {"statement": 5},
        {"statement": ZERO, "preamble": "Nonsense."},
        {"statement": ZERO, "preamble": 5},
        {"statement": ZERO, "axioms": "classic"},
    ],
)
def test_a_broken_task_is_no_verdict(source: Coq, meta: dict[str, Any]):
    signal = judged(source, RIGHT, **meta)
    assert (signal.status, signal.values) == ("failed", ())
    assert "task" in signal.note


def test_abstains_without_a_statement(source: Coq):
    assert judged(source, RIGHT).status == "abstained"


def test_says_that_coq_is_absent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="apt install coq"):
        coq()


def test_names_of_statements():
    assert name_of("Lemma a_b' (n : nat) : n = n.") == "a_b'"
    assert name_of("Definition a := 0.") is None
    assert renamed("Theorem a : a = a.", "b") == "Theorem b : a = a."


@pytest.mark.parametrize("piece", ["(*", "(* *) ", "- ", "{ ", "} ", ". ", "a" * 9, "[x]: { ", "1 : ", "+-*", "\n"])
def test_hostile_text_is_read_in_linear_time(piece: str):
    started = time.monotonic()
    tactics(piece * (200_000 // len(piece)))
    assert time.monotonic() - started < 1
