"""Decoupled PPO: the clip acts against the policy that a job starts from; formulas by hand, and whole runs."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes import FakeBackbone
from tensordict import TensorDict
from test_policy_gradient import SCHEMA, partition

from models.heads.mlp import ChunkMLPHead
from nexus_lightning.config import ConfigError, validate
from nexus_lightning.objectives.grpo import GRPO
from nexus_lightning.objectives.policy_gradient import (
    PolicyGradient,
    cut,
    likelihood_units,
    next_values,
    unit_mask,
)
from nexus_lightning.objectives.ppo import PPO
from nexus_lightning.producers.rollouts import advantage_stage
from nexus_lightning.queues.jobs import JobState, Scheduler
from nexus_lightning.queues.training import TrainingQueue
from nexus_lightning.schema import Normalizer
from nexus_lightning.trainer import train


def objective_of(level: str = "chunk", name: str = "ppo") -> PolicyGradient:
    torch.manual_seed(0)
    head = ChunkMLPHead(FakeBackbone().feature_spec(SCHEMA), SCHEMA, hidden_dim=16)
    algorithm, own = (PPO, {"critic_coef": 0.7}) if name == "ppo" else (GRPO, {})
    return algorithm(head, Normalizer(SCHEMA), algorithm.configure(log_prob_level=level, proximal=True, **own))


def moved(objective: PolicyGradient, amount: float) -> None:
    with torch.no_grad():
        for parameter in objective.head.parameters():
            parameter.add_(amount * torch.randn_like(parameter))


@pytest.mark.parametrize("name", ["ppo", "grpo"])
@pytest.mark.parametrize("level", ["chunk", "action", "token"])
def test_the_decoupled_loss_equals_a_written_out_one(name, level):
    """behaviour -> (moved) proximal -> (moved) present policy; every unit on its own."""
    objective = objective_of(level, name)
    data = partition(objective)
    behaviour = data["sample_log_prob"]
    moved(objective, 0.1)
    data.update(objective.actor_forward(data))
    assert ("proximal_value" in data.keys()) == (name == "ppo")
    proximal = data["proximal_log_prob"]
    moved(objective, 0.05)
    log_probs, _ = objective.head.evaluate(data["features"], data["state"], data["vla_action"])
    new = likelihood_units(log_probs, data["executed"], "sum", level)
    terms, weights, differences = [], [], []
    for row, unit in unit_mask(data["executed"], 2, level).nonzero().tolist():
        ratio, advantage = (new[row, unit] - proximal[row, unit]).exp(), data["advantage"][row, 0]
        weight = min(float((proximal[row, unit] - behaviour[row, unit]).exp()), 5.0)
        terms.append(weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
        weights.append(weight)
        differences.append(float(behaviour[row, unit] - proximal[row, unit]))
    losses = objective.loss(data, jobs_completed=0)
    torch.testing.assert_close(losses["policy_loss"], -torch.stack(terms).mean().detach(), rtol=1e-4, atol=1e-5)
    assert float(losses["importance_weight"]) == pytest.approx(sum(weights) / len(weights), rel=1e-4)
    assert float(losses["behavior_kl"]) == pytest.approx(sum(differences) / len(differences), abs=1e-4)


def test_with_a_fresh_rollout_it_is_ppo():
    objective = objective_of()
    data = partition(objective)
    data.update(objective.actor_forward(data))
    torch.testing.assert_close(data["proximal_log_prob"], data["sample_log_prob"])
    torch.testing.assert_close(data["proximal_value"], data["state_value"])
    data["proximal_log_prob"] = data["sample_log_prob"]
    moved(objective, 0.05)
    decoupled = objective.loss(data, 0)
    objective.settings.proximal = False
    plain = objective.loss(data, 0)
    assert decoupled["importance_weight"] == 1 and decoupled["behavior_kl"] == 0
    assert all(torch.equal(decoupled[key], plain[key]) for key in plain)


def test_a_stale_rollout_starts_unclipped():
    """What PPO cannot do: against the behaviour policy nearly everything is past the clip before the first step."""
    objective = objective_of()
    data = partition(objective, rows=64)
    moved(objective, 0.3)
    data.update(objective.actor_forward(data))
    decoupled = objective.loss(data, 0)
    objective.settings.proximal = False
    plain = objective.loss(data, 0)
    assert plain["clip_fraction"] > 0.9
    assert decoupled["clip_fraction"] == 0 and float(decoupled["ratio"]) == pytest.approx(1.0, abs=1e-4)
    assert float(decoupled["behavior_kl"]) == pytest.approx(float(plain["kl"]), rel=1e-3)


def test_next_values_across_dones_truncations_and_the_end():
    """Terminated after 2, truncated after 4, cut by the end of the rollout after 5."""

    def column(values, dtype=torch.float32):
        return torch.tensor([values], dtype=dtype).unsqueeze(-1)

    values = column([1.0, 2.0, 3.0, 4.0, 5.0])
    done, terminated = column([0, 1, 0, 1, 0], torch.bool), column([0, 1, 0, 0, 0], torch.bool)
    assert cut(done, terminated).flatten().tolist() == [False, False, False, True, True]
    bootstrap = column([70.0, 71.0, 72.0, 73.0, 74.0])
    assert next_values(values, done, terminated, bootstrap).flatten().tolist() == [2.0, 0.0, 4.0, 73.0, 74.0]
    assert not cut(column([1], torch.bool), column([1], torch.bool)).any(), "an end in the last column is an end"


@pytest.mark.parametrize("proximal", [False, True])
def test_the_advantage_stage_reads_the_partition(proximal):
    """Two simulators x two decisions, row by row in the partition; values of whoever looked at them last."""
    gamma, lam = 0.9, 0.8
    reward, acted, fresh = [1.0, 2.0, 3.0, 4.0], [0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]
    done, terminated, bootstrap = [0, 1, 1, 0], [0, 1, 0, 0], [9.0, 9.0, 5.0, 6.0]

    def column(values, dtype=torch.float32):
        return torch.tensor(values, dtype=dtype).unsqueeze(-1)

    log_probs = torch.arange(4.0).view(4, 1, 1)
    queue, scheduler = TrainingQueue(), Scheduler()
    scheduler.register("t", "rl")
    job = scheduler.reserve("t", 4, behavior_policy_version=0)
    queue.put(
        job.partition_id,
        TensorDict(
            {
                "vla_action": TensorDict({"log_probs": log_probs}, [4]),
                "executed": torch.ones(4, 1, dtype=torch.bool),
                "reward": column(reward),
                "done": column(done, torch.bool),
                "terminated": column(terminated, torch.bool),
                "episode_seed": torch.zeros(4, 1, dtype=torch.long),
                "state_value": column(acted),
                "bootstrap": column(bootstrap),
                "proximal_value": column(fresh),
            },
            [4],
        ),
        tenant_id="t",
    )
    scheduler.mark(job.job_id, JobState.NEEDS_ADVANTAGES)
    algorithm = PPO.configure(gamma=gamma, gae_lambda=lam, proximal=proximal)
    config = SimpleNamespace(algorithm=algorithm, environment=SimpleNamespace(num_envs=2))
    advantage_stage(scheduler, queue, SimpleNamespace(name="t", spec=SimpleNamespace(config=config)), 60, 2)
    assert scheduler.get(job.job_id).state == JobState.READY
    out = queue.get_data(queue.get_meta(["advantage", "value_target", "sample_log_prob"], 4, job.partition_id, "train"))
    v = fresh if proximal else acted
    # simulator 0 goes on, then terminates; simulator 1 is truncated, then cut by the end of the rollout
    delta = [1 + gamma * v[1] - v[0], 2 - v[1], 3 + gamma * 5 - v[2], 4 + gamma * 6 - v[3]]
    advantage = torch.tensor([delta[0] + gamma * lam * delta[1], *delta[1:]])
    torch.testing.assert_close(out["value_target"].flatten(), advantage + torch.tensor(v))
    torch.testing.assert_close(out["advantage"].flatten(), advantage)  # standardised in the step, over all ranks' rows
    assert out["sample_log_prob"].flatten().tolist() == [0, 1, 2, 3]


def test_whoever_waits_for_a_job_is_told_that_the_actor_is_needed():
    scheduler = Scheduler()
    scheduler.register("t", "rl")
    job = scheduler.reserve("t", 1, behavior_policy_version=0)
    scheduler.mark(job.job_id, JobState.NEEDS_ACTOR_FORWARD)
    assert scheduler.lease_next({"t": 0}, timeout_s=3600, deadline_s=60) is None
    assert scheduler.lease_stage(JobState.NEEDS_ACTOR_FORWARD, 60, tenant_id="t").job_id == job.job_id


@pytest.fixture
def toy(compose):
    def build(*overrides: str):
        config = compose("+tenants=[toy]", "tenants.toy.algorithm.proximal=true", *overrides)
        config.backbone = {"_target_": "fakes.FakeBackbone"}
        config.trainer.enable_progress_bar = False
        tenant = config.tenants["toy"]
        tenant.eval = replace(tenant.eval, episodes=2, every_n_jobs=None, at_start=False, video=False)
        tenant.target_jobs, tenant.algorithm.epochs = 4, 2
        return config

    return build


def metrics_of(run: dict, name: str) -> list[float]:
    with (Path(run["run_dir"]) / "metrics.csv").open() as file:
        return [float(value) for row in csv.DictReader(file) if (value := row.get(name))]


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_the_actor_sees_every_job_right_before_it_trains_it(toy, monkeypatch, name):
    jobs = []
    complete = Scheduler.complete
    monkeypatch.setattr(Scheduler, "complete", lambda self, *a, **k: jobs.append(complete(self, *a, **k)))
    group = ["tenants.toy.algorithm.name=grpo", "tenants.toy.algorithm.group_size=4"] if name == "grpo" else []
    run = train(toy(*group))
    assert run["tenants"]["toy"]["jobs_completed"] == 4 == len(jobs)
    stages = ["reserved", "needs_actor_forward", "computing_actor_forward", "needs_advantages", "computing_advantages"]
    for version, job in enumerate(jobs):
        assert job.metadata["proximal_policy_version"] == version, "nothing was trained in between"
        assert list(job.timestamps) == [*stages, "ready", "leased", "completed"]
    assert max(metrics_of(run, "train/toy/staleness")) == 1, "two in flight"
    assert set(metrics_of(run, "train/toy/dropped")) == {0.0}  # per rollout; the last ones may not end with the run
    assert set(metrics_of(run, "train/toy/in_flight_bound")) == {2.0}
    if name == "ppo":  # grpo may have a job without a group that counts
        assert len(metrics_of(run, "train/toy/importance_weight")) == 4
        assert set(metrics_of(run, "train/toy/entropy")) and len(metrics_of(run, "train/toy/explained_variance")) == 4
    assert run["backbone_passes_per_observation"]["toy"] == 1.0


def test_without_reuse_the_rollout_is_encoded_for_both_views(toy):
    run = train(toy("tenants.toy.features.reuse=never", "trainer.max_jobs=2"))
    assert run["backbone_rows"]["actor"] == 2 * 2 * 8 * 12


class BlindHead(ChunkMLPHead):
    """FAKE: cannot say how likely a decision was."""

    def evaluate(self, features, state, sample):
        raise RuntimeError("no likelihood today")


def test_an_actor_forward_that_fails_takes_out_its_tenant_alone(toy):
    config = toy("+tenant@tenants.blind=toy", "tenants.blind.algorithm.proximal=true")
    config.tenants["blind"].head["_target_"] = f"{__name__}.BlindHead"
    run = train(config)
    assert run["tenants"]["blind"]["quarantined"] == "RuntimeError: no likelihood today"
    assert run["tenants"]["toy"]["jobs_completed"] == 4
    events = [json.loads(line) for line in (Path(run["run_dir"]) / "events.jsonl").read_text().splitlines()]
    assert any(event.get("kind") == "actor_forward" and "toy" in json.dumps(event) for event in events)


def test_reinforce_has_nothing_to_decouple(toy):
    validate(toy())
    with pytest.raises(ConfigError, match=r"algorithm\.proximal=True: .* has no such key"):
        validate(toy("tenants.toy.algorithm.name=reinforce", "tenants.toy.algorithm.epochs=1"))
