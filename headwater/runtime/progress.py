"""Live progress in a terminal; plain lines where there is none."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headwater.config import Recipe
from headwater.runtime.loggers import Level

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 32) -> str:
    """The last `width` values as a row of bars between their own extremes."""
    recent = values[-width:]
    low, high = min(recent, default=0.0), max(recent, default=0.0)
    span = high - low
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1)) if span else 0] for value in recent)


def duration(seconds: float) -> str:
    """Seconds as `1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Terminal:
    """Step, reward, tokens per second, time left and a small curve."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._live: Live | None = None
        self._curves: dict[str, list[float]] = {"reward": [], "loss": []}
        self._steps, self._first, self._begun = 0, 0, 0.0
        self._held_out: float | None = None

    def start(self, recipe: Recipe, first: int) -> None:
        """Say what runs, and open the live display."""
        self._steps, self._first, self._begun = recipe.run.steps, first, time.monotonic()
        begin = f"from step {first}" if first else f"{recipe.run.steps} steps"
        self.console.print(
            f"[bold]{escape(recipe.algorithm.name)}[/] on {escape(recipe.tasks.source)}, "
            f"{escape(recipe.model.name)}, {begin}, in {escape(str(recipe.run.path))}",
            soft_wrap=True,
        )
        if self.console.is_terminal:
            self._live = Live(Text("sampling the first answers ..."), console=self.console, refresh_per_second=4)
            self._live.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one step."""
        if "held_out" in metrics:
            self._held_out = metrics["held_out"]
        if step == 0:
            self._begun = time.monotonic()
            self.console.print(f"held-out accuracy before training: {metrics['held_out']:.3f}")
            return
        for name, curve in self._curves.items():
            curve += [metrics[name]] if name in metrics else []
        facts = self._facts(step, metrics)
        if self._live is None:
            self.console.print("  ".join(f"{name} {value}" for name, value in facts), highlight=False, soft_wrap=True)
            return
        table = Table.grid(padding=(0, 2))
        for _ in facts:
            table.add_column()
        table.add_row(*(Text.assemble((f"{name} ", "dim"), value) for name, value in facts))
        bar = ProgressBar(total=self._steps, completed=step, width=40)
        self._live.update(Group(table, bar))

    def _facts(self, step: int, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        done = step - self._first
        left = (time.monotonic() - self._begun) / max(1, done) * (self._steps - step)
        facts = [("step", f"{step}/{self._steps}")]
        shown = "reward" if "reward" in metrics else "loss"
        facts.append((shown, f"{metrics[shown]:.{3 if shown == 'reward' else 4}f}"))
        if self._held_out is not None:
            facts.append(("held-out", f"{self._held_out:.3f}"))
        if metrics.get("tokens_per_s"):
            facts.append(("tokens/s", f"{metrics['tokens_per_s']:.0f}"))
        facts += [("left", duration(left)), ("", sparkline(self._curves[shown]))]
        return facts

    def note(self, text: str, level: Level) -> None:
        """Print above the live display."""
        self.console.print(f"[yellow]warning[/] {escape(text)}" if level == "warning" else escape(text), soft_wrap=True)

    def finish(self) -> None:
        """Close the live display, leaving its last state."""
        if self._live is not None:
            self._live.stop()
            self._live = None
