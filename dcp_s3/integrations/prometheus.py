"""`dcp_s3.stats` for Prometheus: ``REGISTRY.register(Collector())`` in the registry that a training process serves."""

from __future__ import annotations

from collections.abc import Iterator

from dcp_s3.events import stats
from dcp_s3.integrations import require

require("prometheus-client", "0.20", "1")

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric  # noqa: E402 - what is missing was named
from prometheus_client.registry import Collector as BaseCollector  # noqa: E402

_GAUGES = {"last_step": "", "last_commit": "timestamp_seconds", "last_success": "timestamp_seconds"}
"""Unit of each field that is no counter."""


class Collector(BaseCollector):
    """Makes metrics of `dcp_s3.stats` whenever Prometheus asks: ``dcp_s3_saves_done_total``,
    ``dcp_s3_throttled_requests_total{bucket=...}`` and so on.
    """

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        found = stats()
        for group in ("saves", "loads", "spill", "prunes"):
            for name, value in vars(getattr(found, group)).items():
                metric, help_text = f"dcp_s3_{group}_{name}", f"dcp_s3.stats().{group}.{name}"
                if name not in _GAUGES:
                    yield CounterMetricFamily(metric, help_text, value=value)
                elif value is not None:
                    yield GaugeMetricFamily(metric, help_text, value=value, unit=_GAUGES[name])
        for kind, metric, help_text, states, field in (
            (CounterMetricFamily, "throttled_requests", "Requests that S3 throttled", found.throttle, "throttled"),
            (GaugeMetricFamily, "request_limit", "Data requests that may be in flight", found.throttle, "limit"),
            (GaugeMetricFamily, "requests_in_flight", "Data requests in flight", found.throttle, "in_flight"),
            (CounterMetricFamily, "hedged_requests", "GETs that raced one that straggled", found.hedges, "started"),
        ):
            family = kind(f"dcp_s3_{metric}", help_text, labels=["bucket"])
            for bucket, state in states.items():
                if (value := getattr(state, field)) is not None:
                    family.add_metric([bucket], value)
            yield family
