"""The report as one HTML page that needs no network, with charts by bokeh.

Names and metrics come from a bucket, so from anybody who may write there. They are put in as text: jinja2 escapes them,
and so does bokeh. The page's Content-Security-Policy lets only its own scripts run, named by their hashes, and lets
nothing be fetched.
"""

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
from bokeh.models import AdaptiveTicker, ColumnDataSource, HoverTool, NumeralTickFormatter
from bokeh.plotting import figure
from bokeh.resources import Resources
from bokeh.transform import factor_cmap, factor_mark

from dcp_s3._version import __version__
from dcp_s3.checkpoint.directory import LEASE_MARGIN
from dcp_s3.checkpoint.info import CheckpointInfo, in_grace
from dcp_s3.reporting.report import ReportData
from dcp_s3.retention.policy import metric_value
from dcp_s3.units import format_seconds, format_size, plural

MOST_METRICS = 8
_MOST_PROBLEMS = 50
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
body { margin: 0; background: #f4f5f7; color: #1b1f24; font: 15px/1.5 system-ui, "Segoe UI", "Noto Sans", sans-serif; }
main { max-width: 1360px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; }
h2 { font-size: 1.1rem; margin: 32px 0 12px; }
h1, li, .wide { overflow-wrap: anywhere; }
p { margin: 6px 0; }
.muted { color: #59636e; font-size: 0.88rem; }
.card { background: white; border: 1px solid #dfe3e8; border-radius: 10px; padding: 12px 16px; min-width: 0; }
.tiles, .charts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); }
.charts { grid-template-columns: minmax(0, 1fr); }
.charts .card { overflow: hidden; }
@media (min-width: 900px) { .charts { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
.tiles b { display: block; font-size: 1.5rem; line-height: 1.3; overflow-wrap: anywhere; }
.problems { list-style: none; margin: 0; padding: 0; display: grid; gap: 8px; }
.problems li { border-radius: 8px; padding: 10px 14px; border-left: 4px solid #b85c00; background: #fff3e0; }
.problems .bad { background: #fdecea; border-color: #b3261e; }
.problems code { padding: 1px 7px; border-radius: 5px; background: white; border: 1px solid #dfe3e8; }
.table { overflow-x: auto; padding: 0; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 7px 12px; border-bottom: 1px solid #dfe3e8; }
th, td { vertical-align: top; white-space: nowrap; }
th { color: #59636e; }
.wide { white-space: normal; min-width: 9rem; }
.wide:nth-last-child(2) { min-width: 14rem; }
.wide:last-child { min-width: 18rem; }
.state { display: inline-block; margin-right: 14px; }
.delete { color: #b85c00; font-weight: 600; }
</style>
</head>
<body>
<main>
<h1>{{ data.root }}</h1>
<p class="muted">Checkpoints as of {{ now }}, written by dcp-s3 {{ version }}</p>
<div class="tiles">
{% for label, value, more in tiles %}
<div class="card muted">{{ label }}<b style="color: #1b1f24">{{ value }}</b>{{ more }}</div>
{% endfor %}
</div>

<h2>What is broken</h2>
<ul class="problems">
{% for problem in data.problems[:most_problems] %}
<li class="{{ problem.severity }}"><b>{{ problem.kind }}</b> {{ problem.text }}
{% if problem.remedy %}<br><code>{{ problem.remedy }}</code>{% endif %}</li>
{% else %}
<li>Nothing: no save failed, no deletion is unfinished, nothing is damaged.</li>
{% endfor %}
</ul>
{% if data.problems | length > most_problems %}
<p class="muted">and {{ data.problems | length - most_problems }} more, which the table shows</p>
{% endif %}

<h2>Over the steps</h2>
<p class="muted">Filled: stays. Hollow: would be deleted. Point at one for its name and reasons.<br>
{% for state, colour, sign in legend %}
<span class="state"><span style="color: {{ colour }}">{{ sign }}</span> {{ state }}</span>
{% endfor %}</p>
<noscript><p class="card">The charts need JavaScript, which is part of this page. The rest does not.</p></noscript>
<div class="charts">
{% for root in roots %}
<div class="card"><div id="{{ root.elementid }}" data-root-id="{{ root.id }}"></div></div>
{% else %}
<p class="card">Nothing to draw: no checkpoint has a step.</p>
{% endfor %}
</div>

<h2>What is kept, and why</h2>
<p class="muted">{{ policy }}</p>
<div class="card table">
<table>
<thead><tr>{% for title in titles %}<th>{{ title }}</th>{% endfor %}</tr></thead>
<tbody>
{% for name, row, metrics, action, reasons in rows %}
<tr><td class="wide">{{ name }}</td>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}
<td class="wide">{{ metrics }}</td>
<td class="wide"><span class="{{ action }}">{{ action }}</span>: {{ reasons }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
<p class="muted">Sizes are of data objects. Times are UTC, by the clocks of the saving jobs and of S3.</p>
</main>
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
        "most_problems": _MOST_PROBLEMS,
        "now": _time(data.plan.now) + " UTC",
        "policy": policy,
        "rows": list(_rows(data)),
        "roots": [],
        "tiles": list(_tiles(data)),
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


def _took(info: CheckpointInfo) -> float | None:
    """Seconds from the beginning of a save to its commit; None if not recorded."""
    if not info.committed or info.started_at is None or info.created_at is None:
        return None
    seconds = info.created_at - info.started_at
    return seconds if 0 <= seconds <= _LONGEST_SAVE else None


# --- charts ------------------------------------------------------------------------------------------------


def _charts(data: ReportData) -> list[Any]:
    """Charts over the step: size, seconds, and each metric."""
    drawn = [each for each in data.plan.decisions if each.checkpoint.step is not None]
    if not drawn:
        return []
    infos = [each.checkpoint for each in drawn]
    states = [state_of(data, info) for info in infos]
    names = sorted({name for info in infos for name in info.metrics if metric_value(info, name) is not None})
    shown = names[:MOST_METRICS]
    columns: dict[str, Any] = {
        "step": _numbers(info.step for info in infos),
        "size": _numbers(info.size for info in infos),
        "seconds": _numbers(map(_took, infos)),
        "name": [info.name for info in infos],
        "state": states,
        "committed": [_time(info.created_at) for info in infos],
        "bytes": ["" if info.size is None else format_size(info.size) for info in infos],
        "saved in": ["" if (seconds := _took(info)) is None else format_seconds(seconds) for info in infos],
        "retention": [f"{each.action}: {'; '.join(each.reasons)}" for each in drawn],
        "alpha": [0.85 if each.action == "keep" else 0.0 for each in drawn],
    }
    for number, name in enumerate(shown):
        columns[f"metric{number}"] = _numbers(metric_value(info, name) for info in infos)
    source = ColumnDataSource(columns)
    titles = {"size": "Size", "seconds": "Seconds from the beginning of a save to its commit"}
    titles |= {f"metric{number}": name for number, name in enumerate(shown)}
    charts = [_chart(title, name, source) for name, title in titles.items() if np.isfinite(columns[name]).any()]
    for chart in charts[1:]:
        chart.x_range = charts[0].x_range
    return charts


def _numbers(values: Any) -> Any:
    return np.array([math.nan if value is None else float(value) for value in values], dtype=np.float64)


def _chart(title: str, column: str, source: ColumnDataSource) -> Any:
    plot = figure(title=title, height=260, sizing_mode="stretch_width", tools="xbox_zoom,xwheel_pan,reset",
                  active_drag="xbox_zoom", active_scroll=None, toolbar_location="above")  # fmt: skip
    markers, colours, _ = zip(*STATES.values(), strict=True)
    colour = factor_cmap("state", colours, [*STATES])
    plot.line("step", column, source=source, line_color="#8b95a1", line_alpha=0.6)
    dots = plot.scatter("step", column, source=source, size=9, line_width=1.5, line_color=colour, fill_color=colour,
                        fill_alpha="alpha", marker=factor_mark("state", markers, [*STATES]))  # fmt: skip
    # Values are put in as text, never as HTML: bokeh does so for all but `{safe}` and templates of HTML.
    shown = ("name", "state", "committed", "bytes", "saved in", "retention")
    facts = [(name, f"@{{{name}}}") for name in shown]
    if column.startswith("metric"):
        facts.insert(1, ("value", f"@{column}{{0.[000000]}}"))
    plot.add_tools(HoverTool(renderers=[dots], tooltips=facts, limit=3))
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.outline_line_color = None
    plot.xaxis.axis_label = "step"
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    plot.yaxis.ticker.desired_num_ticks = 5
    if column == "size":
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[0] ib")
        plot.yaxis.ticker = AdaptiveTicker(base=2, mantissas=[1], desired_num_ticks=5)
    if column in ("size", "seconds"):
        plot.y_range.start = 0
    return plot


# --- texts -------------------------------------------------------------------------------------------------


def _tiles(data: ReportData) -> Iterator[tuple[str, str, str]]:
    decisions = data.plan.decisions
    committed = sum(each.checkpoint.committed for each in decisions)
    others = len(decisions) - committed
    yield "Checkpoints", f"{committed:,}", f"and {others} not committed" if others else "all committed"
    yield "Stored", format_size(data.stored), "in data objects"
    newest = data.newest
    if newest is None:
        yield "Latest committed", "none", "nothing to resume from"
    else:
        age = "" if newest.created_at is None else f"{format_seconds(max(0.0, data.plan.now - newest.created_at))} ago"
        yield "Latest committed", newest.name if newest.step is None else f"step {newest.step:,}", age
    bad = sum(problem.severity == "bad" for problem in data.problems)
    yield "Problems", str(len(data.problems)), f"{bad} to act on now" if bad else "none to act on now"
    if data.policy is not None:
        deleted = plural(len(data.plan.deleted), "checkpoint")
        yield "Retention would free", format_size(data.plan.freed), f"{deleted} to delete"


def _rows(data: ReportData) -> Iterator[tuple[str, list[str], str, str, str]]:
    """Name, figures, metrics, action and reasons of each checkpoint, the newest first."""
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
        yield info.name, cells, _metrics_text(info.metrics), decision.action, "; ".join(decision.reasons)


def _metrics_text(metrics: Mapping[str, Any]) -> str:
    text = " ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in metrics.items()
    )
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "…"


def _time(seconds: float | None) -> str:
    """``2026-01-31 23:59``, UTC; empty without a time."""
    if seconds is None:
        return ""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return ""
