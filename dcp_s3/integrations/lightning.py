"""Lightning strategies whose sharded checkpoints lie on S3.

>>> from dcp_s3.integrations.lightning import S3ModelParallelStrategy
>>> trainer = Trainer(
...     strategy=S3ModelParallelStrategy(),
...     callbacks=[ModelCheckpoint(dirpath="s3://bucket/run", save_top_k=3, monitor="val_loss", save_last=True)],
... )
>>> trainer.fit(model, ckpt_path="last")

Import it before a ModelCheckpoint with an s3:// ``dirpath`` is made: where s3fs is not installed, this module tells
Lightning which checkpoints lie there.
"""

# ruff: noqa: E402
from __future__ import annotations

from dcp_s3.integrations.requirement import require

require("lightning", "lightning", "2.6", "2.7")

import contextlib
import io
import logging
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, NoReturn

import fsspec  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from dcp_s3 import errors
from dcp_s3.integrations.lightning_saves import BackgroundSaves, CheckpointFiles, find_url, newest
from dcp_s3.load.planner import S3LoadPlanner
from dcp_s3.load.reader import S3StorageReader
from dcp_s3.manager.agree import Ranks
from dcp_s3.manager.restore import load_error
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.settings import SettingsLike, resolve_settings

# Private names of Lightning that are used here: `ModelCheckpoint._fs`, the filesystem in which it looks for its
# checkpoints; `ModelParallelStrategy._save_distributed_checkpoint` and `FSDPStrategy._state_dict_type`, two arguments.

__all__ = ["S3FSDPStrategy", "S3ModelParallelStrategy", "newest"]

logger = logging.getLogger(__name__)

_META = "meta.pt"  # the name that Lightning's own strategies give it

if find_spec("s3fs") is None:
    fsspec.register_implementation("s3", CheckpointFiles)


class _S3Checkpoints(Strategy):
    """What both strategies do alike: checkpoints with an S3 URL go to S3, others where Lightning puts them."""

    _model_key: str
    """Name of the model in a checkpoint, as in Lightning's own."""

    def __init__(self, *args: Any, settings: SettingsLike = None, asynchronous: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = resolve_settings(settings)
        self.asynchronous = asynchronous
        self._groups: tuple[Ranks, Ranks] | None = None  # what the ranks agree on, and the saves beside it
        self._world: Any = None
        self._saves: BackgroundSaves | None = None
        self._interrupted = False

    def setup_environment(self) -> None:
        super().setup_environment()
        if self._groups is None or self._world is not dist.group.WORLD:
            self._groups, self._world = (Ranks(None), Ranks(None)), dist.group.WORLD

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self._interrupted = False
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._saves = self._make_saves()
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and find_url(callback.dirpath) is not None:
                # Also beside s3fs, which knows neither what is committed nor what is under way.
                callback._fs = CheckpointFiles(self._saves)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save to S3, in the background while `Trainer.fit` runs. Every rank calls it.

        Raises:
            SaveFailedError: an earlier save failed, and this state was not saved; or this save failed, if it is not in
                the background.
            InvalidURLError: the path is an S3 URL that was taken for a local path.
        """
        url = find_url(self.broadcast(filepath))
        if url is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} has no storage_options. Remedy: pass settings={{...}} to it")
        trainer, ranks = self._require_trainer(), self._require_groups()[0]
        state = {self._model_key: checkpoint.pop("state_dict")}
        for number, optimizer in enumerate(checkpoint.pop("optimizer_states", [])):
            state[f"optimizer_{number}"] = optimizer

        def attach(writer: S3StorageWriter) -> None:
            if ranks.is_first:
                buffer = io.BytesIO()
                torch.save(checkpoint, buffer)
                writer.attach(_META, buffer.getvalue())

        metrics = {"epoch": trainer.current_epoch, "global_step": trainer.global_step, **_plain(trainer)}
        saves = self._saves or self._make_saves()
        try:
            blocking = self._saves is None or not self.asynchronous
            saves.save(url, trainer.global_step, state, attach, metrics, blocking=blocking)
        finally:
            if self._saves is None:
                saves.close()

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load from S3, on any number of ranks. Every rank calls it.

        Args:
            weights_only: False: whatever is in the checkpoint is unpickled, so whoever can write to the bucket can run
                code here.

        Raises:
            RestoreFailedError: ``failures`` has the causes by rank. The state may be partly loaded.
            EntryNotFoundError: the checkpoint is not one of Lightning's.
        """
        url = find_url(self.broadcast(checkpoint_path))
        if url is None:
            loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
            return loaded
        ranks, safe = self._require_groups()[0], weights_only is not False
        if self._saves is not None:
            self._saves.wait()

        def reader() -> S3StorageReader:
            return S3StorageReader(url, weights_only=safe, process_group=ranks.group, settings=self.settings)

        meta = ranks.from_first(lambda: reader().attachment(_META))
        try:
            self._load(reader(), ranks)
        except CheckpointException as error:
            raise load_error(error, url) from error
        checkpoint: dict[str, Any] = torch.load(io.BytesIO(meta), weights_only=safe)
        return checkpoint

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint: during `Trainer.fit` in the background, when the save before is committed.

        As with local paths, one that `Trainer.fit` began from, or of another run, stays.
        """
        url = find_url(filepath)
        if url is None:
            super().remove_checkpoint(filepath)
        elif self._saves is not None:
            if self._is_own(url):
                self._saves.remove(url)
        else:
            saves = self._make_saves()
            saves.remove(url)
            saves.close()

    def on_exception(self, exception: BaseException) -> None:
        self._interrupted = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Wait for the saves under way.

        Raises:
            SaveFailedError: one of them failed. While another exception ends the training it is only logged.
        """
        saves, self._saves = self._saves, None
        if saves is not None:
            try:
                saves.close()
            except errors.SaveFailedError as error:
                if not self._interrupted:
                    raise  # Lightning calls this once more then
                logger.error("while an exception ended the training: %s", error)  # noqa: TRY400
        super().teardown()

    def _is_own(self, url: str) -> bool:
        """What ModelCheckpoint asks itself about local paths only."""
        trainer = self._require_trainer()
        roots = [find_url(getattr(callback, "dirpath", None)) for callback in trainer.checkpoint_callbacks]
        own = any(root is not None and url.startswith(f"{root}/") for root in roots)
        return own and url != find_url(trainer.ckpt_path)

    def _load(self, reader: S3StorageReader, ranks: Ranks) -> None:
        raise NotImplementedError

    def _require_groups(self) -> tuple[Ranks, Ranks]:
        if self._groups is None:
            raise errors.CheckpointError(
                f"{type(self).__name__} has no process group yet. Remedy: call Trainer.fit, validate or test first"
            )
        return self._groups

    def _make_saves(self) -> BackgroundSaves:
        return BackgroundSaves(*self._require_groups(), self.settings)

    def _fitted_optimizers(self) -> list[Any]:
        """The optimizers while `Trainer.fit` runs. Those of an earlier one have no use for a state."""
        return list(self.optimizers) if self._require_trainer().state.fn == TrainerFn.FITTING else []

    def _require_trainer(self) -> Trainer:
        return self.lightning_module.trainer


class S3ModelParallelStrategy(_S3Checkpoints, ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy` (FSDP2, tensor parallel) with checkpoints on S3.

    Args:
        args, kwargs: of `ModelParallelStrategy`. Checkpoints are always sharded.
        asynchronous: save in the background while `Trainer.fit` runs.

    Raises:
        ValueError: ``save_distributed_checkpoint`` is False.
        SettingsError: a setting is not allowed.
    """

    _model_key = "state_dict"

    def __init__(self, *args: Any, settings: SettingsLike = None, asynchronous: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, settings=settings, asynchronous=asynchronous, **kwargs)
        if not self._save_distributed_checkpoint:
            _refuse_full(self, "save_distributed_checkpoint=False")

    # Lightning's own copies to the host first. Here the stager does it, once.
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = get_model_state_dict(self.model)
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        state: dict[str, Any] = get_optimizer_state_dict(self.model, getattr(optimizer, "optimizer", optimizer))
        return state

    def _load(self, reader: S3StorageReader, ranks: Ranks) -> None:
        strict = self.lightning_module.strict_loading
        state: dict[str, Any] = {self._model_key: get_model_state_dict(self.model)}
        for number, optimizer in enumerate(self._fitted_optimizers()):
            state[f"optimizer_{number}"] = get_optimizer_state_dict(self.model, optimizer)
        planner = S3LoadPlanner(allow_partial_load=not strict)
        state_dict_loader.load(state, storage_reader=reader, process_group=ranks.group, planner=planner)
        self.model.load_state_dict(state[self._model_key], strict=strict)
        for number, optimizer in enumerate(self._fitted_optimizers()):
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=state[f"optimizer_{number}"])


class S3FSDPStrategy(_S3Checkpoints, FSDPStrategy):
    """Lightning's `FSDPStrategy` (FSDP1) with checkpoints on S3.

    Args:
        args, kwargs: of `FSDPStrategy`. Checkpoints are always sharded, which is not its default.
        asynchronous: save in the background while `Trainer.fit` runs.

    Raises:
        ValueError: ``state_dict_type`` is ``full``.
        SettingsError: a setting is not allowed.
    """

    _model_key = "model"

    def __init__(self, *args: Any, settings: SettingsLike = None, asynchronous: bool = True, **kwargs: Any) -> None:
        kwargs.setdefault("state_dict_type", "sharded")
        super().__init__(*args, settings=settings, asynchronous=asynchronous, **kwargs)
        if self._state_dict_type != "sharded":
            _refuse_full(self, f"state_dict_type={self._state_dict_type!r}")

    # Lightning's own copies to the host first. Here the stager does it, once.
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with _sharded(self.model):
            state: dict[str, Any] = self.model.state_dict()
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        with _sharded(self.model):
            state: dict[str, Any] = FullyShardedDataParallel.optim_state_dict(
                self.model, getattr(optimizer, "optimizer", optimizer)
            )
        return state

    def _load(self, reader: S3StorageReader, ranks: Ranks) -> None:
        strict = self.lightning_module.strict_loading
        with _sharded(self.model):
            state = {self._model_key: self.model.state_dict()}
            planner = S3LoadPlanner(allow_partial_load=not strict)
            state_dict_loader.load(state, storage_reader=reader, process_group=ranks.group, planner=planner)
            self.model.load_state_dict(state[self._model_key], strict=strict)
            for number, optimizer in enumerate(self._fitted_optimizers()):
                key = f"optimizer_{number}"
                loaded = load_sharded_optimizer_state_dict(state[self._model_key], key, reader)
                optimizer.load_state_dict(
                    FullyShardedDataParallel.optim_state_dict_to_load(self.model, optimizer, loaded[key])
                )


@contextlib.contextmanager
def _sharded(model: Any) -> Iterator[None]:
    """FSDP's state as shards, where they are."""
    with FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=False),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    ):
        yield


def _plain(trainer: Trainer) -> Mapping[str, float]:
    """What the training has logged, as numbers."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _refuse_full(strategy: Strategy, argument: str) -> NoReturn:
    raise ValueError(
        f"{type(strategy).__name__} saves sharded checkpoints only, and got {argument}. Remedy: leave it out; for one "
        "file with the whole state, convert a checkpoint afterwards"
    )
