"""The progress display: one line for the run, one per tenant, or plain lines when stdout is not a terminal."""

from __future__ import annotations

import math
import shutil
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from nexus_lightning.monitoring.stats import duration_text


@dataclass
class TenantStatus:
    """What the display shows of one tenant; the loop writes it, the display only reads.

    Attributes:
        task: ``sft``, ``rl``, ``offline_rl`` or ``eval``.
        jobs: completed training jobs.
        target: completion target, None when there is none.
        loss: last training loss.
        episode_return: last mean return; shown instead of the loss.
        success_rate: last success rate in [0, 1]; ``success_n`` the episodes behind it.
        version: policy version.
        state: ``running`` is not shown; anything else is (``evaluating``, ``done``, ``quarantined: loss is NaN``).
    """

    task: str = ""
    jobs: int = 0
    target: int | None = None
    loss: float | None = None
    episode_return: float | None = None
    success_rate: float | None = None
    success_n: int | None = None
    version: int = 0
    state: str = "running"


@dataclass
class RunStatus:
    """Live state of a run, updated by the loop and read by :class:`NexusProgressBar`.

    Attributes:
        tenants: by name; entries may come and go during the run.
        training_queue: jobs by state, ``{"ready": 2, "leased": 1}``.
        inference_waiting: requests waiting in the inference queue.
        max_jobs: the run stops after this many jobs, None without a limit.
    """

    tenants: dict[str, TenantStatus] = field(default_factory=dict)
    training_queue: dict[str, int] = field(default_factory=dict)
    inference_waiting: int = 0
    max_jobs: int | None = None

    @property
    def jobs(self) -> int:
        """Completed jobs of all tenants."""
        return sum(t.jobs for t in list(self.tenants.values()))


def tenant_text(name: str, tenant: TenantStatus) -> str:
    """One tenant, tersely.

    Example:
        >>> tenant_text("libero", TenantStatus("sft", 9, 40, loss=0.2134, version=9))
        'libero sft 9/40 loss 0.213 success - v9'
    """
    jobs = str(tenant.jobs) if tenant.target is None else f"{tenant.jobs}/{tenant.target}"
    if tenant.episode_return is not None:
        value = f"return {tenant.episode_return:.2f}"
    else:
        value = f"loss {_short(tenant.loss)}"
    success = "-" if tenant.success_rate is None else f"{tenant.success_rate:.0%}"
    if tenant.success_rate is not None and tenant.success_n is not None:
        success += f" (n={tenant.success_n})"
    state = "" if tenant.state == "running" else f" [{tenant.state}]"
    return f"{name} {tenant.task} {jobs} {value} success {success} v{tenant.version}{state}"


def queue_text(status: RunStatus) -> str:
    """Queue depths: states with jobs only.

    Example:
        >>> queue_text(RunStatus(training_queue={"ready": 2, "leased": 0}, inference_waiting=3))
        'queue ready 2, inference 3'
    """
    states = [f"{state} {n}" for state, n in list(status.training_queue.items()) if n]
    return f"queue {' '.join(states) or 'empty'}, inference {status.inference_waiting}"


def status_line(status: RunStatus, elapsed_s: float) -> str:
    """The whole run on one plain line."""
    jobs = f"jobs {status.jobs}" + ("" if status.max_jobs is None else f"/{status.max_jobs}")
    tenants = [tenant_text(name, tenant) for name, tenant in list(status.tenants.items())]
    return " | ".join([f"[{duration_text(elapsed_s):>4}] {jobs}", *tenants, queue_text(status)])


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if math.isfinite(value) else str(value)


class NexusProgressBar(ProgressBar):
    """Shows a :class:`RunStatus` while Lightning trains.

    On a terminal: a tqdm line for the run (jobs, elapsed time, queue depths) and one per tenant. Elsewhere (a file,
    CI): one plain line every ``plain_every_s`` seconds, without carriage returns. A thread refreshes the display, so
    that it also moves while the loop waits for a rollout. Rank 0 only.

    Args:
        status: the object that the loop updates.
        refresh_s: seconds between refreshes on a terminal.
        plain_every_s: seconds between plain lines.
    """

    def __init__(self, status: RunStatus, refresh_s: float = 0.5, plain_every_s: float = 10.0) -> None:
        super().__init__()
        self.status = status
        self.refresh_s = refresh_s
        self.plain_every_s = plain_every_s
        self._enabled = True
        self._start_s = 0.0
        self._main: tqdm | None = None
        self._lines: dict[str, tqdm] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    @property
    def is_enabled(self) -> bool:
        """Whether this rank displays anything."""
        return self._enabled

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print without breaking the bars."""
        if self._main is None:
            print(*args, **kwargs, flush=True)
        else:
            self._main.write(kwargs.get("sep", " ").join(map(str, args)), file=sys.stdout)

    def on_train_start(self, *_: Any) -> None:
        if not self._enabled:
            return
        self._start_s = time.monotonic()
        self._stop.clear()
        on_terminal = sys.stdout.isatty()
        if on_terminal:
            bounded = "|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}]{postfix}"
            form = "{desc} {n_fmt} [{elapsed}]{postfix}" if self.status.max_jobs is None else "{desc} " + bounded
            total = self.status.max_jobs
            self._main = tqdm(
                desc="jobs", total=total, bar_format=form, file=sys.stdout, leave=True, dynamic_ncols=True
            )
        self._thread = threading.Thread(target=self._refresh_regularly, name="progress", daemon=True)
        self._thread.start()

    def on_train_end(self, *_: Any) -> None:
        self._finish()

    def on_exception(self, *_: Any) -> None:
        self._finish()

    def teardown(self, *_: Any, **__: Any) -> None:
        self._finish()

    def _refresh_regularly(self) -> None:
        every_s = self.plain_every_s if self._main is None else self.refresh_s
        while not self._stop.wait(every_s):
            self._refresh()

    def _refresh(self) -> None:
        if self._main is None:
            print(status_line(self.status, time.monotonic() - self._start_s), flush=True)
            return
        columns = shutil.get_terminal_size().columns - 1
        self._main.n = self.status.jobs
        self._main.set_postfix_str(queue_text(self.status), refresh=False)
        self._main.refresh()
        tenants = dict(self.status.tenants)
        for name in [n for n in self._lines if n not in tenants]:
            self._lines.pop(name).close()
        for name, tenant in tenants.items():
            if name not in self._lines:
                self._lines[name] = tqdm(bar_format="{desc}", file=sys.stdout, leave=True)
            # tqdm does not trim a line without a bar; a wrapped line would garble those below it.
            self._lines[name].set_description_str(("  " + tenant_text(name, tenant))[:columns])

    def _finish(self) -> None:
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        self._refresh()
        if self._main is not None:
            for line in [self._main, *self._lines.values()]:
                line.close()
            self._main, self._lines = None, {}
