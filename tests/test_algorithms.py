from __future__ import annotations

from pathlib import Path

import pytest

from headwater.algorithms import TABLE, build, choose, rows
from headwater.catalogue import objectives_page
from headwater.errors import ConfigError, UnknownName

REWARD = frozenset({"reward"})


def test_the_docstring_table_is_the_table():
    import headwater.algorithms as module

    printed = [line.split(maxsplit=1) for line in module.__doc__.splitlines() if line.startswith("    ")]
    assert printed == [[row.name, row.summary] for row in TABLE.values()]


def test_an_unknown_row_suggests_the_nearest():
    with pytest.raises(UnknownName, match=r"Unknown algorithm 'grppo'.*Did you mean 'grpo'"):
        choose("grppo", {}, REWARD)


def test_an_unknown_setting_suggests_the_nearest():
    with pytest.raises(UnknownName, match=r"'clip_hi'.*Did you mean 'clip_high'"):
        choose("grpo", {"clip_hi": 0.3}, REWARD)
    with pytest.raises(ConfigError, match=r"'sft' has no settings"):
        choose("sft", {"clip_low": 0.3}, REWARD)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), True, "0.1"])
def test_a_setting_out_of_range_is_refused(value):
    with pytest.raises(ConfigError, match=r"algorithm.kl is .*at least 0"):
        build("grpo", {"kl": value})


def test_a_row_whose_signals_are_not_offered_lists_those_that_could_run():
    with pytest.raises(ConfigError, match=r"'grpo' needs reward.*offers demonstration.*could run: sft"):
        choose("grpo", {}, frozenset({"demonstration"}))


def test_a_kl_term_needs_a_reference():
    with pytest.raises(ConfigError, match=r"ref_logp is missing"):
        choose("grpo", {"kl": 0.1}, REWARD)
    terms = choose("grpo", {"kl": 0.1}, REWARD | {"ref_logp"}).terms
    assert [(term.name, term.coefficient) for term in terms] == [("policy", 1.0), ("kl", 0.1)]


def test_rows_by_what_is_offered():
    could = {row.name for row in rows(REWARD)}
    assert {"reinforce", "rloo", "grpo", "dr_grpo", "rft"} <= could
    assert not could & {"ppo", "vtrace", "sft", "dpo", "bradley_terry", "online_dpo"}
    assert {row.name for row in rows(frozenset({"preference"}))} == {"simpo", "cpo", "orpo", "bradley_terry"}
    assert [row.name for row in rows(frozenset())] == []
    assert len(rows()) == len(TABLE)


@pytest.mark.parametrize(
    ("name", "settings", "idle"),
    [
        ("grpo", {"kl_estimator": "k2"}, "kl"),
        ("grpo", {"kl_off_policy": True}, "kl"),
        ("grpo", {"entropy_target": 0.5}, "entropy"),
        ("grpo", {"correction_high": 3.0}, "correction"),
        ("rloo", {"kl_target": 3.0}, "kl_reward"),
        ("dapo", {"overlong_cushion": 3.0}, "overlong_limit"),
        ("ppo", {"value_clip": 0.2, "value_coefficient": 0.0}, "value_coefficient"),
    ],
)
def test_a_setting_that_would_have_no_effect_is_refused(name, settings, idle):
    with pytest.raises(ConfigError, match=rf"no effect while algorithm.{idle} = "):
        build(name, settings)


def test_label_smoothing_exists_only_where_it_does_something():
    with pytest.raises(UnknownName, match="label_smoothing"):
        build("dpo", {"label_smoothing": 0.1})
    build("cdpo", {"label_smoothing": 0.1})


@pytest.mark.parametrize(
    ("name", "settings", "wrong"),
    [
        ("grpo", {"dual_clip": 0.5}, "above 1"),
        ("vtrace", {"c_bar": 2.0}, "c_bar"),
        ("dapo", {"overlong_limit": 10, "overlong_cushion": 20}, "overlong_cushion"),
        ("grpo", {"kl": 0.1, "kl_estimator": "k1"}, "one of k2, k3, k3_plus, exact"),
        ("grpo", {"kl": 0.1, "kl_estimator": "exact", "kl_off_policy": True}, "no effect"),
        ("gspo", {"token_form": 1}, "true or false"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(name, settings, wrong):
    with pytest.raises(ConfigError, match=wrong):
        build(name, settings)


def test_the_page_of_objectives_is_up_to_date():
    page = Path(__file__).parent.parent / "docs/objectives.md"
    assert page.read_text(encoding="utf-8") == objectives_page(), "python -m headwater.catalogue > docs/objectives.md"
