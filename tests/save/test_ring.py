"""The blocks through which tensors on a device come to the upload, here with CPU tensors: the same code but streams."""

from __future__ import annotations

import threading

import pytest
import torch

from dcp_s3.save.items import BLOCK_SIZE, PinnedRing, shared_ring
from dcp_s3.tensor_memory import iterate_bytes
from tests.end_to_end.states import bits, random_tensor

MIB = 2**20


def address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool], ids=str)
def test_the_bytes_are_those_of_the_tensor(dtype: torch.dtype) -> None:
    ring = PinnedRing(2, pin=False)
    tensor = random_tensor((1024, 2048), dtype)
    for source in (tensor, tensor.t(), tensor[:, ::2], tensor.conj(), tensor[3, 5]):
        assert bytes(ring.copy(source)) == bits(source.resolve_conj().contiguous())


def test_a_block_is_used_again_when_nothing_refers_to_its_bytes() -> None:
    ring = PinnedRing(1, pin=False)
    tensor = random_tensor((MIB,), torch.float32)
    first = ring.copy(tensor)
    part = first[100:200]
    where = address(first)
    del first
    second = ring.copy(tensor + 1)
    assert address(second) != where, "the block is still read through a slice"
    assert bytes(part) == bits(tensor)[100:200]
    del part, second
    assert address(ring.copy(tensor)) == where


def test_without_a_free_block_copies_go_to_ordinary_memory() -> None:
    ring = PinnedRing(2, pin=False)
    tensors = [random_tensor((MIB,), torch.float32, seed) for seed in range(5)]
    views = [ring.copy(tensor) for tensor in tensors]
    assert len({address(view) for view in views}) == 5
    assert [bytes(view) for view in views] == [bits(tensor) for tensor in tensors]


def test_large_tensors_come_in_pieces_of_a_block() -> None:
    ring = PinnedRing(3, block_size=2 * MIB, pin=False)
    tensor = random_tensor((3000, 1001), torch.float32).t()
    pieces = [bytes(view) for view in iterate_bytes(tensor, ring.block_size, ring.copy)]
    assert max(map(len, pieces)) <= 2 * MIB
    assert b"".join(pieces) == bits(tensor.contiguous())


def test_several_threads_share_a_ring() -> None:
    ring = PinnedRing(3, block_size=2 * MIB, pin=False)
    wrong = []

    def work(seed: int) -> None:
        for step in range(20):
            tensor = random_tensor((MIB // 2,), torch.float32, 100 * seed + step)
            if bytes(ring.copy(tensor)) != bits(tensor):
                wrong.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_process_keeps_one_ring() -> None:
    assert shared_ring(10 * BLOCK_SIZE) is shared_ring(10 * BLOCK_SIZE)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensors_come_through_pinned_blocks() -> None:
    ring = PinnedRing(2, pin=True)
    tensor = random_tensor((3000, 1001), torch.float32).cuda()
    for source in (tensor, tensor.t(), tensor.bfloat16()):
        pieces = [bytes(view) for view in iterate_bytes(source, ring.block_size, ring.copy)]
        assert b"".join(pieces) == bits(source.cpu().contiguous())
