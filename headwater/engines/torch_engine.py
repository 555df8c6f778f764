"""Batched decoding in this process, on the learner's own weights or on a copy of them."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from headwater.engines.base import Completion, Request
from headwater.engines.cache import Buffer, Decode, Prefill
from headwater.engines.sampling import sample, uniforms
from headwater.errors import ModelError
from headwater.models.policy import Policy
from headwater.models.scoring import project
from headwater.types import Sampling, Span

PREFILL_TOKENS = 8192
"""Prompt tokens read in one forward pass."""


@dataclass(slots=True)
class _Row:
    """A turn being sampled."""

    request: Request
    done: Callable[[Completion], None]
    prompt: int = -1
    tokens: list[int] = field(default_factory=list[int])
    logps: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class _Prompt:
    """A prompt that has been read: the key under which siblings find it, and who uses it."""

    key: tuple[int, tuple[int, ...]]
    users: int
    logits_V: Tensor


class TorchEngine:
    """Decodes all live rows one token at a time; rows join and leave between tokens.

    Requests with the same prompt share one reading of it and one copy of its keys and values.
    `capacity` bounds live rows; more wait. `publish` may come from another thread and takes effect
    between two tokens: a turn that spans it gets one span per version, and prompts read under old
    weights are not shared with requests that come later.
    """

    def __init__(self, policy: Policy, *, capacity: int = 256) -> None:
        self.policy, self.capacity, self.version = policy, capacity, 0
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._prompts: list[_Prompt] = []
        self._prompt_store, self._own_store = Buffer(), Buffer()
        self._pump_task: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self._published: tuple[int, Mapping[str, Tensor] | None] | None = None
        self._head: Tensor | None = None
        self.sampled_tokens = 0

    # -- requests ------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        """Sample one turn, in one batch with whatever else is asked for meanwhile."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

        def deliver(completion: Completion) -> None:
            if not future.done():
                future.set_result(completion)

        self._submit(request, deliver)
        if self._pump_task is None or self._pump_task.done():
            self._pump_task = asyncio.ensure_future(self._pump())
        pump = self._pump_task
        await asyncio.wait({future, pump}, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            pump.result()  # the pump died: raise what killed it
        return await future

    async def _pump(self) -> None:
        while self._waiting or self._rows:
            await asyncio.sleep(0)  # whoever is ready to ask, asks now, and joins this step
            self.step()

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample all and return them in order."""
        results: list[Completion | None] = [None] * len(requests)
        for index, request in enumerate(requests):
            self._submit(request, lambda completion, index=index: results.__setitem__(index, completion))
        while self._waiting or self._rows:
            self.step()
        assert all(result is not None for result in results)
        return [result for result in results if result is not None]

    def _submit(self, request: Request, done: Callable[[Completion], None]) -> None:
        longest: int | None = getattr(self.policy, "longest", None)
        needed = len(request.prompt) + request.sampling.max_tokens
        if longest is not None and needed > longest:
            raise ModelError(
                f"A prompt of {len(request.prompt)} tokens plus max_tokens = {request.sampling.max_tokens} makes "
                f"{needed} tokens; {self.policy.name} attends to at most {longest}. Shorten the prompt "
                "(tasks.max_prompt_tokens) or lower sampling.max_tokens."
            )
        assert request.prompt, "a request needs at least one prompt token"
        self._waiting.append(_Row(request, done))

    # -- weights -------------------------------------------------------------------------------

    def publish(self, version: int, weights: Mapping[str, Tensor] | None = None) -> None:
        """Take `weights` (None: already shared) as `version` before the next token is sampled."""
        with self._lock:
            self._published = (version, weights)

    @torch.no_grad()
    def _take_weights(self) -> None:
        with self._lock:
            published, self._published = self._published, None
        if published is None:
            return
        version, weights = published
        if weights is not None:
            own = dict(self.policy.module.named_parameters())
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        self.version, self._head = version, None

    # -- decoding ------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what waits, then sample one token for every live row."""
        self._take_weights()
        if self._rows:
            self._sample(self._decode())
        free = self.capacity - len(self._rows)
        if free > 0 and self._waiting:
            self._admit([self._waiting.popleft() for _ in range(min(free, len(self._waiting)))])
        if not self._rows:
            self._prompts.clear()
            self._prompt_store.clear()
            self._own_store.clear()

    def _admit(self, rows: list[_Row]) -> None:
        """Read new prompts, once each, and sample the first token of every new row."""
        known = {prompt.key: index for index, prompt in enumerate(self._prompts)}
        fresh: list[tuple[int, tuple[int, ...]]] = []
        for row in rows:
            key = (self.version, row.request.prompt)
            if key not in known:
                known[key] = len(self._prompts) + len(fresh)
                fresh.append(key)
            row.prompt = known[key]
        at = 0
        while at < len(fresh):
            end, tokens = at + 1, len(fresh[at][1])
            while end < len(fresh) and tokens + len(fresh[end][1]) <= PREFILL_TOKENS:
                tokens += len(fresh[end][1])
                end += 1
            self._read(fresh[at:end])
            at = end
        for row in rows:
            self._prompts[row.prompt].users += 1
        first = len(self._rows)
        self._rows.extend(rows)
        logits = torch.stack([self._prompts[row.prompt].logits_V for row in rows])
        self._sample(logits, first)

    def _read(self, keys: list[tuple[int, tuple[int, ...]]]) -> None:
        lengths = [len(tokens) for _, tokens in keys]
        layout = Prefill(lengths, len(self._prompts), self._prompt_store, self.policy.device)
        flat_N = torch.tensor([token for _, tokens in keys for token in tokens], device=self.policy.device)
        hidden_ND = self.policy.hidden(flat_N, layout.tree.positions_N, layout)
        ends = torch.tensor(lengths).cumsum(0) - 1
        logits = self._logits(hidden_ND[ends.to(hidden_ND.device)])
        self._prompts.extend(_Prompt(key, 0, row) for key, row in zip(keys, logits, strict=True))

    def _decode(self) -> Tensor:
        device = self.policy.device
        slot_N = torch.tensor([row.prompt for row in self._rows], device=device)
        length_N = torch.tensor([len(row.tokens) - 1 for row in self._rows], device=device)
        prompt_length_P = torch.tensor([len(prompt.key[1]) for prompt in self._prompts], device=device)
        layout = Decode(slot_N, length_N, prompt_length_P, self._prompt_store, self._own_store)
        token_N = torch.tensor([row.tokens[-1] for row in self._rows], device=device)
        return self._logits(self.policy.hidden(token_N, prompt_length_P[slot_N] + length_N, layout))

    def _logits(self, hidden_ND: Tensor) -> Tensor:
        if self._head is None:  # one float32 copy per version on CPU, instead of one per token
            head = self.policy.head_VD
            self._head = head.float() if head.device.type == "cpu" else head
        hidden_ND = hidden_ND.to(self._head.dtype)
        return project(hidden_ND, self._head, self.policy.softcap)

    def _sample(self, logits_NV: Tensor, first: int = 0) -> None:
        """Append one token to each row from `first` on, whose logits these are; finished rows leave."""
        rows = self._rows[first:]
        kinds: dict[Sampling, list[int]] = {}
        for index, row in enumerate(rows):
            kinds.setdefault(row.request.sampling, []).append(index)
        for sampling, indices in kinds.items():
            seeds = np.array([rows[i].request.seed for i in indices], dtype=np.uint64)
            positions = np.array([len(rows[i].tokens) for i in indices], dtype=np.uint64)
            chosen = logits_NV if len(indices) == len(rows) else logits_NV[indices]
            tokens, logps = sample(chosen, sampling, uniforms(seeds, positions))
            for i, token, logp in zip(indices, tokens.tolist(), logps.tolist(), strict=True):
                rows[i].tokens.append(token)
                rows[i].logps.append(logp)
                rows[i].versions.append(self.version)
        self.sampled_tokens += len(rows)
        for index in range(len(self._rows) - 1, first - 1, -1):
            stop = self._stop(self._rows[index])
            if stop is not None:
                self._finish(index, stop)

    def _stop(self, row: _Row) -> Literal["done", "max_tokens"] | None:
        sampling = row.request.sampling
        if row.tokens[-1] in self.policy.end_of_turn_ids:
            return "done"
        if sampling.stop:
            window = max(map(len, sampling.stop)) + 8  # tokens; each stop string lies within the last ones
            text = self._text(row.tokens[-window:])
            if any(stop in text for stop in sampling.stop):
                return "done"
        return "max_tokens" if len(row.tokens) >= sampling.max_tokens else None

    def _finish(self, index: int, stop: Literal["done", "max_tokens"]) -> None:
        """Deliver a row; the last row and, if unused, the last prompt move into the freed places."""
        row = self._rows[index]
        last = len(self._rows) - 1
        if index != last:
            self._own_store.move(last, index)
            self._rows[index] = self._rows[last]
        self._rows.pop()
        prompt = self._prompts[row.prompt]
        prompt.users -= 1
        if prompt.users == 0:
            self._forget(row.prompt)
        row.done(Completion(spans=self._spans(row), stop=stop))

    def _forget(self, slot: int) -> None:
        last = len(self._prompts) - 1
        if slot != last:
            self._prompt_store.move(last, slot)
            self._prompts[slot] = self._prompts[last]
            for row in self._rows:
                if row.prompt == last:
                    row.prompt = slot
        self._prompts.pop()

    def _spans(self, row: _Row) -> tuple[Span, ...]:
        """One span per version, in order."""
        cuts = [
            0,
            *(i for i in range(1, len(row.tokens)) if row.versions[i] != row.versions[i - 1]),
            len(row.tokens),
        ]
        return tuple(
            Span(
                author="policy",
                tokens=tuple(row.tokens[a:b]),
                text=self._text(row.tokens[a:b]),
                logps=tuple(row.logps[a:b]),
                version=row.versions[a],
            )
            for a, b in itertools.pairwise(cuts)
        )

    def _text(self, tokens: Sequence[int]) -> str:
        text = self.policy.tokenizer.decode(list(tokens), skip_special_tokens=True)
        assert isinstance(text, str)
        return text
