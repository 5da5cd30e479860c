"""The HTML page of a report: one file that needs no network, with charts that bokeh draws."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

import jinja2
import numpy as np
from bokeh.embed import file_html
from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter
from bokeh.plotting import figure
from bokeh.resources import Resources
from bokeh.transform import factor_cmap, factor_mark

from dcp_s3.checkpoint.directory import LEASE_MARGIN
from dcp_s3.checkpoint.info import CheckpointInfo, in_grace
from dcp_s3.reporting.report import ReportData
from dcp_s3.retention.policy import metric_value
from dcp_s3.units import format_seconds, format_size, plural
from dcp_s3.versions import __version__

MOST_METRICS = 8
_MOST_TEXT = 300  # characters of all metrics of a checkpoint
_LONGEST_SAVE = 30 * 86400.0  # seconds; what took longer, a clock was set

STATES: Mapping[str, tuple[str, str, str]] = {
    "committed": ("circle", "#0b66b0", "●"),
    "pinned": ("diamond", "#8a3d86", "◆"),
    "foreign": ("square", "#2f8fc4", "■"),
    "damaged": ("x", "#b3261e", "✕"),
    "in progress": ("triangle", "#00755a", "▲"),
    "waits on disk": ("inverted_triangle", "#b85c00", "▼"),
    "incomplete": ("cross", "#b85c00", "+"),
    "being deleted": ("asterisk", "#6b7480", "*"),
}
"""How a checkpoint is shown: what matters most about it, with marker, colour and sign."""

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="SECURITY">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
* { box-sizing: border-box; }
body { max-width: 1360px; margin: 0 auto; padding: 24px; color: #1b1f24; font: 15px/1.5 system-ui, sans-serif; }
h1, li, .wide { overflow-wrap: anywhere; }
.muted { color: #59636e; }
.charts { display: grid; gap: 12px; grid-template-columns: minmax(0, 1fr); }
@media (min-width: 900px) { .charts { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
.charts div { overflow: hidden; }
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
<p class="muted">Filled: stays. Hollow: would be deleted. Point at one for its name and reasons.<br>
{% for state, colour, sign in legend %}
<span style="color: {{ colour }}">{{ sign }}</span> {{ state }}&emsp;
{% endfor %}</p>
<noscript><p>The charts need JavaScript, which is part of this page. The rest does not.</p></noscript>
<div class="charts">
{% for root in roots %}
<div><div id="{{ root.elementid }}" data-root-id="{{ root.id }}"></div></div>
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
{{ bokeh_js | safe }}
{{ plot_script | safe }}
</body>
</html>
"""


def render(data: ReportData) -> str:
    """The page."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    charts = _charts(data)
    states = {state_of(data, each.checkpoint) for each in data.plan.decisions}
    policy = (
        f"With {data.policy}: {len(data.plan.kept)} stay, {len(data.plan.deleted)} would be deleted "
        f"({format_size(data.plan.freed)}). The newest, pinned ones and those in use always stay."
        if data.policy is not None
        else "No policy (none was given, DCP_S3_RETENTION is not set): everything that is committed stays. "
        "--policy 'latest:3 daily:7' shows what one would keep."
    )
    variables: dict[str, Any] = {
        "data": data,
        "legend": [(state, *look) for state, (_, *look) in STATES.items() if state in states],
        "now": _time(data.plan.now) + " UTC",
        "policy": policy,
        "rows": list(_rows(data)),
        "roots": [],
        "summary": _summary(data),
        "titles": ("checkpoint", "state", "step", "size", "committed", "saved in", "ranks", "metrics", "retention"),
        "version": __version__,
    }
    template, title = environment.from_string(_PAGE), f"Checkpoints under {data.root}"
    if charts:
        resources = Resources(mode="inline", log_level="warn")
        page: str = file_html(charts, resources, title, template=template, template_variables=variables)
    else:
        page = template.render(**variables, title=title, bokeh_js="", plot_script="")
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts]
    hashes = " ".join(f"'sha256-{each}'" for each in digests) or "'none'"
    # Styles are inline: bokeh makes style elements and attributes.
    security = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    return page.replace("SECURITY", security, 1)


def state_of(data: ReportData, info: CheckpointInfo) -> str:
    """What matters most about a checkpoint: one of `STATES`."""
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


def _charts(data: ReportData) -> list[Any]:
    """Charts over the step: size, seconds, and each metric."""
    drawn = [each for each in data.plan.decisions if each.checkpoint.step is not None]
    infos = [each.checkpoint for each in drawn]
    names = sorted({name for info in infos for name in info.metrics if metric_value(info, name) is not None})
    titles = {"size": "Size", "seconds": "Seconds from the beginning of a save to its commit"}
    titles |= {f"metric{number}": name for number, name in enumerate(names[:MOST_METRICS])}
    values: dict[str, list[float | None]] = {
        "size": [info.size for info in infos],
        "seconds": [_took(info) for info in infos],
    }
    values |= {name: [metric_value(info, titles[name]) for info in infos] for name in titles if name not in values}
    numbers = {
        name: np.array([math.nan if each is None else float(each) for each in found]) for name, found in values.items()
    }
    source = ColumnDataSource(
        {
            **numbers,
            "step": np.array([float(info.step or 0) for info in infos]),
            "name": [info.name for info in infos],
            "state": [state_of(data, info) for info in infos],
            "committed": [_time(info.created_at) for info in infos],
            "bytes": ["" if info.size is None else format_size(info.size) for info in infos],
            "retention": [f"{each.action}: {'; '.join(each.reasons)}" for each in drawn],
            "alpha": [0.85 if each.action == "keep" else 0.0 for each in drawn],
        }
    )
    charts = [_chart(title, name, source) for name, title in titles.items() if np.isfinite(numbers[name]).any()]
    for chart in charts[1:]:
        chart.x_range = charts[0].x_range
    return charts


def _chart(title: str, column: str, source: ColumnDataSource) -> Any:
    plot = figure(title=title, height=260, sizing_mode="stretch_width", tools="xbox_zoom,xwheel_pan,reset",
                  active_drag="xbox_zoom", active_scroll=None, toolbar_location="above")  # fmt: skip
    markers, colours, _ = zip(*STATES.values(), strict=True)
    colour = factor_cmap("state", colours, [*STATES])
    plot.line("step", column, source=source, line_color="#8b95a1", line_alpha=0.6)
    dots = plot.scatter("step", column, source=source, size=9, line_width=1.5, line_color=colour, fill_color=colour,
                        fill_alpha="alpha", marker=factor_mark("state", markers, [*STATES]))  # fmt: skip
    # Values are put in as text, never as HTML: bokeh does so for all but `{safe}` and templates of HTML.
    shown = ("name", "state", "committed", "bytes", "retention")
    facts = [(name, f"@{{{name}}}") for name in shown] + [("value", f"@{column}{{0.[000000]}}")]
    plot.add_tools(HoverTool(renderers=[dots], tooltips=facts, limit=3))
    plot.toolbar.logo = None
    plot.xaxis.axis_label = "step"
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    if column == "size":
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[0] ib")
    if column in ("size", "seconds"):
        plot.y_range.start = 0
    return plot
