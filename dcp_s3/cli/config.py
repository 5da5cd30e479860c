"""``dcp-s3 config``: the settings in effect."""

from __future__ import annotations

import typer

from dcp_s3.cli.app import AsJSON, app, print_json
from dcp_s3.cli.group import GIVEN


@app.command()
def config(ctx: typer.Context, as_json: AsJSON = False) -> None:
    """Show the settings in effect, and the environment variable or AWS profile that each comes from."""
    from dcp_s3.cli import tables
    from dcp_s3.retention.parse import policy_from_settings
    from dcp_s3.s3.client import find_chain
    from dcp_s3.settings import resolve_settings

    settings = resolve_settings(None)
    policy_from_settings(settings)  # raises if it is not a valid policy
    rows = tables.settings_rows(settings, find_chain(settings))
    given = ctx.meta.get(GIVEN, {})
    rows = [row | {"source": given.get(row["name"], row["source"])} for row in rows]
    if as_json:
        print_json(rows)
    else:
        tables.make_console().print(tables.settings_table(rows))
