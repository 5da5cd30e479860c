"""The commands that move, delete and mark checkpoints."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcp_s3.cli import app as cli
from dcp_s3.errors import CorruptCheckpointError, UnsafeMetadataError
from dcp_s3.units import format_size, plural
from dcp_s3.url import parse_url

if TYPE_CHECKING:
    from dcp_s3.retention.prune import PruneReport


@cli.app.command()
def cp(
    source: Annotated[str, typer.Argument(metavar="FROM", help="s3://bucket/prefix or directory of the checkpoint.")],
    destination: Annotated[str, typer.Argument(metavar="TO", help="The same: empty, or from an interrupted copy.")],
    overwrite: cli.Overwrite = False,
) -> None:
    """Copy a checkpoint; from S3 to S3 without moving its bytes. An interrupted copy goes on when repeated.

    A directory has the layout of torch's FileSystemReader and FileSystemWriter. Both URLs are reached through one
    endpoint with one set of credentials; between two endpoints, copy by way of a directory.
    """
    from dcp_s3.offline.copy import copy

    with cli.progress("copy") as callbacks:
        result = copy(source, destination, overwrite, **callbacks)
    moved = f"{format_size(result.size)} ({format_size(result.moved)} copied)"
    cli.note(f"{destination}: {plural(result.files, 'object')}, {moved}")


@cli.app.command()
def export(
    url: cli.URL,
    destination: Annotated[str, typer.Argument(metavar="DEST", help="Directory or s3://bucket/prefix; must be empty.")],
    include: Annotated[
        list[str] | None,
        typer.Option("--include", metavar="PATTERN", help="Only these entries, as model.*; may be repeated."),
    ] = None,
    rename: cli.Rename = None,
    dtype: Annotated[str | None, typer.Option(help="Convert floating-point tensors: bf16, fp16, fp32, ...")] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of a file, as 5GB or 2GiB.")] = "5GB",
) -> None:
    """Write the tensors of a checkpoint as safetensors files, as Hugging Face lays them out."""
    from dcp_s3.offline import export as exporting
    from dcp_s3.offline.names import parse_rules

    with cli.wrong_usage("--rename, --max-shard-size or --dtype"):
        rules, most = parse_rules(rename or []), exporting.parse_shard_size(max_shard_size)
        wanted = exporting.parse_dtype(dtype)
    with cli.progress("export") as callbacks:
        result = exporting.export(
            url, destination, include=include, rename=rules, dtype=wanted, max_shard_size=most, **callbacks
        )
    tensors, files = plural(result.tensors, "tensor"), plural(len(result.files), "file")
    cli.note(f"{destination}: {tensors}, {files}, {format_size(result.size)}")
    if result.skipped:
        cli.note(f"left out: {plural(result.skipped, 'entry')} without a tensor")


@cli.app.command()
def drain(
    directory: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="Instead of DCP_S3_SPILL_DIR.")] = None,
    status: Annotated[bool, typer.Option("--status", help="Only show what is there.")] = False,
) -> None:
    """Upload what a crash or an outage of S3 left in a spill directory, and commit what is then complete.

    Exit status 1: something still waits or was set aside; the reason is shown.
    """
    from dcp_s3.cli import tables
    from dcp_s3.settings import resolve_settings
    from dcp_s3.spill.drain import Drainer
    from dcp_s3.spill.store import SpillStore

    settings = resolve_settings(None)
    if directory is None and settings.spill_dir is None:
        raise typer.BadParameter("name a directory, or set DCP_S3_SPILL_DIR", param_hint="DIR")
    store = SpillStore(directory or str(settings.spill_dir))
    if not store.path.is_dir():
        raise typer.BadParameter(f"there is no directory {store.path}", param_hint="DIR")
    if status:
        table = tables.make_table(("checkpoint", "what", "state", ">size", ">age"))
        saves, broken = store.read()
        for journal in (save.journal for save in saves):
            what, age = "data" if journal.commit is None else "commit", time.time() - journal.created_at
            cells = journal.url, what, journal.state.value, format_size(journal.size), tables.format_age(age)
            tables.add_row(table, cells)
        if table.row_count:
            tables.show(table)
        for kind, found in (("damaged", broken), ("set aside", store.list_refused())):
            for each in found:
                cli.print_line(f"{kind}: {each.path}: {each.reason}")
        return
    with cli.ended_like_ctrl_c(), cli.progress("drain") as callbacks:
        callbacks["on_total"](sum(save.journal.size for save in store.scan()))
        report = Drainer(store, on_progress=callbacks["on_progress"], patience=settings.spill_after).run()
    for url in report.committed:
        cli.note(f"committed {url}")
    if report.busy:
        cli.note(f"another process drains {store.path}: nothing was done here")
        raise typer.Exit(cli.FAILED)
    for name, reason in report.refused.items():
        cli.note(f"set aside {name}: {reason}")
    for name, reason in report.waiting.items():
        cli.note(f"waits: {name}: {reason}")
    cli.note(
        f"{store.path}: {format_size(report.uploaded)} uploaded, {len(report.committed)} committed, "
        f"{len(report.discarded)} given up, {len(report.waiting)} waiting, {len(report.refused)} set aside"
    )
    if report.waiting or store.list_refused():
        raise typer.Exit(cli.FAILED)


@cli.app.command()
def prune(
    root: cli.ROOT,
    policies: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[POLICY]...",
            help="What to keep: latest:K, best:K:METRIC:min|max, every:STEPS, within:48h, daily:N. "
            "The default is DCP_S3_RETENTION; without that only leftovers are deleted.",
        ),
    ] = None,
    dry_run: cli.DryRun = False,
    yes: cli.Yes = False,
    as_json: cli.AsJSON = False,
    grace: Annotated[str | None, typer.Option(metavar="24h", help="Instead of DCP_S3_RETENTION_GRACE.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Allow a --grace under an hour: it breaks slow saves.")
    ] = False,
) -> None:
    """Delete the checkpoints under ROOT that no policy keeps, and the leftovers of failed saves.

    Never deleted: the newest checkpoint, pinned ones, and those being saved or loaded with a lease.
    """
    from dcp_s3.cli import tables
    from dcp_s3.retention import prune as pruning
    from dcp_s3.retention.policy import parse_policy, policy_from_settings
    from dcp_s3.settings import resolve_settings

    parse_url(root)
    settings = resolve_settings(None)
    with cli.wrong_usage("POLICY or --grace"):
        policy = parse_policy(" ".join(policies or ()))
        seconds = pruning.check_grace(grace, settings, force=force)
    policy = policy_from_settings(settings) if policy is None else policy
    if not dry_run:
        cli.require_yes(yes)
    if policy is None:
        cli.note(
            "no policy (none is given, DCP_S3_RETENTION is not set): every committed checkpoint stays, only the "
            "leftovers of failed saves are deleted"
        )
    with cli.progress("plan", steps=True):  # without a total: a pulsing bar
        # Empty text keeps all; None would mean the policy of the settings.
        report = pruning.prune(root, policy or "", grace=seconds, dry_run=True, force=force, settings=settings)
    plan = report.plan
    nothing = not (plan.decisions or plan.uploads or plan.leftovers or plan.unfinished)
    if not as_json and not nothing and (dry_run or not yes or tables.make_console().is_terminal):
        tables.show(tables.plan(plan))
        cli.note(tables.plan_summary(plan))
    if dry_run or plan.empty:
        report = dataclasses.replace(report, dry_run=dry_run)
    else:
        if not yes:
            cli.ask(f"{tables.plan_summary(plan)}. Delete?" if as_json else "Delete?")
        with cli.progress("prune", steps=True) as step:
            report = pruning.apply_plan(report.root, plan, progress=step)
    if as_json:
        cli.print_json(report.to_dict())
    elif not dry_run:
        _say_pruned(report)
    if nothing:
        cli.note(f"no checkpoints under {root}")
        raise typer.Exit(cli.NOTHING_THERE)
    if not report.ok:
        raise typer.Exit(cli.FAILED)


def _say_pruned(report: PruneReport) -> None:
    """Report what was deleted, one line per checkpoint, and what was not."""
    reasons = {decision.checkpoint.name: "; ".join(decision.reasons) for decision in report.plan.decisions}
    for each in report.deleted:
        cli.print_line(f"deleted {report.root}/{each.name} ({format_size(each.size)}): {reasons.get(each.name, '')}")
    for finished in report.finished:
        cli.print_line(f"finished the deletion of {report.root}/{finished.name} ({format_size(finished.size)})")
    for left in report.leftovers:
        what = plural(left.objects, "leftover object")
        cli.print_line(f"deleted {what} of {report.root}/{left.name} ({format_size(left.size)})")
    for alone in report.left_alone:
        cli.note(f"left alone: {report.root}/{alone.name}: {alone.reason}")
    for failure in report.failures:
        cli.note(f"failed: {report.root}/{failure.name}: {failure.reason}")
    cli.note(
        f"{report.root}: {plural(len(report.deleted), 'checkpoint')} deleted, {len(report.plan.kept)} kept, "
        f"{plural(report.objects, 'object')} ({format_size(report.size)}), "
        f"{plural(len(report.aborted), 'upload')} aborted, {plural(len(report.failures), 'failure')}"
    )


@cli.app.command()
def rm(
    url: cli.URL,
    dry_run: cli.DryRun = False,
    yes: cli.Yes = False,
    force: Annotated[bool, typer.Option("--force", help="Even if it is pinned, being loaded or being saved.")] = False,
) -> None:
    """Delete one checkpoint, committed or not."""
    from dcp_s3.cli import tables
    from dcp_s3.retention.catalog import describe
    from dcp_s3.retention.prune import remove

    if not dry_run:
        cli.require_yes(yes)
    if dry_run or not yes:
        try:
            tables.show(tables.facts(describe(url)))
        except (CorruptCheckpointError, UnsafeMetadataError) as error:
            cli.note(str(error))
    if not dry_run and not yes:
        cli.ask("Delete it?")
    done = remove(url, force=force, dry_run=dry_run)
    what = "would be deleted" if dry_run else "is deleted"
    cli.note(f"{url} {what}: {plural(done.objects, 'object')}, {format_size(done.size)}")


@cli.app.command()
def pin(
    url: cli.URL,
    reason: Annotated[str | None, typer.Option(help="Why it is pinned; shown later.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the pin.")] = False,
) -> None:
    """Protect a checkpoint from every policy, until `pin --remove`."""
    from dcp_s3.retention import marks

    if not remove:
        marks.pin(url, reason)
        cli.note(f"{url} is pinned")
    elif marks.unpin(url):
        cli.note(f"{url} is no longer pinned")
    else:
        cli.note(f"{url} is not pinned")
        raise typer.Exit(cli.NOTHING_THERE)
