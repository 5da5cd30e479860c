"""Every block of README and of the documentation runs as it is pasted, page by page, or says that it does not."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import DATA, PAGES, ROOT, blocks
from tests.faulty import BUCKET, FaultyServer, serve
from tests.interpreter import Interpreter
from tests.memory_s3 import MemoryS3

_RUN = [page for page in PAGES if any(block.runs for block in blocks(page))]
_names = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=_names)
def test_every_block_is_run_or_says_why_it_is_not(page: Path) -> None:
    text = page.read_text()
    found = blocks(page)
    assert text.count("\n```") + text.startswith("```") == 2 * len(found), "a block that is not found"
    for block in found:
        known = block.language in DATA | {"python", "sh"} or block.not_run
        assert known, f"{page.name}:{block.line}: {block.language or 'no language'}; output is `text`"
        if block.language == "json":
            json.loads(block.text)
        if block.not_run is not None:
            assert len(block.not_run) > 10, f"{page.name}:{block.line}: why not?"


def test_most_are_run() -> None:
    assert {
        "README.md",
        "start.md",
        "tutorial.md",
        "retention.md",
        "manager.md",
        "async.md",
        "spill.md",
        "export.md",
    } <= {page.name for page in _RUN}
    assert sum(block.runs for block in blocks(ROOT / "README.md")) >= 5
    reasons = [block.not_run for block in blocks(ROOT / "README.md") if block.not_run]
    assert reasons == ["they would point the tests elsewhere"], "all else of README runs"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", _RUN, ids=[str(page.relative_to(ROOT)) for page in _RUN])
def test_a_page_runs_as_pasted(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter
) -> None:
    """The reader has a bucket called `bucket`, and AWS's own variables that lead to it; on the host is /nvme/spill."""
    assert BUCKET == "bucket"
    server = FaultyServer()
    server.s3 = MemoryS3()
    with serve(monkeypatch, server):
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", os.environ["DCP_S3_ENDPOINT_URL"])
        monkeypatch.delenv("DCP_S3_ENDPOINT_URL")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        done = interpreter.run(
            [sys.executable, "-m", "tests.docs.blocks", str(page), str(tmp_path)],
            cwd=ROOT, capture_output=True, timeout=500,
        )  # fmt: skip
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        saved = server.s3.objects(BUCKET)
    committed = {key.removesuffix("/.metadata") for key in saved if key.endswith("/.metadata")}
    if page.name == "README.md":
        assert {f"run/step-{step}" for step in (1000, 2000, 4000, 5000)} <= committed
        assert len([name for name in committed if name.startswith("managed/")]) in range(3, 6)
    if page.name == "3am.md":  # nothing on it deletes or adds
        assert committed == {f"run/step-{step}" for step in ("00000800", "00000900")}
    if page.name == "async.md":
        assert {f"async/step-{step}" for step in (100, 200, 300)} <= committed
    if page.name == "tutorial.md":
        assert "starting after step 0 on 2 ranks" in output
        assert "starting after step 30 on 3 ranks" in output
        assert committed == {"tutorial/step-00000040", "tutorial/step-00000050"}
