"""For tests of the services: a Master on the toy simulator, a toy tenant, a short workload, its state as digests."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeBackbone
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from models.heads.mlp import ChunkMLPHead
from nexus_lightning.backbone import Backbone
from nexus_lightning.checkpoint import tensors_digest
from nexus_lightning.services.master import Master
from nexus_lightning.services.spec import ServeConfig, register_serve_config, to_serve_config

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = {
    "cameras": ["camera"],
    "image_size": 32,
    "state_dim": 4,
    "action_dim": 2,
    "chunk": 2,
    "execute": 2,
    "control_hz": 10.0,
    "action_convention": "absolute",
    "rotation": "none",
    "gripper": "none",
    "privileged": ["target_action"],
}
JOBS = 4


class NaNHead(ChunkMLPHead):
    """Loss becomes NaN in the second job (a test double)."""

    def loss(self, features, state, actions, is_pad):
        losses = super().loss(features, state, actions, is_pad)
        self.calls = getattr(self, "calls", 0) + 1
        return {k: v * float("nan") for k, v in losses.items()} if self.calls > 4 else losses


def make_config(folder: Path, data: Path, *overrides: str, keep_backbone: bool = False) -> ServeConfig:
    """The real conf/serve.yaml, shrunk, on the fake backbone (unless told to keep the configured one)."""
    register_serve_config()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = hydra_compose(
            "serve",
            overrides=[
                f"output_dir={folder}/outputs",
                f"data_dir={data}",
                "registry.datasets.toy.config.record.episodes=6",
                "+registry.datasets.toy.config.record.workers=1",
                *overrides,
            ],
        )
    config = to_serve_config(cfg)
    if not keep_backbone:
        config.backbone = {"_target_": "fakes.FakeBackbone"}
    return config


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory) -> Path:
    """Where toy demonstrations are recorded, once."""
    return tmp_path_factory.mktemp("served_toy_data")


@pytest.fixture
def serve_config(tmp_path, toy_data):
    """``serve_config(*overrides)``: see :func:`make_config`."""
    return lambda *overrides, **options: make_config(tmp_path, toy_data, *overrides, **options)


@contextmanager
def running(config: ServeConfig, backbone: Backbone | None = None):
    """The master with its loop in a thread; stopped at the end, and what the loop raised is raised here."""
    master, raised = Master(config, backbone or FakeBackbone()), []

    def run() -> None:
        try:
            master.run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="master")
    thread.start()
    try:
        yield master
    finally:
        master.stop()
        thread.join(120)
    assert not thread.is_alive() and not raised, raised


@pytest.fixture
def serving(serve_config):
    """``with serving(*overrides) as master:``"""
    return lambda *overrides: running(serve_config(*overrides))


def toy_spec(**changes: Any) -> dict[str, Any]:
    head = {"name": "mlp", "hidden_dim": 32, "lr": 1e-3, "lr_schedule": "constant"}
    return {"name": "toy", "schema": dict(SCHEMA), "head": head, "seed": 3, **changes}


def toy_sft(**changes: Any) -> dict[str, Any]:
    return {"task": "sft", "dataset": {"name": "toy"}, "target_jobs": JOBS, "eval": {"episodes": 0}, **changes}


class Ending:
    """An ``on_end`` that can be waited for."""

    def __init__(self) -> None:
        self.ended, self.value = threading.Event(), {}

    def __call__(self, value: dict[str, Any]) -> None:
        assert not self.ended.is_set(), "on_end was called twice"
        self.value = value
        self.ended.set()

    def wait(self, timeout_s: float = 60.0) -> dict[str, Any]:
        assert self.ended.wait(timeout_s), "the workload has not ended"
        return self.value


def state_of(master: Master, tenant: str) -> dict[str, Any]:
    """Everything of a tenant that another one must not change, as digests and numbers."""
    slot = master.runtime.slots[tenant]
    assert slot.optimizer is not None
    state = slot.optimizer.state_dict()["state"]
    moments = {f"{i}.{k}": torch.as_tensor(v) for i, entries in state.items() for k, v in entries.items()}
    return {
        "tensors": tensors_digest(slot.tensors()),
        "optimizer": tensors_digest(moments),
        "rng": tensors_digest({"rng": slot.rng.state}),
        "counters": (slot.policy_version, slot.jobs_completed, slot.optimizer_steps, slot.cursor),
    }


def losses_of(master: Master, tenant: str) -> list[float]:
    return [row["metrics"]["train/loss"] for row in master.metrics(tenant) if "train/loss" in row["metrics"]]
