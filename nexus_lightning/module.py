"""One frozen backbone, many private heads: the LightningModule."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from tensordict import TensorDict
from torch import Tensor, nn

from nexus_lightning.backbone import Backbone
from nexus_lightning.checkpoint import read_payload
from nexus_lightning.objectives import PPOObjective, SFTObjective
from nexus_lightning.tenant import TenantSlot

if TYPE_CHECKING:
    from nexus_lightning.loop import Lease
    from nexus_lightning.runtime import Runtime

#: Rows per backbone pass when a partition brings observations instead of features.
ENCODE_ROWS = 64


class NonFiniteLoss(ArithmeticError):
    """A tenant's loss is NaN or infinite; raised before its optimizer step."""


class MultiTenantModule(L.LightningModule):
    """A frozen :class:`Backbone` and a ModuleDict of tenant heads, each with its own optimizer.

    One Lightning "batch" is a :class:`~nexus_lightning.loop.Lease`: one training job of one tenant. Manual
    optimization; only the leased tenant's parameters, optimizer, schedule and random state change. A tenant that raises
    or whose loss is not finite is quarantined with its reason and the run goes on with the others.

    The backbone stays in eval mode, without gradients, and is left out of ``state_dict`` and of every checkpoint.
    """

    def __init__(self, backbone: Backbone, slots: dict[str, TenantSlot]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False  # weights live in tenant payloads, not in Lightning's checkpoint
        self.backbone = backbone
        self.slots = slots
        self.heads = nn.ModuleDict({name: slot.head for name, slot in slots.items()})
        self.normalizers = nn.ModuleDict({name: slot.normalizer for name, slot in slots.items()})
        self.objectives = {name: build_objective(slot) for name, slot in slots.items()}
        self.runtime: Runtime | None = None  # set by the trainer
        self.backbone_rows = 0  # observations encoded by the actor (the reader and the server count their own)
        self._restored: dict[str, Any] | None = None

    # ------------------------------------------------------------------------------------------------- training

    def training_step(self, lease: Lease, batch_idx: int) -> None:
        """lease -> features -> loss -> backward -> that tenant's step -> publish -> log -> complete."""
        del batch_idx
        assert self.runtime is not None
        slot = self.slots[lease.job.tenant_id]
        start_s = self.runtime.events.now()
        try:
            metrics = self._update(slot, lease.data)
            self._finish(slot, lease)
            self.runtime.publish(slot)
        except Exception as error:
            self.runtime.quarantine(slot.name, f"{type(error).__name__}: {error}", traceback.format_exc())
            return
        end_s = self.runtime.events.now()
        self.runtime.events.span("actor", {slot.name: lease.job.sample_count}, start_s, end_s, kind=lease.job.task_type)
        self.runtime.complete(slot, lease, metrics)

    def _update(self, slot: TenantSlot, data: TensorDict) -> dict[str, float]:
        """All optimizer steps of one job; returns the metrics' means over its steps."""
        objective = self.objectives[slot.name]
        optimizer = self._lightning_optimizer(slot)
        data = self._with_features(slot, data)
        history: list[dict[str, Tensor]] = []
        slot.head.train()
        with slot.rng.scope():
            for batch in objective.minibatches(data):
                losses = objective.loss(_full_precision(batch), slot.jobs_completed)
                loss = losses["loss"]
                if not bool(torch.isfinite(loss.detach()).all()):
                    where = f"tenant {slot.name!r}, optimizer step {slot.optimizer_steps}"
                    raise NonFiniteLoss(f"{where}: loss is {float(loss.detach())}")
                optimizer.zero_grad()
                self.manual_backward(loss)
                if slot.grad_clip_norm is not None:
                    self.clip_gradients(optimizer.optimizer, slot.grad_clip_norm, "norm")
                optimizer.step()
                assert slot.scheduler is not None
                slot.scheduler.step()
                slot.optimizer_steps += 1
                history.append({k: v.detach() for k, v in losses.items()})
        means = {k: float(torch.stack([h[k].float() for h in history]).mean()) for k in history[0]}
        assert slot.optimizer is not None
        return {**means, "lr": slot.optimizer.param_groups[0]["lr"]}

    def _finish(self, slot: TenantSlot, lease: Lease) -> None:
        slot.policy_version += 1
        slot.jobs_completed += 1
        slot.cursor = max(slot.cursor, int(lease.job.metadata["cursor"]))

    def _with_features(self, slot: TenantSlot, data: TensorDict) -> TensorDict:
        """Encode a rollout's observations once for the whole job; demonstrations bring their features along."""
        if "features" in data.keys():
            return data
        parts = []
        for rows in data.split(ENCODE_ROWS):
            parts.append(self.backbone(rows["observation"], list(rows["language_instruction"]), slot.spec.schema))
        self.backbone_rows += len(data)
        data = data.exclude("language_instruction")
        data["features"] = torch.cat(parts)
        data["state"] = data["observation", "state"]
        return data

    def _lightning_optimizer(self, slot: TenantSlot) -> LightningOptimizer:
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            if optimizer.optimizer is slot.optimizer:
                return optimizer
        raise AssertionError(f"tenant {slot.name!r} has no optimizer in the strategy")

    # ------------------------------------------------------------------------------------- Lightning's hooks

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        for slot in self.slots.values():
            slot.build_optimizer()
        if self._restored is not None:
            self._restore_slots(self._restored)
        return [slot.optimizer for slot in self.slots.values() if slot.optimizer is not None]

    def train(self, mode: bool = True) -> MultiTenantModule:
        super().train(mode)
        self.backbone.train(False)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {k: v for k, v in state.items() if "backbone." not in k}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Lightning's file keeps loops and callbacks; tenants are payload folders named here."""
        assert self.runtime is not None
        checkpoint["state_dict"] = {}
        checkpoint["optimizer_states"] = []  # positional in Lightning: a reordered tenant would get another's moments
        checkpoint["lr_schedulers"] = []
        checkpoint["nexus"] = self.runtime.checkpoint_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before ``configure_optimizers``, which restores the slots."""
        self._restored = checkpoint["nexus"]

    def _restore_slots(self, saved: dict[str, Any]) -> None:
        assert self.runtime is not None
        for name, slot in self.slots.items():
            entry = saved["tenants"].get(name)
            if entry is None:  # a tenant that was not in the interrupted run starts fresh
                continue
            payload = read_payload(self.runtime.run_dir / entry)
            if payload.manifest["signature"] != slot.spec.schema.signature:
                raise ValueError(f"tenant {name!r}: the checkpoint's schema differs from the configured one")
            slot.load_tensors(payload.tensors)
            assert payload.rng is not None
            slot.load_state(payload.state, payload.optimizer, payload.rng)
        self.runtime.restore(saved)


def build_objective(slot: TenantSlot) -> SFTObjective | PPOObjective:
    config = slot.spec.config
    if config.task == "sft":
        assert config.dataset is not None
        return SFTObjective(slot.head, slot.normalizer, config.dataset.batch_size)
    assert config.algorithm is not None
    return PPOObjective(slot.head, slot.normalizer, config.algorithm)


def _full_precision(batch: TensorDict) -> TensorDict:
    """Cached features are stored compactly; heads see float32."""
    features = batch.get("features").apply(lambda v: v.float() if v.dtype == torch.float16 else v)
    batch = batch.copy()
    batch["features"] = features
    return batch
