"""Order and pace of training jobs: which tenant's job goes first, and how many of a tenant's may be in flight."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, override

from nexus_lightning.queues.job import Job, JobState

#: A tenant that is paced gets one more job in flight after so many completed ones in a row without a drop.
RECOVERY_JOBS = 10


@dataclass(kw_only=True)
class Registration:
    """What a policy may read of a registered tenant. It writes ``notes``; everything else is the scheduler's.

    Attributes:
        tenant_id: its name.
        task_type: ``sft``, ``rl`` or ``offline_rl``.
        policy_key: ``tenant/task#registration``.
        priority, max_in_flight, max_policy_staleness, target_jobs, weight: as configured.
        share_offset: the share that it has joined with: the least of the others' then.
        leased_samples: samples leased for training, expired leases given back.
        version: newest policy version that the actor is known to have.
        versions_per_job: how far the last completed job moved it.
        stopped: why it gets no more jobs; empty while it does.
        ended: state -> jobs that have ended so.
        jobs: job id -> its jobs that have not.
        notes: the policy's own, JSON-able; kept by the journal and over a resume.
    """

    tenant_id: str
    task_type: str
    policy_key: str
    priority: int
    max_in_flight: int
    max_policy_staleness: int | None
    target_jobs: int | None
    weight: float
    share_offset: float
    leased_samples: int = 0
    version: int | None = None
    versions_per_job: int = 1
    stopped: str = ""
    ended: Counter[JobState] = field(default_factory=Counter)
    jobs: dict[str, Job] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Leased samples by weight, counted from the share that it has joined with."""
        return self.share_offset + self.leased_samples / self.weight

    @property
    def wants_more(self) -> bool:
        """It is not stopped and has not met its target."""
        return not self.stopped and (self.target_jobs is None or self.ended[JobState.COMPLETED] < self.target_jobs)


class Policy:
    """Override :meth:`order`, and what else differs. ``queues.training.policy`` names the class of a run.

    All methods run under the scheduler's lock, in any thread: they look and compute, and neither wait nor call the
    scheduler. With several ranks rank 0's policy orders; every rank paces the producers of its own.
    """

    def order(self, tenant: Registration, job: Job) -> Any:
        """A key to sort by: the least of all tenants is trained next.

        Args:
            tenant: with a job that is READY and not stale.
            job: its oldest one.
        """
        raise NotImplementedError(f"{type(self).__name__} must say by `order` which tenant goes first")

    def bound(self, tenant: Registration) -> int:
        """Most jobs of a tenant in flight; the scheduler keeps to ``max_in_flight`` in any case."""
        return tenant.max_in_flight

    def on_lease(self, tenant: Registration, job: Job) -> None:
        """A job is leased for training; ``job.lease_id`` grows with every lease, also over a resume."""

    def on_complete(self, tenant: Registration) -> None:
        """A job was trained in time."""

    def on_drop(self, tenant: Registration) -> None:
        """Jobs of it were dropped as stale, one or more at once."""


class FairShare(Policy):
    """The highest priority first; among equals the tenant with the least leased samples / weight, then the oldest job.

    Pace of a tenant with ``max_policy_staleness``: never more than ``max_policy_staleness // v + 1`` jobs in flight, v
    the versions that its last job added. Jobs ahead of a new one raise the actor's version before it is leased: with
    more of them it could only be dropped. When jobs are dropped as stale all the same (versions that came from
    elsewhere, which nobody foresaw), the bound is halved, to 1 at least; each ``RECOVERY_JOBS`` completed jobs without
    a drop raise it by one: additive increase, multiplicative decrease, as congestion control does it (Chiu and Jain
    1989). ``notes``: ``window`` is the bound of a tenant that is paced, ``in_time`` its jobs since that changed.

    Example:
        >>> from nexus_lightning.queues.jobs import Scheduler
        >>> scheduler = Scheduler(policy=FairShare())
        >>> scheduler.register("arm", "rl", max_in_flight=8, max_policy_staleness=2)
        >>> scheduler.bound("arm")
        3
    """

    @override
    def order(self, tenant: Registration, job: Job) -> tuple[int, float, int | None]:
        return -tenant.priority, tenant.share, job.ready_seq

    @override
    def bound(self, tenant: Registration) -> int:
        if tenant.max_policy_staleness is None:
            return tenant.max_in_flight
        foreseen = min(tenant.max_in_flight, tenant.max_policy_staleness // tenant.versions_per_job + 1)
        return min(foreseen, tenant.notes.get("window", foreseen))

    @override
    def on_drop(self, tenant: Registration) -> None:
        tenant.notes |= {"window": max(1, self.bound(tenant) // 2), "in_time": 0}

    @override
    def on_complete(self, tenant: Registration) -> None:
        notes = tenant.notes
        if "window" not in notes:
            return
        notes["in_time"] += 1
        if notes["in_time"] == RECOVERY_JOBS:
            notes |= {"window": notes["window"] + 1, "in_time": 0}
        if notes["window"] >= tenant.max_in_flight:
            del notes["window"], notes["in_time"]
