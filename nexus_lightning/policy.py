"""A trained policy from a payload folder alone: no run, no queues, no optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from tensordict import TensorDict
from torch import Tensor

from nexus_lightning.backbone import Backbone
from nexus_lightning.checkpoint import MANIFEST_KEYS, read_payload, resolve_payload, write_payload
from nexus_lightning.config import TenantConfig, saved_tenant
from nexus_lightning.images import fit_observation
from nexus_lightning.schema import Normalizer, TenantSchema
from nexus_lightning.tenant import TenantSlot, TenantSpec, build_slot


@dataclass
class Policy:
    """Backbone + one tenant's head at one version.

    Example:
        >>> policy = load_policy("outputs/latest/tenants/libero")                  # doctest: +SKIP
        >>> actions = policy(observation, ["pick up the milk and place it in the basket"])  # doctest: +SKIP
    """

    backbone: Backbone
    slot: TenantSlot
    manifest: dict[str, Any]
    path: Path

    @property
    def schema(self) -> TenantSchema:
        return self.slot.spec.schema

    @property
    def config(self) -> TenantConfig:
        return self.slot.spec.config

    @torch.no_grad()
    def __call__(self, observation: TensorDict, instructions: Sequence[str]) -> Tensor:
        """Deterministic chunk in the simulator's own convention.

        Args:
            observation: ``[B]`` with ``("image", <camera>)`` ``[B, 3, H, W]``, uint8 or float in [0, 1], of any size,
                and ``state`` ``[B, S]`` float32.
            instructions: B strings.

        Returns:
            ``[B, T, A]`` float32, un-normalised, native gripper sign.
        """
        observation = fit_observation(observation, self.schema)
        spec = self.slot.head.feature_spec
        features = self.backbone(observation, instructions, self.schema, (spec.kind,)).select(spec).for_head()
        state = self.slot.normalizer.normalize_state(observation["state"])
        chunk = self.slot.serving_head.act(features, state)["chunk"]
        return self.schema.to_native(self.slot.normalizer.unnormalize_action(chunk))


def payload_tenant(path: str | Path) -> TenantConfig:
    """The configuration a payload was trained with; no backbone is built."""
    payload = read_payload(resolve_payload(Path(path)))
    return saved_tenant(payload.manifest["config"], f"{payload.path}/manifest.json config")


def load_policy(path: str | Path, backbone: Backbone | None = None) -> Policy:
    """Payload (or exported policy) folder -> :class:`Policy` in eval mode.

    Args:
        path: a version folder, or a tenant folder (its latest version).
        backbone: an already built one; None builds the one named in the manifest.

    Raises:
        ValueError: the backbone here is not the one the payload was trained on.
    """
    payload = read_payload(resolve_payload(Path(path)))
    manifest = payload.manifest
    if backbone is None:
        backbone = instantiate(manifest["backbone"])
    assert isinstance(backbone, Backbone)
    if backbone.fingerprint != manifest["backbone_fingerprint"]:
        raise ValueError(
            f"payload {payload.path}: trained on backbone {manifest['backbone_fingerprint'][:12]}, "
            f"this one is {backbone.fingerprint[:12]}; use the same weights, dtype and settings"
        )
    config = saved_tenant(manifest["config"], f"{payload.path}/manifest.json config")
    spec = TenantSpec(manifest["tenant"], config, TenantSchema(**manifest["schema"]), manifest["seed"])
    if spec.schema.signature != manifest["signature"]:
        raise ValueError(f"payload {payload.path}: its schema does not match its signature; the manifest was edited")
    slot = build_slot(spec, backbone)
    slot.load_tensors(payload.tensors)
    slot.serving_head.eval()
    slot.policy_version = manifest["policy_version"]
    return Policy(backbone, slot, manifest, payload.path)


def export_policy(path: str | Path, out: str | Path) -> Path:
    """Copy a payload without its optimizer, schedule and random state: what serving needs and no more.

    The folder ``processors`` in it holds the normalisation as LeRobot's own pipelines
    (``DataProcessorPipeline.from_pretrained`` loads them).

    Returns:
        ``<out>/<tenant>/v<version>``, written atomically and verified like any payload.
    """
    from nexus_lightning.processors import processor_files  # imports LeRobot, which takes seconds

    payload = read_payload(resolve_payload(Path(path)))
    schema = TenantSchema(**payload.manifest["schema"])
    normalizer = Normalizer(schema)
    prefix = "normalizer."
    normalizer.load_state_dict({k.removeprefix(prefix): v for k, v in payload.tensors.items() if k.startswith(prefix)})
    keep = {*MANIFEST_KEYS, "backbone", "seed", "normalization"}
    return write_payload(
        Path(out),
        payload.tenant,
        payload.version,
        tensors=payload.tensors,
        optimizer={"state": {}, "param_groups": []},
        state={"exported_from": payload.manifest["created"]},
        manifest={k: v for k, v in payload.manifest.items() if k in keep},
        extra=processor_files(normalizer, schema),
    )
