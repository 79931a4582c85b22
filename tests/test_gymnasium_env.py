"""Gymnasium ids as simulators: a tiny registered environment whose numbers can be worked out by hand, and real ones."""

from __future__ import annotations

import importlib.util
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from envs.gymnasium import GymnasiumSimulator, PushTSimulator
from nexus_lightning.demonstrations import RecorderHost
from nexus_lightning.environment import SimulatorEnv, check_tenant_env, execute_chunk
from nexus_lightning.schema import Normalizer, TenantSchema
from nexus_lightning.simulator import ContractError

PUSHT = "gym_pusht:gym_pusht/PushT-v0"
needs_pusht = pytest.mark.skipif(
    importlib.util.find_spec("gym_pusht") is None, reason="pip install 'nexus-lightning[gymnasium]'"
)


class Rail(gymnasium.Env):
    """FAKE. A cart on a rail, position += action (bounds 0 and 4); terminated past ``goal``, reward 1 there.

    ``report``: the ``info`` key that tells success (past ``goal / 2``), or None. ``fail_at``: position that ends the
    episode without success and pays -1.
    """

    metadata: ClassVar[dict] = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None, goal=10.0, report=None, fail_at=None, actions="box", observation="box"):
        self.render_mode, self.goal, self.report, self.fail_at = render_mode, goal, report, fail_at
        self.action_space = {
            "box": spaces.Box(0.0, 4.0, (1, 1), np.float32),
            "discrete": spaces.Discrete(3),
            "integers": spaces.Box(0, 4, (1,), np.int64),
            "unbounded": spaces.Box(-np.inf, np.inf, (1,), np.float32),
        }[actions]
        position, image = spaces.Box(0.0, 20.0, (1,), np.float64), spaces.Box(0, 255, (8, 12, 3), np.uint8)
        self.observation_space = {
            "box": position,
            "image": image,
            "unbounded": spaces.Box(-np.inf, np.inf, (1,), np.float64),
            "dict": spaces.Dict(
                {"seen": image, "where": position, "clock": spaces.Box(0, 9, (1, 2)), "mode": spaces.Discrete(2)}
            ),
        }[observation]
        self.observation = observation
        self.renders = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.steps = float(self.np_random.uniform(0, 1)), 0
        return self._view(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.position += action.item()
        self.steps += 1
        lost = self.fail_at is not None and self.position > self.fail_at
        won = self.position > self.goal
        info = {} if self.report is None else {self.report: self.position > self.goal / 2}
        return self._view(), float(won) - float(lost), won or lost, False, info

    def render(self):
        self.renders += 1
        return np.full((8, 12, 3), self.steps, np.uint8)

    def _view(self):
        position, image = np.array([self.position]), np.full((8, 12, 3), 10 * self.steps, np.uint8)
        whole = {"seen": image, "where": position, "clock": np.array([[self.steps, 7.0]]), "mode": 1}
        return {"dict": whole, "image": image}.get(self.observation, position)


class DrawsFirst(gymnasium.Wrapper):
    """FAKE. Draws from the generator before it hands the seed on."""

    def reset(self, *, seed=None, options=None):
        shift = self.np_random.uniform(100, 200)
        _, info = self.env.reset(seed=seed)
        self.unwrapped.position += shift
        return self.unwrapped._view(), info


@pytest.fixture(autouse=True, scope="module")
def registered():
    gymnasium.register("Rail-v0", entry_point=Rail, max_episode_steps=6)
    gymnasium.register("RailWithoutLimit-v0", entry_point=Rail)
    gymnasium.register("Careless-v0", entry_point=Careless, max_episode_steps=6)
    gymnasium.register(
        "RailDrawsFirst-v0", entry_point=lambda **kwargs: DrawsFirst(Rail(**kwargs)), max_episode_steps=6
    )
    yield
    for name in ("Rail-v0", "RailWithoutLimit-v0", "RailDrawsFirst-v0", "Careless-v0"):
        del gymnasium.registry[name]


def rail(id="Rail-v0", cls=GymnasiumSimulator, **arguments):
    names = ("goal", "report", "fail_at", "actions", "observation", "render_mode")
    kwargs = {name: arguments.pop(name) for name in names if name in arguments}
    return cls(id, "drive to the end of the rail", kwargs=kwargs, **arguments)


def unit(*travels):
    """Actions that move the cart by these distances (0 ... 4), float32 [K, 1]."""
    return np.array(travels, np.float32)[:, None] / 2 - 1


def tenant_env(simulator, schema, **kwargs):
    return SimulatorEnv(
        {"_target_": "envs.gymnasium.GymnasiumSimulator", **simulator},
        schema,
        Normalizer(schema),
        inline=True,
        **kwargs,
    )


def rail_schema(**changes):
    return TenantSchema(**{"state_dim": 1, "action_dim": 1, "chunk": 4, "execute": 4, "gripper": "none", **changes})


# ---- actions ----


def test_actions_are_rescaled_to_the_bounds_of_the_box():
    sim = rail()
    sim.reset(0)
    start = sim.env.unwrapped.position
    for action, travel in ((-1.0, 0.0), (0.0, 2.0), (1.0, 4.0), (0.5, 3.0)):
        before = sim.env.unwrapped.position
        sim.step(np.array([action], np.float32))
        assert sim.env.unwrapped.position - before == pytest.approx(travel)
    assert sim.observe()["state"] == pytest.approx([start + 9.0]) and sim.observe()["state"].dtype == np.float32
    assert sim.to_unit(np.array([[3.0]])).tolist() == [0.5] and sim.to_unit([0.0]).tolist() == [-1.0]


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        ("discrete", r"actions are Discrete\(3\).*choose a continuous variant"),
        ("integers", "only float Box actions work"),
        ("unbounded", "no finite bounds"),
    ],
)
def test_actions_that_no_head_can_give_are_refused(actions, expected):
    with pytest.raises(ValueError, match=r"id='Rail-v0'.*" + expected):
        rail(actions=actions)


# ---- ends of episodes ----


def test_success_by_termination_with_a_reward():
    sim = rail(goal=5.0)
    sim.reset(0)
    first, second = (sim.step(a) for a in unit(4, 4))
    assert (first.reward, first.success, first.terminated, first.truncated) == (0.0, False, False, False)
    assert (second.reward, second.success, second.terminated, second.truncated) == (1.0, True, True, False)
    strict = rail(goal=5.0, success_reward=1.0)
    strict.reset(0)
    assert not execute_chunk(strict, unit(4, 4)).success, "the reward must exceed success_reward"


def test_termination_without_reward_is_a_failure():
    sim = rail(fail_at=3.0)
    sim.reset(0)
    result = execute_chunk(sim, unit(2, 2, 2))
    assert (result.reward, result.success, result.terminated) == (-1.0, False, True)
    assert result.executed.tolist() == [True, True, False]


@pytest.mark.parametrize("key", ["is_success", "success"])
def test_success_from_info_does_not_end_the_episode(key):
    sim = rail(report=key, success_bonus=3.0)
    sim.reset(0)
    steps = [sim.step(a) for a in unit(4, 4, 4)]
    assert [s.success for s in steps] == [False, True, True]
    assert [s.terminated for s in steps] == [False, False, True]
    assert [s.reward for s in steps] == [0.0, 3.0, 4.0]


def test_a_success_key_of_its_own():
    sim = rail(report="parked", success_key="parked")
    sim.reset(0)
    assert execute_chunk(sim, unit(4, 4)).success
    missing = rail(report="parked", success_key="arrived")
    missing.reset(0)
    missing.step(unit(0)[0])  # may be told at the end only
    with pytest.raises(ValueError, match=r"success_key='arrived' is not in info, which has \['parked'\]"):
        execute_chunk(missing, unit(4, 4, 4))


class Careless(Rail):
    """FAKE. ``wrong``: what its steps give instead, ``{view|reward|terminated|truncated|info: value}``."""

    def __init__(self, wrong, observation="box", render_mode=None):
        super().__init__(observation=observation, render_mode=render_mode)
        self.wrong = wrong

    def step(self, action):
        given = dict(zip(("view", "reward", "terminated", "truncated", "info"), super().step(action), strict=True))
        return tuple({**given, **self.wrong}.values())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"reward": float("nan")}, "reward: nan: expected one finite number"),
        ({"reward": np.ones(2)}, r"reward: float64 \(2,\): expected one finite number"),
        ({"terminated": None}, "terminated: None: expected a bool"),
        ({"truncated": float("nan")}, "truncated: nan: expected a bool"),
        ({"info": {"is_success": None}}, r"info\['is_success'\]: None: expected a bool"),
        ({"info": {"success": float("nan")}}, r"info\['success'\]: nan: expected a bool"),
        ({"info": {"success": "no"}}, r"info\['success'\]: 'no': expected a bool"),
    ],
)
def test_what_is_no_reward_and_no_flag_is_not_taken_for_one(wrong, says):
    sim = GymnasiumSimulator("Careless-v0", "drive", kwargs={"wrong": wrong})
    sim.reset(0)
    with pytest.raises(ContractError, match=says):
        sim.step(unit(0)[0])


def test_a_success_of_0_or_1_is_one():
    """Meta-World's and Gymnasium-Robotics' are floats."""
    for value in (1.0, np.float32(0), np.bool_(True), 1):
        sim = GymnasiumSimulator("Careless-v0", "drive", kwargs={"wrong": {"info": {"is_success": value}}})
        sim.reset(0)
        assert sim.step(unit(0)[0]).success is bool(value)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("where", np.zeros((1, 1)), r"observation 'where': float64 \(1, 1\): expected float64 \(1,\)"),
        ("clock", None, r"observation 'clock': nothing: expected float32 \(1, 2\)"),
        ("seen", np.zeros((8, 12, 3)), r"observation 'seen': float64 \(8, 12, 3\): expected uint8 \(8, 12, 3\)"),
        ("seen", np.zeros((8, 8, 3), np.uint8), r"observation 'seen': uint8 \(8, 8, 3\): expected uint8 \(8, 12, 3\)"),
    ],
)
def test_parts_of_an_observation_stay_what_their_space_says(key, value, says):
    env = Rail(observation="dict")
    env.reset(seed=0)
    view = {k: v for k, v in {**env._view(), key: value}.items() if v is not None}
    sim = GymnasiumSimulator(
        "Careless-v0",
        "drive",
        cameras=["front"],
        image_size=16,
        state_keys=["where", "clock"],
        image_keys={"front": "seen"},
        kwargs={"wrong": {"view": view}, "observation": "dict"},
    )
    sim.reset(0)
    assert sim.observe()["state"].shape == (3,)
    sim.step(unit(0)[0])
    with pytest.raises(ContractError, match=says):
        sim.observe()


def test_time_limit_is_the_registered_one_or_the_horizon():
    for horizon, length in ((None, 6), (2, 2)):
        sim = rail(horizon=horizon)
        sim.reset(0)
        result = execute_chunk(sim, unit(*[0] * 10))
        assert result.executed.sum() == length
        assert (result.success, result.terminated, result.truncated) == (False, False, True)
    with pytest.raises(ValueError, match=r"registers no time limit: pass horizon="):
        rail("RailWithoutLimit-v0")
    assert rail("RailWithoutLimit-v0", horizon=3).env.spec.max_episode_steps == 3


def test_success_in_the_last_step_is_a_termination():
    sim = rail(goal=3.0, horizon=1)
    sim.reset(0)
    result = sim.step(unit(4)[0])
    assert (result.terminated, result.truncated) == (True, False)


# ---- observations ----


def test_dict_observations_by_key():
    keys = {"state_keys": ["clock", "where"], "image_keys": {"side": "seen"}}
    sim = rail(observation="dict", cameras=["side", "film"], image_size=16, **keys)
    sim.reset(0)
    sim.step(unit(2)[0])
    observed = sim.observe()
    assert observed["state"].tolist() == pytest.approx([1, 7, sim.env.unwrapped.position])
    assert list(observed["image"]) == ["side", "film"]
    assert observed["image"]["side"].shape == (3, 16, 16) and (observed["image"]["side"] == 10).all()
    assert (observed["image"]["film"] == 1).all(), "a camera without a key shows the rendered frame"
    assert sim.render_frame().shape == (8, 12, 3)


def test_an_image_alone_and_no_state():
    sim = rail(observation="image", cameras=["side"], image_size=16, state_keys=[], image_keys={"side": "observation"})
    sim.reset(0)
    assert sim.observe()["state"].tolist() == [0.0] and sim.observe()["image"]["side"].shape == (3, 16, 16)


def test_nothing_is_rendered_while_stepping():
    sim = rail(cameras=["film"])
    sim.reset(0)
    execute_chunk(sim, unit(1, 1, 1))
    assert sim.env.unwrapped.renders == 0
    sim.observe()
    assert sim.env.unwrapped.renders == 1


def test_state_scaled_by_the_bounds_of_its_space():
    sim = rail(scale_state=True)
    sim.reset(0)
    assert sim.observe()["state"] == pytest.approx([sim.env.unwrapped.position / 10 - 1])
    with pytest.raises(ValueError, match="scale_state: the state has no finite bounds"):
        rail(observation="unbounded", scale_state=True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"observation": "dict"}, r"pass state_keys=.*'seen'.*'where'"),
        ({"observation": "image"}, r"pass state_keys="),
        ({"state_keys": ["joints"]}, "has no 'joints'; choose from observation"),
        ({"observation": "dict", "state_keys": ["mode"]}, "'mode' is Discrete"),
        ({"observation": "dict", "state_keys": [], "image_keys": {"top": "seen"}}, "'top' is not in cameras"),
        ({"cameras": ["top"], "image_keys": {"top": "observation"}}, r"not uint8 \[H, W, 3\]"),
        ({"cameras": ["one", "two"]}, "would all show the one rendered frame"),
        ({"cameras": ["one"], "render_mode": None}, "render_mode=None"),
    ],
)
def test_observations_that_cannot_be_read_are_refused(arguments, expected):
    with pytest.raises(ValueError, match=expected):
        rail(**arguments)


def test_no_frame_no_video():
    sim = rail(render_mode=None)
    sim.reset(0)
    with pytest.raises(NotImplementedError, match="renders no frame"):
        sim.render_frame()


def test_an_id_whose_package_is_missing():
    with pytest.raises(ImportError, match=r"id='no_such_package:Thing-v0'.*install the package"):
        GymnasiumSimulator("no_such_package:Thing-v0", "do it")


# ---- seeds ----


@pytest.mark.parametrize("id", ["Rail-v0", "RailDrawsFirst-v0"])
def test_one_seed_one_start(id):
    sim = rail(id)

    def start(seed):
        sim.reset(seed)
        return sim.observe()["state"].item()

    first, other = start(3), start(4)
    assert start(3) == first != other
    sim.step(unit(1)[0])
    assert start(3) == first, "whatever happened before"


# ---- behind SimulatorEnv ----


def test_early_success_inside_a_chunk_and_reset_of_the_finished_row_only():
    env = tenant_env({"id": "Rail-v0", "instruction": "go", "kwargs": {"goal": 6.0}}, rail_schema(), num_envs=2)
    td = env.reset()
    starts = td["observation", "state"].flatten().tolist()
    chunk = torch.tensor([unit(4, 4, 4, 4).tolist(), unit(0, 1, 0, 0).tolist()])
    nxt = env.step(td.set(("vla_action", "chunk"), chunk))["next"]
    assert nxt["executed"].tolist() == [[True, True, False, False], [True, True, True, True]]
    assert nxt["observation", "state"].flatten().tolist() == pytest.approx([starts[0] + 8, starts[1] + 1])
    assert nxt["reward"].flatten().tolist() == [1.0, 0.0]
    assert nxt["success"].flatten().tolist() == nxt["terminated"].flatten().tolist() == [True, False]
    assert nxt["episode_length"].flatten().tolist() == [2, 4]
    # the finished row waits for its reset: no auto-reset underneath
    again = env.step(nxt.exclude("reward").set(("vla_action", "chunk"), chunk[[0, 0]]))["next"]
    assert not again["executed"][0].any() and again["done"][0].item() and again["reward"][0].item() == 0.0
    state = again.exclude("reward").set("_reset", torch.tensor([[True], [False]]))
    reset = env.reset(state)
    assert reset["observation", "state"][0].item() < 1.0 and reset["episode_length"].flatten().tolist()[0] == 0
    assert reset["observation", "state"][1] == again["observation", "state"][1]
    env.close()


def test_truncation_inside_a_chunk():
    env = tenant_env({"id": "Rail-v0", "instruction": "go", "horizon": 6}, rail_schema())
    td = env.reset()
    for executed in ([True] * 4, [True, True, False, False]):
        td = env.step(td.set(("vla_action", "chunk"), torch.full((1, 4, 1), -1.0)))["next"].exclude("reward")
        assert td["executed"][0].tolist() == executed
    assert td["truncated"].item() and not td["terminated"].item() and not td["success_once"].item()
    env.close()


def test_head_output_is_clipped_to_the_bounds():
    env = tenant_env({"id": "Rail-v0", "instruction": "go", "kwargs": {"goal": 100.0}}, rail_schema())
    td = env.reset()
    start = td["observation", "state"].item()
    nxt = env.step(td.set(("vla_action", "chunk"), torch.tensor([[[9.0], [-9.0], [0.0], [1.0]]])))["next"]
    assert nxt["observation", "state"].item() == pytest.approx(start + 4 + 0 + 2 + 4)
    env.close()


@pytest.mark.parametrize(("id", "dim"), [("Pendulum-v1", 3), ("MountainCarContinuous-v0", 2)])
def test_classic_control_keeps_the_contract(id, dim):
    schema = rail_schema(state_dim=dim)
    env = tenant_env({"id": id, "instruction": "swing it up", "horizon": 20}, schema, num_envs=2)
    check_tenant_env(env)
    env.close()


def test_a_process_of_its_own_gives_the_same_episode():
    schema = rail_schema(state_dim=3)
    steps = []
    for inline in (True, False):
        simulator = {"_target_": "envs.gymnasium.GymnasiumSimulator", "id": "Pendulum-v1", "instruction": "up"}
        env = SimulatorEnv(simulator, schema, Normalizer(schema), inline=inline, seed=1)
        td = env.reset()
        steps.append(env.step(td.set(("vla_action", "chunk"), torch.full((1, 4, 1), 0.5)))["next"])
        env.close()
    assert torch.equal(steps[0]["observation", "state"], steps[1]["observation", "state"])
    assert torch.equal(steps[0]["reward"], steps[1]["reward"])


def test_pendulum_equals_gymnasium():
    sim = GymnasiumSimulator("Pendulum-v1", "swing the pendulum up")
    reference = gymnasium.make("Pendulum-v1")
    sim.reset(7)
    observation, _ = reference.reset(seed=7)
    for action in np.random.default_rng(0).uniform(-1, 1, (200, 1)).astype(np.float32):
        assert sim.observe()["state"] == pytest.approx(observation)
        observation, reward, terminated, truncated, _ = reference.step(2 * action)
        result = sim.step(action)
        assert result.reward == pytest.approx(float(reward)) and not result.success
        assert (result.terminated, result.truncated) == (terminated, truncated)
    assert truncated, "Pendulum's own limit of 200 steps"


@pytest.mark.skipif(importlib.util.find_spec("metaworld") is None, reason="pip install 'nexus-lightning[metaworld]'")
def test_metaworld_by_its_id():
    """One of fifty goals by seed, the same in another process's environment; the dense reward, no end at success."""
    arguments = {"horizon": 500, "kwargs": {"env_name": "reach-v3", "seed": 0, "render_mode": "rgb_array"}}
    one, other = (GymnasiumSimulator("metaworld:Meta-World/MT1", "reach the goal", **arguments) for _ in range(2))
    starts = []
    for sim in (one, other, one):
        sim.reset(3)
        starts.append(sim.observe()["state"])
        result = execute_chunk(sim, np.ones((5, 4), np.float32))
        assert 0 < result.reward < 50 and not result.terminated
    assert (starts[0] == starts[1]).all() and (starts[0] == starts[2]).all() and starts[0].shape == (39,)
    one.reset(4)
    assert (one.observe()["state"] != starts[0]).any()


# ---- PushT ----


def pusht(**changes):
    arguments = {
        "id": PUSHT,
        "instruction": "push the T onto the green outline",
        "cameras": ["top"],
        "image_size": 96,
        "state_keys": ["agent_pos"],
        "image_keys": {"top": "pixels"},
        "scale_state": True,
        "kwargs": {"obs_type": "pixels_agent_pos"},
        **changes,
    }
    return arguments


@needs_pusht
def test_pusht_keeps_the_contract():
    schema = TenantSchema(2, 2, chunk=4, execute=4, cameras=("top",), image_size=96, gripper="none", rotation="none")
    env = tenant_env(pusht(horizon=8), schema)
    check_tenant_env(env)
    env.close()


@needs_pusht
def test_pusht_start_does_not_depend_on_the_episode_before():
    sim = PushTSimulator(**pusht())
    sim.reset(5)
    first = sim.observe()
    execute_chunk(sim, np.ones((3, 2), np.float32))
    sim.reset(5)
    again = sim.observe()
    assert (first["image"]["top"] == again["image"]["top"]).all() and (first["state"] == again["state"]).all()


@needs_pusht
def test_pusht_pusher_goes_where_the_action_says():
    sim = PushTSimulator(**pusht(cameras=[], image_keys={}, kwargs={"obs_type": "environment_state_agent_pos"}))
    sim.reset(0)
    for _ in range(12):
        sim.step(np.array([-0.9, 0.8], np.float32))
    assert sim.observe()["state"] == pytest.approx([-0.9, 0.8], abs=0.01)


@needs_pusht
def test_pusht_expert_covers_the_goal():
    host = RecorderHost({"_target_": "envs.gymnasium.PushTSimulator", **pusht()})
    episode = host.episode("envs.experts.gymnasium.make_pusht_expert", 1000)
    assert episode is not None and episode["success"].tolist() == [False] * (len(episode["success"]) - 1) + [True]
    assert episode["action"].shape[1] == 2 and episode["images"]["top"].shape[1:] == (96, 96, 3)
    host.close()


@needs_pusht
def test_push_model_agrees_with_the_simulation():
    """One push in the model and in pymunk: the T ends up in the same place, within a pixel and a degree."""
    from envs.experts.gymnasium import Poses, PushModel, line, rotate

    sim = PushTSimulator(**pusht(cameras=[], image_keys={}, kwargs={"obs_type": "environment_state_agent_pos"}))
    sim.reset(0)
    env = sim.env.unwrapped
    center = np.array(env.block.center_of_gravity)
    model = PushModel(center, env.block.moment / env.block.mass, (env.goal_pose[:2], float(env.goal_pose[2])))

    def pose():
        angle = np.array([env.block.angle])
        return Poses(np.array(env.block.position)[None] + rotate(center[None], angle), angle)

    many, start, way = model.pushes(pose(), 60.0, (0.0,))
    path, errors = model.push(many, start, way)
    moved = np.abs(path.angle[30] - many.angle)
    row = int(moved.argmax())
    env.agent.position = start[row].tolist()
    env.agent.velocity = (0, 0)
    for target in line(start[row], start[row] + way[row] * 2.0 * 31, 8.0):
        sim.step(sim.to_unit(target))
    for _ in range(10):
        sim.step(sim.to_unit(start[row] + way[row] * 2.0 * 31))
    assert moved[row] > 0.2 and (errors >= 0).all()
    assert pose().at[0] == pytest.approx(path.at[30, row], abs=1.0)
    assert pose().angle[0] == pytest.approx(path.angle[30, row], abs=np.pi / 180)


def test_shipped_pusht_tenants_are_valid(compose):
    from nexus_lightning.config import ConfigError, validate

    config = compose("+tenants=[pusht,pusht_sft]")
    if importlib.util.find_spec("gym_pusht") is None:
        with pytest.raises(
            ConfigError, match=r"package gym_pusht is missing; pip install 'nexus-lightning\[gymnasium\]'"
        ):
            validate(config)
    else:
        validate(config)
    assert config.tenants["pusht"].schema.privileged and not config.tenants["pusht_sft"].schema.privileged
