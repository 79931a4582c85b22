"""The private part of a policy: the action head that a researcher subclasses."""

from __future__ import annotations

import inspect
from typing import ClassVar

from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Normal

from nexus_lightning.backbone import FeatureSpec, VLAFeature
from nexus_lightning.schema import TenantSchema


class ActionHead(nn.Module):
    """Base class of every action head: frozen features + normalised state -> a chunk of normalised actions.

    One instance belongs to one tenant. Everything it sees is already normalised; everything it returns is normalised.
    It never touches the backbone, never calls a collective, and draws randomness only from the global torch generator
    *inside* :meth:`loss` (the loop swaps in the tenant's own generator there) or from the ``noise`` given to
    :meth:`act`.

    Shapes: B samples, S = ``schema.state_dim``, T = ``schema.chunk``, A = ``schema.action_dim``.

    Required: ``loss`` and ``act``. For RL (PPO ...): set ``supports_rl = True`` and override ``get_dist`` and ``value``
    as a pair; parameters of the critic live under ``self.value_head`` (they get ``value_lr``).

    Called by: ``loss`` by the loop (training mode, gradients on); ``act`` by the inference server (eval mode, no grad,
    on a published copy); ``get_dist`` / ``value`` by the PPO objective (gradients on) and by the server.
    """

    #: Feature kinds this head can read (see FeatureSpec.kind).
    reads: ClassVar[tuple[str, ...]] = ("tokens", "pooled")
    #: True when get_dist and value are implemented.
    supports_rl: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        if inspect.isabstract(cls) or cls.__name__.startswith("_"):
            return
        missing = [n for n in ("loss", "act") if getattr(cls, n) is getattr(ActionHead, n)]
        if missing:
            raise TypeError(f"{cls.__name__} must override {', '.join(missing)}; see nexus_lightning.head.ActionHead")
        rl = [n for n in ("get_dist", "value") if getattr(cls, n) is not getattr(ActionHead, n)]
        if len(rl) == 1:
            raise TypeError(f"{cls.__name__} overrides {rl[0]} alone; get_dist and value come as a pair")
        if cls.supports_rl != bool(rl):
            raise TypeError(f"{cls.__name__}: set supports_rl = {bool(rl)} to match the methods it overrides")

    def __init__(self, feature_spec: FeatureSpec, schema: TenantSchema) -> None:
        super().__init__()
        if feature_spec.kind not in self.reads:
            raise ValueError(
                f"{type(self).__name__} reads {', '.join(self.reads)}; the backbone gives {feature_spec.kind!r}"
            )
        self.feature_spec = feature_spec
        self.schema = schema

    def loss(self, features: VLAFeature, state: Tensor, actions: Tensor, is_pad: Tensor) -> dict[str, Tensor]:
        """Supervised loss on a minibatch.

        Args:
            features: ``[B]``.
            state: ``[B, S]`` float32, normalised.
            actions: ``[B, T, A]`` float32, normalised targets.
            is_pad: ``[B, T]`` bool, True for steps after the episode's end: they carry no loss and no gradient.

        Returns:
            ``{"loss": scalar mean over valid elements, <metric>: scalar ...}``.
        """
        raise NotImplementedError

    def act(self, features: VLAFeature, state: Tensor, noise: Tensor | None = None) -> TensorDict:
        """One chunk per sample.

        Args:
            features: ``[B]``.
            state: ``[B, S]`` normalised.
            noise: ``[B, T, A]`` standard normal for sampling, or None for the deterministic action.

        Returns:
            TensorDict ``[B]``: ``chunk`` ``[B, T, A]``; RL heads add ``log_probs`` ``[B, T, A]`` (per element) and
            ``state_value`` ``[B, 1]``.
        """
        raise NotImplementedError

    def get_dist(self, features: VLAFeature, state: Tensor) -> Normal:
        """Diagonal Gaussian over the chunk with ``loc`` and ``scale`` ``[B, T, A]``."""
        raise NotImplementedError

    def value(self, features: VLAFeature, state: Tensor) -> Tensor:
        """Critic estimate ``[B, 1]``."""
        raise NotImplementedError
