"""Policy gradients on action chunks, over TorchRL's losses: what PPO, GRPO and REINFORCE share.

One decision = one chunk. Its reward is the sum up to the first done; actions after the done were never carried out,
so they carry no likelihood, no entropy and no gradient (``executed`` mask).

Rollouts that go on while the actor trains were drawn by an older policy (behaviour) than the one a job starts from
(proximal). ``algorithm.proximal`` decouples the two (Hilton et al. 2022, arXiv 2110.00641; AReaL, arXiv 2505.24298)::

    behaviour --- weight w = proximal / behaviour, cut at 5 ---> proximal --- ratio r, clipped ---> policy in training

    loss = -mean( w * min(r A, clip(r) A) )

The clip then bounds how far one job moves the policy. Without it, it acts on the whole way from the behaviour policy:
what a stale rollout finds beyond the clip already gets no gradient, however wrong it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor
from torch.distributions import Distribution

from nexus_lightning.bounds import setting
from nexus_lightning.head import ActionHead
from nexus_lightning.objectives.base import Networks, Objective, RolloutSettings
from nexus_lightning.objectives.cotraining import CoTraining
from nexus_lightning.objectives.sft import SFT
from nexus_lightning.schema import Normalizer
from nexus_lightning.shares import Minibatch, RowWeights, Share, cut_permutation

if TYPE_CHECKING:
    from torchrl.objectives import LossModule

CHUNK = ("vla_action", "chunk")
LOG_PROBS = ("vla_action", "log_probs")
EXECUTED = "executed"
#: What the actor-forward stage adds: log-probabilities and values under the policy that a job starts from.
PROXIMAL_LOG_PROB, PROXIMAL_VALUE = "proximal_log_prob", "proximal_value"
#: Largest weight of the proximal policy against the behaviour policy (AReaL's ``behav_imp_weight_cap``).
MAX_IMPORTANCE_WEIGHT = 5.0
#: What TorchRL's losses give as means over likelihood units; the rest are means over rows.
PER_UNIT = ("loss_actor", "loss_objective", "kl_approx", "clip_fraction", "mean_ratio")


@dataclass
class PolicyGradientSettings(RolloutSettings):
    """Of every policy gradient."""

    log_prob_level: str = setting("chunk", choices=("chunk", "action", "token"))  # what has a ratio of its own
    log_prob: str = setting("sum", choices=("sum", "mean"))  # over the elements of such a unit


@dataclass
class ClipSettings(PolicyGradientSettings):
    """Of those that clip the ratio."""

    clip_epsilon: float = setting(0.2, above=0)
    proximal: bool = False  # clip against the policy at the start of the job, not the one that acted
    entropy_coef: float = setting(0.0, least=0)


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


def importance_weights(proximal: Tensor, behaviour: Tensor) -> Tensor:
    """``exp(proximal - behaviour)`` of log-probabilities, cut at :data:`MAX_IMPORTANCE_WEIGHT`.

    Example:
        >>> importance_weights(torch.tensor([-1.0, -1.0, 4.0]), torch.tensor([-1.0, 0.0, 0.0]))
        tensor([1.0000, 0.3679, 5.0000])
    """
    return (proximal - behaviour).exp().clamp(max=MAX_IMPORTANCE_WEIGHT)


def next_values(values: Tensor, done: Tensor, terminated: Tensor, bootstrap: Tensor) -> Tensor:
    """Critic of the state after each decision ``[N, L, 1]``: what :meth:`Objective.advantages` wants as next value.

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


class PolicyGradient(Objective):
    """What policy gradients over the rows of one rollout partition share; a subclass gives :meth:`advantage` and
    :meth:`make_loss`.

    Partition fields (rows = decisions): ``features`` and raw ``state`` (or, without feature reuse, ``observation`` and
    ``language_instruction``, from which the module computes them once per job), ``vla_action`` (normalised chunk, and
    the trace of heads that have one), ``executed``, ``sample_log_prob`` (behaviour policy), ``advantage``,
    ``value_target``, ``state_value``, ``counts``.
    """

    settings_class = PolicyGradientSettings
    settings: Any
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
    #: Names of the two losses that TorchRL's module gives.
    policy_loss, value_loss = "loss_objective", "loss_critic"

    def __init__(
        self,
        head: ActionHead,
        normalizer: Normalizer,
        settings: PolicyGradientSettings,
        batch_size: int = 1,
        networks: Networks | None = None,
    ) -> None:
        from torchrl.modules import ProbabilisticActor  # takes a second, and settings are read without it

        super().__init__(head, normalizer, settings, batch_size, networks)
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
            distribution_kwargs={"reduction": settings.log_prob, "level": settings.log_prob_level},
        )
        critic = TensorDictModule(head.value, in_keys=["features", "state"], out_keys=["state_value"])
        keys = {"action": CHUNK, "advantage": "advantage", "value_target": "value_target", "value": "state_value"}
        self.loss_module = self.make_loss(actor, critic if self.needs_critic else None)
        self.loss_module.set_keys(**keys, sample_log_prob="sample_log_prob")

    # ------------------------------------------------------------------------------------------ given by a subclass

    @classmethod
    def advantage(cls, rollout: TensorDict, settings: Any) -> tuple[Tensor, Tensor, Tensor]:
        """``(advantage, value_target, counts)`` ``[N, L, 1]`` of a rollout, see :meth:`advantages`; ``counts`` is False
        for decisions that teach nothing."""
        raise NotImplementedError(f"{cls.__name__} must override advantage")

    def make_loss(self, actor: Any, critic: TensorDictModule | None) -> LossModule:
        """TorchRL's loss of this algorithm. By default the clipped one of PPO, with a critic where it has one."""
        from torchrl.objectives import ClipPPOLoss

        return ClipPPOLoss(
            actor,
            critic,
            clip_epsilon=self.settings.clip_epsilon,
            entropy_bonus=True,  # with a coefficient of 0 for its figure alone
            entropy_coeff=self.settings.entropy_coef,
            critic_coeff=None if critic is None else self.settings.critic_coef,
            loss_critic_type="l2",
            normalize_advantage=False,
            functional=False,
        )

    def weighted_value_loss(self, value_loss: Tensor) -> Tensor:
        """As it is added to the loss."""
        return value_loss

    # ---------------------------------------------------------------------------------------------------- the same

    @classmethod
    def problems(cls, key: str, tenant: Any, head: Any) -> list[str]:
        """Minibatches must divide the rows of a rollout, where none of them is left out."""
        del head
        settings, environment = tenant.algorithm, tenant.environment
        if not cls.every_decision_counts or environment is None or settings.chunks_per_job is None:
            return []
        rows, size = environment.num_envs * settings.chunks_per_job, settings.minibatch_size
        if size < 1 or size >= rows or not rows % size:
            return []
        return [
            f"{key}.algorithm.minibatch_size={size}: must divide the {rows} decisions of a "
            f"rollout ({key}.environment.num_envs x {key}.algorithm.chunks_per_job), or be at least as large"
        ]

    #: No decision of a rollout is left out (else its rows never divide evenly).
    every_decision_counts = True

    @classmethod
    def build(
        cls,
        head: ActionHead,
        normalizer: Normalizer,
        settings: Any,
        batch_size: int,
        networks: Networks | None,
        draw: Callable[[int], TensorDict],
        share: Share,
    ) -> Objective:
        """With ``sft_weight`` demonstrations are mixed in."""
        rl = cls(head, normalizer, settings, batch_size, networks)
        if settings.sft_weight is None:
            return rl
        return CoTraining(rl, SFT(head, normalizer, SFT.configure(), batch_size), settings.sft_weight, draw, share)

    @classmethod
    def waits_for_actor(cls, settings: Any) -> bool:
        """With ``proximal``, of those that have it."""
        return isinstance(settings, ClipSettings) and settings.proximal

    @classmethod
    def job_fields(cls, settings: Any) -> tuple[str, ...]:
        """Also how the actor saw the rollout, if it was asked."""
        return cls.fields + ((PROXIMAL_LOG_PROB,) if cls.waits_for_actor(settings) else ())

    @classmethod
    def advantages(cls, rollout: TensorDict, settings: Any) -> TensorDict:
        """``advantage``, ``value_target``, ``counts`` (bool) ``[N, L, 1]``, and ``sample_log_prob`` ``[N, L, U]``, see
        :func:`likelihood_units`."""
        advantage, value_target, counts = cls.advantage(rollout, settings)
        executed = cast(TensorDict, rollout["next"])[EXECUTED]
        units = likelihood_units(rollout[LOG_PROBS], executed, settings.log_prob, settings.log_prob_level)
        return TensorDict(
            {"advantage": advantage, "value_target": value_target, "sample_log_prob": units, "counts": counts},
            rollout.batch_size,
        )

    def counted(self, data: TensorDict) -> TensorDict:
        """Without decisions that teach nothing."""
        return data[data["counts"].squeeze(-1)]

    def cut(self, weights: Sequence[RowWeights], rank: int) -> Iterable[Minibatch]:
        """``epochs`` passes, each in an order that is drawn when it begins."""
        num_rows = sum(len(w["rows"]) for w in weights)
        orders = (torch.randperm(num_rows) for _ in range(self.settings.epochs if num_rows else 0))
        return cut_permutation(weights, orders, self.settings.minibatch_size, rank)

    @torch.no_grad()
    def actor_forward(self, batch: TensorDict) -> TensorDict:
        """How the present policy sees a rollout: rows with features, as for :meth:`loss` -> derived columns.

        Returns:
            ``proximal_log_prob`` ``[B, U]`` and, where the algorithm has a critic, ``proximal_value`` ``[B, 1]``.
        """
        state = self.normalizer.normalize_state(batch["state"])
        log_probs, _ = self.head.evaluate(batch["features"], state, batch["vla_action"])
        units = likelihood_units(log_probs, batch[EXECUTED], self.settings.log_prob, self.settings.log_prob_level)
        columns = {PROXIMAL_LOG_PROB: units}
        if self.needs_critic:
            columns[PROXIMAL_VALUE] = self.head.value(batch["features"], state)
        return TensorDict(columns, batch.batch_size)

    def row_weights(self, data: TensorDict) -> dict[str, Tensor]:
        """How many likelihood units each row has, and 1."""
        mask = unit_mask(data[EXECUTED], data[CHUNK].shape[-1], self.settings.log_prob_level)
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
        mask = unit_mask(executed, num_dims, self.settings.log_prob_level)
        old, advantage = batch["sample_log_prob"][mask], batch["advantage"].expand_as(mask)[mask]
        metrics = {}
        if self.waits_for_actor(self.settings):
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
            for key, value in list(out.items()):
                out[key] = value * shares["units" if key in PER_UNIT else "rows"]
        policy_loss, value_loss = out[self.policy_loss], out.get(self.value_loss, None)
        loss = policy_loss
        metrics["policy_loss"] = policy_loss.detach()
        if "loss_entropy" in out.keys():
            loss = loss + out["loss_entropy"]
        if value_loss is not None:
            metrics["value_loss"] = value_loss.detach()
            value_loss = self.weighted_value_loss(value_loss)
            loss = value_loss if self.warming_up(jobs_completed) else loss + value_loss
        named = {
            "kl": "kl_approx",
            "clip_fraction": "clip_fraction",
            "ratio": "mean_ratio",
            "entropy": "entropy",
            "explained_variance": "explained_variance",
        }
        metrics |= {name: out[key].detach().mean() for name, key in named.items() if out.get(key, None) is not None}
        return {"loss": loss, **metrics}
