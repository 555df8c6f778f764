"""Losses against TRL's own code, on the same model and the same tokens: a tiny random Llama, driven through
`_compute_loss` of a real trainer that never trains. Ours sees each answer by itself, without padding."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from headwater.models.fakes import character_tokenizer
from headwater.objective import distribution
from headwater.objective.distribution import AdaptiveEntropy, entropy_bonus
from headwater.objective.kl import k3, weighted
from headwater.objective.policy import (
    cispo,
    cispo_cap,
    corrected,
    gspo,
    likelihood,
    off_policy_masked,
    ppo_clip,
    sapo,
)
from headwater.objective.reward_model import bradley_terry
from headwater.objective.weighting import fixed_length, group_mean, sequence_mean, sequence_sum, token_mean
from headwater.types import Extent, Scored

trl = pytest.importorskip("trl", reason="parity with TRL needs trl installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own, and those of what it imports

LENGTH = 8  # max_completion_length
LOW, HIGH = 0.1, 0.15
PROMPTS = [[5, 6, 7, 8], [9, 10], [5, 6, 7, 8], [11, 12, 13]]
ANSWERS = [[20, 21, 22, 23, 24], [25, 26], [27, 28, 29], [30, 31, 32, 33]]
ADVANTAGES = [1.3, -0.7, 0.4, -1.6]
GROUPS = [0, 1, 2, 3]


def _llama(kind, **more):
    tokenizer = character_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        **more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = kind(config)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.3)
    return model, tokenizer


def _offline(**more):
    return {"use_cpu": True, "report_to": "none", "bf16": False, "disable_tqdm": True, **more}


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    """A real GRPOTrainer whose rollouts are scripted."""
    from datasets import Dataset

    model, tokenizer = _llama(LlamaForCausalLM)
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("grpo")),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=LENGTH,
        epsilon=LOW,
        epsilon_high=HIGH,
        beta=0.0,
        **_offline(),
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "1+1="}, {"prompt": "2+2="}]),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer._last_loaded_step = trainer.state.global_step  # there is no server to send weights to
    return trainer


@contextmanager
def _set(trainer, **settings):
    """Settings of a trainer for a while, where it keeps each: on itself or in its arguments."""
    homes = {name: trainer if hasattr(trainer, name) else trainer.args for name in settings}
    before = {name: getattr(home, name) for name, home in homes.items()}
    for name, value in settings.items():
        setattr(homes[name], name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(homes[name], name, value)


def _padded(rows, fill, left=False):
    width = max(map(len, rows))
    return torch.tensor([[fill] * (width - len(r)) * left + r + [fill] * (width - len(r)) * (not left) for r in rows])


def _theirs(columns=None, advantages=ADVANTAGES, **more):
    """Inputs as TRL's trainer collates them; columns of log-probs are one list per answer."""
    return {
        "prompt_ids": _padded(PROMPTS, 0, left=True),
        "prompt_mask": _padded([[1] * len(p) for p in PROMPTS], 0, left=True),
        "completion_ids": _padded(ANSWERS, 0),
        "completion_mask": _padded([[1] * len(a) for a in ANSWERS], 0),
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": torch.tensor(sum(map(len, ANSWERS))),
        **{name: _padded([row.tolist() for row in rows], 0.0) for name, rows in (columns or {}).items()},
        **more,
    }


def _distributions(model, answers=ANSWERS):
    """log-probs over the vocabulary at each token of each answer, which is run by itself: [T, V] each."""
    found = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1))
    return found


def _logps(model):
    rows = zip(_distributions(model), ANSWERS, strict=True)
    return [logp_TV.gather(1, torch.tensor(answer)[:, None])[:, 0] for logp_TV, answer in rows]


def _near(rows, seed, spread=0.25):
    """Log-probs of a policy not far away."""
    generator = torch.Generator().manual_seed(seed)
    return [(row + spread * torch.randn(row.shape, generator=generator)).detach().clamp(max=-1e-3) for row in rows]


def _ours(model, *, old=None, behavior=None, ref=None, advantages=ADVANTAGES, keep=None, measured=None):
    logp_T = torch.cat(_logps(model))
    sequence_T = torch.tensor([s for s, answer in enumerate(ANSWERS) for _ in answer])
    keep = torch.ones_like(sequence_T).bool() if keep is None else keep

    def column(rows):
        return None if rows is None else torch.cat(rows)[keep]

    return Scored(
        logp_T=logp_T[keep],
        advantage_T=torch.tensor(advantages)[sequence_T][keep],
        sequence_T=sequence_T[keep],
        behavior_logp_T=column(old if behavior is None else behavior),
        proximal_logp_T=column(old),
        ref_logp_T=column(ref),
        measured={name: value[keep] for name, value in (measured or {}).items()},
    )


def _step(scored, weighting, *terms):
    """Σ coefficient · weight · loss, as the learner adds it up."""
    weight_T = weighting(Extent(sequence_T=scored.sequence_T, group_S=torch.tensor(GROUPS), length=LENGTH))
    return sum((coefficient * weight_T * loss(scored)).sum() for coefficient, loss in terms)


def _same(theirs, ours, model):
    """Value, and gradient in every parameter."""
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    parameters = list(model.parameters())
    got, expected = (torch.autograd.grad(loss, parameters) for loss in (ours, theirs))
    size = max(g.abs().max().item() for g in expected)
    assert size > 1e-3  # something is compared
    for ours_, theirs_ in zip(got, expected, strict=True):
        torch.testing.assert_close(ours_.float(), theirs_.float(), rtol=1e-4, atol=1e-5 * max(1.0, size))


CLIP = partial(ppo_clip, low=LOW, high=HIGH)
CASES = {
    "grpo": ({"loss_type": "grpo"}, CLIP, sequence_mean),
    "bnpo": ({"loss_type": "bnpo"}, CLIP, token_mean),
    "dr_grpo": ({"loss_type": "dr_grpo"}, CLIP, fixed_length),
    "dapo": ({"loss_type": "dapo"}, CLIP, token_mean),
    "two-sided": ({"loss_type": "grpo", "delta": 1.3}, partial(ppo_clip, low=LOW, high=HIGH, dual=1.3), sequence_mean),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.1}, partial(cispo_cap, cap=1.1), token_mean),
    "sapo": (
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.4},
        partial(sapo, positive=1.0, negative=1.4),
        sequence_mean,
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.03},
        partial(gspo, low=0.02, high=0.03),
        sequence_mean,
    ),
    "gspo by tokens": (
        {"loss_type": "dapo", "importance_sampling_level": "sequence"},
        partial(gspo, low=LOW, high=HIGH),
        token_mean,
    ),
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        partial(gspo, low=LOW, high=HIGH),
        sequence_sum,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_agree(grpo, name):
    settings, loss, weighting = CASES[name]
    model = grpo.model
    old = _near(_logps(model), seed=1)
    with _set(grpo, **settings):
        theirs = grpo._compute_loss(model, _theirs({"old_per_token_logps": old}))
    _same(theirs, _step(_ours(model, old=old), weighting, (1.0, loss)), model)


@pytest.mark.parametrize("name", ["grpo", "dapo", "sapo"])
def test_where_the_learner_of_before_is_the_learner_losses_agree(grpo, name):
    settings, loss, weighting = CASES[name]
    model = grpo.model
    with _set(grpo, **settings):
        theirs = grpo._compute_loss(model, _theirs())
    now = [row.detach() for row in _logps(model)]
    _same(theirs, _step(_ours(model, old=now), weighting, (1.0, loss)), model)


def test_tokens_of_the_world_are_left_out_alike(grpo):
    model = grpo.model
    old = _near(_logps(model), seed=1)
    world = [[1, 0, 0, 1, 1], [1, 1], [0, 1, 1], [1, 1, 1, 1]]
    with _set(grpo, loss_type="grpo"):
        inputs = _theirs({"old_per_token_logps": old}, tool_mask=_padded(world, 1))
        theirs = grpo._compute_loss(model, inputs)
    keep = torch.tensor([bool(mark) for row in world for mark in row])
    _same(theirs, _step(_ours(model, old=old, keep=keep), sequence_mean, (1.0, CLIP)), model)


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
def test_a_kl_term_agrees(grpo, name, bias_correction):
    settings, loss, weighting = CASES[name]
    model = grpo.model
    old, ref = _near(_logps(model), seed=1), _near(_logps(model), seed=2, spread=0.6)
    with _set(grpo, beta=0.3, use_bias_correction_kl=bias_correction, **settings):
        theirs = grpo._compute_loss(model, _theirs({"old_per_token_logps": old, "ref_per_token_logps": ref}))
    scored = _ours(model, old=old, ref=ref)
    _same(theirs, _step(scored, weighting, (1.0, loss), (0.3, _flat(weighted(k3) if bias_correction else k3))), model)


def _flat(loss):
    """A term for all tokens: its advantage is 1."""

    return lambda scored: loss(replace(scored, advantage_T=torch.ones_like(scored.advantage_T)))


def test_off_policy_sequences_are_masked_alike(grpo):
    model = grpo.model
    old = _near(_logps(model), seed=1)
    behavior = [row + 0.5 * (s == 3) for s, row in enumerate(_near(old, seed=4, spread=0.02))]
    inputs = {"old_per_token_logps": old, "sampling_per_token_logps": behavior}
    with _set(grpo, loss_type="grpo", off_policy_mask_threshold=0.1):
        theirs = grpo._compute_loss(model, _theirs(inputs))
    scored = _ours(model, old=old, behavior=behavior)
    masked = off_policy_masked(CLIP, bound=0.1)
    assert ((masked(scored) == 0) & (CLIP(scored) != 0)).any()
    _same(theirs, _step(scored, sequence_mean, (1.0, masked)), model)


# ---- corrections, through TRL's own rollout


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_corrections_between_sampler_and_learner_agree(grpo, level, mode):
    model = grpo.model
    behavior = _near(_logps(model), seed=5, spread=0.5)

    def rollout(prompts, trainer):
        return {"prompt_ids": PROMPTS, "completion_ids": ANSWERS, "logprobs": [row.tolist() for row in behavior]}

    bounds = {"vllm_importance_sampling_clip_min": 0.7, "vllm_importance_sampling_clip_max": 1.3}
    with _set(
        grpo,
        loss_type="grpo",
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=f"{level}_{mode}",
        rollout_func=rollout,
        **bounds,
    ):
        inputs = grpo._generate_and_score_completions([{"prompt": "1+1="}] * 4)
        assert inputs["completion_ids"].tolist() == _padded(ANSWERS, 0).tolist()
        old = [row.detach().clone() for row in _logps(model)]
        with _moved(model):
            theirs = grpo._compute_loss(model, inputs)
            scored = _ours(model, old=old, behavior=behavior, advantages=inputs["advantages"].tolist())
            loss = corrected(CLIP, level=level, low=0.7, high=1.3, mode=mode)
            _same(theirs, _step(scored, sequence_mean, (1.0, loss)), model)
            assert (loss(scored) - CLIP(scored)).abs().max() > 0.05


@contextmanager
def _moved(model):
    """As after an update."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    try:
        yield
    finally:
        model.load_state_dict(before)


# ---- entropy


def _entropy(model, answers=ANSWERS):
    return torch.cat([distribution.entropy(logp_TV) for logp_TV in _distributions(model, answers)])


def test_an_entropy_bonus_agrees(grpo):
    model = grpo.model
    old = _near(_logps(model), seed=1)
    with _set(grpo, loss_type="bnpo", entropy_coef=0.2, _entropy_bonus_enabled=True):
        theirs = grpo._compute_loss(model, _theirs({"old_per_token_logps": old}))
    scored = _ours(model, old=old, measured={"entropy": _entropy(model)})
    _same(theirs, _step(scored, token_mean, (1.0, CLIP), (0.2, _flat(entropy_bonus))), model)


def test_an_adaptive_entropy_coefficient_agrees(grpo):
    model = grpo.model
    old = _near(_logps(model), seed=1)
    base = _entropy(model).mean().item()
    with _moved(model):
        other = _entropy(model).mean().item()
    control = AdaptiveEntropy(target=(base + other) / 2, step=0.01, highest=0.025)
    settings = {
        "loss_type": "bnpo",
        "use_adaptive_entropy": True,
        "_entropy_bonus_enabled": True,
        "entropy_coef": 0.0,
        "entropy_target": control.target,
        "entropy_coef_delta": 0.01,
        "entropy_coef_min": 0.0,
        "entropy_coef_max": 0.025,
        "_last_world_entropy": float("inf"),
    }
    applied = []
    with _set(grpo, **settings):
        for moved in (False, False, True, True, False, False, False, False, True):
            with _moved(model) if moved else nullcontext():
                theirs = grpo._compute_loss(model, _theirs({"old_per_token_logps": old})).item()
                measured = _entropy(model)
                scored = _ours(model, old=old, measured={"entropy": measured})
                terms = (1.0, CLIP), (control.coefficient, _flat(entropy_bonus))
                assert _step(scored, token_mean, *terms).item() == pytest.approx(theirs, abs=1e-5)
                applied.append(control.coefficient)
                control.update(measured.mean().item())
                assert control.level == pytest.approx(grpo.entropy_coef)
    assert len(set(applied)) > 2


# ---- other trainers


def test_rloo_on_its_own_samples_has_our_gradient(tmp_path):
    from datasets import Dataset

    model, tokenizer = _llama(LlamaForCausalLM)
    trainer = trl.RLOOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.RLOOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=2, beta=0.0, **_offline()
        ),
        train_dataset=Dataset.from_list([{"prompt": "1+1="}]),
        processing_class=tokenizer,
    )
    whole = torch.stack([row.sum() for row in _logps(model)]).detach()
    theirs = trainer._compute_loss(model, _theirs(old_logps=whole))
    ours = _step(_ours(model), sequence_sum, (1.0, likelihood))
    parameters = list(model.parameters())
    got, expected = (torch.autograd.grad(loss, parameters) for loss in (ours, theirs))
    assert max(g.abs().max().item() for g in expected) > 1e-2
    for ours_, theirs_ in zip(got, expected, strict=True):
        torch.testing.assert_close(ours_, theirs_, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("margin", "centering"), [(0.0, 0.0), (0.4, 0.0), (0.0, 0.1)])
def test_bradley_terry_agrees(tmp_path, margin, centering):
    from datasets import Dataset

    model, tokenizer = _llama(LlamaForSequenceClassification, num_labels=1)
    trainer = trl.RewardTrainer(
        model=model,
        args=trl.RewardConfig(
            output_dir=str(tmp_path), center_rewards_coefficient=centering or None, max_length=None, **_offline()
        ),
        train_dataset=Dataset.from_list([{"chosen": "1+1=2", "rejected": "1+1=3"}]),
        processing_class=tokenizer,
    )
    # answers 0 and 1 are better than 2 and 3 by ratings of 1 and 3
    rows = [prompt + answer for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    inputs = {"input_ids": _padded(rows, 0), "attention_mask": _padded([[1] * len(row) for row in rows], 0)}
    if margin:
        inputs["margin"] = margin * torch.tensor([1.0, 3.0])
    theirs = trainer.compute_loss(model, inputs)
    values = [model.score(model.model(input_ids=torch.tensor([row]))[0])[0, :, 0] for row in rows]
    sequence_T = torch.tensor([s for s, row in enumerate(rows) for _ in row])
    scored = Scored(
        logp_T=torch.zeros(len(sequence_T)),
        advantage_T=torch.tensor([1.0, 3.0, 0.0, 0.0])[sequence_T],
        sequence_T=sequence_T,
        group_T=torch.tensor([0, 1, 0, 1])[sequence_T],
        value_T=torch.cat(values),
    )
    weight_T = group_mean(Extent(sequence_T=sequence_T, group_S=torch.tensor([0, 1, 0, 1])))
    ours = (weight_T * bradley_terry(scored, margin=margin, centering=centering)).sum()
    _same(theirs, ours, model)


@pytest.mark.parametrize(
    ("beta", "measure"),
    [(0.0, distribution.forward_kl), (1.0, distribution.kl), (0.5, distribution.jsd)]
    + [(beta, partial(distribution.jsd, beta=beta)) for beta in (0.1, 0.9)],
)
def test_divergences_from_a_teacher_agree(beta, measure):
    jsd_loss = _their_jsd()
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(6, 9, generator=generator, requires_grad=True)
    teacher = torch.randn(6, 9, generator=generator)
    theirs = jsd_loss(student[None], teacher[None], beta=beta, reduction="none")[0].sum(-1)
    ours = measure(student.log_softmax(-1), teacher.log_softmax(-1))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    got, expected = (torch.autograd.grad(loss.sum(), student)[0] for loss in (ours, theirs))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def _their_jsd():
    from trl.experimental.gkd import GKDTrainer

    return GKDTrainer.generalized_jsd_loss


# ---- where they differ


def test_their_divergence_of_a_masked_vocabulary_is_not_a_number():
    student = torch.tensor([[0.1, 0.7, -torch.inf]])
    teacher = torch.tensor([[0.5, 0.2, -torch.inf]])
    theirs = _their_jsd()(student[None], teacher[None], beta=0.5, reduction="sum")
    assert torch.isnan(theirs)
    ours = distribution.jsd(student.log_softmax(-1), teacher.log_softmax(-1))
    assert ours.tolist() == pytest.approx(
        distribution.jsd(student[:, :2].log_softmax(-1), teacher[:, :2].log_softmax(-1)).tolist()
    )


def test_their_cispo_bound_is_the_weight_itself_and_ours_is_named(grpo):
    model = grpo.model
    old = [row - 2.0 for row in _near(_logps(model), seed=1)]  # ratios near e² = 7.4
    with _set(grpo, loss_type="cispo", epsilon_high=5.0):
        theirs = grpo._compute_loss(model, _theirs({"old_per_token_logps": old})).item()
    scored = _ours(model, old=old)
    assert _step(scored, token_mean, (1.0, partial(cispo_cap, cap=5.0))).item() == pytest.approx(theirs, abs=1e-5)
    assert _step(scored, token_mean, (1.0, partial(cispo, high=4.0))).item() == pytest.approx(theirs, abs=1e-5)
    assert _step(scored, token_mean, (1.0, partial(cispo, high=5.0))).item() != pytest.approx(theirs, rel=0.05)


def test_their_two_sided_clip_does_not_hold_within_the_clip_and_ours_does(grpo):
    model = grpo.model
    old = [row.detach() - 0.12 for row in _logps(model)]  # every ratio is e^0.12 = 1.127, delta 1.05 and high 0.15
    with _set(grpo, loss_type="grpo", delta=1.05):
        theirs = grpo._compute_loss(model, _theirs({"old_per_token_logps": old}, advantages=[-1.0] * 4)).item()
    ours = _step(_ours(model, old=old, advantages=[-1.0] * 4), sequence_mean, (1.0, partial(CLIP, dual=1.05))).item()
    assert theirs == pytest.approx(1.1275, abs=1e-3)
    assert ours == pytest.approx(1.05, abs=1e-5)


def test_their_ratio_overflows_and_ours_does_not(grpo):
    model = grpo.model
    old = [row.detach() - 100.0 for row in _logps(model)]
    with _set(grpo, loss_type="grpo"):
        theirs = grpo._compute_loss(model, _theirs({"old_per_token_logps": old})).item()
    assert theirs == float("inf")
    assert torch.isfinite(_step(_ours(model, old=old), sequence_mean, (1.0, CLIP)))


def test_their_kl_is_weighted_to_the_learner_of_before_and_ours_to_the_sampler(grpo):
    model = grpo.model
    old, ref = _near(_logps(model), seed=1), _near(_logps(model), seed=2, spread=0.6)
    behavior = [row - 0.4 for row in old]
    columns = {"old_per_token_logps": old, "ref_per_token_logps": ref, "sampling_per_token_logps": behavior}
    with _set(grpo, loss_type="grpo", beta=0.3, use_bias_correction_kl=True):
        theirs = grpo._compute_loss(model, _theirs(columns, advantages=[0.0] * 4)).item()
    kl_term = (0.3, _flat(weighted(k3)))
    to_old = _step(_ours(model, old=old, ref=ref), sequence_mean, kl_term).item()
    to_sampler = _step(_ours(model, old=old, behavior=behavior, ref=ref), sequence_mean, kl_term).item()
    assert theirs == pytest.approx(to_old, abs=1e-5)
    assert to_sampler != pytest.approx(theirs, rel=0.05)


def test_their_kl_has_the_answers_mean_ratio_where_ratios_are_of_sequences(grpo):
    model = grpo.model
    old, ref = _near(_logps(model), seed=1, spread=0.8), _near(_logps(model), seed=2, spread=0.6)
    columns = {"old_per_token_logps": old, "ref_per_token_logps": ref}
    settings = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    with _set(grpo, beta=0.3, use_bias_correction_kl=True, **settings):
        theirs = grpo._compute_loss(model, _theirs(columns, advantages=[0.0] * 4)).item()
    scored = _ours(model, old=old, ref=ref)
    mean = [(now - before).mean().exp().expand(len(now)) for now, before in zip(_logps(model), old, strict=True)]
    by_mean = _step(scored, sequence_mean, (0.3, lambda one: _flat(k3)(one) * torch.cat(mean))).item()
    assert theirs == pytest.approx(by_mean, abs=1e-5)
    assert _step(scored, sequence_mean, (0.3, _flat(weighted(k3)))).item() != pytest.approx(theirs, rel=0.02)
