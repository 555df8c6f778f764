"""Shared prefixes must give the numbers that separate rows give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.models.fakes import tiny_llama
from headwater.models.layout import Tree

FAMILIES = st.lists(
    st.tuples(st.integers(1, 7), st.lists(st.integers(0, 6), min_size=0, max_size=4)), min_size=1, max_size=4
)


def _separately(policy, families, tokens):
    """Hidden states of every token, each sequence run as a row of its own with plain causal attention."""
    out, at = [], 0
    for prefix, continuations in families:
        head = tokens[at : at + prefix]
        at += prefix
        alone = Tree([(prefix, ())])
        out.append(policy.hidden(head, alone.positions_N, alone))
        for n in continuations:
            row = torch.cat([head, tokens[at : at + n]])
            at += n
            whole = Tree([(len(row), ())])
            out.append(policy.hidden(row, whole.positions_N, whole)[prefix:])
    return torch.cat(out)


@settings(max_examples=25, deadline=None)
@given(families=FAMILIES, dense=st.booleans())
def test_shared_prefix_equals_separate_rows(families, dense):
    policy = tiny_llama()
    tree = Tree(families)
    tree.dense = dense
    tokens = torch.randint(2, 40, (tree.size,), generator=torch.Generator().manual_seed(tree.size))
    with torch.no_grad():
        shared = policy.hidden(tokens, tree.positions_N, tree)
        apart = _separately(policy, families, tokens)
    torch.testing.assert_close(shared, apart, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dense", [True, False])
def test_gradients_of_a_shared_prefix_equal_those_of_separate_rows(dense):
    families = [(5, (3, 0, 4)), (2, (6,))]
    policy = tiny_llama()
    tree = Tree(families)
    tree.dense = dense
    tokens = torch.arange(2, 2 + tree.size) % 40 + 2

    def gradient(hidden):
        policy.module.zero_grad()
        hidden[:, ::3].square().sum().backward()
        return {name: p.grad.clone() for name, p in policy.trainable().items() if p.grad is not None}

    shared = gradient(policy.hidden(tokens, tree.positions_N, tree))
    apart = gradient(_separately(policy, families, tokens))
    # the rows that repeat a prefix were cut off above, so both sums run over the same tokens
    for name, expected in apart.items():
        torch.testing.assert_close(shared[name], expected, atol=1e-5, rtol=1e-4)


def test_positions_of_a_continuation_count_on_from_its_prefix():
    # prefix of 3, continuations of 2 and 1, then a prefix of 1
    assert Tree([(3, (2, 1)), (1, ())]).positions_N.tolist() == [0, 1, 2, 3, 4, 3, 0]


def test_matches_plain_transformers():
    """The same weights through transformers' own attention give the same hidden states."""
    policy = tiny_llama()
    tokens = torch.arange(2, 14)
    tree = Tree([(12, ())])
    with torch.no_grad():
        ours = policy.hidden(tokens, tree.positions_N, tree)
        policy.model.set_attn_implementation("eager")
        theirs = policy.model.get_decoder()(input_ids=tokens[None]).last_hidden_state[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_long_siblings_are_not_run_under_one_dense_mask():
    assert Tree([(40, (12,) * 8)]).dense
    assert not Tree([(40, (1000,) * 8)]).dense
