"""What a training job minimises, per tenant: one small class per task, thin over ``torchrl.objectives``."""

from nexus_lightning.config import TenantConfig
from nexus_lightning.objectives.awr import AWRObjective
from nexus_lightning.objectives.iql import ChunkCritic, IQLObjective
from nexus_lightning.objectives.policy_gradient import PolicyGradientObjective
from nexus_lightning.objectives.sft import SFTObjective

Objective = SFTObjective | PolicyGradientObjective | AWRObjective | IQLObjective

__all__ = [
    "AWRObjective",
    "ChunkCritic",
    "IQLObjective",
    "Objective",
    "PolicyGradientObjective",
    "SFTObjective",
    "objective_class",
]


def objective_class(config: TenantConfig) -> type[Objective]:
    """By task and algorithm."""
    if config.task == "sft":
        return SFTObjective
    assert config.algorithm is not None, "validated with the config"
    if config.task == "rl":
        return PolicyGradientObjective
    return {"awr": AWRObjective, "iql": IQLObjective}[config.algorithm.name]
