"""What there is to choose from, and what this machine has, as tables."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from rich.markup import escape
from rich.table import Table

from headwater.algorithms import FROM_MODELS, ROWS_BY_KIND, SIGNALS, Row, Setting, Settings, rows
from headwater.data.tasks import known_tasks
from headwater.errors import UnknownName
from headwater.models.load import cache_folder, known_models
from headwater.rewards.registry import known_rewards
from headwater.runtime.folder import PACKAGES, installed

OPTIONAL = {"reasoning-gym": "gym", "tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


def algorithms(having: str | None = None) -> Table:
    """The rows of the table, or those that comma-separated signals allow."""
    offers: frozenset[str] | None = None
    if having is not None:
        offers = frozenset(filter(None, (name.strip() for name in having.split(","))))
        for name in offers:
            if name not in SIGNALS:
                raise UnknownName("signal", name, sorted(SIGNALS), "--with")
        offers |= FROM_MODELS
    table = _table("algorithm", "what it does", "needs", "settings", "source")
    for row in rows(offers):
        settings = ", ".join(f"{key}={_shown(value)}" for key, value in row.settings.items())
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


# ---- the page docs/objectives.md

KINDS = {
    "supervised": "Imitation",
    "policy": "Policy gradient",
    "preference": "Preference",
    "reward_model": "Reward model",
}
AGREES_WITH_TRL = {
    "sft": "by gradient, as cross-entropy",
    "rloo": "RLOOTrainer, by gradient",
    "grpo": "`loss_type=grpo`, KL, two-sided clip",
    "dr_grpo": "`loss_type=dr_grpo`",
    "dapo": "`loss_type=dapo`, the loss",
    "gspo": "`importance_sampling_level=sequence`",
    "cispo": "`loss_type=cispo`, its cap counted from 0",
    "sapo": "`loss_type=sapo`",
    "distill": "GKD's divergences on logits",
    "on_policy_distill": "GKD's divergences on logits",
    "dpo": "`sigmoid`",
    "cdpo": "`aot_unpaired` on one pair; `sigmoid` ignores its smoothing",
    "robust_dpo": "`robust`",
    "dpo_norm": "`sigmoid_norm`",
    "rpo": "`sigmoid` + `sft` at equal lengths",
    "forward_kl_dpo": "`f_divergence_type=forward_kl`",
    "js_dpo": "`f_divergence_type=js_divergence`",
    "alpha_dpo": "`f_divergence_type=alpha_divergence`, with 1 − α",
    "ipo": "`ipo`, where normalised",
    "hinge": "`hinge`",
    "exo": "`exo_pair`",
    "sppo": "`sppo_hard`",
    "nca": "`nca_pair`",
    "apo_zero": "`apo_zero`",
    "apo_down": "`apo_down`",
    "simpo": "CPO with `cpo_alpha=0`",
    "cpo": "CPO at equal lengths",
    "orpo": "ORPO's odds term",
    "kto": "KTOTrainer",
    "bradley_terry": "RewardTrainer, margin and centering",
}
"""What each row was compared with, to 1e-5, in tests/parity; rows that are missing have no counterpart."""


def resident(row: Row) -> str:
    """What a row keeps in memory beside the policy with its gradients and moments."""
    algorithm = row.build(Settings(row.settings))
    held: list[str] = []
    if "ref_logp" in algorithm.needs or "reference_point" in algorithm.needs:
        held.append("reference")
    if "value" in algorithm.needs:
        held.append("critic")
    if algorithm.head == "after":
        held.append("head")
    return ", ".join(held) or "nothing more"


def _proved(row: Row) -> str:
    """Where a row is proved; the tests check that these files exist and speak of it."""
    algorithm = row.build(Settings(row.settings))
    losses: set[str] = set()
    for term in algorithm.terms:
        loss = term.loss
        while isinstance(loss, partial):
            loss = loss.func
        losses.add(loss.__module__.rpartition(".")[2])
    return ", ".join(f"test_{name}" for name in sorted(losses))


def objectives_page() -> str:
    """Every row of the table as a page in Markdown."""
    lines = [
        "# Objectives",
        "",
        "Every row of the table. This page is made by `python -m headwater.catalogue > docs/objectives.md`; a test",
        "keeps it up to date. `headwater show algorithms --with reward` lists the rows that the signals at hand allow.",
        "",
        "*Needs* are signals: `ref_logp` keeps a frozen reference, `value` a critic, `logp` a pass of the learner",
        "before the step; these a run always has. *Resident* is what stays in memory beside the policy, its gradients",
        "and its moments. *Proved by* names files of tests/objective with hand-worked values and gradients; every row",
        "also learns on a policy of a few parameters (tests/test_rows.py) and runs on the embedded model",
        "(bench/every_row.py). *TRL* is what TRL 1.16 calls it where both agree to 1e-5 on the same tensors",
        "(tests/parity).",
    ]
    for module, title in KINDS.items():
        lines += ["", f"## {title}", "", "| row | formula | needs | settings | resident | proved by | TRL | source |"]
        lines.append("|---|---|---|---|---|---|---|---|")
        for row in ROWS_BY_KIND[module]:
            settings = ", ".join(f"{key}={_shown(value)}" for key, value in row.settings.items())
            cells = (
                f"`{row.name}`: {row.summary}",
                row.formula,
                ", ".join(sorted(row.needs)),
                settings or "none",
                resident(row),
                _proved(row),
                AGREES_WITH_TRL.get(row.name, "has none"),
                row.source,
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _shown(value: Setting) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else f"{value:g}"


if __name__ == "__main__":
    print(objectives_page(), end="")
