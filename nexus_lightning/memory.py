"""How much memory a backbone and the tenants' heads need: reported in the banner, used by admission, estimated ahead.

Per trainable parameter a tenant holds, in float32: weight, gradient, two Adam moments (Kingma and Ba 2015), the copy
that inference serves and the spare copy that the next publication reuses; ``ema_decay`` adds the average. Networks
beside the head (Q networks) are not served: weight, slow copy, gradient, two moments.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from hydra.utils import get_class
from torch import nn

from nexus_lightning.backbone import Backbone, VLAFeature
from nexus_lightning.config import ConfigError, NexusConfig
from nexus_lightning.head import ActionHead
from nexus_lightning.monitoring.banner import count_text, text_table
from nexus_lightning.tenant import TenantSpec, build_critic, build_head, derive_seed

#: Freed memory up to this size stays with the process (:func:`keep_freed_memory`).
KEPT_BYTES = 2**30
#: Copies of a head besides the trained one: served and spare.
SERVED_COPIES = 2


@functools.cache
def keep_freed_memory() -> bool:
    """Let glibc keep up to :data:`KEPT_BYTES` that were freed, instead of handing them back to the kernel.

    A forward pass on a CPU frees tens of megabytes and asks for them again at once. Handed back, each page faults
    anew: some 800 faults per image of the default backbone, a tenth to a quarter of its time. Does nothing (False)
    without glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mmap_threshold, trim_threshold, largest_threshold = -3, -1, 2**25  # malloc.h; larger thresholds are refused
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(mmap_threshold, largest_threshold) and libc.mallopt(trim_threshold, KEPT_BYTES))


@dataclass(frozen=True)
class HeadMemory:
    """What one tenant's head (and its Q networks) cost.

    Attributes:
        parameters: trainable parameters.
        weights_bytes: parameters and buffers, once.
        gradient_bytes: of the trainable parameters.
        adam_bytes: both moments.
        served_bytes: the copies that inference holds.
        ema_bytes: the running average, 0 without one.
    """

    parameters: int
    weights_bytes: int
    gradient_bytes: int
    adam_bytes: int
    served_bytes: int
    ema_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.gradient_bytes + self.adam_bytes + self.served_bytes + self.ema_bytes


def head_memory(head: ActionHead, ema: bool = False, critic: nn.Module | None = None) -> HeadMemory:
    """Bytes of a head (it may live on the meta device) and of the Q networks with their slow copies."""
    critic = nn.Module() if critic is None else critic
    trainable = [p for p in (*head.parameters(), *critic.parameters()) if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for p in trainable)
    weights = module_bytes(head) + module_bytes(critic)
    return HeadMemory(
        parameters=sum(p.numel() for p in trainable),
        weights_bytes=weights,
        gradient_bytes=gradients,
        adam_bytes=2 * gradients,
        served_bytes=SERVED_COPIES * module_bytes(head),
        ema_bytes=module_bytes(head) if ema else 0,
    )


def module_bytes(module: nn.Module) -> int:
    """Parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def feature_bytes(feature: VLAFeature) -> int:
    """Bytes per sample of a feature ``[B]``."""
    return feature.bytes() // len(feature.pooled)


def free_bytes(device: torch.device) -> int:
    """Memory that is free now on ``device`` (of this machine for the CPU)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


class NoRoom(ValueError):
    """A tenant needs more memory than is left."""


class Admission:
    """Hands out the memory that is free at the start; refuses the tenant for whom it does not suffice. One that leaves
    gives its part back.

    Example:
        >>> admission = Admission(free=3_000_000_000)
        >>> admission.admit("a", 2_000_000_000)
        >>> try:
        ...     admission.admit("b", 2_600_000_000)
        ... except NoRoom as error:
        ...     print(error)
        tenants.b: this tenant needs 2.6 GB, 1.0 GB is free; take a smaller head or fewer tenants
    """

    def __init__(self, free: int) -> None:
        self.free = free
        self.held: dict[str, int] = {}

    def admit(self, tenant: str, needed: int) -> None:
        """Reserve ``needed`` bytes.

        Raises:
            NoRoom: they are not free.
        """
        if needed > self.free:
            raise NoRoom(
                f"tenants.{tenant}: this tenant needs {gigabytes(needed)}, {gigabytes(max(self.free, 0))} is free; "
                "take a smaller head or fewer tenants"
            )
        self.free -= needed
        self.held[tenant] = needed

    def release(self, tenant: str) -> None:
        """Undo :meth:`admit`; nothing for a tenant that was not admitted."""
        self.free += self.held.pop(tenant, 0)


def gigabytes(count: int) -> str:
    """A number of bytes for people.

    Example:
        >>> gigabytes(2_600_000_000), gigabytes(4_200_000)
        ('2.6 GB', '4.2 MB')
    """
    return f"{count / 1e9:.1f} GB" if count >= 10**8 else f"{count / 1e6:.1f} MB"


def meta_backbone(node: dict[str, Any]) -> Backbone:
    """A backbone's YAML -> its architecture without weights where the class can (``on_meta``), else the real one.

    Raises:
        ConfigError: it cannot be built.
    """
    cls: Any = get_class(node["_target_"])
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    build: Callable[..., Backbone] = getattr(cls, "on_meta", cls)
    try:
        return build(**arguments)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError([f"backbone: {error}"]) from error


def estimate(config: NexusConfig, backbone: Backbone | None = None) -> dict[str, Any]:
    """Memory of a validated configuration, without weights or data.

    Args:
        config: see :func:`nexus_lightning.config.validate`.
        backbone: an already built one; None builds the architecture alone.

    Returns:
        ``{"backbone": {"name", "parameters", "bytes", "buffer_bytes", "unit_parameters", "root_parameters"},
        "tenants": {name: {"head", "kind", <fields of HeadMemory>, "total_bytes"}}, "total_bytes"}``; of the backbone's
        shardable units the parameters of the largest one, and those outside every unit.
    """
    backbone = meta_backbone(config.backbone) if backbone is None else backbone
    tenants: dict[str, Any] = {}
    for name, tenant in config.tenants.items():
        spec = TenantSpec.compile(name, tenant, config.seed)
        try:
            head = build_head(tenant, spec.schema, backbone, derive_seed(spec.seed, "init"))
        except (ImportError, OSError, ValueError) as error:
            raise ConfigError([f"tenants.{name}: {error}"]) from error
        critic = build_critic(tenant, head, derive_seed(spec.seed, "critic"))
        memory = head_memory(head, tenant.head.get("ema_decay") is not None, critic)
        tenants[name] = {"head": type(head).__name__, "kind": head.feature_spec.kind, **asdict(memory)}
        tenants[name]["total_bytes"] = memory.total_bytes
    parameters = sum(p.numel() for p in backbone.parameters())
    units = [sum(p.numel() for p in unit.parameters()) for unit in backbone.shardable_units()]
    held = {
        "name": type(backbone).__name__,
        "parameters": parameters,
        "bytes": module_bytes(backbone),
        "buffer_bytes": sum(b.numel() * b.element_size() for b in backbone.buffers()),
        "unit_parameters": max(units, default=0),
        "root_parameters": parameters - sum(units),
    }
    total = held["bytes"] + sum(t["total_bytes"] for t in tenants.values())
    return {"backbone": held, "tenants": tenants, "total_bytes": total}


def estimate_table(figures: dict[str, Any], free: int) -> str:
    """The figures of :func:`estimate` for people."""
    held = figures["backbone"]
    rows = [("backbone", held["name"], "", f"{count_text(held['parameters'])} frozen", "", gigabytes(held["bytes"]))]
    for name, t in figures["tenants"].items():
        parameters, adam = f"{count_text(t['parameters'])} trained", gigabytes(t["adam_bytes"])
        rows.append((name, t["head"], t["kind"], parameters, adam, gigabytes(t["total_bytes"])))
    rows.append(("together", "", "", "", "", gigabytes(figures["total_bytes"])))
    table = text_table(("", "", "reads", "parameters", "Adam", "memory"), rows)
    fits = "fits" if figures["total_bytes"] <= free else "does NOT fit"
    note = "simulators, features and activations are not counted"
    return f"{table}\n{gigabytes(free)} is free on this machine: it {fits} ({note})"
