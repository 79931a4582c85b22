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


class Careless(FakeSimulator):
    """FAKE that gives one wrong value, from its second step on; see :data:`WRONG`."""

    def __init__(self, wrong=None, **kwargs):
        super().__init__(**kwargs)
        self.wrong = wrong

    def step(self, action):
        result = super().step(action)
        if self.steps >= 2 and self.wrong == "no result":
            return None
        if self.steps >= 2 and self.wrong in WRONG_STEPS:
            setattr(result, *WRONG_STEPS[self.wrong])
        return result

    def observe(self):
        seen = super().observe()
        if self.steps < 2 or self.wrong not in WRONG_VIEWS:
            return seen
        key, value = WRONG_VIEWS[self.wrong]
        return {k: v for k, v in {**seen, key: value}.items() if v is not None}


WRONG_STEPS = {
    "reward nan": ("reward", float("nan")),
    "reward inf": ("reward", float("-inf")),
    "reward of double": ("reward", 1e39),  # infinite in float32
    "reward none": ("reward", None),
    "reward text": ("reward", "1.0"),
    "reward array": ("reward", np.ones(2)),
    "success none": ("success", None),
    "success nan": ("success", float("nan")),
    "terminated array": ("terminated", np.array([True, False])),
    "truncated text": ("truncated", "no"),
}
WRONG_VIEWS = {
    "state missing": ("state", None),
    "state short": ("state", np.ones(1, np.float32)),  # would be broadcast
    "state double": ("state", np.ones(4)),
    "state nan": ("state", np.array([0, 1, np.nan, 3], np.float32)),
    "image float": ("image", {"front": np.full((3, 16, 16), 0.5, np.float32)}),  # would be black
    "image large": ("image", {"front": np.zeros((3, 17, 16), np.uint8)}),
    "camera missing": ("image", {}),
    "images missing": ("image", None),
    "instruction missing": ("instruction", None),
}
#: What goes wrong -> what the error says of it: the field, what came, what is expected.
WRONG = {
    "no result": "step: None: expected an object with reward, success, terminated and truncated",
    "reward nan": "reward: nan: expected one finite number",
    "reward inf": "reward: -inf: expected one finite number",
    "reward of double": "reward: 1e+39: expected one finite number",
    "reward none": "reward: None: expected one finite number",
    "reward text": "reward: '1.0': expected one finite number",
    "reward array": "reward: float64 (2,): expected one finite number",
    "success none": "success: None: expected a bool",
    "success nan": "success: nan: expected a bool",
    "terminated array": "terminated: bool (2,): expected a bool",
    "truncated text": "truncated: 'no': expected a bool",
    "state missing": "state_dim=4: the simulator gives no state, expected float32 (4,)",
    "state short": "state_dim=4: the simulator gives float32 (1,), expected float32 (4,)",
    "state double": "state_dim=4: the simulator gives float64 (4,), expected float32 (4,)",
    "state nan": "state: dims [2] are not finite",
    "image float": "image 'front' is float32 (3, 16, 16), expected uint8 (3, 16, 16), as at the start",
    "image large": "image 'front' is uint8 (3, 17, 16), expected uint8 (3, 16, 16), as at the start",
    "camera missing": "cameras: no 'front'; the simulator has []",
    "images missing": "image: None, expected a dict with front",
    "instruction missing": "instruction=None: the simulator must say in words what to do",
}


class WrongChunk(FakeSimulator):
    """FAKE with an ``execute`` of its own (as one behind a network has), which says something else than it did."""

    def __init__(self, executed, **kwargs):
        super().__init__(**kwargs)
        self.executed = executed

    def execute(self, actions):
        result = super().execute(actions)
        result.executed = np.array(self.executed)
        return result


class BatchedCareless(BatchedFake):
    """FAKE. ``wrong``: ``{column: [value of each row]}``, or a shape for the state."""

    def __init__(self, num_envs, wrong, **arguments):
        super().__init__(num_envs, **arguments)
        self.wrong = wrong

    def step(self, actions):
        steps = super().step(actions)
        for name, column in self.wrong.items():
            if name != "state":
                setattr(steps, name, np.array(column))
        return steps

    def observe(self):
        seen = super().observe()
        if "state" in self.wrong and self.rows[0].steps:
            seen["state"] = np.zeros(self.wrong["state"], np.float32)
        return seen


class CarelessOfBatch(FakeSimulator):
    """FAKE. The class that is batched as :class:`BatchedCareless`."""

    batched = "fake_simulator.BatchedCareless"


def make_expert(simulator):
    """Walks to the goal, except that it stands still in episodes with an odd seed."""
    while True:
        yield np.array([0.0 if simulator.seed % 2 else 1.5, 1.0], dtype=np.float32)  # 1.5 is out of range on purpose
