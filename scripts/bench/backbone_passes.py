"""How often the backbone sees an observation: real runs of an SFT tenant (3 epochs) and a PPO tenant (4 epochs).

``reuse``: as the product trains. Features of demonstrations are computed once and kept; features computed while acting
travel with the rollout through all PPO epochs.

``serial``: the baseline, which encodes every minibatch. For SFT that is ``features.reuse=never``. For PPO the product
has no such mode (without reuse it encodes a rollout once more, not once per epoch), so this script makes its objective
leave the encoding to the minibatches: one pass while acting and one per epoch.

The counter is the ``backbone_passes_per_observation`` of the runs' ``summary.json``; next to it the rows that went into
``backbone.encode``, counted there. An observation at the cut end of a rollout is asked for its value once and trains
nothing, so the serial PPO counter stays a little below 1 + epochs; ``ppo_serial_per_decision`` leaves those out.

    python scripts/bench/backbone_passes.py --quick
    python scripts/bench/backbone_passes.py --backbone tiny
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from nexus_lightning import trainer
from nexus_lightning.backbone import Backbone
from nexus_lightning.config import NexusConfig, compose_config, dataset_root, schema_of
from nexus_lightning.monitoring.banner import text_table
from nexus_lightning.objectives.policy_gradient import PolicyGradient
from nexus_lightning.producers.demonstrations import open_dataset
from nexus_lightning.run.runtime import Runtime
from scripts.bench.common import ROOT, load_backbone, parser, prepare, report

#: task -> tenant template in conf/tenant.
TENANTS = {"sft": "toy_sft", "ppo": "toy"}


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    device = prepare(options)
    backbone = load_backbone(options.backbone, device, options.dtype)
    cases = [(task, mode) for task in TENANTS for mode in ("reuse", "serial")]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for task, mode in tqdm(cases, desc="backbone passes", leave=False):
            config = config_of(task, mode, options, Path(folder))
            results.append({"task": task, "mode": mode, **run(config, TENANTS[task], mode, backbone, device)})
    _print(results, options)
    report("backbone_passes", options, _summary(results), results, _figure(results) if options.png else None)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    out = parser(__doc__)
    out.add_argument("--sft-epochs", type=int, default=3, help="over the demonstrations (default: 3)")
    out.add_argument("--ppo-epochs", type=int, default=4, help="over every rollout (default: 4)")
    out.add_argument("--episodes", type=int, help="demonstrations that are recorded (default: 60; quick: 20)")
    out.add_argument("--jobs", type=int, help="rollouts that are trained (default: 10; quick: 2)")
    options = out.parse_args(arguments)
    options.episodes = options.episodes or (20 if options.quick else 60)
    options.jobs = options.jobs or (2 if options.quick else 10)
    return options


def config_of(task: str, mode: str, options: argparse.Namespace, folder: Path) -> NexusConfig:
    """One tenant of ``conf/``, without evaluations: only training asks for features."""
    name = TENANTS[task]
    overrides = [
        f"+tenants=[{name}]",
        f"output_dir={folder}/outputs",
        f"data_dir={folder}/data",
        "trainer.enable_progress_bar=false",
        f"placement.accelerator={'cpu' if options.device == 'cpu' else 'gpu'}",
        f"tenants.{name}.eval.episodes=0",
        f"tenants.{name}.features.reuse={'always' if task == 'ppo' and mode == 'reuse' else _REUSE[mode]}",
    ]
    config = compose_config(ROOT / "conf", overrides)
    tenant = config.tenants[name]
    if task == "ppo":
        assert tenant.algorithm is not None
        tenant.algorithm.epochs, tenant.target_jobs = options.ppo_epochs, options.jobs
        return config
    assert tenant.dataset is not None and tenant.dataset.record is not None
    tenant.dataset.record.episodes, tenant.dataset.record.workers = options.episodes, 1
    with _silence():
        trainer.record_datasets(config)
    root = dataset_root(tenant, config.data_dir)
    frames = len(open_dataset(tenant.dataset, schema_of(tenant.schema), root))
    # a job is one epoch, to the row
    tenant.dataset.batch_size = max(size for size in range(1, tenant.dataset.batch_size + 1) if frames % size == 0)
    tenant.dataset.batches_per_job = frames // tenant.dataset.batch_size
    tenant.target_jobs = options.sft_epochs
    return config


_REUSE = {"reuse": "auto", "serial": "never"}


def run(config: NexusConfig, tenant: str, mode: str, backbone: Backbone, device: torch.device) -> dict[str, Any]:
    """Train and count.

    Returns:
        ``passes`` (the product's counter), ``observed`` and ``encoded`` (what it divides), ``rows`` into
        ``backbone.encode`` as counted there, ``decisions`` (rows of all trained jobs), ``seconds``.
    """
    runtimes: list[Runtime] = []

    class Kept(Runtime):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with counting(backbone):  # it encodes one black image per RL tenant to learn a feature's size
                super().__init__(*args, **kwargs)
            runtimes.append(self)

    # False: as SFT, whose minibatches are encoded one by one; with reuse there is nothing left to encode
    per_minibatch = patch.object(PolicyGradient, "encode_whole_job", mode != "serial")
    start_s = time.perf_counter()
    with patch.object(trainer, "Runtime", Kept), per_minibatch, counting(backbone) as rows, _silence():
        summary = trainer.train(config, backbone)
    seconds = time.perf_counter() - start_s
    backbone.to(device)  # Lightning takes its modules back to the CPU
    if summary["tenants"][tenant]["quarantined"]:
        raise RuntimeError(f"tenant {tenant!r} was quarantined: {summary['tenants'][tenant]['quarantined']}")
    written = json.loads((Path(summary["run_dir"]) / "summary.json").read_text())
    (runtime,) = runtimes
    passes, jobs = runtime.slots[tenant].passes, runtime.scheduler.history
    return {
        "passes": written["backbone_passes_per_observation"][tenant],
        "observed": passes.observed,
        "encoded": passes.encoded,
        "rows": sum(rows),
        "decisions": sum(job.sample_count for job in jobs if job.state == "completed"),
        "seconds": seconds,
    }


@contextlib.contextmanager
def counting(backbone: Backbone) -> Iterator[list[int]]:
    """Rows of every call of ``backbone.encode`` inside; the innermost one counts."""
    rows: list[int] = []
    encode = type(backbone).encode

    def counted(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(inputs.batch_size[0])
        return encode(backbone, inputs, *args, **kwargs)

    before = backbone.__dict__.get("encode")
    backbone.__dict__["encode"] = counted
    try:
        yield rows
    finally:
        if before is None:
            del backbone.__dict__["encode"]
        else:
            backbone.__dict__["encode"] = before


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """A run prints its banner and table; here they would hide the figures."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


# ------------------------------------------------------------------------------------------------------------- reports


def _print(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    epochs = {"sft": options.sft_epochs, "ppo": options.ppo_epochs}
    rows = [
        (
            r["task"],
            epochs[r["task"]],
            r["mode"],
            r["observed"],
            r["rows"],
            r["decisions"],
            f"{r['passes']:.3f}",
            f"{r['seconds']:.1f}",
        )
        for r in results
    ]
    titles = ("run", "epochs", "mode", "observations", "rows encoded", "rows trained", "passes per observation", "s")
    print(text_table(titles, rows))


def _summary(results: list[dict[str, Any]]) -> dict[str, float]:
    """The counters. ``encode_rows_over_counter``: rows that ``encode`` saw over what the counters say, all runs."""
    named = {(r["task"], r["mode"]): r for r in results}
    serial = named["ppo", "serial"]
    cut = serial["observed"] - serial["decisions"]  # ends of rollouts: encoded once, trained never
    return {
        "sft": named["sft", "reuse"]["passes"],
        "ppo": named["ppo", "reuse"]["passes"],
        "sft_serial": named["sft", "serial"]["passes"],
        "ppo_serial": serial["passes"],
        "ppo_serial_per_decision": (serial["encoded"] - cut) / serial["decisions"],
        "encode_rows_over_counter": sum(r["rows"] for r in results) / sum(r["encoded"] for r in results),
    }


def _figure(results: list[dict[str, Any]]) -> Figure:
    """A bar per run."""
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.subplots()
    labels = [f"{r['task'].upper()}\n{r['mode']}" for r in results]
    colors = ["C0" if r["mode"] == "reuse" else "C7" for r in results]
    bars = axes.bar(labels, [r["passes"] for r in results], color=colors)
    axes.bar_label(bars, fmt="%.2f")
    axes.margins(y=0.1)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_ylabel("backbone passes per observation")
    return figure


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    raise SystemExit(main())
