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
    """One leased job and its partition; with several ranks this rank's part of it, None when it has none."""

    job: Job
    meta: BatchMeta | None
    data: TensorDict | None


@dataclass
class LeaseGroup:
    """What Lightning sees as one batch: a leased job, or several of different tenants that share backbone passes.

    Opaque to Lightning on purpose: ``*-true`` precision would strip a bare TensorDict of its batch size.
    """

    leases: list[Lease]

    def to(self, device: torch.device, **kwargs: Any) -> LeaseGroup:
        return LeaseGroup(
            [
                Lease(lease.job, lease.meta, None if lease.data is None else lease.data.to(device, **kwargs))
                for lease in self.leases
            ]
        )


class LeaseStream:
    """The next leased job, for ever: ``__iter__`` is called every round and returns the same live stream.

    Ends (StopIteration) when the runtime says so: targets met, ``max_jobs``, ``max_time``, a stop signal. With several
    ranks all get the same jobs, each with its own part of the rows. Between two jobs it runs what other threads have
    asked for (:meth:`~nexus_lightning.runtime.Runtime.call`): tenants that join or leave, low-level training calls.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def __iter__(self) -> LeaseStream:
        return self

    def __next__(self) -> LeaseGroup:
        runtime = self.runtime
        while not runtime.finished():
            runtime.run_commands()
            if runtime.control is not None:
                jobs = runtime.control.next_jobs()
            else:
                runtime.prepare_jobs()
                jobs = runtime.lease_group(timeout_s=IDLE_TICK_S)
                runtime.tick()
            leases = [lease for job in jobs if (lease := runtime.read(job)) is not None]
            assert runtime.control is None or len(leases) == len(jobs), "what is ready on all ranks is there on all"
            if leases:
                return LeaseGroup(leases)
        raise StopIteration


class MultiTenantFitLoop(_FitLoop):
    """Lightning's loop, done as soon as the runtime has nothing more to train."""

    def __init__(self, trainer: Any, runtime: Runtime) -> None:
        super().__init__(trainer, min_epochs=0, max_epochs=-1)
        self.epoch_loop = _TrainingEpochLoop(trainer)
        self.runtime = runtime

    @property
    def done(self) -> bool:
        return bool(super().done) or self.runtime.finished()
