"""``placement=ray`` on a real cluster of two local nodes: the same results as without, and what a lost machine does."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from fakes import FakeBackbone
from safetensors.torch import save
from tensordict import NonTensorStack, TensorDict

from nexus_lightning.backbone import sharing_key
from nexus_lightning.checkpoint import read_payload, resolve_payload
from nexus_lightning.config import ConfigError, InferenceQueueConfig, validate
from nexus_lightning.environment import SimulatorDied, SimulatorEnv, SimulatorError
from nexus_lightning.features.reuse import blank_observation
from nexus_lightning.inference.policies import ServedPolicies
from nexus_lightning.inference.replicas import InferenceReplica
from nexus_lightning.inference.requests import Ask, Session
from nexus_lightning.inference.server import TenantInferenceServer
from nexus_lightning.placement.cluster import connected
from nexus_lightning.placement.plan import resolve
from nexus_lightning.run.schedule import Schedule
from nexus_lightning.schema import Normalizer, TenantSchema
from nexus_lightning.simulator import RaySimulator
from nexus_lightning.tenant import TenantSpec, build_slot
from nexus_lightning.trainer import train

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra [ray] is not installed")
CPUS = 4  # of each node
BACKBONE = {"_target_": "fakes.FakeBackbone", "seed": 0, "dim": 8}


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray")
    from ray_cluster import two_nodes

    with two_nodes(CPUS) as nodes:
        yield nodes


@pytest.fixture
def ray_overrides(cluster):
    return ["placement=ray", f"placement.ray.address={cluster.address}", "placement.ray.num_cpus_per_simulator=0.5"]


def fake_schema(**changes):
    settings = {"state_dim": 4, "action_dim": 2, "chunk": 3, "execute": 3, "gripper": "close_positive", **changes}
    return TenantSchema(**settings)


def make_env(num_envs=2, worker=RaySimulator, simulator=None, **kwargs):
    config = {"_target_": "fake_simulator.SteadyFake", "horizon": 6, **(simulator or {})}
    schema = fake_schema(cameras=("front",), image_size=16)
    config["cameras"] = ["front"]
    return SimulatorEnv(config, schema, Normalizer(schema), num_envs, tenant="t", worker=worker, seed=3, **kwargs)


def make_config(compose, *overrides, tenants=("a",), **simulator):
    """PPO tenants with two light simulators each, evaluated at the start, once more and at the end."""
    every = []
    for name in tenants:
        key = f"tenants.{name}"
        every += [
            f"+tenant@{key}=toy",
            f"{key}.schema.image_size=16",
            f"{key}.schema.gripper=close_positive",
            f"{key}.environment.num_envs=2",
            f"{key}.environment.inline=false",
            f"{key}.algorithm.chunks_per_job=4",
            f"{key}.algorithm.minibatch_size=4",
            f"{key}.algorithm.epochs=2",
            f"{key}.eval.episodes=2",
            f"{key}.eval.every_n_jobs=2",
            f"{key}.target_jobs=3",
            f"{key}.max_in_flight=1",
        ]
    config = compose(*every, "trainer.enable_progress_bar=false", *overrides)
    config.backbone = dict(BACKBONE)
    for tenant in (config.tenants[name] for name in tenants):
        given = {"horizon": 6, "goal": 1.0, "step_reward": 0.1, "cameras": ["camera"], **simulator}
        tenant.environment.simulator = {"_target_": "fake_simulator.SteadyFake", **given}
    return config


def play(env, steps=4):
    """Observations, rewards and ends of some steps with fixed actions, and resets where an episode ended."""
    generator = torch.Generator().manual_seed(0)
    td, seen = env.reset(), []
    for _ in range(steps):
        td["vla_action", "chunk"] = torch.randn(env.num_envs, 3, 2, generator=generator)
        td = env.step(td)["next"]
        seen += [td[key].clone() for key in ("reward", "done", "executed", ("observation", "state"), "episode_seed")]
        seen.append(td["observation", "image", "front"].clone())
        if bool(td["done"].any()):
            td.set("_reset", td["done"].clone())
            td = env.reset(td)
    return seen


def where(worker):
    """Node id of a simulator's actor."""
    import ray

    return ray.get(worker._actor.__ray_call__.remote(lambda actor: ray.get_runtime_context().get_node_id()))


# ----------------------------------------------------------------------------------------------- refused before a start


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["placement.ray.address=auto"], "placement.ray.address=auto: would attach to any cluster"),
        (["placement.ray.address=ray://h:1"], "give host:port of the cluster's head"),
        (
            ["placement.ray.address=h:1", "placement.ray.inference_replicas=-1"],
            "inference_replicas=-1: must be at least 0",
        ),
        (["placement.ray.address=h:1", "placement.ray.num_cpus_per_simulator=0"], "must be positive"),
    ],
)
def test_what_no_cluster_can_have_is_refused(compose, monkeypatch, overrides, message):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=message):
        validate(make_config(compose, "placement=ray", *overrides))


def test_an_address_is_required_and_keys_are_checked(compose):
    with pytest.raises(ConfigError, match=r"placement\.ray\.address: a value is required"):
        make_config(compose, "placement=ray")
    with pytest.raises(Exception, match="num_cpus_per_env"):
        make_config(compose, "placement=ray", "placement.ray.address=h:1", "placement.ray.num_cpus_per_env=1")


def test_a_missing_package_is_named_with_its_extra(compose, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ray" else found(name, *a))
    with pytest.raises(ConfigError, match=r"package ray is missing; pip install 'nexus-lightning\[ray\]'"):
        validate(make_config(compose, "placement=ray", "placement.ray.address=h:1"))


def test_auto_is_what_the_user_set(compose, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    validate(make_config(compose, "placement=ray", "placement.ray.address=auto"))


@needs_ray
def test_a_cluster_without_use_is_refused(compose):
    config = make_config(compose, "placement=ray", "placement.ray.address=h:1", "tenants.a.environment.inline=true")
    with pytest.raises(ConfigError, match="nothing would run on the cluster"):
        train(config, FakeBackbone())


@needs_ray
def test_a_cluster_that_is_not_there(compose, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = make_config(compose, "placement=ray", f"placement.ray.address=127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: cannot be reached"):
        train(config, FakeBackbone())
    assert not (tmp_path / "outputs").exists()


# ----------------------------------------------------------------------------------------------------------- simulators


def test_too_few_resources_are_refused_before_anything_is_built(compose, cluster, ray_overrides, tmp_path):
    config = make_config(compose, *ray_overrides, "placement.ray.num_cpus_per_simulator=5")
    with pytest.raises(ConfigError) as error:
        train(config, FakeBackbone())
    text = str(error.value)
    assert "no machine of the cluster has the 5 CPU that one simulator reserves" in text
    assert "needs 10 CPU (2 simulators x 5), the cluster has 8 free" in text
    assert not (tmp_path / "outputs").exists()


@pytest.fixture
def driver(compose, ray_overrides):
    """This process as a driver of the cluster."""
    config = make_config(compose, *ray_overrides)
    with connected(config, resolve(config)):
        yield


def test_simulators_on_two_nodes_give_what_inline_ones_give(cluster, driver):
    env, local = make_env(2, max_memory_gb=0.001), make_env(2, worker=None, inline=True)
    assert all(torch.equal(a, b) for a, b in zip(play(env, 2), play(local, 2), strict=True))
    assert len({where(worker) for worker in env._workers}) == 2
    assert env.recycled == 2  # every episode had simulators of its own
    env.close()
    assert env.is_closed and not any(env._workers)


def test_a_broken_simulator_is_told_with_its_tenant_and_rebuilt(driver):
    env = make_env(1, simulator={"crash_at": 2})
    with pytest.raises(SimulatorDied, match=r"tenant 't': simulator 0 died .*its Ray actor is gone"):
        play(env)
    env.reset()
    assert env._workers[0].alive
    env.close()
    env = make_env(1, simulator={"raise_at": 2})
    with pytest.raises(SimulatorError, match="the fake gripper broke"):
        play(env)
    env = make_env(1, simulator={"hang_at": 2}, step_timeout_s=0.5)
    with pytest.raises(SimulatorDied, match=r"no answer within 0 s|no answer within 1 s"):
        play(env)
    env.close()


def test_simulators_of_a_lost_node_are_rebuilt_on_another(cluster, driver):
    from ray_cluster import add_node

    third = add_node(cluster, 1, "third")
    on_third = partial(RaySimulator, num_cpus=0.5, resources={"third": 0.1})
    lost = make_env(1, worker=on_third, simulator={"horizon": 10**6})
    kept = make_env(1)
    lost.reset(), kept.reset()
    node = where(lost._workers[0])
    cluster.remove_node(third, allow_graceful=False)
    with pytest.raises(SimulatorDied, match="tenant 't'"):
        for _ in range(300):  # its workers end a moment after the node's own processes
            lost.step(lost.fake_tensordict().zero_())
            time.sleep(0.1)
    lost._kind = RaySimulator
    lost.reset()
    assert where(lost._workers[0]) != node
    assert len(play(kept)) > 0
    lost.close(), kept.close()


# ------------------------------------------------------------------------------------------------ replica, without Ray


@pytest.fixture
def served(compose):
    """A spec, versions 0 to 4 of its head as ``(digest, weights)``, and what a server here answers with each."""
    spec = TenantSpec.compile("a", make_config(compose).tenants["a"], 0)
    backbone = FakeBackbone()
    slot = build_slot(spec, backbone)
    policies, weights, answers = ServedPolicies(backbone), [], []
    observation = blank_observation(spec.schema)
    observation["state"] = torch.ones(1, 4)
    request = TensorDict({"observation": observation, "language_instruction": NonTensorStack("go")}, [1])
    with TenantInferenceServer(policies) as server:
        for version in range(5):
            with torch.no_grad():
                next(slot.head.parameters()).add_(0.1)
            digest = policies.publish("a", version, slot.head, slot.normalizer, spec.schema)
            parts = {"head": slot.head, "normalizer": slot.normalizer}
            tensors = {f"{name}.{k}": v.clone() for name, part in parts.items() for k, v in part.state_dict().items()}
            weights.append((digest, save(tensors)))
            answers.append(server.client("a", sample=False)(request.clone())["vla_action", "chunk"])
    return spec, backbone.fingerprint, weights, answers, request


def test_a_replica_answers_with_the_same_bits_once_it_was_given_the_version(served):
    spec, fingerprint, weights, answers, request = served
    settings = (fingerprint, {"a": spec}, InferenceQueueConfig(), 1, False)
    with pytest.raises(RuntimeError, match="the backbone built here has fingerprint"):
        InferenceReplica({**BACKBONE, "seed": 1}, *settings)
    replica = InferenceReplica(BACKBONE, *settings)
    group = sharing_key(spec.schema, "tokens")
    given = request["observation"], request.get("language_instruction")

    def ask(version, digest=None):
        asked = Ask(Session(group), "a", version, "act", 1, *given, noise=None, keep_features=False)
        return asyncio.run(replica.act("session", group, digest or weights[version][0], asked))

    def give(version, digest=None):
        asyncio.run(replica.give("a", version, digest or weights[version][0], weights[version][1]))

    assert ask(3) is None
    with pytest.raises(RuntimeError, match="tenant 'a': version 3 arrived at a replica with digest"):
        give(3, digest="0" * 64)
    for version in (3, 1, 0):  # an older one, which an evaluation has pinned, may come later
        give(version)
        answer, answered_by = ask(version)
        assert torch.equal(answer["vla_action", "chunk"], answers[version]) and answered_by == ("a", version)
    with pytest.raises(RuntimeError, match="version 3 has digest"):
        ask(3, digest="0" * 64)
    give(4)  # there is room for three: 1 was used least recently
    assert ask(1) is None and all(ask(version) for version in (0, 3, 4))
    assert replica.policies.versions("a") == [0, 3, 4]
    replica._server.shutdown()


# ------------------------------------------------------------------------------------------------------------- training


def weights_of(summary, tenant):
    return read_payload(resolve_payload(Path(summary["run_dir"]) / "tenants" / tenant)).tensors


def same_run(a, b, tenant):
    ours, theirs = weights_of(a, tenant), weights_of(b, tenant)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert a["tenants"][tenant] == b["tenants"][tenant]  # evaluations, versions, counts


def test_a_run_on_the_cluster_trains_the_same_bits(compose, ray_overrides, tmp_path):
    """Tenant a loses a simulator in the middle of a rollout and goes on; b's always end, and it alone is taken out."""
    local = train(make_config(compose), FakeBackbone())
    config = make_config(compose, *ray_overrides, "placement.ray.max_restarts=1", tenants=("a", "b"))
    config.tenants["a"].environment.simulator["crash_once"] = str(tmp_path / "crashed")
    config.tenants["b"].environment.simulator["crash_at"] = 2
    config.tenants["b"].environment.num_envs = 1
    remote = train(config, FakeBackbone())
    assert (tmp_path / "crashed").exists()
    same_run(local, remote, "a")
    assert remote["tenants"]["b"]["quarantined"].startswith("SimulatorDied: tenant 'b': simulator")
    events = [json.loads(line) for line in (Path(remote["run_dir"]) / "events.jsonl").read_text().splitlines()]
    assert [e["tenant"] for e in events if e.get("kind") == "begun_again"].count("a") == 1


@pytest.mark.slow
def test_replicas_and_collectors_on_the_cluster_train_the_same_bits(compose, cluster, ray_overrides, monkeypatch):
    """Between the rollouts of the RL tenant a replica is lost, then its collector, then a whole machine: everything is
    asked again elsewhere. The supervised tenant is evaluated on the cluster and does not notice."""
    import ray

    def lose(schedule, job):
        member, cursor = schedule.tenancy.members[job.tenant_id], job.metadata["cursor"]
        if job.tenant_id == "a" and cursor == 1:
            ray.kill(schedule.shared.fleet.actors[0], no_restart=True)
        if job.tenant_id == "a" and cursor == 2:
            ray.kill(member.producers[0].remote._collector.remote_collectors[0])
        if job.tenant_id == "a" and cursor == 3:
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        return read(schedule, job)

    def config(*overrides):
        supervised = ["+tenant@tenants.s=toy_sft", "tenants.s.target_jobs=3", "tenants.s.eval.every_n_jobs=2"]
        made = make_config(compose, *supervised, "tenants.s.eval.episodes=2", "tenants.a.target_jobs=4", *overrides)
        return made

    local = train(config(), FakeBackbone())
    read = Schedule.read
    monkeypatch.setattr(Schedule, "read", lose)
    reserve = [f"placement.ray.num_cpus_per_{what}=0.25" for what in ("simulator", "replica", "collector")]
    remote = train(config(*ray_overrides, "placement.ray.inference_replicas=2", *reserve), FakeBackbone())
    same_run(local, remote, "a")
    same_run(local, remote, "s")
    assert remote["inference"] == {}  # nothing was answered here
    assert sum("a" in replica for replica in remote["inference_replicas"]) == 1
    events = [json.loads(line) for line in (Path(remote["run_dir"]) / "events.jsonl").read_text().splitlines()]
    assert "a" in [e["tenant"] for e in events if e.get("kind") == "begun_again"]
