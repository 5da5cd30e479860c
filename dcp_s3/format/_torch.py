"""Private parts of torch that ``.metadata`` names.

Everything here was seen in torch 2.13.0; ``tests/checkpoint/test_torch_private.py`` fails loudly when it moves.
"""

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.filesystem import _StoragePrefix as StoragePrefix
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MEMORY_FORMAT_ENCODING

__all__ = ["MEMORY_FORMAT_ENCODING", "StorageInfo", "StoragePrefix"]
