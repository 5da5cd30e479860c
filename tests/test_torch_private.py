"""The private parts of torch that dcp_s3's torch_private.py uses are still what we take them for.

Nothing here tests dcp_s3 alone. When one of these fails after an update of torch, its message says what moved and
what of ours relied on it.
"""

from __future__ import annotations

import ast
import dataclasses
import gc
import importlib
import inspect
import io
import pickle
import subprocess
import sys
import tempfile
import textwrap
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    FileSystemWriter,
    _async_process_executor,
    default_planner,
    state_dict_loader,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import dcp_s3.checkpoint
from dcp_s3 import torch_private
from dcp_s3.errors import ShapeMismatchError
from dcp_s3.format import storage_info
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

_DCP = "torch.distributed.checkpoint."
_PACKAGE = Path(inspect.getfile(dcp_s3)).parent


def _moved(what: str, relied_on: str) -> str:
    return f"torch {torch.__version__}: {what}. What relied on it: {relied_on}"


# --- names and signatures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.cuda._pin_memory_utils", "pin_memory"),
        ("torch.cuda._pin_memory_utils", "unpin_memory"),
        ("torch.distributed._functional_collectives", "AsyncCollectiveTensor"),
        ("torch.distributed._shard._utils", "narrow_tensor_by_index"),
        ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"),
        (_DCP + "planner_helpers", "_create_chunk_list"),
        ("torch.distributed._shard.sharded_tensor.shard", "Shard"),
        ("torch.utils._python_dispatch", "is_traceable_wrapper_subclass"),
        ("torch._C", "PyTorchFileReader"),
        (_DCP + "metadata", "_MEM_FORMAT_ENCODING"),
        (_DCP + "_async_process_executor", "_ProcessBasedAsyncCheckpointExecutor"),
        (_DCP + "_async_process_executor", "_AsyncCheckpointProcess"),
        (_DCP + "_extension", "ExtensionRegistry"),
        (_DCP + "_extension", "StreamTransformExtension"),
        (_DCP + "_storage_utils", "FileSystemReader"),
        (_DCP + "_storage_utils", "FileSystemWriter"),
        (_DCP + "_storage_utils", "_storage_setup"),
        (_DCP + "filesystem", "CURRENT_DCP_VERSION"),
        (_DCP + "filesystem", "_StorageInfo"),
        (_DCP + "filesystem", "_StoragePrefix"),
        (_DCP + "filesystem", "_StorageReaderTransforms"),
        (_DCP + "filesystem", "_StorageWriterTransforms"),
    ],
)
def test_the_names_are_where_they_were(module: str, name: str) -> None:
    found = importlib.import_module(module)
    assert hasattr(found, name), _moved(f"{module}.{name} is gone", "the import in torch_private.py")


def test_private_torch_is_imported_in_three_modules_only() -> None:
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


@pytest.mark.parametrize(
    ("function", "parameters", "relied_on"),
    [
        (torch_private.narrow_tensor_by_index, ["tensor", "offsets", "sizes"], "load/prepare.py, items without offset"),
        (torch_private.create_chunk_list, ["tensor"], "load/planner.py"),
        (
            torch_private.StorageInfo,
            ["relative_path", "offset", "length", "transform_descriptors"],
            "make_storage_info",
        ),
        (torch_private.WriterTransforms, ["extensions"], "S3StorageWriter(_extensions=...)"),
        (
            torch_private.WriterTransforms.transform_save_stream,
            ["self", "write_item", "raw_stream"],
            "save/items.py, stream extensions",
        ),
        (torch_private.ReaderTransforms, ["extension_registry"], "S3StorageReader(_extension_registry=...)"),
        (
            torch_private.ReaderTransforms.transform_load_stream,
            ["self", "read_item", "transform_descriptors", "raw_stream"],
            "load/prepare.py, stream extensions",
        ),
        (
            torch_private.AsyncCheckpointProcess.save,
            [
                "self",
                "staged_state_dict",
                "checkpoint_id",
                "storage_writer",
                "planner",
                "no_dist",
                "use_collectives",
            ],
            "register(), which passes a writer to AsyncCheckpointerType.PROCESS",
        ),
    ],
)
def test_the_signatures_are_what_they_were(function: Any, parameters: list[str], relied_on: str) -> None:
    found = list(inspect.signature(function).parameters)
    assert found == parameters, _moved(f"{function.__qualname__} takes {found}, was {parameters}", relied_on)


def test_the_process_executor_passes_what_register_looks_for_by_keyword() -> None:
    found = inspect.signature(torch_private.AsyncCheckpointProcess.save).parameters
    for name in ("checkpoint_id", "storage_writer"):
        assert found[name].kind is inspect.Parameter.KEYWORD_ONLY, _moved(
            f"_AsyncCheckpointProcess.save takes {name} by position", "register(): it looks into the keywords"
        )


def test_the_thread_of_an_asynchronous_save_is_known_with_its_future() -> None:
    found: list[Any] = []

    class Writer(dcp.FileSystemWriter):
        def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
            found.append(torch_private.find_upload_future())
            super().set_up_storage_writer(*args, **kwargs)

    with tempfile.TemporaryDirectory() as directory:
        future = dcp.async_save({"w": torch.ones(3)}, storage_writer=Writer(directory))
        future.result()  # type: ignore[union-attr]
    assert found == [future], _moved(
        "save_wrapper, or concurrent.futures' item of work, is not as it was", "release(): a failed save lets go"
    )


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
def test_the_type_of_an_asynchronous_save_is_known_to_its_stager(kind: AsyncCheckpointerType) -> None:
    found: list[Any] = []

    class Stager(DefaultStager):
        def stage(self, state_dict: Any) -> Any:
            found.append(torch_private.find_async_save())
            raise NotImplementedError  # no process is started

    stager = Stager(StagingOptions(False, False, False, False))
    with pytest.raises(NotImplementedError):
        dcp.async_save({}, checkpoint_id="x", async_checkpointer_type=kind, async_stager=stager)
    assert found == [kind], _moved("async_save is not as it was", "turns: the order of asynchronous saves")
    assert torch_private.find_async_save() is None


def test_the_checkpoint_process_is_where_it_was() -> None:
    relied_on = "has_checkpoint_process(): overlapping first PROCESS saves start one process"
    assert _async_process_executor._CHECKPOINT_PROCESS is None, _moved("there is a process before a save", relied_on)
    source = Path(inspect.getfile(_async_process_executor)).read_text()
    used = "_CHECKPOINT_PROCESS = _AsyncCheckpointProcess("
    assert used in source, _moved(f"{used!r} is not there any more", relied_on)


def test_the_writer_transforms_say_whether_there_are_any() -> None:
    for none in (None, []):
        assert not torch_private.WriterTransforms(none).extensions, _moved(
            "_StorageWriterTransforms.extensions is not empty without extensions",
            "save/items.py, which writes tensors unserialised if there are none",
        )


def test_narrow_tensor_by_index_gives_a_view_of_the_box() -> None:
    tensor = torch.arange(20.0).view(4, 5)
    found = torch_private.narrow_tensor_by_index(tensor, (1, 2), (2, 3))
    assert torch.equal(found, tensor[1:3, 2:5]), _moved("narrow_tensor_by_index changed", "load/item_transfer.py")


# --- _StorageInfo ----------------------------------------------------------------------------------------


def test_storage_info_keeps_what_it_does_not_know_and_drops_none() -> None:
    info = storage_info.make_storage_info("__0_0.distcp", 5, 7, raw_offset=3, crc64nvme=2**63 + 1)
    assert info.__getstate__() == {
        "relative_path": "__0_0.distcp",
        "offset": 5,
        "length": 7,
        "raw_offset": 3,
        "crc64nvme": 2**63 + 1,
    }, _moved("_StorageInfo.__getstate__ is not its __dict__ without None", "raw offsets and checksums in .metadata")
    copy = pickle.loads(pickle.dumps(info))
    assert (storage_info.get_raw_offset(copy), storage_info.get_crc(copy)) == (3, 2**63 + 1), _moved(
        "_StorageInfo loses additional attributes when pickled", "raw offsets and checksums in .metadata"
    )
    assert copy == info
    assert copy.transform_descriptors is None


def test_storage_info_is_a_plain_dataclass() -> None:
    names = [field.name for field in dataclasses.fields(_StorageInfo)]
    assert names == ["relative_path", "offset", "length", "transform_descriptors"], _moved(
        f"_StorageInfo has fields {names}", "make_storage_info"
    )
    assert not set(names) & {"raw_offset", "crc64nvme"}, _moved("torch uses one of our names", "format/storage_info.py")
    bare = _StorageInfo("x", 0, 1)
    assert hasattr(bare, "__dict__"), _moved("_StorageInfo has slots", "make_storage_info")
    assert (storage_info.get_raw_offset(bare), storage_info.get_crc(bare)) == (None, None)


def test_our_metadata_loads_without_dcp_s3(tmp_path: Path) -> None:
    """Whoever has torch alone can read it: in a process that must not import dcp_s3."""
    index = MetadataIndex("w", torch.Size([0]), 0)
    info = storage_info.make_storage_info("__0_0.distcp", 0, 9, raw_offset=3, crc64nvme=1)
    path = tmp_path / "pickle"
    path.write_bytes(pickle.dumps({index: info}))
    script = textwrap.dedent(
        f"""
        import pickle, sys
        sys.modules["dcp_s3"] = None
        ((index, info),) = pickle.load(open({str(path)!r}, "rb")).items()
        assert type(info).__module__ == "torch.distributed.checkpoint.filesystem", type(info)
        assert (info.relative_path, info.offset, info.length) == ("__0_0.distcp", 0, 9), info
        assert info.transform_descriptors is None
        """
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert found.returncode == 0, _moved("a stock process cannot read _StorageInfo of ours", found.stderr)


def test_the_metadata_index_ignores_its_hint() -> None:
    # Loads look items up by name and offset; the hint differs between planners.
    assert MetadataIndex("w", torch.Size([0]), 1) == MetadataIndex("w", torch.Size([0]), 2), _moved(
        "MetadataIndex compares its hint", "the look-up in storage_data"
    )


# --- the order of calls ----------------------------------------------------------------------------------


def _recording(cls: type, calls: list[str], names: list[str]) -> type:
    def wrap(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return getattr(super(recorder, self), name)(*args, **kwargs)

        # torch looks for "kwargs" in the signature.
        method.__signature__ = inspect.signature(getattr(cls, name))  # type: ignore[attr-defined]
        return method

    recorder = type(f"Recording{cls.__name__}", (cls,), {name: wrap(name) for name in names})
    return recorder


def test_the_order_of_calls_in_a_load(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    calls: list[str] = []
    reader = _recording(
        FileSystemReader,
        calls,
        ["read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data"],
    )
    planner = _recording(
        DefaultLoadPlanner, calls, ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"]
    )
    dcp.load({"w": torch.zeros(3)}, storage_reader=reader(tmp_path), planner=planner())
    assert calls == [
        "read_metadata",
        "set_up_planner",
        "set_up_storage_reader",
        "create_local_plan",
        "prepare_local_plan",
        "create_global_plan",
        "prepare_global_plan",
        "finish_plan",
        "read_data",
    ], _moved(
        "dcp.load calls in another order",
        "the order in which S3StorageReader is called",
    )


def test_the_order_of_calls_in_a_save(tmp_path: Path) -> None:
    calls: list[str] = []
    writer = _recording(
        FileSystemWriter,
        calls,
        ["reset", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish"],
    )
    planner = _recording(
        default_planner.DefaultSavePlanner,
        calls,
        ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"],
    )
    dcp.save({"w": torch.ones(3)}, storage_writer=writer(tmp_path), planner=planner(), checkpoint_id=tmp_path)
    assert calls == [
        "reset",
        "set_up_planner",
        "set_up_storage_writer",
        "create_local_plan",
        "prepare_local_plan",
        "create_global_plan",
        "prepare_global_plan",
        "finish_plan",
        "write_data",
        "finish",
    ], _moved("dcp.save calls in another order", "S3StorageWriter")


@pytest.mark.parametrize("use_collectives", [True, False])
def test_the_writer_is_told_rank_and_collectives(tmp_path: Path, use_collectives: bool) -> None:
    told: list[dict[str, Any]] = []

    class Writer(FileSystemWriter):
        def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
            told.append(kwargs)
            super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    # Without a process group only the arguments matter, not whether the save then succeeds.
    dcp.save({"w": torch.ones(3)}, storage_writer=Writer(tmp_path), use_collectives=use_collectives)
    assert told == [{"rank": 0, "use_collectives": use_collectives}], _moved(
        f"set_up_storage_writer is given {told}", "saves without collectives"
    )


def test_the_loader_asks_for_the_ranks_metadata_if_there_is_none_of_all() -> None:
    asked: list[dict[str, Any]] = []

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            asked.append(kwargs)
            raise FileNotFoundError

    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.zeros(3)}, storage_reader=Reader("/nowhere"))
    assert asked == [{}, {"rank": 0}], _moved(
        f"dcp.load asks for metadata with {asked}", "S3StorageReader.read_metadata(rank=...)"
    )
    assert isinstance(caught.value.failures[0][0], AssertionError), _moved(
        "dcp.load no longer replaces the error of read_metadata",
        "_UnreadableMetadata in load/reader.py, which is then not needed",
    )


# --- _storage_setup, failures, caches --------------------------------------------------------------------


@pytest.mark.parametrize(("name", "reader"), [("FileSystemWriter", False), ("FileSystemReader", True)])
def test_storage_setup_asks_the_file_system_classes_of_its_module_first(
    monkeypatch: pytest.MonkeyPatch, name: str, reader: bool
) -> None:
    from torch.distributed.checkpoint._storage_utils import _storage_setup

    made: list[Any] = []

    class Stand:
        def __call__(self, checkpoint_id: str) -> Stand:
            made.append(checkpoint_id)
            return self

        def reset(self, checkpoint_id: str) -> None:
            made.append(checkpoint_id)

        def validate_checkpoint_id(self, checkpoint_id: str) -> bool:
            return True

    monkeypatch.setattr(torch_private.storage_utils, name, Stand())
    found = _storage_setup(None, "s3://bucket/run", reader=reader)
    assert isinstance(found, Stand), _moved(
        f"_storage_setup does not look up {name} in its module at each call, or asks something before it",
        "dcp_s3.register()",
    )
    assert made == ["s3://bucket/run", "s3://bucket/run"]


def test_checkpoint_exception_is_no_exception_and_has_failures() -> None:
    assert issubclass(CheckpointException, BaseException)
    assert not issubclass(CheckpointException, Exception), _moved(
        "CheckpointException is an Exception now", "the documentation, and `except BaseException` in examples"
    )
    error = CheckpointException("write", {3: (ValueError("cause"), None)})  # type: ignore[dict-item]
    assert isinstance(error.failures[3][0], ValueError), _moved("failures changed", "everyone who looks for causes")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy.failures[3][0], ValueError)


def test_causes_come_through_dcp_load_unchanged() -> None:
    class Reader(FileSystemReader):
        def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
            raise ShapeMismatchError("mine", url="s3://b/x", fqn="w")

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return dcp.metadata.Metadata({})

    with pytest.raises(CheckpointException) as caught:
        state_dict_loader.load({}, storage_reader=Reader("/nowhere"))
    (cause, _) = caught.value.failures[0]
    assert isinstance(cause, ShapeMismatchError)
    assert (cause.fqn, cause.url) == ("w", "s3://b/x")


def test_the_planners_caches_are_where_the_tests_clear_them() -> None:
    for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        cache = getattr(SavePlanner, f"_cached_{name}", None)
        assert isinstance(cache, dict), _moved(f"SavePlanner._cached_{name} moved", "test_plan_caching.py")
    assert SavePlan([], usable=False).usable is False, _moved("SavePlan.usable moved", "test_plan_caching.py")


def test_resolved_objects_are_bytes_io_at_their_end_or_start() -> None:
    """The writer takes the whole buffer, wherever the planner left its position."""
    planner = default_planner.DefaultSavePlanner()
    planner.set_up_planner({"epoch": 3}, None, True)
    (item,) = planner.create_local_plan().items
    found = planner.resolve_data(item)
    assert isinstance(found, io.BytesIO), _moved("objects are not resolved to BytesIO", "save/items.py")
    assert torch.load(io.BytesIO(found.getbuffer()), weights_only=False) == 3


# --- the process group of a load -------------------------------------------------------------------------


class _Asking(FileSystemReader):
    """Notes what `find_load_group` says, in the places where somebody might ask."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: list[torch_private.Caller | None] = []

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        self.asked.append(torch_private.find_load_group())
        if len(self.asked) == 1 and self.missing:
            raise FileNotFoundError
        return super().read_metadata()

    missing = False


class _Curious(DefaultLoadPlanner):
    def __init__(self, reader: _Asking) -> None:
        super().__init__()
        self.reader = reader

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self.reader.read_metadata()
        super().set_up_planner(*args, **kwargs)

    def finish_plan(self, new_plan: Any) -> Any:
        return new_plan


def _ask(path: Path) -> None:
    relied_on = "find_load_group, by which ranks read what several of them need once"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=path)
    rank = dist.get_rank()

    reader = _Asking(path)
    dcp.load({"w": torch.zeros(3)}, storage_reader=reader)
    assert reader.asked == [(dist.group.WORLD, rank, 2, True)], _moved("dcp.load hides its group", relied_on)

    group = dist.new_group([1, 0])
    reader = _Asking(path)
    dcp.load({"w": torch.zeros(3)}, storage_reader=reader, process_group=group, planner=_Curious(reader))
    first, second = reader.asked
    assert first == (group, dist.get_rank(group), 2, False), _moved("the group is another", relied_on)
    assert second is None, _moved("a planner's own call looks like the load's", relied_on)

    reader = _Asking(path)
    reader.missing = True
    dcp.load({"w": torch.zeros(3)}, storage_reader=reader)
    assert reader.asked[0] is not None, _moved("dcp.load hides its group", relied_on)
    assert reader.asked[1] is None, _moved("the metadata of one rank is asked for by all at once", relied_on)

    reader = _Asking(path)
    dcp.load({"w": torch.zeros(3)}, storage_reader=reader, no_dist=True)
    reader.read_metadata()
    assert reader.asked == [None, None], _moved("a load without a group has one", relied_on)


def test_the_group_of_a_load_is_where_it_was(tmp_path: Path) -> None:
    run_ranks(2, _ask, tmp_path)


class _AskingWriter(FileSystemWriter):
    """Asks for its group where S3StorageWriter does."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: list[str | None] = []

    def storage_meta(self) -> Any:
        self.asked.append(torch_private.find_save_group())
        return super().storage_meta()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.asked.append(torch_private.find_save_group())
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)


def _ask_in_saves(path: Path) -> None:
    relied_on = "turns of saves that share a process group"
    state, group = {"w": torch.zeros(3)}, dist.new_group(backend="gloo")
    for each in (None, group):
        writer = _AskingWriter(path)
        dcp.save(state, storage_writer=writer, process_group=each)
        name = (each or dist.group.WORLD).group_name
        assert writer.asked[:2] == [name, name], _moved("dcp.save hides its group", relied_on)
    for apart in ({"no_dist": True}, {"use_collectives": False}):
        writer = _AskingWriter(path / str(dist.get_rank()))
        dcp.save(state, storage_writer=writer, **apart)
        assert writer.asked[:2] == [None, None], _moved("a save without collectives has a group", relied_on)


def test_the_group_of_a_save_is_where_it_was(tmp_path: Path) -> None:
    run_ranks(2, _ask_in_saves, tmp_path)


def test_torchs_finish_plan_returns_what_it_was_given() -> None:
    plan = LoadPlan([])
    assert DefaultLoadPlanner().finish_plan(plan) is plan, _moved(
        "DefaultLoadPlanner.finish_plan changes the plan", "plain_finish: plans that are shared out stay what they are"
    )


def test_a_load_can_be_told_from_its_callers(tmp_path: Path) -> None:
    found: list[bool] = []

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            found.append(torch_private.is_loading())
            return super().read_metadata()

    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    reader = Reader(tmp_path)
    dcp.load({"w": torch.zeros(3)}, storage_reader=reader)
    reader.read_metadata()
    assert found == [True, False], _moved("dcp.load lies elsewhere", "S3StorageReader(process_group=...)")


def _first_looks(path: Path, *, missing: bool, planner: bool) -> list[bool]:
    asked: list[bool] = []

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            asked.append(torch_private.is_first_look())
            if missing and len(asked) == 1:
                raise FileNotFoundError
            return super().read_metadata()

    reader: Any = Reader(path)
    dcp.load({"w": torch.zeros(3)}, storage_reader=reader, planner=_Curious(reader) if planner else None)
    reader.read_metadata()
    return asked


def test_the_first_look_of_a_load_can_be_told_from_others(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    relied_on = "S3StorageReader.read_metadata, which raises except to dcp.load"
    for missing, planner in ((False, False), (False, True), (True, False)):
        first, *others = _first_looks(tmp_path, missing=missing, planner=planner)
        assert first, _moved("dcp.load asks for metadata from elsewhere", relied_on)
        assert not any(others), _moved("other callers look like dcp.load", relied_on)


# --- the future of an asynchronous save ------------------------------------------------------------------


class _Noting(FileSystemWriter):
    """Notes the futures that `find_upload_future` finds in this process, when it is used and when it is pickled."""

    found: ClassVar[list[Any]] = []

    def storage_meta(self) -> Any:
        self.found.append(torch_private.find_upload_future())
        return super().storage_meta()

    def __getstate__(self) -> dict[str, Any]:
        self.found.append(torch_private.find_upload_future())
        return self.__dict__.copy()


def _save_and_find(path: Path) -> None:
    relied_on = "boundary.py, which logs asynchronous saves that fail"
    for kind in AsyncCheckpointerType:
        _Noting.found.clear()
        future = dcp.async_save(
            {"w": torch.ones(3)}, storage_writer=_Noting(path / kind.name), async_checkpointer_type=kind
        )
        assert isinstance(future, Future)
        future.result(60)
        assert set(_Noting.found) == {future}, _moved(f"the future of {kind} is not found", relied_on)
    _Noting.found.clear()
    dcp.save({"w": torch.ones(3)}, storage_writer=_Noting(path / "waited for"))
    assert set(_Noting.found) == {None}, _moved("a save that is waited for has a future", relied_on)


def test_the_future_of_an_asynchronous_save_is_where_it_was(tmp_path: Path) -> None:
    run_ranks(1, _save_and_find, tmp_path)


class _Failing(DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.staged = weakref.ref(state_dict["w"])
        raise ZeroDivisionError


def test_to_find_the_future_keeps_nothing_of_the_save(tmp_path: Path) -> None:
    """Whoever keeps the future of a failed save keeps its traceback, with the frame in which it was found."""
    planner = _Failing()
    future: Any = dcp.async_save(
        {"w": torch.ones(3)}, storage_writer=_Noting(tmp_path), planner=planner, use_collectives=False
    )
    trace = future.exception(60).__traceback__
    assert trace.tb_frame.f_globals["__name__"] == "concurrent.futures.thread"
    trace.tb_next = None
    gc.collect()
    assert planner.staged() is None, _moved("the frame of the task keeps the state", "find_upload_future")
