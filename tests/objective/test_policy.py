from __future__ import annotations

import math
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.objective.policy import (
    cispo,
    cispo_cap,
    corrected,
    correction,
    decoupled_ppo,
    gspo,
    gspo_token,
    importance,
    kl_mask,
    likelihood,
    off_policy_masked,
    ppo_clip,
    sapo,
    tv_mask,
)
from headwater.types import Scored


def _scored(logp, advantage, behavior=None, proximal=None, sequence=None):
    def tensor(values):
        return None if values is None else torch.tensor(values, dtype=torch.float64)

    made = tensor(logp).requires_grad_()
    return made, Scored(
        logp_T=made,
        advantage_T=tensor(advantage),
        sequence_T=torch.tensor(sequence or [0] * len(logp)),
        behavior_logp_T=tensor(behavior),
        proximal_logp_T=tensor(proximal),
    )


def _slope(loss_T, logp_T, weight_T=None):
    total = loss_T.sum() if weight_T is None else (loss_T * weight_T).sum()
    return torch.autograd.grad(total, logp_T, retain_graph=True)[0].tolist()


RATIO_LOSSES = {
    "ppo_clip": ppo_clip,
    "dual": partial(ppo_clip, dual=3.0),
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": partial(cispo, high=0.28),
    "cispo_cap": cispo_cap,
    "sapo": sapo,
    "tv_mask": tv_mask,
    "kl_mask": kl_mask,
    "corrected": corrected(ppo_clip, low=0.5, high=2.0, mode="mask"),
    "corrected sequences": corrected(gspo, level="sequence"),
    "off_policy_masked": off_policy_masked(ppo_clip, bound=0.1),
    "decoupled_ppo": decoupled_ppo,
}


# ---- by hand


def test_likelihood_by_hand():
    logp, scored = _scored([-1.0, -2.0], [3.0, -0.5])
    loss = likelihood(scored)
    assert loss.tolist() == [3.0, -1.0]
    assert _slope(loss, logp) == [-3.0, 0.5]


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


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (2.5, -2.0, 5.0, 5.0),  # below c: as without
        (4.0, -2.0, 6.0, 0.0),  # beyond c = 3: 3·2, and no slope
        (4.0, 2.0, -2.4, 0.0),  # of positive advantage: as without
        (0.5, -2.0, 1.6, 0.0),
    ],
)
def test_dual_clip_by_hand(ratio, advantage, loss, slope):
    logp, scored = _scored([-5.0 + math.log(ratio)], [advantage], behavior=[-5.0])
    got = ppo_clip(scored, dual=3.0)
    assert got.tolist() == pytest.approx([loss])
    assert _slope(got, logp) == pytest.approx([slope])


def test_a_dual_clip_within_the_clip_is_refused():
    _, scored = _scored([-1.0], [1.0], behavior=[-1.0])
    with pytest.raises(AssertionError, match="dual"):
        ppo_clip(scored, dual=1.0)


def test_gspo_by_hand():
    # answer 0: log-ratios ln 4 and 0, mean ln 2, s = 2; A = -1 is never clipped above: loss 2 at both tokens.
    # answer 1: log-ratio ln 2, A = 1: clipped at 1.4. Weighed 1/2 per answer's mean: ∂/∂logp = 1/2 · 1/2 · s = 1/2.
    logp, scored = _scored(
        [-1.0, -1.0, -1.0],
        [-1.0, -1.0, 1.0],
        behavior=[-1 - math.log(4), -1.0, -1 - math.log(2)],
        sequence=[4, 4, 9],
    )
    loss = gspo(scored, low=0.3, high=0.4)
    assert loss.tolist() == pytest.approx([2.0, 2.0, -1.4])
    weight = torch.tensor([1 / 4, 1 / 4, 1 / 2], dtype=torch.float64)
    assert _slope(loss, logp, weight) == pytest.approx([0.5, 0.5, 0.0])


def test_gspo_token_gives_each_token_its_own_pull():
    # s = 1.1 inside the range; slope of each token is -s·A of its own
    gap = math.log(1.1)
    logp, scored = _scored([-1.0, -2.0], [2.0, -1.0], behavior=[-1 - 2 * gap, -2.0])
    loss = gspo_token(scored, low=0.2, high=0.2)
    assert loss.tolist() == pytest.approx([-2.2, 1.1])
    assert _slope(loss, logp) == pytest.approx([-2.2, 1.1])


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [(1.1, 2.0, 1.1), (1.5, 2.0, 1.2), (0.5, -2.0, 0.8), (1.5, -2.0, 1.2), (0.5, 2.0, 0.8)],
)
def test_cispo_by_hand(ratio, advantage, weight):
    # the weight is clipped on both sides, whatever the advantage, and the slope is never 0
    logp, scored = _scored([-3.0], [advantage], behavior=[-3.0 - math.log(ratio)])
    loss = cispo(scored, low=0.2, high=0.2)
    assert loss.tolist() == pytest.approx([3.0 * weight * advantage])
    assert _slope(loss, logp) == pytest.approx([-weight * advantage])


def test_cispo_has_no_lower_bound_unless_told():
    logp, scored = _scored([-3.0], [1.0], behavior=[-3.0 + math.log(100)])
    assert _slope(cispo(scored, high=0.2), logp) == pytest.approx([-0.01])


def test_the_cap_of_cispo_is_the_weight_itself():
    logp, scored = _scored([-3.0, -3.0], [1.0, 1.0], behavior=[-3 - math.log(9), -3 - math.log(4)])
    assert _slope(cispo_cap(scored, cap=5.0), logp) == pytest.approx([-5.0, -4.0])
    assert _slope(cispo(scored, high=4.0), logp) == pytest.approx([-5.0, -4.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 3.0, -6.0, -3.0),  # tau 1: 4·σ(0) = 2; slope 4·σ'(0) = 1, times A
        (1.0, -3.0, 3.0, 3.0),  # tau 2: 2·σ(0) = 1; slope 1
        (1 + math.log(3), 1.0, -3.0, -0.75 * (1 + math.log(3))),  # σ(ln 3) = 3/4: 4·3/4; 4·(3/4)(1/4)·r
        (1 + math.log(3) / 2, -1.0, 1.5, 0.75 * (1 + math.log(3) / 2)),  # tau 2: 2·3/4
    ],
)
def test_sapo_by_hand(ratio, advantage, loss, slope):
    logp, scored = _scored([-1.0], [advantage], behavior=[-1.0 - math.log(ratio)])
    got = sapo(scored, positive=1.0, negative=2.0)
    assert got.tolist() == pytest.approx([loss])
    assert _slope(got, logp) == pytest.approx([slope])


MOVES = [
    (0.50, 0.20, 1.0, False),  # gained 0.3: more than 0.2, and the way A pulls
    (0.50, 0.20, -1.0, True),  # A pulls it back
    (0.10, 0.40, -1.0, False),  # lost 0.3
    (0.10, 0.40, 1.0, True),
    (0.05, 0.001, 1.0, True),  # a ratio of 50, and a distance of nothing
    (0.99, 0.75, 1.0, False),  # a ratio of 1.3, and far
]


@pytest.mark.parametrize(("now", "sampled", "advantage", "kept"), MOVES)
def test_tv_mask_by_hand(now, sampled, advantage, kept):
    logp, scored = _scored([math.log(now)], [advantage], behavior=[math.log(sampled)])
    loss = tv_mask(scored, bound=0.2, cap=20.0)
    weight = min(now / sampled, 20) * kept
    assert loss.tolist() == pytest.approx([-weight * advantage * math.log(now)])
    assert _slope(loss, logp) == pytest.approx([-weight * advantage])


@pytest.mark.parametrize(("now", "sampled", "advantage", "kept"), MOVES)
def test_kl_mask_by_hand(now, sampled, advantage, kept):
    # KL(mu ‖ pi) of these: 0.192, -, 0.311, -, 0.048, 0.597
    logp, scored = _scored([math.log(now)], [advantage], behavior=[math.log(sampled)])
    assert _slope(kl_mask(scored, bound=0.05, cap=20.0), logp) == pytest.approx(
        [-min(now / sampled, 20) * kept * advantage]
    )


@pytest.mark.parametrize(("bound", "kept"), [(0.19, False), (0.20, True)])
def test_the_bound_of_kl_mask_is_in_nats(bound, kept):
    # 0.2·ln(0.2/0.5) + 0.8·ln(0.8/0.5) = -0.18326 + 0.37600 = 0.19274
    _, scored = _scored([math.log(0.5)], [1.0], behavior=[math.log(0.2)])
    assert (kl_mask(scored, bound=bound).item() != 0) is kept


def test_a_token_that_has_become_certain_is_far():
    # 0.9·ln 0.9 + 0.1·ln(0.1/eps) = 1.27 nats, where eps is what float32 leaves of 1 - pi
    logp = torch.tensor([0.0], requires_grad=True)
    column = torch.ones(1)
    scored = Scored(
        logp_T=logp, advantage_T=column, sequence_T=column.long(), behavior_logp_T=torch.tensor([0.9]).log()
    )
    assert _slope(kl_mask(scored, bound=1.2), logp) == [0.0]
    assert _slope(kl_mask(scored, bound=1.3), logp) == pytest.approx([-1 / 0.9])


def test_distances_of_certain_tokens_are_finite():
    logp = torch.tensor([0.0, 0.0, -1e-9, -80.0], requires_grad=True)
    behavior = torch.tensor([0.0, -1e-9, 0.0, 0.0])
    scored = Scored(
        logp_T=logp, advantage_T=torch.ones(4), sequence_T=torch.zeros(4, dtype=torch.long), behavior_logp_T=behavior
    )
    for loss in (tv_mask, kl_mask):
        assert torch.isfinite(loss(scored)).all()
        assert _slope(loss(scored), logp) == pytest.approx([-1, -1, -1, -math.exp(-20)])


# ---- which policies a ratio is of


def test_a_ratio_without_a_sampler_is_our_own_mistake():
    _, scored = _scored([-1.0], [1.0])
    with pytest.raises(AssertionError, match="sampler"):
        ppo_clip(scored)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gspo_token", "cispo", "cispo_cap", "sapo"])
def test_a_ratio_is_to_the_learner_of_before_where_it_is_known(name):
    loss = RATIO_LOSSES[name]
    _, both = _scored([-1.0], [1.0], behavior=[-7.0], proximal=[-1.1])
    _, one = _scored([-1.0], [1.0], behavior=[-1.1])
    assert loss(both).tolist() == loss(one).tolist()


@pytest.mark.parametrize("name", ["tv_mask", "kl_mask"])
def test_a_distance_is_always_to_the_sampler(name):
    loss = RATIO_LOSSES[name]
    _, both = _scored([-1.0], [1.0], behavior=[-1.1], proximal=[-7.0])
    _, one = _scored([-1.0], [1.0], behavior=[-1.1])
    assert loss(both).tolist() == loss(one).tolist()


@pytest.mark.parametrize("name", ["ppo_clip", "gspo_token", "cispo_cap", "sapo", "tv_mask", "kl_mask"])
def test_where_nothing_has_moved_all_are_the_plain_policy_gradient(name):
    logp, scored = _scored([-1.0, -2.0, -0.5], [3.0, -0.5, 1.0], behavior=[-1.0, -2.0, -0.5], sequence=[0, 0, 1])
    assert _slope(RATIO_LOSSES[name](scored), logp) == pytest.approx(_slope(likelihood(scored), logp))


# ---- corrections


def test_a_token_correction_by_hand():
    # w = old/mu = 4, 1, 1/4
    old, mu = [-1.0, -1.0, -1.0], [-1 - math.log(4), -1.0, -1 + math.log(4)]
    _, scored = _scored([-9.0] * 3, [1.0] * 3, behavior=mu, proximal=old)
    assert correction(scored).tolist() == pytest.approx([2.0, 1.0, 0.25])
    assert correction(scored, low=0.5, high=2.0).tolist() == pytest.approx([2.0, 1.0, 0.5])
    assert correction(scored, low=0.5, high=2.0, mode="mask").tolist() == pytest.approx([0.0, 1.0, 0.0])
    assert correction(scored, low=0.2, high=5.0, mode="mask").tolist() == pytest.approx([4.0, 1.0, 0.25])


def test_a_sequence_correction_is_the_product_over_its_tokens():
    # answer 0: 2 · 3 = 6; answer 1: 1/2
    _, scored = _scored(
        [-9.0] * 3,
        [1.0] * 3,
        behavior=[-1 - math.log(2), -1 - math.log(3), -1 + math.log(2)],
        proximal=[-1.0] * 3,
        sequence=[2, 2, 5],
    )
    assert correction(scored, level="sequence", high=10).tolist() == pytest.approx([6.0, 6.0, 0.5])
    assert correction(scored, level="sequence", high=4).tolist() == pytest.approx([4.0, 4.0, 0.5])
    assert correction(scored, level="sequence", high=4, mode="mask").tolist() == pytest.approx([0.0, 0.0, 0.5])


def test_a_correction_multiplies_the_loss_and_has_no_gradient():
    old = torch.tensor([-1.0], requires_grad=True)
    scored = Scored(
        logp_T=torch.tensor([-1.0 + math.log(1.1)], requires_grad=True),
        advantage_T=torch.tensor([1.0]),
        sequence_T=torch.tensor([0]),
        behavior_logp_T=torch.tensor([-1 - math.log(1.5)]),
        proximal_logp_T=old,
    )
    assert not correction(scored).requires_grad
    loss = corrected(ppo_clip)(scored)
    assert loss.tolist() == pytest.approx([-1.1 * 1.5])
    assert _slope(loss, scored.logp_T) == pytest.approx([-1.1 * 1.5])


def test_a_correction_needs_both_policies():
    _, scored = _scored([-1.0], [1.0], behavior=[-1.0])
    with pytest.raises(AssertionError, match="before its update"):
        corrected(ppo_clip)(scored)


@given(
    st.lists(st.floats(-8, -0.01), min_size=1, max_size=8),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from(["truncate", "mask"]),
)
def test_equal_policies_need_no_correction(old, level, mode):
    logp, scored = _scored([value - 0.1 for value in old], [1.0] * len(old), behavior=old, proximal=old)
    loss = corrected(ppo_clip, level=level, low=0.5, high=2.0, mode=mode)(scored)
    assert loss.tolist() == ppo_clip(scored).tolist()
    assert _slope(loss, logp) == _slope(ppo_clip(scored), logp)


def test_decoupled_ppo_is_the_clip_times_the_correction():
    # w = 4, r = 1.1: -4.4; capped at 3: -3.3. Clipped at 1.2 where r = 1.5: -4.8
    old, mu = [-3.0, -3.0], [-3 - math.log(4)] * 2
    logp, scored = _scored([-3 + math.log(1.1), -3 + math.log(1.5)], [1.0, 1.0], behavior=mu, proximal=old)
    assert decoupled_ppo(scored).tolist() == pytest.approx([-4.4, -4.8])
    assert decoupled_ppo(scored, cap=3.0).tolist() == pytest.approx([-3.3, -3.6])
    assert _slope(decoupled_ppo(scored), logp) == pytest.approx([-4.4, 0.0])


def test_decoupled_ppo_of_the_samplers_own_learner_is_ppo():
    old = [-1.0, -2.0]
    _, scored = _scored([-0.9, -2.5], [1.0, -1.0], behavior=old, proximal=old)
    assert decoupled_ppo(scored).tolist() == ppo_clip(scored).tolist()


def test_off_policy_sequences_are_left_out_by_hand():
    # mean log mu/pi: 0.3 in answer 0 (tokens 0.6 and 0), 0.1 in answer 1, 0.3 in answer 2, whose A is positive
    logp, scored = _scored(
        [-1.6, -1.0, -1.1, -1.3],
        [-1.0, -1.0, -1.0, 1.0],
        behavior=[-1.0] * 4,
        sequence=[0, 0, 1, 2],
    )
    loss = off_policy_masked(likelihood, bound=0.2)(scored)
    assert loss.tolist() == pytest.approx([0.0, 0.0, -1.1, 1.3])
    assert _slope(loss, logp) == pytest.approx([0.0, 0.0, 1.0, -1.0])


def test_losses_can_be_sent_to_another_process():
    _, scored = _scored([-1.0, -2.0], [1.0, -1.0], behavior=[-1.1, -2.2], proximal=[-1.05, -2.1])
    for loss in RATIO_LOSSES.values():
        assert pickle.loads(pickle.dumps(loss))(scored).tolist() == loss(scored).tolist()


# ---- properties

TOKENS = st.integers(1, 10).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(-6, -0.01), min_size=n, max_size=n),
        st.lists(st.floats(-6, -0.01), min_size=n, max_size=n),
        st.lists(st.floats(-3, 3), min_size=n, max_size=n),
    )
)


@given(TOKENS)
def test_gspo_of_answers_of_one_token_is_ppo(tokens):
    logps, behavior, advantages = tokens
    logp, scored = _scored(logps, advantages, behavior=behavior, sequence=list(range(len(logps))))
    assert gspo(scored, low=0.2, high=0.3).tolist() == ppo_clip(scored, low=0.2, high=0.3).tolist()
    assert _slope(gspo(scored), logp) == _slope(ppo_clip(scored, low=3e-4, high=4e-4), logp)


@given(TOKENS)
def test_a_gspo_token_with_one_advantage_is_gspo(tokens):
    logps, behavior, advantages = tokens
    logp, scored = _scored(logps, [advantages[0]] * len(logps), behavior=behavior)
    whole, parts = gspo(scored, low=0.2, high=0.3), gspo_token(scored, low=0.2, high=0.3)
    assert parts.tolist() == pytest.approx(whole.tolist())
    assert _slope(parts, logp) == pytest.approx(_slope(whole, logp), abs=1e-9)


@given(TOKENS)
def test_a_clip_bounds_the_loss(tokens):
    logps, behavior, advantages = tokens
    _, scored = _scored(logps, advantages, behavior=behavior)
    loss, size = ppo_clip(scored, dual=3.0), scored.advantage_T.abs()
    assert (loss >= -1.2 * size - 1e-9).all()  # what can be gained: up to (1 + high)·A
    assert (loss <= 3 * size + 1e-9).all()  # what can be lost: up to c·|A|


@settings(max_examples=30, deadline=None)
@given(TOKENS, st.randoms(use_true_random=False))
def test_an_answer_is_the_same_whatever_stands_beside_it(tokens, random):
    logps, behavior, advantages = tokens
    count = len(logps)
    sequence = [random.randrange(3) for _ in range(count)]
    order = list(range(count))
    random.shuffle(order)

    def run(loss, places):
        _, scored = _scored(
            *([column[p] for p in places] for column in (logps, advantages, behavior, behavior)),
            sequence=[sequence[p] for p in places],
        )
        return loss(scored).tolist()

    for loss in RATIO_LOSSES.values():
        whole = run(loss, order)
        assert [whole[order.index(p)] for p in range(count)] == pytest.approx(run(loss, list(range(count))))
        for name in set(sequence):
            alone = [p for p in range(count) if sequence[p] == name]
            assert run(loss, alone) == pytest.approx([whole[order.index(p)] for p in alone])


@pytest.mark.parametrize("name", RATIO_LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_all_bounds_stays_finite(name, advantage):
    logp, scored = _scored(
        [0.0, -500.0, 0.0, -500.0],
        [advantage] * 4,
        behavior=[-500.0, 0.0, -500.0, 0.0],
        proximal=[-500.0, 0.0, -250.0, -250.0],
        sequence=[0, 1, 2, 3],
    )
    loss = RATIO_LOSSES[name](scored)
    assert torch.isfinite(loss).all()
    assert all(map(math.isfinite, _slope(loss, logp)))


@given(TOKENS)
def test_losses_are_the_textbooks(tokens):
    """Value and gradient of each, against its formula written down once more without a clamp."""
    logps, behavior, advantages = tokens
    logp, scored = _scored(logps, advantages, behavior=behavior)
    A, mu = scored.advantage_T, scored.behavior_logp_T
    r = torch.exp(logp - mu)
    s = torch.prod(r) ** (1 / len(r))
    one_A = A[0].expand(len(A))
    _, flat = _scored(logps, one_A.tolist(), behavior=behavior)
    tau = torch.tensor([1.0 if a > 0 else 1.05 for a in advantages], dtype=torch.float64)
    textbook = [
        (ppo_clip(scored, low=0.2, high=0.28), -torch.min(r * A, r.clip(0.8, 1.28) * A)),
        (cispo(scored, low=0.5, high=0.5), -r.clip(0.5, 1.5).detach() * A * logp),
        (cispo_cap(scored, cap=2.0), -torch.min(r, torch.tensor(2.0)).detach() * A * logp),
        (sapo(scored), -4 / tau / (1 + torch.exp(-tau * (r - 1))) * A),
    ]
    for got, expected in textbook:
        assert got.tolist() == pytest.approx(expected.tolist())
        assert _slope(got, logp) == pytest.approx(_slope(expected, logp))
    expected = -torch.min(s * one_A[0], s.clip(0.9, 1.1) * one_A[0]).expand(len(r))
    flat_logp = flat.logp_T
    got = gspo(flat, low=0.1, high=0.1)
    assert got.tolist() == pytest.approx(expected.tolist())
    assert _slope(got, flat_logp) == pytest.approx(_slope(expected, logp))


# ---- diagnostics


def test_importance_by_hand():
    # weights 1, 1, 1, 3: (6)² / (4 · 12) = 0.75; mean |log ratio| = ln 3 / 4
    found = importance(torch.tensor([0.0, 0.0, 0.0, math.log(3)]), torch.zeros(4))
    assert found.ess == pytest.approx(0.75)
    assert found.mismatch == pytest.approx(math.log(3) / 4)
    assert found.sequence_ess is None


def test_importance_of_sequences_by_hand():
    # products 2 · 3 = 6 and 2: (8)² / (2 · 40) = 0.8
    gap = torch.tensor([2.0, 2.0, 3.0]).log()
    assert importance(gap, torch.zeros(3), torch.tensor([3, 8, 3])).sequence_ess == pytest.approx(0.8)


def test_one_sequence_that_outweighs_all_leaves_a_sample_of_one():
    found = importance(torch.tensor([800.0, 0.0, 0.0, 0.0]), torch.zeros(4), torch.tensor([0, 1, 2, 3]))
    assert found.ess == pytest.approx(0.25)
    assert found.sequence_ess == pytest.approx(0.25)
