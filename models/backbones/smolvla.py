"""The shared part of SmolVLA (Shukor et al. 2025, arXiv 2506.01844): its frozen image and text prefix.

::

    images [B,3,H,W] --resize, pad--> SigLIP --> connector --+
    instruction + newline --> tokens --> embedding ----------+--> first layers of SmolLM2 --> keys and values per layer

The policy's state token comes last in its prefix and image and text never look at it, so their keys and values are the
same for every state: they are the feature, and :class:`models.heads.smolvla.SmolVLAHead` pushes its own state token
through the same frozen layers on top of them. The layers are run by ``lerobot.policies.smolvla``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from models.backbones.policies import (
    INSTALL,
    _PrefixBackbone,
    checkpoint_folder,
    chosen_dtype,
    read_weights,
    under,
)
from nexus_lightning.backbone import VLAFeature, check_observation
from nexus_lightning.schema import TenantSchema

try:
    from lerobot.configs import PreTrainedConfig
    from lerobot.policies.common.vla_utils import resize_with_pad
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
    from lerobot.policies.smolvla.smolvlm_with_expert import SmolVLMWithExpertModel
    from transformers import AutoConfig, AutoTokenizer, DynamicCache, SmolVLMModel
except ImportError as error:
    raise ImportError(f"smolvla needs lerobot and transformers: {INSTALL}") from error

#: The VLM's place in a checkpoint.
VLM = "model.vlm_with_expert.vlm.model."


class SmolVLABackbone(_PrefixBackbone):
    """The VLM of a SmolVLA checkpoint. Feature kinds ``kv``, ``tokens`` and ``pooled``.

    ``kv``: segment ``kv`` ``[B, L, layers * 2 * kv_heads * head_dim]`` of images then text, rotary positions applied;
    its mask is False on text padding, which lies on the right. ``tokens``: segment ``sequence``, the last hidden states
    of the same L tokens. ``pooled``: their masked mean.

    Images are scaled to ``resize_imgs_with_padding`` of the checkpoint and to [-1, 1], the prompt ends with a newline
    and is cut at ``tokenizer_max_length`` tokens, all as the policy's own processor does.

    Args:
        pretrained: a SmolVLA policy folder, a Hugging Face name such as ``lerobot/smolvla_base``, or ``tiny``.
        dtype: of the frozen weights, ``fp32`` or ``bf16``.

    Raises:
        ImportError: lerobot is missing; the message has the install line.
        ValueError: the checkpoint is of another policy or uses an option that this split does not follow.
    """

    def __init__(self, pretrained: str = "lerobot/smolvla_base", dtype: str = "fp32") -> None:
        super().__init__()
        precision = chosen_dtype(dtype)
        folder = checkpoint_folder(pretrained, "smolvla")
        self.policy = policy_config(folder, pretrained)
        config = AutoConfig.from_pretrained(self.policy.vlm_model_name)
        self._tokenizer = AutoTokenizer.from_pretrained(self.policy.vlm_model_name)
        with torch.random.fork_rng(devices=[]):
            self.vlm = SmolVLMModel(config)
        if self.policy.num_vlm_layers > 0:
            self.vlm.text_model.layers = self.vlm.text_model.layers[: self.policy.num_vlm_layers]
        self.vlm.load_state_dict(read_weights(folder, under(VLM)), strict=True)
        self.vlm.to(precision)
        self.config = {
            "name": "smolvla",
            "image": list(self.policy.resize_imgs_with_padding),
            "max_text_tokens": self.policy.tokenizer_max_length,
            "dtype": dtype,
        }
        self.freeze()

    @property
    def layout(self) -> tuple[int, int, int, int]:
        text = self.vlm.config.text_config
        return len(self.vlm.text_model.layers), 2, text.num_key_value_heads, text.head_dim

    @property
    def width(self) -> int:
        return self.vlm.config.text_config.hidden_size

    def shardable_units(self) -> list[nn.Module]:
        """Layers of the vision tower, then of the language model."""
        return [*self.vlm.vision_model.encoder.layers, *self.vlm.text_model.layers]

    def preprocess(
        self,
        observation: TensorDict,
        instructions: Sequence[str],
        schema: TenantSchema,
        kinds: Sequence[str] = ("kv",),
    ) -> TensorDict:
        """See the class docstring and :meth:`Backbone.preprocess`.

        Returns:
            TensorDict ``[B]``: ``images`` float32 in [-1, 1] ``[B, cameras, 3, h, w]``, ``text_ids`` int64 and
            ``text_mask`` bool ``[B, L]``, padded on the right.

        Raises:
            ValueError: wrong cameras or sizes, or a wrong number of instructions.
        """
        del kinds  # one pass gives all
        check_observation(observation, schema, instructions)
        self.feature_spec(schema)
        batch = len(instructions)
        width, height = self.policy.resize_imgs_with_padding
        images = [
            resize_with_pad(observation["image", camera].float() / 255, height, width, pad_value=0) * 2 - 1
            for camera in schema.cameras
        ]
        prompts = [schema.instruct(text) for text in instructions]
        text = self._tokenizer(
            [prompt if prompt.endswith("\n") else f"{prompt}\n" for prompt in prompts],
            padding="longest",
            padding_side="right",
            truncation=True,
            max_length=self.policy.tokenizer_max_length,
            return_tensors="pt",
        )
        inputs = {
            "images": torch.stack(images, dim=1),
            "text_ids": text["input_ids"],
            "text_mask": text["attention_mask"].bool(),
        }
        return TensorDict(inputs, batch_size=[batch])

    # inference_mode(False): the feature may later be an input of training, which refuses inference-mode tensors.
    @torch.inference_mode(False)
    @torch.no_grad()
    def encode(self, inputs: TensorDict, kinds: Sequence[str] = ("kv",)) -> VLAFeature:
        """See :meth:`Backbone.encode` and the class docstring."""
        images = inputs["images"]
        walk = FrozenWalk(self)
        seen_BLD = walk.embed_image(images.flatten(0, 1)).unflatten(0, images.shape[:2]).flatten(1, 2)
        read_BLD = walk.embed_language_tokens(inputs["text_ids"])
        # The policy scales image and text embeddings alike, as Gemma does.
        embedded_BLD = torch.cat([seen_BLD, read_BLD], dim=1) * seen_BLD.shape[-1] ** 0.5
        mask_BL = nn.functional.pad(inputs["text_mask"], (seen_BLD.shape[1], 0), value=True)
        cache = DynamicCache()
        hidden_BLD = walk.extend(cache, embedded_BLD, mask_BL[:, None] & mask_BL[:, :, None], mask_BL.cumsum(1) - 1)
        return self.feature(cache, hidden_BLD, mask_BL, kinds)


class FrozenWalk(SmolVLMWithExpertModel):
    """LeRobot's walk through the layers of a shared VLM, without an expert. Holds no weights and no state."""

    def __init__(self, backbone: SmolVLABackbone) -> None:
        nn.Module.__init__(self)  # the parent would build a VLM of its own
        # A tuple, so that the backbone does not become a submodule.
        self._shared = (backbone,)
        text = backbone.vlm.config.text_config
        self.lm_expert = None
        self.num_vlm_layers = len(backbone.vlm.text_model.layers)
        self.num_attention_heads = text.num_attention_heads
        self.num_key_value_heads = text.num_key_value_heads
        # Every layer is self-attention here; the expert's cross-attention belongs to the head.
        self.attention_mode = "self_attn"
        self.self_attn_every_n_layers = -1

    def get_vlm_model(self) -> nn.Module:
        return self._shared[0].vlm

    @property
    def vlm(self) -> nn.Module:
        return self._shared[0].vlm

    def get_model_layers(self, models: list) -> list:
        return [list(models[0].layers), [None] * self.num_vlm_layers]

    def extend(self, cache: DynamicCache, x_BLD: Tensor, mask_BLK: Tensor, positions_BL: Tensor) -> Tensor:
        """Run L more tokens on top of ``cache`` (K tokens with them), which grows; their last hidden states."""
        (hidden_BLD, _), _ = self.forward(
            attention_mask=mask_BLK,
            position_ids=positions_BL,
            past_key_values=cache,
            inputs_embeds=[x_BLD, None],
            use_cache=True,
        )
        return hidden_BLD


def policy_config(folder: Path, pretrained: str) -> SmolVLAConfig:
    """The checkpoint's policy config.

    Raises:
        ValueError: it is of another policy, or has an option that the split does not follow.
    """
    config = PreTrainedConfig.from_pretrained(folder)
    if not isinstance(config, SmolVLAConfig):
        raise ValueError(f"pretrained={pretrained!r} holds a {config.type} policy; smolvla needs a SmolVLA checkpoint")
    for key, wanted in (
        ("add_image_special_tokens", False),
        ("adapt_to_pi_aloha", False),
        ("attention_mode", "cross_attn"),
    ):
        if getattr(config, key) != wanted:
            raise ValueError(
                f"pretrained={pretrained!r}: {key}={getattr(config, key)!r} is not supported, only {wanted!r}"
            )
    if config.resize_imgs_with_padding is None:
        raise ValueError(f"pretrained={pretrained!r}: resize_imgs_with_padding must be set")
    return config
