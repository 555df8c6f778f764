import importlib.util

import pytest

from headwater.data.gym import gym
from headwater.errors import ConfigError, UnknownName

INSTALLED = importlib.util.find_spec("reasoning_gym") is not None
needs_gym = pytest.mark.skipif(not INSTALLED, reason="the package reasoning-gym is not installed")


def fields(name: str = "basic_arithmetic", count: int = 4, seed: int = 0, **settings: object):
    return [dict(row.fields) for row in gym(name, count, seed=seed, settings=settings)]


@needs_gym
def test_puzzles_have_a_prompt_and_an_answer():
    rows = fields("chain_sum", count=4, min_terms=2, max_terms=2)
    assert len(rows) == 4
    for row in rows:
        left, right = row["metadata"]["expression"].replace("- ", "-").replace("+ ", "+").split()
        assert str(int(left) + int(right)) == row["answer"]
        assert row["metadata"]["expression"] in row["prompt"]


@needs_gym
def test_puzzles_depend_on_seed_and_index():
    assert fields(count=2) == fields(count=4)[:2]
    assert fields() != fields(seed=1)
    assert len({row["id"] for row in [*fields(), *fields(seed=1)]}) == 8


@needs_gym
def test_refuses_an_unknown_generator_with_a_suggestion():
    with pytest.raises(UnknownName, match="Did you mean 'basic_arithmetic'"):
        fields("basic_arithmetics")


@needs_gym
@pytest.mark.parametrize("settings", [{"no_such": 1}, {"min_terms": 9, "max_terms": 2}, {"min_terms": "many"}])
def test_refuses_settings_that_do_not_suit(settings: dict[str, object]):
    with pytest.raises(ConfigError, match="do not suit 'gym:basic_arithmetic'"):
        fields(**settings)


@needs_gym
@pytest.mark.parametrize(("key", "instead"), [("seed", r"tasks\.seed"), ("size", r"tasks\.count")])
def test_refuses_settings_that_the_recipe_has_elsewhere(key: str, instead: str):
    with pytest.raises(ConfigError, match=f"Set {instead}"):
        list(gym("basic_arithmetic", 1, seed=0, settings={key: 1}))


@pytest.mark.skipif(INSTALLED, reason="the package reasoning-gym is installed")
def test_says_what_to_install():
    with pytest.raises(ConfigError, match=r"pip install 'headwater\[gym\]'"):
        fields()
