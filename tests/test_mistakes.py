"""The likeliest mistakes, made for real: a script as a user writes it, in processes of its own.

Whatever the processes print counts, standard error and output of all ranks: the message names the thing and the remedy.
Beside the frames of tracebacks there are at most 15 lines at 1 rank and 40 at 4: torch raises the failures of all ranks
on each of them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.faulty import FaultyServer
from tests.interpreter import Interpreter
from tests.memory_s3 import Fault

_MOST_LINES = {1: 15, 4: 40}

_START = """
import os, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from dcp_s3 import CheckpointManager, S3LoadPlanner, S3Stager, S3StorageReader, S3StorageWriter

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if WORLD > 1:
    dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=RANK, world_size=WORLD)
URL = "s3://bucket/run/step-1000"
state = {"model": {"weight": torch.ones(4, 3), "bias": torch.ones(3), f"of-{RANK}": torch.ones(10)}, "epoch": 3}
"""
_SAVED = "dcp.save(state, storage_writer=S3StorageWriter(URL))\n"


@dataclass(frozen=True)
class Mistake:
    """A script that makes a mistake, and what has to be said."""

    script: str
    says: tuple[str, ...]
    """Regular expressions, each found in what is printed."""
    once: str
    """A regular expression that is found exactly once at 1 rank: the cause in full."""
    environment: dict[str, str] = field(default_factory=dict)
    rule: Callable[[Any], Fault | None] = lambda _: None
    ends: int = 1
    """Exit status of every rank."""
    before: str = ""
    """A script that ran before, and went well: its output does not count."""
    logged: bool = False
    """Whether it is logged as well as raised: somebody may not look."""


def _refuse(operation: str, name: str = "", *, code: str = "AccessDenied", status: int = 403) -> Any:
    return lambda r: (
        Fault.error(status, code) if r.operation in operation.split() and r.key.endswith(name) and r.key else None
    )


_UPLOADS = "PutObject UploadPart CreateMultipartUpload"
_MISTAKES = {
    "no credentials": Mistake(
        _SAVED,
        ("Unable to locate credentials", "AWS_ACCESS_KEY_ID|AWS_PROFILE|aws configure"),
        "Remedy: ",
        {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
    ),
    "missing bucket": Mistake(
        'dcp.save(state, storage_writer=S3StorageWriter("s3://bukket/run/step-1"))', ("bukket", "BucketNotFoundError"),
        "Remedy: ",
    ),
    "PutObject denied": Mistake(_SAVED, ("AccessDeniedError: PutObject on", "s3:PutObject"), "Remedy: ",
                                rule=_refuse(_UPLOADS, ".distcp")),
    "PutObject denied to a manager": Mistake(
        'with CheckpointManager("s3://bucket/run") as manager:\n    manager.save(1000, state)',
        ("the save of step 1000 to s3://bucket/run/step-00001000 failed", "s3:PutObject", "Last good: none"),
        "Remedy: ", rule=_refuse(_UPLOADS, ".distcp"), logged=True,
    ),
    "endpoint down": Mistake(
        _SAVED, ("127.0.0.1:9", "DCP_S3_ENDPOINT_URL|endpoint"), "Remedy: ",
        {"DCP_S3_ENDPOINT_URL": "http://127.0.0.1:9", "DCP_S3_RETRY_ATTEMPTS": "2"},
    ),
    "existing checkpoint": Mistake(_SAVED + _SAVED, ("CheckpointExistsError", "overwrite=True", (
        "s3://bucket/run/step-1000")), "Remedy: "),
    "other shapes": Mistake(
        'dcp.load({"model": {"weight": torch.ones(3, 4), "bias": torch.ones(4)}}, '
        "storage_reader=S3StorageReader(URL), planner=S3LoadPlanner())",
        (r"between saved \(4, 3\) and current \(3, 4\) for model.weight", r"model\.bias \(saved \(3,\), current"),
        "Remedy: ", before=_SAVED,
    ),
    "missing keys": Mistake(
        'dcp.load({"weight": torch.ones(4, 3), "bias": torch.ones(3)}, storage_reader=S3StorageReader(URL), '
        "planner=S3LoadPlanner())",
        ("Missing key in checkpoint state_dict: bias and 1 more", r"for\s+example\s+\{'model':\s+state\}"),
        "Remedy: ", before=_SAVED,
    ),
    "a manager that nobody closes": Mistake(
        'manager = CheckpointManager("s3://bucket/run")\nmanager.save(1000, state)',
        ("the save of step 1000 .* failed", "the process ends: step 1000 was not saved", "close the CheckpointManager"),
        "Cause: ", rule=_refuse(_UPLOADS, ".distcp"), ends=0,
    ),
    "a reader given to a save": Mistake(
        "dcp.save(state, storage_writer=S3StorageReader(URL))",
        ("dcp.save was given an S3StorageReader", r"storage_writer=S3StorageWriter\(url\)"), "Remedy: ",
    ),
    "unsafe object": Mistake(
        "dcp.load(state | {'arguments': None}, storage_reader=S3StorageReader(URL))",
        ("UnsafeItemError", "arguments", "add_safe_globals|weights_only"), "UnsafeItemError",
        before="import argparse\nstate['arguments'] = argparse.Namespace(lr=1)\n" + _SAVED,
    ),
    "typo in a setting": Mistake(
        _SAVED, ("DCP_S3_PARTSIZE is set but is not a setting", r"did you mean DCP_S3_PART_SIZE\?"), "PARTSIZE",
        {"DCP_S3_PARTSIZE": "64MiB"}, ends=0,
    ),
    "disk full": Mistake(
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "state[f'large-{RANK}'] = torch.ones(1_000_000)\n" + _SAVED,
        ("an object goes to S3, .*; cannot reserve .* in the spill directory", "set DCP_S3_SPILL_DIR to a larger"),
        "Remedy: ", {"DCP_S3_SPILL_DIR": "SPILL", "DCP_S3_DURABILITY": "local"}, ends=0,
    ),
}  # fmt: skip


def _run(interpreter: Interpreter, directory: Path, script: str, ranks: int) -> tuple[str, list[int]]:
    """What all ranks printed, and the exit status of each."""
    directory.mkdir(exist_ok=True)
    file, programs = directory / "script.py", []
    file.write_text(_START + script)
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "WORLD_SIZE": str(ranks),
        "RENDEZVOUS": f"file://{directory}/rendezvous",
    }
    try:
        with (directory / "out").open("a") as out:
            for rank in range(ranks):
                command, env = [sys.executable, str(file)], environment | {"RANK": str(rank)}
                programs.append(interpreter.popen(command, stdout=out, stderr=out, env=env, cwd=directory))
        codes = [program.wait(240) for program in programs]
    finally:
        for program in programs:
            program.kill()
    return (directory / "out").read_text(), codes


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 1) for name in _MISTAKES), ("PutObject denied", 4), ("existing checkpoint", 4)]
)
def test_one_message_of_few_lines(
    interpreter: Interpreter,
    faulty: FaultyServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    ranks: int,
) -> None:
    mistake = _MISTAKES[name]
    if mistake.before:
        assert _run(interpreter, tmp_path / "before", mistake.before, ranks)[1] == [0] * ranks
    faulty.rule = mistake.rule
    for variable, value in mistake.environment.items():
        monkeypatch.setenv(variable, str(tmp_path / "spill") if value == "SPILL" else value)
    text, codes = _run(interpreter, tmp_path, mistake.script, ranks)
    assert codes == [mistake.ends] * ranks, text
    for pattern in mistake.says:
        assert re.search(pattern, text, re.DOTALL), f"{pattern} is not in:\n{text}"
    said = len(re.findall(mistake.once, text))
    assert said >= 1 if ranks > 1 else said == 1 + mistake.logged, text
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in text.splitlines()]  # of torch
    lines = [line for line in lines if line and not line.startswith(("  File ", "    "))]
    assert len(lines) <= _MOST_LINES[ranks] + mistake.logged, text
