"""The command `headwater`."""

from __future__ import annotations

import ctypes
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from headwater.audit_commands import audits
from headwater.errors import ConfigError, HeadwaterError, UnknownName
from headwater.reward_commands import SCORE_HELP, score
from headwater.terminal import console, told_plainly

if TYPE_CHECKING:
    from headwater.config import Recipe
    from headwater.data.tasks import TasksConfig
    from headwater.evaluation.held_out import Evaluation
    from headwater.runtime.loggers import Reporter

app = typer.Typer(
    name="headwater",
    help="Reinforcement learning of language models, from the first preference to the deployed agent.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(audits)
app.command(name="score", help=SCORE_HELP)(score)
RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="The recipe to run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.key=value ...]", help="Settings that differ from the recipe."),
]


EXAMPLES = """

[bold]Examples[/]

  headwater train recipes/quickstart.toml

  headwater train recipes/quickstart.toml run.name=hot optimizer.lr=3e-5 algorithm.name=rloo

  headwater train recipes/quickstart.toml --dry-run

  headwater train recipes/quickstart.toml --resume
"""


@app.command(help="Run a recipe." + EXAMPLES)
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, show the plan, run nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's newest checkpoint.")] = False,
) -> None:
    with told_plainly():
        from headwater.config import load_recipe

        settings = load_recipe(recipe, overrides or [])
        if dry_run:
            _plan(settings)
            return
        _train(settings, resume, shlex.join(["headwater", "train", str(recipe), *(overrides or []), "--resume"]))


def _train(recipe: Recipe, resume: bool, command: str) -> None:
    from headwater.runtime.folder import RunFolder
    from headwater.runtime.loggers import trackers
    from headwater.runtime.loop import Result
    from headwater.runtime.loop import train as run
    from headwater.runtime.progress import Terminal

    folder = RunFolder.open(recipe.run.path) if resume else RunFolder.create(recipe.run.path, recipe)
    if resume:
        _same_run(folder.recipe, recipe)
    reporters: list[Reporter] = [Terminal(console)]
    try:
        reporters += trackers(recipe, folder.path)
        result: Result = run(recipe, folder, resume=resume, reporters=reporters)
    except KeyboardInterrupt:
        _finish(reporters)
        console.print(f"\nInterrupted. Go on with: {command}", highlight=False, soft_wrap=True, markup=False)
        raise typer.Exit(130) from None
    except HeadwaterError:
        if not resume:
            folder.abandon()
        raise
    finally:
        _finish(reporters)
    for title, evaluation in (("before", result.before), ("after", result.after)):
        if evaluation is not None:
            _samples(title, evaluation)
    console.print(f"run folder  {folder.path}", highlight=False, soft_wrap=True)
    console.print(f"chat        headwater chat {folder.path}", highlight=False, soft_wrap=True)
    if result.before is not None and result.after is not None:
        console.print(f"held-out accuracy {result.before.accuracy:.3f} -> {result.after.accuracy:.3f}", highlight=False)


def _finish(reporters: Sequence[Reporter]) -> None:
    for reporter in reporters:
        reporter.finish()


def _same_run(began: Recipe, now: Recipe) -> None:
    """A resumed run may run longer or log elsewhere; it may not become another run."""
    free = {"steps", "loggers", "checkpoint_every", "keep_checkpoints", "save_trajectories_every", "folder"}
    before, after = began.model_dump(), now.model_dump()
    for section in before:
        old, new = before[section], after[section]
        if section == "run":
            old, new = ({k: v for k, v in part.items() if k not in free} for part in (old, new))
        if old != new:
            differs = next((k for k in old if old[k] != new[k]), "") if isinstance(old, dict) else ""
            raise ConfigError(
                f"--resume continues a run as it began, and {'.'.join(filter(None, (section, differs)))} differs from "
                f"{now.run.path}/recipe.json. Keep to the settings that it began with, or start another: run.name=NAME."
            )


def _samples(title: str, evaluation: Evaluation) -> None:
    low, high = evaluation.interval
    table = Table(
        title=f"{title}: {evaluation.accuracy:.3f} of {evaluation.n} (95% {low:.3f} to {high:.3f})",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for column in ("task", "wanted", "answered", "reward"):
        table.add_column(column, style="dim" if column == "task" else "")
    for sample in evaluation.samples[:3]:
        reward = "-" if sample.reward is None else f"{sample.reward:g}"
        text = sample.text if len(sample.text) <= 300 else sample.text[:300] + " ..."
        table.add_row(escape(sample.prompt), escape(sample.answer or "-"), escape(text), reward)
    console.print(table)


def _plan(recipe: Recipe) -> None:
    """What a run would do. Loads tasks and tokenizer, no weights; writes nothing into runs."""
    from headwater.runtime.assemble import plan

    table = Table(title="plan", title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, value in plan(recipe):
        table.add_row(f"[dim]{name}[/]", escape(value))
    console.print(table)
    console.print("Nothing was written. Leave out --dry-run to run it.")


@app.command(
    help="""Accuracy of a run's model, or of any model, on held-out tasks.

[bold]Examples[/]

  headwater evaluate runs/quickstart

  headwater evaluate embedded:smollm2 --recipe recipes/quickstart.toml

  headwater evaluate runs/quickstart --tasks sums --limit 64
"""
)
def evaluate(
    model: Annotated[str, typer.Argument(help="A run folder, or any model name.")],
    recipe: Annotated[Path | None, typer.Option(help="Take tasks, rewards and sampling from this recipe.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Another source of tasks, such as sums or a .jsonl file.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many tasks.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="How many answers to show.")] = 3,
) -> None:
    with told_plainly():
        from dataclasses import replace

        from headwater.data.tasks import fit, load_tasks
        from headwater.engines.torch_engine import TorchEngine
        from headwater.evaluation.held_out import evaluate as measure
        from headwater.rewards.registry import build_source

        settings, policy, renderer = _open(model, recipe)
        config = _other_tasks(tasks, settings) if tasks else settings.evaluation.tasks
        if config is None:
            raise ConfigError("This recipe has no [evaluation.tasks]. Name some with --tasks.")
        if not settings.rewards:
            raise ConfigError("This recipe has no [[rewards]], so nothing can judge the answers. Use --recipe.")
        chosen, _ = fit(load_tasks(config)[: limit or settings.evaluation.limit], renderer, config)
        sources = [(build_source(reward), reward.weight) for reward in settings.rewards]
        sampling = replace(settings.sampling.build(), temperature=settings.evaluation.temperature)
        found = measure(TorchEngine(policy), renderer, chosen, sources, sampling, seed=settings.run.seed)
        if samples:
            _samples(model, replace(found, samples=found.samples[:samples]))
        if found.unjudged:
            console.print(f"{found.unjudged} answers could not be judged and do not count.")
        low, high = found.interval
        console.print(f"accuracy {found.accuracy:.3f} (n={found.n}, 95% {low:.3f} to {high:.3f})", highlight=False)


def _other_tasks(source: str, recipe: Recipe) -> TasksConfig:
    """Another source of tasks. A file is read as the recipe reads its own."""
    from headwater.data.tasks import TasksConfig

    own, other = recipe.evaluation.tasks or recipe.tasks, TasksConfig(source=source)
    kept = {"system"}
    if not own.generated and not other.generated:
        kept |= {"prompt", "answer", "answer_after", "completion", "needs_answer", "max_prompt_tokens", "too_long"}
    return TasksConfig(source=source, **own.model_dump(include=kept, exclude_unset=True))


def _open(model: str, recipe: Path | None):
    """Recipe, policy and renderer of a run folder or a model name."""
    from headwater.config import check_recipe, load_recipe
    from headwater.data.render import Renderer
    from headwater.models.load import load
    from headwater.runtime.folder import RunFolder

    folder = Path(model)
    is_run = (folder / "recipe.json").is_file()
    if recipe is not None:
        settings = load_recipe(recipe)
    elif is_run:
        settings = RunFolder.open(folder).recipe
    else:
        settings = check_recipe({"tasks": {"source": "sums"}, "rewards": [{"name": "number"}]}, "the default recipe")
    name = model
    if is_run:
        if not (folder / "model").is_dir():
            raise ConfigError(f"{folder} has no exported model yet: the run has not ended. Finish it with --resume.")
        name = str(folder / "model")
    config = settings.model.model_copy(update={"name": name, "lora": None})
    policy = load(config)
    return settings, policy, Renderer(policy.tokenizer, config.chat_template, policy.end_of_turn_ids)


@app.command(
    help="""Talk to a run's model, or to any model. Ctrl-D ends, /reset starts over.

[bold]Examples[/]

  headwater chat runs/quickstart

  headwater chat embedded:smollm2 --temperature 0.7 --system "Answer briefly."
"""
)
def chat(
    model: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or any model name.")],
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1)] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    seed: Annotated[int, typer.Option(help="Fixes what is sampled.")] = 0,
) -> None:
    with told_plainly():
        from headwater.evaluation.held_out import reply
        from headwater.types import Message, Sampling

        settings, policy, renderer = _open(model, None)
        sampling = Sampling(temperature=temperature, top_p=top_p, max_tokens=max_tokens)
        system = system or settings.tasks.system
        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        messages = list(opening)
        while True:
            line = _ask()
            if line is None:
                break
            if line == "/reset":
                messages = list(opening)
            elif line:
                messages.append({"role": "user", "content": line})
                text = reply(policy, renderer, messages, sampling, seed + len(messages))
                messages.append({"role": "assistant", "content": text})
                console.print(text, markup=False, highlight=False, soft_wrap=True)


def _ask() -> str | None:
    """A line from the user; None at the end of input."""
    try:
        return (console.input("[bold]> [/]") if sys.stdin.isatty() else input()).strip()
    except (EOFError, KeyboardInterrupt):
        return None


@app.command(
    help="""What there is: algorithms, tasks, rewards, models, recipes.

[bold]Examples[/]

  headwater show algorithms

  headwater show algorithms --with reward,ref_logp
"""
)
def show(
    what: Annotated[str, typer.Argument(help="algorithms, tasks, rewards, models or recipes")],
    having: Annotated[str | None, typer.Option("--with", help="Signals at hand: only rows that they allow.")] = None,
) -> None:
    with told_plainly():
        from headwater.catalogue import CATALOGUE, algorithms

        if what not in CATALOGUE:
            raise UnknownName("list", what, CATALOGUE, "headwater show")
        if having is not None and what != "algorithms":
            raise ConfigError("--with goes with 'headwater show algorithms': it lists the rows that signals allow.")
        table = algorithms(having) if having is not None else CATALOGUE[what]()
        console.print(table)


@app.command(
    help="""Check this machine: versions, memory, and that sampler and learner agree on log-probs.

[bold]Examples[/]

  headwater doctor

  headwater doctor --model fake:llama
"""
)
def doctor(
    model: Annotated[str, typer.Option(help="The model to check with.")] = "embedded:smollm2",
) -> None:
    with told_plainly():
        from headwater.catalogue import machine
        from headwater.evaluation.agreement import check
        from headwater.models.load import ModelConfig, load

        console.print(machine())
        well = True
        for dtype in ("float32", "bfloat16"):
            found = check(load(ModelConfig(name=model, dtype=dtype)))
            well &= found.ok
            verdict = "[green]ok[/]" if found.ok else "[bold red]too far apart[/]"
            console.print(
                f"{verdict} {model} in {found.dtype}: sampler and learner differ by {found.mean_abs:.2g} nats "
                f"per token on average, {found.max_abs:.2g} at most (bound {found.bound:g}, {found.tokens} tokens)",
                highlight=False,
                soft_wrap=True,
            )
        if not well:
            raise typer.Exit(1)


def _keep_freed_memory() -> None:
    """Let glibc keep memory that tensors give back, instead of returning it to the kernel and faulting
    it in again page by page: a training step on CPU was measured to take a tenth less time."""
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(mmap_threshold, 32 * 2**20)
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(top_pad, 256 * 2**20)


def main() -> None:
    """Entry point of the `headwater` command."""
    _keep_freed_memory()
    app()
