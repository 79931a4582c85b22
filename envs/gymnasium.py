"""Any Gymnasium environment with continuous actions as a simulator: classic control, PushT, MuJoCo tasks, your own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import load_env_creator
from gymnasium.utils.seeding import np_random

from nexus_lightning.images import fit_images
from nexus_lightning.simulator import ContractError, Simulator, StepResult, as_flag, as_number, check_frame

#: ``info`` keys that tell success in the wild; the first one that is there counts.
SUCCESS_KEYS = ("is_success", "success")
#: Name under which the observation of an environment without a Dict space goes in ``state_keys`` and ``image_keys``.
PLAIN = "observation"


class GymnasiumSimulator(Simulator):
    """``gymnasium.make(id)`` behind the :class:`~nexus_lightning.simulator.Simulator` contract.

    Actions: float Box with finite bounds, of any shape (flattened). -1 is its lower bound, +1 its upper one, per dim.
    A gripper, if any, is a dim like the others (``schema.gripper: none``); for a sign the schema must know of, subclass
    and set ``gripper``. Discrete actions are refused: heads predict continuous chunks.

    Observations: a Dict space is read by key, any other one has the single key ``observation``. ``state_keys`` are
    flattened and put one after the other; without any, the state is one 0. A camera shows an image of the observation
    (``image_keys``) or, when it is not listed there, the rendered frame.

    Episodes: ``terminated`` is the environment's own, ``truncated`` its time limit (a step that is both counts as
    terminated). Success is ``info[success_key]``; without that key ``info["is_success"]`` or ``info["success"]``; where
    the environment gives none of them, ``terminated and reward > success_reward``. A success that does not terminate
    lets the episode go on. Nothing resets by itself: Gymnasium's own auto-reset is for its vector environments.

    ============================================== =====================================================================
    ``gym_pusht:gym_pusht/PushT-v0``               conf/tenant/pusht.yaml, pusht_sft.yaml
    ``Pendulum-v1``, ``MountainCarContinuous-v0``  ``state_dim`` 3 and 2, ``action_dim`` 1
    ``metaworld:Meta-World/MT1``                   MetaWorld's dense reward, no end at success, fifty goals;
                                                   ``horizon: 500``, ``state_dim`` 39, ``action_dim`` 4,
                                                   ``kwargs: {env_name: reach-v3, seed: 0, render_mode: rgb_array}``;
                                                   that seed makes the goals the same in every process. For the sparse
                                                   reward and an end at success: :mod:`envs.metaworld`
    ============================================== =====================================================================

    Args:
        id: Gymnasium's; ``module:Name-v0`` imports ``module``, which registers ``Name-v0``, first.
        instruction: what the policy is told.
        cameras: names, in the order of the schema.
        image_size: squeeze them to a square of so many pixels; None: as they are, see ``schema.image_fit``.
        state_keys: keys of the observation that make the state; may be left out when it is no Dict and no image.
        image_keys: camera -> key of the observation (uint8 ``[H, W, 3]``).
        scale_state: rescale the state from the bounds of its spaces to [-1, 1], for tenants without dataset statistics.
        horizon: control steps until truncation; the environment's registered limit by default.
        success_key: key of ``info``; at the end of an episode it must be there.
        success_reward: see above.
        success_bonus: added to the reward of a step that succeeds. A dense reward that is paid per step makes ending
            early costly; the bonus outweighs that.
        kwargs: of the environment. ``render_mode="rgb_array"`` is added where its class offers it; an id that is made
            by a function (MetaWorld) needs it here for cameras and videos.

    Example:
        >>> sim = GymnasiumSimulator("Pendulum-v1", "swing the pendulum up")
        >>> sim.reset(seed=0)
        >>> result = sim.step(np.ones(1, np.float32))  # +1 is a torque of 2 N m
        >>> result.reward < 0, result.success, sim.observe()["state"].shape
        (True, False, (3,))
    """

    gripper = "none"

    def __init__(
        self,
        id: str,
        instruction: str,
        cameras: Sequence[str] = (),
        image_size: int | None = None,
        state_keys: Sequence[str] | None = None,
        image_keys: Mapping[str, str] | None = None,
        scale_state: bool = False,
        horizon: int | None = None,
        success_key: str | None = None,
        success_reward: float = 0.0,
        success_bonus: float = 0.0,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.id, self.instruction, self.image_size = id, instruction, image_size
        self.cameras, self.image_keys = tuple(cameras), dict(image_keys or {})
        self.success_key, self.success_reward, self.success_bonus = success_key, success_reward, success_bonus
        self.env = self._make(horizon, dict(kwargs or {}))
        try:
            self._read_action_space()
            self._read_observation_space(state_keys, scale_state)
        except ValueError:
            self.env.close()
            raise

    # ---- the contract ----

    def reset(self, seed: int) -> None:
        # First the generator itself: a wrapper may draw from it before it hands the seed on, as MetaWorld's do.
        self.env.unwrapped.np_random = np_random(seed)[0]
        observation, _ = self.env.reset(seed=seed)
        self._observation = observation

    def step(self, action: np.ndarray) -> StepResult:
        native = self._action_low + (np.asarray(action, np.float64) + 1) / 2 * self._action_range
        space = self.env.action_space
        self._observation, reward, terminated, truncated, info = self.env.step(
            native.reshape(space.shape).astype(space.dtype)
        )
        reward, terminated = as_number("reward", reward), as_flag("terminated", terminated)
        truncated = as_flag("truncated", truncated) and not terminated
        success = self._succeeded(info, reward, terminated, terminated or truncated)
        return StepResult(reward + self.success_bonus * success, success, terminated, truncated)

    def observe(self) -> dict[str, Any]:
        parts = self._observation if isinstance(self._observation, Mapping) else {PLAIN: self._observation}
        images = {
            camera: self._fitted(
                self._part(parts, self.image_keys[camera])
                if camera in self.image_keys
                else check_frame(self.render_frame())
            )
            for camera in self.cameras
        }
        state = [np.asarray(self._part(parts, key), np.float64).reshape(-1) for key in self.state_keys]
        flat = (np.concatenate(state) - self._state_offset) / self._state_scale if state else np.zeros(1)
        return {"image": images, "state": flat.astype(np.float32), "instruction": self.instruction}

    def render_frame(self) -> np.ndarray:
        frame = self.env.render() if self.env.render_mode == "rgb_array" else None
        if not isinstance(frame, np.ndarray):
            raise NotImplementedError(
                f"id={self.id!r} renders no frame: pass kwargs={{'render_mode': 'rgb_array'}} if it can, "
                "else leave out video and cameras that are not in image_keys"
            )
        return frame

    def close(self) -> None:
        self.env.close()

    def to_unit(self, action: np.ndarray) -> np.ndarray:
        """An action in the environment's own units -> float32 ``[A]`` in [-1, 1] (for experts)."""
        unit = (np.asarray(action, np.float64).reshape(-1) - self._action_low) / self._action_range * 2 - 1
        return unit.astype(np.float32)

    # ---- what the environment is ----

    def _make(self, horizon: int | None, kwargs: dict[str, Any]) -> gymnasium.Env:
        module, _, name = self.id.rpartition(":")
        try:
            if module:
                importlib.import_module(module)
        except ImportError as error:
            extra = " (PushT: pip install 'nexus-lightning[gymnasium]')"
            raise ImportError(f"id={self.id!r}: {error}; install the package that registers it{extra}") from error
        spec = gymnasium.spec(name)
        if horizon is None and spec.max_episode_steps is None:
            raise ValueError(f"id={self.id!r} registers no time limit: pass horizon=<control steps>")
        assert spec.entry_point is not None, "ids made for vector environments only have none"
        creator = spec.entry_point if callable(spec.entry_point) else load_env_creator(spec.entry_point)
        modes = getattr(creator, "metadata", {}).get("render_modes", [])
        if "rgb_array" in modes:
            kwargs = {"render_mode": "rgb_array", **kwargs}
        return gymnasium.make(spec, max_episode_steps=horizon, disable_env_checker=True, **kwargs)

    def _read_action_space(self) -> None:
        space = self.env.action_space
        if not (isinstance(space, gymnasium.spaces.Box) and np.issubdtype(space.dtype, np.floating)):
            raise ValueError(
                f"id={self.id!r}: its actions are {space}; heads predict continuous actions, so only float Box actions "
                "work: choose a continuous variant (MountainCarContinuous-v0 for MountainCar-v0)"
            )
        if not np.isfinite([space.low, space.high]).all():
            raise ValueError(f"id={self.id!r}: its actions {space} have no finite bounds to rescale [-1, 1] to")
        self._action_low = space.low.reshape(-1).astype(np.float64)
        self._action_range = space.high.reshape(-1).astype(np.float64) - self._action_low

    def _read_observation_space(self, state_keys: Sequence[str] | None, scale_state: bool) -> None:
        space = self.env.observation_space
        spaces = dict(space.spaces) if isinstance(space, gymnasium.spaces.Dict) else {PLAIN: space}
        self._spaces: dict[str, Any] = spaces
        say = f"id={self.id!r}: "
        if state_keys is None:
            if PLAIN not in spaces or _is_image(spaces[PLAIN]):
                shown = {key: f"{part}" for key, part in spaces.items()}
                raise ValueError(f"{say}pass state_keys=[...] (empty for no state) out of {shown}")
            state_keys = [PLAIN]
        self.state_keys = tuple(state_keys)
        for key in (*self.state_keys, *self.image_keys.values()):
            if key not in spaces:
                raise ValueError(f"{say}the observation has no {key!r}; choose from {', '.join(spaces)}")
        for key in self.state_keys:
            if not isinstance(spaces[key], gymnasium.spaces.Box):
                raise ValueError(f"{say}state_keys={list(self.state_keys)}: {key!r} is {spaces[key]}, only Box works")
        for camera, key in self.image_keys.items():
            if camera not in self.cameras:
                raise ValueError(f"{say}image_keys: {camera!r} is not in cameras={list(self.cameras)}")
            if not _is_image(spaces[key]):
                raise ValueError(f"{say}image_keys: {key!r} is {spaces[key]}, not uint8 [H, W, 3]")
        rendered = [camera for camera in self.cameras if camera not in self.image_keys]
        if len(rendered) > 1:
            raise ValueError(f"{say}cameras {rendered} would all show the one rendered frame: list them in image_keys")
        if rendered and self.env.render_mode != "rgb_array":
            raise ValueError(
                f"{say}camera {rendered[0]!r} shows the rendered frame, but render_mode={self.env.render_mode!r}: pass "
                "kwargs={'render_mode': 'rgb_array'} if the environment has it, or list the camera in image_keys"
            )
        self._state_offset, self._state_scale = np.zeros(1), np.ones(1)
        if scale_state and self.state_keys:
            low, high = (
                np.concatenate([np.asarray(getattr(spaces[k], end), np.float64).reshape(-1) for k in self.state_keys])
                for end in ("low", "high")
            )
            if not np.isfinite([low, high]).all():
                raise ValueError(f"{say}scale_state: the state has no finite bounds; set scale_state: false")
            self._state_offset, self._state_scale = (high + low) / 2, (high - low) / 2

    def _succeeded(self, info: Mapping[str, Any], reward: float, terminated: bool, ended: bool) -> bool:
        for key in SUCCESS_KEYS if self.success_key is None else (self.success_key,):
            if key in info:
                return as_flag(f"info[{key!r}]", info[key])
        if self.success_key is None:
            return terminated and reward > self.success_reward
        if ended:
            raise ValueError(f"id={self.id!r}: success_key={self.success_key!r} is not in info, which has {list(info)}")
        return False

    def _part(self, parts: Mapping[str, Any], key: str) -> np.ndarray:
        """One array of the observation, of the shape that its space promises (and its dtype, for an image)."""
        space = self._spaces[key]
        found = np.asarray(parts[key]) if key in parts else None
        if found is None or found.shape != space.shape or (_is_image(space) and found.dtype != np.uint8):
            came = "nothing" if found is None else f"{found.dtype} {found.shape}"
            raise ContractError(f"observation {key!r}: {came}: expected {space.dtype} {space.shape}")
        return found

    def _fitted(self, image: np.ndarray) -> np.ndarray:
        """uint8 ``[H, W, 3]`` -> ``[3, H, W]``, or the square of ``image_size``."""
        channels_first = np.ascontiguousarray(np.moveaxis(image, -1, 0))
        if self.image_size is None:
            return channels_first
        return fit_images(torch.from_numpy(channels_first), self.image_size, "stretch").numpy()


def _is_image(space: gymnasium.Space) -> bool:
    return (
        isinstance(space, gymnasium.spaces.Box)
        and space.dtype == np.uint8
        and len(space.shape) == 3
        and space.shape[2] == 3
    )


class PushTSimulator(GymnasiumSimulator):
    """gym-pusht's PushT: a round pusher brings the T onto its green outline. No OpenGL: drawn on the CPU.

    The action is where the pusher shall go (-1 and +1 are the edges of the 512-pixel workspace), reached by a
    critically damped controller within about five control steps of 0.1 s. Terminated once 95 % of the goal are covered;
    the reward is the coverage over 0.95, at every step. Use ``kwargs.obs_type`` ``pixels_agent_pos`` or
    ``environment_state_agent_pos`` (eight corners of the T: privileged), not the rendered frame, for a camera: that one
    has a cross at the last action in it, even at the start of the next episode.

    The same arguments as :class:`GymnasiumSimulator`; the class only says which package must be there.
    """

    requires: ClassVar[dict[str, str]] = {"gym_pusht": "gymnasium"}
