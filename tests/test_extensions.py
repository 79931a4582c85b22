"""What a user adds from a folder of their own, without touching the package: the pages of docs/howto, as they stand."""

from __future__ import annotations

import copy
import csv
import importlib
import importlib.util
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT
from fakes import FakeBackbone
from hydra.utils import get_class
from test_cli import FAST
from test_cli import run as run_process

from nexus_lightning import trainer
from nexus_lightning.checkpoint import Payload, read_payload, resolve_payload
from nexus_lightning.config import (
    ConfigError,
    NexusConfig,
    compose_config,
    composition_error,
    lr_scheduler_of,
    optimizer_of,
    tenant_from_dict,
    validate,
)
from nexus_lightning.monitoring.loggers import CSV, build
from nexus_lightning.queues.jobs import JobState, Scheduler
from nexus_lightning.tenant import TenantSlot, TenantSpec, build_slot

PAGES = ("logger", "callback", "scheduler_policy", "optimizer")
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


def test_an_optimizer_and_a_schedule(run):
    payload = read_payload(resolve_payload(run[0] / "tenants" / "toy"))
    assert payload.optimizer["state"] and all(set(kept) == {"average"} for kept in payload.optimizer["state"].values())
    steps = payload.state["optimizer_steps"]
    factor = (10 / (steps + 1)) ** 0.5
    rates = [group["lr"] for group in payload.optimizer["param_groups"]]
    assert steps > 10 and rates == pytest.approx([1e-4 * factor, 3e-4 * factor]), "the critic's is the second"
    head = yaml.safe_load((run[0] / "config.yaml").read_text())["tenants"]["toy"]["head"]
    assert "grad_clip_norm" in head and not {"lr", "value_lr", "betas", "lr_schedule", "warmup_steps"} & head.keys()


def test_a_run_goes_on_with_its_optimizer_and_follows_changed_arguments(run, mine, tmp_path, monkeypatch):
    """Its rate and schedule may change, it itself not; nothing is written when that is refused."""
    old = shutil.copytree(run[0], tmp_path / "run")
    monkeypatch.setattr(trainer, "write_report", lambda run_dir: None)
    here = ["+tenants=[toy]", f"ckpt_path={old}", "tenants.toy.target_jobs=3", "tenants.toy.eval.episodes=0"]
    own = [word for word in command("optimizer") if "=" in word and not word.startswith("+tenants")]

    def resumed(*arguments: str) -> dict:
        config = composed(mine, *here, *arguments, "--config-dir", "mine")
        config.backbone = dict(FAKE)
        return trainer.train(config)

    before = read_payload(resolve_payload(old / "tenants" / "toy"))
    with pytest.raises(
        ConfigError, match=r"tenants\.toy\.optimizer\._target_=.*its moments are those of that optimizer"
    ):
        resumed("+optimizer@tenants.toy.optimizer=sgd", *own[1:])
    with pytest.raises(ConfigError, match="its moments are those of that optimizer"):
        resumed()
    constant = "+lr_scheduler@tenants.toy.lr_scheduler=constant"
    summary = resumed(own[0], "tenants.toy.optimizer.lr=1e-30", "tenants.toy.optimizer.value_lr=1e-30", constant)
    assert summary["tenants"]["toy"]["jobs_completed"] == 3
    after = read_payload(resolve_payload(old / "tenants" / "toy"))
    assert [group["lr"] for group in after.optimizer["param_groups"]] == [1e-30, 1e-30]
    assert all(torch.equal(value, before.tensors[name]) for name, value in after.tensors.items()), "with that rate"


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


# ------------------------------------------------------------------------------------------ optimizers and schedules


@pytest.mark.parametrize("optimizer", sorted(file.stem for file in (ROOT / "conf" / "optimizer").glob("*.yaml")))
@pytest.mark.parametrize("schedule", sorted(file.stem for file in (ROOT / "conf" / "lr_scheduler").glob("*.yaml")))
def test_a_slot_goes_on_to_the_bit_with_every_shipped_optimizer_and_schedule(compose, optimizer, schedule):
    for group, name in (("optimizer", optimizer), ("lr_scheduler", schedule)):
        assert f"`{name}`" in page("optimizer") or f"={name}`" in page("optimizer"), f"the page tells of {group}={name}"
    words = [
        f"+optimizer@tenants.toy_sft.optimizer={optimizer}",
        f"+lr_scheduler@tenants.toy_sft.lr_scheduler={schedule}",
    ]
    if schedule == "step":
        words += ["tenants.toy_sft.lr_scheduler.step_size=3"]
    config = compose("+tenants=[toy_sft]", *words)
    validate(config)
    spec = TenantSpec.compile("toy_sft", config.tenants["toy_sft"], 0)

    def fresh() -> TenantSlot:
        slot = build_slot(spec, FakeBackbone())
        slot.build_optimizer()
        return slot

    def step(slot: TenantSlot, count: int) -> None:
        for index in range(count):
            for p in slot.head.parameters():
                p.grad = torch.full_like(p, 0.1 * (index + 1))
            assert slot.optimizer is not None and slot.scheduler is not None
            slot.optimizer.step()
            slot.scheduler.step()

    unbroken, first = fresh(), fresh()
    step(unbroken, 5)
    step(unbroken, 5)
    step(first, 5)
    saved = json.loads(json.dumps(first.state()))
    payload = Payload(first.tensors(), first.optimizer_state(), saved, first.manifest({}, ""), Path(), first.rng.state)
    for go_on in (TenantSlot.restore, TenantSlot.resume):
        slot = fresh()
        go_on(slot, copy.deepcopy(payload))
        step(slot, 5)
        assert all(torch.equal(value, unbroken.tensors()[name]) for name, value in slot.tensors().items())
        assert slot.optimizer is not None and unbroken.optimizer is not None
        assert slot.optimizer.param_groups[0]["lr"] == unbroken.optimizer.param_groups[0]["lr"]
        assert slot.state() == unbroken.state()


def test_the_shipped_adamw_is_what_a_tenant_has_by_the_keys_of_its_head(compose):
    words = ["+optimizer@tenants.toy_sft.optimizer=adamw", "+lr_scheduler@tenants.toy_sft.lr_scheduler=cosine"]
    by_head, by_file = (compose("+tenants=[toy_sft]", *more).tenants["toy_sft"] for more in ([], words))
    assert optimizer_of(by_file) | {"value_lr": 1e-3, "betas": (0.9, 0.999)} == optimizer_of(by_head)
    assert lr_scheduler_of(by_file) == lr_scheduler_of(by_head)
    assert lr_scheduler_of(by_head)["total_steps"] == 20 * 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tenants.toy_sft.head.lr=0.1"], "tenants.toy_sft.head.lr=0.1: .*; write tenants.toy_sft.optimizer.lr=0.1"),
        (["tenants.toy_sft.head=flow_matching", "tenants.toy_sft.head.betas=[0,0]"], "write .*optimizer.betas=.0,0"),
        (
            ["+lr_scheduler@tenants.toy_sft.lr_scheduler=cosine", "tenants.toy_sft.head.lr_schedule=constant"],
            "head.lr_schedule=constant: .*; choose another file by .lr_scheduler@tenants.toy_sft.lr_scheduler=",
        ),
        (["tenants.toy_sft.optimizer.momentum=-1"], "ValueError: Invalid momentum value: -1"),
        (["tenants.toy_sft.optimizer.lr=null"], "tenants.toy_sft.optimizer.lr=None: a positive learning rate is requ"),
        (["tenants.toy_sft.optimizer.value_lr=-1"], "tenants.toy_sft.optimizer.value_lr=-1: a positive learning rate"),
        (["+tenants.toy_sft.optimizer.betas=[0,0]"], "optimizer.betas=.0, 0.: SGD has no such key"),
        (["tenants.toy_sft.optimizer._target_=torch.nn.Identity"], "Identity: is not a torch.optim.Optimizer"),
        (
            ["+tenants=[toy_sft,toy]", "+lr_scheduler@tenants.toy.lr_scheduler=one_cycle"],
            "tenants.toy.lr_scheduler=OneCycleLR: needs tenants.toy.target_jobs and jobs of a dataset",
        ),
        (
            [
                "+lr_scheduler@tenants.toy_sft.lr_scheduler=constant",
                "tenants.toy_sft.lr_scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau",
                "~tenants.toy_sft.lr_scheduler.warmup_steps",
            ],
            "ReduceLROnPlateau: needs a metric at every step",
        ),
    ],
)
def test_a_wrong_optimizer_or_schedule_is_told_before_anything_is_built(compose, arguments, expected):
    tenants = [] if arguments[0].startswith("+tenants=") else ["+tenants=[toy_sft]"]
    with pytest.raises(ConfigError) as error:
        validate(compose(*tenants, "+optimizer@tenants.toy_sft.optimizer=sgd", *arguments))
    assert len(error.value.problems) == 1 and re.search(expected, error.value.problems[0]), error.value


def test_rates_stand_in_one_place(compose):
    tenant = compose("+tenants=[toy_sft]").tenants["toy_sft"]
    config = compose("+tenants=[toy_sft]")
    config.tenants["toy_sft"].optimizer = {"_target_": "torch.optim.SGD", "lr": 0.1}
    with pytest.raises(ConfigError, match=r"tenants\.toy_sft\.head\.lr=0\.001: .*optimizer says it"):
        validate(config)
    recipe = tenant_from_dict({**asdict(tenant), "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1}}, "recipe")
    assert "lr" not in recipe.head and "lr_schedule" in recipe.head, "what a recipe's head file recommends"


# ----------------------------------------------------------------------------------- a folder with files of every kind


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """A head, a tenant that has it, and a logger; the head's class is one of the tests'."""
    folder = tmp_path_factory.mktemp("their conf,")  # as folders are named that nobody has thought of
    texts = {
        "head/linear.yaml": "_target_: example_head.LinearChunkHead\nlr: 0.02\nlr_schedule: constant\n",
        "tenant/robo.yaml": "defaults: [/tenant/toy_sft@_here_, _self_]\nhead: {_new_: {name: linear}}\n",
        "tenants/robo.yaml": "defaults: [/tenant@robo: robo, _self_]\n",
        "logger/twice.yaml": (
            "defaults: [csv, _self_]\nagain: {_target_: lightning.pytorch.loggers.CSVLogger, save_dir: x}\n"
        ),
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_run_takes_heads_tenants_and_loggers_from_a_folder(theirs, tmp_path):
    """train.py as it is called: an unknown head is told with the folder's own among the choices."""
    own = [
        f"--config-dir={theirs}",
        "+tenants=[robo]",
        f"output_dir={tmp_path}",
        f"data_dir={tmp_path}",
        "logger=twice",
    ]
    done = run_process("train.py", *own, "tenants.robo.head=linar", *FAST)
    assert done.returncode == 2 and "head=linar: no such head; did you mean linear?" in done.stderr
    config = compose_config(ROOT / "conf", own)
    validate(config)
    assert list(config.logger) == ["csv", "again"] and config.tenants["robo"].head["lr"] == 0.02
    assert config.tenants["robo"].dataset is not None and config.tenants["robo"].dataset.batch_size == 32, "toy_sft's"


def test_every_other_program_takes_the_folder(theirs, tmp_path, monkeypatch, capsys):
    def script(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        monkeypatch.setitem(sys.modules, spec.name, module := importlib.util.module_from_spec(spec))
        spec.loader.exec_module(module)
        return module

    models = script("models")
    flags = ["--config-dir", str(theirs)]
    (episode,) = script("play").main([*flags, "tenant=robo", "actions=zero"])
    assert episode["episode_length"] == 12
    script("collect_demos").main(["tenant=robo", f"root={tmp_path}/demos", "episodes=2", *flags])
    assert json.loads((tmp_path / "demos" / "meta" / "info.json").read_text())["total_episodes"] == 2
    assert models.main(["estimate", "+tenants=[robo]", "backbone=tiny", *flags]) == 0
    monkeypatch.setattr(sys, "argv", ["plan.py", "+tenants=[robo]", "backbone=tiny", *flags])
    assert script("plan").main() == 0
    assert capsys.readouterr().out.count("robo") >= 2
    with pytest.raises(SystemExit):
        models.main(["list", *flags])
    assert "list looks into conf/ alone" in capsys.readouterr().err
    head = "+head@registry.heads.linear.config=linear"
    done = run_process("scripts/serve.py", f"--config-dir={theirs}", head, "--cfg", "job")
    assert "example_head.LinearChunkHead" in done.stdout, done.stderr


def test_a_folder_that_is_not_there_is_told():
    with pytest.raises(ConfigError, match="--config-dir=nowhere: there is no such folder"):
        compose_config(ROOT / "conf", ["+tenants=[toy]", "--config-dir", "nowhere"])
