"""Advantage-weighted regression: formulas against written-out values, and a run that learns from mixed quality."""

from __future__ import annotations

import math
from types import SimpleNamespace

import datasets
import pytest
import torch
from fakes import FakeBackbone
from tensordict import TensorDict

from models.heads.mlp import ChunkMLPHead
from nexus_lightning.config import ConfigError, validate
from nexus_lightning.demonstrations import describe_recording, record_demonstrations
from nexus_lightning.objectives.awr import AWR, advantage_weights, expectile_loss
from nexus_lightning.objectives.ppo import PPO
from nexus_lightning.producers.demonstrations import returns_to_go
from nexus_lightning.schema import Normalizer, TenantSchema
from nexus_lightning.trainer import train

SCHEMA = TenantSchema(state_dim=3, action_dim=2, chunk=3, execute=3, gripper="none", state_normalization="identity")


def test_weights_are_exponential_in_the_advantage_and_cut():
    weight = advantage_weights(torch.tensor([0.0, 0.1, -0.2]), temperature=0.1)
    raw = [math.exp(0), math.exp(1), math.exp(-2)]
    assert weight.tolist() == pytest.approx([w / (sum(raw) / 3) for w in raw], rel=1e-5)
    huge = advantage_weights(torch.cat([torch.zeros(99), torch.tensor([1e4])]), temperature=0.1)
    assert huge.isfinite().all() and huge.max() == 20.0


def test_the_expectile_is_where_the_loss_is_least():
    """The tau-expectile m solves tau * E[(x - m)+] = (1 - tau) * E[(m - x)+]."""
    x, tau = torch.tensor([0.0, 1.0, 4.0]), 0.8
    grid = torch.linspace(0, 4, 4001)
    best = grid[torch.stack([expectile_loss(x - m, tau) for m in grid]).argmin()]
    above, below = (x - best).clamp(min=0).mean(), (best - x).clamp(min=0).mean()
    assert float(tau * above) == pytest.approx(float((1 - tau) * below), abs=2e-3)
    assert expectile_loss(x - x.mean(), 0.5) == pytest.approx(0.5 * float(x.var(unbiased=False)))


def frames(**columns):
    return SimpleNamespace(hf_dataset=datasets.Dataset.from_dict(columns), repo_id="me/x")


def test_returns_to_go_stop_at_the_episode():
    data = frames(**{"next.reward": [1.0, 0.0, 2.0, 5.0, 1.0], "episode_index": [0, 0, 0, 1, 1]})
    assert returns_to_go(data, 0.5).flatten().tolist() == [1.5, 1.0, 2.0, 5.5, 1.0]
    success = frames(**{"next.success": [False, True, False, False], "episode_index": [0, 0, 1, 1]})
    assert returns_to_go(success, 0.9).flatten().tolist() == pytest.approx([0.9, 1.0, 0.0, 0.0])
    with pytest.raises(ValueError, match=r"me/x: offline RL needs the column next\.reward or next\.success"):
        returns_to_go(frames(episode_index=[0]), 0.9)


@pytest.fixture
def objective():
    torch.manual_seed(0)
    head = ChunkMLPHead(FakeBackbone().feature_spec(SCHEMA), SCHEMA, hidden_dim=32, loss="l2", state_noise=0.0)
    settings = AWR.configure(temperature=0.1, value_warmup_jobs=1, critic_coef=0.5)
    return AWR(head, Normalizer(SCHEMA), settings, batch_size=64)


def batch_of(rows: int) -> TensorDict:
    features = FakeBackbone()(TensorDict({}, [rows]), ["push"] * rows, SCHEMA)
    return TensorDict(
        {
            "features": features,
            "state": torch.zeros(rows, 3),
            "actions": torch.where(torch.arange(rows)[:, None, None] % 2 == 0, 0.5, -0.5).expand(-1, 3, 2).clone(),
            "is_pad": torch.zeros(rows, 3, dtype=torch.bool),
            "return_to_go": (torch.arange(rows) % 2 == 0).float().unsqueeze(-1),
        },
        [rows],
    )


def test_what_turned_out_well_is_imitated(objective):
    """Same state, two actions: the mean for plain cloning, the successful one for AWR."""
    batch, optimizer = batch_of(64), torch.optim.Adam(objective.head.parameters(), 3e-3)
    for job in range(200):
        optimizer.zero_grad()
        losses = objective.loss(batch, job)
        losses["loss"].backward()
        optimizer.step()
    chunk = objective.head.act(batch["features"], batch["state"])["chunk"]
    assert (chunk - 0.5).abs().max() < 0.1
    value = objective.head.value(batch["features"], batch["state"])
    assert float(value.mean()) == pytest.approx(0.5, abs=0.05), "the mean return of the data"


def test_warm_up_trains_the_critic_alone(objective):
    objective.loss(batch_of(8), jobs_completed=0)["loss"].backward()
    for name, parameter in objective.head.named_parameters():
        touched = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        assert touched == name.startswith("value_head."), name


def test_mixed_recordings_keep_failures_and_say_so(tmp_path):
    simulator = {"_target_": "fake_simulator.FakeSimulator", "goal": 2.0, "horizon": 6, "cameras": []}
    schema = TenantSchema(state_dim=4, action_dim=2, chunk=3, execute=2, gripper="close_positive")
    expert = "fake_simulator.make_expert"

    def record(name, **how):
        return record_demonstrations(
            simulator, expert, tmp_path / name, 4, 7, schema, inline=True, progress=False, **how
        )

    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    root = record("mixed", keep_failures=True, random_share=0.5)
    dataset = LeRobotDataset("local/mixed", root=root)
    succeeded = {i: False for i in range(dataset.num_episodes)}
    for row in dataset.hf_dataset:
        succeeded[int(row["episode_index"])] |= bool(row["next.success"])
    assert dataset.num_episodes == 4 and set(succeeded.values()) == {True, False}
    assert record("mixed", keep_failures=True, random_share=0.5) == root
    with pytest.raises(ValueError, match=r"random_share: recorded 0\.5, asked for"):
        record("mixed", keep_failures=True)
    assert "random_share" not in describe_recording(simulator, expert, 4, 7, schema), "old recordings stay valid"


def test_bad_offline_configs_are_refused(compose):
    config = compose("+tenants=[toy_offline]")
    validate(config)
    tenant = config.tenants["toy_offline"]
    tenant.algorithm.temperature = 0.0
    with pytest.raises(ConfigError, match=r"algorithm\.temperature=0\.0: must be positive"):
        validate(config)
    tenant.algorithm = PPO.configure(chunks_per_job=1)
    with pytest.raises(ConfigError, match=r"algorithm=PPO: trains task rl; .* choose one of awr, iql"):
        validate(config)
    tenant.algorithm = None
    with pytest.raises(ConfigError, match="task offline_rl needs an algorithm; choose one of awr, iql"):
        validate(config)
    tenant.task, tenant.algorithm = "rl", AWR.configure()
    with pytest.raises(ConfigError, match=r"AWR: trains task offline_rl; set tenants\.toy_offline\.task=offline_rl"):
        validate(config)


def test_awr_beats_cloning_on_the_same_mixed_data(compose):
    """40 unseen seeds of the toy; both see the same 60 episodes of an oracle mixed with random actions."""

    def run(*overrides):
        config = compose("+tenants=[toy_offline]", "trainer.enable_progress_bar=false", *overrides)
        config.backbone = {"_target_": "fakes.FakeBackbone"}
        tenant = config.tenants["toy_offline"]
        tenant.eval.at_start, tenant.eval.video = False, False
        if overrides:
            tenant.algorithm = None
        return train(config)["tenants"]["toy_offline"]["eval"]["success_rate"]

    awr, cloning = run(), run("tenants.toy_offline.task=sft")
    assert awr >= cloning + 0.1, (awr, cloning)
