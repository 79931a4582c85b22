"""The frozen, shared part: images + instruction in, :class:`VLAFeature` out."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorClass, TensorDict
from torch import Tensor, nn

from nexus_lightning.schema import TenantSchema


@dataclass(frozen=True)
class FeatureSegment:
    """One run of tokens inside a :class:`VLAFeature`.

    Attributes:
        name: key in ``VLAFeature.tokens`` / ``VLAFeature.mask`` (an identifier, e.g. ``image_agentview``, ``text``).
        dim: width D of its tokens.
        grid: ``(rows, cols)`` when the tokens are a spatial map in row-major order, else None.
    """

    name: str
    dim: int
    grid: tuple[int, int] | None = None


@dataclass(frozen=True)
class FeatureSpec:
    """What a backbone gives for one schema: the kind, its token segments in order, and the pooled width."""

    kind: str
    segments: tuple[FeatureSegment, ...]
    pooled_dim: int


class VLAFeature(TensorClass["nocast"]):
    """Backbone output at the sharing boundary for B samples.

    Attributes:
        tokens: one entry per :class:`FeatureSegment`: ``[B, L_segment, D_segment]`` float.
        mask: the same keys: ``[B, L_segment]`` bool, True where the token is real (not padding).
        pooled: ``[B, pooled_dim]`` float.
    """

    tokens: TensorDict
    mask: TensorDict
    pooled: Tensor


class Backbone(nn.Module):
    """Base class of every backbone. Frozen, eval mode, shared by all tenants, never in a payload or checkpoint.

    Who calls what: the inference server and the demonstration producer call :meth:`forward` from their own threads on
    one copy of the weights, so ``preprocess`` and ``encode`` must not keep per-call state.

    Required: ``feature_spec(schema)``, ``preprocess(observation, instructions, schema)``, ``encode(inputs)`` and
    ``config``.
    Contract (see :func:`check_backbone`): deterministic; a sample's feature never depends on its batch mates (pad with
    masks); no gradients; ``fingerprint`` changes when weights, config or dtype change.
    """

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        if inspect.isabstract(cls) or cls.__name__.startswith("_"):
            return
        missing = [n for n in ("feature_spec", "preprocess", "encode") if getattr(cls, n) is getattr(Backbone, n)]
        if missing:
            raise TypeError(f"{cls.__name__} must override {', '.join(missing)}; see nexus_lightning.backbone.Backbone")

    #: JSON-able description of the architecture and preprocessing; part of the fingerprint. Set it in ``__init__``.
    config: dict

    def freeze(self) -> Backbone:
        """Eval mode, no gradients. Call last in ``__init__``. ``train(True)`` is ignored afterwards."""
        self.requires_grad_(False)
        return super().train(False)

    def train(self, mode: bool = True) -> Backbone:
        del mode
        return super().train(False)

    def feature_spec(self, schema: TenantSchema) -> FeatureSpec:
        """Kinds, segments and widths of the feature for tenants with this schema (cheap; no forward)."""
        raise NotImplementedError

    def preprocess(self, observation: TensorDict, instructions: Sequence[str], schema: TenantSchema) -> TensorDict:
        """CPU side: resize, tokenise, pad.

        Args:
            observation: batch ``[B]`` with ``("image", <camera>)`` uint8 ``[B, 3, H, W]`` for every camera of the
                schema (there is no ``image`` entry when the schema has no cameras).
            instructions: B strings.
            schema: decides the cameras' order and size.

        Returns:
            VLAInput: a TensorDict ``[B]`` that :meth:`encode` understands.
        """
        raise NotImplementedError

    def encode(self, inputs: TensorDict) -> VLAFeature:
        """VLAInput ``[B]`` -> :class:`VLAFeature` ``[B]``. The only call into the frozen weights."""
        raise NotImplementedError

    @torch.no_grad()
    def forward(self, observation: TensorDict, instructions: Sequence[str], schema: TenantSchema) -> VLAFeature:
        inputs = self.preprocess(observation, instructions, schema)
        return self.encode(inputs.to(self.device))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def fingerprint(self) -> str:
        """sha256 over config, dtypes, parameter names and bytes."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name, value in sorted(self.state_dict().items()):
            digest.update(f"{name}:{value.dtype}:{tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def check_observation(observation: TensorDict, schema: TenantSchema) -> None:
    """Refuse a camera set, order or shape that differs from the schema's, naming the cameras.

    Raises:
        ValueError: a camera is missing, extra, or has the wrong dtype or size.
    """
    images = observation.get("image", None)
    given = tuple(images.keys()) if images is not None else ()
    if set(given) != set(schema.cameras):
        raise ValueError(f"camera mismatch: schema has {list(schema.cameras)}, observation has {list(given)}")
    for camera in schema.cameras:
        image = observation["image", camera]
        size = (3, schema.image_size, schema.image_size)
        if image.dtype != torch.uint8 or tuple(image.shape[-3:]) != size:
            raise ValueError(
                f"camera {camera!r}: expected uint8 {list(size)}, got {image.dtype} {list(image.shape[-3:])}"
            )
