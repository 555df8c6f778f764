"""The nouns. Frozen, without behaviour beyond reading themselves.

Axes that end a tensor's name:  S sequences · T scored tokens · N fed tokens · G siblings of a group
· V vocabulary · D hidden width · K turns or steps · 1 a kept axis.
Log-probabilities are in nats. *version* is a count of optimizer steps. *reward* is what a source
said, *advantage* what credit made of it, *loss* what the optimizer sees; *behavior* is the policy
that sampled, *ref* a frozen one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from torch import Tensor

Author = Literal["prompt", "policy", "world"]
Level = Literal["episode", "turn", "step", "token"]
Status = Literal["ok", "abstained", "failed"]
Stop = Literal["done", "max_tokens", "max_turns", "error"]
Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]


class Message(TypedDict):
    """One turn of a chat, as chat templates take it."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Something to be done, and what is known about having done it right.

    `prompt` is raw text, or messages that the model's chat template renders. `answer` is what a
    verifier compares with; `completion` is a demonstration to imitate. Siblings, seeds and
    results are keyed by `id`, which must be unique in its data set.
    """

    id: str
    prompt: str | tuple[Message, ...]
    answer: str | None = None
    completion: str | tuple[Message, ...] | None = None
    env: str | None = None
    meta: Mapping[str, Json] = field(default_factory=dict[str, Json])


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive tokens by one author. `logps` and `version` exist only for sampled tokens:
    nats under the distribution that was sampled from, and the sampler's optimizer step."""

    author: Author
    tokens: tuple[int, ...]
    text: str
    logps: tuple[float, ...] | None = None
    version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """What one source said about one trajectory. A source that cannot tell says `abstained` (not
    for me to judge) or `failed` (I tried and broke) with a note, and no values: never 0."""

    source: str
    name: str
    values: tuple[float, ...] = ()
    level: Level = "episode"
    status: Status = "ok"
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Authored text from the prompt to the stop. Masks and log-probs hold by construction, and
    sampled ids are never tokenised again: the ids trained on are the ids sampled."""

    task_id: str
    spans: tuple[Span, ...]
    stop: Stop = "done"
    agent: str = "policy"
    signals: tuple[Signal, ...] = ()
    parent: str | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens in order, whoever wrote them."""
        return tuple(token for span in self.spans for token in span.tokens)

    @property
    def text(self) -> str:
        """What the policy wrote in its last turn: what a verifier of answers reads."""
        last: list[str] = []
        for span in reversed(self.spans):
            if span.author == "policy":
                last.append(span.text)
            elif last:
                break
        return "".join(reversed(last))

    def signal(self, name: str) -> Signal | None:
        """The signal called `name` if one was given and it is ok."""
        return next((s for s in self.signals if s.name == name and s.status == "ok"), None)

    @property
    def reward(self) -> float | None:
        """The episode reward, or None where no source could tell."""
        found = self.signal("reward")
        return found.values[0] if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Trajectories of one task that may be compared with each other: siblings."""

    task: Task
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What a loss sees: flat over T scored tokens, nothing padded. `sequence_T` says whose token
    each is. A signal that the run does not have is None; the table's `needs` rule out its use."""

    logp_T: Tensor
    advantage_T: Tensor
    sequence_T: Tensor
    behavior_logp_T: Tensor | None = None
    ref_logp_T: Tensor | None = None


Loss = Callable[[Scored], Tensor]
"""Loss per scored token, loss_T. Pure."""

Advantages = tuple[Tensor | None, ...]
"""Per sibling: a scalar that holds for its whole episode, one value per token that its author
`on` wrote, or None where no source could tell and the sibling takes no part."""

Credit = Callable[[Sequence[Group]], Sequence[Advantages]]
"""Signals of all groups of a step -> advantages. Pure, or a class when it must remember."""

Weighting = Callable[[Tensor, Tensor, int], Tensor]
"""(sequence_T, included_S, length) -> weight_T for a whole optimizer step, zero where a sequence is
not included. `length` is the most tokens a turn may have. Whatever is averaged over is settled here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One pull on the weights: coefficient · Σ_T weight_T · loss_T over tokens that `on` wrote."""

    loss: Loss
    weighting: Weighting
    credit: Credit
    on: Author = "policy"
    coefficient: float = 1.0
    name: str = "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row of the table. `needs` names the signals without which it cannot run;
    `compares` says that credit compares siblings, so a group of one can teach nothing."""

    name: str
    terms: tuple[Term, ...]
    needs: frozenset[str]
    compares: bool = False
    online: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """A Term on one batch: advantage and final weight of every scored token."""

    loss: Loss
    name: str
    coefficient: float
    advantage_T: Tensor
    weight_T: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A whole optimizer step. Prefixes are stored once and shared by their continuations.

    `prefix_tokens` has one entry per shared prefix; `tokens_S` the continuation of each sequence
    and `prefix_S` the prefix it continues. Scored token t is `target_T[t]`, which stands at index
    `place_T[t]` of continuation `sequence_T[t]` (index 0 is predicted by the prefix's last token).
    Scored tokens are in order of sequence and place. Behavior log-probs are None when nobody
    sampled (demonstrations). `weight_T` in each pull is final: whoever adds up weight · loss over
    any partition of the step gets the same gradient.
    """

    prefix_tokens: tuple[tuple[int, ...], ...]
    tokens_S: tuple[tuple[int, ...], ...]
    prefix_S: tuple[int, ...]
    target_T: Tensor
    place_T: Tensor
    sequence_T: Tensor
    pulls: tuple[Pull, ...]
    behavior_logp_T: Tensor | None = None
    ref_logp_T: Tensor | None = None
    temperature: float = 1.0
    oldest_version: int | None = None
    dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one optimizer step did. `mismatch` is mean |learner - behavior| log-prob in nats; `ess`
    the effective sample size of token importance weights, as a fraction of T; `kl` the k3 estimate
    to the reference in nats per token (None without one)."""

    version: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    entropy: float
    mismatch: float | None = None
    ess: float | None = None
    clip_fraction: float | None = None
    kl: float | None = None
    seconds: float = 0.0
    terms: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample. `max_tokens` bounds each turn. Temperature 0 is greedy. top_p, top_k and
    min_p truncate the support; at their defaults (1, 0, 0) they do nothing. `stop` strings end a
    turn at the token that completes one; the token stays, because it was sampled."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()

    @property
    def truncates(self) -> bool:
        """Whether tokens of positive probability can be excluded."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)
