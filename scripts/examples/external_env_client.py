"""RL on a running server, in simulators that the server does not have: they are behind an environment server.

    python -m nexus_lightning.services.environment_server --simulator toy=envs.toy:ToySimulator --threads --port 9000
    export NEXUS_URL=http://127.0.0.1:8000 NEXUS_TOKEN=nxl_...
    python scripts/examples/external_env_client.py --environment http://127.0.0.1:9000

The policy lives on the server; the episodes, their rewards and advantages are made here: sampled actions come from
`predict`, a clipped policy gradient is `train_batch`. A chunk of actions is one decision.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # envs/ lies there

from sft_client import SCHEMA

from envs.remote import RemoteSimulator
from nexus_lightning.client import NexusClient, Tenant

HORIZON = 12
GAMMA, GAE_LAMBDA, EPOCHS, MINIBATCH = 0.9, 0.9, 4, 48
ENVIRONMENT = {"reward": "tracking", "horizon": HORIZON, "image_size": SCHEMA["image_size"]}


def observe(simulators: list[RemoteSimulator]) -> tuple[dict[str, Any], list[str]]:
    """What they show now, a row each, and what they ask for."""
    seen = [simulator.observe() for simulator in simulators]
    images = {camera: np.stack([one["image"][camera] for one in seen]) for camera in SCHEMA["cameras"]}
    return {"state": np.stack([one["state"] for one in seen]), "image": images}, [one["instruction"] for one in seen]


def roll_out(
    tenant: Tenant, simulators: list[RemoteSimulator], pool: ThreadPoolExecutor, seed: int
) -> tuple[dict[str, Any], list[str], float]:
    """One episode in each simulator, all of them stepped at once.

    Returns:
        The arrays of a ppo batch with a row for each decision, their instructions, and the mean return.
    """
    list(pool.map(lambda pair: pair[1].reset(seed * len(simulators) + pair[0]), enumerate(simulators)))
    episodes: list[list[dict[str, Any]]] = [[] for _ in simulators]
    truncated = np.zeros(len(simulators), bool)
    running, step = list(range(len(simulators))), 0
    while running:
        observation, texts = observe([simulators[i] for i in running])
        answer = tenant.predict(observation, texts, deterministic=False, seed=seed * 1000 + step)
        actions = np.clip(answer["action"][:, : SCHEMA["execute"]], -1, 1)
        results = list(pool.map(lambda pair: simulators[pair[0]].execute(pair[1]), zip(running, actions, strict=True)))
        for row, (i, result) in enumerate(zip(running, results, strict=True)):
            executed = np.zeros(SCHEMA["chunk"], bool)
            executed[: SCHEMA["execute"]] = result.executed
            kept = {name: answer[name][row] for name in ("chunk", "log_probs", "state_value")}
            kept |= {"observation/state": observation["state"][row], "executed": executed, "text": texts[row]}
            kept |= {f"observation/image/{camera}": images[row] for camera, images in observation["image"].items()}
            episodes[i].append({**kept, "reward": result.reward})
            truncated[i] = result.truncated
        running = [i for i, result in zip(running, results, strict=True) if not (result.terminated or result.truncated)]
        step += 1
    # Generalised advantages. What the time limit cut off would have gone on: its last state is worth what it is worth.
    last = tenant.predict(*observe(simulators))["state_value"][:, 0] * truncated
    for episode, value_after in zip(episodes, last, strict=True):
        following, advantage = float(value_after), 0.0
        for decision in reversed(episode):
            value = float(decision["state_value"][0])
            advantage = decision["reward"] + GAMMA * following - value + GAMMA * GAE_LAMBDA * advantage
            decision["advantage"], decision["value_target"] = np.float32([advantage]), np.float32([advantage + value])
            following = value
    decisions = [decision for episode in episodes for decision in episode]
    returns = [sum(decision.pop("reward") for decision in episode) for episode in episodes]
    texts = [decision.pop("text") for decision in decisions]
    arrays = {name: np.stack([decision[name] for decision in decisions]) for name in decisions[0]}
    advantages = arrays["advantage"]
    arrays["advantage"] = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    return arrays, texts, float(np.mean(returns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", default="http://127.0.0.1:9000", help="address of the environment server")
    parser.add_argument("--token-env", help="environment variable with its token")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--num-envs", type=int, default=16)
    options = parser.parse_args()

    def simulator(_: int) -> RemoteSimulator:
        return RemoteSimulator(options.environment, "toy", ENVIRONMENT, token_env=options.token_env)

    with NexusClient() as client, ThreadPoolExecutor(options.num_envs) as pool:
        head = {"name": "mlp", "hidden_dim": 64, "lr": 1e-3, "lr_schedule": "constant", "log_std_init": -0.7}
        head["use_features"] = False  # the toy's state shows the target
        tenant = client.create_tenant("external-env-example", SCHEMA, head, seed=0)
        simulators = list(pool.map(simulator, range(options.num_envs)))
        shuffle = np.random.default_rng(0)
        for iteration in range(options.iterations):
            arrays, texts, mean_return = roll_out(tenant, simulators, pool, seed=iteration)
            steps = []
            for _ in range(EPOCHS):
                for rows in np.array_split(shuffle.permutation(len(texts)), -(-len(texts) // MINIBATCH)):
                    batch = {name: array[rows] for name, array in arrays.items()}
                    observation = {name: batch.pop(name) for name in list(batch) if name.startswith("observation/")}
                    row_texts = [texts[row] for row in rows]
                    steps.append(tenant.train_batch(observation, row_texts, loss="ppo", arrays=batch))
            version = steps[-1].result()["policy_version"]  # in order: the last one ends last
            print(f"iteration {iteration}  return {mean_return:.3f}  policy version {version}", flush=True)
        for simulator_ in simulators:
            simulator_.close()


if __name__ == "__main__":
    main()
