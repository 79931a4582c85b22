"""The end of a run: ``summary.json``, the final text table, and ``report.png`` + ``report.html`` from a run folder.

Read: ``metrics.csv`` (``step``, ``time_s``, ``train/<tenant>/{loss,episode_return,success_rate,episodes}``,
``eval/<tenant>/{success_rate,n,ci_low,ci_high}``), ``events.jsonl``, ``summary.json``, ``config.yaml``,
``videos/<tenant>*``. Each may be missing: the report of an interrupted run shows what there is and says
what there is not.
"""

from __future__ import annotations

import base64
import csv
import html
import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import yaml

from nexus_lightning.monitoring.banner import privileged_text, text_table
from nexus_lightning.monitoring.events import SERVICES, ServiceTimes, event_end_s, read_events
from nexus_lightning.monitoring.stats import duration_text, finite, wilson_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colour-blind safe (Okabe and Ito 2008), one per tenant.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F3C8D", "#444444")
#: Videos up to this size travel inside the HTML; larger ones are linked.
EMBED_VIDEO_BYTES = 3_000_000
EVAL_KEYS = {"success_rate": float, "n": int, "ci_low": float, "ci_high": float}
TENANT_KEYS = {"task": str, "jobs_completed": int, "optimizer_steps": int, "policy_version": int}


# ---------------------------------------------------------------------------------------------------------- summary


def write_summary(
    run_dir: str | os.PathLike,
    tenants: Mapping[str, Mapping[str, Any]],
    backbone_unchanged: bool,
    jobs_by_state: Mapping[str, Any],
    utilisation: Mapping[str, float],
    **extra: Any,
) -> dict[str, Any]:
    """Check and write ``<run>/summary.json`` atomically; returns what was written.

    A number of a tenant that is not finite is written as null: the other tenants' numbers must not be lost with it.

    Args:
        run_dir: the run folder.
        tenants: ``{name: {task, jobs_completed, optimizer_steps, policy_version, eval}}``; ``eval`` is
            ``{success_rate, n, ci_low, ci_high}`` or None when nothing was evaluated, ``eval_first`` (the first one) is
            optional, and more keys are kept.
        backbone_unchanged: whether the backbone's bits are those of the start.
        jobs_by_state: ``{state: count}`` or ``{tenant: {state: count}}``.
        utilisation: ``{service: fraction}``.
        extra: more top-level JSON values.

    Raises:
        ValueError: every missing or ill-typed key, one line each.
    """
    problems = [p for name, tenant in tenants.items() for p in _tenant_problems(name, tenant)]
    if not isinstance(backbone_unchanged, bool):
        problems.append(f"backbone_unchanged={backbone_unchanged!r}: must be a bool")
    for service in SERVICES:
        value = utilisation.get(service)
        if not isinstance(value, (int, float)) or not 0 <= value <= 1:
            problems.append(f"utilisation.{service}={value!r}: must be a fraction in [0, 1]")
    if problems:
        raise ValueError("summary.json:\n" + "\n".join(problems))
    summary = finite(
        {
            "tenants": tenants,
            "backbone_unchanged": backbone_unchanged,
            "jobs_by_state": jobs_by_state,
            "utilisation": utilisation,
            **extra,
        }
    )
    path = Path(run_dir) / "summary.json"
    temporary = path.with_suffix(".json.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(summary, indent=2, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return summary


def _tenant_problems(name: str, tenant: Mapping[str, Any]) -> list[str]:
    def check(values: Mapping[str, Any], keys: Mapping[str, type], where: str) -> list[str]:
        found = []
        for key, kind in keys.items():
            accepted = (int, float) if kind is float else kind
            if key not in values:
                found.append(f"{where}.{key}: missing")
            elif not isinstance(values[key], accepted) or isinstance(values[key], bool):
                found.append(f"{where}.{key}={values[key]!r}: must be {kind.__name__}")
            elif kind is float and math.isfinite(values[key]) and not 0 <= values[key] <= 1:
                found.append(f"{where}.{key}={values[key]!r}: must lie in [0, 1]")
        return found

    where = f"tenants.{name}"
    found = check(tenant, TENANT_KEYS, where)
    if "eval" not in tenant:
        found.append(f"{where}.eval: missing (None when nothing was evaluated)")
    for key in ("eval_first", "eval"):
        if tenant.get(key) is not None:
            found += check(tenant[key], EVAL_KEYS, f"{where}.{key}")
    return found


def summary_table(summary: Mapping[str, Any]) -> str:
    """The final text: one row per tenant (success first -> last, n, 95 % interval), then the facts of the run."""
    rows = []
    for name, tenant in summary["tenants"].items():
        last, first = tenant.get("eval"), tenant.get("eval_first")
        counts = [tenant["jobs_completed"], tenant["optimizer_steps"], tenant["policy_version"]]
        rows.append([name, tenant["task"], *counts, success_text(last, first), interval_text(last)])
    table = text_table(["tenant", "task", "jobs", "steps", "version", "success", "95 % interval"], rows)
    facts = [
        f"backbone unchanged: {'yes' if summary['backbone_unchanged'] else 'NO'}",
        "busy: " + ", ".join(f"{service} {share:.0%}" for service, share in summary["utilisation"].items()),
        "jobs: " + (", ".join(f"{state} {n}" for state, n in _jobs_total(summary["jobs_by_state"]).items()) or "none"),
    ]
    return "\n".join([table, "", *facts])


def success_text(last: Mapping | None, first: Mapping | None = None) -> str:
    """``30 % -> 75 % (n=20)``; a dash when nothing was evaluated."""
    if last is None:
        return "-"
    if first is None:
        return f"{_percent(last['success_rate'])} (n={last['n']})"
    same = first["n"] == last["n"]
    before = _percent(first["success_rate"]) + ("" if same else f" (n={first['n']})")
    return f"{before} -> {_percent(last['success_rate'])} (n={last['n']})"


def interval_text(evaluation: Mapping | None) -> str:
    """``53 % .. 89 %``; a dash when nothing was evaluated."""
    return "-" if evaluation is None else f"{_percent(evaluation['ci_low'])} .. {_percent(evaluation['ci_high'])}"


def _percent(share: float | None) -> str:
    return "-" if share is None or not math.isfinite(share) else f"{share:.0%}"


def _jobs_total(jobs_by_state: Mapping[str, Any]) -> dict[str, int]:
    """``{state: n}`` over all tenants."""
    total: dict[str, int] = {}
    for key, value in jobs_by_state.items():
        for state, n in value.items() if isinstance(value, Mapping) else [(key, value)]:
            total[state] = total.get(state, 0) + n
    return {state: n for state, n in total.items() if n}


# ------------------------------------------------------------------------------------------------------- run folder


class Point(NamedTuple):
    """One logged value."""

    step: int
    time_s: float | None
    value: float


@dataclass
class RunData:
    """What a run folder holds, read once.

    Attributes:
        series: ``{metric name: points in step order}``; a step logged twice (a resumed run) counts with its last value.
        spans: service spans of ``events.jsonl``.
        wall_s: last recorded time, seconds since run start.
        summary / config: parsed files, empty when missing.
    """

    run_dir: Path
    tenants: list[str]
    series: dict[str, list[Point]] = field(default_factory=dict)
    spans: list[dict] = field(default_factory=list)
    points: list[dict] = field(default_factory=list)
    wall_s: float = 0.0
    summary: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)

    def metric(self, stage: str, tenant: str, name: str) -> list[Point]:
        """Points of ``<stage>/<tenant>/<name>``."""
        return self.series.get(f"{stage}/{tenant}/{name}", [])

    def task(self, tenant: str) -> str:
        """The tenant's task, a dash when no file names it."""
        known = self.summary.get("tenants", {}).get(tenant) or _tenant_config(self.config, tenant)
        return str(known.get("task", "-"))

    def privileged(self, tenant: str) -> list[str]:
        """Names of simulator-only inputs of the tenant."""
        summary = self.summary.get("tenants", {}).get(tenant, {})
        found = _find(summary, "privileged") or _find(_tenant_config(self.config, tenant), "privileged") or []
        return [str(name) for name in found]

    def evaluations(self, tenant: str) -> list[dict]:
        """Evaluations in step order: ``{step, time_s, success_rate, n, ci_low, ci_high}``."""
        columns = {k: {p.step: p.value for p in self.metric("eval", tenant, k)} for k in ("n", "ci_low", "ci_high")}
        found = []
        for step, time_s, rate in self.metric("eval", tenant, "success_rate"):
            n = int(columns["n"].get(step, 0))
            low, high = wilson_interval(round(rate * n), n)
            interval = {"ci_low": columns["ci_low"].get(step, low), "ci_high": columns["ci_high"].get(step, high)}
            found.append({"step": step, "time_s": time_s, "success_rate": rate, "n": n, **interval})
        return found

    def utilisation(self) -> dict[str, float]:
        """From the summary, else from the recorded spans."""
        if self.summary.get("utilisation"):
            return self.summary["utilisation"]
        times = ServiceTimes()
        for span in self.spans:
            times.add(span["service"], span["tenants"], span["start_s"], span["end_s"])
        return times.utilisation(self.wall_s)


def read_run(run_dir: str | os.PathLike) -> RunData:
    """Read a run folder.

    Raises:
        ValueError: no such folder, nothing of a run in it, or a file that is not what its name says.
    """
    run_dir = Path(run_dir)
    names = ("metrics.csv", "events.jsonl", "summary.json", "config.yaml")
    paths = {name: run_dir / name for name in names if (run_dir / name).exists()}
    if not paths:
        raise ValueError(f"{run_dir}: not a run folder: none of {', '.join(names)} is there")
    events = read_events(paths["events.jsonl"]) if "events.jsonl" in paths else []
    data = RunData(run_dir, tenants=[])
    data.spans = [e for e in events if e["type"] == "span"]
    data.points = [e for e in events if e["type"] == "point"]
    data.series = _read_metrics(paths["metrics.csv"]) if "metrics.csv" in paths else {}
    data.summary = json.loads(paths["summary.json"].read_text()) if "summary.json" in paths else {}
    data.config = (yaml.safe_load(paths["config.yaml"].read_text()) or {}) if "config.yaml" in paths else {}
    times = [event_end_s(e) for e in events] + [p.time_s or 0.0 for s in data.series.values() for p in s]
    data.wall_s = max(times, default=0.0)
    data.tenants = list(
        dict.fromkeys(
            [
                *data.summary.get("tenants", {}),
                *(data.config.get("tenants") or {}),
                *(
                    key.split("/")[1]
                    for key in data.series
                    if key.startswith(("train/", "eval/")) and key.count("/") > 1
                ),
                *(tenant for span in data.spans for tenant in span["tenants"]),
            ]
        )
    )
    return data


def _read_metrics(path: Path) -> dict[str, list[Point]]:
    text = path.read_text()
    complete = text[: text.rfind("\n") + 1]
    by_step: dict[str, dict[int, Point]] = {}
    for row in csv.DictReader(io.StringIO(complete)):
        step = int(float(row["step"]))
        time_s = float(row["time_s"]) if row.get("time_s") else None
        for key, cell in row.items():
            if cell and key not in ("step", "time_s") and math.isfinite(value := float(cell)):
                by_step.setdefault(key, {})[step] = Point(step, time_s, value)
    return {key: [points[step] for step in sorted(points)] for key, points in by_step.items()}


def _tenant_config(config: Mapping, tenant: str) -> Mapping:
    return (config.get("tenants") or {}).get(tenant) or {}


def _find(tree: Any, key: str) -> Any:
    """First truthy value of ``key`` anywhere in nested mappings."""
    if not isinstance(tree, Mapping):
        return None
    return tree.get(key) or next((found for value in tree.values() if (found := _find(value, key))), None)


# ----------------------------------------------------------------------------------------------------------- figure


def write_report(run_dir: str | os.PathLike) -> Path:
    """Write ``report.png`` and ``report.html`` (self-contained) into a run folder; returns the HTML's path."""
    data = read_run(run_dir)
    figure = draw(data)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    (data.run_dir / "report.png").write_bytes(png.getvalue())
    path = data.run_dir / "report.html"
    path.write_text(_html(data, png.getvalue()), encoding="utf-8")
    return path


def draw(data: RunData) -> Figure:
    """The whole report as one figure: curves per tenant, timeline, utilisation, jobs by state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = {tenant: COLOURS[i % len(COLOURS)] for i, tenant in enumerate(data.tenants)}
    panels = [("loss", "training loss"), ("success", "success rate, 95 % Wilson band")]
    if any(data.metric("train", t, "episode_return") for t in data.tenants):
        panels.insert(1, ("return", "episode return"))
    lanes = _lanes(data)
    lanes_height = 0.7 + 0.24 * max(2, len(lanes))
    heights = [2.0] * len(data.tenants) + [lanes_height, 1.9]
    figure = Figure(figsize=(13, sum(heights) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{data.run_dir.resolve().name}   {_status(data)}", fontsize=12, ha="left", x=0.01, parse_math=False
    )
    grid = figure.add_gridspec(len(heights), 6, height_ratios=heights)
    axis = _TimeAxis.of(data)
    width = 6 // len(panels)
    for row, tenant in enumerate(data.tenants):
        for column, (kind, title) in enumerate(panels):
            ax = figure.add_subplot(grid[row, column * width : (column + 1) * width])
            _draw_curve(ax, data, tenant, kind, colours[tenant], axis)
            if row == 0:
                ax.set_title(title, fontsize=10)
            if column == 0:
                name = f"{tenant}\n{data.task(tenant)}" + ("\nprivileged" if data.privileged(tenant) else "")
                ax.set_ylabel(name, color=colours[tenant], weight="bold", parse_math=False)
            if row == len(data.tenants) - 1:
                ax.set_xlabel(axis.label)
    _draw_timeline(figure.add_subplot(grid[-2, :]), data, lanes, colours)
    _draw_utilisation(figure.add_subplot(grid[-1, :3]), data)
    _draw_jobs(figure.add_subplot(grid[-1, 3:]), data)
    for ax in figure.axes:
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    return figure


@dataclass(frozen=True)
class _TimeAxis:
    """What the curves are drawn against: wall time when it was logged, else the job index."""

    label: str
    seconds_per_unit: float | None
    end: float

    @classmethod
    def of(cls, data: RunData) -> _TimeAxis:
        points = [p for series in data.series.values() for p in series]
        if not points or any(p.time_s is None for p in points):
            return cls("job", None, max((p.step for p in points), default=1))
        unit, seconds = _time_unit(data.wall_s)
        return cls(f"wall time ({unit})", seconds, data.wall_s / seconds)

    def x(self, step: int, time_s: float | None) -> float:
        return step if self.seconds_per_unit is None else (time_s or 0.0) / self.seconds_per_unit


def _time_unit(wall_s: float) -> tuple[str, float]:
    return ("s", 1.0) if wall_s < 180 else ("min", 60.0) if wall_s < 3 * 3600 else ("h", 3600.0)


def _draw_curve(ax: Axes, data: RunData, tenant: str, kind: str, colour: str, axis: _TimeAxis) -> None:
    ax.set_xlim(0, axis.end * 1.02 or 1)
    ax.grid(alpha=0.25)
    metric = {"loss": "loss", "return": "episode_return", "success": "success_rate"}[kind]
    points = data.metric("train", tenant, metric)
    xs, ys = [axis.x(p.step, p.time_s) for p in points], [p.value for p in points]
    evaluations = data.evaluations(tenant) if kind == "success" else []
    if not points and not evaluations:
        ax.text(0.5, 0.5, "nothing logged", transform=ax.transAxes, ha="center", va="center", color="0.5", fontsize=9)
        ax.set_yticks([])
    if kind != "success":
        ax.plot(xs, ys, color=colour, lw=1.0, alpha=0.4 if len(xs) > 20 else 1.0, marker="." if len(xs) < 30 else None)
        if len(xs) > 20:
            ax.plot(xs, _smooth(ys), color=colour, lw=1.6)
        if kind == "loss" and ys and min(ys) > 0 and max(ys) > 30 * min(ys):
            ax.set_yscale("log")
        return
    ax.set_ylim(-0.04, 1.45)  # room for the legend above 100 %
    if points:
        n = _episodes_text([p.value for p in data.metric("train", tenant, "episodes")])
        ax.plot(xs, ys, color=colour, lw=1.0, ls=":", label=f"rollouts ({n})")
    if evaluations:
        ex = [axis.x(e["step"], e["time_s"]) for e in evaluations]
        rates, low, high = ([e[k] for e in evaluations] for k in ("success_rate", "ci_low", "ci_high"))
        n = _episodes_text([e["n"] for e in evaluations])
        ax.plot(ex, rates, color=colour, lw=1.6, marker="o", ms=4, label=f"evaluation ({n})")
        if len(ex) == 1:
            ax.errorbar(ex, rates, [[rates[0] - low[0]], [high[0] - rates[0]]], color=colour, capsize=3)
        else:
            ax.fill_between(ex, low, high, color=colour, alpha=0.18, lw=0)
    if points or evaluations:
        ax.legend(fontsize=7, loc="upper left", ncols=2, frameon=False, borderaxespad=0.1)
    ax.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])


def _smooth(values: list[float]) -> list[float]:
    """Trailing mean over a twentieth of the points."""
    window = max(2, len(values) // 20)
    return [math.fsum(values[max(0, i + 1 - window) : i + 1]) / min(window, i + 1) for i in range(len(values))]


def _episodes_text(counts: list[float]) -> str:
    """How many episodes stand behind each point."""
    if not counts or min(counts) < 1:
        return "n not logged"
    low, high = int(min(counts)), int(max(counts))
    return f"n={low} each" if low == high else f"n={low}..{high} each"


def _lanes(data: RunData) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """``{(service, tenant): [(start_s, length_s)]}``; gaps too short to see are closed: bounded drawing."""
    gap_s = data.wall_s / 3000
    lanes: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for service in SERVICES:
        for tenant in data.tenants:
            own = [s for s in data.spans if s["service"] == service and s["tenants"].get(tenant)]
            merged: list[tuple[float, float]] = []
            for start_s, end_s in sorted((s["start_s"], s["end_s"]) for s in own):
                if merged and start_s - merged[-1][1] <= gap_s:
                    merged[-1] = (merged[-1][0], max(end_s, merged[-1][1]))
                else:
                    merged.append((start_s, end_s))
            if merged:
                lanes[service, tenant] = [(start_s, end_s - start_s) for start_s, end_s in merged]
    return lanes


def _draw_timeline(ax: Axes, data: RunData, lanes: dict, colours: dict[str, str]) -> None:
    ax.set_title("who used which service when", fontsize=10, loc="left")
    unit, seconds = _time_unit(data.wall_s)
    ax.set_xlim(0, data.wall_s / seconds or 1)
    ax.set_xlabel(f"wall time ({unit})")
    if not lanes:
        ax.text(0.5, 0.5, "no events recorded", transform=ax.transAxes, ha="center", va="center", color="0.5")
        ax.set_yticks([])
        return
    for i, ((service, tenant), bars) in enumerate(lanes.items()):
        scaled = [(start / seconds, length / seconds) for start, length in bars]
        ax.broken_barh(scaled, (i - 0.4, 0.8), facecolors=colours[tenant], edgecolor=colours[tenant], lw=0.3)
        if i and service != list(lanes)[i - 1][0]:
            ax.axhline(i - 0.5, color="0.6", lw=0.8)
    for resume in (p for p in data.points if p["kind"] == "resume"):
        ax.axvline(resume["time_s"] / seconds, color="black", lw=1, ls="--")
        ax.text(resume["time_s"] / seconds, -0.5, " resumed", fontsize=7, va="bottom")
    ax.set_yticks(range(len(lanes)), [f"{service}: {tenant}" for service, tenant in lanes])
    for label in ax.get_yticklabels():
        label.set_parse_math(False)
    ax.set_ylim(len(lanes) - 0.5, -0.5)


def _draw_utilisation(ax: Axes, data: RunData) -> None:
    utilisation = data.utilisation()
    ax.set_title(f"busy share of {duration_text(data.wall_s)} wall time", fontsize=10, loc="left")
    values = [utilisation.get(service, 0.0) for service in SERVICES]
    ax.barh(SERVICES, values, color="0.55", height=0.6)
    for i, value in enumerate(values):
        ax.text(value + 0.01, i, f"{value:.0%}", va="center", fontsize=9)
    ax.set_xlim(0, 1.1)
    ax.set_xticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    ax.invert_yaxis()


def _draw_jobs(ax: Axes, data: RunData) -> None:
    ax.set_title("training jobs by state", fontsize=10, loc="left")
    jobs = _jobs_total(data.summary.get("jobs_by_state", {}))
    if not jobs:
        ax.text(0.5, 0.5, "no summary.json", transform=ax.transAxes, ha="center", va="center", color="0.5")
        ax.set_yticks([])
        ax.set_xticks([])
        return
    ax.barh(list(jobs), list(jobs.values()), color="0.55", height=0.6)
    for i, n in enumerate(jobs.values()):
        ax.text(n + 0.01 * max(jobs.values()), i, str(n), va="center", fontsize=9)
    ax.set_xlim(0, 1.1 * max(jobs.values()))
    ax.invert_yaxis()


def _status(data: RunData) -> str:
    duration = duration_text(data.wall_s)
    ended = f"finished, {duration}" if data.summary else f"unfinished after {duration} (no summary.json)"
    return f"{len(data.tenants)} tenant{'s' if len(data.tenants) != 1 else ''}, {ended}"


# ------------------------------------------------------------------------------------------------------------- HTML

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1200px;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;margin:.5rem 0 1.5rem}
th,td{border-bottom:1px solid #ddd;padding:.3rem .8rem;text-align:left}
th{background:#f4f4f4}img{max-width:100%}video,.clip{max-width:320px;margin:.3rem}.mark{color:#a33;font-weight:600}
figure{display:inline-block;margin:.5rem}figcaption{font-size:13px;color:#555}pre{background:#f7f7f7;padding:1rem;overflow:auto}
"""

_LEGEND = (
    "Success is measured over n evaluation episodes; the interval is the 95 % Wilson interval. "
    "<span class='mark'>privileged</span> marks inputs that only a simulator can give."
)


def _html(data: RunData, png: bytes) -> str:
    name = html.escape(data.run_dir.resolve().name)
    unchanged = {True: "yes", False: "NO", None: "not checked (no summary.json)"}[
        data.summary.get("backbone_unchanged")
    ]
    config = yaml.safe_dump(data.config, sort_keys=False) if data.config else "no config.yaml"
    parts = [
        "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>{name}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{name}</h1><p>{html.escape(_status(data))}. Backbone unchanged: {unchanged}.</p>",
        "<h2>Tenants</h2>" + _html_tenants(data),
        f"<p>{_LEGEND}</p>",
        f"<h2>Curves and timeline</h2><img alt='report' src='data:image/png;base64,{_base64(png)}'>",
        "<h2>Busy time by tenant</h2>" + _html_busy(data),
        "<h2>Training jobs by state</h2>" + _html_jobs(data),
        "<h2>Videos</h2>" + _html_videos(data),
        f"<h2>Configuration</h2><details><summary>config.yaml</summary><pre>{html.escape(config)}</pre></details>",
        "</body></html>",
    ]
    return "\n".join(parts)


def _html_tenants(data: RunData) -> str:
    rows = []
    for tenant in data.tenants:
        summary = data.summary.get("tenants", {}).get(tenant, {})
        evaluations = data.evaluations(tenant)
        last = summary.get("eval") or (evaluations[-1] if evaluations else None)
        first = summary.get("eval_first") or (evaluations[0] if len(evaluations) > 1 else None)
        jobs = summary.get("jobs_completed", len(data.metric("train", tenant, "loss")))
        note = summary.get("note") or _tenant_config(data.config, tenant).get("note") or ""
        counts = [jobs, summary.get("optimizer_steps", "-"), summary.get("policy_version", "-")]
        shown = [tenant, data.task(tenant), *counts, success_text(last, first), interval_text(last)]
        rows.append([*shown, privileged_text(data.privileged(tenant)), note])
    columns = ["tenant", "task", "jobs", "optimizer steps", "version", "success", "95 % interval", "inputs", "note"]
    return _html_table(columns, rows, mark=columns.index("inputs"))


def _html_busy(data: RunData) -> str:
    if not data.spans:
        return "<p>No events recorded.</p>"
    times = ServiceTimes()
    for span in data.spans:
        times.add(span["service"], span["tenants"], span["start_s"], span["end_s"])
    utilisation = data.utilisation()
    rows = [
        [
            service,
            *(f"{times.busy_s[service].get(t, 0.0):.1f} s" for t in data.tenants),
            f"{utilisation.get(service, 0.0):.0%}",
        ]
        for service in SERVICES
    ]
    return _html_table(["service", *data.tenants, "busy share of wall time"], rows)


def _html_jobs(data: RunData) -> str:
    jobs = data.summary.get("jobs_by_state")
    if not jobs:
        return "<p>Not known: the run wrote no summary.json.</p>"
    per_tenant = {k: v for k, v in jobs.items() if isinstance(v, Mapping)} or {"all tenants": jobs}
    states = list(_jobs_total(jobs))
    return _html_table(["tenant", *states], [[name, *(c.get(s, 0) for s in states)] for name, c in per_tenant.items()])


def _html_videos(data: RunData) -> str:
    folder = data.run_dir / "videos"
    files = sorted(p for p in folder.glob("*") if p.suffix in (".mp4", ".gif")) if folder.is_dir() else []
    parts = []
    for tenant in data.tenants:
        # libero_b-3.mp4 belongs to libero_b, not to libero: the longest matching name owns the file.
        own = [
            p for p in files if max((t for t in data.tenants if p.name.startswith(t)), key=len, default="") == tenant
        ]
        if not own:
            continue
        latest = max(own, key=lambda p: (p.stat().st_mtime, p.name))
        parts.append(
            f"<figure>{_html_clip(latest)}<figcaption>{html.escape(f'{tenant}: {latest.name}')}</figcaption></figure>"
        )
        links = [f"<a href='videos/{_attribute(p.name)}'>{html.escape(p.name)}</a>" for p in own if p != latest]
        if links:
            parts.append(f"<p>earlier: {', '.join(links)}</p>")
    return "".join(parts) or "<p>None recorded.</p>"


def _html_clip(path: Path) -> str:
    if path.stat().st_size <= EMBED_VIDEO_BYTES:
        mime = "image/gif" if path.suffix == ".gif" else "video/mp4"
        source = f"data:{mime};base64,{_base64(path.read_bytes())}"
    else:
        source = f"videos/{_attribute(path.name)}"
    return f"<img class='clip' src='{source}'>" if path.suffix == ".gif" else f"<video controls src='{source}'></video>"


def _html_table(columns: list[str], rows: list[list[Any]], mark: int | None = None) -> str:
    head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
    body = ""
    for row in rows:
        cells = [f"<td{' class=mark' if i == mark else ''}>{html.escape(str(cell))}</td>" for i, cell in enumerate(row)]
        body += f"<tr>{''.join(cells)}</tr>"
    return f"<table><tr>{head}</tr>{body}</table>"


def _attribute(file_name: str) -> str:
    return html.escape(quote(file_name), quote=True)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
