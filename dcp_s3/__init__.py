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
"""

from importlib import import_module as _import_module
from sys import modules as _modules
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from dcp_s3 import errors as errors
from dcp_s3 import events as events
from dcp_s3._version import __version__ as __version__
from dcp_s3.torch_version import require_torch as _require_torch

if _TYPE_CHECKING:  # the table below again, for type checkers
    from dcp_s3.checkpoint.info import CheckpointInfo as CheckpointInfo
    from dcp_s3.checkup.doctor import DoctorReport as DoctorReport
    from dcp_s3.checkup.doctor import doctor as doctor
    from dcp_s3.checkup.probes import CheckResult as CheckResult
    from dcp_s3.integrations.dcp import register as register
    from dcp_s3.integrations.dcp import unregister as unregister
    from dcp_s3.load.planner import S3LoadPlanner as S3LoadPlanner
    from dcp_s3.load.reader import S3StorageReader as S3StorageReader
    from dcp_s3.manager.manager import CheckpointManager as CheckpointManager
    from dcp_s3.manager.step_policy import SaveContinuously as SaveContinuously
    from dcp_s3.manager.step_policy import SaveEvery as SaveEvery
    from dcp_s3.manager.step_policy import SaveFirst as SaveFirst
    from dcp_s3.manager.step_policy import SaveMoment as SaveMoment
    from dcp_s3.manager.step_policy import SaveOnPreemption as SaveOnPreemption
    from dcp_s3.manager.step_policy import SavePolicy as SavePolicy
    from dcp_s3.monitoring import Stats as Stats
    from dcp_s3.monitoring import stats as stats
    from dcp_s3.offline.copy import CopyResult as CopyResult
    from dcp_s3.offline.copy import copy as copy
    from dcp_s3.offline.diff import CheckpointDiff as CheckpointDiff
    from dcp_s3.offline.diff import EntryDiff as EntryDiff
    from dcp_s3.offline.diff import diff as diff
    from dcp_s3.offline.export import ExportResult as ExportResult
    from dcp_s3.offline.export import export as export
    from dcp_s3.offline.import_weights import ImportResult as ImportResult
    from dcp_s3.offline.import_weights import import_weights as import_weights
    from dcp_s3.offline.inspect import CheckpointEntries as CheckpointEntries
    from dcp_s3.offline.inspect import inspect as inspect
    from dcp_s3.offline.read import read_tensor as read_tensor
    from dcp_s3.offline.read import read_tensors as read_tensors
    from dcp_s3.offline.verify import VerifyReport as VerifyReport
    from dcp_s3.offline.verify import verify as verify
    from dcp_s3.offline.verify_plan import Problem as Problem
    from dcp_s3.reporting.report import ReportData as ReportData
    from dcp_s3.reporting.report import report as report
    from dcp_s3.retention.catalog import CatalogSnapshot as CatalogSnapshot
    from dcp_s3.retention.catalog import CheckpointCatalog as CheckpointCatalog
    from dcp_s3.retention.catalog import latest as latest
    from dcp_s3.retention.catalog import list_checkpoints as list_checkpoints
    from dcp_s3.retention.marks import annotate as annotate
    from dcp_s3.retention.marks import pin as pin
    from dcp_s3.retention.marks import unpin as unpin
    from dcp_s3.retention.parse import parse_policy as parse_policy
    from dcp_s3.retention.plan import Decision as Decision
    from dcp_s3.retention.plan import Plan as Plan
    from dcp_s3.retention.plan import make_plan as make_plan
    from dcp_s3.retention.policy import KeepBest as KeepBest
    from dcp_s3.retention.policy import KeepDaily as KeepDaily
    from dcp_s3.retention.policy import KeepEvery as KeepEvery
    from dcp_s3.retention.policy import KeepHourly as KeepHourly
    from dcp_s3.retention.policy import KeepLatest as KeepLatest
    from dcp_s3.retention.policy import KeepSteps as KeepSteps
    from dcp_s3.retention.policy import KeepWeekly as KeepWeekly
    from dcp_s3.retention.policy import KeepWithin as KeepWithin
    from dcp_s3.retention.policy import Policy as Policy
    from dcp_s3.retention.prune import PruneReport as PruneReport
    from dcp_s3.retention.prune import apply_plan as apply_plan
    from dcp_s3.retention.prune import prune as prune
    from dcp_s3.retention.prune import remove as remove
    from dcp_s3.save.writer import S3StorageWriter as S3StorageWriter
    from dcp_s3.settings import Settings as Settings
    from dcp_s3.sharding import Fused as Fused
    from dcp_s3.sharding import shard as shard
    from dcp_s3.sharding import shard_state as shard_state
    from dcp_s3.stage.stager import S3Stager as S3Stager

_PAGE = {
    "Saving": {
        "S3StorageWriter": ("save.writer", "DCP's StorageWriter: commits a checkpoint whole, or nothing"),
        "S3Stager": ("stage.stager", "DCP's AsyncStager: copies the state, so that training goes on while it is saved"),
        "shard": ("sharding", "says which part of a larger tensor a rank holds"),
        "shard_state": ("sharding", "the same for all tensors of a tensor-parallel state"),
        "Fused": ("sharding", "how a tensor is split that holds several, such as q, k and v"),
    },
    "Loading": {
        "S3StorageReader": ("load.reader", "DCP's StorageReader: reads these checkpoints, and other writers' of DCP"),
        "S3LoadPlanner": ("load.planner", "DCP's LoadPlanner, faster for states of many chunks"),
        "read_tensor": ("offline.read", "reads one tensor, or a slice of it, without a process group"),
        "read_tensors": ("offline.read", "reads several entries, or all"),
    },
    "A run of checkpoints": {
        "CheckpointManager": ("manager.manager", "saves, restores and prunes the checkpoints of a run"),
        "SaveEvery": ("manager.step_policy", "saves every N steps, or every T seconds"),
        "SaveContinuously": ("manager.step_policy", "saves as soon as the last save is committed"),
        "SaveFirst": ("manager.step_policy", "saves the first step of a new run"),
        "SaveOnPreemption": ("manager.step_policy", "saves when SIGTERM comes"),
        "SavePolicy": ("manager.step_policy", "what these are; ``|`` joins them"),
        "SaveMoment": ("manager.step_policy", "what a policy of your own decides on"),
    },
    "Retention": {
        "prune": ("retention.prune", "deletes what no policy keeps, and what failed saves have left"),
        "KeepLatest": ("retention.policy", "keeps the newest k"),
        "KeepBest": ("retention.policy", "keeps the k with the best values of a metric"),
        "KeepEvery": ("retention.policy", "keeps every N steps"),
        "KeepSteps": ("retention.policy", "keeps the steps of a list"),
        "KeepWithin": ("retention.policy", "keeps the last so many hours"),
        "KeepHourly": ("retention.policy", "keeps one of each of the last n hours"),
        "KeepDaily": ("retention.policy", "keeps one of each of the last n days"),
        "KeepWeekly": ("retention.policy", "keeps one of each of the last n weeks"),
        "Policy": ("retention.policy", "what these are; ``|`` joins them"),
        "parse_policy": ("retention.parse", "makes a policy of text such as ``latest:3 daily:7``"),
        "pin": ("retention.marks", "protects a checkpoint from all policies"),
        "unpin": ("retention.marks", "ends that"),
        "remove": ("retention.prune", "deletes one checkpoint"),
        "make_plan": ("retention.plan", "decides what is kept and deleted"),
        "apply_plan": ("retention.prune", "carries out a plan"),
        "Plan": ("retention.plan", "what would be kept and deleted"),
        "Decision": ("retention.plan", "whether one checkpoint would, and why"),
        "PruneReport": ("retention.prune", "what a prune has done"),
    },
    "Looking into checkpoints": {
        "latest": ("retention.catalog", "the checkpoint to resume from"),
        "list_checkpoints": ("retention.catalog", "the checkpoints under a URL"),
        "annotate": ("retention.marks", "adds metrics after the save"),
        "verify": ("offline.verify", "checks that a checkpoint is what was saved"),
        "inspect": ("offline.inspect", "what a checkpoint holds"),
        "diff": ("offline.diff", "what differs between two checkpoints, without reading their data"),
        "doctor": ("checkup.doctor", "checks settings, permissions and the store before a run"),
        "export": ("offline.export", "writes its weights as safetensors"),
        "import_weights": ("offline.import_weights", "makes a checkpoint of safetensors or torch files"),
        "report": ("reporting.report", "writes an HTML page about a run"),
        "copy": ("offline.copy", "copies a checkpoint, on S3 without passing through here"),
        "CheckpointCatalog": (
            "retention.catalog",
            "the checkpoints under a URL, with everything that retention decides on",
        ),
        "CatalogSnapshot": ("retention.catalog", "what lay there at one time"),
        "CheckpointInfo": ("checkpoint.info", "one checkpoint"),
        "VerifyReport": ("offline.verify", "what `verify` has found"),
        "Problem": ("offline.verify_plan", "one thing that is wrong"),
        "CheckpointEntries": ("offline.inspect", "what `inspect` has found"),
        "CheckpointDiff": ("offline.diff", "what `diff` has found"),
        "EntryDiff": ("offline.diff", "what it says of one entry"),
        "DoctorReport": ("checkup.doctor", "what `doctor` has found"),
        "CheckResult": ("checkup.probes", "what one of its checks has found"),
        "ExportResult": ("offline.export", "what `export` has written"),
        "ReportData": ("reporting.report", "what `report` shows"),
        "CopyResult": ("offline.copy", "what `copy` has done"),
        "ImportResult": ("offline.import_weights", "what `import_weights` has written"),
    },
    "Frameworks": {
        "register": ("integrations.dcp", "lets DCP save to and load from ``s3://`` URLs wherever it is called"),
        "unregister": ("integrations.dcp", "ends that"),
    },
    "Settings and errors": {
        "Settings": ("settings", "what can be set; the environment variables ``DCP_S3_...`` are the defaults"),
        "stats": ("monitoring", "counters of this process, for monitoring"),
        "Stats": ("monitoring", "what `stats` returns"),
        "events": ("events", "what happens, as it happens: `events.subscribe`"),
        "errors": ("errors", "every error that is raised"),
        "__version__": ("_version", "the version of dcp_s3"),
    },
}
"""The public names: where each is, and what the page of ``help(dcp_s3)`` says of it."""

_MODULES = {name: f"dcp_s3.{module}" for names in _PAGE.values() for name, (module, _) in names.items()}
"""Imported when a name is first used: ``dcp-s3 --help`` needs no torch."""

__all__ = sorted(_MODULES)

if __doc__:  # not with -OO
    for _heading, _names in _PAGE.items():
        __doc__ += f"\n{_heading}\n" + "".join(f"    {name:18} {line}\n" for name, (_, line) in _names.items())


def __getattr__(name: str) -> _Any:
    if name not in _MODULES:
        # With name and obj a traceback asks: did you mean ...?
        raise AttributeError(f"module 'dcp_s3' has no attribute {name!r}", name=name, obj=_modules[__name__])
    _require_torch()
    value = globals()[name] = getattr(_import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
