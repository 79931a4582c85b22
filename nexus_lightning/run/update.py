"""One job on its way through a step: what is known of it, and what a step does with one tenant's part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from nexus_lightning.objectives import algorithm_of
from nexus_lightning.objectives.base import Objective, algorithm_class
from nexus_lightning.ranks import Failure
from nexus_lightning.run.leases import Lease
from nexus_lightning.shards import local
from nexus_lightning.shares import Metric, Minibatch, Moments, RowWeights, Share, rows_of
from nexus_lightning.tenant import NonFiniteLoss, TenantSlot


@dataclass
class Part:
    """What a rank tells the others about its part of a job before they train it."""

    failure: Failure | None = None
    weights: RowWeights = field(default_factory=dict)
    advantages: Moments | None = None  # where they are normalised
    rollout: dict[str, Metric] | None = None


@dataclass
class Update:
    """One tenant's job on its way through :meth:`MultiTenantModule.training_step`.

    Attributes:
        data: the rows here that are trained.
        batches: this rank's part of every minibatch, None where it has no row of it, and the part's shares.
        shares: of the minibatch that is being trained.
        history: what the loss gave in each optimizer step.
        rollout: metrics of the whole rollout.
        failure: what went wrong here. The update goes on in the collectives until all ranks know.
        failed: what they have agreed on; it is out, on every rank.
    """

    slot: TenantSlot
    lease: Lease
    objective: Objective
    data: TensorDict | None = None
    batches: Iterator[tuple[TensorDict | None, dict[str, float]]] = field(default_factory=lambda: iter(()))
    shares: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, Tensor]] = field(default_factory=list)
    rollout: dict[str, float] | None = None
    failure: Failure | None = None
    failed: Failure | None = None


def build_objective(slot: TenantSlot, draw: Callable[[int], TensorDict], share: Share) -> Objective:
    """What the tenant's jobs minimise; ``draw`` gives the demonstrations that an RL tenant mixes in, ``share`` says
    which of them are this rank's."""
    config, settings = slot.spec.config, algorithm_of(slot.spec.config)
    batch_size = 1 if config.dataset is None else config.dataset.batch_size
    return algorithm_class(settings).build(slot.head, slot.normalizer, settings, batch_size, slot.critic, draw, share)


def finite_loss(slot: TenantSlot, loss: Tensor) -> Tensor:
    if not bool(torch.isfinite(loss.detach()).all()):
        where = f"tenant {slot.name!r}, optimizer step {slot.optimizer_steps}"
        raise NonFiniteLoss(f"{where}: loss is {float(loss.detach())}")
    return loss


def gradient_problem(slot: TenantSlot) -> str:
    """Which gradient is not finite, by the name that its parameter has in the tenant's payload."""
    modules = {"head": slot.head} | ({} if slot.critic is None else {"critic": slot.critic})
    for prefix, module in modules.items():
        for name, p in module.named_parameters():
            if p.grad is not None and not bool(local(p.grad).isfinite().all()):
                where = f"the gradient of {prefix}.{name} is not finite"
                return f"tenant {slot.name!r}, optimizer step {slot.optimizer_steps}: {where}"
    return f"tenant {slot.name!r}, optimizer step {slot.optimizer_steps}: the gradients are too large for one norm"


def trained_parameters(slot: TenantSlot) -> list[nn.Parameter]:
    """What the tenant's optimizer changes."""
    assert slot.optimizer is not None
    return [p for group in slot.optimizer.param_groups for p in group["params"]]


def common_dtype(tensors: list[nn.Parameter]) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def batches_of(
    data: TensorDict | None, cut: Iterable[Minibatch]
) -> Iterator[tuple[TensorDict | None, dict[str, float]]]:
    for minibatch in cut:
        empty = data is None or not len(minibatch.rows)
        yield None if empty else rows_of(data, minibatch.rows), minibatch.shares
