"""The errors of joint saves that were not committed."""

from __future__ import annotations

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import exists_error
from dcp_s3.coordination import values
from dcp_s3.coordination.identity import Attempt
from dcp_s3.coordination.values import Claim
from dcp_s3.url import CheckpointURL


def verdict_error(
    url: CheckpointURL, verdict: str, attempt: Attempt, claim: Claim | None, nonce: str | None, error: Exception | None
) -> Exception:
    """What a rank raises if a save was not committed, or may not have been.

    Args:
        attempt: that of the rank.
        claim: as the rank has seen it last.
        nonce: of the save; None if the rank has not joined it.
        error: what failed on this rank, if anything did.
    """
    if verdict == values.EXISTS:
        return exists_error(url)
    if error is not None and verdict in (values.ABORTED, values.UNKNOWN):
        return error
    # Without a nonce another rank has ended it before this one came to it.
    aborted = claim.why if claim is not None and nonce in (None, claim.nonce) else ""
    why = _WHY.get(verdict) or aborted or _TAKEN_OVER
    if verdict == values.SUPERSEDED and claim is not None and claim.restart > attempt.restart and attempt.began is None:
        why = _RESTARTED.format(run=attempt.run, theirs=_count(claim.restart), mine=_count(attempt.restart))
    return errors.SaveProtocolError(
        f"{url} is not committed by this save: {why}; what was there before is untouched", url=str(url)
    )


def _count(restart: tuple[int, ...]) -> str:
    return ".".join(map(str, restart))


_RESTARTED = (
    "restart {theirs} of the run {run!r} has saved there, and this process is of restart {mine}. Remedy: end it, if "
    "another one has taken its place; if the job was started anew, with restarts counted from 0 again, give each start "
    "a DCP_S3_RUN_ID (with torchrun: an --rdzv-id) of its own"
)
_TAKEN_OVER = (
    "another attempt of the run, or a later save, has begun to save there. Remedy: none if the run was restarted; "
    "otherwise save to a URL of its own"
)
_WHY = {
    values.UNKNOWN: "the store could not be reached, and it may have been committed all the same",
    values.BEHIND: "other ranks of this run are at a later save to it, or have restored a checkpoint more often. "
    "Remedy: call save and restore equally often on all ranks; manager.restart(step) on all, or a restart of all "
    "processes, makes them equal again",
    values.REFUSED: "another process is, or was, in the place of this rank, or the ranks disagree on WORLD_SIZE. "
    "Remedy: give each start of the job a new DCP_S3_RUN_ID (with torchrun: a new --rdzv-id), or call "
    "torch.distributed.init_process_group; and restart all ranks together",
    values.SUPERSEDED: "a newer attempt of the training saves there, or the checkpoint was deleted since. Remedy: end "
    "this process, if another one has taken its place; two trainings at a time need two URLs",
}
