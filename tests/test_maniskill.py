"""The real ManiSkill simulator: conventions, speed tricks, experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nexus_lightning.environment import SimulatorEnv, check_tenant_env
from nexus_lightning.schema import Normalizer, TenantSchema


def play(sim, seed):
    """The expert's success and number of steps."""
    from envs.experts.maniskill import make_expert

    sim.reset(seed)
    for steps, action in enumerate(make_expert(sim), start=1):
        result = sim.step(action)
        if result.terminated or result.truncated:
            return result.success, steps
    raise AssertionError("the episode did not end")


@pytest.fixture(scope="session")
def push_cube():
    from envs.maniskill import ManiSkillSimulator

    sim = ManiSkillSimulator("PushCube-v1", obs="rgb", cameras=["base_camera", "hand_camera"], image_size=64)
    yield sim
    sim.close()


@pytest.mark.sim
def test_state_images_and_seeds(push_cube):
    from envs.maniskill import STATE_DIMS

    push_cube.reset(3)
    first = push_cube.observe()
    push_cube.reset(4)
    other = push_cube.observe()
    push_cube.reset(3)
    again = push_cube.observe()
    assert first["state"].shape == (STATE_DIMS["PushCube-v1", "rgb"],) and first["state"].dtype == np.float32
    assert np.array_equal(first["state"], again["state"]) and not np.array_equal(first["state"], other["state"])
    assert list(first["image"]) == ["base_camera", "hand_camera"]
    for camera, image in first["image"].items():
        assert image.shape == (3, 64, 64) and image.dtype == np.uint8 and image.std() > 5
        assert np.array_equal(image, again["image"][camera])
    assert push_cube.render_frame().shape == (256, 256, 3)


@pytest.mark.sim
def test_images_are_upright_and_not_mirrored(push_cube):
    """The camera looks back at the robot: the wooden table fills the lower part, and +y is to the right."""
    seen = 0
    for seed in range(6):
        push_cube.reset(seed)
        red, green, blue = push_cube.observe()["image"]["base_camera"].astype(int)
        wood = red > blue + 40
        assert wood[-16:].mean() > 0.8 and wood[:12].mean() < 0.1
        cube = np.argwhere((blue > red + 60) & (blue > green + 30))
        y = float(push_cube.env.obj.pose.p[0, 1])
        if len(cube) > 3 and abs(y) > 0.03:
            seen += 1
            assert (cube[:, 1].mean() > 31.5) == (y > 0)
    assert seen >= 2


@pytest.mark.sim
def test_gripper_plus_one_opens_and_x_moves_forward(push_cube):
    def fingers_and_x(action, steps=6):
        push_cube.reset(0)
        for _ in range(steps):
            push_cube.step(np.array(action, dtype=np.float32))
        state = push_cube.observe()["state"]
        return state[7:9].sum(), state[18]  # qpos 9, qvel 9, tcp pose

    opened, still = fingers_and_x([0, 0, 0, 0, 0, 0, 1])
    closed, _ = fingers_and_x([0, 0, 0, 0, 0, 0, -1])
    assert opened > 0.07 and closed < 0.01
    _, forward = fingers_and_x([0.5, 0, 0, 0, 0, 0, 1])
    assert forward > still + 0.05


@pytest.mark.sim
def test_expert_succeeds_and_episodes_truncate(push_cube):
    assert all(play(push_cube, seed)[0] for seed in (0, 1))
    push_cube.reset(0)
    results = [push_cube.step(np.zeros(7, np.float32)) for _ in range(push_cube.horizon)]
    assert results[-1].truncated and not any(r.truncated or r.terminated for r in results[:-1])
    assert sum(r.reward for r in results) == 0.0


@pytest.mark.sim
def test_pull_cube_state_in_a_worker_process():
    schema = TenantSchema(state_dim=35, action_dim=7, chunk=4, execute=4, privileged=("obj_pose",))
    simulator = {"_target_": "envs.maniskill.ManiSkillSimulator", "task": "PullCube-v1", "obs": "state"}
    env = SimulatorEnv(simulator, schema, Normalizer(schema), tenant="maniskill")
    try:
        check_tenant_env(env)
        env.set_episodes([0])
        td = env.reset()
        assert td["language_instruction"][0] == "pull the blue cube to the red and white target"
        td["vla_action", "chunk"] = torch.zeros(1, 4, 7)
        td["vla_action", "chunk"][..., 2] = -1.0  # down
        down = env.step(td)["next"]
        z = slice(20, 21)
        assert down["observation", "state"][0, z] < td["observation", "state"][0, z] - 0.05
    finally:
        env.close()


@pytest.mark.sim
@pytest.mark.parametrize("task", ["PullCube-v1", "PickCube-v1", "StackCube-v1"])
def test_experts_on_state(task):
    from envs.maniskill import STATE_DIMS, ManiSkillSimulator

    sim = ManiSkillSimulator(task)
    try:
        assert [play(sim, seed)[0] for seed in (0, 1)] == [True, True]
        assert sim.observe()["state"].shape == (STATE_DIMS[task, "state"],)
    finally:
        sim.close()


@pytest.mark.sim
def test_bad_arguments_say_what_to_write():
    from envs.maniskill import ManiSkillSimulator

    with pytest.raises(ValueError, match="name cameras if and only if"):
        ManiSkillSimulator("PushCube-v1", obs="rgb")
    with pytest.raises(ValueError, match="has no instruction here"):
        ManiSkillSimulator("NoSuchTask-v1")
    with pytest.raises(ValueError, match="no such task"):
        ManiSkillSimulator("NoSuchTask-v1", instruction="do it")
    with pytest.raises(ValueError, match="no 'left_camera'; choose from base_camera, hand_camera"):
        ManiSkillSimulator("PushCube-v1", obs="rgb", cameras=["left_camera"])
    with pytest.raises(ValueError, match="not in \\[-1, 1\\]"):
        ManiSkillSimulator("PushCube-v1", control_mode="pd_joint_pos")


@pytest.mark.sim
@pytest.mark.parametrize(("control_mode", "dim"), [("pd_ee_delta_pose", 7), ("pd_ee_delta_pos", 4)])
def test_the_short_way_to_joint_targets_is_maniskills(control_mode, dim, monkeypatch):
    import envs.maniskill as module

    def build():
        return module.ManiSkillSimulator("PullCube-v1", control_mode=control_mode)

    short = build()
    monkeypatch.setattr(module, "_shorten_ee_control", lambda env: None)
    plain = build()
    targets = [sim.env.agent.controller.controllers["arm"] for sim in (short, plain)]
    rng = np.random.default_rng(0)
    for sim in (short, plain):
        sim.reset(0)
    for _ in range(30):
        action = rng.uniform(-1, 1, dim).astype(np.float32)
        for sim in (short, plain):
            sim.step(action)
        assert torch.allclose(targets[0]._target_qpos, targets[1]._target_qpos, atol=1e-3)
    assert np.allclose(short.observe()["state"], plain.observe()["state"], atol=1e-2)
    short.close()
    plain.close()


@pytest.mark.sim
@pytest.mark.parametrize(
    ("task", "obs", "cameras"),
    [
        ("PullCube-v1", "state", ()),
        ("PushCube-v1", "rgb", ("base_camera",)),
        ("PickCube-v1", "rgb+state", ("base_camera",)),
    ],
)
def test_the_batched_form_with_one_scene_is_the_single_one(task, obs, cameras, monkeypatch):
    """CUDA is not needed: ``physx_cpu`` takes one scene. Same seeds, rewards, ends and observations."""
    import envs.maniskill as module

    monkeypatch.setattr(module, "_shorten_ee_control", lambda env: None)  # the batched form has ManiSkill's own
    cpu = {"sim_backend": "physx_cpu", "render_backend": "cpu"}
    schema = TenantSchema(
        module.STATE_DIMS[task, obs.replace("rgb+", "")], 7, chunk=4, execute=4, cameras=cameras, image_size=64
    )
    arguments = {"task": task, "obs": obs, "cameras": list(cameras), "image_size": 64, "horizon": 10}
    simulator = {"_target_": "envs.maniskill.ManiSkillSimulator", **arguments}
    ran = []
    for batched in (False, True):
        env = SimulatorEnv(simulator, schema, Normalizer(schema), inline=True, batched=batched)
        if batched:
            env.simulators = [{**env.simulators[0], **cpu}]
        generator, rows = torch.Generator().manual_seed(0), []
        env.set_episodes([3, 4])
        td = env.reset()
        while not env.exhausted.all():
            rows.append(td["observation"].clone())
            chunk = torch.rand(1, 4, 7, generator=generator) * 2 - 1
            td = env.step(td.set(("vla_action", "chunk"), chunk))["next"]
            rows.append(td.select("observation", "reward", "done", "terminated", "success", "executed", "episode_seed"))
            td = td.exclude("reward")
            if td["done"].any():
                td = env.reset(td.set("_reset", td["done"].clone()))
        env.close()
        ran.append(rows)
    single, batch = ran
    assert len(single) == len(batch) == 12 and [r["executed"].sum().item() for r in single[1::2]] == [4, 4, 2] * 2
    for a, b in zip(single, batch, strict=True):
        for key, value in a.items(True, True):
            assert torch.equal(value, b[key]), key


@pytest.mark.sim
def test_the_same_episodes_in_the_same_order_are_the_same_bits():
    """What was played before a reset can show after a touch, but two simulators that play alike stay alike."""
    from envs.maniskill import ManiSkillSimulator

    def states(sim, seed):
        sim.reset(seed)
        generator, action, seen = np.random.default_rng((seed, 0)), np.zeros(4, np.float32), []
        for _ in range(17):
            drawn = 0.7 * action + generator.normal(0, 0.5, 4) + (0.15, 0, -0.25, 0)  # forwards and down
            action = np.clip(drawn, -1, 1).astype(np.float32)
            sim.step(action)
            seen.append(sim.observe()["state"])
        return np.stack(seen)

    one, other = (ManiSkillSimulator("PullCube-v1", control_mode="pd_ee_delta_pos") for _ in range(2))
    first = [states(one, seed) for seed in (4, 4, 1)]
    second = [states(other, seed) for seed in (4, 4, 1)]
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    # a canary: where this holds no longer, the simulator's docstring and the README can say so
    assert not np.array_equal(first[0], first[1])
    one.close()
    other.close()
