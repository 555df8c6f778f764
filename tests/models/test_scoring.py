from __future__ import annotations

import pytest
import torch

from headwater.models import scoring
from headwater.models.scoring import token_logp


def _textbook(hidden, head, target, temperature, softcap):
    logits = hidden @ head.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(-1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [7, 10_000])  # 7 logits at once: one row per chunk
@pytest.mark.parametrize("kept", [0, 10_000])
def test_value_and_gradient_equal_autograd_of_the_textbook_formula(monkeypatch, temperature, softcap, chunk, kept):
    monkeypatch.setattr(scoring, "CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(scoring, "KEPT_ELEMENTS", kept)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 4, generator=generator, requires_grad=True)
    head = torch.randn(7, 4, generator=generator, requires_grad=True)
    target, upstream = torch.tensor([0, 6, 3, 3, 1]), torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0])

    logp, entropy = token_logp(hidden, head, target, temperature, softcap)
    ours = torch.autograd.grad((upstream * logp).sum(), [hidden, head])
    expected, expected_entropy = _textbook(hidden, head, target, temperature, softcap)
    theirs = torch.autograd.grad((upstream * expected).sum(), [hidden, head])

    torch.testing.assert_close(logp, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_uniform_logits_by_hand():
    # all logits equal over 8 tokens: logp = -ln 8, entropy = ln 8
    logp, entropy = token_logp(torch.zeros(1, 3), torch.ones(8, 3), torch.tensor([2]))
    assert logp.item() == pytest.approx(-2.0794415)
    assert entropy.item() == pytest.approx(2.0794415)


def test_bfloat16_hidden_states_get_float32_logits():
    # 16.0625 needs more than bfloat16's 8 bits: rounded to 16.0 the gap below would be 0
    hidden = torch.tensor([[4.0, 0.25]], dtype=torch.bfloat16)
    head = torch.tensor([[4.0, 0.25], [4.0, 0.0]], dtype=torch.bfloat16)
    logits = scoring.project(hidden, head)
    assert logits.dtype == torch.float32
    assert (logits[0, 0] - logits[0, 1]).item() == pytest.approx(0.0625)


def test_greedy_log_probs_are_refused():
    with pytest.raises(AssertionError, match="greedy"):
        token_logp(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]), temperature=0.0)
