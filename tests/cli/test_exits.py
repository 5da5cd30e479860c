"""One mistake has one exit status, whatever the command; and a message in the words of the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import dcp_s3
from dcp_s3.cli import app as exits
from dcp_s3.cli.main import app
from tests.cli.looking import run
from tests.memory_s3 import Fault
from tests.retention.making import delete, get, keys, put, save, save_locally
from tests.servers import S3Server

pytestmark = pytest.mark.servers("memory")

Command = Callable[[str], list[str]]

_OF_ONE: dict[str, Command] = {
    "show": lambda url: ["show", url],
    "diff": lambda url: ["diff", url, url],
    "verify": lambda url: ["verify", url],
    "verify --full": lambda url: ["verify", url, "--full", "--json"],
    "cp down": lambda url: ["cp", url, "copy"],
    "export": lambda url: ["export", url, "exported"],
    "pin": lambda url: ["pin", url],
    "rm": lambda url: ["rm", url, "--yes"],
    "rm --dry-run": lambda url: ["rm", url, "--dry-run"],
}
_OF_MANY: dict[str, Command] = {
    "ls": lambda url: ["ls", url],
    "ls --latest": lambda url: ["ls", "--latest", url],
    "verify --root": lambda url: ["verify", url, "--root"],
    "prune": lambda url: ["prune", url, "latest:1", "--yes"],
}
_CP: dict[str, Command] = {"cp": lambda url: ["cp", url, "s3://another/copy"]}  # a source that is no URL is a directory
_ALL = {
    **_OF_ONE, **_OF_MANY,
    "pin --remove": lambda url: ["pin", "--remove", url], "cp up": lambda url: ["cp", "local", url],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DCP_S3_RETRY_ATTEMPTS", "1")
    save_locally(tmp_path / "local")


def _fails(arguments: list[str], status: int) -> str:
    """What a command says that fails: one message, no traceback."""
    result = run(*arguments, status=status)
    assert "Traceback" not in result.output
    assert result.stderr.startswith("dcp-s3: ")
    assert len(result.stderr.splitlines()) == 1
    return str(result.stderr)


def test_every_command_is_looked_at() -> None:
    elsewhere = {"import", "bench", "drain", "report", "doctor", "demo"}  # see their own tests
    assert set(get_command(app).commands) <= {name.partition(" ")[0] for name in _ALL | _CP} | elsewhere  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", _ALL)
def test_what_is_typed_wrong_is_status_2(name: str, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("bucket/run", "s3://", "gs://bucket/run", "s3://bucket/a/../b"):
        assert "s3://" in _fails(_ALL[name](url), exits.USAGE)
    for variable, value in (
        ("DCP_S3_PART_SIZE", "much"),
        ("DCP_S3_SPILL_DIR", "relative"),
        ("DCP_S3_READ_TIMEOUT", "9" * 23),
        ("DCP_S3_ENDPOINT_URL", "minio:9000"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert variable in _fails(_ALL[name](root), exits.USAGE)
    monkeypatch.delenv("DCP_S3_ENDPOINT_URL")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "minio:9000")
    assert "AWS_ENDPOINT_URL_S3 = 'minio:9000'" in _fails(_ALL[name](root), exits.USAGE)
    run(*_ALL[name](root), "--no-such-option", status=exits.USAGE)


@pytest.mark.parametrize("name", [*_OF_ONE, *_CP])
def test_where_nothing_is_the_status_is_3(name: str, root: str) -> None:
    assert f"{root}/none" in _fails((_OF_ONE | _CP)[name](f"{root}/none"), exits.NOTHING_THERE)


@pytest.mark.parametrize("name", _OF_MANY)
def test_under_an_empty_root_the_status_is_3(name: str, root: str) -> None:
    assert "no " in run(*_OF_MANY[name](root), status=exits.NOTHING_THERE).stderr


@pytest.mark.parametrize("name", [*_ALL, *_CP])
def test_what_s3_refuses_is_status_1(name: str, root: str, bucket: str, memory_server: S3Server) -> None:
    url = save(f"{root}/step-1")
    _fails((_ALL | _CP)[name](f"s3://{bucket}-not/run"), exits.FAILED)
    memory_server.handle.fault = lambda _: Fault.error(403, "AccessDenied")
    try:
        assert "AccessDenied" in _fails((_ALL | _CP)[name](url), exits.FAILED)
    finally:
        memory_server.handle.fault = None


@pytest.mark.parametrize("name", ["show", "verify", "cp down", "cp"])
def test_what_is_damaged_is_status_4(name: str, root: str, s3: Any) -> None:
    url = save(f"{root}/step-1")
    put(s3, url, ".metadata", get(s3, url, ".metadata")[:-20])
    run(*(_OF_ONE | _CP)[name](url), status=exits.DAMAGED)
    put(s3, url, ".metadata", b"cos\nsystem\n.")
    run(*(_OF_ONE | _CP)[name](url), status=exits.DAMAGED)
    if name != "show":
        url = save(f"{root}/step-2")
        delete(s3, url, next(path for path in keys(s3, url) if path.endswith(".distcp")))
        run(*(_OF_ONE | _CP)[name](url), status=exits.DAMAGED)


def test_the_table_is_in_the_help_and_in_the_documentation() -> None:
    shown = " ".join(run("--help").stdout.split())
    page = (Path(__file__).resolve().parents[2] / "docs" / "retention.md").read_text()
    for status, meaning in exits.MEANINGS.items():
        assert f"{status} {meaning}" in shown
        assert f"| {status} | {meaning} |" in page
    assert set(exits.MEANINGS) == {*range(6), 130}


def test_json_has_no_numbers_that_json_has_not(root: str) -> None:
    def refuse(text: str) -> None:
        pytest.fail(f"{text} is no JSON")

    def loads(*arguments: str) -> Any:
        return json.loads(run(*arguments).stdout, parse_constant=refuse)

    inf = float("inf")
    url = save(f"{root}/step-1", metrics={"nan": inf - inf, "up": inf, "down": -inf, "loss": 0.5})
    dcp_s3.annotate(url, {"later": inf - inf})
    expected = {"nan": "NaN", "up": "Infinity", "down": "-Infinity", "loss": 0.5, "later": "NaN"}
    assert loads("ls", root, "--json")[0]["metrics"] == expected
    assert loads("show", url, "--json")["info"]["metrics"] == expected
    decisions = loads("prune", root, "latest:1", "--dry-run", "--json")["plan"]["decisions"]
    assert decisions[0]["checkpoint"]["metrics"] == expected
    loads("verify", url, "--json")
    loads("doctor", "--settings", "--json")
    assert loads("ls", "--latest", root, "--json")["metrics"] == expected
    loads("cp", url, f"{root}-copy/step-1", "--json")


@pytest.mark.parametrize("header", [True, False])
def test_the_region_of_a_bucket_elsewhere_is_named(header: bool, root: str, memory_server: S3Server) -> None:
    region = "" if header else "<Region>eu-central-1</Region>"
    text = f"<Error><Code>PermanentRedirect</Code><Message>It is elsewhere.</Message>{region}</Error>".encode()
    headers = {"x-amz-bucket-region": "eu-central-1"} if header else {}
    memory_server.handle.fault = lambda request: Fault.forge(301, b"" if request.method == "HEAD" else text, headers)
    try:
        said = _fails(_ALL["ls"](root), exits.FAILED)
    finally:
        memory_server.handle.fault = None
    assert "DCP_S3_REGION" in said
    assert "eu-central-1" in said
