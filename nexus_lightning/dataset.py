"""What a LeRobotDataset on disk says of itself, read without opening it: LeRobot takes seconds to import.

:func:`dataset_problems` finds what would stop a tenant in the middle of a run, before anything is built: an old format,
keys, shapes, frame rate, episodes, statistics, missing files, timestamps, instructions, values that are not finite.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import MISSING

from nexus_lightning.conventions import DatasetConventions
from nexus_lightning.converter import DatasetConverter
from nexus_lightning.schema import MODE_STATISTICS

FORMAT = "v3.0"
#: LeRobot's name of a frame's instruction, which it looks up in ``meta/tasks.parquet``.
TASK = "task"
#: Where rewards are read from: without the first, 1 at the step that succeeds.
REWARD_COLUMNS = ("next.reward", "next.success")
#: What tells an episode that ended from one that was cut.
END_COLUMNS = ("next.terminated", "next.success")
#: Where the statistics of a whole dataset come from.
STATISTICS = ("stored", "frames")
_NUMBERS = ("float", "int", "uint", "bool")


# ---- which column is what, which episodes ----------------------------------------------------------------------------


@dataclass
class RecordConfig:
    """How to record the dataset with a scripted expert when it is not there yet."""

    expert: str = MISSING  # dotted path of a function: simulator -> iterator of native actions
    episodes: int = MISSING  # successful episodes to keep
    first_seed: int = 1000  # seeds first_seed, first_seed + 1, ...: keep them apart from the evaluation's
    workers: int = 2  # simulator processes
    random_share: float = 0.0  # mixed quality: each episode mixes random actions in, by a share drawn from 0 to this
    keep_failures: bool = False  # keep failed episodes too (offline RL learns from both)


@dataclass
class AugmentationConfig:
    """Image augmentation as K views of every frame, each encoded once; pass e over the data sees view e mod K."""

    views: int = 4  # view 0 is the frame itself
    crop: float = 0.9  # smallest share of height and width that a random crop keeps
    brightness: float = 0.2  # factor 1 +- this
    contrast: float = 0.2  # factor 1 +- this


@dataclass
class RenameConfig:
    """Which key of the dataset is what, where it differs from LeRobot's."""

    state: Any = "observation.state"  # or a list, joined in this order
    action: str = "action"
    cameras: dict[str, str] = field(default_factory=dict)  # schema camera -> key; else observation.images.<camera>
    instruction: str = "task"  # LeRobot's tasks | a column of texts, or of numbers of LeRobot's tasks
    reward: str | None = None  # of offline RL; null: next.reward, or 1 at next.success


@dataclass
class DatasetConfig:
    """A LeRobotDataset v3: a hub name, a local folder, or one recorded on first use."""

    repo_id: str = MISSING
    root: str | None = None  # local folder; null: the hub cache, or <data_dir>/demos/... when `record` is set
    record: RecordConfig | None = None
    episodes: Any = None  # the first n, or a list such as [0, 3, 10-49]; their statistics then normalise. null: all
    exclude: list[Any] = field(default_factory=list)  # episodes to leave out, as such a list
    rename: RenameConfig = field(default_factory=RenameConfig)
    statistics: str = "stored"  # of a whole dataset: LeRobot's stored ones | frames: computed here
    tolerance_s: float = 1e-4  # how far a timestamp may lie beside its video frame
    conventions: DatasetConventions = field(default_factory=DatasetConventions)  # where they differ from the schema's
    batch_size: int = 64  # samples per optimizer step
    batches_per_job: int = 8  # optimizer steps per training job
    augmentation: AugmentationConfig | None = None  # null: every frame as it is


@dataclass(frozen=True)
class Columns:
    """Keys of the dataset by what they are to a tenant (``dataset.rename``).

    Attributes:
        state: joined in this order; none for a tenant without proprioception.
        cameras: schema camera -> key.
        instruction: :data:`TASK`, or a column of texts, or of numbers of ``meta/tasks.parquet``.
        reward: the first one that is there counts.
    """

    state: tuple[str, ...]
    action: str
    cameras: Mapping[str, str]
    instruction: str = TASK
    reward: tuple[str, ...] = REWARD_COLUMNS

    @classmethod
    def of(cls, config: DatasetConfig, cameras: Sequence[str], state_dim: int) -> Columns:
        rename = config.rename
        state = (rename.state,) if isinstance(rename.state, str) else tuple(rename.state)
        return cls(
            state=state if state_dim else (),
            action=rename.action,
            cameras={camera: rename.cameras.get(camera, f"observation.images.{camera}") for camera in cameras},
            instruction=rename.instruction,
            reward=REWARD_COLUMNS if rename.reward is None else (rename.reward,),
        )


def chosen_episodes(chosen: Any, exclude: Sequence[Any], total: int) -> list[int] | None:
    """``dataset.episodes`` without ``dataset.exclude``, in ascending order; None: all of them.

    Args:
        chosen: None for all, a number n for the first n, or a list of numbers and ranges ``"10-49"`` (both ends
            included).
        exclude: such a list.
        total: episodes of the dataset.

    Raises:
        ValueError: it is none of these, names an episode that is not there, or leaves none.

    Example:
        >>> chosen_episodes(["0-2", 7], [1], total=9)
        [0, 2, 7]
    """
    if chosen is None and not exclude:
        return None
    kept, dropped = _chosen(chosen), _ranges("exclude", exclude)
    kept = [range(total)] if kept is None else kept
    for key, ranges in (("episodes", kept), ("exclude", dropped)):
        last = max((r.stop for r in ranges), default=0) - 1
        if last >= total and isinstance(chosen, int) and key == "episodes":
            raise ValueError(f"episodes={chosen}: there are {total}; ask for at most {total}, or null for all of them")
        if last >= total:
            raise ValueError(f"{key}: there is no episode {last}, there are {total}: 0 to {total - 1}")
    left = {e for r in kept for e in r} - {e for r in dropped for e in r}
    if not left:
        raise ValueError(f"exclude={_plain(exclude)}: leaves no episode")
    return sorted(left)


def check_episodes(chosen: Any, exclude: Sequence[Any]) -> None:
    """What :func:`chosen_episodes` raises whichever the dataset is."""
    _chosen(chosen)
    _ranges("exclude", exclude)


def _chosen(chosen: Any) -> list[range] | None:
    if chosen is None:
        return None
    if isinstance(chosen, int) and not isinstance(chosen, bool):
        if chosen < 1:
            raise ValueError(f"episodes={chosen}: at least 1, or null for all")
        return [range(chosen)]
    return _ranges("episodes", chosen)


def _ranges(key: str, values: Any) -> list[range]:
    """Numbers and ranges, not written out: a mistyped one may be long."""
    if isinstance(values, str):
        values = [values]
    if not isinstance(values, Sequence):
        raise ValueError(f"{key}={values!r}: a list of numbers and ranges such as 10-49 is required")
    found = []
    for value in values:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", str(value)) if not isinstance(value, bool | float) else None
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{key}: {value!r} is neither an episode nor a range such as 10-49")
        found.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def _plain(values: Any) -> Any:
    return list(values) if isinstance(values, Sequence) and not isinstance(values, str) else values


def instruction_of(value: Any, tasks: Sequence[str]) -> Any:
    """The instruction of a frame: a text, or a number of ``meta/tasks.parquet``."""
    if isinstance(value, str) or value is None:
        return value
    return tasks[int(value)] if 0 <= int(value) < len(tasks) else None


# ---- the folder ------------------------------------------------------------------------------------------------------


def lerobot_home() -> Path:
    """LeRobot's own folder for datasets by name."""
    from huggingface_hub.constants import HF_HOME

    return Path(os.getenv("HF_LEROBOT_HOME", Path(HF_HOME) / "lerobot")).expanduser()


def named_root(repo_id: str) -> Path | None:
    """Where a dataset by name lies on this machine, as LeRobot looks for it; None: nowhere."""
    from huggingface_hub import try_to_load_from_cache

    own = lerobot_home() / repo_id
    if (own / "meta" / "info.json").is_file():
        return own
    try:
        cached = try_to_load_from_cache(
            repo_id, "meta/info.json", cache_dir=lerobot_home() / "hub", revision=FORMAT, repo_type="dataset"
        )
    except ValueError:  # not a name of the hub
        return None
    return Path(cached).parent.parent if isinstance(cached, str) else None


@dataclass(frozen=True)
class DatasetFolder:
    """``meta/`` and ``data/`` of a LeRobotDataset v3."""

    root: Path

    @cached_property
    def info(self) -> dict[str, Any]:
        return json.loads((self.root / "meta" / "info.json").read_text())

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        return self.info["features"]

    @property
    def cameras(self) -> list[str]:
        return [key for key, feature in self.features.items() if feature.get("dtype") in ("image", "video")]

    @property
    def vectors(self) -> dict[str, int]:
        """Key -> length of every column of numbers that is a vector or a scalar."""
        own = ("timestamp", "frame_index", "episode_index", "index", "task_index")
        return {
            key: math.prod(feature["shape"])
            for key, feature in self.features.items()
            if key not in own and _is_numeric(feature) and len(feature["shape"]) <= 1
        }

    @cached_property
    def stats(self) -> dict[str, dict[str, Any]]:
        path = self.root / "meta" / "stats.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    def tasks(self) -> list[str]:
        """Instructions by ``task_index``."""
        import pandas

        frame = pandas.read_parquet(self.root / "meta" / "tasks.parquet")
        texts = [""] * (int(frame["task_index"].max()) + 1 if len(frame) else 0)
        for text, index in zip(frame.index, frame["task_index"], strict=True):
            texts[int(index)] = text
        return texts

    def episodes(self) -> Any:
        """pandas table of the episodes, without their statistics, by ``episode_index``."""
        import pandas
        import pyarrow.parquet

        parts = []
        for path in sorted((self.root / "meta" / "episodes").glob("*/*.parquet")):
            names = [n for n in pyarrow.parquet.read_schema(path).names if not n.startswith(("stats/", "tasks"))]
            parts.append(pandas.read_parquet(path, columns=names))
        return pandas.concat(parts).set_index("episode_index")

    def files(self, episodes: Sequence[int] | None, cameras: Sequence[str]) -> tuple[list[Path], list[Path]]:
        """Parquet and video files of some episodes (None: all), as the dataset names them."""
        table = self.episodes()
        table = table if episodes is None else table.loc[list(episodes)]
        videos = [c for c in cameras if self.features[c]["dtype"] == "video"]

        def named(pattern: str, prefix: str, **more: str) -> set[Path]:
            places = set(zip(table[f"{prefix}/chunk_index"], table[f"{prefix}/file_index"], strict=True))
            return {self.root / pattern.format(chunk_index=int(c), file_index=int(f), **more) for c, f in places}

        data = named(self.info["data_path"], "data")
        return sorted(data), sorted(
            path for key in videos for path in named(self.info["video_path"], f"videos/{key}", video_key=key)
        )


def _is_numeric(feature: Mapping[str, Any]) -> bool:
    return str(feature.get("dtype")).startswith(_NUMBERS)


def is_depth(feature: Mapping[str, Any]) -> bool:
    infos = (feature.get("info") or {}, feature.get("video_info") or {})
    return any(info.get("is_depth_map") or info.get("video.is_depth_map") for info in infos)


def channels(feature: Mapping[str, Any]) -> int:
    """Of a camera: its names say where they stand, else the smaller end."""
    shape, names = feature["shape"], feature.get("names") or ()
    for place, name in enumerate(names):
        if name in ("channel", "channels"):
            return shape[place]
    return min(shape[0], shape[-1]) if len(shape) == 3 else 1


# ---- what is wrong with it -------------------------------------------------------------------------------------------


def dataset_problems(
    key: str,
    config: DatasetConfig,
    converter: DatasetConverter,
    root: Path,
    complete: bool,
    needs: Sequence[Sequence[str]] = (),
) -> list[str]:
    """Why a tenant cannot train on the dataset in ``root``, one line each, every setting with its whole key.

    Args:
        key: of the tenant (``tenants.mine``).
        config: its dataset.
        converter: of its schema and conventions.
        root: a folder with ``meta/info.json``.
        complete: its data must be there; a dataset by name may lack files, which are downloaded later.
        needs: for offline RL, columns of which one each must be there.
    """
    folder, schema = DatasetFolder(root), converter.schema
    try:
        version, fps = str(folder.info["codebase_version"]), float(folder.info["fps"])
        total, _ = int(folder.info["total_episodes"]), folder.features
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        return [f"{key}.dataset: {root}/meta/info.json cannot be read ({error!r}); mend it or make the dataset again"]
    if not version.startswith("v3."):
        return [
            f"{key}.dataset: dataset {root} has format {version}, {FORMAT} is needed; "
            f"{_conversion(config, root, version)}"
        ]
    columns = Columns.of(config, schema.cameras, schema.state_dim)
    problems = _key_problems(key, folder, converter, columns)
    if needs:
        problems += _reward_problems(key, folder, config, needs)
    if not math.isclose(fps, schema.control_hz, rel_tol=1e-4):
        problems.append(
            f"{key}.schema.control_hz={schema.control_hz:g}: dataset {root} has fps {fps:g}; set "
            f"{key}.schema.control_hz={fps:g}"
        )
    episodes = None
    try:
        episodes = chosen_episodes(config.episodes, config.exclude, total)
    except ValueError as error:
        problems.append(f"{key}.dataset.{about(str(error), root)}")
    whole = episodes is None or len(episodes) == total
    if not problems and whole and config.statistics == "stored" and not converter.changes_pose:
        problems += _statistics_problems(key, folder, config, schema, columns)
    if not problems:
        problems += _data_problems(key, folder, config, columns, episodes, complete)
    return problems


def about(text: str, root: Path) -> str:
    """A message of :func:`chosen_episodes`, naming the dataset in ``root``."""
    return re.sub("there (?:are|is)", lambda match: f"dataset {root} has", text, count=1)


def _conversion(config: DatasetConfig, root: Path, version: str) -> str:
    if version != "v2.1":
        return "convert it to v2.1 with the LeRobot that made it first, or make it again"
    return (
        f"convert it with python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id={config.repo_id} "
        f"--root={root} --push-to-hub=false"
    )


def _key_problems(key: str, folder: DatasetFolder, converter: DatasetConverter, columns: Columns) -> list[str]:
    schema, features, root, problems = converter.schema, folder.features, folder.root, []
    rename = f"{key}.dataset.rename"
    for camera, wanted in columns.cameras.items():
        feature = features.get(wanted)
        if feature is None or wanted not in folder.cameras:
            there = ", ".join(folder.cameras) or "none"
            problems.append(
                f"{key}.schema.cameras={list(schema.cameras)}: dataset {root} has no camera {wanted!r}; its cameras "
                f"are {there}; map it with {rename}.cameras.{camera}=<dataset key>, or leave it out"
            )
        elif is_depth(feature) or channels(feature) != 3:
            what = "a depth map" if is_depth(feature) else f"of {channels(feature)} channel(s)"
            problems.append(
                f"{key}.schema.cameras={list(schema.cameras)}: {wanted!r} of dataset {root} is {what}, a policy sees "
                f"three colour channels; leave {camera!r} out, or map it with {rename}.cameras.{camera}=<dataset key>"
            )
    vectors = ", ".join(f"{name} [{length}]" for name, length in folder.vectors.items()) or "none"
    missing = [name for name in columns.state if name not in folder.vectors]
    for name in missing:
        problems.append(
            f"{rename}.state={name}: {_what_it_is(name, folder)}; its columns of numbers are {vectors}; map it with "
            f"{rename}.state=<dataset key>, or set {key}.schema.state_dim=0 for a policy without a state"
        )
    if not missing and columns.state:
        found = sum(folder.vectors[name] for name in columns.state)
        if found != schema.state_dim:
            problems.append(
                f"{key}.schema.state_dim={schema.state_dim}: dataset {root} has {' + '.join(columns.state)} of length "
                f"{found}; set {key}.schema.state_dim={found}, or {rename}.state"
            )
    if columns.action not in folder.vectors:
        problems.append(
            f"{rename}.action={columns.action}: {_what_it_is(columns.action, folder)}; its columns of numbers are "
            f"{vectors}; map it with {rename}.action=<dataset key>"
        )
    elif not converter.problems() and folder.vectors[columns.action] != converter.action_dim:
        dim = converter.action_dim
        through = f", {dim} as {converter.rotation}" if dim != schema.action_dim else ""
        problems.append(
            f"{key}.schema.action_dim={schema.action_dim}{through}: dataset {root} has {columns.action} of length "
            f"{folder.vectors[columns.action]}"
        )
    if columns.instruction != TASK and columns.instruction not in features:
        problems.append(
            f"{rename}.instruction={columns.instruction}: {_what_it_is(columns.instruction, folder)}; choose {TASK} or "
            f"one of {', '.join(features)}"
        )
    return problems


def _what_it_is(name: str, folder: DatasetFolder) -> str:
    feature = folder.features.get(name)
    if feature is None:
        return f"dataset {folder.root} has no {name!r}"
    return f"{name!r} of dataset {folder.root} is {feature.get('dtype')} of shape {list(feature['shape'])}"


def _reward_problems(
    key: str, folder: DatasetFolder, config: DatasetConfig, needs: Sequence[Sequence[str]]
) -> list[str]:
    problems = []
    for names in needs:
        if not any(name in folder.vectors for name in names):
            setting = f"{key}.dataset.rename.reward" if config.rename.reward is not None else f"{key}.task=offline_rl"
            there = ", ".join(folder.vectors)
            problems.append(
                f"{setting}: dataset {folder.root} has no {' or '.join(names)}; its columns of numbers are {there}"
            )
    return problems


def _statistics_problems(
    key: str, folder: DatasetFolder, config: DatasetConfig, schema: Any, columns: Columns
) -> list[str]:
    """LeRobot's are those that other policies on these data are trained with: they are not replaced unasked."""
    problems = []
    wanted = [(name, "state", schema.state_normalization) for name in columns.state]
    for name, what, mode in [*wanted, (columns.action, "action", schema.action_normalization)]:
        stored = folder.stats.get(name, {})
        missing = sorted({"mean", "std", "min", "max", *MODE_STATISTICS[mode]} - set(stored))
        if missing:
            command = "python -m lerobot.scripts.augment_dataset_quantile_stats"
            fix = f"add them with {command} --repo-id={config.repo_id} --root={folder.root}, or " if stored else ""
            problems.append(
                f"{key}.schema.{what}_normalization={mode}: dataset {folder.root} has no {', '.join(missing)} of "
                f"{name!r} in meta/stats.json; {fix}set {key}.dataset.statistics=frames to compute them from the frames"
            )
    return problems


def _data_problems(
    key: str,
    folder: DatasetFolder,
    config: DatasetConfig,
    columns: Columns,
    episodes: list[int] | None,
    complete: bool,
) -> list[str]:
    """Files, timestamps, instructions and values, in this order: what is not there cannot be read."""
    import pyarrow
    import pyarrow.parquet

    root, where = folder.root, f"{key}.dataset"
    try:
        data, videos = folder.files(episodes, list(columns.cameras.values()))
        missing = [str(path.relative_to(root)) for path in (*data, *videos) if not path.is_file()]
        if missing:
            problem = f"{where}: dataset {root}: {len(missing)} of its files are missing, for example {missing[0]}"
            return [problem] if complete else []
        tasks = folder.tasks() if "task_index" in folder.features else []
    except (OSError, KeyError, ValueError, pyarrow.ArrowException) as error:
        return [f"{where}: dataset {root}: its episodes or tasks cannot be read ({_line(error)})"]
    reward = [name for name in columns.reward if name in folder.vectors][:1]
    numbers = [*columns.state, columns.action, *reward]
    at = {"episode_index", "frame_index", "timestamp", "task_index"}
    texts = [] if columns.instruction == TASK else [columns.instruction]
    chosen = None if episodes is None else np.array(episodes)
    faults: dict[str, list[str]] = {}
    for path in data:
        try:
            table = pyarrow.parquet.read_table(path, columns=[*at, *numbers, *texts])
        except (OSError, KeyError, ValueError, pyarrow.ArrowException) as error:
            return [f"{where}: {path} cannot be read ({_line(error)}); copy it again, or leave its episodes out"]
        if chosen is not None:
            table = table.filter(pyarrow.array(np.isin(table["episode_index"].to_numpy(), chosen)))
        frames = {name: table[name].to_numpy() for name in at}

        def place(row: int, frames: dict[str, np.ndarray] = frames) -> str:
            return f"episode {frames['episode_index'][row]}, frame {frames['frame_index'][row]}"

        for name in dict.fromkeys(numbers):
            bad = np.flatnonzero(~np.isfinite(_values(table[name])).all(1))
            faults.setdefault(name, []).extend(
                f"{name!r} of {place(row)} is {_values(table[name])[row].tolist()}" for row in bad
            )
        off = np.abs(frames["timestamp"] - frames["frame_index"] / folder.info["fps"])
        far = np.flatnonzero(off > config.tolerance_s + np.spacing(frames["timestamp"].astype(np.float32)))
        if videos and len(far):
            row = far[np.argmax(off[far])]
            faults.setdefault("timestamp", []).extend([f"{place(row)} is {off[row]:.4f} s beside its time"] * len(far))
        said = _instructions(table, columns.instruction, tasks)
        empty = [row for row, text in enumerate(said) if not (isinstance(text, str) and text.strip())]
        faults.setdefault("instruction", []).extend(f"{place(row)} has none" for row in empty)
    problems = []
    for name, found in faults.items():
        if not found:
            continue
        more = f", in all {len(found)} frames" if len(found) > 1 else ""
        fix = {
            "timestamp": f"set {where}.tolerance_s above it if the videos are right all the same",
            "instruction": "write them with lerobot-edit-dataset (operation modify_tasks), or name the column that "
            f"holds them: {where}.rename.instruction=<dataset key>",
        }.get(name, f"mend these episodes, or leave them out: {where}.exclude=[...]")
        what = {"timestamp": "timestamps: ", "instruction": "instructions: "}.get(name, "")
        problems.append(f"{where}: dataset {root}: {what}{found[0]}{more}; {fix}")
    return problems


def _values(column: Any) -> np.ndarray:
    """A column of scalars or lists of numbers, float64 ``[N, D]``; a missing value is NaN."""
    rows = column.to_pylist() if column.null_count else None
    if rows is not None:
        width = max((np.size(row) for row in rows if row is not None), default=1)
        rows = [np.full(width, np.nan) if row is None else np.atleast_1d(np.array(row, np.float64)) for row in rows]
        return np.stack(rows)
    chunks = [c.flatten() if hasattr(c.type, "value_type") else c for c in column.chunks]
    flat = [np.asarray(c.to_numpy(zero_copy_only=False), np.float64) for c in chunks]
    return np.concatenate(flat).reshape(len(column), -1) if len(column) else np.zeros((0, 1))


def _instructions(table: Any, column: str, tasks: Sequence[str]) -> list[Any]:
    said = table["task_index" if column == TASK else column].to_pylist()
    return [instruction_of(value, tasks) for value in said]


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
