"""Published policies: their checkpoint folders, the weights that one side needs, what pi0 and SmolVLA share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from torch import Tensor

from models.backbones import tiny_policies
from nexus_lightning.backbone import Backbone, FeatureSegment, FeatureSpec, VLAFeature
from nexus_lightning.schema import TenantSchema

if TYPE_CHECKING:
    from transformers import DynamicCache

INSTALL = "pip install 'nexus-lightning[vla]'"
#: Precisions of a frozen backbone.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class _PrefixBackbone(Backbone):
    """A policy's image and text prefix, whose action expert reads keys and values (pi0, SmolVLA).

    A subclass sets ``config["name"]`` and gives :attr:`layout` and :attr:`width`.
    """

    kinds = ("kv", "tokens", "pooled")

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """``(layers, 2, kv_heads, head_dim)`` of a token's keys and values."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """Of a hidden state."""
        raise NotImplementedError

    def feature_spec(self, schema: TenantSchema, kind: str = "kv") -> FeatureSpec:
        """See the class docstring.

        Raises:
            ValueError: an unknown kind, or a schema without cameras (the policy always sees an image).
        """
        check_kind(self, schema, kind)
        segments = {
            "kv": (FeatureSegment("kv", torch.Size(self.layout).numel(), layout=self.layout),),
            "tokens": (FeatureSegment("sequence", self.width),),
            "pooled": (),
        }
        return FeatureSpec(kind, segments[kind], self.width)

    @staticmethod
    def feature(cache: DynamicCache, hidden_BLD: Tensor, mask_BL: Tensor, kinds: Sequence[str]) -> VLAFeature:
        """What :meth:`encode` returns, of the prefix's keys and values, its last hidden states and their mask."""
        weight_BL1 = mask_BL.unsqueeze(-1)
        hidden_BLD = hidden_BLD * weight_BL1
        tokens, mask = {}, {}
        if "kv" in kinds:
            tokens["kv"], mask["kv"] = flatten_cache(cache) * weight_BL1, mask_BL
        if "tokens" in kinds:
            tokens["sequence"], mask["sequence"] = hidden_BLD, mask_BL
        size = mask_BL.shape[:1]
        return VLAFeature(
            tokens=TensorDict(tokens, batch_size=size),
            mask=TensorDict(mask, batch_size=size),
            pooled=hidden_BLD.sum(1) / weight_BL1.sum(1),
            batch_size=size,
        )


def check_kind(backbone: Backbone, schema: TenantSchema, kind: str) -> None:
    """Raises ValueError for a kind that the backbone does not give, and for a schema without cameras."""
    name = backbone.config["name"]
    if kind not in backbone.kinds:
        raise ValueError(f"kind={kind!r}: {name} gives {', '.join(backbone.kinds)}")
    if not schema.cameras:
        raise ValueError(f"cameras=[]: {name} needs at least one camera")


def chosen_dtype(dtype: str) -> torch.dtype:
    """Of a backbone's weights, from its name in :data:`DTYPES`; ValueError where it has none."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


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
