"""Denoising heads (flow_matching, layerwise_flow, diffusion) and the mlp head on every feature kind that they read.

The likelihood of a sampled chain is held to three independent references: a re-computation from the formulas as
published, the identity E[p_new / p_old] = 1 under samples of the old policy, and a flow whose marginals are known.
"""

import copy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import DDIMScheduler
from torch import nn
from torch.distributions import Normal

from models.heads.diffusion import DiffusionHead
from models.heads.flow import _FlowHead, normal_log_prob
from models.heads.flow_matching import FlowMatchingHead
from models.heads.layerwise_flow import LayerwiseFlowHead, _joint_mask, _JointBlock
from models.heads.mlp import ChunkMLPHead
from nexus_lightning.backbone import FeatureSegment, FeatureSpec
from nexus_lightning.checks import check_head, example_spec, random_features
from nexus_lightning.config import OPTIMIZER_KEYS
from nexus_lightning.schema import TenantSchema

SCHEMA = TenantSchema(state_dim=4, action_dim=3, chunk=5, execute=2, cameras=("front",))
SMALL = TenantSchema(state_dim=3, action_dim=2, chunk=2, execute=1, gripper="none")
SPECS = {
    "tokens": example_spec(SCHEMA),
    "pooled": FeatureSpec("pooled", (), 16),
    "action_tokens": FeatureSpec("action_tokens", (FeatureSegment("action", 12, length=SCHEMA.chunk),), 12),
    "kv": FeatureSpec("kv", (FeatureSegment("kv", 3 * 2 * 2 * 4, layout=(3, 2, 2, 4)),), 12),
    "layer_states": FeatureSpec("layer_states", (FeatureSegment("layers", 3 * 8, layout=(3, 8)),), 8),
}


def flow(spec, schema, **options):
    return FlowMatchingHead(spec, schema, **{"num_steps": 3, **options})


def layerwise(spec, schema, **options):
    return LayerwiseFlowHead(spec, schema, **{"num_steps": 3, "dim": 32, **options})


def diffusion(spec, schema, **options):
    return DiffusionHead(spec, schema, **{"num_steps": 3, "train_steps": 20, **options})


DENOISING = {"flow": (flow, "tokens"), "layerwise": (layerwise, "kv"), "diffusion": (diffusion, "tokens")}
CASES = {
    "mlp_action_tokens": (ChunkMLPHead, "action_tokens"),
    "mlp_tokens": (ChunkMLPHead, "tokens"),
    "mlp_pooled": (ChunkMLPHead, "pooled"),
    "flow_tokens": (flow, "tokens"),
    "layerwise_kv": (layerwise, "kv"),
    "layerwise_layer_states": (layerwise, "layer_states"),
    "diffusion_tokens": (diffusion, "tokens"),
}


def with_options(build, **options):
    return lambda spec, schema: build(spec, schema, **options)


def shaken(head, scale=0.05, seed=1):
    """The head with noise on every weight: zero-initialised outputs would make most comparisons trivial."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.data.add_(scale * torch.randn(parameter.shape, generator=generator))
    return head


def inputs(head, batch=4):
    """Features, state and noise for ``act``; every row of the features has another padding."""
    generator = torch.Generator().manual_seed(5)
    state = torch.randn(batch, head.schema.state_dim, generator=generator)
    noise = torch.randn(batch, *head.noise_shape, generator=generator)
    return random_features(head.feature_spec, batch), state, noise


@pytest.mark.parametrize("name", CASES)
def test_head_keeps_the_contract(name):
    build, kind = CASES[name]
    check_head(build, SPECS[kind], SCHEMA)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("flow", {"sde_steps": "one"}),
        ("flow", {"num_steps": 1}),
        ("layerwise", {"sde_steps": "one", "layers": 2}),
        ("layerwise", {"dim": 6, "layers": 1}),
        ("diffusion", {"sde_steps": "one"}),
        ("diffusion", {"eta": 0.0}),
    ],
)
def test_options_keep_the_contract(name, options):
    build, kind = DENOISING[name]
    check_head(with_options(build, **options), SPECS[kind], SCHEMA)


@pytest.mark.parametrize("name", CASES)
def test_head_overfits_four_samples(name):
    torch.manual_seed(0)
    build, kind = CASES[name]
    steps, lr = {"flow": (120, 6e-3), "diffusion": (200, 6e-3), "layerwise": (120, 3e-3), "mlp": (100, 3e-3)}[
        name.split("_")[0]
    ]
    options = {} if name.startswith("mlp") else {"noise_samples": 8}
    head = build(SPECS[kind], SCHEMA, **options)
    features, state = random_features(SPECS[kind], 4), torch.randn(4, 4)
    actions, is_pad = torch.rand(4, 5, 3) * 2 - 1, torch.zeros(4, 5, dtype=torch.bool)
    optimizer = torch.optim.AdamW(head.parameters(), lr, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for _ in range(steps):
        loss = head.loss(features, state, actions, is_pad)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert sum(losses[-20:]) / 20 < losses[0] / 10
    with torch.no_grad():
        assert (head.eval().act(features, state)["chunk"] - actions).abs().mean() < 0.2
        # A sample is the action and the noise of the policy.
        rows = torch.arange(4).repeat(64)
        noise = torch.randn(len(rows), *head.noise_shape)
        sampled = head.act(features[rows], state[rows], noise)["chunk"].unflatten(0, (64, 4))
        assert (sampled.mean(0) - actions).abs().mean() < 0.2 and (sampled - actions).abs().mean() < 0.3


@pytest.mark.parametrize("name", CASES)
def test_copies_and_payloads_are_exact(name):
    build, kind = CASES[name]
    head = shaken(build(SPECS[kind], SCHEMA)).eval()
    restored = build(SPECS[kind], SCHEMA).eval()
    restored.load_state_dict(head.state_dict(), strict=True)
    features, state, noise = inputs(head)
    with torch.no_grad():
        expected = head.act(features, state, noise)
        for other in (copy.deepcopy(head), restored):
            assert (other.act(features, state, noise) == expected).all()


@pytest.mark.parametrize("name", CASES)
def test_padded_steps_hold_anything_and_the_mean_is_over_valid_elements(name):
    build, kind = CASES[name]
    head = shaken(build(SPECS[kind], SCHEMA)).eval()
    features, state, _ = inputs(head)
    actions, is_pad = torch.randn(4, 5, 3), torch.zeros(4, 5, dtype=torch.bool)
    is_pad[2:] = True
    torch.manual_seed(3)
    loss = head.loss(features, state, torch.where(is_pad.unsqueeze(-1), torch.nan, actions), is_pad)["loss"]
    loss.backward()
    assert all(p.grad.isfinite().all() for p in head.parameters() if p.grad is not None)
    if isinstance(head, ChunkMLPHead):  # the draws of the other heads depend on the batch size
        alone = head.loss(features[:2], state[:2], actions[:2], is_pad[:2])["loss"]
    else:
        torch.manual_seed(3)
        whole = head.loss(features, state, actions, torch.zeros_like(is_pad))["loss"]
        torch.manual_seed(3)
        rest = head.loss(features, state, actions, ~is_pad)["loss"]
        alone = 2 * whole - rest
    torch.testing.assert_close(loss, alone)


# The likelihood of a chain.


def choose_steps(head, noise):
    """The index of the stochastic step of every row, from its own formula."""
    return (Normal(0.0, 1.0).cdf(noise[:, 2, 0, 0]) * head.num_steps).floor().long()


def replay(head, features, state, noise, step):
    """The chain and its log-density, one Euler step after the other; ``step(x, k) -> following, mean, std``."""
    x, total, points = noise[:, 0], torch.zeros_like(noise[:, 0]), [noise[:, 0]]
    chosen = None if head.sde_steps == "all" else choose_steps(head, noise)
    for k in range(head.num_steps):
        following, mean, std = step(x, k)
        dist = Normal(mean, std)
        sampled = mean + std * noise[:, k + 1 if chosen is None else 1]
        stochastic = torch.ones(len(x), dtype=torch.bool) if chosen is None else chosen == k
        stochastic = stochastic[:, None, None]
        total = total + torch.where(stochastic, dist.log_prob(sampled), 0.0)
        x = torch.where(stochastic, sampled, following)
        points.append(x)
    return x, total, torch.stack(points, dim=1)


def flow_step(head, features, state):
    memory = head._context(features, state)

    def step(x, k):
        t, dt = k / head.num_steps, 1 / head.num_steps
        v = head.velocity(x.unsqueeze(1), torch.full((len(x), 1), t), memory, None).squeeze(1)
        score = (t * v - x) / (1 - t)
        s_squared = head.sde_noise**2 * (1 - t)
        return x + v * dt, x + (v + s_squared / 2 * score) * dt, torch.full_like(x, (s_squared * dt) ** 0.5)

    return step


def diffusion_step(head, features, state):
    memory = head._context(features, state)
    schedule = DDIMScheduler(20, beta_schedule="squaredcos_cap_v2", clip_sample=True, prediction_type="epsilon")
    schedule.set_timesteps(head.num_steps)

    def step(x, k):
        t = int(schedule.timesteps[k])
        epsilon = head.network(x.unsqueeze(1), torch.full((len(x), 1), t / 20), memory).squeeze(1)
        following = schedule.step(epsilon, t, x, eta=0.0).prev_sample
        mean = schedule.step(epsilon, t, x, eta=head.eta, variance_noise=torch.zeros_like(x)).prev_sample
        std = head.eta * schedule._get_variance(t, t - 20 // head.num_steps).sqrt()
        return following, mean, std.clamp(min=head.min_std).expand_as(x)

    return step


@pytest.mark.parametrize("sde_steps", ["all", "one"])
@pytest.mark.parametrize("name", DENOISING)
@torch.no_grad()
def test_log_probs_follow_the_published_formulas(name, sde_steps):
    build, kind = DENOISING[name]
    head = shaken(build(SPECS[kind], SCHEMA, num_steps=4, sde_steps=sde_steps)).eval()
    features, state, noise = inputs(head, batch=16)
    step = (diffusion_step if name == "diffusion" else flow_step)(head, features, state)
    chunk, log_probs, points = replay(head, features, state, noise, step)
    out = head.act(features, state, noise)
    evaluated, entropy = head.evaluate(features, state, out)
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(out["chunk"], chunk, **close)
    torch.testing.assert_close(out["log_probs"], log_probs, **close)
    torch.testing.assert_close(evaluated, log_probs, **close)
    stds = torch.stack([step(points[:, k], k)[2] for k in range(4)], dim=1)
    entropies = Normal(0.0, stds).entropy()
    if sde_steps == "all":
        torch.testing.assert_close(out["trace", "chain"], points, **close)
        torch.testing.assert_close(entropy, entropies.sum(1), **close)
    else:
        chosen = choose_steps(head, noise)
        assert len(chosen.unique()) > 1 and torch.equal(out["trace", "step"].squeeze(1), chosen)
        rows = torch.arange(16)
        torch.testing.assert_close(out["trace", "chain"][:, 0], points[rows, chosen], **close)
        torch.testing.assert_close(out["trace", "chain"][:, 1], points[rows, chosen + 1], **close)
        torch.testing.assert_close(entropy, entropies[rows, chosen], **close)


@torch.no_grad()
def test_deterministic_diffusion_is_ddim_from_zeros():
    head = shaken(diffusion(SPECS["tokens"], SCHEMA, num_steps=3)).eval()  # 20 steps are not a multiple
    features, state, _ = inputs(head)
    step, x = diffusion_step(head, features, state), torch.zeros(4, 5, 3)
    for k in range(3):
        x = step(x, k)[0]
    torch.testing.assert_close(head.act(features, state)["chunk"], x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sde_steps", ["all", "one"])
@pytest.mark.parametrize("name", DENOISING)
@torch.no_grad()
def test_importance_ratios_average_to_one(name, sde_steps):
    """For any two policies E[p_new / p_old] = 1 over samples of the old one: true only of normalised densities."""
    build, kind = DENOISING[name]
    spec = example_spec(SMALL) if kind == "tokens" else SPECS[kind]
    old = shaken(build(spec, SMALL, sde_steps=sde_steps)).eval()
    # The first DDIM step divides by a small share of signal: the same change of weights moves its mean further.
    new = shaken(copy.deepcopy(old), scale=0.004 if name == "diffusion" else 0.02, seed=2)
    count = 2000
    rows = torch.zeros(count, dtype=torch.long)
    features, state = random_features(spec, 2)[rows], torch.full((count, 3), 0.3)
    noise = torch.randn(count, *old.noise_shape, generator=torch.Generator().manual_seed(0))
    sample = old.act(features, state, noise)
    log_ratio = (new.evaluate(features, state, sample)[0] - sample["log_probs"]).sum((1, 2))
    ratio = log_ratio.exp()
    error = ratio.std() / count**0.5
    assert 0.05 < log_ratio.std() < 1.5, "the two policies must differ, but not so much that the mean has no meaning"
    assert (ratio.mean() - 1).abs() < 4 * error


class GaussianFlow(_FlowHead):
    """The exact flow of data ``N(MEAN, STD^2)`` in every element: ``E[action - noise | x_t]`` is linear in ``x_t``."""

    reads = ("pooled",)
    MEAN, STD = 0.5, 0.3

    def __init__(self, feature_spec, schema, **options):
        super().__init__(feature_spec, schema, **options)
        self.value_head = nn.Linear(1, 1)

    def value(self, features, state):
        return self.value_head(state[:, :1])

    def _context(self, features, state):
        return None

    def velocity(self, x_BRTA, time_BR, memory, valid_BT):
        t = time_BR[..., None, None]
        variance = (1 - t) ** 2 + (t * self.STD) ** 2
        return self.MEAN + (t * self.STD**2 - (1 - t)) / variance * (x_BRTA - t * self.MEAN)


@pytest.mark.parametrize("sde_noise", [0.5, 1.0])
@torch.no_grad()
def test_stochastic_steps_keep_the_marginals(sde_noise):
    steps, count = 200, 2000
    head = GaussianFlow(SPECS["pooled"], SMALL, num_steps=steps, sde_noise=sde_noise)
    features, state = random_features(SPECS["pooled"], count), torch.zeros(count, 3)
    noise = torch.randn(count, *head.noise_shape, generator=torch.Generator().manual_seed(0))
    chain = head.act(features, state, noise)["trace", "chain"]
    elements = count * 4
    for k in (steps // 4, steps // 2, steps):
        t, x = k / steps, chain[:, k]
        variance = (1 - t) ** 2 + (t * head.STD) ** 2
        # Four standard errors, and the first-order error of 200 Euler steps.
        assert (x.mean() - t * head.MEAN).abs() < 4 * (variance / elements) ** 0.5 + 0.5 / steps
        assert (x.var() / variance - 1).abs() < 4 * (2 / elements) ** 0.5 + 3 / steps
    # The deterministic flow from the same starts ends in the same distribution.
    x = noise[:, :1]
    for k in range(steps):
        x = x + head.velocity(x, torch.full((count, 1), k / steps), None, None) / steps
    assert (x.mean() - chain[:, -1].mean()).abs() < 4 * (2 / elements) ** 0.5 * head.STD
    assert (x.var() / chain[:, -1].var() - 1).abs() < 4 * (4 / elements) ** 0.5 + 3 / steps


def test_log_densities_may_be_positive():
    """CASES B5: standard deviation 0.01, at the mean."""
    log_prob = normal_log_prob(torch.zeros(1), torch.zeros(1), torch.tensor(0.01))
    torch.testing.assert_close(log_prob, Normal(0.0, 0.01).log_prob(torch.zeros(1)))
    head = shaken(flow(SPECS["tokens"], SCHEMA, num_steps=10, sde_noise=0.1)).eval()
    features, state, noise = inputs(head)
    noise[:, 1:] = 0
    sample = head.act(features, state, noise)
    log_probs, _ = head.evaluate(features, state, sample)
    assert (log_probs > 0).all() and (log_probs - sample["log_probs"]).exp().isfinite().all()


@pytest.mark.parametrize("name", DENOISING)
@torch.no_grad()
def test_only_the_given_noise_decides_a_sample(name):
    build, kind = DENOISING[name]
    head = shaken(build(SPECS[kind], SCHEMA)).eval()
    features, state, noise = inputs(head)
    sampled, certain = [], []
    for seed in (0, 1):
        torch.manual_seed(seed)
        sampled.append(head.act(features, state, noise)["chunk"])
        certain.append(head.act(features, state)["chunk"])
    assert torch.equal(*sampled) and torch.equal(*certain)
    assert not torch.equal(sampled[0], certain[0])
    for row in range(head.noise_shape[0]):  # the start and every step count
        other = noise.clone()
        other[:, row] = -other[:, row]
        assert not torch.allclose(head.act(features, state, other)["chunk"], sampled[0], atol=1e-3)


# The layerwise transformer.


def test_joint_attention_equals_its_definition():
    torch.manual_seed(0)
    block = _JointBlock(dim=16, num_heads=4, kv_heads=2, head_dim=4, state_dim=None)
    x, keys, values = torch.randn(2, 6, 16), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)
    prefix = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 0]], dtype=torch.bool)
    valid = torch.tensor([[True, True], [True, False]])
    mask = _joint_mask(prefix, draws=2, chunk=2, valid_BT=valid)
    got = block(x, keys, values, mask)

    h = block.norm_1(x)
    attended = torch.zeros(2, 6, 4, 4)
    own_keys, own_values = block.to_keys_values(h).unflatten(-1, (2, 2, 4)).unbind(2)
    queries = block.to_query(h).unflatten(-1, (4, 4))
    for b in range(2):
        for m in range(6):
            draw, is_state = m // 3, m % 3 == 0
            visible = [3 * draw] + [3 * draw + 1 + t for t in range(2) if valid[b, t] and not is_state]
            for head in range(4):
                group = head // 2  # two query heads for each key/value head
                all_keys = torch.cat([keys[b, group][prefix[b]], own_keys[b, visible, group]])
                all_values = torch.cat([values[b, group][prefix[b]], own_values[b, visible, group]])
                weights = (all_keys @ queries[b, m, head] / 4**0.5).softmax(0)
                attended[b, m, head] = weights @ all_values
    y = x + block.out(attended.flatten(2))
    gate, up = block.to_gated(block.norm_2(y)).chunk(2, dim=-1)
    torch.testing.assert_close(got, y + block.from_gated(nn.functional.gelu(gate, approximate="tanh") * up))


@pytest.mark.parametrize("kind", ["kv", "layer_states"])
@torch.no_grad()
def test_draws_of_a_sample_do_not_see_each_other(kind):
    head = shaken(layerwise(SPECS[kind], SCHEMA))
    features, state, _ = inputs(head)
    x, time, memory = torch.randn(4, 3, 5, 3), torch.rand(4, 3), head._context(features, state)
    together = head.velocity(x, time, memory, None)
    for r in range(3):
        alone = head.velocity(x[:, r : r + 1], time[:, r : r + 1], memory, None)
        torch.testing.assert_close(together[:, r : r + 1], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("layers", "beside"), [(None, [0, 1, 2]), (3, [0, 1, 2]), (2, [0, 2]), (1, [2])])
@torch.no_grad()
def test_private_layers_stand_beside_evenly_spaced_ones(layers, beside):
    head = shaken(layerwise(SPECS["kv"], SCHEMA, layers=layers)).eval()
    assert head.beside == beside and len(head.blocks) == len(beside)
    features, state, _ = inputs(head)
    expected = head.act(features, state)["chunk"]
    for layer in range(3):
        changed = features.clone()
        head.segment.unflatten(changed.tokens["kv"])[:, :, layer].mul_(-1)
        assert torch.equal(head.act(changed, state)["chunk"], expected) == (layer not in beside)


# Options and configuration.


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: flow(SPECS["tokens"], SCHEMA, sde_steps="some"), "sde_steps='some'.*all, one"),
        (lambda: flow(SPECS["tokens"], SCHEMA, sde_noise=0.0), "sde_noise=0.0"),
        (lambda: flow(SPECS["tokens"], SCHEMA, pool_grid=0), "pool_grid=0"),
        (lambda: layerwise(SPECS["kv"], SCHEMA, layers=4), "layers=4: the backbone has 3"),
        (lambda: layerwise(SPECS["kv"], SCHEMA, layers=0), "layers=0: the backbone has 3"),
        (lambda: layerwise(SPECS["tokens"], SCHEMA), "reads kv, layer_states; the backbone gives 'tokens'"),
        (lambda: diffusion(SPECS["tokens"], SCHEMA, num_steps=30), "num_steps=30.*train_steps=20"),
        (lambda: diffusion(SPECS["tokens"], SCHEMA, eta=2.0), "eta=2.0"),
        (lambda: diffusion(SPECS["tokens"], SCHEMA, min_std=0.0), "min_std=0.0"),
        (
            lambda: diffusion(SPECS["tokens"], replace(SCHEMA, action_normalization="mean_std")),
            "action_normalization='mean_std'.*min_max",
        ),
    ],
)
def test_bad_options_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_diffusion_without_diffusers_names_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ImportError, match=r"pip install 'nexus-lightning\[vla\]'"):
        diffusion(SPECS["tokens"], SCHEMA)


@pytest.mark.parametrize(
    ("name", "head", "kind"),
    [("layerwise_flow", LayerwiseFlowHead, "kv"), ("diffusion", DiffusionHead, "tokens")],
)
def test_config_file_builds_the_head(name, head, kind):
    config = yaml.safe_load((Path(__file__).parents[1] / "conf" / "head" / f"{name}.yaml").read_text())
    optimizer = set(OPTIMIZER_KEYS)
    assert config.keys() >= optimizer and config.pop("_target_") == f"{head.__module__}.{head.__name__}"
    head(SPECS[kind], SCHEMA, **{key: value for key, value in config.items() if key not in optimizer})
