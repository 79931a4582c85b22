"""The shared forward: tenants one after the other, grouped, and one raw batched backbone call (the limit).

Every tenant brings a local batch of its own observations and instructions. ``serial`` is one backbone call per tenant,
``grouped`` is ``nexus_lightning.features.grouping.encode_together``, which also hands every tenant its own feature;
``limit`` is one call on rows that are merged already, whose result is left as it is. Paper: figure 10.

    python scripts/bench/shared_forward.py --quick
    python scripts/bench/shared_forward.py --device cuda --dtype bf16 --backbone qwen3_vl_4b --image-size 224
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from matplotlib.figure import Figure
from tensordict import TensorDict
from tqdm import tqdm

from nexus_lightning.backbone import Backbone
from nexus_lightning.checks import random_observation
from nexus_lightning.features.grouping import EncodeRequest, EncodeStats, encode_together
from nexus_lightning.monitoring.banner import text_table
from nexus_lightning.schema import TenantSchema
from scripts.bench.common import Spread, instructions, interleave, load_backbone, parser, prepare, report

#: What a head reads -> heads that do.
FAMILIES = {
    "pooled": "MLP on one vector",
    "tokens": "GR00T, diffusion",
    "action_tokens": "OpenVLA-OFT",
    "kv": "pi0, SmolVLA",
}


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    device = prepare(options)
    cells = [(tenants, batch) for tenants in options.tenants for batch in options.batches]
    backbones = {name: load_backbone(name, device, options.dtype) for name in options.backbone}
    todo = [(name, kind) for name, backbone in backbones.items() for kind in _kinds(backbone, options)]
    results, rounds = [], 3 if options.quick else 9
    with tqdm(total=len(todo) * len(cells), desc="shared forward", leave=False) as bar:
        for name, kind in todo:
            for tenants, batch in cells:
                seconds = options.seconds / (len(todo) * len(cells))
                times = measure(backbones[name], kind, tenants, batch, options.image_size, seconds, rounds)
                results.append({"backbone": name, "kind": kind, "tenants": tenants, "batch": batch, **_compared(times)})
                bar.update()
    _print(results, backbones)
    report("shared_forward", options, _summary(results), results, _figure(results) if options.png else None)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    out = parser(__doc__, backbone=None)
    text = "names in conf/backbone, or dotted paths of classes (default: effnet_minilm)"
    out.add_argument("--backbone", nargs="+", default=["effnet_minilm"], help=text)
    out.add_argument("--kinds", nargs="+", choices=sorted(FAMILIES), help="(default: all that the backbone gives)")
    out.add_argument("--tenants", nargs="+", type=int, help="(default: 2 4 6 8; quick: 2 8)")
    out.add_argument("--batches", nargs="+", type=int, help="rows per tenant (default: 1 2 4 8; quick: 1 4)")
    out.add_argument("--image-size", type=int, default=128, help="(default: 128)")
    out.add_argument(
        "--seconds",
        type=float,
        help="of timing in all, at least 9 rounds (quick: 3) of every cell (default: 140; quick: 40)",
    )
    options = out.parse_args(arguments)
    options.tenants = options.tenants or ([2, 8] if options.quick else [2, 4, 6, 8])
    options.batches = options.batches or ([1, 4] if options.quick else [1, 2, 4, 8])
    options.seconds = options.seconds if options.seconds is not None else 40.0 if options.quick else 140.0
    return options


def _kinds(backbone: Backbone, options: argparse.Namespace) -> list[str]:
    kinds = [kind for kind in options.kinds or FAMILIES if kind in backbone.kinds]
    if not kinds:
        raise ValueError(f"--kinds {' '.join(options.kinds)}: {type(backbone).__name__} gives {list(backbone.kinds)}")
    return kinds


def measure(
    backbone: Backbone, kind: str, tenants: int, batch: int, image_size: int, seconds: float, min_rounds: int = 3
) -> dict[str, list[float]]:
    """Seconds of ``serial``, ``grouped`` and ``limit``, round by round."""
    schema = TenantSchema(
        cameras=("base_camera",), image_size=image_size, state_dim=8, action_dim=7, chunk=8, execute=8
    )
    spec = backbone.feature_spec(schema, kind)
    device = backbone.device
    requests = [
        EncodeRequest(random_observation(schema, batch, seed=t).to(device), instructions(batch, t), schema, spec)
        for t in range(tenants)
    ]
    merged: TensorDict = torch.cat([request.observation for request in requests])  # pyright: ignore
    texts = [text for request in requests for text in request.instructions]
    stats = EncodeStats()

    def serial() -> None:
        for request in requests:
            backbone(request.observation, request.instructions, schema, (kind,)).select(spec)

    def grouped() -> None:
        encode_together(backbone, requests, stats)

    def limit() -> None:
        backbone(merged, texts, schema, (kind,))

    return interleave({"serial": serial, "grouped": grouped, "limit": limit}, device, seconds, min_rounds)


def _compared(times: dict[str, list[float]]) -> dict[str, Spread]:
    milliseconds = {f"{name}_ms": Spread.of(values).scaled(1e3) for name, values in times.items()}
    return {
        **milliseconds,
        "speedup": Spread.ratio(times["serial"], times["grouped"]),
        "limit_speedup": Spread.ratio(times["serial"], times["limit"]),
        "fraction_of_limit": Spread.ratio(times["limit"], times["grouped"]),
    }


def _print(results: list[dict[str, Any]], backbones: dict[str, Backbone]) -> None:
    for name, backbone in backbones.items():
        size = sum(p.numel() for p in backbone.parameters())
        print(f"{name}: {size / 1e6:.1f} M frozen parameters")
    rows = [
        (
            r["backbone"],
            r["kind"],
            FAMILIES[r["kind"]],
            f"{r['tenants']} x {r['batch']}",
            f"{r['serial_ms'].median:.1f}",
            f"{r['grouped_ms'].median:.1f}",
            f"{r['limit_ms'].median:.1f}",
            r["speedup"],
            r["limit_speedup"],
            r["fraction_of_limit"],
            r["speedup"].count,
        )
        for r in results
    ]
    titles = ("serial ms", "grouped ms", "limit ms", "speed-up", "limit's", "fraction of limit", "rounds")
    print(text_table(("backbone", "kind", "heads", "tenants x batch", *titles), rows))
    print("medians (quartiles) of ratios within a round")


def _summary(results: list[dict[str, Any]]) -> dict[str, float]:
    """``min_fraction_of_limit`` of everything; ``speedup_<tenants>x<batch>``: the lowest over kinds and backbones."""
    summary = {"min_fraction_of_limit": min(r["fraction_of_limit"].median for r in results)}
    for r in results:
        key, value = f"speedup_{r['tenants']}x{r['batch']}", r["speedup"].median
        summary[key] = min(value, summary.get(key, math.inf))
    return summary


def _figure(results: list[dict[str, Any]]) -> Figure:
    """A panel per backbone and kind: speed-up over serial by tenants, a line per local batch, dotted: the limit."""
    panels = list(dict.fromkeys((r["backbone"], r["kind"]) for r in results))
    batches = list(dict.fromkeys(r["batch"] for r in results))
    figure = Figure(figsize=(4.2 * len(panels), 3.8), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        for color, batch in enumerate(batches):
            line = [r for r in results if (r["backbone"], r["kind"], r["batch"]) == (*panel, batch)]
            tenants, speedups = [r["tenants"] for r in line], [r["speedup"] for r in line]
            errors = [[s.median - s.q25 for s in speedups], [s.q75 - s.median for s in speedups]]
            style = {"color": f"C{color}", "capsize": 3}
            axes.errorbar(
                tenants, [s.median for s in speedups], errors, fmt="o-", label=f"local batch {batch}", **style
            )
            axes.plot(tenants, [r["limit_speedup"].median for r in line], ":", color=f"C{color}")
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set_title(f"{panel[0]}: {panel[1]} ({FAMILIES[panel[1]]})", fontsize=9)
        axes.set_xticks(sorted({r["tenants"] for r in results}))
        axes.set_xlabel("tenants")
    figure.axes[0].set_ylabel("speed-up over serial (dotted: raw batched call)")
    figure.axes[0].legend(fontsize=8)
    return figure


if __name__ == "__main__":
    raise SystemExit(main())
