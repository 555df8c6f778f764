"""Tasks of the reasoning-gym package: about a hundred generators of puzzles with answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headwater.data.formats import Row
from headwater.errors import ConfigError, UnknownName


def gym(name: str, count: int, *, seed: int, settings: Mapping[str, object]) -> Iterator[Row]:
    """`count` rows of the generator `name`; `settings` are its own. Two seeds draw differently but
    from the same puzzles, so on a small generator a held-out set can repeat training tasks."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"tasks.source 'gym:{name}' needs the package reasoning-gym, which is not installed. "
            "Install it with: pip install 'headwater[gym]'."
        ) from error
    if name not in DATASETS:
        raise UnknownName("generator", name, DATASETS, "tasks.source 'gym:...'")
    for key in ("seed", "size"):
        if key in settings:
            instead = {"seed": "tasks.seed", "size": "tasks.count"}[key]
            raise ConfigError(f"tasks.settings.{key} is set, but {instead} decides that. Set {instead}.")
    try:
        puzzles = reasoning_gym.create_dataset(name, size=count, seed=seed, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"tasks.settings do not suit 'gym:{name}': {error}.") from error
    for index in range(count):
        puzzle = puzzles[index]
        where = f"gym:{name}:{seed}:{index}"
        fields = {"id": where, "prompt": puzzle["question"], "answer": puzzle["answer"]}
        yield Row(index=index, where=where, fields=fields | {"metadata": puzzle["metadata"]})
