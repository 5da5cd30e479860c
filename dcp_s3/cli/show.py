"""``dcp-s3 show``: one checkpoint in full."""

from __future__ import annotations

from dcp_s3.cli.app import URL, AsJSON, app, print_json


@app.command()
def show(url: URL, as_json: AsJSON = False) -> None:
    """Show one checkpoint: its properties, its objects and what was saved."""
    from dcp_s3.cli import tables
    from dcp_s3.retention.show import describe

    details = describe(url)
    if as_json:
        print_json(details.to_dict())
        return
    console = tables.make_console()
    console.print(tables.facts(details))
    console.print(tables.objects(details.objects))
    if details.entries:
        console.print(tables.entries(details.entries))
