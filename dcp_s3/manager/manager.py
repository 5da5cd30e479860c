"""CheckpointManager: the checkpoints of one training run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner

from dcp_s3 import errors
from dcp_s3.coordination.identity import CountedSave
from dcp_s3.coordination.ownership import Replicas
from dcp_s3.events import Listener
from dcp_s3.failures import name_failed
from dcp_s3.manager import arguments
from dcp_s3.manager.arguments import check_step
from dcp_s3.manager.background import BackgroundRetention, commit_of, retain
from dcp_s3.manager.choosing import ChosenCheckpoint, look_at_disk
from dcp_s3.manager.deciding import SaveDecisions, asks_ranks
from dcp_s3.manager.line import Overlap, agree_on_save, check_overlap
from dcp_s3.manager.names import DEFAULT_FORMAT, StepFormat, step_name
from dcp_s3.manager.notes import open_notes
from dcp_s3.manager.preemption import Preemption, check_sigterm, watch_for_sigterm
from dcp_s3.manager.ranks import Failures, Ranks, Run, agree_on_run, separate_ranks
from dcp_s3.manager.reading import RunReader
from dcp_s3.manager.restore import Restoring
from dcp_s3.manager.save_policy import SavePolicyFunction
from dcp_s3.manager.saving import SaveRequest, Saving
from dcp_s3.retention.catalog import CheckpointCatalog
from dcp_s3.retention.marks import annotate
from dcp_s3.retention.policy import PolicyFunction, policy_name
from dcp_s3.save.writer import S3StorageWriter, Separate
from dcp_s3.settings import SettingsLike
from dcp_s3.stage.stager import S3Stager
from dcp_s3.units import one_line

logger = logging.getLogger(__name__)


class CheckpointManager(RunReader):
    """Saves and restores the checkpoints of a run, ``{root}/step-00001000`` and so on, and applies a retention policy.

    Works with and without torch.distributed. With it, every rank makes a manager and calls `save`, `should_save` and
    `restore`; the ranks agree on what is saved and restored. The other methods are local to each rank.

    Saves run in the background, and upload one at a time (``overlap``). After each commit, retention runs on the first
    rank, in another thread. It never delays or fails the training: its failures are logged and counted
    (``dcp_s3.stats()``).

    A failed save is logged at once, by the first rank. Each rank's next `save`, `wait` or `close` raises it once, as
    `SaveFailedError`.

    An error on one rank is an error on all. The other ranks raise a CheckpointError that names it.

    With ``coordination="s3"`` there are no collectives and no process groups: no rank waits for another one, and what
    fails on one rank alone fails there alone. A save that cannot be whole without it is not committed, which the others
    find out after ``DCP_S3_RANK_TIMEOUT``. Ranks are those of torch.distributed, or what the launcher says.

    >>> with CheckpointManager("s3://bucket/run", retention="latest:3 best:1:val_loss:min") as manager:
    ...     first = manager.restore(state) or 0
    ...     for step in range(first + 1, first + 101):
    ...         train(state)
    ...         if step % 50 == 0:
    ...             saved = manager.save(step, state, {"val_loss": validate(state)})
    >>> [info.step for info in list_checkpoints("s3://bucket/run")]
    [2000, 2050, 2100]

    Args:
        root: ``s3://bucket/run``.
        retention: a policy (``KeepLatest(3) | KeepBest(2, "val_loss", "min")``), or text in the form of
            ``DCP_S3_RETENTION``. None: the policy in ``DCP_S3_RETENTION``. If that is unset, or the text is empty,
            nothing is deleted.
        should_save: a policy of which steps to save (``SaveEvery(steps=1000) | SaveOnPreemption()``), or a function of
            a `SaveMoment`: `save` does nothing for the others. None: `save` always saves. See `should_save`.
        step_format: how a step is named below the root: text with ``{step}`` in it, or a function of the step. Other
            tools find the step if it is the last number in the name, else by ``DCP_S3_STEP_PATTERN``.
        read_only: only read: nothing is saved, annotated, pruned or drained, and what waits on disks does not count.
            Needs permission to read only, and may be of another run's root. Only ``DCP_S3_READER_LEASE`` writes.
        process_group: a group with a CPU backend, used only for these saves and loads. None: a new gloo group of all
            ranks.
        coordination: how the ranks come together: in ``collectives``, or on ``s3``, which needs no ``process_group``.
            Then what waits on disks does not count.
        replicas: with ``coordination="s3"``: which ranks hold the same plain tensors, objects and shards made by hand,
            see `S3StorageWriter`.
        overwrite: replace a committed checkpoint of the same step. Otherwise the save fails with CheckpointExistsError.
        overlap: what `save` does while an earlier save uploads. ``wait``: it waits for it. ``queue``: it stages the
            state, which is uploaded afterwards; while one waits, the next `save` waits.
        separate: FQN prefixes that get their own objects, see `S3StorageWriter`.
        weights_only: see `S3StorageReader`.
        save_on_sigterm: when SIGTERM has come to a rank, all save at their next call of `save` or `should_save`, soon
            at the same step, and end: `save` raises SystemExit, with status 0 if the step is committed, else 143.
            Nothing half is left. The manager must be made in the main thread.
        grace: seconds from SIGTERM to the kill that follows it, for ``save_on_sigterm``: what the scheduler allows.
        retention_timeout: seconds for which `close` waits for retention.
        drain_timeout: seconds for which `restore` waits for a checkpoint on the disks of several hosts to reach S3,
            counted from the last progress. After that it takes an older one.
        on_event: called with each event of its saves, loads and prunes on this rank, see `dcp_s3.events`.

    Raises:
        InvalidURLError
        SettingsError: a setting is not allowed, or ``retention`` or ``should_save`` is not a policy.
        SaveProtocolError: with ``coordination="s3"``: nothing tells this attempt of the job from others, see
            ``DCP_S3_RUN_ID``.
        CheckpointError: an argument is wrong, or differs from rank to rank.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        retention: PolicyFunction | str | None = None,
        should_save: SavePolicyFunction | None = None,
        step_format: StepFormat = DEFAULT_FORMAT,
        read_only: bool = False,
        settings: SettingsLike = None,
        process_group: dist.ProcessGroup | None = None,
        coordination: Literal["collectives", "s3"] = "collectives",
        replicas: Replicas = None,
        overwrite: bool = False,
        overlap: Overlap = "wait",
        separate: Separate | None = None,
        weights_only: bool = True,
        save_on_sigterm: bool = False,
        grace: float = 30.0,
        retention_timeout: float = 60.0,
        drain_timeout: float = 600.0,
        on_event: Listener | None = None,
    ) -> None:
        self.on_event = on_event
        self.read_only = read_only
        self._should_save = None if read_only else should_save
        self.overwrite = overwrite
        self.separate, self.replicas = separate, replicas
        self.weights_only = weights_only
        self.retention_timeout = retention_timeout
        self.drain_timeout = drain_timeout
        self._closed = False
        arguments.check_coordination(coordination, process_group)
        # First: through the group the other ranks learn if the arguments of one rank are wrong.
        self._ranks = Ranks(process_group) if coordination == "collectives" else separate_ranks(settings, read_only)
        disks = self._ranks.collective and not read_only

        def configure() -> tuple[Run, dict[str, int | None]]:
            timeouts = {"retention_timeout": retention_timeout, "drain_timeout": drain_timeout, "grace": grace}
            check_sigterm(save_on_sigterm)
            found = arguments.configure(root, retention, settings, separate, timeouts, step_format, self._should_save)
            self.root, self.settings, self.retention = found.root, found.settings, found.retention
            self._saving = Saving(self._ranks.rank, overlap, check_overlap(overlap))
            self._saving.fails_first = self._ranks.collective
            self._step_format = found.step_format
            self._catalog = CheckpointCatalog(str(found.root), settings=found.settings)
            self._stager = None if read_only else S3Stager(found.settings, on_event=on_event)
            waiting = look_at_disk(self._catalog).commits if disks else ()
            self._run = Run(
                self.root_url,
                step_name(12, found.step_format),
                read_only,
                asks_ranks(self._should_save),
                save_on_sigterm,
                overlap,
            )
            return self._run, {each.info.url: each.info.step for each in waiting}

        self._left = agree_on_run(self._ranks, configure, self._refuse("no CheckpointManager is made"))
        """Steps by URL that an earlier run left on disk and this run has not reached yet. If this run saves one of
        them, it has diverged from that run, and replaces the old checkpoint."""
        self._notes = None if self._ranks.collective else open_notes(self._run, self.root, self.settings, self._ranks)
        # Beside a save under way, whose collectives must not mix with these.
        apart = overlap != "wait" or asks_ranks(self._should_save)
        self._beside = self._ranks.apart() if apart and not read_only else self._ranks
        self._decisions = SaveDecisions(
            self._should_save, self._beside, self._notes, is_saving=lambda: self._saving.is_under_way
        )
        self._preemption: Preemption | None = None
        if save_on_sigterm and not read_only:
            self._preemption = watch_for_sigterm(self.root, self.settings, self._ranks, grace)
        self._restoring = Restoring(
            self._catalog,
            self._ranks,
            weights_only=weights_only,
            drain_timeout=drain_timeout,
            disks=disks,
            notes=self._notes,
            on_event=on_event,
        )
        self._retention: BackgroundRetention | None = None
        if self.retention is not None and self._ranks.is_first and not read_only:
            self._retention = retain(self.root_url, self.retention, self.settings, on_event)

    # --- save ----------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: dict[str, Any],
        metrics: Mapping[str, Any] | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        attachments: Mapping[str, bytes] | None = None,
        force: bool = False,
        blocking: bool = False,
        planner: SavePlanner | None = None,
    ) -> bool:
        """Save the state of a step, if `should_save` says so. Every rank calls it.

        Waits for the previous save (or not, see ``overlap``), copies the state, and returns. The upload goes on in the
        background.

        >>> with CheckpointManager("s3://bucket/run") as manager:
        ...     manager.save(3000, state, {"val_loss": 1.75}, extra={"tokens": 12_000_000})
        True

        Args:
            state: as for `dcp.save`: a dict of tensors, DTensors, Stateful objects and so on.
            metrics: numbers, text and bools to store with it. The first rank's metrics are used. See also `annotate`.
            extra: what else belongs to the checkpoint: text, numbers, bools, None, lists and dicts of these, at most 64
                KiB as JSON. The first rank's is stored. `extra` reads it, ``dcp-s3 show`` and ``ls --json`` show it.
            attachments: bytes of small files by name, see `S3StorageWriter.attach`. One rank is enough.
            force: save whatever ``should_save`` says.
            blocking: return only when the save is committed; the state is not copied. With ``coordination="s3"``:
                return when this rank's own part is on S3, `wait` when the whole is committed; the state is copied.

        Returns:
            Whether the step is saved: False if the policy ``should_save`` says no.

        Raises:
            SaveFailedError: with ``blocking``: this save failed. Otherwise: an earlier save failed, and this state was
                not saved, or with ``coordination="s3"`` is being saved all the same. Or a rank cannot go on, or a
                ``state_dict`` in the state raised on a rank.
            SaveProtocolError: the ranks save different steps, or a metric cannot be stored.
            SystemExit: SIGTERM has come, see ``save_on_sigterm``.
            SettingsError: something in ``extra`` cannot be stored.
            StagingError: the state cannot be copied.
            CheckpointError: the manager is read_only or closed, or an argument is wrong.
        """
        stager = self._stager
        if stager is None:
            what = f"step {step} is not saved" if isinstance(step, int) else "nothing is saved"
            raise arguments.read_only_error(what, self.root)
        if self._preemption is not None and self._preemption.is_due(step):
            last = partial(
                self.save, step, state, metrics,
                extra=extra, attachments=attachments, force=True, blocking=True, planner=planner,
            )  # fmt: skip
            self._preemption.end(step, self._saving, last, self.close)
        if not force and self._should_save is not None and not self.should_save(step):
            return False
        made: list[S3StorageWriter] = []
        counted: CountedSave | None = None
        passed = None if self._notes is None else self._notes.saving(step)

        def begin() -> None:
            nonlocal counted
            self._check_open()
            arguments.check_save(step, state)
            url = self.url(step)
            counted = self._ranks.enter(url, self.settings)  # before anything that may be wrong on this rank alone
            arguments.check_beside(metrics, planner, extra)
            writer = S3StorageWriter(
                url,
                overwrite=self.overwrite or url in self._left,
                metrics=metrics,
                extra=extra,
                separate=self.separate,
                replicas=self.replicas,
                process_group=self._ranks.group,
                settings=self.settings if self._preemption is None else self._preemption.bound(self.settings),
                on_event=self.on_event,
            )
            for name, data in (attachments or {}).items():
                writer.attach(name, data)
            writer.caller_reports, writer.counted = True, counted
            made.append(writer)

        try:
            collected = agree_on_save(
                self._beside, self._saving, step, state, self.root_url, begin, self._refuse_save(step)
            )
            url, writer = self.url(step), made[0]
            self._decisions.saved(step)
            if url in self._left:
                del self._left[url]
                if self._ranks.is_first:
                    logger.warning("%s waited on disk from an earlier run: it is saved again and replaced", url)
            saved = partial(self._saved, writer, passed, counted)
            request = SaveRequest(step, url, writer, self._ranks, stager, planner, saved)
            self._saving.run(request, collected, blocking=blocking)
        except BaseException as error:
            if counted is not None:
                self._decisions.failed_here(step)
                self._ranks.leave(counted, self.url(step), self.settings, error)
            raise
        if not self._ranks.collective:
            self._saving.raise_failure()  # of an earlier save: the other ranks, too, have begun this one
        return True

    def should_save(self, step: int) -> bool:
        """Whether `save` saves a step, by the policy ``should_save``; True without one. The same on all ranks, all of
        which call it, with the same steps. The step that was saved or restored last is not saved again.

        With ``coordination="s3"`` they do not meet: the first rank to ask decides, and the others read what it said, in
        the store of the process group or, without one, on S3.

        What depends on steps alone costs nothing. For the clock and for SIGTERM the ranks meet in one all-reduce of 40
        bytes over gloo, in which all wait for the slowest. They do so rarely: at half of the steps that are left until
        a save is due, at least every 100, and with `SaveOnPreemption` about once a second. So a save may be late by a
        step or two. Functions of your own are asked at each step.

        >>> with CheckpointManager("s3://bucket/run", should_save=SaveEvery(steps=1000)) as manager:
        ...     for step in range(2001, 4001):
        ...         if manager.should_save(step):
        ...             saved = manager.save(step, state, {"val_loss": validate(state)})
        >>> [info.step for info in list_checkpoints("s3://bucket/run")]
        [1000, 2000, 3000, 4000]

        Raises:
            SaveProtocolError: the ranks ask about different steps.
            CheckpointError: the policy has failed on the first rank, the manager is closed, or ``step`` is not a step.
        """
        check_step(step)
        if self.read_only:
            return False
        self._check_open()
        due = self._preemption is not None and self._preemption.is_due(step)
        return due or self._decisions.should_save(step)

    @property
    def preempted(self) -> bool:
        """Whether SIGTERM has come to a rank, as `should_save` or `save` found last: the same on all ranks. Then leave
        the training loop: the state is saved. Always False without `SaveOnPreemption`.

        >>> with CheckpointManager("s3://bucket/run", should_save=SaveOnPreemption()) as manager:
        ...     for step in range(2001, 2011):
        ...         saved = manager.save(step, state)
        ...         if manager.preempted:
        ...             break
        """
        return self._decisions.preempted

    def wait(self) -> None:
        """Wait for all saves under way: until they are committed, or with ``DCP_S3_DURABILITY=local`` until they are on
        local disks.

        >>> with CheckpointManager("s3://bucket/run") as manager:
        ...     saved = manager.save(3000, state)
        ...     manager.wait()
        ...     latest("s3://bucket/run").step
        3000

        Raises:
            SaveFailedError: a save has failed.
        """
        self._saving.settle()
        self._saving.raise_failure()

    def annotate(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics to a saved checkpoint, see `dcp_s3.annotate`. Every rank may call it; only the first one writes.

        Waits for the save of this step, and those before it, if it is still going on.

        >>> with CheckpointManager("s3://bucket/run") as manager:
        ...     manager.annotate(2000, {"val_loss": 1.0})
        ...     manager.best_step("val_loss")
        2000

        Raises:
            SettingsError: the metrics cannot be stored.
            StorageError
            CheckpointNotFoundError: there is no committed checkpoint of this step.
        """
        if self.read_only:
            raise arguments.read_only_error("nothing is annotated", self.root)
        arguments.check_annotate(step, metrics)
        if not self._ranks.is_first:
            return
        self._settle_step(step)
        annotate(self.url(step), metrics, settings=self.settings)

    def _saved(self, writer: S3StorageWriter, passed: Callable[[], None] | None, counted: CountedSave | None) -> None:
        self._ranks.committed(counted)
        if self._retention is not None:
            self._retention.saved(commit_of(writer, self.settings))
        if passed is not None:
            passed()

    def _refuse_save(self, step: int) -> Callable[[Failures], errors.SaveFailedError]:
        return lambda failures: errors.SaveFailedError(
            f"step {step} is not saved: {name_failed(failures)}", url=self.url(step), step=step, failures=failures
        )

    def close(self) -> None:
        """Wait for the saves under way, then for retention (at most ``retention_timeout`` seconds). Then free the
        buffers.

        >>> manager = CheckpointManager("s3://bucket/run")
        >>> manager.save(3000, state)
        True
        >>> manager.close()

        Raises:
            SaveFailedError: a save has failed.
        """
        if self._closed:
            return
        self._saving.settle()
        self._closed = True
        if self._preemption is not None:
            self._preemption.close()  # first: its handler calls that of the other watch
        self._decisions.close()
        if self._retention is not None:
            self._retention.close(self.retention_timeout)
        if self._stager is not None:
            self._stager.close()
        self._beside.close()
        self._ranks.close()
        self._saving.raise_failure()

    def __repr__(self) -> str:
        shown = {
            "retention": None if self.retention is None else policy_name(self.retention),
            "should_save": self._should_save,
            "step_format": None if self._step_format == DEFAULT_FORMAT else self._step_format,
            "read_only": self.read_only or None,
        }
        return one_line("CheckpointManager", repr(self.root_url), **shown)

    # --- for RunReader -------------------------------------------------------------------------------

    def _settle(self) -> None:
        self._saving.settle()
        self._check_open()
        self._ranks.go_back(self.settings)

    def _settle_step(self, step: int) -> None:
        self._saving.settle_step(step)

    def _restored(self, found: ChosenCheckpoint) -> None:
        # Up to this step, what an earlier run left is this run's own past.
        self._left = {url: step for url, step in self._left.items() if (step or 0) > found.step}
        self._saving.last_good = found.step
        self._decisions.restored(found.step)

    def _check_open(self) -> None:
        if self._closed:
            raise arguments.closed_error(self.root)
