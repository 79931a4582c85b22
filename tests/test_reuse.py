"""Features that travel with a rollout: same training as computing them again, one backbone pass per observation."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import FakeBackbone
from tensordict import NonTensorStack, TensorDict

from models.heads.mlp import ChunkMLPHead
from nexus_lightning.backbone import compact, concatenate_features
from nexus_lightning.checks import random_observation
from nexus_lightning.features.grouping import EncodeStats
from nexus_lightning.features.reuse import in_row_order, plan_reuse
from nexus_lightning.objectives.ppo import PPO
from nexus_lightning.producers.rollouts import with_features
from nexus_lightning.run.module import MultiTenantModule
from nexus_lightning.schema import Normalizer, TenantSchema
from nexus_lightning.tenant import PassCounter, TenantSpec, build_slot
from nexus_lightning.trainer import train

SCHEMA = TenantSchema(cameras=("camera",), image_size=32, state_dim=3, action_dim=2, chunk=3, execute=3, gripper="none")


@pytest.fixture
def toy(compose):
    def build(*overrides: str):
        config = compose("+tenants=[toy]", "trainer.enable_progress_bar=false", *overrides)
        config.backbone = {"_target_": "fakes.FakeBackbone"}
        tenant = config.tenants["toy"]
        tenant.eval = replace(tenant.eval, episodes=2, every_n_jobs=None, at_start=False, video=False)
        tenant.target_jobs = 3
        return config

    return build


def test_one_pass_per_observation_with_reuse_and_two_without(toy):
    """Bootstrap values at the cut end of a rollout are observations of their own, seen once either way."""
    reused, again = train(toy()), train(toy("tenants.toy.features.reuse=never"))
    assert reused["backbone_passes_per_observation"]["toy"] == 1.0
    assert reused["backbone_rows"]["actor"] == 0
    rows = 8 * 12 * 3
    assert again["backbone_rows"]["actor"] == rows
    assert 1.8 < again["backbone_passes_per_observation"]["toy"] < 2.0
    with (Path(reused["run_dir"]) / "metrics.csv").open() as file:
        logged = [r["train/toy/backbone_passes_per_observation"] for r in csv.DictReader(file)]
    assert {float(value) for value in logged if value} == {1.0}


def test_training_on_kept_features_equals_training_on_features_computed_again():
    """The PPO loss and its gradients, tolerance 1e-3: the kept ones are float16."""
    backbone = FakeBackbone()
    torch.manual_seed(0)
    head = ChunkMLPHead(backbone.feature_spec(SCHEMA), SCHEMA, hidden_dim=16)
    num_envs, steps = 2, 3
    texts = ["go", "push the cube"]  # of different lengths: the text segments of the decisions differ too
    decisions, observations = [], []
    for step in range(steps):
        observation = random_observation(SCHEMA, num_envs, seed=step)
        observations.append(observation)
        longest = [texts[(step + env) % 2] for env in range(num_envs)] if step else ["go", "go"]
        decisions.append(compact(backbone(observation, longest, SCHEMA)))
        observation["texts"] = NonTensorStack(*longest)
    rollout = torch.stack(observations, 1)
    instructions = NonTensorStack(*[rollout["texts"][n][t] for n in range(num_envs) for t in range(steps)])
    flat = rollout.exclude("texts").flatten()
    rows = num_envs * steps
    partition = TensorDict(
        {
            "observation": flat,
            "language_instruction": instructions,
            "vla_action": {"chunk": torch.randn(rows, 3, 2)},
            "executed": torch.ones(rows, 3, dtype=torch.bool),
            "sample_log_prob": torch.randn(rows, 1),
            "counts": torch.ones(rows, 1, dtype=torch.bool),
            "advantage": torch.randn(rows, 1),
            "value_target": torch.randn(rows, 1),
            "state_value": torch.randn(rows, 1),
        },
        [rows],
    )
    kept = with_features(partition, concatenate_features(decisions)[in_row_order(decisions, num_envs)])
    assert "observation" not in kept.keys() and torch.equal(kept["state"], flat["state"])

    module = MultiTenantModule.__new__(MultiTenantModule)
    torch.nn.Module.__init__(module)
    module.backbone, module.encode_stats = backbone, EncodeStats()
    spec = type("Spec", (), {"schema": SCHEMA})
    slot = type("Slot", (), {"head": head, "spec": spec, "name": "a", "passes": PassCounter()})
    again = module._with_features([(slot, partition)])[0]
    assert module.encode_stats.rows == slot.passes.encoded == rows

    objective = PPO(head, Normalizer(SCHEMA), PPO.configure(chunks_per_job=steps))
    gradients = []
    for data in (kept, again):
        data = data.copy()
        data["features"] = data["features"].for_head()
        head.zero_grad()
        objective.loss(data, jobs_completed=1)["loss"].backward()
        gradients.append([p.grad.clone() for p in head.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


def slot_of(compose, *overrides: str):
    config = compose("+tenants=[toy]", *overrides).tenants["toy"]
    return build_slot(TenantSpec.compile("toy", config, 0), FakeBackbone())


def test_auto_decides_by_bytes_against_the_budget(compose):
    slot = slot_of(compose)
    plan = plan_reuse(slot, FakeBackbone(), budget_bytes=10**9)
    rows = 8 * 12 * slot.spec.config.max_in_flight
    assert plan.reuse and plan.reason.startswith("auto: ")
    assert not plan_reuse(slot, FakeBackbone(), budget_bytes=plan.bytes_per_decision * rows - 1).reuse
    assert plan_reuse(slot, FakeBackbone(), budget_bytes=plan.bytes_per_decision * rows).reuse


def test_always_refuses_what_can_never_fit_and_never_means_never(compose):
    with pytest.raises(ValueError, match=r"tenants\.toy\.features\.reuse=always: the features of one rollout need"):
        plan_reuse(slot_of(compose, "tenants.toy.features.reuse=always"), FakeBackbone(), budget_bytes=10)
    assert not plan_reuse(slot_of(compose, "tenants.toy.features.reuse=never"), FakeBackbone(), 10**12).reuse
