"""What a training job minimises, per tenant: one small class per task, thin over ``torchrl.objectives``."""

from nexus_lightning.config import TenantConfig
from nexus_lightning.objectives.awr import AWRObjective
from nexus_lightning.objectives.base import Objective
from nexus_lightning.objectives.cotraining import CoTrainingObjective
from nexus_lightning.objectives.iql import ChunkCritic, IQLObjective
from nexus_lightning.objectives.policy_gradient import PROXIMAL_LOG_PROB, PolicyGradientObjective
from nexus_lightning.objectives.sft import SFTObjective

__all__ = [
    "AWRObjective",
    "ChunkCritic",
    "CoTrainingObjective",
    "IQLObjective",
    "Objective",
    "PolicyGradientObjective",
    "SFTObjective",
    "job_fields",
]


def job_fields(config: TenantConfig) -> tuple[str, ...]:
    """Columns of a job's partition that the tenant's objective reads, besides the observation or its features."""
    if config.task == "sft":
        return SFTObjective.fields
    assert config.algorithm is not None, "validated with the config"
    if config.task == "rl":
        return PolicyGradientObjective.fields + ((PROXIMAL_LOG_PROB,) if config.algorithm.proximal else ())
    return {"awr": AWRObjective, "iql": IQLObjective}[config.algorithm.name].fields
