"""How the files that ranks have written become a checkpoint.

Each rank writes a record before its first file, ``.dcp_s3/files-{rank}.json``, over one that an earlier attempt left.
After a barrier each completes its record, also with what rank 0's says which save it is of, and rank 0 commits what the
records of its own save name. Other files are no part of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from dcp_s3 import errors
from dcp_s3.checkpoint.commit import make_commit, publish
from dcp_s3.checkpoint.commit_state import Previous, SaveIdentity, find_save_id, read_manifest
from dcp_s3.checksum import crc64nvme, crc_hex
from dcp_s3.format.control_files import Manifest, ObjectEntry
from dcp_s3.format.layout import FILES_PREFIX, METADATA, new_save_id, step_of
from dcp_s3.store import Store
from dcp_s3.url import CheckpointURL

_NAME = "torch_checkpointing"
_PAUSES = (0.05, 2.0)
"""Seconds between two looks, the first and the longest."""


def put_record(
    store: Store,
    url: CheckpointURL,
    rank: int,
    nonce: str,
    files: Iterable[ObjectEntry] | None = None,
    *,
    of: str | None = None,
) -> None:
    """Write what a rank has written in this save, whose random id is ``nonce``; None: it is still writing.

    Args:
        of: rank 0's nonce.
    """
    entries = None if files is None else [[each.path, each.size, each.crc64nvme] for each in files]
    data = json.dumps({"format_version": 1, "nonce": nonce, "of": of, "files": entries}).encode()
    store.put(url.key(_record(rank)), data)


def publish_files(
    store: Store, url: CheckpointURL, rank: int, world_size: int, nonce: str, files: Iterable[ObjectEntry], wait: float
) -> None:
    """Complete this rank's record, and return when the checkpoint is committed with it. Rank 0 commits once all records
    are complete.

    Raises:
        CheckpointExistsError: another save has committed to this URL.
        CheckpointDeletedError: a prune deletes what an earlier attempt left, and files of this one with it.
        TransferError: there is no commit after ``wait`` seconds.
        StorageError
    """
    began, pause, told = time.monotonic(), _PAUSES[0], ""
    records: dict[int, bytes] = {}
    files = list(files)
    if rank == 0:
        put_record(store, url, rank, nonce, files, of=nonce)
    while (manifest := _find_manifest(store, url)) is None:
        missing = [each for each in range(world_size) if each not in records] if rank == 0 else [0]
        if rank == 0:
            found = store.map(lambda store, each: _read(store, url, each), missing)
            complete = ((each, data) for each, (data, fields) in zip(missing, found, strict=True)
                        if fields.get("of") == nonce and fields["files"] is not None)  # fmt: skip
            records |= dict(complete)
        else:
            first = _read(store, url, 0)[1].get("nonce", "")
            # Only what has this save's record: another attempt may have begun.
            if first != told and (not told or _read(store, url, rank)[1].get("nonce") == nonce):
                put_record(store, url, rank, nonce, files, of=first)
                told = first
        if len(records) == world_size:
            _commit(store, url, [records[each] for each in range(world_size)])
        elif time.monotonic() - began > wait:
            raise errors.TransferError(
                f"{url} was not committed: for {wait:g} s nothing came from ranks {missing}. Remedy: see their logs; "
                "commit must be the finalize_callback of every rank",
                bucket=url.bucket, key=url.key(METADATA), operation="PutObject",
            )  # fmt: skip
        else:
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
    if manifest.coordination.get(_NAME, {}).get(str(rank)) != nonce:
        raise errors.CheckpointExistsError(
            f"{url} was committed by another save, without what rank {rank} of this one has written. Remedy: end what "
            "else writes there, and save to another URL",
            url=str(url),
        )


def find_files(store: Store, url: CheckpointURL) -> Mapping[str, ObjectEntry] | None:
    """The files of a committed checkpoint by relative path; None if there is none."""
    manifest = _find_manifest(store, url)
    if manifest is None:
        return None
    return {each.path: each for each in manifest.objects if not each.path.startswith(FILES_PREFIX)}


def _record(rank: int) -> str:
    return f"{FILES_PREFIX}{rank}.json"


def _find_manifest(store: Store, url: CheckpointURL) -> Manifest | None:
    try:
        save_id = find_save_id(store, SaveIdentity(url, ""))
    except errors.ObjectNotFoundError:
        return None
    return read_manifest(store, SaveIdentity(url, save_id or ""))


def _read(store: Store, url: CheckpointURL, rank: int) -> tuple[bytes, dict[str, Any]]:
    """A rank's record, and its fields; empty if there is none."""
    try:
        data = store.get(url.key(_record(rank))).data
    except errors.ObjectNotFoundError:
        return b"", {}
    return data, json.loads(data)


def _commit(store: Store, url: CheckpointURL, records: list[bytes]) -> None:
    identity, nonces, objects = SaveIdentity(url, new_save_id()), {}, []
    for rank, data in enumerate(records):
        fields = json.loads(data)
        nonces[str(rank)] = fields["nonce"]
        objects += [ObjectEntry(_record(rank), len(data), crc_hex(crc64nvme(data)))]
        objects += [ObjectEntry(*each) for each in fields["files"]]
    metadata = Metadata({}, {}, {}, StorageMeta(checkpoint_id=str(url), save_id=identity.save_id))
    commit = make_commit(
        identity, metadata, objects, step=step_of(url.name), world_size=len(records), metrics={},
        coordination={_NAME: nonces},
    )  # fmt: skip
    # Names are not this attempt's own: a prune that deletes what another one left may name them at any time.
    publish(store, commit, Previous(), keep_objects=True, is_late=lambda: True)
