"""Policy gradients on action chunks: PPO, GRPO and REINFORCE over TorchRL's losses and its GAE.

One decision = one chunk. Its reward is the sum up to the first done; actions after the done were never carried out,
so they carry no likelihood, no entropy and no gradient (``executed`` mask).

- ``ppo``: ``torchrl.objectives.ClipPPOLoss``, advantages by GAE (Schulman et al. 2016, arXiv 1506.02438).
- ``grpo``: the same clipped loss without a critic; an episode's advantage is its return against the other episodes from
  the same initial state (Shao et al. 2024, arXiv 2402.03300), the same for all its decisions.
- ``reinforce``: ``torchrl.objectives.ReinforceLoss``, the return minus the critic's estimate (GAE with lambda 1).

Rollouts that go on while the actor trains were drawn by an older policy (behaviour) than the one a job starts from
(proximal). ``algorithm.proximal`` decouples the two (Hilton et al. 2022, arXiv 2110.00641; AReaL, arXiv 2505.24298)::

    behaviour --- weight w = proximal / behaviour, cut at 5 ---> proximal --- ratio r, clipped ---> policy in training

    loss = -mean( w * min(r A, clip(r) A) )

The clip then bounds how far one job moves the policy. Without it, it acts on the whole way from the behaviour policy:
what a stale rollout finds beyond the clip already gets no gradient, however wrong it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor
from torch.distributions import Distribution
from torchrl.modules import ProbabilisticActor
from torchrl.objectives import ClipPPOLoss, ReinforceLoss
from torchrl.objectives.value.functional import generalized_advantage_estimate

from nexus_lightning.config import AlgorithmConfig
from nexus_lightning.head import ActionHead
from nexus_lightning.objectives.base import Objective
from nexus_lightning.schema import Normalizer
from nexus_lightning.shares import Minibatch, RowWeights, cut_permutation

CHUNK = ("vla_action", "chunk")
LOG_PROBS = ("vla_action", "log_probs")
EXECUTED = "executed"
#: What the actor-forward stage adds: log-probabilities and values under the policy that a job starts from.
PROXIMAL_LOG_PROB, PROXIMAL_VALUE = "proximal_log_prob", "proximal_value"
#: Largest weight of the proximal policy against the behaviour policy (AReaL's ``behav_imp_weight_cap``).
MAX_IMPORTANCE_WEIGHT = 5.0
#: Returns of a group whose standard deviation is smaller are equal (grpo).
MIN_SPREAD = 1e-6


def reduce_chunk(values: Tensor, executed: Tensor, reduction: str) -> Tensor:
    """Per-element ``values`` ``[B, T, A]`` -> ``[B]`` over executed steps: sum, or mean over executed elements."""
    mask = executed.unsqueeze(-1).to(values.dtype)
    total = (values * mask).sum((-2, -1))
    if reduction == "sum":
        return total
    return total / (mask.sum((-2, -1)) * values.shape[-1]).clamp(min=1)


def likelihood_units(values: Tensor, executed: Tensor, reduction: str, level: str) -> Tensor:
    """Per-element ``values`` ``[*B, T, A]`` -> ``[*B, U]``, one number for each unit that has a ratio of its own.

    Args:
        values: log-probabilities.
        executed: ``[*B, T]``.
        reduction: how the elements of one unit come together: ``sum`` or ``mean``.
        level: ``chunk`` (U = 1), ``action`` (U = T) or ``token`` (U = T * A).
    """
    if level == "chunk":
        return reduce_chunk(values, executed, reduction).unsqueeze(-1)
    if level == "action":
        return values.sum(-1) if reduction == "sum" else values.mean(-1)
    return values.flatten(-2)


def unit_mask(executed: Tensor, num_dims: int, level: str) -> Tensor:
    """Which units count, bool ``[*B, U]``, from ``executed`` ``[*B, T]``."""
    if level == "chunk":
        return executed.any(-1, keepdim=True)
    return executed if level == "action" else executed.repeat_interleave(num_dims, dim=-1)


class EvaluatedDecision(Distribution):
    """The likelihood of one given decision per row, as a distribution that TorchRL's loss can ask.

    A head's :meth:`~nexus_lightning.head.ActionHead.evaluate` has already computed it, for a Gaussian chunk as well as
    for a denoising chain or tokens; unexecuted steps count for nothing. It cannot sample: the loss never does.
    """

    arg_constraints = {}  # pyright: ignore[reportAssignmentType]

    def __init__(
        self,
        log_probs: Tensor,
        entropy: Tensor,
        executed: Tensor,
        reduction: str = "sum",
        level: str = "chunk",
    ) -> None:
        self.log_probs, self.entropies, self.executed = log_probs, entropy, executed
        self.reduction, self.level = reduction, level
        super().__init__(log_probs.shape[:-2], log_probs.shape[-2:], validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """``[M]``: all units of all rows that count, one after the other."""
        del value
        units = likelihood_units(self.log_probs, self.executed, self.reduction, self.level)
        return units[unit_mask(self.executed, self.log_probs.shape[-1], self.level)]

    def entropy(self) -> Tensor:
        """``[B]``, of the whole decision."""
        return reduce_chunk(self.entropies, self.executed, self.reduction)


def compute_advantages(rollout: TensorDict, algorithm: AlgorithmConfig, normalize: bool = True) -> TensorDict:
    """Advantages of one rollout; statistics are this job's alone.

    Args:
        rollout: ``[N, L]`` (simulators x decisions) with ``("next", "reward"|"done"|"terminated"|"executed")`` and
            ``log_probs``; ppo and reinforce also need ``state_value`` ``[N, L, 1]`` and ``("next", "state_value")``
            (zero where terminated, the critic's estimate where truncated or cut), grpo ``episode_seed``.
        algorithm: of the tenant.
        normalize: False where ``rollout`` is only one rank's part of the job.

    Returns:
        Derived columns ``[N, L]``: ``advantage`` ``[.., 1]``, ``value_target`` ``[.., 1]``, ``sample_log_prob``
        ``[.., U]`` (see :func:`likelihood_units`), and ``counts`` bool ``[.., 1]``: False for decisions that grpo
        leaves out (episodes that the rollout cut, groups without spread).
    """
    following = cast(TensorDict, rollout["next"])
    executed = following[EXECUTED]
    if algorithm.name == "grpo":
        advantage, counts = group_advantages(rollout)
        value_target = torch.zeros_like(advantage)
    else:
        gamma: float | Tensor = algorithm.gamma
        if algorithm.discount_per == "step":
            gamma = algorithm.gamma ** executed.sum(-1, keepdim=True).to(following["reward"].dtype)
        advantage, value_target = generalized_advantage_estimate(
            gamma,  # pyright: ignore[reportArgumentType]
            algorithm.gae_lambda if algorithm.name == "ppo" else 1.0,
            rollout["state_value"],
            following["state_value"],
            following["reward"],
            following["done"],
            following["terminated"],
        )
        if normalize:
            advantage = (advantage - advantage.mean()) / advantage.std(unbiased=False).clamp(min=1e-6)
        counts = torch.ones_like(advantage, dtype=torch.bool)
    units = likelihood_units(rollout[LOG_PROBS], executed, algorithm.log_prob, algorithm.log_prob_level)
    return TensorDict(
        {"advantage": advantage, "value_target": value_target, "sample_log_prob": units, "counts": counts},
        rollout.batch_size,
    )


def importance_weights(proximal: Tensor, behaviour: Tensor) -> Tensor:
    """``exp(proximal - behaviour)`` of log-probabilities, cut at :data:`MAX_IMPORTANCE_WEIGHT`.

    Example:
        >>> importance_weights(torch.tensor([-1.0, -1.0, 4.0]), torch.tensor([-1.0, 0.0, 0.0]))
        tensor([1.0000, 0.3679, 5.0000])
    """
    return (proximal - behaviour).exp().clamp(max=MAX_IMPORTANCE_WEIGHT)


def next_values(values: Tensor, done: Tensor, terminated: Tensor, bootstrap: Tensor) -> Tensor:
    """Critic of the state after each decision ``[N, L, 1]``: what :func:`compute_advantages` wants as next value.

    Args:
        values: of the state before each decision ``[N, L, 1]``.
        done / terminated: bool ``[N, L, 1]``.
        bootstrap: ``[N, L, 1]``, read where :func:`cut` says so: the critic's estimate there.

    Returns:
        The next decision's value; 0 where the episode terminated, ``bootstrap`` where it was cut.
    """
    following = torch.zeros_like(values)
    following[:, :-1] = values[:, 1:]
    following = torch.where(cut(done, terminated), bootstrap, following)
    return torch.where(terminated, torch.zeros_like(following), following)


def cut(done: Tensor, terminated: Tensor) -> Tensor:
    """Decisions after which the rollout does not go on although the episode could: truncated, or the last column."""
    last = torch.zeros_like(done)
    last[:, -1] = True
    return (done | last) & ~terminated


def group_advantages(rollout: TensorDict) -> tuple[Tensor, Tensor]:
    """GRPO's advantage ``[N, L, 1]`` and which decisions count.

    Episodes with one ``episode_seed`` (same task, same initial state) are a group; an episode's advantage is its return
    minus the group's mean, over the group's standard deviation. A group whose returns are all equal, or of which only
    one episode was finished, teaches nothing and is left out, as are episodes that the end of the rollout cut.
    """
    reward = cast(TensorDict, rollout["next"])["reward"].squeeze(-1)
    advantage, counts = torch.zeros_like(reward), torch.zeros_like(reward, dtype=torch.bool)
    for places, returns in _finished_groups(rollout):
        spread = returns.std(unbiased=False)
        if spread < MIN_SPREAD:
            continue
        for place, value in zip(places, (returns - returns.mean()) / spread, strict=True):
            advantage[place] = value
            counts |= place
    return advantage.unsqueeze(-1), counts.unsqueeze(-1)


def group_metrics(rollout: TensorDict) -> dict[str, float]:
    """``groups`` with at least two finished episodes, and how many ``zero_spread_groups`` of them are left out."""
    spreads = [float(returns.std(unbiased=False)) for _, returns in _finished_groups(rollout)]
    return {
        "groups": float(len(spreads)),
        "zero_spread_groups": float(sum(spread < MIN_SPREAD for spread in spreads)),
    }


def _finished_groups(rollout: TensorDict) -> list[tuple[list[Tensor], Tensor]]:
    """Of every group with at least two finished episodes: where each is, bool ``[N, L]``, and their returns."""
    following = cast(TensorDict, rollout["next"])
    reward, done = following["reward"].squeeze(-1), following["done"].squeeze(-1)
    seeds = rollout["episode_seed"].squeeze(-1)
    # Number of the episode in its simulator: a decision after a done belongs to the next one.
    episode = done.long().cumsum(1) - done.long()
    groups: dict[int, list[tuple[Tensor, float]]] = {}
    for env in range(len(reward)):
        for number in range(int(episode[env].max()) + 1):
            rows = episode[env] == number
            if bool(done[env][rows].any()):
                place = torch.zeros_like(done)
                place[env] = rows
                groups.setdefault(int(seeds[env][rows][0]), []).append((place, float(reward[env][rows].sum())))
    return [
        ([place for place, _ in episodes], torch.tensor([value for _, value in episodes]))
        for episodes in groups.values()
        if len(episodes) > 1
    ]


class PolicyGradientObjective(Objective):
    """PPO, GRPO or REINFORCE over the rows of one rollout partition.

    Partition fields (rows = decisions): ``features`` and raw ``state`` (or, without feature reuse, ``observation`` and
    ``language_instruction``, from which the module computes them once per job), ``vla_action`` (normalised chunk, and
    the trace of heads that have one), ``executed``, ``sample_log_prob`` (behaviour policy), ``advantage``,
    ``value_target``, ``state_value``, ``counts``.
    """

    #: Observations are encoded once per job: every epoch reads them again.
    encode_whole_job = True
    #: What the means in :meth:`loss` are taken over.
    means = ("units", "rows")
    fields = (
        "vla_action",
        EXECUTED,
        "state_value",
        "sample_log_prob",
        "advantage",
        "value_target",
        "counts",
    )

    def __init__(self, head: ActionHead, normalizer: Normalizer, algorithm: AlgorithmConfig) -> None:
        self.normalizer, self.algorithm = normalizer, algorithm
        policy = TensorDictModule(
            head.evaluate,
            in_keys=["features", "state", "vla_action"],
            out_keys=["log_probs", "entropy_per_element"],
        )
        actor = ProbabilisticActor(
            policy,
            in_keys={  # pyright: ignore[reportArgumentType]
                "log_probs": "log_probs",
                "entropy": "entropy_per_element",
                "executed": EXECUTED,
            },
            out_keys=[CHUNK],
            distribution_class=EvaluatedDecision,
            distribution_kwargs={"reduction": algorithm.log_prob, "level": algorithm.log_prob_level},
        )
        self.head = head
        critic = TensorDictModule(head.value, in_keys=["features", "state"], out_keys=["state_value"])
        keys = {"action": CHUNK, "advantage": "advantage", "value_target": "value_target", "value": "state_value"}
        self.loss_module: ReinforceLoss | ClipPPOLoss
        if algorithm.name == "reinforce":
            self.loss_module = ReinforceLoss(actor, critic, loss_critic_type="l2", functional=False)
        else:
            self.loss_module = ClipPPOLoss(
                actor,
                None if algorithm.name == "grpo" else critic,
                clip_epsilon=algorithm.clip_epsilon,
                entropy_bonus=True,  # with a coefficient of 0 for its figure alone
                entropy_coeff=algorithm.entropy_coef,
                critic_coeff=None if algorithm.name == "grpo" else algorithm.critic_coef,
                loss_critic_type="l2",
                normalize_advantage=False,
                functional=False,
            )
        self.loss_module.set_keys(**keys, sample_log_prob="sample_log_prob")

    @property
    def normalizes_advantages(self) -> bool:
        """A group's advantages are relative to the group already."""
        return self.algorithm.name != "grpo"

    def counted(self, data: TensorDict) -> TensorDict:
        """Without decisions that teach nothing, see :func:`group_advantages`."""
        return data[data["counts"].squeeze(-1)]

    def cut(self, weights: Sequence[RowWeights], rank: int) -> Iterable[Minibatch]:
        """``epochs`` passes, each in an order that is drawn when it begins."""
        num_rows = sum(len(w["rows"]) for w in weights)
        orders = (torch.randperm(num_rows) for _ in range(self.algorithm.epochs if num_rows else 0))
        return cut_permutation(weights, orders, self.algorithm.minibatch_size, rank)

    @torch.no_grad()
    def actor_forward(self, batch: TensorDict) -> TensorDict:
        """How the present policy sees a rollout: rows with features, as for :meth:`loss` -> derived columns.

        Returns:
            ``proximal_log_prob`` ``[B, U]`` and, where the algorithm has a critic, ``proximal_value`` ``[B, 1]``.
        """
        state = self.normalizer.normalize_state(batch["state"])
        log_probs, _ = self.head.evaluate(batch["features"], state, batch["vla_action"])
        units = likelihood_units(log_probs, batch[EXECUTED], self.algorithm.log_prob, self.algorithm.log_prob_level)
        columns = {PROXIMAL_LOG_PROB: units}
        if self.algorithm.name != "grpo":
            columns[PROXIMAL_VALUE] = self.head.value(batch["features"], state)
        return TensorDict(columns, batch.batch_size)

    def row_weights(self, data: TensorDict) -> dict[str, Tensor]:
        """How many likelihood units each row has, and 1."""
        mask = unit_mask(data[EXECUTED], data[CHUNK].shape[-1], self.algorithm.log_prob_level)
        return {"units": mask.sum(-1), "rows": torch.ones(len(data))}

    def loss(
        self, batch: TensorDict | None, jobs_completed: int, shares: dict[str, float] | None = None
    ) -> dict[str, Tensor]:
        """``loss`` and, under the names that TorchRL and RLinf use, what is logged (scalars).

        ``shares``: of a minibatch that several ranks hold, what part of the units and of the rows ``batch`` is; the
        results are then this rank's summands of the minibatch's.

        ``policy_loss``, ``value_loss``, ``entropy``, ``kl`` (mean of log p_old - log p_new), ``clip_fraction``,
        ``ratio`` (mean), ``explained_variance``; those that the algorithm has. Old is the policy that acted, with
        ``algorithm.proximal`` the one that the job started from; then also ``importance_weight`` (mean of w) and
        ``behavior_kl`` (mean of log p_behaviour - log p_proximal).
        """
        assert batch is not None
        executed, num_dims = batch[EXECUTED], batch[CHUNK].shape[-1]
        mask = unit_mask(executed, num_dims, self.algorithm.log_prob_level)
        old, advantage = batch["sample_log_prob"][mask], batch["advantage"].expand_as(mask)[mask]
        metrics = {}
        if self.algorithm.proximal:
            # w is not negative and has no gradient: weighing the advantage is weighing both sides of the minimum
            behaviour, old = old, batch[PROXIMAL_LOG_PROB][mask]
            weight = importance_weights(old, behaviour)
            advantage = weight * advantage
            part = 1.0 if shares is None else shares["units"]
            metrics = {"importance_weight": part * weight.mean(), "behavior_kl": part * (behaviour - old).mean()}
        # Units of all rows side by side: a masked step is not in any mean. Hence no common batch size.
        units = TensorDict(
            {
                "features": batch["features"],
                "state": self.normalizer.normalize_state(batch["state"]),
                "vla_action": batch["vla_action"],
                EXECUTED: executed,
                "sample_log_prob": old,
                "advantage": advantage.unsqueeze(-1),
                "value_target": batch["value_target"],
                "state_value": batch["state_value"],
            },
            [],
        )
        device = next(self.head.parameters()).device
        for name, value in list(self.loss_module.named_buffers(recurse=False)):
            # TorchRL's clip bounds and coefficients stay where the head was when the loss was built
            setattr(self.loss_module, name, value.to(device))
        out = self.loss_module(units)
        if shares is not None:
            per_unit = ("loss_actor", "loss_objective", "kl_approx", "clip_fraction", "mean_ratio")
            for key, value in list(out.items()):
                out[key] = value * shares["units" if key in per_unit else "rows"]
        policy_loss = out["loss_actor"] if self.algorithm.name == "reinforce" else out["loss_objective"]
        value_loss = out.get("loss_value" if self.algorithm.name == "reinforce" else "loss_critic", None)
        loss = policy_loss
        metrics["policy_loss"] = policy_loss.detach()
        if "loss_entropy" in out.keys():
            loss = loss + out["loss_entropy"]
        if value_loss is not None:
            metrics["value_loss"] = value_loss.detach()
            if self.algorithm.name == "reinforce":
                value_loss = self.algorithm.critic_coef * value_loss
            warming_up = jobs_completed < self.algorithm.value_warmup_jobs
            loss = value_loss if warming_up else loss + value_loss
        named = {
            "kl": "kl_approx",
            "clip_fraction": "clip_fraction",
            "ratio": "mean_ratio",
            "entropy": "entropy",
            "explained_variance": "explained_variance",
        }
        metrics |= {name: out[key].detach().mean() for name, key in named.items() if out.get(key, None) is not None}
        return {"loss": loss, **metrics}
