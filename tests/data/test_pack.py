from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.algorithms import build
from headwater.data.pack import pack
from headwater.models.fakes import tiny_llama
from headwater.models.forward import run, score, split
from headwater.types import Group, Signal, Span, Task, Trajectory


def _trajectory(answer, reward, prompt=(5, 6, 7), logp=-1.0, world=None):
    spans = [Span(author="prompt", tokens=tuple(prompt), text="")]
    cut = len(answer) // 2 if world else len(answer)
    for part in (answer[:cut], answer[cut:]):
        if part:
            spans.append(Span(author="policy", tokens=tuple(part), text="", logps=(logp,) * len(part), version=3))
        if world and part == answer[:cut]:
            spans.append(Span(author="world", tokens=tuple(world), text=""))
    status = "ok" if reward is not None else "abstained"
    signal = Signal(source="t", name="reward", values=() if reward is None else (reward,), status=status)
    return Trajectory(task_id="t", spans=tuple(spans), signals=(signal,))


def _group(*trajectories):
    return Group(task=Task(id="t", prompt="p"), trajectories=trajectories)


DR = build("dr_grpo", {})


def test_a_group_by_hand():
    batch = pack([_group(_trajectory([8, 9], 1.0), _trajectory([9], 0.0))], DR, length=10)
    assert batch.prefix_tokens == ((5, 6, 7),)
    assert batch.tokens_S == ((8, 9), (9,))
    assert batch.target_T.tolist() == [8, 9, 9]
    assert batch.place_T.tolist() == [0, 1, 0]
    assert batch.sequence_T.tolist() == [0, 0, 1]
    (pull,) = batch.pulls
    assert pull.advantage_T.tolist() == [0.5, 0.5, -0.5]
    assert pull.weight_T.tolist() == pytest.approx([1 / 20] * 3)  # 2 answers, at most 10 tokens
    assert batch.behavior_logp_T.tolist() == [-1.0] * 3
    assert batch.oldest_version == 3


def test_world_tokens_are_fed_but_not_scored():
    batch = pack([_group(_trajectory([8, 9], 1.0, world=[20, 21]), _trajectory([9], 0.0))], DR)
    assert batch.tokens_S[0] == (8, 20, 21, 9)
    assert batch.place_T.tolist() == [0, 3, 0]


def test_trailing_world_tokens_predict_nothing_and_are_not_fed():
    trailing = _trajectory([8], 1.0)
    world = Span(author="world", tokens=(30, 31), text="")
    trailing = Trajectory(task_id="t", spans=(*trailing.spans, world), signals=trailing.signals)
    assert pack([_group(trailing, _trajectory([9], 0.0))], DR).tokens_S == ((8,), (9,))


def test_flat_groups_are_not_run_but_count_in_the_weights():
    flat = _group(_trajectory([8], 1.0), _trajectory([9], 1.0))
    told = _group(_trajectory([8], 1.0), _trajectory([9], 0.0))
    batch = pack([flat, told], DR, length=1)
    assert batch.prefix_S == (1, 1)
    assert batch.pulls[0].weight_T.tolist() == pytest.approx([1 / 4] * 2)


def test_unjudged_trajectories_are_dropped_and_counted():
    batch = pack([_group(_trajectory([8], 1.0), _trajectory([8, 8], None), _trajectory([9], 0.0))], DR, length=1)
    assert batch.dropped == 1
    assert batch.tokens_S == ((8,), (9,))
    assert batch.pulls[0].weight_T.tolist() == pytest.approx([1 / 2] * 2)


def test_all_flat_packs_to_nothing():
    batch = pack([_group(_trajectory([8], 0.0), _trajectory([9], 0.0))], DR)
    assert len(batch.target_T) == 0 and batch.tokens_S == ()


def test_siblings_with_different_prompts_share_what_they_have_in_common():
    one, two = _trajectory([8], 1.0, prompt=(5, 6, 7)), _trajectory([9], 0.0, prompt=(5, 6, 4, 4))
    batch = pack([_group(one, two)], DR)
    assert batch.prefix_tokens == ((5, 6),)
    assert batch.tokens_S == ((7, 8), (4, 4, 9))
    assert batch.place_T.tolist() == [1, 2]


def test_demonstrations_have_no_sampler():
    spans = (Span(author="prompt", tokens=(5,), text=""), Span(author="policy", tokens=(8, 9), text=""))
    batch = pack([_group(Trajectory(task_id="t", spans=spans))], build("sft", {}))
    assert batch.behavior_logp_T is None
    assert batch.pulls[0].weight_T.tolist() == [0.5, 0.5]


def test_trained_ids_are_the_sampled_ids():
    group = _group(_trajectory([8, 9, 10, 0], 1.0), _trajectory([11, 0], 0.0))
    batch = pack([group], DR)
    for s, trajectory in enumerate(group.trajectories):
        assert batch.prefix_tokens[0] + batch.tokens_S[s] == trajectory.tokens
        mine = batch.sequence_T == s
        assert batch.target_T[mine].tolist() == list(trajectory.spans[1].tokens)


GROUPS = st.lists(
    st.lists(
        st.tuples(st.lists(st.integers(2, 40), min_size=1, max_size=6), st.floats(0, 1)),
        min_size=2,
        max_size=4,
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=20, deadline=None)
@given(groups=GROUPS, micro=st.integers(1, 60))
def test_the_gradient_does_not_depend_on_the_split(groups, micro):
    """Whole, and cut at any token budget: the same gradient (and the sum of the weights is final)."""
    policy = tiny_llama()
    made = [_group(*[_trajectory(a, r, prompt=(4 + i, 5)) for a, r in g]) for i, g in enumerate(groups)]
    batch = pack(made, build("grpo", {}))
    if len(batch.target_T) == 0:
        return

    def gradient(budget):
        policy.module.zero_grad()
        for part in split(batch, budget, torch.device("cpu")):
            pull = batch.pulls[0]
            slope_T = torch.zeros(len(batch.target_T)).index_put((pull.of_T,), pull.weight_T * pull.advantage_T)
            (slope_T[part.scored] * run(policy, part, batch).logp_T).sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.trainable().values()])

    whole = gradient(10**9)
    torch.testing.assert_close(gradient(micro), whole, atol=1e-6, rtol=1e-4)


def test_scores_equal_those_of_separate_rows():
    policy = tiny_llama()
    group = _group(_trajectory([8, 9, 10], 1.0, world=[20, 21]), _trajectory([11, 12], 0.0))
    batch = pack([group], DR)
    together = score(policy, batch)
    apart = []
    for trajectory in group.trajectories:
        tokens = torch.tensor(trajectory.tokens)
        policy.model.set_attn_implementation("eager")
        with torch.no_grad():
            logp = torch.log_softmax(policy.model(tokens[None]).logits[0], -1)
        policy.model.set_attn_implementation("headwater")
        at = 0
        for span in trajectory.spans:
            if span.author == "policy":
                apart += [logp[i - 1, tokens[i]] for i in range(at, at + len(span.tokens))]
            at += len(span.tokens)
    torch.testing.assert_close(together, torch.stack(apart), atol=1e-5, rtol=1e-5)
