"""One mistake has one exit status, whatever the command; and a message in the words of the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import dcp_s3
from dcp_s3.cli import group as exits
from dcp_s3.cli.main import app
from tests.cli.looking import run
from tests.memory_s3 import Fault
from tests.retention.making import delete, get, keys, put, save, save_locally
from tests.servers import S3Server

pytestmark = pytest.mark.servers("memory")

Command = Callable[[str], list[str]]

_OF_ONE: dict[str, Command] = {
    "show": lambda url: ["show", url],
    "inspect": lambda url: ["inspect", url],
    "diff": lambda url: ["diff", url, url],
    "verify": lambda url: ["verify", url],
    "verify --full": lambda url: ["verify", url, "--full", "--json"],
    "download": lambda url: ["download", url, "copy"],
    "export": lambda url: ["export", url, "exported"],
    "pin": lambda url: ["pin", url],
    "annotate": lambda url: ["annotate", url, "loss=1"],
    "rm": lambda url: ["rm", url, "--yes"],
    "rm --dry-run": lambda url: ["rm", url, "--dry-run"],
}
_OF_MANY: dict[str, Command] = {
    "ls": lambda url: ["ls", url],
    "latest": lambda url: ["latest", url],
    "verify --root": lambda url: ["verify", url, "--root"],
    "prune": lambda url: ["prune", url, "latest:1", "--yes"],
}
_CP: dict[str, Command] = {"cp": lambda url: ["cp", url, "s3://another/copy"]}  # a source that is no URL is a directory
_ALL = {**_OF_ONE, **_OF_MANY, "unpin": lambda url: ["unpin", url], "upload": lambda url: ["upload", "local", url]}


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
    elsewhere = {
        *("import", "bench", "drain", "config"),  # with sources, sizes and directories of their own: see their tests
        *("inspect", "diff", "report", "doctor", "demo"),
    }
    names = {name.partition(" ")[0] for name in _ALL | _CP}
    assert set(get_command(app).commands) <= names | elsewhere  # type: ignore[attr-defined]


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


@pytest.mark.parametrize("name", ["show", "verify", "verify --full", "download", "cp"])
def test_what_is_damaged_is_status_4(name: str, root: str, s3: Any) -> None:
    url = save(f"{root}/step-1")
    put(s3, url, ".metadata", get(s3, url, ".metadata")[:-20])
    run(*(_OF_ONE | _CP)[name](url), status=exits.DAMAGED)
    if "download" in name or "verify" in name or name == "cp":
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


# --- words -----------------------------------------------------------------------------------------------

_PYTHON = re.compile(r"\w+=(True|False|\.\.\.)|force it\b")


def test_remedies_name_options_of_the_command(root: str, tmp_path: Path) -> None:
    url = save(f"{root}/step-1")
    dcp_s3.pin(url)
    assert "pass --overwrite" in (text := _fails(["upload", "local", url], exits.FAILED))
    assert not _PYTHON.search(text)
    assert "pass --overwrite" in (text := _fails(["download", url, "local"], exits.FAILED))
    assert not _PYTHON.search(text)
    assert "--force" in (text := _fails(["rm", url, "--yes"], exits.FAILED))
    assert not _PYTHON.search(text)
    text = " ".join(run("prune", root, "--yes", "--grace", "1m", status=exits.USAGE).stderr.split())
    assert "--force" in text
    assert not _PYTHON.search(text)
    with pytest.raises(dcp_s3.errors.CheckpointProtectedError, match="force=True"):
        dcp_s3.remove(url)


@pytest.mark.parametrize("word", ["best:2:val_loss", "best:2:val_loss:keep", "best:2:val_loss:drop"])
def test_a_best_without_a_mode_says_so(root: str, word: str) -> None:
    text = " ".join(run("prune", root, word, "--dry-run", status=exits.USAGE).stderr.split())
    assert "min or max is missing" in text
    assert "metric =" not in text
    with pytest.raises(dcp_s3.errors.SettingsError, match="best:2:val_loss:min"):
        dcp_s3.parse_policy(word)


def test_a_best_without_a_metric_says_so() -> None:
    for word in ("best:2:min", "best:2::max", "best:2:max:keep"):
        with pytest.raises(dcp_s3.errors.SettingsError, match="metric is missing"):
            dcp_s3.parse_policy(word)
    assert str(dcp_s3.parse_policy("best:2:a:b:min")) == "best:2:a:b:min"


# --- rm --dry-run, pins, numbers -------------------------------------------------------------------------


def test_rm_shows_what_it_would_delete(root: str, s3: Any) -> None:
    url = save(f"{root}/step-1", metrics={"loss": 0.5})
    before = keys(s3, url)
    result = run("rm", url, "--dry-run")
    assert "loss=0.5" in result.stdout
    shown = re.search(r"would be deleted: (\d+) objects, (.*)", result.stderr)
    assert shown is not None
    assert keys(s3, url) == before
    deleted = run("rm", url, "--yes").stderr
    assert f"is deleted: {shown[1]} objects, {shown[2]}" in deleted
    torn = save(f"{root}/step-2")
    delete(s3, torn, ".metadata")
    before = keys(s3, torn)
    assert "in progress" in _fails(["rm", torn, "--dry-run"], exits.FAILED)
    shown = re.search(r"would be deleted: (\d+) objects, (.*)", run("rm", torn, "--dry-run", "--force").stderr)
    assert shown is not None
    assert keys(s3, torn) == before
    assert f"is deleted: {shown[1]} objects, {shown[2]}" in run("rm", torn, "--yes", "--force").stderr
    pinned = save(f"{root}/step-3")
    dcp_s3.pin(pinned, "mine")
    assert "it is pinned (mine)" in _fails(["rm", pinned, "--dry-run"], exits.FAILED)


def test_the_reason_of_a_pin_can_be_read(root: str, s3: Any) -> None:
    url = save(f"{root}/step-1")
    run("pin", url, "--reason", "the paper's [bold] baseline")
    [listed] = json.loads(run("ls", root, "--json").stdout)
    assert (listed["pinned"], listed["pin_reason"]) == (True, "the paper's [bold] baseline")
    assert json.loads(run("show", url, "--json").stdout)["info"]["pin_reason"] == "the paper's [bold] baseline"
    assert "the paper's [bold] baseline" in run("show", url).stdout
    save(f"{root}/step-2")
    assert "pinned (the paper's [bold] baseline)" in run("prune", root, "latest:1", "--dry-run").stdout
    assert dcp_s3.list_checkpoints(root)[0].pin_reason == "the paper's [bold] baseline"
    run("pin", url)
    assert dcp_s3.list_checkpoints(root)[0].pin_reason is None
    for junk in (b"", b"\xff\xfe", b"[1]", b'{"reason": 3}', b"[" * 100_000):
        put(s3, url, ".dcp_s3/pin", junk)
        [first, _] = dcp_s3.list_checkpoints(root)
        assert first.pinned
        assert first.pin_reason is None


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
    loads("config", "--json")
    assert loads("latest", root, "--json")["metrics"] == expected
    loads("cp", url, f"{root}-copy/step-1", "--json")


# --- config ----------------------------------------------------------------------------------------------


def _rows() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(run("config", "--json").stdout)}


def test_config_shows_what_awss_chain_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _rows()["endpoint_url"] == {"name": "endpoint_url", "value": None, "source": "default"}
    config = tmp_path / "config"
    config.write_text(
        "[default]\nregion = eu-west-1\n[profile lab]\nregion = eu-north-1\nservices = lab\n"
        "[services lab]\ns3 =\n  endpoint_url = http://lab:9000\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    assert (_rows()["region"]["value"], _rows()["endpoint_url"]["value"]) == ("eu-west-1", None)
    monkeypatch.setenv("AWS_PROFILE", "lab")
    rows = _rows()
    assert rows["endpoint_url"]["value"] == "http://lab:9000"
    assert rows["endpoint_url"]["source"] == f"endpoint_url of profile 'lab' in {config}"
    assert rows["region"]["value"] == "eu-north-1"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all:9000")
    assert _rows()["region"] == {"name": "region", "value": "us-west-2", "source": "AWS_DEFAULT_REGION"}
    assert _rows()["endpoint_url"]["source"] == "AWS_ENDPOINT_URL"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3:9000")
    rows = _rows()
    assert (rows["endpoint_url"]["value"], rows["endpoint_url"]["source"]) == ("http://s3:9000", "AWS_ENDPOINT_URL_S3")
    line = next(line for line in run("config").stdout.splitlines() if "endpoint_url" in line)
    assert line.split() == ["endpoint_url", "http://s3:9000", "AWS_ENDPOINT_URL_S3"]
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert _rows()["endpoint_url"]["value"] is None
    monkeypatch.setenv("DCP_S3_ENDPOINT_URL", "http://ours:9000")
    assert _rows()["endpoint_url"]["source"] == "DCP_S3_ENDPOINT_URL"
    monkeypatch.delenv("DCP_S3_ENDPOINT_URL")
    monkeypatch.setenv("AWS_PROFILE", "no-such")
    assert "no-such" in _fails(["config"], exits.USAGE)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("DCP_S3_RETENTION", "latest:x"), ("DCP_S3_RETENTION", "best:2:loss"), ("AWS_ENDPOINT_URL_S3", "minio:9000")],
)
def test_config_finds_what_is_wrong(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    text = _fails(["config"], exits.USAGE)
    assert f"{variable} = {value!r}" in text


# --- another region --------------------------------------------------------------------------------------


class _Elsewhere(BaseHTTPRequestHandler):
    """Says of every bucket that it is in another region: in a header, or in the body, or only that."""

    header, body = True, True

    def _answer(self) -> None:
        text = b"<Error><Code>PermanentRedirect</Code><Message>The bucket is elsewhere.</Message>"
        text += b"<Region>eu-central-1</Region></Error>" if self.body else b"</Error>"
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(301)
        if self.header:
            self.send_header("x-amz-bucket-region", "eu-central-1")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(params=[(True, True), (True, False), (False, True), (False, False)], ids=["both", "head", "body", "no"])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    monkeypatch.setattr(_Elsewhere, "header", request.param[0])
    monkeypatch.setattr(_Elsewhere, "body", request.param[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Elsewhere)
    Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "DCP_S3_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
    }.items():
        monkeypatch.setenv(name, value)
    yield any(request.param)
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["ls", "show", "download", "upload", "pin"])
def test_the_region_of_a_bucket_elsewhere_is_named(name: str, elsewhere: bool) -> None:
    text = _fails(_ALL[name]("s3://bucket/run"), exits.FAILED)
    assert "DCP_S3_REGION" in text
    if elsewhere and (name != "upload" or _Elsewhere.header):  # it begins with a HEAD, whose answer has no body
        assert "eu-central-1" in text


@pytest.mark.parametrize("command", ["latest", "ls", "verify", "inspect", "report", "show"])
def test_json_is_one_document_where_nothing_is(memory_server: S3Server, bucket: str, command: str) -> None:
    result = CliRunner().invoke(app, [command, "--json", f"s3://{bucket}/nothing/there"])
    found = json.loads(result.stdout)
    if result.exit_code and command not in ("latest", "ls"):
        assert found["status"] == result.exit_code
        assert found["kind"].endswith("Error")
        assert found["error"] in result.stderr
    else:
        assert found == {"latest": None, "ls": []}.get(command, found)


@pytest.mark.parametrize(
    "command", [["diff", "--json", "s3://b//c", "s3://bucket/x"], ["latest", "--json", "nonsense"]], ids=" ".join
)
def test_json_of_a_wrong_url_is_one_document(command: list[str]) -> None:
    result = CliRunner().invoke(app, command)
    assert json.loads(result.stdout)["status"] == result.exit_code == 2


def test_a_pins_reason_is_one_line(root: str, memory_server: S3Server) -> None:
    url = save(f"{root}/step-1")
    dcp_s3.pin(url, "good\ns3://bucket/run/step-2 is deleted\x1b[2J")
    for command in (["show", url], ["prune", "--dry-run", root, "latest:1"], ["rm", "--yes", url]):
        result = CliRunner().invoke(app, command)
        assert "good s3://bucket/run/step-2 is deleted" in " ".join(result.output.split())
        assert not any(line.startswith("s3://bucket/run/step-2") for line in result.output.splitlines())
        assert "\x1b" not in result.output
