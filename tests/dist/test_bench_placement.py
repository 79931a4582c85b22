"""The benchmark of placements on two ranks: what it counts and reports, never seconds."""

from __future__ import annotations

import json
import math
from pathlib import Path

from dist.launch import run_ranks

from scripts.bench import placement

SIZES = ["--ranks", "2", "--rounds", "2", "--tenants", "2", "--batch-size", "4", "--steps", "1", "--image-size", "64"]


def launch(ranks: int, arguments: list[str], folder: Path) -> None:
    """In place of torchrun, whose processes would import everything once more."""
    run_ranks("dist.scenarios:placement_bench", ranks, folder, arguments)


def test_only_the_active_head_travels_and_shards_are_what_a_rank_holds(tmp_path, capsys):
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    assert placement.main(["--quick", *SIZES, "--json", str(out), "--png", str(png)], launch) == 0
    assert png.stat().st_size > 5000 and "fsdp2_heads" in capsys.readouterr().out
    record = json.loads(out.read_text())
    summary, results = record["summary"], record["results"]["2"]
    assert set(results) == set(placement.PLACEMENTS) and all(math.isfinite(value) for value in summary.values())
    sent = {name: [r[given]["sent_bytes_per_step"] for given in placement.INPUTS] for name, r in results.items()}
    head = results["ddp"]["head_bytes"]
    assert sent["single"] == [0, 0] and sent["ddp"][0] == sent["ddp"][1] == sent["fsdp2"][0]
    assert head < sent["ddp"][0] < 1.01 * head, "its gradients and a flag for each of its tensors"
    assert sent["fsdp2"][1] > sent["fsdp2"][0] + results["fsdp2"]["held_bytes"]["backbone"] * 0.9, "and the shards"
    held = {name: r["held_bytes"] for name, r in results.items()}
    assert held["ddp"] == held["single"] and held["ddp"]["replicas"] == 0
    assert math.isclose(held["fsdp2"]["backbone"], held["ddp"]["backbone"] / 2, rel_tol=0.01)
    for part in ("heads", "moments"):
        assert held["fsdp2"][part] == held["ddp"][part]
        assert math.isclose(held["fsdp2_heads"][part], held["ddp"][part] / 2, rel_tol=0.05)
    assert held["fsdp2_heads"]["replicas"] == held["ddp"]["heads"]
