"""Files and folders that appear whole or not at all, and folders that several programs want at once.

Whatever kills a writer, readers find the old content or the new one. Of programs that want one folder one has it; the
others are told, or wait.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

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
        rename_folder(made, folder)
        return True
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(made)
        return False


def _raise(error: OSError) -> None:
    raise error  # pathlib would go on without the folder that it cannot list


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
