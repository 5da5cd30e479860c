"""Sizes of the parts of multipart uploads and of ranged requests. Pure."""

from __future__ import annotations

import math

from dcp_s3 import errors
from dcp_s3.settings import MAX_PART_SIZE

MAX_PARTS = 10_000
# Sizes of objects are estimates until the last item is framed: leave room for a tenth of the parts.
_PLANNED_PARTS = 9_000
_PART_SIZE_STEP = 2**20


# S3 takes so many of these per second and partition of its keys.
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html
PUTS_PER_SECOND = 3500
GETS_PER_SECOND = 5500
_CONNECTION_RATE = 90e6  # bytes per second
_SMALL_PART, _GOOD_PART = 8 * 2**20, 32 * 2**20


def plan_part_size(total: int, *, connections: int, ranks: int, most: int, requests_per_second: int) -> int:
    """Bytes of a part or ranged GET, if one of ``ranks`` ranks moves ``total`` bytes.

    Every connection gets two, so that none has much to do when the others are done, or one if two would be small,
    because each costs a millisecond of CPU. Larger ones where otherwise all ranks together would make more requests
    than S3 takes: as many connections as have a part send it in its bytes over 90 MB/s.
    """
    share = -(-total // connections)
    size = min(most, max(_SMALL_PART, min(share, _GOOD_PART), share // 2))
    all_send = ranks * connections * _CONNECTION_RATE / requests_per_second
    some_send = math.sqrt(ranks * total * _CONNECTION_RATE / requests_per_second)
    size = max(size, min(math.ceil(min(all_send, some_send)), MAX_PART_SIZE))
    return -(-size // _PART_SIZE_STEP) * _PART_SIZE_STEP


def choose_part_size(object_size: int, part_size: int) -> int:
    """Part size for an object of about ``object_size`` bytes: ``part_size``, or more where S3's limit of 10,000
    parts requires it (rounded up to whole MiB).
    """
    if object_size <= part_size * _PLANNED_PARTS:
        return part_size
    needed = -(-object_size // _PLANNED_PARTS)
    size = -(-needed // _PART_SIZE_STEP) * _PART_SIZE_STEP
    if size > MAX_PART_SIZE:
        raise errors.SettingsError(
            f"an object of {object_size} bytes does not fit into 10,000 parts of at most 5 GiB: shard the "
            "state over more ranks, or raise S3StorageWriter(max_objects=...)"
        )
    return size
