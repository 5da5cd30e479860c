"""Runs the demo, on a server of its own or below a URL: act by act, each with what it must show."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

import dcp_s3
from dcp_s3.errors import CheckpointNotFoundError, DcpS3Error
from dcp_s3.rank_processes import RankProcesses
from dcp_s3.retention.plan import Plan
from dcp_s3.s3.client import get_client
from dcp_s3.s3.store import store_of
from dcp_s3.settings import Settings
from dcp_s3.units import format_size, plural
from dcp_s3.url import parse_url

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


def run_demo(url: str | None, *, keep: bool, plan_table: Callable[[Plan], Table]) -> bool:
    """Run the demo, print what happens, and return whether everything that it promises held.

    Changes this process's environment so that it leads to the demo's server: moto's, in this process, or with ``url``
    that of a real bucket, by AWS's own chain; the demo makes a new directory below it. ``keep`` keeps the local
    directory with the workers' logs and digests. ``plan_table`` draws what retention keeps and deletes.
    """
    demo = Demo(Path(tempfile.mkdtemp(prefix="dcp-s3-demo-")), limit=150.0 if url is None else 1800.0)
    try:
        with contextlib.ExitStack() as stack:
            if url is None:
                demo.act("An S3 server", "moto, inside this process: nothing to install, nothing is left.")
                demo.say(f"{demo.root} at {stack.enter_context(embedded_server('demo'))}")
            else:
                demo.root = f"{url.rstrip('/')}/demo-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
                demo.act("Your bucket", f"Everything goes below {demo.root}")
            os.environ.update({name: value for name, value in _SLOW_UPLOADS.items() if name not in os.environ})
            dcp_s3.latest(demo.root)  # fails here, with a clear message, if the bucket cannot be reached
            if url is not None:
                stack.callback(demo.say_how_to_remove)
            return demo.run(plan_table)
    except ModuleNotFoundError as error:
        demo.raw(f"{error}. Remedy: pip install 'moto[server]>=5.1'", style="bold red")
    except (DemoError, DcpS3Error, BotoCoreError, ClientError) as error:
        demo.raw(f"The demo has failed: {error}", style="bold red")
    except KeyboardInterrupt:
        demo.raw("Interrupted; nothing is left running.", style="bold red")
        raise
    finally:
        if keep:
            demo.raw("", "Logs and digests", f"   {demo.folder}")
        else:
            shutil.rmtree(demo.folder, ignore_errors=True)
    return False


class Demo:
    """The acts, and what they print. ``limit`` is in seconds, for one run of the training."""

    def __init__(self, folder: Path, limit: float) -> None:
        self.root, self.folder, self.limit = "s3://demo/run", folder, limit
        self.console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
        self.checks: list[tuple[bool, str]] = []
        self.acts = self.runs = self.shown = 0
        self.began = time.monotonic()

    def run(self, plan_table: Callable[[Plan], Table]) -> bool:
        """All acts in their order, then what held."""
        killed = self.train_and_kill()
        newest = self.look_at(killed)
        self.restart(newest, killed)
        self.compare(newest)
        self.list_all(killed)
        self.retain(killed, plan_table)
        self.console.print(f"\n[bold]What you saw[/]  [dim]({time.monotonic() - self.began:.0f} s)[/]")
        for holds, text in self.checks:
            self.say(f"{'[bold green]PASS[/]' if holds else '[bold red]FAIL[/]'} {text}")
        return all(holds for holds, _ in self.checks)

    def train_and_kill(self) -> StepDirectory:
        """Train, and kill all ranks in the middle of a save. Returns what is left of that save."""
        self.act(
            f"Training on {BEFORE} ranks",
            f"A transformer sharded with FSDP2 learns Python's standard library. Every {SAVE_EVERY} steps, "
            "async_save: the steps go on while the checkpoint is on its way to S3.",
        )
        for _ in range(MAX_KILLS):
            with self.train(BEFORE, steps=100 * SAVE_EVERY, save_every=SAVE_EVERY) as workers:
                for _ in self.watch(workers, interval=0.02):
                    found = look(self.root)
                    if sum(each.committed for each in found) >= COMPLETE_BEFORE_KILL and _interrupted(found):
                        break
                else:
                    raise DemoError("the training ended before a save could be interrupted")
                workers.kill()
                self.show_training(workers)
            time.sleep(SETTLE)
            if left := _interrupted(look(self.root)):
                return left[-1]
            self.say("That save was complete before the kill came. The next one, then.")
        raise DemoError(f"{MAX_KILLS} saves in a row were complete before they could be interrupted")

    def look_at(self, killed: StepDirectory) -> dcp_s3.CheckpointInfo:
        """Look at what the kill left. Returns the checkpoint to restart from."""
        left = (
            f"{plural(killed.objects, 'data object')} ({format_size(killed.size)}), {plural(killed.uploads, 'upload')} "
        )
        self.act(
            "SIGKILL in the middle of a save",
            f"Every rank is dead, at once: no handler ran, nothing was cleaned up. S3 has {left} still open of "
            f"[bold]{killed.name}[/], and no .metadata, which is written last and makes a checkpoint.",
        )
        self.check(
            not killed.committed and killed.objects > 0, f"the kill interrupted a save: {killed.name} has {left} open"
        )
        try:
            dcp_s3.S3StorageReader(f"{self.root}/{killed.name}").read_metadata()
            refused = False
        except CheckpointNotFoundError:
            refused = True
        newest = dcp_s3.latest(self.root)
        if newest is None:
            raise DemoError(f"dcp_s3.latest found no complete checkpoint at {self.root}")
        self.say(f"Loading it anyway: {'CheckpointNotFoundError' if refused else '[bold red]it was loaded[/]'}")
        self.say(f"dcp_s3.latest(root): [bold]{newest.name}[/]")
        self.check(
            refused and newest.name == self.complete()[-1] and newest.name != killed.name,
            f"it is invisible: latest() is {newest.name}, loading {killed.name} is refused",
        )
        return newest

    def restart(self, newest: dcp_s3.CheckpointInfo, killed: StepDirectory) -> None:
        """Go on with other ranks, up to the step before the interrupted one, whose leftovers stay visible."""
        self.act(
            f"Restart on {AFTER} ranks",
            "Another number of ranks than those that saved: every rank reads from S3 the byte ranges that it "
            f"now needs. Then the training goes on from {newest.name} and saves again. The losses are those that "
            "you have seen at these steps before the kill, up to rounding.",
        )
        answers: list[str | None] = [newest.name]
        with self.train(AFTER, steps=int(killed.name.rpartition("-")[2]) - 1, save_every=SAVE_EVERY // 2) as workers:
            answers += [self.latest_name() for _ in self.watch(workers, interval=0.5)]
        answers.append(self.latest_name())
        complete = [name for name in self.complete() if name > newest.name]
        self.check(
            len(complete) > 0 and answers[-1] == complete[-1] and killed.name not in answers,
            f"training went on: {', '.join(complete) or 'nothing'} saved by {AFTER} ranks; "
            f"latest(), asked {len(answers)} times, never named {killed.name}",
        )

    def compare(self, newest: dcp_s3.CheckpointInfo) -> None:
        """Compare the restored state with the saved one."""
        self.act(
            "The same bits?",
            "SHA-256 over the whole state, gathered from the ranks (weights, AdamW's moments, step): before the "
            "save, and again after the restore.",
        )
        events = [json.loads(line) for line in (self.folder / "digests.jsonl").read_text().splitlines()]
        digests = []
        for event, ranks in (("saved", BEFORE), ("restored", AFTER)):
            wanted = {"event": event, "step": newest.step, "ranks": ranks}
            found = [each["sha256"] for each in events if wanted.items() <= each.items()]
            if not found:
                raise DemoError(f"the training has not recorded that it {event} step {newest.step}")
            digests.append(found[-1])
            self.say(f"{event:8}  step {newest.step}  on {ranks} ranks  {found[-1]}")
        same = digests[0] == digests[1]
        self.check(
            same,
            f"the state restored on {AFTER} ranks is {'' if same else 'NOT '}bit-identical to "
            f"the one saved on {BEFORE} (step {newest.step})",
        )

    def list_all(self, killed: StepDirectory) -> None:
        """Show what is on S3 in a table."""
        self.act("What lies on S3", "Seen by a listing; state and ranks are what dcp_s3.list_checkpoints says.")
        found, latest = look(self.root), self.latest_name()
        infos = {info.name: info for info in dcp_s3.list_checkpoints(self.root) if info.committed}
        table = Table(
            "checkpoint", "state", "ranks", "objects", "size", "open uploads", title=self.root, box=box.SIMPLE_HEAD
        )
        for each in found:
            state, info = "[red]incomplete (invisible)[/]", infos.get(each.name)
            if info is not None:
                state = f"[green]committed{', latest' if info.name == latest else ''}[/]"
            ranks = "-" if info is None else str(info.world_size)
            table.add_row(each.name, state, ranks, str(each.objects), format_size(each.size), str(each.uploads or "-"))
        self.console.print(Padding(table, (1, 0, 0, 2), expand=False))
        self.check(
            set(infos) == {each.name for each in found if each.committed} and killed.name not in infos,
            "list_checkpoints() calls committed exactly what has a .metadata",
        )

    def retain(self, killed: StepDirectory, plan_table: Callable[[Plan], Table]) -> None:
        """Delete what no policy keeps, and what the kill left."""
        policy = dcp_s3.KeepLatest(1)
        self.act(
            "Retention",
            f"The first checkpoint is pinned. The policy [bold]{policy}[/] keeps one more. "
            f"The leftovers of {killed.name} would be safe for 24 hours, as a save that may still go on. Here the "
            "grace period is 0, because nothing is being saved any more.",
        )
        first, *_, last = self.complete()
        dcp_s3.pin(f"{self.root}/{first}", "shown in the demo")
        report = dcp_s3.prune(self.root, policy, grace=0, force=True)
        self.console.print(Padding(plan_table(report.plan), (1, 0, 0, 2), expand=False))
        left = look(self.root)
        self.check(
            report.ok
            and {each.name for each in left if each.objects or each.uploads} == {first, last}
            and not any(each.uploads for each in left)
            and dcp_s3.verify(f"{self.root}/{last}").ok
            and self.latest_name() == last,
            f"retention left {first} and {last}, whole; the others and the leftovers of "
            f"{killed.name} are gone ({format_size(report.size)})",
        )

    def check(self, holds: bool, text: str) -> None:
        self.checks.append((holds, text))

    def complete(self) -> list[str]:
        return [each.name for each in look(self.root) if each.committed]

    def latest_name(self) -> str | None:
        newest = dcp_s3.latest(self.root)
        return None if newest is None else newest.name

    def train(self, ranks: int, *, steps: int, save_every: int) -> RankProcesses:
        self.runs += 1
        self.shown = 0
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
            self.show_training(workers)
            if time.monotonic() > deadline:
                raise DemoError(f"the training on {workers.ranks} ranks took over {self.limit:.0f} s")
            yield
            time.sleep(interval)

    # --- printing ---

    def act(self, title: str, why: str) -> None:
        self.acts += 1
        self.console.print(f"\n[bold cyan]{self.acts}  {title}[/]")
        self.say(why)

    def say(self, text: str) -> None:
        self.console.print(Padding(text, (0, 0, 0, 3), expand=False))

    def raw(self, *lines: str, style: str = "") -> None:
        """Lines as they are, to be copied: no markup, not wrapped."""
        for line in lines:
            self.console.print(line, style=style, markup=False, soft_wrap=True)

    def show_training(self, workers: RankProcesses) -> None:
        lines = workers.lines(0)
        self.raw(*(f"     {workers.ranks} ranks | {line}" for line in lines[self.shown :]), style="dim")
        self.shown = len(lines)

    def say_how_to_remove(self) -> None:
        """First what no checkpoint needs, open uploads too."""
        endpoint, url = Settings().endpoint_url, shlex.quote(f"{self.root}/")
        aws = f"aws --endpoint-url {shlex.quote(endpoint)}" if endpoint else "aws"
        self.raw("", "To remove what the demo has left on S3", f"   dcp-s3 prune {url} --grace 0 --force --yes")
        self.raw(f"   {aws} s3 rm --recursive {url}")


@dataclass
class StepDirectory:
    """What a listing shows below one step's URL: data objects, bytes of all objects, open multipart uploads."""

    name: str
    committed: bool = False
    objects: int = 0
    size: int = 0
    uploads: int = 0


def look(root: str) -> list[StepDirectory]:
    """All directories below a URL, by name."""
    url, settings = parse_url(root), Settings()
    store = store_of(url, settings)
    found: dict[str, StepDirectory] = {}

    def split(key: str) -> tuple[StepDirectory, str]:
        name, _, path = key.removeprefix(url.key("")).partition("/")
        return found.setdefault(name, StepDirectory(name)), path

    for each in store.list(url.key("")).objects:
        directory, path = split(each.key)
        directory.committed |= path == ".metadata"
        directory.objects += path.endswith(".distcp")
        directory.size += each.size
    for upload in store.uploads(url.key("")):
        split(upload.key)[0].uploads += 1
    return [found[name] for name in sorted(found)]


def _interrupted(found: Sequence[StepDirectory]) -> list[StepDirectory]:
    return [each for each in found if not each.committed and each.objects]


@contextlib.contextmanager
def embedded_server(bucket: str) -> Iterator[str]:
    """Run moto's S3 in this process, make a bucket, and yield the endpoint's URL.

    Replaces everything in the environment that leads to a real S3: the demo must not go there unasked.
    """
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)  # otherwise it logs a line per request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        for name in list(os.environ):
            if name.startswith(("AWS_", "DCP_S3_")) or name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
                del os.environ[name]
        os.environ |= {
            "DCP_S3_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "demo",
            "AWS_SECRET_ACCESS_KEY": "demo",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        get_client(Settings()).create_bucket(Bucket=bucket)
        yield endpoint
    finally:
        server.stop()
