"""rich tables for the output of the commands."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dcp_s3.checkpoint.directory import LEASE_MARGIN
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.cli.app import printable
from dcp_s3.format.saved_entries import SavedEntry
from dcp_s3.offline.names import group_alike
from dcp_s3.retention.catalog import CheckpointDetails, ObjectDetails
from dcp_s3.retention.plan import Plan
from dcp_s3.units import format_count, format_size, plural


def make_console(*, stderr: bool = False) -> Console:
    """A console for people; into a pipe or file it writes no colours."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def show(table: Table) -> None:
    """Print a table; into a pipe or file as lines of columns that tabs divide, for awk, cut and sort. An empty cell is
    ``-`` there."""
    console = make_console()
    if console.is_terminal:
        console.print(table)
        return
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    if table.show_header:
        rows.insert(0, tuple(column.header for column in table.columns))
    for row in rows:
        console.file.write("\t".join(printable(str(cell)) or "-" for cell in row) + "\n")


def format_age(seconds: float) -> str:
    """``90000`` -> ``1d 1h``: the two largest units, whole minutes below an hour, seconds below a minute."""
    whole = max(0, int(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days or hours:
        return f"{days}d {hours}h" if days else f"{hours}h {minutes}m"
    return f"{minutes}m" if minutes else f"{whole}s"


def checkpoints(infos: Sequence[CheckpointInfo]) -> Table:
    """One line per checkpoint; incomplete ones dimmed."""
    table = make_table(("name", "state", ">step", ">ranks", ">objects", ">size", ">age", "metrics"))
    for info in infos:
        age = "" if info.created_at is None else format_age(time.time() - info.created_at)
        numbers = info.step, info.world_size, info.objects, _size(info.size)
        cells = (info.name, format_state(info), *numbers, age, format_metrics(info.metrics))
        add_row(table, cells, style="" if info.committed else "dim")
    return table


def format_state(info: CheckpointInfo) -> str:
    """``committed (foreign, pinned)``."""
    leased = info.leased_until is not None and time.time() < info.leased_until + LEASE_MARGIN
    marks = {"foreign": info.foreign, "pinned": info.pinned, "leased": leased, "damaged": info.damage is not None}
    shown = ", ".join(mark for mark, is_so in marks.items() if is_so)
    return f"{info.state} ({shown})" if shown else info.state


def facts(details: CheckpointDetails) -> Table:
    """The properties of one checkpoint as a whole."""
    info = details.info
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    created, holds = "", []
    if info.created_at is not None:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(info.created_at))
        created = f"{when} ({format_age(time.time() - info.created_at)} ago)"
    tensors = sum(entry.shape is not None for entry in details.entries)
    if tensors:
        parameters = format_count(sum(entry.parameters for entry in details.entries))
        holds.append(f"{plural(tensors, 'tensor')} with {parameters} parameters")
    if others := len(details.entries) - tensors:
        holds.append(plural(others, "other entry"))
    writer = ", ".join(f"{name} {version}" for name, version in details.writer.items())
    rows: Mapping[str, Any] = {
        "url": info.url,
        "state": format_state(info),
        "step": info.step,
        "ranks": info.world_size,
        "size": None if info.size is None else f"{format_size(info.size)} in {plural(info.objects or 0, 'object')}",
        "items": details.items or None,
        "holds": "; ".join(holds),
        "attachments": ", ".join(each.attachment for each in details.objects if each.attachment),
        "created": created,
        "metrics": format_metrics(info.metrics),
        "extra": json.dumps(info.extra, ensure_ascii=False) if info.extra else None,
        "pinned": info.pin_reason,
        "written by": writer or ("something other than dcp_s3" if info.foreign else ""),
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
        cells = (info.name, decision.action, info.step, _size(info.size), age, "; ".join(decision.reasons))
        add_row(table, cells, style="red" if decision.action == "delete" else "")
    sizes: dict[tuple[str, str], list[int]] = {}
    for each in found.leftovers:
        sizes.setdefault((each.checkpoint, "leftover object"), []).append(each.size)
    for upload in found.uploads:
        sizes.setdefault((upload.checkpoint, "open upload"), []).append(0)
    why = "left over: of no checkpoint, and nothing there is younger than the grace period"
    for (name, what), parts in sizes.items():
        label, size = f"{name}: {plural(len(parts), what)}", _size(sum(parts) or None)
        add_row(table, (label, "delete", None, size, None, why), style="red")
    for left in found.unfinished:
        why = "its deletion was begun and not finished"
        add_row(table, (left.checkpoint, "delete", None, None, None, why), style="red")
    return table


def plan_summary(found: Plan) -> str:
    """``to keep: 3 checkpoints; to delete: 2 checkpoints, 1 leftover object (1.2 GiB)``."""
    parts = [
        (len(found.deleted), "checkpoint"),
        (len(found.leftovers), "leftover object"),
        (len(found.uploads), "open upload"),
        (len(found.unfinished), "unfinished deletion"),
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


def entries(saved: Sequence[SavedEntry], *, alone: bool) -> Table:
    """One line per saved entry; unless ``alone``, one for those of which only numbers in the names differ."""
    table = make_table(("name", ">entries", ">parameters", ">size", "dtype", "shape", ">chunks"))
    by_name = {entry.fqn: entry for entry in saved}
    common = ((name, name if alone else (each.dtype, each.shape)) for name, each in by_name.items())
    for label, names in group_alike(common):
        found = [by_name[name] for name in names]
        shape = None if found[0].shape is None else "x".join(map(str, found[0].shape)) or "scalar"
        parameters = None if shape is None else format_count(sum(each.parameters for each in found))
        count, size = len(found) if len(found) > 1 else None, format_size(sum(each.size for each in found))
        chunks = sum(each.chunks for each in found)
        add_row(table, (label, count, parameters, size, found[0].dtype, shape, chunks))
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
