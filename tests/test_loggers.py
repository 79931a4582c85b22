"""CSV that survives resume, W&B offline with the real client."""

import csv
import importlib.util
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import yaml

from nexus_lightning.monitoring.loggers import RunCSVLogger, close_loggers, logger_problems, make_loggers


def _rows(run_dir: Path) -> list[dict]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_is_exactly_metrics_csv_and_takes_new_keys(tmp_path):
    (logger,) = make_loggers({"kind": "csv"}, tmp_path, "run", {"tenants": {"a": {}}})
    logger.log_metrics({"train/a/loss": torch.tensor(0.5), "time_s": 1.0}, step=0)
    assert _rows(tmp_path) == [{"step": "0", "time_s": "1.0", "train/a/loss": "0.5"}]  # written through
    logger.log_metrics({"eval/a/success_rate": 1.0, "time_s": 2.0}, step=1)
    close_loggers([logger])
    rows = _rows(tmp_path)
    assert list(rows[0]) == ["step", "time_s", "eval/a/success_rate", "train/a/loss"]
    assert (
        [r["step"] for r in rows] == ["0", "1"] and rows[0]["train/a/loss"] == "0.5" and rows[1]["train/a/loss"] == ""
    )
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.csv"]


def test_csv_resume_keeps_the_old_rows(tmp_path):
    first = RunCSVLogger(tmp_path)
    first.log_metrics({"train/a/loss": 0.5}, step=0)
    first.log_metrics({"train/a/loss": 0.4}, step=1)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("2,0.")  # killed inside a write

    resumed = RunCSVLogger(tmp_path)
    resumed.log_metrics({"train/a/loss": 0.3}, step=2)
    resumed.log_metrics({"train/b/loss": 9.0}, step=3)
    resumed.finalize("success")
    rows = _rows(tmp_path)
    assert [r["step"] for r in rows] == ["0", "1", "2", "3"]
    assert [r["train/a/loss"] for r in rows] == ["0.5", "0.4", "0.3", ""]


def test_csv_resume_of_a_file_torn_in_its_header(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,train/a")
    logger = RunCSVLogger(tmp_path)
    logger.log_metrics({"train/a/loss": 0.5}, step=0)
    assert _rows(tmp_path) == [{"step": "0", "train/a/loss": "0.5"}]


def test_csv_from_a_trainer_and_many_threads(tmp_path):
    from lightning.pytorch import Trainer

    logger = RunCSVLogger(tmp_path)
    trainer = Trainer(logger=logger, accelerator="cpu", enable_progress_bar=False, enable_checkpointing=False)
    assert trainer.logger is logger and Path(logger.log_dir).resolve() == tmp_path.resolve()

    def write(tenant):
        for step in range(20):
            logger.log_metrics({f"train/{tenant}/loss": 1.0}, step=step)

    threads = [threading.Thread(target=write, args=(f"t{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = _rows(tmp_path)
    assert len(rows) == 60 and all(sum(r[f"train/t{i}/loss"] == "1.0" for r in rows) == 20 for i in range(3))


def test_none_builds_nothing(tmp_path):
    assert make_loggers({"kind": "none"}, tmp_path, "run", {}) == []
    close_loggers([])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": "tensorboard"}, "logger.kind='tensorboard': choose one of csv, wandb, none"),
        ({"kind": "csv", "project": "x"}, "logger.project: unknown key for kind=csv"),
        ({"kind": "wandb", "project": "x", "mode": "on"}, "logger.mode='on': choose one of offline"),
        ({"kind": "wandb", "project": None}, "logger.project: missing"),
    ],
)
def test_bad_configs_are_named(tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        make_loggers(config, tmp_path, "run", {})


@pytest.mark.parametrize("name", ["csv", "wandb", "none"])
def test_shipped_configs_are_valid(name):
    config = yaml.safe_load((Path(__file__).parent.parent / f"conf/logger/{name}.yaml").read_text())
    assert config["kind"] == name
    if name != "wandb" or importlib.util.find_spec("wandb"):
        assert logger_problems(config) == []


WANDB_SCRIPT = """
import sys
from pathlib import Path
from nexus_lightning.monitoring.loggers import close_loggers, make_loggers

run_dir = Path(sys.argv[1])
config = {"seed": 0, "tenants": {"libero": {"task": "sft"}, "toy": {"task": "rl"}}}
for attempt in range(2):
    loggers = make_loggers({"kind": "wandb", "project": "p", "mode": "offline", "tags": ["t"]}, run_dir, "r", config)
    (logger,) = loggers
    assert (run_dir / "wandb_run_id.txt").read_text().strip() == logger.version, "written before training"
    logger.log_metrics({"train/libero/loss": 0.5, "libero/step": attempt, "time_s": 1.0}, step=attempt)
    logger.add_tenant("late")
    close_loggers(loggers)
try:
    make_loggers({"kind": "wandb", "project": "p", "mode": "online"}, run_dir / "other", "r", config)
except ValueError as error:
    print("refused:", error)
"""


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_wandb_offline_resumes_under_one_id_without_network_or_prompt(tmp_path):
    run_dir = tmp_path / "run"
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.01)
        # Anything that called home would knock here.
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        env |= {"HOME": str(tmp_path), "PYTHONPATH": ".", "WANDB_BASE_URL": address, "HTTPS_PROXY": address}
        command = [sys.executable, "-c", WANDB_SCRIPT, str(run_dir)]
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        with pytest.raises(TimeoutError):
            server.accept()
    run_id = (run_dir / "wandb_run_id.txt").read_text().strip()
    folders = sorted((run_dir / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and all(f.name.endswith(run_id) for f in folders)
    record = next(folders[0].glob("*.wandb")).read_bytes()
    assert b"train/libero/loss" in record and b"train/toy/*" in record and b"late/step" in record
    assert f"starts run {run_id}" in done.stderr and f"resumes run {run_id}" in done.stderr
    assert "refused: logger.mode='online': no W&B credentials found" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_other_ranks_start_no_wandb_run(tmp_path, monkeypatch):
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    monkeypatch.setattr(rank_zero_only, "rank", 1)
    (logger,) = make_loggers({"kind": "wandb", "project": "p"}, tmp_path, "run", {"tenants": {"a": {}}})
    logger.log_metrics({"train/a/loss": 1.0}, step=0)
    close_loggers([logger])
    assert list(tmp_path.iterdir()) == []


def test_lightning_still_deletes_and_rewrites_where_we_override():
    """Canary: RunCSVLogger depends on these private methods of Lightning's writer."""
    from lightning.pytorch.loggers.csv_logs import ExperimentWriter

    for name in ("_check_log_dir_exists", "_record_new_keys", "_rewrite_with_new_header"):
        assert callable(getattr(ExperimentWriter, name)), name
