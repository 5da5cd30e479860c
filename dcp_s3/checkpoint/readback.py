"""Whether what is about to be committed can be read back here: a torch whose pickles changed must not cost a week.

The checkpoint that a save replaces is deleted after the commit, and retention deletes earlier ones. So before the first
commit of a process, and whenever a pickle names something new, the reader's own code loads what was written.
"""

from __future__ import annotations

import io
from collections.abc import Iterable

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_s3 import errors
from dcp_s3.format.framing import FramingError, compute_frame
from dcp_s3.format.metadata import load_metadata
from dcp_s3.format.safe_items import check_item
from dcp_s3.memory import view_bytes
from dcp_s3.process import __version__
from dcp_s3.url import CheckpointURL

_known: set[bytes] = set()  # names in pickles that could be read back
_SHAPE = torch.Size((2, 3))
_LONGEST_NAME = 256


def check_readable(data: bytes, url: CheckpointURL, *, of_rank: bool = False) -> None:
    """Load ``.metadata``, and an item of each dtype in it and one that is no tensor, as a reader would.

    Does nothing if earlier commits of this process had the same names in them.
    """
    names = find_names(data)
    if names <= _known:
        return
    try:
        metadata = load_metadata(data, url=str(url), of_rank=of_rank)
        saved = [each for each in metadata.state_dict_metadata.values() if isinstance(each, TensorStorageMetadata)]
        _check_items({each.properties.dtype for each in saved}, str(url))
    except Exception as error:
        raise errors.SaveProtocolError(
            f"{url} was not committed: what was written cannot be read back with torch {torch.__version__} and dcp_s3 "
            f"{__version__}: {type(error).__name__}: {error}. What was there before is untouched. Remedy: save with a "
            "torch that README names as tested, or with a newer dcp_s3",
            url=str(url),
        ) from error
    _known.update(names)


def find_names(data: bytes) -> set[bytes]:
    """Names of the classes and constants that a pickle of protocol 4 or later looks up."""
    names: set[bytes] = set()
    end = data.find(b"\x94\x93")  # MEMOIZE, STACK_GLOBAL
    while end >= 0:
        name = data[max(0, end - _LONGEST_NAME) : end].rpartition(b"\x8c")[2]  # its length, and itself
        if name and name[0] == len(name) - 1:
            names.add(name[1:])
        end = data.find(b"\x94\x93", end + 2)
    return names


def _check_items(dtypes: Iterable[torch.dtype], url: str) -> None:
    for dtype in dtypes:
        try:
            frame = compute_frame(dtype, _SHAPE)
        except (FramingError, RuntimeError):  # torch.save writes its items
            continue
        raw = bytes(range(frame.nbytes))
        found = torch.load(io.BytesIO(frame.header + raw + frame.trailer), map_location="cpu", weights_only=True)
        if (found.dtype, found.shape, bytes(view_bytes(found))) != (dtype, _SHAPE, raw):
            raise errors.CorruptCheckpointError(f"torch.load makes another tensor of a {dtype}", url=url)
    stream = io.BytesIO()
    torch.save({"a": [1, 0.5, "text", None]}, stream)
    stream.seek(0)
    check_item(stream, fqn="a", url=url, verified=True)
    if torch.load(stream, weights_only=False) != {"a": [1, 0.5, "text", None]}:
        raise errors.CorruptCheckpointError("torch.load makes another object of a dict", url=url)
