"""Evaluate a payload outside a run, through the same inference queue and evaluation code as inside one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from scipy.stats import binomtest

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


def paired_test(first: Sequence[bool], second: Sequence[bool]) -> float:
    """Two-sided exact McNemar test of two policies on the same seeds.

    Only seeds on which they differ say anything: under the null hypothesis each of those is a coin toss.

    Returns:
        The p-value; 1.0 when they differ on no seed.

    Example:
        >>> paired_test([True] * 6 + [False] * 4, [False] * 6 + [False] * 4)    # 2 * 0.5 ** 6
        0.03125
    """
    better = sum(a and not b for a, b in zip(first, second, strict=True))
    worse = sum(b and not a for a, b in zip(first, second, strict=True))
    return float(binomtest(better, better + worse).pvalue) if better + worse else 1.0


def comparison_figure(names: Sequence[str], results: Sequence[EvalResult], path: Path) -> None:
    """Success rates with their Wilson intervals side by side, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(max(4.0, 1.6 * len(names)), 3.6), layout="constrained")
    rates = [result.success_rate for result in results]
    below = [rate - result.ci_low for rate, result in zip(rates, results, strict=True)]
    above = [result.ci_high - rate for rate, result in zip(rates, results, strict=True)]
    axis.bar(range(len(names)), rates, color="#0072b2", width=0.6)
    axis.errorbar(range(len(names)), rates, yerr=[below, above], fmt="none", ecolor="black", capsize=4)
    axis.set_xticks(range(len(names)), names)
    axis.set_ylim(0, 1.05)
    axis.yaxis.set_major_formatter("{x:.0%}")
    axis.set_ylabel(f"success, n = {results[0].n}, 95 % Wilson interval")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
