"""What the policy sees of a camera: one fit for datasets, simulators, served predictions and exported policies."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from fakes import FakeBackbone
from lerobot.policies.common.vla_utils import resize_with_pad
from tensordict import TensorDict

from nexus_lightning.config import DatasetConfig
from nexus_lightning.demonstrations import record_demonstrations
from nexus_lightning.environment import SimulatorEnv, check_tenant_env
from nexus_lightning.features.store import FeatureStore
from nexus_lightning.images import FITS, as_uint8, fit_images, fit_observation
from nexus_lightning.inference.requests import Ask, validate_ask
from nexus_lightning.policy import Policy
from nexus_lightning.producers.demonstrations import DemonstrationReader, open_dataset
from nexus_lightning.schema import Normalizer, TenantSchema
from nexus_lightning.services.batches import batch_of
from nexus_lightning.simulator import Simulator, StepResult

SCHEMA = TenantSchema(
    state_dim=4, action_dim=2, chunk=3, execute=2, cameras=("left", "right"), image_size=32, gripper="none",
    rotation="none",
)  # fmt: skip
SIZES = [(48, 64), (64, 48), (20, 90), (33, 31), (16, 16), (96, 96), (7, 150)]


def picture(height: int, width: int, seed: int = 0, *batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (*batch, 3, height, width), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_pad_is_lerobots(size):
    image = picture(*size)
    theirs = resize_with_pad(image[None].float() / 255, 32, 32, pad_value=0.0)[0]
    ours = fit_images(image, 32, "pad")
    assert ours.dtype == torch.uint8 and ours.shape == (3, 32, 32)
    assert (ours.float() / 255 - theirs).abs().max() <= 0.5 / 255 + 1e-5


def test_what_each_fit_keeps():
    image = torch.zeros(3, 4, 8, dtype=torch.uint8)
    image[:, :, 2:6] = 200  # the middle square
    assert (fit_images(image, 4, "crop") == 200).all()
    stretched = fit_images(image, 8, "stretch")
    assert (stretched[:, :, 3:5] == 200).all() and (stretched[:, :, :2] == 0).all()
    assert torch.equal(fit_images(image, 8, "pad"), torch.cat([torch.zeros(3, 4, 8, dtype=torch.uint8), image], 1))
    tall = fit_images(image.mT, 8, "pad")
    assert (tall[..., :4] == 0).all() and torch.equal(tall[..., 4:], image.mT)


@pytest.mark.parametrize("fit", FITS)
def test_a_square_of_the_right_size_is_not_touched(fit):
    image = picture(32, 32)
    assert fit_images(image, 32, fit) is image
    many = picture(40, 24, 0, 2, 5)
    assert torch.equal(fit_images(many, 32, fit)[1, 3], fit_images(many[1, 3], 32, fit))


def test_a_picture_too_thin_for_its_square_keeps_a_line():
    assert (fit_images(torch.full((3, 2, 300), 7, dtype=torch.uint8), 32, "pad")[0] == 7).sum() == 32


def test_float_images_are_what_lerobot_gives():
    image = picture(5, 9)
    assert torch.equal(as_uint8("front", image.float() / 255), image)
    assert as_uint8("front", image) is image


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.zeros(1, 8, 9), r"camera 'top': .*torch.float32 \[1, 8, 9\] \(grey or depth"),
        (torch.zeros(8, 9, dtype=torch.uint8), r"\[8, 9\] \(grey or depth"),
        (torch.zeros(4, 8, 9), r"torch.float32 \[4, 8, 9\]$"),
        (torch.zeros(8, 9, 3), r"\[8, 9, 3\] \(put the channels first\)"),
        (torch.zeros(3, 8, 9, dtype=torch.int32), r"torch.int32 \[3, 8, 9\]"),
        (torch.full((3, 8, 9), float("nan")), "with values from nan to nan"),
        (torch.full((3, 8, 9), 2.0), "with values from 2 to 2"),
        (np.zeros((3, 8, 9)), "got ndarray"),
    ],
)
def test_what_is_no_colour_image_is_refused_by_name(image, message):
    with pytest.raises(ValueError, match=message):
        as_uint8("top", image)


def test_an_observation_of_cameras_of_different_sizes():
    images = {"right": picture(48, 64, 1, 2), "left": picture(72, 128, 2, 2).float() / 255}
    observation = TensorDict({"image": TensorDict(images, [2]), "state": torch.zeros(2, 4)}, [2])
    fitted = fit_observation(observation, SCHEMA)
    assert fitted["state"] is observation["state"] and observation["image", "right"].shape == (2, 3, 48, 64)
    for camera, image in (("right", images["right"]), ("left", picture(72, 128, 2, 2))):
        assert torch.equal(fitted["image", camera], fit_images(image, 32, "pad"))


class OnePicture(Simulator):
    """FAKE. Shows one picture of 24 x 40 pixels."""

    gripper = "none"

    def reset(self, seed):
        self.steps = 0

    def step(self, action):
        self.steps += 1
        return StepResult(0.0, self.steps == 2, self.steps == 2, False)

    def observe(self):
        return {
            "image": {"front": picture(24, 40).numpy()},
            "state": np.full(4, self.steps, np.float32),
            "instruction": "look",
        }


def make_expert(sim):
    while True:
        yield np.zeros(2, np.float32)


class Spy(FakeBackbone):
    """Keeps what it was shown."""

    def preprocess(self, observation, instructions, schema, kinds=("tokens",)):
        self.shown = observation["image", "front"]
        return super().preprocess(observation, instructions, schema, kinds)


@pytest.mark.parametrize("fit", FITS)
def test_dataset_simulator_server_and_exported_policy_show_one_picture(tmp_path, fit):
    schema = replace(SCHEMA, cameras=("front",), image_fit=fit, control_hz=12.5)
    image, simulator = picture(24, 40), {"_target_": f"{__name__}.OnePicture"}
    expected = fit_images(image, 32, fit)
    assert len({fit_images(image, 32, other).sum().item() for other in FITS}) == 3, "or this test would see nothing"

    root = tmp_path / "recorded"
    record_demonstrations(simulator, f"{__name__}.make_expert", root, 1, 0, schema, progress=False, inline=True)
    config, backbone = DatasetConfig(repo_id="local/recorded"), Spy()
    dataset, spec = open_dataset(config, schema, root), backbone.feature_spec(schema)
    assert dataset.meta.features["observation.images.front"]["shape"] == (24, 40, 3), (
        "recorded as the simulator gave it"
    )
    reader = DemonstrationReader(dataset, config, schema, backbone, spec, None)
    assert torch.equal(reader.read(torch.tensor([0]))["observation", "image", "front"][0], expected)
    DemonstrationReader(dataset, config, schema, backbone, spec, FeatureStore(None, 10**9)).read(torch.tensor([0]))
    assert torch.equal(backbone.shown[0], expected)

    env = SimulatorEnv(simulator, schema, Normalizer(schema), inline=True)
    assert torch.equal(env.reset()["observation", "image", "front"][0], expected)
    check_tenant_env(env)
    env.close()

    observation = TensorDict({"image": {"front": image[None]}, "state": torch.zeros(1, 4)}, [1])
    served = SimpleNamespace(schema=schema, head=SimpleNamespace())
    words = SimpleNamespace(tolist=lambda: ["look"])
    ask = Ask(cast(Any, None), "one", None, "act", 1, observation, words, None, False)
    request = validate_ask(ask, cast(Any, served), cast(Any, None))
    assert torch.equal(request.images["front"][0], expected)

    head = SimpleNamespace(feature_spec=spec, act=lambda features, state: {"chunk": torch.zeros(1, 3, 2)})
    slot: Any = SimpleNamespace(
        spec=SimpleNamespace(schema=schema), head=head, serving_head=head, normalizer=Normalizer(schema)
    )
    Policy(backbone, slot, {}, tmp_path)(observation, ["look"])
    assert torch.equal(backbone.shown[0], expected)

    arrays = {"observation/image/front": image[None].numpy(), "observation/state": np.zeros((1, 4), np.float32)}
    batch: Any = batch_of(slot, "sft", cast(Any, None), {**arrays, "action": np.zeros((1, 3, 2), np.float32)}, ["look"])
    assert torch.equal(batch["observation", "image", "front"][0], expected)


def test_a_simulator_may_render_in_another_size_than_the_policy_sees(compose):
    from nexus_lightning.config import validate

    validate(compose("+tenants=[toy]", "tenants.toy.schema.image_size=64", "tenants.toy.schema.image_fit=crop"))
