"""A complete backbone: a frozen random convolution per camera and a bag of bytes for the instruction."""

import torch
from tensordict import TensorDict
from torch import nn

from nexus_lightning.backbone import Backbone, FeatureSegment, FeatureSpec, VLAFeature, check_observation


class PatchBackbone(Backbone):
    kinds = ("tokens", "pooled")

    def __init__(self, dim: int = 32, patch: int = 16):
        super().__init__()
        self.config = {"name": "patch", "dim": dim, "patch": patch}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.image = nn.Conv2d(3, dim, patch, stride=patch)
            self.text = nn.EmbeddingBag(256, dim)
        self.freeze()

    def feature_spec(self, schema, kind="tokens"):
        side, dim = schema.image_size // self.config["patch"], self.config["dim"]
        images = [FeatureSegment(f"image_{camera}", dim, grid=(side, side)) for camera in schema.cameras]
        return FeatureSpec(kind, tuple(images) if kind == "tokens" else (), pooled_dim=dim)

    def preprocess(self, observation, instructions, schema, kinds=("tokens",)):
        check_observation(observation, schema)
        inputs = TensorDict({"image": {c: observation["image", c] for c in schema.cameras}}, [len(instructions)])
        ids = [torch.tensor(list(schema.instruct(text).encode())) for text in instructions]
        lengths = torch.tensor([len(row) for row in ids])
        inputs["ids"], inputs["lengths"] = nn.utils.rnn.pad_sequence(ids, batch_first=True), lengths
        return inputs

    @torch.no_grad()
    def encode(self, inputs, kinds=("tokens",)):
        tokens = {f"image_{c}": self.image(x / 255).flatten(2).transpose(1, 2) for c, x in inputs["image"].items()}
        mask = {name: torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) for name, x in tokens.items()}
        rows = zip(inputs["ids"], inputs["lengths"], strict=True)
        pooled = torch.cat([self.text(ids[:length].unsqueeze(0)) for ids, length in rows])
        size = inputs.batch_size
        return VLAFeature(tokens=TensorDict(tokens, size), mask=TensorDict(mask, size), pooled=pooled, batch_size=size)
