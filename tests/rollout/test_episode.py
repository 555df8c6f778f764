from __future__ import annotations

import asyncio

from headwater.data.render import Renderer
from headwater.engines.torch_engine import TorchEngine
from headwater.errors import WorldError
from headwater.models.fakes import tiny_llama
from headwater.rollout.episode import episode, rollout
from headwater.types import Sampling, Task, Trajectory

TASK = Task(id="t", prompt=({"role": "user", "content": "count"},))
SAMPLING = Sampling(max_tokens=200)


class Echo:
    """Answers each turn with how many turns there were, `turns` times."""

    def __init__(self, turns: int) -> None:
        self.left = turns

    async def respond(self, trajectory: Trajectory):
        self.left -= 1
        if self.left < 0:
            return None
        return [{"role": "user", "content": f"left {self.left}"}]


class Broken:
    async def respond(self, trajectory: Trajectory):
        raise WorldError("the server is gone")


def _policy():
    """A policy that ends its turn soon: half of the mass is on the end-of-turn token."""
    return tiny_llama(seed=3)


def _play(world, max_turns=5, sampling=SAMPLING):
    policy = _policy()
    renderer = Renderer(policy.tokenizer, "auto", policy.end_of_turn_ids)
    return asyncio.run(
        episode(TorchEngine(policy), renderer, TASK, sampling, lambda turn: 100 + turn, world, max_turns)
    )


def _authors(trajectory):
    return [span.author for span in trajectory.spans]


def test_one_turn_without_a_world():
    played = _play(None)
    assert _authors(played) == ["prompt", "policy"]
    assert played.stop in ("done", "max_tokens")


def test_world_spans_stand_between_policy_spans_and_nothing_sampled_is_tokenised_again():
    played = _play(Echo(2))
    assert _authors(played) == ["prompt", "policy", "world", "policy", "world", "policy"]
    assert played.stop == "done"
    for span in played.spans:
        if span.author == "policy":
            assert span.logps is not None and len(span.logps) == len(span.tokens)
            assert span.tokens[-1] in _policy().end_of_turn_ids
        else:
            assert span.logps is None


def test_the_second_turn_continues_exactly_what_the_first_left():
    """Sampling the last turn again from the recorded tokens gives the recorded tokens."""
    played = _play(Echo(1))
    before = tuple(token for span in played.spans[:-1] for token in span.tokens)
    from headwater.engines.base import Request

    again = TorchEngine(_policy()).complete([Request(prompt=before, sampling=SAMPLING, seed=101)])[0]
    assert again.spans[0].tokens == played.spans[-1].tokens


def test_turns_run_out():
    played = _play(Echo(100), max_turns=2)
    assert played.stop == "max_turns"
    assert _authors(played)[-1] == "world"


def test_a_truncated_turn_ends_the_episode():
    played = _play(Echo(3), sampling=Sampling(max_tokens=1, temperature=0))
    assert (played.stop, _authors(played)) == ("max_tokens", ["prompt", "policy"])


def test_a_broken_world_makes_data_not_an_exception():
    played = _play(Broken())
    assert played.stop == "error"
    assert [(s.status, s.note) for s in played.signals] == [("failed", "WorldError: the server is gone")]


def test_siblings_differ_and_runs_repeat():
    policy = _policy()
    renderer = Renderer(policy.tokenizer, "auto", policy.end_of_turn_ids)

    def once(seed, visit):
        groups = asyncio.run(rollout(TorchEngine(policy), renderer, [(TASK, visit)], Sampling(max_tokens=20), 4, seed))
        return [t.tokens for t in groups[0].trajectories]

    assert len(set(once(0, 0))) == 4
    assert once(0, 0) == once(0, 0)
    assert once(0, 0) != once(1, 0)
    assert once(0, 0) != once(0, 1)
