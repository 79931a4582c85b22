"""What a tenant starts from: demonstrations that are recorded first, and another payload's policy."""

from __future__ import annotations

from pathlib import Path

from nexus_lightning.backbone import Backbone
from nexus_lightning.checkpoint import read_payload
from nexus_lightning.config import TenantConfig, dataset_root, schema_of
from nexus_lightning.demonstrations import record_demonstrations
from nexus_lightning.schema import TenantSchema
from nexus_lightning.tenant import NonFiniteWeights, TenantSlot


def record_dataset(name: str, tenant: TenantConfig, data_dir: str) -> None:
    """Record one tenant's dataset with its scripted expert unless it exists."""
    dataset = tenant.dataset
    if dataset is None or dataset.record is None:
        return
    root = dataset_root(tenant, data_dir)
    assert root is not None and tenant.environment is not None
    if (root / "meta" / "info.json").is_file():
        return
    print(f"recording {dataset.record.episodes} demonstrations for {name} in {root}", flush=True)
    record_demonstrations(
        simulator=tenant.environment.simulator,
        expert=dataset.record.expert,
        root=root,
        episodes=dataset.record.episodes,
        first_seed=dataset.record.first_seed,
        schema=schema_of(tenant.schema),
        workers=dataset.record.workers,
        repo_id=dataset.repo_id,
        inline=tenant.environment.inline,
        random_share=dataset.record.random_share,
        keep_failures=dataset.record.keep_failures,
        tenant=name,
    )


def load_start(slot: TenantSlot, path: Path, backbone: Backbone) -> None:
    """Head and normaliser of a payload become the slot's start; optimizer, counters and random state stay fresh.

    Raises:
        ValueError: the payload is of another schema or another backbone, or its weights are not finite.
    """
    payload = read_payload(path)
    where = f"tenants.{slot.name}.init_from: payload {path}"
    changed = TenantSchema(**payload.manifest["schema"]).differences(slot.spec.schema)
    if changed:
        raise ValueError(f"{where} has another schema; it differs in {'; '.join(changed)}")
    if payload.manifest["backbone_fingerprint"] != backbone.fingerprint:
        raise ValueError(f"{where} was trained on another backbone; set the backbone it names in its manifest.json")
    slot.start_from(payload.tensors)
    try:
        slot.check_finite()
    except NonFiniteWeights as error:
        raise ValueError(f"{where} cannot be started from: {error}; choose an earlier version") from None
