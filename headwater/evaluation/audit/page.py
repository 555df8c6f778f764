"""What an audit found as JSON, and as one page of HTML that needs nothing else. All text in it is escaped: names
of models, answers and notes are not ours."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from headwater.errors import ConfigError
from headwater.evaluation.audit.findings import Finding
from headwater.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Findings with what stands above them. `facts` are what was audited and how, by name."""

    title: str
    findings: tuple[Finding, ...]
    facts: Mapping[str, Json] = field(default_factory=dict[str, Json])


def as_json(report: Report) -> str:
    """The report as JSON: its facts, `verdicts` by the name of the bias, and all of each finding. What is not a
    number (NaN, infinity) is null."""
    found = {
        "title": report.title,
        **report.facts,
        "verdicts": {finding.name: finding.verdict for finding in report.findings},
        "findings": [asdict(finding) for finding in report.findings],
    }
    return json.dumps(_plain(found), indent=2, allow_nan=False)


def _plain(value: object) -> Json:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def save(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write audit.json and audit.html. Raises ConfigError where the folder cannot be written."""
    paths = folder / "audit.json", folder / "audit.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, (as_json(report), as_html(report)), strict=True):
            path.write_bytes(text.encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(f"{folder.absolute()} cannot be written: {error.strerror}. Name another folder.") from error
    return paths


def shown(finding: Finding) -> str:
    """The effect with its interval, in a few characters; a dash where there is none."""
    if math.isnan(finding.effect):
        return "-"
    low, high = finding.interval
    return f"{finding.effect:+.3f} [{low:+.3f}, {high:+.3f}]"


def needed(finding: Finding) -> str:
    """Why there is no verdict, or how many comparisons would probably give one."""
    if finding.barred:
        return finding.barred
    if finding.verdict == "not enough data" and finding.needed is not None:
        return f"about {max(finding.needed, finding.n + 1)} comparisons would tell"
    return finding.note


# --- the page --------------------------------------------------------------------------------------


def as_html(report: Report) -> str:
    """The report as a page: a row and a picture for each finding, its details folded away."""
    counts = {
        verdict: sum(finding.verdict == verdict for finding in report.findings)
        for verdict in ("found", "not found", "not enough data")
    }
    summary = " · ".join(f"{count} {verdict}" for verdict, count in counts.items())
    facts = "".join(f"<tr><th>{_text(key)}</th><td>{_value(item)}</td></tr>" for key, item in report.facts.items())
    rows = "".join(map(_row, report.findings))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(report.title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<style>{_STYLE}</style></head><body>\n<h1>{_text(report.title)}</h1>\n<p>{_text(summary)}</p>\n"
        "<table class=findings><thead><tr><th>bias</th><th>verdict</th><th>effect [95%]</th>"
        f"<th>−1 to 1, with what does not matter in grey</th><th>n</th><th></th></tr></thead>\n{rows}</table>\n"
        f"<p>{_text(_RULE)}</p>\n<h2>What was audited</h2><table>{facts}</table>\n</body></html>\n"
    )


def _row(finding: Finding) -> str:
    facts: dict[str, Json] = {
        "measure": finding.measure,
        "threshold": finding.threshold,
        "p": finding.p,
        "p after Holm": finding.p_adjusted,
        "without a verdict": finding.unjudged,
        **finding.details,
    }
    details = "".join(f"<tr><th>{_text(key)}</th><td>{_value(item)}</td></tr>" for key, item in facts.items())
    return (
        f'<tr class="{finding.verdict.replace(" ", "-")}"><td><b>{_text(finding.name)}</b></td>'
        f"<td class=verdict>{_text(finding.verdict)}</td><td>{_text(shown(finding))}</td><td>{_picture(finding)}</td>"
        f"<td>{finding.n}</td><td>{_text(needed(finding))}<details><summary>{_text(finding.measure)}</summary>"
        f"<table>{details}</table></details></td></tr>\n"
    )


def _picture(finding: Finding) -> str:
    """The interval on a line from -1 to 1, with the effects that would not matter behind it."""
    if math.isnan(finding.effect):
        return ""
    low, high, middle = (_at(value) for value in (*finding.interval, finding.effect))
    left, right = _at(-finding.threshold if finding.both_ways else -1.0), _at(finding.threshold)
    return (
        f'<svg viewBox="0 0 200 16" width="200" height="16"><rect class="small" x="{left:.1f}" y="0" '
        f'width="{right - left:.1f}" height="16"/><line x1="100" y1="0" x2="100" y2="16"/>'
        f'<rect class="range" x="{low:.1f}" y="6" width="{max(1.0, high - low):.1f}" height="4"/>'
        f'<circle cx="{middle:.1f}" cy="8" r="4"/></svg>'
    )


def _at(value: float) -> float:
    return 100 + 100 * min(1.0, max(-1.0, value if math.isfinite(value) else 0.0))


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _value(value: Json) -> str:
    if isinstance(value, Mapping):
        return "<br>".join(f"{_text(key)}: {_value(item)}" for key, item in value.items())
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Sequence):
        return ", ".join(_value(item) for item in value)
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "-"
    return "-" if value is None else _text(value)


_RULE = (
    "Found: the effect is on the harmful side, with p below alpha after Holm's correction for all biases of the audit. "
    "Not found: the whole interval is within what does not matter. Else there is not enough data."
)
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:76rem;padding:0 1rem;color:#1b2430;background:#fff}
table{border-collapse:collapse}th,td{text-align:left;vertical-align:top;padding:.25rem .8rem .25rem 0;font-weight:400}
th{color:#5b6675}.findings>tbody>tr>td,.findings tr.found>td,.findings tr>td{border-top:1px solid #e3e7ec}
.verdict{white-space:nowrap;font-weight:600}.found .verdict{color:#b3261e}.not-found .verdict{color:#1d7a3e}
.not-enough-data .verdict{color:#8a6100}summary{color:#5b6675;cursor:pointer}details td,details th{border:0!important}
.small{fill:#e8ecf0}.range{fill:#3d6ea5}circle{fill:#1b2430}line{stroke:#9aa5b1}
@media(prefers-color-scheme:dark){body{background:#12171d;color:#dde3ea}.small{fill:#2a323c}circle{fill:#dde3ea}
.findings tr>td{border-color:#2a323c}}
"""
