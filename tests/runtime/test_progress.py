from __future__ import annotations

import io

import pytest
from rich.console import Console

from headwater.config import check_recipe
from headwater.runtime.progress import Terminal, duration, sparkline

RECIPE = check_recipe(
    {
        "run": {"name": "try", "steps": 4},
        "model": {"name": "fake:tabular"},
        "tasks": {"source": "sums"},
        "rewards": [{"name": "number"}],
    },
    "a recipe",
)


def _terminal(live: bool) -> tuple[Terminal, io.StringIO]:
    file = io.StringIO()
    return Terminal(Console(file=file, force_terminal=live, width=120, color_system=None)), file


@pytest.mark.parametrize(
    ("values", "drawn"),
    [([], ""), ([1.0], "▁"), ([2.0, 2.0], "▁▁"), ([0.0, 0.5, 1.0], "▁▅█"), ([1.0, -1.0], "█▁")],
)
def test_a_sparkline_lies_between_its_extremes(values, drawn):
    assert sparkline(values) == drawn


def test_a_sparkline_shows_the_last_values_only():
    assert sparkline([100.0, 0.0, 1.0], width=2) == "▁█"


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (125, "2:05"), (3723, "1:02:03")])
def test_durations(seconds, shown):
    assert duration(seconds) == shown


def test_without_a_terminal_each_step_is_a_plain_line():
    terminal, file = _terminal(live=False)
    terminal.start(RECIPE, 0)
    terminal.step(0, {"held_out": 0.047})
    terminal.step(1, {"reward": 0.25, "loss": 0.1, "tokens_per_s": 512.3})
    terminal.step(2, {"reward": 0.5, "loss": 0.1, "held_out": 0.6})
    terminal.finish()
    opening, before, first, second = file.getvalue().splitlines()
    assert "grpo on sums, fake:tabular, 4 steps, in runs/try" in opening
    assert before == "held-out accuracy before training: 0.047"
    assert first.startswith("step 1/4  reward 0.250  held-out 0.047  tokens/s 512  left ")
    assert second.startswith("step 2/4  reward 0.500  held-out 0.600  left ")
    assert second.endswith("▁█")


def test_the_time_left_is_that_of_the_steps_left(monkeypatch):
    clock = iter([100.0, 110.0])
    monkeypatch.setattr("headwater.runtime.progress.time.monotonic", lambda: next(clock))
    terminal, file = _terminal(live=False)
    terminal.start(RECIPE, 2)
    terminal.step(3, {"reward": 0.5, "loss": 0.0})  # one step took 10 s, and one is left
    assert "left 0:10" in file.getvalue().splitlines()[-1]
    assert "from step 2" in file.getvalue()


def test_steps_without_a_reward_show_the_loss_and_keep_it_out_of_the_curve_of_rewards():
    terminal, file = _terminal(live=False)
    terminal.start(RECIPE, 0)
    terminal.step(1, {"reward": 0.5, "loss": 9.0})
    terminal.step(2, {"loss": 3.0})
    terminal.step(3, {"reward": 0.5, "loss": 9.0})
    lines = file.getvalue().splitlines()
    assert "loss 3.0000" in lines[2] and "reward" not in lines[2]
    assert lines[3].endswith(" ▁▁"), "two equal rewards and nothing else"


def test_in_a_terminal_the_display_stays_in_place_and_closes_once():
    terminal, file = _terminal(live=True)
    terminal.start(RECIPE, 0)
    terminal.step(1, {"reward": 0.25, "loss": 0.1})
    terminal.note("[look] here", "warning")
    terminal.step(4, {"reward": 1.0, "loss": 0.1})
    terminal.finish()
    terminal.finish()
    text = file.getvalue()
    assert "warning [look] here" in text
    assert "4/4" in text and "1.000" in text and "▁█" in text
    assert text.count("\x1b[?25h") == 1, "the cursor is shown again"


def test_notes_are_told_as_they_are():
    terminal, file = _terminal(live=False)
    terminal.note("2 tasks [of 5] were longer", "info")
    terminal.note("all flat", "warning")
    assert file.getvalue() == "2 tasks [of 5] were longer\nwarning all flat\n"
