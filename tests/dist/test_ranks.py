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
import torch
from dist.conftest import SAME
from dist.launch import run_ranks

TOLERANCE = 2e-6


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
    if f"train/{tenant}/groups" in one["metrics"]:  # grpo
        for name in ("groups", "zero_spread_groups"):
            assert rows(several, f"train/{tenant}/{name}") == rows(one, f"train/{tenant}/{name}") != []


@pytest.mark.parametrize("name", SAME)
def test_two_ranks_are_one_rank(alone, ddp, name):
    (tenant,) = alone[name]["payloads"]
    assert_same(alone[name], ddp[0][name], tenant)
    assert ddp[1][name]["summary"]["run_dir"] == ddp[0][name]["summary"]["run_dir"], "one run folder"


@pytest.mark.parametrize("name", ["mixed", "mixed_on_one", "iql"])
def test_every_algorithm_on_two_ranks(alone, ddp, name):
    """Several tasks, demonstrations mixed in, decoupled PPO (also where one rank has no simulators); values of iql."""
    one, two = alone[name.removesuffix("_on_one")], ddp[0][name]
    (tenant,) = one["payloads"]
    assert largest_difference(one, two, tenant) < 5 * TOLERANCE
    metrics = {"iql": ["value_loss", "q_loss", "q", "value"]}.get(name)
    for metric in metrics or ["loss", "sft_loss", "importance_weight", "behavior_kl", "kl", "success_rate"]:
        column = f"train/{tenant}/{metric}"
        assert rows(one, column), column
        assert rows(two, column) == pytest.approx(rows(one, column), abs=1e-4, rel=1e-4), column
    evals = [run["summary"]["tenants"][tenant]["eval"] for run in (one, two)]
    assert evals[0]["n"] == evals[1]["n"] and evals[0]["success_rate"] == evals[1]["success_rate"]
    if name != "iql":
        assert [(t["task"], t["n"]) for t in evals[1]["by_task"]] == [("plain", 5), ("mirrored", 5)]


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


def test_tenants_that_join_and_leave_a_live_run(alone, ddp):
    """What they learn is what they learn on one rank, and the one that was there learns what it learns alone."""
    for mine in (alone, *ddp):
        run = mine["joins"]
        assert set(run["summary"]["tenants"]) == {"first", "late", "late_rl"} and run["visited"], "saved when it left"
        jobs = {name: t["jobs_completed"] for name, t in run["summary"]["tenants"].items()}
        assert jobs == {"first": 4, "late": 2, "late_rl": 2}
        assert all(t["eval"]["n"] == 5 for t in run["summary"]["tenants"].values())
    for tenant in ("first", "late", "late_rl"):  # of late_rl some gradients are near Adam's epsilon: measured 2.3e-6
        assert largest_difference(alone["joins"], ddp[0]["joins"], tenant) < 5 * TOLERANCE
    said = ddp[0]["joins"]["said"]
    assert "OSError: no such file on rank 1 (on rank 1)" in said.pop("broken")
    assert set(said.values()) == {"done"} and said.keys() == alone["joins"]["said"].keys() == said.keys() | {"gone"}


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


def test_checkpoints_move_between_world_sizes_and_placements(folder, alone, ddp, fsdp2):
    """1 rank for 2 jobs, 2 whole ones up to 4, with shards up to 6, whole up to 7, 1 rank to the end: weights, moments,
    counters and random state are those of 1 rank throughout."""
    stages = [alone["begun"], ddp[0]["resumed"], fsdp2[0]["resumed"], fsdp2[0]["back"]]
    assert len({stage["summary"]["run_dir"] for stage in stages}) == 1, "one run folder"
    tenants = [stage["summary"]["tenants"] for stage in stages]
    assert [t["quarantined"] for stage in tenants for t in stage.values()] == [None] * 8
    assert [sum(t["jobs_completed"] for t in stage.values()) for stage in tenants] == [2, 4, 6, 7], tenants
    calls = [("rest", "resume", stages[0]["summary"]["run_dir"], None)]
    rest = run_ranks("dist.scenarios:several", 1, folder, *calls)[0]["rest"]
    for tenant in ("toy", "toy_sft"):
        assert rest["summary"]["tenants"][tenant]["jobs_completed"] == 4
        assert largest_difference(alone["whole"], rest, tenant) < TOLERANCE
        one, other = alone["whole"]["payloads"][tenant], rest["payloads"][tenant]
        assert torch.equal(one["rng"], other["rng"])
        counters = ("policy_version", "optimizer_steps", "cursor", "lr_scheduler")
        assert [one["state"][k] for k in counters] == [other["state"][k] for k in counters]
        for index, moments in one["optimizer"]["state"].items():
            for name, value in moments.items():
                torch.testing.assert_close(other["optimizer"]["state"][index][name], value, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["uneven", "grpo", "sft_heads", "uneven_heads", "grpo_heads"])
def test_two_ranks_with_shards_are_one_rank(alone, fsdp2, name):
    one = alone[name.removesuffix("_heads")]
    (tenant,) = one["payloads"]
    assert_same(one, fsdp2[0][name], tenant)
    assert fsdp2[0][name]["summary"]["backbone_unchanged"] is True


def test_the_actors_own_look_at_a_rollout_beside_a_sharded_backbone(alone, fsdp2):
    assert largest_difference(alone["mixed"], fsdp2[0]["mixed"], "toy") < 5 * TOLERANCE


@pytest.mark.parametrize("name", ["beside", "beside_heads"])
def test_failures_on_one_rank_with_shards(fsdp2, name):
    for mine in fsdp2:
        tenants = mine[name]["summary"]["tenants"]
        assert tenants["raises"]["quarantined"] == "OSError: rank 1 ran out of luck (on rank 1)"
        assert tenants["nan"]["quarantined"].startswith("NonFiniteLoss")
        assert tenants["toy_sft"]["quarantined"] is None and tenants["toy_sft"]["jobs_completed"] == 4
