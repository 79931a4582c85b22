"""FeatureStore: served values, keys, budget, disk full, crashes, several threads and processes."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes import FakeBackbone
from tensordict import TensorDict

from nexus_lightning.backbone import VLAFeature, concatenate_features, sharing_key
from nexus_lightning.features import store as store_module
from nexus_lightning.features.store import DTYPES, FeatureStore, StoreKey, dataset_revision
from nexus_lightning.schema import TenantSchema

KEY = StoreKey("fp", "prefix", 0, "tokens", "me/cubes", "r1", shard_rows=4)
FRAMES = 18  # four shards of 4 and one of 2
PLENTY = 10**9
DIM = 3


@cache
def numbers(row: int, view: int) -> dict[str, torch.Tensor]:
    """One frame. The text of row r has ``1 + r % 7`` tokens."""
    generator = torch.Generator().manual_seed(1000 * view + row)
    return {
        "image": torch.randn(2, DIM, generator=generator),
        "text": torch.randn(1 + row % 7, DIM, generator=generator),
        "pooled": torch.randn(DIM, generator=generator),
        "state": torch.randn(5, generator=generator),
        "actions": torch.randn(6, 2, generator=generator),
        "is_pad": torch.rand(6, generator=generator) > 0.5,
    }


class Compute:
    """Gives :func:`numbers`, features times ``scale``. Counts its rows."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.calls: list[list[int]] = []

    def __call__(self, rows: torch.Tensor, view: int) -> TensorDict:
        self.calls.append(rows.tolist())
        return self.batch(rows, view)

    def batch(self, rows: torch.Tensor, view: int) -> TensorDict:
        """Padded to the longest text of ``rows``, as a backbone does."""
        values = [numbers(int(row), view) for row in rows]
        size, longest = len(rows), max(len(value["text"]) for value in values)
        text, mask = torch.zeros(size, longest, DIM), torch.zeros(size, longest, dtype=torch.bool)
        for i, value in enumerate(values):
            text[i, : len(value["text"])], mask[i, : len(value["text"])] = value["text"], True
        image = torch.stack([value["image"] for value in values])
        features = VLAFeature(
            tokens=TensorDict({"image": image * self.scale, "text": text * self.scale}, [size]),
            mask=TensorDict({"image": torch.ones(size, 2, dtype=torch.bool), "text": mask}, [size]),
            pooled=torch.stack([value["pooled"] for value in values]) * self.scale,
            batch_size=[size],
        )
        columns = {name: torch.stack([v[name] for v in values]) for name in ("state", "actions", "is_pad")}
        return TensorDict({"features": features, **columns}, [size])

    @property
    def rows(self) -> list[int]:
        return [row for call in self.calls for row in call]


def refuse(rows: torch.Tensor, view: int) -> TensorDict:
    raise AssertionError(f"computed again: {rows.tolist()}")


def check(batch: TensorDict, rows: list[int], view: int = 0, dtype: torch.dtype = torch.float16) -> None:
    """Every row against its own numbers, computed alone."""
    features = batch["features"]
    assert isinstance(features, VLAFeature) and batch.batch_size == features.batch_size == torch.Size([len(rows)])
    for i, row in enumerate(rows):
        expected = numbers(row, view)
        length = len(expected["text"])
        assert torch.equal(features.tokens["image"][i], expected["image"].to(dtype))
        assert torch.equal(features.tokens["text"][i, :length], expected["text"].to(dtype))
        assert not features.tokens["text"][i, length:].any()
        assert features.mask["text"][i].tolist() == [j < length for j in range(features.mask["text"].shape[1])]
        assert features.mask["image"][i].all()
        assert torch.equal(features.pooled[i], expected["pooled"].to(dtype))
        for name in ("state", "actions", "is_pad"):  # only features are made compact
            assert torch.equal(batch[name][i], expected[name])
            assert batch[name].dtype == expected[name].dtype


def read(entry, rows: list[int], view: int = 0) -> TensorDict:
    batch = entry.read(torch.tensor(rows), view)
    check(batch, rows, view)
    return batch


def shard_bytes(rows: list[int]) -> int:
    """Bytes of a shard, added up by hand."""
    longest = max(1 + row % 7 for row in rows)
    per_row = 2 * DIM * (2 + longest + 1) + (2 + longest) + 4 * 5 + 4 * 12 + 6
    return per_row * len(rows)


@pytest.fixture(params=["memory", "disk"])
def folder(request, tmp_path):
    return tmp_path / "store" if request.param == "disk" else None


# ---- served values ---------------------------------------------------------------------------------------------------


def test_reads_in_any_order_and_computes_a_shard_once(folder):
    compute = Compute()
    store = FeatureStore(folder, PLENTY)
    entry = store.entry(KEY, FRAMES, compute)
    read(entry, [9, 1, 9, 17, 0])
    assert compute.calls == [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17]]
    read(entry, [3, 2, 11, 17, 17])
    assert len(compute.calls) == 3
    read(entry, list(range(FRAMES - 1, -1, -1)))
    assert sorted(compute.rows) == list(range(FRAMES))
    assert (entry.computed_rows, entry.served_rows) == (store.computed_rows, store.served_rows) == (FRAMES, FRAMES + 10)
    expected = sum(shard_bytes(list(range(i, min(i + 4, FRAMES)))) for i in range(0, FRAMES, 4))
    assert entry.bytes == store.bytes == expected


def test_views_are_kept_apart(folder):
    compute = Compute()
    entry = FeatureStore(folder, PLENTY).entry(KEY, FRAMES, compute)
    one, two = read(entry, [5, 6], view=0), read(entry, [5, 6], view=3)
    assert not torch.equal(one["features"].pooled, two["features"].pooled)
    assert compute.calls == [[4, 5, 6, 7], [4, 5, 6, 7]]


def test_text_is_padded_to_the_longest_shard_like_concatenate_features(folder):
    compute = Compute()
    entry = FeatureStore(folder, PLENTY).entry(replace(KEY, shard_rows=2), FRAMES, compute)
    batch = read(entry, [0, 1, 12, 13, 7])  # shards with texts of at most 2, 7 and 7 tokens... and row 7 has one
    parts = [compute.batch(torch.tensor(rows), 0)["features"] for rows in ([0, 1], [12, 13], [6, 7])]
    expected = concatenate_features(parts)[torch.tensor([0, 1, 2, 3, 5])].apply(
        lambda v: v.half() if v.is_floating_point() else v
    )
    for name in ("image", "text"):
        torch.testing.assert_close(batch["features"].tokens[name], expected.tokens[name], rtol=0, atol=0)
        assert torch.equal(batch["features"].mask[name], expected.mask[name])
    assert read(entry, [0, 1])["features"].tokens["text"].shape[1] == 2  # the long texts of others cost nothing


def test_what_is_read_may_be_changed(folder):
    entry = FeatureStore(folder, PLENTY).entry(KEY, FRAMES, Compute())
    batch = read(entry, [0, 1, 2, 3])
    for value in batch.values(include_nested=True, leaves_only=True):
        value.zero_()
    batch["features"].pooled.zero_()
    batch["features"].tokens["image"].zero_()
    read(entry, [0, 1, 2, 3])


def test_memory_does_not_share_with_what_compute_gave():
    compute, given = Compute(), []

    def keep(rows, view):
        given.append(compute(rows, view))
        return given[-1]

    entry = FeatureStore(None, PLENTY).entry(replace(KEY, dtype="float32"), FRAMES, keep)
    entry.read(torch.tensor([0]))
    given[0]["state"].zero_()
    given[0]["features"].pooled.zero_()
    check(entry.read(torch.tensor([0])), [0], dtype=torch.float32)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_file_holds_what_was_computed_bit_for_bit(tmp_path, dtype):
    compute = Compute()
    key = replace(KEY, dtype=dtype)
    FeatureStore(tmp_path, PLENTY).entry(key, FRAMES, compute).warm_up()
    stored = TensorDict.load_memmap(tmp_path / key.digest / "view0-shard00000002")
    expected = compute.batch(torch.arange(8, 12), 0)
    for name, value in {
        "image": expected["features"].tokens["image"],
        "text": expected["features"].tokens["text"],
    }.items():
        kept = stored["features", "tokens", name]
        assert kept.dtype == DTYPES[dtype]
        assert torch.equal(kept.view(torch.uint8), value.to(DTYPES[dtype]).view(torch.uint8))
    assert torch.equal(stored["actions"], expected["actions"]) and stored["actions"].dtype == torch.float32
    check(FeatureStore(tmp_path, PLENTY).entry(key, FRAMES, refuse).read(torch.tensor([9])), [9], dtype=DTYPES[dtype])


def test_features_without_tokens(folder):
    def pooled(rows, view):
        none = TensorDict({}, [len(rows)])
        value = rows.float().unsqueeze(1).to(torch.bfloat16)  # not float32: stored as it is
        features = VLAFeature(tokens=none, mask=none.clone(), pooled=value, batch_size=[len(rows)])
        return TensorDict({"features": features, "state": torch.zeros(len(rows), 0)}, [len(rows)])

    store = FeatureStore(folder, PLENTY)
    batch = store.entry(replace(KEY, kind="pooled"), FRAMES, pooled).read(torch.tensor([5, 17, 2]))
    assert batch["features"].pooled.dtype == torch.bfloat16
    assert batch["features"].pooled.flatten().tolist() == [5, 17, 2]
    assert not batch["features"].tokens.keys() and batch["state"].shape == (3, 0)
    assert batch["features"].for_head().pooled.dtype == torch.float32


def test_warm_up(folder):
    compute, seen = Compute(), []
    entry = FeatureStore(folder, PLENTY).entry(KEY, FRAMES, compute)
    read(entry, [5])
    assert not entry.warm_up(stopping=lambda: len(seen) == 2, progress=seen.append)
    assert seen == [4, 4] and compute.rows == [4, 5, 6, 7, 0, 1, 2, 3]
    assert entry.warm_up(range(2), progress=seen.append)
    assert sum(seen[2:]) == 2 * FRAMES and sorted(compute.rows) == sorted([*range(FRAMES)] * 2)
    entry.compute = refuse
    read(entry, list(range(FRAMES)), view=1)


@pytest.mark.parametrize(
    ("rows", "view", "message"),
    [
        (torch.tensor([0, FRAMES]), 0, "frames 0 to 17"),
        (torch.tensor([-1]), 0, "rows -1"),
        (torch.tensor([0.0]), 0, "expected int64"),
        (torch.tensor([], dtype=torch.int64), 0, "n >= 1"),
        (torch.tensor([0]), -1, "view=-1"),
    ],
)
def test_bad_rows_are_refused(rows, view, message):
    with pytest.raises(ValueError, match=message):
        FeatureStore(None, PLENTY).entry(KEY, FRAMES, refuse).read(rows, view)


def test_bad_results_of_compute_are_refused(folder):
    store = FeatureStore(folder, PLENTY)
    with pytest.raises(ValueError, match=r"pooled: .* does not fit dtype='float16'.*bfloat16"):
        store.entry(KEY, FRAMES, Compute(scale=1e6)).read(torch.tensor([0]))
    with pytest.raises(ValueError, match="features=VLAFeature"):
        store.entry(KEY, FRAMES, lambda rows, view: TensorDict({"features": rows}, [len(rows)])).read(torch.tensor([0]))
    with pytest.raises(ValueError, match="for 4 rows"):
        store.entry(KEY, FRAMES, lambda rows, view: Compute()(rows[:1], view)).read(torch.tensor([0]))

    def text(rows, view):
        batch = Compute()(rows, view)
        batch["task"] = "push"
        return batch

    with pytest.raises(ValueError, match=r"task .*only tensors"):
        store.entry(KEY, FRAMES, text).read(torch.tensor([0]))

    def uneven(rows, view):
        batch = Compute()(rows, view)
        batch["state"] = batch["state"][:, : 1 if rows[0] else 5]  # would broadcast
        return batch

    with pytest.raises(ValueError, match=r"state: .*compute must agree"):
        store.entry(KEY, FRAMES, uneven).read(torch.tensor([0, 5]))


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_restart_serves_without_compute(tmp_path):
    FeatureStore(tmp_path, PLENTY).entry(KEY, FRAMES, Compute()).warm_up()
    store = FeatureStore(tmp_path, PLENTY)
    entry = store.entry(KEY, FRAMES, refuse)
    assert entry.bytes == store.bytes == sum(f.stat().st_size for f in tmp_path.rglob("*.memmap")) > 0
    read(entry, list(range(FRAMES)))
    assert store.bytes == sum(f.stat().st_size for f in tmp_path.rglob("*.memmap"))


@pytest.mark.parametrize("field", [f.name for f in fields(StoreKey)])
def test_another_key_is_served_nothing_old(folder, field):
    store = FeatureStore(folder, PLENTY)
    store.entry(KEY, FRAMES, Compute()).warm_up()
    old = getattr(KEY, field)
    value = "bfloat16" if field == "dtype" else f"{old}x" if isinstance(old, str) else old + 1
    key = replace(KEY, **{field: value})
    assert key.digest != KEY.digest
    if folder is not None:
        store = FeatureStore(folder, PLENTY)
    compute = Compute()
    entry = store.entry(key, FRAMES, compute)
    assert entry.bytes == 0
    check(entry.read(torch.tensor([3])), [3], dtype=DTYPES[key.dtype])
    assert compute.calls == [list(range(key.shard_rows))]


def test_what_the_backbone_is_and_sees_is_in_the_key():
    schema = TenantSchema(state_dim=4, action_dim=7, chunk=3, execute=3, cameras=("primary", "wrist"), image_size=32)

    def key(backbone, schema, kind="tokens"):
        return StoreKey(backbone.fingerprint, *sharing_key(schema, kind), kind, "me/cubes", "r1").digest

    backbone = FakeBackbone()
    same = key(FakeBackbone(), replace(schema, action_dim=8, chunk=5, control_hz=5.0))
    assert same == key(backbone, schema)
    others = [
        key(FakeBackbone(seed=1), schema),
        key(FakeBackbone().half(), schema),
        key(backbone, replace(schema, prompt="do {instruction} now")),
        key(backbone, replace(schema, image_size=64)),
        key(backbone, replace(schema, cameras=("wrist", "primary"))),
        key(backbone, replace(schema, image_orientation="rotated_180")),
        key(backbone, schema, "pooled"),
        key(backbone, schema, "action_tokens"),
        key(backbone, replace(schema, chunk=5), "action_tokens"),
    ]
    assert len({same, *others}) == len(others) + 1


def test_folder_of_another_key_is_refused(tmp_path):
    FeatureStore(tmp_path, PLENTY).entry(KEY, FRAMES, Compute()).warm_up()
    path = tmp_path / KEY.digest / "key.json"
    stored = json.loads(path.read_text())
    assert stored["fingerprint"] == "fp" and stored["num_frames"] == FRAMES
    with pytest.raises(ValueError, match="num_frames is 18, not 17"):
        FeatureStore(tmp_path, PLENTY).entry(KEY, FRAMES - 1, refuse)
    path.write_text(json.dumps({**stored, "revision": "r0"}))
    with pytest.raises(ValueError, match="revision is 'r0', not 'r1'"):
        FeatureStore(tmp_path, PLENTY).entry(KEY, FRAMES, refuse)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"key\.json cannot be read"):
        FeatureStore(tmp_path, PLENTY).entry(KEY, FRAMES, refuse)
    memory = FeatureStore(None, PLENTY)
    memory.entry(KEY, FRAMES, refuse)
    with pytest.raises(ValueError, match="num_frames is 18, not 17"):
        memory.entry(KEY, FRAMES - 1, refuse)


def test_bad_keys_and_sizes_are_refused():
    for change in ({"dtype": "int8"}, {"shard_rows": 0}, {"fingerprint": ""}, {"revision": ""}):
        with pytest.raises(ValueError, match=f"StoreKey.{next(iter(change))}"):
            replace(KEY, **change)
    with pytest.raises(ValueError, match="budget_bytes=-1"):
        FeatureStore(None, -1)
    with pytest.raises(ValueError, match="num_frames=0"):
        FeatureStore(None, 0).entry(KEY, 0, refuse)


def test_readers_of_one_key_share_one_copy(folder):
    store = FeatureStore(folder, PLENTY)
    first, second = Compute(), Compute()
    a, b = store.entry(KEY, FRAMES, first), store.entry(KEY, FRAMES, second)
    read(a, [0, 1])
    used = store.bytes
    read(b, [1, 0])
    assert not second.calls and store.bytes == used == a.bytes == b.bytes
    read(b, [4])
    read(a, [5])
    assert (first.rows, second.rows) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert (a.computed_rows, b.computed_rows, a.served_rows, b.served_rows) == (4, 4, 3, 3)


def test_lerobot_dataset_revision(tmp_path):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    def record(root: Path, value: float) -> None:
        shutil.rmtree(root, ignore_errors=True)
        names = {"dtype": "float32", "shape": (2,), "names": ["x", "y"]}
        dataset = LeRobotDataset.create(
            "me/cubes", fps=10, root=root, features={"observation.state": names, "action": names}, use_videos=False
        )
        for _ in range(2):
            for step in range(3):
                frame = torch.tensor([value, step], dtype=torch.float32).numpy()
                dataset.add_frame({"observation.state": frame, "action": frame, "task": "push"})
            dataset.save_episode()
        dataset.finalize()

    root = tmp_path / "cubes"
    record(root, 1.0)
    dataset = LeRobotDataset("me/cubes", root=root)
    first = dataset_revision(dataset)
    assert first == dataset_revision(dataset) and len(first) == 64

    def changed(**attributes) -> str:
        names = ("root", "repo_id", "revision", "episodes")
        return dataset_revision(SimpleNamespace(**{n: getattr(dataset, n) for n in names} | attributes))

    shutil.copytree(root, tmp_path / "moved")  # keeps modification times
    assert changed(root=tmp_path / "moved") == first
    seen = [first, changed(episodes=[0]), changed(repo_id="me/spheres"), changed(revision="0" * 40)]
    for path in (next((root / "data").rglob("*.parquet")), next((root / "meta" / "episodes").rglob("*.parquet"))):
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        seen.append(dataset_revision(dataset))
    for path in (root / "meta" / "info.json", root / "meta" / "stats.json", root / "meta" / "tasks.parquet"):
        path.write_bytes(path.read_bytes() + b"\n")
        seen.append(dataset_revision(dataset))
    record(root, 2.0)
    seen.append(dataset_revision(dataset))
    assert len(set(seen)) == 10


# ---- budget and disk full --------------------------------------------------------------------------------------------

EVEN = replace(KEY, shard_rows=7)  # every shard of 7 rows holds one text of 7 tokens: all are of equal size
SHARD = shard_bytes(list(range(7)))


def test_budget_reached_computes_only_what_is_asked_and_warns_once(folder, caplog):
    compute = Compute()
    store = FeatureStore(folder, 2 * SHARD)
    entry = store.entry(EVEN, 28, compute)
    with caplog.at_level(logging.WARNING):
        read(entry, [0, 7])
        assert not caplog.records
        for _ in range(3):
            read(entry, [20, 1, 14, 27, 20, 8])
        assert entry.warm_up()
    assert compute.calls == [list(range(7)), list(range(7, 14))] + [[14, 20, 27]] * 3
    assert store.bytes == 2 * SHARD and store.evicted_shards == 0
    assert len(caplog.records) == 1 and "budget" in caplog.text and "me/cubes" in caplog.text


def test_shard_larger_than_the_budget(folder, caplog):
    store = FeatureStore(folder, SHARD - 1)
    entry = store.entry(EVEN, 28, Compute())
    for _ in range(2):
        read(entry, [0, 8, 27])
    assert store.bytes == 0 and len(caplog.records) == 1
    read(FeatureStore(folder, SHARD).entry(EVEN, 28, Compute()), [0])


def test_eviction_takes_the_least_recently_used_shards_of_others(folder):
    first, second = Compute(), Compute()
    store = FeatureStore(folder, 4 * SHARD)
    a = store.entry(EVEN, 28, first)
    for row in (0, 7, 14, 21, 1):  # shards 0, 1, 2, 3, 0: least recently used are 1, 2, 3, 0
        read(a, [row])
    b = store.entry(replace(EVEN, kind="pooled"), 28, second)
    read(a, [14])  # used since b came: 2 stays from now on
    read(b, [0])
    read(b, [7])
    assert store.evicted_shards == a.evicted_shards == 2 and b.evicted_shards == 0
    assert (a.bytes, b.bytes, store.bytes) == (2 * SHARD, 2 * SHARD, 4 * SHARD)
    a.compute = refuse
    read(a, [0, 14])
    for row in (7, 21):  # 1 and 3 went; their room now belongs to b, whose shards were used since a came
        with pytest.raises(AssertionError, match="computed again"):
            read(a, [row])
    if folder is not None:
        assert sorted(p.name for p in (folder / EVEN.digest).iterdir()) == [
            "key.json",
            "view0-shard00000000",
            "view0-shard00000002",
        ]
        assert not list(folder.glob(".tmp-*"))
        assert sum(f.stat().st_size for f in folder.rglob("*.memmap")) == 4 * SHARD


def test_entries_in_use_do_not_evict_each_other_and_idle_ones_give_way(folder):
    """Two tenants in turn through datasets that do not fit together, then only the second."""
    first, second = Compute(), Compute()
    store = FeatureStore(folder, 4 * SHARD)
    a, b = store.entry(EVEN, 28, first), store.entry(replace(EVEN, kind="pooled"), 28, second)
    for _ in range(4):
        for row in range(0, 28, 4):
            read(a, [row, row + 1, row + 2, row + 3])
            read(b, [row, row + 1, row + 2, row + 3])
    evicted = store.evicted_shards
    assert evicted <= 4 and store.bytes == 4 * SHARD
    for _ in range(3):
        for row in range(0, 28, 4):
            read(b, [row, row + 1, row + 2, row + 3])
    assert b.bytes == 4 * SHARD and a.bytes == 0  # a's share went to b after one to two passes
    b.compute = refuse
    read(b, list(range(28)))


def test_smaller_budget_at_restart_removes_the_oldest_use_first(tmp_path):
    FeatureStore(tmp_path, PLENTY).entry(EVEN, 28, Compute()).warm_up()
    folder = tmp_path / EVEN.digest
    for shard, age in ((0, 100), (1, 400), (2, 200), (3, 300)):
        path = folder / f"view0-shard{shard:08d}"
        stamp = path.stat().st_mtime - age
        os.utime(path, (stamp, stamp))
    store = FeatureStore(tmp_path, 3 * SHARD)
    read(store.entry(EVEN, 28, refuse), [21])  # now the last used one, also for the next process
    assert store.evicted_shards == 1
    store = FeatureStore(tmp_path, 2 * SHARD)
    assert sorted(p.name[-1] for p in folder.glob("view*")) == ["0", "3"]
    assert store.bytes == 2 * SHARD and not list(tmp_path.glob(".tmp-*"))


def test_mapped_shard_survives_removal_by_another_process(tmp_path):
    entry = FeatureStore(tmp_path, PLENTY).entry(EVEN, 28, Compute())
    entry.warm_up()
    FeatureStore(tmp_path, 0)  # removes all
    assert not list(tmp_path.rglob("*.memmap"))
    entry.compute = refuse
    read(entry, list(range(28)))
    again = FeatureStore(tmp_path, PLENTY)
    compute = Compute()
    read(again.entry(EVEN, 28, compute), [0])
    assert compute.rows == list(range(7))


def test_few_shards_are_mapped_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "OPEN_SHARDS", 2)
    store = FeatureStore(tmp_path, PLENTY)
    entry = store.entry(EVEN, 28, Compute())
    entry.warm_up()
    entry.compute = refuse
    read(entry, list(range(28)))
    assert len(store._mapped) == sum(shard.leaves is not None for shard in store._shards.values()) == 2
    shutil.rmtree(tmp_path / EVEN.digest / "view0-shard00000000")  # by hand, while it is not mapped
    entry.compute = compute = Compute()
    read(entry, list(range(28)))
    assert compute.rows == list(range(7)) and store.bytes == entry.bytes == 4 * SHARD


@pytest.mark.parametrize("step", ["data", "fsync"])
def test_disk_full(tmp_path, monkeypatch, caplog, step):
    compute = Compute()
    store = FeatureStore(tmp_path, PLENTY)
    entry = store.entry(EVEN, 28, compute)
    read(entry, [0])
    left = [2]
    owner, name = {"data": (store_module, "_write_file"), "fsync": (os, "fsync")}[step]
    original = getattr(owner, name)

    def full(file, *args):
        path = Path(os.readlink(f"/proc/self/fd/{file}")) if step == "fsync" else file
        if path.suffix == ".memmap":
            left[0] -= 1
            if left[0] <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(file, *args)

    monkeypatch.setattr(owner, name, full)
    for _ in range(3):
        read(entry, [1, 8, 15])
    other = store.entry(replace(EVEN, kind="pooled"), 28, compute)
    read(other, [3])
    read(other, [3])
    assert compute.calls == [list(range(7)), list(range(7, 14)), [15], [8, 15], [8, 15], list(range(7)), [3]]
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING"] and "No space left" in caplog.text
    assert store.bytes == SHARD and not list(tmp_path.glob(".tmp-*"))
    monkeypatch.undo()
    read(FeatureStore(tmp_path, PLENTY).entry(EVEN, 28, Compute()), list(range(28)))


def test_disk_full_when_the_entry_is_made(tmp_path, monkeypatch, caplog):
    def full(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store_module, "_write_file", full)
    store = FeatureStore(tmp_path, PLENTY)
    entry = store.entry(EVEN, 28, Compute())
    read(entry, [1, 8, 15])
    read(entry, [1])
    assert len(caplog.records) == 1 and not list(tmp_path.iterdir())


def test_other_write_errors_are_raised(tmp_path, monkeypatch):
    entry = FeatureStore(tmp_path, PLENTY).entry(EVEN, 28, Compute())

    def broken(path, data):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(store_module, "_write_file", broken)
    with pytest.raises(OSError, match="Input/output"):
        read(entry, [1])
    monkeypatch.undo()
    read(entry, [1])
    assert not list(tmp_path.glob(".tmp-*"))


# ---- crashes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["half a file", "fsync", "rename"])
def test_kill_in_the_middle_of_a_write(tmp_path, moment):
    def child() -> None:
        entry = FeatureStore(tmp_path, PLENTY).entry(EVEN, 28, Compute())
        entry.read(torch.tensor([0]))

        def die(*args) -> None:
            if moment == "half a file":
                path, data = args
                path.write_bytes(bytes(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        if moment == "half a file":
            store_module._write_file = die
        else:
            setattr(os, moment, die)
        entry.read(torch.tensor([7]))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".tmp-*"))) == 1
    store = FeatureStore(tmp_path, PLENTY)
    assert not list(tmp_path.glob(".tmp-*"))
    compute = Compute()
    read(store.entry(EVEN, 28, compute), list(range(14)))
    assert compute.rows == list(range(7, 14))


def test_temporary_folders_of_the_living_stay(tmp_path, monkeypatch):
    gone = multiprocessing.get_context("fork").Process(target=int)
    gone.start()
    gone.join(60)
    host = store_module.socket.gethostname()
    names = {
        "dead": f".tmp-{host}-{gone.pid}-{'0' * 32}",
        "alive": f".tmp-{host}-{os.getpid()}-{'1' * 32}",
        "reused": f".tmp-{host}-{os.getpid()}-{'2' * 32}",  # older than the process with that number
        "elsewhere": f".tmp-a-b-1-{'3' * 32}",
        "elsewhere, old": f".tmp-a-b-1-{'4' * 32}",
        "not ours": ".tmp-notes",
    }
    for name in names.values():
        (tmp_path / name).mkdir()
    for name in ("reused", "elsewhere, old"):
        os.utime(tmp_path / names[name], (0, 0))
    FeatureStore(tmp_path, PLENTY)
    assert {p.name for p in tmp_path.iterdir()} == {names[n] for n in ("alive", "elsewhere", "not ours")}


@pytest.mark.parametrize("damage", ["truncated", "missing", "no list", "no metadata"])
def test_damaged_shard_is_computed_again(tmp_path, caplog, damage):
    FeatureStore(tmp_path, PLENTY).entry(EVEN, 28, Compute()).warm_up()
    shard = tmp_path / EVEN.digest / "view0-shard00000001"
    file = next(shard.rglob("text.memmap"))
    if damage == "truncated":
        os.truncate(file, 10)
    else:
        {"missing": file, "no list": shard / "files.json", "no metadata": shard / "meta.json"}[damage].unlink()
    compute = Compute()
    store = FeatureStore(tmp_path, PLENTY)
    read(store.entry(EVEN, 28, compute), list(range(28)))
    assert compute.rows == list(range(7, 14)) and store.bytes == 4 * SHARD
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "damaged" in caplog.text
    read(FeatureStore(tmp_path, PLENTY).entry(EVEN, 28, refuse), list(range(28)))


# ---- several threads and processes -----------------------------------------------------------------------------------


def test_threads_wait_for_the_shard_that_another_computes(folder):
    compute, running, go = Compute(), threading.Event(), threading.Event()

    def slow(rows, view):
        if rows[0] == 0:
            running.set()
            assert go.wait(30)
        return compute(rows, view)

    entry = FeatureStore(folder, PLENTY).entry(EVEN, 28, slow)
    errors: list[BaseException] = []

    def reads(row):
        try:
            read(entry, [row])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=reads, args=(row,)) for row in (0, 1, 2)]
    for thread in threads:
        thread.start()
    assert running.wait(30)
    reads(8)  # another shard goes on
    assert compute.calls == [list(range(7, 14))] and all(thread.is_alive() for thread in threads)
    go.set()
    for thread in threads:
        thread.join(30)
    assert not errors and compute.calls == [list(range(7, 14)), list(range(7))]


def test_failed_compute_leaves_the_shard_to_the_next(folder):
    entry = FeatureStore(folder, PLENTY).entry(EVEN, 28, refuse)
    with pytest.raises(AssertionError):
        read(entry, [0])
    entry.compute = Compute()
    read(entry, [0])


def test_threads_under_a_tight_budget(folder):
    """Reads, evictions and unkept shards at once: values stay right and the books balance."""
    store = FeatureStore(folder, 5 * SHARD)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            generator = torch.Generator().manual_seed(number)
            entry = store.entry(replace(EVEN, kind=f"kind{number % 3}"), 28, Compute())
            for _ in range(15):
                read(entry, torch.randint(28, (6,), generator=generator).tolist())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert store.bytes == len(store._shards) * SHARD <= 5 * SHARD
    assert sum(shared.bytes for shared in store._entries.values()) == store.bytes
    if folder is not None:
        assert sum(f.stat().st_size for f in folder.rglob("*.memmap")) == store.bytes
        assert not list(folder.glob(".tmp-*"))


def test_two_processes_compute_the_same_shards(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    counts = context.Queue()

    def child() -> None:
        compute = Compute()

        def together(rows, view):
            if rows[0] == 0:
                barrier.wait(60)  # both have found shard 0 absent
            return compute(rows, view)

        entry = FeatureStore(tmp_path, PLENTY).entry(EVEN, 28, together)
        read(entry, list(range(28)))
        entry.compute = refuse
        read(entry, list(range(28)))
        counts.put(compute.rows[:7] == list(range(7)))

    processes = [context.Process(target=child) for _ in range(2)]
    for process in processes:
        process.start()
    assert counts.get(timeout=60) and counts.get(timeout=60)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert not list(tmp_path.glob(".tmp-*"))
    store = FeatureStore(tmp_path, PLENTY)
    read(store.entry(EVEN, 28, refuse), list(range(28)))
    assert store.bytes == 4 * SHARD


def test_shard_of_another_process_is_used(tmp_path):
    store = FeatureStore(tmp_path, PLENTY)
    entry = store.entry(EVEN, 28, refuse)
    FeatureStore(tmp_path, PLENTY).entry(EVEN, 28, Compute()).warm_up()  # after the first has looked
    read(entry, [0, 27])
    assert store.bytes == 2 * SHARD
