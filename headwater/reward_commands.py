"""The commands that put rewards to work on files: `headwater score` and `headwater audit reward`."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwater.errors import ConfigError
from headwater.terminal import errors, told_plainly

if TYPE_CHECKING:
    from headwater.evaluation.score import Answer, Scored
    from headwater.rewards.source import Source

Reward = Annotated[
    str, typer.Option(metavar="NAME", help="A name of `headwater show rewards`, or package.module:function.")
]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the reward.")]
Timeout = Annotated[float | None, typer.Option(help="Seconds after which a call is given up, as failed.")]
Retries = Annotated[int, typer.Option(min=0, help="How often a call that failed is made again.")]
Concurrency = Annotated[int | None, typer.Option(min=1, help="At most so many calls at once.")]
Cache = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep scores here: none is worked out twice.")]

SCORE_HELP = """Score a file of answers by any reward, without training.

Each line of FILE is a JSON object with a [bold]response[/], and what the reward
needs: prompt, answer, tests, schema ... Out come the same rows with [bold]score[/],
[bold]status[/] (ok, abstained or failed) and [bold]note[/]. A row that could not be
judged has no score; it is never 0. Rows of the same task are siblings, for
rewards that compare.

[bold]Examples[/]

  headwater score answers.jsonl --reward number

  headwater score answers.jsonl --reward number --set tolerance=0.01 --out scored.jsonl

  headwater score answers.jsonl --reward my_rewards:brief_and_right --out scored.jsonl --overwrite
"""


def score(
    file: Annotated[str, typer.Argument(metavar="FILE.jsonl", help="Rows with a response each.")],
    reward: Reward,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the rows go; else to stdout.")] = None,
    settings: Settings = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing --out file.")] = False,
    timeout_s: Timeout = None,
    retries: Retries = 0,
    concurrency: Concurrency = None,
    cache: Cache = None,
) -> None:
    """`headwater score`; see SCORE_HELP."""
    with told_plainly():
        from headwater.evaluation.score import check_out, lines, read_answers, save, summary

        if overwrite and out is None:
            raise ConfigError("--overwrite has no effect without --out. Remove it, or name the file.")
        if out is not None:
            check_out(out, overwrite)
        how = {"timeout_s": timeout_s, "retries": retries, "concurrency": concurrency, "cache": cache}
        source = source_of(reward, settings or [], how)
        scored = scored_with_progress(read_answers(file, source.needs), source)
        if out is not None:
            save(scored, out)
        else:
            typer.echo(b"".join(lines(scored)), nl=False)
        errors.print(summary(scored), markup=False, highlight=False, soft_wrap=True)
        if not any(each.status == "ok" for each in scored):
            raise typer.Exit(1)


def source_of(name: str, settings: Sequence[str], how: dict[str, Any]) -> Source:
    """The reward that the options name. Raises ConfigError where they cannot be meant."""
    from pydantic import ValidationError

    from headwater.rewards.calls import Guarded
    from headwater.rewards.registry import RewardConfig, build_source

    given = {key: value for key, value in how.items() if value}
    try:
        config = RewardConfig.model_validate({"name": name, "settings": parsed(settings), **given})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}, found {first['input']!r}."
        ) from error
    return Guarded(source=build_source(config))  # what one row does to a source is not the end of the others


def parsed(settings: Sequence[str]) -> dict[str, Any]:
    """Settings of the form key=value: the value as TOML has it, else as text. `a.b=1` sets b inside a."""
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise ConfigError(f"--set '{setting}' is not of the form key=value, such as tolerance=0.01.")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        inside = found
        for part in parts[:-1]:
            inside = inside.setdefault(part, {})
            if not isinstance(inside, dict):
                raise ConfigError(f"--set '{setting}' goes into '{part}', which another --set made a plain value.")
        inside[parts[-1]] = value
    return found


def scored_with_progress(answers: Sequence[Answer], source: Source) -> list[Scored]:
    """The answers scored, with a bar on stderr where that is a terminal."""
    from headwater.evaluation.score import score as run

    with _bar("scoring", len(answers)) as advance:
        return asyncio.run(run(answers, source, advance))


@contextmanager
def _bar(title: str, total: int) -> Iterator[Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)
