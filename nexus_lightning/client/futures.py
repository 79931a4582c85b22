"""Results that come later."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Protocol

from nexus_lightning.client.http import Call, Transport, message_of
from nexus_lightning.services.codec import JSON, MSGPACK, Message, encode
from nexus_lightning.services.errors import FutureTimeout, NexusError, future_error_from_json

ENDED = ("completed", "failed", "cancelled")
#: One long poll; the server sleeps meanwhile.
POLL_S = 30.0
#: Between two looks at the progress of a workload.
PROGRESS_S = 1.0


class NexusFuture[T]:
    """An accepted request. ``future.result()`` waits, ``await future`` too; both as often as you like.

    It lives on the server: leaving it alone does not stop it, and the id finds it again
    (:meth:`NexusClient.future <nexus_lightning.client.NexusClient.future>`).

    Attributes:
        future_id, tenant_id, seq: the server's.
    """

    def __init__(self, transport: Transport, ticket: dict[str, Any], convert: Callable[[Message], T]) -> None:
        self._transport, self._convert = transport, convert
        self.future_id: str = ticket["future_id"]
        self.tenant_id: str = ticket["tenant_id"]
        self.seq: int = ticket["seq"]
        self._outcome: tuple[T | None, NexusError | None] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.future_id}, seq={self.seq})"

    def result(self, timeout: float | None = None) -> T:
        """The result, when it is there.

        Raises:
            FutureTimeout: not within ``timeout`` seconds; it goes on, ask again.
            FutureFailed: its end without a result, with ``category``, ``reason`` and ``retryable``;
                :class:`FutureCancelled` and :class:`DeadlineExceeded` are kinds of it.
            Gone: it was read before, long ago, by somebody else.
            ConnectionLost: no answer from the server; the future is not affected.
        """
        end_s = None if timeout is None else time.monotonic() + timeout
        while self._outcome is None:
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            shown = message_of(self._transport.call(self._poll(left_s), left_s)).meta
            if shown["status"] in ENDED:
                data = self._transport.call(self._data()) if shown["data_bytes"] else None
                self._end(shown, data)
            elif left_s == 0.0:
                raise self._timeout(timeout, shown)
        return self._value()

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        while self._outcome is None:
            shown = message_of(await self._transport.acall(self._poll(None))).meta
            if shown["status"] in ENDED:
                data = await self._transport.acall(self._data()) if shown["data_bytes"] else None
                self._end(shown, data)
        return self._value()

    def done(self) -> bool:
        """Whether it has ended; asks the server."""
        return self._outcome is not None or self.status()["status"] in ENDED

    def status(self) -> dict[str, Any]:
        """``status`` (pending, running, completed, failed, cancelled), ``queue_state``, ``verb`` ... now."""
        return message_of(self._transport.call(self._poll(0.0))).meta

    def cancel(self) -> None:
        """Cancel it, unless it has ended."""
        self._transport.call(Call("DELETE", f"/v1/futures/{self.future_id}"))

    def _poll(self, left_s: float | None) -> Call:
        wait_s = POLL_S if left_s is None else min(left_s, POLL_S)
        return Call("GET", f"/v1/futures/{self.future_id}?wait_s={wait_s:.3f}", wait_s=wait_s)

    def _data(self) -> Call:
        return Call("GET", f"/v1/futures/{self.future_id}/data", headers={"Accept": MSGPACK})

    def _end(self, shown: dict[str, Any], data: Any) -> None:
        if shown["status"] == "completed":
            arrays = {} if data is None else message_of(data).arrays
            self._outcome = self._convert(Message(shown["result"] or {}, arrays)), None
        else:
            self._outcome = None, future_error_from_json(shown["error"] or {}, shown["status"])

    def _value(self) -> T:
        assert self._outcome is not None
        value, error = self._outcome
        if error is not None:
            raise error
        return value  # pyright: ignore[reportReturnType]

    def _timeout(self, timeout: float | None, shown: dict[str, Any]) -> FutureTimeout:
        return FutureTimeout(
            f"future {self.future_id} ({shown['verb']}): {shown['status']}, {shown['queue_state']} after {timeout:g} s"
        )


class Described(Protocol):
    """Whose workload it is: the client's tenant."""

    transport: Transport

    def describe(self) -> dict[str, Any]:
        """What the server knows of it now."""
        ...


class Workload(NexusFuture[dict[str, Any]]):
    """A workload of a tenant; its future ends with it.

    Attributes:
        workload_id: the server's.
    """

    def __init__(self, tenant: Described, ticket: dict[str, Any]) -> None:
        super().__init__(tenant.transport, ticket, lambda message: message.meta)
        self.tenant = tenant
        self.workload_id: str = ticket["workload_id"]

    def result(self, timeout: float | None = None, progress: bool = False) -> dict[str, Any]:
        """The result; ``progress`` shows a bar of the jobs meanwhile."""
        if not progress:
            return super().result(timeout)
        from tqdm.auto import tqdm

        end_s = None if timeout is None else time.monotonic() + timeout
        described = self.tenant.describe()
        with tqdm(total=described.get("target_jobs"), desc=str(described["name"]), unit="job") as bar:
            while True:
                left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
                try:
                    result = super().result(PROGRESS_S if left_s is None else min(left_s, PROGRESS_S))
                    bar.update((result.get("jobs") or bar.n) - bar.n)
                    return result
                except FutureTimeout:
                    if left_s == 0.0:
                        raise
                    described = self.tenant.describe()
                    bar.total = described.get("target_jobs")
                    bar.update((described.get("jobs_completed") or bar.n) - bar.n)
                    bar.set_postfix(version=described.get("policy_version"), refresh=False)

    def pause(self) -> dict[str, Any]:
        """Start no more jobs until :meth:`resume`."""
        return self._control("pause")

    def resume(self) -> dict[str, Any]:
        """Go on after :meth:`pause`."""
        return self._control("resume")

    def cancel(self) -> None:
        """End it; what was trained stays."""
        self._control("cancel")

    def describe(self) -> dict[str, Any]:
        """The workload as the server has it."""
        return message_of(self._transport.call(Call("GET", self._path))).meta

    @property
    def _path(self) -> str:
        return f"/v1/tenants/{self.tenant_id}/workloads/{self.workload_id}"

    def _control(self, action: str) -> dict[str, Any]:
        return message_of(self._transport.call(Call("POST", f"{self._path}/{action}"))).meta


def as_completed(
    transport: Transport, futures: Iterable[NexusFuture[Any]], timeout: float | None = None
) -> Iterator[NexusFuture[Any]]:
    """The futures in the order of their ends, one request for all of them."""
    waiting = {future.future_id: future for future in futures}
    end_s = None if timeout is None else time.monotonic() + timeout
    while waiting:
        left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
        wait_s = POLL_S if left_s is None else min(left_s, POLL_S)
        body = encode(Message({"future_ids": list(waiting)[:256], "wait_s": wait_s}), JSON)
        call = Call("POST", "/v1/futures/retrieve", body, {"Content-Type": JSON}, wait_s=wait_s)
        shown = message_of(transport.call(call, left_s)).meta["futures"]
        ended = [one["future_id"] for one in shown if one["status"] in ENDED]
        for future_id in ended:
            yield waiting.pop(future_id)
        if not ended and left_s == 0.0:
            raise FutureTimeout(f"{len(waiting)} futures have not ended after {timeout:g} s")
