from __future__ import annotations

import pytest

from headwater.algorithms import TABLE, build, choose, rows
from headwater.errors import ConfigError, UnknownName

REWARD = frozenset({"reward"})


def test_the_docstring_table_is_the_table():
    import headwater.algorithms as module

    printed = [line.split()[0] for line in module.__doc__.splitlines() if line.startswith("    ")]
    assert printed[1:] == list(TABLE)


def test_an_unknown_row_suggests_the_nearest():
    with pytest.raises(UnknownName, match=r"Unknown algorithm 'gpro'.*Did you mean 'grpo'"):
        choose("gpro", {}, REWARD)


def test_an_unknown_setting_suggests_the_nearest():
    with pytest.raises(UnknownName, match=r"'clip_hi'.*Did you mean 'clip_high'"):
        choose("grpo", {"clip_hi": 0.3}, REWARD)
    with pytest.raises(ConfigError, match=r"'rloo' has no settings"):
        choose("rloo", {"clip_low": 0.3}, REWARD)


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
    assert [row.name for row in rows(REWARD)] == ["reinforce", "rloo", "grpo", "dr_grpo"]
    assert [row.name for row in rows(frozenset())] == []
    assert len(rows()) == len(TABLE)
