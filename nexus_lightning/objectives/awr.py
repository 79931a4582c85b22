"""Offline RL: advantage-weighted regression on recorded chunks, for any head that has a critic."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.objectives import IQLLoss

from nexus_lightning.config import AlgorithmConfig
from nexus_lightning.head import ActionHead
from nexus_lightning.objectives.base import Objective
from nexus_lightning.schema import Normalizer

#: Largest weight of a sample against the mean one's (AWR cuts at 20, too).
MAX_WEIGHT = 20.0
#: Expectile of the critic unless ``algorithm.expectile`` says otherwise: the mean, as in the paper.
EXPECTILE = 0.5


class AWRObjective(Objective):
    """Imitate what turned out better than expected (Peng et al. 2019, arXiv 1910.00177).

    The critic regresses the return to go with an expectile (0.5: the mean, as AWR; above: optimistic, the value step of
    IQL, Kostrikov et al. 2021, arXiv 2110.06169). A sample's weight is ``exp((return - value) / temperature)``. Samples
    are drawn by weight and trained with the head's own supervised loss, which in expectation is the weighted loss and
    asks nothing new of a head: with a flow head this is advantage-weighted flow matching.

    Partition fields (rows = samples): those of :class:`~nexus_lightning.objectives.sft.SFTObjective` and
    ``return_to_go`` ``[N, 1]``.
    """

    fields = ("actions", "is_pad", "return_to_go")

    def __init__(self, head: ActionHead, normalizer: Normalizer, algorithm: AlgorithmConfig, batch_size: int) -> None:
        self.head, self.normalizer, self.algorithm, self.batch_size = head, normalizer, algorithm, batch_size
        self.expectile = EXPECTILE if algorithm.expectile is None else algorithm.expectile

    def row_weights(self, data: TensorDict) -> dict[str, Tensor]:
        """1 for every row with a valid step: the others pad the batch of several ranks."""
        return {"loss": (~data["is_pad"]).sum(-1) > 0}

    def loss(
        self, batch: TensorDict | None, jobs_completed: int, shares: dict[str, float] | None = None
    ) -> dict[str, Tensor]:
        """``{"loss", "policy_loss", "value_loss", "advantage", "weight_share"}`` (scalars).

        ``weight_share`` is the effective number of samples over the number of samples: 1 when all weigh alike.

        With ``shares`` this rank's summands of the mean over all ranks' rows. Each rank draws from its own rows: their
        weights are relative to those rows, not to the whole minibatch.
        """
        assert batch is not None
        losses = self._loss(batch, jobs_completed)
        return losses if shares is None else {k: v * shares["loss"] for k, v in losses.items()}

    def _loss(self, batch: TensorDict, jobs_completed: int) -> dict[str, Tensor]:
        state = self.normalizer.normalize_state(batch["state"])
        value = self.head.value(batch["features"], state)
        error = batch["return_to_go"] - value
        value_loss = expectile_loss(error, self.expectile)
        weight = advantage_weights(error.detach().squeeze(-1), self.algorithm.temperature)
        share = weight.sum().square() / (len(weight) * weight.square().sum())
        metrics = {"value_loss": value_loss.detach(), "advantage": error.detach().mean(), "weight_share": share}
        if jobs_completed < self.algorithm.value_warmup_jobs:
            return {"loss": self.algorithm.critic_coef * value_loss, **metrics}
        rows = torch.multinomial(weight, len(weight), replacement=True)
        actions = self.normalizer.normalize_action(batch["actions"][rows])
        losses = self.head.loss(batch["features"][rows], state[rows], actions, batch["is_pad"][rows])
        loss = losses["loss"] + self.algorithm.critic_coef * value_loss
        return {**losses, "loss": loss, "policy_loss": losses["loss"].detach(), **metrics}


def expectile_loss(error: Tensor, expectile: float) -> Tensor:
    """Mean of ``|expectile - 1[error < 0]| * error^2``.

    Example:
        >>> expectile_loss(torch.tensor([2.0, -2.0]), 0.75).item()    # (0.75 * 4 + 0.25 * 4) / 2
        2.0
    """
    return IQLLoss.loss_value_diff(error, expectile).mean()


def advantage_weights(advantage: Tensor, temperature: float) -> Tensor:
    """``exp(advantage / temperature)`` ``[N]``, divided by its mean and cut at :data:`MAX_WEIGHT`."""
    weight = (advantage / temperature - (advantage / temperature).max()).exp()
    return (weight / weight.mean()).clamp(max=MAX_WEIGHT)
