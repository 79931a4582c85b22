"""The service benchmark runs end to end, its clients in a process of their own; no figure is held to a number."""

from __future__ import annotations

import json

import pytest

from scripts.bench import service, service_load

TINY = ["--backbone", "tests.fakes.FakeBackbone", "--image-size", "32", "--tenants", "2", "--decisions", "3", "--quick"]


def test_the_report_has_both_sides_of_every_cell(tmp_path, capsys):
    files = ["--json", str(tmp_path / "out.json"), "--png", str(tmp_path / "out.png")]
    assert service.main([*TINY, "--sessions", "1", "3", "--rounds", "2", *files]) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    names = {f"{name}_{n}" for name in ("http_overhead", "http_throughput_of_in_process") for n in (1, 3)}
    assert set(record["summary"]) == names | {"heartbeat_p99_ms_idle", "heartbeat_p99_ms_loaded"}
    assert [r["sessions"] for r in record["results"]] == [1, 3]
    for result in record["results"]:
        assert result["http_overhead"]["count"] == 2 and result["http_latency_ms"]["median"] > 0
        for side in service.SIDES:
            assert 1 <= result[f"{side}_rows_per_call"] <= result["sessions"]
    assert record["machine"]["torch"] and (tmp_path / "out.png").stat().st_size > 0
    assert "/healthz loaded" in capsys.readouterr().out


def test_a_session_that_fails_fails_the_measurement():
    def refuse(i):
        raise ValueError("no camera")

    with pytest.raises(ValueError, match="no camera"):
        service_load.closed_loop(refuse, 3, 2)
