"""Client of a running service (``scripts/serve.py``): numpy arrays in, numpy arrays out, no torch.

>>> from nexus_lightning.client import NexusClient                                              # doctest: +SKIP
>>> with NexusClient("http://localhost:8000", token) as client:                                 # doctest: +SKIP
...     tenant = client.create_tenant("arm", schema=schema, head={"name": "mlp"})
...     print(tenant.train("sft", dataset="toy", target_jobs=20).result(progress=True))
...     action = tenant.predict({"state": state, "image": {"camera": image}}, ["push the cube"])["action"]
"""

from nexus_lightning.client.client import NexusClient, Session, Tenant
from nexus_lightning.client.futures import NexusFuture, Workload
from nexus_lightning.services.codec import Message
from nexus_lightning.services.errors import (
    ConnectionLost,
    DeadlineExceeded,
    FutureCancelled,
    FutureFailed,
    FutureTimeout,
    NexusError,
)

__all__ = [
    "ConnectionLost",
    "DeadlineExceeded",
    "FutureCancelled",
    "FutureFailed",
    "FutureTimeout",
    "Message",
    "NexusClient",
    "NexusError",
    "NexusFuture",
    "Session",
    "Tenant",
    "Workload",
]
