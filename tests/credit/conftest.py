"""Episodes and groups as literals."""

import pytest
from hypothesis import settings

from headwater.types import Group, Signal, Span, Task, Trajectory

# the first call of an operation of torch takes as long as thousands of later ones
settings.register_profile("torch", deadline=None)
settings.load_profile("torch")

LEVELS = {"value": "token", "ref_logp": "token", "logp": "token", "turn_reward": "turn"}


def _signal(name, values, ends=()):
    if values is None:
        return Signal(source="test", name=name, status="failed")
    if name.startswith("step"):
        values, ends = values
        return Signal(source="test", name=name, values=tuple(values), level="step", ends=tuple(ends))
    level = LEVELS.get(name, "episode")
    values = (values,) if level == "episode" else tuple(values)
    return Signal(source="test", name=name, values=values, level=level)


def _episode(*, turns=(1,), worlds=None, logps=None, stop="done", agent="policy", **signals):
    """`turns` tokens of the policy with a world between them that says `worlds`; a signal that is None
    failed, and one that is not named was never asked for. A step signal is (values, ends)."""
    worlds = ("w",) * (len(turns) - 1) if worlds is None else worlds
    left = iter(logps or ())
    spans = [Span(author="prompt", tokens=(1, 2), text="p")]
    for k, count in enumerate(turns):
        if k:
            spans.append(Span(author="world", tokens=(3, 3, 3), text=worlds[k - 1]))
        told = None if logps is None else tuple(next(left) for _ in range(count))
        spans.append(Span(author="policy", tokens=(4,) * count, text="a" * count, logps=told))
    given = tuple(_signal(name, values) for name, values in signals.items())
    return Trajectory(task_id="t", spans=tuple(spans), stop=stop, agent=agent, signals=given)


@pytest.fixture(scope="session")
def episode():
    return _episode


@pytest.fixture(scope="session")
def group():
    """Of trajectories, or of the rewards of episodes of one token."""

    def made(*siblings):
        trajectories = tuple(s if isinstance(s, Trajectory) else _episode(reward=s) for s in siblings)
        return Group(task=Task(id="t", prompt="p"), trajectories=trajectories)

    return made


@pytest.fixture(scope="session")
def plain():
    """Advantages as lists: None for who takes no part, and for a token that takes none."""

    def numbers(advantage):
        if advantage is None:
            return None
        assert not advantage.requires_grad
        return advantage.item() if advantage.dim() == 0 else [None if a.isnan() else a.item() for a in advantage]

    return lambda advantages: [[numbers(a) for a in row] for row in advantages]
