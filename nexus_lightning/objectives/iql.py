"""Offline RL: implicit Q-learning on recorded chunks, for any head that has a critic and names its Q network."""

from __future__ import annotations

from typing import cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nexus_lightning.backbone import VLAFeature
from nexus_lightning.config import AlgorithmConfig
from nexus_lightning.head import ActionHead
from nexus_lightning.objectives.awr import expectile_loss
from nexus_lightning.objectives.base import Objective
from nexus_lightning.schema import Normalizer

#: Largest weight ``exp(advantage / temperature)`` of a sample, as in the paper's code and in TorchRL's ``IQLLoss``.
MAX_WEIGHT = 100.0
#: Expectile of the value step (the paper's for locomotion) unless ``algorithm.expectile`` says otherwise.
EXPECTILE = 0.7


class ChunkCritic(nn.Module):
    """Two Q networks on (state, the actions of a chunk that are carried out), and their slow copies.

    Owned by the tenant's slot beside the head: trained by its optimizer (at ``value_lr``), saved in its payload, never
    served. The value V(s) is the head's own :meth:`~nexus_lightning.head.ActionHead.value`.

    Args:
        head: gives the network, see :meth:`~nexus_lightning.head.ActionHead.q_network`.
        target_rate: share of the new weights in the slow copies after every optimizer step.
    """

    def __init__(self, head: ActionHead, target_rate: float) -> None:
        super().__init__()
        self.execute = head.schema.execute
        self.networks = nn.ModuleList(head.q_network(self.execute * head.schema.action_dim) for _ in range(2))
        # The less sure estimate counts (clipped double Q-learning, Fujimoto et al. 2018, arXiv 1802.09477).
        average = get_ema_multi_avg_fn(1 - target_rate)
        self.slow = AveragedModel(self.networks, multi_avg_fn=average).requires_grad_(False)

    def forward(
        self, features: VLAFeature, state: Tensor, actions: Tensor, taken: Tensor, slow: bool = False
    ) -> Tensor:
        """Estimates of both networks ``[2, B, 1]``.

        Args:
            features: ``[B]``, float32.
            state: ``[B, S]`` normalised.
            actions: ``[B, T, A]`` normalised; only the first ``execute`` are read.
            taken: ``[B, execute]`` bool: the others do not count, whatever they hold.
            slow: ask the slow copies.
        """
        carried_out = torch.where(taken.unsqueeze(-1), actions[:, : self.execute], 0.0).flatten(1)
        inputs = torch.cat([state, carried_out], dim=-1)
        networks = cast(nn.ModuleList, self.slow.module if slow else self.networks)
        return torch.stack([network(features, inputs) for network in networks])

    def update_slow(self) -> None:
        """After an optimizer step."""
        self.slow.update_parameters(self.networks)


class IQLObjective(Objective):
    """Implicit Q-learning (Kostrikov et al. 2021, arXiv 2110.06169), one decision = the executed part of a chunk.

    - ``Q(s, chunk)`` regresses ``r_1 + ... + gamma^(n-1) r_n + gamma^n V(s')``, n the steps that were carried out, no
      V where the episode ended (see :func:`~nexus_lightning.producers.demonstrations.transitions`).
    - ``V(s)`` is an expectile of the smaller slow Q: of the best actions that the data hold, without asking for any
      that they do not.
    - the policy imitates samples drawn with ``exp((Q - V) / temperature)``, cut at :data:`MAX_WEIGHT`, by the head's
      own supervised loss: in expectation the weighted loss, with a flow head advantage-weighted flow matching.
      IQL's beta is ``1 / temperature``.

    Values travel back through V, so a policy can join the good halves of two recordings, which weighing by the return
    that followed (AWR) cannot. TorchRL's ``IQLLoss`` lends its expectile loss; the rest of it does not fit: it
    discounts every transition alike (n differs near an episode's end) and wants an actor with a distribution.

    Partition fields (rows = samples): those of :class:`~nexus_lightning.objectives.sft.SFTObjective`, ``reward`` and
    ``discount`` ``[N, 1]``, ``taken`` bool ``[N, execute]``, ``next_features`` and ``next_state``.
    """

    fields = ("actions", "is_pad", "reward", "discount", "taken", "next_features", "next_state")

    def __init__(
        self,
        head: ActionHead,
        critic: ChunkCritic,
        normalizer: Normalizer,
        algorithm: AlgorithmConfig,
        batch_size: int,
    ) -> None:
        self.head, self.critic, self.normalizer = head, critic, normalizer
        self.algorithm, self.batch_size = algorithm, batch_size
        self.expectile = EXPECTILE if algorithm.expectile is None else algorithm.expectile

    def row_weights(self, data: TensorDict) -> dict[str, Tensor]:
        """1 for every sample of which something was carried out (others have no target), and which is no padding."""
        taken, is_pad = cast(Tensor, data["taken"]), cast(Tensor, data["is_pad"])
        return {"loss": taken.any(-1) & ~is_pad.all(-1)}

    def loss(
        self, batch: TensorDict | None, jobs_completed: int, shares: dict[str, float] | None = None
    ) -> dict[str, Tensor]:
        """``loss`` and what is logged (scalars).

        ``policy_loss``, ``value_loss``, ``q_loss``, ``q`` and ``value`` (means), ``advantage`` (mean of Q - V),
        ``weight_share``: the effective number of samples over the number of samples.

        With ``shares`` this rank's summands of the mean over all ranks' rows. Values are those of one rank; the policy
        imitates what each rank draws from its own rows: their weights are relative to those rows.
        """
        assert batch is not None
        losses = self._loss(batch, jobs_completed)
        return losses if shares is None else {k: v * shares["loss"] for k, v in losses.items()}

    def _loss(self, batch: TensorDict, jobs_completed: int) -> dict[str, Tensor]:
        features, state = batch["features"], self.normalizer.normalize_state(batch["state"])
        actions, taken = self.normalizer.normalize_action(batch["actions"]), batch["taken"]
        target = self.q_target(batch)
        q = self.critic(features, state, actions, taken)
        q_loss = (q - target).square().mean(1).sum()
        with torch.no_grad():
            slow = self.critic(features, state, actions, taken, slow=True).amin(0)
        value = self.head.value(features, state)
        value_loss = expectile_loss(slow - value, self.expectile)
        advantage = (slow - value).detach().squeeze(-1)
        weight = iql_weights(advantage, self.algorithm.temperature)
        metrics = {
            "value_loss": value_loss.detach(),
            "q_loss": q_loss.detach(),
            "q": q.detach().mean(),
            "value": value.detach().mean(),
            "advantage": advantage.mean(),
            "weight_share": weight.sum().square() / (len(weight) * weight.square().sum()),
        }
        critic_loss = self.algorithm.critic_coef * (value_loss + q_loss)
        if jobs_completed < self.algorithm.value_warmup_jobs:
            return {"loss": critic_loss, **metrics}
        rows = torch.multinomial(weight, len(weight), replacement=True)
        losses = self.head.loss(features[rows], state[rows], actions[rows], batch["is_pad"][rows])
        return {**losses, "loss": losses["loss"] + critic_loss, "policy_loss": losses["loss"].detach(), **metrics}

    @torch.no_grad()
    def q_target(self, batch: TensorDict) -> Tensor:
        """``reward + discount * V(next)`` ``[B, 1]``."""
        features = cast(VLAFeature, batch.get("next_features")).for_head()
        following = self.head.value(features, self.normalizer.normalize_state(batch["next_state"]))
        return batch["reward"] + batch["discount"] * following


def iql_weights(advantage: Tensor, temperature: float) -> Tensor:
    """``exp(advantage / temperature)`` ``[N]``, cut at :data:`MAX_WEIGHT`.

    Example:
        >>> iql_weights(torch.tensor([0.0, 0.2, 9.0]), 0.2)
        tensor([  1.0000,   2.7183, 100.0000])
    """
    return (advantage / temperature).exp().clamp(max=MAX_WEIGHT)
