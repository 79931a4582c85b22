"""What the ranks of a run tell each other: who they are, and which jobs they train next.

Every rank runs the whole program: its own producers, queues and scheduler for its share of every tenant's data. A job
of tenant X with place k in X's stream exists on every rank, so ``(X, k)`` names it everywhere. What must be the same on
all ranks is decided by rank 0 in a *tick*::

    rank 0  report ---.                                            .--> execute
    rank 1  report ---+-- gather --> rank 0 decides -- broadcast --+--> execute
    rank 2  report ---'                                            '--> execute

A report says what is ready, what failed, who wants to stop. The decision says which jobs to lease, which to drop
(stale on one rank: dropped on all), which tenants to take out and why, and whether to stop. A tick happens before every
job group and every :data:`IDLE_TICK_S` while there is nothing to train, so nobody waits in a collective for a slow
simulator and a signal on any rank is seen by all.

These messages go over a gloo group of their own. Tensors (gradients) go over the default group: NCCL on GPUs.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from nexus_lightning.queues.jobs import Job

if TYPE_CHECKING:
    from nexus_lightning.placement.membership import Order
    from nexus_lightning.runtime import Runtime

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds between two ticks of an idle run, and while another rank is not ready yet.
IDLE_TICK_S, BUSY_TICK_S = 0.2, 0.02
#: How long ranks wait while rank 0 records a dataset.
PREPARATION_TIMEOUT = timedelta(days=1)

#: (tenant, place in its stream).
JobKey = tuple[str, int]


class Ranks:
    """This process among the ranks of the run. With one rank every method answers at once and calls no collective.

    Attributes:
        rank / size: this process, and how many there are.
        local_size: how many there are on this machine.
        sent_bytes: of gradients that this rank has put into :meth:`sum_gradients` so far.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_size: int = 1) -> None:
        self.rank, self.size, self.local_size = rank, size, local_size
        self.sent_bytes = 0
        self._owns_group = False
        self._control: Any = None
        self._patient: Any = None

    @classmethod
    def join(cls, accelerator: str = "auto") -> Ranks:
        """Meet the other ranks that torchrun has started; with one process nothing happens.

        Before the configuration is looked at, so that what is wrong with one rank's is known to all.
        """
        size = int(os.environ.get("WORLD_SIZE", 1))
        if size == 1:
            return cls()
        ranks = cls(int(os.environ["RANK"]), size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
        if not dist.is_initialized():
            on_gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
            local = int(os.environ["LOCAL_RANK"])
            if on_gpu and local < torch.cuda.device_count():  # more ranks than devices are refused with the plan
                torch.cuda.set_device(local)
            dist.init_process_group("nccl" if on_gpu else "gloo", **_fresh_store())
            ranks._owns_group = True
        ranks._control = dist.new_group(backend="gloo")
        ranks._patient = dist.new_group(backend="gloo", timeout=PREPARATION_TIMEOUT)
        return ranks

    def leave(self) -> None:
        """End the process group, if :meth:`join` made it."""
        if self._owns_group:
            dist.destroy_process_group()
            self._owns_group = False

    @property
    def first(self) -> bool:
        """True on rank 0, which writes files and talks to the user."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Everybody's ``value`` by rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def decide(self, value: T, decide: Callable[[list[T]], Any]) -> Any:
        """Rank 0 makes one answer of everybody's ``value``; all get it (or rank 0's exception)."""
        if self.size == 1:
            return decide([value])
        values: list[Any] | None = [None] * self.size if self.first else None
        dist.gather_object(value, values, dst=0, group=self._control)
        answer = [self._attempt(lambda: decide(values)) if values is not None else None]
        return self._share(answer, self._control)

    def on_first(self, action: Callable[[], T]) -> T:
        """Rank 0 runs ``action``, however long it takes; all get what it returned (or raised)."""
        if self.size == 1:
            return action()
        return self._share([self._attempt(action) if self.first else None], self._patient)

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values of ``tensors`` on every rank, in place."""
        if self.size == 1:
            return
        for tensor in tensors:
            value = tensor.detach().cpu().contiguous()
            dist.broadcast(value, 0, group=self._control)
            if not self.first:
                tensor.copy_(value)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks of a small CPU tensor, in place."""
        if self.size > 1:
            dist.all_reduce(values, group=self._control)
        return values

    def most(self, value: int) -> int:
        """The largest of everybody's ``value``."""
        values = torch.tensor([value])
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._control)
        return int(values)

    def sum_gradients(self, flat: Tensor) -> None:
        """Sum over all ranks, in place, over the default group."""
        self.sent_bytes += flat.numel() * flat.element_size()
        dist.all_reduce(flat)

    @staticmethod
    def _attempt(action: Callable[[], Any]) -> tuple[Any, Exception | None]:
        try:
            return action(), None
        except Exception as error:
            return None, error

    @staticmethod
    def _share(answer: list[Any], group: Any) -> Any:
        dist.broadcast_object_list(answer, src=0, group=group)
        value, error = answer[0]
        if error is not None:
            raise error
        return value


def _fresh_store() -> dict[str, Any]:
    """Arguments of ``init_process_group`` that keep ranks which torchrun has started again from meeting the dead ones.

    torchrun's store outlives its ranks, and with it the addresses of those that died (pytorch#135712). On one machine
    the number of restarts tells the attempts apart. Machines count restarts each for themselves: there torchrun must
    not share its store (scripts/launch/torchrun.sh).
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shared or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) == 0:
        return {}
    if int(os.environ["GROUP_WORLD_SIZE"]) > 1:
        if os.environ["RANK"] == "0":
            log.warning("torchrun may fail to restart several machines: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
        return {}
    store, rank, size = next(rendezvous("env://"))
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    return {"store": PrefixStore(f"attempt_{attempt}", store), "rank": rank, "world_size": size}


@dataclass(frozen=True)
class Failure:
    """Why a tenant is taken out: reason and traceback."""

    reason: str
    details: str


@dataclass
class Report:
    """What one rank knows at a tick.

    Attributes:
        ready: job -> the policy version that acted (None: none did).
        failures: tenant -> what went wrong on this rank since the last tick.
        stop: nothing more may be leased; ``interrupted``: because of a signal.
        done: every target is met.
        busy: evaluations are pending or running here.
        evaluations: finished shares of evaluations, (tenant, version, episodes, video).
        schedule: digest of every job that was leased here so far; the debug check compares it.
        prepared: orders of tenants to join or leave that this rank can complete, or why it cannot.
        last: the last of them, for the message.
    """

    ready: dict[JobKey, int | None]
    failures: dict[str, Failure]
    stop: bool
    done: bool
    interrupted: bool
    busy: bool
    evaluations: list[tuple[str, int, list[dict[str, Any]], Any]]
    prepared: dict[int, str | None]
    schedule: str
    last: str


@dataclass
class Decision:
    """What every rank does after a tick."""

    lease: list[JobKey] = field(default_factory=list)
    stale: list[JobKey] = field(default_factory=list)
    failures: dict[str, Failure] = field(default_factory=dict)
    evaluations: list[Any] = field(default_factory=list)
    begin: list[Order] = field(default_factory=list)
    complete: dict[int, list[str | None]] = field(default_factory=dict)  # order -> what went wrong on each rank
    stop: bool = False
    interrupted: bool = False
    busy: bool = False


class ScheduleDiffers(RuntimeError):
    """The ranks have leased different jobs: a bug. Their weights may differ from here on, so the run ends."""


class Control:
    """Ticks of one rank; see the module docstring."""

    def __init__(self, ranks: Ranks, runtime: Runtime) -> None:
        self.ranks, self.runtime = ranks, runtime
        self._schedule = hashlib.sha256()
        self._last = "none"
        self._seen = 0
        self._idle = False
        self._leased: dict[JobKey, Job] = {}  # rank 0: leased while deciding
        self._shares: dict[tuple[str, int], dict[int, Any]] = {}  # rank 0: evaluations of which some shares are in

    def next_jobs(self) -> list[Job]:
        """The next job group, leased here as everywhere; empty when the runtime has stopped."""
        while True:
            self.runtime.prepare_jobs()  # calls no collective: a policy changes only when all ranks train it
            decision = self.tick(leasing=True)
            if decision.stop:
                return []
            if decision.lease:
                return [self._lease(key) for key in decision.lease]

    def tick(self, leasing: bool = False, busy: bool = False) -> Decision:
        """Exchange reports and do what rank 0 decided, except leasing (see :meth:`next_jobs`)."""
        runtime = self.runtime
        if leasing and self._idle:
            # Who has something ready waits for the others, inside the collective: that costs nothing.
            self._seen = runtime.scheduler.wait_for_ready(
                self._seen, BUSY_TICK_S if runtime.scheduler.depth() else IDLE_TICK_S
            )
        report = self._report(busy)
        decision = self.ranks.decide(report, lambda reports: self._decide(reports, leasing))
        self._idle = not decision.lease
        for tenant, failure in decision.failures.items():
            runtime.take_out(tenant, failure.reason, failure.details)
        ready = {job_key(job): job for job in runtime.scheduler.ready()}
        for key in decision.stale:
            runtime.scheduler.drop(ready[key].job_id, "policy_stale")
        for result, video in decision.evaluations:
            runtime.record_evaluation(result, video)
        for order in decision.begin:
            runtime.membership.begin(order)
        for number, errors in decision.complete.items():
            runtime.membership.complete(number, errors)
        runtime.interrupted |= decision.interrupted
        runtime.stopped |= decision.stop
        runtime.tick()
        return decision

    def _report(self, busy: bool) -> Report:
        runtime = self.runtime
        return Report(
            ready={job_key(job): job.behavior_policy_version for job in runtime.scheduler.ready()},
            failures=runtime.take_failures(),
            stop=runtime.must_stop(),
            done=runtime.targets_met(),
            interrupted=runtime.interrupted,
            busy=busy,
            evaluations=runtime.take_evaluations(),
            prepared=runtime.membership.prepared(),
            schedule=self._schedule.hexdigest(),
            last=self._last,
        )

    # ---- rank 0 --------------------------------------------------------------------------------------------------

    def _decide(self, reports: list[Report], leasing: bool) -> Decision:
        if len({report.schedule for report in reports}) > 1:
            last = "; ".join(f"rank {rank} trained last: {report.last}" for rank, report in enumerate(reports))
            raise ScheduleDiffers(f"the ranks have trained different jobs ({last}); please report this")
        runtime = self.runtime
        decision = Decision(
            failures=agreed_failures([report.failures for report in reports]),
            evaluations=self._merged_evaluations(reports),
            interrupted=any(report.interrupted for report in reports),
            busy=any(report.busy for report in reports),
        )
        # targets and job counts are the same everywhere; a signal or a deadline may have reached one rank only
        done = any(report.done for report in reports) and not runtime.membership.pending
        decision.stop = leasing and (done or any(report.stop for report in reports))
        if not leasing or decision.stop:
            return decision
        decision.begin = runtime.membership.take_new()
        on_all = set.intersection(*(set(report.prepared) for report in reports))
        decision.complete = {number: [report.prepared[number] for report in reports] for number in sorted(on_all)}
        common = set.intersection(*(set(report.ready) for report in reports))
        out = {*decision.failures, *(order.tenant for order in decision.begin if order.verb == "leave")}
        common = {key for key in common if key[0] not in out}
        versions = runtime.actor_versions()
        for key in sorted(common):
            bound = runtime.slots[key[0]].spec.config.max_policy_staleness
            acted = [v for report in reports if (v := report.ready[key]) is not None]
            if bound is not None and acted and versions[key[0]] - min(acted) > bound:
                decision.stale.append(key)
        allowed = common.difference(decision.stale)
        jobs = runtime.lease_group(lambda job: job_key(job) in allowed)
        self._leased = {job_key(job): job for job in jobs}
        decision.lease = list(self._leased)
        return decision

    def _merged_evaluations(self, reports: list[Report]) -> list[Any]:
        merged = []
        for rank, report in enumerate(reports):
            for tenant, version, episodes, video in report.evaluations:
                if tenant not in self.runtime.slots:  # it has left meanwhile
                    continue
                shares = self._shares.setdefault((tenant, version), {})
                shares[rank] = (episodes, video)
                if len(shares) < len(self.runtime.evaluating_ranks(tenant)):
                    continue
                parts = [shares[r] for r in self.runtime.evaluating_ranks(tenant)]
                merged.append(self.runtime.merge_evaluation(tenant, version, parts))
                # An older version of which a rank has skipped its share, busy with something newer, is never whole.
                self._shares = {k: v for k, v in self._shares.items() if k[0] != tenant or k[1] > version}
        return merged

    # ---- every rank ----------------------------------------------------------------------------------------------

    def _lease(self, key: JobKey) -> Job:
        runtime = self.runtime
        job = self._leased.pop(key, None)
        if job is None:
            job = runtime.scheduler.lease_next(
                runtime.actor_versions(),
                timeout_s=0.0,
                deadline_s=runtime.lease_deadline_s,
                where=lambda job: job_key(job) == key,
            )
        assert job is not None, f"rank {self.ranks.rank}: job {key} was reported ready and cannot be leased"
        self._last = f"job {key[1]} of tenant {key[0]!r} after version {runtime.slots[key[0]].policy_version}"
        self._schedule.update(self._last.encode())
        return job


def job_key(job: Job) -> JobKey:
    """The name of a job that all ranks agree on."""
    return job.tenant_id, int(job.metadata["cursor"])


def agreed_failures(by_rank: list[dict[str, Failure]]) -> dict[str, Failure]:
    """One failure per tenant: that of the lowest rank that has one, with the rank in its reason."""
    agreed: dict[str, Failure] = {}
    for rank, failures in enumerate(by_rank):
        for tenant, failure in failures.items():
            if tenant not in agreed:
                agreed[tenant] = Failure(f"{failure.reason} (on rank {rank})", failure.details)
    return agreed
