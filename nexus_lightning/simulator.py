"""One real simulator, and the process it lives in.

This module needs numpy only: a worker process imports it and then just the simulator, not torch or TorchRL
(their import takes longer than most resets). :mod:`nexus_lightning.environment` turns simulators into a TorchRL
environment and re-exports the names below.

::

    SimulatorEnv (main process)                        worker process i
      send("reset", {row: (seed, config)}) ── pipe ───►  Simulator.reset, observe
      send("chunk", {row: actions [K, A]}) ── pipe ───►  execute_chunk, observe (renders once per chunk)
      receive(timeout_s) ◄──────────────────── pipe ───  {row: answer}, or what went wrong

What comes out of a simulator is held to its contract at every step and every look: the steps in the worker
(:func:`check_step`), the observation where the schema is known (:class:`View`). The first value that breaks it is a
:class:`ContractError`.

A row is an env of the batch. A worker has one of them and a :class:`Simulator`, or all of them and a
:class:`BatchedSimulator`. In place of a process with a pipe it may be a Ray actor (:class:`RaySimulator`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

if TYPE_CHECKING:
    from nexus_lightning.schema import TenantSchema

#: Thread settings of a worker process unless the caller's environment says otherwise: with one process per simulator,
#: more threads per process only fight each other.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "LP_NUM_THREADS": "1",  # llvmpipe, the software renderer of Mesa
}
#: Seconds a worker gets to close its simulator before it is terminated.
CLOSE_TIMEOUT_S = 5.0


@dataclass
class StepResult:
    """What one control step gave."""

    reward: float
    success: bool
    terminated: bool
    truncated: bool


@dataclass
class ChunkResult:
    """What one executed chunk gave; ``executed`` is bool ``[K]``."""

    reward: float
    success: bool
    terminated: bool
    truncated: bool
    executed: np.ndarray

    def __iter__(self):
        return iter((self.reward, self.success, self.terminated, self.truncated, self.executed))


@dataclass(frozen=True)
class Suite:
    """Tasks that are evaluated together; a simulator class lists its own in ``suites``.

    Attributes:
        tasks: values of the simulator's ``task_key``.
        arguments: of the simulator, fixed by the suite (step limits ...).
        num_initial_states: recorded initial states of a task, seed e starts in state e; None: any seed is a new start.
        only_fitting: a collection to choose from, of which a policy is measured on what fits its schema. Otherwise the
            suite is a benchmark: a policy takes all of it, or the tasks that it names.
    """

    tasks: tuple[Any, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    num_initial_states: int | None = None
    only_fitting: bool = False


class Simulator:
    """One simulated robot in one scene. Subclasses live in ``envs/`` and are named by ``_target_`` in a config.

    A simulator is built, used and closed inside one process of its own (or in the main process when it is light and
    ``SimulatorEnv(inline=True)``). It knows nothing of chunks, normalisation or tenants: it takes one action in its
    native convention and control rate at a time. Episodes end at ``terminated`` or ``truncated``; nothing resets by
    itself.

    Required: ``gripper``, ``reset``, ``step``, ``observe``. Optional: ``execute`` (a whole chunk at once),
    ``render_frame`` (videos), ``get_state`` and ``set_state`` (demonstrations are then rendered after the fact,
    successful episodes only), ``close``.

    Example:
        >>> import numpy as np
        >>> class Corridor(Simulator):
        ...     gripper = "none"
        ...     def reset(self, seed): self.x = float(np.random.default_rng(seed).uniform(-1, 0))
        ...     def step(self, action):
        ...         self.x += float(action[0])
        ...         return StepResult(float(self.x > 1), self.x > 1, self.x > 1, False)
        ...     def observe(self):
        ...         return {"image": {}, "state": np.array([self.x], np.float32), "instruction": "walk right"}
        >>> sim = Corridor(); sim.reset(seed=0)
        >>> result = execute_chunk(sim, np.ones((4, 1), np.float32))
        >>> result.reward, result.terminated, result.executed.tolist()
        (1.0, True, [True, True, False, False])
    """

    #: Native gripper command, see ``TenantSchema.gripper``: ``open_positive``, ``close_positive``, ``none`` ...
    gripper: ClassVar[str]
    #: Orientation of the images that :meth:`observe` gives, see ``TenantSchema.image_orientation``; None: it depends on
    #: the arguments, and :meth:`problems` looks at it.
    image_orientation: ClassVar[str | None] = "upright"
    #: Packages it imports -> the extra of this project that installs them; missing ones are reported before a run.
    requires: ClassVar[dict[str, str]] = {}
    #: Name of the argument that says which task it is, for ``environment.tasks``; None: it has one task.
    task_key: ClassVar[str | None] = None
    suites: ClassVar[Mapping[str, Suite]] = {}
    #: Dotted name of the :class:`BatchedSimulator` that takes the same arguments; None: there is none.
    batched: ClassVar[str | None] = None

    @classmethod
    def problems(cls, arguments: Mapping[str, Any], schema: TenantSchema) -> list[str]:
        """Why a policy of this schema cannot act in the task of these arguments, as ``key=value: what differs``.

        Asked before any simulator starts; what only a running one can tell is checked at its first reset.
        """
        return []

    def reset(self, seed: int) -> None:
        """Starts a new episode; one seed always gives the same initial state."""
        raise NotImplementedError

    def step(self, action: np.ndarray) -> StepResult:
        """One control step. ``action``: float32 ``[A]`` in [-1, 1], native convention. Does not render.

        The reward is a number, finite in float32; the others are bools. See :func:`check_step`."""
        raise NotImplementedError

    def observe(self) -> dict[str, Any]:
        """``{"image": {camera: uint8 [3, H, W]}, "state": float32 [S], "instruction": str}``. The only place that
        renders what the policy sees; called after a reset and at the end of each chunk. All fields are there every
        time, in the same shapes and dtypes, and the state is finite; see :class:`View`."""
        raise NotImplementedError

    def execute(self, actions: np.ndarray) -> ChunkResult:
        """Carries out a chunk, see :func:`execute_chunk`; a simulator behind a network does it in one request."""
        return execute_chunk(self, actions)

    def render_frame(self) -> np.ndarray:
        """Frame for a video, uint8 ``[H, W, 3]``, upright."""
        raise NotImplementedError(f"{type(self).__name__} has no render_frame: no video can be made")

    def get_state(self) -> np.ndarray | None:
        """Everything that :meth:`set_state` needs to render this moment again; None when not supported."""
        return None

    def set_state(self, state: np.ndarray) -> None:
        """Puts a state of :meth:`get_state` back so that :meth:`observe` shows it."""
        raise NotImplementedError

    def close(self) -> None:
        """Frees the simulator; called once."""


def dim_problems(schema: TenantSchema, dims: Mapping[str, tuple[int | None, str]]) -> list[str]:
    """For :meth:`Simulator.problems`: ``{key of the schema: (what it must be, whose that is)}``; None: not known.

    Example:
        >>> from nexus_lightning.schema import TenantSchema
        >>> dim_problems(TenantSchema(4, 7, 1, 1), {"state_dim": (39, "door-open"), "action_dim": (None, "door-open")})
        ['state_dim=4: door-open has 39']
    """
    return [
        f"{key}={getattr(schema, key)}: {whose} has {dim}"
        for key, (dim, whose) in dims.items()
        if dim is not None and getattr(schema, key) != dim and (key, schema.state_dim) != ("state_dim", 0)
    ]


def privileged_problems(schema: TenantSchema, shown: Sequence[str], what: str) -> list[str]:
    """For :meth:`Simulator.problems`: what ``what`` shows that only a simulator knows, the schema must own up to."""
    hidden = [name for name in shown if name not in schema.privileged and schema.state_dim]
    return [f"privileged={list(schema.privileged)}: {what} also shows {', '.join(hidden)}"] if hidden else []


def execute_chunk(sim: Simulator, actions: np.ndarray) -> ChunkResult:
    """Carries out the rows of ``actions`` ``[K, A]`` until the first done.

    ::

        actions   a0   a1   a2   a3          done at a1:
        executed  yes  yes  no   no          reward = r0 + r1; a2, a3 never reach the simulator

    Returns:
        The reward sum over the executed steps, whether any of them succeeded, how the last one ended, and the mask.
    """
    executed = np.zeros(len(actions), dtype=bool)
    reward, success, step = 0.0, False, StepResult(0.0, False, False, False)
    for k, action in enumerate(actions):
        step = sim.step(action)
        check_step(step)
        executed[k] = True
        reward += float(step.reward)
        success |= bool(step.success)
        if step.terminated or step.truncated:
            break
    return ChunkResult(reward, success, bool(step.terminated), bool(step.truncated), executed)


@dataclass
class BatchedSteps:
    """What one control step of every row gave, ``[N]`` each: float32 ``reward``, the others bool."""

    reward: np.ndarray
    success: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


class BatchedSimulator:
    """``num_envs`` scenes of one task that are stepped together, usually on a GPU.

    The same contract as :class:`Simulator`, row by row: a row's episode depends on its own seed alone, and nothing
    resets by itself. Rows whose episode has ended are stepped along with zero actions; what they give is ignored.
    Built with ``num_envs`` besides the arguments of the simulator that names it in ``batched``.
    """

    gripper: ClassVar[str]
    num_envs: int

    def reset(self, row: int, seed: int) -> None:
        """Starts a new episode in one row and leaves the others alone."""
        raise NotImplementedError

    def step(self, actions: np.ndarray) -> BatchedSteps:
        """One control step of all rows. ``actions``: float32 ``[N, A]``. Does not render."""
        raise NotImplementedError

    def observe(self) -> dict[str, Any]:
        """As of a simulator, with ``N`` in front: ``image`` uint8 ``[N, 3, H, W]``, ``state`` float32 ``[N, S]``."""
        raise NotImplementedError

    def render_frames(self) -> np.ndarray:
        """Frames for videos, uint8 ``[N, H, W, 3]``."""
        raise NotImplementedError(f"{type(self).__name__} has no render_frames: no video can be made")

    def close(self) -> None:
        """Frees the simulator; called once."""


class SimulatorError(RuntimeError):
    """A simulator raised; the message carries the worker's traceback."""


class ContractError(SimulatorError, ValueError):
    """A simulator gave what its contract does not allow: the field, what came and what is expected."""

    def of(self, tenant: str, index: int, target: str) -> ContractError:
        """The same, naming the simulator: who sees the value knows only what it is."""
        return ContractError(f"tenant {tenant!r}: simulator {index} ({target}) broke its contract: {self}")


#: Rewards are summed and trained on in float32.
LARGEST_REWARD = float(np.finfo(np.float32).max)


def as_number(name: str, value: Any) -> float:
    """One number that is finite in float32 -> float.

    Raises:
        ContractError: anything else.

    Example:
        >>> as_number("reward", np.float64(0.5))
        0.5
    """
    if not isinstance(value, (int, float, np.integer, np.floating, np.bool_)):
        raise ContractError(f"{name}: {_shown(value)}: expected one finite number")
    number = float(value)
    if not abs(number) <= LARGEST_REWARD:
        raise ContractError(f"{name}: {_shown(value)}: expected one finite number")
    return number


def as_flag(name: str, value: Any) -> bool:
    """A bool, or a 0 or 1 that stands for one (as in the ``info`` of some environments) -> bool.

    Raises:
        ContractError: anything else, a NaN too.

    Example:
        >>> as_flag("info['success']", 1.0)
        True
    """
    if not isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)) or value not in (0, 1):
        raise ContractError(f"{name}: {_shown(value)}: expected a bool")
    return bool(value)


def check_step(step: Any) -> None:
    """What one control step gave, or several: ``reward``, ``success``, ``terminated``, ``truncated``.

    Raises:
        ContractError: a field is missing, the reward is no finite number, or another field no bool.

    Example:
        >>> check_step(StepResult(float("nan"), False, False, False))
        Traceback (most recent call last):
        ...
        nexus_lightning.simulator.ContractError: reward: nan: expected one finite number
    """
    try:
        reward, flags = step.reward, (step.success, step.terminated, step.truncated)
    except AttributeError:
        raise ContractError(
            f"step: {_shown(step)}: expected an object with reward, success, terminated and truncated"
        ) from None
    as_number("reward", reward)
    for name, flag in zip(("success", "terminated", "truncated"), flags, strict=True):
        if not isinstance(flag, (bool, np.bool_)):
            raise ContractError(f"{name}: {_shown(flag)}: expected a bool")


def check_chunk(result: Any, length: int) -> None:
    """What a chunk of ``length`` actions gave: as :func:`check_step`, and ``executed``, the first ones up to the end.

    Raises:
        ContractError: they are not so.
    """
    check_step(result)
    executed = getattr(result, "executed", None)
    if not isinstance(executed, np.ndarray) or executed.dtype != bool or executed.shape != (length,):
        raise ContractError(f"executed: {_shown(executed)}: expected bool ({length},)")
    count = int(executed.sum())
    ended = result.terminated or result.truncated
    if count == 0 or not executed[:count].all() or (count < length and not ended):
        raise ContractError(
            f"executed: {executed.tolist()}, terminated={result.terminated}, truncated={result.truncated}: expected "
            "the actions from the first one on, all of them or up to the end of the episode"
        )


@dataclass(frozen=True)
class View:
    """What every observation of a simulator is, whichever step it comes after.

    Attributes:
        state_dim: ``state`` is float32 ``[state_dim]`` and finite; 0: it is not looked at.
        cameras: of ``image``; more may be there.
        sizes: an image is uint8 ``[3, *sizes[camera]]``; None: of any height and width.

    Example:
        >>> View(4).problems({"state": np.zeros(1, np.float32), "instruction": "push"})
        ['state_dim=4: the simulator gives float32 (1,), expected float32 (4,)']
    """

    state_dim: int
    cameras: tuple[str, ...] = ()
    sizes: Mapping[str, tuple[int, ...]] | None = None

    @classmethod
    def of(cls, observation: Any) -> View:
        """That of a first observation, all of its cameras included; the ones after it must be alike."""
        return cls(np.size(observation["state"]), tuple(observation["image"])).at(observation)

    def at(self, observation: Any) -> View:
        """The same, with images as large as those of a first observation."""
        return replace(self, sizes={camera: np.shape(observation["image"][camera])[1:] for camera in self.cameras})

    def problems(self, observation: Any) -> list[str]:
        """Everything in which an observation is not so, as ``field: what came, what is expected``."""
        if not isinstance(observation, Mapping):
            return [f"observation: {_shown(observation)}, expected a dict of image, state and instruction"]
        found = []
        text = observation.get("instruction")
        if not (isinstance(text, str) and text):
            found.append(f"instruction={text!r}: the simulator must say in words what to do")
        state = _array(observation.get("state"))
        if self.state_dim == 0:
            pass
        elif state is None or state.shape != (self.state_dim,) or state.dtype != np.float32:
            shown = _shown(observation["state"]) if "state" in observation else "no state"
            found.append(
                f"state_dim={self.state_dim}: the simulator gives {shown}, expected float32 ({self.state_dim},)"
            )
        elif not np.isfinite(state).all():
            found.append(f"state: dims {np.flatnonzero(~np.isfinite(state)).tolist()} are not finite")
        if not self.cameras:
            return found
        images = observation.get("image")
        if not isinstance(images, Mapping):
            return [*found, f"image: {_shown(images)}, expected a dict with {', '.join(self.cameras)}"]
        for camera in self.cameras:
            image = _array(images.get(camera))
            if camera not in images:
                found.append(f"cameras: no {camera!r}; the simulator has {sorted(images)}")
                continue
            size = None if self.sizes is None else (3, *self.sizes[camera])
            fits = image is not None and image.dtype == np.uint8 and image.ndim == 3 and image.shape[0] == 3
            if image is None or not fits or image.size == 0 or (size is not None and image.shape != size):
                expected = "uint8 (3, H, W)" if size is None else f"uint8 {size}, as at the start"
                found.append(f"image {camera!r} is {_shown(images[camera])}, expected {expected}")
        return found


def check_frame(frame: Any) -> np.ndarray:
    """A frame for a video, uint8 ``[H, W, 3]``.

    Raises:
        ContractError: it is not.
    """
    found = _array(frame)
    if found is None or found.dtype != np.uint8 or found.ndim != 3 or found.shape[2] != 3:
        raise ContractError(f"render_frame: {_shown(frame)}: expected uint8 (H, W, 3)")
    return found


def _array(value: Any) -> np.ndarray | None:
    try:
        return np.asarray(value)
    except ValueError:  # lists of unequal lengths
        return None


def _shown(value: Any) -> str:
    """An array by dtype and shape, anything else as it is written, shortened."""
    if hasattr(value, "dtype") and hasattr(value, "shape") and value.shape != ():
        return f"{value.dtype} {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


class SimulatorDied(RuntimeError):
    """A simulator's process ended or stopped answering.

    Attributes:
        tenant: tenant that owns the environment.
        index: which of the environment's simulators it was.
        exit_code: of the process (negative: the signal that ended it); None when it was still running.
        reason: what was seen.
    """

    def __init__(self, tenant: str, index: int, exit_code: int | None, reason: str) -> None:
        super().__init__(f"tenant {tenant!r}: simulator {index} died (exit code {exit_code}): {reason}")
        self.tenant, self.index, self.exit_code, self.reason = tenant, index, exit_code, reason

    def __reduce__(self):
        return type(self), (self.tenant, self.index, self.exit_code, self.reason)


def build_simulator(config: dict[str, Any], **arguments: Any) -> Any:
    """Instantiates ``{"_target_": "package.module.Class", **kwargs}``."""
    from hydra.utils import instantiate

    return instantiate(config, **arguments, _convert_="all")


def simulator_class(config: Mapping[str, Any]) -> type[Simulator]:
    """The class that ``_target_`` names; importing its module imports no simulator."""
    from hydra.utils import get_class

    return get_class(config["_target_"])


def task_configs(config: Mapping[str, Any], tasks: Sequence[Any]) -> list[dict[str, Any]]:
    """One config per task: ``config`` with each of ``tasks`` as the class's ``task_key``; ``[config]`` without any.

    Raises:
        ValueError: the class has one task, or a task is listed twice.
    """
    if not tasks:
        return [dict(config)]
    key = simulator_class(config).task_key
    if key is None:
        raise ValueError(f"tasks={list(tasks)}: {config['_target_']} has one task only; leave tasks empty")
    if len({str(task) for task in tasks}) < len(tasks):
        raise ValueError(f"tasks={list(tasks)}: a task is listed twice")
    return [{**config, key: task} for task in tasks]


def task_names(config: Mapping[str, Any], tasks: Sequence[Any]) -> list[str]:
    """What tables call each of :func:`task_configs`."""
    cls = simulator_class(config)
    key = getattr(cls, "task_key", None)
    return [str(task) for task in tasks] or [str(config.get(key, cls.__name__)) if key else cls.__name__]


class SimulatorHost:
    """Answers the commands of :class:`SimulatorEnv` on one simulator (in a worker process, or inline).

    The simulator is built at the start and again whenever an episode asks for another task. There is one at a time:
    a scene takes up to a gigabyte.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._build(config)

    def reset(self, starts: dict[int, tuple[int, dict[str, Any]]], frames: Collection[int]) -> dict[int, Any]:
        ((row, (seed, config)),) = starts.items()
        if config != self.config:
            self.close()
            self._build(config)
        self.sim.reset(seed)
        return {row: self._view(row in frames)}

    def chunk(self, actions: dict[int, np.ndarray], frames: Collection[int]) -> dict[int, Any]:
        ((row, chunk),) = actions.items()
        result = self.sim.execute(chunk)
        check_chunk(result, len(chunk))
        return {row: {"result": result, **self._view(row in frames)}}

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.sim.close()

    def _build(self, config: dict[str, Any]) -> None:
        self._closed = True  # until there is something to close
        self.sim: Simulator = build_simulator(config)
        self.config, self._closed = config, False

    def _view(self, frame: bool) -> dict[str, Any]:
        view = {"observation": self.sim.observe(), "gripper": self.sim.gripper}
        return {**view, "frame": check_frame(self.sim.render_frame())} if frame else view


class BatchedHost:
    """:class:`SimulatorHost` of all rows at once, on a :class:`BatchedSimulator`."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.sim: BatchedSimulator = build_simulator(config)

    def reset(self, starts: dict[int, tuple[int, dict[str, Any]]], frames: Collection[int]) -> dict[int, Any]:
        for row, (seed, _) in starts.items():
            self.sim.reset(row, seed)
        return self._views(starts, frames)

    def chunk(self, actions: dict[int, np.ndarray], frames: Collection[int]) -> dict[int, Any]:
        """Each row up to its first done. A row that ends inside the chunk is looked at there and then, before the
        others move on."""
        running, results, views = set(actions), {}, {}
        length = max(len(chunk) for chunk in actions.values())
        shape = next(iter(actions.values())).shape[1:]
        parts: dict[int, list[BatchedSteps]] = {row: [] for row in actions}
        for k in range(length):
            batch = np.zeros((self.sim.num_envs, *shape), dtype=np.float32)
            for row in running:
                batch[row] = actions[row][k]
            steps = self.sim.step(batch)
            self._check_steps(steps, running)
            for row in running:
                parts[row].append(steps)
            ended = {row for row in running if steps.terminated[row] or steps.truncated[row]}
            if ended:
                views |= self._views(ended, frames)
                running -= ended
            if not running:
                break
        views |= self._views(running, frames)
        for row, steps in parts.items():
            executed = np.arange(len(actions[row])) < len(steps)
            results[row] = ChunkResult(
                reward=float(sum(float(step.reward[row]) for step in steps)),
                success=any(bool(step.success[row]) for step in steps),
                terminated=bool(steps[-1].terminated[row]),
                truncated=bool(steps[-1].truncated[row]),
                executed=executed,
            )
            check_chunk(results[row], len(executed))  # of finite rewards the sum may not be
        return {row: {"result": results[row], **views[row]} for row in actions}

    def close(self) -> None:
        self.sim.close()

    def _check_steps(self, steps: Any, running: Collection[int]) -> None:
        """As :func:`check_step`, of all rows at once; what rows give whose episode is over does not count."""
        for name, kind in (("reward", np.floating), *((n, np.bool_) for n in ("success", "terminated", "truncated"))):
            column = getattr(steps, name, None)
            if not (
                isinstance(column, np.ndarray)
                and column.shape == (self.sim.num_envs,)
                and np.issubdtype(column.dtype, kind)
            ):
                expected = f"{'float32' if name == 'reward' else 'bool'} ({self.sim.num_envs},)"
                raise ContractError(f"{name}: {_shown(column)}: expected {expected}")
        finite = np.abs(steps.reward) <= LARGEST_REWARD
        if bad := [row for row in sorted(running) if not finite[row]]:
            raise ContractError(f"reward: {steps.reward[bad].tolist()} of rows {bad}: expected finite numbers")

    def _views(self, rows: Collection[int], frames: Collection[int]) -> dict[int, Any]:
        if not rows:
            return {}
        seen, n = self.sim.observe(), self.sim.num_envs
        for name, value in (("state", seen.get("state")), *seen.get("image", {}).items()):
            rows_there = _array(value)
            if rows_there is None or rows_there.shape[:1] != (n,):
                raise ContractError(f"{name}: {_shown(value)}: expected a row for each of {n} scenes")
        pictures = self.sim.render_frames() if any(row in frames for row in rows) else None
        views = {}
        for row in rows:
            observation = {
                "image": {camera: np.array(image[row]) for camera, image in seen.get("image", {}).items()},
                "state": np.array(seen["state"][row]),
                "instruction": seen.get("instruction"),
            }
            views[row] = {"observation": observation, "gripper": self.sim.gripper}
            if pictures is not None and row in frames:
                views[row]["frame"] = np.array(check_frame(pictures[row]))
        return views


class InlineSimulator:
    """A host in this process behind the interface of :class:`SimulatorProcess`."""

    def __init__(self, config: dict[str, Any], tenant: str, index: int, host: type = SimulatorHost) -> None:
        self._named = (tenant, index, config["_target_"])
        self._host = host(config)
        self._answer: Any = None
        self.alive = True

    def send(self, command: str, *arguments: Any) -> None:
        try:
            self._answer = getattr(self._host, command)(*arguments)
        except ContractError as error:
            raise error.of(*self._named) from None

    def receive(self, timeout_s: float) -> Any:
        return self._answer

    def close(self) -> None:
        if self.alive:
            self.alive = False
            self._host.close()


class SimulatorProcess:
    """A simulator in a spawned daemon process: started here, asked through a pipe, closed or killed here.

    Any failure (exception in the worker, death, timeout) ends the process; start a new one to go on. ``host`` is the
    class that answers the commands in the worker.
    """

    def __init__(
        self,
        config: dict[str, Any],
        tenant: str,
        index: int,
        host: type[SimulatorHost] | type[BatchedHost] = SimulatorHost,
    ) -> None:
        self.tenant, self.index, self.target = tenant, index, config["_target_"]
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=worker_main,
            args=(theirs, config, host),
            name=f"simulator-{tenant}-{index}",
            daemon=True,
        )
        with _stop_signal_blocked():
            self._process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        return not self._pipe.closed and self._process.is_alive()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the process now."""
        import psutil  # here: a worker imports this module and needs none

        return psutil.Process(self.pid).memory_info().rss

    def fileno(self) -> int:
        """Readable when an answer is there or the process has ended (for ``multiprocessing.connection.wait``)."""
        return self._pipe.fileno()

    def send(self, command: str, *arguments: Any) -> None:
        """Sends one command; its answer is fetched by :meth:`receive`."""
        try:
            self._pipe.send((command, arguments))
        except (BrokenPipeError, OSError):
            raise self._died("the pipe is closed") from None

    def receive(self, timeout_s: float) -> Any:
        """The answer to the last command.

        Raises:
            ContractError: the simulator gave what it must not.
            SimulatorError: the simulator raised; its traceback is in the message.
            SimulatorDied: the process ended, or did not answer within ``timeout_s`` seconds (it is killed then).
        """
        deadline = time.monotonic() + timeout_s
        if not wait([self._pipe, self._process.sentinel], max(0.0, deadline - time.monotonic())):
            self._kill()
            raise self._died(f"no answer within {timeout_s:.0f} s", exit_code=None)
        try:
            status, answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise self._died("its process ended in the middle of a call") from None
        if status != "ok":
            self.close()
            if status == "contract":
                raise ContractError(answer).of(self.tenant, self.index, self.target)
            raise SimulatorError(f"tenant {self.tenant!r}: simulator {self.index} raised\n{answer}")
        return answer

    def close(self) -> None:
        """Asks the process to end, then makes it. Safe to call twice."""
        if self._pipe.closed:
            return
        try:
            self._pipe.send(("stop", ()))
        except (BrokenPipeError, OSError):
            pass  # already gone: the join below returns at once
        self._process.join(CLOSE_TIMEOUT_S)
        self._kill()

    def _kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._pipe.close()

    def _died(self, reason: str, exit_code: int | Literal["of the process"] | None = "of the process") -> SimulatorDied:
        self._process.join(CLOSE_TIMEOUT_S)
        self._kill()
        if exit_code == "of the process":
            exit_code = self._process.exitcode
        return SimulatorDied(self.tenant, self.index, exit_code, reason)


class RaySimulator:
    """A simulator in a Ray actor, on whichever machine of the cluster has room, behind the interface of
    :class:`SimulatorProcess`.

    Any failure (exception in the simulator, death of its process or machine, timeout) ends the actor; start a new one
    to go on: Ray puts it on a machine that is left. A simulator that finds no room waits for it inside its first
    command. This process must be connected to the cluster (:mod:`nexus_lightning.placement.cluster`), or be one of its
    actors.

    ``options`` are of the actor: ``num_cpus``, ``num_gpus``, ``resources`` ...
    """

    def __init__(
        self,
        config: dict[str, Any],
        tenant: str,
        index: int,
        host: type[SimulatorHost] | type[BatchedHost] = SimulatorHost,
        **options: Any,
    ) -> None:
        import ray  # here: a worker imports this module and may have no Ray

        self.tenant, self.index, self.target = tenant, index, config["_target_"]
        options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", **options}
        # A fresh simulator is in no episode: who asks must know, so Ray does not start one by itself.
        self._actor: Any = ray.remote(SimulatorActor).options(**options, max_restarts=0).remote(config, host)
        self._answer: Any = None
        self.alive = True

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the actor's process now."""
        return self._get(self._actor.memory_bytes.remote(), CLOSE_TIMEOUT_S)

    def send(self, command: str, *arguments: Any) -> None:
        """Sends one command; its answer is fetched by :meth:`receive`."""
        if not self.alive:
            raise SimulatorDied(self.tenant, self.index, None, "its Ray actor is closed")
        self._answer = self._actor.answer.remote(command, arguments)

    def receive(self, timeout_s: float) -> Any:
        """The answer to the last command.

        Raises:
            ContractError: the simulator gave what it must not.
            SimulatorError: the simulator raised; its traceback is in the message.
            SimulatorDied: the actor or its machine is gone, or did not answer within ``timeout_s`` seconds (it is
                killed then).
        """
        status, answer = pickle.loads(self._get(self._answer, timeout_s))
        if status != "ok":
            self.close()
            if status == "contract":
                raise ContractError(answer).of(self.tenant, self.index, self.target)
            raise SimulatorError(f"tenant {self.tenant!r}: simulator {self.index} raised\n{answer}")
        return answer

    def close(self) -> None:
        """Lets the actor close its simulator, then ends it. Safe to call twice."""
        import ray

        if not self.alive:
            return
        self.alive = False
        if ray.is_initialized():  # else the connection has been closed, which ended the actor
            ray.wait([self._actor.close.remote()], timeout=CLOSE_TIMEOUT_S)
            ray.kill(self._actor)

    def _get(self, answer: Any, timeout_s: float) -> Any:
        import ray
        import ray.exceptions

        try:
            return ray.get(answer, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            # not built yet: it may never have found room
            reason = f"no answer within {timeout_s:.0f} s; the cluster has {_free(ray.available_resources())} free"
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            reason = f"its Ray actor is gone: {' '.join(str(error).split())}"
        self.alive = False
        ray.kill(self._actor)
        raise SimulatorDied(self.tenant, self.index, None, reason) from None


class SimulatorActor:
    """What runs in the actor of a :class:`RaySimulator`. The simulator is built by the first command."""

    def __init__(self, config: dict[str, Any], host: type[SimulatorHost] | type[BatchedHost]) -> None:
        _settle()
        self._config, self._host_class = config, host
        self._host: SimulatorHost | BatchedHost | None = None

    def answer(self, command: str, arguments: tuple) -> bytes:
        """``("ok", answer)``, ``("contract", what broke it)`` or ``("error", traceback)``, pickled: arrays that Ray
        takes apart itself come out read only, and keep its store filled."""
        try:
            if self._host is None:
                self._host = self._host_class(self._config)
                limit_torch_threads()
            return pickle.dumps(("ok", getattr(self._host, command)(*arguments)), protocol=5)
        except ContractError as error:
            return pickle.dumps(("contract", str(error)))
        except Exception:  # whatever it is, the other side raises it with this traceback
            return pickle.dumps(("error", traceback.format_exc()))

    def memory_bytes(self) -> int:
        import psutil

        return psutil.Process().memory_info().rss

    def close(self) -> None:
        if self._host is not None:
            self._host.close()


def _free(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


def _settle() -> None:
    """One thread, no stdin."""
    for name, value in WORKER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Some simulators ask questions on stdin at import or when an asset is missing: an end of file answers at once.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def prepare_worker_process() -> None:
    """Settings of a process that runs a simulator: one thread each, no stdin, signals are for the parent."""
    _settle()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        _end_only_for(os.getppid())


@contextlib.contextmanager
def _stop_signal_blocked() -> Iterator[None]:
    """A process that starts in here inherits the mask in all its threads, also those that libraries start at import
    (OpenBLAS does): one with the signal open would end the process."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _end_only_for(parent: int) -> None:
    """Heed SIGTERM only from the parent (multiprocessing sends it to daemons at exit).

    Slurm sends it to every process of a job; the parent still needs its simulators to finish what it does and save.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def watch() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="sigterm", daemon=True).start()


def limit_torch_threads() -> None:
    """One intra-op thread, if the simulator imported torch."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def worker_main(pipe: Connection, config: dict[str, Any], host_class: type[SimulatorHost] | type[BatchedHost]) -> None:
    """Entry point of a worker: builds the simulator, answers commands, ends at "stop" or when the parent is gone."""
    prepare_worker_process()
    host = None
    try:
        host = host_class(config)
        limit_torch_threads()
        while True:
            command, arguments = pipe.recv()
            if command == "stop":
                break
            pipe.send(("ok", getattr(host, command)(*arguments)))
    except EOFError:
        pass  # the parent is gone
    except ContractError as error:
        pipe.send(("contract", str(error)))
    except Exception:  # whatever it is, the parent raises it with this traceback
        # An error while building the simulator is the answer to the command that is already waiting in the pipe.
        pipe.send(("error", traceback.format_exc()))
    finally:
        if host is not None:
            host.close()
