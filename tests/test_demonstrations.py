"""Recording demonstrations from a fake simulator into a LeRobotDataset."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_simulator import WRONG

from nexus_lightning.demonstrations import (
    RECORD_FILE,
    RecorderHost,
    check_recording,
    describe_recording,
    record_demonstrations,
)
from nexus_lightning.schema import TenantSchema
from nexus_lightning.simulator import ContractError

sys.path.insert(0, str(Path(__file__).parent))  # worker processes get this path and import the fake from here
SIMULATOR = {"_target_": "fake_simulator.FakeSimulator", "goal": 2.0, "horizon": 6, "cameras": ["front"]}
SCHEMA = TenantSchema(
    state_dim=4, action_dim=2, chunk=3, execute=2, cameras=("front",), image_size=16, gripper="close_positive"
)
EXPERT = "fake_simulator.make_expert"


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "walk"
    record_demonstrations(SIMULATOR, EXPERT, root, episodes=3, first_seed=7, schema=SCHEMA, progress=False)
    return root


def test_only_successes_are_kept_in_seed_order(recording):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    record = json.loads((recording / RECORD_FILE).read_text())
    assert record["seeds"] == [8, 10, 12]  # the expert stands still for odd seeds
    assert record["tried"] == 6
    assert record["schema"]["gripper"] == "close_positive" and record["schema"]["image_orientation"] == "upright"
    assert not list(recording.parent.glob("*.recording-*"))
    dataset = LeRobotDataset("local/walk", root=recording, delta_timestamps={"action": [0.0, 0.05, 0.1]})
    assert dataset.num_episodes == 3 and dataset.fps == 20
    first = dataset[0]
    assert first["task"] == "count 8"
    assert first["action"][0].tolist() == [1.0, 1.0]  # clipped, native gripper sign
    assert first["observation.images.front"].shape == (3, 16, 16)
    for k, frame in enumerate(dataset[i] for i in range(dataset.meta.episodes[0]["length"])):
        # the observation before action k
        assert frame["observation.state"][1] == k
        assert np.allclose(frame["observation.images.front"], k / 255)
    assert frame["next.success"].item() and not first["next.success"].item()
    assert frame["action_is_pad"].tolist() == [False, True, True]


def test_reuse_and_refusal(recording):
    def record(**changes):
        simulator = {**SIMULATOR, **changes.pop("simulator", {})}
        schema = TenantSchema(**{**SCHEMA.__dict__, **changes.pop("schema", {})})
        arguments = {"episodes": 3, "first_seed": 7, **changes}
        return record_demonstrations(simulator, EXPERT, recording, schema=schema, progress=False, **arguments)

    assert record() == recording
    assert record(schema={"chunk": 5, "state_normalization": "min_max"}) == recording  # not properties of the data
    with pytest.raises(ValueError, match=r"simulator.goal: recorded 2.0, asked for 3.0"):
        record(simulator={"goal": 3.0})
    with pytest.raises(ValueError, match=r"episodes: recorded 3, asked for 4; first_seed: recorded 7, asked for 0"):
        record(episodes=4, first_seed=0)
    with pytest.raises(ValueError, match=r"schema.image_size: recorded 16, asked for 32"):
        record(schema={"image_size": 32})


def test_a_folder_that_is_not_a_recording_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="holds no recording"):
        check_recording(tmp_path / "mine", describe_recording(SIMULATOR, EXPERT, 3, 7, SCHEMA))


def test_replay_renders_successes_only_and_gives_the_same_episode():
    def episode(target, seed):
        host = RecorderHost({**SIMULATOR, "_target_": f"fake_simulator.{target}"})
        return host.episode(EXPERT, seed), host.sim.renders

    direct, _ = episode("FakeSimulator", 8)
    replayed, renders = episode("ReplayFakeSimulator", 8)
    for key in ("state", "action", "success"):
        assert np.array_equal(direct[key], replayed[key]), key
    assert np.array_equal(direct["images"]["front"], replayed["images"]["front"])
    assert renders == len(replayed["action"])
    assert episode("ReplayFakeSimulator", 7) == (None, 0)


def test_a_schema_that_does_not_fit_leaves_nothing_behind(tmp_path):
    schema = TenantSchema(**{**SCHEMA.__dict__, "gripper": "open_positive"})
    with pytest.raises(ValueError, match="gripper='open_positive': the simulator and expert give 'close_positive'"):
        record_demonstrations(SIMULATOR, EXPERT, tmp_path / "x", 1, 8, schema, workers=1, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [".x.lock"]


def test_an_expert_that_fails_is_an_error(tmp_path):
    simulator = {**SIMULATOR, "goal": 1000.0}
    with pytest.raises(RuntimeError, match="did not succeed often enough: tried 15 seeds"):
        record_demonstrations(simulator, EXPERT, tmp_path / "x", 1, 8, SCHEMA, workers=1, progress=False)


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("how", ["reward nan", "success none", "state short", "image float"])
def test_a_simulator_that_breaks_its_contract_is_not_recorded(tmp_path, inline, how):
    simulator = {**SIMULATOR, "_target_": "fake_simulator.Careless", "goal": 3.0, "wrong": how}
    with pytest.raises(ContractError) as error:
        record_demonstrations(
            simulator, EXPERT, tmp_path / "x", 1, 8, SCHEMA, workers=1, progress=False, inline=inline, tenant="blue"
        )
    assert str(error.value).startswith("tenant 'blue': simulator 0 (fake_simulator.Careless) broke its contract: ")
    assert WRONG[how] in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == [".x.lock"], "no recording, not even a part"


def test_an_expert_that_gives_nan_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nan_expert: action 1 of seed 8 is not finite: \[1.0, nan\]"):
        record_demonstrations(SIMULATOR, f"{__name__}.nan_expert", tmp_path / "x", 1, 8, SCHEMA, inline=True)


def nan_expert(simulator):
    yield np.array([1.0, 1.0], np.float32)
    yield np.array([1.0, np.nan], np.float32)
