"""Features of dataset frames: computed once per key, then served from memory or from memory-mapped files.

::

    <folder>/
        <sha256 of the key>/                    an entry: all frames of one dataset through one backbone for one kind
            key.json                            the key in words, compared at every open
            view0-shard00000012/                frames 12 * shard_rows ... of one view, a memory-mapped TensorDict
                files.json                      path -> bytes of every tensor file
        .tmp-<host>-<pid>-<random>/             being written, or being removed

The backbone is frozen, so a feature never goes stale: what could change it is in the :class:`StoreKey`, and another key
is another entry. A shard is complete or absent: it is written under a temporary name, flushed to disk and renamed. Kill
a process at any point and the store stays readable; what it left behind is removed when the store is next opened.

Several processes may use one folder. Two that compute the same shard both write it, the first rename wins and the other
uses it. Removal renames first as well, so nobody opens half a shard, and on Linux a mapping that another process holds
stays valid after the files are unlinked. Each process counts against its own budget the bytes that it found at its
start, wrote or read, so the folder may exceed one budget by what other processes have written since.

Not covered: bytes that change on disk without a change of a file's size.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import psutil
import torch
from tensordict import TensorDict, is_leaf_nontensor
from torch import Tensor
from torch.nn import functional

from nexus_lightning.backbone import VLAFeature
from nexus_lightning.files import fsync_folder, rename_folder

_logger = logging.getLogger(__name__)

FORMAT = 1
#: Stored dtypes of float32 features.
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
#: Shards that are mapped at once. A shard has some ten files, Linux allows 65,530 mappings per process.
OPEN_SHARDS = 1024
#: How exact the last use on disk (a shard folder's modification time) is, in seconds.
TOUCH_S = 60.0
#: Another host's processes cannot be looked up: its temporary folders are taken for dead after a day.
FOREIGN_TEMPORARY_S = 86400.0

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_ENTRY = re.compile(r"[0-9a-f]{64}")
_SHARD = re.compile(r"view(\d+)-shard(\d{8,})")
_TEMPORARY = re.compile(r"\.tmp-(.+)-(\d+)-[0-9a-f]{32}")
_TOKENS, _MASK = ("features", "tokens"), ("features", "mask")
#: Columns whose second dim is a number of tokens.
_SEGMENTS = (_TOKENS, _MASK)

#: A shard's tensors by their path in the TensorDict.
Leaves = dict[tuple[str, ...], Tensor]
#: (rows int64 ``[n]``, view) -> TensorDict ``[n]`` with ``features`` and other tensor columns.
Compute = Callable[[Tensor, int], TensorDict]


@dataclass(frozen=True)
class StoreKey:
    """All that a stored row depends on, besides its frame and view.

    Attributes:
        fingerprint: ``Backbone.fingerprint``: weights, configuration, dtype.
        prefix, action_tokens: the two parts of :func:`~nexus_lightning.backbone.sharing_key`: what the backbone sees.
        kind: one of :data:`~nexus_lightning.backbone.KINDS`.
        dataset: name of the dataset (``repo_id``).
        revision: :func:`dataset_revision`.
        conversion: says how a frame becomes an observation and the other columns (camera keys, conventions and, when
            actions are among the columns, the chunk: ``schema.signature``). Empty when there is nothing to say.
        dtype: stored dtype of float32 features, one of :data:`DTYPES`; everything else is stored as computed.
        shard_rows: frames per shard.

    Raises:
        ValueError: an unknown dtype, an empty name or a shard without rows.

    Example:
        >>> key = StoreKey("f1", "p1", 0, "tokens", "me/cubes", "r1")
        >>> len(key.digest), key.digest == StoreKey("f1", "p1", 0, "tokens", "me/cubes", "r2").digest
        (64, False)
    """

    fingerprint: str
    prefix: str
    action_tokens: int
    kind: str
    dataset: str
    revision: str
    conversion: str = ""
    dtype: str = "float16"
    shard_rows: int = 64

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"StoreKey.dtype={self.dtype!r}: choose one of {', '.join(DTYPES)}")
        if self.shard_rows < 1:
            raise ValueError(f"StoreKey.shard_rows={self.shard_rows}: must be at least 1")
        for name in ("fingerprint", "prefix", "kind", "dataset", "revision"):
            if not getattr(self, name):
                raise ValueError(f"StoreKey.{name} is empty: features of different origin would be mixed up")

    @property
    def digest(self) -> str:
        """sha256 (hex) over format and fields; the name of the entry's folder."""
        return hashlib.sha256(json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True).encode()).hexdigest()


class _ShardId(NamedTuple):
    digest: str
    view: int
    index: int


@dataclass
class _Shard:
    bytes: int
    leaves: Leaves | None = None  # None: on disk, not mapped at the moment
    last_use: int = 0  # on the store's clock; 0: not used by this process
    touched: float = 0.0  # when the last use was written to disk


class _ShardLock:
    """Held while a shard is computed. A class of our own, because a WeakValueDictionary holds it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


@dataclass
class _Shared:
    """What the readers of one key share."""

    key: StoreKey
    num_frames: int
    pass_start: int  # the store's clock when the current pass over the entry began
    previous_pass: int  # and when the one before did
    bytes: int = 0
    evicted_shards: int = 0
    row_bytes: int = 0  # of the last shard computed; 0: none was
    pass_rows: int = 0
    disk_full: bool = False
    warned: bool = False


class FeatureStore:
    """The features of all tenants of a process; one copy per key however many readers it has.

    Budget: a new shard takes the place of the least recently used shards of *other* entries. What another entry has
    used since this one began its previous pass over its frames is in use and stays, so that two tenants whose features
    do not fit together do not keep replacing each other's. An entry never replaces its own shards: readers go through
    it in passes, and what was used longest ago comes next. Without room the shard is computed and returned but not
    kept, and from then on only the frames asked for are computed. The same holds for the rest of the run when the disk
    is full. Either way there is one warning per entry.

    Thread-safe. While a thread computes a shard, others that ask for it wait; all else goes on.

    Attributes:
        bytes: of the tensors kept (found at the start, or kept since). ``computed_rows``, ``served_rows`` and
            ``evicted_shards`` count since the start, over all entries.

    Args:
        folder: where shards are kept; None keeps them in memory.
        budget_bytes: most bytes of tensors to keep. What the folder holds beyond it is removed, oldest use first.

    Raises:
        ValueError: a negative budget.

    Example:
        >>> def compute(rows, view):
        ...     pooled = rows.float().unsqueeze(1) * 2
        ...     none = TensorDict({}, [len(rows)])
        ...     features = VLAFeature(tokens=none, mask=none.clone(), pooled=pooled, batch_size=[len(rows)])
        ...     return TensorDict({"features": features, "state": pooled + 1}, [len(rows)])
        >>> store = FeatureStore(None, budget_bytes=1_000_000)
        >>> entry = store.entry(StoreKey("f1", "p1", 0, "pooled", "me/cubes", "r1"), num_frames=100, compute=compute)
        >>> entry.read(torch.tensor([7, 3]))["features"].pooled.flatten().tolist()
        [14.0, 6.0]
        >>> entry.computed_rows, entry.served_rows
        (64, 2)
    """

    def __init__(self, folder: Path | None, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes={budget_bytes}: must be at least 0")
        self.folder = None if folder is None else Path(folder).resolve()
        self.budget_bytes = budget_bytes
        self.bytes = self.computed_rows = self.served_rows = self.evicted_shards = 0
        self._lock = threading.RLock()
        self._clock = 0
        self._entries: dict[str, _Shared] = {}
        self._shards: OrderedDict[_ShardId, _Shard] = OrderedDict()  # least recently used first
        self._mapped: OrderedDict[_ShardId, None] = OrderedDict()
        self._computing: WeakValueDictionary[_ShardId, _ShardLock] = WeakValueDictionary()
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove_dead_temporaries(self.folder)
            self._scan(self.folder)
            self._delete(self._evict(self._victims(0, None) or []))

    def entry(self, key: StoreKey, num_frames: int, compute: Compute) -> FeatureEntry:
        """A reader of one key.

        Args:
            key: readers with equal keys share their shards.
            num_frames: rows are ``0 .. num_frames - 1``.
            compute: rows and view to a TensorDict ``[n]`` on any device with ``features`` (:class:`VLAFeature`) and
                other tensor columns. A pure function of key, row and view. Called by the threads that read this entry.

        Raises:
            ValueError: no frames, or the folder of this key belongs to another one.
        """
        if num_frames < 1:
            raise ValueError(f"num_frames={num_frames}: must be at least 1")
        digest = key.digest
        with self._lock:
            shared = self._entries.get(digest)
            if shared is None:
                shared = _Shared(key, num_frames, self._clock, self._clock)
                if self.folder is not None:
                    try:
                        self._open_folder(self.folder / digest, key, num_frames)
                    except OSError as error:
                        if error.errno not in _DISK_FULL:
                            raise
                        self._warn_disk(shared, error)
                shared.bytes = sum(shard.bytes for id, shard in self._shards.items() if id.digest == digest)
                self._entries[digest] = shared
            _check_same(f"feature store, entry {digest}", _described(shared.key, shared.num_frames), key, num_frames)
        return FeatureEntry(self, shared, compute)

    def _open_folder(self, path: Path, key: StoreKey, num_frames: int) -> None:
        """Makes the entry's folder, or checks that it is this key's."""
        wanted = _described(key, num_frames)
        if not path.exists():
            with self._new_folder(path) as temporary:
                temporary.mkdir()
                _write_file(temporary / "key.json", json.dumps(wanted, indent=2).encode())
        try:
            stored = json.loads((path / "key.json").read_bytes())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path / 'key.json'} cannot be read ({error}): remove the folder {path}") from error
        _check_same(f"{path / 'key.json'}", stored, key, num_frames)

    def _scan(self, folder: Path) -> None:
        """Registers the shards on disk, oldest use first."""
        found = []
        for entry in folder.iterdir():
            for path in entry.iterdir() if _ENTRY.fullmatch(entry.name) and entry.is_dir() else ():
                match = _SHARD.fullmatch(path.name)
                if match is None:
                    continue
                try:
                    found.append(
                        (path.stat().st_mtime, _ShardId(entry.name, int(match[1]), int(match[2])), _size(path))
                    )
                except (OSError, ValueError):
                    pass  # removed by another process meanwhile, or damaged: then the first use says so
        for _, id, size in sorted(found):
            self._shards[id] = _Shard(size)
            self.bytes += size

    # ---- one shard ---------------------------------------------------------------------------------------------------

    def _shard(self, reader: FeatureEntry, view: int, index: int) -> Leaves | None:
        """The shard's tensors (not to be changed), or None when it is not there and there is no room to keep it."""
        id = _ShardId(reader.digest, view, index)
        shared = reader.shared
        with self._lock:
            leaves = self._use(id)
            lock = self._computing.setdefault(id, _ShardLock()) if leaves is None else None
        if lock is None:
            return leaves
        with lock.lock:
            with self._lock:
                leaves = self._use(id)  # somebody else has computed it meanwhile
            if leaves is None and self.folder is not None:
                leaves = self._map(id)
            if leaves is not None:
                return leaves
            start = index * shared.key.shard_rows
            rows = torch.arange(start, min(start + shared.key.shard_rows, shared.num_frames))
            with self._lock:
                if shared.disk_full:
                    return None
                if shared.row_bytes and self._victims(shared.row_bytes * len(rows), shared) is None:
                    self._warn_budget(shared)
                    return None
            leaves = reader.compute_rows(rows, view)
            return self._keep(id, leaves, shared, len(rows))

    def _use(self, id: _ShardId) -> Leaves | None:
        """The tensors of a shard that is in memory or mapped. Call it with the lock held."""
        shard = self._shards.get(id)
        if shard is None or shard.leaves is None:
            return None
        self._clock += 1
        shard.last_use = self._clock
        self._shards.move_to_end(id)
        if self.folder is not None:
            self._mapped.move_to_end(id)
            if time.time() - shard.touched > TOUCH_S:
                shard.touched = time.time()
                try:
                    os.utime(self._path(id))
                except FileNotFoundError:
                    pass  # removed by another process; our mapping stays valid
        return shard.leaves

    def _map(self, id: _ShardId, reserved: int = 0) -> Leaves | None:
        """Maps a shard from disk, whoever wrote it. None: it is not there, or was damaged and is removed."""
        path = self._path(id)
        try:
            size = _size(path)
            leaves = _leaves(TensorDict.load_memmap(path))
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            with self._lock:
                self._forget(id)
            if path.exists():
                _logger.warning("feature store: %s is damaged (%s): removed, computed again", path, error)
                self._delete([self._move_away(id)])
            return None
        return self._register(id, _Shard(size, leaves), reserved)

    def _keep(self, id: _ShardId, leaves: Leaves, shared: _Shared, num_rows: int) -> Leaves:
        """Keeps a computed shard if there is room. Returns its tensors in any case."""
        size = sum(value.nbytes for value in leaves.values())
        with self._lock:
            shared.row_bytes = max(1, size // num_rows)
            victims = self._victims(size, shared)
            if victims is None:
                self._warn_budget(shared)
                return leaves
            evicted = self._evict(victims)
            self.bytes += size  # reserved before the lock is given up
        kept = None
        try:
            self._delete(evicted)
            if self.folder is None:
                # Cloned: what compute gave may be part of something larger, or change later.
                kept = self._register(id, _Shard(size, {key: value.clone() for key, value in leaves.items()}), size)
            else:
                self._write(id, leaves)
                # From here on the mapped tensors are used: their pages may be dropped when memory is short.
                kept = self._map(id, size)
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            with self._lock:
                self._warn_disk(shared, error)
        finally:
            if kept is None:
                with self._lock:
                    self.bytes -= size
        return kept or leaves

    def _register(self, id: _ShardId, shard: _Shard, reserved: int) -> Leaves:
        """Puts a shard on the books, in place of ``reserved`` bytes."""
        with self._lock:
            known = self._forget(id)
            if known is not None:
                shard.touched = known.touched
            self._shards[id] = shard
            self.bytes += shard.bytes - reserved
            self._entries[id.digest].bytes += shard.bytes
            if self.folder is not None:
                self._mapped[id] = None
                while len(self._mapped) > OPEN_SHARDS:
                    self._shards[self._mapped.popitem(last=False)[0]].leaves = None
            leaves = self._use(id)
            assert leaves is not None
            return leaves

    def _forget(self, id: _ShardId) -> _Shard | None:
        """Takes a shard off the books. Call it with the lock held."""
        shard = self._shards.pop(id, None)
        self._mapped.pop(id, None)
        if shard is not None:
            self.bytes -= shard.bytes
            if id.digest in self._entries:
                self._entries[id.digest].bytes -= shard.bytes
        return shard

    # ---- budget ------------------------------------------------------------------------------------------------------

    def _victims(self, size: int, shared: _Shared | None) -> list[_ShardId] | None:
        """The shards that must go so that ``size`` more bytes fit; None: not possible. Call it with the lock held."""
        excess = self.bytes + size - self.budget_bytes
        victims: list[_ShardId] = []
        for id, shard in self._shards.items():
            if excess <= 0 or (shared is not None and shard.last_use > shared.previous_pass):
                break
            if shared is None or id.digest != shared.key.digest:
                victims.append(id)
                excess -= shard.bytes
        return victims if excess <= 0 else None

    def _evict(self, victims: list[_ShardId]) -> list[Path | None]:
        """Call it with the lock held, and :meth:`_delete` the result, best without."""
        for id in victims:
            self._forget(id)
            self.evicted_shards += 1
            if id.digest in self._entries:
                self._entries[id.digest].evicted_shards += 1
        return [self._move_away(id) for id in victims]

    def _move_away(self, id: _ShardId) -> Path | None:
        """Renames a shard's folder so that nobody opens it any more."""
        if self.folder is None:
            return None
        temporary = self._temporary()
        try:
            os.rename(self._path(id), temporary)
        except FileNotFoundError:  # another process was faster
            return None
        return temporary

    def _delete(self, paths: Sequence[Path | None]) -> None:
        for path in paths:
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)

    def _warn_budget(self, shared: _Shared) -> None:
        self._warn(shared, f"the budget of {self.budget_bytes / 1e9:.3g} GB is used up; raise it to keep all")

    def _warn_disk(self, shared: _Shared, error: OSError) -> None:
        shared.disk_full = True
        self._warn(shared, f"{self.folder}: {error.strerror}")

    def _warn(self, shared: _Shared, reason: str) -> None:
        if not shared.warned:
            shared.warned = True
            _logger.warning(
                "feature store: %s of %s, %.3g GB in all: what is not kept yet is computed again at every use (%s)",
                shared.key.kind,
                shared.key.dataset,
                shared.row_bytes * shared.num_frames / 1e9,
                reason,
            )

    def _count(self, reader: FeatureEntry, served: int) -> None:
        """Counts rows served; after as many as the entry has frames a new pass begins."""
        with self._lock:
            reader.served_rows += served
            self.served_rows += served
            shared = reader.shared
            shared.pass_rows += served
            if shared.pass_rows >= shared.num_frames:
                shared.pass_rows = 0
                shared.previous_pass, shared.pass_start = shared.pass_start, self._clock

    # ---- files -------------------------------------------------------------------------------------------------------

    def _path(self, id: _ShardId) -> Path:
        assert self.folder is not None
        return self.folder / id.digest / f"view{id.view}-shard{id.index:08d}"

    def _temporary(self) -> Path:
        assert self.folder is not None
        return self.folder / f".tmp-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}"

    def _write(self, id: _ShardId, leaves: Leaves) -> None:
        """Writes a shard unless it is there."""
        with self._new_folder(self._path(id)) as temporary:
            # Files with the right names, sizes and metadata. The data goes through write(2): on a full disk that is an
            # error, whereas storing into a mapping would kill the process (SIGBUS).
            empty = _nested(leaves).memmap_like(str(temporary))
            files = {}
            for key, value in leaves.items():
                if value.numel():
                    path = Path(cast(Any, empty[key]).filename)
                    files[str(path.relative_to(temporary))] = value.nbytes
                    _write_file(path, memoryview(value.reshape(-1).view(torch.uint8).numpy()))
            _write_file(temporary / "files.json", json.dumps(files).encode())

    @contextmanager
    def _new_folder(self, target: Path) -> Iterator[Path]:
        """A name for the body to write a folder under; then it is flushed to disk and becomes ``target``.

        If ``target`` is there by then, another process was faster, and what was written is dropped.

        Raises:
            OSError: writing failed; nothing is left behind.
        """
        temporary = self._temporary()
        try:
            yield temporary
            fsync_folder(temporary)
            try:
                rename_folder(temporary, target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


class FeatureEntry:
    """One reader of a :class:`FeatureStore`'s entry; see :meth:`FeatureStore.entry`.

    Attributes:
        computed_rows: rows that this reader has put through ``compute``.
        served_rows: rows that it was given.
    """

    def __init__(self, store: FeatureStore, shared: _Shared, compute: Compute) -> None:
        self.store, self.shared, self.compute = store, shared, compute
        self.digest = shared.key.digest
        self.computed_rows = self.served_rows = 0

    @property
    def bytes(self) -> int:
        """Bytes of the shards kept for this key."""
        return self.shared.bytes

    @property
    def evicted_shards(self) -> int:
        """Shards of this key that made room for others."""
        return self.shared.evicted_shards

    def read(self, rows: Tensor, view: int = 0) -> TensorDict:
        """The batch ``[n]`` of these frames, in their order; missing shards are computed first.

        Args:
            rows: int64 ``[n]``, n >= 1, each in ``0 .. num_frames - 1``; may repeat.
            view: which stored augmentation of the frames, >= 0.

        Returns:
            The columns of ``compute`` on the CPU: ``features`` (:class:`VLAFeature`, float32 values as ``key.dtype``;
            segments padded with masked zeros on the right to the longest of the shards that the rows lie in) and the
            others. Copies that the caller may change.

        Raises:
            ValueError: rows or view out of range, or ``compute`` gave something that cannot be stored.
        """
        shared = self.shared
        if rows.dtype != torch.int64 or rows.ndim != 1 or not len(rows):
            raise ValueError(f"rows: expected int64 [n] with n >= 1, got {rows.dtype} {list(rows.shape)}")
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= shared.num_frames:
            raise ValueError(f"rows {low} to {high}: {shared.key.dataset} has frames 0 to {shared.num_frames - 1}")
        if view < 0:
            raise ValueError(f"view={view}: must be at least 0")
        size = shared.key.shard_rows
        shards = rows // size
        parts: list[tuple[Tensor, Tensor, Leaves]] = []  # positions in the batch, rows of the part, the part
        loose = []
        for index in shards.unique().tolist():
            positions = (shards == index).nonzero().flatten()
            leaves = self.store._shard(self, view, index)
            if leaves is None:
                loose.append(positions)
            else:
                parts.append((positions, rows[positions] - index * size, leaves))
        if loose:
            positions = torch.cat(loose)
            wanted, which = rows[positions].unique(return_inverse=True)
            for number, chunk in enumerate(wanted.split(size)):
                here = which // size == number
                parts.append((positions[here], which[here] - number * size, self.compute_rows(chunk, view)))
        batch = _gather(parts, len(rows))
        self.store._count(self, len(rows))
        return batch

    def warm_up(
        self,
        views: Sequence[int] = (0,),
        stopping: Callable[[], bool] = lambda: False,
        progress: Callable[[int], None] = lambda rows: None,
        begin: float = 0.0,
    ) -> bool:
        """Computes all missing shards in order; ends early (with the store's warning) when no more can be kept.

        Args:
            views: e.g. ``range(2)``.
            stopping: asked before each shard.
            progress: called with the number of rows of each shard that is there.
            begin: where in the frames to begin, in [0, 1); it goes round. Processes with one folder that begin at
                different places do not compute everything twice.

        Returns:
            False when ``stopping`` said so before the end.
        """
        size, num_frames = self.shared.key.shard_rows, self.shared.num_frames
        starts = list(range(0, num_frames, size))
        first = int(begin * len(starts))
        for view in views:
            for start in starts[first:] + starts[:first]:
                if stopping():
                    return False
                if self.store._shard(self, view, start // size) is None:
                    return True
                progress(min(size, num_frames - start))
        return True

    def compute_rows(self, rows: Tensor, view: int) -> Leaves:
        """``compute`` as it is stored: checked, on the CPU, float32 features in the compact dtype."""
        batch = self.compute(rows, view)
        features = batch.get("features", None)
        if batch.batch_size != torch.Size([len(rows)]) or not isinstance(features, VLAFeature):
            raise ValueError(
                f"compute gave {type(features).__name__} features in a batch {list(batch.batch_size)} for {len(rows)} "
                "rows: it must return a TensorDict [n] with features=VLAFeature"
            )
        found: Leaves = {("features", "pooled"): features.pooled}
        for name in features.tokens.keys():
            found["features", "tokens", name] = features.tokens[name]
            found["features", "mask", name] = features.mask[name]
        found.update(_leaves(cast(TensorDict, batch.exclude("features"))))
        dtype = DTYPES[self.shared.key.dtype]
        leaves: Leaves = {}
        for key, value in found.items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"compute gave {'.'.join(key)} of type {type(value).__name__}: only tensors are stored"
                )
            value = value.detach().cpu()
            if key[0] == "features" and value.dtype == torch.float32:
                value = _compact(key, value, dtype)
            leaves[key] = value.contiguous()
        with self.store._lock:
            self.computed_rows += len(rows)
            self.store.computed_rows += len(rows)
        return leaves


def dataset_revision(dataset: Any) -> str:
    """sha256 (hex) of what identifies the data of a ``LeRobotDataset``.

    Name and revision (hub), the selected episodes, the contents of ``meta/info.json``, ``meta/stats.json`` and
    ``meta/tasks*``, and name, size and modification time of the files under ``meta/episodes``, ``data``, ``videos`` and
    ``images``: recording again in place changes it, moving the folder does not.
    """
    root = Path(dataset.root)
    episodes = None if dataset.episodes is None else [int(episode) for episode in dataset.episodes]
    digest = hashlib.sha256(json.dumps([dataset.repo_id, dataset.revision, episodes]).encode())
    for path in sorted(p for p in (root / "meta").glob("*") if p.is_file()):
        if path.name in ("info.json", "stats.json") or path.name.startswith("tasks"):
            digest.update(f"{path.name}:{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    for folder in ("meta/episodes", "data", "videos", "images"):
        for path in sorted(p for p in (root / folder).rglob("*") if p.is_file()):
            stat = path.stat()
            digest.update(f"{path.relative_to(root)}:{stat.st_size}:{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _compact(key: tuple[str, ...], value: Tensor, dtype: torch.dtype) -> Tensor:
    cast_value = value.to(dtype)
    if dtype == torch.float16 and not cast_value.isfinite().all() and value.isfinite().all():
        raise ValueError(
            f"{'.'.join(key)}: {value.abs().max():.4g} does not fit dtype='float16' of the feature store; "
            "choose bfloat16 or float32"
        )
    return cast_value


def _leaves(batch: TensorDict) -> Leaves:
    """Path -> tensor; mapped tensors as plain ones on the same memory."""
    items = batch.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
    return {
        (key,) if isinstance(key, str) else key: value.as_subclass(Tensor) if isinstance(value, Tensor) else value
        for key, value in items
    }


def _nested(leaves: Leaves) -> TensorDict:
    batch = TensorDict({}, [len(next(iter(leaves.values())))])
    for key, value in leaves.items():
        batch[key] = value
    return batch


def _gather(parts: list[tuple[Tensor, Tensor, Leaves]], size: int) -> TensorDict:
    """Rows of several shards as one batch ``[size]``, padded as ``backbone.concatenate_features`` does.

    One ``cat`` per column and then the order: writing each part into its place took twice as long with 40 shards.
    """
    order = torch.empty(size, dtype=torch.int64)
    order[torch.cat([positions for positions, _, _ in parts])] = torch.arange(size)
    first = parts[0][2]
    for _, _, leaves in parts[1:]:
        if leaves.keys() != first.keys():
            raise ValueError(f"shards differ in the columns {sorted(first.keys() ^ leaves.keys())}: compute must agree")
    gathered: Leaves = {}
    for key, example in first.items():
        ragged = key[:2] in _SEGMENTS
        values = [leaves[key].index_select(0, rows) for _, rows, leaves in parts]
        for value in values:
            if value.dtype != example.dtype or value.shape[1 + ragged :] != example.shape[1 + ragged :]:
                raise ValueError(
                    f"{'.'.join(key)}: {value.dtype} {list(value.shape[1:])} in one shard, {example.dtype} "
                    f"{list(example.shape[1:])} in another: compute must agree"
                )
        if ragged:
            longest = max(value.shape[1] for value in values)
            before = (0, 0) * (example.ndim - 2)
            values = [
                v if v.shape[1] == longest else functional.pad(v, (*before, 0, longest - v.shape[1])) for v in values
            ]
        gathered[key] = torch.cat(values).index_select(0, order)
    batch = TensorDict({}, [size])
    batch["features"] = VLAFeature(
        tokens=TensorDict({key[2]: gathered[key] for key in gathered if key[:2] == _TOKENS}, [size]),
        mask=TensorDict({key[2]: gathered[key] for key in gathered if key[:2] == _MASK}, [size]),
        pooled=gathered["features", "pooled"],
        batch_size=[size],
    )
    for key, value in gathered.items():
        if key[0] != "features":
            batch[key] = value
    return batch


# ---- keys and files --------------------------------------------------------------------------------------------------


def _described(key: StoreKey, num_frames: int) -> dict[str, Any]:
    return {"format": FORMAT, **asdict(key), "num_frames": num_frames}


def _check_same(what: str, stored: Any, key: StoreKey, num_frames: int) -> None:
    wanted = _described(key, num_frames)
    stored = stored if isinstance(stored, dict) else {}
    different = [
        f"{name} is {stored.get(name)!r}, not {wanted.get(name)!r}"
        for name in sorted(wanted.keys() | stored.keys())
        if stored.get(name) != wanted.get(name)
    ]
    if different:
        raise ValueError(f"{what} is of another key: {'; '.join(different)}. Remove it, or use another folder")


def _size(shard: Path) -> int:
    """Bytes of a shard's tensors.

    Raises:
        OSError: a file is missing.
        ValueError: a file has another size than when it was written.
    """
    files = json.loads((shard / "files.json").read_bytes())
    for name, size in files.items():
        there = (shard / name).stat().st_size
        if there != size:
            raise ValueError(f"{name} has {there} bytes instead of {size}")
    return sum(files.values())


def _write_file(path: Path, data: bytes | memoryview) -> None:
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.write(data)


def _remove_dead_temporaries(folder: Path) -> None:
    for path in folder.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match is None:
            continue
        try:
            modified = path.stat().st_mtime
        except FileNotFoundError:
            continue
        if match[1] != socket.gethostname():
            dead = time.time() - modified > FOREIGN_TEMPORARY_S
        else:
            try:
                # A process that started after the folder was last written only has the writer's number again. Start
                # times are exact to a second.
                dead = psutil.Process(int(match[2])).create_time() > modified + 2
            except psutil.NoSuchProcess:
                dead = True
        if dead:
            shutil.rmtree(path, ignore_errors=True)
