"""Files that grow by lines and outlive a full disk."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

#: Errors of a disk that may take writes again later: full, quota used up, read-only, not answering.
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def disk_refuses(error: BaseException) -> bool:
    """True for a write that the disk refused, which may succeed once there is room.

    Example:
        >>> disk_refuses(OSError(errno.ENOSPC, "No space left on device")), disk_refuses(FileNotFoundError())
        (True, False)
    """
    return isinstance(error, OSError) and error.errno in _REFUSED


class LineFile:
    """Appends lines to a file. What the disk refuses waits in memory and is written at a later :meth:`flush`.

    Lines that find ``max_bytes`` waiting are lost and counted. One message in the log when writing begins to fail, one
    when it goes on. Not thread-safe.

    Args:
        path: opened now; its folder must exist.
        max_bytes: that wait at most.

    Attributes:
        problem: why the last write failed, or None.
        lost: lines lost so far.

    Raises:
        OSError: it cannot be opened, for another reason than a disk that refuses writes.

    Example:
        >>> import tempfile
        >>> lines = LineFile(Path(tempfile.mkdtemp()) / "a.jsonl")
        >>> lines.add('{"n": 1}'), lines.path.read_text()
        (None, '')
        >>> lines.flush(), lines.path.read_text()
        (None, '{"n": 1}\\n')
    """

    def __init__(self, path: str | os.PathLike, max_bytes: int = 8 << 20) -> None:
        self.path, self.max_bytes = Path(path), max_bytes
        self.problem: str | None = None
        self.lost = 0
        self._waiting = bytearray()
        self._descriptor: int | None = None
        self.flush()

    def add(self, line: str) -> None:
        """A line for the next :meth:`flush`."""
        if len(self._waiting) >= self.max_bytes:
            self.lost += 1
        else:
            self._waiting += line.encode() + b"\n"

    def flush(self) -> None:
        """Hand what waits to the operating system."""
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            while self._waiting:
                del self._waiting[: os.write(self._descriptor, self._waiting)]
        except OSError as error:
            if self._descriptor is None and not disk_refuses(error):
                raise
            if self.problem is None:
                log.error("%s cannot be written: %s; lines wait until it can", self.path, error.strerror)
            self.problem = error.strerror or str(error)
            return
        if self.problem is not None:
            log.warning("%s is written again; %d lines were lost so far", self.path, self.lost)
        self.problem = None

    def close(self) -> None:
        """:meth:`flush`, for the last time: what the disk refuses now is lost."""
        self.flush()
        if self.problem is not None:
            log.error("%s: %d bytes could not be written: %s", self.path, len(self._waiting), self.problem)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
