from __future__ import annotations

import pytest
import torch

from headwater.objective.kl import k2
from headwater.objective.supervised import distillation, negative_log_likelihood, reverse_kl_policy
from headwater.types import Scored


def _scored(logp, advantage, ref=None, measured=None):
    made = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    return made, Scored(
        logp_T=made,
        advantage_T=torch.tensor(advantage, dtype=torch.float64),
        sequence_T=torch.zeros(len(logp), dtype=torch.long),
        ref_logp_T=None if ref is None else torch.tensor(ref, dtype=torch.float64),
        measured=measured or {},
    )


def _slope(loss_T, logp_T):
    return torch.autograd.grad(loss_T.sum(), logp_T)[0].tolist()


def test_demonstrations_are_cross_entropy():
    logp, scored = _scored([-1.5, -0.25], [1.0, 1.0])
    loss = negative_log_likelihood(scored)
    assert loss.tolist() == [1.5, 0.25]
    assert _slope(loss, logp) == [-1.0, -1.0]


@pytest.mark.parametrize("divergence", ["forward_kl", "kl", "jsd"])
def test_distillation_is_the_divergence_that_was_measured(divergence):
    names = ["forward_kl", "kl", "jsd"]
    measured = {name: torch.tensor([0.1 * i, 0.5], requires_grad=True) for i, name in enumerate(names)}
    _, scored = _scored([-1.0, -1.0], [1.0, 2.0], measured=measured)
    loss = distillation(scored, divergence=divergence)
    assert loss.tolist() == pytest.approx([0.1 * names.index(divergence), 1.0])
    assert _slope(loss, measured[divergence]) == [1.0, 2.0]


def test_a_divergence_that_was_not_measured_is_our_own_mistake():
    _, scored = _scored([-1.0], [1.0], measured={"kl": torch.ones(1)})
    with pytest.raises(AssertionError, match="jsd"):
        distillation(scored, divergence="jsd")


def test_distillation_by_policy_gradient_by_hand():
    # advantage log teacher - log pi: 0.5 and -1; loss -0.5 · -1 and 1 · -2
    logp, scored = _scored([-1.0, -2.0], [1.0, 1.0], ref=[-0.5, -3.0])
    loss = reverse_kl_policy(scored)
    assert loss.tolist() == [0.5, -2.0]
    assert _slope(loss, logp) == [-0.5, 1.0]


def test_its_gradient_is_that_of_k2():
    logp, scored = _scored([-1.0, -2.0, -0.1], [1.0, 0.5, 2.0], ref=[-0.5, -3.0, -4.0])
    assert _slope(reverse_kl_policy(scored), logp) == pytest.approx(_slope(k2(scored), logp))


def test_a_teacher_that_agrees_teaches_nothing():
    logp, scored = _scored([-1.0, -2.0], [1.0, 1.0], ref=[-1.0, -2.0])
    assert _slope(reverse_kl_policy(scored), logp) == [0.0, 0.0]
