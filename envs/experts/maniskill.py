"""Scripted experts for ManiSkill's Panda tasks, acting in ``pd_ee_delta_pose`` from privileged state.

They read object poses straight from the simulator, so they are for recording demonstrations only. A proportional
controller drives the tool centre point (tcp) through phases; each expert is a generator of actions that looks at the
simulator again before each one. Distances are metres in the robot's root frame, which is the world frame up to the
offset that both sides share.

Measured over 50 seeds, episodes capped at 50 steps: PickCube 50, StackCube 50, PushCube 48, PullCube 48 successes.
ManiSkill's own motion planner is not used: its binary (mplib) crashes with numpy 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from transforms3d.quaternions import quat2mat

from envs.maniskill import ManiSkillSimulator

OPEN, CLOSED = 1.0, -1.0
#: Metres (and radians) that one unit of action moves in one step.
ACTION_SCALE = 0.1


def make_expert(simulator: ManiSkillSimulator) -> Iterator[np.ndarray]:
    """Actions (native: +1 opens) for the episode that ``simulator`` has just reset to.

    float32 ``[7]`` for ``pd_ee_delta_pose``, ``[4]`` for ``pd_ee_delta_pos``, ``[8]`` for ``pd_joint_delta_pos`` (the
    Panda's seven joints and the gripper).

    Raises:
        ValueError: no expert for this task or control mode.
    """
    if simulator.task not in EXPERTS:
        raise ValueError(f"no scripted expert for task {simulator.task!r}: there are {', '.join(EXPERTS)}")
    if simulator.control_mode not in CONTROLLERS:
        raise ValueError(f"control_mode={simulator.control_mode!r}: the experts act in {', '.join(CONTROLLERS)}")
    return EXPERTS[simulator.task](simulator.env, CONTROLLERS[simulator.control_mode](simulator.env))


class TcpController:
    """One action towards a position of the tcp, with the gripper's yaw optionally aligned."""

    def __init__(self, env: Any, gain: float = 1.6, yaw_gain: float = 1.5) -> None:
        self._tcp, self._gain, self._yaw_gain = env.agent.tcp, gain, yaw_gain

    @property
    def position(self) -> np.ndarray:
        return _vector(self._tcp.pose.p)

    def towards(
        self, target: np.ndarray, gripper: float, align: np.ndarray | None = None, speed: float = 1.0
    ) -> np.ndarray:
        """Action ``[7]``. ``align``: horizontal axis to turn the fingers along, modulo 90 degrees. ``speed``: cap of
        the largest component."""
        delta = self._gain * (target - self.position) / ACTION_SCALE
        delta *= min(1.0, speed / max(np.abs(delta).max(), 1e-9))
        rotation = np.zeros(3)
        if align is not None:
            finger = quat2mat(_vector(self._tcp.pose.q))[:, 1]
            error = np.arctan2(align[1], align[0]) - np.arctan2(finger[1], finger[0])
            error = (error + np.pi / 4) % (np.pi / 2) - np.pi / 4
            # pd_ee_delta_pose turns against the sign of the action: it scales by the lower rotation bound.
            rotation[2] = -np.clip(self._yaw_gain * error / ACTION_SCALE, -1, 1)
        return np.concatenate([delta, rotation, [gripper]]).astype(np.float32)


class PositionTcpController(TcpController):
    """``pd_ee_delta_pos``: the same without rotation."""

    def towards(
        self, target: np.ndarray, gripper: float, align: np.ndarray | None = None, speed: float = 1.0
    ) -> np.ndarray:
        """Action ``[4]``.

        Raises:
            ValueError: the task needs the fingers turned.
        """
        if align is not None:
            raise ValueError("control_mode='pd_ee_delta_pos' cannot turn the hand: this task needs pd_ee_delta_pose")
        return np.delete(super().towards(target, gripper, None, speed), [3, 4, 5])


class JointTcpController(TcpController):
    """The same motion as joint deltas: least squares on the Jacobian, orientation held at its value at the start."""

    def __init__(self, env: Any, gain: float = 1.6, yaw_gain: float = 1.5) -> None:
        super().__init__(env, gain, yaw_gain)
        self._robot = env.agent.robot._objs[0]
        self._model = self._robot.create_pinocchio_model()
        self._link = [link.name for link in self._robot.links].index(self._tcp._objs[0].name)
        self._start = quat2mat(_vector(self._tcp.pose.q))

    def towards(
        self, target: np.ndarray, gripper: float, align: np.ndarray | None = None, speed: float = 1.0
    ) -> np.ndarray:
        """Action ``[8]``; the arguments are those of :meth:`TcpController.towards`."""
        action = super().towards(target, gripper, align, speed)
        rotation = quat2mat(_vector(self._tcp.pose.q))
        if align is None:
            turn = 0.5 * np.cross(rotation.T, self._start.T).sum(0)  # small-angle error, world frame
        else:
            turn = -action[3:6] * ACTION_SCALE
            self._start = rotation
        self._model.compute_full_jacobian(np.asarray(self._robot.qpos))
        local = self._model.get_link_jacobian(self._link, True)[:, :7]  # in the hand's frame: rows are [v; w]
        jacobian = np.concatenate([rotation @ local[:3], rotation @ local[3:]])
        joints = np.linalg.lstsq(jacobian, np.concatenate([action[:3] * ACTION_SCALE, turn]), rcond=1e-2)[0]
        joints /= max(ACTION_SCALE, np.abs(joints).max())  # +-1 = 0.1 rad
        return np.concatenate([joints, [gripper]]).astype(np.float32)


def push_cube(env: Any, tcp: TcpController) -> Iterator[np.ndarray]:
    """Go behind the cube (on the robot's side) and drive it forward."""
    cube, goal = _vector(env.obj.pose.p), _vector(env.goal_region.pose.p)
    behind = cube - np.array([0.075, 0, 0])
    while np.linalg.norm(tcp.position - behind) > 0.02:
        yield tcp.towards(behind, CLOSED)
    while True:
        yield tcp.towards(np.array([goal[0] - 0.04, cube[1], cube[2]]), CLOSED)


def pull_cube(env: Any, tcp: TcpController) -> Iterator[np.ndarray]:
    """Reach over the cube, come down on its far side and drive it back."""
    cube, goal = _vector(env.obj.pose.p), _vector(env.goal_region.pose.p)
    beyond = cube + np.array([0.075, 0, 0])
    above = np.array([beyond[0], beyond[1], 0.12])
    while np.linalg.norm(tcp.position - above) > 0.03:
        yield tcp.towards(above, CLOSED)
    while np.linalg.norm(tcp.position - beyond) > 0.02:
        yield tcp.towards(beyond, CLOSED)
    while True:
        yield tcp.towards(np.array([goal[0] + 0.04, cube[1], cube[2]]), CLOSED)


def pick_cube(env: Any, tcp: TcpController) -> Iterator[np.ndarray]:
    """Grasp the cube and hold it at the goal."""
    offset = yield from _grasp(env.cube, tcp, hover=0.05)
    while True:
        yield tcp.towards(_vector(env.goal_site.pose.p) + offset, CLOSED)


def stack_cube(env: Any, tcp: TcpController, lift: float = 0.07) -> Iterator[np.ndarray]:
    """Grasp cube A, lift it, carry it over cube B, lower, let go, move up."""
    start_z = _vector(env.cubeA.pose.p)[2]
    offset = yield from _grasp(env.cubeA, tcp, hover=0.06)
    carry_z = start_z + lift + offset[2]
    while _vector(env.cubeA.pose.p)[2] < start_z + 0.7 * lift:
        yield tcp.towards(np.array([*tcp.position[:2], carry_z]), CLOSED)

    def place() -> np.ndarray:
        return _vector(env.cubeB.pose.p) + np.array([0, 0, 0.0405])

    while np.linalg.norm(_vector(env.cubeA.pose.p) - place()) >= 0.006:
        target = place() + offset
        if np.linalg.norm(tcp.position[:2] - target[:2]) > 0.02:
            target[2] = max(target[2], carry_z)
        yield tcp.towards(target, CLOSED)
    here = tcp.position
    for _ in range(3):
        yield tcp.towards(here, OPEN)
    while True:
        yield tcp.towards(np.array([*here[:2], here[2] + 0.15]), OPEN, speed=0.6)


def _grasp(actor: Any, tcp: TcpController, hover: float) -> Iterator[np.ndarray]:
    """Opens above ``actor``, comes down and closes on it; returns tcp minus object position ``[3]``."""
    axis = quat2mat(_vector(actor.pose.q))[:, 0]
    cube = _vector(actor.pose.p)
    above = cube + np.array([0, 0, hover])
    while np.linalg.norm(tcp.position[:2] - cube[:2]) > 0.012 or tcp.position[2] > above[2] + 0.03:
        yield tcp.towards(above, OPEN, axis)
    while np.linalg.norm(tcp.position - cube) > 0.006:
        yield tcp.towards(cube, OPEN, axis, speed=0.7)
    for _ in range(3):
        yield tcp.towards(cube, CLOSED)
    return tcp.position - _vector(actor.pose.p)


def _vector(value: Any) -> np.ndarray:
    """ManiSkill's batched tensor ``[1, D]`` -> float64 ``[D]``."""
    return np.asarray(value, dtype=np.float64).reshape(-1)


EXPERTS: dict[str, Callable[[Any, TcpController], Iterator[np.ndarray]]] = {
    "PushCube-v1": push_cube,
    "PullCube-v1": pull_cube,
    "PickCube-v1": pick_cube,
    "StackCube-v1": stack_cube,
}

CONTROLLERS: dict[str, type[TcpController]] = {
    "pd_ee_delta_pose": TcpController,
    "pd_ee_delta_pos": PositionTcpController,
    "pd_joint_delta_pos": JointTcpController,
}
