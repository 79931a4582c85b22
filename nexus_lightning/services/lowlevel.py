"""Low-level verbs of a tenant: a client writes its own algorithm with them, the policy stays on the server.

::

    rollout / predict ──► the client's own advantages, filters, curricula ──► forward_backward ... optim_step
                                   │                                               ▲
                                   └─ queue_put, reserve, mark ──► lease_next / train_job

They act on a tenant that has no training workload (else :class:`Conflict`): two algorithms must not step one head.
Training runs on the actor thread between other tenants' jobs; what fails there is that call's error and nobody's
quarantine, and a loss or gradient that is not finite is refused before the step. Partitions and jobs belong to their
tenant: for anybody else they do not exist.

The built-in SFT written with them gives the same bits on a CPU. On a GPU its random numbers (dropout, state noise)
differ: the device's generator is seeded from the tenant's stream at every use of it, and a workload uses it for drawing
minibatches, too. What was stepped since the last payload is lost with a killed server: call ``save``.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from tensordict import TensorDict

from nexus_lightning.checkpoint import Payload, PayloadError, read_payload
from nexus_lightning.config import EnvironmentConfig, SchemaConfig
from nexus_lightning.environment import SimulatorEnv, make_env
from nexus_lightning.inference.client import TenantPolicyClient
from nexus_lightning.producers.evaluation import Episode, list_episodes
from nexus_lightning.queues.jobs import IllegalTransition, Job, JobState, LeaseLost
from nexus_lightning.queues.training import BatchMeta
from nexus_lightning.run.module import MultiTenantModule
from nexus_lightning.run.runtime import Runtime
from nexus_lightning.services.batches import batch_of, low_level_objective, to_arrays
from nexus_lightning.services.environment_server import ServerError, Sessions, read_actions
from nexus_lightning.services.errors import (
    ERRORS,
    Conflict,
    InvalidRequest,
    NexusError,
    NotFound,
    QuotaExceeded,
    TooLarge,
)
from nexus_lightning.services.records import TenantRecord
from nexus_lightning.services.spec import Compiler, ServeConfig
from nexus_lightning.tenant import NonFinite, TenantSlot, derive_seed

T = TypeVar("T")
Arrays = Mapping[str, np.ndarray]
#: How long a put waits for room in the tenant's part of the training queue.
PUT_TIMEOUT_S = 5.0
#: How often sessions are looked through for leases that ran out.
EXPIRE_EVERY_S = 1.0
#: What a job's metadata says about how :meth:`LowLevelVerbs.train_job` trains it.
JOB_KEYS = ("loss", "loss_options", "instructions", "batch_size", "lr", "grad_clip_norm")


class LowLevelVerbs:
    """Mixed into :class:`~nexus_lightning.services.master.Master`, which owns what is declared here."""

    config: ServeConfig
    compiler: Compiler
    runtime: Runtime
    module: MultiTenantModule
    _stopping: threading.Event
    _lock: Any

    if TYPE_CHECKING:

        def _tenant(self, tenant_id: str) -> TenantRecord: ...
        def _on_actor(self, action: Callable[[], T]) -> T: ...
        def _evaluation(
            self, tenant_id: str, tenant: TenantRecord, request: Mapping[str, Any], *also: str
        ) -> tuple[EnvironmentConfig, dict[str, int]]: ...
        def _pin(self, tenant_id: str, version: int | None) -> int: ...
        def _claim_simulator(self) -> None: ...
        def _release_simulator(self) -> None: ...
        def payload_path(self, tenant_id: str, version: int) -> Any: ...

    # ---------------------------------------------------------------------------------------------- training

    def forward_backward(
        self,
        tenant_id: str,
        arrays: Arrays,
        *,
        instructions: Sequence[str] = (),
        loss: str = "sft",
        loss_options: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Loss of a batch; its gradients are added to those since the last step.

        Args:
            tenant_id: of a tenant.
            arrays: see :mod:`nexus_lightning.services.batches`.
            instructions: one text for each row.
            loss: a key of :data:`~nexus_lightning.services.batches.LOSSES`.
            loss_options: settings of its algorithm (``clip_epsilon``, ``entropy_coef`` ...), see ``conf/algorithm``.

        Returns:
            ``loss:mean`` and the loss's other figures; their reduction is in the name.
        """
        slot, batch, objective = self._batch(tenant_id, arrays, instructions, loss, loss_options)
        found = self._train(slot, len(batch), lambda: self.module.add_gradients(slot, objective, batch))
        return {f"{name}:mean": value for name, value in found.items()}

    def optim_step(
        self, tenant_id: str, *, lr: float | None = None, grad_clip_norm: float | None = None
    ) -> dict[str, Any]:
        """Step with the gradients so far; the result is served as the next policy version.

        Args:
            tenant_id: of a tenant.
            lr: of this step; None: the head's schedule.
            grad_clip_norm: of this step; None: the head's setting.
        """
        slot = self._free_slot(tenant_id)
        return self._train(slot, 1, lambda: self._step(slot, lr, grad_clip_norm))

    def train_batch(
        self,
        tenant_id: str,
        arrays: Arrays,
        *,
        options: Mapping[str, Any] | None = None,
        instructions: Sequence[str] = (),
        loss: str = "sft",
        loss_options: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """:meth:`forward_backward` and :meth:`optim_step` (with ``options``) at once."""
        slot, batch, objective = self._batch(tenant_id, arrays, instructions, loss, loss_options)

        def train() -> dict[str, Any]:
            found = self.module.add_gradients(slot, objective, batch)
            return {f"{name}:mean": value for name, value in found.items()} | self._step(slot, **(options or {}))

        return self._train(slot, len(batch), train)

    def train_job(self, tenant_id: str, *, job_id: str) -> dict[str, Any]:
        """Lease a ready job of the tenant, train its partition in minibatches, complete it: one policy version.

        The job's metadata says how: ``loss`` ("sft"), ``loss_options``, ``batch_size`` (all rows), ``lr``,
        ``grad_clip_norm`` and ``instructions`` (one text, or one for each row). The job is failed when it cannot be
        trained.
        """
        slot, scheduler = self._free_slot(tenant_id), self.runtime.scheduler
        self._job(tenant_id, job_id)
        versions, lease_s = {tenant_id: slot.policy_version}, self.runtime.shared.lease_deadline_s
        job = scheduler.lease_next(versions, 0.0, lease_s, where=lambda ready: ready.job_id == job_id)
        if job is None:
            raise Conflict(f"job {job_id}: is {self._job(tenant_id, job_id).state.value}, not ready")
        try:
            found = self._train_leased(slot, job)
        except Exception as error:
            scheduler.fail(job_id, f"{type(error).__name__}: {error}", lease_id=job.lease_id)
            raise
        scheduler.complete(job_id, lease_id=job.lease_id, policy_version=slot.policy_version)
        return found

    def _train_leased(self, slot: TenantSlot, job: Job) -> dict[str, Any]:
        queue, how = self.runtime.queue, {key: value for key, value in job.metadata.items() if key in JOB_KEYS}
        if job.partition_id not in queue.partitions(slot.name):
            raise InvalidRequest(f"job {job.job_id}: nothing was put into its partition {job.partition_id}")
        queue.release(job.partition_id, "train_job")
        arrays = self._columns(job.partition_id)
        rows = len(next(iter(arrays.values())))
        texts = how.get("instructions", [])
        instructions = [texts] * rows if isinstance(texts, str) else list(texts)
        loss, size = how.get("loss", "sft"), how.get("batch_size") or rows
        objective = low_level_objective(slot, loss, how.get("loss_options") or {})
        batch = batch_of(slot, loss, objective, arrays, instructions)

        def train() -> dict[str, Any]:
            history, steps = [], slot.optimizer_steps
            try:
                for part in batch.split(int(size)):
                    history.append(self.module.add_gradients(slot, objective, part))
                    self.module.step_with_gradients(slot, how.get("lr"), how.get("grad_clip_norm"))
                    self.runtime.scheduler.renew(job, self.runtime.shared.lease_deadline_s)
            finally:  # what was stepped is served, also when a later minibatch was refused
                if slot.optimizer_steps > steps:
                    self._publish(slot)
            means = {f"{k}:mean": float(np.mean([step[k] for step in history])) for k in history[0]}
            return {**means, "steps": len(history), "policy_version": slot.policy_version}

        return self._train(slot, rows, train)

    def export_params(self, tenant_id: str) -> dict[str, np.ndarray]:
        """Head, normalisation (and average, Q networks where there are) by name, between two jobs."""
        slot = self._slot(tenant_id)
        return self._on_actor(lambda: to_arrays(slot.tensors()))

    def save(self, tenant_id: str) -> dict[str, Any]:
        """Write a payload of the policy as it is."""
        slot = self._slot(tenant_id)
        path = self._on_actor(lambda: self.runtime.save_payload(slot))
        assert path is not None
        return {"policy_version": slot.policy_version, "name": path.name}

    def load(self, tenant_id: str, source: int | Arrays) -> dict[str, Any]:
        """Take over a saved version with its optimizer and random state, or given parameters; served as the next one.

        Args:
            tenant_id: of a tenant.
            source: a policy version on disk, or arrays named as :meth:`export_params` names them (some of them: the
                others stay; the average of a head follows its new weights).
        """
        slot = self._free_slot(tenant_id)
        if not isinstance(source, int):
            return self._train(slot, 1, lambda: self._load_arrays(slot, source))
        payload = self._read(tenant_id, source)

        def load() -> dict[str, Any]:
            kept = (slot.policy_version, slot.ended, slot.workload)
            slot.restore(payload)
            slot.policy_version, slot.ended, slot.workload = kept
            return self._publish(slot)

        return self._train(slot, 1, load)

    def _read(self, tenant_id: str, version: int) -> Payload:
        try:
            return read_payload(self.payload_path(tenant_id, version))
        except PayloadError as error:
            raise NotFound(f"tenant {tenant_id}: the payload of version {version} cannot be read") from error

    def _load_arrays(self, slot: TenantSlot, arrays: Arrays) -> dict[str, Any]:
        own = slot.tensors()
        problems = [f"{name}: unknown parameter" for name in arrays if name not in own]
        given = {name: torch.as_tensor(np.array(value)) for name, value in arrays.items() if name in own}
        for name, value in given.items():
            if value.shape != own[name].shape:
                problems.append(f"{name}: shape {list(value.shape)}, expected {list(own[name].shape)}")
            elif value.is_floating_point() and not bool(value.isfinite().all()):
                problems.append(f"{name}: holds NaN or infinity")
        if problems or not given:
            raise InvalidRequest("the parameters do not fit", problems or ["none are given"])
        if slot.ema is not None and not any(name.startswith("ema.") for name in given):
            heads = {name.removeprefix("head."): v for name, v in given.items() if name.startswith("head.")}
            given |= {f"ema.module.{name}": value for name, value in heads.items()}
        slot.load_tensors({**own, **{name: value.to(own[name].dtype) for name, value in given.items()}})
        return self._publish(slot)

    def _batch(
        self,
        tenant_id: str,
        arrays: Arrays,
        instructions: Sequence[str],
        loss: str,
        options: Mapping[str, Any] | None,
    ) -> tuple[TenantSlot, TensorDict, Any]:
        slot = self._free_slot(tenant_id)
        objective = low_level_objective(slot, loss, options or {})
        return slot, batch_of(slot, loss, objective, arrays, instructions), objective

    def _step(self, slot: TenantSlot, lr: float | None = None, grad_clip_norm: float | None = None) -> dict[str, Any]:
        try:
            norm = self.module.step_with_gradients(slot, lr, grad_clip_norm)
        except ValueError as error:
            raise Conflict(str(error)) from error
        return {"grad_norm": norm, **self._publish(slot)}

    def _publish(self, slot: TenantSlot) -> dict[str, Any]:
        slot.policy_version += 1
        self.runtime.tenancy.publish(slot)
        return {"policy_version": slot.policy_version}

    def _train(self, slot: TenantSlot, rows: int, action: Callable[[], T]) -> T:
        """Run on the actor thread, if the tenant has no workload by then; the time is the tenant's."""
        events = self.runtime.events

        def guarded() -> T:
            self._free_slot(slot.name)
            start_s = events.now()
            try:
                return action()
            except NexusError:
                raise
            except (NonFinite, ValueError) as error:  # of the batch, for example a text that is too long
                raise InvalidRequest(str(error)) from error
            finally:
                events.span("actor", {slot.name: rows}, start_s, events.now(), kind="low_level")

        return self._on_actor(guarded)

    def _free_slot(self, tenant_id: str) -> TenantSlot:
        work = self._tenant(tenant_id).workload
        if work is not None:
            raise Conflict(
                f"tenant {tenant_id}: its {work.config.task} workload is active; cancel it, or wait for its end"
            )
        return self._slot(tenant_id)

    def _slot(self, tenant_id: str) -> TenantSlot:
        self._tenant(tenant_id)
        return self.runtime.slots[tenant_id]

    # --------------------------------------------------------------------------------------------- inference

    def rollout(self, tenant_id: str, request: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Run episodes and give their transitions back, in the caller's thread.

        Args:
            tenant_id: of a tenant.
            request: ``{environment?, episodes, first_seed?, num_envs?, policy_version?, deterministic?}``; without
                ``deterministic`` actions are sampled, from a stream of ``first_seed``.

        Returns:
            Arrays with a row for each decision, episode after episode: ``observation/...``, ``chunk`` (and
            ``log_probs``, ``trace/<name>``, ``state_value`` of heads that have them), ``executed``, ``reward``,
            ``terminated``, ``truncated``, ``episode``; and ``final/observation/...`` with a row for each episode. Meta:
            ``policy_version``, ``instructions`` and ``success`` of each episode.
        """
        tenant = self._tenant(tenant_id)
        request = {key: value for key, value in request.items() if value is not None}
        environment, numbers = self._evaluation(tenant_id, tenant, request, "deterministic")
        wanted = request.get("policy_version", tenant.predict_version)
        version = self._pin(tenant_id, wanted)
        slot, runtime = self._slot(tenant_id), self.runtime
        try:
            self._claim_simulator()
            try:
                env = make_env(
                    environment,
                    slot.spec.schema,
                    slot.normalizer,
                    num_envs=min(numbers["num_envs"], numbers["episodes"]),
                    tenant=tenant_id,
                )
                generator = torch.Generator().manual_seed(derive_seed(slot.spec.seed, "rollout", numbers["first_seed"]))
                sample = not request.get("deterministic", False)
                client = runtime.server.client(tenant_id, sample=sample, version=version, generator=generator)
                start_s = runtime.events.now()
                try:
                    asked = list_episodes(len(env.task_names), numbers["first_seed"], numbers["episodes"])
                    limit = int(self.config.limits.max_body_mb * 1e6)
                    arrays, meta = record_episodes(env, client, asked, limit, tenant.leaving.is_set)
                finally:
                    client.rest()
                    env.close()
                runtime.events.span(
                    "environment", {tenant_id: len(asked)}, start_s, runtime.events.now(), kind="rollout"
                )
            finally:
                self._release_simulator()
        finally:
            runtime.served.unpin(tenant_id, version)
        return arrays, {"policy_version": version, **meta}

    def load_weights(self, tenant_id: str, *, version: int) -> dict[str, Any]:
        """Predict and roll out with a version that is served or saved, until told otherwise; the latest one: follow it.

        Raises:
            NotFound: neither.
        """
        tenant, slot, served = self._tenant(tenant_id), self._slot(tenant_id), self.runtime.served
        if version == served.latest(tenant_id):
            pinned = None
        else:
            if version not in served.versions(tenant_id):
                payload = self._read(tenant_id, version)
                if version > served.latest(tenant_id):
                    raise NotFound(f"tenant {tenant_id}: version {version} is not served")
                self._on_actor(lambda: served.load(tenant_id, version, *_saved_policy(slot, payload.tensors)))
            else:
                self._pin(tenant_id, version)
            pinned = version
        with self._lock:
            before, tenant.predict_version = tenant.predict_version, pinned
        if before is not None:
            served.unpin(tenant_id, before)
        return {"policy_version": version}

    # ------------------------------------------------------------------------------------- queue and scheduler

    def queue_put(
        self,
        tenant_id: str,
        arrays: Arrays,
        *,
        partition_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A new partition (of a reserved job, or a name of one's own), or columns for rows that were handed out."""
        self._free_slot(tenant_id)
        if (partition_id is None) == (metadata is None) or not arrays:
            raise InvalidRequest("give arrays, and either partition_id (a new one) or metadata (derived columns)")
        tensors = {name: torch.as_tensor(np.array(value)) for name, value in arrays.items()}
        lengths = {len(value) if value.ndim else 0 for value in tensors.values()}
        if len(lengths) != 1 or 0 in lengths:
            raise InvalidRequest("arrays: all need the same number of rows, at least one")
        rows, queue = TensorDict(tensors, [lengths.pop()]), self.runtime.queue
        try:
            if metadata is not None:
                meta = self._delivery(tenant_id, metadata)
                queue.put(rows, metadata=meta)
                return {"partition_id": meta.partition_id}
            assert partition_id is not None
            name = _scoped(tenant_id, partition_id)
            queue.put(name, rows, tenant_id=tenant_id, timeout_s=PUT_TIMEOUT_S)
        except TimeoutError as error:
            raise QuotaExceeded(str(error), retryable=True) from error
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        return {"partition_id": name}

    def queue_get_meta(
        self,
        tenant_id: str,
        *,
        partition_id: str,
        fields: Sequence[str],
        batch_size: int | None = None,
        task_name: str = "client",
    ) -> dict[str, Any]:
        """The next rows of a partition for a consumer, or ``{"metadata": None}`` when none has all the fields."""
        self._free_slot(tenant_id)
        name = self._partition(tenant_id, partition_id)
        try:
            meta = self.runtime.queue.get_meta(list(fields), batch_size, name, task_name)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        if meta is None:
            return {"metadata": None}
        tenant, there = self._tenant(tenant_id), set(self.runtime.queue.partitions(tenant_id))
        tenant.deliveries = {n: m for n, m in tenant.deliveries.items() if m.partition_id in there}
        tenant.deliveries[meta.delivery] = meta
        return {
            "metadata": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(meta).items() if k != "tenant_id"}
        }

    def queue_get(self, tenant_id: str, request: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The columns of a delivery; may be called again."""
        meta = self._delivery(tenant_id, request["metadata"])
        try:
            return to_arrays(cast(TensorDict, self.runtime.queue.get_data(meta)))
        except ValueError as error:
            raise NotFound(str(error)) from error

    def queue_clear(self, tenant_id: str, *, partition_id: str) -> dict[str, Any]:
        """Forget a partition of one's own."""
        self._free_slot(tenant_id)
        name = self._partition(tenant_id, partition_id)
        return {"bytes": self.runtime.queue.clear(name)}

    def reserve(
        self,
        tenant_id: str,
        *,
        sample_count: int,
        behavior_policy_version: int | None = None,
        domain: str = "",
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A job whose partition the client fills, or ``{"job": None}`` at the tenant's bound."""
        slot, scheduler = self._free_slot(tenant_id), self.runtime.scheduler
        with self._lock:
            if not scheduler.registered(tenant_id):
                config = slot.spec.config
                # offline_rl: the one type whose jobs may become ready at once or go through the stages of rl
                scheduler.register(
                    tenant_id,
                    "offline_rl",
                    priority=config.priority,
                    max_in_flight=config.max_in_flight,
                    max_policy_staleness=config.max_policy_staleness,
                    weight=config.weight,
                )
        try:
            job = scheduler.reserve(
                tenant_id,
                sample_count,
                behavior_policy_version=behavior_policy_version,
                domain=domain,
                schema_signature=slot.spec.schema.signature,
                metadata=dict(metadata or {}),
            )
        except ValueError as error:
            self._tenant(tenant_id)
            raise InvalidRequest(str(error)) from error
        return {"job": None if job is None else _described(job)}

    def mark(
        self,
        tenant_id: str,
        *,
        job_id: str,
        state: str,
        lease_id: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A job's next state; the client does the stages (``needs_...``) itself."""
        self._free_slot(tenant_id)
        scheduler, job = self.runtime.scheduler, self._job(tenant_id, job_id)
        if job.state in (JobState.NEEDS_ACTOR_FORWARD, JobState.NEEDS_ADVANTAGES):
            lease_s = self.runtime.shared.lease_deadline_s
            leased = scheduler.lease_stage(job.state, lease_s, tenant_id=tenant_id, job_id=job_id)
            lease_id = None if leased is None else leased.lease_id
        marked = self._attempt(
            lambda: scheduler.mark(job_id, JobState(state), lease_id=lease_id, **dict(metadata or {}))
        )
        return {"job": _described(marked)}

    def lease_next(self, tenant_id: str, *, deadline_s: float = 600.0) -> dict[str, Any]:
        """The tenant's next ready job, leased to the client, or ``{"job": None}``. Stale ones are dropped."""
        slot, scheduler = self._free_slot(tenant_id), self.runtime.scheduler
        if not scheduler.registered(tenant_id):
            return {"job": None}
        job = scheduler.lease_next({tenant_id: slot.policy_version}, 0.0, deadline_s)
        return {"job": None if job is None else _described(job)}

    def complete(
        self, tenant_id: str, *, job_id: str, lease_id: int | None = None, metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """A leased job is done; its partition is forgotten."""
        self._free_slot(tenant_id)
        self._job(tenant_id, job_id)
        done = self._attempt(lambda: self.runtime.scheduler.complete(job_id, lease_id=lease_id, **dict(metadata or {})))
        return {"job": _described(done)}

    def fail(self, tenant_id: str, *, job_id: str, reason: str, lease_id: int | None = None) -> dict[str, Any]:
        """Give a job up; its partition is forgotten."""
        self._free_slot(tenant_id)
        self._job(tenant_id, job_id)
        return {
            "job": _described(self._attempt(lambda: self.runtime.scheduler.fail(job_id, reason, lease_id=lease_id)))
        }

    def _attempt(self, action: Callable[[], Job]) -> Job:
        try:
            return action()
        except (IllegalTransition, LeaseLost) as error:
            raise Conflict(str(error)) from error
        except (ValueError, TypeError) as error:
            raise InvalidRequest(str(error)) from error

    def _job(self, tenant_id: str, job_id: str) -> Job:
        try:
            job = self.runtime.scheduler.get(job_id)
        except ValueError:
            job = None
        if job is None or job.tenant_id != tenant_id:
            raise NotFound(f"job {job_id}: unknown")
        return job

    def _partition(self, tenant_id: str, partition_id: str) -> str:
        name = _scoped(tenant_id, partition_id)
        if name not in self.runtime.queue.partitions(tenant_id):
            raise NotFound(f"partition {partition_id}: unknown")
        return name

    def _delivery(self, tenant_id: str, metadata: Mapping[str, Any]) -> BatchMeta:
        """What was handed out under this number: the rows that the client names are not trusted."""
        meta = self._tenant(tenant_id).deliveries.get(metadata.get("delivery", -1))
        if meta is None:
            raise NotFound(f"delivery {metadata.get('delivery')}: unknown")
        return meta

    def _columns(self, partition_id: str) -> dict[str, np.ndarray]:
        queue = self.runtime.queue
        names = sorted(str(key) for key in queue.columns(partition_id))
        meta = queue.get_meta(names, None, partition_id, "train_job")
        if meta is None:
            raise InvalidRequest(f"partition {partition_id}: some rows lack derived columns")
        return to_arrays(cast(TensorDict, queue.get_data(meta)))

    # -------------------------------------------------------------------------------- environment sessions

    def open_session(self, scope: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """A simulator of the registry for one client; see :mod:`nexus_lightning.services.environment_server`.

        Args:
            scope: the tenant whose cameras and sizes it has, or an owner's id (the entry's own then).
            request: ``{environment: {name, ...}, seed?, lease_s?}``.
        """
        tenant = self._tenants.get(scope)
        schema = SchemaConfig() if tenant is None else tenant.config.schema
        environment = self.compiler.environment(schema, request.get("environment"), fill=tenant is not None)
        arguments = {key: value for key, value in environment.simulator.items() if key != "_target_"}
        module, _, name = environment.simulator["_target_"].rpartition(".")
        sessions = self._sessions_of(environment.inline)
        meta = {k: request[k] for k in ("seed", "lease_s") if request.get(k) is not None}
        target = f"{module}:{name}"
        sessions.factories[target] = target
        opened = _ask(lambda: sessions.open({**meta, "environment": {**arguments, "name": target}}))
        with self._lock:
            self._open_sessions[opened["session_id"]] = (scope, sessions)
        return opened

    def session_reset(
        self, scope: str, session_id: str, request: Mapping[str, Any], arrays: Arrays
    ) -> tuple[dict, dict]:
        """Start an episode."""
        del arrays
        return _ask(lambda: self._session_of(scope, session_id).reset(session_id, dict(request)))

    def session_step(
        self, scope: str, session_id: str, request: Mapping[str, Any], arrays: Arrays
    ) -> tuple[dict, dict]:
        """One control step with ``action`` ``[A]``."""
        sessions = self._session_of(scope, session_id)
        return _ask(lambda: sessions.steps(session_id, dict(request), read_actions(dict(arrays), "action", 1), True))

    def session_batch_step(
        self, scope: str, session_id: str, request: Mapping[str, Any], arrays: Arrays
    ) -> tuple[dict, dict]:
        """``actions`` ``[T, A]`` up to the first done."""
        sessions = self._session_of(scope, session_id)
        return _ask(lambda: sessions.steps(session_id, dict(request), read_actions(dict(arrays), "actions", 2), False))

    def session_close(
        self, scope: str, session_id: str, request: Mapping[str, Any], arrays: Arrays
    ) -> tuple[dict, dict]:
        """End the simulator."""
        del request, arrays
        self._session_of(scope, session_id).close(session_id)
        with self._lock:
            self._open_sessions.pop(session_id, None)
        return {}, {}

    def _close_sessions(self, scope: str | None = None) -> None:
        """Those of one tenant, or all."""
        with self._lock:
            ending = {i: held for i, held in self._open_sessions.items() if scope in (None, held[0])}
            for session_id in ending:
                del self._open_sessions[session_id]
        for session_id, (_, sessions) in ending.items():
            sessions.close(session_id)

    def _sessions_of(self, inline: bool) -> Sessions:
        with self._lock:
            if not self._session_tables:
                threading.Thread(target=self._expire_sessions, name="session-leases", daemon=True).start()
            if inline not in self._session_tables:
                limits = self.config.limits
                self._session_tables[inline] = Sessions(
                    {}, threads=inline, max_sessions=limits.max_sessions, lease_s=limits.session_lease_s
                )
            return self._session_tables[inline]

    def _expire_sessions(self) -> None:
        while not self._stopping.wait(EXPIRE_EVERY_S):
            for sessions in list(self._session_tables.values()):
                sessions.expire(time.monotonic())

    def _session_of(self, scope: str, session_id: str) -> Sessions:
        held = self._open_sessions.get(session_id)
        if held is None or held[0] != scope:
            raise NotFound(f"session {session_id}: unknown")
        return held[1]

    _tenants: dict[str, TenantRecord]
    _open_sessions: dict[str, tuple[str, Sessions]]
    _session_tables: dict[bool, Sessions]


def _ask[R](action: Callable[[], R]) -> R:
    """Errors of the session table as errors of the services."""
    try:
        return action()
    except ServerError as error:
        raise ERRORS.get(error.kind, NexusError)(error.message, retryable=error.retryable) from error


def _scoped(tenant_id: str, partition_id: str) -> str:
    """A job's partition keeps its name, a client's own name is put under its tenant's."""
    return partition_id if partition_id.startswith(f"{tenant_id}/") else f"{tenant_id}/own/{partition_id}"


def _described(job: Job) -> dict[str, Any]:
    keys = (
        "job_id",
        "partition_id",
        "sample_count",
        "domain",
        "behavior_policy_version",
        "lease_id",
        "reason",
        "metadata",
    )
    return {"state": job.state.value, **{key: getattr(job, key) for key in keys}}


def _saved_policy(slot: TenantSlot, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    """The head that a payload served, and its normaliser, as modules of their own."""
    prefix = "ema.module." if any(name.startswith("ema.module.") for name in tensors) else "head."
    head, normalizer = copy.deepcopy(slot.head), copy.deepcopy(slot.normalizer)
    head.load_state_dict({n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)})
    normalizer.load_state_dict({n[len("normalizer.") :]: v for n, v in tensors.items() if n.startswith("normalizer.")})
    return head, normalizer


@torch.no_grad()
def record_episodes(
    env: SimulatorEnv,
    policy: TenantPolicyClient,
    asked: list[Episode],
    max_bytes: int,
    stopping: Callable[[], bool],
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Every episode once, with every decision that was taken in it; see :meth:`LowLevelVerbs.rollout`.

    Raises:
        TooLarge: the transitions exceed ``max_bytes``.
        Conflict: ``stopping`` said so.
    """
    env.set_episodes([seed for _, seed in asked], [task for task, _ in asked])
    steps: dict[Episode, list[TensorDict]] = {episode: [] for episode in asked}
    final: dict[Episode, TensorDict] = {}
    texts: dict[Episode, str] = {}
    success: dict[Episode, bool] = {}
    size, state = 0, env.reset()
    while len(final) < len(asked):
        if stopping():
            raise Conflict(f"tenant {env.tenant}: is being deleted")
        active = (~env.exhausted).nonzero().flatten().tolist()
        acted = policy(state)
        stepped = env.step(acted.clone(recurse=False))["next"]
        outcome = stepped.select("reward", "terminated", "truncated", "executed")
        taken = acted.select("observation", "vla_action", *(["state_value"] if "state_value" in acted.keys() else []))
        for i in active:
            key = int(stepped["episode_task"][i]), int(stepped["episode_seed"][i])
            row = cast(TensorDict, TensorDict({**dict(taken[i].items()), **dict(outcome[i].items())}, []).clone())
            size += row.bytes()
            if size > max_bytes:
                raise TooLarge(f"the transitions exceed {max_bytes} bytes (limits.max_body_mb): ask for fewer episodes")
            steps[key].append(row)
            if bool(stepped["done"][i]):
                final[key] = cast(TensorDict, stepped["observation"][i].clone())
                texts[key], success[key] = stepped["language_instruction"][i], bool(stepped["success_once"][i])
        state = stepped.exclude("reward")
        if len(final) < len(asked) and bool(stepped["done"].any()):
            state.set("_reset", stepped["done"].clone())
            state = env.reset(state)
    rows = cast(TensorDict, torch.stack([row for episode in asked for row in steps[episode]]))  # type: ignore[arg-type]
    arrays = {name.removeprefix("vla_action/"): value for name, value in to_arrays(rows).items()}
    arrays["episode"] = np.repeat(np.arange(len(asked)), [len(steps[episode]) for episode in asked])
    last = cast(TensorDict, torch.stack([final[episode] for episode in asked]))  # type: ignore[arg-type]
    arrays |= {f"final/observation/{name}": value for name, value in to_arrays(last).items()}
    meta = {"instructions": [texts[e] for e in asked], "success": [success[e] for e in asked]}
    return arrays, {**meta, "tasks": [env.task_names[task] for task, _ in asked], "seeds": [seed for _, seed in asked]}
