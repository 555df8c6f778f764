from __future__ import annotations

import math

import pytest
import torch

from headwater.objective.kl import k3
from headwater.objective.policy import importance, likelihood, ppo_clip
from headwater.objective.supervised import negative_log_likelihood
from headwater.types import Scored


def _scored(logp, advantage, behavior=None, ref=None):
    def tensor(values):
        return None if values is None else torch.tensor(values, dtype=torch.float64)

    made = tensor(logp).requires_grad_()
    return made, Scored(
        logp_T=made,
        advantage_T=tensor(advantage),
        sequence_T=torch.zeros(len(logp), dtype=torch.long),
        behavior_logp_T=tensor(behavior),
        ref_logp_T=tensor(ref),
    )


def _slope(loss_T, logp_T):
    return torch.autograd.grad(loss_T.sum(), logp_T)[0].tolist()


def test_likelihood_by_hand():
    logp, scored = _scored([-1.0, -2.0], [3.0, -0.5])
    loss = likelihood(scored)
    assert loss.tolist() == [3.0, -1.0]
    assert _slope(loss, logp) == [-3.0, 0.5]


def test_demonstrations_are_cross_entropy():
    logp, scored = _scored([-1.5, -0.25], [1.0, 1.0])
    loss = negative_log_likelihood(scored)
    assert loss.tolist() == [1.5, 0.25]
    assert _slope(loss, logp) == [-1.0, -1.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),  # at the sampler: the plain policy gradient
        (1.1, 2.0, -2.2, -2.2),  # inside the range: -r·A, slope -r·A
        (1.5, 2.0, -2.4, 0.0),  # has gained enough: clipped at 1.2, no slope
        (0.5, 2.0, -1.0, -1.0),  # moved against its advantage: never clipped
        (0.5, -2.0, 1.6, 0.0),  # has lost enough: clipped at 0.8
        (1.5, -2.0, 3.0, 3.0),  # moved against its advantage: never clipped
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_ppo_clip_by_hand(ratio, advantage, loss, slope):
    logp, scored = _scored([-1.0 + math.log(ratio)], [advantage], behavior=[-1.0])
    got = ppo_clip(scored)
    assert got.tolist() == pytest.approx([loss])
    assert _slope(got, logp) == pytest.approx([slope])


def test_unequal_bounds_clip_where_they_are_set():
    _, scored = _scored([math.log(1.25), math.log(0.75)], [1.0, -1.0], behavior=[0.0, 0.0])
    assert ppo_clip(scored, low=0.1, high=0.28).tolist() == pytest.approx([-1.25, 0.9])


def test_a_ratio_beyond_all_bounds_stays_finite():
    logp, scored = _scored([0.0, -500.0], [-1.0, -1.0], behavior=[-500.0, 0.0])
    loss = ppo_clip(scored)
    assert torch.isfinite(loss).all()
    assert all(map(math.isfinite, _slope(loss, logp)))


def test_a_ratio_without_a_sampler_is_our_own_mistake():
    _, scored = _scored([-1.0], [1.0])
    with pytest.raises(AssertionError, match="sampler"):
        ppo_clip(scored)


def test_k3_by_hand():
    # rho = ref/pi: 1, 2 and 1/2. k3 = rho - 1 - ln rho; slope = 1 - rho
    logp, scored = _scored([-1.0] * 3, [1.0] * 3, ref=[-1.0, -1.0 + math.log(2), -1.0 - math.log(2)])
    loss = k3(scored)
    assert loss.tolist() == pytest.approx([0.0, 1 - math.log(2), -0.5 + math.log(2)])
    assert _slope(loss, logp) == pytest.approx([0.0, -1.0, 0.5])


def test_expected_k3_is_the_kl_divergence():
    pi = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    ref = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    _, scored = _scored(pi.log().tolist(), [1.0] * 3, ref=ref.log().tolist())
    assert (pi * k3(scored)).sum().item() == pytest.approx((pi * (pi / ref).log()).sum().item())


def test_importance_by_hand():
    # weights 1, 1, 1, 3: (6)² / (4 · 12) = 0.75; mean |log ratio| = ln 3 / 4
    found = importance(torch.tensor([0.0, 0.0, 0.0, math.log(3)]), torch.zeros(4))
    assert found.ess == pytest.approx(0.75)
    assert found.mismatch == pytest.approx(math.log(3) / 4)
