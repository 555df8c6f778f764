import asyncio
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import ConfigError
from headwater.rewards.verifiers.number import answer_number, last_box, number, read_number
from headwater.types import Group, Span, Task, Trajectory

RIGHT = [
    (r"\frac12", r"\boxed{\frac{1}{2}}"),
    ("1/2", r"\boxed{0.5}"),
    ("28%", r"\boxed{28\%}"),
    ("28%", r"\boxed{0.28}"),
    ("10", r"\boxed{10\text{ cm}}"),
    ("10", r"\boxed{10\,\text{cm}^2}"),
    ("10", r"\boxed{10 apples}"),
    ("4", r"\boxed{004}"),
    ("4", r"\boxed{3}, no: \boxed{4}. I checked all 12 cases."),
    ("4", r"\boxed{x = 4}"),
    ("4", r"\boxed{\textbf{4}}"),
    ("18", r"\boxed{\$18.00}"),
    ("73", "The answer is **73**. with 234 too"),
    ("73", "**1.** First. **2.** Second. So it is 73"),
    ("8", "**5** apples and **3** apples are 8"),
    ("1234", "It is 1,234."),
    ("1234", r"\boxed{1{,}234}"),
    ("1,234", "1234"),
    ("-5", "so x = \u22125"),
    ("-5", "a loss of -$5"),
    ("5", "10-5"),
    ("5", "10 - 5"),
    ("0.5", "about .5 of it"),
    ("8/3", "2 2/3"),
    ("8/3", r"2\frac23"),
    ("-1/2", r"$-\frac{1}{2}$"),
    ("3/4", "3 / 4"),
    ("1500", r"1.5 \times 10^{3}"),
    ("1500", "1.5e3"),
    ("90", r"the angle is $90^\circ$"),
    ("73", "73 cm^2 of H2O"),
    ("73", "<think>it might be 5</think>73"),
    ("85", "47 + 38 = 85!"),
    ("18", "She makes $18 every day."),
    ("$18", "18 dollars"),
]
WRONG = [
    ("1/3", r"\boxed{0.333333}"),
    ("50", r"\boxed{50\%}"),
    ("4", r"\boxed{1,2,3,4,5}"),
    ("4", r"\boxed{4}. On reflection, \boxed{5}"),
    ("4", r"\boxed{4 or 5}"),
    ("2", "2 2/3"),
    ("98", "1/2^98"),
    ("1", "1/2^98"),
    ("0", r"\boxed{}"),
    ("4", r"It is 4, so \boxed{4"),
    ("4", r"\boxed 4"),
    ("4", "<think>4</think>I cannot say."),
    ("4", "<think>so it is 4"),
    ("4", ""),
    ("4", "I cannot say."),
    ("4", "__import__('os').getpid() * 0 + 2 + 2"),
    ("3", r"\boxed{3i}"),
    ("3", r"\boxed{3\pi}"),
    ("3", r"\boxed{3 million}"),
    ("3", r"\boxed{3!}"),
    ("3", r"\boxed{3^2}"),
    ("1", r"\boxed{[0,1)}"),
    ("1", r"\boxed{\{2,1\}}"),
    ("3", r"\boxed{\pm3}"),
    ("8", r"\boxed{\sqrt8}"),
    ("2", "the 2nd"),
    ("1", "1/0"),
    ("73", "234 rather than 73, no: 234"),
    ("1.2", "version 1.2.3"),
]
NOT_NUMBERS = [
    "{1,234}",
    "1/2^99",
    "1/2004!",
    r"\pm3",
    r"\text{Evelyn}",
    "[0,1)",
    "10 cm",
    "1,2",
    "1 2",
    "1/0",
]


def judged(answer: str | None, text: str, **settings: float):
    task = Task(id="t", prompt="?", answer=answer)
    trajectory = Trajectory(task_id="t", spans=(Span(author="policy", tokens=(1,), text=text),))
    (signal,) = asyncio.run(number(**settings)(Group(task=task, trajectories=(trajectory,))))
    return signal


@pytest.mark.parametrize(("answer", "text"), RIGHT)
def test_accepts(answer: str, text: str):
    assert judged(answer, text).values == (1.0,)


@pytest.mark.parametrize(("answer", "text"), WRONG)
def test_rejects(answer: str, text: str):
    assert judged(answer, text).values == (0.0,)


@pytest.mark.parametrize("answer", NOT_NUMBERS)
def test_fails_on_a_task_whose_answer_is_no_number(answer: str):
    signal = judged(answer, answer)
    assert (signal.status, signal.values) == ("failed", ())
    assert "not a number" in signal.note


def test_abstains_without_answer():
    assert judged(None, "4").status == "abstained"


def test_tolerance_is_relative_to_the_answer():
    assert judged("1/3", "0.333333", tolerance=1e-5).values == (1.0,)
    assert judged("1/3", "0.333", tolerance=1e-5).values == (0.0,)
    # An absolute tolerance would call these equal: both are smaller than it.
    assert judged("1e-30", "2e-30", tolerance=1e-5).values == (0.0,)
    assert judged("0", "1e-30", tolerance=1e-5).values == (0.0,)


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, float("nan")])
def test_refuses_a_tolerance_that_accepts_anything(tolerance: float):
    with pytest.raises(ConfigError, match="tolerance"):
        number(tolerance=tolerance)


@given(st.fractions())
def test_reads_any_fraction_back(value: Fraction):
    assert read_number(str(value)) == value
    assert answer_number(f"So it is {value}.") == value
    assert answer_number(rf"7 \boxed{{{value}}} 8") == value


@given(st.integers())
def test_reads_thousands_separators(value: int):
    assert answer_number(f"{value:,}") == value


@given(st.text())
def test_any_text_is_read_without_an_error(text: str):
    found = answer_number(text)
    assert found is None or any(sign in "0123456789" for sign in text)


@given(st.text(alphabet="0123456789.,/^{}\\eE+-% !xboxdfracti$*«»", max_size=60))
def test_any_number_like_text_is_read_without_an_error(text: str):
    assert judged("7", text).status == "ok"


HOSTILE = [
    "9" * 200_000,
    "1e999999999",
    "1." * 100_000,
    "1," * 100_000,
    ",".join(["123"] * 50_000) + "^",
    "1/" * 100_000,
    "1 " * 100_000,
    "-" * 200_000 + "1",
    r"\boxed{" * 50_000,
    r"\text{" * 50_000,
    r"\frac{1" * 50_000,
    "{" * 200_000,
    "**" * 100_000,
    "1" + " " * 200_000 + "/",
    r"\boxed{1" + "a " * 100_000 + "!}",
    "<think>" * 50_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12])
def test_hostile_text_takes_linear_time(text: str):
    start = time.perf_counter()
    answer_number(text)
    assert time.perf_counter() - start < 2


def test_a_number_too_long_to_read_is_not_accepted():
    assert judged("9" * 2000, "9" * 2000).status == "failed"
    assert judged("9", "9" * 2000).values == (0.0,)


def test_last_box_matches_braces():
    assert last_box(r"\boxed{1} \boxed{\frac{1}{2}} {3}") == r"\frac{1}{2}"
    assert last_box("none") is None
