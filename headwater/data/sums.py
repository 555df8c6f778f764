"""Additions of whole numbers: the smallest tasks with a right answer, made on the spot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from random import Random
from typing import Literal, get_args

from headwater.data.formats import Row
from headwater.errors import ConfigError, UnknownName

Part = Literal["train", "held_out", "all"]
MAX_DIGITS = 50


def sums(count: int, *, seed: int, settings: Mapping[str, object]) -> Iterator[Row]:
    """`count` rows `What is a + b?`, each a function of seed and index alone.

    Settings: `digits`, of each operand (default 2); `part`, which share of all pairs to draw from
    (default "train"). A fifth of the pairs, chosen by a hash of what is added and not by the seed,
    is "held_out"; so training and held-out tasks never share an addition, in either order.
    """
    digits, part = _checked(settings)
    for index in range(count):
        a, b = _draw(Random(f"sums {digits} {part} {seed} {index}"), digits, part)
        name = f"sums:{part}:{digits}:{seed}:{index}"
        fields = {"id": name, "prompt": f"What is {a} + {b}?", "answer": str(a + b), "a": a, "b": b}
        yield Row(index=index, where=name, fields=fields)


def held_out(a: int, b: int) -> bool:
    """Whether adding these two is kept for evaluation."""
    low, high = sorted((a, b))
    return sha256(f"{low}+{high}".encode()).digest()[0] % 5 == 0


def _draw(random: Random, digits: int, part: Part) -> tuple[int, int]:
    low = 10 ** (digits - 1) if digits > 1 else 0
    while True:
        a, b = random.randrange(low, 10**digits), random.randrange(low, 10**digits)
        if part == "all" or held_out(a, b) == (part == "held_out"):
            return a, b


def _checked(settings: Mapping[str, object]) -> tuple[int, Part]:
    for key in settings:
        if key not in ("digits", "part"):
            raise UnknownName("setting", key, ("digits", "part"), "tasks.settings of 'sums'")
    digits, part = settings.get("digits", 2), settings.get("part", "train")
    if isinstance(digits, bool) or not isinstance(digits, int) or not 1 <= digits <= MAX_DIGITS:
        raise ConfigError(f"tasks.settings.digits is {digits!r}, wanted a whole number from 1 to {MAX_DIGITS}.")
    for known in get_args(Part):
        if part == known:
            return digits, known
    raise UnknownName("part", str(part), get_args(Part), "tasks.settings.part of 'sums'")
