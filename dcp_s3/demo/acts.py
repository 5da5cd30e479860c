"""The acts of the demo, and what each must show."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import dcp_s3
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.demo.report import Check, Report
from dcp_s3.demo.storage import BucketView, StepDirectory
from dcp_s3.demo.workers import TrainingProcesses
from dcp_s3.errors import CheckpointNotFoundError
from dcp_s3.units import format_size

RANKS_BEFORE, RANKS_AFTER = 2, 3
SAVE_EVERY = 8
#: Complete checkpoints before the kill, so that there is more than one to choose from.
COMPLETE_BEFORE_KILL = 2
#: A save may commit between the look and the kill; then the next one is killed.
MAX_KILLS = 5
#: Seconds until S3 serves no more requests of a killed process.
SETTLE = 1.0


class DemoError(Exception):
    """The demo cannot go on."""


class Demo:
    """The acts of the demo. Call each once, in this order.

    Args:
        storage: where the checkpoints go.
        folder: local directory for logs and digests.
        limit: seconds for one run of the training.
        report: prints what happens.
    """

    def __init__(self, storage: BucketView, folder: Path, limit: float, report: Report) -> None:
        self.storage = storage
        self.folder = folder
        self.limit = limit
        self.report = report
        self.checks: list[Check] = []
        self._digests = folder / "digests.jsonl"
        self._runs = 0

    def train_and_kill(self) -> StepDirectory:
        """Train, and kill all ranks in the middle of a save. Returns what is left of that save."""
        self.report.stage(
            f"Training on {RANKS_BEFORE} ranks",
            f"A transformer sharded with FSDP2 learns Python's standard library. Every {SAVE_EVERY} steps, "
            "async_save: the steps go on while the checkpoint is on its way to S3.",
        )
        for _ in range(MAX_KILLS):
            steps = 100 * SAVE_EVERY
            with self._train(RANKS_BEFORE, steps=steps, save_every=SAVE_EVERY) as workers:
                self._wait_for_save_under_way(workers)
                workers.kill()
                self.report.training(RANKS_BEFORE, workers.new_lines())
            time.sleep(SETTLE)
            if interrupted := [d for d in self.storage.look() if not d.committed and d.objects]:
                return interrupted[-1]
            self.report.say("That save was complete before the kill came. The next one, then.")
        raise DemoError(f"{MAX_KILLS} saves in a row were complete before they could be interrupted")

    def _wait_for_save_under_way(self, workers: TrainingProcesses) -> None:
        for _ in self._watch(workers, interval=0.02):
            found = self.storage.look()
            complete = sum(directory.committed for directory in found)
            under_way = [d for d in found if not d.committed and d.objects]
            if complete >= COMPLETE_BEFORE_KILL and under_way:
                return
        raise DemoError("the training ended before a save could be interrupted")

    def show_interrupted(self, interrupted: StepDirectory) -> CheckpointInfo:
        """Look at what the kill left. Returns the checkpoint to restart from."""
        left = _count(interrupted.objects, "data object")
        uploads = _count(len(interrupted.uploads), "multipart upload")
        self.report.stage(
            "SIGKILL in the middle of a save",
            f"Every rank is dead, at once: no handler ran, nothing was cleaned up. Of [bold]{interrupted.name}[/] "
            f"S3 has {left} ({format_size(interrupted.size)}), {uploads} still open, and no .metadata, which is "
            "written last and makes a checkpoint.",
        )
        self.checks.append(
            Check(
                not interrupted.committed and interrupted.objects > 0,
                f"the kill interrupted a save: {interrupted.name} has {left} and {uploads}, and no .metadata",
            )
        )
        try:
            dcp_s3.S3StorageReader(self.storage.url(interrupted)).read_metadata()
            refused = False
        except CheckpointNotFoundError:
            refused = True
        self.report.say(
            "Loading it anyway: " + ("[bold]CheckpointNotFoundError[/]" if refused else "[bold red]it was loaded[/]")
        )
        newest = dcp_s3.latest(self.storage.root)
        if newest is None:
            raise DemoError(f"dcp_s3.latest found no complete checkpoint at {self.storage.root}")
        self.report.say(f"dcp_s3.latest(root): [bold]{newest.name}[/]")
        complete = [d.name for d in self.storage.look() if d.committed]
        self.checks.append(
            Check(
                refused and newest.name == complete[-1] and newest.name != interrupted.name,
                f"it is invisible: latest() is {newest.name}, loading {interrupted.name} is refused",
            )
        )
        return newest

    def restart(self, newest: CheckpointInfo, interrupted: StepDirectory) -> None:
        """Continue on another number of ranks, up to the step before the interrupted one, whose leftovers stay
        visible."""
        self.report.stage(
            f"Restart on {RANKS_AFTER} ranks",
            "Another number of ranks than those that saved: every rank reads from S3 the byte ranges that it "
            f"now needs. Then the training goes on from {newest.name} and saves again. The losses are those that "
            "you have seen at these steps before the kill, up to rounding.",
        )
        answers: list[str | None] = [newest.name]
        with self._train(RANKS_AFTER, steps=interrupted.step - 1, save_every=SAVE_EVERY // 2) as workers:
            answers.extend(self._latest_name() for _ in self._watch(workers, interval=0.5))
        answers.append(self._latest_name())
        complete = [d.name for d in self.storage.look() if d.committed and d.name > newest.name]
        self.checks.append(
            Check(
                len(complete) > 0 and answers[-1] == complete[-1] and interrupted.name not in answers,
                f"training went on: {', '.join(complete) or 'nothing'} saved by {RANKS_AFTER} ranks; "
                f"latest(), asked {len(answers)} times, never named {interrupted.name}",
            )
        )

    def compare(self, newest: CheckpointInfo) -> None:
        """Compare the restored state with the saved one."""
        self.report.stage(
            "The same bits?",
            "SHA-256 over the whole state, gathered from the ranks (weights, AdamW's moments, step): before the "
            "save, and again after the restore.",
        )
        events = [json.loads(line) for line in self._digests.read_text().splitlines()]
        restored = [event for event in events if event["event"] == "restored"][-1:]
        saved = [e for e in events if e["event"] == "saved" and e["step"] == newest.step][-1:]
        if not saved or not restored:
            raise DemoError(f"the training has not recorded its state in {self._digests}")
        for event in saved + restored:
            self.report.say(f"{event['event']:8}  step {event['step']}  on {event['ranks']} ranks  {event['sha256']}")
        before, after = saved[0], restored[0]
        same = (before["step"], before["sha256"]) == (after["step"], after["sha256"])
        self.checks.append(
            Check(
                same and (before["ranks"], after["ranks"]) == (RANKS_BEFORE, RANKS_AFTER),
                f"the state restored on {after['ranks']} ranks is {'' if same else 'NOT '}bit-identical to "
                f"the one saved on {before['ranks']} (step {after['step']})",
            )
        )

    def show_storage(self, interrupted: StepDirectory) -> None:
        """Show what is on S3 in a table."""
        self.report.stage(
            "What lies on S3", "Seen by plain boto3; state and ranks are what dcp_s3.list_checkpoints says."
        )
        found = self.storage.look()
        infos = {info.name: info for info in dcp_s3.list_checkpoints(self.storage.root)}
        self.report.table(self.storage.root, found, infos, self._latest_name())
        committed = {info.name for info in infos.values() if info.committed}
        self.checks.append(
            Check(
                committed == {d.name for d in found if d.committed} and interrupted.name not in committed,
                "list_checkpoints() calls committed exactly what has a .metadata",
            )
        )

    def retain(self, interrupted: StepDirectory) -> None:
        """Delete what no policy keeps, and what the kill left."""
        policy = dcp_s3.KeepLatest(1)
        self.report.stage(
            "Retention",
            f"The first checkpoint is pinned. The policy [bold]{policy}[/] keeps one more. "
            f"The leftovers of {interrupted.name} would be safe for 24 hours, as a save that may still go on. Here the "
            "grace period is 0, because nothing is being saved any more.",
        )
        complete = [d.name for d in self.storage.look() if d.committed]
        keep = {complete[0], complete[-1]}
        dcp_s3.pin(f"{self.storage.root}/{complete[0]}", "shown in the demo")
        report = dcp_s3.prune(self.storage.root, policy, grace=0, force=True)
        self.report.plan(report.plan)
        left = self.storage.look()
        newest = dcp_s3.verify(f"{self.storage.root}/{complete[-1]}")
        freed = format_size(report.size)
        self.checks.append(
            Check(
                report.ok
                and {d.name for d in left if d.objects or d.uploads} == keep
                and not any(d.uploads for d in left)
                and newest.ok
                and self._latest_name() == complete[-1],
                f"retention left {' and '.join(sorted(keep))}, whole; the others and the leftovers of "
                f"{interrupted.name} are gone ({freed})",
            )
        )

    def _latest_name(self) -> str | None:
        newest = dcp_s3.latest(self.storage.root)
        return None if newest is None else str(newest.name)

    def _train(self, ranks: int, *, steps: int, save_every: int) -> TrainingProcesses:
        self._runs += 1
        arguments = ["--url", self.storage.root, "--steps", str(steps)]
        arguments += ["--save-every", str(save_every), "--digest-file", str(self._digests)]
        return TrainingProcesses(ranks, arguments, logs=self.folder / f"run{self._runs}")

    def _watch(self, workers: TrainingProcesses, *, interval: float) -> Iterator[None]:
        """Print the workers' output every ``interval`` seconds until they end."""
        deadline = time.monotonic() + self.limit
        running = True
        while running:
            running = workers.running()
            self.report.training(workers.ranks, workers.new_lines())
            if time.monotonic() > deadline:
                raise DemoError(f"the training on {workers.ranks} ranks took over {self.limit:.0f} s")
            yield
            time.sleep(interval)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
