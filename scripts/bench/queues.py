"""The training queue: scheduler transitions per second, hand-over of partitions, cost of a job end to end.

``transitions``: whole lives of SFT jobs (reserved, ready, leased, completed) and RL jobs (with their advantage stage)
of 1 to 256 tenants, half of each task, every tenant at its in-flight bound; one transition is one change of one job's
state. In memory, and journalled: every transition committed to SQLite before its call returns. One thread drives them
all, so this is the scheduler's own cost.

``partitions``: put -> get_meta -> get_data -> ack -> clear of one partition, next to ``memcpy``, a clone of its
tensors. The queue copies nothing inside one process, so its bytes per second grow with the partition;
``handover_copies`` counts the tensors that came out in other memory than they went in.

``job``: everything that both planes do for one job, tensors included.

    python scripts/bench/queues.py --quick
    python scripts/bench/queues.py --device cuda
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from matplotlib.figure import Figure
from tensordict import TensorDict, is_leaf_nontensor
from tqdm import tqdm

from nexus_lightning.monitoring.banner import text_table
from nexus_lightning.queues.jobs import Job, JobState, Scheduler
from nexus_lightning.queues.journal import Journal
from nexus_lightning.queues.training import TrainingQueue
from scripts.bench.common import Spread, interleave, parser, prepare, report

#: As in conf/tenant/toy.yaml and conf/tenant/toy_sft.yaml.
IN_FLIGHT = {"sft": 4, "rl": 2}
ROWS = 64


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    device = prepare(options)
    parts = len(options.tenants) + 2
    seconds = options.seconds / parts
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary, tqdm(total=parts, leave=False) as bar:
        folder, transitions = Path(temporary), []
        for tenants in options.tenants:
            transitions.append(measure_transitions(tenants, options.jobs, folder, seconds, device))
            bar.update()
        partitions = [measure_partition(mb, device, seconds / len(options.megabytes)) for mb in options.megabytes]
        bar.update()
        job = measure_job(options.megabytes[0], options.jobs, folder, device, seconds)
        bar.update()
    copies = sum(handover_copies(mb, device) for mb in options.megabytes)
    _print(transitions, partitions, job)
    results = {"transitions": transitions, "partitions": partitions, "job": job}
    summary = _summary(transitions, partitions, job, copies)
    report("queues", options, summary, results, _figure(transitions, partitions) if options.png else None)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    out = parser(__doc__, backbone=None)
    out.add_argument("--tenants", nargs="+", type=int, help="(default: 8 1 64 256, quick: 8 64; the first is reported)")
    out.add_argument("--jobs", type=int, help="per tenant and round (default: 16; quick: 8)")
    out.add_argument("--megabytes", nargs="+", type=float, help="of a partition (default: 1 5 20)")
    out.add_argument("--folder", help="where the journal is written (default: the system's temporary folder)")
    out.add_argument("--seconds", type=float, help="of timing in all, at least 3 rounds each (default: 90; quick: 20)")
    options = out.parse_args(arguments)
    # a copy by several threads stalls whenever one of them finds its core taken, and then flatters the queue
    options.threads = options.threads or 1
    options.tenants = options.tenants or ([8, 64] if options.quick else [8, 1, 64, 256])
    options.jobs = options.jobs or (8 if options.quick else 16)
    options.megabytes = options.megabytes or [1.0, 5.0, 20.0]
    options.seconds = options.seconds if options.seconds is not None else 20.0 if options.quick else 90.0
    return options


# --------------------------------------------------------------------------------------------------------- transitions


def live(scheduler: Scheduler, tenants: int, jobs: int) -> int:
    """Tenants come, train ``jobs`` jobs each, and leave; returns the transitions that their jobs made."""
    tasks = {f"tenant_{i}": "sft" if i % 2 == 0 else "rl" for i in range(tenants)}
    for name, task in tasks.items():
        bound = IN_FLIGHT[task]
        staleness = bound - 1 if task == "rl" else None
        scheduler.register(name, task, max_in_flight=bound, max_policy_staleness=staleness, target_jobs=jobs)
    versions = dict.fromkeys(tasks, 0)
    made = 0
    while not scheduler.targets_met():
        for name, task in tasks.items():
            version = versions[name] if task == "rl" else None
            while job := scheduler.reserve(name, ROWS, behavior_policy_version=version, metadata={"cursor": made}):
                produce(scheduler, job)
                made += 1
        while (job := scheduler.lease_next(versions, timeout_s=0, deadline_s=600)) is not None:
            versions[job.tenant_id] += 1
            scheduler.complete(job.job_id, lease_id=job.lease_id, policy_version=versions[job.tenant_id])
    ended = scheduler.history
    assert len(ended) == made == tenants * jobs and all(job.state == JobState.COMPLETED for job in ended)
    for name in tasks:
        scheduler.unregister(name)
    return sum(len(job.timestamps) for job in ended)  # no state is entered twice here


def produce(scheduler: Scheduler, job: Job) -> None:
    """What a producer does with a reserved job, without tensors."""
    if job.task_type == "rl":
        scheduler.mark(job.job_id, JobState.NEEDS_ADVANTAGES)
        staged = scheduler.lease_stage(JobState.NEEDS_ADVANTAGES, 600, tenant_id=job.tenant_id)
        assert staged is not None and staged.job_id == job.job_id
    scheduler.mark(job.job_id, JobState.READY)


@contextmanager
def both(folder: Path, history: int, **arguments: Any) -> Iterator[dict[str, Scheduler]]:
    """A scheduler in memory and one on a fresh journal; both live through all rounds, as in a run."""
    journal = Journal(folder / "jobs.sqlite")
    try:
        yield {
            "memory": Scheduler(history=history, **arguments),
            "journal": Scheduler(history=history, journal=journal, **arguments),
        }
    finally:
        journal.close()
        (folder / "jobs.sqlite").unlink()


def measure_transitions(
    tenants: int, jobs: int, folder: Path, seconds: float, device: torch.device
) -> dict[str, int | Spread]:
    """Transitions per second in memory and journalled, timed in turn."""
    counted: dict[str, int] = {}

    def run(name: str, scheduler: Scheduler) -> None:
        counted[name] = live(scheduler, tenants, jobs)

    with both(folder, history=tenants * jobs) as schedulers:
        times = interleave({name: partial(run, name, s) for name, s in schedulers.items()}, device, seconds)
    rates = {name: Spread.of([counted[name] / s for s in values]) for name, values in times.items()}
    return {"tenants": tenants, "jobs": tenants * jobs, "transitions": counted["memory"], **rates}


# ---------------------------------------------------------------------------------------------------------- partitions


def partition_of(megabytes: float, device: torch.device) -> TensorDict:
    """A partition of about that size: the columns of a rollout of ``ROWS`` decisions with token features."""
    width = 256
    tokens = max(1, round(megabytes * 1e6 / (ROWS * width * 4)))
    return TensorDict(
        {
            "features": {"tokens": torch.randn(ROWS, tokens, width), "mask": torch.ones(ROWS, tokens).bool()},
            "state": torch.randn(ROWS, 8),
            "vla_action": {"chunk": torch.randn(ROWS, 8, 7)},
            "executed": torch.ones(ROWS, 8).bool(),
            "sample_log_prob": torch.randn(ROWS),
            "state_value": torch.randn(ROWS, 1),
        },
        [ROWS],
    ).to(device)


FIELDS = ("features", "state", "vla_action", "executed", "sample_log_prob", "state_value")


def tensors(td: TensorDict) -> list[torch.Tensor]:
    leaves = td.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
    return [value for _, value in sorted((str(key), value) for key, value in leaves)]


def hand_over(queue: TrainingQueue, partition_id: str, td: TensorDict) -> TensorDict:
    """Through the queue and out again."""
    queue.put(partition_id, td, tenant_id="tenant_0")
    meta = queue.get_meta(FIELDS, None, partition_id, "train")
    assert meta is not None
    out = queue.get_data(meta)
    queue.ack(meta)
    queue.clear(partition_id)
    return out  # pyright: ignore[reportReturnType]


def measure_partition(megabytes: float, device: torch.device, seconds: float) -> dict[str, float | Spread]:
    """GB per second through the queue and by memcpy."""
    td, queue = partition_of(megabytes, device), TrainingQueue()
    size = sum(t.numel() * t.element_size() for t in tensors(td))
    times = interleave({"queue": lambda: hand_over(queue, "p", td), "memcpy": lambda: td.clone()}, device, seconds)
    return {
        "bytes": size,
        "queue_us": Spread.of(times["queue"]).scaled(1e6),
        "memcpy_us": Spread.of(times["memcpy"]).scaled(1e6),
        "queue_gb_per_s": Spread.of([size / s / 1e9 for s in times["queue"]]),
        "memcpy_gb_per_s": Spread.of([size / s / 1e9 for s in times["memcpy"]]),
        "over_memcpy": Spread.ratio(times["memcpy"], times["queue"]),
    }


def handover_copies(megabytes: float, device: torch.device) -> int:
    """Tensors that came out of the queue in other memory than they went in, whole and row range by row range."""
    td, queue = partition_of(megabytes, device), TrainingQueue()
    before = tensors(td)
    after = tensors(hand_over(queue, "whole", td))
    copies = sum(a.data_ptr() != b.data_ptr() for a, b in zip(before, after, strict=True))
    queue.put("rows", td, tenant_id="tenant_0")
    start = 0
    while (meta := queue.get_meta(FIELDS, ROWS // 4, "rows", "train")) is not None:
        for a, b in zip(before, tensors(queue.get_data(meta)), strict=True):  # pyright: ignore[reportArgumentType]
            copies += a[start : start + len(meta)].data_ptr() != b.data_ptr()
        start += len(meta)
    assert start == ROWS
    return copies


# ------------------------------------------------------------------------------------------------------- a job's cost


def measure_job(
    megabytes: float, jobs: int, folder: Path, device: torch.device, seconds: float
) -> dict[str, int | Spread]:
    """Microseconds per job through both planes, one tenant of each task, in memory and journalled."""
    td, queue = partition_of(megabytes, device), TrainingQueue()
    version = count()

    def run(task: str, scheduler: Scheduler) -> None:
        done = sum(whole_job(scheduler, queue, task, td, next(version)) for _ in range(jobs))
        assert done == jobs and not queue.partitions()

    with both(folder, history=jobs, on_terminal=lambda job: queue.clear(job.partition_id)) as schedulers:
        for scheduler in schedulers.values():
            for task in IN_FLIGHT:
                scheduler.register(task, task, max_in_flight=1)
        functions = {f"{t}_{name}": partial(run, t, s) for t in IN_FLIGHT for name, s in schedulers.items()}
        times = interleave(functions, device, seconds)
    return {"jobs": jobs, **{f"{name}_us": Spread.of(v).scaled(1e6 / jobs) for name, v in times.items()}}


def whole_job(scheduler: Scheduler, queue: TrainingQueue, tenant: str, td: TensorDict, version: int) -> int:
    """One job as the product does it: producer, advantage stage, actor. The partition is cleared when it ends."""
    job = scheduler.reserve(tenant, ROWS, behavior_policy_version=version, metadata={"cursor": version})
    assert job is not None
    queue.put(job.partition_id, td, tenant_id=job.tenant_id)
    columns = FIELDS
    if job.task_type == "rl":
        scheduler.mark(job.job_id, JobState.NEEDS_ADVANTAGES)
        staged = scheduler.lease_stage(JobState.NEEDS_ADVANTAGES, 600, tenant_id=job.tenant_id)
        assert staged is not None
        meta = queue.get_meta(("executed",), ROWS, staged.partition_id, "advantages")
        assert meta is not None
        derived = TensorDict({"advantage": td["state_value"], "value_target": td["state_value"]}, [ROWS])
        queue.put(derived, metadata=meta)
        queue.ack(meta)
        columns = (*FIELDS, "advantage", "value_target")
    scheduler.mark(job.job_id, JobState.READY)
    leased = scheduler.lease_next({job.tenant_id: version}, timeout_s=0, deadline_s=600)
    assert leased is not None
    queue.release(leased.partition_id, "train")
    meta = queue.get_meta(columns, None, leased.partition_id, "train")
    assert meta is not None
    queue.get_data(meta)
    queue.ack(meta)
    ended = scheduler.complete(leased.job_id, lease_id=leased.lease_id, policy_version=version + 1)
    return int(ended.state == JobState.COMPLETED)


# ------------------------------------------------------------------------------------------------------------- reports


def _print(transitions: list[dict[str, Any]], partitions: list[dict[str, Any]], job: dict[str, Any]) -> None:
    rows = [
        (r["tenants"], r["jobs"], r["transitions"], *(_thousands(r[way]) for way in ("memory", "journal")))
        for r in transitions
    ]
    print(text_table(("tenants", "jobs", "transitions", "in memory, 1000/s", "journalled, 1000/s"), rows))
    print()
    rows = [
        (f"{r['bytes'] / 1e6:.1f}", r["queue_us"], r["memcpy_us"], r["queue_gb_per_s"], r["memcpy_gb_per_s"])
        for r in partitions
    ]
    print(text_table(("partition MB", "put/get us", "memcpy us", "put/get GB/s", "memcpy GB/s"), rows))
    print()
    rows = [(task, job[f"{task}_memory_us"], job[f"{task}_journal_us"]) for task in IN_FLIGHT]
    print(text_table(("one job end to end", "in memory, us", "journalled, us"), rows))
    print("medians (quartiles)")


def _thousands(rate: Spread) -> str:
    return str(rate.scaled(1e-3))


def _summary(
    transitions: list[dict[str, Any]], partitions: list[dict[str, Any]], job: dict[str, Any], copies: int
) -> dict[str, float]:
    """``transitions_per_s`` is that of the first number of tenants; ``_<n>`` of the others."""
    first, *others = transitions
    summary = {
        "transitions_per_s": first["memory"].median,
        "durable_transitions_per_s": first["journal"].median,
        "handover_copies": float(copies),
    }
    for r in others:
        summary[f"transitions_per_s_{r['tenants']}"] = r["memory"].median
        summary[f"durable_transitions_per_s_{r['tenants']}"] = r["journal"].median
    for r in partitions:
        summary[f"put_get_over_memcpy_{math.ceil(r['bytes'] / 1e6 - 0.5)}mb"] = r["over_memcpy"].median
    for task in IN_FLIGHT:
        summary[f"{task}_job_us"] = job[f"{task}_memory_us"].median
        summary[f"durable_{task}_job_us"] = job[f"{task}_journal_us"].median
    return summary


def _figure(transitions: list[dict[str, Any]], partitions: list[dict[str, Any]]) -> Figure:
    """Left: transitions per second by tenants. Right: bytes per second by size of a partition."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    ordered = sorted(transitions, key=lambda r: r["tenants"])
    for way, label in (("memory", "in memory"), ("journal", "journalled (SQLite)")):
        _line(left, [r["tenants"] for r in ordered], [r[way] for r in ordered], label)
    left.set_xscale("log", base=2)
    left.set_xticks([r["tenants"] for r in ordered], [str(r["tenants"]) for r in ordered])
    left.set_xlabel("tenants")
    left.set_ylabel("transitions / s")
    for way, label in (("queue", "put, get, ack, clear"), ("memcpy", "memcpy (clone)")):
        _line(right, [r["bytes"] / 1e6 for r in partitions], [r[f"{way}_gb_per_s"] for r in partitions], label)
    right.set_xlabel("MB per partition")
    right.set_ylabel("GB / s")
    for axes in (left, right):
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure


def _line(axes: Any, x: list[float], spreads: list[Spread], label: str) -> None:
    errors = [[s.median - s.q25 for s in spreads], [s.q75 - s.median for s in spreads]]
    axes.errorbar(x, [s.median for s in spreads], errors, fmt="o-", capsize=3, label=label)


if __name__ == "__main__":
    raise SystemExit(main())
