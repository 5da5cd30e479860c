"""Megatron-Core's `dist_checkpointing` on s3://. The page docs/megatron.md says how to use it.

>>> from dcp_s3.integrations import megatron
>>> megatron.install()
>>> dist_checkpointing.save(sharded_state_dict, "s3://bucket/run/iter_0001000")
"""

from dcp_s3.integrations.requirement import require

require("megatron", "megatron-core", "0.16", "0.17")

from dcp_s3.integrations.megatron.install import install, uninstall  # noqa: E402
from dcp_s3.integrations.megatron.writer import MegatronS3Writer  # noqa: E402

__all__ = ["MegatronS3Writer", "install", "uninstall"]
