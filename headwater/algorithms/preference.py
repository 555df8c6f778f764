"""Rows that learn from which of two answers is better, or whether one is good. No reward is sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headwater.algorithms.row import Row, Setting, Settings
from headwater.credit.apply import labelled, preferred, ranked
from headwater.objective import preference as losses
from headwater.objective.distribution import forward_kl
from headwater.objective.weighting import group_mean, sequence_mean
from headwater.types import Algorithm, Loss, Measure, Term

PREFERENCE, LABEL, REF, REWARD, POINT = "preference", "label", "ref_logp", "reward", "reference_point"


def _pairwise(
    name: str,
    summary: str,
    formula: str,
    source: str,
    loss: Callable[..., Any],
    settings: Mapping[str, Setting],
    *,
    reference: bool = True,
    measures: Mapping[str, Measure] | None = None,
) -> Row:
    """A row whose loss is a function of pairs and of its settings by name."""

    def build(values: Settings) -> Algorithm:
        filled: Loss = partial(loss, **values)
        term = Term(credit=preferred, loss=filled, weighting=group_mean, gives="target")
        return Algorithm(
            name=name,
            terms=(term,),
            needs=frozenset({PREFERENCE, REF} if reference else {PREFERENCE}),
            compares=True,
            online=False,
            whole_groups=True,
            measures=measures or {},
        )

    return Row(name=name, summary=summary, formula=formula, source=source, build=build, settings=settings)


def _online_dpo(settings: Settings) -> Algorithm:
    term = Term(
        credit=ranked, loss=partial(losses.dpo, **settings), weighting=group_mean, gives="target", name="preference"
    )
    return Algorithm(name="online_dpo", terms=(term,), needs=frozenset({REWARD, REF}), compares=True, whole_groups=True)


def _kto(settings: Settings) -> Algorithm:
    term = Term(credit=labelled(LABEL), loss=partial(losses.kto, **settings), weighting=sequence_mean, gives="target")
    return Algorithm(
        name="kto",
        terms=(term,),
        needs=frozenset({LABEL, REF, POINT}),
        online=False,
        reads=frozenset({POINT}),
    )


_KL = {"ref_kl": forward_kl}
BETA: dict[str, Setting] = {"beta": 0.1}

ROWS = (
    _pairwise(
        "dpo",
        "the pair's implicit rewards, as Bradley-Terry",
        "-log σ(β·h), h = log-ratio of w − of l",
        "arXiv:2305.18290",
        losses.dpo,
        BETA,
    ),
    _pairwise(
        "cdpo",
        "DPO where a share of labels is wrong",
        "-(1-e)·log σ(β·h) − e·log σ(-β·h)",
        "Mitchell 2023",
        losses.cdpo,
        BETA | {"label_smoothing": 0.1},
    ),
    _pairwise(
        "robust_dpo",
        "DPO unbiased under flipped labels",
        "[-(1-e)·log σ(β·h) + e·log σ(-β·h)] / (1-2e)",
        "arXiv:2403.00409",
        losses.robust_dpo,
        BETA | {"label_smoothing": 0.1},
    ),
    _pairwise(
        "dpo_norm",
        "DPO on means over tokens",
        "-log σ(β·(x_w/|w| − x_l/|l|))",
        "arXiv:2411.15124",
        losses.dpo_norm,
        {"beta": 2.0},
    ),
    _pairwise(
        "rpo",
        "DPO and imitation of the chosen",
        "-log σ(β·h) − c·mean log π(w)",
        "arXiv:2404.19733",
        losses.rpo,
        BETA | {"coefficient": 1.0},
    ),
    _pairwise(
        "dpop",
        "DPO that keeps the chosen likely",
        "-log σ(β·(h − c·max(0, -x_w)))",
        "arXiv:2402.13228",
        losses.dpop,
        BETA | {"coefficient": 50.0},
    ),
    _pairwise(
        "forward_kl_dpo",
        "DPO under the forward KL",
        "-log σ(β·(1/u_l − 1/u_w)), u = π/ref",
        "arXiv:2309.16240",
        losses.forward_kl_dpo,
        BETA,
    ),
    _pairwise(
        "js_dpo",
        "DPO under Jensen-Shannon",
        "-log σ(β·(f'(u_w) − f'(u_l))), f'(u) = log 2u/(1+u)",
        "arXiv:2309.16240",
        losses.js_dpo,
        BETA,
    ),
    _pairwise(
        "alpha_dpo",
        "DPO under the α-divergence",
        "-log σ(β·(u_l^-α − u_w^-α)/α)",
        "arXiv:2309.16240",
        losses.alpha_dpo,
        BETA | {"alpha": 0.5},
    ),
    _pairwise(
        "ipo",
        "a finite margin, squared",
        "(h − 1/(2β))²; h per token where normalised",
        "arXiv:2310.12036",
        losses.ipo,
        BETA | {"normalise": False},
    ),
    _pairwise(
        "hinge",
        "the margin up to 1",
        "max(0, 1 − β·h)",
        "arXiv:2309.06657",
        losses.hinge,
        BETA,
    ),
    _pairwise(
        "exo",
        "reverse KL to smoothed labels",
        "KL(softmax(β·x) ‖ smoothed label)",
        "arXiv:2402.00856",
        losses.exo_pair,
        BETA | {"label_smoothing": 1e-3},
    ),
    _pairwise(
        "sppo",
        "each log-ratio to ±1/2",
        "(β·x_w − 1/2)² + (β·x_l + 1/2)², over β²",
        "arXiv:2405.00675",
        losses.sppo_hard,
        BETA,
    ),
    _pairwise(
        "nca",
        "noise contrast of each answer",
        "-log σ(β·x_w) − ½·log σ(-β·x_w) − ½·log σ(-β·x_l)",
        "arXiv:2402.05369",
        losses.nca_pair,
        BETA,
    ),
    _pairwise(
        "apo_zero",
        "chosen up, rejected down",
        "1 − σ(β·x_w) + σ(β·x_l)",
        "arXiv:2408.06266",
        losses.apo_zero,
        BETA,
    ),
    _pairwise(
        "apo_down",
        "both down, rejected more",
        "σ(β·x_w) + 1 − σ(β·h)",
        "arXiv:2408.06266",
        losses.apo_down,
        BETA,
    ),
    _pairwise(
        "simpo",
        "mean log-probs with a margin, no reference",
        "-log σ(β·(mean log π(w) − mean log π(l)) − γ)",
        "arXiv:2405.14734",
        losses.simpo,
        {"beta": 2.0, "gamma": 1.0},
        reference=False,
    ),
    _pairwise(
        "cpo",
        "DPO without a reference, and imitation",
        "-log σ(β·(log π(w) − log π(l))) − c·mean log π(w)",
        "arXiv:2401.08417",
        losses.cpo,
        BETA | {"coefficient": 1.0},
        reference=False,
    ),
    _pairwise(
        "orpo",
        "imitation and odds ratio, no reference",
        "-mean log π(w) − c·log σ(log odds w − log odds l)",
        "arXiv:2403.07691",
        losses.orpo,
        {"coefficient": 0.1},
        reference=False,
    ),
    _pairwise(
        "tdpo1",
        "DPO with the divergence along both answers",
        "-log σ(β·(h − (K_l − K_w))), K = Σ_t KL(ref ‖ π)",
        "arXiv:2404.11999",
        losses.tdpo1,
        BETA,
        measures=_KL,
    ),
    _pairwise(
        "tdpo2",
        "TDPO-1 that never raises the chosen's divergence",
        "-log σ(β·(h − α·(K_l − sg K_w)))",
        "arXiv:2404.11999",
        losses.tdpo2,
        BETA | {"alpha": 0.5},
        measures=_KL,
    ),
    Row(
        name="kto",
        summary="good and bad answers without pairs",
        formula="λ·(1 − σ(±β·(x − z))), z = KL from answers to other prompts",
        source="arXiv:2402.01306",
        build=_kto,
        settings=BETA | {"desirable_weight": 1.0, "undesirable_weight": 1.0},
    ),
    Row(
        name="online_dpo",
        summary="DPO on the best and the worst sibling",
        formula="-log σ(β·h) of the best and worst by reward",
        source="arXiv:2402.04792",
        build=_online_dpo,
        settings=BETA,
    ),
)
