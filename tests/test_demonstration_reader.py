"""Demonstrations as training batches: the reader, its views, the feature store, group batching at the actor."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import FakeBackbone
from tensordict import TensorDict

from nexus_lightning.backbone import Backbone, VLAFeature
from nexus_lightning.config import AugmentationConfig, ConfigError, DatasetConfig, validate
from nexus_lightning.converter import DatasetConverter
from nexus_lightning.demonstrations import record_demonstrations
from nexus_lightning.features.grouping import EncodeRequest, EncodeStats, encode_together, passes
from nexus_lightning.features.store import FeatureStore
from nexus_lightning.objectives.awr import AWR, AWRSettings
from nexus_lightning.producers.demonstrations import (
    DemonstrationReader,
    FrameOrder,
    augment,
    dataset_stats,
    low_dim_table,
    open_dataset,
)
from nexus_lightning.queues.jobs import Scheduler
from nexus_lightning.schema import MODE_STATISTICS, Normalizer, TenantSchema
from nexus_lightning.tenant import PassCounter
from nexus_lightning.trainer import train

SIMULATOR = {"_target_": "fake_simulator.FakeSimulator", "goal": 2.0, "horizon": 6, "cameras": ["front"]}
SCHEMA = TenantSchema(
    state_dim=4, action_dim=2, chunk=3, execute=2, cameras=("front",), image_size=16, gripper="close_positive"
)
AUGMENTATION = AugmentationConfig(views=2, crop=0.5, brightness=0.3, contrast=0.3)


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data") / "walk"
    expert = "fake_simulator.make_expert"
    record_demonstrations(SIMULATOR, expert, root, 3, 7, SCHEMA, workers=1, progress=False)
    return root


def reader_of(
    root: Path, store: FeatureStore | None, backbone: Backbone | None = None, **changes
) -> DemonstrationReader:
    backbone = backbone or FakeBackbone()
    schema = replace(SCHEMA, **changes.pop("schema", {}))
    config = DatasetConfig(repo_id="local/walk", **changes)
    dataset = open_dataset(config, schema, root)
    return DemonstrationReader(dataset, config, schema, backbone, backbone.feature_spec(schema), store, PassCounter())


def test_the_table_equals_what_lerobot_gives_frame_by_frame(recording):
    dataset = open_dataset(DatasetConfig(repo_id="local/walk"), SCHEMA, recording)
    table = low_dim_table(dataset, SCHEMA, DatasetConverter(SCHEMA, DatasetConfig(repo_id="x").conventions))
    assert len(table) == len(dataset) == 8
    for row, item in enumerate(dataset[i] for i in range(len(dataset))):
        assert torch.equal(table["state"][row], item["observation.state"])
        assert torch.equal(table["is_pad"][row], item["action_is_pad"])
        assert torch.equal(table["actions"][row], SCHEMA.to_internal(item["action"]))
    assert table["is_pad"].any() and not table["is_pad"][:, 0].any()


def test_some_episodes_only(recording):
    whole = reader_of(recording, None)
    some = reader_of(recording, None, episodes=2)
    assert len(some) < len(whole)
    assert torch.equal(some.table["actions"], whole.table["actions"][: len(some)])


def test_stored_features_equal_features_computed_from_the_raw_batch(recording):
    store = FeatureStore(None, 10**9)
    stored, raw = reader_of(recording, store), reader_of(recording, None)
    rows = torch.tensor([5, 0, 5, 7])
    kept, fresh = stored.read(rows), raw.read(rows)
    assert list(fresh["language_instruction"]) == [raw.dataset[int(row)]["task"] for row in rows]
    request = EncodeRequest(fresh["observation"], list(fresh["language_instruction"]), SCHEMA, raw.spec)
    again = encode_together(raw.backbone, [request], EncodeStats())[0]
    torch.testing.assert_close(kept["features"].for_head().pooled, again.pooled, rtol=2e-3, atol=2e-3)
    assert torch.equal(kept["actions"], fresh["actions"]) and torch.equal(kept["is_pad"], fresh["is_pad"])
    assert torch.equal(kept["state"], fresh["observation", "state"])


def test_tenants_on_one_dataset_share_one_copy(recording):
    """Also when their chunks and actions differ: only what the backbone sees is in the key."""
    store, backbone = FeatureStore(None, 10**9), FakeBackbone()
    a = reader_of(recording, store, backbone)
    b = reader_of(recording, store, backbone, schema={"chunk": 2, "action_normalization": "min_max"})
    rows = torch.arange(len(a))
    a.read(rows)
    calls, size = backbone.calls, store.bytes
    b.read(rows)
    assert backbone.calls == calls and store.bytes == size
    assert a.passes.passes_per_observation == 1.0
    c = reader_of(recording, store, backbone, schema={"prompt": "robot: {instruction}"})
    c.read(rows)
    assert backbone.calls > calls, "another prompt is another key"


def test_augmented_views_are_stored_once_and_cycle_with_the_passes(recording):
    store, backbone = FeatureStore(None, 10**9), FakeBackbone()
    reader = reader_of(recording, store, backbone, augmentation=AUGMENTATION)
    assert reader.warm_up() and reader.entry is not None
    assert reader.entry.computed_rows == 2 * len(reader)
    rows = torch.arange(4)
    plain, other = (reader.read(rows, view)["features"].tokens["image_front"] for view in (0, 1))
    assert not torch.equal(plain, other)
    assert torch.equal(plain, reader_of(recording, store, backbone).read(rows)["features"].tokens["image_front"])
    assert reader.entry.computed_rows == 2 * len(reader), "served from the store"
    assert FrameOrder(5, seed=0).epochs(3, 6).tolist() == [0, 0, 1, 1, 1, 1]


def test_augmentation_is_a_pure_function_of_frame_and_view():
    images = torch.randint(0, 256, (3, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    state = torch.get_rng_state()
    one = augment(images, torch.tensor([4, 5, 6]), 1, AUGMENTATION)
    assert torch.equal(state, torch.get_rng_state())
    assert one.shape == images.shape and one.dtype == torch.uint8
    assert torch.equal(one[1:2], augment(images[1:2], torch.tensor([5]), 1, AUGMENTATION))
    assert not torch.equal(one, augment(images, torch.tensor([4, 5, 6]), 2, AUGMENTATION))
    none = AugmentationConfig(crop=1.0, brightness=0.0, contrast=0.0)
    assert torch.equal(images, augment(images, torch.tensor([4, 5, 6]), 1, none))


# ------------------------------------------------------------------------------------------ grouping at the actor


def test_passes_take_each_row_once_and_bound_padding():
    lengths = [3, 80, 4, 41, 3, 40, 7, 81]
    cut = passes(lengths, max_rows=3, max_padding=0.25)
    assert sorted(row for part in cut for row in part) == list(range(8))
    for part in cut:
        assert len(part) <= 3
        padded = max(lengths[row] for row in part) * len(part)
        assert padded - sum(lengths[row] for row in part) <= 0.25 * padded


def test_grouped_rows_equal_rows_encoded_alone():
    backbone, stats = FakeBackbone(), EncodeStats()
    texts = [["go", "a much longer instruction than the other ones", "go"], ["push the cube", "go"]]
    requests = []
    for seed, instructions in enumerate(texts):
        generator = torch.Generator().manual_seed(seed)
        shape = (len(instructions), 3, 16, 16)
        images = {"front": torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)}
        observation = TensorDict({"image": TensorDict(images, [len(instructions)])}, [len(instructions)])
        requests.append(EncodeRequest(observation, instructions, SCHEMA, backbone.feature_spec(SCHEMA)))
    together = encode_together(backbone, requests, stats)
    assert stats.rows == 5 and stats.calls == backbone.calls == 3  # "go" three times, and two texts of other lengths
    assert stats.padding_share == 0.0
    for request, features in zip(requests, together, strict=True):
        for row in range(len(request.instructions)):
            part = slice(row, row + 1)
            alone = backbone(request.observation[part], request.instructions[part], SCHEMA)
            assert_same(features[part], alone)


def assert_same(a: VLAFeature, b: VLAFeature) -> None:
    torch.testing.assert_close(a.pooled, b.pooled)
    for name in b.tokens.keys():
        torch.testing.assert_close(a.tokens[name][a.mask[name]], b.tokens[name][b.mask[name]])


@pytest.fixture(scope="module")
def toy_data(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("toy")


@pytest.fixture
def toy(compose, toy_data):
    """``toy(names)``: never-reusing supervised toy tenants of different learning rates on one dataset."""

    def build(names: list[str], *overrides: str):
        config = compose(
            *(f"+tenant@tenants.{name}=toy_sft" for name in names),
            f"data_dir={toy_data}",
            "trainer.enable_progress_bar=false",
            *overrides,
        )
        config.backbone = {"_target_": "fakes.FakeBackbone"}
        for i, name in enumerate("abcd"):
            if name in config.tenants:
                tenant = config.tenants[name]
                tenant.eval = replace(tenant.eval, episodes=0)
                tenant.dataset.record = replace(tenant.dataset.record, workers=1, episodes=6)
                tenant.head["lr"], tenant.target_jobs, tenant.max_in_flight = 1e-3 * (i + 1), 5, 5
                tenant.features.reuse = "never"
        return config

    return build


def losses(summary: dict, tenant: str) -> list[float]:
    import csv

    with (Path(summary["run_dir"]) / "metrics.csv").open() as file:
        return [float(row[f"train/{tenant}/loss"]) for row in csv.DictReader(file) if row.get(f"train/{tenant}/loss")]


def test_tenants_share_the_actors_backbone_passes_and_train_as_if_alone(toy, monkeypatch):
    lease_next, ready = Scheduler.lease_next, []

    def once_all_are_ready(self, *args, **kwargs):
        """Whom an idle actor meets is a matter of timing; here it starts when both tenants have all jobs ready."""
        while not ready and self.depth() < 10:
            time.sleep(0.01)
        ready.append(True)
        return lease_next(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "lease_next", once_all_are_ready)
        together = train(toy(["a", "b"]))
    alone = {name: train(toy([name])) for name in "ab"}
    for name in "ab":
        assert together["tenants"][name]["jobs_completed"] == 5
        torch.testing.assert_close(
            torch.tensor(losses(together, name)), torch.tensor(losses(alone[name], name)), rtol=1e-5, atol=1e-7
        )
    calls = {name: alone[name]["backbone_rows"]["actor_calls"] for name in "ab"}
    assert together["backbone_rows"]["actor"] == sum(alone[name]["backbone_rows"]["actor"] for name in "ab")
    assert together["backbone_rows"]["actor_calls"] == calls["a"] == calls["b"] == 20, "every pass served both"


def test_max_jobs_bounds_groups_too(toy):
    summary = train(toy(["a", "b"], "trainer.max_jobs=3"))
    assert sum(t["jobs_completed"] for t in summary["tenants"].values()) == 3


def test_a_disk_store_serves_the_next_run(toy, toy_data, tmp_path):
    def run():
        config = toy(["a"], "feature_store.store=disk", f"feature_store.folder={tmp_path}/features")
        config.tenants["a"].features.reuse = "auto"
        return train(config)

    first, second = run(), run()
    assert first["backbone_rows"]["demonstrations"]["a"] > 0 == second["backbone_rows"]["demonstrations"]["a"]
    assert losses(first, "a") == losses(second, "a")


def test_augmentation_keys_are_checked(toy):
    config = toy(["a"])
    config.tenants["a"].dataset.augmentation = AugmentationConfig(**{**asdict(AUGMENTATION), "views": 1, "crop": 0.0})
    with pytest.raises(ValueError) as error:
        train(config)
    assert "tenants.a.dataset.augmentation.views=1: must be at least 2" in str(error.value)
    assert "tenants.a.dataset.augmentation.crop=0.0: must lie in (0, 1]" in str(error.value)


# -------------------------------------------------------------------------------- the data: lengths, episodes, values


KEYS = ("observation.state", "action")


def write_dataset(root: Path, state_dim=4, action_dim=2, change=lambda episode, step, frame: None) -> Path:
    """Five episodes of six frames, all values different, no image; ``change`` edits a frame in place."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    def feature(dim):
        return {"dtype": "float32", "shape": (dim,), "names": None}

    features = {"observation.state": feature(state_dim), "action": feature(action_dim), "next.reward": feature(1)}
    dataset = LeRobotDataset.create("local/numbers", fps=20, features=features, root=root, use_videos=False)
    generator = np.random.default_rng(0)
    for episode in range(5):
        for step in range(6):
            frame = {
                "observation.state": generator.uniform(-1, 1, state_dim).astype(np.float32),
                "action": generator.uniform(-1, 1, action_dim).astype(np.float32),
                "next.reward": np.array([step], np.float32),
                "task": "count",
            }
            change(episode, step, frame)
            dataset.add_frame(frame)
        dataset.save_episode()
    dataset.finalize()
    return root


NUMBERS = replace(SCHEMA, cameras=(), gripper="none", rotation="none", control_hz=20.0)


def numbers_reader(root: Path, algorithm: AWRSettings | None = None, **schema) -> DemonstrationReader:
    schema = replace(NUMBERS, **schema)
    config, backbone = DatasetConfig(repo_id="local/numbers"), FakeBackbone()
    dataset, spec = open_dataset(config, schema, root), backbone.feature_spec(schema)
    return DemonstrationReader(dataset, config, schema, backbone, spec, None, algorithm=algorithm)


@pytest.mark.parametrize(("state_dim", "action_dim"), [(1, 2), (4, 1), (1, 1)])
def test_vectors_of_length_one_stay_vectors(tmp_path, state_dim, action_dim):
    """LeRobot keeps them as scalars."""
    kept = []
    root = write_dataset(tmp_path / "x", state_dim, action_dim, lambda episode, step, frame: kept.append(frame))
    reader = numbers_reader(root, AWR.configure(gamma=1.0), state_dim=state_dim, action_dim=action_dim)
    batch = reader.read(torch.tensor([4, 6]))
    assert batch["observation", "state"].shape == (2, state_dim) and batch["actions"].shape == (2, 3, action_dim)
    for row, frame in enumerate((4, 6)):
        assert batch["observation", "state"][row].tolist() == kept[frame]["observation.state"].tolist()
        for step, taken in enumerate([4, 5, 5] if frame == 4 else [6, 7, 8]):  # episode 0 ends with frame 5
            assert batch["actions"][row, step].tolist() == kept[taken]["action"].tolist()
    assert batch["return_to_go"].tolist() == [[9.0], [15.0]]
    for stats, key in zip(dataset_stats(reader.dataset, reader.config, reader.schema), KEYS, strict=True):
        values = np.stack([frame[key] for frame in kept])
        np.testing.assert_allclose(stats.mean, values.mean(0), atol=1e-6)
        np.testing.assert_allclose(stats.max, values.max(0))


@pytest.mark.parametrize("mode", [mode for mode in MODE_STATISTICS if mode != "identity"])
def test_statistics_are_those_of_the_chosen_episodes(tmp_path_factory, mode):
    kept = []

    def change(episode, step, frame):  # the last ones are far outside
        for key in KEYS:
            frame[key] = frame[key] * (1000 if episode > 1 else 1)
        kept.append(frame)

    root = write_dataset(tmp_path_factory.mktemp("data") / "x", change=change)
    schema = replace(NUMBERS, state_normalization=mode, action_normalization=mode)
    for episodes in (2, 5, None):
        config = DatasetConfig(repo_id="local/numbers", episodes=episodes)
        dataset = open_dataset(config, schema, root)
        found = dataset_stats(dataset, config, schema)
        normalizer = Normalizer(schema, *found)
        for stats, key, name in zip(found, KEYS, ("state", "action"), strict=True):
            values = np.stack([frame[key] for frame in kept[:12]])
            if episodes == 2:
                expected = {"mean": values.mean(0), "std": values.std(0), "min": values.min(0), "max": values.max(0)}
                expected |= {f"q{q:02d}": np.quantile(values, q / 100, axis=0) for q in (1, 10, 90, 99)}
                for statistic in MODE_STATISTICS[mode]:
                    np.testing.assert_allclose(getattr(stats, statistic), expected[statistic], rtol=1e-5, atol=1e-6)
                assert getattr(normalizer, f"{name}_scale").max() < 1.01
            else:  # those that LeRobot has stored, to the bit
                for statistic in MODE_STATISTICS[mode]:
                    stored = torch.as_tensor(dataset.meta.stats[key][statistic], dtype=torch.float32)
                    assert torch.equal(getattr(stats, statistic), stored)
                assert getattr(normalizer, f"{name}_scale").max() > 100


def test_more_episodes_than_there_are_never_ask_the_hub(tmp_path, monkeypatch, compose):
    from lerobot.datasets import lerobot_dataset

    def download(*args, **kwargs):
        raise AssertionError("asked the hub")

    monkeypatch.setattr(lerobot_dataset, "snapshot_download", download)
    monkeypatch.setattr(lerobot_dataset, "get_safe_version", download)
    root = write_dataset(tmp_path / "x")
    with pytest.raises(ConfigError, match=r"dataset\.episodes=100: dataset .*/x has 5"):
        open_dataset(DatasetConfig(repo_id="local/numbers", episodes=100), NUMBERS, root)

    def problems(*overrides):
        config = compose("+tenants=[toy_sft]", *overrides)
        with pytest.raises(ConfigError) as error:
            validate(config)
        return [p for p in error.value.problems if "dataset.episodes" in p]

    own = ("tenants.toy_sft.dataset.record=null", f"tenants.toy_sft.dataset.root={root}")
    says = f"tenants.toy_sft.dataset.episodes=6: dataset {root} has 5; ask for at most 5, or null for all of them"
    assert problems(*own, "tenants.toy_sft.dataset.episodes=6") == [says]
    recorded = problems("tenants.toy_sft.dataset.record.episodes=3", "tenants.toy_sft.dataset.episodes=4")
    assert len(recorded) == 1 and "has 3" in recorded[0], "what will be recorded counts as well"

    next((root / "data").rglob("*.parquet")).unlink()
    with pytest.raises(ValueError, match="1 of its files are missing, for example data/"):
        open_dataset(DatasetConfig(repo_id="local/numbers", episodes=2), NUMBERS, root)


@pytest.mark.parametrize("key", [*KEYS, "next.reward"])
def test_a_value_that_is_not_finite_is_found_before_anything_is_trained(tmp_path, key):
    def change(episode, step, frame):
        if (episode, step) == (1, 3):
            frame[key][-1] = np.nan

    reader = numbers_reader(write_dataset(tmp_path / "x", change=change), AWR.configure())
    says = rf"local/numbers: '{key}' of episode 1, frame 3 is \[.*nan\], in all 1 frames"
    with pytest.raises(ValueError, match=says):
        reader.read(torch.tensor([0]))
