"""The inference benchmark runs end to end; its figures are counts and structure here, never seconds."""

from __future__ import annotations

import json

import pytest

from scripts.bench import inference_queue

TINY = ["--backbone", "tests.fakes.FakeBackbone", "--image-size", "32", "--sessions", "1", "3", "--tenants", "1", "2"]


def test_the_report_has_every_cell_and_the_goals(tmp_path, capsys):
    options = ["--rounds", "2", "--decisions", "12", "--think-ms", "1", "--timeout-ms", "1000"]
    files = ["--json", str(tmp_path / "out.json"), "--png", str(tmp_path / "out.png")]
    assert inference_queue.main([*TINY, *options, *files]) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    assert set(record["summary"]) == {
        *("fraction_of_ideal_1", "fraction_of_ideal_3", "p99_wait_over_T", "idle_wait_when_all_in")
    }
    cells = [(r["sessions"], r["tenants"], r["think_ms"]) for r in record["results"]]
    assert cells == [(1, 1, 0), (3, 1, 0), (3, 2, 0), (3, 1, 1), (3, 2, 1)]
    for result in record["results"]:
        # T is long and every session comes back: once the server has heard of all, they are in every batch
        assert min(2, result["sessions"]) <= result["rows_per_batch"] + 0.5 <= result["sessions"] + 0.5
        assert result["fraction_of_ideal"]["count"] == 2 and result["latency_p50_ms"] <= result["latency_p99_ms"]
    assert record["machine"]["torch"] and (tmp_path / "out.png").stat().st_size > 0
    printed = capsys.readouterr().out
    assert "of ideal" in printed and "p99_wait_over_T" in printed


def test_a_session_that_fails_fails_the_benchmark(monkeypatch):
    def refuse(*arguments):
        raise ValueError("no camera")

    monkeypatch.setattr(inference_queue.TenantPolicyClient, "submit", refuse)
    with pytest.raises(ValueError, match="no camera"):
        inference_queue.main([*TINY, "--rounds", "1"])
