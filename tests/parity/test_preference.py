"""The same numbers as TRL from the same weights: its trainers' own compute_loss on padded batches, beside our losses
of log-probs that are worked out here, row by row. Where the two mean different things, a test shows in what."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import log_softmax

from headwater.models.fakes import character_tokenizer, tiny_llama
from headwater.objective import preference as losses
from headwater.objective.weighting import group_mean, sequence_mean
from headwater.types import Extent, Scored

# Warnings of TRL, accelerate and transformers about themselves; none is about what is compared here.
pytestmark = pytest.mark.filterwarnings("ignore")

# Prompts, preferred and other answers as token ids, of unequal lengths. 0 is the end of a turn and the padding.
ROWS = [
    {"prompt_ids": [11, 12, 13], "chosen_ids": [20, 21, 22, 23, 0], "rejected_ids": [30, 31, 0]},
    {"prompt_ids": [14], "chosen_ids": [24, 0], "rejected_ids": [32, 33, 34, 35, 36, 37, 0]},
    {"prompt_ids": [15, 16], "chosen_ids": [25, 26, 27, 0], "rejected_ids": [38, 39, 40, 0]},
]
PROBE = "model.embed_tokens.weight"  # tied to the head: every path of the gradient ends here


def _llama(seed):
    """A random Llama as transformers runs it, padding and all, whose log-probs differ by seed by some nats."""
    module = tiny_llama(seed=seed).module
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter.mul_(2)
    module.set_attn_implementation("eager")
    return module


@pytest.fixture(scope="module")
def trl():
    return pytest.importorskip("trl", minversion="1.16", reason="parity with TRL needs trl of 1.16 or later")


@pytest.fixture(scope="module")
def models():
    return _llama(0), _llama(1).requires_grad_(False)


@pytest.fixture(scope="module")
def dpo_trainer(trl, models, tmp_path_factory):
    datasets = pytest.importorskip("datasets")
    args = trl.DPOConfig(
        output_dir=str(tmp_path_factory.mktemp("dpo")),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    return trl.DPOTrainer(
        model=_llama(0),
        ref_model=_llama(1),
        args=args,
        train_dataset=datasets.Dataset.from_list([{"prompt": "ab", "chosen": "c", "rejected": "d"}]),
        processing_class=character_tokenizer(),
    )


def _trl_dpo(trainer, rows, *loss_types, weights=None, **settings):
    """Its loss and the gradient at PROBE. Settings are put where its constructor puts them."""
    fixed = {
        "beta": 0.1,
        "label_smoothing": 0.0,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "loss_types": list(loss_types),
        "loss_weights": weights or [1.0] * len(loss_types),
    }
    for name, value in (fixed | settings).items():
        assert hasattr(trainer, name)
        setattr(trainer, name, value)
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(rows))
    return loss.detach(), torch.autograd.grad(loss, dict(trainer.model.named_parameters())[PROBE])[0]


def _logps(model, prompt, answer):
    """Log-prob of each token of an answer, from a forward pass without padding."""
    ids = torch.tensor([prompt + answer])
    logp_TV = log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1], -1)
    return logp_TV.gather(1, torch.tensor(answer)[:, None]).squeeze(1)


def _scored(models, rows):
    """Pair i as group i: its chosen answer has target 1, its rejected 0."""
    parts = [
        (
            _logps(models[0], row["prompt_ids"], row[side]),
            _logps(models[1], row["prompt_ids"], row[side]),
            target,
            group,
        )
        for group, row in enumerate(rows)
        for side, target in (("chosen_ids", 1.0), ("rejected_ids", 0.0))
    ]
    lengths = torch.tensor([len(part[0]) for part in parts])
    return Scored(
        logp_T=torch.cat([part[0] for part in parts]),
        ref_logp_T=torch.cat([part[1] for part in parts]),
        advantage_T=torch.tensor([part[2] for part in parts]).repeat_interleave(lengths),
        sequence_T=torch.arange(len(parts)).repeat_interleave(lengths),
        group_T=torch.tensor([part[3] for part in parts]).repeat_interleave(lengths),
    )


def _ours(models, rows, loss, weighting=group_mean):
    scored = _scored(models, rows)
    group_S = torch.arange(2 * len(rows)) // 2
    weight_T = weighting(Extent(sequence_T=scored.sequence_T, group_S=group_S)).float()
    total = (weight_T * loss(scored)).sum()
    return total.detach(), torch.autograd.grad(total, dict(models[0].named_parameters())[PROBE])[0]


def _close(ours, theirs):
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    assert 0 < theirs[1].norm() < torch.inf
    assert (ours[1] - theirs[1]).norm() < 1e-5 * theirs[1].norm()


def _apart(ours, theirs):
    assert abs(ours[0] - theirs[0]) > 1e-3


SAME = {
    "dpo": (partial(losses.dpo, beta=0.1), ("sigmoid",), {}),
    "robust_dpo": (partial(losses.robust_dpo, beta=0.1, label_smoothing=0.2), ("robust",), {"label_smoothing": 0.2}),
    "dpo_norm": (partial(losses.dpo_norm, beta=0.7), ("sigmoid_norm",), {"beta": 0.7}),
    "ipo": (partial(losses.ipo, beta=0.2, normalise=True), ("ipo",), {"beta": 0.2}),
    "hinge": (partial(losses.hinge, beta=0.1), ("hinge",), {}),
    "exo_pair": (partial(losses.exo_pair, beta=0.1, label_smoothing=0.01), ("exo_pair",), {"label_smoothing": 0.01}),
    "sppo_hard": (partial(losses.sppo_hard, beta=0.2), ("sppo_hard",), {"beta": 0.2}),
    "nca_pair": (partial(losses.nca_pair, beta=0.1), ("nca_pair",), {}),
    "apo_zero": (partial(losses.apo_zero, beta=0.1), ("apo_zero",), {}),
    "apo_down": (partial(losses.apo_down, beta=0.1), ("apo_down",), {}),
    "forward_kl_dpo": (
        partial(losses.forward_kl_dpo, beta=0.01),
        ("sigmoid",),
        {"beta": 0.01, "f_divergence_type": "forward_kl"},
    ),
    "js_dpo": (partial(losses.js_dpo, beta=0.1), ("sigmoid",), {"f_divergence_type": "js_divergence"}),
    # theirs is 1 - alpha of the paper
    "alpha_dpo": (
        partial(losses.alpha_dpo, beta=0.1, alpha=0.3),
        ("sigmoid",),
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7},
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_losses_of_pairs_agree(name, dpo_trainer, models):
    loss, loss_types, settings = SAME[name]
    _close(_ours(models, ROWS, loss), _trl_dpo(dpo_trainer, ROWS, *loss_types, **settings))


def test_the_two_policies_are_far_enough_apart_to_tell_losses_from_each_other(models):
    # else every sigmoid loss is near log 2, and agreement says little
    ratio_S = losses.implicit_reward(_scored(models, ROWS), beta=1.0)
    assert ratio_S.min() < -5 and ratio_S.max() > 5
    values = [_ours(models, ROWS, loss)[0].item() for loss, _, _ in SAME.values()]
    assert min(abs(a - b) for i, a in enumerate(values) for b in values[:i]) > 1e-4


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_conservative_dpo_agrees_with_a_sorted_loss_of_one_pair(row, dpo_trainer, models):
    # TRL has the formula of cDPO only in "aot_unpaired", which sorts log-ratios: over one pair there is nothing to sort
    ours = _ours(models, ROWS[row : row + 1], partial(losses.cdpo, beta=0.1, label_smoothing=0.2))
    _close(ours, _trl_dpo(dpo_trainer, ROWS[row : row + 1], "aot_unpaired", label_smoothing=0.2))


def test_rpo_agrees_where_preferred_answers_are_equally_long(dpo_trainer, models):
    rows = [ROWS[2], ROWS[2] | {"chosen_ids": [41, 42, 43, 0]}]
    ours = _ours(models, rows, partial(losses.rpo, beta=0.1, coefficient=0.5))
    _close(ours, _trl_dpo(dpo_trainer, rows, "sigmoid", "sft", weights=[1.0, 0.5]))


# ---- where they differ


def test_trl_ignores_label_smoothing_in_its_sigmoid_loss(dpo_trainer, models):
    smoothed = _trl_dpo(dpo_trainer, ROWS, "sigmoid", label_smoothing=0.2)
    assert smoothed[0] == _trl_dpo(dpo_trainer, ROWS, "sigmoid", label_smoothing=0.0)[0]
    _apart(_ours(models, ROWS, partial(losses.cdpo, beta=0.1, label_smoothing=0.2)), smoothed)


def test_trl_averages_ipo_over_tokens_and_the_formula_sums(dpo_trainer, models):
    theirs = _trl_dpo(dpo_trainer, ROWS, "ipo", beta=0.2)
    _apart(_ours(models, ROWS, partial(losses.ipo, beta=0.2, normalise=False)), theirs)
    # of answers of one token there is no difference
    single = [ROWS[0] | {"chosen_ids": [20], "rejected_ids": [30]}]
    theirs = _trl_dpo(dpo_trainer, single, "ipo", beta=0.2)
    _close(_ours(models, single, partial(losses.ipo, beta=0.2, normalise=False)), theirs)


def test_trl_weighs_the_imitation_of_rpo_by_length_across_the_batch(dpo_trainer, models):
    loss = partial(losses.rpo, beta=0.1, coefficient=0.5)
    _apart(_ours(models, ROWS, loss), _trl_dpo(dpo_trainer, ROWS, "sigmoid", "sft", weights=[1.0, 0.5]))


def test_trl_counts_its_alpha_from_the_other_end(dpo_trainer, models):
    # the limits tell which is the paper's: alpha -> 0 is the reverse KL, alpha = 1 the forward KL
    other = {"f_divergence_type": "alpha_divergence", "beta": 0.01}
    reverse = _trl_dpo(dpo_trainer, ROWS, "sigmoid", f_alpha_divergence_coef=1.0, **other)
    forward = _trl_dpo(dpo_trainer, ROWS, "sigmoid", f_alpha_divergence_coef=0.0, **other)
    _close(_ours(models, ROWS, partial(losses.alpha_dpo, beta=0.01, alpha=1e-6)), reverse)
    _close(_ours(models, ROWS, partial(losses.alpha_dpo, beta=0.01, alpha=1.0)), forward)


def test_trl_loses_the_gradient_of_the_forward_kl_out_of_range(dpo_trainer):
    # a preferred answer of log-ratio -200: e^200 overflows single precision, so its loss is inf; ours goes on linearly
    trainer = dpo_trainer
    batch = trainer.data_collator(ROWS[:1])
    batch["ref_chosen_logps"], batch["ref_rejected_logps"] = torch.tensor([100.0]), torch.tensor([0.0])
    trainer.precompute_ref_logps = True
    try:
        for name, value in {"loss_types": ["sigmoid"], "f_divergence_type": "forward_kl", "beta": 0.1}.items():
            setattr(trainer, name, value)
        assert not trainer.compute_loss(trainer.model, batch).isfinite()
    finally:
        trainer.precompute_ref_logps = False
    logp = torch.tensor([-100.0, -1.0], requires_grad=True)
    scored = Scored(
        logp_T=logp,
        ref_logp_T=torch.tensor([100.0, -1.0]),
        advantage_T=torch.tensor([1.0, 0.0]),
        sequence_T=torch.arange(2),
        group_T=torch.zeros(2, dtype=torch.long),
    )
    loss = losses.forward_kl_dpo(scored, beta=0.1)
    assert loss.isfinite().all()
    assert torch.autograd.grad(loss.mean(), logp)[0][0] < 0


# ---- CPO, SimPO and ORPO: TRL's own methods on a trainer that has not been through its constructor


def _bare(trainer_class, **attributes):
    trainer = object.__new__(trainer_class)
    fixed = {
        "accelerator": SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda values: values),
        "is_encoder_decoder": False,
        "aux_loss_enabled": False,
        "pad_token_id": 0,
        "padding_value": 0,
    }
    for name, value in (fixed | attributes).items():
        setattr(trainer, name, value)
    return trainer


def _padded(rows):
    """A batch as its collator makes one: prompt and answer, labels -100 at the prompt and the padding."""
    batch = {}
    for side in ("chosen", "rejected"):
        full = [torch.tensor(row["prompt_ids"] + row[f"{side}_ids"]) for row in rows]
        label = [torch.tensor([-100] * len(row["prompt_ids"]) + row[f"{side}_ids"]) for row in rows]
        mask = [torch.ones_like(ids) for ids in full]
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        batch |= {f"{side}_input_ids": pad(full), f"{side}_attention_mask": pad(mask)}
        batch[f"{side}_labels"] = pad(label, padding_value=-100)
    return batch


def _of_batch(trainer, model, rows):
    loss, _ = trainer.get_batch_loss_metrics(model, _padded(rows))
    return loss.detach(), torch.autograd.grad(loss, dict(model.named_parameters())[PROBE])[0]


@pytest.fixture(scope="module")
def cpo_class(trl):
    return pytest.importorskip("trl.experimental.cpo", reason="parity with CPO needs trl.experimental").CPOTrainer


@pytest.fixture(scope="module")
def orpo_class(trl):
    return pytest.importorskip("trl.experimental.orpo", reason="parity with ORPO needs trl.experimental").ORPOTrainer


def _cpo(cpo_class, loss_type, *, beta, coefficient, gamma=0.5, label_smoothing=0.0):
    attributes = {"alpha": 0.0, "simpo_gamma": gamma, "label_smoothing": label_smoothing, "cpo_alpha": coefficient}
    return _bare(cpo_class, loss_type=loss_type, beta=beta, **attributes)


def test_simpo_agrees(cpo_class, models):
    theirs = _of_batch(_cpo(cpo_class, "simpo", beta=2.0, gamma=0.7, coefficient=0.0), models[0], ROWS)
    _close(_ours(models, ROWS, partial(losses.simpo, beta=2.0, gamma=0.7)), theirs)


def test_cpo_agrees_where_preferred_answers_are_equally_long(cpo_class, models):
    rows = [ROWS[2], ROWS[2] | {"chosen_ids": [41, 42, 43, 0]}]
    theirs = _of_batch(_cpo(cpo_class, "sigmoid", beta=0.1, coefficient=0.5), models[0], rows)
    _close(_ours(models, rows, partial(losses.cpo, beta=0.1, coefficient=0.5)), theirs)


def test_cpo_without_imitation_agrees_at_any_length(cpo_class, models):
    theirs = _of_batch(_cpo(cpo_class, "sigmoid", beta=0.1, coefficient=0.0), models[0], ROWS)
    _close(_ours(models, ROWS, partial(losses.cpo, beta=0.1, coefficient=0.0)), theirs)


def test_trl_weighs_the_imitation_of_cpo_by_length_across_the_batch(cpo_class, models):
    theirs = _of_batch(_cpo(cpo_class, "sigmoid", beta=0.1, coefficient=0.5), models[0], ROWS)
    _apart(_ours(models, ROWS, partial(losses.cpo, beta=0.1, coefficient=0.5)), theirs)


def test_the_smoothing_of_trls_cpo_is_that_of_conservative_dpo(cpo_class, models):
    scored = _scored(models, ROWS)
    ratio_S = losses.implicit_reward(scored, beta=1.0)
    trainer = _cpo(cpo_class, "sigmoid", beta=0.1, coefficient=0.0, label_smoothing=0.2)
    theirs, _, _ = trainer.cpo_loss(ratio_S[0::2], ratio_S[1::2])
    ours = losses.cdpo(scored, beta=0.1, label_smoothing=0.2)
    first_T = [scored.sequence_T.tolist().index(2 * pair) for pair in range(len(ROWS))]
    torch.testing.assert_close(ours[first_T], theirs, rtol=1e-5, atol=1e-5)


def test_orpo_agrees_on_a_pair_with_a_prompt_of_one_token(orpo_class, models):
    # its imitation covers the prompt, whose first token nothing predicts
    ours = _ours(models, ROWS[1:2], partial(losses.orpo, coefficient=0.4))
    _close(ours, _of_batch(_bare(orpo_class, beta=0.4), models[0], ROWS[1:2]))


def test_the_odds_ratio_of_orpo_agrees_on_any_pair(orpo_class, models):
    scored = _scored(models, ROWS)
    mean_S = torch.stack([scored.logp_T[scored.sequence_T == s].mean() for s in range(2 * len(ROWS))])
    theirs, *_ = _bare(orpo_class, beta=1.0).odds_ratio_loss(mean_S[0::2], mean_S[1::2])
    with_T, without_T = losses.orpo(scored, coefficient=1.0), losses.orpo(scored, coefficient=0.0)
    first_T = [scored.sequence_T.tolist().index(2 * pair) for pair in range(len(ROWS))]
    torch.testing.assert_close((with_T - without_T)[first_T], -theirs, rtol=1e-5, atol=1e-5)


def test_trl_imitates_the_prompt_too_in_orpo(orpo_class, models):
    theirs = _of_batch(_bare(orpo_class, beta=0.4), models[0], ROWS[:1])
    ours = _ours(models, ROWS[:1], partial(losses.orpo, coefficient=0.4))
    _apart(ours, theirs)
    # the whole difference is the prompt's tokens in the mean
    row = ROWS[0]
    everything = -_logps(models[0], row["prompt_ids"][:1], row["prompt_ids"][1:] + row["chosen_ids"]).mean()
    answer = -_logps(models[0], row["prompt_ids"], row["chosen_ids"]).mean()
    assert (theirs[0] - ours[0]).item() == pytest.approx((everything - answer).item(), rel=1e-4)


def test_trls_odds_have_no_gradient_where_the_policy_is_nearly_certain(orpo_class):
    # log p = -1e-9 in single precision: e^log p rounds to 1, and the branch that is not taken makes a NaN
    certain, other = torch.tensor([-1e-9], requires_grad=True), torch.tensor([-1.0])
    theirs, *_ = _bare(orpo_class, beta=1.0).odds_ratio_loss(certain, other)
    assert torch.autograd.grad(theirs.sum(), certain)[0].isnan().all()
    scored = Scored(
        logp_T=torch.cat([certain, other]),
        advantage_T=torch.tensor([1.0, 0.0]),
        sequence_T=torch.arange(2),
        group_T=torch.zeros(2, dtype=torch.long),
    )
    assert torch.autograd.grad(losses.orpo(scored, coefficient=1.0).sum(), certain)[0].isfinite().all()


# ---- KTO


@pytest.fixture(scope="module")
def kto_trainer(trl, tmp_path_factory):
    datasets = pytest.importorskip("datasets")
    args = trl.KTOConfig(
        output_dir=str(tmp_path_factory.mktemp("kto")),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        per_device_train_batch_size=2,
    )
    rows = [{"prompt": "ab", "completion": completion, "label": completion == "c"} for completion in ("c", "d")]
    return trl.KTOTrainer(
        model=_llama(0),
        ref_model=_llama(1),
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=character_tokenizer(),
    )


@pytest.mark.parametrize(("turn", "sign"), [(2, 1), (3, -1)], ids=["reference point above 0", "below, clamped"])
def test_kto_agrees(turn, sign, kto_trainer, models):
    flat = [
        {"prompt_ids": row["prompt_ids"], "completion_ids": row[side], "label": side == "chosen_ids"}
        for row in ROWS
        for side in ("chosen_ids", "rejected_ids")
    ]
    # answers to other prompts: the reference point, as the mean log-ratio over the batch
    others = [row | {"KL_completion_ids": flat[(i + turn) % 6]["completion_ids"]} for i, row in enumerate(flat)]
    kto_trainer.beta, kto_trainer.desirable_weight, kto_trainer.undesirable_weight = 0.1, 1.5, 0.7
    loss = kto_trainer.compute_loss(kto_trainer.model, kto_trainer.data_collator(others))
    theirs = loss.detach(), torch.autograd.grad(loss, dict(kto_trainer.model.named_parameters())[PROBE])[0]

    with torch.no_grad():
        told = [[_logps(m, row["prompt_ids"], row["KL_completion_ids"]).sum() for m in models] for row in others]
    point = torch.stack([policy - ref for policy, ref in told]).mean()
    assert point * sign > 0.1

    def kto(scored):
        scored = replace(scored, measured={"reference_point": point.expand(len(scored.logp_T))})
        return losses.kto(scored, beta=0.1, desirable_weight=1.5, undesirable_weight=0.7)

    _close(_ours(models, ROWS, kto, sequence_mean), theirs)
