"""A flow-matching head: a small diffusion transformer that turns noise into an action chunk.

Shape suffixes: B samples, R noise draws per sample, T chunk, A action dims, N = 1 + T, L context tokens, D width.

::

    tokens of every segment --project, + position--> context [B,L,D] ----cross-attention---+
    state [B,S], time --> condition (adaLN) ------------------------------------------+    |
    [state token, noisy action tokens] [B,N,D] --> depth x (self-attention, cross-attention, MLP) --> velocity [B,T,A]

Sources: the action transformer and the time distribution of pi0 (arXiv 2410.24164) and GR00T N1 (arXiv 2503.14734);
adaLN-Zero of DiT (Peebles and Xie 2022, arXiv 2212.09748). The flow and its likelihood: :mod:`models.heads.flow`.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.heads.flow import _FlowHead, check_at_least_one, critic
from nexus_lightning.backbone import FeatureSegment, FeatureSpec, VLAFeature
from nexus_lightning.schema import TenantSchema

#: Width, depth and attention heads of each size.
SIZES = {"XS": (64, 2, 4), "S": (128, 4, 4), "B": (256, 6, 8), "L": (1024, 24, 16)}
#: Frequencies of the time embedding; time in [0, 1] is first scaled to a range where they differ.
TIME_FREQUENCIES, TIME_SCALE = 32, 1000.0


class FlowMatchingHead(_FlowHead):
    """Flow matching from noise (time 0) to the action chunk (time 1), with a critic for RL on the denoising chain.

    Args:
        feature_spec: of the backbone, kind ``tokens``.
        schema: of the tenant.
        size: ``XS``, ``S``, ``B`` or ``L`` (0.55 billion parameters, the scale of StarVLA's DiT-L).
        num_steps: Euler steps of :meth:`act`.
        noise_samples: (noise, time) draws per sample and loss: the context is read once for all of them.
        pool_grid: spatial segments are averaged down to at most ``pool_grid x pool_grid`` tokens, to bound the cost.
        sde_steps: RL: ``all`` Euler steps stochastic, or ``one`` per sample.
        sde_noise: RL: scale of the steps' noise; see :mod:`models.heads.flow`.

    Raises:
        ValueError: an unknown size or ``sde_steps``, a count below 1, or ``sde_noise`` not positive.
    """

    reads = ("tokens",)

    def __init__(
        self,
        feature_spec: FeatureSpec,
        schema: TenantSchema,
        size: Literal["XS", "S", "B", "L"] = "XS",
        num_steps: int = 10,
        noise_samples: int = 4,
        pool_grid: int = 8,
        sde_steps: Literal["all", "one"] = "all",
        sde_noise: float = 0.5,
    ) -> None:
        super().__init__(feature_spec, schema, num_steps, noise_samples, sde_steps, sde_noise)
        self.network = ChunkTransformer(feature_spec, schema, size, pool_grid)
        self.value_head = critic(feature_spec, schema)

    def _context(self, features: VLAFeature, state: Tensor) -> TransformerMemory:
        return self.network.context(features, state)

    def velocity(self, x_BRTA: Tensor, time_BR: Tensor, memory: TransformerMemory, valid_BT: Tensor | None) -> Tensor:
        return self.network(x_BRTA, time_BR, memory, valid_BT)


class TransformerMemory(NamedTuple):
    """What :class:`ChunkTransformer` computes once per observation."""

    #: Keys, values and mask of the cross-attention of each block.
    cross: list[tuple[Tensor, Tensor, Tensor]]
    #: The state's share of the condition ``[B, 1, D]``, and its token ``[B, 1, 1, D]``.
    condition: Tensor
    token: Tensor


class ChunkTransformer(nn.Module):
    """Noisy chunks, time and context -> one number per element of the chunk (a velocity, or the noise).

    Args:
        feature_spec: kind ``tokens``.
        schema: of the tenant.
        size: one of :data:`SIZES`.
        pool_grid: spatial segments are averaged down to at most ``pool_grid x pool_grid`` tokens.

    Raises:
        ValueError: an unknown size, or ``pool_grid`` below 1.
    """

    def __init__(self, feature_spec: FeatureSpec, schema: TenantSchema, size: str, pool_grid: int) -> None:
        super().__init__()
        if size not in SIZES:
            raise ValueError(f"size={size!r}: choose one of {', '.join(SIZES)}")
        check_at_least_one(pool_grid=pool_grid)
        dim, depth, num_heads = SIZES[size]
        self.read = Context(feature_spec.segments, dim, pool_grid)
        self.embed_action = nn.Linear(schema.action_dim, dim)
        self.embed_state = nn.Linear(schema.state_dim, dim)
        self.embed_time = nn.Sequential(nn.Linear(2 * TIME_FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.condition_on_state = nn.Linear(schema.state_dim, dim)
        self.position = nn.Parameter(0.02 * torch.randn(1 + schema.chunk, dim))
        self.blocks = nn.ModuleList(_Block(dim, num_heads) for _ in range(depth))
        self.final_modulation = zeroed(nn.Linear(dim, 2 * dim))
        self.to_output = zeroed(nn.Linear(dim, schema.action_dim))

    def context(self, features: VLAFeature, state: Tensor) -> TransformerMemory:
        """The same for every draw and denoising step."""
        context_BLD, mask_BL = self.read(features)
        cross = [(*block.cross.keys_values(context_BLD), mask_BL[:, None, None, :]) for block in self.blocks]
        return TransformerMemory(
            cross, self.condition_on_state(state).unsqueeze(1), self.embed_state(state)[:, None, None]
        )

    def forward(
        self, noisy_BRTA: Tensor, time_BR: Tensor, memory: TransformerMemory, valid_BT: Tensor | None = None
    ) -> Tensor:
        """``[B, R, T, A]`` at the noisy chunk and time in [0, 1]; invalid steps are hidden from self-attention."""
        condition_BRD = F.silu(self.embed_time(sinusoid(TIME_SCALE * time_BR, TIME_FREQUENCIES)) + memory.condition)
        actions_BRTD = self.embed_action(noisy_BRTA)
        state_BR1D = memory.token.expand(*actions_BRTD.shape[:2], 1, -1)
        x_BRND = torch.cat([state_BR1D, actions_BRTD], dim=2) + self.position
        self_mask = None
        if valid_BT is not None:
            keys_BN = F.pad(valid_BT, (1, 0), value=True)
            self_mask = keys_BN.repeat_interleave(noisy_BRTA.shape[1], dim=0)[:, None, None, :]
        for block, cross_memory in zip(self.blocks, memory.cross, strict=True):
            x_BRND = block(x_BRND, condition_BRD, cross_memory, self_mask)
        shift, scale = self.final_modulation(condition_BRD).unsqueeze(2).chunk(2, dim=-1)
        return self.to_output(_norm(x_BRND[:, :, 1:]) * (1 + scale) + shift)


class Context(nn.Module):
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
        self.attention = Attention(dim, num_heads)
        self.cross = Attention(dim, num_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))
        self.modulation = zeroed(nn.Linear(dim, 6 * dim))

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


class Attention(nn.Module):
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


def zeroed(linear: nn.Linear) -> nn.Linear:
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


def sinusoid(position: Tensor, num_frequencies: int) -> Tensor:
    """``[...]`` -> ``[..., 2 * num_frequencies]``, wavelengths from 2 pi to 10000 * 2 pi (Vaswani et al. 2017)."""
    exponents = torch.arange(num_frequencies, device=position.device, dtype=position.dtype) / num_frequencies
    angles = position.unsqueeze(-1) * torch.exp(-math.log(10000.0) * exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def _sinusoid_2d(grid: tuple[int, int], dim: int) -> Tensor:
    """``[rows * cols, dim]``: half the width tells the row, half the column."""
    row, col = (cells.flatten().float() for cells in torch.meshgrid(*map(torch.arange, grid), indexing="ij"))
    return torch.cat([sinusoid(row, dim // 4), sinusoid(col, dim // 4)], dim=-1)
