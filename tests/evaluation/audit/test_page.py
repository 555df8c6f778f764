import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.evaluation.audit.findings import Finding
from headwater.evaluation.audit.page import Report, as_html, as_json, needed, save, shown

EVIL = "<script>alert(1)</script>\"'&<img src=x onerror=alert(1)>\ud800"


def finding(**fields) -> Finding:
    plain = {"name": "bias", "measure": "m", "effect": 0.2, "interval": (0.1, 0.3), "threshold": 0.1, "n": 9, "p": 0.01}
    return Finding(**{**plain, **fields})


REPORT = Report(
    title=f"Audit of {EVIL}",
    findings=(
        finding(name=EVIL, measure=EVIL, note=EVIL, verdict="found", details={EVIL: {EVIL: [EVIL, math.inf]}}),
        finding(name="none", effect=math.nan, interval=(math.nan, math.nan), threshold=math.nan, barred=EVIL),
        finding(name="both", both_ways=True, verdict="not found", interval=(-5.0, 5.0)),
    ),
    facts={EVIL: EVIL, "n": 3, "cost": math.nan, "none": None},
)


class Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.names: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.names.extend(name for name, _ in attrs)


def test_the_page_is_escaped_and_needs_nothing_else():
    page = as_html(REPORT)
    seen = Seen()
    seen.feed(page)
    assert not {"script", "img", "link", "iframe", "object"} & set(seen.tags)
    assert not {"onerror", "src", "href"} & set(seen.names)
    assert "http:" not in page and "https:" not in page
    assert "default-src 'none'" in page
    assert page.count("&lt;script&gt;") >= 8


def test_the_page_has_a_row_and_a_verdict_for_each():
    page = as_html(REPORT)
    assert re.findall(r"<td class=verdict>([^<]*)<", page) == ["found", "not enough data", "not found"]
    assert "1 found · 1 not found · 1 not enough data" in page
    assert page.count("<svg") == 2  # there is nothing to draw of what is not known
    assert "nan" not in page.lower().replace("finance", "")


def test_json_is_json(tmp_path: Path):
    found = json.loads(as_json(REPORT), parse_constant=lambda name: pytest.fail(name))
    assert found["verdicts"] == {EVIL: "found", "none": "not enough data", "both": "not found"}
    assert found["findings"][1]["effect"] is None
    assert found["cost"] is None
    paths = save(REPORT, tmp_path / "a" / "b")
    assert [path.name for path in paths] == ["audit.json", "audit.html"]
    assert json.loads(paths[0].read_text(encoding="utf-8"))["n"] == 3


def test_a_folder_that_cannot_be_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Name another"):
        save(REPORT, tmp_path / "file" / "x")


def test_what_is_said_of_a_finding():
    assert shown(finding()) == "+0.200 [+0.100, +0.300]"
    assert shown(REPORT.findings[1]) == "-"
    assert needed(finding(needed=4)) == "about 10 comparisons would tell"
    assert needed(finding(barred="why", needed=4)) == "why"
    assert needed(finding(verdict="found", needed=4, note="n")) == "n"
