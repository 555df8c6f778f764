"""The curves of a run as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

PANELS = (
    ("reward", ("reward", "held_out"), "reward and held-out accuracy"),
    ("entropy", ("entropy",), "entropy (nats per token)"),
    ("answers", ("answer_tokens",), "answer length (tokens)"),
    ("groups", ("flat_groups", "truncated", "unjudged"), "share of groups or answers"),
    ("norm", ("grad_norm",), "gradient norm"),
    ("gap", ("mismatch", "kl"), "sampler-learner gap, KL (nats per token)"),
)
LABELS = {
    "held_out": "held-out accuracy",
    "flat_groups": "flat groups",
    "mismatch": "gap to the sampler",
    "kl": "KL to reference",
}


def plot(rows: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draw every panel that has something to show. A run without steps draws nothing."""
    shown = [panel for panel in PANELS if any(name in row for row in rows for name in panel[1])]
    if not shown:
        return
    columns = min(3, len(shown))
    height = -(-len(shown) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.0 * height), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (_, names, title) in enumerate(shown):
        axes = figure.add_subplot(height, columns, index + 1)
        for name in names:
            points = [(row["step"], row[name]) for row in rows if name in row]
            if points:
                axes.plot(
                    *zip(*points, strict=True), label=LABELS.get(name, name), marker="o" if name == "held_out" else ""
                )
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend(fontsize=8)
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, dpi=110, format="png")
    partial.replace(path)
