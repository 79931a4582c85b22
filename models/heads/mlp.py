"""A chunked MLP head: regression for SFT, Gaussian policy and critic for RL.

Shape suffixes: B samples, L tokens, D token width, K keypoints, S state dims, T chunk, A action dims.

::

    image tokens [B,L,D] --1x1--> K maps --soft-argmax--> (x, y) and maximum of each --+
    text tokens  [B,L,D] --masked mean--> linear --------------------------------------+--> MLP --> chunk [B,T,A]
    state [B,S] -----------------------------------------------------------------------+

This is kind ``tokens``. Kind ``pooled``: the backbone's pooled vector and the state --> MLP. Kind ``action_tokens``:
each of the T action tokens, with state and step added --> residual MLP --> its A dims (OpenVLA-OFT, arXiv 2502.19645).

A global average over an image loses where things are; keypoints (deep spatial autoencoders, Finn et al. 2016,
arXiv 1509.06113) keep it and stay cheap on a CPU.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Normal

from nexus_lightning.backbone import FeatureSegment, FeatureSpec, VLAFeature
from nexus_lightning.head import ActionHead
from nexus_lightning.schema import TenantSchema

ACTIVATIONS = {"silu": nn.SiLU, "tanh": nn.Tanh}
LOSSES = {"l1": F.l1_loss, "l2": F.mse_loss, "smooth_l1": F.smooth_l1_loss}
#: Sharpness of the spatial softmax.
KEYPOINT_TEMPERATURE = 3.0
#: Range of the learned log standard deviation (0.0067 to 1.65 in normalised action units).
LOG_STD_RANGE = (-5.0, 0.5)


class ChunkMLPHead(ActionHead):
    """MLP on features and state; see the module docstring.

    The critic (:attr:`value_head`) has its own pooling and MLP, so actor and critic gradients never mix.

    Args:
        feature_spec: of the backbone, kind ``action_tokens``, ``tokens`` or ``pooled``.
        schema: of the tenant.
        hidden_dim: width of the hidden layers of actor and critic.
        num_layers: hidden layers of each (residual blocks for ``action_tokens``).
        activation: ``silu`` or ``tanh`` (smoother policies for PPO).
        num_keypoints: keypoints per image (kind ``tokens``).
        text_dim: width to which a non-spatial segment is projected (kind ``tokens``; many tenants have one text:
            keep it small).
        use_features: False ignores the features: for tenants whose state says everything.
        loss: ``l1``, ``l2`` or ``smooth_l1``.
        state_noise: standard deviation of Gaussian noise on the normalised state in :meth:`loss`, training mode only.
        log_std_init: initial log standard deviation of the Gaussian policy.

    Raises:
        ValueError: an option is none of its choices.
    """

    reads = ("action_tokens", "tokens", "pooled")
    supports_rl = True

    def __init__(
        self,
        feature_spec: FeatureSpec,
        schema: TenantSchema,
        hidden_dim: int = 256,
        num_layers: int = 2,
        activation: Literal["silu", "tanh"] = "silu",
        num_keypoints: int = 24,
        text_dim: int = 16,
        use_features: bool = True,
        loss: Literal["l1", "l2", "smooth_l1"] = "l1",
        state_noise: float = 0.02,
        log_std_init: float = -1.6,
    ) -> None:
        super().__init__(feature_spec, schema)
        for key, value, choices in (("activation", activation, ACTIVATIONS), ("loss", loss, LOSSES)):
            if value not in choices:
                raise ValueError(f"{key}={value!r}: choose one of {', '.join(choices)}")
        if not LOG_STD_RANGE[0] <= log_std_init <= LOG_STD_RANGE[1]:
            raise ValueError(f"log_std_init={log_std_init}: must be within {LOG_STD_RANGE}")
        self.loss_name = loss
        self.state_noise = state_noise
        spec = feature_spec if use_features else None
        sizes = (schema.state_dim, schema.chunk, schema.action_dim, hidden_dim, num_layers, num_keypoints, text_dim)
        self._architecture = (feature_spec, use_features, activation, *sizes)

        self._network = partial(
            PooledMLP,
            spec,
            hidden_dim=hidden_dim,
            num_layers=num_layers,
            activation=activation,
            num_keypoints=num_keypoints,
            text_dim=text_dim,
        )
        if spec is not None and spec.kind == "action_tokens":
            self.actor = _TokenMLP(spec.segments[0], schema, hidden_dim, num_layers, activation)
        else:
            self.actor = self._network(schema.state_dim, schema.chunk * schema.action_dim)
        self.log_std = nn.Parameter(torch.full((schema.chunk, schema.action_dim), float(log_std_init)))
        self.value_head = self._network(schema.state_dim, 1)

    def loss(self, features: VLAFeature, state: Tensor, actions: Tensor, is_pad: Tensor) -> dict[str, Tensor]:
        """Regression of the chunk; see :meth:`ActionHead.loss`. Metrics: ``l1``, the mean absolute error."""
        if self.training and self.state_noise:
            state = state + self.state_noise * torch.randn_like(state)
        predicted_BTA = self._chunk(features, state)
        valid_BT1 = ~is_pad.unsqueeze(-1)
        # A padded step's target is the prediction itself: no loss, no gradient, whatever the padding holds.
        target_BTA = torch.where(valid_BT1, actions, predicted_BTA.detach())
        num_valid = (valid_BT1.sum() * actions.shape[-1]).clamp(min=1)
        total = LOSSES[self.loss_name](predicted_BTA, target_BTA, reduction="sum")
        return {
            "loss": total / num_valid,
            "l1": (predicted_BTA.detach() - target_BTA).abs().sum() / num_valid,
        }

    def act(self, features: VLAFeature, state: Tensor, noise: Tensor | None = None) -> TensorDict:
        """Mean chunk, or ``mean + std * noise``; see :meth:`ActionHead.act`."""
        dist = self.get_dist(features, state)
        chunk = dist.loc if noise is None else dist.loc + dist.scale * noise
        return TensorDict(
            {"chunk": chunk, "log_probs": dist.log_prob(chunk), "state_value": self.value(features, state)},
            batch_size=[len(state)],
        )

    def get_dist(self, features: VLAFeature, state: Tensor) -> Normal:
        """See :meth:`ActionHead.get_dist`; the standard deviation does not depend on the observation."""
        loc = self._chunk(features, state)
        # validate_args synchronises with the device on every call.
        return Normal(loc, self.log_std.clamp(*LOG_STD_RANGE).exp().expand_as(loc), validate_args=False)

    def value(self, features: VLAFeature, state: Tensor) -> Tensor:
        """See :meth:`ActionHead.value`."""
        return self.value_head(features, state)

    def q_network(self, action_size: int) -> nn.Module:
        """See :meth:`ActionHead.q_network`."""
        return self._network(self.schema.state_dim + action_size, 1)

    @property
    def stack_key(self) -> Hashable:
        """See :attr:`ActionHead.stack_key`."""
        return self._architecture

    def _chunk(self, features: VLAFeature, state: Tensor) -> Tensor:
        return self.actor(features, state).reshape(len(state), self.schema.chunk, self.schema.action_dim)


class PooledMLP(nn.Module):
    """One vector per sample from features and state, then an MLP: ``[B, out_dim]``.

    Kind ``tokens``: every segment is pooled (keypoints of a grid, else a masked mean). Any other kind: the backbone's
    own ``pooled`` vector, normalised (its scale differs from backbone to backbone). ``feature_spec=None``: state only.
    """

    def __init__(
        self,
        feature_spec: FeatureSpec | None,
        state_dim: int,
        out_dim: int,
        hidden_dim: int = 256,
        num_layers: int = 2,
        activation: str = "silu",
        num_keypoints: int = 24,
        text_dim: int = 16,
    ) -> None:
        super().__init__()
        self.read_pooled = feature_spec is not None and feature_spec.kind != "tokens"
        segments = feature_spec.segments if feature_spec is not None and not self.read_pooled else ()
        self.pools = nn.ModuleDict(
            {
                segment.name: _KeypointPool(segment.dim, segment.grid, num_keypoints)
                if segment.grid
                else _MeanPool(segment.dim, text_dim)
                for segment in segments
            }
        )
        width = state_dim + sum(3 * num_keypoints if segment.grid else text_dim for segment in segments)
        if feature_spec is not None and self.read_pooled:
            width += feature_spec.pooled_dim
        layers: list[nn.Module] = []
        for _ in range(num_layers):
            layers += [nn.Linear(width, hidden_dim), ACTIVATIONS[activation]()]
            width = hidden_dim
        self.mlp = nn.Sequential(*layers, nn.Linear(width, out_dim))

    def forward(self, features: VLAFeature, state: Tensor) -> Tensor:
        pooled = [pool(features.tokens[name], features.mask[name]) for name, pool in self.pools.items()]
        if self.read_pooled:
            pooled.append(F.layer_norm(features.pooled, features.pooled.shape[-1:]))
        return self.mlp(torch.cat([*pooled, state], dim=-1))


class _TokenMLP(nn.Module):
    """Each action token's state, with the robot's state added, through residual blocks: ``[B, T, A]``.

    The regression head of OpenVLA-OFT (Kim et al. 2025, arXiv 2502.19645): one network for all steps. OFT trains the
    VLM to tell the steps apart; here it is frozen and the action tokens are all alike, so each step has an embedding.
    """

    def __init__(
        self, segment: FeatureSegment, schema: TenantSchema, hidden_dim: int, num_layers: int, activation: str
    ) -> None:
        super().__init__()
        self.name = segment.name
        self.embed = nn.Sequential(nn.LayerNorm(segment.dim), nn.Linear(segment.dim, hidden_dim))
        self.embed_state = nn.Linear(schema.state_dim, hidden_dim)
        self.step = nn.Parameter(0.5 * torch.randn(schema.chunk, hidden_dim))  # as large as the embedded tokens
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(hidden_dim), nn.Linear(hidden_dim, hidden_dim), ACTIVATIONS[activation]())
            for _ in range(num_layers)
        )
        self.out = nn.Sequential(nn.LayerNorm(hidden_dim), nn.Linear(hidden_dim, schema.action_dim))

    def forward(self, features: VLAFeature, state: Tensor) -> Tensor:
        x_BTD = self.embed(features.tokens[self.name]) + self.embed_state(state).unsqueeze(1) + self.step
        for block in self.blocks:
            x_BTD = x_BTD + block(x_BTD)
        return self.out(x_BTD)


class _KeypointPool(nn.Module):
    """Grid tokens ``[B, L, D]`` -> ``[B, 3 * K]``: soft-argmax (y, x) in [-1, 1] of K learned maps and their maxima."""

    def __init__(self, dim: int, grid: tuple[int, int], num_keypoints: int) -> None:
        super().__init__()
        self.to_maps = nn.Linear(dim, num_keypoints)
        rows, cols = (torch.linspace(-1, 1, n) for n in grid)
        self.register_buffer("cells", torch.cartesian_prod(rows, cols), persistent=False)

    def forward(self, tokens_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        maps_BKL = self.to_maps(tokens_BLD.to(self.to_maps.weight.dtype)).transpose(1, 2).contiguous()
        maps_BKL = maps_BKL.masked_fill(~mask_BL.unsqueeze(1), torch.finfo(maps_BKL.dtype).min / KEYPOINT_TEMPERATURE)
        places_BK2 = (KEYPOINT_TEMPERATURE * maps_BKL).softmax(-1) @ self.cells
        return torch.cat([places_BK2.flatten(1), maps_BKL.amax(-1)], dim=-1)


class _MeanPool(nn.Module):
    """Tokens ``[B, L, D]`` -> a projection ``[B, out_dim]`` of their masked mean, scaled to length 1.

    Without the scaling Adam's equal step on each of the D weights moves the output of a constant instruction so far
    that a PPO update spends its trust region on one shift of all actions.
    """

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__()
        self.project = nn.Linear(dim, out_dim)

    def forward(self, tokens_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        weight_BL1 = mask_BL.unsqueeze(-1).to(self.project.weight.dtype)
        mean_BD = (tokens_BLD * weight_BL1).sum(1) / weight_BL1.sum(1).clamp(min=1)
        return self.project(F.normalize(mean_BD, dim=-1))
