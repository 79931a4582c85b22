"""What a tenant's robot looks like to the system: cameras, state, actions, conventions and their hashes.

Internal action convention (every head sees this one): actions normalised by the tenant's :class:`Normalizer`;
the gripper dimension is **+1 opens, -1 closes**. A simulator or dataset that uses another sign says so in
``TenantSchema.gripper`` and :meth:`TenantSchema.to_internal` / :meth:`TenantSchema.to_native` convert.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor, nn

NORMALIZATION_MODES = ("identity", "mean_std", "min_max")
#: Floor for a standard deviation or half range: near-constant dims must not explode after normalisation.
SCALE_FLOOR = 2e-2
#: Normalised inputs are clamped to this magnitude.
NORMALIZED_LIMIT = 10.0


@dataclass(frozen=True)
class TenantSchema:
    """Shapes and conventions of one tenant.

    ::

        time  ----o-----------------------o--------->      o = observation (rendered), control_hz steps between
                  |a0 a1 a2 a3 | a4 .. a7 |
                  `- execute=4 -'          predicted: chunk=8 actions, the first ``execute`` are carried out

    Attributes:
        cameras: camera names in the order the backbone sees them (may be empty: language and state only).
        image_size: side of the square uint8 image in pixels, ``[3, image_size, image_size]``.
        image_orientation: ``upright`` or ``rotated_180`` (the convention of LIBERO's published datasets).
        state_dim: length of the proprioceptive (or privileged) state vector, float32.
        action_dim: length of one action, float32.
        chunk: actions predicted from one observation (T).
        execute: actions of a chunk carried out before the next observation, ``1 <= execute <= chunk``.
        control_hz: control rate in Hz.
        action_convention: ``delta`` or ``absolute``.
        rotation: rotation representation of the action: ``axis_angle``, ``none`` ...
        gripper: sign used by this tenant's dataset and simulator; ``none`` when there is no gripper.
        gripper_index: index of the gripper in the action vector.
        state_normalization / action_normalization: one of ``identity``, ``mean_std``, ``min_max``.
        privileged: names of simulator-only quantities inside the state (object poses ...). Empty for honest sensors.
        state_names / action_names: optional names of the dims.

    Example:
        >>> a, b = (TenantSchema(state_dim=4, action_dim=2, chunk=3, execute=3, gripper="none") for _ in range(2))
        >>> len(a.signature), a.signature == b.signature
        (64, True)
    """

    state_dim: int
    action_dim: int
    chunk: int
    execute: int
    cameras: tuple[str, ...] = ()
    image_size: int = 128
    image_orientation: Literal["upright", "rotated_180"] = "upright"
    control_hz: float = 20.0
    action_convention: Literal["delta", "absolute"] = "delta"
    rotation: str = "axis_angle"
    gripper: Literal["open_positive", "close_positive", "none"] = "open_positive"
    gripper_index: int = -1
    state_normalization: Literal["identity", "mean_std", "min_max"] = "mean_std"
    action_normalization: Literal["identity", "mean_std", "min_max"] = "identity"
    privileged: tuple[str, ...] = ()
    state_names: tuple[str, ...] = ()
    action_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("cameras", "privileged", "state_names", "action_names"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "control_hz", float(self.control_hz))  # 20 and 20.0 must hash alike

    def problems(self) -> list[str]:
        """Every reason why this schema cannot work, as ``key: value: fix`` lines (empty when it can)."""
        found = []
        for key in ("state_dim", "action_dim", "chunk", "execute"):
            if getattr(self, key) < 1:
                found.append(f"{key}={getattr(self, key)}: must be at least 1")
        if self.execute > self.chunk:
            found.append(f"execute={self.execute}: must not exceed chunk={self.chunk}")
        if len(set(self.cameras)) != len(self.cameras):
            found.append(f"cameras={list(self.cameras)}: a camera is listed twice")
        if any(not c.isidentifier() for c in self.cameras):
            found.append(f"cameras={list(self.cameras)}: use names made of letters, digits and underscores")
        if self.cameras and self.image_size < 16:
            found.append(f"image_size={self.image_size}: must be at least 16 pixels")
        for key, choices in (
            ("image_orientation", ("upright", "rotated_180")),
            ("action_convention", ("delta", "absolute")),
            ("gripper", ("open_positive", "close_positive", "none")),
            ("state_normalization", NORMALIZATION_MODES),
            ("action_normalization", NORMALIZATION_MODES),
        ):
            if getattr(self, key) not in choices:
                found.append(f"{key}={getattr(self, key)!r}: choose one of {', '.join(choices)}")
        for key, dim in (("state_names", self.state_dim), ("action_names", self.action_dim)):
            if getattr(self, key) and len(getattr(self, key)) != dim:
                found.append(f"{key}: {len(getattr(self, key))} names for {dim} dims")
        return found

    @property
    def signature(self) -> str:
        """sha256 over every field: two tenants with one signature can share data and payloads."""
        return _hash(asdict(self))

    @property
    def prefix_signature(self) -> str:
        """sha256 over what the backbone sees: requests that agree on it may share one backbone pass."""
        return _hash({"cameras": self.cameras, "image_size": self.image_size, "orientation": self.image_orientation})

    def to_internal(self, action: Tensor) -> Tensor:
        """Native action ``[..., action_dim]`` of dataset or simulator -> internal convention (+1 opens)."""
        return self._flip_gripper(action)

    def to_native(self, action: Tensor) -> Tensor:
        """Internal action ``[..., action_dim]`` -> this tenant's dataset / simulator convention."""
        return self._flip_gripper(action)

    def _flip_gripper(self, action: Tensor) -> Tensor:
        if self.gripper != "close_positive":
            return action
        flipped = action.clone()
        flipped[..., self.gripper_index] = -flipped[..., self.gripper_index]
        return flipped


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=list).encode()).hexdigest()


@dataclass
class NormalizationStats:
    """Per-dim statistics of one vector quantity (all ``[D]`` float32)."""

    mean: Tensor
    std: Tensor
    min: Tensor
    max: Tensor

    @classmethod
    def identity(cls, dim: int) -> NormalizationStats:
        return cls(torch.zeros(dim), torch.ones(dim), -torch.ones(dim), torch.ones(dim))

    @classmethod
    def of(cls, values: Tensor) -> NormalizationStats:
        """Statistics over the rows of ``values`` ``[N, D]``."""
        values = values.float()
        std = values.std(0, unbiased=False) if len(values) > 1 else torch.ones(values.shape[1])
        return cls(values.mean(0), std, values.amin(0), values.amax(0))


class Normalizer(nn.Module):
    """State and action normalisation of one tenant; part of its payload (mode and statistics).

    ``mean_std``: ``(x - mean) / max(std, SCALE_FLOOR)``. ``min_max``: to [-1, 1], half range floored likewise, so a
    constant dim maps to 0. ``identity``: unchanged. Normalised states are clamped to +-``NORMALIZED_LIMIT``.
    Statistics are of the *internal* action convention (after :meth:`TenantSchema.to_internal`).
    """

    state_offset: Tensor
    state_scale: Tensor
    action_offset: Tensor
    action_scale: Tensor

    def __init__(
        self,
        schema: TenantSchema,
        state: NormalizationStats | None = None,
        action: NormalizationStats | None = None,
    ) -> None:
        super().__init__()
        self.modes = {"state": schema.state_normalization, "action": schema.action_normalization}
        for name, stats, dim in (("state", state, schema.state_dim), ("action", action, schema.action_dim)):
            offset, scale = _affine(self.modes[name], stats or NormalizationStats.identity(dim))
            self.register_buffer(f"{name}_offset", offset)
            self.register_buffer(f"{name}_scale", scale)

    def normalize_state(self, state: Tensor) -> Tensor:
        """``[..., state_dim]`` -> normalised and clamped, same shape."""
        return ((state - self.state_offset) / self.state_scale).clamp(-NORMALIZED_LIMIT, NORMALIZED_LIMIT)

    def normalize_action(self, action: Tensor) -> Tensor:
        """Internal action ``[..., action_dim]`` -> what the head predicts."""
        return (action - self.action_offset) / self.action_scale

    def unnormalize_action(self, action: Tensor) -> Tensor:
        """Head output ``[..., action_dim]`` -> internal action."""
        return action * self.action_scale + self.action_offset


def _affine(mode: str, stats: NormalizationStats) -> tuple[Tensor, Tensor]:
    if mode == "identity":
        return torch.zeros_like(stats.mean), torch.ones_like(stats.mean)
    if mode == "mean_std":
        return stats.mean.clone(), stats.std.clamp(min=SCALE_FLOOR)
    if mode == "min_max":
        return (stats.max + stats.min) / 2, ((stats.max - stats.min) / 2).clamp(min=SCALE_FLOOR)
    raise ValueError(f"normalization mode {mode!r}: choose one of {', '.join(NORMALIZATION_MODES)}")
