"""``.dcp_s3/metrics.json``: metrics that were added after the save. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_s3.errors import SettingsError
from dcp_s3.format.manifest import number_from_json, number_to_json

FORMAT_VERSION = 1


@dataclass(frozen=True)
class AddedMetrics:
    """Metrics that were added to one save."""

    of: str
    """Owner of the metrics: the save id, or for a foreign checkpoint the ETag of its ``.metadata``."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Metrics by name."""

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        metrics = {name: number_to_json(value) for name, value in self.metrics.items()}
        fields = {"format_version": FORMAT_VERSION, "save_id": self.of, "metrics": metrics}
        return (json.dumps(fields, indent=1, allow_nan=False) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> AddedMetrics:
        """Parse `to_json`'s output.

        Raises:
            ValueError: not such a file, or of a version that this one cannot read.
        """
        try:
            fields: dict[str, Any] = json.loads(data)
            if fields["format_version"] != FORMAT_VERSION:
                raise ValueError(f"format version {fields['format_version']}, this dcp_s3 reads {FORMAT_VERSION}")
            metrics = {str(name): number_from_json(value) for name, value in fields["metrics"].items()}
            return cls(str(fields["save_id"]), metrics)
        except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
            raise ValueError(f"not a file of metrics: {error!r}") from error


def check_added(metrics: Mapping[str, Any], *, url: str) -> None:
    """Refuse metrics that cannot be added.

    Raises:
        SettingsError: there are none, a name is not text, or a value is not a finite number, NaN, text or bool.
    """
    if not isinstance(metrics, Mapping) or not metrics:
        raise SettingsError(f"metrics for {url}: expected a mapping of names to values, found {metrics!r}")
    for name, value in metrics.items():
        good = isinstance(value, (int, str)) or (isinstance(value, float) and not math.isinf(value))
        if not isinstance(name, str) or not name or not good:
            raise SettingsError(
                f"metric {name!r} = {value!r} of {url} cannot be stored: names are text, values finite numbers, NaN, "
                "text or bools (a tensor: pass tensor.item())"
            )
