"""Implicit Q-learning: targets and weights by hand, a two-step world where it must join two recordings, and resume."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from example_head import LinearChunkHead
from fakes import FakeBackbone
from tensordict import TensorDict

from models.heads.flow_matching import FlowMatchingHead
from models.heads.mlp import ChunkMLPHead
from nexus_lightning.checkpoint import read_payload, resolve_payload, tensors_digest
from nexus_lightning.config import ConfigError, validate
from nexus_lightning.conventions import DatasetConventions
from nexus_lightning.converter import DatasetConverter
from nexus_lightning.memory import head_memory
from nexus_lightning.objectives.awr import AWR
from nexus_lightning.objectives.iql import IQL, iql_weights
from nexus_lightning.objectives.sft import SFT
from nexus_lightning.policy import load_policy
from nexus_lightning.producers.demonstrations import low_dim_table, returns_to_go, transitions
from nexus_lightning.schema import Normalizer, TenantSchema
from nexus_lightning.tenant import TenantSpec, build_slot
from nexus_lightning.trainer import train

SCHEMA = TenantSchema(
    state_dim=6, action_dim=1, chunk=2, execute=2, gripper="none", rotation="none", state_normalization="identity"
)


def frames(**columns):
    return SimpleNamespace(hf_dataset=datasets.Dataset.from_dict(columns), repo_id="me/x")


def test_transitions_across_an_end_and_a_cut():
    """Episode 0 (4 frames) ends, episode 1 (4 frames) is cut; decisions of 2 steps; gamma 1/2."""
    data = frames(
        **{
            "next.reward": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0],
            "next.terminated": [0, 0, 0, 1, 0, 0, 0, 0],
            "episode_index": [0, 0, 0, 0, 1, 1, 1, 1],
        }
    )
    out = transitions(data, 0.5, 2)
    # the cut episode's last action leads to a state that nobody recorded: frame 6 counts one step, frame 7 none
    assert out["reward"].flatten().tolist() == [2.0, 4.0, 8.0, 8.0, 32.0, 64.0, 64.0, 0.0]
    assert out["discount"].flatten().tolist() == [0.25, 0.25, 0.0, 0.0, 0.25, 0.25, 0.5, 1.0]
    assert out["next_row"].tolist() == [2, 3, 3, 3, 6, 7, 7, 7]
    taken = [[True, True]] * 3 + [[True, False]] + [[True, True]] * 2 + [[True, False], [False, False]]
    assert out["taken"].tolist() == taken


def test_success_is_an_end_and_without_either_column_nothing_is_guessed():
    data = frames(**{"next.success": [False, True, False, False], "episode_index": [0, 0, 1, 1]})
    out = transitions(data, 0.5, 1)
    assert out["reward"].flatten().tolist() == [0.0, 1.0, 0.0, 0.0]
    assert out["discount"].flatten().tolist() == [0.5, 0.0, 0.5, 1.0]
    with pytest.raises(ValueError, match=r"me/x: offline RL needs the column next\.terminated or next\.success"):
        transitions(frames(**{"next.reward": [1.0], "episode_index": [0]}), 0.5, 1)


def test_weights_are_exponential_and_cut():
    weight = iql_weights(torch.tensor([0.0, 0.1, -0.2, 50.0]), temperature=0.1)
    assert weight.tolist() == pytest.approx([1.0, math.e, math.exp(-2), 100.0])


def objective_of(head=None, **settings) -> IQL:
    torch.manual_seed(0)
    if head is None:
        head = ChunkMLPHead(
            FakeBackbone().feature_spec(SCHEMA), SCHEMA, 32, use_features=False, loss="l2", state_noise=0.0
        )
    algorithm = IQL.configure(**settings)
    return IQL(head, Normalizer(SCHEMA), algorithm, 64, IQL.networks(head, algorithm))


def features_of(rows: int):
    return FakeBackbone()(TensorDict({}, [rows]), ["go"] * rows, SCHEMA)


def random_batch(rows: int) -> TensorDict:
    return TensorDict(
        {
            "features": features_of(rows),
            "next_features": features_of(rows),
            "state": torch.randn(rows, 6),
            "next_state": torch.randn(rows, 6),
            "actions": torch.randn(rows, 2, 1),
            "is_pad": torch.zeros(rows, 2, dtype=torch.bool),
            "reward": torch.randn(rows, 1),
            "discount": torch.rand(rows, 1),
            "taken": torch.ones(rows, 2, dtype=torch.bool),
        },
        [rows],
    )


def test_every_loss_equals_a_written_out_one():
    """Row by row; the slow networks differ from the trained ones, one row's episode has ended."""
    objective = objective_of(temperature=0.5, expectile=0.9, critic_coef=0.7)
    head, critic = objective.head, objective.critic
    with torch.no_grad():
        for parameter in critic.networks.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    batch = random_batch(5)
    batch["discount"][0] = 0.0
    batch["taken"][1, 1] = False
    q_loss, value_loss, advantages = 0.0, 0.0, []
    with torch.no_grad():
        for row in range(5):
            one = batch[row : row + 1]
            following = float(head.value(one["next_features"], one["next_state"]))
            target = float(one["reward"]) + float(one["discount"]) * following
            if row == 0:
                assert target == float(one["reward"]), "no value beyond the end of an episode"
            inputs = torch.cat([one["state"], (one["actions"] * one["taken"].unsqueeze(-1)).flatten(1)], -1)
            slow = min(float(net(one["features"], inputs)) for net in critic.slow.module)
            for net in critic.networks:
                q_loss += (float(net(one["features"], inputs)) - target) ** 2 / 5
            advantage = slow - float(head.value(one["features"], one["state"]))
            value_loss += (0.9 if advantage > 0 else 0.1) * advantage**2 / 5
            advantages.append(advantage)
    losses = objective.loss(batch, jobs_completed=0)
    assert float(losses["q_loss"]) == pytest.approx(q_loss, rel=1e-4)
    assert float(losses["value_loss"]) == pytest.approx(value_loss, rel=1e-4)
    assert float(losses["advantage"]) == pytest.approx(sum(advantages) / 5, abs=1e-5)
    rest = losses["loss"].detach() - 0.7 * (losses["q_loss"] + losses["value_loss"])
    torch.testing.assert_close(rest, losses["policy_loss"], rtol=1e-4, atol=1e-5)


def test_gradients_stay_where_they_belong():
    """Nothing flows into the slow networks, and from the Q target or the advantage into the value."""
    objective = objective_of(value_warmup_jobs=1)
    objective.loss(random_batch(8), jobs_completed=0)["loss"].backward()
    for name, parameter in objective.head.named_parameters():
        touched = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        assert touched == name.startswith("value_head."), name
    assert all(p.grad is not None for p in objective.critic.networks.parameters())
    assert all(p.grad is None and not p.requires_grad for p in objective.critic.slow.parameters())


def test_slow_networks_follow_at_the_target_rate():
    critic = objective_of(target_rate=0.25).critic
    critic.update_slow()  # torch's average starts with a copy
    before = [p.clone() for p in critic.networks.parameters()]
    with torch.no_grad():
        for parameter in critic.networks.parameters():
            parameter.add_(1.0)
    critic.update_slow()
    for slow, old in zip(critic.slow.module.parameters(), before, strict=True):
        torch.testing.assert_close(slow, old + 0.25)


def test_samples_without_a_target_are_in_no_minibatch():
    objective = objective_of()
    batch = random_batch(5)
    batch["taken"][2] = False
    assert [len(part) for part in objective.minibatches(batch)] == [4]
    assert list(objective.minibatches(batch[2:3])) == []


# ------------------------------------------------------------------------------------------------------ a small world


def half_good_recordings():
    """Decisions of two steps, states one-hot: start 0 (then 1), junction 2 (then 3), other start 4 (then 5).

    ::

        recording 1 (bad end):    start --(+1)--> junction --(-1)--> 0
        recording 2 (other start):   other --(+1)--> junction --(+1)--> 1
        recording 3 (way out):    start --(-1)--> 0.2

    From the start, +1 was followed by 0 and -1 by 0.2; but whoever goes +1 twice gets 1, and nobody did that.
    """
    episodes = [
        ([0, 1, 2, 3], [1, 1, -1, -1], [0, 0, 0, 0]),
        ([4, 5, 2, 3], [1, 1, 1, 1], [0, 0, 0, 1]),
        ([0, 1], [-1, -1], [0, 0.2]),
    ]
    columns = {"observation.state": [], "action": [], "next.reward": [], "next.terminated": [], "episode_index": []}
    for index, (states, actions, rewards) in enumerate(episodes * 2):
        columns["observation.state"] += torch.eye(6)[states].tolist()
        columns["action"] += [[float(a)] for a in actions]
        columns["next.reward"] += [float(r) for r in rewards]
        columns["next.terminated"] += [0.0] * (len(states) - 1) + [1.0]
        columns["episode_index"] += [index] * len(states)
    data = frames(**columns)
    table = low_dim_table(data, SCHEMA, DatasetConverter(SCHEMA, DatasetConventions()))
    steps = transitions(data, 0.95, SCHEMA.execute)
    table["next_state"] = table["state"][steps.pop("next_row")]
    table.update(steps)
    table["return_to_go"] = returns_to_go(data, 0.95)
    table["features"], table["next_features"] = features_of(len(table)), features_of(len(table))
    return table


def outcome(head) -> float:
    """What the deterministic policy gets from the start; an action between the two leads nowhere."""

    def decide(state: int) -> int:
        chunk = head.act(features_of(1), torch.eye(6)[state : state + 1])["chunk"].flatten()
        return 1 if bool((chunk > 0.5).all()) else -1 if bool((chunk < -0.5).all()) else 0

    first = decide(0)
    if first < 1:
        return 0.2 if first < 0 else 0.0
    return float(decide(2) == 1)


@pytest.fixture(scope="module")
def recordings():
    return half_good_recordings()


def fitted(objective, parameters, batch, steps=500):
    optimizer = torch.optim.Adam(parameters, 3e-3)
    for job in range(steps):
        optimizer.zero_grad()
        objective.loss(batch, job)["loss"].backward()
        optimizer.step()
        if isinstance(objective, IQL):
            objective.critic.update_slow()
    return objective.head


def test_iql_joins_two_half_good_recordings_and_nothing_else_does(recordings):
    iql = objective_of(gamma=0.95, expectile=0.9, temperature=0.1, target_rate=0.05)
    head = fitted(iql, [*iql.head.parameters(), *iql.critic.networks.parameters()], recordings)
    values = head.value(features_of(6), torch.eye(6)).flatten().tolist()
    assert values[2] > 0.7, "the junction is worth what its better half was followed by"
    assert outcome(head) == 1.0

    awr = objective_of().head
    algorithm = AWR.configure(gamma=0.95, expectile=0.9, temperature=0.02)
    awr = fitted(AWR(awr, Normalizer(SCHEMA), algorithm, 64), awr.parameters(), recordings)
    assert outcome(awr) == 0.2, "the return that followed says: take the way out"

    clone = objective_of().head
    clone = fitted(SFT(clone, Normalizer(SCHEMA), SFT.configure(), 64), clone.parameters(), recordings)
    assert outcome(clone) == 0.0, "the mean of +1 and -1 leads nowhere"


def test_the_learned_value_is_the_expectile_of_the_data(recordings):
    """At the junction half of the data end with 0 and half with 1: the tau-expectile of that coin is tau."""
    objective = objective_of(gamma=1.0, expectile=0.8, value_warmup_jobs=10_000, target_rate=0.05)
    batch = recordings.clone()
    batch["discount"] = (batch["discount"] > 0).float()
    head = fitted(objective, [*objective.head.parameters(), *objective.critic.networks.parameters()], batch)
    assert float(head.value(features_of(1), torch.eye(6)[2:3])) == pytest.approx(0.8, abs=0.05)


def test_a_flow_head_is_matched_to_what_weighs_most():
    """Advantage-weighted flow matching: the head's own loss on the drawn rows, and its own Q network."""
    torch.manual_seed(0)
    head = FlowMatchingHead(FakeBackbone().feature_spec(SCHEMA), SCHEMA)
    objective = objective_of(head)
    losses = objective.loss(random_batch(4), 0)
    losses["loss"].backward()
    assert losses["loss"].isfinite() and all(p.grad is not None for p in objective.critic.networks.parameters())


# ------------------------------------------------------------------------------------------------- one of the tenants


@pytest.fixture
def offline(compose):
    def build(*overrides):
        config = compose(
            "+tenants=[toy_offline]",
            "tenants.toy_offline.algorithm.name=iql",
            "tenants.toy_offline.dataset.record.episodes=6",
            "trainer.enable_progress_bar=false",
            *overrides,
        )
        config.backbone = {"_target_": "fakes.FakeBackbone"}
        tenant = config.tenants["toy_offline"]
        tenant.eval = replace(tenant.eval, episodes=2, every_n_jobs=None, at_start=False, video=False)
        tenant.target_jobs, tenant.algorithm.value_warmup_jobs = 6, 1
        return config

    return build


def test_q_networks_are_the_tenants_own_and_resume_to_the_bit(offline):
    whole, part = train(offline()), train(offline("trainer.max_jobs=3"))
    rest = train(offline(f"ckpt_path={part['run_dir']}"))
    payloads = [
        read_payload(resolve_payload(Path(run["run_dir"]) / "tenants" / "toy_offline")) for run in (whole, rest)
    ]
    assert tensors_digest(payloads[0].tensors) == tensors_digest(payloads[1].tensors)
    assert payloads[0].optimizer["state"].keys() == payloads[1].optimizer["state"].keys()
    slot = load_policy(payloads[0].path, FakeBackbone()).slot
    assert {k for k in payloads[0].tensors if k.startswith("critic.")} == {
        f"critic.{k}" for k in slot.critic.state_dict()
    }
    slot.build_optimizer()
    trained = sum(p.numel() for group in slot.optimizer.param_groups for p in group["params"])
    own = sum(p.numel() for p in (*slot.head.parameters(), *slot.critic.networks.parameters()))
    assert trained == own == head_memory(slot.head, critic=slot.critic).parameters
    assert whole["backbone_passes_per_observation"]["toy_offline"] == 1.0, "the next observation is one of the frames"

    # a start from a payload without Q networks leaves the fresh ones, one with some takes them
    fresh = build_slot(TenantSpec.compile("toy_offline", offline().tenants["toy_offline"], 0), FakeBackbone())
    before = tensors_digest(fresh.critic.state_dict())
    fresh.start_from({k: v for k, v in payloads[0].tensors.items() if not k.startswith("critic.")})
    assert tensors_digest(fresh.critic.state_dict()) == before
    fresh.start_from(payloads[0].tensors)
    assert tensors_digest(fresh.tensors()) == tensors_digest(payloads[0].tensors)


def test_bad_iql_configs_are_refused(offline):
    config = offline("tenants.toy_offline.features.reuse=never")
    tenant = config.tenants["toy_offline"]
    validate(offline())
    tenant.algorithm.expectile, tenant.algorithm.target_rate = 1.0, 0.0
    tenant.head = {"_target_": "test_iql.NoQHead", "lr": 1e-3}
    with pytest.raises(ConfigError) as error:
        validate(config)
    for text in (
        "features.reuse=never: iql reads the features of two observations",
        "expectile=1.0: must lie between 0 and 1",
        "target_rate=0.0: must lie in (0, 1]",
        "head=NoQHead: has no q_network, which iql needs",
    ):
        assert text in str(error.value)
    tenant.task = "rl"
    with pytest.raises(ConfigError, match=r"IQL: trains task offline_rl; set tenants\.toy_offline\.task=offline_rl"):
        validate(config)


class NoQHead(LinearChunkHead):
    """A head with a critic and no Q network."""

    supports_rl = True

    def value(self, features, state):
        return state[:, :1]

    def get_dist(self, features, state):
        raise NotImplementedError
