"""Control plane of the training queue: the state machine of a job and the scheduler.

A job carries no tensors: they are the partition ``job.partition_id`` of the
:class:`~nexus_lightning.queues.training.TrainingQueue`.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nexus_lightning.queues.job import TERMINAL, Job, JobState
from nexus_lightning.queues.journal import Journal
from nexus_lightning.queues.policy import RECOVERY_JOBS as RECOVERY_JOBS
from nexus_lightning.queues.policy import FairShare, Policy, Registration

#: Task types that make training jobs. Evaluation is read-only and makes none.
TASK_TYPES = ("sft", "rl", "offline_rl")


#: waiting state -> the state while it is leased. An expired lease goes the other way.
_LEASED_AS = {
    JobState.NEEDS_ACTOR_FORWARD: JobState.COMPUTING_ACTOR_FORWARD,
    JobState.NEEDS_ADVANTAGES: JobState.COMPUTING_ADVANTAGES,
    JobState.READY: JobState.LEASED,
}
_RETURNS_TO = {leased: waiting for waiting, leased in _LEASED_AS.items()}

#: Reason of jobs that were in flight when their process died: their tensors went with it.
INTERRUPTED = "interrupted"

_STAGES = {
    JobState.COMPUTING_ACTOR_FORWARD: (JobState.NEEDS_ADVANTAGES,),
    JobState.COMPUTING_ADVANTAGES: (JobState.READY,),
}
_RL_START = (JobState.NEEDS_ACTOR_FORWARD, JobState.NEEDS_ADVANTAGES)
#: task type -> state -> states that `mark` may set.
_MARKABLE: dict[str, dict[JobState, tuple[JobState, ...]]] = {
    "sft": {JobState.RESERVED: (JobState.READY,)},
    "rl": {JobState.RESERVED: _RL_START, **_STAGES},
    "offline_rl": {JobState.RESERVED: (JobState.READY, *_RL_START), **_STAGES},
}


_NAMES = tuple(state.value for state in JobState)


class IllegalTransition(ValueError):
    """A job cannot go to the asked state. ``job`` is a copy of it as it stands."""

    def __init__(self, message: str, job: Job) -> None:
        super().__init__(message)
        self.job = job


class LeaseLost(RuntimeError):
    """The lease given with the call is not the job's current one: it expired, the job went back. Discard the work."""


@dataclass(kw_only=True)
class _Registered(Registration):
    """A registered tenant with what wakes its producers."""

    room: threading.Condition  # of the scheduler's lock; only the tenant's own producers wait on it

    def too_old(self, behavior_policy_version: int | None) -> bool:
        """A job that acted with this version would be stale by the time the jobs in flight are trained."""
        if self.max_policy_staleness is None or self.version is None or behavior_policy_version is None:
            return False
        ahead = len(self.jobs) * self.versions_per_job
        return self.version - behavior_policy_version + ahead > self.max_policy_staleness

    def counters(self) -> dict[str, Any]:
        """JSON-able; samples of unfinished leases are in ``leased_samples``."""
        return {
            "ended": {state.value: count for state, count in self.ended.items()},
            "leased_samples": self.leased_samples,
            "share_offset": self.share_offset,
            "notes": dict(self.notes),
        }

    def restore(self, counters: dict[str, Any]) -> None:
        self.ended = Counter({JobState(key): count for key, count in counters["ended"].items()})
        self.leased_samples = counters["leased_samples"]
        self.share_offset = counters["share_offset"]
        # before there were policies, a paced tenant's window stood among the counters
        pace = {key: counters[key] for key in ("window", "in_time") if counters.get("window") is not None}
        self.notes = dict(counters.get("notes", pace))


class Scheduler:
    """Admits, orders, leases and ends training jobs. Thread-safe, no thread of its own; in memory, or with a journal.

    ::

        reserve()
           |
           v       mark(): sft, offline_rl
        RESERVED ------------------------------------------------------------------.
           | mark(): rl, offline_rl                                                |
           |------------------------------------.                                  |
           v (optional)                         v                                  v
        NEEDS_ACTOR_FORWARD       .--> NEEDS_ADVANTAGES         .--------------> READY
           |  ^                   |         |  ^                |                 |  ^
           |  : expire()        mark()      |  : expire()     mark()              |  : expire()
           v  : lease_stage()     |         v  : lease_stage()  |                 v  : lease_next()
        COMPUTING_ACTOR_FORWARD --'    COMPUTING_ADVANTAGES ----'               LEASED --- complete() --> COMPLETED

        any of these ------- fail(), fail_all(), unregister() --> FAILED(reason)
        any of these ------- drop() ----------------------------> DROPPED(reason)
        READY and stale ---- lease_next() ----------------------> DROPPED("policy_stale")

    Who owns what: the producer owns RESERVED and the first ``mark``; whoever holds a lease owns COMPUTING_* and LEASED
    until its deadline; the scheduler owns the waiting states. Ended jobs never change again.

    Bounds: a tenant has at most ``max_in_flight`` jobs that are not ended, and no more than its policy's bound. A job
    that acted with a version which the actor has left so far behind that it could only be dropped is not admitted. With
    ``target_jobs`` set, completed plus in flight jobs never exceed it.
    Order and pace: the :class:`~nexus_lightning.queues.policy.Policy` says which tenant's job goes first and how many
    jobs of a tenant may be in flight; by default :class:`~nexus_lightning.queues.policy.FairShare`. Inside a tenant it
    is always ``ready_seq``. A tenant that joins late starts at the least share of the others, so it does not crowd them
    out. An expired lease gives its samples back. See :meth:`bound` and :meth:`dropped`.
    Staleness: ``lease_next`` drops a READY job when ``actor version - behavior_policy_version > max_policy_staleness``.
    Blocks: ``lease_next`` and ``wait_for_ready`` (nothing ready) and ``wait_for_room`` (no admission), all with a
    timeout. Nothing else blocks.
    Wakes: a job that becomes ready wakes the first two, one whose lease is returned ``lease_next``; a job that ends and
    a tenant that is stopped wake ``wait_for_room`` of that tenant; ``close`` wakes all.
    Expiry: ``lease_next`` and ``lease_stage`` first return the leases whose deadline has passed; ``expire`` does it
    alone. A call that names an outdated ``lease_id`` raises :class:`LeaseLost`, so a job that two consumers held is
    trained once. A holder at work says so with ``renew``, which also takes back an expired lease that nobody else has.
    ``close()``: ``reserve``, ``lease_stage`` and ``lease_next`` answer None from then on and waiters return; jobs in
    flight stay and may still be marked, completed or failed.
    With a ``journal`` every transition is in its database before the call that made it returns, so kill -9 loses none.
    A scheduler built on the journal of a dead process fails what was in flight there (reason ``interrupted``), goes on
    with its sequence numbers, and gives a tenant its counters back when it is registered. They may be ahead of the last
    saved weights: whoever resumes from a checkpoint calls :meth:`load_state_dict` afterwards, which has the last word
    on counters. When the journal cannot be written, every later call that would change or lease a job raises its
    :class:`~nexus_lightning.queues.journal.JournalError`.

    Args:
        on_terminal: called once for every ended job with a copy of it, outside the lock, in the thread that ended it
            (clear the partition there). Its exceptions propagate to that caller.
        clock: seconds, monotonic.
        history: how many ended jobs are remembered by :meth:`get` and :attr:`history`; counters are never forgotten.
        journal: where transitions are kept; None keeps them in memory alone.
        policy: order and pace; None: :class:`~nexus_lightning.queues.policy.FairShare`.

    Example:
        >>> cleared = []
        >>> scheduler = Scheduler(on_terminal=lambda job: cleared.append(job.job_id))
        >>> scheduler.register("libero", "sft", max_in_flight=1)
        >>> job = scheduler.reserve("libero", sample_count=64)
        >>> scheduler.reserve("libero", sample_count=64) is None      # the in-flight bound
        True
        >>> _ = scheduler.mark(job.job_id, JobState.READY)
        >>> leased = scheduler.lease_next({"libero": 0}, timeout_s=0, deadline_s=60)
        >>> leased.job_id == job.job_id, leased.state.value
        (True, 'leased')
        >>> scheduler.complete(job.job_id, lease_id=leased.lease_id, policy_version=1).state.value
        'completed'
        >>> cleared == [job.job_id], scheduler.completed("libero"), scheduler.in_flight("libero")
        (True, 1, 0)
    """

    def __init__(
        self,
        on_terminal: Callable[[Job], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        history: int = 10_000,
        journal: Journal | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.on_terminal = on_terminal
        self.policy = FairShare() if policy is None else policy
        self._clock = clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # a job became ready, or the scheduler was closed
        self._tenants: dict[str, _Registered] = {}
        self._jobs: dict[str, Job] = {}
        #: waiting state -> tenant -> job id -> job; READY in order of ready_seq. Who looks for work looks only here.
        self._waiting: dict[JobState, dict[str, dict[str, Job]]] = {state: {} for state in _LEASED_AS}
        self._first_deadline = float("inf")  # no lease ends before it
        self._ended: OrderedDict[str, Job] = OrderedDict()
        self._history = history
        # Jobs made after a checkpoint and lost in a crash must not lend their ids to jobs of the resumed run.
        self._run_token = uuid.uuid4().hex[:8]
        self._seq = {"created": 0, "ready": 0, "lease": 0, "registration": 0}
        self._closed = False
        self._woken = False
        self._journal = journal
        self._sitting_out: dict[str, dict[str, Any]] = {}  # counters of tenants that are not in this run
        self._restored: dict[str, dict[str, Any]] = {}  # counters of tenants that are not registered again yet
        if journal is not None:
            self._restore(journal)

    # ---- tenants -------------------------------------------------------------------------------------------------

    def register(
        self,
        tenant_id: str,
        task_type: str,
        *,
        priority: int = 0,
        max_in_flight: int = 2,
        max_policy_staleness: int | None = None,
        target_jobs: int | None = None,
        weight: float = 1.0,
    ) -> None:
        """Admits a tenant with fresh counters, whatever had its name before; after a restart with the journal's.

        Args:
            tenant_id: unique among the registered ones.
            task_type: one of ``TASK_TYPES``.
            priority: higher goes first.
            max_in_flight: most jobs that are not ended, >= 1.
            max_policy_staleness: see the class; None for no bound.
            target_jobs: completed jobs after which nothing more is admitted; None for no target.
            weight: share of samples relative to other tenants, > 0.

        Raises:
            ValueError: a value out of range, or the name is taken.
        """
        problems = []
        if not tenant_id:
            problems.append("tenant_id is empty")
        if task_type not in TASK_TYPES:
            problems.append(
                f"task_type={task_type!r}: choose one of {', '.join(TASK_TYPES)} (evaluation makes no jobs)"
            )
        if max_in_flight < 1:
            problems.append(f"max_in_flight={max_in_flight}: must be at least 1")
        if max_policy_staleness is not None and max_policy_staleness < 0:
            problems.append(f"max_policy_staleness={max_policy_staleness}: must be at least 0, or None for no bound")
        if target_jobs is not None and target_jobs < 0:
            problems.append(f"target_jobs={target_jobs}: must be at least 0, or None for no target")
        if not weight > 0:
            problems.append(f"weight={weight}: must be above 0")
        if problems:
            raise ValueError(f"tenant {tenant_id!r}: " + "; ".join(problems))
        with self._changed:
            if tenant_id in self._tenants:
                raise ValueError(
                    f"tenant {tenant_id!r} is registered already: unregister it first or choose another name"
                )
            tenant = self._tenants[tenant_id] = _Registered(
                tenant_id=tenant_id,
                task_type=task_type,
                policy_key=f"{tenant_id}/{task_type}#{self._next('registration')}",
                priority=priority,
                max_in_flight=max_in_flight,
                max_policy_staleness=max_policy_staleness,
                target_jobs=target_jobs,
                weight=weight,
                share_offset=min((r.share for r in self._tenants.values() if not r.stopped), default=0.0),
                room=threading.Condition(self._lock),
            )
            if tenant_id in self._restored:
                tenant.restore(self._restored.pop(tenant_id))
            self._write(tenant)

    def unregister(self, tenant_id: str, reason: str = "tenant unregistered") -> list[Job]:
        """Fails the tenant's jobs in flight and forgets its counters. Returns the failed jobs."""
        failed = self.fail_all(tenant_id, reason)
        with self._changed:
            tenant = self._tenants.pop(tenant_id)
            tenant.room.notify_all()
            if self._journal is not None:
                self._journal.forget(tenant_id)
        return failed

    def fail_all(self, tenant_id: str, reason: str) -> list[Job]:
        """Stops a tenant (quarantine, leaving): fails its jobs in flight, admits no more until it is registered anew.

        The tenant stays in :meth:`counts` and no longer holds up :meth:`targets_met`. Returns the failed jobs.
        """
        with self._changed:
            tenant = self._tenant(tenant_id)
            tenant.stopped = reason
            tenant.room.notify_all()
            ended = [self._end(job, JobState.FAILED, reason) for job in list(tenant.jobs.values())]
        self._announce(ended)
        return ended

    # ---- producers -----------------------------------------------------------------------------------------------

    def reserve(
        self,
        tenant_id: str,
        sample_count: int,
        *,
        behavior_policy_version: int | None = None,
        domain: str = "",
        schema_signature: str = "",
        metadata: dict[str, Any] | None = None,
    ) -> Job | None:
        """A new RESERVED job, or None: at the in-flight bound, foreseeably stale (read the version anew), target
        covered, tenant stopped, or closed.

        Args:
            tenant_id: a registered tenant.
            sample_count: rows the partition will have, >= 1.
            behavior_policy_version: version read before acting (RL).
            domain: free label, part of ``partition_id``.
            schema_signature: ``TenantSchema.signature`` of the data.
            metadata: JSON-able extras.
        """
        if sample_count < 1:
            raise ValueError(f"tenant {tenant_id!r}: sample_count={sample_count}: must be at least 1")
        with self._changed:
            tenant = self._tenant(tenant_id)
            if not self._has_room(tenant) or tenant.too_old(behavior_policy_version):
                return None
            seq = self._next("created")
            job_id = f"{self._run_token}-{seq:08d}"
            job = Job(
                job_id=job_id,
                tenant_id=tenant_id,
                task_type=tenant.task_type,
                policy_key=tenant.policy_key,
                partition_id="/".join((tenant_id, tenant.task_type, domain or "-", job_id)),
                sample_count=sample_count,
                domain=domain,
                schema_signature=schema_signature,
                priority=tenant.priority,
                created_seq=seq,
                behavior_policy_version=behavior_policy_version,
                max_policy_staleness=tenant.max_policy_staleness,
                timestamps={JobState.RESERVED.value: self._clock()},
                metadata=dict(metadata or {}),
            )
            self._jobs[job_id] = tenant.jobs[job_id] = job
            self._write(tenant, job)
            return _copy(job)

    def wait_for_room(self, tenant_id: str, timeout_s: float) -> bool:
        """Blocks until ``reserve`` would admit a job of this tenant.

        Returns:
            True when there is room; False on timeout, or at once when :meth:`wants_more` is False.
        """
        with self._changed:
            if not self._open(tenant_id):
                return False
            self._tenants[tenant_id].room.wait_for(
                lambda: not self._open(tenant_id) or self._has_room(self._tenants[tenant_id]), timeout_s
            )
            return self._open(tenant_id) and self._has_room(self._tenants[tenant_id])

    def wants_more(self, tenant_id: str) -> bool:
        """False when no job of this tenant will ever be admitted again: target met, stopped, unregistered or closed."""
        with self._changed:
            return self._open(tenant_id)

    def mark(self, job_id: str, state: JobState, *, lease_id: int | None = None, **metadata: Any) -> Job:
        """Moves a job along the arrows labelled ``mark()`` and adds ``metadata``.

        Raises:
            IllegalTransition: (a ValueError) the diagram has no such arrow; names both states.
            LeaseLost: ``lease_id`` is given and is not the current lease.
        """
        with self._changed:
            job = self._job(job_id, lease_id)
            legal = _MARKABLE[job.task_type].get(job.state, ())
            if state not in legal:
                hint = "use lease_stage() or lease_next()" if state in _RETURNS_TO else ""
                if JobState(state).terminal:
                    hint = "use complete(), fail() or drop()"
                raise self._illegal(job, state, hint or f"mark() may set: {', '.join(legal) or 'nothing'}")
            job.metadata.update(metadata)
            job.lease_id = job.lease_deadline = None
            if state == JobState.READY:
                job.ready_seq = self._next("ready")
            self._enter(job, JobState(state))
            return _copy(job)

    # ---- consumers -----------------------------------------------------------------------------------------------

    def lease_stage(
        self, state_needed: JobState, deadline_s: float, *, tenant_id: str | None = None, job_id: str | None = None
    ) -> Job | None:
        """Leases the next job waiting for a preparation stage; does not block.

        Args:
            state_needed: ``NEEDS_ACTOR_FORWARD`` or ``NEEDS_ADVANTAGES``.
            deadline_s: the lease returns by itself after so many seconds.
            tenant_id: only jobs of this tenant.
            job_id: only this job.

        Returns:
            The job in its ``COMPUTING_*`` state (highest priority, then ``created_seq``), or None.
        """
        if state_needed not in _RL_START:
            raise ValueError(f"state_needed={str(state_needed)!r}: choose one of {', '.join(_RL_START)}")
        with self._changed:
            self._check_journal()
            if self._closed:
                return None
            self._return_expired(self._clock())
            by_tenant = self._waiting[state_needed]
            tenants = by_tenant.values() if tenant_id is None else (by_tenant.get(tenant_id, {}),)
            waiting = [job for jobs in tenants for job in jobs.values() if job_id in (None, job.job_id)]
            if not waiting:
                return None
            return self._lease(min(waiting, key=lambda job: (-job.priority, job.created_seq)), deadline_s)

    def lease_next(
        self,
        actor_versions: dict[str, int],
        timeout_s: float,
        deadline_s: float,
        where: Callable[[Job], bool] | None = None,
    ) -> Job | None:
        """Leases the READY job that is next in order; drops stale ones on the way.

        Args:
            actor_versions: tenant -> its policy version at the actor. Jobs of tenants not named here are left alone.
            timeout_s: how long to wait for one; 0 does not wait. The wait ends early when a job of these tenants needs
                the actor forward: that is the caller's work, too; and after :meth:`wake`.
            deadline_s: the lease returns by itself after so many seconds.
            where: leaves other jobs alone (it runs under the scheduler's lock: look, do not call back); None for all.

        Returns:
            The job in state LEASED, or None on timeout or close.
        """
        end_s = self._clock() + timeout_s
        timed_out = False
        while True:
            with self._changed:
                self._check_journal()
                if self._closed:
                    return None
                self._return_expired(self._clock())
                first, stale = self._next_ready(actor_versions, where)
                for tenant_id in {job.tenant_id for job in stale}:
                    self.policy.on_drop(self._tenants[tenant_id])
                dropped = [self._end(job, JobState.DROPPED, "policy_stale") for job in stale]
                if not dropped and first is not None:
                    return self._lease(first, deadline_s)
                if not dropped:
                    if timeout_s > 0 and self._woken:  # a call that does not wait is not the one that was meant
                        self._woken = False
                        return None
                    if any(name in actor_versions for name in self._waiting[JobState.NEEDS_ACTOR_FORWARD]):
                        return None
                    remaining_s = end_s - self._clock()
                    if timed_out or remaining_s <= 0:
                        return None
                    timed_out = not self._changed.wait(remaining_s)
            self._announce(dropped)

    def renew(self, job: Job, deadline_s: float) -> bool:
        """The holder of a lease is at work: the lease lasts ``deadline_s`` from now on, under the same ``lease_id``.

        A lease that has expired is taken back unless somebody else has leased the job since.

        Args:
            job: as it was leased.
            deadline_s: as in :meth:`lease_next`.

        Returns:
            False when the job has ended meanwhile (its tenant was quarantined or has left).

        Raises:
            LeaseLost: somebody else has leased the job.
        """
        with self._changed:
            own = self._jobs.get(job.job_id)
            if own is None:
                return False
            if own.expired_lease_id is not None and own.expired_lease_id == job.lease_id:
                self._lease(own, deadline_s, job.lease_id)
                return True
            own = self._job(job.job_id, job.lease_id)
            own.lease_deadline = self._clock() + deadline_s  # a later one: the earliest of all stays a bound
            return True

    def wake(self) -> None:
        """The waiting :meth:`lease_next` (or else the next one that would wait) returns: its caller has other work."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def complete(self, job_id: str, *, lease_id: int | None = None, **metadata: Any) -> Job:
        """LEASED -> COMPLETED.

        ``policy_version`` among the metadata is the actor's version after the job.

        Raises:
            IllegalTransition: the job is not LEASED (its lease may have expired: discard the work).
            LeaseLost: ``lease_id`` is given and is not the current lease.
        """
        with self._changed:
            job = self._job(job_id, lease_id)
            if job.state != JobState.LEASED:
                raise self._illegal(job, JobState.COMPLETED, "only a leased job can be completed")
            job.metadata.update(metadata)
            tenant = self._tenants[job.tenant_id]
            version = metadata.get("policy_version")
            if version is not None:
                if tenant.version is not None:
                    tenant.versions_per_job = max(1, version - tenant.version)
                tenant.version = version
            self.policy.on_complete(tenant)
            ended = self._end(job, JobState.COMPLETED, "")
        self._announce([ended])
        return ended

    def fail(self, job_id: str, reason: str, *, lease_id: int | None = None) -> Job:
        """Any state -> FAILED(reason). An ended job is returned as it is: clean-up may race with quarantine."""
        return self._give_up(job_id, JobState.FAILED, reason, lease_id)

    def drop(self, job_id: str, reason: str, *, lease_id: int | None = None) -> Job:
        """Any state -> DROPPED(reason): discarded on purpose, not by an error. An ended job is returned as it is."""
        return self._give_up(job_id, JobState.DROPPED, reason, lease_id)

    def expire(self, now: float | None = None) -> list[Job]:
        """Returns leases due at or before ``now`` (default: the clock) to the state they were leased from.

        The job keeps its ``ready_seq``, hence its place. Returns copies of the jobs.
        """
        with self._changed:
            return self._return_expired(self._clock() if now is None else now)

    # ---- what is going on ----------------------------------------------------------------------------------------

    def get(self, job_id: str) -> Job:
        """A copy of a job, in flight or in the history."""
        with self._changed:
            job = self._jobs.get(job_id) or self._ended.get(job_id)
            if job is None:
                raise ValueError(
                    f"job {job_id!r} is unknown (never made, or older than the last {self._history} ended jobs)"
                )
            return _copy(job)

    @property
    def history(self) -> list[Job]:
        """Copies of the remembered ended jobs, oldest first."""
        with self._changed:
            return [_copy(job) for job in self._ended.values()]

    def counts(self) -> dict[str, dict[str, int]]:
        """tenant -> state -> jobs: in flight now, ended since registration (or since the resumed run's start)."""
        with self._changed:
            table = {}
            for name, tenant in self._tenants.items():
                row = table[name] = dict.fromkeys(_NAMES, 0)
                for state, count in tenant.ended.items():
                    row[state.value] = count
                for job in tenant.jobs.values():
                    row[job.state.value] += 1
            return table

    def depth(self, tenant_id: str | None = None) -> int:
        """READY jobs of one tenant, or of all."""
        with self._changed:
            ready = self._waiting[JobState.READY]
            return sum(map(len, ready.values())) if tenant_id is None else len(ready.get(tenant_id, ()))

    def ready(self) -> list[Job]:
        """Copies of the READY jobs, each tenant's oldest first."""
        with self._changed:
            return [_copy(job) for jobs in self._waiting[JobState.READY].values() for job in jobs.values()]

    def wait_for_ready(self, after: int, timeout_s: float) -> int:
        """Blocks until a job became ready since this method returned ``after`` (0 at first), or until the timeout.

        Returns:
            How many jobs have become ready so far.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._seq["ready"] > after, timeout_s)
            return self._seq["ready"]

    def in_flight(self, tenant_id: str) -> int:
        """Jobs of a tenant that are not ended."""
        with self._changed:
            return len(self._tenant(tenant_id).jobs)

    def bound(self, tenant_id: str) -> int:
        """How many jobs of a tenant may be in flight now (see Bounds and Order)."""
        with self._changed:
            tenant = self._tenant(tenant_id)
            return min(tenant.max_in_flight, self.policy.bound(tenant))

    def dropped(self, tenant_id: str) -> int:
        """Dropped jobs of a tenant."""
        with self._changed:
            return self._tenant(tenant_id).ended[JobState.DROPPED]

    def registered(self, tenant_id: str) -> bool:
        """Whether a tenant is registered."""
        with self._changed:
            return tenant_id in self._tenants

    def completed(self, tenant_id: str) -> int:
        """Completed jobs of a tenant."""
        with self._changed:
            return self._tenant(tenant_id).ended[JobState.COMPLETED]

    def leased_samples(self, tenant_id: str) -> int:
        """Samples leased for training to a tenant, expired leases given back."""
        with self._changed:
            return self._tenant(tenant_id).leased_samples

    def targets_met(self) -> bool:
        """True when every registered tenant has met its target or is stopped; without a target it is never met."""
        with self._changed:
            return bool(self._tenants) and not any(tenant.wants_more for tenant in self._tenants.values())

    # ---- end and resume ------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._closed

    def close(self) -> None:
        """Admits and leases nothing from now on and wakes every waiter. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for tenant in self._tenants.values():
                tenant.room.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """JSON-able sequence numbers and counters. Jobs in flight are not part of it: producers make them again."""
        with self._changed:
            tenants = {name: tenant.counters() for name, tenant in self._tenants.items()}
            for job in self._jobs.values():
                if job.state == JobState.LEASED:
                    tenants[job.tenant_id]["leased_samples"] -= job.sample_count
            return {"seq": dict(self._seq), "tenants": {**self._sitting_out, **tenants}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores counters. Register the tenants first; those of names in ``state`` that are not registered are kept
        for the next :meth:`state_dict`: a tenant that sits a run out has its jobs done when it comes back, at the least
        share of the others then.

        Sequence numbers never go back. Counters do: what the journal knows of later jobs is not in the weights. A
        registered tenant that ``state`` does not know starts fresh, at the least share of the others.

        Raises:
            ValueError: jobs are in flight.
        """
        with self._changed:
            if self._jobs:
                raise ValueError(f"{len(self._jobs)} jobs are in flight: load the scheduler's state before reserving")
            for name, value in state["seq"].items():
                self._seq[name] = max(self._seq[name], value)
            saved = state["tenants"]
            self._sitting_out = {n: {**c, "share_offset": None} for n, c in saved.items() if n not in self._tenants}
            known, back = [], []
            for name, tenant in self._tenants.items():
                if name in saved:
                    (back if saved[name]["share_offset"] is None else known).append(tenant)
                    tenant.restore(saved[name])
            least = min((tenant.share for tenant in known), default=0.0)
            for tenant in back:
                tenant.share_offset = least - tenant.leased_samples / tenant.weight
            for name, tenant in self._tenants.items():
                if name not in saved:
                    tenant.restore({"ended": {}, "leased_samples": 0, "share_offset": least})
                tenant.room.notify_all()
                self._write(tenant)

    # ---- inside the lock -----------------------------------------------------------------------------------------

    def _next(self, name: str) -> int:
        self._seq[name] += 1
        return self._seq[name]

    def _tenant(self, tenant_id: str) -> _Registered:
        if tenant_id not in self._tenants:
            known = ", ".join(self._tenants) or "none"
            raise ValueError(f"tenant {tenant_id!r} is not registered (registered: {known}): call register() first")
        return self._tenants[tenant_id]

    def _open(self, tenant_id: str) -> bool:
        return not self._closed and tenant_id in self._tenants and self._tenants[tenant_id].wants_more

    def _has_room(self, tenant: _Registered) -> bool:
        if not self._open(tenant.tenant_id):
            return False
        in_flight = len(tenant.jobs)
        if in_flight >= tenant.max_in_flight or in_flight >= self.policy.bound(tenant):
            return False
        target = tenant.target_jobs
        return target is None or tenant.ended[JobState.COMPLETED] + in_flight < target

    def _job(self, job_id: str, lease_id: int | None) -> Job:
        job = self._jobs.get(job_id) or self._ended.get(job_id)
        if job is None:
            raise ValueError(
                f"job {job_id!r} is unknown (never made, or older than the last {self._history} ended jobs)"
            )
        if lease_id is not None and not job.state.terminal and lease_id != job.lease_id:
            raise LeaseLost(
                f"tenant {job.tenant_id!r}: lease {lease_id} of job {job_id} has expired; it is {job.state} now"
            )
        return job

    def _next_ready(
        self, actor_versions: dict[str, int], where: Callable[[Job], bool] | None
    ) -> tuple[Job | None, list[Job]]:
        """The READY job to lease and all stale ones. A policy orders tenants: the oldest job of each stands for it."""
        first, first_order, stale, order_of = None, None, [], self.policy.order
        for tenant_id, jobs in self._waiting[JobState.READY].items():
            version = actor_versions.get(tenant_id)
            if version is None:
                continue
            tenant, oldest = self._tenants[tenant_id], None
            tenant.version = version
            bounded = tenant.max_policy_staleness is not None
            for job in jobs.values():
                if where is not None and not where(job):
                    continue
                if bounded and _is_stale(job, version):
                    stale.append(job)
                elif oldest is None:
                    oldest = job
                    if not bounded:  # nothing behind it can be stale
                        break
            if oldest is not None:
                order = order_of(tenant, oldest)
                if first_order is None or order < first_order:
                    first, first_order = oldest, order
        return first, stale

    def _lease(self, job: Job, deadline_s: float, lease_id: int | None = None) -> Job:
        job.lease_id = self._next("lease") if lease_id is None else lease_id
        job.expired_lease_id = None
        job.lease_deadline = self._clock() + deadline_s
        self._first_deadline = min(self._first_deadline, job.lease_deadline)
        if job.state == JobState.READY:
            tenant = self._tenants[job.tenant_id]
            tenant.leased_samples += job.sample_count
            self.policy.on_lease(tenant, job)
        self._enter(job, _LEASED_AS[job.state])
        return _copy(job)

    def _return_expired(self, now: float) -> list[Job]:
        if now < self._first_deadline:
            return []
        returned, self._first_deadline = [], float("inf")
        for job in self._jobs.values():
            if job.lease_deadline is None:
                continue
            if job.lease_deadline > now:
                self._first_deadline = min(self._first_deadline, job.lease_deadline)
                continue
            if job.state == JobState.LEASED:
                self._tenants[job.tenant_id].leased_samples -= job.sample_count
            job.expired_lease_id, job.lease_id, job.lease_deadline = job.lease_id, None, None
            job.metadata["lease_expirations"] = job.metadata.get("lease_expirations", 0) + 1
            self._enter(job, _RETURNS_TO[job.state])
            if job.ready_seq is not None:  # it has kept its place
                ready = self._waiting[JobState.READY][job.tenant_id]
                ordered = sorted(ready.values(), key=lambda waiting: waiting.ready_seq or 0)
                self._waiting[JobState.READY][job.tenant_id] = {waiting.job_id: waiting for waiting in ordered}
            returned.append(_copy(job))
        return returned

    def _enter(self, job: Job, state: JobState) -> None:
        """The one place where a job changes its state: indexes, waiters and journal follow."""
        tenant = self._tenants[job.tenant_id]
        if job.state in self._waiting:
            jobs = self._waiting[job.state][job.tenant_id]
            del jobs[job.job_id]
            if not jobs:
                del self._waiting[job.state][job.tenant_id]
        job.state = state
        job.timestamps[state.value] = self._clock()
        if state in self._waiting:
            self._waiting[state].setdefault(job.tenant_id, {})[job.job_id] = job
            self._changed.notify_all()
        elif state in TERMINAL:
            del self._jobs[job.job_id], tenant.jobs[job.job_id]
            tenant.ended[state] += 1
            tenant.room.notify_all()
        self._write(tenant, job)

    def _end(self, job: Job, state: JobState, reason: str) -> Job:
        assert not job.state.terminal and state.terminal
        job.reason = reason
        job.lease_id = job.lease_deadline = job.expired_lease_id = None
        self._enter(job, state)
        self._remember(job)
        return _copy(job)

    def _remember(self, job: Job) -> None:
        self._ended[job.job_id] = job
        while len(self._ended) > self._history:
            self._ended.popitem(last=False)

    def _write(self, tenant: _Registered, job: Job | None = None) -> None:
        if self._journal is not None:
            self._journal.write(tenant.tenant_id, tenant.counters(), self._seq, job)

    def _check_journal(self) -> None:
        if self._journal is not None:
            self._journal.check()

    def _restore(self, journal: Journal) -> None:
        """Take over what a dead process left: sequence numbers, counters, and its jobs in flight, which have failed."""
        saved = journal.read(self._history)
        self._seq.update(saved.seq)
        self._restored = saved.tenants
        for job in saved.ended:
            self._remember(job)
        for job in saved.in_flight:
            counters = self._restored[job.tenant_id]
            if job.state == JobState.LEASED:
                counters["leased_samples"] -= job.sample_count
            failed = JobState.FAILED.value
            counters["ended"][failed] = counters["ended"].get(failed, 0) + 1
            job.state, job.reason, job.lease_id, job.lease_deadline = JobState.FAILED, INTERRUPTED, None, None
            job.timestamps[failed] = self._clock()
            journal.write(job.tenant_id, counters, self._seq, job)
            self._remember(job)

    def _give_up(self, job_id: str, state: JobState, reason: str, lease_id: int | None) -> Job:
        with self._changed:
            job = self._job(job_id, lease_id)
            if job.state.terminal:
                return _copy(job)
            ended = self._end(job, state, reason)
        self._announce([ended])
        return ended

    def _illegal(self, job: Job, state: JobState, hint: str) -> IllegalTransition:
        because = f" ({job.reason})" if job.reason else ""
        return IllegalTransition(
            f"tenant {job.tenant_id!r}: {job.task_type} job {job.job_id} is {job.state}{because} "
            f"and cannot become {state}: {hint}",
            _copy(job),
        )

    # ---- outside the lock ----------------------------------------------------------------------------------------

    def _announce(self, ended: list[Job]) -> None:
        if self.on_terminal is not None:
            for job in ended:
                self.on_terminal(job)


def _is_stale(job: Job, actor_version: int) -> bool:
    if job.behavior_policy_version is None or job.max_policy_staleness is None:
        return False
    return actor_version - job.behavior_policy_version > job.max_policy_staleness


def _copy(job: Job) -> Job:
    # dataclasses.replace runs __init__ over all fields: most of the scheduler's time went there
    twin = object.__new__(Job)
    twin.__dict__.update(job.__dict__)
    twin.timestamps, twin.metadata = dict(job.timestamps), dict(job.metadata)
    return twin
