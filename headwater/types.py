"""The nouns. Frozen, without behaviour beyond reading themselves.

Axes that end a tensor's name:  S sequences · T scored tokens · N fed tokens · G siblings of a group
· V vocabulary · D hidden width · C classes · P pairs · K turns or steps · 1 a kept axis.
Log-probabilities are in nats. *version* counts the weights that were
published, one for each step of the loop. *reward* is what a source
said, *advantage* what credit made of it, *loss* what the optimizer sees; *behavior* is the policy
that sampled, *ref* a frozen one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypedDict

from jaxtyping import Float, Int
from torch import Tensor

FloatS = Float[Tensor, "S"]
FloatT = Float[Tensor, "T"]
FloatG = Float[Tensor, "G"]
FloatK = Float[Tensor, "K"]
FloatTC = Float[Tensor, "T C"]
FloatTV = Float[Tensor, "T V"]
IntT = Int[Tensor, "T"]
IntS = Int[Tensor, "S"]

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
    verifier compares with; `completion` is a demonstration to imitate. `rejected` is one that people
    liked less, by the `ratings` of the two if they gave any; `label` says how good the completion is
    (1 good, 0 bad, or a rating). Where the completion is cut into `steps`, `step_labels` say of each
    one whether it is right, as far as anyone knows. Siblings, seeds and results are keyed by `id`,
    which must be unique in its data set.
    """

    id: str
    prompt: str | tuple[Message, ...]
    answer: str | None = None
    completion: str | tuple[Message, ...] | None = None
    rejected: str | tuple[Message, ...] | None = None
    ratings: tuple[float, float] | None = None
    label: float | None = None
    steps: tuple[str, ...] = ()
    step_labels: tuple[float, ...] = ()
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
    for me to judge) or `failed` (I tried and broke) with a note, and no values: never 0.

    Values of level episode are one number; of level turn, one for each turn of the policy; of level
    step, one for each entry of `ends`, which counts over all tokens that the policy wrote and names the
    last token of each step; of level token, one for each token that the policy wrote. A "value" of level
    token has one more: what is to come from before each token, and lastly from after the last one."""

    source: str
    name: str
    values: tuple[float, ...] = ()
    level: Level = "episode"
    ends: tuple[int, ...] = ()
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

    @property
    def turns(self) -> tuple[int, ...]:
        """How many tokens the policy wrote in each of its turns. A turn ends where the world speaks."""
        counts: list[int] = []
        speaking = False
        for span in self.spans:
            if span.author == "policy":
                counts.append((counts.pop() if speaking else 0) + len(span.tokens))
            speaking = span.author == "policy"
        return tuple(counts)

    @property
    def logps(self) -> tuple[float, ...] | None:
        """Behavior log-prob of every token that the policy wrote, or None where nobody sampled it."""
        found: list[float] = []
        for span in self.spans:
            if span.author == "policy":
                if span.logps is None:
                    return None
                found.extend(span.logps)
        return tuple(found)

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
    """What a loss sees: flat over T scored tokens of one author, nothing padded. `sequence_T` says
    whose token each is, `group_T` of which group; both may skip numbers. A sequence is always whole;
    a group is whole where the Algorithm says `whole_groups`. A loss of a whole sequence or group is the
    same number at each of its tokens, and its weighting adds it up to once. A column that the run
    does not have is None; the table's `needs` rule out its use.

    logp_T           log pi of now, with gradient
    advantage_T      what credit made of the signals: an advantage, or the target of a term of targets
    behavior_logp_T  log mu: of the policy that sampled
    proximal_logp_T  log pi_old: of the learner before this step's first update, by its own arithmetic
    ref_logp_T       log ref: of a frozen policy
    value_T          what a scalar head says (critic or reward model), with gradient; [T, C] with C classes
    old_value_T      what the critic said before this step's first update
    measured         by name, what a Measure found in the whole distribution at each token, with gradient,
                     and what signals of level episode say of its sequence, without
    """

    logp_T: FloatT
    advantage_T: FloatT
    sequence_T: IntT
    group_T: IntT | None = None
    behavior_logp_T: FloatT | None = None
    proximal_logp_T: FloatT | None = None
    ref_logp_T: FloatT | None = None
    value_T: FloatT | FloatTC | None = None
    old_value_T: FloatT | None = None
    measured: Mapping[str, FloatT] = field(default_factory=dict[str, Tensor])


Measure = Callable[[Tensor, Tensor | None], Tensor]
"""(logp_TV, ref_logp_TV) -> [T]: a number, with gradient, about the whole next-token distribution at
each token, such as its entropy or its divergence from the reference's. Pure. Called on chunks of T."""

Loss = Callable[[Scored], Tensor]
"""Loss per scored token, loss_T. Pure."""

Advantages = tuple[Tensor | None, ...]
"""Per sibling: a scalar that holds for its whole episode, one value per token that its author `on`
wrote (NaN where a token takes no part), or None where the sibling takes none."""

Credit = Callable[[Sequence[Group]], Sequence[Advantages]]
"""Signals of all groups of a step -> advantages. Pure, or a class when it must remember."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Which tokens a term covers in a whole step, as weightings see it: whose token each is, of which
    group each sequence is, and `length`, the most tokens a turn may have. Tokens and sequences that
    take no part are not in it."""

    sequence_T: IntT
    group_S: IntS
    length: int = 1


Weighting = Callable[[Extent], Tensor]
"""The extent of a whole optimizer step -> weight_T. Whatever is averaged over is settled here."""


class Memory(Protocol):
    """Something that a credit remembers from step to step."""

    def state(self) -> dict[str, float]:
        """All of it, as numbers."""
        ...

    def load(self, state: Mapping[str, float]) -> None:
        """Remember what `state` returned."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One pull on the weights: coefficient · Σ_T weight_T · loss_T over tokens that `on` wrote. Where
    credit gives advantages, one of zero is no pull and its tokens need not be run; a target may be zero."""

    loss: Loss
    weighting: Weighting
    credit: Credit
    on: Author = "policy"
    gives: Literal["advantage", "target"] = "advantage"
    coefficient: float | Callable[[], float] = 1.0
    name: str = "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row of the table.

    needs         signals without which it cannot run. "ref_logp" has the run keep a frozen reference,
                  "value" a critic; "logp" asks for log pi_old before credit is given
    compares      credit compares siblings, so a group of one can teach nothing
    online        it learns from what the policy samples, not from a data set
    on_policy     it is right only for what the current weights sampled
    whole_groups  its loss compares siblings, so a group is never split over micro-batches
    reads         signals of level episode that its losses see beside what was measured
    measures      by name, what is measured in the whole next-token distribution
    head          where a scalar head is read: "before" a token is written (critic) or "after" (reward
                  model); None without one. `classes` is how many numbers it gives
    language      whether log-probs are needed at all
    baseline      one more sibling is sampled greedily, to compare with and not to train on
    keep          which groups teach; others are replaced by fresh ones (dynamic sampling)
    memory        what it remembers from step to step, to be kept in checkpoints
    after         told what each step came to, for coefficients that follow it
    """

    name: str
    terms: tuple[Term, ...]
    needs: frozenset[str]
    compares: bool = False
    online: bool = True
    on_policy: bool = False
    whole_groups: bool = False
    reads: frozenset[str] = frozenset()
    measures: Mapping[str, Measure] = field(default_factory=dict[str, Measure])
    head: Literal["before", "after"] | None = None
    classes: int = 1
    language: bool = True
    baseline: bool = False
    keep: Callable[[Group], bool] | None = None
    memory: tuple[Memory, ...] = ()
    after: Callable[[Update], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """A Term on one batch: its tokens, and the advantage and final weight of each. `of_T` are indices
    into the batch's scored tokens, ascending; `advantage_T` and `weight_T` are as long as it."""

    loss: Loss
    name: str
    coefficient: float
    of_T: Tensor
    advantage_T: Tensor
    weight_T: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A whole optimizer step. Prefixes are stored once and shared by their continuations.

    `prefix_tokens` has one entry per group, the prefix that its siblings share; `tokens_S` the
    continuation of each sequence and `prefix_S` the group, and so the prefix, it continues. Scored
    token t is `target_T[t]`, which stands at index `place_T[t]` of continuation `sequence_T[t]` (index 0
    is predicted by the prefix's last token). Scored tokens are in order of sequence and place. Columns
    of log-probs and values are as in Scored: None where the run has none (nobody sampled a
    demonstration), NaN at tokens of the world. `constants` are signals of level episode that the algorithm
    `reads`, at every token of the sequence. Weights in each pull are final: whoever adds up weight ·
    loss over any partition of the step gets the same gradient.
    """

    prefix_tokens: tuple[tuple[int, ...], ...]
    tokens_S: tuple[tuple[int, ...], ...]
    prefix_S: tuple[int, ...]
    target_T: Tensor
    place_T: Tensor
    sequence_T: Tensor
    pulls: tuple[Pull, ...]
    algorithm: Algorithm
    behavior_logp_T: Tensor | None = None
    proximal_logp_T: Tensor | None = None
    ref_logp_T: Tensor | None = None
    old_value_T: Tensor | None = None
    constants: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    temperature: float = 1.0
    oldest_version: int | None = None
    dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one step did. `mismatch` is mean |learner - behavior| log-prob in nats; `ess`
    the effective sample size of token importance weights, as a fraction of T, and `sequence_ess` that
    of whole answers' weights; `kl` the k3 estimate
    to the reference in nats per token (None without one)."""

    version: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    entropy: float
    mismatch: float | None = None
    ess: float | None = None
    sequence_ess: float | None = None
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
