"""What a training job minimises, per tenant: one algorithm a file, thin over ``torchrl.objectives``."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any

from nexus_lightning.objectives.base import AlgorithmSettings, Objective


@functools.cache
def shipped() -> dict[str, type[Objective]]:
    """Short name -> class of the algorithms in this folder; the name is that of the file."""
    found = {}
    for entry in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Objective) and value.__module__ == module.__name__:
                found |= {entry.name: value} if value.task else {}
    return found


def default_algorithm(task: str) -> type[Objective] | None:
    """What a tenant of a task trains by when it names nothing."""
    return next((cls for cls in shipped().values() if cls.task == task and cls.default), None)


def algorithm_of(tenant: Any) -> AlgorithmSettings:
    """Settings of a tenant's algorithm; null is the default of its task."""
    if tenant.algorithm is not None:
        return tenant.algorithm
    default = default_algorithm(tenant.task)
    assert default is not None, "validated with the config"
    return default.configure()
