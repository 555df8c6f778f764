"""Answers that must be the right text as a whole."""

from __future__ import annotations

from headwater.rewards.source import Verifier
from headwater.rewards.verifiers.thinking import after_thinking
from headwater.types import Task


def exact(*, casefold: bool = False, collapse: bool = False) -> Verifier:
    """1 where the whole answer, trimmed, is the task's answer; else 0.

    `casefold` makes upper and lower case alike; `collapse` makes any run of white space one space.
    Thinking before the answer is not part of it. Abstains on a task without answer.
    """

    def plain(text: str) -> str:
        text = " ".join(text.split()) if collapse else text.strip()
        return text.casefold() if casefold else text

    def verdict(text: str, task: Task) -> bool | None:
        return None if task.answer is None else plain(after_thinking(text)) == plain(task.answer)

    return Verifier(name="exact", verdict=verdict, needs=frozenset({"answer"}))
