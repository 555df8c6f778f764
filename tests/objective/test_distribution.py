from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.objective.distribution import AdaptiveEntropy, entropy, entropy_bonus, forward_kl, jsd, kl
from headwater.types import Scored

INF = math.inf
MEASURES = {"entropy": entropy, "kl": kl, "forward_kl": forward_kl, "jsd": jsd, "jsd 0.1": partial(jsd, beta=0.1)}


def _logp(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_measures_by_hand():
    # pi = (1/2, 1/2), ref = (1/4, 3/4)
    pi, ref = _logp([0.5, 0.5]), _logp([0.25, 0.75])
    assert entropy(pi).tolist() == pytest.approx([math.log(2)])
    assert kl(pi, ref).tolist() == pytest.approx([0.5 * math.log(2) + 0.5 * math.log(2 / 3)])
    assert forward_kl(pi, ref).tolist() == pytest.approx([0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)])
    # beta 1/2: m = (3/8, 5/8)
    m = (
        0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5),
        0.5 * math.log(4 / 3) + 0.5 * math.log(4 / 5),
    )
    assert jsd(pi, ref).tolist() == pytest.approx([sum(m) / 2])


def test_the_larger_share_of_a_mixture_is_the_references_where_beta_is_large():
    # beta 3/4: m = 3/4·ref + 1/4·pi = (0.25, 0.75) with ref = (0.2, 0.8), pi = (0.4, 0.6)
    pi, ref = _logp([0.4, 0.6]), _logp([0.2, 0.8])
    to_ref = 0.2 * math.log(0.2 / 0.25) + 0.8 * math.log(0.8 / 0.75)
    to_pi = 0.4 * math.log(0.4 / 0.25) + 0.6 * math.log(0.6 / 0.75)
    assert jsd(pi, ref, beta=0.75).tolist() == pytest.approx([0.75 * to_ref + 0.25 * to_pi])


def test_tokens_of_no_probability_count_as_nothing():
    pi, ref = _logp([0.5, 0.5, 0.0]), _logp([0.25, 0.75, 0.0])
    for measure in MEASURES.values():
        assert measure(pi, ref).tolist() == pytest.approx(measure(pi[:, :2], ref[:, :2]).tolist())


def test_disjoint_distributions_are_infinitely_far_apart_but_for_jsd():
    pi, ref = _logp([1.0, 0.0]), _logp([0.0, 1.0])
    assert kl(pi, ref).tolist() == [INF]
    assert forward_kl(pi, ref).tolist() == [INF]
    assert jsd(pi, ref).tolist() == pytest.approx([math.log(2)])
    assert entropy(pi).tolist() == [0.0]


@pytest.mark.parametrize("name", MEASURES)
def test_masked_vocabularies_leave_no_nan_in_gradients(name):
    logits = torch.tensor([[0.3, -1.0, -INF, -INF]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[0.1, 0.5, -INF, -INF]], dtype=torch.float64).log_softmax(-1)
    slope = torch.autograd.grad(MEASURES[name](logits.log_softmax(-1), ref).sum(), logits)[0]
    assert torch.isfinite(slope).all()
    assert slope[0, :2].abs().min() > 1e-3
    assert slope[0, 2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", MEASURES)
def test_extremes_are_finite_in_float32(name):
    logits = torch.tensor([[0.0, -3e3, 3e3], [0.0, 0.0, 0.0]], requires_grad=True)
    ref = torch.tensor([[3e3, 0.0, -3e3], [0.0, -3e3, 0.0]]).log_softmax(-1)
    value = MEASURES[name](logits.log_softmax(-1), ref)
    assert torch.isfinite(value).all()
    assert torch.isfinite(torch.autograd.grad(value.sum(), logits)[0]).all()


LOGITS = st.lists(st.floats(-5, 5), min_size=4, max_size=4)


@given(LOGITS, LOGITS, st.floats(0.05, 0.95))
def test_measures_are_the_textbooks(logits, ref_logits, beta):
    leaf = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    ref_logp = torch.tensor([ref_logits], dtype=torch.float64).log_softmax(-1)
    p, q = leaf.softmax(-1), ref_logp.exp()
    m = beta * q + (1 - beta) * p
    textbook = [
        (entropy, -(p * p.log()).sum(-1)),
        (kl, (p * (p / q).log()).sum(-1)),
        (forward_kl, (q * (q / p).log()).sum(-1)),
        (partial(jsd, beta=beta), beta * (q * (q / m).log()).sum(-1) + (1 - beta) * (p * (p / m).log()).sum(-1)),
    ]
    for measure, expected in textbook:
        got = measure(leaf.log_softmax(-1), ref_logp)
        assert got.tolist() == pytest.approx(expected.tolist(), abs=1e-9)
        slopes = [torch.autograd.grad(v.sum(), leaf, retain_graph=True)[0][0].tolist() for v in (got, expected)]
        assert slopes[0] == pytest.approx(slopes[1], abs=1e-9)


@given(LOGITS, LOGITS)
def test_divergences_are_positive_and_vanish_between_equals(logits, ref_logits):
    pi = torch.tensor([logits], dtype=torch.float64).log_softmax(-1)
    ref = torch.tensor([ref_logits], dtype=torch.float64).log_softmax(-1)
    for measure in (kl, forward_kl, jsd):
        assert measure(pi, ref).item() >= -1e-12
        assert measure(pi, pi).item() == pytest.approx(0, abs=1e-12)
    assert jsd(pi, ref).item() == pytest.approx(jsd(ref, pi).item())
    assert 0 <= entropy(pi).item() <= math.log(4) + 1e-12
    assert kl(pi, ref).item() == pytest.approx(forward_kl(ref, pi).item())


def test_jsd_tends_to_the_two_divergences():
    pi, ref = _logp([0.4, 0.6]), _logp([0.2, 0.8])
    assert (jsd(pi, ref, beta=1e-6) / 1e-6).item() == pytest.approx(forward_kl(pi, ref).item(), rel=1e-4)
    assert (jsd(pi, ref, beta=1 - 1e-6) / 1e-6).item() == pytest.approx(kl(pi, ref).item(), rel=1e-4)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_mixture_of_one_is_refused(beta):
    with pytest.raises(AssertionError, match="mixture"):
        jsd(_logp([1.0]), _logp([1.0]), beta=beta)


@pytest.mark.parametrize("measure", [kl, forward_kl, jsd])
def test_a_divergence_without_a_reference_is_our_own_mistake(measure):
    with pytest.raises(AssertionError, match="reference"):
        measure(_logp([1.0]), None)


def test_an_entropy_bonus_is_minus_what_was_measured():
    measured = torch.tensor([0.7, 0.2], requires_grad=True)
    column = torch.zeros(2)
    scored = Scored(
        logp_T=column,
        advantage_T=torch.tensor([1.0, 0.5]),
        sequence_T=column.long(),
        measured={"entropy": measured},
    )
    assert entropy_bonus(scored).tolist() == pytest.approx([-0.7, -0.1])
    assert torch.autograd.grad(entropy_bonus(scored).sum(), measured)[0].tolist() == [-1.0, -0.5]


# ---- the adaptive coefficient


def test_an_adaptive_coefficient_by_hand():
    control = AdaptiveEntropy(target=0.5, step=0.1, highest=0.3)
    assert control.coefficient == 0.0
    seen = [control.update(entropy) for entropy in (0.4, 0.3, 0.6, 0.5, 0.2, 0.2, 0.7)]
    # raised to 0.1, 0.2; lowered to 0.1 and not applied; 0.2, 0.3, held at 0.3; lowered to 0.2, not applied
    assert seen == pytest.approx([0.1, 0.2, 0.0, 0.2, 0.3, 0.3, 0.0])
    assert control.level == pytest.approx(0.2)


@given(st.lists(st.floats(0, 3), max_size=50))
def test_an_adaptive_coefficient_stays_within_its_bounds(entropies):
    control = AdaptiveEntropy(target=1.0, step=0.3, lowest=0.1, highest=0.5, level=0.2)
    for value in entropies:
        coefficient = control.update(value)
        assert 0.1 <= control.level <= 0.5
        assert (coefficient > 0) == (value <= 1.0)


@given(st.lists(st.floats(0, 3), min_size=1, max_size=20), st.integers(0, 20))
def test_an_adaptive_coefficient_goes_on_where_it_was_stopped(entropies, at):
    whole, first, second = (AdaptiveEntropy(target=1.0) for _ in range(3))
    expected = [whole.update(value) for value in entropies]
    got = [first.update(value) for value in entropies[:at]]
    second.load(first.state())
    assert second.coefficient == first.coefficient
    assert got + [second.update(value) for value in entropies[at:]] == expected
