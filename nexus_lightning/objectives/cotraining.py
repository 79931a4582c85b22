"""Reinforcement learning with demonstrations mixed in: a supervised loss beside every minibatch of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from nexus_lightning.objectives.base import Objective
from nexus_lightning.shares import Minibatch, RowWeights, Share


class CoTraining(Objective):
    """``rl loss + weight * sft loss``: keeps a policy near its demonstrations while it learns from outcomes.

    The demonstrations' auxiliary loss of DAPG (Rajeswaran et al. 2018, arXiv 1709.10087), without its decay and with
    the head's own supervised loss in place of a log-likelihood, so it asks nothing new of a head. While only the critic
    is trained (``value_warmup_jobs``) no demonstrations are drawn.

    Args:
        rl: the tenant's objective on its rollouts.
        sft: the tenant's objective on demonstrations; its ``batch_size`` are drawn for every minibatch.
        weight: of the supervised loss, ``algorithm.sft_weight``.
        draw: the next n demonstrations with features, as :class:`~nexus_lightning.objectives.sft.SFT` reads them.
        share: which of them are this rank's. Every rank reads all of them: what its own weigh follows from the others.
    """

    trains_without_rows = True

    def __init__(
        self,
        rl: Objective,
        sft: Objective,
        weight: float,
        draw: Callable[[int], TensorDict],
        share: Share | None = None,
    ) -> None:
        self.rl, self.sft, self.weight, self.draw = rl, sft, weight, draw
        self.share = Share() if share is None else share
        self.means, self.metrics, self.encode_whole_job = rl.means, rl.metrics, rl.encode_whole_job
        self.normalizes_advantages = rl.normalizes_advantages

    def actor_forward(self, batch: TensorDict) -> TensorDict:
        """Of the rollout."""
        return self.rl.actor_forward(batch)

    def warming_up(self, jobs_completed: int) -> bool:
        """As the rl objective does."""
        return self.rl.warming_up(jobs_completed)

    def counted(self, data: TensorDict) -> TensorDict:
        """Of the rollout."""
        return self.rl.counted(data)

    def row_weights(self, data: TensorDict) -> dict[str, Tensor]:
        """Of the rollout."""
        return self.rl.row_weights(data)

    def cut(self, weights: Sequence[RowWeights], rank: int) -> Iterable[Minibatch]:
        """Of the rollout."""
        return self.rl.cut(weights, rank)

    def loss(
        self, batch: TensorDict | None, jobs_completed: int, shares: dict[str, float] | None = None
    ) -> dict[str, Tensor]:
        """Those of the rl objective, and ``sft_loss`` (without its weight).

        With ``shares`` this rank's summands; ``batch`` None: it has no row of the rollout's minibatch.
        """
        losses = {}
        if batch is not None:
            given = (batch, jobs_completed) if shares is None else (batch, jobs_completed, shares)
            losses = self.rl.loss(*given)
        if self.warming_up(jobs_completed):
            return losses or {"loss": torch.zeros((), requires_grad=True)}
        supervised = self._supervised(jobs_completed)
        loss = self.weight * supervised
        if "loss" in losses:
            loss = losses["loss"] + loss
        return {**losses, "loss": loss, "sft_loss": supervised.detach()}

    def _supervised(self, jobs_completed: int) -> Tensor:
        drawn = self.draw(self.sft.batch_size)
        if self.share.count == 1:
            return self.sft.loss(drawn, jobs_completed)["loss"]
        rows, padding = self.share.padded_rows(len(drawn))
        mine = drawn[rows[~padding]] if not bool(padding.all()) else drawn[:1]
        weights = self.sft.row_weights(drawn)["loss"].double()
        part = 0.0 if bool(padding.all()) else float(weights[rows[~padding]].sum() / weights.sum())
        return self.sft.loss(mine, jobs_completed, {"loss": part})["loss"]
