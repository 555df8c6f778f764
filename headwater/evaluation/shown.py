"""Held-out accuracy on preferences, judged answers and judged steps: what a reward model, or a policy
beside its reference, makes of what people or checkers said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headwater.data.examples import example
from headwater.data.pack import everything
from headwater.data.render import Renderer
from headwater.evaluation.held_out import Evaluation, Sample
from headwater.models.forward import appraise, score
from headwater.models.heads import Critic
from headwater.models.policy import Policy
from headwater.types import Algorithm, Group, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """What can score an answer: a scalar head where there is one, else the policy itself, by its
    log-probs over the reference's (DPO's implicit reward, up to a factor) or by their mean per token
    where there is no reference."""

    policy: Policy
    critic: Critic | None = None
    reference: Policy | None = None

    def tokens(self, groups: Sequence[Group], micro_tokens: int = 8192) -> list[list[float]]:
        """A number for every token that was written in each trajectory, in order: the head's score of the
        text up to and with it, or what it adds to the score of the whole."""
        plain = Algorithm(name="judge", terms=(), needs=frozenset(), head=None if self.critic is None else "after")
        batch, owners = everything(groups, plain)
        if self.critic is not None:
            _, value_T = appraise(self.policy, self.critic, batch, micro_tokens)
        else:
            value_T = score(self.policy, batch, micro_tokens)
            if self.reference is not None:
                value_T = value_T - score(self.reference, batch, micro_tokens)
        counts = torch.bincount(batch.sequence_T, minlength=len(owners)).tolist()
        return [part.tolist() for part in value_T.split(counts)]

    def scores(self, groups: Sequence[Group], micro_tokens: int = 8192) -> list[float]:
        """The score of each trajectory, in order."""
        by_token = self.tokens(groups, micro_tokens)
        if self.critic is not None:
            return [values[-1] for values in by_token]
        if self.reference is not None:
            return [math.fsum(values) for values in by_token]
        return [math.fsum(values) / len(values) for values in by_token]


def evaluate_shown(judge: Judge, renderer: Renderer, tasks: Sequence[Task], needs: frozenset[str]) -> Evaluation:
    """The share of pairs in which the preferred answer scores higher (a tie counts half), of answers whose
    score has the sign of their label, or of labelled steps whose score does, as `needs` says."""
    groups = [example(task, renderer, needs) for task in tasks]
    if "preference" in needs:
        return _pairs(judge, groups)
    if "step_label" in needs:
        return _steps(judge, groups)
    scores = judge.scores(groups)
    right = [(s > 0) == (_label(g.trajectories[0]) > 0.5) for s, g in zip(scores, groups, strict=True)]
    samples = [_sample(g, g.trajectories[0], s) for g, s in zip(groups, scores, strict=True)]
    return _evaluation([float(x) for x in right], samples)


def auroc(scores: Sequence[float], positive: Sequence[bool]) -> float:
    """The probability that a positive scores above a negative, ties half (Mann-Whitney U / n+ n-). NaN
    where either is missing."""
    ordered = torch.tensor(scores, dtype=torch.float64)
    good, bad = ordered[torch.tensor(positive)], ordered[~torch.tensor(positive)]
    if not len(good) or not len(bad):
        return math.nan
    above = (good[:, None] > bad[None, :]).double() + 0.5 * (good[:, None] == bad[None, :]).double()
    return float(above.mean())


def _label(trajectory: Trajectory) -> float:
    found = trajectory.signal("label")
    assert found is not None, "a task with a label has its signal"
    return found.values[0]


def _pairs(judge: Judge, groups: Sequence[Group]) -> Evaluation:
    scores = iter(judge.scores(groups))
    right: list[float] = []
    samples: list[Sample] = []
    for group in groups:
        better, worse = next(scores), next(scores)
        right.append(0.5 if better == worse else float(better > worse))
        samples.append(_sample(group, group.trajectories[0], better - worse))
    return _evaluation(right, samples)


def _steps(judge: Judge, groups: Sequence[Group]) -> Evaluation:
    right: list[float] = []
    samples: list[Sample] = []
    for group, values in zip(groups, judge.tokens(groups), strict=True):
        found = group.trajectories[0].signal("step_label")
        assert found is not None, "a task with labelled steps has their signal"
        at_ends = [values[end] for end in found.ends]
        right.extend(float((v > 0) == (y > 0.5)) for v, y in zip(at_ends, found.values, strict=True))
        samples.append(_sample(group, group.trajectories[0], min(at_ends)))
    return _evaluation(right, samples)


def _sample(group: Group, trajectory: Trajectory, value: float) -> Sample:
    prompt = group.task.prompt if isinstance(group.task.prompt, str) else group.task.prompt[-1]["content"]
    return Sample(prompt=prompt, answer=group.task.answer, text=trajectory.text, reward=value, stop=trajectory.stop)


def _evaluation(right: Sequence[float], samples: Sequence[Sample]) -> Evaluation:
    accuracy = math.fsum(right) / len(right) if right else math.nan
    return Evaluation(accuracy=accuracy, n=len(right), unjudged=0, samples=tuple(samples[:8]))


def normalisation(scores: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation of scores, by which those of a reward model are put on one scale."""
    values = torch.tensor(scores, dtype=torch.float64)
    return {"mean": float(values.mean()), "std": float(values.std()) if len(values) > 1 else 1.0}
