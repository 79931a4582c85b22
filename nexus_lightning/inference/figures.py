"""What the sessions of a tenant have seen: waits, latencies, sizes of the batches."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


class Histogram:
    """Counts of durations in fixed log-spaced bins: constant memory, however long the run.

    From 10 microseconds to 1000 seconds, a bin is 10 % wide; what lies outside is counted in the first or last one.

    Example:
        >>> h = Histogram()
        >>> for seconds in (0.001, 0.002, 0.002, 0.5):
        ...     h.add(seconds)
        >>> f"{h.quantile(0.5):.1g} {h.quantile(0.99):.1g}", h.n
        ('0.002 0.5', 4)
    """

    LOW_S = 1e-5
    PER_DECADE = 24
    BINS = 8 * PER_DECADE

    def __init__(self) -> None:
        self.n = 0
        self.counts = [0] * self.BINS

    def add(self, seconds: float) -> None:
        """Count one duration."""
        place = int(math.log10(max(seconds, self.LOW_S) / self.LOW_S) * self.PER_DECADE)
        self.counts[min(place, self.BINS - 1)] += 1
        self.n += 1

    def quantile(self, q: float) -> float | None:
        """Seconds, right to 5 % (the middle of the bin); None before the first value."""
        left = math.ceil(q * self.n)
        for place, count in enumerate(self.counts):
            left -= count
            if count and left <= 0:
                return self.LOW_S * 10 ** ((place + 0.5) / self.PER_DECADE)
        return None

    def bins(self) -> list[tuple[float, int]]:
        """``(upper edge in seconds, count)`` of the bins that hold something."""
        edges = [self.LOW_S * 10 ** ((place + 1) / self.PER_DECADE) for place in range(self.BINS)]
        return [(edge, count) for edge, count in zip(edges, self.counts, strict=True) if count]


@dataclass(eq=False)
class TenantFigures:
    """What one tenant's sessions have seen."""

    wait: Histogram = field(default_factory=Histogram)  # submit -> its batch starts
    held: Histogram = field(default_factory=Histogram)  # the part of it in which the worker was free
    latency: Histogram = field(default_factory=Histogram)  # submit -> answer
    rows: int = 0
    calls: int = 0  # backbone calls with rows of it
    shared_calls: int = 0  # ... that other tenants had rows in as well
    call_rows: int = 0  # rows of those calls, all tenants
    call_sizes: Counter[int] = field(default_factory=Counter)  # floor(log2(rows of a call)) -> calls

    def summary(self) -> dict[str, Any]:
        out: dict[str, Any] = {"n": self.latency.n}
        for name in ("wait", "held", "latency"):
            for percent in (50, 99):
                seconds = getattr(self, name).quantile(percent / 100)
                out[f"{name}_p{percent}_ms"] = None if seconds is None else round(seconds * 1e3, 3)
        out["rows_per_batch"] = self.call_rows / self.calls if self.calls else None
        out["shared_batches"] = self.shared_calls / self.calls if self.calls else None
        return out

    def histograms(self) -> dict[str, Any]:
        out: dict[str, Any] = {f"{name}_bins": getattr(self, name).bins() for name in ("wait", "held", "latency")}
        return out | {"batch_rows_bins": [(2 ** (p + 1) - 1, n) for p, n in sorted(self.call_sizes.items())]}
