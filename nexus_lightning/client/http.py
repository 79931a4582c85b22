"""One request until it is answered: retries, and errors as the classes that the server raised."""

from __future__ import annotations

import asyncio
import json
import random
import time
import weakref
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import httpx

from nexus_lightning.services.codec import JSON, Message, decode
from nexus_lightning.services.errors import (
    ConnectionLost,
    NexusError,
    NotReady,
    QuotaExceeded,
    RateLimited,
    StorageFull,
    error_from_json,
)

#: First and longest pause between two tries; each is drawn below its bound, so that clients do not come in step.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
#: Statuses that a proxy in between gives while the server is away.
AWAY = (502, 503, 504)


@dataclass(frozen=True)
class Call:
    """A request that may be sent again as it is: every one of the API's may.

    Attributes:
        wait_s: how long the server may hold the answer back (long polls).
        gone_is_done: 404 on a later try means that an earlier one, whose answer was lost, did it.
    """

    method: str
    path: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    gone_is_done: bool = False


class Transport:
    """Thread-safe; coroutines of any event loop may use it as well.

    Sent again, as it is, for up to ``retry_s`` seconds: what got no answer, 429 (after its ``Retry-After``), 503, 507
    (a full disk) and a quota that other requests will free. A mutating request carries its number, so the server
    executes it once.

    Args:
        url: of the server.
        token: ``nxl_<id>_<secret>``.
        retry_s: see above; 0: one try.
        timeout_s: of one try, besides ``wait_s``.
    """

    def __init__(self, url: str, token: str, retry_s: float = 120.0, timeout_s: float = 60.0) -> None:
        self.url, self.retry_s, self.timeout_s = url.rstrip("/"), retry_s, timeout_s
        self._options: dict[str, Any] = {
            "base_url": self.url,
            "headers": {"Authorization": f"Bearer {token}"},
            "limits": httpx.Limits(max_connections=256, max_keepalive_connections=64),
        }
        self._client = httpx.Client(**self._options)
        # an AsyncClient lives in the event loop that opened its connections
        self._async: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]
        self._async = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"Transport({self.url!r})"  # without the token

    def call(self, call: Call, give_up_s: float | None = None) -> httpx.Response:
        """The answer.

        Args:
            call: to be sent.
            give_up_s: a shorter ``retry_s``.

        Raises:
            NexusError: the server's, or :class:`ConnectionLost`.
        """
        tries = self._tries(call, give_up_s)
        try:
            step = next(tries)
            while True:
                if isinstance(step, float):
                    time.sleep(step)
                    step = tries.send(None)
                    continue
                try:
                    answer: httpx.Response | httpx.TransportError = self._client.request(**step)
                except httpx.TransportError as error:
                    answer = error
                step = tries.send(answer)
        except StopIteration as end:
            return end.value

    async def acall(self, call: Call, give_up_s: float | None = None) -> httpx.Response:
        """:meth:`call` for coroutines."""
        loop = asyncio.get_running_loop()
        client = self._async.get(loop)
        if client is None:
            client = self._async[loop] = httpx.AsyncClient(**self._options)
        tries = self._tries(call, give_up_s)
        try:
            step = next(tries)
            while True:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                    step = tries.send(None)
                    continue
                try:
                    answer: httpx.Response | httpx.TransportError = await client.request(**step)
                except httpx.TransportError as error:
                    answer = error
                step = tries.send(answer)
        except StopIteration as end:
            return end.value

    def stream(self, path: str, headers: dict[str, str]) -> Any:
        """A response that is read as it comes (context manager of httpx); no retries."""
        timeout = httpx.Timeout(self.timeout_s, read=self.timeout_s)
        return self._client.stream("GET", path, headers=headers, timeout=timeout)

    def close(self) -> None:
        self._client.close()

    async def aclose(self) -> None:
        """Close the connections of the running event loop as well."""
        client = self._async.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()
        self.close()

    def _tries(
        self, call: Call, give_up_s: float | None
    ) -> Generator[dict[str, Any] | float, httpx.Response | httpx.TransportError | None, httpx.Response]:
        """What to do next: a request to send, or seconds to sleep. The same for threads and coroutines."""
        request: dict[str, Any] = {
            "method": call.method,
            "url": call.path,
            "content": call.body,
            "headers": call.headers,
            "timeout": httpx.Timeout(self.timeout_s, read=self.timeout_s + call.wait_s),
        }
        end_s = time.monotonic() + (self.retry_s if give_up_s is None else min(give_up_s, self.retry_s))
        bound_s, again = FIRST_PAUSE_S, False
        while True:
            answer = yield request
            assert answer is not None
            if isinstance(answer, httpx.TransportError):
                error: NexusError = ConnectionLost(f"{self.url}: {type(answer).__name__}: {answer}")
                error.__cause__ = answer
            elif answer.status_code < 400 or (call.gone_is_done and again and answer.status_code == 404):
                return answer
            else:
                error = error_of(answer)
                later = isinstance(error, NotReady | RateLimited | StorageFull) or answer.status_code in AWAY
                if not later and not (isinstance(error, QuotaExceeded) and error.retryable):
                    raise error
            pause_s = max(random.uniform(0.5, 1.0) * bound_s, error.retry_after_s or 0.0)
            if time.monotonic() + pause_s > end_s:
                raise error
            yield pause_s
            bound_s, again = min(2 * bound_s, LONGEST_PAUSE_S), True


def error_of(response: httpx.Response) -> NexusError:
    """The exception of an answer with status >= 400."""
    try:
        body = json.loads(response.content)
    except ValueError:  # a proxy's page
        body = None
    error = error_from_json(body, response.status_code)
    after = response.headers.get("Retry-After", "")
    if error.retry_after_s is None and after.isdecimal():
        error.retry_after_s = float(after)
    return error


def message_of(response: httpx.Response) -> Message:
    """The body of an answer."""
    data = response.content
    kind = response.headers.get("Content-Type", "")
    if kind.startswith(JSON):
        return Message(json.loads(data)) if data else Message()
    return decode(data, kind, max(len(data), 1), max_meta_bytes=len(data))
