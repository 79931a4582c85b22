"""Offline RL: advantage-weighted regression on recorded chunks, for any head that has a critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from nexus_lightning.bounds import setting
from nexus_lightning.objectives.base import AlgorithmSettings, Objective, Recorded

#: Largest weight of a sample against the mean one's (AWR cuts at 20, too).
MAX_WEIGHT = 20.0


@dataclass
class AWRSettings(AlgorithmSettings):
    """See ``conf/algorithm/awr.yaml``."""

    gamma: float = setting(0.99, least=0, most=1)  # per environment step
    temperature: float = setting(0.1, above=0)  # of the advantage weights, in units of the return
    expectile: float = setting(0.5, above=0, below=1)  # of the critic
    critic_coef: float = setting(0.5, least=0)
    value_warmup_jobs: int = setting(0, least=0)  # train only the critic for this many jobs


class AWR(Objective):
    """Imitate what turned out better than expected (Peng et al. 2019, arXiv 1910.00177).

    The critic regresses the return to go with an expectile (0.5: the mean, as AWR; above: optimistic, the value step of
    IQL, Kostrikov et al. 2021, arXiv 2110.06169). A sample's weight is ``exp((return - value) / temperature)``. Samples
    are drawn by weight and trained with the head's own supervised loss, which in expectation is the weighted loss and
    asks nothing new of a head: with a flow head this is advantage-weighted flow matching. With several ranks each draws
    from its own rows: their weights are relative to those rows, not to the whole minibatch.

    Partition fields (rows = samples): those of :class:`~nexus_lightning.objectives.sft.SFT` and ``return_to_go``
    ``[N, 1]``.
    """

    task = "offline_rl"
    settings_class = AWRSettings
    fields = ("actions", "is_pad", "return_to_go")
    arrays = ("action", "return_to_go", "is_pad?")
    settings: AWRSettings

    @classmethod
    def columns(cls, recorded: Recorded, settings: AWRSettings) -> TensorDict:
        """``return_to_go`` ``[N, 1]``."""
        returns = recorded.returns_to_go(settings.gamma)
        return TensorDict({"return_to_go": returns}, [len(returns)])

    def warming_up(self, jobs_completed: int) -> bool:
        """In the first ``value_warmup_jobs`` jobs."""
        return jobs_completed < self.settings.value_warmup_jobs

    def minibatch_loss(self, batch: TensorDict, jobs_completed: int) -> dict[str, Tensor]:
        """``{"loss", "policy_loss", "value_loss", "advantage", "weight_share"}`` (scalars).

        ``weight_share`` is the effective number of samples over the number of samples: 1 when all weigh alike.
        """
        state = self.normalizer.normalize_state(batch["state"])
        value = self.head.value(batch["features"], state)
        error = batch["return_to_go"] - value
        value_loss = expectile_loss(error, self.settings.expectile)
        weight = advantage_weights(error.detach().squeeze(-1), self.settings.temperature)
        share = weight.sum().square() / (len(weight) * weight.square().sum())
        metrics = {"value_loss": value_loss.detach(), "advantage": error.detach().mean(), "weight_share": share}
        if self.warming_up(jobs_completed):
            return {"loss": self.settings.critic_coef * value_loss, **metrics}
        rows = torch.multinomial(weight, len(weight), replacement=True)
        actions = self.normalizer.normalize_action(batch["actions"][rows])
        losses = self.head.loss(batch["features"][rows], state[rows], actions, batch["is_pad"][rows])
        loss = losses["loss"] + self.settings.critic_coef * value_loss
        return {**losses, "loss": loss, "policy_loss": losses["loss"].detach(), **metrics}


def expectile_loss(error: Tensor, expectile: float) -> Tensor:
    """Mean of ``|expectile - 1[error < 0]| * error^2``.

    Example:
        >>> expectile_loss(torch.tensor([2.0, -2.0]), 0.75).item()    # (0.75 * 4 + 0.25 * 4) / 2
        2.0
    """
    from torchrl.objectives import IQLLoss  # takes a second, and settings are read without it

    return IQLLoss.loss_value_diff(error, expectile).mean()


def advantage_weights(advantage: Tensor, temperature: float) -> Tensor:
    """``exp(advantage / temperature)`` ``[N]``, divided by its mean and cut at :data:`MAX_WEIGHT`."""
    weight = (advantage / temperature - (advantage / temperature).max()).exp()
    return (weight / weight.mean()).clamp(max=MAX_WEIGHT)
