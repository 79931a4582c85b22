"""Checkpoint folders of small random policies, built in code: ``pretrained: tiny``.

**For plumbing tests only: they have learnt nothing.** A folder holds what a published checkpoint holds, made by the
policy's own ``save_pretrained``, so that loading takes the real path. Weights follow a fixed seed: the backbone and the
heads of every process get the same.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from models.backbones.tiny import HEADS, HIDDEN, build_checkpoint, tiny_config

CHUNK, STATE_DIM, ACTION_DIM, STEPS = 8, 40, 8, 3
#: Longest instruction in tokens; the byte-level tokenizer has one per byte.
TEXT_TOKENS = 96


@functools.cache
def tiny_policy(policy: str, seed: int = 0) -> Path:
    """The folder of a tiny ``smolvla``, ``pi0`` or ``groot``; made once per process and removed at its end.

    Raises:
        ValueError: an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: choose one of {', '.join(POLICIES)}")
    folder = Path(tempfile.mkdtemp(prefix=f"tiny_{policy}_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        POLICIES[policy](folder, seed)
    return folder


def _smolvla(folder: Path, seed: int) -> None:
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

    build_checkpoint("smolvlm", folder / "vlm", seed)
    config = SmolVLAConfig(
        vlm_model_name=str(folder / "vlm"),
        num_vlm_layers=3,  # one less than the VLM has
        resize_imgs_with_padding=(64, 64),
        tokenizer_max_length=TEXT_TOKENS,
        chunk_size=CHUNK,
        n_action_steps=CHUNK,
        max_state_dim=STATE_DIM,
        max_action_dim=ACTION_DIM,
        num_steps=STEPS,
        device="cpu",
        push_to_hub=False,
        input_features={
            "observation.images.front": PolicyFeature(FeatureType.VISUAL, (3, 64, 64)),
            "observation.images.wrist": PolicyFeature(FeatureType.VISUAL, (3, 64, 64)),
            "observation.state": PolicyFeature(FeatureType.STATE, (6,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (4,))},
    )
    policy = SmolVLAPolicy(config)
    _randomize(policy)
    policy.save_pretrained(folder)


def _pi0(folder: Path, seed: int) -> None:
    from transformers import AutoProcessor, PI0Config, PI0ForConditionalGeneration, PI0Processor

    build_checkpoint("paligemma", folder / "vlm", seed)
    source = AutoProcessor.from_pretrained(folder / "vlm")
    vlm = tiny_config("paligemma").to_dict()
    dit = {**vlm["text_config"], "hidden_size": HIDDEN // 2, "intermediate_size": HIDDEN}
    config = PI0Config(
        vlm_config=vlm,
        dit_config=dit,
        chunk_size=CHUNK,
        max_state_dim=STATE_DIM,
        max_action_dim=ACTION_DIM,
        num_inference_steps=STEPS,
    )
    policy = PI0ForConditionalGeneration(config)
    _randomize(policy)
    policy.save_pretrained(folder)
    PI0Processor(source.image_processor, source.tokenizer).save_pretrained(folder)


def _groot(folder: Path, seed: int) -> None:
    from lerobot.policies.groot.groot_n1_7 import GR00TN17, GR00TN17Config

    build_checkpoint("qwen3_vl", folder / "vlm", seed)
    width = 48
    attention = {"positional_embeddings": None, "num_attention_heads": HEADS, "dropout": 0.2, "final_dropout": True}
    config = GR00TN17Config(
        model_name=str(folder / "vlm"),
        model_dtype="float32",
        dtype="float32",
        select_layer=3,
        backbone_embedding_dim=HIDDEN,
        input_embedding_dim=width,
        hidden_size=width,
        max_state_dim=STATE_DIM,
        max_action_dim=ACTION_DIM,
        action_horizon=CHUNK,
        max_num_embodiments=12,
        num_inference_timesteps=STEPS,
        max_seq_len=64,
        diffusion_model_cfg={
            **attention,
            "num_layers": 4,
            "attention_head_dim": width // HEADS,
            "norm_type": "ada_norm",
            "output_dim": width,
            "interleave_self_attention": True,
        },
        vl_self_attention_cfg={**attention, "num_layers": 2, "attention_head_dim": HIDDEN // HEADS},
    )
    policy = GR00TN17(config, load_backbone_weights=False)
    _randomize(policy)
    policy.save_pretrained(folder)
    settings = {"image_target_size": [64, 64], "image_crop_size": [58, 58]}
    (folder / "processor_config.json").write_text(json.dumps({"processor_kwargs": settings}))


POLICIES: dict[str, Callable[[Path, int], None]] = {"smolvla": _smolvla, "pi0": _pi0, "groot": _groot}


def _randomize(policy: nn.Module) -> None:
    """Weights of unit gain: with the default std of 0.02 attention is all but uniform, and errors would not show."""
    for parameter in policy.parameters():
        if parameter.ndim > 1:
            # GR00T's weights per embodiment are [embodiments, in, out]; all others [out, in, ...].
            fan_in = parameter.shape[1] if parameter.ndim == 3 else parameter[0].numel()
            nn.init.normal_(parameter, std=fan_in**-0.5)
