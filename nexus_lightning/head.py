"""The private part of a policy: the action head that a researcher subclasses."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from typing import Any, ClassVar

from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Normal

from nexus_lightning.backbone import KINDS, FeatureSpec, VLAFeature
from nexus_lightning.schema import TenantSchema


class ActionHead(nn.Module):
    """Base class of every action head: frozen features + normalised state -> a chunk of normalised actions.

    One instance belongs to one tenant. Everything it sees is already normalised; everything it returns is normalised.
    It never touches the backbone (see :attr:`continues_backbone` for the one exception), never calls a collective, and
    draws randomness only from the global torch generator *inside* :meth:`loss` (the loop swaps in the tenant's own
    generator there) or from the ``noise`` given to :meth:`act`.

    Shapes: B samples, S = ``schema.state_dim``, T = ``schema.chunk``, A = ``schema.action_dim``.

    Required: ``loss`` and ``act``. For RL set ``supports_rl = True`` and override ``value`` together with either
    ``get_dist`` (the chunk is Gaussian given the observation) or ``evaluate`` (any other policy: its likelihood is that
    of the denoising chain or of the tokens which ``act`` drew and returned as ``trace``). Parameters of the critic live
    under ``self.value_head`` (they get ``value_lr``).

    Called by: ``loss`` by the loop (training mode, gradients on); ``act`` by the inference server (eval mode, no grad,
    on a published copy); ``evaluate`` / ``value`` by the RL objectives (gradients on); ``value`` by the server too.
    """

    #: Feature kinds this head can read, the preferred first (:data:`nexus_lightning.backbone.KINDS`).
    reads: ClassVar[tuple[str, ...]] = ("tokens", "pooled")
    #: Names of the backbone classes whose features it understands (heads taken out of a published policy); empty: any
    #: that gives a kind it reads.
    backbones: ClassVar[tuple[str, ...]] = ()
    #: True when value and get_dist (or evaluate) are implemented.
    supports_rl: ClassVar[bool] = False
    #: True: the constructor takes ``backbone``, a :class:`~nexus_lightning.backbone.SharedBackbone`, and the head runs
    #: some of its frozen layers privately (with gradients through them, never into them).
    continues_backbone: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        if inspect.isabstract(cls) or cls.__name__.startswith("_"):
            return
        missing = [n for n in ("loss", "act") if not _overrides(cls, n)]
        if missing:
            raise TypeError(f"{cls.__name__} must override {', '.join(missing)}; see nexus_lightning.head.ActionHead")
        if not cls.reads or not set(cls.reads) <= set(KINDS):
            raise TypeError(f"{cls.__name__}.reads={cls.reads}: choose from {', '.join(KINDS)}")
        likelihood, value = _overrides(cls, "get_dist") or _overrides(cls, "evaluate"), _overrides(cls, "value")
        if likelihood != value:
            alone = "value" if value else "get_dist" if _overrides(cls, "get_dist") else "evaluate"
            raise TypeError(f"{cls.__name__} overrides {alone} alone; get_dist (or evaluate) and value come as a pair")
        if cls.supports_rl != value:
            raise TypeError(f"{cls.__name__}: set supports_rl = {value} to match the methods it overrides")

    def __init__(self, feature_spec: FeatureSpec, schema: TenantSchema) -> None:
        super().__init__()
        if feature_spec.kind not in self.reads:
            raise ValueError(
                f"{type(self).__name__} reads {', '.join(self.reads)}; the backbone gives {feature_spec.kind!r}"
            )
        self.feature_spec = feature_spec
        self.schema = schema

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """Shape per sample of the standard normal numbers that :meth:`act` needs for a sample; ``(T, A)``."""
        return (self.schema.chunk, self.schema.action_dim)

    @property
    def stack_key(self) -> Hashable | None:
        """For heads of which several tenants' can act together: everything but tensors that :meth:`act` depends on.

        The inference server calls :meth:`act` once, under ``torch.func.vmap`` on stacked tensors, for heads of one
        class whose keys (and so the shapes of their tensors) are equal. ``act`` must then not branch on values of
        tensors. None: every head acts alone.
        """
        return None

    @property
    def trace_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes per sample of what :meth:`act` returns under ``trace`` when it samples; nothing for Gaussian heads."""
        return {}

    @classmethod
    def rl_problem(cls, arguments: dict[str, Any]) -> str | None:
        """Why a head of this class, built with these constructor arguments, cannot train by rl; None when it can.

        Asked while the configuration is checked, for classes with :attr:`supports_rl`; ``arguments`` are those of the
        config, without ``feature_spec``, ``schema`` and ``backbone``, and may be wrong in other ways.
        """
        del arguments
        return None

    def loss(self, features: VLAFeature, state: Tensor, actions: Tensor, is_pad: Tensor) -> dict[str, Tensor]:
        """Supervised loss on a minibatch.

        Args:
            features: ``[B]``, float32.
            state: ``[B, S]`` float32, normalised.
            actions: ``[B, T, A]`` float32, normalised targets.
            is_pad: ``[B, T]`` bool, True for steps after the episode's end: they carry no loss and no gradient.

        Returns:
            ``{"loss": scalar mean over valid elements, <metric>: scalar ...}``.
        """
        raise NotImplementedError

    def loss_elements(self, actions: Tensor, is_pad: Tensor) -> Tensor:
        """What the mean in :meth:`loss` is taken over: how many elements of each row count, ``[B]``.

        Several ranks weigh their parts of a batch by it. The default suits a mean over the valid steps' elements;
        override it for any other mean.
        """
        del actions
        return (~is_pad).sum(-1)

    def act(self, features: VLAFeature, state: Tensor, noise: Tensor | None = None) -> TensorDict:
        """One chunk per sample.

        Args:
            features: ``[B]``, float32.
            state: ``[B, S]`` normalised.
            noise: ``[B, *noise_shape]`` standard normal for sampling, or None for the deterministic action.

        Returns:
            TensorDict ``[B]``: ``chunk`` ``[B, T, A]``; RL heads add ``state_value`` ``[B, 1]`` and, when they sample,
            ``log_probs`` ``[B, T, A]`` (per element; their sum is the log-probability of the decision) and ``trace``, a
            TensorDict of :attr:`trace_shapes` that :meth:`evaluate` needs besides the chunk.
        """
        raise NotImplementedError

    def get_dist(self, features: VLAFeature, state: Tensor) -> Normal:
        """Diagonal Gaussian over the chunk with ``loc`` and ``scale`` ``[B, T, A]``."""
        raise NotImplementedError

    def evaluate(self, features: VLAFeature, state: Tensor, sample: TensorDict) -> tuple[Tensor, Tensor]:
        """Likelihood, under the present weights, of a decision that :meth:`act` sampled.

        Args:
            features: ``[B]``, float32.
            state: ``[B, S]`` normalised.
            sample: ``[B]`` with ``chunk`` ``[B, T, A]`` and, where the head has one, ``trace``.

        Returns:
            ``log_probs`` and ``entropy``, ``[B, T, A]`` each, per element.
        """
        dist = self.get_dist(features, state)
        return dist.log_prob(sample["chunk"]), dist.entropy()

    def value(self, features: VLAFeature, state: Tensor) -> Tensor:
        """Critic estimate ``[B, 1]``."""
        raise NotImplementedError

    def q_network(self, action_size: int) -> nn.Module:
        """A fresh network like the critic's that also sees actions; offline RL by iql needs it, nothing else does.

        Args:
            action_size: how many numbers stand behind the S of the state.

        Returns:
            A module: ``(features [B], [B, S + action_size])`` -> ``[B, 1]``. It belongs to the caller, not to the head.
        """
        raise NotImplementedError


def _overrides(cls: type[ActionHead], name: str) -> bool:
    return getattr(cls, name) is not getattr(ActionHead, name)


def choose_kind(reads: tuple[str, ...], gives: tuple[str, ...], wanted: str | None = None) -> str:
    """The feature kind that a head gets: ``wanted`` (``head.kind``), or the first it reads that the backbone gives.

    Raises:
        ValueError: they have no kind in common, or not the wanted one.

    Example:
        >>> choose_kind(("action_tokens", "tokens"), ("tokens", "kv"))
        'tokens'
    """
    common = [kind for kind in reads if kind in gives]
    if wanted is not None and wanted not in common:
        raise ValueError(f"kind={wanted!r}: the head reads {', '.join(reads)}, the backbone gives {', '.join(gives)}")
    if not common:
        raise ValueError(f"the head reads {', '.join(reads)}, the backbone gives {', '.join(gives)}: nothing in common")
    return wanted or common[0]
