"""What counts as a verdict: a last line of exact form, markup around it aside. Anything else is none."""

from __future__ import annotations

import re
from typing import Literal

from headwater.rewards.verifiers.thinking import after_thinking

Winner = Literal["first", "second", "tie"]
_BEFORE, _AFTER = " \t\r*_`#>\"'", " \t\r*_`\"'."
"""What models put around a line to make it stand out. The code in the line is what makes it a verdict."""
_WINNERS: dict[str, Winner] = {"A": "first", "B": "second", "tie": "tie"}


def read_score(reply: str, code: str, scale: tuple[int, int]) -> int | None:
    """The score that a reply ends with, or None."""
    said = _verdict(reply, code)
    if said is None or not re.fullmatch(r"-?[0-9]{1,4}", said):
        return None
    score = int(said)
    return score if scale[0] <= score <= scale[1] and str(score) == said else None


def read_winner(reply: str, code: str) -> Winner | None:
    """Which of two answers a reply ends in favour of, or None."""
    said = _verdict(reply, code)
    return None if said is None else _WINNERS.get(said.lower() if len(said) > 1 else said)


def read_ranking(reply: str, code: str, count: int) -> tuple[int, ...] | None:
    """Indices from 0, best first, or None where a reply does not end in a full ranking."""
    said = _verdict(reply, code)
    if said is None or not re.fullmatch(r"[0-9]{1,3}(?: > [0-9]{1,3})*", said):
        return None
    places = tuple(int(number) - 1 for number in said.split(" > "))
    return places if sorted(places) == list(range(count)) else None


def _verdict(reply: str, code: str) -> str | None:
    """What follows the code on the last line; None if another verdict with that code contradicts it."""
    mark = f"Verdict {code}: "
    lines = [line.lstrip(_BEFORE).rstrip(_AFTER) for line in after_thinking(reply).rstrip().split("\n")]
    if not lines[-1].startswith(mark):
        return None
    given = {line.removeprefix(mark) for line in lines if line.startswith(mark)}
    return lines[-1].removeprefix(mark) if len(given) == 1 else None
