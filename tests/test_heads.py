"""The heads on synthetic features: contract, learning, payload, padding (CASES B1, B2, B5)."""

import copy
import random
from pathlib import Path

import pytest
import torch
import yaml
from tensordict import TensorDict
from torch import nn

from models.heads.flow_matching import FlowMatchingHead
from models.heads.mlp import LOG_STD_RANGE, ChunkMLPHead
from nexus_lightning.backbone import FeatureSegment, FeatureSpec
from nexus_lightning.checks import check_head, example_spec, random_features
from nexus_lightning.config import OPTIMIZER_KEYS
from nexus_lightning.head import ActionHead, choose_kind
from nexus_lightning.schema import TenantSchema
from tests.example_head import LinearChunkHead

SCHEMA = TenantSchema(state_dim=4, action_dim=3, chunk=5, execute=2, cameras=("front", "wrist"))
NO_CAMERAS = TenantSchema(state_dim=6, action_dim=2, chunk=1, execute=1, gripper="none")
HEADS = {
    "mlp": ChunkMLPHead,
    "mlp_tanh_l2": lambda spec, schema: ChunkMLPHead(spec, schema, activation="tanh", loss="l2", num_layers=1),
    "mlp_state_only": lambda spec, schema: ChunkMLPHead(spec, schema, use_features=False),
    "flow_xs": lambda spec, schema: FlowMatchingHead(spec, schema, size="XS", num_steps=3),
    "flow_pooled": lambda spec, schema: FlowMatchingHead(spec, schema, size="XS", num_steps=2, pool_grid=3),
    "example": LinearChunkHead,
}


@pytest.mark.parametrize("schema", [SCHEMA, NO_CAMERAS], ids=["cameras", "no_cameras"])
@pytest.mark.parametrize("name", HEADS)
def test_head_keeps_the_contract(name, schema):
    check_head(HEADS[name], example_spec(schema), schema)


def test_the_checker_also_takes_an_instance():
    head = LinearChunkHead(example_spec(SCHEMA), SCHEMA)
    before = copy.deepcopy(head.state_dict())
    check_head(head)
    assert all(torch.equal(before[name], value) for name, value in head.state_dict().items())


@pytest.mark.parametrize(("name", "steps", "lr"), [("mlp", 200, 2e-3), ("mlp_tanh_l2", 200, 2e-3)])
def test_head_overfits_four_samples(name, steps, lr):
    torch.manual_seed(0)
    spec = example_spec(SCHEMA)
    features, state = random_features(spec, 4), torch.randn(4, 4)
    actions, is_pad = torch.rand(4, 5, 3) * 2 - 1, torch.zeros(4, 5, dtype=torch.bool)
    head = HEADS[name](spec, SCHEMA)
    optimizer = torch.optim.AdamW(head.parameters(), lr)
    losses = []
    for _ in range(steps):
        loss = head.loss(features, state, actions, is_pad)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-20:]) / 20 < losses[0] / 10


@pytest.mark.parametrize("name", ["mlp", "flow_xs", "example"])
def test_payload_round_trip(name, tmp_path):
    from safetensors.torch import load_file, save_file

    spec = example_spec(SCHEMA)
    source, restored = HEADS[name](spec, SCHEMA), HEADS[name](spec, SCHEMA)
    save_file(source.state_dict(), tmp_path / "head.safetensors")
    restored.load_state_dict(load_file(tmp_path / "head.safetensors"), strict=True)
    features, state = random_features(spec, 3), torch.randn(3, 4)
    expected = source.eval().act(features, state)["chunk"]
    assert torch.equal(restored.eval().act(features, state)["chunk"], expected)


@pytest.mark.parametrize("name", ["mlp", "flow_xs"])
def test_padded_steps_may_hold_anything(name):
    """Even NaN in padded steps leaves loss and gradients finite."""
    spec = example_spec(SCHEMA)
    head = HEADS[name](spec, SCHEMA)
    is_pad = torch.zeros(3, 5, dtype=torch.bool)
    is_pad[1, 2:] = True
    actions = torch.where(is_pad.unsqueeze(-1), torch.nan, torch.zeros(3, 5, 3))
    losses = head.loss(random_features(spec, 3), torch.randn(3, 4), actions, is_pad)
    losses["loss"].backward()
    assert all(value.isfinite() for value in losses.values())
    assert all(p.grad.isfinite().all() for p in head.parameters() if p.grad is not None)


def test_loss_is_the_mean_over_valid_elements():
    spec = example_spec(SCHEMA)
    head = ChunkMLPHead(spec, SCHEMA, loss="l1", state_noise=0.0)
    features, state, actions = random_features(spec, 4), torch.randn(4, 4), torch.randn(4, 5, 3)
    is_pad = torch.zeros(4, 5, dtype=torch.bool)
    is_pad[2:] = True
    padded = head.loss(features, state, actions, is_pad)["loss"]
    alone = head.loss(features[:2], state[:2], actions[:2], is_pad[:2])["loss"]
    torch.testing.assert_close(padded, alone)


def test_state_noise_only_in_training_loss():
    spec = example_spec(SCHEMA)
    head = ChunkMLPHead(spec, SCHEMA, state_noise=0.5)
    inputs = (random_features(spec, 4), torch.randn(4, 4), torch.randn(4, 5, 3), torch.zeros(4, 5, dtype=torch.bool))
    assert head.loss(*inputs)["loss"] != head.loss(*inputs)["loss"]
    head.eval()
    assert head.loss(*inputs)["loss"] == head.loss(*inputs)["loss"]


def test_gaussian_stays_finite_at_a_tiny_standard_deviation():
    spec = example_spec(SCHEMA)
    head = ChunkMLPHead(spec, SCHEMA)
    nn.init.constant_(head.log_std, -50.0)
    out = head.act(random_features(spec, 2), torch.randn(2, 4))
    assert (out["log_probs"] > 0).all() and out["log_probs"].isfinite().all()
    assert head.get_dist(random_features(spec, 2), torch.randn(2, 4)).scale.log().min() >= LOG_STD_RANGE[0] - 1e-5


def test_keypoints_find_a_bright_cell():
    spec = FeatureSpec("tokens", (FeatureSegment("image_front", 1, (5, 5)),), 1)
    head = ChunkMLPHead(spec, SCHEMA, num_keypoints=1)
    pool = head.actor.pools["image_front"]
    nn.init.constant_(pool.to_maps.weight, 10.0)
    tokens = torch.zeros(1, 25, 1)
    tokens[0, 5 * 4 + 1] = 1.0
    row, col, _ = pool(tokens, torch.ones(1, 25, dtype=torch.bool))[0]
    torch.testing.assert_close(torch.stack([row, col]), torch.tensor([1.0, -0.5]), atol=1e-3, rtol=0)


def test_flow_starts_from_the_given_noise():
    spec = example_spec(SCHEMA)
    head = FlowMatchingHead(spec, SCHEMA, size="XS").eval()
    features, state = random_features(spec, 2), torch.randn(2, 4)
    noise = torch.zeros(2, *head.noise_shape)
    noise[:, 0] = torch.randn(2, 5, 3)
    # The zero-initialised output layer gives velocity 0: only the drift of the stochastic steps, -a^2 x / 2, is left.
    shrunk = noise[:, 0] * (1 - head.sde_noise**2 / 2 / head.num_steps) ** head.num_steps
    torch.testing.assert_close(head.act(features, state, noise)["chunk"], shrunk)
    assert torch.equal(head.act(features, state)["chunk"], torch.zeros(2, 5, 3))


def test_flow_pools_grids():
    spec = FeatureSpec("tokens", (FeatureSegment("image_front", 6, (16, 16)),), 6)
    head = FlowMatchingHead(spec, SCHEMA, size="XS", pool_grid=8)
    context, mask = head.network.read(random_features(spec, 2))
    assert context.shape == (2, 1 + 64, 64) and mask.all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda spec: ChunkMLPHead(spec, SCHEMA, loss="huber"), "loss='huber'.*smooth_l1"),
        (lambda spec: ChunkMLPHead(spec, SCHEMA, activation="gelu"), "activation='gelu'.*silu"),
        (lambda spec: ChunkMLPHead(spec, SCHEMA, log_std_init=3.0), "log_std_init=3.0"),
        (lambda spec: FlowMatchingHead(spec, SCHEMA, size="XXL"), "size='XXL'.*XS"),
        (lambda spec: FlowMatchingHead(spec, SCHEMA, num_steps=0), "num_steps=0"),
    ],
)
def test_bad_options_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build(example_spec(SCHEMA))


def test_a_head_refuses_a_feature_kind_it_cannot_read():
    with pytest.raises(ValueError, match="ChunkMLPHead reads action_tokens, tokens, pooled; the backbone gives 'kv'"):
        ChunkMLPHead(FeatureSpec("kv", (), 4), SCHEMA)


def test_bad_subclasses_are_refused_when_defined():
    def act(self, features, state, noise=None): ...

    def value(self, features, state): ...

    with pytest.raises(TypeError, match="NoAct must override act"):
        type("NoAct", (ActionHead,), {"loss": act})
    with pytest.raises(TypeError, match="overrides value alone"):
        type("HalfRL", (ActionHead,), {"loss": act, "act": act, "value": value, "supports_rl": True})
    with pytest.raises(TypeError, match="supports_rl = True"):
        type("Undeclared", (ActionHead,), {"loss": act, "act": act, "value": value, "get_dist": act})
    with pytest.raises(TypeError, match="choose from pooled, tokens"):
        type("Odd", (ActionHead,), {"loss": act, "act": act, "reads": ("logits",)})


def test_the_first_common_kind_is_chosen_unless_the_user_names_one():
    assert choose_kind(("action_tokens", "tokens"), ("tokens", "kv", "action_tokens")) == "action_tokens"
    assert choose_kind(("action_tokens", "tokens"), ("tokens", "kv", "action_tokens"), "tokens") == "tokens"
    with pytest.raises(ValueError, match="nothing in common"):
        choose_kind(("kv",), ("tokens", "pooled"))
    with pytest.raises(ValueError, match="kind='kv': the head reads tokens, the backbone gives tokens, kv"):
        choose_kind(("tokens",), ("tokens", "kv"), "kv")


class _IgnoresPadding(LinearChunkHead):
    def loss(self, features, state, actions, is_pad):
        return super().loss(features, state, actions, torch.zeros_like(is_pad))


class _DrawsInAct(LinearChunkHead):
    def act(self, features, state, noise=None):
        return TensorDict({"chunk": torch.randn(len(state), 5, 3)}, batch_size=[len(state)])


class _DrawsFromPython(LinearChunkHead):
    def act(self, features, state, noise=None):
        random.random()
        return super().act(features, state, noise)


class _BatchNorm(LinearChunkHead):
    def chunk(self, features, state):
        return super().chunk(features, state) - state.mean()


class _IgnoresMask(LinearChunkHead):
    def chunk(self, features, state):
        return super().chunk(features, state) + features.tokens["text"].mean()


class _HiddenState(LinearChunkHead):
    def __init__(self, feature_spec, schema):
        super().__init__(feature_spec, schema)
        self.offset = torch.randn(())

    def chunk(self, features, state):
        return super().chunk(features, state) + self.offset


class _WrongShape(LinearChunkHead):
    def act(self, features, state, noise=None):
        return TensorDict({"chunk": super().act(features, state)["chunk"].flatten(1)}, batch_size=[len(state)])


class _SharedCritic(ChunkMLPHead):
    def value(self, features, state):
        return self._chunk(features, state).mean((1, 2)).unsqueeze(-1) + self.value_head(features, state)


class _OtherLogProbs(ChunkMLPHead):
    def act(self, features, state, noise=None):
        out = super().act(features, state, noise)
        return out.set("log_probs", out["log_probs"] + 1)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (_IgnoresPadding, "padded steps"),
        (_DrawsInAct, "global torch generator"),
        (_DrawsFromPython, "global random generator"),
        (_BatchNorm, "batch mates"),
        (_IgnoresMask, "padding tokens change chunk"),
        (_HiddenState, "state_dict does not restore"),
        (_WrongShape, r"chunk must be \[4, 5, 3\], got \[4, 15\]"),
        (_SharedCritic, "keep actor and critic"),
        (_OtherLogProbs, "log_probs differ"),
    ],
)
def test_the_checker_names_the_broken_rule(head, message):
    with pytest.raises(ValueError, match=message):
        check_head(head, example_spec(SCHEMA), SCHEMA)


@pytest.mark.parametrize(("name", "head"), [("mlp", ChunkMLPHead), ("flow_matching", FlowMatchingHead)])
def test_config_file_builds_the_head(name, head):
    path = Path(__file__).parents[1] / "conf" / "head" / f"{name}.yaml"
    config = yaml.safe_load(path.read_text())
    assert config.keys() >= set(OPTIMIZER_KEYS)
    assert config["_target_"] == f"{head.__module__}.{head.__name__}"
    arguments = {key: value for key, value in config.items() if key not in {*OPTIMIZER_KEYS, "_target_"}}
    head(example_spec(SCHEMA), SCHEMA, **arguments)


class _SharpLikelihood(ChunkMLPHead):
    """Claims the fourth power of the density: act and evaluate agree with each other, not with the samples."""

    def act(self, features, state, noise=None):
        out = super().act(features, state, noise)
        return out.set("log_probs", out["log_probs"] * 4)

    def evaluate(self, features, state, sample):
        log_probs, entropy = super().evaluate(features, state, sample)
        return log_probs * 4, entropy


def test_the_checker_samples_to_find_a_wrong_likelihood():
    with pytest.raises(ValueError, match=r"the mean of p_new / p_old is .* and must be 1"):
        check_head(_SharpLikelihood, example_spec(SCHEMA), SCHEMA)
