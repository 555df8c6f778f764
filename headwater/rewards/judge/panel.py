"""A judge: a model, a rubric and a scale. It scores, compares and ranks, and counts what went wrong."""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headwater.errors import ConfigError
from headwater.rewards.judge import prompts
from headwater.rewards.judge.ask import Ask, AskError
from headwater.rewards.judge.prompts import Question, Secret
from headwater.rewards.judge.verdicts import Winner, read_ranking, read_score, read_winner
from headwater.types import Message

T = TypeVar("T")

MASTER_KEYS = (
    "",
    " ",
    ".",
    ",",
    ":",
    "Thought process:",
    "Let's solve this problem step by step.",
    "Solution",
    "\u89e3",
    "\u304b\u3044\u305b\u3064",
    "Respuesta",
)
"""Answers without content that judges are known to reward (One Token to Fool LLM-as-a-Judge, Zhao et al., 2025,
arXiv:2507.08794)."""

_HOLLOW = frozenset({"".join(c for c in key.casefold() if c.isalnum()) for key in MASTER_KEYS})
_LONGEST_HOLLOW = max(map(len, _HOLLOW))


@dataclass(slots=True)
class Tally:
    """What a judge was asked and what became of it. `unparsed` replies had no verdict, `unanswered` asks no
    reply; `guarded` answers had no content and were never shown. Of `duels`, `inconsistent` ones were
    decided by the order of the answers."""

    asked: int = 0
    unparsed: int = 0
    unanswered: int = 0
    guarded: int = 0
    duels: int = 0
    ties: int = 0
    inconsistent: int = 0
    unjudged: int = 0


@dataclass(frozen=True, slots=True)
class Said(Generic[T]):
    """A verdict, or None and why there is none."""

    verdict: T | None
    note: str = ""
    question: Question | None = None
    reply: str = ""


@dataclass(frozen=True, slots=True)
class Duel:
    """Two answers compared in both orders. `forward` and `backward` name the winner by who it is, not by
    where it stood."""

    forward: Winner | None
    backward: Winner | None
    note: str = ""

    @property
    def judged(self) -> bool:
        """Whether both orders gave a verdict."""
        return self.forward is not None and self.backward is not None

    @property
    def consistent(self) -> bool:
        """Whether both orders gave the same verdict."""
        return self.judged and self.forward == self.backward

    @property
    def winner(self) -> Winner | None:
        """Who won in both orders; "tie" where they disagree, None where one gave no verdict."""
        if not self.judged:
            return None
        return self.forward if self.consistent else "tie"


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMJudge:
    """A language model that judges by a rubric.

    `scale` is what scores go from and to. Each answer may have `max_characters`; a longer one is not judged.
    With `guard`, an answer that is hollow (punctuation, or nothing but the opening of an answer) gets the lowest
    score and loses to any other without being shown.
    """

    ask: Ask
    rubric: str = prompts.HELPFUL
    scale: tuple[int, int] = (1, 10)
    temperature: float = 0.0
    max_tokens: int = 1024
    max_characters: int = 20_000
    guard: bool = True
    secret: Secret = field(default_factory=Secret)
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        if self.scale[0] >= self.scale[1] or max(map(abs, self.scale)) > 1000:
            raise ConfigError(
                f"The judge's scale is {self.scale}; wanted a lower and a higher whole number, at most 1000 from 0."
            )
        if not self.rubric.strip():
            raise ConfigError("The judge's rubric is empty. Say what makes an answer good, or leave it out.")
        if not self.temperature >= 0 or self.max_tokens < 1 or self.max_characters < 1:
            raise ConfigError(
                f"The judge has temperature = {self.temperature}, max_tokens = {self.max_tokens} and max_characters = "
                f"{self.max_characters}; wanted at least 0, 1 and 1."
            )

    @property
    def name(self) -> str:
        return self.ask.name

    async def score(self, prompt: str, answer: str, reference: str | None = None, *, seed: int = 0) -> Said[int]:
        """A score on the scale."""
        if self.guard and hollow(answer):
            self.tally.guarded += 1
            return Said(self.scale[0], "an answer without content")
        if note := self._too_long(answer):
            return Said(None, note)
        question = prompts.pointwise(self.secret, self.rubric, self.scale, prompt, answer, reference)
        return await self._put(question, lambda reply: read_score(reply, question.code, self.scale), seed)

    async def choose(self, prompt: str, first: str, second: str, *, seed: int = 0) -> Said[Winner]:
        """The better of two answers as they stand, in this order only."""
        if self.guard and (hollow(first) or hollow(second)):
            self.tally.guarded += 1
            both = hollow(first) and hollow(second)
            winner: Winner = "tie" if both else "second" if hollow(first) else "first"
            return Said(winner, "an answer without content")
        if note := self._too_long(first, second):
            return Said(None, note)
        question = prompts.pairwise(self.secret, self.rubric, prompt, first, second)
        return await self._put(question, lambda reply: read_winner(reply, question.code), seed)

    async def duel(self, prompt: str, first: str, second: str, *, seed: int = 0) -> Duel:
        """Two answers in both orders."""
        ahead, behind = await asyncio.gather(
            self.choose(prompt, first, second, seed=seed), self.choose(prompt, second, first, seed=seed)
        )
        found = Duel(ahead.verdict, turned(behind.verdict), ahead.note or behind.note)
        self.tally.duels += 1
        self.tally.unjudged += not found.judged
        self.tally.inconsistent += found.judged and not found.consistent
        self.tally.ties += found.consistent and found.winner == "tie"
        return found

    async def rank(self, prompt: str, answers: Sequence[str], *, seed: int = 0) -> Said[tuple[int, ...]]:
        """Indices of the answers, best first, as they stand in this order only. Not guarded: leave out hollow
        ones."""
        if note := self._too_long(*answers):
            return Said(None, note)
        question = prompts.listwise(self.secret, self.rubric, prompt, answers)
        return await self._put(question, lambda reply: read_ranking(reply, question.code, len(answers)), seed)

    async def again(self, said: Said[Winner], objection: str, *, seed: int = 0) -> Said[Winner]:
        """The verdict of `choose` after someone has answered it with `objection`."""
        assert said.question is not None, "only what was asked can be objected to"
        code = said.question.code
        more = (
            *said.question.messages,
            Message(role="assistant", content=said.reply),
            Message(
                role="user",
                content=f"{objection} End with one line of exactly this form: {prompts.verdict_line(code, 'W')}",
            ),
        )
        return await self._put(Question(more, code), lambda reply: read_winner(reply, code), seed)

    async def _put(self, question: Question, read: Callable[[str], T | None], seed: int) -> Said[T]:
        self.tally.asked += 1
        try:
            reply = await self.ask.complete(
                question.messages, temperature=self.temperature, max_tokens=self.max_tokens, seed=seed
            )
        except AskError as error:
            self.tally.unanswered += 1
            return Said(None, str(error), question)
        verdict = read(reply)
        if verdict is None:
            self.tally.unparsed += 1
            last = reply.rstrip().rpartition("\n")[2]
            return Said(None, f"the judge gave no verdict; its last line is {last[-80:]!r}", question, reply)
        return Said(verdict, "", question, reply)

    def _too_long(self, *texts: str) -> str:
        longest = max(map(len, texts), default=0)
        return f"an answer of {longest} characters; at most {self.max_characters} are judged" * (
            longest > self.max_characters
        )


def hollow(text: str) -> bool:
    """Whether an answer has no letter, digit or symbol (such as ∞ or ≤), or is nothing but a known opening
    without content."""
    said: list[str] = []
    for character in text:
        if character.isalnum():
            said.append(character.casefold())
            if len(said) > _LONGEST_HOLLOW:
                return False
        elif unicodedata.category(character) in ("Sm", "So"):
            return False
    return "".join(said) in _HOLLOW


def turned(winner: Winner | None) -> Winner | None:
    """The same winner, with the two answers in the other order."""
    swapped: dict[Winner | None, Winner] = {"first": "second", "second": "first", "tie": "tie"}
    return swapped.get(winner)
