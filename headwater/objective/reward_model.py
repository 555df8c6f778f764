"""Training what rewards are read from: preferences, outcomes, steps, scores. Pure of the language model.

`value_T` is the scalar head at each token *after* it is read, so the score of a sequence stands at its
last scored token. The advantage of a term of targets is the label.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from headwater.objective.reduce import Pairs, Sequences
from headwater.types import FloatT, Scored


def _value(scored: Scored) -> Tensor:
    """The one number per token that a scalar head gives."""
    assert scored.value_T is not None and scored.value_T.ndim == 1, "a reward model's loss needs one value per token"
    return scored.value_T


def bradley_terry(scored: Scored, *, margin: float = 0.0, centering: float = 0.0) -> FloatT:
    """loss = -log σ(R_c - R_r - margin · gap) + centering · (R_c + R_r)², meant over a group's pairs.

    InstructGPT (Ouyang et al. 2022, arXiv:2203.02155, eq. 1): all K(K-1)/2 pairs of K ranked siblings are one
    group and weigh as one, since as pairs of their own they overfit. The margin, in units of the gap
    between ratings, is Llama 2's (arXiv:2307.09288, eq. 2). A preference fixes differences only: centering
    (Eisenstein et al. 2023, arXiv:2312.09244, eq. 2; 0.01) fixes where 0 is. Weigh it with `group_mean`.
    """
    pairs = Pairs.of(scored)
    reward_S = pairs.sequences.last(_value(scored))
    better_P, worse_P = reward_S[pairs.better_P], reward_S[pairs.worse_P]
    loss_P = -functional.logsigmoid(better_P - worse_P - margin * pairs.gap_P)
    return pairs.spread(loss_P + centering * (better_P + worse_P) ** 2)


def _cross_entropy(logit: Tensor, target: Tensor) -> Tensor:
    """-y·log σ(z) - (1 - y)·log σ(-z) for y in [0, 1], in a form that cannot overflow."""
    return functional.softplus(logit) - target * logit


def outcome(scored: Scored) -> FloatT:
    """loss = binary cross-entropy of σ(V) at *every* token with the label of the whole answer, in [0, 1]:
    an outcome reward model that says, at each token, how likely all is to end well (Cobbe et al. 2021,
    arXiv:2110.14168). The sigmoid is taken before the mean: a mean of logits is another model."""
    return _cross_entropy(_value(scored), scored.advantage_T)


def outcome_last(scored: Scored) -> FloatT:
    """`outcome` at the last token of each sequence only, the same number at each of its tokens: a verdict
    on what is finished, and nothing on what is not."""
    sequences = Sequences.of(scored.sequence_T)
    loss_S = _cross_entropy(sequences.last(_value(scored)), sequences.last(scored.advantage_T))
    return loss_S[sequences.of_T]


def process(scored: Scored) -> FloatT:
    """loss = binary cross-entropy of σ(V) with the label of the step that ends at a token, in [0, 1].

    Process reward model (Lightman et al. 2023, arXiv:2305.20050; Math-Shepherd, arXiv:2312.08935, whose soft
    label is the share of rollouts from there that end well). Only ends of labelled steps are in Scored:
    tokens within a step, and steps after the first mistake, have no label, which is not a label of 0.
    """
    return _cross_entropy(_value(scored), scored.advantage_T)


def process_classes(scored: Scored) -> FloatT:
    """loss = cross-entropy over three classes of step, bad -1, neutral 0, good +1 (PRM800K, arXiv:2305.20050);
    value_T is [T, 3] in that order."""
    assert scored.value_T is not None and scored.value_T.ndim == 2, "classes of steps need a head of three numbers"
    return functional.cross_entropy(scored.value_T, (scored.advantage_T + 1).long(), reduction="none")


def regression(scored: Scored) -> FloatT:
    """loss = (R - y)² at the last token of each sequence, the same number at each of its tokens: ratings as
    they are (HelpSteer2, Wang et al. 2024, arXiv:2406.08673). Unlike a preference it fixes offset and scale."""
    sequences = Sequences.of(scored.sequence_T)
    loss_S = (sequences.last(_value(scored)) - sequences.last(scored.advantage_T)) ** 2
    return loss_S[sequences.of_T]
