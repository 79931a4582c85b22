"""REINFORCE with a critic as baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensordict.nn import TensorDictModule
from torch import Tensor

from nexus_lightning.bounds import setting
from nexus_lightning.objectives.actor_critic import ActorCritic, CriticSettings

if TYPE_CHECKING:
    from torchrl.objectives import LossModule


@dataclass
class ReinforceSettings(CriticSettings):
    """See ``conf/algorithm/reinforce.yaml``."""

    epochs: int = setting(1, least=1)


class Reinforce(ActorCritic):
    """``torchrl.objectives.ReinforceLoss``: the return minus the critic's estimate, each rollout once."""

    task = "rl"
    settings_class = ReinforceSettings
    policy_loss, value_loss = "loss_actor", "loss_value"

    @classmethod
    def problems(cls, key: str, tenant: Any, head: Any) -> list[str]:
        """A second pass would need ratios."""
        epochs = tenant.algorithm.epochs
        problems = super().problems(key, tenant, head)
        if epochs != 1:
            problems.append(f"{key}.algorithm.epochs={epochs}: reinforce uses each rollout once; set it to 1")
        return problems

    def make_loss(self, actor: Any, critic: TensorDictModule | None) -> LossModule:
        """Minus log-probability times advantage."""
        from torchrl.objectives import ReinforceLoss

        return ReinforceLoss(actor, critic, loss_critic_type="l2", functional=False)  # pyright: ignore[reportArgumentType]

    def weighted_value_loss(self, value_loss: Tensor) -> Tensor:
        """TorchRL's loss has no coefficient."""
        return self.settings.critic_coef * value_loss
