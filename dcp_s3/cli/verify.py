"""``dcp-s3 verify``: checks whether checkpoints are still what was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp_s3.cli import exits
from dcp_s3.cli.app import URL, AsJSON, app, note, print_json, print_line, progress
from dcp_s3.errors import CheckpointNotFoundError, DcpS3Error
from dcp_s3.units import format_size, plural

if TYPE_CHECKING:
    from dcp_s3.offline.verify_plan import VerifyReport


@app.command()
def verify(
    url: URL,
    full: Annotated[bool, typer.Option("--full", help="Read all data and compare checksums.")] = False,
    root: Annotated[bool, typer.Option("--root", help="Verify every committed checkpoint under URL.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Check whether a checkpoint is still what was saved.

    Without --full: metadata, manifest, and that every object is there with its size. With --full also every byte.
    """
    results: list[VerifyResult] = []
    with progress("verify") as callbacks:
        if root:
            for found in verify_all(url, full=full, callbacks=callbacks):
                results.append(found)
                if not as_json:
                    print_line(line(found))
        else:
            results.append(verify_one(url, full=full, callbacks=callbacks))
    if root:
        if as_json:
            print_json([found.to_dict() for found in results])
        if not results:
            note(f"no committed checkpoints under {url}")
    elif as_json:
        print_json(results[0].to_dict())
    else:
        print_report(results[0], print_line)
    status = worst([found.status for found in results])
    if status:
        raise typer.Exit(status)


@dataclass(frozen=True)
class VerifyResult:
    """The result of verifying one checkpoint."""

    url: str
    """URL of the checkpoint."""
    report: VerifyReport | None = None
    """The report. None if the checkpoint could not be verified."""
    error: Exception | None = None
    """Why it could not be verified."""

    @property
    def status(self) -> int:
        """Exit status."""
        if self.error is not None:
            return exits.status_of(self.error)
        return exits.DONE if self.report is None or self.report.ok else exits.DAMAGED

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON: the report, or ``url``, ``ok`` (null) and ``error``."""
        if self.report is None:
            return {"url": self.url, "ok": None, "error": str(self.error)}
        return self.report.to_dict()


def verify_one(url: str, *, full: bool, callbacks: dict[str, Any]) -> VerifyResult:
    """Verify one checkpoint.

    Raises:
        DcpS3Error, OSError: it could not be verified.
    """
    from dcp_s3.offline import verify as verifying

    return VerifyResult(url, verifying.verify(url, full=full, **callbacks))


def verify_all(root: str, *, full: bool, callbacks: dict[str, Any]) -> Iterator[VerifyResult]:
    """Verify every committed checkpoint under a root, oldest first. Checkpoints deleted meanwhile are left out.

    Raises:
        DcpS3Error: the checkpoints cannot be listed.
    """
    from dcp_s3.offline import verify as verifying
    from dcp_s3.retention.catalog import list_checkpoints

    totals: list[int] = []

    def add(total: int) -> None:
        totals.append(total)
        callbacks["on_total"](sum(totals))

    for info in list_checkpoints(root):
        if not info.committed:
            continue
        try:
            yield VerifyResult(
                info.url, verifying.verify(info.url, full=full, on_total=add, on_progress=callbacks["on_progress"])
            )
        except CheckpointNotFoundError:
            continue
        except (DcpS3Error, OSError) as error:
            yield VerifyResult(info.url, error=error)


def worst(statuses: list[int]) -> int:
    """The exit status of several results: damage counts most."""
    return max(statuses, default=exits.NOTHING_THERE)


def line(found: VerifyResult) -> str:
    """One line for people."""
    report = found.report
    if report is None:
        return f"{found.url}: could not be verified: {found.error}"
    counts = (
        f"{plural(report.objects, 'object')}, {plural(report.items, 'item')}, {format_size(report.bytes_read)} read"
    )
    if report.ok:
        return f"{found.url}: good ({report.mode}: {counts}{_unchecked(report)})"
    more = f", the first of {len(report.problems)}" if len(report.problems) > 1 else ""
    return f"{found.url}: damaged: {report.problems[0]} ({report.mode}: {counts}{more})"


def print_report(found: VerifyResult, write: Callable[[str], None]) -> None:
    """Print everything about one checkpoint, for people."""
    report = found.report
    if report is None or report.ok:
        write(line(found))
        return
    write(f"{found.url}: damaged")
    for problem in report.problems:
        write(f"  {problem}")
    write(
        f"{report.mode}: {plural(report.objects, 'object')}, {plural(report.items, 'item')}, "
        f"{format_size(report.bytes_read)} read, "
        f"{plural(len(report.problems), 'problem')}{_unchecked(report)}"
    )


def _unchecked(report: VerifyReport) -> str:
    """How much has no checksum; empty if everything has one."""
    if not report.objects_without_checksum and not report.items_without_checksum:
        return ""
    objects = plural(report.objects_without_checksum, "object")
    text = f"; without checksum: {objects}, {plural(report.items_without_checksum, 'item')}"
    return text + (f", {report.items_not_decoded} of them not decoded" if report.items_not_decoded else "")
