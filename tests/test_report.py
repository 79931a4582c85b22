"""summary.json, the text table, and the report of a synthetic run."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nexus_lightning.monitoring.report import read_run, summary_table, write_report, write_summary

EVAL = {"success_rate": 0.75, "n": 20, "ci_low": 0.5313, "ci_high": 0.8881}
FIRST = {"success_rate": 0.3, "n": 20, "ci_low": 0.1455, "ci_high": 0.519}
BUSY = {"actor": 0.4, "inference": 0.3, "environment": 0.8}


def _tenant(task="sft", **changes):
    return {"task": task, "jobs_completed": 6, "optimizer_steps": 24, "policy_version": 6, "eval": EVAL, **changes}


def _make_run(run: Path, tenants: list[str], note: str = "") -> Path:
    """A run folder as the loop leaves it: 12 jobs, an evaluation every third job of a tenant."""
    rows, events = [], [{"type": "point", "kind": "start", "tenant": None, "time_s": 0.0, "values": {}}]
    for step in range(12):
        name, time_s = tenants[step % len(tenants)], float(step + 1)
        row = {"step": step, "time_s": time_s, f"train/{name}/loss": 1 / (step + 1)}
        rows.append(row | {f"train/{name}/episode_return": step / 12, f"train/{name}/success_rate": step / 12})
        if step % 3 == 2:
            rows.append({"step": step, "time_s": time_s, f"eval/{name}/success_rate": 0.5, f"eval/{name}/n": 10})
        span = {"type": "span", "service": "actor", "tenants": {t: 1 for t in tenants}, "kind": "sft"}
        events.append(span | {"start_s": time_s - 0.5, "end_s": time_s})
    keys = sorted({key for row in rows for key in row})
    run.mkdir()
    with (run / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(rows)
    (run / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    config = {t: {"task": "rl", "note": note, "schema": {"privileged": ["obj_pose"]}} for t in tenants}
    (run / "config.yaml").write_text(yaml.safe_dump({"tenants": config}))
    return run


def test_summary_is_validated_and_written_whole(tmp_path):
    written = write_summary(tmp_path, {"libero": _tenant()}, True, {"libero": {"completed": 6}}, BUSY, seed=3)
    assert json.loads((tmp_path / "summary.json").read_text()) == written
    assert written["tenants"]["libero"]["eval"] == EVAL and written["seed"] == 3
    bad = _tenant(jobs_completed="6", eval={**EVAL, "success_rate": 1.5})
    del bad["policy_version"]
    with pytest.raises(ValueError) as error:
        write_summary(tmp_path, {"libero": bad}, 1, {}, {"actor": float("nan")})
    for line in (
        "tenants.libero.jobs_completed='6': must be int",
        "tenants.libero.policy_version: missing",
        "tenants.libero.eval.success_rate=1.5: must lie in [0, 1]",
        "backbone_unchanged=1: must be a bool",
        "utilisation.actor=nan",
        "utilisation.inference=None",
    ):
        assert line in str(error.value)
    assert json.loads((tmp_path / "summary.json").read_text()) == written, "a refused summary changes nothing"


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_of_one_tenant_that_is_not_finite_costs_that_number_only(tmp_path, number):
    bad = {**EVAL, "success_rate": number, "episode_return": number, "by_task": [{"episode_return": number}]}
    run = _make_run(tmp_path / "run", ["libero", "maniskill"])
    tenants = {"libero": _tenant(eval=bad, eval_first=FIRST), "maniskill": _tenant("rl")}
    written = write_summary(run, tenants, True, {}, BUSY, extra=[number, (1.0, number)])

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    read = json.loads((run / "summary.json").read_text(), parse_constant=refuse)
    assert read == written and read["extra"] == [None, [1.0, None]]
    assert read["tenants"]["libero"]["eval"] == {
        **EVAL,
        "success_rate": None,
        "episode_return": None,
        "by_task": [{"episode_return": None}],
    }
    assert read["tenants"]["maniskill"]["eval"] == EVAL
    for summary in (written, {**written, "tenants": tenants}):  # as written, and as it was before
        lines = summary_table(summary).splitlines()
        assert "30% -> - (n=20)" in lines[2] and "75% (n=20)" in lines[3]
    assert "30% -&gt; - (n=20)" in write_report(run).read_text()


def test_summary_table_shows_first_to_last(tmp_path):
    tenants = {"libero": _tenant(eval=None), "maniskill": _tenant("rl", eval_first=FIRST)}
    summary = write_summary(tmp_path, tenants, True, {"completed": 12, "dropped": 1, "failed": 0}, BUSY)
    lines = summary_table(summary).splitlines()
    assert lines[2].split() == ["libero", "sft", "6", "24", "6", "-", "-"]
    assert "30% -> 75% (n=20)" in lines[3] and "53% .. 89%" in lines[3]
    assert "backbone unchanged: yes" in lines and "jobs: completed 12, dropped 1" in lines


def test_report_has_every_tenant_and_escapes_text(tmp_path):
    tenants = ["libero", "libero_b", "maniskill"]
    run = _make_run(tmp_path / "run", tenants, note="<script>alert(1)</script>")
    write_summary(run, {t: _tenant("rl") for t in tenants}, True, {t: {"completed": 4} for t in tenants}, BUSY)
    (run / "videos").mkdir()
    for name in ("libero_b-0.mp4", "libero-0.gif", "libero-0.mp4"):
        (run / "videos" / name).write_bytes(b"not a real video")
    html = write_report(run).read_text()
    for tenant in tenants:
        assert f"<td>{tenant}</td>" in html
    assert "<script" not in html and "&lt;script&gt;alert(1)" in html
    assert html.count("privileged: obj_pose") == 3 and "(n=20)" in html
    assert "src='data:image/png;base64," in html and "http" not in html, "self-contained"
    assert "libero_b: libero_b-0.mp4" in html and "libero: libero_b" not in html
    png = (run / "report.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 40_000


@pytest.mark.parametrize("kept", ["metrics.csv", "events.jsonl", "config.yaml"])
def test_report_of_an_interrupted_run(tmp_path, kept):
    run = _make_run(tmp_path / "run", ["toy"])
    for path in list(run.iterdir()):
        if path.name != kept:
            path.unlink()
    html = write_report(run).read_text()
    assert "unfinished after" in html and "<td>toy</td>" in html
    assert (run / "report.png").stat().st_size > 10_000


def test_eight_tenants_and_mathtext_in_names(tmp_path):
    tenants = [f"t{i}_$x" for i in range(8)]
    html = write_report(_make_run(tmp_path / "run_$y", tenants)).read_text()
    assert all(f"<td>{t}</td>" in html for t in tenants)


def test_reading_a_resumed_and_torn_run(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "step,time_s,train/a/loss,eval/a/success_rate,eval/a/n\n"
        "0,1,0.9,,\n1,2,0.8,,\n"  # job 1 ran after the last checkpoint, and again after the resume
        "1,3,0.7,,\n1,3,,0.5,10\n2,4,nan,,\n3,5,0."
    )
    data = read_run(tmp_path)
    assert [tuple(p) for p in data.metric("train", "a", "loss")] == [(0, 1.0, 0.9), (1, 3.0, 0.7)]
    (evaluation,) = data.evaluations("a")
    assert evaluation["n"] == 10 and evaluation["ci_low"] == pytest.approx(0.2366, abs=1e-4)


def test_not_a_run_folder(tmp_path):
    with pytest.raises(ValueError, match="not a run folder"):
        write_report(tmp_path)


def test_report_script(tmp_path):
    root = Path(__file__).parent.parent
    run = _make_run(tmp_path / "run", ["toy"])
    command = [sys.executable, "scripts/report.py"]
    done = subprocess.run([*command, str(run)], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(run / "report.html") and (run / "report.png").exists()
    done = subprocess.run([*command, str(tmp_path)], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "not a run folder" in done.stderr
