"""What all commands share: options, settings, exit statuses, retries, pipes, Ctrl-C, and what is imported."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import dcp_s3
from dcp_s3.cli import app as cli
from dcp_s3.cli.app import LAYOUT, printable, show_log
from dcp_s3.cli.main import app
from dcp_s3.s3 import diagnosis
from tests.cli.looking import run
from tests.faulty import BUCKET, FaultyServer
from tests.interpreter import Interpreter
from tests.memory_s3 import Fault
from tests.retention.making import delete, get, keys, put, save
from tests.servers import S3Server

_COMMAND = [sys.executable, "-m", "dcp_s3.cli.main"]
pytestmark = pytest.mark.servers("memory")

ROOT = f"s3://{BUCKET}/run"


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_told", type(diagnosis._told)())


_SETTINGS = ("doctor", "--settings", "--json")


def rows(*arguments: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(run(*arguments).stdout)}


def test_verbose_logs_to_stderr(faulty: FaultyServer) -> None:
    save(f"{ROOT}/step-1")
    quiet = run("ls", ROOT, "--json")
    assert quiet.stderr == ""
    for option, is_there in (("-v", False), ("-vv", True)):
        every = run(option, "ls", ROOT, "--json")
        assert ("DEBUG dcp_s3.s3.retry: ListObjectsV2 on s3://" in every.stderr) == is_there
        faulty.once("ListObjectsV2", Fault.error(500, "InternalError"))
        loud = run("ls", ROOT, "--json", option)
        assert ("failed (" in loud.stderr) == is_there
        assert json.loads(loud.stdout) == json.loads(quiet.stdout)
    assert run("ls", ROOT, "--json").stderr == ""


def test_settings_say_where_they_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    file = tmp_path / "config"
    file.write_text(
        "[default]\nregion = eu-west-1\n[profile lab]\nregion = eu-north-1\nservices = lab\n"
        "[services lab]\ns3 =\n  endpoint_url = http://lab:9000\n"
    )
    assert rows(*_SETTINGS).keys() == dcp_s3.Settings.model_fields.keys()
    steps: list[tuple[dict[str, str], str, Any, str]] = [
        ({}, "endpoint_url", None, "default"),
        ({"DCP_S3_PART_SIZE": "16MiB"}, "part_size", 16 * 2**20, "DCP_S3_PART_SIZE"),
        ({"AWS_CONFIG_FILE": str(file)}, "region", "eu-west-1", f"region of profile 'default' in {file}"),
        ({"AWS_PROFILE": "lab"}, "endpoint_url", "http://lab:9000", f"endpoint_url of profile 'lab' in {file}"),
        ({"AWS_DEFAULT_REGION": "us-west-2"}, "region", "us-west-2", "AWS_DEFAULT_REGION"),
        ({"DCP_S3_ENDPOINT_URL": "http://ours:9000"}, "endpoint_url", "http://ours:9000", "DCP_S3_ENDPOINT_URL"),
    ]
    for environment, name, value, source in steps:
        for variable, text in environment.items():
            monkeypatch.setenv(variable, text)
        assert rows(*_SETTINGS)[name] == {"name": name, "value": value, "source": source}
    text = run("doctor", "--settings").stdout
    assert ["part_size", "16777216", "DCP_S3_PART_SIZE"] in [line.split() for line in text.splitlines()]
    assert "hunter2" not in text
    monkeypatch.setenv("DCP_S3_RETENTION", "latest:x")
    assert "DCP_S3_RETENTION = 'latest:x'" in run("doctor", "--settings", status=2).stderr
    assert "only --settings" in " ".join(run("doctor", status=2).stderr.split())


_WRONG = (
    "ls", "lss", "cp only-one", *(f"{name} {url}" for name in ("doctor", "bench") for url in ("file:///t", "s3://b//c")),
    "bench s3://b/r --size much", "bench s3://b/r --size=0", "doctor s3:bucket", "export s3://b/x t --rename x",
    "export s3://b/x t --dtype int8", "export s3://b/x t --max-shard-size big", "prune s3://b/r latest --yes",
    "prune s3://b/r latest:1 --grace soon --yes", "prune s3://b/r latest:1 --grace 1m --yes",
)  # fmt: skip


@pytest.mark.parametrize("arguments", _WRONG)
def test_wrong_usage_is_status_2(arguments: str) -> None:
    option = arguments.rpartition("--")[2].split()[0] if "export" in arguments else ""
    assert option in run(*arguments.split(), status=2).stderr


_COMMANDS = (
    "show {0}", "verify {0}", "cp {0} copy", "cp {0} s3://another/copy", "export {0} exported",
    "pin {0}", "rm {0} --yes", "ls {0}", "ls --latest {0}", "verify {0} --root", "prune {0} latest:1 --yes",
)  # fmt: skip


@pytest.fixture
def one_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DCP_S3_RETRY_ATTEMPTS", "1")


@pytest.mark.usefixtures("one_attempt")
@pytest.mark.parametrize("command", _COMMANDS)
def test_a_mistake_has_one_status_and_one_message_whatever_the_command(
    command: str, root: str, memory_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def message(url: str, status: int) -> str:
        result = run(*command.format(url).split(), status=status)
        assert "Traceback" not in result.output
        (line,) = result.stderr.splitlines()
        return str(line)

    for url in ("s3://", "gs://bucket/run", "s3://bucket/a/../b"):
        assert message(url, cli.USAGE).startswith("dcp-s3: ")
    for variable, value in (("DCP_S3_PART_SIZE", "much"), ("AWS_ENDPOINT_URL_S3", "minio:9000")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            patch.delenv("DCP_S3_ENDPOINT_URL")
            assert f"{variable} = {value!r}" in message(root, cli.USAGE)
    if command != "prune {0} latest:1 --yes":  # which says more
        assert "no " in message(f"{root}/none", cli.NOTHING_THERE)
    assert message(root.replace("s3://", "s3://not-"), cli.FAILED).startswith("dcp-s3: ")
    url = save(f"{root}/step-1")
    with monkeypatch.context() as patch:
        patch.setattr(memory_server.handle, "fault", lambda _: Fault.error(403, "AccessDenied"))
        assert "AccessDenied" in message(url, cli.FAILED)


@pytest.mark.usefixtures("one_attempt")
@pytest.mark.parametrize("command", ["show {0}", "verify {0}", "cp {0} copy", "cp {0} s3://another/copy"])
def test_what_is_damaged_is_status_4(command: str, root: str, s3: Any) -> None:
    url = save(f"{root}/step-1")
    for metadata in (get(s3, url, ".metadata")[:-20], b"cos\nsystem\n."):
        put(s3, url, ".metadata", metadata)
        run(*command.format(url).split(), status=cli.DAMAGED)
    if command != "show {0}":
        url = save(f"{root}/step-2")
        delete(s3, url, next(path for path in keys(s3, url) if path.endswith(".distcp")))
        run(*command.format(url).split(), status=cli.DAMAGED)


def test_the_version_and_the_table_of_statuses_which_is_in_the_documentation_too() -> None:
    assert run("--version").stdout == f"dcp-s3 {dcp_s3.__version__}\n"
    shown = " ".join(run("--help").stdout.split())
    page = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
    for status, meaning in cli.MEANINGS.items():
        assert f"{status} {meaning}" in shown
        assert f"| {status} | {meaning} |" in page
    assert set(cli.MEANINGS) == {*range(5), 130}


def test_a_dead_endpoint_is_named_at_the_first_retry_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    environment |= {"DCP_S3_RETRY_ATTEMPTS": "3", "DCP_S3_ENDPOINT_URL": "http://127.0.0.1:9"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    first, last = run("ls", ROOT, status=1).stderr.splitlines()
    assert first.startswith("127.0.0.1:9 does not answer (EndpointConnectionError): attempt 2 of 3, waiting ")
    assert "after 3 attempts" in last


def test_tables_are_columns_for_awk(root: str) -> None:
    save(f"{root}/step-1", metrics={"loss": 0.25})
    save(f"{root}/step 2\n")
    titles, *lines = (line.split("\t") for line in run("ls", root).stdout.splitlines())
    assert titles == ["name", "state", "step", "ranks", "objects", "size", "age", "metrics"]
    assert [line[:5] for line in lines] == [
        ["step-1", "committed", "1", "1", "1"],
        ["step 2\\n", "committed", "2", "1", "1"],
    ]
    assert [line[-1] for line in lines] == ["loss=0.25", "-"]
    for command in (["show", f"{root}/step-1"], ["doctor", "--settings"], ["prune", root, "latest:1", "--dry-run"]):
        text = run(*command).stdout
        assert text.isascii(), text
        assert "\x1b" not in text


@pytest.mark.parametrize("arguments", [["ls", ROOT], ["ls", ROOT, "--json"]])
def test_a_reader_that_leaves_is_no_traceback(
    arguments: list[str], faulty: FaultyServer, interpreter: Interpreter
) -> None:
    for step in range(2):
        save(f"{ROOT}/step-{step}")
    reading, writing = os.pipe()
    os.close(reading)
    done = interpreter.run([*_COMMAND, *arguments], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.stderr, done.returncode) == ("", cli.NOBODY_READS)


def test_ctrl_c_ends_a_command_at_once(faulty: FaultyServer, interpreter: Interpreter) -> None:
    asked = threading.Event()

    def rule(request: Any) -> Fault:
        asked.set()
        return Fault.error(503, "SlowDown")

    faulty.rule = rule
    process = interpreter.popen(
        [*_COMMAND, "show", f"{ROOT}/step-1"],
        stderr=subprocess.PIPE,
        env={**os.environ, "DCP_S3_RETRY_ATTEMPTS": "100"},
    )
    try:
        assert asked.wait(60)
        process.send_signal(signal.SIGINT)
        _, messages = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == cli.INTERRUPTED
    assert messages.splitlines()[-1] == "dcp-s3: interrupted"
    assert "Traceback" not in messages


# Names that would move the cursor, set the title or forge a line: a terminal is shown what they are.
_EVIL = "step-1\x1b[31m\x1b]0;owned\x07\nstep-2  committed\u202e\udc80"


def test_what_a_terminal_would_obey_is_escaped_and_all_else_stays(capsys: pytest.CaptureFixture[str]) -> None:
    assert printable(_EVIL) == r"step-1\x1b[31m\x1b]0;owned\x07\nstep-2  committed\u202e\udc80"
    assert printable("one\n\ttwo\r", keep=LAYOUT) == "one\n\ttwo\\r"
    assert printable(text := "détails\u00a0\u3000\\ \U0001f600") == text
    cli.note(f"left alone: {_EVIL}")
    cli.print_line(_EVIL)
    with show_log(0):
        logging.getLogger("dcp_s3.test").warning("%s", _EVIL.replace("\udc80", ""))
    out, err = capsys.readouterr()
    assert not {"\x1b", "\x07"} & {*(out + err)}
    assert err.count(r"\x1b[31m") == 2


_HEAVY = {
    *("torch", "numpy", "boto3", "botocore", "s3transfer", "asyncio"),
    *("pydantic", "pydantic_settings", "rich.table", "rich.progress", "dcp_s3.settings"),
}
# Carries out commands, and tells what each has imported that the ones before it had not.
# Carries out commands, and tells what was imported for them.
_PROGRAM = """
import contextlib, io, json, sys
from dcp_s3.cli.main import app
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()):
        assert not app(arguments, standalone_mode=False), arguments
print(json.dumps(list(sys.modules)))
"""


def _imported(*commands: str) -> set[str]:
    program = [sys.executable, "-c", _PROGRAM, json.dumps([command.split() for command in commands])]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_help_imports_nothing_heavy() -> None:
    commands = sorted(get_command(app).commands)  # type: ignore[attr-defined]
    assert {"ls", "show", "verify", "drain", "prune", "export"} <= set(commands)
    found = _imported("--help", "--version", *(f"{name} --help" for name in commands))
    assert "dcp_s3.cli.change" in found
    typers_own = {"pydantic"} if "typer._adapters" in found else set()  # since typer 0.29; 0.1 s
    assert found & (_HEAVY - typers_own) == set()


def test_what_decodes_no_tensors_imports_no_torch(faulty: FaultyServer) -> None:
    for step in (1, 2, 3):
        save(f"{ROOT}/step-{step}")
    dcp_s3.pin(f"{ROOT}/step-3")
    found = _imported(
        f"ls {ROOT}", f"ls --latest {ROOT}", f"pin {ROOT}/step-3 --reason good", f"pin --remove {ROOT}/step-3",
        f"prune --dry-run {ROOT} latest:1", f"prune --yes {ROOT} latest:2",
    )  # fmt: skip
    assert not found & {"torch", "numpy"}
    assert [info.step for info in dcp_s3.list_checkpoints(ROOT)] == [2, 3]
