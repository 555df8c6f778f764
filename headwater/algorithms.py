"""The table. A row is credit x loss x weighting, and the signals it needs.

    row         credit                   loss            weighting       needs
    sft         demonstrated             neg. log-lik.   token_mean      demonstration
    reinforce   across(centred)          likelihood      sequence_sum    reward
    rloo        compare(leave_one_out)   likelihood      sequence_sum    reward
    grpo        compare(zscore)          ppo_clip (+k3)  sequence_mean   reward (, ref_logp)
    dr_grpo     compare(centred)         ppo_clip (+k3)  fixed_length    reward (, ref_logp)

A new algorithm is one pure function where a cell is missing, and one row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from headwater.credit.apply import across, compare, demonstrated, judged
from headwater.credit.functions import centred, leave_one_out, zscore
from headwater.errors import ConfigError, UnknownName
from headwater.objective.kl import k3
from headwater.objective.policy import likelihood, ppo_clip
from headwater.objective.supervised import negative_log_likelihood
from headwater.objective.weighting import fixed_length, sequence_mean, sequence_sum, token_mean
from headwater.types import Algorithm, Credit, Term, Weighting

Settings = Mapping[str, float]
REWARD, REF, DEMONSTRATION = "reward", "ref_logp", "demonstration"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row as a reader sees it: `settings` with their defaults, and what builds the Algorithm."""

    name: str
    summary: str
    source: str
    build: Callable[[Settings], Algorithm]
    settings: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def needs(self) -> frozenset[str]:
        """Signals that the row needs at its default settings."""
        return self.build(self.settings).needs


def _sft(settings: Settings) -> Algorithm:
    term = Term(credit=demonstrated, loss=negative_log_likelihood, weighting=token_mean)
    return Algorithm(name="sft", terms=(term,), needs=frozenset({DEMONSTRATION}), online=False)


def _reinforce(settings: Settings) -> Algorithm:
    term = Term(credit=across(centred), loss=likelihood, weighting=sequence_sum)
    return Algorithm(name="reinforce", terms=(term,), needs=frozenset({REWARD}))


def _rloo(settings: Settings) -> Algorithm:
    term = Term(credit=compare(leave_one_out), loss=likelihood, weighting=sequence_sum)
    return Algorithm(name="rloo", terms=(term,), needs=frozenset({REWARD}), compares=True)


def _clipped(name: str, credit: Credit, weighting: Weighting, settings: Settings) -> Algorithm:
    loss = partial(ppo_clip, low=settings["clip_low"], high=settings["clip_high"])
    terms = [Term(credit=credit, loss=loss, weighting=weighting, name="policy")]
    needs = {REWARD}
    if settings["kl"] > 0:
        terms.append(Term(credit=judged, loss=k3, weighting=weighting, coefficient=settings["kl"], name="kl"))
        needs.add(REF)
    return Algorithm(name=name, terms=tuple(terms), needs=frozenset(needs), compares=True)


def _grpo(settings: Settings) -> Algorithm:
    return _clipped("grpo", compare(zscore), sequence_mean, settings)


def _dr_grpo(settings: Settings) -> Algorithm:
    return _clipped("dr_grpo", compare(centred), fixed_length, settings)


_CLIP = {"clip_low": 0.2, "clip_high": 0.2, "kl": 0.0}
TABLE = {
    row.name: row
    for row in (
        Row(name="sft", summary="imitate demonstrations", source="Radford et al. 2018", build=_sft),
        Row(
            name="reinforce",
            summary="reward above the step's average times log-likelihood",
            source="Williams 1992",
            build=_reinforce,
        ),
        Row(
            name="rloo",
            summary="siblings as baseline, leaving oneself out",
            source="arXiv:2402.14740",
            build=_rloo,
        ),
        Row(
            name="grpo",
            summary="siblings' z-score, clipped",
            source="arXiv:2402.03300",
            build=_grpo,
            settings=_CLIP,
        ),
        Row(
            name="dr_grpo",
            summary="GRPO without its length and difficulty bias",
            source="arXiv:2503.20783",
            build=_dr_grpo,
            settings=_CLIP,
        ),
    )
}


def build(name: str, settings: Settings) -> Algorithm:
    """The algorithm of a row with some of its settings changed.

    Raises UnknownName for a row or setting that does not exist, ConfigError for a value out of range.
    """
    if name not in TABLE:
        raise UnknownName("algorithm", name, TABLE, "algorithm.name")
    row = TABLE[name]
    for key, value in settings.items():
        if key not in row.settings:
            if not row.settings:
                raise ConfigError(f"algorithm.{key}: the row '{name}' has no settings. Remove it.")
            raise UnknownName("setting", key, row.settings, f"[algorithm] of '{name}'")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"algorithm.{key} is {value!r}; wanted a number of at least 0.")
    return row.build({**row.settings, **settings})


def choose(name: str, settings: Settings, offers: frozenset[str]) -> Algorithm:
    """The algorithm of a row, if the signals at hand allow it.

    Raises ConfigError when the row needs a signal that is not in `offers`, and lists the rows that
    could run.
    """
    algorithm = build(name, settings)
    missing = algorithm.needs - offers
    if missing:
        could = ", ".join(row.name for row in rows(offers)) or "none"
        raise ConfigError(
            f"The algorithm '{name}' needs {_list(algorithm.needs)}, and this run offers {_list(offers)}: "
            f"{_list(missing)} is missing. With what it offers these could run: {could}."
        )
    return algorithm


def rows(offers: frozenset[str] | None = None) -> tuple[Row, ...]:
    """All rows, or those that the signals in `offers` allow."""
    return tuple(row for row in TABLE.values() if offers is None or row.needs <= offers)


def _list(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
