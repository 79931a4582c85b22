"""One tenant from its config to everything mutable it owns: spec -> slot.

A slot is private: head, normaliser, optimizer, LR schedule, random state, policy version, data cursor. Nothing in it
depends on which other tenants exist or in which order they registered.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import threading
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, cast

import torch
from hydra.utils import get_class
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nexus_lightning.backbone import Backbone, SharedBackbone
from nexus_lightning.checkpoint import Payload
from nexus_lightning.config import IDLE, TenantConfig, lr_scheduler_of, optimizer_of, schema_of, split_head
from nexus_lightning.head import ActionHead, choose_kind
from nexus_lightning.objectives import algorithm_of
from nexus_lightning.objectives.base import Networks, algorithm_class
from nexus_lightning.optim import make_optimizer
from nexus_lightning.schema import NormalizationStats, Normalizer, TenantSchema
from nexus_lightning.shards import load_whole, shard_like, whole

_registrations = itertools.count()

#: Counters of a slot that its payload keeps.
COUNTERS = (
    "policy_version",
    "jobs_completed",
    "optimizer_steps",
    "cursor",
    "demonstrations_drawn",
    "quarantined",
    "evaluations",
    "ended",
    "workload",
)


class NonFinite(ArithmeticError):
    """Something of a tenant holds NaN or infinity: it is not stepped with, published or saved."""


class NonFiniteLoss(NonFinite):
    """Raised before the gradients."""


class NonFiniteGradient(NonFinite):
    """Raised before the optimizer step."""


class NonFiniteWeights(NonFinite):
    """Raised before publication and before writing."""


@dataclass(frozen=True)
class TenantSpec:
    """A validated tenant, compiled: what to build, from which seed."""

    name: str
    config: TenantConfig
    schema: TenantSchema
    seed: int

    @classmethod
    def compile(cls, name: str, config: TenantConfig, run_seed: int) -> TenantSpec:
        seed = config.seed if config.seed is not None else derive_seed(run_seed, name)
        return cls(name, config, schema_of(config.schema), seed)


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any parts; independent streams for independent names."""
    text = ":".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


class TenantRng:
    """The tenant's own random stream for its training steps.

    Inside :meth:`scope` the global torch generator carries the tenant's state, so dropout and a head's plain
    ``torch.randn`` draw from the tenant's stream and from nothing else. On a GPU the device's generator is seeded from
    it at every entry, so the stream and a resumed run do not depend on other tenants there either. Other threads of
    this program never draw from the global generators (they hold generators of their own), so the swap is safe.
    """

    def __init__(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def scope(self, seed: int | None = None) -> Iterator[None]:
        """Draw from the tenant's stream; with ``seed`` from a stream of that seed instead, and leave the tenant's as it
        is (several ranks keep one common stream, and draw what belongs to their own rows from streams of their own)."""
        outside = torch.get_rng_state()
        on_gpu = torch.cuda.is_initialized()
        outside_gpu = torch.cuda.get_rng_state() if on_gpu else None
        if seed is None:
            torch.set_rng_state(self.state)
        else:
            torch.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(int(torch.randint(2**62, ())))
        try:
            yield
        finally:
            if seed is None:
                self.state = torch.get_rng_state()
            torch.set_rng_state(outside)
            if outside_gpu is not None:
                torch.cuda.set_rng_state(outside_gpu)


class Demonstrations(Protocol):
    """A tenant's demonstrations in an order that depends on its seed alone."""

    def read(self, start: int, count: int) -> TensorDict:
        """Samples ``start .. start + count - 1`` with features, ``[count]``."""
        ...


class PassCounter:
    """Observations of a tenant's training data, and how often the backbone saw them. Thread safe.

    Example:
        >>> counter = PassCounter()
        >>> counter.add(observed=10, encoded=10)   # while acting
        >>> counter.add(encoded=10)                # again by the actor
        >>> counter.passes_per_observation
        2.0
    """

    def __init__(self) -> None:
        self.observed = self.encoded = 0
        self._lock = threading.Lock()

    def add(self, observed: int = 0, encoded: int = 0) -> None:
        """``observed`` new observations; ``encoded`` rows through the backbone."""
        with self._lock:
            self.observed += observed
            self.encoded += encoded

    @property
    def passes_per_observation(self) -> float:
        """Mean number of backbone passes per observation so far; 0 before the first one."""
        return self.encoded / self.observed if self.observed else 0.0


@dataclass
class TenantSlot:
    """Everything mutable of one tenant. ``registration_id`` is never reused inside a process."""

    spec: TenantSpec
    head: ActionHead
    normalizer: Normalizer
    rng: TenantRng
    registration_id: int = field(default_factory=lambda: next(_registrations))
    optimizer: torch.optim.Optimizer | None = None
    scheduler: LRScheduler | None = None
    policy_version: int = 0
    jobs_completed: int = 0
    optimizer_steps: int = 0
    cursor: int = 0  # next training job's index in the tenant's data stream; jobs before it are trained
    demonstrations_drawn: int = 0  # samples that co-training has taken from the demonstrations
    quarantined: str | None = None  # the reason, once a failure has taken the tenant out of the run
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False  # services: its workload is over (or it never had one); the next one starts fresh
    workload: str | None = None  # services: the id of its workload, the last one when it has ended
    ema: AveragedModel | None = None  # running average of the head's weights (head.ema_decay)
    replica: ActionHead | None = None  # of a head in shards: the whole of it, as of the last completed job
    critic: Networks | None = None  # networks beside the head that its algorithm has
    passes: PassCounter = field(default_factory=PassCounter)  # of its present work, through the backbone
    demonstrations: Demonstrations | None = None  # what an RL tenant mixes into its training

    def __post_init__(self) -> None:
        decay = split_head(self.spec.config.head)[2].get("ema_decay")
        if decay is not None:
            average = get_ema_multi_avg_fn(float(decay))
            self.ema = AveragedModel(self.head, multi_avg_fn=average, use_buffers=True).requires_grad_(False)

    @property
    def serving_head(self) -> ActionHead:
        """What is published, evaluated and exported: the averaged head where there is one, else the trained one."""
        if self.replica is not None:
            return self.replica
        return self.head if self.ema is None else cast(ActionHead, self.ema.module)

    @property
    def name(self) -> str:
        return self.spec.name

    def start_workload(self, config: TenantConfig, workload: str | None = None) -> None:
        """Another piece of work for the same policy (services): head, normaliser, average, version and random state go
        on; optimizer, schedule, Q networks, data cursor and counters are fresh."""
        self.spec = replace(self.spec, config=config)
        self.critic = build_critic(config, self.head, derive_seed(self.spec.seed, "critic"))
        self.jobs_completed = self.optimizer_steps = self.cursor = self.demonstrations_drawn = 0
        self.evaluations, self.quarantined, self.ended, self.workload = [], None, False, workload
        self.head.zero_grad()
        self.build_optimizer()

    def build_optimizer(self) -> None:
        """An optimizer over exactly this tenant's parameters (bound here, never by ``requires_grad``), its schedule."""
        critic = [p for n, p in self.head.named_parameters() if n.startswith("value_head.")]
        if self.critic is not None:
            critic += [p for p in self.critic.parameters() if p.requires_grad]
        policy = [p for n, p in self.head.named_parameters() if not n.startswith("value_head.")]
        config = self.spec.config
        self.optimizer, self.scheduler = make_optimizer(optimizer_of(config), lr_scheduler_of(config), policy, critic)

    def _fast_forward(self, steps: int) -> None:
        """The schedule of a fresh optimizer at the steps that are done.

        Raises:
            ValueError: it has an end, before them.
        """
        assert self.scheduler is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            for _ in range(steps):
                try:
                    self.scheduler.step()
                except ValueError as error:
                    where = f"tenant {self.name!r}: {steps} optimizer steps are done"
                    raise ValueError(f"{where}, its lr_scheduler ends before that: {error}") from error

    @property
    def grad_clip_norm(self) -> float | None:
        value = split_head(self.spec.config.head)[2].get("grad_clip_norm")
        return None if value is None else float(value)

    # ------------------------------------------------------------------------------------------- payload

    def tensors(self) -> dict[str, Tensor]:
        """A payload's content: tensors under ``head.``, ``normalizer.``, and ``ema.`` and ``critic.`` if there are."""
        return {f"{prefix}.{k}": v for prefix, module in self._parts() for k, v in module.state_dict().items()}

    def check_finite(self, optimizer: dict[str, Any] | None = None) -> None:
        """What the payload holds is numbers: the tensors, and a given :meth:`optimizer_state`.

        Raises:
            NonFiniteWeights: names the first tensor that does not.
        """
        tensors = self.tensors()
        for index, moments in (optimizer or {"state": {}})["state"].items():
            tensors |= {f"optimizer.{index}.{k}": v for k, v in moments.items() if isinstance(v, Tensor)}
        tensors = {name: v for name, v in tensors.items() if v.is_floating_point()}
        # the norm of all is several times cheaper than a look at each, and finite unless something is not (or is huge)
        if math.isfinite(torch.nn.utils.get_total_norm(tensors.values())):
            return
        for name, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                where = f"tenant {self.name!r}, optimizer step {self.optimizer_steps}"
                raise NonFiniteWeights(f"{where}: {name} is not finite; lower the learning rate")

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Inverse of :meth:`tensors`; missing or unexpected names are errors."""
        for prefix, module in self._parts():
            part = {k.removeprefix(f"{prefix}."): v for k, v in tensors.items() if k.startswith(f"{prefix}.")}
            module.load_state_dict(part, strict=True)
            if module is self.replica:
                load_whole(self.head, part)

    def start_from(self, tensors: dict[str, Tensor]) -> None:
        """Begin with another payload's policy: its average where it has one, which also starts this slot's own.

        Q networks stay fresh unless the payload has some.
        """
        served = {k.removeprefix("ema.module."): v for k, v in tensors.items() if k.startswith("ema.module.")}
        if served:
            tensors = {k: v for k, v in tensors.items() if k.startswith("normalizer.")}
            tensors |= {f"head.{k}": v for k, v in served.items()}
        if self.ema is not None:
            head = {k.removeprefix("head."): v for k, v in tensors.items() if k.startswith("head.")}
            tensors = {**tensors, "ema.n_averaged": torch.zeros((), dtype=torch.long)}
            tensors |= {f"ema.module.{k}": v for k, v in head.items()}
        if not any(k.startswith("critic.") for k in tensors):
            tensors = {**tensors, **{k: v for k, v in self.tensors().items() if k.startswith("critic.")}}
        self.load_tensors(tensors)

    def optimizer_state(self) -> dict[str, Any]:
        """``Optimizer.state_dict()``, of a head in shards with whole tensors (a collective)."""
        assert self.optimizer is not None
        saved = self.optimizer.state_dict()
        if self.replica is None:
            return saved
        state = {index: {k: whole(v) for k, v in moments.items()} for index, moments in saved["state"].items()}
        return {**saved, "state": state}

    def refresh_replica(self) -> None:
        """The whole of a head in shards (a collective)."""
        assert self.replica is not None
        self.replica.load_state_dict({k: whole(v) for k, v in self.head.state_dict().items()})

    def _parts(self) -> list[tuple[str, nn.Module]]:
        head = self.head if self.replica is None else self.replica
        parts: list[tuple[str, nn.Module]] = [("head", head), ("normalizer", self.normalizer)]
        optional: list[tuple[str, nn.Module | None]] = [("ema", self.ema), ("critic", self.critic)]
        return parts + [(prefix, module) for prefix, module in optional if module is not None]

    def state(self) -> dict[str, Any]:
        """JSON-able counters and schedule."""
        assert self.scheduler is not None
        schedule: dict[str, Any] = {"last_epoch": self.scheduler.last_epoch}  # others follow from it, see load_state
        if isinstance(self.scheduler, LambdaLR):
            schedule = {k: v for k, v in self.scheduler.state_dict().items() if k != "lr_lambdas"}
        return {
            "lr_scheduler": schedule,
            **{name: getattr(self, name) for name in COUNTERS},
        }

    def load_state(self, state: dict[str, Any], optimizer: dict[str, Any], rng: Tensor) -> None:
        assert self.optimizer is not None and self.scheduler is not None
        schedule = state["lr_scheduler"]
        if isinstance(self.scheduler, LambdaLR):
            self.scheduler.load_state_dict({**schedule, "lr_lambdas": [None] * len(self.scheduler.lr_lambdas)})
        else:
            self._fast_forward(schedule["last_epoch"] - self.scheduler.last_epoch)
        self.optimizer.load_state_dict(optimizer)
        if self.replica is not None:
            for p, moments in self.optimizer.state.items():
                tensors = {k: v for k, v in moments.items() if isinstance(v, Tensor)}
                moments |= {k: shard_like(v, p) for k, v in tensors.items() if v.shape == p.shape}
        self.rng.state = rng
        for name in COUNTERS:
            setattr(self, name, state[name])

    def restore(self, payload: Payload) -> None:
        """Go on from a payload: weights, statistics, optimizer, schedule, random state, counters.

        Raises:
            ValueError: it is of another schema.
        """
        changed = TenantSchema(**payload.manifest["schema"]).differences(self.spec.schema)
        if changed:
            raise ValueError(
                f"tenant {self.name!r}: the checkpoint's schema differs from the configured one in {'; '.join(changed)}"
            )
        self.load_tensors(payload.tensors)
        assert payload.rng is not None
        self.load_state(payload.state, payload.optimizer, payload.rng)

    def resume(self, payload: Payload) -> None:
        """:meth:`restore` for a run that goes on: optimizer settings and schedule are the configuration's from the next
        step on, the schedule at the steps that are done. Unchanged ones leave every bit as it was.

        Raises:
            ValueError: see :meth:`restore`; or the schedule ends before the steps that are done.
        """
        self.restore(payload)
        assert self.optimizer is not None
        moments = self.optimizer.state
        self.build_optimizer()
        self.optimizer.state = moments
        self._fast_forward(payload.state["lr_scheduler"]["last_epoch"])

    def manifest(self, backbone: dict[str, Any], backbone_fingerprint: str) -> dict[str, Any]:
        """What a payload says about itself: enough to serve, evaluate and refuse it without the run."""
        return {
            "tenant": self.name,
            "task": self.spec.config.task,
            "policy_version": self.policy_version,
            "schema": asdict(self.spec.schema),
            "signature": self.spec.schema.signature,
            "prefix_signature": self.spec.schema.prefix_signature,
            "normalization": dict(self.normalizer.modes),
            "backbone": backbone,
            "backbone_fingerprint": backbone_fingerprint,
            "config": asdict(self.spec.config),
            "seed": self.spec.seed,
        }


def build_head(config: TenantConfig, schema: TenantSchema, backbone: Backbone, seed: int) -> ActionHead:
    """The tenant's head, initialised from its own seed whatever was built before it."""
    target, arguments, settings = split_head(config.head)
    cls = get_class(target)
    if not issubclass(cls, ActionHead):
        raise TypeError(f"{target} is not an ActionHead; subclass nexus_lightning.head.ActionHead")
    kind = choose_kind(cls.reads, backbone.kinds, settings.get("kind"))
    if cls.continues_backbone:
        arguments["backbone"] = SharedBackbone(backbone)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return cls(feature_spec=backbone.feature_spec(schema, kind), schema=schema, **arguments)


def build_critic(config: TenantConfig, head: ActionHead, seed: int) -> Networks | None:
    """The networks that the tenant's algorithm has beside the head, from the tenant's own seed; None without any."""
    if config.task == IDLE:
        return None
    settings = algorithm_of(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return algorithm_class(settings).networks(head, settings)


def build_slot(
    spec: TenantSpec,
    backbone: Backbone,
    state_stats: NormalizationStats | None = None,
    action_stats: NormalizationStats | None = None,
) -> TenantSlot:
    """Fresh slot: the same bits for the same (spec, backbone architecture), independent of other tenants."""
    head = build_head(spec.config, spec.schema, backbone, derive_seed(spec.seed, "init"))
    normalizer = Normalizer(spec.schema, state_stats, action_stats)
    critic = build_critic(spec.config, head, derive_seed(spec.seed, "critic"))
    return TenantSlot(spec, head, normalizer, TenantRng(derive_seed(spec.seed, "train")), critic=critic)
