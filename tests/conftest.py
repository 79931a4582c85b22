"""Shared fixtures: the real conf/, shrunk; leak checks; a fake backbone for unit tests."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MUJOCO_GL", "osmesa")


#: Files that take a minute and more. Several workers take whole files, so these go first: none is left over at the end.
LONG_FILES = (
    "test_cli.py",
    "test_zoo.py",
    "test_ranks.py",
    "test_ray.py",
    "test_serve.py",
    "test_torchrun.py",
    "test_learning.py",
    "test_sweeps.py",
    "test_learning_report.py",
    "test_bench.py",
    "test_bench_placement.py",
    "test_awr.py",
    "test_runs.py",
)


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))  # stable: the others stay in their order


@pytest.fixture(scope="session", autouse=True)
def _few_threads():
    """Two cores at most: intra-op threads of several processes would fight for them."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_leaks(request):
    """A test that leaves simulator processes, non-daemon threads or environment variables behind fails."""
    before = set(os.environ)
    yield
    if request.node.get_closest_marker("sim") is None:
        left = [p for p in multiprocessing.active_children() if p.name.startswith("simulator-")]
        assert not left, f"simulator processes left behind: {left}"
    threads = [t for t in threading.enumerate() if t.name.startswith("producer-") and t.is_alive()]
    assert not threads, f"producer threads left behind: {threads}"
    added = {k for k in set(os.environ) - before if k.startswith(("NEXUS_", "WANDB_RUN"))}
    assert not added, f"environment variables left behind: {added}"


@pytest.fixture
def compose(tmp_path):
    """``compose(*overrides)`` -> validated-able NexusConfig from the real conf/, writing under tmp_path."""
    from nexus_lightning.config import compose_config

    def build(*overrides: str):
        own = [f"output_dir={tmp_path}/outputs", f"data_dir={tmp_path}/data", "logger=csv"]
        return compose_config(ROOT / "conf", [*own, *overrides])

    return build


@pytest.fixture
def fake_backbone():
    from fakes import FakeBackbone

    return FakeBackbone()
