"""Text that every Python installation has: the sources of its standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def standard_library_text() -> Tensor:
    """The top-level modules of the standard library, concatenated (uint8, some megabytes).

    Raises:
        FileNotFoundError: this Python comes without sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    sources = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if not sources:
        raise FileNotFoundError(f"this Python has no sources in {folder}: there is no text to train on")
    return torch.frombuffer(bytearray(sources), dtype=torch.uint8)


def batch(
    text: Tensor, *, step: int, sequences: int, length: int, rank: int = 0, ranks: int = 1
) -> tuple[Tensor, Tensor]:
    """This rank's share of the batch of ``step``: inputs, and the bytes that follow them.

    The whole batch depends only on the step. So a run that continues on another number of ranks sees the same text in
    the same order.

    Returns:
        Two (sequences of this rank, length) int64 tensors.
    """
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length, (sequences,), generator=generator)[rank::ranks]
    windows = text[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]
