"""Schema signatures, action conventions and normalisation (CASES S2, S7, S9)."""

from dataclasses import fields, replace

import pytest
import torch

from nexus_lightning.schema import (
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
    "image_orientation": "rotated_180",
    "control_hz": 10.0,
    "action_convention": "absolute",
    "rotation": "none",
    "gripper": "close_positive",
    "gripper_index": 0,
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
    seen_by_backbone = field in ("cameras", "image_size", "image_orientation")
    assert (changed.prefix_signature != SCHEMA.prefix_signature) == seen_by_backbone


def test_signature_ignores_the_container_type():
    assert replace(SCHEMA, cameras=["front", "wrist"]).signature == SCHEMA.signature


def test_a_good_schema_has_no_problems():
    assert SCHEMA.problems() == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"state_dim": 0}, "state_dim=0"),
        ({"execute": 9}, "execute=9"),
        ({"cameras": ("front", "front")}, "listed twice"),
        ({"cameras": ("front view",)}, "front view"),
        ({"image_size": 8}, "image_size=8"),
        ({"gripper": "up"}, "gripper='up'"),
        ({"action_normalization": "quantile"}, "action_normalization='quantile'"),
        ({"state_names": ("a",)}, "state_names"),
    ],
)
def test_problems_name_key_and_value(change, word):
    assert any(word in problem for problem in replace(SCHEMA, **change).problems())


@pytest.mark.parametrize("gripper", ["open_positive", "close_positive", "none"])
@pytest.mark.parametrize("index", [-1, 0, 3])
def test_gripper_round_trip_of_every_dim(gripper, index):
    schema = replace(SCHEMA, gripper=gripper, gripper_index=index)
    native = torch.linspace(-1, 1, 2 * 3 * 7).view(2, 3, 7)
    before = native.clone()
    internal = schema.to_internal(native)
    assert torch.equal(schema.to_native(internal), native)
    assert torch.equal(native, before)
    for dim in range(7):
        flipped = gripper == "close_positive" and dim == index % 7
        assert torch.equal(internal[..., dim], -native[..., dim] if flipped else native[..., dim])


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


@pytest.mark.parametrize("mode", ["identity", "mean_std", "min_max"])
def test_normalizer_modes(mode):
    values = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 5.0, 0.3]) + 2
    normalizer = _normalizer(mode, values)
    normalized = normalizer.normalize_action(values)
    torch.testing.assert_close(normalizer.unnormalize_action(normalized), values)
    if mode == "identity":
        assert torch.equal(normalized, values)
    elif mode == "mean_std":
        torch.testing.assert_close(normalized.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
        torch.testing.assert_close(normalized.std(0, unbiased=False), torch.ones(3))
    else:
        torch.testing.assert_close(normalized.amin(0), -torch.ones(3))
        torch.testing.assert_close(normalized.amax(0), torch.ones(3))


@pytest.mark.parametrize("mode", ["mean_std", "min_max"])
def test_constant_dim_is_finite_and_maps_to_zero(mode):
    values = torch.full((10, 2), 0.7)
    normalizer = _normalizer(mode, values)
    torch.testing.assert_close(normalizer.normalize_state(values), torch.zeros(10, 2), atol=1e-5, rtol=0)
    # A value that was never seen is scaled by the floor, then clamped.
    moved = normalizer.normalize_state(values + SCALE_FLOOR)
    torch.testing.assert_close(moved, torch.ones(10, 2), atol=1e-4, rtol=0)
    assert normalizer.normalize_state(values + 100).max() == NORMALIZED_LIMIT
    torch.testing.assert_close(normalizer.unnormalize_action(torch.zeros(10, 2)), values)


def test_statistics_of_one_row_are_finite():
    stats = NormalizationStats.of(torch.tensor([[1.0, 2.0]]))
    assert torch.equal(stats.std, torch.ones(2))


def test_normalizer_survives_a_state_dict_round_trip():
    source = _normalizer("mean_std", torch.randn(20, 3))
    copy = _normalizer("mean_std", torch.randn(20, 3))
    copy.load_state_dict(source.state_dict())
    state = torch.randn(4, 3)
    assert torch.equal(copy.normalize_state(state), source.normalize_state(state))


def test_an_unknown_mode_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"quantile.*mean_std"):
        _normalizer("quantile", torch.randn(4, 2))
