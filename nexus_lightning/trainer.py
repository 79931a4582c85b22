"""``NexusTrainer`` (the Lightning Trainer that carries the loop) and :func:`train`, which ``train.py`` calls."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from hydra.utils import get_class, instantiate
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from nexus_lightning.backbone import Backbone
from nexus_lightning.checkpoint import read_payload, resolve_payload
from nexus_lightning.config import (
    ConfigError,
    NexusConfig,
    TenantConfig,
    TrainerConfig,
    dataset_root,
    digest_of,
    schema_of,
    split_head,
    tenant_from_dict,
    validate,
)
from nexus_lightning.demonstrations import record_demonstrations
from nexus_lightning.loop import LeaseStream, MultiTenantFitLoop
from nexus_lightning.memory import (
    Admission,
    estimate,
    estimate_table,
    free_bytes,
    gigabytes,
    head_memory,
    keep_freed_memory,
)
from nexus_lightning.module import MultiTenantModule
from nexus_lightning.monitoring.banner import banner
from nexus_lightning.monitoring.loggers import close_loggers, logger_problems, make_loggers
from nexus_lightning.monitoring.progress import NexusProgressBar
from nexus_lightning.monitoring.report import summary_table, write_report, write_summary
from nexus_lightning.placement.cluster import connected
from nexus_lightning.placement.control import Ranks
from nexus_lightning.placement.plan import Devices, Plan, common_devices, resolve
from nexus_lightning.placement.sharding import rank_problems, sharding_problems
from nexus_lightning.placement.strategies import TenantFSDP2, make_strategy
from nexus_lightning.producers.demonstrations import dataset_stats, open_dataset
from nexus_lightning.runtime import Runtime
from nexus_lightning.schema import TenantSchema
from nexus_lightning.tenant import TenantSlot, TenantSpec, build_slot

LAST_CHECKPOINT = Path("checkpoints") / "last.ckpt"


class LocalCheckpointIO(TorchCheckpointIO):
    """Plain files in place of an fsspec transaction.

    A transaction belongs to all threads of the process: the metrics row that an evaluation appends during a checkpoint
    would be taken into it, and the run would end with an AttributeError of fsspec.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike, storage_options: Any | None = None
    ) -> None:
        """Not atomic: :class:`TenantCheckpoint` renames what is complete."""
        if storage_options is not None:
            raise TypeError("storage_options: checkpoints are local files")
        torch.save(checkpoint, path)


class TenantCheckpoint(Callback):
    """Payloads first, then ``checkpoints/last.ckpt`` that names them: every n completed jobs and at the end.

    Lightning's own triggers count optimizer steps of all tenants together and can miss (see its ``global_step``).

    On a full disk a run of ``train.py`` ends with the error of :func:`~nexus_lightning.checkpoint.write_payload`, which
    names tenant, folder and what stays in force. Nothing that was stored is lost and nothing is left half written:
    ``last.ckpt`` is replaced as a whole, and the payloads that it names are kept until a later one is complete; with
    room again ``ckpt_path=last`` goes on from there. A resident run trains on and owes the payload
    (:attr:`Runtime.unsaved <nexus_lightning.runtime.Runtime.unsaved>`).
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.every_n_jobs = runtime.config.trainer.checkpoint_every_n_jobs
        self.saved_at = runtime.job_index

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self.runtime.job_index - self.saved_at >= self.every_n_jobs:
            self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Called on every rank; rank 0 writes. A resident run is resumed tenant by tenant, from the payloads alone."""
        self.runtime.save_payloads()
        self.saved_at = self.runtime.job_index
        if self.runtime.resident:
            return
        path = self.runtime.run_dir / LAST_CHECKPOINT
        temporary = path.with_suffix(".tmp")
        try:
            trainer.save_checkpoint(temporary)
            if self.runtime.ranks.first:
                with temporary.open("rb") as file:
                    os.fsync(file.fileno())
                temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


class _RuntimeLifecycle(Callback):
    """Starts producers once Lightning has restored a checkpoint; evaluates and saves once training has ended."""

    def __init__(self, runtime: Runtime, checkpoint: TenantCheckpoint) -> None:
        self.runtime, self.checkpoint = runtime, checkpoint
        self._put_back: Callable[[], None] = lambda: None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Lightning has installed its own SIGTERM handler by now, which would exit without saving.
        self._put_back = self.runtime.install_signal_handlers()
        self.checkpoint.saved_at = self.runtime.job_index
        self.runtime.start()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.runtime.finish()
        self.checkpoint.save(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.runtime.close()
        self._put_back()


class NexusTrainer(L.Trainer):
    """A Lightning Trainer whose batches are leased training jobs.

    Args:
        runtime: queues, producers and run folder of this run.
        loggers: Lightning loggers.
        plan: who lives where; None: resolved from the configuration.
        **kwargs: any other Trainer argument that has a meaning here (accelerator, devices, precision, callbacks ...).

    Example:
        >>> trainer = NexusTrainer(runtime, loggers)  # doctest: +SKIP
        >>> trainer.fit(module, ckpt_path=None)       # doctest: +SKIP
    """

    def __init__(self, runtime: Runtime, loggers: list[Logger], plan: Plan | None = None, **kwargs: Any) -> None:
        plan = resolve(runtime.config) if plan is None else plan
        config = runtime.config
        checkpoint = TenantCheckpoint(runtime)
        callbacks = [_RuntimeLifecycle(runtime, checkpoint), checkpoint, *kwargs.pop("callbacks", [])]
        show = config.trainer.enable_progress_bar and runtime.ranks.first
        if show:
            callbacks.append(NexusProgressBar(runtime.status))
        super().__init__(
            accelerator=config.placement.accelerator,
            strategy=make_strategy(plan, config.placement),
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
        self.fit_loop = MultiTenantFitLoop(self, runtime)
        runtime.on_metrics = lambda metrics, step: [log.log_metrics(metrics, step) for log in self.loggers]
        if config.trainer.max_time is not None:
            runtime.deadline_s = time.monotonic() + _seconds(config.trainer.max_time)

    def fit(self, model: MultiTenantModule, ckpt_path: str | os.PathLike | None = None) -> None:  # type: ignore[override]
        """Train until every target is met, ``max_jobs`` or ``max_time`` is reached, or a signal asks to stop.

        A resident run ends only when it is asked to.
        """
        model.runtime = self.runtime
        model.build_objectives()  # they know now which rows are this rank's
        if isinstance(self.strategy, TenantFSDP2):
            model.shard = self.strategy.shard
        self.runtime.actor_forward, self.runtime.actor = model.actor_forward, model
        path = None if ckpt_path is None else os.fspath(ckpt_path)
        super().fit(model, train_dataloaders=LeaseStream(self.runtime), ckpt_path=path, weights_only=True)


def _seconds(max_time: str) -> float:
    days, hours, minutes, seconds = (int(part) for part in max_time.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


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
    return logger_problems(config.logger)


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
    flat = [_flat(config) for config in configs]
    missing = object()
    lines = []
    for rank, other in enumerate(flat):
        for key in sorted({*flat[0], *other}):
            a, b = flat[0].get(key, missing), other.get(key, missing)
            if a != b:
                one, two = ("nothing" if v is missing else repr(v) for v in (a, b))
                fix = "start every rank with the same arguments"
                lines.append(f"{key}: rank 0 has {one}, rank {rank} has {two}; {fix}")
    return lines


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by their dotted keys."""
    flat = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


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
    run_dir, ckpt_path = ranks.on_first(lambda: prepare_run(config, link_latest))
    if config.placement.torch_threads is not None:
        torch.set_num_threads(config.placement.torch_threads)
    keep_freed_memory()
    if backbone is None:
        backbone = instantiate(config.backbone)
    assert isinstance(backbone, Backbone)
    plan = settle(config, backbone, devices, ranks)
    config = plan.settle(config)
    if ranks.first:
        (run_dir / "placement.json").write_text(json.dumps({**plan.to_dict(), "signature": plan.signature}, indent=2))
    payloads = starting_payloads(config, backbone, ranks)
    slots, datasets = build_slots(config, backbone, payloads)
    for slot in slots.values():  # built from seeds and files, alike on every rank; this makes sure of it
        ranks.spread(slot.tensors().values())
    runtime = Runtime(config, backbone, slots, run_dir, datasets, ranks)
    loggers = make_loggers(config.logger, run_dir, config.run_name or run_dir.name, asdict(config))
    exit_code = 1
    try:
        module = MultiTenantModule(backbone, slots)
        trainer = NexusTrainer(runtime, loggers, plan)
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


def prepare_run(config: NexusConfig, link_latest: bool) -> tuple[Path, Path | None]:
    """Make the run folder and record the demonstrations that are not there yet; see :func:`resolve_run`."""
    run_dir, ckpt_path = resolve_run(config)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / LAST_CHECKPOINT).parent.mkdir(exist_ok=True)
    if link_latest:
        _link_latest(Path(config.output_dir), run_dir)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(asdict(config), sort_keys=False))
    record_datasets(config)
    return run_dir, ckpt_path


def resolve_run(config: NexusConfig) -> tuple[Path, Path | None]:
    """The run folder and the checkpoint to continue from: a resumed run goes on in its own folder.

    A process that torchrun has started again (``--max-restarts``) continues by itself what it had saved.

    Raises:
        ConfigError: ``ckpt_path`` names nothing that exists.
    """
    output = Path(config.output_dir)
    if config.ckpt_path is None:
        # torchrun gives every rank the same id; "none" means that the launcher was given none
        launch = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        name = launch if launch != "none" else time.strftime("%Y-%m-%d_%H-%M-%S")
        name = f"{name}_{config.run_name}" if config.run_name else name
        run_dir, copy, earlier = output / name, 1, output / "latest" if launch == "none" else None
        while run_dir.exists():
            earlier = run_dir
            copy += 1
            run_dir = output / f"{name}_{copy}"
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
        if restarted and earlier is not None and (earlier / LAST_CHECKPOINT).is_file():
            return earlier.resolve(), (earlier / LAST_CHECKPOINT).resolve()
        return run_dir.resolve(), None
    given = output / "latest" if config.ckpt_path == "last" else Path(config.ckpt_path)
    checkpoint = given if given.suffix == ".ckpt" else given / LAST_CHECKPOINT
    if not checkpoint.is_file():
        raise ConfigError([f"ckpt_path={config.ckpt_path}: no checkpoint at {checkpoint}; leave it null for a new run"])
    checkpoint = checkpoint.resolve()
    return checkpoint.parent.parent, checkpoint


def _link_latest(output: Path, run_dir: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)  # a resumed run lies where it did
    link, temporary = output / "latest", output / f".latest-{os.getpid()}"
    temporary.symlink_to(os.path.relpath(run_dir, output))
    temporary.replace(link)


def record_datasets(config: NexusConfig) -> None:
    """Record the demonstrations that tenants (and starting recipes) need and that are not there yet."""
    for name, tenant in config.tenants.items():
        record_dataset(name, tenant, config.data_dir)


def record_dataset(name: str, tenant: TenantConfig, data_dir: str) -> None:
    """Record one tenant's dataset with its scripted expert unless it exists."""
    dataset = tenant.dataset
    if dataset is None or dataset.record is None:
        return
    root = dataset_root(tenant, data_dir)
    assert root is not None and tenant.environment is not None
    if (root / "meta" / "info.json").is_file():
        return
    print(f"recording {dataset.record.episodes} demonstrations for {name} in {root}", flush=True)
    record_demonstrations(
        simulator=tenant.environment.simulator,
        expert=dataset.record.expert,
        root=root,
        episodes=dataset.record.episodes,
        first_seed=dataset.record.first_seed,
        schema=schema_of(tenant.schema),
        workers=dataset.record.workers,
        repo_id=dataset.repo_id,
        inline=tenant.environment.inline,
        random_share=dataset.record.random_share,
        keep_failures=dataset.record.keep_failures,
    )


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
    if ranks.on_first((tenant_dir / "latest").is_file):
        return tenant_dir
    if ranks.first:
        print(f"training the starting payload of {name} from its recipe in {path}", flush=True)
    preparation = NexusConfig(
        tenants={recipe_name: recipe},
        backbone=config.backbone,
        queues=config.queues,
        placement=replace(config.placement, environments={}),  # of other tenants
        trainer=replace(TrainerConfig(), enable_progress_bar=config.trainer.enable_progress_bar),
        logger={"kind": "csv"},
        seed=config.seed,
        output_dir=str(path.parent),
        run_name=path.name,
        data_dir=config.data_dir,
    )
    summary = train(preparation, backbone, link_latest=False, ranks=ranks)
    if summary["tenants"][recipe_name].get("quarantined"):
        raise RuntimeError(f"tenants.{name}.init_from.recipe failed: {summary['tenants'][recipe_name]['quarantined']}")
    made = Path(summary["run_dir"])
    ranks.on_first(lambda: made.rename(path))
    return tenant_dir


def build_slots(
    config: NexusConfig, backbone: Backbone, payloads: dict[str, Path]
) -> tuple[dict[str, TenantSlot], dict[str, Any]]:
    """Every tenant's slot, in the order of the configuration, and the datasets opened for their statistics."""
    slots, datasets = {}, {}
    admission = Admission(free_bytes(backbone.device))
    for name, tenant in config.tenants.items():
        spec = TenantSpec.compile(name, tenant, config.seed)
        stats = (None, None)
        if tenant.dataset is not None:
            datasets[name] = open_dataset(tenant.dataset, spec.schema, dataset_root(tenant, config.data_dir))
            stats = dataset_stats(datasets[name], tenant.dataset, spec.schema)
        slot = build_slot(spec, backbone, *stats)
        admission.admit(name, head_memory(slot.head, slot.ema is not None, slot.critic).total_bytes)
        if name in payloads:
            load_start(slot, payloads[name], backbone)
        slots[name] = slot
    return slots, datasets


def load_start(slot: TenantSlot, path: Path, backbone: Backbone) -> None:
    """Head and normaliser of a payload become the slot's start; optimizer, counters and random state stay fresh.

    Raises:
        ValueError: the payload is of another schema or another backbone.
    """
    payload = read_payload(path)
    where = f"tenants.{slot.name}.init_from: payload {path}"
    changed = TenantSchema(**payload.manifest["schema"]).differences(slot.spec.schema)
    if changed:
        raise ValueError(f"{where} has another schema; it differs in {'; '.join(changed)}")
    if payload.manifest["backbone_fingerprint"] != backbone.fingerprint:
        raise ValueError(f"{where} was trained on another backbone; set the backbone it names in its manifest.json")
    slot.start_from(payload.tensors)


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
            name: f"{'reused by training' if plan.reuse else 'computed again for training'} ({plan.reason})"
            for name, plan in runtime.reuse.items()
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
        "interrupted": runtime.interrupted,
        "backbone_rows": {
            "actor": module.encode_stats.rows,
            "actor_calls": module.encode_stats.calls,
            "demonstrations": {
                name: reader.entry.computed_rows if reader.entry is not None else 0
                for name, reader in runtime.readers.items()
            },
        },
        "backbone_passes_per_observation": {
            name: counter.passes_per_observation for name, counter in runtime.passes.items()
        },
        "inference": runtime.server.summary(),
        "inference_replicas": runtime.replica_summary,
    }
    return summary
