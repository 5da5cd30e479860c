"""This process: its place among the ranks of its job, its torch, and what a forked child and the collector need."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dcp_s3.errors import SettingsError

__version__ = "0.1.0"

TORCH = "2.9"
"""The oldest torch that the tests have run on; pyproject.toml says the same."""

TESTED = ("2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
"""All that they have run on; README says which tests."""

# --- ranks of torch.distributed ----------------------------------------------------------------------------


def is_initialized() -> bool:
    """Whether torch.distributed has a default process group."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's rank; 0 without a process group."""
    import torch.distributed as dist

    return dist.get_rank() if is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


# --- the launcher of the job -------------------------------------------------------------------------------

# torchrun's own variables are first: inside of SLURM or Kubernetes it starts several ranks for each task or pod.
_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    # Not SLURM_NTASKS: a batch script has it, too, and runs once.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    # An Indexed Job does not tell its size.
    ("JOB_COMPLETION_INDEX", "WORLD_SIZE"),
)


@dataclass(frozen=True)
class Launch:
    """What the launcher of a job says about a process in its environment."""

    run: str
    """Id of the run: no other start of a job has it. Empty: the launcher gives none."""
    restart: tuple[int, ...]
    """How often each launcher, the outermost first, has restarted the run."""
    rank: int
    world_size: int
    """Number of ranks."""


def launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """What the launcher says about this process. Runs are named by SLURM (job and step), torchrun (``--rdzv-id``, but
    for its default ``none``) and JobSets whose pods have ``JOBSET_UID`` and ``JOBSET_RESTART_ATTEMPT`` from the
    annotations of those names.

    Raises:
        SettingsError: a rank or a world size is not a whole number, or the rank is not below the world size.
    """
    named = []  # name of the run, if it has one, and the variable with its restarts
    if job := environment.get("SLURM_JOB_ID"):
        named.append((f"slurm-{job}.{environment.get('SLURM_STEP_ID') or 'batch'}", "SLURM_RESTART_COUNT"))
    if (jobset := environment.get("JOBSET_UID")) and environment.get("JOBSET_RESTART_ATTEMPT"):
        named.append((f"jobset-{jobset}", "JOBSET_RESTART_ATTEMPT"))
    if elastic := environment.get("TORCHELASTIC_RUN_ID"):
        named.append(("" if elastic == "none" else f"torchrun-{elastic}", "TORCHELASTIC_RESTART_COUNT"))
    restarts = [environment.get(variable, "") for _, variable in named]
    restart = tuple(int(count) if count.isdecimal() else 0 for count in restarts)
    rank, size = "0", "1"
    for rank_name, size_name in _RANKS:
        if environment.get(rank_name) and environment.get(size_name):
            rank, size = environment[rank_name], environment[size_name]
            if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
                raise SettingsError(
                    f"{rank_name} = {rank!r} and {size_name} = {size!r} are not allowed: expected whole numbers, the "
                    "rank below the world size. Remedy: unset them, or set them as a launcher such as torchrun does"
                )
            break
    return Launch("+".join(run for run, _ in named if run), restart, int(rank), int(size))


def local_world_size() -> int:
    """Ranks on this host, from the launcher (torchrun sets ``LOCAL_WORLD_SIZE``); otherwise 1."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(value)) if value.isdecimal() else 1


# --- torch -------------------------------------------------------------------------------------------------


@functools.cache
def require_torch() -> None:
    """Check the installed torch by its metadata: torch itself, slow to import, is not imported. Raises ImportError,
    which says what to install."""
    from importlib import metadata  # takes as long as the rest of `import dcp_s3`

    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:
        if importlib.util.find_spec("torch") is not None:
            return  # built into something that keeps no metadata; it has to be trusted
        found, install = "torch is not installed", "pip install"
    else:
        if release(installed) >= release(TORCH):
            return
        found, install = f"torch {installed} is installed", "pip install --upgrade"
    raise ImportError(
        f"dcp_s3 needs torch>={TORCH}, and {found}. Remedy: {install} 'torch>={TORCH}' (other builds, CPU or CUDA: "
        "https://pytorch.org/get-started/locally/)",
        name="torch",
    )


def is_newer_than_installed(version: str | None) -> bool:
    """Whether a torch that wrote something, by its version, is a later minor than the one here; True if unknown."""
    from importlib import metadata

    try:
        return version is None or release(version)[:2] > release(metadata.version("torch"))[:2]
    except metadata.PackageNotFoundError:
        return True


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without trailing zeros and what follows them: ``2.6.0rc1`` -> (2, 6)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


# --- what a forked child resets; imports and the collector, of which there is one in a process ------------


def reset_in_child(reset: Callable[[], object]) -> Callable[[], object]:
    """Call ``reset`` in every forked child before its own code goes on, in order of registration: connections and
    threads are its parent's, and a lock that another thread held at the time of the fork would stay locked."""
    os.register_at_fork(after_in_child=reset)
    return reset


_lock = threading.Lock()
_importing = threading.RLock()
_pauses = 0
_was_enabled = False


@contextlib.contextmanager
def torch_imported_alone() -> Iterator[None]:
    """For an import of torch in the body: two threads that import different parts of it at once abort the process."""
    with _importing:
        yield


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause automatic garbage collection in this process, while many long-lived objects are made: the collector walks
    them again and again, which takes as long as making them. Pauses may overlap. The last one to end restores the state
    found by the first, whatever `gc.disable` and `gc.enable` were called in between."""
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses = max(0, _pauses - 1)  # 0 in a child that was forked during the pause
            if _pauses == 0 and _was_enabled:
                gc.enable()


@reset_in_child
def _begin_anew() -> None:
    """A child has none of the threads that hold the locks and would end the pauses."""
    global _lock, _importing, _pauses
    _lock, _importing = threading.Lock(), threading.RLock()
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0
