"""Writes the pages that say what the code says: docs/settings.md and docs/cli.md. `make pages` runs it.

python docs/tools/pages.py           # write them
python docs/tools/pages.py --check   # exit status 1 if one is not what the code says
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer.main

from dcp_s3 import settings
from dcp_s3.cli import app as exits
from dcp_s3.cli.main import app
from dcp_s3.settings import ENV_PREFIX, Settings
from dcp_s3.units import format_size

_DOCS = Path(__file__).resolve().parents[1]
_MADE = "<!-- Made by docs/tools/pages.py from the code: `make pages`. Do not edit. -->\n"

#: The settings to know before the first long run, and why.
FIRST = {
    "endpoint_url": "S3 is not AWS: `https://minio:9000`.",
    "spill_dir": "Local NVMe, so that training goes on while S3 does not answer: [When S3 does not answer](spill.md).",
    "staging_limit": "Bounds the host memory to which asynchronous saves copy the state: [saves](async.md).",
    "save_timeout": "Ends a save that takes longer, so that a hung network does not hang the training.",
    "retention": "What `prune` keeps, in one line: [Retention](retention.md).",
}

_SETTINGS = """# Settings

Environment variables with the prefix `DCP_S3_`, read when a writer, a reader or a manager is made, never at import. In
Python the same names, in lower case and without the prefix, override them:
`S3StorageWriter(url, settings={{"part_size": "64MiB"}})`. Sizes are written like `64MiB`, durations like `30s`, `5m`,
`24h`. Endpoint and region, if unset, come from AWS's own chain (`AWS_ENDPOINT_URL_S3`, profiles, instance
roles); credentials always do. `dcp-s3 doctor --settings` shows what is in force, and where each value comes from. A
variable with the prefix that is no setting is named in one warning; a value that is not allowed is an error that says
what is.

## The five that matter first

{first}

The others are for special cases: part sizes and connections find their own values.

## All

{all}

"""

_CLI = """# Command line

`pip install dcp-s3` brings `dcp-s3`. Data goes to stdout, notes and progress to stderr; `--json` prints one JSON
document. `dcp-s3 COMMAND --help` prints the same text as this page. Examples: [start](start.md),
[retention](retention.md#command-line), [export](export.md).

## Exit status

{exits}

## Options of all commands

`-v` may stand before the command or after it. The endpoint and the region are [settings](settings.md).

{options}

{commands}

"""


def fields() -> dict[str, str]:
    """Each setting's documentation, one line, from the string below its field."""
    (made,) = (
        node
        for node in ast.parse(inspect.getsource(settings)).body
        if isinstance(node, ast.ClassDef) and node.name == "Settings"
    )
    found = {}
    for field, text in zip(made.body, made.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        name = field.target.id
        if not isinstance(text, ast.Expr) or not isinstance(text.value, ast.Constant):
            raise ValueError(f"the setting {name} has no documentation below it")
        found[name] = " ".join(str(text.value.value).split()).replace("``", "`")
    return found


def _default(name: str) -> str:
    value = Settings.model_fields[name].default
    annotation = str(Settings.__annotations__[name])
    if value is None:
        return "unset"
    if isinstance(value, str):
        return f"`{value}`"
    if isinstance(value, bool):
        return f"`{value}`".lower()
    if "Size" in annotation:
        return f"`{format_size(value).replace('.0 ', '')}`"
    if "Seconds" in annotation:
        return f"`{value / 3600:g}h`" if value >= 3600 else f"`{value:g}s`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _table(header: str, rows: Iterator[tuple[str, ...]]) -> str:
    columns = header.split(" | ")
    lines = [f"| {header} |", "|" + " --- |" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)])


def settings_page() -> str:
    """docs/settings.md."""
    documented = fields()
    first = ((f"`{ENV_PREFIX}{name.upper()}`", why) for name, why in FIRST.items())
    every = ((f"`{ENV_PREFIX}{name.upper()}`", _default(name), text) for name, text in documented.items())
    return (
        _SETTINGS.format(first=_table("variable | when", first), all=_table("variable | default | meaning", every))
        + _MADE
    )


def cli_page() -> str:
    """docs/cli.md."""
    statuses = ((str(status), meaning) for status, meaning in exits.MEANINGS.items())
    root = typer.main.get_command(app)
    with root.make_context("dcp-s3", [], resilient_parsing=True) as context:
        options = _parameters(root, context)
        order = root.list_commands(context)  # type: ignore[attr-defined]
    return _CLI.format(
        exits=_table("status | meaning", statuses),
        options=_table("option | meaning", iter(options)),
        commands="\n\n".join(_commands(root, "dcp-s3", order)),
    )


def _commands(command: Any, name: str, order: Iterable[str]) -> Iterator[str]:
    for sub in order:
        each = command.commands[sub]
        if each.hidden:
            continue
        if hasattr(each, "commands"):
            yield from _commands(each, f"{name} {sub}", each.commands)
            continue
        yield _command(each, f"{name} {sub}")


def _parameters(command: Any, context: Any) -> list[tuple[str, str]]:
    rows = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and parameter.name != "help":
            rows.append((f"`{' '.join(record[0].split())}`", " ".join(record[1].split())))
    return rows


def _command(command: Any, name: str) -> str:
    with command.make_context(name, [], resilient_parsing=True) as context:
        usage = " ".join(command.collect_usage_pieces(context))
        rows = _parameters(command, context)
    text = "\n".join(line.strip() for line in inspect.cleandoc(command.help or "").splitlines())
    parts = [f"## {name}", text, f"```text\n{name} {usage}\n```"]
    if rows:
        parts.append(_table("argument or option | meaning", iter(rows)))
    return "\n\n".join(parts)


PAGES = {"settings.md": settings_page, "cli.md": cli_page}


def main() -> int:
    """Write or check the pages. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    stale = []
    for name, make in PAGES.items():
        path, text = _DOCS / name, make()
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not options.check:
            path.write_text(text)
    if stale and options.check:
        sys.stderr.write(f"not what the code says: {', '.join(stale)}. Remedy: make pages\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
