from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from headwater.engines.base import Request
from headwater.engines.torch_engine import TorchEngine
from headwater.errors import ModelError
from headwater.models.fakes import TabularPolicy, tiny_llama
from headwater.models.layout import Tree
from headwater.models.load import LoraConfig, ModelConfig, load
from headwater.models.policy import AdapterOff
from headwater.types import Sampling

TOKENS = torch.arange(2, 12)


def _hidden(policy):
    tree = Tree([(len(TOKENS), ())])
    with torch.no_grad():
        return policy.hidden(TOKENS, tree.positions_N, tree)


def _with_lora():
    """fake:llama with adapters that do something (they start as an exact zero)."""
    policy = load(ModelConfig(name="fake:llama", lora=LoraConfig(rank=2)))
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            if "lora_B" in name:
                parameter.add_(0.3)
    return policy


def _greedy(policy):
    request = Request(prompt=tuple(TOKENS.tolist()), sampling=Sampling(temperature=0, max_tokens=8), seed=0)
    return TorchEngine(policy).complete([request])[0].spans[0].tokens


def test_only_adapters_learn():
    policy = _with_lora()
    assert policy.trainable()
    assert all("lora_" in name for name in policy.trainable())


def test_fresh_adapters_change_nothing():
    fresh = load(ModelConfig(name="fake:llama", lora=LoraConfig(rank=2)))
    torch.testing.assert_close(_hidden(fresh), _hidden(tiny_llama()), atol=1e-6, rtol=0)


def test_the_reference_of_lora_is_the_model_without_its_adapters():
    policy = _with_lora()
    reference = policy.reference()
    assert isinstance(reference, AdapterOff)
    plain = _hidden(tiny_llama())
    torch.testing.assert_close(_hidden(reference), plain, atol=1e-6, rtol=0)
    assert (_hidden(policy) - plain).abs().max() > 1e-2
    assert reference.head_VD is policy.head_VD


def test_a_merged_copy_samples_as_the_adapters_do():
    policy = load(ModelConfig(name="fake:llama", lora=LoraConfig(rank=2)))
    sampler = policy.sampler()
    assert sampler is not None
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.1)
    engine = TorchEngine(sampler)
    engine.publish(1, policy.sampler_weights())
    request = Request(prompt=tuple(TOKENS.tolist()), sampling=Sampling(max_tokens=8), seed=0)
    merged, adapted = engine.complete([request])[0], TorchEngine(policy).complete([request])[0]
    assert merged.spans[0].tokens == adapted.spans[0].tokens
    assert merged.spans[0].logps == pytest.approx(adapted.spans[0].logps, abs=1e-5)


def test_in_bfloat16_adapters_are_not_merged():
    assert load(ModelConfig(name="fake:llama", dtype="bfloat16", lora=LoraConfig(rank=2))).sampler() is None
    assert tiny_llama().sampler() is None


def test_the_reference_of_a_whole_model_does_not_learn_with_it():
    policy = tiny_llama()
    reference = policy.reference()
    before = _hidden(reference)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.1)
    assert torch.equal(_hidden(reference), before)
    assert not reference.trainable()


@pytest.mark.parametrize("lora", [False, True])
def test_plain_transformers_loads_the_export(tmp_path, lora):
    policy = _with_lora() if lora else tiny_llama(seed=4)
    policy.export(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = TOKENS[None]
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert tuple(theirs[0, len(TOKENS) :].tolist()) == _greedy(policy)
    assert _greedy(load(ModelConfig(name=str(tmp_path / "model"), dtype="float32"))) == _greedy(policy)
    if lora:
        assert _greedy(policy) == _greedy(policy), "and exporting left the adapters where they were"


def test_a_table_comes_back_from_its_folder(tmp_path):
    policy = TabularPolicy()
    with torch.no_grad():
        policy.table.weight.copy_(torch.arange(policy.table.weight.numel()).view_as(policy.table.weight))
    policy.export(tmp_path / "table")
    assert torch.equal(load(ModelConfig(name=str(tmp_path / "table"))).head_VD, policy.head_VD)


def test_attention_that_the_layout_cannot_compute_is_refused():
    from headwater.models.policy import _attention

    policy = tiny_llama()
    q = torch.zeros(1, 4, 3, 8)
    with pytest.raises(ModelError, match="softcap"):
        _attention(policy.module, q, q, q, None, layout=Tree([(3, ())]), softcap=50.0)


def test_layers_of_other_kinds_are_refused():
    from transformers import LlamaForCausalLM

    policy = tiny_llama()
    policy.model.config.layer_types = ["linear_attention", "full_attention"]
    assert isinstance(policy.model, LlamaForCausalLM)
    with pytest.raises(ModelError, match="linear_attention"):
        type(policy)("odd", policy.model, policy.tokenizer, frozenset({0}))
