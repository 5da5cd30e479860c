"""``dcp-s3 top``: what is going on under a root, live."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp_s3.cli import exits
from dcp_s3.cli.app import ROOT, AsJSON, app, note, print_json, stop_on_signals, wrong_usage

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from dcp_s3.reporting.watch import Look

_TIMEOUT = 2.0  # seconds for an endpoint of metrics
_MOST_BYTES = 2**20  # of an endpoint's answer


@app.command()
def top(
    root: ROOT,
    interval: Annotated[str, typer.Option(metavar="2s", help="Time between two looks; at least 0.5s.")] = "2s",
    once: Annotated[bool, typer.Option("--once", help="Look once, as without a terminal.")] = False,
    metrics: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Also show the dcp_s3_* numbers of this Prometheus endpoint; repeatable."),
    ] = None,
    look_into: Annotated[
        int, typer.Option(min=2, max=1000, metavar="N", help="Directories that each look goes into at most.")
    ] = 16,
    as_json: AsJSON = False,
) -> None:
    """Show live what goes on under ROOT: saves, deletions, readers, drains of this host, throttling. Ctrl-C ends it.

    A look takes about 2 requests for each directory that it goes into, and at most 5 and 8 more: 88 by default (plus
    one for each further 1,000 names, uploads or objects of a save). It goes into the newest directories, those where
    something goes on, and some of the others in turn. Without a terminal, and with --json, it looks once.
    """
    import asyncio

    from dcp_s3.cli import tables
    from dcp_s3.settings import resolve_settings
    from dcp_s3.units import parse_duration
    from dcp_s3.url import parse_url

    parse_url(root)
    settings = resolve_settings(None)
    with wrong_usage(ValueError, hint="--interval"):
        seconds = parse_duration(interval)
        if seconds < 0.5:
            raise ValueError("expected half a second or more")
    with wrong_usage(ValueError, hint="--metrics"):
        endpoints = [_endpoint(each) for each in metrics or ()]
    console = tables.make_console()
    if as_json or once or not console.is_terminal:
        look = asyncio.run(_watch(root, settings, look_into, None, endpoints, None))
        _print_once(console, look, settings, endpoints, as_json=as_json)
        if not look.directories and not look.saves:
            note(f"there is nothing under {root}")
            raise typer.Exit(exits.NOTHING_THERE)
        return
    asyncio.run(_watch(root, settings, look_into, seconds, endpoints, console))


def _endpoint(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not the URL of an endpoint; for example http://127.0.0.1:9464/metrics")
    return url


async def _watch(
    root: str, settings: Any, look_into: int, interval: float | None, endpoints: list[str], console: Console | None
) -> Look:
    """Look once, or with an ``interval`` again and again until Ctrl-C or SIGTERM. Returns the last look."""
    import asyncio

    from rich.live import Live

    from dcp_s3.errors import StorageError
    from dcp_s3.reporting.watch import Watcher
    from dcp_s3.s3.async_store import open_async_store
    from dcp_s3.url import parse_url

    url = parse_url(root)
    async with open_async_store(url.bucket, settings) as store:
        watcher = Watcher(store, url, look_into)
        look = await watcher.look()
        if interval is None or console is None:
            return look
        with stop_on_signals() as stop, Live(console=console, auto_refresh=False, transient=False) as live:
            stopped = asyncio.ensure_future(asyncio.to_thread(stop.wait))
            failed = ""
            while True:
                beside = await asyncio.to_thread(_beside, settings, endpoints)
                live.update(_view(look, *beside, interval=interval, failed=failed), refresh=True)
                await asyncio.wait({stopped}, timeout=interval)
                looking = asyncio.ensure_future(watcher.look())
                await asyncio.wait({stopped, looking}, return_when=asyncio.FIRST_COMPLETED)
                if stopped.done():
                    looking.cancel()
                    await asyncio.gather(looking, return_exceptions=True)
                    return look
                try:
                    look, failed = looking.result(), ""
                except StorageError as error:
                    failed = str(error)


def _beside(settings: Any, endpoints: list[str]) -> tuple[dict[str, Any] | None, dict[str, list[str]]]:
    """What is not on S3: the state of this host's spill directory, and lines by endpoint."""
    from dcp_s3.cli.drain import find_saves
    from dcp_s3.spill.session import open_store

    spill = open_store(settings)
    waiting = None if spill is None or not spill.path.is_dir() else find_saves(spill)
    return waiting, {endpoint: _numbers(endpoint) for endpoint in endpoints}


def _numbers(endpoint: str) -> list[str]:
    """The dcp_s3_* numbers of an endpoint, one line each; or why there are none."""
    import urllib.request

    from dcp_s3.reporting.exposition import parse_exposition

    try:
        with urllib.request.urlopen(endpoint, timeout=_TIMEOUT) as answer:
            text = answer.read(_MOST_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        return [f"does not answer: {error}"]
    found = [str(sample) for sample in parse_exposition(text, "dcp_s3_")]
    return found or ["has no dcp_s3_* numbers"]


def _print_once(console: Console, look: Look, settings: Any, endpoints: list[str], *, as_json: bool) -> None:
    waiting, numbers = _beside(settings, endpoints)
    if as_json:
        print_json(look.to_dict() | {"waiting": waiting, "endpoints": numbers})
    else:
        console.print(_view(look, waiting, numbers), soft_wrap=True)


def _view(
    look: Look,
    waiting: dict[str, Any] | None,
    numbers: dict[str, list[str]],
    *,
    interval: float | None = None,
    failed: str = "",
) -> RenderableType:
    """Everything, for people."""
    from rich.console import Group

    return Group(*_parts(look, waiting, numbers, interval, failed))


def _parts(
    look: Look, waiting: dict[str, Any] | None, numbers: dict[str, list[str]], interval: float | None, failed: str
) -> Iterator[RenderableType]:
    from dcp_s3.cli import tables
    from dcp_s3.units import format_size

    every = "" if interval is None else f", every {interval:g} s, Ctrl-C ends"
    seen = f"{look.seen} of {look.directories} directories looked into with {look.requests} requests"
    yield tables.line(look.root, style="bold")
    yield tables.line(f"{seen}{every}", style="dim")
    if failed:
        yield tables.line(f"the last look failed: {failed}", style="red")
    newest = look.newest
    if newest is None:
        yield tables.line("newest committed: none was seen")
    else:
        age = "" if newest.created_at is None else f", {tables.format_age(look.now - newest.created_at)} ago"
        size = "" if newest.size is None else f", {format_size(newest.size)}"
        yield tables.line(f"newest committed: {newest.name}{age}{size}")
    if look.saves:
        yield _saves(look)
    else:
        yield tables.line("no save is in progress")
    for deletion in look.deletions:
        left = "" if deletion.size is None else f", {format_size(deletion.size)} left"
        yield tables.line(f"being deleted: {deletion.name}, since {tables.format_age(look.now - deletion.since)}{left}")
    for lease in look.leases:
        readers = "1 reader" if lease.readers == 1 else f"{lease.readers} readers"
        ends = tables.format_age(lease.until - look.now)
        yield tables.line(f"being read: {lease.name} by {readers}; the lease ends in {ends} unless renewed")
    yield from _drains(look, waiting)
    for endpoint, lines in numbers.items():
        yield tables.line(endpoint, style="bold")
        for line in lines:
            yield tables.line(f"  {line}")


def _saves(look: Look) -> RenderableType:
    from dcp_s3.cli import tables
    from dcp_s3.units import format_size

    table = tables.make_table(
        (
            "save in progress",
            ">so far",
            ">of about",
            ">rate",
            ">rest",
            ">since",
            ">last sign",
            ">objects",
            ">open uploads",
        )
    )
    for save in look.saves:
        about = "~" if save.estimated else ""
        tables.add_row(
            table,
            (save.name, about + format_size(save.size), "" if save.expected is None else format_size(save.expected),
             "" if save.rate is None else f"{format_size(save.rate)}/s",
             "" if save.rest is None else tables.format_age(save.rest), tables.format_age(look.now - save.since),
             tables.format_age(look.now - save.last), save.objects, save.uploads),
        )  # fmt: skip
    return table


def _drains(look: Look, waiting: dict[str, Any] | None) -> Iterator[RenderableType]:
    import time

    from dcp_s3.cli import tables
    from dcp_s3.units import format_size

    if waiting is None:
        return
    saves = waiting["saves"]
    if not saves:
        yield tables.line(f"nothing waits in {waiting['directory']}")
        return
    oldest = tables.format_age(time.time() - min(save["created_at"] for save in saves))
    size = format_size(sum(save["size"] for save in saves))
    urls = sorted({save["url"] for save in saves})
    here = [url for url in urls if url.startswith(f"{look.root}/")]
    others = f" and {len(urls) - len(here)} of other roots" if len(urls) > len(here) else ""
    names = ", ".join(url.rpartition("/")[2] for url in here) or "none of this root"
    yield tables.line(f"waits in {waiting['directory']}: {names}{others}; {size}, since {oldest}", style="yellow")
    for each in (*waiting["damaged"], *waiting["refused"]):
        yield tables.line(f"set aside or damaged: {each['path']}: {each['reason']}", style="red")
