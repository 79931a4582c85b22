"""The custom loop: leased training jobs are Lightning's batches.

``LeaseStream`` is the "dataloader" (a plain iterable), ``MultiTenantFitLoop`` a shell around Lightning's private
``_FitLoop`` that only adds when a run is done; everything else (hooks, callbacks, loggers, checkpoints) is inherited.
The private seam is guarded by a canary test. An int ``limit_train_batches`` turns Lightning's one-batch look-ahead off,
so a job is leased right before it trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from tensordict import TensorDict

from nexus_lightning.queues.jobs import Job
from nexus_lightning.queues.training import BatchMeta

if TYPE_CHECKING:
    from nexus_lightning.runtime import Runtime

#: How often an idle actor looks at stop requests, in seconds.
IDLE_TICK_S = 0.2


@dataclass
class Lease:
    """One leased job and its partition."""

    job: Job
    meta: BatchMeta
    data: TensorDict


@dataclass
class LeaseGroup:
    """What Lightning sees as one batch: a leased job, or several of different tenants that share backbone passes.

    Opaque to Lightning on purpose: ``*-true`` precision would strip a bare TensorDict of its batch size.
    """

    leases: list[Lease]

    def to(self, device: torch.device, **kwargs: Any) -> LeaseGroup:
        return LeaseGroup([Lease(lease.job, lease.meta, lease.data.to(device, **kwargs)) for lease in self.leases])


class LeaseStream:
    """The next leased job, for ever: ``__iter__`` is called every round and returns the same live stream.

    A job that brings observations instead of features (metadata ``encode``) takes ready jobs of other tenants along
    that the same backbone passes can serve: one job per tenant, so no tenant's own order changes.

    Ends (StopIteration) when the runtime says so: targets met, ``max_jobs``, ``max_time``, a stop signal.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def __iter__(self) -> LeaseStream:
        return self

    def __next__(self) -> LeaseGroup:
        runtime = self.runtime
        while not runtime.finished():
            runtime.prepare_jobs()
            job = runtime.scheduler.lease_next(
                runtime.actor_versions(), timeout_s=IDLE_TICK_S, deadline_s=runtime.lease_deadline_s
            )
            runtime.tick()
            lease = None if job is None else runtime.read(job)
            if lease is not None:
                return LeaseGroup([lease, *self._mates(lease.job)])
        raise StopIteration

    def _mates(self, first: Job) -> list[Lease]:
        runtime, key, taken, mates = self.runtime, first.metadata.get("encode"), {first.tenant_id}, []
        while key is not None and len(taken) < runtime.jobs_left():
            job = runtime.scheduler.lease_next(
                runtime.actor_versions(),
                timeout_s=0.0,
                deadline_s=runtime.lease_deadline_s,
                where=lambda job: job.metadata.get("encode") == key and job.tenant_id not in taken,
            )
            if job is None:
                break
            taken.add(job.tenant_id)
            lease = runtime.read(job)
            if lease is not None:
                mates.append(lease)
        return mates


class MultiTenantFitLoop(_FitLoop):
    """Lightning's loop, done as soon as the runtime has nothing more to train."""

    def __init__(self, trainer: Any, runtime: Runtime) -> None:
        super().__init__(trainer, min_epochs=0, max_epochs=-1)
        self.epoch_loop = _TrainingEpochLoop(trainer)
        self.runtime = runtime

    @property
    def done(self) -> bool:
        return bool(super().done) or self.runtime.finished()
