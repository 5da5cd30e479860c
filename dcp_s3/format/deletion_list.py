"""``.dcp_s3/deletion-{id}-{attempt}.json``: what the deletion of one checkpoint removes. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_s3.format.layout import is_inside

FORMAT_VERSION = 1


@dataclass(frozen=True)
class DeletionList:
    """Written before the first object goes, so that whoever finds it knows exactly what else is to go."""

    save_id: str | None
    """Of the checkpoint; None for a foreign one."""
    commits: Mapping[str, str]
    """ETag by relative path of what makes it a checkpoint: ``.metadata``, or that of each rank. Gone first."""
    objects: Mapping[str, str]
    """ETag by relative path of everything else, empty where the store gave none."""
    all_versions: bool = False
    """Whether, in a bucket with versions, all of them go."""

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
            ValueError: not such a list, of a version that this one can not read, or it names what lies elsewhere.
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
