"""What a policy sees of a camera: an image of any size, fitted into the schema's square.

Datasets, simulators, served predictions, exported policies and ``scripts/play.py`` all come here, so that a policy sees
in use what it was trained on::

    [3, 480, 640]  ── pad ──────►  whole image, black above or to the left    as LeRobot's SmolVLA and X-VLA do
                   ── crop ─────►  the largest square in its middle
                   ── stretch ──►  whole image, its proportions lost
                                   ... each resized to [3, image_size, image_size]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.functional import interpolate, pad

FITS = ("pad", "crop", "stretch")


def as_uint8(camera: str, image: Any) -> Tensor:
    """A colour image ``[..., 3, H, W]``, uint8 or float in [0, 1], as uint8 (which comes back as it is).

    Raises:
        ValueError: it is grey, a depth map, has its channels last, or is of another dtype or range; names the camera.
    """
    say = f"camera {camera!r}: expected uint8 [3, H, W], or float from 0 to 1"
    if not isinstance(image, Tensor):
        raise ValueError(f"{say}, got {type(image).__name__}")
    shape = list(image.shape[-3:])
    if len(shape) < 3 or shape[0] != 3:
        hint = ""
        if len(shape) == 2 or shape[0] == 1 or shape[-1] == 1:
            hint = " (grey or depth: a policy sees three colour channels)"
        elif shape[-1] == 3:
            hint = " (put the channels first)"
        raise ValueError(f"{say}, got {image.dtype} {shape}{hint}")
    if 0 in shape:
        raise ValueError(f"{say}, got an empty image {shape}")
    if image.dtype == torch.uint8:
        return image
    if not image.is_floating_point():
        raise ValueError(f"{say}, got {image.dtype} {shape}")
    low, high = image.aminmax() if image.numel() else (torch.zeros(()), torch.zeros(()))
    if not (low >= 0 and high <= 1):  # NaN is neither
        raise ValueError(f"{say}, got {image.dtype} {shape} with values from {low:g} to {high:g}")
    return (image * 255).round().to(torch.uint8)


def fit_images(images: Tensor, size: int, fit: str) -> Tensor:
    """Images of any height and width -> the square that the policy sees.

    Args:
        images: uint8 ``[..., 3, H, W]`` in the schema's orientation.
        size: ``schema.image_size``.
        fit: one of :data:`FITS`.

    Returns:
        uint8 ``[..., 3, size, size]``; the input itself when it has that size.

    Example:
        >>> fit_images(torch.full((3, 2, 4), 9, dtype=torch.uint8), 4, "pad")[0]
        tensor([[0, 0, 0, 0],
                [0, 0, 0, 0],
                [9, 9, 9, 9],
                [9, 9, 9, 9]], dtype=torch.uint8)
    """
    height, width = images.shape[-2:]
    if (height, width) == (size, size):
        return images
    if fit == "crop":
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        return _resize(images[..., top : top + side, left : left + side], size, size)
    if fit == "stretch":
        return _resize(images, size, size)
    assert fit == "pad", "validated with the schema"
    ratio = max(width / size, height / size)
    inner = max(1, int(height / ratio)), max(1, int(width / ratio))
    return pad(_resize(images, *inner), (size - inner[1], 0, size - inner[0], 0))


def _resize(images: Tensor, height: int, width: int) -> Tensor:
    """As LeRobot resizes: bilinear between pixel centres, without smoothing."""
    if tuple(images.shape[-2:]) == (height, width):
        return images
    flat = images.reshape(-1, *images.shape[-3:]).float()
    resized = interpolate(flat, size=(height, width), mode="bilinear", align_corners=False)
    return resized.round().to(torch.uint8).reshape(*images.shape[:-2], height, width)


class Seen(Protocol):
    """What a tenant's schema says of what its policy sees."""

    @property
    def cameras(self) -> Sequence[str]: ...
    @property
    def image_size(self) -> int: ...
    @property
    def image_fit(self) -> str: ...
    @property
    def state_dim(self) -> int: ...


def fit_observation(observation: TensorDictBase, schema: Seen) -> TensorDict:
    """An observation ``[B]`` with the images of a camera -> as the backbone and the head take it.

    Args:
        observation: ``("image", <camera>)`` ``[B, 3, H, W]``, uint8 or float in [0, 1], of each camera of the schema
            and of no other; of each its own size. ``state`` may be missing where ``schema.state_dim`` is 0.

    Returns:
        ``image`` uint8 ``[B, 3, image_size, image_size]``, the other entries as they are.

    Raises:
        ValueError: a camera is missing or extra, or its images are none (see :func:`as_uint8`).
    """
    given = observation.get("image", None)
    names = tuple(given.keys()) if isinstance(given, TensorDictBase) else ()
    if set(names) != set(schema.cameras) or (given is not None and not isinstance(given, TensorDictBase)):
        raise ValueError(f"camera mismatch: schema has {list(schema.cameras)}, observation has {list(names)}")
    if schema.state_dim == 0 and observation.get("state", None) is None:
        observation = observation.copy().set("state", torch.zeros(*observation.batch_size, 0))
    fitted = TensorDict({key: value for key, value in observation.items() if key != "image"}, observation.batch_size)
    if given is not None:
        images = {
            camera: fit_images(as_uint8(camera, given[camera]), schema.image_size, schema.image_fit) for camera in names
        }
        fitted["image"] = TensorDict(images, observation.batch_size)
    return fitted
