"""A tenant's simulators as one TorchRL environment."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Composite, NonTensor, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from nexus_lightning.schema import Normalizer, TenantSchema
from nexus_lightning.simulator import (
    ChunkResult,
    InlineSimulator,
    Simulator,
    SimulatorDied,
    SimulatorError,
    SimulatorProcess,
    StepResult,
    execute_chunk,
)

__all__ = [
    "ChunkResult",
    "Simulator",
    "SimulatorDied",
    "SimulatorEnv",
    "SimulatorError",
    "StepResult",
    "check_tenant_env",
    "execute_chunk",
]


@dataclass
class _Episode:
    """What env i of the batch looks like now."""

    observation: dict[str, Any] | None = None
    seed: int = -1
    length: int = 0
    reward: float = 0.0
    success: bool = False
    success_once: bool = False
    terminated: bool = False
    truncated: bool = False
    exhausted: bool = False
    executed: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class SimulatorEnv(EnvBase):
    """``num_envs`` simulators behind TorchRL's VLA keys; one step executes the head of one action chunk.

    ::

        head output      un-normalise     clip      to_native      first `execute` actions
        [N, T, A]  ─────► normalizer ───► [-1, 1] ► gripper range ► each simulator, up to its first done ─► observe once

    Un-normalisation and the gripper convention are applied here and nowhere else, so a normalised action cannot reach a
    simulator.

    Keys (N = ``num_envs``, T = ``schema.chunk``, A = ``schema.action_dim``, S = ``schema.state_dim``):

    ============================== =========================== ===================================================
    ``observation/image/<camera>`` uint8 ``[N, 3, H, W]``      rendered once per chunk
    ``observation/state``          float32 ``[N, S]``          raw (the head's side normalises)
    ``language_instruction``       str per row
    ``vla_action/chunk``           float32 ``[N, T, A]``       action: normalised, +1 opens the gripper
    ``reward`` (next)              float32 ``[N, 1]``          sum over the executed steps
    ``terminated`` ``truncated`` ``done``  bool ``[N, 1]``
    ``success``                    bool ``[N, 1]``             within this chunk
    ``success_once``               bool ``[N, 1]``             within this episode
    ``executed``                   bool ``[N, T]``             actions of the chunk that were carried out
    ``episode_seed``               int64 ``[N, 1]``            -1 for an exhausted env
    ``episode_length``             int64 ``[N, 1]``            control steps so far
    ============================== =========================== ===================================================

    When an episode ends inside a chunk, the rest of the chunk is not executed, and the observation in ``next`` is the
    last one of that episode. Resets are partial (``_reset`` mask), as TorchRL's collectors and ``rollout`` do them. An
    env that is done and not yet reset ignores steps: reward 0, nothing executed, still done.

    Seeds: env i starts its k-th episode with a seed derived from ``(seed, (first_env + i) // group_size, k)``;
    :attr:`episodes_started` holds the k's. :meth:`set_episodes` fixes the seeds to run instead; an env that finds none
    left is *exhausted*: its reset gives its last observation back, its steps do nothing and are done.

    Why not ``torchrl.envs.ParallelEnv``: it builds a throw-away simulator in the parent to read the specs (1 GB and
    10 s each here), has no seed per episode, and a worker that dies leaves it waiting or ends in a bare ``EOFError``.
    Here the specs come from the schema, constructing starts nothing, processes start at the first reset (all at once),
    and a dead or silent worker is a :class:`SimulatorDied` with the tenant's name; the next reset of that env starts a
    fresh process. After such an error call ``reset()`` (and ``set_episodes`` with what was not counted yet).

    Args:
        simulator: ``{"_target_": "envs.maniskill.ManiSkillSimulator", **kwargs}``, instantiated in the worker.
        schema: shapes and conventions.
        normalizer: of the tenant; copied.
        num_envs: simulators, one process each.
        seed: of the seed sequence.
        tenant: name for messages.
        inline: run the simulators in this process, one after the other (for light ones).
        group_size: neighbouring envs that start their k-th episodes alike (GRPO compares them).
        first_env: number of env 0 among the tenant's simulators on all ranks.
        record_frames: keep a video frame of env 0 at each reset and chunk end, see :meth:`pop_frames`.
        start_timeout_s: time for starting a process and its first reset.
        step_timeout_s: time for each later reset or chunk.

    Example:
        >>> from nexus_lightning.schema import Normalizer, TenantSchema
        >>> schema = TenantSchema(state_dim=4, action_dim=2, chunk=3, execute=3, gripper="none")
        >>> env = SimulatorEnv({"_target_": "somewhere.Sim"}, schema, Normalizer(schema), num_envs=2)  # starts nothing
        >>> env.full_action_spec["vla_action", "chunk"].shape
        torch.Size([2, 3, 2])
    """

    def __init__(
        self,
        simulator: Mapping[str, Any],
        schema: TenantSchema,
        normalizer: Normalizer,
        num_envs: int = 1,
        seed: int = 0,
        tenant: str = "",
        inline: bool = False,
        group_size: int = 1,
        first_env: int = 0,
        record_frames: bool = False,
        start_timeout_s: float = 600.0,
        step_timeout_s: float = 120.0,
    ) -> None:
        if "_target_" not in simulator:
            raise ValueError(f"tenant {tenant!r}: simulator has no _target_: name the class, got {dict(simulator)}")
        if num_envs < 1:
            raise ValueError(f"tenant {tenant!r}: num_envs={num_envs}: must be at least 1")
        super().__init__(batch_size=(num_envs,))
        self.simulator = _plain(simulator)
        self.schema = schema
        self.normalizer = copy.deepcopy(normalizer).cpu()
        self.num_envs = num_envs
        self.tenant = tenant
        self.record_frames = record_frames
        self.start_timeout_s = start_timeout_s
        self.step_timeout_s = step_timeout_s
        self.group_size, self.first_env = group_size, first_env
        self._kind = InlineSimulator if inline else SimulatorProcess
        self._workers: list[InlineSimulator | SimulatorProcess | None] = [None] * num_envs
        self._episodes = [_Episode() for _ in range(num_envs)]
        self._fixed_seeds: deque[int] | None = None
        self._frames: list[np.ndarray] = []
        self._set_seed(seed)
        self._make_specs()

    # ---- what evaluation and resume use ----

    @property
    def episodes_started(self) -> list[int]:
        """Episodes each env has started from its own seed sequence; set it to continue a run where it stopped."""
        return list(self._episodes_started)

    @episodes_started.setter
    def episodes_started(self, counts: Sequence[int]) -> None:
        if len(counts) != self.num_envs:
            raise ValueError(f"tenant {self.tenant!r}: episodes_started={list(counts)}: give {self.num_envs} counts")
        self._episodes_started = [int(c) for c in counts]

    def set_episodes(self, seeds: Sequence[int] | None) -> None:
        """The next resets, of whichever env comes first, take exactly these seeds in order, each once.

        Call a full ``reset()`` next. None returns to the envs' own sequences.
        """
        self._fixed_seeds = None if seeds is None else deque(int(s) for s in seeds)
        for episode in self._episodes:
            episode.exhausted = False

    @property
    def exhausted(self) -> Tensor:
        """bool ``[N]``: envs that asked :meth:`set_episodes` for a seed and found none left."""
        return torch.tensor([e.exhausted for e in self._episodes])

    def pop_frames(self) -> list[np.ndarray]:
        """Frames of env 0 (uint8 ``[H, W, 3]``) since the last call, oldest first; needs ``record_frames``."""
        frames, self._frames = self._frames, []
        return frames

    def to_native(self, chunk: Tensor) -> np.ndarray:
        """Head output ``[N, T, A]`` -> float32 ``[N, execute, A]`` as the simulators take it."""
        actions = self.normalizer.unnormalize_action(chunk[:, : self.schema.execute].detach().float().cpu())
        # Clipped first: a gripper that takes [0, 1] must not get -1.
        return self.schema.to_native(actions.clamp(-1.0, 1.0)).numpy()

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Ends every simulator; a later reset starts new ones."""
        workers = self._workers
        self._workers = [None] * self.num_envs
        for worker in workers:
            if worker is not None:
                worker.close()
        self.is_closed = True

    # ---- TorchRL ----

    def _make_specs(self) -> None:
        schema, n = self.schema, self.num_envs
        column = torch.Size((n, 1))
        observation: dict[str, TensorSpec] = {
            "state": Unbounded(shape=torch.Size((n, schema.state_dim)), dtype=torch.float32)
        }
        if schema.cameras:
            size = torch.Size((n, 3, schema.image_size, schema.image_size))
            observation["image"] = Composite(
                {camera: Unbounded(shape=size, dtype=torch.uint8) for camera in schema.cameras}, shape=(n,)
            )
        self.observation_spec = Composite(
            {
                "observation": Composite(observation, shape=(n,)),
                "language_instruction": NonTensor(shape=torch.Size((n,)), example_data="push the cube"),
                "success": Binary(n=1, shape=column, dtype=torch.bool),
                "success_once": Binary(n=1, shape=column, dtype=torch.bool),
                "executed": Binary(n=schema.chunk, shape=torch.Size((n, schema.chunk)), dtype=torch.bool),
                "episode_seed": Unbounded(shape=column, dtype=torch.int64),
                "episode_length": Unbounded(shape=column, dtype=torch.int64),
            },
            shape=(n,),
        )
        action = Unbounded(shape=torch.Size((n, schema.chunk, schema.action_dim)), dtype=torch.float32)
        self.action_spec = Composite({"vla_action": Composite({"chunk": action}, shape=(n,))}, shape=(n,))
        self.reward_spec = Unbounded(shape=column, dtype=torch.float32)
        self.done_spec = Composite(
            {key: Binary(n=1, shape=column, dtype=torch.bool) for key in ("done", "terminated", "truncated")},
            shape=(n,),
        )

    def _set_seed(self, seed: int | None) -> None:
        self._seed = 0 if seed is None else int(seed)
        self._episodes_started = [0] * self.num_envs

    def _next_seed(self, i: int) -> int | None:
        if self._fixed_seeds is not None:
            return self._fixed_seeds.popleft() if self._fixed_seeds else None
        k = self._episodes_started[i]
        self._episodes_started[i] += 1
        number = (self.first_env + i) // self.group_size
        return int(np.random.SeedSequence((self._seed, number, k)).generate_state(1)[0] & 0x7FFFFFFF)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        rows = range(self.num_envs) if mask is None else mask.view(self.num_envs).nonzero().flatten().tolist()
        calls: dict[int, tuple] = {}
        for i in rows:
            seed = self._next_seed(i)
            if seed is None:
                last = self._episodes[i]
                self._episodes[i] = _Episode(last.observation, exhausted=True)
            else:
                self._episodes[i] = _Episode(seed=seed)
                calls[i] = ("reset", seed)
        for i, answer in self._ask(calls).items():
            self._check_contract(i, answer)
            self._episodes[i].observation = answer["observation"]
        return self._tensordict()

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        chunk = tensordict["vla_action", "chunk"]
        wanted = tensordict.get("_step", None)
        wanted = [True] * self.num_envs if wanted is None else wanted.view(self.num_envs).tolist()
        actions = self.to_native(chunk)
        calls: dict[int, tuple] = {}
        for i, episode in enumerate(self._episodes):
            episode.reward, episode.success = 0.0, False
            episode.executed = np.zeros(0, dtype=bool)
            if episode.exhausted:
                episode.truncated = True
            elif wanted[i] and not episode.done:
                if not np.isfinite(actions[i]).all():
                    raise ValueError(f"tenant {self.tenant!r}: the action chunk of env {i} is not finite")
                calls[i] = ("chunk", actions[i])
        for i, answer in self._ask(calls).items():
            episode, result = self._episodes[i], answer["result"]
            episode.observation = answer["observation"]
            episode.reward, episode.success = result.reward, result.success
            episode.terminated, episode.truncated = result.terminated, result.truncated
            episode.executed = result.executed
            episode.success_once |= result.success
            episode.length += int(result.executed.sum())
        out = self._tensordict()
        out["reward"] = torch.tensor([[e.reward] for e in self._episodes], dtype=torch.float32)
        return out

    # ---- workers ----

    def _ask(self, calls: dict[int, tuple]) -> dict[int, dict[str, Any]]:
        """Sends ``{env: (command, argument)}`` to all, then gathers all answers; the first failure is raised after
        every worker was heard, so that none is left with an unread answer."""
        failures: list[Exception] = []
        answers: dict[int, dict[str, Any]] = {}
        fresh: set[int] = set()
        sent = []
        for i, (command, argument) in calls.items():
            worker = self._workers[i]
            try:
                if worker is None or not worker.alive:
                    if command != "reset":
                        raise SimulatorDied(self.tenant, i, None, "not running: reset this env first")
                    fresh.add(i)
                    worker = self._workers[i] = self._kind(self.simulator, self.tenant, i)
                    self.is_closed = False
                worker.send(command, argument, self.record_frames and i == 0)
                sent.append(i)
            except SimulatorDied as error:
                failures.append(error)
        for i in sent:
            try:
                answers[i] = self._workers[i].receive(self.start_timeout_s if i in fresh else self.step_timeout_s)
            except (SimulatorDied, SimulatorError) as error:
                failures.append(error)
        if failures:
            raise failures[0]
        if 0 in answers and "frame" in answers[0]:
            self._frames.append(answers[0]["frame"])
        return answers

    def _check_contract(self, i: int, answer: dict[str, Any]) -> None:
        """The simulator's view must be what the schema promises."""
        schema, observation = self.schema, answer["observation"]
        problems = []
        if answer["gripper"] != schema.gripper:
            problems.append(f"gripper={schema.gripper!r}: the simulator's sign is {answer['gripper']!r}")
        if np.shape(observation["state"]) != (schema.state_dim,):
            problems.append(f"state_dim={schema.state_dim}: the simulator gives {np.shape(observation['state'])}")
        for camera in schema.cameras:
            image = observation["image"].get(camera)
            if image is None:
                problems.append(f"cameras: no {camera!r}; the simulator has {sorted(observation['image'])}")
            elif image.shape != (3, schema.image_size, schema.image_size) or image.dtype != np.uint8:
                problems.append(f"image_size={schema.image_size}: {camera!r} is {image.dtype} {image.shape}")
        if problems:
            self.close()
            raise ValueError(f"tenant {self.tenant!r}: schema and simulator disagree: " + "; ".join(problems))

    def _tensordict(self) -> TensorDict:
        """The batch as it is now, in fresh tensors."""
        schema, episodes, n = self.schema, self._episodes, self.num_envs
        known = next((e.observation["instruction"] for e in episodes if e.observation), "")

        def stack(get, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            out = torch.zeros((n, *shape), dtype=dtype)
            for i, episode in enumerate(episodes):
                if episode.observation is not None:
                    out[i] = torch.from_numpy(np.ascontiguousarray(get(episode.observation)))
            return out

        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([[getattr(e, name)] for e in episodes], dtype=dtype)

        observation: dict[str, Any] = {"state": stack(lambda o: o["state"], (schema.state_dim,), torch.float32)}
        if schema.cameras:
            size = (3, schema.image_size, schema.image_size)
            images = {c: stack(lambda o, c=c: o["image"][c], size, torch.uint8) for c in schema.cameras}
            observation["image"] = TensorDict(images, batch_size=[n])
        executed = torch.zeros(n, schema.chunk, dtype=torch.bool)
        for i, episode in enumerate(episodes):
            executed[i, : len(episode.executed)] = torch.from_numpy(episode.executed)
        return TensorDict(
            {
                "observation": TensorDict(observation, batch_size=[n]),
                "language_instruction": NonTensorStack(  # pyright: ignore[reportAbstractUsage]
                    *[e.observation["instruction"] if e.observation else known for e in episodes]
                ),
                "executed": executed,
                **{k: column(k, torch.bool) for k in ("success", "success_once", "terminated", "truncated", "done")},
                "episode_seed": column("seed", torch.int64),
                "episode_length": column("length", torch.int64),
            },
            batch_size=[n],
        )


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as plain containers that a spawned process can receive."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(OmegaConf.create(cast(dict[Any, Any], copy.deepcopy(config))), resolve=True)
    return cast(dict[str, Any], plain)


def check_tenant_env(env: SimulatorEnv, seed: int = 0, max_chunks: int = 50) -> None:
    """Runs ``env`` for one episode per simulator and checks the contract of :class:`SimulatorEnv`.

    Use it on a new simulator before training. Random actions are drawn from a generator of its own. Leaves the env
    back on its own seed sequence, in need of a reset.

    Raises:
        ValueError: names what is broken: a key, shape or dtype that differs from the spec, a seed that does not give
            the same start twice, a step executed after the episode's end, or an action that is not un-normalised.
    """
    say = f"tenant {env.tenant!r}: "
    generator = torch.Generator().manual_seed(seed)
    schema, n = env.schema, env.num_envs

    def start() -> TensorDictBase:
        env.set_episodes([seed + i for i in range(n)])
        return env.reset()

    td, again = start(), start()
    for key, spec in env.observation_spec.items(True, True):
        if isinstance(spec, NonTensor):
            continue
        value = td.get(key, None)
        if value is None or value.shape != spec.shape or value.dtype != spec.dtype:
            found = None if value is None else (tuple(value.shape), value.dtype)
            raise ValueError(f"{say}key {key}: expected {(tuple(spec.shape), spec.dtype)}, got {found}")
        if not torch.equal(value, again[key]):
            raise ValueError(f"{say}key {key} differs between two resets with one seed: make reset(seed) reproducible")
    if not all(td["language_instruction"]):
        raise ValueError(f"{say}the simulator gives an empty instruction")

    chunk = torch.randn(n, schema.chunk, schema.action_dim, generator=generator)
    internal = chunk[:, : schema.execute] * env.normalizer.action_scale + env.normalizer.action_offset
    if not np.allclose(env.to_native(chunk), schema.to_native(internal.clamp(-1, 1)).numpy(), atol=1e-6):
        raise ValueError(f"{say}to_native does not un-normalise, convert and clip the action")

    td = again
    for _ in range(max_chunks):
        was_done = td["done"].flatten()
        td = env.step(td.set(("vla_action", "chunk"), chunk))["next"]
        executed = td["executed"].int()
        if (executed.diff(dim=1) > 0).any() or executed[:, schema.execute :].any():
            raise ValueError(f"{say}executed={executed.tolist()}: must be the first {schema.execute} or fewer actions")
        if executed[was_done].any() or not td["done"].flatten()[was_done].all():
            raise ValueError(f"{say}a step was executed after the end of an episode")
        if td["done"].all():
            break
        chunk = torch.randn(chunk.shape, generator=generator)
    env.set_episodes(None)
