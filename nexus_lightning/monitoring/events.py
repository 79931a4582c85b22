"""Who used which service when: an append-only log of spans and points, with running totals.

One JSON object a line in ``<run>/events.jsonl``; times are seconds since the run started (time between a stop and
its resume does not count)::

    {"type": "span", "service": "inference", "tenants": {"libero": 3, "toy": 1}, "start_s": 4.1, "end_s": 4.2, ...}
    {"type": "point", "kind": "quarantine", "tenant": "libero", "time_s": 5.0, "values": {"reason": "loss is NaN"}}
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from nexus_lightning.monitoring.lines import LineFile

Service = Literal["actor", "inference", "environment"]
SERVICES: tuple[str, ...] = get_args(Service)
FLUSH_EVERY_S = 1.0


class ServiceTimes:
    """Busy seconds per service and tenant, and the union of busy time per service. Not thread-safe by itself.

    Example:
        >>> t = ServiceTimes()
        >>> t.add("actor", {"a": 3, "b": 1}, 0.0, 4.0)
        >>> t.add("actor", {"a": 2}, 2.0, 6.0)
        >>> dict(t.busy_s["actor"]), t.utilisation(wall_s=12.0)["actor"]
        ({'a': 7.0, 'b': 1.0}, 0.5)
    """

    def __init__(self) -> None:
        #: ``busy_s[service][tenant]``: summed span lengths; a shared span is split by rows.
        self.busy_s: dict[str, dict[str, float]] = {service: defaultdict(float) for service in SERVICES}
        # Disjoint busy intervals per service, sorted: starts and ends apart so that bisect works on both.
        self._starts: dict[str, list[float]] = {service: [] for service in SERVICES}
        self._ends: dict[str, list[float]] = {service: [] for service in SERVICES}

    def add(self, service: str, tenants: Mapping[str, int], start_s: float, end_s: float) -> None:
        """Count one span. Raises ValueError for an unknown service, no rows, or an end before the start."""
        if service not in SERVICES:
            raise ValueError(f"span: service={service!r}: choose one of {', '.join(SERVICES)}")
        rows = sum(tenants.values())
        if rows < 1 or min(tenants.values()) < 0:
            raise ValueError(
                f"span: service={service}: tenants={dict(tenants)}: give the rows of each tenant, at least 1"
            )
        if not 0 <= start_s <= end_s < math.inf:
            raise ValueError(f"span: service={service}: start_s={start_s}, end_s={end_s}: need 0 <= start_s <= end_s")
        for tenant, tenant_rows in tenants.items():
            self.busy_s[service][tenant] += (end_s - start_s) * tenant_rows / rows
        starts, ends = self._starts[service], self._ends[service]
        first, last = bisect_left(ends, start_s), bisect_right(starts, end_s)
        if first < last:
            start_s, end_s = min(start_s, starts[first]), max(end_s, ends[last - 1])
        starts[first:last], ends[first:last] = [start_s], [end_s]

    def union_s(self, service: str) -> float:
        """Seconds in which the service worked for at least one tenant (overlapping spans counted once)."""
        return math.fsum(self._ends[service]) - math.fsum(self._starts[service])

    def utilisation(self, wall_s: float) -> dict[str, float]:
        """``{service: union of busy time / wall_s}``; 0 while no time has passed."""
        return {s: min(1.0, self.union_s(s) / wall_s) if wall_s > 0 else 0.0 for s in SERVICES}


class EventLog:
    """Thread-safe writer of ``events.jsonl``; flushed to the operating system every second and on close.

    A process killed with ``kill -9`` loses at most the last second. Opening an existing file continues it: a torn last
    line is cut off, the totals are rebuilt, and :meth:`now` goes on after the last recorded time. A full disk raises
    nothing: events wait in memory up to a bound (:class:`~nexus_lightning.monitoring.lines.LineFile`); how many were
    lost beyond it is told by a point ``events_lost`` once there is room.

    Args:
        path: the file; its folder must exist. None: totals only, no file (all ranks but the first).

    Example::

        events = EventLog(run_dir / "events.jsonl")
        with events.timed("actor", {"libero": 32}, kind="sft"):
            ...
        events.utilisation()["actor"]
    """

    def __init__(self, path: str | os.PathLike | None) -> None:
        self.path = Path(os.devnull if path is None else path)
        self._times = ServiceTimes()
        self._lock = threading.Lock()
        offset_s = self._recover() if self.path.is_file() else None
        self._origin_s = time.monotonic() - (offset_s or 0.0)
        self._lines, self._lost_told, self._closed = LineFile(self.path), 0, False
        self._closing = threading.Event()
        self._flusher = threading.Thread(target=self._flush_regularly, name="event-log-flush", daemon=True)
        self._flusher.start()
        self.point("start" if offset_s is None else "resume", None)

    def now(self) -> float:
        """Seconds since the run started (monotonic)."""
        return time.monotonic() - self._origin_s

    def span(self, service: Service, tenants: Mapping[str, int], start_s: float, end_s: float, kind: str) -> None:
        """A service worked from ``start_s`` to ``end_s`` (both from :meth:`now`) on ``{tenant: rows}``."""
        record = {"type": "span", "service": service, "tenants": dict(tenants), "start_s": start_s, "end_s": end_s}
        with self._lock:
            self._times.add(service, tenants, start_s, end_s)
            self._write({**record, "kind": kind})

    @contextmanager
    def timed(self, service: Service, tenants: Mapping[str, int], kind: str) -> Iterator[None]:
        """Record the block as a span, also when it raises."""
        start_s = self.now()
        try:
            yield
        finally:
            self.span(service, tenants, start_s, self.now(), kind)

    def point(self, kind: str, tenant: str | None, **values: Any) -> None:
        """Something happened now; ``values`` are numbers, texts, or lists and dicts of them."""
        record = {"type": "point", "kind": kind, "tenant": tenant, "time_s": self.now(), "values": _jsonable(values)}
        with self._lock:
            self._write(record)

    def busy_seconds(self) -> dict[str, dict[str, float]]:
        """``{service: {tenant: seconds}}``; a shared span is split by rows."""
        with self._lock:
            return {service: dict(tenants) for service, tenants in self._times.busy_s.items()}

    def utilisation(self) -> dict[str, float]:
        """``{service: fraction of the run so far in which it worked for somebody}``."""
        with self._lock:
            return self._times.utilisation(self.now())

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        self._closing.set()
        self._flusher.join()
        with self._lock:
            if not self._closed:
                self._lines.close()
            self._closed = True

    def _write(self, record: dict) -> None:
        if self._closed:
            raise RuntimeError(f"{self.path}: the event log is closed; stop the services before closing it")
        self._lines.add(json.dumps(record))

    def _flush_regularly(self) -> None:
        while not self._closing.wait(FLUSH_EVERY_S):
            with self._lock:
                self._lines.flush()
                lost = self._lines.lost - self._lost_told
                if lost and self._lines.problem is None:
                    self._lost_told = self._lines.lost
                    values = {"count": lost}
                    self._write(
                        {"type": "point", "kind": "events_lost", "tenant": None, "time_s": self.now(), "values": values}
                    )

    @property
    def problem(self) -> str | None:
        """Why events cannot be written now; None: they can."""
        return self._lines.problem

    def _recover(self) -> float:
        """Cut a torn last line, rebuild the totals; returns the last recorded time in seconds."""
        content = self.path.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(self.path, content.rfind(b"\n") + 1)
        last_s = 0.0
        for event in read_events(self.path):
            if event["type"] == "span":
                self._times.add(event["service"], event["tenants"], event["start_s"], event["end_s"])
            last_s = max(last_s, event_end_s(event))
        return last_s


def read_events(path: str | os.PathLike) -> list[dict]:
    """All events of a file, oldest line first; a torn last line (killed run) is left out.

    Raises:
        ValueError: a complete line that is not JSON, naming file and line.
    """
    lines = Path(path).read_bytes().split(b"\n")[:-1]
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            events.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not a JSON event: {error}; delete this line") from error
    return events


def event_end_s(event: dict) -> float:
    """When an event ended, in seconds since run start."""
    return event["end_s"] if event["type"] == "span" else event["time_s"]


def _jsonable(value: Any) -> Any:
    """Plain JSON: tensor and numpy scalars become numbers, non-finite numbers become text (JSON has none)."""
    if isinstance(value, Mapping):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    number = value.item() if callable(getattr(value, "item", None)) else value
    if isinstance(number, (bool, int)):
        return number
    if isinstance(number, float):
        return number if math.isfinite(number) else str(number)
    raise TypeError(f"event value {value!r} of type {type(value).__name__}: use numbers, texts, lists or dicts")
