"""Rows that learn from the reward of what the policy itself sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from headwater.algorithms.row import Row, Setting, Settings
from headwater.credit.apply import (
    across,
    baseline_then_whitened,
    compare,
    demonstrated,
    judged,
    not_flat,
    raw,
    remax,
    running,
    whitened,
)
from headwater.credit.functions import centred, leave_one_out, mean_ratio, zscore
from headwater.credit.sequential import How
from headwater.credit.shapes import kl_in_reward, overlong_penalty, process_reward, shaped
from headwater.credit.state import AdaptiveKL, RunningMean
from headwater.credit.tokens import (
    Beta,
    adapted,
    bi_level,
    bi_level_target,
    generalised,
    step_groups,
    to_go,
    turn_generalised,
    turn_value_target,
    turnwise,
    v_trace,
    v_trace_target,
    value_target,
)
from headwater.errors import ConfigError
from headwater.objective import distribution, kl
from headwater.objective import policy as losses
from headwater.objective.supervised import negative_log_likelihood
from headwater.objective.value import value_loss
from headwater.objective.weighting import fixed_length, sequence_mean, sequence_sum, token_mean
from headwater.types import Algorithm, Credit, Loss, Measure, Memory, Term, Update, Weighting

REWARD, REF, LOGP, VALUE = "reward", "ref_logp", "logp", "value"

# ---- settings that rows share

CLIP: Mapping[str, Setting] = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0}
EXTRAS: Mapping[str, Setting] = {
    "kl": 0.0,
    "kl_estimator": "k3",
    "kl_off_policy": False,
    "entropy": 0.0,
    "entropy_target": 0.0,
    "world": 0.0,
    "correction": "none",
    "correction_low": 0.5,
    "correction_high": 2.0,
}
CHOICES: Mapping[str, tuple[str, ...]] = {
    "kl_estimator": ("k2", "k3", "k3_plus", "exact"),
    "correction": ("none", "tis", "icepop", "sequence_tis", "sequence_mask"),
}
IDLE: Mapping[str, str] = {
    "kl_estimator": "kl",
    "kl_off_policy": "kl",
    "entropy_target": "entropy",
    "correction_low": "correction",
    "correction_high": "correction",
}
_ESTIMATORS: Mapping[str, Loss] = {"k2": kl.k2, "k3": kl.k3, "k3_plus": kl.k3_plus, "exact": kl.exact}


@dataclass(slots=True)
class _Draft:
    """An algorithm in the making."""

    terms: list[Term]
    needs: set[str]
    measures: dict[str, Measure]
    memory: list[Memory]
    after: list[distribution.AdaptiveEntropy]


def _policy(
    name: str,
    settings: Settings,
    credit: Credit,
    loss: Loss,
    weighting: Weighting,
    *,
    compares: bool = True,
    needs: frozenset[str] = frozenset({REWARD}),
    more: tuple[Term, ...] = (),
    memory: tuple[Memory, ...] = (),
    baseline: bool = False,
    keep: bool = False,
) -> Algorithm:
    """A policy term, with whatever else the settings ask for: correction, KL, entropy, world tokens."""
    draft = _Draft([], set(needs), {}, list(memory), [])
    draft.terms.append(Term(credit=credit, loss=_corrected(loss, settings, draft), weighting=weighting, name="policy"))
    draft.terms.extend(more)
    if "kl" in settings and settings.number("kl") > 0:
        _add_kl(draft, settings, weighting)
    if "entropy" in settings and settings.number("entropy") > 0:
        _add_entropy(draft, settings, weighting)
    if "world" in settings and settings.number("world") > 0:
        draft.terms.append(
            Term(
                credit=demonstrated,
                loss=negative_log_likelihood,
                weighting=token_mean,
                on="world",
                coefficient=settings.number("world"),
                name="world",
            )
        )
    return Algorithm(
        name=name,
        on_policy=loss is losses.likelihood and LOGP not in draft.needs,
        terms=tuple(draft.terms),
        needs=frozenset(draft.needs),
        compares=compares,
        measures=draft.measures,
        head="before" if VALUE in draft.needs else None,
        baseline=baseline,
        keep=not_flat if keep else None,
        memory=tuple(draft.memory),
        after=partial(_tell, tuple(draft.after)) if draft.after else None,
    )


def _tell(controllers: tuple[distribution.AdaptiveEntropy, ...], update: Update) -> None:
    for controller in controllers:
        if update.tokens:
            controller.update(update.entropy)


def _corrected(loss: Loss, settings: Settings, draft: _Draft) -> Loss:
    kind = settings.choice("correction") if "correction" in settings else "none"
    if kind == "none":
        return loss
    draft.needs.add(LOGP)
    mask = kind in ("icepop", "sequence_mask")
    return losses.corrected(
        loss,
        level="sequence" if kind.startswith("sequence") else "token",
        low=settings.number("correction_low") if mask else 0.0,
        high=settings.number("correction_high"),
        mode="mask" if mask else "truncate",
    )


def _add_kl(draft: _Draft, settings: Settings, weighting: Weighting) -> None:
    estimator = settings.choice("kl_estimator")
    loss = _ESTIMATORS[estimator]
    if estimator == "exact":
        draft.measures["kl"] = distribution.kl
    if settings.switch("kl_off_policy"):
        if estimator == "exact":
            raise ConfigError(
                'algorithm.kl_off_policy has no effect on kl_estimator = "exact": the whole distribution needs no '
                "weight for the token that was sampled. Remove it."
            )
        loss = kl.weighted(loss, detached=estimator != "k3")
    draft.needs.add(REF)
    draft.terms.append(
        Term(credit=judged, loss=loss, weighting=weighting, coefficient=settings.number("kl"), name="kl")
    )


def _add_entropy(draft: _Draft, settings: Settings, weighting: Weighting) -> None:
    draft.measures["entropy"] = distribution.entropy
    coefficient = settings.number("entropy")
    target = settings.number("entropy_target")
    term = partial(Term, credit=judged, loss=distribution.entropy_bonus, weighting=weighting, name="entropy")
    if target == 0:
        draft.terms.append(term(coefficient=coefficient))
        return
    controller = distribution.AdaptiveEntropy(target=target, step=coefficient)
    draft.memory.append(controller)
    draft.after.append(controller)
    draft.terms.append(term(coefficient=lambda: controller.coefficient))


def _clip(settings: Settings) -> Loss:
    dual = settings.number("dual_clip")
    if 0 < dual <= 1:
        raise ConfigError(f"algorithm.dual_clip = {dual:g} must be above 1 (3 is usual), or 0 for none.")
    return partial(
        losses.ppo_clip,
        low=settings.number("clip_low"),
        high=settings.number("clip_high"),
        dual=dual or None,
    )


def _kl_beta(settings: Settings) -> tuple[Beta, frozenset[str], tuple[Memory, ...]]:
    """The KL coefficient in the reward, what it needs, and what it remembers."""
    beta, target = settings.number("kl_reward"), settings.number("kl_target")
    if beta == 0:
        return 0.0, frozenset({REWARD}), ()
    if target == 0:
        return beta, frozenset({REWARD, REF}), ()
    controller = AdaptiveKL(beta=beta, target=target)
    return controller, frozenset({REWARD, REF}), (controller,)


def _adapting(beta: Beta, credit: Credit) -> Credit:
    """The last credit of a step that reads the coefficient; the coefficient moves after it."""
    return adapted(beta, credit) if isinstance(beta, AdaptiveKL) else credit


# ---- rows


def _reinforce(settings: Settings) -> Algorithm:
    kind = settings.choice("baseline")
    memory: tuple[Memory, ...] = ()
    credit: Credit = raw
    if kind == "step_mean":
        credit = across(centred)
    elif kind == "running_mean":
        mean = RunningMean()
        credit, memory = running(mean), (mean,)
    return _policy("reinforce", settings, credit, losses.likelihood, sequence_sum, compares=False, memory=memory)


def _rloo(settings: Settings) -> Algorithm:
    beta, needs, memory = _kl_beta(settings)
    credit = compare(leave_one_out)
    if needs != {REWARD}:
        credit = shaped(kl_in_reward(beta), credit)
    return _policy("rloo", settings, credit, losses.likelihood, sequence_sum, needs=needs, memory=memory)


def _remax(settings: Settings) -> Algorithm:
    return _policy("remax", settings, remax, losses.likelihood, sequence_sum, compares=False, baseline=True)


def _reinforce_pp(settings: Settings) -> Algorithm:
    beta, needs, memory = _kl_beta(settings)
    credit = _adapting(beta, whitened(to_go(gamma=1.0, kl=beta)))
    return _policy(
        "reinforce_pp", settings, credit, _clip(settings), token_mean, compares=False, needs=needs, memory=memory
    )


def _reinforce_pp_baseline(settings: Settings) -> Algorithm:
    return _policy("reinforce_pp_baseline", settings, baseline_then_whitened, _clip(settings), token_mean)


def _critic_term(credit: Credit, settings: Settings) -> Term:
    clip = settings.number("value_clip")
    return Term(
        credit=credit,
        loss=partial(value_loss, clip=clip or None),
        weighting=token_mean,
        gives="target",
        coefficient=settings.number("value_coefficient"),
        name="value",
    )


def _ppo(settings: Settings) -> Algorithm:
    beta, needs, memory = _kl_beta(settings)
    gamma, lam = settings.number("gamma"), settings.number("lam")
    return _policy(
        "ppo",
        settings,
        whitened(generalised(gamma=gamma, lam=lam, kl=beta)),
        _clip(settings),
        token_mean,
        compares=False,
        needs=needs | {VALUE},
        more=(_critic_term(_adapting(beta, value_target(gamma=gamma, lam=lam, kl=beta)), settings),),
        memory=memory,
    )


def _turn_ppo(settings: Settings) -> Algorithm:
    gamma, lam = settings.number("gamma"), settings.number("lam")
    return _policy(
        "turn_ppo",
        settings,
        whitened(turn_generalised(gamma=gamma, lam=lam)),
        _clip(settings),
        token_mean,
        compares=False,
        needs=frozenset({REWARD, VALUE}),
        more=(_critic_term(turn_value_target(gamma=gamma, lam=lam), settings),),
    )


def _bi_level_ppo(settings: Settings) -> Algorithm:
    discounts = {key: settings.number(key) for key in ("gamma_turn", "lam_turn", "gamma", "lam")}
    return _policy(
        "bi_level_ppo",
        settings,
        whitened(bi_level(**discounts)),
        _clip(settings),
        token_mean,
        compares=False,
        needs=frozenset({REWARD, VALUE}),
        more=(_critic_term(bi_level_target(**discounts), settings),),
    )


def _vtrace(settings: Settings) -> Algorithm:
    values = {key: settings.number(key) for key in ("gamma", "lam", "rho_bar", "c_bar")}
    if values["c_bar"] > values["rho_bar"]:
        raise ConfigError(
            f"algorithm.c_bar = {values['c_bar']:g} is above algorithm.rho_bar = {values['rho_bar']:g}; V-trace "
            "needs c_bar <= rho_bar (1 and 1 are usual)."
        )
    return _policy(
        "vtrace",
        settings,
        v_trace(**values),
        losses.likelihood,
        token_mean,
        compares=False,
        needs=frozenset({REWARD, VALUE, LOGP}),
        more=(_critic_term(v_trace_target(**values), settings),),
    )


def _grpo(settings: Settings) -> Algorithm:
    spread = partial(zscore, population=settings.choice("std") == "population")
    return _policy("grpo", settings, compare(spread), _clip(settings), sequence_mean)


def _dr_grpo(settings: Settings) -> Algorithm:
    return _policy("dr_grpo", settings, compare(centred), _clip(settings), fixed_length)


def _maxrl(settings: Settings) -> Algorithm:
    return _policy("maxrl", settings, compare(mean_ratio), losses.likelihood, sequence_sum)


def _dapo(settings: Settings) -> Algorithm:
    credit = compare(zscore)
    limit, cushion = settings.number("overlong_limit"), settings.number("overlong_cushion")
    if limit > 0:
        if not 0 < cushion <= limit:
            raise ConfigError(
                f"algorithm.overlong_cushion = {cushion:g} must be above 0 and at most overlong_limit = {limit:g}."
            )
        credit = shaped(overlong_penalty(limit=int(limit), cushion=int(cushion)), credit)
    return _policy("dapo", settings, credit, _clip(settings), token_mean, keep=settings.switch("dynamic_sampling"))


def _gspo(settings: Settings) -> Algorithm:
    loss = losses.gspo_token if settings.switch("token_form") else losses.gspo
    filled = partial(loss, low=settings.number("clip_low"), high=settings.number("clip_high"))
    return _policy("gspo", settings, compare(zscore), filled, sequence_mean)


def _cispo(settings: Settings) -> Algorithm:
    loss = partial(losses.cispo, low=settings.number("clip_low"), high=settings.number("clip_high"))
    return _policy("cispo", settings, compare(zscore), loss, token_mean)


def _sapo(settings: Settings) -> Algorithm:
    loss = partial(losses.sapo, positive=settings.number("positive"), negative=settings.number("negative"))
    return _policy("sapo", settings, compare(zscore), loss, sequence_mean)


def _dppo(settings: Settings) -> Algorithm:
    mask = losses.tv_mask if settings.choice("distance") == "tv" else losses.kl_mask
    loss = partial(mask, bound=settings.number("bound"), cap=settings.number("cap"))
    return _policy("dppo", settings, compare(centred), loss, token_mean)


def _decoupled_ppo(settings: Settings) -> Algorithm:
    loss = partial(
        losses.decoupled_ppo,
        low=settings.number("clip_low"),
        high=settings.number("clip_high"),
        cap=settings.number("cap"),
    )
    return _policy("decoupled_ppo", settings, compare(zscore), loss, token_mean, needs=frozenset({REWARD, LOGP}))


def _gigpo(settings: Settings) -> Algorithm:
    credit = step_groups(gamma=settings.number("gamma"), omega=settings.number("omega"))
    return _policy("gigpo", settings, credit, _clip(settings), sequence_mean)


def _turn_reinforce(settings: Settings) -> Algorithm:
    credit = turnwise(gamma=settings.number("gamma"))
    return _policy("turn_reinforce", settings, credit, losses.likelihood, sequence_sum)


def _process_grpo(settings: Settings) -> Algorithm:
    credit = shaped(process_reward(_AGGREGATES[settings.choice("aggregate")]), compare(zscore))
    return _policy("process_grpo", settings, credit, _clip(settings), sequence_mean, needs=frozenset({"step_reward"}))


_AGGREGATES: Mapping[str, How] = {"min": "min", "product": "product", "last": "last", "mean": "mean"}
_KL_REWARD: Mapping[str, Setting] = {"kl_reward": 0.0, "kl_target": 0.0}
_KL_IDLE = {"kl_target": "kl_reward"}
_CRITIC: Mapping[str, Setting] = {"gamma": 1.0, "lam": 0.95, "value_coefficient": 0.5, "value_clip": 0.0}
_ALL: Mapping[str, Setting] = {**CLIP, **EXTRAS}


def _without(settings: Mapping[str, Setting], *names: str) -> dict[str, Setting]:
    return {key: value for key, value in settings.items() if key not in names}


ROWS = (
    Row(
        name="reinforce",
        summary="reward above a baseline, times log-likelihood",
        formula="-A·log π, A = r − mean of the step; sum over tokens",
        source="Williams 1992",
        build=_reinforce,
        settings={"baseline": "step_mean", **EXTRAS},
        choices={"baseline": ("none", "step_mean", "running_mean"), **CHOICES},
        idle=IDLE,
    ),
    Row(
        name="rloo",
        summary="siblings as baseline, leaving oneself out",
        formula="-A·log π, A = r − mean of the others' r; sum over tokens",
        source="arXiv:2402.14740",
        build=_rloo,
        settings={**_KL_REWARD, **EXTRAS},
        choices=CHOICES,
        idle={**IDLE, **_KL_IDLE},
    ),
    Row(
        name="remax",
        summary="the greedy answer as baseline",
        formula="-A·log π, A = r − r(greedy answer); sum over tokens",
        source="arXiv:2310.10505",
        build=_remax,
        settings=EXTRAS,
        choices=CHOICES,
        idle=IDLE,
    ),
    Row(
        name="reinforce_pp",
        summary="REINFORCE++: reward to go, whitened over the step, clipped",
        formula="clip(r)·A, A = whiten(Σ_{k≥t} reward_k − β·KL_k); mean over tokens",
        source="arXiv:2501.03262",
        build=_reinforce_pp,
        settings={**_KL_REWARD, **_ALL},
        choices=CHOICES,
        idle={**IDLE, **_KL_IDLE},
    ),
    Row(
        name="reinforce_pp_baseline",
        summary="REINFORCE++ with siblings as baseline",
        formula="clip(r)·A, A = (reward − group mean) / deviation over the step; mean over tokens",
        source="arXiv:2501.03262",
        build=_reinforce_pp_baseline,
        settings=_ALL,
        choices=CHOICES,
        idle=IDLE,
    ),
    Row(
        name="ppo",
        summary="clipped, with a critic and GAE",
        formula="clip(r)·A, A = whiten(GAE(γ, λ)); ½·(V − return)²; mean over tokens",
        source="arXiv:1707.06347",
        build=_ppo,
        settings={**_CRITIC, **_KL_REWARD, **_ALL},
        choices=CHOICES,
        idle={**IDLE, **_KL_IDLE, "value_clip": "value_coefficient"},
    ),
    Row(
        name="turn_ppo",
        summary="PPO whose steps are turns",
        formula="clip(r)·A, A = whiten(GAE over turns), the same at every token of a turn",
        source="arXiv:2402.19446",
        build=_turn_ppo,
        settings={**_CRITIC, **_ALL},
        choices=CHOICES,
        idle={**IDLE, "value_clip": "value_coefficient"},
    ),
    Row(
        name="bi_level_ppo",
        summary="PPO with GAE over turns, then over a turn's tokens",
        formula="clip(r)·A, A = whiten(bi-level GAE)",
        source="arXiv:2510.16907",
        build=_bi_level_ppo,
        settings={"gamma_turn": 1.0, "lam_turn": 0.95, **_CRITIC, **_ALL},
        choices=CHOICES,
        idle={**IDLE, "value_clip": "value_coefficient"},
    ),
    Row(
        name="vtrace",
        summary="off-policy actor-critic with clipped weights",
        formula="-A·log π, A = ρ·(r + γ·v' − V); ½·(V − v)², v by V-trace",
        source="arXiv:1802.01561",
        build=_vtrace,
        settings={
            "gamma": 1.0,
            "lam": 1.0,
            "rho_bar": 1.0,
            "c_bar": 1.0,
            "value_coefficient": 0.5,
            "value_clip": 0.0,
            **_without(EXTRAS, "correction", "correction_low", "correction_high"),
        },
        choices=CHOICES,
        idle={**IDLE, "value_clip": "value_coefficient"},
    ),
    Row(
        name="grpo",
        summary="siblings' z-score, clipped",
        formula="clip(r)·A, A = (r − mean)/std of siblings; mean over an answer, then over answers",
        source="arXiv:2402.03300",
        build=_grpo,
        settings={**_ALL, "std": "sample"},
        choices={**CHOICES, "std": ("sample", "population")},
        idle=IDLE,
    ),
    Row(
        name="dr_grpo",
        summary="GRPO without its length and difficulty bias",
        formula="clip(r)·A, A = r − mean of siblings; sum over tokens / longest answer",
        source="arXiv:2503.20783",
        build=_dr_grpo,
        settings=_ALL,
        choices=CHOICES,
        idle=IDLE,
    ),
    Row(
        name="dapo",
        summary="GRPO by tokens, clipped higher, flat groups replaced",
        formula="clip(r)·A; mean over tokens; groups all right or all wrong are sampled anew",
        source="arXiv:2503.14476",
        build=_dapo,
        settings={
            **_ALL,
            "clip_high": 0.28,
            "dynamic_sampling": True,
            "overlong_limit": 0.0,
            "overlong_cushion": 0.0,
        },
        choices=CHOICES,
        idle={**IDLE, "overlong_cushion": "overlong_limit"},
    ),
    Row(
        name="gspo",
        summary="GRPO with the ratio of the whole answer",
        formula="clip(s)·A, s = (π/old)^(1/tokens) of the answer; mean over answers",
        source="arXiv:2507.18071",
        build=_gspo,
        settings={"clip_low": 3e-4, "clip_high": 4e-4, "token_form": False, **EXTRAS},
        choices=CHOICES,
        idle=IDLE,
    ),
    Row(
        name="cispo",
        summary="clipped weights that drop no token's gradient",
        formula="-sg[clip(r)]·A·log π; mean over tokens",
        source="arXiv:2506.13585",
        build=_cispo,
        settings={"clip_low": 1.0, "clip_high": 4.0, **EXTRAS},
        choices=CHOICES,
        idle=IDLE,
    ),
    Row(
        name="sapo",
        summary="a soft gate in place of the clip",
        formula="-(4/τ)·σ(τ·(r − 1))·A, τ by the sign of A",
        source="arXiv:2511.20347",
        build=_sapo,
        settings={"positive": 1.0, "negative": 1.05, **EXTRAS},
        choices=CHOICES,
        idle=IDLE,
    ),
    Row(
        name="dppo",
        summary="tokens too far from the sampler's are masked",
        formula="-M·sg[r]·A·log π, M = 0 where TV or KL > bound and A pulls further",
        source="arXiv:2602.04879",
        build=_dppo,
        settings={
            "distance": "tv",
            "bound": 0.2,
            "cap": 20.0,
            **_without(EXTRAS, "correction", "correction_low", "correction_high"),
        },
        choices={**CHOICES, "distance": ("tv", "kl")},
        idle=IDLE,
    ),
    Row(
        name="decoupled_ppo",
        summary="clip around the learner's policy, weigh by the sampler's",
        formula="min(old/μ, cap)·clip(π/old)·A; mean over tokens",
        source="arXiv:2110.00641",
        build=_decoupled_ppo,
        settings={
            "clip_low": 0.2,
            "clip_high": 0.2,
            "cap": 5.0,
            **_without(EXTRAS, "correction", "correction_low", "correction_high"),
        },
        choices=CHOICES,
        idle=IDLE,
    ),
    Row(
        name="maxrl",
        summary="siblings' reward over its mean: maximum likelihood of success",
        formula="-A·log π, A = (r − mean)/mean of siblings; sum over tokens",
        source="arXiv:2602.02710",
        build=_maxrl,
        settings=EXTRAS,
        choices=CHOICES,
        idle=IDLE,
    ),
    Row(
        name="gigpo",
        summary="siblings compared as episodes, and at equal states",
        formula="clip(r)·(A_episode + ω·A_step), A_step among turns from the same state",
        source="arXiv:2505.10978",
        build=_gigpo,
        settings={"gamma": 0.95, "omega": 1.0, **_ALL},
        choices=CHOICES,
        idle=IDLE,
    ),
    Row(
        name="turn_reinforce",
        summary="each turn by the discounted reward that follows it",
        formula="-A·log π, A = discounted return of the turn − the group's mean",
        source="Sutton and Barto 2018",
        build=_turn_reinforce,
        settings={"gamma": 1.0, **EXTRAS},
        choices=CHOICES,
        idle=IDLE,
    ),
    Row(
        name="process_grpo",
        summary="GRPO on a process reward model's steps",
        formula="clip(r)·A, A = z-score of min, product, last or mean of step rewards",
        source="arXiv:2305.20050",
        build=_process_grpo,
        settings={"aggregate": "min", **_ALL},
        choices={**CHOICES, "aggregate": tuple(_AGGREGATES)},
        idle=IDLE,
    ),
)
