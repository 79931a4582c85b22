"""What a tenant's robot looks like to the system: cameras, state, actions, conventions and their hashes.

Internal action convention (every head sees this one): actions normalised by the tenant's :class:`Normalizer`;
the gripper dimension is **+1 opens, -1 closes**. A simulator that uses another sign or range says so in
``TenantSchema.gripper`` and :meth:`TenantSchema.to_internal` / :meth:`TenantSchema.to_native` convert. A dataset that
differs from its tenant's schema says so in ``dataset.conventions``, see :mod:`nexus_lightning.conventions`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Literal

import torch
from torch import Tensor, nn

from nexus_lightning.conventions import (
    ACTION_CONVENTIONS,
    GRIPPERS,
    ORIENTATIONS,
    ROTATION_DIMS,
    gripper_to_internal,
    gripper_to_native,
)
from nexus_lightning.images import FITS

#: Normalisation mode -> the statistics it needs.
MODE_STATISTICS = {
    "identity": (),
    "mean_std": ("mean", "std"),
    "min_max": ("min", "max"),
    "quantile": ("q01", "q99"),
    "quantile10": ("q10", "q90"),
}
NORMALIZATION_MODES = tuple(MODE_STATISTICS)
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
        image_size: side of the square that the policy sees, uint8 ``[3, image_size, image_size]``; cameras may be of
            any size.
        image_fit: how an image gets there: ``pad`` (whole, black above or to the left), ``crop`` (its middle) or
            ``stretch``; see :mod:`nexus_lightning.images`.
        image_orientation: what the backbone sees and the simulator gives: ``upright``, ``rotated_180`` (the convention
            of LIBERO's published datasets) or ``flipped_vertical`` (what OpenGL renders, row 0 at the bottom).
        state_dim: length of the proprioceptive (or privileged) state vector, float32; 0: the policy reads none.
        action_dim: length of one action, float32.
        chunk: actions predicted from one observation (T).
        execute: actions of a chunk carried out before the next observation, ``1 <= execute <= chunk``.
        control_hz: control rate in Hz.
        action_convention: ``delta`` or ``absolute``.
        rotation: rotation representation of the action: ``axis_angle``, ``euler_xyz``, ``quaternion_wxyz``,
            ``quaternion_xyzw``, ``rotation_6d`` or ``none``; see
            :func:`~nexus_lightning.conventions.rotation_to_matrix`.
        rotation_index: index of its first dim in the action; the position is before it.
        gripper: native gripper command of the simulator (and of the dataset unless it says otherwise):
            ``open_positive`` / ``close_positive`` in [-1, 1], ``open_one`` (1 = open, 0 = closed) / ``close_one`` in
            [0, 1], or ``none`` when there is no gripper.
        gripper_index: index of the gripper in the action vector.
        prompt: what the backbone is told; ``{instruction}`` is replaced by the sample's instruction.
        state_normalization / action_normalization: one of ``identity``, ``mean_std``, ``min_max``, ``quantile``,
            ``quantile10``; see :class:`Normalizer`.
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
    image_fit: Literal["pad", "crop", "stretch"] = "pad"
    image_orientation: Literal["upright", "rotated_180", "flipped_vertical"] = "upright"
    control_hz: float = 20.0
    action_convention: Literal["delta", "absolute"] = "delta"
    rotation: str = "axis_angle"
    rotation_index: int = 3
    gripper: Literal["open_positive", "close_positive", "open_one", "close_one", "none"] = "open_positive"
    gripper_index: int = -1
    prompt: str = "{instruction}"
    state_normalization: str = "mean_std"
    action_normalization: str = "identity"
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
        if self.state_dim < 0:
            found.append(f"state_dim={self.state_dim}: must be at least 0, which is a policy without a state")
        for key in ("action_dim", "chunk", "execute"):
            if getattr(self, key) < 1:
                found.append(f"{key}={getattr(self, key)}: must be at least 1")
        if not 0 < self.control_hz < float("inf"):
            found.append(f"control_hz={self.control_hz}: must be positive")
        if self.execute > self.chunk:
            found.append(f"execute={self.execute}: must not exceed chunk={self.chunk}")
        if len(set(self.cameras)) != len(self.cameras):
            found.append(f"cameras={list(self.cameras)}: a camera is listed twice")
        if any(not c.isidentifier() for c in self.cameras):
            found.append(f"cameras={list(self.cameras)}: use names made of letters, digits and underscores")
        if self.cameras and self.image_size < 16:
            found.append(f"image_size={self.image_size}: must be at least 16 pixels")
        for key, choices in (
            ("image_fit", FITS),
            ("image_orientation", ORIENTATIONS),
            ("action_convention", ACTION_CONVENTIONS),
            ("rotation", ROTATION_DIMS),
            ("gripper", GRIPPERS),
            ("state_normalization", NORMALIZATION_MODES),
            ("action_normalization", NORMALIZATION_MODES),
        ):
            if getattr(self, key) not in choices:
                found.append(f"{key}={getattr(self, key)!r}: choose one of {', '.join(choices)}")
        found += self._action_layout_problems()
        if self.prompt.count("{instruction}") != 1:
            found.append(f"prompt={self.prompt!r}: must hold {{instruction}} once")
        for key, dim in (("state_names", self.state_dim), ("action_names", self.action_dim)):
            if getattr(self, key) and len(getattr(self, key)) != dim:
                found.append(f"{key}: {len(getattr(self, key))} names for {dim} dims")
        return found

    def _action_layout_problems(self) -> list[str]:
        found = []
        rotation = range(self.rotation_index, self.rotation_index + ROTATION_DIMS.get(self.rotation, 0))
        if len(rotation) and (rotation.start < 0 or rotation.stop > self.action_dim):
            found.append(
                f"rotation={self.rotation!r}: takes action dims {rotation.start} to {rotation.stop - 1}, but "
                f"action_dim={self.action_dim}; set rotation: none for actions without a rotation, or rotation_index"
            )
        if self.gripper != "none":
            if not -self.action_dim <= self.gripper_index < self.action_dim:
                found.append(f"gripper_index={self.gripper_index}: there is no such dim, action_dim={self.action_dim}")
            elif self.gripper_index % self.action_dim in rotation:
                found.append(
                    f"gripper_index={self.gripper_index}: lies inside the rotation (dims {rotation.start} to "
                    f"{rotation.stop - 1}); set rotation, rotation_index or gripper"
                )
        return found

    def differences(self, other: TenantSchema) -> list[str]:
        """Fields in which ``other`` differs, as ``name: mine != theirs`` (empty when the signatures are equal).

        Example:
            >>> a = TenantSchema(state_dim=4, action_dim=7, chunk=3, execute=3, cameras=("primary", "wrist"))
            >>> a.differences(TenantSchema(state_dim=4, action_dim=7, chunk=3, execute=3, cameras=("primary",)))
            ["cameras: ['primary', 'wrist'] != ['primary']"]
        """

        def shown(value: object) -> object:
            return list(value) if isinstance(value, tuple) else value

        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return [f"{name}: {shown(mine)!r} != {shown(theirs)!r}" for name, mine, theirs in pairs if mine != theirs]

    @property
    def signature(self) -> str:
        """sha256 over every field: two tenants with one signature can share data and payloads."""
        values = asdict(self)
        if self.image_fit == "pad":  # what was stored before there was a choice keeps its name
            del values["image_fit"]
        return _hash(values)

    @property
    def prefix_signature(self) -> str:
        """sha256 over what the backbone sees: requests that agree on it may share one backbone pass."""
        seen = {
            "cameras": self.cameras,
            "image_size": self.image_size,
            "orientation": self.image_orientation,
            "prompt": self.prompt,
        }
        return _hash(seen if self.image_fit == "pad" else {**seen, "image_fit": self.image_fit})

    def instruct(self, instruction: str) -> str:
        """The text that the backbone gets for one instruction."""
        return self.prompt.replace("{instruction}", instruction)

    def to_internal(self, action: Tensor) -> Tensor:
        """Native action ``[..., action_dim]`` of the simulator -> internal convention (+1 opens)."""
        return gripper_to_internal(action, self.gripper, self.gripper_index)

    def to_native(self, action: Tensor) -> Tensor:
        """Internal action ``[..., action_dim]`` -> the simulator's convention."""
        return gripper_to_native(action, self.gripper, self.gripper_index)


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=list).encode()).hexdigest()


@dataclass
class NormalizationStats:
    """Per-dim statistics of one vector quantity (all ``[D]`` float32).

    Quantiles are None where nobody computed them; the modes that need them then refuse.
    """

    mean: Tensor
    std: Tensor
    min: Tensor
    max: Tensor
    q01: Tensor | None = None
    q99: Tensor | None = None
    q10: Tensor | None = None
    q90: Tensor | None = None

    @classmethod
    def identity(cls, dim: int) -> NormalizationStats:
        """Statistics that every mode turns into the identity."""
        low, high = -torch.ones(dim), torch.ones(dim)
        return cls(torch.zeros(dim), torch.ones(dim), low, high, low, high, low, high)

    @classmethod
    def of(cls, values: Tensor) -> NormalizationStats:
        """Statistics over the rows of ``values`` ``[N, D]``."""
        values = values.float()
        std = values.std(0, unbiased=False) if len(values) > 1 else torch.ones(values.shape[1])
        # Column by column: torch.quantile takes 16 M elements at most.
        levels = torch.tensor([0.01, 0.99, 0.1, 0.9])
        columns = [torch.quantile(column, levels) for column in values.unbind(1)]
        quantiles = torch.stack(columns, 1) if columns else torch.zeros(4, 0)
        return cls(values.mean(0), std, values.amin(0), values.amax(0), *quantiles)

    def mapped(self, affine: Callable[[Tensor], Tensor]) -> NormalizationStats:
        """Statistics after a per-dim affine map such as :meth:`TenantSchema.to_internal`.

        A dim whose sign turns swaps its ends: the new minimum is the map of the old maximum, and so for quantiles.
        """
        zero = torch.zeros_like(self.mean)
        slope = (affine(zero + 1) - affine(zero)).abs()
        ends: list[Tensor | None] = []
        for low, high in ((self.min, self.max), (self.q01, self.q99), (self.q10, self.q90)):
            if low is None or high is None:
                ends += [None, None]
            else:
                ends += [torch.minimum(affine(low), affine(high)), torch.maximum(affine(low), affine(high))]
        return NormalizationStats(affine(self.mean), self.std * slope, *ends)  # type: ignore[arg-type]


class Normalizer(nn.Module):
    """State and action normalisation of one tenant; part of its payload (mode and statistics).

    ============== ===================================== ==================
    mode           normalised                            LeRobot's name
    ============== ===================================== ==================
    ``identity``   unchanged                             ``IDENTITY``
    ``mean_std``   ``(x - mean) / std``                  ``MEAN_STD``
    ``min_max``    ``[min, max]`` to [-1, 1]             ``MIN_MAX``
    ``quantile``   ``[q01, q99]`` to [-1, 1]             ``QUANTILES``
    ``quantile10`` ``[q10, q90]`` to [-1, 1]             ``QUANTILE10``
    ============== ===================================== ==================

    Equal to LeRobot's ``NormalizerProcessorStep`` / ``UnnormalizerProcessorStep`` up to float32 rounding, but for two
    safeguards. Standard deviation and half range are at least ``SCALE_FLOOR``: a constant dim, or one with equal
    quantiles, maps its value to 0 and 0 back to its value (LeRobot divides by 1e-8 there: any other value explodes).
    Normalised *states* are clamped to +-``NORMALIZED_LIMIT``; actions, and states under ``identity``, are not.

    Statistics are of the *internal* action convention (after :meth:`TenantSchema.to_internal`). The hot path is one
    multiply-add, so the buffers hold offset and scale; :mod:`nexus_lightning.processors` writes and reads LeRobot's
    own files.

    Raises:
        ValueError: unknown mode, statistics without what the mode needs, or of another length than the schema says.
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
            key = f"schema.{name}_normalization={self.modes[name]!r}"
            offset, scale = _affine(key, self.modes[name], stats or NormalizationStats.identity(dim))
            if offset.shape != (dim,):
                raise ValueError(f"{key}: statistics of {list(offset.shape)} dims, but schema.{name}_dim={dim}")
            self.register_buffer(f"{name}_offset", offset)
            self.register_buffer(f"{name}_scale", scale)

    def normalize_state(self, state: Tensor) -> Tensor:
        """``[..., state_dim]`` -> normalised and clamped (``identity``: unchanged), same shape."""
        if self.modes["state"] == "identity":  # degrees or millimetres must not be cut off at 10
            return state
        return ((state - self.state_offset) / self.state_scale).clamp(-NORMALIZED_LIMIT, NORMALIZED_LIMIT)

    def normalize_action(self, action: Tensor) -> Tensor:
        """Internal action ``[..., action_dim]`` -> what the head predicts."""
        return (action - self.action_offset) / self.action_scale

    def unnormalize_action(self, action: Tensor) -> Tensor:
        """Head output ``[..., action_dim]`` -> internal action."""
        return action * self.action_scale + self.action_offset


def _affine(key: str, mode: str, stats: NormalizationStats) -> tuple[Tensor, Tensor]:
    """(offset, scale) of a mode: ``normalised = (x - offset) / scale``."""
    if mode not in MODE_STATISTICS:
        raise ValueError(f"{key}: choose one of {', '.join(NORMALIZATION_MODES)}")
    values = [getattr(stats, name) for name in MODE_STATISTICS[mode]]
    if any(value is None for value in values):
        raise ValueError(f"{key}: needs {' and '.join(MODE_STATISTICS[mode])}, which these statistics do not have")
    if mode == "identity":
        return torch.zeros_like(stats.mean), torch.ones_like(stats.mean)
    if mode == "mean_std":
        mean, std = values
        return mean.clone(), std.clamp(min=SCALE_FLOOR)
    low, high = values
    return (high + low) / 2, ((high - low) / 2).clamp(min=SCALE_FLOOR)
