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
        """Read at every scrape: what the master counts. Numbers, and numbers by name, become gauges
        ``nexus_<key>`` with the label ``name``; anything deeper is for the page."""
        if not (self.service.started and self.service.master.ready):
            return
        for key, value in self.service.master.stats().items():
            rows: dict[str, Any] = value if isinstance(value, dict) else {"": value}
            numbers = {name: v for name, v in rows.items() if isinstance(v, int | float) and not isinstance(v, bool)}
            if numbers:
                family = GaugeMetricFamily(f"nexus_{key}", f"stats()[{key!r}] of the master", labels=["name"])
                for name, number in numbers.items():
                    family.add_metric([str(name)], number)
                yield family
