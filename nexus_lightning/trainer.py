"""``NexusTrainer`` (the Lightning Trainer that carries the loop) and :func:`train`, which ``train.py`` calls."""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from hydra.utils import get_class, instantiate
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.loggers import Logger

from nexus_lightning.backbone import Backbone
from nexus_lightning.checkpoint import read_manifest, resolve_payload
from nexus_lightning.config import (
    ConfigError,
    NexusConfig,
    TenantConfig,
    TrainerConfig,
    digest_of,
    saved_tenant,
    split_head,
    tenant_from_dict,
    validate,
)
from nexus_lightning.files import last_folder, made_once, new_folder, put_in_place, try_lock, write_atomically
from nexus_lightning.memory import (
    Admission,
    estimate,
    estimate_table,
    free_bytes,
    gigabytes,
    head_memory,
    keep_freed_memory,
)
from nexus_lightning.monitoring.banner import banner
from nexus_lightning.monitoring.loggers import CSV, build, close_loggers, make_loggers
from nexus_lightning.monitoring.progress import NexusProgressBar
from nexus_lightning.monitoring.report import summary_table, write_report, write_summary
from nexus_lightning.placement.cluster import connected
from nexus_lightning.placement.plan import Devices, Plan, common_devices, rank_problems, resolve, sharding_problems
from nexus_lightning.ranks import Ranks
from nexus_lightning.resume import changed_settings, flat, saved_state
from nexus_lightning.run.callbacks import (
    LAST_CHECKPOINT,
    JobLifecycle,
    LocalCheckpointIO,
    ResumedConfig,
    RunLifecycle,
    TenantCheckpoint,
)
from nexus_lightning.run.loop import LeaseStream, MultiTenantFitLoop
from nexus_lightning.run.module import MultiTenantModule
from nexus_lightning.run.runtime import Runtime
from nexus_lightning.run.start import build_tenant, open_data, record_dataset
from nexus_lightning.run.strategies import make_strategy
from nexus_lightning.simulator import SimulatorDied, SimulatorError
from nexus_lightning.tenant import TenantSlot

#: In a run folder, held by the process that writes there.
RUN_LOCK = "run.lock"


class NexusTrainer(L.Trainer):
    """A Lightning Trainer whose batches are leased training jobs.

    Args:
        runtime: queues, producers and run folder of this run.
        loggers: Lightning loggers.
        plan: who lives where; None: resolved from the configuration.
        **kwargs: any other Trainer argument that has a meaning here (callbacks, profiler ...).

    Example:
        >>> trainer = NexusTrainer(runtime, loggers)  # doctest: +SKIP
        >>> trainer.fit(module, ckpt_path=None)       # doctest: +SKIP
    """

    def __init__(self, runtime: Runtime, loggers: list[Logger], plan: Plan | None = None, **kwargs: Any) -> None:
        plan = resolve(runtime.config) if plan is None else plan
        config = runtime.config
        ours = [RunLifecycle(runtime), JobLifecycle(runtime), TenantCheckpoint(runtime)]
        callbacks = [*ours, *kwargs.pop("callbacks", [])]
        show = config.trainer.enable_progress_bar and runtime.ranks.first
        if show:
            callbacks.append(NexusProgressBar(runtime.tenancy.status))
        super().__init__(
            accelerator=config.placement.accelerator,
            strategy=make_strategy(plan, config),
            devices=runtime.ranks.local_size,
            num_nodes=runtime.ranks.size // runtime.ranks.local_size,
            precision=config.placement.precision,  # type: ignore[arg-type]
            logger=loggers or False,
            callbacks=callbacks,
            max_epochs=-1,
            max_time=config.trainer.max_time,
            limit_train_batches=config.trainer.jobs_per_round,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=show,
            deterministic=config.trainer.deterministic,
            default_root_dir=str(runtime.run_dir),
            log_every_n_steps=1,
            **kwargs,
        )
        if type(self.strategy.checkpoint_io) is TorchCheckpointIO:  # else it was asked for
            self.strategy.checkpoint_io = LocalCheckpointIO()
        self.runtime = runtime
        self.fit_loop = MultiTenantFitLoop(self, runtime.tick)

    def fit(self, model: MultiTenantModule, ckpt_path: str | os.PathLike | None = None) -> None:  # type: ignore[override]
        """Train until every target is met, ``max_jobs`` or ``max_time`` is reached, or a signal asks to stop.

        A resident run ends only when it is asked to.
        """
        path = None if ckpt_path is None else os.fspath(ckpt_path)
        stream = LeaseStream(self.runtime.tick, self.runtime.schedule)
        super().fit(model, train_dataloaders=stream, ckpt_path=path, weights_only=True)


# ------------------------------------------------------------------------------------------------------ one whole run


def train(
    config: NexusConfig, backbone: Backbone | None = None, link_latest: bool = True, ranks: Ranks | None = None
) -> dict[str, Any]:
    """Validate, prepare, build, run, report, close. Under torchrun every rank calls it.

    Args:
        config: typed configuration (see :func:`nexus_lightning.config.to_config`).
        backbone: an already built one (preparation runs share it); None builds ``config.backbone``.
        link_latest: let ``<output_dir>/latest`` point to this run.
        ranks: of a preparation run: those of the run that it prepares. None: joins them.

    Returns:
        The summary (what ``summary.json`` holds) with ``run_dir``; under ``trainer.dry_run`` only the memory
        ``estimate``: nothing is loaded, recorded or written.

    Raises:
        ConfigError: anything wrong with the configuration, before anything is built; on every rank alike.
        OSError: the disk is full; what is in force then is said at :class:`TenantCheckpoint`.
    """
    if config.trainer.dry_run:
        if problems := config_problems(config):
            raise ConfigError(problems)
        figures = estimate(config, backbone)
        print(estimate_table(figures, free_bytes(torch.device("cpu"))), flush=True)
        return {"estimate": figures, "tenants": {}}
    if ranks is not None:
        return _train(config, backbone, link_latest, ranks)
    ranks = Ranks.join(config.placement.accelerator)
    try:
        return _train(config, backbone, link_latest, ranks)
    finally:
        ranks.leave()


def config_problems(config: NexusConfig) -> list[str]:
    """What is wrong with a configuration whatever the launch."""
    try:
        validate(config)
    except ConfigError as error:
        return error.problems
    return []


def agree(config: NexusConfig, ranks: Ranks) -> Devices:
    """Every rank checks its configuration and tells the others; returns what the launch has.

    Raises:
        ConfigError: some rank's is wrong, or they differ: everything that is, on every rank.
    """
    problems, devices = config_problems(config), None
    try:
        devices = Devices.here(config.placement.accelerator)
    except ConfigError as error:
        problems = [*problems, *error.problems]
    by_rank = ranks.gather((problems, digest_of(asdict(config)), devices))
    found = dict.fromkeys(problem for problems, _, _ in by_rank for problem in problems)
    if len({digest for _, digest, _ in by_rank}) > 1:
        found |= dict.fromkeys(_differences(ranks.gather(asdict(config))))
    if found:
        raise ConfigError(list(found))
    return common_devices([devices for _, _, devices in by_rank if devices is not None])


def _differences(configs: list[dict[str, Any]]) -> list[str]:
    """One line for every key in which some rank's configuration differs from rank 0's."""
    by_rank = [flat(config) for config in configs]
    missing = object()
    lines = []
    for rank, other in enumerate(by_rank):
        for key in sorted({*by_rank[0], *other}):
            a, b = by_rank[0].get(key, missing), other.get(key, missing)
            if a != b:
                one, two = ("nothing" if v is missing else repr(v) for v in (a, b))
                fix = "start every rank with the same arguments"
                lines.append(f"{key}: rank 0 has {one}, rank {rank} has {two}; {fix}")
    return lines


def settle(config: NexusConfig, backbone: Backbone, devices: Devices, ranks: Ranks) -> Plan:
    """The plan of this run, from the sizes of what was built; the same on every rank.

    Raises:
        ConfigError: it does not fit, or the ranks have come to different plans or loaded different backbones.
    """
    plan = resolve(config, devices, estimate(config, backbone) if ranks.size > 1 else None)
    by_rank = ranks.gather((plan.signature, backbone.fingerprint if ranks.size > 1 else ""))
    problems = []
    for rank, (signature, fingerprint) in enumerate(by_rank):
        if signature != by_rank[0][0]:
            problems.append(f"placement: rank {rank} has planned otherwise than rank 0; start equal code everywhere")
        if fingerprint != by_rank[0][1]:
            problems.append(
                f"backbone: rank {rank} has loaded other weights ({fingerprint[:12]}) than rank 0 "
                f"({by_rank[0][1][:12]}); give all machines the same checkpoint"
            )
    if problems:
        raise ConfigError(problems)
    return plan


def _train(config: NexusConfig, backbone: Backbone | None, link_latest: bool, ranks: Ranks) -> dict[str, Any]:
    with contextlib.suppress(ConfigError):  # told by `agree`, with everything else
        config = as_it_was_left(config)
    devices = agree(config, ranks)
    if backbone is None and not hasattr(get_class(config.backbone["_target_"]), "on_meta"):
        backbone = instantiate(config.backbone)  # its size cannot be known without it
    plan = resolve(config, devices, estimate(config, backbone) if ranks.size > 1 else None)
    if problems := [*rank_problems(config, plan), *sharding_problems(config, plan)]:
        raise ConfigError(problems)
    with connected(config, plan):
        return _run(config, backbone, link_latest, ranks, devices)


def _run(
    config: NexusConfig, backbone: Backbone | None, link_latest: bool, ranks: Ranks, devices: Devices
) -> dict[str, Any]:
    with contextlib.ExitStack() as held:  # rank 0's lock on the run folder
        run_dir, ckpt_path = ranks.on_first(lambda: prepare_run(config, link_latest, held))
        return _run_in(run_dir, ckpt_path, config, backbone, ranks, devices)


def _run_in(
    run_dir: Path,
    ckpt_path: Path | None,
    config: NexusConfig,
    backbone: Backbone | None,
    ranks: Ranks,
    devices: Devices,
) -> dict[str, Any]:
    failed = ranks.on_first(lambda: record_datasets(config))
    if config.placement.torch_threads is not None:
        torch.set_num_threads(config.placement.torch_threads)
    keep_freed_memory()
    if backbone is None:
        backbone = instantiate(config.backbone)
    assert isinstance(backbone, Backbone)
    plan = settle(config, backbone, devices, ranks)
    asked, config = config, plan.settle(config)

    def write_settings() -> None:  # of a resumed run: once it has restored everything, until then they are the old ones
        write_config(asked, run_dir)
        placement = json.dumps({**plan.to_dict(), "signature": plan.signature}, indent=2)
        write_atomically(run_dir / "placement.json", placement)

    if ranks.first and ckpt_path is None:
        write_settings()
    payloads = starting_payloads(config, backbone, ranks)
    admission = Admission(free_bytes(backbone.device))
    slots, datasets = build_slots(config, backbone, payloads, admission, without_data=failed)
    for slot in slots.values():  # built from seeds and files, alike on every rank; this makes sure of it
        ranks.spread(slot.tensors().values())
    run_name = config.run_name or run_dir.name
    loggers = make_loggers(config.logger, run_dir, run_name, asdict(config))
    callbacks = [build(node, run_dir, run_name) for node in config.callbacks.values()]
    profiler = build(config.profiler, run_dir, run_name) if config.profiler else None

    def log_metrics(metrics: dict[str, float], step: int) -> None:
        for logger in loggers:
            logger.log_metrics(metrics, step)

    module = MultiTenantModule(backbone, slots, ranks)
    runtime = Runtime(config, module, run_dir, datasets, admission, on_metrics=log_metrics)
    for name, reason in failed.items():
        runtime.tenancy.quarantine(name, reason, "")
    exit_code = 1
    try:
        resumed = [ResumedConfig(write_settings)] if ckpt_path is not None and ranks.first else []
        trainer = NexusTrainer(runtime, loggers, plan, callbacks=[*resumed, *callbacks], profiler=profiler)
        if ranks.first:
            print(_banner(config, runtime, backbone, slots, trainer, plan, ckpt_path), flush=True)
        trainer.fit(module, ckpt_path=ckpt_path)
        exit_code = int(any(slot.quarantined for slot in slots.values()))
    finally:
        runtime.close()
        close_loggers(loggers, exit_code)
    summary = _summary(runtime, module)
    if ranks.first:
        write_summary(run_dir, **summary)
        write_report(run_dir)
        print(summary_table(summary))
    return {**summary, "run_dir": str(run_dir)}


def prepare_run(config: NexusConfig, link_latest: bool, held: contextlib.ExitStack) -> tuple[Path, Path | None]:
    """Make the run folder; see :func:`resolve_run`.

    Args:
        config: of the run.
        link_latest: see :func:`train`.
        held: keeps the lock on the run folder until it is closed, or the process ends.

    Raises:
        ConfigError: also when the run to go on with is still going, here or in another program, and when it cannot go
            on with these settings (see :func:`~nexus_lightning.resume.changed_settings`).
    """
    run_dir, ckpt_path = resolve_run(config)
    lock = try_lock(run_dir / RUN_LOCK)
    if lock is None:
        given = f"ckpt_path={config.ckpt_path}: the run in {run_dir} is still going"
        raise ConfigError([f"{given}; wait for its end or stop it, or name another run"])
    held.callback(lock.release)
    if ckpt_path is not None and (changed := changed_settings(config, run_dir, ckpt_path)):
        print(f"resumed with other settings: {'; '.join(changed)}", flush=True)
    (run_dir / LAST_CHECKPOINT).parent.mkdir(exist_ok=True)
    if link_latest:
        _link_latest(Path(config.output_dir), run_dir)
    if ckpt_path is None:
        write_config(config, run_dir)
    return run_dir, ckpt_path


def write_config(config: NexusConfig, run_dir: Path) -> None:
    """The resolved configuration."""
    write_atomically(run_dir / "config.yaml", yaml.safe_dump(asdict(config), sort_keys=False))


def resolve_run(config: NexusConfig) -> tuple[Path, Path | None]:
    """The run folder, made for this run alone, and the checkpoint to continue from: a resumed run goes on in its own.

    Raises:
        ConfigError: see :func:`saved_checkpoint`.
    """
    checkpoint = saved_checkpoint(config)
    if checkpoint is not None:
        return checkpoint.parent.parent, checkpoint
    return new_folder(Path(config.output_dir), _run_name(config)).resolve(), None


def saved_checkpoint(config: NexusConfig) -> Path | None:
    """The checkpoint that a run goes on from; None for a new one.

    A process that torchrun has started again (``--max-restarts``) continues by itself what it had saved.

    Raises:
        ConfigError: ``ckpt_path`` names nothing that exists.
    """
    output = Path(config.output_dir)
    if config.ckpt_path is None:
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0:
            return None
        earlier = output / "latest" if _launch_id() is None else last_folder(output, _run_name(config))
        if earlier is None or not (earlier / LAST_CHECKPOINT).is_file():
            return None
        return (earlier / LAST_CHECKPOINT).resolve()
    given = output / "latest" if config.ckpt_path == "last" else Path(config.ckpt_path)
    checkpoint = given if given.suffix == ".ckpt" else given / LAST_CHECKPOINT
    if not checkpoint.is_file():
        raise ConfigError([f"ckpt_path={config.ckpt_path}: no checkpoint at {checkpoint}; leave it null for a new run"])
    return checkpoint.resolve()


def _launch_id() -> str | None:
    """torchrun gives every rank the same id; "none" means that the launcher was given none."""
    launch = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if launch == "none" else launch


def _run_name(config: NexusConfig) -> str:
    name = _launch_id() or time.strftime("%Y-%m-%d_%H-%M-%S")
    return f"{name}_{config.run_name}" if config.run_name else name


def as_it_was_left(config: NexusConfig) -> NexusConfig:
    """Of a run that is resumed: tenants that had joined it live come back, those that had left stay away."""
    checkpoint = saved_checkpoint(config)
    if checkpoint is None:
        return config
    saved = saved_state(checkpoint)
    tenants = {name: tenant for name, tenant in config.tenants.items() if name not in saved.get("left", ())}
    for name in saved.get("joined", ()):
        if name not in tenants and name in saved["tenants"]:
            manifest = read_manifest(checkpoint.parent.parent / saved["tenants"][name])
            tenants[name] = saved_tenant(manifest["config"], f"tenants.{name}")
    return replace(config, tenants=tenants)


def _link_latest(output: Path, run_dir: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)  # a resumed run lies where it did
    link, temporary = output / "latest", output / f".latest-{uuid.uuid4().hex}"
    temporary.symlink_to(os.path.relpath(run_dir, output))
    temporary.replace(link)


def record_datasets(config: NexusConfig) -> dict[str, str]:
    """Record the demonstrations that tenants need and that are not there yet.

    Returns:
        The tenants whose simulator failed in it, and why: the others do not wait for them.
    """
    failed = {}
    for name, tenant in config.tenants.items():
        try:
            record_dataset(name, tenant, config.data_dir)
        except (SimulatorError, SimulatorDied) as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


def starting_payloads(config: NexusConfig, backbone: Backbone, ranks: Ranks | None = None) -> dict[str, Path]:
    """Payload folder of every tenant with ``init_from``; trained first from its recipe when it does not exist."""
    payloads = {}
    for name, tenant in config.tenants.items():
        if not tenant.init_from.given:
            continue
        path = None if tenant.init_from.path is None else Path(tenant.init_from.path)
        if tenant.init_from.recipe is not None:
            path = prepare_payload(name, tenant, path, config, backbone, Ranks() if ranks is None else ranks)
        assert path is not None
        payloads[name] = resolve_payload(path)
    return payloads


def prepare_payload(
    name: str, tenant: TenantConfig, path: Path | None, config: NexusConfig, backbone: Backbone, ranks: Ranks
) -> Path:
    """Run the recipe (an SFT tenant) once and keep its run folder; later runs reuse the payload."""
    recipe = tenant_from_dict(tenant.init_from.recipe, f"tenants.{name}.init_from.recipe")
    recipe_name = "start"
    if path is None:
        identity = digest_of({"recipe": asdict(recipe), "backbone": backbone.fingerprint, "seed": config.seed})
        path = Path(config.data_dir) / "payloads" / identity
    tenant_dir = path / "tenants" / recipe_name
    with contextlib.ExitStack() as held:

        def is_made() -> bool:
            if not (tenant_dir / "latest").is_file():
                held.enter_context(made_once(path, "training the starting payload"))
            return (tenant_dir / "latest").is_file()

        if not ranks.on_first(is_made):
            _train_payload(name, recipe_name, recipe, path, config, backbone, ranks)
    return tenant_dir


def _train_payload(
    name: str,
    recipe_name: str,
    recipe: TenantConfig,
    path: Path,
    config: NexusConfig,
    backbone: Backbone,
    ranks: Ranks,
) -> None:
    if ranks.first:
        print(f"training the starting payload of {name} from its recipe in {path}", flush=True)
    preparation = NexusConfig(
        tenants={recipe_name: recipe},
        backbone=config.backbone,
        queues=config.queues,
        placement=replace(config.placement, environments={}),  # of other tenants
        trainer=replace(TrainerConfig(), enable_progress_bar=config.trainer.enable_progress_bar),
        logger=CSV,
        seed=config.seed,
        output_dir=str(path.parent),
        run_name=path.name,
        data_dir=config.data_dir,
    )
    summary = train(preparation, backbone, link_latest=False, ranks=ranks)
    if summary["tenants"][recipe_name].get("quarantined"):
        raise RuntimeError(f"tenants.{name}.init_from.recipe failed: {summary['tenants'][recipe_name]['quarantined']}")
    made = Path(summary["run_dir"])
    ranks.on_first(lambda: put_in_place(made, path))


def build_slots(
    config: NexusConfig,
    backbone: Backbone,
    payloads: dict[str, Path],
    admission: Admission,
    without_data: Collection[str] = (),
) -> tuple[dict[str, TenantSlot], dict[str, Any]]:
    """Every tenant's slot, in the order of the configuration, and the datasets opened for their statistics.

    ``without_data``: tenants whose dataset is not there, and that will not train."""
    slots, datasets = {}, {}
    for name, tenant in config.tenants.items():
        stats = None
        if name not in without_data:
            datasets[name], stats = open_data(name, tenant, config.data_dir)
        slots[name] = build_tenant(name, tenant, config.seed, backbone, admission, stats, payloads.get(name))
    return slots, datasets


def _banner(
    config: NexusConfig,
    runtime: Runtime,
    backbone: Backbone,
    slots: dict[str, TenantSlot],
    trainer: L.Trainer,
    plan: Plan,
    ckpt_path: Path | None,
) -> str:
    tenants = []
    for slot in slots.values():
        tenant = slot.spec.config
        memory = head_memory(slot.head, slot.ema is not None, slot.critic)
        source = tenant.dataset.repo_id if tenant.dataset is not None else ""
        if tenant.task == "rl" and tenant.environment is not None:
            simulator = tenant.environment.simulator
            source = f"{simulator['_target_'].rsplit('.', 1)[-1]} {simulator.get('task', '')}".strip()
        tenants.append(
            {
                "name": slot.name,
                "task": tenant.task,
                "head": split_head(tenant.head)[0].rsplit(".", 1)[-1],
                "trainable_parameters": memory.parameters,
                "memory": gigabytes(memory.total_bytes),
                "state_dim": slot.spec.schema.state_dim,
                "action_dim": slot.spec.schema.action_dim,
                "chunk": slot.spec.schema.chunk,
                "execute": slot.spec.schema.execute,
                "cameras": slot.spec.schema.cameras,
                "source": source,
                "privileged": slot.spec.schema.privileged,
            }
        )
    return banner(
        run_dir=str(runtime.run_dir),
        seed=config.seed,
        backbone={
            "name": type(backbone).__name__,
            "parameters": sum(p.numel() for p in backbone.parameters()),
            "fingerprint": runtime.fingerprint,
            "pretrained": bool(backbone.config.get("pretrained", False)),
        },
        device={
            "name": str(trainer.strategy.root_device),
            "precision": config.placement.precision,
            "reason": f"placement.accelerator={config.placement.accelerator}",
        },
        tenants=tenants,
        placement={
            **plan.summary(),
            **_cluster_summary(config),
            "torch threads": torch.get_num_threads(),
            "because": plan.reason,
        },
        queues={
            "inference batch": config.queues.inference.max_batch_size,
            "wait": f"{config.queues.inference.timeout_s * 1e3:g} ms",
            "training": f"{config.queues.training.max_gb_per_tenant:g} GB per tenant",
        },
        features={
            name: f"{'reused by training' if reuse.reuse else 'computed again for training'} ({reuse.reason})"
            for name, member in runtime.members.items()
            if (reuse := member.reuse) is not None
        },
        resumed_from=None if ckpt_path is None else str(ckpt_path),
    )


def _cluster_summary(config: NexusConfig) -> dict[str, str]:
    ray = config.placement.ray
    if ray is None:
        return {}
    replicas = f"{ray.inference_replicas} replicas there" if ray.inference_replicas else "answered here"
    return {"simulators on Ray at": f"{ray.address}, {replicas}"}


def _summary(runtime: Runtime, module: MultiTenantModule) -> dict[str, Any]:
    keys = ("success_rate", "n", "ci_low", "ci_high", "policy_version", "episode_return", "episode_length")
    tenants = {}
    for name, slot in runtime.slots.items():
        evaluations = [
            {k: e[k] for k in keys} | ({"by_task": e["by_task"]} if len(e.get("by_task", ())) > 1 else {})
            for e in slot.evaluations
        ]
        tenants[name] = {
            "task": slot.spec.config.task,
            "jobs_completed": slot.jobs_completed,
            "optimizer_steps": slot.optimizer_steps,
            "policy_version": slot.policy_version,
            "eval": evaluations[-1] if evaluations else None,
            "eval_first": evaluations[0] if len(evaluations) > 1 else None,
            "privileged": list(slot.spec.schema.privileged),
            "quarantined": slot.quarantined,
        }
    jobs: dict[str, int] = {}
    for states in runtime.scheduler.counts().values():
        for state, count in states.items():
            jobs[state] = jobs.get(state, 0) + count
    summary = {
        "tenants": tenants,
        "backbone_unchanged": all(
            backbone.compute_fingerprint() == runtime.fingerprint
            for backbone in dict.fromkeys((module.backbone, runtime.served.backbone))
        ),
        "jobs_by_state": jobs,
        "utilisation": runtime.events.utilisation(),
        "interrupted": runtime.schedule.interrupted,
        "backbone_rows": {
            "actor": module.encode_stats.rows,
            "actor_calls": module.encode_stats.calls,
            "demonstrations": {
                name: member.reader.entry.computed_rows if member.reader.entry is not None else 0
                for name, member in runtime.members.items()
                if member.reader is not None
            },
        },
        "backbone_passes_per_observation": {
            name: slot.passes.passes_per_observation for name, slot in runtime.slots.items()
        },
        "inference": runtime.server.summary(),
        "inference_replicas": runtime.replica_summary,
    }
    return summary
