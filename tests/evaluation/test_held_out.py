from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.data.render import Renderer
from headwater.engines.torch_engine import TorchEngine
from headwater.evaluation.held_out import evaluate, reply, wilson
from headwater.models.fakes import TabularPolicy
from headwater.rewards.source import verifier
from headwater.types import Sampling, Task


def _says(text):
    """A table that answers `text` after any line, and then ends its turn."""
    policy = TabularPolicy()
    ids = [*policy.tokenizer.encode("\n" + text), 0]
    with torch.no_grad():
        for now, following in itertools.pairwise(ids):
            policy.table.weight[following, now] = 50.0
    return policy, Renderer(policy.tokenizer, "auto", policy.end_of_turn_ids)


@verifier(name="same")
def same(text: str, task: Task) -> float | None:
    return None if task.answer is None else float(text == task.answer)


def _tasks(*answers):
    return [Task(id=str(i), prompt=f"q{i}", answer=a) for i, a in enumerate(answers)]


def test_accuracy_counts_judged_answers_only():
    policy, renderer = _says("ab")
    found = evaluate(
        TorchEngine(policy), renderer, _tasks("ab", "xx", None, "ab"), [(same, 1.0)], Sampling(temperature=0)
    )
    assert (found.n, found.unjudged) == (3, 1)
    assert found.accuracy == pytest.approx(2 / 3)
    assert [(s.prompt, s.text, s.reward, s.stop) for s in found.samples[:3]] == [
        ("q0", "ab", 1.0, "done"),
        ("q1", "ab", 0.0, "done"),
        ("q2", "ab", None, "done"),
    ]


def test_reply_goes_on_with_a_conversation():
    policy, renderer = _says("cd")
    said = reply(policy, renderer, [{"role": "user", "content": "hello"}], Sampling(temperature=0, max_tokens=9))
    assert said == "cd"


def test_wilson_by_hand():
    # 8 of 10 at z = 1.959964: centre (0.8 + 0.19207) / 1.38415, spread 0.31461 / 1.38415
    low, high = wilson(0.8, 10)
    assert low == pytest.approx(0.4902, abs=1e-4)
    assert high == pytest.approx(0.9433, abs=1e-4)


@given(st.integers(0, 200), st.integers(1, 200))
def test_wilson_holds_the_share_and_stays_within_bounds(hits, n):
    share = min(hits, n) / n
    low, high = wilson(share, n)
    assert 0 <= low <= share <= high <= 1
    assert high > low


def test_nothing_judged_is_not_zero():
    policy, renderer = _says("ab")
    found = evaluate(TorchEngine(policy), renderer, _tasks(None), [(same, 1.0)], Sampling(temperature=0))
    assert found.accuracy != found.accuracy, "not a number: no source could tell"
    assert found.interval == (0.0, 1.0)
