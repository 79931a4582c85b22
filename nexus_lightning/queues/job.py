"""The descriptor of a training job and its states."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class JobState(StrEnum):
    """States of a training job; see the diagram in :class:`~nexus_lightning.queues.jobs.Scheduler`."""

    RESERVED = "reserved"
    NEEDS_ACTOR_FORWARD = "needs_actor_forward"
    COMPUTING_ACTOR_FORWARD = "computing_actor_forward"
    NEEDS_ADVANTAGES = "needs_advantages"
    COMPUTING_ADVANTAGES = "computing_advantages"
    READY = "ready"
    LEASED = "leased"
    COMPLETED = "completed"
    FAILED = "failed"
    DROPPED = "dropped"

    @property
    def terminal(self) -> bool:
        """True for ``completed``, ``failed`` and ``dropped``: nothing follows."""
        return self in TERMINAL


TERMINAL = (JobState.COMPLETED, JobState.FAILED, JobState.DROPPED)


@dataclass
class Job:
    """Descriptor of one training job. Callers get copies: the scheduler's own record changes only through its methods.

    Attributes:
        job_id: never used twice, also not after a resume.
        policy_key: ``tenant/task#registration``; a tenant that leaves and comes back has another one.
        partition_id: key of the tensors in the training queue, ``tenant/task/domain/job_id``.
        sample_count: rows of the partition; unit of fair share.
        domain: free label (task or environment name).
        created_seq / ready_seq: global order of reservation / of becoming ready (None before).
        behavior_policy_version: policy version that acted (RL), else None.
        max_policy_staleness: largest allowed ``actor version - behavior_policy_version``, None for no bound.
        producer_role / consumer_role: who fills and who trains it.
        reason: why it ended, for ``failed`` and ``dropped``.
        timestamps: state -> time of the last entry into it, in seconds of the scheduler's clock.
        metadata: JSON-able extras of ``reserve``, ``mark`` and ``complete``; ``lease_expirations`` counts lost leases.
        lease_id / lease_deadline: the current lease, None when nobody holds the job.
        expired_lease_id: the lease that expired last, while nobody has leased the job since.
    """

    job_id: str
    tenant_id: str
    task_type: str
    policy_key: str
    partition_id: str
    sample_count: int
    domain: str
    schema_signature: str
    priority: int
    created_seq: int
    ready_seq: int | None = None
    behavior_policy_version: int | None = None
    max_policy_staleness: int | None = None
    producer_role: str = "producer"
    consumer_role: str = "actor"
    state: JobState = JobState.RESERVED
    reason: str = ""
    timestamps: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    lease_id: int | None = None
    lease_deadline: float | None = None
    expired_lease_id: int | None = None
