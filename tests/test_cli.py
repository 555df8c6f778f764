"""The command line, from the words typed to the words read and the files left behind."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headwater.cli import app

RECIPE = """# A table learns to say even digits.
[run]
name = "try"
steps = 6
checkpoint_every = 2

[model]
name = "fake:tabular"

[tasks]
source = "sums"
count = 20
settings = { digits = 1, part = "train" }

[[rewards]]
name = "judges_of_a_test:even_digits"

[sampling]
max_tokens = 6

[batch]
prompts = 2
siblings = 4

[optimizer]
lr = 0.5

[evaluation.tasks]
source = "sums"
count = 5
settings = { digits = 1, part = "held_out" }
"""
JUDGES = """
from pathlib import Path

def even_digits(text, task):
    if Path("interrupt").exists() and len(list(Path("runs/try/trajectories").glob("*"))) >= 3:
        raise KeyboardInterrupt
    return sum(c in "02468" for c in text) / max(1, len(text))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and a reward of the user's own, in which commands are typed."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "judges_of_a_test.py").write_text(JUDGES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "judges_of_a_test", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run. Look, and do not touch."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = RECIPE.replace("judges_of_a_test:even_digits", "number").replace("fake:tabular", "fake:llama")
    (folder / "recipe.toml").write_text(recipe)
    done = CliRunner().invoke(app, ["train", str(folder / "recipe.toml"), f"run.folder={folder}", "run.steps=1"])
    assert done.exit_code == 0, done.output
    return folder / "try"


def _type(*words: str, typed: str | None = None, code: int = 0) -> str:
    """What a command says, with white space as single spaces; stderr when it failed."""
    done = CliRunner().invoke(app, list(words), input=typed)
    assert done.exit_code == code, f"{done.output}\n{done.exception!r}"
    return " ".join((done.stderr if code == 2 else done.stdout).split())


def _lines(*words: str, typed: str | None = None) -> list[str]:
    done = CliRunner().invoke(app, list(words), input=typed)
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    return done.stdout.splitlines()


def test_help_names_every_command_and_needs_no_torch():
    text = _type("--help")
    for command in ("train", "evaluate", "chat", "show", "doctor"):
        assert command in text
        assert "Examples" in _type(command, "--help")
    light = "import sys, headwater.cli; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", light], check=False).returncode == 0


def test_train_says_before_and_after_and_ends_with_the_held_out_accuracy(here):
    lines = _lines("train", "recipe.toml")
    found = re.fullmatch(r"held-out accuracy (\d\.\d{3}) -> (\d\.\d{3})", lines[-1])
    assert found, lines[-1]
    folder = here / "runs" / "try"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(7))
    assert found.groups() == (f"{rows[0]['held_out']:.3f}", f"{rows[-1]['held_out']:.3f}")
    text = "\n".join(lines)
    assert text.count("What is") == 6, "three sample answers before and three after"
    assert "headwater chat runs/try" in text
    for kept in ("recipe.json", "environment.json", "curves.png", "model/table.safetensors", "checkpoints/step_000006"):
        assert (folder / kept).exists(), kept


def test_a_dry_run_checks_and_shows_the_plan_and_writes_nothing(here):
    before = sorted(here.rglob("*"))
    text = _type("train", "recipe.toml", "--dry-run", "run.steps=7")
    assert "fake:tabular" in text and "grpo, needs reward" in text
    assert "2 prompts x 4 = 8 answers of at most 6 tokens" in text
    assert "runs/try" in text and "Nothing was written" in text
    assert [path for path in sorted(here.rglob("*")) if "__pycache__" not in path.parts] == before
    assert "Unknown reward" in _type("train", "recipe.toml", "--dry-run", "rewards.0.name=numbr", code=2)


def test_an_error_is_a_message_without_a_traceback(here):
    text = _type("train", "recipe.toml", "run.stepz=3", code=2)
    assert text.startswith("error Unknown key 'stepz' in [run] of recipe.toml. Did you mean 'steps'?")
    assert "Traceback" not in text
    assert "There is no recipe at" in _type("train", "absent.toml", code=2)


def test_a_run_that_could_not_begin_leaves_its_name_free(here):
    (here / "empty.jsonl").write_text("")
    assert "no tasks" in _type("train", "recipe.toml", "evaluation.tasks.source=sums", *_file("empty.jsonl"), code=2)
    assert not (here / "runs" / "try").exists()
    assert "Unknown model" in _type("train", "recipe.toml", "model.name=fake:tabluar", code=2)
    assert not (here / "runs" / "try").exists()
    assert _lines("train", "recipe.toml", "run.steps=1")[-1].startswith("held-out accuracy")


def _file(name: str) -> list[str]:
    return [f'tasks={{source = "{name}"}}']


def test_a_logger_that_is_not_installed_is_said_before_the_run_begins(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    text = _type("train", "recipe.toml", 'run.loggers=["wandb"]', code=2)
    assert "pip install 'headwater[wandb]'" in text
    assert not (here / "runs" / "try").exists()


def test_a_run_folder_that_exists_is_kept(here):
    _lines("train", "recipe.toml", "run.steps=1")
    metrics = (here / "runs" / "try" / "metrics.jsonl").read_text()
    text = _type("train", "recipe.toml", "run.steps=1", code=2)
    assert "exists and is kept" in text and "--resume" in text
    assert (here / "runs" / "try" / "metrics.jsonl").read_text() == metrics


def test_resuming_goes_on_only_as_the_run_began(here):
    assert "There is no run at" in _type("train", "recipe.toml", "--resume", code=2)
    _lines("train", "recipe.toml", "run.steps=2")
    text = _type("train", "recipe.toml", "--resume", "optimizer.lr=0.1", code=2)
    assert "optimizer.lr differs from runs/try/recipe.json" in text
    assert "rewards differs" in _type("train", "recipe.toml", "--resume", "rewards.0.weight=2", code=2)
    lines = _lines("train", "recipe.toml", "--resume", "run.steps=4")
    assert lines[-1].startswith("held-out accuracy")
    rows = [json.loads(line) for line in (here / "runs" / "try" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]


def test_an_interrupted_run_says_how_to_go_on_and_does(here):
    (here / "interrupt").touch()
    text = _type("train", "recipe.toml", "tasks.system=be brief", code=130)
    command = "headwater train recipe.toml 'tasks.system=be brief' --resume"
    assert text.endswith(f"Interrupted. Go on with: {command}")
    (here / "interrupt").unlink()
    assert _lines("train", "recipe.toml", "tasks.system=be brief", "--resume")[-1].startswith("held-out accuracy")
    rows = [json.loads(line) for line in (here / "runs" / "try" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(7))


ACCURACY = r"accuracy \d\.\d{3} \(n=(\d+), 95% \d\.\d{3} to \d\.\d{3}\)"


def test_evaluate_a_run_on_its_own_held_out_tasks(trained):
    lines = _lines("evaluate", str(trained), "--limit", "4")
    found = re.fullmatch(ACCURACY, lines[-1])
    assert found and found[1] == "4"
    assert "\n".join(lines).count("What is") == 3
    assert len(_lines("evaluate", str(trained), "--samples", "0")) == 1


def test_evaluate_any_model_on_a_recipe(here):
    lines = _lines("evaluate", "fake:tabular", "--recipe", "recipe.toml", "--samples", "0")
    assert re.fullmatch(ACCURACY, lines[-1])


def test_evaluate_reads_another_file_as_the_recipe_reads_its_own(here):
    rows = [{"question": f"{i}?", "result": f"so #### {i}"} for i in range(4)]
    for name in ("own.jsonl", "other.jsonl"):
        (here / name).write_text("\n".join(json.dumps(row) for row in rows[: 2 if name == "own.jsonl" else 4]))
    tasks = (
        '[evaluation.tasks]\nsource = "own.jsonl"\nprompt = "{question}"\nanswer = "result"\nanswer_after = "####"\n'
    )
    recipe = RECIPE.partition("[evaluation.tasks]")[0].replace("judges_of_a_test:even_digits", "number") + tasks
    (here / "files.toml").write_text(recipe)
    common = ("evaluate", "fake:tabular", "--recipe", "files.toml", "--samples", "0")
    assert "n=2," in _lines(*common)[-1]
    assert "n=4," in _lines(*common, "--tasks", "other.jsonl")[-1]
    assert "n=3," in _lines(*common, "--tasks", "sums", "--limit", "3")[-1]


def test_evaluate_and_chat_want_a_run_that_has_ended(here):
    from headwater.config import load_recipe
    from headwater.runtime.folder import RunFolder

    RunFolder.create(here / "runs" / "young", load_recipe(here / "recipe.toml"))
    for command in ("evaluate", "chat"):
        assert "has no exported model yet" in _type(command, "runs/young", code=2)
    assert "Unknown model" in _type("evaluate", "fake:lama", code=2)


def test_chat_answers_each_line_and_reset_starts_over(trained):
    words = ("chat", str(trained), "--max-tokens", "8")
    first, second = _split(_lines(*words, typed="hello\nhello\n"), 2)
    again, after_reset = _split(_lines(*words, typed="hello\n/reset\n\nhello\n"), 2)
    assert first == again == after_reset, "greedy answers to the same conversation"
    assert second != first, "the second line of a conversation is answered with the first in mind"


def _split(lines: list[str], parts: int) -> list[str]:
    assert len(lines) == parts, lines
    return lines


def test_chat_ends_with_its_input_and_samples_by_seed(trained):
    assert _lines("chat", str(trained), typed="") == []
    words = ("chat", str(trained), "--max-tokens", "8", "--temperature", "1", "--seed")
    one, same, other = (_lines(*words, seed, typed="hi\n") for seed in ("1", "1", "2"))
    assert one == same != other


@pytest.mark.parametrize(
    ("what", "listed"),
    [
        ("algorithms", "dr_grpo"),
        ("tasks", "gym:<name>"),
        ("rewards", "number"),
        ("models", "fake:tabular"),
        ("recipes", "(none)"),
    ],
)
def test_show(here, what, listed):
    assert listed in _type("show", what)


def test_show_recipes_with_their_first_comment(here):
    (here / "recipes").mkdir()
    (here / "recipe.toml").rename(here / "recipes" / "even.toml")
    text = _type("show", "recipes")
    assert "recipes/even.toml" in text and "A table learns to say even digits." in text


def test_show_algorithms_that_signals_allow():
    assert "grpo" in _type("show", "algorithms", "--with", "reward, ref_logp")
    imitation = _type("show", "algorithms", "--with", "demonstration")
    assert "sft" in imitation and "grpo" not in imitation
    assert "Did you mean 'reward'?" in _type("show", "algorithms", "--with", "rewards", code=2)
    assert "--with goes with" in _type("show", "tasks", "--with", "reward", code=2)
    assert "Did you mean 'algorithms'?" in _type("show", "algorithm", code=2)


def test_doctor_finds_sampler_and_learner_in_agreement():
    text = _type("doctor", "--model", "fake:llama")
    for fact in ("headwater 0.1.0", "python", "cores", "memory", "accelerator", "model cache", "tensorboard"):
        assert fact in text, fact
    assert "ok fake:llama in float32" in text and "ok fake:llama in bfloat16" in text


def test_doctor_fails_when_they_are_too_far_apart(monkeypatch):
    import torch

    from headwater.evaluation import agreement

    monkeypatch.setitem(agreement.BOUNDS, torch.float32, -1.0)
    text = _type("doctor", "--model", "fake:llama", code=1)
    assert "too far apart fake:llama in float32" in text
