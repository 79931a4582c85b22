"""Demonstrations as training batches: the reader, its views, the feature store, group batching at the actor."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from fakes import FakeBackbone
from tensordict import TensorDict

from nexus_lightning.backbone import Backbone, VLAFeature
from nexus_lightning.config import AugmentationConfig, DatasetConfig
from nexus_lightning.conventions import DatasetConverter
from nexus_lightning.demonstrations import record_demonstrations
from nexus_lightning.features.grouping import EncodeRequest, EncodeStats, encode_together, passes
from nexus_lightning.features.reuse import PassCounter
from nexus_lightning.features.store import FeatureStore
from nexus_lightning.producers.demonstrations import (
    DemonstrationReader,
    FrameOrder,
    augment,
    low_dim_table,
    open_dataset,
)
from nexus_lightning.queues.jobs import Scheduler
from nexus_lightning.schema import TenantSchema
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
