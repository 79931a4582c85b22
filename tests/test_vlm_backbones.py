"""VLM backbones on tiny checkpoints of the real architectures, against the library's own forward (CASES B1, B7, S8)."""

import inspect
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from hydra.utils import get_class
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from transformers import AutoModelForImageTextToText, DynamicCache

from models.backbones import tiny
from models.backbones.paligemma import PaliGemma
from models.backbones.qwen_vl import Qwen3VL, Qwen25VL
from models.backbones.sizes import PUBLISHED, checkpoint_config
from models.backbones.smolvlm import SmolVLM2
from nexus_lightning.checks import INSTRUCTIONS, check_backbone, random_observation
from nexus_lightning.schema import TenantSchema

ONE = TenantSchema(state_dim=4, action_dim=3, chunk=3, execute=2, cameras=("front",), image_size=64)
TWO = replace(ONE, cameras=("wrist", "front"))
NONE = replace(ONE, cameras=())
CLASSES = {"qwen3_vl": Qwen3VL, "qwen2_5_vl": Qwen25VL, "smolvlm": SmolVLM2, "paligemma": PaliGemma}
CONFIGS = Path(__file__).parents[1] / "conf" / "backbone"
SHORT, LONG = "go", "go and then pick up the red cube, slowly, and put it into the basket on the left"


def build(name, **options):
    options = {"dtype": "fp32", "chat": name != "paligemma", **options}
    return CLASSES[name]("tiny", **options)


@pytest.fixture(scope="module")
def backbones():
    return {name: build(name) for name in CLASSES}


@pytest.fixture(params=CLASSES)
def name(request):
    return request.param


@pytest.fixture
def backbone(backbones, name):
    return backbones[name]


def shared(backbone):
    """The kinds that may come from one pass."""
    return tuple(kind for kind in backbone.kinds if kind != "action_tokens")


def library_forward(backbone, inputs):
    """Hidden states entering the layers, last hidden state and cache from the model's own ``forward``."""
    arguments = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"].long()}
    if "pixel_values" in inputs.keys():
        flat = isinstance(backbone, (Qwen3VL, Qwen25VL, PaliGemma))
        arguments["pixel_values"] = inputs["pixel_values"].flatten(0, 1) if flat else inputs["pixel_values"]
    if "image_grid_thw" in inputs.keys():
        arguments["image_grid_thw"] = inputs["image_grid_thw"].flatten(0, 1)
        arguments["mm_token_type_ids"] = (inputs["input_ids"] == backbone.image_token_id).long()
    if isinstance(backbone, PaliGemma):
        arguments["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        arguments["position_ids"] = inputs["position_ids"][..., 0]
    entering = []
    hooks = [
        layer.register_forward_pre_hook(lambda module, args: entering.append(args[0]))
        for layer in backbone.decoder_layers()
    ]
    cache = DynamicCache()
    with torch.no_grad():
        last = backbone.model(**arguments, past_key_values=cache, use_cache=True).last_hidden_state
    for hook in hooks:
        hook.remove()
    return entering, last, cache


@pytest.mark.parametrize("schema", [TWO, NONE], ids=["two_cameras", "no_cameras"])
def test_backbone_keeps_the_contract(backbone, name, schema):
    if schema is NONE and name in ("qwen2_5_vl", "smolvlm"):
        pytest.skip("the path without cameras is the same for all; two architectures suffice")
    check_backbone(backbone, schema, tolerance=2e-5)


@pytest.mark.parametrize("cameras", [TWO, NONE], ids=["two_cameras", "no_cameras"])
def test_features_equal_the_librarys_own_forward(backbone, cameras):
    inputs = backbone.preprocess(random_observation(cameras, 1), [LONG], cameras)
    kinds = shared(backbone)
    feature = backbone.encode(inputs, kinds)
    entering, last, cache = library_forward(backbone, inputs)
    torch.testing.assert_close(feature.tokens["sequence"], last, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(feature.pooled, last.mean(1), atol=1e-5, rtol=1e-5)
    states = backbone.feature_spec(cameras, "layer_states").segments[0].unflatten(feature.tokens["layers"])
    torch.testing.assert_close(states, torch.stack(entering, 2), atol=1e-5, rtol=1e-5)
    kv = backbone.feature_spec(cameras, "kv").segments[0].unflatten(feature.tokens["kv"])
    assert kv.shape[2] == len(cache.layers)
    for index, layer in enumerate(cache.layers):
        torch.testing.assert_close(kv[:, :, index, 0], layer.keys.transpose(1, 2), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(kv[:, :, index, 1], layer.values.transpose(1, 2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_alone_equals_batched_with_a_long_prompt(backbones, name, side):
    backbone = build(name, padding_side=side)
    assert backbone.fingerprint == backbones[name].fingerprint
    observation = random_observation(ONE, 2)
    assert len(LONG) >= 3 * len(SHORT)
    for kinds in (shared(backbone), ("action_tokens",)):
        if not set(kinds) <= set(backbone.kinds):
            continue
        alone = backbone(observation[:1], [SHORT], ONE, kinds)
        both = backbone(observation, [SHORT, LONG], ONE, kinds)
        torch.testing.assert_close(both.pooled[:1], alone.pooled, atol=2e-5, rtol=0)
        for segment in alone.tokens.keys():
            padded = both.mask[segment][0]
            if segment != "action":
                assert not padded.all() and bool(padded[0]) == (side == "right")
                assert both.tokens[segment][0][~padded].abs().max() == 0
            torch.testing.assert_close(both.tokens[segment][0][padded], alone.tokens[segment][0], atol=2e-5, rtol=0)


def test_run_layers_continues_to_the_last_hidden_state(backbone):
    feature = backbone(random_observation(TWO, 3), INSTRUCTIONS, TWO, shared(backbone)).for_head()
    states = backbone.feature_spec(TWO, "layer_states").segments[0].unflatten(feature.tokens["layers"])
    mask, positions = feature.mask["layers"], feature.tokens["positions"]
    count = len(backbone.decoder_layers())
    for start in range(backbone.first_plain_layer, count):
        hidden = states[:, :, start].clone().requires_grad_()
        out = backbone.run_layers(start, hidden, mask, positions)
        torch.testing.assert_close(out[mask], feature.tokens["sequence"][mask], atol=2e-5, rtol=1e-5)
    out[mask].sum().backward()
    assert hidden.grad.abs().sum() > 0
    assert all(p.grad is None for p in backbone.parameters())
    assert torch.equal(
        backbone.run_layers(count, hidden, mask, positions), backbone.final_norm(hidden.to(backbone.dtype))
    )
    replaced = [lambda hidden, **arguments: hidden] * (count - start)
    assert torch.equal(
        backbone.run_layers(start, hidden, mask, positions, layers=replaced), backbone.final_norm(hidden)
    )
    with pytest.raises(ValueError, match="2 callables for the 1 layers"):
        backbone.run_layers(count - 1, hidden, mask, positions, layers=replaced * 2)
    with pytest.raises(ValueError, match=f"start={count + 1}"):
        backbone.run_layers(count + 1, hidden, mask, positions)
    if backbone.position_dim == 1:
        torch.testing.assert_close(backbone.run_layers(count - 1, hidden, mask)[mask], out[mask], atol=2e-5, rtol=1e-5)
    else:
        with pytest.raises(ValueError, match="needs the segment 'positions'"):
            backbone.run_layers(count - 1, hidden, mask)


def test_qwen3_refuses_to_continue_before_its_visual_additions(backbones):
    backbone = backbones["qwen3_vl"]
    assert backbone.first_plain_layer == 2
    hidden, mask = torch.zeros(1, 4, 128), torch.ones(1, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"start=1: Qwen3VL can be continued from layer 2"):
        backbone.run_layers(1, hidden, mask, torch.zeros(1, 4, 3))


def test_chosen_layers_only(backbones, name):
    backbone = build(name, layers=[3, 1])
    observation = random_observation(ONE, 1)
    chosen = backbone(observation, [SHORT], ONE, ("layer_states",)).tokens["layers"]
    assert backbone.feature_spec(ONE, "layer_states").segments[0].layout == (2, 128)
    every = backbones[name](observation, [SHORT], ONE, ("layer_states",)).tokens["layers"].unflatten(-1, (4, 128))
    assert torch.equal(chosen.unflatten(-1, (2, 128)), every[:, :, [3, 1]])


def test_num_layers_cuts_the_stack_before_the_final_norm(backbones, name):
    full, cut = backbones[name], build(name, num_layers=2)
    observation = random_observation(ONE, 1)
    every = full(observation, [SHORT], ONE, ("layer_states", "kv")).tokens
    feature = cut(observation, [SHORT], ONE, ("tokens", "kv"))
    states = every["layers"].unflatten(-1, (4, 128))
    expected = full.final_norm(states[:, :, 2])
    torch.testing.assert_close(feature.tokens["sequence"], expected, atol=1e-5, rtol=1e-5)
    dim = cut.feature_spec(ONE, "kv").segments[0].dim
    assert torch.equal(feature.tokens["kv"], every["kv"][..., :dim])
    assert cut.memory()["parameters"] < full.memory()["parameters"]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "smolvlm"])
def test_action_tokens_end_every_prompt(name, side):
    backbone = build(name, padding_side=side)
    observation = random_observation(ONE, 2)
    plain = backbone.preprocess(observation, [SHORT, LONG], ONE)
    inputs = backbone.preprocess(observation, [SHORT, LONG], ONE, ("action_tokens", "tokens"))
    token = backbone.processor.tokenizer.convert_tokens_to_ids(backbone.action_token)
    feature = backbone.encode(inputs, ("action_tokens", "tokens"))
    for row in range(2):
        ids = inputs["input_ids"][row][inputs["attention_mask"][row]].tolist()
        assert ids == plain["input_ids"][row][plain["attention_mask"][row]].tolist() + [token] * 3
        positions = inputs["position_ids"][row][inputs["attention_mask"][row]]
        assert (positions[-3:] - positions[-4]).tolist() == [[k] * backbone.position_dim for k in (1, 2, 3)]
        valid = feature.tokens["sequence"][row][feature.mask["sequence"][row]]
        assert torch.equal(feature.tokens["action"][row], valid[-3:])
    if side == "left":
        assert inputs["action_mask"][:, -3:].all()
    # Causal: what comes before does not see them.
    before = backbone.encode(plain).tokens["sequence"][1]
    after = feature.tokens["sequence"][1]
    span = slice(0, -3)
    torch.testing.assert_close(after[span], before, atol=2e-5, rtol=0)
    assert not torch.equal(feature.tokens["action"][0, 0], feature.tokens["action"][0, 1])


def test_action_tokens_must_be_in_the_prompt(backbones):
    backbone = backbones["qwen3_vl"]
    inputs = backbone.preprocess(random_observation(NONE, 1), [SHORT], NONE)
    with pytest.raises(ValueError, match="pass the same kinds to preprocess"):
        backbone.encode(inputs, ("action_tokens",))
    with pytest.raises(ValueError, match="kind='action_tokens': PaliGemma gives tokens, pooled, layer_states, kv"):
        backbones["paligemma"].feature_spec(ONE, "action_tokens")


def test_order_number_and_content_of_images_matter(backbone):
    observation = random_observation(TWO, 1)
    pooled = backbone(observation, [SHORT], TWO).pooled
    swapped = backbone(observation, [SHORT], replace(TWO, cameras=("front", "wrist"))).pooled
    front = TensorDict({"image": observation["image"].select("front")}, batch_size=[1])
    single = backbone(front, [SHORT], ONE)
    other = backbone(random_observation(TWO, 1, seed=1), [SHORT], TWO).pooled
    values = [pooled, swapped, single.pooled, other, backbone(random_observation(NONE, 1), [SHORT], NONE).pooled]
    for index, value in enumerate(values):
        assert all((value - later).abs().max() > 1e-3 for later in values[index + 1 :])
    assert single.mask["sequence"].sum() < backbone(observation, [SHORT], TWO).mask["sequence"].sum()


def test_every_instruction_and_the_schemas_prompt_reach_the_model(backbone):
    pooled = backbone(random_observation(ONE, 1).expand(2), ["open", "shut"], ONE).pooled
    assert (pooled[0] - pooled[1]).abs().max() > 1e-3
    prompted = replace(ONE, prompt="What to do to {instruction}?")
    ids = backbone.preprocess(random_observation(ONE, 1), ["open"], prompted)["input_ids"][0]
    assert "What to do to open?" in backbone.processor.tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("name", "given", "size"),
    [("qwen3_vl", 128, 64), ("qwen3_vl", 64, 96), ("qwen2_5_vl", 64, 56), ("smolvlm", 64, 32), ("paligemma", 100, 64)],
)
def test_images_are_resized_once(name, given, size, monkeypatch):
    """With image_size the processor gets the final size, so the patches are those of the resized image."""
    from torchvision.transforms.v2 import functional

    backbone = build(name, image_size=size)
    schema = replace(ONE, image_size=given)
    observation = random_observation(schema, 1)
    resized = []
    original = functional.resize
    monkeypatch.setattr(functional, "resize", lambda *a, **k: resized.append(original(*a, **k)) or resized[-1])
    inputs = backbone.preprocess(observation, [SHORT], schema)
    assert [tuple(image.shape) for image in resized] == [(1, 3, size, size)]
    expected = resized[0].float() / 255
    mean = torch.tensor(backbone.processor.image_processor.image_mean).view(1, 3, 1, 1)
    std = torch.tensor(backbone.processor.image_processor.image_std).view(1, 3, 1, 1)
    expected = (expected - mean) / std
    pixels = inputs["pixel_values"]
    if name.startswith("qwen"):
        patch = backbone.model.config.vision_config.patch_size
        side = size // patch
        assert inputs["image_grid_thw"].tolist() == [[[1, side, side]]]
        # Patches come grouped in 2 x 2 cells: [cell rows, cell cols, 2, 2, channel, time, patch, patch].
        cells = pixels[0].view(side // 2, side // 2, 2, 2, 3, 2, patch, patch)[:, :, :, :, :, 0]
        pixels = cells.permute(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, size, size)
    torch.testing.assert_close(pixels.reshape(1, 3, size, size), expected, atol=1e-5, rtol=1e-5)
    assert backbone.encode(inputs).tokens["sequence"].isfinite().all()


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "smolvlm"])
def test_without_image_size_the_processors_own_rule_holds(backbones, name):
    schema = replace(ONE, image_size=72)
    inputs = backbones[name].preprocess(random_observation(schema, 1), [SHORT], schema)
    images = (inputs["input_ids"] == backbones[name].image_token_id).sum()
    assert images == {"qwen3_vl": 4, "qwen2_5_vl": 9, "smolvlm": 16}[name]


def test_too_long_or_misleading_instructions_are_refused(backbone):
    with pytest.raises(ValueError, match=r"instruction of 400 tokens exceeds .*limit of 256 \(max_text_tokens\)"):
        backbone.preprocess(random_observation(ONE, 1), ["a" * 400], ONE)
    placeholder = backbone.processor.tokenizer.convert_ids_to_tokens(backbone.image_token_id)
    with pytest.raises(ValueError, match="must not hold the model's image placeholder"):
        backbone.preprocess(random_observation(ONE, 1), [f"push {placeholder}"], ONE)


def test_two_threads_give_the_same_as_alone(backbone):
    kinds = shared(backbone)
    calls = [(random_observation(ONE, 1), [LONG], ONE), (random_observation(TWO, 2), [SHORT, LONG], TWO)]
    expected = [backbone(*call, kinds) for call in calls]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda call: backbone(*call, kinds), calls * 4))
    for index, feature in enumerate(found):
        assert torch.equal(feature.pooled, expected[index % 2].pooled)
        for segment, value in feature.tokens.items():
            assert torch.equal(value, expected[index % 2].tokens[segment])


def test_features_carry_no_gradient_and_can_train_a_head(backbone):
    with torch.inference_mode():
        feature = backbone(random_observation(ONE, 1), [SHORT], ONE, shared(backbone))
    weight = torch.ones(128, requires_grad=True)
    (feature.tokens["sequence"] * weight).sum().backward()
    assert weight.grad is not None and not any(p.requires_grad for p in backbone.parameters())


def test_bf16_stays_near_fp32(backbones, name):
    backbone = build(name, dtype="bf16")
    observation = random_observation(ONE, 2)
    half, full = (b(observation, [SHORT, LONG], ONE, shared(b)) for b in (backbone, backbones[name]))
    assert half.tokens["sequence"].dtype == half.pooled.dtype == torch.bfloat16
    assert half.tokens["positions"].dtype == torch.float32
    assert torch.equal(half.tokens["positions"], full.tokens["positions"])
    error = (half.tokens["sequence"].float() - full.tokens["sequence"])[full.mask["sequence"]].norm()
    assert error < 0.05 * full.tokens["sequence"].norm()
    assert backbone.memory()["bytes"] == 2 * backbone.memory()["parameters"] == backbones[name].memory()["bytes"] // 2


def test_fingerprint_tells_configurations_apart(backbones):
    same = build("qwen3_vl", padding_side="left", max_text_tokens=9)
    assert same.fingerprint == backbones["qwen3_vl"].fingerprint
    options = [{}, {"dtype": "bf16"}, {"num_layers": 3}, {"image_size": 64}, {"chat": False}]
    prints = [build("qwen3_vl", **option).fingerprint for option in options]
    with torch.no_grad():
        next(same.parameters()).view(-1)[0] += 1e-3
    assert len({*prints, same.fingerprint}) == len(options) + 1


def test_tiny_is_small_seeded_and_says_what_it_is_for(backbones, name):
    state = torch.get_rng_state()
    again, other = build(name), build(name, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert again.fingerprint == backbones[name].fingerprint != other.fingerprint
    assert 1e6 < again.memory()["parameters"] < 4e6
    assert "plumbing tests only" in again.banner


#: Weight names of the published checkpoints where they are older than the library's present ones.
PUBLISHED_NAMES = {
    "qwen3_vl": lambda key: key,
    "qwen2_5_vl": lambda key: key.replace("model.visual.", "visual.").replace("model.language_model.", "model."),
    "smolvlm": lambda key: key,
    "paligemma": lambda key: key.removeprefix("model."),
}


def test_a_local_folder_with_published_weight_names_loads(backbones, name, tmp_path):
    tiny.build_checkpoint(name, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {PUBLISHED_NAMES[name](key): value for key, value in weights.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    backbone = CLASSES[name](str(tmp_path), dtype="fp32", chat=name != "paligemma")
    assert backbone.fingerprint == backbones[name].fingerprint
    assert not hasattr(backbone, "banner")
    removed = next(key for key in sorted(renamed) if "layers.1" in key)
    del renamed[removed]
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="1 weights are missing"):
        CLASSES[name](str(tmp_path), dtype="fp32", chat=False)


def test_an_unreachable_name_says_what_to_do(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match=r"pretrained='Qwen/Qwen3-VL-4B-Instruct'.*hf auth login.*hf download"):
        Qwen3VL("Qwen/Qwen3-VL-4B-Instruct")
    with pytest.raises(OSError, match="pretrained='nobody/nothing'"):
        checkpoint_config("nobody/nothing")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen3_vl", {"dtype": "fp16"}, "dtype='fp16': choose one of bf16, fp32"),
        ("qwen3_vl", {"padding_side": "both"}, "padding_side='both'"),
        ("qwen3_vl", {"max_text_tokens": 0}, "max_text_tokens=0"),
        ("qwen3_vl", {"num_layers": 5}, "num_layers=5: must be 1 to 4"),
        ("qwen3_vl", {"layers": [4]}, r"layers=\[4\]: name layers 0 to 3"),
        ("qwen3_vl", {"num_layers": 2, "layers": [2]}, r"layers=\[2\]: name layers 0 to 1"),
        ("qwen3_vl", {"image_size": 72}, "image_size=72: Qwen3VL needs a multiple of 32"),
        ("qwen2_5_vl", {"image_size": 64}, "image_size=64: Qwen25VL needs a multiple of 28"),
        ("smolvlm", {"image_size": 128}, "image_size=128: SmolVLM2 needs a multiple of 16 up to 64"),
        ("paligemma", {"image_size": 32}, "image_size=32: the vision tower takes 64 only"),
        ("paligemma", {"chat": True}, "chat=True: tiny has no chat template"),
    ],
)
def test_bad_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, **options)


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path):
    tiny.build_checkpoint("smolvlm", tmp_path)
    with pytest.raises(ValueError, match="its config says 'smolvlm', Qwen3VL loads 'qwen3_vl'"):
        Qwen3VL(str(tmp_path))
    with pytest.raises(ValueError, match="architecture='gpt2': choose one of qwen3_vl"):
        tiny.build_checkpoint("gpt2", tmp_path)
    assert checkpoint_config(str(tmp_path)).model_type == "smolvlm"


@pytest.mark.parametrize("pretrained", PUBLISHED)
def test_published_sizes_give_the_published_number_of_parameters(pretrained):
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(checkpoint_config(pretrained))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(PUBLISHED[pretrained][0], rel=0.02)


CONFIG_FILES = sorted(p.stem for p in CONFIGS.glob("*.yaml") if p.stem != "effnet_minilm")


def vlm_config(stem):
    config = yaml.safe_load((CONFIGS / f"{stem}.yaml").read_text())
    cls = get_class(config.pop("_target_"))
    if cls not in CLASSES.values():
        pytest.skip(f"{stem} is not one of these classes")
    return cls, config


@pytest.mark.parametrize("stem", CONFIG_FILES)
def test_config_file_names_every_argument_and_is_known_on_meta(stem):
    cls, config = vlm_config(stem)
    assert list(config) == list(inspect.signature(cls).parameters)
    assert config["pretrained"] == "tiny" or config["pretrained"] in PUBLISHED
    backbone = cls.on_meta(**config)
    assert backbone.device.type == "meta"
    size = {"bf16": 2, "fp32": 4}[config["dtype"]]
    assert backbone.memory()["bytes"] == size * backbone.memory()["parameters"]
    for kind in cls.kinds:
        assert backbone.feature_spec(TWO, kind).kind == kind


def test_on_meta_agrees_with_the_loaded_model(backbone, name):
    meta = CLASSES[name].on_meta(pretrained="tiny", dtype="fp32", chat=False)
    assert meta.memory() == backbone.memory()
    for kind in backbone.kinds:
        assert meta.feature_spec(TWO, kind) == backbone.feature_spec(TWO, kind)
    qwen = Qwen3VL.on_meta(pretrained="Qwen/Qwen3-VL-4B-Instruct", num_layers=18, layers=[17])
    assert qwen.feature_spec(TWO, "kv").segments[0].layout == (18, 2, 8, 128)
    assert qwen.feature_spec(TWO, "layer_states").segments[0].dim == 2560
