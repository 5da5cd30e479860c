"""What is left in memory of asynchronous saves that have ended."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageWriter
from tests.memory_s3 import Fault
from tests.servers import S3Server

pytestmark = pytest.mark.servers("memory")

PATIENCE = 60.0


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_of_a_save_that_has_ended(memory_server: S3Server, root: str, fails: bool) -> None:
    """Its metadata may have hundreds of MiB, and a training makes thousands of saves."""

    def refuse(request: Any) -> Fault | None:
        return Fault.error(403, "AccessDenied") if request.key.endswith(".distcp") else None

    memory_server.handle.fault = refuse if fails else None
    try:
        writer = S3StorageWriter(f"{root}/step-1")
        saving: Any = dcp.async_save({"w": torch.ones(10)}, storage_writer=writer)
        assert (saving.exception(PATIENCE) is not None) == fails
    finally:
        memory_server.handle.fault = None
    left = [weakref.ref(each) for each in (writer, saving)]
    del writer, saving
    for _ in range(100):  # the thread of the save ends shortly after its future
        gc.collect()
        if not any(each() for each in left):
            break
        time.sleep(0.05)
    assert [each() for each in left] == [None, None]
