"""The Master on the toy simulator: specs, transactions, low-level verbs, group batching, sessions, kill and resume."""

from __future__ import annotations

import json
import math
import random
import threading

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from served import (
    ROOT,
    Ending,
    make_config,
    running,
    serve_config,
    serving,
    state_of,
    toy_data,
    toy_sft,
    toy_spec,
)

from nexus_lightning.config import ConfigError, dataset_root
from nexus_lightning.producers.demonstrations import (
    DemonstrationReader,
    DemonstrationStream,
    dataset_stats,
    open_dataset,
)
from nexus_lightning.schema import Normalizer
from nexus_lightning.services.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded, SessionLost
from nexus_lightning.services.spec import Compiler, serve_problems

__all__ = ["serve_config", "serving", "toy_data"]  # fixtures


RL = {"task": "rl", "dataset": None, "environment": {"name": "toy"}}


@pytest.fixture(scope="module")
def shared(tmp_path_factory, toy_data):
    """One master for the tests that make tenants of their own."""
    config = make_config(tmp_path_factory.mktemp("shared"), toy_data, "queues.inference.timeout_s=0.5")
    with running(config) as master:
        yield master


@pytest.fixture(scope="module")
def compiler(tmp_path_factory, toy_data):
    return Compiler(make_config(tmp_path_factory.mktemp("compiler"), toy_data))


def learnt(state: dict) -> dict:
    """Weights, moments and random state, without the counters."""
    return {key: state[key] for key in ("tensors", "optimizer", "rng")}


def observations(rows: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        "observation/image/camera": generator.integers(0, 255, (rows, 3, 32, 32), dtype=np.uint8),
        "observation/state": generator.normal(size=(rows, 4)).astype(np.float32),
    }


def sft_batch(rows: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    action = np.random.default_rng(seed + 1).uniform(-0.5, 0.5, (rows, 2, 2)).astype(np.float32)
    return {**observations(rows, seed), "action": action}


# ------------------------------------------------------------------------------------------------------------- specs


@pytest.mark.parametrize(
    "change, text",
    [
        ({"head": {"name": "mlp", "_target_": "os.system"}}, "not a name"),
        ({"head": {"name": "mlp", "hidden_dim": 10**9}}, "at most 2048"),
        ({"head": {"name": "mlp", "pickle": 1}}, "may be set"),
        ({"head": {"name": "none"}}, "choose one of flow_matching, mlp"),
        ({"schema": {"state_dim": 4, "action_dim": 2, "chunk": 2, "execute": 3}}, "execute=3"),
        ({"schema": {"state_dim": 4, "action_dim": 2, "chunk": 2, "execute": 2, "colour": 1}}, "colour"),
        ({"schema": {"state_dim": 4, "action_dim": 2, "chunk": 10**6, "execute": 2}}, "at most 512"),
        ({"schema": {"prompt": "${oc.env:HOME} {instruction}"}}, "without ${...}"),
        ({"priority": 1}, "from -100 to 0"),  # above the others it would take every job
        ({"head": {"name": "mlp", "num_layers": 1.5}}, "an integer"),
        ({"head": {"name": "mlp", "activation": "magic"}}, "choose one of silu, tanh"),
        ({"owner": "root"}, "unknown key"),
    ],
)
def test_a_spec_names_entries_and_sets_allowed_keys_and_nothing_else(compiler, change, text):
    with pytest.raises(InvalidRequest) as raised:
        compiler.tenant("t", toy_spec(**change))
    assert text in "\n".join(raised.value.details)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"dataset": {"name": "toy", "root": "/etc"}}, "may be set"),
        ({"dataset": None}, "needs a dataset"),
        ({"task": "teleoperate"}, "choose one of"),
        ({"target_jobs": None}, "is required"),
        ({"algorithm": {"name": "ppo"}}, "algorithm=PPO: trains task rl; set workload.task=rl"),
        ({"eval": {"episodes": 10**6}}, "at most 1000"),
        ({"environment": {"name": "maniskill", "task": ["PushCube-v1"]}}, "choose one of PushCube-v1"),
        ({"environment": {"name": "toy", "num_envs": 500}}, "at most 32"),
        ({"task": "rl", "environment": {"name": "toy"}}, "algorithm"),
        ({"init_from": {"path": "/"}}, "unknown key"),
        ({**RL, "algorithm": {"name": "ppo", "chunks_per_job": 8, "epochs": 10**6}}, "at most 2000"),
        ({**RL, "algorithm": {"name": "ppo", "chunks_per_job": 10**6, "minibatch_size": 10**9}}, "at most 2 GB"),
    ],
)
def test_a_workload_is_checked_before_anything_is_built(compiler, change, text):
    tenant = compiler.tenant("t", toy_spec())
    with pytest.raises(InvalidRequest) as raised:
        compiler.workload("t", tenant, toy_sft(**change))
    assert text in "\n".join(raised.value.details)


def test_every_unknown_key_of_a_request_is_named_with_the_nearest(compiler):
    schema = {"state_dim": 4, "action_dim": 2, "chunk": 2, "execute": 2, "colour": 1, "control_hertz": 5}
    with pytest.raises(InvalidRequest) as raised:
        compiler.tenant("t", toy_spec(schema=schema))
    assert [line.split(" valid")[0] for line in raised.value.details] == [
        "spec.schema.colour=1: spec.schema has no such key;",
        "spec.schema.control_hertz=5: spec.schema has no such key; did you mean control_hz?",
    ]
    work = {
        **RL,
        "target_jobs": 2,
        "algorithm": {"name": "ppo", "chunks_per_job": 8, "clip_ratio": 0.3},
        "eval": {"n_episodes": 3},
    }
    with pytest.raises(InvalidRequest) as raised:
        compiler.workload("t", compiler.tenant("t", toy_spec()), work)
    text = "\n".join(raised.value.details)
    assert "workload.algorithm.clip_ratio=0.3: workload.algorithm has no such key; did you mean clip_epsilon?" in text
    assert "workload.eval.n_episodes=3: workload.eval has no such key; did you mean episodes?" in text


def test_every_unknown_key_of_the_servers_configuration_is_named(tmp_path):
    """Those of the registry, which a request would only meet later, too."""
    unknown = [
        "+limits.max_tenant=3",
        "+registry.heads.mlp.config.hidden=3",
        "+registry.heads.mlp.chioces={loss: [l1]}",
        "+registry.environments.toy.config.num_env=3",
        "+registry.environments.toy.config.simulator.horizn=3",
        "+registry.datasets.toy.config.record.episode=3",
        "+backbone.blnd=true",
        "registry.heads.flow_matching.allow=[lr,nois]",
        "registry.environments.libero.allow=[simulator.suit,num_env]",
        "registry.environments.libero.from_schema=[camera]",
    ]
    with pytest.raises(ConfigError) as raised:
        make_config(tmp_path, tmp_path, *unknown)
    for expected in (
        "limits.max_tenant=3: limits has no such key; did you mean max_tenants",
        "registry.heads.mlp.config.hidden=3: ChunkMLPHead has no such key; did you mean hidden_dim?",
        "registry.heads.mlp.chioces=",
        "registry.environments.toy.config.num_env=3: registry.environments.toy.config has no such key; did you",
        "registry.environments.toy.config.simulator.horizn=3: ToySimulator has no such key; did you mean horizon?",
        "registry.datasets.toy.config.record.episode=3: registry.datasets.toy.config.record has no such key; did you",
        "backbone.blnd=True: EffNetMiniLM has no such key; did you mean blind?",
        "registry.heads.flow_matching.allow.nois=None: FlowMatchingHead has no such key;",
        "registry.environments.libero.allow.simulator.suit=None: LiberoSimulator has no such key; did you mean suite",
        "registry.environments.libero.allow.num_env=None: registry.environments.libero.allow has no such key",
        "registry.environments.libero.from_schema.camera=None: a schema has no such key; did you mean cameras",
    ):
        assert any(line.startswith(expected) for line in raised.value.problems), (expected, raised.value.problems)


@pytest.mark.parametrize("name, dataset", [("maniskill_sft", "maniskill_pushcube"), ("libero", "libero_object_6")])
def test_the_registry_describes_the_simulators_tenants_of_train_py(compiler, name, dataset):
    """Their schemas fit the entries, with the simulator's own checks; nothing is started."""
    schema = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "tenant" / f"{name}.yaml").schema)
    tenant = compiler.tenant("t", toy_spec(schema=schema, head={"name": "flow_matching"}))
    request = {"task": "sft", "dataset": {"name": dataset}, "target_jobs": 2, "eval": {"episodes": 2}}
    config = compiler.workload("t", tenant, request)
    assert config.environment is not None and config.eval.episodes == 2
    assert config.environment.simulator["cameras"] == schema["cameras"]


def test_the_operators_own_mistakes_are_named(serve_config):
    config = serve_config()
    config.registry.heads["mlp"].allow.append("_target_")
    config.registry.datasets["toy"].environment = "nowhere"
    config.trainer.max_jobs, config.queues.training.journal = 3, True
    found = "\n".join(serve_problems(config))
    assert all(text in found for text in ("name a class", "nowhere", "max_jobs=3", "journal"))


# ------------------------------------------------------------------------------------------------------ transactions


def test_a_creation_that_fails_leaves_nothing(shared):
    runtime, free = shared.runtime, shared.admission.free
    shared.admission.free = 10
    for _ in range(3):
        with pytest.raises(QuotaExceeded, match="is free"):
            shared.create_tenant("big", toy_spec())
    shared.admission.free = free
    for tables in (runtime.slots, runtime.served.tenants(), runtime.tenancy.status.tenants, shared.module.heads):
        assert "big" not in tables
    described = shared.create_tenant("big", toy_spec())
    assert described["state"] == "idle" and described["memory_bytes"] == free - shared.admission.free > 0
    assert described["signature"] and described["policy_version"] == 0
    with pytest.raises(Conflict, match="there already"):
        shared.create_tenant("big", toy_spec())
    shared.delete_tenant("big")
    assert shared.admission.free == free and "big" not in runtime.slots
    with pytest.raises(NotFound, match="unknown"):
        shared.predict("big", observations(), ["x"] * 3)


def test_what_runs_beside_the_actor_draws_from_no_global_generator(compiler, shared):
    """A training step swaps its tenant's stream into torch's generator: another thread that drew would move it on."""
    shared.create_tenant("quiet", toy_spec())
    slot = shared.runtime.slots["quiet"]
    config = compiler.workload("quiet", compiler.tenant("quiet", toy_spec()), toy_sft())
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    reader, stats = shared._open_data(slot, config)
    assert reader is not None and stats is not None and len(reader.read(torch.arange(3))) == 3
    shared.rollout("quiet", {"environment": {"name": "toy"}, "episodes": 2})
    shared.predict("quiet", observations(), ["go"] * 3)
    opened = shared.open_session("quiet", {"environment": {"name": "toy"}})["session_id"]
    shared.session_reset("quiet", opened, {"seed": 1}, {})
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    shared.delete_tenant("quiet")


# --------------------------------------------------------------------------------------------------------- low level


def test_an_algorithm_written_with_the_verbs_is_the_built_in_one_bit_for_bit(shared):
    """SFT with a cosine schedule and clipping: the client reads the demonstrations itself."""
    head = {**toy_spec()["head"], "lr_schedule": "cosine", "grad_clip_norm": 0.5}
    data = {"name": "toy", "batch_size": 8, "batches_per_job": 2}
    work = toy_sft(target_jobs=2, dataset=data, features={"reuse": "never"})
    for name in ("builtin", "custom"):
        shared.create_tenant(name, toy_spec(head=head, seed=11))
    end = Ending()
    shared.submit("builtin", work, on_end=end)
    assert end.wait()["status"] == "completed"

    config = shared.compiler.workload("custom", shared.compiler.tenant("custom", toy_spec(head=head)), work)
    slot = shared.runtime.slots["custom"]
    schema = slot.spec.schema
    dataset = open_dataset(config.dataset, schema, dataset_root(config, shared.config.data_dir))
    normalizer = Normalizer(schema, *dataset_stats(dataset, config.dataset, schema)).state_dict()
    shared.load("custom", {f"normalizer.{name}": value.numpy() for name, value in normalizer.items()})
    reader = DemonstrationReader(
        dataset, config.dataset, schema, shared.module.backbone, slot.head.feature_spec, store=None
    )
    stream, total = DemonstrationStream(reader, slot.spec.seed), 2 * config.dataset.batches_per_job
    size = config.dataset.batch_size
    for step in range(total):
        batch = stream.read(step * size, size)
        arrays = {
            "observation/image/camera": batch["observation", "image", "camera"].numpy(),
            "observation/state": batch["observation", "state"].numpy(),
            "action": batch["actions"].numpy(),
            "is_pad": batch["is_pad"].numpy(),
        }
        instructions = list(batch["language_instruction"])
        lr = 1e-3 * (0.5 * (1 + math.cos(math.pi * min(1.0, step / total))))
        if step % 2:
            figures = shared.train_batch("custom", arrays, instructions=instructions, options={"lr": lr})
            assert figures["loss:mean"] > 0
        else:
            shared.forward_backward("custom", arrays, instructions=instructions)
            shared.optim_step("custom", lr=lr)
    builtin, custom = state_of(shared, "builtin"), state_of(shared, "custom")
    assert learnt(builtin) == learnt(custom)
    assert shared.describe("custom")["policy_version"] == total + 1
    for name in ("builtin", "custom"):
        shared.delete_tenant(name)


def test_what_is_wrong_with_a_low_level_call_is_that_calls_error(shared):
    for name in ("mine", "theirs"):
        shared.create_tenant(name, toy_spec())
    before, texts = state_of(shared, "mine"), ["go"] * 3
    with pytest.raises(InvalidRequest, match="NaN"):
        shared.train_batch(
            "mine", {**sft_batch(), "action": np.full((3, 2, 2), np.nan, np.float32)}, instructions=texts
        )
    with pytest.raises(InvalidRequest, match="expected"):
        shared.train_batch("mine", {**sft_batch(), "action": np.zeros((3, 2, 7), np.float32)}, instructions=texts)
    with pytest.raises(InvalidRequest, match="camera mismatch"):
        shared.forward_backward("mine", {"observation/state": np.zeros((3, 4), np.float32)}, instructions=texts)
    with pytest.raises(InvalidRequest, match="choose one of awr, grpo, ppo, reinforce, sft"):
        shared.forward_backward("mine", sft_batch(), instructions=texts, loss="magic")
    with pytest.raises(Conflict, match="no gradients"):
        shared.optim_step("mine")
    assert state_of(shared, "mine") == before
    shared.forward_backward("mine", sft_batch(), instructions=texts)
    shared.runtime.slots["mine"].head.zero_grad()
    next(shared.runtime.slots["mine"].head.parameters()).grad = torch.full_like(
        next(shared.runtime.slots["mine"].head.parameters()), float("inf")
    )
    with pytest.raises(InvalidRequest, match="not finite"):
        shared.optim_step("mine")
    assert state_of(shared, "mine")["tensors"] == before["tensors"] and shared.describe("mine")["state"] == "idle"

    # jobs: reserve, put, mark, train; a foreign tenant sees nothing of them
    job = shared.reserve("mine", sample_count=3, metadata={"instructions": "go", "batch_size": 2})["job"]
    shared.queue_put("mine", sft_batch(), partition_id=job["partition_id"])
    with pytest.raises(Conflict, match="not ready"):
        shared.train_job("mine", job_id=job["job_id"])
    for call in (
        lambda: shared.mark("theirs", job_id=job["job_id"], state="ready"),
        lambda: shared.train_job("theirs", job_id=job["job_id"]),
        lambda: shared.queue_clear("theirs", partition_id=job["partition_id"]),
        lambda: shared.queue_get_meta("theirs", partition_id=job["partition_id"], fields=["action"]),
    ):
        with pytest.raises(NotFound, match="unknown"):
            call()
    with pytest.raises(Conflict, match="reserved jobs"):
        shared.submit("mine", toy_sft())
    shared.mark("mine", job_id=job["job_id"], state="ready")
    assert shared.train_job("mine", job_id=job["job_id"])["steps"] == 2
    assert shared.describe("mine")["policy_version"] == 1 and not shared.runtime.queue.partitions("mine")

    # a partition of one's own, derived columns, a lease of the client
    shared.queue_put("mine", {"return": np.arange(4, dtype=np.float32)}, partition_id="notes")
    meta = shared.queue_get_meta("mine", partition_id="notes", fields=["return"], batch_size=3)["metadata"]
    assert meta["rows"] == [0, 1, 2] and shared.queue_get("mine", {"metadata": meta})["return"].tolist() == [0, 1, 2]
    shared.queue_put("mine", {"advantage": np.ones(3, np.float32)}, metadata=meta)
    with pytest.raises(NotFound, match="delivery"):
        shared.queue_get("theirs", {"metadata": meta})
    assert shared.queue_clear("mine", partition_id="notes")["bytes"] > 0
    job = shared.reserve("mine", sample_count=1)["job"]
    shared.mark("mine", job_id=job["job_id"], state="needs_advantages")
    assert shared.lease_next("mine") == {"job": None}
    shared.mark("mine", job_id=job["job_id"], state="ready")
    leased = shared.lease_next("mine")["job"]
    assert leased["job_id"] == job["job_id"] and leased["state"] == "leased"
    done = shared.complete("mine", job_id=job["job_id"], lease_id=leased["lease_id"])["job"]
    assert done["state"] == "completed"
    assert shared.fail("mine", job_id=job["job_id"], reason="late")["job"]["state"] == "completed"
    for name in ("mine", "theirs"):
        shared.delete_tenant(name)


def test_rollouts_come_back_and_train_by_ppo(shared):
    shared.create_tenant("rl", toy_spec())
    arrays, meta = shared.rollout("rl", {"environment": {"name": "toy"}, "episodes": 3, "num_envs": 2})
    rows = len(arrays["reward"])
    assert meta["policy_version"] == 0 and len(meta["instructions"]) == 3 and meta["seeds"] == [0, 1, 2]
    assert arrays["observation/image/camera"].shape == (rows, 3, 32, 32)
    assert arrays["final/observation/state"].shape == (3, 4)
    assert set(arrays["episode"].tolist()) == {0, 1, 2}
    ends = np.flatnonzero(np.diff(arrays["episode"], append=-1))
    assert all(arrays["terminated"][i] or arrays["truncated"][i] for i in ends)
    again, _ = shared.rollout("rl", {"environment": {"name": "toy"}, "episodes": 3, "num_envs": 1})
    names = {"observation/state", "observation/image/camera", "chunk", "log_probs", "state_value", "executed"}
    batch = {name: arrays[name] for name in names}
    batch |= {"advantage": np.ones((rows, 1), np.float32), "value_target": np.zeros((rows, 1), np.float32)}
    texts = [meta["instructions"][i] for i in arrays["episode"]]
    figures = shared.train_batch("rl", batch, instructions=texts, loss="ppo", loss_options={"entropy_coef": 0.01})
    assert figures["ratio:mean"] == pytest.approx(1.0, abs=1e-5) and figures["policy_version"] == 1
    with pytest.raises(InvalidRequest, match="unknown to loss"):
        shared.train_batch(
            "rl", {**batch, "action": np.zeros((rows, 2, 2), np.float32)}, instructions=texts, loss="ppo"
        )
    assert again["final/observation/state"].shape == (3, 4)
    shared.delete_tenant("rl")


# --------------------------------------------------------------------------------------------- inference and payloads


def test_predictions_of_two_tenants_share_backbone_passes(shared):
    names = ("left", "right")
    for i, name in enumerate(names):
        shared.create_tenant(name, toy_spec(seed=i))
    before = shared.stats()["inference"]["shared_backbone_calls"]
    alone = {name: shared.predict(name, observations(seed=1), ["go"] * 3) for name in names}
    found: dict[str, list] = {name: [] for name in names}

    def client(name: str) -> None:  # each comes back at once: the queue learns to wait for both (T is 0.5 s here)
        for _ in range(6):
            found[name].append(shared.predict(name, observations(seed=1), ["go"] * 3))

    threads = [threading.Thread(target=client, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    figures = shared.stats()["inference"]
    assert figures["shared_backbone_calls"] > before and figures["call_sizes"].get(6, 0) > 0
    for name in names:
        assert len(found[name]) == 6
        for answer in found[name]:
            np.testing.assert_allclose(answer["action"], alone[name]["action"], atol=1e-6)
    assert not np.allclose(alone["left"]["action"], alone["right"]["action"])
    sampled = [shared.predict("left", observations(), ["go"] * 3, deterministic=False, seed=s) for s in (1, 1, 2)]
    assert (sampled[0]["chunk"] == sampled[1]["chunk"]).all() and (sampled[0]["chunk"] != sampled[2]["chunk"]).any()
    with pytest.raises(InvalidRequest, match="seed"):
        shared.predict("left", observations(), ["go"] * 3, deterministic=False)
    with pytest.raises(InvalidRequest, match="NaN"):
        shared.predict("left", {**observations(), "observation/state": np.full((3, 4), np.nan)}, ["go"] * 3)
    for name in names:
        shared.delete_tenant(name)


def test_versions_are_saved_loaded_and_served_side_by_side(shared):
    shared.create_tenant("v", toy_spec())
    seen, texts = observations(seed=4), ["go"] * 3
    actions = {0: shared.predict("v", seen, texts)["action"]}
    shared.save("v")
    saved = state_of(shared, "v")
    for version in (1, 2):
        shared.train_batch("v", sft_batch(seed=version), instructions=texts)
        actions[version] = shared.predict("v", seen, texts)["action"]
    assert shared.load_weights("v", version=0) == {"policy_version": 0}
    answer = shared.predict("v", seen, texts)
    assert (answer["action"] == actions[0]).all() and answer["policy_version"].flatten().tolist() == [0] * 3
    with pytest.raises(NotFound, match="not served"):
        shared.predict("v", seen, texts, policy_version=1)
    with pytest.raises(NotFound, match="no payload"):
        shared.load_weights("v", version=1)
    shared.load_weights("v", version=2)
    assert (shared.predict("v", seen, texts)["action"] == actions[2]).all()
    assert shared.runtime.served.versions("v") == [2]
    path = shared.export("v")
    assert json.loads((path / "manifest.json").read_text())["policy_version"] == 2
    assert [p["policy_version"] for p in shared.payloads("v")] == [0, 2] and shared.payload_path("v", 2) == path
    assert shared.load("v", 0) == {"policy_version": 3}
    loaded = state_of(shared, "v")
    assert {k: loaded[k] for k in ("tensors", "optimizer", "rng")} == {
        k: saved[k] for k in ("tensors", "optimizer", "rng")
    }
    parameters = shared.export_params("v")
    name = next(name for name in parameters if name.startswith("head."))
    shared.load("v", {name: parameters[name] + 1})
    assert (shared.export_params("v")[name] == parameters[name] + 1).all()
    with pytest.raises(InvalidRequest, match="unknown parameter"):
        shared.load("v", {"backbone.colour": np.zeros(3)})
    shared.delete_tenant("v")


def test_environment_sessions_belong_to_their_scope_and_end_with_their_lease(shared):
    shared.create_tenant("s", toy_spec())
    opened = shared.open_session("s", {"environment": {"name": "toy", "horizon": 3}, "lease_s": 60.0})
    session = opened["session_id"]
    assert opened["cameras"] == ["camera"] and opened["state_dim"] == 4 and opened["max_steps"] == 3
    _, first = shared.session_reset("s", session, {"seed": 7}, {})
    assert first["image/camera"].shape == (3, 32, 32)
    step = {"action": np.zeros(2, np.float32)}
    meta, _ = shared.session_step("s", session, {"request_seq": 1}, step)
    assert meta == shared.session_step("s", session, {"request_seq": 1}, step)[0]
    meta, arrays = shared.session_batch_step(
        "s", session, {"request_seq": 2}, {"actions": np.zeros((9, 2), np.float32)}
    )
    assert meta["steps"] == 2 and meta["truncated"] and arrays["rewards"].shape == (2,)
    with pytest.raises(NotFound, match="unknown"):
        shared.session_reset("elsewhere", session, {"seed": 0}, {})
    with pytest.raises(InvalidRequest, match="choose one of"):
        shared.open_session("s", {"environment": {"name": "os.system"}})
    next(iter(shared._session_tables.values())).expire(1e12)
    with pytest.raises(SessionLost):
        shared.session_reset("s", session, {"seed": 0}, {})
    shared.delete_tenant("s")
