"""PPO on chunks: masks, likelihoods and advantages against hand-computed values."""

from __future__ import annotations

import pytest
import torch
from fakes import FakeBackbone
from tensordict import TensorDict
from torch.distributions import Normal

from models.heads.mlp import ChunkMLPHead
from nexus_lightning.objectives.grpo import GRPO, group_advantages, group_metrics
from nexus_lightning.objectives.policy_gradient import (
    EvaluatedDecision,
    likelihood_units,
    next_values,
    reduce_chunk,
    unit_mask,
)
from nexus_lightning.objectives.ppo import PPO
from nexus_lightning.objectives.reinforce import Reinforce
from nexus_lightning.schema import Normalizer, TenantSchema
from nexus_lightning.shares import Metric

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


def test_the_horizon_is_a_cut_or_a_failure():
    """Row 0 terminates at 1 and is cut by the rollout's end at 3; row 1 is truncated at 1 and terminates at 3."""
    done = torch.tensor([[0, 1, 0, 0], [0, 1, 0, 1]], dtype=torch.bool).unsqueeze(-1)
    terminated = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1]], dtype=torch.bool).unsqueeze(-1)
    following = TensorDict({"done": done, "terminated": terminated}, [2, 4])
    values, bootstrap = torch.arange(1.0, 9.0).view(2, 4, 1), torch.full((2, 4, 1), 50.0)
    for truncated, expected in ((True, [[2, 0, 4, 50], [6, 50, 8, 0]]), (False, [[2, 0, 4, 50], [6, 0, 8, 0]])):
        end = PPO.ended(following, PPO.configure(bootstrap_truncated=truncated))
        assert next_values(values, done, end, bootstrap).squeeze(-1).tolist() == expected


def test_gae_stops_at_done_and_bootstraps_only_where_truncated():
    gamma, lam = 0.9, 0.8
    # two episodes in one row: the first terminates at step 1, the second is truncated at step 3
    td = rollout([0.0, 1.0, 0.0, 0.0], [0.5, 0.4, 0.3, 0.2], [0.4, 0.0, 0.2, 0.6], [0, 1, 0, 1], [0, 1, 0, 0])
    out = PPO.advantages(td, PPO.configure(gamma=gamma, gae_lambda=lam))
    delta = [0.0 + gamma * 0.4 - 0.5, 1.0 - 0.4, gamma * 0.2 - 0.3, gamma * 0.6 - 0.2]
    advantage = [delta[0] + gamma * lam * delta[1], delta[1], delta[2] + gamma * lam * delta[3], delta[3]]
    target = torch.tensor(advantage) + torch.tensor([0.5, 0.4, 0.3, 0.2])
    assert torch.allclose(out["value_target"].flatten(), target, atol=1e-6)
    assert torch.allclose(out["advantage"].flatten(), torch.tensor(advantage), atol=1e-6)


def test_discount_per_environment_step():
    """A decision that took n steps discounts by gamma to the n; three steps here, then one."""
    gamma = 0.9
    td = rollout([0.0, 1.0], [0.5, 0.4], [0.4, 0.0], [0, 1], [0, 1])
    td["next", "executed"] = torch.tensor([[[True, True, True], [True, False, False]]])
    td["vla_action", "log_probs"] = torch.zeros(1, 2, 3, 1)
    out = PPO.advantages(td, PPO.configure(gamma=gamma, gae_lambda=1.0, discount_per="step"))
    assert torch.allclose(out["value_target"].flatten(), torch.tensor([gamma**3 * 1.0, 1.0]), atol=1e-6)


def test_reinforce_uses_the_whole_return_minus_the_baseline():
    td = rollout([1.0, 2.0, 4.0], [0.5, 0.25, 0.1], [0.25, 0.1, 0.0], [0, 0, 1], [0, 0, 1])
    out = Reinforce.advantages(td, Reinforce.configure(gamma=0.5))
    returns = torch.tensor([1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4, 4.0])
    assert torch.allclose(out["value_target"].flatten(), returns, atol=1e-6)
    assert torch.allclose(out["advantage"].flatten(), returns - torch.tensor([0.5, 0.25, 0.1]), atol=1e-6)


def test_grpo_compares_the_episodes_of_one_initial_state():
    """Four simulators, two groups. Group 7: returns 1, 0 (and a cut episode); group 9: no spread."""
    reward = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    done = torch.tensor([[0, 1, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]], dtype=torch.bool)
    seeds = torch.tensor([[7, 7, 8], [7, 7, 7], [9, 9, 8], [9, 8, 8]])
    size = [4, 3]
    td = TensorDict(
        {
            "episode_seed": seeds.unsqueeze(-1),
            "vla_action": TensorDict({"log_probs": torch.zeros(4, 3, 1, 1)}, size),
            "next": TensorDict(
                {
                    "reward": reward.unsqueeze(-1),
                    "done": done.unsqueeze(-1),
                    "executed": torch.ones(4, 3, 1, dtype=torch.bool),
                },
                size,
            ),
        },
        size,
    )
    out = GRPO.advantages(td, GRPO.configure(group_size=2))
    # mean 0.5, standard deviation 0.5: +1 for the episode of return 1, -1 for the other
    assert out["advantage"].squeeze(-1).tolist() == [[1, 1, 0], [-1, -1, -1], [0, 0, 0], [0, 0, 0]]
    assert out["counts"].squeeze(-1).tolist() == [[True, True, False], [True, True, True], [False] * 3, [False] * 3]
    # of group 8 no episode was finished
    assert group_metrics(td) == {"groups": Metric(2.0, "sum"), "zero_spread_groups": Metric(1.0, "sum")}


def test_groups_never_mix_and_one_finished_episode_is_no_group():
    reward, done = torch.tensor([[1.0], [0.0], [5.0]]), torch.ones(3, 1, dtype=torch.bool)
    seeds = torch.tensor([[1], [1], [2]])
    size = [3, 1]
    following = TensorDict({"reward": reward.unsqueeze(-1), "done": done.unsqueeze(-1)}, size)
    td = TensorDict({"episode_seed": seeds.unsqueeze(-1), "next": following}, size)
    advantage, counts = group_advantages(td)
    assert advantage.flatten().tolist() == [1.0, -1.0, 0.0] and counts.flatten().tolist() == [True, True, False]
    assert group_metrics(td) == {"groups": Metric(1.0, "sum"), "zero_spread_groups": Metric(0.0, "sum")}


@pytest.mark.parametrize("level", ["chunk", "action", "token"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_likelihood_units_against_loops(level, reduction):
    torch.manual_seed(0)
    values, executed = torch.randn(2, 3, 2), torch.tensor([[True, True, False], [True, True, True]])
    units = likelihood_units(values, executed, reduction, level)[unit_mask(executed, 2, level)].tolist()
    expected = []
    for row in range(2):
        steps = [values[row, t] for t in range(3) if executed[row, t]]
        if level == "chunk":
            whole = torch.cat(steps)
            expected.append(whole.sum() if reduction == "sum" else whole.mean())
        elif level == "action":
            expected += [step.sum() if reduction == "sum" else step.mean() for step in steps]
        else:
            expected += [value for step in steps for value in step]
    assert units == pytest.approx([float(value) for value in expected])


@pytest.mark.parametrize(("algorithm", "settings"), [(PPO, {"critic_coef": 0.7}), (GRPO, {})], ids=["ppo", "grpo"])
@pytest.mark.parametrize("level", ["chunk", "action", "token"])
def test_the_clipped_loss_equals_a_written_out_one(algorithm, settings, level):
    """Brute force over decisions and units, with a policy that has moved since it acted."""
    torch.manual_seed(0)
    head = ChunkMLPHead(FakeBackbone().feature_spec(SCHEMA), SCHEMA, hidden_dim=16)
    objective = algorithm(head, Normalizer(SCHEMA), algorithm.configure(log_prob_level=level, **settings))
    data = partition(objective)
    old = data["sample_log_prob"]
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    log_probs, _ = head.evaluate(data["features"], data["state"], data["vla_action"])
    new = likelihood_units(log_probs, data["executed"], "sum", level)
    mask = unit_mask(data["executed"], 2, level)
    terms = []
    for row, unit in mask.nonzero().tolist():
        ratio, advantage = (new[row, unit] - old[row, unit]).exp(), data["advantage"][row, 0]
        terms.append(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    expected = -torch.stack(terms).mean()
    losses = objective.loss(data, jobs_completed=0)
    torch.testing.assert_close(losses["policy_loss"], expected.detach(), rtol=1e-4, atol=1e-5)
    if algorithm is PPO:
        error = (head.value(data["features"], data["state"]) - data["value_target"]).square().mean()
        torch.testing.assert_close(losses["loss"], expected + 0.7 * error, rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(losses["loss"], expected, rtol=1e-4, atol=1e-5)
        assert "value_loss" not in losses


def test_reinforce_is_minus_log_prob_times_advantage():
    torch.manual_seed(0)
    head = ChunkMLPHead(FakeBackbone().feature_spec(SCHEMA), SCHEMA, hidden_dim=16)
    objective = Reinforce(head, Normalizer(SCHEMA), Reinforce.configure(critic_coef=0.5))
    data = partition(objective)
    log_probs, _ = head.evaluate(data["features"], data["state"], data["vla_action"])
    units = likelihood_units(log_probs, data["executed"], "sum", "chunk")
    losses = objective.loss(data, jobs_completed=0)
    torch.testing.assert_close(losses["policy_loss"], -(units * data["advantage"]).mean().detach())
    error = (head.value(data["features"], data["state"]) - data["value_target"]).square().mean()
    torch.testing.assert_close(losses["value_loss"], error.detach(), rtol=1e-4, atol=1e-5)


def test_decisions_that_do_not_count_are_in_no_minibatch(objective):
    data = partition(objective, rows=6)
    data["counts"][2:] = False
    assert sum(len(batch) for batch in objective.minibatches(data)) == 2 * 2
    data["counts"][:] = False
    assert list(objective.minibatches(data)) == []


@pytest.fixture
def objective():
    torch.manual_seed(0)
    head = ChunkMLPHead(FakeBackbone().feature_spec(SCHEMA), SCHEMA, hidden_dim=16)
    return PPO(head, Normalizer(SCHEMA), PPO.configure(epochs=2, minibatch_size=4))


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
            "sample_log_prob": likelihood_units(
                acted["log_probs"], executed, objective.settings.log_prob, objective.settings.log_prob_level
            ),
            "counts": torch.ones(rows, 1, dtype=torch.bool),
            "advantage": torch.randn(rows, 1),
            "value_target": torch.randn(rows, 1),
        },
        [rows],
    )


def test_before_any_step_the_ratio_is_one(objective):
    data = partition(objective)
    losses = objective.loss(data, jobs_completed=0)
    assert losses["kl"].abs() < 1e-5 and losses["clip_fraction"] == 0
    names = {"loss", "policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "ratio", "explained_variance"}
    assert losses.keys() == names and float(losses["ratio"]) == pytest.approx(1.0, abs=1e-5)
    residual = data["value_target"] - objective.head.value(data["features"], data["state"])
    unexplained = residual.var(correction=0) / data["value_target"].var(correction=0)
    torch.testing.assert_close(losses["explained_variance"], (1 - unexplained).detach(), rtol=1e-4, atol=1e-5)
    steps = data["executed"].sum(-1).float()
    _, entropy = objective.head.evaluate(data["features"], data["state"], data["vla_action"])
    torch.testing.assert_close(losses["entropy"], (entropy[:, 0].sum(-1).detach() * steps).mean(), rtol=1e-4, atol=1e-5)
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
    objective.settings.value_warmup_jobs = 1
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


@pytest.mark.parametrize("algorithm", [PPO, GRPO])
def test_the_loss_follows_its_head_to_another_device(algorithm):
    """Built before Lightning moves the head. A GPU refuses clip bounds that stay behind; `meta` stands in for one."""
    backbone = FakeBackbone()
    head = ChunkMLPHead(feature_spec=backbone.feature_spec(SCHEMA, "pooled"), schema=SCHEMA)
    objective = algorithm(head, Normalizer(SCHEMA), algorithm.configure())
    assert {b.device.type for b in objective.loss_module.buffers(recurse=False)} == {"cpu"}
    seen = {}

    class Arrived(Exception):
        pass

    def arrived(*_):
        seen.update({k: b.device.type for k, b in objective.loss_module.named_buffers(recurse=False)})
        raise Arrived

    objective.loss_module.register_forward_pre_hook(arrived)
    head.to("meta")
    batch = TensorDict(
        {
            "features": torch.zeros(2, 1),
            "state": torch.zeros(2, 3),
            "vla_action": TensorDict({"chunk": torch.zeros(2, 3, 2)}, [2]),
            "executed": torch.ones(2, 3, dtype=torch.bool),
            "sample_log_prob": torch.zeros(2, 1),
            "advantage": torch.zeros(2, 1),
            "value_target": torch.zeros(2, 1),
            "state_value": torch.zeros(2, 1),
        },
        [2],
    )
    with pytest.raises(Arrived):
        objective.loss(batch, jobs_completed=0)
    assert set(seen.values()) == {"meta"} and seen, seen
