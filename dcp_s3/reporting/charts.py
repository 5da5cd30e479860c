"""The charts of a report, drawn with bokeh.

A colour is a role: its hexadecimal value here is only a placeholder, and the tag ``property=--variable`` tells the page
(`page.js`) which CSS variable gives it, in light and in dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from bokeh.models import (
    BoxZoomTool,
    CDSView,
    ColumnDataSource,
    DatetimeTickFormatter,
    HoverTool,
    IndexFilter,
    Label,
    NumeralTickFormatter,
    PrintfTickFormatter,
    Range1d,
    ResetTool,
    Span,
    WheelZoomTool,
)
from bokeh.plotting import figure

from dcp_s3.reporting.data import STATES, ReportData, growth, plotted, shown_state, took
from dcp_s3.reporting.problems import format_span
from dcp_s3.retention.plan import Decision
from dcp_s3.units import format_size

MOST_METRICS = 12
MOST_LANES = 12

MARKERS: Mapping[str, tuple[str, str]] = {
    "committed": ("circle", "--blue"),
    "pinned": ("diamond", "--purple"),
    "foreign": ("square", "--sky"),
    "damaged": ("x", "--red"),
    "in progress": ("triangle", "--green"),
    "waits on disk": ("inverted_triangle", "--orange"),
    "incomplete": ("cross", "--orange"),
    "being deleted": ("asterisk", "--grey"),
}
"""Marker and colour of each state: the shape tells them apart, too."""

_PLACEHOLDER = "#777777"
_SIZES = (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40), ("PiB", 2**50))
_DURATIONS = (("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0))


@dataclass(frozen=True)
class Chart:
    """One chart and what is said about it."""

    title: str
    figure: Any
    legend: tuple[tuple[str, str, str], ...] = ()
    """(marker, CSS variable, text) of what is drawn."""
    note: str = ""


def draw(data: ReportData) -> dict[str, list[Chart]]:
    """The charts by section: ``timeline``, ``retention``, ``metrics``, ``storage``."""
    source = _source(data)
    return {
        "timeline": _timeline(data, source),
        "retention": _lanes(data),
        "metrics": [_metric(data, source, number, name) for number, name in enumerate(data.metrics[:MOST_METRICS])],
        "storage": _storage(data),
    }


def _source(data: ReportData) -> ColumnDataSource:
    """One row for each checkpoint, shared by all charts."""
    infos = [each.checkpoint for each in data.decisions]
    _, size_unit = _unit(_SIZES, (info.size or 0 for info in infos))
    _, time_unit = _duration_unit(data)
    columns: dict[str, list[Any]] = {
        "name": [info.name for info in infos],
        "time": _numbers(None if info.created_at is None else info.created_at * 1000 for info in infos),
        "when": [format_time(info.created_at) for info in infos],
        "step": _numbers(info.step for info in infos),
        "size": _numbers((info.size or 0) / size_unit for info in infos),
        "bytes": ["" if info.size is None else format_size(info.size) for info in infos],
        "seconds": _numbers(None if (found := took(info)) is None else found / time_unit for info in infos),
        "took": ["not recorded" if (found := took(info)) is None else format_span(found) for info in infos],
        "state": [state_of(data, each) for each in data.decisions],
        "retention": [f"{each.action}: {'; '.join(each.reasons)}" for each in data.decisions],
    }
    for number, name in enumerate(data.metrics[:MOST_METRICS]):
        columns[f"metric{number}"] = _numbers(plotted(info, name) for info in infos)
    return ColumnDataSource(columns)


def _numbers(values: Iterable[float | None]) -> Any:
    """A column of numbers, NaN for None: bokeh encodes arrays in a compact way."""
    return np.array([math.nan if value is None else float(value) for value in values], dtype=np.float64)


def state_of(data: ReportData, decision: Decision) -> str:
    """`shown_state` of a decision's checkpoint."""
    return shown_state(decision.checkpoint, now=data.now, grace=data.plan.grace)


_FACTS = [("", "@name"), ("committed", "@when"), ("size", "@bytes"), ("saved in", "@took"), ("state", "@state"),
          ("retention", "@retention")]  # fmt: skip


def _timeline(data: ReportData, source: ColumnDataSource) -> list[Chart]:
    infos = [each.checkpoint for each in data.decisions]
    if not np.isfinite(source.data["time"]).any():
        return []
    states = list(source.data["state"])
    size_name, _ = _unit(_SIZES, (info.size or 0 for info in infos))
    sizes = _figure(f"size, {size_name}", time=True, height=240)
    sizes.y_range.start = 0
    stems = sizes.segment(x0="time", y0=0, x1="time", y1="size", source=source, line_width=1, line_alpha=0.45)
    _paint(stems.glyph, line_color="--line")
    dots = _scatter(sizes, source, "time", "size", states)
    sizes.add_tools(_hover(dots, _FACTS))
    shown = [state for state in STATES if state in states]
    legend = tuple((*MARKERS[state], f"{state} ({states.count(state)})") for state in shown)
    charts = [Chart("Size of each checkpoint", sizes, legend)]
    times = [took(info) for info in infos]
    if any(seconds is not None for seconds in times):
        time_name, _ = _duration_unit(data)
        durations = _figure(f"saved in, {time_name}", time=True, height=200, x_range=sizes.x_range)
        durations.y_range.start = 0
        dots = _scatter(durations, source, "time", "seconds", states)
        durations.add_tools(_hover(dots, _FACTS))
        charts.append(Chart("Duration of each save, from its beginning to the commit", durations))
    return charts


def _lanes(data: ReportData) -> list[Chart]:
    """One lane for each reason to keep or delete, over the step."""
    rows = [
        (decision, reason, lane_of(decision, reason))
        for decision in data.decisions
        if decision.checkpoint.step is not None
        for reason in decision.reasons
    ]
    if not rows:
        return []
    counts: dict[str, int] = {}
    for decision, _, lane in rows:
        if decision.action == "keep":
            counts[lane] = counts.get(lane, 0) + 1
    kept = sorted(counts, key=lambda lane: (-counts[lane], lane))
    lanes = [*kept[: MOST_LANES - 2], *(["other reasons"] if len(kept) > MOST_LANES - 2 else [])]
    deleted = any(decision.action == "delete" for decision, *_ in rows)
    lanes += ["to be deleted"] if deleted else []
    plot = _figure("", height=60 + 40 * len(lanes))
    plot.min_border_left = 8
    plot.yaxis.visible = False
    plot.ygrid.visible = False
    plot.y_range = Range1d(-0.5, len(lanes) - 0.2)
    plot.xaxis.axis_label = "step"
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    levels = {lane: float(len(lanes) - 1 - number) for number, lane in enumerate(lanes)}
    dots = []
    for action, marker, colour in (("keep", "circle", "--blue"), ("delete", "x", "--orange")):
        chosen = [row for row in rows if row[0].action == action]
        source = ColumnDataSource(
            {
                "step": [float(decision.checkpoint.step or 0) for decision, *_ in chosen],
                "level": [levels.get(lane, levels.get("other reasons", 0.0)) for *_, lane in chosen],
                "name": [decision.checkpoint.name for decision, *_ in chosen],
                "reason": [f"{action}: {reason}" for _, reason, _ in chosen],
            }
        )
        drawn = plot.scatter("step", "level", source=source, marker=marker, size=8, line_width=1.5, fill_alpha=0.8)
        _paint(drawn.glyph, line_color=colour, fill_color=colour)
        dots.append(drawn)
    for lane, level in levels.items():
        line = Span(location=level, dimension="width", line_width=1, level="underlay")
        _paint(line, line_color="--grid")
        text = lane if len(lane) <= 46 else lane[:45] + "…"
        label = Label(x=2, x_units="screen", y=level, y_offset=6, text=text, text_font_size="11px",
                      text_font="system-ui, sans-serif", level="overlay")  # fmt: skip
        _paint(label, text_color="--muted")
        plot.add_layout(line)
        plot.add_layout(label)
    plot.add_tools(_hover(dots, [("", "@name"), ("", "@reason")]))
    legend = (("circle", "--blue", f"kept ({len(data.plan.kept)})"),
              ("x", "--orange", f"to be deleted ({len(data.plan.deleted)})"))  # fmt: skip
    return [Chart("Reasons to keep each checkpoint", plot, legend)]


def lane_of(decision: Decision, reason: str) -> str:
    """The lane of a reason: what it has in common with those of other checkpoints."""
    if decision.action == "delete":
        return "to be deleted"
    for beginning in ("pinned", "a reader has a lease", "a save is in progress"):
        if reason.startswith(beginning):
            return beginning
    return reason.partition(",")[0]


def _metric(data: ReportData, source: ColumnDataSource, number: int, name: str) -> Chart:
    column = f"metric{number}"
    plot = _figure("", height=220)
    plot.yaxis.formatter = PrintfTickFormatter(format="%.4g")
    plot.xaxis.axis_label = "step"
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    values = [float(value) for value in source.data[column]]
    curve = [index for index, value in enumerate(values) if math.isfinite(value)]
    line = plot.line("step", column, source=source, view=_only(curve), line_width=1.5)
    _paint(line.glyph, line_color="--line")
    dots = []
    for action, colour, filled in (("delete", "--orange", False), ("keep", "--blue", True)):
        chosen = [index for index in curve if data.decisions[index].action == action]
        drawn = plot.scatter("step", column, source=source, view=_only(chosen), size=7, line_width=1.5)
        _paint(drawn.glyph, line_color=colour, fill_color=colour if filled else "--card")
        dots.append(drawn)
    legend = [("circle", "--blue", "kept"), ("ring", "--orange", "to be deleted")]
    missing = [
        index
        for index, decision in enumerate(data.decisions)
        if isinstance(decision.checkpoint.metrics.get(name), (int, float)) and not math.isfinite(values[index])
    ]
    if missing:
        bottom, top = _limits([values[index] for index in curve])
        plot.y_range = Range1d(bottom, top)
        marks = ColumnDataSource(
            {
                "step": [source.data["step"][index] for index in missing],
                "level": [bottom + 0.05 * (top - bottom)] * len(missing),
                "name": [source.data["name"][index] for index in missing],
                "value": [str(data.decisions[index].checkpoint.metrics[name])[:40] for index in missing],
                "retention": [source.data["retention"][index] for index in missing],
            }
        )
        crosses = plot.scatter("step", "level", source=marks, marker="x", size=9, line_width=2)
        _paint(crosses.glyph, line_color="--red", fill_color="--red")
        plot.add_tools(_hover([crosses], [("", "@name"), ("value", "@value"), ("retention", "@retention")]))
        legend.append(("x", "--red", f"not finite ({len(missing)})"))
    facts = [("", "@name"), ("value", f"@{column}{{0.[000000]}}"), ("committed", "@when"), ("retention", "@retention")]
    plot.add_tools(_hover(dots, facts))
    return Chart(name, plot, tuple(legend))


def _limits(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.1 * (high - low) or 0.5
    return low - 2 * room, high + room


def _storage(data: ReportData) -> list[Chart]:
    times, sizes = growth(data)
    if len(times) < 2:
        return []
    forecast = data.forecast
    heights = [*sizes, *(() if forecast is None else (*forecast.without, *(forecast.retained or ())))]
    name, unit = _unit(_SIZES, heights)
    plot = _figure(name, time=True, height=280)
    legend = [("area", "--blue", "stored now, by time of commit")]
    stairs_x = [at * 1000 for pair in pairwise(times) for at in pair]
    stairs_y = [size / unit for size in sizes[:-1] for _ in (0, 1)]
    source = ColumnDataSource({"time": stairs_x, "size": stairs_y,
                               "bytes": [format_size(size * unit) for size in stairs_y],
                               "what": ["stored by then"] * len(stairs_x)})  # fmt: skip
    area = plot.varea(x="time", y1=0, y2="size", source=source, fill_alpha=0.18)
    _paint(area.glyph, fill_color="--blue")
    line = plot.line("time", "size", source=source, line_width=2)
    _paint(line.glyph, line_color="--blue")
    lines = [line]
    if forecast is not None:
        ways = [("without", "without retention", forecast.without, "--orange", "dashed")]
        if forecast.retained is not None:
            ways.append(("retained", f"with {data.policy}", forecast.retained, "--green", "dotdash"))
        for _, text, found, colour, dash in ways:
            future = ColumnDataSource({"time": [at * 1000 for at in forecast.times],
                                       "size": [count / unit for count in found],
                                       "bytes": [format_size(count) for count in found],
                                       "what": [f"forecast {text}"] * len(found)})  # fmt: skip
            drawn = plot.line("time", "size", source=future, line_width=2, line_dash=dash)
            _paint(drawn.glyph, line_color=colour)
            lines.append(drawn)
            legend.append((dash, colour, f"forecast {text}"))
        if forecast.budget is not None:
            heights.append(float(forecast.budget) if forecast.budget < 3 * max(heights) else 0.0)
            budget = Span(location=forecast.budget / unit, dimension="width", line_width=1.5, line_dash="dotted")
            _paint(budget, line_color="--red")
            plot.add_layout(budget)
            legend.append(("dotted", "--red", f"budget, {format_size(forecast.budget)}"))
    now = Span(location=data.now * 1000, dimension="height", line_width=1, line_dash="dotted")
    _paint(now, line_color="--muted")
    plot.add_layout(now)
    plot.y_range = Range1d(0, 1.08 * max(heights) / unit or 1.0)
    plot.add_tools(_hover(lines, [("", "@what"), ("time", "@time{%F %H:%M}"), ("stored", "@bytes")],
                          formatters={"@time": "datetime"}))  # fmt: skip
    return [Chart("Growth of storage", plot, tuple(legend))]


# --- parts of a chart --------------------------------------------------------------------------------


def _figure(label: str, *, height: int, time: bool = False, x_range: Any = None) -> Any:
    """An empty plot in the colours of the page. ``time``: the x axis is UTC."""
    more = {} if x_range is None else {"x_range": x_range}
    plot = figure(height=height, sizing_mode="stretch_width", x_axis_type="datetime" if time else "linear",
                  tools=[], toolbar_location="above", min_border_left=58, min_border_right=14, **more)  # fmt: skip
    zoom = BoxZoomTool(dimensions="width")
    plot.add_tools(zoom, WheelZoomTool(dimensions="width"), ResetTool())
    plot.toolbar.active_drag = zoom
    plot.toolbar.active_scroll = None
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.background_fill_color = plot.border_fill_color = plot.outline_line_color = None  # the card's
    for axis in plot.axis:
        axis.axis_label_text_font = axis.major_label_text_font = "system-ui, sans-serif"
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "12px"
        axis.minor_tick_line_color = None
        _paint(axis, axis_label_text_color="--muted", major_label_text_color="--muted", axis_line_color="--grid",
               major_tick_line_color="--grid")  # fmt: skip
    for grid in plot.grid:
        _paint(grid, grid_line_color="--grid")
    plot.xgrid.grid_line_alpha = 0.5
    plot.yaxis.axis_label = label
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0.[000]")
    plot.yaxis.ticker.desired_num_ticks = 5
    plot.xaxis.ticker.desired_num_ticks = 5
    if time:
        plot.xaxis.axis_label = "UTC"
        plot.xaxis.formatter = DatetimeTickFormatter(
            seconds="%H:%M:%S", minsec="%H:%M:%S", minutes="%H:%M", hourmin="%H:%M", hours="%H:%M\n%b %d",
            days="%b %d", months="%b %Y", years="%Y",
        )  # fmt: skip
    return plot


def _scatter(plot: Any, source: ColumnDataSource, x: str, y: str, states: Sequence[str]) -> list[Any]:
    """One renderer for each state that occurs."""
    drawn = []
    for state, (marker, colour) in MARKERS.items():
        chosen = [index for index, each in enumerate(states) if each == state]
        if chosen:
            dots = plot.scatter(
                x, y, source=source, view=_only(chosen), marker=marker, size=9, line_width=1.5, fill_alpha=0.75
            )
            _paint(dots.glyph, line_color=colour, fill_color=colour)
            drawn.append(dots)
    return drawn


def _only(rows: Sequence[int]) -> CDSView:
    """A view of these rows of a source."""
    return CDSView(filter=IndexFilter(rows))


def _hover(renderers: Iterable[Any], facts: list[tuple[str, str]], formatters: Mapping[str, str] | None = None) -> Any:
    # Values are put in as text, never as HTML: bokeh does so for all but `{safe}` and templates of HTML.
    return HoverTool(renderers=list(renderers), tooltips=facts, formatters=dict(formatters or {}), limit=3)


def _paint(model: Any, **colours: str) -> None:
    """Give a model the colours of the page."""
    for name in colours:
        setattr(model, name, _PLACEHOLDER)
    model.tags = [*model.tags, *(f"{name}={variable}" for name, variable in colours.items())]


def _unit(units: Sequence[tuple[str, float]], values: Iterable[float]) -> tuple[str, float]:
    """The largest unit in which the largest value is one or more."""
    most = max((value for value in values if math.isfinite(value)), default=0.0)
    return next((unit for unit in reversed(units) if most >= unit[1]), units[0])


def _duration_unit(data: ReportData) -> tuple[str, float]:
    """The unit that suits most saves: a single slow one does not change it."""
    times = [seconds for each in data.decisions if (seconds := took(each.checkpoint)) is not None]
    return _unit(_DURATIONS, [median(times)] if times else [])


def format_time(seconds: float | None) -> str:
    """``2026-01-31 23:59 UTC``; empty without a time."""
    if seconds is None:
        return ""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return ""
