"""Header + raw bytes + trailer is what torch.save writes, and torch.load reads it."""

import io
import resource

import pytest
import torch

from dcp_s3.format.framing import FrameCache, compute_frame
from dcp_s3.tensor_memory import iterate_bytes

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
SHAPES = [(), (0,), (3, 0, 2), (1,), (7, 9), (129, 33)]


def _random(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    size = torch.empty(shape, dtype=dtype).nbytes
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8).view(torch.bool) if shape else torch.tensor(True)
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def _bytes(tensor: torch.Tensor) -> bytes:
    return b"".join(bytes(view) for view in iterate_bytes(tensor, 1 << 20))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_load_reads_it_and_only_checksums_differ_from_torch_save(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = _random(dtype, shape)
    frame = compute_frame(dtype, torch.Size(shape))
    raw = _bytes(tensor)
    item = frame.header + raw + frame.trailer
    assert len(item) == frame.length

    loaded = torch.load(io.BytesIO(item), weights_only=True)
    assert (loaded.dtype, loaded.shape) == (dtype, torch.Size(shape))
    assert _bytes(loaded) == raw

    saved = io.BytesIO()
    torch.save(tensor, saved)
    differing = [i for i, (a, b) in enumerate(zip(item, saved.getvalue(), strict=True)) if a != b]
    # The zip CRC-32 of the data, in two places, and of the id record that is made from it.
    assert len(differing) <= 64
    assert not [i for i in differing if len(frame.header) <= i < len(frame.header) + frame.nbytes]


def test_the_cache_is_bounded_and_returns_equal_frames() -> None:
    cache = FrameCache()
    first = cache.get(torch.float32, torch.Size([3]))
    assert cache.get(torch.float32, torch.Size([3])) is first
    for n in range(4100):
        cache.get(torch.uint8, torch.Size([n]))
    assert len(cache._frames) <= 4096
    assert cache.get(torch.float32, torch.Size([3])) == first


def test_a_large_shape_is_never_touched() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    frame = compute_frame(torch.float32, torch.Size([2**30]))  # 4 GiB
    assert frame.nbytes == 2**32
    assert len(frame.header) + len(frame.trailer) < 4096
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 2**10  # KiB
