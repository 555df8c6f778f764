from __future__ import annotations

import math

import pytest
import torch

from headwater.objective.distribution import forward_kl, kl
from headwater.objective.kl import exact, k1, k2, k3, k3_plus, weighted
from headwater.objective.supervised import reverse_kl_policy
from headwater.types import Scored


def _scored(logp_T, ref, advantage=None, behavior=None, measured=None):
    def tensor(values):
        return (
            values if values is None or isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.float64)
        )

    logp_T = logp_T if isinstance(logp_T, torch.Tensor) else tensor(logp_T).requires_grad_()
    return logp_T, Scored(
        logp_T=logp_T,
        advantage_T=torch.ones_like(logp_T) if advantage is None else tensor(advantage),
        sequence_T=torch.zeros(len(logp_T), dtype=torch.long),
        behavior_logp_T=tensor(behavior),
        ref_logp_T=tensor(ref),
        measured=measured or {},
    )


def _slope(loss_T, logp_T):
    return torch.autograd.grad(loss_T.sum(), logp_T)[0].tolist()


LN2 = math.log(2)


@pytest.mark.parametrize(
    ("loss", "values", "slopes"),
    [
        # x = log pi - log ref: 0, -ln 2 and ln 2, so rho = ref/pi: 1, 2 and 1/2
        (k1, [0.0, -LN2, LN2], [1.0, 1.0, 1.0]),
        (k2, [0.0, LN2**2 / 2, LN2**2 / 2], [0.0, -LN2, LN2]),
        (k3, [0.0, 1 - LN2, -0.5 + LN2], [0.0, -1.0, 0.5]),  # rho - 1 - ln rho; slope 1 - rho
        (k3_plus, [0.0, 1 - LN2, -0.5 + LN2], [0.0, -LN2, LN2]),
    ],
)
def test_estimators_by_hand(loss, values, slopes):
    logp, scored = _scored([-1.0] * 3, ref=[-1.0, -1.0 + LN2, -1.0 - LN2])
    got = loss(scored)
    assert got.tolist() == pytest.approx(values)
    assert _slope(got, logp) == pytest.approx(slopes)


@pytest.mark.parametrize("loss", [k1, k2, k3, k3_plus])
def test_the_advantage_weighs_an_estimate(loss):
    _, one = _scored([-1.0, -2.0], ref=[-1.5, -1.0])
    _, half = _scored([-1.0, -2.0], ref=[-1.5, -1.0], advantage=[0.5, 0.0])
    assert loss(half).tolist() == pytest.approx([loss(one)[0].item() / 2, 0.0])


def test_an_exact_kl_is_what_was_measured():
    measured = torch.tensor([0.3, 0.5], dtype=torch.float64, requires_grad=True)
    _, scored = _scored([-1.0, -1.0], ref=None, advantage=[1.0, 2.0], measured={"kl": measured})
    assert exact(scored).tolist() == [0.3, 1.0]
    assert _slope(exact(scored), measured) == [1.0, 2.0]


def test_what_is_missing_is_our_own_mistake():
    _, scored = _scored([-1.0], ref=None)
    for loss, words in ((k1, "reference"), (k3, "reference"), (exact, "measure"), (weighted(k1), "sampler")):
        with pytest.raises(AssertionError, match=words):
            loss(scored)


def test_the_weight_is_the_ratio_to_the_sampler():
    # pi/mu = 2, x = 0.5: 1.0; slope r·(x + 1) = 3, or r alone where the ratio is detached
    logp, scored = _scored([-1.0], ref=[-1.5], behavior=[-1.0 - LN2])
    assert weighted(k1)(scored).tolist() == pytest.approx([1.0])
    assert _slope(weighted(k1)(scored), logp) == pytest.approx([3.0])
    assert _slope(weighted(k1, detached=True)(scored), logp) == pytest.approx([2.0])


@pytest.mark.parametrize("loss", [k1, k2, k3, k3_plus, weighted(k3), weighted(k3_plus, detached=True)])
@pytest.mark.parametrize("ref", [-900.0, 0.0])
def test_estimates_of_policies_far_apart_stay_finite(loss, ref):
    logp, scored = _scored([-450.0], ref=[ref], behavior=[-450.0])
    assert torch.isfinite(loss(scored)).all()
    assert math.isfinite(_slope(loss(scored), logp)[0])


def test_k3_still_pulls_back_a_policy_that_is_far_too_sure():
    logp, scored = _scored([0.0], ref=[-900.0])
    assert _slope(k3(scored), logp) == pytest.approx([1.0])


# ---- whose gradient: every token of a vocabulary of four, with the probability it is sampled with

LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64)
REF = torch.tensor([-0.5, 0.4, 0.2, 1.0], dtype=torch.float64).log_softmax(0)
MU = torch.tensor([0.0, 0.5, 0.2, -0.3], dtype=torch.float64).log_softmax(0)


def _expected(loss, sampler):
    """Mean and mean gradient in the logits, over tokens of `sampler` (None: of the policy itself)."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(0)
    mu = logp.detach() if sampler is None else sampler
    _, scored = _scored(logp, ref=REF, behavior=mu)
    mean = (mu.exp() * loss(scored)).sum()
    return mean.item(), torch.autograd.grad(mean, logits)[0].tolist()


def _divergence(measure):
    logits = LOGITS.clone().requires_grad_()
    value = measure(logits.log_softmax(0)[None], REF[None]).sum()
    return value.item(), torch.autograd.grad(value, logits)[0].tolist()


def test_the_divergences_differ_where_it_is_claimed_that_they_do():
    assert _divergence(kl)[1] != pytest.approx(_divergence(forward_kl)[1], abs=0.01)
    # by their closed forms: pi·(x - KL) and pi - ref
    pi, x = LOGITS.softmax(0), LOGITS.log_softmax(0) - REF
    assert _divergence(kl)[1] == pytest.approx((pi * (x - (pi * x).sum())).tolist())
    assert _divergence(forward_kl)[1] == pytest.approx((pi - REF.exp()).tolist())


@pytest.mark.parametrize("loss", [k1, k3, k3_plus])
def test_the_mean_of_an_unbiased_estimate_is_the_divergence(loss):
    assert _expected(loss, None)[0] == pytest.approx(_divergence(kl)[0])


def test_k2_is_biased():
    assert _expected(k2, None)[0] != pytest.approx(_divergence(kl)[0], rel=0.01)


def test_k1_as_a_loss_does_nothing():
    assert _expected(k1, None)[1] == pytest.approx([0.0] * 4, abs=1e-12)


@pytest.mark.parametrize("loss", [k2, k3_plus, reverse_kl_policy])
def test_the_gradient_that_stays_near_the_reference(loss):
    assert _expected(loss, None)[1] == pytest.approx(_divergence(kl)[1])


def test_k3_as_a_loss_descends_the_forward_divergence():
    assert _expected(k3, None)[1] == pytest.approx(_divergence(forward_kl)[1])


@pytest.mark.parametrize("sampler", [None, MU])
@pytest.mark.parametrize("loss", [weighted(k1), weighted(k3)])
def test_a_weighted_unbiased_estimate_descends_the_divergence_whoever_sampled(loss, sampler):
    value, gradient = _divergence(kl)
    assert _expected(loss, sampler)[0] == pytest.approx(value)
    assert _expected(loss, sampler)[1] == pytest.approx(gradient)


@pytest.mark.parametrize("loss", [k2, k3_plus, reverse_kl_policy])
def test_a_detached_weight_moves_a_right_gradient_to_another_sampler(loss):
    gradient = _divergence(kl)[1]
    assert _expected(weighted(loss, detached=True), MU)[1] == pytest.approx(gradient)
    assert _expected(loss, MU)[1] != pytest.approx(gradient, abs=0.01)
    assert _expected(weighted(loss), MU)[1] != pytest.approx(gradient, abs=0.01)
