"""A file or folder is there whole or not at all: errors, kills and writers at the same time; what is flushed when."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from nexus_lightning.files import TEMPORARY, fsync_folder, rename_folder, write_atomically


@pytest.fixture
def calls(monkeypatch):
    """What was flushed and renamed, in order, as paths at that moment."""
    done: list[tuple[str, ...]] = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def flushed(descriptor):
        done.append(("flush", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(function):
        def call(source, target):
            done.append(("rename", str(source), str(target)))
            function(source, target)

        return call

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed(replace))
    monkeypatch.setattr(os, "rename", renamed(rename))
    return done


def test_what_is_written_is_what_is_there(tmp_path):
    path = tmp_path / "file"
    for data in (b"\x00\xff", "one\r\ntwo\nthr\u00e9e", "", b"shorter"):
        write_atomically(path, data)
        assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert list(tmp_path.iterdir()) == [path]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask, "as open() makes it: other users may read it"
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "no folder" / "file", b"")


@pytest.mark.parametrize("durable", [False, True])
def test_the_content_is_flushed_before_the_rename_and_the_folder_after_it(tmp_path, calls, durable):
    write_atomically(tmp_path / "file", b"new", durable=durable)
    temporary = calls[0][1]
    assert Path(temporary).parent == tmp_path and Path(temporary).name.startswith(TEMPORARY), "the same file system"
    flushed = [("flush", temporary), ("rename", temporary, str(tmp_path / "file"))]
    assert calls == flushed + [("flush", str(tmp_path))] * durable


@pytest.mark.parametrize("step", ["fsync", "replace", "encode"])
def test_an_error_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch, step):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    if step == "encode":
        with pytest.raises(UnicodeEncodeError):
            write_atomically(path, "\ud800")
    else:

        def full(*args):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, step, full)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_kill_leaves_the_old_content(tmp_path, step):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def child() -> None:
        setattr(os, step, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        write_atomically(path, b"new")

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL and path.read_bytes() == b"old"
    (left,) = [other for other in tmp_path.iterdir() if other != path]
    assert left.name.startswith(TEMPORARY), "whoever sweeps knows it by its name"
    write_atomically(path, b"newer")
    assert path.read_bytes() == b"newer"


def test_of_writers_at_once_one_wins(tmp_path):
    path = tmp_path / "file"
    contents = [bytes([i]) * (1 << 16) for i in range(4)]
    seen = []

    def write(content: bytes) -> None:
        for _ in range(10):
            write_atomically(path, content)
            seen.append(path.read_bytes())

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(seen) == 40 and set(seen) <= set(contents) and list(tmp_path.iterdir()) == [path]


def test_a_folder_is_flushed_to_its_depth_and_then_renamed(tmp_path, calls):
    made, target = tmp_path / ".tmp-a", tmp_path / "a"
    (made / "inner" / "empty").mkdir(parents=True)
    for file in (made / "one", made / "inner" / "two"):
        file.write_bytes(b"1")
    fsync_folder(made)
    order = [path for _, path in calls]
    everything = [made, *made.rglob("*")]
    assert sorted(order) == sorted(map(str, everything)), "every file and every folder, once"
    assert all(order.index(str(path)) < order.index(str(path.parent)) for path in everything if path != made)
    calls.clear()
    rename_folder(made, target)
    assert calls == [("rename", str(made), str(target)), ("flush", str(tmp_path))]
    assert (target / "inner" / "two").read_bytes() == b"1" and not made.exists()

    other = tmp_path / ".tmp-b"
    other.mkdir()
    with pytest.raises(OSError) as error:
        rename_folder(other, target)
    assert error.value.errno in (errno.ENOTEMPTY, errno.EEXIST) and other.is_dir()
    with pytest.raises(FileNotFoundError):
        fsync_folder(tmp_path / "no folder")
