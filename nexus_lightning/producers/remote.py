"""A tenant's collector in a Ray actor: TorchRL's RayCollector, one rollout or evaluation at a time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

from torchrl.collectors.distributed import RayCollector

from nexus_lightning.environment import SimulatorEnv
from nexus_lightning.inference.replicas import PolicyService, Replicas, Weights
from nexus_lightning.producers.evaluation import Episode, Evaluated
from nexus_lightning.producers.rollouts import Rollout, TenantCollector


class ActorCollector(TenantCollector):
    """What runs in the actor."""

    def __init__(self, *args: Any, torch_threads: int | None = None, **kwargs: Any) -> None:
        import torch

        if torch_threads is not None:
            torch.set_num_threads(torch_threads)
        super().__init__(*args, **kwargs)
        self._lost: list[str] = []
        self.simulators.on_lost = self._lost.append

    def answer(self, method: str, weights: Weights, *arguments: Any) -> tuple[Any, list[str]]:
        """What ``method`` gives with policies of ``weights``, and why it was begun again."""
        replicas = self.client.server
        assert isinstance(replicas, Replicas)
        replicas.hold(weights)
        self._lost.clear()
        return getattr(self, method)(*arguments), list(self._lost)


class RemoteCollector:
    """:class:`TenantCollector` on the cluster; its actor starts when it is first asked.

    An actor that is lost, with its machine or alone, is replaced and what it did is begun again, ``max_restarts``
    times: a rollout or an evaluation is a pure function of what it is asked for.

    Args:
        tenant: whose.
        make_env: makes the simulators, in the actor.
        service: makes the policy.
        weights: a policy version in Ray's object store.
        options: of the actor (``num_cpus`` ...).
        collector: arguments of :class:`ActorCollector`.
        max_restarts: of one rollout or evaluation.
        on_lost: told why something is begun again.
    """

    def __init__(
        self,
        tenant: str,
        make_env: Callable[[], SimulatorEnv],
        service: Callable[[], PolicyService],
        weights: Callable[[int], Weights],
        options: dict[str, Any],
        collector: dict[str, Any],
        max_restarts: int,
        on_lost: Callable[[str], object],
    ) -> None:
        self.tenant, self.weights, self.max_restarts, self.on_lost = tenant, weights, max_restarts, on_lost
        self._make_env, self._service, self._options, self._arguments = make_env, service, options, collector
        self._collector: RayCollector | None = None
        self._closed = False
        self._changing = threading.Lock()

    def collect(self, index: int, version: int) -> Rollout:
        """As :meth:`TenantCollector.collect`."""
        return self._ask("collect", self.weights(version), index, version)

    def evaluate(self, episodes: Sequence[Episode], version: int, record: Sequence[Episode]) -> Evaluated:
        """As :meth:`TenantCollector.evaluate`."""
        return self._ask("evaluate", self.weights(version), episodes, version, record)

    def close(self) -> None:
        """End the actor and with it its simulators, whatever they do; may be called from any thread, and twice."""
        with self._changing:
            self._closed = True
            if self._collector is not None:
                self._collector.shutdown()
                self._collector = None

    def _ask(self, method: str, weights: Weights, *arguments: Any) -> Any:
        import ray.exceptions

        for restarts in itertools.count():
            try:
                ((answer, lost),) = self._running().map_fn("answer", [(method, weights, *arguments)])
                for reason in lost:
                    self.on_lost(reason)
                return answer
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
                reason = f"tenant {self.tenant!r}: its collector is lost: {' '.join(str(error).split())}"
                if self._closed or restarts == self.max_restarts:
                    raise RuntimeError(reason) from None
                self.on_lost(reason)
                with self._changing:
                    if self._collector is not None:
                        self._collector.shutdown()
                        self._collector = None
        raise AssertionError("counts without end")

    def _running(self) -> RayCollector:
        with self._changing:
            if self._closed:
                raise RuntimeError(f"tenant {self.tenant!r}: its collector is closed")
            if self._collector is None:
                self._collector = RayCollector(
                    [self._make_env],
                    cast(Any, self._service()),
                    collector_class=cast(Any, ActorCollector),
                    collector_kwargs=dict(self._arguments),
                    remote_configs={"scheduling_strategy": "SPREAD", "max_restarts": 0, **self._options},
                    num_collectors=1,
                    frames_per_batch=1,  # the actor's own collector knows
                    sync=True,
                )
            return self._collector
