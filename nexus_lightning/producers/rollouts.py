"""TorchRL collector -> training jobs of an RL tenant."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from tensordict import TensorDict
from torchrl.collectors import Collector

from nexus_lightning.backbone import VLAFeature, concatenate_features
from nexus_lightning.environment import SimulatorEnv
from nexus_lightning.features.reuse import PassCounter, in_row_order
from nexus_lightning.objectives.policy_gradient import EXECUTED, compute_advantages
from nexus_lightning.placement.shares import Share
from nexus_lightning.producers.base import Producer
from nexus_lightning.producers.evaluation import Evaluator
from nexus_lightning.queues.inference import ServedPolicies, TenantInferenceServer
from nexus_lightning.queues.jobs import Job, JobState, Scheduler
from nexus_lightning.queues.training import TrainingQueue
from nexus_lightning.tenant import TenantSlot, derive_seed

#: Rollout r draws its episode seeds from r * EPISODES_PER_ROLLOUT on, so that a rollout depends on its index alone.
EPISODES_PER_ROLLOUT = 100_000


class RolloutProducer(Producer):
    """version -> reserve -> roll out -> advantages -> ready, several jobs ahead of the actor up to the bounds.

    Every rollout starts from fresh resets and is a pure function of (tenant seed, rollout index, policy version): a
    resumed run needs the index alone. With ``reuse`` the features that the decisions were taken on go into the
    partition in place of the images. Evaluations of the tenant run on the same simulators between two rollouts.
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
        on_rollout: Callable[[str, Job, dict[str, float], float, float], None],
        clock: Callable[[], float],
        lease_deadline_s: float,
        reuse: bool,
        passes: PassCounter,
        share: Share | None = None,
    ) -> None:
        super().__init__(slot.name, on_failure)
        algorithm = slot.spec.config.algorithm
        assert algorithm is not None
        self.slot, self.env, self.evaluator, self.algorithm = slot, env, evaluator, algorithm
        self.served, self.server, self.scheduler, self.queue = served, server, scheduler, queue
        self.on_rollout, self.clock, self.lease_deadline_s = on_rollout, clock, lease_deadline_s
        self.reuse, self.passes = reuse, passes
        self.share = Share() if share is None else share
        self.policy = server.client(slot.name, sample=True)
        self.policy.noise_rows = (env.first_env, env.num_envs * self.share.count)
        self.policy.record_features = reuse

    def produce(self) -> None:
        assert self.algorithm.chunks_per_job is not None, "validated with the config"
        frames = self.env.num_envs * self.algorithm.chunks_per_job
        collector = Collector(
            self.env,
            self.policy,
            frames_per_batch=frames,
            total_frames=-1,
            reset_at_each_iter=True,
            use_buffers=False,
            track_traj_ids=False,
            trust_policy=True,
            auto_register_policy_transforms=False,
        )
        rollouts = iter(collector)
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
                    self._roll_out(job, index, version, rollouts)
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

    def _roll_out(self, job: Job, index: int, version: int, rollouts) -> None:
        self.policy.version = version
        self.policy.generator.manual_seed(derive_seed(self.slot.spec.seed, "rollout", index))
        self.env.episodes_started = [index * EPISODES_PER_ROLLOUT] * self.env.num_envs
        start = self.clock()
        rollout = next(rollouts)
        assert bool((rollout["policy_version"] == version).all()), "a rollout mixed policy versions"
        self.on_rollout(self.tenant, job, rollout_metrics(rollout), start, self.clock())
        self.passes.add(observed=rollout.numel(), encoded=rollout.numel())
        partition = to_partition(rollout).flatten()
        if self.reuse:
            decisions = self.policy.take_features()
            assert len(decisions) == rollout.shape[1], "the policy was asked for something else than the rollout"
            features = concatenate_features(decisions)[in_row_order(decisions, self.env.num_envs)]
            partition = with_features(partition, cast(VLAFeature, features))
        self.queue.put(job.partition_id, partition, tenant_id=self.tenant)
        self.scheduler.mark(job.job_id, JobState.NEEDS_ADVANTAGES)
        self._advantages(rollout)

    def _advantages(self, rollout: TensorDict) -> None:
        """The advantage stage, under its own lease: metadata first, then data, then the derived columns."""
        staged = self.scheduler.lease_stage(JobState.NEEDS_ADVANTAGES, self.lease_deadline_s, tenant_id=self.tenant)
        if staged is None:  # closed or quarantined meanwhile
            return
        rollout = rollout.copy()
        if self.algorithm.name != "grpo":
            rollout["next", "state_value"] = self._next_values(rollout)
        meta = self.queue.get_meta([EXECUTED], staged.sample_count, staged.partition_id, "advantages")
        assert meta is not None
        # With several ranks the loop normalises: over all of them.
        advantages = compute_advantages(rollout, self.algorithm, normalize=self.share.count == 1)
        self.queue.put(advantages.flatten(), metadata=meta)
        self.queue.ack(meta)
        self.scheduler.mark(staged.job_id, JobState.READY)

    def _next_values(self, rollout: TensorDict) -> torch.Tensor:
        """Critic of the state after each decision ``[N, L, 1]``: 0 where terminated, asked for where it was cut."""
        following = cast(TensorDict, rollout["next"])
        values = torch.zeros_like(rollout["state_value"])
        values[:, :-1] = rollout["state_value"][:, 1:]
        terminated, done = following["terminated"].squeeze(-1), following["done"].squeeze(-1)
        cut = done & ~terminated
        cut[:, -1] = ~terminated[:, -1]
        values[terminated] = 0.0
        if bool(cut.any()):
            values[cut] = self.policy.value(following[cut])
            count = int(cut.sum())
            self.passes.add(observed=count, encoded=count)
        return values


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


def to_partition(rollout: TensorDict) -> TensorDict:
    """The columns that training reads, ``[N, L]``: observation, instruction, action, mask, behaviour statistics."""
    following = cast(TensorDict, rollout["next"])
    return TensorDict(
        {
            "observation": rollout["observation"],
            "language_instruction": rollout["language_instruction"],
            "vla_action": rollout["vla_action"],
            "state_value": rollout["state_value"],
            EXECUTED: following[EXECUTED],
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


def rollout_metrics(rollout: TensorDict) -> dict[str, float]:
    """Mean over the episodes that ended inside this rollout (absent when none did)."""
    following = cast(TensorDict, rollout["next"])
    done = following["done"].squeeze(-1)
    metrics = {"env_steps": float(following[EXECUTED].sum())}
    if bool(done.any()):
        metrics["success_rate"] = float(following["success_once"].squeeze(-1)[done].float().mean())
        metrics["episode_length"] = float(following["episode_length"].squeeze(-1)[done].float().mean())
        metrics["episode_return"] = float(following["reward"].sum() / done.sum())
        metrics["episodes"] = float(done.sum())
    return metrics
