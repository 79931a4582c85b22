"""A run on this rank, put together: queues, served policies, tenants, and the way between them."""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from hydra.utils import instantiate

from nexus_lightning.backbone import Backbone
from nexus_lightning.config import ConfigError, NexusConfig
from nexus_lightning.features.store import FeatureStore
from nexus_lightning.inference.policies import ServedPolicies
from nexus_lightning.inference.replicas import Fleet
from nexus_lightning.inference.server import TenantInferenceServer
from nexus_lightning.memory import Admission
from nexus_lightning.monitoring.events import EventLog
from nexus_lightning.queues.jobs import Job, Scheduler
from nexus_lightning.queues.journal import Journal
from nexus_lightning.queues.training import TrainingQueue
from nexus_lightning.run.mailbox import Call, Mailbox
from nexus_lightning.run.member import Member, Shared
from nexus_lightning.run.module import MultiTenantModule
from nexus_lightning.run.orders import Orders
from nexus_lightning.run.payloads import Payloads
from nexus_lightning.run.schedule import Schedule
from nexus_lightning.run.tenancy import Tenancy
from nexus_lightning.run.tick import Tick
from nexus_lightning.tenant import TenantSlot

T = TypeVar("T")


class Runtime:
    """Everything of a run that is not Lightning's, and its life: :meth:`start`, jobs, :meth:`finish`, :meth:`close`.

    Threads reach it through its mailbox: producers and evaluators by themselves, others by :meth:`call` and
    :attr:`orders`.

    Args:
        config: validated.
        module: with the tenants that are there from the start.
        run_dir: the run's folder.
        datasets: opened LeRobotDatasets of tenants (opened for their statistics already).
        admission: memory that is left for tenants; those who are there are admitted.
        resident: of the services: the run waits for work until it is asked to stop, and may start with no tenant.
        on_metrics: gets every row of metrics and the job index.
        on_workload: told when a tenant's workload may be over.

    Attributes:
        backbone: whole, what rollouts, evaluations and readers run; beside an actor with shards it is a copy.
        tenancy: who is in the run.
        schedule: what trains next.
        tick: how the ranks agree.
        orders: tenants that join and leave.
    """

    def __init__(
        self,
        config: NexusConfig,
        module: MultiTenantModule,
        run_dir: Path,
        datasets: dict[str, Any],
        admission: Admission,
        resident: bool = False,
        on_metrics: Callable[[dict[str, float], int], object] = lambda metrics, step: None,
        on_workload: Callable[[str], object] = lambda tenant: None,
    ) -> None:
        ray = config.placement.ray
        if resident and ray is not None:  # nobody has joined the cluster, and replicas do not learn of new tenants
            raise ConfigError(["placement.ray: the services keep simulators on their machine; use another placement"])
        self.config, self.module, self.run_dir, self.resident = config, module, run_dir, resident
        self.backbone, self.slots, self.ranks = module.backbone, module.slots, module.ranks
        self.fingerprint = self.backbone.fingerprint
        first = self.ranks.first
        self.events = EventLog(run_dir / "events.jsonl" if first else None)
        self.queue = TrainingQueue(max_bytes_per_tenant=int(config.queues.training.max_gb_per_tenant * 1e9))
        self.journal = Journal(run_dir / "jobs.sqlite") if config.queues.training.journal and first else None
        policy = instantiate(config.queues.training.policy)
        self.scheduler = Scheduler(on_terminal=self._clear, journal=self.journal, policy=policy)
        self.served = ServedPolicies(self.backbone)
        self.server = TenantInferenceServer(
            self.served,
            max_batch_size=config.queues.inference.max_batch_size,
            timeout_s=config.queues.inference.timeout_s,
            static_batch_size=config.queues.inference.static_batch_size,
            on_batch=self._on_batch,
        )
        store = config.feature_store
        folder = Path(store.folder) if store.folder is not None else Path(config.data_dir) / "features"
        self.store = FeatureStore(folder if store.store == "disk" else None, int(store.budget_gb * 1e9))
        self.mailbox = Mailbox(self.scheduler.wake)
        self.shared = Shared(
            config,
            run_dir,
            self.ranks,
            self.backbone,
            self.events,
            self.queue,
            self.scheduler,
            self.served,
            self.server,
            self.store,
            self.mailbox,
            admission,
        )
        self.payloads = Payloads(self.shared, self.fingerprint)
        self.tenancy = Tenancy(self.shared, module, self.slots, self.payloads, on_metrics, on_workload, resident)
        self.schedule = Schedule(self.tenancy, self.shared, module.actor_forward, resident)
        self.orders = Orders(self.tenancy, self.shared, self._only_shards)
        self.tick = Tick(self.ranks, self.schedule, self.orders, self.mailbox)
        self.replica_summary: list[dict[str, Any]] = []
        self._restored_scheduler: dict[str, Any] | None = None
        for name, slot in self.slots.items():
            self.tenancy.enter(Member(slot, self.shared, datasets.get(name)))
        if ray is not None and ray.inference_replicas and any(m.has_simulators for m in self.members.values()):
            self.shared.fleet = Fleet(config, self.slots, self.served, self.fingerprint)

    @property
    def members(self) -> dict[str, Member]:
        """tenant -> all that there is of it on this rank."""
        return self.tenancy.members

    # ------------------------------------------------------------------------------------------ start and end

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from what a Lightning checkpoint says (:meth:`checkpoint_state`); optimizers exist already."""
        self.payloads.restore(saved, self.members)
        self._restored_scheduler = saved["scheduler"]
        self.tenancy.job_index = saved["job_index"]
        self.tenancy.joined, self.tenancy.left = set(saved.get("joined", ())), set(saved.get("left", ()))

    def checkpoint_state(self) -> dict[str, Any]:
        """What Lightning's checkpoint says about the run (JSON-able)."""
        tenancy = self.tenancy
        came_and_went = {"joined": sorted(tenancy.joined), "left": sorted(tenancy.left)}
        return self.payloads.checkpoint_state(self.members, tenancy.job_index) | came_and_went

    def start(self) -> None:
        """Register tenants, publish their current heads, start the server and the producers."""
        if self.config.trainer.max_time is not None:
            self.schedule.deadline_s = time.monotonic() + _seconds(self.config.trainer.max_time)
        fast = self.config.trainer.fast_dev_run
        for slot in self.slots.values():
            self.tenancy.register(slot, 1 if fast else slot.spec.config.target_jobs)
        if self._restored_scheduler is not None:
            self.scheduler.load_state_dict(self._restored_scheduler)
        self.served.backbone = self._serving_backbone()
        self.server.start()
        if self.shared.fleet is not None:
            self.shared.fleet.wait_ready()
        for member in self.members.values():
            self.tenancy.publish(member.slot)
            if member.slot.quarantined is not None:
                self.scheduler.fail_all(member.name, member.slot.quarantined)
            else:
                self.tenancy.employ(member)

    def _serving_backbone(self) -> Backbone:
        """What rollouts and evaluations run: the actor's own weights, or a whole copy where
        ``placement.inference.device`` names a device. Beside an actor with shards :attr:`backbone` is that copy."""
        device = self.config.placement.inference.device
        if device == "training" or self.module.sharded_backbone:
            return self.backbone
        return copy.deepcopy(self.backbone).to(device)  # from what Lightning has moved and converted

    def _only_shards(self) -> bool:
        return self.module.sharded_backbone and self.backbone is self.module.backbone

    def finish(self) -> None:
        """After the last job: evaluate every tenant's last version (unless interrupted)."""
        if self.schedule.interrupted or self.resident:
            return
        waiting = []
        for member in self.members.values():
            evaluator, slot = member.evaluator, member.slot
            if evaluator is None or slot.quarantined is not None:
                continue
            if evaluator.requested_with_video != slot.policy_version:
                evaluator.request(video=True)
            waiting.append(evaluator)
        while self.tick.tick(busy=any(not e.wait_idle(timeout_s=0.5) for e in waiting)).busy:
            if self.schedule.interrupted:
                return

    def close(self) -> None:
        """Stop producers, server, simulators. Idempotent."""
        if not self.mailbox.close():
            return
        self.orders.close()
        producers = [producer for member in self.members.values() for producer in member.producers]
        for producer in producers:
            producer.stop()
        self.scheduler.close()
        self.queue.close()
        for producer in producers:
            if producer.ident is not None:
                producer.join(timeout=60)
        self.server.shutdown()
        if self.shared.fleet is not None:
            self.replica_summary = self.shared.fleet.summary()
            self.shared.fleet.close()
        if self.journal is not None:
            self.journal.close()
        self.events.close()

    def install_signal_handlers(self) -> Callable[[], None]:
        """SIGINT and SIGTERM ask for a clean stop after the current job; a second SIGINT interrupts at once.

        Returns:
            A function that puts the previous handlers back.
        """
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

        def handler(signum: int, frame: Any) -> None:
            del frame
            if self.schedule.interrupted and signum == signal.SIGINT:
                raise KeyboardInterrupt
            self.schedule.interrupted = True
            where = "" if self.ranks.size == 1 else f" on rank {self.ranks.rank}"
            print(f"\n{signal.Signals(signum).name}{where}: finishing the current job, saving, stopping", flush=True)

        for signum in previous:
            signal.signal(signum, handler)

        def restore() -> None:
            for signum, old in previous.items():
                signal.signal(signum, old)

        return restore

    # ----------------------------------------------------------------------------------------------- other threads

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run ``action`` on the actor thread, between two jobs; an idle actor wakes at once.

        Raises:
            RunEnded: the run has ended; so does the future when it ends before the action's turn.
            RuntimeError: the run has several ranks (they would have to agree on when).
        """
        if self.ranks.size > 1:
            raise RuntimeError("several ranks would have to agree on when; tenants join and leave by `orders`")
        call = Call(action)
        self.mailbox.post(call)
        return call.future

    # ------------------------------------------------------------------------------------------------ callbacks

    def _clear(self, job: Job) -> None:
        self.queue.clear(job.partition_id)

    def _on_batch(self, tenants: dict[str, int], start_s: float, end_s: float, encodes: int) -> None:
        offset = self.events.now() - time.monotonic()
        self.events.span("inference", tenants, start_s + offset, end_s + offset, kind=f"encode{encodes}")

    def save_payload(self, slot: TenantSlot) -> Path | None:
        """Write one tenant as it is now; see :meth:`Payloads.save`."""
        return self.payloads.save(self.members[slot.name])


def _seconds(max_time: str) -> float:
    days, hours, minutes, seconds = (int(part) for part in max_time.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
