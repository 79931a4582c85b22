"""CSV that survives resume, W&B offline with the real client."""

import csv
import importlib.util
import os
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml

from nexus_lightning.monitoring import loggers as loggers_module
from nexus_lightning.monitoring.loggers import CSV, RunCSVLogger, TenantWandbLogger, close_loggers, make_loggers
from nexus_lightning.trainer import LocalCheckpointIO


def _rows(run_dir: Path) -> list[dict]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_is_exactly_metrics_csv_and_takes_new_keys(tmp_path):
    (logger,) = make_loggers(CSV, tmp_path, "run", {"tenants": {"a": {}}})
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


def test_rows_that_are_written_during_a_checkpoint(tmp_path):
    """Lightning's checkpoints would take them into their transaction, which is the whole process's, and fail."""
    logger, over = RunCSVLogger(tmp_path), threading.Event()
    logged = 0

    def log():
        nonlocal logged
        while not over.is_set():
            logger.log_metrics({"eval/toy/success_rate": 1.0}, logged)
            logger.save()
            logged += 1

    thread = threading.Thread(target=log)
    thread.start()
    weights = {"weights": torch.arange(200_000)}
    for _ in range(30):
        LocalCheckpointIO().save_checkpoint(weights, tmp_path / "last.ckpt")
    over.set()
    thread.join()
    with (tmp_path / "metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(logged)) and logged > 5
    assert torch.equal(torch.load(tmp_path / "last.ckpt")["weights"], weights["weights"])


def test_threads_that_log_first_at_once_share_one_writer(tmp_path, monkeypatch):
    create = loggers_module._AppendingWriter.__init__

    def slowly(self, log_dir):
        time.sleep(0.05)
        create(self, log_dir)

    monkeypatch.setattr(loggers_module._AppendingWriter, "__init__", slowly)
    logger = RunCSVLogger(tmp_path)
    threads = [threading.Thread(target=logger.log_metrics, args=({f"train/t{i}/loss": 1.0}, i)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(r["step"] for r in _rows(tmp_path)) == ["0", "1", "2"]


def test_none_builds_nothing(tmp_path):
    assert make_loggers({}, tmp_path, "run", {}) == []
    close_loggers([])
    assert list(tmp_path.iterdir()) == []


def wandb_node(**arguments) -> dict[str, dict]:
    """``logger=wandb`` with these arguments."""
    shipped = yaml.safe_load((Path(__file__).parent.parent / "conf" / "logger" / "wandb.yaml").read_text())
    return {"wandb": {**shipped["wandb"], **arguments}}


@pytest.fixture
def offline_wandb(monkeypatch, tmp_path):
    """The real client with no account; gives a server that anything calling home would knock at."""
    wandb = pytest.importorskip("wandb")
    for name in [n for n in os.environ if n.startswith("WANDB")]:
        monkeypatch.delenv(name)
    # Set, then deleted: whatever the code under test sets is undone afterwards.
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "")
    monkeypatch.delenv("WANDB_ERROR_REPORTING")
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.01)
        for name in ("WANDB_BASE_URL", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.getsockname()[1]}")
        wandb.teardown()
        yield server
        wandb.teardown()


def test_wandb_offline_resumes_under_one_id_without_network_or_prompt(offline_wandb, tmp_path, capsys):
    run_dir = tmp_path / "run"
    cfg = wandb_node(project="p", tags=["t"])
    for step in range(2):
        (logger,) = make_loggers(cfg, run_dir, "r", {"seed": 0, "tenants": {"libero": {}, "toy": {}}})
        assert isinstance(logger, TenantWandbLogger)
        run_id = (run_dir / "wandb_run_id.txt").read_text().strip()
        assert run_id == logger.version, "written before training"
        logger.log_metrics({"train/libero/loss": 0.5, "libero/step": step, "time_s": 1.0}, step=step)
        logger.log_metrics({"eval/late/success_rate": 0.5, "late/step": step}, step=step)  # it has joined meanwhile
        close_loggers([logger])
    said = [line for line in capsys.readouterr().out.splitlines() if "W&B" in line]
    assert f"starts run {run_id}" in said[0] and f"resumes run {run_id}" in said[1] and "wandb sync" in said[1]
    folders = sorted((run_dir / "wandb").glob("offline-run-*"))
    assert folders and all(run_id in f.name for f in folders)  # two of one second get a number behind it
    records = b"".join(path.read_bytes() for folder in folders for path in folder.glob("*.wandb"))
    assert b"train/libero/loss" in records and b'"libero"' in records
    for axis in (b"train/libero/*", b"eval/libero/*", b"train/late/*", b"eval/late/*"):
        assert axis in records, "every tenant that was logged has its axis"
    with pytest.raises(ValueError, match="no W&B credentials found"):
        make_loggers(wandb_node(mode="online"), tmp_path / "other", "r", {})
    with pytest.raises(TimeoutError):
        offline_wandb.accept()


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_other_ranks_start_no_wandb_run(tmp_path, monkeypatch):
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    monkeypatch.setattr(rank_zero_only, "rank", 1)
    (logger,) = make_loggers(wandb_node(), tmp_path, "run", {"tenants": {"a": {}}})
    logger.log_metrics({"train/a/loss": 1.0}, step=0)
    close_loggers([logger])
    assert list(tmp_path.iterdir()) == []


def test_lightning_still_deletes_and_rewrites_where_we_override():
    """Canary: RunCSVLogger depends on these private methods of Lightning's writer."""
    from lightning.pytorch.loggers.csv_logs import ExperimentWriter

    for name in ("_check_log_dir_exists", "_record_new_keys", "_rewrite_with_new_header"):
        assert callable(getattr(ExperimentWriter, name)), name
