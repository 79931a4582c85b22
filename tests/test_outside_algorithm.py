"""Algorithms of a folder outside the repository: those of docs/howto/algorithm.md, by the command line that stands
there and on two ranks."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from dist.launch import run_ranks

from nexus_lightning.checkpoint import read_manifest, resolve_payload
from nexus_lightning.config import compose_config
from nexus_lightning.trainer import train

HOWTO = ROOT / "docs" / "howto" / "algorithm.md"
RUN = (
    "+tenants=[toy,toy_sft]",
    "backbone._target_=fakes.FakeBackbone",
    *(f"~backbone.{key}" for key in ("pretrained", "blind", "cached_instructions")),
    "logger=csv",
    "trainer.enable_progress_bar=false",
    *(f"tenants.{t}.{s}" for t in ("toy", "toy_sft") for s in ("target_jobs=2", "max_in_flight=1", "eval.episodes=0")),
    "tenants.toy.algorithm=rloo",
    "tenants.toy.environment.num_envs=4",
    "tenants.toy.algorithm.group_size=2",
    "tenants.toy_sft.algorithm=margin",
    "tenants.toy_sft.algorithm.margin=0.1",
    "tenants.toy_sft.dataset.record.workers=1",
    "tenants.toy_sft.dataset.record.episodes=4",
)


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> Path:
    """The files of the how-to page."""
    folder = tmp_path_factory.mktemp("mine")
    blocks = re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', HOWTO.read_text(), re.DOTALL)
    for name, text in blocks:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def play(folder: Path, mine: str) -> str:
    """On each of two ranks: the run, composed with the folder on Hydra's search path."""
    sys.path.insert(0, mine)
    places = [f"output_dir={folder}/outputs", f"data_dir={folder}/data", "run_name=two"]
    config = compose_config(ROOT / "conf", [*RUN, *places, f"hydra.searchpath=[file://{mine}/conf]"])
    return train(config)["run_dir"]


def columns(run_dir: str | Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    with (Path(run_dir) / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value:
                    found.setdefault(name, []).append(float(value))
    return found


def test_algorithms_of_a_folder_outside_train_on_one_rank_and_on_two(mine, tmp_path):
    places = [f"output_dir={tmp_path}/outputs", f"data_dir={tmp_path}/data", "run_name=one"]
    path = os.pathsep.join([str(mine), str(ROOT / "tests"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "train.py", "--config-dir", f"{mine}/conf", *RUN, *places],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run_dir = Path(done.stdout.strip().splitlines()[-1])
    one = columns(run_dir)
    assert len(one["train/toy_sft/loss"]) == 2 and all(v > 0 for v in one["train/toy_sft/loss"])
    manifest = read_manifest(resolve_payload(run_dir / "tenants" / "toy_sft"))
    assert manifest["config"]["algorithm"] == {"_target_": "mine.Margin", "margin": 0.1}

    two = columns(run_ranks("test_outside_algorithm:play", 2, tmp_path, str(mine))[0])
    for metric in ("loss", "outside_share", "largest_error", "steps"):
        name = f"train/toy_sft/{metric}"
        assert two[name] == pytest.approx(one[name], rel=1e-4), f"{name}: every rank's rows, each once"
    rows = 4 * 32  # of a job, with chunks of two steps, the last of which may lie beyond the episode
    assert all(rows < steps <= 2 * rows for steps in one["train/toy_sft/steps"]), "summed over minibatches"
    assert max(one["train/toy_sft/largest_error"]) > max(one["train/toy_sft/loss"])
    name = next(name for name in one if name.endswith("toy/best_return"))
    assert two[name][:1] == pytest.approx(one[name][:1], rel=1e-4), "of the first rollout: the larger of two ranks'"
    assert len(one["train/toy/loss"]) == 2
