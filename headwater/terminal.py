"""What all commands share: where they write, and how they say what went wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

from headwater.errors import HeadwaterError

console = Console()
errors = Console(stderr=True)


@contextmanager
def told_plainly() -> Iterator[None]:
    """A deliberate error is a message, not a traceback."""
    try:
        yield
    except HeadwaterError as error:
        errors.print(f"[bold red]error[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        for note in getattr(error, "__notes__", ()):
            errors.print(escape(note), soft_wrap=True, highlight=False)
        raise typer.Exit(2) from None
