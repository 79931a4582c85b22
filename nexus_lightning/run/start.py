"""How a tenant is made, at the start of a run, while it lives and in the services: data, slot, start, admission."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nexus_lightning.backbone import Backbone
from nexus_lightning.checkpoint import read_payload
from nexus_lightning.config import TenantConfig, dataset_root, schema_of
from nexus_lightning.demonstrations import record_demonstrations
from nexus_lightning.memory import Admission, head_memory
from nexus_lightning.producers.demonstrations import dataset_stats, open_dataset
from nexus_lightning.schema import NormalizationStats, TenantSchema
from nexus_lightning.tenant import NonFiniteWeights, TenantSlot, TenantSpec, build_slot

#: Of states and of actions.
Stats = tuple[NormalizationStats, NormalizationStats]


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


def open_data(name: str, tenant: TenantConfig, data_dir: str) -> tuple[Any, Stats | None]:
    """A tenant's recorded dataset, opened, and its statistics; ``(None, None)`` for one without."""
    if tenant.dataset is None:
        return None, None
    schema = TenantSpec.compile(name, tenant, 0).schema
    dataset = open_dataset(tenant.dataset, schema, dataset_root(tenant, data_dir))
    return dataset, dataset_stats(dataset, tenant.dataset, schema)


def build_tenant(
    name: str,
    tenant: TenantConfig,
    run_seed: int,
    backbone: Backbone,
    admission: Admission,
    stats: Stats | None = None,
    start: Path | None = None,
) -> TenantSlot:
    """A fresh slot, admitted: its memory is reserved until ``admission.release(name)``.

    Args:
        name: of the tenant.
        tenant: validated.
        run_seed: the tenant's own seed follows from it and the name.
        backbone: shared.
        admission: of the run.
        stats: of its dataset.
        start: payload whose policy it begins with.

    Raises:
        ValueError: it does not fit into the memory that is left, or the payload is of another schema or backbone.
    """
    slot = build_slot(TenantSpec.compile(name, tenant, run_seed), backbone, *(stats or (None, None)))
    if start is not None:
        load_start(slot, start, backbone)
    admission.admit(name, head_memory(slot.head, slot.ema is not None, slot.critic).total_bytes)
    return slot


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
