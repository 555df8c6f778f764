import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import ConfigError
from headwater.rewards.source import Source, Verifier, judge, verifier
from headwater.types import Group, Signal, Span, Stop, Task, Trajectory


def trajectory(text: str, stop: Stop = "done", signals: tuple[Signal, ...] = ()) -> Trajectory:
    span = Span(author="policy", tokens=(1,), text=text)
    return Trajectory(task_id="t", spans=(span,), stop=stop, signals=signals)


def group(*texts: str, id: str = "t") -> Group:
    return Group(task=Task(id=id, prompt="?"), trajectories=tuple(map(trajectory, texts)))


def said(source: Source, *trajectories: Trajectory) -> Sequence[Signal]:
    return asyncio.run(source(Group(task=Task(id="t", prompt="?"), trajectories=trajectories)))


def judged(*sources: tuple[Source, float], texts: Sequence[str] = ("a",)) -> tuple[Trajectory, ...]:
    (found,) = asyncio.run(judge([group(*texts)], sources))
    return found.trajectories


@verifier
def length(text: str, task: Task) -> float:
    return float(len(text))


@verifier(name="always", needs=["answer"])
def constant(text: str, task: Task) -> float:
    return 1.0


@verifier
def abstainer(text: str, task: Task) -> None:
    return None


@verifier
def broken(text: str, task: Task) -> float:
    return [][len(text)]


@dataclass
class Slow:
    """A source that answers later for earlier tasks, and remembers nothing."""

    name: str = "slow"
    offers: frozenset[str] = frozenset({"reward"})
    needs: frozenset[str] = frozenset()
    error: Exception | None = None
    signals: tuple[Signal, ...] | None = None
    finished: list[str] = field(default_factory=list)

    async def __call__(self, group: Group) -> Sequence[Signal]:
        await asyncio.sleep(0.02 / (1 + int(group.task.id)))
        if self.error is not None:
            raise type(self.error)(*self.error.args)
        self.finished.append(group.task.id)
        if self.signals is not None:
            return self.signals
        return [Signal(source="slow", name="reward", values=(float(group.task.id),)) for _ in group.trajectories]


# --- verifiers -------------------------------------------------------------------------------------


def test_decorator_makes_a_source():
    assert isinstance(length, Source)
    assert (length.name, length.needs, length.offers) == ("length", frozenset(), {"reward"})
    assert (constant.name, constant.needs) == ("always", {"answer"})


def test_one_signal_for_each_trajectory_in_order():
    signals = said(length, trajectory("a"), trajectory(""), trajectory("abc"))
    assert [signal.values for signal in signals] == [(1.0,), (0.0,), (3.0,)]
    assert {(signal.source, signal.name, signal.status) for signal in signals} == {("length", "reward", "ok")}


def test_true_and_false_are_1_and_0():
    source = verifier(name="same")(lambda text, task: text == "a")
    assert [s.values for s in said(source, trajectory("a"), trajectory("b"))] == [(1.0,), (0.0,)]


def test_none_abstains():
    (signal,) = said(abstainer, trajectory("a"))
    assert (signal.status, signal.values) == ("abstained", ())


def test_what_breaks_is_failed_and_says_why():
    (signal,) = said(broken, trajectory("a"))
    assert (signal.status, signal.values) == ("failed", ())
    assert signal.note == "IndexError: list index out of range"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1.0", 10**400, 1j])
def test_what_is_no_finite_number_is_failed(value: object):
    source = Verifier(name="odd", verdict=lambda text, task: value)  # type: ignore[arg-type]
    (signal,) = said(source, trajectory("a"))
    assert (signal.status, signal.values) == ("failed", ())
    assert signal.note


def test_an_episode_that_ended_in_an_error_is_failed_without_being_read():
    read: list[str] = []
    source = Verifier(name="reader", verdict=lambda text, task: read.append(text) or 1.0)
    signals = said(source, trajectory("a", stop="error"), trajectory("b"), trajectory("c", stop="max_tokens"))
    assert [signal.status for signal in signals] == ["failed", "ok", "ok"]
    assert read == ["b", "c"]


def test_what_no_verifier_should_raise_is_not_swallowed():
    def interrupted(text: str, task: Task) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        said(Verifier(name="interrupted", verdict=interrupted), trajectory("a"))


def test_an_async_function_is_no_verifier():
    async def late(text: str, task: Task) -> float:
        return 1.0

    with pytest.raises(ConfigError, match="'late' is an async function"):
        verifier(late)  # type: ignore[arg-type]


# --- judge -----------------------------------------------------------------------------------------


def test_a_single_source_gives_the_reward_itself():
    (found,) = judged((length, 1.0), texts=["abc"])
    assert found.signals == (Signal(source="length", name="reward", values=(3.0,)),)


def test_a_single_source_is_weighted_too():
    (found,) = judged((length, 0.5), texts=["abc"])
    assert found.reward == 1.5
    assert found.signal("length") == Signal(source="length", name="length", values=(3.0,))


def test_several_are_summed_and_their_parts_kept():
    # "abc": 2·3 - 0.5·1 = 5.5; "": 2·0 - 0.5·1 = -0.5.
    first, second = judged((length, 2.0), (constant, -0.5), texts=["abc", ""])
    assert (first.reward, second.reward) == (5.5, -0.5)
    assert [(s.name, s.values) for s in first.signals] == [
        ("length", (3.0,)),
        ("always", (1.0,)),
        ("reward", (5.5,)),
    ]


def test_failed_outranks_abstained_and_both_outrank_a_sum():
    (found,) = judged((length, 1.0), (abstainer, 1.0))
    assert [(s.name, s.status) for s in found.signals][-1] == ("reward", "abstained")
    assert found.reward is None
    (found,) = judged((length, 1.0), (abstainer, 1.0), (broken, 1.0))
    assert (found.signals[-1].status, found.signals[-1].values) == ("failed", ())
    assert found.signals[-1].note == "broken: IndexError: list index out of range"


def test_weight_0_records_and_takes_no_part():
    (found,) = judged((length, 1.0), (broken, 0.0), texts=["abc"])
    assert found.reward == 3.0
    assert [s.status for s in found.signals if s.name == "broken"] == ["failed"]


def test_all_weights_0_is_refused():
    with pytest.raises(ConfigError, match="weight 0"):
        judged((length, 0.0))


def test_without_sources_groups_are_unchanged():
    groups = [group("a")]
    assert asyncio.run(judge(groups, [])) == groups


def test_judging_again_replaces_what_was_said():
    once = asyncio.run(judge([group("a", "bb")], [(length, 1.0), (constant, 1.0)]))
    assert asyncio.run(judge(once, [(length, 1.0), (constant, 1.0)])) == once


def test_results_are_in_order_though_sources_finish_out_of_order():
    source = Slow()
    groups = asyncio.run(judge([group("a", id=str(n)) for n in range(4)], [(source, 1.0)]))
    assert source.finished == ["3", "2", "1", "0"]
    assert [g.trajectories[0].reward for g in groups] == [0.0, 1.0, 2.0, 3.0]


def test_what_a_source_raises_propagates_and_names_it():
    source = Slow(error=ConnectionError("nobody there"))
    with pytest.raises(ConnectionError, match="nobody there") as caught:
        asyncio.run(judge([group("a", id="1"), group("a", id="2")], [(source, 1.0), (length, 1.0)]))
    assert caught.value.__notes__ in [[f"The source 'slow' raised this on task '{n}'."] for n in "12"]


def test_a_source_must_say_one_thing_about_each_trajectory():
    source = Slow(signals=(Signal(source="slow", name="reward", values=(1.0,)),))
    with pytest.raises(ConfigError, match="'slow' gave 1 signals for the 2"):
        asyncio.run(judge([group("a", "b", id="1")], [(source, 1.0)]))


def test_a_reward_must_be_one_value_for_the_episode():
    source = Slow(signals=(Signal(source="slow", name="reward", values=(1.0, 2.0), level="step"),))
    with pytest.raises(ConfigError, match="one value for the episode"):
        asyncio.run(judge([group("a", id="1")], [(source, 1.0)]))


def test_a_reward_that_is_not_finite_is_failed():
    source = Slow(signals=(Signal(source="slow", name="reward", values=(float("nan"),)),))
    (found,) = asyncio.run(judge([group("a", id="1")], [(source, 1.0)]))
    assert found.trajectories[0].signals[0].status == "failed"


def test_signals_of_other_names_are_kept_and_are_no_reward():
    source = Slow(signals=(Signal(source="slow", name="steps", values=(1.0, 2.0), level="step"),))
    (found,) = asyncio.run(judge([group("a", id="1")], [(source, 1.0), (length, 1.0)]))
    assert found.trajectories[0].reward == 1.0
    assert found.trajectories[0].signal("steps") is not None
    (alone,) = asyncio.run(judge([group("a", id="1")], [(source, 1.0)]))
    assert [(s.name, s.status) for s in alone.trajectories[0].signals] == [
        ("steps", "ok"),
        ("reward", "abstained"),
    ]


@pytest.mark.parametrize("names", [("length", "length"), ("length", "reward")])
def test_names_must_tell_sources_apart(names: tuple[str, str]):
    sources = [(Verifier(name=name, verdict=lambda text, task: 1.0), 1.0) for name in names]
    with pytest.raises(ConfigError, match="called"):
        judged(*sources)


@given(st.lists(st.sampled_from([length, constant, abstainer, broken]), unique_by=lambda s: s.name), st.text())
def test_there_is_exactly_one_reward(sources: list[Verifier], text: str):
    (found,) = judged(*[(source, 1.0) for source in sources], texts=[text])
    rewards = [signal for signal in found.signals if signal.name == "reward"]
    assert len(rewards) == bool(sources)
    if sources:
        tells = abstainer not in sources and broken not in sources
        assert (rewards[0].status == "ok") == tells
        assert bool(rewards[0].values) == tells
