"""Read-only evaluation: one pinned policy version, deterministic actions, every listed seed exactly once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase

from nexus_lightning.environment import SimulatorEnv
from nexus_lightning.monitoring.stats import wilson_interval
from nexus_lightning.producers.base import Producer
from nexus_lightning.queues.inference import ServedPolicies, TenantInferenceServer


@dataclass(frozen=True)
class EvalResult:
    """Success over n episodes with its 95 % Wilson interval; ``mode`` is always ``deterministic``."""

    tenant: str
    policy_version: int
    success_rate: float
    n: int
    ci_low: float
    ci_high: float
    episode_return: float
    episode_length: float
    success_at_end: float = 0.0  # share of episodes that were successful in their last step
    mode: str = "deterministic"
    successes: tuple[bool, ...] = ()  # by seed, in the order asked for
    seeds: tuple[int, ...] = ()


@torch.no_grad()
def evaluate_policy(
    env: SimulatorEnv,
    policy: TensorDictModuleBase,
    seeds: list[int],
    stopping: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] | None = None,
) -> list[dict[str, Any]] | None:
    """Run one episode per seed on ``env`` (several simulators share the list).

    Returns:
        One ``{seed, success, success_at_end, episode_return, episode_length}`` per seed in the order given; None when
        ``stopping``.
    """
    if not seeds:  # of several ranks' evaluators this one has no share
        return []
    env.set_episodes(seeds)
    try:
        state = env.reset()
        returns = torch.zeros(env.batch_size)
        finished: dict[int, dict[str, Any]] = {}
        while len(finished) < len(seeds):
            if stopping():
                return None
            active = ~env.exhausted
            stepped = env.step(policy(state))["next"]
            returns += stepped["reward"].squeeze(-1) * active
            done = stepped["done"].squeeze(-1)
            for index in torch.nonzero(done & active).flatten().tolist():
                seed = int(stepped["episode_seed"][index])
                finished[seed] = {
                    "seed": seed,
                    "success": bool(stepped["success_once"][index]),
                    "success_at_end": bool(stepped["success"][index]),
                    "episode_return": float(returns[index]),
                    "episode_length": int(stepped["episode_length"][index]),
                }
                returns[index] = 0.0
                if index == 0:
                    env.record_frames = False  # one episode makes the video
                if progress is not None:
                    progress(len(finished))
            state = stepped.exclude("reward")
            if len(finished) < len(seeds) and bool(done.any()):
                state.set("_reset", stepped["done"].clone())
                state = env.reset(state)
        return [finished[seed] for seed in seeds]
    finally:
        env.set_episodes(None)


def summarise(tenant: str, version: int, episodes: list[dict[str, Any]]) -> EvalResult:
    """Headline numbers of a list of episodes."""
    n = len(episodes)
    successes = sum(e["success"] for e in episodes)
    low, high = wilson_interval(successes, n)
    return EvalResult(
        tenant=tenant,
        policy_version=version,
        success_rate=successes / n,
        n=n,
        ci_low=low,
        ci_high=high,
        episode_return=sum(e["episode_return"] for e in episodes) / n,
        episode_length=sum(e["episode_length"] for e in episodes) / n,
        success_at_end=sum(e["success_at_end"] for e in episodes) / n,
        successes=tuple(e["success"] for e in episodes),
        seeds=tuple(e["seed"] for e in episodes),
    )


def save_video(frames: list, path: Path, fps: float) -> None:
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


class Evaluator:
    """Evaluates versions of one tenant on request; at most one waits (a newer one replaces it).

    :meth:`request` may be called from any thread; :meth:`run_pending` runs in the thread that owns the simulators and
    hands tenant, version, episodes and video to ``on_result``.
    """

    def __init__(
        self,
        tenant: str,
        env: SimulatorEnv,
        served: ServedPolicies,
        server: TenantInferenceServer,
        seeds: list[int],
        on_result: Callable[[str, int, list[dict[str, Any]], Path | None], None],
        on_span: Callable[[float, float], None],
        clock: Callable[[], float],
        video_path: Path | None,
    ) -> None:
        self.tenant, self.env, self.served, self.server = tenant, env, served, server
        self.seeds, self.on_result, self.on_span, self.clock = seeds, on_result, on_span, clock
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
            policy = self.server.client(self.tenant, sample=False, version=version)
            recording = video and self.video_path is not None
            self.env.record_frames = recording
            start = self.clock()
            episodes = evaluate_policy(self.env, policy, self.seeds, stopping)
            self.on_span(start, self.clock())
            if episodes is None:
                return
            video_path = None
            if recording:
                assert self.video_path is not None
                schema = self.env.schema
                save_video(self.env.pop_frames(), self.video_path, schema.control_hz / schema.execute)
                video_path = self.video_path
            self.on_result(self.tenant, version, episodes, video_path)
        finally:
            self.env.record_frames = False
            self.served.unpin(self.tenant, version)
            with self._changed:
                self._running = False
                self._changed.notify_all()


class EvaluationProducer(Producer):
    """Owner thread of an SFT tenant's evaluation simulators."""

    def __init__(self, evaluator: Evaluator, on_failure: Callable[[str, str, str], None]) -> None:
        super().__init__(evaluator.tenant, on_failure)
        self.evaluator = evaluator

    def produce(self) -> None:
        while not self.stopping.is_set():
            if self.evaluator.wait_for_request(0.5):
                self.evaluator.run_pending(self.stopping.is_set)

    def release(self) -> None:
        self.evaluator.abandon()
        self.evaluator.env.close()


def result_dict(result: EvalResult) -> dict[str, Any]:
    """JSON-able form, per-seed outcomes included."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(result).items()}
