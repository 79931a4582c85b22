"""TorchRL collector -> training jobs of an RL tenant."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDict
from torchrl.collectors import Collector

from nexus_lightning.backbone import VLAFeature, concatenate_features
from nexus_lightning.environment import SimulatorEnv
from nexus_lightning.features.reuse import in_row_order
from nexus_lightning.inference.client import TenantPolicyClient
from nexus_lightning.inference.policies import ServedPolicies
from nexus_lightning.inference.server import TenantInferenceServer
from nexus_lightning.monitoring.events import EventLog
from nexus_lightning.objectives.base import RolloutSettings, algorithm_class
from nexus_lightning.objectives.policy_gradient import EXECUTED, LOG_PROBS, PROXIMAL_VALUE, cut, next_values
from nexus_lightning.producers.base import Producer, RemoteSimulators
from nexus_lightning.producers.demonstrations import DemonstrationReader
from nexus_lightning.producers.evaluation import Episode, Evaluated, Evaluator, run_episodes
from nexus_lightning.queues.jobs import Job, JobState, Scheduler
from nexus_lightning.queues.training import TrainingQueue
from nexus_lightning.shares import Metric, Share
from nexus_lightning.simulator import SimulatorDied
from nexus_lightning.tenant import TenantSlot, derive_seed

#: Columns of a partition that the advantage stage reads; of algorithms with a critic also the next ones.
ADVANTAGE_FIELDS = (LOG_PROBS, EXECUTED, "reward", "done", "terminated", "episode_seed")
CRITIC_FIELDS = ("state_value", "bootstrap")
#: Rollout r draws its episode seeds from r * EPISODES_PER_ROLLOUT on, so that a rollout depends on its index alone.
EPISODES_PER_ROLLOUT = 100_000


@dataclass
class Rollout:
    """What a rollout gives to training.

    Attributes:
        partition: the columns of a training job, rows ``[N * L]``: simulator 0's decisions, then simulator 1's ...
        metrics: see :func:`rollout_metrics`.
        observed: observations that it took, those after a cut included; each went through the backbone once.
    """

    partition: TensorDict
    metrics: dict[str, Metric]
    observed: int


class TenantCollector(Collector):
    """TorchRL's collector of one tenant: its simulators and its policy, asked for one rollout or evaluation at a time.

    Every rollout starts from fresh resets and is a pure function of (tenant seed, rollout index, policy version), as
    far as a simulator's reset forgets what was played before it (ManiSkill's not to the last bit); so a rollout
    that loses a simulator is simply begun again, ``max_restarts`` times.

    Args:
        create_env_fn: the simulators, or a function that makes them.
        policy: the tenant's client of the inference queue, sampling.
        seed: the tenant's.
        algorithm: settings of the tenant's.
        reuse: keep the features that the decisions were taken on in place of the images.
        total_envs: of the tenant on all ranks.
        max_restarts: of one rollout or evaluation.
        **kwargs: of the base class.
    """

    def __init__(
        self,
        create_env_fn: SimulatorEnv | Callable[[], SimulatorEnv],
        policy: TenantPolicyClient,
        *,
        seed: int,
        algorithm: RolloutSettings | None,
        reuse: bool,
        total_envs: int,
        max_restarts: int = 0,
        **kwargs: Any,
    ) -> None:
        env = create_env_fn if isinstance(create_env_fn, SimulatorEnv) else create_env_fn()
        self.simulators, self.client = env, policy
        self.seed, self.algorithm, self.reuse, self.max_restarts = seed, algorithm, reuse, max_restarts
        policy.noise_rows = (env.first_env, total_envs)
        policy.record_features = reuse
        chunks = 1 if algorithm is None else algorithm.chunks_per_job  # without an algorithm it only evaluates
        assert chunks is not None, "validated with the config"
        ours: dict[str, Any] = {
            "frames_per_batch": env.num_envs * chunks,
            "total_frames": -1,
            "reset_at_each_iter": True,
            "use_buffers": False,
            "track_traj_ids": False,
            "trust_policy": True,
            "auto_register_policy_transforms": False,
        }
        super().__init__(env, policy, **{**kwargs, **ours})

    def collect(self, index: int, version: int) -> Rollout:
        """Rollout ``index`` with policy ``version``.

        Raises:
            SimulatorDied: a simulator was lost once more than ``max_restarts``.
        """
        for restarts in itertools.count():
            try:
                return self._collect(index, version)
            except SimulatorDied as error:
                if restarts == self.max_restarts:
                    raise
                self.simulators.on_lost(str(error))  # the next reset puts fresh ones in place of those that are gone
                self.client.take_features()
            finally:
                self.client.rest()  # what comes next may be a wait for the actor
        raise AssertionError("counts without end")

    def evaluate(self, episodes: Sequence[Episode], version: int, record: Sequence[Episode]) -> Evaluated:
        """Every episode once on the same simulators, with deterministic actions of policy ``version``."""
        policy = self.client.server.client(self.client.tenant, sample=False, version=version)
        return run_episodes(self.simulators, policy, episodes, record, max_restarts=self.max_restarts)

    def _collect(self, index: int, version: int) -> Rollout:
        client, env, algorithm = self.client, self.simulators, self.algorithm
        assert algorithm is not None
        client.version = version
        client.generator.manual_seed(derive_seed(self.seed, "rollout", index))
        env.episodes_started = [index * EPISODES_PER_ROLLOUT] * env.num_envs
        # not iter(self), which closes the simulators for good at the first error
        rollout = cast(TensorDict, next(self.iterator()))
        assert bool((rollout["policy_version"] == version).all()), "a rollout mixed policy versions"
        observed = rollout.numel()
        partition = to_partition(rollout)
        if algorithm_class(algorithm).needs_critic:
            partition["bootstrap"], more = self._bootstrap_values(rollout)
            observed += more
        partition = partition.flatten()
        if self.reuse:
            decisions = client.take_features()
            assert len(decisions) == rollout.shape[1], "the policy was asked for something else than the rollout"
            features = concatenate_features(decisions)[in_row_order(decisions, env.num_envs)]
            partition = with_features(partition, cast(VLAFeature, features))
        return Rollout(partition, rollout_metrics(rollout, algorithm), observed)

    def _bootstrap_values(self, rollout: TensorDict) -> tuple[torch.Tensor, int]:
        """The critic of the state after each decision where the rollout was cut there, else 0, ``[N, L, 1]``; and how
        often it was asked."""
        assert self.algorithm is not None
        following = cast(TensorDict, rollout["next"])
        values = torch.zeros_like(rollout["state_value"])
        ended = algorithm_class(self.algorithm).ended(following, self.algorithm)
        where = cut(following["done"], ended).squeeze(-1)
        if bool(where.any()):
            values[where] = self.client.value(following[where])
        return values, int(where.sum())


class RolloutProducer(Producer):
    """version -> reserve -> roll out -> advantages -> ready, several jobs ahead of the actor up to the bounds.

    With ``algorithm.proximal`` a job waits for the actor instead, which adds its own view of the rollout and then the
    advantages when the job's turn has come (:meth:`~nexus_lightning.run.schedule.Schedule.prepare`).

    A rollout is a pure function of (tenant seed, rollout index, policy version), see :class:`TenantCollector`: a
    resumed run needs the index alone. Evaluations of the tenant run on the same simulators between two rollouts. The
    features of demonstrations that are mixed into the training (``warm_up``) are computed before the first one. With
    ``remote`` the collector is elsewhere, and ``env`` only says how many simulators it has.
    """

    def __init__(
        self,
        slot: TenantSlot,
        env: SimulatorEnv,
        evaluator: Evaluator | None,
        served: ServedPolicies,
        server: TenantInferenceServer,
        scheduler: Scheduler,
        queue: TrainingQueue,
        on_failure: Callable[[str, str, str], None],
        events: EventLog,
        lease_deadline_s: float,
        reuse: bool,
        share: Share | None = None,
        warm_up: DemonstrationReader | None = None,
        max_restarts: int = 0,
        remote: RemoteSimulators | None = None,
    ) -> None:
        super().__init__(slot.name, on_failure)
        self.remote = remote
        algorithm = slot.spec.config.algorithm
        assert algorithm is not None
        self.slot, self.env, self.evaluator, self.algorithm = slot, env, evaluator, algorithm
        self.served, self.scheduler, self.queue = served, scheduler, queue
        self.events, self.lease_deadline_s = events, lease_deadline_s
        self.reuse, self.warm_up, self.max_restarts = reuse, warm_up, max_restarts
        self.share = Share() if share is None else share
        self.policy = server.client(slot.name, sample=True)

    def produce(self) -> None:
        assert self.algorithm.chunks_per_job is not None, "validated with the config"
        if self.warm_up is not None and not self.warm_up.warm_up(self.stopping.is_set):
            return
        frames = self.env.num_envs * self.algorithm.chunks_per_job
        collector = self._collector()
        index = self.slot.cursor
        while not self.stopping.is_set():
            if self.evaluator is not None:
                self.evaluator.run_pending(self.stopping.is_set)
            if not self.scheduler.wants_more(self.tenant):
                if self.evaluator is None:
                    return
                self.evaluator.wait_for_request(0.2)
                continue
            version = self.served.pin(self.tenant)
            try:
                job = self.scheduler.reserve(
                    self.tenant,
                    frames,
                    behavior_policy_version=version,
                    domain=type(self.env).__name__,
                    schema_signature=self.slot.spec.schema.signature,
                    metadata={"cursor": index + 1, "features": self.reuse},
                )
                if job is None:
                    self.scheduler.wait_for_room(self.tenant, timeout_s=0.2)
                    continue
                try:
                    self._roll_out(job, index, version, collector)
                except Exception as error:
                    self.scheduler.fail(job.job_id, f"{type(error).__name__}: {error}")
                    raise
            finally:
                self.served.unpin(self.tenant, version)
            index += 1

    def release(self) -> None:
        if self.evaluator is not None:
            self.evaluator.abandon()
        self.env.close()
        if self.remote is not None:
            self.remote.close()

    def stop(self) -> None:
        super().stop()
        if self.remote is not None:
            self.remote.close()  # nothing else would end what it waits for

    def _collector(self) -> TenantCollector | RemoteSimulators:
        if self.remote is not None:
            return self.remote
        return TenantCollector(
            self.env,
            self.policy,
            seed=self.slot.spec.seed,
            algorithm=self.algorithm,
            reuse=self.reuse,
            total_envs=self.env.num_envs * self.share.count,
            max_restarts=self.max_restarts,
        )

    def _roll_out(self, job: Job, index: int, version: int, collector: TenantCollector | RemoteSimulators) -> None:
        start_s = self.events.now()
        rollout = collector.collect(index, version)
        self.events.span("environment", {self.tenant: job.sample_count}, start_s, self.events.now(), kind="rollout")
        self.slot.passes.add(observed=rollout.observed, encoded=rollout.observed)
        self.queue.put(job.partition_id, rollout.partition, tenant_id=self.tenant)
        if algorithm_class(self.algorithm).waits_for_actor(self.algorithm):  # it goes on, right before the job trains
            self.scheduler.mark(job.job_id, JobState.NEEDS_ACTOR_FORWARD, rollout=rollout.metrics)
            return
        self.scheduler.mark(job.job_id, JobState.NEEDS_ADVANTAGES, rollout=rollout.metrics)
        advantage_stage(self.scheduler, self.queue, self.slot, self.lease_deadline_s, self.env.num_envs)


class AbsentRolloutProducer(Producer):
    """On a rank without simulators of the tenant (placement.environments): its jobs as they are elsewhere, no rows."""

    def __init__(
        self,
        slot: TenantSlot,
        served: ServedPolicies,
        scheduler: Scheduler,
        on_failure: Callable[[str, str, str], None],
        lease_deadline_s: float,
    ) -> None:
        super().__init__(slot.name, on_failure)
        self.slot, self.served, self.scheduler = slot, served, scheduler
        self.lease_deadline_s = lease_deadline_s

    def produce(self) -> None:
        index = self.slot.cursor
        while not self.stopping.is_set() and self.scheduler.wants_more(self.tenant):
            job = self.scheduler.reserve(
                self.tenant,
                1,
                behavior_policy_version=self.served.latest(self.tenant),
                schema_signature=self.slot.spec.schema.signature,
                metadata={"cursor": index + 1, "features": True, "absent": True},
            )
            if job is None:
                self.scheduler.wait_for_room(self.tenant, timeout_s=0.2)
                continue
            self.scheduler.mark(job.job_id, JobState.NEEDS_ADVANTAGES)
            staged = self.scheduler.lease_stage(JobState.NEEDS_ADVANTAGES, self.lease_deadline_s, tenant_id=self.tenant)
            if staged is not None:  # else closed or taken out meanwhile
                self.scheduler.mark(staged.job_id, JobState.READY)
            index += 1


def advantage_stage(
    scheduler: Scheduler,
    queue: TrainingQueue,
    slot: TenantSlot,
    lease_deadline_s: float,
    num_envs: int,
) -> None:
    """Advantages of the tenant's next job that waits for them, under a lease: metadata, data, derived columns, READY.

    Values are those that acted, or those of the actor-forward stage where there was one; the bootstrap at a cut is
    always the former: the observation after a cut does not travel. Does nothing when no job waits (its tenant was
    quarantined, the run is over). ``num_envs``: simulators of the rollout. The step normalises the advantages, over the
    rows of all ranks.
    """
    settings = slot.spec.config.algorithm
    algorithm = algorithm_class(settings)
    job = scheduler.lease_stage(JobState.NEEDS_ADVANTAGES, lease_deadline_s, tenant_id=slot.name)
    if job is None:
        return
    with_critic, proximal = algorithm.needs_critic, algorithm.waits_for_actor(settings)
    fields = ADVANTAGE_FIELDS + (CRITIC_FIELDS if with_critic else ())
    if with_critic and proximal:
        fields += (PROXIMAL_VALUE,)
    meta = queue.get_meta(fields, job.sample_count, job.partition_id, "advantages")
    assert meta is not None, f"job {job.job_id} waits for advantages without its columns"
    rollout = cast(TensorDict, queue.get_data(meta)).reshape(num_envs, -1)
    following = rollout.select("reward", "done", "terminated", EXECUTED)
    if with_critic:
        values = rollout["state_value"] = rollout[PROXIMAL_VALUE if proximal else "state_value"]
        ended = algorithm.ended(following, settings)
        following["state_value"] = next_values(values, following["done"], ended, rollout["bootstrap"])
    rollout["next"] = following
    queue.put(algorithm.advantages(rollout, settings).flatten(), metadata=meta)
    queue.ack(meta)
    scheduler.renew(job, lease_deadline_s)
    scheduler.mark(job.job_id, JobState.READY, lease_id=job.lease_id)


def to_partition(rollout: TensorDict) -> TensorDict:
    """The columns that training and the stages before it read, ``[N, L]``: observation, instruction, action, mask,
    outcome, behaviour statistics."""
    following = cast(TensorDict, rollout["next"])
    return TensorDict(
        {
            "observation": rollout["observation"],
            "language_instruction": rollout["language_instruction"],
            "vla_action": rollout["vla_action"],
            "state_value": rollout["state_value"],
            **{key: following[key] for key in (EXECUTED, "reward", "done", "terminated")},
            "episode_seed": rollout["episode_seed"],
            "policy_version": rollout["policy_version"],
        },
        rollout.batch_size,
    )


def with_features(partition: TensorDict, features: VLAFeature) -> TensorDict:
    """``observation`` and instruction give way to ``features`` and ``state``: training reads nothing else of them."""
    state = partition["observation", "state"]
    partition = partition.exclude("observation", "language_instruction")
    partition["features"], partition["state"] = features, state
    return partition


def rollout_metrics(rollout: TensorDict, algorithm: RolloutSettings) -> dict[str, Metric]:
    """Means over the episodes that ended inside this rollout (absent when none did), and what the algorithm adds."""
    following = cast(TensorDict, rollout["next"])
    done = following["done"].squeeze(-1)
    metrics = {"env_steps": Metric(float(following[EXECUTED].sum()), "sum")}
    if bool(done.any()):
        episodes = float(done.sum())
        means = {
            "success_rate": following["success_once"].squeeze(-1)[done].float().mean(),
            "episode_length": following["episode_length"].squeeze(-1)[done].float().mean(),
            "episode_return": following["reward"].sum() / done.sum(),
        }
        metrics |= {name: Metric(float(value), "mean", episodes) for name, value in means.items()}
        metrics["episodes"] = Metric(episodes, "sum")
    return metrics | algorithm_class(algorithm).rollout_metrics(rollout, algorithm)
