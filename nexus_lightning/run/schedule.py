"""What trains next and what happens with it afterwards: lease, read, prepare, complete; and when the run is over."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from tensordict import TensorDict

from nexus_lightning.backbone import Backbone
from nexus_lightning.objectives import algorithm_of
from nexus_lightning.objectives.base import algorithm_class
from nexus_lightning.objectives.policy_gradient import EXECUTED
from nexus_lightning.producers.rollouts import advantage_stage
from nexus_lightning.queues.jobs import Job, JobState, LeaseLost
from nexus_lightning.run.leases import Lease, Outcome
from nexus_lightning.run.member import Member, Shared
from nexus_lightning.run.tenancy import Tenancy
from nexus_lightning.tenant import TenantSlot

if TYPE_CHECKING:
    from tensordict import TensorDictBase

#: Columns of what was observed, by whether the partition holds features.
OBSERVED = {True: ("features", "state"), False: ("observation", "language_instruction")}


class ActorForward(Protocol):
    """How the policy that is about to train sees a rollout: the module's method."""

    def __call__(self, slot: TenantSlot, data: TensorDictBase, backbone: Backbone) -> TensorDict: ...


class Schedule:
    """The actor's way through the queues.

    Args:
        tenancy: whose jobs.
        shared: queues and clock of the run.
        actor_forward: the module's, see :meth:`prepare`.
        resident: the run waits for work until it is asked to stop.

    Attributes:
        interrupted: a signal has asked for the end.
        deadline_s: of the run, on the monotonic clock; None without one.
    """

    def __init__(self, tenancy: Tenancy, shared: Shared, actor_forward: ActorForward, resident: bool) -> None:
        self.tenancy, self.shared, self.actor_forward, self.resident = tenancy, shared, actor_forward, resident
        self.interrupted = False
        self.deadline_s: float | None = None

    # -------------------------------------------------------------------------------------------- when it is over

    def targets_met(self) -> bool:
        """Every tenant has done its work, is out, or has left."""
        return not self.resident and (not self.tenancy.members or self.shared.scheduler.targets_met())

    def must_stop(self) -> bool:
        """Nothing more may be leased, whoever still has work."""
        if self.interrupted or (self.deadline_s is not None and time.monotonic() >= self.deadline_s):
            return True
        return self.jobs_left() <= 0

    def jobs_left(self) -> float:
        """How many jobs may still be leased before ``trainer.max_jobs`` is reached."""
        limit = self.shared.config.trainer.max_jobs
        return float("inf") if limit is None else limit - self.tenancy.job_index

    # ------------------------------------------------------------------------------------------------- what is next

    def actor_versions(self) -> dict[str, int]:
        """tenant -> policy version, of those whose jobs may train."""
        members = self.tenancy.members.items()
        return {n: m.slot.policy_version for n, m in members if not m.paused and m.slot.quarantined is None}

    def lease_group(self, where: Callable[[Job], bool], timeout_s: float = 0.0) -> list[Job]:
        """The next job, and ready jobs of other tenants that its backbone passes can serve; empty when none is ready.

        A job that brings observations instead of features says so in its metadata (``encode``). One job per tenant, so
        no tenant's own order changes.
        """
        jobs: list[Job] = []

        def fits(job: Job) -> bool:
            if not where(job):
                return False
            key = jobs[0].metadata.get("encode") if jobs else None
            return not jobs or (job.metadata.get("encode") == key and all(j.tenant_id != job.tenant_id for j in jobs))

        while not jobs or (jobs[0].metadata.get("encode") is not None and len(jobs) < self.jobs_left()):
            job = self.lease(fits, 0.0 if jobs else timeout_s)
            if job is None:
                break
            jobs.append(job)
        return jobs

    def lease(self, where: Callable[[Job], bool], timeout_s: float = 0.0) -> Job | None:
        """The next ready job that ``where`` allows, or None."""
        return self.shared.scheduler.lease_next(
            self.actor_versions(), timeout_s=timeout_s, deadline_s=self.shared.lease_deadline_s, where=where
        )

    def read(self, job: Job) -> Lease | None:
        """The columns of a leased job that its objective reads (views, no copy); None when it was ended meanwhile."""
        member, queue, scheduler = self.tenancy.members[job.tenant_id], self.shared.queue, self.shared.scheduler

        def renew() -> None:
            scheduler.renew(job, self.shared.lease_deadline_s)

        rollout = job.metadata.get("rollout")
        if job.metadata.get("absent"):
            return Lease(job, None, None, rollout, renew)
        settings = algorithm_of(member.slot.spec.config)
        fields = algorithm_class(settings).job_fields(settings) + OBSERVED[job.metadata["features"]]
        queue.release(job.partition_id, "train")  # rows that an expired lease had handed out
        try:
            meta = queue.get_meta(fields, None, job.partition_id, "train")
            assert meta is not None, f"job {job.job_id} was ready without its columns"
            return Lease(job, meta, queue.get_data(meta), rollout, renew)
        except ValueError:
            if scheduler.get(job.job_id).state.terminal:  # a producer's failure has just cleared the partition
                return None
            raise

    def prepare(self) -> None:
        """The stages of jobs that wait for the actor (``algorithm.proximal``), right before one of them is leased.

        One job of a tenant at a time: its policy does not change until that job is trained, so what is computed here is
        exactly what the job starts from. Calls no collective.
        """
        shared = self.shared
        for name in self.actor_versions():
            member = self.tenancy.members[name]
            config = member.slot.spec.config
            if config.task != "rl" or shared.scheduler.depth(name):
                continue
            if not algorithm_class(config.algorithm).waits_for_actor(config.algorithm):
                continue
            job = shared.scheduler.lease_stage(JobState.NEEDS_ACTOR_FORWARD, shared.lease_deadline_s, tenant_id=name)
            if job is None:
                continue
            try:
                self._actor_forward(member, job)
                environment = member.slot.spec.config.environment
                assert environment is not None
                num_envs = environment.num_envs // member.share.count
                advantage_stage(shared.scheduler, shared.queue, member.slot, shared.lease_deadline_s, num_envs)
            except Exception as error:
                shared.quarantine(name, f"{type(error).__name__}: {error}", traceback.format_exc())

    def _actor_forward(self, member: Member, job: Job) -> None:
        shared, slot = self.shared, member.slot
        fields = ("vla_action", EXECUTED, *OBSERVED[job.metadata["features"]])
        shared.queue.release(job.partition_id, "actor_forward")
        meta = shared.queue.get_meta(fields, None, job.partition_id, "actor_forward")
        assert meta is not None, f"job {job.job_id} waits for the actor without its columns"
        start_s = shared.events.now()
        shared.queue.put(self.actor_forward(slot, shared.queue.get_data(meta), shared.backbone), metadata=meta)
        shared.queue.ack(meta)
        shared.scheduler.renew(job, shared.lease_deadline_s)
        shared.events.span("actor", {slot.name: job.sample_count}, start_s, shared.events.now(), kind="actor_forward")
        shared.scheduler.mark(
            job.job_id, JobState.NEEDS_ADVANTAGES, lease_id=job.lease_id, proximal_policy_version=slot.policy_version
        )

    # -------------------------------------------------------------------------------------------------- afterwards

    def complete(self, outcome: Outcome) -> None:
        """A job has been trained: publish its version, ask for an evaluation when one is due, end it, log.

        An evaluation in between is asked for before the job ends, which lets the tenant's next rollout begin: on the
        simulators that both use the order is then always the same, and so is what a simulator remembers of earlier
        episodes (ManiSkill does, it can show after a touch).
        """
        tenancy, shared, job = self.tenancy, self.shared, outcome.lease.job
        if outcome.failure is not None:
            tenancy.quarantine(job.tenant_id, outcome.failure.reason, outcome.failure.details)
            return
        tenancy.job_index += 1
        member = tenancy.members[job.tenant_id]
        slot, config, evaluator = member.slot, member.slot.spec.config, member.evaluator
        if outcome.rollout is not None:
            tenancy.log_rollout(slot.name, outcome.rollout)
        try:
            tenancy.publish(slot)
            last = config.target_jobs is not None and slot.jobs_completed >= config.target_jobs
            every = config.eval.every_n_jobs
            if evaluator is not None and every is not None and slot.jobs_completed % every == 0 and not last:
                evaluator.request(slot.policy_version)
            if outcome.lease.meta is not None:
                shared.queue.ack(outcome.lease.meta)
            outcome.lease.renew()
            shared.scheduler.complete(job.job_id, lease_id=job.lease_id, policy_version=slot.policy_version)
        except (LeaseLost, ValueError, ArithmeticError) as error:
            shared.quarantine(slot.name, f"{type(error).__name__}: {error}", traceback.format_exc())
            return
        status = member.status
        status.jobs, status.version, status.loss = slot.jobs_completed, slot.policy_version, outcome.metrics["loss"]
        staleness = {}
        if job.behavior_policy_version is not None:
            staleness = {
                "staleness": float(slot.policy_version - 1 - job.behavior_policy_version),
                "dropped": float(shared.scheduler.dropped(slot.name)),
                "in_flight_bound": float(shared.scheduler.bound(slot.name)),
            }
        passes = {"backbone_passes_per_observation": slot.passes.passes_per_observation}
        tenancy.log(slot.name, "train", {**outcome.metrics, **staleness, **passes})
        if not shared.scheduler.wants_more(slot.name):
            tenancy.on_workload(slot.name)
            if evaluator is not None:  # its target is met: the last version, while others still train
                evaluator.request(slot.policy_version, video=True)
