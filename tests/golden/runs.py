"""The golden runs: what they are made of, how they are played, what is kept of them.

Every run has one tenant and keeps one job in flight, so nothing in it depends on how fast a thread is.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from nexus_lightning import trainer
from nexus_lightning.checkpoint import read_payload, resolve_payload, tensors_digest
from nexus_lightning.config import NexusConfig, compose_config

FOLDER = Path(__file__).resolve().parent
CONF = FOLDER.parent.parent / "conf"

#: Of every run. The backbone is a fake: its bits depend on torch alone, and nothing has to be downloaded.
COMMON = (
    "backbone._target_=fakes.FakeBackbone",
    *(f"~backbone.{key}" for key in ("pretrained", "blind", "cached_instructions")),
    "logger=csv",
    "trainer.enable_progress_bar=false",
)
#: Of every tenant.
TENANT = (
    "tenants.golden.target_jobs=3",
    "tenants.golden.max_in_flight=1",
    "tenants.golden.eval.episodes=4",
    "tenants.golden.eval.every_n_jobs=null",
    "tenants.golden.eval.at_start=false",
    "tenants.golden.eval.video=false",
)
DATASET = (
    "tenants.golden.dataset.record.workers=1",
    "tenants.golden.dataset.record.episodes=6",
    "tenants.golden.dataset.batch_size=15",  # two ranks cannot share it equally
    "tenants.golden.dataset.batches_per_job=4",
)
ROLLOUTS = (
    "tenants.golden.max_policy_staleness=0",
    "tenants.golden.environment.num_envs=4",
    "tenants.golden.algorithm.minibatch_size=12",
    "tenants.golden.algorithm.epochs=2",
)
ENCODED = ("tenants.golden.features.reuse=never",)
WARMED_UP = ("tenants.golden.algorithm.value_warmup_jobs=1",)

#: Name -> the tenant's file in conf/tenant and what else makes the run. Heads keep what they draw: it is golden, too.
#: Two runs encode observations in the training step, one clips against the policy at the start of a job.
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sft_mlp": ("toy_sft", DATASET),
    "sft_flow": ("toy_sft", (*DATASET, *ENCODED, "tenants.golden.head=flow_matching")),
    "ppo": ("toy", ROLLOUTS),
    "grpo": (
        "toy",
        (
            *ROLLOUTS,
            "tenants.golden.algorithm.name=grpo",
            "tenants.golden.algorithm.group_size=2",
            "tenants.golden.algorithm.proximal=true",
        ),
    ),
    "reinforce": (
        "toy",
        (*ROLLOUTS, *ENCODED, "tenants.golden.algorithm.name=reinforce", "tenants.golden.algorithm.epochs=1"),
    ),
    "awr": ("toy_offline", (*DATASET, *WARMED_UP)),
    "iql": ("toy_offline", (*DATASET, *WARMED_UP, "tenants.golden.algorithm.name=iql")),
    "cotraining": (
        "toy",
        (
            *ROLLOUTS,
            "+tenant@tenants.demonstrations=toy_sft",  # whose dataset it trains on, see configured()
            *(line.replace("golden", "demonstrations") for line in DATASET),
            "tenants.golden.algorithm.sft_weight=0.5",
        ),
    ),
}


def overrides(name: str) -> list[str]:
    """A run as arguments of ``train.py``."""
    tenant, own = RUNS[name]
    return [*COMMON, f"+tenant@tenants.golden={tenant}", *TENANT, *own]


def configured(name: str, folder: Path) -> NexusConfig:
    """A run that writes into ``folder``; recordings there are shared."""
    own = [f"output_dir={folder}/outputs", f"data_dir={folder}/data", f"run_name={name}"]
    config = compose_config(CONF, [*overrides(name), *own])
    if demonstrations := config.tenants.pop("demonstrations", None):  # Hydra merges no group into a null dataset
        config.tenants["golden"].dataset = demonstrations.dataset
    return config


def play(folder: Path, *names: str) -> dict[str, Any]:
    """The runs in the ranks that call this, one after the other: name -> what is golden of it (see :func:`kept`)."""
    trainer.write_report = lambda run_dir: None  # pictures take seconds, and nothing of them is kept
    done = {}
    for name in names:
        print(f"=== {name}", flush=True)
        done[name] = kept(trainer.train(configured(name, folder)))
    return done


def kept(summary: dict[str, Any]) -> dict[str, Any]:
    """``payloads``: per tenant digests of head, optimizer and random state of the last payload, and its counters;
    ``columns``: what was logged, per column of the metrics in the order of its rows."""
    run_dir, payloads = Path(summary["run_dir"]), {}
    for tenant in summary["tenants"]:
        payload = read_payload(resolve_payload(run_dir / "tenants" / tenant))
        assert payload.rng is not None
        moments = {f"{i}.{k}": torch.as_tensor(v) for i, s in payload.optimizer["state"].items() for k, v in s.items()}
        payloads[tenant] = {
            "head": tensors_digest(payload.tensors),
            "optimizer": tensors_digest(moments),
            "rng": tensors_digest({"rng": payload.rng}),
            **{key: value for key, value in sorted(payload.state.items()) if type(value) is int},
        }
    columns: dict[str, list[float]] = {}
    with (run_dir / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for column, value in row.items():
                if value and column.startswith(("train/", "eval/")):
                    columns.setdefault(column, []).append(float(f"{float(value):.9g}"))
    return {"payloads": payloads, "columns": dict(sorted(columns.items()))}


def machine() -> dict[str, str]:
    """What decides how a sum is rounded and what a recording holds."""
    packages = {name: version(name) for name in ("torch", "torchrl", "numpy", "lerobot", "av")}
    return {**packages, "cpu_capability": torch.backends.cpu.get_cpu_capability(), "cpu": _cpu()}


def _cpu() -> str:
    """Model, and family and model number: virtual machines give many CPUs one name."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return " / ".join(facts.get(key, "unknown") for key in ("model name", "cpu family", "model"))


def path_of(name: str) -> Path:
    """Where a run's golden file lies."""
    return FOLDER / f"{name}.json"


def written(golden: dict[str, Any]) -> str:
    """As JSON with one line per value (a column is one): a diff shows what has changed."""
    return "\n".join(_lines(golden)) + "\n"


def _lines(value: Any, indent: str = "", key: str = "", comma: str = "") -> Iterator[str]:
    start = f"{indent}{json.dumps(key)}: " if key else indent
    texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
    if not texts and not isinstance(value, dict):
        yield f"{start}{json.dumps(value)}{comma}"
        return
    yield start + ("[" if texts else "{")
    for place, (name, inner) in enumerate([("", item) for item in value] if texts else value.items(), 1):
        yield from _lines(inner, f"{indent}  ", name, "," if place < len(value) else "")
    yield indent + ("]" if texts else "}") + comma
