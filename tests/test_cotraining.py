"""Demonstrations mixed into reinforcement learning: the sum by hand, a run that resumes exactly, refused configs."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from nexus_lightning.checkpoint import read_payload, resolve_payload, tensors_digest
from nexus_lightning.config import ConfigError, validate
from nexus_lightning.objectives.cotraining import CoTraining
from nexus_lightning.trainer import train


def test_the_loss_is_the_weighted_sum_and_the_critics_warm_up_draws_nothing():
    drawn = []

    def draw(count: int) -> TensorDict:
        drawn.append(count)
        return TensorDict({"rows": torch.arange(count)}, [count])

    rl = SimpleNamespace(  # FAKES of the two objectives
        warming_up=lambda jobs: jobs < 1,
        means=("rows",),
        metrics={},
        encode_whole_job=True,
        normalizes_advantages=True,
        loss=lambda batch, jobs: {"loss": torch.tensor(2.0), "kl": torch.tensor(0.5)},
    )
    sft = SimpleNamespace(batch_size=3, loss=lambda batch, jobs: {"loss": batch["rows"].float().sum()})
    objective = CoTraining(rl, sft, 0.1, draw)
    assert objective.loss(TensorDict({}, []), jobs_completed=0) == {"loss": 2.0, "kl": 0.5} and drawn == []
    losses = objective.loss(TensorDict({}, []), jobs_completed=1)
    assert float(losses["loss"]) == pytest.approx(2.0 + 0.1 * (0 + 1 + 2))
    assert losses["sft_loss"] == 3.0 and losses["kl"] == 0.5 and drawn == [3]


@pytest.fixture
def mixed(compose):
    def build(*overrides: str):
        config = compose("+tenants=[toy,toy_sft]", "trainer.enable_progress_bar=false", *overrides)
        config.backbone = {"_target_": "fakes.FakeBackbone"}
        demonstrations = config.tenants.pop("toy_sft").dataset
        tenant = config.tenants["toy"]
        tenant.dataset = replace(demonstrations, batch_size=16)
        tenant.dataset.record.episodes = 6
        tenant.algorithm.sft_weight = 0.5
        tenant.eval = replace(tenant.eval, episodes=2, every_n_jobs=None, at_start=False, video=False)
        tenant.target_jobs, tenant.max_in_flight, tenant.algorithm.epochs = 2, 1, 2
        return config

    return build


def test_demonstrations_are_read_on_from_where_a_run_stopped(mixed):
    whole, part = train(mixed()), train(mixed("trainer.max_jobs=1"))
    rest = train(mixed(f"ckpt_path={part['run_dir']}"))
    payloads = [read_payload(resolve_payload(Path(run["run_dir"]) / "tenants" / "toy")) for run in (whole, rest)]
    assert tensors_digest(payloads[0].tensors) == tensors_digest(payloads[1].tensors)
    steps = whole["tenants"]["toy"]["optimizer_steps"]
    assert [payload.state["demonstrations_drawn"] for payload in payloads] == [16 * steps] * 2
    assert whole["backbone_passes_per_observation"]["toy"] == 1.0
    with (Path(whole["run_dir"]) / "metrics.csv").open() as file:
        logged = [float(row["train/toy/sft_loss"]) for row in csv.DictReader(file) if row["train/toy/sft_loss"]]
    assert len(logged) == 2 and all(0 < value < 1 for value in logged)


def test_a_weight_and_a_dataset_come_together(mixed, compose):
    validate(mixed())
    config = mixed()
    tenant = config.tenants["toy"]
    tenant.head["lr_schedule"] = "cosine"
    for weight, expected in (
        (None, r"tenants\.toy\.dataset: task rl reads it only with tenants\.toy\.algorithm\.sft_weight"),
        (0.0, r"tenants\.toy\.algorithm\.sft_weight=0\.0: must be positive"),
        (0.1, r"lr_schedule=cosine: needs tenants\.toy\.target_jobs and jobs of a dataset"),
    ):
        tenant.algorithm.sft_weight = weight
        with pytest.raises(ConfigError, match=expected):
            validate(config)
    tenant.dataset = None
    with pytest.raises(ConfigError, match=r"sft_weight=0\.1: needs tenants\.toy\.dataset"):
        validate(config)
    with pytest.raises(ConfigError, match=r"algorithm\.sft_weight=0\.1: .* has no such key"):  # only task rl mixes
        compose("+tenants=[toy_offline]", "+tenants.toy_offline.algorithm.sft_weight=0.1")
    config = mixed()
    config.tenants["toy"].dataset.record = None
    config.tenants["toy"].dataset.root = "/nowhere"
    with pytest.raises(ConfigError, match=r"tenants\.toy\.dataset\.root=/nowhere: no LeRobotDataset there"):
        validate(config)
