"""Action tokenizers and the autoregressive head: round trips, exact likelihoods, decoding, payload, padding."""

import copy
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from scipy.stats import norm
from tensordict import TensorDict

from models.action_tokenizers import BinningTokenizer, DCTTokenizer, episode_chunks
from models.heads.fast_tokens import FastTokensHead
from nexus_lightning.checks import check_head, example_spec, random_features
from nexus_lightning.config import OPTIMIZER_KEYS
from nexus_lightning.schema import TenantSchema

SCHEMA = TenantSchema(state_dim=4, action_dim=3, chunk=5, execute=2, cameras=("front", "wrist"))
NO_CAMERAS = TenantSchema(state_dim=6, action_dim=2, chunk=1, execute=1, gripper="none")
PLANE = TenantSchema(state_dim=4, action_dim=2, chunk=8, execute=2, gripper="none")
MEAN_STD = TenantSchema(state_dim=4, action_dim=3, chunk=5, execute=2, action_normalization="mean_std")
TINY = {"dim": 32, "depth": 2, "num_heads": 2}


def smooth_chunks(num=64, chunk=8, action_dim=2, seed=0):
    """Random sinusoids in [-1, 1]: like robot motion, most of the energy is in low frequencies."""
    generator = torch.Generator().manual_seed(seed)
    phase, speed, size = (torch.rand(num, 1, action_dim, generator=generator) for _ in range(3))
    return size * torch.sin(6 * phase + 0.5 * speed * torch.arange(chunk)[None, :, None])


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A BPE for SCHEMA's chunks, in a file."""
    path = tmp_path_factory.mktemp("vocabulary") / "dct.json"
    DCTTokenizer.fit(smooth_chunks(256, SCHEMA.chunk, SCHEMA.action_dim), vocab_size=128).save(path)
    return str(path)


# ------------------------------------------------------------------------------------------------ tokenizers


@pytest.mark.parametrize("bins", [2, 7, 256])
def test_binning_errs_by_half_a_bin_at_most(bins):
    tokenizer = BinningTokenizer(bins)
    actions = torch.linspace(-1, 1, 4001)
    tokens = tokenizer.encode(actions)
    assert tokens.dtype == torch.int64 and tokens.min() == 0 and tokens.max() == bins - 1
    # numpy's histogram edges are an independent reference for uniform bins.
    edges = np.linspace(-1, 1, bins + 1)
    clear = np.abs(actions.double().numpy()[:, None] - edges).min(1) > 1e-6  # of float32 rounding at an edge
    assert (tokens.numpy() == np.digitize(actions.double().numpy(), edges) - 1)[clear].all() and clear.mean() > 0.9
    assert (tokenizer.decode(tokens) - actions).abs().max() <= 1 / bins + 1e-6
    assert torch.equal(tokenizer.encode(tokenizer.decode(torch.arange(bins))), torch.arange(bins))
    assert torch.equal(tokenizer.encode(torch.tensor([-9.0, 9.0])), torch.tensor([0, bins - 1]))


@pytest.mark.parametrize(("chunk", "scale"), [(1, 10.0), (8, 10.0), (50, 4.0)])
def test_dct_errs_by_the_quantisation_bound_at_most(chunk, scale):
    tokenizer = DCTTokenizer(chunk, 3, scale)
    actions = torch.cat([torch.rand(20, chunk, 3) * 2 - 1, torch.ones(1, chunk, 3), -torch.ones(1, chunk, 3)])
    tokens = tokenizer.encode(actions)
    assert {len(sequence) for sequence in tokens} == {chunk * 3}
    error = tokenizer.decode(tokens) - actions
    assert error.norm(dim=1).max() <= math.sqrt(chunk) / (2 * scale) + 1e-5


def test_dct_tokens_are_the_rounded_coefficients_low_frequencies_first():
    actions = torch.rand(1, 4, 2) * 2 - 1
    tokenizer = DCTTokenizer(4, 2)
    expected = []
    for k in range(4):  # DCT-II, orthonormal, written out
        weight = math.sqrt((1 if k == 0 else 2) / 4)
        for dim in range(2):
            total = sum(actions[0, n, dim].item() * math.cos(math.pi * k * (2 * n + 1) / 8) for n in range(4))
            expected.append(round(10 * weight * total) - tokenizer.minimum)
    assert tokenizer.encode(actions) == [expected]
    assert (tokenizer.minimum, tokenizer.maximum) == (-20, 20)


def test_bpe_compresses_without_loss():
    chunks = smooth_chunks(256)
    plain, fitted = DCTTokenizer(8, 2), DCTTokenizer.fit(chunks, vocab_size=256)
    unseen = smooth_chunks(32, seed=1)
    assert plain.vocab_size < fitted.vocab_size <= 256
    tokens = fitted.encode(unseen)
    assert sum(map(len, tokens)) < 0.7 * 32 * 16
    assert max(map(len, tokens)) <= fitted.max_tokens == 16
    assert torch.equal(fitted.decode(tokens), plain.decode(plain.encode(unseen)))


def test_malformed_token_sequences_decode_to_padded_or_cut_coefficients():
    tokenizer = DCTTokenizer(4, 1)
    full = tokenizer.encode(torch.tensor([[[0.5], [0.5], [0.5], [0.5]]]))[0]
    expected = tokenizer.decode([full])
    assert torch.equal(tokenizer.decode([full[:1]]), expected)  # missing coefficients are zero
    assert torch.equal(tokenizer.decode([full + full]), expected)  # those too many are dropped
    assert torch.equal(tokenizer.decode([[]]), torch.zeros(1, 4, 1))


def test_tokenizer_bytes_round_trip(tmp_path):
    fitted = DCTTokenizer.fit(smooth_chunks(), vocab_size=128)
    restored = DCTTokenizer.from_bytes(fitted.to_bytes())
    unseen = smooth_chunks(16, seed=2)
    assert restored.encode(unseen) == fitted.encode(unseen)
    assert vars(restored).keys() == vars(fitted).keys() and restored.to_bytes() == fitted.to_bytes()
    (tmp_path / "other").write_text("{}")
    with pytest.raises(ValueError, match=r"DCTTokenizer\.save"):
        DCTTokenizer.load(tmp_path / "other")


def test_episode_chunks_are_the_windows_of_one_episode():
    actions = torch.randn(6, 2)
    chunks = episode_chunks(actions, 4)
    assert chunks.shape == (3, 4, 2) and torch.equal(chunks[1], actions[1:5])
    assert episode_chunks(actions, 7).shape == (0, 7, 2)


def test_pretrained_fast_processor_from_a_folder(tmp_path):
    """The two files of the published processor: a byte-level BPE, the scale and the smallest integer."""
    from tokenizers import ByteLevelBPETokenizer

    minimum, chunks = -140, smooth_chunks(128)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(DCTTokenizer(8, 2, minimum=minimum)._texts(chunks), vocab_size=320, show_progress=False)
    folder = tmp_path / "fast"
    folder.mkdir()
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "processor_config.json").write_text(json.dumps({"min_token": minimum, "scale": 10, "vocab_size": 320}))

    tokenizer = DCTTokenizer.from_pretrained(str(folder), 8, 2)
    assert (tokenizer.scale, tokenizer.minimum) == (10.0, minimum)
    unseen = smooth_chunks(16, seed=1)
    tokens = tokenizer.encode(unseen)
    assert tokens == [bpe.encode(text).ids for text in tokenizer._texts(unseen)]
    assert max(map(len, tokens)) <= tokenizer.max_tokens
    plain = DCTTokenizer(8, 2)
    assert torch.equal(tokenizer.decode(tokens), plain.decode(plain.encode(unseen)))
    # Integers from -12 on are characters of two bytes: half a character decodes to something defined.
    assert tokenizer.max_tokens == 2 * 8 * 2
    assert tokenizer.decode([[token] for token in range(tokenizer.vocab_size)]).isfinite().all()
    head = FastTokensHead(example_spec(PLANE), PLANE, tokenizer="dct", pretrained=str(folder), **TINY)
    assert head.noise_shape == (32,) and head.tokenizer.to_bytes() == tokenizer.to_bytes()
    (folder / "processor_config.json").write_text("{}")
    with pytest.raises(ValueError, match="no scale and min_token"):
        DCTTokenizer.from_pretrained(str(folder), 8, 2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: BinningTokenizer(1), "bins=1"),
        (lambda: DCTTokenizer(4, 2, scale=0.0), "scale=0.0"),
        (lambda: DCTTokenizer(4, 2, minimum=3), "minimum=3"),
        (lambda: DCTTokenizer(4, 2).encode(torch.zeros(1, 3, 2)), r"\[1, 3, 2\]"),
        (lambda: DCTTokenizer.fit(torch.zeros(0, 4, 2)), "N at least 1"),
        (lambda: DCTTokenizer.fit(torch.zeros(3, 4, 2), vocab_size=8), "vocab_size=8.*41"),
        (lambda: DCTTokenizer.load("/nowhere"), "vocabulary='/nowhere'"),
        (lambda: DCTTokenizer.from_pretrained("/nowhere", 4, 2), "pretrained='/nowhere': neither a folder"),
        (lambda: FastTokensHead(example_spec(SCHEMA), SCHEMA, tokenizer="vq"), "tokenizer='vq'.*binning, dct"),
        (lambda: FastTokensHead(example_spec(SCHEMA), SCHEMA, dim=30), "dim=30"),
        (lambda: FastTokensHead(example_spec(SCHEMA), SCHEMA, depth=0), "depth=0"),
        (lambda: FastTokensHead(example_spec(SCHEMA), SCHEMA, vocabulary="x"), "tokenizer=dct"),
        (
            lambda: FastTokensHead(example_spec(MEAN_STD), MEAN_STD),
            "action_normalization=mean_std.*use min_max",
        ),
    ],
)
def test_bad_options_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# ------------------------------------------------------------------------------------------------ head


@pytest.mark.parametrize("schema", [SCHEMA, NO_CAMERAS], ids=["cameras", "no_cameras"])
@pytest.mark.parametrize("options", [{"bins": 16}, {"tokenizer": "dct"}], ids=["binning", "dct"])
def test_head_keeps_the_contract(options, schema):
    check_head(lambda spec, schema: FastTokensHead(spec, schema, **options, **TINY), example_spec(schema), schema)


def test_head_with_merges_keeps_the_contract(vocabulary):
    options = {"tokenizer": "dct", "vocabulary": vocabulary}
    check_head(lambda spec, schema: FastTokensHead(spec, schema, **options, **TINY), example_spec(SCHEMA), SCHEMA)


@pytest.mark.parametrize("tokenizer", ["binning", "dct", "merges"])
def test_head_overfits_four_samples(tokenizer, vocabulary):
    torch.manual_seed(0)
    spec = example_spec(SCHEMA)
    features, state = random_features(spec, 4), torch.randn(4, 4)
    actions, is_pad = smooth_chunks(4, 5, 3), torch.zeros(4, 5, dtype=torch.bool)
    options = {"tokenizer": "binning"} if tokenizer == "binning" else {"tokenizer": "dct"}
    options |= {"vocabulary": vocabulary} if tokenizer == "merges" else {}
    head = FastTokensHead(spec, SCHEMA, **options, **TINY)
    optimizer = torch.optim.AdamW(head.parameters(), 4e-3)
    losses = []
    for _ in range(120):
        out = head.loss(features, state, actions, is_pad)
        optimizer.zero_grad()
        out["loss"].backward()
        optimizer.step()
        losses.append(out["loss"].item())
    assert abs(losses[0] - math.log(head.to_logits.out_features)) < 0.5
    assert sum(losses[-10:]) / 10 < losses[0] / 10
    assert out["accuracy"] == 1
    # All tokens are right, so what is left is the tokenizer's own error.
    error = head.eval().act(features, state)["chunk"] - actions
    bound = 1 / 256 if tokenizer == "binning" else math.sqrt(5) / 20
    assert error.abs().max() <= bound + 1e-5


def toy_head():
    """Two tokens of four bins, far from uniform; and one sample's inputs."""
    schema = TenantSchema(state_dim=2, action_dim=2, chunk=1, execute=1, gripper="none")
    spec = example_spec(schema)
    torch.manual_seed(3)
    head = FastTokensHead(spec, schema, bins=4, dim=16, depth=2, num_heads=2).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return head, random_features(spec, 1), torch.randn(1, 2)


def enumerate_sequences(head, features, state):
    """All 16 token pairs and their probabilities by ``evaluate``."""
    pairs = torch.tensor(list(itertools.product(range(4), repeat=2)))
    sample = TensorDict({"trace": {"tokens": pairs}}, [16])
    log_probs, entropy = head.evaluate(features.expand(16), state.expand(16, -1), sample)
    return pairs, log_probs.flatten(1), entropy.flatten(1)


def test_probabilities_of_all_sequences_sum_to_one():
    head, features, state = toy_head()
    pairs, log_probs, entropy = enumerate_sequences(head, features, state)
    probabilities = log_probs.double().sum(1).exp()
    torch.testing.assert_close(probabilities.sum().item(), 1.0, atol=1e-6, rtol=0)
    # Entropy per element: of the first token, then of the second given the first.
    first = log_probs[::4, 0].double().exp()
    torch.testing.assert_close(first.sum().item(), 1.0, atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy[0, 0].double(), -(first * first.log()).sum(), atol=1e-6, rtol=0)
    chain = entropy[0, 0] + (first * entropy[::4, 1].double()).sum()
    torch.testing.assert_close(chain, -(probabilities * probabilities.log()).sum(), atol=1e-6, rtol=0)
    assert probabilities.max() > 0.2 and pairs.shape == (16, 2)


def test_samples_follow_the_probabilities():
    head, features, state = toy_head()
    _, log_probs, _ = enumerate_sequences(head, features, state)
    num = 20000
    noise = torch.randn(num, 1, 2, generator=torch.Generator().manual_seed(0))
    out = head.act(features.expand(num), state.expand(num, -1), noise)
    tokens = out["trace", "tokens"]
    assert tokens.dtype == torch.int64 and torch.equal(head.tokenizer.decode(tokens), out["chunk"].flatten(1))
    counts = torch.bincount(tokens[:, 0] * 4 + tokens[:, 1], minlength=16)
    expected = log_probs.sum(1).exp()
    error = (counts / num - expected).abs()
    assert (error <= 4.5 * (expected * (1 - expected) / num).sqrt() + 1e-4).all()


def test_sampling_is_the_inverse_distribution_function():
    head, features, state = toy_head()
    _, log_probs, _ = enumerate_sequences(head, features, state)
    edges = log_probs[::4, 0].detach().exp().cumsum(0)
    for token in range(4):
        low = 0.0 if token == 0 else edges[token - 1].item()
        middle = norm.ppf((low + min(edges[token].item(), 1)) / 2)
        out = head.act(features, state, torch.tensor([[[middle, 0.0]]], dtype=torch.float32))
        assert out["trace", "tokens"][0, 0] == token
    out = head.act(features, state, torch.full((1, 1, 2), 40.0))
    assert out["trace", "tokens"].tolist() == [[3, 3]] and out["log_probs"].isfinite().all()


@pytest.mark.parametrize("options", [{"bins": 8}, {"tokenizer": "dct"}], ids=["binning", "dct"])
def test_greedy_is_the_argmax_of_the_teacher_forced_pass(options):
    """The cached decoding and one full pass over its tokens agree at every position."""
    spec = example_spec(SCHEMA)
    torch.manual_seed(0)
    head = FastTokensHead(spec, SCHEMA, **options, **TINY).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    features, state = random_features(spec, 4), torch.randn(4, 4)
    tokens, log_probs = head._generate(features, state, None)
    given = torch.nn.functional.pad(tokens, (0, head.num_tokens - tokens.shape[1]))
    logits = head._logits(features, state, given)[:, : tokens.shape[1]]
    assert torch.equal(logits.argmax(-1), tokens)
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).amax(-1), atol=1e-5, rtol=0)
    assert len(tokens.unique()) > 2


def test_decoding_runs_every_position_once(monkeypatch):
    head = FastTokensHead(example_spec(SCHEMA), SCHEMA, bins=8, **TINY).eval()
    run, positions = head._run, []
    monkeypatch.setattr(head, "_run", lambda x, *rest: positions.append(x.shape[1]) or run(x, *rest))
    head.act(random_features(head.feature_spec, 2), torch.randn(2, 4))
    assert positions == [2] + [1] * 14  # BOS and state, then one token at a time


@pytest.mark.parametrize("options", [{"bins": 8}, {"tokenizer": "dct"}], ids=["binning", "dct"])
def test_padded_steps_may_hold_anything(options):
    """Even NaN; and a padded chunk's loss is that of its valid part (binning), or of its last action held (dct)."""
    spec = example_spec(SCHEMA)
    torch.manual_seed(0)
    head = FastTokensHead(spec, SCHEMA, **options, **TINY)
    features, state, actions = random_features(spec, 3), torch.randn(3, 4), torch.rand(3, 5, 3) * 2 - 1
    is_pad = torch.zeros(3, 5, dtype=torch.bool)
    is_pad[1, 2:] = True
    loss = head.loss(features, state, torch.where(is_pad.unsqueeze(-1), torch.nan, actions), is_pad)["loss"]
    loss.backward()
    assert all(p.grad.isfinite().all() for p in head.parameters() if p.grad is not None)
    none = torch.zeros_like(is_pad)
    if "bins" in options:
        log_probs = head.evaluate(
            features, state, TensorDict({"trace": {"tokens": head.tokenizer.encode(actions).flatten(1)}}, [3])
        )[0]
        expected = -log_probs[~is_pad].mean()
    else:
        held = actions.clone()
        held[1, 2:] = actions[1, 1]
        expected = head.loss(features, state, held, none)["loss"]
    torch.testing.assert_close(loss, expected)


def test_dct_loss_counts_tokens_up_to_the_end_token(vocabulary):
    head = FastTokensHead(example_spec(SCHEMA), SCHEMA, tokenizer="dct", vocabulary=vocabulary, **TINY)
    actions, is_pad = smooth_chunks(6, 5, 3), torch.zeros(6, 5, dtype=torch.bool)
    is_pad[5] = True
    tokens, counted = head._targets(actions, is_pad)
    lengths = [len(sequence) for sequence in head.tokenizer.encode(actions)]
    end = head.tokenizer.vocab_size
    assert min(lengths) < 15
    for row in range(5):
        assert counted[row].sum() == min(lengths[row] + 1, 15)
        assert tokens[row, : lengths[row]].max() < end and (tokens[row, lengths[row] :] == end).all()
    assert not counted[5].any()


@pytest.mark.parametrize("tokenizer", ["binning", "merges"])
def test_payload_round_trip(tokenizer, tmp_path):
    """The payload carries the BPE: a head built with another vocabulary of the same size gets the trained one."""
    from safetensors.torch import load_file, save_file

    spec = example_spec(SCHEMA)

    def build(seed):
        torch.manual_seed(seed)
        if tokenizer == "binning":
            return FastTokensHead(spec, SCHEMA, **TINY)
        path = tmp_path / f"{seed}.json"
        DCTTokenizer.fit(smooth_chunks(256, 5, 3, seed), vocab_size=100).save(path)
        return FastTokensHead(spec, SCHEMA, tokenizer="dct", vocabulary=str(path), **TINY)

    source, restored = build(0), build(1)
    save_file(source.state_dict(), tmp_path / "head.safetensors")
    features, state = random_features(spec, 3), torch.randn(3, 4)
    noise = torch.randn(3, *source.noise_shape)
    expected = source.eval().act(features, state, noise)["chunk"]
    assert not torch.equal(restored.eval().act(features, state, noise)["chunk"], expected)
    restored.load_state_dict(load_file(tmp_path / "head.safetensors"), strict=True)
    assert torch.equal(restored.act(features, state, noise)["chunk"], expected)
    copied = copy.deepcopy(source)
    assert torch.equal(copied.act(features, state, noise)["chunk"], expected)
    if tokenizer == "merges":
        assert copied.tokenizer is source.tokenizer
        assert restored.tokenizer.to_bytes() == source.tokenizer.to_bytes()


def test_payload_of_another_tokenizer_is_refused():
    spec = example_spec(SCHEMA)
    binning, dct = FastTokensHead(spec, SCHEMA, **TINY), FastTokensHead(spec, SCHEMA, tokenizer="dct", **TINY)
    with pytest.raises(ValueError, match="tokenizer=dct"):
        binning.set_extra_state(dct.get_extra_state())
    with pytest.raises(ValueError, match=r"DCTTokenizer\.save"):
        dct.set_extra_state(binning.get_extra_state())


def test_dct_is_refused_for_rl():
    head = FastTokensHead(example_spec(SCHEMA), SCHEMA, tokenizer="dct", **TINY)
    assert not head.supports_rl and head.trace_shapes == {}
    assert FastTokensHead.rl_problem({"bins": 8}) is None
    assert "use tokenizer=binning" in FastTokensHead.rl_problem({"tokenizer": "dct"})
    with pytest.raises(ValueError, match="use tokenizer=binning"):
        head.evaluate(random_features(head.feature_spec, 2), torch.zeros(2, 4), TensorDict({}, [2]))


def test_config_file_builds_the_head():
    path = Path(__file__).parents[1] / "conf" / "head" / "fast_tokens.yaml"
    config = yaml.safe_load(path.read_text())
    assert config.keys() >= set(OPTIMIZER_KEYS)
    assert config["_target_"] == "models.heads.fast_tokens.FastTokensHead"
    arguments = {key: value for key, value in config.items() if key not in {*OPTIMIZER_KEYS, "_target_"}}
    FastTokensHead(example_spec(SCHEMA), SCHEMA, **arguments)
