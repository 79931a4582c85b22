"""The private part of SmolVLA (Shukor et al. 2025, arXiv 2506.01844): state token, action expert, projections.

::

    feature: keys and values of images and text (frozen, shared)
        |  <-- state token pushed through the same frozen layers (gradients through them, into ``state_proj``)
        v
    noisy actions + time --> expert layers: in turn self-attention (causal, over prefix and actions) and
                             cross-attention (over the prefix) --> velocity

Shape suffixes: B samples, R noise draws per sample, T chunk, M padded action dims, L prefix tokens, D width.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from lerobot.policies.common.vla_utils import create_sinusoidal_pos_embedding
from lerobot.policies.smolvla.smolvlm_with_expert import SmolVLMWithExpertModel, get_intermediate_size
from torch import Tensor, nn
from transformers import AutoModel

from models.backbones.policies import checkpoint_folder, private_cache, read_weights, unflatten_cache
from models.backbones.smolvla import VLM, FrozenWalk, SmolVLABackbone, policy_config
from models.heads.flow import critic
from models.heads.policy_flow import _PolicyFlowHead
from nexus_lightning.backbone import FeatureSpec, SharedBackbone, VLAFeature
from nexus_lightning.schema import TenantSchema


class Prefix(NamedTuple):
    """Keys and values per layer, ``[B, kv_heads, L + 1, head_dim]`` each: images, text, state; and their mask."""

    keys_values: list[tuple[Tensor, Tensor]]
    mask_BL: Tensor


class SmolVLAHead(_PolicyFlowHead):
    """SmolVLA's action expert on the prefix of :class:`~models.backbones.smolvla.SmolVLABackbone`; SFT and RL.

    With the weights of a checkpoint it acts as that policy does for the same noise. A chunk shorter than the
    checkpoint's gives its first actions: a step never looks at later ones.

    Args:
        feature_spec: of the backbone, kind ``kv``.
        schema: of the tenant.
        backbone: pointer to the backbone whose layers the state token runs through.
        pretrained: a SmolVLA policy folder, a Hugging Face name, or ``tiny``; its VLM must be the backbone's.
        load_weights: False keeps the architecture of ``pretrained`` and starts from random weights.
        num_steps: Euler steps of :meth:`act`; the checkpoint's when None.
        noise_samples: (noise, time) draws per sample and loss: the prefix is read once for all of them.
        sde_steps, sde_noise: of the sampled chain in RL, see :class:`models.heads.flow._FlowHead`.

    Raises:
        ValueError: another backbone, a checkpoint whose VLM differs, or a state or action that is too long.
    """

    reads = ("kv",)
    backbones = ("SmolVLABackbone",)
    continues_backbone = True

    def __init__(
        self,
        feature_spec: FeatureSpec,
        schema: TenantSchema,
        backbone: SharedBackbone,
        pretrained: str = "lerobot/smolvla_base",
        load_weights: bool = True,
        num_steps: int | None = None,
        noise_samples: int = 1,
        sde_steps: Literal["all", "one"] = "all",
        sde_noise: float = 0.5,
    ) -> None:
        shared = backbone.backbone
        if not isinstance(shared, SmolVLABackbone):
            raise ValueError(f"head smolvla continues backbone smolvla, not {type(shared).__name__}")
        folder = checkpoint_folder(pretrained, "smolvla")
        policy = policy_config(folder, pretrained)
        super().__init__(
            feature_spec,
            schema,
            policy.max_state_dim,
            policy.max_action_dim,
            policy.num_steps if num_steps is None else num_steps,
            noise_samples,
            sde_steps,
            sde_noise,
        )
        self.min_period, self.max_period = policy.min_period, policy.max_period
        self.vlm_with_expert = _ExpertWalk(backbone, policy)
        width = self.vlm_with_expert.expert_hidden_size
        # Names as in the policy, so that its checkpoint loads as it is.
        self.state_proj = nn.Linear(policy.max_state_dim, shared.vlm.config.text_config.hidden_size)
        self.action_in_proj = nn.Linear(policy.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, policy.max_action_dim)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)
        if load_weights:
            _check_same_vlm(folder, shared, pretrained)
            self.load_state_dict(read_weights(folder, _private), strict=True)
        self.value_head = critic(feature_spec, schema)

    def memory(self, features: VLAFeature, state_BS: Tensor) -> Prefix:
        """The prefix with this tenant's state token on top; the shared keys and values are only read."""
        segment = self.feature_spec.segments[0]
        cache = private_cache(unflatten_cache(segment.unflatten(features.tokens[segment.name])))
        mask_BL = F.pad(features.mask[segment.name], (0, 1), value=True)
        shared = self.vlm_with_expert.backbone.backbone
        token_B1D = self.state_proj(state_BS).unsqueeze(1)
        FrozenWalk(shared).extend(cache, token_B1D, mask_BL.unsqueeze(1), mask_BL.sum(1, keepdim=True) - 1)
        return Prefix([(layer.keys, layer.values) for layer in cache.layers], mask_BL)

    def velocity(self, x_BRTM: Tensor, time_BR: Tensor, memory: Prefix, valid_BT: Tensor | None) -> Tensor:
        """See :meth:`_FlowHead.velocity`; LeRobot's time is 1 at the noise, and its velocity points there."""
        size, num_draws, chunk, _ = x_BRTM.shape
        actions_NTD = self.action_in_proj(x_BRTM.flatten(0, 1))
        time_N = (1 - time_BR.flatten()).float()
        time_ND = create_sinusoidal_pos_embedding(
            time_N, actions_NTD.shape[-1], self.min_period, self.max_period, device=x_BRTM.device
        ).to(actions_NTD.dtype)
        time_NTD = time_ND.unsqueeze(1).expand_as(actions_NTD)
        x_NTD = F.silu(self.action_time_mlp_in(torch.cat([actions_NTD, time_NTD], dim=-1)))
        x_NTD = self.action_time_mlp_out(x_NTD)

        seen_BTT = torch.ones(chunk, chunk, dtype=torch.bool, device=x_BRTM.device).tril().expand(size, -1, -1)
        if valid_BT is not None:
            seen_BTT = seen_BTT & valid_BT.unsqueeze(1)
        mask_BTK = torch.cat([memory.mask_BL.unsqueeze(1).expand(-1, chunk, -1), seen_BTT], dim=-1)
        positions_BT = memory.mask_BL.sum(1, keepdim=True) + torch.arange(chunk, device=x_BRTM.device)
        (_, out_NTD), _ = self.vlm_with_expert(
            attention_mask=mask_BTK.repeat_interleave(num_draws, dim=0),
            position_ids=positions_BT.repeat_interleave(num_draws, dim=0),
            past_key_values=private_cache(memory.keys_values, num_draws),
            inputs_embeds=[None, x_NTD],
            use_cache=True,
        )
        return -self.action_out_proj(out_NTD).unflatten(0, (size, num_draws))


class _ExpertWalk(SmolVLMWithExpertModel):
    """LeRobot's walk with a private expert over the layers of the shared VLM."""

    def __init__(self, backbone: SharedBackbone, policy) -> None:
        nn.Module.__init__(self)  # the parent would build a VLM of its own
        self.backbone = backbone
        layers, _, self.num_key_value_heads, head_dim = backbone.backbone.layout
        text = backbone.backbone.vlm.config.text_config
        self.num_attention_heads = text.num_attention_heads
        self.num_vlm_layers = layers
        self.num_expert_layers = policy.num_expert_layers if policy.num_expert_layers > 0 else layers
        self.attention_mode = policy.attention_mode
        self.self_attn_every_n_layers = policy.self_attn_every_n_layers

        config = copy.deepcopy(text)
        config.hidden_size = self.expert_hidden_size = int(text.hidden_size * policy.expert_width_multiplier)
        config.intermediate_size = get_intermediate_size(config.hidden_size)
        config.num_hidden_layers = self.num_expert_layers
        self.lm_expert = AutoModel.from_config(config, dtype=torch.float32)
        self.lm_expert.embed_tokens = None  # it reads actions, not tokens
        kv_dim = self.num_key_value_heads * head_dim
        every = self.self_attn_every_n_layers
        for index, layer in enumerate(self.lm_expert.layers):
            if every <= 0 or index % every:  # cross-attention: its keys and values are made of the VLM's
                layer.self_attn.k_proj = nn.Linear(kv_dim, kv_dim, bias=text.attention_bias)
                layer.self_attn.v_proj = nn.Linear(kv_dim, kv_dim, bias=text.attention_bias)

    def get_vlm_model(self) -> nn.Module:
        return self.backbone.backbone.vlm

    @property
    def vlm(self) -> nn.Module:
        return self.backbone.backbone.vlm

    def train(self, mode: bool = True) -> _ExpertWalk:
        return nn.Module.train(self, mode)  # the parent's would also set the shared VLM's mode


def _private(name: str) -> str | None:
    return name.removeprefix("model.") if name.startswith("model.") and ".vlm." not in name else None


def _check_same_vlm(folder: Path, backbone: SmolVLABackbone, pretrained: str) -> None:
    """A checkpoint that also trained its VLM needs that VLM: compare one matrix of the last layer."""
    name = f"text_model.layers.{len(backbone.vlm.text_model.layers) - 1}.mlp.down_proj.weight"
    ours = backbone.vlm.get_parameter(name)
    theirs = read_weights(folder, lambda key: "weight" if key == VLM + name else None)["weight"]
    if theirs.shape != ours.shape or not torch.equal(theirs.to(ours), ours):
        raise ValueError(
            f"pretrained={pretrained!r}: its VLM is not the backbone's; give head and backbone the same checkpoint"
        )
