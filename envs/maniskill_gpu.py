"""ManiSkill 3 with many scenes in one process on a GPU: the batched form of ``envs.maniskill.ManiSkillSimulator``.

CUDA was not there when this was written: the class ran and is tested with one scene on the CPU (``physx_cpu`` takes no
more), against the simulator that has a process of its own. The batch bookkeeping around it is tested on a fake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from envs.maniskill import inference_mode, instruction_of, open_scene, read_views, to_numpy
from nexus_lightning.simulator import BatchedSimulator, BatchedSteps


class BatchedManiSkill(BatchedSimulator):
    """``num_envs`` scenes of one ManiSkill task, the other arguments as of ``ManiSkillSimulator``.

    Rows are reset one at a time, each with its own seed. ManiSkill would reset many at once, but then it draws all of
    their initial states from the first one's seed: what an episode is would depend on which others start with it. On
    CUDA a seed gives another initial state than on the CPU (the device has its own random stream), always the same one.

    Observations and rewards go to the CPU and through the worker's pipe, like those of any simulator here.

    Args:
        num_envs: scenes.
        sim_backend: of ManiSkill; ``physx_cpu`` takes one scene only.
        render_backend: of ManiSkill.
    """

    gripper: ClassVar[str] = "open_positive"

    def __init__(
        self,
        task: str,
        num_envs: int,
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
        sim_backend: str = "physx_cuda",
        render_backend: str = "gpu",
    ) -> None:
        if "target" in control_mode:
            # After a partial reset ManiSkill sets the controllers of all scenes back to where their robots are.
            raise ValueError(f"control_mode={control_mode!r}: follows a target of its own, which resets would move")
        self.obs, self.cameras, self.num_envs = obs, tuple(cameras), num_envs
        self.horizon, self.success_bonus = horizon, success_bonus
        self.instruction = instruction_of(task, instruction)
        self.env = open_scene(
            task,
            obs,
            self.cameras,
            image_size,
            control_mode,
            reward_mode,
            robot_uids,
            video_size,
            num_envs=num_envs,
            sim_backend=sim_backend,
            render_backend=render_backend,
        )
        self._steps = np.zeros(num_envs, dtype=np.int64)

    @inference_mode
    def reset(self, row: int, seed: int) -> None:
        import torch

        # The seed at every place: tasks draw from torch (seeded with the first) or from the row's own generator.
        rows = torch.tensor([row], device=self.env.device)
        self.env.reset(seed=[seed] * self.num_envs, options={"env_idx": rows})
        self._steps[row] = 0

    @inference_mode
    def step(self, actions: np.ndarray) -> BatchedSteps:
        _, reward, terminated, _, info = self.env.step(actions)
        self._steps += 1
        success, ended = to_numpy(info["success"]), to_numpy(terminated)
        return BatchedSteps(
            reward=to_numpy(reward).astype(np.float32) + self.success_bonus * success,
            success=success,
            terminated=ended,
            truncated=np.logical_not(ended) & (self._steps >= self.horizon),
        )

    @inference_mode
    def observe(self) -> dict[str, Any]:
        images, state = read_views(self.env, self.obs, self.cameras)
        return {"image": images, "state": state, "instruction": self.instruction}

    def render_frames(self) -> np.ndarray:
        return to_numpy(self.env.render_rgb_array()).astype(np.uint8)

    def close(self) -> None:
        self.env.close()
