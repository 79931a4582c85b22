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

from nexus_lightning.monitoring.lines import LineFile, disk_refuses

#: Of one tenant's rows, while the disk takes none.
MAX_WAITING_BYTES = 1 << 20


class MetricLog:
    """Rows ``{"id", "time_s", "metrics"}`` of one tenant, ids 1, 2, 3 ... also across restarts. Thread-safe.

    A full disk raises nothing: rows stay readable in memory and reach the file at a later row or :meth:`flush`.

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
                os.truncate(path, len(whole))
            lines = whole.splitlines()
            self._rows.extend(json.loads(line) for line in lines[-history:])
            self._in_file = len(lines)
        self._last = self._rows[-1]["id"] if self._rows else 0
        self._file, self._closed = LineFile(path, MAX_WAITING_BYTES), False

    def add(self, metrics: Mapping[str, float]) -> int:
        """Append a row; returns its id. Non-finite numbers become null: JSON has none."""
        plain = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        with self._changed:
            if self._closed:  # an evaluation that ended while its tenant was deleted
                return self._last
            self._last += 1
            row = {"id": self._last, "time_s": time.time(), "metrics": plain}
            self._rows.append(row)
            self._file.add(json.dumps(row))
            self._in_file += 1
            self._flush()
            self._changed.notify_all()
            return self._last

    def flush(self) -> None:
        """Write what a full disk has refused before."""
        with self._changed:
            if not self._closed:
                self._flush()

    @property
    def problem(self) -> str | None:
        """Why rows cannot be written now; None: they can."""
        return self._file.problem

    def _flush(self) -> None:
        self._file.flush()
        if self._file.problem is None and (self._in_file >= 2 * self._history or self._file.lost):
            self._cut()

    def _cut(self) -> None:
        """A new file with the rows in memory takes the old one's place; without room for both, at a later time."""
        new = self.path.with_suffix(".new")
        self._in_file = len(self._rows)
        try:
            new.write_text("".join(json.dumps(row) + "\n" for row in self._rows), encoding="utf-8")
        except OSError as error:
            new.unlink(missing_ok=True)
            if not disk_refuses(error):
                raise
            return
        self._file.close()
        os.replace(new, self.path)
        self._file = LineFile(self.path, MAX_WAITING_BYTES)

    def rows(self, after: int = 0) -> list[dict[str, Any]]:
        """The rows behind id ``after`` that are still in memory."""
        with self._changed:
            return [row for row in self._rows if row["id"] > after]

    def wait(self, after: int, timeout_s: float) -> list[dict[str, Any]]:
        """:meth:`rows`, as soon as there is one; empty on timeout or close."""
        with self._changed:
            self._changed.wait_for(lambda: self._last > after or self._closed, timeout_s)
            return [row for row in self._rows if row["id"] > after]

    def close(self) -> None:
        """Wake every waiter and let go of the file."""
        with self._changed:
            if not self._closed:
                self._file.close()
            self._closed = True
            self._changed.notify_all()
