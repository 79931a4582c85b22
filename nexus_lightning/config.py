"""Typed schema of ``conf/`` and whole-config validation before anything is built.

YAML holds values and their comments, this file holds names and types. ``register_configs`` puts the root dataclass into
Hydra's ConfigStore, so unknown keys and wrong types fail at composition with the full key. Where Hydra lets a key in
that no dataclass has (``+`` and ``++`` open any node), :func:`known_keys` finds it; :func:`validate` finds everything
else (missing values, impossible schemas, unknown head arguments, absent packages and datasets, camera mismatches). Both
list all of it in one :class:`ConfigError`.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import hashlib
import importlib.util
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.utils import get_class
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nexus_lightning.backbone import Backbone
from nexus_lightning.bounds import bounds_problems
from nexus_lightning.conventions import DatasetConventions
from nexus_lightning.converter import DatasetConverter
from nexus_lightning.dataset import (
    END_COLUMNS,
    REWARD_COLUMNS,
    STATISTICS,
    AugmentationConfig,
    DatasetConfig,
    RenameConfig,
    about,
    check_episodes,
    chosen_episodes,
    dataset_problems,
    lerobot_home,
    named_root,
)
from nexus_lightning.demonstrations import RECORD_FILE, describe_recording
from nexus_lightning.head import ActionHead, choose_kind
from nexus_lightning.objectives import algorithm_of, default_algorithm, shipped
from nexus_lightning.objectives.base import AlgorithmSettings, Objective, RolloutSettings, algorithm_class
from nexus_lightning.optim import make_optimizer
from nexus_lightning.queues.policy import Policy
from nexus_lightning.schema import TenantSchema
from nexus_lightning.simulator import Simulator, task_configs

TASKS = ("sft", "rl", "offline_rl")
#: Task of a tenant of the services that has had no workload yet: a schema and a head, nothing to train on.
IDLE = "idle"
#: Keys of a head's YAML that configure its optimizer and its feature; the rest are arguments of the head class.
OPTIMIZER_KEYS = (
    "lr",
    "value_lr",
    "weight_decay",
    "betas",
    "grad_clip_norm",
    "lr_schedule",
    "warmup_steps",
    "ema_decay",
    "kind",
)
#: Those of them that a tenant's own ``optimizer`` and ``lr_scheduler`` take over.
RATE_KEYS = {
    "optimizer": ("lr", "value_lr", "weight_decay", "betas"),
    "lr_scheduler": ("lr_schedule", "warmup_steps"),
}
#: Arguments of every head that are not its YAML's: the tenant's schema and the backbone say what they are.
HEAD_ARGUMENTS = ("feature_spec", "schema", "backbone")
LR_SCHEDULES = ("constant", "cosine")
FEATURE_REUSE = ("auto", "always", "never")
STRATEGIES = ("auto", "single", "ddp", "fsdp2")
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "64-true")
#: Packages of which Lightning's own loggers need one as soon as they are built.
LIGHTNING_NEEDS = {
    "TensorBoardLogger": ("tensorboard", "tensorboardX"),
    "MLFlowLogger": ("mlflow",),
    "CometLogger": ("comet_ml",),
}
TENANT_NAME = re.compile(r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one line each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("the configuration cannot run:\n" + "\n".join(f"  - {p}" for p in problems))

    def __reduce__(self):  # rank 0 tells it to the others
        return ConfigError, (self.problems,)


@dataclass
class SchemaConfig:
    """See :class:`nexus_lightning.schema.TenantSchema` for units and meaning."""

    state_dim: int = MISSING
    action_dim: int = MISSING
    chunk: int = MISSING
    execute: int = MISSING
    cameras: list[str] = field(default_factory=list)
    image_size: int = 128
    image_fit: str = "pad"
    image_orientation: str = "upright"
    control_hz: float = 20.0
    action_convention: str = "delta"
    rotation: str = "axis_angle"
    rotation_index: int = 3
    gripper: str = "open_positive"
    gripper_index: int = -1
    prompt: str = "{instruction}"
    state_normalization: str = "mean_std"
    action_normalization: str = "identity"
    privileged: list[str] = field(default_factory=list)
    state_names: list[str] = field(default_factory=list)
    action_names: list[str] = field(default_factory=list)


@dataclass
class EnvironmentConfig:
    simulator: dict[str, Any] = MISSING  # `_target_` of a Simulator and its arguments
    num_envs: int = 2  # simulators for rollouts, one process each
    inline: bool = False  # run light simulators inside this process
    tasks: list[Any] = field(default_factory=list)  # several tasks: values of the simulator's task_id, task ...
    batched: Any = "auto"  # all in one process on the GPU | auto: if simulator and machine can | true | false
    max_resets: int | None = None  # start a process anew after so many episodes; null: never
    max_memory_gb: float | None = None  # start a process anew when it has grown beyond this; null: never


@dataclass
class FeaturesConfig:
    """What becomes of a tenant's backbone features (the backbone is frozen: they never go stale).

    rl: they travel with the rollout; sft: they come from the feature store.
    """

    reuse: str = "auto"  # auto: rl when they fit the queue budget, sft always | always | never: encoded again
    warm_up: bool = True  # of a dataset: encode all frames before the first job; false: when they are first needed


@dataclass
class EvalConfig:
    every_n_jobs: int | None = None  # null: only at the start and the end of the run
    episodes: int = 20  # of every task; 0: no evaluation
    first_seed: int = 0  # seeds first_seed ... first_seed + episodes - 1, each (task, seed) counted once
    num_envs: int = 1  # simulators of an SFT tenant's evaluation; an RL tenant evaluates on its rollout simulators
    at_start: bool = True
    video: bool = True  # the last evaluation's first episode as <run>/videos/<tenant>.mp4


@dataclass
class InitFromConfig:
    """Start from a payload; made first from `recipe` (a whole tenant) when it does not exist."""

    path: str | None = None  # payload or tenant folder; null: <data_dir>/payloads/... (needs recipe)
    recipe: Any = None

    @property
    def given(self) -> bool:
        return self.path is not None or self.recipe is not None


@dataclass
class TenantConfig:
    task: str = MISSING
    schema: SchemaConfig = field(default_factory=SchemaConfig)
    head: Any = MISSING  # `_target_`, its arguments and the optimizer keys; or the name of a file in conf/head
    optimizer: dict[str, Any] | None = None  # `_target_`, its arguments, value_lr; null: AdamW by the head's keys
    lr_scheduler: dict[str, Any] | None = None  # `_target_` and its arguments; null: by the head's keys
    dataset: DatasetConfig | None = None
    environment: EnvironmentConfig | None = None
    algorithm: Any = None  # settings of an objectives.base.Objective (`_target_`); null: sft
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    init_from: InitFromConfig = field(default_factory=InitFromConfig)
    target_jobs: int | None = None  # the tenant is done after this many completed jobs
    priority: int = 0  # higher is leased first
    weight: float = 1.0  # fair share between tenants of one priority
    max_in_flight: int = 2  # admitted jobs that are not finished yet
    max_policy_staleness: int | None = None  # RL: versions; older rollouts are dropped
    seed: int | None = None  # null: derived from the run's seed and the tenant's name


@dataclass
class TrainingQueueConfig:
    max_gb_per_tenant: float = 2.0  # partitions of one tenant; producers wait beyond it
    lease_deadline_s: float = 600.0  # a leased job that is not finished by then goes back
    journal: bool = False  # keep every state change of every job in <run folder>/jobs.sqlite, safe from kill -9
    policy: dict[str, Any] = field(  # `_target_` of a Policy: whose job goes first, how many are in flight
        default_factory=lambda: {"_target_": "nexus_lightning.queues.policy.FairShare"}
    )


@dataclass
class InferenceQueueConfig:
    max_batch_size: int = 64  # requests per batch at most (B)
    timeout_s: float = 0.005  # how long a batch waits for a session that may come back (T)
    static_batch_size: int | None = None  # GPU: rows per backbone pass, replayed as CUDA graphs; null: as they come


@dataclass
class FeatureStoreConfig:
    """Where features of demonstrations are kept, for all tenants together."""

    store: str = "memory"  # memory | disk (memory-mapped, survives the run)
    folder: str | None = None  # of the disk store; null: <data_dir>/features
    budget_gb: float = 4.0  # beyond it features are computed again


@dataclass
class QueuesConfig:
    training: TrainingQueueConfig = field(default_factory=TrainingQueueConfig)
    inference: InferenceQueueConfig = field(default_factory=InferenceQueueConfig)


@dataclass
class BackbonePlacement:
    """Where the frozen weights live. Ranks = ``replicate * shard``; a null degree follows from the other one."""

    replicate: int | None = None  # copies of the backbone over all ranks
    shard: int | None = None  # ranks that hold one copy together (FSDP2); 1: whole on every rank
    reshard_after_forward: bool = True  # give gathered weights back after each unit's forward
    param_dtype: str | None = None  # fp32 | bf16: dtype of the gathered weights; null: as they are stored
    cpu_offload: bool = False  # keep the shards in host memory


@dataclass
class HeadsPlacement:
    shard: int = 1  # 1: every head whole on every rank; more: over the ranks that hold one backbone copy


@dataclass
class InferencePlacement:
    device: str = "training"  # training: same device, same weights | a device such as cuda:1: a whole copy there


@dataclass
class RayConfig:
    """Simulators, and with replicas also rollouts and inference, on a Ray cluster; see placement/cluster.py."""

    address: str = MISSING  # host:port of the cluster's head | auto: what the variable RAY_ADDRESS names
    num_cpus_per_simulator: float = 1.0  # of every simulator process; what is not free is waited for
    num_gpus_per_simulator: float = 0.0
    max_restarts: int = 2  # of one rollout or evaluation that loses a simulator or a machine; then: quarantine
    inference_replicas: int = 0  # of each rank: backbone copies that answer its rollouts; 0: it does so itself
    num_cpus_per_replica: float = 1.0
    num_gpus_per_replica: float = 0.0
    num_cpus_per_collector: float = 1.0  # of the process that collects a tenant's rollouts, with replicas


@dataclass
class PlacementConfig:
    """Who lives where; :func:`nexus_lightning.placement.plan.resolve` turns it into a plan for the ranks there are.

    One rank is one process with one training device; how many there are is the launcher's business (torchrun).
    """

    strategy: str = "auto"  # auto | single | ddp | fsdp2
    accelerator: str = "auto"
    precision: str = "32-true"
    torch_threads: int | None = None  # intra-op threads of each process; null: torch's default
    backbone: BackbonePlacement = field(default_factory=BackbonePlacement)
    heads: HeadsPlacement = field(default_factory=HeadsPlacement)
    inference: InferencePlacement = field(default_factory=InferencePlacement)
    environments: dict[str, list[int]] = field(
        default_factory=dict
    )  # tenant -> ranks of its simulators; else as many as fit
    max_simulators_per_rank: int | None = None  # more are refused
    ray: RayConfig | None = None  # null: simulators are processes of this machine


@dataclass
class TrainerConfig:
    max_jobs: int | None = None  # completed training jobs of all tenants
    max_time: str | None = None  # DD:HH:MM:SS, as Lightning's
    jobs_per_round: int = 10  # one Lightning "epoch"
    checkpoint_every_n_jobs: int = 20
    keep_payloads: int = 2  # versions kept per tenant
    fast_dev_run: bool = False  # one job and one evaluation episode per tenant
    dry_run: bool = False  # validate, print how much memory it would need, stop: no weights, no data
    deterministic: bool = False
    enable_progress_bar: bool = True


@dataclass
class NexusConfig:
    tenants: dict[str, TenantConfig] = field(default_factory=dict)
    backbone: Any = MISSING
    queues: QueuesConfig = field(default_factory=QueuesConfig)
    feature_store: FeatureStoreConfig = field(default_factory=FeatureStoreConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: dict[str, Any] = field(default_factory=dict)  # name -> `_target_` of a Lightning logger and its arguments
    callbacks: dict[str, Any] = field(default_factory=dict)  # name -> `_target_` of a Lightning callback, likewise
    profiler: dict[str, Any] = field(default_factory=dict)  # `_target_` of a Lightning profiler; empty: none
    seed: int = 0
    ckpt_path: str | None = None  # `last`, a run folder, or a .ckpt file
    run_name: str | None = None
    output_dir: str = "outputs"
    data_dir: str = "data"  # recorded demonstrations and starting payloads


def register_configs() -> None:
    """Store the root schema for Hydra (idempotent)."""
    ConfigStore.instance().store(name="nexus_config", node=NexusConfig)


#: What OmegaConf raises at an override of a part of null.
NULL_ERRORS = (AttributeError, AssertionError)
#: Where :func:`optional_overrides` puts what Hydra cannot set in a node that is null.
OPTIONAL = "_optional_"


def hydra_overrides(overrides: list[str]) -> list[str]:
    """Overrides as a user writes them -> as Hydra takes them.

    ``tenants.<t>.head=<name>`` replaces a tenant's whole head; ``tenants.<t>.head.<key>=...`` adjusts the new one.
    Hydra would merge the named head into the tenant's own, or refuse the second override; so both go under a marker
    that :func:`to_config` resolves. The same holds of ``tenants.<t>.algorithm=<name>`` (or ``.algorithm.name=<name>``),
    a file of the group ``algorithm`` anywhere on Hydra's search path. Keys of a mapping (``dataset.rename.cameras``,
    ``placement.environments`` ...) may be new ones; Hydra asks for a plus before those.

    Example:
        >>> hydra_overrides(["tenants.a.head=mlp", "tenants.a.head.lr=0.1", "tenants.b.head.lr=0.2"])
        ['++tenants.a.head._new_.name=mlp', '++tenants.a.head._new_.lr=0.1', 'tenants.b.head.lr=0.2']
        >>> hydra_overrides(["tenants.a.algorithm=grpo", "tenants.a.algorithm.epochs=1"])
        ['+algorithm@tenants.a.algorithm._new_=grpo', '++tenants.a.algorithm._new_.epochs=1']
        >>> hydra_overrides(["tenants.a.dataset.rename.cameras.top=observation.image", "seed=1"])
        ['++tenants.a.dataset.rename.cameras.top=observation.image', 'seed=1']
    """
    by_name = re.compile(r"\+{0,2}tenants\.([^.=]+)\.head=([\w,]+)")
    named = {match[1] for match in map(by_name.fullmatch, overrides) if match and match[2] != "null"}
    out = []
    for override in overrides:
        match, key = by_name.fullmatch(override), re.fullmatch(r"\+{0,2}tenants\.([^.=]+)\.head\.(.+)", override)
        if match and match[1] in named:
            out.append(f"++tenants.{match[1]}.head._new_.name={match[2]}")
        elif key and key[1] in named:
            out.append(f"++tenants.{key[1]}.head._new_.{key[2]}")
        else:
            out.append(f"++{override}" if _in_mapping(override) else override)
    return _algorithm_overrides(out)


def _algorithm_overrides(overrides: list[str]) -> list[str]:
    by_name = re.compile(r"\+{0,2}tenants\.([^.=]+)\.algorithm(?:\.name)?=([\w,]+)")
    named = {match[1] for match in map(by_name.fullmatch, overrides) if match and match[2] != "null"}
    out = []
    for override in overrides:
        match, key = by_name.fullmatch(override), re.fullmatch(r"\+{0,2}tenants\.([^.=]+)\.algorithm\.(.+)", override)
        if match and match[1] in named:
            out.append(f"+algorithm@tenants.{match[1]}.algorithm._new_={match[2]}")
        elif key and key[1] in named:
            out.append(f"++tenants.{key[1]}.algorithm._new_.{key[2]}")
        else:
            out.append(override)
    return out


def _in_mapping(override: str) -> bool:
    """Whether it sets a mapping, or a key in one, whose keys the schema does not know."""
    key, equals, value = override.partition("=")
    node: type | None = NexusConfig
    parts = key.split(".") if equals else []
    while parts and node is not None:
        each = _hints(node).get(parts.pop(0))
        if each is None:
            return False
        node, by_name = each
        if by_name and node is None:
            return bool(parts) or value.lstrip().startswith("{")  # else a group's option is chosen: logger=csv
        if by_name and parts:  # tenants: which there are, the config groups say
            parts.pop(0)
    return False


def optional_overrides(conf_dir: Path, overrides: Sequence[str], more: Sequence[Path] = ()) -> list[str]:
    """Overrides of what is null by default (``tenants.a.dataset.augmentation={views: 3}``, ``placement.ray.address``)
    where :func:`to_config` finds them: Hydra sets nothing inside null. The others as they are.

    Raises:
        HydraException: the config groups cannot be composed.
    """
    parsed = OverridesParser.create().parse_overrides([*overrides])
    values, settings = _compose_groups(conf_dir, parsed, more)
    out = [each.input_line or "" for each in parsed]
    for place, each in enumerate(parsed):
        if each in settings and not each.is_delete() and _through_null(values, each):
            out[place] = f"++{OPTIONAL}.{out[place].lstrip('+')}"
    return out


def _through_null(values: Any, override: Override) -> bool:
    hints: type | None = NexusConfig
    *parents, last = override.key_or_group.split(".")
    whole = not override.is_sweep_override() and not isinstance(override.value(), dict)
    for part in parents if whole else [*parents, last]:
        if not isinstance(values, Mapping) or hints is None:
            return False
        if part in _hints(hints):
            hints, by_name = _hints(hints)[part]
            values = values.get(part)
            if by_name and hints is not None:
                continue
        else:  # the name of a tenant
            values = values.get(part)
        if values is None:
            return hints is not None
    return False


def config_dirs(arguments: Sequence[str]) -> tuple[list[str], list[Path]]:
    """A command line without ``--config-dir mine``, and the folders beside ``conf/`` that it names so.

    Raises:
        ConfigError: there is no such folder.

    Example:
        >>> config_dirs(["seed=1", "--config-dir", "/", "+tenants=[mine]"])
        (['seed=1', '+tenants=[mine]'], [PosixPath('/')])
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", action="append", default=[], type=Path)  # as Hydra's own
    known, rest = parser.parse_known_args([*arguments])
    if missing := [each for each in known.config_dir if not each.is_dir()]:
        raise ConfigError([f"--config-dir={each}: there is no such folder" for each in missing])
    return rest, [each.resolve() for each in known.config_dir]


def _search_path(folders: Sequence[Path]) -> list[str]:
    """The override that lets Hydra look into these folders, too."""
    return [f"hydra.searchpath={json.dumps([f'file://{folder}' for folder in folders])}"] if folders else []


def compose_config(conf_dir: Path, overrides: Sequence[str]) -> NexusConfig:
    """What ``train.py`` makes of this command line, for programs that are not Hydra applications themselves.

    Args:
        conf_dir: ``conf/``.
        overrides: and perhaps ``--config-dir mine``, a folder with more files for its groups.

    Raises:
        HydraException: an override does not fit.
        ConfigError: see :func:`config_dirs` and :func:`to_config`.
    """
    register_configs()
    words, more = config_dirs(overrides)
    words = hydra_overrides(words)

    def composed(overrides: Sequence[str]) -> DictConfig:
        with initialize_config_dir(str(conf_dir), version_base="1.3"):
            return compose("config", overrides=[*_search_path(more), *overrides])

    try:
        cfg = composed(words)
    except NULL_ERRORS:
        cfg = composed(optional_overrides(conf_dir, words, more))
    return to_config(cfg, [conf_dir, *more], words)


def composition_error(error: Exception, conf_dir: Path, overrides: Sequence[str]) -> ConfigError:
    """What Hydra says about a command line that it does not compose, in our words: everything that is wrong with it.

    Arguments are those of :func:`compose_config`."""
    if isinstance(error, ConfigError):
        return error
    try:
        folders = [conf_dir, *config_dirs(overrides)[1]]
    except ConfigError as missing:
        return missing
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, name = error.missing_cfg_file.rpartition("/")
        choices = error.options or _choices(folders, group)
        return ConfigError([_unknown_choice(group or "config", name, choices)])
    try:
        if problems := override_problems(conf_dir, overrides):
            return ConfigError(problems)
    except (HydraException, OmegaConfBaseException):
        pass  # it cannot be read without Hydra either: its own words
    words = [
        # the first line may only say where: "In 'experiment/mine': ConfigKeyError raised while composing config:"
        " ".join(str(part).splitlines()[: 2 if str(part).splitlines()[0].endswith(":") else 1]).rstrip(":")
        for part in (error, error.__cause__)
        if part is not None and str(part)
    ]
    return ConfigError([": ".join(words) or repr(error)])


def _choices(folders: Sequence[Path], group: str) -> list[str]:
    return sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})


def _unknown_choice(key: str, name: str, choices: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, choices)
    hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
    return f"{key}={name}: no such {key.rsplit('.', 1)[-1]}; {hint}choose one of {', '.join(choices)}"


def override_problems(conf_dir: Path, overrides: Sequence[str]) -> list[str]:
    """What is wrong with a command line that Hydra does not compose: all of it, where Hydra ends at the first mistake.

    Hydra chooses the files of the config groups and merges them without the schema; that, and the values of the
    overrides, come after it.

    Raises:
        HydraException: the groups themselves, or the words of an override, cannot be read.
    """
    overrides, more = config_dirs(overrides)
    overrides = hydra_overrides(overrides)
    parsed = OverridesParser.create().parse_overrides(overrides)
    if any(each.is_sweep_override() for each in parsed):
        return []  # of which trial?
    schema = OmegaConf.structured(NexusConfig)
    composed, settings = _compose_groups(conf_dir, parsed, more)
    known, problems = known_keys(composed, NexusConfig)
    try:
        values = OmegaConf.to_container(OmegaConf.merge(schema, known))
        problems += [problem for each in settings if (problem := _put(values, each.key_or_group, each.value()))]
        known, unknown = known_keys(values, NexusConfig)
        problems += unknown
        cfg = OmegaConf.merge(schema, known)
        assert isinstance(cfg, DictConfig)
        validate(to_config(cfg, [conf_dir, *more], overrides))
    except ConfigError as error:
        problems += error.problems
    except OmegaConfBaseException as error:
        problems.append(f"{error.full_key}: {str(error).splitlines()[0]}")
    return problems


def _compose_groups(
    conf_dir: Path, overrides: Sequence[Override], more: Sequence[Path] = ()
) -> tuple[Any, list[Override]]:
    """What the config groups alone give, merged without the schema, and the overrides that set values in it.

    ``more``: folders beside ``conf_dir``."""
    plain = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(NexusConfig)))
    ConfigStore.instance().store(name="nexus_config", node=plain)
    try:
        with initialize_config_dir(str(conf_dir), version_base="1.3"):
            options = GlobalHydra.instance().config_loader().get_group_options
            settings = [
                each
                for each in overrides
                if not (each.is_delete() or each.package or each.key_or_group.startswith("hydra."))
                and not options(each.key_or_group)
                and not any((folder / each.key_or_group).is_dir() for folder in more)
            ]
            chosen = [each.input_line or "" for each in overrides if each not in settings]
            cfg = compose("config", overrides=[*_search_path(more), *chosen])
    finally:
        register_configs()
    return OmegaConf.to_container(cfg), settings


def _put(values: Any, key: str, value: Any) -> str | None:
    """Set a dotted key, known or not; returns why that cannot be done."""
    *parents, last = key.split(".")
    if parents[:1] == ["tenants"] and (tenant := [*parents, last][1]) not in values["tenants"]:
        return no_such_key("tenants", f"tenants.{tenant}", {} if parents[1:] else value, list(values["tenants"]))
    node = values
    for depth, parent in enumerate(parents):
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            return f"{key}={value!r}: {'.'.join(parents[: depth + 1])} is {node!r}"
    node[last] = value
    return None


def to_config(cfg: DictConfig, folders: Sequence[Path] = (), overrides: Sequence[str] = ()) -> NexusConfig:
    """Composed Hydra config -> typed objects.

    A head given by name (``tenants.libero.head=flow_matching``, see :func:`hydra_overrides`; in an experiment ``head:
    {_new_: {name: flow_matching}}``) is read from ``<folder>/head/<name>.yaml`` in place of the tenant's own. Its keys
    come from there, then from ``_new_``, then from ``overrides``.

    Args:
        cfg: composed.
        folders: that Hydra has searched: ``conf/``, which is the default, and those of ``--config-dir``.
        overrides: that ``cfg`` was composed with, a sweeper's among them: what they set of a head is meant for the one
            that the tenant ends up with.

    Raises:
        ConfigError: a key that nothing reads, a ``???`` value that was not given, or a head file that does not exist;
            all listed, and with unknown keys everything that :func:`validate` finds in the rest.
    """
    cfg, folders = cfg.copy(), folders or [Path("conf")]
    values = OmegaConf.to_container(cfg)
    assert isinstance(values, dict)
    optional, problems = known_keys(values.pop(OPTIONAL, {}), NexusConfig)
    problems += known_keys(values, NexusConfig)[1]
    if OPTIONAL in cfg:
        with open_dict(cfg):
            del cfg[OPTIONAL]
        try:
            cfg = cast(DictConfig, OmegaConf.merge(cfg, optional))
        except OmegaConfBaseException as error:
            raise ConfigError([*problems, f"{error.full_key}: {str(error).splitlines()[0]}"]) from error
    unknown = len(problems)
    matches = [re.fullmatch(r"\+{0,2}tenants\.([^.=]+)\.head\.(\w+)(?:\..+)?=.*", o, re.DOTALL) for o in overrides]
    asked = {(match[1], match[2]) for match in matches if match and match[2] != "_new_"}
    for name in cfg.tenants:
        tenant = cfg.tenants[name]
        algorithm = tenant.get("algorithm")
        if OmegaConf.is_dict(algorithm) and ("_new_" in algorithm or "name" in algorithm):
            given = OmegaConf.to_container(algorithm)
            tenant.algorithm = replaced_algorithm(given, f"tenants.{name}.algorithm", overrides)  # type: ignore[arg-type]
        if OmegaConf.is_missing(tenant, "head"):
            continue
        head = tenant.head
        new = {"name": head} if isinstance(head, str) else OmegaConf.to_container(head).pop("_new_", None)  # type: ignore
        if new is None:
            continue
        wanted = new.pop("name")
        file = next((f for folder in folders if (f := folder / "head" / f"{wanted}.yaml").is_file()), None)
        if file is not None:
            given = {} if isinstance(head, str) else {k: head[k] for k in head if (name, k) in asked}
            tenant.head = {**OmegaConf.to_container(OmegaConf.load(file)), **new, **given}  # type: ignore[dict-item]
        else:
            problems.append(_unknown_choice(f"tenants.{name}.head", wanted, _choices(folders, "head")))
    for key in sorted(OmegaConf.missing_keys(cfg)):
        problems.append(f"{key}: a value is required")
    if len(problems) > unknown:
        raise ConfigError(problems)
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, NexusConfig)
    for name, tenant in config.tenants.items():
        for override in overrides:
            problems += _typed_rate_problems(override, name, tenant)
        _hand_over_rates(tenant)
        try:
            tenant.algorithm = typed_algorithm(tenant.algorithm, tenant.task, f"tenants.{name}.algorithm")
        except ConfigError as error:
            problems += error.problems
    if problems:
        try:
            validate(config)
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
        raise ConfigError(problems)
    return config


def _typed_rate_problems(override: str, name: str, tenant: TenantConfig) -> list[str]:
    """An override of a key of the tenant's head that its own optimizer or schedule has taken over."""
    pattern = rf"\+{{0,2}}tenants\.{re.escape(name)}\.head\.(?:_new_\.)?(\w+)=(.*)"
    if (match := re.fullmatch(pattern, override, re.DOTALL)) is None:
        return []
    key, value = match[1], match[2]
    for part, keys in RATE_KEYS.items():
        if key in keys and getattr(tenant, part) is not None:
            by_file = f"choose another file by +lr_scheduler@tenants.{name}.lr_scheduler="
            fix = by_file if key == "lr_schedule" else f"write tenants.{name}.{part}.{key}={value}"
            return [f"tenants.{name}.head.{key}={value}: tenants.{name}.{part} says it; {fix}"]
    return []


def replaced_algorithm(values: dict[str, Any], key: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """An algorithm with another one in its place: under ``_new_`` (see :func:`head_overrides`), or a ``name``, which is
    that of a file in ``nexus_lightning/objectives``.

    Of the former one's settings those that differ from its defaults go along, as far as the new one has them; what
    ``overrides`` set of the new one comes first.

    Raises:
        ConfigError: there is no such algorithm.
    """
    former = {name: value for name, value in values.items() if name not in ("_new_", "name")}
    new = values.get("_new_")
    if new is None:
        if values["name"] not in shipped():
            raise ConfigError([_unknown_choice(f"{key}.name", values["name"], list(shipped()))])
        new = {"_target_": shipped()[values["name"]].configure()._target_}
        if former.get("_target_", new["_target_"]) == new["_target_"]:
            return {**{name: value for name, value in former.items() if value is not None}, **new}
    valid, defaults = _settings(new["_target_"], key), {}
    if "_target_" in former:
        defaults = _settings(former.pop("_target_"), key)
    asked = [o.partition("=")[0].rpartition("._new_.")[2] for o in overrides if f"{key}._new_." in o]
    kept = {
        name: value
        for name, value in former.items()
        if name not in asked and (name not in defaults or (name in valid and value != defaults[name]))
    }
    return {**new, **kept}


def _settings(target: Any, key: str) -> dict[str, Any]:
    """Settings of an algorithm and their defaults."""
    return asdict(_algorithm(target, key).configure())


def _algorithm(target: Any, key: str) -> type[Objective]:
    """The class that ``_target_`` names.

    Raises:
        ConfigError: it cannot be imported, or is no algorithm.
    """
    try:
        cls = get_class(str(target))
    except Exception as error:  # Hydra wraps every import problem; the text names the module that failed
        raise ConfigError([f"{key}._target_={target}: cannot be imported ({error})"]) from error
    if not issubclass(cls, Objective) or not cls.task:
        needed = "subclass nexus_lightning.objectives.base.Objective, and name its task"
        raise ConfigError([f"{key}._target_={target}: is no algorithm; {needed}"])
    return cls


def typed_algorithm(values: Any, task: str, key: str) -> Any:
    """A tenant's ``algorithm`` -> settings of the class that it names; without any the default of sft.

    Raises:
        ConfigError: it names no algorithm, keys that the algorithm does not have (all), a value of another type.
    """
    if isinstance(values, AlgorithmSettings):
        return values
    default = default_algorithm(task)
    if values is None:
        return None if task != "sft" or default is None else default.configure()
    if not isinstance(values, Mapping):
        raise ConfigError([f"{key}={values!r}: must be a mapping with `_target_`, see conf/algorithm"])
    if "name" in values:
        values = replaced_algorithm(dict(values), key)
    if "_target_" not in values:
        if default is None:
            raise ConfigError([f"{key}: must have a `_target_` (see conf/algorithm), or the `name` of a shipped one"])
        values = {"_target_": default.configure()._target_, **values}
    return object_of(_algorithm(values["_target_"], key).settings_class, values, key)


def saved_tenant(values: Mapping[str, Any], key: str) -> TenantConfig:
    """The tenant of a payload's manifest, where an older version has one flat class for all algorithms: settings that
    the tenant's algorithm does not have are left out.

    Raises:
        ConfigError: see :func:`object_of`.
    """
    old = values.get("algorithm")
    if isinstance(old, Mapping) and "_target_" not in old and old.get("name") in shipped():
        cls = shipped()[old["name"]]
        valid = _settings(target := cls.configure()._target_, key)
        kept = {name: value for name, value in old.items() if name in valid and value is not None}
        values = {**values, "algorithm": {**kept, "_target_": target}}
    return tenant_from_dict(values, key)


def no_such_key(owner: str, key: str, value: Any, valid: Sequence[str]) -> str:
    """The line about a key that nothing reads: its whole name, its value, the nearest keys that there are, and all."""
    nearest = difflib.get_close_matches(key.rsplit(".", 1)[-1], valid, cutoff=0.5)
    hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
    return f"{key}={value!r}: {owner} has no such key; {hint}valid keys: {', '.join(valid)}"


def known_keys(values: Any, cls: type, key: str = "") -> tuple[dict[str, Any], list[str]]:
    """What of a plain mapping the dataclass ``cls`` has, and a line for every other key, at any depth.

    The schema is closed here, wherever a key came from: ``+`` and ``++`` add to structured nodes, whose conversion to
    dataclasses then keeps the key as an attribute that nothing reads. Values of type ``Any`` (heads, backbone,
    simulator, logger, recipe) are closed by :func:`validate`, which knows what their keys mean.
    """
    known, problems, hints = {}, [], _hints(cls)
    for name, value in values.items():
        where = f"{key}.{name}" if key else str(name)
        if name not in hints:
            problems.append(no_such_key(key or "the configuration", where, value, list(hints)))
            continue
        inner, by_name = hints[name]
        if inner is not None and isinstance(value, Mapping):
            parts = {f"{where}.{n}": (n, part) for n, part in value.items()} if by_name else {where: (name, value)}
            found = {n: known_keys(part, inner, path) for path, (n, part) in parts.items() if isinstance(part, Mapping)}
            problems += [problem for _, lines in found.values() for problem in lines]
            kept = {n: part for n, (part, _) in found.items()}
            value = {**value, **kept} if by_name else kept[name]
        known[name] = value
    return known, problems


@functools.cache
def _hints(cls: type) -> dict[str, tuple[type | None, bool]]:
    """Per field the dataclass that it holds, if any, and whether as the values of a dict."""
    types, out = get_type_hints(cls), {}
    for each in fields(cls):
        hint = types[each.name]
        by_name = get_origin(hint) is dict
        choices = get_args(hint)[1:] if by_name else get_args(hint) or (hint,)
        out[each.name] = next((choice for choice in choices if is_dataclass(choice)), None), by_name
    return out


def object_of(cls: type, values: Any, key: str) -> Any:
    """A plain mapping -> an object of the dataclass ``cls``.

    Raises:
        ConfigError: unknown keys (all of them), a value of another type, missing values (all); every key after ``key``.
    """
    if not isinstance(values, Mapping):
        raise ConfigError([f"{key}={values!r}: must be a mapping"])
    if problems := known_keys(values, cls, key)[1]:
        raise ConfigError(problems)
    try:
        cfg = OmegaConf.merge(OmegaConf.structured(cls), OmegaConf.create(dict(values)))
        if missing := sorted(OmegaConf.missing_keys(cfg)):
            raise ConfigError([f"{key}.{m}: a value is required" for m in missing])
        return OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        where = f"{key}.{error.full_key}" if error.full_key else key
        raise ConfigError([f"{where}: {str(error).splitlines()[0]}"]) from error


def tenant_from_dict(values: Any, key: str) -> TenantConfig:
    """A plain mapping (an ``init_from.recipe``) -> TenantConfig, with the same checks as the tenants of the run.

    Raises:
        ConfigError: see :func:`object_of`.
    """
    data = values.get("dataset") if isinstance(values, Mapping) else None
    if isinstance(data, Mapping) and "camera_keys" in data:  # payloads from before there was `rename`
        data = dict(data)
        data["rename"] = {"cameras": data.pop("camera_keys")}
        values = {**values, "dataset": data}
    config, algorithm, problems = None, None, []
    try:
        config = object_of(TenantConfig, values, key)
    except ConfigError as error:
        problems += error.problems
    if isinstance(values, Mapping) and "task" in values:
        try:
            algorithm = typed_algorithm(values.get("algorithm"), str(values["task"]), f"{key}.algorithm")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    assert config is not None
    config.algorithm = algorithm
    _hand_over_rates(config)
    return config


def schema_of(config: SchemaConfig) -> TenantSchema:
    return TenantSchema(**asdict(config))  # type: ignore[arg-type]


def split_head(head: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Head YAML -> (``_target_``, class arguments, optimizer settings)."""
    arguments = {k: v for k, v in head.items() if k != "_target_" and k not in OPTIMIZER_KEYS}
    return head["_target_"], arguments, {k: head[k] for k in OPTIMIZER_KEYS if k in head}


def optimizer_of(tenant: TenantConfig) -> dict[str, Any]:
    """``_target_`` of a tenant's optimizer and its arguments, with ``lr`` and perhaps ``value_lr`` of the critic."""
    if tenant.optimizer is not None:
        return tenant.optimizer
    settings = split_head(tenant.head)[2]
    return {
        "_target_": "nexus_lightning.optim.TenantAdamW",
        "lr": float(settings["lr"]),
        "value_lr": float(settings.get("value_lr") or settings["lr"]),
        "betas": tuple(settings.get("betas", (0.9, 0.999))),
        "weight_decay": float(settings.get("weight_decay", 0.0)),
        "fused": True,
    }


def lr_scheduler_of(tenant: TenantConfig) -> dict[str, Any]:
    """``_target_`` of a tenant's learning-rate schedule and its arguments, with ``total_steps`` if it takes them."""
    node = tenant.lr_scheduler
    if node is None:
        settings = split_head(tenant.head)[2]
        name = {"constant": "Constant", "cosine": "Cosine"}[settings.get("lr_schedule", "constant")]
        node = {"_target_": f"nexus_lightning.optim.{name}", "warmup_steps": int(settings.get("warmup_steps", 0))}
    if "total_steps" in inspect.signature(get_class(node["_target_"])).parameters:
        return {"total_steps": total_steps(tenant), **node}
    return node


def total_steps(tenant: TenantConfig) -> int | None:
    """Optimizer steps until the completion target; None without one, and in RL, where a job has as many as its rollout
    fills."""
    if tenant.target_jobs is None or tenant.dataset is None or tenant.task in ("rl", IDLE):
        return None
    return tenant.target_jobs * tenant.dataset.batches_per_job


def _hand_over_rates(tenant: TenantConfig) -> None:
    """What a head's file recommends goes where the tenant has an optimizer or a schedule of its own."""
    for part, keys in RATE_KEYS.items():
        if getattr(tenant, part) is not None and isinstance(tenant.head, dict):
            tenant.head = {key: value for key, value in tenant.head.items() if key not in keys}


def digest_of(value: Any) -> str:
    """Short stable hash of a config fragment (folder names of recorded data and prepared payloads)."""
    plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:10]


def dataset_root(tenant: TenantConfig, data_dir: str) -> Path | None:
    """Folder of the tenant's dataset; None when the hub cache decides."""
    dataset = tenant.dataset
    assert dataset is not None
    if dataset.root is not None:
        return Path(dataset.root)
    if dataset.record is None:
        return None
    assert tenant.environment is not None
    record = dataset.record
    identity = digest_of(
        describe_recording(
            tenant.environment.simulator,
            record.expert,
            record.episodes,
            record.first_seed,
            schema_of(tenant.schema),
            record.random_share,
            record.keep_failures,
        )
    )
    return Path(data_dir) / "demos" / f"{dataset.repo_id.replace('/', '_')}-{identity}"


# ------------------------------------------------------------------------------------------------------- validation


def validate(config: NexusConfig) -> None:
    """Check everything that can be checked without building anything.

    Raises:
        ConfigError: with every problem found.
    """
    problems: list[str] = []
    if not config.tenants:
        problems.append("tenants: none given; for example '+tenants=[libero,maniskill]'")
    backbone = check_class(config.backbone, "backbone", problems)
    lowered: dict[str, str] = {}
    for name, tenant in config.tenants.items():
        other = lowered.setdefault(name.lower(), name)
        if other != name:
            problems.append(f"tenants.{name}: differs from tenants.{other} only in case; choose another name")
        problems += _tenant_problems(f"tenants.{name}", name, tenant, config, backbone)
    problems += _not_finite({key: value for key, value in asdict(config).items() if key != "tenants"})
    problems += run_problems(config)
    problems += _lightning_problems(config)
    trainer = config.trainer
    unbounded = [n for n, t in config.tenants.items() if t.target_jobs is None]
    if unbounded and trainer.max_jobs is None and trainer.max_time is None and not trainer.fast_dev_run:
        problems.append(
            f"nothing ends this run: set trainer.max_jobs, trainer.max_time or tenants.{unbounded[0]}.target_jobs"
        )
    if problems:
        raise ConfigError(problems)


def run_problems(config: NexusConfig) -> list[str]:
    """What is wrong with everything but the tenants and the backbone."""
    problems = _placement_problems(config)
    problems += _part_problems("queues.training.policy", config.queues.training.policy, Policy)
    inference = config.queues.inference
    if inference.static_batch_size is not None and inference.static_batch_size < 1:
        problems.append(f"queues.inference.static_batch_size={inference.static_batch_size}: at least 1, or null")
    if inference.max_batch_size < 1:
        problems.append(f"queues.inference.max_batch_size={inference.max_batch_size}: must be at least 1")
    if not 0 <= inference.timeout_s < math.inf:
        problems.append(
            f"queues.inference.timeout_s={inference.timeout_s}: must be a number of seconds, 0 for no waiting"
        )
    store = config.feature_store
    if store.store not in ("memory", "disk"):
        problems.append(f"feature_store.store={store.store}: choose memory or disk")
    if store.budget_gb < 0:
        problems.append(f"feature_store.budget_gb={store.budget_gb}: must be at least 0")
    trainer = config.trainer
    for key in ("jobs_per_round", "checkpoint_every_n_jobs", "keep_payloads"):
        if getattr(trainer, key) < 1:
            problems.append(f"trainer.{key}={getattr(trainer, key)}: must be at least 1")
    return problems


def _lightning_problems(config: NexusConfig) -> list[str]:
    """What is wrong with the parts that Lightning runs: loggers, callbacks, profiler."""
    nodes = [*config.logger.values(), *config.callbacks.values(), config.profiler]
    if not any(nodes):
        return []
    from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar  # seconds: only who has some waits
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.profilers import Profiler

    problems = []
    for group, base in (("logger", Logger), ("callbacks", Callback)):
        named = getattr(config, group)
        for name, node in named.items():
            if isinstance(node, Mapping):
                problems += _part_problems(f"{group}.{name}", node, base)
                continue
            owners = [n for n, other in named.items() if isinstance(other, Mapping) and name in other]
            right = (
                f"write {group}.{owners[0]}.{name}={node}" if owners else f"name a file of conf/{group}: {group}=none"
            )
            problems.append(f"{group}.{name}={node!r}: must be a mapping with `_target_`; {right}")
    if config.profiler:
        problems += _part_problems("profiler", config.profiler, Profiler)
    for name, node in config.callbacks.items():
        cls = check_class(node, "", []) if isinstance(node, Mapping) else None
        if isinstance(cls, type) and issubclass(cls, Checkpoint):
            problems.append(
                f"callbacks.{name}={cls.__name__}: a run saves its tenants itself; see trainer.checkpoint_every_n_jobs"
            )
        if isinstance(cls, type) and issubclass(cls, ProgressBar):
            problems.append(f"callbacks.{name}={cls.__name__}: a run has its own; see trainer.enable_progress_bar")
    return problems


def _part_problems(key: str, node: Mapping[str, Any], base: type) -> list[str]:
    """Of a logger, callback, profiler or policy. Its class may say more: ``requires`` and ``problems(arguments)``."""
    problems: list[str] = []
    cls = check_class(node, key, problems)
    if cls is None:
        return problems
    if not (isinstance(cls, type) and issubclass(cls, base)):
        return [*problems, f"{key}={node['_target_']}: is not a {base.__module__}.{base.__name__}"]
    for package, extra in getattr(cls, "requires", {}).items():
        if importlib.util.find_spec(package) is None:
            problems.append(f"{key}: package {package} is missing; pip install 'nexus-lightning[{extra}]'")
    for name in {parent.__name__ for parent in cls.__mro__} & LIGHTNING_NEEDS.keys():
        packages = LIGHTNING_NEEDS[name]
        if not any(map(importlib.util.find_spec, packages)):
            problems.append(f"{key}: package {packages[0]} is missing; pip install {packages[0]}")
    arguments = {name: value for name, value in node.items() if name != "_target_"}
    return problems + [f"{key}.{problem}" for problem in getattr(cls, "problems", lambda arguments: [])(arguments)]


def _not_finite(value: Any, key: str = "") -> list[str]:
    """NaN passes every comparison, and infinity most of them."""
    if isinstance(value, Mapping):
        return [p for k, v in value.items() for p in _not_finite(v, f"{key}.{k}" if key else str(k))]
    if isinstance(value, list | tuple):
        return [p for k, v in enumerate(value) for p in _not_finite(v, f"{key}[{k}]")]
    bad = isinstance(value, float) and not math.isfinite(value)
    return [f"{key}={value}: must be a finite number"] if bad else []


def tenant_problems(key: str, name: str, tenant: TenantConfig, config: NexusConfig) -> list[str]:
    """What is wrong with one tenant that joins a run of ``config``, one line each, every key after ``key``.

    Of an :data:`IDLE` one only schema, head and shares are looked at.
    """
    return _tenant_problems(key, name, tenant, config, check_class(config.backbone, "backbone", []))


def _placement_problems(config: NexusConfig) -> list[str]:
    """What is wrong whatever the number of ranks; :func:`nexus_lightning.placement.plan.resolve` checks the rest."""
    placement, problems = config.placement, []
    if placement.strategy not in STRATEGIES:
        problems.append(f"placement.strategy={placement.strategy}: choose one of {', '.join(STRATEGIES)}")
    if placement.precision not in PRECISIONS:
        problems.append(
            f"placement.precision={placement.precision}: use {', '.join(PRECISIONS)} "
            "(16-mixed shares one gradient scaler between tenants)"
        )
    backbone = placement.backbone
    degrees = {"backbone.replicate": backbone.replicate, "backbone.shard": backbone.shard}
    degrees |= {"heads.shard": placement.heads.shard, "max_simulators_per_rank": placement.max_simulators_per_rank}
    degrees["torch_threads"] = placement.torch_threads
    for name, value in degrees.items():
        if value is not None and value < 1:
            problems.append(f"placement.{name}={value}: must be at least 1")
    if backbone.param_dtype not in (None, "fp32", "bf16"):
        problems.append(f"placement.backbone.param_dtype={backbone.param_dtype}: choose fp32 or bf16, or null")
    if not re.fullmatch(r"training|cpu|cuda:\d+", placement.inference.device):
        problems.append(
            f"placement.inference.device={placement.inference.device}: choose training, cpu or a device such as cuda:1"
        )
    for tenant, ranks in placement.environments.items():
        where = f"placement.environments.{tenant}={ranks}"
        if tenant not in config.tenants:
            problems.append(f"{where}: no such tenant; tenants are {', '.join(config.tenants)}")
        elif config.tenants[tenant].environment is None:
            problems.append(f"{where}: this tenant has no simulators")
        if not ranks or len(set(ranks)) < len(ranks) or min(ranks) < 0:
            problems.append(f"{where}: give different ranks, counted from 0")
    return problems if placement.ray is None else problems + _ray_problems(config, placement.ray)


def _ray_problems(config: NexusConfig, ray: RayConfig) -> list[str]:
    """What is wrong before the cluster is asked; :mod:`nexus_lightning.placement.cluster` checks the rest."""
    problems = []
    if importlib.util.find_spec("ray") is None:
        problems.append("placement.ray: package ray is missing; pip install 'nexus-lightning[ray]'")
    if ray.address == "auto":
        if not os.environ.get("RAY_ADDRESS"):
            problems.append(
                "placement.ray.address=auto: would attach to any cluster that runs on this machine; name the cluster "
                "as host:port, or in the variable RAY_ADDRESS"
            )
    elif not re.fullmatch(r"[^:/\s]+:\d+", ray.address):
        problems.append(
            f"placement.ray.address={ray.address}: give host:port of the cluster's head, such as 10.0.0.1:6379 (this "
            "machine must have joined the cluster with ray start)"
        )
    for name in ("simulator", "replica", "collector"):
        if getattr(ray, f"num_cpus_per_{name}") <= 0:
            value = getattr(ray, f"num_cpus_per_{name}")
            problems.append(f"placement.ray.num_cpus_per_{name}={value}: must be positive")
    for name in ("num_gpus_per_simulator", "num_gpus_per_replica", "max_restarts", "inference_replicas"):
        if getattr(ray, name) < 0:
            problems.append(f"placement.ray.{name}={getattr(ray, name)}: must be at least 0")
    if ray.inference_replicas and config.placement.precision not in ("32-true", "bf16-mixed"):
        problems.append(
            f"placement.precision={config.placement.precision}: changes the dtype of backbone and heads in this "
            "process only, not in replicas; use 32-true, or placement.ray.inference_replicas=0"
        )
    for name, tenant in config.tenants.items():
        if tenant.environment is not None and tenant.environment.batched is True and not ray.num_gpus_per_simulator:
            problems.append(
                f"tenants.{name}.environment.batched=true: needs a GPU on the cluster; set "
                "placement.ray.num_gpus_per_simulator=1"
            )
    return problems


def _tenant_problems(key: str, name: str, tenant: TenantConfig, config: NexusConfig, backbone: Any) -> list[str]:
    problems = _not_finite(asdict(tenant), key)
    if not TENANT_NAME.match(name):
        problems.append(f"{key}: name must start with a letter and hold only letters, digits, _ and - (64 at most)")
    if tenant.task not in TASKS and not (tenant.task == IDLE and name not in config.tenants):
        problems.append(f"{key}.task={tenant.task}: choose one of {', '.join(TASKS)}")
    schema = schema_of(tenant.schema)
    problems += [f"{key}.schema.{p}" for p in schema.problems()]
    problems += _head_problems(key, tenant, backbone)
    problems += _optimizer_problems(key, tenant)
    for field_name in ("max_in_flight",):
        if getattr(tenant, field_name) < 1:
            problems.append(f"{key}.{field_name}={getattr(tenant, field_name)}: must be at least 1")
    if tenant.target_jobs is not None and tenant.target_jobs < 1:
        problems.append(f"{key}.target_jobs={tenant.target_jobs}: must be at least 1, or null")
    if tenant.weight <= 0:
        problems.append(f"{key}.weight={tenant.weight}: must be positive")
    if tenant.environment is not None:
        problems += _environment_problems(key, tenant)
    if tenant.task in TASKS:
        problems += _algorithm_problems(key, tenant)
        problems += _source_problems(key, tenant, schema, config)
    if tenant.features.reuse not in FEATURE_REUSE:
        problems.append(f"{key}.features.reuse={tenant.features.reuse}: choose one of {', '.join(FEATURE_REUSE)}")
    if tenant.eval.episodes < 0:
        problems.append(f"{key}.eval.episodes={tenant.eval.episodes}: must be at least 1, or 0 for no evaluation")
    if tenant.eval.first_seed < 0:
        problems.append(f"{key}.eval.first_seed={tenant.eval.first_seed}: must be at least 0")
    if tenant.eval.num_envs < 1:
        problems.append(f"{key}.eval.num_envs={tenant.eval.num_envs}: must be at least 1")
    if tenant.eval.every_n_jobs is not None and tenant.eval.every_n_jobs < 1:
        problems.append(f"{key}.eval.every_n_jobs={tenant.eval.every_n_jobs}: must be at least 1, or null")
    if tenant.init_from.given:
        problems += _init_problems(key, tenant, config, backbone)
    return problems


def _head_problems(key: str, tenant: TenantConfig, backbone: Any) -> list[str]:
    problems: list[str] = []
    if not isinstance(tenant.head, dict):
        return [f"{key}.head={tenant.head!r}: must be a mapping with `_target_`"]
    cls = check_class(tenant.head, f"{key}.head", problems, skip=OPTIMIZER_KEYS, given=HEAD_ARGUMENTS)
    for name, least in (("value_lr", 0.0), ("weight_decay", 0.0), ("grad_clip_norm", 0.0), ("warmup_steps", 0)):
        value = tenant.head.get(name)
        if value is not None and not (isinstance(value, int | float) and value >= least):
            problems.append(f"{key}.head.{name}={value!r}: must not be negative")
    for part, keys in RATE_KEYS.items():
        if getattr(tenant, part) is not None:
            problems += [
                f"{key}.head.{name}={tenant.head[name]!r}: {key}.{part} says it; set it there"
                for name in keys
                if name in tenant.head
            ]
    decay = tenant.head.get("ema_decay")
    if decay is not None and not (isinstance(decay, int | float) and 0 < decay < 1):
        problems.append(f"{key}.head.ema_decay={decay!r}: must lie between 0 and 1, for example 0.999, or be null")
    if decay is not None and tenant.task == "rl":
        problems.append(f"{key}.head.ema_decay={decay}: task rl must act with the weights it trains; set it to null")
    if cls is not None and tenant.task not in ("sft", IDLE) and not getattr(cls, "supports_rl", False):
        problems.append(
            f"{key}.head={cls.__name__}: has no log-probabilities and no critic, so it cannot train by {tenant.task}; "
            "use mlp"
        )
    elif isinstance(cls, type) and issubclass(cls, ActionHead) and tenant.task == "rl":
        if reason := cls.rl_problem(split_head(tenant.head)[1]):
            problems.append(f"{key}.head={cls.__name__}: cannot train by rl: {reason}")
    if isinstance(cls, type) and not issubclass(cls, ActionHead):
        problems.append(f"{key}.head={cls.__name__}: is not an ActionHead; subclass nexus_lightning.head.ActionHead")
    elif isinstance(cls, type) and isinstance(backbone, type) and issubclass(backbone, Backbone):
        problems += _kind_problems(key, tenant, cls, backbone)
    return problems


def _optimizer_problems(key: str, tenant: TenantConfig) -> list[str]:
    """Of the optimizer and the learning-rate schedule: they are built on one number, so their own words count, too."""
    if not isinstance(tenant.head, dict):
        return []
    problems: list[str] = []
    if tenant.optimizer is None:
        lr = tenant.head.get("lr")
        if not isinstance(lr, int | float) or lr <= 0:
            problems.append(f"{key}.head.lr={lr!r}: a positive learning rate is required")
        betas = tenant.head.get("betas")
        rates = betas if isinstance(betas, list | tuple) else ()
        if betas is not None and (len(rates) != 2 or not all(isinstance(b, int | float) and 0 <= b < 1 for b in rates)):
            problems.append(f"{key}.head.betas={betas!r}: two numbers from 0 to below 1, for example [0.9, 0.999]")
    else:
        where, rates = f"{key}.optimizer", {name: tenant.optimizer.get(name) for name in ("lr", "value_lr")}
        for name, rate in rates.items():
            if not (isinstance(rate, int | float) and rate > 0) and not (name == "value_lr" and rate is None):
                problems.append(f"{where}.{name}={rate!r}: a positive learning rate is required")
        cls = check_class(tenant.optimizer, where, problems, skip=("value_lr",), given=("params",))
        if cls is not None and not issubclass(cls, torch.optim.Optimizer):  # type: ignore[arg-type]
            problems.append(f"{where}={cls.__name__}: is not a torch.optim.Optimizer")
    schedule, without_end = tenant.head.get("lr_schedule", "constant"), total_steps(tenant) is None
    needs = f"needs {key}.target_jobs and jobs of a dataset, which say how many steps there are"
    if tenant.lr_scheduler is None:
        if schedule not in LR_SCHEDULES:
            problems.append(f"{key}.head.lr_schedule={schedule}: choose one of {', '.join(LR_SCHEDULES)}")
        if schedule == "cosine" and without_end and tenant.task != IDLE:
            problems.append(f"{key}.head.lr_schedule=cosine: {needs}; use constant")
    else:
        where, node = f"{key}.lr_scheduler", dict(tenant.lr_scheduler)
        cls = check_class(node, where, [])
        if cls is not None and "total_steps" in inspect.signature(cls).parameters and "total_steps" not in node:
            node["total_steps"] = total_steps(tenant)
            if without_end:
                problems.append(f"{where}={cls.__name__}: {needs}; give total_steps, or use constant")
        check_class(node, where, problems, given=("optimizer",))
        if cls is not None and not issubclass(cls, LRScheduler):  # type: ignore[arg-type]
            problems.append(f"{where}={cls.__name__}: is not a torch.optim.lr_scheduler.LRScheduler")
        if cls is not None and issubclass(cls, ReduceLROnPlateau):  # type: ignore[arg-type]
            problems.append(f"{where}={cls.__name__}: needs a metric at every step, which a schedule is not given")
    if problems or (tenant.optimizer is None and tenant.lr_scheduler is None):
        return problems
    try:
        make_optimizer(optimizer_of(tenant), lr_scheduler_of(tenant), [torch.nn.Parameter(torch.zeros(()))])
    except (TypeError, ValueError, RuntimeError) as error:
        return [f"{key}.optimizer or lr_scheduler: {type(error).__name__}: {error}"]
    return []


def _kind_problems(key: str, tenant: TenantConfig, head: type[ActionHead], backbone: type[Backbone]) -> list[str]:
    """Head and backbone must share a feature kind (class attributes: nothing is built)."""
    wanted = tenant.head.get("kind")
    if head.backbones and backbone.__name__ not in head.backbones:
        return [
            f"{key}.head={head.__name__} on backbone {backbone.__name__}: it continues {', '.join(head.backbones)}; "
            "choose that backbone or another head"
        ]
    try:
        choose_kind(head.reads, backbone.kinds, wanted)
    except ValueError as error:
        where = f"{key}.head={head.__name__}" if wanted is None else f"{key}.head"
        return [f"{where} on backbone {backbone.__name__}: {error}; choose another head or backbone"]
    return []


def _environment_problems(key: str, tenant: TenantConfig) -> list[str]:
    problems: list[str] = []
    environment = tenant.environment
    assert environment is not None
    cls = check_class(environment.simulator, f"{key}.environment.simulator", problems)
    if environment.num_envs < 1:
        problems.append(f"{key}.environment.num_envs={environment.num_envs}: must be at least 1")
    if cls is None:
        return problems
    for package, extra in getattr(cls, "requires", {}).items():
        if importlib.util.find_spec(package) is None:
            problems.append(
                f"{key}.environment.simulator: package {package} is missing; pip install 'nexus-lightning[{extra}]'"
            )
    gripper = getattr(cls, "gripper", tenant.schema.gripper)
    if gripper != tenant.schema.gripper:
        problems.append(f"{key}.schema.gripper={tenant.schema.gripper}: {cls.__name__} uses {gripper}")
    orientation = getattr(cls, "image_orientation", tenant.schema.image_orientation)
    if tenant.schema.cameras and orientation not in (None, tenant.schema.image_orientation):
        problems.append(
            f"{key}.schema.image_orientation={tenant.schema.image_orientation}: {cls.__name__} gives {orientation} "
            f"images; set it to {orientation}, and {key}.dataset.conventions.image_orientation where a dataset differs"
        )
    cameras = environment.simulator.get("cameras")
    if cameras is not None and list(cameras) != list(tenant.schema.cameras):
        problems.append(
            f"{key}.environment.simulator.cameras={list(cameras)}: differs from {key}.schema.cameras="
            f"{list(tenant.schema.cameras)}; names and order must agree"
        )
    return [*problems, *process_problems(key, environment, cls), *_task_problems(key, tenant, cls)]


def process_problems(key: str, environment: EnvironmentConfig, cls: Any) -> list[str]:
    """What concerns the simulators' processes: batching on the GPU and recycling."""
    problems = []
    if environment.batched not in ("auto", True, False):
        problems.append(f"{key}.environment.batched={environment.batched}: choose auto, true or false")
    elif environment.batched is True:
        where = f"{key}.environment.batched=true"
        if getattr(cls, "batched", None) is None:
            problems.append(f"{where}: {cls.__name__} has no batched form; set it to auto or false")
        elif not torch.cuda.is_available():
            problems.append(f"{where}: there is no CUDA device here; set it to auto or false")
        if len(environment.tasks) > 1:
            problems.append(f"{where}: a batch holds one task, {key}.environment.tasks lists {len(environment.tasks)}")
        if environment.inline:
            problems.append(f"{where}: {key}.environment.inline=true runs light simulators without any process")
    for name in ("max_resets", "max_memory_gb"):
        value = getattr(environment, name)
        if value is not None and value <= 0:
            problems.append(f"{key}.environment.{name}={value}: must be positive, or null")
        if value is not None and environment.inline:
            problems.append(
                f"{key}.environment.{name}={value}: inline simulators have no process to restart; remove it"
            )
    return problems


def _task_problems(key: str, tenant: TenantConfig, cls: Any) -> list[str]:
    """Schema and task descriptions must fit, for every task; the simulator's class answers without being built."""
    assert tenant.environment is not None
    simulator, tasks = tenant.environment.simulator, tenant.environment.tasks
    try:
        configs = task_configs(simulator, tasks)
    except ValueError as error:
        return [f"{key}.environment.{error}"]
    if not (isinstance(cls, type) and issubclass(cls, Simulator)) or schema_of(tenant.schema).problems():
        return []
    problems = []
    for config, task in zip(configs, tasks or [None], strict=True):
        where = f"{key}.schema" if task is None else f"{key}.schema in task {task}"
        arguments = {name: value for name, value in config.items() if name != "_target_"}
        problems += [f"{where}: {p}" for p in cls.problems(arguments, schema_of(tenant.schema))]
    if tasks and tenant.dataset is not None and tenant.dataset.record is not None:
        problems.append(
            f"{key}.dataset.record: records one task, {key}.environment.tasks lists {len(tasks)}; give a dataset of "
            "all of them in dataset.root, or leave environment.tasks empty"
        )
    return problems


def _algorithm_problems(key: str, tenant: TenantConfig) -> list[str]:
    """Type, bounds, task, and what the algorithm itself refuses."""
    where, task = f"{key}.algorithm", tenant.task
    choices = [name for name, cls in shipped().items() if cls.task == task]
    if tenant.algorithm is None and task != "sft":
        return [f"{where}: task {task} needs an algorithm; choose one of {', '.join(choices)}"]
    settings = algorithm_of(tenant)
    if not isinstance(settings, AlgorithmSettings):
        try:
            settings = typed_algorithm(settings, task, where)
        except ConfigError as error:
            return error.problems
    algorithm = algorithm_class(settings)
    if algorithm.task != task:
        return [
            f"{where}={algorithm.__name__}: trains task {algorithm.task}; set {key}.task={algorithm.task}, or choose "
            f"one of {', '.join(choices)}"
        ]
    problems = bounds_problems(where, settings)
    if isinstance(settings, RolloutSettings) and settings.chunks_per_job is None:
        problems.append(f"{where}.chunks_per_job: a value is required")
    if task == "rl" and not isinstance(settings, RolloutSettings):
        problems.append(f"{where}={algorithm.__name__}: its settings must be a subclass of RolloutSettings")
    head = tenant.head.get("_target_") if isinstance(tenant.head, Mapping) else None
    try:
        head = None if head is None else get_class(head)
    except Exception:  # told with the head
        head = None
    return [*problems, *algorithm.problems(key, tenant, head)]


def _source_problems(key: str, tenant: TenantConfig, schema: TenantSchema, config: NexusConfig) -> list[str]:
    """Where the tenant's jobs come from: a dataset, simulators, or both."""
    problems = []
    if tenant.task == "rl":
        if tenant.environment is None:
            problems.append(f"{key}.environment: task rl needs an environment")
        weight = getattr(tenant.algorithm, "sft_weight", None)
        if tenant.dataset is not None and weight is None:
            problems.append(
                f"{key}.dataset: task rl reads it only with {key}.algorithm.sft_weight, for example 0.1; to start from "
                f"demonstrations use {key}.init_from.recipe"
            )
        if weight is not None and tenant.dataset is None:
            problems.append(f"{key}.algorithm.sft_weight={weight}: needs {key}.dataset, the demonstrations to mix in")
    elif tenant.dataset is None:
        problems.append(f"{key}.dataset: task {tenant.task} needs a dataset")
    if tenant.dataset is not None:
        problems += _data_problems(key, tenant, tenant.dataset, schema, config)
    return problems


def _data_problems(
    key: str, tenant: TenantConfig, dataset: DatasetConfig, schema: TenantSchema, config: NexusConfig
) -> list[str]:
    problems = []
    if importlib.util.find_spec("lerobot") is None:
        problems.append(f"{key}.dataset: package lerobot is missing; pip install 'lerobot[dataset]>=0.6.1,<0.7'")
    try:
        check_episodes(dataset.episodes, dataset.exclude)
    except ValueError as error:
        problems.append(f"{key}.dataset.{error}")
        return problems
    problems += _column_problems(f"{key}.dataset", dataset, schema)
    for name in ("batch_size", "batches_per_job"):
        if getattr(dataset, name) < 1:
            problems.append(f"{key}.dataset.{name}={getattr(dataset, name)}: must be at least 1")
    if dataset.augmentation is not None:
        problems += _augmentation_problems(f"{key}.dataset.augmentation", dataset.augmentation)
    if dataset.record is not None and not 0 <= dataset.record.random_share <= 1:
        problems.append(f"{key}.dataset.record.random_share={dataset.record.random_share}: must lie in [0, 1]")
    if dataset.record is not None and tenant.environment is None:
        problems.append(f"{key}.dataset.record: recording needs {key}.environment")
        return problems
    if not schema.problems():
        problems += [f"{key}.dataset.conventions.{p}" for p in DatasetConverter(schema, dataset.conventions).problems()]
    if dataset.record is not None and dataset.conventions != DatasetConventions():
        problems.append(f"{key}.dataset.conventions: a recording has the schema's conventions; remove them")
    root = dataset_root(tenant, config.data_dir)
    if root is None:
        return problems + _named_problems(key, tenant, schema)
    if (root / "meta" / "info.json").is_file():
        problems += _dataset_problems(key, tenant, schema, root)
    elif dataset.record is None:
        problems.append(
            f"{key}.dataset.root={root}: no LeRobotDataset there; record one with scripts/collect_demos.py, "
            f"or set {key}.dataset.record, or leave root empty to use the hub name {dataset.repo_id}"
        )
    else:
        try:
            chosen_episodes(dataset.episodes, dataset.exclude, dataset.record.episodes)
        except ValueError as error:
            problems.append(f"{key}.dataset.{about(str(error), root)}")
    return problems


def _column_problems(key: str, dataset: DatasetConfig, schema: TenantSchema) -> list[str]:
    problems, state = [], dataset.rename.state
    if unknown := sorted(set(dataset.rename.cameras) - set(schema.cameras)):
        problems.append(f"{key}.rename.cameras: {unknown} are not in schema.cameras={list(schema.cameras)}")
    keys = [state] if isinstance(state, str) else state
    if not isinstance(keys, list) or not keys or not all(isinstance(k, str) and k for k in keys):
        problems.append(f"{key}.rename.state={state!r}: a key of the dataset, or a list of them, is required")
    if dataset.statistics not in STATISTICS:
        problems.append(f"{key}.statistics={dataset.statistics}: choose one of {', '.join(STATISTICS)}")
    if not 0 < dataset.tolerance_s < math.inf:
        problems.append(f"{key}.tolerance_s={dataset.tolerance_s}: must be a number of seconds above 0")
    if dataset.record is not None and dataset.rename != RenameConfig():
        problems.append(f"{key}.rename: a recording has LeRobot's own keys; remove it")
    return problems


def _named_problems(key: str, tenant: TenantConfig, schema: TenantSchema) -> list[str]:
    """Of a dataset by name: its metadata are fetched when they are not on this machine."""
    assert tenant.dataset is not None
    name = tenant.dataset.repo_id
    root = named_root(name)
    if root is None:
        where = f"{key}.dataset.repo_id={name}: no such dataset in {lerobot_home()}"
        if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
            return [f"{where}, and HF_HUB_OFFLINE says that the hub is not to be asked; set {key}.dataset.root"]
        from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata

        try:
            root = LeRobotDatasetMetadata(name).root
        except Exception as error:  # of LeRobot, of the hub and of the network, without a common base
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            return [f"{where}, and the hub does not give it ({type(error).__name__}: {reason})"]
    return _dataset_problems(key, tenant, schema, root, complete=False)


def _augmentation_problems(key: str, augmentation: AugmentationConfig) -> list[str]:
    problems = []
    if augmentation.views < 2:
        problems.append(f"{key}.views={augmentation.views}: must be at least 2; set {key}=null for no augmentation")
    if not 0 < augmentation.crop <= 1:
        problems.append(f"{key}.crop={augmentation.crop}: must lie in (0, 1]")
    for name in ("brightness", "contrast"):
        if not 0 <= getattr(augmentation, name) < 1:
            problems.append(f"{key}.{name}={getattr(augmentation, name)}: must lie in [0, 1)")
    return problems


def _dataset_problems(
    key: str, tenant: TenantConfig, schema: TenantSchema, root: Path, complete: bool = True
) -> list[str]:
    assert tenant.dataset is not None
    if schema.problems():
        return []
    converter, needs = DatasetConverter(schema, tenant.dataset.conventions), []
    if tenant.task == "offline_rl" and isinstance(tenant.algorithm, AlgorithmSettings):
        reward = tenant.dataset.rename.reward
        needs.append(REWARD_COLUMNS if reward is None else (reward,))
        if algorithm_class(tenant.algorithm).needs_ends:
            needs.append(END_COLUMNS)
    problems = dataset_problems(key, tenant.dataset, converter, root, complete, needs)
    if (root / RECORD_FILE).is_file():  # recorded by us: it says itself what its conventions are
        recorded = json.loads((root / RECORD_FILE).read_text())["schema"]
        for name in ("action_convention", "rotation", "gripper", "image_orientation"):
            if recorded.get(name, getattr(converter, name)) != getattr(converter, name):
                problems.append(
                    f"{key}.dataset.conventions.{name}={getattr(converter, name)}: dataset {root} was recorded with "
                    f"{name}={recorded[name]}; set that"
                )
    return problems


def _init_problems(key: str, tenant: TenantConfig, config: NexusConfig, backbone: Any) -> list[str]:
    init = tenant.init_from
    if init.recipe is None:
        if init.path is not None and not Path(init.path).is_dir():
            return [f"{key}.init_from.path={init.path}: no such payload folder"]
        return []
    try:
        recipe = tenant_from_dict(init.recipe, f"{key}.init_from.recipe")
    except ConfigError as error:
        return error.problems
    problems = _tenant_problems(f"{key}.init_from.recipe", "recipe", recipe, config, backbone)
    if recipe.task != "sft":
        problems.append(f"{key}.init_from.recipe.task={recipe.task}: a starting payload is trained by sft")
    if recipe.target_jobs is None:
        problems.append(f"{key}.init_from.recipe.target_jobs: a value is required")
    changed = schema_of(recipe.schema).differences(schema_of(tenant.schema))
    if changed:
        problems.append(f"{key}.init_from.recipe.schema: differs from {key}.schema in {'; '.join(changed)}")
    return problems


def check_class(
    node: Any, key: str, problems: list[str], skip: tuple[str, ...] = (), given: tuple[str, ...] = ()
) -> Callable[..., Any] | None:
    """Import ``node._target_`` and bind the node's other keys to its signature; report what does not fit.

    Args:
        skip: keys of the node that are no arguments.
        given: arguments that the node need not and must not hold; of an argument that is such a node itself, too.
    """
    if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
        problems.append(f"{key}: must be a mapping with `_target_`, got {node!r}")
        return None
    target = node["_target_"]
    try:
        cls = get_class(target)
    except Exception as error:  # Hydra wraps every import problem; the text names the module that failed
        problems.append(f"{key}._target_={target}: cannot be imported ({error})")
        return None
    parameters, valid = inspect.signature(cls).parameters, valid_keys(cls, skip, given)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for argument, value in node.items():
        if argument not in valid and argument != "_target_" and not takes_any:
            problems.append(no_such_key(cls.__name__, f"{key}.{argument}", value, valid))
        elif isinstance(value, Mapping) and "_target_" in value:
            check_class(value, f"{key}.{argument}", problems, given=given)
    for name in valid:
        if name not in skip and parameters[name].default is inspect.Parameter.empty and name not in node:
            problems.append(f"{key}.{name}: {cls.__name__} requires a value")
    return cls


def valid_keys(cls: Callable[..., Any], skip: tuple[str, ...] = (), given: tuple[str, ...] = ()) -> list[str]:
    """What the YAML of a class may hold beside ``_target_``: its arguments but ``given``, and ``skip``."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    arguments = [n for n, p in inspect.signature(cls).parameters.items() if p.kind in named and n not in given]
    return [*arguments, *skip]
