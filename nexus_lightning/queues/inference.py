"""Inference queue: many tenants' observations, one backbone pass per compatible group, each tenant's own head.

::

    client(tenant A) --.   requests of one sharing_key:               decode per (tenant, version, mode):
    client(tenant B) --+-- all in, B or T --> one backbone call --+--> head A v7, sampling      --> answer A
    client(tenant C) --'                                          `--> head B v3, deterministic --> answer B

A request is a TensorDict ``[N]`` (N rows: a collector's environments). When it is served: see
:class:`TenantInferenceServer`. It is answered as soon as its own rows are decoded. Another tenant's exception or bad
shape never fails it. Random numbers come with the request, so a sample depends on its tenant's generator only. One
worker thread serves: a slow head delays the requests decoded after it in the same batch.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torchrl.modules.inference_server import InferenceServer, InferenceTransport

from nexus_lightning.backbone import (
    Backbone,
    FeatureSpec,
    VLAFeature,
    check_observation,
    compact,
    concatenate_features,
    sharing_key,
)
from nexus_lightning.checkpoint import tensors_digest
from nexus_lightning.features.graphs import graphs_for, replaying, static_rows
from nexus_lightning.head import ActionHead
from nexus_lightning.schema import Normalizer, TenantSchema

_logger = logging.getLogger(__name__)

Mode = Literal["act", "value"]
#: ``on_batch(rows per tenant, start_s, end_s, backbone calls)``; times are ``time.monotonic()`` seconds.
OnBatch = Callable[[dict[str, int], float, float, int], None]

#: Fewer heads act one by one: measured on a CPU with MLP heads, vmap takes 1.3 times as long for 2 of them, as long for
#: 3, 0.8 times for 4, 0.5 to 0.7 times for 8.
MIN_STACK = 4
#: Stacks of heads kept for the next batch with the same tenants and versions (stacking takes as long as it saves).
MAX_STACKS = 4
#: How often a waiting client looks whether the server still lives, and an idle server whether it should stop.
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

    def renormalize(self, tenant: str, normalizer: Normalizer) -> None:
        """Give the latest version other statistics (those of the tenant's first dataset); its weights stay."""
        copied = copy.deepcopy(normalizer).requires_grad_(False).eval().to(self.backbone.device)
        with self._lock:
            self._find(tenant, None).normalizer = copied

    def load(self, tenant: str, version: int, head: ActionHead, normalizer: Normalizer) -> None:
        """Serve an older version beside the latest one, pinned (see :meth:`pin`); ``head`` becomes the table's own.

        Raises:
            ValueError: no such tenant, or the version is not older than the latest one.
        """
        head = head.requires_grad_(False).eval().to(self.backbone.device)
        normalizer = copy.deepcopy(normalizer).requires_grad_(False).eval().to(self.backbone.device)
        with self._lock:
            policies = self._policies(tenant)
            if version not in policies.versions:
                if version > policies.latest:
                    raise ValueError(
                        f"tenant {tenant!r}: version {version} is newer than {policies.latest}: publish it"
                    )
                schema, digest = self._find(tenant, None).schema, tensors_digest(_state(head))
                policies.versions[version] = Served(tenant, version, head, normalizer, schema, digest, False)
            policies.versions[version].pins += 1

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


@dataclass(eq=False)
class _Session:
    """One client as the scheduler sees it. Changed under the transport's lock only.

    Attributes:
        group: :func:`~nexus_lightning.backbone.sharing_key` of its requests.
        queued: its requests that wait.
        answered_s: when it was answered last; None: not yet, or it rests.
        prompt: it came back within T of the answer before.
    """

    group: tuple[str, int]
    queued: int = 0
    answered_s: float | None = None
    prompt: bool = False


@dataclass(frozen=True, eq=False)
class _Ask:
    """A request as it waits: plain, because a TensorDict of it costs the clients more than all the rest."""

    session: _Session
    tenant: str
    version: int | None  # None: the latest when it is served
    mode: Mode
    rows: int
    observation: Any  # what the client was given, checked when it is served
    instruction: Any
    noise: Tensor | None  # [N, *head.noise_shape], None: deterministic
    keep_features: bool


class Ticket(Future):
    """A request's future and its times: when it came, and how long it was held back with the worker free."""

    def __init__(self, session: _Session, submitted_s: float, free_s: float) -> None:
        super().__init__()
        self.session = session
        self.submitted_s = submitted_s
        self.free_s = free_s  # the worker's free time when it came
        self.held_s = 0.0
        self.answered_by: tuple[str, int] | None = None  # tenant and version


@dataclass(eq=False)
class _Request:
    """An admitted request: validated, with the policy version it will be answered from."""

    future: Ticket
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


@dataclass(eq=False)
class _Run:
    """Pieces of one tenant, version and mode; their rows lie side by side in the encoded batch, from ``start`` on."""

    pieces: list[_Piece]
    start: int

    @property
    def request(self) -> _Request:
        """Any of its requests: whose head, which version, what to compute."""
        return self.pieces[0].request

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    @property
    def stack_key(self) -> Hashable | None:
        """Runs with equal keys may be computed together (see :attr:`ActionHead.stack_key`)."""
        request, head = self.request, self.request.served.head
        if request.mode != "act" or head.stack_key is None:
            return None
        return type(head), head.stack_key, self.rows, request.noise is None, request.keep_features

    def alone(self) -> list[_Run]:
        """A run per piece."""
        starts = accumulate((piece.rows for piece in self.pieces[:-1]), initial=self.start)
        return [_Run([piece], start) for piece, start in zip(self.pieces, starts, strict=True)]


class _Act(nn.Module):
    """``head.act`` as a ``forward``, which is what ``torch.func.functional_call`` calls."""

    def __init__(self, head: ActionHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: VLAFeature, state: Tensor, noise: Tensor | None) -> dict[str, Any]:
        return dict(self.head.act(features, state, noise).items())


class _Stack:
    """Published heads of one architecture as one computation: their tensors are stacked, ``act`` is vmapped."""

    def __init__(self, heads: Sequence[ActionHead]) -> None:
        self.parameters, self.buffers = stack_module_state([_Act(head) for head in heads])
        # Structure only: the memory of a dropped version is written to by the next publication.
        self.act = _Act(copy.deepcopy(heads[0]).to("meta"))

    def __call__(self, features: VLAFeature, state: Tensor, noise: Tensor | None) -> dict[str, Any]:
        """``[K, R, ...]`` in and out: K heads, R rows each."""

        def act(parameters, buffers, tokens, mask, pooled, state, noise):
            rows = [len(state)]
            seen = VLAFeature(TensorDict(tokens, rows), TensorDict(mask, rows), pooled, batch_size=rows)
            return functional_call(self.act, (parameters, buffers), (seen, state, noise))

        tokens, mask = dict(features.tokens.items()), dict(features.mask.items())
        dims = (0, 0, 0, 0, 0, 0, None if noise is None else 0)
        return vmap(act, in_dims=dims)(self.parameters, self.buffers, tokens, mask, features.pooled, state, noise)


class _Encoded:
    """Features ``[R]`` of one backbone call. What heads of one kind read is made once, not once per tenant."""

    def __init__(self, features: VLAFeature) -> None:
        self.features = features
        self._views: dict[tuple[FeatureSpec, bool], tuple[VLAFeature, VLAFeature]] = {}

    def read(self, run: _Run) -> tuple[VLAFeature, VLAFeature]:
        """Its rows: what is kept for training, and what the head sees."""
        kept, seen = self._views_of(run.request)
        rows = slice(run.start, run.start + run.rows)
        return cast(VLAFeature, kept[rows]) if run.request.keep_features else kept, cast(VLAFeature, seen[rows])

    def read_together(self, runs: Sequence[_Run]) -> VLAFeature:
        """``[K, R]``: what the heads of K runs of R rows see."""
        rows = torch.tensor(
            [range(run.start, run.start + run.rows) for run in runs], device=self.features.pooled.device
        )
        return cast(VLAFeature, self._views_of(runs[0].request)[1][rows])

    def _views_of(self, request: _Request) -> tuple[VLAFeature, VLAFeature]:
        key = request.served.head.feature_spec, request.keep_features
        if key not in self._views:
            kept = self.features.select(key[0])
            if request.keep_features:
                # The head acts on the very numbers that training will see: the ratio of the first PPO step is exactly 1
                kept = compact(kept)
            self._views[key] = kept, kept.for_head()
        return self._views[key]


def _instructions(entry: Any) -> list[str]:
    values = entry.tolist() if entry is not None and not isinstance(entry, Tensor) else None
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise ValueError(f"'language_instruction' must hold one string per row, got {entry!r}")
    return values


def _validated(ask: _Ask, served: Served, ticket: Ticket) -> _Request:
    """Refuse what the tenant's schema does not allow before it can meet other tenants' rows.

    Raises:
        ValueError: wrong cameras, image shape or dtype, state shape or value, instruction, noise, or mode.
    """
    schema, rows, observation = served.schema, ask.rows, ask.observation
    if not isinstance(observation, TensorDictBase):
        raise ValueError("'observation' is missing or is not a TensorDict")
    images = observation.get("image", None)
    if images is not None and not isinstance(images, TensorDictBase):
        raise ValueError(f"('observation', 'image') must hold one entry per camera: {list(schema.cameras)}")
    check_observation(cast(TensorDict, observation), schema)
    state = observation.get("state", None)
    if not isinstance(state, Tensor) or not state.is_floating_point() or state.shape != (rows, schema.state_dim):
        given = f"{state.dtype} {list(state.shape)}" if isinstance(state, Tensor) else f"{state!r}"
        raise ValueError(f"('observation', 'state'): expected float32 [{rows}, {schema.state_dim}], got {given}")
    if not bool(torch.isfinite(state).all()):
        raise ValueError("('observation', 'state') holds NaN or infinity")
    if ask.noise is not None and tuple(ask.noise.shape) != (rows, *served.head.noise_shape):
        raise ValueError(f"noise: expected {[rows, *served.head.noise_shape]}, got {list(ask.noise.shape)}")
    if ask.mode == "value" and not served.head.supports_rl:
        raise ValueError(f"{type(served.head).__name__} has no value head (supports_rl is False)")
    return _Request(
        future=ticket,
        served=served,
        mode=ask.mode,
        images={camera: observation["image", camera].cpu() for camera in schema.cameras},  # preprocessing is CPU side
        state=state,
        instructions=_instructions(ask.instruction),
        noise=ask.noise,
        keep_features=ask.keep_features,
    )


def _named(error: Exception, where: str) -> Exception:
    """``error`` with the tenant's name: a ValueError stays one, anything else becomes a RuntimeError."""
    if isinstance(error, ValueError):
        named: Exception = ValueError(f"{where}: {error}")
    else:
        named = RuntimeError(f"{where}: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named


class _Transport(InferenceTransport):
    """In-process queue that decides when the worker serves and whom; the rules are in :class:`TenantInferenceServer`.

    It also answers every request at most once and skips those whose client gave up.
    """

    def __init__(self, batch_size: int, timeout_s: float) -> None:
        self.batch_size = batch_size
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._queue: list[tuple[_Ask, Ticket]] = []  # in order of arrival
        self._away: set[_Session] = set()  # answered, prompt, not back yet
        self._free_since_s: float | None = None  # None: the worker serves, or does not run
        self._free_s = 0.0  # how long the worker has been free in all, up to _free_since_s

    # client side

    def submit(self, td: Any) -> Ticket:
        """Queue an :class:`_Ask`."""
        session = td.session
        with self._changed:
            now_s = time.monotonic()
            if session.answered_s is not None and not session.queued:
                session.prompt = now_s - session.answered_s <= self.timeout_s
            session.queued += 1
            self._away.discard(session)
            ticket = Ticket(session, now_s, self._free_time(now_s))
            self._queue.append((td, ticket))
            self._changed.notify()
        return ticket

    def rest(self, session: _Session) -> None:
        """Nobody waits for ``session`` before its next request."""
        with self._changed:
            session.answered_s = None
            self._away.discard(session)
            self._changed.notify()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    # server side; one worker

    def wait_for_work(self, timeout: float) -> None:
        """Sleep until a group is due, at most ``timeout`` seconds."""
        with self._changed:
            now_s = time.monotonic()
            end_s = now_s + timeout
            if self._free_since_s is None:
                self._free_since_s = now_s
            while True:
                group, due_s = self._next(now_s)
                if group is not None or now_s >= end_s:
                    return
                self._changed.wait(min(due_s, end_s) - now_s)
                now_s = time.monotonic()

    def drain_with_timing(self, max_items: int) -> tuple[list[Any], list[Future], list[float | None]]:
        """The largest FIFO prefix of the group that is due; nothing when none is."""
        with self._changed:
            now_s = time.monotonic()
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
            self._take(taken, self._queue[max_items:], time.monotonic())
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

    def _answered(self, session: _Session) -> None:
        with self._changed:
            session.answered_s = time.monotonic()
            if session.prompt and not session.queued:
                self._away.add(session)


# ----------------------------------------------------------------------------------------------------------- figures


class Histogram:
    """Counts of durations in fixed log-spaced bins: constant memory, however long the run.

    From 10 microseconds to 1000 seconds, a bin is 10 % wide; what lies outside is counted in the first or last one.

    Example:
        >>> h = Histogram()
        >>> for seconds in (0.001, 0.002, 0.002, 0.5):
        ...     h.add(seconds)
        >>> f"{h.quantile(0.5):.1g} {h.quantile(0.99):.1g}", h.n
        ('0.002 0.5', 4)
    """

    LOW_S = 1e-5
    PER_DECADE = 24
    BINS = 8 * PER_DECADE

    def __init__(self) -> None:
        self.n = 0
        self.counts = [0] * self.BINS

    def add(self, seconds: float) -> None:
        """Count one duration."""
        place = int(math.log10(max(seconds, self.LOW_S) / self.LOW_S) * self.PER_DECADE)
        self.counts[min(place, self.BINS - 1)] += 1
        self.n += 1

    def quantile(self, q: float) -> float | None:
        """Seconds, right to 5 % (the middle of the bin); None before the first value."""
        left = math.ceil(q * self.n)
        for place, count in enumerate(self.counts):
            left -= count
            if count and left <= 0:
                return self.LOW_S * 10 ** ((place + 0.5) / self.PER_DECADE)
        return None

    def bins(self) -> list[tuple[float, int]]:
        """``(upper edge in seconds, count)`` of the bins that hold something."""
        edges = [self.LOW_S * 10 ** ((place + 1) / self.PER_DECADE) for place in range(self.BINS)]
        return [(edge, count) for edge, count in zip(edges, self.counts, strict=True) if count]


@dataclass(eq=False)
class _TenantFigures:
    """What one tenant's sessions have seen."""

    wait: Histogram = field(default_factory=Histogram)  # submit -> its batch starts
    held: Histogram = field(default_factory=Histogram)  # the part of it in which the worker was free
    latency: Histogram = field(default_factory=Histogram)  # submit -> answer
    rows: int = 0
    calls: int = 0  # backbone calls with rows of it
    shared_calls: int = 0  # ... that other tenants had rows in as well
    call_rows: int = 0  # rows of those calls, all tenants
    call_sizes: Counter[int] = field(default_factory=Counter)  # floor(log2(rows of a call)) -> calls

    def summary(self) -> dict[str, Any]:
        out: dict[str, Any] = {"n": self.latency.n}
        for name in ("wait", "held", "latency"):
            for percent in (50, 99):
                seconds = getattr(self, name).quantile(percent / 100)
                out[f"{name}_p{percent}_ms"] = None if seconds is None else round(seconds * 1e3, 3)
        out["rows_per_batch"] = self.call_rows / self.calls if self.calls else None
        out["shared_batches"] = self.shared_calls / self.calls if self.calls else None
        return out

    def histograms(self) -> dict[str, Any]:
        out: dict[str, Any] = {f"{name}_bins": getattr(self, name).bins() for name in ("wait", "held", "latency")}
        return out | {"batch_rows_bins": [(2 ** (p + 1) - 1, n) for p, n in sorted(self.call_sizes.items())]}


# --------------------------------------------------------------------------------------------------------- the server


class TenantInferenceServer(InferenceServer):
    """TorchRL's :class:`InferenceServer` for many tenants on one backbone.

    Ours are when a batch fires and whom it takes (the transport), and how it is served (``_serve_batch``); worker
    thread and shutdown are the base class's. Use it as a context manager, or ``start()`` and ``shutdown()``.

    **When a batch fires.** A client is a session. Sessions with one
    :func:`~nexus_lightning.backbone.sharing_key` form a group, and only they can share a backbone call. When the worker
    is free it takes a group that is due: B of its requests wait, or none of its sessions is *expected*. A session is
    expected for T seconds after it was answered if the time before it came back within T; not while it waits already,
    and not after :meth:`TenantPolicyClient.rest`. From this follows:

    - with all sessions of a group waiting, it fires at once;
    - while the worker is free a request is held back for at most T, whatever the other sessions do: nobody waits for
      one that is new or simulates for longer than T, and one that crashes or turns slow costs the others T once;
    - nothing polls: the worker sleeps until a request makes a group due or T is over.

    **Whom it takes.** The first B requests of the group, in the order of arrival. So the requests of a tenant are
    never served out of order: an earlier one is in the same batch or in an earlier one. Of several groups that are due
    the one with the oldest waiting request goes first: a group is due at most T after its last answer, and from then
    on no batch with younger requests only goes before it. Across tenants there is no order beyond that.

    **How it is served.**

    1. admit: each request gets its policy version (held until the batch ends) and is checked against the schema;
    2. encode: at most ``max_rows`` rows per backbone call, one call for all feature kinds that the heads read;
    3. decode per (tenant, version, mode), answer each request as soon as its rows are done. Heads that say they can
       (:attr:`ActionHead.stack_key`) act together when there are at least :data:`MIN_STACK` with as many rows each;
       any error there, and each acts alone.

    A batch that raises (a prompt too long) is repeated request by request, so only the guilty one fails; so is a
    decode. Errors are ``ValueError`` for bad requests and ``RuntimeError`` for crashes, both naming the tenant.

    CUDA graphs: the base class's ``static_batch_size`` captures ``model(requests)`` as a whole, which cannot hold heads
    that are picked per request. Here the option makes the backbone's passes static (:mod:`~.features.graphs`): rows are
    filled up to a power of two, at most ``static_batch_size``, and the parts that the backbone names are replayed. On a
    CPU it does nothing.

    Args:
        policies: backbone and published heads.
        max_batch_size: B, requests per batch at most.
        timeout_s: T, seconds; 0: never wait for anybody.
        max_rows: rows per backbone call at most; larger batches and requests are encoded in several calls.
        static_batch_size: rows per backbone call at most on a GPU, where calls are replayed as CUDA graphs; None: not.
        on_batch: called in the worker thread after each batch (see :data:`OnBatch`); what it raises is logged.

    Raises:
        ValueError: a size is below 1 or ``timeout_s`` is negative.
    """

    transport: _Transport

    def __init__(
        self,
        policies: ServedPolicies,
        *,
        max_batch_size: int = 64,
        timeout_s: float = 0.005,
        max_rows: int = 256,
        static_batch_size: int | None = None,
        on_batch: OnBatch | None = None,
    ) -> None:
        sizes = {"max_batch_size": max_batch_size, "max_rows": max_rows, "static_batch_size": static_batch_size}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ValueError(f"queues.inference.{name}={value}: must be at least 1")
        if not 0 <= timeout_s < math.inf:
            raise ValueError(f"queues.inference.timeout_s={timeout_s}: must be a number of seconds, 0 or more")
        super().__init__(
            policies.backbone,
            _Transport(max_batch_size, timeout_s),
            max_batch_size=max_batch_size,
            min_batch_size=1,  # the transport hands out batches that are due
            timeout=_LIVENESS_POLL_S,
            policy_version_key=None,
        )
        self.policies = policies
        self.graphs = graphs_for(policies.backbone.device, static_batch_size)
        self.max_rows = max_rows if self.graphs is None else cast(int, static_batch_size)
        self.on_batch = on_batch
        self._counters: Counter[str] = Counter()
        self._call_sizes: Counter[int] = Counter()
        self._stacks: dict[tuple[tuple[str, int, str], ...], _Stack] = {}
        self._stacks_lock = threading.Lock()
        self._tenants: defaultdict[str, _TenantFigures] = defaultdict(_TenantFigures)

    def shutdown(self, timeout: float | None = 5.0) -> None:
        """Finish the batch in service, fail what waits, end the worker."""
        self._shutdown_event.set()
        self.transport.wake()
        super().shutdown(timeout)

    def forget(self, tenant: str) -> None:
        """Drop what is kept of a tenant that was removed: its figures, and stacks with a copy of its head."""
        with self._stacks_lock:
            self._stacks = {k: s for k, s in self._stacks.items() if all(name != tenant for name, _, _ in k)}
        with self._stats_lock:
            self._tenants.pop(tenant, None)

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

        ``backbone_calls``, ``shared_backbone_calls`` (with rows of several tenants), ``call_sizes`` (rows of a call ->
        calls), ``rows_served``, ``rows_failed``, ``tokens`` and ``padding_tokens`` (backbone outputs),
        ``rows_by_tenant``, and ``tenants``: per tenant the figures of :meth:`summary` with their histograms
        (``wait_bins``, ``held_bins``, ``latency_bins``: upper edge in seconds, count; ``batch_rows_bins``: rows at
        most, batches). ``reset`` restarts the rates and latencies, not the totals.
        """
        stats: dict[str, Any] = dict(super().stats(reset=reset))
        for single_tenant in ("policy_version", "weight_updates"):
            del stats[single_tenant]
        names = ("backbone_calls", "shared_backbone_calls", "rows_served", "rows_failed", "tokens", "padding_tokens")
        with self._stats_lock:
            stats["call_sizes"] = dict(sorted(self._call_sizes.items()))
            stats |= {name: self._counters[name] for name in names}
            stats["rows_by_tenant"] = {name: f.rows for name, f in self._tenants.items() if f.rows}
            stats["tenants"] = {name: f.summary() | f.histograms() for name, f in self._tenants.items()}
        return stats

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self.transport.waiting

    def summary(self) -> dict[str, dict[str, Any]]:
        """Per tenant, since construction; None where nothing was counted.

        ``n`` requests answered; p50 and p99 in milliseconds of ``wait`` (submit to the start of its batch), of ``held``
        (the part of it in which the worker was free: at most T) and of ``latency`` (submit to answer);
        ``rows_per_batch`` of the backbone calls that it took part in, and ``shared_batches``, the share of them that
        other tenants took part in too.
        """
        with self._stats_lock:
            return {name: figures.summary() for name, figures in self._tenants.items()}

    def _count(self, **amounts: int) -> None:
        with self._stats_lock:
            self._counters.update(amounts)

    def _serve_batch(self, items: list[Any], callbacks: list[Future], submitted_at: list[float | None]) -> None:
        start_s = time.monotonic()
        waited_ms = [(start_s - s) * 1e3 for s in submitted_at if s is not None]
        calls_before = self._counters["backbone_calls"]
        requests: list[_Request] = []
        try:
            for item, callback in zip(items, callbacks, strict=True):
                request = self._admit(item, cast(Ticket, callback))
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
        end_s = time.monotonic()
        with self._stats_lock:
            for request in requests:
                rows[request.served.tenant] += request.rows
                figures = self._tenants[request.served.tenant]
                figures.rows += request.rows
                figures.wait.add(start_s - request.future.submitted_s)
                figures.held.add(request.future.held_s)
        self._record_batch_stats(batch_size=rows.total(), queue_wait_ms=waited_ms, forward_ms=(end_s - start_s) * 1e3)
        if self.on_batch is not None:
            try:
                self.on_batch(dict(rows), start_s, end_s, self._counters["backbone_calls"] - calls_before)
            except Exception:  # every request is answered by now; monitoring must not stop the service
                _logger.exception("on_batch raised")

    def _admit(self, ask: _Ask, ticket: Ticket) -> _Request | None:
        if not self.transport.claim(ticket):
            return None
        try:
            served = self.policies.acquire(ask.tenant, ask.version)
        except ValueError as error:
            self.transport.resolve_exception(ticket, error)
            return None
        try:
            return _validated(ask, served, ticket)
        except Exception as error:
            self.policies.release(served)
            self._count(rows_failed=ask.rows)
            self.transport.resolve_exception(ticket, _named(error, f"tenant {ask.tenant!r}"))
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
        encoded, start = _Encoded(features), 0
        together: dict[Hashable, list[_Run]] = {}
        for _, members in groupby(pieces, key=lambda piece: piece.request.decode_key):
            run = _Run(list(members), start)
            together.setdefault(run.stack_key or run, []).append(run)
            start += run.rows
        for runs in together.values():
            for some in [runs] if len(runs) >= MIN_STACK else [[run] for run in runs]:
                self._decode(some, encoded)
        tokens = sum(mask.numel() for mask in features.mask.values())
        real = sum(int(mask.sum()) for mask in features.mask.values())  # waits for the device: after the answers
        self._count(tokens=tokens, padding_tokens=tokens - real)

    def _encode(self, pieces: list[_Piece]) -> VLAFeature:
        schema = pieces[0].request.served.schema
        rows = sum(piece.rows for piece in pieces)
        images = {c: torch.cat([p.request.images[c][p.start : p.stop] for p in pieces]) for c in schema.cameras}
        observation = TensorDict({"image": TensorDict(images, [rows])} if images else {}, [rows])
        instructions = [text for p in pieces for text in p.request.instructions[p.start : p.stop]]
        self._count(backbone_calls=1)
        kinds = tuple(sorted({piece.request.served.head.feature_spec.kind for piece in pieces}))
        if self.graphs is None:
            features = self.policies.backbone(observation, instructions, schema, kinds)
        else:
            filled = [min(row, rows - 1) for row in range(static_rows(rows, self.max_rows))]  # with the last row again
            with replaying(self.graphs):
                features = self.policies.backbone(observation[filled], [instructions[i] for i in filled], schema, kinds)
            features = features[:rows]
        if features.batch_size != (rows,):
            raise RuntimeError(f"backbone returned batch {list(features.batch_size)} for {rows} rows")
        tenants = {piece.request.served.tenant for piece in pieces}
        with self._stats_lock:
            self._call_sizes[rows] += 1
            self._counters["shared_backbone_calls"] += len(tenants) > 1
            for figures in (self._tenants[tenant] for tenant in tenants):
                figures.calls += 1
                figures.shared_calls += len(tenants) > 1
                figures.call_rows += rows
                figures.call_sizes[rows.bit_length() - 1] += 1
        return features

    def _decode(self, runs: list[_Run], encoded: _Encoded) -> None:
        """One run, or several whose heads can act together -> answers."""
        try:
            outs = [self._run_head(runs[0], encoded)] if len(runs) == 1 else self._run_heads(runs, encoded)
        except Exception as error:
            smaller = [[run] for run in runs] if len(runs) > 1 else [[run] for run in runs[0].alone()]
            if len(smaller) > 1:
                for again in smaller:
                    self._decode(again, encoded)
            else:
                self._fail(runs[0].request, error, type(runs[0].request.served.head).__name__)
            return
        for run, out in zip(runs, outs, strict=True):
            finite = _finite(out)  # of all rows; which of them, only when one is not
            for piece, part in zip(run.pieces, out.split([piece.rows for piece in run.pieces]), strict=True):
                if len(run.pieces) > 1 and piece.request.keep_features:  # a view would hold the features of all pieces
                    part.set("features", part.get("features").clone())
                self._answer(piece, cast(TensorDict, part), finite or _finite(part))

    def _run_head(self, run: _Run, encoded: _Encoded) -> TensorDict:
        kept, features = encoded.read(run)
        state, noise = self._inputs(run)
        head = run.request.served.head
        if run.request.mode == "value":
            return self._output(run, {"state_value": head.value(features, state)}, kept)
        return self._output(run, dict(head.act(features, state, noise).items()), kept)

    def _run_heads(self, runs: list[_Run], encoded: _Encoded) -> list[TensorDict]:
        """Several tenants' heads as one computation; see :data:`MIN_STACK`."""
        order = sorted(runs, key=lambda run: run.request.served.tenant)  # one stack, whoever came first
        served = [run.request.served for run in order]
        key = tuple((each.tenant, each.version, each.digest) for each in served)
        with self._stacks_lock:
            stack = self._stacks.pop(key, None) or _Stack([each.head for each in served])
            self._stacks[key] = stack  # the newest last
            while len(self._stacks) > MAX_STACKS:
                del self._stacks[next(iter(self._stacks))]
        states, noises = zip(*map(self._inputs, order), strict=True)
        noise = None if noises[0] is None else torch.stack(noises)
        given = stack(encoded.read_together(order), torch.stack(states), noise)
        places = {run: place for place, run in enumerate(order)}
        return [
            self._output(run, {key: value[places[run]] for key, value in given.items()}, encoded.read(run)[0])
            for run in runs
        ]

    def _inputs(self, run: _Run) -> tuple[Tensor, Tensor | None]:
        """Normalised state and noise of a run, on the backbone's device."""
        device = self.policies.backbone.device
        state = torch.cat([p.request.state[p.start : p.stop] for p in run.pieces]).to(device, torch.float32)
        noises = [p.request.noise[p.start : p.stop] for p in run.pieces if p.request.noise is not None]
        state = run.request.served.normalizer.normalize_state(state)
        return state, torch.cat(noises).to(device) if noises else None

    @staticmethod
    def _output(run: _Run, given: dict[str, Any], kept: VLAFeature) -> TensorDict:
        """What a head gave -> answers ``[R]``, on the CPU and in memory of their own."""
        request, rows = run.request, run.rows
        served = request.served

        def own(key: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
            if tuple(value.shape) != (rows, *shape):
                raise RuntimeError(f"{key} has shape {list(value.shape)}, expected {[rows, *shape]}")
            value = value.detach()
            return value.clone() if value.device.type == "cpu" else value.cpu()

        out: dict[str, Any] = {"policy_version": torch.full((rows, 1), served.version, dtype=torch.int64)}
        if "state_value" in given:
            out["state_value"] = own("'state_value'", given["state_value"], (1,))
        if request.mode == "act":
            if "chunk" not in given:
                raise RuntimeError(f"act returned no 'chunk', only {sorted(given)}")
            shape = (served.schema.chunk, served.schema.action_dim)
            action: dict[str, Any] = {
                key: own(repr(key), given[key], shape) for key in ("chunk", "log_probs") if key in given
            }
            if request.noise is not None and served.head.trace_shapes:
                shapes = served.head.trace_shapes.items()
                action["trace"] = {key: own(f"trace {key!r}", given["trace"][key], shape) for key, shape in shapes}
            out["vla_action"] = action
        if request.keep_features:
            out["features"] = kept.cpu().clone()
        return TensorDict(out, [rows])

    def _answer(self, piece: _Piece, rows: TensorDict, finite: bool) -> None:
        """Add the answer ``[n]`` of a piece; the request is answered when its last row is there."""
        request = piece.request
        if request.failed:
            return
        if not finite:
            error = FloatingPointError("its answer holds NaN or infinity")
            self._fail(request, error, type(request.served.head).__name__)
            return
        request.answers.append(rows)
        request.answered += piece.rows
        if request.answered < request.rows:
            return
        parts = request.answers
        answer = parts[0] if len(parts) == 1 else _joined(parts)
        request.future.answered_by = (request.served.tenant, request.served.version)
        with self._stats_lock:
            self._counters["rows_served"] += request.rows
            self._tenants[request.served.tenant].latency.add(time.monotonic() - request.future.submitted_s)
        self.transport.resolve(request.future, answer)

    def _fail(self, request: _Request, error: Exception, where: str) -> None:
        request.failed = True
        self._count(rows_failed=request.rows)
        served = request.served
        self.transport.resolve_exception(
            request.future, _named(error, f"tenant {served.tenant!r}, version {served.version}: {where}")
        )


def _finite(answer: TensorDictBase) -> bool:
    """False when a number of the answer is NaN or infinite (features are the backbone's: not looked at)."""
    values = [answer.get("state_value", None)]
    action = answer.get("vla_action", None)
    if action is not None:
        values += list(action.values(include_nested=True, leaves_only=True))
    return all(bool(torch.isfinite(value).all()) for value in values if value is not None)


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
    consulted. Use one client per thread. ``noise_rows = (first, total)`` says that the rows asked for are rows
    ``first ...`` of ``total`` which several processes with equal generators share: each gets its own rows' noise.

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
        self._session = _Session(sharing_key(served.schema, served.head.feature_spec.kind))
        self.noise_rows: tuple[int, int] | None = None
        self.record_features = False
        self._features: list[VLAFeature] = []
        cameras = [("observation", "image", camera) for camera in served.schema.cameras]
        in_keys: list[Any] = [*cameras, ("observation", "state"), "language_instruction"]
        out_keys: list[Any] = [("vla_action", "chunk"), "policy_version"]
        if served.head.supports_rl:
            out_keys += [("vla_action", "log_probs"), "state_value"]
            out_keys += [("vla_action", "trace", key) for key in served.head.trace_shapes]
        self.in_keys, self.out_keys = in_keys, out_keys

    def rest(self) -> None:
        """No request follows soon (an evaluation is over, an update begins): others need not wait for this session.

        Its next request ends the rest. Without this call they wait once, T seconds at most.
        """
        self.server.transport.rest(self._session)

    def get_rng_state(self) -> Tensor:
        """State of the noise generator, uint8 ``[bytes]``; part of a resumable run."""
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor) -> None:
        """Go on from a state that :meth:`get_rng_state` gave."""
        self.generator.set_state(state)

    def submit(self, td: TensorDictBase, mode: Mode = "act") -> Ticket:
        """Queue a request for ``td`` ``[N]``; the future gives the raw answer ``[N]`` or raises.

        Raises:
            ValueError: ``td`` has no rows or not exactly one batch dim.
        """
        if len(td.batch_size) != 1 or not td.batch_size[0]:
            raise ValueError(f"tenant {self.tenant!r}: expected a batch [N] with N >= 1, got {list(td.batch_size)}")
        observation = td.get("observation", None)
        noise = None
        if mode == "act" and self.sample:
            first, total = (0, td.batch_size[0]) if self.noise_rows is None else self.noise_rows
            noise = torch.randn(total, *self._noise_shape, generator=self.generator)[first : first + td.batch_size[0]]
        return self.server.transport.submit(
            _Ask(
                self._session,
                self.tenant,
                self.version,
                mode,
                rows=td.batch_size[0],
                # the caller may put other tensors into its own TensorDict while this one waits
                observation=observation.copy() if isinstance(observation, TensorDictBase) else observation,
                instruction=td.get("language_instruction", None),
                noise=noise,
                keep_features=self.record_features and mode == "act",
            )
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act on ``tensordict`` ``[N]``; returns it with the keys above.

        Raises:
            ValueError: the request does not fit the tenant's schema, or the backbone refuses it.
            RuntimeError: the head crashed or gave non-finite numbers, or the server stopped.
            TimeoutError: no answer within ``timeout_s``.
        """
        answer = self.wait(self.submit(tensordict))
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
        return self.wait(self.submit(td, "value")).get("state_value")

    def wait(self, ticket: Ticket) -> TensorDict:
        """The raw answer of :meth:`submit`; raises as :meth:`forward` does."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            remaining = deadline - time.monotonic()
            try:
                answer = ticket.result(timeout=max(0.0, min(remaining, _LIVENESS_POLL_S)))
                break
            except TimeoutError:
                if ticket.done():  # just now
                    answer = ticket.result()
                    break
                stopped = not self.server.is_alive
                if not stopped and remaining > 0:
                    continue
                ticket.cancel()  # a request that still waits is never served
                if stopped:
                    raise RuntimeError(f"tenant {self.tenant!r}: the inference server is not running") from None
                message = f"tenant {self.tenant!r}: no answer from inference within {self.timeout_s:g} s"
                raise TimeoutError(message) from None
        tenant, version = cast(tuple[str, int], ticket.answered_by)
        if tenant != self.tenant or (self.version is not None and version != self.version):
            raise RuntimeError(
                f"tenant {self.tenant!r} asked for version {self.version} and was given {tenant!r} "
                f"version {version}: the answer belongs to another request"
            )
        return answer
