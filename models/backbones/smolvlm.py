"""SmolVLM2 (arXiv 2504.05299), the backbone of SmolVLA (arXiv 2506.01844)."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from models.backbones.vlm import VLMBackbone


class SmolVLM2(VLMBackbone):
    """SmolVLM2: SigLIP tower, pixel shuffle, SmolLM2 decoder. See :class:`~models.backbones.vlm.VLMBackbone`.

    Each camera is one square image of ``image_size`` (None: the vision tower's own size) and never split into
    sub-images, as in SmolVLA: a robot's camera would else cost 17 times the tokens.
    """

    architecture = "smolvlm"
    action_token = "<empty_output>"

    def vision_layers(self) -> nn.ModuleList:
        return self.model.vision_model.encoder.layers

    @property
    def text_model(self) -> nn.Module:
        return self.model.text_model

    def _check_image_size(self, image_size: int) -> None:
        config = self.model.config
        cell = config.vision_config.patch_size * config.scale_factor
        largest = config.vision_config.image_size
        if not cell <= image_size <= largest or image_size % cell:
            raise ValueError(f"image_size={image_size}: SmolVLM2 needs a multiple of {cell} up to {largest}")

    @property
    def _side(self) -> int:
        return self.image_size or self.model.config.vision_config.image_size

    def _prepare_processor(self) -> None:
        config = self.model.config
        # The prompt gets as many placeholders as the connector gives tokens for an image of this size.
        self.processor.image_seq_len = (self._side // config.vision_config.patch_size // config.scale_factor) ** 2

    def _plain_prompt(self, text: str, num_images: int) -> str:
        return "<image>" * num_images + text

    def _process(self, prompts: list[str], images: list[list[Tensor]] | None) -> tuple[list[list[int]], dict]:
        if images is None:
            return self.processor(text=prompts)["input_ids"], {}
        side = {"longest_edge": self._side}
        # size: the published one upscales to 2048 before it scales down to max_image_size.
        encoded = self.processor(
            text=prompts, images=images, do_image_splitting=False, do_pad=False, size=side, max_image_size=side
        )
        rows = [[torch.as_tensor(image) for image in row] for row in encoded["pixel_values"]]
        return encoded["input_ids"], {"pixel_values": torch.stack([torch.stack(row) for row in rows])}

    def _embed(self, inputs: TensorDict) -> tuple[Tensor, list[Tensor]]:
        hidden_BLD = self.text_model.embed_tokens(inputs["input_ids"])
        if "pixel_values" not in inputs.keys():
            return hidden_BLD, []
        images = self.model.get_image_features(inputs["pixel_values"], return_dict=True).pooler_output
        return self._scatter_images(inputs, hidden_BLD, images.flatten(0, 1)), []
