"""Published policies taken apart at their own boundary: the split acts and learns as the whole policy does."""

import copy
import inspect
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import hydra
import pytest
import torch
import yaml

from models.backbones.groot import GrootBackbone
from models.backbones.pi0 import Pi0Backbone
from models.backbones.policies import read_weights, under
from models.backbones.smolvla import SmolVLABackbone
from models.backbones.tiny_policies import ACTION_DIM, STATE_DIM, tiny_policy
from models.heads.groot import GrootHead
from models.heads.pi0 import Pi0Head
from models.heads.smolvla import SmolVLAHead
from nexus_lightning.backbone import SharedBackbone, concatenate_features
from nexus_lightning.checks import check_backbone, check_head, random_observation
from nexus_lightning.schema import TenantSchema
from nexus_lightning.tenant import build_head

SCHEMA = TenantSchema(state_dim=6, action_dim=4, chunk=8, execute=4, cameras=("front", "wrist"), image_size=48)
INSTRUCTIONS = ["go", "push the red cube to the goal", "pick up the soup"]
BACKBONES = {"smolvla": SmolVLABackbone, "pi0": Pi0Backbone, "groot": GrootBackbone}
#: Optimizer steps and learning rate.
OVERFIT = {"smolvla": (60, 2e-3), "pi0": (70, 2e-3), "groot": (150, 1e-3)}
KINDS = {"smolvla": "kv", "pi0": "kv", "groot": "tokens"}


@pytest.fixture(scope="module")
def backbones():
    built = {}

    def get(name):
        if name not in built:
            built[name] = BACKBONES[name]("tiny")
        return built[name]

    return get


def make_head(name, backbone, schema=SCHEMA, **options):
    spec = backbone.feature_spec(schema, KINDS[name])
    if name == "smolvla":
        return SmolVLAHead(spec, schema, SharedBackbone(backbone), "tiny", **options)
    return {"pi0": Pi0Head, "groot": GrootHead}[name](spec, schema, "tiny", **options)


def inputs(backbone, name, instructions=INSTRUCTIONS, seed=0):
    batch = len(instructions)
    observation = random_observation(SCHEMA, batch, seed)
    generator = torch.Generator().manual_seed(seed)
    return (
        observation,
        backbone(observation, instructions, SCHEMA, (KINDS[name],)),
        torch.randn(batch, SCHEMA.state_dim, generator=generator),
        torch.randn(batch, SCHEMA.chunk, SCHEMA.action_dim, generator=generator),
    )


@pytest.mark.parametrize("name", BACKBONES)
def test_backbone_keeps_the_contract(name, backbones):
    check_backbone(backbones(name), SCHEMA)


@pytest.mark.parametrize("name", BACKBONES)
def test_head_keeps_the_contract(name, backbones):
    backbone = backbones(name)
    _, features, _, _ = inputs(backbone, name)
    before = backbone.fingerprint
    check_head(
        lambda spec, schema: make_head(name, backbone, schema, load_weights=False),
        backbone.feature_spec(SCHEMA, KINDS[name]),
        SCHEMA,
        features=features,
    )
    assert backbone.fingerprint == before
    assert all(p.grad is None and not p.requires_grad for p in backbone.parameters())


@pytest.mark.parametrize("name", BACKBONES)
def test_one_stochastic_step_keeps_the_contract(name, backbones):
    backbone = backbones(name)
    _, features, _, _ = inputs(backbone, name)
    check_head(make_head(name, backbone, sde_steps="one"), features=features)


@pytest.mark.parametrize("name", BACKBONES)
def test_head_overfits_four_samples(name, backbones):
    backbone = backbones(name)
    schema = TenantSchema(**{**SCHEMA.__dict__, "chunk": 2, "execute": 1, "action_dim": 2})
    _, features, state, actions = inputs(backbone, name, ["go", "push", "lift the cube", "stop"])
    torch.manual_seed(0)
    head = make_head(name, backbone, schema, noise_samples=8).eval()  # without dropout, where there is any
    steps, lr = OVERFIT[name]
    optimizer = torch.optim.Adam(head.parameters(), lr, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses = []
    for _ in range(steps):
        loss = head.loss(features, state, actions[:, :2, :2], torch.zeros(4, 2, dtype=torch.bool))["loss"]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) / 10 < losses[0] / 10
    assert all(p.grad is None for p in backbone.parameters())


@pytest.mark.parametrize("name", BACKBONES)
def test_payload_round_trip(name, backbones, tmp_path):
    from safetensors.torch import load_file, save_file

    backbone = backbones(name)
    _, features, state, _ = inputs(backbone, name)
    torch.manual_seed(0)
    source, restored = (make_head(name, backbone, load_weights=False).eval() for _ in range(2))
    save_file(source.state_dict(), tmp_path / "head.safetensors")
    restored.load_state_dict(load_file(tmp_path / "head.safetensors"), strict=True)
    noise = torch.randn(3, *source.noise_shape)
    expected, chunk = (head.act(features, state, noise)["chunk"] for head in (source, restored))
    assert torch.equal(chunk, expected)
    assert copy.deepcopy(source).state_dict().keys() == source.state_dict().keys()


@pytest.mark.parametrize("name", BACKBONES)
def test_two_tenants_on_rows_of_one_grouped_feature(name, backbones):
    """Each tenant's loss, gradients and actions are those of its own pass, with its own padding."""
    backbone = backbones(name)
    torch.manual_seed(0)
    heads = [make_head(name, backbone, load_weights=False).eval() for _ in range(2)]
    solo = [inputs(backbone, name, texts, seed) for seed, texts in enumerate((["go", "stop"], INSTRUCTIONS[1:]))]
    texts = ["go", "stop", *INSTRUCTIONS[1:]]
    grouped = backbone(torch.cat([part[0] for part in solo]), texts, SCHEMA, (KINDS[name],))
    joined = concatenate_features([part[1] for part in solo])
    for row, (head, (_, features, state, actions)) in enumerate(zip(heads, solo, strict=True)):
        noise = torch.randn(2, *head.noise_shape)
        for shared in (grouped, joined):
            rows = shared[2 * row : 2 * row + 2]
            ours, alone = head.act(rows, state, noise), head.act(features, state, noise)
            for key in ("chunk", "log_probs", "state_value"):
                torch.testing.assert_close(ours[key], alone[key], rtol=1e-4, atol=1e-5)
            gradients = []
            for feature in (rows, features):
                head.zero_grad()
                torch.manual_seed(1)
                head.loss(feature, state, actions, torch.zeros(2, SCHEMA.chunk, dtype=torch.bool))["loss"].backward()
                gradients.append([p.grad.clone() for p in head.parameters() if p.grad is not None])
            for a, b in zip(*gradients, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", BACKBONES)
def test_passes_in_several_threads(name, backbones):
    """One copy of the weights, nothing kept on the module between calls: every thread gets what it gets alone."""
    backbone = backbones(name)
    parts = [(random_observation(SCHEMA, n, seed=n), INSTRUCTIONS[:n]) for n in (1, 2, 3)]
    alone = [backbone(observation, texts, SCHEMA, backbone.kinds) for observation, texts in parts]
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(backbone, *part, SCHEMA, backbone.kinds) for part in parts * 3]
    for job, expected in zip(jobs, alone * 3, strict=True):
        assert all(torch.equal(v, expected.tokens[k]) for k, v in job.result().tokens.items())


@pytest.mark.parametrize("name", BACKBONES)
def test_yaml_builds(name, backbones):
    """The tiny config builds; the real one differs from it in values only."""
    folder = Path(__file__).parents[1] / "conf"
    for group in ("backbone", "head"):
        tiny, real = (yaml.safe_load((folder / group / f"{n}.yaml").read_text()) for n in (f"{name}_tiny", name))
        assert tiny.keys() == real.keys() and tiny["_target_"] == real["_target_"]
        if group == "backbone":
            assert hydra.utils.instantiate(tiny).fingerprint == backbones(name).fingerprint
            continue
        head = build_head(SimpleNamespace(head=tiny), SCHEMA, backbones(name), seed=0)
        assert type(head).supports_rl and head.noise_samples == 1
        parameters = inspect.signature(type(head)).parameters.keys() - {"feature_spec", "schema", "backbone"}
        assert parameters <= tiny.keys()


def test_tiny_weights_follow_the_seed():
    """Two processes that build a tiny policy get the same weights."""
    again = tiny_policy.__wrapped__("smolvla")
    ours, theirs, others = (
        read_weights(folder, under("model."))
        for folder in (tiny_policy("smolvla"), again, tiny_policy.__wrapped__("smolvla", seed=1))
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert not torch.equal(ours["state_proj.weight"], others["state_proj.weight"])


@pytest.mark.parametrize("name", BACKBONES)
def test_log_probabilities_are_those_of_the_chain(name, backbones):
    """The sum over the chunk is the log-density of every transition over all padded dims."""
    backbone = backbones(name)
    _, features, state, _ = inputs(backbone, name)
    head = make_head(name, backbone, sde_noise=0.3).eval()
    noise = torch.randn(3, *head.noise_shape)
    with torch.no_grad():
        out = head.act(features, state, noise)
    std = torch.tensor([0.3 * ((1 - k / head.num_steps) / head.num_steps) ** 0.5 for k in range(head.num_steps)])
    standard = torch.distributions.Normal(0.0, 1.0).log_prob(noise[:, 1:]) - std.log().view(1, -1, 1, 1)
    torch.testing.assert_close(out["log_probs"].sum((1, 2)), standard.sum((1, 2, 3)), rtol=1e-5, atol=1e-3)
    assert torch.equal(out["chunk"], out["trace", "chain"][:, -1, :, : SCHEMA.action_dim])


# ------------------------------------------------------------------------------------------------------------- SmolVLA
@pytest.fixture(scope="module")
def smolvla_policy():
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

    return SmolVLAPolicy.from_pretrained(tiny_policy("smolvla"))


def smolvla_batch(policy, observation, state, instructions, actions=None):
    """Through LeRobot's own processor, from what its datasets hold."""
    from lerobot.policies.factory import make_pre_post_processors

    stats = {
        "observation.state": {"mean": torch.zeros(6), "std": torch.ones(6)},
        "action": {"mean": torch.zeros(4), "std": torch.ones(4)},
    }
    process, _ = make_pre_post_processors(policy.config, dataset_stats=stats)
    batch = {f"observation.images.{c}": observation["image", c].float() / 255 for c in SCHEMA.cameras}
    batch |= {"observation.state": state, "task": list(instructions)}
    return process(batch if actions is None else batch | {"action": actions})


def test_smolvla_acts_as_lerobots_policy(backbones, smolvla_policy):
    backbone = backbones("smolvla")
    observation, features, state, _ = inputs(backbone, "smolvla")
    head = make_head("smolvla", backbone).eval()
    noise = torch.randn(3, 8, ACTION_DIM)
    batch = smolvla_batch(smolvla_policy, observation, state, INSTRUCTIONS)
    expected = smolvla_policy.predict_action_chunk(dict(batch), noise)
    zeros = smolvla_policy.predict_action_chunk(dict(batch), torch.zeros_like(noise))
    with torch.no_grad():
        chunk, deterministic = head.sample_actions(features, state, noise), head.act(features, state)["chunk"]
    torch.testing.assert_close(chunk, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(deterministic, zeros, rtol=0, atol=1e-5)
    assert expected.std() > 0.1 and (expected - zeros).abs().max() > 0.1


def test_smolvla_loss_is_lerobots(backbones, smolvla_policy):
    backbone = backbones("smolvla")
    observation, features, state, actions = inputs(backbone, "smolvla")
    head = make_head("smolvla", backbone)
    noise, time = torch.randn(3, 8, ACTION_DIM), torch.tensor([0.1, 0.5, 0.95])
    is_pad = torch.zeros(3, 8, dtype=torch.bool)
    is_pad[1, 5:] = True
    batch = smolvla_batch(smolvla_policy, observation, state, INSTRUCTIONS, actions) | {"action_is_pad": is_pad}
    smolvla_policy.zero_grad()
    expected, _ = smolvla_policy.forward(batch, noise, time)
    expected.backward()
    loss = head.loss_at(features, state, actions, is_pad, noise.unsqueeze(1), 1 - time.unsqueeze(1).double())["loss"]
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    theirs = dict(smolvla_policy.model.named_parameters())
    for name, parameter in head.named_parameters():
        if not name.startswith("value_head."):
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-5, msg=name)


def test_smolvla_shorter_chunk_gives_the_first_actions(backbones):
    backbone = backbones("smolvla")
    _, features, state, _ = inputs(backbone, "smolvla")
    short = TenantSchema(**{**SCHEMA.__dict__, "chunk": 5})
    noise = torch.randn(3, 8, ACTION_DIM)
    with torch.no_grad():
        whole = make_head("smolvla", backbone).sample_actions(features, state, noise)
        first = make_head("smolvla", backbone, short).sample_actions(features, state, noise[:, :5])
    torch.testing.assert_close(first, whole[:, :5], rtol=0, atol=1e-5)


def test_smolvla_refuses_what_does_not_fit(backbones, tmp_path):
    backbone = backbones("smolvla")
    with pytest.raises(ValueError, match="at least one camera"):
        backbone.feature_spec(TenantSchema(state_dim=2, action_dim=2, chunk=2, execute=1))
    with pytest.raises(ValueError, match="action_dim=9: the checkpoint takes at most 8"):
        make_head("smolvla", backbone, TenantSchema(**{**SCHEMA.__dict__, "action_dim": 9}))
    with pytest.raises(ValueError, match=r"has no config\.json"):
        SmolVLABackbone(str(tmp_path))
    with torch.no_grad():
        other = copy.deepcopy(backbone)
        other.vlm.text_model.layers[-1].mlp.down_proj.weight[0, 0] += 1
    with pytest.raises(ValueError, match="its VLM is not the backbone's"):
        make_head("smolvla", other)


def test_smolvla_in_bfloat16(backbones):
    """A compact backbone: features in its dtype, the head in float32, the same action within its precision."""
    backbone = SmolVLABackbone("tiny", dtype="bf16")
    _, features, state, _ = inputs(backbone, "smolvla")
    _, exact, _, _ = inputs(backbones("smolvla"), "smolvla")
    assert features.tokens["kv"].dtype == torch.bfloat16
    with torch.no_grad():
        ours = make_head("smolvla", backbone).act(features.for_head(), state)["chunk"]
        reference = make_head("smolvla", backbones("smolvla")).act(exact, state)["chunk"]
    assert (ours - reference).abs().max() < 0.1 * reference.abs().max()


# ----------------------------------------------------------------------------------------------------------------- pi0
@pytest.fixture(scope="module")
def pi0_policy():
    from transformers import PI0ForConditionalGeneration

    return PI0ForConditionalGeneration.from_pretrained(tiny_policy("pi0")).eval()


def pi0_batch(observation, instructions):
    """Through the policy's own processor, padded to more than any prompt needs."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(tiny_policy("pi0"))
    images = [[observation["image", c][row] for c in SCHEMA.cameras] for row in range(len(instructions))]
    batch = processor(images=images, text=list(instructions), padding="max_length", max_length=90, return_tensors="pt")
    return {k: batch[k] for k in ("input_ids", "attention_mask", "pixel_values", "pixel_attention_mask")}


def padded(values, size):
    return torch.nn.functional.pad(values, (0, size - values.shape[-1]))


def test_pi0_acts_as_transformers_policy(backbones, pi0_policy):
    backbone = backbones("pi0")
    observation, features, state, _ = inputs(backbone, "pi0")
    head = make_head("pi0", backbone).eval()
    batch = pi0_batch(observation, INSTRUCTIONS)
    noise = torch.randn(3, 8, ACTION_DIM)
    expected = pi0_policy.sample_actions(state=padded(state, STATE_DIM), noise=noise, **batch)[..., :4]
    with torch.no_grad():
        chunk = head.sample_actions(features, state, noise)
    torch.testing.assert_close(chunk, expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.1 and (expected - noise[..., :4]).abs().max() > 0.1


def test_pi0_velocity_loss_and_gradients_are_transformers(backbones, pi0_policy):
    backbone = backbones("pi0")
    observation, features, state, actions = inputs(backbone, "pi0")
    head = make_head("pi0", backbone)
    noise, time = torch.randn(3, 8, ACTION_DIM), torch.tensor([0.1, 0.5, 0.95])
    pi0_policy.zero_grad()
    out = pi0_policy(
        state=padded(state, STATE_DIM),
        noise=noise,
        timestep=time,
        actions=padded(actions, ACTION_DIM),
        **pi0_batch(observation, INSTRUCTIONS),
    )
    # Only the real dims are ours to learn; theirs averages the padded ones too.
    expected = (out.logits - (noise - padded(actions, ACTION_DIM)))[..., :4].square().mean()
    expected.backward()
    our_time = 1 - time.unsqueeze(1).double()
    noisy = time[:, None, None] * noise + (1 - time[:, None, None]) * padded(actions, ACTION_DIM)
    with torch.no_grad():
        memory = head.memory(features, padded(state, STATE_DIM))
        velocity = head.velocity(noisy.unsqueeze(1), our_time, memory, None).squeeze(1)
    torch.testing.assert_close(velocity, -out.logits.detach(), rtol=0, atol=1e-5)
    is_pad = torch.zeros(3, 8, dtype=torch.bool)
    loss = head.loss_at(features, state, actions, is_pad, noise.unsqueeze(1), our_time)["loss"]
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    theirs = dict(pi0_policy.named_parameters())
    for name, parameter in head.named_parameters():
        if not name.startswith("value_head."):
            full = f"model.{name}" if name.startswith("dit.") else name
            torch.testing.assert_close(parameter.grad, theirs[full].grad, rtol=1e-3, atol=1e-5, msg=name)


def test_pi0_reads_the_names_of_the_published_checkpoint(backbones, tmp_path):
    """``lerobot/pi0_base`` keeps openpi's names; transformers renames them while it loads."""
    from safetensors.torch import save_file

    head, backbone = make_head("pi0", backbones("pi0")), backbones("pi0")
    weights = {f"paligemma_with_expert.paligemma.model.{k}": v for k, v in backbone.prefix.vlm.state_dict().items()}
    embedding = weights.pop("paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight")
    weights["paligemma_with_expert.paligemma.lm_head.weight"] = embedding
    for key, value in head.state_dict().items():
        if not key.startswith("value_head."):
            key = key.removeprefix("embed_action_time.")
            weights[key.replace("dit.", "paligemma_with_expert.gemma_expert.model.")] = value
    weights["paligemma_with_expert.gemma_expert.lm_head.weight"] = torch.zeros(len(embedding), 64)
    shutil.copytree(tiny_policy("pi0"), tmp_path, dirs_exist_ok=True)
    save_file({k: v.clone() for k, v in weights.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    again = Pi0Backbone(str(tmp_path))
    assert again.fingerprint == backbone.fingerprint
    renamed = Pi0Head(head.feature_spec, SCHEMA, str(tmp_path))
    assert all(
        torch.equal(v, dict(renamed.named_parameters())[k]) for k, v in head.named_parameters() if "value" not in k
    )


def test_pi0_refuses_what_does_not_fit(backbones):
    backbone = backbones("pi0")
    with pytest.raises(ValueError, match="state_dim=41: the checkpoint takes at most 40"):
        make_head("pi0", backbone, TenantSchema(**{**SCHEMA.__dict__, "state_dim": 41}))
    with pytest.raises(ValueError, match="is a qwen3_vl checkpoint"):
        Pi0Backbone(str(tiny_policy("groot") / "vlm"))
    spec = backbones("smolvla").feature_spec(SCHEMA, "kv")
    with pytest.raises(ValueError, match="give head and backbone the same checkpoint"):
        Pi0Head(spec, SCHEMA, "tiny")


# --------------------------------------------------------------------------------------------------------------- GR00T
EMBODIMENT = 10


@pytest.fixture(scope="module")
def groot_policy():
    from lerobot.policies.groot.groot_n1_7 import GR00TN17

    return GR00TN17.from_pretrained(str(tiny_policy("groot"))).float().eval()


def groot_outputs(policy, observation, row, instruction, state, actions=None):
    """One sample alone, hence unpadded, through LeRobot's own processor steps and backbone."""
    from lerobot.policies.groot.processor_groot import GrootN17VLMEncodeStep
    from lerobot.policies.groot.utils import prepare_n1_7_language_batch
    from lerobot.processor import TransitionKey
    from transformers.feature_extraction_utils import BatchFeature

    step = GrootN17VLMEncodeStep(policy.config.model_name, image_target_size=[64, 64], image_crop_size=[58, 58])
    video = torch.stack([observation["image", c][row].permute(1, 2, 0) for c in SCHEMA.cameras])[None, None]
    language = prepare_n1_7_language_batch([instruction], 1, formalize_language=True)
    transition = {
        TransitionKey.OBSERVATION: {"video": video},
        TransitionKey.COMPLEMENTARY_DATA: {"language": language},
    }
    encoded = step(transition)[TransitionKey.COMPLEMENTARY_DATA]
    with torch.no_grad():
        states = policy.backbone(BatchFeature({k: v for k, v in encoded.items() if k != "language"}))
    action_input = {
        "state": padded(state[row : row + 1], STATE_DIM)[:, None],
        "embodiment_id": torch.tensor([EMBODIMENT]),
    }
    if actions is not None:
        mask = torch.zeros(1, 8, ACTION_DIM)
        mask[..., :4] = 1
        action_input |= {"action": padded(actions[row : row + 1], ACTION_DIM), "action_mask": mask}
    return states, BatchFeature(action_input)


def test_groot_acts_as_lerobots_policy(backbones, groot_policy):
    """Batched with other prompts ours equals theirs alone."""
    backbone = backbones("groot")
    observation, features, state, _ = inputs(backbone, "groot")
    head = make_head("groot", backbone).eval()
    noise, expected = [], []
    for row, instruction in enumerate(INSTRUCTIONS):
        states, action_input = groot_outputs(groot_policy, observation, row, instruction, state)
        torch.manual_seed(row)
        expected.append(groot_policy.action_head.get_action(states, action_input)["action_pred"][..., :4])
        torch.manual_seed(row)
        noise.append(torch.randn(1, 8, ACTION_DIM))
    noise, expected = torch.cat(noise), torch.cat(expected)
    with torch.no_grad():
        chunk = head.sample_actions(features, state, noise)
    torch.testing.assert_close(chunk, expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.1 and (expected - noise[..., :4]).abs().max() > 0.1


def test_groot_loss_and_gradients_are_lerobots(backbones, groot_policy):
    backbone = backbones("groot")
    observation, _, state, actions = inputs(backbone, "groot")
    head = make_head("groot", backbone).eval()  # dropout off, on both sides
    row, instruction = 1, INSTRUCTIONS[1]
    states, action_input = groot_outputs(groot_policy, observation, row, instruction, state, actions)
    groot_policy.zero_grad()
    torch.manual_seed(0)
    expected = groot_policy.action_head(states, action_input)["loss"]
    expected.backward()
    torch.manual_seed(0)
    noise = torch.randn(1, 8, ACTION_DIM)
    time = groot_policy.action_head.sample_time(1, torch.device("cpu"), torch.float32)
    feature = backbone(observation[row : row + 1], [instruction], SCHEMA, ("tokens",))
    sample = slice(row, row + 1)
    is_pad = torch.zeros(1, 8, dtype=torch.bool)
    loss = head.loss_at(feature, state[sample], actions[sample], is_pad, noise.unsqueeze(1), time.unsqueeze(1))["loss"]
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    theirs = dict(groot_policy.action_head.named_parameters())
    for name, parameter in head.action_head.named_parameters():
        gradient = theirs[name].grad
        gradient = gradient[EMBODIMENT : EMBODIMENT + 1] if name.endswith((".W", ".b")) else gradient
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_groot_likelihood_has_no_dropout(backbones):
    backbone = backbones("groot")
    _, features, state, _ = inputs(backbone, "groot")
    head = make_head("groot", backbone).eval()
    with torch.no_grad():
        sample = head.act(features, state, torch.randn(3, *head.noise_shape))
        head.train()
        log_probs, _ = head.evaluate(features, state, sample)
    assert head.training and all(module.training for module in head.modules())
    torch.testing.assert_close(log_probs, sample["log_probs"], rtol=1e-5, atol=1e-4)


def test_groot_refuses_what_does_not_fit(backbones):
    backbone = backbones("groot")
    with pytest.raises(ValueError, match=r"embodiment='nobody': choose one of .*libero_sim"):
        make_head("groot", backbone, embodiment="nobody")
    with pytest.raises(ValueError, match="is a pi0 checkpoint"):
        GrootBackbone(str(tiny_policy("pi0")))
    spec = backbones("smolvla").feature_spec(SCHEMA, "tokens")
    with pytest.raises(ValueError, match="give head and backbone the same GR00T checkpoint"):
        GrootHead(spec, SCHEMA, "tiny")
