"""Private low-rank adapters on the last layers of the shared language model, in front of any other head.

Shape suffixes: B samples, L tokens, D width.

::

    shared, frozen, once for all tenants          private to this tenant
    layers 0 .. n-k-1 --hidden state [B,L,D]--> layers n-k .. n-1 (frozen W) + final norm --> inner head --> chunk
                                                + (alpha / rank) up(down(x)) beside every linear layer

Source: LoRA (Hu et al. 2021, arXiv 2106.09685): ``up`` starts at zero, so the start equals the frozen model.

The package ``peft`` is not used: it injects its layers into the model in place, and this model is shared. Other tenants
and other threads run the same layers at the same moment, without these adapters. ``torch.func.functional_call`` is no
way out either: it swaps the parameters inside the shared modules for the time of the call.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from hydra.utils import get_class
from tensordict import TensorDict
from torch import Tensor, nn

from nexus_lightning.backbone import FeatureSegment, FeatureSpec, SharedBackbone, VLAFeature
from nexus_lightning.head import ActionHead
from nexus_lightning.schema import TenantSchema

#: Segments of the kind ``layer_states`` that are read, and the segment that the inner head gets.
LAYERS, POSITIONS, SEQUENCE = "layers", "positions", "sequence"


class AdapterHead(ActionHead):
    """LoRA on the last ``num_layers`` decoder layers, then an inner head on the adapted last hidden states.

    The shared feature is the hidden state that enters layer ``n - num_layers``. This head runs the frozen layers from
    there on: gradients pass through their weights and reach only the adapters and the inner head. RL, noise and trace
    are the inner head's; its critic sees the adapted states without giving them gradients.

    Args:
        feature_spec: of the backbone, kind ``layer_states``.
        schema: of the tenant.
        backbone: the shared backbone, one that can be continued: :class:`models.backbones.vlm.VLMBackbone`. Its option
            ``layers`` must name layer ``n - k``; ``layers: [n - k]`` alone keeps the feature small.
        inner: ``_target_`` and options of the head behind the adapters, one that reads ``tokens`` or ``pooled``.
        num_layers: k, how many of the last layers are adapted and run privately.
        rank: of the adapters.
        alpha: their output is scaled by ``alpha / rank``.

    Raises:
        ValueError: the backbone has no such layers, ``inner`` is no usable head, or a number is out of range.
    """

    reads = ("layer_states",)
    supports_rl = True
    continues_backbone = True

    def __init__(
        self,
        feature_spec: FeatureSpec,
        schema: TenantSchema,
        backbone: SharedBackbone,
        inner: Mapping[str, Any],
        num_layers: int = 2,
        rank: int = 8,
        alpha: float = 16.0,
    ) -> None:
        super().__init__(feature_spec, schema)
        shared = backbone.backbone
        if missing := [name for name in ("decoder_layers", "run_layers", "state_layers") if not hasattr(shared, name)]:
            raise ValueError(
                f"{type(shared).__name__} has no {', '.join(missing)}: adapters need a backbone of models.backbones.vlm"
            )
        total = len(shared.decoder_layers())
        if not 1 <= num_layers <= total - shared.first_plain_layer:
            raise ValueError(
                f"num_layers={num_layers}: {type(shared).__name__} has {total} decoder layers and can be continued "
                f"from layer {shared.first_plain_layer} on; choose 1 to {total - shared.first_plain_layer}"
            )
        for key, value in (("rank", rank), ("alpha", alpha)):
            if value <= 0:
                raise ValueError(f"{key}={value}: must be positive")
        self.start = total - num_layers
        if self.start not in shared.state_layers:
            raise ValueError(
                f"num_layers={num_layers}: reads the states entering layer {self.start}, the backbone gives those of "
                f"{list(shared.state_layers)}; set backbone.layers=[{self.start}]"
            )
        self.layer_index = shared.state_layers.index(self.start)
        self.segment = next(segment for segment in feature_spec.segments if segment.name == LAYERS)
        self.adapters = nn.ModuleDict(
            {
                key: _LowRank(linear, rank, alpha / rank)
                for key, linear in _linears(shared.decoder_layers()[self.start :]).items()
            }
        )
        self.continuation = _Continuation(backbone, self.start, self.adapters)

        width = self.segment.layout[1]
        head = _build_inner(inner, width, schema)
        #: Of this instance: the class can when its inner head can.
        self.supports_rl = head.supports_rl
        if self.supports_rl:
            # The contract wants the critic under ``value_head``. The inner head keeps a plain reference, so that its
            # parameters have one name only, in the optimizer and in the payload; copies keep the two together.
            self.value_head = head._modules.pop("value_head")
            object.__setattr__(head, "value_head", self.value_head)
        self.inner = head

    @classmethod
    def rl_problem(cls, arguments: dict[str, Any]) -> str | None:
        """See :meth:`ActionHead.rl_problem`: what the inner head says."""
        try:
            target, options = _split(arguments.get("inner"))
        except (ImportError, ValueError) as error:
            return str(error)
        if not target.supports_rl:
            return f"its inner head {target.__name__} has no log-probabilities; use models.heads.mlp.ChunkMLPHead"
        return target.rl_problem(options)

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return self.inner.noise_shape

    @property
    def trace_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.inner.trace_shapes

    def loss(self, features: VLAFeature, state: Tensor, actions: Tensor, is_pad: Tensor) -> dict[str, Tensor]:
        """The inner head's loss on the adapted states; see :meth:`ActionHead.loss`."""
        return self.inner.loss(self.adapted(features), state, actions, is_pad)

    def act(self, features: VLAFeature, state: Tensor, noise: Tensor | None = None) -> TensorDict:
        """See :meth:`ActionHead.act`."""
        return self.inner.act(self.adapted(features), state, noise)

    def evaluate(self, features: VLAFeature, state: Tensor, sample: TensorDict) -> tuple[Tensor, Tensor]:
        """See :meth:`ActionHead.evaluate`."""
        return self.inner.evaluate(self.adapted(features), state, sample)

    def value(self, features: VLAFeature, state: Tensor) -> Tensor:
        """See :meth:`ActionHead.value`; no gradient reaches the adapters, which belong to the actor."""
        with torch.no_grad():
            adapted = self.adapted(features)
        return self.inner.value(adapted, state)

    def adapted(self, features: VLAFeature) -> VLAFeature:
        """Layer states -> kind ``tokens``: adapted last hidden states as ``sequence``, ``pooled`` their masked mean."""
        mask_BL = features.mask[LAYERS]
        entering_BLD = self.segment.unflatten(features.tokens[LAYERS])[:, :, self.layer_index]
        # Padding may hold anything, and attention weights of exactly zero do not stop NaN.
        entering_BLD = torch.where(mask_BL.unsqueeze(-1), entering_BLD, torch.zeros_like(entering_BLD))
        weight_BL1 = mask_BL.unsqueeze(-1).to(entering_BLD.dtype)
        hidden_BLD = self.continuation.run(entering_BLD, mask_BL, features.tokens[POSITIONS]) * weight_BL1
        return VLAFeature(
            tokens=TensorDict({SEQUENCE: hidden_BLD}, features.batch_size),
            mask=TensorDict({SEQUENCE: mask_BL}, features.batch_size),
            pooled=hidden_BLD.sum(1) / weight_BL1.sum(1).clamp(min=1),
            batch_size=features.batch_size,
        )


class _LowRank(nn.Module):
    """``scale * up(down(x))`` beside one frozen linear layer; zero at the start."""

    def __init__(self, frozen: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.down = nn.Parameter(torch.empty(rank, frozen.in_features))
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(F.linear(x.to(self.down.dtype), self.down), self.up)


class _Adapted(nn.Module):
    """A frozen linear layer and its adapter, in the place of the linear layer."""

    def __init__(self, frozen: nn.Linear, adapter: _LowRank) -> None:
        super().__init__()
        self.frozen, self.adapter = frozen, adapter

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.adapter(x).to(x.dtype)


class _Continuation:
    """The shared backbone's last layers seen with adapters: in their place stand views whose linear layers are adapted.

    Not a module: the backbone's weights stay out of the head's parameters, payload and copies. A copy of the head gets
    views of its own on the same weights, with the copied adapters. A call changes nothing here or in the backbone, so
    threads may call at once.
    """

    def __init__(self, shared: SharedBackbone, start: int, adapters: nn.ModuleDict) -> None:
        self.shared, self.start, self.adapters = shared, start, adapters
        layers = shared.backbone.decoder_layers()[start:]
        adapted = {id(linear): _Adapted(linear, adapters[key]) for key, linear in _linears(layers).items()}
        self.layers = [_view(layer, adapted) for layer in layers]

    def __deepcopy__(self, memo: dict) -> _Continuation:
        return _Continuation(self.shared, self.start, copy.deepcopy(self.adapters, memo))

    def run(self, hidden_BLD: Tensor, mask_BL: Tensor, positions_BLP: Tensor) -> Tensor:
        """Hidden states entering layer ``start`` -> last hidden states after the final norm, dtype of the input."""
        return self.shared.backbone.run_layers(self.start, hidden_BLD, mask_BL, positions_BLP, self.layers)


def _view(module: nn.Module, replaced: dict[int, nn.Module]) -> nn.Module:
    """``module`` with some submodules replaced: new module objects on the way to them, everything else shared.

    A new object has the original's own dictionaries of parameters and buffers: it sees when the backbone is moved to
    another device or dtype.
    """
    if id(module) in replaced:
        return replaced[id(module)]
    children = {name: _view(child, replaced) for name, child in module.named_children()}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    view = copy.copy(module)
    view.__dict__["_modules"] = {**module._modules, **children}
    return view


def _linears(layers: nn.ModuleList) -> dict[str, nn.Linear]:
    """Query, key, value, output and MLP projections of these decoder layers, by a name that a ModuleDict takes."""
    return {
        f"{index}_{name.replace('.', '_')}": module
        for index, layer in enumerate(layers)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }


def _split(inner: Any) -> tuple[type[ActionHead], dict[str, Any]]:
    if not isinstance(inner, Mapping) or "_target_" not in inner:
        raise ValueError(f"inner={inner!r}: must be a mapping with `_target_`, e.g. models.heads.mlp.ChunkMLPHead")
    target = get_class(inner["_target_"])
    if not issubclass(target, ActionHead) or target.continues_backbone:
        raise ValueError(
            f"inner._target_={inner['_target_']}: must be an ActionHead that does not continue the backbone"
        )
    return target, {str(key): value for key, value in inner.items() if key != "_target_"}


def _build_inner(inner: Mapping[str, Any], width: int, schema: TenantSchema) -> ActionHead:
    target, options = _split(inner)
    if "tokens" in target.reads:
        spec = FeatureSpec("tokens", (FeatureSegment(SEQUENCE, width),), width)
    elif "pooled" in target.reads:
        spec = FeatureSpec("pooled", (), width)
    else:
        raise ValueError(f"inner._target_={inner['_target_']}: reads {', '.join(target.reads)}; needs tokens or pooled")
    return target(feature_spec=spec, schema=schema, **options)
