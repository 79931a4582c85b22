"""The private part of pi0 (Black et al. 2024, arXiv 2410.24164): its action transformer and projections.

::

    feature: keys and values of images and text (frozen, shared)
        v
    [state token | noisy actions + time] --> Gemma layers (state sees prefix, actions see all) --> velocity

Shape suffixes: B samples, R noise draws per sample, N = B * R, T chunk, M padded action dims, L prefix tokens, D width.
The modules are those of ``PI0ForConditionalGeneration`` of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, PI0Config
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.pi0.modeling_pi0 import (
    PI0ActionTimeEmbedding,
    PI0PreTrainedModel,
    blockwise_bidirectional_mask,
)

from models.backbones.pi0 import pi0_config
from models.backbones.policies import checkpoint_folder, private_cache, unflatten_cache
from models.heads.flow import critic
from models.heads.policy_flow import _PolicyFlowHead
from nexus_lightning.backbone import FeatureSpec, VLAFeature
from nexus_lightning.schema import TenantSchema


class Prefix(NamedTuple):
    """Keys and values per layer, ``[B, kv_heads, L, head_dim]`` each; their mask; the padded state."""

    keys_values: list[tuple[Tensor, Tensor]]
    mask_BL: Tensor
    state_BS: Tensor


class Pi0Head(_PolicyFlowHead):
    """pi0's action transformer on the prefix of :class:`~models.backbones.pi0.Pi0Backbone`; SFT and RL.

    With the weights of a checkpoint it acts as that policy does for the same noise, when ``schema.chunk`` is the
    checkpoint's ``chunk_size`` (actions see each other both ways, so another length gives other actions).

    Args:
        feature_spec: of the backbone, kind ``kv``.
        schema: of the tenant.
        pretrained: a pi0 folder, a Hugging Face name, or ``tiny``; give backbone and head the same.
        load_weights: False keeps the architecture of ``pretrained`` and starts from random weights.
        num_steps: Euler steps of :meth:`act`; the checkpoint's when None.
        noise_samples: (noise, time) draws per sample and loss: the prefix is read once for all of them.
        sde_steps, sde_noise: of the sampled chain in RL, see :class:`models.heads.flow._FlowHead`.

    Raises:
        ValueError: the feature's layout is not that of the checkpoint's VLM, the checkpoint was trained with another
            distribution of times, or a state or action is too long.
    """

    reads = ("kv",)
    backbones = ("Pi0Backbone",)

    def __init__(
        self,
        feature_spec: FeatureSpec,
        schema: TenantSchema,
        pretrained: str = "lerobot/pi0_base",
        load_weights: bool = True,
        num_steps: int | None = None,
        noise_samples: int = 1,
        sde_steps: Literal["all", "one"] = "all",
        sde_noise: float = 0.5,
    ) -> None:
        folder = checkpoint_folder(pretrained, "pi0")
        policy = pi0_config(folder, pretrained)
        super().__init__(
            feature_spec,
            schema,
            policy.max_state_dim,
            policy.max_action_dim,
            policy.num_inference_steps if num_steps is None else num_steps,
            noise_samples,
            sde_steps,
            sde_noise,
        )
        sampling = [policy.time_sampling_beta_alpha, policy.time_sampling_beta_beta]
        sampling += [policy.time_sampling_scale, policy.time_sampling_offset]
        if sampling != [1.5, 1.0, 0.999, 0.001]:
            raise ValueError(f"pretrained={pretrained!r}: time_sampling_* {sampling}; only 1.5, 1.0, 0.999, 0.001 work")
        dit = policy.dit_config
        layout = (dit.num_hidden_layers, 2, dit.num_key_value_heads, dit.head_dim)
        if feature_spec.segments[0].layout != layout:
            raise ValueError(
                f"pretrained={pretrained!r}: its action transformer reads keys and values of layout {layout}, the "
                f"backbone gives {feature_spec.segments[0].layout}; give head and backbone the same checkpoint"
            )
        private = _load(folder, pretrained) if load_weights else _Private(policy)
        self.dit, self.embed_action_time = private.model["dit"], private.embed_action_time
        self.action_out_proj = private.action_out_proj
        self.value_head = critic(feature_spec, schema)

    def memory(self, features: VLAFeature, state_BS: Tensor) -> Prefix:
        segment = self.feature_spec.segments[0]
        keys_values = unflatten_cache(segment.unflatten(features.tokens[segment.name]))
        return Prefix(keys_values, features.mask[segment.name], state_BS)

    def velocity(self, x_BRTM: Tensor, time_BR: Tensor, memory: Prefix, valid_BT: Tensor | None) -> Tensor:
        """See :meth:`_FlowHead.velocity`; pi0's time is 1 at the noise, and its velocity points there."""
        size, num_draws, chunk, _ = x_BRTM.shape
        state_NS = memory.state_BS.repeat_interleave(num_draws, dim=0)
        x_NTD = self.embed_action_time(state_NS, x_BRTM.flatten(0, 1), (1 - time_BR.flatten()).float())
        if valid_BT is None:
            valid_BT = torch.ones(size, chunk, dtype=torch.bool, device=x_BRTM.device)
        mask_BK = torch.cat([F.pad(memory.mask_BL, (0, 1), value=True), valid_BT], dim=1)
        positions_BT = memory.mask_BL.sum(1, keepdim=True) + torch.arange(1 + chunk, device=x_BRTM.device)
        cache = private_cache(memory.keys_values, num_draws)
        # Two blocks: prefix with state, actions. A block sees itself and the blocks before it.
        boundaries = torch.tensor([memory.mask_BL.shape[1], memory.mask_BL.shape[1] + chunk], device=x_BRTM.device)
        mask = create_bidirectional_mask(
            config=self.dit.config,
            inputs_embeds=x_NTD,
            attention_mask=mask_BK.repeat_interleave(num_draws, dim=0),
            past_key_values=cache,
            and_mask_function=blockwise_bidirectional_mask(boundaries),
        )
        out_NTD = self.dit(
            inputs_embeds=x_NTD,
            attention_mask=mask,
            position_ids=positions_BT.repeat_interleave(num_draws, dim=0),
            past_key_values=cache,
        ).last_hidden_state
        return -self.action_out_proj(out_NTD[:, 1:]).unflatten(0, (size, num_draws))


class _Private(PI0PreTrainedModel):
    """pi0 without its VLM, under the names of its checkpoint: loading reads only what a tenant owns."""

    _keys_to_ignore_on_load_unexpected = [r"\.vlm\.", r"^paligemma_with_expert\.paligemma", r"\.dit\.embed_tokens"]

    def __init__(self, config: PI0Config) -> None:
        super().__init__(config)
        self.model = nn.ModuleDict({"dit": AutoModel.from_config(config.dit_config, dtype=torch.float32)})
        self.model["dit"].embed_tokens = None  # it reads actions, not tokens; at full size these are 263 M numbers
        self.embed_action_time = PI0ActionTimeEmbedding(config)
        self.action_out_proj = nn.Linear(config.dit_config.hidden_size, config.max_action_dim)
        self.post_init()

    def get_input_embeddings(self) -> None:
        return None


def _load(folder: Path, pretrained: str) -> _Private:
    private, info = _Private.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"]:
        raise ValueError(f"pretrained={pretrained!r} lacks weights of pi0: {sorted(info['missing_keys'])[:3]} ...")
    return private
