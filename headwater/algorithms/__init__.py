"""The table. A row is credit x loss x weighting, and the signals it needs; formulas and sources are in
the rows themselves and on the page docs/objectives.md.

  imitation
    sft                   imitate demonstrations
    rft                   imitate one's own successes
    distill               a teacher's distribution on demonstrations
    on_policy_distill     a teacher's distribution on one's own answers
    reverse_kl_policy     the teacher's log-prob of one's own tokens as reward
  policy gradient
    reinforce             reward above a baseline, times log-likelihood
    rloo                  siblings as baseline, leaving oneself out
    remax                 the greedy answer as baseline
    reinforce_pp          REINFORCE++: reward to go, whitened over the step, clipped
    reinforce_pp_baseline REINFORCE++ with siblings as baseline
    ppo                   clipped, with a critic and GAE
    turn_ppo              PPO whose steps are turns
    bi_level_ppo          PPO with GAE over turns, then over a turn's tokens
    vtrace                off-policy actor-critic with clipped weights
    grpo                  siblings' z-score, clipped
    dr_grpo               GRPO without its length and difficulty bias
    dapo                  GRPO by tokens, clipped higher, flat groups replaced
    gspo                  GRPO with the ratio of the whole answer
    cispo                 clipped weights that drop no token's gradient
    sapo                  a soft gate in place of the clip
    dppo                  tokens too far from the sampler's are masked
    decoupled_ppo         clip around the learner's policy, weigh by the sampler's
    maxrl                 siblings' reward over its mean: maximum likelihood of success
    gigpo                 siblings compared as episodes, and at equal states
    turn_reinforce        each turn by the discounted reward that follows it
    process_grpo          GRPO on a process reward model's steps
  preference
    dpo                   the pair's implicit rewards, as Bradley-Terry
    cdpo                  DPO where a share of labels is wrong
    robust_dpo            DPO unbiased under flipped labels
    dpo_norm              DPO on means over tokens
    rpo                   DPO and imitation of the chosen
    dpop                  DPO that keeps the chosen likely
    forward_kl_dpo        DPO under the forward KL
    js_dpo                DPO under Jensen-Shannon
    alpha_dpo             DPO under the α-divergence
    ipo                   a finite margin, squared
    hinge                 the margin up to 1
    exo                   reverse KL to smoothed labels
    sppo                  each log-ratio to ±1/2
    nca                   noise contrast of each answer
    apo_zero              chosen up, rejected down
    apo_down              both down, rejected more
    simpo                 mean log-probs with a margin, no reference
    cpo                   DPO without a reference, and imitation
    orpo                  imitation and odds ratio, no reference
    tdpo1                 DPO with the divergence along both answers
    tdpo2                 TDPO-1 that never raises the chosen's divergence
    kto                   good and bad answers without pairs
    online_dpo            DPO on the best and the worst sibling
  reward model
    bradley_terry         reward model of preferences
    outcome               reward model of right and wrong answers
    regression            reward model of ratings
    process               reward model of steps, right or wrong
    process_classes       reward model of steps: bad, neutral, good

A new algorithm is one pure function where a cell is missing, and one row in one of the modules here.
"""

from __future__ import annotations

from collections.abc import Mapping

from headwater.algorithms import policy, preference, reward_model, supervised
from headwater.algorithms.row import Row, Setting, Settings
from headwater.errors import ConfigError, UnknownName
from headwater.types import Algorithm

ROWS_BY_KIND: Mapping[str, tuple[Row, ...]] = {
    "supervised": supervised.ROWS,
    "policy": policy.ROWS,
    "preference": preference.ROWS,
    "reward_model": reward_model.ROWS,
}
TABLE: Mapping[str, Row] = {row.name: row for rows_of_kind in ROWS_BY_KIND.values() for row in rows_of_kind}

SIGNALS = frozenset(signal for row in TABLE.values() for signal in row.needs)
"""All signals that some row needs."""

FROM_MODELS = frozenset({"ref_logp", "logp", "value", "reference_point"})
"""Signals that a run can always have: its own models give them."""


def build(name: str, settings: Mapping[str, Setting]) -> Algorithm:
    """The algorithm of a row with some of its settings changed.

    Raises UnknownName for a row or setting that does not exist, ConfigError for a value that cannot be
    meant or that has no effect.
    """
    if name not in TABLE:
        raise UnknownName("algorithm", name, TABLE, "algorithm.name")
    return TABLE[name].make(settings)


def choose(name: str, settings: Mapping[str, Setting], offers: frozenset[str]) -> Algorithm:
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


__all__ = [
    "FROM_MODELS",
    "ROWS_BY_KIND",
    "SIGNALS",
    "TABLE",
    "Row",
    "Setting",
    "Settings",
    "build",
    "choose",
    "rows",
]
