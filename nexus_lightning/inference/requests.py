"""A request on its way: as it is asked, admitted, cut into pieces and decoded."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from nexus_lightning.backbone import FeatureSpec, VLAFeature, compact
from nexus_lightning.head import ActionHead
from nexus_lightning.images import fit_observation
from nexus_lightning.inference.policies import Served

Mode = Literal["act", "value"]


@dataclass(eq=False)
class Session:
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
class Ask:
    """A request as it waits: plain, because a TensorDict of it costs the clients more than all the rest."""

    session: Session
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

    def __init__(self, session: Session, submitted_s: float, free_s: float) -> None:
        super().__init__()
        self.session = session
        self.submitted_s = submitted_s
        self.free_s = free_s  # the worker's free time when it came
        self.held_s = 0.0
        self.answered_by: tuple[str, int] | None = None  # tenant and version


@dataclass(eq=False)
class Request:
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
class Piece:
    """Rows ``start:stop`` of a request: all of them unless the request is larger than one encode may be."""

    request: Request
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(eq=False)
class Run:
    """Pieces of one tenant, version and mode; their rows lie side by side in the encoded batch, from ``start`` on."""

    pieces: list[Piece]
    start: int

    @property
    def request(self) -> Request:
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

    def alone(self) -> list[Run]:
        """A run per piece."""
        starts = accumulate((piece.rows for piece in self.pieces[:-1]), initial=self.start)
        return [Run([piece], start) for piece, start in zip(self.pieces, starts, strict=True)]


class _Act(nn.Module):
    """``head.act`` as a ``forward``, which is what ``torch.func.functional_call`` calls."""

    def __init__(self, head: ActionHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: VLAFeature, state: Tensor, noise: Tensor | None) -> dict[str, Any]:
        return dict(self.head.act(features, state, noise).items())


class Stack:
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


class Encoded:
    """Features ``[R]`` of one backbone call. What heads of one kind read is made once, not once per tenant."""

    def __init__(self, features: VLAFeature) -> None:
        self.features = features
        self._views: dict[tuple[FeatureSpec, bool], tuple[VLAFeature, VLAFeature]] = {}

    def read(self, run: Run) -> tuple[VLAFeature, VLAFeature]:
        """Its rows: what is kept for training, and what the head sees."""
        kept, seen = self._views_of(run.request)
        rows = slice(run.start, run.start + run.rows)
        return cast(VLAFeature, kept[rows]) if run.request.keep_features else kept, cast(VLAFeature, seen[rows])

    def read_together(self, runs: Sequence[Run]) -> VLAFeature:
        """``[K, R]``: what the heads of K runs of R rows see."""
        rows = torch.tensor(
            [range(run.start, run.start + run.rows) for run in runs], device=self.features.pooled.device
        )
        return cast(VLAFeature, self._views_of(runs[0].request)[1][rows])

    def _views_of(self, request: Request) -> tuple[VLAFeature, VLAFeature]:
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


def validate_ask(ask: Ask, served: Served, ticket: Ticket) -> Request:
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
    observation = fit_observation(observation, schema)
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
    return Request(
        future=ticket,
        served=served,
        mode=ask.mode,
        images={camera: observation["image", camera].cpu() for camera in schema.cameras},  # preprocessing is CPU side
        state=state,
        instructions=_instructions(ask.instruction),
        noise=ask.noise,
        keep_features=ask.keep_features,
    )


def pack_requests(requests: Sequence[Request], max_rows: int) -> Iterator[list[Piece]]:
    """Pieces of ``requests`` in packs of at most ``max_rows`` rows; equal decode keys lie side by side."""
    order: dict[tuple, list[Request]] = {}
    for request in requests:
        order.setdefault(request.decode_key, []).append(request)
    pack: list[Piece] = []
    room = max_rows
    for request in (r for same in order.values() for r in same):
        if request.rows > room and pack and request.rows <= max_rows:  # do not tear what fits into one call
            yield pack
            pack, room = [], max_rows
        start = 0
        while start < request.rows:
            stop = min(request.rows, start + room)
            pack.append(Piece(request, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield pack
                pack, room = [], max_rows
    if pack:
        yield pack
