"""Lightning loggers of a run, by ``_target_``: any of Lightning's, your own, and the two here that know of tenants.

Metric names: ``train/<tenant>/loss``, ``eval/<tenant>/success_rate`` ...; the step of a row is the job index of the
run, and a row may carry ``<tenant>/step`` (that tenant's own job count), the x-axis of its W&B charts.
"""

from __future__ import annotations

import csv
import io
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, override

from hydra.utils import get_class
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning_utilities.core.rank_zero import rank_zero_warn

from nexus_lightning.files import write_atomically

if TYPE_CHECKING:
    from wandb import Run

WANDB_MODES = ("offline", "online", "disabled")
WANDB_RUN_ID_FILE = "wandb_run_id.txt"

#: ``logger`` of a run that nobody has configured (conf/logger/csv.yaml).
CSV = {"csv": {"_target_": "nexus_lightning.monitoring.loggers.RunCSVLogger", "run_dir": "{run_dir}"}}


def build(node: Any, run_dir: str | os.PathLike, run_name: str) -> Any:
    """What a node with ``_target_`` describes; ``{run_dir}`` and ``{run_name}`` in its texts are those of this run."""
    if isinstance(node, dict):
        values = {key: build(value, run_dir, run_name) for key, value in node.items()}
        target = values.pop("_target_", None)
        return values if target is None else get_class(target)(**values)
    if isinstance(node, list):
        return [build(value, run_dir, run_name) for value in node]
    if isinstance(node, str):
        return node.replace("{run_dir}", os.fspath(run_dir)).replace("{run_name}", run_name)
    return node


def make_loggers(
    nodes: dict[str, dict[str, Any]], run_dir: str | os.PathLike, run_name: str, config: dict[str, Any]
) -> list[Logger]:
    """Build the loggers of one run and tell them its configuration; W&B starts (or resumes) its run here.

    Args:
        nodes: the ``logger`` config group (``conf/logger/``): name -> ``_target_`` and arguments, validated.
        run_dir: the run folder; an earlier ``metrics.csv`` or ``wandb_run_id.txt`` in it is continued.
        run_name: display name.
        config: the resolved config, plain values.

    Returns:
        Lightning loggers, to be closed with :func:`close_loggers`.

    Raises:
        ValueError: W&B online without credentials.
    """
    loggers = [build(node, run_dir, run_name) for node in nodes.values()]
    for logger in loggers:
        logger.log_hyperparams(config)
    return loggers


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

    @override
    def log_hyperparams(self, params: Any = None) -> None:
        """Nothing: the run folder has them in ``config.yaml``."""

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
    """Lightning's W&B logger with one namespace and one step axis per tenant; it starts or resumes its run when built.

    Args:
        project: of W&B.
        save_dir: the run folder; ``wandb_run_id.txt`` in it names the W&B run that is resumed.
        name: display name of the run.
        mode: one of ``WANDB_MODES``.
        entity: team or user; None: the account's default.
        tags: of the run.

    Raises:
        ValueError: online without credentials.
    """

    requires: ClassVar[dict[str, str]] = {"wandb": "wandb"}

    def __init__(
        self,
        project: str,
        save_dir: str | os.PathLike,
        name: str | None = None,
        mode: str = "offline",
        entity: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        # Lightning hands every rank but the first a dummy experiment
        run = _start_wandb(Path(save_dir), project, name, mode, entity, tags) if rank_zero_only.rank == 0 else None
        super().__init__(name=name, save_dir=os.fspath(save_dir), project=project, experiment=run)
        self._charted: set[str] = set()

    @staticmethod
    def problems(arguments: dict[str, Any]) -> list[str]:
        """What is wrong with its arguments, one ``argument=value: fix`` line each; starts nothing."""
        mode, found = arguments.get("mode", "offline"), []
        if mode not in WANDB_MODES:
            found.append(f"mode={mode!r}: choose one of {', '.join(WANDB_MODES)}")
        if not arguments.get("project"):
            found.append("project: missing: name the W&B project")
        return found

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """A tenant that is in a row for the first time, from the start or as one that has joined, gets its axis."""
        for tenant in {key.removesuffix("/step") for key in metrics if key.endswith("/step")} - self._charted:
            self._charted.add(tenant)
            self.experiment.define_metric(f"{tenant}/step", hidden=True)
            for stage in ("train", "eval"):
                self.experiment.define_metric(f"{stage}/{tenant}/*", step_metric=f"{tenant}/step")
        super().log_metrics(metrics, step)

    @rank_zero_only
    def finish(self, exit_code: int = 0) -> None:
        """End the W&B run: nothing may be logged afterwards."""
        self.experiment.finish(exit_code=exit_code)


def _start_wandb(
    run_dir: Path, project: str, name: str | None, mode: str, entity: str | None, tags: Sequence[str]
) -> Run:
    if mode == "offline":
        # wandb's error reporting looks up its host even offline; an explicit setting of the user stays.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    if os.environ.get("WANDB_MODE", mode) != mode:
        rank_zero_warn(f"WANDB_MODE={os.environ['WANDB_MODE']} is ignored: the config says mode={mode}")
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        raise ValueError(
            "logger.wandb.mode='online': no W&B credentials found: run `wandb login`, or use logger.wandb.mode=offline"
        )
    id_file = run_dir / WANDB_RUN_ID_FILE
    previous = id_file.read_text().strip() if id_file.exists() else None
    run_dir.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project=project,
        entity=entity,
        tags=list(tags),
        name=name,
        dir=os.fspath(run_dir),
        # A sweep gives its own id; wandb ignores ours then.
        id=previous or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4),
        resume="allow",
        mode=mode,  # type: ignore[arg-type]
        reinit="create_new",
        # No banners or history on the console: the run's own summary is the last thing printed.
        settings=wandb.Settings(silent=True, console="off"),
    )
    if mode == "disabled":
        return run
    write_atomically(id_file, f"{run.id}\n")
    begun = f"resumes run {run.id}" if previous == run.id else f"starts run {run.id}"
    upload = f"; upload it with: wandb sync {run_dir / 'wandb'}/*-{run.id}" if mode == "offline" else f": {run.url}"
    print(f"W&B ({mode}) {begun}{upload}", flush=True)
    return run
