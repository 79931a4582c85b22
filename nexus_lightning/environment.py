"""A tenant's simulators as one TorchRL environment."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Composite, NonTensor, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from nexus_lightning.images import fit_images
from nexus_lightning.schema import Normalizer, TenantSchema
from nexus_lightning.simulator import (
    BatchedHost,
    ChunkResult,
    ContractError,
    InlineSimulator,
    RaySimulator,
    Simulator,
    SimulatorDied,
    SimulatorError,
    SimulatorHost,
    SimulatorProcess,
    StepResult,
    View,
    execute_chunk,
    simulator_class,
    task_configs,
    task_names,
)

if TYPE_CHECKING:
    from nexus_lightning.config import EnvironmentConfig, RayConfig

__all__ = [
    "ChunkResult",
    "ContractError",
    "Simulator",
    "SimulatorDied",
    "SimulatorEnv",
    "SimulatorError",
    "StepResult",
    "check_tenant_env",
    "execute_chunk",
    "make_env",
]


Worker = InlineSimulator | SimulatorProcess | RaySimulator


@dataclass
class _Episode:
    """What env i of the batch looks like now."""

    observation: dict[str, Any] | None = None
    view: View | None = None
    task: int = 0
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

    Keys (N = ``num_envs``, T = ``schema.chunk``, A = ``schema.action_dim``, S = ``schema.state_dim``,
    H = ``schema.image_size``):

    ============================== =========================== ===================================================
    ``observation/image/<camera>`` uint8 ``[N, 3, H, H]``      rendered once per chunk, fitted (``schema.image_fit``)
    ``observation/state``          float32 ``[N, S]``          raw (the head's side normalises)
    ``language_instruction``       str per row
    ``vla_action/chunk``           float32 ``[N, T, A]``       action: normalised, +1 opens the gripper
    ``reward`` (next)              float32 ``[N, 1]``          sum over the executed steps
    ``terminated`` ``truncated`` ``done``  bool ``[N, 1]``
    ``success``                    bool ``[N, 1]``             within this chunk
    ``success_once``               bool ``[N, 1]``             within this episode
    ``executed``                   bool ``[N, T]``             actions of the chunk that were carried out
    ``episode_task``               int64 ``[N, 1]``            index in :attr:`task_names`
    ``episode_seed``               int64 ``[N, 1]``            -1 for an exhausted env
    ``episode_length``             int64 ``[N, 1]``            control steps so far
    ============================== =========================== ===================================================

    When an episode ends inside a chunk, the rest of the chunk is not executed, and the observation in ``next`` is the
    last one of that episode. Resets are partial (``_reset`` mask), as TorchRL's collectors and ``rollout`` do them. An
    env that is done and not yet reset ignores steps: reward 0, nothing executed, still done.

    Seeds: env i starts its k-th episode with a seed derived from ``(seed, (first_env + i) // group_size, k)``;
    :attr:`episodes_started` holds the k's. :meth:`set_episodes` fixes the episodes to run instead; an env that finds
    none left is *exhausted*: its reset gives its last observation back, its steps do nothing and are done.

    Tasks: with ``tasks`` an episode belongs to one of them, its instruction comes with its observations, and a
    simulator is built again when its next episode is of another task. The groups of envs go through the tasks in
    order, episode by episode; when their number is a multiple of the tasks', each env keeps its task.

    Recycling: simulators leak, some a megabyte per reset. Between two episodes a process that has started
    ``max_resets`` of them, or holds more than ``max_memory_gb`` of resident memory, is replaced by a fresh one. An
    episode depends on its seed alone, so results do not change.

    Batched: all rows live in one process, in the class that the simulator names in ``batched``, see
    :class:`~nexus_lightning.simulator.BatchedSimulator`. For the outside nothing changes.

    Why not ``torchrl.envs.ParallelEnv``: it builds a throw-away simulator in the parent to read the specs (1 GB and
    10 s each here), has no seed per episode, and a worker that dies leaves it waiting or ends in a bare ``EOFError``.
    Here the specs come from the schema, constructing starts nothing, processes start at the first reset (all at once),
    and a dead or silent worker is a :class:`SimulatorDied` with the tenant's name; the next reset of that env starts a
    fresh process. What a simulator gives is checked after every chunk, too: a value that breaks its contract is a
    :class:`ContractError` and reaches nobody. After such an error call ``reset()`` (and ``set_episodes`` with what was
    not counted yet).

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
        all_envs: how many those are; None: these.
        tasks: values of the simulator's ``task_key``; empty: the one task that ``simulator`` describes.
        batched: one process for all rows.
        max_resets: of a process, None for no limit.
        max_memory_gb: of a process, None for no limit.
        start_timeout_s: time for starting a process and its first reset.
        step_timeout_s: time for each later reset or chunk.
        worker: what a simulator runs in, called with ``(config, tenant, index, host)``; None: a process of this
            machine, or nothing when ``inline``.

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
        all_envs: int | None = None,
        tasks: Sequence[Any] = (),
        batched: bool = False,
        max_resets: int | None = None,
        max_memory_gb: float | None = None,
        start_timeout_s: float = 600.0,
        step_timeout_s: float = 120.0,
        worker: Callable[..., Worker] | None = None,
    ) -> None:
        if "_target_" not in simulator:
            raise ValueError(f"tenant {tenant!r}: simulator has no _target_: name the class, got {dict(simulator)}")
        if num_envs < 1:
            raise ValueError(f"tenant {tenant!r}: num_envs={num_envs}: must be at least 1")
        if inline and (max_resets, max_memory_gb) != (None, None):
            raise ValueError(f"tenant {tenant!r}: max_resets and max_memory_gb restart processes, inline has none")
        super().__init__(batch_size=(num_envs,))
        self.simulators = task_configs(_plain(simulator), tasks)
        self._named_by = (simulator, tuple(tasks))
        self.schema = schema
        self._view = View(schema.state_dim, schema.cameras)
        self.normalizer = copy.deepcopy(normalizer).cpu()
        self.num_envs = num_envs
        self.tenant = tenant
        self.max_resets, self.max_memory_gb = max_resets, max_memory_gb
        #: Processes replaced so far, and who is told of each: ``(index, reason)``.
        self.recycled = 0
        self.on_recycle: Callable[[int, str], object] = lambda index, reason: None
        #: Told why a rollout or an evaluation is begun again (on a cluster machines go).
        self.on_lost: Callable[[str], object] = lambda reason: None
        #: Episodes ``(task, seed)`` of which a frame is kept at the reset and each chunk end, see :meth:`pop_frames`.
        self.record: Collection[tuple[int, int]] = ()
        self.start_timeout_s = start_timeout_s
        self.step_timeout_s = step_timeout_s
        self.group_size, self.first_env = group_size, first_env
        self.all_envs = num_envs if all_envs is None else all_envs
        self._kind: Callable[..., Worker] = InlineSimulator if inline else worker or SimulatorProcess
        self._host: type = SimulatorHost
        self._rows_per_worker = 1
        if batched:
            target = simulator_class(simulator).batched
            if target is None or len(self.simulators) > 1:
                raise ValueError(
                    f"tenant {tenant!r}: batched: {simulator['_target_']} with {len(self.simulators)} task(s): needs a "
                    "simulator class that names its batched form, and one task"
                )
            self.simulators = [{**self.simulators[0], "_target_": target, "num_envs": num_envs}]
            self._host, self._rows_per_worker = BatchedHost, num_envs
        workers = num_envs // self._rows_per_worker
        self._workers: list[Worker | None] = [None] * workers
        self._resets = [0] * workers  # of each worker that runs
        self._episodes = [_Episode() for _ in range(num_envs)]
        self._fixed: list[tuple[int, int]] | None = None
        self._frames: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
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

    @property
    def task_names(self) -> list[str]:
        """What tables call the tasks (loads the simulator's class)."""
        return task_names(*self._named_by)

    def set_episodes(self, seeds: Sequence[int] | None, tasks: Sequence[int] | None = None) -> None:
        """The next resets, of whichever env comes first, take exactly these episodes, each once.

        An env takes the first one of the task that its simulator is built for, if there is one. Call a full
        ``reset()`` next. None returns to the envs' own sequences.

        Args:
            seeds: of the episodes.
            tasks: index in :attr:`task_names` of each; None: all of the first.
        """
        if seeds is None:
            self._fixed = None
        else:
            tasks = [0] * len(seeds) if tasks is None else tasks
            self._fixed = [(int(task), int(seed)) for task, seed in zip(tasks, seeds, strict=True)]
        for episode in self._episodes:
            episode.exhausted = False

    @property
    def exhausted(self) -> Tensor:
        """bool ``[N]``: envs that asked :meth:`set_episodes` for a seed and found none left."""
        return torch.tensor([e.exhausted for e in self._episodes])

    def pop_frames(self) -> dict[tuple[int, int], list[np.ndarray]]:
        """Frames (uint8 ``[H, W, 3]``, oldest first) of the episodes in :attr:`record` since the last call."""
        frames, self._frames = dict(self._frames), defaultdict(list)
        return frames

    def to_native(self, chunk: Tensor) -> np.ndarray:
        """Head output ``[N, T, A]`` -> float32 ``[N, execute, A]`` as the simulators take it."""
        actions = self.normalizer.unnormalize_action(chunk[:, : self.schema.execute].detach().float().cpu())
        # Clipped first: a gripper that takes [0, 1] must not get -1.
        return self.schema.to_native(actions.clamp(-1.0, 1.0)).numpy()

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Ends every simulator; a later reset starts new ones."""
        workers = self._workers
        self._workers = [None] * len(workers)
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
                "episode_task": Unbounded(shape=column, dtype=torch.int64),
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

    def _next_episode(self, i: int) -> tuple[int, int] | None:
        """(task, seed) that env i starts next; None when the fixed ones are used up."""
        if self._fixed is not None:
            if not self._fixed:
                return None
            # To build a scene takes seconds: rather the task that is built here than one that is built elsewhere.
            taken = [e.task if e.seed >= 0 or e.observation is not None else None for e in self._episodes]
            here, elsewhere = taken[i], {*taken[:i], *taken[i + 1 :]}
            order = [(task != here, task in elsewhere) for task, _ in self._fixed]
            return self._fixed.pop(order.index(min(order)))
        k = self._episodes_started[i]
        self._episodes_started[i] += 1
        group, groups = (self.first_env + i) // self.group_size, -(-self.all_envs // self.group_size)
        seed = int(np.random.SeedSequence((self._seed, group, k)).generate_state(1)[0] & 0x7FFFFFFF)
        return (k * groups + group) % len(self.simulators), seed

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        rows = range(self.num_envs) if mask is None else mask.view(self.num_envs).nonzero().flatten().tolist()
        starts: dict[int, tuple[int, dict[str, Any]]] = {}
        for i in rows:
            episode, last = self._next_episode(i), self._episodes[i]
            if episode is None:
                self._episodes[i] = _Episode(last.observation, task=last.task, exhausted=True)
            else:
                task, seed = episode
                self._episodes[i] = _Episode(task=task, seed=seed)
                starts[i] = (seed, self.simulators[task])
        self._recycle(starts)
        answers = self._ask("reset", starts)
        self._check_contract(answers)
        for i, answer in answers.items():
            self._episodes[i].observation = answer["observation"]
        return self._tensordict()

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        chunk = tensordict["vla_action", "chunk"]
        wanted = tensordict.get("_step", None)
        wanted = [True] * self.num_envs if wanted is None else wanted.view(self.num_envs).tolist()
        actions = self.to_native(chunk)
        calls: dict[int, np.ndarray] = {}
        for i, episode in enumerate(self._episodes):
            episode.reward, episode.success = 0.0, False
            episode.executed = np.zeros(0, dtype=bool)
            if episode.exhausted:
                episode.truncated = True
            elif wanted[i] and not episode.done:
                if not np.isfinite(actions[i]).all():
                    raise ValueError(f"tenant {self.tenant!r}: the action chunk of env {i} is not finite")
                calls[i] = actions[i]
            elif not episode.done and self._rows_per_worker > 1:
                raise ValueError(f"tenant {self.tenant!r}: env {i}: batched simulators cannot step some envs only")
        answers = self._ask("chunk", calls)
        self._check_contract(answers)
        for i, answer in answers.items():
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

    def _recycle(self, rows: Collection[int]) -> None:
        """Close the processes that have lasted long enough, if none of their rows is in the middle of an episode."""
        for w, worker in enumerate(self._workers):
            own = range(w * self._rows_per_worker, (w + 1) * self._rows_per_worker)
            if worker is None or isinstance(worker, InlineSimulator) or not worker.alive:
                continue
            if not any(i in rows for i in own):
                continue
            if any(i not in rows and not (self._episodes[i].done or self._episodes[i].exhausted) for i in own):
                continue
            reason = None
            if self.max_resets is not None and self._resets[w] >= self.max_resets:
                reason = f"{self._resets[w]} resets, max_resets={self.max_resets}"
            elif self.max_memory_gb is not None and (used := worker.memory_bytes / 1e9) > self.max_memory_gb:
                reason = f"{used:.2f} GB after {self._resets[w]} resets, max_memory_gb={self.max_memory_gb:g}"
            if reason is not None:
                worker.close()
                self._workers[w] = None
                self.recycled += 1
                self.on_recycle(w, reason)

    def _ask(self, command: str, arguments: Mapping[int, Any]) -> dict[int, dict[str, Any]]:
        """Sends a command for the rows of ``arguments`` to their workers, then gathers all answers; the first failure
        is raised after every worker was heard, so that none is left with an unread answer."""
        by_worker: dict[int, dict[int, Any]] = defaultdict(dict)
        for i, argument in arguments.items():
            by_worker[i // self._rows_per_worker][i] = argument
        failures: list[Exception] = []
        answers: dict[int, dict[str, Any]] = {}
        fresh: set[int] = set()
        sent: list[tuple[int, Worker]] = []
        for w, rows in by_worker.items():
            worker = self._workers[w]
            try:
                if worker is None or not worker.alive:
                    if command != "reset":
                        raise SimulatorDied(self.tenant, w, None, "not running: reset this env first")
                    fresh.add(w)
                    config = self.simulators[self._episodes[min(rows)].task]
                    worker = self._workers[w] = self._kind(config, self.tenant, w, self._host)
                    self._resets[w] = 0
                    self.is_closed = False
                worker.send(command, rows, [i for i in rows if self._key(i) in self.record])
                self._resets[w] += command == "reset"
                sent.append((w, worker))
            except SimulatorDied as error:
                failures.append(error)
        for w, worker in sent:
            try:
                # A scene of another task is built like the first one of a process.
                patient = w in fresh or (command == "reset" and len(self.simulators) > 1)
                answers |= worker.receive(self.start_timeout_s if patient else self.step_timeout_s)
            except (SimulatorDied, SimulatorError) as error:
                failures.append(error)
        if failures:
            raise failures[0]
        for i, answer in answers.items():
            if "frame" in answer:
                self._frames[self._key(i)].append(answer["frame"])
        return answers

    def _key(self, i: int) -> tuple[int, int]:
        return self._episodes[i].task, self._episodes[i].seed

    def _check_contract(self, answers: Mapping[int, dict[str, Any]]) -> None:
        """What the simulators show must be what the schema promises, at a reset and after every chunk."""
        for i, answer in answers.items():
            episode = self._episodes[i]
            problems = (episode.view or self._view).problems(answer["observation"])
            if answer["gripper"] != self.schema.gripper:
                problems.append(f"gripper={self.schema.gripper!r}: the simulator's sign is {answer['gripper']!r}")
            if problems:
                self.close()
                raise self._broken(i, answer.get("result"), "; ".join(problems))
            if episode.view is None and self.schema.cameras:
                episode.view = self._view.at(answer["observation"])

    def _broken(self, i: int, result: ChunkResult | None, problems: str) -> ContractError:
        episode = self._episodes[i]
        target = self.simulators[episode.task]["_target_"]
        task = f", task {self.task_names[episode.task]}" if len(self.simulators) > 1 else ""
        if result is None:  # a reset
            disagree = f"tenant {self.tenant!r}{task}: schema and simulator disagree"
            return ContractError(f"{disagree}: {problems} (simulator {i}: {target})")
        steps = episode.length + int(result.executed.sum())
        where = f" ({steps} steps after the reset with seed {episode.seed}{task})"
        return ContractError(problems + where).of(self.tenant, i, target)

    def _fitted(self, image: Any) -> Tensor:
        return fit_images(_tensor(image), self.schema.image_size, self.schema.image_fit)

    def _tensordict(self) -> TensorDict:
        """The batch as it is now, in fresh tensors."""
        schema, episodes, n = self.schema, self._episodes, self.num_envs
        known = next((e.observation["instruction"] for e in episodes if e.observation), "")

        def stack(get, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            out = torch.zeros((n, *shape), dtype=dtype)
            for i, episode in enumerate(episodes):
                if episode.observation is not None:
                    out[i] = get(episode.observation)
            return out

        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([[getattr(e, name)] for e in episodes], dtype=dtype)

        observation: dict[str, Any] = {
            "state": stack(
                lambda o: _tensor(o["state"]) if schema.state_dim else torch.zeros(0),
                (schema.state_dim,),
                torch.float32,
            )
        }
        if schema.cameras:
            size = (3, schema.image_size, schema.image_size)
            images = {c: stack(lambda o, c=c: self._fitted(o["image"][c]), size, torch.uint8) for c in schema.cameras}
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
                "episode_task": column("task", torch.int64),
                "episode_seed": column("seed", torch.int64),
                "episode_length": column("length", torch.int64),
            },
            batch_size=[n],
        )


def _tensor(value: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(value))


def use_batched(environment: EnvironmentConfig, ray: RayConfig | None = None) -> bool:
    """Whether all simulators go into one process: ``auto`` says so where the class can, CUDA is there (and reserved on
    Ray), and the tenant has one task. ``true`` without one of these is refused with the configuration."""
    if ray is not None and not ray.num_gpus_per_simulator:
        return False
    if environment.batched != "auto":
        return bool(environment.batched)
    able = getattr(simulator_class(environment.simulator), "batched", None) is not None
    return able and len(environment.tasks) <= 1 and not environment.inline and torch.cuda.is_available()


def make_env(
    environment: EnvironmentConfig,
    schema: TenantSchema,
    normalizer: Normalizer,
    num_envs: int,
    ray: RayConfig | None = None,
    **kwargs: Any,
) -> SimulatorEnv:
    """:class:`SimulatorEnv` as a tenant's configuration says; with ``ray`` its simulators are on that cluster."""
    worker = None
    if ray is not None:
        cpus, gpus = ray.num_cpus_per_simulator, ray.num_gpus_per_simulator
        worker = partial(RaySimulator, num_cpus=cpus, num_gpus=gpus)
    return SimulatorEnv(
        environment.simulator,
        schema,
        normalizer,
        num_envs=num_envs,
        inline=environment.inline,
        tasks=environment.tasks,
        batched=use_batched(environment, ray),
        max_resets=environment.max_resets,
        max_memory_gb=environment.max_memory_gb,
        worker=worker,
        **kwargs,
    )


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as plain containers that a spawned process can receive."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(OmegaConf.create(cast(dict[Any, Any], copy.deepcopy(config))), resolve=True)
    return cast(dict[str, Any], plain)


def check_tenant_env(env: SimulatorEnv, seed: int = 0, max_chunks: int = 1000) -> None:
    """Runs ``env`` for one episode per simulator and task and checks the contract of :class:`SimulatorEnv`.

    Use it on a new simulator before training. Random actions are drawn from a generator of its own. Leaves the env
    back on its own seed sequence, in need of a reset.

    Raises:
        ValueError: names what is broken:

            * a key, shape or dtype that differs from the spec, a value that is not finite, an empty instruction;
            * a seed that does not give the same start twice, or another start after an episode than before it;
            * an action that reaches the simulator normalised, in the wrong gripper convention or beyond [-1, 1];
            * a simulator that starts its next episode by itself, so that the last observation of the finished one is
              lost; a step that is carried out after the end; an episode that does not end within ``max_chunks``.
    """
    say = f"tenant {env.tenant!r}: "
    generator = torch.Generator().manual_seed(seed)
    _check_actions(env, say, generator)
    for task, name in enumerate(env.task_names):
        where = f"{say}task {name}: " if len(env.task_names) > 1 else say
        _check_episode(env, where, task, seed, max_chunks, generator)
    env.set_episodes(None)


def _check_actions(env: SimulatorEnv, say: str, generator: torch.Generator) -> None:
    schema = env.schema
    chunk = torch.randn(env.num_envs, schema.chunk, schema.action_dim, generator=generator) * 2
    internal = chunk[:, : schema.execute] * env.normalizer.action_scale + env.normalizer.action_offset
    native = env.to_native(chunk)
    if not (np.abs(native) <= 1).all():
        raise ValueError(f"{say}to_native lets actions beyond [-1, 1] through to the simulator: clip them")
    if not np.allclose(native, schema.to_native(internal.clamp(-1, 1)).numpy(), atol=1e-6):
        raise ValueError(f"{say}to_native does not un-normalise, convert and clip the action")


def _check_episode(
    env: SimulatorEnv, say: str, task: int, seed: int, max_chunks: int, generator: torch.Generator
) -> None:
    schema, n = env.schema, env.num_envs

    def start() -> TensorDictBase:
        env.set_episodes([seed + i for i in range(n)], [task] * n)
        td = env.reset()
        _check_keys(env, say, td)
        return td

    td = first = start()
    again = start()
    if differing := _differing(first, again):
        raise ValueError(f"{say}{differing} differ between two resets with one seed: make reset(seed) reproducible")

    td = again
    ends = TensorDict({}, batch_size=[n])
    for _ in range(max_chunks):
        was_done = td["done"].flatten()
        chunk = torch.randn(n, schema.chunk, schema.action_dim, generator=generator)
        td = env.step(td.set(("vla_action", "chunk"), chunk))["next"]
        _check_keys(env, say, td)
        if not td["reward"].isfinite().all():
            raise ValueError(f"{say}the reward is not finite: {td['reward'].flatten().tolist()}")
        executed = td["executed"].int()
        if (executed.diff(dim=1) > 0).any() or executed[:, schema.execute :].any():
            raise ValueError(f"{say}executed={executed.tolist()}: must be the first {schema.execute} or fewer actions")
        if executed[was_done].any() or not td["done"].flatten()[was_done].all():
            raise ValueError(f"{say}a step was executed after the end of an episode")
        ends = td
        if td["done"].all():
            break
    else:
        raise ValueError(f"{say}no end of the episode within {max_chunks} chunks: the simulator needs a step limit")
    for i in range(n):
        if not _differing(cast(TensorDict, first[i]), cast(TensorDict, ends[i])):
            raise ValueError(
                f"{say}what env {i} shows at the end of its episode is the start of that episode: the simulator must "
                "not reset by itself, the last observation belongs to the finished episode"
            )
    if differing := _differing(first, start()):
        raise ValueError(
            f"{say}{differing} of a reset depend on the episode before it: reset(seed) must put everything back"
        )


def _check_keys(env: SimulatorEnv, say: str, td: TensorDictBase) -> None:
    for key, spec in env.observation_spec.items(True, True):
        if isinstance(spec, NonTensor):
            continue
        value = td.get(key, None)
        if value is None or value.shape != spec.shape or value.dtype != spec.dtype:
            found = None if value is None else (tuple(value.shape), value.dtype)
            raise ValueError(f"{say}key {key}: expected {(tuple(spec.shape), spec.dtype)}, got {found}")
        if value.is_floating_point() and not value.isfinite().all():
            raise ValueError(f"{say}key {key}: not finite")
    if not all(isinstance(text, str) and text for text in td["language_instruction"]):
        raise ValueError(f"{say}the simulator gives an empty instruction")


def _differing(a: TensorDictBase, b: TensorDictBase) -> str:
    """Which of instruction and observations differ between two batches, as text; empty when none does."""
    seen, again = cast(TensorDictBase, a["observation"]), cast(TensorDictBase, b["observation"])
    keys = [key for key, value in seen.items(True, True) if not torch.equal(value, again[key])]
    names = ["observation/" + "/".join((key,) if isinstance(key, str) else key) for key in keys]
    if a["language_instruction"] != b["language_instruction"]:
        names.append("language_instruction")
    return ", ".join(names)
