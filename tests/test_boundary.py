"""What a user sees of a save or load that fails: the cause, without our frames; of an asynchronous save, in the log."""

from __future__ import annotations

import argparse
import logging
import pickle
import re
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

import dcp_s3
from dcp_s3 import S3LoadPlanner, S3Stager, S3StorageReader, S3StorageWriter, errors, events
from tests.faulty import BUCKET, FaultyServer
from tests.interpreter import Interpreter
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.s3.waiting import until

_PATIENCE_SECONDS = 60
_URL = f"s3://{BUCKET}/run/step-1"
_DENIED = Fault.error(403, "AccessDenied")

_SCRIPT = """
import sys
from concurrent.futures import wait
import torch
import torch.distributed.checkpoint as dcp
from dcp_s3 import S3Stager, S3StorageWriter

def save(**more):
    wait([dcp.async_save(state, **more)])  # for the sake of the staging: at the result nobody looks

url, state = sys.argv[1], {"weight": torch.ones(1_000_000)}
save(storage_writer=S3StorageWriter(url + "/data"))
save(storage_writer=S3StorageWriter(url + "/commit"))
save(storage_writer=S3StorageWriter(url + "/data-alone"), use_collectives=False)
save(storage_writer=S3StorageWriter(url + "/data-staged"), async_stager=S3Stager())
small = S3Stager({"staging_limit": "1MiB"}, asynchronous=True)
dcp.async_save(state, storage_writer=S3StorageWriter(url + "/staging"), async_stager=small)
"""


def _deny(faulty: FaultyServer, operation: str, name: str) -> None:
    faulty.rule = lambda r: _DENIED if r.operation == operation and r.key.endswith(name) else None


def _logged(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """What the user sees in the log. (Nobody sees what DCP logs of each of its steps.)"""
    return [r.getMessage() for r in caplog.records if r.levelno >= level and not r.name.startswith("c10d-")]


_NOT_SHOWN = re.escape(f"{Path(dcp_s3.__file__).parent}/") + "|boto|urllib3"  # a clone may be called dcp_s3, too


def _our_frames(text: str) -> list[str]:
    """The files of dcp_s3, botocore and urllib3 in tracebacks."""
    return [Path(file).name for file in re.findall(r'File "([^"]*)"', text) if re.search(_NOT_SHOWN, file)]


def test_failures_that_nobody_looks_at_are_one_line_each_on_standard_error(
    faulty: FaultyServer, interpreter: Interpreter
) -> None:
    """In a process of the user's, which does nothing about logging."""
    faulty.rule = lambda r: (
        _DENIED
        if r.operation == "PutObject" and r.key.endswith(".distcp" if "/data" in r.key else ".metadata")
        else None
    )
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT, _URL]
    done = interpreter.run(command, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    staging, *uploads = sorted(done.stderr.splitlines())
    for line, name in zip(uploads, ["commit", "data", "data-alone", "data-staged"], strict=True):
        start = f"the asynchronous save to {_URL}/{name} failed on rank 0: AccessDeniedError: PutObject on s3://"
        assert line.startswith(start)
        assert line.count("Remedy: the credentials need s3:PutObject") == 1
    assert staging.startswith("the asynchronous save failed: its state could not be staged: StagingError: ")
    assert "DCP_S3_STAGING_LIMIT" in staging


def _fail_on_rank_1(url: str, staging: str) -> list[str]:
    lines, told = list[str](), list[str]()
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dcp_s3").addHandler(handler)
    events.subscribe(lambda event: told.append(type(event).__name__))
    rank = dist.get_rank()
    stager = S3Stager({"staging_limit": "1MiB"} if rank == 1 and staging == "fails" else {}, asynchronous=True)
    answer: Any = dcp.async_save(
        {f"of rank {rank}": torch.ones(1_000_000)}, storage_writer=S3StorageWriter(url), async_stager=stager
    )
    assert isinstance(answer, AsyncSaveResponse)
    assert answer.upload_completion.exception(_PATIENCE_SECONDS) is not None
    until(lambda: bool(lines) and "SaveFailed" in told)  # told and logged after the future is done
    assert told.count("SaveFailed") == 1
    dist.barrier()
    assert dcp_s3.stats().saves.failed == 1
    return lines


@pytest.mark.parametrize("staging", ["passes", "fails"])
def test_the_rank_that_failed_logs_why_and_the_first_one_that_it_is_not_committed(
    faulty: FaultyServer, staging: str
) -> None:
    if staging == "passes":
        faulty.rule = lambda r: _DENIED if r.operation == "PutObject" and "/__1_" in r.key else None
    cause = "AccessDeniedError: PutObject on " if staging == "passes" else "StagingError: "
    (first,), (*_, line) = run_ranks(2, _fail_on_rank_1, _URL, staging)
    assert line.startswith(f"the asynchronous save of step 1 to {_URL} failed on rank 1: {cause}")
    assert line.count("AccessDeniedError") == (staging == "passes")
    assert "failed on rank 0: CheckpointError: it was not committed: another rank failed" in first


class _BrokenPlanner(DefaultSavePlanner):
    def create_global_plan(self, *_: Any) -> Any:
        raise ZeroDivisionError("in the planner")


def test_what_fails_outside_of_dcp_s3_is_logged_and_keeps_its_frames(
    faulty: FaultyServer, caplog: pytest.LogCaptureFixture
) -> None:
    planner = _BrokenPlanner()
    future: Any = dcp.async_save({"w": torch.ones(3)}, storage_writer=S3StorageWriter(_URL), planner=planner)
    with pytest.raises(CheckpointException, match="in create_global_plan"):
        future.result(_PATIENCE_SECONDS)
    until(lambda: bool(_logged(caplog, logging.ERROR)))  # whoever waits for a future is woken before it is logged
    (message,) = _logged(caplog, logging.ERROR)
    assert f"to {_URL} failed on rank 0: CheckpointError: it was not committed: " in message
    assert "the future of dcp.async_save has the error" in message


def test_saves_that_succeed_and_saves_that_raise_to_their_caller_log_nothing(
    faulty: FaultyServer, caplog: pytest.LogCaptureFixture
) -> None:
    future: Any = dcp.async_save({"w": torch.ones(3)}, storage_writer=S3StorageWriter(_URL))
    future.result(_PATIENCE_SECONDS)
    _deny(faulty, "PutObject", ".distcp")
    with pytest.raises(CheckpointException):
        dcp.save({"w": torch.ones(3)}, storage_writer=S3StorageWriter(f"{_URL}0"))
    with ThreadPoolExecutor(1) as pool:  # of the user's, who waits
        error = pool.submit(dcp.save, {"w": torch.ones(3)}, storage_writer=S3StorageWriter(f"{_URL}1")).exception()
    assert isinstance(error, CheckpointException)
    pickle.dumps(S3StorageWriter(_URL))
    assert _logged(caplog, logging.ERROR) == []


_STATE = {"model": {"weight": torch.ones(4, 3), "bias": torch.ones(3)}, "epoch": 3}
_MOST_LINES = 15  # beside the frames of torch


def _save(url: str = _URL, **more: Any) -> None:
    dcp.save(_STATE | more, storage_writer=S3StorageWriter(url))


def _load(state: dict[str, Any], url: str = _URL) -> None:
    dcp.load(state, storage_reader=S3StorageReader(url), planner=S3LoadPlanner())


_MISTAKES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "no credentials": (_save, ("Unable to locate credentials", "AWS_ACCESS_KEY_ID|AWS_PROFILE|aws configure")),
    "endpoint down": (_save, ("127.0.0.1:9", "DCP_S3_ENDPOINT_URL|endpoint")),
    "missing bucket": (lambda: _save("s3://bukket/run/step-1"), ("bukket", "BucketNotFoundError")),
    "denied .metadata": (_save, ("AccessDeniedError: PutObject on", "s3:PutObject")),
    "existing checkpoint": (lambda: [_save(), _save()], ("CheckpointExistsError", "overwrite=True", _URL)),
    "a reader given to a save": (
        lambda: dcp.save(_STATE, storage_writer=S3StorageReader(_URL)),  # type: ignore[arg-type]
        ("dcp.save was given an S3StorageReader", r"storage_writer=S3StorageWriter\(url\)"),
    ),
    "no checkpoint": (lambda: _load({}), (rf"there is no committed checkpoint at\s+{_URL}", "check the URL")),
    "denied .distcp": (lambda: _load({"epoch": 0}), ("AccessDeniedError: GetObject on", "s3:GetObject")),
    "saved: other shapes": (
        lambda: _load({"model": {"weight": torch.ones(3, 4), "bias": torch.ones(4)}}),
        (r"between saved \(4, 3\) and current \(3, 4\) for model.weight", r"model\.bias \(saved \(3,\), current"),
    ),
    "saved: missing keys": (
        lambda: _load({"weight": torch.ones(4, 3), "bias": torch.ones(3)}),
        ("Missing key in checkpoint state_dict: bias and 1 more", r"for\s+example\s+\{'model':\s+state\}"),
    ),
    "unsafe object": (
        lambda: [_save(arguments=argparse.Namespace(lr=1)), _load({"arguments": None})],
        ("UnsafeItemError", "arguments", "add_safe_globals|weights_only"),
    ),
}


@pytest.mark.parametrize("name", _MISTAKES)
def test_a_mistake_is_one_message_with_its_remedy_and_none_of_our_frames(
    name: str, faulty: FaultyServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    act, says = _MISTAKES[name]
    if name == "no credentials":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    if name == "endpoint down":
        monkeypatch.setenv("DCP_S3_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("DCP_S3_RETRY_ATTEMPTS", "2")
    if name.startswith("saved") or name == "denied .distcp":
        _save()
    if name.startswith("denied"):
        _deny(faulty, "PutObject" if name.endswith(".metadata") else "GetObject", name.removeprefix("denied "))
    with pytest.raises(CheckpointException) as caught:
        act()
    text = "".join(traceback.format_exception(caught.value))
    assert text.startswith("Traceback"), text
    assert _our_frames(text) == [], text
    assert "During handling" not in text
    assert "direct cause" not in text
    assert len(re.findall(r"^dcp_s3\.errors\.\w+: ", text, re.MULTILINE)) == 1
    assert text.count("Remedy: ") == (name != "unsafe object"), text  # which says how, in words of its own
    for pattern in says:
        assert re.search(pattern, text, re.DOTALL), f"{pattern} is not in:\n{text}"
    lines = [line for line in text.splitlines() if line and not line.startswith(("  File ", "    "))]
    assert len(lines) <= _MOST_LINES, text
    # torch says of whatever its loader catches that there is no metadata.
    assert _logged(caplog, logging.ERROR) == []


def _failures(url: str) -> tuple[list[tuple[Any, ...]], str]:
    state = {f"of rank {dist.get_rank()}": torch.ones(1000)}
    try:
        dcp.save(state, storage_writer=S3StorageWriter(url))
    except CheckpointException as error:
        causes: Any = [cause for cause, _ in error.failures.values()]
        told = [(type(cause), cause.bucket, cause.operation, cause.attempts, cause.key) for cause in causes]
        return told, "".join(traceback.format_exception(error))
    raise AssertionError("nothing failed")


def test_each_rank_is_told_of_all_without_frames(faulty: FaultyServer) -> None:
    _deny(faulty, "PutObject", ".distcp")
    for told, text in run_ranks(4, _failures, _URL):
        assert [each[:4] for each in told] == [(errors.AccessDeniedError, BUCKET, "PutObject", 1)] * 4
        assert [key.startswith(f"run/step-1/__{rank}_") for rank, (*_, key) in enumerate(told)] == [True] * 4
        assert _our_frames(text) == []
        assert text.count("Traceback (most recent call last): (RANK ") == 4


def test_the_frames_are_in_the_log_at_level_debug(faulty: FaultyServer, caplog: Any) -> None:
    _deny(faulty, "GetObject", ".metadata")
    with caplog.at_level(logging.DEBUG, "dcp_s3.failures"), pytest.raises(errors.DcpS3Error) as caught:
        S3StorageReader(_URL).read_metadata()
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert [Path(entry.path).name for entry in caught.traceback][-1] == "failures.py"
    (record,) = caplog.records
    assert "read_metadata" in record.getMessage()
    assert record.exc_info[1] is caught.value
    assert len(_our_frames(caplog.text)) > 1
