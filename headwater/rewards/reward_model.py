"""A trained reward model as a source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headwater.data.pack import everything
from headwater.data.render import Renderer
from headwater.errors import ConfigError
from headwater.models.forward import appraise
from headwater.models.heads import Critic, load_critic
from headwater.models.load import ModelConfig, load
from headwater.models.policy import Policy
from headwater.types import Algorithm, Group, Signal, Trajectory

_READ = Algorithm(name="reward_model", terms=(), needs=frozenset(), head="after")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    """A model with a scalar head that was trained on preferences or labels. Each answer is read as the
    model's own chat template writes it, with an end of turn, and scored at its last token."""

    name: str
    policy: Policy
    critic: Critic
    renderer: Renderer
    mean: float = 0.0
    std: float = 1.0
    offers: frozenset[str] = frozenset({"reward"})
    needs: frozenset[str] = frozenset({"prompt"})
    compares: bool = False

    async def __call__(self, group: Group) -> tuple[Signal, ...]:
        read = [i for i, trajectory in enumerate(group.trajectories) if trajectory.stop != "error"]
        shown = [
            self.renderer.demonstration(replace(group.task, completion=group.trajectories[i].text, steps=()))
            for i in read
            if group.trajectories[i].text.strip()
        ]
        scores = iter(self._scores(group, shown))
        return tuple(self._signal(trajectory, scores) for trajectory in group.trajectories)

    def _signal(self, trajectory: Trajectory, scores) -> Signal:
        if trajectory.stop == "error":
            return Signal(source=self.name, name="reward", status="failed", note="the episode ended in an error")
        if not trajectory.text.strip():
            return Signal(source=self.name, name="reward", status="abstained", note="there is no answer to read")
        return Signal(source=self.name, name="reward", values=((next(scores) - self.mean) / self.std,))

    def _scores(self, group: Group, shown: list[Trajectory]) -> list[float]:
        if not shown:
            return []
        batch, owners = everything([replace(group, trajectories=tuple(shown))], _READ)
        _, value_T = appraise(self.policy, self.critic, batch)
        ends_S = torch.bincount(batch.sequence_T, minlength=len(owners)).cumsum(0) - 1
        return value_T[ends_S].tolist()


def reward_model(*, model: str, normalise: bool = True, dtype: str = "auto") -> RewardModel:
    """The score of a trained reward model; settings: model (a run's model folder), normalise.

    `normalise` subtracts the mean and divides by the standard deviation of scores that the model had at
    the end of its training. Raises ConfigError or ModelError where there is no such model.
    """
    folder = Path(model)
    folder = folder / "model" if (folder / "recipe.json").is_file() else folder
    config = ModelConfig.model_validate({"name": str(folder), "dtype": dtype})
    if not folder.is_dir():
        raise ConfigError(
            f"There is no reward model at {folder.absolute()}. Train one (see recipes/reward_model.toml)."
        )
    policy = load(config)
    policy.module.requires_grad_(False)
    critic, facts = load_critic(policy, folder)
    scale = (facts.get("mean", 0.0), facts.get("std", 1.0)) if normalise else (0.0, 1.0)
    return RewardModel(
        name="reward_model",
        policy=policy,
        critic=critic,
        renderer=Renderer(policy.tokenizer, "auto", policy.end_of_turn_ids),
        mean=scale[0],
        std=scale[1] or 1.0,
    )
