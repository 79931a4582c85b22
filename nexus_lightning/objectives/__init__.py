"""What a training job minimises, per tenant: one small class per task, thin over ``torchrl.objectives``."""

from nexus_lightning.objectives.awr import AWRObjective
from nexus_lightning.objectives.policy_gradient import PolicyGradientObjective
from nexus_lightning.objectives.sft import SFTObjective

__all__ = ["AWRObjective", "PolicyGradientObjective", "SFTObjective"]
