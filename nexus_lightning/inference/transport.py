"""When a batch fires, and whom it takes; the rules are in :class:`~.server.TenantInferenceServer`."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

from tensordict import TensorDictBase
from torchrl.modules.inference_server import InferenceTransport

from nexus_lightning.inference.requests import Ask, Session, Ticket

#: How often a waiting client looks whether the server still lives, and an idle server whether it should stop.
LIVENESS_POLL_S = 0.2


class Transport(InferenceTransport):
    """In-process queue that decides when the worker serves and whom; the rules are in :class:`TenantInferenceServer`.

    It also answers every request at most once and skips those whose client gave up.

    Args:
        batch_size: B, requests per batch at most.
        timeout_s: T, seconds that a session is expected for.
        clock: seconds; whoever turns it forward calls :meth:`wake`.
    """

    def __init__(self, batch_size: int, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.batch_size = batch_size
        self.timeout_s = timeout_s
        self.clock = clock
        self._changed = threading.Condition()
        self._queue: list[tuple[Ask, Ticket]] = []  # in order of arrival
        self._away: set[Session] = set()  # answered, prompt, not back yet
        self._free_since_s: float | None = None  # None: the worker serves, or does not run
        self._free_s = 0.0  # how long the worker has been free in all, up to _free_since_s

    # client side

    def submit(self, td: Any) -> Ticket:
        """Queue an :class:`Ask`."""
        session = td.session
        with self._changed:
            now_s = self.clock()
            if session.answered_s is not None and not session.queued:
                session.prompt = now_s - session.answered_s <= self.timeout_s
            session.queued += 1
            self._away.discard(session)
            ticket = Ticket(session, now_s, self._free_time(now_s))
            self._queue.append((td, ticket))
            self._changed.notify()
        return ticket

    def rest(self, session: Session) -> None:
        """Nobody waits for ``session`` before its next request."""
        with self._changed:
            session.answered_s = None
            self._away.discard(session)
            self._changed.notify()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def held_back(self) -> int:
        """Requests that wait although the worker is free: their groups are not due."""
        with self._changed:
            free = self._free_since_s is not None and self._next(self.clock())[0] is None
            return len(self._queue) if free else 0

    @property
    def expected(self) -> frozenset[Session]:
        """Sessions that were prompt and are not back since their answer; the late ones leave with the next batch."""
        with self._changed:
            return frozenset(self._away)

    # server side; one worker

    def wait_for_work(self, timeout: float) -> None:
        """Sleep until a group is due, at most ``timeout`` seconds."""
        with self._changed:
            now_s = self.clock()
            end_s = now_s + timeout
            if self._free_since_s is None:
                self._free_since_s = now_s
            while True:
                group, due_s = self._next(now_s)
                if group is not None or now_s >= end_s:
                    return
                self._changed.wait(min(due_s, end_s) - now_s)
                now_s = self.clock()

    def drain_with_timing(self, max_items: int) -> tuple[list[Any], list[Future], list[float | None]]:
        """The largest FIFO prefix of the group that is due; nothing when none is."""
        with self._changed:
            now_s = self.clock()
            group, _ = self._next(now_s)
            if group is None:
                return [], [], []
            taken, left = [], []
            for entry in self._queue:
                fits = entry[1].session.group == group and len(taken) < max_items
                (taken if fits else left).append(entry)
            self._take(taken, left, now_s)
            return [ask for ask, _ in taken], [t for _, t in taken], [t.submitted_s for _, t in taken]

    def drain(self, max_items: int) -> tuple[list[Any], list[Future]]:
        """The oldest requests, due or not: the server stops."""
        with self._changed:
            taken = self._queue[:max_items]
            self._take(taken, self._queue[max_items:], self.clock())
            return [ask for ask, _ in taken], [t for _, t in taken]

    def resolve(self, callback: Ticket, result: TensorDictBase) -> None:
        if self.claim(callback):
            self._answered(callback.session)
            callback.set_result(result)

    def resolve_exception(self, callback: Ticket, exc: BaseException) -> None:
        if self.claim(callback):
            self._answered(callback.session)
            callback.set_exception(exc)

    def wake(self) -> None:
        """Let the worker look around (the server is asked to stop)."""
        with self._changed:
            self._changed.notify_all()

    @staticmethod
    def claim(callback: Future) -> bool:
        """True when the request still waits for an answer; it cannot be cancelled afterwards."""
        return callback.running() or (not callback.done() and callback.set_running_or_notify_cancel())

    # under the lock

    def _next(self, now_s: float) -> tuple[tuple[str, int] | None, float]:
        """The group that is due, of several the one that has waited longest; else None and when one will be."""
        sizes = Counter(ticket.session.group for _, ticket in self._queue)  # in order of their oldest request
        earliest_s = math.inf
        for group, size in sizes.items():
            answers_s = [cast(float, s.answered_s) for s in self._away if s.group == group]
            due_s = max(answers_s) + self.timeout_s if answers_s else now_s
            if size >= self.batch_size or due_s <= now_s:
                return group, now_s
            earliest_s = min(earliest_s, due_s)
        return None, earliest_s

    def _take(self, taken: list, left: list, now_s: float) -> None:
        self._free_s, self._free_since_s = self._free_time(now_s), None
        self._queue = left
        self._away = {s for s in self._away if cast(float, s.answered_s) + self.timeout_s > now_s}  # the late ones
        for _, ticket in taken:
            ticket.session.queued -= 1
            ticket.held_s = self._free_s - ticket.free_s

    def _free_time(self, now_s: float) -> float:
        return self._free_s if self._free_since_s is None else self._free_s + now_s - self._free_since_s

    def _answered(self, session: Session) -> None:
        with self._changed:
            session.answered_s = self.clock()
            if session.prompt and not session.queued:
                self._away.add(session)
