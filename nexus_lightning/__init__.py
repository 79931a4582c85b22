"""Multi-tenant post-training of vision-language-action policies on one frozen backbone, the Lightning way."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nexus_lightning.backbone import Backbone, VLAFeature
    from nexus_lightning.checks import check_backbone, check_head
    from nexus_lightning.environment import Simulator, check_tenant_env
    from nexus_lightning.head import ActionHead
    from nexus_lightning.run.module import MultiTenantModule
    from nexus_lightning.schema import TenantSchema
    from nexus_lightning.trainer import NexusTrainer, train

__version__ = "0.1.0"

_HOMES = {
    "ActionHead": "head",
    "Backbone": "backbone",
    "MultiTenantModule": "run.module",
    "NexusTrainer": "trainer",
    "Simulator": "environment",
    "TenantSchema": "schema",
    "VLAFeature": "backbone",
    "check_backbone": "checks",
    "check_head": "checks",
    "check_tenant_env": "environment",
    "train": "trainer",
}
__all__ = [
    "ActionHead",
    "Backbone",
    "MultiTenantModule",
    "NexusTrainer",
    "Simulator",
    "TenantSchema",
    "VLAFeature",
    "check_backbone",
    "check_head",
    "check_tenant_env",
    "train",
]


def __getattr__(name: str) -> object:
    # simulator processes import only what they need: nothing heavy before it is asked for
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
