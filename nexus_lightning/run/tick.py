"""Between two jobs: events are drained, the ranks tell each other what they know, rank 0 decides, all do it.

Every rank runs the whole program: its own producers, queues and scheduler for its share of every tenant's data. A job
of tenant X with place k in X's stream exists on every rank, so ``(X, k)`` names it everywhere. What must be the same on
all ranks is decided by rank 0 in a *tick*; one rank reports to itself::

    rank 0  report ---.                                            .--> execute
    rank 1  report ---+-- gather --> rank 0 decides -- broadcast --+--> execute
    rank 2  report ---'                                            '--> execute

A report says what is ready, what failed, who wants to stop. The decision says which jobs to lease, which to drop
(stale on one rank: dropped on all), which tenants are out and why, and whether to stop. A tick happens before every
job group and every :data:`IDLE_TICK_S` while there is nothing to train, so nobody waits in a collective for a slow
simulator and a signal on any rank is seen by all.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nexus_lightning.producers.evaluation import EvalResult, summarise
from nexus_lightning.queues.jobs import Job
from nexus_lightning.ranks import Failure, Ranks, agreed_failures
from nexus_lightning.run.mailbox import Call, Evaluated, Failed, Lost, Mailbox
from nexus_lightning.run.orders import Order, Orders
from nexus_lightning.run.schedule import Schedule

log = logging.getLogger(__name__)

#: Seconds between two ticks of an idle run, and while another rank is not ready yet.
IDLE_TICK_S, BUSY_TICK_S = 0.2, 0.02

#: (tenant, place in its stream).
JobKey = tuple[str, int]


@dataclass
class Report:
    """What one rank knows at a tick.

    Attributes:
        ready: job -> the policy version that acted (None: none did). Empty with one rank, which looks itself.
        failures: tenant -> what went wrong on this rank since the last tick.
        evaluations: shares of evaluations that were finished here.
        stop: nothing more may be leased; ``interrupted``: because of a signal.
        done: every target is met.
        busy: evaluations are pending or running here.
        prepared: orders that this rank can complete, or why it cannot.
        schedule: digest of every job that was leased here so far; the debug check compares it.
        last: the last of them, for the message.
    """

    ready: dict[JobKey, int | None]
    failures: dict[str, Failure]
    evaluations: list[Evaluated]
    stop: bool
    done: bool
    interrupted: bool
    busy: bool
    prepared: dict[int, str | None]
    schedule: str
    last: str


@dataclass
class Decision:
    """What every rank does after a tick."""

    lease: list[JobKey] = field(default_factory=list)
    stale: list[JobKey] = field(default_factory=list)
    failures: dict[str, Failure] = field(default_factory=dict)
    evaluations: list[tuple[EvalResult, Path | None]] = field(default_factory=list)
    begin: list[Order] = field(default_factory=list)
    complete: dict[int, list[str | None]] = field(default_factory=dict)  # order -> what went wrong on each rank
    stop: bool = False
    interrupted: bool = False
    busy: bool = False


class ScheduleDiffers(RuntimeError):
    """The ranks have leased different jobs: a bug. Their weights may differ from here on, so the run ends."""


class Tick:
    """Ticks of one rank; see the module docstring.

    Attributes:
        stopped: the ranks have agreed to lease nothing more.
    """

    def __init__(self, ranks: Ranks, schedule: Schedule, orders: Orders, mailbox: Mailbox) -> None:
        self.ranks, self.schedule, self.orders, self.mailbox = ranks, schedule, orders, mailbox
        self.tenancy, self.shared = schedule.tenancy, schedule.shared
        self.stopped = False
        self._schedule = hashlib.sha256()
        self._last = "none"
        self._seen = 0
        self._idle = False
        self._leased: dict[JobKey, Job] = {}  # rank 0: leased while deciding
        self._shares: dict[tuple[str, int], dict[int, Evaluated]] = {}  # rank 0: evaluations of which some are in

    def next_jobs(self) -> list[Job]:
        """The next job group, leased here as everywhere; empty when the run has stopped."""
        while True:
            self.schedule.prepare()
            decision = self.tick(leasing=True)
            if decision.stop:
                return []
            if decision.lease:
                return [self._lease(key) for key in decision.lease]

    def tick(self, leasing: bool = False, busy: bool = False) -> Decision:
        """Exchange reports and do what rank 0 decided, except leasing (see :meth:`next_jobs`)."""
        tenancy, scheduler = self.tenancy, self.shared.scheduler
        if leasing and self._idle and self.ranks.size > 1:
            # Who has something ready waits for the others, inside the collective: that costs nothing.
            self._seen = scheduler.wait_for_ready(self._seen, BUSY_TICK_S if scheduler.depth() else IDLE_TICK_S)
        report = self._report(busy)
        decision = self.ranks.decide(report, lambda reports: self._decide(reports, leasing))
        self._idle = not decision.lease
        for tenant, failure in decision.failures.items():
            tenancy.quarantine(tenant, failure.reason, failure.details)
        if decision.stale:
            ready = {job_key(job): job for job in scheduler.ready()}
            for key in decision.stale:
                scheduler.drop(ready[key].job_id, "policy_stale")
        for result, video in decision.evaluations:
            tenancy.record_evaluation(result, video)
        for order in decision.begin:
            self.orders.begin(order)
        for number, errors in decision.complete.items():
            self.orders.complete(number, errors)
        self.schedule.interrupted |= decision.interrupted
        self.stopped |= decision.stop
        self._show()
        return decision

    def _drain(self) -> tuple[dict[str, Failure], list[Evaluated]]:
        """What threads have posted: calls are run, the rest is noted or reported."""
        failures: dict[str, Failure] = {}
        evaluations: list[Evaluated] = []
        members = self.tenancy.members
        for event in self.mailbox.drain():
            match event:
                case Call():
                    event.run()
                case Failed(tenant, reason, details):
                    if tenant in members and members[tenant].slot.quarantined is None:
                        failures.setdefault(tenant, Failure(reason, details))
                case Evaluated():
                    evaluations.append(event)
                case Lost(tenant, reason):
                    self.shared.events.point("begun_again", tenant, reason=reason)
                    log.warning("tenant %s: begins again what a simulator or machine was lost in: %s", tenant, reason)
        return failures, evaluations

    def _report(self, busy: bool) -> Report:
        failures, evaluations = self._drain()
        jobs = self.shared.scheduler.ready() if self.ranks.size > 1 else []
        return Report(
            ready={job_key(job): job.behavior_policy_version for job in jobs},
            failures=failures,
            evaluations=evaluations,
            stop=self.schedule.must_stop(),
            done=self.schedule.targets_met(),
            interrupted=self.schedule.interrupted,
            busy=busy,
            prepared=self.orders.prepared(),
            schedule=self._schedule.hexdigest(),
            last=self._last,
        )

    def _show(self) -> None:
        """Refresh what the progress bar shows (queue depths); cheap."""
        status = self.tenancy.status
        status.inference_waiting = self.shared.server.waiting
        states: dict[str, int] = {}
        for tenant in self.shared.scheduler.counts().values():
            for state, n in tenant.items():
                states[state] = states.get(state, 0) + n
        status.training_queue = {k: states.get(k, 0) for k in ("reserved", "needs_advantages", "ready", "leased")}

    # ---- rank 0 --------------------------------------------------------------------------------------------------

    def _decide(self, reports: list[Report], leasing: bool) -> Decision:
        if len({report.schedule for report in reports}) > 1:
            last = "; ".join(f"rank {rank} trained last: {report.last}" for rank, report in enumerate(reports))
            raise ScheduleDiffers(f"the ranks have trained different jobs ({last}); please report this")
        decision = Decision(
            failures=agreed_failures([report.failures for report in reports]),
            evaluations=self._merged_evaluations(reports),
            interrupted=any(report.interrupted for report in reports),
            busy=any(report.busy for report in reports),
        )
        # targets and job counts are the same everywhere; a signal or a deadline may have reached one rank only
        done = any(report.done for report in reports) and not self.orders.pending
        decision.stop = leasing and (done or any(report.stop for report in reports))
        if not leasing or decision.stop:
            return decision
        decision.begin = self.orders.take_new()
        on_all = set.intersection(*(set(report.prepared) for report in reports))
        decision.complete = {number: [report.prepared[number] for report in reports] for number in sorted(on_all)}
        out = {*decision.failures, *(order.tenant for order in decision.begin if order.verb == "leave")}
        if len(reports) == 1:
            news = decision.failures or decision.evaluations or decision.begin or decision.complete
            jobs = self.schedule.lease_group(
                lambda job: job.tenant_id not in out, timeout_s=0.0 if news else IDLE_TICK_S
            )
        else:
            jobs = self._lease_common(reports, decision, out)
        self._leased = {job_key(job): job for job in jobs}
        decision.lease = list(self._leased)
        return decision

    def _lease_common(self, reports: list[Report], decision: Decision, out: set[str]) -> list[Job]:
        """Of the jobs that are ready on all ranks; those that are stale on one are named in ``decision``."""
        common = set.intersection(*(set(report.ready) for report in reports))
        common = {key for key in common if key[0] not in out}
        versions = self.schedule.actor_versions()
        for key in sorted(common):
            bound = self.tenancy.slots[key[0]].spec.config.max_policy_staleness
            acted = [v for report in reports if (v := report.ready[key]) is not None]
            if bound is not None and key[0] in versions and acted and versions[key[0]] - min(acted) > bound:
                decision.stale.append(key)
        allowed = common.difference(decision.stale)
        return self.schedule.lease_group(lambda job: job_key(job) in allowed)

    def _merged_evaluations(self, reports: list[Report]) -> list[tuple[EvalResult, Path | None]]:
        """Evaluations of which all ranks' episodes are in, in the order in which one rank would run them."""
        merged = []
        for rank, report in enumerate(reports):
            for share in report.evaluations:
                if share.tenant not in self.tenancy.slots:  # it has left meanwhile
                    continue
                shares = self._shares.setdefault((share.tenant, share.version), {})
                shares[rank] = share
                ranks = self.shared.evaluating_ranks(share.tenant)
                if len(shares) < len(ranks):
                    continue
                parts = [shares[r] for r in ranks]
                episodes: list[dict[str, Any]] = [{}] * sum(len(part.episodes) for part in parts)
                for index, part in enumerate(parts):
                    episodes[index :: len(parts)] = part.episodes
                video = next((part.video for part in parts if part.video is not None), None)
                merged.append((summarise(share.tenant, share.version, episodes), video))
                # An older version of which a rank has skipped its share, busy with something newer, is never whole.
                done = (share.tenant, share.version)
                self._shares = {k: v for k, v in self._shares.items() if k[0] != done[0] or k[1] > done[1]}
        return merged

    # ---- every rank ----------------------------------------------------------------------------------------------

    def _lease(self, key: JobKey) -> Job:
        job = self._leased.pop(key, None) or self.schedule.lease(lambda job: job_key(job) == key)
        assert job is not None, f"rank {self.ranks.rank}: job {key} was reported ready and cannot be leased"
        self._last = f"job {key[1]} of tenant {key[0]!r} after version {self.tenancy.slots[key[0]].policy_version}"
        self._schedule.update(self._last.encode())
        return job


def job_key(job: Job) -> JobKey:
    """The name of a job that all ranks agree on."""
    return job.tenant_id, int(job.metadata["cursor"])
