"""Names that would move the cursor, set the title or forge a line: a terminal is shown what they are."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from dcp_s3.cli import app, tables
from dcp_s3.cli.group import LAYOUT, printable, show_log

_EVIL = "step-1\x1b[31m\x1b]0;owned\x07\nstep-2  committed\u202e\udc80"
_SHOWN = r"step-1\x1b[31m\x1b]0;owned\x07\nstep-2  committed\u202e\udc80"


def test_what_a_terminal_would_obey_is_escaped_and_all_else_stays() -> None:
    assert printable(_EVIL) == _SHOWN
    assert printable("one\n\ttwo\r", keep=LAYOUT) == "one\n\ttwo\\r"
    assert printable(text := "détails\u00a0\u3000\\ \U0001f600") == text


@pytest.mark.parametrize("terminal", [True, False])
def test_tables_show_it_escaped(terminal: bool) -> None:
    table = tables.make_table(("name", "state"))
    tables.add_row(table, (_EVIL, "committed"))
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count(_SHOWN) == 1
    assert _SHOWN in tables.plain_lines(table)[1]


def test_notes_lines_and_the_log_show_it_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    app.note(f"left alone: {_EVIL}")
    app.print_line(_EVIL)
    with show_log(0):
        logging.getLogger("dcp_s3.test").warning("%s", _EVIL.replace("\udc80", ""))
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert "\x07" not in out + err
    assert err.count(r"\x1b[31m") == 2
