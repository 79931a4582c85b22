"""A flow-matching head: a small diffusion transformer that turns noise into an action chunk.

Shape suffixes: B samples, R noise draws per sample, T chunk, A action dims, N = 1 + T, L context tokens, D width.

::

    tokens of every segment --project, + position--> context [B,L,D] ----cross-attention---+
    state [B,S], time --> condition (adaLN) ------------------------------------------+    |
    [state token, noisy action tokens] [B,N,D] --> depth x (self-attention, cross-attention, MLP) --> velocity [B,T,A]

Sources: rectified flow (Liu et al. 2022, arXiv 2209.03003); the action transformer and the time distribution of pi0
(arXiv 2410.24164) and GR00T N1 (arXiv 2503.14734); adaLN-Zero of DiT (Peebles and Xie 2022, arXiv 2212.09748).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn

from nexus_lightning.backbone import FeatureSegment, FeatureSpec, VLAFeature
from nexus_lightning.head import ActionHead
from nexus_lightning.schema import TenantSchema

#: Width, depth and attention heads of each size.
SIZES = {"XS": (64, 2, 4), "S": (128, 4, 4), "B": (256, 6, 8)}
#: Frequencies of the time embedding; time in [0, 1] is first scaled to a range where they differ.
TIME_FREQUENCIES, TIME_SCALE = 32, 1000.0
#: pi0 draws 1 - t from Beta(1.5, 1) and cuts t below 1: more weight on the noisy end, where the choice is made.
BETA, TIME_LIMIT = 1.5, 0.999


class FlowMatchingHead(ActionHead):
    """Flow matching from noise (time 0) to the action chunk (time 1); SFT and inference, no RL.

    ``act`` integrates ``num_steps`` Euler steps. With ``noise=None`` it starts from zeros, the mean of the noise: the
    deterministic mode.

    Args:
        feature_spec: of the backbone, kind ``tokens``.
        schema: of the tenant.
        size: ``XS``, ``S`` or ``B``.
        num_steps: Euler steps of :meth:`act`.
        noise_samples: (noise, time) draws per sample and loss: the context is read once for all of them.
        pool_grid: spatial segments are averaged down to at most ``pool_grid x pool_grid`` tokens, to bound the cost.

    Raises:
        ValueError: an unknown size, or a count below 1.
    """

    reads = ("tokens",)

    def __init__(
        self,
        feature_spec: FeatureSpec,
        schema: TenantSchema,
        size: Literal["XS", "S", "B"] = "XS",
        num_steps: int = 10,
        noise_samples: int = 4,
        pool_grid: int = 8,
    ) -> None:
        super().__init__(feature_spec, schema)
        if size not in SIZES:
            raise ValueError(f"size={size!r}: choose one of {', '.join(SIZES)}")
        for key, value in (("num_steps", num_steps), ("noise_samples", noise_samples), ("pool_grid", pool_grid)):
            if value < 1:
                raise ValueError(f"{key}={value}: must be at least 1")
        self.num_steps = num_steps
        self.noise_samples = noise_samples
        dim, depth, num_heads = SIZES[size]
        self.context = _Context(feature_spec.segments, dim, pool_grid)
        self.embed_action = nn.Linear(schema.action_dim, dim)
        self.embed_state = nn.Linear(schema.state_dim, dim)
        self.embed_time = nn.Sequential(nn.Linear(2 * TIME_FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.condition_on_state = nn.Linear(schema.state_dim, dim)
        self.position = nn.Parameter(0.02 * torch.randn(1 + schema.chunk, dim))
        self.blocks = nn.ModuleList(_Block(dim, num_heads) for _ in range(depth))
        self.final_modulation = _zeroed(nn.Linear(dim, 2 * dim))
        self.to_velocity = _zeroed(nn.Linear(dim, schema.action_dim))

    def loss(self, features: VLAFeature, state: Tensor, actions: Tensor, is_pad: Tensor) -> dict[str, Tensor]:
        """Mean squared error of the velocity; see :meth:`ActionHead.loss`.

        Padded steps are hidden from the other steps' attention and carry no loss.
        """
        valid_BT1 = ~is_pad.unsqueeze(-1)
        actions = torch.where(valid_BT1, actions, torch.zeros_like(actions))
        shape = (len(actions), self.noise_samples)
        # The inverse distribution function of Beta(a, 1) is u ** (1 / a).
        noisiness = torch.rand(shape, device=actions.device, dtype=actions.dtype) ** (1 / BETA)
        time_BR = TIME_LIMIT * (1 - noisiness)
        noise_BRTA = torch.randn(*shape, *actions.shape[1:], device=actions.device, dtype=actions.dtype)
        actions_B1TA = actions.unsqueeze(1)
        noisy_BRTA = torch.lerp(noise_BRTA, actions_B1TA.expand_as(noise_BRTA), time_BR[..., None, None])

        velocity_BRTA = self._velocity(noisy_BRTA, time_BR, state, self._memory(features), ~is_pad)
        squared = (velocity_BRTA - (actions_B1TA - noise_BRTA)).square() * valid_BT1.unsqueeze(1)
        num_valid = (valid_BT1.sum() * actions.shape[-1] * self.noise_samples).clamp(min=1)
        return {"loss": squared.sum() / num_valid}

    def act(self, features: VLAFeature, state: Tensor, noise: Tensor | None = None) -> TensorDict:
        """Integrate the flow from ``noise`` (or zeros); see :meth:`ActionHead.act`."""
        shape = (len(state), 1, self.schema.chunk, self.schema.action_dim)
        chunk_B1TA = state.new_zeros(shape) if noise is None else noise.unsqueeze(1)
        memory = self._memory(features)
        for step in range(self.num_steps):
            time_B1 = state.new_full(shape[:2], step / self.num_steps)
            chunk_B1TA = chunk_B1TA + self._velocity(chunk_B1TA, time_B1, state, memory) / self.num_steps
        return TensorDict({"chunk": chunk_B1TA.squeeze(1)}, batch_size=[len(state)])

    def _memory(self, features: VLAFeature) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Keys, values and mask of the cross-attention of each block: the same for every draw and Euler step."""
        context_BLD, mask_BL = self.context(features)
        return [(*block.cross.keys_values(context_BLD), mask_BL[:, None, None, :]) for block in self.blocks]

    def _velocity(
        self,
        noisy_BRTA: Tensor,
        time_BR: Tensor,
        state: Tensor,
        memory: list[tuple[Tensor, Tensor, Tensor]],
        valid_BT: Tensor | None = None,
    ) -> Tensor:
        """Velocity ``[B, R, T, A]`` at the noisy chunk and time; invalid steps are hidden from self-attention."""
        condition_BRD = self.embed_time(_sinusoid(TIME_SCALE * time_BR, TIME_FREQUENCIES))
        condition_BRD = F.silu(condition_BRD + self.condition_on_state(state).unsqueeze(1))
        actions_BRTD = self.embed_action(noisy_BRTA)
        state_BR1D = self.embed_state(state)[:, None, None].expand(*actions_BRTD.shape[:2], 1, -1)
        x_BRND = torch.cat([state_BR1D, actions_BRTD], dim=2) + self.position
        self_mask = None
        if valid_BT is not None:
            keys_BN = F.pad(valid_BT, (1, 0), value=True)
            self_mask = keys_BN.repeat_interleave(noisy_BRTA.shape[1], dim=0)[:, None, None, :]
        for block, cross_memory in zip(self.blocks, memory, strict=True):
            x_BRND = block(x_BRND, condition_BRD, cross_memory, self_mask)
        shift, scale = self.final_modulation(condition_BRD).unsqueeze(2).chunk(2, dim=-1)
        return self.to_velocity(_norm(x_BRND[:, :, 1:]) * (1 + scale) + shift)


class _Context(nn.Module):
    """All segments as one sequence ``[B, L, D]`` and its mask ``[B, L]``; first comes a learned, always valid token."""

    def __init__(self, segments: tuple[FeatureSegment, ...], dim: int, pool_grid: int) -> None:
        super().__init__()
        self.segments = segments
        self.project = nn.ModuleDict({s.name: nn.Linear(s.dim, dim) for s in segments})
        self.norm = nn.LayerNorm(dim)
        self.empty = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.kind = nn.ParameterDict({s.name: nn.Parameter(0.02 * torch.randn(dim)) for s in segments})
        self.pooled_grids = {s.name: tuple(min(n, pool_grid) for n in s.grid) for s in segments if s.grid}
        for name, grid in self.pooled_grids.items():
            self.register_buffer(f"position_{name}", _sinusoid_2d(grid, dim), persistent=False)

    def forward(self, features: VLAFeature) -> tuple[Tensor, Tensor]:
        batch = len(features.pooled)
        parts = [self.empty.expand(batch, -1, -1)]
        masks = [torch.ones(batch, 1, dtype=torch.bool, device=self.empty.device)]
        for segment in self.segments:
            tokens = features.tokens[segment.name].to(self.empty.dtype)
            mask = features.mask[segment.name]
            if segment.grid:
                tokens, mask = _pool(tokens, mask, segment.grid, self.pooled_grids[segment.name])
            x = self.norm(self.project[segment.name](tokens)) + self.kind[segment.name]
            if segment.grid:
                x = x + getattr(self, f"position_{segment.name}")
            parts.append(x)
            masks.append(mask)
        return torch.cat(parts, dim=1), torch.cat(masks, dim=1)


class _Block(nn.Module):
    """Self-attention, cross-attention, MLP; the condition modulates and gates the first and the last (adaLN-Zero)."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.attention = _Attention(dim, num_heads)
        self.cross = _Attention(dim, num_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))
        self.modulation = _zeroed(nn.Linear(dim, 6 * dim))

    def forward(
        self,
        x_BRND: Tensor,
        condition_BRD: Tensor,
        memory: tuple[Tensor, Tensor, Tensor],
        self_mask: Tensor | None,
    ) -> Tensor:
        size = x_BRND.shape[:3]
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = (
            self.modulation(condition_BRD).unsqueeze(2).chunk(6, dim=-1)
        )
        h = (_norm(x_BRND) * (1 + scale_1) + shift_1).flatten(0, 1)
        x_BRND = x_BRND + gate_1 * self.attention(h, *self.attention.keys_values(h), self_mask).unflatten(0, size[:2])
        # All draws of a sample are queries into the same context.
        cross = self.cross(_norm(x_BRND).flatten(1, 2), *memory)
        x_BRND = x_BRND + cross.unflatten(1, size[1:])
        return x_BRND + gate_2 * self.mlp(_norm(x_BRND) * (1 + scale_2) + shift_2)


class _Attention(nn.Module):
    """Multi-head attention whose keys and values can be computed ahead."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_query = nn.Linear(dim, dim)
        self.to_keys_values = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.to_keys_values(x).chunk(2, dim=-1)
        return self._split(keys), self._split(values)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        attended = F.scaled_dot_product_attention(self._split(self.to_query(x)), keys, values, attn_mask=mask)
        return self.out(attended.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _zeroed(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def _pool(tokens: Tensor, mask: Tensor, grid: tuple[int, int], out: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Average the valid tokens of each cell of an ``out`` grid; a cell is valid when any of its tokens is."""
    if grid == out:
        return tokens, mask
    weight = mask.unsqueeze(-1).to(tokens.dtype)
    stacked = torch.cat([tokens * weight, weight], dim=-1).transpose(1, 2).unflatten(-1, grid)
    pooled = F.adaptive_avg_pool2d(stacked, out).flatten(2).transpose(1, 2)
    total, share = pooled[..., :-1], pooled[..., -1:]
    valid = share > 0
    return total / torch.where(valid, share, 1.0), valid.squeeze(-1)


def _sinusoid(position: Tensor, num_frequencies: int) -> Tensor:
    """``[...]`` -> ``[..., 2 * num_frequencies]``, wavelengths from 2 pi to 10000 * 2 pi (Vaswani et al. 2017)."""
    exponents = torch.arange(num_frequencies, device=position.device, dtype=position.dtype) / num_frequencies
    angles = position.unsqueeze(-1) * torch.exp(-math.log(10000.0) * exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def _sinusoid_2d(grid: tuple[int, int], dim: int) -> Tensor:
    """``[rows * cols, dim]``: half the width tells the row, half the column."""
    row, col = (cells.flatten().float() for cells in torch.meshgrid(*map(torch.arange, grid), indexing="ij"))
    return torch.cat([_sinusoid(row, dim // 4), _sinusoid(col, dim // 4)], dim=-1)
