"""The S3 storage backend for PyTorch Distributed Checkpoint (DCP).

>>> import torch.distributed.checkpoint as dcp
>>> from dcp_s3 import S3StorageReader, S3StorageWriter
>>> dcp.save(state, storage_writer=S3StorageWriter("s3://bucket/run/step-1000"))
>>> dcp.load(state, storage_reader=S3StorageReader("s3://bucket/run/step-1000"))
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from dcp_s3 import errors
from dcp_s3._version import __version__
from dcp_s3.torch_version import require_torch as _require_torch

if _TYPE_CHECKING:
    from dcp_s3.checkpoint.info import CheckpointInfo
    from dcp_s3.counters import metrics
    from dcp_s3.integrations.dcp import redirect, register, unregister
    from dcp_s3.load.planner import S3LoadPlanner
    from dcp_s3.load.reader import S3StorageReader
    from dcp_s3.manager.manager import CheckpointManager
    from dcp_s3.offline.export import ExportResult, export
    from dcp_s3.offline.import_weights import ImportResult, import_weights
    from dcp_s3.offline.read_tensors import read_tensor, read_tensors
    from dcp_s3.offline.verify import verify
    from dcp_s3.offline.verify_report import Problem, VerifyReport
    from dcp_s3.retention.catalog import CheckpointCatalog, latest, list_checkpoints
    from dcp_s3.retention.marks import annotate, pin, unpin
    from dcp_s3.retention.parse import parse_policy
    from dcp_s3.retention.plan import Decision, Plan, make_plan
    from dcp_s3.retention.policy import (
        KeepBest,
        KeepDaily,
        KeepEvery,
        KeepHourly,
        KeepLatest,
        KeepSteps,
        KeepWeekly,
        KeepWithin,
        Policy,
    )
    from dcp_s3.retention.prune import PruneReport, apply_plan, prune
    from dcp_s3.retention.remove import remove
    from dcp_s3.retention.scan import CatalogSnapshot
    from dcp_s3.save.writer import S3StorageWriter
    from dcp_s3.settings import Settings
    from dcp_s3.sharding.shards import shard
    from dcp_s3.sharding.state import Fused, shard_state
    from dcp_s3.stage.stager import S3Stager

__all__ = [
    "CatalogSnapshot",
    "CheckpointCatalog",
    "CheckpointInfo",
    "CheckpointManager",
    "Decision",
    "ExportResult",
    "Fused",
    "ImportResult",
    "KeepBest",
    "KeepDaily",
    "KeepEvery",
    "KeepHourly",
    "KeepLatest",
    "KeepSteps",
    "KeepWeekly",
    "KeepWithin",
    "Plan",
    "Policy",
    "Problem",
    "PruneReport",
    "S3LoadPlanner",
    "S3Stager",
    "S3StorageReader",
    "S3StorageWriter",
    "Settings",
    "VerifyReport",
    "__version__",
    "annotate",
    "apply_plan",
    "errors",
    "export",
    "import_weights",
    "latest",
    "list_checkpoints",
    "make_plan",
    "metrics",
    "parse_policy",
    "pin",
    "prune",
    "read_tensor",
    "read_tensors",
    "redirect",
    "register",
    "remove",
    "shard",
    "shard_state",
    "unpin",
    "unregister",
    "verify",
]

_MODULES = {
    "metrics": "dcp_s3.counters",
    "redirect": "dcp_s3.integrations.dcp",
    "register": "dcp_s3.integrations.dcp",
    "unregister": "dcp_s3.integrations.dcp",
    "S3LoadPlanner": "dcp_s3.load.planner",
    "S3StorageReader": "dcp_s3.load.reader",
    "CheckpointManager": "dcp_s3.manager.manager",
    "ExportResult": "dcp_s3.offline.export",
    "export": "dcp_s3.offline.export",
    "ImportResult": "dcp_s3.offline.import_weights",
    "import_weights": "dcp_s3.offline.import_weights",
    "read_tensor": "dcp_s3.offline.read_tensors",
    "read_tensors": "dcp_s3.offline.read_tensors",
    "verify": "dcp_s3.offline.verify",
    "Problem": "dcp_s3.offline.verify_report",
    "VerifyReport": "dcp_s3.offline.verify_report",
    "CheckpointCatalog": "dcp_s3.retention.catalog",
    "latest": "dcp_s3.retention.catalog",
    "list_checkpoints": "dcp_s3.retention.catalog",
    "CheckpointInfo": "dcp_s3.checkpoint.info",
    "annotate": "dcp_s3.retention.marks",
    "pin": "dcp_s3.retention.marks",
    "unpin": "dcp_s3.retention.marks",
    "parse_policy": "dcp_s3.retention.parse",
    "Decision": "dcp_s3.retention.plan",
    "Plan": "dcp_s3.retention.plan",
    "make_plan": "dcp_s3.retention.plan",
    "KeepBest": "dcp_s3.retention.policy",
    "KeepDaily": "dcp_s3.retention.policy",
    "KeepEvery": "dcp_s3.retention.policy",
    "KeepHourly": "dcp_s3.retention.policy",
    "KeepLatest": "dcp_s3.retention.policy",
    "KeepSteps": "dcp_s3.retention.policy",
    "KeepWeekly": "dcp_s3.retention.policy",
    "KeepWithin": "dcp_s3.retention.policy",
    "Policy": "dcp_s3.retention.policy",
    "PruneReport": "dcp_s3.retention.prune",
    "apply_plan": "dcp_s3.retention.prune",
    "prune": "dcp_s3.retention.prune",
    "remove": "dcp_s3.retention.remove",
    "CatalogSnapshot": "dcp_s3.retention.scan",
    "S3StorageWriter": "dcp_s3.save.writer",
    "Settings": "dcp_s3.settings",
    "shard": "dcp_s3.sharding.shards",
    "Fused": "dcp_s3.sharding.state",
    "shard_state": "dcp_s3.sharding.state",
    "S3Stager": "dcp_s3.stage.stager",
}
"""Where each name comes from. Imported when it is first used: ``dcp-s3 --help`` needs no torch."""


def __getattr__(name: str) -> _Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'dcp_s3' has no attribute {name!r}")
    _require_torch()
    value = globals()[name] = getattr(_import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
