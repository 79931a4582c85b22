"""What the ranks of the tests do (imported by them, and by the test process for the runs with one rank)."""

from __future__ import annotations

import contextlib
import copy
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from models.heads.mlp import ChunkMLPHead
from nexus_lightning.checkpoint import read_payload, resolve_payload
from nexus_lightning.config import dataset_root
from nexus_lightning.objectives.grpo import GRPO
from nexus_lightning.objectives.iql import IQL
from nexus_lightning.ranks import Ranks
from nexus_lightning.run.runtime import Runtime
from nexus_lightning.run.schedule import Schedule
from nexus_lightning.run.tick import Tick
from nexus_lightning.trainer import train

ROOT = Path(__file__).resolve().parent.parent.parent


def rank() -> int:
    return int(os.environ.get("RANK", 0))


@cache
def composed(*overrides: str) -> Any:
    from nexus_lightning.config import compose_config

    return compose_config(ROOT / "conf", ["logger=csv", "trainer.enable_progress_bar=false", *overrides])


def toy(folder: Path, *overrides: str, backbone: dict | None = None, jobs: int = 3) -> Any:
    """The real configuration, shrunk; heads draw nothing in their loss unless a test says so."""
    named = [o.removeprefix("run_name=") for o in overrides if o.startswith("run_name=")]
    config = copy.deepcopy(composed(*(o for o in overrides if not o.startswith("run_name="))))
    config.output_dir, config.data_dir, config.run_name = f"{folder}/outputs", f"{folder}/data", named[0]
    config.backbone = backbone or {"_target_": "fakes.FakeBackbone"}
    for tenant in config.tenants.values():
        tenant.eval = replace(tenant.eval, episodes=5, every_n_jobs=None, at_start=False, video=False)
        tenant.target_jobs = jobs
        tenant.max_in_flight = 1
        tenant.head["state_noise"] = 0.0
        if tenant.dataset is not None:
            tenant.dataset.record.workers, tenant.dataset.record.episodes = 1, 6
            tenant.dataset.batch_size, tenant.dataset.batches_per_job = 32, 4
        if tenant.environment is not None and tenant.algorithm is not None:
            tenant.environment.num_envs = 4
    return config


def result(summary: dict[str, Any]) -> dict[str, Any]:
    """What a run left: tensors and counters of every tenant's payload, and its summary."""
    run_dir = Path(summary["run_dir"])
    payloads = {}
    for name in summary["tenants"]:
        if (run_dir / "tenants" / name).is_dir():
            payload = read_payload(resolve_payload(run_dir / "tenants" / name))
            names = ("tensors", "optimizer", "state", "rng")
            payloads[name] = {key: getattr(payload, key) for key in names}
    metrics = (run_dir / "metrics.csv").read_text() if (run_dir / "metrics.csv").exists() else ""
    return {"summary": summary, "payloads": payloads, "metrics": metrics, "files": sorted(os.listdir(run_dir))}


def run(folder: Path, *overrides: str, change: Callable[[Any], None] = lambda config: None, **kwargs: Any) -> dict:
    config = toy(folder, *overrides, **kwargs)
    change(config)
    return result(train(config))


# ------------------------------------------------------------------------------------------------- single scenarios


def sft(folder: Path, *placement: str) -> dict:
    return run(folder, "+tenants=[toy_sft]", "run_name=sft", *placement)


def uneven(folder: Path, *placement: str) -> dict:
    """A batch that two ranks cannot share equally, with clipping, from observations (no feature store)."""

    def change(config: Any) -> None:
        tenant = config.tenants["toy_sft"]
        tenant.dataset.batch_size = 5
        tenant.head["grad_clip_norm"] = 0.05
        tenant.features.reuse = "never"

    return run(folder, "+tenants=[toy_sft]", "run_name=uneven", *placement, change=change)


def rl(folder: Path, *placement: str) -> dict:
    return run(folder, "+tenants=[toy]", "run_name=rl", *placement)


def grpo(folder: Path, *placement: str) -> dict:
    """Rows that do not count, ratios per action, observations encoded again by the actor."""

    def change(config: Any) -> None:
        tenant = config.tenants["toy"]
        tenant.algorithm = GRPO.configure(
            chunks_per_job=12, epochs=4, minibatch_size=10, group_size=2, log_prob_level="action"
        )
        tenant.environment.simulator["reward"] = "tracking"
        tenant.features.reuse = "never"

    return run(folder, "+tenants=[toy]", "run_name=grpo", *placement, change=change)


def mixed(folder: Path, *placement: str) -> dict:
    """Two tasks, demonstrations mixed in (a batch that two ranks cannot share equally), decoupled PPO that encodes
    observations for the actor's stage and again."""

    def change(config: Any) -> None:
        demonstrations, tenant = config.tenants.pop("toy_sft"), config.tenants["toy"]
        root = dataset_root(demonstrations, config.data_dir)  # recorded by an earlier scenario
        tenant.dataset = replace(demonstrations.dataset, root=str(root), record=None, batch_size=15)
        tenant.environment.tasks = ["plain", "mirrored"]
        tenant.algorithm.sft_weight, tenant.algorithm.proximal, tenant.algorithm.minibatch_size = 0.5, True, 12
        tenant.algorithm.value_warmup_jobs, tenant.features.reuse = 1, "never"

    return run(folder, "+tenants=[toy,toy_sft]", "run_name=mixed", *placement, change=change)


def iql(folder: Path, *placement: str) -> dict:
    """Values alone: what the policy imitates is drawn on each rank."""

    def change(config: Any) -> None:
        tenant = config.tenants["toy_offline"]
        tenant.algorithm = IQL.configure(gamma=0.95, value_warmup_jobs=100)
        tenant.dataset.batch_size = 15

    return run(folder, "+tenants=[toy_offline]", "run_name=iql", *placement, change=change)


def on_some(folder: Path) -> dict:
    """A tenant's simulators on rank 1 alone."""
    return run(folder, "+tenants=[toy]", "run_name=on_some", "+placement.environments.toy=[1]")


class FailsOnRank1(ChunkMLPHead):
    """Raises in its ninth loss, on rank 1 only (a test double)."""

    def loss(self, features, state, actions, is_pad):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 9 and rank() == 1:
            raise OSError("rank 1 ran out of luck")
        return super().loss(features, state, actions, is_pad)


class NaNOnRank1(ChunkMLPHead):
    """Loss becomes NaN in the third job, on rank 1 only (a test double)."""

    def loss(self, features, state, actions, is_pad):
        self.calls = getattr(self, "calls", 0) + 1
        losses = super().loss(features, state, actions, is_pad)
        return {k: v * float("nan") for k, v in losses.items()} if self.calls == 9 and rank() == 1 else losses


def beside(folder: Path, *placement: str) -> dict:
    """A healthy tenant beside one that raises on a rank and one whose loss is NaN on a rank."""

    def change(config: Any) -> None:
        config.tenants["raises"].head["_target_"] = f"{__name__}.FailsOnRank1"
        config.tenants["nan"].head["_target_"] = f"{__name__}.NaNOnRank1"

    tenants = ["+tenants=[toy_sft]", "+tenant@tenants.raises=toy_sft", "+tenant@tenants.nan=toy_sft"]
    return run(folder, *tenants, "run_name=beside", *placement, change=change, jobs=4)


def alone(folder: Path, *placement: str) -> dict:
    """The healthy tenant of :func:`beside` alone."""
    return run(folder, "+tenants=[toy_sft]", "run_name=alone", *placement, jobs=4)


def producer_fails(folder: Path) -> dict:
    """Rank 1's simulators of one tenant break."""
    from nexus_lightning.producers.rollouts import RolloutProducer

    roll_out = RolloutProducer._roll_out

    def breaks(self: RolloutProducer, *args: Any) -> None:
        if rank() == 1:
            raise OSError("the simulator is gone")
        roll_out(self, *args)

    RolloutProducer._roll_out = breaks  # type: ignore[method-assign]
    try:
        return run(folder, "+tenants=[toy,toy_sft]", "run_name=producer")
    finally:
        RolloutProducer._roll_out = roll_out  # type: ignore[method-assign]


def refused(folder: Path, change: str) -> str:
    """What a run says whose configuration rank 1 alone has changed."""

    def differ(config: Any) -> None:
        if rank() == 1 and change == "differs":
            config.tenants["toy_sft"].head["lr"], config.seed = 0.5, 7
        if rank() == 1 and change == "wrong":
            config.tenants["toy_sft"].weight = 0.0

    try:
        run(folder, "+tenants=[toy_sft]", "run_name=refused", change=differ)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was noticed"


#: Runtimes of :func:`remembering`.
RUNS: list[Runtime] = []


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """Runtimes that are made inside are kept in :data:`RUNS`."""
    init = Runtime.__init__

    def remember(self: Runtime, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        RUNS.append(self)

    Runtime.__init__ = remember  # type: ignore[method-assign]
    try:
        yield
    finally:
        Runtime.__init__ = init  # type: ignore[method-assign]


@contextlib.contextmanager
def after_each_job(action: Callable[[Schedule, Any], None]) -> Iterator[None]:
    """``action(schedule, outcome)`` once a job has been completed."""
    complete = Schedule.complete

    def complete_and_act(self: Schedule, outcome: Any) -> None:
        complete(self, outcome)
        action(self, outcome)

    Schedule.complete = complete_and_act  # type: ignore[method-assign]
    try:
        yield
    finally:
        Schedule.complete = complete  # type: ignore[method-assign]


def interrupted(folder: Path) -> dict:
    """Rank 1 alone gets a SIGTERM after two jobs."""

    def kill(schedule: Schedule, outcome: Any) -> None:
        if schedule.tenancy.job_index == 2 and rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with after_each_job(kill):
        return run(folder, "+tenants=[toy_sft]", "run_name=interrupted", jobs=1000)


def schedule_differs(folder: Path) -> str:
    """Rank 1 thinks that it has trained something else."""
    lease = Tick._lease

    def forgetful(self: Tick, key: Any) -> Any:
        job = lease(self, key)
        if rank() == 1:
            self._schedule.update(b"something else")
        return job

    Tick._lease = forgetful  # type: ignore[method-assign]
    try:
        run(folder, "+tenants=[toy_sft]", "run_name=differs")
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        Tick._lease = lease  # type: ignore[method-assign]
    return "nothing was noticed"


def sent(folder: Path) -> dict:
    """Bytes that one rank put into the gradient collective, and the numbers of parameters and tensors of each head."""
    total, count, sum_gradients = [], [], Ranks.sum_gradients

    def counted(self: Ranks, flat: torch.Tensor) -> None:
        before = self.sent_bytes
        sum_gradients(self, flat)
        total.append(self.sent_bytes - before)

    Ranks.sum_gradients = counted  # type: ignore[method-assign]
    try:
        done = run(folder, "+tenants=[toy_sft]", "+tenant@tenants.idle=toy_sft", "run_name=sent")
    finally:
        Ranks.sum_gradients = sum_gradients  # type: ignore[method-assign]
    tensors = [v for k, v in done["payloads"]["toy_sft"]["tensors"].items() if k.startswith("head.")]
    count = [sum(t.numel() for t in tensors), len(tensors)]
    return {"bytes": total, "numel": count[0], "tensors": count[1]}


def resume(folder: Path, run_dir: str | None, max_jobs: int | None, *placement: str) -> dict:
    """Both tenants up to ``max_jobs``, from a checkpoint if ``run_dir`` is given."""

    def change(config: Any) -> None:
        config.ckpt_path, config.trainer.max_jobs = run_dir, max_jobs
        config.tenants["toy"].target_jobs = config.tenants["toy_sft"].target_jobs = 4

    return run(folder, "+tenants=[toy,toy_sft]", "run_name=resume", *placement, change=change)


def joins(folder: Path, *placement: str) -> dict:
    """After the first tenant's first job two more are asked for (sft and rl), one that cannot be built and a visitor,
    who is sent away once the first one is done."""
    asked, said = {}, {}
    extra = toy(folder, "+tenants=[toy,toy_sft]", "run_name=extra", jobs=2)
    visitor = copy.deepcopy(extra.tenants["toy_sft"])
    visitor.target_jobs = 10_000
    broken = copy.deepcopy(extra.tenants["toy_sft"])
    broken.head["_target_"] = f"{__name__}.NotOnRank1"

    def ask(schedule: Schedule, outcome: Any) -> None:
        orders, ranks = RUNS[-1].orders, schedule.shared.ranks
        if not ranks.first:
            return
        if not asked:
            tenants = {"late": extra.tenants["toy_sft"], "late_rl": extra.tenants["toy"], "visitor": visitor}
            asked.update({name: orders.join(name, tenant) for name, tenant in tenants.items()})
            if ranks.size > 1:
                asked["broken"] = orders.join("broken", broken)
        elif outcome.lease.job.tenant_id == "visitor" and "gone" not in asked:
            if schedule.tenancy.slots["first"].jobs_completed == 4:
                asked["gone"] = orders.leave("visitor")

    with after_each_job(ask), remembering():
        done = run(folder, "+tenant@tenants.first=toy_sft", "run_name=joins", *placement, jobs=4)
    for name, future in asked.items():
        said[name] = str(future.exception(timeout=1) or "done")
    visited = Path(done["summary"]["run_dir"]) / "tenants" / "visitor" / "latest"
    return {**done, "said": said, "visited": visited.is_file()}


class NotOnRank1(ChunkMLPHead):
    """Cannot be built on rank 1 (a test double)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if rank() == 1:
            raise OSError("no such file on rank 1")
        super().__init__(*args, **kwargs)


# ------------------------------------------------------------------------------------------------- under torchrun

#: The scenario ``sft``, as arguments of train.py.
SFT = (
    "+tenants=[toy_sft]",
    "logger=csv",
    "trainer.enable_progress_bar=false",
    "trainer.checkpoint_every_n_jobs=1",
    "tenants.toy_sft.target_jobs=3",
    "tenants.toy_sft.max_in_flight=1",
    "tenants.toy_sft.head.state_noise=0.0",
    *(f"tenants.toy_sft.dataset.{o}" for o in ("record.workers=1", "record.episodes=6", "batch_size=32")),
    "tenants.toy_sft.dataset.batches_per_job=4",
    *(f"tenants.toy_sft.eval.{o}" for o in ("episodes=5", "every_n_jobs=null", "at_start=false", "video=false")),
)
FAKE = (
    "backbone._target_=fakes.FakeBackbone",
    "~backbone.pretrained",
    "~backbone.blind",
    "~backbone.cached_instructions",
)


def train_py(folder: Path, *arguments: str) -> None:
    """The command line in this process."""
    no_pictures()
    os.chdir(ROOT)
    sys.argv = ["train.py", *arguments, f"output_dir={folder}/outputs", f"data_dir={folder.parent}/data"]
    runpy.run_path("train.py", run_name="__main__")


class AlwaysNaN(ChunkMLPHead):
    """A test double."""

    def loss(self, features, state, actions, is_pad):
        return {k: v * float("nan") for k, v in super().loss(features, state, actions, is_pad).items()}


class KilledOnce(ChunkMLPHead):
    """Its process on rank 1 is killed in its seventh loss (the second job), unless torchrun has started it again."""

    def loss(self, features, state, actions, is_pad):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 7 and rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(features, state, actions, is_pad)


def dies(folder: Path, *arguments: str) -> None:
    """The command line; rank 1 fails outside any tenant's part after its second job."""

    def fail(schedule: Schedule, outcome: Any) -> None:
        if schedule.tenancy.job_index == 2 and rank() == 1:
            raise MemoryError("rank 1 is out of memory")

    with after_each_job(fail):
        train_py(folder, *arguments)


def placement_bench(folder: Path, arguments: list[str]) -> None:
    """What torchrun starts for ``scripts/bench/placement.py``."""
    from scripts.bench import placement

    placement.work(placement._options(arguments), folder)


def no_pictures() -> None:
    """A report's pictures take seconds."""
    import nexus_lightning.trainer

    nexus_lightning.trainer.write_report = lambda run_dir: None


def several(folder: Path, *calls: tuple) -> dict[str, Any]:
    """Scenarios one after the other in the same ranks: ``(key, name, *args)``."""
    no_pictures()
    done = {}
    for key, name, *args in calls:
        print(f"=== {key} {time.strftime('%X')}", flush=True)
        done[key] = globals()[name](folder, *args)
    return done
