"""The loop. There is one, synchronous at max_lag = 0 and running ahead at max_lag = n."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from safetensors import SafetensorError
from torch import Tensor

from headwater.config import SHOWN, Recipe
from headwater.data.examples import example
from headwater.data.pack import pack
from headwater.engines.torch_engine import TorchEngine
from headwater.errors import CheckpointError, NonFiniteError
from headwater.evaluation.held_out import Evaluation, Sample, evaluate
from headwater.evaluation.shown import Judge, evaluate_shown, normalisation
from headwater.models.heads import export_reward_model
from headwater.monitors.health import alarms, statistics
from headwater.runtime import checkpoint as checkpoints
from headwater.runtime.assemble import Parts, assemble
from headwater.runtime.folder import RunFolder
from headwater.runtime.loggers import Reporter
from headwater.runtime.plot import plot
from headwater.runtime.stream import Stream
from headwater.types import Batch, Group, Update

REFUSALS = 3
"""Steps refused in a row after which a run ends: the next would be refused as well."""


NORMALISE_BY = 64
"""Training examples whose scores set the scale of a reward model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run came to: held-out evaluations before and after (None when none were asked for)."""

    before: Evaluation | None
    after: Evaluation | None
    steps: int
    export: Path


def train(recipe: Recipe, folder: RunFolder, *, resume: bool = False, reporters: Sequence[Reporter] = ()) -> Result:
    """Run a recipe to its end, from its beginning or from its newest whole checkpoint.

    Killed at any point and resumed, it reaches the same weights, bit for bit, as a run that was not.
    """
    run = Run(assemble(recipe), folder, reporters)
    first = run.resume() if resume else 0
    run.start(first)
    before = run.evaluation(0) if first == 0 else run.recorded(0)
    stream = Stream(run.parts.produce, first=first, steps=recipe.run.steps, max_lag=recipe.run.max_lag)
    try:
        loop(run, stream)
    finally:
        stream.close()
    after = run.recorded(recipe.run.steps) or run.evaluation(recipe.run.steps)
    run.finish()
    return Result(before=before, after=after, steps=recipe.run.steps, export=folder.model)


def loop(run: Run, stream: Stream) -> None:
    """Groups become a batch, the batch a step, and the new weights sample the next groups."""
    parts = run.parts
    algorithm = parts.algorithm
    temperature = parts.sampling.temperature if algorithm.online else 1.0
    for step, sampled in stream:
        groups = parts.learner.annotate(sampled, algorithm, temperature)
        batch = pack(groups, algorithm, temperature=temperature, length=parts.sampling.max_tokens)
        update = run.step(step, groups, batch)
        parts.engine.publish(parts.learner.version, run.handover())
        stream.reached(parts.learner.version)
        run.watch(step, groups, batch, update)
        run.keep(step + 1)


class Run:
    """One run: its parts, its folder, and who is told about it."""

    def __init__(self, parts: Parts, folder: RunFolder, reporters: Sequence[Reporter]) -> None:
        self.parts, self.folder, self.reporters = parts, folder, reporters
        self.recipe = parts.recipe
        self._refused = 0
        self._alarmed: dict[str, int] = {}
        self._clock, self._sampled = time.perf_counter(), 0
        self._extra: dict[str, float] = {}

    def start(self, first: int) -> None:
        """Tell the reporters, and publish the weights that the first episodes are sampled from."""
        for reporter in self.reporters:
            reporter.start(self.recipe, first)
        for text in self.parts.notes:
            self.note(text, "info")
        self.parts.engine.publish(first, self.handover())
        self._clock = time.perf_counter()

    def resume(self) -> int:
        """Load the newest whole checkpoint and drop what came after it. Returns its step."""
        checkpoints.tidy(self.folder.checkpoints)
        learner = self.parts.learner
        found = checkpoints.newest(self.folder.checkpoints, learner.state())
        step = found.step if found else 0
        if found:
            learner.restore(found.tensors, step)
            self._remember(found.state.get("memory"))
        self.folder.rewind(step)
        return step

    def _remember(self, kept: object) -> None:
        """What the algorithm's credit remembered when the checkpoint was written."""
        memory = self.parts.algorithm.memory
        states = cast("list[dict[str, float]]", kept or [])
        if len(states) != len(memory):
            raise CheckpointError(
                f"The checkpoint holds what {len(states)} controllers remembered; this algorithm has {len(memory)}. "
                "Keep to the algorithm that the run began with."
            )
        for each, state in zip(memory, states, strict=True):
            each.load(state)

    def step(self, step: int, groups: Sequence[Group], batch: Batch) -> Update:
        """One optimizer step, or its refusal: then the batch is kept and the weights stay."""
        try:
            rounds = self.recipe.batch
            update = self.parts.learner.step(batch, updates=rounds.updates, epochs=rounds.epochs)
        except NonFiniteError as error:
            kept = self.folder.save_refused(step + 1, groups)
            self._refused += 1
            self.note(f"{error} The batch is kept in {kept}.", "warning")
            if self._refused >= REFUSALS:
                raise NonFiniteError(
                    f"{error} That was the {REFUSALS}rd refusal in a row, so the run ends. Look at {kept}; lower "
                    "optimizer.lr or optimizer.clip, then continue with --resume."
                ) from error
            return self.parts.learner.skip()
        self._refused = 0
        if self.parts.algorithm.after is not None:
            self.parts.algorithm.after(update)
        return update

    def handover(self) -> dict[str, Tensor] | None:
        """Weights for an engine that has its own copy; None for one that shares the learner's."""
        policy = self.parts.policy
        return None if self.parts.engine.policy is policy else policy.sampler_weights()

    def watch(self, step: int, groups: Sequence[Group], batch: Batch, update: Update) -> None:
        """Measure, log, and raise the alarm. Nothing here changes the run."""
        seen = statistics(groups)
        compares = self.parts.algorithm.compares
        if self.parts.algorithm.online:
            for alarm in alarms(groups, update, seen, compares=compares):
                self._alarm(alarm.name, alarm.text)
        now, sampled = time.perf_counter(), self.parts.engine.sampled_tokens
        metrics: dict[str, float] = {
            k: v for k, v in asdict(update).items() if isinstance(v, (int, float)) and math.isfinite(v)
        }
        metrics |= seen | {f"loss/{name}": value for name, value in update.terms.items()}
        metrics |= {"update_s": update.seconds, "step_s": now - self._clock, "dropped": batch.dropped}
        metrics["tokens_per_s"] = (sampled - self._sampled) / (now - self._clock)
        if batch.oldest_version is not None:
            metrics["lag"] = step - batch.oldest_version
        self._clock, self._sampled = now, sampled
        done = step + 1
        if self.recipe.run.save_trajectories_every and done % self.recipe.run.save_trajectories_every == 0:
            self.folder.save_groups(done, groups)
        every = self.recipe.run.evaluate_every
        if self.parts.held_out and (done == self.recipe.run.steps or (every and done % every == 0)):
            metrics["held_out"] = self._evaluate(done).accuracy
            self._clock = time.perf_counter()
        self._log(done, metrics)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self.folder.log(step, metrics)
        for reporter in self.reporters:
            reporter.step(step, metrics)

    def _alarm(self, name: str, text: str) -> None:
        """The first time, and then every tenth: an alarm that repeats each step is not read."""
        self._alarmed[name] = self._alarmed.get(name, 0) + 1
        if self._alarmed[name] % 10 == 1:
            self.note(text, "warning")

    def note(self, text: str, level: str) -> None:
        """Say something to whoever follows the run."""
        for reporter in self.reporters:
            reporter.note(text, "warning" if level == "warning" else "info")

    def keep(self, step: int) -> None:
        """Write a checkpoint when one is due."""
        every = self.recipe.run.checkpoint_every
        if step == self.recipe.run.steps or (every and step % every == 0):
            saved = checkpoints.Checkpoint(
                step=step,
                tensors=self.parts.learner.state(),
                state={
                    "model": self.parts.policy.name,
                    "memory": [memory.state() for memory in self.parts.algorithm.memory],
                },
            )
            checkpoints.save(self.folder.checkpoints, saved, self.recipe.run.keep_checkpoints)
            self._clock = time.perf_counter()

    def evaluation(self, step: int) -> Evaluation | None:
        """Held-out evaluation at `step`, logged; None when the recipe asks for none."""
        if not self.parts.held_out:
            return None
        found = self._evaluate(step)
        if step == 0:
            self._log(0, {"held_out": found.accuracy})
        return found

    def _evaluate(self, step: int) -> Evaluation:
        found = self._judged() if self._judges else self._answered()
        self.folder.write(f"evaluations/step_{step:06d}.json", json.dumps(asdict(found), ensure_ascii=False))
        return found

    @property
    def _judges(self) -> bool:
        """Whether the row is evaluated by what it makes of preferences or labels; not by answers."""
        return bool(self.parts.algorithm.needs & SHOWN) and not self.parts.sources

    def _judged(self) -> Evaluation:
        parts = self.parts
        return evaluate_shown(self._judge, parts.renderer, parts.held_out, parts.algorithm.needs)

    @property
    def _judge(self) -> Judge:
        learner = self.parts.learner
        critic = learner.critic if self.parts.algorithm.head == "after" else None
        return Judge(policy=learner.policy, critic=critic, reference=learner.reference)

    def _answered(self) -> Evaluation:
        sampling = replace(
            self.parts.sampling, temperature=self.recipe.evaluation.temperature, top_p=1.0, top_k=0, min_p=0.0
        )
        parts = self.parts
        # An engine that runs ahead is busy in its own thread, and not yet at these weights.
        engine = parts.engine if self.recipe.run.max_lag == 0 else TorchEngine(parts.policy)
        return evaluate(engine, parts.renderer, parts.held_out, parts.sources, sampling, seed=self.recipe.run.seed)

    def recorded(self, step: int) -> Evaluation | None:
        """An evaluation that this run made, before or after it was interrupted."""
        path = self.folder.path / f"evaluations/step_{step:06d}.json"
        if not path.is_file():
            return None
        found = json.loads(path.read_text())
        samples = tuple(Sample(**sample) for sample in found.pop("samples"))
        return Evaluation(**found, samples=samples)

    def _export(self) -> None:
        """The model; a reward model with its head, and with the scale of its scores on what it was trained on."""
        parts = self.parts
        if parts.algorithm.head != "after":
            parts.policy.export(self.folder.model)
            return
        critic = parts.learner.critic
        assert critic is not None, "an algorithm with a scalar head has one"
        shown = [example(task, parts.renderer, parts.algorithm.needs) for task in parts.tasks[:NORMALISE_BY]]
        export_reward_model(parts.policy, critic, self.folder.model, normalisation(self._judge.scores(shown)))

    def finish(self) -> None:
        """Export the model, draw the curves, and let the reporters go."""
        try:
            self._export()
            plot(self.folder.metrics(), self.folder.plot)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"Training is done and its last checkpoint is whole, but {self.folder.path} could not take the "
                f"exported model: {error}. Free some disk space and give the command again with --resume."
            ) from error
        for reporter in self.reporters:
            reporter.finish()
