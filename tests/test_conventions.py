"""Converters against scipy and by hand, and datasets that differ from their tenant (CASES S1, S2, S5)."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import FakeBackbone
from lerobot_data import Data, write
from scipy.spatial.transform import Rotation

from nexus_lightning.config import ConfigError, DatasetConfig, validate
from nexus_lightning.conventions import (
    ORIENTATIONS,
    ROTATION_DIMS,
    DatasetConventions,
    PoseLayout,
    absolute_to_delta,
    convert_image,
    convert_pose,
    convert_rotation,
    delta_to_absolute,
    matrix_to_rotation,
    rotation_to_matrix,
)
from nexus_lightning.converter import DatasetConverter
from nexus_lightning.environment import SimulatorEnv
from nexus_lightning.features.store import FeatureStore
from nexus_lightning.producers.demonstrations import DemonstrationReader, dataset_stats, open_dataset
from nexus_lightning.schema import NormalizationStats, Normalizer, TenantSchema
from nexus_lightning.simulator import Simulator, StepResult

sys.path.insert(0, str(Path(__file__).parent))
ROTATIONS = [name for name, dims in ROTATION_DIMS.items() if dims]


def _rotations() -> Rotation:
    """Random ones, and those where formulas break: none, tiny, half turns, just below them, pitch near +-pi/2."""
    axes = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, -2, 3]], dtype=float)
    axes /= np.linalg.norm(axes, axis=1, keepdims=True)
    vectors = [np.zeros((1, 3)), *(axes * angle for angle in (1e-9, 1e-4, 1.0, np.pi - 1e-6, np.pi))]
    pitched = Rotation.from_euler("xyz", [[0.3, s * (np.pi / 2 - 1e-4), -1.2] for s in (1, -1)])
    return Rotation.concatenate([Rotation.random(200, rng=0), Rotation.from_rotvec(np.concatenate(vectors)), pitched])


def _scipy(rotation: Rotation, representation: str) -> torch.Tensor:
    values = {
        "axis_angle": rotation.as_rotvec,
        "euler_xyz": lambda: rotation.as_euler("xyz"),
        "quaternion_wxyz": lambda: rotation.as_quat(canonical=True, scalar_first=True),
        "quaternion_xyzw": lambda: rotation.as_quat(canonical=True),
        "rotation_6d": lambda: np.concatenate([rotation.as_matrix()[..., 0], rotation.as_matrix()[..., 1]], -1),
    }[representation]()
    return torch.from_numpy(np.ascontiguousarray(values))


def _angle(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest angle between rotations, from matrices."""
    return (Rotation.from_matrix(a.numpy()) * Rotation.from_matrix(b.numpy()).inv()).magnitude().max()


# ---- rotations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("representation", ROTATIONS)
def test_to_matrix_equals_scipy(representation):
    rotations = _rotations()
    matrix = rotation_to_matrix(_scipy(rotations, representation), representation)
    torch.testing.assert_close(matrix, torch.from_numpy(rotations.as_matrix()), atol=1e-12, rtol=0)


@pytest.mark.parametrize("representation", ROTATIONS)
def test_from_matrix_equals_scipy(representation):
    rotations = Rotation.random(500, rng=1)
    ours = matrix_to_rotation(torch.from_numpy(rotations.as_matrix()), representation)
    torch.testing.assert_close(ours, _scipy(rotations, representation), atol=1e-9, rtol=0)


@pytest.mark.parametrize(("source", "target"), itertools.product(ROTATIONS, ROTATIONS))
def test_round_trip_of_every_pair(source, target):
    rotations = _rotations()
    values = _scipy(rotations, source).float().view(1, -1, ROTATION_DIMS[source]).expand(2, -1, -1)
    there = convert_rotation(values, source, target)
    assert there.shape == (2, len(rotations), ROTATION_DIMS[target]) and there.dtype == torch.float32
    back = convert_rotation(there, target, source)
    assert back.isfinite().all()
    # float32 pitch near pi/2 and 1e-4 away: the angle of euler_xyz is known to about 1e-3 only
    limit = 2e-3 if "euler_xyz" in (source, target) else 2e-6
    for stage, representation in ((there, target), (back, source)):
        matrix = rotation_to_matrix(stage, representation)[1]
        assert _angle(matrix, torch.from_numpy(rotations.as_matrix())) < limit
    if source == target:
        assert torch.equal(there, values)


@pytest.mark.parametrize("sign", [1, -1])
def test_gimbal_lock_keeps_the_rotation(sign):
    locked = Rotation.from_euler("xyz", [[0.4, sign * np.pi / 2, 1.1], [-2.0, sign * np.pi / 2, 0.2]])
    euler = matrix_to_rotation(torch.from_numpy(locked.as_matrix()), "euler_xyz")
    assert _angle(rotation_to_matrix(euler, "euler_xyz"), torch.from_numpy(locked.as_matrix())) < 1e-7


def test_loose_values_become_rotations():
    six = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    quaternion = torch.randn(20, 4, generator=torch.Generator().manual_seed(1)) * 3
    for values, representation in ((six, "rotation_6d"), (quaternion, "quaternion_wxyz")):
        matrix = rotation_to_matrix(values, representation)
        torch.testing.assert_close(matrix @ matrix.mT, torch.eye(3).double().expand(20, 3, 3), atol=1e-9, rtol=0)
        torch.testing.assert_close(torch.linalg.det(matrix), torch.ones(20).double())
    torch.testing.assert_close(
        rotation_to_matrix(-quaternion, "quaternion_wxyz"), rotation_to_matrix(quaternion, "quaternion_wxyz")
    )


def test_an_unknown_rotation_names_the_choices():
    for convert in (rotation_to_matrix, matrix_to_rotation):
        with pytest.raises(ValueError, match=r"rotation='none'.*axis_angle.*rotation_6d"):
            convert(torch.eye(3), "none")


# ---- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), itertools.product(ORIENTATIONS, ORIENTATIONS))
def test_every_image_orientation(source, target):
    upright = np.random.default_rng(0).integers(0, 256, (2, 3, 5, 5), dtype=np.uint8)
    shown = {"upright": upright, "rotated_180": upright[..., ::-1, ::-1], "flipped_vertical": upright[..., ::-1, :]}
    given, expected = (torch.from_numpy(shown[name].copy()) for name in (source, target))
    converted = convert_image(given, source, target)
    assert converted.dtype == torch.uint8 and torch.equal(converted, expected)
    assert torch.equal(convert_image(converted, target, source), given)


# ---- absolute <-> delta ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("state_rotation", ["quaternion_xyzw", "axis_angle"])
def test_delta_of_a_pose_equals_scipy_and_comes_back(rotation, state_rotation):
    now, wanted = Rotation.random(30, rng=2), Rotation.random(30, rng=3)
    generator = torch.Generator().manual_seed(4)
    position = torch.rand(30, 3, generator=generator).double()
    target = torch.rand(30, 3, generator=generator).double()
    gripper = torch.rand(30, 1, generator=generator).double()
    states = torch.cat([torch.full((30, 2), 9.0), position, _scipy(now, state_rotation)], -1)
    layout = PoseLayout(
        position_dims=3,
        rotation=rotation,
        state_position=2,
        state_rotation=state_rotation,
        state_rotation_index=5,
        translation_scale=0.05,
        rotation_scale=0.5,
    )
    absolute = torch.cat([target, _scipy(wanted, rotation), gripper], -1)
    delta = absolute_to_delta(absolute, states, layout, "absolute")
    unit = 0.5 if rotation in ("axis_angle", "euler_xyz") else 1.0
    torch.testing.assert_close(delta[:, :3], (target - position) / 0.05)
    turn = _scipy(wanted * now.inv(), rotation) / unit
    torch.testing.assert_close(delta[:, 3:-1], turn, atol=1e-9, rtol=0)
    assert torch.equal(delta[:, -1:], gripper)
    back = delta_to_absolute(delta.view(5, 6, -1), states.view(5, 6, -1), layout, "delta").view(30, -1)
    torch.testing.assert_close(back, absolute, atol=1e-9, rtol=0)


def test_delta_of_joints_leaves_the_gripper():
    actions, states = torch.tensor([[1.0, 2.0, 0.3]]), torch.tensor([[7.0, 0.5, 3.0]])
    delta = absolute_to_delta(actions, states, PoseLayout(position_dims=2, state_position=1), "absolute")
    torch.testing.assert_close(delta, torch.tensor([[0.5, -1.0, 0.3]]))


def test_a_second_transform_is_refused():
    layout = PoseLayout(position_dims=2)
    actions = states = torch.zeros(1, 3)
    with pytest.raises(ValueError, match="action_convention='delta': the actions are delta already"):
        absolute_to_delta(actions, states, layout, "delta")
    with pytest.raises(ValueError, match="action_convention='absolute': the actions are absolute already"):
        delta_to_absolute(actions, states, layout, "absolute")
    with pytest.raises(ValueError, match="action_convention='relative': choose one of delta, absolute"):
        absolute_to_delta(actions, states, layout, "relative")


# ---- a dataset against its tenant ------------------------------------------------------------------------------------

SCHEMA = TenantSchema(
    state_dim=8,
    action_dim=7,
    chunk=3,
    execute=2,
    cameras=("front",),
    image_size=16,
    image_orientation="rotated_180",
    gripper="close_positive",
    control_hz=10.0,
    action_normalization="quantile",
)
NATIVE = {
    "open_positive": (1.0, -1.0),
    "close_positive": (-1.0, 1.0),
    "open_one": (1.0, 0.0),
    "close_one": (0.0, 1.0),
}


@pytest.mark.parametrize(("dataset", "simulator"), itertools.product(NATIVE, NATIVE))
def test_grippers_of_dataset_and_simulator_are_independent(dataset, simulator):
    schema = replace(SCHEMA, gripper=simulator)
    actions = torch.arange(14.0).view(2, 7) / 20
    actions[:, -1] = torch.tensor(NATIVE[dataset])
    internal = DatasetConverter(schema, DatasetConventions(gripper=dataset)).actions(actions)
    assert internal[:, -1].tolist() == [1.0, -1.0]  # open, closed
    assert schema.to_native(internal)[:, -1].tolist() == list(NATIVE[simulator])
    assert torch.equal(internal[:, :-1], actions[:, :-1])


def test_rotation_of_another_width():
    schema = replace(SCHEMA, action_dim=10, rotation="rotation_6d", action_convention="absolute")
    converter = DatasetConverter(schema, DatasetConventions(rotation="quaternion_wxyz", gripper="open_one"))
    assert converter.problems() == []
    assert converter.action_dim == 8 and converter.changes_pose and not converter.needs_states
    rotations = Rotation.random(4, rng=5)
    place = torch.rand(4, 3)
    opened = torch.tensor([[1.0], [0.0], [1.0], [0.5]])
    quaternion = _scipy(rotations, "quaternion_wxyz").float()
    internal = converter.actions(torch.cat([place, -quaternion, opened], -1))
    expected = torch.cat([place, _scipy(rotations, "rotation_6d").float(), 2 * opened - 1], -1)
    torch.testing.assert_close(internal, expected, atol=1e-6, rtol=0)


def test_scaled_delta_rotations_are_converted_in_radians():
    layout = PoseLayout(position_dims=3, rotation="euler_xyz", rotation_scale=0.5)
    euler = torch.tensor([[0.6, -0.4, 0.9]])
    action = torch.cat([torch.zeros(1, 3), euler], -1)
    converted = convert_pose(action, None, layout, "delta", "delta", "axis_angle")[:, 3:]
    expected = Rotation.from_euler("xyz", euler.numpy() * 0.5).as_rotvec() / 0.5
    torch.testing.assert_close(converted, torch.from_numpy(expected).float())


@pytest.mark.parametrize(
    ("schema", "given", "word"),
    [
        ({}, {"gripper": "up"}, "gripper='up': choose one of open_positive"),
        ({}, {"image_orientation": "left"}, "image_orientation='left'"),
        ({}, {"gripper": "none"}, "gripper='none': schema.gripper='close_positive'"),
        ({}, {"rotation": "none"}, "rotation='none': schema.rotation='axis_angle'"),
        ({}, {"state_position_index": 0}, "state_position_index=0: the actions are delta already"),
        ({}, {"action_convention": "delta", "state_rotation": "axis_angle"}, "the actions are delta already"),
        ({}, {"action_convention": "absolute"}, "state_rotation=None: name the state's rotation"),
        (
            {},
            {"action_convention": "absolute", "state_rotation": "axis_angle", "state_position_index": 0},
            "state_rotation_index=None: absolute -> delta needs 3 dims",
        ),
        (
            {"rotation": "none", "state_dim": 5},
            {"action_convention": "absolute", "state_position_index": 0},
            "state_position_index=0: absolute -> delta needs 6 dims",
        ),
        (
            {"rotation": "none", "gripper_index": 0},
            {"action_convention": "absolute", "state_position_index": 0},
            "the gripper must be the last dim",
        ),
        ({}, {"translation_scale": 0.0}, "translation_scale=0.0: must be positive"),
    ],
)
def test_what_cannot_be_converted_is_said(schema, given, word):
    found = DatasetConverter(replace(SCHEMA, **schema), DatasetConventions(**given)).problems()
    assert any(word in problem for problem in found), found


def test_a_dataset_like_its_schema_passes_unchanged():
    converter = DatasetConverter(replace(SCHEMA, gripper="open_positive"), DatasetConventions())
    actions, images = torch.randn(4, 7), torch.zeros(4, 3, 8, 8)
    assert converter.problems() == []
    assert converter.actions(actions) is actions and converter.images(images) is images


# ---- through a real LeRobotDataset -----------------------------------------------------------------------------------

FRAMES = 12


class SceneSimulator(Simulator):
    """One scene, shown as LIBERO shows it: rotated by 180 degrees. Fake: nothing moves."""

    gripper = "close_positive"
    image_orientation = "rotated_180"

    @staticmethod
    def scene() -> np.ndarray:
        """Upright ``[16, 16, 3]``, no symmetry."""
        return np.random.default_rng(7).integers(0, 256, (16, 16, 3), dtype=np.uint8)

    def reset(self, seed):
        pass

    def step(self, action):
        return StepResult(0.0, False, False, False)

    def observe(self):
        image = self.scene()[::-1, ::-1].transpose(2, 0, 1)
        return {"image": {"front": image}, "state": np.zeros(8, np.float32), "instruction": "look"}


class WatchedBackbone(FakeBackbone):
    """Keeps the observations that reach it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def preprocess(self, observation, instructions, schema, kinds=("tokens",)):
        self.seen.append(observation.clone())
        return super().preprocess(observation, instructions, schema, kinds)


def _trajectory():
    """Absolute targets a little ahead of the state: position 3, quaternion xyzw 4, gripper 1=open."""
    time = np.linspace(0, 2, FRAMES + 1)
    place = np.stack([np.sin(time), np.cos(time), 0.3 * time], -1)
    turn = Rotation.from_rotvec(np.stack([0.2 * time, 0.1 * time, -0.5 * time], -1))
    opened = (np.arange(FRAMES) < 7).astype(np.float64)
    states = np.concatenate([place[:-1], turn[:-1].as_quat(canonical=True), opened[:, None] * 0.04], -1)
    actions = np.concatenate([place[1:], turn[1:].as_quat(canonical=True), opened[:, None]], -1)
    deltas = np.concatenate(
        [
            (place[1:] - place[:-1]) / 0.5,
            (turn[1:] * turn[:-1].inv()).as_rotvec() / 0.25,
            2 * opened[:, None] - 1,
        ],
        -1,
    )
    return states.astype(np.float32), actions.astype(np.float32), torch.from_numpy(deltas).float()


CONVENTIONS = DatasetConventions(
    action_convention="absolute",
    rotation="quaternion_xyzw",
    gripper="open_one",
    image_orientation="upright",
    state_position_index=0,
    state_rotation="quaternion_xyzw",
    state_rotation_index=3,
    translation_scale=0.5,
    rotation_scale=0.25,
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    root = tmp_path_factory.mktemp("lerobot") / "upright"
    states, actions, _ = _trajectory()
    image = {"dtype": "image", "shape": (16, 16, 3), "names": ["height", "width", "channels"]}
    vector = {"dtype": "float32", "shape": (8,), "names": None}
    dataset = LeRobotDataset.create(
        "local/upright",
        fps=10,
        features={"observation.images.front": image, "observation.state": vector, "action": vector},
        root=root,
        use_videos=False,
    )
    for state, action in zip(states, actions, strict=True):
        dataset.add_frame(
            {
                "observation.images.front": SceneSimulator.scene(),
                "observation.state": state,
                "action": action,
                "task": "look",
            }
        )
    dataset.save_episode()
    dataset.finalize()
    return root


def _reader(root, conventions=CONVENTIONS, schema=SCHEMA, backbone=None, stored=True):
    config = DatasetConfig(repo_id="local/upright", conventions=conventions)
    backbone = backbone or WatchedBackbone()
    dataset = open_dataset(config, schema, root)
    store = FeatureStore(None, 10**9) if stored else None
    return DemonstrationReader(dataset, config, schema, backbone, backbone.feature_spec(schema, "tokens"), store)


@pytest.mark.parametrize("stored", [True, False])
def test_the_reader_gives_internal_deltas(recorded, stored):
    states, _, deltas = _trajectory()
    reader = _reader(recorded, stored=stored)
    assert DatasetConverter(SCHEMA, CONVENTIONS).problems() == []
    batch = reader.read(torch.arange(FRAMES))
    state = batch["state"] if stored else batch["observation", "state"]
    torch.testing.assert_close(state, torch.from_numpy(states))
    assert batch["actions"].shape == (FRAMES, 3, 7)
    for frame, step in itertools.product(range(FRAMES), range(3)):
        assert batch["is_pad"][frame, step] == (frame + step >= FRAMES)
        if frame + step < FRAMES:
            torch.testing.assert_close(batch["actions"][frame, step], deltas[frame + step], atol=1e-5, rtol=0)


def test_the_statistics_are_those_of_the_internal_deltas(recorded):
    reader = _reader(recorded)
    states, _, deltas = _trajectory()
    state, action = dataset_stats(reader.dataset, reader.config, SCHEMA)
    expected = NormalizationStats.of(deltas)
    for name in (f.name for f in fields(NormalizationStats)):
        torch.testing.assert_close(getattr(action, name), getattr(expected, name), atol=1e-5, rtol=0, msg=name)
    torch.testing.assert_close(state.mean, torch.from_numpy(states).mean(0), atol=1e-5, rtol=0)
    assert state.q01 is not None and state.q99 is not None  # LeRobot stores them
    assert ((state.min - 1e-6 <= state.q01) & (state.q01 <= state.q99) & (state.q99 <= state.max + 1e-6)).all()
    batch = reader.read(torch.arange(4))
    normalized = Normalizer(SCHEMA, state, action).normalize_action(batch["actions"])
    assert normalized.isfinite().all() and normalized[..., :6].abs().max() < 3


def test_deltas_that_are_called_absolute_are_refused(recorded):
    states, _, deltas = (torch.as_tensor(values) for values in _trajectory())
    converter = DatasetConverter(SCHEMA, CONVENTIONS)
    mislabelled = torch.cat([deltas[:, :3], states[:, 3:7], deltas[:, 6:]], -1)
    with pytest.raises(ValueError, match=r"action_convention='absolute'.*look like deltas already"):
        converter.check_absolute(mislabelled, states)
    converter.check_absolute(torch.from_numpy(_trajectory()[1]), states)


def test_one_scene_reaches_the_backbone_alike_from_dataset_and_simulator(recorded):
    backbone = WatchedBackbone()
    _reader(recorded, backbone=backbone).read(torch.tensor([0]))
    env = SimulatorEnv({"_target_": f"{__name__}.SceneSimulator"}, SCHEMA, Normalizer(SCHEMA), inline=True)
    start = env.reset()
    backbone(start["observation"], list(start["language_instruction"]), SCHEMA, ("tokens",))
    env.close()
    dataset, simulator = (seen["image", "front"] for seen in backbone.seen)
    assert torch.equal(dataset[:1], simulator)
    golden = torch.from_numpy(SceneSimulator.scene()[::-1, ::-1].copy()).permute(2, 0, 1)
    assert torch.equal(dataset[0], golden)
    # Without the convention the two differ: the test can fail.
    wrong = _reader(recorded, replace(CONVENTIONS, image_orientation=None), backbone=backbone)
    wrong.read(torch.tensor([0]))
    assert not torch.equal(backbone.seen[-1]["image", "front"][:1], simulator)


@pytest.mark.parametrize("gripper", NATIVE)
def test_a_simulator_gets_its_own_gripper_range(gripper):
    schema = replace(SCHEMA, gripper=gripper, action_normalization="identity")
    env = SimulatorEnv({"_target_": "not.started"}, schema, Normalizer(schema))
    chunk = torch.zeros(1, 3, 7)
    chunk[0, :, -1] = torch.tensor([5.0, -5.0, 0.0])  # heads overshoot: open, closed
    native = env.to_native(chunk)
    assert native[0, :, -1].tolist() == list(NATIVE[gripper])


# ---- in the configuration --------------------------------------------------------------------------------------------


def _problems(config) -> str:
    with pytest.raises(ConfigError) as error:
        validate(config)
    return str(error.value)


def _toy_dataset(root, recorded=None, action_shape=2):
    vectors = {"observation.state": ((4,), "float32"), "action": ((action_shape,), "float32")}
    write(root, Data({"observation.images.camera": (32, 32)}, vectors, lengths=(2,)))
    if recorded is not None:
        (root / "meta" / "nexus.json").write_text(json.dumps({"schema": recorded}))
    return root


def _toy(compose, root, *overrides):
    key = "tenants.toy_sft.dataset"
    return compose("+tenants=[toy_sft]", f"{key}.record=null", f"{key}.root={root}", *overrides)


def test_conventions_are_validated_with_the_run(compose, tmp_path):
    key = "tenants.toy_sft.dataset.conventions"
    root = _toy_dataset(tmp_path / "data")
    assert "gripper='upwards': choose one of" in _problems(_toy(compose, root, f"{key}.gripper=upwards"))
    needs = _problems(_toy(compose, root, f"{key}.action_convention=delta"))
    assert f"{key}.state_position_index=None: delta -> absolute needs 2 dims of the state" in needs
    validate(_toy(compose, root, f"{key}.action_convention=delta", f"{key}.state_position_index=0"))
    recording = compose("+tenants=[toy_sft]", f"{key}.image_orientation=rotated_180")
    assert f"{key}: a recording has the schema's conventions; remove them" in _problems(recording)


def test_a_recordings_own_conventions_win(compose, tmp_path):
    key = "tenants.toy_sft.dataset.conventions"
    root = _toy_dataset(tmp_path / "data", {"action_convention": "delta", "gripper": "none"})
    told = _problems(_toy(compose, root))
    assert f"{key}.action_convention=absolute: dataset {root} was recorded with action_convention=delta" in told
    validate(_toy(compose, root, f"{key}.action_convention=delta", f"{key}.state_position_index=0"))
    already = _toy_dataset(tmp_path / "deltas", {"action_convention": "delta"})
    schema = ("tenants.toy_sft.schema.action_convention=delta", f"{key}.action_convention=absolute")
    double = _problems(_toy(compose, already, *schema, f"{key}.state_position_index=0"))
    assert "was recorded with action_convention=delta" in double


def test_the_datasets_action_dim_follows_its_rotation(compose, tmp_path):
    key, schema = "tenants.toy_sft.dataset.conventions", "tenants.toy_sft.schema"
    change = (
        f"{schema}.rotation=rotation_6d",
        f"{schema}.action_dim=9",
        f"{key}.rotation=quaternion_xyzw",
        "tenants.toy_sft.environment=null",
        "tenants.toy_sft.eval.episodes=0",
    )
    validate(_toy(compose, _toy_dataset(tmp_path / "fits", action_shape=7), *change))
    told = _problems(_toy(compose, _toy_dataset(tmp_path / "not", action_shape=9), *change))
    assert f"{schema}.action_dim=9, 7 as quaternion_xyzw: dataset" in told


def test_a_simulator_of_another_orientation_is_refused(compose):
    simulator = {"_target_": f"{__name__}.SceneSimulator"}
    config = compose("+tenants=[toy]")
    config.tenants["toy"].environment.simulator = simulator
    config.tenants["toy"].schema.cameras = ["front"]
    told = _problems(config)
    assert "tenants.toy.schema.image_orientation=upright: SceneSimulator gives rotated_180 images" in told
