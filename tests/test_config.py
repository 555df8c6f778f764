"""Recipes: what is read from them, and what is said about those that cannot be meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.config import check_recipe, load_recipe
from headwater.errors import ConfigError, UnknownName

ROOT = Path(__file__).resolve().parent.parent
GOOD = """
[run]
name = "try"
steps = 5

[tasks]
source = "sums"

[[rewards]]
name = "number"
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.toml"
    path.write_text(GOOD)
    return path


def _content(**sections: Any) -> dict[str, Any]:
    return {"tasks": {"source": "sums"}, "rewards": [{"name": "number"}], **sections}


def test_what_is_in_the_file_is_in_the_recipe_and_the_rest_has_its_default(good):
    recipe = load_recipe(good)
    assert (recipe.run.name, recipe.run.steps, recipe.run.path) == ("try", 5, Path("runs/try"))
    assert [reward.name for reward in recipe.rewards] == ["number"]
    assert (recipe.algorithm.name, recipe.batch.siblings) == ("grpo", 8)


def test_overrides_are_toml_values_or_else_text(good):
    recipe = load_recipe(
        good,
        [
            "run.steps=9",
            "optimizer.lr=3e-5",
            "run.name=other",
            'sampling.stop=["a", "b"]',
            "algorithm.kl=0.1",
            "tasks.settings.digits=3",
            "rewards.0.weight=2",
            "model.lora.rank=4",
        ],
    )
    assert (recipe.run.steps, recipe.optimizer.lr, recipe.run.name) == (9, 3e-5, "other")
    assert recipe.sampling.stop == ("a", "b")
    assert recipe.algorithm.settings == {"kl": 0.1}
    assert recipe.tasks.settings == {"digits": 3}
    assert recipe.rewards[0].weight == 2
    assert recipe.model.lora is not None and recipe.model.lora.rank == 4


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.steps", r"'run\.steps' is not of the form section\.key=value"),
        ("=3", "not of the form"),
        ("run..steps=3", "not of the form"),
        ("run.steps.x=3", "is not a section"),
        ("rewards.0=3", "is not a section"),
        ("run.steps.more.x=3", "is not a section"),
    ],
)
def test_an_override_that_cannot_be_placed(good, override, said):
    with pytest.raises(ConfigError, match=said):
        load_recipe(good, [override])


@pytest.mark.parametrize(
    ("override", "near", "section"),
    [
        ("run.stepz=3", "steps", "[run]"),
        ("optimizer.learning_rate=3", None, "[optimizer]"),
        ("tasks.sorce=x", "source", "[tasks]"),
        ("rewards.0.wieght=3", "weight", "[rewards.0]"),
        ("model.lora.rnak=3", "rank", "[model.lora]"),
        ("evaluation.tasks.cuont=3", "count", "[evaluation.tasks]"),
        ("smapling.top_p=1", "sampling", "good.toml"),
        ("algorithm.clip_hihg=0.3", "clip_high", "[algorithm]"),
        ("algorithm.name=grop", "grpo", "algorithm.name"),
    ],
)
def test_an_unknown_key_names_its_section_and_the_nearest(good, override, near, section):
    with pytest.raises(UnknownName) as caught:
        load_recipe(good, [override])
    text = str(caught.value)
    assert section in text
    if near:
        assert f"Did you mean '{near}'?" in text
    else:
        assert "lr" in caught.value.known


def test_a_misspelt_key_is_reported_before_the_one_that_it_leaves_missing():
    with pytest.raises(UnknownName, match=r"Unknown key 'nmae' in \[rewards\.0\].*Did you mean 'name'"):
        check_recipe({"tasks": {"source": "sums"}, "rewards": [{"nmae": "number"}]}, "a recipe")


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("run", {"steps": 0}, r"run\.steps is not right, found 0\. Input should be greater"),
        ("run", {"steps": "many"}, r"run\.steps is not right, found 'many'.*integer"),
        ("run", {"name": "../up"}, r"run\.name is not right, found '\.\./up'"),
        ("run", {"loggers": ["prints"]}, r"run\.loggers\.0 is not right, found 'prints'.*'tensorboard'"),
        ("batch", {"prompts": 0}, r"batch\.prompts"),
        ("sampling", {"temperature": -1}, r"sampling\.temperature"),
        ("optimizer", {"lr": float("inf")}, r"optimizer\.lr"),
        ("optimizer", {"lr": 0}, r"optimizer\.lr"),
        ("optimizer", {"betas": [0.9, 1]}, r"optimizer\.betas\.1"),
        ("optimizer", {"schedule": "cosin"}, r"optimizer\.schedule.*'cosine'"),
        ("algorithm", {"kl": -1}, r"algorithm\.kl is -1; wanted a number of at least 0"),
        ("algorithm", {"kl": True}, r"algorithm\.kl is True"),
        ("run", "fast", r"run is not right, found 'fast'"),
    ],
)
def test_a_value_that_cannot_be_meant(section, values, said):
    with pytest.raises(ConfigError, match=said):
        check_recipe(_content(**{section: values}), "a recipe")


def test_what_has_no_default_must_be_there():
    with pytest.raises(ConfigError, match=r"a recipe lacks 'tasks\.source', which has no default"):
        check_recipe({"tasks": {}}, "a recipe")


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"batch": {"siblings": 1}}, r"'grpo' compares siblings, and batch\.siblings = 1"),
        ({"sampling": {"temperature": 0}}, r"sampling\.temperature = 0 samples the same answer"),
        ({"sampling": {"top_p": 0.9}}, "cut off part of the distribution"),
        ({"sampling": {"top_k": 50}}, "cut off part of the distribution"),
        ({"sampling": {"min_p": 0.1}}, "cut off part of the distribution"),
        ({"rewards": []}, r"'grpo' learns from rewards, and the recipe has none"),
        ({"run": {"steps": 10}, "optimizer": {"warmup": 10}}, r"optimizer\.warmup = 10 is not less than"),
        ({"run": {"evaluate_every": 5}}, r"evaluate_every = 5 has no effect without held-out tasks"),
    ],
)
def test_settings_that_cannot_go_together(sections, said):
    with pytest.raises(ConfigError, match=said):
        check_recipe(_content(**sections), "a recipe")


def test_demonstrations_need_no_rewards_and_no_siblings_but_keep_the_other_checks():
    imitation = {"tasks": {"source": "sums"}, "algorithm": {"name": "sft"}}
    check_recipe({**imitation, "batch": {"siblings": 1}, "sampling": {"temperature": 0}}, "a recipe")
    with pytest.raises(ConfigError, match=r"optimizer\.warmup"):
        check_recipe({**imitation, "run": {"steps": 3}, "optimizer": {"warmup": 3}}, "a recipe")
    with pytest.raises(ConfigError, match="no reward to judge answers"):
        check_recipe({**imitation, "evaluation": {"tasks": {"source": "sums"}}}, "a recipe")


def test_a_group_of_one_is_enough_where_siblings_are_not_compared():
    recipe = check_recipe(_content(algorithm={"name": "reinforce"}, batch={"siblings": 1}), "a recipe")
    assert recipe.batch.siblings == 1


def test_files_that_are_no_recipe(tmp_path):
    with pytest.raises(ConfigError, match=r"no recipe at .*absent\.toml.*headwater show recipes"):
        load_recipe(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recipe(tmp_path)
    (tmp_path / "bad.toml").write_text("[run\n")
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML.*line 1"):
        load_recipe(tmp_path / "bad.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recipe(tmp_path / "bytes.toml")


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_recipes_that_ship_are_valid_and_comment_on_themselves(path):
    recipe = load_recipe(path)
    assert recipe.run.name == path.stem, "the run is named after its recipe"
    assert recipe.evaluation.tasks is not None and recipe.evaluation.tasks != recipe.tasks
    assert path.read_text().startswith("# "), "`headwater show recipes` prints the first comment"
