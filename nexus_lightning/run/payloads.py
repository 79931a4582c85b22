"""Tenants on disk: what is written of them, and what a Lightning checkpoint says about it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nexus_lightning.checkpoint import read_payload, write_payload
from nexus_lightning.run.member import Member, Shared
from nexus_lightning.tenant import TenantSlot


class Payloads:
    """Saves and restores the tenants of one run; rank 0 writes.

    Args:
        shared: of the run.
        fingerprint: of the backbone.
    """

    def __init__(self, shared: Shared, fingerprint: str) -> None:
        self.shared, self.fingerprint = shared, fingerprint
        self._sitting_out: dict[str, str] = {}  # payload folders of tenants that this run goes on without

    def save(self, member: Member) -> Path | None:
        """Write one tenant as it is now. Returns its folder; None on all ranks but the first.

        Raises:
            NonFiniteWeights: also of the optimizer's moments; nothing is written.
            OSError: of :func:`~nexus_lightning.checkpoint.write_payload`; the version still counts as not saved.
        """
        slot, shared = member.slot, self.shared
        tensors, optimizer = slot.tensors(), slot.optimizer_state()  # sharded ones are gathered: on every rank
        slot.check_finite(optimizer)
        before = member.saved
        if not shared.ranks.first:
            member.saved = (None, slot.policy_version)
            return None
        path = write_payload(
            shared.run_dir / "tenants",
            slot.name,
            slot.policy_version,
            tensors=tensors,
            optimizer=optimizer,
            rng=slot.rng.state,
            state=slot.state(),
            manifest=slot.manifest(shared.config.backbone, self.fingerprint),
            keep=shared.config.trainer.keep_payloads,
            pinned=[] if before is None else [before[1]],
            extra=_processor_files(slot),
        )
        member.saved = (str(path.relative_to(shared.run_dir)), slot.policy_version)
        return path

    def checkpoint_state(self, members: Mapping[str, Member], job_index: int) -> dict[str, Any]:
        """What Lightning's checkpoint says about the tenants (JSON-able; tensors are in the payloads)."""
        saved = {name: member.saved[0] for name, member in members.items() if member.saved is not None}
        return {
            "tenants": {**self._sitting_out, **saved},
            "scheduler": self.shared.scheduler.state_dict(),
            "job_index": job_index,
            "backbone_fingerprint": self.fingerprint,
        }

    def restore(self, saved: dict[str, Any], members: Mapping[str, Member]) -> None:
        """Members that the interrupted run had go on from their payloads; others start fresh.

        Raises:
            ValueError: the checkpoint is of another backbone, or a tenant's payload of another schema.
        """
        if saved["backbone_fingerprint"] != self.fingerprint:
            raise ValueError(
                "ckpt_path: the checkpoint was trained on another backbone (its fingerprint is "
                f"{saved['backbone_fingerprint'][:12]}, this one's {self.fingerprint[:12]}); set the same backbone"
            )
        self._sitting_out = {name: folder for name, folder in saved["tenants"].items() if name not in members}
        for name, member in members.items():
            if name not in saved["tenants"]:
                continue
            slot, folder = member.slot, saved["tenants"][name]
            slot.resume(read_payload(self.shared.run_dir / folder))
            member.saved = (folder, slot.policy_version)
            member.status.jobs, member.status.version = slot.jobs_completed, slot.policy_version


def _processor_files(slot: TenantSlot) -> dict[str, bytes]:
    """LeRobot's form of the normalisation, for tenants with a LeRobotDataset (others never load LeRobot)."""
    if slot.spec.config.dataset is None:
        return {}
    from nexus_lightning.processors import processor_files

    return processor_files(slot.normalizer, slot.spec.schema)
