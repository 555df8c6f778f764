"""The commands `headwater audit ...`: is what gives the rewards to be trusted?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from headwater.errors import ConfigError, UnknownName
from headwater.terminal import console, told_plainly

if TYPE_CHECKING:
    from headwater.evaluation.audit.judge_items import Item
    from headwater.evaluation.audit.page import Report
    from headwater.rewards.judge.ask import Ask
    from headwater.rewards.judge.prompts import Secret

audits = typer.Typer(
    name="audit",
    help="Whether what gives the rewards is to be trusted, with a verdict for each bias.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
SYNTHETIC_ITEMS = 300
_STYLES = {"found": "bold red", "not found": "green", "not enough data": "yellow"}


@audits.callback()
def _group() -> None:
    """A group of commands, whatever their number."""


@audits.command(
    name="judge",
    help="""Audit a language model as a judge. Probes each known bias of judges on the same items, prints a verdict for
each, and writes audit.json and audit.html.

Items are rows of prompt, first and second, and where known preferred (first, second or tie), first_author and
second_author; or rows of preferences (prompt, chosen, rejected).

[bold]Examples[/]

  headwater audit judge --synthetic position

  headwater audit judge --items pairs.jsonl --base-url https://api.openai.com/v1 --model gpt-4.1-mini
  --api-key-env OPENAI_API_KEY --input-price 0.4 --output-price 1.6 --max-cost 2 --own gpt-4.1-mini

  headwater audit judge --items pairs.jsonl --model embedded:smollm2 --limit 20 --max-tokens 128
""",
)
def judge(
    items: Annotated[str | None, typer.Option(metavar="FILE", help="Pairs of answers, .jsonl or .parquet.")] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where audit.json and audit.html go.")] = Path("audit"),
    model: Annotated[str | None, typer.Option(help="The endpoint's name of the model, or a model of here.")] = None,
    base_url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible endpoint; none: the model runs here.")
    ] = None,
    api_key_env: Annotated[str | None, typer.Option(help="The environment variable that holds the API key.")] = None,
    input_price: Annotated[float, typer.Option(min=0, help="Per million tokens asked.")] = 0.0,
    output_price: Annotated[float, typer.Option(min=0, help="Per million tokens answered.")] = 0.0,
    max_cost: Annotated[float | None, typer.Option(help="Stop asking at this cost.")] = None,
    cache: Annotated[str | None, typer.Option(metavar="FOLDER", help="Keep replies here: each is paid once.")] = None,
    synthetic: Annotated[str | None, typer.Option(metavar="NAME", help="A made judge with this bias planted.")] = None,
    pointwise: Annotated[bool, typer.Option("--pointwise", help="Compare answers by their scores.")] = False,
    rubric: Annotated[Path | None, typer.Option(metavar="FILE", help="The judge's rubric, as text.")] = None,
    own: Annotated[
        str | None, typer.Option(metavar="AUTHOR", help="Whose answers in the items are the judge's own.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="PROBE", help="This probe, and others named likewise.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many items.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest reply, in tokens.")] = 1024,
    guard: Annotated[bool, typer.Option(help="Give empty answers the lowest score without showing them.")] = True,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 where a bias was found.")] = False,
) -> None:
    with told_plainly():
        import asyncio

        from headwater.evaluation.audit.judge import audit_judge, report
        from headwater.evaluation.audit.page import save
        from headwater.rewards.judge.build import spent
        from headwater.rewards.judge.panel import LLMJudge

        endpoint = {
            "base_url": base_url,
            "api_key_env": api_key_env,
            "input_price": input_price,
            "output_price": output_price,
            "max_cost": max_cost,
        }
        pairs = _items(items, synthetic, limit)
        asks, secret = _judge(synthetic, model, {key: value for key, value in endpoint.items() if value}, cache)
        settings: dict[str, Any] = {} if rubric is None else {"rubric": _read(rubric)}
        made = LLMJudge(
            ask=asks, secret=secret, temperature=temperature, max_tokens=max_tokens, guard=guard, **settings
        )
        mine = "own" if own is None and items is None else own
        mode = "pointwise" if pointwise else "pairwise"
        found = asyncio.run(audit_judge(made, pairs, mode=mode, own=mine, only=only or ()))
        said = report(found, spent(asks))
        paths = save(said, out)
        _print(said)
        console.print(*(str(path) for path in paths), highlight=False, soft_wrap=True, markup=False)
        if strict and any(finding.verdict == "found" for finding in found.findings):
            raise typer.Exit(1)


def _items(source: str | None, synthetic: str | None, limit: int | None) -> list[Item]:
    from headwater.evaluation.audit.judge_items import load_items, synthetic_items

    if source is not None:
        return load_items(source, limit)
    if synthetic is None:
        raise ConfigError("There is nothing to judge. Give --items FILE.jsonl, or try a made judge: --synthetic fair.")
    return synthetic_items(limit or SYNTHETIC_ITEMS)


def _judge(synthetic: str | None, model: str | None, endpoint: dict[str, Any], cache: str | None) -> tuple[Ask, Secret]:
    """Whom the options name."""
    from headwater.rewards.judge.build import connect, remember

    if synthetic is not None:
        from headwater.rewards.judge.synthetic import PLANTED

        if model is not None or endpoint:
            raise ConfigError("--synthetic makes a judge, so --model and what belongs to an endpoint have no effect.")
        if synthetic not in PLANTED:
            raise UnknownName("synthetic judge", synthetic, PLANTED)
        return remember(PLANTED[synthetic], cache)
    if model is None:
        raise ConfigError(
            "Nobody is named to judge. Give --model, with --base-url unless it runs here, or --synthetic."
        )
    if "base_url" in endpoint:
        from pydantic import ValidationError

        from headwater.rewards.judge.config import EndpointConfig

        try:
            return connect(EndpointConfig.model_validate({**endpoint, "model": model}), cache)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"The endpoint's {'.'.join(map(str, first['loc']))}: {first['msg']}.") from error
    if endpoint:
        raise ConfigError(f"--{next(iter(endpoint)).replace('_', '-')} belongs to an endpoint. Give its --base-url.")
    from headwater.evaluation.local_judge import local_model

    return remember(local_model(model), cache)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The rubric {path} cannot be read: {error}. Name a file of plain text.") from error


def _print(report: Report) -> None:
    from headwater.evaluation.audit.page import needed, shown

    table = Table(title=escape(report.title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("bias", "verdict", "effect [95%]", "n", ""):
        table.add_column(column, overflow="fold", no_wrap=bool(column))
    for finding in report.findings:
        style = _STYLES[finding.verdict]
        note = f"[dim]{escape(needed(finding))}[/]"
        verdict = f"[{style}]{finding.verdict}[/]"
        table.add_row(escape(finding.name), verdict, escape(shown(finding)), str(finding.n), note)
    console.print(table)
    for key in ("asked", "spent"):
        counts = report.facts.get(key)
        if isinstance(counts, dict) and counts:
            console.print(f"{key}  {counts}", highlight=False, soft_wrap=True, markup=False)
