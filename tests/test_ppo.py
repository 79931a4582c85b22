"""PPO on chunks: masks, likelihoods and advantages against hand-computed values."""

from __future__ import annotations

import pytest
import torch
from fakes import FakeBackbone
from tensordict import TensorDict
from torch.distributions import Normal

from models.heads.mlp import ChunkMLPHead
from nexus_lightning.config import AlgorithmConfig
from nexus_lightning.objectives.ppo import EvaluatedDecision, PPOObjective, compute_advantages, reduce_chunk
from nexus_lightning.schema import Normalizer, TenantSchema

SCHEMA = TenantSchema(state_dim=3, action_dim=2, chunk=3, execute=3, gripper="none", state_normalization="identity")


def test_unexecuted_steps_carry_no_likelihood_and_no_entropy():
    normal = Normal(torch.zeros(1, 3, 2), torch.ones(1, 3, 2))
    value = torch.tensor([[[0.5, -0.5], [1.0, 2.0], [100.0, 100.0]]])
    executed = torch.tensor([[True, True, False]])
    expected = Normal(0.0, 1.0).log_prob(value[0, :2]).sum()
    log_probs, entropy = normal.log_prob(value), normal.entropy()
    dist = EvaluatedDecision(log_probs, entropy, executed)
    assert torch.allclose(dist.log_prob(value)[0], expected)
    assert torch.allclose(dist.entropy()[0], 4 * Normal(0.0, 1.0).entropy())
    assert torch.allclose(EvaluatedDecision(log_probs, entropy, executed, "mean").log_prob(value)[0], expected / 4)


def test_nothing_executed_is_finite():
    assert reduce_chunk(torch.full((1, 2, 2), 7.0), torch.zeros(1, 2, dtype=torch.bool), "mean").item() == 0.0


def rollout(rewards, values, next_values, done, terminated):
    """``[1, L]`` rollout with one-dim chunks; every step executed."""
    steps = len(rewards)

    def column(x, dtype=torch.float32):
        return torch.tensor(x, dtype=dtype).view(1, steps, 1)

    return TensorDict(
        {
            "state_value": column(values),
            "vla_action": TensorDict({"log_probs": torch.zeros(1, steps, 1, 1)}, [1, steps]),
            "next": TensorDict(
                {
                    "reward": column(rewards),
                    "state_value": column(next_values),
                    "done": column(done, torch.bool),
                    "terminated": column(terminated, torch.bool),
                    "executed": torch.ones(1, steps, 1, dtype=torch.bool),
                },
                [1, steps],
            ),
        },
        [1, steps],
    )


def test_gae_stops_at_done_and_bootstraps_only_where_truncated():
    gamma, lam = 0.9, 0.8
    # two episodes in one row: the first terminates at step 1, the second is truncated at step 3
    td = rollout([0.0, 1.0, 0.0, 0.0], [0.5, 0.4, 0.3, 0.2], [0.4, 0.0, 0.2, 0.6], [0, 1, 0, 1], [0, 1, 0, 0])
    out = compute_advantages(td, AlgorithmConfig(chunks_per_job=4, gamma=gamma, gae_lambda=lam))
    delta = [0.0 + gamma * 0.4 - 0.5, 1.0 - 0.4, gamma * 0.2 - 0.3, gamma * 0.6 - 0.2]
    advantage = [delta[0] + gamma * lam * delta[1], delta[1], delta[2] + gamma * lam * delta[3], delta[3]]
    target = torch.tensor(advantage) + torch.tensor([0.5, 0.4, 0.3, 0.2])
    assert torch.allclose(out["value_target"].flatten(), target, atol=1e-6)
    raw = torch.tensor(advantage)
    assert torch.allclose(out["advantage"].flatten(), (raw - raw.mean()) / raw.std(unbiased=False), atol=1e-5)


@pytest.fixture
def objective():
    torch.manual_seed(0)
    head = ChunkMLPHead(FakeBackbone().feature_spec(SCHEMA), SCHEMA, hidden_dim=16)
    return PPOObjective(head, Normalizer(SCHEMA), AlgorithmConfig(chunks_per_job=1, epochs=2, minibatch_size=4))


def partition(objective, rows=8):
    backbone = FakeBackbone()
    features = backbone(TensorDict({}, [rows]), ["push"] * rows, SCHEMA)
    state = torch.randn(rows, 3)
    with torch.no_grad():
        acted = objective.head.act(features, state, torch.randn(rows, 3, 2))
    executed = torch.ones(rows, 3, dtype=torch.bool)
    executed[0, 1:] = False
    return TensorDict(
        {
            "features": features,
            "state": state,
            "vla_action": TensorDict({"chunk": acted["chunk"]}, [rows]),
            "executed": executed,
            "state_value": acted["state_value"],
            "sample_log_prob": reduce_chunk(acted["log_probs"], executed, "sum"),
            "advantage": torch.randn(rows, 1),
            "value_target": torch.randn(rows, 1),
        },
        [rows],
    )


def test_before_any_step_the_ratio_is_one(objective):
    data = partition(objective)
    losses = objective.loss(data, jobs_completed=0)
    assert losses["kl"].abs() < 1e-5 and losses["clip_fraction"] == 0
    expected = -data["advantage"].mean()
    assert torch.allclose(losses["policy_loss"], expected, atol=1e-5)
    value = objective.head.value(data["features"], data["state"])
    assert torch.allclose(losses["value_loss"], 0.5 * (value - data["value_target"]).pow(2).mean(), atol=1e-5)


def test_an_action_that_was_not_carried_out_gets_no_gradient(objective):
    data = partition(objective)[:1]
    data["advantage"] = torch.ones(1, 1)
    objective.loss(data, jobs_completed=0)["loss"].backward()
    changed = data.clone()
    changed["vla_action", "chunk"][:, 1:] = 50.0  # only steps that were not executed
    first = [p.grad.clone() for p in objective.head.parameters() if p.grad is not None]
    objective.head.zero_grad()
    objective.loss(changed, jobs_completed=0)["loss"].backward()
    second = [p.grad for p in objective.head.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_warm_up_trains_the_critic_alone(objective):
    objective.algorithm.value_warmup_jobs = 1
    objective.loss(partition(objective), jobs_completed=0)["loss"].backward()
    for name, parameter in objective.head.named_parameters():
        touched = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        assert touched == name.startswith("value_head."), name


def test_minibatches_cover_every_row_once_per_epoch(objective):
    data = partition(objective, rows=10)
    data["row"] = torch.arange(10)
    seen = torch.cat([batch["row"] for batch in objective.minibatches(data)])
    assert seen.bincount().tolist() == [2] * 10


def test_a_confident_policy_has_positive_log_density():
    """B5: std 0.01 at the mean gives a log-density far above zero; nothing may assume a sign."""
    normal, value = Normal(torch.zeros(1, 1, 1), torch.full((1, 1, 1), 0.01)), torch.zeros(1, 1, 1)
    dist = EvaluatedDecision(normal.log_prob(value), normal.entropy(), torch.ones(1, 1, dtype=torch.bool))
    assert dist.log_prob(value).item() > 3.6
