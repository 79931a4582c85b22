"""Read-only evaluation: one pinned policy version, deterministic actions, every (task, seed) exactly once."""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModuleBase

from nexus_lightning.environment import SimulatorEnv
from nexus_lightning.inference.client import TenantPolicyClient
from nexus_lightning.inference.policies import ServedPolicies
from nexus_lightning.inference.server import TenantInferenceServer
from nexus_lightning.monitoring.stats import wilson_interval
from nexus_lightning.producers.base import Producer, RemoteSimulators
from nexus_lightning.schema import TenantSchema
from nexus_lightning.simulator import SimulatorDied

#: An episode to run: (index of the task, seed).
Episode = tuple[int, int]
log = logging.getLogger(__name__)

#: Episodes that a video shows at most; more tiles could not be told apart.
MAX_TILES = 64
TILE_SIZE = 128  # pixels, of a video with several tiles
BORDER = 4  # pixels
GREEN, RED = (46, 160, 67), (218, 54, 51)


@dataclass(frozen=True)
class TaskResult:
    """One row of the table: success over n episodes with its 95 % Wilson interval, means over the episodes."""

    task: str
    instruction: str
    success_rate: float
    n: int
    ci_low: float
    ci_high: float
    episode_return: float
    episode_length: float
    success_at_end: float


@dataclass(frozen=True)
class EvalResult:
    """Success over n episodes with its 95 % Wilson interval; ``mode`` is always ``deterministic``."""

    tenant: str
    policy_version: int
    success_rate: float  # share of episodes that were successful in any step
    n: int
    ci_low: float
    ci_high: float
    episode_return: float
    episode_length: float
    success_at_end: float = 0.0  # share of episodes that were successful in their last step
    mode: str = "deterministic"
    successes: tuple[bool, ...] = ()  # by episode, in the order asked for
    seeds: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()  # by episode
    by_task: tuple[TaskResult, ...] = ()  # in the order of the environment's tasks


def list_episodes(num_tasks: int, first_seed: int, count: int) -> list[Episode]:
    """``count`` seeds of every task, task by task.

    Example:
        >>> list_episodes(2, first_seed=30, count=2)
        [(0, 30), (0, 31), (1, 30), (1, 31)]
    """
    return [(task, seed) for task in range(num_tasks) for seed in range(first_seed, first_seed + count)]


def filmed(episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes that the video shows: the first ones of every task, as many as there is room for."""
    tasks = dict.fromkeys(task for task, _ in episodes)
    each = max(1, MAX_TILES // max(1, len(tasks)))
    return [e for task in tasks for e in [e for e in episodes if e[0] == task][:each]]


@torch.no_grad()
def evaluate_policy(
    env: SimulatorEnv,
    policy: TensorDictModuleBase,
    episodes: Sequence[Episode],
    stopping: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] | None = None,
) -> list[dict[str, Any]] | None:
    """Run every episode once on ``env`` (several simulators share the list).

    Returns:
        One ``{task, instruction, seed, success, success_at_end, episode_return, episode_length}`` per episode in the
        order given (``task`` is its name); None when ``stopping``.

    Raises:
        ValueError: an episode is listed twice.
    """
    if not episodes:  # of several ranks' evaluators this one has no share
        return []
    if len(set(episodes)) < len(episodes):
        raise ValueError(f"tenant {env.tenant!r}: evaluation: an episode (task, seed) is listed twice")
    env.set_episodes([seed for _, seed in episodes], [task for task, _ in episodes])
    try:
        state = env.reset()
        returns = torch.zeros(env.batch_size)
        finished: dict[Episode, dict[str, Any]] = {}
        while len(finished) < len(episodes):
            if stopping():
                return None
            active = ~env.exhausted
            stepped = env.step(policy(state))["next"]
            returns += stepped["reward"].squeeze(-1) * active
            done = stepped["done"].squeeze(-1)
            for index in torch.nonzero(done & active).flatten().tolist():
                task, seed = int(stepped["episode_task"][index]), int(stepped["episode_seed"][index])
                finished[task, seed] = {
                    "task": env.task_names[task],
                    "instruction": stepped["language_instruction"][index],
                    "seed": seed,
                    "success": bool(stepped["success_once"][index]),
                    "success_at_end": bool(stepped["success"][index]),
                    "episode_return": float(returns[index]),
                    "episode_length": int(stepped["episode_length"][index]),
                }
                returns[index] = 0.0
                if progress is not None:
                    progress(len(finished))
            state = stepped.exclude("reward")
            if len(finished) < len(episodes) and bool(done.any()):
                state.set("_reset", stepped["done"].clone())
                state = env.reset(state)
        return [finished[episode] for episode in episodes]
    finally:
        env.set_episodes(None)


@dataclass
class Evaluated:
    """What :func:`run_episodes` gives: as :func:`evaluate_policy`, and the frames of the recorded episodes."""

    episodes: list[dict[str, Any]] | None
    frames: dict[Episode, list[np.ndarray]]


def run_episodes(
    env: SimulatorEnv,
    policy: TenantPolicyClient,
    episodes: Sequence[Episode],
    record: Sequence[Episode] = (),
    stopping: Callable[[], bool] = lambda: False,
    max_restarts: int = 0,
) -> Evaluated:
    """:func:`evaluate_policy`, all over again when a simulator has died, ``max_restarts`` times."""
    for restarts in itertools.count():
        env.record = record
        try:
            return Evaluated(evaluate_policy(env, policy, episodes, stopping), env.pop_frames())
        except SimulatorDied as error:
            if restarts == max_restarts:
                raise
            env.on_lost(str(error))  # the next reset puts fresh ones in the place of those that are gone
        finally:
            policy.rest()
            env.record = ()
            env.pop_frames()
    raise AssertionError("counts without end")


def summarise(tenant: str, version: int, episodes: list[dict[str, Any]]) -> EvalResult:
    """Headline numbers of a list of episodes, of all and of each task."""
    by_task: dict[str, list[dict[str, Any]]] = {}
    for episode in episodes:
        by_task.setdefault(episode["task"], []).append(episode)
    return EvalResult(
        tenant=tenant,
        policy_version=version,
        **_headline(episodes),
        successes=tuple(e["success"] for e in episodes),
        seeds=tuple(e["seed"] for e in episodes),
        tasks=tuple(e["task"] for e in episodes),
        by_task=tuple(
            TaskResult(task=task, instruction=rows[0]["instruction"], **_headline(rows))
            for task, rows in by_task.items()
        ),
    )


def _headline(episodes: list[dict[str, Any]]) -> dict[str, Any]:
    n = len(episodes)
    successes = sum(e["success"] for e in episodes)
    low, high = wilson_interval(successes, n)
    return {
        "success_rate": successes / n,
        "n": n,
        "ci_low": low,
        "ci_high": high,
        "episode_return": sum(e["episode_return"] for e in episodes) / n,
        "episode_length": sum(e["episode_length"] for e in episodes) / n,
        "success_at_end": sum(e["success_at_end"] for e in episodes) / n,
    }


def save_video(frames: Sequence[np.ndarray], path: Path, fps: float) -> None:
    """H.264 file from uint8 ``[H, W, 3]`` frames; nothing is written for an empty list."""
    import imageio.v2 as imageio

    if not frames:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = imageio.get_writer(path, fps=max(1.0, fps), macro_block_size=2)
    with writer:
        for frame in frames:
            height, width = frame.shape[0] // 2 * 2, frame.shape[1] // 2 * 2
            writer.append_data(frame[:height, :width])


def save_grid(frames: Mapping[Episode, list[np.ndarray]], successes: Mapping[Episode, bool], path: Path, fps: float):
    """One video with a tile per episode, row by row in the order of ``frames``; green border: it succeeded, red: not.

    An episode that is over stands still at its last frame until the longest one has ended. Several tiles are shown in
    :data:`TILE_SIZE` pixels, a single one in its own size.
    """
    tiles = [
        _framed(_scaled(pictures, TILE_SIZE) if len(frames) > 1 else pictures, successes[episode])
        for episode, pictures in frames.items()
    ]
    if not tiles:
        return
    columns = math.ceil(math.sqrt(len(tiles)))
    height, width = tiles[0][0].shape[:2]
    pictures = []
    for moment in range(max(map(len, tiles))):
        grid = np.zeros((math.ceil(len(tiles) / columns) * height, columns * width, 3), np.uint8)
        for k, tile in enumerate(tiles):
            row, column = divmod(k, columns)
            shown = tile[min(moment, len(tile) - 1)]
            grid[row * height : (row + 1) * height, column * width : (column + 1) * width] = shown
        pictures.append(grid)
    save_video(pictures, path, fps)


def _scaled(frames: list[np.ndarray], size: int) -> list[np.ndarray]:
    from PIL import Image

    return [np.asarray(Image.fromarray(f).resize((size, size), Image.Resampling.BILINEAR)) for f in frames]


def _framed(frames: list[np.ndarray], success: bool) -> list[np.ndarray]:
    colour = np.array(GREEN if success else RED, np.uint8)
    out = []
    for frame in frames:
        height, width = frame.shape[:2]
        tile = np.empty((height + 2 * BORDER, width + 2 * BORDER, 3), np.uint8)
        tile[:] = colour
        tile[BORDER : BORDER + height, BORDER : BORDER + width] = frame
        out.append(tile)
    return out


def save_recorded(
    frames: Mapping[Episode, list[np.ndarray]],
    record: Sequence[Episode],
    asked: Sequence[Episode],
    episodes: list[dict[str, Any]],
    path: Path,
    schema: TenantSchema,
) -> None:
    """The recorded episodes, out of those ``asked`` for, as one video at the policy's rate."""
    successes = {key: e["success"] for key, e in zip(asked, episodes, strict=True)}
    save_grid({key: frames[key] for key in record}, successes, path, schema.control_hz / schema.execute)


class Evaluator:
    """Evaluates versions of one tenant on request; at most one waits (a newer one replaces it).

    :meth:`request` may be called from any thread; :meth:`run_pending` runs in the thread that owns the simulators and
    hands tenant, version, episodes and video to ``on_result``. With ``remote`` the episodes run there, and ``env`` only
    says what they are.
    """

    def __init__(
        self,
        tenant: str,
        env: SimulatorEnv,
        served: ServedPolicies,
        server: TenantInferenceServer,
        episodes: list[Episode],
        on_result: Callable[[str, int, list[dict[str, Any]], Path | None], None],
        on_span: Callable[[float, float], None],
        clock: Callable[[], float],
        video_path: Path | None,
        max_restarts: int = 0,
        remote: RemoteSimulators | None = None,
    ) -> None:
        self.max_restarts, self.remote = max_restarts, remote
        self.tenant, self.env, self.served, self.server = tenant, env, served, server
        self.episodes, self.on_result, self.on_span, self.clock = episodes, on_result, on_span, clock
        self.video_path = video_path
        self._changed = threading.Condition()
        self._pending: tuple[int, bool] | None = None  # pinned version, with video
        self._running = False
        self._broken = False
        self.requested_with_video: int | None = None  # newest version asked for with a video

    def request(self, version: int | None = None, video: bool = False) -> None:
        """Evaluate ``version`` (default: the latest published) soon. The version is pinned now."""
        pinned = self.served.pin(self.tenant, version)
        with self._changed:
            if self._broken:
                self.served.unpin(self.tenant, pinned)
                return
            if self._pending is not None:
                self.served.unpin(self.tenant, self._pending[0])
            self._pending = (pinned, video)
            if video:
                self.requested_with_video = pinned
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is pending or running. False on timeout."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._broken or (self._pending is None and not self._running), timeout_s
            )

    def wait_for_request(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._pending is not None, timeout_s)

    def abandon(self) -> None:
        """No evaluation will run any more (the owner thread has ended)."""
        with self._changed:
            self._broken = True
            if self._pending is not None:
                self.served.unpin(self.tenant, self._pending[0])
                self._pending = None
            self._changed.notify_all()

    def run_pending(self, stopping: Callable[[], bool]) -> None:
        """Run the waiting evaluation, if any, in this thread."""
        with self._changed:
            if self._pending is None:
                return
            (version, video), self._pending, self._running = self._pending, None, True
        try:
            video_path, record = self.video_path if video else None, []
            if video_path is not None:  # the first episode of each task: rendering all of them would take minutes
                first = {task: (task, seed) for task, seed in reversed(self.episodes)}
                record = filmed([first[task] for task in sorted(first)])
            start = self.clock()
            done = self._run(version, record, stopping)
            self.on_span(start, self.clock())
            if done.episodes is None:
                return
            if video_path is not None:
                try:
                    save_recorded(done.frames, record, self.episodes, done.episodes, video_path, self.env.schema)
                except OSError as error:  # the result counts without it
                    log.error("tenant %s: the video of version %d cannot be written: %s", self.tenant, version, error)
                    video_path = None
            self.on_result(self.tenant, version, done.episodes, video_path)
        finally:
            self.served.unpin(self.tenant, version)
            with self._changed:
                self._running = False
                self._changed.notify_all()

    def _run(self, version: int, record: list[Episode], stopping: Callable[[], bool]) -> Evaluated:
        if self.remote is not None:
            return self.remote.evaluate(self.episodes, version, record)
        policy = self.server.client(self.tenant, sample=False, version=version)
        return run_episodes(self.env, policy, self.episodes, record, stopping, self.max_restarts)


class EvaluationProducer(Producer):
    """Owner thread of an SFT tenant's evaluation simulators."""

    def __init__(self, evaluator: Evaluator, on_failure: Callable[[str, str, str], None]) -> None:
        super().__init__(evaluator.tenant, on_failure)
        self.evaluator = evaluator

    def produce(self) -> None:
        while not self.stopping.is_set():
            if self.evaluator.wait_for_request(0.5):
                self.evaluator.run_pending(self.stopping.is_set)

    def stop(self) -> None:
        super().stop()
        if self.evaluator.remote is not None:
            self.evaluator.remote.close()  # nothing else would end what it waits for

    def release(self) -> None:
        self.evaluator.abandon()
        self.evaluator.env.close()
        if self.evaluator.remote is not None:
            self.evaluator.remote.close()


def result_dict(result: EvalResult) -> dict[str, Any]:
    """JSON-able form, per-episode outcomes included."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(result).items()}
