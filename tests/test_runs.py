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

import numpy as np
import pytest
import torch
import yaml
from fakes import FakeBackbone
from fsspec import AbstractFileSystem

from envs.toy import ToySimulator
from models.heads.mlp import ChunkMLPHead
from nexus_lightning import checkpoint
from nexus_lightning.checkpoint import Payload, list_payloads, read_payload, resolve_payload, tensors_digest
from nexus_lightning.config import ConfigError
from nexus_lightning.policy import load_policy
from nexus_lightning.resume import changed_settings
from nexus_lightning.run.mailbox import Evaluated
from nexus_lightning.run.payloads import Payloads
from nexus_lightning.tenant import NonFiniteWeights, TenantSpec, build_slot
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


class RootHead(ChunkMLPHead):
    """A finite loss whose gradient is not: the root of 0, from the ninth minibatch on (a test double)."""

    def loss(self, features, state, actions, is_pad):
        losses = super().loss(features, state, actions, is_pad)
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 8:
            losses["loss"] = losses["loss"] + (0 * next(self.parameters())).sum().sqrt()
        return losses


@pytest.mark.parametrize("clip", ["null", "1.0"])
def test_a_gradient_that_is_not_finite_is_not_stepped_with(toy, clip):
    """Two kept payloads and the published head held NaN; the loss was finite all the time."""
    setting = f"tenants.broken.head.grad_clip_norm={clip}"
    broken = toy("+tenants=[toy_sft]", "+tenant@tenants.broken=toy_sft", setting, "trainer.checkpoint_every_n_jobs=1")
    broken.tenants["broken"].head["_target_"] = f"{__name__}.RootHead"
    a, b = train(broken), train(toy("+tenants=[toy_sft]"))
    reason = a["tenants"]["broken"]["quarantined"]
    assert reason.startswith("NonFiniteGradient: tenant 'broken', optimizer step 8: the gradient of head.")
    assert a["tenants"]["broken"]["jobs_completed"] == a["tenants"]["broken"]["policy_version"] == 2
    payload = read_payload(resolve_payload(Path(a["run_dir"]) / "tenants" / "broken"))
    assert payload.manifest["policy_version"] == 2, "the last good one"
    assert all(tensor.isfinite().all() for tensor in payload.tensors.values())
    assert state_of(a["run_dir"], "toy_sft") == state_of(b["run_dir"], "toy_sft")


class SlowHead(ChunkMLPHead):
    """Takes its time (a test double)."""

    def loss(self, features, state, actions, is_pad):
        time.sleep(0.03)
        return super().loss(features, state, actions, is_pad)


def test_a_job_longer_than_its_lease_ends_once(toy):
    """The lease ran out while the job trained and its tenant was quarantined after its weights were published."""
    config = toy("+tenants=[toy_sft,toy]", "+tenant@tenants.proximal=toy", "queues.training.lease_deadline_s=0.02")
    config.tenants["toy_sft"].head["_target_"] = f"{__name__}.SlowHead"
    config.tenants["proximal"].algorithm.proximal = True
    summary = train(config)
    for name, tenant in summary["tenants"].items():
        assert tenant["quarantined"] is None, (name, tenant["quarantined"])
        assert tenant["jobs_completed"] == tenant["policy_version"] == 6
    assert summary["jobs_by_state"] == dict.fromkeys(summary["jobs_by_state"], 0) | {"completed": 18}
    usual = toy("+tenants=[toy_sft]")
    usual.tenants["toy_sft"].head["_target_"] = f"{__name__}.SlowHead"
    assert state_of(summary["run_dir"], "toy_sft") == state_of(train(usual)["run_dir"], "toy_sft")


class OverflowingHead(ChunkMLPHead):
    """A weight that no gradient warns of is infinite after the last minibatch of the third job (a test double)."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.extra, self.calls = torch.nn.Parameter(torch.zeros(1)), 0

    def loss(self, features, state, actions, is_pad):
        losses = super().loss(features, state, actions, is_pad)
        losses["loss"] = losses["loss"] + 0 * self.extra.sum()
        self.calls += 1
        if self.calls == 12:
            self.extra.data.fill_(float("inf"))
        return losses


def test_weights_that_are_not_finite_are_neither_published_nor_saved(toy):
    config = toy("+tenants=[toy_sft]", "+tenant@tenants.broken=toy_sft", "trainer.checkpoint_every_n_jobs=1")
    config.tenants["broken"].head["_target_"] = f"{__name__}.OverflowingHead"
    a, b = train(config), train(toy("+tenants=[toy_sft]"))
    broken = a["tenants"]["broken"]
    assert broken["quarantined"].startswith("NonFiniteWeights: tenant 'broken', optimizer step 12: head.extra")
    assert broken["policy_version"] == broken["jobs_completed"] == 2, "the third job was not counted"
    payload = read_payload(resolve_payload(Path(a["run_dir"]) / "tenants" / "broken"))
    assert payload.manifest["policy_version"] == 2 and float(payload.tensors["head.extra"]) == 0
    assert state_of(a["run_dir"], "toy_sft") == state_of(b["run_dir"], "toy_sft")

    slot = load_policy(payload.path, FakeBackbone()).slot
    slot.head.extra.data.fill_(float("nan"))
    with pytest.raises(NonFiniteWeights, match="tenant 'broken'"):
        slot.check_finite()
    slot.head.extra.data.zero_()
    moments = {0: {"step": torch.tensor(3.0), "exp_avg_sq": torch.tensor([float("inf")])}}
    with pytest.raises(NonFiniteWeights, match=r"optimizer\.0\.exp_avg_sq"):
        slot.check_finite({"state": moments, "param_groups": []})


class LateToy(ToySimulator):
    """FAKE. From its third step on (the expert needs two) it gives one wrong value, see ``wrong``."""

    def __init__(self, wrong, **arguments):
        super().__init__(**arguments)
        self.wrong = wrong

    def step(self, action):
        result = super().step(action)
        if self._steps > 2 and self.wrong == "reward":
            result.reward = float("nan")
        return result

    def observe(self):
        seen = super().observe()
        if self._steps > 2 and self.wrong == "state":
            seen["state"] = seen["state"][:1]
        if self._steps > 2 and self.wrong == "image":
            seen["image"] = {"camera": seen["image"]["camera"] / np.float32(255)}
        return seen


def test_a_simulator_that_breaks_its_contract_costs_its_own_tenant_only(toy):
    """In rollouts, in the evaluations of tenants that learn from data, and while these are recorded."""
    config = toy(
        "+tenants=[toy_sft]",
        "+tenant@tenants.watched=toy_sft",
        "+tenant@tenants.offline=toy_offline",
        "+tenant@tenants.rolled=toy",
        "+tenant@tenants.recorded=toy_offline",
    )
    config.tenants["offline"].dataset.record.random_share = 0.0  # else it breaks while it is recorded
    wrong = {"watched": "reward", "offline": "state", "rolled": "image", "recorded": "reward"}
    for name, what in wrong.items():
        simulator = config.tenants[name].environment.simulator
        config.tenants[name].environment.simulator = {
            **simulator,
            "_target_": f"{__name__}.LateToy",
            "wrong": what,
        }
    summary = train(config)
    tenants = json.loads((Path(summary["run_dir"]) / "summary.json").read_text())["tenants"]
    assert tenants["toy_sft"]["quarantined"] is None and tenants["toy_sft"]["jobs_completed"] == 6
    assert tenants["toy_sft"]["eval"]["n"] == 4
    says = {
        "watched": "reward: nan: expected one finite number",
        "offline": "state_dim=4: the simulator gives float32 (1,), expected float32 (4,)",
        "rolled": "image 'camera' is float32 (3, 32, 32), expected uint8 (3, 32, 32), as at the start",
        "recorded": "reward: nan: expected one finite number",
    }
    for name, words in says.items():
        reason = tenants[name]["quarantined"]
        assert f"tenant '{name}': simulator 0 ({__name__}.LateToy) broke its contract: {words}" in reason
        assert tenants[name]["eval"] is None
        assert reason in (Path(summary["run_dir"]) / "errors" / f"{name}.txt").read_text()
    assert tenants["watched"]["jobs_completed"] == 6, "it was evaluated after its training"
    assert tenants["recorded"]["jobs_completed"] == 0


def test_a_full_disk_ends_a_run_with_its_name_and_what_was_saved_goes_on(toy, monkeypatch):
    whole = train(toy("+tenants=[toy_sft]"))
    config, flush, flushed = toy("+tenants=[toy_sft]", "trainer.checkpoint_every_n_jobs=2"), checkpoint.fsync_folder, []

    def flush_once(folder):
        if flushed:
            (folder / "head.safetensors").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(folder)
        flushed.append(folder)

    monkeypatch.setattr(checkpoint, "fsync_folder", flush_once)
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


def test_a_resume_takes_the_settings_it_is_given_or_refuses_them(toy, capsys):
    """Refused: all at once, by name, nothing written. Followed: from the next step on, with the moments kept."""
    stopped = train(toy("+tenants=[toy_sft]", "trainer.max_jobs=3", "tenants.toy_sft.head.lr_schedule=constant"))
    run_dir = Path(stopped["run_dir"])
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != "run.lock"}

    wrong = toy("+tenants=[toy_sft]", f"ckpt_path={run_dir}", "seed=7", "tenants.toy_sft.head.hidden_dim=32")
    wrong.tenants["toy_sft"].schema.control_hz = 20.0
    wrong.tenants["toy_sft"].dataset.batch_size = 16
    wrong.tenants["toy_sft"].dataset.record.episodes = 7
    wrong.tenants["toy_sft"].environment.simulator["horizon"] = 9
    wrong.backbone["seed"] = 1
    with pytest.raises(ConfigError) as error:
        train(wrong)
    assert sorted(line.split(": the run in ")[0] for line in error.value.problems) == [
        "backbone.seed=1",
        "seed=7",
        "tenants.toy_sft.dataset.batch_size=16",
        "tenants.toy_sft.dataset.record.episodes=7",
        "tenants.toy_sft.environment.simulator.horizon=9",
        "tenants.toy_sft.head.hidden_dim=32",
        "tenants.toy_sft.schema.control_hz=20.0",
    ]
    assert "has 64, and its weights are those of that head; set that, or start a new run" in str(error.value)
    after = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != "run.lock"}
    assert after == before, "nothing is written"

    settings = ["lr=1e-30", "value_lr=3e-30", "weight_decay=0.5", "betas=[0.8,0.95]", "warmup_steps=15"]
    other = toy(*("+tenants=[toy_sft]", f"ckpt_path={run_dir}", *(f"tenants.toy_sft.head.{s}" for s in settings)))
    other.tenants["toy_sft"].head["lr_schedule"], other.tenants["toy_sft"].target_jobs = "constant", 4
    capsys.readouterr()
    assert train(other)["tenants"]["toy_sft"]["jobs_completed"] == 4
    told = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed with other settings"))
    for change in ("head.lr: 0.001 -> 1e-30", "head.betas: [0.9, 0.999] -> [0.8, 0.95]", "target_jobs: 6 -> 4"):
        assert f"tenants.toy_sft.{change}" in told
    assert "trainer.max_jobs: 3 -> null" in told and "ckpt_path" not in told
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["tenants"]["toy_sft"]["head"]["lr"] == 1e-30
    old, new = (read_payload(path) for path in list_payloads(run_dir / "tenants" / "toy_sft")[-2:])
    for name, value in old.tensors.items():
        assert torch.equal(value, new.tensors[name]), f"{name}: no step was taken with the rate of before"
    for index, group in enumerate(new.optimizer["param_groups"]):
        assert group["lr"] == group["initial_lr"] == (1e-30, 3e-30)[index], "16 steps are done: the warm-up is over"
        assert tuple(group["betas"]) == (0.8, 0.95) and group["weight_decay"] == 0.5
    assert {float(moments["step"]) for moments in new.optimizer["state"].values()} == {16.0}


def test_a_schedule_stands_where_the_completed_steps_put_it(toy):
    slots = {}
    for name, settings in (("same", {}), ("other", {"lr": 0.2, "lr_schedule": "constant", "warmup_steps": 9})):
        config = toy("+tenants=[toy_sft]", "tenants.toy_sft.head.warmup_steps=2").tenants["toy_sft"]
        config.head |= settings
        slots[name] = build_slot(TenantSpec.compile("toy_sft", config, 0), FakeBackbone())
    slot = build_slot(slots["same"].spec, FakeBackbone())
    for each in (slot, *slots.values()):
        each.build_optimizer()
    for _ in range(5):
        for p in slot.head.parameters():
            p.grad = torch.ones_like(p)
        slot.optimizer.step()
        slot.scheduler.step()
    saved = slot.state(), slot.optimizer_state()
    manifest = {"schema": asdict(slot.spec.schema)}
    for each in slots.values():
        each.resume(Payload(slot.tensors(), saved[1], saved[0], manifest, Path(), slot.rng.state))
    same, other = slots["same"], slots["other"]
    assert same.state() == saved[0]
    assert same.optimizer.state_dict()["param_groups"] == saved[1]["param_groups"], "to the last bit"
    assert [g["lr"] for g in other.optimizer.param_groups] == pytest.approx([0.2 * 6 / 10, 1e-3 * 6 / 10])
    for each in slots.values():
        for p, moments in each.optimizer.state.items():
            assert p.shape == moments["exp_avg"].shape and moments["step"] == 5
    other.scheduler.step()
    assert other.optimizer.param_groups[0]["lr"] == pytest.approx(0.2 * 7 / 10)


@pytest.mark.parametrize(
    ("tenant", "change", "reason"),
    [
        ("toy", "algorithm.gamma=0.5", None),
        ("toy", "algorithm.epochs=2", None),
        ("toy", "eval.episodes=3", None),
        ("toy", "environment.simulator.horizon=9", None),
        ("toy", "environment.num_envs=4", "its data cursor counts jobs of that size"),
        ("toy", "algorithm.chunks_per_job=8", "its data cursor counts jobs of that size"),
        ("toy", "algorithm.name=reinforce", "its optimizer and counters are of that work"),
        ("toy", "task=sft", "its optimizer and counters are of that work"),
        ("toy", "seed=5", "its random streams go on"),
        ("toy_sft", "seed=5", "its random streams go on"),
        ("toy_sft", "head.grad_clip_norm=5", None),
        ("toy_sft", "head.ema_decay=0.5", "its average of the weights"),
        ("toy_sft", "head.kind=pooled", "its weights are those of that head"),
        ("toy_sft", "dataset.root=/data", "its data cursor counts in that dataset"),
        ("toy_sft", "dataset.record.workers=1", None),
        ("toy_sft", "init_from.path=/payload", "its start is over"),
        ("toy_sft", "environment.num_envs=4", None),
        ("toy_sft", "features.reuse=never", None),
        ("toy_sft", "weight=3", None),
    ],
)
def test_what_may_change_between_two_runs_of_a_tenant(compose, tmp_path, tenant, change, reason):
    """A tenant that the checkpoint does not name is not compared: it is new."""
    run_dir, saved = tmp_path / "run", compose("+tenants=[toy,toy_sft]")
    spec = TenantSpec.compile(tenant, saved.tenants[tenant], saved.seed)
    manifest = {"format": checkpoint.FORMAT, "config": asdict(spec.config), "seed": spec.seed}
    manifest["config"] |= {"gone": 3}  # by another version of the program
    (run_dir / "payload").mkdir(parents=True)
    (run_dir / "payload" / "manifest.json").write_text(json.dumps(manifest))
    (run_dir / "config.yaml").write_text(yaml.safe_dump(asdict(saved)))
    torch.save({"nexus": {"tenants": {tenant: "payload"}}}, run_dir / "last.ckpt")
    mate = "toy" if tenant == "toy_sft" else "toy_sft"
    config = compose("+tenants=[toy,toy_sft]", f"tenants.{tenant}.{change}", f"tenants.{mate}.head.hidden_dim=8")
    if reason is None:
        (line,) = changed_settings(config, run_dir, run_dir / "last.ckpt")
        assert line.startswith(f"tenants.{tenant}.{change.split('=')[0]}: ")
        assert changed_settings(saved, run_dir, run_dir / "last.ckpt") == []
        return
    with pytest.raises(ConfigError) as error:
        changed_settings(config, run_dir, run_dir / "last.ckpt")
    (line,) = error.value.problems
    key = change.split("=")[0].replace("algorithm.name", "algorithm._target_")  # the short name of a class
    assert line.startswith(f"tenants.{tenant}.{key}=") and reason in line


def test_a_tenant_that_comes_back_has_its_jobs_done(toy):
    def config(*names: str, target: int = 6, **settings: str):
        built = toy("+tenants=[toy_sft]", *(f"+tenant@tenants.{n}=toy_sft" for n in names))
        built.ckpt_path = settings.get("ckpt_path")
        for tenant in built.tenants.values():
            tenant.target_jobs, tenant.eval.episodes = target, 0
        return built

    first = train(config("other", target=2))
    run_dir = first["run_dir"]
    ended = state_of(run_dir, "other")
    train(config(target=3, ckpt_path=run_dir))
    back = train(config("other", target=2, ckpt_path=run_dir))
    assert back["tenants"]["other"]["jobs_completed"] == 2 and state_of(run_dir, "other") == ended


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


def test_an_evaluation_that_ends_while_a_payload_is_written_belongs_to_the_next_one(toy, monkeypatch):
    """The evaluator's thread posts it; the payload is read back and compared with what was to be saved."""
    save, verify, saving = Payloads.save, checkpoint._verify, []
    episode = {"task": "t", "instruction": "t", "seed": 0, "success": True, "success_at_end": True}
    result = Evaluated("toy_sft", 0, [{**episode, "episode_return": 1.0, "episode_length": 3}], None)

    def saved(payloads, member):
        saving.append((payloads.shared.mailbox, member))
        return save(payloads, member)

    def verifying(*arguments):
        thread = threading.Thread(target=saving[-1][0].post, args=(result,))
        thread.start()
        thread.join()
        verify(*arguments)

    monkeypatch.setattr(Payloads, "save", saved)
    monkeypatch.setattr(checkpoint, "_verify", verifying)
    run = train(toy("+tenants=[toy_sft]", "trainer.max_jobs=2", "trainer.checkpoint_every_n_jobs=1"))
    states = [read_payload(f"{run['run_dir']}/tenants/toy_sft/v0000000{v}").state for v in (1, 2)]
    kept = [[e["policy_version"] for e in state["evaluations"]] for state in states]
    assert kept == [[], [0]], "not in the payload that was being written, in the next one"


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
