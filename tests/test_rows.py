"""Every row of the table learns, from a recipe, on a policy that needs a second."""

from __future__ import annotations

import json
import sys

import pytest

from headwater.algorithms import TABLE
from headwater.config import check_recipe
from headwater.runtime.folder import RunFolder
from headwater.runtime.loop import train
from headwater.types import Signal

ONLINE = [name for name, row in TABLE.items() if "reward" in row.needs]
PAIRS = [name for name, row in TABLE.items() if "preference" in row.needs and name != "bradley_terry"]


def even_digits(text, task):
    """The share of the answer's characters that are even digits: a reward that a table can learn."""
    return sum(c in "02468" for c in text) / max(1, len(text)) if text else 0.0


def always(text, task):
    """The same to everyone."""
    return 1.0


class Steps:
    """A source of process rewards: every character is a step, and an even digit a good one."""

    name = "steps"
    offers = frozenset({"step_reward"})
    needs = frozenset()

    async def __call__(self, group):
        return tuple(self._signal(trajectory) for trajectory in group.trajectories)

    def _signal(self, trajectory):
        values = tuple(float(c in "02468") for c in trajectory.text)
        if not values:
            return Signal(source="steps", name="step_reward", status="abstained")
        return Signal(source="steps", name="step_reward", values=values, level="step", ends=tuple(range(len(values))))


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules[even_digits.__module__])


def _run(tmp_path, data=None, **sections):
    """A run on sums, or on the rows of a file, which it is then also evaluated on."""
    content = {
        "run": {"name": "run", "folder": str(tmp_path), "steps": 25, "checkpoint_every": 0, "seed": 3},
        "model": {"name": "fake:tabular"},
        "tasks": {"source": "sums", "count": 40, "settings": {"digits": 1}},
        "sampling": {"max_tokens": 6},
        "batch": {"prompts": 4, "siblings": 8},
        "optimizer": {"lr": 0.3},
    }
    if data is not None:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in data))
        content |= {"tasks": {"source": str(path)}, "evaluation": {"tasks": {"source": str(path)}}}
    for section, values in sections.items():
        content[section] = content.get(section, {}) | values if isinstance(values, dict) else values
    recipe = check_recipe(content, "test")
    folder = RunFolder.create(recipe.run.path, recipe)
    return folder, train(recipe, folder)


SLOW = dict.fromkeys(("remax", "ppo", "turn_ppo", "bi_level_ppo", "vtrace", "online_dpo"), 80)
VARIANTS = {
    "grpo, KL": {"name": "grpo", "kl": 0.01},
    "grpo, exact KL": {"name": "grpo", "kl": 0.01, "kl_estimator": "exact"},
    "grpo, entropy": {"name": "grpo", "entropy": 0.001},
    "grpo, adaptive entropy": {"name": "grpo", "entropy": 0.001, "entropy_target": 1.0},
    "grpo, truncated weights": {"name": "grpo", "correction": "tis"},
    "grpo, masked sequences": {"name": "grpo", "correction": "sequence_mask"},
    "rloo, KL in the reward": {"name": "rloo", "kl_reward": 0.01},
    "reinforce_pp, KL to a target": {"name": "reinforce_pp", "kl_reward": 0.01, "kl_target": 3.0},
    "reinforce, running mean": {"name": "reinforce", "baseline": "running_mean"},
    "ppo, KL to a target, values clipped": {"name": "ppo", "kl_reward": 0.01, "kl_target": 3.0, "value_clip": 0.2},
    "dapo, overlong": {"name": "dapo", "overlong_limit": 6, "overlong_cushion": 2},
    "gspo, tokens": {"name": "gspo", "token_form": True},
    "dppo, KL": {"name": "dppo", "distance": "kl", "bound": 0.05},
}


@pytest.mark.parametrize("name", [*ONLINE, *VARIANTS])
def test_what_learns_from_rewards_raises_them(tmp_path, name):
    algorithm = VARIANTS.get(name, {"name": name})
    steps = SLOW.get(algorithm["name"], 25)
    folder, _ = _run(tmp_path, algorithm=algorithm, run={"steps": steps}, rewards=[{"name": f"{__name__}:even_digits"}])
    rewards = [row["reward"] for row in folder.metrics()]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert first < 0.25
    assert last > first + 0.4, rewards


def test_process_rewards_are_learnt_from(tmp_path):
    folder, _ = _run(
        tmp_path,
        algorithm={"name": "process_grpo", "aggregate": "mean"},
        rewards=[{"name": f"{__name__}:Steps"}],
        run={"save_trajectories_every": 1},
    )
    last = (folder.path / "trajectories/step_000025.jsonl").read_text().splitlines()
    texts = ["".join(s["text"] for s in t["spans"][1:]) for line in last for t in json.loads(line)["trajectories"]]
    assert sum(even_digits(text, None) for text in texts) / len(texts) > 0.5


@pytest.mark.parametrize("updates", [{"epochs": 3}, {"updates": 2}, {"updates": 2, "epochs": 2}])
def test_a_step_can_be_learnt_from_more_than_once(tmp_path, updates):
    folder, _ = _run(
        tmp_path,
        algorithm={"name": "ppo"},
        batch=updates,
        run={"steps": 40},
        rewards=[{"name": f"{__name__}:even_digits"}],
    )
    rewards = [row["reward"] for row in folder.metrics()]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.4
    assert max(row.get("clip_fraction", 0) for row in folder.metrics()) > 0


@pytest.mark.parametrize("trunk", ["shared", "own"])
def test_a_critic_learns_what_is_to_come(tmp_path, trunk):
    folder, _ = _run(
        tmp_path,
        model={"name": "fake:llama"},
        critic={"trunk": trunk},
        algorithm={"name": "ppo", "gamma": 1.0, "lam": 1.0},
        optimizer={"lr": 1e-6, "critic_lr": 1e-2},
        run={"steps": 30},
        rewards=[{"name": f"{__name__}:always"}],
    )
    losses = [row["loss/value"] for row in folder.metrics()]
    assert losses[0] == pytest.approx(0.5)  # it says 0 where 1 is to come
    assert losses[-1] < 0.02


@pytest.mark.parametrize("name", PAIRS)
def test_what_learns_from_pairs_prefers_what_was_preferred(tmp_path, name):
    rows = [{"prompt": f"say {i}", "chosen": f"{i}468", "rejected": f"{i}357"} for i in range(10)]
    _, result = _run(tmp_path, rows, algorithm={"name": name}, optimizer={"lr": 0.1}, run={"steps": 15})
    assert result.before.accuracy == 0.5
    assert result.after.accuracy == 1.0


def test_kto_learns_from_answers_that_are_good_or_bad(tmp_path):
    rows = [{"prompt": f"say {i}", "completion": "2468" if i % 2 else "1357", "label": bool(i % 2)} for i in range(10)]
    _, result = _run(tmp_path, rows, algorithm={"name": "kto"}, optimizer={"lr": 0.1})
    assert result.after.accuracy == 1.0


def _judged_sums(count=32):
    """Sums of which a half is wrong: what a small model can tell."""
    return [
        {"prompt": f"{i % 8}+1=", "completion": str(i % 8 + 1 + 4 * (i % 2)), "label": i % 2 == 0} for i in range(count)
    ]


LLAMA = {"model": {"name": "fake:llama"}, "optimizer": {"lr": 5e-3}, "batch": {"prompts": 16}}


def test_a_reward_model_of_preferences_learns_and_is_a_reward(tmp_path):
    rows = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i + 2)} for i in range(8)]
    algorithm = {"name": "bradley_terry", "centering": 0.01}
    folder, result = _run(tmp_path, rows, **LLAMA | {"algorithm": algorithm, "run": {"steps": 60}})
    assert result.before.accuracy == 0.5
    assert result.after.accuracy == 1.0
    folder, _ = _run(
        tmp_path,
        run={"name": "policy", "steps": 2},
        rewards=[{"name": "reward_model", "settings": {"model": str(folder.path)}}],
        model={"name": "fake:llama"},
        optimizer={"lr": 1e-3},
    )
    assert all(abs(row["reward"]) < 100 for row in folder.metrics() if "reward" in row)


@pytest.mark.parametrize("settings", [{"name": "outcome"}, {"name": "outcome", "every_token": False}])
def test_an_outcome_reward_model_tells_right_from_wrong(tmp_path, settings):
    _, result = _run(tmp_path, _judged_sums(), **LLAMA | {"algorithm": settings, "run": {"steps": 80}})
    assert result.after.accuracy > 0.9


def test_a_reward_model_of_ratings_comes_close_to_them(tmp_path):
    folder, _ = _run(tmp_path, _judged_sums(), **LLAMA | {"algorithm": {"name": "regression"}, "run": {"steps": 80}})
    losses = [row["loss"] for row in folder.metrics() if "loss" in row]
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("name", ["process", "process_classes"])
def test_a_process_reward_model_finds_the_wrong_step(tmp_path, name):
    rows = [
        {"prompt": "count", "steps": ["1", "2", "3"] if i % 2 else ["1", "7", "3"], "first_error": None if i % 2 else 2}
        for i in range(16)
    ]
    if name == "process_classes":  # its classes are bad (-1), neutral and good (1)
        rows = [
            {"prompt": "count", "steps": ["1", "2"] if i % 2 else ["1", "7"], "labels": [1, 1 if i % 2 else -1]}
            for i in range(16)
        ]
    _, result = _run(tmp_path, rows, **LLAMA | {"algorithm": {"name": name}, "run": {"steps": 60}})
    assert result.after.accuracy == 1.0


def _teacher(tmp_path):
    """A table that was trained to say 2 over and over."""
    rows = [{"prompt": "say", "completion": "2222"}]
    folder, _ = _run(
        tmp_path, rows, run={"name": "teacher", "steps": 20}, algorithm={"name": "sft"}, evaluation={"tasks": None}
    )
    return {"name": str(folder.model)}


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("name", ["distill", "on_policy_distill"])
def test_a_student_comes_close_to_its_teacher(tmp_path, name, divergence):
    teacher = _teacher(tmp_path)
    rows = [{"prompt": "say", "completion": "2222"}]
    folder, _ = _run(
        tmp_path,
        rows,
        algorithm={"name": name, "divergence": divergence},
        reference=teacher,
        evaluation={"tasks": None},
        run={"steps": 40},
    )
    losses = [row["loss"] for row in folder.metrics() if "loss" in row]
    assert losses[-1] < 0.5 * losses[0], losses


def test_the_teacher_likes_what_a_student_of_its_log_probs_says(tmp_path):
    folder, _ = _run(
        tmp_path,
        [{"prompt": "say", "completion": "2222"}],
        algorithm={"name": "reverse_kl_policy"},
        reference=_teacher(tmp_path),
        evaluation={"tasks": None},
        run={"steps": 40},
    )
    kls = [row["kl"] for row in folder.metrics() if "kl" in row]
    assert kls[-1] < 0.5 * kls[0], kls


def test_demonstrations_are_imitated(tmp_path):
    rows = [{"prompt": "say", "completion": "2468"}]
    folder, _ = _run(tmp_path, rows, algorithm={"name": "sft"}, evaluation={"tasks": None})
    losses = [row["loss"] for row in folder.metrics()]
    assert losses[-1] < 0.2 * losses[0]


def test_every_row_is_in_one_of_these_tests():
    told = {*ONLINE, *PAIRS, "process_grpo", "kto", "bradley_terry", "outcome", "regression", "process"}
    told |= {"process_classes", "distill", "on_policy_distill", "reverse_kl_policy", "sft"}
    assert told == set(TABLE)
