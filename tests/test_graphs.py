"""Static shapes and the graphs of a backbone's parts. No GPU here: a stand-in for the capture replays as a graph does.

The stand-in keeps the memory of inputs and output, so that it shows who reads or writes at the wrong time, and refuses
the operations that a CUDA graph cannot hold.
"""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from test_inference import FakeBackbone, publish, request, schema_of
from torch.utils._python_dispatch import TorchDispatchMode

from models.backbones.effnet_minilm import EffNetMiniLM
from models.backbones.paligemma import PaliGemma
from models.backbones.qwen_vl import Qwen3VL
from models.backbones.smolvlm import SmolVLM2
from nexus_lightning.checks import random_observation
from nexus_lightning.features import graphs
from nexus_lightning.features.graphs import GraphCache, graphs_for, replay, replaying
from nexus_lightning.inference.policies import ServedPolicies
from nexus_lightning.inference.server import TenantInferenceServer
from nexus_lightning.schema import TenantSchema

SCHEMA = TenantSchema(state_dim=4, action_dim=3, chunk=3, execute=2, cameras=("front",), image_size=64)
LOOKS_AT_VALUES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item")


class NothingLooksAtValues(TorchDispatchMode):
    """Raises where a GPU would have to tell the CPU what it computed."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        by_mask = name in ("index", "index_put", "index_put_") and any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        )
        assert name not in LOOKS_AT_VALUES and not by_mask, f"{func.name()} cannot be captured"
        return func(*args, **(kwargs or {}))


def stand_in(function, tensors):
    inputs = tuple(t.clone() for t in tensors)
    with NothingLooksAtValues():
        output = function(*inputs)

    def run(*values):
        for target, value in zip(inputs, values, strict=True):
            target.copy_(value)
        output.copy_(function(*inputs))
        return output

    return run


def test_a_shape_is_captured_when_it_comes_again_and_then_replayed():
    cache = GraphCache(stand_in)
    given = [torch.full((2, 3), float(i)) for i in range(4)]
    with replaying(cache):
        answers = [replay("double", lambda x: 2 * x, x) for x in given]
        assert (cache.captured, cache.replayed) == (1, 3)
        replay("double", lambda x: 2 * x, torch.ones(5, 3))
        replay("other", lambda x: 3 * x, given[0])
        assert cache.captured == 1, "another shape and another part have graphs of their own"
    for x, answer in zip(given, answers, strict=True):
        assert torch.equal(answer, 2 * x), "a later replay must not write into an earlier answer"
    replay("double", lambda x: 2 * x, given[0])
    assert cache.replayed == 3, "only inside replaying"


def test_the_least_recently_used_graph_leaves(monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    cache = GraphCache(stand_in)
    with replaying(cache):
        for size in (1, 1, 2, 2, 1, 3, 3, 1):
            replay("double", lambda x: 2 * x, torch.ones(size))
        assert cache.captured == 3
        replay("double", lambda x: 2 * x, torch.ones(2))
        replay("double", lambda x: 2 * x, torch.ones(2))
    assert cache.captured == 4


def test_a_graph_that_gives_other_values_is_refused():
    cache = GraphCache(lambda function, tensors: lambda *values: function(*values) + 1)
    with replaying(cache), pytest.raises(RuntimeError, match=r"image network.*static_batch_size=null"):
        for _ in range(2):
            replay("image network", lambda x: 2 * x, torch.ones(3))


def test_on_a_cpu_the_option_does_nothing():
    assert graphs_for(torch.device("cpu"), 32) is None
    backbone = FakeBackbone()
    policies = ServedPolicies(backbone)
    schema = schema_of()
    publish(policies, "a", schema)
    with TenantInferenceServer(policies, static_batch_size=32) as server:
        server.client("a", sample=False)(request(schema, 3))
    assert backbone.calls == [3]


def test_static_batch_size_is_checked():
    with pytest.raises(ValueError, match="static_batch_size=0: must be at least 1"):
        TenantInferenceServer(ServedPolicies(FakeBackbone()), static_batch_size=0)


def test_the_server_fills_rows_up_and_answers_the_same():
    backbone, answers = FakeBackbone(), {}
    policies = ServedPolicies(backbone)
    small, large = schema_of(), schema_of(state_dim=5, action_dim=3)
    publish(policies, "a", small)
    publish(policies, "bb", large)
    for static in (False, True):
        server = TenantInferenceServer(policies)
        if static:
            server.graphs, server.max_rows = GraphCache(stand_in), 8
        asked = [("a", small, 3, "push"), ("bb", large, 2, "a longer text"), ("a", small, 6, "push")]
        futures = [server.client(t, sample=False).submit(request(s, n, text)) for t, s, n, text in asked]
        with server:
            answers[static] = [future.result(timeout=10) for future in futures]
    assert backbone.calls[0] == 11 and sorted(backbone.calls[1:]) == [4, 8], (
        "11 rows as they come; filled up: 8, and 3 in a pass of 4"
    )
    for plain, filled in zip(answers[False], answers[True], strict=True):
        assert plain.batch_size == filled.batch_size
        for key in (("vla_action", "chunk"), "state_value"):
            torch.testing.assert_close(plain[key], filled[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "build",
    [
        EffNetMiniLM,
        *(lambda c=c: c("tiny", dtype="fp32", chat=c is not PaliGemma) for c in (Qwen3VL, SmolVLM2, PaliGemma)),
    ],
    ids=["effnet_minilm", "qwen3_vl", "smolvlm", "paligemma"],
)
@torch.no_grad()
def test_features_through_graphs_equal_those_without(build):
    backbone, cache = build(), GraphCache(stand_in)
    rows = [random_observation(SCHEMA, 4, seed=seed) for seed in range(3)]
    texts = ["go", "go left", "stop", "go"]
    plain = [backbone(observation, texts, SCHEMA) for observation in rows]
    with replaying(cache):
        graphed = [backbone(observation, texts, SCHEMA) for observation in rows]
    assert cache.captured == 1 and cache.replayed == 2
    for a, b in zip(plain, graphed, strict=True):
        assert isinstance(a.tokens, TensorDict)
        for key in a.tokens.keys():
            assert torch.equal(a.tokens[key], b.tokens[key]) and torch.equal(a.mask[key], b.mask[key])
        assert torch.equal(a.pooled, b.pooled)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures for real: needs a GPU")
@pytest.mark.parametrize("build", [EffNetMiniLM, lambda: Qwen3VL("tiny", dtype="fp32")], ids=["effnet", "qwen3_vl"])
def test_a_real_capture_gives_what_the_kernels_give(build):
    backbone = build().to("cuda")
    policies, schema = ServedPolicies(backbone), SCHEMA
    publish(policies, "a", schema)
    answers = {}
    for static in (None, 8):
        with TenantInferenceServer(policies, static_batch_size=static) as server:
            client = server.client("a", sample=False)
            answers[static] = [client(request(schema, rows, seed=rows))["vla_action", "chunk"] for rows in (5, 6, 7, 8)]
    assert server.graphs is not None and server.graphs.captured == 1 and server.graphs.replayed == 3
    for plain, graphed in zip(answers[None], answers[8], strict=True):
        torch.testing.assert_close(plain, graphed)
