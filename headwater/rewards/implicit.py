"""DPO's implicit reward: what a policy thinks of an answer that its reference did not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headwater.data.pack import everything
from headwater.data.render import Renderer
from headwater.errors import ConfigError
from headwater.models.forward import score
from headwater.models.load import ModelConfig, load
from headwater.models.policy import Policy
from headwater.rewards.source import without
from headwater.types import Algorithm, Group, Signal, Trajectory

_READ = Algorithm(name="implicit", terms=(), needs=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Implicit:
    """beta · (log pi(y|x) - log ref(y|x)), in nats times beta, over the tokens of the answer and its end of
    turn (Rafailov et al. 2023, arXiv:2305.18290; as a reward for the next round of DPO: Chen et al. 2024,
    arXiv:2406.09760). `length_normalised` divides by the number of those tokens.

    It is known up to a constant of the prompt, so it compares answers to the same prompt and no others. Each
    answer is written as the policy's own chat template has it.
    """

    name: str
    policy: Policy
    reference: Policy
    renderer: Renderer
    beta: float = 0.1
    length_normalised: bool = False
    offers: frozenset[str] = frozenset({"reward"})
    needs: frozenset[str] = frozenset({"prompt"})
    compares: bool = False

    async def __call__(self, group: Group) -> tuple[Signal, ...]:
        said = [self._unread(trajectory) for trajectory in group.trajectories]
        read = [i for i, signal in enumerate(said) if signal is None]
        if read:
            rewards = self._rewards(group, [group.trajectories[i].text for i in read])
            for i, reward in zip(read, rewards, strict=True):
                said[i] = Signal(source=self.name, name="reward", values=(reward,))
        return tuple(signal for signal in said if signal is not None)

    def _unread(self, trajectory: Trajectory) -> Signal | None:
        if trajectory.stop == "error":
            return without(self.name, "failed", "the episode ended in an error")
        if not trajectory.text.strip():
            return without(self.name, "abstained", "there is no answer to read")
        return None

    def _rewards(self, group: Group, texts: list[str]) -> list[float]:
        shown = [self.renderer.demonstration(replace(group.task, completion=text, steps=())) for text in texts]
        batch, owners = everything([replace(group, trajectories=tuple(shown))], _READ)
        gap_T = score(self.policy, batch) - score(self.reference, batch)
        count_S = torch.bincount(batch.sequence_T, minlength=len(owners))
        gap_S = torch.zeros(len(owners), dtype=torch.float64).index_add_(0, batch.sequence_T, gap_T.double())
        return (self.beta * (gap_S / count_S if self.length_normalised else gap_S)).tolist()


def implicit(
    *, model: str, reference: str, beta: float = 0.1, length_normalised: bool = False, dtype: str = "auto"
) -> Implicit:
    """DPO's implicit reward, beta · (log pi - log ref); settings: model, reference, beta, length_normalised.

    `model` and `reference` are run folders or any model names, and must read and write the same tokens. Raises
    ConfigError or ModelError where there are no such models.
    """
    if not (math.isfinite(beta) and beta > 0):
        raise ConfigError(f"The reward 'implicit' has beta = {beta}, wanted a number above 0 (0.1 is usual).")
    policy, ref = _frozen(model, dtype), _frozen(reference, dtype)
    if policy.head_VD.shape[0] != ref.head_VD.shape[0] or policy.tokenizer.get_vocab() != ref.tokenizer.get_vocab():
        raise ConfigError(
            f"The reference {reference} reads and writes other tokens than {model}, so their log-probs cannot be "
            "compared. Name a model of the same family."
        )
    renderer = Renderer(policy.tokenizer, "auto", policy.end_of_turn_ids)
    return Implicit(
        name="implicit",
        policy=policy,
        reference=ref,
        renderer=renderer,
        beta=beta,
        length_normalised=length_normalised,
    )


def _frozen(name: str, dtype: str) -> Policy:
    folder = Path(name)
    if (folder / "recipe.json").is_file():
        if not (folder / "model").is_dir():
            raise ConfigError(f"{folder} has no exported model yet: the run has not ended. Finish it with --resume.")
        name = str(folder / "model")
    policy = load(ModelConfig.model_validate({"name": name, "dtype": dtype}))
    policy.module.requires_grad_(False)
    return policy
