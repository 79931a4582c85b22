"""Schema signatures, action conventions, normalisation and LeRobot's processors (CASES S2, S3, S6, S7, S9)."""

import json
from dataclasses import asdict, fields, replace
from types import SimpleNamespace

import pytest
import torch
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature
from lerobot.lerobot_types import TransitionKey
from lerobot.processor import DataProcessorPipeline, NormalizerProcessorStep, UnnormalizerProcessorStep
from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action
from safetensors.torch import save_file
from tensordict import TensorDict

from nexus_lightning.backbone import check_observation
from nexus_lightning.config import DatasetConfig, SchemaConfig, schema_of
from nexus_lightning.processors import (
    LEROBOT_MODES,
    POSTPROCESSOR,
    PREPROCESSOR,
    export_processors,
    normalizer_from_processors,
)
from nexus_lightning.producers.demonstrations import dataset_stats
from nexus_lightning.schema import (
    MODE_STATISTICS,
    NORMALIZATION_MODES,
    NORMALIZED_LIMIT,
    SCALE_FLOOR,
    NormalizationStats,
    Normalizer,
    TenantSchema,
)

SCHEMA = TenantSchema(state_dim=4, action_dim=7, chunk=8, execute=4, cameras=("front", "wrist"))
OTHER = {
    "state_dim": 5,
    "action_dim": 6,
    "chunk": 9,
    "execute": 3,
    "cameras": ("wrist", "front"),
    "image_size": 64,
    "image_fit": "crop",
    "image_orientation": "rotated_180",
    "control_hz": 10.0,
    "action_convention": "absolute",
    "rotation": "none",
    "rotation_index": 0,
    "gripper": "close_positive",
    "gripper_index": 0,
    "prompt": "Task: {instruction}.",
    "state_normalization": "min_max",
    "action_normalization": "min_max",
    "privileged": ("cube_pose",),
    "state_names": ("a", "b", "c", "d"),
    "action_names": tuple("abcdefg"),
}


@pytest.mark.parametrize("field", [f.name for f in fields(TenantSchema)])
def test_signature_depends_on_every_field(field):
    changed = replace(SCHEMA, **{field: OTHER[field]})
    assert changed.signature != SCHEMA.signature
    assert [d.split(":")[0] for d in SCHEMA.differences(changed)] == [field]
    seen_by_backbone = field in ("cameras", "image_size", "image_fit", "image_orientation", "prompt")
    assert (changed.prefix_signature != SCHEMA.prefix_signature) == seen_by_backbone


def test_signatures_from_before_images_were_fitted_stay_valid():
    """Payloads and stored features are found by them."""
    assert SCHEMA.signature == "132671f793710f19d464dfd51d534a1ef5129111ea4f3c2b04fe8c7e682964e3"
    assert SCHEMA.prefix_signature == "b0841d0983d6dcf9260d211febde322f513e992ae3e7ff14e630b47602ddc7b3"


def test_signature_ignores_the_container_type():
    other = replace(SCHEMA, cameras=["front", "wrist"])
    assert other.signature == SCHEMA.signature and SCHEMA.differences(other) == []


def test_the_config_has_every_field_of_the_schema_with_the_same_default():
    assert [f.name for f in fields(SchemaConfig)] != []
    given = {"state_dim": 4, "action_dim": 7, "chunk": 8, "execute": 4}
    assert {f.name for f in fields(SchemaConfig)} == {f.name for f in fields(TenantSchema)}
    assert schema_of(SchemaConfig(**given)).differences(TenantSchema(**given)) == []


def test_the_prompt_frames_the_instruction():
    assert SCHEMA.instruct("pick {x}") == "pick {x}"
    assert replace(SCHEMA, prompt="Task: {instruction}, now").instruct("lift") == "Task: lift, now"


def test_other_cameras_and_another_order_are_named():
    trained = replace(SCHEMA, cameras=("primary", "wrist"))
    one_view = replace(SCHEMA, cameras=("primary",))
    swapped = replace(SCHEMA, cameras=("wrist", "primary"))
    assert trained.differences(one_view) == ["cameras: ['primary', 'wrist'] != ['primary']"]
    assert trained.differences(swapped) == ["cameras: ['primary', 'wrist'] != ['wrist', 'primary']"]
    assert len({s.prefix_signature for s in (trained, one_view, swapped)}) == 3


def test_a_served_observation_must_have_the_schemas_cameras():
    schema = replace(SCHEMA, cameras=("primary", "wrist"), image_size=16)
    image = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)

    def observation(*cameras):
        return TensorDict({"image": TensorDict(dict.fromkeys(cameras, image), [1])}, [1])

    check_observation(observation("wrist", "primary"), schema)  # found by name: the order given does not matter
    with pytest.raises(ValueError, match=r"schema has \['primary', 'wrist'\], observation has \['primary'\]"):
        check_observation(observation("primary"), schema)


def test_a_good_schema_has_no_problems():
    assert SCHEMA.problems() == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"state_dim": -1}, "state_dim=-1: must be at least 0"),
        ({"execute": 9}, "execute=9"),
        ({"cameras": ("front", "front")}, "listed twice"),
        ({"cameras": ("front view",)}, "front view"),
        ({"image_size": 8}, "image_size=8"),
        ({"gripper": "up"}, "gripper='up'"),
        ({"gripper_index": 7}, "gripper_index=7"),
        ({"gripper_index": 4}, "gripper_index=4: lies inside the rotation"),
        ({"rotation": "matrix"}, "rotation='matrix'"),
        ({"rotation": "rotation_6d"}, "takes action dims 3 to 8, but action_dim=7"),
        ({"image_fit": "letterbox"}, "image_fit='letterbox': choose one of pad, crop, stretch"),
        ({"image_orientation": "mirrored"}, "image_orientation='mirrored': choose one of upright"),
        ({"action_normalization": "quantiles"}, "action_normalization='quantiles'"),
        ({"prompt": "do it"}, "prompt='do it': must hold {instruction} once"),
        ({"prompt": "{instruction} {instruction}"}, "once"),
        ({"state_names": ("a",)}, "state_names"),
    ],
)
def test_problems_name_key_and_value(change, word):
    assert any(word in problem for problem in replace(SCHEMA, **change).problems())


#: Native value of an open and of a closed gripper.
NATIVE = {
    "open_positive": (1.0, -1.0),
    "close_positive": (-1.0, 1.0),
    "open_one": (1.0, 0.0),
    "close_one": (0.0, 1.0),
}


@pytest.mark.parametrize("gripper", [*NATIVE, "none"])
@pytest.mark.parametrize("index", [-1, 0, 6])
def test_gripper_round_trip_of_every_dim(gripper, index):
    schema = replace(SCHEMA, gripper=gripper, gripper_index=index)
    native = torch.rand(2, 3, 7, generator=torch.Generator().manual_seed(0))
    if gripper != "none":
        native[0, :2, index] = torch.tensor(NATIVE[gripper])
    before = native.clone()
    internal = schema.to_internal(native)
    torch.testing.assert_close(schema.to_native(internal), native)
    assert torch.equal(native, before)
    for dim in range(7):
        if gripper == "none" or dim != index % 7:
            assert torch.equal(internal[..., dim], native[..., dim])
    if gripper != "none":
        assert internal[0, :2, index].tolist() == [1.0, -1.0]  # open, closed


def _normalizer(mode: str, values: torch.Tensor) -> Normalizer:
    stats = NormalizationStats.of(values)
    schema = TenantSchema(
        state_dim=values.shape[1],
        action_dim=values.shape[1],
        chunk=2,
        execute=1,
        state_normalization=mode,
        action_normalization=mode,
    )
    return Normalizer(schema, stats, stats)


def _values(rows=200):
    """Three dims of different place and width; none near the floor."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 3, generator=generator) * torch.tensor([1.0, 5.0, 0.3]) + torch.tensor([2.0, -1.0, 0.1])


@pytest.mark.parametrize("mode", NORMALIZATION_MODES)
def test_normalizer_modes(mode):
    values = _values()
    normalizer = _normalizer(mode, values)
    normalized = normalizer.normalize_action(values)
    torch.testing.assert_close(normalizer.unnormalize_action(normalized), values)
    if mode == "identity":
        assert torch.equal(normalized, values)
    elif mode == "mean_std":
        torch.testing.assert_close(normalized.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
        torch.testing.assert_close(normalized.std(0, unbiased=False), torch.ones(3))
    elif mode == "min_max":
        torch.testing.assert_close(normalized.amin(0), -torch.ones(3))
        torch.testing.assert_close(normalized.amax(0), torch.ones(3))
    else:
        outside = {"quantile": 0.01, "quantile10": 0.1}[mode]
        for beyond in (normalized < -1, normalized > 1):
            torch.testing.assert_close(beyond.float().mean(0), torch.full((3,), outside), atol=0.005, rtol=0)


def _lerobot_steps(mode, stats):
    features = {
        "observation.state": PolicyFeature(FeatureType.STATE, (3,)),
        "action": PolicyFeature(FeatureType.ACTION, (3,)),
    }
    norm_map = dict.fromkeys((FeatureType.STATE, FeatureType.ACTION), LEROBOT_MODES[mode])
    both = {key: {k: v for k, v in asdict(stats).items()} for key in features}
    return (
        NormalizerProcessorStep(features=features, norm_map=norm_map, stats=both),
        UnnormalizerProcessorStep(features=features, norm_map=norm_map, stats=both),
    )


@pytest.mark.parametrize("mode", NORMALIZATION_MODES)
def test_every_mode_equals_lerobots_processors(mode):
    values, seen = _values(), _values(300) * 1.5
    stats = NormalizationStats.of(values)
    normalizer = _normalizer(mode, values)
    forward, backward = _lerobot_steps(mode, stats)
    theirs = forward({TransitionKey.OBSERVATION: {"observation.state": seen}, TransitionKey.ACTION: seen})
    close = {"rtol": 2e-6, "atol": 2e-6}
    torch.testing.assert_close(
        normalizer.normalize_state(seen), theirs[TransitionKey.OBSERVATION]["observation.state"], **close
    )
    torch.testing.assert_close(normalizer.normalize_action(seen), theirs[TransitionKey.ACTION], **close)
    unnormalized = backward({TransitionKey.ACTION: seen})[TransitionKey.ACTION]
    torch.testing.assert_close(normalizer.unnormalize_action(seen), unnormalized, **close)


@pytest.mark.parametrize("mode", [m for m in NORMALIZATION_MODES if m != "identity"])
def test_constant_dim_is_finite_and_maps_to_zero(mode):
    values = torch.full((10, 2), 0.7)
    normalizer = _normalizer(mode, values)
    torch.testing.assert_close(normalizer.normalize_state(values), torch.zeros(10, 2), atol=1e-5, rtol=0)
    # A value that was never seen is scaled by the floor, then clamped.
    moved = normalizer.normalize_state(values + SCALE_FLOOR)
    torch.testing.assert_close(moved, torch.ones(10, 2), atol=1e-4, rtol=0)
    assert normalizer.normalize_state(values + 100).max() == NORMALIZED_LIMIT
    torch.testing.assert_close(normalizer.unnormalize_action(torch.zeros(10, 2)), values)


def test_equal_quantiles_of_a_dim_that_varies_are_finite():
    values = torch.zeros(1000, 1)
    values[0], values[1] = 1.0, -1.0  # a gripper that moves twice: q01 == q99 == 0
    normalizer = _normalizer("quantile", values)
    torch.testing.assert_close(normalizer.normalize_action(values[:2]), values[:2] / SCALE_FLOOR)
    torch.testing.assert_close(normalizer.unnormalize_action(normalizer.normalize_action(values)), values)


def test_statistics_of_one_row_are_finite():
    stats = NormalizationStats.of(torch.tensor([[1.0, 2.0]]))
    assert torch.equal(stats.std, torch.ones(2))


def test_quantiles_are_numpys():
    values = _values(101)
    stats = NormalizationStats.of(values)
    for name, level in (("q01", 1), ("q10", 10), ("q90", 90), ("q99", 99)):
        torch.testing.assert_close(getattr(stats, name), values.sort(0).values[level])  # 101 rows: no interpolation


def test_normalizer_survives_a_state_dict_round_trip():
    source = _normalizer("mean_std", torch.randn(20, 3))
    copy = _normalizer("mean_std", torch.randn(20, 3))
    copy.load_state_dict(source.state_dict())
    state = torch.randn(4, 3)
    assert torch.equal(copy.normalize_state(state), source.normalize_state(state))


def test_an_unknown_mode_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"schema.state_normalization='q1'.*quantile.*"):
        _normalizer("q1", torch.randn(4, 2))


def test_statistics_of_another_robot_are_refused():
    stats = NormalizationStats.of(torch.randn(5, 3))
    with pytest.raises(ValueError, match=r"statistics of \[3\] dims, but schema.action_dim=7"):
        Normalizer(SCHEMA, None, stats)


def test_the_mode_is_read_from_the_manifest_not_from_the_default():
    schema = replace(SCHEMA, state_normalization="quantile10", action_normalization="min_max")
    manifest = json.loads(json.dumps(asdict(schema)))
    assert (manifest["state_normalization"], manifest["action_normalization"]) == ("quantile10", "min_max")
    assert Normalizer(TenantSchema(**manifest)).modes == {"state": "quantile10", "action": "min_max"}


# ---- dataset statistics ----------------------------------------------------------------------------------------------


def _dataset(actions, states=None, drop=()):
    """A stand-in for a LeRobotDataset: its statistics only."""

    def column(values):
        return {k: v.numpy() for k, v in asdict(NormalizationStats.of(values)).items() if k not in drop}

    stats = {"action": column(actions), "observation.state": column(states if states is not None else actions)}
    return SimpleNamespace(meta=SimpleNamespace(stats=stats))


@pytest.mark.parametrize("gripper", [*NATIVE, "none"])
def test_dataset_statistics_are_those_of_the_converted_actions(gripper):
    schema = replace(SCHEMA, state_dim=7, gripper=gripper)
    native = torch.rand(301, 7, generator=torch.Generator().manual_seed(1)) ** 2  # lopsided: ends differ
    _, stats = dataset_stats(_dataset(native), DatasetConfig(repo_id="me/data"), schema)
    expected = NormalizationStats.of(schema.to_internal(native))
    for name, value in asdict(stats).items():
        torch.testing.assert_close(value, getattr(expected, name), msg=name)


def test_missing_quantiles_name_the_key_the_dataset_and_the_fix():
    dataset = _dataset(torch.randn(20, 7), torch.randn(20, 4), drop=("q01", "q99"))
    config = DatasetConfig(repo_id="me/data")
    dataset_stats(dataset, config, SCHEMA)  # nobody asked for them
    with pytest.raises(ValueError) as error:
        dataset_stats(dataset, config, replace(SCHEMA, action_normalization="quantile"))
    for part in (
        "schema.action_normalization='quantile'",
        "dataset me/data has no q01, q99 for 'action'",
        "augment_dataset_quantile_stats",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="needs q01 and q99"):
        Normalizer(replace(SCHEMA, state_normalization="quantile"), dataset_stats(dataset, config, SCHEMA)[0])


# ---- LeRobot's processor pipelines -----------------------------------------------------------------------------------


def _pipelines(folder):
    return (
        DataProcessorPipeline.from_pretrained(folder, PREPROCESSOR),
        DataProcessorPipeline.from_pretrained(
            folder, POSTPROCESSOR, to_transition=policy_action_to_transition, to_output=transition_to_policy_action
        ),
    )


@pytest.mark.parametrize("gripper", [*NATIVE, "none"])
@pytest.mark.parametrize("mode", NORMALIZATION_MODES)
def test_lerobot_reads_our_processors(mode, gripper, tmp_path):
    schema = TenantSchema(
        state_dim=3,
        action_dim=3,
        chunk=2,
        execute=1,
        cameras=("front",),
        image_size=16,
        rotation="none",
        gripper=gripper,
        state_normalization=mode,
        action_normalization=mode,
    )
    stats = NormalizationStats.of(_values())
    for values in vars(stats).values():
        values[0] = 0.0
    normalizer = Normalizer(schema, stats, stats)  # dim 0 is constant: the floor must reach LeRobot too
    assert export_processors(normalizer, schema, tmp_path) == tmp_path
    before, after = _pipelines(tmp_path)
    state, native = torch.tensor([0.05, 1.0, 0.2]), torch.tensor([0.1, 0.7, 0.4])
    image = torch.rand(3, 16, 16)
    batch = before({"observation.state": state, "action": native, "observation.images.front": image})
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(batch["observation.state"], normalizer.normalize_state(state)[None], **close)
    expected = normalizer.normalize_action(schema.to_internal(native))
    torch.testing.assert_close(batch["action"].view(3), expected, **close)
    assert torch.equal(batch["observation.images.front"][0], image)
    predicted = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))
    actions = schema.to_native(normalizer.unnormalize_action(predicted))
    torch.testing.assert_close(after(predicted), actions, **close)

    read = normalizer_from_processors(tmp_path, schema)
    assert read.modes == normalizer.modes
    for name, buffer in normalizer.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], buffer, msg=name)
    assert not any("tokenizer" in file.read_text() for file in tmp_path.glob("*.json"))


def _published(folder, state_tensors, norm_map):
    """A policy folder as LeRobot publishes it, with a tokenizer step that cannot be built here."""
    steps = [
        {"registry_name": "tokenizer_processor", "config": {"tokenizer_name": "/home/someone/tokenizer"}},
        {
            "registry_name": "normalizer_processor",
            "config": {"eps": 1e-8, "features": {}, "norm_map": norm_map},
            "state_file": "policy_preprocessor_step_1_normalizer_processor.safetensors",
        },
    ]
    (folder / PREPROCESSOR).write_text(json.dumps({"name": "policy_preprocessor", "steps": steps}))
    save_file(state_tensors, folder / steps[1]["state_file"])
    return folder


PUBLISHED = replace(
    SCHEMA,
    state_dim=3,
    action_dim=3,
    rotation="none",
    gripper="close_positive",
    state_normalization="mean_std",
    action_normalization="quantile",
)
NORM_MAP = {"STATE": "MEAN_STD", "ACTION": "QUANTILES", "VISUAL": "IDENTITY"}


def test_a_published_policys_statistics(tmp_path):
    native = _values() + 1
    stats = NormalizationStats.of(native)
    flat = {f"{key}.{name}": v for key in ("observation.state", "action") for name, v in asdict(stats).items()}
    normalizer = normalizer_from_processors(_published(tmp_path, flat, NORM_MAP), PUBLISHED)
    expected = Normalizer(PUBLISHED, stats, NormalizationStats.of(PUBLISHED.to_internal(native)))
    for name, buffer in expected.state_dict().items():
        torch.testing.assert_close(normalizer.state_dict()[name], buffer, msg=name)


def test_a_published_policy_that_does_not_fit(tmp_path):
    stats = asdict(NormalizationStats.of(_values()))
    flat = {
        f"{robot}.{key}.{name}": value.clone()
        for robot in ("so100", "aloha")
        for key in ("state", "action")
        for name, value in stats.items()
    }
    folder = _published(tmp_path, flat, NORM_MAP)
    with pytest.raises(ValueError) as error:
        normalizer_from_processors(folder, PUBLISHED)
    for part in ("'observation.state'", "aloha.action: ", "so100.state: ", "state_key"):
        assert part in str(error.value)
    chosen = normalizer_from_processors(folder, PUBLISHED, state_key="aloha.state", action_key="aloha.action")
    torch.testing.assert_close(chosen.state_offset, stats["mean"])
    keys = {"state_key": "aloha.state", "action_key": "aloha.action"}
    with pytest.raises(ValueError, match=r"schema.action_normalization='min_max'.*by QUANTILES; set it to quantile"):
        normalizer_from_processors(folder, replace(PUBLISHED, action_normalization="min_max"), **keys)
    with pytest.raises(ValueError, match=r"schema.state_dim=4: .* statistics of \[3\] dims"):
        normalizer_from_processors(folder, replace(PUBLISHED, state_dim=4), **keys)
    with pytest.raises(ValueError, match="migrate_policy_normalization"):
        normalizer_from_processors(tmp_path / "nothing", PUBLISHED)


def test_modes_and_statistics_have_lerobots_names():
    assert set(LEROBOT_MODES) == set(MODE_STATISTICS)
    assert set(LEROBOT_MODES.values()) == set(NormalizationMode)
