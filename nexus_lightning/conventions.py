"""Converters between the conventions of datasets, simulators and the system: gripper, rotation, delta, image.

One convention per quantity is *internal*: the gripper is +1 open, -1 closed; everything else is as the tenant's
:class:`~nexus_lightning.schema.TenantSchema` says. A dataset may differ from the schema (:class:`DatasetConventions`);
:class:`~nexus_lightning.converter.DatasetConverter` brings its actions and images over.

Layout of an action that the converters know (A = ``action_dim``)::

    | position (or joints): rotation_index dims | rotation: 3, 4 or 6 dims | rest |     gripper at gripper_index
    | joints: all but a last gripper dim                            | gripper      |     rotation: none

All functions are batched torch, any leading dims; rotations are computed in float64 and returned in the input's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

#: Native gripper value -> internal: ``scale * value + offset``. ``*_positive`` lie in [-1, 1], ``*_one`` in [0, 1].
GRIPPERS = {
    "open_positive": (1.0, 0.0),
    "close_positive": (-1.0, 0.0),
    "open_one": (2.0, -1.0),
    "close_one": (-2.0, 1.0),
    "none": (1.0, 0.0),
}
#: Rotation representation -> its dims in an action.
ROTATION_DIMS = {
    "axis_angle": 3,
    "euler_xyz": 3,
    "quaternion_wxyz": 4,
    "quaternion_xyzw": 4,
    "rotation_6d": 6,
    "none": 0,
}
#: Image orientation -> axes of ``[..., H, W]`` to flip from upright, and back.
ORIENTATIONS = {"upright": (), "rotated_180": (-2, -1), "flipped_vertical": (-2,)}
ACTION_CONVENTIONS = ("delta", "absolute")
#: Representations whose numbers are radians, so that a delta action may be in units of ``rotation_scale``.
_RADIANS = ("axis_angle", "euler_xyz")


# ---- gripper and images ----------------------------------------------------------------------------------------------


def gripper_to_internal(action: Tensor, gripper: str, index: int) -> Tensor:
    """Action ``[..., A]`` with a native gripper dim -> +1 opens, -1 closes. The input is not changed.

    Example:
        >>> gripper_to_internal(torch.tensor([0.3, 1.0]), "close_one", -1)
        tensor([ 0.3000, -1.0000])
    """
    scale, offset = GRIPPERS[gripper]
    return _affine_dim(action, index, scale, offset)


def gripper_to_native(action: Tensor, gripper: str, index: int) -> Tensor:
    """Inverse of :func:`gripper_to_internal`."""
    scale, offset = GRIPPERS[gripper]
    return _affine_dim(action, index, 1 / scale, -offset / scale)


def _affine_dim(action: Tensor, index: int, scale: float, offset: float) -> Tensor:
    if (scale, offset) == (1.0, 0.0):
        return action
    action = action.clone()
    action[..., index] = action[..., index] * scale + offset
    return action


def convert_image(images: Tensor, source: str, target: str) -> Tensor:
    """Images ``[..., H, W]`` of any dtype from one orientation to another.

    Example:
        >>> convert_image(torch.tensor([[1, 2], [3, 4]]), "upright", "rotated_180")
        tensor([[4, 3],
                [2, 1]])
    """
    # Flips commute and undo themselves: an axis that both orientations flip stays.
    axes = set(ORIENTATIONS[source]) ^ set(ORIENTATIONS[target])
    return images.flip(sorted(axes)) if axes else images


# ---- rotations -------------------------------------------------------------------------------------------------------


def rotation_to_matrix(rotation: Tensor, representation: str) -> Tensor:
    """Rotation ``[..., ROTATION_DIMS[representation]]`` -> float64 matrix ``[..., 3, 3]`` (acts on column vectors).

    * ``axis_angle``: rotation vector, radians.
    * ``euler_xyz``: radians about the fixed axes x, then y, then z: ``R = Rz Ry Rx`` (roll, pitch, yaw; the lower-case
      ``"xyz"`` of scipy, ``sxyz`` of transforms3d).
    * ``quaternion_wxyz`` / ``quaternion_xyzw``: any length but zero; q and -q are the same rotation.
    * ``rotation_6d``: first two columns of the matrix, one after the other, made orthonormal (Zhou et al. 2019,
      "On the Continuity of Rotation Representations in Neural Networks", eq. 15).
    """
    rotation = rotation.double()
    if representation == "rotation_6d":
        first = normalize(rotation[..., :3], dim=-1)
        second = rotation[..., 3:]
        second = normalize(second - (first * second).sum(-1, keepdim=True) * first, dim=-1)
        return torch.stack((first, second, torch.linalg.cross(first, second)), -1)
    if representation == "euler_xyz":
        x, y, z = (_about(axis, rotation[..., axis]) for axis in range(3))
        return z @ y @ x
    if representation == "axis_angle":
        angle = rotation.norm(dim=-1, keepdim=True)
        # sin(a/2)/a without dividing by a = 0; torch.sinc(x) is sin(pi x)/(pi x)
        quaternion = torch.cat((torch.cos(angle / 2), rotation * torch.sinc(angle / (2 * torch.pi)) / 2), -1)
    elif representation == "quaternion_wxyz":
        quaternion = rotation
    elif representation == "quaternion_xyzw":
        quaternion = rotation.roll(1, -1)
    else:
        raise _unknown_rotation(representation)
    w, x, y, z = normalize(quaternion, dim=-1).unbind(-1)
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def matrix_to_rotation(matrix: Tensor, representation: str) -> Tensor:
    """Inverse of :func:`rotation_to_matrix`: ``[..., 3, 3]`` -> ``[..., ROTATION_DIMS[representation]]``.

    Where several numbers mean one rotation: quaternions have w >= 0, axis-angle an angle in [0, pi], Euler angles a
    pitch in [-pi/2, pi/2] and, when the pitch is +-pi/2, yaw 0.
    """
    if representation == "rotation_6d":
        return matrix[..., :2].mT.flatten(-2)
    if representation == "euler_xyz":
        cosine = torch.hypot(matrix[..., 2, 1], matrix[..., 2, 2])
        locked = cosine < 1e-9
        pitch = torch.atan2(-matrix[..., 2, 0], cosine)
        roll = torch.where(
            locked,
            torch.atan2(-matrix[..., 1, 2], matrix[..., 1, 1]),
            torch.atan2(matrix[..., 2, 1], matrix[..., 2, 2]),
        )
        yaw = torch.where(locked, 0.0, torch.atan2(matrix[..., 1, 0], matrix[..., 0, 0]))
        return torch.stack((roll, pitch, yaw), -1)
    quaternion = _matrix_to_quaternion(matrix)
    if representation == "quaternion_wxyz":
        return quaternion
    if representation == "quaternion_xyzw":
        return quaternion.roll(-1, -1)
    if representation == "axis_angle":
        vector = quaternion[..., 1:]
        sine = vector.norm(dim=-1, keepdim=True)
        angle = 2 * torch.atan2(sine, quaternion[..., :1])
        return torch.where(sine > 1e-12, vector * angle / sine.clamp(min=1e-12), 2 * vector)
    raise _unknown_rotation(representation)


def convert_rotation(rotation: Tensor, source: str, target: str) -> Tensor:
    """``[..., dims of source]`` -> ``[..., dims of target]``, same dtype; equal representations come back unchanged.

    Example:
        >>> convert_rotation(torch.tensor([0.0, 0.0, torch.pi / 3]), "axis_angle", "quaternion_xyzw")
        tensor([0.0000, 0.0000, 0.5000, 0.8660])
    """
    if source == target:
        return rotation
    return matrix_to_rotation(rotation_to_matrix(rotation, source), target).to(rotation.dtype)


def _about(axis: int, angle: Tensor) -> Tensor:
    """Rotation by ``angle`` ``[...]`` about a coordinate axis, ``[..., 3, 3]``."""
    vector = torch.zeros(*angle.shape, 3, dtype=angle.dtype, device=angle.device)
    vector[..., axis] = angle
    return rotation_to_matrix(vector, "axis_angle")


def _matrix_to_quaternion(matrix: Tensor) -> Tensor:
    """``[..., 3, 3]`` -> unit quaternion (w, x, y, z), w >= 0.

    Every row of the symmetric matrix ``4 q q^T``, whose entries are sums of the rotation's entries, is a multiple of q;
    the row with the largest diagonal entry is the one without cancellation (Shepperd 1978).
    """
    m = matrix
    xx, yy, zz = m[..., 0, 0], m[..., 1, 1], m[..., 2, 2]
    wx, wy, wz = m[..., 2, 1] - m[..., 1, 2], m[..., 0, 2] - m[..., 2, 0], m[..., 1, 0] - m[..., 0, 1]
    xy, xz, yz = m[..., 0, 1] + m[..., 1, 0], m[..., 0, 2] + m[..., 2, 0], m[..., 1, 2] + m[..., 2, 1]
    rows = (
        (1 + xx + yy + zz, wx, wy, wz),
        (wx, 1 + xx - yy - zz, xy, xz),
        (wy, xy, 1 - xx + yy - zz, yz),
        (wz, xz, yz, 1 - xx - yy + zz),
    )
    outer = torch.stack([torch.stack(row, -1) for row in rows], -2)
    best = outer.diagonal(dim1=-2, dim2=-1).argmax(-1)
    row = outer.gather(-2, best[..., None, None].expand(*best.shape, 1, 4)).squeeze(-2)
    quaternion = normalize(row, dim=-1)
    return torch.where(quaternion[..., :1] < 0, -quaternion, quaternion)


def _unknown_rotation(representation: str) -> ValueError:
    choices = ", ".join(name for name, dims in ROTATION_DIMS.items() if dims)
    return ValueError(f"rotation={representation!r}: no rotation to convert; choose one of {choices}")


# ---- absolute <-> delta ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PoseLayout:
    """Where position and rotation lie in actions and states, and what one unit of a delta action is.

    Attributes:
        position_dims: leading action dims that add up: 3 of a hand's position, or all joints.
        rotation: representation of the action's rotation, which follows the position; ``none`` without one.
        state_position: index of the position in the state.
        state_rotation: representation of the rotation in the state.
        state_rotation_index: its index in the state.
        translation_scale: metres (radians of a joint) per 1.0 of a delta action.
        rotation_scale: radians per 1.0 of a delta action; only for ``axis_angle`` and ``euler_xyz``.
    """

    position_dims: int
    rotation: str = "none"
    state_position: int = 0
    state_rotation: str = "none"
    state_rotation_index: int = 0
    translation_scale: float = 1.0
    rotation_scale: float = 1.0

    def unit(self, rotation: str, convention: str) -> float:
        """Radians per 1.0 of a rotation in this representation and convention."""
        return self.rotation_scale if convention == "delta" and rotation in _RADIANS else 1.0


def convert_pose(
    actions: Tensor, states: Tensor | None, layout: PoseLayout, source: str, target: str, rotation: str
) -> Tensor:
    """Actions ``[..., A]`` in ``layout.rotation`` and convention ``source`` -> ``rotation`` and convention ``target``.

    A delta is taken from the state *at the same step*, in the base frame: ``position = state + delta * scale`` and
    ``R = R_delta R_state`` (robosuite's OSC_POSE). Dims behind position and rotation pass unchanged.

    Args:
        actions: any leading dims.
        states: raw states ``[..., S]`` with the same leading dims; needed when ``source`` and ``target`` differ.

    Returns:
        ``[..., A + ROTATION_DIMS[rotation] - ROTATION_DIMS[layout.rotation]]``, the dtype of ``actions``.
    """
    width = ROTATION_DIMS[layout.rotation]
    head = actions[..., : layout.position_dims].double()
    block = actions[..., layout.position_dims : layout.position_dims + width]
    tail = actions[..., layout.position_dims + width :]
    matrix = None
    if width:
        matrix = rotation_to_matrix(block.double() * layout.unit(layout.rotation, source), layout.rotation)
    if source != target:
        assert states is not None, "delta and absolute differ by the state"
        start = layout.state_position
        position = states[..., start : start + layout.position_dims].double()
        if target == "delta":
            head = (head - position) / layout.translation_scale
        else:
            head = position + head * layout.translation_scale
        if matrix is not None:
            start = layout.state_rotation_index
            now = states[..., start : start + ROTATION_DIMS[layout.state_rotation]]
            now = rotation_to_matrix(now, layout.state_rotation)
            matrix = matrix @ (now.mT if target == "delta" else now)
    parts = [head]
    if matrix is not None:
        parts.append(matrix_to_rotation(matrix, rotation) / layout.unit(rotation, target))
    return torch.cat([*(part.to(actions.dtype) for part in parts), tail], -1)


def absolute_to_delta(actions: Tensor, states: Tensor, layout: PoseLayout, convention: str) -> Tensor:
    """Absolute actions ``[..., A]`` -> deltas from the state at the same step, see :func:`convert_pose`.

    Args:
        convention: what ``actions`` are now; the caller must know.

    Raises:
        ValueError: they are deltas already (a second transform would subtract the state twice).
    """
    _refuse_twice(convention, "delta")
    return convert_pose(actions, states, layout, "absolute", "delta", layout.rotation)


def delta_to_absolute(actions: Tensor, states: Tensor, layout: PoseLayout, convention: str) -> Tensor:
    """Inverse of :func:`absolute_to_delta`.

    Raises:
        ValueError: the actions are absolute already.
    """
    _refuse_twice(convention, "absolute")
    return convert_pose(actions, states, layout, "delta", "absolute", layout.rotation)


def _refuse_twice(convention: str, target: str) -> None:
    if convention not in ACTION_CONVENTIONS:
        raise ValueError(f"action_convention={convention!r}: choose one of {', '.join(ACTION_CONVENTIONS)}")
    if convention == target:
        raise ValueError(f"action_convention={convention!r}: the actions are {target} already; do not convert them")


# ---- datasets --------------------------------------------------------------------------------------------------------


@dataclass
class DatasetConventions:
    """Where a dataset differs from its tenant's schema (``dataset.conventions``); null: as in the schema.

    The last six say how to get from absolute to delta actions or back: where the pose lies in ``observation.state``
    and what 1.0 of a delta action is.
    """

    action_convention: str | None = None  # delta | absolute
    rotation: str | None = None  # see TenantSchema.rotation; action dims may differ then
    gripper: str | None = None  # see TenantSchema.gripper
    image_orientation: str | None = None  # see TenantSchema.image_orientation
    state_position_index: int | None = None  # of the position (or the joints) in observation.state
    state_rotation_index: int | None = None  # of the rotation in observation.state
    state_rotation: str | None = None  # its representation
    translation_scale: float = 1.0  # metres (radians of a joint) per 1.0 of a delta action; LIBERO 0.05, ManiSkill 0.1
    rotation_scale: float = 1.0  # radians per 1.0 of a delta action; LIBERO 0.5
