"""Rows that imitate: demonstrations, a teacher, or the policy's own successes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

from headwater.algorithms.row import Row, Settings
from headwater.credit.apply import above, demonstrated
from headwater.objective import distribution
from headwater.objective.supervised import distillation, negative_log_likelihood, reverse_kl_policy
from headwater.objective.weighting import token_mean
from headwater.types import Algorithm, Measure, Term

DEMONSTRATION, REF, REWARD = "demonstration", "ref_logp", "reward"


def _sft(settings: Settings) -> Algorithm:
    term = Term(credit=demonstrated, loss=negative_log_likelihood, weighting=token_mean)
    return Algorithm(name="sft", terms=(term,), needs=frozenset({DEMONSTRATION}), online=False)


def _rft(settings: Settings) -> Algorithm:
    term = Term(credit=above(settings.number("threshold")), loss=negative_log_likelihood, weighting=token_mean)
    return Algorithm(name="rft", terms=(term,), needs=frozenset({REWARD}))


def _distill(settings: Settings, name: str, needs: frozenset[str], online: bool) -> Algorithm:
    kind = _DIVERGENCES[settings.choice("divergence")]
    measures: Mapping[str, Measure] = {
        "forward_kl": distribution.forward_kl,
        "kl": distribution.kl,
        "jsd": partial(distribution.jsd, beta=settings.number("jsd_weight")),
    }
    loss = partial(distillation, divergence=kind)
    term = Term(credit=demonstrated, loss=loss, weighting=token_mean)
    return Algorithm(name=name, terms=(term,), needs=needs, online=online, measures={kind: measures[kind]})


def _reverse_kl_policy(settings: Settings) -> Algorithm:
    term = Term(credit=demonstrated, loss=reverse_kl_policy, weighting=token_mean)
    return Algorithm(name="reverse_kl_policy", terms=(term,), needs=frozenset({REF}))


_DIVERGENCES: Mapping[str, Literal["forward_kl", "kl", "jsd"]] = {
    "forward": "forward_kl",
    "reverse": "kl",
    "jsd": "jsd",
}
_CHOICES = {"divergence": tuple(_DIVERGENCES)}

ROWS = (
    Row(
        name="sft",
        summary="imitate demonstrations",
        formula="-log π(token), mean over tokens",
        source="Radford et al. 2018",
        build=_sft,
    ),
    Row(
        name="rft",
        summary="imitate one's own successes",
        formula="-log π(token) of answers with reward ≥ threshold",
        source="arXiv:2308.01825",
        build=_rft,
        settings={"threshold": 1.0},
    ),
    Row(
        name="distill",
        summary="a teacher's distribution on demonstrations",
        formula="KL(teacher ‖ π), KL(π ‖ teacher) or JSD over the vocabulary",
        source="arXiv:1503.02531",
        build=partial(_distill, name="distill", needs=frozenset({DEMONSTRATION, REF}), online=False),
        settings={"divergence": "forward", "jsd_weight": 0.5},
        choices=_CHOICES,
    ),
    Row(
        name="on_policy_distill",
        summary="a teacher's distribution on one's own answers",
        formula="KL(π ‖ teacher), KL(teacher ‖ π) or JSD over the vocabulary",
        source="arXiv:2306.13649",
        build=partial(_distill, name="on_policy_distill", needs=frozenset({REF}), online=True),
        settings={"divergence": "reverse", "jsd_weight": 0.5},
        choices=_CHOICES,
    ),
    Row(
        name="reverse_kl_policy",
        summary="the teacher's log-prob of one's own tokens as reward",
        formula="-sg[log teacher − log π]·log π",
        source="arXiv:2306.08543",
        build=_reverse_kl_policy,
    ),
)
