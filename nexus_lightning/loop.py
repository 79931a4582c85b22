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
    """One leased job and its partition. Opaque to Lightning on purpose: ``*-true`` precision would strip a bare
    TensorDict of its batch size."""

    job: Job
    meta: BatchMeta
    data: TensorDict

    def to(self, device: torch.device, **kwargs: Any) -> Lease:
        return Lease(self.job, self.meta, self.data.to(device, **kwargs))


class LeaseStream:
    """The next leased job, for ever: ``__iter__`` is called every round and returns the same live stream.

    Ends (StopIteration) when the runtime says so: targets met, ``max_jobs``, ``max_time``, a stop signal.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def __iter__(self) -> LeaseStream:
        return self

    def __next__(self) -> Lease:
        runtime = self.runtime
        while not runtime.finished():
            job = runtime.scheduler.lease_next(
                runtime.actor_versions(), timeout_s=IDLE_TICK_S, deadline_s=runtime.lease_deadline_s
            )
            runtime.tick()
            lease = None if job is None else runtime.read(job)
            if lease is not None:
                return lease
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
