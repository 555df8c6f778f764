from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from headwater.algorithms import build
from headwater.config import OptimizerConfig
from headwater.data.pack import pack
from headwater.errors import NonFiniteError
from headwater.models.fakes import TabularPolicy, tiny_llama
from headwater.models.forward import score
from headwater.runtime.learner import Learner, learning_rate
from headwater.types import Group, Signal, Span, Task, Trajectory


def _group(policy, *answers):
    def one(tokens, reward):
        spans = (
            Span(author="prompt", tokens=(5, 6, 7), text=""),
            Span(author="policy", tokens=tuple(tokens), text="", logps=(-4.0,) * len(tokens), version=0),
        )
        signal = Signal(source="t", name="reward", values=(reward,))
        return Trajectory(task_id="t", spans=spans, signals=(signal,))

    return Group(task=Task(id="t", prompt="p"), trajectories=tuple(one(*answer) for answer in answers))


def _on_policy(policy, batch):
    return dataclasses.replace(batch, behavior_logp_T=score(policy, batch))


ANSWERS = (([8, 9, 10], 1.0), ([11], 0.0), ([12, 13], 0.25), ([8, 8, 8, 8, 8], 0.0))


def _batch(policy, name="grpo", **settings):
    return _on_policy(policy, pack([_group(policy, *ANSWERS)], build(name, settings), length=8))


def _one_token(policy):
    """The answer `8` with an advantage of 1 and a weight of 1."""
    spans = (Span(author="prompt", tokens=(5, 6, 7), text=""), Span(author="policy", tokens=(8,), text=""))
    demonstration = Trajectory(task_id="t", spans=spans)
    return pack([Group(task=Task(id="t", prompt="p"), trajectories=(demonstration,))], build("sft", {}))


def test_one_step_of_reinforce_on_the_table_by_hand():
    """One token of advantage 1 and weight 1: the gradient of -log p(8 | 7) is p - onehot(8) in column 7."""
    policy = TabularPolicy()
    size = len(policy.tokenizer)
    batch = _one_token(policy)
    update = Learner(policy, OptimizerConfig(lr=0.1, clip=100.0), steps=1).step(batch)
    # uniform logits: p = 1/V; norm² = (1 - 1/V)² + (V-1)/V²
    norm = math.sqrt((1 - 1 / size) ** 2 + (size - 1) / size**2)
    assert update.grad_norm == pytest.approx(norm, rel=1e-5)
    assert update.loss == pytest.approx(math.log(size), rel=1e-5)
    assert update.entropy == pytest.approx(math.log(size), rel=1e-5)
    # AdamW's first step is lr · sign(gradient)
    column = policy.table.weight[:, 7]
    assert column[8].item() == pytest.approx(0.1, rel=1e-3)
    assert column[9].item() == pytest.approx(-0.1, rel=1e-3)
    assert policy.table.weight[:, 6].abs().max().item() == 0


@pytest.mark.parametrize("budget", [1, 6, 9, 14, 10_000])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_accumulation_by_any_token_budget_gives_the_same_weights(name, budget):
    def trained(micro_tokens):
        policy = tiny_llama()
        learner = Learner(policy, OptimizerConfig(lr=1e-3, eps=1e-4, micro_tokens=micro_tokens), steps=1)
        update = learner.step(_batch(policy, name))
        return update, torch.cat([p.detach().flatten() for p in policy.trainable().values()])

    whole, whole_weights = trained(10_000)
    split, split_weights = trained(budget)
    assert split.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    assert split.loss == pytest.approx(whole.loss, abs=1e-6)
    torch.testing.assert_close(split_weights, whole_weights, atol=1e-6, rtol=0)


def test_activation_checkpointing_changes_nothing_but_memory():
    def trained(flag):
        policy = tiny_llama()
        learner = Learner(policy, OptimizerConfig(lr=1e-3, activation_checkpointing=flag), steps=1)
        return learner.step(_batch(policy)).grad_norm

    assert trained(True) == pytest.approx(trained(False), rel=1e-6)


def test_bfloat16_learns_steps_that_bfloat16_cannot_hold():
    """A step of 1e-5 vanishes when added to a bfloat16 weight of 0.15; the float32 master keeps it."""
    policy = tiny_llama(dtype=torch.bfloat16)
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    learner = Learner(policy, OptimizerConfig(lr=1e-5), steps=1000)
    batch = _batch(policy)
    learner.step(batch)
    name = "model.layers.0.mlp.up_proj.weight"
    master = learner.masters.weights[name]
    assert master.dtype == torch.float32
    assert 0 < (master - before[name].float()).abs().max().item() <= 1.1e-5
    assert policy.trainable()[name].dtype == torch.bfloat16
    for _ in range(200):
        learner.step(batch)
    assert bool((policy.trainable()[name] != before[name]).any()), "small steps add up until they show"


def test_gradients_of_bfloat16_weights_accumulate_in_float32():
    """Four micro-batches and one give the same gradient norm to float32 accuracy."""

    def norm(micro_tokens):
        policy = tiny_llama(dtype=torch.bfloat16)
        learner = Learner(policy, OptimizerConfig(clip=1e9, micro_tokens=micro_tokens), steps=1)
        return learner.step(_batch(policy)).grad_norm

    assert norm(1) == pytest.approx(norm(10_000), rel=0.02)


def test_the_norm_is_clipped_before_the_step():
    policy = TabularPolicy()
    learner = Learner(policy, OptimizerConfig(lr=1.0, clip=1e-3, betas=(0.0, 0.0), eps=1.0), steps=1)
    learner.step(_one_token(policy))
    # with betas of 0 and eps of 1 the step is g / (|g| + 1), and |g| is at most the clipped norm
    assert policy.table.weight.detach().abs().max().item() <= 1e-3


def test_nothing_to_learn_moves_nothing():
    policy = tiny_llama()
    learner = Learner(policy, OptimizerConfig(lr=1e-2, weight_decay=0.1), steps=3)
    learner.step(_batch(policy))
    before = [p.detach().clone() for p in policy.trainable().values()]
    flat = pack([_group(policy, ([8], 1.0), ([9], 1.0))], build("grpo", {}))
    update = learner.step(flat)
    assert (update.tokens, update.version) == (0, 2)
    for old, new in zip(before, policy.trainable().values(), strict=True):
        assert torch.equal(old, new), "momentum and decay stay still as well"


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_refused_and_nothing_moves(poison):
    policy = tiny_llama()
    learner = Learner(policy, OptimizerConfig(lr=1e-2), steps=3)
    learner.step(_batch(policy))
    batch = _batch(policy)
    state = {name: t.clone() for name, t in learner.state().items()}
    (pull,) = batch.pulls
    poisoned = dataclasses.replace(pull, weight_T=torch.full_like(pull.weight_T, poison))
    with pytest.raises(NonFiniteError, match=r"step 1 was refused.*untouched"):
        learner.step(dataclasses.replace(batch, pulls=(poisoned,)))
    for name, tensor in learner.state().items():
        assert torch.equal(tensor, state[name]), name
    assert learner.step(batch).version == 2, "and the next good batch is learnt from"


def test_state_and_restore_continue_bit_for_bit():
    straight, half = tiny_llama(), tiny_llama()
    config = OptimizerConfig(lr=1e-2, schedule="cosine", warmup=1)
    batches = [_batch(tiny_llama(), "grpo"), _batch(tiny_llama(), "rloo"), _batch(tiny_llama(), "dr_grpo")]
    one, two = Learner(straight, config, steps=3), Learner(half, config, steps=3)
    for batch in batches:
        one.step(batch)
    two.step(batches[0])
    saved = {name: tensor.clone() for name, tensor in two.state().items()}
    resumed_policy = tiny_llama(seed=5)
    resumed = Learner(resumed_policy, config, steps=3)
    resumed.restore(saved, version=1)
    for batch in batches[1:]:
        resumed.step(batch)
    for name, parameter in straight.trainable().items():
        assert torch.equal(parameter, resumed_policy.trainable()[name]), name


def test_a_kl_term_pulls_back_to_the_reference():
    """Rewards all equal, so only the KL pulls: the policy goes back to where the reference is."""
    policy = TabularPolicy()
    reference = policy.reference()
    with torch.no_grad():
        policy.table.weight[8, 7] = 2.0
    learner = Learner(policy, OptimizerConfig(lr=0.05), steps=100, reference=reference)
    groups = [_group(policy, ([8], 1.0), ([9], 1.0))]
    algorithm = build("grpo", {"kl": 0.5})
    batch = pack(learner.annotate(groups, algorithm, 1.0), algorithm)
    first = learner.step(_on_policy(policy, batch))
    for _ in range(60):
        last = learner.step(_on_policy(policy, batch))
    assert first.kl is not None and last.kl is not None
    assert last.kl < first.kl / 5


def test_diagnostics_on_policy():
    policy = tiny_llama()
    update = Learner(policy, OptimizerConfig(), steps=1).step(_batch(policy))
    assert update.mismatch == pytest.approx(0.0, abs=1e-6)
    assert update.ess == pytest.approx(1.0, abs=1e-6)
    assert update.clip_fraction == 0
    assert update.tokens == 11


def test_clipped_tokens_are_counted():
    """Behavior log-probs of -4 on uniform-ish logits of ~-4.4 leave ratios near 0.7: below the range,
    and with a negative advantage clipped."""
    policy = TabularPolicy()
    batch = pack([_group(policy, ([8], 1.0), ([9], 0.0))], build("grpo", {}))
    low = torch.log(torch.tensor(1 / len(policy.tokenizer))).item()
    batch = dataclasses.replace(batch, behavior_logp_T=torch.tensor([low, low + 1.0]))
    assert Learner(policy, OptimizerConfig(), steps=1).step(batch).clip_fraction == 0.5


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_schedules_by_hand(schedule, expected):
    config = OptimizerConfig(lr=1.0, warmup=2, schedule=schedule)
    assert [learning_rate(config, step, 6) for step in range(6)] == pytest.approx(expected, abs=1e-6)
