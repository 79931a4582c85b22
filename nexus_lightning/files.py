"""Files and folders that appear whole or not at all, whatever kills the writer."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

#: What the name of an unfinished file begins with. A killed writer leaves it behind; it may be removed.
TEMPORARY = ".tmp-"


def write_atomically(path: Path, data: bytes | str, *, durable: bool = False) -> None:
    """Make ``path`` hold ``data`` and nothing else, or leave it as it is.

    Readers, a kill and a power failure find the old content or the new one. Of writers that come at once, in any number
    of threads and processes, one wins. Text is written as UTF-8 with its line ends as they are.

    Args:
        path: its folder exists. A link is replaced, not followed.
        data: the content.
        durable: on return the new content is on the disk, even if the power fails; else the old one may come back.

    Raises:
        OSError: it cannot be written. ``path`` is as it was and no other file is left behind (if only the flush of the
            folder failed, ``path`` is the new one).

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "latest"
        >>> write_atomically(path, "v00000012\\n")
        >>> path.read_text(), len(list(path.parent.iterdir()))
        ('v00000012\\n', 1)
    """
    temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")  # the same folder: a rename cannot cross file systems
    try:
        with open(temporary, "xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())  # or a power failure after the rename leaves an empty file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        _fsync(path.parent)


def rename_folder(folder: Path, target: Path) -> None:
    """Give a finished folder its name, durably. Call :func:`fsync_folder` before: a rename flushes no content.

    Raises:
        OSError: among others ENOTEMPTY or EEXIST when ``target`` is there; ``folder`` stays where it is then.
    """
    os.rename(folder, target)
    _fsync(target.parent)


def fsync_folder(folder: Path) -> None:
    """Flush to the disk every file in ``folder`` at any depth, and the names of all of them."""
    for inner, _, names in folder.walk(top_down=False, on_error=_raise):
        for name in names:
            _fsync(inner / name)
        _fsync(inner)


def _raise(error: OSError) -> None:
    raise error  # pathlib would go on without the folder that it cannot list


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
