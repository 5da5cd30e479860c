"""CheckpointManager: the checkpoints of one training run."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Mapping
from types import NoneType, TracebackType
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from dcp_s3 import errors
from dcp_s3.coordination.ownership import Replicas
from dcp_s3.coordination.processes import CountedSave, withdraw
from dcp_s3.events import Listener
from dcp_s3.failures import name_failed
from dcp_s3.manager import arguments
from dcp_s3.manager.agree import Failures, Ranks, check_same, find_store_ranks
from dcp_s3.manager.arguments import check_step
from dcp_s3.manager.background import BackgroundRetention, commit_of, retain
from dcp_s3.manager.inflight import BeginUpload, SavesInFlight, stage_save
from dcp_s3.manager.restore import RunReader
from dcp_s3.manager.select_checkpoint import look_at_disk
from dcp_s3.manager.step_policy import SavePolicyFunction, StepDecisions, asks_ranks, check_policy
from dcp_s3.retention.catalog import CheckpointCatalog
from dcp_s3.retention.policy import PolicyFunction, policy_name
from dcp_s3.retention.prune import check_grace
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.stage.stager import S3Stager
from dcp_s3.units import one_line
from dcp_s3.url import parse_url

logger = logging.getLogger(__name__)

M = TypeVar("M", bound="CheckpointManager")


class CheckpointManager(RunReader):
    """Saves and restores the checkpoints of a run, ``{root}/step-00001000`` and so on, and applies a retention policy.

    With torch.distributed, every rank makes one, and all ranks call `save`, `should_save` and `restore`. If one rank
    fails in such a call, all ranks raise, and name that rank. The other methods are local.

    Use it in a ``with``. Saves run in the background, one upload at a time. The first rank logs a save that fails at
    once; the next `save`, `wait` or `close` of each rank raises it, once, as `SaveFailedError`. After each commit,
    retention runs on the first rank. It never fails the training: its failures are logged and counted.

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
        should_save: which steps to save: a policy (``SaveEvery(steps=1000) | SaveOnPreemption()``), or a function of a
            `SaveMoment`. `save` returns False at all other steps. None: `save` always saves.
        read_only: never save, annotate, prune or drain. Needs permission to read only, works for another run's root,
            and ignores checkpoints that wait on local disks. Only ``DCP_S3_READER_LEASE`` writes.
        process_group: a group with a CPU backend, for these saves and loads alone. None: a new gloo group of all ranks.
        coordination: ``collectives``: the ranks meet in a process group. ``s3``: they meet through objects on S3, and
            no rank waits for another one. There, a rank that fails raises alone and aborts the save; if it cannot,
            the others abort it after ``DCP_S3_RANK_TIMEOUT``. Ranks are those of torch.distributed, else the
            launcher's. Checkpoints that wait on local disks are ignored.
        replicas: with ``coordination="s3"``: which ranks hold the same plain tensors, objects and shards made by hand,
            see `S3StorageWriter`.
        overwrite: replace a committed checkpoint of the same step. Otherwise the save fails with CheckpointExistsError.
        incremental: have S3 copy tensors that have not changed since the last save, see `S3StorageWriter`.
        weights_only: see `S3StorageReader`.
        on_event: called with each event of its saves, loads and prunes on this rank, see `dcp_s3.events`.

    Raises:
        InvalidURLError
        SettingsError: a setting is not allowed, or ``retention`` or ``should_save`` is not a policy.
        SaveProtocolError: on ``s3``, nothing tells this attempt of the job from others, see ``DCP_S3_RUN_ID``.
        CheckpointError: an argument is wrong, or differs from rank to rank.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        retention: PolicyFunction | str | None = None,
        should_save: SavePolicyFunction | None = None,
        read_only: bool = False,
        settings: SettingsLike = None,
        process_group: dist.ProcessGroup | None = None,
        coordination: Literal["collectives", "s3"] = "collectives",
        replicas: Replicas = None,
        overwrite: bool = False,
        incremental: bool | None = None,
        weights_only: bool = True,
        on_event: Listener | None = None,
    ) -> None:
        self.on_event, self.read_only, self.overwrite = on_event, read_only, overwrite
        self.replicas, self.incremental, self.weights_only = replicas, incremental, weights_only
        self._should_save = None if read_only else should_save
        self._uses_disks = coordination == "collectives" and not read_only
        if coordination not in ("collectives", "s3"):
            raise errors.CheckpointError(f"coordination = {coordination!r}, expected 'collectives' or 's3'")
        if coordination == "s3" and process_group is not None:
            why = "a CheckpointManager with coordination='s3' uses no process group, and all ranks of the job save"
            raise errors.CheckpointError(f"{why}. Remedy: leave process_group out")

        def configure() -> tuple[dict[str, object], dict[str, int | None]]:
            self.root = parse_url(root)
            self.settings = resolve_settings(settings, incremental=incremental)
            self.retention = arguments.resolve_policy(retention, self.settings)
            check_policy(self._should_save)
            if self.retention is not None:
                check_grace(None, self.settings, force=False)  # or every retention run would fail
            self._catalog = CheckpointCatalog(self.root_url, settings=self.settings)
            self._stager = None if read_only else S3Stager(self.settings, on_event=on_event)
            run = {
                "root": self.root_url,
                "read_only": read_only,
                "should_save (whether it needs more than the step)": asks_ranks(self._should_save),
            }
            waiting = look_at_disk(self._catalog).commits if self._uses_disks else ()
            return run, {each.info.url: each.info.step for each in waiting}

        if coordination == "collectives":
            # First: through the group the other ranks learn if the arguments of one rank are wrong.
            self._ranks = Ranks(process_group)
            found = self._ranks.agree(configure, self._refuse("no CheckpointManager is made"))
            check_same("CheckpointManager is made for different runs", [run for run, _ in found])
        else:
            found = [configure()]
            self._ranks = find_store_ranks(self.root, self.settings, read_only=read_only)
        self._left = {url: step for _, waiting in found for url, step in waiting.items()}
        self._in_flight = SavesInFlight(self._ranks.rank)
        # Beside a save under way, whose collectives must not mix with these.
        asks = asks_ranks(self._should_save) and not read_only
        self._beside = self._ranks.apart() if asks else self._ranks
        self._decisions = StepDecisions(self._should_save, self._beside, is_saving=lambda: self._in_flight.is_under_way)
        self._retention: BackgroundRetention | None = None
        if self.retention is not None and self._ranks.is_first and not read_only:
            self._retention = retain(self.root_url, self.retention, self.settings, on_event)

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

        Waits for the previous save, copies the state, and uploads it in the background.

        >>> with CheckpointManager("s3://bucket/run") as manager:
        ...     manager.save(3000, state, {"val_loss": 1.75}, extra={"tokens": 12_000_000})
        True

        Args:
            state: as for `dcp.save`: a dict of tensors, DTensors, Stateful objects and so on.
            metrics: numbers, text and bools to store with it. The first rank's are used. See also `annotate`.
            extra: what else belongs to the checkpoint: text, numbers, bools, None, lists and dicts of these, at most 64
                KiB as JSON. The first rank's is stored, and read by `extra`.
            attachments: bytes of small files by name, see `S3StorageWriter.attach`. One rank is enough.
            force: save whatever ``should_save`` says.
            blocking: return only when the save is committed. Without ``coordination="s3"`` the state is not copied.

        Returns:
            Whether the step is saved: False if the policy ``should_save`` says no.

        Raises:
            SaveFailedError: this save failed (with ``blocking``, or before it began on some rank). Or an earlier one
                did: then this state is not saved, but with ``coordination="s3"`` it is.
            SaveProtocolError: the ranks save different steps, or a metric cannot be stored.
            SettingsError: something in ``extra`` cannot be stored.
            StagingError: the state cannot be copied.
            CheckpointError: the manager is read_only or closed, or an argument is wrong.
        """
        stager = self._stager
        if stager is None:
            what = f"step {step} is not saved" if isinstance(step, int) else "nothing is saved"
            raise self._read_only_error(what)
        if not force and self._should_save is not None and not self.should_save(step):
            return False
        if self.preempted:  # perhaps the last save: what failed before, and was logged, does not stand in its way
            with contextlib.suppress(errors.SaveFailedError):
                self.wait()
        ranks, saves = self._ranks, self._in_flight
        made: list[S3StorageWriter] = []
        counted: CountedSave | None = None
        begun = False

        def begin() -> tuple[int, bool]:
            nonlocal counted
            saves.settle()
            if ranks.collective:
                saves.raise_failure()
            self._check_open()
            check_step(step)
            arguments.check_state(state)
            url = self.url(step)
            counted = ranks.count(url, step)  # before anything that may be wrong on this rank alone
            arguments.check_metrics(metrics)
            arguments.check_type("planner", planner, (SavePlanner, NoneType), "a SavePlanner or None")
            writer = S3StorageWriter(
                url, overwrite=self.overwrite or url in self._left, metrics=metrics, extra=extra,
                replicas=self.replicas, incremental=self.incremental, process_group=ranks.group,
                settings=self.settings, on_event=self.on_event,
            )  # fmt: skip
            for name, data in (attachments or {}).items():
                writer.attach(name, data)
            writer.caller_reports, writer.counted = True, counted
            made.append(writer)
            has_stateful = any(isinstance(value, Stateful) for value in state.values())
            return step, has_stateful

        def refuse(failures: Failures) -> errors.SaveFailedError:
            what = f"step {step} is not saved: {name_failed(failures)}"
            return errors.SaveFailedError(what, url=self.url(step), step=step, failures=failures)

        def saved() -> None:
            if self._retention is not None:
                self._retention.saved(commit_of(writer, self.settings))
            ranks.committed(step)

        try:
            found = self._beside.agree(begin, refuse)
            check_same("save is called with different steps", [step for step, _ in found], errors.SaveProtocolError)
            collected = dict(state)
            if any(has_stateful for _, has_stateful in found):
                # Separately: a `state_dict` may use collectives, so all ranks must have come this far.
                self._beside.agree(lambda: collected.update(arguments.to_state_dict(state)), refuse, alike=True)
            writer, url = made[0], self.url(step)
            self._decisions.saved(step)
            if url in self._left:
                del self._left[url]
                logger.warning("%s waited on disk from an earlier run: it is saved again and replaced", url)
            if blocking and ranks.collective:
                upload: BeginUpload = functools.partial(
                    state_dict_saver.save, collected, storage_writer=writer, process_group=ranks.group, planner=planner
                )
            else:
                upload = stage_save(collected, writer, ranks, stager, planner)
            begun = True
            save = saves.start(step, url, upload, saved, wait=blocking)
        except BaseException as error:
            if counted is not None:
                self._decisions.saved(step, again=True)
                if not begun:
                    withdraw(counted, self.settings, error)
            raise
        if not ranks.collective:
            saves.raise_failure(save.number - 1)  # of an earlier save: the other ranks, too, have begun this one
        return True

    def should_save(self, step: int) -> bool:
        """Whether `save` saves a step, by the policy ``should_save``; True without one. The same on all ranks, all of
        which call it, with the same steps. The step that was saved or restored last is not saved again.

        What depends on steps alone costs nothing. For the clock and for SIGTERM the ranks come together, rarely: at
        half of the steps that are left until a save is due, at least every 100, and with `SaveOnPreemption` about once
        a second. So a save may be late by a step or two. Functions of your own are asked at each step, on the first
        rank, or with ``coordination="s3"`` on the one that comes first.

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
        return self._decisions.should_save(step)

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
        local disks. A SaveFailedError if one has failed.

        >>> with CheckpointManager("s3://bucket/run") as manager:
        ...     saved = manager.save(3000, state)
        ...     manager.wait()
        ...     latest("s3://bucket/run").step
        3000
        """
        self._in_flight.settle()
        self._in_flight.raise_failure()

    def close(self, *, retention_timeout: float = 60.0) -> None:
        """Wait for the saves under way, then for retention, at most ``retention_timeout`` seconds. Then free the
        buffers. A SaveFailedError if a save has failed.

        >>> manager = CheckpointManager("s3://bucket/run")
        >>> manager.close()
        """
        if self._closed:
            return
        self._in_flight.settle()
        self._closed = True
        self._decisions.close()
        if self._retention is not None:
            self._retention.close(retention_timeout)
        if self._stager is not None:
            self._stager.close()
        self._beside.close()
        self._ranks.close()
        self._in_flight.raise_failure()

    def __enter__(self: M) -> M:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            logger.error("while %s went through the manager: %s", type(error).__name__, failure)  # noqa: TRY400

    def __repr__(self) -> str:
        shown = {
            "retention": None if self.retention is None else policy_name(self.retention),
            "should_save": self._should_save,
            "read_only": self.read_only or None,
        }
        return one_line("CheckpointManager", repr(self.root_url), **shown)
