"""Small LeRobotDatasets whose raw values the test keeps. Not used outside ``tests/``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Frame = dict[str, Any]


@dataclass
class Data:
    """What to write; ``lengths`` are those of the episodes.

    Attributes:
        cameras: key -> (height, width), of colour images.
        vectors: key -> (shape, dtype).
        columns: key -> (dtype, value of (episode, step)), beside them.
        change: edits a frame in place.
    """

    cameras: Mapping[str, tuple[int, int]] = field(default_factory=lambda: {"observation.images.front": (24, 32)})
    vectors: Mapping[str, tuple[tuple[int, ...], str]] = field(
        default_factory=lambda: {"observation.state": ((4,), "float32"), "action": ((2,), "float32")}
    )
    columns: Mapping[str, tuple[str, Callable[[int, int], Any]]] = field(default_factory=dict)
    lengths: Sequence[int] = (4, 5, 3)
    tasks: Sequence[str] = ("reach the target",)
    fps: float = 10
    video: bool = False
    float_images: bool = False
    channels_first: bool = False
    create: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[int, int, Frame], None] = lambda episode, step, frame: None


def write(root: Path, data: Data, seed: int = 0) -> list[list[Frame]]:
    """Writes the dataset ``local/made`` into ``root`` and returns its frames, images uint8 ``[H, W, 3]``."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features: dict[str, Any] = {}
    for key, size in data.cameras.items():
        shape, names = (*size, 3), ["height", "width", "channels"]
        if data.channels_first:
            shape, names = (3, *size), ["channels", "height", "width"]
        features[key] = {"dtype": "video" if data.video else "image", "shape": shape, "names": names}
    for key, (shape, dtype) in data.vectors.items():
        features[key] = {"dtype": dtype, "shape": shape, "names": None}
    for key, (dtype, _) in data.columns.items():
        features[key] = {"dtype": dtype, "shape": (1,), "names": None}
    fps: Any = data.fps  # LeRobot says int, and reads others
    dataset = LeRobotDataset.create(
        "local/made", fps=fps, features=features, root=root, use_videos=data.video, **data.create
    )
    generator, made = np.random.default_rng(seed), []
    for episode, length in enumerate(data.lengths):
        made.append([])
        for step in range(length):
            frame: Frame = {"task": data.tasks[episode % len(data.tasks)]}
            for key, size in data.cameras.items():
                frame[key] = _picture(generator, *size, smooth=data.video)
            for key, (shape, dtype) in data.vectors.items():
                frame[key] = (generator.uniform(-1, 1, shape) * 10).astype(dtype)
            for key, (dtype, value) in data.columns.items():
                made_value = value(episode, step)
                frame[key] = made_value if dtype == "string" else np.array([made_value], dtype)
            data.change(episode, step, frame)
            made[-1].append(frame)
            given = dict(frame)
            for key in data.cameras:
                image = frame[key].transpose(2, 0, 1) if data.channels_first else frame[key]
                given[key] = (image / 255).astype(np.float32) if data.float_images else image
            dataset.add_frame(given)
        dataset.save_episode(parallel_encoding=False)  # in processes: seconds to start
    dataset.finalize()
    return made


def _picture(generator: np.random.Generator, height: int, width: int, smooth: bool) -> np.ndarray:
    """Noise, or (codecs lose noise) a ramp from one colour to another."""
    if not smooth:
        return generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
    ends = generator.uniform(0, 255, (2, 3))
    share = np.linspace(0, 1, width)[None, :, None]
    return np.broadcast_to(ends[0] * (1 - share) + ends[1] * share, (height, width, 3)).round().astype(np.uint8)
