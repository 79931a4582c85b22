"""What HTTP costs: predictions through the server against the same calls in its process, and its heartbeat under load.

    python scripts/bench/service.py --quick
    python scripts/bench/service.py --json service.json --png service.png

A session asks for one action chunk (one camera image), waits for it, and asks again. Both sides call the same master
with the same backbone, tenants and inference queue; over HTTP there are the client's codec and connection (in a process
of its own, as clients are), uvicorn, the routes and the server's codec on top. Sides and session counts are timed in
turn; ratios are within a round.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # models/ and envs/ lie beside scripts/

from nexus_lightning.monitoring.banner import text_table
from nexus_lightning.services.codec import flatten
from scripts.bench.common import INSTRUCTIONS, ROOT, Spread, load_backbone, parser, prepare, report
from scripts.bench.service_load import closed_loop, observation

STATE_DIM = 8
SIDES = ("http", "in_process")


@dataclass
class Cell:
    """A number of sessions and what was measured with it, a value a round; seconds and predictions per second."""

    sessions: int
    latency_s: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    p99_s: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    rate: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    rows_per_call: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})

    @property
    def overhead(self) -> Spread:
        """Of the median latency: 0.2 is a fifth more than in process."""
        ratios = Spread.ratio(self.latency_s["http"], self.latency_s["in_process"])
        return Spread(ratios.median - 1, ratios.q25 - 1, ratios.q75 - 1, ratios.count)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    prepare(options)
    cells = {n: Cell(n) for n in options.sessions}
    beats: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, _serving(options, Path(folder)) as served:
        master, url, token, tenants = served
        seen = [flatten(observation(i, options.image_size, STATE_DIM)) for i in range(max(options.sessions))]
        seen = [{f"observation/{name}": array for name, array in one.items()} for one in seen]

        def predict(i: int) -> None:
            master.predict(tenants[i % len(tenants)], seen[i], [INSTRUCTIONS[i % len(INSTRUCTIONS)]])

        with _Load(url, token, tenants, options) as load:
            sides = {
                "http": lambda n: load.ask({"sessions": n, "decisions": options.decisions}),
                "in_process": lambda n: closed_loop(predict, n, options.decisions),
            }
            for side in SIDES:  # untimed
                sides[side](min(4, max(options.sessions)))
            shuffle = random.Random(0).shuffle
            plan = [(n, side) for n in options.sessions for side in SIDES]
            for _ in tqdm(range(options.rounds), desc="service", leave=False):
                shuffle(plan)
                for n, side in plan:
                    _measure(cells[n], side, sides[side], master)
            beats = _heartbeats(load, url, token, tenants, options)
    results = [_result(cell) for cell in cells.values()]
    _print(results, beats)
    summary = {}
    for n, cell in cells.items():
        summary[f"http_overhead_{n}"] = cell.overhead.median
        summary[f"http_throughput_of_in_process_{n}"] = Spread.ratio(cell.rate["http"], cell.rate["in_process"]).median
    summary["heartbeat_p99_ms_idle"] = 1e3 * _quantile(beats["idle"], 0.99)
    summary["heartbeat_p99_ms_loaded"] = 1e3 * _quantile(beats["loaded"], 0.99)
    report("service", options, summary, results, _figure(results) if options.png else None)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    out = parser(__doc__)
    out.add_argument("--head", default="mlp", help="mlp or flow_matching, see conf/serve.yaml (default: mlp)")
    out.add_argument("--sessions", nargs="+", type=int, help="(default: 1 2 4 8 16 32 64; quick: 1 4 16)")
    out.add_argument("--tenants", type=int, default=4, help="that share the sessions (default: 4)")
    out.add_argument("--decisions", type=int, help="per session and round (default: 20; quick: 10)")
    out.add_argument("--rounds", type=int, help="(default: 7; quick: 3)")
    out.add_argument("--timeout-ms", type=float, help="T of the inference queue (default: conf/serve.yaml)")
    out.add_argument("--image-size", type=int, default=128, help="(default: 128)")
    options = out.parse_args(arguments)
    options.sessions = options.sessions or ([1, 4, 16] if options.quick else [1, 2, 4, 8, 16, 32, 64])
    options.decisions = options.decisions or (10 if options.quick else 20)
    options.rounds = options.rounds or (3 if options.quick else 7)
    return options


# ----------------------------------------------------------------------------------------------------------- the server


@contextmanager
def _serving(options: argparse.Namespace, folder: Path) -> Iterator[tuple[Any, str, str, list[str]]]:
    """Master and HTTP server in this process: ``(master, url, token, tenant ids)``."""
    from hydra import compose, initialize_config_dir

    from nexus_lightning.services.app import make_server
    from nexus_lightning.services.master import Master
    from nexus_lightning.services.service import Service
    from nexus_lightning.services.spec import register_serve_config, to_serve_config
    from nexus_lightning.services.store import Store

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    register_serve_config()
    settings = [
        f"output_dir={folder}",
        f"data_dir={folder}/data",
        f"placement.accelerator={'cpu' if options.device == 'cpu' else 'gpu'}",
        "limits.requests_per_s=100000",
        f"limits.max_in_flight={4 * max(options.sessions) + 64}",
        *([] if options.timeout_ms is None else [f"queues.inference.timeout_s={options.timeout_ms / 1e3}"]),
        *([] if options.threads is None else [f"placement.torch_threads={options.threads}"]),
    ]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = to_serve_config(compose("serve", overrides=settings))
    store = Store(config.run_dir / "services")
    master = Master(config, load_backbone(options.backbone, options.device, options.dtype))
    service = Service(master, store, config.limits)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            master.run()
        except BaseException as error:
            raised.append(error)

    address = socket.create_server(("127.0.0.1", 0))
    address.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as scripts/serve.py does
    http = make_server(service)
    threads = [threading.Thread(target=run), threading.Thread(target=http.run, args=([address],))]
    for thread in threads:
        thread.start()
    try:
        while not (master.ready and http.started) and not raised:
            time.sleep(0.05)
        if raised:
            raise raised[0]
        service.start()
        token = service.accounts.create("bench", "tenant")
        account = service.accounts.authenticate(f"Bearer {token}")
        tenants = [
            service.create_tenant(
                account, {"name": f"tenant{i}", "schema": _schema(options), "head": {"name": options.head}}
            )
            for i in range(options.tenants)
        ]
        yield master, f"http://127.0.0.1:{address.getsockname()[1]}", token, [t["tenant_id"] for _, t in tenants]
    finally:
        service.stop()
        master.stop()
        http.should_exit = True
        for thread in threads:
            thread.join()
        service.close()


def _schema(options: argparse.Namespace) -> dict[str, Any]:
    sizes = {"image_size": options.image_size, "state_dim": STATE_DIM, "action_dim": 7, "chunk": 8, "execute": 8}
    return {"cameras": ["base_camera"], **sizes, "gripper": "none"}


class _Load:
    """The process of service_load.py."""

    def __init__(self, url: str, token: str, tenants: list[str], options: argparse.Namespace) -> None:
        script = Path(__file__).with_name("service_load.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        setup = {"url": url, "token": token, "tenants": tenants, "image_size": options.image_size}
        setup |= {"state_dim": STATE_DIM, "sessions": max(options.sessions), "instructions": INSTRUCTIONS}
        self.send(setup)

    def __enter__(self) -> _Load:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the clients' process ended; its error is above")
        return json.loads(line)

    def ask(self, command: dict[str, Any]) -> Any:
        self.send(command)
        return self.receive()


# ------------------------------------------------------------------------------------------------------------ measuring


def _measure(cell: Cell, side: str, run: Any, master: Any) -> None:
    before = master.stats()["inference"]
    found = run(cell.sessions)
    after = master.stats()["inference"]
    cell.latency_s[side].append(statistics.median(found["latencies_s"]))
    cell.p99_s[side].append(_quantile(found["latencies_s"], 0.99))
    cell.rate[side].append(found["per_s"])
    calls = after["backbone_calls"] - before["backbone_calls"]
    cell.rows_per_call[side].append((after["rows_served"] - before["rows_served"]) / calls)


def _heartbeats(
    load: _Load, url: str, token: str, tenants: list[str], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of /healthz from a process of its own: idle, and while the most sessions predict."""
    most = max(options.sessions)
    with _Load(url, token, tenants, options) as probe:
        idle = probe.ask({"heartbeat_s": 1.0 if options.quick else 3.0})
        load.send({"sessions": most, "decisions": max(2, 320 // most)})
        loaded = probe.ask({"heartbeat_s": 3.0 if options.quick else 6.0})
        load.receive()
    return {"idle": idle, "loaded": loaded}


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


# ------------------------------------------------------------------------------------------------------------ reporting


def _result(cell: Cell) -> dict[str, Any]:
    found: dict[str, Any] = {"sessions": cell.sessions, "http_overhead": cell.overhead}
    found["throughput_ratio"] = Spread.ratio(cell.rate["http"], cell.rate["in_process"])
    for side in SIDES:
        found[f"{side}_latency_ms"] = Spread.of(cell.latency_s[side]).scaled(1e3)
        found[f"{side}_p99_ms"] = 1e3 * statistics.median(cell.p99_s[side])
        found[f"{side}_per_s"] = Spread.of(cell.rate[side])
        found[f"{side}_rows_per_call"] = statistics.mean(cell.rows_per_call[side])
    return found


def _print(results: list[dict[str, Any]], beats: dict[str, list[float]]) -> None:
    titles = ("http ms", "in process ms", "overhead", "http/s", "in process/s", "ratio", "p99 ms", "in process")
    rows = [
        (
            r["sessions"],
            r["http_latency_ms"],
            r["in_process_latency_ms"],
            r["http_overhead"],
            f"{r['http_per_s'].median:.1f}",
            f"{r['in_process_per_s'].median:.1f}",
            r["throughput_ratio"],
            f"{r['http_p99_ms']:.0f}",
            f"{r['in_process_p99_ms']:.0f}",
            f"{r['http_rows_per_call']:.1f} / {r['in_process_rows_per_call']:.1f}",
        )
        for r in results
    ]
    print(text_table(("sessions", *titles, "rows per call"), rows))
    print("latencies are medians of a round; medians over rounds (quartiles), ratios within a round")
    for name, seconds in beats.items():
        ms = [1e3 * s for s in seconds]
        print(f"/healthz {name}: p50 {_quantile(ms, 0.5):.1f} ms, p99 {_quantile(ms, 0.99):.1f} ms of {len(ms)}")


def _figure(results: list[dict[str, Any]]) -> Figure:
    """Left: predictions per second by sessions; right: latency."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    x = [r["sessions"] for r in results]
    for color, side in enumerate(SIDES):
        for axes, key in ((left, f"{side}_per_s"), (right, f"{side}_latency_ms")):
            spreads = [r[key] for r in results]
            errors = [[s.median - s.q25 for s in spreads], [s.q75 - s.median for s in spreads]]
            label = side.replace("_", " ")
            axes.errorbar(x, [s.median for s in spreads], errors, fmt="o-", color=f"C{color}", label=label, capsize=3)
        right.plot(x, [r[f"{side}_p99_ms"] for r in results], "^--", color=f"C{color}", label="p99")
    left.set_title("predictions per second", fontsize=9)
    right.set_title("latency of a prediction, ms", fontsize=9)
    for axes in (left, right):
        axes.set_xlabel("sessions")
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [str(count) for count in x])
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    raise SystemExit(main())
