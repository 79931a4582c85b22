"""A scripted pick-and-place expert for LIBERO, in OSC_POSE actions, from privileged positions.

It solves the suites ``libero_object`` (put a thing into the basket) and ``libero_spatial`` (take the bowl by its rim,
put it on the plate) and is where demonstrations come from when there is no download.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from envs.libero import LiberoSimulator, Scene

OPEN, CLOSE = -1.0, 1.0
#: One unit of action in metres and radians.
METRES, RADIANS = 0.05, 0.5
#: Positions count as reached within this distance in the plane, metres.
ARRIVED = 0.012


@dataclass(frozen=True)
class Grasp:
    """How one kind of object is taken and put down; metres and radians.

    Attributes:
        yaw: direction of the finger opening axis in the world (modulo pi).
        offset: grasp point in the plane, from the object's origin.
        height: grasp point above the object's origin.
        lift: how high it is carried above the grasp point.
        release: height of the object's origin above the target's when the fingers open.
    """

    yaw: float = np.pi / 2
    offset: tuple[float, float] = (0.0, 0.0)
    height: float = 0.0
    lift: float = 0.18
    release: float = 0.10


#: Default grasp of each suite the expert knows.
SUITES = {
    "libero_object": Grasp(),
    "libero_spatial": Grasp(offset=(0.0, 0.045), height=0.02, lift=0.15, release=0.03),
}
#: Differences by object name (without its number): bottles are taken higher, at the neck; the cream cheese at its free
#: end, where the fingers do not land on the can beside it.
OBJECTS: dict[str, dict[str, Any]] = {
    "cream_cheese": {"offset": (-0.02, 0.0)},
    "ketchup": {"height": 0.02},
    "salad_dressing": {"height": 0.02},
}


def make_expert(simulator: LiberoSimulator) -> Iterator[np.ndarray]:
    """Actions of one episode, from the simulator's present state on.

    Yields native actions, float32 ``[7]`` in [-1, 1]; each is computed from the state after the one before was
    stepped, so step the simulator between two ``next`` calls. Call it after ``reset``. The iterator ends when the
    script does; success is for the simulator to say.

    Raises:
        ValueError: the suite has no script.
    """
    suite = next((name for name in SUITES if simulator.suite.startswith(name)), None)
    if suite is None:
        raise ValueError(f"suite={simulator.suite!r}: no scripted expert, choose one of {', '.join(SUITES)}")
    kind = simulator.objects[0].rpartition("_")[0]
    return PickPlaceExpert(simulator, replace(SUITES[suite], **OBJECTS.get(kind, {}))).actions()


class PickPlaceExpert:
    """Hover, descend, close, lift, carry, lower, open, retreat: a P-controller through way points."""

    def __init__(self, simulator: LiberoSimulator, grasp: Grasp, gain: float = 0.6, rotation_gain: float = 1.0) -> None:
        self.simulator = simulator
        self.grasp = grasp
        self.gain = gain
        self.rotation_gain = rotation_gain

    def actions(self) -> Iterator[np.ndarray]:
        """The script; see :func:`make_expert`."""
        grasp, see = self.grasp, self.simulator.scene
        point = see().object_position + np.array([*grasp.offset, grasp.height])
        hover = point + np.array([0, 0, 0.10])
        yield from self._move(hover, OPEN, max_steps=60, height_tolerance=0.04)
        yield from self._move(point, OPEN, max_steps=40, height_tolerance=0.008, speed=0.6)
        for _ in range(8):
            yield self._toward(see(), point, CLOSE)

        lifted = point + np.array([0, 0, grasp.lift])
        for _ in range(25):
            scene = see()
            if scene.eef_position[2] > lifted[2] - 0.03:
                break
            yield self._toward(scene, lifted, CLOSE)

        scene = see()
        held = scene.eef_position - scene.object_position  # the object may have slipped a little
        above = np.array([*(scene.target_position + held)[:2], lifted[2]])
        yield from self._move(above, CLOSE, max_steps=80, height_tolerance=0.05)
        down = np.array([*above[:2], scene.target_position[2] + grasp.release + held[2]])
        for _ in range(30):
            scene = see()
            if scene.eef_position[2] < down[2] + 0.01:
                break
            yield self._toward(scene, down, CLOSE, speed=0.6)
        for _ in range(6):
            yield self._toward(see(), down, OPEN)
        for _ in range(30):
            yield self._toward(see(), down + np.array([0, 0, 0.12]), OPEN)

    def _move(
        self, point: np.ndarray, gripper: float, *, max_steps: int, height_tolerance: float, speed: float = 1.0
    ) -> Iterator[np.ndarray]:
        """Go to ``point`` until it is reached or the steps are used up."""
        for _ in range(max_steps):
            scene = self.simulator.scene()
            error = np.abs(scene.eef_position - point)
            if np.linalg.norm(error[:2]) <= ARRIVED and error[2] <= height_tolerance:
                return
            yield self._toward(scene, point, gripper, speed=speed)

    def _toward(self, scene: Scene, point: np.ndarray, gripper: float, speed: float = 1.0) -> np.ndarray:
        """One action toward ``point`` with the palm down and the fingers opening along the grasp's yaw."""
        move = self.gain * (point - scene.eef_position) / METRES
        move *= min(1.0, speed / max(np.abs(move).max(), 1e-9))
        opening, approach = scene.eef_rotation[:, 1], scene.eef_rotation[:, 2]
        turn = np.cross(approach, [0.0, 0.0, -1.0])
        yaw_error = self.grasp.yaw - np.arctan2(opening[1], opening[0])
        turn[2] += (yaw_error + np.pi / 2) % np.pi - np.pi / 2
        turn = np.clip(self.rotation_gain * turn / RADIANS, -0.5, 0.5)
        return np.clip([*move, *turn, gripper], -1.0, 1.0).astype(np.float32)
