"""``dcp-s3 annotate``: metrics that are known after the save."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_s3.cli.app import URL, app, print_line, wrong_usage
from dcp_s3.errors import SettingsError


@app.command()
def annotate(
    url: URL,
    metrics: Annotated[
        list[str],
        typer.Argument(metavar="NAME=VALUE...", help="Numbers, true, false or text; for example val_loss=1.23."),
    ],
) -> None:
    """Add metrics to a checkpoint, or replace some."""
    from dcp_s3.cli import tables
    from dcp_s3.format.added_metrics import check_added
    from dcp_s3.retention import marks

    with wrong_usage(ValueError, hint="NAME=VALUE"):
        given = dict(_metric(text) for text in metrics)
    with wrong_usage(SettingsError, hint="NAME=VALUE"):
        check_added(given, url=url)
    print_line(tables.format_metrics(marks.annotate(url, given)))


def _metric(text: str) -> tuple[str, float | int | bool | str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"{text!r} is not NAME=VALUE")
    if value in ("true", "false"):
        return name, value == "true"
    for number in (int, float):
        try:
            return name, number(value)
        except ValueError:
            pass
    return name, value
