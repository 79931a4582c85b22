"""The learning report's arithmetic and verdicts; the runs themselves are too long for the suite."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from pytest import approx

sys.path.insert(0, str(ROOT))
from scripts import learning_report
from scripts.learning_report import ROWS, Result, Row, Run, curves, noise, row_report, runs_of, table


def record(tenants: dict[str, tuple[float | None, float]], n: int = 50, curve: list | None = None) -> dict:
    """What a finished run keeps: first and last success rate of every tenant."""
    return {
        "command": ["train.py"],
        "run_dir": ".",
        "commit": "abc",
        "minutes": 2.0,
        "tenants": {
            name: {
                "eval": {"success_rate": last, "n": n},
                "eval_first": None if first is None else {"success_rate": first, "n": n},
                "privileged": [],
            }
            for name, (first, last) in tenants.items()
        },
        "curves": {name: curve or [] for name in tenants},
        "payloads": {name: f"bits of {last}" for name, (_, last) in tenants.items()},
    }


def test_a_row_is_the_mean_over_seeds_against_its_goal(monkeypatch):
    monkeypatch.setitem(ROWS, "row", Row((Result("a", ">= 90 %", at_least=0.9), Result("b", "improves", improves=0.2))))
    runs = [
        Run("row", "row", 0, record=record({"a": (None, 1.0), "b": (0.3, 0.6)})),
        Run("row", "row", 1, record=record({"a": (None, 0.84), "b": (0.3, 0.5)})),
    ]
    report = row_report("row", runs)
    a, b = report["lines"]
    assert a["success"] == approx(0.92) and a["met"] is True and a["per_seed"] == [1.0, 0.84] and a["n"] == 100
    assert b["success"] == approx(0.55) and b["first"] == approx(0.3) and b["met"] is True
    assert report["numbers"]["b_first"] == approx(0.3) and report["numbers"]["seeds"] == 2
    assert "92%" in table({"row": report}) and "from 30%" in table({"row": report})


def test_a_goal_must_be_reached_in_time(monkeypatch):
    monkeypatch.setitem(ROWS, "row", Row((Result("a", "soon", at_least=0.9, within_s=900.0),)))
    points = [{"jobs": 0.0, "time_s": 1.0, "success_rate": 0.3, "n": 50.0}]
    slow = [*points, {"jobs": 9.0, "time_s": 901.0, "success_rate": 0.95, "n": 50.0}]
    fast = [*points, {"jobs": 5.0, "time_s": 600.0, "success_rate": 0.92, "n": 50.0}]
    for curve, met, minutes in ((slow, False, 901 / 60), (fast, True, 10.0), (points, False, None)):
        report = row_report("row", [Run("row", "row", 0, record=record({"a": (0.3, 0.95)}, curve=curve))])
        assert report["lines"][0]["met"] is met
        assert report["lines"][0]["minutes_to_goal"] == (None if minutes is None else approx(minutes))


def test_together_is_compared_with_alone_within_noise(monkeypatch):
    monkeypatch.setitem(ROWS, "row", Row(tuple(Result(name, "as alone") for name in "abc"), alone=True))
    runs = runs_of("row", [0])
    assert [(run.label, run.without) for run in runs] == [
        ("together", ()),
        ("a-alone", ("b", "c")),
        ("b-alone", ("a", "c")),
        ("c-alone", ("a", "b")),
    ]
    together = record({"a": (None, 0.9), "b": (None, 0.2), "c": (None, 0.5)})
    results = [together, *(record({name: (None, rate)}) for name, rate in (("a", 0.8), ("b", 0.9), ("c", 0.5)))]
    for run, result in zip(runs, results, strict=True):
        run.record = result
    report = row_report("row", runs)
    a, b, c = report["lines"]
    assert a["alone"] == approx(0.8) and a["met"] is True
    assert b["met"] is False
    assert [line["same_payload"] for line in (a, b, c)] == [False, False, True]
    assert table({"row": report}).count("the same payload") == 1


def test_noise_is_half_the_interval_of_a_difference():
    assert noise(0.5, 0.5, 50, 50) == approx(1.96 * (0.25 * 2 / 50) ** 0.5)
    assert noise(1.0, 1.0, 50, 50) > 0


def test_better_than_another_tenant(monkeypatch):
    monkeypatch.setitem(ROWS, "row", Row((Result("a", "better", beats="b"),)))
    report = row_report("row", [Run("row", "row", 0, record=record({"a": (None, 0.9), "b": (None, 0.8)}))])
    assert report["lines"][0]["met"] is True and report["numbers"]["a_other"] == approx(0.8)


def test_curves_come_from_the_metrics(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "step,time_s,eval/a/success_rate,eval/a/n,eval/a/policy_version,train/a/loss\n"
        "0,1.5,0.25,20,0,\n1,2.0,,,,0.5\n9,8.0,0.75,20,9,\n"
    )
    assert curves(tmp_path) == {
        "a": [
            {"jobs": 0.0, "time_s": 1.5, "success_rate": 0.25, "n": 20.0},
            {"jobs": 9.0, "time_s": 8.0, "success_rate": 0.75, "n": 20.0},
        ]
    }


def test_rows_name_experiments_and_tenants_that_exist(compose):
    for name, row in ROWS.items():
        tenants = set()
        for experiment in row.experiments or (name,):
            tenants |= set(compose(f"experiment={experiment}").tenants)
        assert {result.tenant for result in row.results} <= tenants, name


def test_one_short_run_from_the_command_line_to_the_picture(tmp_path, monkeypatch, capsys):
    """The real train.py in a process of its own, cut to two jobs; a second call runs nothing again."""
    monkeypatch.setitem(ROWS, "toy", Row((Result("toy_a", "runs"),), experiments=("two_toys",)))
    short = ["tenants.toy_a.target_jobs=1", "tenants.toy_b.target_jobs=1", "backbone=tiny"]
    short += [f"tenants.{name}.eval.episodes=2" for name in ("toy_a", "toy_b")]
    arguments = ["toy", "--seeds", "0", "--out", str(tmp_path / "out"), "--data", str(tmp_path / "data")]
    arguments += ["--json", str(tmp_path / "r.json"), "--png", str(tmp_path / "r.png"), "--set", *short]
    assert learning_report.main(arguments) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert 0.0 <= report["summary"]["toy"]["toy_a"] <= 1.0 and report["runs"][0]["curves"]["toy_a"]
    assert (tmp_path / "r.png").stat().st_size > 5000
    assert "toy_a" in capsys.readouterr().out
    monkeypatch.setattr(learning_report, "start", lambda *_: pytest.fail("ran again"))
    assert learning_report.main(arguments) == 0
    kept = Path(report["runs"][0]["run_dir"]) / "config.yaml"
    kept.write_text(kept.read_text().replace("target_jobs: 1", "target_jobs: 3"))  # as if the experiment had changed
    with pytest.raises(pytest.fail.Exception, match="ran again"):
        learning_report.main(arguments)


def test_an_unknown_row_is_refused(capsys):
    with pytest.raises(SystemExit):
        learning_report.main(["nothing"])
    assert "choose from toy_rl" in capsys.readouterr().err
