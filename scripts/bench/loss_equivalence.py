"""Sharing changes no tenant's training: loss curves alone, grouped, and on features that were stored.

Four tenants of two schemas (one camera, or two with another state, action and chunk) and two heads train on the same
minibatches in four ways:

    solo           the tenant alone, one backbone call per minibatch
    grouped        tenants of one schema share every pass (nexus_lightning.features.grouping)
    reuse          features from the feature store, kept in float32
    reuse float16  kept in float16, the store's default: reported by itself, it rounds

Paper: figure 12.

    python scripts/bench/loss_equivalence.py --quick
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from matplotlib.figure import Figure
from tensordict import TensorDict
from torch import Tensor
from tqdm import tqdm

from nexus_lightning.backbone import Backbone, VLAFeature, sharing_key
from nexus_lightning.features.grouping import EncodeRequest, EncodeStats, encode_together
from nexus_lightning.features.store import FeatureStore, StoreKey
from nexus_lightning.monitoring.banner import text_table
from nexus_lightning.producers.demonstrations import FrameOrder
from nexus_lightning.schema import NormalizationStats, TenantSchema
from nexus_lightning.tenant import derive_seed
from scripts.bench.common import (
    build_tenant,
    instructions,
    load_backbone,
    parser,
    prepare,
    random_batch,
    report,
    seed_cuda,
    update,
)

#: What the store keeps -> name of the curve.
STORED = {"float32": "reuse", "float16": "reuse float16"}
SHARED = ("grouped", *STORED.values())


@dataclass(frozen=True)
class Tenant:
    """A tenant and its whole data set ``[num_frames]``: ``observation``, ``actions``, ``is_pad``, and instructions."""

    name: str
    schema: TenantSchema
    head: str
    data: TensorDict
    texts: list[str]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    device = prepare(options)
    backbone = load_backbone(options.backbone, device, options.dtype)
    tenants = make_tenants(options, device)
    curves = train_all(backbone, tenants, options)
    differences = {
        mode: {t.name: relative_difference(curves[mode][t.name], curves["solo"][t.name]) for t in tenants}
        for mode in SHARED
    }
    highest = {mode: max(by_tenant.values()) for mode, by_tenant in differences.items()}
    summary = {
        "max_rel_diff": max(highest["grouped"], highest["reuse"]),
        "max_rel_diff_grouped": highest["grouped"],
        "max_rel_diff_reuse": highest["reuse"],
        "max_rel_diff_float16": highest["reuse float16"],
    }
    rows = [
        (
            t.name,
            t.head,
            len(t.schema.cameras),
            f"{t.schema.chunk} x {t.schema.action_dim}",
            f"{curves['solo'][t.name][0]:.4f}",
            f"{_end(curves['solo'][t.name]):.4f}",
            *(f"{differences[mode][t.name]:.1e}" for mode in SHARED),
        )
        for t in tenants
    ]
    print(f"{options.backbone}, {options.dtype}: {options.steps} steps of {options.batch} samples")
    titles = ("tenant", "head", "cameras", "chunk", "first loss", "last tenth")
    print(text_table((*titles, *(f"solo vs {mode}" for mode in SHARED)), rows))
    print("differences: the largest |loss - solo| / solo of all steps")
    figure = _figure(tenants, curves) if options.png else None
    report("loss_equivalence", options, summary, {"curves": curves, "differences": differences}, figure)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    out = parser(__doc__)
    out.add_argument("--heads", nargs="+", default=["mlp", "flow_matching"], help="names in conf/head, in turn")
    out.add_argument("--steps", type=int, help="optimizer steps per tenant (default: 200; quick: 40)")
    out.add_argument("--batch", type=int, default=4, help="samples per tenant and step (default: 4)")
    out.add_argument("--frames", type=int, default=48, help="frames of each tenant's data set (default: 48)")
    out.add_argument("--image-size", type=int, default=64, help="(default: 64)")
    options = out.parse_args(arguments)
    options.steps = options.steps or (40 if options.quick else 200)
    return options


def make_tenants(options: argparse.Namespace, device: torch.device) -> list[Tenant]:
    """a and b of one schema, c and d of another; actions that can be learnt from state and images."""
    size = options.image_size
    one = TenantSchema(cameras=("front",), image_size=size, state_dim=8, action_dim=7, chunk=8, execute=8)
    two = TenantSchema(
        cameras=("primary", "wrist"), image_size=size, state_dim=5, action_dim=4, chunk=4, execute=2, rotation="none"
    )
    tenants = []
    for index, (name, schema) in enumerate(zip("abcd", (one, one, two, two), strict=True)):
        head = options.heads[index % len(options.heads)]
        data = random_batch(schema, options.frames, seed=index)
        brightness = torch.linspace(0.2, 1.0, options.frames)
        for camera in schema.cameras:
            image = data["observation", "image", camera]
            data["observation", "image", camera] = (image * brightness[:, None, None, None]).to(torch.uint8)
        generator = torch.Generator().manual_seed(index)
        inputs = torch.cat([data["observation", "state"], 4 * (brightness[:, None] - 0.6)], dim=1)
        weights = torch.randn(inputs.shape[1], schema.chunk * schema.action_dim, generator=generator)
        actions = torch.tanh(inputs @ weights / inputs.shape[1] ** 0.5)
        data["actions"] = actions.view(-1, schema.chunk, schema.action_dim)
        tenants.append(Tenant(name, schema, head, data.to(device), instructions(options.frames, index)))
    return tenants


def train_all(
    backbone: Backbone, tenants: Sequence[Tenant], options: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    """Mode -> tenant -> losses, one per step."""
    alone = Encoder(backbone)
    runs: list[tuple[str, Sequence[Tenant], Encoder]] = [("solo", [tenant], alone) for tenant in tenants]
    runs.append(("grouped", tenants, Grouped(backbone)))
    runs += [(mode, tenants, Stored(backbone, dtype)) for dtype, mode in STORED.items()]
    curves: dict[str, dict[str, list[float]]] = {mode: {} for mode, _, _ in runs}
    for mode, members, encoder in tqdm(runs, desc="loss equivalence", leave=False):
        curves[mode] |= train(members, encoder, options.steps, options.batch)
    return curves


class Member:
    """A tenant in training: fresh head and optimizer, and its place in its data."""

    def __init__(self, tenant: Tenant, backbone: Backbone, steps: int, batch: int) -> None:
        self.tenant = tenant
        self.slot, self.objective = build_tenant(
            tenant.name,
            tenant.schema,
            tenant.head,
            backbone,
            batch_size=batch,
            steps=steps,
            settings={"warmup_steps": steps // 10},  # a real run's warm-up would last longer than this one
            state_stats=NormalizationStats.of(tenant.data["observation", "state"].cpu()),
        )
        self.spec = self.slot.head.feature_spec
        self.order = FrameOrder(len(tenant.texts), derive_seed("order", tenant.name))

    def request(self, rows: Tensor) -> EncodeRequest:
        tenant = self.tenant
        texts = [tenant.texts[row] for row in rows.tolist()]
        return EncodeRequest(tenant.data["observation"][rows], texts, tenant.schema, self.spec)

    def step(self, rows: Tensor, features: VLAFeature) -> float:
        """One optimizer step; its loss."""
        batch = self.tenant.data[rows]
        batch["state"] = batch["observation", "state"]
        batch["features"] = cast(VLAFeature, features.to(self.tenant.data.device)).for_head()
        with self.slot.rng.scope():
            seed_cuda(self.slot)
            loss = self.objective.loss(batch.exclude("observation"), 0)["loss"]
            update(self.slot, loss)
        self.slot.optimizer_steps += 1
        return float(loss.detach())


class Encoder:
    """Solo: one backbone call per tenant."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    def __call__(self, members: Sequence[Member], rows: Sequence[Tensor]) -> list[VLAFeature]:
        return [self.alone(member, part) for member, part in zip(members, rows, strict=True)]

    def alone(self, member: Member, rows: Tensor) -> VLAFeature:
        request = member.request(rows)
        kinds = (member.spec.kind,)
        return self.backbone(request.observation, request.instructions, request.schema, kinds).select(member.spec)


class Grouped(Encoder):
    """Tenants with one sharing key share passes, as in the loop."""

    stats = EncodeStats()

    def __call__(self, members: Sequence[Member], rows: Sequence[Tensor]) -> list[VLAFeature]:
        keys = [sharing_key(member.tenant.schema, member.spec.kind) for member in members]
        out: dict[int, VLAFeature] = {}
        for key in dict.fromkeys(keys):
            places = [i for i, other in enumerate(keys) if other == key]
            requests = [members[i].request(rows[i]) for i in places]
            out |= zip(places, encode_together(self.backbone, requests, self.stats), strict=True)
        return [out[i] for i in range(len(members))]


class Stored(Encoder):
    """Every frame through the backbone once, then from the feature store."""

    def __init__(self, backbone: Backbone, dtype: str) -> None:
        super().__init__(backbone)
        self.dtype, self.store, self.fingerprint = dtype, FeatureStore(None, budget_bytes=2**40), backbone.fingerprint

    def alone(self, member: Member, rows: Tensor) -> VLAFeature:
        prefix, action_tokens = sharing_key(member.tenant.schema, member.spec.kind)
        name, frames = member.tenant.name, len(member.tenant.texts)
        key = StoreKey(self.fingerprint, prefix, action_tokens, member.spec.kind, name, "1", dtype=self.dtype)

        def compute(wanted: Tensor, view: int) -> TensorDict:
            del view
            return TensorDict({"features": super(Stored, self).alone(member, wanted)}, [len(wanted)])

        return cast(VLAFeature, self.store.entry(key, frames, compute).read(rows)["features"])


def train(tenants: Sequence[Tenant], encoder: Encoder, steps: int, batch: int) -> dict[str, list[float]]:
    """Losses per tenant: in every step all get their features, then each its own update."""
    members = [Member(tenant, encoder.backbone, steps, batch) for tenant in tenants]
    losses: dict[str, list[float]] = {tenant.name: [] for tenant in tenants}
    for step in range(steps):
        rows = [member.order.rows(step * batch, batch) for member in members]
        for member, part, features in zip(members, rows, encoder(members, rows), strict=True):
            losses[member.tenant.name].append(member.step(part, features))
    return losses


def relative_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest ``|loss - reference| / |reference|`` of all steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def _end(losses: Sequence[float]) -> float:
    """Mean of the last tenth."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def _figure(tenants: Sequence[Tenant], curves: dict[str, dict[str, list[float]]]) -> Figure:
    """Above, the curves of a tenant on top of each other; below, how far the shared ones are from solo."""
    figure = Figure(figsize=(3.4 * len(tenants), 5.2), layout="constrained")
    upper, lower = figure.subplots(2, len(tenants), sharex=True, sharey="row", squeeze=False, height_ratios=[3, 2])
    styles = {"solo": ("-", 4.0), "grouped": ("-", 1.6), "reuse": ("--", 1.6), "reuse float16": (":", 1.6)}
    for column, tenant in enumerate(tenants):
        solo = curves["solo"][tenant.name]
        for color, (mode, (line, width)) in enumerate(styles.items()):
            losses = curves[mode][tenant.name]
            drawn = {"linestyle": line, "color": "lightgrey" if mode == "solo" else f"C{color}"}
            upper[column].plot(losses, linewidth=width, label=mode, **drawn)
            if mode != "solo":
                differences = [max(abs(a - b) / abs(b), 1e-9) for a, b in zip(losses, solo, strict=True)]
                lower[column].plot(differences, linewidth=1.0, **drawn)
        cameras = len(tenant.schema.cameras)
        upper[column].set_title(f"{tenant.name}: {tenant.head}, {cameras} camera{'s' * (cameras > 1)}", fontsize=9)
        upper[column].set_yscale("log")
        lower[column].set_yscale("log")
        lower[column].axhline(1e-4, color="grey", linewidth=0.8)
        lower[column].set_xlabel("optimizer step")
    upper[0].set_ylabel("loss")
    lower[0].set_ylabel("|loss - solo| / solo")
    upper[0].legend(fontsize=8)
    return figure


if __name__ == "__main__":
    raise SystemExit(main())
