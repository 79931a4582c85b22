"""A fake simulator (no physics): a counter, so that every number in a test can be worked out by hand."""

from __future__ import annotations

import os
import time

import numpy as np

from nexus_lightning.simulator import Simulator, StepResult


class FakeSimulator(Simulator):
    """FAKE. State ``[4]``: position, step count, last gripper action, process id; position += action[0].

    Ends with success once the position passes ``goal``, truncated at ``horizon``. Each step pays ``step_reward``, the
    successful one 1 more. ``crash_at`` / ``hang_at`` / ``raise_at``: what goes wrong at that step.
    """

    gripper = "close_positive"

    def __init__(self, goal=100.0, horizon=6, step_reward=0.0, cameras=(), crash_at=None, hang_at=None, raise_at=None):
        self.goal, self.horizon, self.step_reward, self.cameras = goal, horizon, step_reward, tuple(cameras)
        self.crash_at, self.hang_at, self.raise_at = crash_at, hang_at, raise_at
        self.renders = 0

    def reset(self, seed):
        self.seed, self.steps, self.last = seed, 0, 0.0
        self.position = float(np.random.default_rng(seed).uniform(-0.5, 0.5))

    def step(self, action):
        self.steps += 1
        if self.steps == self.crash_at:
            os._exit(3)
        if self.steps == self.hang_at:
            time.sleep(600)
        if self.steps == self.raise_at:
            raise OSError("the fake gripper broke")
        self.position += float(action[0])
        self.last = float(action[-1])
        success = self.position > self.goal
        return StepResult(self.step_reward + success, success, success, not success and self.steps >= self.horizon)

    def observe(self):
        self.renders += 1
        image = np.full((3, 16, 16), self.steps, dtype=np.uint8)
        state = np.array([self.position, self.steps, self.last, os.getpid()], dtype=np.float32)
        return {"image": dict.fromkeys(self.cameras, image), "state": state, "instruction": f"count {self.seed}"}

    def render_frame(self):
        return np.full((8, 8, 3), self.steps, dtype=np.uint8)


class ReplayFakeSimulator(FakeSimulator):
    """FAKE with states that can be put back."""

    def get_state(self):
        return np.array([self.position, self.steps, self.last])

    def set_state(self, state):
        self.position, self.steps, self.last = float(state[0]), int(state[1]), float(state[2])


def make_expert(simulator):
    """Walks to the goal, except that it stands still in episodes with an odd seed."""
    while True:
        yield np.array([0.0 if simulator.seed % 2 else 1.5, 1.0], dtype=np.float32)  # 1.5 is out of range on purpose
