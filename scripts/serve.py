"""Serve many tenants over HTTP: one resident training run, its routes under /v1, documentation under /docs.

    python scripts/serve.py port=8000 backbone=smolvla run_name=lab
    python scripts/serve.py backbone=tiny output_dir=/tmp/outputs          # plumbing on a CPU

Settings: conf/serve.yaml. The first start writes an operator's token into <output_dir>/<run_name>/services/; it makes
tokens for others with POST /v1/operator/tokens. A restart with the same run_name goes on with its tenants, workloads
and accounts. SIGTERM or Ctrl-C: new requests get 503, the running job ends, payloads are saved, exit code 0 (1: one
could not be written). A full disk ends nothing: /readyz is 503, the page says what cannot be written.
"""

import logging
import os
import socket
import sys
import threading
import time
import warnings
from pathlib import Path

import hydra
from omegaconf import DictConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # models/ and envs/ live beside scripts/

from nexus_lightning.config import ConfigError  # noqa: E402
from nexus_lightning.services.spec import ServeConfig, register_serve_config, serve_problems, to_serve_config  # noqa: E402

register_serve_config()


@hydra.main(version_base="1.3", config_path="../conf", config_name="serve")
def main(cfg: DictConfig) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    warnings.filterwarnings("ignore", module=r"(lightning|torchrl|torch|tensordict)\.")  # advice to their developers
    try:
        config = to_serve_config(cfg)
        address = socket.create_server((config.host, config.port))  # a taken port is told before models are loaded
        # Connections inherit it: an answer is two small writes, and the second would wait 40 ms for an acknowledgement.
        address.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(serve(config, address))


def serve(config: ServeConfig, address: socket.socket) -> int:
    """Run until a signal; returns the exit code."""
    # torch, lightning and torchrl take seconds: bad keys fail before that
    from nexus_lightning.monitoring.lines import disk_refuses
    from nexus_lightning.services.app import make_server
    from nexus_lightning.services.master import Master
    from nexus_lightning.services.service import Service
    from nexus_lightning.services.store import Store, StoreError

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    try:
        if problems := serve_problems(config):
            raise ConfigError(problems)
        store = Store(config.run_dir / "services")  # first: nothing is touched in the folder of a running server
        try:
            master = Master(config)
            service = Service(master, store, config.limits)
            write_operator_token(service)
        except BaseException:
            store.close()
            raise
    except (ConfigError, StoreError, OSError) as error:
        if isinstance(error, OSError) and not disk_refuses(error):  # not of the disk: for example of a model's files
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    server = make_server(service)
    http = threading.Thread(target=server.run, args=([address],), name="http")
    failed = threading.Event()

    def start() -> None:
        """Tenants come back through the loop, so it must run by then."""
        try:
            while not (master.ready and server.started):
                if service.stopping:
                    return
                if not http.is_alive():
                    raise RuntimeError("the HTTP server ended")
                time.sleep(0.05)
            service.start()
            host, port = address.getsockname()[:2]
            print(f"serving on http://{host}:{port} (run folder {config.run_dir})", flush=True)
        except BaseException:
            if not service.stopping:
                logging.exception("the tenants could not be brought back")
                failed.set()
            master.stop()

    starter = threading.Thread(target=start, name="start")
    http.start()
    starter.start()
    try:
        master.run()
    finally:  # whatever ended the loop: workloads stay in the store as running, and a restart goes on with them
        service.stop()
        starter.join()
        server.should_exit = True
        http.join()
        service.close()
    unsaved = master.runtime.tenancy.unsaved()
    for tenant_id, owed in unsaved.items():
        print(f"error: tenant {tenant_id}: not saved: {owed.problem}", file=sys.stderr)
    return int(failed.is_set() or bool(unsaved))


def write_operator_token(service) -> None:
    """At the first start: a file that only this user can read. The token itself is never printed."""
    if any(owner["role"] == "operator" for owner in service.store.owners()):
        return
    path = service.store.folder / "operator_token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        os.posix_fallocate(file.fileno(), 0, 100)  # a full disk must not swallow the only token
        token = service.accounts.create("operator", "operator")
        file.write(token + "\n")
        file.truncate()
    print(f"operator token: {path}", flush=True)


if __name__ == "__main__":
    main()
