"""Several ranks for tests: processes as torchrun starts them, with a watchdog.

``run_ranks`` forks them from a server that has imported the libraries once (half a minute, then nothing), gives them
torchrun's environment variables and one gloo group, and kills all of them at the deadline, printing what each said.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PRELOAD = ["torch", "lightning.pytorch", "torchrl.collectors", "torchrl.objectives", "lerobot.datasets.lerobot_dataset"]


def run_ranks(function: str, size: int, folder: Path, *args: Any, deadline_s: float = 240) -> list[Any]:
    """``module:name`` of a function ``(folder, *args)`` on ``size`` ranks; what it returned on each.

    Raises:
        AssertionError: a rank raised, died or was not done at the deadline; with everybody's output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "store").unlink(missing_ok=True)  # addresses of an earlier launch
    context = _context()
    processes = [
        context.Process(target=_rank, args=(function, rank, size, folder, args), name=f"rank-{rank}")
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + deadline_s
    while time.monotonic() < end and any(p.exitcode is None for p in processes):
        if any(p.exitcode not in (None, 0) for p in processes):  # the others wait for it in a collective
            end = min(end, time.monotonic() + 10)
        time.sleep(0.05)
    late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for process in processes:
        process.kill()
        process.join()
    codes = [process.exitcode for process in processes]
    said = "\n".join(f"--- rank {rank}\n{(folder / f'rank{rank}.log').read_text()[-8000:]}" for rank in range(size))
    assert not late and codes == [0] * size, f"{function}: exit codes {codes}, not done in time: {late}\n{said}"
    return [pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in range(size)]


def _context() -> Any:
    context = multiprocessing.get_context(os.environ.get("NX_RANKS", "forkserver"))  # fork: from a warm process
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    return context


def torchrun(function: str, folder: Path, *args: Any, max_restarts: int = 0, deadline_s: float = 120) -> str:
    """``module:name`` of a function on two ranks under torchrun's own agent; everything that was printed.

    As ``torchrun --standalone --nproc-per-node=2 --max-restarts=...``, with ranks that are forked from a process which
    has imported the libraries, where torchrun starts new ones.

    Raises:
        pytest.fail.Exception: not done at the deadline.
        AssertionError: the agent gave up, with what was printed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    process = _context().Process(target=_agent, args=(function, folder, args, max_restarts), name="agent")
    process.start()
    process.join(deadline_s)
    late = process.exitcode is None
    if late:
        os.killpg(process.pid, signal.SIGKILL)  # the agent's ranks, too
        process.join()
    said = (folder / "agent.log").read_text()
    if late:
        pytest.fail(f"{function}: not done after {deadline_s} s\n{said[-8000:]}")
    assert process.exitcode == 0, said
    return said


def _agent(function: str, folder: Path, args: tuple, max_restarts: int) -> None:
    os.setsid()
    _prepare(folder / "agent.log")
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        start_method="fork",
    )
    code = 0
    try:
        elastic_launch(config, _elastic_rank)(function, folder, args)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _elastic_rank(function: str, folder: Path, args: tuple) -> None:
    module, name = function.split(":")
    getattr(importlib.import_module(module), name)(folder, *args)


def _prepare(log: Path) -> None:
    """Output into ``log``, imports and threads as in the ranks of a run."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # not the test process's, which pytest may have replaced
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    for path in (ROOT, ROOT / "tests"):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    os.environ.update(HF_HUB_OFFLINE="1", MUJOCO_GL="osmesa", OMP_NUM_THREADS="1")
    import torch

    torch.set_num_threads(1)


def _rank(function: str, rank: int, size: int, folder: Path, args: tuple) -> None:
    _prepare(folder / f"rank{rank}.log")
    import torch.distributed as dist

    if size > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="1",  # not used: the group below is there already
            TORCHELASTIC_RUN_ID="none",
        )
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    module, name = function.split(":")
    code = 0
    try:
        result = getattr(importlib.import_module(module), name)(folder, *args)
        (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(result))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no atexit: threads of a rank that failed may hang in a collective
