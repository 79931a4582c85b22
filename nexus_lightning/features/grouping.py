"""Several tenants' observations through the backbone in one go: training-side group batching.

Rows that share a :func:`~nexus_lightning.backbone.sharing_key` are sorted by the length of their text, cut into passes
that waste little on padding, encoded, and put back: a row's feature is the same alone and in any company.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from tensordict import TensorDict

from nexus_lightning.backbone import Backbone, FeatureSpec, VLAFeature, concatenate_features
from nexus_lightning.schema import TenantSchema

#: Rows per backbone pass at most.
MAX_ROWS = 64
#: Largest share of text padding that one pass may hold; a pass is cut before it.
MAX_PADDING = 0.25


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

    def add(self, features: VLAFeature) -> None:
        masks = list(features.mask.values())
        total = sum(mask.numel() for mask in masks)
        self.calls += 1
        self.rows += len(features.pooled)
        self.tokens += total
        self.padding += total - sum(int(mask.sum()) for mask in masks)


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


def encode_together(backbone: Backbone, requests: Sequence[EncodeRequest], stats: EncodeStats) -> list[VLAFeature]:
    """One feature ``[N_i]`` per request, in the order of its rows.

    Args:
        backbone: the frozen backbone.
        requests: of any tenants with one sharing key; the cheapest number of passes serves all of them.
        stats: added to.
    """
    schema = requests[0].schema
    kinds = tuple(sorted({request.spec.kind for request in requests}))
    texts = [text for request in requests for text in request.instructions]
    images = {c: torch.cat([request.observation["image", c] for request in requests]) for c in schema.cameras}
    parts, order = [], []
    for rows in passes([len(schema.instruct(text).encode()) for text in texts]):
        part = {camera: image[rows] for camera, image in images.items()}
        observation = TensorDict({"image": TensorDict(part, [len(rows)])} if part else {}, [len(rows)])
        features = backbone(observation, [texts[row] for row in rows], schema, kinds)
        stats.add(features)
        parts.append(features)
        order += rows
    whole = concatenate_features(parts)[torch.tensor(order).argsort()]
    out, start = [], 0
    for request in requests:
        stop = start + len(request.instructions)
        out.append(_trimmed(cast(VLAFeature, whole[start:stop]).select(request.spec)))
        start = stop
    return out


def passes(lengths: Sequence[int], max_rows: int = MAX_ROWS, max_padding: float = MAX_PADDING) -> list[list[int]]:
    """Cut rows into passes of similar text length.

    Args:
        lengths: of each row's text.
        max_rows: rows per pass at most.
        max_padding: largest share of text positions that may be padding.

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


def _trimmed(features: VLAFeature) -> VLAFeature:
    """Without the positions at the end that are padding in every row (a longer mate's)."""
    tokens, mask = features.tokens, features.mask
    for name in list(tokens.keys()):
        used = mask[name].any(0).nonzero()
        length = int(used.max()) + 1 if len(used) else 0
        if length < mask[name].shape[1]:
            tokens[name], mask[name] = tokens[name][:, :length], mask[name][:, :length]
    return features
