"""Qwen3-VL (arXiv 2511.21631) and Qwen2.5-VL (arXiv 2502.13923) as frozen backbones."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from models.backbones.vlm import VLMBackbone

IMAGE_PROMPT = "<|vision_start|><|image_pad|><|vision_end|>"


class _QwenVL(VLMBackbone):
    """What both generations share: dynamic resolution, multimodal rotary positions (time, height, width)."""

    action_token = "<|fim_pad|>"
    position_dim = 3

    def vision_layers(self) -> nn.ModuleList:
        return self.model.visual.blocks

    def _check_image_size(self, image_size: int) -> None:
        vision = self.model.config.vision_config
        cell = vision.patch_size * vision.spatial_merge_size
        if image_size < cell or image_size % cell:
            raise ValueError(f"image_size={image_size}: {self._name} needs a multiple of {cell}, like {7 * cell}")

    def _plain_prompt(self, text: str, num_images: int) -> str:
        return IMAGE_PROMPT * num_images + text

    def _process(self, prompts: list[str], images: list[list[Tensor]] | None) -> tuple[list[list[int]], dict]:
        # With an image_size the images already have their final size.
        encoded = self.processor(text=prompts, images=images, do_resize=self.image_size is None)
        vision = {}
        if images is not None:
            # The processor stacks the patches of all images; every sample has equally many.
            vision["pixel_values"] = torch.as_tensor(encoded["pixel_values"]).unflatten(0, (len(prompts), -1))
            vision["image_grid_thw"] = torch.as_tensor(encoded["image_grid_thw"]).unflatten(0, (len(prompts), -1))
        return encoded["input_ids"], vision

    def _positions(self, inputs: TensorDict) -> Tensor:
        grid = inputs.get("image_grid_thw", None)
        positions_PBL, _ = self.model.get_rope_index(
            input_ids=inputs["input_ids"],
            mm_token_type_ids=(inputs["input_ids"] == self.image_token_id).long(),
            image_grid_thw=None if grid is None else grid.flatten(0, 1),
            attention_mask=inputs["attention_mask"],
        )
        return positions_PBL.permute(1, 2, 0).contiguous()

    def _rotary(self, hidden_BLD: Tensor, positions_BLP: Tensor) -> tuple[Tensor, Tensor]:
        return self.text_model.rotary_emb(hidden_BLD, positions_BLP.permute(2, 0, 1))

    def _embed(self, inputs: TensorDict) -> tuple[Tensor, list[Tensor]]:
        hidden_BLD = self.text_model.embed_tokens(inputs["input_ids"])
        if "pixel_values" not in inputs.keys():
            return hidden_BLD, []
        images = self.model.get_image_features(
            inputs["pixel_values"].flatten(0, 1), inputs["image_grid_thw"].flatten(0, 1), return_dict=True
        )
        # Qwen3-VL: features of intermediate vision layers are added after the first decoder layers (DeepStack,
        # arXiv 2406.04334).
        additions = [
            self._scatter_images(inputs, torch.zeros_like(hidden_BLD), feature)
            for feature in getattr(images, "deepstack_features", None) or ()
        ]
        return self._scatter_images(inputs, hidden_BLD, torch.cat(images.pooler_output)), additions


class Qwen3VL(_QwenVL):
    """Qwen3-VL: patches of 16 merged 2 x 2, DeepStack. See :class:`~models.backbones.vlm.VLMBackbone`.

    Example:
        ``backbone=qwen3_vl_4b`` on the command line, or
        ``Qwen3VL("Qwen/Qwen3-VL-4B-Instruct")(observation, ["push the cube"], schema)``.
    """

    architecture = "qwen3_vl"

    @property
    def first_plain_layer(self) -> int:
        return min(len(self.model.config.vision_config.deepstack_visual_indexes), len(self.decoder_layers()))


class Qwen25VL(_QwenVL):
    """Qwen2.5-VL: patches of 14 merged 2 x 2, windowed vision attention. See :class:`VLMBackbone`."""

    architecture = "qwen2_5_vl"
