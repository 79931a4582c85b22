"""PaliGemma (arXiv 2407.07726) and PaliGemma 2 (arXiv 2412.03555): the prefix of pi0 (arXiv 2410.24164) and pi0.5."""

from __future__ import annotations

from tensordict import TensorDict
from torch import Tensor

from models.backbones.vlm import VLMBackbone


class PaliGemma(VLMBackbone):
    """PaliGemma as a prefix: the whole prompt sees itself. See :class:`~models.backbones.vlm.VLMBackbone`.

    It gives no ``action_tokens``: under full attention they would change every other token. Positions count from 0, as
    in pi0 (the library's own PaliGemma counts from 1; rotary attention depends on differences only). It has no chat
    template, and images always have the vision tower's size.
    """

    kinds = ("tokens", "pooled", "layer_states", "kv")
    architecture = "paligemma"
    causal = False

    def _check_image_size(self, image_size: int) -> None:
        own = self.model.config.vision_config.image_size
        if image_size != own:
            raise ValueError(
                f"image_size={image_size}: the vision tower takes {own} only; write null, or use a checkpoint of "
                f"another resolution"
            )

    def _plain_prompt(self, text: str, num_images: int) -> str:
        tokenizer = self.processor.tokenizer
        image = self.processor.image_token * self.processor.image_seq_length
        return f"{image * num_images}{tokenizer.bos_token}{text}\n"

    def _process(self, prompts: list[str], images: list[list[Tensor]] | None) -> tuple[list[list[int]], dict]:
        # Tokenizer and image processor apart: the joint processor refuses a prompt without images.
        rows = self.processor.tokenizer(prompts, add_special_tokens=False)["input_ids"]
        if images is None:
            return rows, {}
        flat = [image for row in images for image in row]
        encoded = self.processor.image_processor(flat, do_resize=self.image_size is None, return_tensors="pt")
        return rows, {"pixel_values": encoded["pixel_values"].unflatten(0, (len(images), -1))}

    def _embed(self, inputs: TensorDict) -> tuple[Tensor, list[Tensor]]:
        # Image placeholders lie outside the embedding of PaliGemma 1.
        ids = inputs["input_ids"].masked_fill(inputs["input_ids"] == self.image_token_id, 0)
        hidden_BLD = self.text_model.embed_tokens(ids)
        if "pixel_values" not in inputs.keys():
            return hidden_BLD, []
        pixels = inputs["pixel_values"].flatten(0, 1).to(self.dtype)
        images = self.model.get_image_features(pixels, return_dict=True).pooler_output
        return self._scatter_images(inputs, hidden_BLD, images.flatten(0, 1)), []
