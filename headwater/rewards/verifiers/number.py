r"""Answers that are a number, compared exactly.

Which number of a text is its answer: the content of the last `\boxed{}` if there is one; else the
only bold number, if exactly one is; else the last number. A box must hold one number and nothing
else but a unit. What is in doubt (an open box, two numbers in one, a power) is no number, so it is
wrong. Nothing is evaluated, every pattern takes time linear in the text, and sizes are bounded.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

from headwater.errors import ConfigError
from headwater.rewards.source import Verifier
from headwater.rewards.verifiers.thinking import after_thinking
from headwater.types import Task

MAX_LITERAL = 1000
"""Longer numbers, in characters, are not read."""


def number(*, tolerance: float = 0.0) -> Verifier:
    """1 where the answer's number equals the task's answer, else 0.

    Equality is exact (1/2 = 0.5 = 50%, but 1/3 is not 0.333), or within `tolerance`, relative to
    the task's answer. Thinking before the answer is not read. Abstains on a task without answer;
    fails on one whose answer is not a number.
    """
    if not 0 <= tolerance < 1:
        raise ConfigError(
            f"The reward 'number' has tolerance = {tolerance}, wanted a share of the answer: from 0 to below 1."
        )
    allowed = Fraction(tolerance)

    def verdict(text: str, task: Task) -> bool | None:
        if task.answer is None:
            return None
        wanted = read_number(task.answer)
        if wanted is None:
            raise ValueError(f"the task's answer {task.answer[:80]!r} is not a number")
        found = answer_number(text)
        return found is not None and abs(found - wanted) <= allowed * abs(wanted)

    return Verifier(name="number", verdict=verdict, needs=frozenset({"answer"}))


def answer_number(text: str) -> Fraction | None:
    """The number that a text gives as its answer, or None."""
    text = after_thinking(text)
    box = last_box(text)
    if box is not None:
        return read_number(box, unit=True)
    bold = [found for item in _BOLD.findall(text) if (found := read_number(item)) is not None]
    if len(bold) == 1:
        return bold[0]
    last = deque(_NUMBER.finditer(_plain(text)), maxlen=1)
    return _value(last[0]) if last else None


def read_number(text: str, *, unit: bool = False) -> Fraction | None:
    """The value of a text that is one number and nothing else, but for a currency sign, a percent
    sign, an `x =` before it and, if `unit` allows, a unit after it; or None."""
    found = (_WITH_UNIT if unit else _ALONE).fullmatch(_plain(text))
    return _value(found) if found else None


def last_box(text: str) -> str | None:
    r"""What the last `\boxed` holds: "" if it is never closed or has no braces, None if there is none."""
    start = text.rfind("\\boxed")
    if start < 0:
        return None
    rest = text[start + len("\\boxed") :].lstrip()
    if not rest.startswith("{"):
        return ""
    depth = 0
    for index, sign in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if depth == 0:
            return rest[1:index]
    return ""


# --- from TeX and typography to plain signs --------------------------------------------------------

_BOLD = re.compile(r"\*\*([^*\n]{1,100}(?<![.:)]))\*\*")  # "**1.**" is an item of a list
_MINUS = str.maketrans({"\u2212": "-", "\uff0d": "-", "\ufe63": "-"})
_SPACES = ("\\,", "\\!", "\\;", "\\:", "\\ ", "~", "\\left", "\\right")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac ?(?:\{ ?([-+]?[0-9.]+) ?\}|([0-9])) ?(?:\{ ?([0-9.]+) ?\}|([0-9]))")
_POWER_OF_TEN = re.compile(r"(?<=[0-9]) ?(?:\\times|\\cdot|[×*x]) ?10 ?\^ ?(?:\{ ?([-+]?[0-9]+) ?\}|([-+]?[0-9]+))")
_DEGREES = re.compile(r"\^ ?(?:\\circ|\{ ?\\circ ?\})|\\degree")
_SIGNED_CURRENCY = re.compile(r"(?<=[-+]) ?[$€£¥] ?(?=[0-9.])")
_CURRENCY = re.compile(r"[$€£¥]")


def _plain(text: str) -> str:
    """One line of plain signs; what came out of `\\text{}` stands between « and »."""
    text = text.translate(_MINUS).replace("{,}", ",").replace("\\$", "$").replace("\\%", "%")
    text = re.sub(r"(?<=[0-9])\\[,!](?=[0-9])", "", text)
    for space in _SPACES:
        text = text.replace(space, " ")
    text = " ".join(text.split())
    text = _TEXT.sub(r" «\1» ", text)
    text = re.sub(r"(?<=[0-9])(?=\\[dt]?frac)", " ", text)
    text = _FRACTION.sub(lambda m: f"{m[1] or m[2]}/{m[3] or m[4]}", text)
    text = _POWER_OF_TEN.sub(lambda m: f"e{m[1] or m[2]}", text)
    text = _CURRENCY.sub(" ", _SIGNED_CURRENCY.sub("", _DEGREES.sub("°", text)))
    text = " ".join(text.split())
    wrapped = re.fullmatch(r"« ?([^«»]*?) ?»", text)
    return wrapped[1] if wrapped else text


# --- what a number looks like ----------------------------------------------------------------------

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_LITERAL = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,4}})?"
# Not the end of a word, a decimal, a quotient or an exponent ...
_BEFORE = r"(?<![A-Za-z0-9_./^])(?<!\^\{)(?<!\^[-+])(?<!\^\{[-+])"
# ... nor the start of a longer number, a quotient, a power or an ordinal.
_AFTER = r"(?![0-9]|\.[0-9]| ?/ ?[-+]?[0-9]| ?\^|[eE][-+]?[0-9]|(?:st|nd|rd|th)\b)"
_NUMBER = re.compile(
    rf"(?:(?<![A-Za-z0-9_)\]}}.%/^-])(?P<sign>[-+]))?{_BEFORE}"
    rf"(?:(?:(?P<whole>[0-9]+) )?(?P<top>[0-9]+)/(?P<bottom>[0-9]+)"
    rf"|(?P<above>{_LITERAL}) ?/ ?(?P<below>{_LITERAL})|(?P<literal>{_LITERAL})){_AFTER}"
    r"(?P<percent> ?%| percent\b)?"
)
_NAME = r"(?:[A-Za-z]{1,20} ?= ?)?"
# Words that change a number's value or add another are no units.
_NOT_A_UNIT = (
    r"(?![^»]*\b(?:or|and|to|pi|sqrt|log|ln|exp|sin|cos|tan|mod|factorial|infinity"
    r"|dozen|hundred|thousand|million|billion|trillion|squared|cubed)\b)"
)
_UNIT = r"(?: ?« ?[A-Za-z°/ .*-]*»(?: ?\^ ?(?:[23]|\{[23]\}))?| ?°[CF]?| ?[A-Za-z]{2}[A-Za-z .-]*)"
_ALONE = re.compile(rf"{_NAME}{_NUMBER.pattern} ?\.?")
_WITH_UNIT = re.compile(rf"{_NAME}{_NUMBER.pattern}(?:{_NOT_A_UNIT}{_UNIT})? ?\.?")


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > MAX_LITERAL:
        return None
    if match["top"]:
        found = _quotient(Fraction(match["top"]), Fraction(match["bottom"]))
        if found is not None and match["whole"]:
            found += int(match["whole"])
    elif match["above"]:
        found = _quotient(_fraction(match["above"]), _fraction(match["below"]))
    else:
        found = _fraction(match["literal"])
    if found is None:
        return None
    found = -found if match["sign"] == "-" else found
    return found / 100 if match["percent"] else found


def _fraction(literal: str) -> Fraction:
    return Fraction(literal.replace(",", ""))


def _quotient(above: Fraction, below: Fraction) -> Fraction | None:
    return above / below if below else None
