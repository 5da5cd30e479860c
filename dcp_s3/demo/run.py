"""Runs the demo, on a server of its own or below a URL: act by act, each with what it must show."""

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

import dcp_s3
from dcp_s3.bench import RankProcesses
from dcp_s3.errors import CheckpointNotFoundError, DcpS3Error
from dcp_s3.s3.client import get_client
from dcp_s3.settings import Settings
from dcp_s3.units import format_size, plural

BEFORE, AFTER = 2, 3  # ranks
SAVE_EVERY = 8
COMPLETE_BEFORE_KILL = 2  # checkpoints, so that there is more than one to choose from
MAX_KILLS = 5  # a save may commit between the look and the kill; then the next one is killed
SETTLE = 1.0  # seconds until S3 serves no more requests of a killed process

#: Small parts, few at a time: a state of 60 MB is then uploaded like one of many gigabytes, in several multipart
#: uploads at once, and takes long enough to be interrupted.
_SLOW_UPLOADS = {"DCP_S3_PART_SIZE": "5MiB", "DCP_S3_CONCURRENCY": "1"}


class DemoError(Exception):
    """The demo cannot go on."""


def run_demo(url: str | None) -> bool:
    """Run the demo, print what happens, and return whether everything that it promises held.

    Changes this process's environment so that it leads to the demo's server: moto's, in this process, or with ``url``
    that of a real bucket, by AWS's own chain; the demo makes a new directory below it.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dcp-s3-demo-")))
        try:
            root, limit = "s3://demo/run", 150.0
            if url is None:
                stack.enter_context(embedded_server("demo"))
            else:
                root, limit = f"{url.rstrip('/')}/demo-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}", 1800.0
            os.environ.update({name: value for name, value in _SLOW_UPLOADS.items() if name not in os.environ})
            dcp_s3.latest(root)  # fails here, with a clear message, if the bucket cannot be reached
            return Demo(root, folder, limit).run()
        except ModuleNotFoundError as error:
            _print(f"{error}. Remedy: pip install 'moto[server]>=5.1'")
        except (DemoError, DcpS3Error) as error:
            _print(f"The demo has failed: {error}")
    return False


def _print(text: str) -> None:
    print(text, flush=True)


class Demo:
    """The acts, and what they print. ``limit`` is in seconds, for one run of the training."""

    def __init__(self, root: str, folder: Path, limit: float) -> None:
        self.root, self.folder, self.limit = root, folder, limit
        self.checks: list[tuple[bool, str]] = []
        self.acts = self.runs = self.shown = 0

    def run(self) -> bool:
        """All acts in their order, then what held."""
        killed = self.train_and_kill()
        newest = self.look_at(killed)
        self.restart(newest, killed)
        self.compare(newest)
        self.retain(killed)
        _print("\nWhat you saw")
        for holds, text in self.checks:
            _print(f"   {'PASS' if holds else 'FAIL'} {text}")
        return all(holds for holds, _ in self.checks)

    def train_and_kill(self) -> dcp_s3.CheckpointInfo:
        """Train, and kill all ranks in the middle of a save. Returns what is left of that save."""
        self.act(
            f"Training on {BEFORE} ranks",
            "A transformer sharded with FSDP2 learns Python's standard library and saves to "
            f"{self.root} every {SAVE_EVERY} steps. The steps go on while the checkpoint is on its way.",
        )
        for _ in range(MAX_KILLS):
            with self.train(BEFORE, steps=100 * SAVE_EVERY, save_every=SAVE_EVERY) as workers:
                for _ in self.watch(workers, interval=0.02):
                    if self.interrupted() and len(self.complete()) >= COMPLETE_BEFORE_KILL:
                        break
                workers.kill()
            time.sleep(SETTLE)
            if left := self.interrupted():
                return left[-1]
            _print("   That save was complete before the kill came. The next one, then.")
        raise DemoError(f"{MAX_KILLS} saves in a row were complete before they could be interrupted")

    def look_at(self, killed: dcp_s3.CheckpointInfo) -> dcp_s3.CheckpointInfo:
        """Look at what the kill left. Returns the checkpoint to restart from."""
        left = f"{plural(killed.objects or 0, 'data object')} ({format_size(killed.size or 0)})"
        self.act(
            "SIGKILL in the middle of a save",
            f"Every rank is dead, at once: no handler ran, nothing was cleaned up. S3 has {left} of {killed.name}, and "
            "no .metadata, which is written last and makes a checkpoint.",
        )
        self.check(not killed.committed, f"the kill interrupted a save: {killed.name} has {left}")
        newest = dcp_s3.latest(self.root)
        if newest is None:
            raise DemoError(f"dcp_s3.latest found no complete checkpoint at {self.root}")
        try:
            dcp_s3.S3StorageReader(killed.url).read_metadata()
            refused = False
        except CheckpointNotFoundError:
            refused = True
        self.check(
            refused and newest.name == self.complete()[-1] != killed.name,
            f"it is invisible: latest() is {newest.name}, loading {killed.name} is refused",
        )
        return newest

    def restart(self, newest: dcp_s3.CheckpointInfo, killed: dcp_s3.CheckpointInfo) -> None:
        """Go on with other ranks, up to the step before the interrupted one, whose leftovers stay visible."""
        self.act(
            f"Restart on {AFTER} ranks",
            "Another number of ranks than those that saved: every rank reads from S3 the byte ranges that it "
            f"now needs. Then the training goes on from {newest.name} and saves again. The losses are those that "
            "you have seen at these steps before the kill, up to rounding.",
        )
        with self.train(AFTER, steps=(killed.step or 0) - 1, save_every=SAVE_EVERY // 2) as workers:
            for _ in self.watch(workers, interval=0.5):
                pass
        new = [name for name in self.complete() if name > newest.name]
        self.check(
            bool(new) and killed.name not in new,
            f"training went on: {', '.join(new) or 'nothing'} saved by {AFTER} ranks",
        )

    def compare(self, newest: dcp_s3.CheckpointInfo) -> None:
        """Compare the restored state with the saved one."""
        self.act(
            "The same bits?",
            "SHA-256 over the whole state, gathered from the ranks (weights, AdamW's moments, step): before the "
            "save, and again after the restore.",
        )
        digests = {}
        for line in (self.folder / "digests.jsonl").read_text().splitlines():
            found = json.loads(line)
            digests[found["event"], found["step"], found["ranks"]] = found["sha256"]
        saved = digests.get(("saved", newest.step, BEFORE))
        restored = digests.get(("restored", newest.step, AFTER))
        _print(f"   saved on {BEFORE} ranks     {saved}\n   restored on {AFTER} ranks  {restored}")
        same = saved is not None and saved == restored
        self.check(
            same,
            f"the state restored on {AFTER} ranks is {'' if same else 'NOT '}bit-identical to "
            f"the one saved on {BEFORE} (step {newest.step})",
        )

    def retain(self, killed: dcp_s3.CheckpointInfo) -> None:
        """Delete what no policy keeps, and what the kill left."""
        self.act(
            "Retention",
            "The first checkpoint is pinned. The policy latest:1 keeps one more. "
            f"The leftovers of {killed.name} would be safe for 24 hours, as a save that may still go on. Here the "
            "grace period is 0, because nothing is being saved any more.",
        )
        first, *_, last = self.complete()
        dcp_s3.pin(f"{self.root}/{first}", "shown in the demo")
        report = dcp_s3.prune(self.root, "latest:1", grace=0, force=True)
        for each in report.plan.decisions:
            _print(f"   {each.action:6}  {each.checkpoint.name}  {'; '.join(each.reasons)}")
        left = dcp_s3.prune(self.root, "latest:1", grace=0, force=True, dry_run=True).plan
        self.check(
            report.ok and left.empty and self.complete() == [first, last] and dcp_s3.verify(f"{self.root}/{last}").ok,
            f"retention left {first} and {last}, whole; the others and the leftovers of "
            f"{killed.name} are gone ({format_size(report.size)})",
        )

    def act(self, title: str, why: str) -> None:
        self.acts += 1
        _print(f"\n{self.acts}  {title}\n{textwrap.indent(textwrap.fill(why, 100), '   ')}")

    def check(self, holds: bool, text: str) -> None:
        self.checks.append((holds, text))

    def complete(self) -> list[str]:
        return [each.name for each in dcp_s3.list_checkpoints(self.root) if each.committed]

    def interrupted(self) -> list[dcp_s3.CheckpointInfo]:
        return [each for each in dcp_s3.list_checkpoints(self.root) if not each.committed and each.objects]

    def train(self, ranks: int, *, steps: int, save_every: int) -> RankProcesses:
        self.runs, self.shown = self.runs + 1, 0
        arguments = ["--url", self.root, "--steps", str(steps), "--save-every", str(save_every)]
        arguments += ["--digest-file", str(self.folder / "digests.jsonl")]
        # One thread: the ranks share few cores.
        logs = self.folder / f"run{self.runs}"
        return RankProcesses("dcp_s3.demo.train", arguments, ranks, logs, OMP_NUM_THREADS="1")

    def watch(self, workers: RankProcesses, *, interval: float) -> Iterator[None]:
        """Print the workers' output every ``interval`` seconds until they end."""
        deadline = time.monotonic() + self.limit
        statuses: list[int | None] = [None]
        while None in statuses:
            statuses = workers.statuses()
            for rank, status in enumerate(statuses):
                if status:
                    raise DemoError(f"rank {rank} ended with exit status {status}:\n{workers.last_words(rank)}")
            for line in workers.lines(0)[self.shown :]:
                _print(f"     {workers.ranks} ranks | {line}")
                self.shown += 1
            if time.monotonic() > deadline:
                raise DemoError(f"the training on {workers.ranks} ranks took over {self.limit:.0f} s")
            yield
            time.sleep(interval)


@contextlib.contextmanager
def embedded_server(bucket: str) -> Iterator[None]:
    """Run moto's S3 in this process, and make a bucket.

    Replaces everything in the environment that leads to a real S3: the demo must not go there unasked.
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
            "DCP_S3_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "demo",
            "AWS_SECRET_ACCESS_KEY": "demo",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        get_client(Settings()).create_bucket(Bucket=bucket)
        yield
    finally:
        server.stop()
