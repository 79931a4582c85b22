"""The inference queue: throughput and latency against the ideal batched forward and against one request at a time.

Sessions are threads that act and then "simulate" (sleep for the think time). Measured in turn, round after round:

- ``queue``: every session makes its decisions through ``TenantInferenceServer``;
- ``ideal``: one backbone call on the rows of all sessions, then each tenant's head on its own, no queue and no threads;
- ``single``: one request at a time: a backbone call and a head call per session.

Rows per second of the queue are those of a round's batches from the fifth to the first session's last one: without the
start, when the server does not know yet which sessions come back soon, and without the end. Latency is a
session's own, from asking to having the answer.

    python scripts/bench/inference_queue.py --quick
    python scripts/bench/inference_queue.py --device cuda --dtype bf16 --backbone qwen3_vl_4b --image-size 224
"""

from __future__ import annotations

import argparse
import bisect
import statistics
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from matplotlib.figure import Figure
from tensordict import NonTensorStack, TensorDict
from tqdm import tqdm

from nexus_lightning.backbone import Backbone
from nexus_lightning.checks import random_observation
from nexus_lightning.inference.client import TenantPolicyClient
from nexus_lightning.inference.policies import ServedPolicies
from nexus_lightning.inference.server import TenantInferenceServer
from nexus_lightning.monitoring.banner import text_table
from nexus_lightning.schema import TenantSchema
from scripts.bench.common import Spread, build_tenant, instructions, load_backbone, parser, prepare, report, synchronize

#: Batches of a round before the server knows its sessions.
START = 4


@dataclass
class Batches:
    """``on_batch`` of the server: rows, start and end of every batch."""

    rows: list[int] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)

    def __call__(self, rows: dict[str, int], start_s: float, end_s: float, encodes: int) -> None:
        self.rows.append(sum(rows.values()))
        self.spans.append((start_s, end_s))


@dataclass
class Cell:
    """One point of the grid and what was measured there; seconds and rows per second."""

    sessions: int
    tenants: int
    think_s: float
    rates: dict[str, list[float]] = field(default_factory=lambda: {"queue": [], "ideal": [], "single": []})
    latencies_s: list[float] = field(default_factory=list)
    all_in_s: list[float] = field(default_factory=list)  # all sessions wait and the worker is free -> batch starts
    held_s: list[float] = field(default_factory=list)  # a request waits although the worker is free
    batch_rows: list[int] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    device = prepare(options)
    backbone = load_backbone(options.backbone, device, options.dtype)
    schema = TenantSchema(
        cameras=("base_camera",), image_size=options.image_size, state_dim=8, action_dim=7, chunk=8, execute=8
    )
    policies = ServedPolicies(backbone)
    for tenant in _names(max(options.tenants)):
        slot, _ = build_tenant(tenant, schema, options.head, backbone, batch_size=1, steps=1)
        policies.publish(tenant, 0, slot.head, slot.normalizer, schema)
    grid = [(s, t) for s in options.sessions for t in options.tenants if t <= s]
    cells = [Cell(s, t, 0.0) for s, t in grid]
    cells += [Cell(s, t, options.think_ms / 1e3) for s, t in grid if s == max(options.sessions)]
    timeout_s = options.timeout_ms / 1e3
    with tqdm(total=options.rounds * len(cells), desc="inference queue", leave=False) as bar:
        for _ in range(options.rounds):
            for cell in cells:
                measure(cell, policies, schema, options.decisions, timeout_s)
                bar.update()
    results = [_result(cell) for cell in cells]
    _print(results)
    summary = _summary(cells, timeout_s)
    report("inference_queue", options, summary, results, _figure(results) if options.png else None)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    out = parser(__doc__)
    out.add_argument("--head", default="mlp", help="a name in conf/head (default: mlp)")
    out.add_argument("--sessions", nargs="+", type=int, help="(default: 1 2 4 8 16; quick: 1 4 16)")
    out.add_argument("--tenants", nargs="+", type=int, help="(default: 1 4 8; quick: 1 8)")
    out.add_argument("--think-ms", type=float, default=30.0, help="at most sessions, once more with this (default: 30)")
    out.add_argument("--timeout-ms", type=float, default=5.0, help="T of the server (default: 5, as conf/queues)")
    out.add_argument("--decisions", type=int, default=10, help="per session and round (default: 10)")
    out.add_argument("--rounds", type=int, help="(default: 5; quick: 3)")
    out.add_argument("--image-size", type=int, default=128, help="(default: 128)")
    options = out.parse_args(arguments)
    options.sessions = options.sessions or ([1, 4, 16] if options.quick else [1, 2, 4, 8, 16])
    options.tenants = options.tenants or ([1, 8] if options.quick else [1, 4, 8])
    options.rounds = options.rounds or (3 if options.quick else 5)
    return options


def _names(tenants: int) -> list[str]:
    return [f"tenant{i}" for i in range(tenants)]


# ---------------------------------------------------------------------------------------------------------- measuring


def measure(cell: Cell, policies: ServedPolicies, schema: TenantSchema, decisions: int, timeout_s: float) -> None:
    """One round: queue, ideal, single; every session one row."""
    owners = [_names(cell.tenants)[i % cell.tenants] for i in range(cell.sessions)]
    observations = [_request(schema, seed) for seed in range(cell.sessions)]
    _queue(cell, policies, owners, observations, decisions, timeout_s)
    order = sorted(range(cell.sessions), key=lambda i: owners[i])  # a tenant's rows side by side
    merged: TensorDict = torch.cat([observations[i]["observation"] for i in order])  # pyright: ignore
    texts = [observations[i].get("language_instruction").tolist()[0] for i in order]
    sizes = Counter(owners)
    batches = max(1, decisions // 2)

    def ideal() -> float:
        start_s = time.perf_counter()
        for _ in range(batches):
            _forward(policies, schema, merged, texts, sizes)
        return batches * len(order) / (time.perf_counter() - start_s)

    def single() -> float:
        start_s = time.perf_counter()
        for row, i in enumerate(order):
            _forward(policies, schema, merged[row : row + 1], [texts[row]], Counter([owners[i]]))
        return len(order) / (time.perf_counter() - start_s)

    # In a thread of their own, as the server's worker is: OpenMP treats the main thread's team differently on a busy
    # machine, by a factor of several.
    with ThreadPoolExecutor(1) as thread:
        cell.rates["ideal"].append(thread.submit(ideal).result())
        cell.rates["single"].append(thread.submit(single).result())


def _request(schema: TenantSchema, seed: int) -> TensorDict:
    observation = random_observation(schema, 1, seed)
    return TensorDict({"observation": observation, "language_instruction": NonTensorStack(*instructions(1, seed))}, [1])


def _queue(
    cell: Cell,
    policies: ServedPolicies,
    owners: list[str],
    observations: list[TensorDict],
    decisions: int,
    timeout_s: float,
) -> None:
    batches, asked, finished, errors = Batches(), [], [], []
    ready = threading.Barrier(len(owners))

    def session(client: TenantPolicyClient, observation: TensorDict) -> None:
        try:
            ready.wait(60)
            for _ in range(decisions):
                start_s = time.monotonic()
                future = client.submit(observation)
                asked.append(future.submitted_s)
                client.wait(future)
                cell.latencies_s.append(time.monotonic() - start_s)
                cell.held_s.append(future.held_s)
                time.sleep(cell.think_s)
            finished.append(time.monotonic())
            client.rest()
        except Exception as error:
            errors.append(error)

    with TenantInferenceServer(policies, timeout_s=timeout_s, on_batch=batches) as server:
        threads = [
            threading.Thread(target=session, args=(server.client(owner, sample=False), observation))
            for owner, observation in zip(owners, observations, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    steady = [i for i, (_, end_s) in enumerate(batches.spans) if i >= START and end_s <= min(finished)]
    if steady:
        begin_s, end_s = batches.spans[steady[0] - 1][1], batches.spans[steady[-1]][1]
        cell.rates["queue"].append(sum(batches.rows[i] for i in steady) / (end_s - begin_s))
        cell.batch_rows += [batches.rows[i] for i in steady]
    asked.sort()
    for i in steady:
        start_s = batches.spans[i][0]
        if batches.rows[i] == len(owners):
            last_s = asked[bisect.bisect_right(asked, start_s) - 1]
            cell.all_in_s.append(start_s - max(last_s, batches.spans[i - 1][1]))


@torch.no_grad()
def _forward(
    policies: ServedPolicies, schema: TenantSchema, observation: TensorDict, texts: list[str], sizes: Counter[str]
) -> None:
    """One backbone call, then the heads; ``sizes``: rows per tenant, in the order of its name."""
    backbone: Backbone = policies.backbone
    device = backbone.device
    spec = policies.served(next(iter(sizes))).head.feature_spec
    features = backbone(observation, texts, schema, (spec.kind,)).select(spec).for_head()
    state = observation["state"].to(device)
    start = 0
    for tenant in sorted(sizes):
        served, rows = policies.served(tenant), slice(start, start + sizes[tenant])
        served.head.act(features[rows], served.normalizer.normalize_state(state[rows]))["chunk"].cpu()  # pyright: ignore
        start = rows.stop
    synchronize(device)


# ---------------------------------------------------------------------------------------------------------- reporting


def _result(cell: Cell) -> dict[str, Any]:
    latencies_ms = [1e3 * s for s in cell.latencies_s]
    return {
        "sessions": cell.sessions,
        "tenants": cell.tenants,
        "think_ms": 1e3 * cell.think_s,
        **{f"{name}_rows_per_s": Spread.of(values) for name, values in cell.rates.items()},
        "fraction_of_ideal": Spread.ratio(cell.rates["queue"], cell.rates["ideal"]),
        "speedup_over_single": Spread.ratio(cell.rates["queue"], cell.rates["single"]),
        "latency_p50_ms": _quantile(latencies_ms, 0.5),
        "latency_p99_ms": _quantile(latencies_ms, 0.99),
        "held_p99_ms": 1e3 * _quantile(cell.held_s, 0.99),
        "all_in_ms": 1e3 * statistics.median(cell.all_in_s) if cell.all_in_s else None,
        "rows_per_batch": statistics.mean(cell.batch_rows),
    }


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def _print(results: list[dict[str, Any]]) -> None:
    titles = ("queue rows/s", "ideal", "single", "of ideal", "p50 ms", "p99 ms", "held p99 ms", "all in ms")
    rows = [
        (
            r["sessions"],
            r["tenants"],
            f"{r['think_ms']:g}",
            f"{r['queue_rows_per_s'].median:.1f}",
            f"{r['ideal_rows_per_s'].median:.1f}",
            f"{r['single_rows_per_s'].median:.1f}",
            r["fraction_of_ideal"],
            f"{r['latency_p50_ms']:.0f}",
            f"{r['latency_p99_ms']:.0f}",
            f"{r['held_p99_ms']:.2f}",
            "-" if r["all_in_ms"] is None else f"{r['all_in_ms']:.2f}",
            f"{r['rows_per_batch']:.1f}",
        )
        for r in results
    ]
    print(text_table(("sessions", "tenants", "think ms", *titles, "rows per batch"), rows))
    print("medians (quartiles), ratios within a round; held: wait with the worker free; all in: from then to the batch")


def _summary(cells: list[Cell], timeout_s: float) -> dict[str, float]:
    """The worst over tenants and, for waits, over everything.

    ``fraction_of_ideal_<sessions>`` (no think time), ``p99_wait_over_T`` (of what a request waits beyond the running
    forward, over T) and ``idle_wait_when_all_in``: median seconds between "every session is in and the worker is free"
    and the start of the batch. It is the time that threads need to wake; nobody waits for a clock.
    """
    summary: dict[str, float] = {}
    for sessions in sorted({c.sessions for c in cells}):
        same = [c for c in cells if c.sessions == sessions and not c.think_s]
        fractions = [Spread.ratio(c.rates["queue"], c.rates["ideal"]).median for c in same]
        summary[f"fraction_of_ideal_{sessions}"] = min(fractions)
    if timeout_s:
        summary["p99_wait_over_T"] = max(_quantile(c.held_s, 0.99) for c in cells) / timeout_s
    all_in_s = [statistics.median(c.all_in_s) for c in cells if c.all_in_s]
    if all_in_s:
        summary["idle_wait_when_all_in"] = max(all_in_s)
    return summary


def _figure(results: list[dict[str, Any]]) -> Figure:
    """Left: rows per second by sessions; right: latency. No think time."""
    tenants, sessions = sorted({r["tenants"] for r in results}), sorted({r["sessions"] for r in results})
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for color, count in enumerate(tenants):
        line = [r for r in results if r["tenants"] == count and not r["think_ms"]]
        x = [r["sessions"] for r in line]
        for name, style in (("queue", "o-"), ("ideal", ":"), ("single", "--")):
            rates = [r[f"{name}_rows_per_s"] for r in line]
            label = f"{count} tenants" if name == "queue" else None
            errors = [[s.median - s.q25 for s in rates], [s.q75 - s.median for s in rates]]
            left.errorbar(x, [s.median for s in rates], errors, fmt=style, color=f"C{color}", label=label, capsize=3)
        right.plot(x, [r["latency_p50_ms"] for r in line], "o-", color=f"C{color}", label=f"{count} tenants: p50")
        right.plot(x, [r["latency_p99_ms"] for r in line], "^--", color=f"C{color}", label="p99")
    left.set_ylabel("rows per second")
    left.set_title("throughput (dotted: ideal, dashed: one by one)", fontsize=9)
    right.set_ylabel("ms")
    right.set_title("latency of a decision", fontsize=9)
    for axes in (left, right):
        axes.set_xlabel("sessions")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sessions, [str(count) for count in sessions])
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    raise SystemExit(main())
