"""Checkpoint folders of published policies: where they are, and the part of the weights that one side needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.backbones import tiny_policies

if TYPE_CHECKING:
    from transformers import DynamicCache

INSTALL = "pip install 'nexus-lightning[vla]'"
#: Precisions of a frozen backbone.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def checkpoint_folder(pretrained: str, policy: str) -> Path:
    """The local folder of a checkpoint: a folder, a Hugging Face name (downloaded), or ``tiny``.

    Args:
        pretrained: a folder with ``config.json`` and ``*.safetensors``, a repository such as ``lerobot/smolvla_base``,
            or ``tiny``: a small random policy of a fixed seed, made in a temporary folder of this process, so that
            backbone and head get the same weights.
        policy: ``smolvla``, ``pi0`` or ``groot``; which tiny policy is meant.

    Raises:
        ValueError: the folder has no ``config.json``.
    """
    if pretrained == "tiny":
        return tiny_policies.tiny_policy(policy)
    folder = Path(pretrained)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(pretrained, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja"]))
    if not (folder / "config.json").is_file():
        raise ValueError(f"pretrained={pretrained!r}: {folder} has no config.json; give a {policy} checkpoint folder")
    return folder


def read_weights(folder: Path, wanted: Callable[[str], str | None]) -> dict[str, Tensor]:
    """The tensors of every ``*.safetensors`` file that are wanted; the others are never read.

    Args:
        folder: of the checkpoint.
        wanted: from a tensor's name in the checkpoint to its name in the result, or None to leave it out.

    Raises:
        ValueError: no tensor is wanted.
    """
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                if (key := wanted(name)) is not None:
                    found[key] = file.get_tensor(name)
    if not found:
        raise ValueError(f"pretrained={str(folder)!r}: its *.safetensors hold none of the tensors of this policy")
    return found


def under(prefix: str) -> Callable[[str], str | None]:
    """``wanted`` of :func:`read_weights` for everything under a prefix, which is taken off.

    Example:
        >>> under("model.vlm.")("model.vlm.norm.weight"), under("model.vlm.")("model.dit.norm.weight")
        ('norm.weight', None)
    """
    return lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None


def flatten_cache(cache: DynamicCache) -> Tensor:
    """Keys and values ``[B, kv_heads, L, head_dim]`` per layer -> tokens ``[B, L, layers*2*kv_heads*head_dim]``."""
    layers = [torch.stack([layer.keys, layer.values], dim=1) for layer in cache.layers]
    return torch.stack(layers, dim=1).permute(0, 4, 1, 2, 3, 5).flatten(2)


def unflatten_cache(kv_BLNCHD: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Tokens ``[B, L, layers, 2, kv_heads, head_dim]`` -> keys and values ``[B, kv_heads, L, head_dim]`` per layer."""
    return [(layer[0], layer[1]) for layer in kv_BLNCHD.permute(2, 3, 0, 4, 1, 5)]


def private_cache(keys_values: Sequence[tuple[Tensor, Tensor]], repeats: int = 1) -> DynamicCache:
    """A cache for one call. Appending to it concatenates, so the given tensors are never written to.

    Args:
        keys_values: ``[B, kv_heads, L, head_dim]`` each, per layer.
        repeats: copies of every row, one after the other.
    """
    from transformers import DynamicCache

    cache = DynamicCache()
    for index, (keys, values) in enumerate(keys_values):
        if repeats > 1:
            keys, values = keys.repeat_interleave(repeats, dim=0), values.repeat_interleave(repeats, dim=0)
        cache.update(keys, values, index)
    return cache
