from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engines.base import seed_of
from headwater.engines.sampling import sample, truncate, uniforms
from headwater.types import Sampling


def test_uniforms_depend_on_seed_and_position_only():
    seeds, positions = np.array([5, 5, 9], dtype=np.uint64), np.array([0, 1, 0], dtype=np.uint64)
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(3)]
    assert together.tolist() == alone
    assert len(set(alone)) == 3


def test_uniforms_are_uniform():
    drawn = uniforms(np.full(20_000, 7, dtype=np.uint64), np.arange(20_000, dtype=np.uint64))
    counts = np.histogram(drawn, bins=20, range=(0, 1))[0]
    # chi-squared with 19 degrees of freedom: 43.8 is its 0.999 quantile
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8


def test_seeds_differ_in_every_part_of_their_key():
    keys = [
        (0, "a", 0, 0, 0),
        (1, "a", 0, 0, 0),
        (0, "b", 0, 0, 0),
        (0, "a", 1, 0, 0),
        (0, "a", 0, 1, 0),
        (0, "a", 0, 0, 1),
    ]
    assert len({seed_of(*key) for key in keys}) == len(keys)


def test_inverse_transform_by_hand():
    # probabilities 0.2, 0.5, 0.3: cumulative 0.2, 0.7, 1.0
    logits = torch.tensor([0.2, 0.5, 0.3]).log().repeat(4, 1)
    tokens, logps = sample(logits, Sampling(), np.array([0.1, 0.3, 0.69, 0.99]))
    assert tokens.tolist() == [0, 1, 1, 2]
    assert logps.exp().tolist() == pytest.approx([0.2, 0.5, 0.5, 0.3])


def test_frequencies_follow_the_distribution():
    probabilities = torch.tensor([0.05, 0.6, 0.0, 0.25, 0.1])
    logits = probabilities.log().repeat(20_000, 1)
    draws = uniforms(np.full(20_000, 3, dtype=np.uint64), np.arange(20_000, dtype=np.uint64))
    tokens, _ = sample(logits, Sampling(), draws)
    share = torch.bincount(tokens, minlength=5) / 20_000
    assert share[2] == 0
    torch.testing.assert_close(share, probabilities, atol=0.015, rtol=0)


def test_a_uniform_at_the_very_end_never_picks_an_impossible_token():
    logits = torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]])
    token, logp = sample(logits, Sampling(), np.array([1 - 1e-17]))
    assert token.item() == 1
    assert logp.item() == pytest.approx(-0.6931472)


def test_greedy_takes_the_likeliest():
    token, logp = sample(torch.tensor([[0.0, 2.0, 1.0]]), Sampling(temperature=0), np.array([0.0]))
    assert token.item() == 1
    assert logp.item() == pytest.approx(-0.4076059)  # 2 - ln(e^0 + e^2 + e^1)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), [1, 3]),
        (Sampling(top_p=0.55), [1]),  # 0.6 alone reaches 0.55
        (Sampling(top_p=0.65), [1, 3]),
        (Sampling(min_p=0.4), [1, 3]),  # 0.25 >= 0.4 · 0.6
        (Sampling(min_p=0.5), [1]),
        (Sampling(top_k=3, top_p=0.89), [1, 3]),  # of the three that top-k left, 0.85 / 0.95 = 0.895
        (Sampling(top_k=3, top_p=0.9), [1, 3, 4]),  # which is short of 0.9, so the third stays
    ],
)
def test_truncation_keeps_and_renormalises(sampling, kept):
    probabilities = torch.tensor([[0.05, 0.6, 0.0, 0.25, 0.1]])
    logp = truncate(probabilities.log(), sampling)[0]
    left = [i for i in range(5) if logp[i] > -torch.inf]
    assert left == kept
    assert logp.exp().sum().item() == pytest.approx(1.0)


@settings(max_examples=50, deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8), min_size=2, max_size=12),
    uniform=st.floats(0, 1, exclude_max=True),
    temperature=st.floats(0.1, 3),
    top_p=st.floats(0.05, 1),
)
def test_what_is_sampled_is_in_the_support_and_carries_its_own_log_prob(logits, uniform, temperature, top_p):
    sampling = Sampling(temperature=temperature, top_p=top_p)
    row = torch.tensor([logits])
    token, logp = sample(row, sampling, np.array([uniform]))
    whole = torch.log_softmax(row / temperature, -1)
    expected = truncate(whole, sampling) if sampling.truncates else whole
    assert logp.item() == pytest.approx(expected[0, token.item()].item(), abs=1e-5)
    assert logp.item() > -np.inf
