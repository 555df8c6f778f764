"""A scalar head on a model: what a critic or a reward model says at each token."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headwater.errors import ModelError
from headwater.models.layout import Tree
from headwater.models.policy import CausalPolicy, Policy, quiet

HEAD = "score.safetensors"


class _Row(Protocol):
    """A flat row of tokens with its layout, as in forward.Micro."""

    @property
    def tokens_N(self) -> Tensor: ...

    @property
    def tree(self) -> Tree: ...


class Critic:
    """A linear head of `classes` numbers, [C, D], without a bias, zero at first: it says 0 of everything
    until it is trained. It stands on the policy's own trunk, or on a trunk of its own that starts as a
    copy of the policy's (twice the memory; neither disturbs the other)."""

    def __init__(self, policy: Policy, *, classes: int = 1, own_trunk: bool = False) -> None:
        head_VD = policy.head_VD
        self.trunk = _trunk(policy) if own_trunk else None
        self.weight_CD = nn.Parameter(torch.zeros(classes, head_VD.shape[1], device=head_VD.device))

    @property
    def shared(self) -> bool:
        """Whether it reads the policy's own hidden states."""
        return self.trunk is None

    def value(self, hidden_ND: Tensor | None, row: _Row) -> Tensor:
        """Values at each fed token, [N, C] in float32. `hidden_ND` are the policy's hidden states."""
        if self.trunk is not None:
            hidden_ND = self.trunk.hidden(row.tokens_N, row.tree.positions_N, row.tree)
        assert hidden_ND is not None, "a head on the policy's trunk needs its hidden states"
        return hidden_ND.float() @ self.weight_CD.T

    def score(self, value_NC: Tensor) -> Tensor:
        """One number of each row's classes, [N]: the value itself, or for three classes (bad, neutral,
        good) p(good) - p(bad)."""
        if value_NC.shape[-1] == 1:
            return value_NC[:, 0]
        share_NC = torch.softmax(value_NC, -1)
        return share_NC[:, -1] - share_NC[:, 0]

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that learn, by name."""
        own = self.trunk.trainable() if self.trunk is not None else {}
        return {"score.weight": self.weight_CD} | {f"critic.{name}": p for name, p in own.items()}


def _trunk(policy: Policy) -> Policy:
    trunk = copy.deepcopy(policy)
    head = trunk.head_VD
    tied = any(p is head for name, p in trunk.module.named_parameters() if "embed" in name)
    if not tied:
        head.requires_grad_(False)  # nothing reads the language head of a critic
    return trunk


def export_reward_model(policy: Policy, critic: Critic, folder: Path, facts: dict[str, float]) -> None:
    """Write a folder that `load_reward_model` reads, and transformers too, as a sequence classifier.
    `facts` say how scores are to be read, such as their mean and std on what was trained on."""
    folder.mkdir(parents=True, exist_ok=True)
    policy.export(folder)
    weight = critic.weight_CD.detach().float().cpu().contiguous()
    save_file({"score.weight": weight}, folder / HEAD)
    (folder / "reward_model.json").write_text(json.dumps({"classes": len(weight), **facts}, indent=2))
    if isinstance(policy, CausalPolicy):
        _as_classifier(policy, weight, folder)


def _as_classifier(policy: CausalPolicy, weight_CD: Tensor, folder: Path) -> None:
    """The same weights as AutoModelForSequenceClassification takes them, in a folder of their own name."""
    from transformers import AutoModelForSequenceClassification

    with quiet():
        config = copy.deepcopy(policy.model.config)
        config.num_labels = len(weight_CD)
        if config.pad_token_id is None:
            config.pad_token_id = policy.tokenizer.pad_token_id or policy.tokenizer.eos_token_id
        model = AutoModelForSequenceClassification.from_config(config, dtype=policy.dtype)
        base = {name: t for name, t in _merged(policy).items() if name.startswith("model.")}
        missing, unexpected = model.load_state_dict(base, strict=False)
        if unexpected or [name for name in missing if name != "score.weight"]:
            raise ModelError(f"{policy.name} has no form as a sequence classifier in transformers: {missing[:3]}.")
        model.score.weight.data.copy_(weight_CD)
        model.save_pretrained(folder / "classifier")
        policy.tokenizer.save_pretrained(folder / "classifier")


def _merged(policy: CausalPolicy) -> dict[str, Tensor]:
    model = policy.merged() if policy.lora else policy.model
    return model.state_dict()


def load_critic(policy: Policy, folder: Path) -> tuple[Critic, dict[str, float]]:
    """The head of an exported reward model, on `policy`, which must be loaded from the same folder."""
    path = folder / HEAD
    if not path.is_file():
        raise ModelError(
            f"{folder} is no reward model: it has no {HEAD}. Train one with a row such as bradley_terry, and "
            "name its run's model folder."
        )
    facts = json.loads((folder / "reward_model.json").read_text())
    weight = load_file(path)["score.weight"]
    critic = Critic(policy, classes=len(weight))
    critic.weight_CD.data.copy_(weight)
    critic.weight_CD.requires_grad_(False)
    return critic, {k: float(v) for k, v in facts.items()}
