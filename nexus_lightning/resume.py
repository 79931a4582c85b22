"""What a resumed run may change, and what it must keep: the saved configurations against the one it is started with.

A tenant's own configuration stands in the manifest of the payload it goes on from, everything else in the run folder's
``config.yaml``. What can follow is told in one line and takes effect from the next step or job; everything that cannot
is refused by name before anything is written.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from nexus_lightning.checkpoint import read_manifest
from nexus_lightning.config import OPTIMIZER_KEYS, ConfigError, NexusConfig, TenantConfig, known_keys, saved_tenant
from nexus_lightning.tenant import TenantSpec

NOTHING = "nothing"
#: Keys of the run that say where and as what it is started, not what it does.
_LAUNCH = ("ckpt_path", "output_dir", "run_name")


def changed_settings(config: NexusConfig, run_dir: Path, checkpoint: Path) -> list[str]:
    """``key: old -> new`` for every setting that this resume changes.

    Args:
        config: the run as it is to go on.
        run_dir: the folder of the run so far.
        checkpoint: its Lightning checkpoint, which names the tenants' payloads. A tenant that it does not name is new.

    Raises:
        ConfigError: something has changed that weights, moments or the data cursor cannot follow; all of it.
    """
    refused: list[str] = []
    followed: list[str] = []

    def compare(where: str, old: dict[str, Any], new: dict[str, Any], why: Any) -> None:
        for key in sorted(old.keys() | new.keys()):
            a, b = old.get(key, NOTHING), new.get(key, NOTHING)
            if a == b:
                continue
            reason = why(key)
            if reason is None:
                followed.append(f"{where}{key}: {_text(a)} -> {_text(b)}")
            else:
                refused.append(
                    f"{where}{key}={_text(b)}: the run in {run_dir} has {_text(a)}, and {reason}; set that, or start "
                    "a new run"
                )

    config_file = run_dir / "config.yaml"
    if config_file.is_file():
        old, _ = known_keys(yaml.safe_load(config_file.read_text()), NexusConfig)
        new = {key: value for key, value in asdict(config).items() if key in old and key not in ("tenants", *_LAUNCH)}
        compare("", flat(_plain({key: old[key] for key in new})), flat(_plain(new)), _run_reason)
    payloads = saved_state(checkpoint)["tenants"]
    for name, tenant in config.tenants.items():
        if name not in payloads:
            continue
        path = run_dir / payloads[name]
        manifest = read_manifest(path)
        known, _ = known_keys(manifest["config"], TenantConfig)  # of another version of this program, perhaps
        saved = saved_tenant(known, f"{path}/manifest.json config")
        before, after = flat(_plain(asdict(saved))), flat(_plain(asdict(tenant)))
        del before["seed"], after["seed"]  # what counts is the seed that comes of the run's and the tenant's
        where = f"tenants.{name}."
        compare(where, before, after, lambda key, saved=saved: _tenant_reason(key, saved))
        seed = TenantSpec.compile(name, tenant, config.seed).seed
        if seed != manifest["seed"] and not any(line.startswith("seed=") for line in refused):
            compare(where, {"seed": manifest["seed"]}, {"seed": seed}, _tenant_seed_reason)
    if refused:
        raise ConfigError(refused)
    return followed


def saved_state(checkpoint: Path) -> dict[str, Any]:
    """What a run's Lightning checkpoint says of its tenants.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return torch.load(checkpoint, weights_only=True, map_location="cpu")["nexus"]
    except Exception as error:  # torch's reader raises whatever a damaged file makes it do
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            [
                f"ckpt_path: {checkpoint} is damaged or not a run's checkpoint ({reason}); start a new run, with "
                "init_from.path of the tenants' payloads beside it"
            ]
        ) from error


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by their dotted keys."""
    values = {}
    for key, value in config.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return values


def _run_reason(key: str) -> str | None:
    """Why a setting of the run cannot follow; None: it can."""
    if key.startswith("backbone"):
        return "its heads read that backbone's features"
    if key == "seed":
        return "its random streams go on"
    return None


def _tenant_seed_reason(key: str) -> str:
    return "its random streams go on"


def _tenant_reason(key: str, saved: TenantConfig) -> str | None:
    """Why a setting of a tenant cannot follow; None: it can."""
    group, _, rest = key.partition(".")
    if group == "head":
        if rest not in OPTIMIZER_KEYS or rest == "kind":
            return "its weights are those of that head"
        return None if rest != "ema_decay" else "its average of the weights is one of that decay"
    if key in ("optimizer", "optimizer._target_"):
        return "its moments are those of that optimizer"
    if group == "schema":
        return "its weights and statistics are of that schema"
    if group == "task" or key == "algorithm" or key == "algorithm._target_":
        return "its optimizer and counters are of that work"
    if group == "init_from":
        return "its start is over"
    if group == "dataset" and rest != "record.workers" and not rest.startswith("augmentation"):
        counted = rest in ("batch_size", "batches_per_job")
        return "its data cursor counts jobs of that size" if counted else "its data cursor counts in that dataset"
    recorded = saved.dataset is not None and saved.dataset.record is not None
    if recorded and (key == "environment" or key.startswith("environment.simulator")):
        return "its dataset was recorded in that simulator"
    if saved.task == "rl" and key in ("environment", "environment.num_envs", "algorithm.chunks_per_job"):
        return "its data cursor counts jobs of that size"
    return None


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _text(value: Any) -> str:
    return value if value is NOTHING else json.dumps(value)
