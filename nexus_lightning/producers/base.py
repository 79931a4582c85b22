"""A producer thread: one per tenant, ends on its own error without touching any other tenant."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class RemoteSimulators(Protocol):
    """A tenant's simulators on another machine (:class:`~nexus_lightning.producers.remote.RemoteCollector`)."""

    def collect(self, index: int, version: int) -> Any:
        """One rollout."""
        ...

    def evaluate(self, episodes: Sequence[Any], version: int, record: Sequence[Any]) -> Any:
        """Every episode once."""
        ...

    def close(self) -> None:
        """End it, and whoever waits for it."""
        ...


class Producer(threading.Thread):
    """Runs :meth:`produce` until :meth:`stop`; an exception quarantines this tenant only.

    Args:
        tenant: its name.
        on_failure: called with ``(tenant, reason, traceback text)`` in this thread.
    """

    def __init__(self, tenant: str, on_failure: Callable[[str, str, str], None]) -> None:
        super().__init__(name=f"producer-{tenant}", daemon=True)
        self.tenant, self.on_failure = tenant, on_failure
        self.stopping = threading.Event()

    def produce(self) -> None:
        """Do the work; return when ``self.stopping`` is set."""
        raise NotImplementedError(f"{type(self).__name__} must override produce")

    def release(self) -> None:
        """Free simulators and files. Called once, in this thread, however ``produce`` ended."""

    def run(self) -> None:
        try:
            self.produce()
        except Exception as error:
            if not self.stopping.is_set():  # what breaks while everything is being shut down is no failure
                self.on_failure(self.tenant, f"{type(error).__name__}: {error}", traceback.format_exc())
        finally:
            self.release()

    def stop(self) -> None:
        self.stopping.set()
