"""The scheduler's memory on disk: jobs, counters and sequence numbers in one SQLite file.

::

    jobs(created_seq, job_id, tenant_id, state, reason, changed, job)   every job ever made, as it stands (JSON in job)
    counters(name, value)                                               `seq`, and `tenant/<name>` of registered ones

One transition is one transaction: the job, its tenant's counters and the sequence numbers change together or not at
all. It is committed, into SQLite's write-ahead log, before the scheduler's call returns: kill -9 loses nothing that a
caller was told. With ``synchronous=NORMAL`` a power cut may take the last few transitions, never half of one.

What it is not: a backup of training. A job's tensors live in memory and die with the process, and the weights are what
the last checkpoint saved. ``completed`` here says that a job was trained, not that its update survived: a resumed run
takes its counters from the checkpoint (:meth:`Scheduler.load_state_dict`) and writes them here.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexus_lightning.queues.job import Job, JobState

#: Of the tables; another one's file is refused.
FORMAT = 1
#: How long another process may take to let go of the file.
LOCK_TIMEOUT_S = 2.0

_TABLES = """
CREATE TABLE IF NOT EXISTS jobs (
    created_seq INTEGER PRIMARY KEY, job_id TEXT NOT NULL, tenant_id TEXT NOT NULL, state TEXT NOT NULL,
    reason TEXT NOT NULL, changed INTEGER NOT NULL, job TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""
_ENDED = ", ".join(f"'{state}'" for state in JobState if state.terminal)


class JournalError(RuntimeError):
    """The journal cannot be opened or written; after the first failed write nothing is accepted any more."""


@dataclass
class JournalState:
    """What a journal holds.

    Attributes:
        seq: the scheduler's sequence numbers.
        tenants: tenant -> counters of the tenants that were registered.
        in_flight: jobs that had not ended, in order of reservation.
        ended: the last ended jobs, oldest first. Timestamps are of the clock of the process that made them.
    """

    seq: dict[str, int]
    tenants: dict[str, dict[str, Any]]
    in_flight: list[Job]
    ended: list[Job]


class Journal:
    """One run's journal, held by one process. The scheduler calls it under its lock, from any thread.

    Args:
        path: the SQLite file, made when it is not there. On a local disk: write-ahead logs do not work on NFS.

    Raises:
        JournalError: another process holds it, it is no journal, or of another format.

    Example:
        >>> import tempfile
        >>> from nexus_lightning.queues.jobs import Scheduler
        >>> path = tempfile.mkdtemp() + "/jobs.sqlite"
        >>> journal = Journal(path)
        >>> scheduler = Scheduler(journal=journal)
        >>> scheduler.register("libero", "sft")
        >>> lost = scheduler.reserve("libero", sample_count=64).job_id
        >>> journal.close()                                            # as far as a process gets that is killed here
        >>> again = Scheduler(journal=Journal(path))
        >>> again.get(lost).state.value, again.get(lost).reason
        ('failed', 'interrupted')
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._error: str | None = None
        try:
            self._db = sqlite3.connect(self.path, timeout=LOCK_TIMEOUT_S, check_same_thread=False)
            # One owner: a second scheduler on the same file would hand out the same sequence numbers.
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            found = self._db.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, FORMAT):
                raise JournalError(f"{self.path} has format {found}, this version reads {FORMAT}: start a new run")
            self._db.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version={FORMAT}; COMMIT;")
            self._changes = self._db.execute("SELECT coalesce(max(changed), 0) FROM jobs").fetchone()[0]
        except sqlite3.Error as error:
            raise JournalError(
                f"{self.path}: the journal cannot be opened ({error}): is another run using this folder, "
                "is it on a local disk with free space, and is the file a journal?"
            ) from error

    def write(self, tenant_id: str, counters: dict[str, Any], seq: dict[str, int], job: Job | None = None) -> None:
        """One transition, durable on return.

        Args:
            tenant_id: whose counters.
            counters: the tenant's, after the transition.
            seq: sequence numbers, after the transition.
            job: as it stands after the transition; None when only the counters have changed.

        Raises:
            JournalError: it could not be written (disk full, metadata that is not JSON-able), or an earlier one could
                not.
        """
        self.check()
        try:
            rows = [(f"tenant/{tenant_id}", json.dumps(counters)), ("seq", json.dumps(seq))]
            with self._db:  # BEGIN before the first statement, COMMIT at the end, ROLLBACK on an exception
                self._db.executemany("INSERT OR REPLACE INTO counters VALUES (?, ?)", rows)
                if job is not None:
                    self._changes += 1
                    values = (job.created_seq, job.job_id, job.tenant_id, job.state, job.reason, self._changes)
                    text = json.dumps(job.__dict__)
                    self._db.execute("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?)", (*values, text))
        except (sqlite3.Error, TypeError, ValueError) as error:
            what = "the counters" if job is None else f"job {job.job_id} becoming {job.state}"
            raise self._broken(f"tenant {tenant_id!r}, {what}: {error}") from error

    def forget(self, tenant_id: str) -> None:
        """Drop the counters of a tenant that was unregistered; its jobs stay."""
        self.check()
        try:
            with self._db:
                self._db.execute("DELETE FROM counters WHERE name = ?", (f"tenant/{tenant_id}",))
        except sqlite3.Error as error:
            raise self._broken(f"tenant {tenant_id!r}, unregistering: {error}") from error

    def read(self, history: int) -> JournalState:
        """Everything that a scheduler needs to go on.

        Args:
            history: how many ended jobs.
        """
        counters = {name: json.loads(value) for name, value in self._db.execute("SELECT * FROM counters")}
        in_flight = self._db.execute(f"SELECT job FROM jobs WHERE state NOT IN ({_ENDED}) ORDER BY created_seq")
        ended = f"SELECT job FROM jobs WHERE state IN ({_ENDED}) ORDER BY changed DESC LIMIT ?"
        return JournalState(
            seq=counters.pop("seq", {}),
            tenants={name.removeprefix("tenant/"): value for name, value in counters.items()},
            in_flight=[_job(text) for (text,) in in_flight],
            ended=[_job(text) for (text,) in self._db.execute(ended, (history,))][::-1],
        )

    def check(self) -> None:
        """Raises the :class:`JournalError` of the first failed write, for callers that write nothing themselves."""
        if self._error is not None:
            raise JournalError(self._error)

    def close(self) -> None:
        """Let go of the file. Idempotent; a later write is a :class:`JournalError`."""
        self._db.close()
        self._error = self._error or f"{self.path}: the journal is closed"

    def _broken(self, what: str) -> JournalError:
        # The scheduler's memory is one transition ahead of the file now: nobody may act on it.
        self._error = (
            f"{self.path}: the journal cannot be written ({what}); no further job is accepted. "
            "Mend the cause (free disk space, JSON-able metadata) and resume the run"
        )
        return JournalError(self._error)


def _job(text: str) -> Job:
    values = json.loads(text)
    return Job(**{**values, "state": JobState(values["state"])})
