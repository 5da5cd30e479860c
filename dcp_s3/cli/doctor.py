"""``dcp-s3 doctor``: whether saves and loads will work, before the run starts."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_s3.cli import exits
from dcp_s3.cli.app import AsJSON, app, print_json, print_line

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}


@app.command()
def doctor(
    url: Annotated[str, typer.Argument(metavar="URL", help="s3://bucket/prefix below which checkpoints are to lie.")],
    read_only: Annotated[bool, typer.Option("--read-only", help="Leave out everything that writes.")] = False,
    policy: Annotated[bool, typer.Option("--policy", help="Print IAM policies also if nothing is refused.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Check settings, credentials, endpoint, permissions and what the store can do, before a run starts.

    Small probe objects are written below URL and removed again.
    """
    from dcp_s3.checkup.doctor import TICKS, conclude, examine, format_result
    from dcp_s3.checkup.probes import CheckResult
    from dcp_s3.cli import tables
    from dcp_s3.cli.bench import ended_like_ctrl_c

    console = tables.make_console()

    def show(result: CheckResult) -> None:
        if as_json:
            return
        if console.is_terminal:
            console.print(format_result(result, TICKS), style=_STYLES[result.status], soft_wrap=True)
        else:
            print_line(format_result(result))

    with ended_like_ctrl_c():
        report = examine(url, None, read_only=read_only, on_result=show)
    if as_json:
        print_json(report.to_dict())
    else:
        print_line(conclude(report, policy=policy))
    if not report.ok:
        raise typer.Exit(exits.FAILED)
