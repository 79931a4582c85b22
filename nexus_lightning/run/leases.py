"""What a step is given and what it gives back: plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict

from nexus_lightning.queues.jobs import Job
from nexus_lightning.queues.training import BatchMeta
from nexus_lightning.ranks import Failure
from nexus_lightning.shares import Metric


@dataclass
class Lease:
    """One leased job and its partition; with several ranks this rank's part of it.

    Attributes:
        job: as it was leased.
        meta: of the columns that were handed out; None when this rank has none.
        data: those columns.
        rollout: metrics of this rank's part of the rollout, if the job is one.
        renew: called while the job trains: its holder is at work.
    """

    job: Job
    meta: BatchMeta | None
    data: TensorDict | None
    rollout: dict[str, Metric] | None = None
    renew: Callable[[], object] = lambda: None


class LeaseGroup:
    """What Lightning sees as one batch: a leased job, or several of different tenants that share backbone passes.

    Opaque to Lightning on purpose, no dataclass either: ``*-true`` precision would convert what is in it, and strip a
    bare TensorDict of its batch size.
    """

    def __init__(self, leases: list[Lease]) -> None:
        self.leases = leases

    def to(self, device: torch.device, **kwargs: Any) -> LeaseGroup:
        moved = [None if lease.data is None else lease.data.to(device, **kwargs) for lease in self.leases]
        return LeaseGroup([replace(lease, data=data) for lease, data in zip(self.leases, moved, strict=True)])


@dataclass(frozen=True)
class Outcome:
    """How a job has ended in the step, alike on every rank.

    Attributes:
        lease: as it was given.
        metrics: of the training; empty when it failed.
        rollout: metrics of the whole rollout, if the job is one.
        failure: why its tenant is out; None when the job was trained.
    """

    lease: Lease
    metrics: dict[str, float]
    rollout: dict[str, float] | None = None
    failure: Failure | None = None
