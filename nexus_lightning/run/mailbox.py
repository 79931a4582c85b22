"""How threads reach the run: they post events, and the actor drains them between two jobs.

Nobody but the actor writes slots, metrics, evaluations or checkpoints, so none of these needs a lock, and with several
ranks the same events become a rank's report (:mod:`nexus_lightning.run.tick`)::

    producer  --- Failed, Lost ----------.
    evaluator --- Evaluated -------------+--> Mailbox --> actor, between two jobs
    anybody   --- Call ------------------'
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class RunEnded(RuntimeError):
    """Asked of a run that is over."""


@dataclass(frozen=True)
class Failed:
    """A tenant's producer, simulator or data has failed."""

    tenant: str
    reason: str
    details: str


@dataclass(frozen=True)
class Evaluated:
    """This rank's episodes of an evaluation are done."""

    tenant: str
    version: int
    episodes: list[dict[str, Any]]
    video: Path | None


@dataclass(frozen=True)
class Lost:
    """A simulator or machine was lost, and what it was doing begins again."""

    tenant: str
    reason: str


@dataclass(frozen=True)
class Call:
    """Something to run on the actor thread; its result or exception is the future's."""

    action: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.action())
        except Exception as error:
            self.future.set_exception(error)


Event = Failed | Evaluated | Lost | Call


class Mailbox:
    """Events in the order in which they were posted. Thread-safe.

    Args:
        wake: called after every event: an idle actor looks at once.

    Example:
        >>> mailbox = Mailbox()
        >>> mailbox.post(Failed("libero", "ValueError: no such task", ""))
        >>> [event.tenant for event in mailbox.drain()], mailbox.drain()
        (['libero'], [])
    """

    def __init__(self, wake: Callable[[], object] = lambda: None) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._closed = False

    def post(self, event: Event) -> None:
        """What comes after :meth:`close` is dropped: nobody would look.

        Raises:
            RunEnded: of a :class:`Call` after :meth:`close`; of one that is waiting then its future does.
        """
        with self._lock:
            if self._closed:
                if isinstance(event, Call):
                    raise RunEnded("the run has ended")
                return
            self._events.append(event)
        self._wake()

    def drain(self) -> list[Event]:
        """Everything that was posted so far. By the actor alone."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def close(self) -> bool:
        """Whoever waits for a call is told that the run is over. Idempotent: True the first time."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            events, self._events = self._events, []
        for event in events:
            if isinstance(event, Call) and event.future.set_running_or_notify_cancel():
                event.future.set_exception(RunEnded("the run has ended"))
        return True
