from __future__ import annotations

import asyncio
import itertools
import threading

import pytest
import torch

from headwater.engines.base import Request, seed_of
from headwater.engines.cache import Decode
from headwater.engines.torch_engine import TorchEngine
from headwater.errors import ModelError
from headwater.evaluation.agreement import check
from headwater.models.fakes import TabularPolicy, tiny_llama
from headwater.types import Sampling


def _requests(policy, prompts, siblings, **settings):
    sampling = Sampling(**({"max_tokens": 12} | settings))
    return [
        Request(
            prompt=tuple(policy.tokenizer.encode(text)),
            sampling=sampling,
            seed=seed_of(0, text, 0, sibling, 0),
        )
        for text in prompts
        for sibling in range(siblings)
    ]


def _flat(completion):
    return tuple(token for span in completion.spans for token in span.tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_engine_and_learner_mean_the_same_by_a_log_prob(dtype, temperature):
    found = check(tiny_llama(dtype=dtype), temperature=temperature)
    assert found.ok, found
    assert found.tokens > 100


def test_the_agreement_check_can_fail():
    policy = tiny_llama()
    right = policy.hidden

    def drifting(tokens_N, positions_N, layout):
        """Positions off by one while decoding: the mistake that this check is there to find."""
        return right(tokens_N, positions_N + isinstance(layout, Decode), layout)

    policy.hidden = drifting
    assert not check(policy).ok


def test_greedy_decoding_equals_transformers():
    policy = tiny_llama()
    request = _requests(policy, ["What is 12 + 34?"], 1, temperature=0)[0]
    ours = _flat(TorchEngine(policy).complete([request])[0])
    policy.model.set_attn_implementation("eager")
    theirs = policy.model.generate(
        torch.tensor([request.prompt]),
        attention_mask=torch.ones(1, len(request.prompt)),
        max_new_tokens=12,
        do_sample=False,
    )[0, len(request.prompt) :]
    assert ours == tuple(theirs.tolist())


def test_what_is_sampled_does_not_depend_on_the_company():
    policy = tiny_llama()
    requests = _requests(policy, ["ab", "a longer prompt", "c"], 3)
    together = [_flat(c) for c in TorchEngine(policy).complete(requests)]
    alone = [_flat(TorchEngine(policy).complete([r])[0]) for r in requests]
    backwards = [_flat(c) for c in TorchEngine(policy, capacity=2).complete(requests[::-1])][::-1]
    assert together == alone == backwards
    assert len(set(together)) == len(together), "siblings have seeds of their own"


def test_requests_join_a_running_batch_and_finished_rows_leave():
    policy = tiny_llama()
    engine = TorchEngine(policy)
    first, *later = _requests(policy, ["hello", "world"], 2, max_tokens=10)

    async def scenario():
        running = asyncio.ensure_future(engine.generate(first))
        while len(engine._rows) == 0 or len(engine._rows[0].tokens) < 3:
            await asyncio.sleep(0)
        joined = [asyncio.ensure_future(engine.generate(r)) for r in later]
        return [await running, *[await j for j in joined]]

    found = [_flat(c) for c in asyncio.run(scenario())]
    assert found == [_flat(TorchEngine(policy).complete([r])[0]) for r in (first, *later)]
    assert engine._rows == [] and engine._prompts == []


def test_a_prompt_is_read_once_for_all_its_siblings():
    policy = tiny_llama()
    read = []
    hidden = policy.hidden

    def counting(tokens_N, positions_N, layout):
        read.append(len(tokens_N))
        return hidden(tokens_N, positions_N, layout)

    policy.hidden = counting
    requests = _requests(policy, ["0123456789"], 5, max_tokens=2)
    TorchEngine(policy).complete(requests)
    assert read[0] == 10  # 10 prompt tokens, not 50
    assert max(read[1:]) <= 5


def test_stop_tokens_and_max_tokens():
    policy = TabularPolicy()
    with torch.no_grad():  # after "b" the end-of-turn token is certain, after "a" comes "b"
        a, b = policy.tokenizer.convert_tokens_to_ids(["a", "b"])
        policy.table.weight[b, a], policy.table.weight[0, b], policy.table.weight[a, 2] = 50.0, 50.0, 50.0
        policy.table.weight[2, a] = 0.0
    done = TorchEngine(policy).complete(_requests(policy, ["a"], 1))[0]
    assert (_flat(done), done.stop, done.text) == ((b, 0), "done", "b")
    cut = TorchEngine(policy).complete(_requests(policy, ["a"], 1, max_tokens=1))[0]
    assert (_flat(cut), cut.stop) == ((b,), "max_tokens")


def test_stop_strings_end_at_the_token_that_completes_one():
    policy = TabularPolicy()
    chain = policy.tokenizer.convert_tokens_to_ids(list("xy;zz"))
    with torch.no_grad():
        for now, following in itertools.pairwise(chain):
            policy.table.weight[following, now] = 50.0
    done = TorchEngine(policy).complete(_requests(policy, ["x"], 1, stop=("y;",)))[0]
    assert (done.text, done.stop) == ("y;", "done")


def test_new_weights_between_two_tokens_start_a_new_span():
    policy = TabularPolicy()
    engine = TorchEngine(policy)
    request = _requests(policy, ["a"], 1, max_tokens=6)[0]
    out = []
    engine._submit(request, out.append)
    engine.step()
    engine.step()
    new = torch.zeros_like(policy.table.weight)
    new[5] = 50.0  # every token is followed by token 5
    thread = threading.Thread(target=engine.publish, args=(3, {"weight": new}))
    thread.start()
    thread.join()
    while not out:
        engine.step()
    spans = out[0].spans
    assert [(span.version, len(span.tokens)) for span in spans] == [(0, 2), (3, 4)]
    assert spans[1].tokens == (5,) * 4
    assert all(len(span.tokens) == len(span.logps) for span in spans)


def test_a_prompt_read_under_old_weights_is_not_shared_with_new_requests():
    policy = tiny_llama()
    fresh = tiny_llama(seed=1)
    requests = _requests(policy, ["shared prompt"], 2, max_tokens=8)
    engine = TorchEngine(policy)
    out = []
    engine._submit(requests[0], out.append)
    engine.step()
    engine.publish(1, dict(fresh.module.named_parameters()))
    engine._submit(requests[1], out.append)
    while len(out) < 2:
        engine.step()
    late = next(c for c in out if len(c.spans) == 1)
    assert _flat(late) == _flat(TorchEngine(fresh).complete([requests[1]])[0])


def test_a_request_beyond_the_context_is_refused_with_the_numbers():
    policy = tiny_llama()
    with pytest.raises(ModelError, match=r"2050 tokens; fake:llama attends to at most 2048"):
        TorchEngine(policy).complete([Request(prompt=(5,) * 50, sampling=Sampling(max_tokens=2000), seed=0)])


def test_an_error_while_decoding_reaches_everyone_who_waits():
    policy = tiny_llama()

    def broken(tokens_N, positions_N, layout):
        raise ModelError("out of order")

    policy.hidden = broken

    async def scenario():
        engine = TorchEngine(policy)
        asked = [engine.generate(r) for r in _requests(policy, ["a", "b"], 1)]
        return await asyncio.gather(*asked, return_exceptions=True)

    assert [str(e) for e in asyncio.run(scenario())] == ["out of order"] * 2
