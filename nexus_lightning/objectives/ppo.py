"""Proximal policy optimization."""

from __future__ import annotations

from dataclasses import dataclass

from nexus_lightning.bounds import setting
from nexus_lightning.objectives.actor_critic import ActorCritic, CriticSettings
from nexus_lightning.objectives.policy_gradient import ClipSettings


@dataclass
class PPOSettings(ClipSettings, CriticSettings):
    """See ``conf/algorithm/ppo.yaml``."""

    gae_lambda: float = setting(0.95, least=0, most=1)


class PPO(ActorCritic):
    """``torchrl.objectives.ClipPPOLoss`` (Schulman et al. 2017, arXiv 1707.06347), advantages by GAE."""

    task = "rl"
    default = True
    settings_class = PPOSettings
    arrays = ("chunk", "log_probs", "advantage", "value_target", "state_value", "executed?")

    @classmethod
    def gae_lambda(cls, settings: PPOSettings) -> float:
        """A setting."""
        return settings.gae_lambda
