"""HTTP: routes, bodies, errors. What a route means is in :mod:`nexus_lightning.services.service`.

A request passes: token and rate ─► size of its body, while it arrives ─► codec (bounds before anything is built) ─►
pydantic (:mod:`nexus_lightning.services.bodies`) ─► the service, in a worker thread. Nothing blocks the event loop, so
one tenant's long call never delays another one's; waiting for a future needs no thread at all.

Bad input is answered with a 4xx in the one error form; a 5xx is a defect of the server (or 503: starting, stopping;
507: its disk takes no more writes).
"""

from __future__ import annotations

import functools
import json
import os
import sqlite3
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import anyio
import uvicorn
from fastapi import Depends, FastAPI, Header, Query, Request
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

import nexus_lightning
from nexus_lightning.services import bodies
from nexus_lightning.services.auth import Account, require_operator
from nexus_lightning.services.codec import JSON, MSGPACK, SAFETENSORS, Message, decode, encode
from nexus_lightning.services.errors import (
    ERRORS,
    Conflict,
    InvalidRequest,
    NexusError,
    NotFound,
    TooLarge,
    error_from_json,
    storage_error,
)
from nexus_lightning.services.exporter import Exporter
from nexus_lightning.services.service import Arrays, Service
from nexus_lightning.services.store import ENDED

T = TypeVar("T")
PAGE = Path(__file__).parent / "page.html"
#: A queue or scheduler call answers with its result when it ends within so many seconds, else with its future.
DIRECT_WAIT_S = 30.0
#: Longest life of a stream of metrics: the client opens it again where it stopped (``Last-Event-ID``).
STREAM_S = 3600.0
#: Calls into the service at the same time; each owner has its own bound below it.
THREADS = 128
#: Bodies above this are decoded in a thread.
SMALL_BYTES = 1 << 16
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

#: training and inference verbs that answer with a future: route -> (model, takes arrays, what it does)
FUTURES: dict[str, tuple[type[bodies.Body], bool, str]] = {
    "training/train_job": (bodies.TrainJob, False, "Train one ready job of this tenant now."),
    "training/train_batch": (bodies.TrainBatch, True, "Forward, backward and optimizer step of one batch."),
    "training/forward_backward": (bodies.Batch, True, "Add one batch's gradient."),
    "training/optim_step": (bodies.Options, False, "Step with the gradients so far and publish the next version."),
    "training/export_params": (bodies.Empty, False, "The head's parameters as arrays of the result."),
    "training/save": (bodies.Empty, False, "Write a payload of this version."),
    "training/load": (bodies.Load, True, "Go back to a version, or take parameters over."),
    "inference/rollout": (bodies.Rollout, False, "Run episodes; transitions are arrays of the result."),
    "inference/load_weights": (bodies.LoadWeights, False, "Predict with that version."),
    "evaluate": (bodies.Evaluate, False, "Success rate with its confidence interval, at one policy version."),
    "export": (bodies.Empty, False, "Write and name the payload of the current version."),
}
#: queue and scheduler verbs: executed in order like the others, answered with their result
DIRECT: dict[str, tuple[type[bodies.Body], bool, str]] = {
    "queue/queue_put": (bodies.QueuePut, True, "Add a partition, or derived columns."),
    "queue/queue_get_meta": (bodies.QueueGetMeta, False, "Take the next rows of a partition."),
    "queue/queue_clear": (bodies.QueueClear, False, "Drop a partition."),
    "scheduler/reserve": (bodies.Reserve, False, "A new job, or null at the bound."),
    "scheduler/mark": (bodies.Mark, False, "A job's next state."),
    "scheduler/lease_next": (bodies.LeaseNext, False, "Lease the next ready job of this tenant, or null."),
    "scheduler/complete": (bodies.Complete, False, "A leased job is done."),
    "scheduler/fail": (bodies.Fail, False, "Give a job up."),
}

Seq = Annotated[
    int | None,
    Header(alias="Nexus-Seq", ge=1, le=2**53, description="number of this request: 1, 2, 3 ... of the tenant"),
]
Deadline = Annotated[
    float | None,
    Header(alias="Nexus-Deadline-S", gt=0, le=30 * 86400, allow_inf_nan=False, description="must have ended by then"),
]
WaitS = Annotated[float, Query(ge=0, le=60, allow_inf_nan=False)]
After = Annotated[int, Query(ge=0, le=2**53)]


def make_app(service: Service) -> FastAPI:
    """The ASGI application of one service."""
    return _Routes(service).app


def make_server(service: Service) -> uvicorn.Server:
    """The HTTP server of one service, to be run in a thread of the process that trains."""
    settings = uvicorn.Config(
        make_app(service),
        log_level="warning",
        access_log=False,  # paths hold ids, and /metrics counts
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=10,
    )
    return uvicorn.Server(settings)


class _Routes:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.exporter = Exporter(service)
        self.threads = anyio.CapacityLimiter(THREADS)
        self.streams = anyio.CapacityLimiter(THREADS)
        self.models: dict[str, type[BaseModel]] = {}
        self.app = app = FastAPI(
            title="nexus-lightning",
            version=nexus_lightning.__version__,
            description="Many tenants train private action heads on one frozen backbone.",
            redoc_url=None,
        )
        app.openapi = self._openapi  # type: ignore[method-assign]
        app.add_middleware(_Count, exporter=self.exporter)
        for kind in (NexusError, HTTPException, RequestValidationError, ClientDisconnect, Exception):
            app.add_exception_handler(kind, _answer_error)
        bearer = HTTPBearer(auto_error=False, scheme_name="token", description="nxl_<id>_<secret>")
        self.protected: dict[str, Any] = {
            "dependencies": [Depends(bearer)],
            "responses": {
                "4XX": {"model": bodies.ErrorAnswer, "description": "refused; the body says why"},
                "503": {"model": bodies.ErrorAnswer, "description": "starting or stopping: send it again"},
                "507": {"model": bodies.ErrorAnswer, "description": "the disk is full: send it again later"},
            },
        }
        self._add_open_routes()
        self._add_tenant_routes()
        self._add_verb_routes()
        self._add_session_routes()
        self._add_future_routes()
        self._add_operator_routes()

    # ---------------------------------------------------------------------------------------------------------- helpers

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """A blocking call in a worker thread.

        Raises:
            StorageFull: the disk refused what it had to write.
        """
        try:
            return await anyio.to_thread.run_sync(functools.partial(function, *args), limiter=self.threads)
        except (OSError, sqlite3.Error) as error:
            if isinstance(error, NexusError) or (told := storage_error(error)) is None:
                raise
            raise told from error

    def account(self, request: Request, starting: bool = False) -> Account:
        """Who calls; counts against the rate."""
        account = self.service.accounts.authenticate(request.headers.get("authorization"))
        self.service.accounts.admit(account)
        if not starting:
            self.service.check_open()
        return account

    async def read(self, request: Request, model: type[bodies.Body], arrays: bool = False) -> tuple[dict, Arrays]:
        """The checked meta and the arrays of a body; reading stops at the limit, whatever the length said."""
        limit = int(self.service.limits.max_body_mb * 2**20)
        data = bytearray()
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise TooLarge(f"the body has {declared} bytes, allowed are {limit}")
        async for chunk in request.stream():
            data += chunk
            if len(data) > limit:
                raise TooLarge(f"the body has more than {limit} bytes")
        content_type = request.headers.get("content-type")
        if len(data) > SMALL_BYTES:
            message = await self.run(decode, bytes(data), content_type, limit)
        else:
            message = decode(bytes(data), content_type, limit)
        if message.arrays and not arrays:
            raise InvalidRequest(f"this route takes no arrays: {', '.join(sorted(message.arrays)[:5])}")
        try:
            return _without_none(model.model_validate(message.meta).model_dump(by_alias=True)), message.arrays
        except ValidationError as error:
            raise InvalidRequest("the body does not fit", _lines(error.errors(include_url=False))) from None

    def body(self, model: type[BaseModel], arrays: bool = False) -> dict[str, Any]:
        """``openapi_extra`` of a route that reads ``model``, with arrays beside it or not."""
        self.models[model.__name__] = model
        content: dict[str, Any] = {JSON: {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        if arrays:
            binary = {"schema": {"type": "string", "format": "binary"}}
            content = {MSGPACK: binary, SAFETENSORS: binary, **content}
        text = "Arrays travel as msgpack or safetensors, with these keys as `meta`." if arrays else ""
        required = any(field.is_required() for field in model.model_fields.values())
        return {"requestBody": {"content": content, "description": text, "required": required}}

    def add(
        self,
        method: str,
        path: str,
        endpoint: Callable[..., Awaitable[Response]],
        summary: str,
        answer: type[BaseModel] | dict[str, Any] | None = None,
        *,
        status: int = 200,
        reads: type[BaseModel] | None = None,
        arrays: bool = False,
        name: str | None = None,
    ) -> None:
        """One protected route with everything that OpenAPI should say about it."""
        described: dict[str, Any] = {"description": "done"}
        if isinstance(answer, dict):
            described["content"] = answer
        elif answer is not None:
            described["model"] = answer
        self.app.add_api_route(
            path,
            endpoint,
            methods=[method],
            name=name or endpoint.__name__,
            operation_id=name or endpoint.__name__,
            summary=summary,
            status_code=status,
            response_class=Response,
            dependencies=self.protected["dependencies"],
            responses={**self.protected["responses"], status: described},
            openapi_extra=None if reads is None else self.body(reads, arrays),
        )

    def _openapi(self) -> dict[str, Any]:
        app = self.app
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, defined = models_json_schema(
                [(model, "validation") for model in self.models.values()], ref_template="#/components/schemas/{model}"
            )
            schema["components"]["schemas"] |= defined["$defs"]
            app.openapi_schema = schema
        return app.openapi_schema

    # ------------------------------------------------------------------------------------------------------ open routes

    def _add_open_routes(self) -> None:
        app, service = self.app, self.service

        @app.get("/", response_class=HTMLResponse, summary="The operator's page; it asks for a token.")
        async def page() -> Response:
            return HTMLResponse(PAGE.read_bytes(), headers=_PAGE_HEADERS)

        @app.get("/healthz", summary="The process lives.", response_class=Response)
        async def healthz() -> Response:
            return _json({"status": "ok"})

        @app.get(
            "/readyz",
            summary="A request would go through: asks the loop, writes to the store; no write fails.",
            response_class=Response,
            responses={503: {"model": bodies.ErrorAnswer, "description": "not yet, or no longer"}},
        )
        async def readyz() -> Response:
            await self.run(service.check_ready)
            return _json({"status": "ready"})

        async def metrics(request: Request) -> Response:
            require_operator(self.account(request, starting=True))
            data, content_type = await self.run(self.exporter.render)
            return Response(data, media_type=content_type)

        self.add("GET", "/metrics", metrics, "Prometheus; needs an operator token.", {"text/plain": {}})

        async def capabilities(request: Request) -> Response:
            self.account(request)
            return _json(await self.run(service.master.capabilities))

        self.add("GET", "/v1/capabilities", capabilities, "What a spec may name, and limits.", bodies.Answer)

    # ---------------------------------------------------------------------------------------------------------- tenants

    def _add_tenant_routes(self) -> None:
        service, one = self.service, "/v1/tenants/{tenant_id}"

        async def create_tenant(request: Request) -> Response:
            account = self.account(request)
            spec, _ = await self.read(request, bodies.TenantSpec)
            new, description = await self.run(service.create_tenant, account, _given(spec))
            return _json(description, 201 if new else 200)

        self.add(
            "POST",
            "/v1/tenants",
            create_tenant,
            "Create a tenant; 200 when the same call made it before.",
            bodies.TenantAnswer,
            status=201,
            reads=bodies.TenantSpec,
        )

        async def list_tenants(request: Request) -> Response:
            return _json({"tenants": await self.run(service.list_tenants, self.account(request))})

        self.add("GET", "/v1/tenants", list_tenants, "The caller's tenants (operators: all).", bodies.Answer)

        async def get_tenant(request: Request, tenant_id: str) -> Response:
            return _json(await self.run(service.describe, self.account(request), tenant_id))

        self.add("GET", one, get_tenant, "State, policy version, jobs, memory, errors.", bodies.TenantAnswer)

        async def delete_tenant(request: Request, tenant_id: str) -> Response:
            await self.run(service.delete_tenant, self.account(request), tenant_id)
            return Response(status_code=204)

        text = "Delete a tenant, its results and payloads (operators: of any account)."
        self.add("DELETE", one, delete_tenant, text, status=204)

        async def submit_workload(
            request: Request, tenant_id: str, seq: Seq = None, deadline_s: Deadline = None
        ) -> Response:
            account = self.account(request)
            spec, _ = await self.read(request, bodies.Workload)
            return _json(
                await self.run(service.submit_workload, account, tenant_id, _given(spec), seq, deadline_s), 202
            )

        self.add(
            "POST",
            one + "/workloads",
            submit_workload,
            "Start a workload; its future ends with it.",
            bodies.Ticket,
            status=202,
            reads=bodies.Workload,
        )

        async def list_workloads(request: Request, tenant_id: str) -> Response:
            return _json({"workloads": await self.run(service.workloads, self.account(request), tenant_id)})

        self.add("GET", one + "/workloads", list_workloads, "All workloads, oldest first.", bodies.Answer)

        async def get_workload(request: Request, tenant_id: str, workload_id: str) -> Response:
            return _json(await self.run(service.workload, self.account(request), tenant_id, workload_id))

        self.add("GET", one + "/workloads/{workload_id}", get_workload, "One workload.", bodies.WorkloadAnswer)

        for action, summary in (
            ("pause", "Start no more jobs until it is resumed (operators: of any account)."),
            ("resume", "Go on after a pause (operators: of any account)."),
            ("cancel", "End it; what was trained stays (operators: of any account)."),
        ):
            path = one + "/workloads/{workload_id}/" + action
            endpoint = self._control(action)
            self.add("POST", path, endpoint, summary, bodies.WorkloadAnswer, reads=bodies.Empty, name=action)

        async def list_payloads(request: Request, tenant_id: str) -> Response:
            return _json({"payloads": await self.run(service.payloads, self.account(request), tenant_id)})

        self.add("GET", one + "/payloads", list_payloads, "Saved versions.", bodies.Answer)

        async def get_payload(
            request: Request, tenant_id: str, version: Annotated[int, PathParameter(ge=0, le=2**53)]
        ) -> Response:
            folder = await self.run(service.payload, self.account(request), tenant_id, version)
            headers = {"Content-Disposition": f'attachment; filename="{tenant_id}-{folder.name}.tar"'}
            stream = await self.run(tar_stream, folder)
            return StreamingResponse(stream, media_type="application/x-tar", headers=headers)

        tar = {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}
        self.add("GET", one + "/payloads/{version}", get_payload, "A payload folder as a tar file.", tar)

        async def tenant_metrics(
            request: Request,
            tenant_id: str,
            follow: bool = True,
            after: After = 0,
            last_event_id: Annotated[int | None, Header(alias="Last-Event-ID", ge=0, le=2**53)] = None,
        ) -> Response:
            account = self.account(request)
            after = after if last_event_id is None else last_event_id
            rows = await self.run(service.metrics, account, tenant_id, after)
            if not follow:
                return Response(b"[" + b",".join(encode(Message(row), JSON) for row in rows) + b"]", media_type=JSON)
            service.check_stream(account)
            events = self._events(account, tenant_id, rows, after)
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)

        stream = {"text/event-stream": {"schema": {"type": "string"}}, JSON: {"schema": {"type": "array"}}}
        self.add("GET", one + "/metrics", tenant_metrics, "Metrics as they come (SSE), or those so far.", stream)

    def _control(self, action: str) -> Callable[..., Awaitable[Response]]:
        async def endpoint(request: Request, tenant_id: str, workload_id: str) -> Response:
            account = self.account(request)
            await self.read(request, bodies.Empty)
            return _json(await self.run(self.service.control_workload, account, tenant_id, workload_id, action))

        return endpoint

    async def _events(
        self, account: Account, tenant_id: str, rows: list[dict[str, Any]], after: int
    ) -> AsyncIterator[bytes]:
        """Server-sent events until the client leaves, the tenant is deleted, or the server stops."""
        end_s = time.monotonic() + STREAM_S
        with self.service.stream(account):
            yield b": stream of metrics\n\n"  # the answer's headers leave now, not with the first metric
            while True:
                for row in rows:
                    after = row["id"]
                    yield b"id: %d\ndata: %b\n\n" % (after, encode(Message(row), JSON))
                if self.service.stopping or time.monotonic() > end_s:
                    return
                try:
                    wait_s = min(5.0, STREAM_S)
                    more = functools.partial(self.service.metrics, account, tenant_id, after, wait_s)
                    rows = await anyio.to_thread.run_sync(more, limiter=self.streams)
                except NotFound:
                    return
                if not rows:
                    yield b": nothing new\n\n"  # finds out whether the client is still there

    # ------------------------------------------------------------------------------------------------------------ verbs

    def _add_verb_routes(self) -> None:
        one = "/v1/tenants/{tenant_id}/"
        for path, (model, arrays, summary) in FUTURES.items():
            verb = path.split("/")[-1]
            endpoint = self._verb(verb, model, arrays, wait=False)
            self.add(
                "POST", one + path, endpoint, summary, bodies.Ticket, status=202, reads=model, arrays=arrays, name=verb
            )
        for path, (model, arrays, summary) in DIRECT.items():
            verb = path.split("/")[-1]
            endpoint = self._verb(verb, model, arrays, wait=True)
            self.add("POST", one + path, endpoint, summary, bodies.Answer, reads=model, arrays=arrays, name=verb)

        async def predict(request: Request, tenant_id: str) -> Response:
            account = self.account(request)
            meta, arrays = await self.read(request, bodies.Predict, arrays=True)
            return _message(request, await self.run(self.service.predict, account, tenant_id, meta, arrays))

        text = "Action chunks of this tenant's policy, through the shared batches."
        self.add("POST", one + "inference/predict", predict, text, _BINARY, reads=bodies.Predict, arrays=True)

        async def queue_get(request: Request, tenant_id: str) -> Response:
            account = self.account(request)
            meta, _ = await self.read(request, bodies.QueueGet)
            return _message(request, await self.run(self.service.queue_get, account, tenant_id, meta))

        self.add("POST", one + "queue/queue_get", queue_get, "Rows of a delivery.", _BINARY, reads=bodies.QueueGet)

    def _verb(
        self, verb: str, model: type[bodies.Body], arrays: bool, wait: bool
    ) -> Callable[..., Awaitable[Response]]:
        async def endpoint(request: Request, tenant_id: str, seq: Seq = None, deadline_s: Deadline = None) -> Response:
            account = self.account(request)
            meta, given = await self.read(request, model, arrays)
            submit = self.service.submit
            ticket = await self.run(submit, account, tenant_id, verb, meta, given, seq, deadline_s)
            if not wait:
                return _json(ticket, 202)
            [shown] = await self.service.futures.wait(account.owner_id, [ticket["future_id"]], DIRECT_WAIT_S)
            if shown["status"] not in ENDED:
                return _json(ticket, 202)
            if shown["status"] == "completed":
                return _json(shown["result"])
            error = shown["error"]
            if error["type"] in ERRORS:
                raise error_from_json({"error": error})
            raise Conflict(error["message"], [error["type"], *error["details"]], retryable=error["retryable"])

        return endpoint

    # --------------------------------------------------------------------------------------------------------- sessions

    def _add_session_routes(self) -> None:
        root = "/v1/environments/sessions"

        async def open_session(request: Request) -> Response:
            account = self.account(request)
            meta, _ = await self.read(request, bodies.OpenSession)
            return _json(await self.run(self.service.open_session, account, _given(meta)))

        self.add("POST", root, open_session, "A simulator of one's own.", bodies.Answer, reads=bodies.OpenSession)
        for verb, model, arrays, summary in (
            ("reset", bodies.Reset, False, "Start an episode."),
            ("step", bodies.Step, True, "One action."),
            ("batch_step", bodies.Step, True, "Several actions, up to the first end of the episode."),
            ("close", bodies.Empty, False, "Give the simulator back."),
        ):
            endpoint = self._session(verb, model, arrays)
            path = root + "/{session_id}/" + verb
            self.add("POST", path, endpoint, summary, _BINARY, reads=model, arrays=arrays, name=verb)

    def _session(self, verb: str, model: type[bodies.Body], arrays: bool) -> Callable[..., Awaitable[Response]]:
        async def endpoint(request: Request, session_id: str) -> Response:
            account = self.account(request)
            meta, given = await self.read(request, model, arrays)
            return _message(request, await self.run(self.service.session, account, session_id, verb, meta, given))

        return endpoint

    # ---------------------------------------------------------------------------------------------------------- futures

    def _add_future_routes(self) -> None:
        futures = self.service.futures

        async def get_future(request: Request, future_id: str, wait_s: WaitS = 0.0) -> Response:
            [shown] = await futures.wait(self.account(request).owner_id, [future_id], wait_s)
            return _json(shown)

        path = "/v1/futures/{future_id}"
        self.add("GET", path, get_future, "Status and result; waits for the end.", bodies.Future)

        async def get_future_data(request: Request, future_id: str) -> Response:
            data = await self.run(futures.read_data, self.account(request).owner_id, future_id)
            if SAFETENSORS in request.headers.get("accept", ""):
                data = await self.run(lambda: encode(decode(data, MSGPACK), SAFETENSORS))
                return Response(data, media_type=SAFETENSORS)
            return Response(data, media_type=MSGPACK)

        self.add("GET", path + "/data", get_future_data, "Arrays of the result.", _BINARY)

        async def retrieve(request: Request) -> Response:
            account = self.account(request)
            meta, _ = await self.read(request, bodies.Retrieve)
            return _json({"futures": await futures.wait(account.owner_id, meta["future_ids"], meta["wait_s"])})

        text = "Several at once; answers when one of them has ended."
        self.add("POST", "/v1/futures/retrieve", retrieve, text, bodies.Answer, reads=bodies.Retrieve)

        async def cancel_future(request: Request, future_id: str) -> Response:
            return _json(await self.run(futures.cancel, self.account(request).owner_id, future_id))

        self.add("DELETE", path, cancel_future, "Cancel what has not ended.", bodies.Future)

    # --------------------------------------------------------------------------------------------------------- operator

    def _add_operator_routes(self) -> None:
        service, root = self.service, "/v1/operator"

        async def overview(request: Request) -> Response:
            return _json(await self.run(service.overview, self.account(request)))

        self.add("GET", root + "/overview", overview, "What the page shows.", bodies.Answer)

        async def create_token(request: Request) -> Response:
            account = self.account(request, starting=True)
            require_operator(account)
            meta, _ = await self.read(request, bodies.NewToken)
            return _json(await self.run(service.create_token, account, meta["owner"], meta["role"]), 201)

        text = "A token; the answer is the only place where its secret is shown."
        self.add("POST", root + "/tokens", create_token, text, bodies.TokenAnswer, status=201, reads=bodies.NewToken)

        async def list_tokens(request: Request) -> Response:
            return _json({"tokens": await self.run(service.tokens, self.account(request, starting=True))})

        self.add("GET", root + "/tokens", list_tokens, "All tokens, without secrets.", bodies.Answer)

        async def revoke_token(request: Request, token_id: str) -> Response:
            await self.run(service.revoke_token, self.account(request, starting=True), token_id)
            return Response(status_code=204)

        self.add("DELETE", root + "/tokens/{token_id}", revoke_token, "Revoke a token.", status=204)

        async def audit(request: Request, after: After = 0) -> Response:
            return _json({"audit": await self.run(service.audit, self.account(request, starting=True), after)})

        self.add("GET", root + "/audit", audit, "Who did what.", bodies.Answer)


_BINARY = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in (MSGPACK, SAFETENSORS)}


def _json(meta: dict[str, Any], status: int = 200) -> Response:
    try:
        return Response(encode(Message(meta), JSON), status, media_type=JSON)
    except InvalidRequest as error:  # our own answer, not the caller's request
        raise TypeError(str(error)) from error


def _message(request: Request, message: Message) -> Response:
    kind = SAFETENSORS if SAFETENSORS in request.headers.get("accept", "") else MSGPACK
    return Response(encode(message, kind), media_type=kind)


def _given(meta: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in meta.items() if value is not None}


def _without_none(meta: dict[str, Any], named: bool = False) -> dict[str, Any]:
    """Entries of the registry (they have a name) without the keys that were not given."""
    return {
        key: _without_none(value, "name" in value) if isinstance(value, dict) else value
        for key, value in meta.items()
        if not named or value is not None
    }


def _lines(errors: Iterable[Any]) -> list[str]:
    """Pydantic's errors as ``key: what is wrong``; values stay out, they may be secret or endless."""
    return [f"{'.'.join(str(part) for part in e['loc'])[:200] or 'body'}: {e['msg'][:300]}" for e in errors][:50]


async def _answer_error(request: Request, error: Exception) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, NexusError):
        found, status = error, error.status
    elif isinstance(error, RequestValidationError):
        found, status = InvalidRequest("parameters do not fit", _lines(error.errors())), 422
    elif isinstance(error, HTTPException):
        cls = next((cls for cls in ERRORS.values() if cls.status == error.status_code), InvalidRequest)
        found, status, headers = cls(str(error.detail)), error.status_code, dict(error.headers or {})
    elif isinstance(error, ClientDisconnect):
        found, status = InvalidRequest("the client went away"), 400
    else:
        found, status = NexusError("the server failed; the operator's log has the reason"), 500
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if found.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(found.retry_after_s)))
    return Response(json.dumps(found.to_json()), status, headers, JSON)


def tar_stream(folder: Path) -> Iterator[bytes]:
    """A tar of the files below ``folder``, in pieces; times and owners are left out, so that the same payload gives the
    same bytes. All files are opened here: the payload may be replaced by newer ones while it is sent."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    try:
        files = [(str(path.relative_to(folder.parent)), path.open("rb")) for path in paths]
    except FileNotFoundError as error:
        raise NotFound(f"payload {folder.name}: was replaced by newer ones") from error
    return _tar(files)


def _tar(files: Sequence[tuple[str, BinaryIO]]) -> Iterator[bytes]:
    total = 0
    for name, file in files:
        with file:
            info = tarfile.TarInfo(name)
            info.size = os.fstat(file.fileno()).st_size
            header = info.tobuf()
            yield header
            while chunk := file.read(1 << 20):
                yield chunk
        padding = bytes(-info.size % tarfile.BLOCKSIZE)
        yield padding
        total += len(header) + info.size + len(padding)
    yield bytes(2 * tarfile.BLOCKSIZE + -(total + 2 * tarfile.BLOCKSIZE) % tarfile.RECORDSIZE)


class _Count:
    """Requests and their seconds by route, for :class:`~nexus_lightning.services.exporter.Exporter`."""

    def __init__(self, app: ASGIApp, exporter: Exporter) -> None:
        self.app, self.exporter = app, exporter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start_s, status = time.perf_counter(), 500

        async def watched(message: AsgiMessage) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            self.exporter.count(scope["method"], route, status, time.perf_counter() - start_s)
