"""Prometheus' view of a service: HTTP, requests by tenant, and the master's own figures.

A deleted tenant's series go with it; the method of a request is counted as ``other`` unless it is a usual one, so no
caller can make series without end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

if TYPE_CHECKING:
    from nexus_lightning.services.futures import Request
    from nexus_lightning.services.service import Service

METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
LONG_SECONDS = (0.01, 0.1, 1, 10, 60, 600, 3600, 6 * 3600, 86400)


class Exporter:
    """Series of one service, in a registry of their own (several services may live in one process)."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.registry = registry = CollectorRegistry()
        self.http = Counter("nexus_http_requests", "Answers by route", ["method", "route", "status"], registry=registry)
        self.http_s = Histogram(
            "nexus_http_seconds", "Time to the end of the answer", ["route"], registry=registry, buckets=SECONDS
        )
        self.ended = Counter("nexus_requests", "Ended requests", ["tenant", "verb", "status"], registry=registry)
        self.ended_s = Histogram(
            "nexus_request_seconds",
            "From acceptance to the end",
            ["tenant", "verb"],
            registry=registry,
            buckets=LONG_SECONDS,
        )
        registry.register(self)
        service.futures.on_end = self._ended
        service.on_delete = self._deleted

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        self.http.labels(method if method in METHODS else "other", route, status).inc()
        self.http_s.labels(route).observe(seconds)

    def _ended(self, request: Request, status: str, seconds: float) -> None:
        self.ended.labels(request.tenant_id, request.verb, status).inc()
        self.ended_s.labels(request.tenant_id, request.verb).observe(seconds)

    def _deleted(self, tenant_id: str) -> None:
        self.ended.remove_by_labels({"tenant": tenant_id})
        self.ended_s.remove_by_labels({"tenant": tenant_id})

    def render(self) -> tuple[bytes, str]:
        """The text of ``/metrics`` and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterable[Metric]:
        """Read at every scrape: the figures of :meth:`Master.stats` as gauges."""
        if not (self.service.started and self.service.master.ready):
            return
        stats = self.service.master.stats()
        tenants: dict[str, dict[str, Any]] = stats["tenants"]
        for key in ("policy_version", "jobs_completed", "memory_bytes", "queue_bytes"):
            yield _gauge(key, ["tenant"], {(name,): tenant[key] for name, tenant in tenants.items()})
        seconds = {(n, s): v for n, tenant in tenants.items() for s, v in tenant["device_seconds"].items()}
        yield _gauge("device_seconds", ["tenant", "service"], seconds)
        jobs = {(n, s): v for n, tenant in tenants.items() for s, v in tenant["jobs"].items()}
        yield _gauge("jobs", ["tenant", "state"], jobs)
        yield _gauge("utilisation", ["service"], {(name,): value for name, value in stats["utilisation"].items()})
        inference = dict(stats["inference"])
        sizes = {(str(rows),): calls for rows, calls in inference.pop("call_sizes").items()}
        yield _gauge("inference_calls_of_rows", ["rows"], sizes)
        for key, value in inference.items():  # shared_backbone_calls: with rows of more than one tenant
            yield _gauge(f"inference_{key}", [], {(): value})
        yield _gauge("simulators", [], {(): stats["simulators"]})
        yield _gauge("alarms", [], {(): len(self.service.alarms())})
        yield _gauge("feature_store_bytes", [], {(): stats["feature_store_bytes"]})


def _gauge(key: str, labels: list[str], values: dict[tuple[str, ...], float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"nexus_{key}", f"{key.replace('_', ' ')} as the master counts", labels=labels)
    for names, value in values.items():
        family.add_metric(names, value)
    return family
