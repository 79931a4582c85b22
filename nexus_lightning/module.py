"""One frozen backbone, many private heads: the LightningModule."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from tensordict import TensorDict
from torch import Tensor, nn

from nexus_lightning.backbone import Backbone
from nexus_lightning.checkpoint import read_payload
from nexus_lightning.features.grouping import EncodeRequest, EncodeStats, encode_together
from nexus_lightning.features.reuse import full_precision
from nexus_lightning.objectives import (
    AWRObjective,
    CoTrainingObjective,
    IQLObjective,
    Objective,
    PolicyGradientObjective,
    SFTObjective,
)
from nexus_lightning.schema import TenantSchema
from nexus_lightning.tenant import TenantSlot

if TYPE_CHECKING:
    from nexus_lightning.loop import Lease, LeaseGroup
    from nexus_lightning.runtime import Runtime


class NonFiniteLoss(ArithmeticError):
    """A tenant's loss is NaN or infinite; raised before its optimizer step."""


@dataclass
class _Update:
    """One tenant's job on its way through :meth:`MultiTenantModule.training_step`."""

    slot: TenantSlot
    lease: Lease
    batches: Iterator[TensorDict] = field(default_factory=lambda: iter(()))
    history: list[dict[str, Tensor]] = field(default_factory=list)
    failed: bool = False

    def metrics(self) -> dict[str, float]:
        """Means over the job's optimizer steps; a job of which no row counts (grpo) has none."""
        keys = self.history[0] if self.history else {}
        means = {k: float(torch.stack([step[k].float() for step in self.history]).mean()) for k in keys}
        if "counts" in self.lease.data.keys():
            means["counted_share"] = float(self.lease.data["counts"].float().mean())
        assert self.slot.optimizer is not None
        return {"loss": 0.0, **means, "lr": self.slot.optimizer.param_groups[0]["lr"]}


class MultiTenantModule(L.LightningModule):
    """A frozen :class:`Backbone` and a ModuleDict of tenant heads, each with its own optimizer.

    One Lightning "batch" is a :class:`~nexus_lightning.loop.LeaseGroup`: one training job of one tenant, or one job
    each of several tenants whose minibatches share backbone passes. Manual optimization; only the leased tenants'
    parameters, optimizers, schedules and random states change, each by its own loss. A tenant that raises or whose loss
    is not finite is quarantined with its reason and the run goes on with the others.

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
        self.critics = nn.ModuleDict({name: slot.critic for name, slot in slots.items() if slot.critic is not None})
        self.objectives = {
            name: build_objective(slot, partial(self._draw_demonstrations, slot)) for name, slot in slots.items()
        }
        self.runtime: Runtime | None = None  # set by the trainer
        self.encode_stats = EncodeStats()  # what the actor encoded (the reader and the server count their own)
        self._restored: dict[str, Any] | None = None

    # ------------------------------------------------------------------------------------------------- training

    def training_step(self, group: LeaseGroup, batch_idx: int) -> None:
        """leases -> features -> loss -> backward -> each tenant's step -> publish -> log -> complete."""
        del batch_idx
        assert self.runtime is not None
        start_s = self.runtime.events.now()
        updates = [_Update(self.slots[lease.job.tenant_id], lease) for lease in group.leases]
        for update in updates:
            self._guarded(update, self._prepare)
        while batches := self._next_batches(updates):
            self._encode_batches(batches)
            for update, batch in batches:
                self._guarded(update, self._step, batch)
        done = [update for update in updates if not update.failed]
        for update in done:
            self._guarded(update, self._finish)
        rows = {update.slot.name: update.lease.job.sample_count for update in done}
        kind = group.leases[0].job.task_type
        if rows:
            self.runtime.events.span("actor", rows, start_s, self.runtime.events.now(), kind=kind)
        for update in done:
            if not update.failed:
                padding = {"padding_share": self.encode_stats.padding_share} if self.encode_stats.calls else {}
                self.runtime.complete(update.slot, update.lease, update.metrics() | padding)

    def actor_forward(self, slot: TenantSlot, data: TensorDict) -> TensorDict:
        """How the policy that is about to train sees a rollout: its derived columns, see the objective's method.

        Without feature reuse the rollout is encoded here and once more when it trains.
        """
        objective, algorithm = self.objectives[slot.name], slot.spec.config.algorithm
        rl = objective.rl if isinstance(objective, CoTrainingObjective) else objective
        assert isinstance(rl, PolicyGradientObjective) and algorithm is not None
        data = cast(TensorDict, data.to(self.device))
        if "features" not in data.keys():
            data = self._with_features([(slot, data)])[0]
        slot.head.train()  # as while it trains: the first ratio is exactly 1
        parts = [rl.actor_forward(full_precision(part)) for part in data.split(algorithm.minibatch_size)]
        return cast(TensorDict, torch.cat(parts)).cpu()  # type: ignore[arg-type]

    def _guarded(self, update: _Update, action: Callable[..., Any], *args: Any) -> Any:
        """Run one tenant's part; what it raises takes that tenant out of the run and nobody else."""
        if update.failed:
            return None
        try:
            return action(update, *args)
        except Exception as error:
            assert self.runtime is not None
            update.failed = True
            self.runtime.quarantine(update.slot.name, f"{type(error).__name__}: {error}", traceback.format_exc())
            return None

    def _prepare(self, update: _Update) -> None:
        objective, data = self.objectives[update.slot.name], update.lease.data
        if objective.encode_whole_job and "features" not in data.keys():
            data = self._with_features([(update.slot, data)])[0]
        update.slot.head.train()
        update.batches = iter(objective.minibatches(data))

    def _next_batches(self, updates: list[_Update]) -> list[tuple[_Update, TensorDict]]:
        """The next minibatch of every tenant that still has one (drawn inside its random stream)."""

        def advance(update: _Update) -> TensorDict | None:
            with update.slot.rng.scope():
                return next(update.batches, None)

        drawn = [(update, self._guarded(update, advance)) for update in updates]
        return [(update, batch) for update, batch in drawn if batch is not None]

    def _encode_batches(self, batches: list[tuple[_Update, TensorDict]]) -> None:
        """Minibatches that bring observations get their features, all tenants' together (in place in ``batches``)."""
        raw = [i for i, (_, batch) in enumerate(batches) if "features" not in batch.keys()]
        if not raw:
            return
        try:
            encoded = self._with_features([(batches[i][0].slot, batches[i][1]) for i in raw])
        except Exception:  # one tenant's rows are bad: find out whose
            for i in raw:
                update, batch = batches[i]
                alone = self._guarded(update, lambda u, b: self._with_features([(u.slot, b)])[0], batch)
                batches[i] = (update, batch if alone is None else alone)
            return
        for i, batch in zip(raw, encoded, strict=True):
            batches[i] = (batches[i][0], batch)

    def _step(self, update: _Update, batch: TensorDict) -> None:
        """One optimizer step of one tenant."""
        slot = update.slot
        optimizer = self._lightning_optimizer(slot)
        with slot.rng.scope():
            losses = self.objectives[slot.name].loss(full_precision(batch), slot.jobs_completed)
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
        if slot.ema is not None:
            slot.ema.update_parameters(slot.head)
        if slot.critic is not None:
            slot.critic.update_slow()
        slot.optimizer_steps += 1
        update.history.append({k: v.detach() for k, v in losses.items()})

    def _finish(self, update: _Update) -> None:
        slot = update.slot
        slot.policy_version += 1
        slot.jobs_completed += 1
        slot.cursor = max(slot.cursor, int(update.lease.job.metadata["cursor"]))
        assert slot.optimizer is not None and self.runtime is not None
        slot.optimizer.zero_grad()  # an idle tenant keeps no gradients
        self.runtime.publish(slot)

    def _with_features(self, parts: list[tuple[TenantSlot, TensorDict]]) -> list[TensorDict]:
        """Rows with ``observation`` and ``language_instruction`` -> rows with ``features`` and ``state``."""
        requests = [
            EncodeRequest(
                data["observation"], list(data["language_instruction"]), slot.spec.schema, slot.head.feature_spec
            )
            for slot, data in parts
        ]
        encoded = []
        for (slot, data), features in zip(
            parts, encode_together(self.backbone, requests, self.encode_stats), strict=True
        ):
            if self.runtime is not None:
                self.runtime.passes[slot.name].add(encoded=len(data))
            rows = data.exclude("language_instruction", "observation")
            rows["features"], rows["state"] = features, data["observation", "state"]
            encoded.append(rows)
        return encoded

    def _draw_demonstrations(self, slot: TenantSlot, count: int) -> TensorDict:
        """The next ``count`` demonstrations of an RL tenant that mixes them in."""
        assert self.runtime is not None
        batch = self.runtime.demonstrations[slot.name].read(slot.demonstrations_drawn, count)
        slot.demonstrations_drawn += count
        return full_precision(batch.to(self.device))

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
            changed = TenantSchema(**payload.manifest["schema"]).differences(slot.spec.schema)
            if changed:
                raise ValueError(
                    f"tenant {name!r}: the checkpoint's schema differs from the configured one in {'; '.join(changed)}"
                )
            slot.load_tensors(payload.tensors)
            assert payload.rng is not None
            slot.load_state(payload.state, payload.optimizer, payload.rng)
        self.runtime.restore(saved)


def build_objective(slot: TenantSlot, draw: Callable[[int], TensorDict]) -> Objective:
    """What the tenant's jobs minimise; ``draw`` gives the demonstrations that an RL tenant mixes in."""
    config, head, normalizer = slot.spec.config, slot.head, slot.normalizer
    algorithm, dataset = config.algorithm, config.dataset
    supervised = None if dataset is None else SFTObjective(head, normalizer, dataset.batch_size)
    if config.task == "sft":
        assert supervised is not None
        return supervised
    assert algorithm is not None
    if config.task == "rl":
        rl = PolicyGradientObjective(head, normalizer, algorithm)
        if supervised is None or algorithm.sft_weight is None:
            return rl
        return CoTrainingObjective(rl, supervised, algorithm.sft_weight, draw)
    assert dataset is not None
    if slot.critic is None:
        return AWRObjective(head, normalizer, algorithm, dataset.batch_size)
    return IQLObjective(head, slot.critic, normalizer, algorithm, dataset.batch_size)
