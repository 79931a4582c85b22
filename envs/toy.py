"""TorchRL's toy VLA environment in tracking mode: seconds on a CPU, with a known ceiling and floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torchrl.envs.custom import ToyVLAEnv

from nexus_lightning.schema import TenantSchema
from nexus_lightning.simulator import Simulator, StepResult, Suite, dim_problems

#: What the state holds beyond proprioception.
PRIVILEGED = ("target_action",)
INSTRUCTIONS = {
    "plain": "move to the green target and stay there",
    "mirrored": "the controls are mirrored: move to the green target and stay there",
}


class ToySimulator(Simulator):
    """Hold the last action within ``success_tol`` of a hidden-per-episode target for ``success_steps`` steps.

    An oracle that copies the target out of the state always succeeds in ``success_steps`` steps; random actions almost
    never do. Terminated at success, truncated at ``horizon``. Light: use ``SimulatorEnv(inline=True)``.

    State ``[2 * action_dim]``: last executed action, target (see :data:`PRIVILEGED`). The camera ``camera`` shows the
    first two dims of both: last action red, target green.

    Args:
        task: ``plain``, or ``mirrored``: every action is carried out with its sign turned. Only the instruction tells
            the two apart, so a policy of both must listen to it.
        action_dim: length of an action, in [-1, 1]; targets lie in [-0.5, 0.5].
        success_steps: consecutive steps within the tolerance.
        success_tol: per-dim tolerance.
        horizon: control steps until truncation.
        reward: ``success`` (1 at success, else 0) or ``tracking`` (minus the distance to the target, each step, so
            that finishing early pays).
        cameras: ``("camera",)`` or ``()``.
        image_size: pixels.

    Example:
        >>> sim = ToySimulator(); sim.reset(seed=1)
        >>> target = sim.observe()["state"][2:]
        >>> sim.step(target).success, sim.step(target).success
        (False, True)
    """

    gripper = "none"
    task_key: ClassVar[str | None] = "task"
    suites: ClassVar[Mapping[str, Suite]] = {"toy": Suite(tuple(INSTRUCTIONS))}

    @classmethod
    def problems(cls, arguments: Mapping[str, Any], schema: TenantSchema) -> list[str]:
        dim = arguments.get("action_dim", 2)
        what = f"the toy with action_dim={dim}"
        return dim_problems(schema, {"state_dim": (2 * dim, what), "action_dim": (dim, what)})

    def __init__(
        self,
        task: Literal["plain", "mirrored"] = "plain",
        action_dim: int = 2,
        success_steps: int = 2,
        success_tol: float = 0.25,
        horizon: int = 12,
        reward: Literal["success", "tracking"] = "success",
        cameras: Sequence[str] = ("camera",),
        image_size: int = 32,
    ) -> None:
        if task not in INSTRUCTIONS:
            raise ValueError(f"task={task!r}: choose one of {', '.join(INSTRUCTIONS)}")
        if reward not in ("success", "tracking"):
            raise ValueError(f"reward={reward!r}: choose success or tracking")
        if tuple(cameras) not in ((), ("camera",)):
            raise ValueError(f"cameras={list(cameras)}: the toy simulator has one, 'camera'")
        self.horizon, self.reward, self.cameras = horizon, reward, tuple(cameras)
        self.task, self.instruction = task, INSTRUCTIONS[task]
        self._env = ToyVLAEnv(
            action_dim,
            state_dim=2 * action_dim,
            image_shape=(3, 1, 1),  # the random image of ToyVLAEnv is not used, its rendered scene is
            instruction=self.instruction,
            from_pixels=bool(self.cameras),
            render_size=image_size,
            success_steps=success_steps,
            success_tol=success_tol,
        )

    def reset(self, seed: int) -> None:
        self._env._set_seed(seed)  # the public set_seed also seeds torch's global generator, which is not ours
        self._td = self._env.reset()
        self._steps = 0

    def step(self, action: np.ndarray) -> StepResult:
        wanted = torch.as_tensor(action, dtype=torch.float32)
        self._td["action"] = wanted if self.task == "plain" else -wanted
        self._td = self._env.step(self._td)["next"]
        self._steps += 1
        success = bool(self._td["success"])
        reward = float(success) if self.reward == "success" else float(self._td["reward"])
        return StepResult(reward, success, success, not success and self._steps >= self.horizon)

    def observe(self) -> dict[str, Any]:
        images = {"camera": self._td["pixels"].permute(2, 0, 1).numpy()} if self.cameras else {}
        return {"image": images, "state": self._td["observation", "state"].numpy(), "instruction": self.instruction}

    def render_frame(self) -> np.ndarray:
        return self._env._render(self._td["observation", "state"]).numpy()
