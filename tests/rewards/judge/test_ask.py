import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.rewards.judge.ask import Ask, AskError, Remembered, write_whole
from headwater.types import Message


@dataclass
class Counting:
    """Says how often it was asked."""

    name: str = "counting"
    asked: list[int] = field(default_factory=list)
    silent: bool = False

    async def complete(self, messages: Sequence[Message], *, temperature: float, max_tokens: int, seed: int = 0) -> str:
        if self.silent:
            raise AskError("no answer")
        self.asked.append(seed)
        return f"reply {len(self.asked)}"


def say(ask: Ask, text: str = "q", *, temperature: float = 0.0, max_tokens: int = 5, seed: int = 0) -> str:
    messages = [Message(role="user", content=text)]
    return asyncio.run(ask.complete(messages, temperature=temperature, max_tokens=max_tokens, seed=seed))


def test_the_same_is_asked_once(tmp_path: Path):
    model = Counting()
    assert say(Remembered(ask=model, folder=tmp_path)) == "reply 1"
    later = Remembered(ask=model, folder=tmp_path)
    assert say(later) == "reply 1"
    assert len(model.asked) == 1
    assert (later.memory.found, later.memory.missed) == (1, 0)


def test_anything_else_is_asked_anew(tmp_path: Path):
    model = Counting()
    memory = Remembered(ask=model, folder=tmp_path)
    said = [say(memory), say(memory, "p"), say(memory, temperature=1), say(memory, max_tokens=6), say(memory, seed=1)]
    said.append(say(Remembered(ask=Counting(name="other", asked=[0] * 9), folder=tmp_path)))
    assert len(set(said)) == 6


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"reply": "x"}', "\udcff", '{"request": {}, "reply": 3}'])
def test_a_damaged_file_is_not_believed(tmp_path: Path, damage: str):
    model = Counting()
    memory = Remembered(ask=model, folder=tmp_path)
    say(memory)
    (path,) = tmp_path.glob("*/*.json")
    path.write_bytes(damage.encode("utf-8", "surrogateescape"))
    assert say(memory) == "reply 2"
    assert memory.memory.damaged == 1
    assert json.loads(path.read_text())["reply"] == "reply 2"


def test_silence_is_not_kept(tmp_path: Path):
    model = Counting(silent=True)
    memory = Remembered(ask=model, folder=tmp_path)
    with pytest.raises(AskError):
        say(memory)
    model.silent = False
    assert say(memory) == "reply 1"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="another folder"):
        write_whole(tmp_path / "file" / "x.json", "{}")
