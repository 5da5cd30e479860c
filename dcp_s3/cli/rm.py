"""``dcp-s3 rm``: delete one checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_s3.cli.app import URL, AllVersions, DryRun, Yes, app, ask, note, require_yes
from dcp_s3.errors import CorruptMetadataError, UnsafeMetadataError
from dcp_s3.units import format_size, plural


@app.command()
def rm(
    url: URL,
    dry_run: DryRun = False,
    yes: Yes = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Even if it is pinned, being loaded or being saved; that load or save fails."),
    ] = False,
    all_versions: AllVersions = False,
) -> None:
    """Delete one checkpoint, committed or not."""
    from dcp_s3.cli import tables
    from dcp_s3.retention.prune import remove
    from dcp_s3.retention.show import describe

    if not dry_run:
        require_yes(yes)
    if dry_run or not yes:
        try:
            tables.make_console().print(tables.facts(describe(url)))
        except (CorruptMetadataError, UnsafeMetadataError) as error:
            note(str(error))
    if not dry_run and not yes:
        ask("Delete it?")
    done = remove(url, force=force, all_versions=all_versions, dry_run=dry_run)
    what = "would be deleted" if dry_run else "is deleted"
    note(f"{url} {what}: {plural(done.objects, 'object')}, {format_size(done.size)}")
