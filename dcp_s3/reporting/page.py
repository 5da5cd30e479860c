"""The HTML page of a report: one file that needs neither a network nor JavaScript."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import jinja2

from dcp_s3.checkpoint.directory import LEASE_MARGIN
from dcp_s3.checkpoint.info import CheckpointInfo, in_grace
from dcp_s3.reporting.report import ReportData
from dcp_s3.retention.plan import Decision
from dcp_s3.retention.policy import metric_value
from dcp_s3.units import format_seconds, format_size, plural
from dcp_s3.versions import __version__

MOST_METRICS = 8
_MOST_TEXT = 300  # characters of all metrics of a checkpoint
_LONGEST_SAVE = 30 * 86400.0  # seconds; what took longer, a clock was set
_WIDTH, _HEIGHT, _MARGIN = 640, 200, 12  # of a chart

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Checkpoints under {{ data.root }}</title>
<style>
body { max-width: 1360px; margin: 0 auto; padding: 24px; color: #1b1f24; font: 15px/1.5 system-ui, sans-serif; }
h1, li, .wide { overflow-wrap: anywhere; }
.muted { color: #59636e; }
.charts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
figure { margin: 0; }
svg { width: 100%; font-size: 12px; fill: #59636e; }
polyline { fill: none; stroke: #8b95a1; }
circle { stroke: #0b66b0; fill: #0b66b0; }
circle.delete { fill: #fff; }
circle.broken { stroke: #b3261e; fill: #b3261e; }
.bad { color: #b3261e; }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; white-space: nowrap; padding: 7px 12px; border-bottom: 1px solid #ddd; }
.wide { white-space: normal; min-width: 9rem; }
.wide:last-child { min-width: 18rem; }
</style>
</head>
<body>
<h1>{{ data.root }}</h1>
<p class="muted">Checkpoints as of {{ now }}, written by dcp-s3 {{ version }}</p>
<p>{{ summary }}</p>

<h2>What is broken</h2>
<ul>
{% for problem in data.problems %}
<li class="{{ problem.severity }}"><b>{{ problem.kind }}</b> {{ problem.text }} <code>{{ problem.remedy }}</code></li>
{% else %}
<li>Nothing: no save failed, no deletion is unfinished, nothing is damaged.</li>
{% endfor %}
</ul>

<h2>Over the steps</h2>
<p class="muted">Filled: stays. Hollow: would be deleted. Red: damaged or not complete. Point at one for its name.</p>
<div class="charts">
{% for chart in charts %}
<figure><figcaption>{{ chart.title }}, {{ chart.lowest }} to {{ chart.highest }}</figcaption>
<svg viewBox="0 0 {{ width }} {{ height + 16 }}" role="img">
<polyline points="{% for x, y, _, _ in chart.dots %}{{ x }},{{ y }} {% endfor %}"/>
{% for x, y, kind, name in chart.dots %}
<circle cx="{{ x }}" cy="{{ y }}" r="4" class="{{ kind }}"><title>{{ name }}</title></circle>
{% endfor %}
<text x="0" y="{{ height + 14 }}">step {{ chart.first }}</text>
<text x="{{ width }}" y="{{ height + 14 }}" text-anchor="end">{{ chart.last }}</text>
</svg></figure>
{% else %}
<p>Nothing to draw: no checkpoint has a step.</p>
{% endfor %}
</div>

<h2>What is kept, and why</h2>
<p class="muted">{{ policy }}</p>
<div class="table">
<table>
<thead><tr>{% for title in titles %}<th>{{ title }}</th>{% endfor %}</tr></thead>
<tbody>
{% for name, row, metrics, reasons in rows %}
<tr><td class="wide">{{ name }}</td>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}
<td class="wide">{{ metrics }}</td><td class="wide">{{ reasons }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
<p class="muted">Sizes are of data objects. Times are UTC, by the clocks of the saving jobs and of S3.</p>
</body>
</html>
"""


def render(data: ReportData) -> str:
    """The page."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    policy = (
        f"With {data.policy}: {len(data.plan.kept)} stay, {len(data.plan.deleted)} would be deleted "
        f"({format_size(data.plan.freed)}). The newest, pinned ones and those in use always stay."
        if data.policy is not None
        else "No policy (none was given, DCP_S3_RETENTION is not set): everything that is committed stays. "
        "--policy 'latest:3 daily:7' shows what one would keep."
    )
    return environment.from_string(_PAGE).render(
        data=data,
        charts=_charts(data),
        width=_WIDTH,
        height=_HEIGHT,
        now=_time(data.plan.now) + " UTC",
        policy=policy,
        rows=list(_rows(data)),
        summary=_summary(data),
        titles=("checkpoint", "state", "step", "size", "committed", "saved in", "ranks", "metrics", "retention"),
        version=__version__,
    )


def state_of(data: ReportData, info: CheckpointInfo) -> str:
    """What matters most about a checkpoint, in a word or two."""
    info = in_grace(info, now=data.plan.now, grace=data.plan.grace)
    if info.damage is not None:
        return "damaged"
    if info.deletions and not (info.committed and info.pinned):
        return "being deleted"
    if info.waiting or info.state == "local":
        return "waits on disk"
    if not info.committed:
        return "in progress" if info.state == "in_progress" else "incomplete"
    if info.pinned:
        return "pinned"
    return "foreign" if info.foreign else "committed"


def _summary(data: ReportData) -> str:
    decisions, newest = data.plan.decisions, data.newest
    committed = sum(each.checkpoint.committed for each in decisions)
    latest = "nothing to resume from" if newest is None else f"the latest committed is {newest.name}"
    if newest is not None and newest.created_at is not None:
        latest += f", {format_seconds(max(0.0, data.plan.now - newest.created_at))} ago"
    return (
        f"{plural(committed, 'checkpoint')} committed, {len(decisions) - committed} not; {format_size(data.stored)} in "
        f"data objects; {latest}."
    )


def _took(info: CheckpointInfo) -> float | None:
    """Seconds from the beginning of a save to its commit; None if not recorded."""
    if not info.committed or info.started_at is None or info.created_at is None:
        return None
    seconds = info.created_at - info.started_at
    return seconds if 0 <= seconds <= _LONGEST_SAVE else None


def _rows(data: ReportData) -> Iterator[tuple[str, list[str], str, str]]:
    """Name, figures, metrics, and action with reasons of each checkpoint, the newest first."""
    for decision in reversed(data.plan.decisions):
        info, seconds = decision.checkpoint, _took(decision.checkpoint)
        leased = info.leased_until is not None and data.plan.now < info.leased_until + LEASE_MARGIN
        cells = [
            state_of(data, info) + (", being read" if leased else ""),
            "" if info.step is None else f"{info.step:,}",
            "" if info.size is None else format_size(info.size),
            _time(info.created_at),
            "" if seconds is None else format_seconds(seconds),
            "" if info.world_size is None else f"{info.world_size:,}",
        ]
        metrics = " ".join(f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in info.metrics.items())
        metrics = metrics if len(metrics) <= _MOST_TEXT else metrics[: _MOST_TEXT - 1] + "…"
        yield info.name, cells, metrics, f"{decision.action}: {'; '.join(decision.reasons)}"


def _time(seconds: float | None) -> str:
    """``2026-01-31 23:59``, UTC; empty without a time."""
    try:
        return datetime.fromtimestamp(math.nan if seconds is None else seconds, timezone.utc).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return ""


# --- charts ------------------------------------------------------------------------------------------------


def _charts(data: ReportData) -> list[dict[str, Any]]:
    """Charts over the step, as the template draws them: size, seconds, and the first of the metrics."""
    found = [each for each in data.plan.decisions if each.checkpoint.step is not None]
    found.sort(key=lambda each: each.checkpoint.step or 0)
    infos = [each.checkpoint for each in found]
    values: list[tuple[str, Callable[[float], str], list[float | None]]] = [
        ("Size", format_size, [info.size for info in infos]),
        ("Seconds from the beginning of a save to its commit", format_seconds, [_took(info) for info in infos]),
    ]
    metrics = [
        (name, "{:.6g}".format, [metric_value(info, name) for info in infos])
        for name in sorted({name for info in infos for name in info.metrics})
    ]
    values += [each for each in metrics if any(value is not None for value in each[2])][:MOST_METRICS]
    charts = [_chart(title, show, list(zip(found, numbers, strict=True))) for title, show, numbers in values]
    return [each for each in charts if each]


def _chart(title: str, show: Callable[[float], str], found: list[tuple[Decision, float | None]]) -> dict[str, Any]:
    """A chart of the checkpoints that have the value; empty if none has."""
    drawn = [(each, float(value)) for each, value in found if value is not None and math.isfinite(value)]
    if not drawn:
        return {}
    steps, values = [each.checkpoint.step or 0 for each, _ in drawn], [value for _, value in drawn]
    across, up = (steps[-1] - steps[0]) or 1, (max(values) - min(values)) or 1.0
    dots = []
    for step, (each, value) in zip(steps, drawn, strict=True):
        x = _MARGIN + (step - steps[0]) / across * (_WIDTH - 2 * _MARGIN)
        y = _HEIGHT - _MARGIN - (value - min(values)) / up * (_HEIGHT - 2 * _MARGIN)
        is_broken = each.checkpoint.damage is not None or not each.checkpoint.committed
        name = f"{each.checkpoint.name}: {show(value)}"
        dots.append((round(x, 1), round(y, 1), "broken" if is_broken else each.action, name))
    limits = {"lowest": show(min(values)), "highest": show(max(values)), "first": steps[0], "last": steps[-1]}
    return {"title": title, "dots": dots, **limits}
