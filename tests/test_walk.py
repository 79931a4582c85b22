"""The walk of one job through the run's files, as docs/architecture.md tells it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from nexus_lightning import trainer
from nexus_lightning.run.callbacks import TenantCheckpoint
from nexus_lightning.run.loop import LeaseStream
from nexus_lightning.trainer import train

RUN = Path(trainer.__file__).parent / "run"


def test_one_job_passes_few_files(compose, monkeypatch):
    """From Lightning's question for a batch to the end of the job, on the actor's thread."""
    config = compose("+tenants=[toy_sft]", "trainer.enable_progress_bar=false")
    config.backbone = {"_target_": "fakes.FakeBackbone"}
    tenant = config.tenants["toy_sft"]
    tenant.eval, tenant.target_jobs = replace(tenant.eval, episodes=0), 3
    tenant.dataset.record.workers, tenant.dataset.record.episodes = 1, 3
    monkeypatch.setattr(trainer, "write_report", lambda run_dir: None)
    walks: list[list[str]] = []

    def follow(frame, event, argument):
        if event == "call" and Path(frame.f_code.co_filename).parent == RUN:
            walks[-1].append(Path(frame.f_code.co_filename).stem)

    following, ended = LeaseStream.__next__, TenantCheckpoint.on_train_batch_end

    def begin(self):
        walks.append(["loop"])
        sys.setprofile(follow)
        return following(self)

    def end(self, *arguments):
        ended(self, *arguments)
        sys.setprofile(None)

    monkeypatch.setattr(LeaseStream, "__next__", begin)
    monkeypatch.setattr(TenantCheckpoint, "on_train_batch_end", end)
    try:
        train(config)
    finally:
        sys.setprofile(None)
    job = walks[1]  # the first one starts the run, too
    order = list(dict.fromkeys(job))
    lease = {"loop", "tick", "schedule", "mailbox", "orders", "member", "leases"}
    assert order[0] == "loop" and set(order[: len(lease)]) == lease, order
    assert order[len(lease) :] == ["callbacks", "module", "update", "tenancy", "runtime"], order
