"""The server without HTTP: who may do what, in which order, and what a restart brings back.

::

    app.py (routes) ─► Service ─► Accounts, Futures, Store          what must survive
                               └► Master (services/master.py)       what trains, on the run's own Runtime and module

Every method is blocking and thread-safe; routes call them in worker threads. An id that is not the caller's raises
exactly what an unknown one raises.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nexus_lightning.services.auth import Account, Accounts, require_operator
from nexus_lightning.services.codec import MSGPACK, Message, encode
from nexus_lightning.services.errors import (
    Conflict,
    Forbidden,
    FutureCancelled,
    FutureFailed,
    InvalidRequest,
    NotFound,
    NotReady,
    QuotaExceeded,
    SessionLost,
    future_error_to_json,
    storage_error,
)
from nexus_lightning.services.futures import Futures, Outcome, Request
from nexus_lightning.services.store import ENDED, Store

if TYPE_CHECKING:
    from nexus_lightning.services.master import Master
    from nexus_lightning.services.spec import LimitsConfig

log = logging.getLogger(__name__)

Arrays = Mapping[str, np.ndarray]
#: Open streams of metrics of one owner.
MAX_STREAMS = 8
#: How old the last answer of the training loop may be, and how long a readiness probe waits for a new one.
READY_S, PROBE_WAIT_S = 120.0, 5.0


@dataclass
class _Session:
    """An environment session as its owner's: the master holds it under ``scope``, a tenant or the owner; None: closed,
    or lost in a restart."""

    owner_id: str
    scope: str | None = None
    lease_s: float = 0.0
    used_s: float = field(default_factory=time.monotonic)

    @property
    def open(self) -> bool:
        return self.scope is not None and time.monotonic() - self.used_s < self.lease_s


class Service:
    """Glue of accounts, futures, store and master; see the module docstring.

    Args:
        master: trains; its loop is run by somebody else.
        store: of the folder ``<run>/services``, opened before the master was made; closed by :meth:`close`.
        limits: per owner.
    """

    def __init__(self, master: Master, store: Store, limits: LimitsConfig) -> None:
        self.master, self.store, self.limits = master, store, limits
        self.accounts = Accounts(self.store, limits.requests_per_s)
        self.futures = Futures(
            self.store,
            max_in_flight=limits.max_in_flight,
            max_result_bytes=int(limits.max_result_mb * 2**20),
            grace_s=limits.future_grace_s,
        )
        self.started = self.stopping = False
        self.started_s = time.time()
        self._lock = threading.RLock()
        self._tenants: dict[str, dict[str, Any]] = {}
        self._deleting: set[str] = set()
        self._owner_names: dict[str, str] = {}
        self._stopped_by: dict[str, str] = {}  # future of a workload -> the operator who has cancelled it
        self._creating: Counter[str] = Counter()
        self._create_locks: dict[str, threading.Lock] = {}
        self._direct: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()
        self._sessions = {row["session_id"]: _Session(row["owner_id"]) for row in self.store.sessions()}
        #: Called with the id of a deleted tenant.
        self.on_delete: Callable[[str], None] = lambda tenant_id: None
        self._prober = ThreadPoolExecutor(1, thread_name_prefix="readiness")
        self._probe: Future[None] | None = None
        self._probed_s = -math.inf  # when the last probe came back well
        self._asked_s = -math.inf

    # ---------------------------------------------------------------------------------------------- start, stop, health

    def start(self) -> None:
        """Bring tenants and requests back; the master must be ready. Until it returns every call is "not ready"."""
        for row in self.store.tenants():
            if row["state"] == "creating":  # killed in the middle: nobody was told its id
                with suppress(sqlite3.OperationalError):  # a full disk; the next start tries again
                    self.store.drop_tenant(row["tenant_id"])
            elif row["state"] == "deleting":
                self._delete_rest(row)
            else:
                self._restore(row)
        self.started = True

    def _delete_rest(self, row: dict[str, Any]) -> None:
        """Of a tenant whose deletion was cut off: its payloads may still be there, and the master knows where."""
        try:
            self.master.restore_tenant(row["tenant_id"], row["spec"])
            self.master.delete_tenant(row["tenant_id"])
            self.store.drop_tenant(row["tenant_id"])
        except Exception:  # the next start tries again; nobody sees it meanwhile
            log.exception("deleting tenant %s", row["tenant_id"])

    def _restore(self, row: dict[str, Any]) -> None:
        tenant_id, lost = row["tenant_id"], None
        try:
            restored = {**self.master.restore_tenant(tenant_id, row["spec"]), "at_s": time.time()}
        except Exception as error:  # this tenant is lost, the others are not
            log.exception("restoring tenant %s", tenant_id)
            lost = future_error_to_json(error)
            restored = {"error": lost, "at_s": time.time()}
        state = "active" if lost is None else "lost"
        with suppress(sqlite3.OperationalError):  # a full disk: what it says is of this start alone
            self.store.set_tenant(tenant_id, state, restored)
        self._tenants[tenant_id] = {**row, "state": state, "restored": restored}
        paused = self.store.paused()
        specs = {w["workload_id"]: w["spec"] for w in self.store.workloads(tenant_id)} if lost is None else {}
        for pending in self.futures.open_tenant(tenant_id, row["owner_id"]):
            pending["tenant_id"] = tenant_id
            request = None
            if pending["workload_id"] in specs:
                request = Request(
                    pending["future_id"],
                    tenant_id,
                    pending["seq"],
                    pending["verb"],
                    self._run_workload(
                        specs[pending["workload_id"]],
                        resume=pending["status"] == "running",
                        paused=pending["workload_id"] in paused,
                    ),
                    long=True,
                    cancel=lambda: self.master.cancel(tenant_id),
                    gap_by_s=time.time() + self.limits.sequence_gap_s,
                    deadline_s=pending["deadline_s"],
                    workload_id=pending["workload_id"],
                )
            at = "not at all" if lost else f"at policy version {restored['policy_version']}"
            why = f"the server restarted before {pending['verb']} ended; the tenant came back {at}"
            self.futures.recover(request, pending, why)

    def stop(self) -> None:
        """Nothing new is accepted; running workloads stay as they are, for the next start to go on with."""
        self.stopping = True
        self.futures.stop()

    def close(self) -> None:
        """Once the master has stopped."""
        self.stop()
        self.futures.close()
        self._prober.shutdown(wait=True, cancel_futures=True)
        self.store.close()

    def check_open(self) -> None:
        """Raises :class:`NotReady` while starting and stopping."""
        if self.stopping:
            raise NotReady("the server is stopping", retry_after_s=5.0)
        if not self.started or not self.master.ready:
            raise NotReady("the server is starting", retry_after_s=1.0)

    def check_ready(self) -> None:
        """The real way of a request: once through the actor's loop and into the store.

        A long job delays the loop, so an answer may be up to :data:`READY_S` old; and at most one probe a second is
        made, because anybody may ask.

        Raises:
            NotReady: with the reason.
        """
        self.check_open()
        with self._lock:
            probe = self._probe
            if probe is None or (probe.done() and time.monotonic() - self._asked_s > 1.0):
                self._asked_s = time.monotonic()
                probe = self._probe = self._prober.submit(self._round_trip)
        if wait([probe], PROBE_WAIT_S).not_done:
            if time.monotonic() - self._probed_s > READY_S:
                raise NotReady("the training loop does not answer", retry_after_s=5.0)
        elif (error := probe.exception()) is not None and storage_error(error) is None:
            raise NotReady(f"not ready: {type(error).__name__}", retry_after_s=5.0) from error
        if alarms := self.alarms():  # without names: anybody may ask
            text = f"{len(alarms)} writes to the disk fail; the operator's overview says which"
            raise NotReady(text, retry_after_s=5.0)

    def alarms(self) -> list[str]:
        """Writes to the disk that fail now, a line each; they are tried again."""
        found = self.master.alarms()
        if self.store.problem is not None:
            found.append(f"{self.store.path.name}: {self.store.problem}")
        if self.futures.unsaved:
            found.append(f"ends of {self.futures.unsaved} requests")
        return found

    def _round_trip(self) -> None:
        self.master.ping(timeout_s=READY_S)
        self._probed_s = time.monotonic()
        self.store.check()

    # ---------------------------------------------------------------------------------------------------------- tenants

    def _owned(self, account: Account, tenant_id: str, operator: bool = False) -> dict[str, Any]:
        """``operator``: one may do this with any account's tenant."""
        row = self._tenants.get(tenant_id)
        if row is None or row["state"] == "deleting" or not self._may_see(account, row):
            raise NotFound(f"tenant {tenant_id}: unknown")
        if row["owner_id"] != account.owner_id and not operator:
            raise Forbidden(
                f"tenant {tenant_id}: another account's: an operator looks at it, stops its workloads and deletes it"
            )
        return row

    def _may_see(self, account: Account, row: dict[str, Any]) -> bool:
        return account.operator or row["owner_id"] == account.owner_id

    def _active(self, account: Account, tenant_id: str, operator: bool = False) -> dict[str, Any]:
        row = self._owned(account, tenant_id, operator)
        if row["state"] != "active":
            raise Conflict(f"tenant {tenant_id}: state {row['state']}: delete it and create it again")
        return row

    def create_tenant(self, account: Account, spec: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        """A new tenant, or the one that was made by the same call before.

        Returns:
            Whether it is new, and its description.

        Raises:
            Conflict: the owner has one of this name with another spec.
            QuotaExceeded, InvalidRequest.
        """
        self.check_open()
        name = spec["name"]
        with self._lock:
            lock = self._create_locks.setdefault(account.owner_id, threading.Lock())
        with lock:  # of this owner alone: building a head takes seconds
            mine = [row for row in self._tenants.values() if row["owner_id"] == account.owner_id]
            for row in mine:
                if row["name"] == name:
                    if row["state"] == "deleting":
                        raise Conflict(f"tenant {name!r}: its deletion was cut off: delete {row['tenant_id']} again")
                    if row["spec"] != spec:
                        raise Conflict(f"tenant {name!r} exists with another spec: delete it or choose another name")
                    return False, self.describe(account, row["tenant_id"])
            if len(mine) >= self.limits.max_tenants_per_owner:
                raise QuotaExceeded(f"this account has {len(mine)} tenants, which is its limit: delete one")
            for row in self.store.tenants():  # of an earlier call whose row could not be dropped again
                if (row["owner_id"], row["name"], row["state"]) == (account.owner_id, name, "creating"):
                    self.store.drop_tenant(row["tenant_id"])
            tenant_id = "t" + secrets.token_hex(16)
            self.store.add_tenant(tenant_id, account.owner_id, name, spec)
            try:
                self.master.create_tenant(tenant_id, spec)
                try:
                    self.store.set_tenant(tenant_id, "active")
                except BaseException:
                    self.master.delete_tenant(tenant_id)
                    raise
            except BaseException:
                with suppress(sqlite3.OperationalError):  # what has failed is raised
                    self.store.drop_tenant(tenant_id)
                raise
            self.futures.open_tenant(tenant_id, account.owner_id)
            self._tenants[tenant_id] = next(r for r in self.store.tenants() if r["tenant_id"] == tenant_id)
        self._audit(account, "create_tenant", tenant_id, "ok")
        return True, self.describe(account, tenant_id)

    def list_tenants(self, account: Account) -> list[dict[str, Any]]:
        """The caller's own; all of them for an operator."""
        rows = [row for row in list(self._tenants.values()) if self._may_see(account, row)]
        found = []
        for row in rows:
            with suppress(NotFound):  # it has just left
                found.append(self.describe(account, row["tenant_id"]))
        return found

    def describe(self, account: Account, tenant_id: str) -> dict[str, Any]:
        """``owner`` (a name) is there for operators."""
        row = self._owned(account, tenant_id, operator=True)
        found = self.master.describe(tenant_id) if row["state"] == "active" else {"state": row["state"]}
        known = {key: row[key] for key in ("tenant_id", "name", "spec", "created_s", "restored")}
        if account.operator:
            known["owner"] = self._owner(row)
        return {**found, **known, "next_seq": self.futures.next_seq(tenant_id)}

    def _owner(self, row: dict[str, Any]) -> str:
        """The name of a tenant's owner; names do not change."""
        if row["owner_id"] not in self._owner_names:
            self._owner_names = {owner["owner_id"]: owner["name"] for owner in self.store.owners()}
        return self._owner_names[row["owner_id"]]

    def delete_tenant(self, account: Account, tenant_id: str) -> None:
        """By its owner or an operator. Nobody sees it any more; a deletion that a full disk cuts off goes on with the
        next call, or at the next start."""
        with self._lock:
            row = self._tenants.get(tenant_id)
            if row is None or tenant_id in self._deleting or not self._may_see(account, row):
                raise NotFound(f"tenant {tenant_id}: unknown")
            self._deleting.add(tenant_id)
        try:
            self.store.set_tenant(tenant_id, "deleting")
            row["state"] = "deleting"
            with suppress(NotFound):  # lost, or gone with an earlier call
                self.master.delete_tenant(tenant_id)
            self.futures.close_tenant(tenant_id)
            self.store.drop_tenant(tenant_id)
            with self._lock:
                del self._tenants[tenant_id]
        finally:
            self._deleting.discard(tenant_id)
        self.on_delete(tenant_id)
        self._audit(account, "delete_tenant", tenant_id, self._of(account, row))

    def _audit(self, account: Account, action: str, target: str, outcome: str) -> None:
        """A line about what has been done; on a full disk it is in the log alone: it is done all the same."""
        try:
            self.store.audit(account.owner_id, action, target, outcome)
        except sqlite3.OperationalError as error:
            log.error("audit: %s %s by %s: %s (not stored: %s)", action, target, account.name, outcome, error)

    def _of(self, account: Account, row: dict[str, Any]) -> str:
        """Outcome of something done to a tenant: whose it is, if another account did it."""
        return "ok" if row["owner_id"] == account.owner_id else f"ok, of {self._owner(row)}"

    # -------------------------------------------------------------------------------------------------------- workloads

    def submit_workload(
        self, account: Account, tenant_id: str, spec: dict[str, Any], seq: int | None, deadline_s: float | None
    ) -> dict[str, Any]:
        """Accept a workload; its future ends with it."""
        self._active(account, tenant_id)
        return self.futures.accept(
            tenant_id,
            seq,
            "workload",
            request_digest("workload", spec, {}),
            self._run_workload(spec),
            long=True,
            cancel=lambda: self.master.cancel(tenant_id),
            gap_by_s=time.time() + self.limits.sequence_gap_s,
            deadline_s=None if deadline_s is None else time.time() + deadline_s,
            workload=("w" + secrets.token_hex(16), spec),
        )

    def _run_workload(
        self, spec: dict[str, Any], resume: bool = False, paused: bool = False
    ) -> Callable[[Request], None]:
        def run(request: Request) -> None:
            # by its id the master knows after a restart which workload a payload was saved in
            named = spec if spec["task"] == "eval" else {**spec, "workload_id": request.workload_id}
            on_end = self._on_end(request.future_id)
            self.master.submit(request.tenant_id, named, resume=resume, paused=paused, on_end=on_end)

        return run

    def _on_end(self, future_id: str) -> Callable[[dict[str, Any]], None]:
        def end(outcome: dict[str, Any]) -> None:
            status = outcome["status"]
            if status == "completed":
                arrays = outcome.get("arrays") or {}
                self.futures.complete(future_id, _outcome(outcome["result"], arrays))
            elif self.stopping:
                pass  # stopped with the server: the next start goes on with it
            elif status == "cancelled":
                by = self._stopped_by.pop(future_id, None)
                text = "cancelled" if by is None else f"cancelled by {by}"
                self.futures.fail(future_id, FutureCancelled(text, category="user", reason="cancelled"))
            else:
                error = outcome["error"]
                if not isinstance(error, BaseException | dict):
                    error = FutureFailed(str(error), category="user", reason="workload_failed")
                self.futures.fail(future_id, error)

        return end

    def workloads(self, account: Account, tenant_id: str) -> list[dict[str, Any]]:
        self._owned(account, tenant_id, operator=True)
        return self.store.workloads(tenant_id)

    def workload(self, account: Account, tenant_id: str, workload_id: str) -> dict[str, Any]:
        for row in self.workloads(account, tenant_id):
            if row["workload_id"] == workload_id:
                return row
        raise NotFound(f"workload {workload_id}: unknown")

    def control_workload(self, account: Account, tenant_id: str, workload_id: str, action: str) -> dict[str, Any]:
        """``action``: pause | resume | cancel, by owner or operator. A workload that has ended stays as it is."""
        tenant = self._active(account, tenant_id, operator=True)
        foreign = tenant["owner_id"] != account.owner_id
        row = self.workload(account, tenant_id, workload_id)
        if row["status"] not in ENDED:
            if action == "cancel":
                by = f"the operator {account.name}" if foreign else "its owner"
                if foreign:
                    self._stopped_by[row["future_id"]] = by
                self.futures.cancel(tenant["owner_id"], row["future_id"], by)
            elif row["status"] == "pending":
                raise Conflict(f"workload {workload_id}: has not started: cancel it instead")
            else:
                self.futures.wait_taken(row["future_id"])
                getattr(self.master, action)(tenant_id)
                self.store.set_paused(workload_id, action == "pause")
        elif action != "cancel":
            raise Conflict(f"workload {workload_id}: has ended: {row['status']}")
        if foreign:
            self._audit(account, f"{action}_workload", workload_id, self._of(account, tenant))
        return self.workload(account, tenant_id, workload_id)

    # ------------------------------------------------------------------------------------------------ ordered requests

    def submit(
        self,
        account: Account,
        tenant_id: str,
        verb: str,
        request: dict[str, Any],
        arrays: Arrays,
        seq: int | None,
        deadline_s: float | None,
    ) -> dict[str, Any]:
        """Accept one of :data:`VERBS` for execution in order."""
        self._active(account, tenant_id)
        long = verb == "evaluate"

        def run(accepted: Request) -> Outcome | None:
            if long:
                return self.master.evaluate(tenant_id, request, self._on_end(accepted.future_id))
            return _outcome(*VERBS[verb](self, tenant_id, request, arrays))

        return self.futures.accept(
            tenant_id,
            seq,
            verb,
            request_digest(verb, request, arrays),
            run,
            long=long,
            gap_by_s=time.time() + self.limits.sequence_gap_s,
            deadline_s=time.time() + (deadline_s or self.limits.deadline_s),
            body_bytes=sum(array.nbytes for array in arrays.values()),
        )

    def _export(self, tenant_id: str) -> dict[str, Any]:
        name = self.master.export(tenant_id).name
        payload = next(p for p in self.master.payloads(tenant_id) if p["name"] == name)
        return {**payload, "url": f"/v1/tenants/{tenant_id}/payloads/{payload['policy_version']}"}

    # ----------------------------------------------------------------------------------------------------- direct calls

    def check_stream(self, account: Account) -> None:
        """Raises :class:`QuotaExceeded` when the owner has :data:`MAX_STREAMS` streams of metrics open."""
        if self._streams[account.owner_id] >= MAX_STREAMS:
            raise QuotaExceeded(f"{MAX_STREAMS} streams of this account are open: close one", retryable=True)

    @contextmanager
    def stream(self, account: Account) -> Iterator[None]:
        """An open stream of metrics."""
        with self._lock:
            self._streams[account.owner_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._streams[account.owner_id] -= 1

    @contextmanager
    def _one_call(self, account: Account) -> Iterator[None]:
        """A direct call holds a worker thread: one owner may not hold all of them."""
        with self._lock:
            if self._direct[account.owner_id] >= self.limits.max_in_flight:
                raise QuotaExceeded(f"{self.limits.max_in_flight} calls of this account are waiting", retryable=True)
            self._direct[account.owner_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._direct[account.owner_id] -= 1

    def predict(self, account: Account, tenant_id: str, request: dict[str, Any], arrays: Arrays) -> Message:
        self._active(account, tenant_id)
        with self._one_call(account):
            found = self.master.predict(tenant_id, arrays, request.pop("instructions"), **request)
        return Message({}, dict(found))

    def queue_get(self, account: Account, tenant_id: str, request: dict[str, Any]) -> Message:
        self._active(account, tenant_id)
        with self._one_call(account):
            return Message({}, dict(self.master.queue_get(tenant_id, request)))

    def payloads(self, account: Account, tenant_id: str) -> list[dict[str, Any]]:
        self._owned(account, tenant_id, operator=True)
        return self.master.payloads(tenant_id)

    def payload(self, account: Account, tenant_id: str, version: int) -> Path:
        """The folder of a version, also of a tenant that is lost; weights are the owner's alone."""
        self._owned(account, tenant_id)
        return self.master.payload_path(tenant_id, version)

    def metrics(self, account: Account, tenant_id: str, after: int, timeout_s: float = 0.0) -> list[dict[str, Any]]:
        """Metrics with an id above ``after``; waits for some."""
        self._owned(account, tenant_id, operator=True)
        if timeout_s > 0:
            return self.master.wait_metrics(tenant_id, after, timeout_s)
        return self.master.metrics(tenant_id, after)

    # --------------------------------------------------------------------------------------------- environment sessions

    def open_session(self, account: Account, request: dict[str, Any]) -> dict[str, Any]:
        self.check_open()
        scope = account.owner_id
        if request.get("tenant_id") is not None:
            scope = self._active(account, request["tenant_id"])["tenant_id"]
        with self._lock:
            mine = sum(session.open and session.owner_id == account.owner_id for session in self._sessions.values())
            if mine + self._creating[account.owner_id] >= self.limits.max_sessions:
                raise QuotaExceeded(f"this account has {mine} environment sessions, its limit: close one")
            self._creating[account.owner_id] += 1
        try:
            with self._one_call(account):
                opened = self.master.open_session(scope, request)
        finally:
            with self._lock:
                self._creating[account.owner_id] -= 1
        self.store.add_session(opened["session_id"], account.owner_id)
        self._sessions[opened["session_id"]] = _Session(account.owner_id, scope, opened["lease_s"])
        return opened

    def session(self, account: Account, session_id: str, verb: str, request: dict[str, Any], arrays: Arrays) -> Message:
        """``verb``: reset | step | batch_step | close.

        Raises:
            NotFound: unknown, or another owner's.
            SessionLost: closed, its lease ran out, or the server was restarted.
        """
        session = self._sessions.get(session_id)
        if session is None or session.owner_id != account.owner_id:
            raise NotFound(f"session {session_id}: unknown")
        scope = session.scope
        if scope is None:
            raise SessionLost(f"session {session_id}: closed: open a new one and start the episode again")
        try:
            with self._one_call(account):
                meta, found = getattr(self.master, f"session_{verb}")(scope, session_id, request, arrays)
        except (SessionLost, NotFound) as error:  # not found: it went with its tenant
            session.scope = None
            raise SessionLost(error.message) from error
        session.used_s = time.monotonic()
        if verb == "close":
            session.scope = None
        return Message(meta, dict(found))

    # --------------------------------------------------------------------------------------------------------- operator

    def create_token(self, account: Account, owner: str, role: str) -> dict[str, Any]:
        require_operator(account)
        token = self.accounts.create(owner, role)
        token_id = token.split("_")[1]
        self._audit(account, "create_token", token_id, f"{role} {owner}")
        return {"token_id": token_id, "owner": owner, "role": role, "token": token}

    def tokens(self, account: Account) -> list[dict[str, Any]]:
        require_operator(account)
        return [
            {"token_id": row["token_id"], "owner": row["name"], "role": row["role"]}
            | {key: row[key] for key in ("owner_id", "created_s", "revoked_s")}
            for row in self.store.tokens()
        ]

    def revoke_token(self, account: Account, token_id: str) -> None:
        require_operator(account)
        self.accounts.revoke(token_id)
        self._audit(account, "revoke_token", token_id, "ok")

    def audit(self, account: Account, after: int) -> list[dict[str, Any]]:
        require_operator(account)
        return self.store.audit_rows(after)

    def overview(self, account: Account) -> dict[str, Any]:
        """What the page shows: the master's statistics, every tenant with its owner, accounts."""
        require_operator(account)
        owners = {row["owner_id"]: row for row in self.store.owners()}
        tenants = self.list_tenants(account)
        accounts = [
            {
                "owner": row["name"],
                "role": row["role"],
                "tenants": sum(t["owner"] == row["name"] for t in tenants),
                "in_flight": self.futures.in_flight(owner_id),
            }
            for owner_id, row in owners.items()
        ]
        return {
            "uptime_s": time.time() - self.started_s,
            "stats": json.loads(json.dumps(self.master.stats())),  # keys that are numbers become texts
            "tenants": tenants,
            "accounts": accounts,
            "sessions": sum(session.open for session in self._sessions.values()),
            "alarms": self.alarms(),
        }


def _outcome(meta: Mapping[str, Any] | None, arrays: Arrays | None) -> Outcome:
    return Outcome(dict(meta or {}), encode(Message({}, dict(arrays)), MSGPACK) if arrays else None)


def request_digest(verb: str, request: Mapping[str, Any], arrays: Arrays) -> str:
    """sha256 over everything that makes two requests the same, whatever form their bodies had."""
    digest = hashlib.sha256(json.dumps([verb, request], sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(json.dumps([name, array.dtype.name, list(array.shape)]).encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _arrays_only(name: str) -> Callable[..., tuple[dict, Arrays]]:
    return lambda service, tenant_id, request, arrays: ({}, getattr(service.master, name)(tenant_id, **request))


def _meta_only(name: str) -> Callable[..., tuple[dict, Arrays]]:
    return lambda service, tenant_id, request, arrays: (getattr(service.master, name)(tenant_id, **request), {})


def _with_arrays(name: str) -> Callable[..., tuple[dict, Arrays]]:
    return lambda service, tenant_id, request, arrays: (getattr(service.master, name)(tenant_id, arrays, **request), {})


def _load(service: Service, tenant_id: str, request: dict[str, Any], arrays: Arrays) -> tuple[dict, Arrays]:
    if (request["version"] is None) == (not arrays):
        raise InvalidRequest("load: give either `version` or the parameters as arrays")
    return service.master.load(tenant_id, request["version"] if request["version"] is not None else arrays), {}


def _rollout(service: Service, tenant_id: str, request: dict[str, Any], arrays: Arrays) -> tuple[dict, Arrays]:
    found, meta = service.master.rollout(tenant_id, request)
    return meta, found


#: verb -> how the master does it; all in order, with a sequence number, through :meth:`Service.submit`.
VERBS: dict[str, Callable[..., tuple[dict[str, Any], Arrays]]] = {
    "evaluate": lambda *_: ({}, {}),  # ends through on_end
    "export": lambda service, tenant_id, request, arrays: (service._export(tenant_id), {}),
    "train_job": _meta_only("train_job"),
    "train_batch": _with_arrays("train_batch"),
    "forward_backward": _with_arrays("forward_backward"),
    "optim_step": _meta_only("optim_step"),
    "export_params": _arrays_only("export_params"),
    "save": _meta_only("save"),
    "load": _load,
    "rollout": _rollout,
    "load_weights": _meta_only("load_weights"),
    "queue_put": _with_arrays("queue_put"),
    "queue_get_meta": _meta_only("queue_get_meta"),
    "queue_clear": _meta_only("queue_clear"),
    "reserve": _meta_only("reserve"),
    "mark": _meta_only("mark"),
    "lease_next": _meta_only("lease_next"),
    "complete": _meta_only("complete"),
    "fail": _meta_only("fail"),
}
