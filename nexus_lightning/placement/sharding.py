"""FSDP2: the frozen backbone in shards, heads in shards, and whole copies of both where something needs them whole.

The shards are for the actor, whose backbone passes all ranks make in step. Rollouts, evaluations and the demonstration
reader run the backbone in threads of their own, whenever they like; a thread cannot call a collective without its
peers. If a tenant needs any of these, every rank also holds the backbone whole, on ``placement.inference.device``
(:func:`needs_whole_backbone`). What saves memory on the training device is therefore either a run of supervised
tenants with ``features.reuse=never`` and ``eval.episodes=0``, or ``placement.inference.device`` elsewhere.

A sharded head has a whole *replica* per rank, refreshed after each job: it is published, saved and exported.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import torch
from hydra.utils import get_class
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from nexus_lightning.backbone import Backbone
from nexus_lightning.config import BackbonePlacement, NexusConfig, split_head
from nexus_lightning.objectives import algorithm_of
from nexus_lightning.objectives.base import algorithm_class

if TYPE_CHECKING:
    from nexus_lightning.head import ActionHead
    from nexus_lightning.placement.plan import Plan

DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}


def needs_whole_backbone(config: NexusConfig) -> bool:
    """Whether some tenant runs the backbone outside the actor's steps."""
    for tenant in config.tenants.values():
        evaluated = tenant.environment is not None and tenant.eval.episodes > 0
        stored = tenant.task != "rl" and tenant.features.reuse != "never"
        head: Any = get_class(split_head(tenant.head)[0])
        if tenant.task == "rl" or evaluated or stored or head.continues_backbone:
            return True
    return False


def sharding_problems(config: NexusConfig, plan: Plan) -> list[str]:
    """What a plan with sharded heads cannot have."""
    if plan.heads_shard == 1:
        return []
    problems = []
    for name, tenant in config.tenants.items():
        where = f"tenants.{name}: placement.heads.shard={plan.heads_shard}"
        if tenant.head.get("ema_decay") is not None:
            problems.append(f"{where}: head.ema_decay averages whole weights after every step; set it to null")
        settings = algorithm_of(tenant)
        algorithm = algorithm_class(settings)
        if tenant.task == "rl" and algorithm.waits_for_actor(settings):
            problems.append(f"{where}: algorithm.proximal runs the head outside the steps; set it to false")
        if algorithm.has_networks():
            problems.append(
                f"{where}: algorithm {algorithm.__name__} has networks beside the head, which are not sharded; choose "
                "another algorithm"
            )
        if tenant.task == "rl" and name in plan.environments and len(plan.environments[name]) < plan.world_size:
            problems.append(
                f"{where}: every rank must run the head, so every rank needs simulators of it; remove "
                f"placement.environments.{name}"
            )
    return problems


def rank_problems(config: NexusConfig, plan: Plan) -> list[str]:
    """What a plan may hold and a run cannot do."""
    del plan
    device = config.placement.inference.device
    if device == "training":
        return []
    heads = {name: split_head(tenant.head)[0] for name, tenant in config.tenants.items()}
    return [
        f"tenants.{name}.head: {target.rsplit('.', 1)[-1]} continues the backbone that trains; use "
        f"placement.inference.device=training instead of {device}"
        for name, target in heads.items()
        if getattr(get_class(target), "continues_backbone", False)
    ]


def shard_backbone(backbone: Backbone, mesh: DeviceMesh, placement: BackbonePlacement) -> None:
    """In place: each of its units, then what is left. Every rank must enter ``encode`` together from now on."""
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": placement.reshard_after_forward,  # None would leave the root whole after a forward
        "mp_policy": MixedPrecisionPolicy(param_dtype=DTYPES[placement.param_dtype], cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy() if placement.cpu_offload else OffloadPolicy(),
    }
    for parameter in backbone.parameters():  # FSDP2 takes no other layout; channels-last weights are a CPU's shortcut
        parameter.data = parameter.data.contiguous()
    for unit in backbone.shardable_units():
        fully_shard(unit, **options)
    fully_shard(backbone, **options)
    register_fsdp_forward_method(backbone, "encode")


def shard_head(head: ActionHead, mesh: DeviceMesh) -> ActionHead:
    """In place, as one unit. Returns a whole replica for serving."""
    replica = copy.deepcopy(head)
    fully_shard(head, mesh=mesh, reshard_after_forward=False)
    for method in ("loss", "evaluate", "value"):
        register_fsdp_forward_method(head, method)
    return replica


def whole(value: Any) -> Any:
    """A shard's whole tensor (a collective); anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    return cast(DTensor, value.to(value.device_mesh.device_type)).full_tensor()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a shard; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def load_whole(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Whole tensors into a sharded module with exactly these names.

    Raises:
        ValueError: names differ.
    """
    own = module.state_dict()
    if own.keys() != tensors.keys():
        raise ValueError(f"names differ: {sorted(own.keys() ^ tensors.keys())}")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(shard_like(tensors[name], value))


def shard_like(tensor: Tensor, example: Tensor) -> Tensor:
    """This rank's shard of a tensor that every rank has whole."""
    if not isinstance(example, DTensor):
        return tensor.to(example.device)
    mesh = example.device_mesh
    return distribute_tensor(tensor.to(mesh.device_type), mesh, example.placements, src_data_rank=None)
