from __future__ import annotations

import struct

import pytest

from headwater.runtime.plot import PANELS, plot

ROWS = [
    {"step": 0, "held_out": 0.05},
    {"step": 1, "reward": 0.1, "entropy": 1.2, "grad_norm": 0.7, "mismatch": 1e-3, "answer_tokens": 4.0},
    {"step": 2, "reward": 0.4, "entropy": 1.0, "grad_norm": 0.6, "kl": 0.02, "held_out": 0.3, "flat_groups": 0.5},
]


def _size(path) -> tuple[int, int]:
    """Width and height in pixels, from the PNG's header."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_every_panel_that_has_something_to_show_is_drawn(tmp_path):
    plot(ROWS, tmp_path / "all.png")
    plot([{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}], tmp_path / "one.png")
    wide, high = _size(tmp_path / "all.png")
    assert (wide, high) == (round(3 * 4.6 * 110), round(2 * 3.0 * 110)), "six panels in two rows of three"
    assert _size(tmp_path / "one.png") == (round(4.6 * 110), round(3.0 * 110))
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("rows", [[], [{"step": 1}]])
def test_nothing_to_show_draws_nothing(tmp_path, rows):
    plot(rows, tmp_path / "curves.png")
    assert list(tmp_path.iterdir()) == []


def test_a_new_plot_replaces_the_old_one(tmp_path):
    path = tmp_path / "curves.png"
    plot(ROWS[:2], path)
    before = path.read_bytes()
    plot(ROWS, path)
    assert path.read_bytes() != before


def test_panels_share_no_metric():
    names = [name for _, panel, _ in PANELS for name in panel]
    assert len(names) == len(set(names))
