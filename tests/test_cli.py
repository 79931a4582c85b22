"""The command line as users type it, in processes of its own."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAST = [
    "backbone._target_=fakes.FakeBackbone",
    "~backbone.pretrained",
    "~backbone.blind",
    "~backbone.cached_instructions",
]


def run(*arguments: str, timeout: float = 400, **kwargs) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "HF_HUB_OFFLINE": "1", "MUJOCO_GL": "osmesa"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        **kwargs,
    )


def folders(tmp_path: Path) -> list[str]:
    return [f"output_dir={tmp_path}/outputs", f"data_dir={tmp_path}/data"]


def test_fast_dev_run_of_the_toy(tmp_path):
    done = run("train.py", "+tenants=[toy]", "trainer.fast_dev_run=true", *FAST, *folders(tmp_path))
    assert done.returncode == 0, done.stderr
    run_dir = Path(done.stdout.strip().splitlines()[-1])
    assert run_dir.is_dir(), "the last line is the run folder"
    assert (tmp_path / "outputs" / "latest").resolve() == run_dir.resolve()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["tenants"]["toy"]["jobs_completed"] == 1 and summary["tenants"]["toy"]["eval"]["n"] == 1
    assert "toy" in done.stdout and "privileged: target_action" in done.stdout


def test_errors_come_in_one_message_and_exit_with_two(tmp_path):
    done = run("train.py", "+tenants=[toy]", "tenants.toy.schema.execute=9", "tenants.toy.weight=0", *folders(tmp_path))
    assert done.returncode == 2
    assert "tenants.toy.schema.execute=9" in done.stderr and "tenants.toy.weight=0" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "outputs").exists(), "nothing is built before the configuration is whole"


def test_a_mistyped_key_is_told_in_the_same_form_and_with_all_the_others(tmp_path):
    """What Hydra would not compose, and what it lets in with `+` (which it proposes after a typo)."""
    wrong = [
        "tenants.toy.head.learning_rate=3",
        "tenants.toy.schema.execute=9",
        "+tenants.toy.algorithm.clip_ratio=0.3",
    ]
    done = run("train.py", "+tenants=[toy]", *wrong, *folders(tmp_path))
    assert done.returncode == 2 and done.stderr.startswith("error: the configuration cannot run:\n  - ")
    for expected in (
        "tenants.toy.head.learning_rate=3: ChunkMLPHead has no such key; valid keys:",
        "tenants.toy.schema.execute=9: must not exceed chunk=2",
        "tenants.toy.algorithm.clip_ratio=0.3: tenants.toy.algorithm has no such key; did you mean clip_epsilon?",
    ):
        assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 4 and not (tmp_path / "outputs").exists()


def signalled(arguments: list[str], metrics: Path, number: int, from_job: int) -> dict:
    """Start a run, send the signal once a job beyond ``from_job`` is in the metrics; its tenant's summary."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 300

    def trained() -> bool:
        rows = list(csv.DictReader(metrics.open())) if metrics.is_file() else []
        return any(row.get("train/toy/loss") and float(row["toy/step"] or 0) > from_job for row in rows)

    while not trained():
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.2)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    stopped = json.loads((metrics.parent / "summary.json").read_text())
    assert stopped["interrupted"] is True
    return stopped["tenants"]["toy"]


def test_signals_save_and_the_run_goes_on_afterwards(tmp_path):
    arguments = ["train.py", "+tenants=[toy]", "tenants.toy.target_jobs=100000", *FAST, *folders(tmp_path)]
    metrics = tmp_path / "outputs" / "latest" / "metrics.csv"
    jobs = signalled(arguments, metrics, signal.SIGINT, 0)["jobs_completed"]
    assert jobs >= 1
    run_dir = metrics.parent.resolve()
    resumed = signalled([*arguments, "ckpt_path=last"], metrics, signal.SIGTERM, jobs)
    assert resumed["jobs_completed"] > jobs and metrics.parent.resolve() == run_dir, "in the same folder"


def test_evaluate_and_export_work_from_a_payload_alone(tmp_path):
    done = run(
        "train.py",
        "+tenants=[toy]",
        "tenants.toy.target_jobs=2",
        "tenants.toy.eval.episodes=5",
        *FAST,
        *folders(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    payload = tmp_path / "outputs" / "latest" / "tenants" / "toy"
    inside = json.loads((tmp_path / "outputs" / "latest" / "summary.json").read_text())["tenants"]["toy"]["eval"]
    exported = run("scripts/export.py", f"payload={payload}", f"out={tmp_path}/exported")
    assert exported.returncode == 0, exported.stderr
    results = []
    for source, num_envs in ((payload, 1), (tmp_path / "exported" / "toy", 3)):
        out = tmp_path / f"eval{num_envs}.json"
        result = run("scripts/evaluate.py", f"payload={source}", "episodes=5", f"num_envs={num_envs}", f"json={out}")
        assert result.returncode == 0, result.stderr
        results.append(json.loads(out.read_text()))
    assert results[0]["successes"] == results[1]["successes"], (
        "each seed counts once, whatever the number of simulators"
    )
    assert results[0]["seeds"] == [0, 1, 2, 3, 4] and results[0]["success_rate"] == inside["success_rate"]
    both = f"compare=[{payload},{tmp_path}/exported/toy]"
    out, png = tmp_path / "compare.json", tmp_path / "compare.png"
    compared = run("scripts/evaluate.py", both, "episodes=5", f"json={out}", f"png={png}")
    assert compared.returncode == 0 and "p (paired)" in compared.stdout, compared.stderr
    report = json.loads(out.read_text())
    assert [p["successes"] for p in report["payloads"]] == [results[0]["successes"]] * 2
    assert report["payloads"][1]["p_against_first"] == 1.0 and png.stat().st_size > 5000


@pytest.mark.sim
def test_a_tiny_real_run_of_both_simulators(tmp_path):
    """libero (2 demonstrations) and maniskill (1 job) in one run: the quickstart, shrunk."""
    done = run(
        "train.py",
        "+tenants=[libero,maniskill]",
        "trainer.fast_dev_run=true",
        "tenants.libero.dataset.record.episodes=2",
        "tenants.libero.dataset.batches_per_job=4",
        "tenants.maniskill.algorithm.chunks_per_job=14",
        "tenants.maniskill.init_from.recipe.target_jobs=2",
        *folders(tmp_path),
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "outputs" / "latest" / "summary.json").read_text())
    assert {n: t["jobs_completed"] for n, t in summary["tenants"].items()} == {"libero": 1, "maniskill": 1}
    assert summary["tenants"]["libero"]["privileged"] and summary["tenants"]["maniskill"]["privileged"]
    assert summary["backbone_unchanged"] is True
    for name in ("libero", "maniskill"):
        assert (tmp_path / "outputs" / "latest" / "videos" / f"{name}.mp4").stat().st_size > 1000
