from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.objective.value import value_loss
from headwater.types import Scored


def _scored(value, target, old=None):
    made = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    column = torch.zeros(len(value), dtype=torch.float64)
    return made, Scored(
        logp_T=column,
        advantage_T=torch.tensor(target, dtype=torch.float64),
        sequence_T=column.long(),
        value_T=made,
        old_value_T=None if old is None else torch.tensor(old, dtype=torch.float64),
    )


def _slope(loss_T, value_T):
    return torch.autograd.grad(loss_T.sum(), value_T, retain_graph=True)[0].tolist()


def test_value_loss_by_hand():
    value, scored = _scored([1.0, -2.0], [3.0, -1.5])
    loss = value_loss(scored)
    assert loss.tolist() == [2.0, 0.125]
    assert _slope(loss, value) == [-2.0, -0.5]


@pytest.mark.parametrize(
    ("value", "target", "old", "loss", "slope"),
    [
        (0.1, 1.0, 0.0, 0.405, -0.9),  # within 0.2 of the old value: as without
        (0.5, 1.0, 0.0, 0.32, 0.0),  # has moved enough towards its return: ½·(0.2 - 1)², no slope
        (-0.5, 1.0, 0.0, 1.125, -1.5),  # has moved away: never clipped
        (0.5, 0.1, 0.0, 0.08, 0.4),  # has overshot: ½·0.4², and comes back
    ],
)
def test_clipped_value_loss_by_hand(value, target, old, loss, slope):
    made, scored = _scored([value], [target], [old])
    got = value_loss(scored, clip=0.2)
    assert got.tolist() == pytest.approx([loss])
    assert _slope(got, made) == pytest.approx([slope])


VALUES = st.lists(st.tuples(*[st.floats(-5, 5)] * 3), min_size=1, max_size=8)


@given(VALUES, st.floats(0.01, 3))
def test_value_loss_is_the_textbooks(columns, clip):
    value, target, old = map(list, zip(*columns, strict=True))
    made, scored = _scored(value, target, old)
    near = scored.old_value_T + torch.clip(made - scored.old_value_T, -clip, clip)
    expected = 0.5 * torch.max((made - scored.advantage_T) ** 2, (near - scored.advantage_T) ** 2)
    got = value_loss(scored, clip=clip)
    assert got.tolist() == pytest.approx(expected.tolist())
    assert _slope(got, made) == pytest.approx(_slope(expected, made))


@given(VALUES)
def test_a_clip_makes_no_loss_smaller(columns):
    value, target, old = map(list, zip(*columns, strict=True))
    _, scored = _scored(value, target, old)
    assert (value_loss(scored, clip=0.2) >= value_loss(scored)).all()
    assert value_loss(scored, clip=math.inf).tolist() == pytest.approx(value_loss(scored).tolist())


def test_what_is_missing_is_our_own_mistake():
    _, scored = _scored([1.0], [1.0])
    with pytest.raises(AssertionError, match="before the update"):
        value_loss(scored, clip=0.2)
