"""The shared part of pi0 (Black et al. 2024, arXiv 2410.24164): its frozen PaliGemma prefix.

::

    images --SigLIP, projection--> +
    bos, instruction, newline ---> + --> Gemma, bidirectional --> keys and values per layer

The state is the first token of the action transformer, outside the prefix, so the prefix is the same for every tenant.
The class is ``PI0ForConditionalGeneration`` of transformers. It has no pi0.5: neither its config nor its action
transformer knows adaptive norms or a state written into the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import nn

from models.backbones.policies import INSTALL, _PrefixBackbone, checkpoint_folder, chosen_dtype
from nexus_lightning.backbone import VLAFeature, check_observation
from nexus_lightning.schema import TenantSchema

try:
    from transformers import AutoProcessor, PI0Config, PI0ForConditionalGeneration
except ImportError as error:
    raise ImportError(f"pi0 needs transformers 5.5 or newer: {INSTALL}") from error


class Pi0Backbone(_PrefixBackbone):
    """The VLM of a pi0 checkpoint. Feature kinds ``kv``, ``tokens`` and ``pooled``.

    ``kv``: segment ``kv`` ``[B, L, layers * 2 * kv_heads * head_dim]`` of images then text, rotary positions applied;
    its mask is False on text padding, which lies on the right. ``tokens``: segment ``sequence``, the last hidden states
    of the same L tokens. ``pooled``: their masked mean.

    Images and text go through the checkpoint's own processor. It pads to a fixed length that counts the image tokens
    too and is shorter than they are, so here a batch is padded to its longest prompt: masked tokens change nothing.

    Args:
        pretrained: a folder or Hugging Face name with weights and processor, such as ``lerobot/pi0_base``, or ``tiny``.
        dtype: of the frozen weights, ``fp32`` or ``bf16``.

    Raises:
        ImportError: transformers is missing or too old; the message has the install line.
        ValueError: an unknown dtype, or a checkpoint of another architecture (pi0.5 among them).
    """

    def __init__(self, pretrained: str = "lerobot/pi0_base", dtype: str = "fp32") -> None:
        super().__init__()
        precision = chosen_dtype(dtype)
        folder = checkpoint_folder(pretrained, "pi0")
        pi0_config(folder, pretrained)
        self._processor = AutoProcessor.from_pretrained(folder)
        with torch.random.fork_rng(devices=[]):
            self.prefix = PI0ForConditionalGeneration.from_pretrained(folder, dtype=precision).model
        self.prefix.dit = None  # the tenants' part
        self.config = {"name": "pi0", "processor": type(self._processor).__name__, "dtype": dtype}
        self.freeze()

    @property
    def layout(self) -> tuple[int, int, int, int]:
        text = self.prefix.config.vlm_config.text_config
        return text.num_hidden_layers, 2, text.num_key_value_heads, text.head_dim

    @property
    def width(self) -> int:
        return self.prefix.config.vlm_config.text_config.hidden_size

    def shardable_units(self) -> list[nn.Module]:
        """Layers of the vision tower, then of the language model."""
        vlm = self.prefix.vlm
        return [*vlm.vision_tower.vision_model.encoder.layers, *vlm.language_model.layers]

    def preprocess(
        self,
        observation: TensorDict,
        instructions: Sequence[str],
        schema: TenantSchema,
        kinds: Sequence[str] = ("kv",),
    ) -> TensorDict:
        """See the class docstring and :meth:`Backbone.preprocess`.

        Returns:
            TensorDict ``[B]``: ``input_ids`` and ``attention_mask`` int64 ``[B, L]``, padded on the right;
            ``pixel_values`` float32 ``[B, cameras, 3, h, w]`` and ``pixel_attention_mask`` bool ``[B, cameras]``.

        Raises:
            ValueError: wrong cameras or sizes, or a wrong number of instructions.
        """
        del kinds  # one pass gives all
        check_observation(observation, schema, instructions)
        self.feature_spec(schema)
        batch = len(instructions)
        inputs = self._processor(
            images=[[observation["image", camera][row].cpu() for camera in schema.cameras] for row in range(batch)],
            text=[schema.instruct(text) for text in instructions],
            padding="longest",
            return_tensors="pt",
        )
        names = ("input_ids", "attention_mask", "pixel_values", "pixel_attention_mask")
        return TensorDict({name: inputs[name] for name in names}, batch_size=[batch])

    # inference_mode(False): the feature may later be an input of training, which refuses inference-mode tensors.
    @torch.inference_mode(False)
    @torch.no_grad()
    def encode(self, inputs: TensorDict, kinds: Sequence[str] = ("kv",)) -> VLAFeature:
        """See :meth:`Backbone.encode` and the class docstring."""
        pixels = inputs["pixel_values"].to(self.prefix.dtype)
        embedded = self.prefix.embed_prefix(inputs["input_ids"], pixels, inputs["pixel_attention_mask"])
        # As PI0Model.forward runs it: all tokens are of the bidirectional prefix (type 0), positions from 0.
        out = self.prefix.vlm(
            inputs_embeds=embedded,
            attention_mask=inputs["attention_mask"],
            position_ids=inputs["attention_mask"].cumsum(-1) - 1,
            token_type_ids=torch.zeros_like(inputs["input_ids"]),
            use_cache=True,
        )
        return self.feature(out.past_key_values, out.last_hidden_state, inputs["attention_mask"].bool(), kinds)


def pi0_config(folder: Path, pretrained: str) -> PI0Config:
    """The checkpoint's config.

    Raises:
        ValueError: it is of another architecture.
    """
    kind = json.loads((folder / "config.json").read_text()).get("model_type")
    if kind != "pi0":
        raise ValueError(f"pretrained={pretrained!r} is a {kind} checkpoint; pi0 needs model_type pi0 (not pi0.5)")
    return PI0Config.from_pretrained(folder)
