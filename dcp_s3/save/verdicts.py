"""The errors of joint saves that were not committed."""

from __future__ import annotations

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import exists_error
from dcp_s3.coordination import values
from dcp_s3.coordination.values import Claim
from dcp_s3.url import CheckpointURL


def verdict_error(
    url: CheckpointURL, verdict: str, claim: Claim | None, nonce: str | None, error: Exception | None
) -> Exception:
    """What a rank raises if a save was not committed, or may not have been.

    Args:
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
    why = _WHY.get(verdict) or aborted or _WHY[values.SUPERSEDED]
    return errors.SaveProtocolError(
        f"{url} is not committed by this save: {why}; what was there before is untouched", url=str(url)
    )


_NEW_ID = "give each start of the job a DCP_S3_RUN_ID (with torchrun: an --rdzv-id) of its own"
_WHY = {
    values.UNKNOWN: "the store could not be reached, and it may have been committed all the same",
    values.BEHIND: "other ranks of this run are at a later save to it, or have restored a checkpoint more often. "
    "Remedy: call save and restore equally often on all ranks; manager.restart(step) on all, or a restart of all "
    "processes, makes them equal again",
    values.REFUSED: "another process is, or was, in the place of this rank, or the ranks disagree on WORLD_SIZE. "
    f"Remedy: {_NEW_ID}, or call torch.distributed.init_process_group; and restart all ranks together",
    values.SUPERSEDED: "a newer attempt of the training, or a later save, has begun to save there, or the checkpoint "
    "was deleted since. Remedy: end this process, if another one has taken its place; two trainings at a time need two "
    f"URLs; if the job was started anew, with restarts counted from 0 again, {_NEW_ID}",
}
