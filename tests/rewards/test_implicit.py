"""DPO's implicit reward, against sums of log-probs of a plain forward pass."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headwater.errors import ConfigError, HeadwaterError
from headwater.models.fakes import TabularPolicy, tiny_llama
from headwater.rewards.implicit import Implicit
from headwater.rewards.registry import RewardConfig, build_source
from headwater.rewards.source import compares
from headwater.types import Group, Span, Stop, Task, Trajectory


def group(*texts: str, prompt: str = "2+2?", stop: Stop = "done") -> Group:
    spans = [Span(author="policy", tokens=(1,), text=text) for text in texts]
    trajectories = tuple(Trajectory(task_id="t", spans=(span,), stop=stop) for span in spans)
    return Group(task=Task(id="t", prompt=prompt), trajectories=trajectories)


def built(**settings: object) -> Implicit:
    source = build_source(RewardConfig(name="implicit", settings={"dtype": "float32", **settings}))
    assert isinstance(source, Implicit)
    return source


def rewards(source: Implicit, asked: Group) -> list[float]:
    return [signal.values[0] for signal in asyncio.run(source(asked))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two small Llamas with different weights, exported as folders: a run's, and a plain one."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("run/model", "reference")):
        policy = tiny_llama(dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in policy.module.parameters():
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
        policy.export(folder / name)
    (folder / "run" / "recipe.json").write_text("{}")
    return str(folder / "run"), str(folder / "reference")


def by_hand(folders: tuple[str, str], prompt: str, text: str) -> tuple[float, int]:
    """log pi - log ref of "text<end>" after "prompt\\n", summed, by transformers alone; and how many tokens that is."""
    tokenizer = AutoTokenizer.from_pretrained(folders[1])
    before = tokenizer(f"{prompt}\n", add_special_tokens=False)["input_ids"]
    after = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    sums = []
    for folder in (f"{folders[0]}/model", folders[1]):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            logp = torch.log_softmax(model(input_ids=torch.tensor([before + after])).logits[0].double(), -1)
        sums.append(sum(logp[len(before) + i - 1, token].item() for i, token in enumerate(after)))
    return sums[0] - sums[1], len(after)


@pytest.mark.parametrize("normalised", [False, True])
def test_it_is_beta_times_the_gap_of_log_probs(folders: tuple[str, str], normalised: bool):
    source = built(model=folders[0], reference=folders[1], beta=0.3, length_normalised=normalised)
    texts = ["4", "It is 4, I say.", "no"]
    found = rewards(source, group(*texts))
    for reward, text in zip(found, texts, strict=True):
        gap, count = by_hand(folders, "2+2?", text)
        assert abs(gap) > 1e-2, "or the test could not fail"
        assert reward == pytest.approx(0.3 * (gap / count if normalised else gap), rel=1e-4, abs=1e-5)
    assert (source.needs, compares(source)) == ({"prompt"}, False)


def test_it_is_nothing_beside_itself_and_turns_its_sign_when_turned(folders: tuple[str, str]):
    model, reference = folders
    asked = group("4", "five")
    assert rewards(built(model=reference, reference=reference), asked) == pytest.approx([0.0, 0.0])
    there, back = (
        rewards(built(model=model, reference=reference), asked),
        rewards(built(model=reference, reference=model), asked),
    )
    assert there == pytest.approx([-value for value in back], rel=1e-4)


def test_by_hand_on_a_table(tmp_path: Path):
    # a uniform table beside one whose every next token is "4" with logit ln 3, else 0: over V tokens the latter's
    # log-probs are ln 3 - ln(V + 2) for "4" and -ln(V + 2) for <end>; the uniform one's are -ln V
    policy = TabularPolicy()
    size, four = len(policy.tokenizer), policy.tokenizer.convert_tokens_to_ids("4")
    with torch.no_grad():
        policy.table.weight[four, :] = torch.log(torch.tensor(3.0))
    policy.export(tmp_path / "m")
    gap = torch.log(torch.tensor(3.0)) - 2 * torch.log(torch.tensor((size + 2) / size))
    (found,) = rewards(built(model=str(tmp_path / "m"), reference="fake:tabular", beta=2.0), group("4"))
    assert found == pytest.approx(2.0 * gap.item(), rel=1e-4)


def test_what_cannot_be_read_has_no_reward(folders: tuple[str, str]):
    source = built(model=folders[0], reference=folders[1])
    assert [s.status for s in asyncio.run(source(group("4", " ")))] == ["ok", "abstained"]
    assert [s.status for s in asyncio.run(source(group("4", stop="error")))] == ["failed"]


def test_what_cannot_be_meant_is_refused(folders: tuple[str, str], tmp_path: Path):
    with pytest.raises(ConfigError, match="beta = 0"):
        built(model=folders[0], reference=folders[1], beta=0.0)
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no exported model yet"):
        built(model=str(tmp_path), reference=folders[1])
    with pytest.raises(HeadwaterError):
        built(model=str(tmp_path / "none"), reference=folders[1])
    with pytest.raises(ConfigError, match="'reference'"):
        built(model=folders[0])
