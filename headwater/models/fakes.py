"""Tiny policies that really learn, for tests and for trying a recipe in a second.

They go through the same engine, rollout, learner and loop as any model. `fake:tabular` is a table
of next-token logits given the last token; `fake:llama` a random two-layer Llama. Both read and write
single characters.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headwater.models.layout import Layout
from headwater.models.policy import CausalPolicy, Policy

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ +-*/=?!.,:;'\"()$\n"
END = "<end>"
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<end>{% else %}{{ '\n' }}{% endif %}{% endfor %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, plus `<end>`, with a chat template of one message per line."""
    vocabulary = {END: 0, "<unknown>": 1} | {c: i + 2 for i, c in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, unk_token="<unknown>", pad_token=END)
    fast.chat_template = TEMPLATE
    return fast


class Table(nn.Module):
    """Next-token logits given the last token, `[V, V]`: rows are logits of one next token."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, size))


class TabularPolicy(Policy):
    """A bigram table. Its gradient can be worked out by hand, and it learns in milliseconds."""

    def __init__(self, name: str = "fake:tabular") -> None:
        self.name = name
        self.tokenizer = character_tokenizer()
        self.end_of_turn_ids = frozenset({0})
        self.table = Table(len(self.tokenizer))
        self.module = self.table

    def hidden(self, tokens_N: Tensor, positions_N: Tensor, layout: Layout) -> Tensor:
        """The token itself as a one-hot vector, `[N, V]`."""
        return nn.functional.one_hot(tokens_N, len(self.tokenizer)).float()

    @property
    def head_VD(self) -> Tensor:
        """The table."""
        return self.table.weight

    def export(self, folder: Path) -> None:
        """Write the table; `load` reads it back."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"weight": self.table.weight.detach()}, folder / "table.safetensors")
        (folder / "tabular.json").write_text(json.dumps({"kind": "tabular"}))

    @classmethod
    def read(cls, folder: Path) -> TabularPolicy:
        """A table that `export` wrote."""
        policy = cls(str(folder))
        policy.table.load_state_dict(load_file(folder / "table.safetensors"))
        return policy


def tiny_llama(
    name: str = "fake:llama",
    *,
    layers: int = 2,
    width: int = 32,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> CausalPolicy:
    """A random Llama with grouped-query attention (4 heads on 2), small enough for unit tests."""
    tokenizer = character_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.15)
    nn.Module.to(model, dtype)
    return CausalPolicy(name, model, tokenizer, frozenset({0}))
