"""Runs the demo, on a server of its own or below a URL: act by act, each with what it must show."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

import dcp_s3
from dcp_s3.demo.surroundings import BucketView, DemoError, StepDirectory, TrainingProcesses, embedded_server
from dcp_s3.errors import CheckpointNotFoundError, DcpS3Error
from dcp_s3.retention.plan import Plan
from dcp_s3.units import format_size, plural

RANKS_BEFORE, RANKS_AFTER = 2, 3
SAVE_EVERY = 8
COMPLETE_BEFORE_KILL = 2  # checkpoints, so that there is more than one to choose from
MAX_KILLS = 5  # a save may commit between the look and the kill; then the next one is killed
SETTLE = 1.0  # seconds until S3 serves no more requests of a killed process
LIMIT_EMBEDDED, LIMIT_URL = 150.0, 1800.0  # seconds for one run of the training; to a real bucket it may be slow

#: Small parts, few at a time: a state of 60 MB is then uploaded like one of many gigabytes, in several multipart
#: uploads at once, and takes long enough to be interrupted.
_SLOW_UPLOADS = {"DCP_S3_PART_SIZE": "5MiB", "DCP_S3_CONCURRENCY": "1"}


def run_demo(url: str | None, *, keep: bool, plan_table: Callable[[Plan], Table]) -> bool:
    """Run the demo, print what happens, and return whether everything that it promises held.

    Changes this process's environment so that it leads to the demo's server: moto's, in this process, or with ``url``
    that of a real bucket, by AWS's own chain; the demo makes a new directory below it. ``keep`` keeps the local
    directory with the workers' logs and digests. ``plan_table`` draws what retention keeps and deletes.
    """
    folder = Path(tempfile.mkdtemp(prefix="dcp-s3-demo-"))
    screen = Screen()
    started = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            if url is None:
                screen.act("An S3 server", "moto, inside this process: nothing to install, nothing is left.")
                root = "s3://demo/run"
                screen.say(f"{root} at {stack.enter_context(embedded_server('demo'))}")
            else:
                root = f"{url.rstrip('/')}/demo-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
                screen.act("Your bucket", f"Everything goes below {root}")
            for name, value in _SLOW_UPLOADS.items():
                os.environ.setdefault(name, value)
            dcp_s3.latest(root)  # fails here, with a clear message, if the bucket cannot be reached
            demo = Demo(root, folder, LIMIT_EMBEDDED if url is None else LIMIT_URL, screen)
            if url is not None:
                stack.callback(lambda: screen.commands("To remove what the demo has left on S3", demo.bucket.removal()))
            interrupted = demo.train_and_kill()
            newest = demo.look_at(interrupted)
            demo.restart(newest, interrupted)
            demo.compare(newest)
            demo.list_all(interrupted)
            demo.retain(interrupted, plan_table)
        screen.summary(demo.checks, time.monotonic() - started)
        return all(holds for holds, _ in demo.checks)
    except (DemoError, DcpS3Error, BotoCoreError, ClientError) as error:
        screen.error(f"The demo has failed: {error}")
        return False
    except ModuleNotFoundError as error:
        screen.error(f"{error}. Remedy: pip install 'moto[server]>=5.1'")
        return False
    except KeyboardInterrupt:
        screen.error("Interrupted; nothing is left running.")
        raise
    finally:
        if keep:
            screen.commands("Logs and digests", [str(folder)])
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _interrupted(found: Sequence[StepDirectory]) -> list[StepDirectory]:
    return [each for each in found if not each.committed and each.objects]


class Demo:
    """The acts. Call each once, in this order. ``limit`` is in seconds, for one run of the training."""

    def __init__(self, root: str, folder: Path, limit: float, screen: Screen) -> None:
        self.root, self.folder, self.limit, self.screen = root, folder, limit, screen
        self.bucket = BucketView(root)
        self.checks: list[tuple[bool, str]] = []
        """What the demo promises, and whether it held."""
        self._digests = folder / "digests.jsonl"
        self._runs = 0

    def train_and_kill(self) -> StepDirectory:
        """Train, and kill all ranks in the middle of a save. Returns what is left of that save."""
        self.screen.act(
            f"Training on {RANKS_BEFORE} ranks",
            f"A transformer sharded with FSDP2 learns Python's standard library. Every {SAVE_EVERY} steps, "
            "async_save: the steps go on while the checkpoint is on its way to S3.",
        )
        for _ in range(MAX_KILLS):
            with self._train(RANKS_BEFORE, steps=100 * SAVE_EVERY, save_every=SAVE_EVERY) as workers:
                for _ in self._watch(workers, interval=0.02):
                    found = self.bucket.look()
                    if sum(each.committed for each in found) >= COMPLETE_BEFORE_KILL and _interrupted(found):
                        break
                else:
                    raise DemoError("the training ended before a save could be interrupted")
                workers.kill()
                self.screen.training(RANKS_BEFORE, workers.new_lines())
            time.sleep(SETTLE)
            if interrupted := _interrupted(self.bucket.look()):
                return interrupted[-1]
            self.screen.say("That save was complete before the kill came. The next one, then.")
        raise DemoError(f"{MAX_KILLS} saves in a row were complete before they could be interrupted")

    def look_at(self, interrupted: StepDirectory) -> dcp_s3.CheckpointInfo:
        """Look at what the kill left. Returns the checkpoint to restart from."""
        left, uploads = plural(interrupted.objects, "data object"), plural(len(interrupted.uploads), "multipart upload")
        self.screen.act(
            "SIGKILL in the middle of a save",
            f"Every rank is dead, at once: no handler ran, nothing was cleaned up. Of [bold]{interrupted.name}[/] "
            f"S3 has {left} ({format_size(interrupted.size)}), {uploads} still open, and no .metadata, which is "
            "written last and makes a checkpoint.",
        )
        self._check(
            not interrupted.committed and interrupted.objects > 0,
            f"the kill interrupted a save: {interrupted.name} has {left} and {uploads}, and no .metadata",
        )
        try:
            dcp_s3.S3StorageReader(f"{self.root}/{interrupted.name}").read_metadata()
            refused = False
        except CheckpointNotFoundError:
            refused = True
        answer = "[bold]CheckpointNotFoundError[/]" if refused else "[bold red]it was loaded[/]"
        self.screen.say(f"Loading it anyway: {answer}")
        newest = dcp_s3.latest(self.root)
        if newest is None:
            raise DemoError(f"dcp_s3.latest found no complete checkpoint at {self.root}")
        self.screen.say(f"dcp_s3.latest(root): [bold]{newest.name}[/]")
        self._check(
            refused and newest.name == self._complete()[-1] and newest.name != interrupted.name,
            f"it is invisible: latest() is {newest.name}, loading {interrupted.name} is refused",
        )
        return newest

    def restart(self, newest: dcp_s3.CheckpointInfo, interrupted: StepDirectory) -> None:
        """Go on with other ranks, up to the step before the interrupted one, whose leftovers stay visible."""
        self.screen.act(
            f"Restart on {RANKS_AFTER} ranks",
            "Another number of ranks than those that saved: every rank reads from S3 the byte ranges that it "
            f"now needs. Then the training goes on from {newest.name} and saves again. The losses are those that "
            "you have seen at these steps before the kill, up to rounding.",
        )
        answers: list[str | None] = [newest.name]
        last = int(interrupted.name.rpartition("-")[2]) - 1
        with self._train(RANKS_AFTER, steps=last, save_every=SAVE_EVERY // 2) as workers:
            answers.extend(self._latest_name() for _ in self._watch(workers, interval=0.5))
        answers.append(self._latest_name())
        complete = [name for name in self._complete() if name > newest.name]
        self._check(
            len(complete) > 0 and answers[-1] == complete[-1] and interrupted.name not in answers,
            f"training went on: {', '.join(complete) or 'nothing'} saved by {RANKS_AFTER} ranks; "
            f"latest(), asked {len(answers)} times, never named {interrupted.name}",
        )

    def compare(self, newest: dcp_s3.CheckpointInfo) -> None:
        """Compare the restored state with the saved one."""
        self.screen.act(
            "The same bits?",
            "SHA-256 over the whole state, gathered from the ranks (weights, AdamW's moments, step): before the "
            "save, and again after the restore.",
        )
        events = [json.loads(line) for line in self._digests.read_text().splitlines()]
        restored = [each for each in events if each["event"] == "restored"]
        saved = [each for each in events if each["event"] == "saved" and each["step"] == newest.step]
        if not saved or not restored:
            raise DemoError(f"the training has not recorded its state in {self._digests}")
        before, after = saved[-1], restored[-1]
        for event in (before, after):
            self.screen.say(f"{event['event']:8}  step {event['step']}  on {event['ranks']} ranks  {event['sha256']}")
        same = (before["step"], before["sha256"]) == (after["step"], after["sha256"])
        self._check(
            same and (before["ranks"], after["ranks"]) == (RANKS_BEFORE, RANKS_AFTER),
            f"the state restored on {after['ranks']} ranks is {'' if same else 'NOT '}bit-identical to "
            f"the one saved on {before['ranks']} (step {after['step']})",
        )

    def list_all(self, interrupted: StepDirectory) -> None:
        """Show what is on S3 in a table."""
        self.screen.act(
            "What lies on S3", "Seen by plain boto3; state and ranks are what dcp_s3.list_checkpoints says."
        )
        found, latest = self.bucket.look(), self._latest_name()
        infos = {info.name: info for info in dcp_s3.list_checkpoints(self.root) if info.committed}
        table = Table(title=self.root, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD)
        for name in ("checkpoint", "state", "ranks", "objects", "size", "open uploads", "age"):
            table.add_column(name, justify="left" if name in ("checkpoint", "state") else "right", no_wrap=True)
        for each in found:
            state, ranks = "[red]incomplete (invisible)[/]", "-"
            if info := infos.get(each.name):
                state = f"[green]committed{', latest' if info.name == latest else ''}[/]"
                ranks = str(info.world_size or "-")
            uploads = str(len(each.uploads) or "-")
            table.add_row(each.name, state, ranks, str(each.objects), format_size(each.size), uploads, each.age)
        self.screen.table(table)
        self._check(
            set(infos) == {each.name for each in found if each.committed} and interrupted.name not in infos,
            "list_checkpoints() calls committed exactly what has a .metadata",
        )

    def retain(self, interrupted: StepDirectory, plan_table: Callable[[Plan], Table]) -> None:
        """Delete what no policy keeps, and what the kill left."""
        policy = dcp_s3.KeepLatest(1)
        self.screen.act(
            "Retention",
            f"The first checkpoint is pinned. The policy [bold]{policy}[/] keeps one more. "
            f"The leftovers of {interrupted.name} would be safe for 24 hours, as a save that may still go on. Here the "
            "grace period is 0, because nothing is being saved any more.",
        )
        first, *_, last = self._complete()
        dcp_s3.pin(f"{self.root}/{first}", "shown in the demo")
        report = dcp_s3.prune(self.root, policy, grace=0, force=True)
        self.screen.table(plan_table(report.plan))
        left = self.bucket.look()
        self._check(
            report.ok
            and {each.name for each in left if each.objects or each.uploads} == {first, last}
            and not any(each.uploads for each in left)
            and dcp_s3.verify(f"{self.root}/{last}").ok
            and self._latest_name() == last,
            f"retention left {first} and {last}, whole; the others and the leftovers of "
            f"{interrupted.name} are gone ({format_size(report.size)})",
        )

    def _check(self, holds: bool, text: str) -> None:
        self.checks.append((holds, text))

    def _complete(self) -> list[str]:
        return [each.name for each in self.bucket.look() if each.committed]

    def _latest_name(self) -> str | None:
        newest = dcp_s3.latest(self.root)
        return None if newest is None else newest.name

    def _train(self, ranks: int, *, steps: int, save_every: int) -> TrainingProcesses:
        self._runs += 1
        arguments = ["--url", self.root, "--steps", str(steps)]
        arguments += ["--save-every", str(save_every), "--digest-file", str(self._digests)]
        return TrainingProcesses(ranks, arguments, logs=self.folder / f"run{self._runs}")

    def _watch(self, workers: TrainingProcesses, *, interval: float) -> Iterator[None]:
        """Print the workers' output every ``interval`` seconds until they end."""
        deadline = time.monotonic() + self.limit
        running = True
        while running:
            running = workers.running()
            self.screen.training(workers.ranks, workers.new_lines())
            if time.monotonic() > deadline:
                raise DemoError(f"the training on {workers.ranks} ranks took over {self.limit:.0f} s")
            yield
            time.sleep(interval)


class Screen:
    """Prints numbered acts, the training's output, tables, and what held."""

    def __init__(self) -> None:
        self._console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
        self._number = 0

    def act(self, title: str, why: str) -> None:
        self._number += 1
        self._console.print(f"\n[bold cyan]{self._number}  {title}[/]")
        self.say(why)

    def say(self, text: str) -> None:
        self._console.print(Padding(text, (0, 0, 0, 3), expand=False))

    def table(self, table: Table) -> None:
        self._console.print(Padding(table, (1, 0, 0, 2), expand=False))

    def training(self, ranks: int, lines: Sequence[str]) -> None:
        for line in lines:
            self._console.print(f"     {ranks} ranks | {line}", style="dim", markup=False, soft_wrap=True)

    def commands(self, title: str, lines: Sequence[str]) -> None:
        self._console.print(f"\n[bold]{title}[/]")
        for line in lines:
            self._console.print(f"   {line}", markup=False, soft_wrap=True)

    def error(self, text: str) -> None:
        self._console.print(f"\n{text}", style="bold red", markup=False, soft_wrap=True)

    def summary(self, checks: Sequence[tuple[bool, str]], seconds: float) -> None:
        self._console.print(f"\n[bold]What you saw[/]  [dim]({seconds:.0f} s)[/]")
        table = Table.grid(padding=(0, 1))
        for holds, text in checks:
            table.add_row("[bold green]PASS[/]" if holds else "[bold red]FAIL[/]", text)
        self._console.print(Padding(table, (0, 0, 0, 2), expand=False))
