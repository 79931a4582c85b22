"""Several tenants' observations through the backbone in one go: training-side group batching.

Rows that share a :func:`~nexus_lightning.backbone.sharing_key` are sorted by length, cut into passes
that waste little on padding, encoded, and put back: a row's feature is the same alone and in any company.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil
from typing import cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from nexus_lightning.backbone import Backbone, FeatureSpec, VLAFeature, concatenate_features
from nexus_lightning.schema import TenantSchema

#: Rows per backbone pass at most.
MAX_ROWS = 64
#: Largest share of padding that one pass may hold, by :func:`estimated_tokens`; a pass is cut before it.
MAX_PADDING = 0.25
#: Pixels (each way) that an image token covers, and bytes of text per token. Most models make more tokens of an image
#: and no more of a text, so the share of padding comes out rather too high than too low.
PIXELS_PER_TOKEN, BYTES_PER_TOKEN = 32, 4


@dataclass
class EncodeStats:
    """What grouped encoding did so far: backbone calls, rows, tokens that came out and how many were padding."""

    calls: int = 0
    rows: int = 0
    tokens: int = 0
    padding: int = 0

    @property
    def padding_share(self) -> float:
        return self.padding / self.tokens if self.tokens else 0.0


@dataclass(frozen=True)
class EncodeRequest:
    """Rows of one tenant.

    Attributes:
        observation: ``[N]`` with ``("image", <camera>)`` for the schema's cameras.
        instructions: N strings.
        schema / spec: whose, and what its head reads.
    """

    observation: TensorDict
    instructions: Sequence[str]
    schema: TenantSchema
    spec: FeatureSpec


_Ends = dict[str, tuple[list[int], int]]
#: One pass: its rows of all requests' rows, observation ``[R]``, and texts.
Pass = tuple[list[int], TensorDict, list[str]]


def cut_passes(requests: Sequence[EncodeRequest]) -> Iterator[Pass]:
    """The cheapest number of passes that serve all requests (of one sharing key), one after the other."""
    schema = requests[0].schema
    texts = [text for request in requests for text in request.instructions]
    images = {c: _concatenated([request.observation["image", c] for request in requests]) for c in schema.cameras}
    cut = [sorted(rows) for rows in passes([estimated_tokens(schema, text) for text in texts])]
    for rows in cut:
        whole = len(cut) == 1  # then nothing is picked out: no copy
        part = images if whole else {camera: image[rows] for camera, image in images.items()}
        observation = TensorDict({"image": TensorDict(part, [len(rows)])} if part else {}, [len(rows)])
        yield rows, observation, texts if whole else [texts[row] for row in rows]


def kinds_of(requests: Sequence[EncodeRequest]) -> tuple[str, ...]:
    """All kinds that the requests' heads read: one pass gives them all."""
    return tuple(sorted({request.spec.kind for request in requests}))


def encode_together(
    backbone: Backbone,
    requests: Sequence[EncodeRequest],
    stats: EncodeStats,
    encoded: Iterator[tuple[list[int], VLAFeature]] | None = None,
) -> list[VLAFeature]:
    """One feature ``[N_i]`` per request, in the order of its rows.

    Args:
        backbone: the frozen backbone.
        requests: of any tenants with one sharing key; the cheapest number of passes serves all of them.
        stats: added to.
        encoded: the rows and features of every pass of :func:`cut_passes`; None: encoded here.
    """
    schema, kinds = requests[0].schema, kinds_of(requests)
    if encoded is None:
        encoded = ((rows, backbone(seen, texts, schema, kinds)) for rows, seen, texts in cut_passes(requests))
    bounds = list(pairwise(accumulate((len(request.instructions) for request in requests), initial=0)))
    pieces: list[list[VLAFeature]] = [[] for _ in requests]
    order: list[list[int]] = [[] for _ in requests]
    for rows, features in encoded:
        ends = _count(features, stats)
        start = 0
        for i, (_, last) in enumerate(bounds):  # rows ascend, so those of a request lie side by side
            stop = bisect_left(rows, last, start)
            if stop > start:
                pieces[i].append(_cut_out(features, requests[i].spec, start, stop, ends))
                order[i] += rows[start:stop]
            start = stop
    return [_in_order(found, rows) for found, rows in zip(pieces, order, strict=True)]


def estimated_tokens(schema: TenantSchema, instruction: str) -> int:
    """How long a row is for the backbone, images included; only ever compared with other rows of the same images."""
    image = max(1, (schema.image_size // PIXELS_PER_TOKEN) ** 2)
    return len(schema.cameras) * image + ceil(len(schema.instruct(instruction).encode()) / BYTES_PER_TOKEN)


def passes(lengths: Sequence[int], max_rows: int = MAX_ROWS, max_padding: float = MAX_PADDING) -> list[list[int]]:
    """Cut rows into passes of similar length.

    Args:
        lengths: of each row, in any unit.
        max_rows: rows per pass at most.
        max_padding: largest share of a pass that may be padding.

    Returns:
        Row indices per pass; together each row once.

    Example:
        >>> passes([3, 40, 4, 41, 3], max_rows=4, max_padding=0.25)
        [[0, 4, 2], [1, 3]]
    """
    cut: list[list[int]] = []
    real = 0
    for row in sorted(range(len(lengths)), key=lambda r: lengths[r]):
        padded = lengths[row] * (len(cut[-1]) + 1) if cut else 0
        if not cut or len(cut[-1]) == max_rows or padded - real - lengths[row] > max_padding * padded:
            cut.append([])
            real = 0
        cut[-1].append(row)
        real += lengths[row]
    return cut


def _in_order(pieces: list[VLAFeature], rows: list[int]) -> VLAFeature:
    if len(pieces) == 1:
        return pieces[0]
    return cast(VLAFeature, concatenate_features(pieces)[torch.tensor(rows).argsort()])


def _concatenated(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _count(features: VLAFeature, stats: EncodeStats) -> _Ends:
    """Adds a pass to ``stats``; returns for every segment where each row's last real token ends, and its width.

    The masks cross from the device at once: on a GPU every crossing waits for the pass.
    """
    stats.calls += 1
    stats.rows += len(features.pooled)
    ends: _Ends = {}
    masks = {str(name): mask for name, mask in features.mask.items()}
    if not masks:
        return ends
    all_BL = torch.cat(list(masks.values()), dim=1).cpu().numpy()
    stats.tokens += all_BL.size
    stats.padding += all_BL.size - int(all_BL.sum())
    start = 0
    for name, mask in masks.items():
        length = mask.shape[1]
        mask_BL = all_BL[:, start : start + length]
        ends[name] = (mask_BL * np.arange(1, length + 1)).max(1, initial=0).tolist(), length
        start += length
    return ends


def _cut_out(features: VLAFeature, spec: FeatureSpec, start: int, stop: int, ends: _Ends) -> VLAFeature:
    """What ``spec`` names of some rows, without the positions at the end that only longer mates fill (no copy)."""
    names = [segment.name for segment in spec.segments]
    whole = features if list(ends) == names else features.select(spec)
    part = cast(VLAFeature, whole[start:stop])
    for name in names:
        of_rows, width = ends[name]
        length = max(of_rows[start:stop])
        if length < width:
            part.tokens[name], part.mask[name] = part.tokens[name][:, :length], part.mask[name][:, :length]
    return part
