"""States to save, on one rank and on several, and what it means that two are the same."""

from __future__ import annotations

from typing import Any

import torch

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits (NaNs and infinities among them) in the shape and dtype asked for."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


def every_kind() -> dict[str, Any]:
    large = random_tensor((1000, 60), torch.float32, 7)
    tied = random_tensor((11, 5), torch.float32, 8)
    return {
        "dtypes": {str(dtype): random_tensor((5, 7), dtype, i) for i, dtype in enumerate(DTYPES)},
        "scalars": {str(dtype): random_tensor((), dtype, i) for i, dtype in enumerate(DTYPES)},
        "empty": [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.bfloat16)],
        "transposed": large.t(),
        "strided": large[::3, ::2],
        "permuted": random_tensor((4, 5, 6), torch.float16, 9).permute(2, 0, 1),
        "view": large[10:20],
        "inner_view": large[:, 5:9],
        "expanded": torch.arange(5.0).expand(3, 5),
        "conj": random_tensor((6,), torch.complex64, 3).nan_to_num().conj(),
        "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "channels_last": random_tensor((2, 3, 4, 5), torch.float32, 4).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(3, 3)),
        "tied": {"a": tied, "b": tied},
        "objects": {"int": 5, "text": "läuft", "none": None, "list": [1, [2, {"x": 3}]], "bytes": b"\x00\x01"},
        "dotted.name": torch.ones(2),
        "naïve/key %+": torch.zeros(2),
    }


def blank(state: Any) -> Any:
    """The same structure with other values, to load into; every tensor contiguous."""
    if isinstance(state, torch.Tensor):
        return torch.zeros(state.shape, dtype=state.dtype)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return None if state is not None else 0


def bits(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor.detach())
    return bytes(flat.view(torch.uint8).numpy())


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    """Equal to the last bit (NaNs too), in dtype, shape and structure."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), path
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert bits(found) == bits(expected), path
    elif isinstance(expected, dict):
        assert sorted(found) == sorted(expected), path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for i, (f, e) in enumerate(zip(found, expected, strict=True)):
            assert_same(f, e, f"{path}/{i}")
    else:
        assert found == expected, path


def random_values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
