"""MetaWorld 3 (Yu et al. 2019, arXiv 1910.10897): fifty tasks of a Sawyer arm in MuJoCo, about 1 ms per step."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from nexus_lightning.simulator import Simulator, StepResult, Suite, as_flag, dim_problems, privileged_problems

if TYPE_CHECKING:  # its import takes torch along, which a worker does not need
    from nexus_lightning.schema import TenantSchema


def _lerobot_tables() -> dict[str, Any]:
    """LeRobot's instructions and groups of tasks: those of its MetaWorld datasets and evaluations."""
    spec = importlib.util.find_spec("lerobot")
    assert spec is not None and spec.origin is not None, "a dependency of the project"
    return json.loads((Path(spec.origin).parent / "envs" / "metaworld_config.json").read_text())


_TABLES = _lerobot_tables()
#: Task -> what the policy is told.
INSTRUCTIONS: dict[str, str] = _TABLES["TASK_DESCRIPTIONS"]
#: MetaWorld's own selection of ten.
MT10 = (
    "reach-v3",
    "push-v3",
    "pick-place-v3",
    "door-open-v3",
    "drawer-open-v3",
    "drawer-close-v3",
    "button-press-topdown-v3",
    "peg-insert-side-v3",
    "window-open-v3",
    "window-close-v3",
)
#: Length of the state: hand 3, gripper 1; with objects also poses of two objects 14, all of it one step before, goal 3.
STATE_DIMS = {"rgb": 4, "state": 39, "rgb+state": 39}
#: What the longer state holds that no sensor of the robot measures (``privileged`` of the schema).
PRIVILEGED = ("object_poses", "goal_position")
ACTION_DIM = 4
#: MetaWorld refuses to go on after so many steps.
MAX_STEPS = 500
#: MetaWorld's cameras.
CAMERAS = ("corner", "corner2", "corner3", "topview", "behindGripper", "gripperPOV")
#: LeRobot's place for the camera ``corner2``, nearer to the table than MetaWorld's.
CORNER2_POSITION = (0.75, 0.075, 0.7)


class MetaWorldSimulator(Simulator):
    """One MetaWorld task, with the camera, instructions and seeds of ``lerobot.envs.metaworld``.

    Actions (4-D in [-1, 1]): +-1 moves the hand's target 0.01 m along x, y, z; the fourth is the gripper's effort, +1
    closes. The hand does not turn. The control rate is 80 Hz.

    State: ``obs="rgb"`` is proprioception, hand position and finger opening; ``"state"`` and ``"rgb+state"`` are
    MetaWorld's 39 numbers with object poses and the goal, see :data:`PRIVILEGED`. Images are upright.

    Episodes: the seed draws where objects and goal are, anywhere in the task's region (MetaWorld's own benchmarks have
    fifty fixed places). Terminated at success, reward 1 there and 0 elsewhere; truncated after ``horizon`` steps. For
    MetaWorld's dense reward without an end at success use :class:`envs.gymnasium.GymnasiumSimulator`.

    Args:
        task: ``reach-v3``, ``button-press-topdown-v3`` ...
        obs: what :meth:`observe` returns.
        cameras: one of :data:`CAMERAS`; empty for ``state``.
        image_size: pixels.
        horizon: steps until truncation, at most :data:`MAX_STEPS`.
        shadows: draw shadows as the published datasets have them; off takes a seventh of the time.
        video_size: pixels of :meth:`render_frame`, where there is no camera; else ``image_size`` are.

    Raises:
        ValueError: an unknown task or observation, cameras that do not go with it, a horizon out of range.
    """

    gripper = "close_positive"
    requires: ClassVar[dict[str, str]] = {"metaworld": "metaworld"}
    task_key: ClassVar[str | None] = "task"
    suites: ClassVar[Mapping[str, Suite]] = {
        **{f"metaworld_{group}": Suite(tuple(tasks)) for group, tasks in _TABLES["DIFFICULTY_TO_TASKS"].items()},
        "metaworld_mt10": Suite(MT10),
        "metaworld_mt50": Suite(tuple(INSTRUCTIONS)),
    }

    @classmethod
    def problems(cls, arguments: Mapping[str, Any], schema: TenantSchema) -> list[str]:
        """Task, camera, dims and privileged names, without starting anything."""
        task, obs, cameras = arguments.get("task"), str(arguments.get("obs", "state")), arguments.get("cameras", ())
        what = f"MetaWorld with obs={obs}"
        dims = {"state_dim": (STATE_DIMS.get(obs), what), "action_dim": (ACTION_DIM, what)}
        return [
            *_wrong(task, obs, cameras),
            *dim_problems(schema, dims),
            *privileged_problems(schema, () if obs == "rgb" else PRIVILEGED, what),
        ]

    def __init__(
        self,
        task: str,
        obs: Literal["state", "rgb", "rgb+state"] = "state",
        cameras: Sequence[str] = (),
        image_size: int = 128,
        horizon: int = MAX_STEPS,
        shadows: bool = False,
        video_size: int = 256,
    ) -> None:
        if wrong := _wrong(task, obs, cameras):
            raise ValueError("; ".join(wrong))
        if not 1 <= horizon <= MAX_STEPS:
            raise ValueError(f"horizon={horizon}: must be 1 to {MAX_STEPS}")
        self.task, self.obs, self.cameras, self.horizon = task, obs, tuple(cameras), horizon
        self.instruction = INSTRUCTIONS[task]
        self._camera = cameras[0] if cameras else "corner2"
        self.env = _open(task, self._camera, image_size if cameras else video_size)
        if not shadows:
            self.env.model.light_castshadow[:] = 0

    def reset(self, seed: int) -> None:
        self.env.seed(seed)
        self.raw_observation, _ = self.env.reset()
        self._steps = 0

    def step(self, action: np.ndarray) -> StepResult:
        self.raw_observation, _, _, _, info = self.env.step(np.asarray(action, np.float32))
        self._steps += 1
        success = as_flag("info['success']", info["success"])
        return StepResult(float(success), success, success, not success and self._steps >= self.horizon)

    def observe(self) -> dict[str, Any]:
        images = {c: np.ascontiguousarray(np.moveaxis(self.render_frame(), -1, 0)) for c in self.cameras}
        state = self.raw_observation[: STATE_DIMS[self.obs]].astype(np.float32)
        return {"image": images, "state": state, "instruction": self.instruction}

    def render_frame(self) -> np.ndarray:
        frame = self.env.render()
        # this camera of MetaWorld hangs upside down
        return np.ascontiguousarray(frame[::-1, ::-1] if self._camera == "corner2" else frame)

    def close(self) -> None:
        self.env.close()


def _wrong(task: Any, obs: str, cameras: Sequence[str]) -> list[str]:
    """What no simulator can be made of, one line each."""
    found = [] if task in INSTRUCTIONS else [f"task={task!r}: choose one of {', '.join(INSTRUCTIONS)}"]
    if obs not in STATE_DIMS:
        found.append(f"obs={obs!r}: choose {', '.join(STATE_DIMS)}")
    elif len(cameras) != ("rgb" in obs):
        found.append(f"obs={obs!r} with cameras={list(cameras)}: one camera with rgb, none without")
    found += [
        f"cameras: no {camera!r}; choose one of {', '.join(CAMERAS)}" for camera in cameras if camera not in CAMERAS
    ]
    return found


def _open(task: str, camera: str, size: int) -> Any:
    """MetaWorld's environment of a task, drawing places from its seed, with the goal in the observation."""
    os.environ.setdefault("MUJOCO_GL", "osmesa")  # read once, when mujoco is imported
    import metaworld

    benchmark = metaworld.MT1(task, seed=0)
    env = benchmark.train_classes[task](render_mode="rgb_array", camera_name=camera, width=size, height=size)
    env.set_task(benchmark.train_tasks[0])
    # As LeRobot: otherwise every episode is the one of the task above.
    env._freeze_rand_vec, env.seeded_rand_vec = False, True
    if camera == "corner2":
        env.model.cam_pos[2] = CORNER2_POSITION
    return env
