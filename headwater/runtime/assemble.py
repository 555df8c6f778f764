"""A recipe -> the parts of a run, wired together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headwater.algorithms import FROM_MODELS, choose
from headwater.config import Recipe
from headwater.data.examples import example, offered
from headwater.data.render import Renderer
from headwater.data.tasks import fit, load_tasks
from headwater.engines.torch_engine import TorchEngine
from headwater.errors import ConfigError
from headwater.models.heads import Critic
from headwater.models.load import load, load_tokenizer
from headwater.models.policy import Policy
from headwater.rewards.registry import build_source
from headwater.rewards.source import Source, judge
from headwater.rollout.episode import rollout
from headwater.runtime.learner import Learner
from headwater.runtime.stream import visits
from headwater.types import Algorithm, Group, Sampling, Task


@dataclass(slots=True, kw_only=True)
class Parts:
    """Everything a run is made of."""

    recipe: Recipe
    policy: Policy
    renderer: Renderer
    tasks: list[Task]
    held_out: list[Task]
    sources: list[tuple[Source, float]]
    algorithm: Algorithm
    engine: TorchEngine
    learner: Learner
    notes: list[str]

    async def produce(self, step: int) -> list[Group]:
        """Judged groups of one step: examples as they are, or episodes sampled and judged."""
        recipe = self.recipe
        if not self.algorithm.online:
            chosen = visits(self.tasks, step, recipe.batch.prompts, recipe.run.seed)
            return [example(task, self.renderer, self.algorithm.needs) for task, _ in chosen]
        keep = self.algorithm.keep
        kept: list[Group] = []
        spare: list[Group] = []
        for turn in range(recipe.batch.rounds if keep else 1):
            groups = await self._sample(step + turn * recipe.run.steps)
            kept.extend(group for group in groups if keep is None or keep(group))
            spare.extend(group for group in groups if keep is not None and not keep(group))
            if len(kept) >= recipe.batch.prompts:
                break
        return [*kept, *spare][: recipe.batch.prompts]

    async def _sample(self, step: int) -> list[Group]:
        recipe = self.recipe
        chosen = visits(self.tasks, step, recipe.batch.prompts, recipe.run.seed)
        groups = await rollout(
            self.engine,
            self.renderer,
            chosen,
            self.sampling,
            recipe.batch.siblings,
            recipe.run.seed,
            greedy=self.algorithm.baseline,
        )
        return await judge(groups, self.sources)

    @property
    def sampling(self) -> Sampling:
        """How training episodes are sampled."""
        return self.recipe.sampling.build()


def offers(sources: Sequence[tuple[Source, float]], tasks: Sequence[Task]) -> frozenset[str]:
    """Signals that a run can have: what its sources give, its data, and its own models."""
    return FROM_MODELS | offered(tasks) | {signal for source, _ in sources for signal in source.offers}


def assemble(recipe: Recipe) -> Parts:
    """Build a run. Cheap checks come first, so that a wrong recipe fails before a model is loaded."""
    notes: list[str] = []
    sources = [(build_source(config), config.weight) for config in recipe.rewards]
    tasks = load_tasks(recipe.tasks)
    algorithm = choose(recipe.algorithm.name, recipe.algorithm.settings, offers(sources, tasks))
    _check_tasks(tasks, sources, algorithm)
    held_out = load_tasks(recipe.evaluation.tasks)[: recipe.evaluation.limit] if recipe.evaluation.tasks else []
    torch.manual_seed(recipe.run.seed)
    policy = load(recipe.model)
    renderer = Renderer(policy.tokenizer, recipe.model.chat_template, policy.end_of_turn_ids)
    tasks, changed = fit(tasks, renderer, recipe.tasks)
    if changed:
        notes.append(
            f"{changed} tasks were longer than {recipe.tasks.max_prompt_tokens} tokens ({recipe.tasks.too_long})."
        )
    reference = _reference(recipe, policy) if "ref_logp" in algorithm.needs else None
    critic = None
    if algorithm.head is not None:
        own = algorithm.head == "before" and recipe.critic.trunk == "own"
        critic = Critic(policy, classes=algorithm.classes, own_trunk=own)
    # Running ahead needs weights of its own; in turn with the learner, sampling shares the learner's
    # unless a copy is faster.
    sampler = policy.sampler() or (copy.deepcopy(policy) if recipe.run.max_lag > 0 else policy)
    learner = Learner(policy, recipe.optimizer, steps=recipe.run.steps, reference=reference, critic=critic)
    return Parts(
        recipe=recipe,
        policy=policy,
        renderer=renderer,
        tasks=tasks,
        held_out=held_out,
        sources=sources,
        algorithm=algorithm,
        engine=TorchEngine(sampler),
        learner=learner,
        notes=notes,
    )


def _reference(recipe: Recipe, policy: Policy) -> Policy:
    """The frozen model to compare with: one that the recipe names, or the policy as it is now."""
    if recipe.reference is None:
        return policy.reference()
    other = load(recipe.reference)
    if other.head_VD.shape[0] != policy.head_VD.shape[0] or other.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ConfigError(
            f"The reference {recipe.reference.name} reads and writes other tokens than {recipe.model.name}, so their "
            "log-probs cannot be compared. Name a model of the same family."
        )
    other.module.requires_grad_(False)
    return other


def plan(recipe: Recipe) -> list[tuple[str, str]]:
    """What a run would do, as (name, value), after every check that needs no weights: rewards, tasks,
    algorithm, tokenizer and chat template, and the length of every prompt."""
    sources = [(build_source(config), config.weight) for config in recipe.rewards]
    tasks = load_tasks(recipe.tasks)
    algorithm = choose(recipe.algorithm.name, recipe.algorithm.settings, offers(sources, tasks))
    _check_tasks(tasks, sources, algorithm)
    held_out = load_tasks(recipe.evaluation.tasks)[: recipe.evaluation.limit] if recipe.evaluation.tasks else []
    tokenizer, ends = load_tokenizer(recipe.model)
    renderer = Renderer(tokenizer, recipe.model.chat_template, ends)
    tasks, _ = fit(tasks, renderer, recipe.tasks)
    first = renderer.prompt(tasks[0])
    siblings = recipe.batch.siblings if algorithm.online else 1
    batch, run, lora = recipe.batch, recipe.run, recipe.model.lora
    pace = "sampling and learning in turn" if run.max_lag == 0 else f"sampling at most {run.max_lag} steps ahead"
    exists = " (exists: use --resume, or another run.name)" if run.path.exists() else ""
    answers = f"{batch.prompts} prompts x {siblings} = {batch.prompts * siblings} answers"
    return [
        ("model", f"{recipe.model.name} ({f'LoRA of rank {lora.rank}' if lora else 'all weights'})"),
        ("algorithm", f"{algorithm.name}, needs {', '.join(sorted(algorithm.needs))}"),
        ("signals", ", ".join(sorted(offers(sources, tasks)))),
        ("tasks", f"{len(tasks)} from {recipe.tasks.source}; {len(held_out)} held out"),
        ("first prompt", f"{len(first.tokens)} tokens: {first.text!r}"),
        ("a step", f"{answers} of at most {recipe.sampling.max_tokens} tokens"),
        ("steps", f"{run.steps} ({run.steps * batch.prompts / len(tasks):.2g} epochs), {pace}"),
        ("run folder", f"{run.path}{exists}"),
    ]


def _check_tasks(tasks: Sequence[Task], sources: Sequence[tuple[Source, float]], algorithm: Algorithm) -> None:
    if not algorithm.online:
        return
    for source, _ in sources:
        missing = [task.id for task in tasks if "answer" in source.needs and task.answer is None]
        if missing:
            raise ConfigError(
                f"The reward '{source.name}' compares with an answer, and {len(missing)} of {len(tasks)} tasks have "
                f"none (first: {missing[0]}). Name the field that holds it in tasks.answer, or use another reward."
            )
