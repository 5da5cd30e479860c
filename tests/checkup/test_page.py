"""docs/stores.md: its command runs, its tables are what the tests find, its output is doctor's."""

from __future__ import annotations

import re
from pathlib import Path

from dcp_s3.checkup.doctor import CHECKS, WORDS
from tests.checkup.test_servers import FOUND, HONOURED, IGNORED, NOT_COMPARED, REFUSED

PAGE = (Path(__file__).parents[2] / "docs" / "stores.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
ROWS = {"moto 5.2": "moto", "`rclone serve s3` 1.75": "rclone", "Ceph RGW 16.2": "rgw",
        "Ceph RGW 16.2, bucket with versions": "rgw with versions", "Ceph RGW 16.2 behind nginx 1.22, TLS": "rgw",
}  # fmt: skip
WORDING = {HONOURED: "honoured", IGNORED: "ignored", REFUSED: "refused always", NOT_COMPARED: "not compared"}


def test_the_table_is_what_the_tests_find_on_real_servers() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
    for title, name in ROWS.items():
        (row,) = (row for row in rows if row[0] == title)
        assert row[1:] == [WORDING[found] for found in FOUND[name]]


def test_the_output_has_todays_checks() -> None:
    (output,) = (block for language, block in BLOCKS if language == "text")
    lines = output.splitlines()
    for check in CHECKS:
        marks = "|".join(WORDS.values())
        assert any(re.match(rf"({marks}) +{re.escape(check.name)} ", line) for line in lines), check.name
    assert "saves and loads will work" in lines[-1]
