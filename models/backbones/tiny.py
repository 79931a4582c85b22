"""Checkpoint folders of 1-3 M random parameters for the real VLM architectures, built in code (no hub, no downloads).

**For plumbing tests only: their features mean nothing.** A folder holds what a published checkpoint holds (config,
safetensors, byte-level tokenizer, processor), so ``from_pretrained`` and everything behind it is the real path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

INSTALL = "pip install 'nexus-lightning[backbone]'"
#: One line for the start banner of a run.
BANNER = "random weights, for plumbing tests only; nothing can be learnt from its features"
HIDDEN, LAYERS, HEADS, KV_HEADS = 128, 4, 4, 2
HEAD_DIM = HIDDEN // HEADS
TEXT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 3 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
}
#: One half of each head's rotary pairs goes to time, the other to height and width.
MROPE_SECTION = [HEAD_DIM // 4, HEAD_DIM // 8, HEAD_DIM // 8]
CHAT_TEMPLATE = (
    "{{% for message in messages %}}{start}{{{{ message['role'] }}}}\n"
    "{{% for part in message['content'] %}}"
    "{{% if part['type'] == 'image' %}}{image}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{{% endfor %}}{end}\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}{start}assistant\n{{% endif %}}"
)


def build_checkpoint(architecture: str, folder: str | Path, seed: int = 0) -> None:
    """Write a tiny checkpoint of ``architecture`` into ``folder``. Weights follow ``seed``; global RNG is untouched.

    Args:
        architecture: ``model_type`` of its config: ``qwen3_vl``, ``qwen2_5_vl``, ``smolvlm`` or ``paligemma``.
        folder: where to; made when missing.
        seed: of the random weights.

    Raises:
        ValueError: an unknown architecture.
        ImportError: transformers is missing; the message has the install line.
    """
    config, processor = _parts(architecture)
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        # The default std of 0.02 gives attention that is all but uniform: wrong masks and positions would not show.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    with no_progress_bars():
        model.save_pretrained(folder)
        processor.save_pretrained(folder)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Bars help while gigabytes load; for a megabyte they only fill the console."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def tiny_config(architecture: str) -> Any:
    """The ``transformers`` config of a tiny checkpoint, without writing one."""
    return _parts(architecture)[0]


def _parts(architecture: str) -> tuple[Any, Any]:
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture={architecture!r}: choose one of {', '.join(ARCHITECTURES)}")
    try:
        return ARCHITECTURES[architecture]()
    except ImportError as error:
        raise ImportError(f"a tiny {architecture} needs transformers and num2words: {INSTALL}") from error


def _byte_tokenizer(specials: list[str], **options: Any) -> Any:
    """One token per byte, then the special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(specials),
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def _qwen_tokenizer() -> tuple[Any, dict[str, int], str]:
    tokenizer = _byte_tokenizer(
        [
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<|vision_start|>",
            "<|vision_end|>",
            "<|image_pad|>",
            "<|video_pad|>",
            "<|fim_pad|>",
        ],
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
    ids = {
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
    }
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    return tokenizer, ids, CHAT_TEMPLATE.format(start="<|im_start|>", end="<|im_end|>", image=image)


def _qwen3_vl() -> tuple[Any, Any]:
    from transformers import Qwen2VLImageProcessor, Qwen3VLConfig, Qwen3VLProcessor, Qwen3VLVideoProcessor

    tokenizer, ids, template = _qwen_tokenizer()
    config = Qwen3VLConfig(
        **ids,
        text_config={
            **TEXT,
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": MROPE_SECTION,
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 3,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 2,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": HIDDEN,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 2],
        },
    )
    images = Qwen2VLImageProcessor(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 32 * 32, "longest_edge": 1024 * 1024},
    )
    return config, Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(), chat_template=template)


def _qwen2_5_vl() -> tuple[Any, Any]:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    tokenizer, ids, template = _qwen_tokenizer()
    text = {name: value for name, value in TEXT.items() if name != "head_dim"}
    config = Qwen2_5_VLConfig(
        **ids,
        text_config={
            **text,
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": MROPE_SECTION},
        },
        vision_config={
            "depth": 3,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "out_hidden_size": HIDDEN,
        },
    )
    images = Qwen2VLImageProcessor(
        patch_size=14,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 28 * 28, "longest_edge": 1024 * 1024},
    )
    return config, Qwen2_5_VLProcessor(images, tokenizer, Qwen2VLVideoProcessor(), chat_template=template)


def _smolvlm() -> tuple[Any, Any]:
    from transformers import SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    tokenizer = _byte_tokenizer(
        [
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<fake_token_around_image>",
            "<image>",
            "<global-img>",
            "<end_of_utterance>",
            "<empty_output>",
        ],
        pad_token="<|im_end|>",
        eos_token="<end_of_utterance>",
        bos_token="<|im_start|>",
        unk_token="<|endoftext|>",
        extra_special_tokens={
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    )
    side = {"longest_edge": 64}
    config = SmolVLMConfig(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
        text_config={
            **TEXT,
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 2048,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 64,
            "patch_size": 8,
        },
    )
    processor = SmolVLMProcessor(
        SmolVLMImageProcessor(size=side, max_image_size=side),
        tokenizer,
        SmolVLMVideoProcessor(
            size=side,
            max_image_size=side,
            do_sample_frames=False,
            video_sampling={"fps": 1, "max_frames": 1, "video_size": side},
        ),
        image_seq_len=(64 // 8 // 2) ** 2,
        chat_template=CHAT_TEMPLATE.format(start="<|im_start|>", end="<end_of_utterance>", image="<image>"),
    )
    return config, processor


def _paligemma() -> tuple[Any, Any]:
    from transformers import PaliGemmaConfig, PaliGemmaProcessor, SiglipImageProcessor

    tokenizer = _byte_tokenizer(
        ["<pad>", "<eos>", "<bos>", "<image>"],
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        extra_special_tokens={"image_token": "<image>"},
    )
    images = SiglipImageProcessor(size={"height": 64, "width": 64}, image_seq_length=(64 // 16) ** 2)
    # The processor adds PaliGemma's location and segmentation tokens to the tokenizer.
    processor = PaliGemmaProcessor(images, tokenizer)
    config = PaliGemmaConfig(
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=HIDDEN,
        hidden_size=HIDDEN,
        text_config={
            **TEXT,
            "model_type": "gemma",
            "num_key_value_heads": 1,
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "max_position_embeddings": 2048,
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 64,
            "patch_size": 16,
            "vision_use_head": False,
        },
    )
    return config, processor


ARCHITECTURES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen3_vl": _qwen3_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "smolvlm": _smolvlm,
    "paligemma": _paligemma,
}
