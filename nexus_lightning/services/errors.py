"""Errors of the services, shared by server and client: the same class is raised on both sides of the network.

JSON form, also the body of every answer with status >= 400::

    {"error": {"type": "not_found", "message": "...", "details": ["..."], "retryable": false, "retry_after_s": 1.5}}

``retry_after_s`` only where the server can say. A future that ended badly carries ``{"type", "category", "message",
"details", "retryable"}`` with category ``user`` (the request was wrong), ``server`` (ours) or ``unknown``.

Every class also inherits the standard exception a caller would expect (``NotFound`` is a ``LookupError``), so code that
does not know this module can still catch it. Standard library only: the client imports this file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from nexus_lightning.monitoring.lines import disk_refuses


class NexusError(Exception):
    """Base of all errors of the services; raised itself for an unexpected failure of the server.

    Attributes:
        type: word for programs, stable; the key of the JSON form.
        status: HTTP status; 0 for errors that only a client sees.
        message: one sentence with tenant, key, value and fix.
        details: further lines, one a problem.
        retryable: the same request may succeed later.
        retry_after_s: seconds to wait before, or None.

    Example:
        >>> error_from_json(NotFound("future f1: unknown").to_json())
        NotFound('future f1: unknown')
    """

    type: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    default_retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        details: Iterable[str] = (),
        *,
        retryable: bool | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.details = list(details)
        self.retryable = self.default_retryable if retryable is None else retryable
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return "\n  ".join([self.message, *self.details])

    def __reduce__(self):  # keyword attributes live in __dict__, which pickle restores after the call
        return type(self), (self.message,), self.__dict__

    def to_json(self) -> dict[str, Any]:
        """The body of an HTTP answer."""
        error = {"type": self.type, "message": self.message, "details": self.details, "retryable": self.retryable}
        if self.retry_after_s is not None:
            error["retry_after_s"] = self.retry_after_s
        return {"error": error}


class InvalidRequest(NexusError, ValueError):
    """Wrong content: a key, a value, a shape."""

    type = "invalid_request"
    status = 422


class Unauthorized(NexusError, PermissionError):
    """No token, or one that is unknown or revoked."""

    type = "unauthorized"
    status = 401


class Forbidden(NexusError, PermissionError):
    """A valid token whose role may not do this."""

    type = "forbidden"
    status = 403


class QuotaExceeded(NexusError, RuntimeError):
    """The account's allowance (tenants, requests in flight, bytes, sessions) is used up; free some first."""

    type = "quota_exceeded"
    status = 403


class NotFound(NexusError, LookupError):
    """Unknown id; another account's id answers exactly the same."""

    type = "not_found"
    status = 404


class Conflict(NexusError, RuntimeError):
    """Contradicts what is there: same name with another spec, another payload under a used sequence number."""

    type = "conflict"
    status = 409


class Gone(NexusError, LookupError):
    """Was there and is no more: a delivered result after its grace time, a session whose lease ran out."""

    type = "gone"
    status = 410


class SessionLost(Gone):
    """The simulator of an environment session is closed; open a new session and start the episode again."""

    type = "session_lost"


class TooLarge(NexusError, ValueError):
    """Body, array or image above the limit."""

    type = "too_large"
    status = 413


class UnsupportedMediaType(NexusError, TypeError):
    """Content type or encoding this route does not read."""

    type = "unsupported_media_type"
    status = 415


class RateLimited(NexusError, RuntimeError):
    """Too many requests a second; wait ``retry_after_s``."""

    type = "rate_limited"
    status = 429
    default_retryable = True


class NotReady(NexusError, ConnectionError):
    """The server starts, stops, or has no room right now."""

    type = "not_ready"
    status = 503
    default_retryable = True


class StorageFull(NexusError, OSError):
    """The server's disk takes no more writes; nothing was changed, the same request may succeed once there is room."""

    type = "storage_full"
    status = 507
    default_retryable = True


class ConnectionLost(NexusError, ConnectionError):
    """Client only: no answer from the server within the retries."""

    type = "connection_lost"
    status = 0
    default_retryable = True


class FutureTimeout(NexusError, TimeoutError):
    """Client only: the future had not ended when the caller's own timeout was over; it goes on running."""

    type = "future_timeout"
    status = 0
    default_retryable = True


class FutureFailed(NexusError, RuntimeError):
    """An accepted request ended without a result.

    Attributes:
        category: user | server | unknown.
        reason: the server's word, for example ``sequence_gap`` or ``server_restarted``.
    """

    type = "future_failed"
    status = 0

    def __init__(
        self, message: str, *args: Any, category: str = "unknown", reason: str = "future_failed", **kwargs: Any
    ) -> None:
        super().__init__(message, *args, **kwargs)
        self.category = category
        self.reason = reason


class FutureCancelled(FutureFailed):
    """The owner cancelled it."""

    type = "cancelled"


class DeadlineExceeded(FutureFailed, TimeoutError):
    """It did not start or end in time (reason ``deadline_exceeded`` or ``sequence_gap``)."""

    type = "deadline_exceeded"


#: HTTP errors by ``type``. Classes for several statuses of one type do not exist.
ERRORS: dict[str, type[NexusError]] = {
    cls.type: cls
    for cls in (
        NexusError,
        InvalidRequest,
        Unauthorized,
        Forbidden,
        QuotaExceeded,
        NotFound,
        Conflict,
        Gone,
        SessionLost,
        TooLarge,
        UnsupportedMediaType,
        RateLimited,
        NotReady,
        StorageFull,
    )
}


def storage_error(error: BaseException) -> StorageFull | None:
    """What a caller is told of a write that the disk refused; None: ``error`` is something else.

    Example:
        >>> storage_error(sqlite3.OperationalError("database or disk is full"))
        StorageFull('the server cannot write to its disk now; send the same request again later')
        >>> storage_error(ValueError())
    """
    if isinstance(error, sqlite3.OperationalError) or disk_refuses(error):
        text = "the server cannot write to its disk now; send the same request again later"
        return StorageFull(text, retry_after_s=5.0)
    return None


def error_from_json(body: Any, status: int = 500) -> NexusError:
    """The exception of an answer with status >= 400.

    A body that is not ours (a proxy's HTML page) gives the class of ``status``, else :class:`NexusError`.
    """
    error = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(error, Mapping):
        cls = next((c for c in ERRORS.values() if c.status == status), NexusError)
        return cls(f"the server answered {status} without an error body")
    cls = ERRORS.get(str(error.get("type")), NexusError)
    return cls(
        str(error.get("message", "")),
        [str(line) for line in error.get("details") or ()],
        retryable=bool(error.get("retryable", False)),
        retry_after_s=error.get("retry_after_s"),
    )


def future_error_to_json(error: BaseException) -> dict[str, Any]:
    """What a future that ended with ``error`` shows: errors of the request itself are ``user``, the rest ``server``.

    The text of an unexpected exception stays in the server's log: it may hold paths or another tenant's names.
    """
    error = storage_error(error) or error
    if isinstance(error, FutureFailed):
        word, category = error.reason, error.category
    elif isinstance(error, NexusError):
        word, category = error.type, "user" if 400 <= error.status < 500 else "server"
    else:
        return {
            "type": "internal_error",
            "category": "server",
            "message": f"the server failed with {type(error).__name__}; the operator's log has the reason",
            "details": [],
            "retryable": True,
        }
    return {
        "type": word,
        "category": category,
        "message": error.message,
        "details": error.details,
        "retryable": error.retryable,
    }


def future_error_from_json(error: Mapping[str, Any], status: str = "failed") -> FutureFailed:
    """The exception a client raises for a future that ended as ``status`` (``failed`` or ``cancelled``)."""
    reason = str(error.get("type", "unknown"))
    cls = FutureFailed
    if status == "cancelled":
        cls = FutureCancelled
    elif reason in ("deadline_exceeded", "sequence_gap"):
        cls = DeadlineExceeded
    return cls(
        str(error.get("message", "")),
        [str(line) for line in error.get("details") or ()],
        category=str(error.get("category", "unknown")),
        reason=reason,
        retryable=bool(error.get("retryable", False)),
    )
