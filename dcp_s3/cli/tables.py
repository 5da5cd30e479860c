"""rich tables for the output of the commands."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dcp_s3.checkpoint.directory import LEASE_MARGIN
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.cli.group import printable
from dcp_s3.format.saved_entries import SavedEntry
from dcp_s3.retention.plan import Plan
from dcp_s3.retention.show import CheckpointDetails, ObjectDetails
from dcp_s3.s3.client import ChainValue
from dcp_s3.settings import ENV_PREFIX, Settings
from dcp_s3.units import format_size, plural

_PIPED_WIDTH = 100_000
_OTHER_COLUMNS = 75
"""Characters of all columns of checkpoints but their names and metrics, with what divides them."""


def make_console(*, stderr: bool = False) -> Console:
    """A console for people on a terminal; into a pipe or file it writes plain text, whole lines, and no colours."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    return console if console.is_terminal else _PlainConsole(stderr=stderr)


class _PlainConsole(Console):
    """Writes tables as lines of columns that tabs divide, for awk, cut and sort."""

    def __init__(self, *, stderr: bool) -> None:
        super().__init__(
            stderr=stderr, highlight=False, markup=False, emoji=False, width=_PIPED_WIDTH, force_terminal=False,
            color_system=None,
        )  # fmt: skip

    def print(self, *objects: Any, **options: Any) -> None:
        if len(objects) == 1 and isinstance(objects[0], Table):
            self.file.write("".join(f"{line}\n" for line in plain_lines(objects[0])))
        else:
            super().print(*objects, **options)


def plain_lines(table: Table) -> list[str]:
    """A table as text: a line with the titles, then one for each row. Tabs divide; an empty cell is ``-``."""
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    if table.show_header:
        rows.insert(0, tuple(column.header for column in table.columns))
    return ["\t".join(printable(str(cell)) or "-" for cell in row) for row in rows]


def format_age(seconds: float) -> str:
    """``90000`` -> ``1d 1h``: the two largest units, whole minutes below an hour, seconds below a minute."""
    seconds = max(0, int(seconds))
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m" if minutes else f"{seconds}s"


def checkpoints(infos: Sequence[CheckpointInfo], *, now: float, width: int | None = None) -> Table:
    """One line per checkpoint; incomplete ones dimmed. In a narrow terminal without what `show` tells, too."""
    titles = ("name", "state", ">step", ">ranks", ">objects", ">size", ">age", "metrics")
    words = [word for info in infos for word in format_metrics(info.metrics).split()]
    wide = sum(max(map(len, column), default=0) for column in (words, [info.name for info in infos])) + _OTHER_COLUMNS
    left_out = (">ranks", ">objects", ">age") if width is not None and wide > width else ()
    table = make_table([title for title in titles if title not in left_out])
    table.columns[0].no_wrap = bool(left_out)
    table.columns[-1].min_width = max(map(len, words), default=0) if left_out else None
    for info in infos:
        age = "" if info.created_at is None else format_age(now - info.created_at)
        state = format_state(info, now=now)
        cells: tuple[Any, ...] = (info.name, state, info.step, info.world_size, info.objects, _size(info.size), age,
                 format_metrics(info.metrics))  # fmt: skip
        shown = tuple(cell for title, cell in zip(titles, cells, strict=True) if title not in left_out)
        add_row(table, shown, style="" if info.committed else "dim")
    return table


def format_state(info: CheckpointInfo, *, now: float) -> str:
    """``committed (foreign, pinned)``."""
    leased = info.leased_until is not None and now < info.leased_until + LEASE_MARGIN
    marks = {"foreign": info.foreign, "pinned": info.pinned, "leased": leased, "damaged": info.damage is not None}
    shown = ", ".join(mark for mark, is_so in marks.items() if is_so)
    return f"{info.state} ({shown})" if shown else info.state


def facts(details: CheckpointDetails) -> Table:
    """The properties of one checkpoint as a whole."""
    info = details.info
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    created = ""
    if info.created_at is not None:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(info.created_at))
        created = f"{when} ({format_age(time.time() - info.created_at)} ago)"
    writer = "something other than dcp_s3" if info.foreign else ""
    rows: Mapping[str, Any] = {
        "url": info.url,
        "state": format_state(info, now=time.time()),
        "step": info.step,
        "ranks": info.world_size,
        "size": None if info.size is None else f"{format_size(info.size)} in {plural(info.objects or 0, 'object')}",
        "items": details.items or None,
        "created": created,
        "metrics": format_metrics(info.metrics),
        "extra": json.dumps(info.extra, ensure_ascii=False) if info.extra else None,
        "pinned": info.pin_reason,
        "written by": ", ".join(f"{name} {version}" for name, version in details.writer.items()) or writer,
    }
    for name, value in rows.items():
        if value not in (None, ""):
            add_row(table, (name, value))
    return table


def plan(found: Plan) -> Table:
    """One line per checkpoint, and one for each kind of leftover. Red: to be deleted."""
    table = make_table(("checkpoint", "action", ">step", ">size", ">age", "reasons"))
    for decision in found.decisions:
        info = decision.checkpoint
        created = info.modified_at if info.created_at is None else info.created_at
        age = "" if created is None else format_age(found.now - created)
        _plan_row(table, info.name, decision.action, decision.reasons, info.step, _size(info.size), age)
    objects = Counter((each.leftover.checkpoint, each.action, each.reasons) for each in found.leftovers)
    sizes: Counter[tuple[Any, ...]] = Counter()
    for left in found.leftovers:
        sizes[left.leftover.checkpoint, left.action, left.reasons] += left.leftover.size
    for (name, action, reasons), count in objects.items():
        size = _size(sizes[name, action, reasons])
        _plan_row(table, f"{name}: {plural(count, 'leftover object')}", action, reasons, size=size)
    uploads = Counter((each.upload.checkpoint, each.action, each.reasons) for each in found.uploads)
    for (name, action, reasons), count in uploads.items():
        _plan_row(table, f"{name}: {plural(count, 'open upload')}", action, reasons)
    if found.boards:
        what, size = plural(len(found.boards), "old board object"), _size(sum(each.size for each in found.boards))
        _plan_row(table, what, "delete", ("ranks looked at them long ago",), size=size)
    for unfinished in found.unfinished:
        _plan_row(table, unfinished.checkpoint, "delete", ("its deletion was begun and not finished",))
    return table


def _plan_row(
    table: Table,
    name: str,
    action: str,
    reasons: Sequence[str],
    step: int | None = None,
    size: str | None = None,
    age: str | None = None,
) -> None:
    add_row(table, (name, action, step, size, age, "; ".join(reasons)), style="red" if action == "delete" else "")


def plan_summary(found: Plan) -> str:
    """``to keep: 3 checkpoints; to delete: 2 checkpoints, 1 leftover object (1.2 GiB)``."""
    parts = [
        (len(found.deleted), "checkpoint"),
        (sum(each.action == "delete" for each in found.leftovers), "leftover object"),
        (sum(each.action == "delete" for each in found.uploads), "open upload"),
        (len(found.unfinished), "unfinished deletion"),
        (len(found.boards), "old board object"),
    ]
    what = ", ".join(plural(count, noun) for count, noun in parts if count)
    return f"to keep: {plural(len(found.kept), 'checkpoint')}; to delete: " + (
        f"{what} ({format_size(found.freed)})" if what else "nothing"
    )


def objects(stored: Iterable[ObjectDetails]) -> Table:
    """One line per data object."""
    table = make_table(("object", ">size", "crc64nvme", "note"))
    for entry in stored:
        note = "missing" if entry.size is None else entry.attachment or "" if entry.used else "not used"
        style = "red" if entry.size is None else "" if entry.used else "dim"
        add_row(table, (entry.path, _size(entry.size), entry.crc64nvme, note), style=style)
    return table


def entries(saved: Iterable[SavedEntry]) -> Table:
    """One line per saved entry."""
    table = make_table(("entry", "kind", "dtype", "shape", ">chunks", ">size"))
    for entry in saved:
        shape = None if entry.shape is None else "x".join(map(str, entry.shape)) or "scalar"
        add_row(table, (entry.fqn, entry.kind, entry.dtype, shape, entry.chunks, _size(entry.size)))
    return table


def settings_rows(settings: Settings, chain: Mapping[str, ChainValue]) -> list[dict[str, Any]]:
    """Name, value and source of every setting: itself, AWS's own ``chain``, or the default. No secret is among them."""
    rows = []
    for name in type(settings).model_fields:
        value, source = getattr(settings, name), "default"
        if name in settings.model_fields_set:
            source = f"{ENV_PREFIX}{name.upper()}"
        elif name in chain:
            value, source = chain[name].value, chain[name].source
        rows.append({"name": name, "value": value, "source": source})
    return rows


def settings_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """One line per setting."""
    table = make_table(("setting", "value", "from"))
    for row in rows:
        value = "unset" if row["value"] is None else row["value"]
        add_row(table, (row["name"], value, row["source"]), style="dim" if row["source"] == "default" else "")
    return table


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """``loss=1.25 tokens=1000``."""
    return " ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in metrics.items()
    )


def _size(size: int | None) -> str | None:
    return None if size is None else format_size(size)


def make_table(columns: Sequence[str]) -> Table:
    """An empty table; a column whose title begins with ``>`` is flush right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=right)
    return table


def add_row(table: Table, cells: Iterable[Any], *, style: str = "") -> None:
    """Add a row; None is an empty cell."""
    # Text: keys and names may contain what rich would read as markup. And what a terminal would obey.
    table.add_row(*(Text("" if cell is None else printable(str(cell))) for cell in cells), style=style)
