"""A complete action head: one linear layer from pooled features and state to the chunk."""

import torch
from tensordict import TensorDict
from torch import nn

from nexus_lightning.head import ActionHead


class LinearChunkHead(ActionHead):
    def __init__(self, feature_spec, schema, loss_power: float = 1.0):
        super().__init__(feature_spec, schema)
        self.loss_power = loss_power
        self.linear = nn.Linear(feature_spec.pooled_dim + schema.state_dim, schema.chunk * schema.action_dim)

    def chunk(self, features, state):
        out = self.linear(torch.cat([features.pooled, state], dim=-1))
        return out.unflatten(-1, (self.schema.chunk, self.schema.action_dim))

    def loss(self, features, state, actions, is_pad):
        error = (self.chunk(features, state) - actions).abs() ** self.loss_power
        valid = ~is_pad.unsqueeze(-1)
        return {"loss": (error * valid).sum() / (valid.sum() * actions.shape[-1]).clamp(min=1)}

    def act(self, features, state, noise=None):
        return TensorDict({"chunk": self.chunk(features, state)}, batch_size=[len(state)])
