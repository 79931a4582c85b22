"""The shared part of GR00T N1.7 (NVIDIA 2025, arXiv 2503.14734; code in ``lerobot.policies.groot``): Qwen3-VL states.

::

    images --resize, crop--> chat message with the instruction --> Qwen3-VL, first ``select_layer`` layers --> states

GR00T's action transformer attends to text and to image tokens in turn, and its own layers on top of the states know no
positions, so the feature has one segment for each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import nn

from models.backbones.policies import INSTALL, check_kind, checkpoint_folder, chosen_dtype, read_weights, under
from nexus_lightning.backbone import Backbone, FeatureSegment, FeatureSpec, VLAFeature, check_observation
from nexus_lightning.schema import TenantSchema

try:
    from lerobot.policies.groot.configuration_groot import (
        N1_7_DEFAULT_IMAGE_CROP_SIZE,
        N1_7_DEFAULT_IMAGE_TARGET_SIZE,
    )
    from lerobot.policies.groot.groot_n1_7 import GR00TN17Config, Qwen3Backbone
    from lerobot.policies.groot.processor_groot import GrootN17VLMEncodeStep
    from lerobot.policies.groot.utils import prepare_n1_7_language_batch
    from lerobot.processor import TransitionKey
except ImportError as error:
    raise ImportError(f"groot needs lerobot and transformers: {INSTALL}") from error


class GrootBackbone(Backbone):
    """The VLM of a GR00T N1.7 checkpoint. Feature kinds ``tokens`` and ``pooled``.

    ``tokens``: the states that leave decoder layer ``select_layer``, before the final norm: segment ``image`` (all
    cameras) and segment ``text`` (everything else in the prompt, padded on the right, mask False there).
    ``pooled``: the mean of all of them.

    Images and text go through LeRobot's processor steps with the settings of the checkpoint's
    ``processor_config.json``; the crop is always the central one.

    Args:
        pretrained: a GR00T N1.7 folder, a Hugging Face name such as ``nvidia/GR00T-N1.7-3B``, or ``tiny``.
        dtype: of the frozen weights, ``fp32`` or ``bf16``.

    Raises:
        ImportError: lerobot is missing; the message has the install line.
        ValueError: an unknown dtype, a checkpoint of another policy, or a ``select_layer`` among the first layers.
    """

    kinds = ("tokens", "pooled")

    def __init__(self, pretrained: str = "nvidia/GR00T-N1.7-3B", dtype: str = "fp32") -> None:
        super().__init__()
        precision = chosen_dtype(dtype)
        folder = checkpoint_folder(pretrained, "groot")
        policy = groot_config(folder, pretrained)
        with torch.random.fork_rng(devices=[]):
            whole = Qwen3Backbone(policy.model_name, select_layer=policy.select_layer, load_pretrained_weights=False)
        self.vlm = whole.model.model  # without the language model's output layer
        if policy.select_layer <= len(self.vlm.config.vision_config.deepstack_visual_indexes):
            raise ValueError(
                f"pretrained={pretrained!r}: select_layer={policy.select_layer} is among the layers to which Qwen3-VL "
                "adds vision features; GR00T reads a later one"
            )
        self.vlm.load_state_dict(read_weights(folder, under("backbone.model.model.")), strict=True)
        self.vlm.language_model.norm = nn.Identity()  # the policy reads the states before it
        self.vlm.to(precision)

        path = folder / "processor_config.json"
        settings = json.loads(path.read_text()).get("processor_kwargs", {}) if path.is_file() else {}
        self.formalize_language = settings.get("formalize_language", True)
        images = {"image_target_size": N1_7_DEFAULT_IMAGE_TARGET_SIZE, "image_crop_size": N1_7_DEFAULT_IMAGE_CROP_SIZE}
        if settings.get("image_target_size") is not None:
            keys = ("image_target_size", "image_crop_size", "shortest_image_edge", "crop_fraction")
            images = {key: settings.get(key) for key in keys}
        images |= {key: settings.get(key, False) for key in ("use_albumentations", "letter_box_transform")}
        self._encode_prompt = GrootN17VLMEncodeStep(model_name=policy.model_name, **images)
        self.config = {
            "name": "groot",
            "images": images,
            "formalize_language": self.formalize_language,
            "select_layer": policy.select_layer,
            "dtype": dtype,
        }
        self.freeze()

    def shardable_units(self) -> list[nn.Module]:
        """Layers of the vision tower, then of the language model."""
        return [*self.vlm.visual.blocks, *self.vlm.language_model.layers]

    def feature_spec(self, schema: TenantSchema, kind: str = "tokens") -> FeatureSpec:
        """See the class docstring.

        Raises:
            ValueError: an unknown kind, or a schema without cameras (half of the policy's layers read images).
        """
        check_kind(self, schema, kind)
        width = self.vlm.config.text_config.hidden_size
        segments = (FeatureSegment("image", width), FeatureSegment("text", width)) if kind == "tokens" else ()
        return FeatureSpec(kind, segments, width)

    def preprocess(
        self,
        observation: TensorDict,
        instructions: Sequence[str],
        schema: TenantSchema,
        kinds: Sequence[str] = ("tokens",),
    ) -> TensorDict:
        """See the class docstring and :meth:`Backbone.preprocess`.

        Returns:
            TensorDict ``[B]``: ``input_ids`` and ``attention_mask`` int64 ``[B, L]``, padded on the left;
            ``pixel_values`` float ``[B, patches, P]`` and ``image_grid_thw`` int64 ``[B, cameras, 3]``.

        Raises:
            ValueError: wrong cameras or sizes, or a wrong number of instructions.
        """
        del kinds  # one pass gives all
        check_observation(observation, schema, instructions)
        self.feature_spec(schema)
        batch = len(instructions)
        views = torch.stack([observation["image", camera].cpu() for camera in schema.cameras], dim=1)
        prompts = [schema.instruct(text) for text in instructions]
        encoded = self._encode_prompt(
            {
                # [B, time, views, height, width, colour]
                TransitionKey.OBSERVATION: {"video": views.permute(0, 1, 3, 4, 2).unsqueeze(1)},
                TransitionKey.COMPLEMENTARY_DATA: {
                    "language": prepare_n1_7_language_batch(prompts, batch, formalize_language=self.formalize_language)
                },
            }
        )[TransitionKey.COMPLEMENTARY_DATA]
        inputs = {name: encoded[name].long() for name in ("input_ids", "attention_mask")}
        # The processor stacks the patches of all images; every row has equally many.
        inputs |= {name: encoded[name].unflatten(0, (batch, -1)) for name in ("pixel_values", "image_grid_thw")}
        return TensorDict(inputs, batch_size=[batch])

    # inference_mode(False): the feature may later be an input of training, which refuses inference-mode tensors.
    @torch.inference_mode(False)
    @torch.no_grad()
    def encode(self, inputs: TensorDict, kinds: Sequence[str] = ("tokens",)) -> VLAFeature:
        """See :meth:`Backbone.encode` and the class docstring."""
        ids_BL, mask_BL = inputs["input_ids"], inputs["attention_mask"].bool()
        image_BL = ids_BL == self.vlm.config.image_token_id
        grid = inputs["image_grid_thw"].flatten(0, 1)
        # Passing the positions keeps the model from storing them on itself: callers in other threads share it.
        positions_3BL, _ = self.vlm.get_rope_index(
            input_ids=ids_BL,
            mm_token_type_ids=image_BL.long(),
            image_grid_thw=grid,
            attention_mask=inputs["attention_mask"],
        )
        hidden_BLD = self.vlm(
            input_ids=ids_BL,
            attention_mask=inputs["attention_mask"],
            pixel_values=inputs["pixel_values"].flatten(0, 1),
            image_grid_thw=grid,
            mm_token_type_ids=image_BL.long(),
            # The policy was trained with a fourth row, of text positions, in front.
            position_ids=torch.cat([positions_3BL[:1], positions_3BL]),
            use_cache=False,
        ).last_hidden_state
        hidden_BLD = hidden_BLD * mask_BL.unsqueeze(-1)
        tokens, mask = {}, {}
        if "tokens" in kinds:
            for name, chosen_BL in (("image", image_BL), ("text", mask_BL & ~image_BL)):
                longest = int(chosen_BL.sum(1).max())
                # A stable sort brings the chosen tokens to the front, in their order.
                index = (~chosen_BL).int().argsort(dim=1, stable=True)[:, :longest]
                mask[name] = chosen_BL.gather(1, index)
                tokens[name] = hidden_BLD.take_along_dim(index.unsqueeze(-1), dim=1) * mask[name].unsqueeze(-1)
        size = inputs.batch_size
        return VLAFeature(
            tokens=TensorDict(tokens, batch_size=size),
            mask=TensorDict(mask, batch_size=size),
            pooled=hidden_BLD.sum(1) / mask_BL.sum(1, keepdim=True),
            batch_size=size,
        )


def groot_config(folder: Path, pretrained: str) -> GR00TN17Config:
    """The checkpoint's config.

    Raises:
        ValueError: it is of another policy.
    """
    kind = json.loads((folder / "config.json").read_text()).get("model_type")
    if kind != GR00TN17Config.model_type:
        raise ValueError(f"pretrained={pretrained!r} is a {kind} checkpoint; groot needs {GR00TN17Config.model_type}")
    return GR00TN17Config.from_pretrained(folder)
