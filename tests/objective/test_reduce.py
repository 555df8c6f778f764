from __future__ import annotations

import pytest
import torch

from headwater.objective.reduce import Pairs, Sequences
from headwater.objective.weighting import group_mean
from headwater.types import Extent, Scored


def _scored(sequence, group, target, logp=None):
    return Scored(
        logp_T=torch.zeros(len(sequence)) if logp is None else logp,
        advantage_T=torch.tensor(target, dtype=torch.float64),
        sequence_T=torch.tensor(sequence),
        group_T=None if group is None else torch.tensor(group),
    )


def test_sums_means_and_ends_of_sequences_that_skip_numbers():
    sequences = Sequences.of(torch.tensor([3, 3, 3, 7, 9, 9]))
    values = torch.tensor([1.0, 2.0, 6.0, 5.0, 4.0, 8.0])
    assert sequences.count == 3
    assert sequences.of_T.tolist() == [0, 0, 0, 1, 2, 2]
    assert sequences.sum(values).tolist() == [9.0, 5.0, 12.0]
    assert sequences.mean(values).tolist() == [3.0, 5.0, 6.0]
    assert sequences.one(values).tolist() == [1.0, 5.0, 4.0]
    assert sequences.last(values).tolist() == [6.0, 5.0, 8.0]


def test_tokens_of_a_sequence_need_not_stand_together():
    sequences = Sequences.of(torch.tensor([4, 2, 4, 2, 4]))
    values = torch.tensor([1.0, 10.0, 2.0, 20.0, 3.0])
    assert sequences.sum(values).tolist() == [30.0, 6.0]
    assert sequences.one(values).tolist() == [10.0, 1.0]
    assert sequences.last(values).tolist() == [20.0, 3.0]


def test_rows_at_the_last_token():
    sequences = Sequences.of(torch.tensor([0, 0, 1]))
    assert sequences.last(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])).tolist() == [[3.0, 4.0], [5.0, 6.0]]


def test_a_sum_spreads_its_gradient_and_a_mean_shares_it():
    values = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    sequences = Sequences.of(torch.tensor([0, 0, 1]))
    weight = torch.tensor([10.0, 7.0])
    assert torch.autograd.grad((weight * sequences.sum(values)).sum(), values)[0].tolist() == [10.0, 10.0, 7.0]
    assert torch.autograd.grad((weight * sequences.mean(values)).sum(), values)[0].tolist() == [5.0, 5.0, 7.0]


def test_no_tokens_are_no_sequences():
    sequences = Sequences.of(torch.zeros(0, dtype=torch.long))
    assert sequences.count == 0
    for values in (sequences.sum, sequences.mean, sequences.one, sequences.last):
        assert values(torch.zeros(0)).shape == (0,)


def test_the_higher_target_of_a_pair_is_better():
    # sequences 2 and 5 of group 8, of 1 and 2 tokens; 6 and 7 of group 3, of 2 and 1 tokens
    pairs = Pairs.of(_scored([2, 5, 5, 6, 6, 7], [8, 8, 8, 3, 3, 3], [0.0, 1.0, 1.0, 4.0, 4.0, 2.5]))
    found = zip(pairs.better_P.tolist(), pairs.worse_P.tolist(), pairs.gap_P.tolist(), strict=True)
    assert set(found) == {(1, 0, 1.0), (2, 3, 1.5)}
    assert pairs.group_S.tolist() == [1, 1, 0, 0]


def test_k_ranked_siblings_make_all_their_pairs():
    pairs = Pairs.of(_scored([0, 1, 2, 3], [0] * 4, [3.0, 1.0, 2.0, 0.0]))
    found = zip(pairs.better_P.tolist(), pairs.worse_P.tolist(), strict=True)
    assert set(found) == {(0, 1), (0, 2), (0, 3), (2, 1), (2, 3), (1, 3)}


def test_equal_targets_make_no_pair():
    pairs = Pairs.of(_scored([0, 1, 2], [0] * 3, [1.0, 1.0, 0.0]))
    found = zip(pairs.better_P.tolist(), pairs.worse_P.tolist(), strict=True)
    assert set(found) == {(0, 2), (1, 2)}


def test_siblings_of_different_groups_are_never_compared():
    pairs = Pairs.of(_scored([0, 1], [0, 1], [1.0, 0.0]))
    assert len(pairs.better_P) == 0
    assert pairs.spread(torch.zeros(0)).tolist() == [0.0, 0.0]


def test_each_group_reads_the_mean_of_its_own_pairs():
    # group 0: targets 2, 1, 0 make three pairs; group 1: one pair; group 2: a tie, so none
    scored = _scored(
        [0, 1, 2, 2, 3, 4, 4, 5, 6], [0, 0, 0, 0, 1, 1, 1, 2, 2], [2.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    )
    pairs = Pairs.of(scored)
    value = {(0, 1): 1.0, (0, 2): 2.0, (1, 2): 6.0, (4, 3): 5.0}
    found = zip(pairs.better_P.tolist(), pairs.worse_P.tolist(), strict=True)
    loss_T = pairs.spread(torch.tensor([value[pair] for pair in found]))
    assert loss_T.tolist() == [3.0, 3.0, 3.0, 3.0, 5.0, 5.0, 5.0, 0.0, 0.0]


def test_a_spread_loss_adds_up_to_its_mean_over_groups():
    sequence, group = [0, 1, 1, 1, 2, 2, 3], [0, 0, 0, 0, 1, 1, 1]
    pairs = Pairs.of(_scored(sequence, group, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]))
    loss_P = torch.tensor([2.0, 10.0], dtype=torch.float64)
    weight_T = group_mean(Extent(sequence_T=torch.tensor(sequence), group_S=torch.tensor([0, 0, 1, 1])))
    assert (weight_T * pairs.spread(loss_P)).sum().item() == pytest.approx(6.0)


def test_a_group_without_a_pair_can_still_be_differentiated_and_teaches_nothing():
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    pairs = Pairs.of(_scored([0, 1], [0, 0], [1.0, 1.0], logp))
    loss_T = pairs.spread(pairs.sequences.sum(logp)[pairs.better_P])
    assert torch.autograd.grad(loss_T.sum(), logp)[0].tolist() == [0.0, 0.0]


def test_pairs_without_groups_are_our_own_mistake():
    with pytest.raises(AssertionError, match="siblings of a group"):
        Pairs.of(_scored([0, 1], None, [1.0, 0.0]))
