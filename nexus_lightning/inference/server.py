"""The worker that serves: admit, one backbone pass for all, each tenant's own head."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from itertools import groupby
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.modules.inference_server import InferenceServer

from nexus_lightning.backbone import VLAFeature, concatenate_features, sharing_key
from nexus_lightning.features.graphs import graphs_for, replaying, static_rows
from nexus_lightning.inference.client import TenantPolicyClient
from nexus_lightning.inference.figures import TenantFigures
from nexus_lightning.inference.policies import ServedPolicies
from nexus_lightning.inference.requests import (
    Ask,
    Encoded,
    Piece,
    Request,
    Run,
    Stack,
    Ticket,
    pack_requests,
    validate_ask,
)
from nexus_lightning.inference.transport import LIVENESS_POLL_S, Transport

_logger = logging.getLogger(__name__)

#: ``on_batch(rows per tenant, start_s, end_s, backbone calls)``; times are the clock's seconds.
OnBatch = Callable[[dict[str, int], float, float, int], None]

#: Fewer heads act one by one: measured on a CPU with MLP heads, vmap takes 1.3 times as long for 2 of them, as long for
#: 3, 0.8 times for 4, 0.5 to 0.7 times for 8.
MIN_STACK = 4
#: Stacks of heads kept for the next batch with the same tenants and versions (stacking takes as long as it saves).
MAX_STACKS = 4


class TenantInferenceServer(InferenceServer):
    """TorchRL's :class:`InferenceServer` for many tenants on one backbone.

    Ours are when a batch fires and whom it takes (the transport), and how it is served (``_serve_batch``); worker
    thread and shutdown are the base class's. Use it as a context manager, or ``start()`` and ``shutdown()``.

    **When a batch fires.** A client is a session. Sessions with one
    :func:`~nexus_lightning.backbone.sharing_key` form a group, and only they can share a backbone call. When the worker
    is free it takes a group that is due: B of its requests wait, or none of its sessions is *expected*. A session is
    expected for T seconds after it was answered if the time before it came back within T; not while it waits already,
    and not after :meth:`~.client.TenantPolicyClient.rest`. From this follows:

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
        clock: seconds, of T and of every figure.

    Raises:
        ValueError: a size is below 1 or ``timeout_s`` is negative.
    """

    transport: Transport

    def __init__(
        self,
        policies: ServedPolicies,
        *,
        max_batch_size: int = 64,
        timeout_s: float = 0.005,
        max_rows: int = 256,
        static_batch_size: int | None = None,
        on_batch: OnBatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        sizes = {"max_batch_size": max_batch_size, "max_rows": max_rows, "static_batch_size": static_batch_size}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ValueError(f"queues.inference.{name}={value}: must be at least 1")
        if not 0 <= timeout_s < math.inf:
            raise ValueError(f"queues.inference.timeout_s={timeout_s}: must be a number of seconds, 0 or more")
        super().__init__(
            policies.backbone,
            Transport(max_batch_size, timeout_s, clock),
            max_batch_size=max_batch_size,
            min_batch_size=1,  # the transport hands out batches that are due
            timeout=LIVENESS_POLL_S,
            policy_version_key=None,
        )
        self.policies = policies
        self.graphs = graphs_for(policies.backbone.device, static_batch_size)
        self.max_rows = max_rows if self.graphs is None else cast(int, static_batch_size)
        self.on_batch = on_batch
        self._counters: Counter[str] = Counter()
        self._call_sizes: Counter[int] = Counter()
        self._stacks: dict[tuple[tuple[str, int, str], ...], Stack] = {}
        self._stacks_lock = threading.Lock()
        self._tenants: defaultdict[str, TenantFigures] = defaultdict(TenantFigures)

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
        start_s = self.transport.clock()
        waited_ms = [(start_s - s) * 1e3 for s in submitted_at if s is not None]
        calls_before = self._counters["backbone_calls"]
        requests: list[Request] = []
        try:
            for item, callback in zip(items, callbacks, strict=True):
                request = self._admit(item, cast(Ticket, callback))
                if request is not None:
                    requests.append(request)
            groups: dict[tuple[str, int], list[Request]] = {}
            for request in requests:
                key = sharing_key(request.served.schema, request.served.head.feature_spec.kind)
                groups.setdefault(key, []).append(request)
            for group in groups.values():
                for pieces in pack_requests(group, self.max_rows):
                    self._serve_pieces(pieces)
        finally:
            for request in requests:
                self.policies.release(request.served)
        if not requests:
            return
        rows: Counter[str] = Counter()
        end_s = self.transport.clock()
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

    def _admit(self, ask: Ask, ticket: Ticket) -> Request | None:
        if not self.transport.claim(ticket):
            return None
        try:
            served = self.policies.acquire(ask.tenant, ask.version)
        except ValueError as error:
            self.transport.resolve_exception(ticket, error)
            return None
        try:
            return validate_ask(ask, served, ticket)
        except Exception as error:
            self.policies.release(served)
            self._count(rows_failed=ask.rows)
            self.transport.resolve_exception(ticket, _named(error, f"tenant {ask.tenant!r}"))
            return None

    def _serve_pieces(self, pieces: list[Piece]) -> None:
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
        encoded, start = Encoded(features), 0
        together: dict[Hashable, list[Run]] = {}
        for _, members in groupby(pieces, key=lambda piece: piece.request.decode_key):
            run = Run(list(members), start)
            together.setdefault(run.stack_key or run, []).append(run)
            start += run.rows
        for runs in together.values():
            for some in [runs] if len(runs) >= MIN_STACK else [[run] for run in runs]:
                self._decode(some, encoded)
        tokens = sum(mask.numel() for mask in features.mask.values())
        real = sum(int(mask.sum()) for mask in features.mask.values())  # waits for the device: after the answers
        self._count(tokens=tokens, padding_tokens=tokens - real)

    def _encode(self, pieces: list[Piece]) -> VLAFeature:
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

    def _decode(self, runs: list[Run], encoded: Encoded) -> None:
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

    def _run_head(self, run: Run, encoded: Encoded) -> TensorDict:
        kept, features = encoded.read(run)
        state, noise = self._inputs(run)
        head = run.request.served.head
        if run.request.mode == "value":
            return self._output(run, {"state_value": head.value(features, state)}, kept)
        return self._output(run, dict(head.act(features, state, noise).items()), kept)

    def _run_heads(self, runs: list[Run], encoded: Encoded) -> list[TensorDict]:
        """Several tenants' heads as one computation; see :data:`MIN_STACK`."""
        order = sorted(runs, key=lambda run: run.request.served.tenant)  # one stack, whoever came first
        served = [run.request.served for run in order]
        key = tuple((each.tenant, each.version, each.digest) for each in served)
        with self._stacks_lock:
            stack = self._stacks.pop(key, None) or Stack([each.head for each in served])
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

    def _inputs(self, run: Run) -> tuple[Tensor, Tensor | None]:
        """Normalised state and noise of a run, on the backbone's device."""
        device = self.policies.backbone.device
        state = torch.cat([p.request.state[p.start : p.stop] for p in run.pieces]).to(device, torch.float32)
        noises = [p.request.noise[p.start : p.stop] for p in run.pieces if p.request.noise is not None]
        state = run.request.served.normalizer.normalize_state(state)
        return state, torch.cat(noises).to(device) if noises else None

    @staticmethod
    def _output(run: Run, given: dict[str, Any], kept: VLAFeature) -> TensorDict:
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

    def _answer(self, piece: Piece, rows: TensorDict, finite: bool) -> None:
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
            self._tenants[request.served.tenant].latency.add(self.transport.clock() - request.future.submitted_s)
        self.transport.resolve(request.future, answer)

    def _fail(self, request: Request, error: Exception, where: str) -> None:
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


def _named(error: Exception, where: str) -> Exception:
    """``error`` with the tenant's name: a ValueError stays one, anything else becomes a RuntimeError."""
    if isinstance(error, ValueError):
        named: Exception = ValueError(f"{where}: {error}")
    else:
        named = RuntimeError(f"{where}: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named
