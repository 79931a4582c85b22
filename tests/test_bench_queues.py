"""The benchmarks of queues, backbone passes and tenants at tiny sizes: counts, keys and equalities, never seconds."""

from __future__ import annotations

import json

import pytest
import torch
from fakes import FakeBackbone

from scripts.bench import backbone_passes, queues, tenants_scaling

FAKE = "fakes.FakeBackbone"


class OwnBackbone(FakeBackbone):
    """With weights that no other test's backbone has."""

    def __init__(self) -> None:
        super().__init__(seed=20260)


@pytest.fixture
def run(tmp_path, capsys):
    """``run(script, *arguments)`` -> what it wrote; its table is in the output and its figure on disk."""

    def run_(script, *arguments: str) -> dict:
        json_path, png_path = tmp_path / "out.json", tmp_path / "out.png"
        assert script.main([*arguments, "--json", str(json_path), "--png", str(png_path), "--threads", "1"]) == 0
        written = json.loads(json_path.read_text())
        assert {"torch", "cpu", "threads", "commit"} <= written["machine"].keys()
        assert all(isinstance(value, float) for value in written["summary"].values())
        assert png_path.read_bytes().startswith(b"\x89PNG")
        printed = capsys.readouterr().out
        assert all(key in printed for key in written["summary"])
        return written

    return run_


def test_queues_hands_over_without_a_copy_and_counts_whole_lives(run, tmp_path):
    sizes = ["--tenants", "4", "2", "--jobs", "3", "--megabytes", "0.5", "1", "--seconds", "0"]
    written = run(queues, *sizes, "--folder", str(tmp_path))
    summary = written["summary"]
    assert summary["handover_copies"] == 0
    assert {"transitions_per_s", "durable_transitions_per_s", "transitions_per_s_2"} <= summary.keys()
    assert {"sft_job_us", "rl_job_us", "durable_sft_job_us", "durable_rl_job_us"} <= summary.keys()
    # an SFT job enters 4 states, an RL job 6; half of the tenants are of each task
    assert [r["transitions"] for r in written["results"]["transitions"]] == [2 * 3 * (4 + 6), 1 * 3 * (4 + 6)]
    assert [round(r["bytes"] / 1e5) for r in written["results"]["partitions"]] == pytest.approx([5, 10], abs=1)
    assert not list(tmp_path.glob("**/jobs.sqlite*")), "nothing is left behind"


def test_a_copy_at_the_hand_over_would_be_counted(monkeypatch):
    monkeypatch.setattr(queues.TrainingQueue, "get_data", _cloning(queues.TrainingQueue.get_data))
    leaves = len(queues.tensors(queues.partition_of(0.1, torch.device("cpu"))))
    assert queues.handover_copies(0.1, torch.device("cpu")) == leaves * 5, "once whole, then four ranges of rows"


def _cloning(get_data):
    return lambda queue, meta: get_data(queue, meta).clone()


def test_backbone_passes_are_one_with_reuse_and_one_per_epoch_without(run):
    sizes = ["--backbone", FAKE, "--episodes", "4", "--jobs", "2", "--sft-epochs", "2", "--ppo-epochs", "3"]
    written = run(backbone_passes, *sizes)
    summary = written["summary"]
    assert summary["sft"] == summary["ppo"] == 1.0
    assert summary["sft_serial"] == 2.0 and summary["ppo_serial_per_decision"] == 1 + 3
    assert 1 + 2 < summary["ppo_serial"] < 1 + 3, "the cut ends of rollouts are seen once"
    assert summary["encode_rows_over_counter"] == 1.0
    for row in written["results"]:
        assert row["rows"] == row["encoded"] and row["passes"] == row["encoded"] / row["observed"]
    assert {row["decisions"] for row in written["results"] if row["task"] == "ppo"} == {8 * 12 * 2}


def test_tenants_scaling_keeps_one_backbone_and_trains_every_tenant(run):
    sizes = ["--tenants", "1", "3", "--batch-size", "4", "--image-size", "32", "--seconds", "0"]
    written = run(tenants_scaling, *sizes, "--backbone", f"{__name__}.OwnBackbone")
    summary = written["summary"]
    assert summary["base_copies"] == 1
    assert {"step_time_3_over_1", "bytes_per_tenant_over_payload", "served_bytes_per_tenant_over_payload"} <= (
        summary.keys()
    )
    assert [r["tenants"] for r in written["results"]["counts"]] == [1, 3]


def test_tenants_take_turns_and_move_whole():
    backbone = FakeBackbone()
    options = tenants_scaling._options(["--batch-size", "4", "--image-size", "32"])
    schema = tenants_scaling.TenantSchema(
        cameras=("base_camera",), image_size=32, state_dim=8, action_dim=7, chunk=8, execute=8
    )
    data = tenants_scaling.cached_features(backbone, schema, "mlp", 8)
    several = tenants_scaling.Tenants(backbone, schema, options, ["a", "b"], data, torch.device("cpu"))
    assert backbone.calls == 1, "steps run on cached features"
    assert [slot.jobs_completed for slot in several.slots] == [1, 1], "one job each while registering"
    for _ in range(3):
        several.step()
    assert [slot.jobs_completed for slot in several.slots] == [3, 2]
    assert [slot.optimizer_steps for slot in several.slots] == [6, 4]
    slot = several.slots[0]
    assert all(p.grad is None for p in slot.head.parameters()), "an idle tenant keeps no gradients"
    tenants_scaling.move(slot, torch.device("meta"))
    moments = [value for state in slot.optimizer.state.values() for value in state.values()]
    everything = (*moments, *slot.head.parameters(), *slot.head.buffers(), *slot.normalizer.buffers())
    assert moments and {value.device.type for value in everything} == {"meta"}


def test_a_second_backbone_would_be_counted():
    first = FakeBackbone(seed=12345)
    assert tenants_scaling.base_copies(first) == 1
    second = FakeBackbone(seed=12345)
    assert tenants_scaling.base_copies(first) == 2
    del second
