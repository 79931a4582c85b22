"""The batch that reaches the head, for datasets of every kind, against values computed from the raw frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeBackbone
from lerobot_data import Data, Frame, write

from models.heads.mlp import ChunkMLPHead
from nexus_lightning.config import DatasetConfig, RenameConfig
from nexus_lightning.conventions import DatasetConventions
from nexus_lightning.converter import DatasetConverter
from nexus_lightning.dataset import dataset_problems
from nexus_lightning.images import fit_images
from nexus_lightning.objectives.awr import AWR
from nexus_lightning.objectives.sft import SFT
from nexus_lightning.producers.demonstrations import (
    DemonstrationReader,
    DemonstrationStream,
    dataset_stats,
    open_dataset,
)
from nexus_lightning.schema import Normalizer, TenantSchema

FRONT = {"front": "observation.images.front"}


@dataclass
class Case:
    """A dataset, the tenant that reads it, and how the raw frames become what the head is to get."""

    data: Data = field(default_factory=Data)
    config: dict[str, Any] = field(default_factory=dict)
    schema: dict[str, Any] = field(default_factory=dict)
    cameras: dict[str, str] = field(default_factory=lambda: FRONT)
    state: Sequence[str] = ("observation.state",)
    action: str = "action"
    episodes: Sequence[int] | None = None
    instruction: Callable[[int, int, Frame], str] = lambda episode, step, frame: frame["task"]
    internal: Callable[[np.ndarray], np.ndarray] = lambda action: action
    reward: str | None = None
    folder: str = "data"
    remake: Callable[[Path, list[list[Frame]]], tuple[Path, list[list[Frame]]]] | None = None


def vectors(state=((4,), "float32"), action=((2,), "float32"), **others) -> dict[str, Any]:
    return {"observation.state": state, "action": action, **others}


def openpi(**changes) -> Case:
    """Keys of openpi's converters."""
    data = Data({"image": (24, 32)}, {"state": ((4,), "float32"), "actions": ((2,), "float32")}, **changes)
    rename = RenameConfig(state="state", action="actions", cameras={"front": "image"})
    return Case(data, {"rename": rename}, cameras={"front": "image"}, state=["state"], action="actions")


def two(left: tuple[int, int], right: tuple[int, int], **changes) -> Case:
    keys = {"left": "observation.images.left", "right": "observation.images.right"}
    return Case(Data({keys["left"]: left, keys["right"]: right}, **changes), cameras=keys)


def deleted(root: Path, frames: list[list[Frame]]) -> tuple[Path, list[list[Frame]]]:
    from lerobot.datasets.dataset_tools import delete_episodes
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    out = root.with_name("deleted")
    delete_episodes(LeRobotDataset("local/made", root=root), [1], output_dir=out, repo_id="local/made")
    return out, [frames[0], *frames[2:]]


def merged(root: Path, frames: list[list[Frame]]) -> tuple[Path, list[list[Frame]]]:
    from lerobot.datasets.dataset_tools import merge_datasets
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    more = write(root.with_name("more"), Data(lengths=(2, 3), tasks=("push it",)), seed=1)
    parts = [LeRobotDataset("local/made", root=folder) for folder in (root, root.with_name("more"))]
    merge_datasets(parts, "local/made", output_dir=root.with_name("merged"))
    return root.with_name("merged"), [*frames, *more]


SIZES = [(16, 16), (24, 32), (32, 24), (17, 33), (9, 64), (96, 40), (48, 48)]
CASES: dict[str, Case] = {
    **{f"{h}x{w} {fit}": Case(Data({FRONT["front"]: (h, w)}), schema={"image_fit": fit})
       for (h, w) in SIZES for fit in ("pad", "crop", "stretch") if (h, w) != (16, 16) or fit == "pad"},
    "two cameras of different sizes": two((24, 32), (18, 32)),
    "two cameras, one of the right size": two((16, 16), (20, 32)),
    "float images": Case(Data(float_images=True)),
    "channels first": Case(Data(channels_first=True)),
    "rotated": Case(config={"conventions": DatasetConventions(image_orientation="rotated_180")}),
    "no camera": Case(Data({}), cameras={}),
    "cameras that nobody reads": Case(Data({"observation.images.front": (24, 32), "observation.images.x": (8, 9)})),
    "video": Case(Data({FRONT["front"]: (48, 64)}, video=True)),
    "video, two sizes": two((48, 64), (64, 64), video=True),
    "openpi": openpi(),
    "openpi, video": openpi(video=True),
    "pusht": Case(
        Data({"observation.image": (24, 24)}), {"rename": RenameConfig(cameras={"front": "observation.image"})},
        cameras={"front": "observation.image"},
    ),
    "no state": Case(Data(vectors={"action": ((2,), "float32")}), schema={"state_dim": 0}, state=[]),
    "a state that is not read": Case(schema={"state_dim": 0}, state=[]),
    "state of length 1": Case(Data(vectors=vectors(((1,), "float32"))), schema={"state_dim": 1}),
    "action of length 1": Case(Data(vectors=vectors(action=((1,), "float32"))), schema={"action_dim": 1}),
    "joined states": Case(
        Data(vectors=vectors(((3,), "float32"), gripper=((1,), "float32"), vel=((2,), "float64"))),
        {"rename": RenameConfig(state=["vel", "gripper", "observation.state"])}, {"state_dim": 6},
        state=["vel", "gripper", "observation.state"],
    ),
    "float64": Case(Data(vectors=vectors(((4,), "float64"), ((2,), "float64")))),
    "integers": Case(Data(vectors=vectors(((4,), "int64"), ((2,), "int32")))),
    "bool beside numbers": Case(
        Data(columns={"grasped": ("bool", lambda e, t: t % 2 == 0)}),
        {"rename": RenameConfig(state=["observation.state", "grasped"])}, {"state_dim": 5},
        state=["observation.state", "grasped"],
    ),
    "fps 30": Case(Data(fps=30), schema={"control_hz": 30.0}),
    "fps 50": Case(Data(fps=50, video=True), schema={"control_hz": 50.0}),
    "fps 29.97": Case(Data(fps=29.97), schema={"control_hz": 29.97}),
    "episodes of one frame": Case(Data(lengths=(1, 4, 1))),
    "one frame": Case(Data(lengths=(1,))),
    "one frame, video": Case(Data(lengths=(1,), video=True)),
    "the first two": Case(config={"episodes": 2}, episodes=[0, 1]),
    "a list": Case(config={"episodes": [2, 0]}, episodes=[0, 2]),
    "ranges": Case(Data(lengths=(2,) * 8), {"episodes": ["1-3", 6]}, episodes=[1, 2, 3, 6]),
    "excluded": Case(Data(lengths=(2,) * 5), {"exclude": [0, "3-4"]}, episodes=[1, 2]),
    "ranges of a video": Case(
        Data(lengths=(3,) * 5, video=True), {"episodes": ["1-4"], "exclude": [2]}, episodes=[1, 3, 4]
    ),
    "statistics of the frames": Case(config={"statistics": "frames"}),
    "several tasks": Case(Data(tasks=("push", "pull", "reach"))),
    "unicode": Case(Data(tasks=("ラーメンを押して 🤖", "schieb die Schüssel"))),
    "spaces and unicode in the path": Case(folder="my data/größe/データ"),
    "texts in a column": Case(
        Data(columns={"language_instruction": ("string", lambda e, t: f"step {e}.{t}")}),
        {"rename": RenameConfig(instruction="language_instruction")},
        instruction=lambda e, t, frame: f"step {e}.{t}",
    ),
    "numbers of tasks in a column": Case(
        Data(columns={"annotation.task": ("int64", lambda e, t: (e + 1) % 2)}, tasks=("push", "pull")),
        {"rename": RenameConfig(instruction="annotation.task")},
        instruction=lambda e, t, frame: ("push", "pull")[(e + 1) % 2],
    ),
    "gripper": Case(
        config={"conventions": DatasetConventions(gripper="close_one")}, schema={"gripper": "open_positive"},
        internal=lambda a: np.stack([a[..., 0], 1 - 2 * a[..., 1]], -1),
    ),
    "next.reward": Case(Data(columns={"next.reward": ("float32", lambda e, t: t)}), reward="next.reward"),
    "another reward": Case(
        Data(columns={"score": ("float32", lambda e, t: 2 * t)}), {"rename": RenameConfig(reward="score")},
        reward="score",
    ),
    "deleted episodes": Case(remake=deleted),
    "merged": Case(remake=merged),
    "deleted episodes of a video": Case(Data(video=True), remake=deleted),
    "several files": Case(Data({FRONT["front"]: (96, 96)}, lengths=(24, 24, 24), create={"data_files_size_in_mb": 1})),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_head_gets_what_the_raw_frames_say(tmp_path, name):
    case = CASES[name]
    root = tmp_path / case.folder / "x"
    root.parent.mkdir(parents=True)
    raw = write(root, case.data)
    if case.remake is not None:
        root, raw = case.remake(root, raw)
    base = {"state_dim": 4, "action_dim": 2, "chunk": 3, "execute": 2, "image_size": 16, "control_hz": 10.0}
    layout = {"gripper": "none", "rotation": "none", "cameras": tuple(case.cameras)}
    schema = TenantSchema(**{**base, **layout, **case.schema})
    config = DatasetConfig(repo_id="local/made", **case.config)
    converter = DatasetConverter(schema, config.conventions)
    assert schema.problems() == [] and converter.problems() == []
    assert dataset_problems("tenants.a", config, converter, root, complete=True) == []

    dataset, backbone = open_dataset(config, schema, root), FakeBackbone()
    algorithm = AWR.configure(gamma=0.5) if case.reward is not None else None
    spec = backbone.feature_spec(schema)
    reader = DemonstrationReader(dataset, config, schema, backbone, spec, None, algorithm=algorithm)
    chosen = [(e, raw[e]) for e in (range(len(raw)) if case.episodes is None else case.episodes)]
    frames = [(e, t, frame, episode) for e, episode in chosen for t, frame in enumerate(episode)]
    assert len(reader) == len(frames)
    if name == "several files":
        assert len(list(root.glob("data/*/*.parquet"))) > 1
    rows = DemonstrationStream(reader, seed=0).order.rows(0, len(frames))
    batch = DemonstrationStream(reader, seed=0).read(0, len(frames))
    for place, row in enumerate(rows.tolist()):
        e, t, frame, episode = frames[row]
        steps = [min(t + k, len(episode) - 1) for k in range(3)]
        actions = np.stack([np.asarray(episode[k][case.action], np.float32).reshape(-1) for k in steps])
        np.testing.assert_allclose(batch["actions"][place], case.internal(actions), rtol=1e-6)
        assert batch["is_pad"][place].tolist() == [t + k >= len(episode) for k in range(3)]
        state = [np.asarray(frame[key], np.float32).reshape(-1) for key in case.state]
        np.testing.assert_array_equal(batch["observation", "state"][place], np.concatenate([np.zeros(0), *state]))
        assert batch["language_instruction"][place] == case.instruction(e, t, frame)
        for camera, key in case.cameras.items():
            seen = torch.from_numpy(np.ascontiguousarray(frame[key].transpose(2, 0, 1)))
            if converter.image_orientation == "rotated_180":
                seen = seen.flip(-1, -2)
            expected = fit_images(seen, 16, schema.image_fit)
            shown = batch["observation", "image", camera][place]
            if case.data.video:  # the codec loses some
                assert (shown.float() - expected.float()).abs().mean() < 8
            else:
                assert torch.equal(shown, expected)
        if case.reward is not None:
            paid = sum(0.5**k * float(episode[t + k][case.reward][0]) for k in range(len(episode) - t))
            assert batch["return_to_go"][place].item() == pytest.approx(paid)

    stats = dataset_stats(dataset, config, schema)
    for found, keys in zip(stats, (case.state, [case.action]), strict=True):
        columns = [[np.asarray(frame[key], np.float64).reshape(-1) for _, _, frame, _ in frames] for key in keys]
        values = np.concatenate([np.zeros((len(frames), 0)), *(np.stack(column) for column in columns)], 1)
        values = case.internal(values) if keys == [case.action] else values
        np.testing.assert_allclose(found.mean, values.mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.min, values.min(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.max, values.max(0), rtol=1e-5, atol=1e-6)
        if len(frames) > 1:
            np.testing.assert_allclose(found.std, values.std(0), rtol=1e-3, atol=1e-4)

    normalizer = Normalizer(schema, *stats)
    batch["state"] = batch["observation", "state"]
    texts = list(batch["language_instruction"])
    batch["features"] = backbone(batch["observation"], texts, schema).select(spec).for_head()
    head = ChunkMLPHead(spec, schema)
    loss = SFT(head, normalizer, SFT.configure(), 4).loss(batch, 0)["loss"]
    loss.backward()
    assert loss.isfinite() and all(p.grad is None or p.grad.isfinite().all() for p in head.parameters())
