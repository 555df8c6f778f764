from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import exp, log, log1p, nan, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import kl_div, log_softmax

from headwater.objective.distribution import forward_kl as ref_kl
from headwater.objective.preference import (
    alpha_dpo,
    apo_down,
    apo_zero,
    cdpo,
    cpo,
    dpo,
    dpo_norm,
    dpop,
    exo_pair,
    forward_kl_dpo,
    hinge,
    implicit_reward,
    ipo,
    js_dpo,
    kto,
    nca_pair,
    orpo,
    preference_accuracy,
    robust_dpo,
    rpo,
    simpo,
    sppo_hard,
    tdpo1,
    tdpo2,
)
from headwater.objective.weighting import group_mean, sequence_mean
from headwater.types import Extent, Scored

L2, L3 = log(2), log(3)


def _scored(sequences, dtype=torch.float64):
    """Of sequences given as (group, target, logps, ref logps, kls), in order."""
    flat = [
        (number, group, target, *token)
        for number, (group, target, *columns) in enumerate(sequences)
        for token in zip(*columns, strict=True)
    ]
    number, group, target, logp, ref, kl = (list(column) for column in zip(*flat, strict=True))
    tensor = partial(torch.tensor, dtype=dtype)
    return Scored(
        logp_T=tensor(logp).requires_grad_(),
        advantage_T=tensor(target),
        sequence_T=torch.tensor(number),
        group_T=torch.tensor(group),
        ref_logp_T=tensor(ref),
        measured={"ref_kl": tensor(kl).requires_grad_()},
    )


def _total(loss, scored, weighting=group_mean):
    """What the learner adds up: weight · loss over all tokens."""
    _, of_T = scored.sequence_T.unique(return_inverse=True)
    first = [of_T.tolist().index(s) for s in range(int(of_T.max()) + 1)]
    _, group_S = scored.group_T[first].unique(return_inverse=True)
    return (weighting(Extent(sequence_T=of_T, group_S=group_S)) * loss(scored)).sum()


def _slopes(loss, scored, weighting=group_mean):
    columns = (scored.logp_T, scored.measured["ref_kl"])
    found = torch.autograd.grad(_total(loss, scored, weighting), columns, allow_unused=True)
    return [None if slope is None else slope.tolist() for slope in found]


# The pair of the hand-worked cases: w has two tokens with log-ratio ln 3 each, l has one with -2 ln 2, so
# x_w = 2 ln 3, x_l = -2 ln 2, h = 2 ln 6. At beta = 1/2: s(beta x_w) = 3/4, s(beta x_l) = 1/3, s(beta h) = 6/7.
BETTER = ((-1.0, -2.0), (-1.0 - L3, -2.0 - L3), (L2, L2))
WORSE = ((-3.0,), (-3.0 + 2 * L2,), (2 * L3,))
PAIR = [(0, 1.0, *BETTER), (0, 0.0, *WORSE)]
SWAPPED = [(0, 0.0, *BETTER), (0, 1.0, *WORSE)]
# Mean log-probs ln 1/2 and ln 1/4: odds 1 and 1/3.
ODDS = [(0, 1.0, (-L2, -L2), (0.0, 0.0), (0.0, 0.0)), (0, 0.0, (-2 * L2,), (0.0,), (0.0,))]


def _s(x):
    return 1 / (1 + exp(-x))


BY_HAND = {
    # loss, slope at each token of w, slope at the token of l
    "dpo": (partial(dpo, beta=0.5), PAIR, log(7 / 6), -0.5 / 7, 0.5 / 7),
    # a quarter of the labels wrong wants s = 3/4; 6/7 is beyond it, so the pair is pulled back:
    # dL/dm = -3/4 · 1/7 + 1/4 · 6/7 = 3/28
    "cdpo": (
        partial(cdpo, beta=0.5, label_smoothing=0.25),
        PAIR,
        0.75 * log(7 / 6) + 0.25 * log(7),
        3 / 56,
        -3 / 56,
    ),
    # dL/dm = -(3/4 · 1/7 + 1/4 · 6/7) / (1/2) = -9/14
    "robust_dpo": (
        partial(robust_dpo, beta=0.5, label_smoothing=0.25),
        PAIR,
        2 * (0.75 * log(7 / 6) - 0.25 * log(7)),
        -9 / 28,
        9 / 28,
    ),
    # means ln 3 and -2 ln 2 are ln 12 apart
    "dpo_norm": (partial(dpo_norm, beta=1.0), PAIR, log(13 / 12), -1 / 26, 1 / 13),
    # mean log pi(w) = -1.5
    "rpo": (partial(rpo, beta=0.5, coefficient=0.5), PAIR, log(7 / 6) + 0.75, -0.5 / 7 - 0.25, 0.5 / 7),
    # x_w > 0: no penalty
    "dpop above the reference": (partial(dpop, beta=0.5, coefficient=50.0), PAIR, log(7 / 6), -0.5 / 7, 0.5 / 7),
    # the better one has x = -2 ln 2: margin ½(-2 ln 6 - 1 · 2 ln 2) = -ln 12, s(-m) = 12/13
    "dpop below the reference": (partial(dpop, beta=0.5, coefficient=1.0), SWAPPED, log(13), 6 / 13, -12 / 13),
    # -1/u: -1/9 and -4 are 35/9 apart; d(-1/u)/dx = 1/u
    "forward_kl_dpo": (
        partial(forward_kl_dpo, beta=0.5),
        PAIR,
        log1p(exp(-35 / 18)),
        -_s(-35 / 18) * 0.5 / 9,
        _s(-35 / 18) * 0.5 * 4,
    ),
    # u/(1+u): 9/10 and 1/5, log apart by ln 9/2; d log(u/(1+u))/dx = 1/(1+u): 1/10 and 4/5
    "js_dpo": (partial(js_dpo, beta=1.0), PAIR, log(11 / 9), -0.2 / 11, 1.6 / 11),
    # 2(1 - u^-½): 4/3 and -2 are 10/3 apart; slope u^-½: 1/3 and 2
    "alpha_dpo": (
        partial(alpha_dpo, beta=0.5, alpha=0.5),
        PAIR,
        log1p(exp(-5 / 3)),
        -_s(-5 / 3) / 6,
        _s(-5 / 3),
    ),
    # 1/(2 · ½) = 1
    "ipo of sums": (
        partial(ipo, beta=0.5, normalise=False),
        PAIR,
        (2 * log(6) - 1) ** 2,
        2 * (2 * log(6) - 1),
        -2 * (2 * log(6) - 1),
    ),
    "ipo of means": (
        partial(ipo, beta=0.5, normalise=True),
        PAIR,
        (log(12) - 1) ** 2,
        log(12) - 1,
        -2 * (log(12) - 1),
    ),
    "hinge within": (partial(hinge, beta=0.25), PAIR, 1 - 0.5 * log(6), -0.25, 0.25),
    "hinge beyond": (partial(hinge, beta=0.5), PAIR, 0.0, 0.0, 0.0),
    # q = (6/7, 1/7), p = (3/4, 1/4); dL/dm = q1 q2 (ln q1/p1 - ln q2/p2) = 6/49 · ln 2
    "exo_pair": (
        partial(exo_pair, beta=0.5, label_smoothing=0.25),
        PAIR,
        6 / 7 * log(8 / 7) + 1 / 7 * log(4 / 7),
        3 / 49 * L2,
        -3 / 49 * L2,
    ),
    "sppo_hard": (
        partial(sppo_hard, beta=0.5),
        PAIR,
        (2 * L3 - 1) ** 2 + (1 - 2 * L2) ** 2,
        2 * (2 * L3 - 1),
        2 * (1 - 2 * L2),
    ),
    # dL/dr_w = -1/4 + ½ · 3/4 = 1/8; dL/dr_l = ½ · 1/3
    "nca_pair": (partial(nca_pair, beta=0.5), PAIR, log(4 / 3) + L2 + 0.5 * log(1.5), 1 / 16, 1 / 12),
    "apo_zero": (partial(apo_zero, beta=0.5), PAIR, 1 / 4 + 1 / 3, -3 / 32, 1 / 9),
    "apo_down": (partial(apo_down, beta=0.5), PAIR, 3 / 4 + 1 / 7, 0.5 * (3 / 16 - 6 / 49), 3 / 49),
    # means -1.5 and -3: 2 · 1.5 - 1 = 2
    "simpo": (partial(simpo, beta=2.0, gamma=1.0), PAIR, log1p(exp(-2)), -_s(-2), 2 * _s(-2)),
    # sums -3 and -3: margin 0
    "cpo": (partial(cpo, beta=0.5, coefficient=0.5), PAIR, L2 + 0.75, -0.25 - 0.25, 0.25),
    # log odds 0 and -ln 3; d log odds / d log p = 1/(1-p): 2 and 4/3; s(-ln 3) = 1/4
    "orpo": (partial(orpo, coefficient=0.6), ODDS, L2 + 0.6 * log(4 / 3), (-1 - 0.6 / 4 * 2) / 2, 0.6 / 3),
    # K_w = 2 ln 2, K_l = 2 ln 3: ½(2 ln 6 - 2 ln 3 + 2 ln 2) = ln 4
    "tdpo1": (partial(tdpo1, beta=0.5), PAIR, log(5 / 4), -0.1, 0.1),
    # ln 6 - ½ ln 3/2
    "tdpo2": (
        partial(tdpo2, beta=0.5, alpha=0.5),
        PAIR,
        log1p(sqrt(1.5) / 6),
        -0.5 * _s(-log(6 / sqrt(1.5))),
        0.5 * _s(-log(6 / sqrt(1.5))),
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_pair_by_hand(name):
    loss, pair, value, better, worse = BY_HAND[name]
    scored = _scored(pair)
    assert loss(scored).tolist() == pytest.approx([value] * 3)  # one number, at each token of the group
    assert _slopes(loss, scored)[0] == pytest.approx([better, better, worse])


def test_kto_by_hand():
    # beta = ½. Desirable, x = 2 ln 3, z = 2 ln 2: s(½ · 2 ln 3/2) = 3/5. Undesirable, x = -2 ln 2, z clamped to 0:
    # s(½ · 2 ln 2) = 2/3. Weights 2 and 3: 2 · 2/5 and 3 · 1/3, averaged over two sequences
    point = torch.tensor([2 * L2, 2 * L2, -5.0], dtype=torch.float64, requires_grad=True)
    scored = replace(_scored(PAIR), measured={"reference_point": point}, group_T=None)
    loss_T = kto(scored, beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    assert loss_T.tolist() == pytest.approx([0.8, 0.8, 1.0])
    total = (sequence_mean(Extent(sequence_T=scored.sequence_T, group_S=torch.arange(2))) * loss_T).sum()
    assert total.item() == pytest.approx(0.9)
    # slopes: ½ · 2 · -½ · 3/5 · 2/5 = -0.12; ½ · 3 · ½ · 2/3 · 1/3 = 1/6; none at the reference point
    slope, point_slope = torch.autograd.grad(total, (scored.logp_T, point), allow_unused=True)
    assert slope.tolist() == pytest.approx([-0.12, -0.12, 1 / 6])
    assert point_slope is None


def _textbook(name, beta, w, l):  # noqa: E741
    """The formulas as papers print them, of one pair: w and l are (logp, ref, kl) of their tokens."""

    def s(x):
        return 1 / (1 + torch.exp(-x))

    (lw, rw, kw), (ll, rl, kl) = w, l
    xw, xl, h = (lw - rw).sum(), (ll - rl).sum(), (lw - rw).sum() - (ll - rl).sum()
    uw, ul = torch.exp(xw), torch.exp(xl)
    pw, pl = torch.exp(lw.mean()), torch.exp(ll.mean())
    return {
        "dpo": lambda: -torch.log(s(beta * h)),
        "cdpo": lambda: -0.9 * torch.log(s(beta * h)) - 0.1 * torch.log(s(-beta * h)),
        "robust_dpo": lambda: (-0.9 * torch.log(s(beta * h)) + 0.1 * torch.log(s(-beta * h))) / 0.8,
        "dpo_norm": lambda: -torch.log(s(beta / len(lw) * xw - beta / len(ll) * xl)),
        "rpo": lambda: -torch.log(s(beta * h)) - 0.7 * lw.sum() / len(lw),
        "dpop": lambda: -torch.log(s(beta * (h - 5 * torch.maximum(torch.zeros(()), rw.sum() - lw.sum())))),
        "forward_kl_dpo": lambda: -torch.log(s(beta * (-1 / uw + 1 / ul))),
        "js_dpo": lambda: -torch.log(s(beta * (torch.log(2 * uw / (1 + uw)) - torch.log(2 * ul / (1 + ul))))),
        "alpha_dpo": lambda: -torch.log(s(beta * ((1 - uw**-0.3) / 0.3 - (1 - ul**-0.3) / 0.3))),
        "ipo": lambda: (h - 1 / (2 * beta)) ** 2,
        "ipo_mean": lambda: (xw / len(lw) - xl / len(ll) - 1 / (2 * beta)) ** 2,
        "hinge": lambda: torch.maximum(torch.zeros(()), 1 - beta * h),
        "exo_pair": lambda: sum(q * torch.log(q / p) for q, p in ((s(beta * h), 0.9), (1 - s(beta * h), 0.1))),
        "sppo_hard": lambda: (xw - 1 / (2 * beta)) ** 2 + (xl + 1 / (2 * beta)) ** 2,
        "nca_pair": lambda: -torch.log(s(beta * xw)) - torch.log(s(-beta * xw)) / 2 - torch.log(s(-beta * xl)) / 2,
        "apo_zero": lambda: 1 - s(beta * xw) + s(beta * xl),
        "apo_down": lambda: s(beta * xw) + 1 - s(beta * (xw - xl)),
        "simpo": lambda: -torch.log(s(beta / len(lw) * lw.sum() - beta / len(ll) * ll.sum() - 0.4)),
        "cpo": lambda: -torch.log(s(beta * lw.sum() - beta * ll.sum())) - 0.7 * lw.sum() / len(lw),
        "orpo": lambda: -lw.mean() - 0.7 * torch.log(s(torch.log(pw / (1 - pw)) - torch.log(pl / (1 - pl)))),
        "tdpo1": lambda: -torch.log(s(beta * h - (beta * kl.sum() - beta * kw.sum()))),
        "tdpo2": lambda: -torch.log(s(beta * h - 0.3 * (beta * kl.sum() - beta * kw.sum().detach()))),
    }[name]()


LOSSES = {
    "dpo": partial(dpo, beta=0.4),
    "cdpo": partial(cdpo, beta=0.4, label_smoothing=0.1),
    "robust_dpo": partial(robust_dpo, beta=0.4, label_smoothing=0.1),
    "dpo_norm": partial(dpo_norm, beta=0.4),
    "rpo": partial(rpo, beta=0.4, coefficient=0.7),
    "dpop": partial(dpop, beta=0.4, coefficient=5.0),
    "forward_kl_dpo": partial(forward_kl_dpo, beta=0.4),
    "js_dpo": partial(js_dpo, beta=0.4),
    "alpha_dpo": partial(alpha_dpo, beta=0.4, alpha=0.3),
    "ipo": partial(ipo, beta=0.4, normalise=False),
    "ipo_mean": partial(ipo, beta=0.4, normalise=True),
    "hinge": partial(hinge, beta=0.4),
    "exo_pair": partial(exo_pair, beta=0.4, label_smoothing=0.1),
    "sppo_hard": partial(sppo_hard, beta=0.4),
    "nca_pair": partial(nca_pair, beta=0.4),
    "apo_zero": partial(apo_zero, beta=0.4),
    "apo_down": partial(apo_down, beta=0.4),
    "simpo": partial(simpo, beta=0.4, gamma=0.4),
    "cpo": partial(cpo, beta=0.4, coefficient=0.7),
    "orpo": partial(orpo, coefficient=0.7),
    "tdpo1": partial(tdpo1, beta=0.4),
    "tdpo2": partial(tdpo2, beta=0.4, alpha=0.3),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def _columns(scored, number):
    of = scored.sequence_T == number
    return tuple(column[of] for column in (scored.logp_T, scored.ref_logp_T, scored.measured["ref_kl"]))


# Three groups, of lengths 3 and 1, 2 and 4, 1 and 2; the second has its better one last.
THREE = [
    (0, 1.0, (-0.3, -1.2, -0.8), (-0.9, -1.0, -0.2), (0.2, 0.1, 0.5)),
    (0, 0.0, (-2.1,), (-1.4,), (0.3,)),
    (1, 2.0, (-0.6, -1.9), (-1.1, -1.3), (0.7, 0.2)),
    (1, 4.5, (-0.4, -0.5, -2.2, -1.0), (-0.3, -0.9, -1.2, -0.6), (0.1, 0.4, 0.3, 0.2)),
    (2, 1.0, (-1.7,), (-0.5,), (0.9,)),
    (2, -1.0, (-0.2, -0.7), (-0.8, -1.6), (0.6, 0.05)),
]


@every_loss
def test_value_and_gradient_are_those_of_the_printed_formula(name):
    scored = _scored(THREE)
    pairs = [(0, 1), (3, 2), (4, 5)]
    printed = sum(_textbook(name, 0.4, _columns(scored, w), _columns(scored, lo)) for w, lo in pairs) / 3
    columns = (scored.logp_T, scored.measured["ref_kl"])
    ours = torch.autograd.grad(_total(LOSSES[name], scored), columns, allow_unused=True)
    theirs = torch.autograd.grad(printed, columns, allow_unused=True)
    assert _total(LOSSES[name], scored).item() == pytest.approx(printed.item(), rel=1e-12)
    for mine, other in zip(ours, theirs, strict=True):
        if other is None:
            assert mine is None
        else:
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@every_loss
def test_three_ranked_siblings_teach_the_mean_of_their_three_pairs(name):
    ranked = [(0, target, *columns) for target, (_, _, *columns) in zip((1.0, 3.0, 2.0), THREE, strict=False)]
    alone = [_total(LOSSES[name], _scored([ranked[w], ranked[lo]])).item() for w, lo in ((1, 2), (1, 0), (2, 0))]
    assert _total(LOSSES[name], _scored(ranked)).item() == pytest.approx(sum(alone) / 3)


@every_loss
def test_a_tie_teaches_nothing(name):
    tied = _scored([(0, 1.0, *BETTER), (0, 1.0, *WORSE)])
    assert LOSSES[name](tied).tolist() == [0.0, 0.0, 0.0]
    assert _slopes(LOSSES[name], tied)[0] == [0.0, 0.0, 0.0]


@every_loss
@pytest.mark.parametrize("pair", [(1e4, -1e4), (-1e4, 1e4), (1e4, 1e4), (-1e4, -1e4), (1e4, 0.0), (-1e4, 0.0)])
def test_extreme_log_ratios_stay_finite(name, pair):
    # x of ±10⁴ by log-probs of 0 and -10⁴, in single precision
    sides = [((min(x, 0.0),), (min(-x, 0.0),), (abs(x),)) for x in pair]
    scored = _scored([(0, 1.0, *sides[0]), (0, 0.0, *sides[1])], dtype=torch.float32)
    assert LOSSES[name](scored).isfinite().all()
    for slope in _slopes(LOSSES[name], scored):
        assert slope is None or torch.tensor(slope).isfinite().all()


@pytest.mark.parametrize("name", ["forward_kl_dpo", "alpha_dpo"])
def test_a_preferred_answer_that_the_policy_lost_is_still_pulled_back(name):
    # where e^-x is out of range a clamp would leave no slope
    scored = _scored([(0, 1.0, (-1e3,), (0.0,), (0.0,)), (0, 0.0, (-1.0,), (-1.0,), (0.0,))], dtype=torch.float32)
    assert _slopes(LOSSES[name], scored)[0][0] < 0


lists = st.lists(st.floats(-4, 0, width=32), min_size=1, max_size=3)
siblings = st.lists(st.tuples(st.integers(0, 2).map(float), lists), min_size=2, max_size=3)
groups = st.lists(siblings, min_size=1, max_size=3)


def _made(groups, numbers=None):
    """Groups of (target, logps); the reference and the divergence are made from the log-probs."""
    numbers = range(len(groups)) if numbers is None else numbers
    return [
        (number, target, logp, [-1.5 - x / 3 for x in logp], [abs(x) / 2 for x in logp])
        for number, group in zip(numbers, groups, strict=True)
        for target, logp in group
    ]


@every_loss
@settings(max_examples=15, deadline=None)
@given(groups=groups, data=st.data())
def test_the_order_of_siblings_and_of_groups_changes_nothing(name, groups, data):
    shuffled = [data.draw(st.permutations(group)) for group in data.draw(st.permutations(groups))]
    there, back = (_total(LOSSES[name], _scored(_made(g))).item() for g in (groups, shuffled))
    assert there == pytest.approx(back, rel=1e-9, abs=1e-9)


@every_loss
@settings(max_examples=15, deadline=None)
@given(groups=groups)
def test_a_group_reads_the_same_alone_and_among_others(name, groups):
    made = _made(groups, numbers=[7 * number + 2 for number in range(len(groups))])
    scored = _scored(made)
    loss_T = LOSSES[name](scored)
    for number in scored.group_T.unique().tolist():
        alone = LOSSES[name](_scored([row for row in made if row[0] == number]))
        torch.testing.assert_close(loss_T[scored.group_T == number], alone)
        assert len(alone.unique()) == 1


@pytest.mark.parametrize("loss", [dpo, cdpo, dpo_norm, forward_kl_dpo, js_dpo, partial(alpha_dpo, alpha=0.5)])
def test_at_the_reference_every_sigmoid_loss_is_log_2(loss):
    same = [(0, 1.0, (-1.0, -2.0), (-1.0, -2.0), (0.0, 0.0)), (0, 0.0, (-0.5,), (-0.5,), (0.0,))]
    assert _total(loss, _scored(same)).item() == pytest.approx(L2)


@settings(max_examples=30, deadline=None)
@given(groups=groups)
def test_limits_are_dpo(groups):
    scored = _scored(_made(groups))
    expected = dpo(scored, beta=0.3)
    for loss in (
        partial(cdpo, label_smoothing=0.0),
        partial(robust_dpo, label_smoothing=0.0),
        partial(rpo, coefficient=0.0),
        partial(dpop, coefficient=0.0),
        partial(tdpo2, alpha=0.0),
    ):
        torch.testing.assert_close(loss(scored, beta=0.3), expected, rtol=1e-12, atol=1e-12)
    # f'(u) = (1 - u^-alpha) / alpha -> log u, the reverse KL
    torch.testing.assert_close(alpha_dpo(scored, beta=0.3, alpha=1e-7), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(groups=groups)
def test_alpha_1_is_the_forward_kl(groups):
    scored = _scored(_made(groups))
    torch.testing.assert_close(alpha_dpo(scored, beta=0.3, alpha=1.0), forward_kl_dpo(scored, beta=0.3))


def test_the_robust_loss_is_unbiased_under_flipped_labels():
    # labels flipped with probability e: the expectation over flips is the loss under clean labels
    clean, flipped = _scored(PAIR), _scored(SWAPPED)
    robust = partial(robust_dpo, beta=0.5, label_smoothing=0.2)
    expected = 0.8 * _total(robust, clean) + 0.2 * _total(robust, flipped)
    assert expected.item() == pytest.approx(_total(partial(dpo, beta=0.5), clean).item())


def test_the_conservative_loss_is_least_where_its_confidence_is_the_share_of_right_labels():
    # s(beta · h) = 1 - e at beta · h = ln 9 for e = 1/10
    pair = [(0, 1.0, (-1.0,), (-1.0 - 2 * log(9),), (0.0,)), (0, 0.0, (-1.0,), (-1.0,), (0.0,))]
    assert _slopes(partial(cdpo, beta=0.5, label_smoothing=0.1), _scored(pair))[0] == pytest.approx([0.0, 0.0])


# ---- TDPO


def test_tdpo1_raises_the_divergence_along_the_preferred_answer_and_tdpo2_leaves_it():
    # dL/dK_w = -beta s(-m) < 0 in TDPO-1, and nothing in TDPO-2; dL/dK_l = +beta s(-m), times alpha in TDPO-2
    first = _slopes(partial(tdpo1, beta=0.5), _scored(PAIR))[1]
    second = _slopes(partial(tdpo2, beta=0.5, alpha=0.5), _scored(PAIR))[1]
    assert first == pytest.approx([-0.1, -0.1, 0.1])
    assert second == pytest.approx([0.0, 0.0, 0.25 * _s(-log(6 / sqrt(1.5)))])
    assert second[:2] == [0.0, 0.0]


def test_in_tdpo2_a_middle_sibling_is_pulled_only_where_it_is_the_worse_one():
    # 2 > 1 > 0: the middle one is better than the last (its K has no gradient there) and worse than the first
    ranked = [(0, float(2 - place), *columns) for place, (_, _, *columns) in enumerate(THREE[:3])]
    scored = _scored(ranked)
    slope = _slopes(partial(tdpo2, beta=0.4, alpha=0.3), scored)[1]
    pair = _slopes(partial(tdpo2, beta=0.4, alpha=0.3), _scored(ranked[:2]))[1]
    assert slope[:3] == [0.0, 0.0, 0.0]
    assert slope[3] == pytest.approx(pair[3] / 3)


@pytest.mark.parametrize("loss", [tdpo1, partial(tdpo2, alpha=0.7)])
def test_tdpo_at_the_reference_is_log_2_by_measured_divergences(loss):
    logp_TV = log_softmax(torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).double(), -1)
    pair = [(0, 1.0, (-1.0, -2.0), (-1.0, -2.0), (0.0, 0.0)), (0, 0.0, (-0.5,), (-0.5,), (0.0,))]
    scored = replace(_scored(pair), measured={"ref_kl": ref_kl(logp_TV, logp_TV)})
    assert loss(scored).tolist() == pytest.approx([L2] * 3)


@pytest.mark.parametrize("if_tdpo2", [False, True])
def test_tdpo_from_logits_is_the_published_algorithm(if_tdpo2):
    # padded [B, L, V] logits, labels and masks, softmax and gather: as published, beside ours of flat columns
    source = torch.Generator().manual_seed(1)
    lengths, ids = (3, 2), torch.randint(0, 6, (2, 3), generator=source)
    logits = torch.randn(2, 3, 6, generator=source, dtype=torch.float64).requires_grad_()
    ref_logits = torch.randn(2, 3, 6, generator=source, dtype=torch.float64)
    mask = torch.tensor([[t < n for t in range(3)] for n in lengths])
    vocab_logps, ref_vocab_ps = logits.log_softmax(-1), ref_logits.softmax(-1)
    kl = ((ref_vocab_ps * (ref_vocab_ps.log() - vocab_logps)).sum(-1) * mask).sum(-1)
    per_token = torch.gather(vocab_logps - ref_vocab_ps.log(), 2, ids[:, :, None]).squeeze(2)
    margin = (per_token * mask).sum(-1)
    values = margin[0] - margin[1]
    if if_tdpo2:
        values = values - 0.5 * (kl[1] - kl[0].detach())
    else:
        values = values - (kl[1] - kl[0])
    published = -torch.nn.functional.logsigmoid(0.1 * values)

    logp_TV, ref_logp_TV = logits[mask].log_softmax(-1), ref_logits[mask].log_softmax(-1)
    sequence_T = mask.nonzero()[:, 0]
    scored = Scored(
        logp_T=logp_TV.gather(1, ids[mask][:, None]).squeeze(1),
        ref_logp_T=ref_logp_TV.gather(1, ids[mask][:, None]).squeeze(1),
        advantage_T=1.0 - sequence_T,
        sequence_T=sequence_T,
        group_T=torch.zeros_like(sequence_T),
        measured={"ref_kl": ref_kl(logp_TV, ref_logp_TV)},
    )
    ours = _total(tdpo2 if if_tdpo2 else tdpo1, scored)
    assert ours.item() == pytest.approx(published.item())
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (ours, published)))


def test_ref_kl_by_hand():
    # ref (1/2, 1/2), pi (1/4, 3/4): ½ ln 2 + ½ ln 2/3 = ½ ln 4/3; the reverse KL(pi || ref) would be ¼ ln ½ + ¾ ln 3/2
    found = ref_kl(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([[0.5, 0.5]]).log())
    assert found.tolist() == pytest.approx([0.5 * log(4 / 3)])


def test_ref_kl_pulls_logits_by_pi_minus_ref():
    source = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 7, generator=source, dtype=torch.float64).requires_grad_()
    ref_logp = log_softmax(torch.randn(4, 7, generator=source, dtype=torch.float64), -1)
    found = ref_kl(log_softmax(logits, -1), ref_logp)
    torch.testing.assert_close(
        found, kl_div(log_softmax(logits, -1), ref_logp, log_target=True, reduction="none").sum(-1)
    )
    slope = torch.autograd.grad(found.sum(), logits)[0]
    torch.testing.assert_close(slope, logits.softmax(-1) - ref_logp.exp())
    assert (found > 0).all()


@pytest.mark.parametrize("low", [-torch.inf, -1e4])
def test_a_reference_probability_of_zero_adds_nothing(low):
    # ref (1, 0, 0), pi (1/2, 1/2, 0): KL = ln 2, at most, whatever is said of the impossible
    logits = torch.tensor([[0.0, 0.0, low]], requires_grad=True)
    ref_logp = torch.tensor([[0.0, low, low]])
    found = ref_kl(log_softmax(logits, -1), ref_logp)
    assert found.tolist() == pytest.approx([L2])
    assert torch.autograd.grad(found.sum(), logits)[0][0].tolist() == pytest.approx([-0.5, 0.5, 0.0])


def test_a_divergence_without_a_reference_is_our_own_mistake():
    with pytest.raises(AssertionError, match="reference"):
        ref_kl(torch.zeros(1, 2), None)


# ---- what each loss promises


@settings(max_examples=30, deadline=None)
@given(st.floats(-3, 3), st.floats(-3, 3))
def test_losses_of_the_difference_pull_both_sides_equally(better, worse):
    pair = [(0, 1.0, (-4.0 + better,), (-4.0,), (0.0,)), (0, 0.0, (-4.0 + worse,), (-4.0,), (0.0,))]
    for loss in (dpo, robust_dpo, cdpo, hinge, exo_pair, partial(ipo, normalise=False)):
        up, down = _slopes(loss, _scored(pair))[0]
        assert up == pytest.approx(-down)


@settings(max_examples=30, deadline=None)
@given(st.floats(-3, 3), st.floats(-3, 3))
def test_apo_zero_raises_the_preferred_answer_and_apo_down_lowers_both(better, worse):
    pair = [(0, 1.0, (-4.0 + better,), (-4.0,), (0.0,)), (0, 0.0, (-4.0 + worse,), (-4.0,), (0.0,))]
    up, down = _slopes(apo_zero, _scored(pair))[0]
    assert up < 0 < down
    assert _slopes(apo_down, _scored(pair))[0][1] > 0


def test_losses_without_a_reference_need_none():
    scored = replace(_scored(PAIR), ref_logp_T=None)
    for loss in (simpo, cpo, orpo):
        assert _total(loss, scored).item() == _total(loss, _scored(PAIR)).item()
    with pytest.raises(AssertionError, match="reference"):
        dpo(scored)


def test_orpo_is_finite_where_the_policy_is_certain():
    certain = [(0, 1.0, (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)), (0, 0.0, (0.0,), (0.0,), (0.0,))]
    scored = _scored(certain, dtype=torch.float32)
    assert orpo(scored).isfinite().all()
    assert torch.tensor(_slopes(orpo, scored)[0]).isfinite().all()


@pytest.mark.parametrize(
    "loss",
    [
        partial(cdpo, label_smoothing=0.5),
        partial(robust_dpo, label_smoothing=0.5),
        partial(exo_pair, label_smoothing=0.0),
        partial(alpha_dpo, alpha=0.0),
    ],
)
def test_settings_without_a_meaning_are_refused(loss):
    with pytest.raises(AssertionError, match=r"label|alpha"):
        loss(_scored(PAIR))


def test_kto_moves_each_sequence_its_own_way_and_least_far_from_the_reference_point():
    # x - z = 0 has the largest slope of the logistic, beta/4
    rows = [(0, 1.0, (-1.0,), (-1.0,), (0.0,)), (1, 0.0, (-1.0,), (-1.0,), (0.0,)), (2, 1.0, (-1.0,), (-9.0,), (0.0,))]
    scored = _scored(rows)
    point = torch.zeros(3, dtype=torch.float64)
    slope = torch.autograd.grad(
        kto(replace(scored, measured={"reference_point": point}), beta=0.4).sum(), scored.logp_T
    )
    assert slope[0].tolist() == pytest.approx([-0.1, 0.1, -0.4 * _s(3.2) * _s(-3.2)])


# ---- diagnostics


def test_implicit_rewards_by_hand():
    reward = implicit_reward(_scored(PAIR), beta=0.5)
    assert reward.tolist() == pytest.approx([L3, -L2])
    assert not reward.requires_grad


def test_preference_accuracy_by_hand():
    # three ranked siblings, rewards 2, 2, 1 by targets 3, 2, 1: a tie counts half, the other two pairs are right
    ranked = _scored([(0, float(3 - place), *columns) for place, (_, _, *columns) in enumerate(THREE[:3])])
    assert preference_accuracy(ranked, torch.tensor([2.0, 2.0, 1.0])) == pytest.approx(2.5 / 3)
    assert preference_accuracy(ranked, torch.tensor([1.0, 2.0, 3.0])) == 0.0
    assert preference_accuracy(_scored(PAIR), implicit_reward(_scored(PAIR))) == 1.0


def test_no_pair_has_no_accuracy():
    tied = _scored([(0, 1.0, *BETTER), (0, 1.0, *WORSE)])
    assert preference_accuracy(tied, torch.tensor([1.0, 2.0])) == pytest.approx(nan, nan_ok=True)
