"""Evaluate a payload outside a run, through the same inference queue and evaluation code as inside one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from nexus_lightning.config import EnvironmentConfig, TenantConfig, process_problems, schema_of
from nexus_lightning.environment import make_env
from nexus_lightning.inference.policies import ServedPolicies
from nexus_lightning.inference.server import TenantInferenceServer
from nexus_lightning.policy import Policy
from nexus_lightning.producers.evaluation import (
    EvalResult,
    TaskResult,
    evaluate_policy,
    filmed,
    save_recorded,
    summarise,
)
from nexus_lightning.schema import TenantSchema
from nexus_lightning.simulator import simulator_class, task_configs


def evaluate(
    policy: Policy,
    seeds: Sequence[int],
    num_envs: int = 1,
    video: Path | None = None,
    progress: Callable[[int], None] | None = None,
    environment: EnvironmentConfig | None = None,
) -> EvalResult:
    """Run one deterministic episode per task and seed; the result does not depend on ``num_envs``.

    Args:
        policy: what acts.
        seeds: of every task.
        num_envs: simulators that share the episodes.
        video: where to write a grid of the first episodes of every task.
        progress: called with the number of finished episodes.
        environment: other tasks than the payload's own, see :func:`choose_tasks`.

    Raises:
        ValueError: the payload names no environment.
    """
    slot = policy.slot
    environment = environment or policy.config.environment
    if environment is None:
        raise ValueError(f"payload {policy.path}: tenant {slot.name!r} has no environment to evaluate in")
    asked = [(task, seed) for task in range(max(1, len(environment.tasks))) for seed in seeds]
    served = ServedPolicies(policy.backbone)
    served.publish(slot.name, slot.policy_version, slot.serving_head, slot.normalizer, policy.schema)
    env = make_env(environment, policy.schema, slot.normalizer, num_envs=min(num_envs, len(asked)), tenant=slot.name)
    record = env.record = filmed(asked) if video is not None else []
    try:
        server = TenantInferenceServer(served)
        with server:
            client = server.client(slot.name, sample=False, version=slot.policy_version)
            episodes = evaluate_policy(env, client, asked, progress=progress)
        assert episodes is not None
        if video is not None:
            save_recorded(env.pop_frames(), record, asked, episodes, video, policy.schema)
    finally:
        env.close()
    return summarise(slot.name, slot.policy_version, episodes)


def choose_tasks(
    tenant: TenantConfig, suite: str | None, tasks: Sequence[Any], seeds: Sequence[int]
) -> tuple[EnvironmentConfig, list[str]]:
    """A tenant's environment with other tasks: those of a suite of its simulator, those listed, or both.

    Nothing is started: what does not fit is found in the schema, the arguments and the task descriptions.

    Args:
        tenant: from a payload, see :func:`nexus_lightning.policy.payload_tenant`.
        suite: a name in ``suites`` of the simulator's class; None: the simulator as the tenant was trained with it.
        tasks: values of the simulator's ``task_key``; empty: the whole suite, or the tenant's own tasks.
        seeds: to be run of each task.

    Returns:
        The environment, and for a suite to choose from the reasons why tasks of it were left out.

    Raises:
        ValueError: everything that does not fit, one line each.
    """
    environment, schema = tenant.environment, schema_of(tenant.schema)
    if environment is None:
        raise ValueError("the tenant has no environment to evaluate in")
    cls = simulator_class(environment.simulator)
    simulator, chosen, left_out = dict(environment.simulator), list(tasks), []
    if suite is not None:
        if suite not in cls.suites:
            known = f"choose one of {', '.join(cls.suites)}" if cls.suites else "it has none"
            raise ValueError(f"suite={suite}: no suite of {cls.__name__}, the tenant's simulator; {known}")
        entry = cls.suites[suite]
        if unknown := [task for task in tasks if task not in entry.tasks]:
            listed = ", ".join(map(str, entry.tasks))
            raise ValueError(f"tasks={list(tasks)}: {unknown} are not in suite={suite}, which has {listed}")
        simulator |= entry.arguments
        states = entry.num_initial_states
        if states is not None and (beyond := [seed for seed in seeds if seed >= states]):
            raise ValueError(
                f"seeds up to {max(beyond)}: suite={suite} has {states} recorded initial states per task, and a state "
                f"must not count twice; keep first_seed + episodes at {states} or less"
            )
        if not tasks:
            chosen = list(entry.tasks)
            if entry.only_fitting:
                problems = {task: misfit(simulator, task, schema) for task in chosen}
                left_out = [line for lines in problems.values() for line in lines]
                chosen = [task for task in chosen if not problems[task]]
                if not chosen:
                    raise ValueError(f"no task of suite={suite} fits the schema:\n  - " + "\n  - ".join(left_out))
    elif not tasks:
        chosen = list(environment.tasks)
    chosen_environment = replace(environment, simulator=simulator, tasks=chosen)
    task_configs(simulator, chosen)  # refuses a task that is listed twice
    problems = [line for task in chosen for line in misfit(simulator, task, schema)]
    problems += process_problems("its payload's config", chosen_environment, cls)
    for package, extra in cls.requires.items():
        if importlib.util.find_spec(package) is None:
            problems.append(f"package {package} is missing: pip install 'nexus-lightning[{extra}]'")
    if problems:
        raise ValueError("its policy cannot act in these tasks:\n  - " + "\n  - ".join(problems))
    return chosen_environment, left_out


def misfit(simulator: Mapping[str, Any], task: Any, schema: TenantSchema) -> list[str]:
    """Why a policy of this schema cannot act in one task, one line each."""
    (config,) = task_configs(simulator, [task])
    arguments = {key: value for key, value in config.items() if key != "_target_"}
    return [f"task {task}: {problem}" for problem in simulator_class(simulator).problems(arguments, schema)]


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


def success_figure(names: Sequence[str], results: Sequence[EvalResult] | Sequence[TaskResult], path: Path) -> None:
    """Success rates with their Wilson intervals side by side, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    width = min(24.0, max(4.0, 1.6 + 0.7 * len(names)))  # inches; ninety tasks are narrow bars
    long = len(names) > 12 or max(map(len, names)) > 6
    height = 3.6 + 0.08 * max(map(len, names)) * long  # upright names need room of their own
    figure, axis = plt.subplots(figsize=(width, height), layout="constrained")
    rates = [result.success_rate for result in results]
    below = [rate - result.ci_low for rate, result in zip(rates, results, strict=True)]
    above = [result.ci_high - rate for rate, result in zip(rates, results, strict=True)]
    axis.bar(range(len(names)), rates, color="#0072b2", width=0.6)
    axis.errorbar(range(len(names)), rates, yerr=[below, above], fmt="none", ecolor="black", capsize=3)
    axis.set_xticks(range(len(names)), names, rotation=90 if long else 0, fontsize=8 if long else None)
    axis.set_ylim(0, 1.05)
    axis.yaxis.set_major_formatter("{x:.0%}")
    axis.set_ylabel(f"success, n = {results[0].n}, 95 % Wilson interval")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
