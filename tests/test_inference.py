"""Inference queue, on a small fake backbone and fake heads that follow the contracts (no pretrained weights)."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import fakes
import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor, nn
from torch.distributions import Normal
from torchrl.collectors import Collector
from torchrl.data import Bounded, Categorical, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from models.heads.mlp import ChunkMLPHead
from nexus_lightning.backbone import Backbone, FeatureSegment, FeatureSpec, VLAFeature
from nexus_lightning.config import ConfigError, validate
from nexus_lightning.head import ActionHead
from nexus_lightning.inference.client import TenantPolicyClient
from nexus_lightning.inference.figures import Histogram
from nexus_lightning.inference.policies import ServedPolicies
from nexus_lightning.inference.requests import Stack
from nexus_lightning.inference.server import MAX_STACKS, TenantInferenceServer
from nexus_lightning.schema import NormalizationStats, Normalizer, TenantSchema

PROMPT_LIMIT = 64
WIDTH = 8


class FakeBackbone(Backbone):
    """One token per character and per camera, padded to the longest prompt of the batch, pooled by mask."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"name": "fake"}
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(256, WIDTH, generator=generator))
        self.calls: list[int] = []
        self.freeze()

    def feature_spec(self, schema: TenantSchema, kind: str = "tokens") -> FeatureSpec:
        segments = [FeatureSegment(f"image_{c}", WIDTH) for c in schema.cameras]
        return FeatureSpec(kind, () if kind == "pooled" else (*segments, FeatureSegment("text", WIDTH)), WIDTH)

    def preprocess(
        self,
        observation: TensorDict,
        instructions: Sequence[str],
        schema: TenantSchema,
        kinds: Sequence[str] = ("tokens",),
    ) -> TensorDict:
        for text in instructions:
            if len(text) > PROMPT_LIMIT:
                raise ValueError(f"prompt of {len(text)} characters exceeds the limit {PROMPT_LIMIT}")
        length = max(map(len, instructions))
        ids = torch.tensor([[ord(c) for c in text.ljust(length, "\0")] for text in instructions])
        means = {c: observation["image", c].float().mean((1, 2, 3)) / 255 for c in schema.cameras}
        return TensorDict({"ids": ids, "image": TensorDict(means, [len(ids)])}, [len(ids)])

    def encode(self, inputs: TensorDict, kinds: Sequence[str] = ("tokens",)) -> VLAFeature:
        rows = inputs.batch_size[0]
        self.calls.append(rows)
        tokens = {f"image_{c}": m[:, None, None].expand(-1, 1, WIDTH) for c, m in inputs["image"].items()}
        mask = {name: torch.ones(rows, 1, dtype=torch.bool) for name in tokens}
        tokens["text"], mask["text"] = self.embedding[inputs["ids"]], inputs["ids"] != 0
        every, real = torch.cat(list(tokens.values()), 1), torch.cat(list(mask.values()), 1)[..., None]
        pooled = (every * real).sum(1) / real.sum(1)
        return VLAFeature(TensorDict(tokens, [rows]), TensorDict(mask, [rows]), pooled, batch_size=[rows])


class FakeRLHead(ActionHead):
    """Linear Gaussian. Raises when the first state dim is above 5, answers NaN when it is below -5."""

    supports_rl = True

    def __init__(self, feature_spec: FeatureSpec, schema: TenantSchema, seed: int = 0) -> None:
        super().__init__(feature_spec, schema)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.actor = nn.Linear(WIDTH + schema.state_dim, schema.chunk * schema.action_dim)
            self.value_head = nn.Linear(WIDTH + schema.state_dim, 1)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def loss(self, features, state, actions, is_pad):
        raise NotImplementedError

    def get_dist(self, features: VLAFeature, state: Tensor) -> Normal:
        mean = self.actor(torch.cat([features.pooled, state], -1))
        return Normal(mean.unflatten(-1, (self.schema.chunk, self.schema.action_dim)), self.scale)

    def value(self, features: VLAFeature, state: Tensor) -> Tensor:
        return self.value_head(torch.cat([features.pooled, state], -1))

    def act(self, features: VLAFeature, state: Tensor, noise: Tensor | None = None) -> TensorDict:
        if bool((state[:, 0] > 5).any()):
            raise KeyError("boom")
        dist = self.get_dist(features, state)
        chunk = dist.loc if noise is None else dist.loc + dist.scale * noise
        chunk = torch.where(state[:, :1, None] < -5, torch.nan, chunk)
        out = {"chunk": chunk, "state_value": self.value(features, state)}
        if not chunk.isnan().any():
            out["log_probs"] = dist.log_prob(chunk)
        return TensorDict(out, state.shape[:1])


class FakeSFTHead(ActionHead):
    """Every element of the chunk is ``self.level``: one can see which version answered."""

    def __init__(self, feature_spec: FeatureSpec, schema: TenantSchema, level: float = 0.0) -> None:
        super().__init__(feature_spec, schema)
        self.level = nn.Parameter(torch.tensor(level))

    def loss(self, features, state, actions, is_pad):
        raise NotImplementedError

    def act(self, features: VLAFeature, state: Tensor, noise: Tensor | None = None) -> TensorDict:
        chunk = self.level.expand(len(state), self.schema.chunk, self.schema.action_dim)
        return TensorDict({"chunk": chunk if noise is None else chunk + noise}, [len(state)])


class FakeTraceHead(FakeRLHead):
    """Draws a hidden number per row and keeps it: its likelihood is of the trace, not of the chunk."""

    @property
    def noise_shape(self):
        return (3,)

    @property
    def trace_shapes(self):
        return {"draw": (3,)}

    def act(self, features: VLAFeature, state: Tensor, noise: Tensor | None = None) -> TensorDict:
        out = super().act(features, state)
        if noise is not None:
            out["trace"] = TensorDict({"draw": noise}, out.batch_size)
            out["chunk"] = out["chunk"] + noise.sum(-1)[:, None, None]
        return out


class PooledHead(FakeRLHead):
    """Reads the pooled vector alone and insists on it."""

    reads = ("pooled",)

    def act(self, features: VLAFeature, state: Tensor, noise: Tensor | None = None) -> TensorDict:
        assert not list(features.tokens.keys()), "a head gets the segments of its own kind only"
        return super().act(features, state, noise)


class FakeEnv(EnvBase):
    """Two lanes with the framework's keys; the state echoes the last action of the chunk."""

    def __init__(self, schema: TenantSchema, lanes: int = 2) -> None:
        super().__init__(batch_size=[lanes])
        self.schema, n = schema, lanes
        images = {c: Unbounded((n, 3, 16, 16), dtype=torch.uint8) for c in schema.cameras}
        self.observation_spec = Composite(
            observation=Composite(
                image=Composite(images, shape=[n]), state=Unbounded((n, schema.state_dim)), shape=[n]
            ),
            language_instruction=NonTensor(shape=[n], example_data="push"),
            shape=[n],
        )
        chunk = Bounded(-10, 10, shape=(n, schema.chunk, schema.action_dim))
        self.action_spec = Composite(vla_action=Composite(chunk=chunk, shape=[n]), shape=[n])
        self.reward_spec = Unbounded((n, 1))
        self.done_spec = Categorical(2, dtype=torch.bool, shape=(n, 1))

    def _observe(self, state: Tensor) -> TensorDict:
        return observation_of(self.schema, state, ["push"] * len(state))

    def _reset(self, tensordict=None, **kwargs):
        return self._observe(torch.zeros(*self.batch_size, self.schema.state_dim)).update(self.full_done_spec.zero())

    def _step(self, tensordict):
        action = tensordict["vla_action", "chunk"][:, -1, :1].clamp(-1, 1)
        out = self._observe(action.expand(-1, self.schema.state_dim).contiguous())
        return out.update({"reward": action.detach(), **self.full_done_spec.zero()})

    def _set_seed(self, seed):
        del seed


def schema_of(**changes) -> TenantSchema:
    return TenantSchema(
        **{"state_dim": 3, "action_dim": 2, "chunk": 4, "execute": 4, "cameras": ("front",), "image_size": 16} | changes
    )


def observation_of(schema: TenantSchema, state: Tensor, texts: list[str]) -> TensorDict:
    n = len(state)
    size = schema.image_size
    images = {c: torch.full((n, 3, size, size), 10 * (i + 1), dtype=torch.uint8) for i, c in enumerate(schema.cameras)}
    observation = TensorDict({"state": state} | ({"image": TensorDict(images, [n])} if images else {}), [n])
    return TensorDict({"observation": observation, "language_instruction": NonTensorStack(*texts)}, [n])


def request(schema: TenantSchema, rows: int = 1, text: str = "push", seed: int = 0) -> TensorDict:
    state = torch.randn(rows, schema.state_dim, generator=torch.Generator().manual_seed(seed))
    return observation_of(schema, state, [text] * rows)


def publish(
    policies: ServedPolicies, tenant: str, schema: TenantSchema, head: ActionHead | None = None, version: int = 0
):
    head = head or FakeRLHead(policies.backbone.feature_spec(schema), schema, seed=len(tenant))
    return policies.publish(tenant, version, head, Normalizer(schema), schema)


def level_head(backbone: Backbone, schema: TenantSchema, level: float) -> FakeSFTHead:
    return FakeSFTHead(backbone.feature_spec(schema), schema, level)


def fail_of(future: Future) -> BaseException:
    error = future.exception(timeout=10)
    assert error is not None
    return error


def until(condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not reached"
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def backbone() -> FakeBackbone:
    return FakeBackbone()


@pytest.fixture
def policies(backbone) -> ServedPolicies:
    return ServedPolicies(backbone)


# --------------------------------------------------------------------------------------------------------- batching


def test_one_backbone_call_for_tenants_of_different_action_dims(policies, backbone):
    small, large = schema_of(action_dim=7), schema_of(action_dim=14, state_dim=9, chunk=2, execute=1)
    publish(policies, "small", small)
    publish(policies, "large", large, version=5)
    seen = []
    server = TenantInferenceServer(policies, on_batch=lambda *batch: seen.append(batch))
    a = server.client("small", sample=False).submit(request(small, 2))
    b = server.client("large", sample=False).submit(request(large, 3, "a much longer instruction"))
    with server:
        a, b = a.result(timeout=10), b.result(timeout=10)
        until(lambda: seen)
    assert backbone.calls == [5]
    assert a["vla_action", "chunk"].shape == (2, 4, 7) and b["vla_action", "chunk"].shape == (3, 2, 14)
    assert b["vla_action", "log_probs"].shape == (3, 2, 14) and b["state_value"].shape == (3, 1)
    assert b["policy_version"].dtype == torch.int64 and b["policy_version"].tolist() == [[5]] * 3
    tenants, start_s, end_s, encodes = seen[0]
    assert tenants == {"small": 2, "large": 3} and encodes == 1 and start_s <= end_s <= time.monotonic()
    stats = server.stats()
    assert stats["rows_served"] == stats["requests"] == 5 and stats["backbone_calls"] == stats["batches"] == 1
    assert stats["rows_by_tenant"] == tenants and stats["rows_failed"] == 0
    assert stats["padding_tokens"] == 2 * (len("a much longer instruction") - len("push"))


def test_answer_does_not_depend_on_batch_mates(policies):
    a, b = schema_of(), schema_of(state_dim=5, action_dim=3)
    publish(policies, "a", a)
    publish(policies, "bb", b)

    def answers(with_mates: bool) -> TensorDict:
        server = TenantInferenceServer(policies)
        mates = [("bb", b, 31, "x" * 60), ("a", a, 2, "y" * 20)] if with_mates else []
        for seed, (tenant, schema, rows, text) in enumerate(mates):
            server.client(tenant, sample=True).submit(request(schema, rows, text, seed=seed + 7))
        future = server.client("a", sample=True).submit(request(a, 3))
        with server:
            return future.result(timeout=10)

    alone, mixed = answers(False), answers(True)
    for key in (("vla_action", "chunk"), ("vla_action", "log_probs"), "state_value"):
        torch.testing.assert_close(alone[key], mixed[key], rtol=1e-5, atol=1e-6)


def test_two_prefix_signatures_need_two_backbone_calls(policies, backbone):
    for tenant, schema in {
        "one": schema_of(),
        "two": schema_of(cameras=("front", "wrist")),
        "none": schema_of(cameras=()),
    }.items():
        publish(policies, tenant, schema)
    server = TenantInferenceServer(policies)
    futures = [
        server.client(t, sample=False).submit(request(policies.served(t).schema, 2))
        for t in ("one", "two", "none", "one")
    ]
    with server:
        assert [f.result(timeout=10)["vla_action", "chunk"].shape[0] for f in futures] == [2, 2, 2, 2]
    assert sorted(backbone.calls) == [2, 2, 4]


def test_heads_of_different_kinds_share_one_backbone_call(policies, backbone):
    schema = schema_of()
    publish(policies, "tokens", schema)
    publish(policies, "pooled", schema, PooledHead(backbone.feature_spec(schema, "pooled"), schema, seed=6))
    futures = {}
    server = TenantInferenceServer(policies)
    for tenant in ("tokens", "pooled"):
        futures[tenant] = server.client(tenant, sample=False).submit(request(schema, 2))
    with server:
        answers = [future.result(timeout=10)["vla_action", "chunk"] for future in futures.values()]
    assert backbone.calls == [4]
    torch.testing.assert_close(answers[0], answers[1], msg="same seed, same pooled vector")


def test_the_trace_of_a_decision_comes_back_with_it(policies, backbone):
    schema = schema_of()
    publish(policies, "a", schema, FakeTraceHead(backbone.feature_spec(schema), schema))
    with TenantInferenceServer(policies) as server:
        client = server.client("a", sample=True, generator=torch.Generator().manual_seed(3))
        assert ("vla_action", "trace", "draw") in client.out_keys
        td = client(request(schema, 2))
        expected = torch.randn(2, 3, generator=torch.Generator().manual_seed(3))
        torch.testing.assert_close(td["vla_action", "trace", "draw"], expected)
        assert "trace" not in server.client("a", sample=False)(request(schema, 2))["vla_action"].keys()
        for batch in Collector(FakeEnv(schema), client, frames_per_batch=8, total_frames=8, use_buffers=False):
            assert batch["vla_action", "trace", "draw"].shape == (2, 4, 3)


def test_large_groups_and_requests_are_encoded_in_bounded_calls(policies, backbone):
    schema = schema_of()
    publish(policies, "a", schema)
    td = observation_of(schema, torch.randn(11, 3), [f"row {i:02d}" for i in range(11)])
    whole = TenantInferenceServer(policies)
    split = TenantInferenceServer(policies, max_rows=4)
    expected = whole.client("a", sample=False).submit(td)
    got = [split.client("a", sample=False).submit(x) for x in (td, td[:3], td[3:5])]
    with whole, split:
        expected = expected.result(timeout=10)
        got = [future.result(timeout=10) for future in got]
    torch.testing.assert_close(got[0]["vla_action", "chunk"], expected["vla_action", "chunk"])
    torch.testing.assert_close(got[1]["vla_action", "chunk"], expected["vla_action", "chunk"][:3])
    torch.testing.assert_close(got[2]["state_value"], expected["state_value"][3:5])
    assert sum(backbone.calls) == 11 + 16 and max(backbone.calls[-3:]) <= 4


def test_server_computes_what_the_head_computes(policies, backbone):
    """State normalisation by the tenant's statistics; sampling and deterministic requests in one batch."""
    schema = schema_of()
    head = FakeRLHead(backbone.feature_spec(schema), schema)
    normalizer = Normalizer(schema, state=NormalizationStats.of(torch.randn(20, 3) * 3 + 1))
    policies.publish("a", 0, head, normalizer, schema)
    td = request(schema, 3)
    server = TenantInferenceServer(policies)
    sampled = server.client("a", sample=True, generator=torch.Generator().manual_seed(4)).submit(td)
    mode = server.client("a", sample=False).submit(td)
    value = server.client("a", sample=True).submit(td, "value")
    with server:
        sampled, mode, value = (f.result(timeout=10) for f in (sampled, mode, value))
    assert server.stats()["backbone_calls"] == 1
    features = backbone(td["observation"], ["push"] * 3, schema)
    state = normalizer.normalize_state(td["observation", "state"])
    noise = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        for answer, expected in ((sampled, head.act(features, state, noise)), (mode, head.act(features, state))):
            torch.testing.assert_close(answer["vla_action", "chunk"], expected["chunk"])
            torch.testing.assert_close(answer["vla_action", "log_probs"], expected["log_probs"])
            torch.testing.assert_close(answer["state_value"], expected["state_value"])
    torch.testing.assert_close(value["state_value"], mode["state_value"])
    assert set(value.keys()) == {"state_value", "policy_version"}


# -------------------------------------------------------------------------------------------------------- isolation


def crash(schema: TenantSchema, first: float, rows: int = 2) -> TensorDict:
    td = request(schema, rows)
    td["observation", "state"][:, 0] = first
    return td


@pytest.mark.parametrize(("first", "message"), [(9.0, "KeyError: 'boom'"), (-9.0, "NaN"), (float("nan"), "NaN")])
def test_a_crash_or_nan_fails_only_its_own_request(policies, first, message):
    schema = schema_of(state_normalization="identity")
    publish(policies, "bad", schema)
    publish(policies, "good", schema)
    server = TenantInferenceServer(policies)
    good, bad, same = (server.client(t, sample=False) for t in ("good", "bad", "bad"))
    futures = [good.submit(request(schema, 3)), bad.submit(crash(schema, first)), same.submit(request(schema, 2))]
    with server:
        error = fail_of(futures[1])
        answers = [futures[0].result(timeout=10), futures[2].result(timeout=10)]
        assert good(request(schema))["vla_action", "chunk"].isfinite().all()  # the worker lives on
    assert "tenant 'bad'" in str(error) and message in str(error)
    assert all(answer["vla_action", "chunk"].isfinite().all() for answer in answers)
    assert server.stats()["rows_failed"] == 2


def wrong(schema: TenantSchema, what: str) -> TensorDict:
    td = request(schema, 2)
    if what == "camera":
        td["observation", "image"].rename_key_("front", "wrist")
    elif what == "size":
        td["observation", "image", "front"] = torch.zeros(2, 3, 0, 8, dtype=torch.uint8)
    elif what == "dtype":
        td["observation", "image", "front"] = torch.zeros(2, 3, 16, 16, dtype=torch.int64)
    elif what == "range":
        td["observation", "image", "front"] = torch.full((2, 3, 16, 16), 200.0)
    elif what == "grey":
        td["observation", "image", "front"] = torch.zeros(2, 1, 16, 16, dtype=torch.uint8)
    elif what == "channels last":
        td["observation", "image", "front"] = torch.zeros(2, 16, 16, 3, dtype=torch.uint8)
    elif what == "bare image":
        td["observation", "image"] = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)
    elif what == "state":
        td["observation", "state"] = torch.zeros(2, 9)
    elif what == "no state":
        del td["observation", "state"]
    elif what == "no instruction":
        del td["language_instruction"]
    else:
        del td["observation"]
    return td


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("camera", r"schema has \['front'\], observation has \['wrist'\]"),
        ("size", r"camera 'front': expected uint8 .* got an empty image \[3, 0, 8\]"),
        ("dtype", r"camera 'front': expected uint8 \[3, H, W\], or float from 0 to 1, got torch.int64"),
        ("range", r"camera 'front': .* got torch.float32 \[3, 16, 16\] with values from 200 to 200"),
        ("grey", r"camera 'front': .*\[1, 16, 16\] \(grey or depth: a policy sees three colour channels\)"),
        ("channels last", r"camera 'front': .*\[16, 16, 3\] \(put the channels first\)"),
        ("bare image", r"one entry per camera: \['front'\]"),
        ("state", r"expected float32 \[2, 3\], got torch.float32 \[2, 9\]"),
        ("no state", r"expected float32 \[2, 3\], got None"),
        ("no instruction", "one string per row"),
        ("no observation", "'observation' is missing"),
    ],
)
def test_a_request_that_does_not_fit_the_schema_never_reaches_the_backbone(policies, backbone, what, message):
    schema = schema_of()
    publish(policies, "a", schema)
    publish(policies, "b", schema)
    server = TenantInferenceServer(policies)
    bad = server.client("a", sample=True).submit(wrong(schema, what))
    good = server.client("b", sample=True).submit(request(schema))
    with server:
        with pytest.raises(ValueError, match=f"tenant 'a': .*{message}"):
            bad.result(timeout=10)
        good.result(timeout=10)
    assert backbone.calls == [1]


def test_a_prompt_that_is_too_long_fails_alone(policies):
    schema = schema_of()
    publish(policies, "a", schema)
    publish(policies, "b", schema)
    server = TenantInferenceServer(policies)
    futures = [
        server.client(t, sample=True).submit(request(schema, 1, x))
        for t, x in (("a", "ok"), ("b", "p" * 99), ("b", "ok"))
    ]
    with server:
        assert futures[0].result(timeout=10)["policy_version"].item() == 0
        assert futures[2].result(timeout=10)["policy_version"].item() == 0
        with pytest.raises(ValueError, match=r"tenant 'b'.*99 characters exceeds the limit 64"):
            futures[1].result(timeout=10)


def test_a_fast_tenant_is_answered_while_a_slow_one_still_decodes(policies, backbone):
    entered, gate = threading.Event(), threading.Event()

    class SlowHead(FakeSFTHead):
        def act(self, features, state, noise=None):
            entered.set()
            assert gate.wait(10)
            return super().act(features, state, noise)

    schema = schema_of()
    publish(policies, "fast", schema)
    publish(policies, "slow", schema, SlowHead(backbone.feature_spec(schema), schema))
    server = TenantInferenceServer(policies)
    fast = server.client("fast", sample=False).submit(request(schema))
    slow = server.client("slow", sample=False).submit(request(schema))
    with server:
        try:
            fast.result(timeout=10)
            assert entered.wait(10) and not slow.done()
            publish(policies, "slow", schema, level_head(backbone, schema, 1.0), version=1)  # does not wait either
        finally:
            gate.set()
        assert slow.result(timeout=10)["policy_version"].item() == 0
        until(lambda: policies.versions("slow") == [1])


def test_an_answer_of_another_tenant_is_refused(policies, monkeypatch):
    schema = schema_of()
    publish(policies, "a", schema)
    publish(policies, "b", schema)
    with TenantInferenceServer(policies) as server:
        mine = server.client("a", sample=False)
        theirs = server.client("b", sample=False)
        monkeypatch.setattr(mine, "submit", lambda td, mode="act": theirs.submit(td, mode))
        with pytest.raises(RuntimeError, match=r"tenant 'a' asked for .* given 'b'"):
            mine(request(schema))


def test_monitoring_that_raises_does_not_stop_the_service(policies, caplog):
    schema = schema_of()
    publish(policies, "a", schema)

    def broken(*batch):
        raise OSError("disk full")

    with TenantInferenceServer(policies, on_batch=broken) as server:
        client = server.client("a", sample=False)
        client(request(schema))
        client(request(schema))
    assert "disk full" in caplog.text


# ------------------------------------------------------------------------------------------------------- publication


def test_a_pinned_version_is_served_until_it_is_unpinned(policies, backbone):
    schema = schema_of()
    publish(policies, "a", schema, level_head(backbone, schema, 0.0), 0)
    version = policies.pin("a")
    with TenantInferenceServer(policies) as server:
        pinned, latest = server.client("a", sample=False, version=version), server.client("a", sample=False)
        for new in (1, 2, 3):
            publish(policies, "a", schema, level_head(backbone, schema, float(new)), new)
        assert policies.versions("a") == [0, 3] and policies.latest("a") == 3
        assert pinned(request(schema))["vla_action", "chunk"].eq(0).all()
        answer = latest(request(schema))
        assert answer["vla_action", "chunk"].eq(3).all() and answer["policy_version"].tolist() == [[3]]
        policies.pin("a", 0)
        policies.unpin("a", 0)
        assert policies.versions("a") == [0, 3]  # pinned twice, unpinned once
        policies.unpin("a", 0)
        until(lambda: policies.versions("a") == [3])
        with pytest.raises(ValueError, match=r"tenant 'a': version 0 is not served \(served: \[3\]\)"):
            pinned(request(schema))
        with pytest.raises(ValueError, match="version 3 is not pinned"):
            policies.unpin("a", 3)


def test_publication_is_compared_by_digest(policies, backbone, caplog):
    corrupt = threading.Event()

    class CopiedBadly(FakeRLHead):
        def load_state_dict(self, *args, **kwargs):
            out = super().load_state_dict(*args, **kwargs)
            with torch.no_grad():
                self.actor.bias[0] += 1e-3 * corrupt.is_set()
            return out

    schema = schema_of()
    head = CopiedBadly(backbone.feature_spec(schema), schema)
    first = publish(policies, "a", schema, head, 0)
    assert publish(policies, "a", schema, head, 1) == first
    assert policies.served("a").unchanged and "same bytes" in caplog.text
    with torch.no_grad():
        head.actor.bias += 1
    assert publish(policies, "a", schema, head, 2) != first
    assert not policies.served("a").unchanged and policies.counts() == {"a": {"published": 3, "unchanged": 1}}

    corrupt.set()
    with pytest.raises(RuntimeError, match="tenant 'a': publication of version 3 failed"):
        publish(policies, "a", schema, head, 3)
    assert policies.versions("a") == [2]


def test_refused_publications(policies, backbone):
    schema = schema_of()
    publish(policies, "a", schema, version=4)
    with pytest.raises(ValueError, match="version 4 is not newer than 4"):
        publish(policies, "a", schema, version=4)
    with pytest.raises(ValueError, match="another schema"):
        publish(policies, "a", schema_of(action_dim=3), version=5)
    greedy = level_head(backbone, schema, 0.0)
    greedy.backbone = backbone
    with pytest.raises(ValueError, match="tenant 'b': the head holds parameters of the shared backbone"):
        publish(policies, "b", schema, greedy)
    with pytest.raises(ValueError, match=r"tenant 'c' is not served; published tenants: \['a'\]"):
        TenantInferenceServer(policies).client("c", sample=False)


def test_a_removed_tenant_is_gone_and_its_name_starts_afresh(policies, backbone):
    schema = schema_of()
    publish(policies, "a", schema, version=7)
    version = policies.pin("a")
    server = TenantInferenceServer(policies)
    waiting = server.client("a", sample=False).submit(request(schema))
    policies.remove("a")
    policies.unpin("a", version)
    with server:
        assert isinstance(fail_of(waiting), ValueError)
        publish(policies, "a", schema_of(action_dim=5), version=0)
        assert server.client("a", sample=False)(request(schema))["vla_action", "chunk"].shape[-1] == 5
    with pytest.raises(ValueError, match="not served"):
        policies.remove("b")


def test_one_backbone_in_memory_and_only_head_memory_per_tenant(policies, backbone):
    schema = schema_of()
    spec = backbone.feature_spec(schema)
    trained = {f"t{i}": FakeRLHead(spec, schema, i) for i in range(5)}
    for version in range(4):
        for tenant, head in trained.items():
            head.actor.bias.grad = torch.ones_like(head.actor.bias)
            publish(policies, tenant, schema, head, version)
    server = TenantInferenceServer(policies)
    assert policies.backbone is backbone and server.model is backbone
    assert not list(server.client("t0", sample=True).parameters())  # a collector has nothing to copy
    owned = {p.data_ptr() for p in backbone.parameters()}
    for tenant, head in trained.items():
        held = policies._tenants[tenant]
        copies = [s.head for s in held.versions.values()] + [held.spare]
        assert len(copies) == 2  # the latest and the memory for the next one
        for module in copies:
            parameters = list(module.parameters())
            assert sum(p.numel() for p in parameters) == sum(p.numel() for p in head.parameters())
            assert not any(p.requires_grad or p.grad is not None for p in parameters) and not module.training
            assert owned.isdisjoint(p.data_ptr() for p in parameters)
            assert {p.data_ptr() for p in head.parameters()}.isdisjoint(p.data_ptr() for p in parameters)


def test_reused_memory_takes_over_every_tensor(policies, backbone):
    schema = schema_of()
    head = FakeRLHead(backbone.feature_spec(schema), schema)
    memory = []
    for version in range(4):
        with torch.no_grad():
            head.actor.weight += 1
            head.scale += 1
        publish(policies, "a", schema, head, version)
        served = policies.served("a").head
        memory.append(served.actor.weight.data_ptr())
        assert torch.equal(served.actor.weight, head.actor.weight) and torch.equal(served.scale, head.scale)
    assert memory[0] == memory[2] != memory[1] == memory[3]


def test_no_request_ever_mixes_two_versions(policies, backbone):
    schema = schema_of()
    heads = [level_head(backbone, schema, float(v)) for v in range(60)]
    publish(policies, "a", schema, heads[0], 0)
    seen: list[tuple[list[int], list[float]]] = []
    stop = threading.Event()

    def ask(server):
        client = server.client("a", sample=False)
        while not stop.is_set():
            answer = client(request(schema, 5))
            seen.append((answer["policy_version"].unique().tolist(), answer["vla_action", "chunk"].unique().tolist()))

    with TenantInferenceServer(policies, max_rows=2) as server:  # a request takes three backbone calls
        threads = [threading.Thread(target=ask, args=(server,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for version in range(1, 60):
            publish(policies, "a", schema, heads[version], version)
            if version % 10 == 0:
                answered = len(seen)
                until(lambda answered=answered: len(seen) > answered + 1)
        stop.set()
        for thread in threads:
            thread.join(10)
    assert len({tuple(v) for v, _ in seen}) > 3
    assert all(len(v) == 1 and v == levels for v, levels in seen)
    assert policies.versions("a") == [59] and policies.served("a").users == 0


# -------------------------------------------------------------------------------------------- when a batch is served

LONG_S = 600.0  # T where nobody is waited for: a client would give up before


class Recorder:
    """``on_batch``: tenants and rows of every batch, in order."""

    def __init__(self) -> None:
        self.batches: list[dict[str, int]] = []

    def __call__(self, rows: dict[str, int], start_s: float, end_s: float, encodes: int) -> None:
        self.batches.append(rows)


class GatedBackbone(FakeBackbone):
    """Waits in every encode until it is let through: what arrives meanwhile is known to the test."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.gate = threading.Semaphore(0), threading.Semaphore(0)

    def encode(self, inputs: TensorDict, kinds: Sequence[str] = ("tokens",)) -> VLAFeature:
        self.entered.release()
        assert self.gate.acquire(timeout=20)
        return super().encode(inputs, kinds)


class Clock:
    """The time, turned forward by tests that would have to wait for it; counts who looks."""

    def __init__(self) -> None:
        self.ahead_s, self.looks = 0.0, 0

    def __call__(self) -> float:
        self.looks += 1
        return time.monotonic() + self.ahead_s


def prompt_clients(server: TenantInferenceServer, schema: TenantSchema, tenants: Sequence[str]):
    """Clients that came back within T once, so that their next request is expected. Costs two batches of all."""
    clients = [server.client(t, sample=False, timeout_s=20) for t in tenants]
    for _ in range(2):
        futures = [client.submit(request(schema)) for client in clients]
        server.start()
        for future in futures:
            future.result(timeout=10)
        server.shutdown()
    server.start()
    return clients


def test_a_batch_fires_at_once_when_all_sessions_are_in(policies):
    schema, tenants = schema_of(), ("a", "bb", "ccc")
    for tenant in tenants:
        publish(policies, tenant, schema)
    seen = Recorder()
    server = TenantInferenceServer(policies, timeout_s=LONG_S, on_batch=seen)
    server.client("a", sample=False)  # open, but silent: not waited for
    clients = prompt_clients(server, schema, tenants)
    for _ in range(3):
        for future in [client.submit(request(schema)) for client in clients]:
            future.result(timeout=10)
    late = server.client("bb", sample=False).submit(request(schema))  # a new session joins whoever waits
    futures = [client.submit(request(schema)) for client in clients]
    for future in [*futures, late]:
        future.result(timeout=10)
    server.shutdown()
    assert seen.batches == [dict.fromkeys(tenants, 1)] * 5 + [{"a": 1, "bb": 2, "ccc": 1}]


def test_a_session_that_was_just_answered_is_waited_for_until_it_rests(policies, backbone):
    schema = schema_of()
    publish(policies, "a", schema)
    publish(policies, "bb", schema)
    server = TenantInferenceServer(policies, timeout_s=LONG_S)
    a, b = prompt_clients(server, schema, ("a", "bb"))
    with_b = a.submit(request(schema))
    until(lambda: server.transport.held_back == 1)
    assert not with_b.done()
    for future in (b.submit(request(schema)), with_b):
        future.result(timeout=10)
    assert backbone.calls == [2, 2, 2]
    alone = a.submit(request(schema))
    until(lambda: server.transport.held_back == 1)
    b.rest()
    alone.result(timeout=10)
    a(request(schema))  # still resting: not waited for
    assert backbone.calls == [2, 2, 2, 1, 1]
    b.submit(request(schema)).cancel()  # a request that was given up counts as in, and is not served
    a(request(schema))
    server.shutdown()
    assert backbone.calls[5:] == [1]


def test_b_requests_fire_although_somebody_is_expected(policies, backbone):
    schema = schema_of()
    publish(policies, "a", schema)
    server = TenantInferenceServer(policies, timeout_s=LONG_S, max_batch_size=2)
    a, _ = prompt_clients(server, schema, ("a", "a"))
    waiting = server.client("a", sample=False).submit(request(schema))
    until(lambda: server.transport.held_back == 1)
    a(request(schema))
    waiting.result(timeout=10)
    server.shutdown()
    assert backbone.calls == [2, 2, 2]


def test_a_session_that_was_never_prompt_is_not_waited_for(policies, backbone):
    schema = schema_of()
    publish(policies, "a", schema)
    with TenantInferenceServer(policies, timeout_s=LONG_S) as server:
        for _ in range(3):
            server.client("a", sample=False, timeout_s=20)(request(schema))  # new, answered, and gone
    assert backbone.calls == [1, 1, 1]


def test_a_session_that_was_late_is_waited_for_no_more_until_it_is_prompt(policies):
    schema = schema_of()
    publish(policies, "a", schema)
    publish(policies, "bb", schema)
    clock = Clock()
    server = TenantInferenceServer(policies, timeout_s=LONG_S, clock=clock)
    a, b = prompt_clients(server, schema, ("a", "bb"))
    a.rest()
    clock.ahead_s += 2 * LONG_S  # a long simulation of b
    a(request(schema))
    a.rest()
    b(request(schema))
    a(request(schema))  # b was answered a moment ago, but it is not expected
    a.rest()
    b(request(schema))  # it came back at once this time
    waiting = a.submit(request(schema))
    until(lambda: server.transport.held_back == 1)
    assert not waiting.done()
    server.shutdown()
    assert "shutting down" in str(fail_of(waiting))


def test_a_crashed_session_is_waited_for_once(policies, backbone):
    schema = schema_of()
    publish(policies, "a", schema)
    publish(policies, "bb", schema)
    clock = Clock()
    server = TenantInferenceServer(policies, timeout_s=LONG_S, clock=clock)
    a, _ = prompt_clients(server, schema, ("a", "bb"))  # the other one crashes
    held = a.submit(request(schema))
    until(lambda: server.transport.held_back == 1)
    clock.ahead_s += LONG_S  # T is over
    server.transport.wake()
    held.result(timeout=10)
    for _ in range(5):
        a(request(schema))
    server.shutdown()
    assert backbone.calls == [2, 2, *[1] * 6]
    assert len(server.transport.expected) == 1  # a: sessions that are gone leave nothing behind


def test_t_runs_out_by_itself(policies):
    schema = schema_of()
    publish(policies, "a", schema)
    with TenantInferenceServer(policies, timeout_s=1.0) as server:
        gone = server.client("a", sample=False, timeout_s=20)
        for _ in range(2):
            gone(request(schema))  # it came back at once, so it is expected
        future = server.client("a", sample=False).submit(request(schema))
        assert future.result(timeout=10) is not None and future.held_s > 0


def test_zero_t_never_waits(policies, backbone):
    schema = schema_of()
    publish(policies, "a", schema)
    server = TenantInferenceServer(policies, timeout_s=0)
    a, _ = prompt_clients(server, schema, ("a", "a"))
    a(request(schema))
    server.shutdown()
    assert backbone.calls == [2, 2, 1]


def test_incompatible_groups_take_turns_by_age_and_keep_their_order():
    backbone = GatedBackbone()
    policies = ServedPolicies(backbone)
    one, two, three = schema_of(), schema_of(cameras=("front", "wrist")), schema_of(cameras=())
    for tenant, schema in {"one": one, "also_one": one, "two": two, "three": three}.items():
        publish(policies, tenant, schema)
    seen = Recorder()
    server = TenantInferenceServer(policies, max_batch_size=2, timeout_s=0, on_batch=seen)
    order: list[str] = []

    def ask(tenant: str, name: str) -> Future:
        future = server.client(tenant, sample=False).submit(request(policies.served(tenant).schema))
        future.add_done_callback(lambda _: order.append(name))
        return future

    futures = [ask(*x) for x in (("one", "a1"), ("two", "b1"), ("one", "a2"), ("also_one", "a3"), ("three", "c1"))]
    with server:
        assert backbone.entered.acquire(timeout=10)  # a1 and a2, the largest prefix of B, are being served
        futures += [ask(*x) for x in (("one", "a4"), ("one", "a5"), ("two", "b2"))]  # younger than b1, a3 and c1
        for _ in range(5):
            backbone.gate.release()
        for future in futures:
            future.result(timeout=10)
        until(lambda: len(seen.batches) == 5)
    assert [name for name in order if name in ("a1", "a2", "a4", "a5")] == ["a1", "a2", "a4", "a5"]  # one tenant
    assert order.index("b1") < order.index("a3") < order.index("c1") < order.index("a5")
    assert seen.batches == [{"one": 2}, {"two": 2}, {"one": 1, "also_one": 1}, {"three": 1}, {"one": 1}]


def test_a_group_that_never_stops_does_not_starve_another(policies, backbone):
    busy, rare = schema_of(), schema_of(cameras=("front", "wrist"))
    publish(policies, "busy", busy)
    publish(policies, "rare", rare)
    seen = Recorder()
    stop = threading.Event()

    def ask(server):
        client = server.client("busy", sample=False)
        while not stop.is_set():
            client(request(busy))
        client.rest()

    with TenantInferenceServer(policies, timeout_s=LONG_S, on_batch=seen) as server:
        threads = [threading.Thread(target=ask, args=(server,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        client = server.client("rare", sample=False)
        for _ in range(20):
            client(request(rare))
        stop.set()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
    assert sum("rare" in batch for batch in seen.batches) == 20


def test_a_server_without_work_sleeps(policies):
    schema = schema_of()
    publish(policies, "a", schema)
    clock = Clock()
    with TenantInferenceServer(policies, timeout_s=0.001, clock=clock) as server:
        server.client("a", sample=False)(request(schema))
        looks = clock.looks
        time.sleep(0.5)
        assert clock.looks - looks < 20  # T passes 500 times


# ------------------------------------------------------------------------------------------- heads that act together


@pytest.fixture
def stacked(monkeypatch) -> list[str]:
    """Who acted: ``vmap`` for several heads at once, else ``alone``."""
    acted: list[str] = []
    act = ChunkMLPHead.act

    def counted(self, features, state, noise=None):
        acted.append("vmap" if torch._C._functorch.is_batchedtensor(state) else "alone")
        return act(self, features, state, noise)

    monkeypatch.setattr(ChunkMLPHead, "act", counted)
    monkeypatch.setattr("nexus_lightning.inference.server.MIN_STACK", 2)
    return acted


def mlp_policies(heads: dict[str, dict]) -> tuple[ServedPolicies, dict[str, ChunkMLPHead], TenantSchema]:
    """Tenants with MLP heads of their own weights; ``heads``: tenant -> arguments."""
    backbone, schema = fakes.FakeBackbone(), schema_of()
    policies, built = ServedPolicies(backbone), {}
    for seed, (tenant, arguments) in enumerate(heads.items()):
        torch.manual_seed(seed)
        built[tenant] = ChunkMLPHead(backbone.feature_spec(schema), schema, hidden_dim=16, num_keypoints=2, **arguments)
        stats = NormalizationStats.of(torch.randn(20, 3) + seed)
        policies.publish(tenant, 0, built[tenant], Normalizer(schema, state=stats), schema)
    return policies, built, schema


def answers_of(policies: ServedPolicies, asked: Sequence[tuple], keep: bool = False) -> list[TensorDict]:
    """All in one batch. ``asked``: tenant, request, sample."""
    server = TenantInferenceServer(policies)
    clients = [server.client(tenant, sample=sample) for tenant, _, sample in asked]
    for client in clients:
        client.record_features = keep
    futures = [client.submit(td) for client, (_, td, _) in zip(clients, asked, strict=True)]
    with server:
        return [future.result(timeout=10) for future in futures]


@pytest.mark.parametrize(("sample", "keep"), [(True, True), (False, False)])
def test_equal_heads_act_together_and_answer_as_alone(stacked, sample, keep):
    policies, _, schema = mlp_policies({"c": {}, "a": {}, "b": {}})
    asked = [(t, request(schema, 2, "push " * (i + 1), seed=i), sample) for i, t in enumerate("cab")]
    together = answers_of(policies, asked, keep)
    assert stacked == ["vmap"]
    alone = [answers_of(policies, [each], keep)[0] for each in asked]
    assert stacked[1:] == ["alone"] * 3
    for one, other in zip(together, alone, strict=True):
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        for key in (("vla_action", "chunk"), ("vla_action", "log_probs"), "state_value"):
            torch.testing.assert_close(one[key], other[key], rtol=1e-5, atol=1e-6)
        if keep:
            length = other["features"].tokens["text"].shape[1]  # the batch pads to its longest instruction
            torch.testing.assert_close(one["features"].tokens["text"][:, :length], other["features"].tokens["text"])
            assert one["features"].tokens["text"].untyped_storage().nbytes() == one["features"].tokens["text"].nbytes


def test_other_architectures_rows_and_modes_act_alone(stacked):
    policies, _, schema = mlp_policies({"a": {}, "b": {}, "tanh": {"activation": "tanh"}, "deep": {"num_layers": 3}})
    one, two = request(schema, 1), request(schema, 2)
    answers = answers_of(policies, [("a", one, False), ("tanh", one, False), ("deep", one, False), ("b", two, False)])
    assert stacked == ["alone"] * 4 and len(answers) == 4
    stacked.clear()
    answers_of(policies, [("a", one, True), ("b", one, False)])
    assert stacked == ["alone"] * 2
    stacked.clear()
    answers_of(policies, [("a", one, False), ("b", one, False), ("tanh", one, False)])
    assert sorted(stacked) == ["alone", "vmap"]


def test_few_heads_act_alone(stacked, monkeypatch):
    monkeypatch.setattr("nexus_lightning.inference.server.MIN_STACK", 3)
    policies, _, schema = mlp_policies({"a": {}, "b": {}, "c": {}})
    answers_of(policies, [(t, request(schema), False) for t in "ab"])
    assert stacked == ["alone"] * 2
    answers_of(policies, [(t, request(schema), False) for t in "abc"])
    assert stacked[2:] == ["vmap"]


def test_a_stack_follows_the_versions_and_only_few_are_kept(stacked):
    policies, heads, schema = mlp_policies({"a": {}, "b": {}})
    server = TenantInferenceServer(policies, timeout_s=LONG_S)
    clients = prompt_clients(server, schema, ("a", "b"))
    before: list[Tensor] = []
    for version in range(1, 8):
        futures = [client.submit(request(schema)) for client in clients]
        chunks = [future.result(timeout=10)["vla_action", "chunk"] for future in futures]
        with torch.no_grad():
            heads["b"].actor.mlp[-1].bias += 1.0
        policies.publish("b", version, heads["b"], Normalizer(schema), schema)
        if version > 2:  # the first publication changes the normalizer as well
            torch.testing.assert_close(chunks[0], before[0])
            torch.testing.assert_close(chunks[1], before[1] + 1.0)
        before = chunks
    server.shutdown()
    assert stacked == ["vmap"] * 9 and len(server._stacks) <= MAX_STACKS


def test_a_head_that_breaks_the_others_stack_fails_alone(stacked, monkeypatch):
    policies, heads, schema = mlp_policies({"a": {}, "b": {}, "c": {}})
    with torch.no_grad():
        heads["b"].actor.mlp[-1].bias[0] = torch.nan
    policies.publish("b", 1, heads["b"], Normalizer(schema), schema)
    server = TenantInferenceServer(policies)
    futures = {t: server.client(t, sample=False).submit(request(schema)) for t in "abc"}
    with server:
        assert "tenant 'b', version 1" in str(fail_of(futures["b"])) and "NaN" in str(fail_of(futures["b"]))
        assert all(futures[t].result(timeout=10)["vla_action", "chunk"].isfinite().all() for t in "ac")
    assert stacked == ["vmap"]
    stacked.clear()

    def refuses(self, *arguments):
        raise RuntimeError("vmap: data-dependent control flow")

    monkeypatch.setattr(Stack, "__call__", refuses)
    policies.publish("b", 2, heads["a"], Normalizer(schema), schema)
    assert len(answers_of(policies, [(t, request(schema), False) for t in "abc"])) == 3
    assert stacked == ["alone"] * 3


# ---------------------------------------------------------------------------------------------------------- figures


def test_histogram_bins_are_fixed_and_quantiles_are_right_to_five_percent():
    histogram = Histogram()
    assert histogram.quantile(0.5) is None and histogram.bins() == []
    values = [10 ** (i / 100) for i in range(-400, 250)]
    for value in values:
        histogram.add(value)
    for q in (0.01, 0.5, 0.9, 0.99):
        expected = values[max(0, int(q * len(values) + 0.999) - 1)]
        assert histogram.quantile(q) == pytest.approx(expected, rel=0.06)
    for outside in (0.0, 1e-9, 1e9):
        histogram.add(outside)
    assert histogram.n == len(values) + 3 == sum(n for _, n in histogram.bins())
    assert len(histogram.counts) == Histogram.BINS


def test_figures_per_tenant(policies):
    schema, other = schema_of(), schema_of(cameras=("front", "wrist"))
    for tenant, its in {"a": schema, "bb": schema, "ccc": other}.items():
        publish(policies, tenant, its)
    server = TenantInferenceServer(policies)
    futures = [
        server.client(t, sample=False).submit(request(s, n))
        for t, s, n in (("a", schema, 1), ("bb", schema, 3), ("ccc", other, 2), ("a", schema, 2))
    ]
    bad = server.client("ccc", sample=False).submit(wrong(other, "state"))
    with server:
        for future in futures:
            future.result(timeout=10)
        fail_of(bad)
        server.client("a", sample=False)(request(schema, 5))
        until(lambda: server.stats()["rows_by_tenant"] == {"a": 8, "bb": 3, "ccc": 2})
    summary = server.summary()
    assert {t: (s["n"], s["rows_per_batch"], s["shared_batches"]) for t, s in summary.items()} == {
        "a": (3, 5.5, 0.5),
        "bb": (1, 6.0, 1.0),
        "ccc": (1, 2.0, 0.0),
    }
    for figures in summary.values():
        for name in ("wait", "held", "latency"):
            assert 0 < figures[f"{name}_p50_ms"] <= figures[f"{name}_p99_ms"]
        assert figures["held_p99_ms"] <= figures["wait_p99_ms"] <= figures["latency_p99_ms"]
    stats = server.stats()["tenants"]
    assert stats["a"]["batch_rows_bins"] == [(7, 2)] and stats["ccc"]["batch_rows_bins"] == [(3, 1)]
    assert sum(n for _, n in stats["a"]["latency_bins"]) == 3


# --------------------------------------------------------------------------------------------------- random numbers


def samples(policies, schema, others: int) -> list[Tensor]:
    """Five sampled chunks of tenant "a" while ``others`` threads of tenant "bb" sample on the same server."""
    stop = threading.Event()

    def noise(server, seed):
        client = server.client("bb", sample=True, generator=torch.Generator().manual_seed(seed))
        while not stop.is_set():
            torch.rand(3)
            client(request(schema, 2))

    with TenantInferenceServer(policies, timeout_s=0.02) as server:
        threads = [threading.Thread(target=noise, args=(server, i)) for i in range(others)]
        for thread in threads:
            thread.start()
        client = server.client("a", sample=True, generator=torch.Generator().manual_seed(3))
        chunks = [client(request(schema, 2))["vla_action", "chunk"] for _ in range(5)]
        stop.set()
        for thread in threads:
            thread.join(10)
    return chunks


def test_samples_of_a_tenant_are_bit_identical_whatever_others_do(policies, backbone):
    schema = schema_of()
    for tenant in ("a", "bb"):
        publish(policies, tenant, schema, level_head(backbone, schema, 0.25))
    alone = samples(policies, schema, others=0)
    state = torch.get_rng_state()
    busy = samples(policies, schema, others=0)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is never used
    assert all(torch.equal(x, y) for x, y in zip(alone, busy, strict=True))
    busy = samples(policies, schema, others=2)
    assert all(torch.equal(x, y) for x, y in zip(alone, busy, strict=True))
    assert not torch.equal(alone[0], alone[1])


def test_generator_state_resumes_the_sampling(policies):
    schema = schema_of()
    publish(policies, "a", schema)
    with TenantInferenceServer(policies) as server:
        client = server.client("a", sample=True)
        client(request(schema))
        state = client.get_rng_state()
        expected = client(request(schema))["vla_action", "chunk"]
        resumed = server.client("a", sample=True)
        resumed.set_rng_state(state)
        assert torch.equal(resumed(request(schema))["vla_action", "chunk"], expected)
        mode = server.client("a", sample=False)
        assert torch.equal(mode(request(schema))["vla_action", "chunk"], mode(request(schema))["vla_action", "chunk"])


# ------------------------------------------------------------------------------------------------- client and server


def test_client_writes_its_keys_into_the_input(policies, backbone):
    rl, sft = schema_of(), schema_of(state_dim=4)
    publish(policies, "rl", rl)
    publish(policies, "sft", sft, level_head(backbone, sft, 0.0))
    with TenantInferenceServer(policies) as server:
        client = server.client("rl", sample=True)
        td = request(rl, 2)
        before = td.clone()
        assert client(td) is td
        assert all(key in td.keys(True) for key in [*client.in_keys, *client.out_keys])
        assert torch.equal(td["observation", "state"], before["observation", "state"])
        assert client.value(td).shape == (2, 1)
        plain = server.client("sft", sample=False)
        assert plain.out_keys == [("vla_action", "chunk"), "policy_version"]
        assert "state_value" not in plain(request(sft, 2)).keys()
        with pytest.raises(ValueError, match="tenant 'sft': FakeSFTHead has no value head"):
            plain.value(request(sft))
        for shape in ([], [0], [2, 2]):
            with pytest.raises(ValueError, match="expected a batch"):
                client(TensorDict({}, shape))


@pytest.mark.parametrize(
    "bounds", [{"max_batch_size": 0}, {"timeout_s": -0.1}, {"timeout_s": float("nan")}, {"max_rows": 0}]
)
def test_impossible_bounds_are_refused(policies, bounds):
    with pytest.raises(ValueError, match=r"queues\.inference\."):
        TenantInferenceServer(policies, **bounds)


def test_a_client_does_not_wait_beyond_its_deadline(policies, backbone):
    entered, gate = threading.Event(), threading.Event()

    class StuckHead(FakeSFTHead):
        def act(self, features, state, noise=None):
            entered.set()
            assert gate.wait(20)
            return super().act(features, state, noise)

    schema = schema_of()
    publish(policies, "stuck", schema, StuckHead(backbone.feature_spec(schema), schema))
    publish(policies, "a", schema)
    with TenantInferenceServer(policies) as server:
        try:
            stuck = server.client("stuck", sample=False, timeout_s=0.1)
            future = stuck.submit(request(schema))
            assert entered.wait(20)
            with pytest.raises(TimeoutError, match=r"tenant 'stuck': no answer from inference within 0\.1 s"):
                stuck.wait(future)
            with pytest.raises(TimeoutError, match="tenant 'a'"):  # still queued: given up and never served
                server.client("a", sample=False, timeout_s=0.1)(request(schema))
        finally:
            gate.set()
        server.client("a", sample=False)(request(schema))
        assert sum(backbone.calls) == 2  # rows: the stuck one and the last one


def test_shutdown_answers_who_waits_and_later_calls(policies, backbone):
    entered, gate = threading.Event(), threading.Event()

    class SlowHead(FakeSFTHead):
        def act(self, features, state, noise=None):
            entered.set()
            assert gate.wait(10)
            return super().act(features, state, noise)

    schema = schema_of()
    publish(policies, "a", schema, SlowHead(backbone.feature_spec(schema), schema))
    server = TenantInferenceServer(policies, max_batch_size=1).start()
    client = server.client("a", sample=False)
    served = client.submit(request(schema))
    assert entered.wait(10)
    waiting, given_up = client.submit(request(schema)), client.submit(request(schema))
    given_up.cancel()
    threading.Thread(target=lambda: server._shutdown_event.wait(20) and gate.set()).start()
    server.shutdown()
    assert served.result(timeout=10)["policy_version"].item() == 0
    assert "shutting down" in str(fail_of(waiting))
    with pytest.raises(RuntimeError, match="tenant 'a': the inference server is not running"):
        client(request(schema))


def collect(
    server: TenantInferenceServer, tenant: str, schema: TenantSchema, sample: bool, exploration
) -> list[Tensor]:
    client = server.client(tenant, sample=sample, generator=torch.Generator().manual_seed(11))
    collector = Collector(
        lambda: FakeEnv(schema),
        client,
        frames_per_batch=8,
        total_frames=16,
        exploration_type=exploration,
        use_buffers=False,
    )
    chunks = []
    for batch in collector:
        assert batch.batch_size == (2, 4)
        assert batch["vla_action", "log_probs"].shape == (2, 4, 4, schema.action_dim)
        assert batch["policy_version"].eq(0).all() and batch["next", "reward"].shape == (2, 4, 1)
        chunks.append(batch["vla_action", "chunk"].clone())
    collector.shutdown()
    return chunks


def test_collectors_in_threads_share_one_server(policies):
    """TorchRL's exploration type is process-wide and each collector sets another one: ours must not matter."""
    tenants = {
        "a": (schema_of(), True, ExplorationType.DETERMINISTIC),
        "bb": (schema_of(action_dim=3), False, ExplorationType.RANDOM),
        "ccc": (schema_of(cameras=("front", "wrist")), True, ExplorationType.RANDOM),
        "dddd": (schema_of(state_dim=2), False, ExplorationType.DETERMINISTIC),
    }
    for tenant, (schema, *_) in tenants.items():
        publish(policies, tenant, schema)
    results: dict[str, list[Tensor]] = {}

    def run(server, tenant):
        results[tenant] = collect(server, tenant, *tenants[tenant])

    with TenantInferenceServer(policies, timeout_s=0.02) as server:
        threads = [threading.Thread(target=run, args=(server, tenant)) for tenant in tenants]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert server.stats()["rows_by_tenant"] == dict.fromkeys(tenants, 16)
    with TenantInferenceServer(policies) as server:
        for tenant in tenants:
            solo = collect(server, tenant, *tenants[tenant])
            assert len(solo) == 2
            for together, alone in zip(results[tenant], solo, strict=True):
                torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_default_collector_buffers_work_too(policies):
    schema = schema_of()
    publish(policies, "a", schema)
    with TenantInferenceServer(policies) as server:
        collector = Collector(
            lambda: FakeEnv(schema), server.client("a", sample=True), frames_per_batch=4, total_frames=8
        )
        assert [batch["vla_action", "chunk"].isfinite().all().item() for batch in collector] == [True, True]
        collector.shutdown()


def test_many_clients_each_get_their_own_answer(policies, backbone):
    schema = schema_of()
    names = [f"t{i}" for i in range(8)]
    for i, name in enumerate(names):
        publish(policies, name, schema, level_head(backbone, schema, float(i)), version=i)
    wrong_answers: list[str] = []

    def ask(server, i):
        client = server.client(names[i], sample=False)
        for step in range(15):
            answer = client(request(schema, 1 + (i + step) % 3))
            if not answer["vla_action", "chunk"].eq(i).all() or not answer["policy_version"].eq(i).all():
                wrong_answers.append(names[i])

    with TenantInferenceServer(policies, timeout_s=0.02) as server:
        threads = [threading.Thread(target=ask, args=(server, i)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        until(lambda: sum(server.stats()["rows_by_tenant"].values()) == server.stats()["rows_served"])
    assert not wrong_answers
    assert server.stats()["rows_served"] == sum(1 + (i + s) % 3 for i in range(8) for s in range(15))
    assert len(backbone.calls) < 120
    until(lambda: all(policies.served(name).users == 0 for name in names))


def test_a_client_is_not_dragged_along_by_copies(policies):
    """The client holds the server, not tensors: state_dict is empty and the backbone stays out of it."""
    publish(policies, "a", schema_of())
    client = TenantPolicyClient(TenantInferenceServer(policies), "a", sample=True)
    assert client.state_dict() == {} and copy.copy(client).tenant == "a"


def test_the_configuration_refuses_impossible_bounds(compose):
    config = compose("+tenants=[toy]")
    config.queues.inference.max_batch_size, config.queues.inference.timeout_s = 0, -1.0
    with pytest.raises(ConfigError) as error:
        validate(config)
    for key in ("max_batch_size=0: must be at least 1", "timeout_s=-1.0: must be a number of seconds"):
        assert f"queues.inference.{key}" in str(error.value)
