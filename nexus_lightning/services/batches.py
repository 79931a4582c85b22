"""Arrays of a request -> what objectives and the inference queue read, and back. Everything is checked here.

Names of arrays: ``observation/state`` ``[N, S]``, ``observation/image/<camera>`` uint8 ``[N, 3, H, W]``, ``action``
``[N, T, A]`` in the simulator's own convention (not normalised); the other names of each loss: :data:`LOSSES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from nexus_lightning.bounds import bounds_problems
from nexus_lightning.images import fit_observation
from nexus_lightning.objectives import shipped
from nexus_lightning.objectives.base import AlgorithmSettings, Objective, RolloutSettings
from nexus_lightning.objectives.policy_gradient import EXECUTED, PolicyGradient, likelihood_units
from nexus_lightning.producers.demonstrations import string_column
from nexus_lightning.schema import TenantSchema
from nexus_lightning.services.errors import InvalidRequest
from nexus_lightning.tenant import TenantSlot

#: loss -> arrays beside the observation: ``?`` may be left out. Of rl losses ``chunk`` is the normalised action of
#: predict or rollout, with its ``trace/<name>`` where the head has one, and ``log_probs`` ``[N, T, A]`` those of it.
LOSSES: dict[str, tuple[str, ...]] = {name: cls.arrays for name, cls in shipped().items() if cls.arrays}


def low_level_objective(slot: TenantSlot, loss: str, options: Mapping[str, Any]) -> Objective:
    """The objective of a built-in loss, with the settings of its algorithm as ``options``.

    Raises:
        InvalidRequest: unknown loss or option, or the head has no log-probabilities.
    """
    if loss not in LOSSES:
        raise InvalidRequest(f"loss={loss!r}: choose one of {', '.join(LOSSES)}")
    algorithm = shipped()[loss]
    if algorithm.task != "sft" and not slot.head.supports_rl:
        raise InvalidRequest(f"loss={loss}: {type(slot.head).__name__} has no critic and no log-probabilities")
    settings = algorithm.configure()
    valid = [each.name for each in fields(settings) if not each.name.startswith("_")]
    if unknown := [name for name in options if name not in valid]:
        raise InvalidRequest(f"loss_options: {loss} has no {', '.join(unknown)}; valid: {', '.join(valid) or 'none'}")
    try:
        settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(settings), dict(options)))
    except OmegaConfBaseException as error:
        raise InvalidRequest(f"loss_options: {str(error).splitlines()[0]}") from error
    if problems := bounds_problems("loss_options", settings):
        raise InvalidRequest("the loss cannot be used", problems)
    assert isinstance(settings, AlgorithmSettings)
    if isinstance(settings, RolloutSettings) and (algorithm.waits_for_actor(settings) or settings.sft_weight):
        raise InvalidRequest("loss_options: proximal and sft_weight belong to whole workloads")
    return algorithm(slot.head, slot.normalizer, settings)


def batch_of(
    slot: TenantSlot, loss: str, objective: Objective, arrays: Mapping[str, np.ndarray], instructions: Sequence[str]
) -> TensorDict:
    """The batch ``[N]`` that ``objective`` reads.

    Raises:
        InvalidRequest: an array is missing, unknown, of another shape or type, or not finite.
    """
    schema, rows = slot.spec.schema, len(instructions)
    batch = observation_of(arrays, instructions)
    try:
        batch["observation"] = fit_observation(batch["observation"], schema)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    chunk, flags = (rows, schema.chunk, schema.action_dim), (rows, schema.chunk)
    column = (rows, 1)
    shapes = {"action": chunk, "chunk": chunk, "log_probs": chunk, "is_pad": flags, "executed": flags}
    given = {name: value for name, value in arrays.items() if not name.startswith("observation/")}
    trace = {name: value for name, value in given.items() if name.startswith("trace/")}
    needed = LOSSES[loss]
    known = {name.rstrip("?") for name in needed} | (set(trace) if "chunk" in needed else set())
    problems = [
        f"array {name!r}: is required by loss {loss}" for name in needed if name[-1] != "?" and name not in given
    ]
    problems += [f"array {name!r}: unknown to loss {loss}" for name in given if name not in known]
    tensors: dict[str, Tensor] = {}
    for name in sorted(known & given.keys()):
        value = torch.as_tensor(np.array(given[name]))
        if name in ("is_pad", "executed"):
            value = value.bool()
        elif value.is_floating_point() or not name.startswith("trace/"):
            value = value.float()
        if name not in shapes and not name.startswith("trace/"):
            value = value.reshape(column) if value.shape == (rows,) else value
        wanted = shapes.get(name, column)
        if not name.startswith("trace/") and tuple(value.shape) != wanted:
            problems.append(f"array {name!r}: shape {list(value.shape)}, expected {list(wanted)}")
        elif value.shape[:1] != (rows,):
            problems.append(f"array {name!r}: {len(value)} rows, {rows} instructions")
        elif value.is_floating_point() and not bool(value.isfinite().all()):
            problems.append(f"array {name!r}: holds NaN or infinity")
        tensors[name] = value
    state = batch["observation", "state"]
    if tuple(state.shape) != (rows, schema.state_dim) or not bool(state.isfinite().all()):
        problems.append(f"array 'observation/state': finite numbers of shape {[rows, schema.state_dim]} are required")
    if problems:
        raise InvalidRequest(f"the batch does not fit loss {loss}", problems)
    if "chunk" not in needed:
        batch["actions"] = schema.to_internal(tensors.pop("action"))
        batch["is_pad"] = tensors.pop("is_pad", torch.zeros(flags, dtype=torch.bool))
        return batch.update(tensors)
    return _decisions(batch, objective, schema, tensors)


def _decisions(batch: TensorDict, objective: Objective, schema: TenantSchema, tensors: dict[str, Tensor]) -> TensorDict:
    """Columns of :class:`PolicyGradient` from sampled decisions."""
    assert isinstance(objective, PolicyGradient)
    rows, settings = len(batch), objective.settings
    executed = torch.zeros(rows, schema.chunk, dtype=torch.bool)
    executed[:, : schema.execute] = True
    executed = tensors.pop("executed", executed)
    log_probs = tensors.pop("log_probs")
    action: dict[str, Any] = {"chunk": tensors.pop("chunk"), "log_probs": log_probs}
    trace = {name.removeprefix("trace/"): value for name, value in tensors.items() if name.startswith("trace/")}
    if trace:
        action["trace"] = TensorDict(trace, [rows])
    batch["vla_action"] = TensorDict(action, [rows])
    batch[EXECUTED] = executed
    batch["sample_log_prob"] = likelihood_units(log_probs, executed, settings.log_prob, settings.log_prob_level)
    for name in ("advantage", "value_target", "state_value"):
        batch[name] = tensors.get(name, torch.zeros(rows, 1))
    return batch


def observation_of(arrays: Mapping[str, np.ndarray], instructions: Sequence[str]) -> TensorDict:
    """``observation/...`` arrays and texts -> ``observation`` and ``language_instruction`` ``[N]``.

    Raises:
        InvalidRequest: something is missing or unknown, or the numbers of rows differ.
    """
    given = {name.removeprefix("observation/"): v for name, v in arrays.items() if name.startswith("observation/")}
    rows = len(instructions)
    problems = [
        f"array 'observation/{name}': {len(value) if value.ndim else 'no'} rows, {rows} instructions"
        for name, value in given.items()
        if not value.ndim or len(value) != rows
    ]
    problems += [f"array 'observation/{n}': unknown" for n in given if n != "state" and not n.startswith("image/")]
    if "state" not in given:
        problems.append("array 'observation/state': is required")
    if not rows or not all(isinstance(text, str) for text in instructions):
        problems.append("instructions: one text for each row is required")
    if problems:
        raise InvalidRequest("the observations do not fit", problems)
    observation = TensorDict({"state": torch.as_tensor(np.array(given.pop("state")), dtype=torch.float32)}, [rows])
    if given:
        images = {name.removeprefix("image/"): torch.as_tensor(np.array(value)) for name, value in given.items()}
        observation["image"] = TensorDict(images, [rows])
    return TensorDict({"observation": observation, "language_instruction": string_column(list(instructions))}, [rows])


def to_arrays(tensors: Mapping[str, Tensor] | TensorDictBase) -> dict[str, np.ndarray]:
    """Tensors by name (nested ones joined by ``/``) as arrays of their own; bf16 becomes float32: numpy has none."""
    if isinstance(tensors, TensorDictBase):
        leaves = tensors.items(include_nested=True, leaves_only=True)
        tensors = {key if isinstance(key, str) else "/".join(key): value for key, value in leaves}
    plain = {name: value.detach().cpu() for name, value in tensors.items()}
    return {name: (v.float() if v.dtype == torch.bfloat16 else v).numpy().copy() for name, v in plain.items()}
