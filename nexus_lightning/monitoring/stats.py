"""Small statistics for monitoring: honest intervals for success rates, running means, durations."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any


def wilson_interval(successes: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson score interval of a success rate (Wilson 1927); 95 % with the default ``z``.

    Args:
        successes: number of successes, ``0 <= successes <= n``.
        n: number of trials; with 0 trials nothing is known and the interval is (0, 1).
        z: standard normal quantile.

    Returns:
        ``(low, high)`` inside [0, 1].

    Raises:
        ValueError: counts that cannot be.

    Example:
        >>> [round(x, 4) for x in wilson_interval(5, 10)]
        [0.2366, 0.7634]
    """
    if not 0 <= successes <= n:
        raise ValueError(f"wilson_interval: successes={successes}, n={n}: need 0 <= successes <= n")
    if n == 0:
        return 0.0, 1.0
    rate = successes / n
    denominator = 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / denominator
    half = z / denominator * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # Rounding must not push the interval past the bounds it reaches exactly at 0 and n successes.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return low, high


class RunningMean:
    """Mean of the last ``window`` values (of all values when ``window`` is None).

    Example:
        >>> m = RunningMean(window=2)
        >>> m.value is None
        True
        >>> for x in (1, 2, 4):
        ...     m.update(x)
        >>> m.value, m.count
        (3.0, 2)
    """

    def __init__(self, window: int | None = None) -> None:
        if window is not None and window < 1:
            raise ValueError(f"RunningMean: window={window}: use at least 1, or None for all values")
        self.window = window
        self.count = 0
        self._sum = 0.0
        self._values: deque[float] = deque()

    def update(self, value: float) -> None:
        """Add one value."""
        self._sum += value
        self.count += 1
        if self.window is None:
            return
        self._values.append(value)
        if len(self._values) > self.window:
            self._values.popleft()
            self.count -= 1
            # Summed anew: a running subtraction drifts, and one NaN would stay for ever.
            self._sum = math.fsum(self._values)

    @property
    def value(self) -> float | None:
        """The mean, None before the first value."""
        return self._sum / self.count if self.count else None


def finite(value: Any) -> Any:
    """The same dicts, lists and numbers with None in place of NaN and infinities, which JSON does not have.

    Example:
        >>> finite({"return": [1.0, float("nan")], "n": 2})
        {'return': [1.0, None], 'n': 2}
    """
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def duration_text(seconds: float) -> str:
    """``42s``, ``3m05s``, ``2h07m``."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
