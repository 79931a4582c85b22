"""A tenant's normalisation as LeRobot's processor pipelines, written and read.

::

    policy_preprocessor.json    rename ► batch ► device ► [gripper to internal] ► normalise
    policy_postprocessor.json   unnormalise ► [gripper to native] ► device
    policy_*processor_step_*.safetensors    the statistics

The steps are LeRobot's own, but for the gripper's, which is only there when the tenant's command is not the internal
one. No tokenizer step is written: LeRobot saves it with a path of the machine it ran on, and here the backbone owns it.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import FeatureType, NormalizationMode, PipelineFeatureType, PolicyFeature
from lerobot.lerobot_types import EnvTransition, TransitionKey
from lerobot.processor import (
    AddBatchDimensionProcessorStep,
    DeviceProcessorStep,
    NormalizerProcessorStep,
    ProcessorStep,
    RenameObservationsProcessorStep,
    UnnormalizerProcessorStep,
)
from lerobot.processor.factory import make_policy_processor_pipelines
from safetensors.torch import load_file
from torch import Tensor

from nexus_lightning.conventions import gripper_to_internal, gripper_to_native
from nexus_lightning.schema import MODE_STATISTICS, NormalizationStats, Normalizer, TenantSchema

PREPROCESSOR = "policy_preprocessor.json"
POSTPROCESSOR = "policy_postprocessor.json"
STATE_KEY, ACTION_KEY = "observation.state", "action"
#: Our modes -> LeRobot's.
LEROBOT_MODES = {
    "identity": NormalizationMode.IDENTITY,
    "mean_std": NormalizationMode.MEAN_STD,
    "min_max": NormalizationMode.MIN_MAX,
    "quantile": NormalizationMode.QUANTILES,
    "quantile10": NormalizationMode.QUANTILE10,
}


@dataclass
class GripperProcessorStep(ProcessorStep):
    """The gripper dim of an action between a native command and +1 opens, -1 closes.

    Saved under its import path, so reading a pipeline that holds it needs this package.
    """

    gripper: str
    index: int
    to_internal: bool

    def __call__(self, transition: EnvTransition) -> EnvTransition:
        transition = transition.copy()
        action = transition.get(TransitionKey.ACTION)
        if action is not None:
            convert = gripper_to_internal if self.to_internal else gripper_to_native
            converted = convert(torch.as_tensor(action), self.gripper, self.index)
            transition[TransitionKey.ACTION] = converted  # pyright: ignore[reportGeneralTypeIssues]
        return transition

    def get_config(self) -> dict[str, Any]:
        return {"gripper": self.gripper, "index": self.index, "to_internal": self.to_internal}

    def transform_features(
        self, features: dict[PipelineFeatureType, dict[str, PolicyFeature]]
    ) -> dict[PipelineFeatureType, dict[str, PolicyFeature]]:
        return features


_GRIPPER_CLASS = f"{GripperProcessorStep.__module__}.{GripperProcessorStep.__name__}"


def export_processors(normalizer: Normalizer, schema: TenantSchema, folder: str | Path) -> Path:
    """Writes the normaliser as LeRobot pipelines into ``folder`` (made if needed, for example beside a payload).

    The preprocessor normalises ``observation.state`` and ``action``; the postprocessor turns what the head predicts
    into native actions. Statistics are the effective ones, with ``SCALE_FLOOR`` applied, so that LeRobot's result is
    ours. The clamp of far-off states (``NORMALIZED_LIMIT``) is not part of LeRobot's format. The device is ``cpu``;
    LeRobot's callers override it.

    Returns:
        ``folder``.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    size = (3, schema.image_size, schema.image_size)
    features = {
        **{f"observation.images.{c}": PolicyFeature(FeatureType.VISUAL, size) for c in schema.cameras},
        **({STATE_KEY: PolicyFeature(FeatureType.STATE, (schema.state_dim,))} if schema.state_dim else {}),
        ACTION_KEY: PolicyFeature(FeatureType.ACTION, (schema.action_dim,)),
    }
    modes = {
        FeatureType.VISUAL: NormalizationMode.IDENTITY,
        FeatureType.STATE: LEROBOT_MODES[normalizer.modes["state"]],
        FeatureType.ACTION: LEROBOT_MODES[normalizer.modes["action"]],
    }
    action = _effective_stats(normalizer.modes["action"], normalizer.action_offset, normalizer.action_scale)
    state = _effective_stats(normalizer.modes["state"], normalizer.state_offset, normalizer.state_scale)
    stats = {key: values for key, values in ((STATE_KEY, state), (ACTION_KEY, action)) if key in features and values}
    converts = schema.gripper not in ("open_positive", "none")

    def gripper(to_internal: bool) -> list[ProcessorStep]:
        return [GripperProcessorStep(schema.gripper, schema.gripper_index, to_internal)] if converts else []

    pipelines = make_policy_processor_pipelines(
        input_steps=[
            RenameObservationsProcessorStep(rename_map={}),
            AddBatchDimensionProcessorStep(),
            DeviceProcessorStep(device="cpu"),
            *gripper(to_internal=True),
            NormalizerProcessorStep(features=features, norm_map=modes, stats=stats),
        ],
        output_steps=[
            UnnormalizerProcessorStep(
                features={ACTION_KEY: features[ACTION_KEY]},
                norm_map=modes,
                stats={key: values for key, values in stats.items() if key == ACTION_KEY},
            ),
            *gripper(to_internal=False),
            DeviceProcessorStep(device="cpu"),
        ],
    )
    for pipeline in pipelines:
        pipeline.save_pretrained(folder)
    return folder


def processor_files(normalizer: Normalizer, schema: TenantSchema) -> dict[str, bytes]:
    """What :func:`export_processors` writes, as ``processors/<name> -> content`` (for a payload)."""
    with tempfile.TemporaryDirectory() as folder:
        export_processors(normalizer, schema, folder)
        return {f"processors/{file.name}": file.read_bytes() for file in sorted(Path(folder).iterdir())}


def normalizer_from_processors(
    folder: str | Path, schema: TenantSchema, state_key: str = STATE_KEY, action_key: str = ACTION_KEY
) -> Normalizer:
    """A normaliser from the statistics of a LeRobot policy folder (published, or by :func:`export_processors`).

    Reads the normaliser step of ``policy_preprocessor.json`` and its statistics; no other step is built, so a tokenizer
    that the pipeline names is not needed. A published policy's action statistics are taken as of ``schema``'s native
    convention and converted: under ``close_*`` the normalised gripper is then the mirror image of what the published
    head was trained on.

    Args:
        folder: with ``policy_preprocessor.json``.
        schema: of the tenant; its normalisation modes must be the folder's.
        state_key / action_key: which statistics to take.

    Raises:
        ValueError: no such file or step, statistics that are missing (lists the keys that are there), or a mode or
            length that differs from the schema's.
    """
    path = Path(folder) / PREPROCESSOR
    if not path.is_file():
        raise ValueError(
            f"{folder}: no {PREPROCESSOR}; LeRobot policies from before processors are converted by "
            "python -m lerobot.processor.migrate_policy_normalization --pretrained-path ..."
        )
    steps = json.loads(path.read_text())["steps"]
    found = [step for step in steps if step.get("registry_name") == "normalizer_processor"]
    if len(found) != 1:
        raise ValueError(f"{path}: {len(found)} normalizer_processor steps, one is needed")
    step = found[0]
    stats: dict[str, dict[str, Tensor]] = {}
    if "state_file" in step:
        for flat, tensor in load_file(path.parent / step["state_file"]).items():
            key, _, statistic = flat.rpartition(".")
            stats.setdefault(key, {})[statistic] = tensor.float()
    internal = any(s.get("class") == _GRIPPER_CLASS for s in steps)

    def read(name: str, feature: FeatureType, key: str, mode: str, dim: int) -> NormalizationStats:
        if dim == 0:
            return NormalizationStats.identity(0)
        stored = step["config"]["norm_map"].get(feature.value, NormalizationMode.IDENTITY.value)
        setting = f"schema.{name}_normalization={mode!r}"
        if mode not in LEROBOT_MODES or LEROBOT_MODES[mode].value != stored:
            ours = next((m for m, theirs in LEROBOT_MODES.items() if theirs.value == stored), None)
            fix = f"set it to {ours}" if ours else f"choose one of {', '.join(LEROBOT_MODES)}"
            raise ValueError(f"{setting}: {path} normalises {feature.value} by {stored}; {fix}")
        identity = NormalizationStats.identity(dim)
        if not MODE_STATISTICS[mode]:
            return identity
        missing = [s for s in MODE_STATISTICS[mode] if s not in stats.get(key, {})]
        if missing:
            there = "; ".join(f"{k}: {', '.join(sorted(v))}" for k, v in sorted(stats.items())) or "none"
            raise ValueError(
                f"{setting}: {path} has no {' and '.join(missing)} for {key!r}; statistics there: {there}. "
                f"Choose the right set with {name}_key=..."
            )
        given = {s: stats[key][s].flatten() for s in MODE_STATISTICS[mode]}
        lengths = {len(tensor) for tensor in given.values()}
        if lengths != {dim}:
            raise ValueError(f"schema.{name}_dim={dim}: {path} has {key!r} statistics of {sorted(lengths)} dims")
        return replace(identity, **given)

    state = read("state", FeatureType.STATE, state_key, schema.state_normalization, schema.state_dim)
    action = read("action", FeatureType.ACTION, action_key, schema.action_normalization, schema.action_dim)
    # Identity has no statistics to convert: the head then predicts internal actions.
    native = not internal and bool(MODE_STATISTICS[schema.action_normalization])
    return Normalizer(schema, state, action.mapped(schema.to_internal) if native else action)


def _effective_stats(mode: str, offset: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """The statistics that give this offset and scale in LeRobot's formulas."""
    if mode == "identity":
        return {}
    values = (offset, scale) if mode == "mean_std" else (offset - scale, offset + scale)
    return {name: value.detach().cpu().clone() for name, value in zip(MODE_STATISTICS[mode], values, strict=True)}
