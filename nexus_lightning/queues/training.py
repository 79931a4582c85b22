"""Data plane of the training queue: TensorDict partitions, one per training job."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, overload

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

#: A column: a name, or the path of a nested one. A path that stops above the leaves names all of them.
Field = str | tuple[str, ...]


class QueueClosed(RuntimeError):
    """The training queue was closed while, or before, a partition was put into it."""


@dataclass(frozen=True)
class BatchMeta:
    """Which rows and columns one consumer was handed. Carries no tensors; cheap to send.

    Attributes:
        partition_id: the partition.
        tenant_id: its owner.
        fields: columns asked for.
        rows: row indices in the partition, ascending.
        task_name: who consumes; each task name has its own progress through the rows.
        delivery: unique number of this hand-out.
    """

    partition_id: str
    tenant_id: str
    fields: tuple[Field, ...]
    rows: tuple[int, ...]
    task_name: str
    delivery: int

    def __len__(self) -> int:
        return len(self.rows)


@dataclass
class _Progress:
    """One task's way through the rows of one partition."""

    waiting: list[int]
    handed_out: dict[int, tuple[int, ...]] = field(default_factory=dict)
    consumed: set[int] = field(default_factory=set)


@dataclass
class _Partition:
    tenant_id: str
    td: TensorDict
    num_bytes: int
    original: frozenset[tuple[str, ...]]
    #: derived column -> [rows] bool, True where written; columns that are not here are whole.
    partial: dict[tuple[str, ...], Tensor] = field(default_factory=dict)
    progress: dict[str, _Progress] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.td.batch_size[0]


class TrainingQueue:
    """Partitions of tensors between producers, preparation stages and the actor. In memory, thread-safe, no copies.

    ::

        producer   put(partition_id, td, tenant_id=..)    rows = samples, columns = fields; bytes charged to the tenant
                      |
        consumer   get_meta(fields, batch_size, partition_id, task_name)  -> BatchMeta   rows handed out in order
                   get_data(meta)                                         -> TensorDict  a view; may be called again
                   put(td, metadata=meta)                                 derived columns for the same rows
                   ack(meta)                                              consumed: never handed out again to this task
                   release(partition_id)                                  consumer died: handed out rows wait again
                      |
        scheduler  clear(partition_id)                    on every terminal outcome of the job; bytes given back

    Bound: bytes per tenant. ``put`` of a partition blocks while the tenant's budget has no room (back-pressure on that
    tenant alone); a partition that could never fit is a ``ValueError``. Derived columns are charged too but never
    block: their writer may be the one who has to make room. Only tensors count, at ``numel * element_size``.
    Consumption is per (partition, task name); nothing is consumed before ``ack``.
    Blocks: ``put`` of a partition. Wakes: ``clear``, ``set_budget`` and ``close``.
    ``close()``: a blocked or later ``put`` of a partition raises :class:`QueueClosed`; everything else still works, so
    that jobs in flight can end.
    Tensors are stored and handed out by reference: producers must not write into them after ``put``, consumers not at
    all. A producer whose job ended while it was blocked in ``put`` clears the partition itself (its next ``mark`` tells
    it).

    Args:
        max_bytes_per_tenant: default budget; None for no bound. :meth:`set_budget` sets another one for a tenant.

    Example:
        >>> queue = TrainingQueue()
        >>> queue.put("job-1", TensorDict({"reward": torch.arange(4.0)}, [4]), tenant_id="libero")
        >>> meta = queue.get_meta(["reward"], batch_size=3, partition_id="job-1", task_name="advantages")
        >>> queue.put(TensorDict({"advantage": queue.get_data(meta)["reward"] - 1}, [3]), metadata=meta)
        >>> queue.ack(meta)
        >>> queue.get_meta(["advantage"], 4, "job-1", "train") is None        # row 3 has no advantage yet
        True
        >>> queue.get_data(queue.get_meta(["advantage"], 3, "job-1", "train"))["advantage"].tolist()
        [-1.0, 0.0, 1.0]
        >>> queue.clear("job-1"), queue.used_bytes("libero")
        (32, 0)
    """

    def __init__(self, max_bytes_per_tenant: int | None = None) -> None:
        self._default_budget = max_bytes_per_tenant
        self._budgets: dict[str, int | None] = {}
        self._partitions: dict[str, _Partition] = {}
        self._used: defaultdict[str, int] = defaultdict(int)
        self._deliveries = count(1)
        self._changed = threading.Condition()
        self._closed = False

    # ---- producers -----------------------------------------------------------------------------------------------

    @overload
    def put(
        self, partition_id: str, td: TensorDictBase, /, *, tenant_id: str, timeout_s: float | None = None
    ) -> None: ...

    @overload
    def put(self, td: TensorDictBase, /, *, metadata: BatchMeta) -> None: ...

    def put(self, first: Any, td: Any = None, /, *, tenant_id: Any = None, metadata: Any = None, timeout_s: Any = None):
        """``put(partition_id, td, tenant_id=...)`` adds a partition; ``put(td, metadata=meta)`` adds derived columns.

        Args:
            first: partition id, or the TensorDict of derived columns.
            td: ``[N, ...]`` TensorDict, N >= 1 rows, any nested or non-tensor columns.
            tenant_id: owner; its budget pays.
            metadata: rows the derived columns belong to, in the same order; columns are new or derived ones.
            timeout_s: longest wait for room; None waits until there is some.

        Raises:
            ValueError: partition exists, exceeds the whole budget, row counts differ, or a column is not derived.
            TimeoutError: no room in time.
            QueueClosed: the queue was closed.
        """
        if metadata is not None:
            self._put_columns(first, metadata)
        elif not isinstance(first, str) or tenant_id is None:
            raise TypeError("put(partition_id, td, tenant_id=...) or put(td, metadata=meta)")
        else:
            self._put_partition(first, td, tenant_id, timeout_s)

    def _put_partition(self, partition_id: str, td: TensorDictBase, tenant_id: str, timeout_s: float | None) -> None:
        what = f"tenant {tenant_id!r}: partition {partition_id!r}"
        if td.ndim < 1 or td.batch_size[0] < 1:
            raise ValueError(f"{what} has batch_size {list(td.batch_size)}: it needs at least one row")
        num_bytes = _num_bytes(td)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._closed:
                    raise QueueClosed(f"{what}: the training queue is closed")
                if partition_id in self._partitions:
                    raise ValueError(f"{what} exists already: clear it first")
                budget = self.budget(tenant_id)
                if budget is None or self._used[tenant_id] + num_bytes <= budget:
                    break
                if num_bytes > budget:
                    raise ValueError(
                        f"{what} has {num_bytes} bytes, more than the tenant's whole budget of {budget}: "
                        "raise the budget or make smaller jobs"
                    )
                remaining_s = None if deadline_s is None else deadline_s - time.monotonic()
                if remaining_s is not None and remaining_s <= 0:
                    raise TimeoutError(
                        f"{what}: no room for {num_bytes} bytes in {timeout_s} s "
                        f"({self._used[tenant_id]} of {budget} used)"
                    )
                self._changed.wait(remaining_s)
            # A shallow copy: columns that the caller adds or replaces later do not show up here.
            stored = td.copy()
            self._partitions[partition_id] = _Partition(tenant_id, stored, num_bytes, frozenset(_leaves(stored)))
            self._used[tenant_id] += num_bytes

    def _put_columns(self, td: TensorDictBase, meta: BatchMeta) -> None:
        with self._changed:
            partition = self._delivered(meta)
            what = f"tenant {meta.tenant_id!r}: partition {meta.partition_id!r}"
            if td.ndim < 1 or td.batch_size[0] != len(meta.rows):
                raise ValueError(
                    f"{what}: derived columns have batch_size {list(td.batch_size)}, {len(meta)} rows are due"
                )
            leaves = _leaves(td)
            fixed = [key for key in leaves if key in partition.original]
            if fixed:
                raise ValueError(
                    f"{what}: {_names(fixed)} came with the partition: write derived columns under new names"
                )
            whole = len(meta.rows) == partition.num_rows
            values = {key: td.get(key) for key in leaves}
            tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
            if not whole and len(tensors) < len(values):
                odd = [key for key in values if key not in tensors]
                raise ValueError(f"{what}: {_names(odd)} are not tensors and can only be added for all rows at once")
            if not whole:
                for key, value in tensors.items():
                    self._check_same_column(partition, key, value)
                values = {key: self._spread(partition, key, value, meta.rows) for key, value in tensors.items()}
            existing = set(_leaves(partition.td))
            for key, value in values.items():
                added = _tensor_bytes(value)
                if key in existing:
                    added -= _tensor_bytes(partition.td.get(key))
                partition.td.set(key, value)
                if whole:
                    partition.partial.pop(key, None)
                partition.num_bytes += added
                self._used[partition.tenant_id] += added

    @staticmethod
    def _check_same_column(partition: _Partition, key: tuple[str, ...], value: Tensor) -> None:
        old = partition.td.get(key, None)
        if old is not None and (old.shape[1:] != value.shape[1:] or old.dtype != value.dtype):
            raise ValueError(
                f"tenant {partition.tenant_id!r}: column {_names([key])} is {old.dtype} {list(old.shape[1:])} per row, "
                f"not {value.dtype} {list(value.shape[1:])}"
            )

    @staticmethod
    def _spread(partition: _Partition, key: tuple[str, ...], value: Tensor, rows: tuple[int, ...]) -> Tensor:
        """The whole column ``[N, ...]`` with ``value`` written at ``rows``; notes which rows are there."""
        old = partition.td.get(key, None)
        if old is None:
            column = value.new_zeros(partition.num_rows, *value.shape[1:])
            partition.partial[key] = torch.zeros(partition.num_rows, dtype=torch.bool)
        else:
            column = old.clone()  # views that were handed out stay as they are
        column[list(rows)] = value
        if key in partition.partial:
            partition.partial[key][list(rows)] = True
            if partition.partial[key].all():
                del partition.partial[key]
        return column

    # ---- consumers -----------------------------------------------------------------------------------------------

    def get_meta(
        self, fields: Sequence[Field], batch_size: int | None, partition_id: str, task_name: str
    ) -> BatchMeta | None:
        """Hands out the next rows of a partition to a task; does not block.

        Args:
            fields: columns the task needs, names or paths.
            batch_size: most rows to hand out (fewer at the end of the partition); None for all.
            partition_id: a partition that is here.
            task_name: e.g. ``advantages`` or ``train``.

        Returns:
            The hand-out, or None when those rows do not have all the fields yet or every row is handed out.

        Raises:
            ValueError: unknown or cleared partition, or no fields.
        """
        if not fields or (batch_size is not None and batch_size < 1):
            raise ValueError(
                f"partition {partition_id!r}: fields={list(fields)}, batch_size={batch_size}: ask for something"
            )
        with self._changed:
            partition = self._partition(partition_id)
            progress = partition.progress.setdefault(task_name, _Progress(list(range(partition.num_rows))))
            rows = tuple(progress.waiting[:batch_size])
            leaves = _leaves(partition.td)
            for path in map(_path, fields):
                columns = [key for key in leaves if key[: len(path)] == path]
                if not columns:
                    return None
                if any(not partition.partial[key][list(rows)].all() for key in columns if key in partition.partial):
                    return None
            if not rows:
                return None
            meta = BatchMeta(partition_id, partition.tenant_id, tuple(fields), rows, task_name, next(self._deliveries))
            del progress.waiting[: len(rows)]
            progress.handed_out[meta.delivery] = rows
            return meta

    def get_data(self, meta: BatchMeta) -> TensorDictBase:
        """The columns ``meta.fields`` of ``meta.rows``, ``[len(meta), ...]``: a view when the rows are contiguous.

        Raises:
            ValueError: the partition was cleared.
        """
        with self._changed:
            selected = self._partition(meta.partition_id).td.select(*map(_path, meta.fields))
        first, last = meta.rows[0], meta.rows[-1]
        if last - first + 1 == len(meta.rows):
            return selected[first : last + 1]
        return selected[list(meta.rows)]

    def ack(self, meta: BatchMeta) -> None:
        """The rows of ``meta`` are consumed by its task.

        Raises:
            ValueError: the partition was cleared, or the rows were acknowledged or released before.
        """
        with self._changed:
            progress = self._delivered(meta).progress[meta.task_name]
            progress.consumed.update(progress.handed_out.pop(meta.delivery))

    def release(self, partition_id: str, task_name: str | None = None) -> int:
        """Rows handed out and not acknowledged wait again, in row order (the consumer died, its lease expired).

        Args:
            partition_id: the partition; nothing happens when it was cleared.
            task_name: only this task's; None for all tasks.

        Returns:
            How many rows.
        """
        with self._changed:
            if partition_id not in self._partitions:
                return 0
            released = 0
            for name, progress in self._partitions[partition_id].progress.items():
                if task_name in (None, name):
                    rows = [row for rows in progress.handed_out.values() for row in rows]
                    progress.waiting = sorted(progress.waiting + rows)
                    progress.handed_out.clear()
                    released += len(rows)
            return released

    def consumed(self, partition_id: str, task_name: str) -> int:
        """Rows that a task has acknowledged."""
        with self._changed:
            progress = self._partition(partition_id).progress.get(task_name)
            return 0 if progress is None else len(progress.consumed)

    def columns(self, partition_id: str) -> list[Field]:
        """Names (or paths) of a partition's columns."""
        with self._changed:
            leaves = _leaves(self._partition(partition_id).td)
        return [key[0] if len(key) == 1 else key for key in leaves]

    # ---- budget and end ------------------------------------------------------------------------------------------

    def clear(self, partition_id: str) -> int:
        """Forgets a partition and gives its bytes back. Returns them; 0 when it is not here (never put, or cleared)."""
        with self._changed:
            partition = self._partitions.pop(partition_id, None)
            if partition is None:
                return 0
            self._used[partition.tenant_id] -= partition.num_bytes
            self._changed.notify_all()
            return partition.num_bytes

    def set_budget(self, tenant_id: str, max_bytes: int | None) -> None:
        """Sets one tenant's byte budget; None for no bound. Partitions that are here stay."""
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"tenant {tenant_id!r}: max_bytes={max_bytes}: must be at least 1, or None for no bound")
        with self._changed:
            self._budgets[tenant_id] = max_bytes
            self._changed.notify_all()

    def budget(self, tenant_id: str) -> int | None:
        """A tenant's byte budget, None for no bound."""
        return self._budgets.get(tenant_id, self._default_budget)

    def used_bytes(self, tenant_id: str | None = None) -> int:
        """Bytes held by one tenant, or by all."""
        with self._changed:
            return sum(self._used.values()) if tenant_id is None else self._used.get(tenant_id, 0)

    def partitions(self, tenant_id: str | None = None) -> list[str]:
        """Ids of the partitions of one tenant, or of all, oldest first."""
        with self._changed:
            return [key for key, value in self._partitions.items() if tenant_id in (None, value.tenant_id)]

    def close(self) -> None:
        """Refuses new partitions and wakes blocked producers. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ---- inside the lock -----------------------------------------------------------------------------------------

    def _partition(self, partition_id: str) -> _Partition:
        if partition_id not in self._partitions:
            raise ValueError(
                f"partition {partition_id!r} is not in the training queue: never put, or cleared when its job ended"
            )
        return self._partitions[partition_id]

    def _delivered(self, meta: BatchMeta) -> _Partition:
        partition = self._partition(meta.partition_id)
        progress = partition.progress.get(meta.task_name)
        if progress is None or meta.delivery not in progress.handed_out:
            raise ValueError(
                f"tenant {meta.tenant_id!r}: delivery {meta.delivery} of partition {meta.partition_id!r} "
                f"to {meta.task_name!r} was acknowledged or released before"
            )
        return partition


def _path(name: Field) -> tuple[str, ...]:
    return (name,) if isinstance(name, str) else tuple(name)


def _leaves(td: TensorDictBase) -> list[tuple[str, ...]]:
    return [_path(key) for key in td.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)]


def _tensor_bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _num_bytes(td: TensorDictBase) -> int:
    return sum(_tensor_bytes(td.get(key)) for key in _leaves(td))


def _names(keys: Sequence[tuple[str, ...]]) -> str:
    return ", ".join(".".join(key) for key in keys)
