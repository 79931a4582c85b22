"""Runs that must learn, on several seeds: one table, curves, JSON.

Every row is one or more ``python train.py experiment=<name> seed=<s>`` (``conf/experiment/``), each in a process of its
own. A finished run is kept under ``--out`` with its command, commit and duration, and not run again while the command
and what it configures are the same: an interrupted report goes on where it stopped. ``--again`` starts over.

    python scripts/learning_report.py toy_rl --seeds 0 --json learning.json --png learning.png
    python scripts/learning_report.py                    # every row, seeds 0 1 2: hours on two cores
    python scripts/learning_report.py --list
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from tqdm import tqdm  # noqa: E402

from nexus_lightning.monitoring.banner import text_table  # noqa: E402
from scripts.bench.common import machine  # noqa: E402

#: Parts of the configuration that decide what is learnt.
DECISIVE = ("tenants", "backbone", "seed")


@dataclass(frozen=True)
class Result:
    """One tenant of one run, as the table shows it.

    Attributes:
        tenant: its name in the experiment.
        goal: what the row must show, in words.
        at_least: lowest mean success rate over the seeds, or None where another rule decides.
        improves: the last evaluation must be better than the first by this much; 0.0: not worse beyond noise.
        within_s: the first evaluation that reaches ``at_least`` must come this early, seconds of the run.
        beats: another tenant of the same run, which it must outdo.
    """

    tenant: str
    goal: str
    at_least: float | None = None
    improves: float | None = None
    within_s: float | None = None
    beats: str | None = None


@dataclass(frozen=True)
class Row:
    """A row of the report: experiments to run, and what their tenants must show."""

    results: tuple[Result, ...]
    experiments: tuple[str, ...] = ()  # default: the row's own name
    alone: bool = False  # run every tenant also without its mates, and compare


ROWS: dict[str, Row] = {
    "toy_rl": Row(
        (
            Result("toy_ppo", "reaches the ceiling", at_least=0.95),
            Result("toy_grpo", "reaches the ceiling", at_least=0.95),
            Result("toy_flow", "improves clearly", improves=0.2),
        )
    ),
    "maniskill_sft": Row(
        (
            Result("pushcube_state", ">= 98 %", at_least=0.98),
            Result("pickcube_state", ">= 98 %", at_least=0.98),
            Result("stackcube_state", ">= 80 %", at_least=0.80),
            Result("pushcube_image", ">= 95 %", at_least=0.95),
            Result("pickcube_image", ">= 60 %", at_least=0.60),
        )
    ),
    "maniskill_rl_finetune": Row(
        (
            Result("pullcube", ">= 90 % within 15 minutes", at_least=0.90, within_s=900.0),
            Result("stackcube", "not worse than its start", improves=0.0),
        ),
        experiments=("maniskill_rl_finetune", "maniskill_rl_stackcube"),
    ),
    "libero_sft": Row(
        (
            Result("libero_privileged", ">= 90 % (privileged)", at_least=0.90),
            Result("libero_vision", ">= 50 % (images)", at_least=0.50),
        )
    ),
    "offline_rl": Row(
        (
            Result("toy_bc", "cloning, for comparison"),
            Result("toy_awr", "beats cloning", beats="toy_bc"),
            Result("toy_iql", "for comparison"),
        )
    ),
    "four_tenants": Row(
        (
            Result("pullcube", "as alone"),
            Result("pushcube", "as alone"),
            Result("libero", "as alone"),
            Result("maniskill_sft", "as alone"),
        ),
        alone=True,
    ),
}


@dataclass
class Run:
    """One ``train.py`` run: what to start, and what it left."""

    row: str
    experiment: str
    seed: int
    without: tuple[str, ...] = ()
    label: str = "together"
    record: dict[str, Any] = field(default_factory=dict)

    def folder(self, out: Path) -> Path:
        return out / self.row / f"{self.experiment}-{self.label}-seed{self.seed}"

    def command(self, folder: Path, data_dir: Path, overrides: list[str]) -> list[str]:
        return [
            sys.executable,
            "train.py",
            f"experiment={self.experiment}",
            f"seed={self.seed}",
            *(f"~tenants.{name}" for name in self.without),
            f"output_dir={folder}",
            f"data_dir={data_dir}",
            "run_name=learning",
            "trainer.enable_progress_bar=false",
            *overrides,
        ]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    if options.list:
        rows = [(name, r.tenant, r.goal) for name, row in ROWS.items() for r in row.results]
        print(text_table(("row", "tenant", "must show"), rows))
        return 0
    runs = [run for name in options.names for run in runs_of(name, options.seeds)]
    with tqdm(total=len(runs), desc="learning") as bar:
        for run in runs:
            bar.set_postfix_str(f"{run.experiment} {run.label} seed {run.seed}")
            run.record = finished(run, options) or start(run, options)
            bar.update()
    report = {name: row_report(name, [run for run in runs if run.row == name]) for name in options.names}
    print(table(report))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "script": "learning_report",
            "machine": machine(),
            "summary": {name: row["numbers"] for name, row in report.items()},
            "results": report,
            "runs": [run.record | {"row": run.row, "label": run.label, "seed": run.seed} for run in runs],
        }
        options.json.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    if options.png is not None:
        options.png.parent.mkdir(parents=True, exist_ok=True)
        figure(report, runs).savefig(options.png, dpi=110)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("names", nargs="*", help="rows (default: all)")
    out.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    out.add_argument("--json", type=Path, help="write the numbers there; summary.<row> are those of the table")
    out.add_argument("--png", type=Path, help="write the curves there")
    out.add_argument("--out", type=Path, default=Path("outputs/learning"), help="run folders (default: %(default)s)")
    out.add_argument("--data", type=Path, default=Path("data"), help="recorded demonstrations (default: %(default)s)")
    out.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further overrides of every run")
    out.add_argument("--again", action="store_true", help="run also what is finished")
    out.add_argument("--list", action="store_true", help="print the rows and stop")
    options = out.parse_args(arguments)
    unknown = [name for name in options.names if name not in ROWS]
    if unknown:
        out.error(f"no such row: {', '.join(unknown)}; choose from {', '.join(ROWS)}")
    options.names = options.names or list(ROWS)
    options.out, options.data = options.out.resolve(), options.data.resolve()
    return options


def runs_of(name: str, seeds: list[int]) -> list[Run]:
    """All runs of a row, seed by seed."""
    row, runs = ROWS[name], []
    for seed in seeds:
        for experiment in row.experiments or (name,):
            runs.append(Run(name, experiment, seed))
        if row.alone:
            tenants = [result.tenant for result in row.results]
            for tenant in tenants:
                mates = tuple(mate for mate in tenants if mate != tenant)
                runs.append(Run(name, name, seed, mates, label=f"{tenant}-alone"))
    return runs


def finished(run: Run, options: argparse.Namespace) -> dict[str, Any] | None:
    """The record of an earlier, complete run with the same command and configuration; None when there is none."""
    path = run.folder(options.out) / "record.json"
    if options.again or not path.is_file():
        return None
    record = json.loads(path.read_text())
    command = run.command(run.folder(options.out), options.data, options.set)
    kept = Path(record["run_dir"]) / "config.yaml"
    if record["command"] != command[1:] or not kept.is_file():
        return None
    was, now = yaml.safe_load(kept.read_text()), configured(command[2:])
    record.setdefault("payloads", digests(kept.parent))
    return record if all(was[key] == now[key] for key in DECISIVE) else None


def configured(overrides: list[str]) -> dict[str, Any]:
    """What ``train.py`` would write into the run's config.yaml."""
    from nexus_lightning.config import compose_config

    return yaml.safe_load(yaml.safe_dump(asdict(compose_config(ROOT / "conf", overrides))))


def start(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Run it, and keep what it left; its output goes to ``log.txt`` in the run's folder.

    Raises:
        SystemExit: the run failed; the message ends with the last lines of its output.
    """
    folder = run.folder(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    command, begun = run.command(folder, options.data, options.set), time.time()
    with (folder / "log.txt").open("w") as log:
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=_environment()).returncode
    if code != 0:
        tail = "\n".join((folder / "log.txt").read_text().splitlines()[-30:])
        raise SystemExit(f"error: {' '.join(command[1:])} ended with exit code {code}:\n{tail}")
    run_dir = (folder / "latest").resolve()
    record = {
        "command": command[1:],
        "run_dir": str(run_dir),
        "commit": machine()["commit"],
        "minutes": (time.time() - begun) / 60,
        "tenants": json.loads((run_dir / "summary.json").read_text())["tenants"],
        "curves": curves(run_dir),
        "payloads": digests(run_dir),
    }
    (folder / "record.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def _environment() -> dict[str, str]:
    """Simulator processes start quickly only with compiled bytecode."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {"MUJOCO_GL": "osmesa", **environment}


def digests(run_dir: Path) -> dict[str, str]:
    """Of the tensors of every tenant's last payload: equal digests, equal bits."""
    from nexus_lightning.checkpoint import list_payloads, read_manifest

    last = {folder.name: list_payloads(folder)[-1:] for folder in sorted((run_dir / "tenants").iterdir())}
    return {tenant: read_manifest(path)["tensors_digest"] for tenant, paths in last.items() for path in paths}


def curves(run_dir: Path) -> dict[str, list[dict[str, float]]]:
    """Every evaluation of every tenant: ``jobs`` of the tenant, ``time_s`` of the run, ``success_rate``, ``n``."""
    out: dict[str, list[dict[str, float]]] = {}
    with (run_dir / "metrics.csv").open() as file:
        for line in csv.DictReader(file):
            for key, value in line.items():
                if key is None or not value or not key.startswith("eval/") or not key.endswith("/success_rate"):
                    continue
                tenant = key.split("/")[1]
                out.setdefault(tenant, []).append(
                    {
                        "jobs": float(line[f"eval/{tenant}/policy_version"]),
                        "time_s": float(line["time_s"]),
                        "success_rate": float(value),
                        "n": float(line[f"eval/{tenant}/n"]),
                    }
                )
    return out


# ------------------------------------------------------------------------------------------------------------ the table


def row_report(name: str, runs: list[Run]) -> dict[str, Any]:
    """Numbers and verdicts of one row over its seeds."""
    lines, numbers = [], {"seeds": len({run.seed for run in runs})}
    together = [run for run in runs if run.label == "together"]
    for result in ROWS[name].results:
        mine = [run for run in together if result.tenant in run.record["tenants"]]
        line = tenant_line(result, mine)
        if result.beats is not None:
            other = tenant_line(Result(result.beats, ""), mine)
            line["other"], line["met"] = other["success"], line["success"] > other["success"]
        if ROWS[name].alone:
            alone = [run for run in runs if run.label == f"{result.tenant}-alone"]
            line |= compared(line, tenant_line(result, alone))
            ends = [[run.record["payloads"][result.tenant] for run in some] for some in (mine, alone)]
            line["same_payload"] = ends[0] == ends[1]
        lines.append(line)
        numbers[result.tenant] = line["success"]
        for key in ("first", "other", "alone", "minutes_to_goal"):
            if line.get(key) is not None:
                numbers[f"{result.tenant}_{key}"] = line[key]
    numbers["minutes"] = sum(run.record["minutes"] for run in runs) / max(1, numbers["seeds"])
    commits = sorted({run.record["commit"] for run in runs})
    return {"lines": lines, "numbers": numbers, "commits": commits}


def tenant_line(result: Result, runs: list[Run]) -> dict[str, Any]:
    """Success of one tenant over the runs (seeds)."""
    ends = [run.record["tenants"][result.tenant]["eval"] for run in runs]
    starts = [run.record["tenants"][result.tenant]["eval_first"] for run in runs]
    line: dict[str, Any] = {
        "tenant": result.tenant,
        "goal": result.goal,
        "success": statistics.fmean(end["success_rate"] for end in ends),
        "per_seed": [end["success_rate"] for end in ends],
        "n": sum(end["n"] for end in ends),
        "first": statistics.fmean(s["success_rate"] for s in starts) if all(starts) else None,
        "privileged": any(run.record["tenants"][result.tenant]["privileged"] for run in runs),
        "met": None,
    }
    if result.at_least is not None:
        line["met"] = line["success"] >= result.at_least
    if result.within_s is not None:
        assert result.at_least is not None
        line["minutes_to_goal"], line["met"] = time_to(result, runs)
    if result.improves is not None:
        assert line["first"] is not None
        slack = 0.0 if result.improves else noise(line["first"], line["success"], line["n"], line["n"])
        line["met"] = line["success"] >= line["first"] + result.improves - slack
    return line


def time_to(result: Result, runs: list[Run]) -> tuple[float | None, bool]:
    """Minutes of the run until the goal was first reached (mean; None when a seed never did), and all in time?"""
    times = []
    for run in runs:
        curve = run.record["curves"][result.tenant]
        times.append(next((p["time_s"] for p in curve if p["success_rate"] >= (result.at_least or 0)), math.inf))
    in_time = all(t <= (result.within_s or math.inf) for t in times)
    return (statistics.fmean(times) / 60 if all(map(math.isfinite, times)) else None), in_time


def noise(a: float, b: float, n_a: int, n_b: int) -> float:
    """Half the 95 % interval of the difference of two success rates (normal approximation, pooled)."""
    pooled = (a * n_a + b * n_b) / (n_a + n_b)
    pooled = min(max(pooled, 1 / (n_a + n_b)), 1 - 1 / (n_a + n_b))  # never zero: all successes prove little
    return 1.96 * math.sqrt(pooled * (1 - pooled) * (1 / n_a + 1 / n_b))


def compared(line: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """Together against alone."""
    slack = noise(line["success"], alone["success"], line["n"], alone["n"])
    met = abs(line["success"] - alone["success"]) <= slack
    return {"alone": alone["success"], "alone_per_seed": alone["per_seed"], "noise": slack, "met": met}


def table(report: dict[str, Any]) -> str:
    """The rows as text."""
    rows = []
    for name, row in report.items():
        for line in row["lines"]:
            extra = []
            if line["first"] is not None:
                extra.append(f"from {line['first']:.0%}")
            if line.get("minutes_to_goal") is not None:
                extra.append(f"goal after {line['minutes_to_goal']:.1f} min")
            if line.get("other") is not None:
                extra.append(f"against {line['other']:.0%}")
            if line.get("alone") is not None:
                same = ", the same payload" if line["same_payload"] else ""
                extra.append(f"alone {line['alone']:.0%} +- {line['noise']:.0%}{same}")
            seeds = ", ".join(f"{value:.0%}" for value in line["per_seed"])
            rows.append(
                (
                    name,
                    line["tenant"] + (" (privileged)" if line["privileged"] else ""),
                    f"{line['success']:.0%}",
                    seeds,
                    line["n"],
                    "; ".join(extra),
                    line["goal"],
                    {True: "yes", False: "NO", None: "-"}[line["met"]],
                    f"{row['numbers']['minutes']:.1f}",
                    ", ".join(row["commits"]),
                )
            )
    head = ("row", "tenant", "success", "per seed", "n", "", "must show", "met", "min/seed", "commit")
    return text_table(head, rows)


def figure(report: dict[str, Any], runs: list[Run]) -> Figure:
    """Success against the tenant's jobs, a panel per tenant of every row."""
    panels = [(name, line) for name, row in report.items() for line in row["lines"]]
    columns = min(4, len(panels))
    height = math.ceil(len(panels) / columns)
    result = Figure(figsize=(3.6 * columns, 2.7 * height), layout="constrained")
    axes = result.subplots(height, columns, squeeze=False).ravel()
    for axis, (name, line) in zip(axes, panels, strict=False):
        for run in runs:
            points = run.record["curves"].get(line["tenant"]) if run.row == name else None
            if not points:
                continue
            style, colour = "-o" if run.label == "together" else ":x", f"C{run.seed % 10}"
            label = f"seed {run.seed}" if run.label == "together" else None
            axis.plot(
                [p["jobs"] for p in points], [p["success_rate"] for p in points], style, color=colour, ms=4, label=label
            )
        goal = next(r for r in ROWS[name].results if r.tenant == line["tenant"])
        if goal.at_least is not None:
            axis.axhline(goal.at_least, color="grey", lw=0.8, ls="--")
        axis.set_ylim(-0.03, 1.03)
        axis.set_title(f"{name}: {line['tenant']}", fontsize=9)
        axis.tick_params(labelsize=8)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    axes[0].legend(fontsize=7)
    result.supxlabel("training jobs of the tenant (dashed: the goal; dotted: the tenant alone)", fontsize=9)
    result.supylabel("success rate on unseen seeds", fontsize=9)
    return result


if __name__ == "__main__":
    raise SystemExit(main())
