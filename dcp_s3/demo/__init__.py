"""The demo: a training run is killed in the middle of a save and restarted. `train` is the training script."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import ProcessException

import dcp_s3
from dcp_s3.bench import ranks_here
from dcp_s3.demo import train
from dcp_s3.errors import CheckpointNotFoundError, DcpS3Error
from dcp_s3.s3.client import get_client
from dcp_s3.settings import Settings, environment
from dcp_s3.units import format_size, plural

ROOT = "s3://demo/run"
BEFORE, AFTER = 2, 3  # ranks
SAVE_EVERY = 8
COMPLETE_BEFORE_KILL = 2  # checkpoints, so that there is more than one to choose from
MAX_KILLS = 5  # a save may commit between the look and the kill; then the next one is killed
SETTLE = 1.0  # seconds until S3 serves no more requests of a killed process


class DemoError(Exception):
    """The demo cannot go on."""


def run_demo() -> bool:
    """Run the demo, print what happens, and return whether everything that it promises held.

    Changes this process's environment so that it leads to an S3 server of its own, in this process.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dcp-s3-demo-")))
        try:
            stack.enter_context(embedded_server("demo"))
            killed = _kill(folder)
            checks, newest = _look_at(killed)
            checks += [*_restart(folder, newest, killed), _retain(killed)]
        except ModuleNotFoundError as error:
            _print(f"{error}. Remedy: pip install 'moto[server]>=5.1'")
        except (DemoError, DcpS3Error) as error:
            _print(f"The demo has failed: {error}")
        else:
            _print("\nWhat you saw")
            for holds, text in checks:
                _print(f"   {'PASS' if holds else 'FAIL'} {text}")
            return all(holds for holds, _ in checks)
    return False


def _kill(folder: Path) -> dcp_s3.CheckpointInfo:
    """Train, and kill all ranks in the middle of a save. Returns what is left of that save."""
    _act(
        f"1  Training on {BEFORE} ranks",
        "A transformer sharded with FSDP2 learns Python's standard library and saves to "
        f"{ROOT} every {SAVE_EVERY} steps. The steps go on while the checkpoint is on its way.",
    )
    for _ in range(MAX_KILLS):
        with training(folder, BEFORE, steps=100 * SAVE_EVERY, save_every=SAVE_EVERY) as ranks:
            while not (_interrupted() and len(_complete()) >= COMPLETE_BEFORE_KILL):
                ranks.join(0.02)  # raises if one has failed
        time.sleep(SETTLE)
        if left := _interrupted():
            return left[-1]
        _print("   That save was complete before the kill came. The next one, then.")
    raise DemoError(f"{MAX_KILLS} saves in a row were complete before they could be interrupted")


def _look_at(killed: dcp_s3.CheckpointInfo) -> tuple[list[tuple[bool, str]], dcp_s3.CheckpointInfo]:
    """Look at what the kill left. Returns what held, and the checkpoint to restart from."""
    left = f"{plural(killed.objects or 0, 'data object')} ({format_size(killed.size or 0)})"
    _act(
        "2  SIGKILL in the middle of a save",
        f"Every rank is dead, at once: no handler ran, nothing was cleaned up. S3 has {left} of {killed.name}, and "
        "no .metadata, which is written last and makes a checkpoint.",
    )
    newest = dcp_s3.latest(ROOT)
    if newest is None:
        raise DemoError(f"dcp_s3.latest found no complete checkpoint at {ROOT}")
    refused = False
    try:
        dcp_s3.S3StorageReader(killed.url).read_metadata()
    except CheckpointNotFoundError:
        refused = newest.name == _complete()[-1] != killed.name
    return [
        (not killed.committed, f"the kill interrupted a save: {killed.name} has {left}"),
        (refused, f"it is invisible: latest() is {newest.name}, loading {killed.name} is refused"),
    ], newest


def _restart(folder: Path, newest: dcp_s3.CheckpointInfo, killed: dcp_s3.CheckpointInfo) -> Iterator[tuple[bool, str]]:
    """Go on with other ranks, up to the step before the interrupted one, whose leftovers stay visible; and compare the
    state that they restored with the saved one."""
    _act(
        f"3  Restart on {AFTER} ranks",
        "Another number of ranks than those that saved: every rank reads from S3 the byte ranges that it "
        f"now needs. Then the training goes on from {newest.name} and saves again. The losses are those that "
        "you have seen at these steps before the kill, up to rounding.",
    )
    with training(folder, AFTER, steps=(killed.step or 0) - 1, save_every=SAVE_EVERY // 2) as ranks:
        while not ranks.join():
            pass
    new = [name for name in _complete() if name > newest.name]
    went_on = bool(new) and killed.name not in new
    yield went_on, f"training went on: {', '.join(new) or 'nothing'} saved by {AFTER} ranks"
    _act(
        "4  The same bits?",
        "SHA-256 over the whole state, gathered from the ranks (weights, AdamW's moments, step): before the "
        "save, and again after the restore.",
    )
    lines = map(json.loads, (folder / "digests.jsonl").read_text().splitlines())
    digests = {(each["event"], each["step"], each["ranks"]): each["sha256"] for each in lines}
    saved, restored = (digests.get((e, newest.step, n)) for e, n in (("saved", BEFORE), ("restored", AFTER)))
    _print(f"   saved on {BEFORE} ranks     {saved}\n   restored on {AFTER} ranks  {restored}")
    same = saved is not None and saved == restored
    yield (
        same,
        f"the state restored on {AFTER} ranks is {'' if same else 'NOT '}bit-identical to "
        f"the one saved on {BEFORE} (step {newest.step})",
    )


def _retain(killed: dcp_s3.CheckpointInfo) -> tuple[bool, str]:
    """Delete what no policy keeps, and what the kill left."""
    _act(
        "5  Retention",
        "The first checkpoint is pinned. The policy latest:1 keeps one more. "
        f"The leftovers of {killed.name} would be safe for 24 hours, as a save that may still go on. Here the "
        "grace period is 0, because nothing is being saved any more.",
    )
    first, *_, last = _complete()
    dcp_s3.pin(f"{ROOT}/{first}", "shown in the demo")
    report = dcp_s3.prune(ROOT, "latest:1", grace=0, force=True)
    for each in report.plan.decisions:
        _print(f"   {each.action:6}  {each.checkpoint.name}  {'; '.join(each.reasons)}")
    left = dcp_s3.prune(ROOT, "latest:1", grace=0, force=True, dry_run=True).plan
    return (
        report.ok and left.empty and _complete() == [first, last] and dcp_s3.verify(f"{ROOT}/{last}").ok,
        f"retention left {first} and {last}, whole; the others and the leftovers of "
        f"{killed.name} are gone ({format_size(report.size)})",
    )


def _print(text: str) -> None:
    print(text, flush=True)


def _act(title: str, why: str) -> None:
    _print(f"\n{title}\n{textwrap.indent(textwrap.fill(why, 100), '   ')}")


def _complete() -> list[str]:
    return [each.name for each in dcp_s3.list_checkpoints(ROOT) if each.committed]


def _interrupted() -> list[dcp_s3.CheckpointInfo]:
    return [each for each in dcp_s3.list_checkpoints(ROOT) if not each.committed and each.objects]


@contextlib.contextmanager
def training(folder: Path, ranks: int, *, steps: int, save_every: int) -> Iterator[Any]:
    """The training script on so many ranks, which print their steps. Leaving the context kills all of them at the same
    instant, with nobody left to clean up."""
    options = ["--url", ROOT, "--steps", str(steps), "--save-every", str(save_every)]
    options += ["--digest-file", str(folder / "digests.jsonl")]
    try:
        with environment(OMP_NUM_THREADS="1"), ranks_here(ranks, train.main, options) as running:
            yield running
    except ProcessException as error:
        raise DemoError(f"the training failed on rank {error.error_index}:\n{error}") from None


@contextlib.contextmanager
def embedded_server(bucket: str) -> Iterator[None]:
    """Run moto's S3 in this process, and make a bucket.

    Replaces everything in the environment that leads to a real S3: the demo must not go there. Small parts, few at a
    time: a state of 60 MB is then uploaded like one of many gigabytes, and takes long enough to be interrupted.
    """
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)  # otherwise it logs a line per request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name in list(os.environ):
            if name.startswith(("AWS_", "DCP_S3_")) or name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
                del os.environ[name]
        os.environ |= {
            "DCP_S3_ENDPOINT_URL": f"http://{host}:{port}", "DCP_S3_PART_SIZE": "5MiB", "DCP_S3_CONCURRENCY": "1",
            "AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demo", "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
        get_client(Settings()).create_bucket(Bucket=bucket)
        yield
    finally:
        server.stop()
