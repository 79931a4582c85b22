"""Who is in the run: tenants enter, start to work, stop, leave, or are quarantined. By the actor, between two jobs."""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from nexus_lightning.checkpoint import Payload, PayloadError
from nexus_lightning.config import TenantConfig
from nexus_lightning.monitoring.progress import RunStatus
from nexus_lightning.producers.base import Producer
from nexus_lightning.producers.demonstrations import DemonstrationReader
from nexus_lightning.producers.evaluation import EvalResult, result_dict
from nexus_lightning.run.member import Member, Shared, Unsaved
from nexus_lightning.run.payloads import Payloads
from nexus_lightning.schema import NormalizationStats, Normalizer
from nexus_lightning.tenant import NonFiniteWeights, TenantSlot

log = logging.getLogger(__name__)

#: First and longest pause before a resident run tries again to write a payload that the disk has refused.
SAVE_AGAIN_S, SAVE_AGAIN_MOST_S = 2.0, 20.0


class Actor(Protocol):
    """What trains: the module."""

    def add_tenant(self, slot: TenantSlot) -> None: ...

    def follow_workload(self, slot: TenantSlot) -> None: ...

    def remove_tenant(self, name: str) -> None: ...


class Tenancy:
    """The members of a run on this rank.

    Args:
        shared: what they share.
        actor: the module, which holds their slots.
        slots: the module's table, of those who are there from the start.
        payloads: where they are saved.
        on_metrics: gets every row of metrics and the job index.
        on_workload: told when :meth:`workload_over` may have become true of a tenant.
        resident: the run outlives a full disk.

    Attributes:
        members: tenant -> all that there is of it here.
        job_index: jobs trained by the run so far, the axis of its metrics.
        joined / left: tenants that have come and gone by an order, for a resumed run.
    """

    def __init__(
        self,
        shared: Shared,
        actor: Actor,
        slots: dict[str, TenantSlot],
        payloads: Payloads,
        on_metrics: Callable[[dict[str, float], int], object],
        on_workload: Callable[[str], object],
        resident: bool = False,
    ) -> None:
        self.resident = resident
        self.shared, self.actor, self.slots, self.payloads = shared, actor, slots, payloads
        self.on_metrics, self.on_workload = on_metrics, on_workload
        self.members: dict[str, Member] = {}
        self.status = RunStatus()
        self.job_index = 0
        self.joined: set[str] = set()
        self.left: set[str] = set()

    def enter(self, member: Member) -> None:
        """A member of which the actor has the slot already."""
        self.members[member.name] = member
        self.status.tenants[member.name] = member.status

    # ---------------------------------------------------------------------------------------------- join and leave

    def join(self, slot: TenantSlot, payload: Payload | None = None) -> None:
        """An admitted tenant enters without a workload: what it brings is moved, restored, published. All or nothing.

        Raises:
            ValueError: the name is taken, or the payload is of another schema.
        """
        name = slot.name
        if name in self.slots:
            raise ValueError(f"tenant {name!r}: is there already; let it leave first, or choose another name")
        try:
            self.slots[name] = slot
            self.actor.add_tenant(slot)
            if payload is not None:
                slot.restore(payload)
            member = Member(slot, self.shared)
            member.paused = True
            self.enter(member)
            self.publish(slot)
        except Exception:
            self.leave(name)
            raise
        self.shared.events.point("join", name)

    def leave(self, name: str) -> None:
        """A tenant without a workload leaves; nothing of it stays in memory (spans in the event log do)."""
        shared = self.shared
        self.slots.pop(name, None)
        self.actor.remove_tenant(name)
        if name in shared.served.tenants():
            shared.served.remove(name)
        shared.server.forget(name)
        if shared.scheduler.registered(name):
            shared.scheduler.unregister(name)
        for partition in shared.queue.partitions(name):
            shared.queue.clear(partition)
        shared.admission.release(name)
        self.members.pop(name, None)
        self.status.tenants.pop(name, None)
        shared.events.point("leave", name)

    # ---------------------------------------------------------------------------------------------- start and stop

    def start(
        self,
        name: str,
        config: TenantConfig,
        reader: DemonstrationReader | None = None,
        stats: tuple[NormalizationStats, NormalizationStats] | None = None,
        resume: bool = False,
        workload: str | None = None,
    ) -> None:
        """A tenant begins to work: registered anew, fresh optimizer and data, producers. All or nothing.

        Args:
            name: of a tenant without a workload.
            config: validated; schema, head and seed are those of the tenant.
            reader: of its dataset (see :meth:`Shared.make_reader`: it may take seconds); None when the task needs none.
            stats: of the dataset; they become the tenant's normalisation if nothing was trained with another one yet.
            resume: go on with the workload that the slot was saved in the middle of; ``config`` is that one's.
            workload: its id, kept in the payload.
        """
        slot, member = self.slots[name], self.members[name]
        self._end_jobs(name, "a workload begins")  # low-level jobs that nobody has ended
        try:
            if not resume:
                slot.start_workload(config, workload)
                if stats is not None and slot.policy_version == 0:
                    slot.normalizer.load_state_dict(Normalizer(slot.spec.schema, *stats).state_dict())
                    self.shared.served.renormalize(name, slot.normalizer)
                self.actor.follow_workload(slot)
            member.begin()
            self.status.tenants[name] = member.status
            if reader is not None:
                member.reader, slot.passes = reader, reader.passes
            self.payloads.save(member)  # what a resume goes on from until the next one is saved
            done = slot.jobs_completed
            self.register(slot, None if config.target_jobs is None else config.target_jobs - done)
            self.employ(member)
        except Exception:
            self.stop(name)
            member.producers = []
            member.drop_data()
            slot.ended = True
            raise

    def register(self, slot: TenantSlot, target_jobs: int | None) -> None:
        """Its jobs are admitted from now on."""
        config = slot.spec.config
        self.shared.scheduler.register(
            slot.name,
            config.task,
            priority=config.priority,
            max_in_flight=config.max_in_flight,
            max_policy_staleness=config.max_policy_staleness,
            target_jobs=target_jobs,
            weight=config.weight,
        )

    def employ(self, member: Member) -> None:
        """Producers of a registered, published tenant are built and run; the evaluation at the start is asked for."""
        slot, name = member.slot, member.name
        member.build_producers()
        if member.evaluator is not None:
            if not self.shared.scheduler.wants_more(name):  # killed between the last job and its evaluation
                member.evaluator.request(video=True)
            elif slot.spec.config.eval.at_start and not slot.evaluations and not self._fast:
                member.evaluator.request()
        member.paused = False
        for producer in member.producers:
            producer.start()

    @property
    def _fast(self) -> bool:
        return self.shared.config.trainer.fast_dev_run

    def stop(self, name: str) -> list[Producer]:
        """The first half of a workload's end: its jobs fail, its producers are asked to stop.

        Returns:
            The producers. Join them off the actor thread (a simulator may take seconds to close), then call
            :meth:`end`.
        """
        member = self.members[name]
        member.paused = True
        for producer in member.producers:
            producer.stop()
        self._end_jobs(name, "the workload has ended")
        return member.producers

    def end(self, name: str) -> None:
        """The second half, once the producers have ended: data and readers are dropped, the policy is saved. The tenant
        stays and may work again."""
        member, slot, queue = self.members[name], self.slots[name], self.shared.queue
        member.producers = []
        member.drop_data()
        for partition in queue.partitions(name):
            if partition.startswith(f"{name}/{slot.spec.config.task}/"):  # of a job that ended while it was being put
                queue.clear(partition)
        slot.ended = True
        slot.head.zero_grad()
        member.status.state = "idle" if slot.quarantined is None else "failed"
        self.save(member)

    def _end_jobs(self, name: str, reason: str) -> None:
        """The tenant's jobs in flight fail and it is unregistered; how many ended how is kept."""
        scheduler = self.shared.scheduler
        if scheduler.registered(name):
            scheduler.fail_all(name, reason)
            self.members[name].ended_jobs.update(scheduler.counts()[name])
            scheduler.unregister(name, reason)

    def workload_over(self, name: str) -> bool:
        """True when a tenant's workload has failed, or met its target and evaluated its last version. Any thread."""
        slot = self.slots[name]
        if slot.quarantined is not None:
            return True
        if self.shared.scheduler.wants_more(name):
            return False
        evaluated = [evaluation["policy_version"] for evaluation in slot.evaluations]
        return self.members[name].evaluator is None or slot.policy_version in evaluated

    def job_counts(self) -> dict[str, dict[str, int]]:
        """tenant -> state -> jobs: in flight now, ended in all its workloads since this process began. Any thread."""
        table = {name: Counter(counts) for name, counts in self.shared.scheduler.counts().items()}
        for name, member in list(self.members.items()):
            table.setdefault(name, Counter()).update(member.ended_jobs)
        return {name: dict(counts) for name, counts in table.items() if counts}

    # ------------------------------------------------------------------------------------------- while they work

    def quarantine(self, tenant: str, reason: str, details: str) -> None:
        """Take one tenant out of the run: its jobs fail, its producers stop, its last saved payload is kept."""
        member = self.members.get(tenant)
        if member is None or member.slot.quarantined is not None:
            return
        shared = self.shared
        member.slot.quarantined = reason
        member.status.state = "quarantined"
        shared.events.point("quarantine", tenant, reason=reason)
        if shared.ranks.first:
            log.error(
                "tenant %s is quarantined: %s (%s)", tenant, reason, self._keep_details(tenant, details or reason)
            )
        for producer in member.producers:
            producer.stop()
        if shared.scheduler.registered(tenant):  # not of a tenant that is leaving
            shared.scheduler.fail_all(tenant, reason)
        self.on_workload(tenant)

    def _keep_details(self, tenant: str, details: str) -> str:
        """Write them to the run folder; what the log says of that. A full disk must not keep a tenant in the run."""
        path = self.shared.run_dir / "errors" / f"{tenant}.txt"
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_text(details)
        except OSError as error:
            return f"errors/{tenant}.txt cannot be written: {error.strerror}\n{details}"
        return f"traceback in errors/{tenant}.txt"

    def publish(self, slot: TenantSlot) -> None:
        """Hand the tenant's head to the inference queue under its policy version (digest compared there).

        Raises:
            NonFiniteWeights: the version before stays in force.
        """
        slot.check_finite()
        self.shared.served.publish(slot.name, slot.policy_version, slot.serving_head, slot.normalizer, slot.spec.schema)

    def log(self, tenant: str, group: str, metrics: dict[str, float]) -> None:
        """``<group>/<tenant>/<metric>`` at the current job index, with the wall time."""
        row = {f"{group}/{tenant}/{k}": v for k, v in metrics.items()}
        row[f"{tenant}/step"] = float(self.slots[tenant].jobs_completed)
        row["time_s"] = self.shared.events.now()
        self.on_metrics(row, self.job_index)

    def log_rollout(self, tenant: str, metrics: dict[str, float]) -> None:
        """What a whole rollout has given."""
        if "episode_return" in metrics:
            self.members[tenant].status.episode_return = metrics["episode_return"]
        self.log(tenant, "train", metrics)

    def record_evaluation(self, result: EvalResult, video: Path | None) -> None:
        """Keep, show and log the result of a whole evaluation."""
        member = self.members[result.tenant]
        slot = member.slot
        slot.evaluations = [*slot.evaluations, {**result_dict(result), "jobs_completed": slot.jobs_completed}]
        member.status.success_rate = result.success_rate
        tasks = {f"success_rate_{r.task}": r.success_rate for r in result.by_task} if len(result.by_task) > 1 else {}
        self.log(
            result.tenant,
            "eval",
            {
                "success_rate": result.success_rate,
                "n": float(result.n),
                "ci_low": result.ci_low,
                "ci_high": result.ci_high,
                "episode_return": result.episode_return,
                "episode_length": result.episode_length,
                "policy_version": float(result.policy_version),
                **tasks,
            },
        )
        if video is not None:
            self.shared.events.point("video", result.tenant, path=str(video.relative_to(self.shared.run_dir)))
        self.on_workload(result.tenant)

    def save(self, member: Member, now: bool = False) -> None:
        """Write one tenant as it is; one whose weights or moments are not finite is quarantined instead.

        In a resident run a payload that cannot be written stays due: it is tried again after a pause (``now``: without
        one), and the run goes on.

        Raises:
            OSError, PayloadError: it cannot be written, and the run is not resident.
        """
        name, owed = member.name, member.unsaved
        if member.slot.quarantined is not None or (owed is not None and not now and time.monotonic() < owed.retry_at_s):
            return
        try:
            path = self.payloads.save(member)
        except NonFiniteWeights as error:
            self.quarantine(name, f"{type(error).__name__}: {error}", traceback.format_exc())
            return
        except (OSError, PayloadError) as error:
            if not self.resident:
                raise
            if owed is None:
                owed = member.unsaved = Unsaved(str(error))
                log.error("%s; it is tried again until it is written", error)
            pause_s = min(SAVE_AGAIN_S * 2**owed.tries, SAVE_AGAIN_MOST_S)
            owed.problem, owed.tries, owed.retry_at_s = str(error), owed.tries + 1, time.monotonic() + pause_s
            return
        if owed is not None:
            member.unsaved = None
            log.warning("tenant %s: its payload is written now: %s", name, path)

    def save_all(self, now: bool = False) -> None:
        """Write every tenant whose version is not on disk yet. A quarantined tenant keeps what it had."""
        for member in list(self.members.values()):
            saved_version = None if member.saved is None else member.saved[1]
            if saved_version != member.slot.policy_version:
                self.save(member, now)

    def unsaved(self) -> dict[str, Unsaved]:
        """Tenants whose payload the disk has refused. Any thread."""
        return {name: member.unsaved for name, member in list(self.members.items()) if member.unsaved is not None}

    def save_unsaved(self) -> None:
        """Write again what the disk has refused, where its pause is over."""
        for name in self.unsaved():
            self.save(self.members[name])
