"""The door of a live run: a socket in its folder, over which ``scripts/tenants.py`` gives orders.

One JSON object a line, one line an answer; a connection may ask several times::

    {"verb": "list"}                                      -> {"ok": [{"tenant": "libero", "state": "running", ...}]}
    {"verb": "join", "tenant": "late", "config": {...}}   -> {"ok": null}   once it works
    {"verb": "leave" | "pause" | "resume" | "evaluate", "tenant": "late"}
    anything that cannot be done                          -> {"error": ["tenants.late.head.lr=nan: ..."]}

The socket belongs to the user who runs it (mode 0600): whoever can connect could also read and change the run's files.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from nexus_lightning.config import ConfigError, tenant_from_dict
from nexus_lightning.run.mailbox import RunEnded
from nexus_lightning.run.orders import OrderFailed, Orders

#: In the run folder.
SOCKET = "live.sock"
#: A tenant's configuration is some ten kilobytes.
MAX_LINE = 4 * 2**20
VERBS = ("list", "join", "leave", "pause", "resume", "evaluate")


class LiveServer:
    """Takes orders for a run until it is closed; on rank 0.

    Args:
        run_dir: the run's folder.
        orders: of the run.
    """

    def __init__(self, run_dir: Path, orders: Orders) -> None:
        self.path = run_dir / SOCKET
        self.path.unlink(missing_ok=True)  # of a run that was killed: the run's lock is ours

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                while line := self.rfile.readline(MAX_LINE):
                    self.wfile.write(json.dumps(answer(orders, line)).encode() + b"\n")

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

            def server_bind(self) -> None:
                os.fchmod(self.socket.fileno(), 0o600)  # before there is anything to connect to
                super().server_bind()

        with _short(self.path) as address:
            self._server = Server(address, Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="live-orders", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody is heard any more. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.path.unlink(missing_ok=True)


def answer(orders: Orders, line: bytes) -> dict[str, Any]:
    """What one request gets: ``{"ok": ...}`` or ``{"error": [...]}``. Waits until the order is done."""
    try:
        request = json.loads(line)
        if not isinstance(request, dict) or request.get("verb") not in VERBS:
            raise ValueError(f"verb: choose one of {', '.join(VERBS)}")
        verb, tenant = request["verb"], str(request.get("tenant"))
        if verb == "list":
            return {"ok": _listed(orders)}
        if verb == "join":
            config = tenant_from_dict(request.get("config"), f"tenants.{tenant}")
            done: Future[None] = orders.join(tenant, config)
        else:
            done = getattr(orders, verb)(tenant)
        done.result()
        return {"ok": None}
    except ConfigError as error:
        return {"error": error.problems}
    except (ValueError, TypeError, RunEnded, OrderFailed) as error:
        return {"error": [str(error)]}


def _listed(orders: Orders) -> list[dict[str, Any]]:
    rows = []
    for name, member in list(orders.tenancy.members.items()):
        slot = member.slot
        state = "quarantined" if slot.quarantined is not None else "paused" if member.paused else member.status.state
        rows.append(
            {
                "tenant": name,
                "task": slot.spec.config.task,
                "state": state,
                "jobs": slot.jobs_completed,
                "target_jobs": slot.spec.config.target_jobs,
                "policy_version": slot.policy_version,
                "success_rate": member.status.success_rate,
                "quarantined": slot.quarantined,
            }
        )
    return rows


def ask(run_dir: Path, **request: Any) -> Any:
    """Give one order to the run in a folder and wait until it is done.

    Raises:
        ConfigError: the run refuses it; every reason.
        ConnectionError: no run is going there.
    """
    path = run_dir / SOCKET
    with socket.socket(socket.AF_UNIX) as connection, _short(path) as address:
        try:
            connection.connect(address)
        except OSError as error:
            raise ConnectionError(f"no run is going in {run_dir} ({error.strerror})") from None
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as file:
            line = file.readline()
    if not line:
        raise ConnectionError(f"the run in {run_dir} has ended before it answered")
    reply = json.loads(line)
    if "error" in reply:
        raise ConfigError(reply["error"])
    return reply["ok"]


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """An address of a socket file however long its path is: the kernel takes 107 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
