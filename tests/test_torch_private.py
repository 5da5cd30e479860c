"""The private parts of torch that dcp_s3's torch_private.py uses are still what we take them for.

Nothing here tests dcp_s3 alone. When one of these fails after an update of torch, its message says what moved and
what of ours relied on it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._checkpointable import _Checkpointable
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager

import dcp_s3
import dcp_s3.checkpoint
from dcp_s3 import shard, torch_private
from dcp_s3.format.layout import DCP_VERSION
from dcp_s3.stage import handover
from tests.relying import moved

_DCP = "torch.distributed.checkpoint."
_PACKAGE = Path(inspect.getfile(dcp_s3)).parent


_FILES = _DCP + "filesystem"


@pytest.mark.parametrize(
    ("module", "name", "remedy"),
    [
        ("torch._C", "PyTorchFileReader", "read archives with zipfile in format/safe_items.py"),
        ("torch.Tensor", "_make_wrapper_subclass", "LocalShards becomes a class of its own without memory"),
        ("torch.distributed._functional_collectives", "AsyncCollectiveTensor.trigger_wait", "stage/snapshot.py waits"),
        ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor", "drop it: torch deprecates it"),
        ("torch.distributed.distributed_c10d", "_get_default_store", "None: ranks find each other on S3"),
        (_DCP + "_async_executor", "_AsyncCheckpointExecutor.execute_save", "look for dcp.async_save's executors"),
        (_DCP + "_fsspec_filesystem", "FsspecReader", "torch_private.py tries two modules: add the third"),
        (_DCP + "_fsspec_filesystem", "FsspecWriter", "torch_private.py tries two modules: add the third"),
        (_DCP + "planner_helpers", "_create_chunk_list", "ask tensors for __create_chunk_list__"),
        (_FILES, "_StorageInfo", "a mirror: old metadata names it, so the class stays in pickles"),
        (_FILES, "_StorageReaderTransforms", "FileSystemReader.transforms is one"),
        ("torch.distributed._checkpointable", "_Checkpointable", "see what DCP asks tensors for: dcp_s3.shard"),
        (_DCP + "_storage_utils", "_storage_setup", "see how DCP chooses a writer: dcp_s3.register"),
    ],
)
def test_the_names_are_where_they_were(module: str, name: str, remedy: str) -> None:
    found: Any = torch.Tensor if module == "torch.Tensor" else importlib.import_module(module)
    for part in name.split("."):
        assert hasattr(found, part), moved(f"{module}.{name} is gone", f"torch_private.py. Remedy: {remedy}")
        found = getattr(found, part)


def test_private_torch_is_imported_in_one_module_only() -> None:
    """A private name that somebody imports elsewhere would not be watched by the tests here."""
    elsewhere = []
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path == Path(inspect.getfile(torch_private)):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("torch"):
                continue
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elsewhere += [f"{path.name}:{node.lineno}: {part}" for part in parts if part.startswith("_")]
    assert not elsewhere, "import it in torch_private.py, and add a test here"


def test_the_default_group_has_a_store_in_which_the_first_value_stands(tmp_path: Path) -> None:
    """coordination/identity.py: the ranks of a save without collectives find the id of their attempt there."""
    assert torch_private.default_store() is None
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        store = torch_private.default_store()
        message = moved("Store.compare_set does not set once, or Store.check does not look", "coordination")
        assert not store.check(["a key"]), message
        assert [store.compare_set("a key", "", value) for value in ("1", "2")] == [b"1", b"1"], message
        assert store.check(["a key"]), message
    finally:
        dist.destroy_process_group()
    assert torch_private.default_store() is None


def test_metadata_has_the_version_of_ours_and_properties_their_memory_format_in_the_fourth_place(
    tmp_path: Path,
) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    assert FileSystemReader(tmp_path).read_metadata().version == DCP_VERSION, moved(
        "Metadata.version", "layout.DCP_VERSION: see what the new format has"
    )
    state: Any = TensorProperties().__getstate__()  # type: ignore[no-untyped-call]
    assert type(state[3]).__name__ == "_MEM_FORMAT_ENCODING", moved("TensorProperties", "format/allow_list.py")


def test_the_signatures_are_what_they_were() -> None:
    for function, parameters in (
        (torch_private.create_chunk_list, "tensor"),
        (torch_private.StorageInfo, "relative_path offset length transform_descriptors"),
        (torch_private.ReaderTransforms, "extension_registry"),
        (torch_private.ReaderTransforms.transform_load_stream, "self read_item transform_descriptors raw_stream"),
    ):
        found = list(inspect.signature(function).parameters)
        assert found == parameters.split(), moved(
            f"{function.__qualname__} takes {found}", "load/planner.py, extensions"
        )


def test_the_executors_take_what_register_looks_for_by_keyword() -> None:
    executors = torch_private.AsyncCheckpointExecutor.__subclasses__()
    assert executors
    for executor in executors:
        found = inspect.signature(executor.execute_save).parameters
        for name in ("checkpoint_id", "storage_writer"):
            assert found[name].kind is inspect.Parameter.KEYWORD_ONLY, moved(
                f"{executor.__name__}.execute_save takes {name} by position", "register(): it looks into the keywords"
            )


def test_dcp_asks_a_tensor_for_its_chunks() -> None:
    relied_on = "dcp_s3.shard"
    value = shard(torch.arange(6.0), global_shape=(6,), offsets=(0,))
    assert isinstance(value, _Checkpointable), moved("_Checkpointable has other methods", relied_on)
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": value}, None, True)
    (item,) = planner.create_local_plan().items
    assert item.type == WriteItemType.SHARD, moved("the planner does not call __create_write_items__", relied_on)
    (chunk,) = torch_private.create_chunk_list(value)
    assert chunk.sizes == (6,), moved("the planner does not call __create_chunk_list__", relied_on)
    found = planner.resolve_data(item)
    assert isinstance(found, torch.Tensor)
    assert found.data_ptr() == value.boxes[0].data_ptr(), moved(  # type: ignore[attr-defined]
        "find_tensor_shard does not call __get_tensor_shard__", relied_on
    )


class _Noting(FileSystemWriter):
    """Notes in which thread it is used, and holds the save up until it may go on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.thread: Any = None

    def storage_meta(self) -> Any:
        self.thread = threading.current_thread()
        return super().storage_meta()


class _State(dict[str, Any]):
    """Notes who asks for its items."""

    thread: Any = None

    def items(self) -> Any:
        self.thread = threading.current_thread()
        return super().items()


class _Stager(AsyncStager):
    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> _State:
        self.staged = _State(state_dict)
        return self.staged

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("fails", [False, True])
def test_an_asynchronous_save_takes_its_state_up_in_a_thread_that_ends_with_it(tmp_path: Path, fails: bool) -> None:
    relied_on = "stage/handover.py, by which saves wait for each other, and failed ones are logged and let go of memory"
    stager, writer = _Stager(), _Noting(tmp_path)
    future: Any = dcp.async_save(
        {"w": torch.ones(3)},
        storage_writer=writer,
        async_stager=stager,
        planner=_Failing() if fails else None,
        use_collectives=False,
    )
    assert (future.exception(60) is not None) == fails
    assert stager.staged.thread is not threading.current_thread(), moved("the state is not asked for items", relied_on)
    assert stager.staged.thread is writer.thread, moved("the state is taken up elsewhere", relied_on)
    assert writer.thread.name.startswith(handover._EXECUTOR), moved("torch names its threads otherwise", relied_on)
    writer.thread.join(60)
    assert not writer.thread.is_alive(), moved("the thread of a save does not end with it", relied_on)


class _Failing(DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        raise ZeroDivisionError
