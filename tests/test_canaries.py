"""Canaries: every private or fragile seam of Lightning and TorchRL that the framework leans on."""

from __future__ import annotations

import inspect

import lightning as L
import pytest
import torch
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torchrl.collectors import Collector
from torchrl.modules.inference_server import InferenceServer, ThreadingTransport
from torchrl.objectives import ClipPPOLoss, PPOLoss

from nexus_lightning.optim import TenantAdamW


def test_the_fit_loop_still_decides_by_done_and_owns_an_epoch_loop():
    assert isinstance(inspect.getattr_static(_FitLoop, "done"), property)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert isinstance(trainer.fit_loop, _FitLoop)
    assert isinstance(trainer.fit_loop.epoch_loop, _TrainingEpochLoop)
    loop = _FitLoop(trainer, min_epochs=0, max_epochs=-1)
    loop.epoch_loop = _TrainingEpochLoop(trainer)
    trainer.fit_loop = loop
    assert trainer.fit_loop is loop


def test_adamw_looks_for_an_accelerator_in_the_method_that_we_override(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked.append(1))
    for optimizer, times in ((torch.optim.AdamW, 1), (TenantAdamW, 0)):
        asked.clear()
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        optimizer([parameter], fused=True).step()
        assert len(asked) == times


def test_an_int_limit_turns_the_look_ahead_off():
    order = []

    class Stream:
        def __iter__(self):
            for i in range(4):
                order.append(f"lease{i}")
                yield torch.zeros(1)

    class Module(L.LightningModule):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            order.append(f"train{batch_idx}")

        def configure_optimizers(self):
            return None

    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), train_dataloaders=Stream())
    assert order == ["lease0", "train0", "lease1", "train1", "lease2", "train2"]


def test_the_inference_server_still_serves_through_our_override():
    parameters = list(inspect.signature(InferenceServer._serve_batch).parameters)
    assert parameters == ["self", "items", "callbacks", "submitted_at"]
    assert {"max_batch_size", "min_batch_size", "timeout", "policy_version_key"} <= set(
        inspect.signature(InferenceServer.__init__).parameters
    )
    assert hasattr(ThreadingTransport, "drain_with_timing")


@pytest.mark.parametrize(
    "name", ["reset_at_each_iter", "use_buffers", "track_traj_ids", "auto_register_policy_transforms"]
)
def test_the_collector_still_takes(name):
    assert name in inspect.signature(Collector.__init__).parameters


def test_ppo_still_trains_the_heads_own_parameters():
    assert "functional" in inspect.signature(PPOLoss.__init__).parameters and issubclass(ClipPPOLoss, PPOLoss)
