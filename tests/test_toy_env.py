"""The toy world: a ceiling (the oracle always wins) and a floor (random actions do not)."""

from __future__ import annotations

import pytest
import torch

from envs.experts.toy import make_expert
from envs.toy import ToySimulator
from nexus_lightning.environment import SimulatorEnv, check_tenant_env
from nexus_lightning.schema import Normalizer, TenantSchema


def play(sim, actions, seed):
    sim.reset(seed)
    for steps, action in enumerate(actions, start=1):
        result = sim.step(action)
        if result.terminated or result.truncated:
            return result.success, steps, result.reward
    raise AssertionError("the episode did not end")


def test_oracle_wins_and_random_does_not():
    sim = ToySimulator()
    assert [play(sim, make_expert(sim), seed) for seed in range(10)] == [(True, 2, 1.0)] * 10
    generator = torch.Generator().manual_seed(0)
    noise = (torch.rand(2, generator=generator).numpy() * 2 - 1 for _ in iter(int, 1))
    wins = [play(sim, noise, seed)[0] for seed in range(40)]
    assert sum(wins) <= 8


def test_seed_gives_the_same_episode_and_leaves_torch_alone():
    sim = ToySimulator()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    sim.reset(3)
    first = sim.observe()
    assert torch.equal(before, torch.get_rng_state())
    sim.reset(4)
    other = sim.observe()
    sim.reset(3)
    again = sim.observe()
    assert (first["state"] == again["state"]).all() and (first["image"]["camera"] == again["image"]["camera"]).all()
    assert (first["state"] != other["state"]).any()
    assert first["image"]["camera"].shape == (3, 32, 32)


def test_tracking_reward_pays_for_closeness():
    sim = ToySimulator(reward="tracking", cameras=())
    sim.reset(0)
    target = sim.observe()["state"][2:].copy()
    assert sim.step(target).reward == 0.0 and sim.step(target + 0.2).reward < -0.2
    with pytest.raises(ValueError, match="reward='dense'"):
        ToySimulator(reward="dense")


def test_as_a_tenant_environment():
    schema = TenantSchema(4, 2, chunk=2, execute=2, cameras=("camera",), image_size=32, gripper="none")
    env = SimulatorEnv({"_target_": "envs.toy.ToySimulator"}, schema, Normalizer(schema), num_envs=2, inline=True)
    check_tenant_env(env)
    td = env.reset()
    td["vla_action", "chunk"] = td["observation", "state"][:, None, 2:].expand(2, 2, 2).clone()
    assert env.step(td)["next", "success"].all()
    env.close()


def test_replaced_processes_of_two_tasks_give_the_episodes_of_one_process():
    """E5: bit for bit, with a scene of another task in between."""
    schema = TenantSchema(4, 2, chunk=2, execute=2, cameras=("camera",), image_size=32, gripper="none")
    simulator, ran = {"_target_": "envs.toy.ToySimulator"}, []
    for changes in ({"inline": True}, {"max_resets": 2}):
        env = SimulatorEnv(simulator, schema, Normalizer(schema), tasks=["plain", "mirrored"], **changes)
        generator, rows = torch.Generator().manual_seed(0), []
        env.set_episodes([5, 6, 5], [0, 1, 1])
        td = env.reset()
        while not env.exhausted.all():
            rows.append(td.clone())
            chunk = torch.rand(1, 2, 2, generator=generator) * 2 - 1
            td = env.step(td.set(("vla_action", "chunk"), chunk))["next"]
            if td["done"].any():
                rows.append(td.clone())
                td = env.reset(td.exclude("reward").set("_reset", td["done"].clone()))
        env.close()
        ran.append(rows)
        assert env.recycled == ("max_resets" in changes)
    for a, b in zip(*ran, strict=True):
        keys = ["state", ("image", "camera")]
        assert all(torch.equal(a["observation"][key], b["observation"][key]) for key in keys)
        assert a["language_instruction"] == b["language_instruction"] and torch.equal(a["done"], b["done"])
