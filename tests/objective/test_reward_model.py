from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.objective.reward_model import (
    bradley_terry,
    outcome,
    outcome_last,
    process,
    process_classes,
    regression,
)
from headwater.objective.weighting import group_mean, sequence_mean
from headwater.types import Extent, Scored

PER_TOKEN = [outcome, process]
PER_SEQUENCE = [outcome_last, regression]


def _scored(value, target, sequence=None, group=None):
    made = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    sequence_T = torch.tensor(sequence or [0] * len(value))
    return made, Scored(
        logp_T=torch.zeros(len(value), dtype=torch.float64),
        advantage_T=torch.tensor(target, dtype=torch.float64),
        sequence_T=sequence_T,
        group_T=torch.tensor(group or [0] * len(value)),
        value_T=made,
    )


def _slope(loss_T, value_T, weight_T=None):
    total = loss_T.sum() if weight_T is None else (loss_T * weight_T).sum()
    return torch.autograd.grad(total, value_T, retain_graph=True)[0].tolist()


def _log_sigmoid(x):
    return -math.log(1 + math.exp(-x))


# ---- preferences: a pair whose better answer has tokens 0, 1 and whose worse one has 2, 3

PAIR = {"target": [3.0, 3.0, 1.0, 1.0], "sequence": [0, 0, 1, 1]}


def test_bradley_terry_by_hand():
    # scores at the last tokens, 2 and 1: -log σ(1); slope of the better -σ(-1), over the pair's weights of 1/4
    value, scored = _scored([9.0, 2.0, -9.0, 1.0], **PAIR)
    loss = bradley_terry(scored)
    assert loss.tolist() == pytest.approx([-_log_sigmoid(1.0)] * 4)
    weight = group_mean(Extent(sequence_T=scored.sequence_T, group_S=torch.tensor([0, 0])))
    away = 1 / (1 + math.e)
    assert _slope(loss, value, weight) == pytest.approx([0.0, -away, 0.0, away])


def test_a_margin_is_counted_in_ratings():
    # the gap between the ratings is 2: 2 - 1 - 0.25 · 2 = 0.5
    _, scored = _scored([9.0, 2.0, -9.0, 1.0], **PAIR)
    assert bradley_terry(scored, margin=0.25).tolist() == pytest.approx([-_log_sigmoid(0.5)] * 4)


def test_centering_fixes_where_zero_is():
    # + 0.1 · (2 + 1)² = 0.9; slope of both + 0.1 · 2 · 3
    value, scored = _scored([9.0, 2.0, -9.0, 1.0], **PAIR)
    assert bradley_terry(scored, centering=0.1).tolist() == pytest.approx([0.9 - _log_sigmoid(1.0)] * 4)
    weight = torch.full((4,), 0.25, dtype=torch.float64)
    away = 1 / (1 + math.e)
    assert _slope(bradley_terry(scored, centering=0.1), value, weight) == pytest.approx([0, 0.6 - away, 0, 0.6 + away])


def test_three_ranked_siblings_are_three_pairs_that_weigh_as_one():
    _, scored = _scored([3.0, 1.0, 0.0], [2.0, 1.0, 0.0], sequence=[4, 6, 9])
    expected = -(_log_sigmoid(2.0) + _log_sigmoid(3.0) + _log_sigmoid(1.0)) / 3
    assert bradley_terry(scored).tolist() == pytest.approx([expected] * 3)


def test_groups_are_not_compared_and_one_without_a_pair_is_zero():
    value, scored = _scored([5.0, 1.0, 2.0, 7.0], [1.0, 0.0, 1.0, 1.0], sequence=[0, 1, 2, 3], group=[0, 0, 1, 1])
    loss = bradley_terry(scored)
    assert loss.tolist() == pytest.approx([-_log_sigmoid(4.0)] * 2 + [0.0, 0.0])
    assert _slope(loss, value)[2:] == [0.0, 0.0]


def test_a_batch_without_any_pair_has_a_gradient_of_zero():
    value, scored = _scored([5.0, 1.0], [1.0, 1.0], sequence=[0, 1])
    assert _slope(bradley_terry(scored), value) == [0.0, 0.0]


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=5, unique=True), st.floats(-50, 50))
def test_a_preference_does_not_see_a_constant(scores, offset):
    ratings = [float(i) for i in range(len(scores))]
    names = list(range(len(scores)))
    loss = [
        bradley_terry(_scored([score + shift for score in scores], ratings, sequence=names)[1])[0].item()
        for shift in (0.0, offset)
    ]
    assert loss[0] == pytest.approx(loss[1], abs=1e-9)


@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_scores_far_apart_stay_finite(gap):
    value, scored = _scored([gap, 0.0], [1.0, 0.0], sequence=[0, 1])
    loss = bradley_terry(scored)
    assert loss.tolist() == pytest.approx([max(0.0, -gap)] * 2)
    assert all(map(math.isfinite, _slope(loss, value)))


# ---- outcomes and steps


def test_an_outcome_by_hand():
    # σ(0) = 1/2, σ(ln 3) = 3/4; labels 1, 0 and a soft 1/4
    value, scored = _scored([0.0, math.log(3), math.log(3)], [1.0, 0.0, 0.25])
    for loss in PER_TOKEN:
        expected = [math.log(2), math.log(4), -0.25 * math.log(0.75) - 0.75 * math.log(0.25)]
        assert loss(scored).tolist() == pytest.approx(expected)
        assert _slope(loss(scored), value) == pytest.approx([-0.5, 0.75, 0.5])


def test_an_outcome_at_the_last_token_by_hand():
    value, scored = _scored([8.0, math.log(3), 0.0], [1.0, 1.0, 0.0], sequence=[2, 2, 7])
    loss = outcome_last(scored)
    assert loss.tolist() == pytest.approx([math.log(4 / 3), math.log(4 / 3), math.log(2)])
    weight = sequence_mean(Extent(sequence_T=torch.tensor([0, 0, 1]), group_S=torch.tensor([0, 0])))
    assert _slope(loss, value, weight) == pytest.approx([0.0, -0.25 / 2, 0.5 / 2])


def test_a_regression_by_hand():
    # the last tokens say 1 and 4 where 3 and 4.5 were given
    value, scored = _scored([8.0, 1.0, 4.0], [3.0, 3.0, 4.5], sequence=[2, 2, 7])
    loss = regression(scored)
    assert loss.tolist() == pytest.approx([4.0, 4.0, 0.25])
    weight = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    assert _slope(loss, value, weight) == pytest.approx([0.0, -2.0, -0.5])


def test_classes_of_steps_by_hand():
    # a softmax of (1, 2, 1)/4 at each: bad, neutral, good are classes 0, 1, 2
    logits = torch.tensor([[0.0, math.log(2), 0.0]] * 3, dtype=torch.float64, requires_grad=True)
    column = torch.zeros(3, dtype=torch.float64)
    scored = Scored(
        logp_T=column,
        advantage_T=torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64),
        sequence_T=column.long(),
        value_T=logits,
    )
    loss = process_classes(scored)
    assert loss.tolist() == pytest.approx([math.log(4), math.log(2), math.log(4)])
    slopes = torch.autograd.grad(loss.sum(), logits)[0].flatten().tolist()
    assert slopes == pytest.approx([-0.75, 0.5, 0.25, 0.25, -0.5, 0.25, 0.25, 0.5, -0.75])


def test_a_head_of_the_wrong_size_is_our_own_mistake():
    _, one = _scored([1.0], [1.0])
    _, three = _scored([[1.0, 0.0, 0.0]], [1.0])
    with pytest.raises(AssertionError, match="three numbers"):
        process_classes(one)
    for loss in (*PER_TOKEN, *PER_SEQUENCE, bradley_terry):
        with pytest.raises(AssertionError, match="one value"):
            loss(three)


@pytest.mark.parametrize("loss", [*PER_TOKEN, outcome_last])
def test_logits_beyond_all_bounds_stay_finite(loss):
    value, scored = _scored([1e4, -1e4, 1e4, -1e4], [0.0, 1.0, 1.0, 0.0], sequence=[0, 1, 2, 3])
    assert loss(scored).tolist() == pytest.approx([1e4, 1e4, 0.0, 0.0])
    assert _slope(loss(scored), value) == pytest.approx([1.0, -1.0, 0.0, 0.0])


ANSWERS = st.lists(
    st.tuples(st.lists(st.floats(-8, 8), min_size=1, max_size=4), st.floats(0, 1)), min_size=1, max_size=5
)


@given(ANSWERS)
def test_losses_are_the_textbooks(answers):
    value, scored = _scored(
        [v for values, _ in answers for v in values],
        [label for values, label in answers for _ in values],
        sequence=[i for i, (values, _) in enumerate(answers) for _ in values],
    )
    y = scored.advantage_T
    by_token = -(y * torch.log(torch.sigmoid(value)) + (1 - y) * torch.log(1 - torch.sigmoid(value)))
    ends = torch.tensor([len(values) for values, _ in answers]).cumsum(0) - 1
    last_T = ends[scored.sequence_T]
    for loss, expected in (
        (outcome, by_token),
        (process, by_token),
        (outcome_last, by_token[last_T]),
        (regression, (value[last_T] - y) ** 2),
    ):
        assert loss(scored).tolist() == pytest.approx(expected.tolist())
        assert _slope(loss(scored), value) == pytest.approx(_slope(expected, value), abs=1e-9)


@given(ANSWERS)
def test_an_answer_is_the_same_whatever_stands_beside_it(answers):
    def run(loss, some):
        return loss(
            _scored(
                [v for values, _ in some for v in values],
                [label for values, label in some for _ in values],
                sequence=[i for i, (values, _) in enumerate(some) for _ in values],
            )[1]
        ).tolist()

    for loss in (*PER_TOKEN, *PER_SEQUENCE):
        apart = [value for answer in answers for value in run(loss, [answer])]
        assert run(loss, answers) == pytest.approx(apart)
