"""SimulatorEnv on a fake simulator: chunks, masks, seeds, death of a worker."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrl.collectors import Collector
from torchrl.envs.utils import check_env_specs

from nexus_lightning.environment import SimulatorDied, SimulatorEnv, SimulatorError, check_tenant_env, execute_chunk
from nexus_lightning.schema import NormalizationStats, Normalizer, TenantSchema

sys.path.insert(0, str(Path(__file__).parent))  # worker processes get this path and import the fake from here
TARGET = "fake_simulator.FakeSimulator"


def make_schema(**changes):
    fields = {
        "state_dim": 4,
        "action_dim": 2,
        "chunk": 4,
        "execute": 3,
        "gripper": "close_positive",
        "action_normalization": "min_max",
    }
    return TenantSchema(**{**fields, **changes})


def make_normalizer(schema):
    """Actions of dim 0 lie in [0, 0.5], so normalised -1 is 0 and +1 is 0.5; the gripper is in [-1, 1]."""
    stats = NormalizationStats.of(torch.tensor([[0.0, -1.0], [0.5, 1.0]]))
    return Normalizer(schema, action=stats)


@pytest.fixture
def make_env():
    envs = []

    def make(num_envs=1, inline=True, schema=None, simulator=None, **kwargs):
        schema = schema or make_schema()
        config = {"_target_": TARGET, "cameras": list(schema.cameras), **(simulator or {})}
        env = SimulatorEnv(config, schema, make_normalizer(schema), num_envs, tenant="blue", inline=inline, **kwargs)
        envs.append(env)
        return env

    yield make
    for env in envs:
        env.close()
    assert not multiprocessing.active_children()


def chunk(env, value=1.0):
    return torch.full((env.num_envs, env.schema.chunk, env.schema.action_dim), value)


def step(env, td, value=1.0):
    return env.step(td.set(("vla_action", "chunk"), chunk(env, value)))["next"]


def test_early_success_inside_a_chunk_keeps_reward_and_masks_the_rest():
    from fake_simulator import FakeSimulator

    sim = FakeSimulator(goal=1.2, step_reward=0.25)
    sim.reset(0)
    sim.position = 0.0
    result = execute_chunk(sim, np.full((5, 2), 0.7, np.float32))
    assert result.executed.tolist() == [True, True, False, False, False]
    assert (result.reward, result.success, result.terminated, result.truncated) == (1.5, True, True, False)


def test_final_observation_belongs_to_the_finished_episode(make_env):
    env = make_env(simulator={"goal": 0.9})
    td = env.reset()
    start = td["observation", "state"][0, 0].item()
    nxt = step(env, td)
    while not nxt["done"].item():
        td = nxt.exclude("reward")
        nxt = step(env, td)
    steps = int(nxt["observation", "state"][0, 1])
    assert nxt["observation", "state"][0, 0].item() == pytest.approx(start + 0.5 * steps)
    assert nxt["success"].item() and nxt["success_once"].item() and nxt["terminated"].item()
    assert nxt["executed"][0].tolist() == [k < (steps - 1) % 3 + 1 for k in range(4)]
    assert nxt["episode_length"].item() == steps
    assert nxt["reward"].item() == 1.0
    # the next reset starts a new episode
    again = env.reset()
    assert again["observation", "state"][0, 1] == 0 and again["episode_seed"] != nxt["episode_seed"]


def test_specs_hold_and_a_collector_runs(make_env):
    env = make_env(num_envs=3, schema=make_schema(cameras=("front", "wrist"), image_size=16))
    check_env_specs(env)
    check_tenant_env(env)
    collector = Collector(
        env,
        lambda td: td.set(("vla_action", "chunk"), chunk(env)),
        frames_per_batch=12,
        total_frames=24,
        reset_at_each_iter=True,
    )
    batches = list(collector)
    collector.shutdown()
    assert [b.shape for b in batches] == [torch.Size([3, 4])] * 2
    batch = batches[0]
    # horizon 6, execute 3: chunks 0, 1 end the first episode, chunks 2, 3 the second
    assert batch["next", "done"].squeeze(-1).tolist() == [[False, True, False, True]] * 3
    assert batch["next", "episode_length"].squeeze(-1).tolist() == [[3, 6, 3, 6]] * 3
    assert batch["next", "observation", "image", "wrist"].amax((2, 3, 4)).tolist() == [[3, 6, 3, 6]] * 3
    # the text of each row follows its own episode
    for row in range(3):
        for t in range(4):
            assert batch["language_instruction"][row][t] == f"count {batch['episode_seed'][row, t].item()}"


def test_constructing_starts_nothing_and_close_ends_everything(make_env):
    env = make_env(num_envs=2, inline=False)
    assert not multiprocessing.active_children()
    td = env.reset()
    assert len(multiprocessing.active_children()) == 2
    assert len({*td["observation", "state"][:, 3].tolist(), os.getpid()}) == 3
    env.close()
    assert not multiprocessing.active_children()
    env.close()


def test_seeds_are_reproducible_and_resumable(make_env):
    env = make_env(num_envs=2, seed=5)
    first, second = env.reset(), env.reset()
    assert env.episodes_started == [2, 2]
    assert len({*first["episode_seed"].flatten().tolist(), *second["episode_seed"].flatten().tolist()}) == 4
    same = make_env(num_envs=2, seed=5)
    same.episodes_started = [1, 1]
    resumed = same.reset()
    assert torch.equal(resumed["episode_seed"], second["episode_seed"])
    assert torch.equal(resumed["observation", "state"][:, :3], second["observation", "state"][:, :3])
    with pytest.raises(ValueError, match="give 2 counts"):
        env.episodes_started = [1]


@pytest.mark.parametrize("num_envs", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_fixed_episodes_each_count_once(make_env, num_envs, count):
    env = make_env(num_envs=num_envs, simulator={"goal": 1.0})
    seeds = [100 + i for i in range(count)]
    env.set_episodes(seeds)
    td, finished = env.reset(), []
    for _ in range(50):
        active = ~env.exhausted
        nxt = step(env, td)
        done = nxt["done"].squeeze(-1)
        finished += nxt["episode_seed"][done & active].flatten().tolist()
        if env.exhausted.all():
            break
        td = nxt.exclude("reward").set("_reset", nxt["done"].clone())
        td = env.reset(td)
    assert sorted(finished) == seeds
    # an exhausted env: nothing executed, no reward, done
    nxt = step(env, td)
    assert nxt["done"].all() and not nxt["executed"].any() and not nxt["reward"].any()
    assert (nxt["episode_seed"] == -1).all()
    assert env.episodes_started == [0] * num_envs
    env.set_episodes(None)
    assert not env.exhausted.any() and (env.reset()["episode_seed"] >= 0).all()


def test_partial_reset_leaves_the_others_alone(make_env):
    env = make_env(num_envs=2)
    td = step(env, env.reset()).exclude("reward")
    before = td.clone()
    td = env.reset(td.set("_reset", torch.tensor([[True], [False]])))
    assert td["observation", "state"][0, 1] == 0 and td["observation", "state"][1, 1] == 3
    assert td["episode_length"].flatten().tolist() == [0, 3]
    assert td["language_instruction"][1] == before["language_instruction"][1]
    assert td["language_instruction"][0] != before["language_instruction"][0]


def test_a_done_env_ignores_steps_until_its_reset(make_env):
    env = make_env(num_envs=1, simulator={"horizon": 3})
    nxt = step(env, env.reset())
    assert nxt["truncated"].item() and not nxt["terminated"].item()
    again = step(env, nxt.exclude("reward"))
    assert again["done"].item() and again["reward"].item() == 0 and not again["executed"].any()
    assert torch.equal(again["observation", "state"], nxt["observation", "state"])


def test_actions_are_unnormalised_converted_and_clipped(make_env):
    env = make_env()
    normalised = chunk(env, 1.0)
    normalised[..., 1] = 0.5  # gripper half open
    native = env.to_native(normalised)
    assert native.shape == (1, 3, 2)
    assert np.allclose(native[..., 0], 0.5)  # un-normalised: 1 is the maximum, 0.5
    assert np.allclose(native[..., 1], -0.5)  # close_positive: the sign is flipped
    assert np.allclose(env.to_native(chunk(env, 100.0))[..., 0], 1.0)
    td = env.reset()
    start = td["observation", "state"][0, 0].item()
    nxt = env.step(td.set(("vla_action", "chunk"), normalised))["next"]
    assert nxt["observation", "state"][0, 0].item() == pytest.approx(start + 3 * 0.5)
    assert nxt["observation", "state"][0, 2].item() == pytest.approx(-0.5)


def test_check_tenant_env_catches_an_env_that_skips_unnormalisation(make_env):
    env = make_env()
    env.to_native = lambda c: c[:, :3].clamp(-1, 1).numpy()
    with pytest.raises(ValueError, match="un-normalise"):
        check_tenant_env(env)


def test_non_finite_action_names_the_tenant(make_env):
    env = make_env()
    with pytest.raises(ValueError, match=r"'blue'.*env 0 is not finite"):
        step(env, env.reset(), float("nan"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gripper": "open_positive"}, "gripper='open_positive'"),
        ({"state_dim": 5}, "state_dim=5"),
        ({"cameras": ("front",), "image_size": 32}, "image_size=32"),
    ],
)
def test_schema_and_simulator_must_agree(make_env, changes, message):
    with pytest.raises(ValueError, match=message):
        make_env(schema=make_schema(**changes)).reset()


def test_missing_camera_lists_what_there_is(make_env):
    env = make_env(schema=make_schema(cameras=("front",), image_size=16), simulator={"cameras": ["left"]})
    with pytest.raises(ValueError, match=r"no 'front'; the simulator has \['left'\]"):
        env.reset()


def test_video_frames_of_env_0(make_env):
    env = make_env(num_envs=2, record_frames=True)
    step(env, env.reset())
    frames = env.pop_frames()
    assert [f[0, 0, 0] for f in frames] == [0, 3] and frames[0].shape == (8, 8, 3)
    assert env.pop_frames() == []


def test_a_killed_worker_is_named_and_restarts(make_env):
    env = make_env(num_envs=2, inline=False)
    td = env.reset()
    pids = td["observation", "state"][:, 3].int().tolist()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(SimulatorDied, match=r"'blue'.*simulator 1 died") as caught:
        for _ in range(20):
            td = step(env, td).exclude("reward")
            td = env.reset() if td["done"].any() else td
    assert (caught.value.tenant, caught.value.index) == ("blue", 1)
    assert caught.value.exit_code in (-signal.SIGKILL, None)
    td = env.reset()
    again = td["observation", "state"][:, 3].int().tolist()
    assert again[0] == pids[0] and again[1] != pids[1]
    assert step(env, td)["executed"].sum() == 6


def test_a_stop_signal_to_the_whole_job_leaves_the_simulators_to_their_parent(make_env):
    """Slurm signals every process of a job: the simulators still serve while the parent finishes and saves."""
    env = make_env(num_envs=2, inline=False)
    td = env.reset()
    for pid in td["observation", "state"][:, 3].int().tolist():
        os.kill(pid, signal.SIGTERM)  # from the parent itself: multiprocessing ends daemons like this
    with pytest.raises(SimulatorDied):
        step(env, td)
    td = env.reset()
    pids = td["observation", "state"][:, 3].int().tolist()
    subprocess.run(["kill", "-TERM", *map(str, pids)], check=True)  # from anybody else
    assert step(env, td)["executed"].sum() == 6
    assert env.reset()["observation", "state"][:, 3].int().tolist() == pids


def test_exit_exception_and_timeout_in_a_worker(make_env):
    env = make_env(inline=False, simulator={"crash_at": 2})
    with pytest.raises(SimulatorDied, match="exit code 3"):
        step(env, env.reset())
    env.close()
    env = make_env(inline=False, simulator={"raise_at": 2})
    with pytest.raises(SimulatorError, match=r"(?s)'blue'.*fake_simulator.py.*the fake gripper broke"):
        step(env, env.reset())
    assert not multiprocessing.active_children()
    assert env.reset()["observation", "state"][0, 1] == 0
    env.close()
    env = make_env(inline=False, simulator={"hang_at": 2}, step_timeout_s=0.5)
    with pytest.raises(SimulatorDied, match="no answer within"):
        step(env, env.reset())


def test_an_error_while_building_comes_back(make_env):
    env = make_env(inline=False, simulator={"no_such_argument": 1})
    with pytest.raises(SimulatorError, match="no_such_argument"):
        env.reset()


def test_bad_arguments():
    schema = make_schema()
    with pytest.raises(ValueError, match="no _target_"):
        SimulatorEnv({}, schema, Normalizer(schema), tenant="blue")
    with pytest.raises(ValueError, match="num_envs=0"):
        SimulatorEnv({"_target_": TARGET}, schema, Normalizer(schema), num_envs=0)
