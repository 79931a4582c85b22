"""Tensors of which every rank holds a part (DTensor), and whole ones."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(value: Any) -> Any:
    """A shard's whole tensor (a collective); anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    return cast(DTensor, value.to(value.device_mesh.device_type)).full_tensor()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a shard; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def load_whole(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Whole tensors into a sharded module with exactly these names.

    Raises:
        ValueError: names differ.
    """
    own = module.state_dict()
    if own.keys() != tensors.keys():
        raise ValueError(f"names differ: {sorted(own.keys() ^ tensors.keys())}")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(shard_like(tensors[name], value))


def shard_like(tensor: Tensor, example: Tensor) -> Tensor:
    """This rank's shard of a tensor that every rank has whole."""
    if not isinstance(example, DTensor):
        return tensor.to(example.device)
    mesh = example.device_mesh
    return distribute_tensor(tensor.to(mesh.device_type), mesh, example.placements, src_data_rank=None)
