"""Every accepted request of every tenant: its order, its one execution, its result.

One table is reorder buffer, idempotency table and result store at once::

    accept(seq) ──► pending ──► running ──► completed | failed | cancelled ──► delivered ──► dropped (after grace_s)
                       │            │
                       │            └ a long one (workload, evaluation) ends later, through its ``on_end``
                       └ waits for the numbers before it; a gap that nobody fills ends at the deadline: `sequence_gap`

- Numbers are per tenant: 1, 2, 3 ... A request starts when all before it have started and every short one of them has
  ended. A workload has "started" once the master has taken it, so an export may follow while it trains.
- The same number with the same content is the same request: executed once, answered with the same future. With other
  content it is a conflict.
- ``accept`` returns after the request is on disk. A restarted server finds it: a workload goes on (the owner of this
  class says how), anything else fails as retryable, because the gradients and queues it needed died with the process.
- A number that was given up (deadline, cancelled) is used; later ones do not wait for it. A number that never came is
  still free: a client that lost count asks for ``next_seq``.
- An end is decided once, committed, and only then forgotten. One that the disk refuses is tried again until it is
  written; meanwhile its request counts as not ended (``queue_state`` "saving_result").
- Reading a result starts its grace time; then the content goes and reading again is "gone". What nobody has read is
  kept, and counts against its owner's bytes.

Waiting costs nothing while nothing happens: all long polls sleep in one registry and an end wakes exactly its own.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import secrets
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from nexus_lightning.services.errors import (
    Conflict,
    DeadlineExceeded,
    FutureCancelled,
    FutureFailed,
    Gone,
    NotFound,
    NotReady,
    QuotaExceeded,
    future_error_to_json,
)
from nexus_lightning.services.store import ENDED, Store

log = logging.getLogger(__name__)

#: A request may run ahead of the next number to execute by so many.
MAX_AHEAD = 10_000
#: How long stopping a long request waits for the master to have taken it.
TAKEN_TIMEOUT_S = 60.0
#: First and longest pause before an end that could not be committed is tried again.
FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 10.0


@dataclass(frozen=True)
class Outcome:
    """What a request gives back: JSON values, and the encoded arrays, if any."""

    meta: dict[str, Any] = field(default_factory=dict)
    data: bytes | None = None


@dataclass
class _End:
    """How a request ends: decided, and on disk once it is committed."""

    status: str
    content: dict[str, Any]  # ``result`` or ``error``
    data: bytes | None = None
    tries: int = 0
    retry_at_s: float = 0.0


@dataclass
class Request:
    """One accepted request that has not ended.

    Attributes:
        run: executes it; returns its outcome, or None when :meth:`Futures.complete` or :meth:`Futures.fail` will be
            called later (only with ``long``).
        long: ends later: the next number does not wait for its end.
        cancel: stops a running long one; None: its result is thrown away instead.
        gap_by_s: of the Unix epoch: it fails when it waits for a missing number then.
        deadline_s: the same when it has not ended by then; None: it may take as long as it takes.
        body_bytes: that it holds in memory until its end.
    """

    future_id: str
    tenant_id: str
    seq: int
    verb: str
    run: Callable[[Request], Outcome | None]
    long: bool = False
    cancel: Callable[[], None] | None = None
    gap_by_s: float | None = None
    deadline_s: float | None = None
    workload_id: str | None = None
    body_bytes: int = 0
    status: str = "pending"
    since_s: float = field(default_factory=time.monotonic)
    taken: threading.Event = field(default_factory=threading.Event)  # ``run`` has returned
    end: _End | None = None  # not committed yet


class _Log:
    """One tenant's numbers: ``next`` starts next; ``ahead`` are those accepted beyond it (ended ones: None)."""

    def __init__(self, owner_id: str) -> None:
        self.owner_id = owner_id
        self.next = 1
        self.ahead: dict[int, Request | None] = {}
        self.draining = False

    def free(self) -> int:
        seq = self.next
        while seq in self.ahead:
            seq += 1
        return seq


class Futures:
    """See the module docstring. Thread-safe.

    Args:
        store: keeps requests and results; the tables of tenants and owners are written by others.
        max_in_flight: requests of one owner that have not ended.
        max_result_bytes: of one owner's results that have not been dropped, and of its requests that wait.
        grace_s: how long a delivered result can be read again.
        threads: requests executed at the same time, of all tenants (each tenant's are one after the other).
        clock: seconds of the Unix epoch.
    """

    def __init__(
        self,
        store: Store,
        *,
        max_in_flight: int,
        max_result_bytes: int,
        grace_s: float,
        threads: int = 64,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._clock = store, clock
        self.max_in_flight, self.max_result_bytes, self.grace_s = max_in_flight, max_result_bytes, grace_s
        self._lock = threading.RLock()
        self._logs: dict[str, _Log] = {}
        self._live: dict[str, Request] = {}
        self._unsaved: dict[str, Request] = {}  # those whose end could not be committed
        self._in_flight: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._waiters: dict[str, list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._wake = threading.Condition(self._lock)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="requests")
        self._closed = False
        #: Called at every end: the request, how it ended, seconds since it was accepted.
        self.on_end: Callable[[Request, str, float], None] = lambda request, status, seconds: None
        self._keeper = threading.Thread(target=self._keep_time, name="deadlines", daemon=True)
        self._keeper.start()

    # ------------------------------------------------------------------------------------------------------- tenants

    def open_tenant(self, tenant_id: str, owner_id: str) -> list[dict[str, Any]]:
        """Take a tenant in, new or from the store.

        Returns:
            Its requests that had not ended, oldest first; pass each to :meth:`recover`, or it stays as it is.
        """
        rows = self._store.requests(tenant_id)
        with self._lock:
            log_ = self._logs[tenant_id] = _Log(owner_id)
            log_.ahead = {row["seq"]: None for row in rows}
            # running ones have been started, so the next number is behind them
            pending = {row["seq"] for row in rows if row["status"] == "pending"}
            while log_.next in log_.ahead and log_.next not in pending:
                del log_.ahead[log_.next]
                log_.next += 1
            self._bytes[owner_id] += sum(row["data_bytes"] for row in rows)
        return [row for row in rows if row["status"] not in ENDED]

    def recover(self, request: Request | None, row: dict[str, Any], why: str) -> None:
        """One row of :meth:`open_tenant`: run ``request`` for it, or end it as retryable with the reason ``why``."""
        tenant_id, future_id = row["tenant_id"], row["future_id"]
        with self._lock:
            log_ = self._logs[tenant_id]
            live = request or Request(future_id, tenant_id, row["seq"], row["verb"], lambda _: None)
            live.status = row["status"]
            self._live[future_id] = live
            self._in_flight[log_.owner_id] += 1
            if request is None:
                error = FutureFailed(why, category="server", reason="server_restarted", retryable=True)
                self._end(live, _End("failed", {"error": future_error_to_json(error)}))
                return
            self._watch(live)
            if live.status == "pending":
                log_.ahead[live.seq] = live
                self._drain_soon(tenant_id, log_)
        if live.status == "running":
            self._pool.submit(self._execute, live, started=True)

    def close_tenant(self, tenant_id: str) -> None:
        """Ends what is left of a deleted tenant and forgets it."""
        with self._lock:
            log_ = self._logs.get(tenant_id)
            if log_ is None:
                return
            rows = self._store.requests(tenant_id)
            live = {r.future_id: r for r in self._live.values() if r.tenant_id == tenant_id}
            for request in live.values():  # their rows go with the tenant
                self._forget(request, "cancelled", stored=False)
            del self._logs[tenant_id]
            self._bytes[log_.owner_id] -= sum(row["data_bytes"] for row in rows if row["future_id"] not in live)

    def next_seq(self, tenant_id: str) -> int:
        """The lowest number that is not used."""
        with self._lock:
            return self._logs[tenant_id].free()

    def in_flight(self, owner_id: str) -> int:
        return self._in_flight[owner_id]

    @property
    def unsaved(self) -> int:
        """Ends that the disk has refused so far."""
        return len(self._unsaved)

    # ------------------------------------------------------------------------------------------------------- requests

    def accept(
        self,
        tenant_id: str,
        seq: int | None,
        verb: str,
        digest: str,
        run: Callable[[Request], Outcome | None],
        *,
        long: bool = False,
        cancel: Callable[[], None] | None = None,
        gap_by_s: float | None = None,
        deadline_s: float | None = None,
        workload: tuple[str, dict[str, Any]] | None = None,
        body_bytes: int = 0,
    ) -> dict[str, Any]:
        """Take a request, or find the one that this is a repetition of.

        Args:
            seq: None takes the lowest free number.
            long, cancel, gap_by_s, deadline_s, body_bytes: see :class:`Request`.
            digest: of everything that makes two requests the same.
            workload: id and spec of the workload it submits.

        Returns:
            ``future_id``, ``tenant_id``, ``seq``, ``status``, ``workload_id``.

        Raises:
            Conflict: the number is used with other content.
            QuotaExceeded: the owner's allowance is used up.
            NotReady: the server stops.
        """
        with self._lock:
            log_ = self._logs.get(tenant_id)
            if self._closed or log_ is None:
                raise NotReady("the server is stopping")
            if seq is None:
                seq = log_.free()
            elif seq < log_.next or seq in log_.ahead:
                return self._repeated(tenant_id, seq, verb, digest)
            if seq >= log_.next + MAX_AHEAD:
                raise Conflict(f"Nexus-Seq: {seq} is {seq - log_.next} ahead of {log_.next}, the next to be executed")
            self._check_quota(log_.owner_id)
            future_id, workload_id = "f" + secrets.token_hex(16), workload and workload[0]
            request = Request(
                future_id, tenant_id, seq, verb, run, long, cancel, gap_by_s, deadline_s, workload_id, body_bytes
            )
            self._store.accept(future_id, tenant_id, seq, verb, digest, deadline_s, workload)
            log_.ahead[seq] = self._live[future_id] = request
            self._in_flight[log_.owner_id] += 1
            self._bytes[log_.owner_id] += body_bytes
            self._watch(request)
            self._drain_soon(tenant_id, log_)
            return _ticket(future_id, tenant_id, seq, request.status, workload_id)

    def _repeated(self, tenant_id: str, seq: int, verb: str, digest: str) -> dict[str, Any]:
        row = self._store.request_at(tenant_id, seq)
        assert row is not None
        if (row["verb"], row["digest"]) != (verb, digest):
            raise Conflict(
                f"Nexus-Seq: {seq} was used for a {row['verb']} with other content; the next free number is "
                f"{self.next_seq(tenant_id)}"
            )
        live = self._live.get(row["future_id"])
        return _ticket(row["future_id"], tenant_id, seq, live.status if live else row["status"], row["workload_id"])

    def _check_quota(self, owner_id: str) -> None:
        if self._in_flight[owner_id] >= self.max_in_flight:
            raise QuotaExceeded(
                f"{self.max_in_flight} requests of this account have not ended: wait for some", retryable=True
            )
        if self._bytes[owner_id] > self.max_result_bytes:
            raise QuotaExceeded(
                f"waiting requests and results of this account take {self._bytes[owner_id]} bytes, allowed are "
                f"{self.max_result_bytes}: read results, and they go after their grace time",
                retryable=True,
            )

    def _drain_soon(self, tenant_id: str, log_: _Log) -> None:
        if not log_.draining and log_.next in log_.ahead and not self._closed:
            log_.draining = True
            self._pool.submit(self._drain, tenant_id, log_)

    def _drain(self, tenant_id: str, log_: _Log) -> None:
        """Executes a tenant's requests as long as the next number is there."""
        while True:
            with self._lock:
                if self._closed or log_.next not in log_.ahead or self._logs.get(tenant_id) is not log_:
                    log_.draining = False
                    return
                request = log_.ahead.pop(log_.next)
                log_.next += 1
                if request is None or request.status != "pending" or request.end is not None:
                    continue
                request.status = "running"
            self._execute(request)

    def _execute(self, request: Request, started: bool = False) -> None:
        """``started``: the store knows that it runs."""
        try:
            if request.long and not started:
                self._store.start(request.future_id)
            outcome = request.run(request)
            request.taken.set()
            if not request.long:
                assert outcome is not None
                self.complete(request.future_id, outcome)
        except Exception as error:  # a request never takes its tenant's log down, let alone the server
            self.fail(request.future_id, error)

    # ----------------------------------------------------------------------------------------------------------- ends

    def complete(self, future_id: str, outcome: Outcome) -> None:
        """The result of a request; ignored when it has ended before (cancelled, deadline)."""
        request = self._live.get(future_id)
        if request is not None:
            self._end(request, _End("completed", {"result": outcome.meta}, outcome.data))

    def fail(self, future_id: str, error: BaseException | dict[str, Any]) -> None:
        """Ends a request with an exception or with its JSON form; ignored when it has ended before."""
        request = self._live.get(future_id)
        if request is None:
            return
        if isinstance(error, BaseException):
            body = future_error_to_json(error)
            if body["type"] == "internal_error":
                log.exception("%s of tenant %s (future %s)", request.verb, request.tenant_id, future_id, exc_info=error)
        else:
            body = error
        cancelled = isinstance(error, FutureCancelled) or body["type"] == "cancelled"
        self._end(request, _End("cancelled" if cancelled else "failed", {"error": body}))

    def _end(self, request: Request, end: _End) -> None:
        """Whoever comes first decides how a request ends."""
        with self._lock:
            if request.future_id not in self._live or request.end is not None:
                return
            request.end = end
            self._bytes[self._logs[request.tenant_id].owner_id] += len(end.data or b"")
            request.taken.set()
        self._commit(request, end)

    def _commit(self, request: Request, end: _End) -> None:
        """Write the end, then forget the request; what the disk refuses is tried again by the keeper of the time."""
        try:
            if end.data is not None:
                self._store.write_result(request.future_id, end.data)
            self._store.end(request.future_id, end.status, data_bytes=len(end.data or b""), **end.content)
        except (OSError, sqlite3.Error) as error:
            if end.tries == 0:
                text = "%s of tenant %s (future %s) has %s, and this cannot be written: %s; tried again until it is"
                log.error(text, request.verb, request.tenant_id, request.future_id, end.status, error)
            end.retry_at_s = self._clock() + min(FIRST_RETRY_S * 2**end.tries, LONGEST_RETRY_S)
            end.tries += 1
            with self._wake:
                if request.future_id in self._live:
                    self._unsaved[request.future_id] = request
                    self._wake.notify()
            return
        if end.tries:
            log.warning("future %s: its end is written after %d failures", request.future_id, end.tries)
        if not self._forget(request, end.status) and end.data is not None:  # its tenant was deleted meanwhile
            self._store.remove_result(request.future_id)

    def _forget(self, request: Request, status: str, stored: bool = True) -> bool:
        """The end of a request for everybody who waits; False when it has been forgotten before."""
        with self._lock:
            if self._live.pop(request.future_id, None) is None:
                return False
            self._unsaved.pop(request.future_id, None)
            request.status = status
            owner_id = self._logs[request.tenant_id].owner_id
            self._in_flight[owner_id] -= 1
            self._bytes[owner_id] -= request.body_bytes
            if not stored and request.end is not None:
                self._bytes[owner_id] -= len(request.end.data or b"")
            request.taken.set()
            for loop, event in self._waiters.pop(request.future_id, []):
                _set_soon(loop, event)
        self.on_end(request, status, time.monotonic() - request.since_s)
        return True

    def cancel(self, owner_id: str, future_id: str, by: str = "its owner") -> dict[str, Any]:
        """End a request that has not started, or stop a long one; one that has ended stays as it is.

        Raises:
            Conflict: it is being executed and cannot be taken back.
        """
        with self._lock:
            shown = self.show(owner_id, future_id)
            request = self._live.get(future_id)
            if request is None or request.end is not None:
                return shown
            if request.status == "pending" or (request.long and request.cancel is None):
                self._end(request, _End("cancelled", {"error": future_error_to_json(_cancelled(f"cancelled by {by}"))}))
                return self.show(owner_id, future_id)
            if not request.long:
                raise Conflict(f"future {future_id}: {request.verb} is being executed and cannot be taken back")
            self._stop_long(request)
        return self.show(owner_id, future_id)

    def _stop_long(self, request: Request) -> None:
        """The master's own end follows through its ``on_end``."""
        assert request.cancel is not None
        self.wait_taken(request.future_id)
        try:
            request.cancel()
        except Conflict:  # it has just ended
            pass

    def wait_taken(self, future_id: str) -> None:
        """Until the master has taken a running request, or it has ended."""
        request = self._live.get(future_id)
        if request is not None:
            request.taken.wait(TAKEN_TIMEOUT_S)

    def _watch(self, request: Request) -> None:
        for due_s in (request.gap_by_s, request.deadline_s):
            if due_s is not None:
                heapq.heappush(self._deadlines, (due_s, request.future_id))
        self._wake.notify()

    def _keep_time(self) -> None:
        """Ends what is late and drops what was delivered; sleeps until the next of them is due."""
        next_drop = self._clock()
        while True:
            late: list[Request] = []
            with self._wake:
                if self._closed:
                    return
                now = self._clock()
                while self._deadlines and self._deadlines[0][0] <= now:
                    request = self._live.get(heapq.heappop(self._deadlines)[1])
                    if request is not None:
                        late.append(request)
                unsaved = [(request, end) for request in self._unsaved.values() if (end := request.end) is not None]
                again = [(request, end) for request, end in unsaved if end.retry_at_s <= now]
                if not late and not again and now < next_drop:
                    retries = (end.retry_at_s for _, end in unsaved)
                    due = min([next_drop, *retries, *(deadline for deadline, _ in self._deadlines[:1])])
                    self._wake.wait(min(max(due - now, 0.01), 60.0))
                    continue
            for request in late:
                self._guarded(self._expire, request)
            for request, end in again:
                self._commit(request, end)
            if now >= next_drop:
                next_drop = now + min(max(self.grace_s / 4, 0.05), 30.0)
                self._guarded(self._drop, now)

    def _guarded(self, action: Callable[[Any], None], value: Any) -> None:
        try:
            action(value)
        except Exception:  # for example a full disk: the others are still worked off
            log.exception("deadlines and deliveries")

    def _expire(self, request: Request) -> None:
        with self._lock:
            log_ = self._logs.get(request.tenant_id)
            if log_ is None or request.future_id not in self._live or request.end is not None:
                return
            missing = next((seq for seq in range(log_.next, request.seq) if seq not in log_.ahead), None)
            over = request.deadline_s is not None and request.deadline_s <= self._clock()
            running = request.status == "running"
            if not running and missing is not None:
                text = f"Nexus-Seq: {request.seq} waited for {missing}, which did not come in time"
                error = DeadlineExceeded(text, category="user", reason="sequence_gap", retryable=True)
            elif not over:
                return  # the gap was filled in time
            elif not running:
                text = f"{request.verb} did not start in time"
                error = DeadlineExceeded(text, category="server", reason="deadline_exceeded", retryable=True)
            else:
                text = f"{request.verb} did not end in time; what it did so far stays"
                error = DeadlineExceeded(text, category="unknown", reason="deadline_exceeded")
            self._end(request, _End("failed", {"error": future_error_to_json(error)}))
        if running and request.cancel is not None:
            self._stop_long(request)

    def _drop(self, now: float) -> None:
        for row in self._store.drop_delivered(now - self.grace_s):
            with self._lock:
                log_ = self._logs.get(row["tenant_id"])
                if log_ is not None:
                    self._bytes[log_.owner_id] -= row["data_bytes"]

    # -------------------------------------------------------------------------------------------------------- reading

    def show(self, owner_id: str, future_id: str) -> dict[str, Any]:
        """A future as its owner sees it; does not count as read.

        Returns:
            ``future_id``, ``tenant_id``, ``seq``, ``verb``, ``status``, ``queue_state``, ``workload_id``; ended:
            ``result`` or ``error``, ``data_bytes``.

        Raises:
            NotFound: unknown, or another owner's.
            Gone: delivered, and its grace time is over.
        """
        with self._lock:
            row = self._store.request(future_id)
            log_ = self._logs.get(row["tenant_id"]) if row else None
            if row is None or log_ is None or log_.owner_id != owner_id:
                raise NotFound(f"future {future_id}: unknown")
            if row["dropped"]:
                raise Gone(f"future {future_id}: its result was delivered and dropped {self.grace_s:g} s later")
            live = self._live.get(future_id)
            shown = {key: row[key] for key in ("future_id", "tenant_id", "seq", "verb", "status", "workload_id")}
            shown |= {"queue_state": "ended", "result": row["result"], "error": row["error"]}
            shown["data_bytes"] = row["data_bytes"]
            if live is not None and row["status"] not in ENDED:
                shown["status"] = live.status
                gap = next((seq for seq in range(log_.next, live.seq) if seq not in log_.ahead), None)
                waits = "queued" if gap is None else f"waiting_for_seq_{gap}"
                shown["queue_state"] = "active" if live.status == "running" else waits
                if live.end is not None:
                    shown["queue_state"] = "saving_result"
            return shown

    async def wait(self, owner_id: str, future_ids: Iterable[str], timeout_s: float) -> list[dict[str, Any]]:
        """The futures as soon as one of them has ended, or after ``timeout_s``; what has ended counts as read.

        Only statuses and JSON results: a result with arrays counts as read once :meth:`read_data` gave them.
        """
        future_ids = list(dict.fromkeys(future_ids))
        shown = await asyncio.to_thread(lambda: [self.show(owner_id, future_id) for future_id in future_ids])
        if timeout_s > 0 and not any(one["status"] in ENDED for one in shown):
            await self.until_ended(future_ids, timeout_s)
            shown = await asyncio.to_thread(lambda: [self.show(owner_id, future_id) for future_id in future_ids])
        read = [one["future_id"] for one in shown if one["status"] in ENDED and not one["data_bytes"]]
        if read:
            await asyncio.to_thread(self._deliver, read)
        return shown

    def _deliver(self, future_ids: list[str]) -> None:
        """Start the grace time of what is read now. On a full disk it starts when they are read again: what can be
        answered is answered."""
        try:
            self._store.deliver(future_ids, self._clock())
        except sqlite3.OperationalError:  # the store has said so
            pass

    async def until_ended(self, future_ids: Iterable[str], timeout_s: float) -> None:
        """Sleeps until one of them has ended or the time is over."""
        entry = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            live = [future_id for future_id in future_ids if future_id in self._live]
            if not live or len(live) < len(list(future_ids)):
                return
            for future_id in live:
                self._waiters.setdefault(future_id, []).append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                await entry[1].wait()
        except TimeoutError:
            pass
        finally:
            with self._lock:
                for future_id in live:
                    entries = self._waiters.get(future_id)
                    if entries is not None:
                        entries.remove(entry)
                        if not entries:
                            del self._waiters[future_id]

    def read_data(self, owner_id: str, future_id: str) -> bytes:
        """The encoded arrays of a completed future; counts as read.

        Raises:
            NotFound, Gone: as :meth:`show`.
            Conflict: it has not completed, or has no arrays.
        """
        shown = self.show(owner_id, future_id)
        if shown["status"] != "completed" or not shown["data_bytes"]:
            raise Conflict(f"future {future_id}: status {shown['status']}, {shown['data_bytes']} bytes of arrays")
        try:
            data = self._store.result_path(future_id).read_bytes()
        except FileNotFoundError:
            raise Gone(f"future {future_id}: its result was delivered and dropped") from None
        self._deliver([future_id])
        return data

    # ---------------------------------------------------------------------------------------------------------- close

    def stop(self) -> None:
        """Accept and start nothing more, end nothing that a restart can go on with, wake every waiter."""
        with self._lock:
            self._closed = True
            self._wake.notify()
            waiters = [entry for entries in self._waiters.values() for entry in entries]
        for loop, event in waiters:
            _set_soon(loop, event)

    def close(self) -> None:
        """After :meth:`stop` and once the master has stopped: waits for the requests being executed."""
        self.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._keeper.join()
        for request in list(self._unsaved.values()):
            assert request.end is not None
            self._commit(request, request.end)
        if self._unsaved:
            log.error("ends that could not be written, and are lost: futures %s", ", ".join(self._unsaved))


def _ticket(future_id: str, tenant_id: str, seq: int, status: str, workload_id: str | None) -> dict[str, Any]:
    return {
        "future_id": future_id,
        "tenant_id": tenant_id,
        "seq": seq,
        "status": status,
        "workload_id": workload_id,
    }


def _cancelled(why: str) -> FutureCancelled:
    return FutureCancelled(why, category="user", reason="cancelled")


def _set_soon(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    if not loop.is_closed():  # a waiter whose loop ended with the server
        loop.call_soon_threadsafe(event.set)
