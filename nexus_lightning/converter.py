"""A dataset's actions and images as its tenant's schema wants them."""

from __future__ import annotations

from torch import Tensor

from nexus_lightning.conventions import (
    ACTION_CONVENTIONS,
    GRIPPERS,
    ORIENTATIONS,
    ROTATION_DIMS,
    DatasetConventions,
    PoseLayout,
    convert_image,
    convert_pose,
    gripper_to_internal,
)
from nexus_lightning.schema import TenantSchema


class DatasetConverter:
    """Dataset -> schema: actions to the internal convention, images to the schema's orientation.

    Example:
        >>> import torch
        >>> from nexus_lightning.schema import TenantSchema
        >>> schema = TenantSchema(state_dim=4, action_dim=7, chunk=2, execute=2, gripper="close_positive")
        >>> converter = DatasetConverter(schema, DatasetConventions(gripper="open_one"))
        >>> converter.actions(torch.tensor([0.0, 0, 0, 0, 0, 0, 1.0]))[-1]  # open
        tensor(1.)
    """

    def __init__(self, schema: TenantSchema, conventions: DatasetConventions) -> None:
        self.schema, self.conventions = schema, conventions
        self.action_convention = conventions.action_convention or schema.action_convention
        self.rotation = conventions.rotation or schema.rotation
        self.gripper = conventions.gripper or schema.gripper
        self.image_orientation = conventions.image_orientation or schema.image_orientation

    @property
    def needs_states(self) -> bool:
        """Whether :meth:`actions` needs the state of each action's step."""
        return self.action_convention != self.schema.action_convention

    @property
    def changes_pose(self) -> bool:
        """Whether more than the gripper is converted: statistics must then be computed from converted actions."""
        return self.needs_states or self.rotation != self.schema.rotation

    @property
    def action_dim(self) -> int:
        """Length of the dataset's actions."""
        return self.schema.action_dim + ROTATION_DIMS[self.rotation] - ROTATION_DIMS[self.schema.rotation]

    @property
    def layout(self) -> PoseLayout:
        schema, conventions = self.schema, self.conventions
        joints = schema.action_dim - (schema.gripper != "none")
        return PoseLayout(
            position_dims=joints if schema.rotation == "none" else schema.rotation_index,
            rotation=self.rotation,
            state_position=conventions.state_position_index or 0,
            state_rotation=conventions.state_rotation or "none",
            state_rotation_index=conventions.state_rotation_index or 0,
            translation_scale=conventions.translation_scale,
            rotation_scale=conventions.rotation_scale,
        )

    def actions(self, actions: Tensor, states: Tensor | None = None) -> Tensor:
        """Dataset actions ``[..., action_dim]`` -> internal ``[..., schema.action_dim]``.

        Args:
            states: raw states ``[..., S]`` of the same steps, when :attr:`needs_states`.
        """
        schema = self.schema
        if self.changes_pose:
            actions = convert_pose(
                actions, states, self.layout, self.action_convention, schema.action_convention, schema.rotation
            )
        return gripper_to_internal(actions, self.gripper, schema.gripper_index)

    def images(self, images: Tensor) -> Tensor:
        """Dataset images ``[..., H, W]`` -> the schema's orientation."""
        return convert_image(images, self.image_orientation, self.schema.image_orientation)

    def check_absolute(self, actions: Tensor, states: Tensor) -> None:
        """Refuses to subtract the state from actions that do not follow it.

        An absolute target stays near the state, so ``action - state`` varies less than the state; for a delta the two
        are about independent, and it varies more.

        Args:
            actions: ``[N, action_dim]`` of the dataset.
            states: ``[N, S]`` of the same steps.

        Raises:
            ValueError: the actions look like deltas.
        """
        if not (self.needs_states and self.action_convention == "absolute" and len(actions) > 1):
            return
        layout = self.layout
        dims = layout.position_dims
        state = states[:, layout.state_position : layout.state_position + dims].double()
        moved, around = (actions[:, :dims].double() - state).var(0).sum().item(), state.var(0).sum().item()
        if moved > around:
            raise ValueError(
                f"dataset.conventions.action_convention='absolute': action - state varies more ({moved:.3g}) than the "
                f"state itself ({around:.3g}), so the actions do not follow the state: they look like deltas already, "
                f"or state_position_index={layout.state_position} is not their position"
            )

    def problems(self) -> list[str]:
        """What cannot be converted, as ``key=value: fix`` lines under ``dataset.conventions`` (empty when all can)."""
        schema, given = self.schema, self.conventions
        found = []
        for key, choices in (
            ("action_convention", ACTION_CONVENTIONS),
            ("rotation", ROTATION_DIMS),
            ("gripper", GRIPPERS),
            ("image_orientation", ORIENTATIONS),
            ("state_rotation", ROTATION_DIMS),
        ):
            value = getattr(given, key)
            if value is not None and value not in choices:
                found.append(f"{key}={value!r}: choose one of {', '.join(choices)}")
        if found:
            return found
        for key in ("rotation", "gripper"):
            if (getattr(self, key) == "none") != (getattr(schema, key) == "none"):
                found.append(
                    f"{key}={getattr(self, key)!r}: schema.{key}={getattr(schema, key)!r}; one side cannot be made up"
                )
        for key in ("translation_scale", "rotation_scale"):
            if not getattr(given, key) > 0:
                found.append(f"{key}={getattr(given, key)}: must be positive")
        if not self.needs_states:
            for key in ("state_position_index", "state_rotation_index", "state_rotation"):
                if getattr(given, key) is not None:
                    found.append(
                        f"{key}={getattr(given, key)!r}: the actions are {self.action_convention} already, as in the "
                        "schema; remove it, or set action_convention to what the dataset holds"
                    )
            return found
        if (
            schema.rotation == "none"
            and schema.gripper != "none"
            and schema.gripper_index % schema.action_dim != (schema.action_dim - 1)
        ):
            found.append("action_convention: without a rotation, the gripper must be the last dim to be left out")
        dims = {"state_position_index": self.layout.position_dims}
        if schema.rotation != "none":
            if given.state_rotation in (None, "none"):
                found.append(f"state_rotation={given.state_rotation!r}: name the state's rotation representation")
                return found
            dims["state_rotation_index"] = ROTATION_DIMS[given.state_rotation]
        for key, width in dims.items():
            index = getattr(given, key)
            if index is None or index < 0 or index + width > schema.state_dim:
                found.append(
                    f"{key}={index}: {self.action_convention} -> {schema.action_convention} needs {width} dims of the "
                    f"state from there on; schema.state_dim={schema.state_dim}"
                )
        return found
