"""LeRobotDataset -> training jobs of an SFT tenant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import DataLoader

from nexus_lightning.backbone import Backbone, VLAFeature
from nexus_lightning.config import DatasetConfig
from nexus_lightning.producers.base import Producer
from nexus_lightning.queues.jobs import JobState, Scheduler
from nexus_lightning.queues.training import TrainingQueue
from nexus_lightning.schema import NormalizationStats, TenantSchema
from nexus_lightning.tenant import TenantSlot, derive_seed

#: Stored dtype of cached features.
CACHE_DTYPE = torch.float16


def open_dataset(config: DatasetConfig, schema: TenantSchema, root: Path | None) -> Any:
    """LeRobotDataset whose items carry ``schema.chunk`` actions and ``action_is_pad``.

    Raises:
        ImportError: lerobot is missing, with the install line.
        ValueError: fps differs from ``schema.control_hz``.
    """
    try:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset, LeRobotDatasetMetadata
    except ImportError as error:
        raise ImportError("SFT needs lerobot: pip install 'lerobot[dataset]>=0.6.1,<0.7'") from error
    meta = LeRobotDatasetMetadata(config.repo_id, root=root)
    if abs(meta.fps - schema.control_hz) > 1e-6:
        raise ValueError(f"dataset {config.repo_id}: fps {meta.fps} differs from schema.control_hz={schema.control_hz}")
    return LeRobotDataset(
        config.repo_id,
        root=root,
        episodes=None if config.episodes is None else list(range(config.episodes)),
        delta_timestamps={"action": [i / meta.fps for i in range(schema.chunk)]},
        video_backend="pyav",
    )


def dataset_stats(dataset: Any, schema: TenantSchema) -> tuple[NormalizationStats, NormalizationStats]:
    """State and (internal-convention) action statistics of a LeRobotDataset."""
    stats = dataset.meta.stats

    def column(key: str, name: str) -> Tensor:
        return torch.as_tensor(stats[key][name], dtype=torch.float32).flatten()

    state = NormalizationStats(*(column("observation.state", n) for n in ("mean", "std", "min", "max")))
    low, high = schema.to_internal(column("action", "min")), schema.to_internal(column("action", "max"))
    action = NormalizationStats(
        schema.to_internal(column("action", "mean")),
        column("action", "std"),
        torch.minimum(low, high),
        torch.maximum(low, high),
    )
    return state, action


class DemonstrationReader:
    """Turns frame indices of a LeRobotDataset into batches with features.

    With ``cache_features`` every frame is decoded and encoded once, in :meth:`warm_up`, and then served from memory
    (the backbone is frozen: a feature never goes stale). Otherwise each batch is decoded and its images are encoded
    again.
    """

    def __init__(self, dataset: Any, config: DatasetConfig, schema: TenantSchema, backbone: Backbone) -> None:
        self.dataset, self.config, self.schema, self.backbone = dataset, config, schema, backbone
        self.cache: TensorDict | None = None
        self.passes = 0  # samples through the backbone

    def __len__(self) -> int:
        return len(self.dataset)

    def warm_up(
        self, stopping: Callable[[], bool] = lambda: False, progress: Callable[[int], None] | None = None
    ) -> bool:
        """Decode and encode the whole dataset once. Returns False when ``stopping`` said so before the end.

        Raises:
            ValueError: the cache would exceed ``max_cache_gb``.
        """
        parts = []
        loader = DataLoader(
            self.dataset,
            batch_size=32,
            collate_fn=lambda items: items,
            generator=torch.Generator(),  # a DataLoader without one would draw from the global stream
        )
        for items in loader:
            if stopping():
                return False
            batch = self._encode(items)
            batch["features"] = cast(VLAFeature, batch["features"]).apply(_compact)
            parts.append(batch)
            if len(parts) == 1:
                gigabytes = batch.bytes() / len(items) * len(self) / 1e9
                if gigabytes > self.config.max_cache_gb:
                    raise ValueError(
                        f"the feature cache of {self.config.repo_id} needs {gigabytes:.1f} GB, dataset.max_cache_gb is "
                        f"{self.config.max_cache_gb}; raise it or set dataset.cache_features=false"
                    )
            if progress is not None:
                progress(len(items))
        self.cache = _concatenate(parts)
        return True

    def read(self, rows: Tensor) -> TensorDict:
        """Batch ``[len(rows)]`` with ``features``, ``state``, ``actions`` (internal), ``is_pad``."""
        if self.config.cache_features:
            assert self.cache is not None, "warm_up comes first"
            batch = self.cache[rows]
        else:
            batch = self._encode([self.dataset[int(i)] for i in rows])
        return batch

    def _encode(self, items: list[dict[str, Any]]) -> TensorDict:
        size = len(items)
        observation = TensorDict({}, [size])
        for camera in self.schema.cameras:
            key = self.config.camera_keys.get(camera, f"observation.images.{camera}")
            images = torch.stack([item[key] for item in items])
            observation["image", camera] = (images * 255).round().to(torch.uint8)
        features = self.backbone(observation, [item["task"] for item in items], self.schema).to("cpu")
        self.passes += size
        return TensorDict(
            {
                "features": features,
                "state": torch.stack([item["observation.state"] for item in items]).float(),
                "actions": self.schema.to_internal(torch.stack([item["action"] for item in items]).float()),
                "is_pad": torch.stack([item["action_is_pad"] for item in items]),
            },
            [size],
        )


def _compact(value: Tensor) -> Tensor:
    return value.to(CACHE_DTYPE) if value.is_floating_point() else value


def _concatenate(parts: list[TensorDict]) -> TensorDict:
    """Concatenate batches whose text segments were padded to different lengths: pad all to the longest."""
    lengths: dict[str, int] = {}
    for part in parts:
        for name, mask in cast(VLAFeature, part["features"]).mask.items():
            lengths[name] = max(lengths.get(name, 0), mask.shape[1])
    for part in parts:
        features = cast(VLAFeature, part["features"])
        for name, length in lengths.items():
            missing = length - features.mask[name].shape[1]
            if missing:
                features.tokens[name] = torch.nn.functional.pad(features.tokens[name], (0, 0, 0, missing))
                features.mask[name] = torch.nn.functional.pad(features.mask[name], (0, missing))
    return torch.cat(parts)  # pyright: ignore[reportArgumentType, reportReturnType]


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

    def _permutation(self, epoch: int) -> Tensor:
        if self._epoch is None or self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "epoch", epoch))
            self._epoch = (epoch, torch.randperm(self.num_frames, generator=generator))
        return self._epoch[1]


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
    ) -> None:
        super().__init__(slot.name, on_failure)
        self.slot, self.reader, self.scheduler, self.queue = slot, reader, scheduler, queue
        self.on_progress = on_progress

    def produce(self) -> None:
        config = self.reader.config
        if config.cache_features:
            done = 0

            def progress(count: int) -> None:
                nonlocal done
                done += count
                self.on_progress(f"features {done}/{len(self.reader)}")

            if not self.reader.warm_up(self.stopping.is_set, progress):
                return
            self.on_progress("")
        order = FrameOrder(len(self.reader), derive_seed(self.slot.spec.seed, "order"))
        rows_per_job = config.batch_size * config.batches_per_job
        position = self.slot.cursor
        while not self.stopping.is_set() and self.scheduler.wants_more(self.tenant):
            job = self.scheduler.reserve(
                self.tenant,
                rows_per_job,
                domain=config.repo_id,
                schema_signature=self.slot.spec.schema.signature,
                metadata={"cursor": position + 1},
            )
            if job is None:
                self.scheduler.wait_for_room(self.tenant, timeout_s=0.5)
                continue
            try:
                batch = self.reader.read(order.rows(position * rows_per_job, rows_per_job))
                self.queue.put(job.partition_id, batch, tenant_id=self.tenant)
                self.scheduler.mark(job.job_id, JobState.READY)
            except Exception as error:
                self.scheduler.fail(job.job_id, f"{type(error).__name__}: {error}")
                raise
            position += 1
