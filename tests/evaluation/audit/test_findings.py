from typing import Any

import pytest

from headwater.evaluation.audit.findings import Finding, decide


def finding(**fields: Any) -> Finding:
    plain: dict[str, Any] = {
        "name": "bias",
        "measure": "m",
        "effect": 0.2,
        "interval": (0.1, 0.3),
        "threshold": 0.1,
        "n": 100,
        "p": 0.001,
    }
    return Finding(**{**plain, **fields})


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({}, "found"),
        ({"p": 0.2}, "not enough data"),
        ({"effect": 0.0, "interval": (-0.05, 0.05), "p": 0.9}, "not found"),
        ({"effect": 0.04, "interval": (0.01, 0.07)}, "not found"),  # real, and too small to matter
        ({"effect": -0.2, "interval": (-0.3, -0.1)}, "not found"),  # the other way is no harm
        ({"effect": -0.2, "interval": (-0.3, -0.1), "both_ways": True}, "found"),
        ({"effect": -0.05, "interval": (-0.15, 0.05), "both_ways": True, "p": 0.4}, "not enough data"),
        ({"effect": 0.2, "tolerated": 0.3}, "not enough data"),
        ({"unjudged": 26}, "not enough data"),  # 26 of 126 had no verdict
        ({"unjudged": 25}, "found"),
        ({"barred": "no labels"}, "not enough data"),
    ],
)
def test_a_verdict(fields: dict[str, Any], verdict: str):
    (found,) = decide([finding(**fields)])
    assert found.verdict == verdict


def test_many_tests_make_one_harder():
    weak = finding(p=0.02)
    others = [finding(name=f"other {i}", p=0.9) for i in range(4)]
    assert decide([weak])[0].verdict == "found"
    first = decide([weak, *others])[0]
    assert (first.verdict, first.p_adjusted) == ("not enough data", pytest.approx(0.1))


def test_what_cannot_be_tested_makes_none_harder():
    barred = [finding(name=f"other {i}", p=1.0, barred="no labels") for i in range(9)]
    assert decide([finding(p=0.04), *barred])[0].verdict == "found"
