"""Everything of a run that is not a Lightning module: queues, producers, served policies, events, checkpoints."""

from __future__ import annotations

import copy
import logging
import signal
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tensordict import TensorDict

from nexus_lightning.backbone import Backbone
from nexus_lightning.checkpoint import Payload, PayloadError, write_payload
from nexus_lightning.config import ConfigError, NexusConfig, TenantConfig, dataset_root
from nexus_lightning.environment import SimulatorEnv, make_env
from nexus_lightning.features.reuse import PassCounter, ReusePlan, plan_reuse
from nexus_lightning.features.store import FeatureStore
from nexus_lightning.loop import Lease
from nexus_lightning.monitoring.events import EventLog
from nexus_lightning.monitoring.progress import RunStatus, TenantStatus
from nexus_lightning.objectives import job_fields
from nexus_lightning.objectives.policy_gradient import EXECUTED
from nexus_lightning.placement.control import Control, Failure, Ranks
from nexus_lightning.placement.membership import Membership, RunEnded
from nexus_lightning.placement.shares import Share, mean_of_rollouts
from nexus_lightning.producers.base import Producer
from nexus_lightning.producers.demonstrations import (
    DemonstrationProducer,
    DemonstrationReader,
    DemonstrationStream,
    open_dataset,
)
from nexus_lightning.producers.evaluation import (
    EvalResult,
    EvaluationProducer,
    Evaluator,
    list_episodes,
    result_dict,
    summarise,
)
from nexus_lightning.producers.rollouts import AbsentRolloutProducer, RolloutProducer, advantage_stage
from nexus_lightning.queues.inference import ServedPolicies, TenantInferenceServer
from nexus_lightning.queues.jobs import Job, JobState, LeaseLost, Scheduler
from nexus_lightning.queues.journal import Journal
from nexus_lightning.queues.replicas import Fleet
from nexus_lightning.queues.training import TrainingQueue
from nexus_lightning.schema import NormalizationStats, Normalizer
from nexus_lightning.tenant import TenantSlot, derive_seed

if TYPE_CHECKING:
    from nexus_lightning.module import MultiTenantModule
    from nexus_lightning.producers.remote import RemoteCollector

log = logging.getLogger(__name__)

T = TypeVar("T")

#: First and longest pause before a resident run tries again to write a payload that the disk has refused.
SAVE_AGAIN_S, SAVE_AGAIN_MOST_S = 2.0, 20.0

#: Columns of what was observed, by whether the partition holds features.
OBSERVED = {True: ("features", "state"), False: ("observation", "language_instruction")}


@dataclass
class Unsaved:
    """A payload that could not be written yet: why, and when (monotonic seconds) it is tried again."""

    problem: str
    tries: int = 0
    retry_at_s: float = 0.0


class Runtime:
    """Owns the queues, the inference server, one producer per tenant and the run folder.

    With one process tenants may join, work and leave while it runs: other threads ask for it through :meth:`call`.

    Lifecycle: built before ``fit``; :meth:`start` in ``on_train_start`` (after a checkpoint was restored); the loop
    calls :meth:`read`, :meth:`publish`, :meth:`complete`; :meth:`finish` runs the last evaluations; :meth:`close` ends
    every thread and process.

    Args:
        config: validated.
        backbone: shared with the module.
        slots: tenant name -> slot.
        run_dir: the run's folder.
        datasets: opened LeRobotDatasets of SFT tenants (opened for their statistics already).
        ranks: who takes part. With several, each holds its share of every tenant's rows and simulators, rank 0 writes
            files and logs, and what must be the same everywhere is agreed on in :attr:`control`.
        resident: of the services: the run waits for work until it is asked to stop, and may start with no tenant.
    """

    def __init__(
        self,
        config: NexusConfig,
        backbone: Backbone,
        slots: dict[str, TenantSlot],
        run_dir: Path,
        datasets: dict[str, Any],
        ranks: Ranks | None = None,
        resident: bool = False,
    ) -> None:
        ray = config.placement.ray
        if resident and ray is not None:  # nobody has joined the cluster, and replicas do not learn of new tenants
            raise ConfigError(["placement.ray: the services keep simulators on their machine; use another placement"])
        self.resident = resident
        self.config, self.backbone, self.slots, self.run_dir = config, backbone, slots, run_dir
        self.datasets = datasets
        self.ranks = Ranks() if ranks is None else ranks
        self.control = Control(self.ranks, self) if self.ranks.size > 1 else None
        self.fingerprint = backbone.fingerprint
        self.lease_deadline_s = config.queues.training.lease_deadline_s
        self.events = EventLog(run_dir / "events.jsonl" if self.ranks.first else None)
        self.queue = TrainingQueue(max_bytes_per_tenant=int(config.queues.training.max_gb_per_tenant * 1e9))
        journal = config.queues.training.journal and self.ranks.first
        self.journal = Journal(run_dir / "jobs.sqlite") if journal else None
        self.scheduler = Scheduler(on_terminal=self._clear, journal=self.journal)
        self.served = ServedPolicies(backbone)
        self.server = TenantInferenceServer(
            self.served,
            max_batch_size=config.queues.inference.max_batch_size,
            timeout_s=config.queues.inference.timeout_s,
            static_batch_size=config.queues.inference.static_batch_size,
            on_batch=self._on_batch,
        )
        self.replica_summary: list[dict[str, Any]] = []
        self._make_env: dict[str, Callable[[], SimulatorEnv]] = {}
        self.status = RunStatus()
        store = config.feature_store
        folder = Path(store.folder) if store.folder is not None else Path(config.data_dir) / "features"
        self.store = FeatureStore(folder if store.store == "disk" else None, int(store.budget_gb * 1e9))
        self.passes: dict[str, PassCounter] = {}
        self.reuse: dict[str, ReusePlan] = {}
        self.shares: dict[str, Share] = {}
        self.max_restarts = 0 if config.placement.ray is None else config.placement.ray.max_restarts
        self.producers: list[Producer] = []
        self.evaluators: dict[str, Evaluator] = {}
        self.readers: dict[str, DemonstrationReader] = {}
        self.demonstrations: dict[str, DemonstrationStream] = {}  # what RL tenants mix into their training
        self.on_metrics: Callable[[dict[str, float], int], object] = lambda metrics, step: None
        #: (slot, rows of a rollout) -> derived columns; the module's, set by the trainer.
        self.actor_forward: Callable[[TenantSlot, Any], TensorDict]
        self.actor: MultiTenantModule  # set by the trainer
        #: Tenants whose jobs the actor leaves alone: paused, or (services) without a workload.
        self.resting: set[str] = set()
        self.ended_jobs: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by state, of workloads that are over
        #: Told, from any thread, when :meth:`workload_over` may have become true of a tenant.
        self.on_workload: Callable[[str], object] = lambda tenant: None
        self.job_index = 0
        self.interrupted = False
        self.stopped = False  # several ranks: they have agreed to lease nothing more
        self.deadline_s: float | None = None
        self._saved: dict[str, str] = {}  # tenant -> payload folder, relative to the run folder
        self._saved_versions: dict[str, int] = {}
        self.unsaved: dict[str, Unsaved] = {}  # of a resident run: tenant -> its payload that the disk has refused
        self._restored_scheduler: dict[str, Any] | None = None
        self._metrics_lock = threading.Lock()
        # several ranks: what waits for the next tick
        self._mailbox = threading.Lock()
        self._failures: dict[str, Failure] = {}
        self._evaluations: list[tuple[str, int, list[dict[str, Any]], Path | None]] = []
        self._rollouts: dict[tuple[str, int], dict[str, float]] = {}
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closed = False
        self.membership = Membership(self)
        for slot in slots.values():
            self._enter(slot)
        self.fleet: Fleet | None = None  # replicas of the inference server, which then answer in its place
        if ray is not None and ray.inference_replicas and any(self._has_simulators(slot) for slot in slots.values()):
            self.fleet = Fleet(config, slots, self.served, self.fingerprint)

    def _enter(self, slot: TenantSlot) -> None:
        """What is kept of a tenant besides its slot, fresh."""
        name, config = slot.name, slot.spec.config
        self.status.tenants[name] = TenantStatus(config.task, target=config.target_jobs, version=slot.policy_version)
        self.passes[name], self.shares[name] = PassCounter(), self._share(name)
        if config.task == "rl":
            budget = int(self.config.queues.training.max_gb_per_tenant * 1e9)
            self.reuse[name] = plan_reuse(slot, self.backbone, budget)

    # ------------------------------------------------------------------------------------------ start and end

    def start(self) -> None:
        """Register tenants, publish their current heads, start the server and the producers."""
        fast = self.config.trainer.fast_dev_run
        for slot in self.slots.values():
            self._register(slot, 1 if fast else slot.spec.config.target_jobs)
        if self._restored_scheduler is not None:
            self.scheduler.load_state_dict(self._restored_scheduler)
        self.served.backbone = self._serving_backbone()
        self.server.start()
        if self.fleet is not None:
            self.fleet.wait_ready()
        for slot in self.slots.values():
            self.publish(slot)
            if slot.quarantined is not None:
                self.scheduler.fail_all(slot.name, slot.quarantined)
                continue
            self.producers += self._producers(slot)
        for name, evaluator in self.evaluators.items():
            slot = self.slots[name]
            if slot.spec.config.eval.at_start and not slot.evaluations and not fast:
                evaluator.request()
        for producer in self.producers:
            producer.start()

    def _serving_backbone(self) -> Backbone:
        """What rollouts and evaluations run: the actor's own weights, or a whole copy where
        ``placement.inference.device`` names a device. Beside an actor with shards :attr:`backbone` is that copy."""
        device = self.config.placement.inference.device
        if device == "training" or self.actor.sharded_backbone:
            return self.backbone
        return copy.deepcopy(self.backbone).to(device)  # from what Lightning has moved and converted

    def _register(self, slot: TenantSlot, target_jobs: int | None) -> None:
        config = slot.spec.config
        self.scheduler.register(
            slot.name,
            config.task,
            priority=config.priority,
            max_in_flight=config.max_in_flight,
            max_policy_staleness=config.max_policy_staleness,
            target_jobs=target_jobs,
            weight=config.weight,
        )

    def _producers(self, slot: TenantSlot) -> list[Producer]:
        config = slot.spec.config
        producers: list[Producer] = []
        env = self._environment(slot)
        remote = self._remote(slot, env)
        evaluator = None if env is None or not config.eval.episodes else self._evaluator(slot, env, remote)
        share = self.shares[slot.name]
        if config.task == "rl" and share.index is None:
            if config.dataset is not None:  # demonstrations are divided over all ranks
                self.demonstrations[slot.name] = DemonstrationStream(self._reader(slot), slot.spec.seed)
            return [AbsentRolloutProducer(slot, self.served, self.scheduler, self.quarantine, self.lease_deadline_s)]
        if config.task == "rl":
            assert env is not None
            reader = None if config.dataset is None else self._reader(slot)
            if reader is not None:
                self.demonstrations[slot.name] = DemonstrationStream(reader, slot.spec.seed)
            producers.append(
                RolloutProducer(
                    slot,
                    env,
                    evaluator,
                    self.served,
                    self.server,
                    self.scheduler,
                    self.queue,
                    self.quarantine,
                    self._on_rollout,
                    self.events.now,
                    self.lease_deadline_s,
                    self.reuse[slot.name].reuse,
                    self.passes[slot.name],
                    share,
                    reader if config.features.warm_up else None,
                    self.max_restarts,
                    remote,
                )
            )
            return producers
        reader = self._reader(slot)
        status = self.status.tenants[slot.name]

        def on_progress(text: str) -> None:
            status.state = text or "running"

        producers.append(
            DemonstrationProducer(
                slot,
                reader,
                self.scheduler,
                self.queue,
                self.quarantine,
                on_progress,
                warm_up=config.features.warm_up,
                share=Share(self.ranks.rank, self.ranks.size),
            )
        )
        if evaluator is not None:
            producers.append(EvaluationProducer(evaluator, self.quarantine))
        return producers

    def _reader(self, slot: TenantSlot) -> DemonstrationReader:
        """That of the tenant, made unless it joined with one."""
        if slot.name not in self.readers:
            config, dataset = slot.spec.config, self.datasets.pop(slot.name, None)
            assert config.dataset is not None
            if dataset is None:
                dataset = open_dataset(config.dataset, slot.spec.schema, dataset_root(config, self.config.data_dir))
            self.readers[slot.name] = self.make_reader(slot, config, dataset, self.passes[slot.name])
        return self.readers[slot.name]

    def make_reader(
        self, slot: TenantSlot, config: TenantConfig, dataset: Any, passes: PassCounter
    ) -> DemonstrationReader:
        """A reader of an opened dataset, as ``config`` says; reads all states and actions, so any thread but the
        actor's if that one has work."""
        assert config.dataset is not None
        return DemonstrationReader(
            dataset,
            config.dataset,
            slot.spec.schema,
            self.backbone,
            slot.head.feature_spec,
            # of an RL tenant `features.reuse` is about its rollouts
            None if config.features.reuse == "never" and config.task != "rl" else self.store,
            passes,
            config.algorithm if config.task == "offline_rl" else None,
        )

    def _has_simulators(self, slot: TenantSlot) -> bool:
        """Whether this rank runs rollouts or evaluations of the tenant."""
        config = slot.spec.config
        wanted = config.environment is not None and (config.task == "rl" or config.eval.episodes > 0)
        return wanted and self.shares[slot.name].index is not None

    def _environment(self, slot: TenantSlot) -> SimulatorEnv | None:
        config = slot.spec.config
        share = self.shares[slot.name]
        if not self._has_simulators(slot):
            return None
        assert config.environment is not None
        first, end = share.block(config.environment.num_envs) if config.task == "rl" else (0, config.eval.num_envs)
        make = self._make_env[slot.name] = partial(
            make_env,
            config.environment,
            slot.spec.schema,
            slot.normalizer,
            num_envs=end - first,
            ray=self.config.placement.ray,
            first_env=first,
            all_envs=config.environment.num_envs if config.task == "rl" else None,
            seed=derive_seed(slot.spec.seed, "environment") % 2**31,
            tenant=slot.name,
            group_size=1 if config.algorithm is None else config.algorithm.group_size or 1,
        )
        env = make()
        env.on_recycle = lambda index, reason: self.events.point(
            "simulator_recycled", slot.name, simulator=index, reason=reason, count=env.recycled
        )
        env.on_lost = lambda reason: self._on_lost(slot.name, reason)
        return env

    def _remote(self, slot: TenantSlot, env: SimulatorEnv | None) -> RemoteCollector | None:
        """The tenant's collector on the cluster, where there are replicas that answer it."""
        if self.fleet is None or env is None:
            return None
        from nexus_lightning.producers.remote import RemoteCollector  # imports Ray

        placement, fleet = self.config.placement, self.fleet
        assert placement.ray is not None
        return RemoteCollector(
            slot.name,
            self._make_env[slot.name],
            lambda: fleet.service(slot.name),
            lambda version: fleet.weights(slot.name, version),
            {"num_cpus": placement.ray.num_cpus_per_collector},
            {
                "seed": slot.spec.seed,
                "algorithm": slot.spec.config.algorithm,
                "reuse": slot.spec.config.task == "rl" and self.reuse[slot.name].reuse,
                "total_envs": env.num_envs * self.shares[slot.name].count,
                "max_restarts": self.max_restarts,
                "torch_threads": placement.torch_threads,
            },
            self.max_restarts,
            lambda reason: self._on_lost(slot.name, reason),
        )

    def _evaluator(self, slot: TenantSlot, env: SimulatorEnv, remote: RemoteCollector | None) -> Evaluator:
        config = slot.spec.config.eval
        if self.config.trainer.fast_dev_run:
            episodes = [(0, config.first_seed)]
        else:
            episodes = list_episodes(len(env.task_names), config.first_seed, config.episodes)
        share = self.shares[slot.name]
        video = config.video and share.index == 0
        evaluator = Evaluator(
            slot.name,
            env,
            self.served,
            self.server,
            episodes[share.index :: share.count],
            self._on_evaluation,
            lambda start, end: self.events.span("environment", {slot.name: len(episodes)}, start, end, kind="eval"),
            self.events.now,
            self.run_dir / "videos" / f"{slot.name}.mp4" if video else None,
            self.max_restarts,
            remote,
        )
        self.evaluators[slot.name] = evaluator
        return evaluator

    def finish(self) -> None:
        """After the last job: evaluate every tenant's last version (unless interrupted)."""
        if self.interrupted or self.resident:
            return
        waiting = []
        for name, evaluator in self.evaluators.items():
            slot = self.slots[name]
            if slot.quarantined is not None:
                continue
            if evaluator.requested_with_video != slot.policy_version:
                evaluator.request(video=True)
            waiting.append(evaluator)
        if self.control is not None:
            while self.control.tick(busy=any(not e.wait_idle(timeout_s=0.5) for e in waiting)).busy:
                if self.interrupted:
                    return
            return
        while any(not evaluator.wait_idle(timeout_s=0.5) for evaluator in waiting):
            self.tick()
            if self.interrupted:
                return

    def close(self) -> None:
        """Stop producers, server, simulators. Idempotent."""
        with self._mailbox:
            if self._closed:
                return
            self._closed = True
            unheard, self._commands = self._commands, deque()
        self.membership.close()
        for _, future in unheard:
            if future.set_running_or_notify_cancel():
                future.set_exception(RunEnded("the run has ended"))
        for producer in self.producers:
            producer.stop()
        self.scheduler.close()
        self.queue.close()
        for producer in self.producers:
            if producer.ident is not None:
                producer.join(timeout=60)
        self.server.shutdown()
        if self.fleet is not None:
            self.replica_summary = self.fleet.summary()
            self.fleet.close()
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
            if self.interrupted and signum == signal.SIGINT:
                raise KeyboardInterrupt
            self.interrupted = True
            where = "" if self.ranks.size == 1 else f" on rank {self.ranks.rank}"
            print(f"\n{signal.Signals(signum).name}{where}: finishing the current job, saving, stopping", flush=True)

        for signum in previous:
            signal.signal(signum, handler)

        def restore() -> None:
            for signum, old in previous.items():
                signal.signal(signum, old)

        return restore

    # ----------------------------------------------------------------------------------------- the loop's verbs

    def finished(self) -> bool:
        """True when no further job should be leased; the same on every rank."""
        return self.wants_to_stop() if self.control is None else self.stopped

    def wants_to_stop(self) -> bool:
        """What this rank knows of it."""
        return self.must_stop() or (self.targets_met() and not self.membership.pending)

    def targets_met(self) -> bool:
        """Every tenant has done its work."""
        return not self.resident and bool(self.producers) and self.scheduler.targets_met()

    def must_stop(self) -> bool:
        """Nothing more may be leased, whoever still has work."""
        trainer = self.config.trainer
        if self.interrupted or (self.deadline_s is not None and time.monotonic() >= self.deadline_s):
            return True
        return trainer.max_jobs is not None and self.job_index >= trainer.max_jobs

    def jobs_left(self) -> float:
        """How many jobs may still be leased before ``trainer.max_jobs`` is reached."""
        limit = self.config.trainer.max_jobs
        return float("inf") if limit is None else limit - self.job_index

    def lease_group(self, where: Callable[[Job], bool] | None = None, timeout_s: float = 0.0) -> list[Job]:
        """The next job, and ready jobs of other tenants that its backbone passes can serve; empty when none is ready.

        A job that brings observations instead of features says so in its metadata (``encode``). One job per tenant, so
        no tenant's own order changes.
        """
        jobs: list[Job] = []

        def fits(job: Job) -> bool:
            if where is not None and not where(job):
                return False
            key = jobs[0].metadata.get("encode") if jobs else None
            return not jobs or (job.metadata.get("encode") == key and all(j.tenant_id != job.tenant_id for j in jobs))

        while not jobs or (jobs[0].metadata.get("encode") is not None and len(jobs) < self.jobs_left()):
            job = self.scheduler.lease_next(
                self.actor_versions(),
                timeout_s=0.0 if jobs else timeout_s,
                deadline_s=self.lease_deadline_s,
                where=fits if jobs else where,
            )
            if job is None:
                break
            jobs.append(job)
        return jobs

    def tick(self) -> None:
        """Refresh what the progress bar shows (queue depths); cheap."""
        self.status.inference_waiting = self.server.waiting
        counts = self.scheduler.counts()
        states: dict[str, int] = {}
        for tenant in counts.values():
            for state, n in tenant.items():
                states[state] = states.get(state, 0) + n
        self.status.training_queue = {k: states.get(k, 0) for k in ("reserved", "needs_advantages", "ready", "leased")}

    def actor_versions(self) -> dict[str, int]:
        slots = {name: slot for name, slot in self.slots.items() if name not in self.resting}
        return {name: slot.policy_version for name, slot in slots.items() if slot.quarantined is None}

    def prepare_jobs(self) -> None:
        """The stages of jobs that wait for the actor (``algorithm.proximal``), right before one of them is leased.

        One job of a tenant at a time: its policy does not change until that job is trained, so what is computed here is
        exactly what the job starts from.
        """
        for name in self.actor_versions():
            slot = self.slots[name]
            algorithm = slot.spec.config.algorithm
            if algorithm is None or not algorithm.proximal or self.scheduler.depth(name):
                continue
            job = self.scheduler.lease_stage(JobState.NEEDS_ACTOR_FORWARD, self.lease_deadline_s, tenant_id=name)
            if job is None:
                continue
            try:
                self._actor_forward(slot, job)
                environment, share = slot.spec.config.environment, self.shares[name]
                assert environment is not None
                num_envs = environment.num_envs // share.count
                advantage_stage(
                    self.scheduler, self.queue, slot, self.lease_deadline_s, num_envs, normalize=share.count == 1
                )
            except Exception as error:
                self.quarantine(name, f"{type(error).__name__}: {error}", traceback.format_exc())

    def _actor_forward(self, slot: TenantSlot, job: Job) -> None:
        fields = ("vla_action", EXECUTED, *OBSERVED[job.metadata["features"]])
        self.queue.release(job.partition_id, "actor_forward")
        meta = self.queue.get_meta(fields, None, job.partition_id, "actor_forward")
        assert meta is not None, f"job {job.job_id} waits for the actor without its columns"
        start_s = self.events.now()
        self.queue.put(self.actor_forward(slot, self.queue.get_data(meta)), metadata=meta)
        self.queue.ack(meta)
        self.events.span("actor", {slot.name: job.sample_count}, start_s, self.events.now(), kind="actor_forward")
        self.scheduler.mark(
            job.job_id, JobState.NEEDS_ADVANTAGES, lease_id=job.lease_id, proximal_policy_version=slot.policy_version
        )

    def read(self, job: Job) -> Lease | None:
        """The columns of a leased job that its objective reads (views, no copy); None when it was ended meanwhile."""
        if job.metadata.get("absent"):
            return Lease(job, None, None)
        fields = job_fields(self.slots[job.tenant_id].spec.config)
        fields += OBSERVED[job.metadata["features"]]
        self.queue.release(job.partition_id, "train")  # rows that an expired lease had handed out
        try:
            meta = self.queue.get_meta(fields, None, job.partition_id, "train")
            assert meta is not None, f"job {job.job_id} was ready without its columns"
            return Lease(job, meta, self.queue.get_data(meta))
        except ValueError:
            if self.scheduler.get(job.job_id).state.terminal:  # a producer's failure has just cleared the partition
                return None
            raise

    def publish(self, slot: TenantSlot) -> None:
        """Hand the tenant's head to the inference queue under its policy version (digest compared there)."""
        self.served.publish(slot.name, slot.policy_version, slot.serving_head, slot.normalizer, slot.spec.schema)

    def complete(self, slot: TenantSlot, lease: Lease, metrics: dict[str, float]) -> None:
        """After publication: end the job, log, ask for an evaluation when one is due.

        One in between is asked for before the job ends, which lets the tenant's next rollout begin: on the simulators
        that both use the order is then always the same, and so is what a simulator remembers of earlier episodes
        (ManiSkill does, it can show after a touch).
        """
        job, config = lease.job, slot.spec.config
        evaluator = self.evaluators.get(slot.name)
        self.job_index += 1
        last = config.target_jobs is not None and slot.jobs_completed >= config.target_jobs
        every = config.eval.every_n_jobs
        if evaluator is not None and every is not None and slot.jobs_completed % every == 0 and not last:
            evaluator.request(slot.policy_version)
        try:
            if lease.meta is not None:
                self.queue.ack(lease.meta)
            self.scheduler.complete(job.job_id, lease_id=job.lease_id, policy_version=slot.policy_version)
        except (LeaseLost, ValueError) as error:
            # a tenant that was quarantined while its job trained has lost job and partition already
            self.job_index -= self.control is None  # all ranks count alike, whatever goes wrong on one of them
            self.quarantine(slot.name, str(error), "")
            return
        status = self.status.tenants[slot.name]
        status.jobs, status.version, status.loss = slot.jobs_completed, slot.policy_version, metrics["loss"]
        staleness = {}
        if job.behavior_policy_version is not None:
            staleness = {
                "staleness": float(slot.policy_version - 1 - job.behavior_policy_version),
                "dropped": float(self.scheduler.dropped(slot.name)),
                "in_flight_bound": float(self.scheduler.bound(slot.name)),
            }
        passes = {"backbone_passes_per_observation": self.passes[slot.name].passes_per_observation}
        self.log(slot.name, "train", {**metrics, **staleness, **passes})
        if not self.scheduler.wants_more(slot.name):
            self.on_workload(slot.name)
            if evaluator is not None:  # its target is met: the last version, while others still train
                evaluator.request(slot.policy_version, video=True)

    def quarantine(self, tenant: str, reason: str, details: str) -> None:
        """Take one tenant out of the run, with several ranks at the next tick and everywhere: no rank may train what
        another one has given up."""
        if self.control is None:
            self.take_out(tenant, reason, details)
        else:
            with self._mailbox:
                self._failures.setdefault(tenant, Failure(reason, details))

    def take_out(self, tenant: str, reason: str, details: str) -> None:
        """Fail the tenant's jobs, stop its producers, keep its last saved payload."""
        slot = self.slots[tenant]
        if slot.quarantined is not None or self._closed:
            return
        slot.quarantined = reason
        self.status.tenants[tenant].state = "quarantined"
        self.events.point("quarantine", tenant, reason=reason)
        if self.ranks.first:
            where = self._keep_details(tenant, details or reason)
            log.error("tenant %s is quarantined: %s (%s)", tenant, reason, where)
        for producer in self.producers:
            if producer.tenant == tenant:
                producer.stop()
        if self.scheduler.registered(tenant):  # not of a tenant that is leaving
            self.scheduler.fail_all(tenant, reason)
        self.on_workload(tenant)

    def _keep_details(self, tenant: str, details: str) -> str:
        """Write them to the run folder; what the log says of that. A full disk must not keep a tenant in the run."""
        path = self.run_dir / "errors" / f"{tenant}.txt"
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_text(details)
        except OSError as error:
            return f"errors/{tenant}.txt cannot be written: {error.strerror}\n{details}"
        return f"traceback in errors/{tenant}.txt"

    def log(self, tenant: str, group: str, metrics: dict[str, float]) -> None:
        """``<group>/<tenant>/<metric>`` at the current job index, with the wall time."""
        slot = self.slots[tenant]
        row = {f"{group}/{tenant}/{k}": v for k, v in metrics.items()}
        row[f"{tenant}/step"] = float(slot.jobs_completed)
        row["time_s"] = self.events.now()
        with self._metrics_lock:
            self.on_metrics(row, self.job_index)

    # -------------------------------------------------------------------------------- tenants that come and go
    # Everything here but `call` runs on the actor thread between two jobs, where no tenant trains: a join
    # may draw from the global random generators (inside its own scope) and change the optimizers' list.

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run ``action`` on the actor thread, between two jobs; an idle actor wakes at once.

        Raises:
            RunEnded: the run has ended; so does the future when it ends before the action's turn.
            RuntimeError: the run has several ranks (they would have to agree on when).
        """
        future: Future[T] = Future()
        with self._mailbox:
            if self._closed:
                raise RunEnded("the run has ended")
            if self.control is not None:
                raise RuntimeError("several ranks would have to agree on when; tenants join and leave by `membership`")
            self._commands.append((action, future))
        self.scheduler.wake()
        return future

    def run_commands(self) -> None:
        """What :meth:`call` was given so far, in order; what comes meanwhile waits for the next job to pass."""
        for _ in range(len(self._commands)):
            action, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)

    def add_tenant(self, slot: TenantSlot, payload: Payload | None = None) -> None:
        """A tenant joins without a workload, with the state of ``payload`` if there is one. All or nothing."""
        name = slot.name
        if name in self.slots:
            raise ValueError(f"tenant {name!r} is there already: remove it first or choose another name")
        try:
            self.slots[name] = slot
            self.resting.add(name)
            self.actor.add_tenant(slot)
            if payload is not None:
                slot.restore(payload)
            self._enter(slot)
            self.publish(slot)
        except Exception:
            self.remove_tenant(name)
            raise
        self.events.point("join", name)

    def remove_tenant(self, name: str) -> None:
        """A tenant without a workload leaves; nothing of it stays in memory (spans in the event log do)."""
        self.slots.pop(name, None)
        self.actor.remove_tenant(name)
        if name in self.served.tenants():
            self.served.remove(name)
        self.server.forget(name)
        if self.scheduler.registered(name):
            self.scheduler.unregister(name)
        self._drop_data(name)
        for partition in self.queue.partitions(name):
            self.queue.clear(partition)
        tables = (self.status.tenants, self.passes, self.shares, self._saved, self._saved_versions, self.ended_jobs)
        for table in (*tables, self.unsaved):
            table.pop(name, None)
        self.resting.discard(name)
        self.events.point("leave", name)

    def start_workload(
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
            reader: of its dataset (see :meth:`make_reader`: it may take seconds); None when the task needs none.
            stats: of the dataset; they become the tenant's normalisation if nothing was trained with another one yet.
            resume: go on with the workload that the slot was saved in the middle of; ``config`` is that one's.
            workload: its id, kept in the payload.
        """
        slot = self.slots[name]
        self._end_jobs(name, "a workload begins")  # low-level jobs that nobody has ended
        try:
            if not resume:
                slot.start_workload(config, workload)
                if stats is not None and slot.policy_version == 0:
                    slot.normalizer.load_state_dict(Normalizer(slot.spec.schema, *stats).state_dict())
                    self.served.renormalize(name, slot.normalizer)
                self.actor.follow_workload(slot)
            self._enter(slot)
            if reader is not None:
                self.readers[name], self.passes[name] = reader, reader.passes
            self.save_payload(slot)  # what a resume goes on from until the next one is saved
            done = slot.jobs_completed
            self._register(slot, None if config.target_jobs is None else config.target_jobs - done)
            producers = self._producers(slot)
            if evaluator := self.evaluators.get(name):
                if not self.scheduler.wants_more(name):  # killed between the last job and its evaluation
                    evaluator.request(video=True)
                elif config.eval.at_start and not slot.evaluations:
                    evaluator.request()
        except Exception:
            self.stop_workload(name)
            self._drop_data(name)
            slot.ended = True
            raise
        self.producers += producers
        self.resting.discard(name)
        for producer in producers:
            producer.start()

    def workload_over(self, name: str) -> bool:
        """True when a tenant's workload has failed, or met its target and evaluated its last version. Any thread."""
        slot = self.slots[name]
        if slot.quarantined is not None:
            return True
        if self.scheduler.wants_more(name):
            return False
        evaluated = [evaluation["policy_version"] for evaluation in slot.evaluations]
        return name not in self.evaluators or slot.policy_version in evaluated

    def stop_workload(self, name: str) -> list[Producer]:
        """The first half of a workload's end: its jobs fail, its producers are asked to stop.

        Returns:
            The producers. Join them off the actor thread (a simulator may take seconds to close), then hand them to
            :meth:`end_workload`.
        """
        self.resting.add(name)
        leaving = [producer for producer in self.producers if producer.tenant == name]
        for producer in leaving:
            producer.stop()
        self._end_jobs(name, "the workload has ended")
        return leaving

    def _end_jobs(self, name: str, reason: str) -> None:
        """The tenant's jobs in flight fail and it is unregistered; how many ended how is kept."""
        if self.scheduler.registered(name):
            self.scheduler.fail_all(name, reason)
            self.ended_jobs[name].update(self.scheduler.counts()[name])
            self.scheduler.unregister(name, reason)

    def job_counts(self) -> dict[str, dict[str, int]]:
        """tenant -> state -> jobs: in flight now, ended in all its workloads since this process began. Any thread."""
        table = {name: Counter(counts) for name, counts in self.scheduler.counts().items()}
        for name, ended in list(self.ended_jobs.items()):
            table.setdefault(name, Counter()).update(ended)
        return {name: dict(counts) for name, counts in table.items()}

    def end_workload(self, name: str, producers: list[Producer]) -> None:
        """The second half: data and readers are dropped, the policy is saved. The tenant stays and may work again."""
        slot = self.slots[name]
        self.producers = [producer for producer in self.producers if producer not in producers]
        self._drop_data(name)
        for partition in self.queue.partitions(name):
            if partition.startswith(f"{name}/{slot.spec.config.task}/"):  # of a job that ended while it was being put
                self.queue.clear(partition)
        slot.ended = True
        slot.head.zero_grad()
        self.status.tenants[name].state = "idle" if slot.quarantined is None else "failed"
        self._save_or_owe(slot)

    def _drop_data(self, name: str) -> None:
        for table in (self.evaluators, self.readers, self.demonstrations, self.datasets, self.reuse):
            table.pop(name, None)

    # -------------------------------------------------------------------------------------------- several ranks

    def _share(self, tenant: str) -> Share:
        """Of the tenant's simulators; demonstrations are always divided over all ranks."""
        ranks = self.evaluating_ranks(tenant)
        return Share(ranks.index(self.ranks.rank) if self.ranks.rank in ranks else None, len(ranks))

    def evaluating_ranks(self, tenant: str) -> list[int]:
        """The ranks that run the tenant's simulators, in the order of their shares."""
        return self.config.placement.environments.get(tenant, list(range(self.ranks.size)))

    def take_failures(self) -> dict[str, Failure]:
        """What :meth:`quarantine` was told since the last tick."""
        with self._mailbox:
            failures, self._failures = self._failures, {}
        running = {name for name, slot in self.slots.items() if slot.quarantined is None}
        return {tenant: failure for tenant, failure in failures.items() if tenant in running}

    def take_evaluations(self) -> list[tuple[str, int, list[dict[str, Any]], Path | None]]:
        """Shares of evaluations that were finished here since the last tick."""
        with self._mailbox:
            taken, self._evaluations = self._evaluations, []
        return taken

    def merge_evaluation(
        self, tenant: str, version: int, shares: list[tuple[list[dict[str, Any]], Path | None]]
    ) -> tuple[EvalResult, Path | None]:
        """All ranks' episodes as one result, in the order in which one rank would run them."""
        episodes: list[dict[str, Any]] = [{}] * sum(len(part) for part, _ in shares)
        for index, (part, _) in enumerate(shares):
            episodes[index :: len(shares)] = part
        return summarise(tenant, version, episodes), next((video for _, video in shares if video is not None), None)

    def rollout_metrics(self, job: Job) -> dict[str, float] | None:
        """What this rank's share of a job's rollout gave; can be asked once."""
        with self._mailbox:
            return self._rollouts.pop((job.tenant_id, job.metadata["cursor"]), None)

    def log_rollout(self, tenant: str, parts: list[dict[str, float]]) -> None:
        """Log the metrics of all ranks' shares of one rollout."""
        metrics = mean_of_rollouts(parts)
        if "episode_return" in metrics:
            self.status.tenants[tenant].episode_return = metrics["episode_return"]
        self.log(tenant, "train", metrics)

    # ---------------------------------------------------------------------------------------------- checkpoints

    def save_payloads(self) -> None:
        """Write every tenant whose version is not on disk yet. A quarantined tenant keeps what it had."""
        for name, slot in self.slots.items():
            if self._saved_versions.get(name) != slot.policy_version:
                self._save_or_owe(slot)

    def save_unsaved(self) -> None:
        """Write again what the disk has refused, where its pause is over."""
        for name in list(self.unsaved):
            self._save_or_owe(self.slots[name])

    def _save_or_owe(self, slot: TenantSlot) -> None:
        """:meth:`save_payload`. In a resident run one that cannot be written stays due, and the run goes on."""
        owed, name = self.unsaved.get(slot.name), slot.name
        if slot.quarantined is not None or (
            owed is not None and time.monotonic() < owed.retry_at_s and not self.must_stop()
        ):
            return
        try:
            self.save_payload(slot)
        except (OSError, PayloadError) as error:
            if not self.resident:
                raise
            if owed is None:
                owed = self.unsaved[name] = Unsaved(str(error))
                log.error("%s; it is tried again until it is written", error)
            pause_s = min(SAVE_AGAIN_S * 2**owed.tries, SAVE_AGAIN_MOST_S)
            owed.problem, owed.tries, owed.retry_at_s = str(error), owed.tries + 1, time.monotonic() + pause_s

    def save_payload(self, slot: TenantSlot) -> Path | None:
        """Write one tenant as it is now. Returns its folder; None on all ranks but the first.

        Raises:
            OSError: of :func:`~nexus_lightning.checkpoint.write_payload`; the version still counts as not saved.
        """
        name = slot.name
        tensors, optimizer = slot.tensors(), slot.optimizer_state()  # sharded ones are gathered: on every rank
        pinned = self._saved_versions.get(name)
        if not self.ranks.first:
            self._saved_versions[name] = slot.policy_version
            return None
        path = write_payload(
            self.run_dir / "tenants",
            name,
            slot.policy_version,
            tensors=tensors,
            optimizer=optimizer,
            rng=slot.rng.state,
            state=slot.state(),
            manifest=slot.manifest(self.config.backbone, self.fingerprint),
            keep=self.config.trainer.keep_payloads,
            pinned=[] if pinned is None else [pinned],
            extra=self._processor_files(slot),
        )
        self._saved[name], self._saved_versions[name] = str(path.relative_to(self.run_dir)), slot.policy_version
        if self.unsaved.pop(name, None) is not None:
            log.warning("tenant %s: its payload is written now: %s", name, path.name)
        return path

    def _processor_files(self, slot: TenantSlot) -> dict[str, bytes]:
        """LeRobot's form of the normalisation, for tenants with a LeRobotDataset (others never load LeRobot)."""
        if slot.spec.config.dataset is None:
            return {}
        from nexus_lightning.processors import processor_files

        return processor_files(slot.normalizer, slot.spec.schema)

    def checkpoint_state(self) -> dict[str, Any]:
        """What Lightning's checkpoint says about the tenants (JSON-able; tensors are in the payloads)."""
        return {
            "tenants": dict(self._saved),
            "scheduler": self.scheduler.state_dict(),
            "job_index": self.job_index,
            "backbone_fingerprint": self.fingerprint,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        if saved["backbone_fingerprint"] != self.fingerprint:
            raise ValueError(
                "ckpt_path: the checkpoint was trained on another backbone (its fingerprint is "
                f"{saved['backbone_fingerprint'][:12]}, this one's {self.fingerprint[:12]}); set the same backbone"
            )
        self._saved = dict(saved["tenants"])
        self._saved_versions = {n: self.slots[n].policy_version for n in self._saved if n in self.slots}
        self._restored_scheduler = saved["scheduler"]
        self.job_index = saved["job_index"]
        for name, slot in self.slots.items():
            status = self.status.tenants[name]
            status.jobs, status.version = slot.jobs_completed, slot.policy_version

    # ------------------------------------------------------------------------------------------------ callbacks

    def _clear(self, job: Job) -> None:
        self.queue.clear(job.partition_id)

    def _on_batch(self, tenants: dict[str, int], start_s: float, end_s: float, encodes: int) -> None:
        offset = self.events.now() - time.monotonic()
        self.events.span("inference", tenants, start_s + offset, end_s + offset, kind=f"encode{encodes}")

    def _on_lost(self, tenant: str, reason: str) -> None:
        self.events.point("begun_again", tenant, reason=reason)
        log.warning("tenant %s: begins again what a simulator or machine was lost in: %s", tenant, reason)

    def _on_rollout(self, tenant: str, job: Job, metrics: dict[str, float], start_s: float, end_s: float) -> None:
        self.events.span("environment", {tenant: job.sample_count}, start_s, end_s, kind="rollout")
        if self.control is not None:
            with self._mailbox:
                self._rollouts[tenant, job.metadata["cursor"]] = metrics
            return
        if "episode_return" in metrics:
            self.status.tenants[tenant].episode_return = metrics["episode_return"]
        self.log(tenant, "train", metrics)

    def _on_evaluation(self, tenant: str, version: int, episodes: list[dict[str, Any]], video: Path | None) -> None:
        if self.control is None:
            self.record_evaluation(summarise(tenant, version, episodes), video)
        else:
            with self._mailbox:
                self._evaluations.append((tenant, version, episodes, video))

    def record_evaluation(self, result: EvalResult, video: Path | None) -> None:
        """Keep, show and log the result of a whole evaluation."""
        slot = self.slots[result.tenant]
        # a new list: the old one may be on its way into a payload (this is the evaluation's thread)
        slot.evaluations = [*slot.evaluations, {**result_dict(result), "jobs_completed": slot.jobs_completed}]
        self.status.tenants[result.tenant].success_rate = result.success_rate
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
            self.events.point("video", result.tenant, path=str(video.relative_to(self.run_dir)))
        self.on_workload(result.tenant)
