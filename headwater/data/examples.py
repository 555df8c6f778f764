"""What a data set shows, as groups: demonstrations, preferences, judged answers and judged steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headwater.data.render import Renderer
from headwater.types import Group, Signal, Task, Trajectory

PREFERENCE, LABEL, STEP_LABEL, DEMONSTRATION = "preference", "label", "step_label", "demonstration"


def offered(tasks: Sequence[Task]) -> frozenset[str]:
    """The signals that every one of the tasks has."""
    has = {
        DEMONSTRATION: all(task.completion is not None for task in tasks),
        PREFERENCE: all(task.completion is not None and task.rejected is not None for task in tasks),
        LABEL: all(task.completion is not None and task.label is not None for task in tasks),
        STEP_LABEL: all(task.step_labels for task in tasks),
    }
    return frozenset(name for name, found in has.items() if tasks and found)


def example(task: Task, renderer: Renderer, needs: frozenset[str]) -> Group:
    """One task's completion as a trajectory, with the signals among `needs` that its data gives. For
    preferences the rejected one is its sibling."""
    shown = renderer.demonstration(task)
    signals: list[Signal] = []
    if LABEL in needs and task.label is not None:
        signals.append(Signal(source="data", name=LABEL, values=(task.label,)))
    if STEP_LABEL in needs and task.step_labels:
        signals.append(_steps(task, shown))
    if PREFERENCE not in needs:
        return Group(task=task, trajectories=(replace(shown, signals=tuple(signals)),))
    better, worse = task.ratings or (1.0, 0.0)
    other = renderer.demonstration(replace(task, completion=task.rejected, steps=()))
    return Group(task=task, trajectories=(_preferred(shown, better, signals), _preferred(other, worse, ())))


def _preferred(trajectory: Trajectory, rating: float, signals: Sequence[Signal]) -> Trajectory:
    return replace(trajectory, signals=(*signals, Signal(source="data", name=PREFERENCE, values=(rating,))))


def _steps(task: Task, shown: Trajectory) -> Signal:
    """A label at the last token of each labelled step; each step is a span of its own."""
    ends: list[int] = []
    at = 0
    for span in shown.spans:
        if span.author == "policy":
            at += len(span.tokens)
            ends.append(at - 1)
    labels = task.step_labels
    return Signal(source="data", name=STEP_LABEL, values=labels, level="step", ends=tuple(ends[: len(labels)]))
