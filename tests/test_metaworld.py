"""MetaWorld: the same frames and states as LeRobot's environment, its own experts, tenants and suites."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from envs.metaworld import INSTRUCTIONS, MAX_STEPS, MT10, PRIVILEGED, MetaWorldSimulator
from nexus_lightning.demonstrations import RecorderHost
from nexus_lightning.environment import SimulatorEnv, check_tenant_env, execute_chunk
from nexus_lightning.evaluation import choose_tasks
from nexus_lightning.schema import Normalizer, TenantSchema

EXPERT = "envs.experts.metaworld.make_metaworld_expert"
needs_metaworld = pytest.mark.skipif(
    importlib.util.find_spec("metaworld") is None, reason="pip install 'nexus-lightning[metaworld]'"
)
SEEING = TenantSchema(
    4, 4, chunk=8, execute=8, cameras=("corner2",), image_size=32, gripper="close_positive", rotation="none"
)
KNOWING = TenantSchema(39, 4, chunk=8, execute=8, gripper="close_positive", rotation="none", privileged=PRIVILEGED)


@needs_metaworld
def test_lerobots_environment_shows_the_same():
    """Bit for bit: images at LeRobot's size, proprioception, and success, over an expert's episode."""
    from lerobot.envs.metaworld import MetaworldEnv

    from envs.experts.metaworld import make_metaworld_expert

    task = "button-press-topdown-v3"
    ours = MetaWorldSimulator(task, "rgb", ["corner2"], image_size=480, shadows=True)
    theirs = MetaworldEnv(task, obs_type="pixels_agent_pos")
    observation, _ = theirs.reset(seed=5)
    ours.reset(5)
    assert ours.instruction == theirs.task_description

    def compare():
        seen = ours.observe()
        assert seen["image"]["corner2"].shape == (3, 480, 480) and seen["image"]["corner2"].dtype == np.uint8
        assert (np.moveaxis(seen["image"]["corner2"], 0, -1) == observation["pixels"]).all()
        assert (seen["state"] == observation["agent_pos"].astype(np.float32)).all()

    compare()
    theirs._format_raw_obs = lambda raw: {"agent_pos": raw[:4]}  # it renders every step: 0.3 s each
    for step, action in enumerate(make_metaworld_expert(ours)):
        observation, _, terminated, _, info = theirs.step(action)
        result = ours.step(action)
        assert (result.success, result.terminated) == (info["is_success"], terminated)
        assert (ours.raw_observation[:4] == observation["agent_pos"]).all()
        if step == 20:
            del theirs._format_raw_obs
            observation = theirs._format_raw_obs(ours.raw_observation)
            compare()
            theirs._format_raw_obs = lambda raw: {"agent_pos": raw[:4]}
        if result.terminated:
            break
    assert result.success and result.reward == 1.0 and 40 < step < 100
    ours.close()
    theirs.close()


@needs_metaworld
@pytest.mark.parametrize(("obs", "schema"), [("rgb", SEEING), ("state", KNOWING)])
def test_it_keeps_the_contract(obs, schema):
    simulator = {
        "_target_": "envs.metaworld.MetaWorldSimulator",
        "task": "pick-place-v3",
        "obs": obs,
        "cameras": list(schema.cameras),
        "image_size": schema.image_size,
        "horizon": 12,
    }
    env = SimulatorEnv(simulator, schema, Normalizer(schema), inline=True)
    check_tenant_env(env)
    env.close()


@needs_metaworld
def test_every_seed_is_a_place_of_its_own_and_the_horizon_truncates():
    simulator = MetaWorldSimulator("reach-v3", horizon=3)

    def goal(seed):
        simulator.reset(seed)
        return tuple(simulator.raw_observation[-3:])

    assert len({goal(seed) for seed in range(60)}) == 60, "MetaWorld's own benchmarks have fifty"
    result = execute_chunk(simulator, np.zeros((8, 4), np.float32))
    assert (result.reward, result.success, result.terminated, result.truncated) == (0.0, False, False, True)
    assert result.executed.sum() == 3
    simulator.close()


@needs_metaworld
@pytest.mark.parametrize("task", MT10)
def test_its_own_policies_succeed(task):
    host = RecorderHost({"_target_": "envs.metaworld.MetaWorldSimulator", "task": task, "horizon": 200})
    episodes = [host.episode(EXPERT, seed) for seed in range(3)]
    assert sum(episode is not None for episode in episodes) >= 2
    episode = next(episode for episode in episodes if episode is not None)
    assert episode["success"].tolist() == [False] * (len(episode["success"]) - 1) + [True]
    assert episode["instruction"] == INSTRUCTIONS[task] and np.abs(episode["action"]).max() <= 1
    assert episode["state"].shape[1:] == (39,) and episode["images"] == {}
    host.close()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"task": "fly-v3"}, "task='fly-v3': choose one of .*reach-v3"),
        ({"task": "reach-v3", "obs": "depth"}, "obs='depth': choose rgb, state"),
        ({"task": "reach-v3", "obs": "rgb"}, "one camera with rgb, none without"),
        ({"task": "reach-v3", "cameras": ["corner"]}, "one camera with rgb, none without"),
        ({"task": "reach-v3", "obs": "rgb", "cameras": ["front"]}, "no 'front'; choose one of corner, corner2"),
        ({"task": "reach-v3", "horizon": MAX_STEPS + 1}, "horizon=501: must be 1 to 500"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, expected):
    with pytest.raises(ValueError, match=expected):
        MetaWorldSimulator(**arguments)


def test_what_does_not_fit_the_schema_is_told_before_it_starts():
    problems = MetaWorldSimulator.problems
    seeing = {"obs": "rgb", "cameras": ["corner2"]}
    assert problems({"task": "reach-v3", **seeing}, SEEING) == problems({"task": "reach-v3"}, KNOWING) == []
    assert problems({"task": "reach-v3"}, SEEING) == [
        "state_dim=4: MetaWorld with obs=state has 39",
        "privileged=[]: MetaWorld with obs=state also shows object_poses, goal_position",
    ]
    (unknown,) = problems({"task": "fly-v3", **seeing}, SEEING)
    assert unknown.startswith("task='fly-v3': choose one of assembly-v3")


@needs_metaworld
def test_shipped_tenants_and_suites(compose):
    from nexus_lightning.config import validate

    config = compose("+tenants=[metaworld,metaworld_sft]")
    validate(config)
    assert config.tenants["metaworld"].schema.privileged and not config.tenants["metaworld_sft"].schema.privileged
    sizes = {name: len(suite.tasks) for name, suite in MetaWorldSimulator.suites.items()}
    assert sizes == {
        "metaworld_easy": 28,
        "metaworld_medium": 11,
        "metaworld_hard": 6,
        "metaworld_very_hard": 5,
        "metaworld_mt10": 10,
        "metaworld_mt50": 50,
    }
    grouped = [task for suite in list(MetaWorldSimulator.suites.values())[:4] for task in suite.tasks]
    assert sorted(grouped) == sorted(INSTRUCTIONS) and set(MT10) < set(INSTRUCTIONS)
    environment, left_out = choose_tasks(config.tenants["metaworld_sft"], "metaworld_mt10", [], [0])
    assert environment.tasks == list(MT10) and left_out == []
