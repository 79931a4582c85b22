"""What a placement costs: time of a job, memory per rank and bytes that ranks send each other.

Placements, each training the same tenants with the same global batches:

- ``single``       one rank with everything; the other ranks of the launch wait meanwhile
- ``ddp``          backbone and heads whole on every rank
- ``fsdp2``        backbone in shards, heads whole
- ``fsdp2_heads``  backbone and heads in shards

One launch by torchrun per number of ranks holds all of them and times them in turn, so ratios are of the same rounds.
A job trains one of several registered tenants, from features (nothing of the backbone runs) and from images.

Bytes are those of tensors that one rank puts into collectives per optimizer step, taken from torch's dispatcher; the
script asserts that a job from features sends the active head's alone, however many tenants there are, and that no
placement but a sharded backbone sends more for images. Memory is what a rank holds between two jobs: its part of the
backbone, heads, Adam moments and the whole replicas of sharded heads. Weights that FSDP2 gathers for a forward come on
top for its duration (``gathered``, from the plan).

    python scripts/bench/placement.py --quick
    python scripts/bench/placement.py --device cuda --dtype bf16 --backbone qwen3_vl_4b --head groot --ranks 1 8
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from matplotlib.figure import Figure
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from nexus_lightning.backbone import Backbone
from nexus_lightning.config import NexusConfig
from nexus_lightning.memory import estimate
from nexus_lightning.monitoring.banner import text_table
from nexus_lightning.placement.plan import Devices, Plan, resolve
from nexus_lightning.queues.jobs import Job
from nexus_lightning.queues.training import BatchMeta
from nexus_lightning.ranks import Ranks
from nexus_lightning.run.leases import Lease, LeaseGroup
from nexus_lightning.run.module import MultiTenantModule
from nexus_lightning.run.strategies import make_strategy
from nexus_lightning.schema import TenantSchema
from nexus_lightning.tenant import TenantSlot
from scripts.bench.common import (
    ROOT,
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

PLACEMENTS = ("single", "ddp", "fsdp2", "fsdp2_heads")
INPUTS = ("features", "images")
#: Collectives that carry tensors -> where their input is among the arguments. Everything else carries messages.
CARRIERS = {
    "c10d::allreduce_": 0,
    "c10d::_allgather_base_": 1,
    "c10d::_reduce_scatter_base_": 1,
    "_c10d_functional::all_reduce": 0,
    "_c10d_functional::all_gather_into_tensor": 0,
    "_c10d_functional::reduce_scatter_tensor": 0,
}


def main(arguments: list[str] | None = None, launch: Callable[[int, list[str], Path], None] | None = None) -> int:
    """``launch(ranks, arguments, folder)`` runs :func:`work` on every rank; None: torchrun does."""
    options = _options(arguments)
    prepare(options)
    launch = torchrun if launch is None else launch
    results: dict[str, Any] = {}
    for size in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            launch(size, sys.argv[1:] if arguments is None else arguments, Path(folder))
            results[str(size)] = json.loads((Path(folder) / "results.json").read_text())
    _print(results)
    report("placement", options, _summary(results), results, _figure(results) if options.png else None)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    out = parser(__doc__, backbone="qwen3_vl_tiny")
    out.add_argument("--head", default="mlp", help="a name in conf/head (default: mlp)")
    out.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="one launch each (default: 1 2)")
    out.add_argument("--tenants", type=int, default=4, help="registered, one of them trains (default: 4)")
    out.add_argument("--batch-size", type=int, default=16, help="rows per optimizer step, of all ranks (default: 16)")
    out.add_argument("--steps", type=int, default=2, help="optimizer steps per job (default: 2)")
    out.add_argument("--image-size", type=int, default=64, help="(default: 64)")
    out.add_argument("--rounds", type=int, help="timed, of every placement and input (default: 20; quick: 5)")
    out.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the script calls itself under torchrun
    options = out.parse_args(arguments)
    options.rounds = options.rounds or (5 if options.quick else 20)
    if uneven := [size for size in options.ranks if options.batch_size % size]:
        out.error(f"--batch-size {options.batch_size}: {uneven[0]} ranks cannot share it equally")
    return options


def torchrun(ranks: int, arguments: list[str], folder: Path) -> None:
    """This script on ``ranks`` ranks of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *arguments, "--worker", str(folder)], cwd=ROOT, env=environment, check=True)


# ------------------------------------------------------------------------------------------------------- on every rank


def work(options: argparse.Namespace, folder: Path) -> None:
    """Build all placements, time them in turn, count; rank 0 writes ``results.json``."""
    size, on_gpu = int(os.environ.get("WORLD_SIZE", 1)), options.device != "cpu"
    device = prepare(options)
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    backbone = load_backbone(options.backbone, "cpu", options.dtype)
    plans = {name: make_plan(name, backbone, size, on_gpu) for name in (PLACEMENTS if size > 1 else PLACEMENTS[:1])}
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=10))
    ranks = Ranks.join("gpu" if on_gpu else "cpu")
    placed = {name: Placed(name, plan, ranks, backbone, options) for name, plan in plans.items()}
    functions = {f"{name} {given}": placed[name].stepper(given) for name in placed for given in INPUTS}
    results: dict[str, Any] = {}
    for key, function in functions.items():
        name, given = key.split()
        with Sent() as sent:
            function()
        placed[name].check_sent(given, sent.bytes)
        results.setdefault(name, {})[given] = {"sent_bytes_per_step": sent.bytes / options.steps}
    times = interleave(functions, device, seconds=0.0, min_rounds=options.rounds)
    for key, values in times.items():
        name, given = key.split()
        results[name][given]["step_ms"] = Spread.of(values).scaled(1e3 / options.steps)
        results[name][given]["over_single"] = Spread.ratio(values, times[f"single {given}"])
    for name, one in placed.items():
        results[name]["held_bytes"] = one.held_bytes()
        results[name]["gathered_bytes"] = gathered_bytes(plans[name])
        results[name]["head_bytes"] = sum(p.numel() * p.element_size() for p in one.whole_head.parameters())
    if ranks.first:
        (folder / "results.json").write_text(json.dumps(results, default=vars))
    ranks.gather(None)  # nobody leaves early


def make_plan(name: str, backbone: Backbone, size: int, on_gpu: bool) -> Plan:
    """The plan of a placement, resolved as a run's is."""
    config = NexusConfig()
    placement = config.placement
    placement.strategy = name.removesuffix("_heads")
    placement.heads.shard = size if name == "fsdp2_heads" else 1
    size = 1 if name == "single" else size
    devices = Devices.here("gpu" if on_gpu else "cpu")
    devices = Devices(devices.kind, size, size, devices.memory_bytes, devices.devices_per_node, devices.host_bytes)
    return resolve(config, devices, estimate(config, backbone))


def gathered_bytes(plan: Plan) -> int:
    """Whole weights that one rank holds during a forward of a sharded backbone."""
    first = plan.devices[0]  # a training GPU, or a machine with all its ranks
    return first.parts.get("gathered", 0) // (1 if plan.kind == "cuda" else plan.ranks_per_node)


class Sent(TorchDispatchMode):
    """Counts the bytes of tensors that this rank puts into collectives while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # asks again for the tensors inside and the collectives between them
        place = CARRIERS.get(func._schema.name)
        if place is not None:
            given = args[place] if isinstance(args[place], list | tuple) else [args[place]]
            self.bytes += sum(t.numel() * t.element_size() for t in given if t.is_floating_point())
        return func(*args, **(kwargs or {}))


class Placed:
    """One placement on this rank: module and strategy as a run has them, every tenant trained once."""

    def __init__(self, name: str, plan: Plan, ranks: Ranks, backbone: Backbone, options: argparse.Namespace) -> None:
        self.name, self.ranks, self.options = name, ranks, options
        self.alone = name == "single"
        schema = TenantSchema(
            cameras=("base_camera",), image_size=options.image_size, state_dim=8, action_dim=7, chunk=8, execute=8
        )
        sizes = {"batch_size": options.batch_size, "steps": 10**6}
        names = [f"tenant_{i}" for i in range(options.tenants)]
        backbone = copy.deepcopy(backbone)  # FSDP2 shards in place
        self.slots = [build_tenant(n, schema, options.head, backbone, **sizes)[0] for n in names]
        self.data = {given: self._data(backbone, schema, given) for given in INPUTS}
        slots = {slot.name: slot for slot in self.slots}
        self.module = MultiTenantModule(backbone, slots, Ranks() if self.alone else ranks)
        config = NexusConfig()
        config.placement.heads.shard = plan.heads_shard
        strategy = make_strategy(plan, config)
        trainer = L.Trainer(
            accelerator="gpu" if plan.kind == "cuda" else "cpu",
            strategy=strategy,
            devices=plan.world_size if not self.alone or plan.kind == "cpu" else [int(os.environ.get("LOCAL_RANK", 0))],
            plugins=LightningEnvironment() if self.alone else None,  # not torchrun's: a run of one
            max_epochs=1,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.strategy.teardown = lambda: None  # type: ignore[method-assign]  # everything stays where it is
        if not self.alone or ranks.first:
            environment = {} if not self.alone else {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
            with _environment(environment):
                trainer.fit(self.module, train_dataloaders=(self._group(s, "features") for s in self.slots))
        self.whole_head = self.slots[0].replica or self.slots[0].head

    def _data(self, backbone: Backbone, schema: TenantSchema, given: str) -> TensorDict:
        """This rank's rows of a job, from features or from images."""
        rows, size = self.options.batch_size * self.options.steps, 1 if self.alone else self.ranks.size
        rank = 0 if self.alone else self.ranks.rank
        batch = random_batch(schema, rows, seed=0)
        if given == "images":
            batch["language_instruction"] = instructions(rows, 0)
            out = batch
        else:
            spec = self.slots[0].head.feature_spec
            out = batch.exclude("observation")
            out["features"] = backbone(batch["observation"], instructions(rows, 0), schema, (spec.kind,)).select(spec)
            out["state"] = batch["observation", "state"]
        mine = torch.arange(rows).view(self.options.steps, size, -1)[:, rank].flatten()
        return cast(TensorDict, out[mine])

    def stepper(self, given: str) -> Callable[[], None]:
        """A job of the first tenant; of ``single`` on rank 0 while the others wait."""
        group = self._group(self.slots[0], given).to(next(self.slots[0].head.parameters()).device)

        def step() -> None:
            if not self.alone or self.ranks.first:
                self.module.training_step(group, 0)
            if self.alone:
                self.ranks.gather(None)

        return step

    def _group(self, slot: TenantSlot, given: str) -> LeaseGroup:
        data = self.data[given]
        job = Job(
            job_id=f"{slot.name}-{slot.jobs_completed}",
            tenant_id=slot.name,
            task_type="sft",
            policy_key=slot.name,
            partition_id=slot.name,
            sample_count=len(data),
            domain="",
            schema_signature=slot.spec.schema.signature,
            priority=0,
            created_seq=slot.jobs_completed,
            metadata={"cursor": slot.jobs_completed + 1, "features": given == "features"},
        )
        meta = BatchMeta(job.partition_id, slot.name, (given,), tuple(range(len(data))), "train", 1)
        return LeaseGroup([Lease(job, meta, data)])

    def check_sent(self, given: str, sent: int) -> None:
        """Exactly what the active head costs, and for images through a sharded backbone its shards, too."""
        expected = 0 if self.alone else self.head_bytes()
        if given == "features" or not self.module.sharded_backbone:
            assert sent == expected, f"{self.name}, {given}: sent {sent} bytes, the active head's are {expected}"
        else:
            assert sent > expected, f"{self.name}: a sharded backbone was not gathered"

    def head_bytes(self) -> int:
        """Of one job of one tenant, float32.

        A whole head: one all_reduce per step of its gradients, a flag for each tensor and one for the tenant. In
        shards (each tensor padded to equal parts): per step its gathered weights, its scattered gradients (of what the
        loss reaches) and their norms, to clip; after the job its replica is gathered.
        """
        slot, size = self.slots[0], self.ranks.size
        assert slot.optimizer is not None
        parameters = [p for group in slot.optimizer.param_groups for p in group["params"]]
        if slot.replica is None:
            return self.options.steps * 4 * (sum(p.numel() for p in parameters) + len(parameters) + 1)
        shards = {p: -(-p.shape[0] // size) * (p.numel() // p.shape[0]) for p in parameters}
        reached = [elements for p, elements in shards.items() if slot.optimizer.state.get(p)]
        norms = len(reached) if slot.grad_clip_norm is not None else 0
        every_step = sum(shards.values()) + size * sum(reached) + norms
        return 4 * (self.options.steps * every_step + sum(shards.values()))

    def held_bytes(self) -> dict[str, int]:
        """What this rank holds between two jobs."""
        slots = self.slots
        moments = [v for s in slots if s.optimizer for state in s.optimizer.state.values() for v in state.values()]
        return {
            "backbone": _bytes([*self.module.backbone.parameters(), *self.module.backbone.buffers()]),
            "heads": _bytes([t for s in slots for t in s.head.state_dict().values()]),
            "moments": _bytes([v for v in moments if isinstance(v, Tensor)]),
            "replicas": _bytes([t for s in slots if s.replica for t in s.replica.state_dict().values()]),
        }


def _bytes(tensors: list[Tensor]) -> int:
    """Of this rank's parts of the tensors."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local)


def _environment(values: dict[str, str]) -> Any:
    """Environment variables for a while."""
    if not values:
        return nullcontext()
    from unittest.mock import patch

    return patch.dict(os.environ, values)


# ------------------------------------------------------------------------------------------------------------- reports


def _spread(value: dict[str, Any]) -> Spread:
    return Spread(**value)


def _print(results: dict[str, Any]) -> None:
    rows = [
        (
            size,
            name,
            *(f"{_spread(r[given]['step_ms']).median:.1f}" for given in INPUTS),
            *(str(_spread(r[given]["over_single"])) for given in INPUTS),
            *(f"{r[given]['sent_bytes_per_step'] / 1e6:.2f}" for given in INPUTS),
            *(f"{r['held_bytes'][part] / 1e6:.1f}" for part in ("backbone", "heads", "moments", "replicas")),
            f"{r['gathered_bytes'] / 1e6:.1f}",
        )
        for size, by_name in results.items()
        for name, r in by_name.items()
    ]
    titles = [f"{text} ({given})" for text in ("ms per step", "over single", "MB sent per step") for given in INPUTS]
    held = ("MB backbone", "heads", "moments", "replicas", "gathered")
    print(text_table(("ranks", "placement", *titles, *held), rows))
    print("per rank; medians (quartiles) of ratios within a round")


def _summary(results: dict[str, Any]) -> dict[str, float]:
    """Per placement with several ranks: time over one rank's, memory over one rank's, bytes over the head's."""
    out = {}
    for size, by_name in results.items():
        held = {name: sum(r["held_bytes"].values()) for name, r in by_name.items()}
        for name, r in by_name.items():
            if name == "single":
                continue
            for given in INPUTS:
                out[f"step_{name}_over_single_{given}_{size}"] = r[given]["over_single"]["median"]
            out[f"memory_{name}_over_single_{size}"] = held[name] / held["single"]
            out[f"backbone_{name}_over_single_{size}"] = (
                r["held_bytes"]["backbone"] / by_name["single"]["held_bytes"]["backbone"]
            )
            out[f"sent_{name}_over_head_{size}"] = r["features"]["sent_bytes_per_step"] / r["head_bytes"]
    return out or {"sent_single": by_name["single"]["features"]["sent_bytes_per_step"]}


def _figure(results: dict[str, Any]) -> Figure:
    """Left: time of a step over that of one rank. Right: what a rank holds."""
    by_name = results[max(results, key=int)]
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(by_name)
    for shift, given in zip((-0.2, 0.2), INPUTS, strict=True):
        ratios = [_spread(by_name[n][given]["over_single"]) for n in names]
        errors = [[s.median - s.q25 for s in ratios], [s.q75 - s.median for s in ratios]]
        places = [i + shift for i in range(len(names))]
        left.bar(places, [s.median for s in ratios], 0.38, yerr=errors, capsize=3, label=f"from {given}")
    left.axhline(1.0, color="grey", linewidth=0.8)
    left.set_ylabel("time per step over one rank's")
    left.legend(fontsize=8)
    bottom = [0.0] * len(names)
    for part in ("backbone", "heads", "moments", "replicas"):
        sizes = [by_name[n]["held_bytes"][part] / 1e6 for n in names]
        right.bar(names, sizes, 0.6, bottom=bottom, label=part)
        bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
    gathered = [by_name[n]["gathered_bytes"] / 1e6 for n in names]
    right.bar(names, gathered, 0.6, bottom=bottom, facecolor="none", edgecolor="grey", hatch="//", label="gathered")
    right.set_ylabel("MB per rank")
    right.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    left.set_xticks(range(len(names)), names)
    figure.suptitle(f"{max(results, key=int)} ranks", fontsize=10)
    return figure


if __name__ == "__main__":
    for logger in ("lightning.pytorch", "nexus_lightning"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    options = _options(None)
    if options.worker is None:
        raise SystemExit(main())
    work(options, options.worker)
    if dist.is_initialized():
        dist.destroy_process_group()
