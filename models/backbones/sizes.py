"""Published ``config.json`` numbers of the checkpoints in ``conf/backbone``: sizes are known without a hub or weights.

Each entry holds what decides shapes and feature widths; everything else is the default of the ``transformers`` config
class. ``parameters`` is the total that the model card states (language-model head included, tied weights counted once);
a test builds every entry on the meta device and compares.

Sources: the ``config.json`` files on the hub; Qwen3-VL (arXiv 2511.21631), Qwen2.5-VL (arXiv 2502.13923), SmolVLM
(arXiv 2504.05299), PaliGemma (arXiv 2407.07726), PaliGemma 2 (arXiv 2412.03555).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

_QWEN3_VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
_QWEN3_VISION_LARGE = {
    **_QWEN3_VISION,
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_QWEN25_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
}
_SIGLIP_SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
}


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool, vision: dict) -> dict[str, Any]:
    return {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": tied,
        "text_config": {
            "vocab_size": 151936,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {**vision, "out_hidden_size": hidden},
    }


def _qwen25(hidden: int, intermediate: int, layers: int, heads: int, kv: int, vocab: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": tied,
        "text_config": {
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {**_QWEN25_VISION, "out_hidden_size": hidden},
    }


def _smolvlm(text: dict[str, Any], vision: dict[str, Any], scale_factor: int) -> dict[str, Any]:
    return {
        "model_type": "smolvlm",
        "image_token_id": 49190,
        "pad_token_id": 2,
        "scale_factor": scale_factor,
        "text_config": {
            "model_type": "llama",
            "vocab_size": 49280,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 2,
            **text,
        },
        "vision_config": vision,
    }


def _paligemma(text: dict[str, Any], projection_dim: int) -> dict[str, Any]:
    return {
        "model_type": "paligemma",
        "image_token_index": 257152,
        "projection_dim": projection_dim,
        "hidden_size": projection_dim,
        "text_config": {"vocab_size": 257216, **text},
        "vision_config": {
            "model_type": "siglip_vision_model",
            **_SIGLIP_SO400M,
            "image_size": 224,
            "vision_use_head": False,
        },
    }


#: Hub name -> (published number of parameters, config).
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen/Qwen3-VL-2B-Instruct": (2_127_532_032, _qwen3(2048, 6144, 28, 16, True, _QWEN3_VISION)),
    "Qwen/Qwen3-VL-4B-Instruct": (4_437_815_808, _qwen3(2560, 9728, 36, 32, True, _QWEN3_VISION)),
    "Qwen/Qwen3-VL-8B-Instruct": (8_767_123_696, _qwen3(4096, 12288, 36, 32, False, _QWEN3_VISION_LARGE)),
    "Qwen/Qwen2.5-VL-3B-Instruct": (3_754_622_976, _qwen25(2048, 11008, 36, 16, 2, 151936, True)),
    "Qwen/Qwen2.5-VL-7B-Instruct": (8_292_166_656, _qwen25(3584, 18944, 28, 28, 4, 152064, False)),
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": (
        507_482_304,
        _smolvlm(
            {
                "hidden_size": 960,
                "intermediate_size": 2560,
                "num_hidden_layers": 32,
                "num_attention_heads": 15,
                "num_key_value_heads": 5,
                "head_dim": 64,
            },
            {
                "hidden_size": 768,
                "intermediate_size": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "image_size": 512,
                "patch_size": 16,
            },
            scale_factor=4,
        ),
    ),
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": (
        2_246_784_880,
        _smolvlm(
            {
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 24,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "head_dim": 64,
            },
            {**_SIGLIP_SO400M, "image_size": 384},
            scale_factor=3,
        ),
    ),
    "google/paligemma-3b-pt-224": (
        2_923_466_480,
        _paligemma(
            {
                "model_type": "gemma",
                "hidden_size": 2048,
                "intermediate_size": 16384,
                "num_hidden_layers": 18,
                "num_attention_heads": 8,
                "num_key_value_heads": 1,
                "head_dim": 256,
            },
            projection_dim=2048,
        ),
    ),
    "google/paligemma2-3b-pt-224": (
        3_032_242_416,
        _paligemma(
            {
                "model_type": "gemma2",
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
            },
            projection_dim=2304,
        ),
    ),
}


def unreachable(pretrained: str) -> str:
    """The message for a checkpoint that cannot be had: which one, and what to do."""
    return (
        f"pretrained={pretrained!r}: no such local folder, and the Hugging Face hub does not give it. Log in "
        f"(`hf auth login`) and accept its licence if it is gated, download it where there is a network "
        f"(`hf download {pretrained} --local-dir FOLDER`) and write pretrained: FOLDER, or pretrained: tiny for a "
        f"random-weight model of this architecture"
    )


def checkpoint_config(pretrained: str) -> Any:
    """The ``transformers`` config of a checkpoint: a local folder's own, else a published one, else asked of the hub.

    Raises:
        OSError: neither a folder nor known here, and the hub cannot be reached or does not know it.
    """
    from transformers import AutoConfig

    if pretrained in PUBLISHED and not Path(pretrained).is_dir():
        values = copy.deepcopy(PUBLISHED[pretrained][1])
        return AutoConfig.for_model(values.pop("model_type"), **values)
    try:
        return AutoConfig.from_pretrained(pretrained)
    except OSError as error:
        raise OSError(unreachable(pretrained)) from error
