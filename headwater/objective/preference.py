"""Learning from comparisons. A loss of pairs is one number per group, at each of the group's tokens;
`group_mean` adds it up to once. Targets are in `advantage_T`: the higher one is preferred.

x = Σ_t (log pi - log ref) of a whole sequence, summed and not averaged unless it is said; w is the
preferred (better) sequence of a pair, l the other (worse); h = x_w - x_l; s the logistic function.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from headwater.objective.policy import LOG_RATIO_LIMIT
from headwater.objective.reduce import Pairs, Sequences
from headwater.types import FloatS, FloatT, Scored


def _log_ratio_T(scored: Scored) -> Tensor:
    """log pi - log ref per token."""
    assert scored.ref_logp_T is not None, "an implicit reward needs the reference's log-probs"
    return scored.logp_T - scored.ref_logp_T


def _log_ratios(scored: Scored) -> tuple[Pairs, Tensor, Tensor]:
    """The pairs, with x of the better and x of the worse of each."""
    pairs = Pairs.of(scored)
    ratio_S = pairs.sequences.sum(_log_ratio_T(scored))
    return pairs, ratio_S[pairs.better_P], ratio_S[pairs.worse_P]


def _mean_logps(scored: Scored) -> tuple[Pairs, Tensor, Tensor]:
    """The pairs, with the mean log pi per token of the better and of the worse of each."""
    pairs = Pairs.of(scored)
    mean_S = pairs.sequences.mean(scored.logp_T)
    return pairs, mean_S[pairs.better_P], mean_S[pairs.worse_P]


# ---- the sigmoid family


def dpo(scored: Scored, *, beta: float = 0.1) -> FloatT:
    """loss = -log s(beta · h).

    DPO (Rafailov et al. 2023, arXiv:2305.18290, eq. 7). Log-probs are summed: a mean would make a token
    of a long answer count for less, see `dpo_norm`. Only the difference h is pulled, so both
    likelihoods may fall together (`rpo` and `dpop` prevent it).
    """
    pairs, better_P, worse_P = _log_ratios(scored)
    return pairs.spread(-logsigmoid(beta * (better_P - worse_P)))


def cdpo(scored: Scored, *, beta: float = 0.1, label_smoothing: float = 0.1) -> FloatT:
    """loss = -(1 - e) log s(beta · h) - e log s(-beta · h), where a share e of the labels is wrong.

    Conservative DPO (Mitchell 2023, eq. 3 of "A note on DPO with noisy preferences"). Its minimum lies at
    s(beta · h) = 1 - e, a finite margin.
    """
    assert 0 <= label_smoothing < 0.5, "half of the labels wrong says nothing"
    pairs, better_P, worse_P = _log_ratios(scored)
    margin_P = beta * (better_P - worse_P)
    return pairs.spread(-(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P))


def robust_dpo(scored: Scored, *, beta: float = 0.1, label_smoothing: float = 0.1) -> FloatT:
    """loss = [-(1 - e) log s(beta · h) + e log s(-beta · h)] / (1 - 2e), an unbiased estimate of the loss
    under clean labels where a share e is flipped.

    Robust DPO (Chowdhury et al. 2024, arXiv:2403.00409). Unbiased, and so unbounded: it becomes negative and
    has no minimum, because a margin that grows without end goes on lowering it.
    """
    assert 0 <= label_smoothing < 0.5, "half of the labels wrong says nothing"
    pairs, better_P, worse_P = _log_ratios(scored)
    margin_P = beta * (better_P - worse_P)
    loss_P = -(1 - label_smoothing) * logsigmoid(margin_P) + label_smoothing * logsigmoid(-margin_P)
    return pairs.spread(loss_P / (1 - 2 * label_smoothing))


def dpo_norm(scored: Scored, *, beta: float = 2.0) -> FloatT:
    """loss = -log s(beta · (x_w / |w| - x_l / |l|)): DPO with the mean over tokens in place of the sum.

    Length-normalised DPO (Lambert et al. 2024, Tülu 3, arXiv:2411.15124). beta is of another scale than
    DPO's, by about the length of an answer.
    """
    pairs = Pairs.of(scored)
    mean_S = pairs.sequences.mean(_log_ratio_T(scored))
    return pairs.spread(-logsigmoid(beta * (mean_S[pairs.better_P] - mean_S[pairs.worse_P])))


def rpo(scored: Scored, *, beta: float = 0.1, coefficient: float = 1.0) -> FloatT:
    """loss = -log s(beta · h) - coefficient · mean_t log pi(w_t): DPO, and imitation of the preferred answer.

    Iterative RPO (Pang et al. 2024, arXiv:2404.19733, eq. 1). Keeps the likelihood of the preferred answer from
    falling along with the other's.
    """
    pairs, better_P, worse_P = _log_ratios(scored)
    mean_S = pairs.sequences.mean(scored.logp_T)
    return pairs.spread(-logsigmoid(beta * (better_P - worse_P)) - coefficient * mean_S[pairs.better_P])


def dpop(scored: Scored, *, beta: float = 0.1, coefficient: float = 50.0) -> FloatT:
    """loss = -log s(beta · (h - coefficient · max(0, -x_w))).

    DPO-Positive (Pal et al. 2024, Smaug, arXiv:2402.13228). The penalty acts only while the preferred
    answer is less likely than under the reference.
    """
    pairs, better_P, worse_P = _log_ratios(scored)
    penalty_P = coefficient * torch.relu(-better_P)
    return pairs.spread(-logsigmoid(beta * (better_P - worse_P - penalty_P)))


# ---- other divergences from the reference


def _expm1(values: Tensor) -> Tensor:
    """e^z - 1, continued beyond LOG_RATIO_LIMIT along its tangent: finite, and never without a slope."""
    beyond = torch.relu(values - LOG_RATIO_LIMIT)
    return torch.expm1(values.clamp(max=LOG_RATIO_LIMIT)) + math.exp(LOG_RATIO_LIMIT) * beyond


def _f_dpo(scored: Scored, slope: Callable[[Tensor], Tensor], beta: float) -> Tensor:
    """loss = -log s(beta · (f'(u_w) - f'(u_l))) with u = pi/ref = e^x; `slope` is x -> f'(e^x), up to a constant.

    f-DPO (Wang et al. 2023, arXiv:2309.16240). f(u) = u log u, the reverse KL, is DPO.
    """
    pairs, better_P, worse_P = _log_ratios(scored)
    return pairs.spread(-logsigmoid(beta * (slope(better_P) - slope(worse_P))))


def forward_kl_dpo(scored: Scored, *, beta: float = 0.1) -> FloatT:
    """f-DPO of the forward KL, f'(u) = -1/u (Wang et al. 2023, arXiv:2309.16240). Covers what the reference does.

    u is that of a whole sequence, so 1/u is soon huge: beyond e^20 it goes on linearly.
    """
    return _f_dpo(scored, lambda ratio_P: -_expm1(-ratio_P), beta)


def js_dpo(scored: Scored, *, beta: float = 0.1) -> FloatT:
    """f-DPO of the Jensen-Shannon divergence, f'(u) = log(2u / (1 + u)) (Wang et al. 2023, arXiv:2309.16240).

    f' is at most log 2, so there is little to gain above the reference and much below it: the
    preferred answer's own slope vanishes as it becomes likelier."""
    return _f_dpo(scored, logsigmoid, beta)


def alpha_dpo(scored: Scored, *, alpha: float, beta: float = 0.1) -> FloatT:
    """f-DPO of an alpha-divergence, f'(u) = (1 - u^-alpha) / alpha (Wang et al. 2023, arXiv:2309.16240).

    alpha -> 0 is DPO (reverse KL), alpha = 1 the forward KL. Not for alpha < 0, where f'(0) is finite
    and pi could be 0 where ref is not.
    """
    assert alpha > 0, "alpha of an f-DPO is positive; its limit at 0 is dpo"
    return _f_dpo(scored, lambda ratio_P: -_expm1(-alpha * ratio_P) / alpha, beta)


# ---- other shapes of the same margin


def ipo(scored: Scored, *, normalise: bool, beta: float = 0.1) -> FloatT:
    """loss = (h - 1/(2 beta))², where beta is the paper's tau.

    IPO (Azar et al. 2023, arXiv:2310.12036, eq. 17). The margin has a target, so it does not grow without end.
    `normalise` divides x by the sequence's length, which is how the authors say they ran it; without, x is
    the sum of the formula. A beta of the one means nothing under the other.
    """
    pairs = Pairs.of(scored)
    ratio_T = _log_ratio_T(scored)
    ratio_S = pairs.sequences.mean(ratio_T) if normalise else pairs.sequences.sum(ratio_T)
    return pairs.spread((ratio_S[pairs.better_P] - ratio_S[pairs.worse_P] - 1 / (2 * beta)) ** 2)


def hinge(scored: Scored, *, beta: float = 0.1) -> FloatT:
    """loss = max(0, 1 - beta · h).

    Hinge-norm of RSO (Liu et al. 2023, arXiv:2309.06657), after SLiC (Zhao et al. 2023, arXiv:2305.10425),
    which has no reference. A pair apart by 1/beta no longer pulls.
    """
    pairs, better_P, worse_P = _log_ratios(scored)
    return pairs.spread(torch.relu(1 - beta * (better_P - worse_P)))


def exo_pair(scored: Scored, *, beta: float = 0.1, label_smoothing: float = 1e-3) -> FloatT:
    """loss = KL(q || p) of two outcomes, with q = (s(beta · h), s(-beta · h)) and p = (1 - e, e).

    EXO with K = 2 (Ji et al. 2024, arXiv:2402.00856, eq. 16). The reverse of cross-entropy to the same p. e must
    be positive: log e is in it.
    """
    assert 0 < label_smoothing < 0.5, "EXO needs a label smoothing in (0, 0.5): log e is in its loss"
    pairs, better_P, worse_P = _log_ratios(scored)
    margin_P = beta * (better_P - worse_P)
    p = margin_P.new_tensor([1 - label_smoothing, label_smoothing]).log()
    right_P, wrong_P = logsigmoid(margin_P), logsigmoid(-margin_P)
    return pairs.spread(right_P.exp() * (right_P - p[0]) + wrong_P.exp() * (wrong_P - p[1]))


# ---- each side on its own


def sppo_hard(scored: Scored, *, beta: float = 0.1) -> FloatT:
    """loss = (x_w - 1/(2 beta))² + (x_l + 1/(2 beta))².

    SPPO (Wu et al. 2024, arXiv:2405.00675, eq. 4.7, with eta = 1/beta) where the preferred answer wins with
    probability 1. Each side has its own target, so no likelihood can drift.
    """
    pairs, better_P, worse_P = _log_ratios(scored)
    return pairs.spread((better_P - 0.5 / beta) ** 2 + (worse_P + 0.5 / beta) ** 2)


def nca_pair(scored: Scored, *, beta: float = 0.1) -> FloatT:
    """loss = -log s(beta x_w) - ½ log s(-beta x_w) - ½ log s(-beta x_l).

    NCA with K = 2 (Chen et al. 2024, arXiv:2402.05369). Pulls each side to an absolute level, so the preferred
    one's likelihood does not fall; least at s(beta x_w) = 2/3.
    """
    pairs, better_P, worse_P = _log_ratios(scored)
    return pairs.spread(
        -logsigmoid(beta * better_P) - 0.5 * logsigmoid(-beta * better_P) - 0.5 * logsigmoid(-beta * worse_P)
    )


def apo_zero(scored: Scored, *, beta: float = 0.1) -> FloatT:
    """loss = 1 - s(beta x_w) + s(beta x_l).

    APO-zero (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7), plus a constant 1. Raises the preferred answer and
    lowers the other: for pairs whose better one is better than what the policy writes.
    """
    pairs, better_P, worse_P = _log_ratios(scored)
    return pairs.spread(torch.sigmoid(-beta * better_P) + torch.sigmoid(beta * worse_P))


def apo_down(scored: Scored, *, beta: float = 0.1) -> FloatT:
    """loss = s(beta x_w) + 1 - s(beta · h).

    APO-down (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 8), plus a constant 1. Lowers both, the other one
    more: for pairs whose better one is worse than what the policy writes.
    """
    pairs, better_P, worse_P = _log_ratios(scored)
    return pairs.spread(torch.sigmoid(beta * better_P) + torch.sigmoid(-beta * (better_P - worse_P)))


def kto(scored: Scored, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> FloatT:
    """loss = weight · (1 - s(beta (x - z))) of a desirable sequence (target above 0), weight · (1 - s(beta (z - x)))
    of an undesirable one; one number per *sequence*, at each of its tokens. There are no pairs.

    KTO (Ethayarajh et al. 2024, arXiv:2402.01306). The reference point z is measured["reference_point"], a
    constant of each sequence: an estimate of KL(pi || ref) from answers to *other* prompts. No gradient goes
    through it, and it is taken as 0 where the estimate is negative, as no divergence is.
    """
    sequences = Sequences.of(scored.sequence_T)
    ratio_S = sequences.sum(_log_ratio_T(scored))
    point_S = sequences.one(scored.measured["reference_point"]).detach().clamp(min=0)
    desirable_S = sequences.one(scored.advantage_T) > 0
    gain_S = torch.where(desirable_S, ratio_S - point_S, point_S - ratio_S)
    weight_S = torch.where(desirable_S, desirable_weight, undesirable_weight).to(ratio_S)
    return (weight_S * torch.sigmoid(-beta * gain_S))[sequences.of_T]


# ---- without a reference


def simpo(scored: Scored, *, beta: float = 2.0, gamma: float = 1.0) -> FloatT:
    """loss = -log s(beta · (mean log pi(w) - mean log pi(l)) - gamma).

    SimPO (Meng et al. 2024, arXiv:2405.14734, eq. 6). No reference; the mean over tokens is what the policy is
    decoded by. gamma is the margin itself, and not its ratio to beta as some tune it.
    """
    pairs, better_P, worse_P = _mean_logps(scored)
    return pairs.spread(-logsigmoid(beta * (better_P - worse_P) - gamma))


def cpo(scored: Scored, *, beta: float = 0.1, coefficient: float = 1.0) -> FloatT:
    """loss = -log s(beta · (log pi(w) - log pi(l))) - coefficient · mean_t log pi(w_t).

    CPO (Xu et al. 2024, arXiv:2401.08417): DPO with a uniform reference, summed log-probs, and imitation
    of the preferred answer to hold it in place, per token as in the authors' code.
    """
    pairs, better_P, _ = _mean_logps(scored)
    sum_S = pairs.sequences.sum(scored.logp_T)
    margin_P = beta * (sum_S[pairs.better_P] - sum_S[pairs.worse_P])
    return pairs.spread(-logsigmoid(margin_P) - coefficient * better_P)


def _log_odds(logp: Tensor) -> Tensor:
    """log p/(1 - p) from log p. At p = 1 it stops at what the number format can hold."""
    logp = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    return logp - torch.log(-torch.expm1(logp))


def orpo(scored: Scored, *, coefficient: float = 0.1) -> FloatT:
    """loss = -mean_t log pi(w_t) - coefficient · log s(log odds(w) - log odds(l)), where odds = p/(1 - p) and
    log p is the mean log pi per token.

    ORPO (Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7). Imitation and preference in one, without a
    reference; `coefficient` is its lambda.
    """
    pairs, better_P, worse_P = _mean_logps(scored)
    return pairs.spread(-better_P - coefficient * logsigmoid(_log_odds(better_P) - _log_odds(worse_P)))


# ---- token level: the divergence along the way


def tdpo1(scored: Scored, *, beta: float = 0.1) -> FloatT:
    """loss = -log s(beta · (h - (K_l - K_w))), with K = Σ_t KL(ref || pi) along a sequence, measured["ref_kl"]
    (the Measure `distribution.forward_kl`).

    TDPO-1 (Zeng et al. 2024, arXiv:2404.11999). The gradient goes through both K, and its pull on K_w is
    upwards: it *raises* the divergence along the preferred answer. `tdpo2` mends that.
    """
    pairs, better_P, worse_P = _log_ratios(scored)
    kl_S = pairs.sequences.sum(scored.measured["ref_kl"])
    delta_P = kl_S[pairs.worse_P] - kl_S[pairs.better_P]
    return pairs.spread(-logsigmoid(beta * (better_P - worse_P - delta_P)))


def tdpo2(scored: Scored, *, beta: float = 0.1, alpha: float = 0.5) -> FloatT:
    """loss = -log s(beta · (h - alpha · (K_l - sg(K_w)))), sg: no gradient; K as in `tdpo1`.

    TDPO-2 (Zeng et al. 2024, arXiv:2404.11999). K_w moves the margin and is not pulled itself; K_l is
    pulled down, harder with a larger alpha. alpha = 0 is DPO. It is not DPO plus a KL penalty.
    """
    pairs, better_P, worse_P = _log_ratios(scored)
    kl_S = pairs.sequences.sum(scored.measured["ref_kl"])
    delta_P = kl_S[pairs.worse_P] - kl_S.detach()[pairs.better_P]
    return pairs.spread(-logsigmoid(beta * (better_P - worse_P - alpha * delta_P)))


# ---- diagnostics


def implicit_reward(scored: Scored, *, beta: float = 0.1) -> FloatS:
    """reward = beta · x of each sequence, [S], in order of `sequence_T`, without gradient: what the policy and
    its reference say together (DPO, arXiv:2305.18290, eq. 5, up to a constant of the prompt)."""
    return (beta * Sequences.of(scored.sequence_T).sum(_log_ratio_T(scored))).detach()


def preference_accuracy(scored: Scored, reward_S: FloatS) -> float:
    """The share of pairs that rewards put in the order of their targets; equal rewards count half, so it starts
    at 0.5 where the policy is its reference. NaN without a pair."""
    pairs = Pairs.of(scored)
    gap_P = reward_S[pairs.better_P] - reward_S[pairs.worse_P]
    return float(((gap_P > 0).double() + 0.5 * (gap_P == 0).double()).mean())
