"""Several ranks for tests: processes as torchrun starts them, with a watchdog.

``run_ranks`` forks them from a server that has imported the libraries once (half a minute, then nothing), gives them
torchrun's environment variables and one gloo group, and kills all of them at the deadline, printing what each said.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PRELOAD = ["torch", "lightning.pytorch", "torchrl.collectors", "torchrl.objectives", "lerobot.datasets.lerobot_dataset"]


def run_ranks(function: str, size: int, folder: Path, *args: Any, deadline_s: float = 240) -> list[Any]:
    """``module:name`` of a function ``(folder, *args)`` on ``size`` ranks; what it returned on each.

    Raises:
        AssertionError: a rank raised, died or was not done at the deadline; with everybody's output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context(os.environ.get("NX_RANKS", "forkserver"))  # fork: from a warm process
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(PRELOAD)
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


def _rank(function: str, rank: int, size: int, folder: Path, args: tuple) -> None:
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for path in (ROOT, ROOT / "tests"):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    os.environ.update(HF_HUB_OFFLINE="1", MUJOCO_GL="osmesa", OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
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
