"""The two contracts as checkers: run them on your own backbone or head before you train with it.

Example:
    >>> from nexus_lightning.checks import check_head, example_spec  # doctest: +SKIP
    >>> check_head(MyHead, example_spec(schema), schema)  # doctest: +SKIP
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from nexus_lightning.backbone import Backbone, FeatureSegment, FeatureSpec, VLAFeature
from nexus_lightning.head import ActionHead
from nexus_lightning.schema import TenantSchema

HeadFactory = Callable[[FeatureSpec, TenantSchema], ActionHead]
#: Instructions of very different lengths.
INSTRUCTIONS = (
    "go",
    "push the red cube to the goal",
    "pick up the alphabet soup and then place it in the basket, slowly",
)
#: Decisions drawn to check a likelihood.
LIKELIHOOD_SAMPLES = 512
#: Tokens of a random non-spatial segment.
TEXT_TOKENS = 7


def example_spec(schema: TenantSchema, dim: int = 8) -> FeatureSpec:
    """A small ``tokens`` spec: a 4 x 4 grid per camera of the schema, then text."""
    images = [FeatureSegment(f"image_{camera}", dim, (4, 4)) for camera in schema.cameras]
    return FeatureSpec("tokens", (*images, FeatureSegment("text", dim)), dim * (len(images) + 1))


def random_features(spec: FeatureSpec, batch: int, seed: int = 0) -> VLAFeature:
    """Random features ``[batch]`` that follow ``spec``; non-spatial segments have a different length in every row."""
    generator = torch.Generator().manual_seed(seed)
    tokens, mask = {}, {}
    for segment in spec.segments:
        fixed = _fixed_length(segment)
        length = TEXT_TOKENS if fixed is None else fixed
        tokens[segment.name] = torch.randn(batch, length, segment.dim, generator=generator)
        real = length - torch.arange(batch) % (length - 1) if fixed is None else torch.full((batch,), length)
        mask[segment.name] = torch.arange(length) < real[:, None]
    return VLAFeature(
        tokens=TensorDict(tokens, batch_size=[batch]),
        mask=TensorDict(mask, batch_size=[batch]),
        pooled=torch.randn(batch, spec.pooled_dim, generator=generator),
        batch_size=[batch],
    )


def _fixed_length(segment: FeatureSegment) -> int | None:
    return segment.grid[0] * segment.grid[1] if segment.grid else segment.length


def random_observation(schema: TenantSchema, batch: int, seed: int = 0) -> TensorDict:
    """A random observation ``[batch]`` with the schema's cameras and state."""
    generator = torch.Generator().manual_seed(seed)
    observation = TensorDict({"state": torch.randn(batch, schema.state_dim, generator=generator)}, batch_size=[batch])
    shape = (batch, 3, schema.image_size, schema.image_size)
    for camera in schema.cameras:
        observation["image", camera] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return observation


def check_head(
    head: ActionHead | HeadFactory,
    feature_spec: FeatureSpec | None = None,
    schema: TenantSchema | None = None,
    *,
    features: VLAFeature | None = None,
    tolerance: float = 1e-4,
) -> None:
    """Hold an action head to the contract of :class:`~nexus_lightning.head.ActionHead`.

    Checks shapes, finiteness, determinism, that the global random generators stay untouched in ``act``, that neither
    padding tokens nor batch mates change a sample's action, that padded steps carry no loss and no gradient, that
    inputs are left as they were, that a payload restores the head, and for RL heads that log-probabilities (also
    against a Monte-Carlo estimate), values and the separation of actor and critic are consistent.

    Args:
        head: an instance, or (better: the payload check is then sharper) a class or factory ``(spec, schema) -> head``.
        feature_spec: for a factory; an instance knows its own.
        schema: likewise.
        features: real features ``[B]``, B at least 2; random ones when None.
        tolerance: largest accepted difference where equality is asked.

    Raises:
        ValueError: one line per broken rule.
    """
    twin = None
    if not isinstance(head, ActionHead):
        if feature_spec is None or schema is None:
            raise ValueError("check_head: give feature_spec and schema together with a class or factory")
        factory = head
        with _seeded(0):
            head = factory(feature_spec, schema)
        with _seeded(1):
            twin = factory(feature_spec, schema)
        if not isinstance(head, ActionHead):
            raise ValueError(f"check_head: {factory} built a {type(head).__name__}, not an ActionHead")
    elif feature_spec is not None and feature_spec != head.feature_spec:
        raise ValueError("check_head: feature_spec differs from the head's own")
    head = copy.deepcopy(head)
    if features is None:
        features = random_features(head.feature_spec, batch=4)
    problems = _Problems(f"{type(head).__name__} breaks the ActionHead contract")
    batch = _HeadBatch.random(features.select(head.feature_spec).for_head(), head)
    with _seeded(2):
        # Zero-initialised output layers would make every comparison below trivially true.
        for parameter in head.parameters():
            parameter.data.add_(0.02 * torch.randn_like(parameter))
    if not any(p.requires_grad for p in head.parameters()):
        problems.add("it has no trainable parameters")
    _check_act(head, batch, problems, tolerance)
    problems.stop()
    _check_loss(head, batch, problems, tolerance)
    if head.supports_rl:
        _check_rl(head, batch, problems, tolerance)
        problems.stop()
        _check_likelihood(head, batch, problems)
    _check_payload(head, twin, batch, problems)
    problems.stop()


def _units_run(backbone: Backbone, action: Callable[[], object]) -> list[int]:
    """Places of the shardable units that ``action`` called, in order."""
    called: list[int] = []
    handles = [
        unit.register_forward_pre_hook(lambda *_, place=place: called.append(place))
        for place, unit in enumerate(backbone.shardable_units())
    ]
    try:
        action()
    finally:
        for handle in handles:
            handle.remove()
    return called


def check_backbone(backbone: Backbone, schema: TenantSchema, *, tolerance: float = 1e-4) -> None:
    """Hold a backbone to the contract of :class:`~nexus_lightning.backbone.Backbone` for one schema.

    Checks eval mode and frozen weights, the fingerprint, that features follow ``feature_spec``, determinism, that the
    global random generators stay untouched, that batch mates do not change a sample's feature, and that wrong
    cameras are refused.

    Args:
        backbone: the backbone.
        schema: a tenant's schema.
        tolerance: largest accepted difference between a sample alone and in a batch.

    Raises:
        ValueError: one line per broken rule.
    """
    problems = _Problems(f"{type(backbone).__name__} breaks the Backbone contract")
    if not isinstance(backbone, Backbone):
        raise ValueError(f"check_backbone: got a {type(backbone).__name__}, not a Backbone")
    try:
        json.dumps(backbone.config)
    except (AttributeError, TypeError) as error:
        problems.add(f"config must be a JSON-able dict set in __init__ ({error})")
        problems.stop()
    backbone.train(True)
    if any(module.training for module in backbone.modules()):
        problems.add("it is not in eval mode: call freeze() last in __init__")
    if any(p.requires_grad for p in backbone.parameters()):
        problems.add("it has parameters that require gradients: call freeze() last in __init__")

    modules, units = list(backbone.modules()), backbone.shardable_units()
    inside = [inner for unit in units for inner in unit.modules()]
    if len(set(inside)) != len(inside) or not set(inside) <= set(modules):
        problems.add("shardable_units: must be different parts of it, none inside another")
    before = backbone.fingerprint
    size = len(INSTRUCTIONS)
    observation = random_observation(schema, size)
    together = backbone(observation, INSTRUCTIONS, schema, _compatible(backbone.kinds))
    for kind in backbone.kinds:
        problems.title = f"{type(backbone).__name__} breaks the Backbone contract for kind {kind!r}"
        spec = backbone.feature_spec(schema, kind)

        def encode(rows: slice, spec: FeatureSpec = spec) -> VLAFeature:
            return backbone(observation[rows], INSTRUCTIONS[rows], schema, (spec.kind,)).select(spec)

        with _untouched_generators(problems, "forward"):
            feature = encode(slice(None))
        _check_feature(feature, spec, size, problems)
        problems.stop()
        if not _same_features(feature, encode(slice(None)), 0.0):
            problems.add("two calls with the same input differ")
        whole, one = (_units_run(backbone, lambda r=rows: encode(r)) for rows in (slice(None), slice(0, 1)))
        if whole != one:
            problems.add("shardable_units: passes of different rows do not run the same units in the same order")
        for row in range(size):
            alone = encode(slice(row, row + 1))
            if not _same_features(cast(VLAFeature, feature[row : row + 1]), alone, tolerance):
                problems.add(f"row {row} alone differs from row {row} in a batch by more than {tolerance}")
        if kind != "action_tokens" and not _same_features(feature, together.select(spec), tolerance):
            problems.add("asking for other kinds in the same pass changes it")
    if backbone.compute_fingerprint() != before:
        problems.add("a forward pass changed the fingerprint: the weights must not change")
    wrong = observation.clone()
    wrong["image", "not_in_schema"] = torch.zeros(size, 3, 16, 16, dtype=torch.uint8)
    try:
        backbone(wrong, INSTRUCTIONS, schema)
        problems.add("a camera outside the schema was accepted: call check_observation in preprocess")
    except ValueError:
        pass
    problems.stop()


def _compatible(kinds: Sequence[str]) -> tuple[str, ...]:
    """The kinds that may share one pass: action tokens make a prompt of their own."""
    return tuple(kind for kind in kinds if kind != "action_tokens") or tuple(kinds)


class _Problems:
    def __init__(self, title: str) -> None:
        self.title = title
        self.found: list[str] = []

    def add(self, problem: str) -> None:
        self.found.append(problem)

    def stop(self) -> None:
        if self.found:
            raise ValueError("\n- ".join([f"{self.title}:", *self.found]))


class _HeadBatch:
    """Inputs of a head's methods; the last two steps of row 0 are padded."""

    def __init__(self, features: VLAFeature, state: Tensor, actions: Tensor, is_pad: Tensor, noise: Tensor) -> None:
        self.features, self.state, self.actions, self.is_pad, self.noise = features, state, actions, is_pad, noise

    @classmethod
    def random(cls, features: VLAFeature, head: ActionHead) -> _HeadBatch:
        schema = head.schema
        generator = torch.Generator().manual_seed(0)
        batch, chunk = len(features.pooled), schema.chunk
        shape = (batch, chunk, schema.action_dim)
        is_pad = torch.zeros(batch, chunk, dtype=torch.bool)
        is_pad[0, max(chunk - 2, 0) :] = True
        return cls(
            features,
            torch.randn(batch, schema.state_dim, generator=generator),
            torch.randn(*shape, generator=generator).clamp(-1, 1),
            is_pad,
            torch.randn(batch, *head.noise_shape, generator=generator),
        )

    def tensors(self) -> list[Tensor]:
        values = [self.state, self.actions, self.is_pad, self.noise, self.features.pooled]
        return values + list(self.features.tokens.values()) + list(self.features.mask.values())


def _check_act(head: ActionHead, batch: _HeadBatch, problems: _Problems, tolerance: float) -> None:
    head.eval()
    size = len(batch.state)
    shape = (size, head.schema.chunk, head.schema.action_dim)
    before = [value.clone() for value in batch.tensors()]
    deterministic: dict[Any, tuple[int, ...]] = {"chunk": shape}
    if head.supports_rl:
        deterministic |= {"state_value": (size, 1)}
    sampled = dict(deterministic)
    if head.supports_rl:
        sampled |= {"log_probs": shape}
        sampled |= {("trace", key): (size, *part) for key, part in head.trace_shapes.items()}
    for noise, name, keys in ((None, "noise=None", deterministic), (batch.noise, "given noise", sampled)):
        with torch.no_grad(), _untouched_generators(problems, f"act with {name}"):
            out = head.act(batch.features, batch.state, noise)
            again = head.act(batch.features, batch.state, noise)
        if tuple(out.batch_size) != (size,):
            problems.add(f"act: batch_size {list(out.batch_size)}, expected [{size}]")
        for key, expected in keys.items():
            value = out.get(key, None)
            if value is None or tuple(value.shape) != expected:
                got = "nothing" if value is None else list(value.shape)
                problems.add(f"act: {key} must be {list(expected)}, got {got}")
            elif not value.isfinite().all():
                problems.add(f"act: {key} is not finite ({name})")
            elif not torch.equal(value, again[key]):
                problems.add(f"act: {key} differs between two calls with {name}")
    problems.stop()

    with torch.no_grad():
        out = head.act(batch.features, batch.state, batch.noise)
        changed = head.act(_with_other_padding(batch.features), batch.state, batch.noise)
        longer = head.act(_with_more_padding(batch.features), batch.state, batch.noise)
        for row in range(size):
            part = slice(row, row + 1)
            features = cast(VLAFeature, batch.features[part])
            alone = head.act(_without_padding(features), batch.state[part], batch.noise[part])
            for key in sampled:
                if not _close(out[key][part], alone[key], tolerance):
                    problems.add(
                        f"act: {key} of row {row} alone differs from the batch: it depends on batch mates or padding"
                    )
    for key in sampled:
        if not _close(out[key], changed[key], tolerance):
            problems.add(f"act: the values of padding tokens change {key}: apply features.mask")
        if not _close(out[key], longer[key], tolerance):
            problems.add(f"act: more padding tokens change {key}: apply features.mask")
    if not all(torch.equal(a, b) for a, b in zip(before, batch.tensors(), strict=True)):
        problems.add("act changed its inputs in place")


def _check_loss(head: ActionHead, batch: _HeadBatch, problems: _Problems, tolerance: float) -> None:
    head.train()
    before = [value.clone() for value in batch.tensors()]
    actions = batch.actions.clone().requires_grad_()
    losses, gradients = _loss_and_gradients(head, batch, batch.features, actions, batch.is_pad)
    if set(map(type, losses.values())) != {torch.Tensor} or any(value.ndim for value in losses.values()):
        problems.add("loss: every entry of the returned dict must be a scalar tensor")
        problems.stop()
    loss = losses["loss"]
    if not loss.isfinite():
        problems.add("loss is not finite")
    if not any(g is not None and g.abs().sum() > 0 for g in gradients.values()):
        problems.add("loss gives no gradient to any parameter")
    if any(g is not None and not g.isfinite().all() for g in gradients.values()):
        problems.add("loss gives a gradient that is not finite")
    if actions.grad is not None and actions.grad[batch.is_pad].abs().sum() > 0:
        problems.add("loss depends on the actions of padded steps: mask with is_pad")
    if not all(torch.equal(a, b) for a, b in zip(before, batch.tensors(), strict=True)):
        problems.add("loss changed its inputs in place")

    other = torch.where(batch.is_pad.unsqueeze(-1), 100.0, batch.actions)
    for features, targets, problem in (
        (batch.features, other, "the actions of padded steps change loss or gradients: mask with is_pad"),
        (
            _with_other_padding(batch.features),
            batch.actions,
            "padding tokens change loss or gradients: apply features.mask",
        ),
    ):
        same, same_gradients = _loss_and_gradients(head, batch, features, targets, batch.is_pad)
        if not _close(loss, same["loss"], tolerance) or any(
            not _close(_zero(gradients[n]), _zero(same_gradients[n]), tolerance) for n in gradients
        ):
            problems.add(problem)

    padded = torch.ones_like(batch.is_pad)
    losses, gradients = _loss_and_gradients(head, batch, batch.features, batch.actions, padded)
    if losses["loss"].item() != 0 or any(bool((_zero(g) != 0).any()) for g in gradients.values()):
        problems.add("a minibatch of padded steps only must give loss 0 and zero gradients")


def _check_rl(head: ActionHead, batch: _HeadBatch, problems: _Problems, tolerance: float) -> None:
    head.eval()
    critic = {name for name, _ in head.named_parameters() if name.startswith("value_head.")}
    if not critic:
        problems.add("an RL head keeps its critic's parameters under self.value_head")
    value = head.value(batch.features, batch.state)
    shape = batch.actions.shape
    with torch.no_grad():
        sample = head.act(batch.features, batch.state, batch.noise)
    log_probs, entropy = head.evaluate(batch.features, batch.state, sample)
    if log_probs.shape != shape or entropy.shape != shape:
        problems.add(
            f"evaluate: log_probs and entropy must be {list(shape)}, got {list(log_probs.shape)}, {list(entropy.shape)}"
        )
        problems.stop()
    if not _close(sample["log_probs"], log_probs.detach(), tolerance):
        problems.add("act with given noise: log_probs differ from evaluate(...) of the same sample")
    if not _close(sample["state_value"], value.detach(), tolerance):
        problems.add("act with given noise: state_value differs from value(...)")
    if type(head).get_dist is not ActionHead.get_dist:
        dist = head.get_dist(batch.features, batch.state)
        with torch.no_grad():
            for noise, name in ((None, "noise=None"), (batch.noise, "given noise")):
                expected = dist.loc if noise is None else dist.loc + dist.scale * noise
                if not _close(head.act(batch.features, batch.state, noise)["chunk"], expected, tolerance):
                    problems.add(f"act with {name}: chunk is not the mean (+ scale * noise) of get_dist")
    for name, scalar, wanted in (
        ("evaluate", log_probs.sum(), lambda n: n not in critic),
        ("value", value.sum(), lambda n: n in critic),
    ):
        reached = _reached(head, scalar)
        if not reached:
            problems.add(f"{name} gives no gradient")
        if wrong := [n for n in reached if not wanted(n)]:
            problems.add(f"{name} gives gradients to {', '.join(wrong[:3])}: keep actor and critic (value_head) apart")


def _check_likelihood(head: ActionHead, batch: _HeadBatch, problems: _Problems) -> None:
    """Monte Carlo: the mean of p_new(decision) / p_old(decision) over decisions of the old policy is 1.

    It holds for true log-densities and for little else: a forgotten normaliser, step or dim breaks it.
    """
    head.eval()
    other, generator = copy.deepcopy(head), torch.Generator().manual_seed(1)
    # A large head pays for every sample; an error shows in fewer, only less surely.
    count = LIKELIHOOD_SAMPLES if sum(p.numel() for p in head.parameters()) < 10**6 else LIKELIHOOD_SAMPLES // 4
    row = torch.zeros(count, dtype=torch.long)
    features, state = cast(VLAFeature, batch.features[row]), batch.state[row]
    noise = torch.randn(count, *head.noise_shape, generator=generator)
    directions = [torch.randn(p.shape, generator=generator) * (p.abs().mean() + 1e-3) for p in head.parameters()]
    few = slice(0, count // 4)
    with torch.no_grad():
        sample = head.act(features, state, noise)
        old = head.evaluate(features, state, sample)[0].double().sum((1, 2))
        scale = 1e-3
        for _ in range(20):  # as far away as the mean can still be estimated; a few samples tell how far
            for p, q, direction in zip(other.parameters(), head.parameters(), directions, strict=True):
                p.copy_(q + scale * direction)
            part = other.evaluate(cast(VLAFeature, features[few]), state[few], sample[few])[0].double().sum((1, 2))
            spread = float((part - old[few]).std())
            if 0.6 < spread < 0.8:
                break
            scale *= min(3.0, max(0.3, 0.7 / max(spread, 1e-6)))
        difference = other.evaluate(features, state, sample)[0].double().sum((1, 2)) - old
        ratio = difference.exp()
        error = float(ratio.std()) / count**0.5
    if not ratio.isfinite().all() or abs(float(ratio.mean()) - 1) > 4 * error + 1e-3:
        problems.add(
            f"evaluate: over its own samples the mean of p_new / p_old is {float(ratio.mean()):.3f} +- {error:.3f} for "
            "a slightly changed copy and must be 1: the log_probs are not those of what act draws"
        )


def _check_payload(head: ActionHead, twin: ActionHead | None, batch: _HeadBatch, problems: _Problems) -> None:
    state = {name: value.detach().clone() for name, value in head.state_dict().items()}
    if twin is None:
        twin = copy.deepcopy(head)
        for value in twin.state_dict().values():
            value.zero_()
    twin.load_state_dict(state, strict=True)
    with torch.no_grad():
        expected = head.eval().act(batch.features, batch.state, batch.noise)
        restored = twin.eval().act(batch.features, batch.state, batch.noise)
    if not torch.equal(expected["chunk"], restored["chunk"]):
        problems.add(
            "state_dict does not restore the head: something outside parameters and buffers decides its action"
        )


def _check_feature(feature: VLAFeature, spec: FeatureSpec, size: int, problems: _Problems) -> None:
    names = {segment.name for segment in spec.segments}
    for key, given in (("tokens", feature.tokens), ("mask", feature.mask)):
        if set(given.keys()) != names:
            problems.add(f"{key} has {sorted(given.keys())}, feature_spec says {sorted(names)}")
    problems.stop()
    if tuple(feature.pooled.shape) != (size, spec.pooled_dim):
        problems.add(f"pooled is {list(feature.pooled.shape)}, feature_spec says {[size, spec.pooled_dim]}")
    values = {"pooled": feature.pooled}
    for segment in spec.segments:
        tokens, mask = feature.tokens[segment.name], feature.mask[segment.name]
        values[segment.name] = tokens
        length = _fixed_length(segment) or tokens.shape[1]
        if segment.layout is not None and math.prod(segment.layout) != segment.dim:
            problems.add(f"{segment.name}: layout {list(segment.layout)} does not multiply to dim {segment.dim}")
        if tuple(tokens.shape) != (size, length, segment.dim):
            problems.add(f"{segment.name}: tokens {list(tokens.shape)}, expected {[size, length, segment.dim]}")
        if mask.dtype != torch.bool or mask.shape != tokens.shape[:2]:
            problems.add(
                f"{segment.name}: mask must be bool {list(tokens.shape[:2])}, got {mask.dtype} {list(mask.shape)}"
            )
        elif not mask.any(1).all():
            problems.add(f"{segment.name}: a row has no valid token")
    for name, value in values.items():
        if not value.isfinite().all():
            problems.add(f"{name}: not finite")
        if value.requires_grad:
            problems.add(f"{name}: requires gradients")


def _same_features(a: VLAFeature, b: VLAFeature, tolerance: float) -> bool:
    """Equal pooled values, and equal valid tokens row by row (padding may be on either side and of any length)."""
    if not _close(a.pooled, b.pooled, tolerance):
        return False
    for name in a.tokens.keys():
        for row in range(len(a.pooled)):
            valid_a = a.tokens[name][row][a.mask[name][row]]
            valid_b = b.tokens[name][row][b.mask[name][row]]
            if valid_a.shape != valid_b.shape or not _close(valid_a, valid_b, tolerance):
                return False
    return True


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def _zero(gradient: Tensor | None) -> Tensor:
    return torch.zeros(()) if gradient is None else gradient


def _loss_and_gradients(
    head: ActionHead, batch: _HeadBatch, features: VLAFeature, actions: Tensor, is_pad: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """The loss under a fixed seed, and the gradient of every parameter (None where there is none)."""
    head.zero_grad(set_to_none=True)
    with _seeded(3):
        losses = head.loss(features, batch.state, actions, is_pad)
    if not isinstance(losses, dict) or "loss" not in losses:
        raise ValueError(f"{type(head).__name__}.loss must return a dict with the key 'loss'")
    losses["loss"].backward()
    return losses, {name: p.grad for name, p in head.named_parameters() if p.requires_grad}


def _reached(head: ActionHead, scalar: Tensor) -> list[str]:
    head.zero_grad(set_to_none=True)
    scalar.backward()
    return [name for name, p in head.named_parameters() if p.grad is not None and bool((p.grad != 0).any())]


def _with_other_padding(features: VLAFeature) -> VLAFeature:
    features = features.clone()
    for name in features.tokens.keys():
        features.tokens[name][~features.mask[name]] = 50.0
    return features


def _with_more_padding(features: VLAFeature, extra: int = 3) -> VLAFeature:
    """Segments that have padding get ``extra`` more masked tokens (one without may be a grid)."""
    features = features.clone()
    for name in list(features.tokens.keys()):
        tokens, mask = features.tokens[name], features.mask[name]
        if mask.all():
            continue
        features.tokens[name] = torch.cat([tokens, tokens.new_full((len(tokens), extra, tokens.shape[2]), 9.0)], dim=1)
        features.mask[name] = torch.cat([mask, mask.new_zeros(len(mask), extra)], dim=1)
    return features


def _without_padding(features: VLAFeature) -> VLAFeature:
    """One row, its padding tokens removed."""
    features = features.clone()
    for name in list(features.tokens.keys()):
        valid = features.mask[name][0]
        features.tokens[name] = features.tokens[name][:, valid]
        features.mask[name] = features.mask[name][:, valid]
    return features


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Run with a fixed global torch seed; the generator is restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def _untouched_generators(problems: _Problems, what: str) -> Iterator[None]:
    def states() -> Sequence[bytes]:
        python, legacy = repr(random.getstate()), repr(cast(tuple, np.random.get_state(legacy=True))[1:3])
        return torch.get_rng_state().numpy().tobytes(), python.encode(), legacy.encode()

    before = states()
    yield
    for name, old, new in zip(("torch", "random", "numpy"), before, states(), strict=True):
        if old != new:
            problems.add(f"{what} draws from the global {name} generator")
