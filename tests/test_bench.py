"""The benchmarks of shared_forward, step_breakdown and loss_equivalence: what they count and report, never seconds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from fakes import FakeBackbone
from matplotlib.figure import Figure

from nexus_lightning.checks import random_observation
from nexus_lightning.config import ConfigError
from nexus_lightning.features.grouping import EncodeRequest, EncodeStats, encode_together
from nexus_lightning.schema import TenantSchema
from scripts.bench import common, loss_equivalence, shared_forward, step_breakdown

FAKE = ["--backbone", "fakes.FakeBackbone", "--image-size", "128"]


def run(script, folder: Path, *arguments: str) -> dict:
    """The script's main; its JSON, after what holds for every benchmark."""
    out, png = folder / "out" / "figures.json", folder / "out" / "figure.png"
    assert script.main([*arguments, "--json", str(out), "--png", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 5000
    record = json.loads(out.read_text())
    assert {"script", "arguments", "machine", "summary", "results"} == set(record)
    assert {"torch", "cpu", "threads", "commit", "device"} <= set(record["machine"])
    assert record["summary"] and all(math.isfinite(value) for value in record["summary"].values())
    return record


# ------------------------------------------------------------------------------------------------------ the three mains


@pytest.mark.parametrize("backbone", ["fakes.FakeBackbone", "qwen3_vl_tiny"])
def test_shared_forward_reports_every_cell(tmp_path, capsys, backbone):
    sizes = ["--tenants", "2", "3", "--batches", "1", "2", "--seconds", "0", "--image-size", "64"]
    kinds = ["--kinds", "tokens", "kv"]
    record = run(shared_forward, tmp_path, "--backbone", backbone, *sizes, *kinds)
    cells = [f"{tenants}x{batch}" for tenants in (2, 3) for batch in (1, 2)]
    assert set(record["summary"]) == {"min_fraction_of_limit", *(f"speedup_{cell}" for cell in cells)}
    found = {"tokens"} if backbone == "fakes.FakeBackbone" else {"tokens", "kv"}
    assert {result["kind"] for result in record["results"]} == found
    assert len(record["results"]) == len(cells) * len(found)
    fractions = [result["fraction_of_limit"] for result in record["results"]]
    assert record["summary"]["min_fraction_of_limit"] == min(f["median"] for f in fractions)
    assert all(f["q25"] <= f["median"] <= f["q75"] and f["count"] >= 3 for f in fractions)
    assert backbone in capsys.readouterr().out


def test_step_breakdown_reports_both_heads(tmp_path, capsys):
    record = run(step_breakdown, tmp_path, *FAKE, "--tenants", "2", "--batch", "2", "--job", "1", "--seconds", "0")
    assert {"reuse_speedup_mlp", "reuse_over_head_only", "reuse_speedup_flow"} <= set(record["summary"])
    assert record["summary"]["reuse_over_head_only"] == record["summary"]["reuse_over_head_only_mlp"]
    for head in ("mlp", "flow_matching"):
        modes = {mode: record["results"][head][mode] for mode in step_breakdown.MODES}
        for mode in modes.values():
            assert set(mode["parts_ms"]) == set(step_breakdown.PARTS)
        assert modes["head-only"]["parts_ms"]["shared forward"]["median"] == 0.0
        assert all(modes[mode]["parts_ms"]["shared forward"]["median"] > 0.0 for mode in ("serial", "grouped", "reuse"))
    out = capsys.readouterr().out
    assert "mlp" in out and "flow_matching" in out


def test_loss_curves_coincide(tmp_path, capsys):
    record = run(loss_equivalence, tmp_path, *FAKE, "--steps", "6", "--batch", "3", "--frames", "8")
    summary = record["summary"]
    assert summary["max_rel_diff"] == max(summary["max_rel_diff_grouped"], summary["max_rel_diff_reuse"]) < 1e-4
    assert 0 < summary["max_rel_diff_float16"] < 1e-2
    curves = record["results"]["curves"]
    assert set(curves) == {"solo", "grouped", "reuse", "reuse float16"}
    assert all(set(curve) == set("abcd") and {len(c) for c in curve.values()} == {6} for curve in curves.values())
    assert "reuse float16" in capsys.readouterr().out


# -------------------------------------------------------------------------------------------- counts behind the figures


def test_a_group_is_one_call_where_serial_is_one_per_tenant():
    backbone = FakeBackbone()
    times = shared_forward.measure(backbone, "tokens", tenants=3, batch=2, image_size=128, seconds=0.0)
    rounds = 1 + len(times["serial"])  # the first is not timed
    assert backbone.calls == rounds * (3 + 1 + 1)
    assert {len(values) for values in times.values()} == {3}


def server_of(head: str) -> tuple[FakeBackbone, step_breakdown.Server]:
    backbone = FakeBackbone()
    options = step_breakdown._options([*FAKE, "--tenants", "3", "--batch", "2", "--job", "2"])
    server = step_breakdown.Server(backbone, head, options)
    assert backbone.calls == 3, "one pass per tenant fills the store"
    backbone.calls = 0
    return backbone, server


@pytest.mark.parametrize("head", ["mlp", "flow_matching"])
def test_the_four_ways_of_a_step_differ_in_calls_and_not_in_what_is_learnt(head):
    calls, learnt = {}, {}
    for way in ("serial", "grouped", "reuse", "head_only"):
        backbone, server = server_of(head)
        getattr(server, way)()
        calls[way] = backbone.calls
        learnt[way] = torch.cat([p.detach().flatten() for slot, _ in server.tenants for p in slot.head.parameters()])
        assert set(server.watch.seconds()) <= set(step_breakdown.PARTS)
    assert calls == {"serial": 3 * 2, "grouped": 2, "reuse": 0, "head_only": 0}
    start = torch.cat([p.detach().flatten() for slot, _ in server_of(head)[1].tenants for p in slot.head.parameters()])
    assert not torch.equal(start, learnt["serial"])
    torch.testing.assert_close(learnt["grouped"], learnt["serial"], rtol=1e-5, atol=1e-6)
    assert torch.equal(learnt["reuse"], learnt["head_only"])
    # Adam's first steps have the size of the learning rate whatever the gradient's: float16 may turn a sign.
    torch.testing.assert_close(learnt["reuse"], learnt["serial"], rtol=0, atol=5e-3)


def test_loss_equivalence_encodes_once_per_schema_grouped_and_once_per_frame_stored():
    options = loss_equivalence._options([*FAKE, "--steps", "4", "--batch", "2", "--frames", "6"])
    tenants = loss_equivalence.make_tenants(options, torch.device("cpu"))
    assert len({tenant.schema.prefix_signature for tenant in tenants}) == 2
    calls = {}
    for name in ("Encoder", "Grouped", "Stored"):
        backbone = FakeBackbone()
        encoder = getattr(loss_equivalence, name)(backbone, *(["float32"] if name == "Stored" else []))
        loss_equivalence.train(tenants, encoder, options.steps, options.batch)
        calls[name] = backbone.calls
    assert calls == {"Encoder": 4 * 4, "Grouped": 2 * 4, "Stored": 4}


# ----------------------------------------------------------------------------------------------- encode_together itself


def test_a_tenants_rows_from_several_passes_come_back_in_order():
    schema = TenantSchema(cameras=("front",), image_size=16, state_dim=2, action_dim=2, chunk=2, execute=2)
    backbone, stats = FakeBackbone(), EncodeStats()
    long = "a much longer instruction than the other ones of this group, twice as long at least"
    texts = [["go", long, "go", long + "!"], [long, "go"], ["go"]]
    requests = [
        EncodeRequest(random_observation(schema, len(t), seed=i), t, schema, backbone.feature_spec(schema))
        for i, t in enumerate(texts)
    ]
    together = encode_together(backbone, requests, stats)
    assert (stats.calls, stats.rows) == (backbone.calls, 7) == (2, 7)
    for request, features in zip(requests, together, strict=True):
        alone = [backbone(request.observation[i : i + 1], [t], schema) for i, t in enumerate(request.instructions)]
        longest = max(part.tokens["text"].shape[1] for part in alone)
        assert features.batch_size == torch.Size([len(alone)]) and features.tokens["text"].shape[1] == longest
        for i, part in enumerate(alone):
            torch.testing.assert_close(features.pooled[i : i + 1], part.pooled)
            for name in part.tokens.keys():
                real = part.tokens[name][part.mask[name]]
                torch.testing.assert_close(features.tokens[name][i][features.mask[name][i]], real)


def test_instructions_of_usual_lengths_share_one_pass():
    """Image tokens count: beside them the padding of a few words is small."""
    schema = TenantSchema(cameras=("front",), image_size=128, state_dim=2, action_dim=2, chunk=2, execute=2)
    backbone, stats = FakeBackbone(), EncodeStats()
    request = EncodeRequest(
        random_observation(schema, 8), common.instructions(8, 0), schema, backbone.feature_spec(schema)
    )
    encode_together(backbone, [request], stats)
    assert stats.calls == 1 and 0 < stats.padding < stats.tokens


# ------------------------------------------------------------------------------------------------------- common helpers


def test_interleave_times_side_by_side():
    seen: list[str] = []
    functions = {name: lambda name=name: seen.append(name) for name in "abc"}
    times = common.interleave(functions, torch.device("cpu"), seconds=0.0, min_rounds=3)
    rounds = ["".join(seen[i : i + 3]) for i in range(0, len(seen), 3)]
    assert rounds[0] == "abc" and len(rounds) == 4  # the first is not timed
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds[1:])) > 1  # none always finds what the same other one left in the caches
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_spread_is_of_ratios_within_a_round():
    spread = common.Spread.ratio([2.0, 20.0, 200.0], [1.0, 10.0, 50.0])
    assert (spread.median, spread.q25, spread.q75, spread.count) == (2.0, 2.0, 3.0, 3)
    assert common.Spread.of([3.0]) == common.Spread(3.0, 3.0, 3.0, 1)


def test_wrong_options_name_the_choices():
    with pytest.raises(ConfigError, match=r"backbone=qwen9: choose one of .*effnet_minilm"):
        common.load_backbone("qwen9")
    with pytest.raises(ValueError, match="--kinds kv: FakeBackbone gives"):
        shared_forward.main(["--backbone", "fakes.FakeBackbone", "--kinds", "kv"])
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="finds no CUDA device"):
            loss_equivalence.main(["--device", "cuda"])


def test_a_figure_that_is_not_finite_is_refused(tmp_path):
    options = common.parser("").parse_args(["--json", str(tmp_path / "x.json")])
    with pytest.raises(ValueError, match=r"summary\.speedup not finite"):
        common.report("x", options, {"speedup": math.nan}, [], Figure())
    assert not (tmp_path / "x.json").exists()


def test_dtype_and_quick_reach_their_places():
    assert {p.dtype for p in common.load_backbone("qwen3_vl_tiny", dtype="bf16").parameters()} == {torch.bfloat16}
    assert shared_forward._options(["--quick"]).tenants == [2, 8]
    assert shared_forward._options([]).tenants == [2, 4, 6, 8] and shared_forward._options([]).batches == [1, 2, 4, 8]
