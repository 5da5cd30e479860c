"""Safetensors files into the tensors of a state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from dcp_s3 import errors, process
from dcp_s3.errors import WeightsError
from dcp_s3.events import Listener
from dcp_s3.failures import real_causes
from dcp_s3.load.planner import S3LoadPlanner
from dcp_s3.load.reader import S3StorageReader
from dcp_s3.load.weights import WeightsMetadata, rename_entries
from dcp_s3.offline.names import new_names
from dcp_s3.settings import SettingsLike


def load_safetensors(
    url: str | os.PathLike[str],
    state_dict: dict[str, Any],
    *,
    prefix: str = "",
    rename: Mapping[str, str] | None = None,
    tied: Mapping[str, str] | None = None,
    allow_partial_load: bool = False,
    allow_dtype_cast: bool = True,
    process_group: dist.ProcessGroup | None = None,
    settings: SettingsLike = None,
    on_event: Listener | None = None,
) -> None:
    """Fill the tensors of a state, in place, from safetensors files on S3, as Hugging Face's libraries write them.

    Called on all ranks with their parts of the state (DTensors or plain tensors), or in a process without a group. Each
    rank fetches only the ranges that it needs; what several ranks need is fetched once and sent between them. Entries
    of one memory (tied parameters) need only one of their names in the files. Other dtypes are converted.

    >>> exported = export("s3://bucket/run/step-00002000", "s3://bucket/hf-model")
    >>> model = {"model": {"weight": torch.zeros(4, 2)}}
    >>> load_safetensors("s3://bucket/hf-model", model, prefix="model.")

    Args:
        url: ``s3://bucket/prefix`` with ``*.safetensors``, with an index or without.
        state_dict: tensors by name, or such dicts in dicts: their names are joined by dots. A model's ``state_dict()``.
        prefix: put before every name of the files, for example ``model.``.
        rename: regular expressions, and what replaces their matches in the files' names, in this order, before the
            prefix.
        tied: names in the state that are in no file, each with that of the entry in the state that it equals.
        allow_partial_load: leave entries as they are that no file has, instead of MissingKeysError.
        allow_dtype_cast: False: an entry of another dtype is a TensorMismatchError, before anything is changed.
        process_group: see `S3StorageReader`.

    Raises:
        WeightsError: there are no weights at ``url``, they are damaged, or names do not fit.
        MissingKeysError: the state has entries that no file has.
        TensorMismatchError: a shape differs.
        CorruptCheckpointError: a file was replaced while it was read.
        InvalidURLError, SettingsError, StorageError
        CheckpointException: several ranks failed, with different errors; its ``failures`` has them.
    """
    reader = _Reader(
        url, allow_dtype_cast=allow_dtype_cast, process_group=process_group, settings=settings, on_event=on_event,
    )  # fmt: skip
    reader.names = prefix, rename, tied
    planner = S3LoadPlanner(allow_partial_load=allow_partial_load)
    alone = not process.is_initialized()
    try:
        state_dict_loader.load(
            state_dict, storage_reader=reader, planner=planner, process_group=process_group, no_dist=alone
        )
    except CheckpointException as error:
        first, *others = real_causes({rank: cause for rank, (cause, _) in error.failures.items()}).values()
        if isinstance(first, errors.DcpS3Error) and all(str(each) == str(first) for each in others):
            raise first from None
        raise


class _Reader(S3StorageReader):
    """Reads weights under other names."""

    names: tuple[str, Mapping[str, str] | None, Mapping[str, str] | None]

    def _fetch_metadata(self, rank: int | None) -> Metadata:
        metadata, url = super()._fetch_metadata(rank), str(self._url)
        if not isinstance(metadata, WeightsMetadata):
            raise WeightsError(f"{url} is a checkpoint of DCP. Remedy: dcp.load with S3StorageReader({url!r})")
        prefix, rules, tied = self.names
        names = {prefix + name: old for old, name in new_names(metadata.state_dict_metadata, rules or {}).items()}
        for name, other in (tied or {}).items():
            if other not in names:
                raise WeightsError(f"tied: {name!r} is to equal {other!r}, which is in no file of {url}")
            names[name] = names[other]
        return rename_entries(metadata, names)
