"""What the master keeps of a tenant besides its slot."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nexus_lightning.config import TenantConfig
from nexus_lightning.inference.client import TenantPolicyClient
from nexus_lightning.queues.training import BatchMeta
from nexus_lightning.services.metrics import MetricLog

#: Called once when an accepted workload or evaluation has ended: ``{"status": completed | failed | cancelled, ...}``
#: with ``result`` or ``error``. Not called for what a stopping server leaves: it goes on after the restart.
OnEnd = Callable[[dict[str, Any]], object]


@dataclass
class Workload:
    """A training workload from its acceptance to its end."""

    config: TenantConfig
    id: str | None
    resume: bool
    on_end: OnEnd
    thread: threading.Thread | None = None
    running: bool = False  # it has been handed to the runtime
    paused: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)
    changed: threading.Event = field(default_factory=threading.Event)


@dataclass
class TenantRecord:
    """What the master keeps of a tenant besides its slot."""

    config: TenantConfig  # as created, without a workload
    metrics: MetricLog
    memory_bytes: int
    workload: Workload | None = None
    leaving: threading.Event = field(default_factory=threading.Event)
    stop_evaluations: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)  # of evaluations
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # that were asked for, since this process began
    clients: list[TenantPolicyClient] = field(default_factory=list)  # sessions of the inference queue that rest
    last_error: str | None = None
    predict_version: int | None = None  # load_weights: pinned; None: the latest
    deliveries: dict[int, BatchMeta] = field(default_factory=dict)  # rows handed out by queue_get_meta
