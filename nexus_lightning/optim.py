"""A tenant's optimizer and learning-rate schedule: any of torch's, by ``_target_``, and those that come along."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from hydra.utils import get_class
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler


def make_optimizer(
    optimizer: Mapping[str, Any],
    lr_scheduler: Mapping[str, Any],
    policy: Iterable[nn.Parameter],
    critic: Iterable[nn.Parameter] = (),
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """One group of parameters, and a second one where there is a critic; its schedule is stepped with the optimizer.

    Args:
        optimizer: ``_target_``, ``lr``, other arguments; ``value_lr``: of the critic, else ``lr``.
        lr_scheduler: ``_target_`` and arguments.
        policy: what is trained.
        critic: what is trained at the other rate.
    """
    extra = ("_target_", "value_lr")
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in optimizer.items() if k not in extra}
    groups: list[dict[str, Any]] = [{"params": [*policy], "lr": optimizer["lr"]}]
    if valued := [*critic]:
        groups.append({"params": valued, "lr": optimizer.get("value_lr") or optimizer["lr"]})
    made = get_class(optimizer["_target_"])(groups, **arguments)
    arguments = {k: v for k, v in lr_scheduler.items() if k != "_target_"}
    return made, get_class(lr_scheduler["_target_"])(made, **arguments)


class TenantAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019) that asks for an accelerator only where its parameters are on one.

    Before every step torch looks for a CUDA or XPU device, to warn about graph capture. On a machine without one the
    search costs 0.6 ms, a tenth of a small head's whole step.
    """

    def _accelerator_graph_capture_health_check(self) -> None:
        if self.param_groups[0]["params"][0].device.type != "cpu":
            super()._accelerator_graph_capture_health_check()


class Constant(LambdaLR):
    """The optimizer's rates, after a linear rise over ``warmup_steps`` optimizer steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, warmup_steps: int = 0) -> None:
        super().__init__(optimizer, lambda step: _warm_up(step, warmup_steps))


class Cosine(LambdaLR):
    """A rise over ``warmup_steps``, then half a cosine down to 0 at step ``total_steps``.

    ``total_steps``: of the tenant's workload, given by the run; None without one: there is no end to fall towards.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, total_steps: int | None, warmup_steps: int = 0) -> None:
        def factor(step: int) -> float:
            if step < warmup_steps or total_steps is None:
                return _warm_up(step, warmup_steps)
            progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
            return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

        super().__init__(optimizer, factor)


def _warm_up(step: int, warmup_steps: int) -> float:
    return (step + 1) / (warmup_steps + 1) if step < warmup_steps else 1.0
