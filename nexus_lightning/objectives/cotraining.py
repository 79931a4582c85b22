"""Reinforcement learning with demonstrations mixed in: a supervised loss beside every minibatch of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tensordict import TensorDict
from torch import Tensor

from nexus_lightning.objectives.policy_gradient import PolicyGradientObjective
from nexus_lightning.objectives.sft import SFTObjective


class CoTrainingObjective:
    """``rl loss + weight * sft loss``: keeps a policy near its demonstrations while it learns from outcomes.

    The demonstrations' auxiliary loss of DAPG (Rajeswaran et al. 2018, arXiv 1709.10087), without its decay and with
    the head's own supervised loss in place of a log-likelihood, so it asks nothing new of a head. While only the critic
    is trained (``value_warmup_jobs``) no demonstrations are drawn.

    Args:
        rl: the tenant's objective on its rollouts.
        sft: the tenant's objective on demonstrations; its ``batch_size`` are drawn for every minibatch.
        weight: of the supervised loss, ``algorithm.sft_weight``.
        draw: the next n demonstrations with features, as :class:`SFTObjective` reads them.
    """

    encode_whole_job = PolicyGradientObjective.encode_whole_job

    def __init__(
        self, rl: PolicyGradientObjective, sft: SFTObjective, weight: float, draw: Callable[[int], TensorDict]
    ) -> None:
        self.rl, self.sft, self.weight, self.draw = rl, sft, weight, draw

    def minibatches(self, data: TensorDict) -> Iterator[TensorDict]:
        """Of the rollout."""
        return self.rl.minibatches(data)

    def loss(self, batch: TensorDict, jobs_completed: int) -> dict[str, Tensor]:
        """Those of :class:`PolicyGradientObjective`, and ``sft_loss`` (without its weight)."""
        losses = self.rl.loss(batch, jobs_completed)
        if jobs_completed < self.rl.algorithm.value_warmup_jobs:
            return losses
        supervised = self.sft.loss(self.draw(self.sft.batch_size), jobs_completed)["loss"]
        return {**losses, "loss": losses["loss"] + self.weight * supervised, "sft_loss": supervised.detach()}
