from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headwater.errors import ConfigError, WorldError
from headwater.rewards.calls import Cached, Guarded
from headwater.rewards.registry import RewardConfig, build_source
from headwater.rewards.source import Source, judge, verifier
from headwater.types import Group, Signal, Span, Stop, Task, Trajectory


def trajectory(text: str, stop: Stop = "done") -> Trajectory:
    return Trajectory(task_id="t", spans=(Span(author="policy", tokens=(1,), text=text),), stop=stop)


def group(*texts: str, prompt: str = "?") -> Group:
    return Group(task=Task(id="t", prompt=prompt), trajectories=tuple(map(trajectory, texts)))


def reward(value: float) -> Signal:
    return Signal(source="odd", name="reward", values=(value,))


FAILED = Signal(source="odd", name="reward", status="failed", note="no")


@dataclass
class Odd:
    """A source that does with each call what the next of its tricks says, and counts calls."""

    tricks: Sequence[Callable[[Group], Sequence[Signal] | Exception | float]]
    name: str = "odd"
    offers: frozenset[str] = frozenset({"reward"})
    needs: frozenset[str] = frozenset()
    asked: list[list[str]] = field(default_factory=list)
    compares: bool = False

    async def __call__(self, group: Group) -> Sequence[Signal]:
        trick = self.tricks[min(len(self.asked), len(self.tricks) - 1)]
        self.asked.append([t.text for t in group.trajectories])
        done = trick(group)
        if isinstance(done, Exception):
            raise done
        if isinstance(done, float):
            await asyncio.sleep(done)
            return [reward(1.0) for _ in group.trajectories]
        return done


def lengths(group: Group) -> list[Signal]:
    return [reward(float(len(t.text))) for t in group.trajectories]


def said(source: Source, asked: Group) -> list[tuple[str, tuple[float, ...], str]]:
    return [(s.status, s.values, s.note) for s in asyncio.run(source(asked))]


# --- timeouts, retries, concurrency --------------------------------------------------------------------


def test_what_takes_too_long_is_failed_and_never_zero():
    source = Guarded(source=Odd([lambda g: 5.0]), timeout_s=0.02)
    assert said(source, group("a", "b")) == [("failed", (), "gave nothing within timeout_s = 0.02")] * 2
    (judged,) = asyncio.run(judge([group("a")], [(source, 1.0)]))
    assert judged.trajectories[0].reward is None


def test_a_timeout_of_the_source_itself_is_told_from_ours():
    source = Guarded(source=Odd([lambda g: TimeoutError("theirs")]), timeout_s=10)
    assert said(source, group("a")) == [("failed", (), "TimeoutError: theirs")]


@pytest.mark.parametrize("error", [ValueError("x"), OSError("x"), WorldError("x"), KeyError("x")])
def test_trouble_is_a_state(error: Exception):
    (found,) = said(Guarded(source=Odd([lambda g: error])), group("a"))
    assert found[0] == "failed" and type(error).__name__ in found[2]


def test_a_setting_that_cannot_work_is_not_a_state():
    with pytest.raises(ConfigError, match="stop here"):
        said(Guarded(source=Odd([lambda g: ConfigError("stop here")]), retries=3, pause_s=0), group("a"))


def test_what_failed_is_asked_again_and_no_more_often_than_needed():
    odd = Odd([lambda g: OSError("busy"), lambda g: [FAILED, reward(2.0)], lengths])
    assert said(Guarded(source=odd, retries=5, pause_s=0), group("a", "bb")) == [("ok", (1.0,), ""), ("ok", (2.0,), "")]
    assert len(odd.asked) == 3


def test_of_all_calls_the_one_with_the_fewest_failures_counts():
    odd = Odd([lambda g: [FAILED, reward(2.0)], lambda g: OSError("busy")])
    assert [s for s, _, _ in said(Guarded(source=odd, retries=2, pause_s=0), group("a", "b"))] == ["failed", "ok"]
    assert len(odd.asked) == 3


def test_an_episode_that_ended_in_an_error_or_an_abstention_is_no_reason_to_ask_again():
    odd = Odd([lambda g: [FAILED, Signal(source="odd", name="reward", status="abstained")]])
    broken = Group(task=Task(id="t", prompt="?"), trajectories=(trajectory("", "error"), trajectory("a")))
    said(Guarded(source=odd, retries=2, pause_s=0), broken)
    assert len(odd.asked) == 1


def test_at_most_so_many_calls_at_once_in_each_of_several_loops():
    running: list[int] = [0, 0]

    class Counting(Odd):
        async def __call__(self, group: Group) -> Sequence[Signal]:
            running[0] += 1
            running[1] = max(running)
            await asyncio.sleep(0.001)
            running[0] -= 1
            return lengths(group)

    source = Guarded(source=Counting([lengths]), concurrency=3)
    for _ in range(2):
        asyncio.run(judge([group("a", prompt=str(i)) for i in range(20)], [(source, 1.0)]))
    assert running[1] == 3


def test_waiting_for_a_turn_is_not_part_of_the_call():
    source = Guarded(source=Odd([lambda g: 0.03]), concurrency=1, timeout_s=0.08)
    judged = asyncio.run(judge([group("a", prompt=str(i)) for i in range(5)], [(source, 1.0)]))
    assert [g.trajectories[0].reward for g in judged] == [1.0] * 5


# --- the cache -----------------------------------------------------------------------------------------


def cached(odd: Odd, folder: Path, **identity: object) -> Cached:
    return Cached(source=odd, folder=folder, identity={"name": "odd", **identity})


def test_what_is_known_is_not_asked_again(tmp_path: Path):
    odd = Odd([lengths])
    source = cached(odd, tmp_path)
    assert said(source, group("a", "bb")) == said(source, group("a", "bb"))
    assert said(source, group("bb", "ccc", "a")) == [("ok", (2.0,), ""), ("ok", (3.0,), ""), ("ok", (1.0,), "")]
    assert odd.asked == [["a", "bb"], ["ccc"]]


@pytest.mark.parametrize("change", ["settings", "prompt", "folder", "answer"])
def test_another_source_or_task_is_not_the_same(tmp_path: Path, change: str):
    odd = Odd([lengths])
    said(cached(odd, tmp_path, settings={}), group("a"))
    other = cached(
        odd, tmp_path / ("x" if change == "folder" else ""), settings={"n": 1} if change == "settings" else {}
    )
    task = Task(id="t", prompt="!" if change == "prompt" else "?", answer="1" if change == "answer" else None)
    said(other, Group(task=task, trajectories=(trajectory("a"),)))
    assert len(odd.asked) == 2


def test_siblings_belong_to_what_is_known_of_a_source_that_compares(tmp_path: Path):
    odd = Odd([lengths], compares=True)
    source = cached(odd, tmp_path)
    for asked in (group("a", "b"), group("a", "c"), group("a", "b")):
        said(source, asked)
    assert odd.asked == [["a", "b"], ["a", "c"]]


def test_only_what_is_ok_is_kept(tmp_path: Path):
    abstained = Signal(source="odd", name="reward", status="abstained")
    odd = Odd([lambda g: [FAILED, abstained, reward(float("nan"))], lengths])
    source = cached(odd, tmp_path)
    said(source, group("a", "b", "c"))
    assert list(tmp_path.rglob("*.json")) == []
    assert said(source, group("a", "b", "c")) == [("ok", (1.0,), "")] * 3


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"source": "odd"}', '{"values": ["x"], "ends": []}'])
def test_a_damaged_file_is_asked_again_and_mended(tmp_path: Path, content: str):
    odd = Odd([lengths])
    source = cached(odd, tmp_path)
    said(source, group("a"))
    (file,) = tmp_path.rglob("*.json")
    whole = file.read_text()
    file.write_text(content)
    assert said(source, group("a")) == [("ok", (1.0,), "")]
    assert file.read_text() == whole
    assert json.loads(whole)["values"] == [1.0]
    assert list(tmp_path.rglob("*.partial")) == []


def test_a_cache_that_cannot_be_written_ends_the_run(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        said(cached(Odd([lengths]), tmp_path / "file"), group("a"))


def test_a_wrong_number_of_signals_is_still_an_error(tmp_path: Path):
    source = cached(Odd([lambda g: [reward(1.0)]]), tmp_path)
    with pytest.raises(ConfigError, match="gave 1 signals for the 2 trajectories"):
        asyncio.run(judge([group("a", "b")], [(source, 1.0)]))


# --- as a recipe has them ------------------------------------------------------------------------------

OWN = """
calls = []

async def counted(group, *, plus=0):
    calls.append(len(group.trajectories))
    if len(calls) == 1:
        raise OSError("cold")
    return [len(t.text) + plus for t in group.trajectories]
"""


def test_the_keys_of_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_calls.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    config = RewardConfig.model_validate(
        {
            "name": "own_calls:counted",
            "timeout_s": 5,
            "retries": 1,
            "concurrency": 2,
            "cache": "kept",
            "settings": {"plus": 2},
        }
    )
    assert said(build_source(config), group("a")) == [("ok", (3.0,), "")]
    assert said(build_source(config), group("a")) == [("ok", (3.0,), "")]
    import own_calls  # type: ignore[import-not-found]

    assert own_calls.calls == [1, 1]
    (tmp_path / "own_calls.py").write_text(OWN + "\n# another version\n")
    said(build_source(config), group("a"))
    assert own_calls.calls == [1, 1, 1], "the code of one's own reward belongs to what is known"


def test_a_plain_function_cannot_be_interrupted():
    for key in ("timeout_s", "concurrency"):
        with pytest.raises(ConfigError, match="plain function"):
            build_source(RewardConfig.model_validate({"name": "number", key: 2}))


def test_a_plain_function_can_be_cached_and_retried(tmp_path: Path):
    tries: list[str] = []

    @verifier
    def flaky(text: str, task: Task) -> float:
        tries.append(text)
        if len(tries) == 1:
            raise RuntimeError("cold")
        return 1.0

    source = Cached(source=Guarded(source=flaky, retries=1, pause_s=0), folder=tmp_path, identity={})
    assert said(source, group("a")) == said(source, group("a")) == [("ok", (1.0,), "")]
    assert tries == ["a", "a"]
