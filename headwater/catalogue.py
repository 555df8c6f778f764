"""What there is to choose from, and what this machine has, as tables."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from rich.markup import escape
from rich.table import Table

from headwater.algorithms import SIGNALS, rows
from headwater.data.tasks import known_tasks
from headwater.errors import UnknownName
from headwater.models.load import cache_folder, known_models
from headwater.rewards.registry import known_rewards
from headwater.runtime.folder import PACKAGES, installed

OPTIONAL = {"reasoning-gym": "gym", "tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


def algorithms(having: str | None = None) -> Table:
    """The rows of the table, or those that comma-separated signals allow."""
    offers = None
    if having is not None:
        offers = frozenset(filter(None, (name.strip() for name in having.split(","))))
        for name in offers:
            if name not in SIGNALS:
                raise UnknownName("signal", name, sorted(SIGNALS), "--with")
    table = _table("algorithm", "what it does", "needs", "settings", "source")
    for row in rows(offers):
        settings = ", ".join(f"{key}={value}" for key, value in row.settings.items())
        table.add_row(row.name, row.summary, ", ".join(sorted(row.needs)), settings, row.source)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _named(known: Callable[[], Mapping[str, str]]) -> Callable[[], Table]:
    def table() -> Table:
        made = _table("name", "")
        for name, line in known().items():
            made.add_row(escape(name), escape(line))
        return made

    return table


def _recipes() -> dict[str, str]:
    """Recipes in the current folder's `recipes/`, each with its first comment."""
    found: dict[str, str] = {}
    for path in sorted(Path("recipes").glob("*.toml")):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        found[str(path)] = first.removeprefix("#").strip() if first.startswith("#") else ""
    return found or {"(none)": "there is no folder recipes/ here"}


CATALOGUE: dict[str, Callable[[], Table]] = {
    "algorithms": algorithms,
    "tasks": _named(known_tasks),
    "rewards": _named(known_rewards),
    "models": _named(known_models),
    "recipes": _named(_recipes),
}


def machine() -> Table:
    """Versions, processors, memory, accelerator, folders and optional packages."""
    table = _table("", "")
    table.add_row("python", f"{platform.python_version()} on {platform.platform()}")
    for name in PACKAGES:
        table.add_row(name, installed(name) or "[red]not installed[/]")
    table.add_row(
        "cores",
        f"{os.cpu_count()}, torch uses {torch.get_num_threads()} ({torch.backends.cpu.get_cpu_capability()})",
    )
    table.add_row("memory", _memory())
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    table.add_row("accelerator", accelerator)
    folder = cache_folder()
    near = next(path for path in (folder, *folder.parents) if path.exists())
    writable = "" if os.access(near, os.W_OK) else " [red]not writable: set HEADWATER_CACHE[/]"
    free = shutil.disk_usage(near).free / 2**30
    table.add_row("model cache", f"{escape(str(folder))}{writable}, {free:.0f} GiB free")
    for package, extra in OPTIONAL.items():
        table.add_row(
            package,
            installed(package) or f"[dim]not installed (optional: pip install 'headwater\\[{extra}]')[/]",
        )
    return table


def _memory() -> str:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return f"{pages * size / 2**30:.0f} GiB"
