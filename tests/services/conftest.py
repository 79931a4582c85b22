"""A service over FakeMaster, in process."""

from __future__ import annotations

import pytest


class Served:
    """Service, application, a client without a token and one for each of three accounts."""

    def __init__(self, folder, **limits) -> None:
        from fake_master import FakeMaster
        from fastapi.testclient import TestClient

        from nexus_lightning.services.app import make_app
        from nexus_lightning.services.service import Service
        from nexus_lightning.services.spec import LimitsConfig
        from nexus_lightning.services.store import Store

        self.master = FakeMaster(folder)
        limits = {"requests_per_s": 1e6, "max_body_mb": 1.0, "max_sessions": 16, **limits}
        self.service = Service(self.master, Store(folder / "services"), LimitsConfig(**limits))
        self.app = make_app(self.service)
        self.service.start()
        self.tokens = {}
        for name in ("root", "alice", "bob"):
            self.tokens[name] = self.service.accounts.create(name, "operator" if name == "root" else "tenant")
        self.nobody = TestClient(self.app, raise_server_exceptions=True)
        self.nobody.__enter__()
        self.root, self.alice, self.bob = (self.client(name) for name in ("root", "alice", "bob"))

    def client(self, name):
        from fastapi.testclient import TestClient

        client = TestClient(self.app, headers={"Authorization": f"Bearer {self.tokens[name]}"})
        client.portal = self.nobody.portal  # one event loop for all of them
        return client

    def close(self) -> None:
        self.master.gate.set()
        self.nobody.__exit__(None, None, None)
        self.service.close()


@pytest.fixture
def serve(tmp_path):
    """``serve(**limits)`` -> :class:`Served`; again over the same folder after ``close()``."""
    made = []

    def make(**limits):
        made.append(Served(tmp_path, **limits))
        return made[-1]

    yield make
    for served in made:
        served.close()
