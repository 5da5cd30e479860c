"""The benchmarks' in-memory server, in this process: the fastest, and its state is at hand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .server import S3Server, ServerUnavailable


@contextlib.contextmanager
def memory() -> Iterator[S3Server]:
    try:
        from tests.memory_s3 import MemoryS3
    except ModuleNotFoundError as e:
        if not (e.name or "").startswith("benchmarks"):
            raise
        raise ServerUnavailable("benchmarks/ is not on the path") from e
    with MemoryS3() as handle:
        yield S3Server(
            name="memory",
            endpoint_url=handle.endpoint_url,
            access_key="test-access-key",
            secret_key="test-secret-key",
            conditional_writes=True,
            verifies_checksums=True,
            handle=handle,
        )
