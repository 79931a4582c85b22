"""Who this process is among the ranks of a run, and the collectives that they use.

Messages (Python objects, small tensors) go over a gloo group of their own. Gradients go over the default group: NCCL on
GPUs. With one rank every method answers at once and calls no collective.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

log = logging.getLogger(__name__)
T = TypeVar("T")

#: How long ranks wait while rank 0 records a dataset.
PREPARATION_TIMEOUT = timedelta(days=1)


class Ranks:
    """This process among the ranks of the run. With one rank every method answers at once and calls no collective.

    Attributes:
        rank / size: this process, and how many there are.
        local_size: how many there are on this machine.
        sent_bytes: of gradients that this rank has put into :meth:`sum_gradients` so far.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_size: int = 1) -> None:
        self.rank, self.size, self.local_size = rank, size, local_size
        self.sent_bytes = 0
        self._owns_group = False
        self._control: Any = None
        self._patient: Any = None

    @classmethod
    def join(cls, accelerator: str = "auto") -> Ranks:
        """Meet the other ranks that torchrun has started; with one process nothing happens.

        Before the configuration is looked at, so that what is wrong with one rank's is known to all.
        """
        size = int(os.environ.get("WORLD_SIZE", 1))
        if size == 1:
            return cls()
        ranks = cls(int(os.environ["RANK"]), size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
        if not dist.is_initialized():
            on_gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
            local = int(os.environ["LOCAL_RANK"])
            if on_gpu and local < torch.cuda.device_count():  # more ranks than devices are refused with the plan
                torch.cuda.set_device(local)
            dist.init_process_group("nccl" if on_gpu else "gloo", **_fresh_store())
            ranks._owns_group = True
        ranks._control = dist.new_group(backend="gloo")
        ranks._patient = dist.new_group(backend="gloo", timeout=PREPARATION_TIMEOUT)
        return ranks

    def leave(self) -> None:
        """End the process group, if :meth:`join` made it."""
        if self._owns_group:
            dist.destroy_process_group()
            self._owns_group = False

    @property
    def first(self) -> bool:
        """True on rank 0, which writes files and talks to the user."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Everybody's ``value`` by rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def decide(self, value: T, decide: Callable[[list[T]], Any]) -> Any:
        """Rank 0 makes one answer of everybody's ``value``; all get it (or rank 0's exception)."""
        if self.size == 1:
            return decide([value])
        values: list[Any] | None = [None] * self.size if self.first else None
        dist.gather_object(value, values, dst=0, group=self._control)
        answer = [self._attempt(lambda: decide(values)) if values is not None else None]
        return self._share(answer, self._control)

    def on_first(self, action: Callable[[], T]) -> T:
        """Rank 0 runs ``action``, however long it takes; all get what it returned (or raised)."""
        if self.size == 1:
            return action()
        return self._share([self._attempt(action) if self.first else None], self._patient)

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values of ``tensors`` on every rank, in place."""
        if self.size == 1:
            return
        for tensor in tensors:
            value = tensor.detach().cpu().contiguous()
            dist.broadcast(value, 0, group=self._control)
            if not self.first:
                tensor.copy_(value)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks of a small CPU tensor, in place."""
        if self.size > 1:
            dist.all_reduce(values, group=self._control)
        return values

    def most(self, value: int) -> int:
        """The largest of everybody's ``value``."""
        values = torch.tensor([value])
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._control)
        return int(values)

    def sum_gradients(self, flat: Tensor) -> None:
        """Sum over all ranks, in place, over the default group."""
        self.sent_bytes += flat.numel() * flat.element_size()
        dist.all_reduce(flat)

    @staticmethod
    def _attempt(action: Callable[[], Any]) -> tuple[Any, Exception | None]:
        try:
            return action(), None
        except Exception as error:
            return None, error

    @staticmethod
    def _share(answer: list[Any], group: Any) -> Any:
        dist.broadcast_object_list(answer, src=0, group=group)
        value, error = answer[0]
        if error is not None:
            raise error
        return value


def _fresh_store() -> dict[str, Any]:
    """Arguments of ``init_process_group`` that keep ranks which torchrun has started again from meeting the dead ones.

    torchrun's store outlives its ranks, and with it the addresses of those that died (pytorch#135712). On one machine
    the number of restarts tells the attempts apart. Machines count restarts each for themselves: there torchrun must
    not share its store (scripts/launch/torchrun.sh).
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shared or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) == 0:
        return {}
    if int(os.environ["GROUP_WORLD_SIZE"]) > 1:
        if os.environ["RANK"] == "0":
            log.warning("torchrun may fail to restart several machines: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
        return {}
    store, rank, size = next(rendezvous("env://"))
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    return {"store": PrefixStore(f"attempt_{attempt}", store), "rank": rank, "world_size": size}


@dataclass(frozen=True)
class Failure:
    """Why a tenant is taken out: reason and traceback."""

    reason: str
    details: str


def agreed_failures(by_rank: list[dict[str, Failure]]) -> dict[str, Failure]:
    """One failure per tenant: that of the lowest rank that has one, with the rank in its reason where there are
    several."""
    agreed: dict[str, Failure] = {}
    for rank, failures in enumerate(by_rank):
        for tenant, failure in failures.items():
            if tenant not in agreed:
                where = f" (on rank {rank})" if len(by_rank) > 1 else ""
                agreed[tenant] = Failure(f"{failure.reason}{where}", failure.details)
    return agreed
