"""From the placement's configuration and the ranks there are to a plan: who lives where, in how much memory, and why.

::

    ranks = replicate * shard            one rank = one process with one training device

    shard = 1 (single, ddp)              shard = 2, replicate = 2 (fsdp2)
    rank 0 [ whole backbone ] heads      rank 0 [ half ] heads  rank 1 [ half ] heads     one backbone copy
    rank 1 [ whole backbone ] heads      rank 2 [ half ] heads  rank 3 [ half ] heads     the other one

:func:`resolve` needs no process group, no weights and no GPU: every rank computes the same plan from the configuration
and its launcher's variables, and refuses an impossible one before anything is built or any rank waits for another.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import torch
from hydra.utils import get_class

from nexus_lightning.config import ConfigError, NexusConfig, TenantConfig, split_head
from nexus_lightning.memory import estimate, gigabytes
from nexus_lightning.monitoring.banner import text_table
from nexus_lightning.objectives import algorithm_of
from nexus_lightning.objectives.base import algorithm_class

#: Share of a device's memory that ``auto`` fills: activations, the allocator's gaps and the CUDA context need the rest.
FILL = 0.9
#: Bytes per element of ``backbone.param_dtype``.
PARAM_BYTES = {"fp32": 4, "bf16": 2}
#: Parts of a device's memory, in the order of table and picture.
PARTS = ("backbone", "gathered", "heads", "optimizer", "reduction", "served heads", "inference backbone")


@dataclass(frozen=True)
class Devices:
    """The ranks of a launch and what each has.

    Attributes:
        kind: cpu, cuda or mps.
        world_size: ranks.
        ranks_per_node: ranks on one machine.
        memory_bytes: of one training device; of the whole machine when ``kind`` is cpu.
        devices_per_node: devices of this kind on one machine (1 for a cpu).
        host_bytes: memory of one machine; None: not known, not checked.
    """

    kind: str
    world_size: int
    ranks_per_node: int
    memory_bytes: int
    devices_per_node: int
    host_bytes: int | None

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    @classmethod
    def here(cls, accelerator: str = "auto") -> Devices:
        """What the launcher's variables (torchrun's) and this machine say; one rank without a launcher."""
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        host = psutil.virtual_memory().total
        if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
            memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
            return cls("cuda", world_size, ranks_per_node, memory, torch.cuda.device_count(), host)
        if accelerator in ("auto", "gpu", "mps") and torch.backends.mps.is_available():
            return cls("mps", world_size, ranks_per_node, host, 1, host)
        if accelerator not in ("auto", "cpu"):
            raise ConfigError([f"placement.accelerator={accelerator}: there is none on this machine; use auto or cpu"])
        return cls("cpu", world_size, ranks_per_node, host, 1, host)


def common_devices(by_rank: Sequence[Devices]) -> Devices:
    """The launch as all ranks may count on it: the smallest memory that any of them has.

    Raises:
        ConfigError: their devices are not of one kind.
    """
    kinds = {devices.kind for devices in by_rank}
    if len(kinds) > 1:
        found = ", ".join(f"rank {rank} {devices.kind}" for rank, devices in enumerate(by_rank))
        raise ConfigError([f"placement.accelerator: the ranks find different devices ({found}); use cpu, or fix them"])
    hosts = [devices.host_bytes for devices in by_rank if devices.host_bytes is not None]
    return replace(
        by_rank[0], memory_bytes=min(d.memory_bytes for d in by_rank), host_bytes=min(hosts) if hosts else None
    )


@dataclass(frozen=True)
class DeviceUse:
    """What one device holds (all devices of one row hold the same).

    Attributes:
        name: for people.
        count: how many such devices there are.
        parts: bytes by part, see :data:`PARTS`.
        capacity_bytes: the device's memory; None: not known.
        budget_bytes: what queues and the feature store may take on top, at most (bounded by the configuration).
    """

    name: str
    count: int
    parts: dict[str, int]
    capacity_bytes: int | None
    budget_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def fill(self) -> float:
        """Needed over there is; 0 when that is not known."""
        return 0.0 if self.capacity_bytes is None else self.needed_bytes / self.capacity_bytes


@dataclass(frozen=True)
class Plan:
    """A placement that can run.

    Attributes:
        strategy: single, ddp or fsdp2 (never auto).
        kind: cpu, cuda or mps.
        world_size, ranks_per_node: of the launch.
        replicate, shard: backbone copies, and ranks that hold one together.
        heads_shard: 1: every head whole on every rank.
        inference: training, or the device that holds a whole copy of the backbone for rollouts and evaluation.
        environments: tenant -> the ranks that run its simulators, in the order of their shares.
        simulators: tenant -> how many of its simulators each rank runs.
        batches: tenant -> rows of one optimizer step over all ranks, as text: demonstrations are cut into equal shares,
            padded with zero-weight rows; of a rollout's minibatch every rank trains the rows it holds.
        devices: memory of every kind of device; empty when no estimate was made (one rank: admission looks at the
            memory that is really free).
        reason: one sentence: who chose this and why.
    """

    strategy: str
    kind: str
    world_size: int
    ranks_per_node: int
    replicate: int
    shard: int
    heads_shard: int
    inference: str
    environments: dict[str, tuple[int, ...]]
    simulators: dict[str, tuple[int, ...]]
    batches: dict[str, str]
    devices: tuple[DeviceUse, ...]
    reason: str

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    @property
    def signature(self) -> str:
        """Hash of everything that the ranks must agree on (not of their memory, which may differ)."""
        agreed = {k: v for k, v in self.to_dict().items() if k not in ("devices", "reason")}
        return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()[:16]

    def settle(self, config: NexusConfig) -> NexusConfig:
        """``config`` with everything that this plan chose filled in."""
        placement = replace(
            config.placement,
            strategy=self.strategy,
            backbone=replace(config.placement.backbone, replicate=self.replicate, shard=self.shard),
            environments={name: list(ranks) for name, ranks in self.environments.items()},
        )
        return replace(config, placement=placement)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values."""
        devices = [{**asdict(d), "needed_bytes": d.needed_bytes} for d in self.devices]
        return {**asdict(self), "devices": devices}

    def summary(self) -> dict[str, object]:
        """The banner's line."""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks on {_count(self.num_nodes, 'machine')}"
        backbone = "whole on every rank" if self.shard == 1 else f"{self.replicate} x 1/{self.shard}"
        heads = "whole" if self.heads_shard == 1 else f"1/{self.heads_shard} per rank"
        return {self.strategy: f"on {ranks}", "backbone": backbone, "heads": heads, "inference on": self.inference}

    def table(self) -> str:
        """Who lives where, and how much memory each device needs."""
        lines = [f"placement  {', '.join(f'{k} {v}' for k, v in self.summary().items())}", f"because    {self.reason}"]
        rows = []
        for tenant, batch in self.batches.items():
            per_rank = self.simulators.get(tenant, ())
            rows.append((tenant, batch, sum(per_rank) or "none", _where(per_rank)))
        lines += ["", text_table(("tenant", "rows per optimizer step", "simulators", "on ranks"), rows)]
        if self.devices:
            parts = [p for p in PARTS if any(p in d.parts for d in self.devices)]
            cells = [
                (
                    f"{d.count} x {d.name}",
                    *(gigabytes(d.parts[p]) if d.parts.get(p) else "" for p in parts),
                    gigabytes(d.needed_bytes),
                    "not known" if d.capacity_bytes is None else gigabytes(d.capacity_bytes),
                    f"+ {gigabytes(d.budget_bytes)}" if d.budget_bytes else "",
                )
                for d in self.devices
            ]
            columns = ("memory of each", *parts, "needed", "there is", "queues, store (at most)")
            lines += ["", text_table(columns, cells), "activations and simulators are not counted"]
        return "\n".join(lines)


def resolve(config: NexusConfig, devices: Devices | None = None, figures: dict[str, Any] | None = None) -> Plan:
    """Check the equation, choose what is ``auto``, place everybody.

    Args:
        config: validated (see :func:`nexus_lightning.config.validate`).
        devices: the ranks and their devices; None: this launch's.
        figures: what :func:`nexus_lightning.memory.estimate` returned; None: estimated when there are several ranks
            (with one, admission looks at the memory that is really free).

    Raises:
        ConfigError: the placement is impossible; everything that is wrong with it.

    Example:
        >>> config = NexusConfig()
        >>> config.placement.strategy = "ddp"
        >>> config.placement.backbone.shard = 2
        >>> resolve(config, Devices("cpu", 4, 4, 8_000_000_000, 1, 8_000_000_000))
        Traceback (most recent call last):
        nexus_lightning.config.ConfigError: the configuration cannot run:
          - placement.backbone.shard=2: ddp holds the whole backbone on every rank; use placement=fsdp2 to shard it
    """
    placement = config.placement
    devices = Devices.here(placement.accelerator) if devices is None else devices
    environments = {n: environment_ranks(config, n, t, devices.world_size) for n, t in config.tenants.items()}
    environments = {name: ranks for name, ranks in environments.items() if ranks}
    problems = _launch_problems(config, devices) + _degree_problems(config, devices.world_size)
    if problems := problems + _share_problems(config, environments):
        raise ConfigError(problems)
    if figures is None and devices.world_size > 1:
        figures = estimate(config)
    if placement.strategy == "auto":
        strategy, replicate, shard, reason = _choose(config, devices, figures)
    else:
        strategy, reason = placement.strategy, f"placement.strategy={placement.strategy} was asked for"
        replicate, shard = _degrees(config, devices.world_size)
    if problems := _shard_problems(config, strategy, shard):
        raise ConfigError(problems)
    simulators = {n: _simulators(config.tenants[n], ranks, devices.world_size) for n, ranks in environments.items()}
    plan = Plan(
        strategy=strategy,
        kind=devices.kind,
        world_size=devices.world_size,
        ranks_per_node=devices.ranks_per_node,
        replicate=replicate,
        shard=shard,
        heads_shard=placement.heads.shard,
        inference=placement.inference.device,
        environments=environments,
        simulators=simulators,
        batches={n: _batch(t, devices.world_size) for n, t in config.tenants.items()},
        devices=() if figures is None else _memory(config, devices, figures, shard),
        reason=reason,
    )
    problems = [_memory_problem(plan, device) for device in plan.devices if device.fill > 1]
    limit = placement.max_simulators_per_rank
    for rank in range(devices.world_size):
        held = sum(per_rank[rank] for per_rank in simulators.values())
        if limit is not None and held > limit:
            problems.append(
                f"placement.max_simulators_per_rank={limit}: rank {rank} would run {held}; lower num_envs or spread "
                "tenants with placement.environments"
            )
    if problems:
        raise ConfigError(problems)
    return plan


# ------------------------------------------------------------------------------------------------------- the equation


def _launch_problems(config: NexusConfig, devices: Devices) -> list[str]:
    """What cannot be whatever the strategy."""
    placement, problems = config.placement, []
    if devices.world_size % devices.ranks_per_node:
        problems.append(
            f"{devices.world_size} ranks with {devices.ranks_per_node} on this machine: every machine must run equally "
            "many; give all the same --nproc-per-node"
        )
    if devices.kind != "cpu" and devices.ranks_per_node > devices.devices_per_node:
        problems.append(
            f"{devices.ranks_per_node} ranks on a machine with {devices.devices_per_node} {devices.kind} devices: "
            f"launch with --nproc-per-node={devices.devices_per_node}, or set placement.accelerator=cpu"
        )
    for tenant, ranks in placement.environments.items():
        if max(ranks) >= devices.world_size:
            last = devices.world_size - 1
            problems.append(f"placement.environments.{tenant}={ranks}: the ranks of this launch are 0 to {last}")
    where, device = f"placement.inference.device={placement.inference.device}", placement.inference.device
    if device.startswith("cuda:"):
        index = int(device.removeprefix("cuda:"))
        if devices.kind != "cuda":
            problems.append(f"{where}: training runs on {devices.kind}; choose training or cpu")
        elif index >= devices.devices_per_node:
            problems.append(f"{where}: this machine has {devices.devices_per_node} cuda devices, counted from 0")
        elif index < devices.ranks_per_node:
            problems.append(
                f"{where}: rank {index} of this machine trains there; choose training, or a device from "
                f"cuda:{devices.ranks_per_node} on"
            )
    return problems


def _degrees(config: NexusConfig, world_size: int) -> tuple[int, int]:
    """(replicate, shard) as configured; a null degree follows from the other one."""
    backbone, strategy = config.placement.backbone, config.placement.strategy
    if backbone.shard is not None:
        shard = backbone.shard
    elif strategy in ("single", "ddp"):
        shard = 1
    else:
        shard = world_size // (backbone.replicate or 1)
    return backbone.replicate or world_size // max(shard, 1), shard


def _degree_problems(config: NexusConfig, world_size: int) -> list[str]:
    strategy, backbone = config.placement.strategy, config.placement.backbone
    if strategy == "single" and world_size > 1:
        return [f"placement.strategy=single: this launch has {world_size} ranks; use placement=auto, ddp or fsdp2"]
    if strategy in ("single", "ddp") and backbone.shard not in (None, 1):
        where = "its one rank" if strategy == "single" else "every rank"
        return [
            f"placement.backbone.shard={backbone.shard}: {strategy} holds the whole backbone on {where}; "
            "use placement=fsdp2 to shard it"
        ]
    if strategy == "auto" and backbone.replicate is None and backbone.shard is None:
        return []
    replicate, shard = _degrees(config, world_size)
    if replicate * shard == world_size:
        return []
    return [
        f"placement.backbone: replicate={replicate} * shard={shard} = {replicate * shard}, but this launch has "
        f"{_count(world_size, 'rank')}; leave one of the two null, or launch {replicate * shard}"
    ]


def _shard_problems(config: NexusConfig, strategy: str, shard: int) -> list[str]:
    placement, problems = config.placement, []
    heads = placement.heads.shard
    if heads not in (1, shard):
        also = f" or {shard}" if shard > 1 else ""
        problems.append(f"placement.heads.shard={heads}: heads are whole, or sharded as the backbone is; use 1{also}")
    if strategy != "fsdp2":
        default = type(placement.backbone)()
        for name in ("reshard_after_forward", "param_dtype", "cpu_offload"):
            value = getattr(placement.backbone, name)
            if value != getattr(default, name):
                problems.append(f"placement.backbone.{name}={value}: only fsdp2 reads it, this is {strategy}")
    return problems


def _choose(config: NexusConfig, devices: Devices, figures: dict[str, Any] | None) -> tuple[str, int, int, str]:
    """``auto``: whole while it fits, else the fewest ranks per copy that fit, within one machine when possible."""
    world, backbone = devices.world_size, config.placement.backbone
    if world == 1:
        return "single", 1, 1, "auto: one rank"
    assert figures is not None
    if backbone.shard is not None or backbone.replicate is not None:
        replicate, shard = _degrees(config, world)
        return "ddp" if shard == 1 else "fsdp2", replicate, shard, "auto: placement.backbone gives the degrees"
    size = f"backbone ({gigabytes(figures['backbone']['bytes'])}) and {_count(len(figures['tenants']), 'tenant')}"
    room = f"{FILL:.0%} of {gigabytes(devices.memory_bytes)}"
    if devices.kind != "cuda" and devices.ranks_per_node > 1:
        room += f" that {devices.ranks_per_node} ranks share"
    fill = {}
    for shard in (1, *_shards(devices)):
        fill[shard] = max(d.fill for d in _memory(config, devices, figures, shard))
        if fill[shard] <= FILL:
            break
    else:  # nothing fits well: the tightest that may (the caller refuses what does not fit at all)
        shard = min(fill, key=lambda degree: fill[degree])
        strategy = "ddp" if shard == 1 else "fsdp2"
        why = f"auto: {size} fit into {room} in no way; {strategy} with {_count(shard, 'rank')} per copy needs least"
        return strategy, world // shard, shard, why
    if shard == 1:
        return "ddp", world, 1, f"auto: {size} fit whole into {room}, so every rank holds them"
    over = "" if shard <= devices.ranks_per_node else ", which no machine has alone"
    why = f"auto: {size} do not fit whole into {room}; with {shard} ranks per copy{over} they do"
    return "fsdp2", world // shard, shard, why


def _shards(devices: Devices) -> list[int]:
    """Degrees above 1 that keep a copy on one machine, then those that span whole machines; fewest ranks first."""
    world, per_node = devices.world_size, devices.ranks_per_node
    degrees = [s for s in range(2, world + 1) if world % s == 0]
    return [s for s in degrees if (per_node % s == 0 if s <= per_node else s % per_node == 0)]


# ---------------------------------------------------------------------------------------------------- who lives where


def _batch(tenant: TenantConfig, world_size: int) -> str:
    """Rows of one optimizer step and how the ranks share them."""
    if tenant.dataset is None:
        assert tenant.algorithm is not None
        return f"{tenant.algorithm.minibatch_size} of all ranks' rollouts"
    rows = tenant.dataset.batch_size
    each = -(-rows // world_size)
    padding = each * world_size - rows
    return f"{rows} = {world_size} x {each}" + (f" - {padding} of padding" if padding else "")


def environment_ranks(config: NexusConfig, name: str, tenant: TenantConfig, world_size: int) -> tuple[int, ...]:
    """The ranks that run the tenant's simulators; none when it has no rollouts and no evaluation.

    A tenant that the configuration does not name is spread evenly over as many ranks as can share equally.
    """
    if tenant.environment is None or (tenant.task != "rl" and not tenant.eval.episodes):
        return ()
    if name in config.placement.environments:
        return tuple(config.placement.environments[name])
    if tenant.task == "rl":
        groups = tenant.environment.num_envs // _group_size(tenant)
        count = max(k for k in range(1, world_size + 1) if groups % k == 0)
    else:
        count = min(world_size, 1 if config.trainer.fast_dev_run else tenant.eval.episodes)
    return tuple(i * world_size // count for i in range(count))


def _group_size(tenant: TenantConfig) -> int:
    return algorithm_class(tenant.algorithm).group_size(tenant.algorithm) if tenant.task == "rl" else 1


def _share_problems(config: NexusConfig, environments: dict[str, tuple[int, ...]]) -> list[str]:
    """Rollouts are cut into equal shares of whole groups (GRPO compares neighbours)."""
    problems = []
    for name, ranks in environments.items():
        tenant = config.tenants[name]
        if tenant.task != "rl":
            continue
        assert tenant.environment is not None
        group = _group_size(tenant)
        if (tenant.environment.num_envs // group) % len(ranks):
            unit = "" if group == 1 else f" in groups of {group}"
            problems.append(
                f"tenants.{name}.environment.num_envs={tenant.environment.num_envs}: {len(ranks)} ranks cannot share "
                f"them equally{unit}; use a multiple of {group * len(ranks)}, or other ranks than "
                f"placement.environments.{name}={list(ranks)}"
            )
    return problems


def _simulators(tenant: TenantConfig, ranks: tuple[int, ...], world_size: int) -> tuple[int, ...]:
    """How many of the tenant's simulators each rank runs: a rollout's are shared, an evaluation's are per rank."""
    assert tenant.environment is not None
    each = tenant.environment.num_envs // len(ranks) if tenant.task == "rl" else tenant.eval.num_envs
    return tuple(each if rank in ranks else 0 for rank in range(world_size))


# ------------------------------------------------------------------------------------------------------------- memory


def _memory(config: NexusConfig, devices: Devices, figures: dict[str, Any], shard: int) -> tuple[DeviceUse, ...]:
    """Bytes of every part on every kind of device for one shard degree."""
    placement, held = config.placement, figures["backbone"]
    tenants = list(figures["tenants"].values())
    heads_shard = placement.heads.shard
    parameter_bytes = held["bytes"] - held["buffer_bytes"]
    backbone = {"backbone": parameter_bytes // shard + held["buffer_bytes"]}
    train: dict[str, int] = {}
    offloaded: dict[str, int] = {}
    if shard == 1:
        train |= backbone
    else:
        (offloaded if placement.backbone.cpu_offload else train).update(backbone)
        train["gathered"] = _gathered_bytes(config, held)
    train["heads"] = sum(t["weights_bytes"] + t["ema_bytes"] for t in tenants) // heads_shard
    if heads_shard > 1:  # the whole replicas, and the head of the tenant that trains, gathered
        train["heads"] += sum(t["weights_bytes"] for t in tenants)
        train["heads"] += max((t["weights_bytes"] for t in tenants), default=0)
    train["optimizer"] = sum(t["gradient_bytes"] + t["adam_bytes"] for t in tenants) // heads_shard
    if devices.world_size > 1 and heads_shard == 1:  # the flat buffer of the one all_reduce
        train["reduction"] = max((t["gradient_bytes"] for t in tenants), default=0)
    serve = {"served heads": sum(t["served_bytes"] for t in tenants)}
    if placement.inference.device != "training" or (shard > 1 and needs_whole_backbone(config)):
        serve["inference backbone"] = held["bytes"]
    if placement.inference.device == "training":
        train, serve = train | serve, {}
    queues = config.queues.training.max_gb_per_tenant * len(tenants)
    store = config.feature_store.budget_gb if config.feature_store.store == "memory" else 0.0
    budget = int((queues + store) * 1e9) * devices.ranks_per_node
    host = _times(offloaded, devices.ranks_per_node)
    if placement.inference.device == "cpu":
        host = _added(host, _times(serve, devices.ranks_per_node))
    if devices.kind != "cuda":
        host = _added(host, _times(train, devices.ranks_per_node))
        each = f"machine with {_count(devices.ranks_per_node, 'rank')}"
        return (DeviceUse(each, devices.num_nodes, host, devices.host_bytes, budget),)
    uses = [DeviceUse("training GPU", devices.world_size, train, devices.memory_bytes)]
    if placement.inference.device.startswith("cuda:"):
        name, parts = f"inference GPU ({placement.inference.device})", _times(serve, devices.ranks_per_node)
        uses.append(DeviceUse(name, devices.num_nodes, parts, devices.memory_bytes))
    uses.append(DeviceUse("machine (host memory)", devices.num_nodes, host, devices.host_bytes, budget))
    return tuple(uses)


def _gathered_bytes(config: NexusConfig, held: dict[str, Any]) -> int:
    """Whole weights that a rank of a sharded backbone holds during a forward.

    The parameters outside every unit stay gathered through the forward; of the units two at a time, because FSDP2
    gathers the next one while this one computes. Without ``reshard_after_forward`` all stay.
    """
    dtype = config.placement.backbone.param_dtype
    stored = (held["bytes"] - held["buffer_bytes"]) / held["parameters"]
    size = stored if dtype is None else PARAM_BYTES[dtype]
    if not config.placement.backbone.reshard_after_forward:
        return int(held["parameters"] * size)
    return int((held["root_parameters"] + 2 * held["unit_parameters"]) * size)


def _times(parts: dict[str, int], factor: int) -> dict[str, int]:
    return {name: size * factor for name, size in parts.items()}


def _added(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in (*a, *(n for n in b if n not in a))}


def _memory_problem(plan: Plan, device: DeviceUse) -> str:
    largest = max(device.parts, key=lambda part: device.parts[part])
    if largest == "inference backbone" and plan.inference == "training":
        remedy = (
            "rollouts, evaluations and stored features need the backbone whole beside the shards: give it a device of "
            "its own (placement.inference.device=cpu), or use features.reuse=never and eval.episodes=0 (sft)"
        )
    elif largest == "inference backbone":
        remedy = (
            "every rank has a copy of its own there; launch fewer ranks, or set placement.inference.device=training"
        )
    elif plan.world_size == 1:
        remedy = "take a smaller backbone, or launch more ranks with placement=fsdp2"
    elif plan.shard == 1:
        remedy = "use placement=fsdp2 to shard the backbone"
    elif plan.shard < plan.world_size:
        remedy = f"shard over more ranks (placement.backbone.shard={plan.world_size})"
    elif plan.heads_shard == 1:
        remedy = f"shard the heads too (placement.heads.shard={plan.shard}), launch more ranks, or take fewer tenants"
    else:
        remedy = "launch more ranks, or take fewer tenants or a smaller backbone"
    assert device.capacity_bytes is not None
    needed, there_is = gigabytes(device.needed_bytes), gigabytes(device.capacity_bytes)
    most = f"{largest} ({gigabytes(device.parts[largest])}) takes most"
    return f"placement: {device.name} needs {needed} and has {there_is}; {most}; {remedy}"


# --------------------------------------------------------------------------------------------------------------- texts


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _ranks(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0-3, 6``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"


def _where(per_rank: tuple[int, ...]) -> str:
    """``ranks 0-7: 2 each; rank 8: 1``."""
    by_count: dict[int, list[int]] = {}
    for rank, number in enumerate(per_rank):
        if number:
            by_count.setdefault(number, []).append(rank)
    each = {count: " each" if len(ranks) > 1 else "" for count, ranks in by_count.items()}
    return "; ".join(f"{_ranks(ranks)}: {count}{each[count]}" for count, ranks in by_count.items())


def needs_whole_backbone(config: NexusConfig) -> bool:
    """Whether some tenant runs the backbone outside the actor's steps."""
    for tenant in config.tenants.values():
        evaluated = tenant.environment is not None and tenant.eval.episodes > 0
        stored = tenant.task != "rl" and tenant.features.reuse != "never"
        head: Any = get_class(split_head(tenant.head)[0])
        if tenant.task == "rl" or evaluated or stored or head.continues_backbone:
            return True
    return False


def sharding_problems(config: NexusConfig, plan: Plan) -> list[str]:
    """What a plan with sharded heads cannot have."""
    if plan.heads_shard == 1:
        return []
    problems = []
    for name, tenant in config.tenants.items():
        where = f"tenants.{name}: placement.heads.shard={plan.heads_shard}"
        if tenant.head.get("ema_decay") is not None:
            problems.append(f"{where}: head.ema_decay averages whole weights after every step; set it to null")
        settings = algorithm_of(tenant)
        algorithm = algorithm_class(settings)
        if tenant.task == "rl" and algorithm.waits_for_actor(settings):
            problems.append(f"{where}: algorithm.proximal runs the head outside the steps; set it to false")
        if algorithm.has_networks():
            problems.append(
                f"{where}: algorithm {algorithm.__name__} has networks beside the head, which are not sharded; choose "
                "another algorithm"
            )
        if tenant.task == "rl" and name in plan.environments and len(plan.environments[name]) < plan.world_size:
            problems.append(
                f"{where}: every rank must run the head, so every rank needs simulators of it; remove "
                f"placement.environments.{name}"
            )
    return problems


def rank_problems(config: NexusConfig, plan: Plan) -> list[str]:
    """What a plan may hold and a run cannot do."""
    del plan
    device = config.placement.inference.device
    if device == "training":
        return []
    heads = {name: split_head(tenant.head)[0] for name, tenant in config.tenants.items()}
    return [
        f"tenants.{name}.head: {target.rsplit('.', 1)[-1]} continues the backbone that trains; use "
        f"placement.inference.device=training instead of {device}"
        for name, target in heads.items()
        if getattr(get_class(target), "continues_backbone", False)
    ]
