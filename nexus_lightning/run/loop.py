"""The custom loop: leased training jobs are Lightning's batches.

``LeaseStream`` is the "dataloader" (a plain iterable), ``MultiTenantFitLoop`` a shell around Lightning's private
``_FitLoop`` that only adds when a run is done; everything else (hooks, callbacks, loggers, checkpoints) is inherited.
The private seam is guarded by a canary test. An int ``limit_train_batches`` turns Lightning's one-batch look-ahead off,
so a job is leased right before it trains.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from nexus_lightning.run.leases import LeaseGroup
from nexus_lightning.run.schedule import Schedule
from nexus_lightning.run.tick import Tick


class LeaseStream:
    """The next leased job, for ever: ``__iter__`` is called every round and returns the same live stream.

    Ends (StopIteration) when the ranks have agreed to stop: targets met, ``max_jobs``, ``max_time``, a stop signal.
    With several ranks all get the same jobs, each with its own part of the rows.
    """

    def __init__(self, tick: Tick, schedule: Schedule) -> None:
        self.tick, self.schedule = tick, schedule

    def __iter__(self) -> LeaseStream:
        return self

    def __next__(self) -> LeaseGroup:
        while jobs := self.tick.next_jobs():
            leases = [lease for job in jobs if (lease := self.schedule.read(job)) is not None]
            assert self.tick.ranks.size == 1 or len(leases) == len(jobs), "what is ready on all ranks is there on all"
            if leases:
                return LeaseGroup(leases)
        raise StopIteration


class MultiTenantFitLoop(_FitLoop):
    """Lightning's loop, done as soon as the run has nothing more to train."""

    def __init__(self, trainer: Any, tick: Tick) -> None:
        super().__init__(trainer, min_epochs=0, max_epochs=-1)
        self.epoch_loop = _TrainingEpochLoop(trainer)
        self.tick = tick

    @property
    def done(self) -> bool:
        return bool(super().done) or self.tick.stopped
