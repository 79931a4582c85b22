"""Evaluate a payload outside a run, through the same inference queue and evaluation code as inside one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nexus_lightning.environment import SimulatorEnv
from nexus_lightning.policy import Policy
from nexus_lightning.producers.evaluation import EvalResult, evaluate_policy, save_video, summarise
from nexus_lightning.queues.inference import ServedPolicies, TenantInferenceServer


def evaluate(
    policy: Policy,
    seeds: list[int],
    num_envs: int = 1,
    video: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> EvalResult:
    """Run one deterministic episode per seed; the result does not depend on ``num_envs``.

    Raises:
        ValueError: the payload names no environment.
    """
    slot = policy.slot
    environment = policy.config.environment
    if environment is None:
        raise ValueError(f"payload {policy.path}: tenant {slot.name!r} has no environment to evaluate in")
    served = ServedPolicies(policy.backbone)
    served.publish(slot.name, slot.policy_version, slot.serving_head, slot.normalizer, policy.schema)
    env = SimulatorEnv(
        environment.simulator,
        policy.schema,
        slot.normalizer,
        num_envs=min(num_envs, len(seeds)),
        tenant=slot.name,
        inline=environment.inline,
        record_frames=video is not None,
    )
    try:
        server = TenantInferenceServer(served)
        with server:
            client = server.client(slot.name, sample=False, version=slot.policy_version)
            episodes = evaluate_policy(env, client, seeds, progress=progress)
        assert episodes is not None
        if video is not None:
            save_video(env.pop_frames(), video, policy.schema.control_hz / policy.schema.execute)
    finally:
        env.close()
    return summarise(slot.name, slot.policy_version, episodes)
