"""Saves, loads and their failures, in a line of a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3StorageReader, S3StorageWriter
from tests.end_to_end.states import assert_same, blank


def save(state: Any, url: str | None, attach: Mapping[str, bytes] | None = None, **writer: Any) -> Any:
    """By a writer with these arguments and attachments; returns the metadata."""
    made = S3StorageWriter(url, **writer)
    for name, data in (attach or {}).items():
        made.attach(name, data)
    return dcp.save(state, storage_writer=made)


def load(state: Any, url: str | None, **reader: Any) -> Any:
    """Into ``state``, which is returned, by a reader with these arguments."""
    dcp.load(state, storage_reader=S3StorageReader(url, **reader))
    return state


def assert_loads(url: str, expected: Any, **reader: Any) -> None:
    """What is there, loaded into a blank state, is ``expected`` to the last bit."""
    assert_same(load(blank(expected), url, **reader), expected)


def failure(action: Callable[[], object], kind: type[BaseException] = Exception, match: str | None = None) -> Any:
    """What a save or load fails with on the one rank."""
    with pytest.raises(CheckpointException, match=match) as caught:
        action()
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, kind), repr(error)
    return error
