"""Reads single tensors of a checkpoint, for inspection and serving: `read_tensor` and `read_tensors`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_s3 import errors
from dcp_s3.offline.indexing import Index, Selection, select
from dcp_s3.offline.open_checkpoint import OpenCheckpoint
from dcp_s3.settings import SettingsLike


def read_tensor(
    url: str | os.PathLike[str],
    fqn: str,
    slice: Index = None,
    *,
    settings: SettingsLike = None,
) -> torch.Tensor:
    """Read one tensor of a committed checkpoint, or a part of it, into host memory.

    Needs no process group, and calls no collective if there is one. Fetches the metadata, and the same bytes of the
    saved chunks that a load of this part would.

    >>> read_tensor("s3://bucket/run/step-00002000", "weight", (slice(0, 2),))
    tensor([[0., 1.],
            [2., 3.]])

    Args:
        url: URL of the checkpoint.
        fqn: name of the tensor, as ``dcp-s3 show`` lists it.
        slice: part to read, as in numpy: ``3``, ``np.s_[:10, ..., -1]``. Numbers, slices with step 1, an Ellipsis.
        settings: a `Settings`, or a mapping of those that differ from the environment.

    Returns:
        A contiguous tensor of the saved dtype.

    Raises:
        EntryNotFoundError: there is no such tensor.
        TensorIndexError: ``slice`` is out of range or not supported.
        CheckpointNotFoundError, CorruptMetadataError, CorruptCheckpointError
        InvalidURLError, SettingsError, StorageError, DeadlineExceededError
    """
    checkpoint = OpenCheckpoint(url, settings)
    saved = checkpoint.find(fqn)
    if not isinstance(saved, TensorStorageMetadata):
        raise errors.EntryNotFoundError(
            f"{fqn!r} in {checkpoint.url} is no tensor. Remedy: read_tensors(url, [{fqn!r}]) reads objects, too",
            url=str(checkpoint.url),
            fqn=fqn,
        )
    try:
        selection = select(slice, saved.size)
    except IndexError as error:
        raise errors.TensorIndexError(
            f"{fqn!r} in {checkpoint.url}, of shape {tuple(saved.size)}, cannot be read at {slice!r}: {error}",
            url=str(checkpoint.url),
            fqn=fqn,
        ) from None
    return checkpoint.read({fqn: selection})[fqn].reshape(selection.shape)  # type: ignore[no-any-return]


def read_tensors(
    url: str | os.PathLike[str],
    fqns: str | Iterable[str] | None = None,
    *,
    weights_only: bool = True,
    settings: SettingsLike = None,
) -> dict[str, Any]:
    """Read entries of a committed checkpoint: tensors into host memory, and objects.

    Works like `read_tensor`, but fetches all entries together and the metadata once.

    >>> read_tensors("s3://bucket/run/step-00002000")["step"]
    2000

    Args:
        url: URL of the checkpoint.
        fqns: names, or patterns such as ``model.*`` (``*`` any text, ``?`` any character, ``[ab]`` one of them); None:
            everything. An entry with exactly that name takes precedence over a pattern.
        weights_only: whether to unpickle only objects that cannot run code, as `S3StorageReader` does.
            False: whoever can write to the bucket can run code here.
        settings: a `Settings`, or a mapping of those that differ from the environment.

    Returns:
        Entries by name, in the order of ``fqns``; the matches of a pattern in the order of the checkpoint.

    Raises:
        EntryNotFoundError: a name is not in the checkpoint, or a pattern matches nothing.
        UnsafeItemError: an object needs what ``weights_only`` refuses.
        CheckpointNotFoundError, CorruptMetadataError, CorruptCheckpointError
        InvalidURLError, SettingsError, StorageError, DeadlineExceededError
    """
    checkpoint = OpenCheckpoint(url, settings)
    wanted: dict[str, Selection | None] = {}
    for name in checkpoint.match(fqns):
        saved = checkpoint.find(name)
        wanted[name] = select(None, saved.size) if isinstance(saved, TensorStorageMetadata) else None
    return checkpoint.read(wanted, weights_only=weights_only)
