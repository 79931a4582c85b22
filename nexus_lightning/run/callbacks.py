"""Lightning callbacks of a run: what happens around its life, after its jobs, and when it is saved."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback

from nexus_lightning.run.leases import LeaseGroup
from nexus_lightning.run.live import LiveServer
from nexus_lightning.run.runtime import Runtime

LAST_CHECKPOINT = Path("checkpoints") / "last.ckpt"


class LocalCheckpointIO(TorchCheckpointIO):
    """Plain files in place of an fsspec transaction.

    A transaction belongs to all threads of the process: what another thread writes during a checkpoint (a dataset that
    a joining tenant records) would be taken into it, and the run would end with an AttributeError of fsspec.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike, storage_options: Any | None = None
    ) -> None:
        """Not atomic: :class:`TenantCheckpoint` renames what is complete."""
        if storage_options is not None:
            raise TypeError("storage_options: checkpoints are local files")
        torch.save(checkpoint, path)


class TenantCheckpoint(Callback):
    """Payloads first, then ``checkpoints/last.ckpt`` that names them: every n completed jobs and at the end.

    Lightning's own triggers count optimizer steps of all tenants together and can miss (see its ``global_step``).

    On a full disk a run of ``train.py`` ends with the error of :func:`~nexus_lightning.checkpoint.write_payload`, which
    names tenant, folder and what stays in force. Nothing that was stored is lost and nothing is left half written:
    ``last.ckpt`` is replaced as a whole, and the payloads that it names are kept until a later one is complete; with
    room again ``ckpt_path=last`` goes on from there. A resident run trains on and owes the payload
    (:meth:`Tenancy.unsaved <nexus_lightning.run.tenancy.Tenancy.unsaved>`).
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.every_n_jobs = runtime.config.trainer.checkpoint_every_n_jobs
        self.saved_at = runtime.tenancy.job_index
        self._restored: dict[str, Any] | None = None

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["nexus"] = self.runtime.checkpoint_state()

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Called before the optimizers exist."""
        self._restored = checkpoint["nexus"]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._restored is not None:
            self.runtime.restore(self._restored)
            self.runtime.module.hand_over_optimizers()  # a slot that goes on has built its own anew
            self._restored = None
        self.saved_at = self.runtime.tenancy.job_index

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self.runtime.tenancy.job_index - self.saved_at >= self.every_n_jobs:
            self.save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.save(trainer, now=True)

    def save(self, trainer: L.Trainer, now: bool = False) -> None:
        """Called on every rank; rank 0 writes. A resident run is resumed tenant by tenant, from the payloads alone."""
        self.runtime.tenancy.save_all(now)
        self.saved_at = self.runtime.tenancy.job_index
        if self.runtime.resident:
            return
        path = self.runtime.run_dir / LAST_CHECKPOINT
        temporary = path.with_suffix(".tmp")
        try:
            trainer.save_checkpoint(temporary)
            if self.runtime.ranks.first:
                with temporary.open("rb") as file:
                    os.fsync(file.fileno())
                temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


class JobLifecycle(Callback):
    """Closes the jobs of a step by their outcomes, which Lightning hands on from ``training_step``."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._start_s = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self._start_s = self.runtime.events.now()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: LeaseGroup, batch_idx: int
    ) -> None:
        outcomes = outputs["outcomes"]
        rows = {o.lease.job.tenant_id: o.lease.job.sample_count for o in outcomes if o.failure is None}
        if rows:
            events, kind = self.runtime.events, batch.leases[0].job.task_type
            events.span("actor", rows, self._start_s, events.now(), kind=kind)
        for outcome in outcomes:
            self.runtime.schedule.complete(outcome)


class RunLifecycle(Callback):
    """Starts producers once Lightning has restored a checkpoint; evaluates once training has ended."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._put_back: Callable[[], None] = lambda: None
        self._live: LiveServer | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Lightning has installed its own SIGTERM handler by now, which would exit without saving.
        self._put_back = self.runtime.install_signal_handlers()
        self.runtime.start()
        if self.runtime.ranks.first and not self.runtime.resident:  # the services have a door of their own
            self._live = LiveServer(self.runtime.run_dir, self.runtime.orders)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.runtime.finish()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.runtime.close()
        if self._live is not None:
            self._live.close()
            self._live = None
        self._put_back()


class ResumedConfig(Callback):
    """``config.yaml`` is the run's that went before until this one has restored everything and trains."""

    def __init__(self, write: Callable[[], object]) -> None:
        self.write = write

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.write()
