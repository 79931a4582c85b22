"""Record demonstrations with a scripted expert in a real simulator.

    python scripts/collect_demos.py --simulator maniskill --task PushCube-v1 --obs rgb --cameras base_camera \\
        --episodes 60 --root data/pushcube
    python scripts/collect_demos.py tenant=maniskill_sft episodes=60 root=data/pushcube

The second form takes simulator, expert and schema from conf/tenants; everything after the tenant is a change of its
``dataset.record`` (episodes, first_seed, workers) or the root. `python train.py` records what it needs by itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))


def main(argv: list[str]) -> None:
    from nexus_lightning.config import config_dirs
    from nexus_lightning.demonstrations import record_demonstrations

    if any(word.startswith("tenant=") for word in argv):
        words, folders = config_dirs(argv)
        arguments = from_tenant(dict(word.split("=", 1) for word in words), folders)
    else:
        arguments = from_flags(argv)
    print(f"recorded in {record_demonstrations(**arguments)}")


def from_tenant(words: dict[str, str], folders: Sequence[Path] = ()) -> dict[str, Any]:
    """Arguments of ``record_demonstrations`` for ``tenant=NAME [root=]`` and the keys of ``dataset.record``.

    ``folders``: of ``--config-dir``."""
    from nexus_lightning.config import compose_config, dataset_root, schema_of

    known = ("tenant", "root", "episodes", "first_seed", "workers", "random_share", "keep_failures")
    if unknown := set(words) - set(known):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    name = words.pop("tenant")
    root = words.pop("root", None)
    overrides = [f"tenants.{name}.dataset.record.{key}={value}" for key, value in words.items()]
    overrides += [f"--config-dir={folder}" for folder in folders]
    config = compose_config(REPO / "conf", [f"+tenants=[{name}]", *overrides])
    tenant = config.tenants[name]
    if tenant.dataset is None or tenant.dataset.record is None or tenant.environment is None:
        raise SystemExit(f"tenant {name!r} has no dataset.record: there is nothing to record for it")
    record = tenant.dataset.record
    return {
        "simulator": tenant.environment.simulator,
        "expert": record.expert,
        "root": Path(root) if root else dataset_root(tenant, config.data_dir),
        "episodes": record.episodes,
        "first_seed": record.first_seed,
        "schema": schema_of(tenant.schema),
        "workers": record.workers,
        "repo_id": tenant.dataset.repo_id,
        "inline": tenant.environment.inline,
        "random_share": record.random_share,
        "keep_failures": record.keep_failures,
    }


def from_flags(argv: list[str]) -> dict[str, Any]:
    """Arguments of ``record_demonstrations`` from the command line of the first form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulator", choices=("maniskill", "toy"), default="maniskill")
    parser.add_argument("--task", default="PushCube-v1", help="ManiSkill task")
    parser.add_argument("--obs", choices=("state", "rgb", "rgb+state"), default="state")
    parser.add_argument("--cameras", nargs="*", default=[])
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--first-seed", type=int, default=1000, help="keep apart from the evaluation's seeds")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--root", type=Path, required=True)
    flags = parser.parse_args(argv)

    from nexus_lightning.schema import TenantSchema

    cameras = tuple(flags.cameras)
    if flags.simulator == "toy":
        simulator: dict[str, Any] = {
            "_target_": "envs.toy.ToySimulator",
            "cameras": list(cameras),
            "image_size": flags.image_size,
        }
        schema = TenantSchema(
            state_dim=4,
            action_dim=2,
            chunk=2,
            execute=2,
            cameras=cameras,
            image_size=flags.image_size,
            control_hz=10.0,
            action_convention="absolute",
            rotation="none",
            gripper="none",
            privileged=("target_action",),
        )
    else:
        from envs.maniskill import CONTROL_HZ, PRIVILEGED, STATE_DIMS

        kind = "rgb" if flags.obs == "rgb" else "state"
        if (flags.task, kind) not in STATE_DIMS:
            raise SystemExit(f"no expert for {flags.task}: choose from {sorted({task for task, _ in STATE_DIMS})}")
        simulator = {
            "_target_": "envs.maniskill.ManiSkillSimulator",
            "task": flags.task,
            "obs": flags.obs,
            "cameras": list(cameras),
            "image_size": flags.image_size,
        }
        schema = TenantSchema(
            state_dim=STATE_DIMS[flags.task, kind],
            action_dim=7,
            chunk=8,
            execute=4,
            cameras=cameras,
            image_size=flags.image_size,
            control_hz=CONTROL_HZ,
            privileged=PRIVILEGED[flags.task] if kind == "state" else (),
        )
    return {
        "simulator": simulator,
        "expert": f"envs.experts.{flags.simulator}.make_expert",
        "root": flags.root,
        "episodes": flags.episodes,
        "first_seed": flags.first_seed,
        "schema": schema,
        "workers": flags.workers,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
