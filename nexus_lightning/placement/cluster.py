"""The Ray cluster of ``placement=ray``: joined on purpose, asked for room before anything is built, left at the end.

::

    machine 1 (ray start --head)                       machine 2 (ray start --address=machine1:6379)
    train.py: training, queues, heads                  simulators              placed by Ray, wherever
    simulators                                         inference replicas      the CPUs and GPUs that
                                                       collectors              they reserve are free

Only the cluster that the configuration names is joined, never one that happens to run here, and none is started. The
cluster itself belongs to whoever started it: what we put there ends with the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from nexus_lightning.config import ConfigError, NexusConfig
from nexus_lightning.environment import use_batched
from nexus_lightning.placement.plan import Plan

#: Seconds for a first connection to the head's port.
REACH_TIMEOUT_S = 5.0


@contextlib.contextmanager
def connected(config: NexusConfig, plan: Plan) -> Iterator[None]:
    """Inside, this process is a driver of the cluster of ``placement.ray``; does nothing without one.

    A connection that is there already (a preparation run inside a run, a caller's own) is used and left as it is.

    Raises:
        ConfigError: nothing of the run belongs there, or the cluster cannot be reached, is another one than this
            process is connected to, or has too few resources free.
    """
    wanted = config.placement.ray
    if wanted is None:
        yield
        return
    import ray

    address = os.environ["RAY_ADDRESS"] if wanted.address == "auto" else wanted.address
    ours = not ray.is_initialized()
    if ours:
        if not bundles(config, plan):
            raise ConfigError(
                [
                    "placement.ray: nothing would run on the cluster; set tenants.<name>.environment.inline=false for "
                    "simulators there, or placement.ray.inference_replicas, or use another placement"
                ]
            )
        _connect(address)
    try:
        joined = ray.get_runtime_context().gcs_address
        if _numeric(joined) != _numeric(address):
            raise ConfigError([f"placement.ray.address={address}: this process is connected to the cluster {joined}"])
        if problems := room_problems(config, plan):
            raise ConfigError(problems)
        yield
    finally:
        if ours:
            ray.shutdown()


def _connect(address: str) -> None:
    """Join the cluster as a driver.

    Raises:
        ConfigError: nothing answers there, or not a cluster that this machine is part of.
    """
    import ray
    from ray.job_config import JobConfig

    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), REACH_TIMEOUT_S).close()
    except (OSError, ValueError) as error:  # Ray itself would try for a minute
        raise ConfigError(
            [f"placement.ray.address={address}: cannot be reached ({error}); start it with scripts/launch/ray.sh head"]
        ) from None
    # Workers import what this process can import from outside its environment, under the same paths on every machine.
    installed = Path(sys.prefix), Path(sys.base_prefix)
    paths = [Path(p).resolve() for p in sys.path if p]
    paths = [str(p) for p in paths if p.is_dir() and not any(p.is_relative_to(prefix) for prefix in installed)]
    try:
        ray.init(
            address=address,
            job_config=JobConfig(_py_driver_sys_path=paths),
            log_to_driver=False,  # our own errors carry tracebacks; the rest is in Ray's log folder
            logging_level=logging.WARNING,
        )
    except Exception as error:  # of many kinds; whatever it is, there is no cluster to use
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            [
                f"placement.ray.address={address}: cannot be joined ({type(error).__name__}: {reason}); this "
                f"machine must be part of the cluster: ray start --address={address}"
            ]
        ) from error


def _numeric(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{socket.gethostbyname(host)}:{port}"


def bundles(config: NexusConfig, plan: Plan) -> list[tuple[str, int, dict[str, float]]]:
    """What the run will ask the cluster for, on all ranks together: ``(what, how many, resources of each)``."""
    ray = config.placement.ray
    assert ray is not None
    simulators = collectors = 0
    for name, ranks in plan.environments.items():
        environment = config.tenants[name].environment
        assert environment is not None
        collectors += len(ranks)
        if not environment.inline:
            simulators += len(ranks) if use_batched(environment, ray) else sum(plan.simulators[name])
    wanted = [("simulator", simulators, _resources(ray.num_cpus_per_simulator, ray.num_gpus_per_simulator))]
    if ray.inference_replicas and collectors:
        replicas = ray.inference_replicas * plan.world_size
        wanted.append(("replica", replicas, _resources(ray.num_cpus_per_replica, ray.num_gpus_per_replica)))
        wanted.append(("collector", collectors, _resources(ray.num_cpus_per_collector, 0)))
    return [(what, count, each) for what, count, each in wanted if count]


def room_problems(config: NexusConfig, plan: Plan) -> list[str]:
    """What the connected cluster has not, of what the run needs at once."""
    import ray

    wanted, free = bundles(config, plan), ray.available_resources()
    largest = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    problems = []
    for what, _, each in wanted:
        if not any(all(node.get(name, 0) >= amount for name, amount in each.items()) for node in largest):
            needs = ", ".join(f"{amount:g} {name}" for name, amount in each.items())
            problems.append(f"placement.ray: no machine of the cluster has the {needs} that one {what} reserves")
    for name in ("CPU", "GPU"):
        needed = sum(count * each.get(name, 0) for _, count, each in wanted)
        if needed > free.get(name, 0):
            parts = " + ".join(
                f"{count} {what}{'' if count == 1 else 's'} x {each[name]:g}"
                for what, count, each in wanted
                if name in each
            )
            problems.append(
                f"placement.ray: the run needs {needed:g} {name} ({parts}), the cluster has {free.get(name, 0):g} "
                f"free; add machines, lower num_envs or inference_replicas, or reserve less with placement.ray.num_"
                f"{name.lower()}s_per_*"
            )
    return problems


def _resources(cpus: float, gpus: float) -> dict[str, float]:
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
