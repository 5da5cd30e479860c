"""A small S3 server that keeps every object in memory, for benchmarks and tests.

It verifies CRC-64/NVME; other checksums it keeps.

In a test, in this process::

    from tests.memory_s3 import Fault, MemoryS3

    with MemoryS3(fault=lambda r: Fault.error(503, "SlowDown") if r.number == 3 else None) as s3:
        client = boto3.client("s3", endpoint_url=s3.endpoint_url, ...)

In a benchmark, in a process of its own, so that client and server do not share an interpreter::

    with MemoryS3Process(preallocate=4 * 1024**3) as s3:
        client = boto3.client("s3", endpoint_url=s3.endpoint_url, ...)

From a shell: ``python -m tests.memory_s3 --port 9000 --preallocate 4GiB``.
"""

from .counters import Counters, Reader, Reads, fetch_counters, reset_counters
from .faults import Fault, RequestInfo
from .http import Link
from .process import MemoryS3Process
from .server import MemoryS3

__all__ = [
    "Counters", "Fault", "Link", "MemoryS3", "MemoryS3Process", "Reader", "Reads", "RequestInfo", "fetch_counters",
    "reset_counters",
]  # fmt: skip
