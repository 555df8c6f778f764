"""A policy: anything that turns flat tokens into hidden states and has a head over a vocabulary."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from headwater.errors import ModelError
from headwater.models.layout import Layout

ATTENTION = "headwater"
"""The name under which our attention is registered with transformers."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    layout: Layout | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer: hands the call to the layout that travels along."""
    assert layout is not None, "a model with Headwater's attention must be run through a Policy"
    for unsupported in ("softcap", "s_aux"):
        if extra.get(unsupported) is not None:
            raise ModelError(
                f"This model's attention uses '{unsupported}', which Headwater's shared-prefix attention does "
                f"not compute. Use a model without it (Llama, Qwen, Mistral and SmolLM families have none)."
            )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    return layout.attend(layer, query, key, value, scale), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


class Policy(ABC):
    """The model as the rest of Headwater sees it. Runs flat: N tokens, no batch axis, no padding."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    end_of_turn_ids: frozenset[int]
    module: nn.Module
    softcap: float | None = None
    lora: bool = False

    @abstractmethod
    def hidden(self, tokens_N: Tensor, positions_N: Tensor, layout: Layout) -> Tensor:
        """Hidden state at each token, `[N, D]`."""

    @property
    @abstractmethod
    def head_VD(self) -> Tensor:
        """Rows that turn a hidden state into logits over the vocabulary, `[V, D]`."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write a folder that stands on its own (for real models: one that plain transformers loads)."""

    def reference(self) -> Policy:
        """A frozen policy with the weights of now: what KL terms compare with."""
        frozen = copy.deepcopy(self)
        frozen.module.requires_grad_(False)
        return frozen

    def sampler(self) -> Policy | None:
        """A copy that samples faster than the policy itself, if there is one; it takes the weights that
        `sampler_weights` gives. None: sample on this policy."""
        return None

    def sampler_weights(self) -> dict[str, Tensor]:
        """What a copy for sampling must be given to be up to date, by name: a snapshot."""
        return {name: p.detach().clone() for name, p in self.trainable().items()}

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that learn, by name; tied weights once."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def checkpoint_activations(self) -> None:
        """Recompute each layer in backward instead of keeping its activations."""
        raise ModelError(f"Activation checkpointing is not available for {self.name}; set it to false.")

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head_VD.device

    @property
    def dtype(self) -> torch.dtype:
        """What the forward pass computes in."""
        return self.head_VD.dtype


def _keep_residual_in_float32(model: PreTrainedModel) -> None:
    """Matrix products in the model's dtype, everything between them in float32: what autocast does,
    without casting weights. With a bfloat16 residual stream the last bit of one product, which depends
    on how many rows ran together, moved log-probs by 0.026 nats on average over 30 layers.
    """

    def to_weight(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        weight: Tensor = module.weight  # pyright: ignore[reportAssignmentType]
        return (inputs[0].to(weight.dtype), *inputs[1:])

    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output.float())
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(to_weight)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Loading bars of other libraries say nothing that our own progress does not."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


class CausalPolicy(Policy):
    """A causal language model of transformers, with our attention and optionally LoRA (peft)."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        end_of_turn_ids: frozenset[int],
    ) -> None:
        self.name, self.tokenizer, self.end_of_turn_ids = name, tokenizer, end_of_turn_ids
        self.module: nn.Module = model
        self.model = model
        model.set_attn_implementation(ATTENTION)
        model.eval()
        if model.dtype != torch.float32:
            _keep_residual_in_float32(model)
        text = model.config.get_text_config()
        self.softcap = getattr(text, "final_logit_softcapping", None)
        kinds = set(getattr(text, "layer_types", None) or ())
        if unsupported := kinds - {"full_attention", "sliding_attention"}:
            raise ModelError(
                f"{name} has layers of kind {', '.join(sorted(unsupported))}; Headwater runs models whose layers "
                "are plain causal attention. Choose such a model."
            )
        slides = "sliding_attention" in kinds or (not kinds and bool(getattr(text, "use_sliding_window", True)))
        window: int | None = getattr(text, "sliding_window", None) if slides else None
        self.longest = min(window or text.max_position_embeddings, text.max_position_embeddings)

    def add_lora(self, rank: int, alpha: int, targets: str | list[str], seed: int = 0) -> None:
        """Freeze the model and add low-rank adapters that learn in float32."""
        from peft import LoraConfig, get_peft_model

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
            self.module = get_peft_model(self.model, config)
        self.module.eval()
        self.lora = True

    def hidden(self, tokens_N: Tensor, positions_N: Tensor, layout: Layout) -> Tensor:
        """Hidden state at each token, `[N, D]`."""
        decoder = self.model.get_decoder()
        out = decoder(input_ids=tokens_N[None], position_ids=positions_N[None], use_cache=False, layout=layout)
        return out.last_hidden_state[0]

    @property
    def head_VD(self) -> Tensor:
        """The language-model head."""
        head = self.model.get_output_embeddings()
        scale = getattr(self.model.config, "logit_scale", None)
        assert head is not None, f"{self.name} has no language-model head"
        weight: Tensor = head.weight  # pyright: ignore[reportAssignmentType]
        return weight if scale is None else weight * scale

    def reference(self) -> Policy:
        """With LoRA the frozen policy is this one with its adapters switched off: no second copy."""
        return AdapterOff(self) if self.lora else super().reference()

    def sampler(self) -> Policy | None:
        """With LoRA in float32, a copy with the adapters merged into the weights: decoding through
        adapters was measured to take 1.5 times as long. In bfloat16 merging would round most of what the
        adapters have learnt away, so the policy samples itself."""
        if not self.lora or self.dtype != torch.float32:
            return None
        return CausalPolicy(self.name, self.merged(), self.tokenizer, self.end_of_turn_ids)

    @torch.no_grad()
    def sampler_weights(self) -> dict[str, Tensor]:
        """For a merged copy the adapted weights, W + scale · B A; else the trainable parameters."""
        if not self.lora or self.dtype != torch.float32:
            return super().sampler_weights()
        from peft.tuners.lora import LoraLayer

        found: dict[str, Tensor] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, LoraLayer):
                base: Tensor = module.get_base_layer().weight  # pyright: ignore[reportAssignmentType]
                delta: Tensor = module.get_delta_weight("default")  # pyright: ignore[reportAttributeAccessIssue]
                found[f"{name}.weight"] = delta.add_(base)
        return found

    def merged(self) -> PreTrainedModel:
        """A copy of the model with its adapters merged into the weights."""
        merged = copy.deepcopy(self.module).merge_and_unload()  # pyright: ignore[reportCallIssue]
        assert isinstance(merged, PreTrainedModel)
        return merged

    def checkpoint_activations(self) -> None:
        """Recompute each decoder layer in backward instead of keeping its activations."""
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.module.train()
        if self.lora:
            self.model.enable_input_require_grads()

    def export(self, folder: Path) -> None:
        """Save model and tokenizer; adapters are merged into a copy of the weights."""
        model = self.merged() if self.lora else self.model
        with quiet():
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)


class AdapterOff(Policy):
    """A LoRA policy without its adapters: the model that training started from."""

    def __init__(self, policy: CausalPolicy) -> None:
        self.name, self.tokenizer = policy.name, policy.tokenizer
        self.end_of_turn_ids, self.module, self.softcap = (
            policy.end_of_turn_ids,
            policy.module,
            policy.softcap,
        )
        self._policy = policy

    def hidden(self, tokens_N: Tensor, positions_N: Tensor, layout: Layout) -> Tensor:
        """Hidden state at each token with adapters disabled, `[N, D]`."""
        with self._disabled():
            return self._policy.hidden(tokens_N, positions_N, layout)

    @contextlib.contextmanager
    def _disabled(self) -> Iterator[None]:
        with self.module.disable_adapter():  # pyright: ignore[reportCallIssue]
            yield

    @property
    def head_VD(self) -> Tensor:
        """The head, which LoRA leaves alone."""
        return self._policy.head_VD

    def export(self, folder: Path) -> None:
        """A reference is never saved: it is where the run's model came from."""
        raise ModelError("The reference model is the one that the recipe names; there is nothing to export.")
