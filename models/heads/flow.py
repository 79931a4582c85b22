"""What every head that denoises shares: the flow's training target, Euler steps, and the likelihood of a sampled chain.

Shape suffixes: B samples, R noise draws (or denoising steps) per sample, T chunk, A action dims, K denoising steps.

::

    time     0                                                    1
             noise x_0 -> x_1 -> ... -> x_k -> x_{k+1} -> ... -> x_K = chunk       K = num_steps
                                         `- one Gaussian transition: its log-density is the policy's

Time runs from 0 (noise) to 1 (action): ``x_t = (1 - t) noise + t action``, velocity ``action - noise`` (rectified flow,
Liu et al. 2022, arXiv 2209.03003). Published policies that count the other way (pi0, SmolVLA) pass ``1 - t`` and
negate.

The marginals of ``dx = v dt`` are also those of ``dx = [v + s_t^2 / 2 * score] dt + s_t dW`` (Flow-GRPO, Liu et al.
2025, arXiv 2505.05470; ReinFlow, arXiv 2505.22094, makes the steps of the same chain Gaussian with a
learned noise). For this path ``score(x, t) = (t v - x) / (1 - t)``, and ``s_t = a sqrt(1 - t)`` cancels the
denominator: drift ``v + a^2 / 2 (t v - x)``, nothing is singular. The Euler step is the transition

    ``x_{k+1} ~ N(x_k + drift / K, s_t^2 / K)``,  ``t = k / K``,

whose standard deviation stays positive at the last step (``a / K``).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from models.heads.mlp import PooledMLP
from nexus_lightning.backbone import FeatureSpec, VLAFeature
from nexus_lightning.head import ActionHead
from nexus_lightning.schema import TenantSchema

#: pi0 draws 1 - t from Beta(1.5, 1) and cuts t below 1: more weight on the noisy end, where the choice is made.
BETA, TIME_LIMIT = 1.5, 0.999


class _ChainHead(ActionHead):
    """Base of heads whose sample is a chain of K Gaussian steps; the likelihood is that of the chain, exactly.

    A subclass gives :meth:`_context` and :meth:`_transition`, and builds ``self.value_head`` with :func:`critic`, last
    (so that the actor's initial weights do not depend on the critic).

    ``sde_steps="all"``: every step is stochastic. ``"one"``: one step per sample, its index drawn from the noise; the
    others are deterministic, and only the two ends of that step are kept (as in RLinf's pi0, which draws one index for
    the whole batch).

    The noise of ``act`` is ``[B, K + 1, T, A]``: the start, then each step's. With ``"one"`` ``[B, 3, T, A]``: the
    start, the step's, and one number (element 0, 0) that chooses the step.

    ``log_probs`` sum the stochastic steps. The density of the start is left out: it does not depend on the weights, so
    it cancels in every ratio and has no gradient. The entropy is likewise constant in the weights: a bonus on it has
    no effect.

    Args:
        feature_spec: of the backbone.
        schema: of the tenant.
        num_steps: denoising steps K of :meth:`act`.
        noise_samples: (noise, time) draws per sample and loss: the context is read once for all of them.
        sde_steps: ``all`` or ``one``.

    Raises:
        ValueError: a count below 1, or an unknown ``sde_steps``.
    """

    supports_rl: ClassVar[bool] = True

    def __init__(
        self,
        feature_spec: FeatureSpec,
        schema: TenantSchema,
        num_steps: int,
        noise_samples: int,
        sde_steps: Literal["all", "one"],
    ) -> None:
        super().__init__(feature_spec, schema)
        check_at_least_one(num_steps=num_steps, noise_samples=noise_samples)
        if sde_steps not in ("all", "one"):
            raise ValueError(f"sde_steps={sde_steps!r}: choose one of all, one")
        self.num_steps = num_steps
        self.noise_samples = noise_samples
        self.sde_steps = sde_steps

    @property
    def noise_shape(self) -> tuple[int, ...]:
        count = self.num_steps + 1 if self.sde_steps == "all" else 3
        return (count, self.schema.chunk, self.schema.action_dim)

    @property
    def trace_shapes(self) -> dict[str, tuple[int, ...]]:
        """``chain``: the points of the chain, ``(K + 1, T, A)``; with ``sde_steps="one"`` the two ends of the
        stochastic step, ``(2, T, A)``, and ``step``, its index (int64)."""
        points = self.num_steps + 1 if self.sde_steps == "all" else 2
        shapes: dict[str, tuple[int, ...]] = {"chain": (points, self.schema.chunk, self.schema.action_dim)}
        return shapes if self.sde_steps == "all" else shapes | {"step": (1,)}

    def _context(self, features: VLAFeature, state: Tensor) -> Any:
        """What does not change from draw to draw and step to step, computed once."""
        raise NotImplementedError

    def _transition(self, x_BRTA: Tensor, step_BR: Tensor, memory: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Step ``step`` (int64, 0 to K - 1) from ``x``.

        Returns:
            The next point of the deterministic chain and the mean of the stochastic one, ``[B, R, T, A]``, and the
            standard deviation ``[B, R, 1, 1]``.
        """
        raise NotImplementedError

    def act(self, features: VLAFeature, state: Tensor, noise: Tensor | None = None) -> TensorDict:
        """Denoise; see :meth:`ActionHead.act`. ``noise=None``: the deterministic chain from zeros, the mean start."""
        memory, batch = self._context(features, state), len(state)
        out = TensorDict({"state_value": self.value(features, state)}, batch_size=[batch])
        steps_KB1 = torch.arange(self.num_steps, device=state.device).view(-1, 1, 1).expand(-1, batch, 1)
        if noise is None:
            x_B1TA = state.new_zeros(batch, 1, self.schema.chunk, self.schema.action_dim)
            for step_B1 in steps_KB1:
                x_B1TA = self._transition(x_B1TA, step_B1, memory)[0]
            return out.set("chunk", x_B1TA.squeeze(1))

        chosen_B1 = None if self.sde_steps == "all" else self._choose_step(noise[:, 2, 0, :1])
        x_B1TA = noise[:, :1]
        chain, log_probs = [x_B1TA], torch.zeros_like(x_B1TA)
        for k, step_B1 in enumerate(steps_KB1):
            following, mean, std = self._transition(x_B1TA, step_B1, memory)
            row = k + 1 if chosen_B1 is None else 1
            sampled = mean + std * noise[:, row : row + 1]
            log_prob = normal_log_prob(sampled, mean, std)
            if chosen_B1 is not None:
                stochastic = (chosen_B1 == step_B1)[..., None, None]
                sampled = torch.where(stochastic, sampled, following)
                log_prob = torch.where(stochastic, log_prob, 0.0)
            x_B1TA, log_probs = sampled, log_probs + log_prob
            chain.append(x_B1TA)
        trace = {"chain": torch.cat(chain, dim=1)}
        if chosen_B1 is not None:
            ends_B2 = torch.cat([chosen_B1, chosen_B1 + 1], dim=1)
            trace = {"chain": trace["chain"].take_along_dim(ends_B2[..., None, None], dim=1), "step": chosen_B1}
        out["chunk"], out["log_probs"] = x_B1TA.squeeze(1), log_probs.squeeze(1)
        return out.set("trace", TensorDict(trace, batch_size=[batch]))

    def evaluate(self, features: VLAFeature, state: Tensor, sample: TensorDict) -> tuple[Tensor, Tensor]:
        """Log-density and entropy of the stored steps, all in one network call; see :meth:`ActionHead.evaluate`."""
        chain = sample["trace", "chain"]
        if self.sde_steps == "all":
            step_BR = torch.arange(self.num_steps, device=chain.device).expand(len(chain), -1)
        else:
            step_BR = sample["trace", "step"]
        _, mean, std = self._transition(chain[:, :-1], step_BR, self._context(features, state))
        log_probs = normal_log_prob(chain[:, 1:], mean, std).sum(1)
        entropy = (0.5 * math.log(2 * math.pi * math.e) + std.log()).sum(1)
        return log_probs, entropy.expand_as(log_probs)

    def value(self, features: VLAFeature, state: Tensor) -> Tensor:
        """See :meth:`ActionHead.value`."""
        return self.value_head(features, state)

    def q_network(self, action_size: int) -> PooledMLP:
        """See :meth:`ActionHead.q_network`."""
        return PooledMLP(self.feature_spec, self.schema.state_dim + action_size, out_dim=1)

    def _choose_step(self, normal: Tensor) -> Tensor:
        """Standard normal numbers -> uniform step indices, int64, the same shape."""
        return (torch.special.ndtr(normal) * self.num_steps).long().clamp(max=self.num_steps - 1)


class _FlowHead(_ChainHead):
    """Base of flow-matching heads: a subclass gives :meth:`_context` and :meth:`velocity`.

    Args:
        feature_spec, schema, num_steps, noise_samples, sde_steps: see :class:`_ChainHead`.
        sde_noise: the ``a`` of the module docstring, in normalised action units: the standard deviation of step k is
            ``a * sqrt((1 - k / K) / K)``.

    Raises:
        ValueError: ``sde_noise`` is not positive; see also :class:`_ChainHead`.
    """

    def __init__(
        self,
        feature_spec: FeatureSpec,
        schema: TenantSchema,
        num_steps: int = 10,
        noise_samples: int = 4,
        sde_steps: Literal["all", "one"] = "all",
        sde_noise: float = 0.5,
    ) -> None:
        super().__init__(feature_spec, schema, num_steps, noise_samples, sde_steps)
        if sde_noise <= 0:
            raise ValueError(f"sde_noise={sde_noise}: must be positive, or sampled chains have no density")
        self.sde_noise = sde_noise

    def velocity(self, x_BRTA: Tensor, time_BR: Tensor, memory: Any, valid_BT: Tensor | None) -> Tensor:
        """Velocity ``[B, R, T, A]`` at ``x`` and time; steps that are not ``valid`` must not reach the others."""
        raise NotImplementedError

    def loss(self, features: VLAFeature, state: Tensor, actions: Tensor, is_pad: Tensor) -> dict[str, Tensor]:
        """Mean squared error of the velocity; see :meth:`ActionHead.loss`.

        Padded steps are hidden from the other steps and carry no loss.
        """
        actions = torch.where(is_pad.unsqueeze(-1), torch.zeros_like(actions), actions)
        noise_BRTA, time_BR = self._draw(actions)
        actions_B1TA = actions.unsqueeze(1)
        noisy_BRTA = torch.lerp(noise_BRTA, actions_B1TA.expand_as(noise_BRTA), time_BR[..., None, None])
        velocity_BRTA = self.velocity(noisy_BRTA, time_BR, self._context(features, state), ~is_pad)
        return {"loss": masked_mse(velocity_BRTA, actions_B1TA - noise_BRTA, is_pad)}

    def _draw(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Noise ``[B, R, T, A]`` (with the padded dims of a policy) and times ``[B, R]`` of a supervised loss."""
        shape = (len(actions), self.noise_samples)
        # The inverse distribution function of Beta(a, 1) is u ** (1 / a).
        noisiness = torch.rand(shape, device=actions.device, dtype=actions.dtype) ** (1 / BETA)
        size = (*shape, *self.noise_shape[-2:])
        return torch.randn(size, device=actions.device, dtype=actions.dtype), TIME_LIMIT * (1 - noisiness)

    def _transition(self, x_BRTA: Tensor, step_BR: Tensor, memory: Any) -> tuple[Tensor, Tensor, Tensor]:
        time_BR = step_BR.to(x_BRTA.dtype) / self.num_steps
        velocity = self.velocity(x_BRTA, time_BR, memory, None)
        time = time_BR[..., None, None]
        following = x_BRTA + velocity / self.num_steps
        mean = following + self.sde_noise**2 / (2 * self.num_steps) * (time * velocity - x_BRTA)
        return following, mean, self.sde_noise * ((1 - time) / self.num_steps).sqrt()


def masked_mse(predicted_BRTA: Tensor, target_BRTA: Tensor, is_pad_BT: Tensor) -> Tensor:
    """Mean squared error over the elements of valid steps; 0 when there is none."""
    valid_B1T1 = ~is_pad_BT[:, None, :, None]
    squared = (predicted_BRTA - target_BRTA).square() * valid_B1T1
    return squared.sum() / (valid_B1T1.sum() * squared.shape[1] * squared.shape[-1]).clamp(min=1)


def normal_log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Element-wise log-density of ``N(mean, std^2)``; positive where the density exceeds 1."""
    return -0.5 * ((x - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)


def critic(feature_spec: FeatureSpec, schema: TenantSchema) -> PooledMLP:
    """The critic of a denoising head: its own pooling and MLP, ``[B, 1]``; it shares nothing with the actor."""
    return PooledMLP(feature_spec, schema.state_dim, out_dim=1)


def check_at_least_one(**counts: int) -> None:
    """Raises:
    ValueError: a count is below 1."""
    for key, value in counts.items():
        if value < 1:
            raise ValueError(f"{key}={value}: must be at least 1")
