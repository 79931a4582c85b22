"""A fake simulator (no physics): a counter, so that every number in a test can be worked out by hand."""

from __future__ import annotations

import os
import time

import numpy as np

from nexus_lightning.simulator import BatchedSimulator, BatchedSteps, Simulator, StepResult


class FakeSimulator(Simulator):
    """FAKE. State ``[4]``: position, step count, last gripper action, process id; position += action[0].

    Ends with success once the position passes ``goal``, truncated at ``horizon``. Each step pays ``step_reward``, the
    successful one 1 more. ``crash_at`` / ``hang_at`` / ``raise_at``: what goes wrong at that step.
    """

    gripper = "close_positive"
    task_key = "name"
    batched = "fake_simulator.BatchedFake"
    built = []  # names of the simulators built in this process

    def __init__(
        self,
        goal=100.0,
        horizon=6,
        step_reward=0.0,
        cameras=(),
        crash_at=None,
        hang_at=None,
        raise_at=None,
        name="count",
    ):
        FakeSimulator.built.append(name)
        self.name = name
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
        return {"image": dict.fromkeys(self.cameras, image), "state": state, "instruction": f"{self.name} {self.seed}"}

    def render_frame(self):
        return np.full((8, 8, 3), self.steps, dtype=np.uint8)


class SteadyFake(FakeSimulator):
    """FAKE whose state does not tell in which process it runs. ``crash_once``: a file; without it, it is made and the
    process ends in the middle of an episode."""

    def __init__(self, crash_once=None, **kwargs):
        super().__init__(**kwargs)
        self.crash_once = crash_once

    def step(self, action):
        if self.crash_once is not None and self.steps == 2 and not os.path.exists(self.crash_once):
            open(self.crash_once, "w").close()
            os._exit(3)
        return super().step(action)

    def observe(self):
        seen = super().observe()
        seen["state"][3] = self.seed % 7
        return seen


class BatchedFake(BatchedSimulator):
    """FAKE. Rows of fake simulators; like a GPU it steps all of them, those whose episode is over too."""

    gripper = "close_positive"

    def __init__(self, num_envs, **arguments):
        self.num_envs = num_envs
        self.rows = [FakeSimulator(**arguments) for _ in range(num_envs)]
        for row in self.rows:
            row.reset(2022)

    def reset(self, row, seed):
        self.rows[row].reset(seed)

    def step(self, actions):
        assert actions.shape[0] == self.num_envs
        steps = [row.step(action) for row, action in zip(self.rows, actions, strict=True)]
        columns = {k: np.array([getattr(s, k) for s in steps]) for k in ("success", "terminated", "truncated")}
        return BatchedSteps(np.array([s.reward for s in steps], np.float32), **columns)

    def observe(self):
        seen = [row.observe() for row in self.rows]
        return {
            "image": {c: np.stack([s["image"][c] for s in seen]) for c in seen[0]["image"]},
            "state": np.stack([s["state"] for s in seen]),
            "instruction": self.rows[0].name,
        }

    def render_frames(self):
        return np.stack([row.render_frame() for row in self.rows])


class ReplayFakeSimulator(FakeSimulator):
    """FAKE with states that can be put back."""

    def get_state(self):
        return np.array([self.position, self.steps, self.last])

    def set_state(self, state):
        self.position, self.steps, self.last = float(state[0]), int(state[1]), float(state[2])


class Broken(FakeSimulator):
    """FAKE that breaks one rule of the contract, see ``how``."""

    def __init__(self, how, **kwargs):
        super().__init__(**kwargs)
        self.how, self.episodes = how, 0

    def reset(self, seed):
        super().reset(seed)
        self.episodes += 1
        if self.how == "unseeded":
            self.position = float(self.episodes)
        elif self.how == "leaks":
            self.position += self.left_behind if hasattr(self, "left_behind") else 0.0

    def step(self, action):
        result = super().step(action)
        if self.how == "no end":
            result.truncated = False
        elif self.how == "reward":
            result.reward = float("nan")
        elif self.how == "leaks":
            self.left_behind = 1.0
        if self.how == "resets itself" and (result.terminated or result.truncated):
            self.reset(self.seed)
        return result

    def observe(self):
        seen = super().observe()
        changes = {
            "no words": {"instruction": ""},
            "bytes": {"instruction": b"count"},
            "not finite": {"state": np.full(4, np.nan, np.float32)},
            "late nan": {"state": np.full(4, np.nan if self.steps else 0, np.float32)},
            "float64": {"state": seen["state"].astype(np.float64)},
            "too long": {"state": np.zeros(5, np.float32)},
        }
        return {**seen, **changes.get(self.how, {})}


def make_expert(simulator):
    """Walks to the goal, except that it stands still in episodes with an odd seed."""
    while True:
        yield np.array([0.0 if simulator.seed % 2 else 1.5, 1.0], dtype=np.float32)  # 1.5 is out of range on purpose
