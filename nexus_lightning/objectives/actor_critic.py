"""What policy gradients with a critic share: discounting, generalised advantages, the critic's warm-up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from nexus_lightning.bounds import setting
from nexus_lightning.objectives.policy_gradient import EXECUTED, PolicyGradient, PolicyGradientSettings


@dataclass
class CriticSettings(PolicyGradientSettings):
    """Of every policy gradient with a critic."""

    gamma: float = setting(0.99, least=0, most=1)  # per `discount_per`
    discount_per: str = setting("chunk", choices=("chunk", "step"))  # chunk: every decision | step: of the environment
    bootstrap_truncated: bool = True  # false: reaching the horizon is a failure (value 0), not a cut
    critic_coef: float = setting(0.5, least=0)
    value_warmup_jobs: int = setting(0, least=0)  # train only the critic for this many jobs


class ActorCritic(PolicyGradient):
    """Advantages by GAE (Schulman et al. 2016, arXiv 1506.02438)."""

    settings_class = CriticSettings
    needs_critic = True
    normalizes_advantages = True
    arrays = ("chunk", "log_probs", "advantage", "value_target", "executed?")

    @classmethod
    def gae_lambda(cls, settings: Any) -> float:
        """1: the whole return minus the critic's estimate."""
        del settings
        return 1.0

    @classmethod
    def ended(cls, following: TensorDict, settings: CriticSettings) -> Tensor:
        """Its end, or with ``bootstrap_truncated=false`` the horizon as well."""
        return following["terminated"] if settings.bootstrap_truncated else following["done"]

    @classmethod
    def advantage(cls, rollout: TensorDict, settings: CriticSettings) -> tuple[Tensor, Tensor, Tensor]:
        """Generalised advantages and their value targets; every decision counts."""
        from torchrl.objectives.value.functional import generalized_advantage_estimate

        following = cast(TensorDict, rollout["next"])
        gamma: float | Tensor = settings.gamma
        if settings.discount_per == "step":
            gamma = settings.gamma ** following[EXECUTED].sum(-1, keepdim=True).to(following["reward"].dtype)
        advantage, value_target = generalized_advantage_estimate(
            gamma,  # pyright: ignore[reportArgumentType]
            cls.gae_lambda(settings),
            rollout["state_value"],
            following["state_value"],
            following["reward"],
            following["done"],
            following["terminated"],
        )
        return advantage, value_target, torch.ones_like(advantage, dtype=torch.bool)

    def warming_up(self, jobs_completed: int) -> bool:
        """In the first ``value_warmup_jobs`` jobs."""
        return jobs_completed < self.settings.value_warmup_jobs
