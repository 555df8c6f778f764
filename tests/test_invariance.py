"""For every row of the table: its gradient depends on nothing that it should not depend on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from headwater.algorithms import TABLE, build
from headwater.config import OptimizerConfig
from headwater.data.pack import everything, pack
from headwater.models.fakes import tiny_llama
from headwater.models.forward import score
from headwater.models.heads import Critic
from headwater.runtime.learner import Learner
from headwater.types import Group, Signal, Span, Task, Trajectory

ONLINE = [name for name, row in TABLE.items() if {"reward", "step_reward"} & row.needs]
COMPARING = [name for name in ONLINE if TABLE[name].make({}).compares]
LENGTH = 8
NEAR = {"rtol": 0.0, "atol": 3e-6}  # of gradients scaled to a largest entry of 1


def _signals(chance, turns, *, flat, place):
    """What a trajectory may be told. `place` is its place among its siblings."""
    count = sum(turns)
    reward = 0.5 if flat else float(chance.random() < 0.5) + 0.1 * place
    steps = tuple(0.5 if flat else chance.choice([-1.0, 0.0, 1.0]) for _ in range(min(2, count)))
    ends = (0, count - 1)[: len(steps)] if count > 1 else (0,)
    return {
        "reward": Signal(source="t", name="reward", values=(reward,)),
        "preference": Signal(source="t", name="preference", values=(1.0 - place,)),
        "label": Signal(source="t", name="label", values=(float(place % 2),)),
        "step_reward": Signal(source="t", name="step_reward", values=steps, level="step", ends=ends),
        "step_label": Signal(source="t", name="step_label", values=steps, level="step", ends=ends),
    }


def _trajectory(chance, prompt, needs, *, flat=False, place=0, turns=None, agent="policy"):
    turns = turns or tuple(chance.randint(1, 4) for _ in range(chance.randint(1, 2)))
    sampled = not needs & {"demonstration", "preference", "label", "step_label"}
    spans = [Span(author="prompt", tokens=prompt, text="")]
    for k, count in enumerate(turns):
        if k:
            spans.append(Span(author="world", tokens=(3, 4), text="w"))
        tokens = tuple(chance.randrange(2, 60) for _ in range(count))
        logps = (-4.0,) * count if sampled else None
        spans.append(
            Span(author="policy", tokens=tokens, text="a" * count, logps=logps, version=0 if sampled else None)
        )
    told = _signals(chance, turns, flat=flat, place=place)
    given = tuple(signal for name, signal in told.items() if name in needs)
    return Trajectory(task_id="t", spans=tuple(spans), signals=given, agent=agent)


def _groups(algorithm, *, seed=0, flat=(), turns=None, count=3):
    """Groups with ragged prompts and answers, and all that the algorithm needs to be told but by models."""
    chance = random.Random(seed)
    siblings = 2 if "preference" in algorithm.needs else 1 if "demonstration" in algorithm.needs else 4
    found = []
    for g in range(count):
        prompt = tuple(chance.randrange(2, 60) for _ in range(chance.randint(1, 6)))
        told = [
            _trajectory(chance, prompt, algorithm.needs, flat=g in flat, place=place, turns=turns)
            for place in range(siblings)
        ]
        if algorithm.baseline:
            told.append(_trajectory(chance, prompt, algorithm.needs, agent="greedy"))
        found.append(Group(task=Task(id=f"t{g}", prompt="p"), trajectories=tuple(told)))
    return found


class Bench:
    """A small policy with a critic and a reference, and the gradient of one step of a row."""

    def __init__(self, name, *, micro_tokens=10_000, **settings):
        self.algorithm = build(name, settings)
        policy = tiny_llama(seed=0)
        critic = None
        if self.algorithm.head is not None:
            critic = Critic(policy, classes=self.algorithm.classes)
            chance = torch.Generator().manual_seed(1)
            critic.weight_CD.data.normal_(0, 0.3, generator=chance)
        config = OptimizerConfig(lr=1e-3, clip=1e12, micro_tokens=micro_tokens)
        self.learner = Learner(policy, config, steps=1, reference=tiny_llama(seed=2), critic=critic)

    def told(self, groups, *, off=0.1):
        """The groups with behaviour log-probs that are `off` from the learner's, and the models' signals."""
        batch, owners = everything(groups, replace(self.algorithm, head=None))
        logp_T = score(self.learner.policy, batch) + off * torch.sin(torch.arange(len(batch.target_T)) * 1.7)
        left = iter(logp_T.tolist())
        known = {id(owner): self._sampled(owner, left) for owner in owners}
        groups = [replace(g, trajectories=tuple(known.get(id(t), t) for t in g.trajectories)) for g in groups]
        return self.learner.annotate(groups, self.algorithm, 1.0)

    @staticmethod
    def _sampled(trajectory, left):
        spans = []
        for span in trajectory.spans:
            if span.author == "policy":
                logps = tuple(next(left) for _ in span.tokens)
                span = replace(span, logps=logps) if span.logps is not None else span
            spans.append(span)
        return replace(trajectory, spans=tuple(spans))

    def gradient(self, groups):
        """Flat, in float32; zeros where nothing pulls."""
        batch = pack(groups, self.algorithm, length=LENGTH)
        self.learner.step(batch)
        grads = [w.grad if w.grad is not None else torch.zeros_like(w) for w in self.learner.masters.weights.values()]
        return torch.cat([g.flatten() for g in grads]).clone()


def _scaled(found, wanted):
    size = wanted.abs().max()
    assert size > 0, "a gradient of zero proves nothing"
    return found / size, wanted / size


@pytest.mark.parametrize("name", TABLE)
def test_no_gradient_depends_on_how_a_step_is_cut_or_ordered(name):
    def bench(**settings):
        return Bench(name, **settings)

    groups = bench().told(_groups(bench().algorithm))
    wanted = bench().gradient(groups)
    for budget in (1, 12, 30):
        torch.testing.assert_close(*_scaled(bench(micro_tokens=budget).gradient(groups), wanted), **NEAR)
    torch.testing.assert_close(*_scaled(bench().gradient(groups[::-1]), wanted), **NEAR)
    turned = [replace(group, trajectories=group.trajectories[::-1]) for group in groups]
    torch.testing.assert_close(*_scaled(bench().gradient(turned), wanted), **NEAR)


@pytest.mark.parametrize("name", COMPARING)
def test_a_group_whose_rewards_are_equal_is_exactly_nothing(name):
    bench = Bench(name)
    groups = bench.told(_groups(bench.algorithm, flat={1}, turns=(3,)))
    assert 1 not in pack(groups, bench.algorithm, length=LENGTH).prefix_S
    flat = bench.told(_groups(bench.algorithm, flat={0, 1, 2}, turns=(3,)))
    assert torch.count_nonzero(bench.gradient(flat)) == 0


@pytest.mark.parametrize("name", ONLINE)
def test_who_could_not_be_judged_is_not_there(name):
    bench = Bench(name)
    groups = bench.told(_groups(bench.algorithm))
    wanted = bench.gradient(groups)
    stranger = groups[0].trajectories[0]
    unjudged = tuple(
        replace(signal, status="failed", values=(), ends=()) if signal.name in ("reward", "step_reward") else signal
        for signal in stranger.signals
    )
    more = replace(groups[0], trajectories=(*groups[0].trajectories, replace(stranger, signals=unjudged)))
    found = Bench(name).gradient([more, *groups[1:]])
    torch.testing.assert_close(*_scaled(found, wanted), **NEAR)


def _same(one, other, *, factor=1.0, off=0.0, turns=None):
    """Whether two rows have one gradient, up to a factor that is known."""
    first, second = Bench(**one), Bench(**other)
    groups = Bench(**one).told(_groups(first.algorithm, turns=turns), off=off)
    groups = second.learner.annotate(groups, second.algorithm, 1.0)
    found = first.gradient(groups)
    torch.testing.assert_close(*_scaled(found, second.gradient(groups) * factor), rtol=0.0, atol=1e-5)


def test_rloo_is_dr_grpo_by_a_constant():
    # leave-one-out is the centred reward times G/(G-1); a fixed length divides by LENGTH
    _same({"name": "rloo"}, {"name": "dr_grpo"}, factor=4 / 3 * LENGTH)


def test_tdpo_2_without_its_term_is_dpo():
    _same({"name": "tdpo2", "alpha": 0.0}, {"name": "dpo"})


def test_sequence_ratios_of_answers_of_one_token_are_ratios_of_tokens():
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    _same({"name": "gspo", **clip}, {"name": "grpo", **clip}, off=0.3, turns=(1,))


def test_grpo_on_the_policy_that_sampled_has_the_gradient_of_the_likelihood():
    # ratios are 1: no bound of a clip can matter
    _same({"name": "grpo", "clip_low": 0.2, "clip_high": 0.2}, {"name": "grpo", "clip_low": 0.9, "clip_high": 0.9})
