"""Whole runs in this process on the toy simulator and a fake backbone: isolation, resume, quarantine, determinism."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from fakes import FakeBackbone
from fsspec import AbstractFileSystem

from models.heads.mlp import ChunkMLPHead
from nexus_lightning import checkpoint
from nexus_lightning.checkpoint import read_payload, resolve_payload, tensors_digest
from nexus_lightning.policy import load_policy
from nexus_lightning.producers.evaluation import summarise
from nexus_lightning.runtime import Runtime
from nexus_lightning.trainer import train

FAKE = {"_target_": "fakes.FakeBackbone"}


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory) -> Path:
    """Where toy demonstrations are recorded, once."""
    return tmp_path_factory.mktemp("toy_data")


@pytest.fixture
def toy(compose, toy_data):
    """``toy(tenants, overrides...)`` -> config of a short silent run on the fake backbone."""

    def build(*overrides: str):
        config = compose(*overrides, f"data_dir={toy_data}", "trainer.enable_progress_bar=false")
        config.backbone = dict(FAKE)
        for tenant in config.tenants.values():
            tenant.eval = replace(tenant.eval, episodes=4, every_n_jobs=None, at_start=False, video=False)
            tenant.target_jobs = 6
            if tenant.dataset is not None:
                tenant.dataset.record.workers = 1
                tenant.dataset.record.episodes = 6
        return config

    return build


def state_of(run_dir: str, tenant: str) -> tuple[str, str, dict]:
    """Digests of head and optimizer (with RNG), and the counters of a tenant's last payload."""
    payload = read_payload(resolve_payload(Path(run_dir) / "tenants" / tenant))
    moments = {f"{i}.{k}": torch.as_tensor(v) for i, s in payload.optimizer["state"].items() for k, v in s.items()}
    return tensors_digest(payload.tensors), tensors_digest({**moments, "rng": payload.rng}), payload.state["cursor"]


class NaNHead(ChunkMLPHead):
    """Loss becomes NaN in the third job (a test double)."""

    def loss(self, features, state, actions, is_pad):
        losses = super().loss(features, state, actions, is_pad)
        self.calls = getattr(self, "calls", 0) + 1
        return {k: v * float("nan") for k, v in losses.items()} if self.calls > 8 else losses


def test_alone_equals_interleaved_bit_for_bit(toy):
    together = toy("+tenants=[toy_sft]", "+tenant@tenants.other=toy_sft", "+tenant@tenants.third=toy")
    together.tenants["other"].head["lr"] = 0.01
    alone = toy("+tenants=[toy_sft]")
    a, b = train(together), train(alone)
    assert a["tenants"]["third"]["jobs_completed"] == a["tenants"]["other"]["jobs_completed"] == 6
    assert state_of(a["run_dir"], "toy_sft") == state_of(b["run_dir"], "toy_sft")
    assert state_of(a["run_dir"], "other")[0] != state_of(a["run_dir"], "toy_sft")[0]
    assert a["backbone_unchanged"] and b["backbone_unchanged"]


def test_alone_equals_beside_a_tenant_whose_loss_is_nan(toy):
    broken = toy("+tenants=[toy_sft]", "+tenant@tenants.broken=toy_sft")
    broken.tenants["broken"].head["_target_"] = f"{__name__}.NaNHead"
    a, b = train(broken), train(toy("+tenants=[toy_sft]"))
    assert "NonFiniteLoss" in a["tenants"]["broken"]["quarantined"]
    assert a["tenants"]["broken"]["jobs_completed"] == 2, "quarantined in its third job, before that optimizer step"
    assert a["tenants"]["toy_sft"]["quarantined"] is None and a["tenants"]["toy_sft"]["jobs_completed"] == 6
    assert state_of(a["run_dir"], "toy_sft") == state_of(b["run_dir"], "toy_sft")
    assert "NonFiniteLoss" in (Path(a["run_dir"]) / "errors" / "broken.txt").read_text()


def test_a_full_disk_ends_a_run_with_its_name_and_what_was_saved_goes_on(toy, monkeypatch):
    whole = train(toy("+tenants=[toy_sft]"))
    config, write_file, complete = (
        toy("+tenants=[toy_sft]", "trainer.checkpoint_every_n_jobs=2"),
        checkpoint._write_file,
        [],
    )

    def write(path, data):
        if complete:
            path.write_bytes(data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_file(path, data)
        complete.extend([path] if path.name.endswith("latest") else [])

    monkeypatch.setattr(checkpoint, "_write_file", write)
    with pytest.raises(
        OSError, match=r"'toy_sft' version 4 was not saved to .*No space left on device; v00000002 stays"
    ):
        train(config)
    monkeypatch.undo()
    run_dir = (Path(config.output_dir) / "latest").resolve()
    left = sorted(path.name for path in (run_dir / "tenants" / "toy_sft").iterdir())
    assert left == ["latest", "v00000002"] and [p.name for p in (run_dir / "checkpoints").iterdir()] == ["last.ckpt"]
    resumed = train(toy("+tenants=[toy_sft]", f"ckpt_path={run_dir}"))
    assert resumed["run_dir"] == str(run_dir) and state_of(run_dir, "toy_sft") == state_of(whole["run_dir"], "toy_sft")


def test_an_averaged_head_is_what_is_served_and_it_resumes(toy):
    """head.ema_decay: optimizer and payload keep both; evaluation, publication and load_policy use the average."""

    def build(*overrides):
        return toy("+tenants=[toy_sft]", "tenants.toy_sft.head.ema_decay=0.9", *overrides)

    whole = train(build())
    payload = read_payload(resolve_payload(Path(whole["run_dir"]) / "tenants" / "toy_sft"))
    trained = {k: v for k, v in payload.tensors.items() if k.startswith("head.")}
    averaged = {k.replace("ema.module.", "head."): v for k, v in payload.tensors.items() if k.startswith("ema.module.")}
    assert trained.keys() == averaged.keys() and tensors_digest(trained) != tensors_digest(averaged)
    assert int(payload.tensors["ema.n_averaged"]) == whole["tenants"]["toy_sft"]["optimizer_steps"]
    policy = load_policy(payload.path, FakeBackbone())
    served = {f"head.{k}": v for k, v in policy.slot.serving_head.state_dict().items()}
    assert tensors_digest(served) == tensors_digest(averaged)

    part = train(build("trainer.max_jobs=3"))
    rest = train(build(f"ckpt_path={part['run_dir']}"))
    assert state_of(rest["run_dir"], "toy_sft") == state_of(whole["run_dir"], "toy_sft")
    plain = state_of(train(toy("+tenants=[toy_sft]"))["run_dir"], "toy_sft")
    assert plain[1] == state_of(whole["run_dir"], "toy_sft")[1], "the average changes nothing in training"


def test_a_killed_simulator_takes_out_its_tenant_alone(toy):
    """E2: the run goes on without the tenant, which says what happened; no bare EOFError."""
    config = toy("+tenants=[toy_sft]", "+tenant@tenants.doomed=toy")
    doomed = config.tenants["doomed"]
    doomed.environment.inline, doomed.environment.num_envs, doomed.target_jobs = False, 1, 100_000

    def kill():
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            for process in multiprocessing.active_children():
                if process.name.startswith("simulator-doomed"):
                    time.sleep(1)
                    os.kill(process.pid, signal.SIGKILL)
                    return
            time.sleep(0.1)

    killer = threading.Thread(target=kill)
    killer.start()
    summary = train(config)
    killer.join()
    reason = summary["tenants"]["doomed"]["quarantined"]
    assert reason.startswith("SimulatorDied") and "doomed" in reason, reason
    assert summary["tenants"]["toy_sft"]["jobs_completed"] == 6 and summary["tenants"]["toy_sft"]["eval"]["n"] == 4
    alone = train(toy("+tenants=[toy_sft]"))
    assert state_of(summary["run_dir"], "toy_sft") == state_of(alone["run_dir"], "toy_sft")


@pytest.mark.parametrize("tenant", ["toy_sft", "toy"])
def test_resume_equals_the_unbroken_run(toy, tenant):
    def config(**changes):
        built = toy(f"+tenants=[{tenant}]")
        built.tenants[tenant].max_in_flight = 1  # for RL: every rollout acts with the version before it
        built.trainer.max_jobs = changes.get("max_jobs")
        built.ckpt_path = changes.get("ckpt_path")
        return built

    unbroken = train(config())
    stopped = train(config(max_jobs=3))
    assert stopped["tenants"][tenant]["jobs_completed"] == 3
    resumed = train(config(ckpt_path=stopped["run_dir"]))
    assert resumed["run_dir"] == stopped["run_dir"], "a resumed run goes on in its own folder"
    assert resumed["tenants"][tenant]["jobs_completed"] == 6
    assert state_of(resumed["run_dir"], tenant) == state_of(unbroken["run_dir"], tenant)


def test_ckpt_path_last_is_the_newest_run(toy):
    first = train(toy("+tenants=[toy_sft]", "trainer.max_jobs=2"))
    again = toy("+tenants=[toy_sft]", "ckpt_path=last")
    assert train(again)["run_dir"] == first["run_dir"]


def test_relative_folders_work(toy, tmp_path, monkeypatch):
    """The defaults are `outputs` and `data` in the working directory."""
    monkeypatch.chdir(tmp_path)
    config = toy("+tenants=[toy_sft]", "trainer.checkpoint_every_n_jobs=2", "output_dir=outputs")
    config.data_dir = "data"
    recipe = toy("+tenants=[toy_sft]").tenants["toy_sft"]
    config.tenants["toy_sft"].init_from.recipe = asdict(recipe)
    first = train(config)
    assert (tmp_path / "outputs" / "latest").resolve() == Path(first["run_dir"])
    assert list((tmp_path / "data" / "payloads").glob("*/tenants/start/latest"))
    config.ckpt_path, config.tenants["toy_sft"].target_jobs = "last", 8
    assert train(config)["tenants"]["toy_sft"]["jobs_completed"] == 8


def test_an_evaluation_ends_while_a_payload_is_written(toy, monkeypatch):
    """It belongs to the next one; the payload is read back and compared with what was to be saved."""
    save, verify, runs = Runtime.save_payload, checkpoint._verify, []
    episode = {"task": "t", "instruction": "t", "seed": 0, "success": True, "success_at_end": True}
    result = summarise("toy_sft", 0, [{**episode, "episode_return": 1.0, "episode_length": 3}])

    def saving(runtime, slot):
        runs.append(runtime)
        return save(runtime, slot)

    def verifying(*arguments):
        thread = threading.Thread(target=runs[-1].record_evaluation, args=(result, None))
        thread.start()
        thread.join()
        verify(*arguments)

    monkeypatch.setattr(Runtime, "save_payload", saving)
    monkeypatch.setattr(checkpoint, "_verify", verifying)
    run = train(toy("+tenants=[toy_sft]", "trainer.max_jobs=1"))
    payload = read_payload(resolve_payload(f"{run['run_dir']}/tenants/toy_sft"))
    assert len(payload.state["evaluations"]) < len(runs[-1].slots["toy_sft"].evaluations)


def test_an_evaluation_that_is_due_comes_before_the_next_rollout(toy):
    """Both use the tenant's simulators, and a simulator may remember what was played before: one order, every time."""
    config = toy("+tenants=[toy]", "tenants.toy.max_in_flight=1", "tenants.toy.max_policy_staleness=0")
    config.tenants["toy"].eval = replace(config.tenants["toy"].eval, every_n_jobs=2)
    summary = train(config)
    events = [json.loads(line) for line in (Path(summary["run_dir"]) / "events.jsonl").read_text().splitlines()]
    spans = sorted((e["start_s"], e["kind"]) for e in events if e.get("service") == "environment")
    rollouts = ["rollout", "rollout"]
    assert [kind for _, kind in spans] == [*rollouts, "eval", *rollouts, "eval", *rollouts, "eval"]
    kept = read_payload(resolve_payload(Path(summary["run_dir"]) / "tenants" / "toy")).state["evaluations"]
    assert [evaluation["policy_version"] for evaluation in kept] == [2, 4, 6], "each once, the last one too"


def test_the_checkpoint_holds_no_weights_and_no_backbone(toy, monkeypatch):
    """Nor does writing it stop what other threads write (see LocalCheckpointIO)."""
    transaction = property(lambda self: pytest.fail("a transaction belongs to the whole process"))
    monkeypatch.setattr(AbstractFileSystem, "transaction", transaction)
    run_dir = Path(train(toy("+tenants=[toy_sft]"))["run_dir"])
    checkpoint = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["state_dict"] == {} and checkpoint["optimizer_states"] == []
    payload = read_payload(run_dir / checkpoint["nexus"]["tenants"]["toy_sft"])
    assert all(name.startswith(("head.", "normalizer.")) for name in payload.tensors)


def test_the_run_folder_holds_what_users_look_for(toy):
    run = train(toy("+tenants=[toy,toy_sft]"))
    run_dir = Path(run["run_dir"])
    for name in ("summary.json", "report.html", "report.png", "metrics.csv", "config.yaml", "events.jsonl"):
        assert (run_dir / name).stat().st_size > 0, name
    summary = json.loads((run_dir / "summary.json").read_text())
    for name, tenant in summary["tenants"].items():
        assert tenant["policy_version"] == tenant["jobs_completed"] == 6, name
        assert set(tenant["eval"]) >= {"success_rate", "n", "ci_low", "ci_high"} and tenant["eval"]["n"] == 4
    assert summary["backbone_unchanged"] is True
    assert summary["jobs_by_state"]["completed"] == 12
    assert 0 < summary["utilisation"]["actor"] <= 1 and 0 < summary["utilisation"]["inference"] <= 1
    latest = run_dir.parent / "latest"
    assert latest.is_symlink() and latest.resolve() == run_dir.resolve()


def test_demonstration_frames_pass_the_backbone_once(toy, toy_data):
    run = train(toy("+tenants=[toy_sft]"))
    info = next(toy_data.glob("demos/*/meta/info.json"))
    assert run["backbone_rows"]["demonstrations"]["toy_sft"] == json.loads(info.read_text())["total_frames"]
    assert run["backbone_rows"]["actor"] == 0, "the actor reuses the cached features"
    assert run["backbone_passes_per_observation"]["toy_sft"] == 1.0
    again = train(toy("+tenants=[toy_sft]", "tenants.toy_sft.features.reuse=never"))
    rows = 6 * 32 * toy("+tenants=[toy_sft]").tenants["toy_sft"].dataset.batches_per_job
    assert again["backbone_rows"]["actor"] == rows and again["backbone_rows"]["demonstrations"]["toy_sft"] == 0
    assert again["backbone_passes_per_observation"]["toy_sft"] > 1.5


def test_a_start_from_another_schema_or_backbone_is_refused(toy):
    run = train(toy("+tenants=[toy_sft]"))
    config = toy("+tenants=[toy]", f"tenants.toy.init_from.path={run['run_dir']}/tenants/toy_sft")
    with pytest.raises(ValueError, match=r"tenants\.toy\.init_from.*another schema.*state_normalization"):
        train(config)
    config.tenants["toy"].schema.state_normalization = "mean_std"
    config.backbone["seed"] = 1
    with pytest.raises(ValueError, match="another backbone"):
        train(config)
