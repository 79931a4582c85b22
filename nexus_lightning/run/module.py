"""One frozen backbone, many private heads: the LightningModule."""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from nexus_lightning.backbone import Backbone, VLAFeature
from nexus_lightning.config import IDLE
from nexus_lightning.features.grouping import EncodeRequest, EncodeStats, cut_passes, encode_together, kinds_of
from nexus_lightning.features.reuse import PROBE_INSTRUCTION, blank_observation, full_precision
from nexus_lightning.objectives import algorithm_of
from nexus_lightning.objectives.base import Objective, RolloutSettings
from nexus_lightning.ranks import Failure, Ranks, agreed_failures
from nexus_lightning.run.leases import Lease, LeaseGroup, Outcome
from nexus_lightning.run.update import (
    Part,
    Update,
    batches_of,
    build_objective,
    common_dtype,
    finite_loss,
    gradient_problem,
    trained_parameters,
)
from nexus_lightning.shards import whole
from nexus_lightning.shares import REDUCTIONS, Moments, Share, reduce_metrics
from nexus_lightning.tenant import NonFiniteGradient, TenantSlot, derive_seed


class MultiTenantModule(L.LightningModule):
    """A frozen :class:`Backbone` and a ModuleDict of tenant heads, each with its own optimizer.

    One Lightning "batch" is a :class:`~nexus_lightning.run.leases.LeaseGroup`: one training job of one tenant, or one
    job each of several tenants whose minibatches share backbone passes. Manual optimization; only the leased tenants'
    parameters, optimizers, schedules and random states change, each by its own loss. A tenant that raises or whose loss
    is not finite is quarantined with its reason and the run goes on with the others.

    The backbone stays in eval mode, without gradients, and is left out of ``state_dict`` and of every checkpoint.
    """

    def __init__(self, backbone: Backbone, slots: dict[str, TenantSlot], ranks: Ranks | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False  # weights live in tenant payloads, not in Lightning's checkpoint
        self.backbone = backbone
        self.slots = slots
        self.ranks = Ranks() if ranks is None else ranks
        self.heads = nn.ModuleDict({name: slot.head for name, slot in slots.items()})
        self.normalizers = nn.ModuleDict({name: slot.normalizer for name, slot in slots.items()})
        self.critics = nn.ModuleDict({name: slot.critic for name, slot in slots.items() if slot.critic is not None})
        self.build_objectives()
        self.sharded_backbone = False  # the strategy's doing
        self.encode_stats = EncodeStats()  # what the actor encoded (the reader and the server count their own)

    def build_objectives(self) -> None:
        """What every tenant minimises; again when its head has been replaced by a sharded one."""
        self.objectives = {
            name: self._objective(slot) for name, slot in self.slots.items() if slot.spec.config.task != IDLE
        }

    def _objective(self, slot: TenantSlot) -> Objective:
        return build_objective(slot, partial(self._draw_demonstrations, slot), Share(self.ranks.rank, self.ranks.size))

    # -------------------------------------------------------------------------------- tenants that come and go

    def add_tenant(self, slot: TenantSlot) -> None:
        """A slot that the runtime has just taken into :attr:`slots`; between two jobs only, like all of this section.

        Inside ``training_step`` Lightning holds the optimizers that it wraps. A new list, because the wrappers are made
        when it is assigned.
        """
        self.heads[slot.name], self.normalizers[slot.name] = slot.head, slot.normalizer
        for part in (slot.head, slot.normalizer, slot.ema):
            self._place(part)
        slot.build_optimizer()
        self.follow_workload(slot)

    def follow_workload(self, slot: TenantSlot) -> None:
        """A tenant's optimizer, Q networks and objective have changed."""
        if slot.name in self.critics:
            self.critics.pop(slot.name)
        if slot.critic is not None:
            self.critics[slot.name] = slot.critic
            self._place(slot.critic)
        self.objectives.pop(slot.name, None)
        if slot.spec.config.task != IDLE:
            self.objectives[slot.name] = self._objective(slot)
        self.hand_over_optimizers()

    def remove_tenant(self, name: str) -> None:
        """Forget a tenant that the runtime has taken out of :attr:`slots`."""
        for parts in (self.heads, self.normalizers, self.critics):
            if name in parts:
                parts.pop(name)
        self.objectives.pop(name, None)
        self.hand_over_optimizers()

    def _place(self, part: nn.Module | None) -> None:
        if part is not None:
            self.trainer.precision_plugin.convert_module(part).to(self.device)

    def hand_over_optimizers(self) -> None:
        """Lightning steps the optimizers that its strategy holds: tell it which there are now."""
        optimizers = [slot.optimizer for slot in self.slots.values() if slot.optimizer is not None]
        self.trainer.strategy.optimizers = optimizers

    # ------------------------------------------------------------------------------------------------- training

    def training_step(self, group: LeaseGroup, batch_idx: int) -> dict[str, list[Outcome]]:
        """leases -> features -> loss -> backward -> each tenant's optimizer step -> outcomes.

        Every rank does the same for its part of each job's rows (lines marked * are collectives; with one rank they
        answer at once). Publication, logging and the end of the jobs follow in the callback that gets the outcomes.

        Returns:
            ``{"outcomes": [...]}``, one for each lease, alike on every rank.
        """
        del batch_idx
        updates = [self._update(lease) for lease in group.leases]
        for update in updates:
            self._guarded(update, self._prepare)
        self._encode_whole_jobs(updates)  # *
        self._cut_between_ranks(updates)  # *
        while batches := self._next_batches(updates):
            self._encode_batches(batches)
            for update, batch in batches:
                if update.slot.replica is None:
                    self._guarded(update, self._backward, batch)
                else:
                    self._backward_in_step(update, batch)  # *
            self._sum_gradients([update for update, _ in batches])  # *
            for update, _ in batches:
                self._guarded(update, self._step)
                update.lease.renew()
        for update in updates:
            if update.slot.replica is not None and not self._failed_somewhere(update):  # *
                update.slot.refresh_replica()
            self._guarded(update, self._finish)
        metrics = self._sum_metrics(updates)  # *
        return {
            "outcomes": [
                Outcome(update.lease, metrics.get(update.slot.name, {}), update.rollout, update.failed)
                for update in updates
            ]
        }

    def _update(self, lease: Lease) -> Update:
        name = lease.job.tenant_id
        return Update(self.slots[name], lease, self.objectives[name])

    def actor_forward(self, slot: TenantSlot, data: TensorDict, backbone: Backbone) -> TensorDict:
        """How the policy that is about to train sees a rollout: its derived columns, see the objective's method.

        Without feature reuse the rollout is encoded here, by a whole ``backbone`` (the ranks do not come here in step),
        and once more when it trains.
        """
        objective, settings = self.objectives[slot.name], algorithm_of(slot.spec.config)
        assert isinstance(settings, RolloutSettings), "validated with the config"
        data = cast(TensorDict, data.to(self.device))
        if "features" not in data.keys():
            data = self._with_features([(slot, data)], backbone=backbone)[0]
        slot.head.train()  # as while it trains: the first ratio is exactly 1
        parts = [objective.actor_forward(full_precision(part)) for part in data.split(settings.minibatch_size)]
        return cast(TensorDict, torch.cat(parts)).cpu()  # type: ignore[arg-type]

    def _guarded(self, update: Update, action: Callable[..., Any], *args: Any) -> Any:
        """Run one tenant's part; what it raises takes that tenant out of the run and nobody else."""
        if update.failed is not None or update.failure is not None:
            return None
        try:
            return action(update, *args)
        except Exception as error:
            update.failure = Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
            return None

    def _prepare(self, update: Update) -> None:
        data = update.lease.data
        update.slot.head.train()
        if data is None:
            return
        if update.objective.encode_whole_job and "features" not in data.keys() and not self.sharded_backbone:
            data = self._with_features([(update.slot, data)])[0]
        update.data = data

    def _next_batches(self, updates: list[Update]) -> list[tuple[Update, TensorDict | None]]:
        """The next minibatch of every tenant that still has one."""
        drawn = []
        for update in updates:
            part = None if update.failed is not None else self._guarded(update, self._next_batch)
            if part is not None:
                batch, update.shares = part
                drawn.append((update, batch))
        return drawn

    @staticmethod
    def _next_batch(update: Update) -> tuple[TensorDict | None, dict[str, float]] | None:
        with update.slot.rng.scope():  # an order is drawn alike on every rank, and as with one rank
            return next(update.batches, None)

    def _encode_batches(self, batches: list[tuple[Update, TensorDict | None]]) -> None:
        """Minibatches that bring observations get their features, all tenants' together (in place in ``batches``)."""
        raw = [(i, u, b) for i, (u, b) in enumerate(batches) if b is not None and "features" not in b.keys()]
        if self.sharded_backbone:
            found = self._encode_in_step([(u, b) for _, u, b in raw], [update for update, _ in batches])
            for (i, update, batch), features in zip(raw, found, strict=True):
                batches[i] = (update, batch if features is None else features)
            return
        if not raw:
            return
        try:
            encoded = self._with_features([(update.slot, batch) for _, update, batch in raw])
        except Exception:  # one tenant's rows are bad: find out whose
            for i, update, batch in raw:
                alone = self._guarded(update, lambda u, b: self._with_features([(u.slot, b)])[0], batch)
                batches[i] = (update, batch if alone is None else alone)
            return
        for (i, update, _), batch in zip(raw, encoded, strict=True):
            batches[i] = (update, batch)

    def _backward(self, update: Update, batch: TensorDict | None) -> None:
        """Loss and gradients of one tenant's minibatch; none of them when it is empty here."""
        with self._scope(update):
            loss = self._loss(update, batch)
            if loss is not None:
                self.manual_backward(loss)

    def _scope(self, update: Update) -> contextlib.AbstractContextManager[None]:
        """The tenant's random stream; with several ranks one of this rank and step, because the rows are its own."""
        slot = update.slot
        if self.ranks.size == 1:
            return slot.rng.scope()
        return slot.rng.scope(derive_seed(slot.spec.seed, "loss", self.ranks.rank, slot.optimizer_steps))

    def _loss(self, update: Update, batch: TensorDict | None) -> Tensor | None:
        slot = update.slot
        self._lightning_optimizer(slot).zero_grad()
        if batch is None and not update.objective.trains_without_rows:
            update.history.append({})
            return None
        given = None if batch is None else full_precision(batch)
        losses = update.objective.loss(given, slot.jobs_completed, update.shares)
        loss = finite_loss(slot, losses["loss"])
        update.history.append({k: v.detach() for k, v in losses.items()})
        return loss

    def _step(self, update: Update) -> None:
        self.step_slot(update.slot, update.slot.grad_clip_norm)

    def step_slot(self, slot: TenantSlot, grad_clip_norm: float | None) -> float:
        """One optimizer step of one tenant. Returns the norm of its gradients before clipping.

        Raises:
            NonFiniteGradient: as a finite loss can have (the root of 0); nothing has changed.
        """
        parameters = [p for p in trained_parameters(slot) if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([cast(Tensor, p.grad) for p in parameters])
        total = float(whole(norm))
        if not math.isfinite(total):
            raise NonFiniteGradient(gradient_problem(slot))
        if grad_clip_norm is not None:  # Lightning's clip_gradients would take the norm once more
            torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip_norm, norm)
        self._lightning_optimizer(slot).step()
        assert slot.scheduler is not None
        slot.scheduler.step()
        if slot.ema is not None:
            slot.ema.update_parameters(slot.head)
        if slot.critic is not None:
            slot.critic.update_slow()
        slot.optimizer_steps += 1
        return total

    def _finish(self, update: Update) -> None:
        slot = update.slot
        slot.check_finite()
        slot.policy_version += 1
        slot.jobs_completed += 1
        slot.cursor = max(slot.cursor, int(update.lease.job.metadata["cursor"]))
        assert slot.optimizer is not None
        slot.optimizer.zero_grad()  # an idle tenant keeps no gradients

    # ------------------------------------------------------------------------------- low-level calls of a tenant
    # What `training_step` does with a minibatch, for algorithms of the tenant's own (services). Between two jobs.

    def add_gradients(self, slot: TenantSlot, objective: Objective, batch: TensorDict) -> dict[str, float]:
        """Loss of a batch of the tenant's own; its gradients are added to those that are there.

        Args:
            slot: of a tenant without a workload.
            objective: gives the loss.
            batch: ``[B]``, the fields that the objective names, with observations or features.

        Returns:
            What the objective's loss gives, as numbers.

        Raises:
            NonFiniteLoss: before anything is added.
        """
        slot.head.train()
        batch = cast(TensorDict, batch.to(self.device))
        if "features" not in batch.keys():
            batch = self._with_features([(slot, batch)])[0]
        with slot.rng.scope():
            losses = objective.loss(full_precision(batch), slot.jobs_completed)
            loss = finite_loss(slot, losses["loss"])
            try:
                self.manual_backward(loss)
            except Exception:
                slot.head.zero_grad()  # half a gradient is none
                raise
        return {name: float(value.detach()) for name, value in losses.items()}

    def step_with_gradients(self, slot: TenantSlot, lr: float | None, grad_clip_norm: float | None) -> float:
        """The optimizer step with the gradients added so far. The slot's own schedule moves on, too.

        Args:
            slot: as above.
            lr: of this step, in place of the schedule's.
            grad_clip_norm: in place of the head's setting.

        Returns:
            The norm of the gradients before clipping.

        Raises:
            NonFiniteGradient: all are dropped and nothing has changed.
            ValueError: there are none.
        """
        assert slot.optimizer is not None
        if all(p.grad is None for p in trained_parameters(slot)):
            raise ValueError(f"tenant {slot.name!r}: there are no gradients; call forward_backward first")
        scheduled = slot.optimizer.param_groups[0]["lr"]
        if lr is not None:
            slot.optimizer.param_groups[0]["lr"] = lr  # until the schedule sets its own again, in this very step
        try:
            return self.step_slot(slot, slot.grad_clip_norm if grad_clip_norm is None else grad_clip_norm)
        except NonFiniteGradient:
            slot.optimizer.param_groups[0]["lr"] = scheduled
            raise
        finally:
            slot.optimizer.zero_grad()

    # -------------------------------------------------------------------------------------------- several ranks

    def _cut_between_ranks(self, updates: list[Update]) -> None:
        """Ranks tell each other about their rows; then each knows its part of every minibatch and what it weighs."""
        parts = self.ranks.gather({update.slot.name: self._part(update) for update in updates})
        self._agree(updates, [{n: p.failure for n, p in by.items() if p.failure is not None} for by in parts])
        for update in updates:
            self._guarded(update, self._cut, [by_rank[update.slot.name] for by_rank in parts])

    def _part(self, update: Update) -> Part:
        """This rank's answer to the others' question about one job."""

        def look(update: Update) -> Part:
            objective, data = update.objective, update.data
            part = Part(rollout=update.lease.rollout)
            if data is None:
                part.weights = {name: torch.zeros(0) for name in objective.means}
                return part
            if objective.normalizes_advantages:
                part.advantages = Moments.of(data["advantage"])
            update.data = counted = objective.counted(data)
            part.weights = objective.row_weights(counted)
            return part

        part = self._guarded(update, look)
        return Part(update.failure) if part is None else part

    def _cut(self, update: Update, parts: list[Part]) -> None:
        data = update.data
        moments = [part.advantages for part in parts if part.advantages is not None]
        if moments and data is not None:
            data = update.data = data.copy()
            data["advantage"] = Moments.normalize(data["advantage"], moments)
        if rollouts := [part.rollout for part in parts if part.rollout is not None]:
            update.rollout = reduce_metrics(rollouts)
        update.batches = batches_of(data, update.objective.cut([part.weights for part in parts], self.ranks.rank))

    def _encode_whole_jobs(self, updates: list[Update]) -> None:
        """Rollouts without features, through a sharded backbone."""
        if not self.sharded_backbone:
            return
        raw = [
            (update, update.data)
            for update in updates
            if update.data is not None and "features" not in update.data.keys() and update.objective.encode_whole_job
        ]
        for (update, _), features in zip(raw, self._encode_in_step(raw, updates), strict=True):
            update.data = features

    @torch.no_grad()
    def _encode_in_step(self, items: list[tuple[Update, TensorDict]], updates: list[Update]) -> list[TensorDict | None]:
        """Rows with observations -> rows with features through the sharded backbone; None where it failed.

        A pass is a collective: whatever can go wrong with rows is done first, then the ranks agree how many passes the
        busiest one needs, and the others make up the number with passes over a blank image.
        """
        prepared: list[tuple[Update, TensorDict, list[tuple[list[int], TensorDict]]]] = []

        def prepare(update: Update, data: TensorDict) -> list[tuple[list[int], TensorDict]]:
            requests = self._requests([(update.slot, data)])
            kinds, schema = kinds_of(requests), requests[0].schema
            cut = cut_passes(requests)
            return [(rows, self.backbone.preprocess(seen, texts, schema, kinds)) for rows, seen, texts in cut]

        for update, data in items:
            passes = self._guarded(update, prepare, data)
            prepared.append((update, data, passes or []))
        mine = sum(len(passes) for _, _, passes in prepared)
        spare = self.ranks.most(mine) - mine
        found: list[TensorDict | None] = []
        for update, data, passes in prepared:
            kinds = (update.slot.head.feature_spec.kind,)
            encoded = ((rows, self.backbone.encode(given.to(self.device), kinds)) for rows, given in passes)
            found.append(self._with_features([(update.slot, data)], encoded)[0] if passes else None)
        if spare:
            slot = updates[0].slot
            blank, kinds = blank_observation(slot.spec.schema), (slot.head.feature_spec.kind,)
            given = self.backbone.preprocess(blank, [PROBE_INSTRUCTION], slot.spec.schema, kinds)
            for _ in range(spare):
                self.backbone.encode(given.to(self.device), kinds)
        return found

    def _backward_in_step(self, update: Update, batch: TensorDict | None) -> None:
        """:meth:`_backward` of a head in shards, whose weights and gradients are collectives: the ranks agree before
        each of them that nobody has failed. A minibatch that is empty here is made up by a row that weighs nothing."""
        if self._failed_somewhere(update):
            return
        head = cast(FSDPModule, update.slot.head)
        head.unshard()
        if batch is None:
            assert update.data is not None, "sharding_problems: every rank has rows"
            batch = update.data[:1]
        with self._scope(update):
            loss = self._guarded(update, self._loss, batch)
        if self._failed_somewhere(update):
            head.reshard()
            return
        assert loss is not None
        # FSDP2 divides the summed gradients by the number of ranks; ours are summands of the global mean already. (Its
        # set_gradient_divide_factor needs a reduction that gloo does not have.)
        self.manual_backward(loss * self.ranks.size)

    def _failed_somewhere(self, update: Update) -> bool:
        """Whether a rank has failed at this update; then it is out, everywhere."""
        if update.failed is None and self.ranks.most(update.failure is not None):
            self._exchange_failures([update])
        return update.failed is not None

    def _sum_gradients(self, updates: list[Update]) -> None:
        """One flat all_reduce for all tenants of this step, and no other byte: for each its gradients, which of its
        parameters have one, and whether it failed on some rank. Who failed somewhere is taken out everywhere."""
        ranks = self.ranks
        if ranks.size == 1:
            self._exchange_failures(updates)
            return
        layout = [(update, trained_parameters(update.slot)) for update in updates if update.slot.replica is None]
        if not layout:
            return
        header = [
            torch.tensor([float(update.failure is not None), *(float(p.grad is not None) for p in parameters)])
            for update, parameters in layout
        ]
        dtype = common_dtype([p for _, parameters in layout for p in parameters])
        pieces: list[Tensor] = []
        for (update, parameters), flags in zip(layout, header, strict=True):
            usable = update.failure is None
            pieces.append(flags.to(self.device, dtype))
            for p in parameters:
                gradient = p.grad if usable and p.grad is not None else torch.zeros_like(p)
                pieces.append(gradient.reshape(-1).to(dtype))
        flat = torch.cat(pieces)
        ranks.sum_gradients(flat)
        place, failed = 0, False
        for _, parameters in layout:
            flags = flat[place : place + 1 + len(parameters)].tolist()
            place += 1 + len(parameters)
            failed |= flags[0] > 0
            for p, present in zip(parameters, flags[1:], strict=True):
                gradient = flat[place : place + p.numel()].view_as(p)
                place += p.numel()
                p.grad = gradient.to(p.dtype) if present else None
        if failed:
            self._exchange_failures(updates)

    def _exchange_failures(self, updates: list[Update]) -> None:
        mine = {update.slot.name: update.failure for update in updates if update.failure is not None}
        self._agree(updates, self.ranks.gather(mine))

    def _agree(self, updates: list[Update], failures: list[dict[str, Failure]]) -> None:
        """Take out, on every rank, whoever failed on one."""
        agreed = agreed_failures(failures)
        for update in updates:
            if update.failed is None:
                update.failed = agreed.get(update.slot.name)

    def _sum_metrics(self, updates: list[Update]) -> dict[str, dict[str, float]]:
        """What is logged of every tenant that has come through, over all ranks' rows of the job."""
        mine = {}
        for update in updates:
            rows = 0 if update.lease.data is None else len(update.lease.data)
            keys = dict.fromkeys(key for step in update.history for key in step)
            values = {k: torch.stack([s[k].float() for s in update.history if k in s]) for k in keys}
            reduced = {k: float(getattr(v, self._reduction(update, k))()) for k, v in values.items()}
            counted = 0 if update.data is None else len(update.data)
            mine[update.slot.name] = (update.failure, reduced, len(update.history), rows, counted)
        by_rank = self.ranks.gather(mine)
        self._agree(updates, [{n: f for n, (f, *_) in mine.items() if f is not None} for mine in by_rank])
        metrics = {}
        for update in updates:
            if update.failed is not None:
                continue
            name, optimizer = update.slot.name, update.slot.optimizer
            assert optimizer is not None
            _, values, steps, rows, counted = zip(*(mine[name] for mine in by_rank), strict=True)
            means = {}
            for key in dict.fromkeys(key for part in values for key in part):
                by_steps = steps[0] if update.objective.metrics.get(key, "mean") == "mean" else 1
                reduce = REDUCTIONS[self._reduction(update, key)]
                means[key] = reduce(part[key] for part in values if key in part) / by_steps
            if update.lease.job.task_type == "rl":
                means["counted_share"] = sum(counted) / sum(rows)
            padding = {"padding_share": self.encode_stats.padding_share} if self.encode_stats.calls else {}
            metrics[name] = {"loss": 0.0, **means, "lr": optimizer.param_groups[0]["lr"], **padding}
        return metrics

    @staticmethod
    def _reduction(update: Update, key: str) -> str:
        """How a metric's values come together; those of a mean are summands of the minibatch's."""
        how = update.objective.metrics.get(key, "mean")
        return "sum" if how == "mean" else how

    @staticmethod
    def _requests(parts: list[tuple[TenantSlot, TensorDict]]) -> list[EncodeRequest]:
        return [
            EncodeRequest(
                data["observation"], list(data["language_instruction"]), slot.spec.schema, slot.head.feature_spec
            )
            for slot, data in parts
        ]

    def _with_features(
        self,
        parts: list[tuple[TenantSlot, TensorDict]],
        passes: Iterator[tuple[list[int], VLAFeature]] | None = None,
        backbone: Backbone | None = None,
    ) -> list[TensorDict]:
        """Rows with ``observation`` and ``language_instruction`` -> rows with ``features`` and ``state``."""
        found = encode_together(backbone or self.backbone, self._requests(parts), self.encode_stats, passes)
        encoded = []
        for (slot, data), features in zip(parts, found, strict=True):
            slot.passes.add(encoded=len(data))
            rows = data.exclude("language_instruction", "observation")
            rows["features"], rows["state"] = features, data["observation", "state"]
            encoded.append(rows)
        return encoded

    def _draw_demonstrations(self, slot: TenantSlot, count: int) -> TensorDict:
        """The next ``count`` demonstrations of an RL tenant that mixes them in."""
        assert slot.demonstrations is not None
        batch = slot.demonstrations.read(slot.demonstrations_drawn, count)
        slot.demonstrations_drawn += count
        return full_precision(batch.to(self.device))

    def _lightning_optimizer(self, slot: TenantSlot) -> LightningOptimizer:
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            if optimizer.optimizer is slot.optimizer:
                return optimizer
        raise AssertionError(f"tenant {slot.name!r} has no optimizer in the strategy")

    # ------------------------------------------------------------------------------------- Lightning's hooks

    def configure_model(self) -> None:
        """Nothing: the strategy shards what it places (Lightning wants this method overridden for FSDP2)."""

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        for slot in self.slots.values():
            slot.build_optimizer()
        return [slot.optimizer for slot in self.slots.values() if slot.optimizer is not None]

    def train(self, mode: bool = True) -> MultiTenantModule:
        super().train(mode)
        self.backbone.train(False)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {k: v for k, v in state.items() if "backbone." not in k}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Lightning's file keeps loops and callbacks; tenants are payload folders that a callback names in it."""
        checkpoint["state_dict"] = {}
        checkpoint["optimizer_states"] = []  # positional in Lightning: a reordered tenant would get another's moments
        checkpoint["lr_schedulers"] = []
