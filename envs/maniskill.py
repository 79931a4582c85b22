"""ManiSkill 3 on the CPU: one PhysX scene per process, rendered by llvmpipe (or any Vulkan device)."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from transforms3d.euler import euler2quat
from transforms3d.quaternions import qmult

from nexus_lightning.simulator import (
    Simulator,
    StepResult,
    Suite,
    as_flag,
    as_number,
    dim_problems,
    privileged_problems,
)

if TYPE_CHECKING:  # its import takes torch along, which a worker does not need
    from nexus_lightning.schema import TenantSchema

#: ManiSkill tasks carry no language: these are our instructions. Other tasks need ``instruction=``.
INSTRUCTIONS = {
    "PushCube-v1": "push the blue cube to the red and white target",
    "PullCube-v1": "pull the blue cube to the red and white target",
    "PickCube-v1": "pick up the red cube and move it to the goal",
    "StackCube-v1": "stack the red cube on the green cube",
    "PlaceSphere-v1": "place the blue sphere into the bin",
    "LiftPegUpright-v1": "lift the peg and stand it upright",
    "PegInsertionSide-v1": "insert the peg into the hole on the side of the box",
    "PokeCube-v1": "poke the cube with the peg",
    "PushT-v1": "push the T onto the target",
    "RollBall-v1": "roll the ball to the target",
}
#: What ``obs="state"`` holds per task that no real robot could read off its sensors: list these as the schema's
#: ``privileged``. The goal position is a command in PickCube, PushCube and PullCube, not a measurement.
PRIVILEGED = {
    "PushCube-v1": ("obj_pose",),
    "PullCube-v1": ("obj_pose",),
    "PickCube-v1": ("is_grasped", "obj_pose", "tcp_to_obj_pos", "obj_to_goal_pos"),
    "StackCube-v1": ("cubeA_pose", "cubeB_pose", "tcp_to_cubeA_pos", "tcp_to_cubeB_pos", "cubeA_to_cubeB_pos"),
    "PlaceSphere-v1": ("is_grasped", "bin_pos", "obj_pose", "tcp_to_obj_pos"),
    "LiftPegUpright-v1": ("obj_pose",),
    "PegInsertionSide-v1": ("peg_pose", "peg_half_size", "box_hole_pose", "box_hole_radius"),
    "PokeCube-v1": (
        "cube_pose",
        "peg_pose",
        "goal_pos",
        "tcp_to_peg_pos",
        "peg_to_cube_pos",
        "cube_to_goal_pos",
        "peghead_to_cube_pos",
    ),
    "RollBall-v1": ("ball_pose", "ball_vel", "tcp_to_ball_pos", "ball_to_goal_pos"),
}
#: Length of the state vector per (task, obs) with the Panda arm.
STATE_DIMS = {
    ("PushCube-v1", "state"): 35,
    ("PushCube-v1", "rgb"): 25,
    ("PullCube-v1", "state"): 35,
    ("PullCube-v1", "rgb"): 28,
    ("PickCube-v1", "state"): 42,
    ("PickCube-v1", "rgb"): 28,
    ("StackCube-v1", "state"): 48,
    ("StackCube-v1", "rgb"): 25,
    ("PlaceSphere-v1", "state"): 39,
    ("PlaceSphere-v1", "rgb"): 25,
    ("LiftPegUpright-v1", "state"): 32,
    ("LiftPegUpright-v1", "rgb"): 25,
    ("PegInsertionSide-v1", "state"): 43,
    ("PegInsertionSide-v1", "rgb"): 25,
    ("PokeCube-v1", "state"): 54,
    ("PokeCube-v1", "rgb"): 25,
    ("RollBall-v1", "state"): 44,
    ("RollBall-v1", "rgb"): 25,
}
#: Length of an action per control mode, with the Panda arm.
ACTION_DIMS = {"pd_ee_delta_pose": 7, "pd_ee_delta_pos": 4, "pd_joint_delta_pos": 8}
#: Control rate of every task here, in Hz.
CONTROL_HZ = 20.0
HAND_CAMERA = "hand_camera"


def inference_mode(method):
    """``torch.inference_mode`` around a method; torch is imported by the first call, not by this module."""

    @functools.wraps(method)
    def wrapped(*args, **kwargs):
        import torch

        with torch.inference_mode():
            return method(*args, **kwargs)

    return wrapped


class ManiSkillSimulator(Simulator):
    """A ManiSkill 3 task with one robot.

    Actions (``pd_ee_delta_pose``, 7-D in [-1, 1]): +-1 moves the hand 0.1 m along x, y, z of the robot's root frame;
    the three rotation components turn *against* their sign (the controller scales by the lower bound, -0.1 rad);
    gripper +1 opens, -1 closes. Other control modes are ManiSkill's; those whose actions are not in [-1, 1]
    (``pd_joint_pos``, ``pd_ee_pose``) are refused.

    State: ``obs="rgb"`` is proprioception ``qpos, qvel, tcp_pose`` plus ``goal_pos`` where ManiSkill shows it to image
    policies; ``"state"`` is ManiSkill's flat state with object poses, see :data:`PRIVILEGED`; ``"rgb+state"`` is the
    flat state with images. Images are upright. In PickCube the goal is hidden in the images and only in ``goal_pos``.

    Episodes: terminated at success (or at ManiSkill's ``fail``), truncated after ``horizon`` steps. Nothing is rendered
    while stepping, only in :meth:`observe` (35 ms per camera on two CPU cores, against 1-4 ms for a step).

    A reset puts everything back where it was, but not all of PhysX: with what was played in this process before, some
    episodes go apart after their first touch. The same episodes in the same order give the same bits. Building the
    scene anew at every reset forgets that as well, for 0.3 s an episode.

    Args:
        task: ManiSkill id, ``PushCube-v1`` ...
        obs: what :meth:`observe` returns.
        cameras: names of the cameras to render, those of the task or ``hand_camera``: the Panda's hand view, added to
            the plain Panda because ManiSkill's own wrist-camera robot renders twice as slowly. Empty for ``state``.
        image_size: pixels.
        control_mode: of ManiSkill.
        reward_mode: ``sparse`` (1 at success, else 0), ``normalized_dense`` ... A dense reward pays for staying alive,
            so with termination at success it teaches a policy *not* to succeed: use it with ``success_bonus``.
        horizon: steps until truncation.
        robot_uids: of ManiSkill; the plain Panda where the task supports it.
        success_bonus: added to the reward of the step that succeeds.
        instruction: overrides :data:`INSTRUCTIONS`.
        video_size: pixels of :meth:`render_frame`.
    """

    gripper = "open_positive"
    requires: ClassVar[dict[str, str]] = {"mani_skill": "maniskill"}
    task_key: ClassVar[str | None] = "task"
    #: Tasks to choose from, of which a policy is measured on those that fit its schema.
    suites: ClassVar[Mapping[str, Suite]] = {
        "maniskill": Suite(tuple(PRIVILEGED), {"instruction": None}, only_fitting=True)
    }
    batched: ClassVar[str | None] = "envs.maniskill_gpu.BatchedManiSkill"

    @classmethod
    def problems(cls, arguments: Mapping[str, Any], schema: TenantSchema) -> list[str]:
        """Dims and privileged names, where the tables above know them (the plain Panda)."""
        task, obs = arguments.get("task"), arguments.get("obs", "state")
        mode, found = arguments.get("control_mode", "pd_ee_delta_pose"), []
        if arguments.get("instruction") is None and task not in INSTRUCTIONS:
            found.append(f"task={task!r} has no instruction here: pass instruction=")
        if arguments.get("robot_uids") not in (None, "panda"):
            return found
        what, kind = f"{task} with obs={obs}", "rgb" if obs == "rgb" else "state"
        dims = {
            "state_dim": (STATE_DIMS.get((str(task), kind)), what),
            "action_dim": (ACTION_DIMS.get(mode), f"control_mode={mode}"),
        }
        shown = () if obs == "rgb" else PRIVILEGED.get(str(task), ())
        return found + dim_problems(schema, dims) + privileged_problems(schema, shown, what)

    def __init__(
        self,
        task: str,
        obs: Literal["state", "rgb", "rgb+state"] = "state",
        cameras: Sequence[str] = (),
        image_size: int = 128,
        control_mode: str = "pd_ee_delta_pose",
        reward_mode: str = "sparse",
        horizon: int = 50,
        robot_uids: str | None = None,
        success_bonus: float = 0.0,
        instruction: str | None = None,
        video_size: int = 256,
    ) -> None:
        self.task, self.obs, self.control_mode = task, obs, control_mode
        self.cameras, self.horizon, self.success_bonus = tuple(cameras), horizon, success_bonus
        self.instruction = instruction_of(task, instruction)
        self.env = open_scene(task, obs, self.cameras, image_size, control_mode, reward_mode, robot_uids, video_size)
        _shorten_ee_control(self.env)

    # Without autograd's bookkeeping a step of many small tensors is a tenth faster.
    @inference_mode
    def reset(self, seed: int) -> None:
        self.env.reset(seed=seed)
        self._steps = 0

    @inference_mode
    def step(self, action: np.ndarray) -> StepResult:
        _, reward, terminated, _, info = self.env.step(action)
        self._steps += 1
        success = as_flag("info['success']", info["success"].item())
        terminated = as_flag("terminated", terminated.item())
        return StepResult(
            as_number("reward", reward.item()) + self.success_bonus * success,
            success,
            terminated,
            not terminated and self._steps >= self.horizon,
        )

    @inference_mode
    def observe(self) -> dict[str, Any]:
        images, state = read_views(self.env, self.obs, self.cameras)
        return {
            "image": {c: image[0] for c, image in images.items()},
            "state": state[0],
            "instruction": self.instruction,
        }

    def render_frame(self) -> np.ndarray:
        return np.asarray(self.env.render_rgb_array())[0].astype(np.uint8)

    def close(self) -> None:
        self.env.close()


def instruction_of(task: str, given: str | None) -> str:
    if given is None and task not in INSTRUCTIONS:
        raise ValueError(f"task={task!r} has no instruction here: pass instruction=")
    return given or INSTRUCTIONS[task]


def open_scene(
    task: str,
    obs: str,
    cameras: tuple[str, ...],
    image_size: int,
    control_mode: str,
    reward_mode: str,
    robot_uids: str | None,
    video_size: int,
    **backend: Any,
) -> Any:
    """ManiSkill's environment of the arguments of :class:`ManiSkillSimulator`, on the CPU unless ``backend`` says else.

    Raises:
        ValueError: arguments that do not go together.
    """
    if obs not in ("state", "rgb", "rgb+state"):
        raise ValueError(f"obs={obs!r}: choose state, rgb or rgb+state")
    if (obs == "state") == bool(cameras):
        raise ValueError(f"obs={obs!r} with cameras={list(cameras)}: name cameras if and only if obs has rgb")
    size = {"width": image_size, "height": image_size, "shader_pack": "minimal"}
    env = _make(
        task,
        cameras,
        robot_uids,
        obs_mode=obs,
        control_mode=control_mode,
        reward_mode=reward_mode,
        sensor_configs=size,
        human_render_camera_configs={**size, "width": video_size, "height": video_size},
        **backend,
    )
    space = env.single_action_space
    if not (np.all(space.low == -1) and np.all(space.high == 1)):
        env.close()
        raise ValueError(f"control_mode={control_mode!r}: its actions are not in [-1, 1]; use a pd_*_delta_* mode")
    return env


def read_views(env: Any, obs: str, cameras: tuple[str, ...]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """What a policy sees, of all scenes: images uint8 ``[N, 3, H, W]`` by camera, state float32 ``[N, S]``."""
    seen = env.observe()
    if obs == "state":
        return {}, to_numpy(seen).astype(np.float32)
    images = {c: np.ascontiguousarray(np.moveaxis(to_numpy(seen["sensor_data"][c]["rgb"]), -1, 1)) for c in cameras}
    if obs == "rgb+state":
        return images, to_numpy(seen["state"]).astype(np.float32)
    parts = [seen["agent"]["qpos"], seen["agent"]["qvel"], seen["extra"]["tcp_pose"]]
    if "goal_pos" in seen["extra"]:
        parts.append(seen["extra"]["goal_pos"])
    return images, np.concatenate([to_numpy(p) for p in parts], axis=-1).astype(np.float32)


def to_numpy(value: Any) -> np.ndarray:
    return value.cpu().numpy()


def _shorten_ee_control(env: Any) -> None:
    """Give the arm's ``pd_ee_delta_*`` controller a direct way to its joint targets.

    ManiSkill composes the target pose in batched torch operations, 4 of the 5-6 ms of a step on a CPU, before it asks
    SAPIEN's kinematic model for the joint angles. For one robot the same composition is a few lines of numpy; the
    question to the kinematic model is unchanged, and a test holds the joint targets to ManiSkill's. Controllers that
    follow a virtual target, or act in another frame, are left as they are.
    """
    import sapien
    import torch
    from mani_skill.agents.controllers import PDEEPosController

    arm = getattr(env.agent.controller, "controllers", {}).get("arm")
    if not isinstance(arm, PDEEPosController) or arm.kinematics.use_gpu_ik or arm.config.interpolate:
        return
    frames = ("root_translation", "root_translation:root_aligned_body_rotation")
    if not arm.config.use_delta or arm.config.use_target or arm.config.frame not in frames:
        return
    robot, link, solver = env.agent.robot._objs[0], arm.ee_link._objs[0], arm.kinematics

    def set_action(action: Any) -> None:
        scaled = np.asarray(arm._preprocess_action(action), dtype=np.float64).reshape(-1)
        turn = euler2quat(*scaled[3:], axes="rxyz") if scaled.size == 6 else np.array([1.0, 0, 0, 0])
        here = robot.pose.inv() * link.entity_pose
        target = sapien.Pose(here.p + scaled[:3], qmult(turn, here.q))
        position = np.asarray(robot.qpos)
        found, success, _ = solver.pmodel.compute_inverse_kinematics(
            solver.end_link_idx,
            target,
            initial_qpos=position[solver.pmodel_active_joint_indices],
            active_qmask=solver.qmask,
            max_iterations=100,
        )
        joints = found[solver.pmodel_controlled_joint_indices] if success else position[arm.active_joint_indices]
        arm._step = 0
        arm._start_qpos = arm.qpos
        arm._target_qpos = torch.as_tensor(joints, dtype=torch.float32)[None]
        arm.set_drive_targets(arm._target_qpos)

    arm.set_action = set_action


def _make(task: str, cameras: tuple[str, ...], robot_uids: str | None, **kwargs: Any) -> Any:
    """ManiSkill's environment with exactly ``cameras`` as sensors. Bypasses ``gym.make``: no wrapper, no registration,
    no question on stdin about assets. One scene on the CPU unless ``num_envs`` and the backends say otherwise."""
    try:
        import mani_skill.envs  # noqa: F401  (registers the tasks)
        import sapien
        from mani_skill.sensors.camera import CameraConfig, parse_camera_configs
        from mani_skill.utils import assets, logging_utils
        from mani_skill.utils.registration import REGISTERED_ENVS
    except ImportError as error:
        raise ImportError("ManiSkill is not installed: pip install 'nexus-lightning[maniskill]'") from error
    logging_utils.logger.setLevel(logging.ERROR)  # it warns at each construction about poses inside its own tasks

    if task not in REGISTERED_ENVS:
        raise ValueError(f"task={task!r}: ManiSkill has no such task; for example {', '.join(INSTRUCTIONS)}")
    spec = REGISTERED_ENVS[task]
    needed = [
        source
        for asset in spec.asset_download_ids or []
        for source in (
            assets.expand_data_group_into_individual_data_source_ids(asset) if asset in assets.DATA_GROUPS else [asset]
        )
    ]
    missing = [source for source in needed if not assets.is_data_source_downloaded(source)]
    if missing:
        lines = "; ".join(f"python -m mani_skill.utils.download_asset {source}" for source in missing[:5])
        raise RuntimeError(f"task={task!r} needs assets that are not here: {lines}")

    class Scene(spec.cls):
        # step and reset call get_obs, which renders every sensor: nothing for them, everything for observe().
        def get_obs(self, info=None, unflattened=False):
            return {}

        def observe(self):
            return super().get_obs()

        def _flatten_raw_obs(self, obs):
            return super()._flatten_raw_obs(obs) if obs else obs

        @property
        def _default_sensor_configs(self):
            available = parse_camera_configs(super()._default_sensor_configs)
            if HAND_CAMERA in cameras and "panda_hand" in self.agent.robot.links_map:
                pose = sapien.Pose([0.0464982, -0.0200011, 0.0360011], [0, 0.70710678, 0, 0.70710678])
                mount = self.agent.robot.links_map["panda_hand"]
                available[HAND_CAMERA] = CameraConfig(HAND_CAMERA, pose, 128, 128, np.pi / 2, 0.01, 100, mount=mount)
            unknown = [c for c in cameras if c not in available]
            if unknown:
                choices = ", ".join(dict.fromkeys([*available, HAND_CAMERA]))
                raise ValueError(f"cameras={list(cameras)}: {task} has no {unknown[0]!r}; choose from {choices}")
            return [available[c] for c in cameras]

    if robot_uids is None and "panda" in spec.cls.SUPPORTED_ROBOTS and "so100" not in task.lower():
        robot_uids = "panda"
    cpu = {"num_envs": 1, "sim_backend": "physx_cpu", "render_backend": "cpu"}
    kwargs = {**cpu, **spec.default_kwargs, **kwargs, **({"robot_uids": robot_uids} if robot_uids else {})}
    if kwargs["num_envs"] > 1 and "reconfiguration_freq" in inspect.signature(spec.cls.__init__).parameters:
        raise ValueError(
            f"task={task!r}: its objects differ from episode to episode and are drawn when a scene is built, so in a "
            "batch a seed would not decide the episode; use one process per simulator (environment.batched=false)"
        )
    try:
        return Scene(**kwargs)
    except RuntimeError as error:
        if any(word in str(error).lower() for word in ("vk::", "vulkan", "render")):
            raise RuntimeError(
                f"SAPIEN found no Vulkan device it can use ({error}). Without a GPU install Mesa's llvmpipe 23.1 or "
                "newer: apt-get install mesa-vulkan-drivers libvulkan1 (on Debian 12 from bookworm-backports); "
                "run scripts/doctor.py to check"
            ) from error
        raise
