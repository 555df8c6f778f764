"""Against TRL, where it has a function to call. Its RLOO and GRPO advantages are inside its trainers."""

from __future__ import annotations

import warnings

import pytest

from headwater.credit.sequential import overlong


def test_the_ramp_of_overlong_answers_is_trl_s():
    pytest.importorskip("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.rewards import get_soft_overlong_punishment
    for limit, cushion in ((100, 20), (50, 50), (7, 0)):
        theirs = get_soft_overlong_punishment(limit, cushion)([[1] * length for length in range(limit + 5)])
        ours = [overlong(length, limit=limit, cushion=cushion) for length in range(limit + 5)]
        assert ours == pytest.approx(theirs, abs=1e-12)
