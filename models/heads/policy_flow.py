"""What the action experts of published policies have in common: flow matching on padded states and actions.

Shape suffixes: B samples, R noise draws per sample, T chunk, A action dims, M padded action dims of the policy.

SmolVLA (arXiv 2506.01844), pi0 (arXiv 2410.24164) and GR00T N1 (arXiv 2503.14734) draw the time from one distribution,
``0.999 * (1 - Beta(1.5, 1))`` where 0 is noise and 1 is the action: that of :mod:`models.heads.flow`. The first two
count it the other way round; their heads turn it at their own border.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor

from models.heads.flow import _FlowHead, masked_mse
from nexus_lightning.backbone import FeatureSpec, VLAFeature
from nexus_lightning.schema import TenantSchema


class _PolicyFlowHead(_FlowHead):
    """A flow head whose network takes states of ``max_state_dim`` and actions of ``max_action_dim`` (zeros appended).

    The policy denoises padded action dims too, and through attention they reach the real ones. So the chain, its noise
    and its trace have M dims, and the log-probability of a decision counts the M dims of every transition: the share of
    the padded ones is spread evenly over the A real ones of their step. Only real dims carry the supervised loss.

    A subclass gives :meth:`memory` and :meth:`velocity`, and sets ``value_head`` after it has loaded its weights.
    """

    def __init__(
        self,
        feature_spec: FeatureSpec,
        schema: TenantSchema,
        max_state_dim: int,
        max_action_dim: int,
        num_steps: int,
        noise_samples: int,
        sde_steps: Literal["all", "one"],
        sde_noise: float,
    ) -> None:
        super().__init__(feature_spec, schema, num_steps, noise_samples, sde_steps, sde_noise)
        for key, limit in (("state_dim", max_state_dim), ("action_dim", max_action_dim)):
            if getattr(schema, key) > limit:
                raise ValueError(f"{key}={getattr(schema, key)}: the checkpoint takes at most {limit}")
        self.max_state_dim, self.max_action_dim = max_state_dim, max_action_dim

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return (*super().noise_shape[:-1], self.max_action_dim)

    @property
    def trace_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super().trace_shapes
        return shapes | {"chain": (*shapes["chain"][:-1], self.max_action_dim)}

    def memory(self, features: VLAFeature, state_BS: Tensor) -> Any:
        """What every denoising step reads, computed once per sample; the state is already padded."""
        raise NotImplementedError

    def _context(self, features: VLAFeature, state: Tensor) -> Any:
        return self.memory(features, F.pad(state, (0, self.max_state_dim - state.shape[-1])))

    def loss(self, features: VLAFeature, state: Tensor, actions: Tensor, is_pad: Tensor) -> dict[str, Tensor]:
        """Mean squared error of the velocity over real dims and valid steps; see :meth:`ActionHead.loss`."""
        return self.loss_at(features, state, actions, is_pad, *self._draw(actions))

    def loss_at(
        self,
        features: VLAFeature,
        state: Tensor,
        actions: Tensor,
        is_pad: Tensor,
        noise_BRTM: Tensor,
        time_BR: Tensor,
    ) -> dict[str, Tensor]:
        """:meth:`loss` for given draws; the time may be float64, see :meth:`sample_actions`."""
        num_dims = actions.shape[-1]
        actions = torch.where(is_pad.unsqueeze(-1), torch.zeros_like(actions), actions)
        actions_B1TM = F.pad(actions, (0, self.max_action_dim - num_dims)).unsqueeze(1)
        weight = time_BR[..., None, None].to(actions.dtype)
        noisy_BRTM = torch.lerp(noise_BRTM, actions_B1TM.expand_as(noise_BRTM), weight)
        velocity_BRTM = self.velocity(noisy_BRTM, time_BR, self._context(features, state), ~is_pad)
        target_BRTM = actions_B1TM - noise_BRTM
        return {"loss": masked_mse(velocity_BRTM[..., :num_dims], target_BRTM[..., :num_dims], is_pad)}

    def sample_actions(self, features: VLAFeature, state: Tensor, noise_BTM: Tensor) -> Tensor:
        """The published policy's own sampler: Euler steps from ``noise`` to a chunk ``[B, T, A]``, nothing stochastic.

        ``act(noise=None)`` is this from zeros, the mean of the noise.
        """
        memory, x_B1TM = self._context(features, state), noise_BTM.unsqueeze(1)
        for step in range(self.num_steps):
            # In float64, because the policies' time embeddings tell apart times that differ by float32's rounding.
            time_B1 = torch.full((len(state), 1), step / self.num_steps, dtype=torch.float64, device=state.device)
            x_B1TM = x_B1TM + self.velocity(x_B1TM, time_B1, memory, None) / self.num_steps
        return x_B1TM[:, 0, :, : self.schema.action_dim]

    def act(self, features: VLAFeature, state: Tensor, noise: Tensor | None = None) -> TensorDict:
        """Denoise; see :meth:`ActionHead.act` and :meth:`_ChainHead.act`."""
        if noise is None:
            start = state.new_zeros(len(state), self.schema.chunk, self.max_action_dim)
            chunk = self.sample_actions(features, state, start)
            return TensorDict({"chunk": chunk, "state_value": self.value(features, state)}, batch_size=[len(state)])
        out = super().act(features, state, noise)
        out["chunk"] = out["chunk"][..., : self.schema.action_dim]
        out["log_probs"] = self._fold(out["log_probs"])
        return out

    def evaluate(self, features: VLAFeature, state: Tensor, sample: TensorDict) -> tuple[Tensor, Tensor]:
        """See :meth:`_ChainHead.evaluate`."""
        log_probs, entropy = super().evaluate(features, state, sample)
        return self._fold(log_probs), self._fold(entropy)

    def _fold(self, values_BTM: Tensor) -> Tensor:
        """``[B, T, M]`` -> ``[B, T, A]`` with the same sum."""
        num_dims = self.schema.action_dim
        return values_BTM[..., :num_dims] + values_BTM[..., num_dims:].sum(-1, keepdim=True) / num_dims
