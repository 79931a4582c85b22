"""One tenant in this process: its slot, and everything that works for it on this rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_lightning.backbone import Backbone
from nexus_lightning.config import NexusConfig, TenantConfig, dataset_root
from nexus_lightning.environment import SimulatorEnv, make_env
from nexus_lightning.features.reuse import ReusePlan, plan_reuse
from nexus_lightning.features.store import FeatureStore
from nexus_lightning.inference.policies import ServedPolicies
from nexus_lightning.inference.replicas import Fleet
from nexus_lightning.inference.server import TenantInferenceServer
from nexus_lightning.memory import Admission
from nexus_lightning.monitoring.events import EventLog
from nexus_lightning.monitoring.progress import TenantStatus
from nexus_lightning.objectives.base import algorithm_class
from nexus_lightning.producers.base import Producer
from nexus_lightning.producers.demonstrations import (
    DemonstrationProducer,
    DemonstrationReader,
    DemonstrationStream,
    open_dataset,
)
from nexus_lightning.producers.evaluation import EvaluationProducer, Evaluator, list_episodes
from nexus_lightning.producers.rollouts import AbsentRolloutProducer, RolloutProducer
from nexus_lightning.queues.jobs import Scheduler
from nexus_lightning.queues.training import TrainingQueue
from nexus_lightning.ranks import Ranks
from nexus_lightning.run.mailbox import Evaluated, Failed, Lost, Mailbox
from nexus_lightning.shares import Share
from nexus_lightning.tenant import PassCounter, TenantSlot, derive_seed

if TYPE_CHECKING:
    from nexus_lightning.producers.remote import RemoteCollector


@dataclass
class Shared:
    """What the tenants of a run share on this rank.

    Attributes:
        config: of the run.
        run_dir: its folder.
        ranks: who takes part.
        backbone: whole; what rollouts, evaluations and readers run.
        admission: memory that is left for tenants.
        fleet: replicas of the inference server, which then answer in its place.
    """

    config: NexusConfig
    run_dir: Path
    ranks: Ranks
    backbone: Backbone
    events: EventLog
    queue: TrainingQueue
    scheduler: Scheduler
    served: ServedPolicies
    server: TenantInferenceServer
    store: FeatureStore
    mailbox: Mailbox
    admission: Admission
    fleet: Fleet | None = None

    @property
    def lease_deadline_s(self) -> float:
        """How long a lease lasts unless its holder renews it."""
        return self.config.queues.training.lease_deadline_s

    @property
    def max_restarts(self) -> int:
        """How often a rollout or evaluation that lost a simulator is begun again."""
        return 0 if self.config.placement.ray is None else self.config.placement.ray.max_restarts

    def evaluating_ranks(self, tenant: str) -> list[int]:
        """The ranks that run a tenant's simulators, in the order of their shares."""
        return self.config.placement.environments.get(tenant, list(range(self.ranks.size)))

    def quarantine(self, tenant: str, reason: str, details: str) -> None:
        """Ask for a tenant to be taken out, from any thread."""
        self.mailbox.post(Failed(tenant, reason, details))

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
            # `features.reuse` of an RL tenant is about its rollouts
            None if config.features.reuse == "never" and config.task != "rl" else self.store,
            passes,
            config.algorithm if config.task == "offline_rl" else None,
        )


@dataclass
class Unsaved:
    """A payload that could not be written yet: why, and when (monotonic seconds) it is tried again."""

    problem: str
    tries: int = 0
    retry_at_s: float = 0.0


class Member:
    """Everything of one tenant on this rank; once it has left nothing else knows of it.

    The actor alone writes here.

    Args:
        slot: the tenant's.
        shared: what it shares with the others.
        dataset: its opened LeRobotDataset, if there is one.

    Attributes:
        status: what the progress display shows.
        share: of the tenant's simulators; demonstrations are always divided over all ranks.
        reuse: whether its rollouts keep their features (RL).
        paused: the actor leaves its jobs alone: it was paused, or (services) has no workload.
        producers: threads that make its jobs and run its evaluations.
        ended_jobs: by state, of workloads that are over.
        saved: payload folder relative to the run folder, and its policy version; None before the first.
        unsaved: of a resident run: its payload that the disk has refused.
    """

    def __init__(self, slot: TenantSlot, shared: Shared, dataset: Any = None) -> None:
        self.slot, self.shared, self.dataset = slot, shared, dataset
        self.paused = False
        self.producers: list[Producer] = []
        self.ended_jobs: Counter[str] = Counter()
        self.saved: tuple[str | None, int] | None = None
        self.unsaved: Unsaved | None = None
        self.reader: DemonstrationReader | None = None
        self.begin()

    def begin(self) -> None:
        """What a new workload finds fresh."""
        slot, shared = self.slot, self.shared
        config = slot.spec.config
        self.status = TenantStatus(config.task, target=config.target_jobs, version=slot.policy_version)
        ranks = shared.evaluating_ranks(slot.name)
        rank = shared.ranks.rank
        self.share = Share(ranks.index(rank) if rank in ranks else None, len(ranks))
        self.evaluator: Evaluator | None = None
        self.reuse: ReusePlan | None = None
        if config.task == "rl":
            budget = int(shared.config.queues.training.max_gb_per_tenant * 1e9)
            self.reuse = plan_reuse(slot, shared.backbone, budget)

    def drop_data(self) -> None:
        """After a workload: what it read and evaluated."""
        self.dataset = self.reader = self.evaluator = self.reuse = self.slot.demonstrations = None

    @property
    def name(self) -> str:
        return self.slot.name

    @property
    def has_simulators(self) -> bool:
        """Whether this rank runs rollouts or evaluations of the tenant."""
        config = self.slot.spec.config
        wanted = config.environment is not None and (config.task == "rl" or config.eval.episodes > 0)
        return wanted and self.share.index is not None

    def build_producers(self) -> None:
        """Producers and evaluator of the tenant's task; nothing runs yet."""
        slot, shared, config = self.slot, self.shared, self.slot.spec.config
        make_env = self._simulators() if self.has_simulators else None
        env = None if make_env is None else self._environment(make_env)
        remote = None if env is None or make_env is None or shared.fleet is None else self._remote(env, make_env)
        if env is not None and config.eval.episodes:
            self.evaluator = self._evaluator(env, remote)
        if config.task == "rl":
            if config.dataset is not None:
                slot.demonstrations = DemonstrationStream(self._reader(), slot.spec.seed)
            if env is None:
                self.producers = [
                    AbsentRolloutProducer(
                        slot, shared.served, shared.scheduler, shared.quarantine, shared.lease_deadline_s
                    )
                ]
            else:
                self.producers = [self._rollout_producer(env, remote)]
            return
        self.producers = [
            DemonstrationProducer(
                slot,
                self._reader(),
                shared.scheduler,
                shared.queue,
                shared.quarantine,
                self._show_progress,
                warm_up=config.features.warm_up,
                share=Share(shared.ranks.rank, shared.ranks.size),
            )
        ]
        if self.evaluator is not None:
            self.producers.append(EvaluationProducer(self.evaluator, shared.quarantine))

    def _show_progress(self, text: str) -> None:
        self.status.state = text or "running"

    def _rollout_producer(self, env: SimulatorEnv, remote: RemoteCollector | None) -> RolloutProducer:
        shared, config = self.shared, self.slot.spec.config
        assert self.reuse is not None
        return RolloutProducer(
            self.slot,
            env,
            self.evaluator,
            shared.served,
            shared.server,
            shared.scheduler,
            shared.queue,
            shared.quarantine,
            shared.events,
            shared.lease_deadline_s,
            self.reuse.reuse,
            self.share,
            self.reader if config.features.warm_up else None,
            shared.max_restarts,
            remote,
        )

    def _reader(self) -> DemonstrationReader:
        """That of the tenant, made unless it joined with one."""
        if self.reader is None:
            config, shared = self.slot.spec.config, self.shared
            assert config.dataset is not None
            dataset = self.dataset
            if dataset is None:
                root = dataset_root(config, shared.config.data_dir)
                dataset = open_dataset(config.dataset, self.slot.spec.schema, root)
            self.reader = shared.make_reader(self.slot, config, dataset, self.slot.passes)
        return self.reader

    def _simulators(self) -> Callable[[], SimulatorEnv]:
        """How the tenant's simulators on this rank are made (also on another machine)."""
        slot, shared, config = self.slot, self.shared, self.slot.spec.config
        environment, is_rl = config.environment, config.task == "rl"
        assert environment is not None
        first, end = self.share.block(environment.num_envs) if is_rl else (0, config.eval.num_envs)
        return partial(
            make_env,
            environment,
            slot.spec.schema,
            slot.normalizer,
            num_envs=end - first,
            ray=shared.config.placement.ray,
            first_env=first,
            all_envs=environment.num_envs if is_rl else None,
            seed=derive_seed(slot.spec.seed, "environment") % 2**31,
            tenant=slot.name,
            group_size=algorithm_class(config.algorithm).group_size(config.algorithm) if is_rl else 1,
        )

    def _environment(self, make: Callable[[], SimulatorEnv]) -> SimulatorEnv:
        env, events, name = make(), self.shared.events, self.name
        env.on_recycle = lambda index, reason: events.point(
            "simulator_recycled", name, simulator=index, reason=reason, count=env.recycled
        )
        env.on_lost = lambda reason: self.shared.mailbox.post(Lost(name, reason))
        return env

    def _remote(self, env: SimulatorEnv, make: Callable[[], SimulatorEnv]) -> RemoteCollector:
        """The tenant's collector on the cluster, whose policy the replicas answer."""
        from nexus_lightning.producers.remote import RemoteCollector  # imports Ray

        shared, name, config = self.shared, self.name, self.slot.spec.config
        placement, fleet = shared.config.placement, shared.fleet
        assert placement.ray is not None and fleet is not None
        return RemoteCollector(
            name,
            make,
            lambda: fleet.service(name),
            lambda version: fleet.weights(name, version),
            {"num_cpus": placement.ray.num_cpus_per_collector},
            {
                "seed": self.slot.spec.seed,
                "algorithm": config.algorithm,
                "reuse": self.reuse is not None and self.reuse.reuse,
                "total_envs": env.num_envs * self.share.count,
                "max_restarts": shared.max_restarts,
                "torch_threads": placement.torch_threads,
            },
            shared.max_restarts,
            lambda reason: shared.mailbox.post(Lost(name, reason)),
        )

    def _evaluator(self, env: SimulatorEnv, remote: RemoteCollector | None) -> Evaluator:
        shared, name, config = self.shared, self.name, self.slot.spec.config.eval
        if shared.config.trainer.fast_dev_run:
            episodes = [(0, config.first_seed)]
        else:
            episodes = list_episodes(len(env.task_names), config.first_seed, config.episodes)
        video = config.video and self.share.index == 0
        return Evaluator(
            name,
            env,
            shared.served,
            shared.server,
            episodes[self.share.index :: self.share.count],
            lambda *result: shared.mailbox.post(Evaluated(*result)),
            lambda start, end: shared.events.span("environment", {name: len(episodes)}, start, end, kind="eval"),
            shared.events.now,
            shared.run_dir / "videos" / f"{name}.mp4" if video else None,
            shared.max_restarts,
            remote,
        )
