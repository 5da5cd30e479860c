"""A Lightning strategy whose sharded checkpoints lie on S3.

>>> from dcp_s3.integrations.lightning import S3ModelParallelStrategy
>>> trainer = Trainer(
...     strategy=S3ModelParallelStrategy(),
...     callbacks=[ModelCheckpoint(dirpath="s3://bucket/run", save_top_k=3, monitor="val_loss", save_last=True)],
... )
>>> trainer.fit(model, ckpt_path="last")

Import this before a ModelCheckpoint with an s3:// ``dirpath`` is made: without s3fs it tells Lightning what is there.
"""

# ruff: noqa: E402
from __future__ import annotations

from dcp_s3.integrations import require

require("lightning", "2.6", "2.7")

import contextlib
import io
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.util import find_spec
from typing import Any

import fsspec  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint import state_dict as states

from dcp_s3 import errors
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.checkpoint.look import inspect
from dcp_s3.integrations.saves import Saves, load_state
from dcp_s3.load.reader import S3StorageReader
from dcp_s3.manager.agree import Ranks
from dcp_s3.retention.catalog import list_checkpoints
from dcp_s3.s3.store import store_of
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.stage.stager import S3Stager
from dcp_s3.url import is_s3_url, parse_url

_META = "meta.pt"  # the name that Lightning's own strategies give it


class S3ModelParallelStrategy(ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy` (FSDP2, tensor parallel): checkpoints with an S3 URL go to S3, others where
    Lightning puts them.

    Args:
        args, kwargs: of `ModelParallelStrategy`. Checkpoints are always sharded.

    Raises:
        ValueError: ``save_distributed_checkpoint`` is False.
        SettingsError: a setting is not allowed.
    """

    _world: Any = None

    def __init__(self, *args: Any, settings: SettingsLike = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = resolve_settings(settings)
        self._saves: Saves | None = None
        if not self._save_distributed_checkpoint:
            raise ValueError(
                "S3ModelParallelStrategy saves sharded checkpoints only, and got save_distributed_checkpoint=False. "
                "Remedy: leave it out; for one file with the whole state, convert a checkpoint afterwards"
            )

    def setup_environment(self) -> None:
        super().setup_environment()
        if self._world is not dist.group.WORLD:
            # What the ranks agree on, and the saves beside it.
            self._ranks, self._background, self._world = Ranks(None), Ranks(None), dist.group.WORLD

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._saves = self._make_saves()
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and find_url(callback.dirpath) is not None:
                # Private. Also beside s3fs, which knows neither what is committed nor what is under way.
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
        if (url := find_url(self.broadcast(filepath))) is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        trainer, ranks = self.lightning_module.trainer, self._ranks
        state = {f"optimizer_{number}": each for number, each in enumerate(checkpoint.pop("optimizer_states", []))}
        state["state_dict"] = checkpoint.pop("state_dict")

        def describe() -> tuple[Mapping[str, Any], Mapping[str, bytes]]:
            logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
            metrics = {"epoch": trainer.current_epoch, "global_step": trainer.global_step, **logged}
            buffer = io.BytesIO()
            if ranks.is_first:
                torch.save(checkpoint, buffer)
            return metrics, {_META: buffer.getvalue()} if ranks.is_first else {}

        with self._working_saves() as saves:
            saves.save(url, trainer.global_step, state, describe, blocking=self._saves is None)

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
        if (url := find_url(self.broadcast(checkpoint_path))) is None:
            return dict(super().load_checkpoint(checkpoint_path, weights_only))
        safe = weights_only is not False
        strict, fitting = self.lightning_module.strict_loading, self.lightning_module.trainer.state.fn
        if self._saves is not None:
            self._saves.wait()
        meta = self._ranks.from_first(lambda: S3StorageReader(url, settings=self.settings).attachment(_META))
        # Optimizers of an earlier `Trainer.fit` have no use for a state.
        used = self.optimizers if fitting == TrainerFn.FITTING else []
        optimizers = {f"optimizer_{number}": each for number, each in enumerate(used)}
        state = {name: self.optimizer_state(each) for name, each in optimizers.items()}
        state["state_dict"] = self.lightning_module_state_dict()
        load_state(url, state, self._ranks.group, self.settings, partial=not strict, weights_only=safe)
        self.model.load_state_dict(state["state_dict"], strict=strict)
        for name, each in optimizers.items():
            states.set_optimizer_state_dict(self.model, each, optim_state_dict=state[name])
        return dict(torch.load(io.BytesIO(meta), weights_only=safe))

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint: during `Trainer.fit` in the background, when the save before is committed. As with local
        paths, one that `Trainer.fit` began from, or of another run, stays."""
        if (url := find_url(filepath)) is None:
            super().remove_checkpoint(filepath)
            return
        # What ModelCheckpoint asks itself about local paths only.
        trainer = self.lightning_module.trainer
        roots = [find_url(getattr(callback, "dirpath", None)) for callback in trainer.checkpoint_callbacks]
        is_own = any(root is not None and url.startswith(f"{root}/") for root in roots)
        if self._saves is None or (is_own and url != find_url(trainer.ckpt_path)):
            with self._working_saves() as saves:
                saves.remove(url)

    def teardown(self) -> None:
        """Wait for the saves under way. Raises SaveFailedError if one failed."""
        saves, self._saves = self._saves, None  # Lightning calls this once more after an error
        try:
            if saves is not None:
                saves.close()
        finally:
            super().teardown()

    # Lightning's own copy to the host first. Here the stager does it, once.
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return dict(states.get_model_state_dict(self.model))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return dict(states.get_optimizer_state_dict(self.model, getattr(optimizer, "optimizer", optimizer)))

    def _working_saves(self) -> contextlib.AbstractContextManager[Saves]:
        """Those of `Trainer.fit`; outside of it new ones, which have ended afterwards."""
        return contextlib.closing(self._make_saves()) if self._saves is None else contextlib.nullcontext(self._saves)

    def _make_saves(self) -> Saves:
        # ModelCheckpoint saves a step twice: one of the best, and the last.
        return Saves(self._ranks, self.settings, S3Stager(self.settings), background=self._background, queue=1)


# --- what Lightning sees ----------------------------------------------------------------------------------

_CHAINED = "s3::"


class CheckpointFiles(fsspec.AbstractFileSystem):
    """A read-only view: committed checkpoints are directories, and there is nothing else. What ``saves`` under way
    write is there already, and what they are to remove is not."""

    protocol = "s3"
    cachable = False

    def __init__(self, saves: Saves | None = None, **options: Any) -> None:
        super().__init__()
        self._saves = saves

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether a committed checkpoint is at or directly below ``path``."""
        expected = None if self._saves is None else self._saves.will_hold(str(parse_url(_text(path))))
        return bool(self._committed(path) or self.ls(path)) if expected is None else expected

    isdir = exists

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> list[str]:
        """The committed checkpoints directly below ``path``."""
        # Lightning normalizes the names as paths, and s3:/... would be a local one. A chained URL stays what it is.
        found = list_checkpoints(_text(path))
        return [_CHAINED + info.url.removeprefix("s3://") for info in found if info.committed]

    def modified(self, path: str) -> datetime:
        """When the checkpoint at ``path`` was committed."""
        if info := self._committed(path):
            return datetime.fromtimestamp(info.created_at or 0.0, tz=timezone.utc)
        raise FileNotFoundError(path)

    def _committed(self, path: str) -> CheckpointInfo | None:
        url = parse_url(_text(path))
        found = inspect(store_of(url, resolve_settings(None)), url)
        return found.info if found and found.info.committed else None


if find_spec("s3fs") is None:
    fsspec.register_implementation("s3", CheckpointFiles)


def find_url(path: str | os.PathLike[str] | None) -> str | None:
    """The S3 URL that Lightning means by a path; None if it is another path. InvalidURLError if Lightning took an S3
    URL for a local path."""
    text = os.fspath(path or "")
    if text.startswith(_CHAINED) or is_s3_url(text):
        return str(parse_url(_text(text)))
    if "/s3:/" in text:
        raise errors.InvalidURLError(
            f"{text!r} is an S3 URL that was taken for a local path. Remedy: pass it as text, not as a pathlib.Path"
        )
    return None


def _text(path: str) -> str:
    return path if is_s3_url(path) else "s3://" + path.removeprefix(_CHAINED)
