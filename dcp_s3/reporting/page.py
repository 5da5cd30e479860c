"""The report as one HTML page that needs no network.

Names and metrics come from a bucket, so from anybody who may write there. Everything is put in as text: jinja2 escapes
it, and the charts' data is JSON without ``<``. The page's Content-Security-Policy lets only its own scripts run, named
by their hashes, and lets nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2
from bokeh.document import Document
from bokeh.resources import Resources
from markupsafe import Markup

from dcp_s3._version import __version__
from dcp_s3.reporting.charts import MARKERS, Chart, draw, format_time, state_of
from dcp_s3.reporting.data import ReportData, is_leased, took
from dcp_s3.reporting.problems import format_span
from dcp_s3.units import format_size, plural

_MOST_PROBLEMS = 50
_MOST_TEXT = 300  # characters of all metrics of a checkpoint


@dataclass(frozen=True)
class _Tile:
    label: str
    value: str
    more: str = ""


def render(data: ReportData) -> str:
    """The page."""
    charts = draw(data)
    scripts = [*Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw, _read("page.js")]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_read("page.html")).render(
        charts=charts,
        css=Markup(_read("page.css")),
        data=data,
        forecast=_forecast_text(data),
        markers=MARKERS,
        model=Markup(_model([chart for found in charts.values() for chart in found])),
        most_problems=_MOST_PROBLEMS,
        now=format_time(data.now),
        policy=_policy_text(data),
        rows=list(_rows(data)),
        scripts=[Markup(script) for script in scripts],
        security=_security(scripts),
        tiles=_tiles(data),
        time=format_time,
        version=__version__,
    )


def _read(name: str) -> str:
    return resources.files("dcp_s3.reporting").joinpath(name).read_text(encoding="utf-8")


def _security(scripts: Sequence[str]) -> str:
    """The Content-Security-Policy. Styles are inline: bokeh makes style elements and attributes."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _model(charts: Sequence[Chart]) -> str:
    """The charts' data as JSON for a script element: no end tag and no comment can be in it."""
    document = Document()
    for chart in charts:
        document.add_root(chart.figure)
    roots = {chart.figure.id: chart.figure.id for chart in charts}
    items: Mapping[str, Any] = {
        "roots": [*roots],
        "docs": {"report": document.to_json(deferred=False)},
        "render": [{"docid": "report", "roots": roots, "root_ids": [*roots]}],
    }
    text = json.dumps(items, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# --- texts -------------------------------------------------------------------------------------------


def _tiles(data: ReportData) -> list[_Tile]:
    infos = [each.checkpoint for each in data.decisions]
    committed = [info for info in infos if info.committed]
    newest = data.newest
    others = len(infos) - len(committed)
    bad = sum(problem.severity == "bad" for problem in data.problems)
    warnings = sum(problem.severity == "warning" for problem in data.problems)
    found = [
        _Tile("Checkpoints", f"{len(committed):,}", f"and {others} not committed" if others else "all committed"),
        _Tile("Stored", format_size(data.stored), _usual_size(data)),
        _latest(data, newest),
        _Tile("Problems", str(bad + warnings), f"{bad} to act on now" if bad else "none to act on now"),
    ]
    freed = data.plan.freed
    if data.policy is not None:
        found.append(
            _Tile(
                "Retention would free", format_size(freed), f"{plural(len(data.plan.deleted), 'checkpoint')} to delete"
            )
        )
    if data.forecast is not None:
        per_day = data.forecast.retained_per_day
        rate = data.forecast.cadence.per_day if per_day is None else per_day
        how = "nothing is deleted" if per_day is None else "with retention"
        found.append(_Tile("Growth per day", format_size(rate), how))
    return found


def _usual_size(data: ReportData) -> str:
    return "" if data.forecast is None else f"{format_size(data.forecast.cadence.size)} each"


def _latest(data: ReportData, newest: Any) -> _Tile:
    if newest is None:
        return _Tile("Latest committed", "none", "nothing to resume from")
    value = newest.name if newest.step is None else f"step {newest.step:,}"
    age = "" if newest.created_at is None else f"{format_span(max(0.0, data.now - newest.created_at))} ago"
    return _Tile("Latest committed", value, age)


def _policy_text(data: ReportData) -> str:
    if data.policy is None:
        return (
            "No policy (none was given, DCP_S3_RETENTION is not set): everything that is committed stays. "
            "--policy 'latest:3 daily:7' shows what one would keep."
        )
    return (
        f"With {data.policy}: {len(data.plan.kept)} stay, {len(data.plan.deleted)} would be deleted "
        f"({format_size(data.plan.freed)}). The newest, pinned ones and those in use always stay."
    )


def _forecast_text(data: ReportData) -> list[str]:
    forecast = data.forecast
    if forecast is None:
        return ["No forecast: that takes two committed checkpoints at different times."]
    cadence = forecast.cadence
    full = _full(forecast.budget, forecast.full_without)
    lines = [f"Without retention: {format_size(cadence.per_day)} more per day{full}."]
    per_day = forecast.retained_per_day
    if per_day is not None and forecast.retained is not None:
        lines.append(
            f"With {data.policy}: {format_size(forecast.retained[-1])} on {format_time(forecast.times[-1])}, "
            f"{format_size(per_day)} more per day{_full(forecast.budget, forecast.full_retained)}."
        )
    lines.append(
        f"It assumes that the run saves {format_size(cadence.size)} every {format_span(cadence.interval)} (medians of "
        f"its newest checkpoints; {cadence.intervals} intervals), with the newest one's metrics; that a prune runs at "
        "each point of the curve; and that nobody deletes anything else. The past is what is stored today: checkpoints "
        "that were deleted since are not in it. Parts of open uploads and older versions of objects are not counted."
    )
    return lines


def _full(budget: int | None, full: float | None) -> str:
    if budget is None:
        return ""
    if full is None:
        return f"; the budget of {format_size(budget)} lasts, as far as can be told"
    when = format_time(full)
    return f"; the budget of {format_size(budget)} is used up " + (f"on {when}" if when else "after the year 9999")


def _rows(data: ReportData) -> Iterable[dict[str, Any]]:
    for decision in reversed(data.decisions):
        info = decision.checkpoint
        seconds = took(info)
        yield {
            "name": info.name,
            "state": state_of(data, decision),
            "leased": ", being read" if is_leased(info, data.now) else "",
            "step": "" if info.step is None else f"{info.step:,}",
            "size": "" if info.size is None else format_size(info.size),
            "when": format_time(info.created_at).removesuffix(" UTC"),
            "took": "" if seconds is None else format_span(seconds),
            "ranks": "" if info.world_size is None else info.world_size,
            "metrics": _metrics_text(info.metrics),
            "action": decision.action,
            "reasons": "; ".join(decision.reasons),
        }


def _metrics_text(metrics: Mapping[str, Any]) -> str:
    text = " ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in metrics.items()
    )
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "…"
