"""The private part of GR00T N1.7 (NVIDIA 2025, arXiv 2503.14734): norm, self-attention, projections and DiT.

::

    feature: image and text states (frozen, shared) --> layer norm --> self-attention --+
    [state token | noisy actions + time] --> DiT: in turn cross-attention (to text or to images) and self-attention
                                             --> decoder --> velocity

Shape suffixes: B samples, R noise draws per sample, N = B * R, T chunk, M padded action dims, L tokens, D width.
Modules and weights are those of ``lerobot.policies.groot``. The walk through their blocks is our own: theirs does not
mask padding in the self-attention over the states, so there a sample's action depends on the longest prompt of its
batch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from lerobot.policies.groot.groot_n1_7 import GR00TN17ActionHead, GR00TN17Config
from lerobot.policies.groot.processor_groot import N1_7_EMBODIMENT_MAPPING
from tensordict import TensorDict
from torch import Tensor

from models.backbones.groot import groot_config
from models.backbones.policies import checkpoint_folder, read_weights, under
from models.heads.flow import critic
from models.heads.policy_flow import _PolicyFlowHead
from nexus_lightning.backbone import FeatureSpec, VLAFeature
from nexus_lightning.schema import TenantSchema


class Memory(NamedTuple):
    """Image and text states after the private layers, which of them are image or text, and the state token."""

    context_BLD: Tensor
    image_BL: Tensor
    text_BL: Tensor
    state_B1D: Tensor


class GrootHead(_PolicyFlowHead):
    """GR00T's action head on the states of :class:`~models.backbones.groot.GrootBackbone`; SFT and RL.

    With the weights of a checkpoint it acts as that policy does for the same noise on unpadded prompts, when
    ``schema.chunk`` is the checkpoint's ``action_horizon``. A checkpoint has projections for many embodiments; a tenant
    is one, so only its own are kept.

    Dropout and the dropping of the state token work in :meth:`loss` only: the log-probability of a sampled chain must
    be that of the network which drew it.

    Args:
        feature_spec: of the backbone, kind ``tokens``.
        schema: of the tenant.
        pretrained: a GR00T N1.7 folder, a Hugging Face name, or ``tiny``; give backbone and head the same.
        embodiment: whose projections to start from: a name that LeRobot lists, or a row number of the checkpoint.
        load_weights: False keeps the architecture of ``pretrained`` and starts from random weights.
        num_steps: Euler steps of :meth:`act`; the checkpoint's when None.
        noise_samples: (noise, time) draws per sample and loss: the private layers over the states run once for all.
        sde_steps, sde_noise: of the sampled chain in RL, see :class:`models.heads.flow._FlowHead`.

    Raises:
        ValueError: a feature that is not GR00T's, an unknown embodiment, an architecture that this walk does not
            follow, or a chunk, state or action that is too long.
    """

    reads = ("tokens",)
    backbones = ("GrootBackbone",)

    def __init__(
        self,
        feature_spec: FeatureSpec,
        schema: TenantSchema,
        pretrained: str = "nvidia/GR00T-N1.7-3B",
        embodiment: str | int = "new_embodiment",
        load_weights: bool = True,
        num_steps: int | None = None,
        noise_samples: int = 1,
        sde_steps: Literal["all", "one"] = "all",
        sde_noise: float = 0.5,
    ) -> None:
        folder = checkpoint_folder(pretrained, "groot")
        policy = groot_config(folder, pretrained)
        super().__init__(
            feature_spec,
            schema,
            policy.max_state_dim,
            policy.max_action_dim,
            policy.num_inference_timesteps if num_steps is None else num_steps,
            noise_samples,
            sde_steps,
            sde_noise,
        )
        _check(policy, feature_spec, schema, pretrained)
        row = _row(embodiment, policy.max_num_embodiments)
        policy.max_num_embodiments = 1
        self.action_head = GR00TN17ActionHead(policy)
        self.action_head.set_trainable_parameters(True, True, True)
        if load_weights:
            weights = read_weights(folder, under("action_head."))
            for name, value in weights.items():
                if name.rsplit(".", 1)[-1] in ("W", "b"):  # CategorySpecificLinear: one row per embodiment
                    weights[name] = value[row : row + 1]
            self.action_head.load_state_dict(weights, strict=True)
        self.value_head = critic(feature_spec, schema)

    def memory(self, features: VLAFeature, state_BS: Tensor) -> Memory:
        net = self.action_head
        image_BL, text_BL = features.mask["image"], features.mask["text"]
        context_BLD = net.vlln(torch.cat([features.tokens["image"], features.tokens["text"]], dim=1))
        mask_BL = torch.cat([image_BL, text_BL], dim=1)
        for block in getattr(net.vl_self_attention, "transformer_blocks", ()):
            context_BLD = block(context_BLD, attention_mask=mask_BL)
        state_B1D = net.state_encoder(state_BS.unsqueeze(1), _only(state_BS))
        if self.training and net.state_dropout_prob > 0:
            kept_B = torch.rand(len(state_BS), device=state_BS.device) >= net.state_dropout_prob
            state_B1D = state_B1D * kept_B[:, None, None]
        image_BL = F.pad(image_BL, (0, text_BL.shape[1]))
        return Memory(context_BLD, image_BL, mask_BL & ~image_BL, state_B1D)

    def velocity(self, x_BRTM: Tensor, time_BR: Tensor, memory: Memory, valid_BT: Tensor | None) -> Tensor:
        """See :meth:`_FlowHead.velocity`."""
        net, dit = self.action_head, self.action_head.model
        size, num_draws, chunk, _ = x_BRTM.shape
        context, image, text, state = (part.repeat_interleave(num_draws, dim=0) for part in memory)
        x_NTM = x_BRTM.flatten(0, 1)
        bucket_N = (time_BR.flatten() * net.num_timestep_buckets).long()
        actions_NTD = net.action_encoder(x_NTM, bucket_N, _only(x_NTM))
        if net.config.add_pos_embed:
            actions_NTD = actions_NTD + net.position_embedding.weight[:chunk]
        hidden = torch.cat([state, actions_NTD], dim=1)
        own = None
        if valid_BT is not None:
            own = F.pad(valid_BT, (1, 0), value=True).repeat_interleave(num_draws, dim=0)
        time_ND = dit.timestep_encoder(bucket_N)
        for index, block in enumerate(dit.transformer_blocks):
            if index % 2:
                hidden = block(hidden, attention_mask=own, temb=time_ND)
            else:
                seen = text if index % (2 * dit.attend_text_every_n_blocks) == 0 else image
                hidden = block(hidden, encoder_hidden_states=context, encoder_attention_mask=seen, temb=time_ND)
        shift, scale = dit.proj_out_1(F.silu(time_ND)).unsqueeze(1).chunk(2, dim=-1)
        out = dit.proj_out_2(dit.norm_out(hidden) * (1 + scale) + shift)
        return net.action_decoder(out, _only(out))[:, 1:].unflatten(0, (size, num_draws))

    def evaluate(self, features: VLAFeature, state: Tensor, sample: TensorDict) -> tuple[Tensor, Tensor]:
        """See :meth:`_ChainHead.evaluate`; without dropout, as the chain was drawn."""
        training = self.training
        self.eval()
        try:
            return super().evaluate(features, state, sample)
        finally:
            self.train(training)


def _only(x: Tensor) -> Tensor:
    """The row of the one embodiment, for every sample."""
    return torch.zeros(len(x), dtype=torch.long, device=x.device)


def _row(embodiment: str | int, count: int) -> int:
    row = N1_7_EMBODIMENT_MAPPING.get(embodiment, -1) if isinstance(embodiment, str) else embodiment
    if not 0 <= row < count:
        raise ValueError(
            f"embodiment={embodiment!r}: choose one of {', '.join(N1_7_EMBODIMENT_MAPPING)}, or a row below {count}"
        )
    return row


def _check(policy: GR00TN17Config, spec: FeatureSpec, schema: TenantSchema, pretrained: str) -> None:
    segments = {segment.name: segment.dim for segment in spec.segments}
    width = policy.backbone_embedding_dim
    if segments != {"image": width, "text": width}:
        raise ValueError(
            f"pretrained={pretrained!r}: its head reads segments image and text of width {width}, the backbone gives "
            f"{segments}; give head and backbone the same GR00T checkpoint"
        )
    if schema.chunk > policy.max_seq_len and policy.add_pos_embed:
        raise ValueError(f"chunk={schema.chunk}: the checkpoint has positions for {policy.max_seq_len} actions")
    interleaved = policy.diffusion_model_cfg["interleave_self_attention"]
    positions = (policy.vl_self_attention_cfg or {}).get("positional_embeddings")
    for key, value, wanted in (
        ("use_alternate_vl_dit", policy.use_alternate_vl_dit, True),
        ("diffusion_model_cfg.interleave_self_attention", interleaved, True),
        ("vl_self_attention_cfg.positional_embeddings", positions, None),
        ("state_history_length", policy.state_history_length, 1),
        ("noise_beta_alpha, noise_beta_beta", (policy.noise_beta_alpha, policy.noise_beta_beta), (1.5, 1.0)),
    ):
        if value != wanted:
            raise ValueError(f"pretrained={pretrained!r}: {key}={value!r} is not supported, only {wanted!r}")
