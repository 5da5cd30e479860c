"""``.dcp_s3/deletion-{id}-{attempt}.json``: the list of what a checkpoint's deletion removes. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_s3.format.layout import is_inside

FORMAT_VERSION = 1


@dataclass(frozen=True)
class DeletionList:
    """A deletion's list. Written before the first object is deleted: its finder knows exactly what else to delete."""

    save_id: str | None
    """Save id of the checkpoint; None for a foreign one."""
    commits: Mapping[str, str]
    """ETags of the commits (``.metadata``, or each rank's) by relative path. They are deleted first."""
    objects: Mapping[str, str]
    """ETags of all other objects by relative path; empty where the store gave none."""
    all_versions: bool = False
    """Whether all versions are deleted in a versioned bucket."""

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        fields = {
            "format_version": FORMAT_VERSION,
            "save_id": self.save_id,
            "all_versions": self.all_versions,
            "commits": dict(self.commits),
            "objects": dict(self.objects),
        }
        return (json.dumps(fields, indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> DeletionList:
        """Parse `to_json`'s output.

        Raises:
            ValueError: not such a list, of a version that this one cannot read, or it names objects elsewhere.
        """
        try:
            fields: dict[str, Any] = json.loads(data)
            if fields["format_version"] != FORMAT_VERSION:
                raise ValueError(f"format version {fields['format_version']}, this dcp_s3 reads {FORMAT_VERSION}")
            found = cls(
                save_id=None if fields["save_id"] is None else str(fields["save_id"]),
                commits={str(path): str(etag) for path, etag in fields["commits"].items()},
                objects={str(path): str(etag) for path, etag in fields["objects"].items()},
                all_versions=bool(fields["all_versions"]),
            )
        except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
            raise ValueError(f"not a list of a deletion: {error!r}") from error
        if outside := [path for path in (*found.commits, *found.objects) if not is_inside(path)]:
            raise ValueError(f"a list of a deletion that names {outside[0]!r}, which is not in the checkpoint")
        return found
