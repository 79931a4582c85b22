"""A random-weight vision-language model of 1-2 M parameters. For plumbing tests only: its features mean nothing.

The architecture is a real Hugging Face one (Qwen3-VL, arXiv 2511.21631), built from a config with a byte-level
tokenizer and a processor made in code, so the path of large VLMs is exercised offline: image placeholders, multimodal
rotary positions, padding on either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import TensorDict

from nexus_lightning.backbone import Backbone, FeatureSegment, FeatureSpec, VLAFeature, check_observation
from nexus_lightning.schema import TenantSchema

INSTALL = "pip install 'nexus-lightning[backbone]'"
PATCH, MERGE = 16, 2
HIDDEN = 128
IMAGE_PROMPT = "<|vision_start|><|image_pad|><|vision_end|>"
SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]


class TinyVLM(Backbone):
    """Random Qwen3-VL. **Plumbing tests only**; :attr:`banner` says so in the start banner. Feature kind ``tokens``.

    One segment ``sequence``: the last hidden state ``[B, L, 128]`` of images then text, no grid, mask False on padding.
    ``pooled``: its masked mean, ``[B, 128]``.

    Args:
        seed: of the random weights; the global generator is left alone.
        padding_side: where shorter prompts of a batch are padded; a sample's feature is the same either way.
        max_text_tokens: longest instruction in bytes (the tokenizer has one token per byte).

    Raises:
        ImportError: transformers is missing; the message has the install line.
    """

    #: One line for the start banner of a run.
    banner = "tiny: random weights, for plumbing tests only; nothing can be learnt from its features"

    def __init__(
        self, seed: int = 0, padding_side: Literal["left", "right"] = "right", max_text_tokens: int = 256
    ) -> None:
        super().__init__()
        if padding_side not in ("left", "right"):
            raise ValueError(f"padding_side={padding_side!r}: choose left or right")
        self.max_text_tokens = max_text_tokens
        self.config = {"name": "tiny", "seed": seed, "patch": PATCH, "merge": MERGE}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.vlm, self._processor = _build(padding_side)
        self.freeze()

    def feature_spec(self, schema: TenantSchema) -> FeatureSpec:
        """See the class docstring.

        Raises:
            ValueError: there are cameras and ``image_size`` is not a multiple of 32 (patch 16, merged 2 x 2).
        """
        if schema.cameras and schema.image_size % (PATCH * MERGE):
            raise ValueError(
                f"image_size={schema.image_size}: tiny needs a multiple of {PATCH * MERGE}, for example 128"
            )
        return FeatureSpec(kind="tokens", segments=(FeatureSegment("sequence", HIDDEN),), pooled_dim=HIDDEN)

    def preprocess(self, observation: TensorDict, instructions: Sequence[str], schema: TenantSchema) -> TensorDict:
        """Prompts, tokens and patches; see :meth:`Backbone.preprocess`.

        Returns:
            TensorDict ``[B]``: ``input_ids``, ``attention_mask``, ``mm_token_type_ids`` int64 ``[B, L]``; with cameras
            also ``pixel_values`` float ``[B, patches, 1536]`` and ``image_grid_thw`` int64 ``[B, cameras, 3]``.

        Raises:
            ValueError: wrong cameras or sizes, a wrong number of instructions, or one that is too long.
        """
        check_observation(observation, schema)
        self.feature_spec(schema)
        batch = len(instructions)
        if observation.batch_size and observation.batch_size[0] != batch:
            raise ValueError(f"{observation.batch_size[0]} observations but {batch} instructions")
        for text in instructions:
            if len(text.encode()) > self.max_text_tokens:
                raise ValueError(
                    f"instruction of {len(text.encode())} tokens exceeds tiny's limit of {self.max_text_tokens}; "
                    f"shorten it: {text[:60]!r}..."
                )
        images = [[observation["image", camera][row].cpu() for camera in schema.cameras] for row in range(batch)]
        encoded = self._processor(
            text=[IMAGE_PROMPT * len(schema.cameras) + text + "<|im_end|>" for text in instructions],
            images=images if schema.cameras else None,
            return_tensors="pt",
            padding=True,
            return_mm_token_type_ids=True,
        )
        inputs = {name: encoded[name].long() for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
        if schema.cameras:
            # The processor stacks the patches of all images; every row has equally many.
            inputs["pixel_values"] = encoded["pixel_values"].unflatten(0, (batch, -1))
            inputs["image_grid_thw"] = encoded["image_grid_thw"].unflatten(0, (batch, -1))
        return TensorDict(inputs, batch_size=[batch])

    # inference_mode(False): the feature may later be an input of training, which refuses inference-mode tensors.
    @torch.inference_mode(False)
    @torch.no_grad()
    def encode(self, inputs: TensorDict) -> VLAFeature:
        """See :meth:`Backbone.encode` and the class docstring."""
        model_inputs = {name: inputs[name] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
        grid = None
        if "pixel_values" in inputs.keys():
            grid = inputs["image_grid_thw"].flatten(0, 1)
            model_inputs |= {"pixel_values": inputs["pixel_values"].flatten(0, 1), "image_grid_thw": grid}
        # Passing the positions keeps the model from storing them on itself: callers in other threads share it.
        position_ids, _ = self.vlm.get_rope_index(
            input_ids=inputs["input_ids"],
            mm_token_type_ids=inputs["mm_token_type_ids"],
            image_grid_thw=grid,
            attention_mask=inputs["attention_mask"],
        )
        hidden = self.vlm(**model_inputs, position_ids=position_ids, use_cache=False).last_hidden_state
        mask = inputs["attention_mask"].bool()
        hidden = hidden * mask.unsqueeze(-1)
        pooled = hidden.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        size = inputs.batch_size
        return VLAFeature(
            tokens=TensorDict({"sequence": hidden}, batch_size=size),
            mask=TensorDict({"sequence": mask}, batch_size=size),
            pooled=pooled,
            batch_size=size,
        )


def _build(padding_side: str):
    """The model and its processor, from configs alone (no hub, no files)."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import (
            PreTrainedTokenizerFast,
            Qwen2VLImageProcessor,
            Qwen3VLConfig,
            Qwen3VLModel,
            Qwen3VLProcessor,
            Qwen3VLVideoProcessor,
        )
    except ImportError as error:
        raise ImportError(f"backbone tiny needs transformers: {INSTALL}") from error
    bytes_only = Tokenizer(models.BPE(unk_token=None))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(SPECIAL_TOKENS),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bytes_only.train_from_iterator([], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        padding_side=padding_side,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
        },
    )
    token_id = tokenizer.convert_tokens_to_ids
    heads = 4
    third = HIDDEN // heads // 2 // 3
    config = Qwen3VLConfig(
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": HIDDEN,
            "intermediate_size": 3 * HIDDEN,
            "num_hidden_layers": 4,
            "num_attention_heads": heads,
            "num_key_value_heads": 2,
            "head_dim": HIDDEN // heads,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": [HIDDEN // heads // 2 - 2 * third, third, third],
                "mrope_interleaved": True,
            },
            "rope_theta": 1e6,
            "pad_token_id": token_id("<|endoftext|>"),
        },
        vision_config={
            "depth": 3,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 2,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "out_hidden_size": HIDDEN,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 2],
        },
    )
    cell = PATCH * MERGE
    image_processor = Qwen2VLImageProcessor(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": cell * cell, "longest_edge": 1024 * 1024},
    )
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    processor = Qwen3VLProcessor(image_processor, tokenizer, Qwen3VLVideoProcessor(), chat_template=template)
    return Qwen3VLModel(config), processor
