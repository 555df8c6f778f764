import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headwater.data.tasks import TasksConfig, load_tasks
from headwater.errors import ConfigError
from headwater.rewards.judge.ask import AskError
from headwater.rewards.judge.constitution import Constitution, Made, Preferrer, Reviser, SelfRewarder, read_revision
from headwater.rewards.judge.panel import LLMJudge
from headwater.rewards.judge.prompts import REWARDING
from headwater.rewards.judge.synthetic import SyntheticJudge, quality
from headwater.types import Message, Task

CONSTITUTION = Constitution(("Be kind.", "Be right."))
TASKS = [Task(id=f"t{i}", prompt=f"Question {i}?", answer=str(i)) for i in range(6)]


@dataclass
class Model:
    """Answers, criticises and revises, each revision better by one sound claim; `spoil` changes its revisions."""

    spoil: Callable[[str], str] = lambda text: text
    name: str = "model"
    seen: list[list[Message]] = field(default_factory=list)

    async def complete(self, messages: Sequence[Message], *, temperature: float, max_tokens: int, seed: int = 0) -> str:
        self.seen.append(list(messages))
        last = messages[-1]["content"]
        if messages[0]["role"] != "system":
            return f"Claim 1 is {'sound' if seed % 3 else 'shaky'}, says {seed}."
        if "Write it between" not in last:
            return "It is too short."
        fence = re.findall(r"\[BEGIN revision (\w+)\]", last)[0]
        before = messages[1]["content"].split("[BEGIN answer")[1].split("\n")[1]
        return self.spoil(f"Here it is:\n[BEGIN revision {fence}]\n{before} Claim 2 is sound.\n[END revision {fence}]")


def revised(model: Model, rounds: int = 1, tasks: Sequence[Task] = TASKS) -> Made:
    return asyncio.run(Reviser(author=model, constitution=CONSTITUTION, rounds=rounds)(tasks))


def test_critique_and_revision_makes_demonstrations(tmp_path: Path):
    made = revised(Model(), rounds=2)
    made.save(tmp_path / "sft.jsonl")
    tasks = load_tasks(TasksConfig(source=str(tmp_path / "sft.jsonl")))
    assert [task.id for task in tasks] == [task.id for task in TASKS]
    assert tasks[0].completion == "Claim 1 is shaky, says 0. Claim 2 is sound. Claim 2 is sound."
    assert tasks[0].meta["first_answer"] == "Claim 1 is shaky, says 0."
    principles = {step["principle"] for row in made.rows for step in row["revisions"]}
    assert principles == set(CONSTITUTION.principles)
    assert made.rows == revised(Model(), rounds=2).rows


def test_a_critic_may_be_another():
    author, critic = Model(), Model()
    asyncio.run(Reviser(author=author, critic=critic, constitution=CONSTITUTION)(TASKS[:1]))
    assert (len(author.seen), len(critic.seen)) == (1, 2)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace("[END revision", "[END"),  # cut off
        lambda text: "I would rather not.",
        lambda text: text + "\n" + text,
        lambda text: re.sub(r"\n.*Claim 2.*\n", "\n\n", text),
        lambda text: "",
        lambda text: "<think>" + text,
    ],
)
def test_a_revision_in_another_form_makes_no_row(spoil: Callable[[str], str]):
    made = revised(Model(spoil))
    assert made.rows == ()
    assert made.without == {"no revision in the form asked for": len(TASKS)}


def test_an_answer_cannot_pose_as_its_revision():
    assert read_revision("[BEGIN revision 0]\nme\n[END revision 0]", "abc") is None
    assert read_revision("[BEGIN revision abc]\nthe [END revision abc\n[END revision abc]", "abc") is None
    assert read_revision("[BEGIN revision abc]\nall\nof it\n[END revision abc]\nDone.", "abc") == "all\nof it"


def test_a_model_that_does_not_answer_makes_no_row():
    def fail(text: str) -> str:
        raise AskError("nobody there")

    assert revised(Model(fail)).without == {"no reply": len(TASKS)}


def test_preference_by_principles(tmp_path: Path):
    judge = LLMJudge(ask=SyntheticJudge(noise=0.0))
    good, bad = "Claim 1 is sound.", "Claim 1 is shaky."
    pairs = [(TASKS[0], good, bad), (TASKS[1], bad, good), (TASKS[2], good, good), (TASKS[3], good, good + " Yes.")]
    made = asyncio.run(Preferrer(judge=judge, constitution=CONSTITUTION, draws=3)(pairs))
    made.save(tmp_path / "pairs.jsonl")
    tasks = load_tasks(TasksConfig(source=str(tmp_path / "pairs.jsonl")))
    assert [(task.completion, task.rejected, task.ratings) for task in tasks] == [(good, bad, (1.0, 0.0))] * 2
    assert made.without == {"the same answer twice": 1, "a tie, or decided by order": 1}
    assert judge.tally.duels == 9


def test_each_principle_is_put_to_the_judge_by_itself():
    seen: list[str] = []

    class Watching(SyntheticJudge):
        async def complete(self, messages, *, temperature, max_tokens, seed=0):
            seen.append(messages[0]["content"])
            return await SyntheticJudge.complete(
                self, messages, temperature=temperature, max_tokens=max_tokens, seed=seed
            )

    made = Preferrer(judge=LLMJudge(ask=Watching()), constitution=CONSTITUTION, draws=8)
    asyncio.run(made([(TASKS[0], "Claim 1 is sound.", "Claim 1 is shaky.")]))
    assert {(p in text) for text in seen for p in CONSTITUTION.principles} == {True, False}
    assert all(sum(p in text for p in CONSTITUTION.principles) == 1 for text in seen)


@pytest.mark.parametrize(
    ("planted", "reason"), [({"mute": 1.0}, "no verdict"), ({"position": 9.0}, "a tie, or decided by order")]
)
def test_a_preference_that_is_none_makes_no_row(planted: dict[str, float], reason: str):
    made = Preferrer(judge=LLMJudge(ask=SyntheticJudge(**planted)), constitution=CONSTITUTION)
    assert asyncio.run(made([(TASKS[0], "Claim 1 is sound.", "Claim 1 is shaky.")])).without == {reason: 1}


def test_self_rewarding_prefers_its_best_to_its_worst(tmp_path: Path):
    judge = LLMJudge(ask=SyntheticJudge(noise=0.0), rubric=REWARDING, scale=(0, 5))
    made = asyncio.run(SelfRewarder(author=Model(), judge=judge)(TASKS))
    made.save(tmp_path / "pairs.jsonl")
    tasks = load_tasks(TasksConfig(source=str(tmp_path / "pairs.jsonl")))
    assert len(tasks) == len(TASKS)
    for task in tasks:
        assert isinstance(task.completion, str) and isinstance(task.rejected, str)
        assert (quality(task.completion), quality(task.rejected), task.ratings) == (1.0, 0.0, (5.0, 0.0))


def test_self_rewarding_learns_nothing_from_equal_scores_or_none():
    class Same(Model):
        async def complete(self, messages, *, temperature, max_tokens, seed=0):
            return "Claim 1 is sound."

    judge = LLMJudge(ask=SyntheticJudge(noise=0.0), scale=(0, 5))
    assert asyncio.run(SelfRewarder(author=Same(), judge=judge)(TASKS[:1])).without == {"all of one score": 1}
    mute = LLMJudge(ask=SyntheticJudge(mute=1.0), scale=(0, 5))
    assert asyncio.run(SelfRewarder(author=Model(), judge=mute)(TASKS[:1])).without == {"no verdict": 1}


def test_a_constitution_is_a_file_of_lines(tmp_path: Path):
    path = tmp_path / "constitution.txt"
    path.write_text("# what we want\nBe kind.\n\n  Be right.  \n")
    assert Constitution.read(path) == CONSTITUTION
    assert "- Be kind.\n- Be right." in CONSTITUTION.rubric
    path.write_text("# nothing yet\n")
    with pytest.raises(ConfigError, match="at least one principle"):
        Constitution.read(path)
    with pytest.raises(ConfigError, match="plain text"):
        Constitution.read(tmp_path / "none.txt")


def test_settings_that_cannot_work():
    judge = LLMJudge(ask=SyntheticJudge())
    for build in (
        lambda: Reviser(author=Model(), constitution=CONSTITUTION, rounds=0),
        lambda: Preferrer(judge=judge, constitution=CONSTITUTION, draws=0),
        lambda: SelfRewarder(author=Model(), judge=judge, answers=1),
    ):
        with pytest.raises(ConfigError, match="wanted at least"):
            build()


def test_messages_stay_messages():
    made = revised(Model(), tasks=[Task(id="t", prompt=(Message(role="user", content="Hm?"),))])
    assert json.loads(json.dumps(made.rows[0]["prompt"])) == [{"role": "user", "content": "Hm?"}]
