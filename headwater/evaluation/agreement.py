"""Do sampler and learner mean the same by a log-prob? Everything off-policy rests on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwater.engines.base import Request, seed_of
from headwater.engines.torch_engine import TorchEngine
from headwater.models.forward import score
from headwater.models.policy import Policy
from headwater.types import Algorithm, Batch, Sampling

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Largest mean |learner - engine| in nats at equal weights, per precision of the forward pass."""

PROMPTS = ("What is 47 + 38?", "Name three colours.", "Write a line about the sea. It should not rhyme.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Mean and largest |learner - engine| log-prob in nats over `tokens` sampled tokens."""

    dtype: str
    mean_abs: float
    max_abs: float
    tokens: int
    bound: float

    @property
    def ok(self) -> bool:
        """Whether the mean is within the bound for this precision."""
        return self.mean_abs < self.bound


def check(policy: Policy, *, siblings: int = 4, max_tokens: int = 24, temperature: float = 1.0) -> Agreement:
    """Sample from a few prompts of different lengths, then score what was sampled as the learner does."""
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    prompts = [tuple(policy.tokenizer.encode(text, add_special_tokens=False)) for text in PROMPTS]
    requests = [
        Request(prompt=prompt, sampling=sampling, seed=seed_of(0, str(i), 0, sibling, 0))
        for i, prompt in enumerate(prompts)
        for sibling in range(siblings)
    ]
    turns = [completion.spans[0] for completion in TorchEngine(policy).complete(requests)]
    engine_T = torch.tensor([logp for span in turns for logp in span.logps or ()])
    batch = Batch(
        prefix_tokens=tuple(prompts),
        tokens_S=tuple(span.tokens for span in turns),
        prefix_S=tuple(i // siblings for i in range(len(turns))),
        target_T=torch.tensor([token for span in turns for token in span.tokens]),
        place_T=torch.tensor([place for span in turns for place in range(len(span.tokens))]),
        sequence_T=torch.tensor([s for s, span in enumerate(turns) for _ in span.tokens]),
        pulls=(),
        algorithm=Algorithm(name="agreement", terms=(), needs=frozenset()),
        temperature=temperature,
    )
    gap_T = (score(policy, batch) - engine_T).abs()
    return Agreement(
        dtype=str(policy.dtype).removeprefix("torch."),
        mean_abs=float(gap_T.mean()),
        max_abs=float(gap_T.max()),
        tokens=len(gap_T),
        bound=BOUNDS.get(policy.dtype, 0.02),
    )
