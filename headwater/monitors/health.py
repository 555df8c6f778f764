"""Alarms for a step in which nothing, or the wrong thing, is learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headwater.types import Group, Signal, Trajectory, Update

NO_SOURCE = frozenset({"sum", "shape"})
"""Who makes a reward of what the sources said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Something a person should know: `name` groups repeats, `text` says cause and fix."""

    name: str
    text: str


def statistics(groups: Sequence[Group]) -> dict[str, float]:
    """What a step's groups look like: mean reward and its spread over groups; fractions of flat
    groups, truncated answers and answers no source could judge; mean answer length in tokens. Of each
    source, by name: its mean reward, `reward/NAME`, and the fraction that it could not judge, `unjudged/NAME`."""
    trajectories = [t for group in groups for t in group.trajectories if t.agent != "greedy"]
    rewards = [t.reward for t in trajectories if t.reward is not None]
    count = len(trajectories)
    found = {
        "truncated": sum(t.stop == "max_tokens" for t in trajectories) / count,
        "unjudged": sum(t.reward is None for t in trajectories) / count,
        "answer_tokens": sum(map(_answer_tokens, trajectories)) / count,
    }
    if rewards:
        flat = [g for g in groups if _flat(g)]
        found |= {"reward": sum(rewards) / len(rewards), "flat_groups": len(flat) / len(groups)}
    return found | _components(trajectories)


def _components(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What each source said. The reward of one that is alone is called "reward"; of several, each goes by its
    source's name, and the sum's source is "sum"."""
    said: dict[str, list[Signal]] = {}
    for signal in (signal for trajectory in trajectories for signal in trajectory.signals):
        if signal.level == "episode" and signal.name in (signal.source, "reward") and signal.source not in NO_SOURCE:
            said.setdefault(signal.source, []).append(signal)
    found: dict[str, float] = {}
    for name, signals in said.items():
        values = [signal.values[0] for signal in signals if signal.status == "ok"]
        if values:
            found[f"reward/{name}"] = sum(values) / len(values)
        found[f"unjudged/{name}"] = 1 - len(values) / len(signals)
    return found


def _answer_tokens(trajectory: Trajectory) -> int:
    return sum(len(span.tokens) for span in trajectory.spans if span.author == "policy")


def _flat(group: Group) -> bool:
    rewards = [t.reward for t in group.trajectories if t.reward is not None and t.agent != "greedy"]
    return len(rewards) < 2 or max(rewards) == min(rewards)


def alarms(groups: Sequence[Group], update: Update, seen: Mapping[str, float], *, compares: bool) -> list[Alarm]:
    """What is wrong with this step. `seen` are its `statistics`; `compares` says that credit
    compares siblings, so that a flat group teaches nothing."""
    found: list[Alarm] = []
    if seen["truncated"] == 1:
        found.append(
            Alarm(
                name="all_truncated",
                text="Every answer hit sampling.max_tokens, so none was finished and the reward judges fragments. "
                "Raise sampling.max_tokens, or ask in tasks.system for a shorter answer.",
            )
        )
    if seen["unjudged"] == 1:
        notes = {s.note for g in groups for t in g.trajectories for s in t.signals if s.status != "ok" and s.note}
        cause = "; ".join(sorted(notes)[:3]) or "the sources abstained"
        found.append(Alarm(name="all_unjudged", text=f"No source could judge any answer: {cause}. Nothing is learnt."))
    elif compares and seen.get("flat_groups") == 1:
        level = seen["reward"]
        cause = (
            "no answer earned anything: the tasks are too hard for this model, or the reward never matches. Look at "
            "trajectories/ in the run folder, ease the tasks, or raise batch.siblings"
            if level <= 0
            else "all siblings earned the same: the tasks are too easy or sampling is not random enough. Use harder "
            "tasks or raise sampling.temperature"
        )
        found.append(
            Alarm(
                name="all_flat",
                text=f"All groups are flat (mean reward {level:.3g}); {cause}. This step taught nothing.",
            )
        )
    if update.mismatch is not None and update.mismatch > 0.1:
        found.append(
            Alarm(
                name="mismatch",
                text=f"Sampler and learner differ by {update.mismatch:.3f} nats per token on average. Run "
                "`headwater doctor`; with run.max_lag > 0 lower it.",
            )
        )
    if update.tokens and update.entropy < 0.02:
        found.append(
            Alarm(
                name="entropy",
                text=f"Entropy fell to {update.entropy:.4f} nats per token: the policy has nearly stopped exploring. "
                "Stop here if the reward is good enough; else lower optimizer.lr.",
            )
        )
    return found
