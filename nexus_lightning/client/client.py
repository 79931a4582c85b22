"""Accounts, tenants, environment sessions: every verb of the API as a method."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np

from nexus_lightning.client.futures import NexusFuture, Workload, as_completed
from nexus_lightning.client.http import FIRST_PAUSE_S, LONGEST_PAUSE_S, Call, Transport, error_of, message_of
from nexus_lightning.services.codec import JSON, MSGPACK, Message, encode, flatten
from nexus_lightning.services.errors import Conflict, ConnectionLost, Gone, NexusError, NotFound, Unauthorized

T = TypeVar("T")
Named = str | Mapping[str, Any]
Arrays = Mapping[str, Any]


class NexusClient:
    """A connection to a running service. Thread-safe; close it, or use it in a ``with`` block.

    Every call is sent at once and returns when the server has taken it; long work gives a future. What gets no answer
    is sent again (see :class:`~nexus_lightning.client.http.Transport`). Changes of a tenant are numbered by the client,
    so that they happen in the order of the calls and each of them once: let one client at a time change a tenant.

    Args:
        url: of the server; None: the environment variable ``NEXUS_URL``.
        token: None: ``NEXUS_TOKEN``.
        retry_s: how long a request is sent again before its error is raised.
        timeout_s: how long one try may take.

    Example:
        >>> client = NexusClient("http://localhost:8000", token)                              # doctest: +SKIP
        >>> tenant = client.create_tenant("arm", schema=schema, head={"name": "mlp"})         # doctest: +SKIP
        >>> tenant.train("sft", dataset="toy", target_jobs=20).result()["policy_version"]     # doctest: +SKIP
        20
    """

    def __init__(
        self, url: str | None = None, token: str | None = None, *, retry_s: float = 120.0, timeout_s: float = 60.0
    ) -> None:
        url, token = url or os.environ.get("NEXUS_URL"), token or os.environ.get("NEXUS_TOKEN")
        if not url:
            raise ValueError("url: give the server's address, http://host:port, or set NEXUS_URL")
        if not token:
            raise Unauthorized("token: give nxl_<id>_<secret> or set NEXUS_TOKEN")
        self._transport = Transport(url, token, retry_s, timeout_s)
        self._tenants: dict[str, Tenant] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"NexusClient({self._transport.url!r})"

    def __enter__(self) -> NexusClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> NexusClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._transport.aclose()

    def close(self) -> None:
        """Close the connections; futures go on."""
        self._transport.close()

    # ---- tenants ----

    def capabilities(self) -> dict[str, Any]:
        """Backbone, heads, environments, datasets and limits of the server."""
        return self._get("/v1/capabilities")

    def create_tenant(self, name: str, schema: Mapping[str, Any], head: Named, **options: Any) -> Tenant:
        """A new tenant, or the one that the same call made before.

        Args:
            name: yours; unique in the account.
            schema: what the robot looks like, as ``schema`` in ``conf/tenant/*.yaml``.
            head: name in the server's registry, or ``{"name": ..., **overrides}``.
            options: ``seed``, ``priority``, ``weight``, ``max_in_flight``, ``max_policy_staleness``.

        Raises:
            Conflict: the account has one of this name with another spec.
            InvalidRequest: with a line for every problem.
        """
        spec = {"name": name, "schema": dict(schema), "head": named(head), **options}
        return self._tenant(message_of(self._post("/v1/tenants", spec)).meta)

    def list_tenants(self) -> list[dict[str, Any]]:
        """Descriptions of the account's tenants (an operator's: of all)."""
        return self._get("/v1/tenants")["tenants"]

    def tenant(self, name: str) -> Tenant:
        """The tenant of this name or id. An operator finds every account's: it may :meth:`~Tenant.pause`,
        :meth:`~Tenant.resume`, :meth:`~Tenant.cancel` and :meth:`~Tenant.delete` them.

        Raises:
            NotFound: there is none.
            Conflict: several accounts have one of this name; give the id.
        """
        try:
            return self._tenant(self._get(f"/v1/tenants/{name}"))
        except NotFound:
            found = [described for described in self.list_tenants() if described["name"] == name]
        if len(found) > 1:
            ids = ", ".join(f"{one['tenant_id']} (of {one['owner']})" for one in found)
            raise Conflict(f"tenant {name!r}: several accounts have one: give its id: {ids}")
        if not found:
            raise NotFound(f"tenant {name!r}: this account has none of that name or id")
        return self._tenant(found[0])

    def _tenant(self, described: dict[str, Any]) -> Tenant:
        with self._lock:  # one object a tenant: it counts the requests
            tenant_id = described["tenant_id"]
            return self._tenants.setdefault(tenant_id, Tenant(self._transport, tenant_id, described["name"]))

    # ---- futures ----

    def future(self, future_id: str) -> NexusFuture[Message]:
        """A future of an earlier client."""
        return NexusFuture(self._transport, self._get(f"/v1/futures/{future_id}"), lambda message: message)

    def as_completed(
        self, futures: Iterable[NexusFuture[Any]], timeout: float | None = None
    ) -> Iterator[NexusFuture[Any]]:
        """The futures in the order of their ends.

        Raises:
            FutureTimeout: the next one did not end before ``timeout`` seconds were over.
        """
        return as_completed(self._transport, futures, timeout)

    # ---- environments ----

    def open_session(
        self, environment: Named, *, seed: int | None = None, lease_s: float | None = None, tenant_id: str | None = None
    ) -> Session:
        """A simulator of one's own on the server; it closes when no call came for ``lease_s`` seconds."""
        meta = {"environment": named(environment), "seed": seed, "lease_s": lease_s, "tenant_id": tenant_id}
        meta = {key: value for key, value in meta.items() if value is not None}
        return Session(self._transport, message_of(self._post("/v1/environments/sessions", meta)).meta)

    # ---- operator ----

    def overview(self) -> dict[str, Any]:
        """What the operator's page shows."""
        return self._get("/v1/operator/overview")

    def create_token(self, owner: str, role: str = "tenant") -> dict[str, Any]:
        """A token; the only time that its secret is seen."""
        return message_of(self._post("/v1/operator/tokens", {"owner": owner, "role": role})).meta

    def list_tokens(self) -> list[dict[str, Any]]:
        return self._get("/v1/operator/tokens")["tokens"]

    def revoke_token(self, token_id: str) -> None:
        self._transport.call(Call("DELETE", f"/v1/operator/tokens/{token_id}", gone_is_done=True))

    def audit(self, after: int = 0) -> list[dict[str, Any]]:
        """Who did what, oldest first."""
        return self._get(f"/v1/operator/audit?after={after}")["audit"]

    def _get(self, path: str) -> Any:
        return message_of(self._transport.call(Call("GET", path))).meta

    def _post(self, path: str, meta: dict[str, Any]) -> httpx.Response:
        return self._transport.call(Call("POST", path, encode(Message(meta), JSON), {"Content-Type": JSON}))


class Tenant:
    """One tenant of the account; made by :class:`NexusClient`.

    Observations are trees or flat names: ``{"state": [B, S], "image": {"agentview": uint8 [B, 3, H, W]}}`` is the same
    as ``{"observation/state": ..., "observation/image/agentview": ...}``.

    Attributes:
        tenant_id: the server's.
        name: yours.
    """

    def __init__(self, transport: Transport, tenant_id: str, name: str) -> None:
        self.transport, self.tenant_id, self.name = transport, tenant_id, name
        self._path = f"/v1/tenants/{tenant_id}"
        self._sending = threading.Lock()
        self._next_seq: int | None = None  # None: ask

    def __repr__(self) -> str:
        return f"Tenant({self.name!r}, {self.tenant_id})"

    # ---- high level ----

    def describe(self) -> dict[str, Any]:
        """State, policy version, jobs by state, memory, evaluations, last error."""
        return message_of(self.transport.call(Call("GET", self._path))).meta

    def delete(self) -> None:
        """End its work and remove it with its results and payloads."""
        self.transport.call(Call("DELETE", self._path, gone_is_done=True))

    def train(
        self, task: str, *, dataset: Named | None = None, environment: Named | None = None, **options: Any
    ) -> Workload:
        """Start a workload; at most one that trains at a time.

        Args:
            task: ``sft`` | ``rl`` | ``offline_rl`` | ``eval``.
            dataset, environment: name in the server's registry, or ``{"name": ..., **overrides}``.
            options: ``algorithm``, ``eval``, ``features`` (maps, as in ``conf/tenant/*.yaml``), ``target_jobs``;
                ``deadline_s``: it must have ended by then.
        """
        deadline_s = options.pop("deadline_s", None)
        spec = {"task": task, **options}
        if dataset is not None:
            spec["dataset"] = named(dataset)
        if environment is not None:
            spec["environment"] = named(environment)
        return self.submit(spec, deadline_s=deadline_s)

    def submit(self, workload: Mapping[str, Any], *, deadline_s: float | None = None) -> Workload:
        """:meth:`train` with the workload as one map."""
        answer = self._send("workloads", dict(workload), deadline_s=deadline_s)
        return Workload(self, message_of(answer).meta)

    def workloads(self) -> list[dict[str, Any]]:
        """All workloads, oldest first."""
        return message_of(self.transport.call(Call("GET", f"{self._path}/workloads"))).meta["workloads"]

    def workload(self, workload_id: str | None = None) -> Workload:
        """An earlier workload; None: the last one.

        Raises:
            NotFound: there is none.
        """
        for found in reversed(self.workloads()):
            if workload_id in (None, found["workload_id"]):
                return Workload(self, {**found, "tenant_id": self.tenant_id})
        raise NotFound(f"tenant {self.name!r}: no workload {workload_id or ''}".rstrip())

    def pause(self) -> dict[str, Any]:
        """Pause the last workload."""
        return self.workload().pause()

    def resume(self) -> dict[str, Any]:
        return self.workload().resume()

    def cancel(self) -> None:
        self.workload().cancel()

    def evaluate(self, episodes: int, **options: Any) -> NexusFuture[dict[str, Any]]:
        """Success rate with its interval, at one policy version.

        Args:
            episodes: of every task.
            options: ``environment`` (None: the workload's), ``first_seed``, ``num_envs``, ``policy_version``;
                ``deadline_s``.
        """
        return self._future("evaluate", {"episodes": episodes, **self._environment(options)}, _meta)

    def rollout(self, episodes: int, **options: Any) -> NexusFuture[Message]:
        """Episodes whose transitions come back as arrays; options of :meth:`evaluate` and ``deterministic``."""
        return self._future("inference/rollout", {"episodes": episodes, **self._environment(options)}, _message)

    def export(self) -> NexusFuture[dict[str, Any]]:
        """Write the payload of the current version; :meth:`download` fetches it."""
        return self._future("export", {}, _meta)

    def payloads(self) -> list[dict[str, Any]]:
        """Versions on the server's disk, oldest first."""
        return message_of(self.transport.call(Call("GET", f"{self._path}/payloads"))).meta["payloads"]

    def download(self, version: int, folder: str | Path) -> Path:
        """Unpack the payload of a version below ``folder``; returns its own folder, as ``scripts/evaluate.py`` takes
        it."""
        data = self.transport.call(Call("GET", f"{self._path}/payloads/{version}", wait_s=600.0)).content
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            names = {name.split("/")[0] for name in archive.getnames()}
            archive.extractall(folder, filter="data")  # refuses links and what would land outside
        (name,) = names
        return Path(folder) / name

    def metrics(self, after: int = 0) -> list[dict[str, Any]]:
        """``{"id", "time_s", "metrics"}`` so far, with ids above ``after``."""
        answer = self.transport.call(Call("GET", f"{self._path}/metrics?follow=false&after={after}"))
        return json.loads(answer.content)

    def stream_metrics(self, after: int = 0) -> Iterator[dict[str, Any]]:
        """:meth:`metrics` as they come, without end; a lost connection is opened again where it stopped."""
        pause_s, end_s = FIRST_PAUSE_S, time.monotonic() + self.transport.retry_s
        while True:
            try:
                with self.transport.stream(f"{self._path}/metrics", {"Last-Event-ID": str(after)}) as response:
                    if response.status_code >= 400:
                        response.read()
                        raise error_of(response)
                    for line in response.iter_lines():
                        if line.startswith("data:"):
                            row = json.loads(line[5:])
                            after = row["id"]
                            pause_s, end_s = FIRST_PAUSE_S, time.monotonic() + self.transport.retry_s
                            yield row
            except (NexusError, httpx.TransportError) as error:
                retryable = isinstance(error, httpx.TransportError) or error.retryable
                if not retryable or time.monotonic() > end_s:
                    if isinstance(error, NexusError):
                        raise
                    raise ConnectionLost(f"{self.transport.url}: {type(error).__name__}: {error}") from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def predict(
        self,
        observation: Arrays,
        instructions: Sequence[str],
        *,
        deterministic: bool = True,
        policy_version: int | None = None,
        seed: int | None = None,
    ) -> dict[str, np.ndarray]:
        """Action chunks for B observations; answers at once.

        Args:
            observation: see the class.
            instructions: B texts.
            deterministic: False samples, with ``seed``.
            policy_version: None: the latest.
            seed: of the sampling noise.

        Returns:
            ``action`` float32 ``[B, T, A]`` as the simulator takes it, ``policy_version`` ``[B, 1]`` and more.
        """
        meta = {
            "instructions": list(instructions),
            "deterministic": deterministic,
            "policy_version": policy_version,
            "seed": seed,
        }
        body = encode(Message(meta, observation_arrays(observation)), MSGPACK)
        call = Call("POST", f"{self._path}/inference/predict", body, _BINARY)
        return message_of(self.transport.call(call)).arrays

    # ---- low level: training ----

    def train_job(self, job_id: str, **more: Any) -> NexusFuture[dict[str, Any]]:
        """Train a job of the scheduler that is ready, now."""
        return self._future("training/train_job", {"job_id": job_id, **more}, _meta)

    def forward_backward(
        self,
        observation: Arrays,
        instructions: Sequence[str],
        action: np.ndarray | None = None,
        *,
        loss: str = "sft",
        loss_options: Mapping[str, Any] | None = None,
        arrays: Arrays | None = None,
        **more: Any,
    ) -> NexusFuture[dict[str, Any]]:
        """Add the gradient of one batch.

        Args:
            observation: see the class.
            instructions: B texts.
            action: ``[B, T, A]`` as the simulator takes it, for the losses that imitate.
            loss: an algorithm of the server: ``sft``, ``awr``, ``ppo``, ``grpo``, ``reinforce``.
            loss_options: its settings, as in ``conf/algorithm/<loss>.yaml``.
            arrays: what the loss needs besides: ``is_pad``, or ``chunk``, ``log_probs``, ``advantage`` ...
        """
        meta = {"instructions": list(instructions), "loss": loss, "loss_options": dict(loss_options or {}), **more}
        return self._future("training/forward_backward", meta, _meta, _batch(observation, action, arrays))

    def optim_step(
        self, *, lr: float | None = None, grad_clip_norm: float | None = None, **more: Any
    ) -> NexusFuture[dict[str, Any]]:
        """Step with the gradients so far and publish the next version; None: the head's own setting."""
        options = {"lr": lr, "grad_clip_norm": grad_clip_norm, **more}
        return self._future("training/optim_step", {k: v for k, v in options.items() if v is not None}, _meta)

    def train_batch(
        self,
        observation: Arrays,
        instructions: Sequence[str],
        action: np.ndarray | None = None,
        *,
        loss: str = "sft",
        loss_options: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        arrays: Arrays | None = None,
        **more: Any,
    ) -> NexusFuture[dict[str, Any]]:
        """:meth:`forward_backward` and :meth:`optim_step` (with ``options``) in one."""
        meta = {"instructions": list(instructions), "loss": loss, "loss_options": dict(loss_options or {}), **more}
        meta["options"] = dict(options or {})
        return self._future("training/train_batch", meta, _meta, _batch(observation, action, arrays))

    def export_params(self) -> NexusFuture[dict[str, np.ndarray]]:
        """The head's parameters."""
        return self._future("training/export_params", {}, lambda message: message.arrays)

    def save(self) -> NexusFuture[dict[str, Any]]:
        """Write a payload of this version."""
        return self._future("training/save", {}, _meta)

    def load(self, source: int | Mapping[str, np.ndarray]) -> NexusFuture[dict[str, Any]]:
        """Go back to a saved version, or take parameters over."""
        if isinstance(source, int):
            return self._future("training/load", {"version": source}, _meta)
        return self._future("training/load", {}, _meta, dict(source))

    def load_weights(self, version: int) -> NexusFuture[dict[str, Any]]:
        """Predict with that version."""
        return self._future("inference/load_weights", {"version": version}, _meta)

    # ---- low level: queue and scheduler, answered directly ----

    def queue_put(
        self, arrays: Arrays, *, partition_id: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """A new partition, or (with the ``metadata`` of a delivery) derived columns of its rows."""
        meta = {"partition_id": partition_id, "metadata": None if metadata is None else dict(metadata)}
        return self._direct("queue/queue_put", {k: v for k, v in meta.items() if v is not None}, flatten(arrays))

    def queue_get_meta(
        self, partition_id: str, fields: Sequence[str], task_name: str, batch_size: int | None = None
    ) -> dict[str, Any]:
        """The next rows of a partition for the consumer ``task_name``, as the ``metadata`` of the other calls."""
        meta = {"partition_id": partition_id, "fields": list(fields), "task_name": task_name, "batch_size": batch_size}
        return self._direct("queue/queue_get_meta", meta)

    def queue_get(self, metadata: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The rows of a delivery."""
        body = encode(Message({"metadata": dict(metadata)}), MSGPACK)
        return message_of(self.transport.call(Call("POST", f"{self._path}/queue/queue_get", body, _BINARY))).arrays

    def queue_clear(self, partition_id: str) -> dict[str, Any]:
        return self._direct("queue/queue_clear", {"partition_id": partition_id})

    def reserve(self, sample_count: int, **options: Any) -> dict[str, Any]:
        """A new job, or a null job at the bound; ``behavior_policy_version``, ``domain``, ``metadata``."""
        return self._direct("scheduler/reserve", {"sample_count": sample_count, **options})

    def mark(self, job_id: str, state: str, **options: Any) -> dict[str, Any]:
        """A job's next state; ``lease_id``, ``metadata``."""
        return self._direct("scheduler/mark", {"job_id": job_id, "state": state, **options})

    def lease_next(self, deadline_s: float = 600.0) -> dict[str, Any]:
        """The next ready job of this tenant, or none."""
        return self._direct("scheduler/lease_next", {"deadline_s": deadline_s})

    def complete(self, job_id: str, lease_id: int, **options: Any) -> dict[str, Any]:
        return self._direct("scheduler/complete", {"job_id": job_id, "lease_id": lease_id, **options})

    def fail(self, job_id: str, reason: str, **options: Any) -> dict[str, Any]:
        return self._direct("scheduler/fail", {"job_id": job_id, "reason": reason, **options})

    # ---- how a change is sent ----

    def _future(
        self, verb: str, meta: dict[str, Any], convert: Callable[[Message], T], arrays: Arrays | None = None
    ) -> NexusFuture[T]:
        deadline_s = meta.pop("deadline_s", None)
        answer = self._send(verb, meta, arrays, deadline_s)
        return NexusFuture(self.transport, message_of(answer).meta, convert)

    def _direct(self, verb: str, meta: dict[str, Any], arrays: Arrays | None = None) -> dict[str, Any]:
        answer = self._send(verb, meta, arrays)
        found = message_of(answer).meta
        if answer.status_code == 202:  # what comes before it is still running
            return NexusFuture(self.transport, found, _meta).result()
        return found

    def _send(
        self, verb: str, meta: dict[str, Any], arrays: Arrays | None = None, deadline_s: float | None = None
    ) -> httpx.Response:
        """One numbered change. The number is used up when the server answers with success; after any error it is asked
        for: the request may have been taken or not."""
        body = encode(Message(meta, dict(arrays or {})), MSGPACK)
        headers = dict(_BINARY)
        if deadline_s is not None:
            headers["Nexus-Deadline-S"] = str(deadline_s)
        with self._sending:  # the next number must not overtake this one, nor leave a gap when this one is refused
            seq = self.describe()["next_seq"] if self._next_seq is None else self._next_seq
            self._next_seq = None
            headers["Nexus-Seq"] = str(seq)
            answer = self.transport.call(Call("POST", f"{self._path}/{verb}", body, headers, wait_s=30.0))
            self._next_seq = seq + 1
        return answer

    def _environment(self, options: dict[str, Any]) -> dict[str, Any]:
        found = options.get("environment")
        return options if found is None else {**options, "environment": named(found)}


class Session:
    """A simulator on the server; every action is carried out once, whatever the network does.

    Attributes:
        about: ``instruction``, ``state_dim``, ``cameras``, ``image_size``, ``max_steps`` ...
    """

    def __init__(self, transport: Transport, about: dict[str, Any]) -> None:
        self._transport, self.about, self._seq = transport, about, 0
        self.session_id: str = about["session_id"]

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset(self, seed: int) -> Message:
        """Arrays ``state`` and ``image/<camera>``; meta ``instruction``."""
        return self._post("reset", {"seed": seed})

    def step(self, action: np.ndarray) -> Message:
        """Observation; meta ``reward``, ``terminated``, ``truncated``, ``success``."""
        return self._act("step", {"action": np.asarray(action, np.float32)})

    def batch_step(self, actions: np.ndarray) -> Message:
        """Up to the first end: array ``rewards``, last observation; meta ``steps``, ``terminated`` ..."""
        return self._act("batch_step", {"actions": np.asarray(actions, np.float32)})

    def close(self) -> None:
        """Give the simulator back; one that is gone already is no error."""
        with contextlib.suppress(Gone, NotFound):
            self._post("close", {})

    def _act(self, verb: str, arrays: Arrays) -> Message:
        answer = self._post(verb, {"request_seq": self._seq + 1}, arrays)
        self._seq += 1
        return answer

    def _post(self, verb: str, meta: dict[str, Any], arrays: Arrays | None = None) -> Message:
        body = encode(Message(meta, dict(arrays or {})), MSGPACK)
        path = f"/v1/environments/sessions/{self.session_id}/{verb}"
        return message_of(self._transport.call(Call("POST", path, body, _BINARY)))


_BINARY = {"Content-Type": MSGPACK, "Accept": MSGPACK}


def named(value: Named) -> dict[str, Any]:
    """``"mlp"`` -> ``{"name": "mlp"}``."""
    return {"name": value} if isinstance(value, str) else dict(value)


def observation_arrays(observation: Arrays) -> dict[str, np.ndarray]:
    """Flat names, all below ``observation/``."""
    flat = flatten(observation)
    return {name if name.startswith("observation/") else f"observation/{name}": array for name, array in flat.items()}


def _batch(observation: Arrays, action: np.ndarray | None, arrays: Arrays | None) -> dict[str, np.ndarray]:
    imitated = {} if action is None else {"action": np.asarray(action)}
    return {**observation_arrays(observation), **imitated, **flatten(arrays or {})}


def _meta(message: Message) -> dict[str, Any]:
    return message.meta


def _message(message: Message) -> Message:
    return message
