"""Offline RL: implicit Q-learning on recorded chunks, for any head that has a critic and names its Q network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nexus_lightning.backbone import VLAFeature
from nexus_lightning.bounds import setting
from nexus_lightning.head import ActionHead
from nexus_lightning.objectives.awr import expectile_loss
from nexus_lightning.objectives.base import AlgorithmSettings, Networks, Objective, Recorded

#: Largest weight ``exp(advantage / temperature)`` of a sample, as in the paper's code and in TorchRL's ``IQLLoss``.
MAX_WEIGHT = 100.0


@dataclass
class IQLSettings(AlgorithmSettings):
    """See ``conf/algorithm/iql.yaml``."""

    gamma: float = setting(0.99, least=0, most=1)  # per environment step
    temperature: float = setting(0.1, above=0)  # of the advantage weights: the inverse of IQL's beta
    expectile: float = setting(0.7, above=0, below=1)  # of the value step; the paper's for locomotion
    critic_coef: float = setting(0.5, least=0)
    value_warmup_jobs: int = setting(0, least=0)  # train only V and Q for this many jobs
    target_rate: float = setting(0.05, above=0, most=1)  # share of the new weights in the slow Q networks, every step


class ChunkCritic(Networks):
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


class IQL(Objective):
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

    Partition fields (rows = samples): those of :class:`~nexus_lightning.objectives.sft.SFT`, ``reward`` and
    ``discount`` ``[N, 1]``, ``taken`` bool ``[N, execute]``, ``next_features`` and ``next_state``.
    """

    task = "offline_rl"
    settings_class = IQLSettings
    needs_ends = True
    fields = ("actions", "is_pad", "reward", "discount", "taken", "next_features", "next_state")
    settings: IQLSettings
    critic: ChunkCritic

    @classmethod
    def problems(cls, key: str, tenant: Any, head: Any) -> list[str]:
        """It needs Q networks of the head, and the features of two observations."""
        problems = []
        if tenant.features.reuse == "never":
            problems.append(f"{key}.features.reuse=never: iql reads the features of two observations; set it to auto")
        if isinstance(head, type) and issubclass(head, ActionHead) and head.q_network is ActionHead.q_network:
            problems.append(f"{key}.head={head.__name__}: has no q_network, which iql needs; use another head, or awr")
        return problems

    @classmethod
    def networks(cls, head: ActionHead, settings: IQLSettings) -> ChunkCritic:
        """Two Q networks and their slow copies."""
        return ChunkCritic(head, settings.target_rate)

    @classmethod
    def columns(cls, recorded: Recorded, settings: IQLSettings) -> TensorDict:
        """``reward``, ``discount``, ``taken``, ``next_row``."""
        return recorded.transitions(settings.gamma)

    def row_weights(self, data: TensorDict) -> dict[str, Tensor]:
        """1 for every sample of which something was carried out (others have no target), and which is no padding."""
        taken, is_pad = cast(Tensor, data["taken"]), cast(Tensor, data["is_pad"])
        return {"loss": taken.any(-1) & ~is_pad.all(-1)}

    def warming_up(self, jobs_completed: int) -> bool:
        """In the first ``value_warmup_jobs`` jobs."""
        return jobs_completed < self.settings.value_warmup_jobs

    def minibatch_loss(self, batch: TensorDict, jobs_completed: int) -> dict[str, Tensor]:
        """``loss`` and what is logged (scalars).

        ``policy_loss``, ``value_loss``, ``q_loss``, ``q`` and ``value`` (means), ``advantage`` (mean of Q - V),
        ``weight_share``: the effective number of samples over the number of samples.

        With several ranks values are those of one rank; the policy imitates what each rank draws from its own rows:
        their weights are relative to those rows.
        """
        features, state = batch["features"], self.normalizer.normalize_state(batch["state"])
        actions, taken = self.normalizer.normalize_action(batch["actions"]), batch["taken"]
        target = self.q_target(batch)
        q = self.critic(features, state, actions, taken)
        q_loss = (q - target).square().mean(1).sum()
        with torch.no_grad():
            slow = self.critic(features, state, actions, taken, slow=True).amin(0)
        value = self.head.value(features, state)
        value_loss = expectile_loss(slow - value, self.settings.expectile)
        advantage = (slow - value).detach().squeeze(-1)
        weight = iql_weights(advantage, self.settings.temperature)
        metrics = {
            "value_loss": value_loss.detach(),
            "q_loss": q_loss.detach(),
            "q": q.detach().mean(),
            "value": value.detach().mean(),
            "advantage": advantage.mean(),
            "weight_share": weight.sum().square() / (len(weight) * weight.square().sum()),
        }
        critic_loss = self.settings.critic_coef * (value_loss + q_loss)
        if self.warming_up(jobs_completed):
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
