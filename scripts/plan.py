"""Who would live where, in how much memory, without GPUs or weights.

    python scripts/plan.py placement=fsdp2 backbone=qwen3_vl_4b num_nodes=2 gpus_per_node=8 gpu_memory_gb=80 \
        '+tenants=[libero,maniskill]'
    python scripts/plan.py placement=split gpus_per_node=2 ranks_per_node=1 '+tenants=[toy]' json=plan.json png=plan.png

Keys of its own: num_nodes, gpus_per_node (0: CPU ranks), ranks_per_node (null: one per GPU, or one), gpu_memory_gb,
host_memory_gb (of one machine; null: not checked with GPUs, as here without), json and png (paths). Everything
else is as for train.py. Exits with 2 when the placement is impossible.
"""

import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # models/ and envs/ live beside scripts/

#: Colours that stay apart for colour-blind eyes (Okabe and Ito 2008).
COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#f0e442", "#cc79a7", "#d55e00")


@dataclass
class Arguments:
    num_nodes: int = 1
    gpus_per_node: int = 0
    ranks_per_node: int | None = None
    gpu_memory_gb: float = 80.0
    host_memory_gb: float | None = None
    json: str | None = None
    png: str | None = None


def parse(arguments: list[str]) -> tuple[Arguments, list[str]]:
    """(own keys, overrides for the configuration)."""
    names = {f.name for f in fields(Arguments)}
    own = [a for a in arguments if a.split("=", 1)[0] in names]
    try:
        args = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Arguments), OmegaConf.from_dotlist(own)))
        assert isinstance(args, Arguments)
        if args.num_nodes < 1 or args.gpus_per_node < 0 or (args.ranks_per_node or 1) < 1:
            raise ValueError("num_nodes and ranks_per_node must be at least 1, gpus_per_node at least 0")
        if args.gpu_memory_gb <= 0 or (args.host_memory_gb or 1) <= 0:
            raise ValueError("gpu_memory_gb and host_memory_gb must be positive")
    except (OmegaConfBaseException, ValueError) as error:
        raise SystemExit(f"error: {error}\n{__doc__}") from None
    return args, [a for a in arguments if a not in own]


def main() -> int:
    args, overrides = parse(sys.argv[1:])
    from hydra.errors import HydraException

    from nexus_lightning.config import ConfigError, compose_config, validate
    from nexus_lightning.memory import estimate
    from nexus_lightning.placement.plan import resolve

    try:
        config = compose_config(ROOT / "conf", overrides)
        validate(config)
        plan = resolve(config, devices(args), estimate(config))
    except (ConfigError, HydraException) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(plan.table())
    if args.json is not None:
        Path(args.json).write_text(json.dumps({**plan.to_dict(), "signature": plan.signature}, indent=2))
    if args.png is not None:
        picture(plan, Path(args.png))
    return 0


def devices(args: Arguments):
    """The launch that the own keys describe."""
    import psutil

    from nexus_lightning.placement.plan import Devices

    host = None if args.host_memory_gb is None else int(args.host_memory_gb * 1e9)
    ranks = args.ranks_per_node or args.gpus_per_node or 1
    if args.gpus_per_node:
        memory = int(args.gpu_memory_gb * 1e9)
        return Devices("cuda", args.num_nodes * ranks, ranks, memory, args.gpus_per_node, host)
    host = psutil.virtual_memory().total if host is None else host
    return Devices("cpu", args.num_nodes * ranks, ranks, host, 1, host)


def picture(plan, path: Path) -> None:
    """One bar per kind of device, each on its own scale: its memory by part, and how much it has."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    from nexus_lightning.memory import gigabytes
    from nexus_lightning.placement.plan import PARTS

    used = [d for d in plan.devices if d.needed_bytes + d.budget_bytes]
    size = (9, 1.2 + 0.95 * len(used))
    figure, axes = plt.subplots(len(used), 1, figsize=size, layout="constrained", squeeze=False)
    colours, budget = (
        dict(zip(PARTS, COLOURS, strict=True)),
        {"facecolor": "white", "edgecolor": "grey", "hatch": "///"},
    )
    for device, axis in zip(used, axes.flat, strict=True):
        left = 0.0
        for part in PARTS:
            width = device.parts.get(part, 0) / 1e9
            axis.barh(0, width, left=left, color=colours[part])
            left += width
        axis.barh(0, device.budget_bytes / 1e9, left=left, **budget)
        end = left + device.budget_bytes / 1e9
        text = gigabytes(device.needed_bytes)
        if device.capacity_bytes is not None:
            text += f" of {gigabytes(device.capacity_bytes)} ({device.fill:.0%})"
        axis.annotate(text, (end, 0), (6, 0), textcoords="offset points", va="center")
        axis.set_xlim(0, 1.4 * end)
        axis.set_yticks([0], [f"{device.count} x {device.name}"])
        axis.spines[["top", "right"]].set_visible(False)
    axes.flat[-1].set_xlabel("GB of each (own scale)")
    rest = ", ".join(f"{key} {value}" for key, value in list(plan.summary().items())[1:])
    figure.suptitle(f"{plan.strategy} on {plan.world_size} ranks: {rest}", fontsize=10)
    shown = [Patch(color=colours[part], label=part) for part in PARTS if any(d.parts.get(part) for d in used)]
    if any(d.budget_bytes for d in used):
        shown.append(Patch(label="queues, store (at most)", **budget))
    figure.legend(handles=shown, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
