"""Fakes for unit tests: a backbone of a few parameters. Not used outside ``tests/``."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import nn

from nexus_lightning.backbone import Backbone, FeatureSegment, FeatureSpec, VLAFeature, check_observation


class FakeBackbone(Backbone):
    """Mean colour of each camera and the instruction's bytes, through fixed random projections. Counts its passes."""

    def __init__(self, seed: int = 0, dim: int = 8) -> None:
        super().__init__()
        self.config = {"name": "fake", "seed": seed, "dim": dim}
        self.dim = dim
        generator = torch.Generator().manual_seed(seed)
        self.colour = nn.Parameter(torch.randn(3, dim, generator=generator))
        self.text = nn.Parameter(torch.randn(256, dim, generator=generator))
        self.calls = 0
        self.freeze()

    def feature_spec(self, schema, kind="tokens"):
        segments = [FeatureSegment(f"image_{c}", self.dim, (2, 2)) for c in schema.cameras]
        segments = (*segments, FeatureSegment("text", self.dim)) if kind == "tokens" else ()
        return FeatureSpec(kind, segments, self.dim)

    def preprocess(self, observation, instructions, schema, kinds=("tokens",)):
        check_observation(observation, schema)
        longest = max(len(text.encode()) for text in instructions)
        ids = torch.zeros(len(instructions), longest, dtype=torch.long)
        mask = torch.zeros(len(instructions), longest, dtype=torch.bool)
        for row, text in enumerate(instructions):
            data = torch.tensor(list(text.encode()))
            ids[row, : len(data)], mask[row, : len(data)] = data, True
        inputs = TensorDict({"ids": ids, "mask": mask}, [len(instructions)])
        for camera in schema.cameras:
            pooled = torch.nn.functional.adaptive_avg_pool2d(observation["image", camera].float() / 255, 2)
            inputs["image", camera] = pooled.flatten(2).transpose(1, 2)
        return inputs

    def encode(self, inputs, kinds=("tokens",)):
        self.calls += 1
        images = inputs.get("image", None)
        tokens = {} if images is None else {f"image_{c}": v @ self.colour for c, v in images.items()}
        mask = {k: torch.ones(v.shape[:2], dtype=torch.bool, device=v.device) for k, v in tokens.items()}
        tokens["text"], mask["text"] = self.text[inputs["ids"]], inputs["mask"]
        weight = inputs["mask"].unsqueeze(-1).float()
        pooled = (tokens["text"] * weight).sum(1) / weight.sum(1)
        size = inputs.batch_size
        return VLAFeature(tokens=TensorDict(tokens, size), mask=TensorDict(mask, size), pooled=pooled, batch_size=size)
