"""The S3 storage backend for PyTorch Distributed Checkpoint (DCP).

>>> import torch.distributed.checkpoint as dcp
>>> from dcp_s3 import S3StorageReader, S3StorageWriter
>>> dcp.save(state, storage_writer=S3StorageWriter("s3://bucket/run/step-1000"))
>>> dcp.load(state, storage_reader=S3StorageReader("s3://bucket/run/step-1000"))
"""

from dcp_s3 import errors
from dcp_s3._version import __version__
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.counters import metrics
from dcp_s3.integrations.dcp import register, unregister
from dcp_s3.load.planner import S3LoadPlanner
from dcp_s3.load.reader import S3StorageReader
from dcp_s3.manager.manager import CheckpointManager
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
from dcp_s3.stage.stager import S3Stager

__all__ = [
    "CatalogSnapshot",
    "CheckpointCatalog",
    "CheckpointInfo",
    "CheckpointManager",
    "Decision",
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
    "latest",
    "list_checkpoints",
    "make_plan",
    "metrics",
    "parse_policy",
    "pin",
    "prune",
    "read_tensor",
    "read_tensors",
    "register",
    "remove",
    "unpin",
    "unregister",
    "verify",
]
