"""How Lightning runs the module on several ranks: replicated (DDP), or with sharded parts (FSDP2).

Neither wraps the module, and neither reduces a whole head's gradient by itself: which tenants train differs from step
to step, and a reducer that is built once costs every tenant's bytes and misses a tenant that joins. The module's
training step sums the active heads' gradients in one flat all_reduce (``MultiTenantModule._sum_gradients``).
"""

from __future__ import annotations

import copy
from typing import Any, override

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh

from nexus_lightning.config import NexusConfig
from nexus_lightning.placement.plan import Plan, needs_whole_backbone
from nexus_lightning.placement.sharding import shard_backbone, shard_head
from nexus_lightning.run.module import MultiTenantModule


def make_strategy(plan: Plan, config: NexusConfig) -> Any:
    """The plan's Lightning strategy; Lightning's own ``auto`` for one process."""
    if plan.strategy == "single":
        return "auto"
    return TenantDDP() if plan.strategy == "ddp" else TenantFSDP2(plan, config)


class TenantDDP(DDPStrategy):
    """Backbone and heads whole on every rank."""

    @override
    def configure_ddp(self) -> None:
        """No wrapper. Tenants' weights are alike on every rank before Lightning sees them (see ``trainer.train``)."""


class TenantFSDP2(ModelParallelStrategy):
    """Backbone copies in shards, heads whole or in shards. Tenants are saved and restored as payloads, by name."""

    def __init__(self, plan: Plan, config: NexusConfig) -> None:
        super().__init__(data_parallel_size=plan.world_size, tensor_parallel_size=1, save_distributed_checkpoint=False)
        self.plan, self.config = plan, config

    @override
    def setup(self, trainer: L.Trainer) -> None:
        """Shards first: the base class makes the optimizers."""
        module = self.lightning_module
        assert isinstance(module, MultiTenantModule)
        self._shard(module)
        super().setup(trainer)

    def _shard(self, module: MultiTenantModule) -> None:
        plan, device, placement = self.plan, self.root_device.type, self.config.placement
        mesh = init_device_mesh(device, (plan.replicate, plan.shard), mesh_dim_names=("replicate", "shard"))
        inference = placement.inference.device
        if inference != "training" or needs_whole_backbone(self.config):
            # the whole one is the inference server's and the readers'; the actor's shards are a copy
            whole = module.backbone
            module.backbone = copy.deepcopy(whole)
            whole.to(self.root_device if inference == "training" else inference)
        shard_backbone(module.backbone, mesh["shard"], placement.backbone)
        module.sharded_backbone = True
        if plan.heads_shard > 1:
            # with one copy there is nobody to sum with beyond the shards
            mesh = mesh if plan.replicate > 1 else mesh["shard"]
            for slot in module.slots.values():
                slot.replica = shard_head(slot.head, mesh)
            module.build_objectives()

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """As with the other strategies: the module restores its slots when it configures their optimizers."""
        return False

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    @override
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: the base class's would take a step with every optimizer that has not been used yet."""
        return {}

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        del weights_only
        return torch.load(checkpoint_path, map_location="cpu", weights_only=True)
