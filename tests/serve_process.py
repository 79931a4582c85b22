"""A server of its own process for tests: ``scripts/serve.py`` with its real configuration, shrunk.

The process is forked from a fork server that has imported everything once, so that a start costs seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
_CONTEXT = multiprocessing.get_context("forkserver")


def _start_fork_server() -> None:
    """The fork server of Python before 3.12.5 does not get sys.path and then skips its imports without a word."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *([before] if before else [])])
    try:
        _CONTEXT.set_forkserver_preload(["serve_process_imports"])
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _main(arguments: list[str], log: str) -> None:
    import torch

    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(ROOT)
    torch.set_num_threads(1)
    sys.argv = ["serve.py", *arguments]
    runpy.run_path(str(ROOT / "scripts" / "serve.py"), run_name="__main__")


class ServerProcess:
    """``start`` (also again, over the same run folder), ``kill`` or ``stop``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "server.log"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self) -> ServerProcess:
        arguments = [
            f"port={self.port}",
            "backbone=tiny",
            f"output_dir={self.folder}/outputs",
            f"data_dir={self.folder}/data",
            "trainer.checkpoint_every_n_jobs=2",
            "limits.requests_per_s=1000",
            "registry.datasets.toy.config.record.episodes=6",
            "+registry.datasets.toy.config.record.workers=1",
        ]
        _start_fork_server()
        self.process = _CONTEXT.Process(target=_main, args=(arguments, str(self.log)))
        self.process.start()
        end_s = time.monotonic() + 180
        while True:
            try:
                if httpx.get(self.url + "/readyz", timeout=10).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            if not self.process.is_alive() or time.monotonic() > end_s:
                raise AssertionError(f"the server did not start:\n{self.log.read_text()}")
            time.sleep(0.1)

    @property
    def operator_token(self) -> str:
        return (self.folder / "outputs" / "serve" / "services" / "operator_token").read_text().strip()

    def kill(self) -> None:
        """kill -9."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(60)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGTERM)
        self.process.join(120)
        assert self.process.exitcode is not None, self.log.read_text()
        return self.process.exitcode
