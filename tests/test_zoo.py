"""Every head on every small backbone that it fits: it overfits four samples; the checkers' table; the commands."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from hydra.utils import get_class, instantiate

from nexus_lightning.backbone import compact
from nexus_lightning.checks import random_observation
from nexus_lightning.config import validate
from nexus_lightning.schema import TenantSchema
from scripts import models

SCHEMA = TenantSchema(cameras=("camera",), image_size=64, state_dim=4, action_dim=3, chunk=4, execute=4)
TEXTS = ["go", "push the cube", "lift the red cube slowly", "stop"]
#: Heads with options that keep the test short, optimizer steps, learning rate.
HEADS = {
    "mlp": ({}, 100, 3e-3),
    "flow_matching": ({"noise_samples": 8}, 150, 6e-3),
    "diffusion": ({"noise_samples": 8}, 220, 6e-3),
    "layerwise_flow": ({"noise_samples": 8, "dim": 64}, 150, 4e-3),
    "fast_tokens": ({"dim": 64, "depth": 2, "bins": 32}, 60, 6e-3),
    "adapter": ({}, 100, 3e-3),
    "layerwise_flow on layer_states": ({"noise_samples": 8, "dim": 64, "kind": "layer_states"}, 150, 4e-3),
}
#: The parts of published policies have this test of their own, on the original's weights (tests/test_policies.py).
LOCAL = {n: v for n, v in models._nodes("backbone").items() if models._local(v) and n != "tiny"}
#: Every pair; in the quick suite every head on two backbones, and one head on every backbone.
QUICK = ("effnet_minilm", "qwen3_vl_tiny")
PAIRS = [
    pytest.param(b, h, marks=[] if b in QUICK or h == "mlp" else pytest.mark.slow, id=f"{b}-{h}")
    for b in LOCAL
    for h in HEADS
]


@cache
def backbone_of(name: str):
    return instantiate(LOCAL[name])


def head_and_features(name: str, head_name: str, options: dict, monkeypatch):
    """A new head, the backbone that it sits on, and what it reads of four samples; skips pairs that do not fit."""
    monkeypatch.setattr(models, "SCHEMA", SCHEMA)
    node = {**models._nodes("head")[head_name.split()[0]], **options}
    torch.manual_seed(0)
    built = models._try_build(get_class(node["_target_"]), node, LOCAL[name], backbone_of(name))
    if isinstance(built, str):
        assert "nothing in common" in built or "kind='layer_states'" in built, built
        pytest.skip(built)
    head, backbone = built
    spec, observation = head.feature_spec, random_observation(SCHEMA, len(TEXTS))
    return head, backbone, backbone(observation, TEXTS, SCHEMA, (spec.kind,)).select(spec)


@pytest.mark.parametrize(("name", "head_name"), PAIRS)
def test_the_head_overfits_four_samples(name, head_name, monkeypatch):
    """The loss falls ten times; features come from four different images and instructions."""
    options, steps, lr = HEADS[head_name]
    head, backbone, fresh = head_and_features(name, head_name, options, monkeypatch)
    features = fresh.for_head()
    state, actions = torch.randn(4, 4), torch.rand(4, 4, 3) * 2 - 1
    is_pad = torch.zeros(4, 4, dtype=torch.bool)
    optimizer = torch.optim.AdamW(head.parameters(), lr, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for _ in range(steps):
        loss = head.loss(features, state, actions, is_pad)["loss"]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) / 10 < losses[0] / 10
    assert all(p.grad is None for p in backbone.parameters())


#: Every head once on a backbone that it fits, every way of reading features at least once.
REUSED = [
    *((b, h) for b in QUICK for h in HEADS),
    *((name, name) for name in ("pi0_tiny", "smolvla_tiny", "groot_tiny")),
]


@pytest.mark.parametrize(("name", "head_name"), REUSED)
def test_kept_features_teach_what_fresh_ones_teach(name, head_name, monkeypatch):
    """Loss and gradients (supervised, and of the likelihood in rl) on features kept as float16, within 1 %."""
    options = HEADS[head_name][0] if head_name in HEADS else {}
    head, _, fresh = head_and_features(name, head_name, options, monkeypatch)
    kept = compact(fresh)
    assert all(v.dtype != torch.float32 for v in kept.values(True, True))
    state, actions = torch.randn(4, 4), torch.rand(4, 4, 3) * 2 - 1
    noise = torch.randn(4, *head.noise_shape)
    with torch.no_grad():
        sample = head.act(fresh.for_head(), state, noise) if head.supports_rl else None

    def teach(features) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        head.zero_grad()
        loss = head.loss(features, state, actions, torch.zeros(4, 4, dtype=torch.bool))["loss"]
        if sample is not None:
            loss = loss + head.evaluate(features, state, sample)[0].mean() + head.value(features, state).mean()
        loss.backward()
        return loss.detach(), torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None])

    (loss_a, gradient_a), (loss_b, gradient_b) = teach(fresh.for_head()), teach(kept.for_head())
    assert abs(loss_a - loss_b) < 0.01 * abs(loss_a)
    assert (gradient_a - gradient_b).norm() < 0.01 * gradient_a.norm()


def test_check_prints_what_fits_and_why_the_rest_does_not(capsys, tmp_path):
    assert models.main(["check", "pi0_tiny", "--json", str(tmp_path / "check.json")]) == 0
    out = capsys.readouterr().out
    figures = json.loads((tmp_path / "check.json").read_text())
    ok = {r["head"] for r in figures["results"] if r["result"] == "ok"}
    assert ok == {"", "mlp", "flow_matching", "diffusion", "fast_tokens", "layerwise_flow", "pi0", "pi0_tiny"}
    assert figures["summary"]["FAILED"] == 0
    assert "smolvla: continues SmolVLABackbone (pi0_tiny)" in out


def test_a_broken_head_is_reported_and_the_exit_code_says_so(capsys, monkeypatch):
    nodes = models._nodes

    def with_broken(group):
        return {"broken": {"_target_": "test_zoo.Broken"}} if group == "head" else nodes(group)

    monkeypatch.setattr(models, "_nodes", with_broken)
    assert models.main(["check", "tiny"]) == 1
    assert "tiny + broken: " in capsys.readouterr().out


class Broken(get_class("example_head.LinearChunkHead")):  # type: ignore[misc]
    def act(self, features, state, noise=None):
        return super().act(features, state + torch.rand(()), noise)


def test_unknown_names_list_the_choices(capsys):
    assert models.main(["check", "qwen9"]) == 2
    assert "backbone=qwen9: choose all or one of effnet_minilm" in capsys.readouterr().err


def test_estimate_needs_no_weights(capsys, tmp_path):
    overrides = ["+tenants=[libero,maniskill_sft]", "backbone=qwen3_vl_4b", "tenants.libero.head=flow_matching"]
    assert models.main(["estimate", *overrides, "--json", str(tmp_path / "x.json")]) == 0
    figures = json.loads((tmp_path / "x.json").read_text())
    assert figures["backbone"]["parameters"] == pytest.approx(4.44e9, rel=0.02)
    assert figures["backbone"]["bytes"] == pytest.approx(2 * figures["backbone"]["parameters"], rel=0.01)
    assert figures["tenants"]["libero"]["kind"] == "tokens"
    assert figures["tenants"]["maniskill_sft"]["kind"] == "action_tokens"
    assert "together" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(models._nodes("backbone")))
def test_every_backbone_composes_and_validates(compose, name):
    config = compose("+tenants=[toy_sft]", f"backbone={name}")
    head = {"pi0": "pi0", "smolvla": "smolvla"}.get(name.removesuffix("_tiny"))
    if head is not None:
        config = compose("+tenants=[toy_sft]", f"backbone={name}", f"tenants.toy_sft.head={head}")
    validate(config)


def test_a_policy_head_on_another_backbone_is_refused_early(compose):
    from nexus_lightning.config import ConfigError

    with pytest.raises(ConfigError, match=r"head=Pi0Head on backbone EffNetMiniLM: it continues Pi0Backbone"):
        validate(compose("+tenants=[toy_sft]", "tenants.toy_sft.head=pi0"))
