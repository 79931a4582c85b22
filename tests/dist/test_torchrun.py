"""Under torchrun's agent: the command line, ranks that are killed or die, what a restart goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dist.launch import run_ranks, torchrun
from dist.scenarios import FAKE, SFT

from nexus_lightning.checkpoint import read_payload, resolve_payload

#: Minutes of starting ranks: with the slow tests, so that the whole suite stays inside its limit.
pytestmark = pytest.mark.slow


def assert_whole(run_dir: Path, expected: dict[str, Any], tenant: str = "toy_sft") -> None:
    """Its payload is that of an uninterrupted run."""
    one, two = expected["payloads"][tenant], read_payload(resolve_payload(run_dir / "tenants" / tenant))
    assert one["state"]["jobs_completed"] == two.state["jobs_completed"] == 3
    assert all(torch.equal(v, two.tensors[k]) for k, v in one["tensors"].items()), "bit for bit"
    moments = one["optimizer"]["state"]
    assert all(torch.equal(v, two.optimizer["state"][i][k]) for i, m in moments.items() for k, v in m.items())
    assert torch.equal(one["rng"], two.rng)


def test_a_rank_that_is_killed_once(folder, ddp):
    """torchrun starts both again; they go on from their checkpoint in the same folder, as if nothing had happened.

    A run that has ended with a tenant in quarantine is over: it is not started again.
    """
    head = "tenants.toy_sft.head._target_=dist.scenarios.KilledOnce"
    beside = ["+tenant@tenants.nan=toy_sft", *(o.replace("tenants.toy_sft.", "tenants.nan.") for o in SFT[4:])]
    beside.append("tenants.nan.head._target_=dist.scenarios.AlwaysNaN")
    said = torchrun("dist.scenarios:train_py", folder / "killed", *SFT, *FAKE, head, *beside, max_restarts=2)
    outputs = folder / "killed" / "outputs"
    assert [p.name for p in outputs.iterdir() if not p.is_symlink()] == ["killed"], "torchrun's run id names the folder"
    assert said.count("(resumed from") == 1 and "SIGKILL" in said
    tenants = json.loads((outputs / "latest" / "summary.json").read_text())["tenants"]
    assert tenants["toy_sft"]["eval"]["n"] == 5
    assert "NonFiniteLoss" in tenants["nan"]["quarantined"] and "tenant nan was quarantined" in said
    assert (outputs / "latest" / "errors" / "nan.txt").is_file(), "and torchrun did not start them a third time"
    assert_whole(outputs / "latest", ddp[0]["sft"])


def test_a_rank_that_dies_says_why_and_leaves_a_checkpoint(folder, ddp):
    with pytest.raises(AssertionError) as error:
        torchrun("dist.scenarios:dies", folder / "dies", *SFT, *FAKE)
    said = str(error.value)
    assert "MemoryError: rank 1 is out of memory" in said and "complete_and_fail" in said, "its own traceback"
    assert "ChildFailedError" in said
    run_dir = folder / "dies" / "outputs" / "latest"
    saved = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)["nexus"]
    assert saved["job_index"] == 1, "the job that it died in was not saved by all"
    run_ranks("dist.scenarios:train_py", 2, folder / "dies", *SFT, *FAKE, f"ckpt_path={run_dir.resolve()}")
    assert_whole(run_dir, ddp[0]["sft"])


def test_the_command_line_with_a_real_architecture_in_shards(folder):
    """``torchrun --standalone --nproc-per-node=2 train.py '+tenants=[toy,toy_sft]' placement=fsdp2 backbone=tiny``."""
    short = ["tenants.toy.target_jobs=2", "tenants.toy.eval.episodes=2", *(a for a in SFT if "+tenants" not in a)]
    line = ["+tenants=[toy,toy_sft]", "placement=fsdp2", "backbone=tiny", "tenants.toy.algorithm.chunks_per_job=4"]
    said = torchrun("dist.scenarios:train_py", folder / "cli", *line, *short)
    run_dir = folder / "cli" / "outputs" / "latest"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["backbone_unchanged"] is True and "backbone 1 x 1/2" in said and "because placement.strategy" in said
    for tenant, jobs in {"toy": 2, "toy_sft": 3}.items():
        assert summary["tenants"][tenant]["jobs_completed"] == jobs and f"\n{tenant} " in said, "the table"
    plan = json.loads((run_dir / "placement.json").read_text())
    assert (plan["strategy"], plan["shard"]) == ("fsdp2", 2) and plan["devices"][0]["parts"]["inference backbone"] > 0
