"""Inference queue: many tenants' observations, one backbone pass per compatible group, each tenant's own head.

::

    client(tenant A) --.              group by sharing_key:            decode per (tenant, version, mode):
    client(tenant B) --+-- B or T --> one backbone call per group --+--> head A v7, sampling      --> answer A
    client(tenant C) --'                                            `--> head B v3, deterministic --> answer B

A request is a TensorDict ``[N]`` (N rows: a collector's environments). It waits in the transport until B requests are
there or the first one has waited T seconds, and is answered as soon as its own rows are decoded. Another tenant's
exception or bad shape never fails it. Random numbers come with the request, so a sample depends on its tenant's
generator only. One worker thread serves: a slow head delays the requests decoded after it in the same batch.
"""

from __future__ import annotations

import concurrent.futures
import copy
import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.modules.inference_server import InferenceServer, ThreadingTransport

from nexus_lightning.backbone import Backbone, VLAFeature, check_observation, compact, concatenate_features, sharing_key
from nexus_lightning.checkpoint import tensors_digest
from nexus_lightning.head import ActionHead
from nexus_lightning.schema import Normalizer, TenantSchema

_logger = logging.getLogger(__name__)

Mode = Literal["act", "value"]
#: ``on_batch(rows per tenant, start_s, end_s, backbone calls)``; times are ``time.monotonic()`` seconds.
OnBatch = Callable[[dict[str, int], float, float, int], None]

#: How often a waiting client looks whether the server still lives.
_LIVENESS_POLL_S = 0.2


# ------------------------------------------------------------------------------------------------ published policies


@dataclass(eq=False)
class Served:
    """One published policy version. Read only: the head's memory is reused once the version is dropped.

    Attributes:
        tenant / version: whose policy, and which.
        head: private eval copy on the backbone's device, without gradients.
        normalizer: private copy, same device.
        schema: the tenant's schema.
        digest: sha256 of the head's tensors.
        unchanged: True when the digest equals that of the version published before it.
        pins: how many :meth:`ServedPolicies.pin` calls keep it.
        users: how many requests are being served with it.
    """

    tenant: str
    version: int
    head: ActionHead
    normalizer: Normalizer
    schema: TenantSchema
    digest: str
    unchanged: bool
    pins: int = 0
    users: int = 0


@dataclass(eq=False)
class _TenantPolicies:
    versions: dict[int, Served] = field(default_factory=dict)
    latest: int = -1
    spare: ActionHead | None = None  # memory of the version dropped last
    published: int = 0
    unchanged: int = 0

    def drop_unused(self) -> None:
        for version in [v for v, s in self.versions.items() if v != self.latest and not s.pins and not s.users]:
            self.spare = self.versions.pop(version).head


class ServedPolicies:
    """The one frozen backbone and, per tenant, the heads that are served on it.

    Memory: the backbone is the caller's own object, never copied. A tenant holds its latest version, its pinned
    versions, and one spare head whose memory the next publication reuses.

    A version leaves when a newer one is there and nobody pins or uses it. All methods are thread safe; copying a head
    does not block requests.

    Example::

        policies = ServedPolicies(backbone)
        policies.publish("libero", 0, head, normalizer, schema)
        version = policies.pin("libero")      # evaluation: this version stays although training goes on
        ...
        policies.unpin("libero", version)
    """

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        self._lock = threading.Lock()  # the tables; held for dictionary operations only
        self._publish_lock = threading.Lock()  # one publication at a time; held while tensors are copied
        self._tenants: dict[str, _TenantPolicies] = {}

    def publish(self, tenant: str, version: int, head: ActionHead, normalizer: Normalizer, schema: TenantSchema) -> str:
        """Copy ``head`` and ``normalizer`` and serve them as ``version`` from the next request on.

        The caller must not train the head meanwhile. Identical bytes under a new version are legal: they are logged,
        counted in :meth:`counts` and marked ``Served.unchanged``.

        Returns:
            sha256 over the names, dtypes, shapes and bytes of the head's ``state_dict``.

        Raises:
            ValueError: ``version`` is not newer than the latest one, the schema differs from the tenant's earlier one,
                or the head holds the backbone's parameters.
            RuntimeError: the copy's digest differs from the source's. The previous version stays served.
        """
        owned = {id(p) for p in self.backbone.parameters()}
        if any(id(p) in owned for p in head.parameters()):
            raise ValueError(
                f"tenant {tenant!r}: the head holds parameters of the shared backbone; keep them out of it"
            )
        with self._publish_lock:
            with self._lock:
                known = self._tenants.get(tenant, _TenantPolicies())
                previous = known.versions.get(known.latest)
                if version < 0 or version <= known.latest:
                    raise ValueError(
                        f"tenant {tenant!r}: version {version} is not newer than {known.latest}; versions only grow"
                    )
                if previous is not None and previous.schema.signature != schema.signature:
                    raise ValueError(
                        f"tenant {tenant!r}: version {version} has another schema than version {previous.version} "
                        f"({'; '.join(schema.differences(previous.schema))}); remove the tenant first"
                    )
                spare, known.spare = known.spare, None
            served_head = _copy_head(head, spare, self.backbone.device)
            digest, source = tensors_digest(_state(served_head)), tensors_digest(_state(head))
            if digest != source:
                raise RuntimeError(
                    f"tenant {tenant!r}: publication of version {version} failed: digest of the copy {digest[:12]} "
                    f"differs from the source's {source[:12]}; was the head trained meanwhile?"
                )
            served = Served(
                tenant=tenant,
                version=version,
                head=served_head,
                normalizer=copy.deepcopy(normalizer).requires_grad_(False).eval().to(self.backbone.device),
                schema=schema,
                digest=digest,
                unchanged=previous is not None and previous.digest == digest,
            )
            if served.unchanged:
                _logger.warning("tenant %r: version %d has the same bytes as the one before", tenant, version)
            with self._lock:
                policies = self._tenants.setdefault(tenant, known)
                policies.versions[version] = served
                policies.latest = version
                policies.published += 1
                policies.unchanged += served.unchanged
                policies.drop_unused()
        return digest

    def remove(self, tenant: str) -> None:
        """Forget a tenant at once, pinned versions too; requests in service finish.

        Raises:
            ValueError: no such tenant.
        """
        with self._publish_lock, self._lock:
            self._policies(tenant)
            del self._tenants[tenant]

    def pin(self, tenant: str, version: int | None = None) -> int:
        """Keep ``version`` (None: the latest) served until as many :meth:`unpin` calls; returns the version."""
        with self._lock:
            served = self._find(tenant, version)
            served.pins += 1
            return served.version

    def unpin(self, tenant: str, version: int) -> None:
        """Undo one :meth:`pin`. Does nothing when the tenant has been removed: its pins went with it.

        Raises:
            ValueError: the version is not pinned.
        """
        with self._lock:
            policies = self._tenants.get(tenant)
            if policies is None:
                return
            served = policies.versions.get(version)
            if served is None or not served.pins:
                raise ValueError(f"tenant {tenant!r}: version {version} is not pinned")
            served.pins -= 1
            policies.drop_unused()

    def acquire(self, tenant: str, version: int | None = None) -> Served:
        """A version (None: the latest) that stays intact until :meth:`release`. Used by the server per request."""
        with self._lock:
            served = self._find(tenant, version)
            served.users += 1
            return served

    def release(self, served: Served) -> None:
        """Undo one :meth:`acquire`."""
        with self._lock:
            served.users -= 1
            policies = self._tenants.get(served.tenant)
            if policies is not None:
                policies.drop_unused()

    def served(self, tenant: str, version: int | None = None) -> Served:
        """Look at a served version (None: the latest). Its tensors may be reused later: read metadata only."""
        with self._lock:
            return self._find(tenant, version)

    def tenants(self) -> list[str]:
        """Names of the tenants that are served."""
        with self._lock:
            return list(self._tenants)

    def versions(self, tenant: str) -> list[int]:
        """Served versions in growing order."""
        with self._lock:
            return sorted(self._policies(tenant).versions)

    def latest(self, tenant: str) -> int:
        """Newest served version."""
        with self._lock:
            return self._policies(tenant).latest

    def counts(self) -> dict[str, dict[str, int]]:
        """Per tenant: ``published`` versions and how many of them were ``unchanged``."""
        with self._lock:
            return {t: {"published": p.published, "unchanged": p.unchanged} for t, p in self._tenants.items()}

    def _policies(self, tenant: str) -> _TenantPolicies:
        policies = self._tenants.get(tenant)
        if policies is None:
            raise ValueError(f"tenant {tenant!r} is not served; published tenants: {sorted(self._tenants)}")
        return policies

    def _find(self, tenant: str, version: int | None) -> Served:
        policies = self._policies(tenant)
        served = policies.versions.get(policies.latest if version is None else version)
        if served is None:
            raise ValueError(
                f"tenant {tenant!r}: version {version} is not served (served: {sorted(policies.versions)}); "
                "pin a version for as long as it is needed"
            )
        return served


def _state(head: ActionHead) -> dict[str, Tensor]:
    return {name: value for name, value in head.state_dict().items() if isinstance(value, Tensor)}


def _layout(head: ActionHead) -> dict[str, tuple]:
    tensors = {**dict(head.named_parameters()), **dict(head.named_buffers())}
    return {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}


def _copy_head(head: ActionHead, spare: ActionHead | None, device: torch.device) -> ActionHead:
    """Eval copy of ``head`` on ``device`` without gradients, in the memory of ``spare`` when the layouts agree."""
    if spare is None or type(spare) is not type(head) or _layout(spare) != _layout(head):
        return copy.deepcopy(head).requires_grad_(False).eval().to(device)
    spare.load_state_dict(head.state_dict())
    source = dict(head.named_buffers())
    for name, buffer in spare.named_buffers():  # load_state_dict leaves non-persistent buffers out
        buffer.copy_(source[name])
    return spare


# ------------------------------------------------------------------------------------------------------- the requests


@dataclass(frozen=True)
class _Route:
    """Travels with request and answer: whose policy, which version (request: None = latest), what to compute."""

    tenant: str
    version: int | None
    mode: Mode
    keep_features: bool = False


@dataclass(eq=False)
class _Request:
    """An admitted request: validated, with the policy version it will be answered from."""

    future: Future
    served: Served
    mode: Mode
    images: dict[str, Tensor]  # camera -> uint8 [N, 3, H, W], in the schema's order
    state: Tensor  # [N, S], not normalised
    instructions: list[str]
    noise: Tensor | None  # [N, *head.noise_shape], None: deterministic
    keep_features: bool  # send them back with the answer
    answers: list[TensorDict] = field(default_factory=list)
    answered: int = 0
    failed: bool = False

    @property
    def rows(self) -> int:
        return len(self.instructions)

    @property
    def decode_key(self) -> tuple:
        return (self.served.tenant, self.served.version, self.mode, self.noise is not None, self.keep_features)


@dataclass(frozen=True)
class _Piece:
    """Rows ``start:stop`` of a request: all of them unless the request is larger than one encode may be."""

    request: _Request
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


def _instructions(td: TensorDictBase) -> list[str]:
    entry = td.get("language_instruction", None)
    values = entry.tolist() if entry is not None and not isinstance(entry, Tensor) else None
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise ValueError(f"'language_instruction' must hold one string per row, got {entry!r}")
    return values


def _validated(item: TensorDictBase, route: _Route, served: Served, future: Future) -> _Request:
    """Refuse what the tenant's schema does not allow before it can meet other tenants' rows.

    Raises:
        ValueError: wrong cameras, image shape or dtype, state shape or value, instruction, noise, or mode.
    """
    schema, rows = served.schema, item.batch_size[0]
    observation = item.get("observation", None)
    if not isinstance(observation, TensorDictBase):
        raise ValueError("'observation' is missing or is not a TensorDict")
    images = observation.get("image", None)
    if images is not None and not isinstance(images, TensorDictBase):
        raise ValueError(f"('observation', 'image') must hold one entry per camera: {list(schema.cameras)}")
    check_observation(observation, schema)
    state = observation.get("state", None)
    if not isinstance(state, Tensor) or not state.is_floating_point() or state.shape != (rows, schema.state_dim):
        given = f"{state.dtype} {list(state.shape)}" if isinstance(state, Tensor) else f"{state!r}"
        raise ValueError(f"('observation', 'state'): expected float32 [{rows}, {schema.state_dim}], got {given}")
    if not bool(torch.isfinite(state).all()):
        raise ValueError("('observation', 'state') holds NaN or infinity")
    noise = item.get("noise", None)
    if noise is not None and tuple(noise.shape) != (rows, *served.head.noise_shape):
        raise ValueError(f"noise: expected {[rows, *served.head.noise_shape]}, got {list(noise.shape)}")
    if route.mode == "value" and not served.head.supports_rl:
        raise ValueError(f"{type(served.head).__name__} has no value head (supports_rl is False)")
    return _Request(
        future=future,
        served=served,
        mode=route.mode,
        images={camera: observation["image", camera].cpu() for camera in schema.cameras},  # preprocessing is CPU side
        state=state,
        instructions=_instructions(item),
        noise=noise,
        keep_features=route.keep_features,
    )


def _named(error: Exception, where: str) -> Exception:
    """``error`` with the tenant's name: a ValueError stays one, anything else becomes a RuntimeError."""
    if isinstance(error, ValueError):
        named: Exception = ValueError(f"{where}: {error}")
    else:
        named = RuntimeError(f"{where}: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named


class _Transport(ThreadingTransport):
    """In-process queue that answers every request at most once and skips those whose client gave up."""

    @staticmethod
    def claim(callback: Future) -> bool:
        """True when the request still waits for an answer; it cannot be cancelled afterwards."""
        return callback.running() or (not callback.done() and callback.set_running_or_notify_cancel())

    def resolve(self, callback: Future, result: TensorDictBase) -> None:
        if self.claim(callback):
            callback.set_result(result)

    def resolve_exception(self, callback: Future, exc: BaseException) -> None:
        if self.claim(callback):
            callback.set_exception(exc)


# --------------------------------------------------------------------------------------------------------- the server


class TenantInferenceServer(InferenceServer):
    """TorchRL's :class:`InferenceServer` for many tenants on one backbone.

    Only the serving of a drained batch is ours (``_serve_batch``); queue, worker thread, B-or-T rule and shutdown are
    the base class's. Use it as a context manager, or ``start()`` and ``shutdown()``. A batch is:

    1. admit: each request gets its policy version (held until the batch ends) and is checked against the schema;
    2. group by :func:`~nexus_lightning.backbone.sharing_key`, at most ``max_rows`` rows per backbone call, one call per
       group for all feature kinds that its heads read;
    3. decode per (tenant, version, mode), answer each request as soon as its rows are done.

    A group that raises (a prompt too long) is repeated request by request, so only the guilty one fails; so is a
    decode. Errors are ``ValueError`` for bad requests and ``RuntimeError`` for crashes, both naming the tenant.

    Args:
        policies: backbone and published heads.
        max_batch_size: requests per batch at most.
        min_batch_size: fire as soon as this many requests wait (B) ...
        timeout_s: ... or after this many seconds (T).
        max_rows: rows per backbone call at most; larger groups and requests are encoded in several calls.
        on_batch: called in the worker thread after each batch (see :data:`OnBatch`); what it raises is logged.

    Raises:
        ValueError: a bound is below 1 or ``min_batch_size`` exceeds ``max_batch_size``.
    """

    def __init__(
        self,
        policies: ServedPolicies,
        *,
        max_batch_size: int = 64,
        min_batch_size: int = 1,
        timeout_s: float = 0.002,
        max_rows: int = 256,
        on_batch: OnBatch | None = None,
    ) -> None:
        bounds = {"max_batch_size": max_batch_size, "min_batch_size": min_batch_size, "max_rows": max_rows}
        for name, value in bounds.items():
            if value < 1:
                raise ValueError(f"queues.inference.{name}={value}: must be at least 1")
        if min_batch_size > max_batch_size:
            raise ValueError(
                f"queues.inference.min_batch_size={min_batch_size}: must not exceed max_batch_size={max_batch_size}"
            )
        super().__init__(
            policies.backbone,
            _Transport(),
            max_batch_size=max_batch_size,
            min_batch_size=min_batch_size,
            timeout=timeout_s,
            policy_version_key=None,
        )
        self.policies = policies
        self.max_rows = max_rows
        self.on_batch = on_batch
        self._counters: Counter[str] = Counter()
        self._rows_by_tenant: Counter[str] = Counter()

    def client(
        self,
        tenant: str,
        *,
        sample: bool,
        version: int | None = None,
        generator: torch.Generator | None = None,
        timeout_s: float = 120.0,
    ) -> TenantPolicyClient:
        """A policy for one collector or evaluator of ``tenant``; see :class:`TenantPolicyClient`.

        Raises:
            ValueError: the tenant (or the version) is not published.
        """
        return TenantPolicyClient(
            self, tenant, sample=sample, version=version, generator=generator, timeout_s=timeout_s
        )

    def stats(self, *, reset: bool = False) -> dict[str, Any]:
        """The base class's rates and latencies (its ``requests`` are rows here), and totals since construction.

        ``backbone_calls``, ``rows_served``, ``rows_failed``, ``tokens`` and ``padding_tokens`` (backbone outputs),
        ``rows_by_tenant``. ``reset`` restarts the rates and latencies, not the totals.
        """
        stats: dict[str, Any] = dict(super().stats(reset=reset))
        for single_tenant in ("policy_version", "weight_updates"):
            del stats[single_tenant]
        names = ("backbone_calls", "rows_served", "rows_failed", "tokens", "padding_tokens")
        with self._stats_lock:
            stats |= {name: self._counters[name] for name in names}
            stats["rows_by_tenant"] = dict(self._rows_by_tenant)
        return stats

    def _count(self, **amounts: int) -> None:
        with self._stats_lock:
            self._counters.update(amounts)

    def _serve_batch(
        self, items: list[TensorDictBase], callbacks: list[Future], submitted_at: list[float | None]
    ) -> None:
        start_s = time.monotonic()
        waited_ms = [(start_s - s) * 1e3 for s in submitted_at if s is not None]
        calls_before = self._counters["backbone_calls"]
        requests: list[_Request] = []
        try:
            for item, callback in zip(items, callbacks, strict=True):
                request = self._admit(item, callback)
                if request is not None:
                    requests.append(request)
            groups: dict[tuple[str, int], list[_Request]] = {}
            for request in requests:
                key = sharing_key(request.served.schema, request.served.head.feature_spec.kind)
                groups.setdefault(key, []).append(request)
            for group in groups.values():
                for pieces in _packs(group, self.max_rows):
                    self._serve_pieces(pieces)
        finally:
            for request in requests:
                self.policies.release(request.served)
        if not requests:
            return
        rows: Counter[str] = Counter()
        for request in requests:
            rows[request.served.tenant] += request.rows
        end_s = time.monotonic()
        with self._stats_lock:
            self._rows_by_tenant.update(rows)
        self._record_batch_stats(batch_size=rows.total(), queue_wait_ms=waited_ms, forward_ms=(end_s - start_s) * 1e3)
        if self.on_batch is not None:
            try:
                self.on_batch(dict(rows), start_s, end_s, self._counters["backbone_calls"] - calls_before)
            except Exception:  # every request is answered by now; monitoring must not stop the service
                _logger.exception("on_batch raised")

    def _admit(self, item: TensorDictBase, callback: Future) -> _Request | None:
        if not _Transport.claim(callback):
            return None
        route = cast(_Route, item.get_non_tensor("route"))
        try:
            served = self.policies.acquire(route.tenant, route.version)
        except ValueError as error:
            self.transport.resolve_exception(callback, error)
            return None
        try:
            return _validated(item, route, served, callback)
        except Exception as error:
            self.policies.release(served)
            self._count(rows_failed=item.batch_size[0])
            self.transport.resolve_exception(callback, _named(error, f"tenant {route.tenant!r}"))
            return None

    def _serve_pieces(self, pieces: list[_Piece]) -> None:
        """One backbone call for ``pieces``, then each tenant's head on its own rows."""
        pieces = [piece for piece in pieces if not piece.request.failed]
        if not pieces:
            return
        try:
            features = self._encode(pieces)
        except Exception as error:
            if len(pieces) == 1:
                self._fail(pieces[0].request, error, "backbone")
            else:
                for piece in pieces:
                    self._serve_pieces([piece])
            return
        start = 0
        for _, run in groupby(pieces, key=lambda piece: piece.request.decode_key):
            members = list(run)
            rows = sum(piece.rows for piece in members)
            self._decode(members, cast(VLAFeature, features[start : start + rows]))
            start += rows

    def _encode(self, pieces: list[_Piece]) -> VLAFeature:
        schema = pieces[0].request.served.schema
        rows = sum(piece.rows for piece in pieces)
        images = {c: torch.cat([p.request.images[c][p.start : p.stop] for p in pieces]) for c in schema.cameras}
        observation = TensorDict({"image": TensorDict(images, [rows])} if images else {}, [rows])
        instructions = [text for p in pieces for text in p.request.instructions[p.start : p.stop]]
        self._count(backbone_calls=1)
        kinds = tuple(sorted({piece.request.served.head.feature_spec.kind for piece in pieces}))
        features = self.policies.backbone(observation, instructions, schema, kinds)
        if features.batch_size != (rows,):
            raise RuntimeError(f"backbone returned batch {list(features.batch_size)} for {rows} rows")
        masks = list(features.mask.values())
        tokens = sum(mask.numel() for mask in masks)
        self._count(tokens=tokens, padding_tokens=tokens - sum(int(mask.sum()) for mask in masks))
        return features

    def _decode(self, pieces: list[_Piece], features: VLAFeature) -> None:
        """Rows of one tenant, version and mode -> answers. ``features`` ``[R]`` in the order of ``pieces``."""
        try:
            out = self._run_head(pieces, features)
        except Exception as error:
            if len(pieces) == 1:
                self._fail(pieces[0].request, error, type(pieces[0].request.served.head).__name__)
                return
            start = 0
            for piece in pieces:
                self._decode([piece], cast(VLAFeature, features[start : start + piece.rows]))
                start += piece.rows
            return
        start = 0
        for piece in pieces:
            self._answer(piece, out[start : start + piece.rows].clone())
            start += piece.rows

    def _run_head(self, pieces: list[_Piece], features: VLAFeature) -> TensorDict:
        request = pieces[0].request
        served, rows = request.served, sum(piece.rows for piece in pieces)
        device = self.policies.backbone.device
        state = torch.cat([p.request.state[p.start : p.stop] for p in pieces]).to(device, torch.float32)
        state = served.normalizer.normalize_state(state)
        features = features.select(served.head.feature_spec)
        if request.keep_features:
            # The head acts on the very numbers that training will see: the ratio of the first PPO step is exactly 1.
            features = compact(features)
        kept, features = features, features.for_head()
        shapes = {"chunk": (rows, served.schema.chunk, served.schema.action_dim), "state_value": (rows, 1)}
        shapes["log_probs"] = shapes["chunk"]
        if request.mode == "value":
            given: Any = {"state_value": served.head.value(features, state)}
        else:
            noises = [p.request.noise[p.start : p.stop] for p in pieces if p.request.noise is not None]
            given = served.head.act(features, state, torch.cat(noises).to(device) if noises else None)
            if "chunk" not in given.keys():
                raise RuntimeError(f"act returned no 'chunk', only {sorted(given.keys())}")
        out = TensorDict({}, [rows])
        for key, shape in shapes.items():
            if key in given.keys():
                if tuple(given[key].shape) != shape:
                    raise RuntimeError(f"{key!r} has shape {list(given[key].shape)}, expected {list(shape)}")
                out.set(key if key == "state_value" else ("vla_action", key), given[key].detach().cpu())
        if request.mode == "act" and request.noise is not None:
            for key, shape in served.head.trace_shapes.items():
                value = given["trace", key]
                if tuple(value.shape) != (rows, *shape):
                    raise RuntimeError(f"trace {key!r} has shape {list(value.shape)}, expected {[rows, *shape]}")
                out.set(("vla_action", "trace", key), value.detach().cpu())
        if request.keep_features:
            out.set("features", kept.cpu())
        out.set("policy_version", torch.full((rows, 1), served.version, dtype=torch.int64))
        return out

    def _answer(self, piece: _Piece, rows: TensorDict) -> None:
        """Add the answer ``[n]`` of a piece; the request is answered when its last row is there."""
        request = piece.request
        if request.failed:
            return
        for key, value in rows.exclude("features").items(include_nested=True, leaves_only=True):
            if not bool(torch.isfinite(value).all()):
                error = FloatingPointError(f"{key!r} holds NaN or infinity")
                self._fail(request, error, type(request.served.head).__name__)
                return
        request.answers.append(rows)
        request.answered += piece.rows
        if request.answered < request.rows:
            return
        parts = request.answers
        answer = parts[0] if len(parts) == 1 else _joined(parts)
        answer.set_non_tensor("route", _Route(request.served.tenant, request.served.version, request.mode))
        self._count(rows_served=request.rows)
        self.transport.resolve(request.future, answer)

    def _fail(self, request: _Request, error: Exception, where: str) -> None:
        request.failed = True
        self._count(rows_failed=request.rows)
        served = request.served
        self.transport.resolve_exception(
            request.future, _named(error, f"tenant {served.tenant!r}, version {served.version}: {where}")
        )


def _joined(parts: list[TensorDict]) -> TensorDict:
    answer = cast(TensorDict, TensorDict.cat([part.exclude("features") for part in parts]))
    if "features" in parts[0].keys():
        answer.set("features", concatenate_features([cast(VLAFeature, part.get("features")) for part in parts]))
    return answer


def _packs(requests: Sequence[_Request], max_rows: int) -> Iterator[list[_Piece]]:
    """Pieces of ``requests`` in packs of at most ``max_rows`` rows; equal decode keys lie side by side."""
    order: dict[tuple, list[_Request]] = {}
    for request in requests:
        order.setdefault(request.decode_key, []).append(request)
    pack: list[_Piece] = []
    room = max_rows
    for request in (r for same in order.values() for r in same):
        if request.rows > room and pack and request.rows <= max_rows:  # do not tear what fits into one call
            yield pack
            pack, room = [], max_rows
        start = 0
        while start < request.rows:
            stop = min(request.rows, start + room)
            pack.append(_Piece(request, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield pack
                pack, room = [], max_rows
    if pack:
        yield pack


# --------------------------------------------------------------------------------------------------------- the client


class TenantPolicyClient(TensorDictModuleBase):
    """A tenant's policy as seen by its collector or evaluator; the work happens in :class:`TenantInferenceServer`.

    Give it to TorchRL's ``Collector`` as ``policy``. With ``use_buffers=False`` the collector asks the policy only for
    real steps; its default probes it once at construction, which draws once from the generator.

    Reads from a TensorDict ``[N]``: ``("observation", "image", <camera>)`` uint8 ``[N, 3, H, W]``,
    ``("observation", "state")`` float32 ``[N, S]``, ``language_instruction`` (one string per row). Writes
    ``("vla_action", "chunk")`` float32 ``[N, T, A]`` (normalised), ``policy_version`` int64 ``[N, 1]``, and for heads
    that support RL ``("vla_action", "log_probs")`` ``[N, T, A]``, ``("vla_action", "trace", ...)`` and ``state_value``
    ``[N, 1]``.

    With ``record_features`` the features that the head saw come back too, compactly, and wait in :meth:`take_features`
    in the order of the calls: training can use them without another backbone pass.

    Sampling noise is drawn here, from ``generator``, never from a global generator: TorchRL's exploration type is not
    consulted. Use one client per thread.

    Args:
        server: the server.
        tenant: whose policy.
        sample: True: sample with noise; False: the deterministic action.
        version: policy version; None: the latest when the request is served.
        generator: CPU generator of the noise; None: seeded from the tenant's name, so give a second sampling client of
            one tenant a generator of its own.
        timeout_s: seconds to wait for an answer.

    Raises:
        ValueError: the tenant or version is not published.
    """

    def __init__(
        self,
        server: TenantInferenceServer,
        tenant: str,
        *,
        sample: bool,
        version: int | None = None,
        generator: torch.Generator | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        super().__init__()
        served = server.policies.served(tenant, version)
        self.server = server
        self.tenant = tenant
        self.sample = sample
        self.version = version
        self.timeout_s = timeout_s
        if generator is None:
            seed = int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:7], "little")
            generator = torch.Generator().manual_seed(seed)
        self.generator = generator
        self._noise_shape = served.head.noise_shape
        self.record_features = False
        self._features: list[VLAFeature] = []
        cameras = [("observation", "image", camera) for camera in served.schema.cameras]
        in_keys: list[Any] = [*cameras, ("observation", "state"), "language_instruction"]
        out_keys: list[Any] = [("vla_action", "chunk"), "policy_version"]
        if served.head.supports_rl:
            out_keys += [("vla_action", "log_probs"), "state_value"]
            out_keys += [("vla_action", "trace", key) for key in served.head.trace_shapes]
        self.in_keys, self.out_keys = in_keys, out_keys

    def get_rng_state(self) -> Tensor:
        """State of the noise generator, uint8 ``[bytes]``; part of a resumable run."""
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor) -> None:
        """Go on from a state that :meth:`get_rng_state` gave."""
        self.generator.set_state(state)

    def submit(self, td: TensorDictBase, mode: Mode = "act") -> Future:
        """Queue a request for ``td`` ``[N]``; the future gives the raw answer ``[N]`` or raises.

        Raises:
            ValueError: ``td`` has no rows or not exactly one batch dim.
        """
        if len(td.batch_size) != 1 or not td.batch_size[0]:
            raise ValueError(f"tenant {self.tenant!r}: expected a batch [N] with N >= 1, got {list(td.batch_size)}")
        request = TensorDict({}, td.batch_size)
        for key in ("observation", "language_instruction"):
            if key in td.keys():
                request.set(key, td.get(key))
        if mode == "act" and self.sample:
            request.set("noise", torch.randn(*td.batch_size, *self._noise_shape, generator=self.generator))
        keep = self.record_features and mode == "act"
        request.set_non_tensor("route", _Route(self.tenant, self.version, mode, keep))
        return self.server.transport.submit(request.copy())

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act on ``tensordict`` ``[N]``; returns it with the keys above.

        Raises:
            ValueError: the request does not fit the tenant's schema, or the backbone refuses it.
            RuntimeError: the head crashed or gave non-finite numbers, or the server stopped.
            TimeoutError: no answer within ``timeout_s``.
        """
        answer = self._wait(self.submit(tensordict))
        if "features" in answer.keys():
            self._features.append(cast(VLAFeature, answer.get("features")))
        device = tensordict.device
        for key in ("vla_action", "policy_version", "state_value"):
            if key in answer.keys():
                tensordict.set(key, answer.get(key) if device is None else answer.get(key).to(device))
        return tensordict

    def take_features(self) -> list[VLAFeature]:
        """What :attr:`record_features` kept since the last call of this method: one feature ``[N]`` per decision."""
        taken, self._features = self._features, []
        return taken

    def value(self, td: TensorDictBase) -> Tensor:
        """Critic estimate ``[N, 1]`` for the observations in ``td`` ``[N]`` (bootstrap of the last step).

        Raises:
            ValueError: the tenant's head has no value head; otherwise as :meth:`forward`.
        """
        return self._wait(self.submit(td, "value")).get("state_value")

    def _wait(self, future: Future) -> TensorDict:
        deadline = time.monotonic() + self.timeout_s
        while not future.done():
            remaining = deadline - time.monotonic()
            stopped = not self.server.is_alive
            if (stopped or remaining <= 0) and not future.done():
                future.cancel()  # a request that still waits is never served
                if stopped:
                    raise RuntimeError(f"tenant {self.tenant!r}: the inference server is not running")
                raise TimeoutError(f"tenant {self.tenant!r}: no answer from inference within {self.timeout_s:g} s")
            concurrent.futures.wait([future], timeout=min(remaining, _LIVENESS_POLL_S))
        answer = future.result()
        route = cast(_Route, answer.get_non_tensor("route"))
        if route.tenant != self.tenant or (self.version is not None and route.version != self.version):
            raise RuntimeError(
                f"tenant {self.tenant!r} asked for version {self.version} and was given {route.tenant!r} "
                f"version {route.version}: the answer belongs to another request"
            )
        return answer
