"""What a live run is asked to do with its tenants, at the same place between two jobs on every rank.

Rank 0 is asked, from any thread. What takes long (recording and opening a dataset, closing simulators) happens in
threads while the others train; the rest between two jobs, on all ranks in the same tick (:mod:`~.run.tick`)::

    join      rank 0 prepares --> order (plain data) --> others prepare --> all are done --> slots are built and started
    leave     order --> jobs fail, producers are asked to stop --> their threads have ended on all --> nothing is left
    pause     order --> the actor leaves its jobs alone; producers fill the queue up to their bound and wait
    resume    order --> as before the pause
    evaluate  order --> its present version is evaluated soon

What goes wrong on one rank undoes the join on all, and is what the caller's future raises.
"""

from __future__ import annotations

import itertools
import logging
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from nexus_lightning.checkpoint import resolve_payload
from nexus_lightning.config import ConfigError, TenantConfig, tenant_problems
from nexus_lightning.placement.plan import environment_ranks, needs_whole_backbone
from nexus_lightning.run.mailbox import RunEnded
from nexus_lightning.run.member import Member, Shared
from nexus_lightning.run.start import Stats, build_tenant, open_data, record_dataset
from nexus_lightning.run.tenancy import Tenancy
from nexus_lightning.tenant import TenantSlot

log = logging.getLogger(__name__)
T = TypeVar("T")
Verb = Literal["join", "leave", "pause", "resume", "evaluate"]


class OrderFailed(RuntimeError):
    """A tenant could not join or leave; the run goes on without a trace of the attempt."""


@dataclass(frozen=True)
class Order:
    """What rank 0 tells the others. ``join`` has the tenant's configuration."""

    number: int
    verb: Verb
    tenant: str
    config: TenantConfig | None = None


class Orders:
    """Orders of one rank; see the module docstring.

    Args:
        tenancy: who is there.
        shared: of the run.
        only_shards: this rank holds the backbone in shards only.
    """

    def __init__(self, tenancy: Tenancy, shared: Shared, only_shards: Callable[[], bool]) -> None:
        self.tenancy, self.shared, self.only_shards = tenancy, shared, only_shards
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._orders: dict[int, Order] = {}  # not completed
        self._prepared: dict[int, str | None] = {}  # ready to be completed here, or why not
        self._data: dict[int, Any] = {}  # of those: (dataset, statistics), or the producers that have ended
        self._futures: dict[int, Future[None]] = {}  # rank 0
        self._new: list[Order] = []  # rank 0: to be told to the others
        self._closed = False

    # ---- rank 0, any thread --------------------------------------------------------------------------------------

    def join(self, name: str, config: TenantConfig) -> Future[None]:
        """A tenant joins and begins to work. The future is done when it does.

        Raises:
            ConfigError: the tenant is not valid, or cannot live in this run.
            RunEnded: the run is over; so does the future when it ends before the tenant's turn.
            OrderFailed: (the future) it could not be built on some rank.
        """
        if problems := self._problems(name, config):
            raise ConfigError(problems)
        return self._order("join", name, config)

    def leave(self, name: str) -> Future[None]:
        """A tenant leaves: its policy is saved, nothing of it stays in memory.

        Raises:
            ValueError: there is no such tenant.
            RunEnded, OrderFailed: as for :meth:`join`.
        """
        self._known(name)
        return self._order("leave", name)

    def pause(self, name: str) -> Future[None]:
        """Its jobs wait until :meth:`resume`; raises as :meth:`leave`."""
        self._known(name)
        return self._order("pause", name)

    def resume(self, name: str) -> Future[None]:
        """Undo :meth:`pause`; raises as :meth:`leave`."""
        self._known(name)
        return self._order("resume", name)

    def evaluate(self, name: str) -> Future[None]:
        """Evaluate its present version soon, as ``eval`` of its configuration says. The future is done when it is asked
        for; the result comes with the metrics.

        Raises:
            ValueError: there is no such tenant, or it has nothing to be evaluated on.
            RunEnded, OrderFailed: as for :meth:`join`.
        """
        config = self._known(name).slot.spec.config
        if config.environment is None or not config.eval.episodes:
            raise ValueError(f"tenant {name!r} has no evaluation: it needs an environment and eval.episodes above 0")
        return self._order("evaluate", name)

    def _known(self, name: str) -> Member:
        members = self.tenancy.members
        if name not in members:
            raise ValueError(f"tenant {name!r} is not in this run; there are {', '.join(members) or 'none'}")
        return members[name]

    def _problems(self, name: str, config: TenantConfig) -> list[str]:
        config_of_run, key = self.shared.config, f"tenants.{name}"
        problems = tenant_problems(key, name, config, config_of_run)
        if name in self.tenancy.slots:
            problems.append(f"{key}: is there already; let it leave first, or choose another name")
        if config.init_from.recipe is not None:
            problems.append(f"{key}.init_from.recipe: a live run trains no recipes; give init_from.path")
        if config_of_run.placement.heads.shard > 1:
            problems.append(f"{key}: cannot join with placement.heads.shard={config_of_run.placement.heads.shard}")
        if self.only_shards() and needs_whole_backbone(replace(config_of_run, tenants={name: config})):
            problems.append(
                f"{key}: needs the backbone whole, and this run holds only shards of it; start it with a tenant that "
                "has rollouts, evaluations or stored features, or use features.reuse=never and eval.episodes=0 (sft)"
            )
        return problems

    def _order(self, verb: Verb, name: str, config: TenantConfig | None = None) -> Future[None]:
        assert self.shared.ranks.first, "rank 0 speaks for all"
        future: Future[None] = Future()
        with self._lock:
            if self._closed:
                raise RunEnded("the run has ended")
            if any(order.tenant == name for order in self._orders.values()):
                raise ValueError(f"tenant {name!r}: the order before this one is not done yet")
            order = Order(next(self._numbers), verb, name, config)
            self._orders[order.number], self._futures[order.number] = order, future
        if verb == "join":
            self._in_thread(order, self._open)
        else:
            self._tell(order)
        return future

    def _tell(self, order: Order) -> None:
        with self._lock:
            self._new.append(order)
        self.shared.scheduler.wake()

    # ---- preparation, in threads ---------------------------------------------------------------------------------

    def _in_thread(self, order: Order, action: Callable[[Order], Any]) -> None:
        threading.Thread(target=self._prepare, args=(order, action), name=f"{order.verb}-{order.tenant}").start()

    def _prepare(self, order: Order, action: Callable[[Order], Any]) -> None:
        error = None
        try:
            self._data[order.number] = action(order)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            log.warning("tenant %s: cannot %s\n%s", order.tenant, order.verb, traceback.format_exc())
        first = self.shared.ranks.first and order.verb == "join"
        with self._lock:
            if self._closed:
                return
            if first and error is not None:  # nobody else knows of it
                self._answer(order.number, error)
                return
            self._prepared[order.number] = error
        if first:
            self._tell(order)
        else:
            self.shared.scheduler.wake()

    def _open(self, order: Order) -> tuple[Any, Stats | None]:
        """The tenant's dataset and its statistics; rank 0 records it first when it is not there."""
        config, data_dir = order.config, self.shared.config.data_dir
        assert config is not None
        if self.shared.ranks.first:
            record_dataset(order.tenant, config, data_dir)
        return open_data(order.tenant, config, data_dir)

    # ---- every rank, between two jobs ----------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Tenants are on their way: the run does not end for want of work."""
        with self._lock:
            return bool(self._orders)

    def prepared(self) -> dict[int, str | None]:
        """Orders that this rank is ready to complete, or why it never will be."""
        with self._lock:
            return dict(self._prepared)

    def take_new(self) -> list[Order]:
        """Rank 0: orders that the others do not know yet."""
        with self._lock:
            new, self._new = self._new, []
        return new

    def begin(self, order: Order) -> None:
        """What rank 0 has told."""
        with self._lock:
            self._orders[order.number] = order
        if order.verb == "leave":
            leaving = self.tenancy.stop(order.tenant)

            def wait(order: Order) -> None:
                for producer in leaving:
                    producer.join()

            self._in_thread(order, wait)
        elif order.verb != "join":
            with self._lock:
                self._prepared[order.number] = None
            self.shared.scheduler.wake()
        elif not self.shared.ranks.first:  # which has prepared it already
            self._in_thread(order, self._open)

    def complete(self, number: int, errors: list[str | None]) -> None:
        """All ranks are ready, or some has said (``errors``, by rank) why it is not."""
        with self._lock:
            order = self._orders[number]
            self._prepared.pop(number, None)
        data, error = self._data.pop(number, None), _first(errors)
        if error is None and order.verb == "join":
            error = self._enter(order, *data)
        elif error is None:
            action = {"leave": self._remove, "evaluate": self._evaluate}.get(order.verb, self._set_paused)
            _, error = self._agreed(lambda: action(order))
        with self._lock:
            self._answer(number, error)

    def _answer(self, number: int, error: str | None) -> None:
        order, future = self._orders.pop(number), self._futures.pop(number, None)
        if future is not None and error is not None:
            future.set_exception(OrderFailed(f"tenant {order.tenant!r} cannot {order.verb}: {error}"))
        elif future is not None:
            future.set_result(None)

    def _enter(self, order: Order, dataset: Any, stats: Stats | None) -> str | None:
        tenancy, name = self.tenancy, order.tenant
        slot, error = self._agreed(lambda: self._build(order, stats))
        if slot is None or error is not None:
            self.shared.admission.release(name)
            return error
        self.shared.ranks.spread(slot.tensors().values())
        _, error = self._agreed(lambda: self._start(slot, dataset, stats))
        if error is not None and name in tenancy.slots:
            for producer in tenancy.stop(name):
                producer.join()
            tenancy.leave(name)
        return error

    def _build(self, order: Order, stats: Stats | None) -> TenantSlot:
        shared, config = self.shared, order.config
        assert config is not None
        start = None if config.init_from.path is None else resolve_payload(config.init_from.path)
        return build_tenant(order.tenant, config, shared.config.seed, shared.backbone, shared.admission, stats, start)

    def _start(self, slot: TenantSlot, dataset: Any, stats: Stats | None) -> None:
        shared, config = self.shared, slot.spec.config
        ranks = environment_ranks(shared.config, slot.name, config, shared.ranks.size)
        if ranks:
            shared.config.placement.environments[slot.name] = list(ranks)
        self.tenancy.join(slot)
        reader = None if dataset is None else shared.make_reader(slot, config, dataset, slot.passes)
        # statistics of a payload that it starts from stay
        self.tenancy.start(slot.name, config, reader, None if config.init_from.given else stats)
        self.tenancy.joined.add(slot.name)
        self.tenancy.left.discard(slot.name)

    def _set_paused(self, order: Order) -> None:
        self.tenancy.members[order.tenant].paused = order.verb == "pause"

    def _evaluate(self, order: Order) -> None:
        member = self.tenancy.members[order.tenant]
        if member.evaluator is not None:  # this rank runs some of its episodes
            member.evaluator.request(member.slot.policy_version)

    def _remove(self, order: Order) -> None:
        self.tenancy.end(order.tenant)
        self.tenancy.leave(order.tenant)
        self.tenancy.joined.discard(order.tenant)
        self.tenancy.left.add(order.tenant)
        self.shared.config.placement.environments.pop(order.tenant, None)

    def _agreed(self, action: Callable[[], T]) -> tuple[T | None, str | None]:
        """What ``action`` gave here, and what went wrong on the first rank on which something did."""
        value, error = None, None
        try:
            value = action()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            log.warning("a tenant cannot join or leave\n%s", traceback.format_exc())
        return value, _first(self.shared.ranks.gather(error))

    def close(self) -> None:
        """The run is over: whoever still waits is told so."""
        with self._lock:
            self._closed = True
            futures, self._futures = list(self._futures.values()), {}
        for future in futures:
            future.set_exception(RunEnded("the run has ended"))


def _first(errors: list[str | None]) -> str | None:
    """The lowest rank's, with the rank where there are several."""
    for rank, error in enumerate(errors):
        if error is not None:
            return error if len(errors) == 1 else f"{error} (on rank {rank})"
    return None
