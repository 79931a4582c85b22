"""The frozen, shared part: images + instruction in, :class:`VLAFeature` out."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from tensordict import TensorClass, TensorDict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nexus_lightning.schema import TenantSchema

_LOCK = type(threading.Lock())
#: What a backbone may give at the sharing boundary.
KINDS = {
    "pooled": "one vector per sample",
    "tokens": "last hidden states and their mask",
    "action_tokens": "last hidden states at schema.chunk action tokens appended to the prompt (OpenVLA-OFT)",
    "layer_states": "hidden states entering every decoder layer",
    "kv": "keys and values of every decoder layer (pi0, SmolVLA)",
}


@dataclass(frozen=True)
class FeatureSegment:
    """One run of tokens inside a :class:`VLAFeature`.

    Attributes:
        name: key in ``VLAFeature.tokens`` / ``VLAFeature.mask`` (an identifier, e.g. ``image_agentview``, ``text``).
        dim: width D of its tokens.
        grid: ``(rows, cols)`` when the tokens are a spatial map in row-major order, else None.
        length: number of its tokens when it is fixed and none is padding (``schema.chunk`` for ``action_tokens``).
        layout: when the D numbers of a token are a tensor of their own: ``(layers, width)`` for ``layer_states``,
            ``(layers, 2, kv_heads, head_dim)`` for ``kv`` (keys, then values; rotary positions already applied).
            Kept flat in the feature, so that padding, slicing and storing are the same for every kind.
    """

    name: str
    dim: int
    grid: tuple[int, int] | None = None
    length: int | None = None
    layout: tuple[int, ...] | None = None

    def unflatten(self, tokens: Tensor) -> Tensor:
        """``[B, L, D]`` -> ``[B, L, *layout]``."""
        assert self.layout is not None, f"segment {self.name} has no layout"
        return tokens.unflatten(-1, self.layout)


@dataclass(frozen=True)
class FeatureSpec:
    """What a head reads: one of :data:`KINDS`, its token segments in order, and the width of ``pooled``."""

    kind: str
    segments: tuple[FeatureSegment, ...]
    pooled_dim: int


class VLAFeature(TensorClass["nocast"]):
    """Backbone output at the sharing boundary for B samples.

    Attributes:
        tokens: one entry per :class:`FeatureSegment`: ``[B, L_segment, D_segment]`` float.
        mask: the same keys: ``[B, L_segment]`` bool, True where the token is real (not padding).
        pooled: ``[B, pooled_dim]`` float.

    One backbone pass may serve heads of several kinds: it then holds the segments of all of them, and
    :meth:`select` gives a head its own.
    """

    tokens: TensorDict
    mask: TensorDict
    pooled: Tensor

    def select(self, spec: FeatureSpec) -> VLAFeature:
        """The part that ``spec`` names, in its order (no copy)."""
        names = [segment.name for segment in spec.segments]
        return VLAFeature(
            tokens=TensorDict({n: self.tokens[n] for n in names}, self.batch_size),
            mask=TensorDict({n: self.mask[n] for n in names}, self.batch_size),
            pooled=self.pooled,
            batch_size=self.batch_size,
        )

    def for_head(self) -> VLAFeature:
        """Floating point values as float32: heads never see the backbone's or the store's compact dtype."""

        def widen(value: Tensor) -> Tensor:
            return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value

        tokens = TensorDict({name: widen(value) for name, value in self.tokens.items()}, self.batch_size)
        return VLAFeature(tokens=tokens, mask=self.mask, pooled=widen(self.pooled), batch_size=self.batch_size)


class SharedBackbone:
    """Pointer to the backbone for a head that *continues* it (:attr:`ActionHead.continues_backbone`).

    Such a head runs frozen layers privately: a state token pushed through them, private adapters beside their weights.
    The pointer is not a module: the backbone's weights stay out of the head's parameters, payload and copies.
    """

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    def __deepcopy__(self, memo: dict) -> SharedBackbone:
        return self


class Backbone(nn.Module):
    """Base class of every backbone. Frozen, eval mode, shared by all tenants, never in a payload or checkpoint.

    Who calls what: the inference server and the demonstration producer call :meth:`forward` from their own threads on
    one copy of the weights, so ``preprocess`` and ``encode`` must not keep per-call state.

    Required: ``kinds``, ``feature_spec(schema, kind)``, ``preprocess(observation, instructions, schema, kinds)``,
    ``encode(inputs, kinds)`` and ``config``.
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
        if not cls.kinds or not set(cls.kinds) <= set(KINDS):
            raise TypeError(f"{cls.__name__}.kinds={cls.kinds}: choose from {', '.join(KINDS)}")

    #: The kinds it can give (:data:`KINDS`), all of them from one pass. Asking for more never changes the others.
    kinds: ClassVar[tuple[str, ...]] = ("tokens", "pooled")
    #: JSON-able description of the architecture and preprocessing; part of the fingerprint. Set it in ``__init__``.
    config: dict

    def freeze(self) -> Backbone:
        """Eval mode, no gradients. Call last in ``__init__``. ``train(True)`` is ignored afterwards."""
        self.requires_grad_(False)
        return super().train(False)

    def train(self, mode: bool = True) -> Backbone:
        del mode
        return super().train(False)

    def __deepcopy__(self, memo: dict) -> Backbone:
        """Weights and state of its own, and locks of its own (Python cannot copy one)."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        memo |= {id(value): threading.Lock() for value in self.__dict__.values() if isinstance(value, _LOCK)}
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def shardable_units(self) -> list[nn.Module]:
        """Parts that FSDP2 gathers one at a time when the backbone is in shards (``placement=fsdp2``), in the order in
        which a pass runs them; usually its layers.

        For one schema every pass must run every unit, by calling it, whatever the rows and instructions are: gathering
        is a collective, and ranks hold different rows. What a pass may skip (a cached text encoder) belongs to none.
        What is in no unit stays gathered during a pass; without units that is everything.
        """
        return []

    def feature_spec(self, schema: TenantSchema, kind: str = "tokens") -> FeatureSpec:
        """Segments and widths of one kind for tenants with this schema (cheap; no forward).

        Raises:
            ValueError: this backbone does not give ``kind``, or the schema's images do not fit it.
        """
        raise NotImplementedError

    def preprocess(
        self,
        observation: TensorDict,
        instructions: Sequence[str],
        schema: TenantSchema,
        kinds: Sequence[str] = ("tokens",),
    ) -> TensorDict:
        """CPU side: resize (here and nowhere else), fill ``schema.prompt``, tokenise, pad.

        Args:
            observation: batch ``[B]`` with ``("image", <camera>)`` uint8 ``[B, 3, H, W]`` for every camera of the
                schema (there is no ``image`` entry when the schema has no cameras).
            instructions: B strings.
            schema: decides the cameras' order and size, the prompt, and the number of action tokens.
            kinds: what :meth:`encode` will be asked for (``action_tokens`` makes the prompt longer).

        Returns:
            VLAInput: a TensorDict ``[B]`` that :meth:`encode` understands.
        """
        raise NotImplementedError

    def encode(self, inputs: TensorDict, kinds: Sequence[str] = ("tokens",)) -> VLAFeature:
        """VLAInput ``[B]`` -> :class:`VLAFeature` ``[B]`` with the segments of all ``kinds``.

        The only call into the frozen weights.
        """
        raise NotImplementedError

    @torch.no_grad()
    def forward(
        self,
        observation: TensorDict,
        instructions: Sequence[str],
        schema: TenantSchema,
        kinds: Sequence[str] = ("tokens",),
    ) -> VLAFeature:
        inputs = self.preprocess(observation, instructions, schema, kinds)
        return self.encode(inputs.to(self.device), kinds)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def fingerprint(self) -> str:
        """:meth:`compute_fingerprint` of the weights as they are, kept until one is assigned or changed in place.

        Hashing a large backbone takes many seconds, and every reader and payload asks. A write through ``.data`` is not
        noticed: what has to prove that nothing changed computes it again.
        """
        key = tuple((name, value.data_ptr(), value._version, value.dtype) for name, value in self.state_dict().items())
        config = json.dumps(self.config, sort_keys=True)
        if self._fingerprint is None or self._fingerprint[0] != (config, key):
            self._fingerprint = ((config, key), self.compute_fingerprint())
        return self._fingerprint[1]

    _fingerprint: tuple[Any, str] | None = None

    def compute_fingerprint(self) -> str:
        """sha256 over config, dtypes, parameter names and bytes. Of a sharded backbone: a collective."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name, value in sorted(self.state_dict().items()):
            digest.update(f"{name}:{value.dtype}:{tuple(value.shape)}".encode())
            if isinstance(value, DTensor):
                value = cast(DTensor, value.to(value.device_mesh.device_type)).full_tensor()
            digest.update(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def compact(features: VLAFeature) -> VLAFeature:
    """Storage form: float32 as float16 (half the bytes, 11 bits of mantissa); bfloat16 and masks as they are."""
    return cast(VLAFeature, features.apply(lambda v: v.half() if v.dtype == torch.float32 else v))


def concatenate_features(parts: Sequence[VLAFeature]) -> VLAFeature:
    """Features ``[B_i]`` -> ``[sum B_i]``; segments of different lengths are padded with masked zeros on the right."""
    lengths: dict[str, int] = {}
    for part in parts:
        for name, mask in part.mask.items():
            lengths[name] = max(lengths.get(name, 0), mask.shape[1])
    padded = []
    for part in parts:
        tokens, mask = part.tokens.copy(), part.mask.copy()
        for name, length in lengths.items():
            missing = length - mask[name].shape[1]
            if missing:
                tokens[name] = nn.functional.pad(tokens[name], (0, 0, 0, missing))
                mask[name] = nn.functional.pad(mask[name], (0, missing))
        padded.append(VLAFeature(tokens=tokens, mask=mask, pooled=part.pooled, batch_size=part.batch_size))
    return torch.cat(padded)  # pyright: ignore[reportArgumentType, reportReturnType]


def sharing_key(schema: TenantSchema, kind: str) -> tuple[str, int]:
    """Samples that agree on it may share one backbone pass: same prompt and images, as many action tokens."""
    return schema.prefix_signature, schema.chunk if kind == "action_tokens" else 0


def check_observation(observation: TensorDict, schema: TenantSchema, instructions: Sequence[str] | None = None) -> None:
    """Refuse a camera set, order or shape that differs from the schema's, naming the cameras.

    Args:
        observation: batch ``[B]``.
        schema: of the tenant.
        instructions: where given, there must be B of them.

    Raises:
        ValueError: a camera is missing, extra, or has the wrong dtype or size; a wrong number of instructions.
    """
    if instructions is not None and observation.batch_size and observation.batch_size[0] != len(instructions):
        raise ValueError(f"{observation.batch_size[0]} observations but {len(instructions)} instructions")
    images = observation.get("image", None)
    given = tuple(images.keys()) if images is not None else ()
    if set(given) != set(schema.cameras):
        raise ValueError(f"camera mismatch: schema has {list(schema.cameras)}, observation has {list(given)}")
    for camera in schema.cameras:
        image = observation["image", camera]
        size = (3, schema.image_size, schema.image_size)
        if image.dtype != torch.uint8 or tuple(image.shape[-3:]) != size:
            raise ValueError(
                f"camera {camera!r}: expected uint8 {list(size)}, got {image.dtype} {list(image.shape[-3:])}; "
                "nexus_lightning.images.fit_observation makes it so"
            )
