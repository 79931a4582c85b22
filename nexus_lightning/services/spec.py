"""Configuration of the server, and what a request may make of it: a spec from the network -> a typed TenantConfig.

``conf/serve.yaml`` is the operator's: its registry names heads, environments and datasets, and may hold ``_target_``. A
request names an entry and sets the keys that the entry allows, nothing else: no class, no path, no interpolation::

    registry.heads.mlp:  {config: {_target_: models.heads.mlp.ChunkMLPHead, lr: 1e-3, ...}, allow: [lr, hidden_dim]}
    request:             {"head": {"name": "mlp", "lr": 5e-4}}

The result goes through the same checks as a tenant of ``train.py``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from nexus_lightning.config import (
    HEAD_ARGUMENTS,
    IDLE,
    OPTIMIZER_KEYS,
    TASKS,
    ConfigError,
    DatasetConfig,
    EnvironmentConfig,
    FeatureStoreConfig,
    NexusConfig,
    PlacementConfig,
    QueuesConfig,
    SchemaConfig,
    TenantConfig,
    TrainerConfig,
    check_class,
    known_keys,
    no_such_key,
    object_of,
    run_problems,
    tenant_from_dict,
    tenant_problems,
    valid_keys,
)
from nexus_lightning.services.errors import InvalidRequest

TENANT_KEYS = ("name", "schema", "head", "seed", "priority", "weight", "max_in_flight", "max_policy_staleness")
WORKLOAD_KEYS = ("task", "dataset", "environment", "algorithm", "features", "eval", "target_jobs", "workload_id")
#: Largest values of a schema, so that a request cannot ask for a head of any size.
SCHEMA_MOST = {"state_dim": 4096, "action_dim": 256, "chunk": 512, "image_size": 1024}
MAX_CAMERAS, MAX_TEXT, MAX_DEPTH = 8, 2000, 8
MAX_IN_FLIGHT = 16  # jobs of one tenant
MAX_EPISODES = 1000  # of one evaluation
MAX_STEPS_PER_JOB = 2000  # optimizer steps: a job is not interrupted, everybody waits for its end


@dataclass
class EntryConfig:
    """One choice of the registry."""

    config: dict[str, Any] = MISSING  # of a head, an EnvironmentConfig or a DatasetConfig
    allow: list[str] = field(
        default_factory=list
    )  # what a request may set: paths in `config`, known by their last part
    most: dict[str, float] = field(default_factory=dict)  # largest value of an allowed number, by its last part
    choices: dict[str, list[Any]] = field(default_factory=dict)  # of an allowed key, by its last part
    from_schema: list[str] = field(default_factory=list)  # environments: simulator arguments that the schema knows
    environment: str | None = None  # datasets: the environment that it is recorded and by default evaluated in


@dataclass
class RegistryConfig:
    heads: dict[str, EntryConfig] = field(default_factory=dict)
    environments: dict[str, EntryConfig] = field(default_factory=dict)
    datasets: dict[str, EntryConfig] = field(default_factory=dict)


@dataclass
class LimitsConfig:
    max_tenants: int = 64  # of all owners
    max_tenants_per_owner: int = 16
    max_memory_gb: float | None = None  # heads, optimizers and served copies together; null: what is free at the start
    max_priority: int = 0
    max_weight: float = 4.0
    max_body_mb: float = 64.0
    max_in_flight: int = 64  # unfinished futures of an owner
    max_result_mb: float = 1024.0  # results of an owner that have not been read and dropped
    requests_per_s: float = 50.0  # of an owner
    max_sessions: int = 8  # environment sessions and rollouts, each with a simulator
    session_lease_s: float = 120.0  # a session without a call for so long is closed
    future_grace_s: float = 3600.0  # how long a result can be read again after it was read
    sequence_gap_s: float = 300.0  # how long a request waits for a number before its own
    deadline_s: float = 86400.0  # of a future, unless the request says; of a workload only what the request says
    metrics_history: int = 2000  # rows of metrics kept of a tenant


@dataclass
class ServeConfig:
    """Root of ``conf/serve.yaml``."""

    backbone: Any = MISSING
    queues: QueuesConfig = field(default_factory=QueuesConfig)
    feature_store: FeatureStoreConfig = field(default_factory=FeatureStoreConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    host: str = "127.0.0.1"
    port: int = 8000
    seed: int = 0
    run_name: str = "serve"
    output_dir: str = "outputs"
    data_dir: str = "data"

    @property
    def run_dir(self) -> Path:
        """The run folder: the same after a restart."""
        return (Path(self.output_dir) / self.run_name).resolve()

    def run_config(self) -> NexusConfig:
        """What the one Lightning run of the server is built from; its tenants come later."""
        return NexusConfig(
            backbone=self.backbone,
            queues=self.queues,
            feature_store=self.feature_store,
            placement=self.placement,
            trainer=self.trainer,
            seed=self.seed,
            run_name=self.run_name,
            output_dir=self.output_dir,
            data_dir=self.data_dir,
        )


def register_serve_config() -> None:
    """Store the root schema for Hydra (idempotent)."""
    ConfigStore.instance().store(name="nexus_serve_config", node=ServeConfig)


def to_serve_config(cfg: DictConfig) -> ServeConfig:
    """Composed Hydra config -> typed and checked.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    _, unknown = known_keys(OmegaConf.to_container(cfg), ServeConfig)
    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise ConfigError(unknown + [f"{key}: a value is required" for key in missing])
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, ServeConfig)
    if problems := unknown + serve_problems(config):
        raise ConfigError(problems)
    return config


def serve_problems(config: ServeConfig) -> list[str]:
    """What is wrong with the server's own configuration, one line each."""
    problems = run_problems(config.run_config())
    check_class(config.backbone, "backbone", problems)
    trainer = config.trainer
    for key in ("max_jobs", "max_time"):
        if getattr(trainer, key) is not None:
            problems.append(f"trainer.{key}={getattr(trainer, key)}: a server runs until it is stopped; set it to null")
    for key in ("fast_dev_run", "dry_run"):
        if getattr(trainer, key):
            problems.append(f"trainer.{key}=true: not for a server; use train.py")
    if config.queues.training.journal:
        problems.append(
            "queues.training.journal=true: a server restores tenants from their payloads and its own store; set false"
        )
    if config.placement.strategy not in ("auto", "single"):
        problems.append(f"placement.strategy={config.placement.strategy}: a server has one rank; set single")
    for limit in fields(LimitsConfig):
        value = getattr(config.limits, limit.name)
        if value is not None and value <= 0 and limit.name != "max_priority":
            problems.append(f"limits.{limit.name}={value}: must be positive")
    for kind in ("heads", "environments", "datasets"):
        for name, entry in getattr(config.registry, kind).items():
            where, names = f"registry.{kind}.{name}", [path.rsplit(".", 1)[-1] for path in entry.allow]
            if len(set(names)) < len(names):
                problems.append(f"{where}.allow={entry.allow}: two paths end in one name")
            if odd := [path for path in entry.allow if "_target_" in path or path.startswith("_")]:
                problems.append(f"{where}.allow: {odd} would let a request name a class; remove them")
            for bound in ("most", "choices"):
                if odd := sorted(set(getattr(entry, bound)) - set(names)):
                    problems.append(f"{where}.{bound}: {odd} are not in allow")
            if entry.environment is not None and entry.environment not in config.registry.environments:
                problems.append(f"{where}.environment={entry.environment}: not in registry.environments")
            problems += _entry_problems(kind, where, entry)
    return problems


def _entry_problems(kind: str, where: str, entry: EntryConfig) -> list[str]:
    """Keys of an entry that nothing reads; those that a request may set are held to the same."""
    problems, allowed = [], {}
    for path in entry.allow:
        *parents, last = path.split(".")
        node = allowed
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = None
    parts = {f"{where}.config": entry.config, f"{where}.allow": allowed}
    if kind == "heads":
        cls = check_class(entry.config, f"{where}.config", problems, skip=OPTIMIZER_KEYS, given=HEAD_ARGUMENTS)
        valid = [] if cls is None else valid_keys(cls, OPTIMIZER_KEYS, HEAD_ARGUMENTS)
    else:
        cls, valid = None, []
        for key, values in parts.items():
            problems += known_keys(values, DatasetConfig if kind == "datasets" else EnvironmentConfig, key)[1]
    if kind == "environments":
        simulator, schema = entry.config.get("simulator"), [each.name for each in fields(SchemaConfig)]
        if isinstance(simulator, Mapping):  # what the schema of a request fills in
            simulator = {**dict.fromkeys(entry.from_schema), **simulator}
        cls = check_class(simulator, f"{where}.config.simulator", problems)
        valid = [] if cls is None else valid_keys(cls)
        unknown = [name for name in entry.from_schema if name not in schema]
        problems += [no_such_key("a schema", f"{where}.from_schema.{name}", None, schema) for name in unknown]
        allowed = allowed.get("simulator") or {}
    if cls is not None:
        where += ".allow" if kind == "heads" else ".allow.simulator"
        problems += [no_such_key(cls.__name__, f"{where}.{n}", v, valid) for n, v in allowed.items() if n not in valid]
    return problems


# ------------------------------------------------------------------------------------------------------ from a request


class Compiler:
    """Specs of requests -> tenants. What does not fit is an :class:`InvalidRequest` with one line per problem."""

    def __init__(self, config: ServeConfig) -> None:
        self.registry, self.limits = config.registry, config.limits
        self.run_config = config.run_config()

    def tenant(self, name: str, spec: Mapping[str, Any]) -> TenantConfig:
        """A tenant without a workload."""
        problems = _request_problems("spec", spec, TENANT_KEYS)
        spec = _given(spec)
        if not problems and not isinstance(spec.get("schema"), Mapping):
            problems.append(
                f"spec.schema: a mapping with {', '.join(f.name for f in fields(SchemaConfig))} is required"
            )
        _refuse("the tenant's spec cannot be used", problems)
        head = self._choose("heads", "spec.head", spec.get("head"), problems)
        problems += self._share_problems(spec)
        schema = spec["schema"]
        for key, most in SCHEMA_MOST.items():
            if isinstance(schema.get(key), int) and schema[key] > most:
                problems.append(f"spec.schema.{key}={schema[key]}: at most {most}")
        if isinstance(schema.get("cameras"), list) and len(schema["cameras"]) > MAX_CAMERAS:
            problems.append(f"spec.schema.cameras: {len(schema['cameras'])} of them, at most {MAX_CAMERAS}")
        _refuse("the tenant's spec cannot be used", problems)
        values = {key: spec[key] for key in TENANT_KEYS if key in spec and key not in ("name", "head")}
        config = _typed({**values, "task": IDLE, "head": head, "eval": {"episodes": 0}}, "spec")
        _refuse("the tenant's spec cannot be used", self.problems("spec", name, config))
        return config

    def workload(self, name: str, tenant: TenantConfig, request: Mapping[str, Any]) -> TenantConfig:
        """A tenant with a training workload (tasks sft, rl, offline_rl)."""
        what = "the workload cannot run"
        problems = _request_problems("workload", request, WORKLOAD_KEYS)
        request = _given(request)
        if not problems and request.get("task") not in TASKS:
            problems.append(f"workload.task={request.get('task')!r}: choose one of {', '.join(TASKS)}, eval")
        if not problems and not isinstance(request.get("target_jobs"), int):
            problems.append("workload.target_jobs: the number of training jobs is required")
        _refuse(what, problems)
        values: dict[str, Any] = {k: request[k] for k in ("task", "algorithm", "features", "eval") if k in request}
        environment, most = request.get("environment"), math.inf
        if (asked := request.get("dataset")) is not None:
            values["dataset"] = self._choose("datasets", "workload.dataset", asked, problems)
            entry = self.registry.datasets.get(str(asked.get("name"))) if isinstance(asked, Mapping) else None
            if environment is None and entry is not None and entry.environment is not None:
                environment = {"name": entry.environment}
        if environment is not None:
            values["environment"] = self._environment(tenant.schema, "workload.environment", environment, problems)
            if isinstance(environment, Mapping) and environment.get("name") in self.registry.environments:
                most = self.registry.environments[environment["name"]].most.get("num_envs", math.inf)
        _refuse(what, problems)
        base = replace(tenant, task=request["task"], target_jobs=request["target_jobs"])
        typed = _typed({**_kept(base), **values}, "workload")
        if environment is None and typed.eval.episodes:
            if isinstance(request.get("eval"), Mapping) and "episodes" in request["eval"]:
                problems.append(f"workload.eval.episodes={typed.eval.episodes}: needs workload.environment")
            typed.eval = replace(typed.eval, episodes=0)
        if typed.eval.num_envs > most:
            problems.append(f"workload.eval.num_envs={typed.eval.num_envs}: at most {most:g}")
        if typed.eval.episodes > MAX_EPISODES:
            problems.append(f"workload.eval.episodes={typed.eval.episodes}: at most {MAX_EPISODES}")
        problems += self.problems("workload", name, typed) or self._job_problems(typed)
        _refuse(what, problems)
        return typed

    def _job_problems(self, config: TenantConfig) -> list[str]:
        """A job must end soon, everybody waits for it; a rollout must fit into the tenant's part of the queue."""
        algorithm, schema, environment = config.algorithm, config.schema, config.environment
        if config.task != "rl" or algorithm is None or environment is None:
            return []
        assert algorithm.chunks_per_job is not None, "validated before"
        rows, problems = environment.num_envs * algorithm.chunks_per_job, []
        steps = algorithm.epochs * math.ceil(rows / algorithm.minibatch_size)
        if steps > MAX_STEPS_PER_JOB:
            problems.append(
                f"workload.algorithm.epochs={algorithm.epochs}: {steps} optimizer steps a job with {rows} decisions in "
                f"minibatches of {algorithm.minibatch_size}; at most {MAX_STEPS_PER_JOB}"
            )
        numbers = schema.state_dim + 6 * schema.chunk * schema.action_dim  # chunk, log-probabilities, traces
        size = rows * (len(schema.cameras) * 3 * schema.image_size**2 + 4 * numbers)
        budget = self.run_config.queues.training.max_gb_per_tenant
        if size > budget * 1e9:
            problems.append(
                f"workload.algorithm.chunks_per_job={algorithm.chunks_per_job}: a rollout of {size / 1e9:.1f} GB; at "
                f"most {budget:g} GB"
            )
        return problems

    def problems(self, key: str, name: str, config: TenantConfig) -> list[str]:
        """:func:`~nexus_lightning.config.tenant_problems`, without saying where on the server the data lies."""
        folder = str(Path(self.run_config.data_dir))
        return [problem.replace(folder, "data") for problem in tenant_problems(key, name, config, self.run_config)]

    def environment(self, schema: SchemaConfig, asked: Any, fill: bool = True) -> EnvironmentConfig:
        """Simulators of the registry for a tenant's schema; without ``fill`` as the entry has them."""
        key = "environment"
        problems = _plain_problems(key, asked)
        _refuse("the environment cannot be used", problems)
        values = self._environment(schema, key, asked, problems, fill)
        _refuse("the environment cannot be used", problems)
        try:
            return object_of(EnvironmentConfig, values, key)
        except ConfigError as error:
            raise InvalidRequest("the environment cannot be used", error.problems) from error

    def _environment(
        self, schema: SchemaConfig, key: str, asked: Any, problems: list[str], fill: bool = True
    ) -> dict[str, Any]:
        values = self._choose("environments", key, asked, problems)
        if values and fill:
            for argument in self.registry.environments[asked["name"]].from_schema:
                given = getattr(schema, argument)
                values["simulator"][argument] = list(given) if isinstance(given, list | tuple) else given
        return values

    def _choose(self, kind: str, key: str, asked: Any, problems: list[str]) -> dict[str, Any]:
        """The entry that is asked for, with the keys that the request sets; problems are added to the list."""
        entries: dict[str, EntryConfig] = getattr(self.registry, kind)
        if not isinstance(asked, Mapping) or asked.get("name") not in entries:
            given = asked.get("name") if isinstance(asked, Mapping) else asked
            problems.append(f"{key}.name={given!r}: choose one of {', '.join(sorted(entries)) or 'none'}")
            return {}
        entry = entries[asked["name"]]
        values, paths = copy.deepcopy(entry.config), {path.rsplit(".", 1)[-1]: path for path in entry.allow}
        for name, value in asked.items():
            if name == "name" or value is None:
                continue
            if name not in paths:
                problems.append(f"{key}.{name}={value!r}: not to be set; may be set: {', '.join(paths) or 'nothing'}")
                continue
            *parents, last = paths[name].split(".")
            target = values
            for parent in parents:
                target = target.setdefault(parent, {})
            if problem := _value_problem(value, target.get(last), entry.most.get(name), entry.choices.get(name)):
                problems.append(f"{key}.{name}={value!r}: {problem}")
            else:
                target[last] = value
        return values

    def _share_problems(self, spec: Mapping[str, Any]) -> list[str]:
        bounds = {
            "priority": (-100, self.limits.max_priority),
            "weight": (1e-3, self.limits.max_weight),
            "max_in_flight": (1, MAX_IN_FLIGHT),
            "max_policy_staleness": (0, 1000),
            "seed": (0, 2**62),
        }
        return [
            f"spec.{key}={spec[key]!r}: a number from {least:g} to {most:g}"
            for key, (least, most) in bounds.items()
            if key in spec and not (isinstance(spec[key], int | float) and least <= spec[key] <= most)
        ]


def _value_problem(value: Any, default: Any, most: float | None, choices: list[Any] | None) -> str | None:
    """Why a request may not set this value: it must be of the default's kind, within the operator's bounds."""
    if choices is not None:
        return None if value in choices else f"choose one of {', '.join(map(str, choices))}"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if most is not None and not (number and 0 <= value <= most):
        return f"a number of at most {most:g}"
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int):
        return None if type(value) is int and value >= min(default, 1) else f"an integer of at least {min(default, 1)}"
    if isinstance(default, float):
        return None if number else "a number"
    if isinstance(default, str):
        return None if isinstance(value, str) else "a text"
    if isinstance(default, list):
        return None if isinstance(value, list) else "a list"
    return None


def _kept(config: TenantConfig) -> dict[str, Any]:
    """What a workload takes over from the tenant, as plain values."""
    names = ("task", "target_jobs", "head", "optimizer", "lr_scheduler")
    names += ("priority", "weight", "max_in_flight", "max_policy_staleness", "seed")
    schema = OmegaConf.to_container(OmegaConf.structured(config.schema))
    return {"schema": schema, **{name: copy.deepcopy(getattr(config, name)) for name in names}}


def _typed(values: dict[str, Any], key: str) -> TenantConfig:
    try:
        return tenant_from_dict(values, key)
    except ConfigError as error:
        raise InvalidRequest(f"the {key} cannot be used", error.problems) from error


def _refuse(what: str, problems: list[str]) -> None:
    if problems:
        raise InvalidRequest(what, problems)


def _given(request: Any) -> dict[str, Any]:
    """A request without the keys that are null: they are left out."""
    return {k: v for k, v in request.items() if v is not None} if isinstance(request, Mapping) else {}


def _request_problems(key: str, given: Any, known: tuple[str, ...]) -> list[str]:
    if not isinstance(given, Mapping):
        return [f"{key}: a mapping with {', '.join(known)} is required"]
    unknown = [f"{key}.{name}: unknown key; valid keys: {', '.join(known)}" for name in given if name not in known]
    return _plain_problems(key, given) or unknown


def _plain_problems(key: str, value: Any, depth: int = 0) -> list[str]:
    """Only plain JSON gets in. ``${...}`` would be resolved (environment variables, files), ``_target_`` imported."""
    if depth > MAX_DEPTH:
        return [f"{key}: nested deeper than {MAX_DEPTH} levels"]
    if isinstance(value, Mapping):
        names = [f"{key}.{name!r}: not a name" for name in value if not isinstance(name, str) or name.startswith("_")]
        return names or [p for n, part in value.items() for p in _plain_problems(f"{key}.{n}", part, depth + 1)]
    if isinstance(value, list | tuple):
        return [p for i, part in enumerate(value) for p in _plain_problems(f"{key}[{i}]", part, depth + 1)]
    if isinstance(value, str) and ("${" in value or value == "???" or len(value) > MAX_TEXT):
        return [f"{key}: plain text of at most {MAX_TEXT} characters, without ${{...}}"]
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{key}={value}: must be finite"]
    if value is not None and not isinstance(value, str | int | float | bool):
        return [f"{key}: {type(value).__name__} is not plain JSON"]
    return []
