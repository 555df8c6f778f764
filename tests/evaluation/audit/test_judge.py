"""The audit on judges whose biases are known: each is found, and where there is none, none is."""

import asyncio
from dataclasses import replace
from functools import cache

import pytest

from headwater.errors import ConfigError, UnknownName
from headwater.evaluation.audit.judge import PROBES, JudgeAudit, audit_judge, report
from headwater.evaluation.audit.judge_items import Item, synthetic_items
from headwater.rewards.judge.endpoint import Endpoint, EndpointConfig
from headwater.rewards.judge.fake_server import FakeServer
from headwater.rewards.judge.panel import LLMJudge
from headwater.rewards.judge.prompts import Secret
from headwater.rewards.judge.synthetic import PLANTED, SyntheticJudge

SECRET = Secret("0" * 32)
ALSO = {"length": {"verbosity"}, "disagreement": {"master keys", "constant answers"}}
"""What is found with a bias because it comes with it: padding is length, and who judges at random lets anything win."""


def audited(ask: SyntheticJudge, n: int = 80, seed: int = 0, **settings) -> JudgeAudit:
    judge = LLMJudge(ask=ask, secret=SECRET, guard=settings.pop("guard", False))
    return asyncio.run(audit_judge(judge, synthetic_items(n, seed=seed), own="own", **settings))


def found(audit: JudgeAudit, verdict: str = "found") -> set[str]:
    return {finding.name for finding in audit.findings if finding.verdict == verdict}


@pytest.mark.parametrize("name", [name for name in PLANTED if name in PROBES])
def test_each_planted_bias_is_found_and_no_other(name: str):
    audit = audited(PLANTED[name])
    assert name in found(audit)
    assert found(audit) <= {name, "disagreement", *ALSO.get(name, ())}
    assert audit[name].effect > audit[name].threshold


def test_a_planted_bias_for_the_second_place_is_found():
    assert audited(SyntheticJudge(position=-0.2), only=["position"])["position"].effect < -0.1


def test_a_fair_judge_is_cleared_of_everything():
    judge = LLMJudge(ask=PLANTED["fair"], secret=SECRET, guard=False)
    audit = asyncio.run(audit_judge(judge, synthetic_items(250, seed=1, doubt=0.0), own="own"))
    assert found(audit, "not found") == set(PROBES)


def test_false_alarms_are_rare():
    """At most alpha = 5% of audits of unbiased judges may have one; of 12 such, two happen in an eighth of cases at
    that rate, and were seen in none of 200."""
    alarms = 0
    for seed in range(12):
        audit = audited(SyntheticJudge(seed=seed, noise=0.1 if seed % 2 else 0.25), n=40, seed=seed)
        alarms += bool(found(audit) - {"disagreement"})
    assert alarms <= 1


def test_a_judge_without_verdicts_is_neither_found_nor_cleared():
    audit = audited(PLANTED["mute"], n=40)
    assert found(audit) == found(audit, "not found") == set()
    assert audit.asked["unparsed"] > 100
    assert "had no verdict" in audit["position"].barred


def test_the_guard_keeps_master_keys_from_a_judge_that_falls_for_them():
    guarded = audited(PLANTED["master keys"], guard=True, only=["master keys"])["master keys"]
    assert (guarded.verdict, guarded.effect) == ("not found", 0.0)
    assert "never shown" in guarded.note


def test_pointwise_scores_are_audited_too():
    audit = audited(PLANTED["length"], mode="pointwise", only=["length", "verbosity", "position", "challenge"])
    assert found(audit) == {"length", "verbosity"}
    assert "by itself" in audit["position"].barred


def test_what_length_does_is_told_beside_the_raw_win_rate():
    details = audited(PLANTED["length"], only=["length"])["length"].details
    assert details["phi"] > 1
    assert 0.5 < details["raw_win_rate"] < details["length_controlled_win_rate"] < 1


def test_agreement_has_an_interval_and_marginals():
    details = audited(PLANTED["fair"], only=["disagreement"])["disagreement"].details
    low, high = details["kappa_interval"]
    assert 0.4 < low < details["kappa"] < high <= 1
    assert sum(details["marginals_of_judge"].values()) == pytest.approx(1)
    assert details["raw_agreement"] > details["kappa"]


def test_people_among_themselves_are_compared_where_known():
    items = [replace(item, again=item.preferred) for item in synthetic_items(30)]
    judge = LLMJudge(ask=PLANTED["fair"], secret=SECRET)
    audit = asyncio.run(audit_judge(judge, items, only=["disagreement"]))
    assert audit["disagreement"].details["kappa_between_people"] == 1.0


def test_wrong_votes_that_anyone_gets_are_no_self_preference():
    """People err for both authors alike; the judge is right, so it also overrules people for its own answers."""
    items = synthetic_items(150, seed=3)
    others = [replace(i, id=f"{i.id}x", first_author="x", second_author="other") for i in synthetic_items(150, seed=4)]
    judge = LLMJudge(ask=PLANTED["noisy"], secret=SECRET)
    own = asyncio.run(audit_judge(judge, [*items, *others], own="own", only=["self-preference"]))["self-preference"]
    assert own.verdict != "found"
    assert own.details["excess_interval"][0] < 0 < own.details["excess_interval"][1]


def test_without_labels_nothing_is_said_of_length_and_people():
    judge = LLMJudge(ask=PLANTED["length"], secret=SECRET)
    audit = asyncio.run(audit_judge(judge, synthetic_items(60, labels=False)))
    for name in ("length", "self-preference", "disagreement"):
        assert audit[name].verdict == "not enough data"
        assert audit[name].barred
    assert audit["verbosity"].verdict == "found"


def test_a_rubric_of_ones_own_has_no_other_wording():
    judge = LLMJudge(ask=PLANTED["fair"], secret=SECRET, rubric="Shorter is better.")
    audit = asyncio.run(audit_judge(judge, synthetic_items(20), only=["rubric"]))
    assert "rubric of its own" in audit["rubric"].barred


def test_the_same_audit_twice_is_the_same():
    assert audited(PLANTED["noisy"], n=30) == audited(PLANTED["noisy"], n=30)


def test_an_audit_over_http_is_the_same():
    async def run() -> JudgeAudit:
        async with FakeServer(PLANTED["position"], faults=["500", "close"]) as server:
            endpoint = Endpoint(EndpointConfig(base_url=server.base_url, model="m", backoff_s=0.0))
            judge = LLMJudge(ask=endpoint, secret=SECRET, guard=False)
            return await audit_judge(judge, synthetic_items(40), only=["position"])

    assert asyncio.run(run())["position"] == audited(PLANTED["position"], n=40, only=["position"])["position"]


def test_a_report_has_every_verdict():
    said = report(audited(PLANTED["fair"], n=20, only=["position"]), {"usage": {"cost": 0.5}})
    assert said.facts["spent"] == {"usage": {"cost": 0.5}}
    assert [finding.name for finding in said.findings] == ["position"]


@cache
def _item() -> Item:
    return synthetic_items(1)[0]


@pytest.mark.parametrize(
    ("items", "settings", "error"),
    [
        ([], {}, "there are none"),
        ([_item()], {"own": "nobody"}, "No item has an answer by 'nobody'"),
        ([_item()], {"only": ["positon"]}, "Did you mean 'position'"),
    ],
)
def test_an_audit_that_cannot_be(items: list[Item], settings: dict, error: str):
    with pytest.raises((ConfigError, UnknownName), match=error):
        asyncio.run(audit_judge(LLMJudge(ask=PLANTED["fair"]), items, **settings))
