"""What a user adds from a folder of their own, without touching the package: the pages of docs/howto, as they stand."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from hydra.utils import get_class

from nexus_lightning import trainer
from nexus_lightning.config import ConfigError, NexusConfig, compose_config, composition_error, validate
from nexus_lightning.monitoring.loggers import CSV, build
from nexus_lightning.queues.jobs import JobState, Scheduler

PAGES = ("logger", "callback", "scheduler_policy")
FAKE = {"_target_": "fakes.FakeBackbone"}


def page(name: str) -> str:
    return (ROOT / "docs" / "howto" / f"{name}.md").read_text()


def files(name: str) -> dict[str, str]:
    """Path -> text of every code block that has a title."""
    return dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', page(name), re.MULTILINE | re.DOTALL))


def command(name: str) -> list[str]:
    """What the page's call of ``train.py`` passes on."""
    (line,) = re.findall(r"^PYTHONPATH=mine python train\.py (.+)$", page(name), re.MULTILINE)
    return shlex.split(line)


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> Iterator[Path]:
    """The folder that the pages describe, importable as ``PYTHONPATH=mine`` makes it."""
    folder = tmp_path_factory.mktemp("user") / "mine"
    for name in PAGES:
        for path, text in files(name).items():
            target = folder.parent / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder
    for file in folder.glob("*.py"):
        sys.modules.pop(file.stem, None)
    importlib.invalidate_caches()


def composed(mine: Path, *arguments: str) -> NexusConfig:
    out = [f"output_dir={mine.parent}/outputs", f"data_dir={mine.parent}/data", "trainer.enable_progress_bar=false"]
    words = [str(mine) if word == "mine" else word for word in arguments]
    return compose_config(ROOT / "conf", [*out, *words])


@pytest.mark.parametrize("name", PAGES)
def test_the_command_of_every_page_is_valid(mine, name):
    validate(composed(mine, *command(name)))


@pytest.fixture(scope="module")
def run(mine) -> tuple[Path, str]:
    """One run with everything that the pages add: its folder, and what it printed."""
    arguments = list(dict.fromkeys(word for name in PAGES for word in command(name)))
    config = composed(mine, *arguments, "tenants.toy.target_jobs=2", "tenants.toy.eval.episodes=0")
    config.backbone = dict(FAKE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "write_report", lambda run_dir: None)
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: printed.append(" ".join(map(str, words))))
        summary = trainer.train(config)
    assert summary["tenants"]["toy"]["jobs_completed"] == 2
    return Path(summary["run_dir"]), "\n".join(printed)


def test_a_logger_of_ones_own_beside_another_one(run):
    rows = [json.loads(line) for line in (run[0] / "metrics.jsonl").read_text().splitlines()]
    with (run[0] / "metrics.csv").open(newline="") as file:
        same = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    assert [{"step": row.pop("job"), **row} for row in rows] == [pytest.approx(row) for row in same]
    assert sum("train/toy/loss" in row and "toy/step" in row for row in rows) == 2


def test_a_callback_and_a_profiler(run):
    told = re.findall(r"[\d.]+ s for (\d+) samples of toy", run[1])
    assert told == ["96", "96"], "once per job"
    assert "[Strategy]SingleDeviceStrategy.batch_to_device" in (run[0] / "fit-profile.txt").read_text()
    assert yaml.safe_load((run[0] / "config.yaml").read_text())["profiler"]["dirpath"] == "{run_dir}"


def test_a_scheduler_policy(run, mine):
    """Turns in place of priorities and shares; its notes survive a resume, and unknown arguments are told."""
    assert yaml.safe_load((run[0] / "config.yaml").read_text())["queues"]["training"]["policy"]["in_flight"] == 1

    def scheduler(state: dict | None = None) -> Scheduler:
        new = Scheduler(policy=get_class("round_robin.RoundRobin")(in_flight=3))
        for name, priority in (("a", 1), ("b", 0), ("c", 0)):
            new.register(name, "sft", priority=priority, weight=1 + priority, max_in_flight=2 + 2 * priority)
        if state is not None:
            new.load_state_dict(json.loads(json.dumps(state)))
        for name in "aaabbc":
            if (job := new.reserve(name, sample_count=8)) is not None:
                new.mark(job.job_id, JobState.READY)
        return new

    def trained(scheduler: Scheduler, count: int) -> str:
        jobs = [scheduler.lease_next(dict.fromkeys("abc", 0), 0, 60) for _ in range(count)]
        return "".join(scheduler.complete(job.job_id).tenant_id for job in jobs if job is not None)

    first = scheduler()
    assert [first.bound(name) for name in "abc"] == [3, 2, 2], "max_in_flight bounds every policy"
    assert trained(first, 2) == "ab"
    state = first.state_dict()
    assert trained(first, 9) == "caba"
    assert trained(scheduler(state), 3) == "cab", "c has had no turn, a's is longest ago"

    with pytest.raises(ConfigError) as error:
        validate(composed(mine, *command("scheduler_policy"), "+queues.training.policy.turns=3"))
    assert error.value.problems == [
        "queues.training.policy.turns=3: RoundRobin has no such key; valid keys: in_flight",
    ]


# ---------------------------------------------------------------------------------------- loggers, callbacks, profilers


@pytest.mark.parametrize("group", ["logger", "callbacks", "profiler"])
def test_every_shipped_file_names_a_class_and_its_arguments(compose, group):
    for file in sorted((ROOT / "conf" / group).glob("*.yaml")):
        config = compose("+tenants=[toy]", f"{group}={file.stem}")
        try:
            validate(config)
        except ConfigError as error:
            (problem,) = error.problems
            package = file.stem
            assert problem == f"{group}.{package}: package {package} is missing; pip install {package}"
        nodes = getattr(config, group)
        assert not nodes if file.stem == "none" else nodes
    assert compose("+tenants=[toy]").logger == CSV


def test_several_loggers_and_a_debug_profile(compose):
    config = compose("+tenants=[toy]", "logger=[csv,wandb,tensorboard]", "debug=profiler", "logger.wandb.mode=disabled")
    assert list(config.logger) == ["csv", "wandb", "tensorboard"] and config.logger["wandb"]["mode"] == "disabled"
    assert config.profiler["_target_"].endswith("SimpleProfiler") and config.trainer.max_jobs == 20


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["logger=wandb", "logger.mode=online"], "logger.mode='online': must be .*; write logger.wandb.mode=online"),
        (["logger.kind=csv"], "logger.kind='csv': must be a mapping with `_target_`; name a file of conf/logger"),
        (["logger=wandb", "logger.wandb.mode=on"], "logger.wandb.mode='on': choose one of offline, online, disabled"),
        (["logger=wandb", "logger.wandb.project=null"], "logger.wandb.project: missing: name the W&B project"),
        (["logger.csv.dir=3"], "logger.csv.dir=3: RunCSVLogger has no such key; did you mean run_dir"),
        (["profiler=simple", "+profiler.lines=3"], "profiler.lines=3: SimpleProfiler has no such key"),
        (["+profiler._target_=fakes.FakeBackbone"], "is not a lightning.pytorch.profilers.profiler.Profiler"),
        (["logger=tensorbord"], "logger=tensorbord: no such logger; did you mean tensorboard"),
        (
            ["+callbacks.best._target_=lightning.pytorch.callbacks.ModelCheckpoint"],
            "callbacks.best=ModelCheckpoint: a run saves its tenants itself; see trainer.checkpoint_every_n_jobs",
        ),
        (
            ["+callbacks.bar._target_=lightning.pytorch.callbacks.RichProgressBar"],
            "callbacks.bar=RichProgressBar: a run has its own; see trainer.enable_progress_bar",
        ),
        (["+callbacks.x._target_=mine.Nowhere"], "callbacks.x._target_=mine.Nowhere: cannot be imported"),
    ],
)
def test_what_cannot_work_is_told_before_anything_is_built(compose, arguments, expected):
    arguments = ["+tenants=[toy]", *arguments]
    with pytest.raises(Exception) as error:
        validate(compose(*arguments))
    found = composition_error(error.value, ROOT / "conf", arguments)
    assert any(re.search(expected, line) for line in found.problems), found


def test_a_missing_package_of_a_logger_names_its_install_line(compose, monkeypatch):
    find = importlib.util.find_spec
    gone = ("wandb", "mlflow", "tensorboard", "tensorboardX")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in gone else find(name, *a))
    with pytest.raises(ConfigError) as error:
        validate(compose("+tenants=[toy]", "logger=[wandb,mlflow,tensorboard]"))
    assert error.value.problems == [
        "logger.wandb: package wandb is missing; pip install 'nexus-lightning[wandb]'",
        "logger.mlflow: package mlflow is missing; pip install mlflow",
        "logger.tensorboard: package tensorboard is missing; pip install tensorboard",
    ]


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_loggers_of_packages_that_may_be_missing(compose, tmp_path, name):
    pytest.importorskip(name)
    config = compose("+tenants=[toy]", f"logger={name}")
    (logger,) = [build(node, tmp_path / "run", "run") for node in config.logger.values()]
    logger.log_hyperparams(asdict(config))
    logger.log_metrics({"train/toy/loss": 0.5}, 3)
    logger.finalize("success")
    assert any(tmp_path.rglob("*"))


def test_the_places_of_a_run_are_filled_in_at_any_depth(tmp_path):
    node = {"_target_": "builtins.dict", "uri": "file:{run_dir}/x", "deep": {"names": ["{run_name}", 3]}}
    assert build(node, tmp_path, "r") == {"uri": f"file:{tmp_path}/x", "deep": {"names": ["r", 3]}}


def test_the_pages_name_what_there_is():
    for group, name in (("logger", "logger"), ("callbacks", "callback"), ("profiler", "callback")):
        for file in (ROOT / "conf" / group).glob("*.yaml"):
            assert file.stem in page(name), f"docs/howto/{name}.md does not tell of {group}={file.stem}"
