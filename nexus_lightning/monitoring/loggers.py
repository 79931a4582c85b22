"""Lightning loggers of a run: CSV (default), Weights & Biases, or none.

Metric names: ``train/<tenant>/loss``, ``eval/<tenant>/success_rate`` ...; the step of a row is the job index of the
run, and a row may carry ``<tenant>/step`` (that tenant's own job count), the x-axis of its W&B charts.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning_utilities.core.rank_zero import rank_zero_warn

from nexus_lightning.config import no_such_key
from nexus_lightning.files import write_atomically

if TYPE_CHECKING:
    from wandb import Run

KINDS = ("csv", "wandb", "none")
WANDB_MODES = ("offline", "online", "disabled")
WANDB_RUN_ID_FILE = "wandb_run_id.txt"
_KEYS = {"csv": ("kind",), "none": ("kind",), "wandb": ("kind", "project", "mode", "entity", "tags")}


def logger_problems(cfg_logger: dict) -> list[str]:
    """Every reason why this ``logger`` config cannot work, as ``logger.key=value: fix`` lines; builds nothing."""
    kind = cfg_logger.get("kind")
    if kind not in KINDS:
        return [f"logger.kind={kind!r}: choose one of {', '.join(KINDS)}"]
    valid = _KEYS[kind]
    found = [no_such_key(f"kind={kind}", f"logger.{k}", v, valid) for k, v in cfg_logger.items() if k not in valid]
    if kind == "wandb":
        mode = cfg_logger.get("mode", "offline")
        if mode not in WANDB_MODES:
            found.append(f"logger.mode={mode!r}: choose one of {', '.join(WANDB_MODES)}")
        if not cfg_logger.get("project"):
            found.append("logger.project: missing: name the W&B project")
        if importlib.util.find_spec("wandb") is None:
            found.append(
                "logger.kind=wandb: package wandb is missing: pip install 'nexus-lightning[wandb]' (or use logger=csv)"
            )
    return found


def make_loggers(cfg_logger: dict, run_dir: str | os.PathLike, run_name: str, config: dict) -> list[Logger]:
    """Build the loggers of one run; W&B starts (or resumes) its run here, before training.

    Args:
        cfg_logger: the ``logger`` config group as a plain dict (``conf/logger/``).
        run_dir: the run folder; an earlier ``metrics.csv`` or ``wandb_run_id.txt`` in it is continued.
        run_name: display name.
        config: the resolved config, plain values; ``config["tenants"]`` names the tenants.

    Returns:
        Lightning loggers, to be closed with :func:`close_loggers`.

    Raises:
        ValueError: a config that cannot work, or W&B online without credentials.
    """
    if problems := logger_problems(cfg_logger):
        raise ValueError("\n".join(problems))
    if cfg_logger["kind"] == "csv":
        return [RunCSVLogger(run_dir)]
    if cfg_logger["kind"] == "none":
        return []
    if rank_zero_only.rank != 0:
        # Lightning hands every rank but the first a dummy experiment.
        idle: list[Logger] = [TenantWandbLogger(project=cfg_logger["project"], save_dir=os.fspath(run_dir))]
        return idle
    run = _start_wandb(cfg_logger, Path(run_dir), run_name, config)
    logger = TenantWandbLogger(project=cfg_logger["project"], save_dir=os.fspath(run_dir), experiment=run)
    for tenant in config.get("tenants") or {}:
        logger.add_tenant(tenant)
    return [logger]


def close_loggers(loggers: list[Logger], exit_code: int = 0) -> None:
    """Write out everything; W&B marks the run as failed for a non-zero ``exit_code``."""
    for logger in loggers:
        logger.finalize("success" if exit_code == 0 else "failed")
        if isinstance(logger, TenantWandbLogger):
            logger.finish(exit_code)


class RunCSVLogger(CSVLogger):
    """Lightning's CSV logger with the file at exactly ``<run>/metrics.csv``, appending on resume.

    Every call writes through, so a killed run keeps its rows. New metric names may appear at any time: the file is then
    rewritten with the wider header, atomically.
    """

    def __init__(self, run_dir: str | os.PathLike) -> None:
        super().__init__(save_dir=os.fspath(run_dir), name="", version="", flush_logs_every_n_steps=1)
        self._creation_lock = threading.Lock()

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        # Two threads that log first at once must share one writer: a second one would not know the first one's header.
        with self._creation_lock:
            if not isinstance(self._experiment, ExperimentWriter):
                self._experiment = _AppendingWriter(log_dir=self.log_dir)
            return self._experiment


class _AppendingWriter(ExperimentWriter):
    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self._lock = threading.Lock()
        path = Path(self.metrics_file_path)
        if not path.exists():
            return
        text = path.read_bytes()
        if not text.endswith(b"\n"):
            # The run was killed inside a write: the torn last row would swallow the next one.
            write_atomically(path, text[: text.rfind(b"\n") + 1])
        if path.stat().st_size == 0:
            path.unlink()
            return
        with path.open(newline="") as file:
            self.metrics_keys = next(csv.reader(file))

    def _check_log_dir_exists(self) -> None:
        """Lightning deletes an existing file here; a resumed run keeps it."""

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        with self._lock:
            super().log_metrics(metrics_dict, step)

    def save(self) -> None:
        with self._lock:
            super().save()

    def _record_new_keys(self) -> set[str]:
        new = super()._record_new_keys()
        self.metrics_keys.sort(key=lambda key: (key != "step", key != "time_s", key))
        return new

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        path = Path(self.metrics_file_path)
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=fieldnames)
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(path, text.getvalue())


class TenantWandbLogger(WandbLogger):
    """Lightning's W&B logger with one namespace and one step axis per tenant."""

    @rank_zero_only
    def add_tenant(self, tenant: str) -> None:
        """Chart ``train/<tenant>/*`` and ``eval/<tenant>/*`` against ``<tenant>/step``; call it when a tenant joins."""
        self.experiment.define_metric(f"{tenant}/step", hidden=True)
        for stage in ("train", "eval"):
            self.experiment.define_metric(f"{stage}/{tenant}/*", step_metric=f"{tenant}/step")

    @rank_zero_only
    def finish(self, exit_code: int = 0) -> None:
        """End the W&B run: nothing may be logged afterwards."""
        self.experiment.finish(exit_code=exit_code)


def _start_wandb(cfg_logger: dict, run_dir: Path, run_name: str, config: dict) -> Run:
    mode = cfg_logger.get("mode", "offline")
    if mode == "offline":
        # wandb's error reporting looks up its host even offline; an explicit setting of the user stays.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    if os.environ.get("WANDB_MODE", mode) != mode:
        rank_zero_warn(f"WANDB_MODE={os.environ['WANDB_MODE']} is ignored: the config says logger.mode={mode}")
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        raise ValueError(
            "logger.mode='online': no W&B credentials found: run `wandb login`, or use logger.mode=offline"
        )
    id_file = run_dir / WANDB_RUN_ID_FILE
    previous = id_file.read_text().strip() if id_file.exists() else None
    run_dir.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project=cfg_logger["project"],
        entity=cfg_logger.get("entity"),
        tags=list(cfg_logger.get("tags") or ()),
        name=run_name,
        dir=os.fspath(run_dir),
        # A sweep gives its own id; wandb ignores ours then.
        id=previous or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4),
        resume="allow",
        mode=mode,
        reinit="create_new",
        # No banners or history on the console: the run's own summary is the last thing printed.
        settings=wandb.Settings(silent=True, console="off"),
    )
    run.config.update(config, allow_val_change=True)
    if mode == "disabled":
        return run
    write_atomically(id_file, f"{run.id}\n")
    begun = f"resumes run {run.id}" if previous == run.id else f"starts run {run.id}"
    upload = f"; upload it with: wandb sync {run_dir / 'wandb'}/*-{run.id}" if mode == "offline" else f": {run.url}"
    print(f"W&B ({mode}) {begun}{upload}", flush=True)
    return run
