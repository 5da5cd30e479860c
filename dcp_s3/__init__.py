"""The S3 storage backend for PyTorch Distributed Checkpoint (DCP).

It saves the state of a training to S3 while the training goes on, loads it on any number of ranks, and deletes old
checkpoints by policies. What it writes, torch's own readers read, and the other way round.

A training loop needs five lines:

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

Saving
    S3StorageWriter    DCP's StorageWriter: commits a checkpoint whole, or nothing
    S3Stager           DCP's AsyncStager: copies the state, so that training goes on while it is saved
    shard              says which part of a larger tensor a rank holds
    shard_state        the same for all tensors of a tensor-parallel state
    Fused              how a tensor is split that holds several, such as q, k and v

Loading
    S3StorageReader    DCP's StorageReader: reads these checkpoints, and those of other writers of DCP
    S3LoadPlanner      DCP's LoadPlanner, faster for states of many chunks
    read_tensor        reads one tensor, or a slice of it, without a process group
    read_tensors       reads several entries, or all

A run of checkpoints
    CheckpointManager  saves, restores and prunes the checkpoints of a run
    SaveEvery          saves every N steps, or every T seconds
    SaveContinuously   saves as soon as the last save is committed
    SaveFirst          saves the first step of a new run
    SaveOnPreemption   saves when SIGTERM comes
    SavePolicy         what these are; ``|`` joins them
    SaveMoment         what a policy of your own decides on

Retention
    prune              deletes what no policy keeps, and what failed saves have left
    KeepLatest         keeps the newest k
    KeepBest           keeps the k with the best values of a metric
    KeepEvery          keeps every N steps
    KeepSteps          keeps the steps of a list
    KeepWithin         keeps the last so many hours
    KeepHourly         keeps one of each of the last n hours
    KeepDaily          keeps one of each of the last n days
    KeepWeekly         keeps one of each of the last n weeks
    Policy             what these are; ``|`` joins them
    parse_policy       makes a policy of text such as ``latest:3 daily:7``
    pin                protects a checkpoint from all policies
    unpin              ends that
    remove             deletes one checkpoint
    make_plan          decides what is kept and deleted
    apply_plan         carries out a plan
    Plan               what would be kept and deleted
    Decision           whether one checkpoint would, and why
    PruneReport        what a prune has done

Looking into checkpoints
    latest             the checkpoint to resume from
    list_checkpoints   the checkpoints under a URL
    annotate           adds metrics after the save
    verify             checks that a checkpoint is what was saved
    inspect            what a checkpoint holds, as a tree
    diff               what differs between two checkpoints, without reading their data
    doctor             checks settings, permissions and the store before a run
    export             writes its weights as safetensors
    import_weights     makes a checkpoint of safetensors or torch files
    report             writes an HTML page about a run
    copy               copies a checkpoint, on S3 without passing through here
    CheckpointCatalog  the checkpoints under a URL, with everything that retention decides on
    CatalogSnapshot    what lay there at one time
    CheckpointInfo     one checkpoint
    VerifyReport       what `verify` has found
    Problem            one thing that is wrong
    CheckpointTree     what `inspect` has found
    TreeNode           one name of it
    CheckpointDiff     what `diff` has found
    EntryDiff          what it says of one entry
    DoctorReport       what `doctor` has found
    CheckResult        what one of its checks has found
    ExportResult       what `export` has written
    ReportData         what `report` shows
    CopyResult         what `copy` has done
    ImportResult       what `import_weights` has written

Frameworks
    register           lets DCP save to and load from ``s3://`` URLs wherever it is called
    unregister         ends that
    redirect           lets what is saved below a local directory go to S3

Settings and errors
    Settings           everything that can be set; the environment variables ``DCP_S3_...`` are the defaults
    stats              counters of this process, for monitoring
    Stats              what `stats` returns
    events             what happens, as it happens: `events.subscribe`
    errors             every error that is raised
    __version__        the version of dcp_s3
"""

from importlib import import_module as _import_module
from sys import modules as _modules
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from dcp_s3 import errors, events
from dcp_s3._version import __version__
from dcp_s3.torch_version import require_torch as _require_torch

if _TYPE_CHECKING:
    from dcp_s3.checkpoint.info import CheckpointInfo
    from dcp_s3.checkup.doctor import doctor
    from dcp_s3.checkup.result import CheckResult, DoctorReport
    from dcp_s3.integrations.dcp import redirect, register, unregister
    from dcp_s3.load.planner import S3LoadPlanner
    from dcp_s3.load.reader import S3StorageReader
    from dcp_s3.manager.manager import CheckpointManager
    from dcp_s3.manager.save_policy import (
        SaveContinuously,
        SaveEvery,
        SaveFirst,
        SaveMoment,
        SaveOnPreemption,
        SavePolicy,
    )
    from dcp_s3.monitoring import Stats, stats
    from dcp_s3.offline.copy import copy
    from dcp_s3.offline.copy_source import CopyResult
    from dcp_s3.offline.diff import CheckpointDiff, diff
    from dcp_s3.offline.diff_plan import EntryDiff
    from dcp_s3.offline.export import ExportResult, export
    from dcp_s3.offline.import_weights import ImportResult, import_weights
    from dcp_s3.offline.inspect import CheckpointTree, inspect
    from dcp_s3.offline.read_tensors import read_tensor, read_tensors
    from dcp_s3.offline.tree import TreeNode
    from dcp_s3.offline.verify import verify
    from dcp_s3.offline.verify_report import Problem, VerifyReport
    from dcp_s3.reporting.report import ReportData, report
    from dcp_s3.retention.catalog import CheckpointCatalog, latest, list_checkpoints
    from dcp_s3.retention.marks import annotate, pin, unpin
    from dcp_s3.retention.parse import parse_policy
    from dcp_s3.retention.period_policy import KeepDaily, KeepHourly, KeepWeekly
    from dcp_s3.retention.plan import Decision, Plan, make_plan
    from dcp_s3.retention.policy import (
        KeepBest,
        KeepEvery,
        KeepLatest,
        KeepSteps,
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
    "CheckResult",
    "CheckpointCatalog",
    "CheckpointDiff",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointTree",
    "CopyResult",
    "Decision",
    "DoctorReport",
    "EntryDiff",
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
    "ReportData",
    "S3LoadPlanner",
    "S3Stager",
    "S3StorageReader",
    "S3StorageWriter",
    "SaveContinuously",
    "SaveEvery",
    "SaveFirst",
    "SaveMoment",
    "SaveOnPreemption",
    "SavePolicy",
    "Settings",
    "Stats",
    "TreeNode",
    "VerifyReport",
    "__version__",
    "annotate",
    "apply_plan",
    "copy",
    "diff",
    "doctor",
    "errors",
    "events",
    "export",
    "import_weights",
    "inspect",
    "latest",
    "list_checkpoints",
    "make_plan",
    "parse_policy",
    "pin",
    "prune",
    "read_tensor",
    "read_tensors",
    "redirect",
    "register",
    "remove",
    "report",
    "shard",
    "shard_state",
    "stats",
    "unpin",
    "unregister",
    "verify",
]

_MODULES = {
    "ReportData": "dcp_s3.reporting.report",
    "report": "dcp_s3.reporting.report",
    "CopyResult": "dcp_s3.offline.copy_source",
    "copy": "dcp_s3.offline.copy",
    "EntryDiff": "dcp_s3.offline.diff_plan",
    "diff": "dcp_s3.offline.diff",
    "CheckpointDiff": "dcp_s3.offline.diff",
    "TreeNode": "dcp_s3.offline.tree",
    "inspect": "dcp_s3.offline.inspect",
    "CheckpointTree": "dcp_s3.offline.inspect",
    "DoctorReport": "dcp_s3.checkup.result",
    "CheckResult": "dcp_s3.checkup.result",
    "doctor": "dcp_s3.checkup.doctor",
    "redirect": "dcp_s3.integrations.dcp",
    "register": "dcp_s3.integrations.dcp",
    "unregister": "dcp_s3.integrations.dcp",
    "S3LoadPlanner": "dcp_s3.load.planner",
    "S3StorageReader": "dcp_s3.load.reader",
    "CheckpointManager": "dcp_s3.manager.manager",
    "SaveContinuously": "dcp_s3.manager.save_policy",
    "SaveEvery": "dcp_s3.manager.save_policy",
    "SaveFirst": "dcp_s3.manager.save_policy",
    "SaveMoment": "dcp_s3.manager.save_policy",
    "SaveOnPreemption": "dcp_s3.manager.save_policy",
    "SavePolicy": "dcp_s3.manager.save_policy",
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
    "KeepDaily": "dcp_s3.retention.period_policy",
    "KeepEvery": "dcp_s3.retention.policy",
    "KeepHourly": "dcp_s3.retention.period_policy",
    "KeepLatest": "dcp_s3.retention.policy",
    "KeepSteps": "dcp_s3.retention.policy",
    "KeepWeekly": "dcp_s3.retention.period_policy",
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
    "Stats": "dcp_s3.monitoring",
    "stats": "dcp_s3.monitoring",
}
"""Where each name comes from. Imported when it is first used: ``dcp-s3 --help`` needs no torch."""


def __getattr__(name: str) -> _Any:
    if name not in _MODULES:
        # With name and obj a traceback asks: did you mean ...?
        raise AttributeError(f"module 'dcp_s3' has no attribute {name!r}", name=name, obj=_modules[__name__])
    _require_torch()
    module = _import_module(_MODULES[name])
    value = globals()[name] = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
