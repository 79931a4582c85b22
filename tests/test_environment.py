"""SimulatorEnv on a fake simulator: chunks, masks, seeds, death of a worker."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_simulator import WRONG
from torchrl.collectors import Collector
from torchrl.envs.utils import check_env_specs

from nexus_lightning.environment import (
    ContractError,
    SimulatorDied,
    SimulatorEnv,
    SimulatorError,
    check_tenant_env,
    execute_chunk,
)
from nexus_lightning.schema import NormalizationStats, Normalizer, TenantSchema
from nexus_lightning.simulator import BatchedHost, View, build_simulator, check_chunk, check_step

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


def test_a_horizon_that_is_no_multiple_of_the_executed_chunk_cuts_the_last_one(make_env):
    """The rule for it, hence nothing to refuse: the time limit ends a chunk like any other done."""
    env = make_env(simulator={"horizon": 5, "step_reward": 1.0})  # 3 executed actions per chunk
    first = step(env, env.reset())
    last = step(env, first.exclude("reward"))
    assert first["executed"][0].tolist() == [True, True, True, False] and not first["done"].item()
    assert last["executed"][0].tolist() == [True, True, False, False]
    assert (first["reward"].item(), last["reward"].item(), last["episode_length"].item()) == (3.0, 2.0, 5)
    assert last["truncated"].item() and last["done"].item() and not last["terminated"].item()


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
    ],
)
def test_schema_and_simulator_must_agree(make_env, changes, message):
    with pytest.raises(ValueError, match=message):
        make_env(schema=make_schema(**changes)).reset()


def test_missing_camera_lists_what_there_is(make_env):
    env = make_env(schema=make_schema(cameras=("front",), image_size=16), simulator={"cameras": ["left"]})
    with pytest.raises(ValueError, match=r"no 'front'; the simulator has \['left'\]"):
        env.reset()


def test_video_frames_of_the_episodes_asked_for(make_env):
    env = make_env(num_envs=2)
    env.record = [(0, 5)]
    env.set_episodes([4, 5, 6])
    td = step(env, env.reset())
    assert [f[0, 0, 0] for f in env.pop_frames()[0, 5]] == [0, 3] and env.pop_frames() == {}
    td = env.reset(step(env, td.exclude("reward")).exclude("reward").set("_reset", torch.tensor([[True], [True]])))
    assert list(env.pop_frames()) == [(0, 5)], "the end of the episode asked for, nothing of the next ones"


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


# ---- E1: early success, masks and final observations in a rollout ----


def test_a_success_at_step_2_of_8_ends_its_episode_and_the_next_one_starts_clean(make_env):
    schema = make_schema(chunk=8, execute=8, cameras=("front",), image_size=16)
    env = make_env(schema=schema, simulator={"goal": 0.6, "horizon": 20}, num_envs=2)
    policy = lambda td: td.set(("vla_action", "chunk"), chunk(env))  # noqa: E731
    data = env.rollout(3, policy, auto_reset=True, break_when_any_done=False)
    nxt = data["next"]
    assert nxt["done"].all() and nxt["success"].all() and nxt["terminated"].all()
    for row in range(2):
        for t in range(3):
            length = int(nxt["episode_length"][row, t])
            assert length in (1, 2, 3), "starts lie in [-0.5, 0.5], the goal at 0.6, a step is 0.5"
            assert nxt["executed"][row, t].tolist() == [k < length for k in range(8)]
            assert nxt["reward"][row, t] == 1.0
            # the final observation: of this episode, at its last step, with its own instruction and image
            start, end = data["observation", "state"][row, t, 0], nxt["observation", "state"][row, t, 0]
            assert end.item() == pytest.approx(start.item() + 0.5 * length)
            assert (nxt["observation", "image", "front"][row, t] == length).all()
            assert nxt["episode_seed"][row, t] == data["episode_seed"][row, t]
            assert nxt["language_instruction"][row][t] == data["language_instruction"][row][t]
            assert data["observation", "state"][row, t, 1] == 0 and data["episode_length"][row, t] == 0
        assert len(set(data["episode_seed"][row].flatten().tolist())) == 3


# ---- several tasks ----


@pytest.mark.parametrize("num_envs", [1, 2, 3])
def test_every_task_and_seed_runs_once_on_few_builds(make_env, num_envs):
    from fake_simulator import FakeSimulator

    FakeSimulator.built.clear()
    env = make_env(num_envs=num_envs, tasks=["lift", "push", "turn"], simulator={"horizon": 3})
    wanted = [(task, seed) for task in range(3) for seed in (7, 8, 9)]
    env.set_episodes([seed for _, seed in wanted], [task for task, _ in wanted])
    td, ran = env.reset(), []
    while not env.exhausted.all():
        active = ~env.exhausted
        nxt = step(env, td)
        for i in (nxt["done"].squeeze(-1) & active).nonzero().flatten().tolist():
            task, seed = int(nxt["episode_task"][i]), int(nxt["episode_seed"][i])
            ran.append((task, seed))
            assert nxt["language_instruction"][i] == f"{env.task_names[task]} {seed}"
        td = env.reset(nxt.exclude("reward").set("_reset", nxt["done"].clone()))
    assert sorted(ran) == wanted
    assert len(FakeSimulator.built) <= 3 + num_envs - 1, "an env keeps its task while there is work for it"
    if num_envs == 3:
        assert sorted(FakeSimulator.built) == ["lift", "push", "turn"]


def test_rollouts_go_through_the_tasks_and_groups_start_alike(make_env):
    tasks = ["lift", "push", "turn"]
    env = make_env(num_envs=4, tasks=tasks, group_size=2, seed=1)
    seen = [env.reset() for _ in range(3)]
    assert [td["episode_task"].flatten().tolist() for td in seen] == [[0, 0, 1, 1], [2, 2, 0, 0], [1, 1, 2, 2]]
    for td in seen:
        seeds = td["episode_seed"].flatten().tolist()
        assert seeds[0] == seeds[1] and seeds[2] == seeds[3] and seeds[0] != seeds[2]
    steady = make_env(num_envs=3, tasks=tasks)
    assert [steady.reset()["episode_task"].flatten().tolist() for _ in range(2)] == [[0, 1, 2]] * 2
    resumed = make_env(num_envs=4, tasks=tasks, group_size=2, seed=1)
    resumed.episodes_started = [2] * 4
    assert torch.equal(resumed.reset()["episode_seed"], seen[2]["episode_seed"])


def test_task_lists_that_cannot_be(make_env):
    with pytest.raises(ValueError, match="listed twice"):
        make_env(tasks=["lift", "lift"])
    with pytest.raises(ValueError, match="has one task only"):
        make_env(tasks=["a"], simulator={"_target_": "envs.gymnasium.GymnasiumSimulator"})
    env = make_env(tasks=["lift", "push"], schema=make_schema(state_dim=5))
    with pytest.raises(ValueError, match="'blue', task lift: schema and simulator disagree: state_dim=5"):
        env.reset()


# ---- recycling ----


def episodes_of(env, count):
    """What ``count`` consecutive episodes gave, without the process id; and the ids."""
    env.set_episodes(list(range(count)))
    td, rows, pids = env.reset(), [], []
    while not env.exhausted.all():
        nxt = step(env, td)
        rows.append((nxt["observation", "state"][:, :3], nxt["reward"], nxt["done"], nxt["episode_seed"]))
        pids += [pid for pid in nxt["observation", "state"][:, 3].tolist() if pid not in pids]
        td = nxt.exclude("reward")
        if td["done"].any():
            td = env.reset(td.set("_reset", td["done"].clone()))
    return rows, pids


def test_processes_are_replaced_between_episodes_and_nothing_else_changes(make_env):
    plain, (pid,) = episodes_of(make_env(inline=False, simulator={"goal": 1.0}), 5)
    env = make_env(inline=False, simulator={"goal": 1.0}, max_resets=2)
    told = []
    env.on_recycle = lambda index, reason: told.append((index, reason))
    recycled, pids = episodes_of(env, 5)
    assert len(pids) == 3 and pid not in pids
    assert env.recycled == 2 and told == [(0, "2 resets, max_resets=2")] * 2
    for a, b in zip(plain, recycled, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert len(multiprocessing.active_children()) == 2, "the replaced ones are gone"


def test_a_process_that_grew_is_replaced(make_env):
    env = make_env(inline=False, max_memory_gb=0.001)
    told = []
    env.on_recycle = lambda index, reason: told.append(reason)
    _, pids = episodes_of(env, 2)
    assert len(pids) == 2 and len(told) == 1 and "GB after 1 resets, max_memory_gb=0.001" in told[0]
    roomy = make_env(inline=False, max_memory_gb=50.0)
    assert len(episodes_of(roomy, 2)[1]) == 1 and roomy.recycled == 0
    with pytest.raises(ValueError, match="inline has none"):
        make_env(inline=True, max_resets=3)


# ---- batched: all rows in one simulator ----


@pytest.mark.parametrize("goal", [0.9, 100.0])
def test_a_batched_simulator_gives_what_single_ones_give(make_env, goal):
    """Early ends at different steps of a chunk, partial resets, the truncation at the horizon, frames."""
    schema = make_schema(cameras=("front",), image_size=16)
    ran = []
    for batched in (False, True):
        env = make_env(num_envs=3, schema=schema, batched=batched, seed=3, simulator={"goal": goal, "step_reward": 0.5})
        env.record = [(0, 11), (0, 12)]
        env.set_episodes(list(range(10, 17)))
        td, rows = env.reset(), []
        while not env.exhausted.all():
            td = env.step(td.set(("vla_action", "chunk"), chunk(env, 0.6)))["next"]
            rows.append(td.exclude("language_instruction"))
            td = td.exclude("reward")
            if td["done"].any():
                td = env.reset(td.set("_reset", td["done"].clone()))
        ran.append((torch.stack(rows), {k: [f[0, 0, 0] for f in v] for k, v in env.pop_frames().items()}))
    (single, frames), (batch, batch_frames) = ran
    for key, value in single.items(True, True):
        assert torch.equal(value, batch[key]), key
    assert frames == batch_frames and len(frames) == 2
    assert goal == 100.0 or single["executed"].sum(-1).unique().numel() > 2


def test_a_batch_lives_in_one_process_and_is_replaced_when_all_its_episodes_are_over(make_env):
    env = make_env(num_envs=2, inline=False, batched=True, max_resets=1, simulator={"horizon": 6})
    td = env.reset()
    assert len(multiprocessing.active_children()) == 1
    (pid,) = set(td["observation", "state"][:, 3].tolist())
    td = env.reset(step(env, td).exclude("reward").set("_reset", torch.tensor([[True], [False]])))
    assert env.recycled == 0, "row 1 is in the middle of its episode"
    assert td["observation", "state"][:, 1].tolist() == [0, 3] and td["observation", "state"][1, 3] == pid
    assert env.reset()["observation", "state"][0, 3] != pid and env.recycled == 1
    with pytest.raises(ValueError, match="cannot step some envs only"):
        td = env.reset().set("_step", torch.tensor([True, False]))
        env._step(td.set(("vla_action", "chunk"), chunk(env)))
    with pytest.raises(ValueError, match="names its batched form, and one task"):
        make_env(num_envs=2, batched=True, tasks=["lift", "push"])


# ---- the contract, at every step ----


@pytest.mark.parametrize("how", WRONG)
def test_what_breaks_the_contract_in_the_middle_of_an_episode_is_named_and_reaches_nobody(make_env, how):
    schema = make_schema(cameras=("front",), image_size=16)
    env = make_env(num_envs=2, schema=schema, simulator={"_target_": "fake_simulator.Careless", "wrong": how})
    td = env.reset()
    with pytest.raises(ContractError) as error:
        step(env, td)
    assert str(error.value).startswith("tenant 'blue': simulator 0 (fake_simulator.Careless) broke its contract: ")
    assert WRONG[how] in str(error.value)
    assert isinstance(error.value, SimulatorError) and isinstance(error.value, ValueError)


def test_a_broken_contract_comes_out_of_a_process_without_its_traceback(make_env):
    env = make_env(inline=False, simulator={"_target_": "fake_simulator.Careless", "wrong": "reward nan"})
    td = env.reset()
    with pytest.raises(ContractError) as error:
        step(env, td)
    named = "tenant 'blue': simulator 0 (fake_simulator.Careless) broke its contract: "
    assert str(error.value) == named + "reward: nan: expected one finite number"
    assert not multiprocessing.active_children(), "what broke its contract is not used on"


@pytest.mark.parametrize("executed", [[True, True], [True, False, True], [False] * 3, [True, True, False], [1.0] * 3])
def test_what_a_chunk_says_of_itself_is_checked(make_env, executed):
    """Of three actions; the episode does not end in them."""
    env = make_env(simulator={"_target_": "fake_simulator.WrongChunk", "executed": executed})
    td = env.reset()
    with pytest.raises(
        ContractError, match=r"simulator 0 \(fake_simulator.WrongChunk\) broke its contract: executed: "
    ):
        step(env, td)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"reward": [0.0, float("nan")]}, r"reward: \[nan\] of rows \[1\]: expected finite numbers"),
        ({"reward": [0.0]}, r"reward: float64 \(1,\): expected float32 \(2,\)"),
        ({"success": [0.0, 1.0]}, r"success: float64 \(2,\): expected bool \(2,\)"),
        ({"terminated": [0, 0]}, r"terminated: int64 \(2,\): expected bool \(2,\)"),
        ({"truncated": [None, None]}, r"truncated: object \(2,\): expected bool \(2,\)"),
        ({"state": [1, 4]}, r"state: float32 \(1, 4\): expected a row for each of 2 scenes"),
        ({"state": [2, 1]}, r"state_dim=4: the simulator gives float32 \(1,\), expected float32 \(4,\)"),
    ],
)
def test_a_batched_simulator_is_held_to_the_contract(make_env, wrong, says):
    config = {"_target_": "fake_simulator.CarelessOfBatch", "wrong": wrong}
    env = make_env(num_envs=2, batched=True, simulator=config)
    td = env.reset()
    with pytest.raises(ContractError, match=rf"'blue': simulator 0 \(fake_simulator.BatchedCareless\).*{says}"):
        step(env, td)


def test_rows_of_a_batch_that_are_over_may_give_anything():
    host = BatchedHost({"_target_": "fake_simulator.BatchedCareless", "num_envs": 2, "wrong": {}, "cameras": []})
    host.reset({0: (1, {}), 1: (2, {})}, ())
    host.sim.wrong = {"reward": [0.5, float("nan")]}
    answers = host.chunk({0: np.zeros((2, 2), np.float32)}, ())
    assert answers[0]["result"].reward == 1.0


def test_the_check_is_cheap(make_env):
    """Of a chunk of the toy simulator it takes less than a twentieth."""
    toy = build_simulator({"_target_": "envs.toy.ToySimulator", "horizon": 10**9})
    toy.reset(0)
    actions, view = np.zeros((2, 2), np.float32), View(4, ("camera",)).at(toy.observe())

    def seconds(action) -> float:
        runs = []
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(5):
                action()
            runs.append((time.perf_counter() - start) / 5)
        return min(runs)

    result, seen = execute_chunk(toy, actions), toy.observe()

    def check():
        check_step(result)
        check_step(result)
        check_chunk(result, 2)
        assert view.problems(seen) == []

    assert seconds(check) < 0.05 * seconds(lambda: (execute_chunk(toy, actions), toy.observe()))


# ---- the checker ----


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("unseeded", "differ between two resets with one seed: make reset"),
        ("leaks", "depend on the episode before it"),
        ("resets itself", "must not reset by itself"),
        ("no end", "no end of the episode within 20 chunks"),
        (
            "reward",
            r"simulator 0 \(fake_simulator.Broken\) broke its contract: reward: nan: expected one finite number",
        ),
        ("no words", "instruction='': the simulator must say in words"),
        ("bytes", "instruction=b'count'"),
        ("not finite", r"state: dims \[0, 1, 2, 3\] are not finite"),
        (
            "late nan",
            r"simulator 0 \(fake_simulator.Broken\).*state: dims \[0, 1, 2, 3\] are not finite \(3 steps after",
        ),
        ("float64", r"state_dim=4: the simulator gives float64 \(4,\)"),
        ("too long", r"state_dim=4: the simulator gives float32 \(5,\)"),
    ],
)
def test_check_tenant_env_names_the_broken_rule(make_env, how, message):
    env = make_env(simulator={"_target_": "fake_simulator.Broken", "how": how}, num_envs=2)
    with pytest.raises(ValueError, match=rf"tenant 'blue'.*{message}"):
        check_tenant_env(env, max_chunks=20)


def test_check_tenant_env_goes_through_all_tasks(make_env):
    check_tenant_env(make_env(tasks=["lift", "push"], num_envs=2))
    env = make_env(tasks=["lift", "push"], simulator={"horizon": 10**6})
    with pytest.raises(ValueError, match="task lift: no end"):
        check_tenant_env(env, max_chunks=3)


def test_check_tenant_env_catches_actions_out_of_bounds_and_steps_after_the_end(make_env):
    env = make_env()
    env.to_native = lambda c: env.schema.to_native(env.normalizer.unnormalize_action(c[:, :3])).numpy()
    with pytest.raises(ValueError, match="beyond \\[-1, 1\\]"):
        check_tenant_env(env)
    env = make_env(num_envs=2, simulator={"goal": 1.5, "horizon": 30})
    original = env._step

    def stepping_on(td):
        out = original(td)
        out["executed"][:, :3] = True
        return out

    env._step = stepping_on
    with pytest.raises(ValueError, match="after the end of an episode"):
        check_tenant_env(env)


def test_bad_arguments():
    schema = make_schema()
    with pytest.raises(ValueError, match="no _target_"):
        SimulatorEnv({}, schema, Normalizer(schema), tenant="blue")
    with pytest.raises(ValueError, match="num_envs=0"):
        SimulatorEnv({"_target_": TARGET}, schema, Normalizer(schema), num_envs=0)
