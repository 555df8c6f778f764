"""Recipes: a TOML file and overrides in, a checked Recipe out.

A room's own config stands beside the class that it configures; here they are assembled, together
with those of the run itself. Every key is checked, and an unknown one is an error that names the
nearest: a setting that is silently ignored is a wrong experiment.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headwater.algorithms import build
from headwater.data.tasks import TasksConfig
from headwater.errors import ConfigError, UnknownName
from headwater.models.load import ModelConfig
from headwater.rewards.registry import RewardConfig
from headwater.types import Algorithm, Sampling

_STRICT = ConfigDict(extra="forbid", frozen=True)
SHOWN = frozenset({"preference", "label", "step_label"})
"""Signals of data by which a row is evaluated itself, without answers being sampled and rewarded."""
Beta = Annotated[float, Field(ge=0, lt=1)]


class RunConfig(BaseModel):
    """The run itself: its folder, length, seed, and what it leaves behind.

    `max_lag` is how many optimizer steps sampling may run ahead of learning; 0 is synchronous and
    reproducible bit for bit. Counts of 0 in `*_every` mean never; a checkpoint is always written at
    the end.
    """

    model_config = _STRICT
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    folder: Path = Path("runs")
    seed: int = 0
    steps: int = Field(default=100, ge=1)
    max_lag: int = Field(default=0, ge=0)
    checkpoint_every: int = Field(default=10, ge=0)
    keep_checkpoints: int = Field(default=2, ge=1)
    evaluate_every: int = Field(default=0, ge=0)
    save_trajectories_every: int = Field(default=1, ge=0)
    loggers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()

    @property
    def path(self) -> Path:
        """Where the run lies."""
        return self.folder / self.name


class AlgorithmConfig(BaseModel):
    """A row of the table by name; further keys are the row's settings."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "grpo"

    @property
    def settings(self) -> Mapping[str, Any]:
        """The row's settings that differ from its defaults."""
        return dict(self.model_extra or {})


class SamplingConfig(BaseModel):
    """How training episodes are sampled; see `headwater.types.Sampling`."""

    model_config = _STRICT
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_tokens: int = Field(default=256, ge=1)
    stop: tuple[str, ...] = ()

    def build(self) -> Sampling:
        """As the engine takes it."""
        return Sampling(**self.model_dump())


class BatchConfig(BaseModel):
    """A step: `prompts` tasks, each sampled `siblings` times. It is learnt from in one optimizer update,
    or in `epochs` passes of `updates` updates each. Where an algorithm replaces groups that teach nothing
    (dapo), up to `rounds` rounds are sampled to fill a step."""

    model_config = _STRICT
    prompts: int = Field(default=8, ge=1)
    siblings: int = Field(default=8, ge=1)
    updates: int = Field(default=1, ge=1)
    epochs: int = Field(default=1, ge=1)
    rounds: int = Field(default=4, ge=1)


class CriticConfig(BaseModel):
    """The critic of rows that need one: a scalar head on the policy's trunk ("shared"), or on a trunk of
    its own that starts as a copy ("own": twice the memory, and neither disturbs the other)."""

    model_config = _STRICT
    trunk: Literal["shared", "own"] = "shared"


class OptimizerConfig(BaseModel):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) and the learning rate over time.

    `warmup` steps rise linearly to `lr`; `clip` bounds the global gradient norm; `micro_tokens` is
    how many tokens run through the model at once, and changes memory, never the result. `critic_lr` is for
    a critic or reward head (`lr` unless given).
    """

    model_config = _STRICT
    lr: float = Field(default=1e-5, gt=0, allow_inf_nan=False)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    critic_lr: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    clip: float = Field(default=1.0, gt=0)
    micro_tokens: int = Field(default=8192, ge=1)
    activation_checkpointing: bool = False


class EvaluationConfig(BaseModel):
    """Held-out tasks, answered before, during (run.evaluate_every) and after training; greedily
    unless `temperature` says otherwise."""

    model_config = _STRICT
    tasks: TasksConfig | None = None
    limit: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.0, ge=0)


class Recipe(BaseModel):
    """Everything that decides a run. `reference` is another model to compare with, such as a teacher;
    without it, rows that need a reference take the model as it was before training."""

    model_config = _STRICT
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    reference: ModelConfig | None = None
    critic: CriticConfig = CriticConfig()
    tasks: TasksConfig
    rewards: tuple[RewardConfig, ...] = ()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    sampling: SamplingConfig = SamplingConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a TOML file, with `section.key=value` overrides applied.

    Raises ConfigError for a file that is missing or is not TOML, and for every key or value in it
    that cannot be meant.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"There is no recipe at {path.absolute()}. `headwater show recipes` lists examples."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The recipe {path} cannot be read: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"The recipe {path} is not valid TOML: {error}.") from error
    for override in overrides:
        _apply(content, override)
    return check_recipe(content, str(path))


def check_recipe(content: Mapping[str, Any], where: str) -> Recipe:
    """A recipe from its content. `where` names it in errors."""
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise _explain(error, where) from None
    _check(recipe)
    return recipe


def _apply(content: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"The override '{override}' is not of the form section.key=value, such as run.steps=10.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    at: Any = content
    for part in parts[:-1]:
        at = (
            at[int(part)]
            if isinstance(at, list) and part.isdigit() and int(part) < len(at)
            else _section(at, part, override)
        )
    if not isinstance(at, dict):
        raise ConfigError(f"The override '{override}' goes into something that is not a section of the recipe.")
    at[parts[-1]] = value


def _section(at: Any, part: str, override: str) -> Any:
    if not isinstance(at, dict):
        raise ConfigError(f"The override '{override}' goes into something that is not a section of the recipe.")
    return at.setdefault(part, {})


def _explain(error: ValidationError, where: str) -> ConfigError:
    """The first thing that is wrong, in words: a misspelt key before the one that it leaves missing."""
    found = error.errors()
    first = next((one for one in found if one["type"] == "extra_forbidden"), found[0])
    place = [part for part in first["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
    name = ".".join(map(str, place))
    if first["type"] == "extra_forbidden":
        known = _keys(Recipe, place[:-1])
        section = ".".join(map(str, place[:-1]))
        return UnknownName("key", str(place[-1]), known, f"[{section}] of {where}" if section else where)
    if first["type"] == "missing":
        return ConfigError(f"{where} lacks '{name}', which has no default. Add it.")
    value = "" if isinstance(first["input"], dict) else f", found {first['input']!r}"
    return ConfigError(f"{where}: {name} is not right{value}. {first['msg']}.")


def _keys(model: type[BaseModel], place: Sequence[str | int]) -> list[str]:
    """Keys that the section at `place` may have."""
    for part in place:
        if isinstance(part, int):
            continue
        inner = next(_models(model.model_fields[part].annotation), None) if part in model.model_fields else None
        if inner is not None:
            model = inner
    return list(model.model_fields)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _check(recipe: Recipe) -> None:
    """What no single section can see."""
    algorithm = build(recipe.algorithm.name, recipe.algorithm.settings)
    _check_length(recipe)
    _check_evaluation(recipe, algorithm)
    _check_idle(recipe, algorithm)
    if not algorithm.online:
        return
    if algorithm.compares and recipe.batch.siblings < 2:
        raise ConfigError(
            f"'{algorithm.name}' compares siblings, and batch.siblings = {recipe.batch.siblings} gives each group one, "
            "so that no advantage could differ from zero. Set batch.siblings to 2 or more (8 is usual), or use "
            'algorithm.name = "reinforce".'
        )
    sampling = recipe.sampling.build()
    if sampling.temperature == 0:
        raise ConfigError(
            "sampling.temperature = 0 samples the same answer every time, so siblings cannot differ and nothing can be "
            "learnt. Use a temperature above 0 (1 is usual); evaluation is greedy anyway."
        )
    if sampling.truncates:
        raise ConfigError(
            "sampling.top_p, top_k and min_p cut off part of the distribution when sampling, while the learner scores "
            "all of it: every importance ratio would be wrong by the mass that was cut. Remove them for training; "
            "they are for `headwater chat`."
        )
    judged = algorithm.needs & {"reward", "step_reward", "turn_reward"}
    if judged and not recipe.rewards:
        raise ConfigError(f"'{algorithm.name}' learns from rewards, and the recipe has none. Add a [[rewards]] entry.")
    if algorithm.on_policy and recipe.run.max_lag > 0:
        raise ConfigError(
            f"run.max_lag = {recipe.run.max_lag} lets older weights sample, and '{algorithm.name}' is right only for "
            'what the current ones sampled. Set run.max_lag = 0, algorithm.correction = "tis", or use a clipped row '
            "such as grpo."
        )
    if algorithm.on_policy and recipe.batch.updates * recipe.batch.epochs > 1:
        raise ConfigError(
            f"batch.updates and batch.epochs let a step be learnt from more than once, and '{algorithm.name}' is right "
            "only for the first time. Set both to 1, or use a clipped row such as grpo."
        )


def _check_idle(recipe: Recipe, algorithm: Algorithm) -> None:
    """Settings that would have no effect."""
    needs = algorithm.needs
    if recipe.reference is not None and "ref_logp" not in needs:
        raise ConfigError(
            f"[reference] has no effect: '{algorithm.name}', as it is set, compares with none. Remove it, or use a KL "
            "term (algorithm.kl) or a row that needs ref_logp."
        )
    if recipe.critic.model_fields_set and "value" not in needs:
        raise ConfigError(f"[critic] has no effect: '{algorithm.name}' has no critic. Remove it, or use ppo or vtrace.")
    if recipe.optimizer.critic_lr is not None and algorithm.head is None:
        raise ConfigError(f"optimizer.critic_lr has no effect: '{algorithm.name}' has no scalar head. Remove it.")


def _check_length(recipe: Recipe) -> None:
    if recipe.optimizer.warmup >= recipe.run.steps:
        raise ConfigError(
            f"optimizer.warmup = {recipe.optimizer.warmup} is not less than run.steps = {recipe.run.steps}, so the "
            "learning rate would never be reached. Lower the one or raise the other."
        )


def _check_evaluation(recipe: Recipe, algorithm: Algorithm) -> None:
    if recipe.evaluation.tasks is None and recipe.run.evaluate_every:
        raise ConfigError(
            f"run.evaluate_every = {recipe.run.evaluate_every} has no effect without held-out tasks. Add an "
            "[evaluation.tasks] section, or remove it."
        )
    if recipe.evaluation.tasks is not None and not recipe.rewards and not algorithm.needs & SHOWN:
        raise ConfigError(
            "The recipe has [evaluation.tasks] and no reward to judge answers. Add a [[rewards]] entry, or remove it."
        )
