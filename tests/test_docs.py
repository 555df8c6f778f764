"""What the pages promise: their commands work, their site builds, and the recipes that they name load.

Every line of a ```bash block that starts with `headwater` is a command that must work as it stands, from
the root of the project. Commands with invented names belong in ```text blocks.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
import typer
import typer.main
from pydantic import BaseModel
from typer.core import TyperGroup
from typer.testing import CliRunner

from headwater.cli import app
from headwater.config import Recipe, load_recipe
from headwater.models.load import LoraConfig
from headwater.rewards.registry import RewardConfig, build_source
from headwater.rewards.source import judge
from headwater.types import Group, Span, Task, Trajectory

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
BLOCK = re.compile(r"^```(?P<language>\w+)[^\n]*\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\s*(?:\$ )?(?:\.venv/bin/)?headwater\s+(?P<rest>.*)$")


def commands(page: str) -> list[str]:
    """The arguments of every `headwater` command in the page's bash blocks, without their comments."""
    lines = [
        line
        for block in BLOCK.finditer(page)
        if block["language"] == "bash"
        for line in block["body"].replace("\\\n", " ").splitlines()
    ]
    found = [match["rest"] for line in lines if (match := COMMAND.match(line))]
    return [shlex.join(shlex.split(rest, comments=True)) for rest in found]


PROMISED = sorted({command for page in PAGES for command in commands(page.read_text(encoding="utf-8"))})


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like a fresh clone seen by the command line: recipes, and the runs that pages speak of."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parse(words: list[str]) -> str:
    """Parses as the command line does, options, choices and paths included, runs nothing, and
    returns the full name of the command."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="headwater")
    while isinstance(command, TyperGroup):
        name, command, words = command.resolve_command(context, words)
        assert command is not None
        context = command.make_context(name, list(words), parent=context)
    return context.command_path


def test_commands_are_found_in_bash_blocks_only() -> None:
    page = "```bash\nheadwater show \\\n  tasks  # why\n$ headwater doctor\nmake test\n```\n"
    page += "```text\nheadwater nothing\n```\n"
    assert commands(page) == ["show tasks", "doctor"]


def test_pages_show_every_command() -> None:
    shown = {shlex.split(command)[0] for command in PROMISED}
    assert shown >= {"train", "evaluate", "chat", "show", "doctor", "score", "audit"}


@pytest.mark.parametrize("command", PROMISED)
def test_promised_command_parses(command: str, project: Path) -> None:
    words = shlex.split(command)
    for word in words:
        if word.startswith("runs/"):
            (project / word).mkdir(parents=True, exist_ok=True)
    assert parse(words).split()[1] == words[0]


@pytest.mark.parametrize("command", [c for c in PROMISED if c.startswith("train ")])
def test_promised_training_has_a_valid_recipe(command: str, project: Path) -> None:
    words = [word for word in shlex.split(command)[1:] if not word.startswith("-")]
    overrides = [word for word in words[1:] if "=" in word]
    recipe = load_recipe(Path(words[0]), overrides)
    names = [word.removeprefix("run.name=") for word in overrides if word.startswith("run.name=")]
    assert recipe.run.name == (names[-1] if names else load_recipe(Path(words[0]), []).run.name)


@pytest.mark.parametrize("command", [c for c in PROMISED if c.startswith("show ")])
def test_promised_show_answers(command: str) -> None:
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output
    assert len(result.output.strip().splitlines()) > 1


def test_the_quickstart_would_run(project: Path) -> None:
    result = CliRunner().invoke(app, ["train", "recipes/quickstart.toml", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert not (project / "runs").exists(), "a dry run leaves nothing behind"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_loads(path: Path) -> None:
    assert load_recipe(path, []).run.steps > 0


def documented_keys() -> dict[str, set[str]]:
    """Per section of the page on recipes, the keys in the first column of its first table."""
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    found: dict[str, set[str]] = {}
    for part in re.split(r"^#+ (?=`\[)", page, flags=re.MULTILINE)[1:]:
        section = part.partition("`")[2].partition("`")[0].strip("[]")
        table = part.partition("\n|")[2].partition("\n\n")[0]
        first_column = [row.split("|")[1] for row in table.splitlines()[1:]]
        found[section] = set(re.findall(r"`(\w+)`", " ".join(first_column)))
    return found


def model_of(annotation: object) -> type[BaseModel]:
    """The configuration in an annotation such as `RewardConfig | None` or `tuple[RewardConfig, ...]`."""
    candidates = (annotation, *get_args(annotation))
    return next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))


def test_the_page_on_recipes_has_every_key_and_no_other() -> None:
    wanted = {name: set(model_of(f.annotation).model_fields) for name, f in Recipe.model_fields.items()}
    wanted["model.lora"] = set(LoraConfig.model_fields)
    wanted["model"] -= {"lora"}  # a section of its own
    wanted["reference"] = set()  # "the keys are those of `[model]`"
    assert documented_keys() == wanted


def test_recipes_that_pages_name_exist() -> None:
    named = {name for page in PAGES for name in re.findall(r"recipes/[\w-]+\.toml", page.read_text(encoding="utf-8"))}
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert named
    assert missing == []


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed: pip install 'headwater[docs]'")
def test_site_builds(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--quiet",
            "--site-dir",
            str(tmp_path / "site"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert result.returncode == 0, result.stderr
    home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "fonts.googleapis" not in home, "the site fetches nothing from elsewhere"


def test_python_in_pages_compiles() -> None:
    blocks = [
        (page.name, block["body"])
        for page in PAGES
        for block in BLOCK.finditer(page.read_text(encoding="utf-8"))
        if block["language"] == "python"
    ]
    assert blocks
    for name, body in blocks:
        compile(body, name, "exec")


def blocks(page: str, language: str) -> list[str]:
    """The bodies of a page's blocks in a language."""
    found = BLOCK.finditer((ROOT / "docs" / page).read_text(encoding="utf-8"))
    return [block["body"] for block in found if block["language"] == language]


@pytest.mark.parametrize("page", ["extending.md", "rooms/rewards.md"])
def test_rewards_in_pages_are_ones_that_a_recipe_may_have(page: str) -> None:
    sections = [tomllib.loads(body)["rewards"] for body in blocks(page, "toml") if "[[rewards]]" in body]
    assert sections
    for section in (section for found in sections for section in found):
        RewardConfig.model_validate(section)


@pytest.mark.parametrize(
    ("name", "settings", "rewards"),
    [
        ("brief_and_right", {}, [1.0, 0.5, 0.0]),
        ("shortest", {"pause_s": 0.001}, [0.0, 0.0, 1.0]),
        ("Listed", {"file": "known.txt"}, [0.0, 0.0, 1.0]),
    ],
)
def test_rewards_of_the_page_on_extending_run(
    name: str, settings: dict[str, object], rewards: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (body,) = (body for body in blocks("extending.md", "python") if re.search(rf"(def|class) {name}\b", body))
    (tmp_path / f"page_{name}.py").write_text(body)
    (tmp_path / "known.txt").write_text("no\nyes\n")
    monkeypatch.chdir(tmp_path)
    texts = ["It is 4.", "It is 4, " + "as I said, " * 20, "no"]
    spans = [Span(author="policy", tokens=(1,), text=text) for text in texts]
    asked = Group(
        task=Task(id="t", prompt="2+2?", answer="4"),
        trajectories=tuple(Trajectory(task_id="t", spans=(span,)) for span in spans),
    )
    source = build_source(RewardConfig(name=f"page_{name}:{name}", settings=settings))
    (judged,) = asyncio.run(judge([asked], [(source, 1.0)]))
    assert [trajectory.reward for trajectory in judged.trajectories] == rewards


def project_files() -> list[Path]:
    """Files that are, or would be, under version control; without git, all that are not hidden."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        found = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        found = [path for path in ROOT.rglob("*") if not any(p.startswith(".") for p in path.relative_to(ROOT).parts)]
    return [
        path for path in found if path.is_file() and path.suffix not in {".png", ".gguf", ".safetensors", ".parquet"}
    ]


def test_no_file_names_a_machine() -> None:
    # Written with classes of one letter, so that the pattern does not find itself.
    machine = re.compile(r"(?<![\w.$}])/(?:hom[e]/\w|User[s]/\w|roo[t]/|wor[k]/|op[t]/\w|mn[t]/\w)|file:/[/]/")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in project_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if machine.search(line)
    ]
    assert found == []
