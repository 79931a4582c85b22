"""Runs that several test modules compare: few launches, many scenarios in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dist.launch import run_ranks

SAME = ("sft", "uneven", "rl", "grpo")
SHARDED = ("placement=fsdp2", "placement.heads.shard=2")


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="session")
def alone(folder) -> dict[str, Any]:
    """One rank; the last one is stopped after two of its eight jobs."""
    calls = [
        *((name, name) for name in (*SAME, "mixed", "iql", "joins")),
        ("whole", "resume", None, None),
        ("begun", "resume", None, 2),
    ]
    return run_ranks("dist.scenarios:several", 1, folder, *calls)[0]


@pytest.fixture(scope="session")
def ddp(folder, alone) -> list[dict[str, Any]]:
    """Two ranks; goes on where one rank had stopped."""
    names = ("mixed", "iql", "joins", "on_some", "alone", "beside", "producer_fails", "schedule_differs", "sent")
    on_one = ("mixed_on_one", "mixed", "+placement.environments.toy=[1]")
    resumed = ("resumed", "resume", alone["begun"]["summary"]["run_dir"], 4)
    refused = (("differs", "refused", "differs"), ("wrong", "refused", "wrong"))
    return run_ranks(
        "dist.scenarios:several",
        2,
        folder,
        *((n, n) for n in (*SAME, *names)),
        on_one,
        ("interrupted",) * 2,
        *refused,
        resumed,
    )


@pytest.fixture(scope="session")
def fsdp2(folder, alone, ddp) -> list[dict[str, Any]]:
    """A sharded backbone, with whole heads and (``*_heads``) with sharded ones; goes on where two whole ranks had
    stopped, and then without shards."""
    run_dir = ddp[0]["resumed"]["summary"]["run_dir"]
    whole = [(name, name, "placement=fsdp2") for name in ("uneven", "grpo", "mixed", "beside")]
    sharded = [(f"{name}_heads", name, *SHARDED) for name in ("sft", "uneven", "grpo", "beside")]
    resumed = [("resumed", "resume", run_dir, 6, *SHARDED), ("back", "resume", run_dir, 7)]
    return run_ranks("dist.scenarios:several", 2, folder, *whole, *sharded, *resumed)
