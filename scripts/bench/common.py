"""What the benchmarks share: options, parts built from ``conf/``, side-by-side timing, tables and reports.

Every benchmark prints a table and, when asked, writes JSON (``--json``) and a figure (``--png``). The numbers that
matter are ratios of things timed in turn inside one process, so that a busy machine slows both sides alike.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from hydra.utils import get_class, instantiate
from matplotlib.figure import Figure
from tensordict import TensorDict
from torch import Tensor, nn

from nexus_lightning.backbone import Backbone
from nexus_lightning.checks import random_observation
from nexus_lightning.config import ConfigError, DatasetConfig, SchemaConfig, TenantConfig
from nexus_lightning.memory import keep_freed_memory
from nexus_lightning.monitoring.banner import text_table
from nexus_lightning.objectives.sft import SFT
from nexus_lightning.schema import NormalizationStats, TenantSchema
from nexus_lightning.tenant import TenantSlot, TenantSpec, build_slot, derive_seed

ROOT = Path(__file__).resolve().parents[2]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: As long as the instructions of LIBERO and ManiSkill are.
INSTRUCTIONS = (
    "push the cube to the goal",
    "pick up the alphabet soup and place it in the basket",
    "stack the red cube on the green cube",
    "pick up the black bowl on the stove and place it on the plate",
    "pull the cube to the goal",
    "put the wine bottle on top of the cabinet",
    "insert the peg into the hole",
    "open the middle drawer of the cabinet",
)


# ------------------------------------------------------------------------------------------------------------- options


def parser(description: str | None, backbone: str | None = "effnet_minilm") -> argparse.ArgumentParser:
    """The options that every benchmark has. ``backbone=None`` leaves ``--backbone`` out."""
    out = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--quick", action="store_true", help="at most a minute on two cores")
    out.add_argument("--json", type=Path, help="write summary, results and machine there")
    out.add_argument("--png", type=Path, help="write the figure there")
    out.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    out.add_argument("--dtype", default="fp32", choices=sorted(DTYPES), help="of the frozen backbone (default: fp32)")
    out.add_argument("--threads", type=int, help="intra-op threads of torch (default: a run's, conf/placement)")
    if backbone is not None:
        text = f"a name in conf/backbone, or the dotted path of a class (default: {backbone})"
        out.add_argument("--backbone", default=backbone, help=text)
    return out


def prepare(options: argparse.Namespace) -> torch.device:
    """Threads and number formats as asked for.

    Raises:
        ValueError: ``--device cuda`` without one.
    """
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {options.device}: torch {torch.__version__} finds no CUDA device; use --device cpu")
    threads = options.threads or load_node("placement", "auto")["torch_threads"]
    if threads is not None:
        torch.set_num_threads(threads)
    keep_freed_memory()  # as a run does
    # Convolutions round to TF32 by default: fp32 is to mean float32.
    torch.backends.cudnn.allow_tf32 = options.dtype != "fp32"
    return device


def machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Where the figures come from: torch, CPU, threads, device, commit."""
    device = torch.device(device)
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "commit": _commit(),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """Short hash, with ``+changes`` when the tree differs from it."""
    git = ["git", "--no-optional-locks", "-C", str(ROOT)]
    try:
        head, changes = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=True, timeout=30).stdout.strip()
            for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{head}+changes" if changes else head


# ----------------------------------------------------------------------------------------------- parts built from conf/


def load_node(group: str, name: str) -> dict[str, Any]:
    """``conf/<group>/<name>.yaml``.

    Raises:
        ConfigError: there is no such file; the message lists those that there are.
    """
    file = ROOT / "conf" / group / f"{name}.yaml"
    if not file.is_file():
        raise ConfigError([f"{group}={name}: choose one of {', '.join(sorted(p.stem for p in file.parent.iterdir()))}"])
    return yaml.safe_load(file.read_text())


def load_backbone(name: str, device: torch.device | str = "cpu", dtype: str = "fp32") -> Backbone:
    """A backbone by its name in ``conf/backbone`` (``effnet_minilm``) or its class (``my_module.PatchBackbone``)."""
    if "." in name:
        return get_class(name)().to(device, DTYPES[dtype])
    node = load_node("backbone", name)
    if "dtype" in node:  # the model then decides which of its buffers stay in float32
        return instantiate({**node, "dtype": dtype}).to(device)
    return instantiate(node).to(device, DTYPES[dtype])


def build_tenant(
    name: str,
    schema: TenantSchema,
    head: str,
    backbone: Backbone,
    *,
    batch_size: int,
    steps: int,
    settings: Mapping[str, Any] | None = None,
    state_stats: NormalizationStats | None = None,
) -> tuple[TenantSlot, SFT]:
    """A supervised tenant as a run builds it: head, normaliser, fused AdamW and schedule on the backbone's device.

    Args:
        name: of the tenant; decides its seed.
        schema: of the tenant.
        head: a name in ``conf/head``.
        backbone: what the head sits on.
        batch_size: rows per optimizer step.
        steps: optimizer steps that the schedule spans.
        settings: keys of the head's YAML to change.
        state_stats: of its data; None: states are normalised already (as actions have to be).
    """
    config = TenantConfig(
        task="sft",
        schema=SchemaConfig(**{key: _plain(value) for key, value in asdict(schema).items()}),
        head={**load_node("head", head), **(settings or {})},
        dataset=DatasetConfig(repo_id="synthetic", batch_size=batch_size, batches_per_job=1),
        target_jobs=steps,
    )
    spec = TenantSpec(name, config, schema, derive_seed("bench", name))
    slot = build_slot(spec, backbone, state_stats)
    slot.head.to(backbone.device).train()
    slot.normalizer.to(backbone.device)
    slot.build_optimizer()
    return slot, SFT(slot.head, slot.normalizer, SFT.configure(), batch_size)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def random_batch(schema: TenantSchema, rows: int, seed: int) -> TensorDict:
    """A supervised batch ``[rows]`` of random numbers: ``observation``, ``actions``, ``is_pad``."""
    generator = torch.Generator().manual_seed(seed)
    batch = TensorDict({"observation": random_observation(schema, rows, seed)}, [rows])
    batch["actions"] = torch.randn(rows, schema.chunk, schema.action_dim, generator=generator).clamp(-1, 1)
    batch["is_pad"] = torch.zeros(rows, schema.chunk, dtype=torch.bool)
    return batch


def instructions(rows: int, first: int) -> list[str]:
    """``rows`` of :data:`INSTRUCTIONS` in turn, starting at ``first``."""
    return [INSTRUCTIONS[(first + row) % len(INSTRUCTIONS)] for row in range(rows)]


def seed_cuda(slot: TenantSlot) -> None:
    """Inside ``slot.rng.scope()``, which swaps the CPU generator only: a GPU's noise follows tenant and step."""
    if torch.cuda.is_available():
        torch.cuda.manual_seed(derive_seed(slot.spec.seed, slot.optimizer_steps))


def update(slot: TenantSlot, loss: Tensor) -> None:
    """What the loop does with a tenant's loss: check, backward, clip, optimizer and schedule."""
    if not bool(torch.isfinite(loss.detach())):
        raise ArithmeticError(f"tenant {slot.name!r}: loss is {float(loss.detach())}")
    assert slot.optimizer is not None and slot.scheduler is not None
    slot.optimizer.zero_grad()
    loss.backward()
    if slot.grad_clip_norm is not None:
        nn.utils.clip_grad_norm_(slot.head.parameters(), slot.grad_clip_norm)
    slot.optimizer.step()
    slot.scheduler.step()


# -------------------------------------------------------------------------------------------------------------- timing


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a sample.

    Example:
        >>> print(Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]))
        3.00 (2.00-4.00)
    """

    median: float
    q25: float
    q75: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        q25, median, q75 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q25, q75, len(values))

    @classmethod
    def ratio(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
        """Of the ratios of what was timed in the same round: slow rounds are slow on both sides."""
        return cls.of([a / b for a, b in zip(numerators, denominators, strict=True)])

    def scaled(self, factor: float) -> Spread:
        """In another unit."""
        return Spread(self.median * factor, self.q25 * factor, self.q75 * factor, self.count)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.q25:.2f}-{self.q75:.2f})"


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleave(
    functions: Mapping[str, Callable[[], Any]], device: torch.device, seconds: float, min_rounds: int = 3
) -> dict[str, list[float]]:
    """Time the functions in turn, every round in a new order, after one untimed round.

    The order is drawn anew (and the same for every run): in a fixed one, one function would always find the caches as
    another left them.

    Args:
        functions: by name.
        device: synchronised around every call.
        seconds: start no round after this long.
        min_rounds: but time at least so many.

    Returns:
        Seconds per name; the i-th of all names are of the same round.
    """
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    order, stop_s, shuffle = list(functions), time.perf_counter() + seconds, random.Random(0).shuffle
    while len(times[order[0]]) < min_rounds or time.perf_counter() < stop_s:
        shuffle(order)
        for name in order:
            synchronize(device)
            start_s = time.perf_counter()
            functions[name]()
            synchronize(device)
            times[name].append(time.perf_counter() - start_s)
    return times


class Stopwatch:
    """Splits a stretch of work into named parts.

    On CUDA the marks are events in the stream: nothing waits for them before :meth:`seconds`, so the parts add up to
    the time that the work takes unobserved, idle gaps included.

    Example:
        >>> watch = Stopwatch(torch.device("cpu"))
        >>> watch.part("forward")   # what follows is forward ...
        >>> watch.part("backward")  # ... until here
        >>> watch.part("forward")
        >>> sorted(watch.seconds())
        ['backward', 'forward']
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._marks: list[tuple[str | None, Any]] = []

    def part(self, name: str | None) -> None:
        """What follows belongs to this part, until the next call; None: to nothing."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Seconds per part since the last call; ends the current part."""
        self.part(None)
        if self.cuda:
            torch.cuda.synchronize()
        out: dict[str, float] = {}
        for (name, start), (_, stop) in zip(self._marks, self._marks[1:], strict=False):
            if name is not None:
                out[name] = out.get(name, 0.0) + (start.elapsed_time(stop) / 1e3 if self.cuda else stop - start)
        self._marks = []
        return out


# ------------------------------------------------------------------------------------------------------------- reports


def report(
    script: str, options: argparse.Namespace, summary: Mapping[str, float], results: Any, figure: Figure | None
) -> None:
    """Print summary and machine; write ``--json`` and ``--png`` where they were asked for.

    Args:
        script: its name.
        options: its arguments, kept in the JSON.
        summary: flat; every value a finite number.
        results: anything that JSON can hold, :class:`Spread` included.
        figure: for ``--png``.

    Raises:
        ValueError: a figure of the summary is not finite.
    """
    bad = [key for key, value in summary.items() if not math.isfinite(value)]
    if bad:
        raise ValueError(f"{script}: summary.{', summary.'.join(bad)} not finite: {[summary[key] for key in bad]}")
    where = machine(options.device)
    print()
    print(text_table(("summary", "value"), [(key, f"{value:.4g}") for key, value in summary.items()]))
    print("\n" + ", ".join(f"{key} {value}" for key, value in where.items()))
    if options.json is not None:
        record = {
            "script": script,
            "arguments": vars(options),
            "machine": where,
            "summary": dict(summary),
            "results": results,
        }
        _folder(options.json).write_text(json.dumps(record, indent=2, default=_jsonable, allow_nan=False) + "\n")
    if options.png is not None and figure is not None:
        figure.savefig(_folder(options.png), dpi=120)


def _folder(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _jsonable(value: Any) -> Any:
    return asdict(value) if isinstance(value, Spread) else str(value)
