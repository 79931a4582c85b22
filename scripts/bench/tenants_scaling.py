"""Memory and step time with 1 to 256 registered tenants on one frozen backbone.

Every tenant has its head, normaliser, optimizer with its moments, schedule and random state. A step is one training
job of one tenant on cached features, through :meth:`MultiTenantModule.training_step` as the loop calls it; jobs go
round all tenants. What a run does around it (publishing the head, the scheduler's work) is left out here.

Memory is the resident set of this process, after garbage collection and with free pages given back. ``payload`` is what
a tenant's checkpoint weighs on disk. A tenant that is also served (published to the inference queue, which keeps the
latest version and a spare) costs that much more, shown apart.

On a GPU idle tenants are kept in main memory: head, normaliser and optimizer state of the active one move to the device
for its job and back, which is part of the step's time when there is more than one tenant. On a CPU nothing moves.

    python scripts/bench/tenants_scaling.py --quick
    python scripts/bench/tenants_scaling.py --device cuda --dtype bf16 --backbone qwen3_vl_4b --head groot
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lightning as L
import psutil
import torch
from matplotlib.figure import Figure
from tensordict import TensorDict
from tqdm import tqdm

from nexus_lightning.backbone import Backbone
from nexus_lightning.checkpoint import write_payload
from nexus_lightning.inference.policies import ServedPolicies
from nexus_lightning.memory import module_bytes
from nexus_lightning.monitoring.banner import text_table
from nexus_lightning.queues.jobs import Job
from nexus_lightning.queues.training import BatchMeta
from nexus_lightning.run.leases import Lease, LeaseGroup
from nexus_lightning.run.module import MultiTenantModule
from nexus_lightning.schema import TenantSchema
from nexus_lightning.tenant import TenantSlot
from scripts.bench.common import (
    Spread,
    build_tenant,
    instructions,
    interleave,
    load_backbone,
    parser,
    prepare,
    random_batch,
    report,
)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    device = prepare(options)
    backbone = load_backbone(options.backbone, device, options.dtype)
    schema = TenantSchema(
        cameras=("base_camera",), image_size=options.image_size, state_dim=8, action_dim=7, chunk=8, execute=8
    )
    data = cached_features(backbone, schema, options.head, options.batch_size * options.steps)
    solo = Tenants(backbone, schema, options, ["solo"], data, device)
    slots: list[TenantSlot] = []
    results: list[dict[str, Any]] = []
    many = None
    for count in tqdm(options.tenants, desc="tenants", leave=False):
        del many  # its optimizers: the next one makes them anew
        many = Tenants(backbone, schema, options, [f"tenant_{i}" for i in range(count)], data, device, slots)
        slots = many.slots
        rss = resident_bytes()
        times = interleave({"one": solo.step, "many": many.step}, device, options.seconds / len(options.tenants))
        results.append(
            {
                "tenants": count,
                "resident_bytes": rss,
                "device_bytes": torch.cuda.memory_allocated(device) if device.type == "cuda" else 0,
                "step_ms": Spread.of(times["many"]).scaled(1e3),
                "over_one": Spread.ratio(times["many"], times["one"]),
            }
        )
    assert many is not None
    before = resident_bytes()
    served = many.publish_twice()
    per_tenant = {
        "weights_bytes": module_bytes(slots[0].head),
        "payload_bytes": payload_bytes(slots[0], backbone),
        "bytes": (results[-1]["resident_bytes"] - results[0]["resident_bytes"]) / max(1, len(slots) - 1),
        "served_bytes": (resident_bytes() - before) / len(slots),
    }
    copies = base_copies(backbone)
    del served
    _print(results, per_tenant, backbone)
    parts = {"per_tenant": per_tenant, "counts": results, "backbone_bytes": module_bytes(backbone)}
    figure = _figure(results, per_tenant) if options.png else None
    report("tenants_scaling", options, _summary(results, per_tenant, copies), parts, figure)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    out = parser(__doc__)
    out.add_argument("--head", default="mlp", help="a name in conf/head (default: mlp)")
    out.add_argument("--tenants", nargs="+", type=int, help="ascending (default: 1 4 16 64 256; quick: 1 16 256)")
    out.add_argument("--batch-size", type=int, default=16, help="rows per optimizer step (default: 16)")
    out.add_argument("--steps", type=int, default=2, help="optimizer steps per job (default: 2)")
    out.add_argument("--image-size", type=int, default=128, help="(default: 128)")
    out.add_argument("--seconds", type=float, help="of timing in all, at least 3 rounds each (default: 75; quick: 15)")
    options = out.parse_args(arguments)
    options.tenants = options.tenants or ([1, 16, 256] if options.quick else [1, 4, 16, 64, 256])
    options.seconds = options.seconds if options.seconds is not None else 15.0 if options.quick else 75.0
    return options


def cached_features(backbone: Backbone, schema: TenantSchema, head: str, rows: int) -> TensorDict:
    """The partition of a job whose features are computed: ``features``, ``state``, ``actions``, ``is_pad``."""
    slot, _ = build_tenant("probe", schema, head, backbone, batch_size=rows, steps=1)
    batch = random_batch(schema, rows, seed=0)
    spec = slot.head.feature_spec
    feature = backbone(batch["observation"].to(backbone.device), instructions(rows, 0), schema, (spec.kind,))
    out = batch.exclude("observation")
    out["features"], out["state"] = feature.select(spec).to("cpu"), batch["observation", "state"]
    return out  # pyright: ignore[reportReturnType]


class Tenants:
    """Registered tenants on one module, each trained by one job already; :meth:`step` trains the next one's.

    Args:
        backbone: shared.
        schema: of all tenants.
        options: head, batch size, steps.
        names: of the tenants.
        data: of every job.
        device: where the active tenant trains.
        known: slots of the first names that exist already.
    """

    def __init__(
        self,
        backbone: Backbone,
        schema: TenantSchema,
        options: argparse.Namespace,
        names: list[str],
        data: TensorDict,
        device: torch.device,
        known: list[TenantSlot] | None = None,
    ) -> None:
        self.device, self.data = device, data.to(device)
        sizes = {"batch_size": options.batch_size, "steps": 10**6}
        self.slots = list(known or [])
        for name in names[len(self.slots) :]:
            self.slots.append(build_tenant(name, schema, options.head, backbone, **sizes)[0])
        self.module = MultiTenantModule(backbone, {slot.name: slot for slot in self.slots})
        trainer = L.Trainer(
            accelerator="cpu" if device.type == "cpu" else "gpu",
            devices=1,
            max_epochs=1,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(self.module, train_dataloaders=map(self._group, self.slots))
        backbone.to(device)  # Lightning takes its modules back to the CPU
        self._turn = itertools.cycle(self.slots)
        self._moves = device.type != "cpu" and len(self.slots) > 1
        if not self._moves:
            move(self.slots[0], device)

    def step(self) -> None:
        """One job of the tenant whose turn it is."""
        slot = next(self._turn)
        if self._moves:
            move(slot, self.device)
        (outcome,) = self.module.training_step(self._group(slot), 0)["outcomes"]
        if outcome.failure is not None:
            raise RuntimeError(f"tenant {slot.name!r}: {outcome.failure.reason}\n{outcome.failure.details}")
        if self._moves:
            move(slot, torch.device("cpu"))

    def publish_twice(self) -> ServedPolicies:
        """Every head is published, and again a version later: as a run does, which keeps a spare from then on."""
        policies = ServedPolicies(self.module.backbone)
        for slot in self.slots:
            for version in (slot.policy_version, slot.policy_version + 1):
                policies.publish(slot.name, version, slot.serving_head, slot.normalizer, slot.spec.schema)
        return policies

    def _group(self, slot: TenantSlot) -> LeaseGroup:
        rows = len(self.data)
        job = Job(
            job_id=f"{slot.name}-{slot.jobs_completed}",
            tenant_id=slot.name,
            task_type="sft",
            policy_key=slot.name,
            partition_id=slot.name,
            sample_count=rows,
            domain="",
            schema_signature=slot.spec.schema.signature,
            priority=0,
            created_seq=slot.jobs_completed,
            metadata={"cursor": slot.jobs_completed + 1, "features": True},
        )
        meta = BatchMeta(job.partition_id, slot.name, ("features",), tuple(range(rows)), "train", 1)
        return LeaseGroup([Lease(job, meta, self.data)])


def move(slot: TenantSlot, device: torch.device) -> None:
    """Head, normaliser, average and optimizer state of a tenant to a device; parameters keep their identity."""
    for module in (slot.head, slot.normalizer, *([] if slot.ema is None else [slot.ema])):
        module.to(device)
    assert slot.optimizer is not None
    for state in slot.optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = value.to(device)


def resident_bytes() -> int:
    """Of this process, without garbage and without free pages that the allocator holds back (glibc)."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return psutil.Process().memory_info().rss


def payload_bytes(slot: TenantSlot, backbone: Backbone) -> int:
    """What one saved version of the tenant weighs on disk."""
    assert slot.optimizer is not None
    with tempfile.TemporaryDirectory() as folder:
        path = write_payload(
            Path(folder),
            slot.name,
            slot.policy_version,
            tensors=slot.tensors(),
            optimizer=slot.optimizer.state_dict(),
            rng=slot.rng.state,
            state=slot.state(),
            manifest=slot.manifest(backbone.config, backbone.fingerprint),
        )
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def base_copies(backbone: Backbone, largest: int = 5) -> int:
    """How often the backbone's weights are in memory: storages of any live tensor equal to one of its largest ones."""
    weights = sorted(backbone.parameters(), key=lambda p: p.numel(), reverse=True)[:largest]
    gc.collect()
    alive = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    counts = []
    for weight in weights:
        like = [value for value in alive if value.shape == weight.shape and value.dtype == weight.dtype]
        same = [value for value in like if torch.equal(value.to(weight.device), weight)]
        counts.append(len({value.untyped_storage().data_ptr() for value in same}))
    return max(counts)


# ------------------------------------------------------------------------------------------------------------- reports


def _print(results: list[dict[str, Any]], per_tenant: dict[str, float], backbone: Backbone) -> None:
    first = results[0]["resident_bytes"]
    rows = [
        (
            r["tenants"],
            _mb(r["resident_bytes"]),
            _mb(r["resident_bytes"] - first),
            _mb((r["tenants"] - results[0]["tenants"]) * per_tenant["payload_bytes"]),
            r["step_ms"],
            r["over_one"],
            r["over_one"].count,
        )
        for r in results
    ]
    print(f"backbone {_mb(module_bytes(backbone))} MB, payload of a tenant {_mb(per_tenant['payload_bytes'])} MB")
    titles = ("resident MB", "above the first", "payloads", "ms per job", "over one tenant", "rounds")
    print(text_table(("tenants", *titles), rows))
    print(
        f"a tenant: {_mb(per_tenant['bytes'])} MB resident, and {_mb(per_tenant['served_bytes'])} MB more once it is "
        "served; medians (quartiles) of ratios within a round"
    )


def _mb(count: float) -> str:
    return f"{count / 1e6:.2f}"


def _summary(results: list[dict[str, Any]], per_tenant: dict[str, float], copies: int) -> dict[str, float]:
    """``step_time_<n>_over_1`` for every number of tenants beyond one."""
    payload = per_tenant["payload_bytes"]
    return {
        **{f"step_time_{r['tenants']}_over_1": r["over_one"].median for r in results if r["tenants"] > 1},
        "bytes_per_tenant_over_payload": per_tenant["bytes"] / payload,
        "served_bytes_per_tenant_over_payload": (per_tenant["bytes"] + per_tenant["served_bytes"]) / payload,
        "base_copies": float(copies),
    }


def _figure(results: list[dict[str, Any]], per_tenant: dict[str, float]) -> Figure:
    """Left: memory above that of one tenant, and what the payloads weigh. Right: time per job over that of one."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    tenants = [r["tenants"] for r in results]
    first = results[0]
    left.plot(tenants, [(r["resident_bytes"] - first["resident_bytes"]) / 1e6 for r in results], "o-", label="resident")
    payloads = [(t - first["tenants"]) * per_tenant["payload_bytes"] / 1e6 for t in tenants]
    left.plot(tenants, payloads, ":", color="grey", label="payloads")
    left.set_ylabel("MB above one tenant")
    left.legend(fontsize=8)
    ratios = [r["over_one"] for r in results]
    errors = [[s.median - s.q25 for s in ratios], [s.q75 - s.median for s in ratios]]
    right.errorbar(tenants, [s.median for s in ratios], errors, fmt="o-", capsize=3)
    right.axhline(1.0, color="grey", linewidth=0.8)
    right.set_xscale("log", base=2)
    right.set_xticks(tenants, [str(t) for t in tenants])
    right.set_ylim(bottom=0)
    right.set_ylabel("time per job over that of one tenant")
    for axes in (left, right):
        axes.set_xlabel("registered tenants")
    return figure


if __name__ == "__main__":
    for name in ("lightning.pytorch", "nexus_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    raise SystemExit(main())
