"""FSDP2: the frozen backbone in shards, heads in shards, and whole copies of both where something needs them whole.

The shards are for the actor, whose backbone passes all ranks make in step. Rollouts, evaluations and the demonstration
reader run the backbone in threads of their own, whenever they like; a thread cannot call a collective without its
peers. If a tenant needs any of these, every rank also holds the backbone whole, on ``placement.inference.device``
(``plan.needs_whole_backbone``). What saves memory on the training device is therefore either a run of supervised
tenants with ``features.reuse=never`` and ``eval.episodes=0``, or ``placement.inference.device`` elsewhere.

A sharded head has a whole *replica* per rank, refreshed after each job: it is published, saved and exported.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from nexus_lightning.backbone import Backbone
from nexus_lightning.config import BackbonePlacement

if TYPE_CHECKING:
    from nexus_lightning.head import ActionHead

DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}


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
