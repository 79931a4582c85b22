"""Where a server step goes: shared forward, head forward, backward and update, for four ways to get the features.

A server step trains every tenant once on its own minibatch, as the loop does: features, the head's loss, backward,
clipping, its own fused AdamW. Timed are jobs of several such steps, as the training queue hands them out.

    serial    one backbone call per tenant
    grouped   one pass for all tenants (nexus_lightning.features.grouping)
    reuse     no backbone: the job carries float16 features from the feature store, widened to float32
    head-only features ready in float32: what no way of getting them can beat (the limit)

Reading a job from the store is the producers' part, as decoding images is with the other ways; its share per step is
shown beside.

Paper: figure 11.

    python scripts/bench/step_breakdown.py --quick
    python scripts/bench/step_breakdown.py --device cuda --dtype bf16 --backbone qwen3_vl_4b --image-size 224
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from matplotlib.figure import Figure
from tensordict import TensorDict
from tqdm import tqdm

from nexus_lightning.backbone import Backbone, VLAFeature, sharing_key
from nexus_lightning.features.grouping import EncodeRequest, EncodeStats, encode_together
from nexus_lightning.features.reuse import full_precision
from nexus_lightning.features.store import FeatureEntry, FeatureStore, StoreKey
from nexus_lightning.monitoring.banner import text_table
from nexus_lightning.producers.demonstrations import string_column
from nexus_lightning.schema import TenantSchema
from scripts.bench.common import (
    Spread,
    Stopwatch,
    build_tenant,
    instructions,
    interleave,
    load_backbone,
    parser,
    prepare,
    random_batch,
    report,
    update,
)

PARTS = ("shared forward", "head forward", "backward + update")
MODES = ("serial", "grouped", "reuse", "head-only")
#: Short names of heads in the summary.
SHORT = {"flow_matching": "flow"}


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    device = prepare(options)
    backbone = load_backbone(options.backbone, device, options.dtype)
    results: dict[str, Any] = {}
    for head in tqdm(options.heads, desc="step breakdown", leave=False):
        results[head] = measure(Server(backbone, head, options), options.job, options.seconds / len(options.heads))
    summary = _summary(results)
    _print(results, options)
    report("step_breakdown", options, summary, results, _figure(results, options) if options.png else None)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    out = parser(__doc__)
    out.add_argument("--heads", nargs="+", default=["mlp", "flow_matching"], help="names in conf/head")
    out.add_argument("--tenants", type=int, default=8, help="(default: 8)")
    out.add_argument("--batch", type=int, default=4, help="rows per tenant and step (default: 4)")
    out.add_argument("--job", type=int, help="steps per training job (default: 8; quick: 2)")
    out.add_argument("--image-size", type=int, default=128, help="(default: 128)")
    out.add_argument("--seconds", type=float, help="of timing in all, at least 3 rounds (default: 140; quick: 40)")
    options = out.parse_args(arguments)
    options.job = options.job or (2 if options.quick else 8)
    options.seconds = options.seconds if options.seconds is not None else 40.0 if options.quick else 140.0
    return options


class Server:
    """The actor's side of a run with equal tenants, each with data of its own in memory and in the feature store.

    Each of the four ways trains one job of every tenant: the same number of minibatches, cut out of the job as the loop
    does it.
    """

    def __init__(self, backbone: Backbone, head: str, options: argparse.Namespace) -> None:
        schema = TenantSchema(
            cameras=("base_camera",), image_size=options.image_size, state_dim=8, action_dim=7, chunk=8, execute=8
        )
        self.backbone, self.schema = backbone, schema
        self.watch = Stopwatch(backbone.device)
        self.stats = EncodeStats()
        self.tenants = [
            build_tenant(f"tenant{t}", schema, head, backbone, batch_size=options.batch, steps=10**6)
            for t in range(options.tenants)
        ]
        self.spec = self.tenants[0][0].head.feature_spec
        rows = options.batch * options.job
        self.raw = [self._raw_job(t, rows) for t in range(options.tenants)]
        store, fingerprint = FeatureStore(None, budget_bytes=2**40), backbone.fingerprint
        self.entries = [self._entry(store, fingerprint, t) for t in range(options.tenants)]
        self.stored = [self._stored_job(t) for t in range(options.tenants)]
        self.ready = [
            [full_precision(batch) for batch in objective.minibatches(job)]
            for (_, objective), job in zip(self.tenants, self.stored, strict=True)
        ]

    def _raw_job(self, tenant: int, rows: int) -> TensorDict:
        job = random_batch(self.schema, rows, seed=tenant)
        job["language_instruction"] = string_column(instructions(rows, tenant))
        return job.to(self.backbone.device)

    def _entry(self, store: FeatureStore, fingerprint: str, tenant: int) -> FeatureEntry:
        def compute(rows: torch.Tensor, view: int) -> TensorDict:
            del view
            return TensorDict({"features": self._encode(self.raw[tenant][rows])}, [len(rows)])

        prefix, action_tokens = sharing_key(self.schema, self.spec.kind)
        key = StoreKey(fingerprint, prefix, action_tokens, self.spec.kind, f"tenant{tenant}", "1")
        return store.entry(key, len(self.raw[tenant]), compute)

    def _stored_job(self, tenant: int) -> TensorDict:
        """One read and one transfer for all minibatches of a job."""
        raw = self.raw[tenant]
        job = raw.select("actions", "is_pad")
        job["state"] = raw["observation", "state"]
        job["features"] = self.entries[tenant].read(torch.arange(len(raw)))["features"].to(self.backbone.device)
        return job

    def read(self) -> None:
        """What the producers do for one job of every tenant with stored features."""
        for tenant in range(len(self.tenants)):
            self._stored_job(tenant)

    def serial(self) -> None:
        for batches in self._minibatches(self.raw):
            for tenant, batch in enumerate(batches):
                self.watch.part("shared forward")
                self._train(tenant, self._with(batch, self._encode(batch)))

    def grouped(self) -> None:
        for batches in self._minibatches(self.raw):
            requests = [
                EncodeRequest(batch["observation"], list(batch["language_instruction"]), self.schema, self.spec)
                for batch in batches
            ]
            for tenant, features in enumerate(encode_together(self.backbone, requests, self.stats)):
                self.watch.part("shared forward")
                self._train(tenant, self._with(batches[tenant], features))

    def reuse(self) -> None:
        for batches in self._minibatches(self.stored):
            for tenant, batch in enumerate(batches):
                self.watch.part("shared forward")
                self._train(tenant, full_precision(batch))

    def head_only(self) -> None:
        for batches in zip(*self.ready, strict=True):
            for tenant, batch in enumerate(batches):
                self._train(tenant, batch)

    def _minibatches(self, jobs: list[TensorDict]) -> Iterator[tuple[TensorDict, ...]]:
        """The next minibatch of every tenant, until the jobs end."""
        self.watch.part("shared forward")
        cut = [objective.minibatches(job) for (_, objective), job in zip(self.tenants, jobs, strict=True)]
        for batches in zip(*cut, strict=True):
            yield batches
            self.watch.part("shared forward")

    def _encode(self, batch: TensorDict) -> VLAFeature:
        observation, texts = batch["observation"], list(batch["language_instruction"])
        return self.backbone(observation, texts, self.schema, (self.spec.kind,)).select(self.spec)

    def _with(self, batch: TensorDict, features: VLAFeature) -> TensorDict:
        rows = batch.exclude("language_instruction", "observation")
        rows["features"], rows["state"] = features, batch["observation", "state"]
        return full_precision(rows)

    def _train(self, tenant: int, batch: TensorDict) -> None:
        slot, objective = self.tenants[tenant]
        self.watch.part("head forward")
        with slot.rng.scope():
            loss = objective.loss(batch, slot.jobs_completed)["loss"]
            self.watch.part("backward + update")
            update(slot, loss)


def measure(server: Server, job: int, seconds: float) -> dict[str, Any]:
    """Times per step, parts and ratios of the four ways; jobs of ``job`` minibatches."""
    ways = dict(zip(MODES, (server.serial, server.grouped, server.reuse, server.head_only), strict=True))
    parts: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}

    def watched(mode: str) -> Callable[[], None]:
        def run() -> None:
            ways[mode]()
            parts[mode].append(server.watch.seconds())

        return run

    functions: dict[str, Callable[[], None]] = {mode: watched(mode) for mode in MODES}
    times = interleave({**functions, "read": server.read}, server.backbone.device, seconds)
    out: dict[str, Any] = {}
    for mode in MODES:
        timed = parts[mode][1:]  # the first round warms up
        split = {part: Spread.of([p.get(part, 0.0) for p in timed]).scaled(1e3 / job) for part in PARTS}
        out[mode] = {"step_ms": Spread.of(times[mode]).scaled(1e3 / job), "parts_ms": split}
    out["read_ms"] = Spread.of(times["read"]).scaled(1e3 / job)
    out["grouped_speedup"] = Spread.ratio(times["serial"], times["grouped"])
    out["reuse_speedup"] = Spread.ratio(times["serial"], times["reuse"])
    out["reuse_over_head_only"] = Spread.ratio(times["reuse"], times["head-only"])
    return out


def _summary(results: dict[str, Any]) -> dict[str, float]:
    """``<ratio>_<head>`` for every head; ``reuse_over_head_only``: of the first head."""
    summary: dict[str, float] = {}
    for head, result in results.items():
        for ratio in ("reuse_speedup", "grouped_speedup", "reuse_over_head_only"):
            summary[f"{ratio}_{SHORT.get(head, head)}"] = result[ratio].median
        summary[f"read_ms_{SHORT.get(head, head)}"] = result["read_ms"].median
    summary["reuse_over_head_only"] = next(iter(results.values()))["reuse_over_head_only"].median
    return summary


def _print(results: dict[str, Any], options: argparse.Namespace) -> None:
    print(f"{options.backbone}: one server step of {options.tenants} tenants x batch {options.batch}, ms (quartiles)")
    rows = [
        (head, mode, *(result[mode]["parts_ms"][part] for part in PARTS), result[mode]["step_ms"])
        for head, result in results.items()
        for mode in MODES
    ]
    print(text_table(("head", "features", *PARTS, "step"), rows))
    print("\nratios within a round (quartiles)")
    ratios = ("grouped_speedup", "reuse_speedup", "reuse_over_head_only")
    rows = [
        (head, *(result[ratio] for ratio in ratios), result["reuse_speedup"].count) for head, result in results.items()
    ]
    print(text_table(("head", "serial / grouped", "serial / reuse", "reuse / head-only", "rounds"), rows))


def _figure(results: dict[str, Any], options: argparse.Namespace) -> Figure:
    """A panel per head: a stacked bar per mode."""
    figure = Figure(figsize=(4.6 * len(results), 3.8), layout="constrained")
    for axes, (head, result) in zip(figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True):
        bottom = [0.0] * len(MODES)
        for part in PARTS:
            heights = [result[mode]["parts_ms"][part].median for mode in MODES]
            axes.bar(MODES, heights, bottom=bottom, label=part)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        for x, height in enumerate(bottom):
            axes.annotate(f"{height:.0f}", (x, height), ha="center", va="bottom", fontsize=8)
        axes.set_ylim(top=1.3 * max(bottom))  # room for the legend
        axes.set_title(f"{head} on {options.backbone}", fontsize=10)
    figure.axes[0].set_ylabel(f"ms per step, {options.tenants} tenants x batch {options.batch}")
    figure.axes[0].legend(fontsize=8)
    return figure


if __name__ == "__main__":
    raise SystemExit(main())
