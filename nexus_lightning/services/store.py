"""What the server must not forget: one SQLite file and a folder of results inside the run folder.

::

    <run>/services/              mode 0700
        services.sqlite          the tables below, write-ahead log
        results/<future_id>      body of a result that carries arrays, written before its row says "completed"
        operator_token           mode 0600, written at the first start

Every method is one transaction, committed with an fsync before it returns: an answer that a caller has read survives
kill -9 and a power cut. Times are seconds of the Unix epoch. Secrets are kept as sha256 only. Thread-safe: one
connection under one lock (SQLite has one writer anyway).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FORMAT = 1
#: How long another process may take to let go of the file.
LOCK_TIMEOUT_S = 2.0
#: Rows of the audit log that are kept: an attacker must not fill the disk with refusals.
AUDIT_ROWS = 20_000
#: Words of ``requests.status`` that change no more.
ENDED = ("completed", "failed", "cancelled")

_TABLES = """
CREATE TABLE IF NOT EXISTS owners (
    owner_id TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL, created_s REAL NOT NULL
) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS owner_name ON owners(name);
CREATE TABLE IF NOT EXISTS tokens (
    token_id TEXT PRIMARY KEY, owner_id TEXT NOT NULL REFERENCES owners, digest TEXT NOT NULL, created_s REAL NOT NULL,
    revoked_s REAL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tenants (
    tenant_id TEXT PRIMARY KEY, owner_id TEXT NOT NULL REFERENCES owners, name TEXT NOT NULL, spec TEXT NOT NULL,
    state TEXT NOT NULL, created_s REAL NOT NULL, restored TEXT
) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS tenant_name ON tenants(owner_id, name) WHERE state != 'deleted';
CREATE TABLE IF NOT EXISTS requests (
    future_id TEXT PRIMARY KEY, tenant_id TEXT NOT NULL REFERENCES tenants, seq INTEGER NOT NULL, verb TEXT NOT NULL,
    digest TEXT NOT NULL, status TEXT NOT NULL, workload_id TEXT, result TEXT, data_bytes INTEGER NOT NULL DEFAULT 0,
    error TEXT, accepted_s REAL NOT NULL, started_s REAL, ended_s REAL, deadline_s REAL, delivered_s REAL,
    dropped INTEGER NOT NULL DEFAULT 0, UNIQUE(tenant_id, seq)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS request_delivery ON requests(delivered_s) WHERE delivered_s IS NOT NULL AND dropped = 0;
CREATE TABLE IF NOT EXISTS workloads (
    workload_id TEXT PRIMARY KEY, tenant_id TEXT NOT NULL REFERENCES tenants, future_id TEXT NOT NULL,
    spec TEXT NOT NULL, created_s REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS paused (workload_id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY, owner_id TEXT NOT NULL REFERENCES owners, created_s REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT, time_s REAL NOT NULL, owner_id TEXT, action TEXT NOT NULL,
    target TEXT NOT NULL, outcome TEXT NOT NULL
);
"""
_JSON = ("spec", "restored", "result", "error")


class StoreError(RuntimeError):
    """The file cannot be opened: held by another process, damaged, or of another format."""


class Store:
    """The tables and the folder of results of one server.

    Args:
        folder: made when it is not there; on a local disk (write-ahead logs do not work on NFS).

    Raises:
        StoreError: see there.

    Example:
        >>> import tempfile
        >>> store = Store(Path(tempfile.mkdtemp()))
        >>> store.add_owner("o1", "alice", "tenant")
        >>> store.add_tenant("t1", "o1", "arm", {"head": {"name": "mlp"}})
        >>> store.accept("f1", "t1", 1, "train_batch", "digest", None)
        >>> store.requests("t1")[0]["status"]
        'pending'
        >>> store.close()
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.results = self.folder / "results"
        self.results.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        path = self.path = self.folder / "services.sqlite"
        self._lock = threading.RLock()
        #: Why the last write failed; None: it did not.
        self.problem: str | None = None
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            path.chmod(0o600)  # SQLite gives its write-ahead log the same mode
            self._db = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            found = self._db.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, FORMAT):
                raise StoreError(f"{path}: format {found}, this program writes {FORMAT}: start with another run_name")
            self._db.executescript("BEGIN IMMEDIATE;" + _TABLES + f"PRAGMA user_version = {FORMAT}; COMMIT;")
        except sqlite3.Error as error:
            raise StoreError(f"{path}: {error} (does another server use this run folder?)") from error

    def close(self) -> None:
        """Twice does nothing."""
        with self._lock:
            self._db.close()

    def check(self) -> None:
        """One write that changes nothing: raises ``sqlite3.Error`` when the disk is full or the file is damaged."""
        self._write(f"PRAGMA user_version = {FORMAT}", ())

    # ------------------------------------------------------------------------------------------------------ accounts

    def add_owner(self, owner_id: str, name: str, role: str) -> None:
        self._write("INSERT INTO owners VALUES (?, ?, ?, ?)", (owner_id, name, role, time.time()))

    def owners(self) -> list[dict[str, Any]]:
        return self._read("SELECT * FROM owners ORDER BY created_s")

    def add_token(self, token_id: str, owner_id: str, digest: str) -> None:
        self._write("INSERT INTO tokens VALUES (?, ?, ?, ?, NULL)", (token_id, owner_id, digest, time.time()))

    def revoke_token(self, token_id: str) -> None:
        self._write("UPDATE tokens SET revoked_s = ? WHERE token_id = ? AND revoked_s IS NULL", (time.time(), token_id))

    def tokens(self) -> list[dict[str, Any]]:
        """Every token with its owner's name and role."""
        return self._read("SELECT tokens.*, name, role FROM tokens JOIN owners USING (owner_id) ORDER BY 4, token_id")

    def audit(self, owner_id: str | None, action: str, target: str, outcome: str) -> None:
        """One line of who did what; the oldest lines go when there are too many."""
        with self._transaction() as db:
            row = db.execute(
                "INSERT INTO audit VALUES (NULL, ?, ?, ?, ?, ?)", (time.time(), owner_id, action, target, outcome)
            )
            db.execute("DELETE FROM audit WHERE id <= ?", ((row.lastrowid or 0) - AUDIT_ROWS,))

    def audit_rows(self, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        return self._read("SELECT * FROM audit WHERE id > ? ORDER BY id LIMIT ?", (after, limit))

    # ------------------------------------------------------------------------------------------------------- tenants

    def add_tenant(self, tenant_id: str, owner_id: str, name: str, spec: dict[str, Any]) -> None:
        """In state ``creating``.

        Raises:
            sqlite3.IntegrityError: the owner has a tenant of this name.
        """
        self._write(
            "INSERT INTO tenants VALUES (?, ?, ?, ?, 'creating', ?, NULL)",
            (tenant_id, owner_id, name, _dump(spec), time.time()),
        )

    def set_tenant(self, tenant_id: str, state: str | None = None, restored: dict[str, Any] | None = None) -> None:
        """``state``: creating | active | lost | deleting; ``restored``: what the last restart brought back."""
        self._write(
            "UPDATE tenants SET state = coalesce(?, state), restored = coalesce(?, restored) WHERE tenant_id = ?",
            (state, _dump(restored), tenant_id),
        )

    def drop_tenant(self, tenant_id: str) -> None:
        """Everything of a tenant except its id, which is never given out again."""
        with self._transaction() as db:
            files = db.execute("SELECT future_id FROM requests WHERE tenant_id = ? AND data_bytes > 0", (tenant_id,))
            names = [row[0] for row in files]
            mine = "(SELECT workload_id FROM workloads WHERE tenant_id = ?)"
            db.execute(f"DELETE FROM paused WHERE workload_id IN {mine}", (tenant_id,))
            db.execute("DELETE FROM workloads WHERE tenant_id = ?", (tenant_id,))
            db.execute("DELETE FROM requests WHERE tenant_id = ?", (tenant_id,))
            db.execute(
                "UPDATE tenants SET state = 'deleted', spec = '{}', restored = NULL WHERE tenant_id = ?", (tenant_id,)
            )
        for name in names:
            self.result_path(name).unlink(missing_ok=True)

    def tenants(self) -> list[dict[str, Any]]:
        """Those not deleted, oldest first."""
        return self._read("SELECT * FROM tenants WHERE state != 'deleted' ORDER BY created_s, tenant_id")

    # ------------------------------------------------------------------------------------------------------ requests

    def accept(
        self,
        future_id: str,
        tenant_id: str,
        seq: int,
        verb: str,
        digest: str,
        deadline_s: float | None,
        workload: tuple[str, dict[str, Any]] | None = None,
    ) -> None:
        """A new request in state ``pending``, with its ``(workload_id, spec)`` when it submits one.

        Raises:
            sqlite3.IntegrityError: ``(tenant_id, seq)`` is used.
        """
        now = time.time()
        with self._transaction() as db:
            db.execute(
                "INSERT INTO requests (future_id, tenant_id, seq, verb, digest, status, workload_id, accepted_s, "
                "deadline_s) VALUES (?, ?, ?, ?, ?, 'pending', ?, ?, ?)",
                (future_id, tenant_id, seq, verb, digest, workload and workload[0], now, deadline_s),
            )
            if workload is not None:
                db.execute(
                    "INSERT INTO workloads VALUES (?, ?, ?, ?, ?)",
                    (workload[0], tenant_id, future_id, _dump(workload[1]), now),
                )

    def start(self, future_id: str) -> None:
        self._write(
            "UPDATE requests SET status = 'running', started_s = ? WHERE future_id = ? AND status = 'pending'",
            (time.time(), future_id),
        )

    def end(
        self,
        future_id: str,
        status: str,
        *,
        result: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
        data_bytes: int = 0,
    ) -> None:
        """A terminal state; ``data_bytes``: size of the file that :meth:`write_result` has made before."""
        self._write(
            "UPDATE requests SET status = ?, result = ?, error = ?, data_bytes = ?, ended_s = ? "
            "WHERE future_id = ? AND status IN ('pending', 'running')",
            (status, _dump(result), _dump(error), data_bytes, time.time(), future_id),
        )

    def write_result(self, future_id: str, data: bytes) -> None:
        """The arrays of a result: whole or not at all, on the disk before it returns."""
        path = self.result_path(future_id)
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def remove_result(self, future_id: str) -> None:
        self.result_path(future_id).unlink(missing_ok=True)

    def deliver(self, future_ids: Iterable[str], now_s: float) -> None:
        """The owner has read these results: their grace time starts."""
        with self._transaction() as db:
            db.executemany(
                "UPDATE requests SET delivered_s = ? WHERE future_id = ? AND delivered_s IS NULL",
                [(now_s, future_id) for future_id in future_ids],
            )

    def drop_delivered(self, before_s: float) -> list[dict[str, Any]]:
        """Results read before ``before_s``: the content goes, the row stays and keeps its sequence number used.

        Returns:
            ``future_id``, ``tenant_id`` and ``data_bytes`` of each.
        """
        with self._transaction() as db:
            rows = [
                dict(row)
                for row in db.execute(
                    "SELECT future_id, tenant_id, data_bytes FROM requests WHERE delivered_s < ? AND dropped = 0",
                    (before_s,),
                )
            ]
            db.executemany(
                "UPDATE requests SET dropped = 1, result = NULL, error = NULL, data_bytes = 0 "
                "WHERE future_id = :future_id",
                rows,
            )
        for row in rows:
            if row["data_bytes"]:
                self.remove_result(row["future_id"])
        return rows

    def request(self, future_id: str) -> dict[str, Any] | None:
        found = self._read("SELECT * FROM requests WHERE future_id = ?", (future_id,))
        return found[0] if found else None

    def request_at(self, tenant_id: str, seq: int) -> dict[str, Any] | None:
        found = self._read("SELECT * FROM requests WHERE tenant_id = ? AND seq = ?", (tenant_id, seq))
        return found[0] if found else None

    def requests(self, tenant_id: str) -> list[dict[str, Any]]:
        """All of a tenant in order of their numbers, without results."""
        return self._read(
            "SELECT future_id, seq, verb, digest, status, workload_id, data_bytes, accepted_s, deadline_s "
            "FROM requests WHERE tenant_id = ? ORDER BY seq",
            (tenant_id,),
        )

    def result_path(self, future_id: str) -> Path:
        return self.results / future_id

    def workloads(self, tenant_id: str) -> list[dict[str, Any]]:
        """Workloads with status, result and error of their future, oldest first."""
        return self._read(
            "SELECT workloads.workload_id, future_id, seq, spec, status, result, error, created_s, started_s, ended_s "
            "FROM workloads JOIN requests USING (future_id) WHERE workloads.tenant_id = ? ORDER BY seq",
            (tenant_id,),
        )

    def set_paused(self, workload_id: str, paused: bool) -> None:
        verb = "INSERT OR IGNORE INTO paused VALUES (?)" if paused else "DELETE FROM paused WHERE workload_id = ?"
        self._write(verb, (workload_id,))

    def paused(self) -> set[str]:
        """Ids of the workloads that were paused last and not resumed."""
        return {row["workload_id"] for row in self._read("SELECT workload_id FROM paused")}

    # ------------------------------------------------------------------------------------------------------ sessions

    def add_session(self, session_id: str, owner_id: str) -> None:
        self._write("INSERT INTO sessions VALUES (?, ?, ?)", (session_id, owner_id, time.time()))

    def sessions(self) -> list[dict[str, Any]]:
        return self._read("SELECT * FROM sessions ORDER BY created_s")

    # ------------------------------------------------------------------------------------------------------- helpers

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except BaseException as error:
                if self._db.in_transaction:  # SQLite itself undoes what met a full disk, not always
                    self._db.execute("ROLLBACK")
                if isinstance(error, sqlite3.OperationalError):
                    if self.problem is None:
                        log.error("%s cannot be written: %s", self.path, error)
                    self.problem = str(error)
                raise
            if self.problem is not None:
                log.warning("%s is written again", self.path)
            self.problem = None

    def _write(self, sql: str, values: tuple[Any, ...]) -> None:
        with self._transaction() as db:
            db.execute(sql, values)

    def _read(self, sql: str, values: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        with self._lock:
            rows = [dict(row) for row in self._db.execute(sql, values)]
        for row in rows:
            for key in _JSON:
                if row.get(key) is not None:
                    row[key] = json.loads(row[key])
        return rows


def _dump(value: Any) -> str | None:
    return None if value is None else json.dumps(value, sort_keys=True)
