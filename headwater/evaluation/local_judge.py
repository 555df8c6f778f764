"""A model of this machine as a judge: the same loader and engine as a run's policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headwater.data.render import Renderer
from headwater.engines.base import Engine, Request, seed_of
from headwater.engines.torch_engine import TorchEngine
from headwater.errors import ConfigError
from headwater.models.load import ModelConfig, load
from headwater.rewards.judge.ask import AskError
from headwater.rewards.judge.build import remember
from headwater.rewards.judge.panel import LLMJudge
from headwater.rewards.judge.prompts import HELPFUL
from headwater.rewards.judge.sources import Listwise, Pairwise, Pointwise
from headwater.types import Group, Message, Sampling, Signal, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model behind an engine, as an Ask: what is asked meanwhile joins its batch. It may be a run's own policy,
    which then judges itself. `longest` is how many tokens it attends to, if that is bounded."""

    name: str
    engine: Engine
    renderer: Renderer
    longest: int | None = None

    async def complete(self, messages: Sequence[Message], *, temperature: float, max_tokens: int, seed: int = 0) -> str:
        """What the model says. Raises AskError for messages that it cannot attend to as a whole."""
        prompt = self.renderer.prompt(Task(id="judge", prompt=tuple(messages)))
        room = None if self.longest is None else self.longest - len(prompt.tokens)
        if room is not None and room < max_tokens:
            raise AskError(
                f"{self.name} attends to {self.longest} tokens; a prompt of {len(prompt.tokens)} and max_tokens = "
                f"{max_tokens} are more."
            )
        sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
        request = Request(prompt=prompt.tokens, sampling=sampling, seed=seed_of(seed, prompt.text, 0, 0, 0))
        return (await self.engine.generate(request)).text


def local_model(name: str, dtype: str = "auto") -> LocalModel:
    """The model that a recipe calls `name`, ready to be asked. Raises ModelError where there is none such."""
    policy = load(ModelConfig.model_validate({"name": name, "dtype": dtype}))
    policy.module.requires_grad_(False)
    renderer = Renderer(policy.tokenizer, "auto", policy.end_of_turn_ids)
    return LocalModel(
        name=name, engine=TorchEngine(policy), renderer=renderer, longest=getattr(policy, "longest", None)
    )


class LocalJudge:
    """A local model as a reward. A recipe names it headwater.evaluation.local_judge:LocalJudge; for the settings
    see Pointwise, Pairwise and Listwise, of which `mode` is one, and LLMJudge."""

    offers = frozenset({"reward"})
    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        *,
        model: str,
        mode: Literal["pointwise", "pairwise", "listwise"] = "pointwise",
        name: str = "local_judge",
        dtype: str = "auto",
        rubric: str = HELPFUL,
        scale: Sequence[int] = (1, 10),
        temperature: float = 0.0,
        max_tokens: int = 256,
        max_characters: int = 20_000,
        guard: bool = True,
        cache: str | None = None,
    ) -> None:
        kinds = {"pointwise": Pointwise, "pairwise": Pairwise, "listwise": Listwise}
        if mode not in kinds or len(scale) != 2:
            raise ConfigError(
                f"The local judge has mode = {mode!r} and scale = {scale!r}; wanted one of {', '.join(kinds)}, and two "
                "whole numbers."
            )
        ask, secret = remember(local_model(model, dtype), cache)
        self.name = name
        self.judge = LLMJudge(
            ask=ask,
            rubric=rubric,
            scale=(scale[0], scale[1]),
            temperature=temperature,
            max_tokens=max_tokens,
            max_characters=max_characters,
            guard=guard,
            secret=secret,
        )
        self._source = kinds[mode](name=name, judge=self.judge)

    async def __call__(self, group: Group) -> Sequence[Signal]:
        return await self._source(group)
