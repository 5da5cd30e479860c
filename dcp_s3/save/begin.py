"""Begins a save without collectives."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence

from dcp_s3 import errors
from dcp_s3.checkpoint.info import find_step
from dcp_s3.coordination.identity import current_attempt
from dcp_s3.coordination.ownership import Replicas
from dcp_s3.coordination.processes import CountedSave, count_of
from dcp_s3.save.joint import JointSave
from dcp_s3.save.save import Save, SaveOptions
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)


def begin_joint_save(
    url: CheckpointURL,
    save_id: str,
    options: SaveOptions,
    replicas: Replicas,
    *,
    ranks: Sequence[int] | None = None,
    counted: CountedSave | None = None,
    step: int | None = None,
    in_lockstep: bool = True,
) -> Save:
    """A save of this rank and others (``ranks`` of the job; None: all); a plain one, of ``save_id``, if there are no
    others. ``in_lockstep``: it is synchronous, so no rank is here while another one is at an earlier save. A
    SaveProtocolError if nothing tells this attempt from others, or this save from an earlier one."""
    settings, attempt = options.settings, None
    if counted is not None:
        attempt = counted.attempt
    elif ranks is None or len(ranks) > 1:
        attempt = current_attempt(url, settings, ranks or ())
    if attempt is None or attempt.world_size == 1:
        return Save(url, save_id, options, rank=0, is_coordinator=True)
    members = tuple(range(attempt.world_size) if ranks is None else ranks)
    if settings.spill_dir is not None:
        _warn_of_spilling(str(settings.spill_dir))
    place = members.index(attempt.rank)
    # Ranks that are not all of the job have ids of their own: two such groups must not be taken for one.
    token = attempt.token + ("" if len(members) == attempt.world_size else f" of {members}")
    joint = dataclasses.replace(attempt, token=token, world_size=len(members), rank=place)
    step = find_step(url.name, settings) if step is None else step
    if counted is None and not in_lockstep:
        counted = count_of(joint, url, step)
        if step is None and not counted.is_new:
            raise errors.SaveProtocolError(
                f"{url} is saved to again, asynchronously and without collectives, and nothing tells this save from "
                "the one before if that fails on some rank. Remedy: S3StorageWriter(url, step=...), or another URL for "
                "each step",
                url=str(url),
            )
    return JointSave(url, options, joint, counted, step, ranks=members, replicas=replicas)


@functools.cache
def _warn_of_spilling(directory: str) -> None:
    logger.warning("saves without collectives do not spill to DCP_S3_SPILL_DIR=%s: they fail if S3 refuses", directory)
