"""Step a tenant's simulator without training it, and watch.

    python scripts/play.py tenant=toy actions=random episodes=2 video=toy.mp4
    python scripts/play.py tenant=pusht env_check=true tenants.pusht.environment.simulator.horizon=20

Keys: tenant (a name in conf/tenants), actions (zero | random | expert: the one in dataset.record | payload), payload
(folder of a tenant or of one version; needs actions=payload), episodes (a tenant of several tasks plays them in turn),
seed (of the first episode, the next ones count on), video (an .mp4 path: every control step of every episode),
env_check (true: first check the environment's contract with random actions). Words that start with ``tenants.`` change
the tenant as they do for train.py.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # models/ and envs/ live beside scripts/

if TYPE_CHECKING:
    from nexus_lightning.config import TenantConfig
    from nexus_lightning.schema import TenantSchema
    from nexus_lightning.simulator import Simulator, View

#: A freshly reset simulator and the episode's seed -> its actions, float32 ``[A]`` in the native convention.
Actor = Callable[["Simulator", int], Iterator[np.ndarray]]
ACTIONS = ("zero", "random", "expert", "payload")


@dataclass
class Arguments:
    tenant: str = MISSING
    actions: str = "random"
    payload: str | None = None
    episodes: int = 1
    seed: int = 0
    video: str | None = None
    env_check: bool = False


def parse(arguments: list[str]) -> Arguments:
    try:
        args = OmegaConf.merge(OmegaConf.structured(Arguments), OmegaConf.from_dotlist(arguments))
        if OmegaConf.is_missing(args, "tenant"):
            raise ValueError("tenant=<name> is required")
        result = OmegaConf.to_object(args)
        assert isinstance(result, Arguments)
        if result.actions not in ACTIONS:
            raise ValueError(f"actions={result.actions}: choose one of {', '.join(ACTIONS)}")
        if (result.actions == "payload") != (result.payload is not None):
            raise ValueError(f"actions={result.actions} with payload={result.payload}: actions=payload needs a folder")
    except (OmegaConfBaseException, ValueError) as error:
        raise SystemExit(f"error: {error}\n{__doc__}") from None
    return result


def load_tenant(name: str, overrides: list[str]) -> "TenantConfig":
    """The tenant as ``train.py`` would see it."""
    from hydra.errors import HydraException

    from nexus_lightning.config import ConfigError, compose_config

    try:
        tenant = compose_config(ROOT / "conf", [f"+tenants=[{name}]", *overrides]).tenants[name]
    except (HydraException, ConfigError) as error:
        raise SystemExit(f"error: tenant={name}: {error}") from None
    if tenant.environment is None:
        raise SystemExit(f"error: tenant={name}: it has no environment to play in")
    return tenant


def make_actor(args: Arguments, tenant: "TenantConfig", schema: "TenantSchema") -> Actor:
    import torch
    from hydra.utils import get_method

    def native(actions: torch.Tensor) -> np.ndarray:
        return schema.to_native(actions.clamp(-1, 1)).numpy().astype(np.float32)

    def zero(simulator: "Simulator", seed: int) -> Iterator[np.ndarray]:
        while True:
            yield native(torch.zeros(schema.action_dim))

    def random(simulator: "Simulator", seed: int) -> Iterator[np.ndarray]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield native(torch.rand(schema.action_dim, generator=generator) * 2 - 1)

    if args.actions == "payload":
        return payload_actor(str(args.payload), args.tenant, schema)
    if args.actions == "expert":
        record = None if tenant.dataset is None else tenant.dataset.record
        if record is None:
            raise SystemExit(f"error: tenant={args.tenant}: actions=expert needs dataset.record.expert, it has none")
        expert = get_method(record.expert)
        return lambda simulator, seed: expert(simulator)
    return {"zero": zero, "random": random}[args.actions]


def payload_actor(folder: str, name: str, schema: "TenantSchema") -> Actor:
    """The payload's deterministic actions, ``schema.execute`` from each observation."""
    import torch
    from tensordict import TensorDict

    from nexus_lightning.policy import load_policy

    policy = load_policy(folder)
    if changed := policy.schema.differences(schema):
        raise SystemExit(
            f"error: payload={folder}: its schema differs from that of tenant={name}: {'; '.join(changed)}"
        )

    def act(simulator: "Simulator", seed: int) -> Iterator[np.ndarray]:
        while True:
            seen = simulator.observe()
            images = {camera: torch.from_numpy(np.array(seen["image"][camera]))[None] for camera in schema.cameras}
            observation = TensorDict({"state": torch.from_numpy(np.array(seen["state"]))[None]}, [1])
            if images:
                observation["image"] = TensorDict(images, [1])
            chunk = policy(observation, [seen["instruction"]])[0, : schema.execute]
            # Clipped in the internal convention, as SimulatorEnv does: a gripper that takes [0, 1] must not get -1.
            yield from schema.to_native(schema.to_internal(chunk).clamp(-1, 1)).numpy()

    return act


def play_episode(
    simulator: "Simulator",
    actor: Actor,
    seed: int,
    frames: list[np.ndarray] | None,
    view: "View | None" = None,
    every: int = 1,
) -> dict[str, Any]:
    """One episode until it is done or the actor stops; appends a frame per control step to ``frames``.

    Args:
        view: what the simulator must show at the start, at the end and after ``every`` steps between them; None: it is
            not looked at.

    Returns:
        ``seed, success`` (at any step), ``episode_return``, ``episode_length`` (control steps) and ``end``.

    Raises:
        ContractError: the simulator gave what it must not.
    """
    from nexus_lightning.simulator import ContractError, check_frame, check_step

    def look() -> None:
        nonlocal view
        due = result is None or length % every == 0 or result.terminated or result.truncated
        if view is not None and due and (problems := view.problems(simulator.observe())):
            raise ContractError("; ".join(problems) + f" ({length} steps after the reset with seed {seed})")
        if view is not None and result is None:
            view = view.at(simulator.observe())
        if frames is not None:
            frames.append(np.array(check_frame(simulator.render_frame())))

    simulator.reset(seed)
    total, length, success, end, result = 0.0, 0, False, "no more actions", None
    look()
    for action in actor(simulator, seed):
        result = simulator.step(np.clip(np.asarray(action, np.float32), -1.0, 1.0))
        check_step(result)
        total, length, success = total + float(result.reward), length + 1, success or bool(result.success)
        look()
        if result.terminated or result.truncated:
            end = "terminated" if result.terminated else "truncated"
            break
    return {"seed": seed, "success": success, "episode_return": total, "episode_length": length, "end": end}


def check(name: str, tenant: "TenantConfig", schema: "TenantSchema", seed: int) -> None:
    from nexus_lightning.environment import check_tenant_env, make_env
    from nexus_lightning.schema import Normalizer

    assert tenant.environment is not None
    env = make_env(tenant.environment, schema, Normalizer(schema), num_envs=2, tenant=name)
    try:
        check_tenant_env(env, seed)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    finally:
        env.close()
    print(f"{name}: its environment keeps the contract (check_tenant_env on {env.num_envs} simulators)")


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    from nexus_lightning.config import config_dirs, schema_of

    words, folders = config_dirs(sys.argv[1:] if arguments is None else arguments)
    overrides = [word for word in words if word.startswith("tenants.")]
    args = parse([word for word in words if word not in overrides])
    overrides += [f"--config-dir={folder}" for folder in folders]
    from nexus_lightning.producers.evaluation import save_video
    from nexus_lightning.simulator import ContractError, View, build_simulator, task_configs

    tenant = load_tenant(args.tenant, overrides)
    assert tenant.environment is not None
    schema = schema_of(tenant.schema)
    if args.env_check:
        check(args.tenant, tenant, schema, args.seed)
    actor = make_actor(args, tenant, schema)
    episodes: list[dict[str, Any]] = []
    frames: list[np.ndarray] | None = None if args.video is None else []
    configs = task_configs(tenant.environment.simulator, tenant.environment.tasks)
    view = View(schema.state_dim, schema.cameras)
    simulator, built = build_simulator(configs[0]), configs[0]
    try:
        for k, seed in enumerate(range(args.seed, args.seed + args.episodes)):
            if configs[k % len(configs)] != built:
                simulator.close()
                built = configs[k % len(configs)]
                simulator = build_simulator(built)
            episode = play_episode(simulator, actor, seed, frames, view, schema.execute)
            episodes.append(episode)
            print(
                f"{args.tenant} seed {seed}: return {episode['episode_return']:.3f}, length "
                f"{episode['episode_length']}, success {episode['success']} ({episode['end']})"
            )
    except ContractError as error:
        raise SystemExit(f"error: {error.of(args.tenant, 0, built['_target_'])}") from None
    finally:
        simulator.close()
    if episodes:
        successes = sum(e["success"] for e in episodes)
        print(f"{args.tenant} {args.actions}: success {successes}/{len(episodes)}")
    if frames:
        save_video(frames, Path(str(args.video)), schema.control_hz)
        print(f"video: {args.video} ({len(frames)} frames)")
    return episodes


if __name__ == "__main__":
    main()
