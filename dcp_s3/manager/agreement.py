"""What all ranks must say alike when a manager is made and when a save begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dcp_s3 import errors
from dcp_s3.manager.arguments import has_stateful, to_state_dict
from dcp_s3.manager.line import Overlap
from dcp_s3.manager.ranks import Failures, Ranks
from dcp_s3.manager.saving import Saving

Refuse = Callable[[Failures], Exception]


class Run(NamedTuple):
    """What must be the same in the managers of all ranks."""

    root: str
    """``s3://bucket/run``."""
    example: str
    """The name of step 12."""
    read_only: bool
    """Whether nothing is saved."""
    asks: bool
    """Whether the ranks have to tell each other which steps to save."""
    save_on_sigterm: bool
    """Whether they have to tell each other of SIGTERM, and end."""
    overlap: Overlap
    """What a save does while an earlier one uploads."""


def agree_on_run(
    ranks: Ranks, configure: Callable[[], tuple[Run, Mapping[str, int | None]]], refuse: Refuse
) -> dict[str, int | None]:
    """Configure the manager on all ranks. Returns what waits on the disks of any of them: steps by URL.

    Raises:
        CheckpointError: the ranks differ.
    """
    told = ranks.agree(configure, refuse)
    runs = {rank: tuple(run) for rank, (run, _) in enumerate(told)}
    if len(set(runs.values())) > 1:
        raise differing(runs, " (by rank)")
    return {url: step for _, waiting in told for url, step in waiting.items()}


def differing(runs: Mapping[Any, object], how: str = "") -> errors.CheckpointError:
    """The error for managers that differ from rank to rank."""
    return errors.CheckpointError(
        "the ranks have different roots, step formats (here of step 12), read_only, save_on_sigterm, overlap or "
        f"should_save (whether it needs more than the step): {dict(runs)}{how}. Remedy: pass the same on all"
    )


def agree_on_save(
    ranks: Ranks,
    saving: Saving,
    step: int,
    state: Mapping[str, Any],
    root: str,
    begin: Callable[[], None],
    refuse: Refuse,
) -> dict[str, Any]:
    """Begin the save of a step on all ranks, and make room for it among those under way. Returns the state, in which
    each Stateful is replaced by its state dict.

    Raises:
        SaveFailedError: an earlier save has failed.
        SaveProtocolError: the ranks save different steps.
    """

    def first() -> tuple[int, bool, int | None]:
        failed = saving.look()
        begin()
        return step, has_stateful(state), failed

    told = ranks.agree(first, refuse)
    steps = {rank: each for rank, (each, _, _) in enumerate(told)}
    if len(set(steps.values())) > 1:
        raise errors.SaveProtocolError(
            f"the ranks save different steps to {root}: {steps} (by rank). Remedy: call save with the same step on all",
            url=root,
        )
    # The newest one that failed on any rank may not have ended on the others yet.
    failed = max((number for _, _, number in told if number is not None), default=None)
    if failed is not None:

        def raise_failure() -> None:
            saving.settle(failed)
            saving.raise_failure(failed)

        ranks.agree(raise_failure, refuse)
    saving.make_room()
    if not any(stateful for _, stateful, _ in told):
        return dict(state)
    collected: dict[str, Any] = {}
    # Separately: a `state_dict` may use collectives, so all ranks must have come this far.
    ranks.agree(lambda: collected.update(to_state_dict(state)), refuse, alike=True)
    return collected
