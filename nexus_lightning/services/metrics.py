"""A tenant's metrics as a numbered list that survives a restart and can be waited for."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricLog:
    """Rows ``{"id", "time_s", "metrics"}`` of one tenant, ids 1, 2, 3 ... also across restarts. Thread-safe.

    Args:
        path: a file of one JSON row a line; an existing one is continued, a torn last line cut off.
        history: rows kept, the newest; the file is cut to them when it holds twice as many.

    Example:
        >>> import tempfile
        >>> log = MetricLog(Path(tempfile.mkdtemp()) / "t.jsonl", history=10)
        >>> log.add({"train/loss": 0.5}), log.add({"train/loss": 0.25})
        (1, 2)
        >>> [row["metrics"]["train/loss"] for row in log.rows(after=1)]
        [0.25]
    """

    def __init__(self, path: Path, history: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._changed = threading.Condition()
        self._rows: deque[dict[str, Any]] = deque(maxlen=history)
        self._history, self._in_file = history, 0
        if path.is_file():
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                path.write_bytes(whole)
            lines = whole.splitlines()
            self._rows.extend(json.loads(line) for line in lines[-history:])
            self._in_file = len(lines)
        self._last = self._rows[-1]["id"] if self._rows else 0
        self._file = path.open("a", encoding="utf-8")

    def add(self, metrics: Mapping[str, float]) -> int:
        """Append a row; returns its id. Non-finite numbers become null: JSON has none."""
        plain = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        with self._changed:
            if self._file.closed:  # an evaluation that ended while its tenant was deleted
                return self._last
            self._last += 1
            row = {"id": self._last, "time_s": time.time(), "metrics": plain}
            self._rows.append(row)
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            self._in_file += 1
            if self._in_file >= 2 * self._history:
                self._cut()
            self._changed.notify_all()
            return self._last

    def _cut(self) -> None:
        """A new file with the rows in memory takes the old one's place."""
        new = self.path.with_suffix(".new")
        new.write_text("".join(json.dumps(row) + "\n" for row in self._rows), encoding="utf-8")
        self._file.close()
        os.replace(new, self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._in_file = len(self._rows)

    def rows(self, after: int = 0) -> list[dict[str, Any]]:
        """The rows behind id ``after`` that are still in memory."""
        with self._changed:
            return [row for row in self._rows if row["id"] > after]

    def wait(self, after: int, timeout_s: float) -> list[dict[str, Any]]:
        """:meth:`rows`, as soon as there is one; empty on timeout or close."""
        with self._changed:
            self._changed.wait_for(lambda: self._last > after or self._file.closed, timeout_s)
            return [row for row in self._rows if row["id"] > after]

    def close(self) -> None:
        """Wake every waiter and let go of the file."""
        with self._changed:
            self._file.close()
            self._changed.notify_all()
