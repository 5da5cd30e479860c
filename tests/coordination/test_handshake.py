"""What the first rank of a process group says, whatever earlier ones have left in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from dcp_s3.coordination import identity
from dcp_s3.coordination.identity import ask, tell
from dcp_s3.errors import SaveProtocolError, StorageError


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def _other(store: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=60))


def test_each_attempt_hears_its_own_first_rank(store: dist.TCPStore) -> None:
    """torchrun's agent keeps one store over all restarts."""
    clients = [_other(store) for _ in range(3)]
    for attempt in ("first", "second", "third"):
        with ThreadPoolExecutor(3) as threads:
            asked = [threads.submit(ask, client, 60.0) for client in clients[:2]]  # before it is there
            tell(store, attempt, 3)
            asked.append(threads.submit(ask, clients[2], 60.0))
            assert [each.result(60) for each in asked] == [attempt] * 3


def test_who_died_before_it_heard_is_not_counted(store: dist.TCPStore) -> None:
    with pytest.raises(SaveProtocolError, match="rank 0 of the process group has not come to a save"):
        ask(_other(store), 0.05)
    store.add(identity._asks(""), 1)  # and one that died before it had said its word
    tell(store, "second", 1)
    assert ask(_other(store), 60.0) == "second"


def test_a_store_that_is_gone_is_told(store: dist.TCPStore) -> None:
    client = _other(store)
    del store  # the one that holds it
    with pytest.raises((StorageError, SaveProtocolError)):
        ask(client, 0.5)
