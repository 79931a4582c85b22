"""What the fork server of serve_process imports before it forks."""

import fastapi  # noqa: F401
import hydra  # noqa: F401
import prometheus_client  # noqa: F401
import uvicorn  # noqa: F401

import nexus_lightning.services.app
import nexus_lightning.services.master  # noqa: F401
