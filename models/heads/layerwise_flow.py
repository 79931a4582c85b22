"""A flow-matching head that attends to every layer of the backbone, like the action experts of pi0 and SmolVLA.

Shape suffixes: B samples, R noise draws per sample, T chunk, A action dims, N = 1 + T suffix tokens, M = R * N,
L prefix tokens, D width, H query heads, G key/value heads, C head dim.

::

    backbone layer i:  keys, values [B,G,L,C] ----+   (kind kv: as cached; kind layer_states: projected privately)
                                                  v
    private layer i:   [state, noisy actions + time] --queries--> prefix and own suffix --> MLP --> next layer
    last layer --> velocity [B,T,A]

A state token sees the prefix and itself, an action token sees the prefix, the state and all action tokens (pi0,
arXiv 2410.24164, appendix B; SmolVLA, arXiv 2506.01844). Two differences, because this head is trained from scratch and
reads any backbone: the suffix has learned positions and its queries are not rotated (the prefix keys carry the
backbone's rotary positions, which the learned queries see as part of the key), and the width is free.
Heads that load published experts: ``models/heads/pi0.py`` and ``smolvla.py``. The flow and its likelihood:
:mod:`models.heads.flow`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.heads.flow import _FlowHead, check_at_least_one, critic
from models.heads.flow_matching import TIME_FREQUENCIES, TIME_SCALE, sinusoid, zeroed
from nexus_lightning.backbone import FeatureSpec, VLAFeature
from nexus_lightning.schema import TenantSchema

#: Head dim when it is ours to choose (``layer_states``).
HEAD_DIM = 64


class LayerwiseFlowHead(_FlowHead):
    """A private transformer, layer by layer beside the backbone; flow matching, with a critic for RL.

    Args:
        feature_spec: of the backbone, kind ``kv`` or ``layer_states``.
        schema: of the tenant.
        dim: width. ``kv`` fixes the head dim: there are as many query heads as fit into ``dim``, at least one for each
            key/value head and as many for all. ``layer_states``: heads of 64.
        layers: private layers, beside evenly spaced layers of the backbone (its last one always); None: one for each.
        num_steps: Euler steps of :meth:`act`.
        noise_samples: (noise, time) draws per sample and loss: the prefix is read once for all of them.
        sde_steps: RL: ``all`` Euler steps stochastic, or ``one`` per sample.
        sde_noise: RL: scale of the steps' noise; see :mod:`models.heads.flow`.

    Raises:
        ValueError: ``layers`` exceeds the backbone's, a count below 1, an unknown ``sde_steps``, or
            ``sde_noise`` not positive.
    """

    reads = ("kv", "layer_states")

    def __init__(
        self,
        feature_spec: FeatureSpec,
        schema: TenantSchema,
        dim: int = 256,
        layers: int | None = None,
        num_steps: int = 10,
        noise_samples: int = 4,
        sde_steps: Literal["all", "one"] = "all",
        sde_noise: float = 0.5,
    ) -> None:
        super().__init__(feature_spec, schema, num_steps, noise_samples, sde_steps, sde_noise)
        check_at_least_one(dim=dim)
        # Beside the layers' states a backbone may give their positions, which this head does not need.
        (self.segment,) = [segment for segment in feature_spec.segments if segment.layout is not None]
        assert self.segment.layout is not None
        given = self.segment.layout[0]
        count = given if layers is None else layers
        if not 1 <= count <= given:
            raise ValueError(f"layers={layers}: the backbone has {given}; choose 1 to {given}, or null for all")
        #: Which of the backbone's layers stands beside each private one.
        self.beside = [given - 1 - (i * (given - 1)) // max(count - 1, 1) for i in reversed(range(count))]
        if feature_spec.kind == "kv":
            _, _, kv_heads, head_dim = self.segment.layout
            num_heads, state_dim = max(dim // (kv_heads * head_dim), 1) * kv_heads, None
        else:
            state_dim, kv_heads = self.segment.layout[1], max(dim // HEAD_DIM, 1)
            num_heads, head_dim = kv_heads, max(dim // kv_heads, 1)
        self.embed_action = nn.Linear(schema.action_dim, dim)
        self.embed_state = nn.Linear(schema.state_dim, dim)
        self.mix_time = nn.Sequential(nn.Linear(dim + 2 * TIME_FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.position = nn.Parameter(0.02 * torch.randn(1 + schema.chunk, dim))
        self.blocks = nn.ModuleList(_JointBlock(dim, num_heads, kv_heads, head_dim, state_dim) for _ in range(count))
        self.norm = nn.RMSNorm(dim)
        self.to_velocity = zeroed(nn.Linear(dim, schema.action_dim))
        self.value_head = critic(feature_spec, schema)

    def _context(self, features: VLAFeature, state: Tensor) -> _Prefix:
        layers = self.segment.unflatten(features.tokens[self.segment.name]).unbind(2)
        keys_values = []
        for index, block in zip(self.beside, self.blocks, strict=True):
            if block.prefix is None:
                keys, values = layers[index].unbind(2)
            else:
                keys, values = block.prefix(layers[index]).unflatten(-1, (2, block.kv_heads, -1)).unbind(2)
            keys_values.append((keys.transpose(1, 2), values.transpose(1, 2)))
        return _Prefix(keys_values, features.mask[self.segment.name], self.embed_state(state)[:, None, None])

    def velocity(self, x_BRTA: Tensor, time_BR: Tensor, memory: _Prefix, valid_BT: Tensor | None) -> Tensor:
        draws, chunk = x_BRTA.shape[1:3]
        time_BR1F = sinusoid(TIME_SCALE * time_BR, TIME_FREQUENCIES).unsqueeze(2)
        actions_BRTF = torch.cat([self.embed_action(x_BRTA), time_BR1F.expand(-1, -1, chunk, -1)], dim=-1)
        state_BR1D = memory.state.expand(-1, draws, -1, -1)
        x_BRND = torch.cat([state_BR1D, self.mix_time(actions_BRTF)], dim=2) + self.position
        mask = _joint_mask(memory.mask, draws, chunk, valid_BT)
        # All draws of a sample are one sequence, apart by the mask: the prefix is not copied for each.
        x_BMD = x_BRND.flatten(1, 2)
        for block, (keys, values) in zip(self.blocks, memory.keys_values, strict=True):
            x_BMD = block(x_BMD, keys, values, mask)
        return self.to_velocity(self.norm(x_BMD).unflatten(1, (draws, 1 + chunk))[:, :, 1:])


class _Prefix(NamedTuple):
    """Keys and values ``[B, G, L, C]`` for each private layer, mask ``[B, L]``, state token ``[B, 1, 1, D]``."""

    keys_values: list[tuple[Tensor, Tensor]]
    mask: Tensor
    state: Tensor


class _JointBlock(nn.Module):
    """Queries of the suffix into prefix and suffix at once (grouped-query attention), then a gated MLP; pre-norm."""

    def __init__(self, dim: int, num_heads: int, kv_heads: int, head_dim: int, state_dim: int | None) -> None:
        super().__init__()
        self.num_heads, self.kv_heads = num_heads, kv_heads
        #: Layer states have scales of their own, hence the norm; None where the backbone gives keys and values.
        self.prefix = (
            None
            if state_dim is None
            else nn.Sequential(nn.LayerNorm(state_dim), nn.Linear(state_dim, 2 * kv_heads * head_dim))
        )
        self.norm_1 = nn.RMSNorm(dim)
        self.to_query = nn.Linear(dim, num_heads * head_dim)
        self.to_keys_values = nn.Linear(dim, 2 * kv_heads * head_dim)
        self.out = nn.Linear(num_heads * head_dim, dim)
        self.norm_2 = nn.RMSNorm(dim)
        self.to_gated = nn.Linear(dim, 8 * dim)
        self.from_gated = nn.Linear(4 * dim, dim)

    def forward(self, x_BMD: Tensor, prefix_keys: Tensor, prefix_values: Tensor, mask: Tensor) -> Tensor:
        h = self.norm_1(x_BMD)
        queries = self.to_query(h).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        own = self.to_keys_values(h).unflatten(-1, (2, self.kv_heads, -1)).transpose(1, 3)
        keys = torch.cat([prefix_keys, own[:, :, 0]], dim=2)
        values = torch.cat([prefix_values, own[:, :, 1]], dim=2)
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        x_BMD = x_BMD + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.to_gated(self.norm_2(x_BMD)).chunk(2, dim=-1)
        return x_BMD + self.from_gated(F.gelu(gate, approximate="tanh") * up)


def _joint_mask(prefix_BL: Tensor, draws: int, chunk: int, valid_BT: Tensor | None) -> Tensor:
    """Which of the L prefix and M suffix keys each of the M suffix queries sees: bool ``[B, 1, M, L + M]``."""
    size = draws * (1 + chunk)
    draw_M = torch.arange(size, device=prefix_BL.device) // (1 + chunk)
    is_state_M = torch.arange(size, device=prefix_BL.device) % (1 + chunk) == 0
    sees_MM = (draw_M[:, None] == draw_M) & (is_state_M | ~is_state_M[:, None])
    suffix_BMM = sees_MM.expand(len(prefix_BL), -1, -1)
    if valid_BT is not None:
        suffix_BMM = suffix_BMM & F.pad(valid_BT, (1, 0), value=True).repeat(1, draws).unsqueeze(1)
    return torch.cat([prefix_BL.unsqueeze(1).expand(-1, size, -1), suffix_BMM], dim=2).unsqueeze(1)
