"""A save that goes to another process, as some frameworks send it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_s3 import S3StorageReader, S3StorageWriter, events
from dcp_s3.save.writer import Save

pytestmark = pytest.mark.servers("memory")


def test_a_save_that_has_begun_may_be_pickled(root: str) -> None:
    heard: list[Any] = []
    url, state = f"{root}/step-1", {"w": torch.arange(8.0)}
    writer = S3StorageWriter(url, on_event=lambda event: heard.append(event))
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    save: Save = pickle.loads(pickle.dumps(writer._save))
    results = save.write_data(planner.finish_plan(plan[0]), planner)
    save.finish(metadata, [pickle.loads(pickle.dumps(results))])
    assert [type(event) for event in heard] == [events.SaveStarted]  # who listens stays in the process
    found = {"w": torch.zeros(8)}
    dcp.load(found, storage_reader=S3StorageReader(url))
    assert torch.equal(found["w"], state["w"])
