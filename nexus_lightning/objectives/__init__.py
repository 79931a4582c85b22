"""What a training job minimises, per tenant: one small class per task, thin over ``torchrl.objectives``."""

from nexus_lightning.objectives.ppo import PPOObjective
from nexus_lightning.objectives.sft import SFTObjective

__all__ = ["PPOObjective", "SFTObjective"]
