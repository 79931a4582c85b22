"""What heads cost, admission, and the estimate without weights."""

from __future__ import annotations

import platform
import resource

import pytest
import torch
from fakes import FakeBackbone
from torch import nn

from models.heads.mlp import ChunkMLPHead
from nexus_lightning import memory, trainer
from nexus_lightning.memory import Admission, estimate, estimate_table, head_memory, keep_freed_memory
from nexus_lightning.schema import TenantSchema
from nexus_lightning.trainer import train

SCHEMA = TenantSchema(state_dim=3, action_dim=2, chunk=3, execute=3, gripper="none")


def test_a_head_costs_its_weights_gradients_moments_and_served_copies():
    head = ChunkMLPHead(FakeBackbone().feature_spec(SCHEMA), SCHEMA, hidden_dim=16)
    head.register_buffer("table", torch.zeros(10, dtype=torch.float64))
    trained = sum(p.numel() for p in head.parameters())
    figures = head_memory(head)
    assert figures.parameters == trained
    assert figures.weights_bytes == 4 * trained + 80
    assert figures.adam_bytes == 8 * trained
    assert figures.total_bytes == 3 * figures.weights_bytes + 4 * trained + figures.adam_bytes
    assert head_memory(head, ema=True).total_bytes == figures.total_bytes + figures.weights_bytes


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_is_used_again_without_page_faults():
    assert keep_freed_memory()

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            [torch.ones(2**20) for _ in range(4)]  # 16 MB in pieces below the largest mmap threshold
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    assert faults() < 2000  # 40,960 where every piece comes fresh from the kernel


def test_admission_counts_what_earlier_tenants_took():
    admission = Admission(free=4_000_000_000)
    admission.admit("a", 2_900_000_000)
    message = r"tenants\.b: this tenant needs 2\.6 GB, 1\.1 GB is free"
    with pytest.raises(ValueError, match=message):
        admission.admit("b", 2_600_000_000)
    admission.admit("c", 1_000_000_000)  # a refused tenant takes nothing


def test_a_run_refuses_the_tenant_that_does_not_fit(compose, monkeypatch):
    config = compose("+tenants=[toy]", "trainer.enable_progress_bar=false")
    config.backbone = {"_target_": "fakes.FakeBackbone"}
    monkeypatch.setattr(trainer, "free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match=r"tenants\.toy: this tenant needs .* is free"):
        train(config)


def test_a_dry_run_builds_nothing_and_says_what_it_would_take(compose, tmp_path, capsys):
    config = compose("+tenants=[toy,toy_sft]", "trainer.dry_run=true", "tenants.toy_sft.head.ema_decay=0.99")
    config.backbone = {"_target_": "fakes.FakeBackbone"}
    figures = train(config)["estimate"]
    assert list(figures["tenants"]) == ["toy", "toy_sft"]
    assert figures["tenants"]["toy"]["kind"] == "tokens"
    parts = [figures["backbone"]["bytes"], *(t["total_bytes"] for t in figures["tenants"].values())]
    assert figures["total_bytes"] == sum(parts)
    assert "together" in capsys.readouterr().out
    assert not (tmp_path / "outputs").exists() and not (tmp_path / "data").exists()


def test_the_table_says_whether_it_fits(compose):
    config = compose("+tenants=[toy]")
    figures = estimate(config, FakeBackbone())
    assert "it fits" in estimate_table(figures, 10**12)
    assert "does NOT fit" in estimate_table(figures, 10)


def test_bytes_count_every_dtype():
    module = nn.Linear(4, 2, bias=False).to(torch.bfloat16)
    assert memory.module_bytes(module) == 16
