"""Features of a rollout travel with it: decided per tenant, counted per observation.

The backbone is frozen, so the feature that a decision was taken on is the feature that training needs. With reuse, the
actor never runs the backbone for a rollout; without, it encodes the rollout's observations once more per job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from tensordict import TensorDict

from nexus_lightning.backbone import Backbone, VLAFeature, compact
from nexus_lightning.memory import feature_bytes, gigabytes
from nexus_lightning.schema import TenantSchema
from nexus_lightning.tenant import TenantSlot

#: Length of the instruction that the estimate of a feature's size assumes.
PROBE_INSTRUCTION = "pick up the alphabet soup and place it in the basket"


@dataclass(frozen=True)
class ReusePlan:
    """Whether a tenant's rollouts keep their features.

    Attributes:
        reuse: the decision.
        bytes_per_decision: of the compact feature of one observation.
        reason: for the banner.
    """

    reuse: bool
    bytes_per_decision: int
    reason: str


def full_precision(batch: TensorDict) -> TensorDict:
    """Make the ``features`` of a minibatch (stored compactly, or in the backbone's dtype) float32, as heads see them.

    In place: a minibatch is a TensorDict of its own, and a copy of it would cost as much as the conversion.
    """
    batch["features"] = cast(VLAFeature, batch["features"]).for_head()
    return batch


def plan_reuse(slot: TenantSlot, backbone: Backbone, budget_bytes: int) -> ReusePlan:
    """Decide for one RL tenant: the features of all rollouts in flight must fit into its training queue budget.

    Raises:
        ValueError: ``features.reuse=always`` and not even one rollout's features fit.
    """
    config = slot.spec.config
    assert config.algorithm is not None and config.environment is not None
    assert config.algorithm.chunks_per_job is not None, "validated with the config"
    size = probe_bytes(slot, backbone)
    rollout = size * config.environment.num_envs * config.algorithm.chunks_per_job
    needed = rollout * config.max_in_flight
    what = f"{gigabytes(size)} per decision, {gigabytes(needed)} in flight"
    mode = config.features.reuse
    if mode == "always" and rollout > budget_bytes:
        raise ValueError(
            f"tenants.{slot.name}.features.reuse=always: the features of one rollout need {gigabytes(rollout)}, "
            f"queues.training.max_gb_per_tenant allows {gigabytes(budget_bytes)}; raise it or use auto"
        )
    if mode == "never":
        return ReusePlan(False, size, "never")
    if mode == "auto" and needed > budget_bytes:
        return ReusePlan(False, size, f"auto: {what}, more than {gigabytes(budget_bytes)}")
    return ReusePlan(True, size, f"{mode}: {what}")


def probe_bytes(slot: TenantSlot, backbone: Backbone) -> int:
    """Bytes of one compact feature of this tenant (black images, an instruction of usual length)."""
    schema, spec = slot.spec.schema, slot.head.feature_spec
    feature = backbone(blank_observation(schema), [PROBE_INSTRUCTION], schema, (spec.kind,)).select(spec)
    return feature_bytes(compact(feature))


def blank_observation(schema: TenantSchema) -> TensorDict:
    """Black images, ``[1]``."""
    size = (1, 3, schema.image_size, schema.image_size)
    images = {camera: torch.zeros(size, dtype=torch.uint8) for camera in schema.cameras}
    return TensorDict({"image": TensorDict(images, [1])} if images else {}, [1])


def in_row_order(decisions: list[VLAFeature], num_envs: int) -> torch.Tensor:
    """Where each row of a flattened rollout ``[N * L]`` lies in the concatenated decisions ``[L * N]``.

    Example:
        >>> in_row_order([None] * 3, num_envs=2).tolist()   # rollout rows: env 0 steps 0, 1, 2, then env 1
        [0, 2, 4, 1, 3, 5]
    """
    return torch.arange(len(decisions) * num_envs).view(len(decisions), num_envs).t().flatten()
