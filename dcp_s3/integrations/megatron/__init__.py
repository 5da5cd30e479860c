"""Megatron-Core's `dist_checkpointing` on s3://, after `install`. See docs/megatron.md.

Megatron plans in the trainer. It writes there (a synchronous save), in a forked process, or in a spawned one that stays
(persistent), and commits in the trainer. What goes to that process is this rank's `Save`, its plan and its data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import queue
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3 import process
from dcp_s3.errors import CheckpointError, DcpS3Error, SaveProtocolError
from dcp_s3.failures import portable
from dcp_s3.integrations import require
from dcp_s3.save.save import Save
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.url import is_s3_url, parse_url

require("megatron-core", "0.16", "0.17")

from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig  # noqa: E402
from megatron.core.dist_checkpointing.strategies import torch as strategies  # noqa: E402
from megatron.core.dist_checkpointing.strategies.filesystem_async import (  # noqa: E402
    _get_write_results_queue as write_results_queue,  # a queue of a process of its own: works with fork and spawn
)
from megatron.core.msc_utils import MultiStorageClientFeature  # noqa: E402

from dcp_s3.integrations.megatron.files import Files  # noqa: E402

__all__ = ["MegatronS3Writer", "install"]

# All seen in megatron-core 0.16.1; tests/frameworks/test_megatron.py fails when one moves.
REPLACED = (
    (strategies, "FileSystemWriterAsync"),  # the writer of every save
    (strategies, "save_state_dict_async_finalize"),  # what ends a save
    (strategies.TorchDistSaveShardedStrategy, "async_save"),  # every save, synchronous ones too
    (MultiStorageClientFeature, "is_enabled"),  # the switch in front of all other files ...
    (MultiStorageClientFeature, "import_package"),  # ... and what carries them
)

_stock: dict[str, Any] = {}
"""What was there before, by name."""


def install(*, settings: SettingsLike = None) -> None:
    """Make `megatron.core.dist_checkpointing` save and load checkpoints at s3:// URLs.

    Every other path goes where it went before, msc:// and a real multistorageclient included. Call it on each rank
    before the first save or load. Another call replaces the arguments of the previous one.

    Args:
        settings: a `Settings`, or a mapping of settings that override the environment. The environment is read at each
            save and load.

    Raises:
        SettingsError: a setting, in the environment or given here, is not allowed.
    """
    resolve_settings(settings)
    for owner, name in REPLACED:
        _stock.setdefault(name, getattr(owner, name))
    stock_writer, stock_finalize, stock_save, is_enabled, import_package = _stock.values()
    files = Files(settings, is_enabled, import_package)
    was_on_s3: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # by strategy, of its last save

    def make_writer(path: Any, *args: Any, use_msc: bool = False, **options: Any) -> Any:
        if not is_s3_url(path):
            return stock_writer(path, *args, use_msc=is_enabled(), **options)
        return MegatronS3Writer(path, attachments=files.held.pop(parse_url(path), {}), settings=settings, **options)

    def end_save(writer: Any, *args: Any) -> None:
        (finalize if isinstance(writer, MegatronS3Writer) else stock_finalize)(writer, *args)

    @functools.wraps(stock_save)
    def async_save(strategy: Any, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> Any:
        on_s3 = is_s3_url(checkpoint_dir)
        if was_on_s3.get(strategy, on_s3) != on_s3:
            # Megatron would reuse its plans, whose storage_data are the other writer's, and on rank 0 the metadata.
            strategy.cached_central_plan = strategy.cached_local_plan = strategy.cached_global_metadata = None
            strategy.validated_cache_reuse = False
        was_on_s3[strategy] = on_s3
        if on_s3 and dist.get_rank() == 0:
            # Megatron writes it after the commit. It belongs to what is committed: no load works without it.
            config = CheckpointingConfig(strategy.backend, strategy.version)
            text = json.dumps(dataclasses.asdict(config))
            files.held.setdefault(parse_url(checkpoint_dir), {})[CONFIG_FNAME] = text.encode()
        return stock_save(strategy, sharded_state_dict, checkpoint_dir)

    replacements = make_writer, end_save, async_save, lambda: True, lambda: files
    for (owner, name), new in zip(REPLACED, replacements, strict=True):
        setattr(owner, name, new)


class Prepared(NamedTuple):
    """What one rank writes in one save. Picklable."""

    save: Save
    plan: SavePlan
    data: dict[MetadataIndex, torch.Tensor | io.BytesIO]


class MegatronS3Writer(S3StorageWriter):
    """Writes one checkpoint to S3 as Megatron's saves ask for it. A checkpoint that is there is replaced. A failure
    while a save is planned is raised when its results are asked for, on every rank: none waits for another.

    Args:
        checkpoint_dir: ``s3://bucket/prefix`` of the checkpoint, as text or as a path.
        separation_hint: is ignored.
        thread_count: most objects of this rank.

    Raises:
        InvalidURLError: ``checkpoint_dir`` is not an S3 URL.
        SettingsError: a setting, in the environment or given here, is not allowed.
    """

    can_run_decentralized_global_plan = True

    def __init__(
        self, checkpoint_dir: str | os.PathLike[str], *, separation_hint: str | None = None, thread_count: int = 2,
        attachments: Mapping[str, bytes] | None = None, settings: SettingsLike = None,
    ) -> None:  # fmt: skip
        super().__init__(checkpoint_dir, overwrite=True, max_objects=max(1, thread_count), settings=settings)
        self._failure: DcpS3Error | None = None
        self._prepared: Prepared | None = None
        self._is_sent = False
        self._has_attachments = bool(attachments)
        with self._failure_kept():
            for name, data in (attachments or {}).items():
                self.attach(name, data)

    @contextlib.contextmanager
    def _failure_kept(self) -> Iterator[None]:
        try:
            yield
        except DcpS3Error as error:
            self._failure = error

    # --- planning ----------------------------------------------------------------------------------------

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check the URL. A failure is kept: Megatron has other ranks wait for this one's plan."""
        with self._failure_kept():
            if self._failure is None:
                return super().prepare_local_plan(plan)
        return plan

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """This rank's plan. Nothing needs coordination: names are unique, and results say what they belong to."""
        return dataclasses.replace(local_plan, storage_data=None)  # equal in all saves: Megatron compares its caches

    # --- writing -----------------------------------------------------------------------------------------

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Collect what this rank writes. Tensors stay where they are until the preload."""
        if self._failure is not None:
            return
        data = {item.index: own_memory(planner.resolve_data(item)) for item in plan.items}
        self._prepared = Prepared(self._save, plan, data)

    def get_save_function_and_args(self) -> tuple[Callable[..., None] | None, Callable[[], Prepared] | None, list[Any]]:
        """What Megatron runs, here or in another process: the function that saves; the one that brings the data to host
        memory, whose result takes the place of the second argument; the three arguments. None if this rank writes
        nothing."""
        if self._failure is not None:
            return None, None, []
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            raise SaveProtocolError("there is nothing to save: Megatron calls prepare_write_data first")
        if not (prepared.plan.items or self._has_attachments):
            return None, None, []
        self._is_sent = True
        return write, functools.partial(preload, prepared), [process.rank(), prepared, write_results_queue()]

    def retrieve_write_results(self) -> list[WriteResult] | WRAPPED_EXCEPTION:
        """The results of this rank's save; what made it fail, if it did."""
        try:
            return self.take_results()
        except BaseException as error:  # noqa: BLE001 - it is raised on all ranks
            return error, traceback.extract_tb(error.__traceback__)

    def take_results(self) -> list[WriteResult]:
        """The results of this rank's save. Raises what made it fail."""
        if self._failure is not None:
            raise self._failure
        if not self._is_sent:
            return []
        save_id, arrived = self._save.save_id, write_results_queue()
        with contextlib.suppress(queue.Empty):
            while save_id not in _outcomes:
                other, outcome = arrived.get_nowait()
                _outcomes[other] = outcome
        outcome = _outcomes.pop(save_id, None)
        if outcome is None:
            raise CheckpointError(
                f"the process that saves to {self.checkpoint_id} ended without a result on rank {process.rank()}, so "
                "nothing was committed. Remedy: see whether it was killed, for example because memory was short",
                url=str(self.checkpoint_id),
            )
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def finalize(writer: MegatronS3Writer, metadata: Metadata | None, ranks_of_save: Any) -> None:
    """Commit when every rank has written. Takes the place of Megatron's ``save_state_dict_async_finalize``, which
    leaves the other ranks waiting if the commit fails. ``metadata`` is None on ranks other than the coordinator.

    Raises:
        CheckpointException: on all ranks, with the cause of each that failed.
    """

    def commit(all_results: list[list[WriteResult]]) -> None:
        if metadata is None:
            raise SaveProtocolError("Megatron planned this save without metadata")
        writer.finish(metadata, all_results)

    ranks_of_save.all_reduce("write", writer.take_results, commit)


# --- what runs in the process that saves --------------------------------------------------------------------


def preload(prepared: Prepared) -> Prepared:
    """Bring the tensors to host memory that nobody else changes."""
    data, is_copying = dict(prepared.data), False
    for index, value in data.items():
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu":
                data[index], is_copying = value.to("cpu", non_blocking=True), True
            elif value.is_shared():  # type: ignore[no-untyped-call]  # with the trainer, which goes on after this
                data[index] = value.clone()
    if is_copying:
        torch.accelerator.synchronize()
    return prepared._replace(data=data)


def write(rank: int, prepared: Prepared, results: Any) -> None:
    """Upload what this rank saves, and put the outcome into ``results``."""
    outcome: list[WriteResult] | BaseException
    # A planner that has the data already.
    planner = SimpleNamespace(resolve_data=lambda item: prepared.data[item.index])
    try:
        outcome = prepared.save.write_data(prepared.plan, cast(SavePlanner, planner))
    except BaseException as error:  # noqa: BLE001 - the trainer raises it; this process may have more saves to do
        text = "".join(traceback.format_exception(error))
        outcome = portable(error) or RuntimeError(f"the save failed on rank {rank}:\n{text}")
    results.put((prepared.save.save_id, outcome))


_outcomes: dict[str, list[WriteResult] | BaseException] = {}
"""In the trainer: results of saves, or what made them fail, by save id: of two under way, the later may end first."""


def own_memory(value: Any) -> Any:
    """A tensor with no more memory than its own: to a persistent process all of it would go."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    is_part = value.device.type == "cpu" and value.untyped_storage().nbytes() != value.nbytes
    return value.clone() if is_part else value
