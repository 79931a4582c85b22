"""LeRobotDataset -> training jobs of an SFT tenant."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor
from torchvision.transforms.v2 import functional

from nexus_lightning.backbone import Backbone, FeatureSpec, VLAFeature, concatenate_features, sharing_key
from nexus_lightning.config import AugmentationConfig, ConfigError, DatasetConfig
from nexus_lightning.converter import DatasetConverter
from nexus_lightning.dataset import (
    END_COLUMNS,
    REWARD_COLUMNS,
    TASK,
    Columns,
    about,
    chosen_episodes,
    instruction_of,
)
from nexus_lightning.features.store import FeatureEntry, FeatureStore, StoreKey, dataset_revision
from nexus_lightning.images import as_uint8, fit_images
from nexus_lightning.objectives.base import AlgorithmSettings, algorithm_class
from nexus_lightning.producers.base import Producer
from nexus_lightning.queues.jobs import JobState, Scheduler
from nexus_lightning.queues.training import TrainingQueue
from nexus_lightning.schema import MODE_STATISTICS, NormalizationStats, TenantSchema
from nexus_lightning.shares import Share
from nexus_lightning.tenant import PassCounter, TenantSlot, derive_seed


def open_dataset(config: DatasetConfig, schema: TenantSchema, root: Path | None) -> Any:
    """LeRobotDataset whose items carry ``schema.chunk`` actions and ``action_is_pad``.

    A folder (``root``) is read as it is: what it lacks is never asked of the hub.

    Raises:
        ImportError: lerobot is missing, with the install line.
        ConfigError: the dataset lacks some of ``dataset.episodes``.
        ValueError: fps differs from ``schema.control_hz``, or the folder lacks files of the episodes.
    """
    try:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset, LeRobotDatasetMetadata
    except ImportError as error:
        raise ImportError("SFT needs lerobot: pip install 'lerobot[dataset]>=0.6.1,<0.7'") from error
    meta = LeRobotDatasetMetadata(config.repo_id, root=root)
    if not math.isclose(meta.fps, schema.control_hz, rel_tol=1e-4):
        raise ValueError(f"dataset {config.repo_id}: fps {meta.fps} differs from schema.control_hz={schema.control_hz}")
    try:
        episodes = chosen_episodes(config.episodes, config.exclude, meta.total_episodes)
    except ValueError as error:
        raise ConfigError([f"dataset.{about(str(error), root or Path(config.repo_id))}"]) from None
    if root is not None:
        _check_files(meta, root, range(meta.total_episodes) if episodes is None else episodes)
    # A delta is taken from the state at the action's own step, so a conversion needs the states of the whole chunk.
    columns = columns_of(config, schema)
    states = columns.state if DatasetConverter(schema, config.conventions).needs_states else ()
    return LeRobotDataset(
        config.repo_id,
        root=root,
        episodes=episodes,
        delta_timestamps={key: [i / meta.fps for i in range(schema.chunk)] for key in (columns.action, *states)},
        tolerance_s=config.tolerance_s,
        video_backend="pyav",
    )


def columns_of(config: DatasetConfig, schema: TenantSchema) -> Columns:
    return Columns.of(config, schema.cameras, schema.state_dim)


def _check_files(meta: Any, root: Path, episodes: Sequence[int]) -> None:
    """LeRobot would download a file that is missing."""
    files = {meta.get_data_file_path(e) for e in episodes}
    files |= {meta.get_video_file_path(e, key) for e in episodes for key in meta.video_keys}
    if missing := sorted(str(file) for file in files if not (root / file).is_file()):
        raise ValueError(f"dataset {root}: {len(missing)} of its files are missing, for example {missing[0]}")


def dataset_stats(
    dataset: Any, config: DatasetConfig, schema: TenantSchema
) -> tuple[NormalizationStats, NormalizationStats]:
    """State and (internal-convention) action statistics of the episodes that ``dataset`` was opened with.

    Of a whole dataset they are LeRobot's own, mapped through the gripper convention. Of some of its episodes, of
    actions whose rotation or delta convention changes (which statistics do not map through), and with
    ``dataset.statistics: frames`` they are computed from the frames.

    Raises:
        ValueError: the dataset lacks a statistic that the schema's normalisation needs, or its actions are not what
            ``dataset.conventions`` says.
    """
    converter, columns = DatasetConverter(schema, config.conventions), columns_of(config, schema)
    whole = config.statistics == "stored"
    if config.episodes is not None or config.exclude:
        total = dataset.meta.total_episodes
        chosen = chosen_episodes(config.episodes, config.exclude, total)
        whole = whole and (chosen is None or len(chosen) == total)
    if whole and not converter.changes_pose:
        state = _stored_stats(dataset, config, columns.state, "state", schema.state_normalization)
        action = _stored_stats(dataset, config, [columns.action], "action", schema.action_normalization)
        return state, action.mapped(converter.actions)
    (actions,), states = _vectors(dataset, columns.action), _states(dataset, columns)
    if whole:
        state = _stored_stats(dataset, config, columns.state, "state", schema.state_normalization)
    else:
        state = NormalizationStats.of(states)
    if converter.changes_pose:
        converter.check_absolute(actions, states)
        return state, NormalizationStats.of(converter.actions(actions, states))
    return state, NormalizationStats.of(actions).mapped(converter.actions)


def _stored_stats(dataset: Any, config: DatasetConfig, keys: Sequence[str], name: str, mode: str) -> NormalizationStats:
    """LeRobot's, of these columns one after the other."""
    stats, wanted = dataset.meta.stats or {}, {"mean", "std", "min", "max", *MODE_STATISTICS[mode]}
    for key in keys:
        if missing := sorted(wanted - set(stats.get(key, ()))):
            raise ValueError(
                f"schema.{name}_normalization={mode!r}: dataset {config.repo_id} has no {', '.join(missing)} for "
                f"{key!r}, only {', '.join(sorted(stats.get(key, ()))) or 'nothing'}; add quantiles with python -m "
                f"lerobot.scripts.augment_dataset_quantile_stats --repo-id={config.repo_id} "
                f"--root={getattr(dataset, 'root', '...')}, or set dataset.statistics=frames, or choose another mode"
            )
    if not keys:
        return NormalizationStats.identity(0)
    names = [f.name for f in fields(NormalizationStats) if all(f.name in stats[key] for key in keys)]
    parts = {n: [torch.as_tensor(stats[key][n], dtype=torch.float32).flatten() for key in keys] for n in names}
    return NormalizationStats(**{n: torch.cat(values) for n, values in parts.items()})


class DemonstrationReader:
    """Turns frame indices of a LeRobotDataset into batches with features.

    With a store every frame (of every view) is decoded and encoded once, ahead in :meth:`warm_up` or when first asked
    for; the backbone is frozen, so a feature never goes stale, and tenants with the same data share it. Without one
    (``features.reuse=never``) the batch carries images and instructions, and the actor encodes them.

    Args:
        dataset: a LeRobotDataset (see :func:`open_dataset`).
        config / schema: the tenant's.
        backbone: the frozen backbone.
        spec: what the tenant's head reads.
        store: where features are kept, or None.
        passes: counts observations and encoded rows.
        algorithm: settings, of offline RL: batches then hold the columns of its objective, and with ``next_row``
            among them also ``next_features`` and ``next_state`` (needs a store).
    """

    def __init__(
        self,
        dataset: Any,
        config: DatasetConfig,
        schema: TenantSchema,
        backbone: Backbone,
        spec: FeatureSpec,
        store: FeatureStore | None,
        passes: PassCounter | None = None,
        algorithm: AlgorithmSettings | None = None,
    ) -> None:
        self.dataset, self.config, self.schema, self.backbone, self.spec = dataset, config, schema, backbone, spec
        self.converter = DatasetConverter(schema, config.conventions)
        self.augmentation = config.augmentation
        self.views = 1 if self.augmentation is None else self.augmentation.views
        self.passes = PassCounter() if passes is None else passes
        self.columns = columns_of(config, schema)
        self.table = low_dim_table(dataset, schema, self.converter, self.columns)
        self.next_row: Tensor | None = None
        if algorithm is not None:
            recorded = RecordedFrames(dataset, schema.execute, self.columns.reward)
            columns = algorithm_class(algorithm).columns(recorded, algorithm)
            if "next_row" in columns.keys():
                assert store is not None, "validated with the config"
                self.next_row = cast(Tensor, columns.pop("next_row"))
            self.table.update(columns)
        vectors = [*self.columns.state, self.columns.action]
        there = dataset.hf_dataset.column_names
        reward = [] if algorithm is None else [k for k in self.columns.reward if k in there][:1]
        #: Why these data cannot be trained on. Raised by the first read: that takes out this tenant alone.
        self.fault = not_finite(dataset, [*vectors, *reward])
        self._seen = torch.zeros(self.views, len(dataset), dtype=torch.bool)
        self.entry: FeatureEntry | None = None
        if store is not None:
            prefix, action_tokens = sharing_key(schema, spec.kind)
            images = {
                "cameras": dict(self.columns.cameras),
                "orientation": [config.conventions.image_orientation, schema.image_orientation],
                "augmentation": None if self.augmentation is None else asdict(self.augmentation),
            }
            if self.columns.instruction != TASK:
                images["instruction"] = self.columns.instruction
            key = StoreKey(
                fingerprint=backbone.fingerprint,
                prefix=prefix,
                action_tokens=action_tokens,
                kind=spec.kind,
                dataset=config.repo_id,
                revision=dataset_revision(dataset),
                conversion=json.dumps(images, sort_keys=True),
            )
            self.entry = store.entry(key, len(dataset), self._features)

    def __len__(self) -> int:
        return len(self.dataset)

    def warm_up(
        self,
        stopping: Callable[[], bool] = lambda: False,
        progress: Callable[[int], None] = lambda rows: None,
        share: Share | None = None,
    ) -> bool:
        """Make sure that the store holds all frames of all views, as far as it has room.

        Ranks begin at different places (``share``): with a store on disk they find what others have written.

        Returns:
            False when ``stopping`` said so before the end.

        Raises:
            ValueError: states, actions or rewards of the dataset are not finite.
        """
        assert self.entry is not None
        self._refuse_fault()
        begin = 0.0 if share is None else (share.index or 0) / share.count
        return self.entry.warm_up(range(self.views), stopping, progress, begin)

    def read(self, rows: Tensor, view: int = 0) -> TensorDict:
        """The batch ``[len(rows)]`` of these frames.

        Args:
            rows: int64 frame indices.
            view: which augmented view, ``0`` is the frame itself.

        Returns:
            ``actions`` (internal convention) and ``is_pad``; with a store ``features`` and ``state``, without one
            ``observation`` (images, state) and ``language_instruction``. Offline RL: what the constructor says.

        Raises:
            ValueError: states, actions or rewards of the dataset are not finite.
        """
        self._refuse_fault()
        batch, count = cast(TensorDict, self.table[rows]), len(rows)
        if self.next_row is not None:
            following = self.next_row[rows]
            batch["next_state"] = self.table["state"][following]
            rows = torch.cat([rows, following])
        new = rows[~self._seen[view, rows]].unique()
        self._seen[view, new] = True
        self.passes.add(observed=len(new))
        if self.entry is not None:
            features = self.entry.read(rows, view)["features"]
            batch["features"] = features[:count]
            if self.next_row is not None:
                batch["next_features"] = features[count:]
            return batch
        items = [self.dataset[int(row)] for row in rows]
        observation = self._observation(items, rows, view)
        observation["state"] = batch["state"]
        batch = batch.exclude("state")
        batch["observation"] = observation
        batch["language_instruction"] = string_column([self._instruction(item) for item in items])
        return batch

    def _refuse_fault(self) -> None:
        if self.fault is not None:
            raise ValueError(self.fault)

    def _instruction(self, item: dict[str, Any]) -> str:
        said = item[self.columns.instruction]
        if not isinstance(said, str):
            said = instruction_of(said, self.dataset.meta.tasks.index)
        if not isinstance(said, str) or not said.strip():
            where = f"episode {int(item['episode_index'])}, frame {int(item['frame_index'])}"
            raise ValueError(
                f"dataset {self.dataset.repo_id}: {where} has no instruction in {self.columns.instruction!r}"
            )
        return said

    def _observation(self, items: list[dict[str, Any]], rows: Tensor, view: int) -> TensorDict:
        observation = TensorDict({}, [len(items)])
        for camera in self.schema.cameras:
            images = torch.stack([self._image(camera, item[self.columns.cameras[camera]]) for item in items])
            if view and self.augmentation is not None:
                images = augment(images, rows, view, self.augmentation)
            observation["image", camera] = images
        return observation

    def _image(self, camera: str, image: Any) -> Tensor:
        turned = self.converter.images(as_uint8(camera, image))
        return fit_images(turned, self.schema.image_size, self.schema.image_fit)

    def _features(self, rows: Tensor, view: int) -> TensorDict:
        """What the store keeps: the features of these frames."""
        items = [self.dataset[int(row)] for row in rows]
        observation = self._observation(items, rows, view)
        texts = [self._instruction(item) for item in items]
        features = self.backbone(observation, texts, self.schema, (self.spec.kind,))
        new = rows[~self._seen[view, rows]]  # a shard is computed whole, its rows are read sooner or later
        self._seen[view, new] = True
        self.passes.add(observed=len(new), encoded=len(rows))
        return TensorDict({"features": features.select(self.spec).to("cpu")}, [len(rows)])


def string_column(texts: list[str]) -> Any:
    """One string per row, as a TensorDict column."""
    return cast(Any, NonTensorStack)(*texts)


def low_dim_table(
    dataset: Any, schema: TenantSchema, converter: DatasetConverter, columns: Columns | None = None
) -> TensorDict:
    """States and action chunks of every frame, without decoding an image.

    Returns:
        ``[N]``: ``state`` ``[N, S]`` float32, ``actions`` ``[N, T, A]`` in the internal convention, ``is_pad``
        ``[N, T]``: steps beyond the episode repeat its last action, as LeRobotDataset's own ``delta_timestamps`` do.
    """
    columns = Columns.of(DatasetConfig(), schema.cameras, schema.state_dim) if columns is None else columns
    (action,), state = _vectors(dataset, columns.action), _states(dataset, columns)
    (episode,) = _columns(dataset)
    last = _last_rows(episode)
    step = torch.arange(len(action)).unsqueeze(1) + torch.arange(schema.chunk)
    rows = torch.minimum(step, last.unsqueeze(1))
    actions = converter.actions(action[rows], state[rows] if converter.needs_states else state)
    return TensorDict({"state": state, "actions": actions, "is_pad": step > last.unsqueeze(1)}, [len(action)])


def _vectors(dataset: Any, *keys: str) -> list[Tensor]:
    """Columns of vectors, float32 ``[N, D]`` each. LeRobot keeps a vector of length 1 as a scalar."""
    frames = dataset.hf_dataset.select_columns(list(keys)).with_format("torch")[:]
    return [torch.as_tensor(frames[key]).float().reshape(len(frames[key]), -1) for key in keys]


def _states(dataset: Any, columns: Columns) -> Tensor:
    """The columns of the state, joined: float32 ``[N, S]``."""
    return torch.cat([torch.zeros(len(dataset.hf_dataset), 0), *_vectors(dataset, *columns.state)], 1)


def not_finite(dataset: Any, keys: Sequence[str]) -> str | None:
    """Names the first frame in which one of these columns is NaN or infinite; None: there is none."""
    for key, values in zip(keys, _vectors(dataset, *keys), strict=True):
        bad = (~values.isfinite()).any(1).nonzero().flatten().tolist()
        if bad:
            frame = dataset.hf_dataset.select_columns(["episode_index", "frame_index"])[bad[0]]
            return (
                f"dataset {dataset.repo_id}: {key!r} of episode {int(frame['episode_index'])}, frame "
                f"{int(frame['frame_index'])} is {values[bad[0]].tolist()}, in all {len(bad)} frames are not finite; "
                "mend or delete these episodes"
            )
    return None


def _last_rows(episode: Tensor) -> Tensor:
    """The last frame of each frame's episode, int64 ``[N]``: frames of an episode lie side by side."""
    _, lengths = torch.unique_consecutive(episode, return_counts=True)
    return (lengths.cumsum(0) - 1).repeat_interleave(lengths)


def _columns(dataset: Any, *choices: tuple[str, ...]) -> list[Tensor]:
    """One float32 column ``[N]`` for each of ``choices``, the first name that is there; then ``episode_index``."""
    keys = []
    for names in choices:
        key = next((name for name in names if name in dataset.hf_dataset.column_names), None)
        if key is None:
            raise ValueError(f"dataset {dataset.repo_id}: offline RL needs the column {' or '.join(names)}")
        keys.append(key)
    frames = dataset.hf_dataset.select_columns([*dict.fromkeys(keys), "episode_index"]).with_format("torch")[:]
    return [*(torch.as_tensor(frames[key]).float().flatten() for key in keys), torch.as_tensor(frames["episode_index"])]


@dataclass
class RecordedFrames:
    """See :class:`~nexus_lightning.objectives.base.Recorded`.

    Attributes:
        dataset: a LeRobotDataset.
        execute: steps of a chunk that are carried out.
        rewards: names of the reward's column; the first that is there.
    """

    dataset: Any
    execute: int
    rewards: tuple[str, ...] = REWARD_COLUMNS

    def returns_to_go(self, gamma: float) -> Tensor:
        """See :func:`returns_to_go`."""
        return returns_to_go(self.dataset, gamma, self.rewards)

    def transitions(self, gamma: float) -> TensorDict:
        """See :func:`transitions`."""
        return transitions(self.dataset, gamma, self.execute, self.rewards)


def returns_to_go(dataset: Any, gamma: float, rewards: tuple[str, ...] = REWARD_COLUMNS) -> Tensor:
    """Discounted reward from every frame to the end of its episode, float32 ``[N, 1]``.

    Raises:
        ValueError: the dataset has none of the columns ``rewards``.
    """
    reward, episode = _columns(dataset, rewards)
    returns, following = torch.zeros_like(reward), 0.0
    for row in reversed(range(len(reward))):
        if row + 1 == len(reward) or episode[row + 1] != episode[row]:
            following = 0.0
        following = float(reward[row]) + gamma * following
        returns[row] = following
    return returns.unsqueeze(-1)


def transitions(dataset: Any, gamma: float, steps: int, rewards: tuple[str, ...] = REWARD_COLUMNS) -> TensorDict:
    """Every frame with the ``steps`` actions from it on as one decision.

    ::

        frame        t   t+1   ...   t+n       reward   = r_t + gamma r_t+1 + ... + gamma^(n-1) r_t+n-1
        action taken *    *    ...             next_row = t+n
                                               discount = gamma^n

    n is ``steps``, or what is left of the episode. Where the episode ended in it, ``discount`` is 0. Where it was cut,
    the state after its last action was not recorded: the last frame is the one to go on from, its own action is not
    counted, and as a start it has n = 0 (no target).

    Returns:
        ``[N]``: ``reward`` and ``discount`` float32 ``[N, 1]``, ``taken`` bool ``[N, steps]``, ``next_row`` int64.

    Raises:
        ValueError: the dataset has none of the columns ``rewards``, or none of :data:`END_COLUMNS`.
    """
    reward, end, episode = _columns(dataset, rewards, END_COLUMNS)
    rows, last = torch.arange(len(reward)), _last_rows(episode)
    ended = end[last] > 0
    step = rows.unsqueeze(1) + torch.arange(steps)
    taken = step < torch.where(ended, last + 1, last).unsqueeze(1)
    count = taken.sum(1)
    paid = reward[step.clamp(max=len(reward) - 1)] * taken * gamma ** torch.arange(steps)
    discount = torch.where(ended & (rows + count > last), 0.0, gamma**count)
    return TensorDict(
        {
            "reward": paid.sum(1, keepdim=True),
            "discount": discount.unsqueeze(-1),
            "taken": taken,
            "next_row": torch.minimum(rows + count, last),
        },
        [len(reward)],
    )


def augment(images: Tensor, rows: Tensor, view: int, config: AugmentationConfig) -> Tensor:
    """Random crop (resized back), brightness and contrast: a pure function of (frame, view).

    Args:
        images: uint8 ``[N, 3, H, W]``.
        rows: their frame indices.
        view: at least 1.
        config: ranges.

    Returns:
        uint8, same shape.
    """
    out = []
    for image, row in zip(images, rows.tolist(), strict=True):
        generator = torch.Generator().manual_seed(derive_seed("augment", row, view))
        u_crop, u_top, u_left, u_brightness, u_contrast = torch.rand(5, generator=generator).tolist()
        height, width = image.shape[-2:]
        share = 1 - (1 - config.crop) * u_crop
        size = [max(1, round(height * share)), max(1, round(width * share))]
        top, left = round((height - size[0]) * u_top), round((width - size[1]) * u_left)
        image = functional.resized_crop(image, top, left, size[0], size[1], [height, width], antialias=True)
        image = functional.adjust_brightness(image, 1 + config.brightness * (2 * u_brightness - 1))
        out.append(functional.adjust_contrast(image, 1 + config.contrast * (2 * u_contrast - 1)))
    return torch.stack(out)


def concatenate_batches(parts: list[TensorDict]) -> TensorDict:
    """Batches of :meth:`DemonstrationReader.read` one after the other (text segments may differ in length)."""
    keys = [key for key in ("features", "next_features") if key in parts[0].keys()]
    whole = cast(TensorDict, torch.cat([part.exclude(*keys) for part in parts]))  # type: ignore[arg-type]
    for key in keys:
        whole[key] = concatenate_features([cast(VLAFeature, part[key]) for part in parts])
    return whole


class FrameOrder:
    """Sample order as a pure function of (seed, position): shuffled epochs, so a cursor is all that a resume needs.

    Example:
        >>> order = FrameOrder(5, seed=0)
        >>> sorted(order.rows(0, 5).tolist())
        [0, 1, 2, 3, 4]
        >>> bool((order.rows(3, 4) == torch.cat([order.rows(3, 2), order.rows(5, 2)])).all())
        True
    """

    def __init__(self, num_frames: int, seed: int) -> None:
        self.num_frames, self.seed = num_frames, seed
        self._epoch: tuple[int, Tensor] | None = None

    def rows(self, start: int, count: int) -> Tensor:
        """Frame indices at stream positions ``start .. start + count - 1``, int64 ``[count]``."""
        taken: list[Tensor] = []
        while count > 0:
            epoch, offset = divmod(start, self.num_frames)
            part = self._permutation(epoch)[offset : offset + count]
            taken.append(part)
            start, count = start + len(part), count - len(part)
        return torch.cat(taken)

    def epochs(self, start: int, count: int) -> Tensor:
        """Which pass over the data each of these positions belongs to, int64 ``[count]``."""
        return torch.arange(start, start + count) // self.num_frames

    def _permutation(self, epoch: int) -> Tensor:
        if self._epoch is None or self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "epoch", epoch))
            self._epoch = (epoch, torch.randperm(self.num_frames, generator=generator))
        return self._epoch[1]


class DemonstrationStream:
    """Samples of a dataset in the tenant's own order; what lies at a position depends on the position alone.

    Args:
        reader: of the tenant.
        seed: the tenant's.
    """

    def __init__(self, reader: DemonstrationReader, seed: int) -> None:
        self.reader, self.order = reader, FrameOrder(len(reader), derive_seed(seed, "order"))

    def read(self, start: int, count: int, here: Tensor | None = None) -> TensorDict:
        """``[count]`` samples; pass e over the data sees view e modulo the number of views.

        ``here``: only these of them, int64 places from 0 to ``count - 1``.
        """
        rows, views = self.order.rows(start, count), self.order.epochs(start, count) % self.reader.views
        if here is not None:
            rows, views = rows[here], views[here]
        present = views.unique().tolist()
        if len(present) == 1:
            return self.reader.read(rows, present[0])
        parts = [self.reader.read(rows[views == view], view) for view in present]
        positions = torch.cat([(views == view).nonzero().flatten() for view in present])
        return concatenate_batches(parts)[positions.argsort()]


class DemonstrationProducer(Producer):
    """reserve -> build batch -> put -> ready, as far ahead as the tenant's in-flight bound allows."""

    def __init__(
        self,
        slot: TenantSlot,
        reader: DemonstrationReader,
        scheduler: Scheduler,
        queue: TrainingQueue,
        on_failure: Callable[[str, str, str], None],
        on_progress: Callable[[str], None] = lambda text: None,
        warm_up: bool = True,
        share: Share | None = None,
    ) -> None:
        super().__init__(slot.name, on_failure)
        self.share = Share() if share is None else share
        self.slot, self.reader, self.scheduler, self.queue = slot, reader, scheduler, queue
        self.on_progress, self.warm_up = on_progress, warm_up

    def produce(self) -> None:
        config = self.reader.config
        kept = self.reader.entry is not None
        if kept and self.warm_up:
            done, total = 0, len(self.reader) * self.reader.views

            def progress(count: int) -> None:
                nonlocal done
                done += count
                self.on_progress(f"features {done}/{total}")

            if not self.reader.warm_up(self.stopping.is_set, progress, self.share):
                return
            self.on_progress("")
        stream = DemonstrationStream(self.reader, self.slot.spec.seed)
        rows_per_job = config.batch_size * config.batches_per_job
        metadata: dict[str, Any] = {"features": kept}
        if not kept:  # jobs of other tenants with this key may share the actor's backbone passes
            metadata["encode"] = list(sharing_key(self.slot.spec.schema, self.reader.spec.kind))
        here, padding = (None, None) if self.share.count == 1 else self._local_rows()
        rows_here = rows_per_job if here is None else here.numel()
        position = self.slot.cursor
        while not self.stopping.is_set() and self.scheduler.wants_more(self.tenant):
            job = self.scheduler.reserve(
                self.tenant,
                rows_here,
                domain=config.repo_id,
                schema_signature=self.slot.spec.schema.signature,
                metadata={**metadata, "cursor": position + 1},
            )
            if job is None:
                self.scheduler.wait_for_room(self.tenant, timeout_s=0.5)
                continue
            try:
                batch = stream.read(position * rows_per_job, rows_per_job, here)
                if padding is not None:  # no step of them is valid
                    batch["is_pad"] = batch["is_pad"] | padding.unsqueeze(-1)
                self.queue.put(job.partition_id, batch, tenant_id=self.tenant)
                self.scheduler.mark(job.job_id, JobState.READY)
            except Exception as error:
                self.scheduler.fail(job.job_id, f"{type(error).__name__}: {error}")
                raise
            position += 1

    def _local_rows(self) -> tuple[Tensor, Tensor]:
        """Places of this rank's rows in a job, int64, and which are padding."""
        config = self.reader.config
        rows, padding = self.share.padded_rows(config.batch_size)
        starts = torch.arange(config.batches_per_job).unsqueeze(1) * config.batch_size
        return (starts + rows).flatten(), padding.repeat(config.batches_per_job)
