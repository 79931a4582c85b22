"""PPO on action chunks: ``torchrl.objectives.ClipPPOLoss`` and TorchRL's GAE, with a masked chunk likelihood.

One decision = one chunk. Its reward is the sum up to the first done; actions after the done were never carried out,
so they carry no likelihood, no entropy and no gradient (``executed`` mask).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import cast

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor
from torch.distributions import Distribution
from torchrl.modules import ProbabilisticActor
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value.functional import generalized_advantage_estimate

from nexus_lightning.config import AlgorithmConfig
from nexus_lightning.head import ActionHead
from nexus_lightning.schema import Normalizer

CHUNK = ("vla_action", "chunk")
LOG_PROBS = ("vla_action", "log_probs")
EXECUTED = "executed"


def reduce_chunk(values: Tensor, executed: Tensor, reduction: str) -> Tensor:
    """Per-element ``values`` ``[B, T, A]`` -> ``[B]`` over executed steps: sum, or mean over executed elements."""
    mask = executed.unsqueeze(-1).to(values.dtype)
    total = (values * mask).sum((-2, -1))
    if reduction == "sum":
        return total
    return total / (mask.sum((-2, -1)) * values.shape[-1]).clamp(min=1)


class EvaluatedDecision(Distribution):
    """The likelihood of one given decision per row, as a distribution that TorchRL's loss can ask.

    A head's :meth:`~nexus_lightning.head.ActionHead.evaluate` has already computed it, for a Gaussian chunk as well as
    for a denoising chain or tokens; unexecuted steps count for nothing. It cannot sample: the loss never does.
    """

    arg_constraints = {}  # pyright: ignore[reportAssignmentType]

    def __init__(self, log_probs: Tensor, entropy: Tensor, executed: Tensor, reduction: str = "sum") -> None:
        self.log_probs, self.entropies = log_probs, entropy
        self.executed, self.reduction = executed, reduction
        super().__init__(log_probs.shape[:-2], log_probs.shape[-2:], validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        del value
        return reduce_chunk(self.log_probs, self.executed, self.reduction)

    def entropy(self) -> Tensor:
        return reduce_chunk(self.entropies, self.executed, self.reduction)


def compute_advantages(rollout: TensorDict, algorithm: AlgorithmConfig) -> TensorDict:
    """GAE over chunks (Schulman et al. 2016, through TorchRL's functional form).

    Args:
        rollout: ``[N, L]`` (simulators x decisions) with ``state_value`` ``[N, L, 1]``, ``("next", "state_value")``
            (zero where terminated, the critic's estimate where truncated or cut), ``("next", "reward"|"done"|
            "terminated")``.

    Returns:
        Derived columns ``[N, L]``: ``advantage`` (normalised over this job), ``value_target``, ``sample_log_prob``.
    """
    following = cast(TensorDict, rollout["next"])
    advantage, value_target = generalized_advantage_estimate(
        algorithm.gamma,
        algorithm.gae_lambda,
        rollout["state_value"],
        following["state_value"],
        following["reward"],
        following["done"],
        following["terminated"],
    )
    normalised = (advantage - advantage.mean()) / advantage.std(unbiased=False).clamp(min=1e-6)
    log_prob = reduce_chunk(rollout[LOG_PROBS], following[EXECUTED], algorithm.log_prob)
    return TensorDict(
        {"advantage": normalised, "value_target": value_target, "sample_log_prob": log_prob}, rollout.batch_size
    )


class PPOObjective:
    """Clipped PPO over the rows of one rollout partition.

    Partition fields (rows = decisions): ``features`` and raw ``state`` (or, without feature reuse, ``observation`` and
    ``language_instruction``, from which the module computes them once per job), ``vla_action`` (normalised chunk, and
    the trace of heads that have one), ``executed``, ``sample_log_prob`` (behaviour policy), ``advantage``,
    ``value_target``, ``state_value``.
    """

    #: Observations are encoded once per job: every epoch reads them again.
    encode_whole_job = True
    fields = (
        "vla_action",
        EXECUTED,
        "state_value",
        "sample_log_prob",
        "advantage",
        "value_target",
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
            distribution_kwargs={"reduction": algorithm.log_prob},
        )
        self.head = head
        critic = TensorDictModule(head.value, in_keys=["features", "state"], out_keys=["state_value"])
        self.loss_module = ClipPPOLoss(
            actor,
            critic,
            clip_epsilon=algorithm.clip_epsilon,
            entropy_bonus=algorithm.entropy_coef > 0,
            entropy_coeff=algorithm.entropy_coef,
            critic_coeff=algorithm.critic_coef,
            loss_critic_type="l2",
            normalize_advantage=False,
            functional=False,
        )
        self.loss_module.set_keys(
            action=CHUNK,
            sample_log_prob="sample_log_prob",
            advantage="advantage",
            value_target="value_target",
            value="state_value",
        )

    def minibatches(self, data: TensorDict) -> Iterator[TensorDict]:
        """``epochs`` passes in an order drawn from the tenant's random stream (the caller is inside its scope)."""
        for _ in range(self.algorithm.epochs):
            for rows in torch.randperm(len(data)).split(self.algorithm.minibatch_size):
                yield data[rows]

    def loss(self, batch: TensorDict, jobs_completed: int) -> dict[str, Tensor]:
        """``{"loss", "policy_loss", "value_loss", "kl", "clip_fraction", "ratio", "entropy"}`` (scalars)."""
        batch = copy.copy(batch)
        batch["state"] = self.normalizer.normalize_state(batch["state"])
        out = self.loss_module(batch)
        warming_up = jobs_completed < self.algorithm.value_warmup_jobs
        loss = out["loss_critic"] if warming_up else out["loss_critic"] + out["loss_objective"]
        if "loss_entropy" in out.keys() and not warming_up:
            loss = loss + out["loss_entropy"]
        metrics = {
            "loss": loss,
            "policy_loss": out["loss_objective"].detach(),
            "value_loss": out["loss_critic"].detach(),
            "kl": out["kl_approx"].detach(),
            "clip_fraction": out["clip_fraction"].detach(),
        }
        if "entropy" in out.keys():
            metrics["entropy"] = out["entropy"].detach().mean()
        return metrics
