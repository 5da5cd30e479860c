"""What the launcher of a distributed job says in the environment: which run, which attempt, which rank. Pure.

`dcp_s3.settings.launch` reads this process's environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dcp_s3.errors import SettingsError

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
    """What the launcher says about this process."""

    run: str
    """Id of the run: no other start of a job has it. Empty: the launcher gives none."""
    restart: tuple[int, ...]
    """How often each launcher, the outermost first, has restarted the run."""
    rank: int
    world_size: int
    """Number of ranks."""


def read_launch(environment: Mapping[str, str]) -> Launch:
    """What the launcher says in an environment.

    Runs are named by SLURM (job and step), torchrun (``--rdzv-id``, except its default ``none``) and JobSets whose
    pods have ``JOBSET_UID`` and ``JOBSET_RESTART_ATTEMPT`` from the annotations of those names. Nothing that
    Kubernetes itself puts into the environment of a pod differs from one attempt to the next.

    Raises:
        SettingsError: a rank or a world size is not a whole number, or the rank is not below the world size.
    """
    runs: list[str] = []
    restart: list[int] = []
    if job := environment.get("SLURM_JOB_ID"):
        runs.append(f"slurm-{job}.{environment.get('SLURM_STEP_ID') or 'batch'}")
        restart.append(_count(environment, "SLURM_RESTART_COUNT"))
    if (jobset := environment.get("JOBSET_UID")) and environment.get("JOBSET_RESTART_ATTEMPT"):
        runs.append(f"jobset-{jobset}")
        restart.append(_count(environment, "JOBSET_RESTART_ATTEMPT"))
    elastic = environment.get("TORCHELASTIC_RUN_ID")
    if elastic:
        restart.append(_count(environment, "TORCHELASTIC_RESTART_COUNT"))
        if elastic != "none":
            runs.append(f"torchrun-{elastic}")
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
    return Launch("+".join(runs), tuple(restart), int(rank), int(size))


def _count(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() else 0
