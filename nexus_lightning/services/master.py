"""The verbs of the services in one process: tenants come and go in a live run that trains, serves and simulates.

::

    any thread:  Master.create_tenant, submit, predict ...        one object, plain blocking calls
                     |  Runtime.call: between two jobs                 |  inference queue
                     v                                                 v
    main thread: Master.run = NexusTrainer.fit (resident)         the server's worker: one encode for many tenants

It is the Runtime, the MultiTenantModule and the NexusTrainer of ``train.py``; nothing here trains by itself. What is
heavy (recording demonstrations, opening datasets, closing simulators) runs in the thread of its workload, what touches
heads, optimizers and random streams runs on the actor thread between two jobs. So nothing of tenant B depends on what
tenant A does.

Words: a *tenant* is a schema and a head with its optimizer (a slot); a *workload* is a piece of work of a tenant (sft,
rl, offline_rl; eval). At most one training workload of a tenant runs at a time.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import yaml
from hydra.utils import instantiate
from tensordict import TensorDict

from nexus_lightning import __version__
from nexus_lightning.backbone import Backbone
from nexus_lightning.checkpoint import (
    Payload,
    PayloadError,
    is_intact,
    list_payloads,
    read_manifest,
    read_newest,
    read_payload,
)
from nexus_lightning.config import (
    ConfigError,
    EnvironmentConfig,
    TenantConfig,
    dataset_root,
    saved_tenant,
)
from nexus_lightning.environment import make_env
from nexus_lightning.inference.client import TenantPolicyClient
from nexus_lightning.memory import Admission, NoRoom, free_bytes, keep_freed_memory
from nexus_lightning.monitoring.stats import finite
from nexus_lightning.producers.demonstrations import DemonstrationReader, dataset_stats, open_dataset
from nexus_lightning.producers.evaluation import evaluate_policy, list_episodes, result_dict, summarise
from nexus_lightning.run.mailbox import RunEnded
from nexus_lightning.run.module import MultiTenantModule
from nexus_lightning.run.runtime import Runtime
from nexus_lightning.run.start import build_tenant
from nexus_lightning.services.batches import observation_of, to_arrays
from nexus_lightning.services.environment_server import Sessions
from nexus_lightning.services.errors import (
    Conflict,
    InvalidRequest,
    NexusError,
    NotFound,
    NotReady,
    QuotaExceeded,
    future_error_to_json,
)
from nexus_lightning.services.lowlevel import LowLevelVerbs
from nexus_lightning.services.metrics import MetricLog
from nexus_lightning.services.records import OnEnd, TenantRecord, Workload
from nexus_lightning.services.spec import MAX_EPISODES, Compiler, ServeConfig, serve_problems
from nexus_lightning.tenant import PassCounter, TenantSlot
from nexus_lightning.trainer import NexusTrainer, record_dataset

log = logging.getLogger(__name__)

T = TypeVar("T")
#: How often a workload's thread looks by itself whether its work is over (it is also told).
LOOK_S = 0.5
#: How many evaluations that were asked for :meth:`Master.describe` shows of a tenant, the newest.
KEPT_EVALUATIONS = 100
#: How long producers get to end; a simulator that does not is killed before.
JOIN_S = 120.0
#: How long a stopping server waits for them; what is left ends with the process (simulators do, too).
STOP_S = 10.0
#: How often what the disk has refused is written again.
WRITE_AGAIN_S = 2.0
#: How long a prediction may take.
PREDICT_TIMEOUT_S = 60.0


class Master(LowLevelVerbs):
    """See the module. Thread-safe; every method raises errors of :mod:`nexus_lightning.services.errors`.

    Args:
        config: of the server. The run folder is ``output_dir/run_name``, the same after a restart.
        backbone: an already built one; None builds ``config.backbone``.

    Its files in the run folder are written from here on: whoever makes one holds the folder (an open
    :class:`~nexus_lightning.services.store.Store`). On a full disk the run goes on: what has to be written waits, see
    :meth:`alarms`, and is written when there is room; what a request itself wants written fails as retryable.

    Raises:
        ConfigError: everything that is wrong with ``config``.

    Example:
        >>> master = Master(config)                                          # doctest: +SKIP
        >>> threading.Thread(target=clients_call, args=[master]).start()     # doctest: +SKIP
        >>> master.run()                                                     # doctest: +SKIP
    """

    def __init__(self, config: ServeConfig, backbone: Backbone | None = None) -> None:
        if problems := serve_problems(config):
            raise ConfigError(problems)
        self.config, self.compiler = config, Compiler(config)
        run_config = config.run_config()
        run_config.trainer = replace(config.trainer, enable_progress_bar=False)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        config.run_dir.chmod(0o700)  # payloads are their owners'
        written = config.run_dir / "config.yaml.tmp"
        written.write_text(yaml.safe_dump(asdict(config), sort_keys=False))
        written.replace(config.run_dir / "config.yaml")
        if config.placement.torch_threads is not None:
            torch.set_num_threads(config.placement.torch_threads)
        keep_freed_memory()
        if backbone is None:
            backbone = instantiate(config.backbone)
        assert isinstance(backbone, Backbone)
        limit = config.limits.max_memory_gb
        free = free_bytes(backbone.device)
        self.admission = Admission(free if limit is None else min(free, int(limit * 1e9)))
        self.module = MultiTenantModule(backbone, {})
        self.runtime = Runtime(
            run_config,
            self.module,
            config.run_dir,
            {},
            self.admission,
            resident=True,
            on_metrics=self._on_metrics,
            on_workload=self._on_workload,
        )
        self.trainer = NexusTrainer(self.runtime, [])
        self._lock = threading.RLock()  # of the tables below; held for dictionary operations only
        self._tenants: dict[str, TenantRecord] = {}
        self._joining: set[str] = set()
        self._simulators = 0  # sessions, rollouts and evaluations that have one now
        self._open_sessions: dict[str, tuple[str, Sessions]] = {}
        self._session_tables: dict[bool, Sessions] = {}  # by whether simulators live in threads
        #: Folder -> lock: two workloads with one dataset record it once.
        self._recording: defaultdict[Path | None, threading.Lock] = defaultdict(threading.Lock)
        self._stopping = threading.Event()

    # ----------------------------------------------------------------------------------------------- the run

    def run(self) -> None:
        """The resident loop, in this thread, until :meth:`stop` or (main thread) a signal; then payloads are saved."""
        writer = threading.Thread(target=self._write_again, name="unwritten", daemon=True)
        writer.start()
        try:
            self.trainer.fit(self.module)
        finally:
            self._stopping.set()
            self.runtime.close()
            writer.join()
            with self._lock:
                tenants = list(self._tenants.values())
            for tenant in tenants:
                tenant.stop_evaluations.set()
                tenant.metrics.close()
                if tenant.workload is not None:
                    tenant.workload.changed.set()
            self._close_sessions()
            for tenant in tenants:
                works = [] if tenant.workload is None or tenant.workload.thread is None else [tenant.workload.thread]
                for thread in [*works, *tenant.threads]:
                    thread.join(STOP_S)

    def _write_again(self) -> None:
        """What the disk has refused, also while nobody trains; in a thread of its own."""
        while not self._stopping.wait(WRITE_AGAIN_S):
            for tenant in list(self._tenants.values()):
                tenant.metrics.flush()
            if self.runtime.tenancy.unsaved():
                try:
                    self._on_actor(self.runtime.tenancy.save_unsaved)
                except NotReady:
                    return

    def alarms(self) -> list[str]:
        """Writes to the disk that fail now, a line each, for the operator; empty when all is well."""
        found = [f"payload of tenant {name}: {owed.problem}" for name, owed in self.runtime.tenancy.unsaved().items()]
        metrics = {name: tenant.metrics.problem for name, tenant in list(self._tenants.items())}
        found += [f"metrics of tenant {name}: {problem}" for name, problem in metrics.items() if problem is not None]
        if self.runtime.events.problem is not None:
            found.append(f"events.jsonl: {self.runtime.events.problem}")
        return found

    def stop(self) -> None:
        """Ask :meth:`run` to return after the current job. Workloads go on where they were saved, after a restart."""
        self._stopping.set()
        self.runtime.schedule.interrupted = True
        self.runtime.scheduler.wake()

    @property
    def ready(self) -> bool:
        """True while the loop runs and takes calls."""
        return self.runtime.server.is_alive and not self._leaving

    @property
    def _leaving(self) -> bool:
        return self._stopping.is_set() or self.runtime.schedule.interrupted

    def ping(self, timeout_s: float) -> None:
        """Returns when the actor has answered; it answers between two jobs.

        Raises:
            NotReady: it has not, or the server stops.
        """
        try:
            self.runtime.call(lambda: None).result(timeout_s)
        except TimeoutError as error:
            raise NotReady(f"the actor has not answered within {timeout_s:g} s") from error
        except RunEnded as error:
            raise NotReady("the server stops") from error

    def capabilities(self) -> dict[str, Any]:
        """What a tenant can choose from."""
        registry, backbone = self.config.registry, self.module.backbone
        entries = {
            kind: {
                name: {"may_set": [path.rsplit(".", 1)[-1] for path in entry.allow], "at_most": dict(entry.most)}
                for name, entry in getattr(registry, kind).items()
            }
            for kind in ("heads", "environments", "datasets")
        }
        return {
            "version": __version__,
            "backbone": {
                "name": type(backbone).__name__,
                "parameters": sum(p.numel() for p in backbone.parameters()),
                "fingerprint": self.runtime.fingerprint,
                "kinds": list(backbone.kinds),
            },
            **entries,
            "limits": asdict(self.config.limits),
        }

    # ----------------------------------------------------------------------------------------------- tenants

    def compile(self, tenant_id: str, spec: Mapping[str, Any]) -> tuple[TenantConfig | None, list[str]]:
        """The tenant of a spec, or None and why there is none. Builds nothing."""
        try:
            return self.compiler.tenant(tenant_id, spec), []
        except InvalidRequest as error:
            return None, error.details

    def create_tenant(self, tenant_id: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        """A slot joins the run: fresh head, optimizer, random stream. On any error nothing is left of it.

        Raises:
            InvalidRequest, Conflict (the id is taken), QuotaExceeded (tenants or memory), NotReady.
        """
        self._join(tenant_id, self.compiler.tenant(tenant_id, spec), None)
        return self.describe(tenant_id)

    def restore_tenant(self, tenant_id: str, spec: Mapping[str, Any], payload: Path | None = None) -> dict[str, Any]:
        """:meth:`create_tenant` after a restart, with everything that was saved of it.

        Args:
            tenant_id: as before.
            spec: as before.
            payload: folder; None: the newest intact one in the run folder, or a fresh tenant when there is none at all.

        Returns:
            ``{"policy_version", "optimizer_steps"}``, and ``damaged``: how many newer payloads were damaged, if any.

        Raises:
            Conflict: no payload can be read, or it is of another backbone or schema.
        """
        limits = self.config.limits  # those of today: a tenant is not lost because the operator has lowered them
        most = {"priority": limits.max_priority, "weight": limits.max_weight}
        spec = {**spec, **{key: min(spec[key], most[key]) for key in most if spec.get(key) is not None}}
        config = self.compiler.tenant(tenant_id, spec)
        try:
            read, damaged = self._newest(tenant_id) if payload is None else (read_payload(payload), [])
        except PayloadError as error:
            log.exception("tenant %s: its payload cannot be read", tenant_id)
            raise Conflict(f"tenant {tenant_id}: its payload cannot be read; the operator's log says why") from error
        self._join(tenant_id, config, read)
        slot = self.runtime.slots[tenant_id]
        restored = {"policy_version": slot.policy_version, "optimizer_steps": slot.optimizer_steps}
        return {**restored, "damaged": len(damaged)} if damaged else restored

    def _newest(self, tenant_id: str) -> tuple[Payload | None, list[str]]:
        """The newest intact payload of the tenant and what is wrong with newer ones, which the log and an event tell.

        Raises:
            PayloadError: there are payloads, and all are damaged.
        """
        payload, damaged = read_newest(self._payload_folder(tenant_id))
        if payload is None and damaged:
            raise PayloadError("every payload is damaged:\n  " + "\n  ".join(damaged))
        if payload is not None and damaged:
            text = "tenant %s: goes on from %s, because newer payloads are damaged:\n  %s"
            log.warning(text, tenant_id, payload.path.name, "\n  ".join(damaged))
            self.runtime.events.point("damaged_payload", tenant_id, used=payload.path.name, damaged=damaged)
        return payload, damaged

    def delete_tenant(self, tenant_id: str) -> None:
        """End its work, take it out of memory, remove its payloads and metrics. Others notice nothing."""
        with self._lock:
            tenant = self._tenant(tenant_id)
            tenant.leaving.set()
            work = tenant.workload
        tenant.stop_evaluations.set()
        if work is not None and work.thread is not None:
            work.cancelled.set()
            work.changed.set()
            work.thread.join()
        for thread in list(tenant.threads):
            thread.join()
        self._close_sessions(tenant_id)
        self._on_actor(lambda: self.runtime.tenancy.leave(tenant_id))
        tenant.metrics.close()
        with self._lock:
            del self._tenants[tenant_id]
        shutil.rmtree(self._payload_folder(tenant_id), ignore_errors=True)
        for path in (tenant.metrics.path, self.config.run_dir / "videos" / f"{tenant_id}.mp4"):
            path.unlink(missing_ok=True)

    def describe(self, tenant_id: str) -> dict[str, Any]:
        """What is known of a tenant now."""
        tenant = self._tenant(tenant_id)
        slot, work = self.runtime.slots[tenant_id], tenant.workload
        state = "idle" if tenant.last_error is None else "failed"
        if work is not None:
            state = "paused" if work.paused else "running" if work.running else "preparing"
        config, schema = slot.spec.config if work is None else work.config, slot.spec.schema
        return {
            "tenant_id": tenant_id,
            "state": state,
            "task": config.task,
            "policy_version": slot.policy_version,
            "jobs_completed": slot.jobs_completed,
            "target_jobs": config.target_jobs,
            "optimizer_steps": slot.optimizer_steps,
            "jobs": self.runtime.tenancy.job_counts().get(tenant_id, {}),
            "progress": self.runtime.tenancy.status.tenants[tenant_id].state,
            "schema": asdict(schema),
            "signature": schema.signature,
            "prefix_signature": schema.prefix_signature,
            "head": type(slot.head).__name__,
            "memory_bytes": tenant.memory_bytes,
            "last_error": tenant.last_error,
            "evaluations": sorted(
                [*map(_headline, slot.evaluations), *tenant.evaluations], key=lambda e: e["policy_version"]
            ),
        }

    def _join(self, tenant_id: str, config: TenantConfig, payload: Payload | None) -> None:
        with self._lock:
            if tenant_id in self._tenants or tenant_id in self._joining:
                raise Conflict(f"tenant {tenant_id}: is there already")
            if len(self._tenants) + len(self._joining) >= self.config.limits.max_tenants:
                raise QuotaExceeded(f"the server holds {self.config.limits.max_tenants} tenants; delete one first")
            self._joining.add(tenant_id)
        try:
            built = config if payload is None else self._saved_config(tenant_id, config, payload)
            config = replace(config, head=built.head)
            path = self.config.run_dir / "metrics" / f"{tenant_id}.jsonl"
            metrics = MetricLog(path, self.config.limits.metrics_history)  # first: nothing of it is in the run
            try:
                memory = self._on_actor(lambda: self._build(tenant_id, built, payload))
            except BaseException:
                metrics.close()
                if path.is_file() and not path.stat().st_size:
                    path.unlink()
                raise
            with self._lock:
                self._tenants[tenant_id] = TenantRecord(config, metrics, memory)
        finally:
            with self._lock:
                self._joining.discard(tenant_id)

    def _build(self, tenant_id: str, config: TenantConfig, payload: Payload | None) -> int:
        """On the actor thread: a new head draws from the global generator. Returns the bytes the tenant needs."""
        try:
            slot = build_tenant(tenant_id, config, self.config.seed, self.module.backbone, self.admission)
        except NoRoom as error:
            raise QuotaExceeded(str(error)) from error
        except (ValueError, TypeError, RuntimeError) as error:  # what only the head itself can tell
            raise InvalidRequest(f"spec.head: cannot be built: {error}") from error
        slot.ended = True
        self.runtime.tenancy.join(slot, payload)
        return self.admission.held[tenant_id]

    def _saved_config(self, tenant_id: str, config: TenantConfig, payload: Payload) -> TenantConfig:
        """The workload that a payload was saved in: it decides about optimizer and Q networks. Its head is the one
        that was trained, whatever the registry says today."""
        if payload.manifest["backbone_fingerprint"] != self.runtime.fingerprint:
            raise Conflict(
                f"tenant {tenant_id}: its payload was trained on another backbone; start the server with that"
            )
        saved = saved_tenant(payload.manifest["config"], f"{payload.path}/manifest.json config")
        if saved.schema != config.schema:
            raise Conflict(f"tenant {tenant_id}: its payload has another schema than its spec")
        return replace(saved, seed=payload.manifest["seed"], priority=config.priority, weight=config.weight)

    # --------------------------------------------------------------------------------------------- workloads

    def submit(
        self,
        tenant_id: str,
        workload: Mapping[str, Any],
        *,
        resume: bool = False,
        paused: bool = False,
        on_end: OnEnd = lambda end: None,
    ) -> None:
        """Start a workload. Returns once it is accepted; preparation goes on in a thread of its own.

        Args:
            tenant_id: of a tenant.
            workload: ``{task, dataset?, environment?, algorithm?, features?, eval?, target_jobs}``.
            resume: after a restart: go on from the tenant's payload, if that was saved in the middle of this workload.
            paused: as after :meth:`pause`, from the start.
            on_end: see :data:`OnEnd`; called in the workload's thread.

        Raises:
            InvalidRequest: with everything that is wrong with it.
            Conflict: another training workload of the tenant is active, or the payload is in the middle of another one.
        """
        tenant = self._tenant(tenant_id)
        if isinstance(workload, Mapping) and workload.get("task") == "eval":
            request = {key: value for key, value in workload.items() if key not in ("task", "eval", "workload_id")}
            return self.evaluate(tenant_id, {**request, **(workload.get("eval") or {})}, on_end)
        config = self.compiler.workload(tenant_id, tenant.config, workload)
        slot, workload_id = self._slot(tenant_id), workload.get("workload_id")
        # Another id: killed after this workload was accepted and before it was first saved.
        resume = resume and slot.workload == workload_id and slot.spec.config.task == config.task
        if resume and replace(config, seed=None) != replace(slot.spec.config, seed=None):
            raise Conflict(f"tenant {tenant_id}: its payload was saved in the middle of another workload")
        with self._lock:
            self._tenant(tenant_id)  # it may have begun to leave
            if tenant.workload is not None:
                raise Conflict(
                    f"tenant {tenant_id}: a {tenant.workload.config.task} workload is active; cancel it first"
                )
            scheduler = self.runtime.scheduler
            if scheduler.registered(tenant_id) and scheduler.in_flight(tenant_id):
                raise Conflict(f"tenant {tenant_id}: has reserved jobs in flight; complete or fail them first")
            work = tenant.workload = Workload(config, workload_id, resume, on_end, paused=paused)
        work.thread = threading.Thread(
            target=self._work, args=(tenant_id, tenant, work), name=f"workload-{tenant_id}", daemon=True
        )
        work.thread.start()

    def _work(self, tenant_id: str, tenant: TenantRecord, work: Workload) -> None:
        """A workload from its data to its end, in a thread of its own."""
        runtime, slot = self.runtime, self.runtime.slots[tenant_id]
        tenant.last_error = None
        try:
            try:
                over = work.resume and slot.ended  # killed between its end and the news of it
                data = (None, None) if over else self._open_data(slot, work.config)
                if not over and not work.cancelled.is_set():
                    self._on_actor(lambda: self._start(tenant_id, work, *data))
                while work.running and not work.cancelled.is_set() and not runtime.tenancy.workload_over(tenant_id):
                    work.changed.wait(LOOK_S)
                    work.changed.clear()
                    if self._leaving:
                        return
            finally:
                if work.running and not self._leaving:
                    self._end(tenant_id)
            end = self._outcome(slot, work, over)
        except Exception as error:
            if self._leaving or isinstance(error, NotReady):  # it goes on after the restart
                return
            log.exception("tenant %s: its %s workload failed", tenant_id, work.config.task)
            end = {"status": "failed", "error": future_error_to_json(error)}
        if end["status"] == "failed":
            tenant.last_error = end["error"]["message"]
        with self._lock:
            tenant.workload = None
        work.on_end(end)

    def _open_data(self, slot: TenantSlot, config: TenantConfig) -> tuple[DemonstrationReader | None, Any]:
        """A reader of the workload's dataset, recorded first when it is not there, and its statistics."""
        if config.dataset is None:
            return None, None
        root = dataset_root(config, self.config.data_dir)
        with self._lock:
            recording = self._recording[root]
        with recording:
            record_dataset(slot.name, config, self.config.data_dir)
        dataset = open_dataset(config.dataset, slot.spec.schema, root)
        reader = self.runtime.shared.make_reader(slot, config, dataset, PassCounter())
        return reader, dataset_stats(dataset, config.dataset, slot.spec.schema)

    def _start(self, tenant_id: str, work: Workload, reader: DemonstrationReader | None, stats: Any) -> None:
        """On the actor thread."""
        self.runtime.tenancy.start(tenant_id, work.config, reader, stats, work.resume, work.id)
        work.running = True
        if work.paused:
            self._rest(tenant_id, True)

    def _end(self, tenant_id: str) -> None:
        producers = self._on_actor(lambda: self.runtime.tenancy.stop(tenant_id))
        for producer in producers:
            producer.join(JOIN_S)
        self._on_actor(lambda: self.runtime.tenancy.end(tenant_id))

    def _outcome(self, slot: TenantSlot, work: Workload, over: bool) -> dict[str, Any]:
        ran = work.running or over
        result = {
            "jobs": slot.jobs_completed if ran else 0,
            "policy_version": slot.policy_version,
            "optimizer_steps": slot.optimizer_steps if ran else 0,
            "evaluations": [_headline(evaluation) for evaluation in slot.evaluations] if ran else [],
        }
        reason, slot.quarantined = slot.quarantined, None  # the next piece of work may go better
        if work.running and reason is not None:
            error = {"type": "workload_failed", "category": "unknown", "message": reason, "details": []}
            return {"status": "failed", "error": {**error, "retryable": False}, "result": result}
        return {"status": "cancelled" if work.cancelled.is_set() else "completed", "result": result}

    def pause(self, tenant_id: str) -> None:
        """The actor leaves the tenant's jobs alone; its producers fill the queue up to their bound and wait."""
        work = self._active(tenant_id)
        work.paused = True
        self._on_actor(lambda: self._rest(tenant_id, True) if work.running else None)

    def resume(self, tenant_id: str) -> None:
        """Undo :meth:`pause`."""
        work = self._active(tenant_id)
        work.paused = False
        self._on_actor(lambda: self._rest(tenant_id, False) if work.running else None)

    def cancel(self, tenant_id: str) -> None:
        """End the training workload between two jobs; what was trained stays. Without one: end the evaluations.

        Raises:
            Conflict: nothing is running.
        """
        tenant = self._tenant(tenant_id)
        work = tenant.workload
        if work is not None:
            work.cancelled.set()
            work.changed.set()
        elif any(thread.is_alive() for thread in tenant.threads):
            tenant.stop_evaluations.set()
        else:
            raise Conflict(f"tenant {tenant_id}: no workload is active")

    def _rest(self, tenant_id: str, paused: bool) -> None:
        self.runtime.members[tenant_id].paused = paused

    def _active(self, tenant_id: str) -> Workload:
        work = self._tenant(tenant_id).workload
        if work is None:
            raise Conflict(f"tenant {tenant_id}: no workload is active")
        return work

    def _on_workload(self, tenant_id: str) -> None:
        tenant = self._tenants.get(tenant_id)
        if tenant is not None and tenant.workload is not None:
            tenant.workload.changed.set()

    # -------------------------------------------------------------------------------------------- evaluation

    def evaluate(self, tenant_id: str, request: Mapping[str, Any], on_end: OnEnd = lambda end: None) -> None:
        """Evaluate one policy version, pinned now, in a thread with simulators of its own; training goes on.

        Args:
            tenant_id: of a tenant.
            request: ``{environment?, episodes, first_seed?, num_envs?, policy_version?}``; without an environment that
                of the tenant's workload.
            on_end: result: success_rate, n, ci_low, ci_high, episode_return, by_task, policy_version.
        """
        tenant = self._tenant(tenant_id)
        request = {key: value for key, value in request.items() if value is not None}
        environment, numbers = self._evaluation(tenant_id, tenant, request)
        version = self._pin(tenant_id, request.get("policy_version"))
        slot = self.runtime.slots[tenant_id]
        try:
            self._claim_simulator()
        except QuotaExceeded:
            self.runtime.served.unpin(tenant_id, version)
            raise
        stopped = tenant.stop_evaluations

        def work() -> None:
            try:
                end = self._run_evaluation(slot, environment, numbers, version, stopped)
            except Exception as error:
                if not self._leaving:
                    log.exception("tenant %s: an evaluation failed", tenant_id)
                end = {"status": "failed", "error": future_error_to_json(error)}
            finally:
                self._release_simulator()
                self.runtime.served.unpin(tenant_id, version)
            if end["status"] == "completed":
                tenant.evaluations = [*tenant.evaluations, end["result"]][-KEPT_EVALUATIONS:]
            if not self._leaving:
                on_end(end)

        thread = threading.Thread(target=work, name=f"evaluation-{tenant_id}", daemon=True)
        with self._lock:
            tenant.threads = [t for t in tenant.threads if t.is_alive()]
            if not tenant.threads and not tenant.leaving.is_set():
                stopped.clear()
            tenant.threads.append(thread)
            thread.start()

    def _evaluation(
        self, tenant_id: str, tenant: TenantRecord, request: Mapping[str, Any], *also: str
    ) -> tuple[EnvironmentConfig, dict[str, int]]:
        """Where, and ``episodes``, ``first_seed``, ``num_envs``; everything checked. ``also``: keys of the caller."""
        keys = ("environment", "episodes", "first_seed", "num_envs", "policy_version", *also)
        problems = [f"{key}: unknown key; valid keys: {', '.join(keys)}" for key in request if key not in keys]
        numbers = {"episodes": 20, "first_seed": 0, "num_envs": 1}
        for key, least, most in (("episodes", 1, MAX_EPISODES), ("first_seed", 0, 2**31), ("num_envs", 1, 64)):
            value = request.get(key, numbers[key])
            if type(value) is not int or not least <= value <= most:
                problems.append(f"{key}={value!r}: an integer from {least} to {most}")
            else:
                numbers[key] = value
        if problems:
            raise InvalidRequest("the evaluation cannot run", problems)
        asked = request.get("environment")
        if isinstance(asked, Mapping) and "num_envs" not in request and type(asked.get("num_envs")) is int:
            numbers["num_envs"] = asked["num_envs"]
        return self._environment(tenant_id, tenant, request.get("environment"), numbers["num_envs"]), numbers

    def _environment(self, tenant_id: str, tenant: TenantRecord, asked: Any, num_envs: int) -> EnvironmentConfig:
        """An environment that a request names, or that of the tenant's (last) workload."""
        work = tenant.workload
        config = self.runtime.slots[tenant_id].spec.config if work is None else work.config
        if asked is not None:
            environment = self.compiler.environment(tenant.config.schema, asked)
            most = self.config.registry.environments[asked["name"]].most.get("num_envs", num_envs)
            if num_envs > most:
                raise InvalidRequest(f"num_envs={num_envs}: at most {most:g}")
        elif config.environment is not None:
            environment = config.environment
        else:
            raise InvalidRequest(f"environment: tenant {tenant_id} has no workload with one; name one")
        checked = replace(tenant.config, environment=environment)
        if problems := self.compiler.problems("spec", tenant_id, checked):
            raise InvalidRequest("the tenant cannot act in this environment", problems)
        return environment

    def _run_evaluation(
        self,
        slot: TenantSlot,
        environment: EnvironmentConfig,
        numbers: Mapping[str, int],
        version: int,
        stopped: threading.Event,
    ) -> dict[str, Any]:
        runtime, name, start_s = self.runtime, slot.name, self.runtime.events.now()
        num_envs = min(numbers["num_envs"], numbers["episodes"])
        env = make_env(environment, slot.spec.schema, slot.normalizer, num_envs=num_envs, tenant=name)
        try:
            asked = list_episodes(len(env.task_names), numbers["first_seed"], numbers["episodes"])
            client = runtime.server.client(name, sample=False, version=version)
            try:
                episodes = evaluate_policy(env, client, asked, stopped.is_set)
            finally:
                client.rest()
        finally:
            env.close()
        if episodes is None:
            return {"status": "cancelled", "result": {}}
        runtime.events.span("environment", {name: len(asked)}, start_s, runtime.events.now(), kind="eval")
        result = result_dict(summarise(name, version, episodes))
        numbers_only = {k: float(v) for k, v in result.items() if isinstance(v, int | float) and v is not True}
        runtime.tenancy.log(name, "eval", numbers_only)
        return {"status": "completed", "result": finite(_headline(result))}

    # ---------------------------------------------------------------------------------------------- payloads

    def export(self, tenant_id: str) -> Path:
        """The payload folder of the tenant as it is now, written now."""
        slot = self._slot(tenant_id)
        path = self._on_actor(lambda: self.runtime.save_payload(slot))
        assert path is not None
        return path

    def payloads(self, tenant_id: str) -> list[dict[str, Any]]:
        """The payloads whose manifest can be read, oldest first; also of a tenant that could not be restored."""
        found = []
        for path, manifest in self._manifests(tenant_id):
            files = sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file())
            entry = {key: manifest[key] for key in ("policy_version", "created", "task", "tensors_digest")}
            size = sum((path / name).stat().st_size for name in files)
            found.append({**entry, "name": path.name, "files": files, "bytes": size})
        return found

    def payload_path(self, tenant_id: str, version: int) -> Path:
        """The newest intact payload folder of a policy version; also of a tenant that could not be restored.

        Raises:
            NotFound: it is not on disk (``trainer.keep_payloads`` versions are kept), or damaged.
        """
        found = [path for path, manifest in self._manifests(tenant_id) if manifest["policy_version"] == version]
        for path in reversed(found):
            if is_intact(path):
                return path
        folders = list_payloads(self._payload_folder(tenant_id))
        there = ", ".join(path.name for path in folders if path not in found and is_intact(path)) or "none"
        what = "the payload of version {} is damaged" if found else "no payload of version {}"
        raise NotFound(f"tenant {tenant_id}: {what.format(version)}; intact are: {there}")

    def _manifests(self, tenant_id: str) -> list[tuple[Path, dict[str, Any]]]:
        """Payload folders with what they say about themselves, oldest first; without those that cannot be read."""
        if not self._payload_folder(tenant_id).is_dir():
            self._tenant(tenant_id)
        found = []
        for path in list_payloads(self._payload_folder(tenant_id)):
            try:
                found.append((path, read_manifest(path)))
            except PayloadError as error:
                log.warning("tenant %s: %s", tenant_id, error)
        return found

    def _payload_folder(self, tenant_id: str) -> Path:
        return self.config.run_dir / "tenants" / tenant_id

    # ----------------------------------------------------------------------------------------------- metrics

    def metrics(self, tenant_id: str, after: int = 0) -> list[dict[str, Any]]:
        """``{"id", "time_s", "metrics"}`` of the tenant, ids greater than ``after``."""
        return self._tenant(tenant_id).metrics.rows(after)

    def wait_metrics(self, tenant_id: str, after: int, timeout_s: float) -> list[dict[str, Any]]:
        """:meth:`metrics`, waiting for the first one; empty on timeout."""
        return self._tenant(tenant_id).metrics.wait(after, timeout_s)

    def _on_metrics(self, row: dict[str, float], step: int) -> None:
        """A row of :meth:`Runtime.log`: ``<group>/<tenant>/<name>`` of one tenant, and ``<tenant>/step``."""
        del step
        tenant_id = next(key.removesuffix("/step") for key in row if key.endswith("/step") and key.count("/") == 1)
        tenant = self._tenants.get(tenant_id)
        if tenant is not None:
            named = {key.replace(f"/{tenant_id}/", "/"): value for key, value in row.items() if f"/{tenant_id}/" in key}
            tenant.metrics.add({**named, "step": row[f"{tenant_id}/step"]})

    # --------------------------------------------------------------------------------------------- inference

    def predict(
        self,
        tenant_id: str,
        arrays: Mapping[str, np.ndarray],
        instructions: list[str],
        *,
        deterministic: bool = True,
        policy_version: int | None = None,
        seed: int | None = None,
    ) -> dict[str, np.ndarray]:
        """Act on N observations through the inference queue, beside every other tenant's.

        Args:
            tenant_id: of a tenant.
            arrays: ``observation/image/<camera>`` uint8 ``[N, 3, H, W]`` and ``observation/state`` ``[N, S]``.
            instructions: N texts.
            deterministic: False samples, with ``seed`` (required then).
            policy_version: None: the latest.
            seed: of the sampling noise.

        Returns:
            ``action`` float32 ``[N, T, A]`` in the simulator's own convention, ``chunk`` (as the head gave it,
            normalised), ``policy_version`` ``[N, 1]``, and of heads that can do RL ``state_value``, ``log_probs`` and
            ``trace/<name>``.
        """
        tenant, slot = self._tenant(tenant_id), self._slot(tenant_id)
        if not deterministic and seed is None:
            raise InvalidRequest("seed: sampling needs one, so that a repeated request gives the same answer")
        observation = observation_of(arrays, instructions)
        version = tenant.predict_version if policy_version is None else policy_version
        try:
            normalizer = self.runtime.served.served(tenant_id, version).normalizer
        except ValueError as error:
            self._tenant(tenant_id)
            raise NotFound(str(error)) from error
        with self._session(tenant_id, tenant) as client:
            client.sample, client.version = not deterministic, version
            if seed is not None:
                client.generator.manual_seed(seed)
            try:
                answer = client.wait(client.submit(observation))
            except ValueError as error:
                self._tenant(tenant_id)  # the queue's message about one that has just left names the others
                raise InvalidRequest(str(error)) from error
            except TimeoutError as error:
                raise NotReady(str(error)) from error
            except RuntimeError as error:
                raise (NotReady if not self.ready else NexusError)(str(error)) from error
        chunk = answer["vla_action", "chunk"]
        action = slot.spec.schema.to_native(normalizer.unnormalize_action(chunk.to(normalizer.action_scale.device)))
        out = {"action": action, "chunk": chunk, "policy_version": answer["policy_version"]}
        if "state_value" in answer.keys():
            out["state_value"] = answer["state_value"]
        for key, value in cast(TensorDict, answer["vla_action"]).items(include_nested=True, leaves_only=True):
            name = key if isinstance(key, str) else "/".join(key)
            out.setdefault(name, value)
        return to_arrays(out)

    @contextmanager
    def _session(self, tenant_id: str, tenant: TenantRecord) -> Iterator[TenantPolicyClient]:
        """A session of the inference queue for one call: kept, so that the queue learns who comes back."""
        with self._lock:
            client = tenant.clients.pop() if tenant.clients else None
        if client is None:
            try:
                client = self.runtime.server.client(tenant_id, sample=False, timeout_s=PREDICT_TIMEOUT_S)
            except ValueError as error:
                raise NotFound(f"tenant {tenant_id}: unknown") from error
        try:
            yield client
        finally:
            with self._lock:
                tenant.clients.append(client)

    def _pin(self, tenant_id: str, version: int | None) -> int:
        try:
            return self.runtime.served.pin(tenant_id, version)
        except ValueError as error:
            self._tenant(tenant_id)
            raise NotFound(str(error)) from error

    # ------------------------------------------------------------------------------------------- what goes on

    def stats(self) -> dict[str, Any]:
        """Figures for the operator's page and ``/metrics``."""
        runtime = self.runtime
        with self._lock:
            names = list(self._tenants)
        states: Counter[str] = Counter()
        for counts in runtime.tenancy.job_counts().values():
            states.update(counts)
        served = runtime.server.stats()
        busy = runtime.events.busy_seconds()
        tenants = {}
        for name in names:
            try:
                described = self.describe(name)
            except (NexusError, KeyError):  # it has just left
                continue
            tenants[name] = {
                **{
                    k: described[k]
                    for k in ("state", "task", "policy_version", "jobs_completed", "memory_bytes", "jobs")
                },
                "last_error": described["last_error"],
                "queue_bytes": runtime.queue.used_bytes(name),
                "device_seconds": {service: seconds.get(name, 0.0) for service, seconds in busy.items()},
                "inference": {k: v for k, v in served["tenants"].get(name, {}).items() if not k.endswith("_bins")},
            }
        calls, stats = (
            ("backbone_calls", "shared_backbone_calls", "rows_served", "rows_failed"),
            self.module.encode_stats,
        )
        return {
            "ready": self.ready,
            "tenants": tenants,
            "jobs_by_state": dict(states),
            "utilisation": runtime.events.utilisation(),
            "inference": {**{key: served[key] for key in calls}, "call_sizes": served["call_sizes"]},
            "actor_encode": {"calls": stats.calls, "rows": stats.rows},
            "feature_store_bytes": runtime.store.bytes,
            "simulators": self._simulators,
        }

    # ------------------------------------------------------------------------------------------------ helpers

    def _tenant(self, tenant_id: str) -> TenantRecord:
        tenant = self._tenants.get(tenant_id)
        if tenant is None or tenant.leaving.is_set():
            raise NotFound(f"tenant {tenant_id}: unknown")
        return tenant

    def _on_actor(self, action: Callable[[], T]) -> T:
        """Run between two jobs; see :meth:`Runtime.call`."""
        try:
            return self.runtime.call(action).result()
        except RunEnded as error:
            raise NotReady("the server stops") from error

    def _claim_simulator(self) -> None:
        with self._lock:
            if self._simulators >= self.config.limits.max_sessions:
                raise QuotaExceeded(f"{self._simulators} sessions and evaluations have simulators now; try again later")
            self._simulators += 1

    def _release_simulator(self) -> None:
        with self._lock:
            self._simulators -= 1


def _headline(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("policy_version", "success_rate", "n", "ci_low", "ci_high", "episode_return", "episode_length", "by_task")
    return {key: evaluation[key] for key in keys if key in evaluation}
