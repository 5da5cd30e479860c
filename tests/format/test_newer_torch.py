"""What a newer torch adds to its classes is loaded; a class that this one does not have is refused by its name."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItemType

from dcp_s3.errors import CorruptCheckpointError, UnsafeMetadataError
from dcp_s3.format.metadata import dump_metadata, load_metadata, seal
from tests.hostile import call, decode_metadata, metadata_with, name

_PROPERTIES = TensorProperties(torch.bfloat16, requires_grad=True)
_STATE = _PROPERTIES.__getstate__()[:5]  # type: ignore[no-untyped-call]
_SIZE = torch.Size([3, 4])
_CHUNK = ChunkStorageMetadata(torch.Size([0, 0]), _SIZE)
_STRIDES = hasattr(TensorProperties(), "strides")


def _metadata(monkeypatch: pytest.MonkeyPatch, state: Any) -> bytes:
    """As a torch writes it whose TensorProperties have this state."""
    plan = SavePlan([], planner_data=[TensorWriteData(_CHUNK, TensorProperties(torch.int8), _SIZE)])
    entry = TensorStorageMetadata(TensorProperties(torch.bfloat16), _SIZE, [_CHUNK])
    with monkeypatch.context() as patch:
        patch.setattr(TensorProperties, "__getstate__", lambda self: (self.dtype, *state[1:]))
        return dump_metadata(Metadata({"w": entry}, planner_data=plan, storage_data={}))


@pytest.mark.parametrize(
    "added",
    [
        (),
        (None,),
        ((1, 3),),
        ((4, 1), None),
        ([1, 2],),
        ({"a": [WriteItemType.SHARD]},),
        (None, torch.Size([2]), "text"),
    ],
)
def test_properties_with_more_values_are_loaded(monkeypatch: pytest.MonkeyPatch, added: tuple[Any, ...]) -> None:
    found = load_metadata(_metadata(monkeypatch, (*_STATE, *added)), url="s3://bucket/step-1")
    read = found.state_dict_metadata["w"].properties  # type: ignore[union-attr]
    inside = found.planner_data.planner_data[0].properties
    assert [read.dtype, inside.dtype] == [torch.bfloat16, torch.int8]
    for each in (read, inside):
        assert type(each) is TensorProperties
        assert [each.layout, each.requires_grad, each.memory_format] == [torch.strided, True, torch.contiguous_format]
        if _STRIDES:
            assert each.strides == (added[0] if added else None)


def test_strides_are_kept_where_torch_has_them() -> None:
    entry = TensorStorageMetadata(TensorProperties.create_from_tensor(torch.zeros(3, 4).t()), _SIZE, [_CHUNK])
    found = load_metadata(dump_metadata(Metadata({"w": entry}, storage_data={})), url="s3://bucket/step-1")
    assert found.state_dict_metadata["w"] == entry


@pytest.mark.parametrize("added", [torch.nn.Linear, (print,), {"a": (torch.Size,)}])
def test_more_values_are_harmless(monkeypatch: pytest.MonkeyPatch, added: Any) -> None:
    with pytest.raises((CorruptCheckpointError, UnsafeMetadataError)):
        load_metadata(_metadata(monkeypatch, (*_STATE, added)), url="s3://bucket/step-1")


def test_torch_itself_may_refuse_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    data = _metadata(monkeypatch, (*_STATE, ["something"]))

    def refuse(self: Any, state: Any) -> None:
        raise ValueError("of another version")

    monkeypatch.setattr(TensorProperties, "__setstate__", refuse)
    with pytest.raises(UnsafeMetadataError, match="TensorProperties of 6 values") as caught:
        load_metadata(data, url="s3://bucket/step-1")
    assert "damaged" not in str(caught.value)


_DCP = "torch.distributed.checkpoint."


@pytest.mark.parametrize(
    ("opcodes", "named"),
    [
        (name(_DCP + "metadata", "Fancy"), _DCP + "metadata.Fancy"),
        (name(_DCP + "fancy", "Fancy"), _DCP + "fancy.Fancy"),
        (name("torch", "float1"), "torch.float1"),
        (call(_DCP + "planner", "WriteItemType", b"K\x63"), _DCP + r"planner.WriteItemType\(99\)"),
        (call("torch.serialization", "_get_layout", pickle.dumps("torch.fancy", 2)[2:-1]), "torch.fancy"),
    ],
)
def test_what_this_torch_does_not_have_is_named(opcodes: bytes, named: str) -> None:
    with pytest.raises(UnsafeMetadataError, match=named) as caught:
        decode_metadata(metadata_with(opcodes))
    assert f"torch {torch.__version__}" in str(caught.value)
    assert "damaged" not in str(caught.value)


def test_the_torch_that_wrote_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.1")
        data = seal(metadata_with(name("torch", "float1")))
    with pytest.raises(UnsafeMetadataError, match=r"written by torch 2\.99\.1 and dcp_s3 ") as caught:
        load_metadata(data, url="s3://bucket/step-1")
    assert f"which torch {torch.__version__}" in str(caught.value)


@pytest.mark.parametrize(("module", "attribute"), [("torch", "load"), ("torch.nn.modules.linear", "Linear")])
def test_what_this_torch_has_and_metadata_never_needs_could_run_code(module: str, attribute: str) -> None:
    with pytest.raises(UnsafeMetadataError, match="run code"):
        decode_metadata(metadata_with(name(module, attribute)))
