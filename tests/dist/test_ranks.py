"""Two ranks against one: the same updates, the same failures everywhere, checkpoints that move between world sizes.

Tolerance of every comparison: 2e-6 absolute on weights of order 1 (measured 3e-7 after 12 to 60 Adam steps). What
differs is the order of summation: rows are summed on each rank first.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from dist.launch import run_ranks

TOLERANCE = 2e-6
SAME = ("sft", "uneven", "rl", "grpo")
SHARDED = ("placement=fsdp2", "placement.heads.shard=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone(folder) -> dict[str, Any]:
    """One rank."""
    calls = [*((name, name) for name in SAME), ("begun", "resume", None, 2)]
    return run_ranks("dist.scenarios:several", 1, folder, *calls)[0]


@pytest.fixture(scope="module")
def ddp(folder, alone) -> list[dict[str, Any]]:
    """Two ranks; goes on where one rank had stopped."""
    names = ("on_some", "alone", "beside", "producer_fails", "schedule_differs", "sent", "interrupted")
    resumed = ("resumed", "resume", alone["begun"]["summary"]["run_dir"], 5)
    refused = (("differs", "refused", "differs"), ("wrong", "refused", "wrong"))
    return run_ranks("dist.scenarios:several", 2, folder, *((n, n) for n in (*SAME, *names)), *refused, resumed)


def largest_difference(a: dict[str, Any], b: dict[str, Any], tenant: str) -> float:
    a, b = a["payloads"][tenant], b["payloads"][tenant]
    assert a["tensors"].keys() == b["tensors"].keys()
    assert a["state"]["optimizer_steps"] == b["state"]["optimizer_steps"] > 0
    return max(float((v.double() - b["tensors"][k].double()).abs().max()) for k, v in a["tensors"].items())


def rows(run: dict[str, Any], column: str) -> list[float]:
    return [float(row[column]) for row in csv.DictReader(io.StringIO(run["metrics"])) if row.get(column)]


def assert_same(one: dict[str, Any], several: dict[str, Any], tenant: str) -> None:
    assert largest_difference(one, several, tenant) < TOLERANCE
    a, b = (run["summary"]["tenants"][tenant] for run in (one, several))
    assert a["jobs_completed"] == b["jobs_completed"] and a["policy_version"] == b["policy_version"]
    assert a["eval"]["n"] == b["eval"]["n"] == 5 and a["eval"]["success_rate"] == b["eval"]["success_rate"]
    assert a["eval"]["episode_return"] == pytest.approx(b["eval"]["episode_return"], abs=1e-5)
    for name in ("loss", "kl", "clip_fraction", "env_steps", "episodes", "success_rate", "counted_share"):
        column = f"train/{tenant}/{name}"
        assert rows(several, column) == pytest.approx(rows(one, column), abs=1e-5), column


@pytest.mark.parametrize("name", SAME)
def test_two_ranks_are_one_rank(alone, ddp, name):
    (tenant,) = alone[name]["payloads"]
    assert_same(alone[name], ddp[0][name], tenant)
    assert ddp[1][name]["summary"]["run_dir"] == ddp[0][name]["summary"]["run_dir"], "one run folder"


def test_uneven_batches_are_padded_and_weigh_right(alone, ddp):
    """5 rows on two ranks: 3 and 2; the mean of the two means would be off by far more than the tolerance."""
    assert rows(ddp[0]["uneven"], "train/toy_sft/loss") == pytest.approx(
        rows(alone["uneven"], "train/toy_sft/loss"), abs=1e-6
    )


def test_simulators_on_one_rank_only(alone, ddp):
    assert largest_difference(alone["rl"], ddp[0]["on_some"], "toy") < TOLERANCE
    assert ddp[0]["on_some"]["summary"]["tenants"]["toy"]["eval"]["n"] == 5


def test_a_failure_on_one_rank_takes_the_tenant_out_everywhere_and_nobody_else(ddp):
    for mine in ddp:
        tenants = mine["beside"]["summary"]["tenants"]
        assert tenants["raises"]["quarantined"] == "OSError: rank 1 ran out of luck (on rank 1)"
        assert tenants["nan"]["quarantined"].startswith("NonFiniteLoss") and "rank 1" in tenants["nan"]["quarantined"]
        assert tenants["raises"]["jobs_completed"] == tenants["nan"]["jobs_completed"] == 2
        assert tenants["toy_sft"]["quarantined"] is None and tenants["toy_sft"]["jobs_completed"] == 4
    assert largest_difference(ddp[0]["alone"], ddp[0]["beside"], "toy_sft") == 0.0, "the other one: bit for bit"
    errors = Path(ddp[0]["beside"]["summary"]["run_dir"]) / "errors"
    assert "rank 1 ran out of luck" in (errors / "raises.txt").read_text(), "the traceback of the rank that failed"


def test_a_producer_that_fails_on_one_rank(ddp):
    for mine in ddp:
        tenants = mine["producer_fails"]["summary"]["tenants"]
        assert "the simulator is gone" in tenants["toy"]["quarantined"] and tenants["toy"]["jobs_completed"] == 0
        assert tenants["toy_sft"]["quarantined"] is None and tenants["toy_sft"]["jobs_completed"] == 3


def test_ranks_with_different_schedules_stop_at_once(ddp):
    for mine in ddp:
        assert mine["schedule_differs"].startswith("ScheduleDiffers: the ranks have trained different jobs")


def test_a_configuration_that_differs_on_one_rank_is_refused_on_all(ddp):
    for mine in ddp:
        assert "seed: rank 0 has 0, rank 1 has 7; start every rank with the same arguments" in mine["differs"]
        assert "tenants.toy_sft.head.lr: rank 0 has" in mine["differs"] and mine["differs"].count("rank 1") == 2
        assert mine["wrong"].startswith("ConfigError") and "tenants.toy_sft.weight" in mine["wrong"]


def test_only_the_active_heads_gradients_travel(ddp):
    """Per optimizer step: its gradients, one flag per tensor and one per tenant, in float32. No idle tenant's."""
    sent = ddp[0]["sent"]
    assert set(sent["bytes"]) == {4 * (sent["numel"] + sent["tensors"] + 1)}
    assert len(sent["bytes"]) == 2 * 3 * 4, "two tenants, three jobs, four steps"


def test_a_signal_on_one_rank_stops_all_after_the_job_and_saves(ddp):
    for mine in ddp:
        summary = mine["interrupted"]["summary"]
        assert summary["interrupted"] is True and summary["tenants"]["toy_sft"]["jobs_completed"] == 2
    assert (Path(ddp[0]["interrupted"]["summary"]["run_dir"]) / "checkpoints" / "last.ckpt").is_file()


def test_checkpoints_move_between_world_sizes(folder, alone, ddp):
    """1 rank for 2 jobs, 2 ranks up to 5, 1 rank to the end, against 1 rank throughout."""
    run_dir = ddp[0]["resumed"]["summary"]["run_dir"]
    assert run_dir == alone["begun"]["summary"]["run_dir"]
    calls = [("whole", "resume", None, None), ("rest", "resume", run_dir, None)]
    one = run_ranks("dist.scenarios:several", 1, folder, *calls)[0]
    for tenant in ("toy", "toy_sft"):
        assert one["rest"]["summary"]["tenants"][tenant]["jobs_completed"] == 4
        assert largest_difference(one["whole"], one["rest"], tenant) < TOLERANCE


@pytest.fixture(scope="module")
def fsdp2(folder, alone) -> list[dict[str, Any]]:
    """A sharded backbone, with whole heads and (``*_heads``) with sharded ones."""
    whole = [(name, name, "placement=fsdp2") for name in ("uneven", "grpo", "beside")]
    sharded = [(f"{name}_heads", name, *SHARDED) for name in ("sft", "uneven", "grpo", "beside")]
    return run_ranks("dist.scenarios:several", 2, folder / "fsdp2", *whole, *sharded)


@pytest.mark.parametrize("name", ["uneven", "grpo", "sft_heads", "uneven_heads", "grpo_heads"])
def test_two_ranks_with_shards_are_one_rank(alone, fsdp2, name):
    one = alone[name.removesuffix("_heads")]
    (tenant,) = one["payloads"]
    assert_same(one, fsdp2[0][name], tenant)
    assert fsdp2[0][name]["summary"]["backbone_unchanged"] is True


@pytest.mark.parametrize("name", ["beside", "beside_heads"])
def test_failures_on_one_rank_with_shards(fsdp2, name):
    for mine in fsdp2:
        tenants = mine[name]["summary"]["tenants"]
        assert tenants["raises"]["quarantined"] == "OSError: rank 1 ran out of luck (on rank 1)"
        assert tenants["nan"]["quarantined"].startswith("NonFiniteLoss")
        assert tenants["toy_sft"]["quarantined"] is None and tenants["toy_sft"]["jobs_completed"] == 4
