"""What is compared with the save before, and what S3 copies of it. In `tests.soak` at random, and with faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import tests.memory_s3.store as server_store
from dcp_s3 import CheckpointManager, S3StorageWriter, errors, events
from dcp_s3.format.blocks import make_storage_info
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.memory import crc64nvme
from dcp_s3.save import incremental
from dcp_s3.save.incremental import recall, remember
from dcp_s3.save.objects import ItemWriteResult
from dcp_s3.settings import Settings
from dcp_s3.url import parse_url
from tests.end_to_end.loads import assert_loads
from tests.faulty import BUCKET, FaultyServer

MIB = 2**20
SMALLEST = 8192
"""Bytes of a part that is copied, so that states may be small."""


@pytest.fixture(autouse=True)
def _forget() -> None:
    incremental._memories.clear()


class Training:
    """Saves step after step; each checkpoint is looked at."""

    def __init__(self, server: FaultyServer) -> None:
        self._server, self._step = server, 0

    def save(self, state: dict[str, Any], planner: Any = None) -> tuple[events.Written, set[str]]:
        """What was written, and how it was copied: whole objects by CopyObject, ranges by UploadPartCopy."""
        self._step += 1
        heard, url = list[Any](), f"s3://{BUCKET}/run/{self._step}"
        writer = S3StorageWriter(url, incremental=True, on_event=heard.append)
        self._server.s3.reset_counters()
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
        requests = set(self._server.s3.counters.requests)
        if planner is None:
            assert_loads(url, state)
        (written,) = (event for event in heard if isinstance(event, events.Written))
        return written, requests & {"CopyObject", "UploadPartCopy"}


@pytest.fixture
def training(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Training]:
    for module in (server_store, incremental):
        monkeypatch.setattr(module, "MIN_PART_SIZE", SMALLEST)
    yield Training(faulty)
    refused = [each.getMessage() for each in caplog.get_records("call") if "is sent" in each.getMessage()]
    assert refused == [], "S3 takes no smaller parts, and every copy is what was saved"


def make_state(sizes: dict[str, int], value: int = 0) -> dict[str, Any]:
    return {name: torch.full((size,), value, dtype=torch.uint8) for name, size in sizes.items()}


def test_what_is_frozen_is_copied_at_once_and_later_as_whole_objects(training: Training) -> None:
    """And when all has changed, it is saved as if nothing had been copied."""
    sizes = {f"layer{number}.{name}": size for number in range(6) for name, size in (("w", 10_000), ("lora", 100))}
    first, copies = training.save(make_state(sizes))
    assert (first.copied_bytes, first.objects, copies) == (0, 1, set())
    loras = {name: size for name, size in sizes.items() if name.endswith("lora")}
    for turn in range(1, 4):
        written, copies = training.save(make_state(sizes) | make_state(loras, turn))
        assert written.copied_bytes > 60_000
        assert written.bytes - written.copied_bytes < 10_000, "six small ones in their frames"
        assert copies == {"UploadPartCopy" if turn == 1 else "CopyObject"}
    written, _ = training.save(make_state(sizes, 9))
    assert (written.copied_bytes, written.objects) == (0, 1)


def test_what_is_too_small_to_be_copied_is_sent_once_more_in_an_object_of_its_own(training: Training) -> None:
    sizes = {f"layer{number}.{name}": 5000 for number in range(4) for name in ("w", "lora")}
    copied = []
    for turn in range(3):
        changed = {name: 5000 for name in sizes if name.endswith("lora")}
        written, copies = training.save(make_state(sizes) | make_state(changed, turn))
        copied.append((written.copied_bytes / written.bytes, copies))
    assert copied == [(0, set()), (0, set()), (0.5, {"CopyObject"})]


def test_copies_do_not_become_ever_more_objects(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer after layer is frozen."""
    monkeypatch.setattr(incremental, "MOST_COPIES", 4)
    sizes = {f"layer{number:02}": 10_000 if number % 2 else 100 for number in range(30)}
    for number in range(30):
        state = {name: torch.full((sizes[name],), min(at, number), dtype=torch.uint8) for at, name in enumerate(sizes)}
        written, _ = training.save(state)
        assert written.objects <= 4 + 2
    training.save(state)
    written, copies = training.save(state)
    assert (written.copied_bytes, copies) == (written.bytes, {"CopyObject"}), "what was copied is copied again"


# --- what has changed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 2000, 50_000])
def test_a_tensor_has_not_changed_if_its_bytes_have_not(training: Training, size: int) -> None:
    tensor = torch.randn(size, generator=torch.manual_seed(size))
    training.save({"t": tensor})
    written, _ = training.save({"t": tensor.clone()})
    assert written.copied_bytes == written.bytes
    for place in {0, size // 2, size - 1} if size else ():
        tensor[place] += 1
        assert training.save({"t": tensor})[0].copied_bytes == 0


_ZEROS = torch.zeros(8)


@pytest.mark.parametrize(
    ("planned", "given"),
    [
        *((other, other) for other in (_ZEROS.int(), _ZEROS.view(4, 2), torch.zeros(9))),
        # Its item is no raw bytes of what the metadata say.
        (_ZEROS, _ZEROS.bfloat16()), (_ZEROS, _ZEROS.view(4, 2)), (_ZEROS, _ZEROS.to_sparse()),
        (_ZEROS.bfloat16(), _ZEROS), (_ZEROS.view(4, 2), _ZEROS),
    ],
    ids=["dtype", "shape", "size", "given dtype", "given shape", "sparse", "planned dtype", "planned shape"],
)  # fmt: skip
def test_another_dtype_or_shape_is_a_change(training: Training, planned: torch.Tensor, given: torch.Tensor) -> None:
    training.save({"t": _ZEROS})
    planner = DefaultSavePlanner()
    planner.resolve_data = lambda _: given  # type: ignore[method-assign]
    written, _ = training.save({"t": planned}, None if given is planned else planner)
    assert written.copied_bytes == 0


def test_strided_and_conjugated_tensors_are_compared_by_what_is_saved_of_them(training: Training) -> None:
    tensor, complex_ = torch.randn(300, 70), torch.randn(300, dtype=torch.complex64)
    training.save({"t": tensor.t(), "c": complex_.conj().resolve_conj()})
    written, _ = training.save({"t": tensor.t().contiguous(), "c": complex_.conj()})
    assert written.copied_bytes == written.bytes
    assert training.save({"t": tensor.reshape(70, 300), "c": complex_})[0].copied_bytes == 0


def test_of_a_change_the_first_block_is_read(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(data: Any, previous: int = 0) -> int:
        read.append(len(data))
        return int(crc64nvme(data, previous))

    training.save(make_state({"t": 4 * MIB}))
    monkeypatch.setattr(incremental, "crc64nvme", counted)
    assert training.save(make_state({"t": 4 * MIB}, 1))[0].copied_bytes == 0
    assert sum(read) == 4 * MIB // 64


# --- what is remembered ---------------------------------------------------------------------------------------


def note(url: str, fqn: str, spilled: bool = False, crc: str | None = "0" * 16) -> None:
    size = torch.Size([10])
    data = TensorWriteData(ChunkStorageMetadata(torch.Size([0]), size), TensorProperties(dtype=torch.uint8), size)
    item = WriteItem(MetadataIndex(fqn, torch.Size([0])), WriteItemType.SHARD, tensor_data=data)
    info = make_storage_info("p", 0, 10, raw_offset=0, crc64nvme=None if crc is None else 0)
    result = ItemWriteResult(item.index, 10, info, ObjectEntry("p", 10, crc), spilled)
    remember(parse_url(url), 0, [item], [result])


def recalled(url: str, rank: int = 0) -> set[str]:
    return {index.fqn for index in recall(parse_url(url), rank)}


def test_the_last_save_of_the_same_kind_is_found_of_few_kinds() -> None:
    note("s3://bucket/run/model-1", "model")
    note("s3://bucket/run/optim-1", "optim")
    assert recalled("s3://bucket/run/model-2") == {"model"}
    assert recalled("s3://bucket/run/optim-200") == {"optim"}
    assert recalled("s3://bucket/run/best") == {"optim"}, "the last one beside it"
    assert recalled("s3://bucket/other/model-2") == recalled("s3://other/run/model-2") == set()
    assert recalled("s3://bucket/run/model-2", rank=1) == set()
    note("s3://bucket/checkpoint-10/optimizer_0", "optim")
    assert recalled("s3://bucket/checkpoint-20/optimizer_0") == {"optim"}
    for letter in "abcdef":
        note(f"s3://bucket/{letter}/x", letter)
    assert [recalled(f"s3://bucket/{letter}/x") for letter in "abcdef"] == [set(), set(), {"c"}, {"d"}, {"e"}, {"f"}]


def test_what_waits_on_a_disk_or_has_no_checksum_is_not_remembered() -> None:
    note("s3://bucket/run/1", "t", spilled=True)
    assert recalled("s3://bucket/run/2") == set()
    note("s3://bucket/run/1", "t", crc=None)
    assert recalled("s3://bucket/run/2") == set()


def test_without_checksums_nothing_is_incremental() -> None:
    for make in (
        lambda: Settings(incremental=True, checksum="none"),
        lambda: S3StorageWriter("s3://bucket/run/1", incremental=True, settings={"checksum": "none"}),
        lambda: CheckpointManager("s3://bucket/run", incremental=True, settings={"checksum": "none"}),
    ):
        with pytest.raises(errors.SettingsError, match=r"(?s)incremental.*DCP_S3_CHECKSUM.*Remedy"):
            make()
