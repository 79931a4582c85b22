"""Folders that several programs want at once: one of them has them, the others are told or wait."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


def new_folder(parent: Path, name: str) -> Path:
    """``parent/name``, or ``name_2``, ``name_3`` ... where that exists: made here, so two callers never share one.

    Example:
        >>> import tempfile
        >>> parent = Path(tempfile.mkdtemp())
        >>> new_folder(parent, "run").name, new_folder(parent, "run").name
        ('run', 'run_2')
    """
    for copy in itertools.count(1):
        folder = parent / (name if copy == 1 else f"{name}_{copy}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("itertools.count does not end")


def last_folder(parent: Path, name: str) -> Path | None:
    """The newest of what :func:`new_folder` has made under this name; None when there is none."""
    last = None
    for copy in itertools.count(1):
        folder = parent / (name if copy == 1 else f"{name}_{copy}")
        if not folder.exists():
            return last
        last = folder
    raise AssertionError("itertools.count does not end")


def try_lock(path: Path) -> FileLock | None:
    """Take the lock whose file is ``path``; None when another process or thread has it.

    It is given back by ``release()`` and, however the process ends, with the process.
    """
    lock = FileLock(path, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


@contextlib.contextmanager
def made_once(folder: Path, what: str) -> Iterator[None]:
    """Only one program at a time makes ``folder``; the others wait, and find it made (look again inside).

    Args:
        folder: what is made. Its parent is created. The empty lock file ``.<name>.lock`` stays beside it: removing
            it would let a waiting program lock a file that nobody else sees.
        what: for the line that tells a waiting user why nothing happens.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f".{folder.name}.lock")
    lock = try_lock(path)
    if lock is None:
        print(f"waiting for another program that is {what} {folder}", flush=True)
        lock = FileLock(path, thread_local=False)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def put_in_place(made: Path, folder: Path) -> bool:
    """Rename a finished folder to where it belongs; False, and ``made`` is removed, when somebody was faster.

    Raises:
        OSError: it cannot be renamed although nothing is there.
    """
    try:
        made.rename(folder)
        return True
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(made)
        return False
