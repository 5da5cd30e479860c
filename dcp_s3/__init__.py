"""The S3 storage backend for PyTorch Distributed Checkpoint (DCP). A training loop needs five lines:

>>> with CheckpointManager("s3://bucket/run", retention="latest:3 best:1:val_loss:min") as manager:
...     for step in range((manager.restore(state) or 0) + 1, 2101):
...         train(state)
...         if step % 50 == 0:
...             saved = manager.save(step, state, {"val_loss": validate(state)})

With DCP's own calls:

>>> saved = dcp.save(state, storage_writer=S3StorageWriter("s3://bucket/run/step-3000"))
>>> dcp.load(state, storage_reader=S3StorageReader("s3://bucket/run/step-3000"))

Before all examples come ``from dcp_s3 import *``, ``import time, torch`` and ``import torch.distributed.checkpoint as
dcp``; ``state`` is ``{"weight": torch.arange(8.0).view(4, 2), "step": 0}``; ``train`` and ``validate`` are the user's;
and a `CheckpointManager` has saved steps 1000 and 2000 to ``s3://bucket/run``.
"""

from importlib import import_module as _import_module
from sys import modules as _modules
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from dcp_s3 import errors as errors
from dcp_s3 import events as events
from dcp_s3.process import __version__ as __version__
from dcp_s3.process import require_torch as _require_torch

if _TYPE_CHECKING:  # the table below again, for type checkers
    # isort: off
    # fmt: off
    from dcp_s3.checkpoint.info import CheckpointInfo as CheckpointInfo
    from dcp_s3.checkup.doctor import DoctorReport as DoctorReport, doctor as doctor
    from dcp_s3.checkup.probes import CheckResult as CheckResult
    from dcp_s3.integrations.dcp import register as register, unregister as unregister
    from dcp_s3.load.planner import S3LoadPlanner as S3LoadPlanner
    from dcp_s3.load.reader import S3StorageReader as S3StorageReader
    from dcp_s3.manager.manager import CheckpointManager as CheckpointManager
    from dcp_s3.manager.step_policy import (
        SaveContinuously as SaveContinuously, SaveEvery as SaveEvery, SaveMoment as SaveMoment,
        SaveOnPreemption as SaveOnPreemption, SavePolicy as SavePolicy,
    )
    from dcp_s3.events import Stats as Stats, stats as stats
    from dcp_s3.offline.copy import CopyResult as CopyResult, copy as copy
    from dcp_s3.offline.export import ExportResult as ExportResult, export as export
    from dcp_s3.offline.read import read_tensor as read_tensor, read_tensors as read_tensors
    from dcp_s3.offline.verify import Problem as Problem, VerifyReport as VerifyReport, verify as verify
    from dcp_s3.offline.weights import load_safetensors as load_safetensors
    from dcp_s3.retention.catalog import (
        CheckpointCatalog as CheckpointCatalog, CheckpointDetails as CheckpointDetails, describe as describe,
        latest as latest, list_checkpoints as list_checkpoints,
    )
    from dcp_s3.retention.marks import annotate as annotate, pin as pin, unpin as unpin
    from dcp_s3.retention.plan import CatalogSnapshot as CatalogSnapshot, Decision as Decision, Plan as Plan
    from dcp_s3.retention.policy import (
        KeepBest as KeepBest, KeepDaily as KeepDaily, KeepEvery as KeepEvery,
        KeepLatest as KeepLatest, KeepWithin as KeepWithin,
        Policy as Policy, parse_policy as parse_policy,
    )
    from dcp_s3.retention.prune import (
        PruneReport as PruneReport, apply_plan as apply_plan, prune as prune, remove as remove,
    )
    from dcp_s3.save.writer import S3StorageWriter as S3StorageWriter
    from dcp_s3.settings import Settings as Settings
    from dcp_s3.sharding import Fused as Fused, shard as shard, shard_state as shard_state
    from dcp_s3.stage.stager import S3Stager as S3Stager
    # fmt: on
    # isort: on

_MODULES = {
    name: f"dcp_s3.{module}"
    for module, names in {
        "checkpoint.info": "CheckpointInfo",
        "checkup.doctor": "doctor DoctorReport",
        "checkup.probes": "CheckResult",
        "errors": "errors",
        "events": "events stats Stats",
        "integrations.dcp": "register unregister",
        "load.planner": "S3LoadPlanner",
        "load.reader": "S3StorageReader",
        "manager.manager": "CheckpointManager",
        "manager.step_policy": "SaveEvery SaveContinuously SaveOnPreemption SavePolicy SaveMoment",
        "offline.copy": "copy CopyResult",
        "offline.export": "export ExportResult",
        "offline.read": "read_tensor read_tensors",
        "offline.verify": "verify VerifyReport Problem",
        "offline.weights": "load_safetensors",
        "process": "__version__",
        "retention.catalog": "latest list_checkpoints describe CheckpointCatalog CheckpointDetails",
        "retention.marks": "pin unpin annotate",
        "retention.plan": "CatalogSnapshot Plan Decision",
        "retention.policy": "KeepLatest KeepBest KeepEvery KeepWithin KeepDaily Policy parse_policy",
        "retention.prune": "prune remove apply_plan PruneReport",
        "save.writer": "S3StorageWriter",
        "settings": "Settings",
        "sharding": "shard shard_state Fused",
        "stage.stager": "S3Stager",
    }.items()
    for name in names.split()
}
"""The public names and their modules, imported when a name is first used: ``dcp-s3 --help`` needs no torch."""

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> _Any:
    if name not in _MODULES:
        # With name and obj a traceback asks: did you mean ...?
        raise AttributeError(f"module 'dcp_s3' has no attribute {name!r}", name=name, obj=_modules[__name__])
    _require_torch()
    value = globals()[name] = getattr(_import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
