"""A private Ray cluster of two nodes on this machine, with folders and ports of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

#: Lost nodes are noticed within a second or two, and no worker is started before it is needed.
SETTINGS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}
NODE: dict[str, Any] = {
    "object_store_memory": 100 * 2**20,
    "include_log_monitor": False,
    "dashboard_agent_listen_port": 0,
}


@contextlib.contextmanager
def two_nodes(num_cpus: int) -> Iterator[Any]:
    """``ray.cluster_utils.Cluster``; the second node has the resource ``second``. The driver is not connected."""
    # Not pytest's folder: the paths of Unix sockets may have 107 characters.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    os.mkdir(f"{folder}/ray")
    before = {name: os.environ.get(name) for name in ("RAY_TMPDIR", "RAY_ADDRESS", "RAY_USAGE_STATS_ENABLED")}
    os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.pop("RAY_ADDRESS", None)
    try:
        from ray.cluster_utils import Cluster

        cluster = Cluster(
            initialize_head=True,
            head_node_args={**NODE, "num_cpus": num_cpus, "include_dashboard": False, "_system_config": SETTINGS},
        )
        try:
            add_node(cluster, num_cpus)
            yield cluster
        finally:
            cluster.shutdown()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
        shutil.rmtree(folder, ignore_errors=True)


def add_node(cluster: Any, num_cpus: int, resource: str = "second") -> Any:
    return cluster.add_node(**NODE, num_cpus=num_cpus, resources={resource: 1})
