"""Private adapters on a shared language model: exactness, isolation between tenants and threads, contract."""

import copy
import threading
from pathlib import Path

import pytest
import torch
import yaml

from models.backbones.qwen_vl import Qwen3VL
from models.backbones.smolvlm import SmolVLM2
from models.heads.adapter import AdapterHead
from models.heads.fast_tokens import FastTokensHead
from models.heads.flow_matching import FlowMatchingHead
from models.heads.mlp import ChunkMLPHead
from nexus_lightning.backbone import SharedBackbone
from nexus_lightning.checks import INSTRUCTIONS, check_head, random_observation
from nexus_lightning.config import OPTIMIZER_KEYS, ConfigError, validate
from nexus_lightning.head import ActionHead
from nexus_lightning.schema import TenantSchema
from tests.fakes import FakeBackbone

SCHEMA = TenantSchema(state_dim=4, action_dim=3, chunk=5, execute=2, cameras=("front",), image_size=64)
KINDS = ("layer_states", "tokens")
INNER = {
    "mlp": {"_target_": "models.heads.mlp.ChunkMLPHead", "hidden_dim": 32, "state_noise": 0.0},
    "flow": {"_target_": "models.heads.flow_matching.FlowMatchingHead", "size": "XS", "num_steps": 2},
    "tokens": {"_target_": "models.heads.fast_tokens.FastTokensHead", "bins": 8, "dim": 32, "depth": 1},
    "pooled": {"_target_": "tests.test_adapter_head.PooledHead"},
}


class PooledHead(ActionHead):
    """Reads ``pooled`` only; no RL."""

    reads = ("pooled",)

    def __init__(self, feature_spec, schema):
        super().__init__(feature_spec, schema)
        assert feature_spec.segments == ()
        self.linear = torch.nn.Linear(feature_spec.pooled_dim, schema.chunk * schema.action_dim)

    def chunk(self, features):
        return self.linear(features.pooled).unflatten(1, (self.schema.chunk, self.schema.action_dim))

    def loss(self, features, state, actions, is_pad):
        valid = ~is_pad.unsqueeze(-1)
        difference = torch.where(valid, self.chunk(features) - actions, 0.0)
        return {"loss": difference.square().sum() / (valid.sum() * actions.shape[-1]).clamp(min=1)}

    def act(self, features, state, noise=None):
        from tensordict import TensorDict

        return TensorDict({"chunk": self.chunk(features)}, [len(state)])


def new_qwen(**options):
    """Four layers; visual features enter the first two, so at most two can be adapted."""
    return Qwen3VL("tiny", **{"dtype": "fp32", "layers": [3, 2], "chat": False, **options})


def new_smol():
    return SmolVLM2("tiny", dtype="fp32", image_size=64, chat=False)


@pytest.fixture(scope="module")
def qwen():
    return new_qwen()


@pytest.fixture(scope="module")
def smol():
    return new_smol()


@pytest.fixture(scope="module", params=["qwen", "smol"])
def backbone(request):
    return request.getfixturevalue(request.param)


def encode(backbone, seed=0):
    observation = random_observation(SCHEMA, len(INSTRUCTIONS), seed)
    return backbone(observation, INSTRUCTIONS, SCHEMA, KINDS)


def build(backbone, inner="mlp", seed=0, **options):
    torch.manual_seed(seed)
    spec = backbone.feature_spec(SCHEMA, "layer_states")
    return AdapterHead(spec, SCHEMA, SharedBackbone(backbone), INNER[inner], **{"num_layers": 2, "rank": 4, **options})


def layer_states(backbone, features):
    return features.select(backbone.feature_spec(SCHEMA, "layer_states")).for_head()


def perturb(head, scale=0.05):
    """Adapters that do something."""
    with torch.no_grad():
        for adapter in head.adapters.values():
            adapter.up.add_(scale * torch.randn_like(adapter.up))


@pytest.mark.parametrize("num_layers", [1, 2])
def test_start_equals_the_frozen_model(backbone, num_layers):
    """With ``up`` at zero the inner head sees the backbone's own last hidden states."""
    features = encode(backbone)
    head = build(backbone, num_layers=num_layers)
    adapted = head.adapted(layer_states(backbone, features))
    torch.testing.assert_close(adapted.tokens["sequence"], features.tokens["sequence"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(adapted.pooled, features.pooled, atol=1e-5, rtol=1e-5)
    inner = ChunkMLPHead(backbone.feature_spec(SCHEMA, "tokens"), SCHEMA, hidden_dim=32, state_noise=0.0)
    inner.load_state_dict(
        {**head.inner.state_dict(), **{f"value_head.{k}": v for k, v in head.value_head.state_dict().items()}}
    )
    state = torch.randn(3, 4)
    expected = inner.act(features.select(backbone.feature_spec(SCHEMA, "tokens")), state)
    out = head.eval().act(layer_states(backbone, features), state)
    for key in ("chunk", "state_value"):
        torch.testing.assert_close(out[key], expected[key], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_adapters_equal_merged_weights(backbone, num_layers):
    """Reference: a second backbone with the same weights, then merged to ``W + alpha / rank * up @ down``."""
    head = build(backbone, num_layers=num_layers, rank=3, alpha=6.0)
    perturb(head)
    merged = {Qwen3VL: new_qwen, SmolVLM2: new_smol}[type(backbone)]()
    assert merged.fingerprint == backbone.fingerprint
    count = 0
    for index, layer in enumerate(merged.decoder_layers()[-num_layers:]):
        for part, names in (
            (layer.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj")),
            (layer.mlp, ("gate_proj", "up_proj", "down_proj")),
        ):
            for name in names:
                adapter = head.adapters[f"{index}_{'self_attn' if part is layer.self_attn else 'mlp'}_{name}"]
                getattr(part, name).weight.data += 2.0 * adapter.up.detach() @ adapter.down.detach()
                count += 1
    assert count == len(head.adapters) == 7 * num_layers
    expected = encode(merged).tokens["sequence"]
    features = encode(backbone)
    adapted = head.adapted(layer_states(backbone, features)).tokens["sequence"]
    torch.testing.assert_close(adapted, expected, atol=2e-5, rtol=1e-4)
    assert (adapted - features.tokens["sequence"]).abs().max() > 0.05


def test_bf16_backbone():
    backbone = new_qwen(dtype="bf16", layers=[2])
    features = encode(backbone)
    head = build(backbone)
    sequence = head.adapted(layer_states(backbone, features)).tokens["sequence"]
    assert sequence.dtype == torch.float32 and head.adapters["0_mlp_up_proj"].up.dtype == torch.float32
    # The same computation on the same rounded states.
    torch.testing.assert_close(sequence, features.tokens["sequence"].float(), atol=0.05, rtol=0.05)
    head.loss(layer_states(backbone, features), torch.randn(3, 4), torch.zeros(3, 5, 3), torch.zeros(3, 5).bool())[
        "loss"
    ].backward()
    assert all(adapter.up.grad.abs().sum() > 0 for adapter in head.adapters.values())


@pytest.mark.parametrize("inner", INNER)
def test_head_keeps_the_contract(qwen, inner):
    spec = qwen.feature_spec(SCHEMA, "layer_states")

    def factory(spec, schema):
        return AdapterHead(spec, schema, SharedBackbone(qwen), INNER[inner], rank=2)

    before = qwen.fingerprint
    check_head(factory, spec, SCHEMA, features=encode(qwen))
    if inner == "mlp":
        check_head(factory, spec, SCHEMA)  # random features, as the checker makes them
    assert qwen.fingerprint == before


def four_samples(backbone):
    """Short prompts without images: cheap training steps."""
    schema = TenantSchema(state_dim=4, action_dim=3, chunk=5, execute=2)
    features = backbone(random_observation(schema, 4), ["push", "pull", "lift", "stack"], schema, KINDS)
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(4, 4, generator=generator)
    actions = torch.rand(4, 5, 3, generator=generator) * 2 - 1
    return layer_states(backbone, features), state, actions, torch.zeros(4, 5, dtype=torch.bool)


def train(parameters, head, samples, steps, lr):
    optimizer = torch.optim.AdamW(parameters, lr)
    losses = []
    for _ in range(steps):
        loss = head.loss(*samples)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("inner", "steps"), [("mlp", 80), ("tokens", 60)])
def test_head_overfits_four_samples(smol, inner, steps):
    head = build(smol, inner, num_layers=1)
    losses = train(head.parameters(), head, four_samples(smol), steps, 1e-2)
    assert sum(losses[-5:]) / 5 < losses[0] / 10
    assert all(adapter.up.abs().max() > 1e-3 for adapter in head.adapters.values())


def test_adapters_alone_reduce_the_loss(smol):
    """The inner head stays as built, and it sees neither state nor tokens: what is learnt is in the adapters."""
    head = build(smol, "pooled", num_layers=1)
    losses = train(head.adapters.parameters(), head, four_samples(smol), 80, 2e-2)
    assert losses[-1] < losses[0] / 10


def test_gradients_reach_only_the_heads_own_parameters(backbone):
    features = layer_states(backbone, encode(backbone))
    head = build(backbone)
    perturb(head)
    actor = {name for name, _ in head.named_parameters() if not name.startswith("value_head.")}
    head.loss(features, torch.randn(3, 4), torch.randn(3, 5, 3), torch.zeros(3, 5, dtype=torch.bool))["loss"].backward()
    reached = {name for name, p in head.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert reached == actor - {"inner.log_std"}
    head.zero_grad(set_to_none=True)
    head.value(features, torch.randn(3, 4)).sum().backward()
    reached = {name for name, p in head.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert reached and all(name.startswith("value_head.") for name in reached)
    assert all(p.grad is None and not p.requires_grad for p in backbone.parameters())


def test_copies_share_the_backbone_and_nothing_else(backbone):
    head = build(backbone)
    features, state = layer_states(backbone, encode(backbone)), torch.randn(3, 4)
    frozen = {p.data_ptr() for p in backbone.parameters()}
    copied = copy.deepcopy(head).requires_grad_(False).eval()
    for each in (head, copied):
        # Layers 2 and 3: rank x (inputs + outputs) of seven projections; nothing of the layers themselves.
        assert sum(p.numel() for p in each.adapters.parameters()) == sum(
            4 * (linear.in_features + linear.out_features)
            for layer in backbone.decoder_layers()[2:]
            for linear in layer.modules()
            if isinstance(linear, torch.nn.Linear)
        )
        own = {p.data_ptr() for p in each.parameters()} | {v.data_ptr() for v in each.state_dict().values()}
        assert not own & frozen
        views = [p for layer in each.continuation.layers for p in layer.parameters()]
        assert sum(p.data_ptr() in frozen for p in views) == len(list(backbone.decoder_layers()[2:].parameters()))
        assert not any("frozen" in name for name in each.state_dict())
    assert not {p.data_ptr() for p in head.parameters()} & {p.data_ptr() for p in copied.parameters()}
    before = head.eval().act(features, state)["chunk"]
    perturb(copied, 0.2)
    with torch.no_grad():
        copied.value_head.mlp[-1].bias.add_(1.0)
    assert torch.equal(head.act(features, state)["chunk"], before)
    assert not torch.allclose(copied.act(features, state)["chunk"], before)
    # The critic of the copy is one module under both names.
    assert copied.inner.value_head is copied.value_head is not head.value_head
    assert len(list(copied.named_parameters())) == len(copied.state_dict())


def test_payload_round_trip(qwen, tmp_path):
    from safetensors.torch import load_file, save_file

    source, restored = build(qwen, "tokens", seed=1), build(qwen, "tokens", seed=2)
    perturb(source)
    save_file(source.state_dict(), tmp_path / "head.safetensors")
    restored.load_state_dict(load_file(tmp_path / "head.safetensors"), strict=True)
    features, state = layer_states(qwen, encode(qwen)), torch.randn(3, 4)
    noise = torch.randn(3, 5, 3)
    expected, out = (head.eval().act(features, state, noise) for head in (source, restored))
    for key in ("chunk", "log_probs", "state_value"):
        assert torch.equal(out[key], expected[key])


def test_tenants_and_threads_do_not_meet(qwen):
    """Two tenants and the shared backbone at once, many times: the same bits as one after the other."""
    heads = [build(qwen, seed=seed).eval() for seed in (1, 2)]
    for head in heads:
        perturb(head)
    features = encode(qwen)
    states = layer_states(qwen, features)
    mask, positions = states.mask["layers"], states.tokens["positions"]
    entering = states.tokens["layers"].unflatten(-1, (2, -1))[:, :, 1]  # layers=[3, 2]
    tasks = [lambda head=head: head.adapted(states).tokens["sequence"] for head in heads]
    tasks.append(lambda: qwen.run_layers(2, entering, mask, positions))
    with torch.no_grad():
        expected = [task() for task in tasks]
    assert all(not torch.allclose(a, b) for a, b in ((expected[0], expected[1]), (expected[0], expected[2])))
    wrong = []

    def repeat(task, reference):
        for step in range(15):
            with torch.set_grad_enabled(step % 2 == 0):
                if not torch.equal(task(), reference):
                    wrong.append(step)

    threads = [threading.Thread(target=repeat, args=pair) for pair in zip(tasks, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_views_follow_the_backbone_to_another_dtype():
    backbone = new_smol()
    head = build(backbone)
    features = layer_states(backbone, encode(backbone))
    before = head.adapted(features).tokens["sequence"]
    backbone.double()
    after = head.adapted(features).tokens["sequence"]
    assert {p.dtype for p in head.continuation.layers[0].parameters()} == {torch.float32, torch.float64}
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, "num_layers=0.*choose 1 to 2"),
        ({"num_layers": 3}, "num_layers=3.*from layer 2 on; choose 1 to 2"),
        ({"rank": 0}, "rank=0"),
        ({"alpha": -1.0}, "alpha=-1.0"),
    ],
)
def test_bad_options_are_refused(qwen, options, message):
    with pytest.raises(ValueError, match=message):
        build(qwen, **options)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ({"hidden_dim": 3}, "must be a mapping with `_target_`"),
        ({"_target_": "torch.nn.Linear"}, r"torch\.nn\.Linear: must be an ActionHead"),
        ({"_target_": "models.heads.adapter.AdapterHead"}, "does not continue the backbone"),
    ],
)
def test_bad_inner_heads_are_refused(qwen, inner, message):
    spec = qwen.feature_spec(SCHEMA, "layer_states")
    with pytest.raises(ValueError, match=message):
        AdapterHead(spec, SCHEMA, SharedBackbone(qwen), inner)


def test_unfit_backbones_are_refused(qwen):
    only_last = new_qwen(layers=[3])
    with pytest.raises(ValueError, match=r"layer 2, the backbone gives those of \[3\]; set backbone.layers=\[2\]"):
        build(only_last)
    build(only_last, num_layers=1)
    spec = qwen.feature_spec(SCHEMA, "layer_states")
    with pytest.raises(ValueError, match="FakeBackbone has no decoder_layers"):
        AdapterHead(spec, SCHEMA, SharedBackbone(FakeBackbone()), INNER["mlp"])


def test_rl_depends_on_the_inner_head(qwen):
    assert AdapterHead.rl_problem({"inner": INNER["mlp"]}) is None
    assert "must be a mapping" in AdapterHead.rl_problem({})
    assert "models.nowhere" in AdapterHead.rl_problem({"inner": {"_target_": "models.nowhere.Head"}})
    assert "PooledHead has no log-probabilities" in AdapterHead.rl_problem({"inner": INNER["pooled"]})
    assert "use tokenizer=binning" in AdapterHead.rl_problem({"inner": {**INNER["tokens"], "tokenizer": "dct"}})
    assert build(qwen, "mlp").supports_rl and not build(qwen, "pooled").supports_rl
    assert {ChunkMLPHead, FlowMatchingHead, FastTokensHead} == {
        type(build(qwen, k).inner) for k in ("mlp", "flow", "tokens")
    }


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (
            {"_target_": "models.heads.fast_tokens.FastTokensHead", "tokenizer": "dct"},
            "head=FastTokensHead: cannot train by rl: tokenizer=dct",
        ),
        (
            {"_target_": "models.heads.adapter.AdapterHead", "inner": {**INNER["tokens"], "tokenizer": "dct"}},
            "head=AdapterHead: cannot train by rl: tokenizer=dct",
        ),
    ],
)
def test_config_refuses_rl_without_log_probs(compose, head, expected):
    config = compose("+tenants=[toy]")
    config.tenants["toy"].head = {**head, "lr": 1e-3}
    with pytest.raises(ConfigError, match=expected):
        validate(config)


def test_config_file_builds_the_head(qwen):
    path = Path(__file__).parents[1] / "conf" / "head" / "adapter.yaml"
    config = yaml.safe_load(path.read_text())
    assert config.keys() >= set(OPTIMIZER_KEYS)
    assert config["_target_"] == "models.heads.adapter.AdapterHead"
    arguments = {key: value for key, value in config.items() if key not in {*OPTIMIZER_KEYS, "_target_"}}
    AdapterHead(qwen.feature_spec(SCHEMA, "layer_states"), SCHEMA, SharedBackbone(qwen), **arguments)
