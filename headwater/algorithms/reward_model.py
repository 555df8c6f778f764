"""Rows that train a scalar head on a model to say how good an answer, or a step of it, is."""

from __future__ import annotations

from functools import partial

from headwater.algorithms.row import Row, Settings
from headwater.credit.apply import labelled, preferred
from headwater.credit.tokens import stepwise
from headwater.objective import reward_model as losses
from headwater.objective.weighting import group_mean, sequence_mean, token_mean
from headwater.types import Algorithm, Credit, Loss, Term, Weighting


def _head(
    name: str, needs: str, credit: Credit, loss: Loss, weighting: Weighting, *, pairs: bool = False, classes: int = 1
) -> Algorithm:
    """A head read after each token; the language head is not run."""
    term = Term(credit=credit, loss=loss, weighting=weighting, gives="target")
    return Algorithm(
        name=name,
        terms=(term,),
        needs=frozenset({needs}),
        compares=pairs,
        online=False,
        whole_groups=pairs,
        head="after",
        classes=classes,
        language=False,
    )


def _bradley_terry(settings: Settings) -> Algorithm:
    loss = partial(losses.bradley_terry, margin=settings.number("margin"), centering=settings.number("centering"))
    return _head("bradley_terry", "preference", preferred, loss, group_mean, pairs=True)


def _outcome(settings: Settings) -> Algorithm:
    loss = losses.outcome if settings.switch("every_token") else losses.outcome_last
    return _head("outcome", "label", labelled("label"), loss, sequence_mean)


def _regression(settings: Settings) -> Algorithm:
    return _head("regression", "label", labelled("label"), losses.regression, sequence_mean)


def _process(settings: Settings) -> Algorithm:
    return _head("process", "step_label", stepwise("step_label"), losses.process, token_mean)


def _process_classes(settings: Settings) -> Algorithm:
    return _head("process_classes", "step_label", stepwise("step_label"), losses.process_classes, token_mean, classes=3)


ROWS = (
    Row(
        name="bradley_terry",
        summary="reward model of preferences",
        formula="-log σ(R_w − R_l − m·gap) + λ·(R_w + R_l)²",
        source="arXiv:2203.02155",
        build=_bradley_terry,
        settings={"margin": 0.0, "centering": 0.0},
    ),
    Row(
        name="outcome",
        summary="reward model of right and wrong answers",
        formula="BCE of the head to the answer's label, at every token or the last",
        source="arXiv:2110.14168",
        build=_outcome,
        settings={"every_token": True},
    ),
    Row(
        name="regression",
        summary="reward model of ratings",
        formula="(R − rating)² at the last token",
        source="arXiv:2406.08673",
        build=_regression,
    ),
    Row(
        name="process",
        summary="reward model of steps, right or wrong",
        formula="BCE of the head to each step's label, at step ends",
        source="arXiv:2305.20050",
        build=_process,
    ),
    Row(
        name="process_classes",
        summary="reward model of steps: bad, neutral, good",
        formula="cross-entropy of three classes at step ends",
        source="arXiv:2305.20050",
        build=_process_classes,
    ),
)
